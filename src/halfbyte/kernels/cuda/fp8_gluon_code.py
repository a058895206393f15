"""Device code of ``halfbyte.kernels.cuda.fp8_gluon``, in Gluon.

It differs from ``gemm_gluon_code`` in what a consumer decodes to, bytes of E4M3 that are the first operand of an FP8
wgmma, and in the scales of tokens. Words are in registers before the matrix units are done with the stage ahead of
theirs, and become bytes only then, in registers that the units no longer read: meanwhile they have the other consumer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from halfbyte.kernels.cuda.gemm_gluon_code import (
    _bits,
    allocate,
    combine,
    item_of,
    place_of,
    places,
    produce,
    put,
    wait_for_kernels_ahead,
)


@gluon.constexpr_function
def codes_layout(R, U, W):
    """Of (R, 8 U, 16) words: tile, (unit, g), (kt, c); a lane has the four of one kt."""
    register = [[0, 0, 1], [0, 0, 2], *([0, i, 0] for i in _bits(8, 8 * U)), *([i, 0, 0] for i in _bits(W, R))]
    lane = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(register, lane, [[i, 0, 0] for i in _bits(1, W)], [], [R, 8 * U, 16])


@gluon.constexpr_function
def scales_layout(R, U, W):
    """Of (R, 32 U) pairs of bytes: tile, (unit, g, kt)."""
    register = [*([0, i] for i in _bits(32, 32 * U)), *([i, 0] for i in _bits(W, R))]
    lane = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(register, lane, [[i, 0] for i in _bits(1, W)], [], [R, 32 * U])


@gluon.constexpr_function
def bytes_layout(R, U, W):
    """Of (R, U, 8, 4, 4) bytes: tile, unit, g, kt, byte; a lane's four are a register."""
    register = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]]
    register += [[0, i, 0, 0, 0] for i in _bits(1, U)] + [[i, 0, 0, 0, 0] for i in _bits(W, R)]
    lane = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    return gl.DistributedLinearLayout(register, lane, [[i, 0, 0, 0, 0] for i in _bits(1, W)], [], [R, U, 8, 4, 4])


@gluon.jit
def load(ring, box, R: gl.constexpr, U: gl.constexpr):
    """The (R, 8 U, 16) words and (R, 32 U) pairs of scales of a box."""
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    codes, scales, _x, _full, _empty = ring
    pairs = scales.index(box)._reinterpret(gl.int16, [R, 32 * U], ROWS)
    return codes.index(box).load(codes_layout(R, U, W)), pairs.load(scales_layout(R, U, W))


@gluon.jit
def _four(word, L: gl.constexpr):
    """A word beside each of the four bytes that it becomes."""
    return gl.convert_layout(word, gl.SliceLayout(4, L), assert_trivial=True).expand_dims(4)


