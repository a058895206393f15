"""Device code of ``halfbyte.kernels.cuda.experts_gemm``, in Gluon.

As in ``gemm_gluon_code`` a producer fills a ring of stages and consumers decode to the registers of wgmma. A consumer
has two times 64 features: gates and the ups that belong to them, or neighbours. While one 64 are multiplied the other
ones are decoded. Rows of x are those of a block's slots; lanes of the producer copy them.

A block has up to NB slots of one expert; where there are no more than LOW, only as many are multiplied.

A ring is the tuple (codes, scales, x, full, empty); lists are (blocks, slots, count).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from halfbyte.kernels.cuda.decode_gluon_code import _activated
from halfbyte.kernels.cuda.experts_decode_code import _gated
from halfbyte.kernels.cuda.gemm_gluon_code import decoded, let_the_next_kernel_start, together, wait_for_kernels_ahead


@gluon.jit
def _ask_for_weights(
    maps, ring, slot, stripe, step, apart, C: gl.constexpr, U: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """The words and scales of a step into a slot; ``stripe`` is the first of all, ups lie ``apart`` from gates."""
    codes_map, scales_map = maps
    codes, scales, _x, full, _empty = ring
    bar = full.index(slot)
    for c in gl.static_range(C):
        for half in gl.static_range(2):
            if GATED:
                at = stripe + 4 * c + half * apart
            else:
                at = stripe + 8 * c + 4 * half
            box = (slot * C + c) * 2 + half
            tma.async_copy_global_to_shared(codes_map, [at, step * (8 * U), 0], bar, codes.index(box))
            tma.async_copy_global_to_shared(scales_map, [at, step * (16 * U)], bar, scales.index(box))


@gluon.jit
def _copy(x, to, rows, step, K, U: gl.constexpr, EVEN: gl.constexpr, L: gl.constexpr):
    """A step of rows of x into (ROWS, 64 U)."""
    k = step * (64 * U) + gl.arange(0, 64, layout=gl.SliceLayout(0, L))[None, :]
    at = x + rows.to(gl.int64)[:, None] * K + k
    for u in gl.static_range(U):
        if EVEN:
            async_copy.async_copy_global_to_shared(to.slice(64 * u, 64, dim=1), at + 64 * u)
        else:
            async_copy.async_copy_global_to_shared(to.slice(64 * u, 64, dim=1), at + 64 * u, mask=k + 64 * u < K)


@gluon.jit
def produce(maps, ring, lists, x, numbers, FORM: gl.constexpr):
    """Fill the ring for all items of the program."""
    C: gl.constexpr = FORM[0]
    U: gl.constexpr = FORM[1]
    NB: gl.constexpr = FORM[2]
    LOW: gl.constexpr = FORM[3]
    STAGES: gl.constexpr = FORM[4]
    GATED: gl.constexpr = FORM[5]
    EARLY: gl.constexpr = FORM[6]
    EVEN: gl.constexpr = FORM[7]
    BYTES: gl.constexpr = C * U * (8 * 576)
    STEP: gl.constexpr = 4 * C if GATED else 8 * C
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    blocks, slots, count = lists
    _codes, _scales, rows, full, empty = ring
    FEW: gl.constexpr = LOW if LOW else NB
    N, K, along_n, steps, share = numbers
    stripes = N // 16
    asked = 0
    if EARLY:
        let_the_next_kernel_start()
        items = gl.load(count) * along_n
        if gl.program_id(0) < items:
            place = gl.load(blocks + gl.program_id(0) // along_n)
            stripe = place * stripes + gl.program_id(0) % along_n * STEP
            asked = gl.minimum(steps, STAGES)
            for i in range(asked):
                mbarrier.expect(full.index(i), BYTES)
                _ask_for_weights(maps, ring, i, stripe, i, stripes // 2, C, U, GATED)
        wait_for_kernels_ahead()
    else:
        wait_for_kernels_ahead()
        let_the_next_kernel_start()
        items = gl.load(count) * along_n
    done = 0
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        block = t // along_n
        stripe = gl.load(blocks + block) * stripes + t % along_n * STEP
        at = slots + block * NB
        first = gl.maximum(gl.load(at + gl.arange(0, FEW, layout=gl.SliceLayout(1, L))), 0) // share
        if LOW:
            others = gl.maximum(gl.load(at + LOW + gl.arange(0, LOW, layout=gl.SliceLayout(1, L))), 0) // share
            more = gl.load(at + LOW) >= 0
        for step in range(steps):
            slot = done % STAGES
            if done >= asked:
                mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                _ask_for_weights(maps, ring, slot, stripe, step, stripes // 2, C, U, GATED)
            _copy(x, rows.index(slot).slice(0, FEW, dim=0), first, step, K, U, EVEN, L)
            if LOW:
                if more:
                    _copy(x, rows.index(slot).slice(LOW, LOW, dim=0), others, step, K, U, EVEN, L)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            done += 1


@gluon.jit
def _arrived(ring, done, STAGES: gl.constexpr):
    """The slot of a step that is there."""
    slot = done % STAGES
    mbarrier.wait(ring[3].index(slot), (done // STAGES) & 1)
    fence_async_shared()  # lanes copied the rows, and the matrix units read them
    return slot


@gluon.jit
def _issue(ring, slot, acc, unit: gl.constexpr, half: gl.constexpr, WHICH: gl.constexpr, MUL: gl.constexpr):
    """Decode 64 rows of a unit, and have them multiplied: sums on their way, and what is read for them meanwhile."""
    W: gl.constexpr = acc.shape[1]
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    w = decoded(ring, (slot * MUL[0] + WHICH) * 2 + half, unit, 4, MUL[3], MUL[4], MUL[5], A)
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
def multiply(ring, done, steps, WHICH: gl.constexpr, W: gl.constexpr, MUL: gl.constexpr):
    """Two times (64, W) f32: the sums of a block's first W slots; ``done`` steps were before in the ring."""
    STAGES: gl.constexpr = MUL[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, W, 16])
    g = gl.zeros([64, W], gl.float32, MMA)
    u = gl.zeros([64, W], gl.float32, MMA)
    slot = _arrived(ring, done, STAGES)
    g, a = _issue(ring, slot, g, 0, 0, WHICH, MUL)
    g, u, a, b = _others(ring, slot, g, u, a, WHICH, MUL)
    for _ in range(steps - 1):
        before = slot
        done += 1
        slot = _arrived(ring, done, STAGES)
        g, a = _issue(ring, slot, g, 0, 0, WHICH, MUL)
        g, u, a, b = warpgroup_mma_wait(1, deps=[g, u, a, b])
        mbarrier.arrive(ring[4].index(before), count=1)
        g, u, a, b = _others(ring, slot, g, u, a, WHICH, MUL)
    g, u, a, b = warpgroup_mma_wait(0, deps=[g, u, a, b])
    mbarrier.arrive(ring[4].index(slot), count=1)
    return g, u, done + 1


