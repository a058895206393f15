"""Device code of ``halfbyte.kernels.cuda.experts_decode`` for one token, no slot of which is skipped, in Gluon.

A program asks for all its weights before it waits for what lies ahead, and has them in shared memory, which costs no
registers: so those of both products find room side by side, and one loads while the other multiplies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from halfbyte.kernels.cuda.decode_gluon_code import (
    _activated,
    _bits,
    _codes_layout,
    _scales_layout,
    _weights,
    _x_layout,
)
from halfbyte.kernels.cuda.experts_decode_code import (
    _gated,
    _launch_dependents,
    _operand,
    _place,
    _wait,
    _words,
)


@gluon.constexpr_function
def _pairs_layout(W, R):
    """Of copies of scales, (W, R, 16) words of two blocks' pairs each; R is 1 or 2."""
    lanes = [[0, 0, i] for i in _bits(1, 16)] + [[0, R - 1, 0]]
    return gl.DistributedLinearLayout([], lanes, [[w, 0, 0] for w in _bits(1, W)], [], [W, R, 16])


@gluon.constexpr_function
def _sums_layout(A, B, W):
    """Of (A, B, rows): a lane has all of a row."""
    return gl.BlockedLayout([A, B, 1], [1, 1, 32], [1, 1, W], [2, 1, 0])


@gluon.jit
def _copy(codes_to, scales_to, codes_at, scales_at, cw, sw, LEFT: gl.constexpr, W: gl.constexpr):
    """A unit of each warp and its scales come to shared memory, where LEFT units are left; others are 0."""
    if LEFT >= W:
        async_copy.async_copy_global_to_shared(codes_to, codes_at)
        async_copy.async_copy_global_to_shared(scales_to, scales_at)
    else:
        async_copy.async_copy_global_to_shared(codes_to, codes_at, mask=cw < LEFT)
        async_copy.async_copy_global_to_shared(scales_to, scales_at, mask=sw < LEFT)


