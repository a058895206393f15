"""Device code of ``halfbyte.kernels.cuda.experts_decode``, in Gluon.

Words, scales and activations are read, decoded and multiplied as ``decode_gluon_code`` has it; a column of the matrix
unit is a slot here: a token at one of its experts. Stacks hold an expert's stripes of 16 rows behind those of the one
before. Lists and ids are read past the first cache, which may hold what lay there before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from halfbyte.kernels.cuda.decode_gluon_code import (
    _activated,
    _codes_layout,
    _pair,
    _scales_layout,
    _stripe,
    _weights,
    _x_layout,
)


@gluon.jit
def _wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _request(
    codes_at, scales_at, cw, sw, u, there, scales_there, W: gl.constexpr, LEFT: gl.constexpr, KEEP: gl.constexpr
):  # fmt: skip
    """Unit u of each warp and those scales, where LEFT units are left; only where ``there``, if that is given."""
    at = codes_at + u * (W * 128)
    scales = scales_at + u * (W * 32)
    if LEFT >= W and there is None:
        found = gl.load(at, eviction_policy=KEEP), gl.load(scales, eviction_policy=KEEP)
    else:
        asked = cw < LEFT
        asked_scales = sw < LEFT
        if there is not None:
            asked = asked & there
            asked_scales = asked_scales & scales_there
        found = (
            gl.load(at, mask=asked, other=0, eviction_policy=KEEP),
            gl.load(scales, mask=asked_scales, other=0, eviction_policy=KEEP),
        )
    return found


@gluon.jit
def _words(at, odd, there, NB: gl.constexpr):
    """Addresses of four words of the first half of each block -> the words of both halves, 0 where not ``there``.

    As ``_activations`` of ``decode_gluon_code``: where ``odd``, of 16 columns, it is the second half.
    """
    after = gl.where(odd, -4, 4) if NB > 8 else 4
    if there is None:
        one = gl.load(at)
        two = gl.load(at + after)
    else:
        one = gl.load(at, mask=there, other=0)
        two = gl.load(at + after, mask=there, other=0)
    return (gl.where(odd, two, one), gl.where(odd, one, two)) if NB > 8 else (one, two)


@gluon.jit
def _only(words, there):
    """The words of some columns; the others are 0."""
    return gl.where(there, words[0], 0), gl.where(there, words[1], 0)


@gluon.jit
def _operand(words, W: gl.constexpr, NB: gl.constexpr, B: gl.constexpr, HALF: gl.constexpr):
    """Words -> (W, 64, NB), as the operand B, k as of ``_weights``."""
    x = gl.join(_pair(words[0], HALF), _pair(words[1], HALF))
    x = x.reshape(W, NB, 4, 2, 2, 2, 2).permute(0, 6, 3, 4, 2, 5, 1)  # w m kt s i p h -> w | h s i kt p | m
    return gl.convert_layout(x.reshape(W, 64, NB), B, assert_trivial=True)


@gluon.jit
def _columns(slots_ptr, b, m, NB: gl.constexpr):
    """The slot of each column of a block; where there is none, that of the first."""
    f = gl.load(slots_ptr + b * NB + m, cache_modifier=".cg")
    return gl.where(f < 0, gl.load(slots_ptr + b * NB, cache_modifier=".cg"), f)


@gluon.jit
def _gated(gate, up, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr):
    if LIMIT is not None:
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == "swigluoai":
        made = (up + 1) * (gate / (1 + gl.exp(-1.702 * gate)))
    else:
        made = _activated(gate, ACTIVATION) * up
    return made


@gluon.jit
def _block(
    codes_ptr,
    scales_ptr,
    scale2_ptr,
    x_ptr,
    bias_ptr,
    out_ptr,
    slots_ptr,
    b,
    place,
    group,
    N: gl.constexpr,
    K: gl.constexpr,
    TOP: gl.constexpr,
    R: gl.constexpr,
    D: gl.constexpr,
    L: gl.constexpr,
    X_AHEAD: gl.constexpr,
    NB: gl.constexpr,
    PER_ROW: gl.constexpr,
    BIAS: gl.constexpr,
    DECODE: gl.constexpr,
    SCALE: gl.constexpr,
    FACTOR: gl.constexpr,
    KEEP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    UP_FIRST: gl.constexpr,
    LIMIT: gl.constexpr,
    EARLY: gl.constexpr,
):
    """R tiles of an expert's rows times the slots of a block."""
    W: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = x_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    CODES: gl.constexpr = _codes_layout(W, R)
    SCALES: gl.constexpr = _scales_layout(W, R)
    X: gl.constexpr = _x_layout(W, NB)
    UNITS: gl.constexpr = (K + 63) // 64
    STEPS: gl.constexpr = (UNITS + W - 1) // W
    REST: gl.constexpr = STEPS - L * D
    T: gl.constexpr = R // 2 if GATED else R
    WIDTH: gl.constexpr = N // 2 if GATED else N

    STRIPES: gl.constexpr = (N + 15) // 16
    PART: gl.constexpr = N // 32 if GATED else STRIPES
    first = group * (16 * T)
    tile = gl.minimum(group * T, PART - T)
    from_here = (place * STRIPES + tile).to(gl.int64)
    cw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None, None]
    cr = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :, None]
    ci = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    codes_at = codes_ptr + from_here * (UNITS * 128) + (_stripe(cr, T, PART) * (UNITS * 128) + cw * 128 + ci)
    sw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, SCALES)))[:, None, None]
    sr = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, SCALES)))[None, :, None]
    si = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, SCALES)))[None, None, :]
    scales_at = scales_ptr + from_here * (UNITS * 32) + (_stripe(sr, T, PART) * (UNITS * 32) + sw * 32 + si)

    codes = ()
    scales = ()
    for j in gl.static_range(D):
        c, s = _request(codes_at, scales_at, cw, sw, j, None, None, W, UNITS - j * W, KEEP)
        codes = codes + (c,)
        scales = scales + (s,)
    xw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    xm = gl.arange(0, NB, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    xk = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    odd = (xm % 2 != 0) & (xk < 16) & (xw < W)
    x_row = (_columns(slots_ptr, b, xm, NB) // TOP).to(gl.int64) * (K // 2)
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + x_row + (xw * 32 + xk // 4 * 8 + xk % 4)
    if NB > 8:
        x_at += gl.where(odd, 4, 0)
    if EARLY:
        _wait()
    row = gl.arange(0, R * 16, layout=gl.SliceLayout(1, gl.SliceLayout(0, MMA)))
    n = (tile + _stripe(row // 16, T, PART)) * 16 + row % 16
    if PER_ROW:
        scale2 = gl.load(scale2_ptr + place * N + n, mask=n < N, other=0.0)[:, None]
    else:
        scale2 = gl.load(scale2_ptr + place)
    if BIAS:
        bias = gl.load(bias_ptr + place * N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]

    x_k = xw * 64 + xk // 4 * 16
    ones = ()
    twos = ()
    for j in gl.static_range(X_AHEAD):
        there = None if (j + 1) * W * 64 <= K else x_k + j * W * 64 < K
        one, two = _words(x_at + j * W * 32, odd, there, NB)
        ones = ones + (one,)
        twos = twos + (two,)
    acc = gl.zeros([W, R * 16, NB], gl.float32, MMA)
    for _ in range(L):
        next_codes = ()
        next_scales = ()
        run_ones = ones
        run_twos = twos
        for j in gl.static_range(D):
            c, s = _request(codes_at, scales_at, cw, sw, j + D, None, None, W, W, KEEP)
            next_codes = next_codes + (c,)
            next_scales = next_scales + (s,)
            one, two = _words(x_at + (j + X_AHEAD) * W * 32, odd, None, NB)
            run_ones = run_ones + (one,)
            run_twos = run_twos + (two,)
            x = _operand((run_ones[j], run_twos[j]), W, NB, B, HALF)
            acc = mma_v2(_weights(codes[j], scales[j], W, R, A, HALF, DECODE, SCALE), x, acc)
        ones = ()
        twos = ()
        for j in gl.static_range(X_AHEAD):
            ones = ones + (run_ones[D + j],)
            twos = twos + (run_twos[D + j],)
        codes = next_codes
        scales = next_scales
        codes_at += D * W * 128
        scales_at += D * W * 32
        x_at += D * W * 32
    for j in gl.static_range(REST):
        if j + D < REST:
            c, s = _request(codes_at, scales_at, cw, sw, j + D, None, None, W, UNITS - (L * D + j + D) * W, KEEP)
            codes = codes + (c,)
            scales = scales + (s,)
        if j + X_AHEAD < REST:
            there = None
            if (L * D + j + X_AHEAD + 1) * W * 64 > K:
                there = x_k + (L * D + j + X_AHEAD) * W * 64 < K
            one, two = _words(x_at + (j + X_AHEAD) * W * 32, odd, there, NB)
            ones = ones + (one,)
            twos = twos + (two,)
        x = _operand((ones[j], twos[j]), W, NB, B, HALF)
        acc = mma_v2(_weights(codes[j], scales[j], W, R, A, HALF, DECODE, SCALE), x, acc)

    total = gl.sum(acc, axis=0) * (scale2 * FACTOR)
    if BIAS:
        total = total + bias
    if GATED:
        one, two = gl.split(total.reshape(2, T * 16, NB).permute(1, 2, 0))
        total = _gated(two, one, ACTIVATION, LIMIT) if UP_FIRST else _gated(one, two, ACTIVATION, LIMIT)
    elif ACTIVATION is not None:
        total = _activated(total, ACTIVATION)
    OUT: gl.constexpr = total.type.layout
    n = tile * 16 + gl.arange(0, T * 16, layout=gl.SliceLayout(1, OUT))
    m = gl.arange(0, NB, layout=gl.SliceLayout(0, OUT))
    f = gl.load(slots_ptr + b * NB + m, cache_modifier=".cg")
    gl.store(
        out_ptr + (f.to(gl.int64)[None, :] * WIDTH + n[:, None]),
        total.to(out_ptr.dtype.element_ty),
        mask=(f >= 0)[None, :] & ((n >= first) & (n < WIDTH))[:, None],
    )


@gluon.jit
def listed(
    codes_ptr,
    scales_ptr,
    scale2_ptr,
    x_ptr,
    bias_ptr,
    out_ptr,
    blocks_ptr,
    slots_ptr,
    count_ptr,
    N: gl.constexpr,
    PROGRAMS: gl.constexpr,
    K: gl.constexpr,
    TOP: gl.constexpr,
    R: gl.constexpr,
    D: gl.constexpr,
    L: gl.constexpr,
    X_AHEAD: gl.constexpr,
    NB: gl.constexpr,
    PER_ROW: gl.constexpr,
    BIAS: gl.constexpr,
    DECODE: gl.constexpr,
    SCALE: gl.constexpr,
    FACTOR: gl.constexpr,
    KEEP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    UP_FIRST: gl.constexpr,
    LIMIT: gl.constexpr,
    EARLY: gl.constexpr,
):
    """One product of all experts with the slots of their lists.

    With GATED half of a program's tiles are of the first half of the rows, and the others lie N / 2 rows behind each.

    Args:
        codes_ptr: i32, the words of the units of all experts.
        scales_ptr: i16, their pairs of scale bytes.
        scale2_ptr: f32, of each expert 1 or N.
        x_ptr: (slots / TOP, K) bf16 or f16.
        bias_ptr: (experts, N), if BIAS.
        out_ptr: (slots, N); (slots, N / 2) if GATED.
        blocks_ptr: i32, the place of each block.
        slots_ptr: i32, of each block NB; -1 where there is none, and never in the first.
        count_ptr: i32, how many blocks there are.
        N: rows of an expert, at least 16 R.
        PROGRAMS: of a block.
        K: a multiple of 16.
        TOP: slots of a row of x.
        R: tiles of a program.
        D: units of each warp and tile on their way ahead of the one that is multiplied.
        L: runs of D units that are a loop; what is left is unrolled.
        X_AHEAD: steps of activations that are on their way, up to D.
        NB: 8 or 16.
        PER_ROW: scale2 has N values of each expert.
        BIAS: a bias is added.
        DECODE: assembly: a word and a pair of scales -> four pairs of products.
        SCALE: assembly: two scale bytes -> a pair of scales.
        FACTOR: what products lack beside scale2.
        KEEP: eviction policy of codes and scales.
        ACTIVATION: of the sums, or None.
        GATED: activation(gate) * up is written.
        UP_FIRST: the gate is the second half.
        LIMIT: of gate and up, or None.
        EARLY: the lists were written before the kernel ahead began, and weights may be read before it ends.
    """
    if not EARLY:
        _wait()
    _launch_dependents()
    place = gl.load(blocks_ptr + gl.program_id(0) // PROGRAMS, cache_modifier=".cg")
    items = gl.load(count_ptr, cache_modifier=".cg") * PROGRAMS
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b = item // PROGRAMS
        here = place
        after = item + gl.num_programs(0)
        place = gl.load(blocks_ptr + after // PROGRAMS, mask=after < items, other=0, cache_modifier=".cg")
        _block(
            codes_ptr, scales_ptr, scale2_ptr, x_ptr, bias_ptr, out_ptr, slots_ptr, b, here, item % PROGRAMS, N, K,
            TOP, R, D, L, X_AHEAD, NB, PER_ROW, BIAS, DECODE, SCALE, FACTOR, KEEP, ACTIVATION, GATED, UP_FIRST,
            LIMIT, EARLY,
        )  # fmt: skip
    if EARLY:
        _wait()


@gluon.jit
def _place(
    at, places_ptr, EXPERTS: gl.constexpr, FIRST: gl.constexpr, LOCAL: gl.constexpr, NULL: gl.constexpr,
    UNKNOWN: gl.constexpr,
):  # fmt: skip
    """As ``places_of`` of ``lists_code``, of a slot whose id lies at an address."""
    number = gl.load(at, cache_modifier=".cg")
    known = (number >= 0) & (number < EXPERTS)
    number = gl.where(known, number, 0).to(gl.int32)
    if FIRST < 0:
        place = gl.load(places_ptr + number)
    else:
        place = number - FIRST
    return gl.where(known, gl.where((place >= 0) & (place < LOCAL), place, NULL), UNKNOWN)


@gluon.jit
def one_first(
    codes_ptr,
    scales_ptr,
    scale2_ptr,
    x_ptr,
    bias_ptr,
    out_ptr,
    indices_ptr,
    places_ptr,
    N: gl.constexpr,
    PROGRAMS: gl.constexpr,
    K: gl.constexpr,
    TOP: gl.constexpr,
    R: gl.constexpr,
    D: gl.constexpr,
    ALL: gl.constexpr,
    PER_ROW: gl.constexpr,
    BIAS: gl.constexpr,
    DECODE: gl.constexpr,
    SCALE: gl.constexpr,
    FACTOR: gl.constexpr,
    KEEP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    UP_FIRST: gl.constexpr,
    LIMIT: gl.constexpr,
    EXPERTS: gl.constexpr,
    FIRST: gl.constexpr,
    LOCAL: gl.constexpr,
    NULL: gl.constexpr,
    UNKNOWN: gl.constexpr,
    EARLY: gl.constexpr,
):
    """As ``listed``, of one token and without lists: slots that count are taken in turn, PROGRAMS each.

    A column of the matrix unit is a step of a warp here, modulo 8: so the token is read once, by all lanes.

    Args:
        x_ptr: (K,).
        out_ptr: (TOP, N); (TOP, N / 2) if GATED.
        indices_ptr: i32 or i64, the number of each slot's expert.
        places_ptr: as of ``places_of`` of ``lists_code``, as are EXPERTS and what follows it.
        ALL: no slot is skipped.
        EARLY: the ids were written before the kernel ahead began, and weights may be read before it ends.
    """
    W: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = x_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    CODES: gl.constexpr = _codes_layout(W, R)
    SCALES: gl.constexpr = _scales_layout(W, R)
    X: gl.constexpr = _x_layout(W, 8)
    UNITS: gl.constexpr = (K + 63) // 64
    STEPS: gl.constexpr = (UNITS + W - 1) // W
    T: gl.constexpr = R // 2 if GATED else R
    WIDTH: gl.constexpr = N // 2 if GATED else N

    if EARLY:
        _launch_dependents()
    STRIPES: gl.constexpr = (N + 15) // 16
    PART: gl.constexpr = N // 32 if GATED else STRIPES
    cw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None, None]
    cr = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :, None]
    ci = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    codes_in = _stripe(cr, T, PART) * (UNITS * 128) + cw * 128 + ci
    sw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, SCALES)))[:, None, None]
    sr = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, SCALES)))[None, :, None]
    si = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, SCALES)))[None, None, :]
    scales_in = _stripe(sr, T, PART) * (UNITS * 32) + sw * 32 + si
    xw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    xm = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    xk = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    x_k = (xm * W + xw) * 64 + xk // 4 * 16
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + ((xm * W + xw) * 32 + xk // 4 * 8 + xk % 4)

    if not EARLY:
        _wait()
        _launch_dependents()
    if ALL:
        items = TOP * PROGRAMS
    else:
        known = ()
        for i in gl.static_range(TOP):
            known = known + (_place(indices_ptr + i, places_ptr, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN),)
        items = 0
        for i in gl.static_range(TOP):
            items += gl.where(known[i] >= 0, PROGRAMS, 0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group = item % PROGRAMS
        if ALL:
            slot = item // PROGRAMS
            place = _place(indices_ptr + slot, places_ptr, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN)
            place = gl.maximum(place, 0)
        else:
            slot = 0
            place = 0
            left = item // PROGRAMS
            for i in gl.static_range(TOP):
                counts = known[i] >= 0
                slot = gl.where(counts & (left == 0), i, slot)
                place = gl.where(counts & (left == 0), known[i], place)
                left -= gl.where(counts, 1, 0)
        words = ()
        if not EARLY:
            for j in gl.static_range((STEPS + 7) // 8):
                words = words + (_words(x_at + j * W * 256, None, x_k + j * W * 512 < K, 8),)
        tile = gl.minimum(group * T, PART - T)
        from_here = (place * STRIPES + tile).to(gl.int64)
        codes_at = codes_ptr + (from_here * (UNITS * 128) + codes_in)
        scales_at = scales_ptr + (from_here * (UNITS * 32) + scales_in)
        codes = ()
        scales = ()
        for j in gl.static_range(D):
            c, s = _request(codes_at, scales_at, cw, sw, j, None, None, W, UNITS - j * W, KEEP)
            codes = codes + (c,)
            scales = scales + (s,)
        row = gl.arange(0, R * 16, layout=gl.SliceLayout(1, gl.SliceLayout(0, MMA)))
        n = (tile + _stripe(row // 16, T, PART)) * 16 + row % 16
        if PER_ROW:
            scale2 = gl.load(scale2_ptr + place * N + n, mask=n < N, other=0.0)
        else:
            scale2 = gl.load(scale2_ptr + place)
        if BIAS:
            bias = gl.load(bias_ptr + place * N + n, mask=n < N, other=0.0).to(gl.float32)
        if EARLY:
            _wait()
            for j in gl.static_range((STEPS + 7) // 8):
                words = words + (_words(x_at + j * W * 256, None, x_k + j * W * 512 < K, 8),)

        acc = gl.zeros([W, R * 16, 8], gl.float32, MMA)
        for j in gl.static_range(STEPS):
            if j + D < STEPS:
                c, s = _request(codes_at, scales_at, cw, sw, j + D, None, None, W, UNITS - (j + D) * W, KEEP)
                codes = codes + (c,)
                scales = scales + (s,)
            x = _operand(_only(words[j // 8], (xm == j % 8) & (xk < 16) & (xw < W)), W, 8, B, HALF)
            acc = mma_v2(_weights(codes[j], scales[j], W, R, A, HALF, DECODE, SCALE), x, acc)
        total = gl.convert_layout(gl.sum(gl.sum(acc, axis=2), axis=0), gl.SliceLayout(1, gl.SliceLayout(0, MMA)))
        total = total * (scale2 * FACTOR)
        if BIAS:
            total = total + bias
        if GATED:
            one, two = gl.split(total.reshape(2, T * 16).permute(1, 0))
            total = _gated(two, one, ACTIVATION, LIMIT) if UP_FIRST else _gated(one, two, ACTIVATION, LIMIT)
        else:
            total = _activated(total, ACTIVATION)
        n = tile * 16 + gl.arange(0, T * 16, layout=total.type.layout)
        gl.store(
            out_ptr + (slot * WIDTH + n),
            total.to(out_ptr.dtype.element_ty),
            mask=(n >= group * (16 * T)) & (n < WIDTH),
        )
    _wait()


HELD = gl.constexpr(8)
"""Units of a warp, of a slot, whose h is in registers at once."""


@gluon.constexpr_function
def _rows_layout(W):
    """Of sums (16 R, 8): a lane has all of a row."""
    return gl.BlockedLayout([1, 8], [32, 1], [W, 1], [1, 0])


@gluon.jit
def _next(mask):
    """The lowest bit of a mask that is not 0, and the mask without it."""
    at = gl.inline_asm_elementwise(
        "{ .reg .b32 t; brev.b32 t, $1; bfind.shiftamt.u32 $0, t; }", "=r,r", [mask], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip
    return at & 31, mask & (mask - 1)


@gluon.jit
def _of_part(values, first: gl.constexpr, part, S: gl.constexpr):
    """Of S scalars each warp's own, by its part."""
    found = values[first]
    for i in gl.static_range(1, S):
        found = gl.where(part == i, values[first + i], found)
    return found


@gluon.jit
def one_second(
    codes_ptr,
    scales_ptr,
    scale2_ptr,
    h_ptr,
    bias_ptr,
    out_ptr,
    indices_ptr,
    places_ptr,
    weights_ptr,
    refused_ptr,
    N: gl.constexpr,
    PROGRAMS: gl.constexpr,
    K: gl.constexpr,
    TOP: gl.constexpr,
    R: gl.constexpr,
    D: gl.constexpr,
    G: gl.constexpr,
    S: gl.constexpr,
    ALL: gl.constexpr,
    PER_ROW: gl.constexpr,
    BIAS: gl.constexpr,
    DECODE: gl.constexpr,
    SCALE: gl.constexpr,
    FACTOR: gl.constexpr,
    KEEP: gl.constexpr,
    EXPERTS: gl.constexpr,
    FIRST: gl.constexpr,
    LOCAL: gl.constexpr,
    NULL: gl.constexpr,
    UNKNOWN: gl.constexpr,
):
    """The last product of all slots of a token, times their weights, added in their order. Grid: PROGRAMS.

    The slots that count are multiplied G at a time, S of them at once by so many parts of the warps, each in a column
    of its own: the others are 0 there.

    Args:
        h_ptr: (TOP, K) bf16 or f16.
        out_ptr: (N,).
        indices_ptr: as of ``one_first``; written before the kernel ahead began.
        places_ptr: as of ``one_first``.
        weights_ptr: the routing weight of each slot, written before the kernel ahead began, too.
        refused_ptr: i64, where it is said which slot was refused, as ``halfbyte.kernels.cuda.refused`` reads it.
        TOP: slots of a token, up to 32.
        G: up to 8, a multiple of S.
        S: a power of two, up to as many as there are warps.
        ALL: no slot is skipped, and there are G; one that is refused is multiplied with another expert.
    """
    W: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = h_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    CODES: gl.constexpr = _codes_layout(W, R)
    SCALES: gl.constexpr = _scales_layout(W, R)
    X: gl.constexpr = _x_layout(W, 8)
    ROWS: gl.constexpr = _rows_layout(W)
    KW: gl.constexpr = W // S
    UNITS: gl.constexpr = (K + 63) // 64
    STEPS: gl.constexpr = (UNITS + KW - 1) // KW
    ALL_STEPS: gl.constexpr = G // S * STEPS

    _launch_dependents()
    group = gl.program_id(0)
    STRIPES: gl.constexpr = (N + 15) // 16
    first = group * (16 * R)
    tile = gl.minimum(group * R, STRIPES - R)
    cw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None, None]
    cr = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :, None]
    ci = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    codes_in = cr * (UNITS * 128) + cw % KW * 128 + ci
    sw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, SCALES)))[:, None, None]
    sr = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, SCALES)))[None, :, None]
    si = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, SCALES)))[None, None, :]
    scales_in = sr * (UNITS * 32) + sw % KW * 32 + si
    xw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    xm = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    xk = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    h_k = xw % KW * 64 + xk // 4 * 16
    h_at = h_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (xw % KW * 32 + xk // 4 * 8 + xk % 4)
    rows = gl.arange(0, R * 16, layout=gl.SliceLayout(1, ROWS))
    n = tile * 16 + rows

    known = ()
    mask = 0
    refused = -1
    count = 0
    for i in gl.static_range(TOP):
        place = _place(indices_ptr + i, places_ptr, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN)
        known = known + (gl.maximum(place, 0),)
        count += gl.where(place >= 0, 1, 0)
        mask |= gl.where(place >= 0, 1 << i, 0)
        refused = gl.where(place < -1, i, refused)

    sums = gl.zeros([R * 16], gl.float32, gl.SliceLayout(1, ROWS))
    for start in range(0, TOP if ALL else count, G):
        slots = ()
        places = ()
        theres = ()
        factors = ()
        added = ()
        shares = ()
        for p in gl.static_range(G):
            if ALL:
                slot = p
                place = known[p]
            else:
                slot, mask = _next(mask)
                slot = gl.minimum(slot, TOP - 1)
                place = _place(indices_ptr + slot, places_ptr, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN)
                place = gl.maximum(place, 0)
            slots = slots + (slot,)
            places = places + (place,)
            theres = theres + (start + p < count,)
            at_row = place * N + n
            factors = factors + (
                gl.load(scale2_ptr + (at_row if PER_ROW else place), mask=(n < N) if PER_ROW else None),
            )
            if BIAS:
                added = added + (gl.load(bias_ptr + at_row, mask=n < N, other=0.0).to(gl.float32),)
            shares = shares + (gl.load(weights_ptr + slot).to(gl.float32),)
        column = h_at + _of_part(slots, 0, xm, G) * (K // 2)
        own = (xm % S == xw // KW) & (xm < G) & (start + xm < TOP if ALL else start + xm < count)
        codes = ()
        scales = ()
        words = ()
        acc = gl.zeros([W, R * 16, 8], gl.float32, MMA)
        for j in gl.static_range(D + ALL_STEPS):
            if j < ALL_STEPS:
                code_place = (_of_part(places, j // STEPS * S, cw // KW, S) * STRIPES + tile).to(gl.int64)
                scale_place = (_of_part(places, j // STEPS * S, sw // KW, S) * STRIPES + tile).to(gl.int64)
                c, e = _request(
                    codes_ptr + (code_place * (UNITS * 128) + codes_in),
                    scales_ptr + (scale_place * (UNITS * 32) + scales_in),
                    cw % KW, sw % KW, j % STEPS,
                    None if ALL else _of_part(theres, j // STEPS * S, cw // KW, S),
                    None if ALL else _of_part(theres, j // STEPS * S, sw // KW, S),
                    KW, UNITS - j % STEPS * KW, KEEP,
                )  # fmt: skip
                codes = codes + (c,)
                scales = scales + (e,)
            if j == D - 1:
                _wait()
                if STEPS <= HELD:
                    for i in gl.static_range(STEPS):
                        words = words + (_words(column + i * KW * 32, None, own & (h_k + i * KW * 64 < K), 8),)
            if j >= D:
                there = (xm == (j - D) // STEPS * S + xw // KW) & (xk < 16)
                if STEPS <= HELD:
                    mine = _only(words[(j - D) % STEPS], there)
                else:
                    there = there & own & (h_k + (j - D) % STEPS * KW * 64 < K)
                    mine = _words(column + (j - D) % STEPS * KW * 32, None, there, 8)
                if ALL:  # noqa: SIM114
                    x = _operand(mine, W, 8, B, HALF)
                    acc = mma_v2(_weights(codes[j - D], scales[j - D], W, R, A, HALF, DECODE, SCALE), x, acc)
                elif theres[(j - D) // STEPS * S]:
                    x = _operand(mine, W, 8, B, HALF)
                    acc = mma_v2(_weights(codes[j - D], scales[j - D], W, R, A, HALF, DECODE, SCALE), x, acc)
        total = gl.convert_layout(gl.sum(acc, axis=0), ROWS)
        even, odd = gl.split(total.reshape(R * 16, 4, 2))
        e0, e1 = gl.split(even.reshape(R * 16, 2, 2))
        o0, o1 = gl.split(odd.reshape(R * 16, 2, 2))
        parts = gl.split(e0) + gl.split(o0) + gl.split(e1) + gl.split(o1)  # 0 4, 1 5, 2 6, 3 7
        for p in gl.static_range(G):
            y = gl.convert_layout(parts[p % 4 * 2 + p // 4], gl.SliceLayout(1, ROWS)) * (factors[p] * FACTOR)
            if BIAS:
                y = y + added[p]
            y = y * shares[p]
            sums = sums + (y if ALL else gl.where(theres[p], y, 0.0))
    _wait()
    if refused >= 0:
        sums = gl.full([R * 16], float("nan"), gl.float32, gl.SliceLayout(1, ROWS))
        if group == 0:
            number = gl.load(indices_ptr + refused).to(gl.int64)
            null = gl.where((number >= 0) & (number < EXPERTS), 1, 0).to(gl.int64)
            number = gl.minimum(gl.maximum(number, -2147483648), 2147483647)
            gl.store(refused_ptr, (number << 32) | (null << 31) | (refused + 1).to(gl.int64))
    gl.store(out_ptr + n, sums.to(out_ptr.dtype.element_ty), mask=(n >= first) & (n < N))
