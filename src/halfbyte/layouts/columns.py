"""``columns``: whole bytes transposed, so that a matrix product reads rows of N; a byte still holds a pair along K.

Row r of codes starts at byte r * pitch, where the pitch is N rounded up to ``align``; the scales have the same pitch.
An odd N, as that of a vocabulary, needs an ``align`` of 16 for loads of 16 bytes. Several weights in one
transposed twin are ``pack(Weight.concat(parts), "columns")``, and ``"columns(kind=mxfp4)"`` of an ``Mxfp4Weight``.

``columns(align=1)``, drawn from its statement::

    codes (nibbles)  k n a p
        step   size  moves by
        1      2     +1 k
        2      N     +1 n
        2 * N  K/2   +2 k
        first: n0 k0, n0 k1, n1 k0, n1 k1, n2 k0, n2 k1, n3 k0, n3 k1
    scales (bytes)   k n a
        step  size  moves by
        1     N     +1 n
        N     K/16  +16 k
        first: n0 k0, n1 k0, n2 k0, n3 k0, n4 k0, n5 k0, n6 k0, n7 k0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halfbyte.layouts.base import KINDS, Kind, Layout
from halfbyte.layouts.order import Order


@dataclass(frozen=True)
class Columns(Layout):
    """Codes (K/2, pitch) bytes and scales (K/16, pitch), of MXFP4 (K/32, pitch).

    Args:
        align: the pitch is a multiple of it.
        kind: of the weights, "nvfp4" or "mxfp4".
    """

    name: ClassVar[str] = "columns"
    used_by: ClassVar[str] = "Atlas (transposed GEMM); ModelOpt's stacks of experts that lie transposed"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {"kind": KINDS}
    align: int = 1
    kind: Kind = "nvfp4"

    @property
    def codes(self) -> Order:
        return Order("(n a) (k p) -> k n a p", a=self.align, p=2)

    @property
    def scales(self) -> Order:
        return Order("(n a) k -> k n a", a=self.align)
