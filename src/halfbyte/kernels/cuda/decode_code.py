"""Device code of ``halfbyte.kernels.cuda.decode``, in plain Triton.

A program computes ``R`` stripes of 16 rows; each warp takes every ``W``-th unit of 64 k, so that lane 4 g + kt may hold
the four words of row g, row g + 8 and block kt as they lie, both their scales, and the 16 activations of that block.
The tensor core's k runs in the order u, h, i, kt, s, p or u, h, s, i, kt, p, where c = 2 s + i: the compiler then
exchanges nothing between lanes. ``D`` steps of loads are under way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.cuda.fragments_code import finished, pairs, scales_of, widened


@triton.jit
def _half(
    words, scale0, scale1,
    H: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr, HALF: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """(W, kt, g, c) words -> (W, 16, 32) weights, of half H of every block."""
    w = tl.join(pairs(words, 2 * H, STEPS, HALF, UP) * scale0, pairs(words, 2 * H + 1, STEPS, HALF, UP) * scale1)
    w = tl.reshape(w, [W, 4, 8, 2, 2, 2, 2])  # W kt g s i p rh
    if WIDE:
        w = tl.permute(w, (0, 6, 2, 4, 1, 3, 5))  # W rh g | i kt s p
    else:
        w = tl.permute(w, (0, 6, 2, 3, 4, 1, 5))  # W rh g | s i kt p
    return tl.reshape(w, [W, 16, 32])


@triton.jit
def _tokens(x, W: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr, UP: tl.constexpr):
    """(B W 32, 8) activations -> (W, 32, 8 B), k in the order of ``_half``."""
    x = tl.reshape(widened(x, UP), [B, W, 8, 4, 2, 2, 2])  # B W m kt s i p
    if WIDE:
        x = tl.permute(x, (1, 5, 3, 4, 6, 0, 2))
    else:
        x = tl.permute(x, (1, 4, 5, 3, 6, 0, 2))
    return tl.reshape(x, [W, 32, 8 * B])


@triton.jit
def _add(
    sums, words, both, x0, x1,
    W: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
    STEPS: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """The sums of each stripe, (W, 16, 8 B), and what a step adds to them."""
    new = ()
    for r in tl.static_range(R):
        w = tl.permute(tl.reshape(words[r].to(tl.uint32, bitcast=True), [W, 8, 4, 4]), (0, 2, 1, 3))
        s = tl.permute(tl.reshape(both[r].to(tl.uint16, bitcast=True), [W, 8, 4]), (0, 2, 1))
        scale0 = tl.reshape(scales_of(s, 0, SCALE, HALF, UP), [W, 4, 8, 1, 1])
        scale1 = tl.reshape(scales_of(s, 1, SCALE, HALF, UP), [W, 4, 8, 1, 1])
        total = tl.dot(_half(w, scale0, scale1, 0, W, WIDE, STEPS, HALF, UP), x0, sums[r])
        new = new + (tl.dot(_half(w, scale0, scale1, 1, W, WIDE, STEPS, HALF, UP), x1, total),)
    return new


@triton.jit
def _fetch(codes, scales, at, there, R: tl.constexpr, TAIL: tl.constexpr):
    """What a step reads of each stripe: (W, 128) words and (W, 32) pairs of scales."""
    words = ()
    both = ()
    for r in tl.static_range(R):
        if TAIL:
            words = words + (tl.load(codes[r] + at * 128, mask=there, other=0),)
            both = both + (tl.load(scales[r] + at * 32, mask=there, other=0),)
        else:
            words = words + (tl.load(codes[r] + at * 128),)
            both = both + (tl.load(scales[r] + at * 32),)
    return words, both


@triton.jit
def sums_of(
    codes, scales, stripes, x, k, K,
    W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr,
    UP: tl.constexpr, STEPS: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The sums of each of R stripes, (W, 16, 8 B), one for each warp.

    Args:
        codes: i32 words.
        scales: i16, two bytes each.
        stripes: their numbers, i64.
        x: (B W 32, 8) addresses of what ``_tokens`` takes of the first step.
        k: (B W 32, 1) where in K they are.
        K: a multiple of 16.
        W: as of ``decode``.
        R: as of ``decode``.
        D: as of ``decode``.
        B: as of ``decode``.
        WIDE: as of ``decode``.
        TAIL: as of ``decode``.
        UP: see ``fragments_code``.
        STEPS: see ``pairs``.
        SCALE: see ``scales_of``.
        HALF: the dtype of the layout.
    """
    units = tl.cdiv(K, 64)
    warp = tl.arange(0, W)[:, None]
    own_codes = ()
    own_scales = ()
    sums = ()
    for r in tl.static_range(R):
        start = stripes[r] * units
        own_codes = own_codes + (codes + start * 128 + (warp * 128 + tl.arange(0, 128)[None, :]),)
        own_scales = own_scales + (scales + start * 32 + (warp * 32 + tl.arange(0, 32)[None, :]),)
        sums = sums + (tl.zeros([W, 16, 8 * B], tl.float32),)
    held = ()
    for d in tl.static_range(D):
        held = held + (_fetch(own_codes, own_scales, d * W, d * W + warp < units, R, TAIL),)
    rounds = tl.cdiv(units, W * D) - 1
    for i in tl.range(0, rounds, num_stages=1):
        for d in tl.static_range(D):
            at = (i * D + D + d) * W
            new = _fetch(own_codes, own_scales, at, at + warp < units, R, TAIL)
            here = x + (i * D + d) * (W * 64)
            x0 = _tokens(tl.load(here), W, B, WIDE, UP)
            x1 = _tokens(tl.load(here + 8), W, B, WIDE, UP)
            sums = _add(sums, held[0][0], held[0][1], x0, x1, W, R, WIDE, STEPS, SCALE, HALF, UP)
            held = held[1:] + (new,)
    for d in tl.static_range(D):
        at = rounds * D * W + d * W
        here = x + at * 64
        if TAIL:
            inside = k + at * 64 < K
            x0 = _tokens(tl.load(here, mask=inside, other=0.0), W, B, WIDE, UP)
            x1 = _tokens(tl.load(here + 8, mask=inside, other=0.0), W, B, WIDE, UP)
        else:
            x0 = _tokens(tl.load(here), W, B, WIDE, UP)
            x1 = _tokens(tl.load(here + 8), W, B, WIDE, UP)
        sums = _add(sums, held[d][0], held[d][1], x0, x1, W, R, WIDE, STEPS, SCALE, HALF, UP)
    return sums


