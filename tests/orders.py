"""Statements of layouts to come, with the golden bytes that each must give, and a strategy of any statement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from halfbyte.layouts import Order
from helpers import golden

ROWS = Order("n k -> n k")
ATOMS = Order("(nt q r) (kt c) -> nt kt r q c", q=4, r=32, c=4)

FUTURE: dict[str, tuple[Order, Order]] = {
    # name: (order of the codes, order of the scales); docs/formats: sections 2.6 and 3.2 to 3.5
    "atoms128x4": (ROWS, ATOMS),
    "atoms8x4": (ROWS, Order("(nt r) (kt c) -> nt kt r c", r=8, c=4)),
    "columns": (Order("n (k p) -> k n p", p=2), Order("n k -> k n")),
    "columns32": (Order("(n a) (k p) -> k n a p", a=32, p=2), Order("(n a) k -> k n a", a=32)),
    "npacked": (Order("(n p) k -> k n p", p=2), Order("n k -> k n")),
    "gguf": (Order("n (k h j) -> n k j h", h=2, j=8), ROWS),
    "marlin": (
        Order("(n j b c) (k rh t rl) -> k n c t j rl b rh", j=4, b=2, c=8, rh=2, t=4, rl=2),
        Order("(n ja jb jc i) k -> k n i ja jc jb", ja=2, jb=2, jc=2, i=8),
    ),
    "trtllm": (
        Order("(n a b) k -> n b a k", a=8, b=4),
        Order("(nt q a b) (kt c) -> nt kt b a q c", q=4, a=8, b=4, c=4),
    ),
}


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
    *(Plane(f"{name}.scale_swizzled_128x4", ATOMS) for name in "ABCD"),
    *(Plane(f"{name}.gguf_nvfp4", FUTURE["gguf"][0], codes=True) for name in "ABD"),
    *(Plane(f"{name}.gguf_nvfp4", ROWS) for name in "ABD"),
    Plane("D.T_bytes_K2xN", FUTURE["columns"][0], codes=True),
    Plane("D.T_scale_K16xN", FUTURE["columns"][1]),
    Plane("C.T_bytes_K2xN_stride32", FUTURE["columns32"][0], codes=True),
    Plane("D.T_repacked_KxN2", FUTURE["npacked"][0], codes=True),
    Plane("D.marlin_qweight", FUTURE["marlin"][0], codes=True),
    Plane("D.marlin_scale_order_raw_e4m3", FUTURE["marlin"][1]),
    Plane("E.marlin_scale_order_raw_e4m3", FUTURE["marlin"][1]),
    Plane("D.trtllm_shuffled_weight_tile128", FUTURE["trtllm"][0], codes=True),
    Plane("D.trtllm_shuffled_scale_128x4", FUTURE["trtllm"][1]),
]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Any statement: up to four digits an axis, in any order in memory."""
    axes = [[letter + str(i) for i in range(draw(st.integers(1, 4)))] for letter in "nk"]
    memory = draw(st.permutations([*axes[0], *axes[1]]))
    sizes = {digit: draw(st.integers(1, 4)) for axis in axes for digit in axis[1:]}
    return Order(f"({' '.join(axes[0])}) ({' '.join(axes[1])}) -> {' '.join(memory)}", **sizes)
