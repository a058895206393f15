"""Device code of ``halfbyte.kernels.cuda.step``, in Triton.

In Triton's interpreter bfloat16 comes as the integers of its bits (``BITS``), and is rounded by integer arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SILU = tl.constexpr("silu")
GELU = tl.constexpr("gelu")
GELU_TANH = tl.constexpr("gelu_tanh")


@triton.jit
def _wide(v, BITS: tl.constexpr):
    """As f32."""
    if BITS:
        return (v.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return v.to(tl.float32)


@triton.jit
def _narrow(v, TO: tl.constexpr, BITS: tl.constexpr):
    """f32 rounded to the type TO, or to the bits of bfloat16."""
    if BITS:
        bits = v.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)
    return v.to(TO)


@triton.jit
def _rounded(v, TO: tl.constexpr, BITS: tl.constexpr):
    """f32 that were rounded on the way."""
    return _wide(_narrow(v, TO, BITS), BITS)


@triton.jit
def _ask(at):
    """Ask for the lines at addresses to come to L2, which needs no order with who writes them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64, bitcast=True)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _ordered_at(m, k):
    """Where element (m, k) lies in activations as ``halfbyte.kernels.in_order`` has them."""
    unit = k // 64 * 1024 + m // 8 * 512 + k % 16 // 8 * 256
    return unit + (m % 8 * 32 + k % 64 // 16 * 8 + k % 8)


@triton.jit
def add_norm(
    x,
    residual,
    weight,
    normed,
    total,
    H,
    eps,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,
    EARLY: tl.constexpr,
    ORDERS: tl.constexpr,
):
    """A row.

    Args:
        x: (M, H).
        residual: (M, H), if RESIDUAL.
        weight: (H,).
        normed: (M, H).
        total: (M, H), if RESIDUAL.
        H: values of a row, at most BLOCK.
        eps: added to the mean of squares.
        BLOCK: a power of two.
        RESIDUAL: whether there is one.
        BITS: whether bfloat16 comes as integers.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
        ORDERS: ``normed`` lies in order.
    """
    column = tl.arange(0, BLOCK)
    inside = column < H
    if EARLY:
        gdc_launch_dependents()
        line = tl.arange(0, BLOCK // 64) * 64
        _ask(weight + tl.minimum(line, H - 1))
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * H + column
    v = _wide(tl.load(x + at, mask=inside, other=0), BITS)
    w = _wide(tl.load(weight + column, mask=inside, other=0), BITS)
    if RESIDUAL:
        v += _wide(tl.load(residual + at, mask=inside, other=0), BITS)
        v = _rounded(v, x.dtype.element_ty, BITS)
        tl.store(total + at, _narrow(v, x.dtype.element_ty, BITS), mask=inside)
    mean = tl.sum(v * v, 0) / H
    v = _rounded(v * tl.rsqrt(mean + eps), x.dtype.element_ty, BITS)
    y = _narrow(v * w, x.dtype.element_ty, BITS)
    if ORDERS:
        first = tl.arange(0, BLOCK // 8) * 8
        column = first[:, None] + tl.arange(0, 8)[None, :]
        to = _ordered_at(tl.program_id(0), first)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(normed + to, tl.reshape(y, (BLOCK // 8, 8)), mask=column < H)
    else:
        tl.store(normed + at, y, mask=inside)


@triton.jit
def gate(
    gate_up, out, WIDTH, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, BITS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """BLOCK values of a row.

    Args:
        gate_up: (M, 2 WIDTH).
        out: (M, WIDTH).
        WIDTH: I.
        BLOCK: a power of two.
        ACTIVATION: a name.
        BITS: whether bfloat16 comes as integers.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    programs = tl.cdiv(WIDTH, BLOCK)  # of a row: along one axis, as the others end at 65535
    row = (tl.program_id(0) // programs).to(tl.int64)
    column = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = gate_up + row * (2 * WIDTH) + column
    g = _wide(tl.load(at, mask=inside, other=0), BITS)
    up = _wide(tl.load(at + WIDTH, mask=inside, other=0), BITS)
    y = _activated(g, ACTIVATION) * up
    tl.store(out + row * WIDTH + column, _narrow(y, gate_up.dtype.element_ty, BITS), mask=inside)


@triton.jit
def _activated(g, ACTIVATION: tl.constexpr):
    if ACTIVATION == SILU:
        return g / (1 + tl.exp(-g))
    if ACTIVATION == GELU:
        return 0.5 * g * (1 + tl.erf(g * 0.7071067811865476))
    if ACTIVATION == GELU_TANH:  # 1 + tanh(u) is 2 / (1 + exp(-2 u))
        return g / (1 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
    g = tl.where(g < 0, 0.0, g)
    return g * g


@triton.jit
def _normed(v, factor, norm, d, D: tl.constexpr, TO: tl.constexpr, BITS: tl.constexpr):
    w = _wide(tl.load(norm + d, mask=d < D, other=0), BITS)
    return _rounded(_rounded(v * factor, TO, BITS) * w, TO, BITS)


@triton.jit
def _head(
    x, norm, c, s, d, other, eps, D: tl.constexpr, NORM: tl.constexpr, TO: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """D values from x on, normalized if NORM, and rotated: f32 that were rounded; the same in each slot.

    Args:
        x: their address.
        norm: (D,).
        c: their cosines.
        s: their sines.
        d: (slots, a power of two), places of values.
        other: of those that they are rotated with.
        eps: of the norm.
    """
    v = _wide(tl.load(x + d, mask=d < D, other=0), BITS)
    turned = _wide(tl.load(x + other, mask=d < D, other=0), BITS)
    if NORM:
        factor = tl.rsqrt(tl.sum(v * v, 1, keep_dims=True) / D + eps)
        v = _normed(v, factor, norm, d, D, TO, BITS)
        turned = _normed(turned, factor, norm, other, D, TO, BITS)
    return _rounded(v * c + tl.where(d < D // 2, -turned, turned) * s, TO, BITS)


@triton.jit
def _entries(keys, values, e, d, first, stop, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """W entries of each slot, R apart from e on; zeros where they are not in first..stop-1."""
    ks = ()
    vs = ()
    for j in tl.static_range(W):
        at = e + j * R
        there = (at < stop) & (at >= first) & (d < D)
        ks = ks + (tl.load(keys + at * D + d, mask=there, other=0),)
        vs = vs + (tl.load(values + at * D + d, mask=there, other=0),)
    return ks, vs


@triton.jit
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
    D: tl.constexpr,
    DP: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    HKV: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
    WINDOW: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    BITS: tl.constexpr,
    EARLY: tl.constexpr,
    SETTLED: tl.constexpr,
):
    """The share of one split in the attention of up to GROUP of the G query heads of a key head, in a sequence.

    Split s of S has blocks s, s + S, ... of W R entries, R slots one of each R. The split that would have entry p takes
    it from qkv, and writes it to the cache. A slot holds in registers what it found, and slots are added up at the end.

    Args:
        qkv: (B, (HKV G + 2 HKV) D).
        cos: (T, D) f32.
        sin: (T, D) f32.
        positions: (B,) i64.
        keys: (B, HKV, T, D).
        values: (B, HKV, T, D).
        q_norm: (D,), if Q_NORM.
        k_norm: (D,), if K_NORM.
        out: (B, HKV G D), if S is 1.
        sums: (B, HKV G, S, D) f32, if not.
        tops: (B, HKV G, S, 2) f32, if not: maxima of scores, and sums of weights.
        T: room of the cache.
        eps: of the norms.
        scale: of scores, times log2(e).
        D: of a head, even.
        DP: a power of two, at least D.
        G: query heads of a key head.
        GROUP: those of a program.
        HKV: key heads.
        R: slots.
        W: entries of a slot in a block.
        S: splits.
        WINDOW: entries that are seen at the most; 0 for all.
        Q_NORM: whether q is normalized.
        K_NORM: whether k is.
        BITS: whether bfloat16 comes as integers.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
        SETTLED: positions and entries are read before the kernel ahead has ended.
    """
    TO: tl.constexpr = qkv.dtype.element_ty
    PARTS: tl.constexpr = (G + GROUP - 1) // GROUP
    N: tl.constexpr = W * R
    split = tl.program_id(0)
    head = tl.program_id(1) // PARTS
    g = tl.program_id(1) % PARTS * GROUP
    b = tl.program_id(2).to(tl.int64)
    slot = tl.arange(0, R)[:, None]
    d = tl.arange(0, DP)[None, :]
    every = d + slot * 0
    other = tl.where(every < D // 2, every + D // 2, every - D // 2)

    if EARLY:
        gdc_launch_dependents()
        if not SETTLED:
            gdc_wait()
    position = tl.load(positions + b)
    valid = (position >= 0) & (position < T)
    p = tl.where(valid, position, 0).to(tl.int32)
    stop = tl.where(valid, p, 0)
    first = tl.maximum(p + 1 - WINDOW, 0) if WINDOW else 0
    block = first // N
    block += (split + S - block % S) % S
    base = (b * HKV + head) * T * D
    keys += base
    values += base
    ks, vs = _entries(keys, values, block * N + slot, d, first, stop, D, R, W)
    c = tl.load(cos + p.to(tl.int64) * D + every, mask=every < D, other=0.0)
    s = tl.load(sin + p.to(tl.int64) * D + every, mask=every < D, other=0.0)
    if EARLY and SETTLED:
        gdc_wait()

    row = qkv + b * (HKV * (G + 2) * D)
    at = row + (HKV * G + head) * D
    k = _head(at, k_norm, c, s, every, other, eps, D, K_NORM, TO, BITS)
    v = tl.load(at + HKV * D + every, mask=every < D, other=0)
    owner = (p // N) % S == split
    mine = (slot == 0) & owner
    written = mine & valid & (every < D)
    if PARTS > 1:
        written &= g == 0
    tl.store(keys + p * D + every, _narrow(k, TO, BITS), mask=written)
    tl.store(values + p * D + every, v, mask=written)
    v = tl.where(valid, _wide(v, BITS), float("nan"))
    qs = ()
    top = ()
    weight = ()
    acc = ()
    for i in tl.static_range(GROUP):
        at = row + (head * G + tl.minimum(g + i, G - 1)) * D
        q = _head(at, q_norm, c, s, every, other, eps, D, Q_NORM, TO, BITS) * scale
        qs = qs + (q,)
        top = top + (tl.where(mine, tl.sum(q * k, 1, keep_dims=True), float("-inf")),)
        weight = weight + (tl.where(mine, 1.0, 0.0),)
        acc = acc + (tl.where(mine, v, 0.0),)

    while block * N < stop:
        ks_next, vs_next = _entries(keys, values, (block + S) * N + slot, d, first, stop, D, R, W)
        tops_next = ()
        weights_next = ()
        accs_next = ()
        for i in tl.static_range(GROUP):
            higher = top[i]
            scores = ()
            for j in tl.static_range(W):
                e = block * N + j * R + slot
                score = tl.sum(_wide(ks[j], BITS) * qs[i], 1, keep_dims=True)
                score = tl.where((e < stop) & (e >= first), score, float("-inf"))
                higher = tl.maximum(higher, score)
                scores = scores + (score,)
            level = tl.where(higher == float("-inf"), 0.0, higher)
            factor = tl.exp2(top[i] - level)
            total = weight[i] * factor
            found = acc[i] * factor
            for j in tl.static_range(W):
                each = tl.exp2(scores[j] - level)
                total += each
                found += each * _wide(vs[j], BITS)
            tops_next = tops_next + (higher,)
            weights_next = weights_next + (total,)
            accs_next = accs_next + (found,)
        top = tops_next
        weight = weights_next
        acc = accs_next
        ks = ks_next
        vs = vs_next
        block += S

    column = tl.arange(0, DP)
    for i in tl.static_range(GROUP):
        here = g + i < G
        to = b * (HKV * G) + head * G + g + i
        peak = tl.max(tl.max(top[i], 1), 0)
        factor = tl.exp2(top[i] - tl.where(peak == float("-inf"), 0.0, peak))
        total = tl.sum(tl.sum(weight[i] * factor, 1), 0)
        found = tl.sum(acc[i] * factor, 0)
        if S == 1:
            y = _narrow(found / total, TO, BITS)
            tl.store(out + to * D + column, y, mask=(column < D) & here)
        else:
            to = to * S + split
            tl.store(sums + to * D + column, found, mask=(column < D) & here)
            tl.store(tops + 2 * to, peak, mask=here)
            tl.store(tops + 2 * to + 1, total, mask=here)


@triton.jit
def add_up(
    sums, tops, out, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, BITS: tl.constexpr,
    EARLY: tl.constexpr, ORDERS: tl.constexpr,
):  # fmt: skip
    """What the splits of ``attend`` found for one head of a sequence, added up.

    Args:
        sums: (B Hq, S, D) f32; anything where there is no maximum.
        tops: (B Hq, S, 2) f32.
        out: (B Hq, D).
        D: of a head.
        DP: a power of two, at least D.
        S: splits.
        SP: a power of two, at least S.
        BITS: whether bfloat16 comes as integers.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
        ORDERS: Hq where (B, Hq D) of ``out`` lies in order; else 0.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SP)
    d = tl.arange(0, DP)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    top = tl.load(tops + (row * S + split) * 2, mask=split < S, other=float("-inf"))
    weight = tl.load(tops + (row * S + split) * 2 + 1, mask=split < S, other=0.0)
    inside = (split < S)[:, None] & (d < D)[None, :]
    part = tl.load(sums + (row * S + split[:, None]) * D + d[None, :], mask=inside, other=0.0)
    factor = tl.exp2(top - tl.max(top, 0))
    part = tl.where((top == float("-inf"))[:, None], 0.0, part)  # what nobody wrote
    y = tl.sum(part * factor[:, None], 0) / tl.sum(weight * factor, 0)
    if ORDERS:
        to = _ordered_at(tl.program_id(0) // ORDERS, tl.program_id(0) % ORDERS * D + d)
    else:
        to = row * D + d
    tl.store(out + to, _narrow(y, out.dtype.element_ty, BITS), mask=d < D)