@gluon.jit
def _put_some(value, stage, out, slots, n, N, TO: gl.constexpr, HEIGHT: gl.constexpr):
    """(64, HEIGHT) to the rows of out whose numbers are at ``slots``, none where they are -1."""
    EACH: gl.constexpr = 128 // TO.primitive_bitwidth
    LANES: gl.constexpr = 64 // EACH
    ACROSS: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    row = gl.load(slots + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, ACROSS)))
    together()
    stage.permute((1, 0)).store(value.to(TO))
    together()
    column = n + gl.arange(0, 64, layout=gl.SliceLayout(0, ACROSS))[None, :]
    at = out + row.to(gl.int64)[:, None] * N + column
    gl.store(at, stage.load(ACROSS), mask=(row >= 0)[:, None] & (column < N))


@gluon.jit
def _put(value, stage, out, slots, n, N, TO: gl.constexpr, HEIGHT: gl.constexpr, W: gl.constexpr):
    """(64, W), HEIGHT slots at a time."""
    if W <= HEIGHT:
        _put_some(value, stage.slice(0, W, dim=0), out, slots, n, N, TO, W)
    else:
        low, high = gl.split(value.reshape(64, 2, W // 2).permute(0, 2, 1))
        _put(low, stage, out, slots, n, N, TO, HEIGHT, W // 2)
        _put(high, stage, out, slots + W // 2, n, N, TO, HEIGHT, W // 2)


@gluon.jit
def _finished(acc, scale2, bias, place, n, N, PER_ROW: gl.constexpr, BIAS: gl.constexpr, FACTOR: gl.constexpr):
    """(64, W) sums of features n on of an expert -> times its scale2, with its bias."""
    rows = n + gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
    if PER_ROW:
        acc = acc * (gl.load(scale2 + place * N + rows, mask=rows < N, other=0.0) * FACTOR)[:, None]
    else:
        acc = acc * (gl.load(scale2 + place) * FACTOR)
    if BIAS:
        acc = acc + gl.load(bias + place * N + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def _finish(g, u, slots, given, place, tile, WHICH: gl.constexpr, W: gl.constexpr, FORM: gl.constexpr):
    """Sums of W slots to out."""
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
    stages, out, scale2, bias, N = given
    stage = stages.index(WHICH)
    if GATED:
        n = (tile * C + WHICH) * 64
        g = _finished(g, scale2, bias, place, n, N, PER_ROW, BIAS, FACTOR)
        u = _finished(u, scale2, bias, place, n + N // 2, N, PER_ROW, BIAS, FACTOR)
        if UP_FIRST:
            h = _gated(u, g, ACTIVATION, LIMIT)
        else:
            h = _gated(g, u, ACTIVATION, LIMIT)
        _put(h, stage, out, slots, n, N // 2, TO, HEIGHT, W)
    else:
        n = (tile * C + WHICH) * 128
        g = _finished(g, scale2, bias, place, n, N, PER_ROW, BIAS, FACTOR)
        u = _finished(u, scale2, bias, place, n + 64, N, PER_ROW, BIAS, FACTOR)
        if ACTIVATION is not None:
            g = _activated(g, ACTIVATION)
            u = _activated(u, ACTIVATION)
        _put(g, stage, out, slots, n, N, TO, HEIGHT, W)
        _put(u, stage, out, slots, n + 64, N, TO, HEIGHT, W)


@gluon.jit
def _block(ring, given, slots, place, tile, done, steps, WHICH: gl.constexpr, W: gl.constexpr, FORM: gl.constexpr):
    """A tile of a block's first W slots, from the ring to out; the steps that have been in the ring then."""
    MUL: gl.constexpr = (FORM[0], FORM[1], FORM[4], FORM[18], FORM[15], FORM[16])
    g, u, done = multiply(ring, done, steps, WHICH, W, MUL)
    _finish(g, u, slots, given, place, tile, WHICH, W, FORM)
    return done


@gluon.jit
def consume(ring, lists, given, numbers, WHICH: gl.constexpr, FORM: gl.constexpr):
    """The features of consumer WHICH of all items of the program, from the ring to out."""
    NB: gl.constexpr = FORM[2]
    LOW: gl.constexpr = FORM[3]
    blocks, slots, count = lists
    _N, _K, along_n, steps, _share = numbers
    wait_for_kernels_ahead()
    items = gl.load(count) * along_n
    done = 0
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        block = t // along_n
        tile = t % along_n
        place = gl.load(blocks + block)
        at = slots + block * NB
        if LOW:
            if gl.load(at + LOW) < 0:
                done = _block(ring, given, at, place, tile, done, steps, WHICH, LOW, FORM)
            else:
                done = _block(ring, given, at, place, tile, done, steps, WHICH, NB, FORM)
        else:
            done = _block(ring, given, at, place, tile, done, steps, WHICH, NB, FORM)


@gluon.jit
def experts(
    codes_map,
    scales_map,
    x,
    out,
    scale2,
    bias,
    blocks,
    slots,
    count,
    N,
    K,
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
):
    """A product of experts: of rows of x with tiles of their weights, for all blocks of slots.

    Args:
        codes_map: boxes (4, 8 U, 16) of i32 (tiles of all experts, 8 units, 16).
        scales_map: boxes (4, 16 U) of i32 (tiles, 16 units).
        x: (slots / share, K) bf16 or f16.
        out: (slots, N), or (slots, N / 2) if GATED.
        scale2: f32, (E,) or (E, N).
        bias: (E, N), if BIAS.
        blocks: i32, the place of each block's expert.
        slots: i32, of each block NB; -1 behind the last one of a block that is not full.
        count: i32, how many blocks there are.
        N: features of an expert, a multiple of 16, and of 32 if GATED.
        K: a multiple of 16.
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
        EVEN: K is steps times 64 U.
        PER_ROW: scale2 differs by feature.
        BIAS: a bias is added.
        ACTIVATION: of results, by name, or None.
        LIMIT: of gates and ups, or None.
        UP_FIRST: the first half of the features are ups.
        DECODE: assembly: a word and a pair of scales -> four pairs of products.
        SCALES: assembly: four scale bytes -> two pairs of scales.
        FACTOR: what products lack beside scale2.
    """
    TO: gl.constexpr = out.dtype.element_ty
    HALF: gl.constexpr = x.dtype.element_ty
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * C * 2, 4, 8 * U, 16], codes_map.layout)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES * C * 2, 4, 16 * U], scales_map.layout)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(HALF, [STAGES, NB, 64 * U], ROWS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * COPIERS)
        mbarrier.init(empty.index(i), count=C)
    fence_async_shared()
    WIDE: gl.constexpr = TO.primitive_bitwidth
    stages = gl.allocate_shared_memory(TO, [C, HEIGHT, 64], gl.NVMMASharedLayout(128, WIDE, 2))
    ring = (codes, scales, rows, full, empty)
    lists = (blocks, slots, count)
    numbers = (N, K, along_n, steps, share)
    given = (stages, out, scale2, bias, N)
    FORM: gl.constexpr = (
        C, U, NB, LOW, STAGES, GATED, EARLY, EVEN, TO, HEIGHT, PER_ROW, BIAS, ACTIVATION, LIMIT, UP_FIRST,
        DECODE, SCALES, FACTOR, HALF,
    )  # fmt: skip
    maps = (codes_map, scales_map)
    if C == 1:
        gl.warp_specialize(
            [
                (consume, (ring, lists, given, numbers, 0, FORM)),
                (produce, (maps, ring, lists, x, numbers, FORM)),
            ],
            [COPIERS],
            [PRODUCER],
        )
    else:
        gl.static_assert(C == 2)
        gl.warp_specialize(
            [
                (consume, (ring, lists, given, numbers, 0, FORM)),
                (consume, (ring, lists, given, numbers, 1, FORM)),
                (produce, (maps, ring, lists, x, numbers, FORM)),
            ],
            [4, COPIERS],
            [REGISTERS, PRODUCER],
        )
