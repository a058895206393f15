"""Device code of ``halfbyte.kernels.cuda.experts_gemm``, in Gluon.

As in ``gemm_gluon_code`` a producer fills a ring of stages and consumers decode to the registers of wgmma. A consumer
has two times 64 features: gates and the ups that belong to them, or neighbours. While one 64 are multiplied the other
ones are decoded. Rows of x are those of a block's slots; lanes of the producer copy them.

A block has up to NB slots of one expert; where there are no more than LOW, only as many are multiplied.

Blocks are dealt out in an order, if one is given, so that programs have as many large ones each.

A ring is the tuple (codes, scales, x, full, empty); lists are (blocks, slots, count, order).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from halfbyte.kernels.cuda.decode_gluon_code import _activated
from halfbyte.kernels.cuda.experts_decode_code import _gated
from halfbyte.kernels.cuda.fp8_gluon_code import decoded as decoded_fp8
from halfbyte.kernels.cuda.fp8_gluon_code import load
from halfbyte.kernels.cuda.gemm_gluon_code import decoded, let_the_next_kernel_start, together, wait_for_kernels_ahead


@gluon.jit
def _ask_for_weights(maps, boxes, bar, slot, stripe, apart, step, U: gl.constexpr):
    """The words and scales of a step into a slot: of the first half of the features, and ``apart`` of the second."""
    codes, scales = boxes
    for half in gl.static_range(2):
        at = stripe + half * apart
        tma.async_copy_global_to_shared(maps[0], [at, step * (8 * U), 0], bar, codes.index(slot * 2 + half))
        tma.async_copy_global_to_shared(maps[1], [at, step * (16 * U)], bar, scales.index(slot * 2 + half))


@gluon.jit
def _copy(x, to, rows, step, width, EVEN: gl.constexpr, L: gl.constexpr):
    """A step of rows of x, which are ``width`` apart: 128 bytes at a time."""
    EACH: gl.constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth
    STEP: gl.constexpr = to.shape[1]
    k = step * STEP + gl.arange(0, EACH, layout=gl.SliceLayout(0, L))[None, :]
    at = x + rows.to(gl.int64)[:, None] * width + k
    for i in gl.static_range(STEP // EACH):
        if EVEN:
            async_copy.async_copy_global_to_shared(to.slice(EACH * i, EACH, dim=1), at + EACH * i)
        else:
            there = k + EACH * i < width
            async_copy.async_copy_global_to_shared(to.slice(EACH * i, EACH, dim=1), at + EACH * i, mask=there)


@gluon.jit
def _rows(slots, block, NB: gl.constexpr, ROWS: gl.constexpr, L: gl.constexpr):
    """Of each ROWS slots of a block: which they are, and whether there are any."""
    at = slots + block * NB
    found = ()
    there = ()
    for i in gl.static_range(NB // ROWS):
        found = found + (gl.load(at + i * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))),)
        there = there + (gl.load(at + i * ROWS) >= 0,)
    return found, there


@gluon.jit
def _dealt(order, i, last):
    """The block that is the i-th to be dealt out."""
    i = gl.maximum(gl.minimum(i, last), 0)
    if order is not None:
        i = gl.load(order + i)
    return i


@gluon.jit
def _after(turn, tile, along_n):
    """The item after one, of the program: the turn of its block, and its tile."""
    tile += gl.num_programs(0) % along_n
    wraps = tile >= along_n
    turn += gl.num_programs(0) // along_n + wraps.to(gl.int32)
    return turn, gl.where(wraps, tile - along_n, tile)


@gluon.jit
def produce(maps, boxes, ring, lists, x, numbers, FORM: gl.constexpr):
    """Fill the ring with weights, and with boxes of x where no lanes copy its rows, for all items of the program."""
    C: gl.constexpr = FORM[0]
    U: gl.constexpr = FORM[1]
    NB: gl.constexpr = FORM[2]
    STAGES: gl.constexpr = FORM[4]
    GATED: gl.constexpr = FORM[5]
    EARLY: gl.constexpr = FORM[6]
    LISTED: gl.constexpr = FORM[21]
    BYTES: gl.constexpr = C * U * (8 * 576) + (0 if LISTED else NB * U * 8 * FORM[18].primitive_bitwidth)
    STEP: gl.constexpr = 4 * C if GATED else 8 * C
    blocks, _slots, count, order = lists
    _codes, _scales, to, full, empty = ring
    N, _width, along_n, steps, _share = numbers
    stripes = N // 16
    if GATED:
        apart = stripes // 2
    else:
        apart = 4 * C
    turn = gl.program_id(0) // along_n
    tile = gl.program_id(0) % along_n
    asked = 0
    if EARLY:
        let_the_next_kernel_start()
    else:
        wait_for_kernels_ahead()
        let_the_next_kernel_start()
    last = gl.load(count) - 1
    items = (last + 1) * along_n
    block = _dealt(order, turn, last)
    place = gl.load(blocks + block)
    if EARLY:
        if gl.program_id(0) < items:
            asked = gl.minimum(steps, STAGES)
            for i in range(asked):
                mbarrier.expect(full.index(i), BYTES)
                _ask_for_weights(maps, boxes, full.index(i), i, place * stripes + tile * STEP, apart, i, U)
        wait_for_kernels_ahead()
    done = 0
    for _ in range(gl.program_id(0), items, gl.num_programs(0)):
        stripe = place * stripes + tile * STEP
        first = block * NB
        turn, tile = _after(turn, tile, along_n)
        block = _dealt(order, turn, last)
        place = gl.load(blocks + block)
        for step in range(steps):
            slot = done % STAGES
            bar = full.index(slot)
            if done >= asked:
                mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, BYTES)
                _ask_for_weights(maps, boxes, bar, slot, stripe, apart, step, U)
            if not LISTED:
                tma.async_copy_global_to_shared(x, [first, step * to.shape[2]], bar, to.index(slot))
            done += 1


@gluon.jit
def copy(ring, lists, x, numbers, FORM: gl.constexpr):
    """Fill the ring with the rows of x of each block's slots, for all items of the program."""
    NB: gl.constexpr = FORM[2]
    STAGES: gl.constexpr = FORM[4]
    EVEN: gl.constexpr = FORM[7]
    EACH: gl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    L: gl.constexpr = gl.BlockedLayout([1, EACH], [4, 8], [gl.num_warps(), 1], [1, 0])
    ROWS: gl.constexpr = min(NB, 32)
    _blocks, slots, count, order = lists
    _codes, _scales, to, full, empty = ring
    _N, width, along_n, steps, share = numbers
    wait_for_kernels_ahead()
    turn = gl.program_id(0) // along_n
    tile = gl.program_id(0) % along_n
    last = gl.load(count) - 1
    listed, there = _rows(slots, _dealt(order, turn, last), NB, ROWS, L)
    done = 0
    for _ in range(gl.program_id(0), (last + 1) * along_n, gl.num_programs(0)):
        rows = ()
        for i in gl.static_range(NB // ROWS):
            rows = rows + (gl.maximum(listed[i], 0) // share,)
        here = there
        turn, tile = _after(turn, tile, along_n)
        listed, there = _rows(slots, _dealt(order, turn, last), NB, ROWS, L)
        for step in range(steps):
            slot = done % STAGES
            mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
            for i in gl.static_range(NB // ROWS):
                if i == 0:
                    _copy(x, to.index(slot).slice(0, ROWS, dim=0), rows[0], step, width, EVEN, L)
                elif here[i]:
                    _copy(x, to.index(slot).slice(i * ROWS, ROWS, dim=0), rows[i], step, width, EVEN, L)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            done += 1


@gluon.jit
def _arrived(ring, done, STAGES: gl.constexpr, LISTED: gl.constexpr):
    """The slot of a step that is there."""
    slot = done % STAGES
    mbarrier.wait(ring[3].index(slot), (done // STAGES) & 1)
    if LISTED:
        fence_async_shared()  # lanes copied the rows, and the matrix units read them
    return slot


@gluon.jit
def _issue(ring, slot, acc, unit: gl.constexpr, half: gl.constexpr, WHICH: gl.constexpr, MUL: gl.constexpr):
    """Decode 64 rows of a unit, and have them multiplied: sums on their way, and what is read for them meanwhile."""
    W: gl.constexpr = acc.shape[1]
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    w = decoded(ring, (slot * 2 + half) * MUL[0] + WHICH, unit, 4, MUL[3], MUL[4], MUL[5], A)
    x = ring[2].index(slot).slice(0, W, dim=0).slice(64 * unit, 64, dim=1)
    return warpgroup_mma(w, x.permute((1, 0)), acc, is_async=True), w


@gluon.jit
def _others(ring, slot, g, u, a, WHICH: gl.constexpr, MUL: gl.constexpr):
    """What comes after the first 64 rows of a slot's first unit."""
    u, b = _issue(ring, slot, u, 0, 1, WHICH, MUL)
    g, u, a, b = warpgroup_mma_wait(1, deps=[g, u, a, b])
    for unit in gl.static_range(1, MUL[1]):
        g, a = _issue(ring, slot, g, unit, 0, WHICH, MUL)
        g, u, a, b = warpgroup_mma_wait(1, deps=[g, u, a, b])
        u, b = _issue(ring, slot, u, unit, 1, WHICH, MUL)
        g, u, a, b = warpgroup_mma_wait(1, deps=[g, u, a, b])
    return g, u, a, b


@gluon.jit
def multiply(ring, done, steps, WHICH: gl.constexpr, MMA: gl.constexpr, W: gl.constexpr, MUL: gl.constexpr):
    """Two times (64, W) f32: the sums of a block's first W slots; ``done`` steps were before in the ring."""
    STAGES: gl.constexpr = MUL[2]
    g = gl.zeros([64, W], gl.float32, MMA)
    u = gl.zeros([64, W], gl.float32, MMA)
    slot = _arrived(ring, done, STAGES, MUL[6])
    g, a = _issue(ring, slot, g, 0, 0, WHICH, MUL)
    g, u, a, b = _others(ring, slot, g, u, a, WHICH, MUL)
    for _ in range(steps - 1):
        before = slot
        done += 1
        slot = _arrived(ring, done, STAGES, MUL[6])
        g, a = _issue(ring, slot, g, 0, 0, WHICH, MUL)
        g, u, a, b = warpgroup_mma_wait(1, deps=[g, u, a, b])
        mbarrier.arrive(ring[4].index(before), count=1)
        g, u, a, b = _others(ring, slot, g, u, a, WHICH, MUL)
    g, u, a, b = warpgroup_mma_wait(0, deps=[g, u, a, b])
    mbarrier.arrive(ring[4].index(slot), count=1)
    return g, u, done + 1


@gluon.jit
def multiply_small(
    ring, done, steps, WHICH: gl.constexpr, MMA: gl.constexpr, W: gl.constexpr, MUL: gl.constexpr
):  # fmt: skip
    """The same by m16n8k16, which is the faster the fewer slots there are."""
    C: gl.constexpr = MUL[0]
    STAGES: gl.constexpr = MUL[2]
    HALF: gl.constexpr = MUL[3]
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    g = gl.zeros([64, W], gl.float32, MMA)
    u = gl.zeros([64, W], gl.float32, MMA)
    for _ in range(steps):
        slot = done % STAGES
        mbarrier.wait(ring[3].index(slot), (done // STAGES) & 1)
        for unit in gl.static_range(MUL[1]):
            x = ring[2].index(slot).slice(0, W, dim=0).slice(64 * unit, 64, dim=1).permute((1, 0)).load(B)
            box = slot * 2 * C + WHICH
            g = mma_v2(decoded(ring, box, unit, 4, HALF, MUL[4], MUL[5], A), x, g)
            u = mma_v2(decoded(ring, box + C, unit, 4, HALF, MUL[4], MUL[5], A), x, u)
        mbarrier.arrive(ring[4].index(slot), count=1)
        done += 1
    return g, u, done


@gluon.jit
def multiply_fp8(ring, done, steps, WHICH: gl.constexpr, MMA: gl.constexpr, W: gl.constexpr, MUL: gl.constexpr):
    """The same of e4m3, as ``fp8_gluon_code`` has it: words are read ahead, and are bytes when the units are free."""
    C: gl.constexpr = MUL[0]
    STAGES: gl.constexpr = MUL[2]
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    g = gl.zeros([64, W], gl.float32, MMA)
    u = gl.zeros([64, W], gl.float32, MMA)
    slot = _arrived(ring, done, STAGES, MUL[6])
    words, pairs = load(ring, slot * 2 * C + WHICH, 4, 2)
    for _ in range(steps - 1):
        x = ring[2].index(slot).slice(0, W, dim=0).permute((1, 0))
        g = warpgroup_mma(decoded_fp8(words, pairs, 4, 2, MUL[5], MUL[4], A), x, g, is_async=True)
        words, pairs = load(ring, (slot * 2 + 1) * C + WHICH, 4, 2)
        g, words, pairs = warpgroup_mma_wait(0, deps=[g, words, pairs])
        u = warpgroup_mma(decoded_fp8(words, pairs, 4, 2, MUL[5], MUL[4], A), x, u, is_async=True)
        before = slot
        done += 1
        slot = _arrived(ring, done, STAGES, MUL[6])
        words, pairs = load(ring, slot * 2 * C + WHICH, 4, 2)
        u, words, pairs = warpgroup_mma_wait(0, deps=[u, words, pairs])
        mbarrier.arrive(ring[4].index(before), count=1)
    x = ring[2].index(slot).slice(0, W, dim=0).permute((1, 0))
    g = warpgroup_mma(decoded_fp8(words, pairs, 4, 2, MUL[5], MUL[4], A), x, g, is_async=True)
    words, pairs = load(ring, (slot * 2 + 1) * C + WHICH, 4, 2)
    g, words, pairs = warpgroup_mma_wait(0, deps=[g, words, pairs])
    u = warpgroup_mma(decoded_fp8(words, pairs, 4, 2, MUL[5], MUL[4], A), x, u, is_async=True)
    u = warpgroup_mma_wait(0, deps=[u])
    mbarrier.arrive(ring[4].index(slot), count=1)
    return g, u, done + 1


@gluon.constexpr_function
def _across(to, warps):
    """A lane has 16 bytes of a row of 64 results."""
    each = 128 // to.primitive_bitwidth
    return gl.BlockedLayout([1, each], [each // 2, 64 // each], [warps, 1], [1, 0])


@gluon.jit
def _put(value, stage, out, rows, n, N, TO: gl.constexpr, HEIGHT: gl.constexpr, W: gl.constexpr):
    """(64, W), HEIGHT slots at a time, to rows of out; none where they are -1."""
    if W <= HEIGHT:
        ACROSS: gl.constexpr = _across(TO, gl.num_warps())
        stage = stage.slice(0, W, dim=0)
        together()
        stage.permute((1, 0)).store(value.to(TO))
        together()
        column = n + gl.arange(0, 64, layout=gl.SliceLayout(0, ACROSS))[None, :]
        at = out + rows[0].to(gl.int64)[:, None] * N + column
        gl.store(at, stage.load(ACROSS), mask=(rows[0] >= 0)[:, None] & (column < N))
    else:
        low, high = gl.split(value.reshape(64, 2, W // 2).permute(0, 2, 1))
        HALF: gl.constexpr = len(rows) // 2
        _put(low, stage, out, rows[:HALF], n, N, TO, HEIGHT, W // 2)
        _put(high, stage, out, rows[HALF:], n, N, TO, HEIGHT, W // 2)


@gluon.jit
def _factors(scale2, place, n, N, MMA: gl.constexpr, PER_ROW: gl.constexpr):
    """What sums of 64 features n on are multiplied by: of each feature, or of all."""
    rows = n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    if PER_ROW:
        found = gl.load(scale2 + place * N + rows, mask=rows < N, other=0.0)[:, None]
    else:
        found = gl.load(scale2 + place)
    return found


@gluon.jit
def _finished(acc, factors, tokens, bias, place, n, N, BIAS: gl.constexpr, FACTOR: gl.constexpr):
    """(64, W) sums of features n on of an expert -> times its scale2 and tokens' scales, with its bias."""
    acc = acc * (factors * FACTOR)
    if tokens is not None:
        acc = acc * gl.convert_layout(tokens, gl.SliceLayout(0, acc.type.layout))[None, :]
    if BIAS:
        rows = n + gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
        acc = acc + gl.load(bias + place * N + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def _block(
    ring, given, slots, block, share, place, tile, done, steps, WHICH: gl.constexpr, W: gl.constexpr,
    SMALL: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """A tile of a block's first W slots, from the ring to out; the steps that have been in the ring then."""
    C: gl.constexpr = FORM[0]
    GATED: gl.constexpr = FORM[5]
    TO: gl.constexpr = FORM[8]
    HEIGHT: gl.constexpr = FORM[9]
    PER_ROW: gl.constexpr = FORM[10]
    BIAS: gl.constexpr = FORM[11]
    ACTIVATION: gl.constexpr = FORM[12]
    LIMIT: gl.constexpr = FORM[13]
    UP_FIRST: gl.constexpr = FORM[14]
    FACTOR: gl.constexpr = FORM[17]
    LISTED: gl.constexpr = FORM[21]
    SORTED: gl.constexpr = FORM[22]
    NB: gl.constexpr = FORM[2]
    MUL: gl.constexpr = (C, FORM[1], FORM[4], FORM[18], FORM[15], FORM[16], LISTED)
    FP8: gl.constexpr = FORM[18] == gl.float8e4nv
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        [2 if SMALL and not FP8 else 3, 0],
        [gl.num_warps(), 1],
        [16, 8] if SMALL and not FP8 else [16, W, 32 if FP8 else 16],
    )
    stages, out, scale2, xscale, bias, N = given
    stage = stages.index(WHICH)
    if GATED:
        n = (tile * C + WHICH) * 64
        m = n + N // 2
    else:
        n = (tile * 2 * C + WHICH) * 64
        m = n + 64 * C
    # read ahead of the products, which take longer
    of_g = _factors(scale2, place, n, N, MMA, PER_ROW)
    of_u = _factors(scale2, place, m, N, MMA, PER_ROW)
    rows = ()
    AT_ONCE: gl.constexpr = min(W, HEIGHT)
    for i in gl.static_range(W // AT_ONCE):
        inside = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, _across(TO, gl.num_warps())))
        if SORTED:
            rows = rows + (block * NB + i * AT_ONCE + inside,)
        else:
            rows = rows + (gl.load(slots + block * NB + i * AT_ONCE + inside),)
    tokens = None
    if FP8:
        row = block * NB + gl.arange(0, W, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        if LISTED:
            row = gl.maximum(gl.load(slots + row), 0) // share
        tokens = gl.load(xscale + row)
        g, u, done = multiply_fp8(ring, done, steps, WHICH, MMA, W, MUL)
    elif SMALL:
        g, u, done = multiply_small(ring, done, steps, WHICH, MMA, W, MUL)
    else:
        g, u, done = multiply(ring, done, steps, WHICH, MMA, W, MUL)
    g = _finished(g, of_g, tokens, bias, place, n, N, BIAS, FACTOR)
    u = _finished(u, of_u, tokens, bias, place, m, N, BIAS, FACTOR)
    if GATED:
        if UP_FIRST:
            h = _gated(u, g, ACTIVATION, LIMIT)
        else:
            h = _gated(g, u, ACTIVATION, LIMIT)
        _put(h, stage, out, rows, n, N // 2, TO, HEIGHT, W)
    else:
        if ACTIVATION is not None:
            g = _activated(g, ACTIVATION)
            u = _activated(u, ACTIVATION)
        _put(g, stage, out, rows, n, N, TO, HEIGHT, W)
        _put(u, stage, out, rows, m, N, TO, HEIGHT, W)
    return done


@gluon.jit
def consume(ring, lists, given, numbers, WHICH: gl.constexpr, FORM: gl.constexpr):
    """The features of consumer WHICH of all items of the program, from the ring to out."""
    NB: gl.constexpr = FORM[2]
    LOW: gl.constexpr = FORM[3]
    SMALL: gl.constexpr = FORM[19]
    MID: gl.constexpr = FORM[20]
    blocks, slots, count, order = lists
    _N, _width, along_n, steps, share = numbers
    wait_for_kernels_ahead()
    last = gl.load(count) - 1
    turn = gl.program_id(0) // along_n
    tile = gl.program_id(0) % along_n
    block = _dealt(order, turn, last)
    place = gl.load(blocks + block)
    done = 0
    for _ in range(gl.program_id(0), (last + 1) * along_n, gl.num_programs(0)):
        own = block
        at = slots + block * NB
        expert = place
        part = tile
        turn, tile = _after(turn, tile, along_n)
        block = _dealt(order, turn, last)
        place = gl.load(blocks + block)
        if SMALL:
            done = _block(ring, given, slots, own, share, expert, part, done, steps, WHICH, NB, True, FORM)
        elif MID:
            if gl.load(at + LOW) < 0:
                done = _block(ring, given, slots, own, share, expert, part, done, steps, WHICH, LOW, True, FORM)
            elif gl.load(at + MID) < 0:
                done = _block(ring, given, slots, own, share, expert, part, done, steps, WHICH, MID, False, FORM)
            else:
                done = _block(ring, given, slots, own, share, expert, part, done, steps, WHICH, NB, False, FORM)
        elif LOW:
            if gl.load(at + LOW) < 0:
                done = _block(ring, given, slots, own, share, expert, part, done, steps, WHICH, LOW, True, FORM)
            else:
                done = _block(ring, given, slots, own, share, expert, part, done, steps, WHICH, NB, False, FORM)
        else:
            done = _block(ring, given, slots, own, share, expert, part, done, steps, WHICH, NB, False, FORM)


@gluon.jit
def experts(
    codes_map,
    scales_map,
    x,
    out,
    scale2,
    xscale,
    bias,
    blocks,
    slots,
    count,
    order,
    N,
    width,
    along_n,
    steps,
    share,
    C: gl.constexpr,
    U: gl.constexpr,
    NB: gl.constexpr,
    LOW: gl.constexpr,
    STAGES: gl.constexpr,
    HEIGHT: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER: gl.constexpr,
    COPIERS: gl.constexpr,
    GATED: gl.constexpr,
    EARLY: gl.constexpr,
    EVEN: gl.constexpr,
    PER_ROW: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_FIRST: gl.constexpr,
    DECODE: gl.constexpr,
    SCALES: gl.constexpr,
    FACTOR: gl.constexpr,
    SMALL: gl.constexpr,
    MID: gl.constexpr,
    LISTED: gl.constexpr,
    SORTED: gl.constexpr,
    ORDERED: gl.constexpr,
):
    """A product of experts: of rows of x with tiles of their weights, for all blocks of slots.

    Args:
        codes_map: boxes (4, 8 U, 16) of i32 (tiles of all experts, 8 units, 16).
        scales_map: boxes (4, 16 U) of i32 (tiles, 16 units).
        x: (slots / share, width) bf16, f16, or e4m3 in the order of ``fp8_gluon_code``; zeros, or none, from K on.
        out: (slots, N), or (slots, N / 2) if GATED.
        scale2: f32, (E,) or (E, N).
        xscale: f32, of each row of x, which e4m3 was divided by.
        bias: (E, N), if BIAS.
        blocks: i32, the place of each block's expert.
        slots: i32, of each block NB; -1 behind the last one of a block that is not full.
        count: i32, how many blocks there are.
        order: i32, those in the order in which they are dealt out, if ORDERED.
        N: features of an expert, a multiple of 16, and of 32 if GATED.
        width: of x, a multiple of 16.
        along_n: tiles of a block.
        steps: of a tile.
        share: slots that share a row of x.
        C: consumers.
        U: units of 64 k of a step.
        NB: slots of a block.
        LOW: as many are multiplied where there are no more; 0: always all.
        STAGES: of the ring.
        HEIGHT: slots that are stored at a time.
        REGISTERS: of a consumer's thread.
        PRODUCER: of one of the producer's.
        COPIERS: warps of the producer.
        GATED: the second half of the features is multiplied with the activation of the first.
        EARLY: lists and weights are older than the kernel ahead.
        EVEN: width is steps times 64 U.
        PER_ROW: scale2 differs by feature.
        BIAS: a bias is added.
        ACTIVATION: of results, by name, or None.
        LIMIT: of gates and ups, or None.
        UP_FIRST: the first half of the features are ups.
        DECODE: assembly: a word and a pair of scales -> four pairs of products; or fp8's LOOK_UP.
        SCALES: assembly: four scale bytes -> two pairs of scales; or fp8's TABLE.
        FACTOR: what products lack beside scale2.
        SMALL: all are multiplied by m16n8k16.
        MID: as many are multiplied where there are more than LOW and no more than these; 0: none are.
        LISTED: rows of x are copied, of each slot; else they are in the order of blocks, and x is boxes (NB, 64 U).
        SORTED: rows of out are in the order of blocks, too; else of slots.
        ORDERED: there is an order.
    """
    TO: gl.constexpr = out.dtype.element_ty
    HALF: gl.constexpr = x.dtype.element_ty if LISTED else x.dtype
    big = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 4 * C, 8 * U, 16], codes_map.layout)
    of_big = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 4 * C, 16 * U], scales_map.layout)
    codes = big._reinterpret(gl.int32, [STAGES * 2 * C, 4, 8 * U, 16], codes_map.layout)
    scales = of_big._reinterpret(gl.int32, [STAGES * 2 * C, 4, 16 * U], scales_map.layout)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, HALF.primitive_bitwidth, 2)
    rows = gl.allocate_shared_memory(HALF, [STAGES, NB, 64 * U], ROWS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + (32 * COPIERS if LISTED else 0))
        mbarrier.init(empty.index(i), count=C)
    fence_async_shared()
    WIDE: gl.constexpr = TO.primitive_bitwidth
    stages = gl.allocate_shared_memory(TO, [C, HEIGHT, 64], gl.NVMMASharedLayout(128, WIDE, 2))
    ring = (codes, scales, rows, full, empty)
    lists = (blocks, slots, count, order if ORDERED else None)
    numbers = (N, width, along_n, steps, share)
    given = (stages, out, scale2, xscale, bias, N)
    FORM: gl.constexpr = (
        C, U, NB, LOW, STAGES, GATED, EARLY, EVEN, TO, HEIGHT, PER_ROW, BIAS, ACTIVATION, LIMIT, UP_FIRST,
        DECODE, SCALES, FACTOR, HALF, SMALL, MID, LISTED, SORTED,
    )  # fmt: skip
    maps = (codes_map, scales_map)
    if C == 1:
        if LISTED:
            gl.warp_specialize(
                [
                    (consume, (ring, lists, given, numbers, 0, FORM)),
                    (produce, (maps, (big, of_big), ring, lists, x, numbers, FORM)),
                    (copy, (ring, lists, x, numbers, FORM)),
                ],
                [1, COPIERS],
                [PRODUCER, PRODUCER],
            )
        else:
            gl.warp_specialize(
                [
                    (consume, (ring, lists, given, numbers, 0, FORM)),
                    (produce, (maps, (big, of_big), ring, lists, x, numbers, FORM)),
                ],
                [1],
                [PRODUCER],
            )
    else:
        gl.static_assert(C == 2)
        if LISTED:
            gl.warp_specialize(
                [
                    (consume, (ring, lists, given, numbers, 0, FORM)),
                    (consume, (ring, lists, given, numbers, 1, FORM)),
                    (produce, (maps, (big, of_big), ring, lists, x, numbers, FORM)),
                    (copy, (ring, lists, x, numbers, FORM)),
                ],
                [4, 1, COPIERS],
                [REGISTERS, PRODUCER, PRODUCER],
            )
        else:
            gl.warp_specialize(
                [
                    (consume, (ring, lists, given, numbers, 0, FORM)),
                    (consume, (ring, lists, given, numbers, 1, FORM)),
                    (produce, (maps, (big, of_big), ring, lists, x, numbers, FORM)),
                ],
                [4, 1],
                [REGISTERS, PRODUCER],
            )
