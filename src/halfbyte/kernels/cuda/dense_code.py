"""Device code of ``halfbyte.kernels.cuda.dense``, in plain Triton.

The weight is read as words of 32 bits: what a loop holds for the next round is then in as few registers as it fills.
In Triton's interpreter everything is widened before it is multiplied (``UP``), and bfloat16 comes as the integers of
its bits (``BITS``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.cuda.step_code import _narrow, _wide


@triton.jit
def _read(at, there, TAIL: tl.constexpr):
    """Values of the weight: once."""
    if TAIL:
        return tl.load(at, mask=there, other=0, eviction_policy="evict_first")
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _values(word, OF: tl.constexpr, BITS: tl.constexpr):
    """The two values of i32 words, as f32; of float32 the one, twice."""
    if OF == tl.float32:
        one = word.to(tl.float32, bitcast=True)
        return one, one
    if OF == tl.float16:
        low, high = _halves(word, OF)
        return low.to(tl.float32), high.to(tl.float32)
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _halves(word, OF: tl.constexpr):
    low = (word & 0xFFFF).to(tl.uint16).to(OF, bitcast=True)
    return low, (word.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(OF, bitcast=True)


@triton.jit
def _rows(at, k, K, R: tl.constexpr, TAIL: tl.constexpr):
    """What a step reads of R rows of each warp, (W, 128) words each."""
    held = ()
    for r in tl.static_range(R):
        held = held + (_read(at[r] + k, k < K, TAIL),)
    return held


@triton.jit
def _multiplied(
    sums, held, at, k, K,
    ROWS: tl.constexpr, R: tl.constexpr, PER: tl.constexpr, TAIL: tl.constexpr, OF: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The sums, (W, 128), of each token, row and value of a word, and what a step adds to them."""
    new = ()
    for m in tl.static_range(ROWS):
        if TAIL:
            x = _values(tl.load(at + m * K + k, mask=k < K, other=0), OF, BITS)
        else:
            x = _values(tl.load(at + m * K + k), OF, BITS)
        for r in tl.static_range(R):
            w = _values(held[r], OF, BITS)
            for p in tl.static_range(PER):
                new = new + (tl.fma(w[p], x[p], sums[(m * R + r) * PER + p]),)
    return new


