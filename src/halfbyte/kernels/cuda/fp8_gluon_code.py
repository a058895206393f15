"""Device code of ``halfbyte.kernels.cuda.fp8_gluon``, in Gluon.

It differs from ``gemm_gluon_code`` in what a consumer decodes to, bytes of E4M3 that are the first operand of an FP8
wgmma, and in the scales of tokens. The words of a stage are in registers before the matrix units are done with the one
before it; they are decoded then, since the units read registers until they are done.
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
    codes_layout,
    combine,
    item_of,
    place_of,
    produce,
    put,
    scales_layout,
    wait_for_kernels_ahead,
)


@gluon.constexpr_function
def bytes_layout(R, W):
    """Of (R, 8, 4, 4) bytes: tile, g, c, byte; a lane's four are a register."""
    register = [[0, 0, 0, 1], [0, 0, 0, 2], *([i, 0, 0, 0] for i in _bits(W, R))]
    lane = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(register, lane, [[i, 0, 0, 0] for i in _bits(1, W)], [], [R, 8, 4, 4])


@gluon.jit
def load(ring, box, R: gl.constexpr, U: gl.constexpr):
    """The (R, 8 U, 16) words and (R, 16 U) words of scales of a box."""
    W: gl.constexpr = gl.num_warps()
    codes, scales, x, full, empty = ring
    return codes.index(box).load(codes_layout(R, U, W)), scales.index(box).load(scales_layout(R, U, W))


@gluon.jit
def _four(word, L: gl.constexpr):
    """A word beside each of the four bytes that it becomes."""
    return gl.convert_layout(word, gl.SliceLayout(3, L), assert_trivial=True).expand_dims(3)


@gluon.jit
def decoded(even, odd, scales, shift, R: gl.constexpr, ROUND: gl.constexpr, A: gl.constexpr):
    """(16 R, 32) of E4M3, as the operand A; of each 16 k position 4 c + j holds k = 2 c + (0, 8, 1, 9)[j].

    Args:
        even: (R, 8, 4), tile, g, c, the words of the first 16 k.
        odd: of the others.
        scales: (R, 8) words of their scales.
        shift: 2^16.
    """
    L: gl.constexpr = bytes_layout(R, gl.num_warps())
    scales = gl.convert_layout(scales, gl.SliceLayout(2, even.type.layout), assert_trivial=True).expand_dims(2)
    scales, even = gl.broadcast(scales, even)
    shift = gl.full([R, 8, 4, 4], 0, gl.int32, L) + shift
    scales, shift = gl.broadcast(_four(scales, L), shift)
    even, shift = gl.broadcast(_four(even, L), shift)
    odd, shift = gl.broadcast(_four(odd, L), shift)
    a, b, c, d = gl.inline_asm_elementwise(
        ROUND,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [scales, even, odd, shift],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )
    w = gl.join(gl.join(a, b), gl.join(c, d))  # t g c j rh e
    w = w.permute(0, 4, 1, 5, 2, 3)  # t rh g | e c j
    return gl.convert_layout(w.reshape(16 * R, 32), A, assert_trivial=True)


@gluon.jit
def _pieces(words, scales, R: gl.constexpr, U: gl.constexpr):
    """Of a stage, for each 32 k: the words of the first 16 k, (R, 8, 4), tile, g, c, of the others, and (R, 8) scales."""
    even, odd = gl.split(words.reshape(R, U, 8, 2, 2, 4).permute(0, 2, 5, 1, 3, 4))  # t g c u v, of kt = 2 v and after
    scales = scales.reshape(R, U, 8, 2).permute(0, 2, 1, 3)  # t g u v
    if U == 1:
        e0, e1 = gl.split(even.reshape(R, 8, 4, 2))
        o0, o1 = gl.split(odd.reshape(R, 8, 4, 2))
        s0, s1 = gl.split(scales.reshape(R, 8, 2))
        return (e0, o0, s0), (e1, o1, s1)
    else:
        gl.static_assert(U == 2)
        e0, e1 = gl.split(even)
        e0, e2 = gl.split(e0)
        e1, e3 = gl.split(e1)
        o0, o1 = gl.split(odd)
        o0, o2 = gl.split(o0)
        o1, o3 = gl.split(o1)
        s0, s1 = gl.split(scales)
        s0, s2 = gl.split(s0)
        s1, s3 = gl.split(s1)
        return (e0, o0, s0), (e1, o1, s1), (e2, o2, s2), (e3, o3, s3)


