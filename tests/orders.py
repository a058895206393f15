"""The golden bytes that the statements of layouts must give, and a strategy of any statement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from halfbyte.layouts import Atoms128x4, Columns, ExpertsOutPair, Gguf, Marlin, NPacked, Order, Trtllm
from helpers import golden


@dataclass(frozen=True)
class Plane:
    """A golden plane: the statement ``order`` of ModelOpt's ``input`` gives the bytes ``golden``."""

    name: str
    order: Order
    codes: bool = False

    def __str__(self) -> str:
        return f"{self.name} {'codes' if self.codes else 'scales'}"

    def source(self) -> Any:
        """(N, K/2) codes or (N, G) scales, u8."""
        letter = self.name[0]
        if letter == "E":
            return golden("layouts2")["E.weight_scale"]
        return golden("modelopt_f32")[f"{letter}.weight" if self.codes else f"{letter}.weight_scale"].view(np.uint8)

    def stored(self) -> Any:
        """The golden bytes, (bytes,) u8."""
        stored = golden("layouts2" if self.name[0] == "E" else "layouts")[self.name]
        if "gguf" in self.name:  # 4 scales, then 64 codes
            stored = stored.reshape(-1, 36)[:, 4:] if self.codes else stored.reshape(-1, 36)[:, :4]
        return np.ascontiguousarray(stored).reshape(-1).view(np.uint8)


PLANES = [
    *(Plane(f"{name}.scale_swizzled_128x4", Atoms128x4().scales) for name in "ABCD"),
    *(Plane(f"{name}.gguf_nvfp4", Gguf().codes, codes=True) for name in "ABD"),
    *(Plane(f"{name}.gguf_nvfp4", Gguf().scales) for name in "ABD"),
    Plane("D.T_bytes_K2xN", Columns().codes, codes=True),
    Plane("D.T_scale_K16xN", Columns().scales),
    Plane("C.T_bytes_K2xN_stride32", Columns(align=32).codes, codes=True),
    Plane("D.T_repacked_KxN2", NPacked().codes, codes=True),
    Plane("D.T_repacked_KxN2", ExpertsOutPair().codes, codes=True),
    Plane("D.marlin_qweight", Marlin().codes, codes=True),
    Plane("D.marlin_scale_order_raw_e4m3", Marlin().scales),
    Plane("E.marlin_scale_order_raw_e4m3", Marlin().scales),
    Plane("D.trtllm_shuffled_weight_tile128", Trtllm().codes, codes=True),
    Plane("D.trtllm_shuffled_scale_128x4", Trtllm().scales),
]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Any statement: up to four digits an axis, in any order in memory, some backwards, any one without a size."""
    axes = [[letter + str(i) for i in range(draw(st.integers(1, 4)))] for letter in "nk"]
    free = {draw(st.sampled_from(axis)) for axis in axes}
    memory = draw(st.permutations([*axes[0], *axes[1]]))
    backwards = draw(st.sets(st.sampled_from(memory)))
    sizes = {digit: draw(st.integers(1, 4)) for axis in axes for digit in axis if digit not in free}
    placed = " ".join(f"-{digit}" if digit in backwards else digit for digit in memory)
    return Order(f"({' '.join(axes[0])}) ({' '.join(axes[1])}) -> {placed}", **sizes)
