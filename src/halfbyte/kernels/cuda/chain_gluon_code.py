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
def _x_layout(W):
    """Of (8, 64 W) activations: a lane has the 16 of a block."""
    register = [[0, 1], [0, 2], [0, 4], [0, 8]]
    lane = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(register, lane, [[0, 64 * w] for w in _bits(1, W)], [], [8, 64 * W])


@gluon.constexpr_function
def _row_layout(W):
    """Of one row of those, which all lanes of a block have."""
    lane = [[16], [32], [0], [0], [0]]
    return gl.DistributedLinearLayout([[1], [2], [4], [8]], lane, [[64 * w] for w in _bits(1, W)], [], [64 * W])


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


@gluon.jit
def _count_and_wait(counter, count, go):
    """Count the program in, behind all that the warp stored, and let the consumers go on when all are counted."""
    together()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")
    gl.inline_asm_elementwise(
        WAIT, "=r,l,r", [counter.to(gl.int64, bitcast=True), count], dtype=gl.int32, is_pure=False, pack=1
    )
    together()
    mbarrier.arrive(go, count=1)


@gluon.jit
def _ask(maps, ring, done, items, offset, K: gl.constexpr, STAGES: gl.constexpr):
    """Fill the ring with the program's stripes of a product; ``offset``, if not 0, is from a stripe to its pair."""
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
            mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 16 * 576)
            tma.async_copy_global_to_shared(codes_map, [stripe, unit, 0], bar, codes.index(slot))
            tma.async_copy_global_to_shared(scales_map, [stripe, unit, 0], bar, scales.index(slot))
            done += 1
    return done


@gluon.jit
def produce(maps, ring, numbers, FORM: gl.constexpr):
    """The weights of all products, in order."""
    STAGES: gl.constexpr = FORM[0]
    SHAPES: gl.constexpr = FORM[1]
    PHASES: gl.constexpr = FORM[2]
    items = numbers[0]
    done = 0 * numbers[1]
    done = _ask(maps[0], ring, done, items[0], 0 * items[0], SHAPES[0], STAGES)
    if PHASES > 1:
        done = _ask(maps[1], ring, done, items[1], items[1], SHAPES[1], STAGES)
    if PHASES > 2:
        done = _ask(maps[2], ring, done, items[2], 0 * items[2], SHAPES[2], STAGES)
    if PHASES > 3:
        done = _ask(maps[3], ring, done, items[3], 0 * items[3], SHAPES[3], STAGES)


@gluon.jit
def _row(inputs, at, norm, eps, brought, normed, phase, K: gl.constexpr, NORM: gl.constexpr, WHICH: gl.constexpr):
    """A row of K to shared memory, normalized if NORM; columns from K on are 0. A group brings every fourth chunk."""
    x, squares, ready, squared, go = inputs
    HALF: gl.constexpr = at.dtype.element_ty
    CHUNKS: gl.constexpr = _steps(K)
    PART: gl.constexpr = _part(WHICH, CHUNKS)
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    k = gl.arange(0, 1024, layout=L) + WHICH * 1024
    weights = ()
    if NORM:
        for c in gl.static_range(PART):
            weights = weights + (gl.load(norm + k + c * 4096, mask=k + c * 4096 < K, other=0),)
    if phase >= 0:
        mbarrier.wait(go, phase & 1)
    held = ()
    for c in gl.static_range(PART):
        held = held + (gl.load(at + k + c * 4096, mask=k + c * 4096 < K, other=0, cache_modifier=".cg"),)
    if NORM:
        total = gl.zeros([1024], gl.float32, L)
        for c in gl.static_range(PART):
            total += held[c].to(gl.float32) * held[c].to(gl.float32)
        squares.slice(WHICH * 128, 128, dim=0).store(gl.sum(total.reshape(128, 8), 1))
        together()
        mbarrier.arrive(squared, count=1)
        mbarrier.wait(squared, normed & 1)
        ALL: gl.constexpr = gl.DistributedLinearLayout(
            [[1], [2], [128], [256]], [[4], [8], [16], [32], [64]], [[0], [0]], [], [512]
        )  # fmt: skip
        factor = gl.rsqrt(gl.sum(squares.load(ALL), 0) / K + eps)
    for c in gl.static_range(PART):
        v = held[c]
        if NORM:
            v = (v.to(gl.float32) * factor).to(HALF).to(gl.float32)
            v = (v * weights[c].to(gl.float32)).to(HALF)
        x.index(WHICH + 4 * c).store(v)
    together()
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, brought & 1)


