"""The numbers of NVFP4: E2M1 codes, E4M3FN block scales, and E8M0 for MXFP4.

This file defines the format; every kernel and every test is held to it.

========  ====  =========================================================  ==========
name      bits  values                                                     largest
========  ====  =========================================================  ==========
E2M1      4     0 0.5 1 1.5 2 3 4 6, sign in bit 3                         6
E4M3FN    8     bias 7; subnormal step 2^-9; 7F and FF are NaN; no Inf     448
E8M0      8     2^(byte - 127); FF is NaN                                  2^127
========  ====  =========================================================  ==========

All rounding is to nearest, ties to the even code, with saturation at the largest value.
Sources: OCP Microscaling Formats (MX) 1.0, sections 5.3.1 to 5.4.1, and OCP 8-bit floating point 1.0.
"""

from __future__ import annotations

import sys
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = Any
"""A NumPy array or a torch tensor. One function call never mixes them."""

U8: TypeAlias = npt.NDArray[np.uint8]
F32: TypeAlias = npt.NDArray[np.float32]

BLOCK: Final = 16
"""Codes along K that share one block scale."""

MX_BLOCK: Final = 32
"""The same for MXFP4."""

E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
FULL_SCALE: Final = E2M1_MAX * E4M3_MAX
"""2688, the largest product of a code and a block scale: scale2 is nominally amax / 2688."""


def _e4m3_table() -> F32:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).astype(np.float64)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
    magnitude[(byte & 127) == 127] = np.nan
    table: F32 = np.where(byte >= 128, -magnitude, magnitude).astype(np.float32)
    return table


def _e8m0_table() -> F32:
    table = np.exp2(np.arange(256) - 127.0)
    table[255] = np.nan
    rounded: F32 = table.astype(np.float32)
    return rounded


_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_VALUES: Final[F32] = np.array(_POSITIVE + [-v for v in _POSITIVE], np.float32)
"""(16,) f32: the value of each code."""
E4M3_VALUES: Final[F32] = _e4m3_table()
"""(256,) f32: the value of each E4M3FN byte."""
E8M0_VALUES: Final[F32] = _e8m0_table()
"""(256,) f32: the value of each E8M0 byte."""
E2M1_PAIRS: Final[F32] = np.stack([np.tile(E2M1_VALUES, 16), np.repeat(E2M1_VALUES, 16)], 1)
"""(256, 2) f32: the two values of each byte of codes, low nibble first."""

_PAIRS_AS_WORDS = E2M1_PAIRS.view(np.int64)[:, 0]  # one 8-byte gather instead of a row copy: 3x faster

for _table in (E2M1_VALUES, E4M3_VALUES, E8M0_VALUES, E2M1_PAIRS):
    _table.setflags(write=False)


def is_torch(x: object) -> bool:
    """Whether ``x`` is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def lookup(table: npt.NDArray[Any], index: Array) -> Array:
    """``table[index]`` for a table of one axis and a u8 index of any shape, NumPy or torch."""
    if not is_torch(index):
        return np.take(table, index)
    import torch

    on_device = torch.tensor(table, device=index.device)
    return on_device.index_select(0, index.reshape(-1).to(torch.int32)).view(index.shape)


def decode_e2m1(packed: Array) -> Array:
    """Decode packed codes, (..., K/2) u8 with even k in the low nibble, to (..., K) f32."""
    words = lookup(_PAIRS_AS_WORDS, packed)
    if not is_torch(packed):
        return words.view(np.float32)
    import torch

    return words.view(torch.float32)


def decode_e4m3(scales: Array) -> Array:
    """Decode E4M3FN bytes, u8 of any shape, to f32; 7F and FF give NaN."""
    return lookup(E4M3_VALUES, scales)


def decode_e8m0(scales: Array) -> Array:
    """Decode E8M0 bytes, u8 of any shape, to f32; FF gives NaN."""
    return lookup(E8M0_VALUES, scales)


def unpack_nibbles(packed: U8) -> U8:
    """(..., K/2) u8 to (..., K) u8 codes 0..15, low nibble first."""
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    out[..., 0::2] = packed & np.uint8(15)
    out[..., 1::2] = packed >> np.uint8(4)
    return out


def pack_nibbles(codes: U8) -> U8:
    """(..., K) u8 codes 0..15 to (..., K/2) u8, low nibble first; K must be even."""
    packed: U8 = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def encode_e2m1(x: F32) -> U8:
    """Round f32 to the nearest E2M1 code, ties to the even code, saturating at 6.

    Args:
        x: f32 of any shape, without NaN.

    Returns:
        u8 codes of x's shape. The sign bit is set where ``x < 0``, also if the magnitude rounds to
        0 (code 8); -0.0 gives code 0. nvidia-modelopt does the same.
    """
    a = np.abs(x)
    # The boundary above an even code is a tie that stays, above an odd code one that moves up.
    code: U8 = (a > 0.25).view(np.uint8) + (a >= 0.75).view(np.uint8)
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    code |= (x < 0).view(np.uint8) << 3
    return code


def encode_e4m3(x: F32) -> U8:
    """Round f32 to the nearest E4M3FN byte, ties to even, saturating at +-448; NaN stays NaN."""
    clipped = np.clip(x, -E4M3_MAX, E4M3_MAX, dtype=np.float32)
    encoded: U8 = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return encoded


def encode_e8m0(x: F32) -> U8:
    """Round positive f32 to the nearest power of two as an E8M0 byte, ties to the even byte.

    Values below 2^-127 (and 0) give byte 0, values above 2^127 byte 254, NaN and negative values FF.
    """
    x = np.asarray(x, np.float32)
    mantissa, exponent = np.frexp(x)  # mantissa in [0.5, 1)
    byte = exponent + 126
    up = (mantissa > 0.75) | ((mantissa == 0.75) & (byte % 2 == 1))
    byte = np.clip(byte + up, 0, 254)
    byte = np.select([x == 0, np.isinf(x) & (x > 0), ~(x >= 0)], [0, 254, 255], byte)
    return np.asarray(byte, np.uint8)


def reciprocal(x: npt.ArrayLike) -> F32:
    """``1/x`` in f32, rounded once; 0 gives Inf without a warning."""
    with np.errstate(all="ignore"):
        inverse: F32 = np.float32(1) / np.asarray(x, np.float32)
    return inverse
