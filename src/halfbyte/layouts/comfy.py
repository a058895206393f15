"""``comfy``: ComfyUI's files: the even k in the high nibble, N and K padded to 16, scales in tiles of 128x4.

``comfy``, drawn from its statement::

    codes (nibbles)  n a k -p    padded: N to 16
        step      size  moves by
        1         2     -1 k
        2         K/2   +2 k
        2 * K/2   16    +1 n
        32 * K/2  N/16  +16 n
        first: n0 k1, n0 k0, n0 k3, n0 k2, n0 k5, n0 k4, n0 k7, n0 k6
    scales (bytes)   nt kt r q c    padded: N to 128 and K to 64
        step        size   moves by
        1           4      +16 k
        4           4      +32 n
        16          32     +1 n
        512         K/64   +64 k
        512 * K/64  N/128  +128 n
        first: n0 k0, n0 k16, n0 k32, n0 k48, n32 k0, n32 k16, n32 k32, n32 k48
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.layouts.base import Layout
from halfbyte.layouts.order import Order


@dataclass(frozen=True)
class Comfy(Layout):
    """Codes in rows, high nibble first, and swizzled scales."""

    name: ClassVar[str] = "comfy"
    used_by: ClassVar[str] = "ComfyUI (comfy-kitchen), FLUX.2"

    @property
    def codes(self) -> Order:
        return Order("(n a) (k p) -> n a k -p", a=16, p=2)

    @property
    def scales(self) -> Order:
        return Order("(nt q r) (kt c) -> nt kt r q c", q=4, r=32, c=4)
