"""Powers of two moved between block scales and scale2: exactly, or not at all.

With p > 0, scale2 grows by 2^p and each block scale shrinks by it. A scale keeps its value if the shrunken one is an
E4M3FN number; 00 and 80 always do, and NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import to_numpy, to_torch
from halfbyte.errors import WeightError
from halfbyte.numerics import E4M3_VALUES, F32, Array, decode_e4m3, encode_e4m3, is_torch, lookup

_WIDEST = 18
"""No E4M3FN number but 0 stands a larger shift: they span 2^-9 to 448."""

_FREE = 1000
"""A shift that a zero or a NaN stands; it exceeds all differences between exponents of float32."""


def _tables() -> tuple[Any, Any]:
    """(37, 256) u8 and bool: for p = -18..18 and each byte, the byte of scale * 2^-p, and whether it is exact."""
    p = np.arange(-_WIDEST, _WIDEST + 1)[:, None]
    wanted = np.ldexp(E4M3_VALUES, -p)
    shifted = encode_e4m3(wanted)
    fixed = np.isnan(E4M3_VALUES) | (E4M3_VALUES == 0)
    return np.where(fixed, np.arange(256, dtype=np.uint8), shifted), fixed | (decode_e4m3(shifted) == wanted)


_SHIFTED, _EXACT = _tables()
_ALL = _EXACT.all(0)
_LOWEST = np.where(_ALL, -_FREE, _EXACT.argmax(0) - _WIDEST).astype(np.int16)
_HIGHEST = np.where(_ALL, _FREE, _WIDEST - _EXACT[::-1].argmax(0)).astype(np.int16)
"""(256,) each: the smallest and the largest exact p of a byte; all between are exact, too."""


def shift_scales(scales: Array, p: npt.NDArray[np.int64]) -> Array:
    """Block scales times 2^-p.

    Args:
        scales: (*E, N, G) u8, NumPy or torch.
        p: (*E, 1, 1) or (*E, N, 1).

    Raises:
        WeightError: a scale that would round, with the index of the first.
    """
    row = (np.clip(p, -_WIDEST, _WIDEST) + _WIDEST).astype(np.int32) * 256
    index = (to_torch(row, scales.device) if is_torch(scales) else row) + scales
    if not bool(lookup(_EXACT.reshape(-1), index).all()):
        first = [int(i) for i in np.argwhere(~np.take(_EXACT, to_numpy(index)))[0]]
        byte = int(to_numpy(scales)[tuple(first)])
        moved = int(np.broadcast_to(p, scales.shape)[tuple(first)])
        raise WeightError(
            f"2^{moved} cannot move from a block scale into scale2: it would round",
            index=first,
            got=f"the scale {E4M3_VALUES[byte]:g} (byte {byte:02X})",
            expected=f"p within {_LOWEST[byte]}..{_HIGHEST[byte]} for this block",
        )
    return lookup(_SHIFTED.reshape(-1), index)


def shift_scale2(scale2: Array, p: npt.NDArray[np.int64]) -> Array:
    """``scale2 * 2^p``, in scale2's library; WeightError where that is not exact."""
    plain = to_numpy(scale2)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        shifted = np.ldexp(plain, p)
        back = np.ldexp(shifted, -p)
    wrong = ~((back == plain) | np.isnan(plain))
    if wrong.any():
        index = [int(i) for i in np.argwhere(wrong)[0]]
        raise WeightError("scale2 leaves the range of float32", index=index, got=f"{plain[tuple(index)]:g} times 2^p")
    return to_torch(shifted, scale2.device) if is_torch(scale2) else shifted


def common_exponents(scales: list[Array], exponents: list[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """The exponent of scale2 that parts can share.

    Args:
        scales: (*E, N, G) u8 of each part, NumPy or torch.
        exponents: (*E, 1, 1) or (*E, N, 1), the exponents of each part's scale2.

    Returns:
        (*E, 1, 1): of those that are exact for all, the nearest to the largest present; that one itself where none is.
    """
    top = np.max([e.max(-2, keepdims=True) for e in exponents], 0)
    low, high = top - _FREE, top + _FREE
    for part, e in zip(scales, exponents, strict=True):
        lowest = to_numpy(lookup(_LOWEST, part)).astype(np.int64).max(-1, keepdims=True, initial=-_FREE)
        highest = to_numpy(lookup(_HIGHEST, part)).astype(np.int64).min(-1, keepdims=True, initial=_FREE)
        low = np.maximum(low, (e + lowest).max(-2, keepdims=True))
        high = np.minimum(high, (e + highest).min(-2, keepdims=True))
    shared: npt.NDArray[np.int64] = np.where(low <= high, np.clip(top, low, high), top)
    return shared


def mantissas(scale2: F32) -> tuple[F32, npt.NDArray[np.int64]]:
    """(m, e) with ``scale2 == m * 2^e`` and 0.5 <= abs(m) < 1, or m = 0."""
    m, e = np.frexp(scale2)
    return m, e.astype(np.int64)
