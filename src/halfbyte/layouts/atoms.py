"""``atoms128x4`` and ``atoms8x4``: codes in rows, block scales in the tiles that matrix units read.

A tile of 128 rows and 4 blocks is 512 bytes: the 4 scales of a row lie together, and rows 0, 32, 64 and 96 side by
side. The 8x4 tiles are for few rows. Both are padded with zeros; each expert has padded tiles of its own.

``atoms128x4``, drawn from its statement::

    codes (nibbles)  n k
        step  size  moves by
        1     K     +1 k
        K     N     +1 n
        first: n0 k0, n0 k1, n0 k2, n0 k3, n0 k4, n0 k5, n0 k6, n0 k7
    scales (bytes)   nt kt r q c    padded: N to 128 and K to 64
        step        size   moves by
        1           4      +16 k
        4           4      +32 n
        16          32     +1 n
        512         K/64   +64 k
        512 * K/64  N/128  +128 n
        first: n0 k0, n0 k16, n0 k32, n0 k48, n32 k0, n32 k16, n32 k32, n32 k48

``atoms8x4``, drawn from its statement::

    codes (nibbles)  n k
        step  size  moves by
        1     K     +1 k
        K     N     +1 n
        first: n0 k0, n0 k1, n0 k2, n0 k3, n0 k4, n0 k5, n0 k6, n0 k7
    scales (bytes)   nt kt r c    padded: N to 8 and K to 64
        step       size  moves by
        1          4     +16 k
        4          8     +1 n
        32         K/64  +64 k
        32 * K/64  N/8   +8 n
        first: n0 k0, n0 k16, n0 k32, n0 k48, n1 k0, n1 k16, n1 k32, n1 k48
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.layouts.base import Layout
from halfbyte.layouts.order import Order


@dataclass(frozen=True)
class Atoms128x4(Layout):
    """Block scales in tiles of 128 rows and 4 blocks."""

    name: ClassVar[str] = "atoms128x4"
    used_by: ClassVar[str] = "cuBLAS, CUTLASS, FlashInfer, TensorRT-LLM, torchao (swizzled scales)"

    @property
    def codes(self) -> Order:
        return Order("n k -> n k")

    @property
    def scales(self) -> Order:
        return Order("(nt q r) (kt c) -> nt kt r q c", q=4, r=32, c=4)


@dataclass(frozen=True)
class Atoms8x4(Layout):
    """Block scales in tiles of 8 rows and 4 blocks."""

    name: ClassVar[str] = "atoms8x4"
    used_by: ClassVar[str] = "TensorRT-LLM and FlashInfer, few rows"

    @property
    def codes(self) -> Order:
        return Order("n k -> n k")

    @property
    def scales(self) -> Order:
        return Order("(nt r) (kt c) -> nt kt r c", r=8, c=4)
