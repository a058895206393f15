"""Device code of ``halfbyte.kernels.cuda.columns``, in plain Triton.

A byte holds k = 2 i and 2 i + 1 of one n: as two floats, one register of the tensor core's operand. In ``few`` a warp
takes 8 J n and 32 k at a time: lane 4 g + c has n = J g + j and k = 8 c + 4 s + 2 i + p, so that a load takes J bytes
of a row, all of a lane's values share one block scale for each n, and 8 activations lie together. The n of a program
are in the order j, g then, and the tensor core's k in the order i, c, s, p or s, i, c, p; nothing moves between lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.cuda.fragments_code import finished, floats_of, widened


@triton.jit
def _codes(byte, PLACE: tl.constexpr, HALF: tl.constexpr, UP: tl.constexpr):
    """(...) u32 bytes -> (..., 2): both codes as floats, the lowest bit of each at PLACE; times 2^-126 or 2^-14."""
    VALUES: tl.constexpr = 0x00070007 << PLACE
    bits = (byte * ((1 << PLACE) + (1 << (PLACE + 12)))) & VALUES
    bits |= (byte * 0x01001000) & 0x80008000
    return tl.join(floats_of(bits & 0xFFFF, HALF, UP), floats_of(bits >> 16, HALF, UP))


@triton.jit
def _scales(byte, HALF: tl.constexpr, UP: tl.constexpr):
    """(...) u16 or u32 E4M3 bytes, none negative or NaN -> floats, times 2^119 or 2^7."""
    if HALF == tl.bfloat16:
        scale = floats_of(byte << 4, HALF, UP)  # times 2^-120
        scale = scale * tl.full([], 2.0**120, scale.dtype) * tl.full([], 2.0**119, scale.dtype)
    else:
        scale = floats_of(byte << 7, HALF, UP)  # times 2^-8
        scale = scale * tl.full([], 2.0**15, scale.dtype)
    return scale


@triton.jit
def _load(at, there, n, pitch, WORDS: tl.constexpr, TAIL: tl.constexpr):
    """u32 words of four neighbouring bytes of a row: one load, or four where rows lie at any address."""
    if WORDS:
        if TAIL:
            word = tl.load(at, mask=there & (n < pitch), other=0).to(tl.uint32, bitcast=True)
        else:
            word = tl.load(at).to(tl.uint32, bitcast=True)
    else:
        word = tl.load(at, mask=there & (n < pitch), other=0).to(tl.uint32)
        for i in tl.static_range(1, 4):
            word |= tl.load(at + i, mask=there & (n + i < pitch), other=0).to(tl.uint32) << (8 * i)
    return word


@triton.jit
def _fetch(codes, scales, at, there, n, pitch, WORDS: tl.constexpr, TAIL: tl.constexpr):
    """What the step at k reads: four rows of codes and one of scales, each (32 W, J / 4) words."""
    row = codes + (at // 2) * pitch
    return (
        _load(row, there, n, pitch, WORDS, TAIL),
        _load(row + pitch, there, n, pitch, WORDS, TAIL),
        _load(row + 2 * pitch, there, n, pitch, WORDS, TAIL),
        _load(row + 3 * pitch, there, n, pitch, WORDS, TAIL),
        _load(scales + (at // 16) * pitch, there, n, pitch, WORDS, TAIL),
    )


@triton.jit
def _weights(held, Q: tl.constexpr, PLACE: tl.constexpr, HALF: tl.constexpr, UP: tl.constexpr):
    """Byte Q of the words of a step -> (32 W, J / 4, p, i, s) weights."""
    scale = _scales((held[4] >> (8 * Q)) & 0xFF, HALF, UP)[:, :, None]
    w0 = _codes((held[0] >> (8 * Q)) & 0xFF, PLACE, HALF, UP) * scale
    w1 = _codes((held[1] >> (8 * Q)) & 0xFF, PLACE, HALF, UP) * scale
    w2 = _codes((held[2] >> (8 * Q)) & 0xFF, PLACE, HALF, UP) * scale
    w3 = _codes((held[3] >> (8 * Q)) & 0xFF, PLACE, HALF, UP) * scale
    return tl.join(tl.join(w0, w1), tl.join(w2, w3))


@triton.jit
def _add(
    total, held, x,
    W: tl.constexpr, J: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr, PLACE: tl.constexpr, HALF: tl.constexpr,
    UP: tl.constexpr,
):  # fmt: skip
    """The sums (W, 8 J, 8 B) and what a step adds to them."""
    even = tl.join(_weights(held, 0, PLACE, HALF, UP), _weights(held, 2, PLACE, HALF, UP))
    odd = tl.join(_weights(held, 1, PLACE, HALF, UP), _weights(held, 3, PLACE, HALF, UP))
    w = tl.reshape(tl.join(even, odd), [W, 8, 4, J // 4, 2, 2, 2, 2, 2])  # W g c j p i s j1 j0
    x = tl.reshape(widened(x, UP), [B, W, 8, 4, 2, 2, 2])  # B W m c s i p
    if WIDE:
        w = tl.permute(w, (0, 3, 7, 8, 1, 5, 2, 6, 4))  # W j g | i c s p
        x = tl.permute(x, (1, 5, 3, 4, 6, 0, 2))
    else:
        w = tl.permute(w, (0, 3, 7, 8, 1, 6, 5, 2, 4))  # W j g | s i c p
        x = tl.permute(x, (1, 4, 5, 3, 6, 0, 2))
    return tl.dot(tl.reshape(w, [W, 8 * J, 32]), tl.reshape(x, [W, 32, 8 * B]), total)


@triton.jit(do_not_specialize=["M"])
def few(
    codes, scales, x, scale2, bias, out, M, N, K, pitch,
    W: tl.constexpr, J: tl.constexpr, D: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr,
    TAIL: tl.constexpr, PER_ROW: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr, UP: tl.constexpr,
    PLACE: tl.constexpr,
):  # fmt: skip
    """8 J columns of ``out`` for 8 B tokens.

    Args:
        codes: rows of K / 2 codes for every n, as u8 if ALIGN is 1 and else as i32.
        scales: rows of K / 16 E4M3 bytes, likewise.
        x: (M, K) bfloat16 or float16.
        scale2: (N,) or (1,) f32.
        bias: (N,) floats, or None.
        out: (M, N) floats; float32 if UP.
        M: tokens.
        N: rows of the weight.
        K: a multiple of 16.
        pitch: from a row to the next, in ALIGN bytes.
        W: warps, each of which takes its 32 k of a step.
        J: bytes of a load.
        D: steps of loads under way.
        B: tokens, in eights.
        WIDE: whether the compiler gives the lanes of an operand four values of k together, not two.
        ALIGN: 16, 4 or 1: what a row's bytes are a multiple of.
        TAIL: whether K is no multiple of 32 W D, or N not as many bytes as all programs read.
        PER_ROW: whether scale2 is (N,).
        BIAS: whether there is a bias.
        FACTOR: what sums are multiplied by beside scale2.
        UP: see ``fragments_code``.
        PLACE: of the lowest bit of a code in a float.
    """
    HALF: tl.constexpr = x.dtype.element_ty
    WORDS: tl.constexpr = ALIGN > 1
    pitch = pitch.to(tl.int64) * (ALIGN // 4 if WORDS else 1)
    lane = tl.arange(0, W * 32)[:, None]
    k = lane // 32 * 32 + lane % 4 * 8
    PER: tl.constexpr = 1 if WORDS else 4
    n = tl.program_id(0) * (2 * J * PER) + lane % 32 // 4 * (J // 4 * PER) + tl.arange(0, J // 4)[None, :] * PER
    codes = codes + k // 2 * pitch + n
    scales = scales + k // 16 * pitch + n
    row = tl.arange(0, B * W * 32)[:, None]
    token = row % 32 // 4 + row // (W * 32) * 8
    xk = row // 32 % W * 32 + row % 4 * 8
    x = x + tl.minimum(token, M - 1).to(tl.int64) * K + (xk + tl.arange(0, 8)[None, :])
    total = tl.zeros([W, 8 * J, 8 * B], tl.float32)
    held = ()
    for d in tl.static_range(D):
        at = d * (32 * W)
        held = held + (_fetch(codes, scales, at, at + k < K, n, pitch, WORDS, TAIL),)
    rounds = tl.cdiv(K, 32 * W * D) - 1
    for i in tl.range(0, rounds, num_stages=1):
        for d in tl.static_range(D):
            at = (i * D + D + d) * (32 * W)
            new = _fetch(codes, scales, at, at + k < K, n, pitch, WORDS, TAIL)
            total = _add(total, held[0], tl.load(x + (at - D * 32 * W)), W, J, B, WIDE, PLACE, HALF, UP)
            held = held[1:] + (new,)
    for d in tl.static_range(D):
        at = (rounds * D + d) * (32 * W)
        if TAIL:
            last = tl.load(x + at, mask=at + xk < K, other=0.0)
        else:
            last = tl.load(x + at)
        total = _add(total, held[d], last, W, J, B, WIDE, PLACE, HALF, UP)
    place = tl.arange(0, 8 * J)
    rows = tl.program_id(0) * (8 * J) + place % 8 * J + place // 8
    tokens = tl.arange(0, 8 * B)[None, :]
    y = finished(tl.sum(total, axis=0), scale2, bias, rows, N, PER_ROW, BIAS, FACTOR)
    to = out + tokens.to(tl.int64) * N + rows[:, None]
    tl.store(to, y.to(out.dtype.element_ty), mask=(tokens < M) & (rows < N)[:, None])


@triton.jit(do_not_specialize=["M", "tiles_m"])
def many(
    codes, scales, x, scale2, bias, out, M, N, K, pitch, tiles_m,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    TAIL: tl.constexpr, PER_ROW: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr,
    UP: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """One tile of ``out``, (BM, BN).

    Args:
        codes: u8 (K / 2, pitch).
        scales: u8 (K / 16, pitch), E4M3.
        x: see ``few``.
        scale2: see ``few``.
        bias: see ``few``.
        out: see ``few``.
        M: tokens.
        N: rows of the weight.
        K: a multiple of 16.
        pitch: bytes from a row to the next.
        tiles_m: tiles along M.
        BM: tokens of a tile.
        BN: columns of a tile.
        BK: k of a step.
        STAGES: of the compiler's pipeline.
        GROUP: tiles along M that follow each other before N goes on.
        TAIL: whether K is no multiple of BK.
        PER_ROW: see ``few``.
        BIAS: see ``few``.
        FACTOR: see ``few``.
        UP: see ``fragments_code``.
        PLACE: see ``few``.
    """
    HALF: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    in_group = GROUP * tl.cdiv(N, BN)
    first = tile // in_group * GROUP
    here = tl.minimum(tiles_m - first, GROUP)
    token = (first + tile % in_group % here) * BM + tl.arange(0, BM)
    rows = tile % in_group // here * BN + tl.arange(0, BN)
    pitch = pitch.to(tl.int64)
    pair = tl.arange(0, BK // 2)
    block = tl.arange(0, BK // 16)
    codes = codes + pair[:, None] * pitch + rows[None, :]
    scales = scales + block[:, None] * pitch + rows[None, :]
    x = x + token.to(tl.int64)[:, None] * K + tl.arange(0, BK)[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    inside = (rows < pitch)[None, :]
    for i in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
        left = K - i * BK
        if TAIL:
            xs = tl.load(x, mask=(token < M)[:, None] & (tl.arange(0, BK) < left)[None, :], other=0.0)
            c = tl.load(codes, mask=inside & (pair * 2 < left)[:, None], other=0)
            s = tl.load(scales, mask=inside & (block * 16 < left)[:, None], other=0)
        else:
            xs = tl.load(x, mask=(token < M)[:, None], other=0.0)
            c = tl.load(codes, mask=inside, other=0)
            s = tl.load(scales, mask=inside, other=0)
        w = tl.reshape(_codes(c.to(tl.uint32), PLACE, HALF, UP), [BK // 16, 8, BN, 2])
        w = w * tl.reshape(_scales(s.to(tl.uint16), HALF, UP), [BK // 16, 1, BN, 1])
        w = tl.reshape(tl.permute(w, (0, 1, 3, 2)), [BK, BN])
        total = tl.dot(widened(xs, UP), w, total)
        codes += pitch * (BK // 2)
        scales += pitch * (BK // 16)
        x += BK
    y = finished(tl.trans(total), scale2, bias, rows, N, PER_ROW, BIAS, FACTOR)
    to = out + token.to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(to, y.to(out.dtype.element_ty), mask=(token < M)[None, :] & (rows < N)[:, None])
