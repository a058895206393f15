"""``experts_out_pair``: experts with K outermost; a byte holds two output features of one k, a tile 64 of them.

The codes are (K, N/2) bytes an expert, read in tiles of 64 output features (``halfbyte.layouts.Tiles``). The scales are
in one of two forms:

========  ==========================================================================================================
decode    (K/16, N): one for each block of 16 k, as the decode kernels read them; holds every weight
atom      tiles of 128x4 with a row for each k and a column for 16 n, as the matrix units read them; holds a weight
          exactly if each patch of 16 k and 16 n has one scale, and refuses others
========  ==========================================================================================================

``experts_out_pair(scale_form=decode)``, drawn from its statement::

    needs N % 64 == 0 and K % 16 == 0
    codes (nibbles)  k n
        step  size  moves by
        1     N     +1 n
        N     K     +1 k
        first: n0 k0, n1 k0, n2 k0, n3 k0, n4 k0, n5 k0, n6 k0, n7 k0
    scales (bytes)   k n
        step  size  moves by
        1     N     +1 n
        N     K/16  +16 k
        first: n0 k0, n1 k0, n2 k0, n3 k0, n4 k0, n5 k0, n6 k0, n7 k0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halfbyte.errors import LayoutError
from halfbyte.layouts.base import Layout, Packable, first_true
from halfbyte.layouts.order import Order
from halfbyte.numerics import BLOCK, Array, is_torch


@dataclass(frozen=True)
class ExpertsOutPair(Layout):
    """K-major codes, packed along N.

    Args:
        scale_form: "decode" or "atom".
    """

    name: ClassVar[str] = "experts_out_pair"
    used_by: ClassVar[str] = "TensorRT Edge-LLM (experts, decode and grouped GEMM)"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {"scale_form": ("decode", "atom")}
    scale_form: str = "decode"

    @property
    def codes(self) -> Order:
        return Order("n k -> k n")

    @property
    def scales(self) -> Order:
        if self.scale_form == "decode":
            return Order("n k -> k n")
        return Order("(nt c) (kt q r) -> kt nt r q c", c=4, q=4, r=32)

    @property
    def multiples(self) -> tuple[int, int]:
        return 64, BLOCK

    @property
    def scale_block(self) -> tuple[int, int]:
        return (1, BLOCK) if self.scale_form == "decode" else (BLOCK, 1)

    @property
    def refuses(self) -> str:
        more = ", block scales that differ within 16 rows" if self.scale_form == "atom" else ""
        return super().refuses + more

    def refuse(self, weight: Packable) -> str | None:
        reason = super().refuse(weight)
        if reason or self.scale_form == "decode":
            return reason
        differ = weight.scales != _spread(weight.scales[..., ::BLOCK, :], -2)
        if not bool(differ.any()):
            return None
        *expert, row, block = first_true(differ)
        first = row // BLOCK * BLOCK
        return (
            f"the block scale at {[*expert, row, block]} differs from that of row {first}, and the form atom has one "
            f"for rows {first}..{first + BLOCK - 1}; use scale_form=decode"
        )

    def to_stored(self, weight: Packable) -> tuple[Array, dict[str, Array]]:
        if self.scale_form == "decode":
            return weight.scales, {}
        return _spread(weight.scales[..., ::BLOCK, :], -1), {}

    def from_stored(self, scales: Array, extras: Mapping[str, Array]) -> Array:
        if self.scale_form == "decode":
            return scales
        blocks = scales[..., ::BLOCK]
        differ = scales != _spread(blocks, -1)
        if bool(differ.any()):
            *expert, column, k = index = first_true(differ)
            raise LayoutError(
                "a block of 16 k has several scales in the form atom, which no weight has",
                index=[*expert, column * BLOCK, k],
                got=int(scales[tuple(index)]),
                expected=int(blocks[(*expert, column, k // BLOCK)]),
            )
        return _spread(blocks, -2)


def _spread(a: Array, axis: int) -> Array:
    """Each entry 16 times along an axis."""
    return a.repeat_interleave(BLOCK, axis) if is_torch(a) else a.repeat(BLOCK, axis)
