"""``gguf``: one buffer of blocks, each 64 codes of a row behind their 4 scales, as GGUF's type NVFP4.

Within 16 codes the low nibble of byte j is code j and the high nibble code j + 8: halves, not pairs.

``gguf``, drawn from its statement::

    needs K % 64 == 0
    blocks: in turn 4 of scales, 32 of codes
    scales (bytes)   n k
        step  size  moves by
        1     K/16  +16 k
        K/16  N     +1 n
        first: n0 k0, n0 k16, n0 k32, n0 k48, n0 k64, n0 k80, n0 k96, n0 k112
    codes (nibbles)  n k j h
        step       size  moves by
        1          2     +8 k
        2          8     +1 k
        16         K/16  +16 k
        16 * K/16  N     +1 n
        first: n0 k0, n0 k8, n0 k1, n0 k9, n0 k2, n0 k10, n0 k3, n0 k11
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halfbyte.layouts.base import Layout
from halfbyte.layouts.executors import Plane
from halfbyte.layouts.order import Order


@dataclass(frozen=True)
class Gguf(Layout):
    """36 bytes for 64 codes: 4 of scales, 32 of codes."""

    name: ClassVar[str] = "gguf"
    used_by: ClassVar[str] = "llama.cpp"

    @property
    def codes(self) -> Order:
        return Order("n (k h j) -> n k j h", h=2, j=8)

    @property
    def scales(self) -> Order:
        return Order("n k -> n k")

    @property
    def buffers(self) -> Mapping[str, Mapping[Plane, int]]:
        return {"blocks": {"scales": 4, "codes": 32}}

    @property
    def multiples(self) -> tuple[int, int]:
        return 1, 64
