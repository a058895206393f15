"""Device code of ``halfbyte.kernels.cuda.gemm``, in plain Triton.

The weight is the first operand, which sm_90 takes from registers: a lane decodes words as they lie, both their rows and
halves of a block, with their scales, and the compiler moves what other lanes multiply through shared memory; k is in
its natural order. With several parts of K, each writes its sums to its slot of ``sums``, and the last to come adds the
slots in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.cuda.fragments_code import finished, floats_of, pairs, widened


@triton.jit
def _weights(words, both, T: tl.constexpr, STEPS: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr, UP: tl.constexpr):  # fmt: skip # noqa: E501
    """(T, 128) words and (T, 32) pairs of scale bytes, low in u32, of a unit of each stripe -> (16 T, 64)."""
    w = tl.reshape(words.to(tl.uint32, bitcast=True), [T, 8, 4, 4])
    s = tl.reshape(both, [T, 8, 4])
    scale0 = floats_of(((s & 0xFF) << SCALE[0]) | SCALE[1], HALF, UP)[:, :, :, None, None]
    scale1 = floats_of((((s >> 8) & 0xFF) << SCALE[0]) | SCALE[1], HALF, UP)[:, :, :, None, None]
    first = tl.join(pairs(w, 0, STEPS, HALF, UP) * scale0, pairs(w, 1, STEPS, HALF, UP) * scale1)
    second = tl.join(pairs(w, 2, STEPS, HALF, UP) * scale0, pairs(w, 3, STEPS, HALF, UP) * scale1)
    w = tl.permute(tl.join(first, second), (0, 5, 1, 2, 6, 3, 4))  # T g kt c p rh h -> T rh g | kt h c p
    return tl.reshape(w, [16 * T, 64])


@triton.jit
def sum_of(
    codes, scales, stripe, x, start, steps, K,
    T: tl.constexpr, BM: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr, TAIL: tl.constexpr, HIDDEN: tl.constexpr,
    UP: tl.constexpr, STEPS: tl.constexpr, SCALE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """(16 T, BM) sums over a part of K.

    Args:
        codes: i32 words.
        scales: i32, four bytes each.
        stripe: (T, 1) i64, their numbers.
        x: (BM, 1) addresses of rows.
        start: the first unit of 64 k.
        steps: of U units each.
        K: a multiple of 16.
        T: as of ``gemm``.
        BM: as of ``gemm``.
        U: as of ``gemm``.
        STAGES: as of ``gemm``.
        TAIL: as of ``gemm``.
        HIDDEN: as of ``gemm``.
        UP: see ``fragments_code``.
        STEPS: see ``pairs``.
        SCALE: (shift, base) of a scale byte.
        HALF: the dtype of the layout.
    """
    units = tl.cdiv(K, 64)
    pair = tl.arange(0, 32)[None, :]
    words = codes + (stripe * units + start) * 128 + tl.arange(0, 128)[None, :]
    fours = scales + (stripe * units + start) * 16 + pair // 2
    k = start * 64 + tl.arange(0, 64)
    x = x + k[None, :]
    total = tl.zeros([16 * T, BM], tl.float32)
    for i in tl.range(0, steps, num_stages=STAGES):
        for u in tl.static_range(U):
            at = i * U + u
            if TAIL:
                there = (stripe >= 0) & (start + at < units)
                held = tl.load(words + at * 128, mask=there, other=0)
                four = tl.load(fours + at * 16, mask=there, other=0)
                xs = tl.load(x + at * 64, mask=(k + at * 64 < K)[None, :], other=0.0)
            else:
                held = tl.load(words + at * 128)
                four = tl.load(fours + at * 16)
                xs = tl.load(x + at * 64)
            both = four.to(tl.uint32, bitcast=True) >> (pair % 2 * 16)
            w = _weights(held, both, T, STEPS, SCALE, HALF, UP)
            if HIDDEN:
                total = tl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=r,r", [total], dtype=tl.float32, is_pure=False, pack=1
                )
            total = tl.dot(w, tl.trans(widened(xs, UP)), total)
    return total


@triton.jit(do_not_specialize=["M", "share", "parts_m"])
def gemm(
    codes, scales, x, scale2, bias, out, sums, counts, M, N, K, share, parts_m,
    T: tl.constexpr, BM: tl.constexpr, U: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    TAIL: tl.constexpr, HIDDEN: tl.constexpr, PER_ROW: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr,
    UP: tl.constexpr, STEPS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """One tile of ``out``, (BM, 16 T), or its sums over a part of K.

    Args:
        codes: i32 words.
        scales: i32, four bytes each.
        x: (M, K) of the layout's dtype.
        scale2: (N,) or (1,) f32.
        bias: (N,) floats, or None.
        out: (M, N) floats; float32 if UP.
        sums: f32, 16 T BM for each program; not used where SPLIT is 1.
        counts: i32, one 0 for each tile, and 0 again afterwards; not used where SPLIT is 1.
        M: tokens.
        N: rows of the weight.
        K: a multiple of 16.
        share: the units of 64 k of a part of K, a multiple of U.
        parts_m: tiles along M.
        T: stripes of 16 rows of a tile.
        BM: tokens of a tile.
        U: units of a step.
        SPLIT: parts of K.
        STAGES: of the compiler's pipeline.
        GROUP: tiles along M that follow each other before N goes on.
        TAIL: whether K is no multiple of 64 U.
        HIDDEN: whether sums pass a move that the compiler does not look into; see ``gemm.hidden``.
        PER_ROW: whether scale2 is (N,).
        BIAS: whether there is a bias.
        FACTOR: what sums are multiplied by beside scale2.
        UP: see ``fragments_code``.
        STEPS: see ``pairs``.
        SCALE: (shift, base) of a scale byte.
    """
    HALF: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    part = tl.program_id(1)
    stripes = tl.cdiv(N, 16)
    in_group = GROUP * tl.cdiv(stripes, T)
    first = tile // in_group * GROUP
    here = tl.minimum(parts_m - first, GROUP)
    tile_m = first + tile % in_group % here
    tile_n = tile % in_group // here

    units = tl.cdiv(K, 64)
    start = part * share
    steps = tl.cdiv(tl.minimum(start + share, units) - start, U)
    stripe = tl.minimum(tile_n * T + tl.arange(0, T), stripes - 1).to(tl.int64)[:, None]
    token = tile_m * BM + tl.arange(0, BM)
    x = x + (token % M).to(tl.int64)[:, None] * K
    total = sum_of(
        codes, scales, stripe, x, start, steps, K, T, BM, U, STAGES, TAIL, HIDDEN, UP, STEPS, SCALE, HALF
    )  # fmt: skip

    rows = tile_n * (16 * T) + tl.arange(0, 16 * T)
    to = out + token.to(tl.int64)[None, :] * N + rows[:, None]
    written = (token < M)[None, :] & (rows < N)[:, None]
    if SPLIT == 1:
        total = finished(total, scale2, bias, rows, N, PER_ROW, BIAS, FACTOR)
        tl.store(to, total.to(out.dtype.element_ty), mask=written)
    else:
        slot = tl.arange(0, 16 * T)[:, None] * BM + tl.arange(0, BM)[None, :]
        sums += tile.to(tl.int64) * (SPLIT * 16 * T * BM)
        tl.store(sums + part * (16 * T * BM) + slot, total)
        tl.debug_barrier()
        if tl.atomic_add(counts + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros([16 * T, BM], tl.float32)
            for i in range(SPLIT):
                total += tl.load(sums + i * (16 * T * BM) + slot, cache_modifier=".cg")
            total = finished(total, scale2, bias, rows, N, PER_ROW, BIAS, FACTOR)
            tl.store(to, total.to(out.dtype.element_ty), mask=written)
            tl.store(counts + tile, 0)
