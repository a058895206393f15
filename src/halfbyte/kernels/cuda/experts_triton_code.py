"""Device code of ``halfbyte.kernels.cuda.experts_triton``, in plain Triton.

Weights are read, decoded and multiplied as ``decode_code`` and ``gemm_code`` do; a column of the matrix unit is a slot
here: a token at one of its experts. Stacks hold an expert's stripes of 16 rows behind those of the one before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.cuda.decode_code import sums_of
from halfbyte.kernels.cuda.fragments_code import finished
from halfbyte.kernels.cuda.gemm_code import sum_of
from halfbyte.kernels.cuda.lists_code import places_of, tell
from halfbyte.kernels.cuda.step_code import _activated

SWIGLU = tl.constexpr("swigluoai")


@triton.jit
def _limited(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """The activation of the gate times up, in f32."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == SWIGLU:
        return (up + 1) * (gate / (1 + tl.exp(-1.702 * gate)))
    return _activated(gate, ACTIVATION) * up


@triton.jit
def few(
    codes, scales, x, scale2, bias, out, indices, places, blocks, slots, count, refused, N, K, WIDTH,
    SIZE: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, UP_FIRST: tl.constexpr, LIMIT: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, EXPERTS: tl.constexpr, FIRST: tl.constexpr,
    LOCAL: tl.constexpr, NULL: tl.constexpr, UNKNOWN: tl.constexpr, EARLY: tl.constexpr, HALF16: tl.constexpr,
    PER_ROW: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr, UP: tl.constexpr, STEPS: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """R stripes of 16 results, or R / 2 of gate and up each, of a block of 8 slots; or of one slot.

    Args:
        codes: i32 words of the stack.
        scales: i16, two bytes each.
        x: rows of K of the layout's dtype; slot s has row s / PART.
        scale2: (E, N) or (E,) f32.
        bias: (E, N) floats, or None.
        out: (slots, WIDTH) floats; float32 if UP.
        indices: (slots,) i32 or i64, unless LISTED.
        places: as of ``places_of``, unless LISTED.
        blocks: as of ``lists``, if LISTED.
        slots: as of ``lists``, if LISTED.
        count: as of ``lists``, if LISTED.
        refused: as of ``lists``, unless LISTED.
        N: rows of an expert.
        K: a multiple of 16.
        WIDTH: results of a slot: N, or half of it.
        SIZE: slots of a block, 8.
        PART: slots that share a row of x.
        LISTED: whether slots are listed; else a block is a slot, and its number is that slot's.
        ACTIVATION: a name, or None.
        GATED: whether rows are those of a gate and of up.
        UP_FIRST: whether up's are the first.
        LIMIT: of both, or None.
        W: as of ``decode``.
        R: stripes.
        D: as of ``decode``.
        WIDE: as of ``decode``.
        TAIL: as of ``decode``.
        EXPERTS: as of ``places_of``.
        FIRST: as of ``places_of``.
        LOCAL: as of ``places_of``.
        NULL: as of ``lists``.
        UNKNOWN: as of ``lists``.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
        HALF16: the dtype of the layout is float16; else bfloat16.
        PER_ROW: whether scale2 is (E, N).
        BIAS: whether there is a bias.
        FACTOR: what sums are multiplied by beside scale2.
        UP: see ``fragments_code``.
        STEPS: see ``pairs``.
        SCALE: see ``scales_of``.
    """
    HALF: tl.constexpr = tl.float16 if HALF16 else tl.bfloat16
    block = tl.program_id(1)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, SIZE)
    lane = tl.arange(0, W * 32)[:, None]
    k = lane % 4 * 16 + lane // 32 % W * 64
    if LISTED:
        if block >= tl.load(count):
            return
        place = tl.load(blocks + block)
        slot = tl.load(slots + block * SIZE + column)
        own = tl.load(slots + block * SIZE + lane % 32 // 4)
        own = tl.where(own < 0, tl.load(slots + block * SIZE), own) // PART
    else:
        place = places_of(indices + block, block >= 0, places, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN)
        if place < 0:
            if ACTIVATION is not None:
                if (tl.program_id(0) == 0) & (place < -1):
                    tell(refused, indices, block, EXPERTS)
            return
        slot = tl.where(column == 0, block, -1)
        own = lane * 0 + block // PART
    x = x + own.to(tl.int64) * K + (k + tl.arange(0, 8)[None, :])

    PARTS: tl.constexpr = 2 if GATED else 1
    tile = tl.program_id(0) * (R // PARTS)
    half = tl.cdiv(WIDTH, 16)
    first = place.to(tl.int64) * (half * PARTS)
    stripes = ()
    for r in tl.static_range(R):
        stripes = stripes + (first + tl.minimum(tile + r // PARTS, half - 1) + r % PARTS * half,)
    sums = sums_of(codes, scales, stripes, x, k, K, W, R, D, 1, WIDE, TAIL, UP, STEPS, SCALE, HALF)
    scale2 += place * (N if PER_ROW else 1)
    if BIAS:
        bias += place * N
    for r in tl.static_range(0, R, PARTS):
        rows = (tile + r // PARTS) * 16 + tl.arange(0, 16)
        total = finished(tl.sum(sums[r], axis=0), scale2, bias, rows, N, PER_ROW, BIAS, FACTOR)
        if GATED:
            other = finished(tl.sum(sums[r + 1], axis=0), scale2, bias, rows + WIDTH, N, PER_ROW, BIAS, FACTOR)
            if UP_FIRST:
                total = _limited(other, total, ACTIVATION, LIMIT)
            else:
                total = _limited(total, other, ACTIVATION, LIMIT)
        elif ACTIVATION is not None:
            total = _activated(total, ACTIVATION)
        to = out + slot[None, :].to(tl.int64) * WIDTH + rows[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=(slot >= 0)[None, :] & (rows < WIDTH)[:, None])


@triton.jit
def many(
    codes, scales, x, scale2, bias, out, blocks, slots, count, N, K, WIDTH,
    SIZE: tl.constexpr, PART: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, UP_FIRST: tl.constexpr,
    LIMIT: tl.constexpr, T: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr, TAIL: tl.constexpr,
    HIDDEN: tl.constexpr, EARLY: tl.constexpr, HALF16: tl.constexpr, PER_ROW: tl.constexpr, BIAS: tl.constexpr,
    FACTOR: tl.constexpr, UP: tl.constexpr, STEPS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """T stripes of 16 results, or T / 2 of gate and up each, of a block of SIZE slots.

    Args:
        codes: i32 words of the stack.
        scales: i32, four bytes each.
        x: as of ``few``.
        scale2: as of ``few``.
        bias: as of ``few``.
        out: as of ``few``.
        blocks: as of ``lists``.
        slots: as of ``lists``.
        count: as of ``lists``.
        N: as of ``few``.
        K: as of ``few``.
        WIDTH: as of ``few``.
        SIZE: slots of a block, a power of two.
        PART: as of ``few``.
        ACTIVATION: as of ``few``.
        GATED: as of ``few``.
        UP_FIRST: as of ``few``.
        LIMIT: as of ``few``.
        T: stripes.
        U: as of ``gemm``.
        STAGES: as of ``gemm``.
        TAIL: as of ``gemm``.
        HIDDEN: as of ``gemm``.
        EARLY: as of ``few``.
        HALF16: as of ``few``.
        PER_ROW: as of ``few``.
        BIAS: as of ``few``.
        FACTOR: as of ``few``.
        UP: as of ``few``.
        STEPS: see ``pairs``.
        SCALE: (shift, base) of a scale byte.
    """
    HALF: tl.constexpr = tl.float16 if HALF16 else tl.bfloat16
    block = tl.program_id(1)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if block >= tl.load(count):
        return
    place = tl.load(blocks + block)
    slot = tl.load(slots + block * SIZE + tl.arange(0, SIZE))
    own = tl.where(slot < 0, tl.load(slots + block * SIZE), slot) // PART
    x = x + own.to(tl.int64)[:, None] * K

    PARTS: tl.constexpr = 2 if GATED else 1
    EACH: tl.constexpr = T // PARTS
    tile = tl.program_id(0) * EACH
    half = tl.cdiv(WIDTH, 16)
    t = tl.arange(0, T)
    stripe = tl.minimum(tile + t % EACH, half - 1) + t // EACH * half
    stripe = (place.to(tl.int64) * (half * PARTS) + stripe)[:, None]
    steps = tl.cdiv(tl.cdiv(K, 64), U)
    total = sum_of(codes, scales, stripe, x, 0, steps, K, T, SIZE, U, STAGES, TAIL, HIDDEN, UP, STEPS, SCALE, HALF)

    row = tl.arange(0, 16 * T)
    row = tile * 16 + row % (16 * EACH) + row // (16 * EACH) * WIDTH
    scale2 += place * (N if PER_ROW else 1)
    if BIAS:
        bias += place * N
    total = finished(total, scale2, bias, row, N, PER_ROW, BIAS, FACTOR)
    if GATED:
        one, two = tl.split(tl.permute(tl.reshape(total, [2, 16 * EACH, SIZE]), (1, 2, 0)))
        if UP_FIRST:
            total = _limited(two, one, ACTIVATION, LIMIT)
        else:
            total = _limited(one, two, ACTIVATION, LIMIT)
    elif ACTIVATION is not None:
        total = _activated(total, ACTIVATION)
    rows = tile * 16 + tl.arange(0, 16 * EACH)
    to = out + slot[None, :].to(tl.int64) * WIDTH + rows[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=(slot >= 0)[None, :] & (rows < WIDTH)[:, None])
