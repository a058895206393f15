"""``npacked``: codes transposed one by one, so that a byte holds two output features of one k.

Not ``columns``, though both look like (K, N): there a byte holds two k of one output feature.

``npacked``, drawn from its statement::

    needs N % 2 == 0
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

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.layouts.base import Layout
from halfbyte.layouts.order import Order


@dataclass(frozen=True)
class NPacked(Layout):
    """Codes (K, N/2) bytes and scales (K/16, N)."""

    name: ClassVar[str] = "npacked"
    used_by: ClassVar[str] = "kernels that read pairs of output features"

    @property
    def codes(self) -> Order:
        return Order("n k -> k n")

    @property
    def scales(self) -> Order:
        return Order("n k -> k n")

    @property
    def multiples(self) -> tuple[int, int]:
        return 2, 1
