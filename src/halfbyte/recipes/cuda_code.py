"""The Triton kernels of ``halfbyte.recipes.cuda``; loaded only to run.

Values come as integers of their bits, and rounding is division to nearest, integer arithmetic, or the sum with a
power of two that leaves the wanted number of bits: so the bytes are NumPy's on every device, and in Triton's
interpreter, which rounds bfloat16 wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
MODELOPT = tl.constexpr(0)
BY_SCALE2 = tl.constexpr(1)
EVEN = tl.constexpr(0x4B400000)
"""The bits of 1.5 * 2^23: the next f32s are the next integers."""
ALL_EVEN = tl.constexpr(-0x4B400000 * 0x11111111 % 2**32)
"""What takes those away from the sum of eight codes, four bits apart."""


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _first(chunks, BLOCKS: tl.constexpr):
    """The row of this program, and its first block there."""
    number = tl.program_id(0)
    return (number // chunks).to(tl.int64), (number % chunks).to(tl.int64) * BLOCKS


@triton.jit
def _load(x, row, first, stride, k, KIND: tl.constexpr, WHOLE: tl.constexpr, BLOCKS: tl.constexpr):
    """The values of blocks as f32, (BLOCKS, 16), zeros beyond the row's last."""
    block = tl.arange(0, BLOCKS)[:, None]
    column = tl.arange(0, 16)[None, :]
    left = k - first * 16
    if WHOLE:
        inside = block < left // 16
    else:
        inside = block * 16 + column < left
    bits = tl.load(x + (row * stride + first * 16) + (block * 16 + column), mask=inside, other=0)
    if KIND == FLOAT32:
        return _float(bits)
    elif KIND == BFLOAT16:
        return _float(bits.to(tl.int32) << 16)
    else:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["chunks"])
def peak(x, top, stride, k, chunks, KIND: tl.constexpr, WHOLE: tl.constexpr, BLOCKS: tl.constexpr):
    """The bits of the largest magnitude, in f32; those of Inf are larger, and those of NaN than these.

    Args:
        x: the bits of rows of values.
        top: one i32, that becomes the larger of it and what is found.
        stride: from row to row, in values.
        k: values in a row.
        chunks: programs of a row.
        KIND: 0 for float32, 1 for bfloat16, 2 for float16.
        WHOLE: k is a multiple of 16.
        BLOCKS: of a program.
    """
    row, first = _first(chunks, BLOCKS)
    magnitude = _bits(_load(x, row, first, stride, k, KIND, WHOLE, BLOCKS)) & 0x7FFFFFFF
    tl.atomic_max(top, tl.max(magnitude), sem="relaxed")


@triton.jit
def _e4m3(wanted):
    """The bytes of f32 that are not negative."""
    bits = tl.minimum(_bits(wanted), 0x43E00000)
    normal = (bits + (0x7FFFF - (120 << 23)) + ((bits >> 20) & 1)) >> 20
    tiny = _bits(_float(bits) + 16384.0) - 0x46800000
    return tl.where(bits >= 0x3C800000, normal, tiny)


@triton.jit
def _e2m1(x):
    """The codes of magnitudes, f32, plus ``EVEN``.

    A code is the least of 2 x, x + 2 and x / 2 + 4, rounded to an integer, at most 7; sums with 1.5 * 2^23 are.
    """
    low = _bits(x * 2.0 + 12582912.0)
    middle = _bits(x + 12582914.0)
    high = _bits(x * 0.5 + 12582916.0)
    return tl.minimum(tl.minimum(low, middle), tl.minimum(high, EVEN + 7))


