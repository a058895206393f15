"""The inner loops of products with NVFP4 rows, as LLVM: R rows of weights times T tokens.

A step is 128 codes of a row: 64 bytes, 32 words, word j holding the codes of elements 4j to 4j + 3. Nibble i of all
words is decoded at once, so that activations are wanted in the order of the words' nibbles; ``staging`` gives it.
With lane l of 16, block scale l / 2 of the step belongs to it (``halves`` forms: l / 4 of each half).

======== ============================ =============================== =========================================
form     decodes by                   multiplies                      activations
======== ============================ =============================== =========================================
bf16     a permute of 16-bit entries  pairs of bf16 (AVX-512 BF16)    bf16; or fp16 in two parts that add up
fma      a permute of f32 entries     f32                             f32
portable a shift into the place of    f32                             f32
         an fp16's exponent, widened
======== ============================ =============================== =========================================

Scales are widened from fp16 with E4M3's bits shifted by 7: 2^-8 of their value, subnormals too. ``portable`` codes are
2^-14 of theirs. ``GAIN`` gives both back; all are exact.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from halfbyte.kernels.cpu.vectors import F16, F32, I8, I16, I32, I64, Emit, vector
from halfbyte.numerics import BLOCK, E2M1_VALUES

STEP: Final = 128
"""Codes of a row in a step."""
ROUND: Final = 256
"""Codes of a row in a round of the loop: two steps, whose 16 scales are one vector."""

GAIN: Final = {"bf16": 2.0**8, "fma": 2.0**8, "portable": 2.0**22}

F32X16, I32X16, I16X32 = vector(F32, 16), vector(I32, 16), vector(I16, 32)
F16X16, I16X16 = vector(F16, 16), vector(I16, 16)

_BF16_CODES = [int(bits) >> 16 for bits in E2M1_VALUES.view(np.uint32)]


def staging(form: str) -> Any:
    """(128,) i64: for each place of a step's staged activations, the element that goes there.

    Places are by nibble i of 4, then by lane of 32: words for ``bf16``, else two vectors of 16 f32.
    """
    place = np.arange(STEP)
    i, lane = place // 32, place % 32
    half, l16 = lane // 16, lane % 16
    return {"bf16": 4 * lane + i, "fma": 8 * l16 + 2 * i + half, "portable": 64 * half + 4 * l16 + i}[form]


def _scales(e: Emit, address: Any, count: int) -> Any:
    """E4M3 bytes as f32."""
    b = e.b
    words = b.zext(e.load(vector(I8, count), address), vector(I16, count))
    return b.fpext(b.bitcast(b.shl(words, e.splat(I16, count, 7)), vector(F16, count)), vector(F32, count))


def _words(e: Emit, form: str, address: Any) -> list[Any]:
    """The 32 words of a step, as one vector or two."""
    if form == "portable":
        return [e.load(I16X16, address), e.load(I16X16, e.at(address, 32))]
    return [e.load(I16X32, address)]


def _decode(e: Emit, form: str, halves: list[Any], i: int) -> list[Any]:
    """Nibble i of 32 words: one vector of bf16 as i16, or two of f32."""
    b = e.b
    if form == "portable":
        decoded = []
        for half in halves:
            top = b.shl(half, e.splat(I16, 16, 12 - 4 * i)) if i < 3 else half
            bits = b.and_(b.ashr(top, e.splat(I16, 16, 3)), e.splat(I16, 16, 0x8E00))
            decoded.append(b.fpext(b.bitcast(bits, F16X16), F32X16))
        return decoded
    (words,) = halves
    if form == "fma":
        word = b.bitcast(words, I32X16)
        table = e.constant(F32, E2M1_VALUES.tolist())
        nibbles = [b.lshr(word, e.splat(I32, 16, 4 * j)) if j else word for j in (2 * i, 2 * i + 1)]
        return [e.permute_f32(table, nibble) for nibble in nibbles]
    index = b.lshr(words, e.splat(I16, 32, 4 * i)) if i else words  # the permute ignores the bits above
    return [e.permute16(e.constant(I16, _BF16_CODES * 2), index)]


def _lanes(form: str, step: int, half: int) -> list[int]:
    """For each lane, which of the scales of some steps is its own."""
    per_step = STEP // BLOCK
    if form == "portable":
        return [step * per_step + half * per_step // 2 + lane // 4 for lane in range(16)]
    return [step * per_step + lane // 2 for lane in range(16)]


def emit_sums(e: Emit, lanes: Any, out: Any) -> None:
    """Add what ``emit_tile`` left of 16 rows and one token to 16 f32.

    Args:
        e: where the code goes.
        lanes: where the lanes of the first row are, at a multiple of 64.
        out: where the sums go.
    """
    sums, order = e.sums([e.load(F32X16, e.at(lanes, 64 * r), 64) for r in range(16)])
    e.store(e.b.fadd(e.load(F32X16, out, 4), e.shuffle(sums, order)), out, 4)


def emit_tile(e: Emit, form: str, parts: int, rows: int, tokens: int, next_sums: int, args: Any) -> None:
    """Add the sums of R rows times T tokens over some rounds to R f32 of each token.

    The sums of one token stay lanes, 16 f32 for each row, which ``emit_sums`` adds up of more rows at once.

    Args:
        e: where the code goes.
        form: as above.
        parts: of each activation.
        rows: R.
        tokens: T; R * T is 1, 2, 4, 8 or 16.
        next_sums: bytes from where the sums of a token go to the next's.
        args: codes and scales of the first row, activations of the first token, rounds, bytes from a row's codes and
            scales to the next's, bytes from a token to the next, number of the last row that there is (later ones
            repeat it), bytes to what is prefetched of codes and scales, and where the sums of the first token go, or
            the lanes, at a multiple of 64.
    """
    b = e.b
    codes, scales, x, rounds, next_codes, next_scales, next_token, last, ahead, ahead_scales, out = args
    large = rows * tokens > 8  # no registers for the sums of each step beside those of all, nor for a second step
    steps = 1 if large else ROUND // STEP
    x_step = 2 * STEP * parts if form == "bf16" else 4 * STEP

    def row(r: int, base: Any, stride: Any) -> Any:
        if not r:
            return base
        r64 = b.select(b.icmp_signed("<", last, I64(r)), last, I64(r))
        return b.add(base, b.mul(r64, stride))

    code_rows = [row(r, codes, next_codes) for r in range(rows)]
    scale_rows = [row(r, scales, next_scales) for r in range(rows)]
    token_rows = [b.add(x, b.mul(next_token, I64(t))) if t else x for t in range(tokens)]
    tile = [(r, t) for r in range(rows) for t in range(tokens)]
    # what is asked for is all of a row after the other, where rows follow each other, else a piece of each in turn
    done = steps * STEP
    follow = b.icmp_signed("<", b.sub(next_codes, b.mul(rounds, I64(ROUND // 2))), I64(ROUND // 2))
    faster = b.select(follow, I64(rows), I64(1))
    apart_codes = b.select(follow, I64(done // 2), next_codes)
    apart_scales = b.select(follow, I64(done // BLOCK), next_scales)
    ahead_codes, ahead_scales = b.add(codes, ahead), b.add(scales, ahead_scales)
    loop = e.loop(b.mul(rounds, I64(ROUND // STEP // steps)), [e.zero(F32X16)] * len(tile) + [I64(0), I64(0), I64(0)])
    total = dict(zip(tile, loop.values[: len(tile)], strict=True))
    at_x, at_codes, at_scales = loop.values[len(tile) :]
    for start, at, apart, lines in (
        (ahead_codes, at_codes, apart_codes, steps),
        (ahead_scales, at_scales, apart_scales, 1),
    ):
        here = b.add(start, b.mul(at, faster))
        for _ in range(rows):
            for line in range(lines):
                e.prefetch(e.at(here, 64 * line))
            here = b.add(here, apart)
    scale = [_scales(e, b.add(scale_rows[r], at_scales), steps * STEP // BLOCK) for r in range(rows)]
    for step in range(steps):
        words = [_words(e, form, e.at(b.add(code_rows[r], at_codes), 64 * step)) for r in range(rows)]

        def activations(t: int, i: int, step: int = step) -> list[Any]:
            start = b.add(token_rows[t], at_x)
            if form == "bf16":
                return [e.load(I16X32, e.at(start, x_step * step + 64 * (i * parts + p)), 64) for p in range(parts)]
            return [e.load(F32X16, e.at(start, x_step * step + 64 * (2 * i + q)), 64) for q in range(2)]

        halves = 2 if form == "portable" else 1
        own = [[e.shuffle(s, _lanes(form, step, q)) for q in range(halves)] for s in scale]
        if large and form != "bf16":
            for i in range(4):
                values = [
                    [b.fmul(v, own[r][q % halves]) for q, v in enumerate(_decode(e, form, words[r], i))]
                    for r in range(rows)
                ]
                for t in range(tokens):
                    for q, xs in enumerate(activations(t, i)):
                        for r in range(rows):
                            total[r, t] = e.fma(values[r][q], xs, total[r, t])
            continue
        if large:
            decoded = [[_decode(e, form, words[r], i)[0] for i in range(4)] for r in range(rows)]
            for t in range(tokens):
                sums = [e.zero(F32X16)] * rows
                for i in range(4):
                    for xs in activations(t, i):
                        sums = [e.dot_bf16(sums[r], decoded[r][i], xs) for r in range(rows)]
                for r in range(rows):
                    total[r, t] = e.fma(sums[r], own[r][0], total[r, t])
            continue
        part: dict[tuple[int, int, int], Any] = {}
        for i in range(4):
            values = [_decode(e, form, words[r], i) for r in range(rows)]
            for t in range(tokens):
                for q, xs in enumerate(activations(t, i)):
                    for r in range(rows):
                        if form == "bf16":
                            known = part.get((r, t, 0), e.zero(F32X16))
                            part[r, t, 0] = e.dot_bf16(known, values[r][0], xs)
                        else:
                            h = q % halves
                            known = part.get((r, t, h))
                            part[r, t, h] = e.fma(values[r][q], xs, known) if known else b.fmul(values[r][q], xs)
        for (r, t, h), value in part.items():
            total[r, t] = e.fma(value, own[r][h], total[r, t])
    moved = [b.add(at_x, I64(x_step * steps)), b.add(at_codes, I64(done // 2)), b.add(at_scales, I64(done // BLOCK))]
    results = loop.end([total[at] for at in tile] + moved)[: len(tile)]
    if tokens == 1:
        for r, value in enumerate(results):
            e.store(value, e.at(out, 64 * r), 64)
        return
    sums, lanes = e.sums(results)
    for (r, t), lane in zip(tile, lanes, strict=True):
        at = e.at(out, next_sums * t + 4 * r)
        e.store(b.fadd(e.load(F32, at, 4), b.extract_element(sums, I32(lane))), at, 4)
