"""``fragments``: codes in the order of tensor-core fragments, the bits of a word where 16-bit floats have theirs.

A tile of 16 n and 64 k is 128 words and 64 scales. Word (g, kt, c) holds 8 codes: row ``8 rh + g`` and column
``16 kt + 8 h + 2 c + p`` for rh, h and p of 0 and 1. Output ``2 h + rh`` of a word is the OR of
``rotl(word, rotate) & mask`` over that output's ``STEPS``: two 16-bit floats, p = 0 in the low half, each a code times
``CODE``. There are no fewer operations for either dtype: a code of bfloat16 has its bits at 15, 8, 7 and 6, one of
float16 at 15, 11, 10 and 9, and neither four turns of the one nor five of the other fill a word.

A block scale is stored as S0E5M3, the byte ``half(scale * 2^7) >> 7``. With ``shift, base = SCALE``, ``base | byte <<
shift`` is the scale in 16 bits, times 2^119 for bfloat16 and 2^7 for float16. A code times a scale is then the value
times 2^-7, exactly, and ``FACTOR`` makes up for that.

A byte of 0 is no zero in bfloat16: codes of blocks whose scale is 0 are packed as 0 there, and come back as 0.

``fragments(dtype=bfloat16)``, drawn from its statement::

    codes (nibbles)  t u g kt c p rh h    padded: N to 16 and K to 64
        step         size  moves by
        1            2     +8 k
        2            2     +8 n
        4            2     +1 k
        8            4     +2 k
        32           4     +16 k
        128          8     +1 n
        1024         K/64  +64 k
        1024 * K/64  N/16  +16 n
        first: n0 k0, n0 k8, n8 k0, n8 k8, n0 k1, n0 k9, n8 k1, n8 k9
        their bits, the lowest first: 0 1 2 9, 4 5 6 13, 26 27 28 3, 30 7 8 15,
            16 17 18 25, 20 21 22 29, 10 11 12 19, 14 23 24 31
    scales (bytes)   t u g kt rh    padded: N to 16 and K to 64
        step       size  moves by
        1          2     +8 n
        2          4     +16 k
        8          8     +1 n
        64         K/64  +64 k
        64 * K/64  N/16  +16 n
        first: n0 k0, n8 k0, n0 k16, n8 k16, n0 k32, n8 k32, n0 k48, n8 k48
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np

from halfbyte import decode_cuda
from halfbyte.decode import by_triton
from halfbyte.errors import LayoutError
from halfbyte.layouts.base import Layout, Packable, Packed, first_true
from halfbyte.layouts.blocks import largest, recoded
from halfbyte.layouts.order import Order
from halfbyte.numerics import U8, Array, is_torch

Step: TypeAlias = tuple[int, int]
"""(rotate, mask): ``rotl(word, rotate) & mask``."""

STEPS: Final[Mapping[str, tuple[tuple[Step, ...], ...]]] = {
    "bfloat16": (
        ((6, 0x81C081C0),),
        ((12, 0x81C081C0),),
        ((2, 0x81C081C0),),
        ((0, 0x81808180), (8, 0x00400040)),
    ),
    "float16": (
        ((9, 0x8E008E00),),
        ((6, 0x8E008E00),),
        ((0, 0x8C008C00), (29, 0x02000200)),
        ((2, 0x86008600), (29, 0x08000800)),
    ),
}
"""Of each of the four outputs of a word: what their OR is of."""
PLACES: Final[Mapping[str, tuple[int, int, int, int]]] = {"bfloat16": (6, 7, 8, 15), "float16": (9, 10, 11, 15)}
"""Where a code has its bits in a 16-bit float, the lowest first."""
CODE: Final[Mapping[str, float]] = {"bfloat16": 2.0**-126, "float16": 2.0**-14}
"""What a code of 1 is as such a float."""
SCALE: Final[Mapping[str, tuple[int, int]]] = {"bfloat16": (4, 0x7000), "float16": (7, 0)}
"""(shift, base): ``base | byte << shift`` is a scale as a 16-bit float."""
FACTOR: Final = 2.0**7
"""What a sum of such codes times such scales is multiplied by, beside scale2."""


@dataclass(frozen=True)
class Fragments(Layout):
    """The order that this library's GPU kernels read.

    Args:
        dtype: of the activations, "bfloat16" or "float16": where the bits of a word lie.
    """

    name: ClassVar[str] = "fragments"
    used_by: ClassVar[str] = "halfbyte's CUDA kernels (W4A16)"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {"dtype": tuple(STEPS)}
    dtype: str = "bfloat16"

    @property
    def codes(self) -> Order:
        return _codes(self.dtype)

    @property
    def scales(self) -> Order:
        return _SCALES

    @property
    def zero_blocks(self) -> Literal["kept", "canonical"]:
        return "canonical" if self.dtype == "bfloat16" else "kept"

    @property
    def form(self) -> decode_cuda.Form:
        """The layout as constants of the kernel that decodes CUDA tensors."""
        return decode_cuda.fragments(self.dtype, STEPS[self.dtype], SCALE[self.dtype])

    def dequantize(self, packed: Packed, dtype: Any = "float32") -> Array:
        buffers = packed.buffers()
        if is_torch(buffers["codes"]) and by_triton(*buffers.values()):
            return decode_cuda.decode(self.form, buffers, packed.shape, dtype)
        return super().dequantize(packed, dtype)

    def to_stored(self, weight: Packable) -> tuple[Array, dict[str, Array]]:
        return recoded(_STORED, weight.scales), {}

    def from_stored(self, scales: Array, extras: Mapping[str, Array]) -> Array:
        read = recoded(_READ, scales)
        if largest(read) == _NONE:
            index = first_true(read == _NONE)
            byte = int(scales[tuple(index)])
            raise LayoutError(f"the stored block scale at {index} is no positive E4M3 number", got=f"byte {byte:02X}")
        return read


_SCALES: Final = Order("(t rh g) (u kt) -> t u g kt rh", rh=2, g=8, kt=4)


@cache
def _codes(dtype: str) -> Order:
    pattern = "(t rh g) (u kt h c p) -> t u g kt c p rh h"
    return Order(pattern, bits=_bits(dtype), rh=2, g=8, kt=4, h=2, c=4, p=2)


def _bits(dtype: str) -> tuple[int, ...]:
    """Where each bit of a word of codes p, rh, h lies, by ``STEPS``."""
    found = []
    for p in (0, 1):
        for rh in (0, 1):
            for h in (0, 1):
                for place in PLACES[dtype]:
                    at = place + 16 * p
                    (rotate,) = (rotate for rotate, mask in STEPS[dtype][2 * h + rh] if mask >> at & 1)
                    found.append((at - rotate) % 32)
    return tuple(found)


_NONE: Final = 0xFF
_BYTES: Final = np.arange(256, dtype=np.uint8)


def _scaled(a: U8, factor: float) -> U8:
    """Bytes that are float16s but for the sign and the last 7 bits, multiplied; E4M3 bytes are that times 2^-8."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = (a.astype(np.uint16) << 7).view(np.float16) * np.float16(factor)
    return (half.view(np.uint16) >> 7).astype(np.uint8)


def _inverse(stored: U8) -> U8:
    """The E4M3 byte of each S0E5M3 byte; ``_NONE`` where there is none."""
    read = np.full(256, _NONE, np.uint8)
    read[stored[:0x7F]] = _BYTES[:0x7F]
    return read


_STORED: Final = _scaled(_BYTES, 2.0**15)
"""The S0E5M3 byte of each E4M3 byte that is positive or 0."""
_READ: Final = _inverse(_STORED)
