"""Device code of ``halfbyte.kernels.cuda.fp8_quantize``, in Triton.

Values come as integers of their bits, and where ``CONVERT`` is off rounding to E4M3 is integer arithmetic: the bytes
are then the same on every device, and in Triton's interpreter, which rounds bfloat16 and E4M3 wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)


@triton.jit
def _bits(v):
    return v.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(x, pre, column, inside, KIND: tl.constexpr, PRE: tl.constexpr):
    """Values of a row as f32, zeros outside."""
    bits = tl.load(x + column, mask=inside, other=0)
    if KIND == FLOAT32:
        v = _float(bits)
    elif KIND == BFLOAT16:
        v = _float(bits.to(tl.int32) << 16)
    else:
        v = bits.to(tl.float16, bitcast=True).to(tl.float32)
    if PRE:
        v = v * tl.load(pre + column, mask=inside, other=0)
    return v


@triton.jit
def _values(x, pre, start, k, KIND: tl.constexpr, PRE: tl.constexpr, BLOCK: tl.constexpr, ORDERED: tl.constexpr):
    """``BLOCK`` values of a row from ``start`` on, as f32; if ORDERED (0, 8, 1, 9, 2, ...) of each 16."""
    if ORDERED:
        first = start + tl.arange(0, BLOCK // 16)[:, None] * 16
        column = first + tl.arange(0, 8)[None, :]
        low = _load(x, pre, column, column < k, KIND, PRE)
        high = _load(x, pre, column + 8, column + 8 < k, KIND, PRE)
        return tl.reshape(tl.join(low, high), (BLOCK,))
    column = start + tl.arange(0, BLOCK)
    return _load(x, pre, column, column < k, KIND, PRE)


@triton.jit
def _e4m3(v, CONVERT: tl.constexpr):
    """The bytes of f32, to nearest even."""
    if CONVERT:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = _bits(v)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    normal = (size + (0x7FFFF - (120 << 23)) + ((size >> 20) & 1)) >> 20
    tiny = _bits(_float(size) + 16384.0) - 0x46800000
    return (tl.where(size >= 0x3C800000, normal, tiny) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _peak(v):
    """The bits of the largest magnitude; of Inf they are larger, and of NaN than those."""
    return tl.max(_bits(v) & 0x7FFFFFFF, 0)


@triton.jit
def quantize(
    x,
    pre,
    data,
    scales,
    k,
    pitch,
    KIND: tl.constexpr,
    PRE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    ORDERED: tl.constexpr,
    CONVERT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Quantize one row, as halfbyte.kernels.fp8 says.

    Args:
        x: the bits of (M, k) values.
        pre: (k,) f32, if PRE.
        data: (M, pitch) u8; zeros from k on.
        scales: (M,) f32.
        k: values in a row.
        pitch: k rounded up to a multiple of 16; of 64 if ORDERED.
        KIND: 0 for float32, 1 for bfloat16, 2 for float16.
        PRE: whether values are multiplied by ``pre`` first.
        BLOCK: values that the program holds at once.
        ROUNDS: how many of those a row has; more than one is read twice.
        ORDERED: position 32 s + 16 e + 4 c + j of each 64 holds value 16 c + 4 s + 2 e + (0, 8, 1, 9)[j].
        CONVERT: the device has an instruction that rounds to E4M3.
        EARLY: it may start before the kernel ahead of it ends, and the one behind before this one does.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x += row * k
    data += row * pitch
    v = _values(x, pre, 0, k, KIND, PRE, BLOCK, ORDERED)
    peak = _peak(v)
    for i in tl.static_range(1, ROUNDS):
        peak = tl.maximum(peak, _peak(_values(x, pre, i * BLOCK, k, KIND, PRE, BLOCK, ORDERED)))
    amax = _float(peak)
    scale = tl.where(peak < 0x7F800000, tl.div_rn(amax, 448.0), float("nan"))
    factor = tl.where(peak < 0x1F800000, 1.8446744073709552e19, 1.0)  # 2^-64, and its inverse
    inverse = tl.where(peak > 0, tl.div_rn(448.0, amax * factor), 0.0)
    tl.store(scales + row, scale)
    for i in tl.static_range(ROUNDS):
        if ROUNDS > 1:
            v = _values(x, pre, i * BLOCK, k, KIND, PRE, BLOCK, ORDERED)
        column = i * BLOCK + tl.arange(0, BLOCK)
        q = _e4m3((v * factor) * inverse, CONVERT)
        if ORDERED:  # words of 4 change places
            column = column // 64 * 64 + column // 4 % 4 * 16 + column // 16 % 4 * 4 + column % 4
        tl.store(data + column, q, mask=column < pitch)
