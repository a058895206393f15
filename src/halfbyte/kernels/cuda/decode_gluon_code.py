"""Device code of ``halfbyte.kernels.cuda.decode_gluon``, in Gluon.

A warp reads a unit of 16 rows and 64 k as it lies: lane 4 g + q has the four words of rows g and g + 8 in block q of k,
the two scales, and the 16 activations of that block. So a step of m16n8k16 takes from each lane the same half h of
words 2 s and 2 s + 1, decoded, and two neighbouring registers of x: k runs in the order u, h, s, then over lanes.

x as ``halfbyte.kernels.in_order`` has it is what lanes read one after the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.constexpr_function
def _bits(first, last):
    return [first << i for i in range(((last // first) - 1).bit_length())]


@gluon.constexpr_function
def _codes_layout(W, R):
    register = [[0, 0, 1], [0, 0, 2]] + [[0, r, 0] for r in _bits(1, R)]
    return gl.DistributedLinearLayout(
        register, [[0, 0, i] for i in _bits(4, 128)], [[w, 0, 0] for w in _bits(1, W)], [], [W, R, 128]
    )


@gluon.constexpr_function
def _scales_layout(W, R):
    return gl.DistributedLinearLayout(
        [[0, r, 0] for r in _bits(1, R)],
        [[0, 0, i] for i in _bits(1, 32)],
        [[w, 0, 0] for w in _bits(1, W)],
        [],
        [W, R, 32],
    )


@gluon.constexpr_function
def _x_layout(W, NB):
    register = [[0, 0, 1], [0, 0, 2]] + [[0, m, 0] for m in _bits(8, NB)]
    lane = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(register, lane, [[w, 0, 0] for w in _bits(1, W)], [], [W, NB, 16])


@gluon.jit
def _pair(word, HALF: gl.constexpr):
    low = (word & 0xFFFF).to(gl.uint16).to(HALF, bitcast=True)
    high = (word.to(gl.uint32, bitcast=True) >> 16).to(gl.uint16).to(HALF, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _weights(
    codes, scales, W: gl.constexpr, R: gl.constexpr, A: gl.constexpr, HALF: gl.constexpr, DECODE: gl.constexpr,
    SCALE: gl.constexpr,
):  # fmt: skip
    """(W, R, 128) words and (W, R, 32) pairs of scale bytes -> (W, 16 R, 64) products of both, as the operand A."""
    words = codes.reshape(W, R, 8, 4, 4).permute(0, 1, 3, 2, 4)  # g kt c -> kt g c
    L: gl.constexpr = words.type.layout
    both = gl.inline_asm_elementwise(SCALE, "=r,h", [scales], dtype=gl.int32, is_pure=True, pack=1)
    both = both.reshape(W, R, 8, 4).permute(0, 1, 3, 2)
    both = gl.convert_layout(both, gl.SliceLayout(4, L), assert_trivial=True).expand_dims(4)
    o0, o1, o2, o3 = gl.inline_asm_elementwise(
        DECODE,
        "=r,=r,=r,=r,r,r",
        [words, both],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    w = gl.join(gl.join(_pair(o0, HALF), _pair(o1, HALF)), gl.join(_pair(o2, HALF), _pair(o3, HALF)))
    w = w.reshape(W, R, 4, 8, 2, 2, 2, 2, 2)  # w r kt g s i p rh h
    w = w.permute(0, 1, 7, 3, 8, 4, 5, 2, 6)  # w | r rh g | h s i kt p
    return gl.convert_layout(w.reshape(W, R * 16, 64), A, assert_trivial=True)


@gluon.jit
def ordered_at(m, k):
    """Where element (m, k) lies in activations as ``halfbyte.kernels.in_order`` has them."""
    unit = k // 64 * 1024 + m // 8 * 512 + k % 16 // 8 * 256
    return unit + (m % 8 * 32 + k % 64 // 16 * 8 + k % 8)


@gluon.jit
def _activations(
    at, odd, there, W: gl.constexpr, NB: gl.constexpr, B: gl.constexpr, HALF: gl.constexpr, ORDERED: gl.constexpr
):  # fmt: skip
    """(W, NB, 16) addresses, of four words of each half block -> (W, 64, NB), as the operand B, k as of ``_weights``.

    Rows lie multiples of 128 bytes apart, mostly, so in the same banks; where ``odd``, the second half is read first.
    Of what is ORDERED it lies 128 words behind the first.
    """
    SWAPS: gl.constexpr = NB > 8 and not ORDERED
    if ORDERED:
        then = at + 128
    else:
        then = at + (4 - odd * 8) if NB > 8 else at + 4
    if there is None:
        one = gl.load(at)
        two = gl.load(then)
    else:
        one = gl.load(at, mask=there, other=0)
        two = gl.load(then, mask=there, other=0)
    low = _pair(gl.where(odd != 0, two, one) if SWAPS else one, HALF)
    high = _pair(gl.where(odd != 0, one, two) if SWAPS else two, HALF)
    x = (
        gl.join(low, high).reshape(W, NB, 4, 2, 2, 2, 2).permute(0, 6, 3, 4, 2, 5, 1)
    )  # w m kt s i p h -> w | h s i kt p | m
    return gl.convert_layout(x.reshape(W, 64, NB), B, assert_trivial=True)


@gluon.jit
def _x(
    at, unit, xk, odd, j: gl.constexpr, FIRST: gl.constexpr, K: gl.constexpr, S: gl.constexpr, W: gl.constexpr,
    NB: gl.constexpr, B: gl.constexpr, HALF: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Those of step ``j`` behind FIRST, and of the next S - 1; 0 beyond K."""
    STEP: gl.constexpr = FIRST + j
    there = None if (STEP + S) * W * 64 <= K else (STEP * W + unit) * 64 + xk // 4 * 16 < K
    return _activations(at + j * W * (512 if ORDERED else 32), odd, there, W, NB, B, HALF, ORDERED)


