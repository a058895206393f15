"""Device code that the Triton kernels on the layout ``fragments`` share: words of codes and scale bytes to floats.

``UP`` is for Triton's interpreter, which multiplies bfloat16 wrongly: floats of 16 bits are then widened, bit by bit,
before anything is computed with them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _part(words, ROTATE: tl.constexpr, MASK: tl.constexpr):
    if ROTATE:
        words = (words << ROTATE) | (words >> (32 - ROTATE))
    return words & MASK


@triton.jit
def widened(a, UP: tl.constexpr):
    """A float as float32 if ``UP`` and else as it is; in the interpreter casts of small bfloat16 are wrong."""
    if UP:
        if a.dtype == tl.bfloat16:
            a = (a.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            a = a.to(tl.float32)
    return a


@triton.jit
def floats_of(bits, HALF: tl.constexpr, UP: tl.constexpr):
    """Floats of the 16 low bits of integers."""
    return widened(bits.to(tl.uint16).to(HALF, bitcast=True), UP)


@triton.jit
def pairs(words, OUTPUT: tl.constexpr, STEPS: tl.constexpr, HALF: tl.constexpr, UP: tl.constexpr):
    """(...) u32 -> (..., 2): output ``OUTPUT`` of words of codes.

    Args:
        words: of the layout.
        OUTPUT: 2 h + rh.
        STEPS: of each of four outputs (rotate, mask, rotate, mask), the last mask 0 where there is one step.
        HALF: the dtype of the layout.
        UP: widen.
    """
    bits = _part(words, STEPS[4 * OUTPUT], STEPS[4 * OUTPUT + 1])
    if STEPS[4 * OUTPUT + 3]:
        bits |= _part(words, STEPS[4 * OUTPUT + 2], STEPS[4 * OUTPUT + 3])
    return tl.join(floats_of(bits & 0xFFFF, HALF, UP), floats_of(bits >> 16, HALF, UP))


@triton.jit
def scales_of(both, RH: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, UP: tl.constexpr):
    """The scale of row ``8 RH + g`` of two scale bytes, u16; SCALE is (shift, base)."""
    if RH:
        byte = both >> 8
    else:
        byte = both & 0xFF
    return floats_of((byte << SCALE[0]) | SCALE[1], HALF, UP)


@triton.jit
def finished(total, scale2, bias, rows, N, PER_ROW: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr):
    """(rows, tokens) f32 sums -> scaled, with the bias: of the tensor, before the one rounding."""
    if PER_ROW:
        factor = tl.load(scale2 + rows, mask=rows < N, other=0.0)[:, None]
    else:
        factor = tl.load(scale2)
    total = total * (factor * FACTOR)
    if BIAS:
        total += widened(tl.load(bias + rows, mask=rows < N, other=0.0), True)[:, None]
    return total