@gluon.jit
def _rows(inputs, at, norm, eps, brought, phase, M, K: gl.constexpr, WHICH: gl.constexpr):
    """M rows of K to shared memory, normalized; columns from K on are 0. Each group brings two rows."""
    x, _squares, ready, _squared, go = inputs
    HALF: gl.constexpr = at.dtype.element_ty
    CHUNKS: gl.constexpr = _steps(K)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 2], [1, 0])
    k = gl.arange(0, 1024, layout=gl.SliceLayout(0, L))
    m = gl.arange(0, 2, layout=gl.SliceLayout(1, L))
    row = at + gl.minimum(m + 2 * WHICH, M - 1)[:, None] * K + k[None, :]
    mbarrier.wait(go, phase & 1)
    total = gl.zeros([2, 1024], gl.float32, L)
    held = ()
    for c in gl.static_range(CHUNKS):
        there = (k + c * 1024 < K)[None, :] & (m < 2)[:, None]
        v = gl.load(row + c * 1024, mask=there, other=0, cache_modifier=".cg")
        if CHUNKS <= 4:
            held = held + (v,)
        total += v.to(gl.float32) * v.to(gl.float32)
    factor = gl.rsqrt(gl.sum(total, 1) / K + eps)[:, None]
    for c in gl.static_range(CHUNKS):
        if CHUNKS <= 4:
            v = held[c]
        else:
            there = (k + c * 1024 < K)[None, :] & (m < 2)[:, None]
            v = gl.load(row + c * 1024, mask=there, other=0, cache_modifier=".cg")
        w = gl.load(norm + k + c * 1024, mask=k + c * 1024 < K, other=0).to(gl.float32)
        v = (v.to(gl.float32) * factor).to(HALF).to(gl.float32)
        x.index(c).slice(2 * WHICH, 2, dim=0).store((v * w[None, :]).to(HALF))
    together()
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, brought & 1)


@gluon.jit
def _operand(v, B: gl.constexpr):
    """(8, 256) activations -> (4, 64, 8), as the operand B, k as of ``_weights``."""
    v = v.reshape(8, 4, 4, 2, 2, 2, 2).permute(1, 3, 4, 5, 2, 6, 0)  # m | w kt h s i p -> w | h s i kt p | m
    return gl.convert_layout(v.reshape(4, 64, 8), B, assert_trivial=True)


@gluon.jit
def _near(x, step, j: gl.constexpr, ONE: gl.constexpr):
    """The activations of units 4 j to 4 j + 3 of a step, from shared memory."""
    L: gl.constexpr = _x_layout(4)
    if ONE:
        row = gl.convert_layout(
            x.index(step).slice(256 * j, 256, dim=0).load(_row_layout(4)), gl.SliceLayout(0, L), assert_trivial=True
        )  # fmt: skip
        every, _ = gl.broadcast(row.expand_dims(0), gl.zeros([8, 256], gl.int1, L))
    else:
        every = x.index(step).slice(256 * j, 256, dim=1).load(L)
    return every


@gluon.jit
def _far(at, step, M, K: gl.constexpr):
    """The activations of a step, from global memory past the first cache."""
    L: gl.constexpr = _x_layout(4)
    m = gl.arange(0, 8, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, 256, layout=gl.SliceLayout(0, L))
    place = at + (gl.minimum(m, M - 1)[:, None] * K + k[None, :]) + step * 1024
    found = ()
    for j in gl.static_range(4):
        if K % 1024 == 0:
            v = gl.load(place + j * 256, cache_modifier=".cg")
        else:
            there = (k + (step * 1024 + j * 256) < K)[None, :] & (m < 8)[:, None]
            v = gl.load(place + j * 256, mask=there, other=0, cache_modifier=".cg")
        found = found + (v,)
    return found


