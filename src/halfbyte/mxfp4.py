"""MXFP4 as NVFP4: the scale 2^e of 32 codes becomes two block scales 2^(e - k) under scale2 = 2^k.

Codes stay as they are. E4M3 holds the powers of two from 2^-9 to 2^8, so the cast is exact if the exponents of
blocks with a non-zero code span at most 17; -0 counts as zero. Blocks without such a code get the nearest scale
in range. The functions take NumPy arrays, (..., N, K/2) u8 codes with (..., N, K/32) u8 E8M0 bytes, and may be
given chunks of rows: spans combine by min and max, and squared errors by addition.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from halfbyte.errors import WeightError
from halfbyte.numerics import (
    BLOCK,
    E2M1_PAIRS,
    E2M1_VALUES,
    MX_BLOCK,
    U8,
    encode_e2m1,
    encode_e4m3,
    is_torch,
    pack_nibbles,
    unpack_nibbles,
)
from halfbyte.weight import LossyWarning, Mxfp4Weight, Weight, to_numpy

__all__ = ["SPAN", "Span", "cast", "cast_scales", "exponents", "scale2_exponent", "share", "squared_error", "to_nvfp4"]

Span = tuple[int, int]
"""The smallest and the largest exponent e of blocks with a non-zero code."""

_BIAS: Final = 127
_LOWEST, _HIGHEST = -9, 8  # exponents of E4M3's powers of two
SPAN: Final = _HIGHEST - _LOWEST
"""The largest difference of exponents that one scale2 holds exactly."""
_SMALLEST_NORMAL: Final = -126


def _rounded_bytes() -> U8:
    """(6, 256) u8: each byte of codes divided by 2^row and rounded; from row 5 on all magnitudes are 0."""
    both = unpack_nibbles(np.arange(256, dtype=np.uint8)[:, None])
    magnitudes = np.stack([encode_e2m1(E2M1_VALUES[:8] / np.float32(2**row)) for row in range(6)])
    return pack_nibbles(magnitudes[:, both & np.uint8(7)] | (both & np.uint8(8)))[..., 0]


_ROUNDED = _rounded_bytes()
_LOST: npt.NDArray[np.float32] = np.square(
    E2M1_PAIRS - E2M1_PAIRS[_ROUNDED] * np.ldexp(np.float32(1), np.arange(6))[:, None, None]
).sum(-1)
"""(6, 256) f32, exact: the squared error of each entry of _ROUNDED, in units of the scale; row 5 has the squares."""


def exponents(codes: U8, scales: U8, first_row: int = 0) -> Span | None:
    """The span of exponents over blocks with a non-zero code.

    Args:
        codes: (..., N, K/2) u8.
        scales: (..., N, K/32) u8.
        first_row: the row of the whole weight that a chunk begins with, for the index in an error.

    Returns:
        (lo, hi), or None where every code is zero.

    Raises:
        WeightError: a NaN scale, with the index [..., row, block] of the first.
    """
    _refuse_nan(scales, first_row)
    used = scales[_nonzero(codes)]
    return (int(used.min()) - _BIAS, int(used.max()) - _BIAS) if used.size else None


def scale2_exponent(lo: int, hi: int, lossy: bool = False) -> int:
    """The exponent k of scale2 = 2^k for a span: hi - 8, but not below -126.

    That puts the largest block scale at 2^8 and the others as far above E4M3's subnormals as can be. A k
    below -126 would make scale2 a subnormal float32, which engines flush to zero; -126 is exact there too,
    since no e is below -127.

    Raises:
        WeightError: the span is above 17 and ``lossy`` is false.
    """
    if hi - lo > SPAN and not lossy:
        raise WeightError(
            "the MXFP4 scales are too far apart for one scale2",
            got=f"2^{lo} to 2^{hi}, a span of {hi - lo}",
            expected=f"a span of at most {SPAN}",
            hint="pass --lossy (lossy=True in Python) to round the codes of the smallest blocks",
        )
    return max(hi - _HIGHEST, _SMALLEST_NORMAL)


def share(spans: Sequence[Span | None]) -> int | None:
    """One k that keeps every span exact, as fused parts need it, or None if there is none; 0 if all codes are zero."""
    known = [span for span in spans if span is not None]
    if not known:
        return 0
    lo, hi = min(span[0] for span in known), max(span[1] for span in known)
    return scale2_exponent(lo, hi) if hi - lo <= SPAN else None


def cast(codes: U8, scales: U8, k: int) -> tuple[U8, U8]:
    """The NVFP4 codes and block scales of a weight or a chunk of rows, under scale2 = 2^k.

    Blocks with e - k below -9 get the smallest block scale, 2^-9, and their codes are rounded to it: to nearest,
    ties to even, keeping the sign of zeros. All other codes stay; ``codes`` itself is returned if all do.

    Returns:
        (..., N, K/2) u8 codes and (..., N, K/16) u8 E4M3FN scales.

    Raises:
        WeightError: a NaN scale, or a block with a non-zero code and e - k above 8.
    """
    _refuse_nan(scales)
    above = scales.astype(np.int16) > k + _HIGHEST + _BIAS
    if above.any() and (above & _nonzero(codes)).any():
        raise WeightError("scale2 is too small for the MXFP4 scales", got=f"2^{k}")
    halves = cast_scales(scales, k)
    rounds = _rounds(scales, k)
    low = rounds > 0
    if low.any():
        low &= _nonzero(codes)
    if not low.any():
        return codes, halves
    blocks = codes.reshape(*scales.shape, MX_BLOCK // 2).copy()
    blocks[low] = _ROUNDED[rounds[low][:, None], blocks[low]]
    return blocks.reshape(codes.shape), halves


def cast_scales(scales: U8, k: int) -> U8:
    """(..., K/32) u8 E8M0 scales as (..., K/16) E4M3FN ones under scale2 = 2^k, the nearest where it has none."""
    shift = np.clip(np.arange(256) - _BIAS - k, _LOWEST, _HIGHEST)
    table = encode_e4m3(np.ldexp(np.float32(1), shift))
    return np.repeat(np.take(table, scales), MX_BLOCK // BLOCK, -1)


def squared_error(codes: U8, scales: U8, k: int) -> tuple[float, float]:
    """What ``cast`` loses: the sum of squared errors, and that of the squared values, in float64.

    Raises:
        WeightError: a NaN scale.
    """
    _refuse_nan(scales)
    blocks, rounds = codes.reshape(*scales.shape, MX_BLOCK // 2), _rounds(scales, k)
    unit = np.ldexp(1.0, 2 * (scales.astype(np.int32) - _BIAS))
    low = rounds > 0
    lost = (_LOST[rounds[low][:, None], blocks[low]].sum(-1) * unit[low]).sum()
    return float(lost), float((np.take(_LOST[5], blocks).sum(-1) * unit).sum())


def to_nvfp4(weight: Mxfp4Weight, lossy: bool = False) -> Weight:
    """The whole weight as NVFP4, with one scale2 for each expert; 1 where all codes are zero.

    Args:
        weight: NumPy or torch; the result is of the same library.
        lossy: accept spans above 17; a LossyWarning states the relative Frobenius error if any code changed value.

    Raises:
        WeightError: a NaN scale, or a span above 17 without ``lossy``; the index begins with the expert.
    """
    codes, scales = to_numpy(weight.codes), to_numpy(weight.scales)
    *experts, _, k = weight.shape
    scale2 = np.ones((*experts, 1, 1), np.float32)
    out_codes, out_scales = np.empty_like(codes), np.empty((*scales.shape[:-1], scales.shape[-1] * 2), np.uint8)
    lost = total = 0.0
    for at in np.ndindex(*experts):
        try:
            span = exponents(codes[at], scales[at])
            exponent = 0 if span is None else scale2_exponent(*span, lossy)
        except WeightError as error:
            error.index = [*at, *(error.index or [])] or None
            raise
        scale2[at] = 2.0**exponent
        out_codes[at], out_scales[at] = cast(codes[at], scales[at], exponent)
        if lossy:
            more = squared_error(codes[at], scales[at], exponent)
            lost, total = lost + more[0], total + more[1]
    if lost:
        warnings.warn(
            f"the cast of MXFP4 to NVFP4 rounded codes: relative error {(lost / total) ** 0.5:.3g}",
            LossyWarning,
            stacklevel=2,
        )
    blocks = -(-k // BLOCK)  # the second half of the last 32 may be padding alone
    made = Weight(codes=out_codes[..., : blocks * BLOCK // 2], scales=out_scales[..., :blocks], scale2=scale2, k=k)
    return made.torch(weight.codes.device) if is_torch(weight.codes) else made


def _refuse_nan(scales: U8, first_row: int = 0) -> None:
    nan = scales == 255
    if nan.any():
        *outer, row, block = (int(i) for i in np.unravel_index(int(nan.argmax()), nan.shape))
        raise WeightError("a scale of MXFP4 is NaN (FF)", index=[*outer, first_row + row, block])


def _nonzero(codes: U8) -> npt.NDArray[np.bool_]:
    """(..., N, K/32): whether a block has a code other than 0 and -0."""
    words = np.ascontiguousarray(codes).view(np.uint64) & np.uint64(0x7777777777777777)
    nonzero: npt.NDArray[np.bool_] = (words[..., 0::2] | words[..., 1::2]) != 0
    return nonzero


def _rounds(scales: U8, k: int) -> npt.NDArray[Any]:
    """(..., N, K/32): how many powers of two a block lies below the smallest block scale, 0 to 5."""
    return np.clip(k + _LOWEST + _BIAS - scales.astype(np.int16), 0, 5)
