"""Activations as NVFP4: the rule by which W4A4 products round them, and the tiles of 64 that some kernels read.

::

    v = x * pre_scale                                  in float32
    s = input_scale, or amax(v) / 2688 of each token   at least 2^-126; 1 for a token of zeros
    b = e4m3(amax_block(v) / (6 * s))                  to nearest even, within 2^-9 and 448; 1 for a block of zeros
    q = e2m1(v / (b * s))                              to nearest even, within plus or minus 6

These are the bytes of ``quantize(v, scale2=s)``, but that what is too large for s is clipped, as GPUs do, not refused.
A token does not depend on the others. In float32, each operation rounded. For Gaussian values q * b * s is off v by
0.095 of its norm.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from halfbyte.arrays import float_dtype
from halfbyte.errors import UsageError
from halfbyte.layouts import Tiles, Tiles64
from halfbyte.numerics import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    FULL_SCALE,
    Array,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    is_torch,
    pack_nibbles,
)
from halfbyte.recipes import quantize

_SMALLEST_SCALE, _TINY = 2.0**-9, 2.0**-126
_SMALLEST_STEP = 2.0**-149


class Tokens(NamedTuple):
    """Activations (M, K) as NVFP4.

    Attributes:
        codes: (M, 8 * G) u8, even k in the low nibble; G = ceil(K / 16) blocks, the last one filled up with zeros.
        scales: (M, G) u8, E4M3.
        scale: (M, 1) float32, s of each token; NaN where the token or s is not finite, or s is not positive.
        k: K.
    """

    codes: Array
    scales: Array
    scale: Array
    k: int

    def values(self, dtype: str = "float32") -> Array:
        """(M, K): q * b, without s; "float32", "bfloat16" and "float16" all hold them exactly."""
        m, blocks = self.scales.shape
        wide = decode_e2m1(self.codes).reshape(m, blocks, BLOCK) * decode_e4m3(self.scales)[..., None]
        made = wide.reshape(m, blocks * BLOCK)[:, : self.k]
        if not is_torch(made):
            return np.ascontiguousarray(made, float_dtype(dtype))
        import torch

        return made.to(getattr(torch, dtype)).contiguous()

    def dequantize(self) -> Array:
        """(M, K) float32: q * b * s; NaN for a token with a scale of NaN."""
        return self.values() * self.scale

    def error(self, x: Array) -> float:
        """How far these are off the values (M, K) that were rounded, relative to their norm."""
        off = self.dequantize() - (x.float() if is_torch(x) else x.astype(np.float32))
        if is_torch(x):
            return float((off.double().norm() / x.double().norm()).item())
        return float(np.linalg.norm(off.astype(np.float64)) / np.linalg.norm(x.astype(np.float64)))


def quantize_tokens(x: Array, input_scale: Array | float | None = None, *, pre_scale: Array | None = None) -> Tokens:
    """Round activations to NVFP4, as a W4A4 product does.

    Args:
        x: (M, K) float32, bfloat16 or float16; a NumPy array or a torch tensor on any device.
        input_scale: s, which multiplies: a number, (), or (M, 1), such as that of each token's expert; None for each
            token's own. The largest magnitude / 2688 uses the whole range.
        pre_scale: (K,) that x is multiplied by first.

    Raises:
        UsageError: x of other axes, or an input scale that does not fit.
    """
    if len(x.shape) != 2:
        raise UsageError("activations are (M, K)", got=tuple(x.shape))
    shape = tuple(getattr(input_scale, "shape", ()))
    if shape not in ((), (x.shape[0], 1)):
        raise UsageError("input_scale does not fit the tokens", got=shape, expected=f"() or {(x.shape[0], 1)}")
    return (_tokens_torch if is_torch(x) else _tokens_numpy)(x, input_scale, pre_scale)


def _tokens_numpy(x: Array, input_scale: Array | float | None, pre_scale: Array | None) -> Tokens:
    m, k = x.shape
    with np.errstate(all="ignore"):
        v = x.astype(np.float32)
        if pre_scale is not None:
            v = v * pre_scale.astype(np.float32)
        amax = np.abs(v).max(1, keepdims=True, initial=np.float32(0))
        if input_scale is None:
            s = np.where(amax == 0, np.float32(1), np.maximum(amax / np.float32(FULL_SCALE), np.float32(_TINY)))
        else:
            s = np.broadcast_to(np.asarray(input_scale, np.float32), (m, 1))
        good = np.isfinite(amax) & np.isfinite(s) & (s > 0)
        v, s = np.where(good, v, np.float32(0)), np.where(good, s, np.float32(1))
        blocks = np.pad(v, ((0, 0), (0, -k % BLOCK))).reshape(m, -(-k // BLOCK), BLOCK)
        wanted = np.abs(blocks).max(-1) / (np.float32(E2M1_MAX) * s)
        wanted[wanted == 0] = 1
        scales = encode_e4m3(np.clip(wanted, np.float32(_SMALLEST_SCALE), np.float32(E4M3_MAX)))
        step = np.maximum(decode_e4m3(scales) * s, np.float32(_SMALLEST_STEP))
        codes = pack_nibbles(encode_e2m1(blocks / step[..., None]).reshape(m, -1))
    return Tokens(codes, scales, np.where(good, s, np.float32(np.nan)), k)


def _tokens_torch(x: Array, input_scale: Array | float | None, pre_scale: Array | None) -> Tokens:
    import torch

    m, k = x.shape

    def number(value: float) -> Array:
        return torch.tensor(value, device=x.device)  # divided by a float, torch may multiply with its inverse

    v = x.float()
    if pre_scale is not None:
        v = v * pre_scale.float()
    amax = v.abs().amax(1, keepdim=True) if k else v.new_zeros(m, 1)
    if input_scale is None:
        s = (amax / number(FULL_SCALE)).clamp(min=_TINY).masked_fill(amax == 0, 1)
    else:
        s = torch.as_tensor(input_scale, dtype=torch.float32, device=x.device).expand(m, 1)
    good = amax.isfinite() & s.isfinite() & (s > 0)
    v, s = v.masked_fill(~good, 0), s.masked_fill(~good, 1)
    blocks = torch.nn.functional.pad(v, (0, -k % BLOCK)).view(m, -(-k // BLOCK), BLOCK)
    wanted = blocks.abs().amax(-1) / (number(E2M1_MAX) * s)
    wanted = wanted.masked_fill(wanted == 0, 1).clamp(_SMALLEST_SCALE, E4M3_MAX)
    scales = wanted.to(torch.float8_e4m3fn)
    step = (scales.float() * s).clamp(min=_SMALLEST_STEP)
    quotient = blocks / step[..., None]
    a = quotient.abs()
    code = (a > 0.25).to(torch.uint8)
    for bound in (a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0, (quotient < 0) * 8):
        code += bound
    code = code.view(m, -1)
    packed = code[:, ::2] | code[:, 1::2] << 4
    return Tokens(packed, scales.view(torch.uint8), s.masked_fill(~good, torch.nan), k)


def quantize_activation(x: Array, global_scale: float) -> Tiles:
    """Quantize activations by a static global scale.

    A block with values above 2688 * global_scale is refused: a static scale must have room for what it meets.

    Args:
        x: (M, K) float32, bfloat16 or float16 with K a multiple of 64; a NumPy array or a torch tensor on the CPU.
        global_scale: positive; multiplies. The largest magnitude / 2688 uses the whole range.

    Returns:
        The tiles (m, K/64, 1): codes in rows, and for each tile one word of scales s0 s2 s1 s3, in the order of the
        tiles (``read_block_scale_word_linear``).

    Raises:
        QuantizeError: NaN or Inf, another dtype or rank, or a block that needs a larger global scale.
        LayoutError: a K that is not a multiple of 64.
    """
    packed = Tiles64("marlin").pack(quantize(x, scale2=global_scale, pad=True))
    m, k = packed.shape
    buffers = packed.buffers()
    return Tiles(
        codes=buffers["codes"],
        scales=buffers["scales"],
        grid=(m, k // 64, 1),
        m_axis=0,
        k_axis=1,
        scale_order="marlin",
        global_scale=buffers["scale2"].reshape(1),
    )