@gluon.jit
def _multiply(
    ring, sums, x, at, done, made, items, M, PAIR: gl.constexpr, K: gl.constexpr, FAR: gl.constexpr,
    WHICH: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """The group's sums of the program's stripes of a product."""
    STAGES: gl.constexpr = FORM[0]
    ONE: gl.constexpr = FORM[3]
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
                if FAR:
                    now = _far(at, s, M, K)
                mbarrier.wait(full.index(slot), ((done + s) // STAGES) & 1)
                words = ()
                pairs = ()
                for j in gl.static_range(4):
                    words = words + (codes.index(slot).slice(j * 4, 4, dim=1).load(_codes_layout(4)),)
                    pairs = pairs + (scales.index(slot).slice(j * 4, 4, dim=1).load(_scales_layout(4)),)
                mbarrier.arrive(empty.index(slot), count=1)
                for j in gl.static_range(4):
                    w = _weights(
                        words[j].reshape(4, 1, 128), pairs[j].reshape(4, 1, 32), 4, 1, A, HALF, DECODE, SCALE
                    )  # fmt: skip
                    if FAR:
                        v = now[j]
                    else:
                        v = _near(x, s, j, ONE)
                    acc = mma_v2(w, _operand(v, B), acc)
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
    ONE: gl.constexpr = FORM[3]
    FAR: gl.constexpr = not ONE
    items, M, _grid = numbers
    attended, total, gated, behind = sources
    x = inputs[0]
    go = inputs[4]
    wait_for_kernels_ahead()
    done = 0 * M
    made = 0 * M
    if ONE:
        _row(inputs, attended, attended, 0.0, 0, 0, -1, SHAPES[0], False, WHICH)
    done, made = _multiply(ring, sums, x, attended, done, made, items[0], M, 1, SHAPES[0], FAR, WHICH, FORM)
    if PHASES > 1:
        if ONE:
            _row(inputs, total, norms[0], epsilons[0], 1, 0, 0, SHAPES[1], True, WHICH)
        else:
            _rows(inputs, total, norms[0], epsilons[0], 0, 0, M, SHAPES[1], WHICH)
        done, made = _multiply(ring, sums, x, total, done, made, items[1], M, 2, SHAPES[1], False, WHICH, FORM)
    if PHASES > 2:
        if ONE:
            _row(inputs, gated, gated, 0.0, 2, 0, 1, SHAPES[2], False, WHICH)
        else:
            mbarrier.wait(go, 1)
        done, made = _multiply(ring, sums, x, gated, done, made, items[2], M, 1, SHAPES[2], FAR, WHICH, FORM)
    if PHASES > 3:
        if ONE:
            _row(inputs, behind, norms[1], epsilons[1], 3, 1, 2, SHAPES[3], True, WHICH)
        else:
            _rows(inputs, behind, norms[1], epsilons[1], 1, 2, M, SHAPES[3], WHICH)
        done, made = _multiply(ring, sums, x, behind, done, made, items[3], M, 1, SHAPES[3], False, WHICH, FORM)


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
def _factor_of(product, rows, P: gl.constexpr, FORM: gl.constexpr):
    """What the sums of rows are multiplied by, and the bias."""
    PER_ROW: gl.constexpr = FORM[8]
    BIAS: gl.constexpr = FORM[9]
    FACTOR: gl.constexpr = FORM[10]
    scale2, bias = product
    if PER_ROW[P]:
        factor = gl.load(scale2 + rows) * FACTOR
    else:
        factor = gl.load(scale2 + 0 * rows) * FACTOR
    if BIAS[P]:
        added = gl.load(bias + rows).to(gl.float32)
    else:
        added = factor
    return factor, added


@gluon.jit
def _take(sums, done, factor, P: gl.constexpr, FORM: gl.constexpr):
    """The next sums of a stripe, as the product has them: (16, 8) that were rounded."""
    HALF: gl.constexpr = FORM[4]
    SLOTS: gl.constexpr = FORM[7]
    BIAS: gl.constexpr = FORM[9]
    values, full, empty = sums
    slot = done % SLOTS
    mbarrier.wait(full.index(slot), (done // SLOTS) & 1)
    y = gl.zeros([16, 8], gl.float32, gl.SliceLayout(0, _sums_layout(4)))
    for i in gl.static_range(4):
        y += gl.sum(values.index(slot * 4 + i).load(_sums_layout(4)), 0)
    mbarrier.arrive(empty.index(slot), count=1)
    y = y * factor[0][:, None]
    if BIAS[P]:
        y = y + factor[1][:, None]
    return y.to(HALF).to(gl.float32)


@gluon.jit
def _add(sums, product, before, to, done, items, M, WIDTH: gl.constexpr, P: gl.constexpr, FORM: gl.constexpr):
    """Rows of what was before, with the product added."""
    HALF: gl.constexpr = FORM[4]
    L: gl.constexpr = gl.SliceLayout(0, _sums_layout(4))
    n = gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        rows = t * 16 + n
        place = m[None, :] * WIDTH + rows[:, None]
        there = (m < M)[None, :] & (rows < WIDTH)[:, None]
        old = gl.load(before + place, mask=there, other=0, cache_modifier=".cg").to(gl.float32)
        y = _take(sums, done, _factor_of(product, rows, P, FORM), P, FORM)
        gl.store(to + place, (old + y).to(HALF), mask=there)
        done += 1
    return done


@gluon.jit
def finish(sums, products, given, sources, out, counts, go, numbers, FORM: gl.constexpr):
    """What follows the sums of each product."""
    SHAPES: gl.constexpr = FORM[1]
    PHASES: gl.constexpr = FORM[2]
    HALF: gl.constexpr = FORM[4]
    ACTIVATION: gl.constexpr = FORM[11]
    H: gl.constexpr = SHAPES[1]
    INNER: gl.constexpr = SHAPES[2]
    WIDTH: gl.constexpr = SHAPES[4]
    items, M, grid = numbers
    _attended, total, gated, behind = sources
    L: gl.constexpr = gl.SliceLayout(0, _sums_layout(4))
    n = gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    wait_for_kernels_ahead()
    done = 0 * M
    done = _add(sums, products[0], given, total, done, items[0], M, H, 0, FORM)
    if PHASES > 1:
        _count_and_wait(counts, grid, go)
        for t in range(gl.program_id(0), items[1], gl.num_programs(0)):
            rows = t * 16 + n
            of_gate = _factor_of(products[1], rows, 1, FORM)
            of_up = _factor_of(products[1], INNER + rows, 1, FORM)
            gate = _take(sums, done, of_gate, 1, FORM)
            up = _take(sums, done + 1, of_up, 1, FORM)
            y = (_activated(gate, ACTIVATION) * up).to(HALF)
            gl.store(gated + m[None, :] * INNER + rows[:, None], y, mask=(m < M)[None, :] & (rows < INNER)[:, None])
            done += 2
    if PHASES > 2:
        _count_and_wait(counts + 1, grid, go)
        done = _add(sums, products[2], total, behind, done, items[2], M, H, 2, FORM)
    if PHASES > 3:
        _count_and_wait(counts + 2, grid, go)
        for t in range(gl.program_id(0), items[3], gl.num_programs(0)):
            rows = t * 16 + n
            y = _take(sums, done, _factor_of(products[3], rows, 3, FORM), 3, FORM).to(HALF)
            gl.store(out + m[None, :] * WIDTH + rows[:, None], y, mask=(m < M)[None, :] & (rows < WIDTH)[:, None])
            done += 1
    if PHASES > 1:
        together()
        if gl.atomic_add(counts + 3, 1, sem="acq_rel", scope="gpu") == grid - 1:
            for i in gl.static_range(4):
                gl.store(counts + i, 0)


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
    ONE: gl.constexpr,
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
        M: 1 to 8.
        eps_1: of the first norm.
        eps_2: of the second.
        items_o: stripes, or pairs of them, as of the other products.
        STAGES: of the ring.
        SHAPES: A, H, I, H and N.
        PHASES: products, 4 or 3; fewer are for tests.
        ONE: M is 1.
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
    squares = gl.allocate_shared_memory(gl.float32, [512], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sums_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    sums_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    others = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    if ONE:
        CHUNKS: gl.constexpr = max(_steps(SHAPES[0]), _steps(SHAPES[1]), _steps(SHAPES[2]))
        x = gl.allocate_shared_memory(HALF, [CHUNKS, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        x = gl.allocate_shared_memory(HALF, [_steps(SHAPES[1]), 8, 1024], gl.SwizzledSharedLayout(8, 1, 2, [1, 0]))
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
        STAGES, SHAPES, PHASES, ONE, HALF, DECODE, SCALE, SLOTS, PER_ROW, BIAS, FACTOR, ACTIVATION,
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
            (finish, (sums, products, residual, sources, out, counts, go, numbers, FORM)),
        ],
        [4, 4, 4, 1, 1],
        [REGISTERS[0], REGISTERS[0], REGISTERS[0], REGISTERS[1], REGISTERS[1]],
    )
