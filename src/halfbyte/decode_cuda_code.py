"""The Triton kernel of ``halfbyte.decode_cuda``; loaded only to run."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(0)
FRAGMENTS = tl.constexpr(1)
BFLOAT16 = tl.constexpr(1)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _of_halves(pair, KIND: tl.constexpr):
    """The two 16-bit floats of a word, low half first, as f32."""
    if KIND == BFLOAT16:
        return _float(pair << 16), _float(pair & 0xFFFF0000)
    else:
        low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _step(word, ROTATE: tl.constexpr, MASK: tl.constexpr):
    if MASK == 0:
        return word & 0
    elif ROTATE == 0:
        return word & MASK
    else:
        return ((word << ROTATE) | (word >> (32 - ROTATE))) & MASK


@triton.jit
def _output(word, STEPS: tl.constexpr, NUMBER: tl.constexpr):
    """The pair that an output of ``fragments`` takes of words."""
    pair = word & 0
    for i in tl.static_range(NUMBER * (len(STEPS) // 8), (NUMBER + 1) * (len(STEPS) // 8)):
        pair |= _step(word, STEPS[2 * i], STEPS[2 * i + 1])
    return pair


@triton.jit
def _row(codes, scales, row, column, blocks, factor, out, k, VALUES: tl.constexpr):
    """Decode some values of a row of ``rows``."""
    at = column // 8 + tl.arange(0, VALUES // 8)
    inside = at < blocks * 2
    word = tl.load(codes + row * (blocks * 2) + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    byte = tl.load(scales + row * blocks + at // 2, mask=inside, other=0).to(tl.uint32)
    scale = _float(((byte & 0x7F) << 20) | ((byte & 0x80) << 24)) * 1.329227995784916e36  # 2^120
    scale = tl.where((byte & 0x7F) == 0x7F, float("nan"), scale)
    # Codes k and k + 4 of a word become bfloat16, 2^-126 times their value.
    v0, v4 = _of_halves(((word << 12) & 0x80008000) | ((word << 6) & 0x01C001C0), 1)
    v1, v5 = _of_halves(((word << 8) & 0x80008000) | ((word << 2) & 0x01C001C0), 1)
    v2, v6 = _of_halves(((word << 4) & 0x80008000) | ((word >> 2) & 0x01C001C0), 1)
    v3, v7 = _of_halves((word & 0x80008000) | ((word >> 6) & 0x01C001C0), 1)
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    value = tl.reshape(tl.join(even, odd), (VALUES // 8, 8)) * 8.507059173023462e37  # 2^126
    value = tl.reshape(value * scale[:, None] * factor, (VALUES,))
    place = column + tl.arange(0, VALUES)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=place < k)


@triton.jit
def _words(codes, tile, g, block, blocks):
    """The words of rows g and g + 8 of a tile of ``fragments``, four a block, and where the blocks' scales lie."""
    part = (tile.to(tl.int64) * ((blocks + 3) // 4) + block // 4) * 8 + g
    at = (part * 16 + block % 4 * 4)[:, None] + tl.arange(0, 4)[None, :]
    word = tl.load(codes + at, mask=(block < blocks)[:, None], other=0).to(tl.uint32, bitcast=True)
    return word, part * 8 + block % 4 * 2


@triton.jit
def _scale(scales, at, inside, KIND: tl.constexpr, SCALE: tl.constexpr):
    byte = tl.load(scales + at, mask=inside, other=0).to(tl.uint32)
    scale, _ = _of_halves(SCALE[1] | (byte << SCALE[0]), KIND)
    return scale[:, None]


@triton.jit
def _half_blocks(pair, scale, factor, out, first, k, VALUES: tl.constexpr, KIND: tl.constexpr):
    """Decode and store eight values of each block, from ``first`` on."""
    low, top = _of_halves(pair, KIND)
    value = tl.reshape(tl.join(low, top), (VALUES // 16, 8)) * scale * 128.0 * factor
    place = first + tl.arange(0, VALUES // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=place < k)


@triton.jit(do_not_specialize=["count", "n"])
def decode(
    codes,
    scales,
    scale2,
    ids,
    out,
    count,
    n,
    k,
    LAYOUT: tl.constexpr,
    LOOKUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    EACH: tl.constexpr,
    VALUES: tl.constexpr,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Decode rows, all in turn or those that ids name: ``out[i] = code * scale * scale2``, in f32 and rounded once.

    Args:
        codes: i32 words of all experts.
        scales: u8.
        scale2: f32, one for each expert or for each row.
        ids: (count,) i32 or i64, if LOOKUP; a row that is not there gives NaN.
        out: (count, k).
        count: rows to write.
        n: rows of an expert.
        k: values in a row.
        LAYOUT: 0 for rows, 1 for fragments.
        LOOKUP: whether there are ids; then of one expert.
        EXPERTS: whether there may be more experts than one.
        PER_ROW: whether each row has a scale2 of its own.
        EACH: rows of a program; of whole fragments a tile's, 16 with those that pad it.
        VALUES: of each row that a program decodes.
        KIND: of fragments, 1 for bfloat16, 2 for float16.
        STEPS: of fragments, for each of four outputs the same number of rotates and masks, in turn; a mask may be 0.
        SCALE: of fragments, (shift, base).
    """
    chunks = tl.cdiv(k, VALUES)
    number = tl.program_id(0)
    first, column = number // chunks * EACH, number % chunks * VALUES
    blocks = tl.cdiv(k, 16)
    block = column // 16 + tl.arange(0, VALUES // 16)
    if LAYOUT == FRAGMENTS and not LOOKUP:
        tile = number // chunks
        expert = 0
        if EXPERTS:
            expert = tile // tl.cdiv(n, 16)
        first = tile * 16 - expert * (tl.cdiv(n, 16) * 16)
        for g in range(8):
            word, at = _words(codes, tile, g, block, blocks)
            for rh in tl.static_range(2):
                row = first + 8 * rh + g
                if row < n:
                    index = expert * n + row
                    if PER_ROW:
                        factor = tl.load(scale2 + index)
                    else:
                        factor = tl.load(scale2 + expert)
                    scale = _scale(scales, at + rh, block < blocks, KIND, SCALE)
                    for h in tl.static_range(2):
                        pair = _output(word, STEPS, 2 * h + rh)
                        target = out + index.to(tl.int64) * k
                        _half_blocks(pair, scale, factor, target, column + 8 * h, k, VALUES, KIND)
        return
    for i in range(EACH):
        index = first + i
        if index < count:
            row = index
            valid = True
            if LOOKUP:
                given = tl.load(ids + index)
                valid = (given >= 0) & (given < n)
                row = tl.where(valid, given, 0).to(tl.int32)
            expert = 0
            if EXPERTS:
                expert = row // n
            if PER_ROW:
                factor = tl.load(scale2 + row)
            else:
                factor = tl.load(scale2 + expert)
            factor = tl.where(valid, factor, float("nan"))
            target = out + index.to(tl.int64) * k
            if LAYOUT == ROWS:
                _row(codes, scales, row.to(tl.int64), column, blocks, factor, target, k, VALUES)
            else:
                word, at = _words(codes, row // 16, row % 8, block, blocks)
                high = row // 8 % 2
                scale = _scale(scales, at + high, block < blocks, KIND, SCALE)
                for h in tl.static_range(2):
                    pair = tl.where(high == 1, _output(word, STEPS, 2 * h + 1), _output(word, STEPS, 2 * h))
                    _half_blocks(pair, scale, factor, target, column + 8 * h, k, VALUES, KIND)