@triton.jit
def _as_kind(x, KIND: tl.constexpr):
    """Finite f32, not negative, rounded to the dtype that the values came in."""
    if KIND == FLOAT32:
        return x
    elif KIND == BFLOAT16:
        bits = _bits(x)
        return _float((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16)
    else:
        return x.to(tl.float16).to(tl.float32)


@triton.jit
def _fma(a, b, c, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # it rounds the product
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def _divided(x, step, inverse, INTERPRETED: tl.constexpr):
    """``x / step`` to nearest by the rounded inverse of step, and two steps of Markstein's; see ``encode``."""
    q = x * inverse
    q = _fma(_fma(-step, q, x, INTERPRETED), inverse, q, INTERPRETED)
    return _fma(_fma(-step, q, x, INTERPRETED), inverse, q, INTERPRETED)


@triton.jit(do_not_specialize=["chunks"])
def encode(
    x,
    codes,
    scales,
    top,
    stride,
    k,
    chunks,
    scale2,
    full,
    divisor,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RULE: tl.constexpr,
    FIXED: tl.constexpr,
    MODERATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Codes and block scales by the rule of rtn.

    Where steps are MODERATE, within 2^-90 and 2^20, a block's values are divided by the inverse of its step. Of
    quotients from 1/8 on the remainders are then exact, so that those are rounded correctly; smaller ones become 0,
    whose sign is that of x unless the quotient would round to -0, at half of the smallest subnormal.

    Args:
        x, stride, k, chunks, KIND, WHOLE, BLOCKS: as of ``peak``; all values are finite.
        codes: i32 words of eight codes.
        scales: u8.
        top: i32, the bits of the largest scale that a block wanted, if FIXED.
        scale2: f32.
        full: f32, 6 * scale2.
        divisor: f32.
        RULE: 0 is nvidia-modelopt's, 1 and 2 are compressed-tensors' with scale2 or with a divisor.
        FIXED: whether ``top`` is wanted.
        MODERATE: whether scale2 lies within 2^-80 and 2^10.
        INTERPRETED: whether Triton's interpreter runs this.
    """
    row, first = _first(chunks, BLOCKS)
    values = _load(x, row, first, stride, k, KIND, WHOLE, BLOCKS)
    amax = tl.max(tl.abs(values), 1)
    if RULE == MODELOPT:
        wanted = tl.div_rn(amax, full)
        own = tl.where(wanted == 0, 1.0, wanted)
        scale = _e4m3(tl.where(own > 0.001953125, own, 0.001953125))
    else:
        sixth = _as_kind(tl.div_rn(amax, 6.0), KIND)
        if RULE == BY_SCALE2:
            wanted = tl.div_rn(sixth, scale2)
        else:
            wanted = divisor * sixth
        scale = _e4m3(wanted)
        scale = tl.where(scale == 0, 0x20, scale)
    value = _float(scale << 20) * 1.329227995784916e36  # 2^120, between the exponents of the two formats
    if RULE <= BY_SCALE2:
        step = value * scale2
    else:
        step = tl.div_rn(value, divisor)
    step = _float(tl.maximum(_bits(step), 1))
    if MODERATE:
        quotient = _divided(values, step[:, None], tl.div_rn(1.0, step)[:, None], INTERPRETED)
        negative = values < -_float((step * 0.5).to(tl.int32))[:, None]
    else:
        quotient = tl.div_rn(values, tl.broadcast_to(step[:, None], (BLOCKS, 16)))
        negative = quotient < 0
    code = _e2m1(tl.abs(quotient)).to(tl.uint32, bitcast=True)

    row_blocks = tl.cdiv(k, 16)
    place = row * row_blocks + first
    block = tl.arange(0, BLOCKS)
    half = tl.arange(0, 2 * BLOCKS)
    shift = tl.arange(0, 8)[None, :] * 4
    signs = tl.where(tl.reshape(negative, (2 * BLOCKS, 8)), 8 << shift, 0).to(tl.uint32, bitcast=True)
    word = tl.sum((tl.reshape(code, (2 * BLOCKS, 8)) << shift) + signs, 1) + ALL_EVEN
    tl.store(codes + place * 2 + half, word.to(tl.int32, bitcast=True), mask=half < (row_blocks - first) * 2)
    tl.store(scales + place + block, scale.to(tl.uint8), mask=block < row_blocks - first)
    if FIXED:
        tl.atomic_max(top, tl.max(_bits(wanted)), sem="relaxed")