@triton.jit(do_not_specialize=["M"])
def decode(
    codes, scales, x, scale2, bias, out, M, N, K,
    W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr,
    PER_ROW: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr, UP: tl.constexpr,
    STEPS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Rows ``16 R program_id(0)`` and on of ``out``.

    Args:
        codes: i32 words.
        scales: i16, two bytes each.
        x: (M, K) of the layout's dtype; M from 1 to 8 B.
        scale2: (N,) or (1,) f32.
        bias: (N,) floats, or None.
        out: (M, N) floats; float32 if UP.
        M: tokens.
        N: rows of the weight.
        K: a multiple of 16.
        W: the units of 64 k of a step, and the number of warps.
        R: stripes of 16 rows.
        D: steps of loads under way.
        B: tokens, in eights.
        WIDE: whether the compiler gives the lanes of an operand four values of k together, not two.
        TAIL: whether K is no multiple of 64 W D.
        PER_ROW: whether scale2 is (N,).
        BIAS: whether there is a bias.
        FACTOR: what sums are multiplied by beside scale2.
        UP: see ``fragments_code``.
        STEPS: see ``pairs``.
        SCALE: see ``scales_of``.
    """
    HALF: tl.constexpr = x.dtype.element_ty
    stripe = tl.program_id(0) * R
    last = tl.cdiv(N, 16) - 1
    stripes = ()
    for r in tl.static_range(R):
        stripes = stripes + (tl.minimum(stripe + r, last).to(tl.int64),)
    lane = tl.arange(0, B * W * 32)[:, None]
    token = lane % 32 // 4 + lane // (W * 32) * 8
    k = lane % 4 * 16 + lane // 32 % W * 64
    x = x + tl.minimum(token, M - 1).to(tl.int64) * K + (k + tl.arange(0, 8)[None, :])
    sums = sums_of(codes, scales, stripes, x, k, K, W, R, D, B, WIDE, TAIL, UP, STEPS, SCALE, HALF)
    tokens = tl.arange(0, 8 * B)[None, :]
    for r in tl.static_range(R):
        rows = (stripe + r) * 16 + tl.arange(0, 16)
        total = finished(tl.sum(sums[r], axis=0), scale2, bias, rows, N, PER_ROW, BIAS, FACTOR)
        to = out + tokens.to(tl.int64) * N + rows[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=(tokens < M) & (rows < N)[:, None])
