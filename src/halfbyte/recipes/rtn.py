"""``rtn``: scales from the largest magnitude, codes rounded to nearest even.

::

    scale2 = amax / 2688                        amax over the tensor, 2688 = 6 * 448
    scale  = e4m3(amax_block / (6 * scale2))    clamped to 2^-9 .. 448; 1.0 where the block is zero
    code   = e2m1(x / (scale * scale2))         with the rounded scale

The operations, their order and their roundings are those of nvidia-modelopt 0.47
(``NVFP4QTensor.quantize``) or of compressed-tensors 0.20.1 (``generate_gparam``, ``calculate_qparams``
and its compressor), so that the bytes are theirs; each divides where the other multiplies. One exception: an
all-zero tensor and one with amax below 2688 * 2^-126 get a scale2 of 1 and 2^-126, where nvidia-modelopt stores 0 or
a subnormal. With compressed-tensors' rule a tensor near the largest float32 decodes to Inf, as it does there.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from halfbyte import jit
from halfbyte.numerics import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    F32,
    FULL_SCALE,
    U8,
    Array,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
)
from halfbyte.recipes import cuda
from halfbyte.recipes.base import (
    LARGEST_SCALE,
    Dense,
    Like,
    Recipe,
    TensorScale,
    block_amax,
    pieces,
    refuse_overflow,
)

_SMALLEST_SCALE = np.float32(2.0**-9)
_CT_ZERO_SCALE = 0x20  # 0.125
_SMALLEST = np.finfo(np.float32).smallest_subnormal
_TINY = np.finfo(np.float32).tiny


class Rtn(Recipe):
    """Round to nearest with scales from the largest magnitude."""

    name: ClassVar[str] = "rtn"
    summary: ClassVar[str] = "scales from the largest magnitude, codes to nearest even; as nvidia-modelopt"

    def tensor_scale(self, amax: np.float32, like: Like) -> TensorScale:
        if like == "compressed-tensors":
            return TensorScale.from_divisor(_ct_divisor(amax))
        if amax == 0:
            return TensorScale(np.float32(1))  # nvidia-modelopt stores 0 here, and NaN block scales
        return TensorScale(np.maximum(amax / np.float32(FULL_SCALE), _TINY))

    def encode(self, x: F32, dtype: np.dtype[Any], scale: TensorScale, like: Like) -> tuple[U8, U8]:
        amax = block_amax(x)
        if like == "modelopt":
            wanted = amax / (np.float32(E2M1_MAX) * scale.scale2)
            wanted[wanted == 0] = 1
            scales = encode_e4m3(np.clip(wanted, _SMALLEST_SCALE, np.float32(E4M3_MAX)))
            step = decode_e4m3(scales) * scale.scale2
        else:
            sixth = (amax / np.float32(E2M1_MAX)).astype(dtype).astype(np.float32)
            wanted = sixth / scale.scale2 if scale.divisor is None else scale.divisor * sixth
            scales = encode_e4m3(wanted)
            scales[scales == 0] = _CT_ZERO_SCALE
            values = decode_e4m3(scales)
            step = values * scale.scale2 if scale.divisor is None else values / scale.divisor
        if scale.fixed:
            refuse_overflow(wanted)
        step = np.maximum(step, _SMALLEST)  # a product that underflows must not divide
        quotient = x.reshape(x.shape[0], -1, BLOCK) / step[..., None]
        return pack_nibbles(encode_e2m1(quotient).reshape(x.shape)), scales

    def encode_compiled(self, dense: Dense, scale: TensorScale, like: Like, codes: Any, scales: Any) -> bool:
        from halfbyte.recipes import blocks_code as code

        rule = code.MODELOPT if like == "modelopt" else code.BY_SCALE2 if scale.divisor is None else code.BY_DIVISOR
        total, threads = dense.chunks(code.CHUNK), jit.thread_count()
        tops = np.zeros(pieces(total, threads), np.float32)
        numbers = rule, np.float32(scale.scale2), np.float32(1 if scale.divisor is None else scale.divisor)
        where = dense.kind, dense.address, dense.row_bytes, dense.k
        made = codes.ctypes.data, scales.ctypes.data
        if threads == 1:
            tops[0] = code.encode_some(0, total, *where, *numbers, *made)
        else:
            jit.run(code.encode_all, total, *where, *numbers, *made, tops)
        return not (scale.fixed and tops.max() > LARGEST_SCALE)

    def encode_cuda(self, dense: Array, scale: TensorScale, like: Like) -> tuple[Array, Array] | None:
        return cuda.encode(dense, scale, like)


def _ct_divisor(amax: np.float32) -> np.float32:
    # torch computes 2688 / amax as 2688 times the rounded reciprocal; a result that overflows becomes 1.
    with np.errstate(over="ignore"):
        divisor = np.float32(FULL_SCALE) * (np.float32(1) / np.maximum(amax, _TINY))
    return divisor if np.isfinite(divisor) else np.float32(1)