@gluon.jit
def _two_words(t0, t1, t2, t3, even, odd, R: gl.constexpr, U: gl.constexpr, LOOK_UP: gl.constexpr):
    """(R, U, 8, 4, 4, 2, 2) bytes of E4M3, tile, unit, g, kt, byte, rh, e, of (R, U, 8, 4) tables and words."""
    L: gl.constexpr = bytes_layout(R, U, gl.num_warps())
    like = gl.full([R, U, 8, 4, 4], 0, gl.int32, L)
    t0, like = gl.broadcast(_four(t0, L), like)
    t1, like = gl.broadcast(_four(t1, L), like)
    t2, like = gl.broadcast(_four(t2, L), like)
    t3, like = gl.broadcast(_four(t3, L), like)
    even, like = gl.broadcast(_four(even, L), like)
    odd, like = gl.broadcast(_four(odd, L), like)
    a, b, c, d = gl.inline_asm_elementwise(
        LOOK_UP,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [t0, t1, t2, t3, even, odd],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def decoded(
    words, pairs, R: gl.constexpr, U: gl.constexpr, TABLE: gl.constexpr, LOOK_UP: gl.constexpr, A: gl.constexpr
):  # fmt: skip
    """(16 R, 64 U) of E4M3, as the operand A; of each 64 k position 32 s + 16 e + 4 kt + j holds value
    16 kt + 4 s + 2 e + (0, 8, 1, 9)[j].
    """
    t0, t1, t2, t3 = gl.inline_asm_elementwise(
        TABLE,
        "=r,=r,=r,=r,h",
        [pairs.reshape(R, U, 8, 4)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    even, odd = gl.split(words.reshape(R, U, 8, 4, 2, 2))  # t u g kt s, of e
    even0, even1 = gl.split(even)
    odd0, odd1 = gl.split(odd)
    first = _two_words(t0, t1, t2, t3, even0, odd0, R, U, LOOK_UP)
    second = _two_words(t0, t1, t2, t3, even1, odd1, R, U, LOOK_UP)
    w = gl.join(first, second)  # t u g kt j rh e s
    w = w.permute(0, 5, 2, 1, 7, 6, 3, 4)  # t rh g | u s e kt j
    return gl.convert_layout(w.reshape(16 * R, 64 * U), A, assert_trivial=True)


@gluon.jit
def _step(
    ring, held, acc, slot, phase, C: gl.constexpr, WHICH: gl.constexpr, R: gl.constexpr, U: gl.constexpr,
    STAGES: gl.constexpr, TABLE: gl.constexpr, LOOK_UP: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Multiply the stage in ``slot``, whose words and scales are ``held``, and load those of the next one."""
    x = ring[2]
    full = ring[3]
    empty = ring[4]
    a = decoded(held[0], held[1], R, U, TABLE, LOOK_UP, A)
    acc = warpgroup_mma(a, x.index(slot).permute((1, 0)), acc, is_async=True)
    after = slot + 1
    wraps = after == STAGES
    phase = gl.where(wraps, phase ^ 1, phase)
    after = gl.where(wraps, 0, after)
    mbarrier.wait(full.index(after), phase)
    words, pairs = load(ring, after * C + WHICH, R, U)
    acc, words, pairs = warpgroup_mma_wait(0, deps=[acc, words, pairs])
    mbarrier.arrive(empty.index(slot), count=1)
    return (words, pairs), acc, after, phase


@gluon.jit
def multiply(
    ring, slot, phase, count, C: gl.constexpr, WHICH: gl.constexpr, R: gl.constexpr, U: gl.constexpr,
    NB: gl.constexpr, STAGES: gl.constexpr, TABLE: gl.constexpr, LOOK_UP: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """(16 R, NB) f32: the sums of ``count`` steps, the first in ``slot``; and the slot and phase of the next."""
    _codes, _scales, x, full, empty = ring
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    acc = gl.zeros([16 * R, NB], gl.float32, MMA)
    mbarrier.wait(full.index(slot), phase)
    held = load(ring, slot * C + WHICH, R, U)
    for _ in range((count - 1) // 2):  # two at a time: what a loop costs counts
        held, acc, slot, phase = _step(ring, held, acc, slot, phase, C, WHICH, R, U, STAGES, TABLE, LOOK_UP, A)
        held, acc, slot, phase = _step(ring, held, acc, slot, phase, C, WHICH, R, U, STAGES, TABLE, LOOK_UP, A)
    for _ in range((count - 1) % 2):
        held, acc, slot, phase = _step(ring, held, acc, slot, phase, C, WHICH, R, U, STAGES, TABLE, LOOK_UP, A)
    a = decoded(held[0], held[1], R, U, TABLE, LOOK_UP, A)
    acc = warpgroup_mma(a, x.index(slot).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(slot), count=1)
    wraps = slot + 1 == STAGES
    return acc, gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def scaled(
    acc, scale2, tokens, bias, n, N, ROWS: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
    FACTOR: gl.constexpr,
):  # fmt: skip
    """(ROWS, tokens) sums of features n on -> times scale2 and FACTOR, then the tokens' scales, with the bias."""
    MMA: gl.constexpr = acc.type.layout
    rows = n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    if PER_ROW:
        acc = acc * (gl.load(scale2 + rows, mask=rows < N, other=0.0) * FACTOR)[:, None]
    else:
        acc = acc * (gl.load(scale2) * FACTOR)
    acc = acc * gl.convert_layout(tokens, gl.SliceLayout(0, MMA))[None, :]
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
    TO: gl.constexpr = FORM[8]
    TMA: gl.constexpr = FORM[9]
    PER_ROW: gl.constexpr = FORM[10]
    BIAS: gl.constexpr = FORM[11]
    TABLE: gl.constexpr = FORM[12]
    LOOK_UP: gl.constexpr = FORM[13]
    FACTOR: gl.constexpr = FORM[14]
    LONG: gl.constexpr = FORM[15]
    ring, work, stages, out, scale2, xscale, bias, sums, counts, M, N = given
    items, whole, _share, parts, along_n, along_m, _steps = work
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, NB, 32])
    ALONG: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    wait_for_kernels_ahead()
    slot = 0
    phase = 0
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, part, _first, count = item_of(t, work)
        tm, tn = place_of(tile, work, GROUP)
        n = (tn * C + WHICH) * (16 * R)
        m = tm * NB + gl.arange(0, NB, layout=ALONG)
        tokens = gl.load(xscale + m, mask=m < M, other=0.0)
        if LONG:
            rounds = (count + LONG - 1) // LONG
            each = (count + rounds - 1) // rounds
            held = (along_n * along_m - whole) * parts * C + gl.program_id(0) * C + WHICH
            acc = gl.zeros([16 * R, NB], gl.float32, MMA)
            at = sums + held.to(gl.int64) * (16 * R * NB) + places(acc, R, NB)
            for i in range(rounds):
                steps = gl.minimum(each, count - i * each)
                acc, slot, phase = multiply(ring, slot, phase, steps, C, WHICH, R, U, NB, STAGES, TABLE, LOOK_UP, MMA)
                if i > 0:
                    acc += gl.load(at, cache_modifier=".cg")
                if i + 1 < rounds:
                    gl.store(at, acc)
        else:
            acc, slot, phase = multiply(ring, slot, phase, count, C, WHICH, R, U, NB, STAGES, TABLE, LOOK_UP, MMA)
        last = part < 0
        if SPLIT:
            if part >= 0:
                acc, last = combine(acc, sums, counts, (tile - whole) * C + WHICH, part, parts, R, NB)
        if last:
            acc = scaled(acc, scale2, tokens, bias, n, N, 16 * R, PER_ROW, BIAS, FACTOR)
            put(acc, stages.index(WHICH), out, tm * NB, n, M, N, TO, TMA, HEIGHT, 16 * R, NB)
    if TMA:
        tma.store_wait(0)


@gluon.jit
def fp8(
    codes_map,
    scales_map,
    x_map,
    out,
    scale2,
    xscale,
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
    TABLE: gl.constexpr,
    LOOK_UP: gl.constexpr,
    FACTOR: gl.constexpr,
    LONG: gl.constexpr,
):
    """M rows of x times the weight. What is not here is as in ``gemm_gluon_code.gemm``.

    Args:
        x_map: boxes (NB, 64 U) of (M, K) e4m3, in the order of ``decoded``.
        xscale: (M,) f32.
        TABLE: assembly: two scales -> two tables.
        LOOK_UP: assembly: two tables and two words -> four registers of bytes.
        FACTOR: what products lack beside scale2 and xscale.
        LONG: steps, at most, whose sums the matrix units keep; then they go to ``sums``, behind those of parts, and
            come back in f32. 0 where no item has more.
    """
    TO: gl.constexpr = out.dtype if TMA else out.dtype.element_ty
    BYTES: gl.constexpr = C * R * U * 576 + NB * U * 64
    ring = allocate(codes_map, scales_map, x_map, C, R, U, NB, STAGES)
    WIDE: gl.constexpr = TO.primitive_bitwidth
    stages = gl.allocate_shared_memory(TO, [C, HEIGHT, 16 * R], gl.NVMMASharedLayout(128, WIDE, 2))
    work = (items, whole, share, parts, along_n, along_m, steps)
    given = (ring, work, stages, out, scale2, xscale, bias, sums, counts, M, N)
    FORM: gl.constexpr = (
        C,
        R,
        U,
        NB,
        STAGES,
        GROUP,
        SPLIT,
        HEIGHT,
        TO,
        TMA,
        PER_ROW,
        BIAS,
        TABLE,
        LOOK_UP,
        FACTOR,
        LONG,
    )
    maps = (codes_map, scales_map, x_map)
    gl.static_assert(C == 2)
    gl.warp_specialize(
        [(consume, (given, 0, FORM)), (consume, (given, 1, FORM)), (produce, (maps, ring, work, BYTES, FORM))],
        [4, 1],
        [REGISTERS, 32],
    )
