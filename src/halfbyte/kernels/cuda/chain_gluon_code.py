"""Device code of ``halfbyte.kernels.cuda.chain_gluon``, in Gluon.

A program stays on its multiprocessor and has three parts. The producer, a warp, asks for the weights of all four
products in order, a stage of a ring after the other, as far ahead as it has room; it waits for nothing else. Four
groups of four consumer warps take the stages in turn, and do not wait for each other: they decode the units of a stage,
unit u by warp u mod 4, and multiply them by m16n8k16. The finisher, a warp, adds the sums of a stripe, computes what
follows them, and stores it; at the end of a product it counts the program in, waits until all are counted, and lets the
consumers go on.

A stripe is 16 features and all of K; stripe i of a product, or pair of stripes of gate and up, is for program i mod
grid. Of a stripe's stages those of one class, s mod 4, are always one group's, though not always the same: sums are
kept by class and warp, and added in that order. A ring is (codes, scales, full, empty), sums are (values, full, empty),
and inputs are (x, squares, ready, squared, go): what the products multiply, parts of sums of squares, and barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from halfbyte.kernels.cuda.decode_gluon_code import _weights
from halfbyte.kernels.cuda.gemm_gluon_code import let_the_next_kernel_start, together, wait_for_kernels_ahead


@gluon.constexpr_function
def _bits(first, last):
    return [first << i for i in range(((last // first) - 1).bit_length())]


@gluon.constexpr_function
def _codes_layout(W):
    lane = [[0, 0, i] for i in _bits(4, 128)]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]], lane, [[0, w, 0] for w in _bits(1, W)], [], [1, W, 128]
    )  # fmt: skip


@gluon.constexpr_function
def _scales_layout(W):
    lane = [[0, 0, i] for i in _bits(1, 32)]
    return gl.DistributedLinearLayout([], lane, [[0, w, 0] for w in _bits(1, W)], [], [1, W, 32])


@gluon.constexpr_function
def _x_layout(R):
    """Of (8 / R, R, 256) activations, of R rows and again: a lane has the 16 of a block."""
    lane = [[0, 0, 16], [0, 0, 32], *([0, r, 0] for r in _bits(1, R)), *([i, 0, 0] for i in _bits(1, 8 // R))]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]], lane, [[0, 0, 64], [0, 0, 128]], [], [8 // R, R, 256]
    )


@gluon.constexpr_function
def _rows_layout(R):
    """Of the R rows of those, which several lanes have."""
    lane = [[0, 16], [0, 32], *([r, 0] for r in _bits(1, R)), *([0, 0] for _ in _bits(1, 8 // R))]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]], lane, [[0, 64], [0, 128]], [], [R, 256]
    )  # fmt: skip


@gluon.constexpr_function
def _squares_layout(R):
    """Of (4, R, 128) parts of sums, which each warp has."""
    register = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], *([0, r, 0] for r in _bits(1, R))]
    lane = [[0, 0, i] for i in _bits(4, 128)]
    return gl.DistributedLinearLayout(register, lane, [[0, 0, 0], [0, 0, 0]], [], [4, R, 128])


@gluon.constexpr_function
def _sums_layout(W):
    """Of (W, 16, 8) sums in one warp: a lane has all W of what it adds."""
    register = [[0, 0, 1], [0, 8, 0], *([w, 0, 0] for w in _bits(1, W))]
    lane = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(register, lane, [], [], [W, 16, 8])


@gluon.constexpr_function
def _steps(K):
    """Stages of a stripe."""
    return -(-K // 1024)


@gluon.constexpr_function
def _part(WHICH, CHUNKS):
    """The chunks of a row that a group brings."""
    return len(range(WHICH, CHUNKS, 4))


WAIT = gl.constexpr(
    "{ .reg .pred other, more; .reg .u32 t, v; mov.u32 $0, 0; mov.u32 t, %laneid; setp.ne.u32 other, t, 0; "
    "@other bra DONE; AGAIN: ld.acquire.gpu.global.u32 v, [$1]; setp.lt.u32 more, v, $2; @more bra AGAIN; DONE: }"
)


CONSUMED = gl.constexpr(
    "{ .reg .pred never; setp.eq.u32 never, $4, 0x7fa5a5a5; @never trap; "
    "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }"
)


@gluon.jit
def _when_computed(acc):
    """Nothing behind it runs before the sums are there, so before what they are of has been read.

    The copy engine may overwrite shared memory as soon as it is told so, however long a load has been on its way.
    """
    gl.inline_asm_elementwise(
        CONSUMED, "=r,=r,=r,=r,r,r,r,r", [acc.to(gl.int32, bitcast=True)], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def _count_and_wait(counters, phase: gl.constexpr, grid, go, ready):
    """Count the program in, behind all that the warp stored, and let the consumers go on when all are counted.

    Not before all of them have gone on the last time: who waits for a barrier does not see it pass twice.
    """
    counter = counters + phase
    together()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")
    gl.inline_asm_elementwise(
        WAIT, "=r,l,r", [counter.to(gl.int64, bitcast=True), grid], dtype=gl.int32, is_pure=False, pack=1
    )
    mbarrier.wait(ready, phase & 1)
    together()
    mbarrier.arrive(go, count=1)


@gluon.jit
def _ask(maps, ring, done, items, offset, K: gl.constexpr, FORM: gl.constexpr):
    """Fill the ring with the program's stripes of a product; ``offset``, if not 0, is from a stripe to its pair."""
    STAGES: gl.constexpr = FORM[0]
    AHEAD: gl.constexpr = FORM[12]
    STEPS: gl.constexpr = _steps(K)
    codes_map, scales_map = maps
    codes, scales, full, empty = ring
    pair = 1 + (offset > 0).to(gl.int32)
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        for i in range(pair * STEPS):
            stripe = t + (i // STEPS) * offset
            unit = (i % STEPS) * 16
            slot = done % STAGES
            bar = full.index(slot)
            if AHEAD < STAGES:
                if done >= AHEAD:
                    mbarrier.wait(full.index((done - AHEAD) % STAGES), ((done - AHEAD) // STAGES) & 1)
            mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 16 * 576)
            tma.async_copy_global_to_shared(codes_map, [stripe, unit, 0], bar, codes.index(slot))
            tma.async_copy_global_to_shared(scales_map, [stripe, unit, 0], bar, scales.index(slot))
            done += 1
    return done


@gluon.jit
def produce(maps, ring, numbers, FORM: gl.constexpr):
    """The weights of all products, in order."""
    SHAPES: gl.constexpr = FORM[1]
    PHASES: gl.constexpr = FORM[2]
    items = numbers[0]
    done = 0 * numbers[1]
    done = _ask(maps[0], ring, done, items[0], 0 * items[0], SHAPES[0], FORM)
    if PHASES > 1:
        done = _ask(maps[1], ring, done, items[1], items[1], SHAPES[1], FORM)
    if PHASES > 2:
        done = _ask(maps[2], ring, done, items[2], 0 * items[2], SHAPES[2], FORM)
    if PHASES > 3:
        done = _ask(maps[3], ring, done, items[3], 0 * items[3], SHAPES[3], FORM)


@gluon.jit
def _bring(
    inputs, at, norm, eps, brought, normed, phase, M, K: gl.constexpr, NORM: gl.constexpr, WHICH: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """M rows of K to shared memory, normalized if NORM; columns from K on are 0. A group brings every fourth chunk."""
    R: gl.constexpr = FORM[3]
    HALF: gl.constexpr = FORM[4]
    x, squares, ready, squared, go = inputs
    PART: gl.constexpr = _part(WHICH, _steps(K))
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    m = gl.arange(0, R, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, 1024, layout=gl.SliceLayout(0, L)) + WHICH * 1024
    place = at + (gl.minimum(m, M - 1)[:, None] * K + k[None, :])
    weights = ()
    if NORM:
        for c in gl.static_range(PART):
            weights = weights + (gl.load(norm + k + c * 4096, mask=k + c * 4096 < K, other=0),)
    if phase >= 0:
        mbarrier.wait(go, phase & 1)
    held = ()
    for c in gl.static_range(PART):
        there = (k + c * 4096 < K)[None, :] & (m < R)[:, None]
        held = held + (gl.load(place + c * 4096, mask=there, other=0, cache_modifier=".cg"),)
    if NORM:
        total = gl.zeros([R, 1024], gl.float32, L)
        for c in gl.static_range(PART):
            total += held[c].to(gl.float32) * held[c].to(gl.float32)
        squares.slice(WHICH, 1, dim=0).store(gl.sum(total.reshape(R, 128, 8), 2).reshape(1, R, 128))
        together()
        mbarrier.arrive(squared, count=1)
        mbarrier.wait(squared, normed & 1)
        mean = gl.sum(gl.sum(squares.load(_squares_layout(R)), 0), 1) / K
        factor = gl.convert_layout(gl.rsqrt(mean + eps), gl.SliceLayout(1, L))[:, None]
    for c in gl.static_range(PART):
        v = held[c]
        if NORM:
            v = (v.to(gl.float32) * factor).to(HALF).to(gl.float32)
            v = (v * weights[c].to(gl.float32)[None, :]).to(HALF)
        x.index(WHICH + 4 * c).store(v)
    together()
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, brought & 1)


@gluon.jit
def _operand(v, B: gl.constexpr):
    """(8, 256) activations -> (4, 64, 8), as the operand B, k as of ``_weights``."""
    v = v.reshape(8, 4, 4, 2, 2, 2, 2).permute(1, 3, 4, 5, 2, 6, 0)  # m | w kt h s i p -> w | h s i kt p | m
    return gl.convert_layout(v.reshape(4, 64, 8), B, assert_trivial=True)


@gluon.jit
def _near(x, step, j: gl.constexpr, R: gl.constexpr):
    """The activations of units 4 j to 4 j + 3 of a step."""
    L: gl.constexpr = _x_layout(R)
    v = x.index(step).slice(256 * j, 256, dim=1).load(_rows_layout(R))
    v = gl.convert_layout(v, gl.SliceLayout(0, L), assert_trivial=True).expand_dims(0)
    if R < 8:
        v, _ = gl.broadcast(v, gl.zeros([8 // R, R, 256], gl.int1, L))
    return v.reshape(8, 256)


@gluon.jit
def _multiply(
    ring, sums, x, done, made, items, PAIR: gl.constexpr, K: gl.constexpr, WHICH: gl.constexpr, FORM: gl.constexpr
):
    """The group's sums of the program's stripes of a product."""
    STAGES: gl.constexpr = FORM[0]
    R: gl.constexpr = FORM[3]
    FENCE: gl.constexpr = FORM[14]
    HALF: gl.constexpr = FORM[4]
    DECODE: gl.constexpr = FORM[5]
    SCALE: gl.constexpr = FORM[6]
    SLOTS: gl.constexpr = FORM[7]
    STEPS: gl.constexpr = _steps(K)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    codes, scales, full, empty = ring
    values, sums_full, sums_empty = sums
    for _t in range(gl.program_id(0), items, gl.num_programs(0)):
        for _half in range(PAIR):
            acc = gl.zeros([4, 16, 8], gl.float32, MMA)
            mine = (WHICH - done) & 3
            for s in range(mine, STEPS, 4):
                slot = (done + s) % STAGES
                mbarrier.wait(full.index(slot), ((done + s) // STAGES) & 1)
                words = ()
                pairs = ()
                for j in gl.static_range(4):
                    words = words + (codes.index(slot).slice(j * 4, 4, dim=1).load(_codes_layout(4)),)
                    pairs = pairs + (scales.index(slot).slice(j * 4, 4, dim=1).load(_scales_layout(4)),)
                if FENCE:
                    fence_async_shared()
                    mbarrier.arrive(empty.index(slot), count=1)
                for j in gl.static_range(4):
                    w = _weights(
                        words[j].reshape(4, 1, 128), pairs[j].reshape(4, 1, 32), 4, 1, A, HALF, DECODE, SCALE
                    )  # fmt: skip
                    acc = mma_v2(w, _operand(_near(x, s, j, R), B), acc)
                if not FENCE:
                    _when_computed(acc)
                    mbarrier.arrive(empty.index(slot), count=1)
            done += STEPS
            slot = made % SLOTS
            mbarrier.wait(sums_empty.index(slot), ((made // SLOTS) & 1) ^ 1)
            values.index(slot * 4 + mine).store(acc)
            together()
            mbarrier.arrive(sums_full.index(slot), count=1)
            made += 1
    return done, made


@gluon.jit
def consume(ring, sums, inputs, sources, norms, epsilons, numbers, WHICH: gl.constexpr, FORM: gl.constexpr):
    """A group's sums of all products, in order."""
    SHAPES: gl.constexpr = FORM[1]
    PHASES: gl.constexpr = FORM[2]
    items, M, _grid = numbers
    attended, total, gated, behind = sources
    x = inputs[0]
    wait_for_kernels_ahead()
    done = 0 * M
    made = 0 * M
    _bring(inputs, attended, attended, 0.0, 0, 0, -1, M, SHAPES[0], False, WHICH, FORM)
    done, made = _multiply(ring, sums, x, done, made, items[0], 1, SHAPES[0], WHICH, FORM)
    if PHASES > 1:
        _bring(inputs, total, norms[0], epsilons[0], 1, 0, 0, M, SHAPES[1], True, WHICH, FORM)
        done, made = _multiply(ring, sums, x, done, made, items[1], 2, SHAPES[1], WHICH, FORM)
    if PHASES > 2:
        _bring(inputs, gated, gated, 0.0, 2, 0, 1, M, SHAPES[2], False, WHICH, FORM)
        done, made = _multiply(ring, sums, x, done, made, items[2], 1, SHAPES[2], WHICH, FORM)
    if PHASES > 3:
        _bring(inputs, behind, norms[1], epsilons[1], 3, 1, 2, M, SHAPES[3], True, WHICH, FORM)
        done, made = _multiply(ring, sums, x, done, made, items[3], 1, SHAPES[3], WHICH, FORM)


@gluon.jit
def _activated(g, ACTIVATION: gl.constexpr):
    """As ``step_code``."""
    if ACTIVATION == "silu":
        y = g / (1 + gl.exp(-g))
    elif ACTIVATION == "gelu":
        y = 0.5 * g * (1 + gl.erf(g * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = g / (1 + gl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
    else:
        y = gl.where(g < 0, 0.0, g) * gl.where(g < 0, 0.0, g)
    return y


@gluon.jit
def _stripe(i, items, PAIR: gl.constexpr):
    """The program's stripe number i of a product, and whether there is one."""
    t = gl.program_id(0) + i // PAIR * gl.num_programs(0)
    return t + i % PAIR * items, t < items


@gluon.jit
def _read(at, items, COUNT: gl.constexpr, PAIR: gl.constexpr):
    """Values of the rows of the program's stripes."""
    L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, _sums_layout(4)))
    n = gl.arange(0, 16, layout=L)
    found = ()
    for i in gl.static_range(COUNT * PAIR):
        stripe, there = _stripe(i, items, PAIR)
        found = found + (gl.load(at + stripe * 16 + n, mask=(n < 16) & there, other=0.0),)
    return found


@gluon.constexpr_function
def _pair_of(p):
    """Stripes of product p that belong together."""
    return 2 if p == 1 else 1


@gluon.jit
def _keep(values, table, COUNT: gl.constexpr):
    for i in gl.static_range(COUNT):
        table.index(i).store(values[i])


@gluon.jit
def _take(sums, done, product, kept, i, stripe, P: gl.constexpr, FORM: gl.constexpr):
    """The next sums of a stripe, number i, as the product has them: (16, 8) that were rounded."""
    HALF: gl.constexpr = FORM[4]
    SLOTS: gl.constexpr = FORM[7]
    PER_ROW: gl.constexpr = FORM[8]
    BIAS: gl.constexpr = FORM[9]
    FACTOR: gl.constexpr = FORM[10]
    L: gl.constexpr = gl.SliceLayout(0, _sums_layout(4))
    values, full, empty = sums
    slot = done % SLOTS
    if BIAS[P]:
        added = gl.load(product[1] + stripe * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, L))).to(gl.float32)
    mbarrier.wait(full.index(slot), (done // SLOTS) & 1)
    y = gl.zeros([16, 8], gl.float32, L)
    for c in gl.static_range(4):
        y += gl.sum(values.index(slot * 4 + c).load(_sums_layout(4)), 0)
    mbarrier.arrive(empty.index(slot), count=1)
    if PER_ROW[P]:
        y = y * (kept.index(i).load(gl.SliceLayout(1, L)) * FACTOR)[:, None]
    else:
        y = y * (gl.load(product[0]) * FACTOR)
    if BIAS[P]:
        y = y + added[:, None]
    return y.to(HALF).to(gl.float32)


@gluon.jit
def _add(sums, product, kept, stream, to, done, items, M, WIDTH: gl.constexpr, P: gl.constexpr, FORM: gl.constexpr):
    """Rows of the residual stream, with the product added; ``stream`` has the program's."""
    HALF: gl.constexpr = FORM[4]
    L: gl.constexpr = gl.SliceLayout(0, _sums_layout(4))
    n = gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    i = 0 * M
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        y = stream.index(i).load(L) + _take(sums, done, product, kept, i, t, P, FORM)
        y = y.to(HALF)
        place = m[None, :] * WIDTH + (t * 16 + n)[:, None]
        gl.store(to + place, y, mask=(m < M)[None, :] & (n < 16)[:, None])
        stream.index(i).store(y.to(gl.float32))
        i += 1
        done += 1
    return done


@gluon.jit
def finish(sums, products, tables, given, sources, out, counts, go, ready, numbers, FORM: gl.constexpr):
    """What follows the sums of each product."""
    SHAPES: gl.constexpr = FORM[1]
    PHASES: gl.constexpr = FORM[2]
    HALF: gl.constexpr = FORM[4]
    PER_ROW: gl.constexpr = FORM[8]
    ACTIVATION: gl.constexpr = FORM[11]
    ROUNDS: gl.constexpr = FORM[13]
    MOST: gl.constexpr = ROUNDS[0]
    H: gl.constexpr = SHAPES[1]
    INNER: gl.constexpr = SHAPES[2]
    WIDTH: gl.constexpr = SHAPES[4]
    items, M, grid = numbers
    _attended, total, gated, behind = sources
    kept, stream = tables
    L: gl.constexpr = gl.SliceLayout(0, _sums_layout(4))
    n = gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    factors = ()
    for p in gl.static_range(PHASES):
        if PER_ROW[p]:
            factors = factors + (_read(products[p][0], items[p], ROUNDS[p], _pair_of(p)),)
        else:
            factors = factors + ((),)
    for p in gl.static_range(PHASES):
        if PER_ROW[p]:
            _keep(factors[p], kept[p], ROUNDS[p] * _pair_of(p))
    wait_for_kernels_ahead()
    old = ()
    for i in gl.static_range(MOST):
        t, there = _stripe(i, items[0], 1)
        place = m[None, :] * H + (t * 16 + n)[:, None]
        old = old + (gl.load(given + place, mask=(m < M)[None, :] & ((n < 16) & there)[:, None], other=0),)
    for i in gl.static_range(MOST):
        stream.index(i).store(old[i].to(gl.float32))
    done = 0 * M
    done = _add(sums, products[0], kept[0], stream, total, done, items[0], M, H, 0, FORM)
    if PHASES > 1:
        _count_and_wait(counts, 0, grid, go, ready)
        i = 0 * M
        for t in range(gl.program_id(0), items[1], gl.num_programs(0)):
            gate = _take(sums, done, products[1], kept[1], i, t, 1, FORM)
            up = _take(sums, done + 1, products[1], kept[1], i + 1, t + items[1], 1, FORM)
            y = (_activated(gate, ACTIVATION) * up).to(HALF)
            place = m[None, :] * INNER + (t * 16 + n)[:, None]
            gl.store(gated + place, y, mask=(m < M)[None, :] & (n < 16)[:, None])
            i += 2
            done += 2
    if PHASES > 2:
        _count_and_wait(counts, 1, grid, go, ready)
        done = _add(sums, products[2], kept[2], stream, behind, done, items[2], M, H, 2, FORM)
    if PHASES > 3:
        _count_and_wait(counts, 2, grid, go, ready)
        i = 0 * M
        for t in range(gl.program_id(0), items[3], gl.num_programs(0)):
            y = _take(sums, done, products[3], kept[3], i, t, 3, FORM).to(HALF)
            place = m[None, :] * WIDTH + (t * 16 + n)[:, None]
            gl.store(out + place, y, mask=(m < M)[None, :] & (n < 16)[:, None])
            i += 1
            done += 1
    if PHASES > 1:
        together()
        if gl.atomic_add(counts + 3, 1, sem="acq_rel", scope="gpu") == grid - 1:
            for c in gl.static_range(4):
                gl.store(counts + c, 0)


@gluon.jit
def chain(
    codes_o,
    scales_o,
    codes_gate_up,
    scales_gate_up,
    codes_down,
    scales_down,
    codes_qkv,
    scales_qkv,
    residual,
    attended,
    norm_1,
    norm_2,
    scale2_o,
    scale2_gate_up,
    scale2_down,
    scale2_qkv,
    bias_o,
    bias_gate_up,
    bias_down,
    bias_qkv,
    total,
    gated,
    behind,
    out,
    counts,
    M,
    eps_1,
    eps_2,
    items_o,
    items_gate_up,
    items_down,
    items_qkv,
    STAGES: gl.constexpr,
    SHAPES: gl.constexpr,
    PHASES: gl.constexpr,
    R: gl.constexpr,
    ROUNDS: gl.constexpr,
    AHEAD: gl.constexpr,
    FENCE: gl.constexpr,
    PER_ROW: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    REGISTERS: gl.constexpr,
    DECODE: gl.constexpr,
    SCALE: gl.constexpr,
    FACTOR: gl.constexpr,
):
    """A decoder layer between two attentions, for M tokens.

    Args:
        codes_o: boxes (1, 16, 128) of i32 (stripes, units, 128), as those of the other products.
        scales_o: boxes (1, 16, 32) of i16 (stripes, units, 32), as those of the other products.
        residual: (M, H).
        attended: (M, A).
        norm_1: (H,).
        norm_2: (H,).
        scale2_o: f32, 1 or a value for each row, as of the other products.
        bias_o: (H,), if BIAS has it, as those of the other products.
        total: (M, H), s1; scratch.
        gated: (M, I); scratch.
        behind: (M, H), s2.
        out: (M, N).
        counts: i32, four zeros; zeros again at the end.
        M: 1 to R.
        eps_1: of the first norm.
        eps_2: of the second.
        items_o: stripes, or pairs of them, as of the other products.
        STAGES: of the ring.
        SHAPES: A, H, I, H and N.
        PHASES: products, 4 or 3; fewer are for tests.
        R: rows of activations in shared memory: 1, 2, 4 or 8.
        ROUNDS: stripes of a program, or pairs of them, of each product: at least so many, a power of two.
        AHEAD: stages of the ring, at most, that are on their way.
        PER_ROW: for each product, whether scale2 has a value for each row.
        BIAS: for each, whether there is one.
        ACTIVATION: a name.
        REGISTERS: of the threads of consumers, and of producer and finisher.
        DECODE: assembly: a word and a pair of scales -> four pairs of products.
        SCALE: assembly: two scale bytes -> a pair of scales.
        FACTOR: what products lack beside scale2.
    """
    HALF: gl.constexpr = attended.dtype.element_ty
    SLOTS: gl.constexpr = 2
    let_the_next_kernel_start()
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 16, 128], codes_o.layout)
    scales = gl.allocate_shared_memory(gl.int16, [STAGES, 1, 16, 32], scales_o.layout)
    values = gl.allocate_shared_memory(gl.float32, [SLOTS * 4, 4, 16, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    squares = gl.allocate_shared_memory(gl.float32, [4, R, 128], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kept = (
        gl.allocate_shared_memory(gl.float32, [ROUNDS[0], 16], ROW),
        gl.allocate_shared_memory(gl.float32, [ROUNDS[1] * 2, 16], ROW),
        gl.allocate_shared_memory(gl.float32, [ROUNDS[2], 16], ROW),
        gl.allocate_shared_memory(gl.float32, [ROUNDS[3], 16], ROW),
    )
    stream = gl.allocate_shared_memory(gl.float32, [ROUNDS[0], 16, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sums_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    sums_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    others = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    CHUNKS: gl.constexpr = max(_steps(SHAPES[0]), _steps(SHAPES[1]), _steps(SHAPES[2]))
    x = gl.allocate_shared_memory(HALF, [CHUNKS, R, 1024], gl.SwizzledSharedLayout(8, 1, min(R, 2), [1, 0]))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(sums_full.index(i), count=4)
        mbarrier.init(sums_empty.index(i), count=1)
    ready = others.index(0)
    squared = others.index(1)
    go = others.index(2)
    mbarrier.init(ready, count=4)
    mbarrier.init(squared, count=4)
    mbarrier.init(go, count=1)
    fence_async_shared()
    FORM: gl.constexpr = (
        STAGES, SHAPES, PHASES, R, HALF, DECODE, SCALE, SLOTS, PER_ROW, BIAS, FACTOR, ACTIVATION, AHEAD, ROUNDS, FENCE,
    )  # fmt: skip
    ring = (codes, scales, full, empty)
    sums = (values, sums_full, sums_empty)
    inputs = (x, squares, ready, squared, go)
    maps = (
        (codes_o, scales_o), (codes_gate_up, scales_gate_up), (codes_down, scales_down), (codes_qkv, scales_qkv),
    )  # fmt: skip
    products = ((scale2_o, bias_o), (scale2_gate_up, bias_gate_up), (scale2_down, bias_down), (scale2_qkv, bias_qkv))
    numbers = ((items_o, items_gate_up, items_down, items_qkv), M, gl.num_programs(0))
    sources = (attended, total, gated, behind)
    norms = (norm_1, norm_2)
    eps = (eps_1, eps_2)
    gl.warp_specialize(
        [
            (consume, (ring, sums, inputs, sources, norms, eps, numbers, 0, FORM)),
            (consume, (ring, sums, inputs, sources, norms, eps, numbers, 1, FORM)),
            (consume, (ring, sums, inputs, sources, norms, eps, numbers, 2, FORM)),
            (consume, (ring, sums, inputs, sources, norms, eps, numbers, 3, FORM)),
            (produce, (maps, ring, numbers, FORM)),
            (finish, (sums, products, (kept, stream), residual, sources, out, counts, go, ready, numbers, FORM)),
        ],
        [4, 4, 4, 1, 1],
        [REGISTERS[0], REGISTERS[0], REGISTERS[0], REGISTERS[1], REGISTERS[1]],
    )
