"""Device code of ``halfbyte.kernels.cuda.dense``, in plain Triton.

The weight is read as words of 32 bits: what a loop holds for the next round is then in as few registers as it fills.
In Triton's interpreter bfloat16 comes as the integers of its bits (``BITS``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.cuda.step_code import _narrow, _wide


@triton.jit
def _read(at, there, TAIL: tl.constexpr):
    """Words of the weight: once."""
    if TAIL:
        return tl.load(at, mask=there, other=0, eviction_policy="evict_first")
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _values(word, OF: tl.constexpr):
    """The two values of i32 words, as f32; of float32 the one, twice."""
    if OF == tl.float32:
        one = word.to(tl.float32, bitcast=True)
        return one, one
    if OF == tl.float16:
        low = (word & 0xFFFF).to(tl.uint16).to(OF, bitcast=True)
        high = (word.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(OF, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _multiplied(sums, held, x, k, K, ROWS: tl.constexpr, PER: tl.constexpr, TAIL: tl.constexpr, OF: tl.constexpr):
    """The sums, (W, 128), of each token and value of a word, and what a step adds to them."""
    w = _values(held, OF)
    new = ()
    for m in tl.static_range(ROWS):
        if TAIL:
            v = _values(tl.load(x + m * K + k, mask=k < K, other=0), OF)
        else:
            v = _values(tl.load(x + m * K + k), OF)
        for p in tl.static_range(PER):
            new = new + (tl.fma(w[p], v[p], sums[m * PER + p]),)
    return new


@triton.jit
def dense(
    x, weight, bias, out, N, K,
    ROWS: tl.constexpr, W: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """W columns of ``out``, one of each warp: a lane has 16 bytes of each step, and a sum for each value of a word.

    Args:
        x: (ROWS, K) i32 words.
        weight: (N, K) i32 words.
        bias: (N,), if BIAS.
        out: (ROWS, N).
        N: rows of the weight.
        K: words of a row, a multiple of 16.
        ROWS: tokens.
        W: warps.
        D: steps, of 128 words, whose weights are on their way.
        TAIL: whether K is no multiple of 128 D.
        BIAS: whether there is a bias.
        BITS: whether bfloat16 comes as integers.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
    """
    OF: tl.constexpr = out.dtype.element_ty
    PER: tl.constexpr = 1 if OF == tl.float32 else 2
    n = tl.program_id(0) * W + tl.arange(0, W)[:, None]
    k = tl.arange(0, 128)[None, :] + tl.zeros([W, 1], tl.int32)
    at = weight + tl.minimum(n, N - 1).to(tl.int64) * K
    held = ()
    for d in tl.static_range(D):
        held = held + (_read(at + (k + d * 128), k + d * 128 < K, TAIL),)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    sums = ()
    for _ in tl.static_range(ROWS * PER):
        sums = sums + (tl.zeros([W, 128], tl.float32),)
    rounds = tl.cdiv(K, 128 * D) - 1
    for i in tl.range(0, rounds, num_stages=1):
        for d in tl.static_range(D):
            step = k + (i * D + d) * 128
            later = step + D * 128
            new = _read(at + later, later < K, TAIL)
            sums = _multiplied(sums, held[0], x, step, K, ROWS, PER, TAIL, OF)
            held = held[1:] + (new,)
    for d in tl.static_range(D):
        sums = _multiplied(sums, held[d], x, k + (rounds * D + d) * 128, K, ROWS, PER, TAIL, OF)
    for m in tl.static_range(ROWS):
        own = sums[m * PER]
        if PER == 2:
            own += sums[m * PER + 1]
        y = tl.sum(own, axis=1, keep_dims=True)
        if BIAS:
            y += _wide(tl.load(bias + n, mask=n < N, other=0), BITS)
        tl.store(out + m * N + n, _narrow(y, OF, BITS), mask=n < N)
