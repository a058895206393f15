"""Device code of ``halfbyte.kernels.cuda.gemm_gluon``, in Gluon.

One warp, the producer, fills a ring of stages by TMA: the words and scales of a tile's features, a box for each
consumer, and x of its tokens. Consumers, warpgroups of four warps, decode 16 R features each to registers, which are
the first operand of wgmma; x in shared memory is the second. While the matrix units work on a stage the next one is
decoded.

The work is a list of items: tiles, of which the last are split over K, each part an item. A program takes every
grid-th. The order of an item's sums, and of the parts of a tile, is fixed.

A ring is the tuple (codes, scales, x, full, empty); work is (items, whole, share, parts, along_n, along_m, steps):
the number of items, of those that are tiles, the steps of a part, the parts of a tile, tiles along N and M, and steps.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

together = getattr(gl, "barrier", None) or gl.thread_barrier
"""Waits for the threads of a partition; Triton 3.6 has it under another name than later ones."""


@gluon.constexpr_function
def _bits(first, last):
    return [first << i for i in range(((last // first) - 1).bit_length())]


@gluon.constexpr_function
def codes_layout(R, W):
    """Of a unit's (R, 8, 16) words: tile, g, (kt, c); a lane's four are what ldmatrix gives it."""
    register = [[0, 0, 4], [0, 0, 8], *([i, 0, 0] for i in _bits(W, R))]
    lane = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(register, lane, [[i, 0, 0] for i in _bits(1, W)], [], [R, 8, 16])


@gluon.constexpr_function
def scales_layout(R, W):
    """Of a unit's (R, 16) words of four bytes: tile, (g, half of kt); the four lanes of a row read the same."""
    register = [[0, 1], *([i, 0] for i in _bits(W, R))]
    lane = [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout(register, lane, [[i, 0] for i in _bits(1, W)], [], [R, 16])


@gluon.jit
def wait_for_kernels_ahead():
    """Until they have ended and what they wrote is there."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_the_next_kernel_start():
    """Its launch, if it may be early."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def item_of(t, work):
    """Item t: its tile, the part of it, its first step and its number of steps; part -1 where it is the whole tile."""
    _items, whole, share, parts, _along_n, _along_m, steps = work
    behind = gl.maximum(t - whole, 0)
    tile = gl.minimum(t, whole + behind // parts)
    part = behind % parts
    first = part * share
    if t < whole:
        part = -1
        count = steps
    else:
        count = gl.minimum(share, steps - first)
    return tile, part, first, count


@gluon.jit
def place_of(tile, work, GROUP: gl.constexpr):
    """Where a tile is along M and N: GROUP of them along M, then the next along N."""
    _items, _whole, _share, _parts, along_n, along_m, _steps = work
    of_group = GROUP * along_n
    group = tile // of_group
    high = gl.minimum(along_m - group * GROUP, GROUP)
    inside = tile % of_group
    return group * GROUP + inside % high, inside // high


@gluon.jit
def ask_for_weights(codes_map, scales_map, ring, slot, tile, step, C: gl.constexpr, R: gl.constexpr, U: gl.constexpr):
    """The words and scales of a step, of C consumers with R tiles each, into a slot; ``tile`` is the first's."""
    codes, scales, _x, full, _empty = ring
    bar = full.index(slot)
    for c in gl.static_range(C):
        at = tile + c * R
        tma.async_copy_global_to_shared(codes_map, [at, step * (8 * U), 0], bar, codes.index(slot * C + c))
        tma.async_copy_global_to_shared(scales_map, [at, step * (16 * U)], bar, scales.index(slot * C + c))


@gluon.jit
def produce(maps, ring, work, BYTES: gl.constexpr, FORM: gl.constexpr):
    """Fill the ring, for all items of the program; weights of the first stages before the kernels ahead have ended."""
    C: gl.constexpr = FORM[0]
    R: gl.constexpr = FORM[1]
    U: gl.constexpr = FORM[2]
    NB: gl.constexpr = FORM[3]
    STAGES: gl.constexpr = FORM[4]
    GROUP: gl.constexpr = FORM[5]
    codes_map, scales_map, x_map = maps
    items = work[0]
    _codes, _scales, x, full, empty = ring
    let_the_next_kernel_start()
    tile, _part, first, count = item_of(gl.program_id(0), work)
    _tm, tn = place_of(tile, work, GROUP)
    asked = gl.minimum(count, STAGES)
    for i in range(asked):
        mbarrier.expect(full.index(i), BYTES)
        ask_for_weights(codes_map, scales_map, ring, i, tn * (C * R), first + i, C, R, U)
    wait_for_kernels_ahead()
    done = 0
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, _part, first, count = item_of(t, work)
        tm, tn = place_of(tile, work, GROUP)
        for step in range(first, first + count):
            slot = done % STAGES
            if done >= asked:
                mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                ask_for_weights(codes_map, scales_map, ring, slot, tn * (C * R), step, C, R, U)
            tma.async_copy_global_to_shared(x_map, [tm * NB, step * (64 * U)], full.index(slot), x.index(slot))
            done += 1


@gluon.jit
def _pair(word, HALF: gl.constexpr):
    low = (word & 0xFFFF).to(gl.uint16).to(HALF, bitcast=True)
    high = (word.to(gl.uint32, bitcast=True) >> 16).to(gl.uint16).to(HALF, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def decoded(
    ring, box, unit: gl.constexpr, R: gl.constexpr, HALF: gl.constexpr, DECODE: gl.constexpr, SCALES: gl.constexpr,
    A: gl.constexpr,
):  # fmt: skip
    """(16 R, 64) products of codes and scales of a unit of a box, as the operand A, k in its natural order."""
    W: gl.constexpr = gl.num_warps()
    codes, scales, _x, _full, _empty = ring
    words = codes.index(box).slice(8 * unit, 8, dim=1).load(codes_layout(R, W))
    words = words.reshape(R, 8, 4, 4).permute(0, 2, 1, 3)  # t g kt c -> t kt g c
    both = scales.index(box).slice(16 * unit, 16, dim=1).load(scales_layout(R, W))
    even, odd = gl.inline_asm_elementwise(
        SCALES, "=r,=r,r", [both], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )  # fmt: skip
    both = gl.join(even, odd).reshape(R, 8, 4).permute(0, 2, 1)  # t kt g
    L: gl.constexpr = words.type.layout
    both = gl.convert_layout(both, gl.SliceLayout(3, L), assert_trivial=True).expand_dims(3)
    o0, o1, o2, o3 = gl.inline_asm_elementwise(
        DECODE,
        "=r,=r,=r,=r,r,r",
        [words, both],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    w = gl.join(gl.join(_pair(o0, HALF), _pair(o1, HALF)), gl.join(_pair(o2, HALF), _pair(o3, HALF)))
    w = w.permute(0, 5, 2, 1, 6, 3, 4)  # t kt g c p rh h -> t rh g | kt h c p
    return gl.convert_layout(w.reshape(16 * R, 64), A, assert_trivial=True)


@gluon.jit
def _issue(
    ring, slot, acc, unit: gl.constexpr, C: gl.constexpr, WHICH: gl.constexpr, R: gl.constexpr, HALF: gl.constexpr,
    DECODE: gl.constexpr, SCALES: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Decode a unit of a slot, and have it multiplied: the sums, on their way, and what is read for them meanwhile."""
    w = decoded(ring, slot * C + WHICH, unit, R, HALF, DECODE, SCALES, A)
    x = ring[2].index(slot).slice(64 * unit, 64, dim=1).permute((1, 0))
    return warpgroup_mma(w, x, acc, is_async=True), w


@gluon.jit
def _others(
    ring, slot, acc, a, C: gl.constexpr, WHICH: gl.constexpr, R: gl.constexpr, U: gl.constexpr, HALF: gl.constexpr,
    DECODE: gl.constexpr, SCALES: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """The units of a slot after its first, which is read from a."""
    acc, b = _issue(ring, slot, acc, 1, C, WHICH, R, HALF, DECODE, SCALES, A)
    acc, a, b = warpgroup_mma_wait(1, deps=[acc, a, b])
    if U == 4:
        acc, a = _issue(ring, slot, acc, 2, C, WHICH, R, HALF, DECODE, SCALES, A)
        acc, a, b = warpgroup_mma_wait(1, deps=[acc, a, b])
        acc, b = _issue(ring, slot, acc, 3, C, WHICH, R, HALF, DECODE, SCALES, A)
        acc, a, b = warpgroup_mma_wait(1, deps=[acc, a, b])
    return acc, a, b


@gluon.jit
def multiply(
    ring, done, count, C: gl.constexpr, WHICH: gl.constexpr, R: gl.constexpr, U: gl.constexpr, NB: gl.constexpr,
    STAGES: gl.constexpr, HALF: gl.constexpr, DECODE: gl.constexpr, SCALES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """(16 R, NB) f32: the sums of ``count`` steps, of which ``done`` were before in the ring.

    A unit is decoded while the one ahead of it is multiplied, from registers a or b in turn. The assembler keeps that
    up only where nothing between the first unit and the last depends on a condition.
    """
    full, empty = ring[3], ring[4]
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    acc = gl.zeros([16 * R, NB], gl.float32, MMA)
    if U == 1:
        if count % 2 == 0:
            slot = done % STAGES
            mbarrier.wait(full.index(slot), (done // STAGES) & 1)
            acc, a = _issue(ring, slot, acc, 0, C, WHICH, R, HALF, DECODE, SCALES, A)
            acc, a = warpgroup_mma_wait(0, deps=[acc, a])
            mbarrier.arrive(empty.index(slot), count=1)
            done += 1
    slot = done % STAGES
    mbarrier.wait(full.index(slot), (done // STAGES) & 1)
    acc, a = _issue(ring, slot, acc, 0, C, WHICH, R, HALF, DECODE, SCALES, A)
    acc, a = warpgroup_mma_wait(1, deps=[acc, a])
    if U == 1:
        for _ in range((count - 1) // 2):
            between = (done + 1) % STAGES
            mbarrier.wait(full.index(between), ((done + 1) // STAGES) & 1)
            acc, b = _issue(ring, between, acc, 0, C, WHICH, R, HALF, DECODE, SCALES, A)
            acc, a, b = warpgroup_mma_wait(1, deps=[acc, a, b])
            mbarrier.arrive(empty.index(slot), count=1)
            done += 2
            slot = done % STAGES
            mbarrier.wait(full.index(slot), (done // STAGES) & 1)
            acc, a = _issue(ring, slot, acc, 0, C, WHICH, R, HALF, DECODE, SCALES, A)
            acc, a, b = warpgroup_mma_wait(1, deps=[acc, a, b])
            mbarrier.arrive(empty.index(between), count=1)
    else:
        acc, a, b = _others(ring, slot, acc, a, C, WHICH, R, U, HALF, DECODE, SCALES, A)
        for _ in range(count - 1):
            before = slot
            done += 1
            slot = done % STAGES
            mbarrier.wait(full.index(slot), (done // STAGES) & 1)
            acc, a = _issue(ring, slot, acc, 0, C, WHICH, R, HALF, DECODE, SCALES, A)
            acc, a, b = warpgroup_mma_wait(1, deps=[acc, a, b])
            mbarrier.arrive(empty.index(before), count=1)
            acc, a, b = _others(ring, slot, acc, a, C, WHICH, R, U, HALF, DECODE, SCALES, A)
        a = b
    acc, a = warpgroup_mma_wait(0, deps=[acc, a])
    mbarrier.arrive(empty.index(slot), count=1)
    return acc, done + 1


@gluon.jit
def places(acc, R: gl.constexpr, NB: gl.constexpr):
    """Where each of (16 R, NB) sums is kept: those of 8 rows and columns side by side."""
    MMA: gl.constexpr = acc.type.layout
    n = gl.arange(0, 16 * R, layout=gl.SliceLayout(1, MMA))[:, None]
    m = gl.arange(0, NB, layout=gl.SliceLayout(0, MMA))[None, :]
    return ((n % 64 // 16) * 64 + n % 8 * 8) + m % 8 + (n // 64) * (64 * NB) + n % 16 // 8 * 256 + m // 8 * 512


@gluon.jit
def combine(acc, sums, counts, split, part, parts, R: gl.constexpr, NB: gl.constexpr):
    """The sums of all parts of a tile, in their order, and whether this part was the last to come.

    Args:
        acc: (16 R, NB), this part's.
        sums: f32, of all parts of all tiles that are split.
        counts: i32, of tiles that are split; 0, and 0 again behind the last part.
        split: which of those tiles.
        part: of it.
        parts: how many.
    """
    at = sums + (split * parts).to(gl.int64) * (16 * R * NB) + places(acc, R, NB)
    gl.store(at + part * (16 * R * NB), acc)
    together()
    before = gl.atomic_add(counts + split, 1, sem="acq_rel")
    last = before == parts - 1
    if last:
        if parts == 2:
            acc += gl.load(at + (1 - part) * (16 * R * NB), cache_modifier=".cg")
        else:
            acc = gl.load(at, cache_modifier=".cg")
            for i in range(1, parts):
                acc += gl.load(at + i * (16 * R * NB), cache_modifier=".cg")
        gl.store(counts + split, 0)
    return acc, last


@gluon.jit
def _put(
    value, stage, out, m, n, M, N, TO: gl.constexpr, TMA: gl.constexpr, HEIGHT: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """(ROWS, HEIGHT) to out[m:, n:], through shared memory."""
    W: gl.constexpr = gl.num_warps()
    if TMA:
        tma.store_wait(0)
    together()
    stage.permute((1, 0)).store(value.to(TO))
    if TMA:
        fence_async_shared()
        together()
        tma.async_copy_shared_to_global(out, [m, n], stage)
    else:
        together()
        ACROSS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
        row = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, ACROSS))
        column = gl.arange(0, ROWS, layout=gl.SliceLayout(0, ACROSS))
        stride = N + (m >> 31)  # that is N, but not kept in registers for all rows while tiles are multiplied
        at = out + (m.to(gl.int64) * N + n) + column[None, :] + (row * stride)[:, None]
        value = stage.load(ACROSS)
        if (m + HEIGHT <= M) & (n + ROWS <= N):
            gl.store(at, value)
        else:
            gl.store(at, value, mask=(m + row < M)[:, None] & (n + column < N)[None, :])


@gluon.jit
def put(
    acc, stage, out, m, n, M, N, TO: gl.constexpr, TMA: gl.constexpr, HEIGHT: gl.constexpr, ROWS: gl.constexpr,
    NB: gl.constexpr,
):  # fmt: skip
    """(ROWS, NB) to out[m:, n:], HEIGHT tokens at a time."""
    if NB == HEIGHT:
        _put(acc, stage, out, m, n, M, N, TO, TMA, HEIGHT, ROWS)
    else:
        low, high = gl.split(acc.reshape(ROWS, 2, NB // 2).permute(0, 2, 1))
        put(low, stage, out, m, n, M, N, TO, TMA, HEIGHT, ROWS, NB // 2)
        put(high, stage, out, m + NB // 2, n, M, N, TO, TMA, HEIGHT, ROWS, NB // 2)


@gluon.jit
def scaled(
    acc, scale2, bias, n, N, ROWS: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr, FACTOR: gl.constexpr
):  # fmt: skip
    """(ROWS, tokens) sums of features n on -> times scale2 and FACTOR, with the bias."""
    rows = n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    if PER_ROW:
        acc = acc * (gl.load(scale2 + rows, mask=rows < N, other=0.0) * FACTOR)[:, None]
    else:
        acc = acc * (gl.load(scale2) * FACTOR)
    if BIAS:
        acc = acc + gl.load(bias + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def consume(given, WHICH: gl.constexpr, FORM: gl.constexpr):
    """The rows of consumer WHICH of all items of the program, from the ring to out."""
    C: gl.constexpr = FORM[0]
    R: gl.constexpr = FORM[1]
    U: gl.constexpr = FORM[2]
    NB: gl.constexpr = FORM[3]
    STAGES: gl.constexpr = FORM[4]
    GROUP: gl.constexpr = FORM[5]
    SPLIT: gl.constexpr = FORM[6]
    HEIGHT: gl.constexpr = FORM[7]
    HALF: gl.constexpr = FORM[8]
    TO: gl.constexpr = FORM[9]
    TMA: gl.constexpr = FORM[10]
    PER_ROW: gl.constexpr = FORM[11]
    BIAS: gl.constexpr = FORM[12]
    DECODE: gl.constexpr = FORM[13]
    SCALES: gl.constexpr = FORM[14]
    FACTOR: gl.constexpr = FORM[15]
    ring, work, stages, out, scale2, bias, sums, counts, M, N = given
    items, whole, _share, parts, _along_n, _along_m, _steps = work
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, NB, 16])
    wait_for_kernels_ahead()
    done = 0
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, part, _first, count = item_of(t, work)
        tm, tn = place_of(tile, work, GROUP)
        n = (tn * C + WHICH) * (16 * R)
        acc, done = multiply(ring, done, count, C, WHICH, R, U, NB, STAGES, HALF, DECODE, SCALES, MMA)
        last = part < 0
        if SPLIT:
            if part >= 0:
                acc, last = combine(acc, sums, counts, (tile - whole) * C + WHICH, part, parts, R, NB)
        if last:
            acc = scaled(acc, scale2, bias, n, N, 16 * R, PER_ROW, BIAS, FACTOR)
            put(acc, stages.index(WHICH), out, tm * NB, n, M, N, TO, TMA, HEIGHT, 16 * R, NB)
    if TMA:
        tma.store_wait(0)


@gluon.jit
def allocate(
    codes_map, scales_map, x_map, C: gl.constexpr, R: gl.constexpr, U: gl.constexpr, NB: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A ring, its barriers ready."""
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * C, R, 8 * U, 16], codes_map.layout)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES * C, R, 16 * U], scales_map.layout)
    x = gl.allocate_shared_memory(x_map.dtype, [STAGES, NB, 64 * U], x_map.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=C)
    fence_async_shared()
    return codes, scales, x, full, empty


@gluon.jit
def gemm(
    codes_map,
    scales_map,
    x_map,
    out,
    scale2,
    bias,
    sums,
    counts,
    M,
    N,
    items,
    whole,
    share,
    parts,
    along_n,
    along_m,
    steps,
    C: gl.constexpr,
    R: gl.constexpr,
    U: gl.constexpr,
    NB: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
    HEIGHT: gl.constexpr,
    REGISTERS: gl.constexpr,
    TMA: gl.constexpr,
    PER_ROW: gl.constexpr,
    BIAS: gl.constexpr,
    DECODE: gl.constexpr,
    SCALES: gl.constexpr,
    FACTOR: gl.constexpr,
):
    """M rows of x times the weight.

    Args:
        codes_map: boxes (R, 8 U, 16) of i32 (tiles, 8 units, 16).
        scales_map: boxes (R, 16 U) of i32 (tiles, 16 units).
        x_map: boxes (NB, 64 U) of (M, K) bf16 or f16.
        out: TMA: boxes (HEIGHT, 16 R) of (M, N); else a pointer to it.
        scale2: f32, 1 or N.
        bias: (N,), if BIAS.
        sums: f32, of the parts of tiles that are split, if SPLIT.
        counts: i32, zeros, one for each consumer's part of those tiles, if SPLIT.
        M: tokens.
        N: features.
        items: of all programs.
        whole: of those, the tiles that are not split; they come first.
        share: steps of a part.
        parts: of a tile that is split.
        along_n: tiles.
        along_m: tiles.
        steps: of a tile.
        C: consumers.
        R: tiles of 16 features of each.
        U: units of 64 k of a step.
        NB: tokens of a tile.
        STAGES: of the ring.
        GROUP: tiles along M that follow each other.
        SPLIT: some tiles are split.
        HEIGHT: tokens that are stored at a time.
        REGISTERS: of a consumer's thread.
        TMA: rows of out begin at multiples of 16 bytes.
        PER_ROW: scale2 has N values.
        BIAS: a bias is added.
        DECODE: assembly: a word and a pair of scales -> four pairs of products.
        SCALES: assembly: four scale bytes -> two pairs of scales.
        FACTOR: what products lack beside scale2.
    """
    TO: gl.constexpr = out.dtype if TMA else out.dtype.element_ty
    HALF: gl.constexpr = x_map.dtype
    BYTES: gl.constexpr = C * R * U * 576 + NB * U * 128
    ring = allocate(codes_map, scales_map, x_map, C, R, U, NB, STAGES)
    WIDE: gl.constexpr = TO.primitive_bitwidth
    stages = gl.allocate_shared_memory(TO, [C, HEIGHT, 16 * R], gl.NVMMASharedLayout(128, WIDE, 2))
    work = (items, whole, share, parts, along_n, along_m, steps)
    given = (ring, work, stages, out, scale2, bias, sums, counts, M, N)
    FORM: gl.constexpr = (
        C, R, U, NB, STAGES, GROUP, SPLIT, HEIGHT, HALF, TO, TMA, PER_ROW, BIAS, DECODE, SCALES, FACTOR,
    )  # fmt: skip
    maps = (codes_map, scales_map, x_map)
    if C == 1:
        gl.warp_specialize([(consume, (given, 0, FORM)), (produce, (maps, ring, work, BYTES, FORM))], [1], [32])
    elif C == 2:
        gl.warp_specialize(
            [(consume, (given, 0, FORM)), (consume, (given, 1, FORM)), (produce, (maps, ring, work, BYTES, FORM))],
            [4, 1],
            [REGISTERS, 32],
        )
    elif C == 3:
        gl.warp_specialize(
            [
                (consume, (given, 0, FORM)),
                (consume, (given, 1, FORM)),
                (consume, (given, 2, FORM)),
                (produce, (maps, ring, work, BYTES, FORM)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 32],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (given, 0, FORM)),
                (consume, (given, 1, FORM)),
                (consume, (given, 2, FORM)),
                (consume, (given, 3, FORM)),
                (produce, (maps, ring, work, BYTES, FORM)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 32],
        )
