"""Device code of ``halfbyte.kernels.cuda.step``, in Triton.

In Triton's interpreter bfloat16 comes as the integers of its bits (``BITS``), and is rounded by integer arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
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
def _operand(v, BITS: tl.constexpr):
    """What ``tl.dot`` takes."""
    return _wide(v, BITS) if BITS else v


@triton.jit
def _ask(at):
    """Ask for the lines at addresses to come to L2, which needs no order with who writes them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64, bitcast=True)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _ask_many(at, nbytes):
    """The same of so many bytes from an address on, both multiples of 16; one thread asks."""
    tl.inline_asm_elementwise(
        "{ .reg .pred first; mov.u32 $0, %tid.x; setp.eq.u32 first, $0, 0; "
        "@first cp.async.bulk.prefetch.L2.global [$1], $2; }",
        "=r,l,r", [at.to(tl.int64, bitcast=True), nbytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
    tl.store(normed + at, _narrow(v * w, x.dtype.element_ty, BITS), mask=inside)


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
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
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
def _head(
    x, norm, cos, sin, row, d, eps, D: tl.constexpr, NORM: tl.constexpr, TO: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Rows of D values, normalized if NORM, and rotated: f32 that were rounded.

    Args:
        x: addresses of the rows, (R, 1).
        norm: (D,).
        cos: of the position.
        sin: of the position.
        row: (R, 1), whether there is a row.
        d: (1, a power of two), from 0 on.
    """
    inside = d < D
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    v = _wide(tl.load(x + d, mask=row & inside, other=0), BITS)
    turned = _wide(tl.load(x + other, mask=row & inside, other=0), BITS)
    if NORM:
        factor = tl.rsqrt(tl.sum(v * v, 1, keep_dims=True) / D + eps)
        w = _wide(tl.load(norm + d, mask=inside, other=0), BITS)
        w_other = _wide(tl.load(norm + other, mask=inside, other=0), BITS)
        v = _rounded(_rounded(v * factor, TO, BITS) * w, TO, BITS)
        turned = _rounded(_rounded(turned * factor, TO, BITS) * w_other, TO, BITS)
    c = tl.load(cos + d, mask=inside, other=0.0)
    s = tl.load(sin + d, mask=inside, other=0.0)
    return _rounded(v * c + tl.where(d < D // 2, -turned, turned) * s, TO, BITS)


@triton.jit
def _add_up(
    sums, tops, weights, out, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    CHUNK: tl.constexpr, TO: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """What S splits found, (S, G, D), to the result, (G, D)."""
    GP: tl.constexpr = triton.next_power_of_2(G)
    g = tl.arange(0, GP)[None, :]
    d = tl.arange(0, DP)[None, None, :]
    each = tl.arange(0, SP)[:, None]
    there = (each < S) & (g < G)
    level = tl.max(tl.load(tops + each * G + g, mask=there, other=float("-inf"), cache_modifier=".cg"), 0)
    level = tl.where(level == float("-inf"), 0.0, level)
    total = tl.zeros([GP, DP], tl.float32)
    weight = tl.zeros([GP], tl.float32)
    for i in tl.static_range(0, S, CHUNK):
        each = i + tl.arange(0, CHUNK)[:, None]
        there = (each < S) & (g < G)
        place = each * G + g
        top = tl.load(tops + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        found = tl.load(weights + place, mask=there, other=0.0, cache_modifier=".cg")
        inside = there[:, :, None] & (d < D)
        part = tl.load(sums + place[:, :, None] * D + d, mask=inside, other=0.0, cache_modifier=".cg")
        factor = tl.exp2(top - level[None, :])
        weight += tl.sum(found * factor, 0)
        total += tl.sum(part * factor[:, :, None], 0)
    g = tl.arange(0, GP)[:, None]
    d = tl.arange(0, DP)[None, :]
    tl.store(out + g * D + d, _narrow(total / weight[:, None], TO, BITS), mask=(g < G) & (d < D))


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
    counts,
    T,
    eps,
    scale,
    D: tl.constexpr,
    DP: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    BITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The share of one split in the attention of G query heads to one key head of a sequence.

    Split s of S has blocks s, s + S, ... of N entries. The one that would have entry p takes it from qkv, and writes it
    to the cache. What splits found is added up by the last of them, in the order of splits.

    Args:
        qkv: (B, (HKV G + 2 HKV) D).
        cos: (T, D) f32.
        sin: (T, D) f32.
        positions: (B,) i64.
        keys: (B, HKV, T, D).
        values: (B, HKV, T, D).
        q_norm: (D,), if Q_NORM.
        k_norm: (D,), if K_NORM.
        out: (B, HKV G D).
        sums: f32, (B HKV, S, G, D), then the maxima and the sums of weights, (2, B HKV, S, G).
        counts: i32, B HKV zeros; zeros again at the end.
        T: room of the cache.
        eps: of the norms.
        scale: of scores, times log2(e).
        D: of a head, even.
        DP: a power of two, at least D.
        G: query heads of a key head, at most 16.
        HKV: key heads.
        N: entries of a block.
        S: splits.
        SP: a power of two, at least S.
        CHUNK: splits that are added up at once, a power of two.
        AHEAD: blocks of a split that are asked for into L2 before the wait.
        STAGES: blocks on their way.
        WINDOW: entries that are seen at the most; 0 for all.
        Q_NORM: whether q is normalized.
        K_NORM: whether k is.
        BITS: whether bfloat16 comes as integers.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
    """
    TO: tl.constexpr = qkv.dtype.element_ty
    split = tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2)
    pair = b * HKV + head
    base = pair.to(tl.int64) * T * D
    if EARLY:
        gdc_launch_dependents()
        about = tl.load(positions + b, volatile=True)
        about = tl.minimum(tl.maximum(about, 0), T - 1).to(tl.int32)
        first = tl.maximum(about + 1 - WINDOW, 0) // N if WINDOW else 0
        for i in tl.static_range(AHEAD):
            block = first + (split + S - first % S) % S + i * S
            if block * N < about:
                nbytes = tl.minimum(N, T - block * N) * (D * TO.primitive_bitwidth // 8)
                at = base + block * (N * D)
                _ask_many(keys + at, nbytes)
                _ask_many(values + at, nbytes)
        gdc_wait()

    position = tl.load(positions + b, volatile=True)
    valid = (position >= 0) & (position < T)
    p = tl.where(valid, position, 0).to(tl.int32)
    first = tl.maximum(p + 1 - WINDOW, 0) if WINDOW else 0
    d = tl.arange(0, DP)[None, :]
    g = tl.arange(0, 16)[:, None]
    heads: tl.constexpr = HKV * (G + 2)
    row = qkv + (b.to(tl.int64) * heads + head * G) * D
    cos += p.to(tl.int64) * D
    sin += p.to(tl.int64) * D
    q = _head(row + g * D, q_norm, cos, sin, g < G, d, eps, D, Q_NORM, TO, BITS)
    one = tl.arange(0, 1)[:, None]
    row = qkv + (b.to(tl.int64) * heads + HKV * G + head) * D
    k = _head(row + one * D, k_norm, cos, sin, one < 1, d, eps, D, K_NORM, TO, BITS)
    v = tl.load(row + HKV * D + d, mask=d < D, other=0)
    owner = (p // N) % S == split
    at = base + p.to(tl.int64) * D
    tl.store(keys + at + d, _narrow(k, TO, BITS), mask=(d < D) & owner & valid)
    tl.store(values + at + d, v, mask=(d < D) & owner & valid)

    score = tl.sum(q * k, 1) * scale
    top = tl.where(owner, score, float("-inf"))
    weight = tl.where(owner, 1.0, 0.0) + tl.zeros([16], tl.float32)
    acc = tl.where(owner, tl.where(valid, _wide(v, BITS), float("nan")), 0.0) + tl.zeros([16, DP], tl.float32)
    operand = _operand(_narrow(q, TO, BITS), BITS)
    n = tl.arange(0, N)[:, None]
    start = first // N
    start += (split + S - start % S) % S
    stop = tl.where(valid, (p + N - 1) // N, 0)
    for block in tl.range(start, stop, S, num_stages=STAGES):
        entry = block * N + n
        seen = (entry < p) & (entry >= first)
        places = base + entry * D + d
        there = seen if D == DP else seen & (d < D)
        ks = _operand(tl.load(keys + places, mask=there, other=0), BITS)
        vs = _operand(tl.load(values + places, mask=there, other=0), BITS)
        scores = tl.dot(operand, tl.trans(ks), input_precision="ieee") * scale
        column = block * N + tl.arange(0, N)[None, :]
        scores = tl.where((column < p) & (column >= first), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        factor = tl.exp2(top - level)
        top = higher
        weight = weight * factor + tl.sum(weights, 1)
        weights = _operand(_narrow(weights, TO, BITS), BITS)
        acc = tl.dot(weights, vs, acc * factor[:, None], input_precision="ieee")

    inside = (g < G) & (d < D)
    out += (b.to(tl.int64) * HKV + head) * (G * D)
    if S == 1:
        tl.store(out + g * D + d, _narrow(acc / weight[:, None], TO, BITS), mask=inside)
    else:
        pairs = tl.num_programs(1) * tl.num_programs(2)
        tops = sums + pairs.to(tl.int64) * (S * G * D) + pair * (S * G)
        both = pairs * (S * G)
        sums += pair.to(tl.int64) * (S * G * D)
        row = tl.arange(0, 16)
        tl.store(sums + split * (G * D) + g * D + d, acc, mask=inside)
        tl.store(tops + split * G + row, top, mask=row < G)
        tl.store(tops + both + split * G + row, weight, mask=row < G)
        tl.debug_barrier()
        if tl.atomic_add(counts + pair, 1, sem="acq_rel") == S - 1:
            tl.store(counts + pair, 0)
            _add_up(sums, tops, tops + both, out, D, DP, G, S, SP, CHUNK, TO, BITS)
