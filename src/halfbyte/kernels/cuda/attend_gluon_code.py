"""Device code of ``halfbyte.kernels.cuda.attend_gluon``, in Gluon.

A warp takes 16 entries at a time. Lane 4 g + c reads keys and values as they lie, 8 places at once: of keys those from
32 i + 8 c on, in entries g and g + 8, and of values those from 64 i + 8 g on, in entries 2 c, 2 c + 1, 2 c + 8 and
2 c + 9. So with places renumbered they are operands of q @ keys.T and of the transpose of weights @ values, and what
the first gives is an operand of the second: nothing moves between lanes but maxima and sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from halfbyte.kernels.cuda.decode_gluon_code import ordered_at


@gluon.constexpr_function
def _bits(first, last):
    return [first << i for i in range(((last // first) - 1).bit_length())]


@gluon.constexpr_function
def _queries_layout(W, R, D):
    """(W, R, D): 8 values of a lane are those from 8 c on."""
    register = [[0, 0, d] for d in [1, 2, 4, *_bits(32, D)]] + [[0, r, 0] for r in _bits(8, R)]
    lane = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(register, lane, [[w, 0, 0] for w in _bits(1, W)], [], [W, R, D])


@gluon.constexpr_function
def _keys_layout(W, D):
    """(W, 16, D / 2) pairs: 4 of a lane are those from 4 c on."""
    register = [[0, 0, d] for d in [1, 2, *_bits(16, D // 2)]] + [[0, 8, 0]]
    lane = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(register, lane, [[w, 0, 0] for w in _bits(1, W)], [], [W, 16, D // 2])


@gluon.constexpr_function
def _values_layout(W, D):
    """(W, 16, D / 2) pairs: 4 of a lane are those from 4 g on."""
    register = [[0, 0, d] for d in [1, 2, *_bits(32, D // 2)]] + [[0, 1, 0], [0, 8, 0]]
    lane = [[0, 2, 0], [0, 4, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]]
    return gl.DistributedLinearLayout(register, lane, [[w, 0, 0] for w in _bits(1, W)], [], [W, 16, D // 2])


@gluon.constexpr_function
def _found_layout(W, D):
    """(W, 8, D): what a product gives, in an order in which 8 values of a lane are neighbours."""
    register = [[0, 0, d] for d in [1, 2, 4, *_bits(64, D)]] + [[0, 1, 0]]
    lane = [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    return gl.DistributedLinearLayout(register, lane, [[w, 0, 0] for w in _bits(1, W)], [], [W, 8, D])


@gluon.jit
def _pairs(word, HALF: gl.constexpr):
    """(..., n) words to (..., 2 n) values."""
    low = (word & 0xFFFF).to(gl.uint16).to(HALF, bitcast=True)
    high = (word.to(gl.uint32, bitcast=True) >> 16).to(gl.uint16).to(HALF, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _places(layout: gl.constexpr, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr):
    """Warps, rows and places of a (W, R, D) tensor."""
    w = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    r = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return w, r, d


@gluon.jit
def _normed(v, factor, weight):
    TO: gl.constexpr = weight.dtype
    return ((v * factor).to(TO).to(gl.float32) * weight.to(gl.float32)).to(TO).to(gl.float32)


@gluon.jit
def _rotated(
    at, q_norm, k_norm, c, s, d, row, eps, G: gl.constexpr, D: gl.constexpr, Q_NORM: gl.constexpr, K_NORM: gl.constexpr
):  # fmt: skip
    """Rows of D values, normalized if they are, and rotated.

    Args:
        at: addresses of rows.
        q_norm: (D,), of the first G, if Q_NORM.
        k_norm: (D,), of the others, if K_NORM.
        c: cosines of d.
        s: sines.
        d: (1, 1, D).
        row: their numbers.
        eps: of the norms.
    """
    TO: gl.constexpr = at.dtype.element_ty
    x = gl.load(at + d, mask=(row <= G) & (d >= 0), other=0.0).to(gl.float32)
    if Q_NORM or K_NORM:
        factor = gl.rsqrt(gl.sum(x * x, axis=2) / D + eps).expand_dims(2)
        norm = q_norm if Q_NORM else k_norm
        if Q_NORM and K_NORM:
            norm = gl.where(row < G, q_norm.to(gl.int64, bitcast=True), k_norm.to(gl.int64, bitcast=True))
            norm = norm.to(gl.pointer_type(TO), bitcast=True)
        normed = _normed(x, factor, gl.load(norm + (row * 0 + d)))
        x = normed if Q_NORM and K_NORM else gl.where((row < G) == Q_NORM, normed, x)
    low, high = gl.split(x.reshape(x.shape[0], x.shape[1], 2, D // 2).permute(0, 1, 3, 2))
    turned = gl.join(-high, low).permute(0, 1, 3, 2).reshape(x.shape[0], x.shape[1], D)
    turned = gl.convert_layout(turned, x.type.layout, assert_trivial=True)
    return gl.fma(x, c, turned * s).to(TO)


@gluon.jit
def _scores(queries, keys, W: gl.constexpr, R: gl.constexpr, MMA: gl.constexpr):
    """(W, 16, D) and (W, D, R) to products of the first 8 rows, (W, 8, R)."""
    score = mma_v2(queries, keys, gl.zeros([W, 16, R], gl.float32, MMA))
    low, _ = gl.split(score.reshape(W, 2, 8, R).permute(0, 2, 3, 1))
    return low


@gluon.jit
def _key_operand(words, W: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr, B: gl.constexpr):
    return gl.convert_layout(_by_place(_pairs(words, HALF), W, 16, D), B, assert_trivial=True)


@gluon.jit
def _by_place(x, W: gl.constexpr, R: gl.constexpr, D: gl.constexpr):
    """(W, R, D) to (W, D, R), places renumbered as mma needs those of ``_keys_layout``."""
    x = x.reshape(W, R, D // 64, 2, 2, 2, 2, 2, 2)  # w r | 64 32 16 8 4 2 1
    return x.permute(0, 2, 3, 6, 7, 4, 5, 8, 1).reshape(W, D, R)


@gluon.jit
def _of_warps(acc, top, weight, W: gl.constexpr, D: gl.constexpr):
    """(W, 8, D) and twice (W, 8): what warps found, added up in their order; (8, D), its maxima and sums of weights."""
    EACH: gl.constexpr = gl.BlockedLayout([W, 1, 4], [1, 128 // D, D // 4], [1, W, 1], [2, 1, 0])
    FOUND: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [W, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, FOUND)
    sums = gl.allocate_shared_memory(gl.float32, [W, 8, D], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
    tops = gl.allocate_shared_memory(gl.float32, [W, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    weights = gl.allocate_shared_memory(gl.float32, [W, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums.store(acc)
    tops.store(top)
    weights.store(weight)
    top = tops.load(gl.SliceLayout(2, EACH))
    peak = gl.max(top, axis=0)
    factor = gl.exp2(top - gl.where(peak == float("-inf"), 0.0, peak).expand_dims(0))
    total = gl.sum(weights.load(gl.SliceLayout(2, EACH)) * factor, axis=0)
    found = gl.sum(sums.load(EACH) * factor.expand_dims(2), axis=0)
    return gl.convert_layout(found, FOUND), gl.convert_layout(peak, ROWS), gl.convert_layout(total, ROWS)


@gluon.jit
def attend(
    qkv,
    cos,
    sin,
    positions,
    keys,
    values,
    q_norm,
    k_norm,
    out,
    sums,
    tops,
    T,
    eps,
    scale,
    D: gl.constexpr,
    G: gl.constexpr,
    HKV: gl.constexpr,
    S: gl.constexpr,
    WINDOW: gl.constexpr,
    Q_NORM: gl.constexpr,
    K_NORM: gl.constexpr,
    EARLY: gl.constexpr,
    SETTLED: gl.constexpr,
    ORDERS: gl.constexpr,
):
    """The share of one split in the attention of G query heads to one key head of a sequence.

    Arguments are those of ``step_code.attend``; G is at most 8, D a multiple of 64. Block j of 16 entries for each warp
    is for split j mod S. If it ORDERS, ``out`` lies in order.
    """
    W: gl.constexpr = gl.num_warps()
    R: gl.constexpr = 8 if G < 8 else 16
    TO: gl.constexpr = qkv.dtype.element_ty
    N: gl.constexpr = 16 * W
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    QUERIES: gl.constexpr = _queries_layout(W, R, D)
    KEYS: gl.constexpr = _keys_layout(W, D)
    VALUES: gl.constexpr = _values_layout(W, D)
    FINAL: gl.constexpr = _found_layout(W, D)
    split = gl.program_id(0)
    head = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)

    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        if not SETTLED:
            gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    position = gl.load(positions + b)
    valid = (position >= 0) & (position < T)
    p = gl.where(valid, position, 0).to(gl.int32)
    stop = gl.where(valid, p, 0)
    start = 0
    if WINDOW:
        start = gl.maximum(p + 1 - WINDOW, 0)
    block = start // N
    block += (split + S - block % S) % S
    base = (b * HKV + head) * T * D
    keys += base
    values += base
    key_pairs = keys.to(gl.pointer_type(gl.int32), bitcast=True)
    value_pairs = values.to(gl.pointer_type(gl.int32), bitcast=True)
    kw, kr, kd = _places(KEYS, W, 16, D // 2)
    vw, vr, vd = _places(VALUES, W, 16, D // 2)
    ke = block * N + kw * 16 + kr
    ve = block * N + vw * 16 + vr
    ks = gl.load(key_pairs + (ke * (D // 2) + kd), mask=(ke < stop) & (ke >= start), other=0)
    vs = gl.load(value_pairs + (ve * (D // 2) + vd), mask=(ve < stop) & (ve >= start), other=0)
    qw, qr, qd = _places(QUERIES, W, R, D)
    c = gl.load(cos + p.to(gl.int64) * D + qd)
    s = gl.load(sin + p.to(gl.int64) * D + qd)
    if EARLY and SETTLED:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)

    # rows are the queries, then the new key
    row = qkv + b * (HKV * (G + 2) * D)
    one = qr + qw * 0
    x_at = gl.where(one < G, head * G + one, HKV * G + head) * D
    v_at = row + (HKV * (G + 1) + head) * D
    owner = (p // N) % S == split
    mine = (qw == 0) & (one == G) & owner & valid & (qd >= 0)
    aw, ah, ad = _places(FINAL, W, 8, D)
    place = ad + (aw + ah) * 0
    there = (aw == 0) & owner & (place >= 0)
    new = gl.load(v_at + place, mask=there, other=0.0)
    x = _rotated(row + x_at, q_norm, k_norm, c, s, qd, one, eps, G, D, Q_NORM, K_NORM)
    gl.store(keys + p * D + (one * 0 + qd), x, mask=mine)
    gl.store(values + p * D + place, new, mask=there & (ah == 0) & valid)
    own = gl.convert_layout(_by_place(x, W, R, D), B, assert_trivial=True)
    if R == 8:
        x = gl.join(x, gl.zeros_like(x)).permute(0, 3, 1, 2).reshape(W, 16, D)
    queries = gl.convert_layout(_by_place(x, W, 16, D).permute(0, 2, 1), A, assert_trivial=True)
    own = _scores(queries, own, W, R, MMA)
    first = (gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, own.type.layout)))[:, None, None] == 0) & owner
    column = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(1, own.type.layout)))[None, None, :]
    top = gl.max(gl.where((column == G) & first, own * scale, float("-inf")), axis=2)

    # the transpose of what is found, at first the new value
    HEADS: gl.constexpr = gl.SliceLayout(1, MMA)
    acc = gl.where(there & (not valid), float("nan"), new.to(gl.float32))
    acc = acc.reshape(W, 8, D // 64, 2, 2, 2, 2, 2, 2).permute(0, 2, 6, 7, 8, 3, 4, 5, 1).reshape(W, D, 8)
    acc = gl.convert_layout(acc, MMA, assert_trivial=True)

    score = _scores(queries, _key_operand(ks, W, D, TO, B), W, 16, MMA)
    L: gl.constexpr = score.type.layout
    FOUND: gl.constexpr = gl.SliceLayout(2, L)
    sw, sr, se = _places(L, W, 8, 16)
    top = gl.convert_layout(top, FOUND)
    weight = gl.where(top == float("-inf"), 0.0, 1.0)
    while block * N < stop:
        score = _scores(queries, _key_operand(ks, W, D, TO, B), W, 16, MMA)
        e = block * N + sw * 16 + se
        score = gl.where((e < stop) & (e >= start) & (sr >= 0), score * scale, float("-inf"))
        higher = gl.maximum(top, gl.max(score, axis=2))
        level = gl.where(higher == float("-inf"), 0.0, higher)
        each = gl.exp2(score - level.expand_dims(2))
        factor = gl.exp2(top - level)
        top = higher
        weight = weight * factor + gl.sum(each, axis=2)
        each = gl.convert_layout(each.to(TO).permute(0, 2, 1), B, assert_trivial=True)
        acc = acc * gl.convert_layout(factor, HEADS).expand_dims(1)
        vt = _pairs(vs, TO).reshape(W, 16, D // 64, 2, 2, 2, 2, 2, 2)  # w e | 64 32 16 8 4 2 1
        vt = vt.permute(0, 2, 6, 7, 8, 3, 4, 5, 1).reshape(W, D, 16)
        acc = mma_v2(gl.convert_layout(vt, A, assert_trivial=True), each, acc)
        block += S
        ke = block * N + kw * 16 + kr
        ve = block * N + vw * 16 + vr
        ks = gl.load(key_pairs + (ke * (D // 2) + kd), mask=ke < stop, other=0)
        vs = gl.load(value_pairs + (ve * (D // 2) + vd), mask=ve < stop, other=0)

    acc = acc.reshape(W, D // 64, 2, 2, 2, 2, 2, 2, 8).permute(0, 8, 1, 5, 6, 7, 2, 3, 4).reshape(W, 8, D)
    acc = gl.convert_layout(acc, FINAL, assert_trivial=True)
    found, peak, total = _of_warps(acc, top, weight, W, D)
    h = gl.arange(0, 8, layout=gl.SliceLayout(1, found.type.layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, found.type.layout))
    to = (b * HKV + head) * G
    inside = (h < G)[:, None] & (d >= 0)[None, :]
    if S == 1:
        y = found / total[:, None]
        if ORDERS:
            place = ordered_at(gl.program_id(2), (head * G + h)[:, None] * D + d[None, :])
        else:
            place = to * D + (h[:, None] * D + d[None, :])
        gl.store(out + place, y.to(TO), mask=inside)
    else:
        to = to * S + split
        gl.store(sums + to * D + (h[:, None] * (S * D) + d[None, :]), found, mask=inside)
        gl.store(tops + 2 * to + 2 * S * h, peak, mask=h < G)
        gl.store(tops + 2 * to + 2 * S * h + 1, total, mask=h < G)