@gluon.jit
def _first(piece, shift, FIRST: gl.constexpr):
    even, odd, scales = piece
    scales = gl.convert_layout(scales, gl.SliceLayout(2, even.type.layout), assert_trivial=True).expand_dims(2)
    scales, even = gl.broadcast(scales, even)
    shift, even = gl.broadcast(gl.full([1, 1, 1], 0, gl.int32, even.type.layout) + shift, even)
    return gl.inline_asm_elementwise(
        FIRST,
        "=r,=r,=r,=r,r,r,r,r",
        [scales, even, odd, shift],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _bytes(first, zero, R: gl.constexpr, A: gl.constexpr):
    L: gl.constexpr = bytes_layout(R, gl.num_warps())
    zero = gl.full([R, 8, 4, 4], 0, gl.int32, L) + zero
    a, zero = gl.broadcast(_four(first[0], L), zero)
    b, zero = gl.broadcast(_four(first[1], L), zero)
    c, zero = gl.broadcast(_four(first[2], L), zero)
    d, zero = gl.broadcast(_four(first[3], L), zero)
    a, b, c, d = gl.inline_asm_elementwise(
        "or.b32 $0, $4, $20; or.b32 $1, $8, $20; or.b32 $2, $12, $20; or.b32 $3, $16, $20;",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [a, b, c, d, zero],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv),
        is_pure=False,
        pack=4,
    )
    w = gl.join(gl.join(a, b), gl.join(c, d))  # t g c j rh e
    w = w.permute(0, 4, 1, 5, 2, 3)  # t rh g | e c j
    return gl.convert_layout(w.reshape(16 * R, 32), A, assert_trivial=True)


@gluon.jit
def _begin(words, scales, shift, R: gl.constexpr, U: gl.constexpr, FIRST: gl.constexpr, PRE: gl.constexpr):
    """The words of the first PRE pieces of a stage, decoded."""
    pieces = _pieces(words, scales, R, U)
    found = ()
    for i in gl.static_range(PRE):
        found = found + _first(pieces[i], shift, FIRST)
    return found