@triton.jit
def few(
    x, weight, bias, out, N, K,
    ROWS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr,
    BIAS: tl.constexpr, BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """R W columns of ``out``, by multiply-add: a lane has 16 bytes of each step of a row, and a sum for each value.

    Args:
        x: (ROWS, K) i32 words.
        weight: (N, K) i32 words.
        bias: (N,), if BIAS.
        out: (ROWS, N).
        N: rows of the weight.
        K: words of a row, a multiple of 16.
        ROWS: tokens.
        W: warps.
        R: rows of the weight of a warp.
        RP: a power of two, at least R.
        D: steps, of 128 words, whose weights are on their way.
        TAIL: whether K is no multiple of 128 D.
        BIAS: whether there is a bias.
        BITS: whether bfloat16 comes as integers.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
    """
    OF: tl.constexpr = out.dtype.element_ty
    PER: tl.constexpr = 1 if OF == tl.float32 else 2
    first = tl.program_id(0) * (R * W)
    warp = tl.arange(0, W)
    k = tl.arange(0, 128)[None, :] + tl.zeros([W, 1], tl.int32)
    at = ()
    for r in tl.static_range(R):
        at = at + (weight + tl.minimum(first + warp * R + r, N - 1).to(tl.int64)[:, None] * K,)
    held = ()
    for d in tl.static_range(D):
        held = held + (_rows(at, k + d * 128, K, R, TAIL),)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    sums = ()
    for _ in tl.static_range(ROWS * R * PER):
        sums = sums + (tl.zeros([W, 128], tl.float32),)
    rounds = tl.cdiv(K, 128 * D) - 1
    for i in tl.range(0, rounds, num_stages=1):
        for d in tl.static_range(D):
            step = (i * D + d) * 128
            new = _rows(at, k + (step + D * 128), K, R, TAIL)
            sums = _multiplied(sums, held[0], x, k + step, K, ROWS, R, PER, TAIL, OF, BITS)
            held = held[1:] + (new,)
    for d in tl.static_range(D):
        sums = _multiplied(sums, held[d], x, k + (rounds * D + d) * 128, K, ROWS, R, PER, TAIL, OF, BITS)
    each = tl.arange(0, RP)[None, :]
    n = first + warp[:, None] * R + each
    there = (each < R) & (n < N)
    for m in tl.static_range(ROWS):
        y = tl.zeros([W, RP], tl.float32)
        for r in tl.static_range(R):
            own = sums[(m * R + r) * PER]
            if PER == 2:
                own += sums[(m * R + r) * PER + 1]
            y = tl.where(each == r, tl.sum(own, 1, keep_dims=True), y)
        if BIAS:
            y += _wide(tl.load(bias + n, mask=there, other=0), BITS)
        tl.store(out + m * N + n, _narrow(y, OF, BITS), mask=there)


@triton.jit
def _fetch(at, k, K, R: tl.constexpr, TAIL: tl.constexpr):
    """What a step reads of R stripes: (32 W, 4) words of both halves of 32 k, of each 8 rows."""
    held = ()
    for i in tl.static_range(2 * R):
        held = held + (_read(at[i] + k, k < K, TAIL), _read(at[i] + (k + 16), k + 16 < K, TAIL))
    return held


@triton.jit
def _weights(
    upper, lower, W: tl.constexpr, WIDE: tl.constexpr, OF: tl.constexpr, UP: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """(32 W, 4) words of eight rows and of the next eight -> (W, 16, 32), k in the order of ``_tokens``."""
    if UP:
        u, v = _values(upper, OF, BITS), _values(lower, OF, BITS)
    else:
        u, v = _halves(upper, OF), _halves(lower, OF)
    w = tl.join(tl.join(u[0], u[1]), tl.join(v[0], v[1]))
    w = tl.reshape(w, [W, 8, 4, 2, 2, 2, 2])  # W g q s i p rh
    if WIDE:
        w = tl.permute(w, (0, 6, 1, 4, 2, 3, 5))  # W rh g | i q s p
    else:
        w = tl.permute(w, (0, 6, 1, 3, 4, 2, 5))  # W rh g | s i q p
    return tl.reshape(w, [W, 16, 32])


@triton.jit
def _tokens(
    at, there, W: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, UP: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """(32 B W, 8) addresses of activations -> (W, 32, 8 B)."""
    if TAIL:
        x = tl.load(at, mask=there, other=0)
    else:
        x = tl.load(at)
    if UP:
        x = _wide(x, BITS)
    x = tl.reshape(x, [B, W, 8, 4, 2, 2, 2])  # B W m q s i p
    if WIDE:
        x = tl.permute(x, (1, 5, 3, 4, 6, 0, 2))
    else:
        x = tl.permute(x, (1, 4, 5, 3, 6, 0, 2))
    return tl.reshape(x, [W, 32, 8 * B])


@triton.jit
def _added(
    sums, held, at, k, K,
    W: tl.constexpr, R: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, OF: tl.constexpr,
    UP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The sums of each stripe, (W, 16, 8 B), and what a step adds to them."""
    x0 = _tokens(at, k < K, W, B, WIDE, TAIL, UP, BITS)
    x1 = _tokens(at + 32, k + 32 < K, W, B, WIDE, TAIL, UP, BITS)
    new = ()
    for r in tl.static_range(R):
        total = tl.dot(_weights(held[4 * r], held[4 * r + 2], W, WIDE, OF, UP, BITS), x0, sums[r])
        new = new + (tl.dot(_weights(held[4 * r + 1], held[4 * r + 3], W, WIDE, OF, UP, BITS), x1, total),)
    return new


@triton.jit(do_not_specialize=["M"])
def many(
    x, weight, bias, out, M, N, K,
    W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr,
    BIAS: tl.constexpr, UP: tl.constexpr, BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """16 R columns of ``out``, by matrix instructions on registers as they were loaded.

    A warp takes every W-th 64 k. Of each 32 of those lane 4 g + q has 8 from 8 q on, s, i, p, of rows g and g + 8 of a
    stripe and of tokens g and g + 8: the order of k in a product is s, i, q, p or i, q, s, p.

    Args:
        x: (M, K) bfloat16 or float16.
        weight: (N, K / 2) i32 words.
        bias: (N,), if BIAS.
        out: (M, N).
        M: tokens, 1 to 8 B.
        N: rows of the weight.
        K: words of a row of the weight, a multiple of 16.
        W: warps, among which k is split.
        R: stripes of 16 rows of a program.
        D: steps whose weights are on their way.
        B: tokens, in eights.
        WIDE: whether the compiler gives the lanes of an operand four values of k together, not two.
        TAIL: whether K is no multiple of 32 W D.
        BIAS: whether there is a bias.
        UP: whether all is widened.
        BITS: whether bfloat16 comes as integers.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
    """
    OF: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * (16 * R)
    lane = tl.arange(0, 32 * W)[:, None]
    k = lane // 32 * 32 + lane % 4 * 4
    at = ()
    for i in tl.static_range(2 * R):
        row = tl.minimum(first + 8 * i + lane % 32 // 4, N - 1)
        at = at + (weight + row.to(tl.int64) * K + tl.arange(0, 4)[None, :],)
    held = ()
    for d in tl.static_range(D):
        held = held + (_fetch(at, k + d * (32 * W), K, R, TAIL),)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    sums = ()
    for _ in tl.static_range(R):
        sums = sums + (tl.zeros([W, 16, 8 * B], tl.float32),)
    each = tl.arange(0, 32 * B * W)[:, None]
    kx = each // 32 % W * 64 + each % 4 * 8
    token = each % 32 // 4 + each // (32 * W) * 8
    here = x + tl.minimum(token, M - 1) * (2 * K) + (kx + tl.arange(0, 8)[None, :])
    rounds = tl.cdiv(K, 32 * W * D) - 1
    for i in tl.range(0, rounds, num_stages=1):
        for d in tl.static_range(D):
            step = (i * D + d) * (32 * W)
            new = _fetch(at, k + (step + 32 * W * D), K, R, TAIL)
            sums = _added(sums, held[0], here + 2 * step, kx + 2 * step, 2 * K, W, R, B, WIDE, TAIL, OF, UP, BITS)
            held = held[1:] + (new,)
    for d in tl.static_range(D):
        step = (rounds * D + d) * (64 * W)
        sums = _added(sums, held[d], here + step, kx + step, 2 * K, W, R, B, WIDE, TAIL, OF, UP, BITS)
    m = tl.arange(0, 8 * B)[None, :]
    for r in tl.static_range(R):
        n = first + 16 * r + tl.arange(0, 16)
        y = tl.sum(sums[r], axis=0)
        if BIAS:
            y += _wide(tl.load(bias + n, mask=n < N, other=0), BITS)[:, None]
        to = out + m.to(tl.int64) * N + n[:, None]
        tl.store(to, _narrow(y, OF, BITS), mask=(m < M) & (n < N)[:, None])