@gluon.jit
def _ask(at):
    """The line of an address comes to L2."""
    CODE: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(CODE, "=r,l", [at.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _prefetch_code(nbytes):
    ask = f"@first cp.async.bulk.prefetch.L2.global [$1], {nbytes};"
    return "{ .reg .pred first; mov.u32 $0, %tid.x; setp.eq.u32 first, $0, 0; " + ask + " }"


@gluon.jit
def _prefetch(at, BYTES: gl.constexpr):
    """One thread asks for so many bytes, a multiple of 16 as the address is, to come to L2."""
    CODE: gl.constexpr = _prefetch_code(BYTES)
    gl.inline_asm_elementwise(CODE, "=r,l", [at.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _passed_code(j, S):
    """From two neighbouring columns of a lane, that of unit j and another, to those of which one is for unit j + 1."""
    if j % 2 == 0:
        return "mov.b32 $0, $2; mov.b32 $1, $2;"
    if S == 2:
        return "mov.b32 $0, $3; mov.b32 $1, $3;"
    back = f"down.b32 $0, $3, {S // 2 - 1}, 0x1f" if j % S == S - 1 else "up.b32 $0, $3, 1, 0"
    return f"shfl.sync.{back}, 0xffffffff; mov.b32 $1, $0;"


@gluon.jit
def _passed(acc, J: gl.constexpr, S: gl.constexpr):
    """Sums of S neighbouring columns, of which that of unit J mod S counts, at the place of the next unit."""
    CODE: gl.constexpr = _passed_code(J, S)
    return gl.inline_asm_elementwise(CODE, "=f,=f,f,f", [acc], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def _stripe(r, T: gl.constexpr, STRIPES):
    """Where tile r of a program is, in stripes from its first."""
    return r % T + r // T * STRIPES


@gluon.jit
def _activated(g, GATE: gl.constexpr):
    """As ``step_code`` has it."""
    if GATE == "silu":
        return g / (1 + gl.exp(-g))
    if GATE == "gelu":
        return 0.5 * g * (1 + gl.erf(g * 0.7071067811865476))
    if GATE == "gelu_tanh":
        return g / (1 + gl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
    g = gl.where(g < 0, 0.0, g)
    return g * g


@gluon.jit
def decode(
    codes_ptr,
    scales_ptr,
    scale2_ptr,
    x_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K: gl.constexpr,
    R: gl.constexpr,
    D: gl.constexpr,
    L: gl.constexpr,
    P: gl.constexpr,
    NB: gl.constexpr,
    S: gl.constexpr,
    PER_ROW: gl.constexpr,
    BIAS: gl.constexpr,
    DECODE: gl.constexpr,
    SCALE: gl.constexpr,
    FACTOR: gl.constexpr,
    KEEP: gl.constexpr,
    GATE: gl.constexpr,
    ORDERED: gl.constexpr,
):
    """Up to NB rows of x times R tiles of 16 rows of the weight.

    With a GATE half of the tiles are of the first half of the rows, gates, and the others lie N / 2 rows behind each.

    Args:
        codes_ptr: i32, the words of the units.
        scales_ptr: i16, their pairs of scale bytes.
        scale2_ptr: f32, 1 or N.
        x_ptr: (M, K) bf16 or f16.
        bias_ptr: (N,), if BIAS.
        out_ptr: (M, N); (M, N / 2) with a GATE.
        M: 1 to NB / S.
        N: at least 16 R - 15.
        K: a multiple of 16.
        R: tiles of a program.
        D: units of each warp and tile on their way ahead of the one that is multiplied.
        L: runs of D units that are a loop; what is left is unrolled.
        P: units of each tile, behind the D of all warps, that are asked for into L2; there are so many.
        NB: columns of a product, 8 or 16.
        S: units of a warp whose x fill its columns, NB / S of each; 1 if L.
        PER_ROW: scale2 has N values.
        BIAS: a bias is added.
        DECODE: assembly: a word and a pair of scales -> four pairs of products.
        SCALE: assembly: two scale bytes -> a pair of scales.
        FACTOR: what products lack beside scale2.
        KEEP: eviction policy of codes and scales.
        GATE: an activation: activation(gate) * up is written, of both rounded; N is a multiple of 32. Or None.
        ORDERED: x lies in order, and with a GATE out, too; S is 1. Of what is not a loop, x of a unit is on its way
            while the one before is multiplied, and the assembler does not put off the loads of D units.
    """
    W: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = x_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    CODES: gl.constexpr = _codes_layout(W, R)
    SCALES: gl.constexpr = _scales_layout(W, R)
    X: gl.constexpr = _x_layout(W, NB)
    UNITS: gl.constexpr = (K + 63) // 64
    EACH: gl.constexpr = 512 if ORDERED else 32
    STEPS: gl.constexpr = (UNITS + W - 1) // W
    REST: gl.constexpr = STEPS - L * D

    T: gl.constexpr = R if GATE is None else R // 2
    first = gl.program_id(0) * (16 * T)
    STRIPES = (N + 15) // 16 if GATE is None else N // 32
    tile = gl.minimum(gl.program_id(0) * T, STRIPES - T)
    cw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None, None]
    cr = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :, None]
    ci = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    codes_at = codes_ptr + tile.to(gl.int64) * (UNITS * 128) + (_stripe(cr, T, STRIPES) * (UNITS * 128) + cw * 128 + ci)
    sw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, SCALES)))[:, None, None]
    sr = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, SCALES)))[None, :, None]
    si = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, SCALES)))[None, None, :]
    scales_at = scales_ptr + tile.to(gl.int64) * (UNITS * 32) + (_stripe(sr, T, STRIPES) * (UNITS * 32) + sw * 32 + si)
    xw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    xm = gl.arange(0, NB, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    xk = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    odd = xm % 2
    unit = xm % S * W + xw
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    if ORDERED:
        x_at = x_at + (xw * EACH + xm // 8 * 256 + xm % 8 * 16 + xk)
    else:
        x_at = x_at + gl.minimum(xm // S, M - 1) * (K // 2)
        x_at = x_at + (unit * EACH + xk // 4 * 8 + xk % 4)
        if NB > 8:
            x_at += odd * 4

    codes = ()
    scales = ()
    for j in gl.static_range(D):
        if (j + 1) * W <= UNITS:
            codes = codes + (gl.load(codes_at + j * W * 128, eviction_policy=KEEP),)
            scales = scales + (gl.load(scales_at + j * W * 32, eviction_policy=KEEP),)
        else:
            codes = codes + (gl.load(codes_at + j * W * 128, mask=j * W + cw < UNITS, other=0, eviction_policy=KEEP),)
            scales = scales + (gl.load(scales_at + j * W * 32, mask=j * W + sw < UNITS, other=0, eviction_policy=KEEP),)
    if S > 1 and PER_ROW:
        for r in gl.static_range(R):
            _ask(scale2_ptr + (tile + r % T + r // T * STRIPES) * 16)
    if P:
        for r in gl.static_range(R):
            ahead = (tile + r % T + r // T * STRIPES).to(gl.int64) * UNITS + D * W
            _prefetch(codes_ptr + ahead * 128, P * 512)
            _prefetch(scales_ptr + ahead * 32, P * 64)
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    acc = gl.zeros([W, R * 16, NB], gl.float32, MMA)
    for _ in range(L):
        next_codes = ()
        next_scales = ()
        for j in gl.static_range(D):
            next_codes = next_codes + (gl.load(codes_at + (j + D) * W * 128, eviction_policy=KEEP),)
            next_scales = next_scales + (gl.load(scales_at + (j + D) * W * 32, eviction_policy=KEEP),)
            x = _activations(x_at + j * W * EACH, odd, None, W, NB, B, HALF, ORDERED)
            acc = mma_v2(_weights(codes[j], scales[j], W, R, A, HALF, DECODE, SCALE), x, acc)
        codes = next_codes
        scales = next_scales
        codes_at += D * W * 128
        scales_at += D * W * 32
        x_at += D * W * EACH
    if S > 1 and PER_ROW:  # which takes the registers of loads where there are more
        row = gl.arange(0, R * 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
        n = (tile + _stripe(row // 16, T, STRIPES)) * 16 + row % 16
        scale2 = gl.load(scale2_ptr + n, mask=n < N, other=0.0)
    if ORDERED:
        next_x = _x(x_at, unit, xk, odd, 0, L * D, K, S, W, NB, B, HALF, ORDERED)
    for j in gl.static_range(REST):
        if j + D < REST:
            if (L * D + j + D + 1) * W <= UNITS:
                codes = codes + (gl.load(codes_at + (j + D) * W * 128, eviction_policy=KEEP),)
                scales = scales + (gl.load(scales_at + (j + D) * W * 32, eviction_policy=KEEP),)
            else:
                left: gl.constexpr = UNITS - (L * D + j + D) * W
                codes = codes + (gl.load(codes_at + (j + D) * W * 128, mask=cw < left, other=0, eviction_policy=KEEP),)
                scales = scales + (
                    gl.load(scales_at + (j + D) * W * 32, mask=sw < left, other=0, eviction_policy=KEEP),
                )
        if ORDERED:
            x = next_x
            if j + 1 < REST:
                next_x = _x(x_at, unit, xk, odd, j + 1, L * D, K, S, W, NB, B, HALF, ORDERED)
            # no load moves past it; it becomes a NOP
            gl.inline_asm_elementwise(
                "bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )
        elif (L * D + j) % S == 0:
            x = _x(x_at, unit, xk, odd, j, L * D, K, S, W, NB, B, HALF, ORDERED)
        w = _weights(codes[j], scales[j], W, R, A, HALF, DECODE, SCALE)
        acc = mma_v2(w, x, acc)
        if S > 1 and j + 1 < STEPS:
            acc = _passed(acc, j, S)

    if S > 1:
        column = gl.arange(0, NB, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
        acc = gl.where(column % S == (STEPS - 1) % S, acc, 0.0)
    total = gl.sum(gl.sum(acc.reshape(W, R * 16, NB // S, S), axis=3), axis=0)
    OF: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    row = gl.arange(0, R * 16, layout=OF)
    n = (tile + _stripe(row // 16, T, STRIPES)) * 16 + row % 16
    if PER_ROW:
        if S > 1:
            scale2 = gl.convert_layout(scale2, OF)
        else:
            scale2 = gl.load(scale2_ptr + n, mask=n < N, other=0.0)
        total = total * (scale2 * FACTOR)[:, None]
    else:
        total = total * (gl.load(scale2_ptr) * FACTOR)
    if BIAS:
        total = total + gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    if GATE is not None:
        both = total.to(out_ptr.dtype.element_ty).to(gl.float32).reshape(2, T * 16, NB // S).permute(1, 2, 0)
        gate, up = gl.split(both)
        total = _activated(gate, GATE) * up
        N = N // 2
    OUT: gl.constexpr = total.type.layout
    n = tile * 16 + gl.arange(0, T * 16, layout=gl.SliceLayout(1, OUT))
    m = gl.arange(0, NB // S, layout=gl.SliceLayout(0, OUT))
    if ORDERED and GATE is not None:
        to = ordered_at(m[None, :], n[:, None])
    else:
        to = m.to(gl.int64)[None, :] * N + n[:, None]
    gl.store(
        out_ptr + to,
        total.to(out_ptr.dtype.element_ty),
        mask=(m < M)[None, :] & ((n >= first) & (n < N))[:, None],
    )