@gluon.jit
def _stage(
    begun, words, scales, x, acc, shift, R: gl.constexpr, U: gl.constexpr, ROUND: gl.constexpr, A: gl.constexpr,
    PRE: gl.constexpr,
):  # fmt: skip
    pieces = _pieces(words, scales, R, U)
    for i in gl.static_range(2 * U):
        if i < PRE:
            a = _bytes((begun[4 * i], begun[4 * i + 1], begun[4 * i + 2], begun[4 * i + 3]), shift - 65536, R, A)
        else:
            a = decoded(pieces[i][0], pieces[i][1], pieces[i][2], shift, R, ROUND, A)
        acc = warpgroup_mma(a, x.slice(32 * i, 32, dim=1).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def multiply(
    ring, done, count, shift, C: gl.constexpr, WHICH: gl.constexpr, R: gl.constexpr, U: gl.constexpr,
    NB: gl.constexpr, STAGES: gl.constexpr, ROUND: gl.constexpr, MMA: gl.constexpr, FIRST: gl.constexpr,
    PRE: gl.constexpr,
):  # fmt: skip
    """(16 R, NB) f32: the sums of ``count`` steps, of which ``done`` were before in the ring."""
    codes, scales, x, full, empty = ring
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    acc = gl.zeros([16 * R, NB], gl.float32, MMA)
    slot = done % STAGES
    mbarrier.wait(full.index(slot), (done // STAGES) & 1)
    words, both = load(ring, slot * C + WHICH, R, U)
    begun = _begin(words, both, shift, R, U, FIRST, PRE)
    for i in range(count - 1):
        slot = done % STAGES
        acc = _stage(begun, words, both, x.index(slot), acc, shift, R, U, ROUND, A, PRE)
        done += 1
        following = done % STAGES
        mbarrier.wait(full.index(following), (done // STAGES) & 1)
        words, both = load(ring, following * C + WHICH, R, U)
        begun = _begin(words, both, shift, R, U, FIRST, PRE)
        held = warpgroup_mma_wait(0, deps=(acc, words, both) + begun)
        acc = held[0]
        words = held[1]
        both = held[2]
        begun = ()
        for j in gl.static_range(4 * PRE):
            begun = begun + (held[3 + j],)
        mbarrier.arrive(empty.index(slot), count=1)
    slot = done % STAGES
    acc = _stage(begun, words, both, x.index(slot), acc, shift, R, U, ROUND, A, PRE)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(slot), count=1)
    return acc, done + 1


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
    ROUND: gl.constexpr = FORM[12]
    FACTOR: gl.constexpr = FORM[13]
    FIRST: gl.constexpr = FORM[14]
    PRE: gl.constexpr = FORM[15]
    ring, work, stages, out, scale2, xscale, bias, sums, counts, M, N = given
    items, whole, share, parts, along_n, along_m, steps = work
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, NB, 32])
    ALONG: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    shift = (M >> 31) + 65536
    wait_for_kernels_ahead()
    done = 0
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, part, first, count = item_of(t, work)
        tm, tn = place_of(tile, work, GROUP)
        n = (tn * C + WHICH) * (16 * R)
        m = tm * NB + gl.arange(0, NB, layout=ALONG)
        tokens = gl.load(xscale + m, mask=m < M, other=0.0)
        acc, done = multiply(ring, done, count, shift, C, WHICH, R, U, NB, STAGES, ROUND, MMA, FIRST, PRE)
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
    ROUND: gl.constexpr,
    FACTOR: gl.constexpr,
    FIRST: gl.constexpr,
    PRE: gl.constexpr,
):
    """M rows of x times the weight. What is not here is as in ``gemm_gluon_code.gemm``.

    Args:
        x_map: boxes (NB, 64 U) of (M, K) e4m3.
        xscale: (M,) f32.
        ROUND: assembly: four scale bytes and the words of two kt -> four registers of bytes.
        FACTOR: what products lack beside scale2 and xscale.
    """
    TO: gl.constexpr = out.dtype if TMA else out.dtype.element_ty
    BYTES: gl.constexpr = C * R * U * 576 + NB * U * 64
    ring = allocate(codes_map, scales_map, x_map, C, R, U, NB, STAGES)
    WIDE: gl.constexpr = TO.primitive_bitwidth
    stages = gl.allocate_shared_memory(TO, [C, HEIGHT, 16 * R], gl.NVMMASharedLayout(128, WIDE, 2))
    work = (items, whole, share, parts, along_n, along_m, steps)
    given = (ring, work, stages, out, scale2, xscale, bias, sums, counts, M, N)
    FORM: gl.constexpr = (C, R, U, NB, STAGES, GROUP, SPLIT, HEIGHT, TO, TMA, PER_ROW, BIAS, ROUND, FACTOR, FIRST, PRE)
    maps = (codes_map, scales_map, x_map)
    if C == 2:
        gl.warp_specialize(
            [(consume, (given, 0, FORM)), (consume, (given, 1, FORM)), (produce, (maps, ring, work, BYTES, FORM))],
            [4, 1],
            [REGISTERS, 32],
        )
    else:
        gl.static_assert(C == 4)
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