@gluon.jit
def _of_column(acc, j: gl.constexpr):
    """(W, rows, 8) -> (W, rows, 4), whose sum is column j."""
    even, odd = gl.split(acc.reshape(acc.shape[0], acc.shape[1], 4, 2))
    picked = even if j % 2 == 0 else odd
    q = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, picked.type.layout)))[None, None, :]
    return gl.where(q == j // 2, picked, 0.0)


@gluon.jit
def _product(
    codes_at, scales_at, cw, sw, x_at, x_k, W: gl.constexpr, R: gl.constexpr, KW: gl.constexpr, K: gl.constexpr,
    C: gl.constexpr, EARLY: gl.constexpr, HALF: gl.constexpr, DECODE: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """R tiles times a vector -> (W, 16 R), the sums of each warp; KW warps share k, and C steps are waited for at once.

    ``x_at`` has in column m what step m of each warp multiplies: so a lane reads each of its words once. What the other
    columns come to is left out.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    UNITS: gl.constexpr = (K + 63) // 64
    STEPS: gl.constexpr = (UNITS + KW - 1) // KW
    RUNS: gl.constexpr = (STEPS + C - 1) // C
    codes_held = ()
    scales_held = ()
    words = ()
    if not EARLY:
        for j in gl.static_range((STEPS + 7) // 8):
            words = words + (_words(x_at + j * KW * 256, None, x_k + j * KW * 512 < K, 8),)
    for j in gl.static_range(STEPS):
        codes_held = codes_held + (gl.allocate_shared_memory(gl.int32, [W, R, 128], PLAIN),)
        scales_held = scales_held + (gl.allocate_shared_memory(gl.int32, [W, R, 16], PLAIN),)
        codes, scales = codes_at + j * (KW * 128), scales_at + j * (KW * 16)
        _copy(codes_held[j], scales_held[j], codes, scales, cw, sw, UNITS - j * KW, KW)
        if (j + 1) % C == 0 or j + 1 == STEPS:
            async_copy.commit_group()
    if EARLY:
        _wait()
        for j in gl.static_range((STEPS + 7) // 8):
            words = words + (_words(x_at + j * KW * 256, None, x_k + j * KW * 512 < K, 8),)
    none = gl.zeros([W, R * 16, 8], gl.float32, MMA)
    total = _of_column(none, 0)
    for j in gl.static_range(STEPS):
        if j % C == 0:
            async_copy.wait_group(RUNS - 1 - j // C)
        codes = codes_held[j].load(_codes_layout(W, R))
        scales = scales_held[j]._reinterpret(gl.int16, [W, R, 32], PLAIN).load(_scales_layout(W, R))
        w = _weights(codes, scales, W, R, A, HALF, DECODE, SCALE)
        total += _of_column(mma_v2(w, _operand(words[j // 8], W, 8, B, HALF), none), j % 8)
    return gl.sum(total, axis=2)


@gluon.jit
def _apart(values, S: gl.constexpr):
    """(rows, S) -> S of (rows,), in order; S is a power of two."""
    ROWS: gl.constexpr = values.shape[0]
    found = (values,)
    for i in gl.static_range(S.bit_length() - 1):
        halves = ()
        for p in gl.static_range(1 << i):
            halves = halves + gl.split(found[p].reshape(ROWS, 2, S >> (i + 1)).permute(0, 2, 1))
        found = halves
    rows = ()
    for p in gl.static_range(S):
        rows = rows + (found[p].reshape(ROWS),)
    return rows


@gluon.jit
def first(
    codes_ptr,
    scales_ptr,
    scale2_ptr,
    x_ptr,
    bias_ptr,
    out_ptr,
    indices_ptr,
    places_ptr,
    N: gl.constexpr,
    K: gl.constexpr,
    C: gl.constexpr,
    PER_ROW: gl.constexpr,
    BIAS: gl.constexpr,
    DECODE: gl.constexpr,
    SCALE: gl.constexpr,
    FACTOR: gl.constexpr,
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
    """16 results of a slot, as of ``one_first`` of ``experts_decode_code``. Grid: of each slot N / 16, or N / 32."""
    W: gl.constexpr = gl.num_warps()
    R: gl.constexpr = 2 if GATED else 1
    CODES: gl.constexpr = _codes_layout(W, R)
    PAIRS: gl.constexpr = _pairs_layout(W, R)
    X: gl.constexpr = _x_layout(W, 8)
    SUMS: gl.constexpr = _sums_layout(W, R, W)
    UNITS: gl.constexpr = (K + 63) // 64
    PROGRAMS: gl.constexpr = N // 16 // R

    if not EARLY:
        _wait()
    _launch_dependents()
    slot = gl.program_id(0) // PROGRAMS
    tile = gl.program_id(0) % PROGRAMS
    place = gl.maximum(_place(indices_ptr + slot, places_ptr, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN), 0)
    from_here = (place * (N // 16) + tile).to(gl.int64)
    cw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None, None]
    cr = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))[None, :, None]
    ci = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    codes_at = codes_ptr + from_here * (UNITS * 128) + (cr * (PROGRAMS * UNITS * 128) + cw * 128 + ci)
    sw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))[:, None, None]
    sr = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))[None, :, None]
    si = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))[None, None, :]
    scales_at = scales_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    scales_at += from_here * (UNITS * 16) + (sr * (PROGRAMS * UNITS * 16) + sw * 16 + si)
    xw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    xm = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    xk = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    x_k = (xm * W + xw) * 64 + xk // 4 * 16
    x_at = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + ((xm * W + xw) * 32 + xk // 4 * 8 + xk % 4)
    half = gl.arange(0, R, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))[:, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
    n = place * N + (tile + half * PROGRAMS) * 16 + row
    scale2 = gl.load(scale2_ptr + (n if PER_ROW else place))
    if BIAS:
        bias = gl.load(bias_ptr + n).to(gl.float32)

    total = _product(
        codes_at, scales_at, cw, sw, x_at, x_k, W, R, W, K, C, EARLY, x_ptr.dtype.element_ty, DECODE, SCALE
    )  # fmt: skip
    total = gl.sum(gl.convert_layout(total.reshape(W, R, 16), SUMS), axis=0) * (scale2 * FACTOR)
    if BIAS:
        total = total + bias
    if GATED:
        one, two = gl.split(total.permute(1, 0))
        total = _gated(two, one, ACTIVATION, LIMIT) if UP_FIRST else _gated(one, two, ACTIVATION, LIMIT)
    else:
        total = _activated(total.reshape(16), ACTIVATION)
    n = slot * (PROGRAMS * 16) + tile * 16 + gl.arange(0, 16, layout=total.type.layout)
    gl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty))


@gluon.jit
def second(
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
    K: gl.constexpr,
    TOP: gl.constexpr,
    C: gl.constexpr,
    PER_ROW: gl.constexpr,
    BIAS: gl.constexpr,
    DECODE: gl.constexpr,
    SCALE: gl.constexpr,
    FACTOR: gl.constexpr,
    EXPERTS: gl.constexpr,
    FIRST: gl.constexpr,
    LOCAL: gl.constexpr,
    NULL: gl.constexpr,
    UNKNOWN: gl.constexpr,
):
    """16 results, as of ``one_second`` of ``experts_decode_code``. Grid: N / 16.

    Each slot has as many of the warps. TOP is a power of two, up to as many as there are. A slot that is refused is
    multiplied with another expert.
    """
    W: gl.constexpr = gl.num_warps()
    CODES: gl.constexpr = _codes_layout(W, 1)
    PAIRS: gl.constexpr = _pairs_layout(W, 1)
    X: gl.constexpr = _x_layout(W, 8)
    KW: gl.constexpr = W // TOP
    SUMS: gl.constexpr = _sums_layout(TOP, KW, W)
    UNITS: gl.constexpr = (K + 63) // 64

    _launch_dependents()
    tile = gl.program_id(0)
    cw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))[:, None, None]
    ci = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, CODES)))[None, None, :]
    place = gl.maximum(_place(indices_ptr + cw // KW, places_ptr, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN), 0)
    codes_at = codes_ptr + (place * (N // 16) + tile).to(gl.int64) * (UNITS * 128) + (cw % KW * 128 + ci)
    sw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))[:, None, None]
    si = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))[None, None, :]
    place = gl.maximum(_place(indices_ptr + sw // KW, places_ptr, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN), 0)
    scales_at = scales_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    scales_at += (place * (N // 16) + tile).to(gl.int64) * (UNITS * 16) + (sw % KW * 16 + si)
    xw = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    xm = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    xk = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    h_unit = xm * KW + xw % KW
    h_k = h_unit * 64 + xk // 4 * 16
    h_at = h_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + xw // KW * (K // 2)
    h_at += h_unit * 32 + xk // 4 * 8 + xk % 4
    slot = gl.arange(0, TOP, layout=gl.SliceLayout(1, gl.SliceLayout(1, SUMS)))[:, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, :]
    place = _place(indices_ptr + slot, places_ptr, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN)
    refused = gl.max(gl.max(gl.where(place < -1, slot, -1), axis=1), axis=0)
    place = gl.maximum(place, 0)
    n = place * N + tile * 16 + row
    factors = gl.load(scale2_ptr + (n if PER_ROW else place)) * FACTOR
    if BIAS:
        added = gl.load(bias_ptr + n).to(gl.float32)
    shares = gl.load(weights_ptr + slot).to(gl.float32)

    total = _product(
        codes_at, scales_at, cw % KW, sw % KW, h_at, h_k, W, 1, KW, K, C, True, h_ptr.dtype.element_ty, DECODE, SCALE
    )  # fmt: skip
    total = gl.sum(gl.convert_layout(total.reshape(TOP, KW, 16), SUMS), axis=1) * factors
    if BIAS:
        total = total + added
    parts = _apart((total * shares).permute(1, 0), TOP)
    sums = parts[0]
    for i in gl.static_range(1, TOP):
        sums = sums + parts[i]
    if refused >= 0:
        sums = gl.full([16], float("nan"), gl.float32, sums.type.layout)
        if tile == 0:
            number = gl.load(indices_ptr + refused).to(gl.int64)
            null = gl.where((number >= 0) & (number < EXPERTS), 1, 0).to(gl.int64)
            number = gl.minimum(gl.maximum(number, -2147483648), 2147483647)
            gl.store(refused_ptr, (number << 32) | (null << 31) | (refused + 1).to(gl.int64))
    n = tile * 16 + gl.arange(0, 16, layout=sums.type.layout)
    gl.store(out_ptr + n, sums.to(out_ptr.dtype.element_ty))
