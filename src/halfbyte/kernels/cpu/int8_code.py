"""Compiled products of activations in 8 bits with INT8 rows; Numba is imported here, so this is loaded only to run.

A thread takes UNIT rows at a time and all tokens. A tile is four rows times some tokens, whose sums stay in registers;
a step is 64 weights of each row.

======== ============================ ==============================================================
form     multiplies                   signs
======== ============================ ==============================================================
vnni     fours of u8 and i8           weights + 128 are unsigned; sums start at -128 * sum(activations)
portable i8 widened to i32, in pairs  as they are
======== ============================ ==============================================================

Sums of ``vnni`` wrap at 2^32 on their way, and end exact where they fit 32 bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit, prange, types
from numba.extending import intrinsic

from halfbyte import jit
from halfbyte.kernels.cpu.scalars import (
    BF16_KIND,
    F32_KIND,
    bits_of,
    f32_at,
    float_of,
    narrow,
    pointer_to,
    read,
    u16_at,
)
from halfbyte.kernels.cpu.vectors import I8, I32, I64, Emit, vector

TOKENS = {"vnni": 6, "portable": 2}
"""The forms, and the most tokens in a tile."""
STEP = 64
"""Weights of a row in a step."""
UNIT = 32
"""Rows that a thread takes at a time."""
STREAMED = 2
"""Up to so many tokens, the speed of memory is the limit."""
AHEAD = 4096
"""Then, bytes of weights between what is used and what is asked for; else it is four rows."""
K_BLOCK = 4096
"""Activations at a time where there are more tokens: a tile's fit the first-level cache."""

_i64, _f32 = types.int64, types.float32
_i32_at, _u32_at, _i8_at = (pointer_to(t) for t in (types.int32, types.uint32, types.int8))
_inner = njit(nogil=True, error_model="numpy")
_MAX, _INFINITY, _MAGNITUDE = np.float32(127), np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)
_NEAREST, _NEAREST_BITS = np.float32(3 << 22), 0x4B400000
"""1.5 * 2^23: adding it rounds to an integer, to nearest even, whose bits are the sum's low ones."""


@_inner
def _quantize(kind, x, pre, k, unsigned, out, scale, start):
    """One token in 8 bits, zeros after K; its scale; and what its sums start at."""
    padded = (k + STEP - 1) // STEP * STEP
    values = np.empty(padded, np.float32)
    read(kind, x, k, values)
    if pre:
        factors = carray(f32_at(pre), k)
        for i in range(k):
            values[i] *= factors[i]
    top = np.uint32(0)
    for i in range(k):
        top = max(top, np.uint32(bits_of(values[i]) & _MAGNITUDE))
    codes, scales, starts = carray(_i8_at(out), padded), carray(f32_at(scale), 1), carray(_i32_at(start), 1)
    amax, total = float_of(top), np.int32(0)
    if top == 0 or top >= _INFINITY:
        codes[:] = 0
    else:
        for i in range(k):
            moved = np.int32(bits_of(values[i] / amax * _MAX + _NEAREST) - _NEAREST_BITS)
            total = np.int32(total + moved)
            codes[i] = np.int8(moved)
        codes[k:] = 0
    scales[0] = np.float32(np.nan) if top >= _INFINITY else amax / _MAX
    starts[0] = np.int32(total * -128) if unsigned else np.int32(0)


def _folded(e: Emit, total: Any, lanes: int) -> Any:
    """A vector's halves added until so many lanes are left."""
    while total.type.count > lanes:
        half = total.type.count // 2
        total = e.b.add(e.shuffle(total, list(range(half))), e.shuffle(total, list(range(half, 2 * half))))
    return total


def _four_sums(e: Emit, rows: Any) -> Any:
    """The sums of the lanes of four vectors, as one vector of four."""
    b = e.b
    lanes = rows[0].type.count
    groups = range(0, lanes, 4)

    def joined(x: Any, y: Any, first: list[int], second: list[int]) -> Any:
        """Within each four lanes: those of x by number, those of y from 4 on."""
        picked = [[g + i if i < 4 else lanes + g + i - 4 for g in groups for i in order] for order in (first, second)]
        return b.add(e.shuffle(x, picked[0], y), e.shuffle(x, picked[1], y))

    pairs = [joined(rows[i], rows[i + 1], [0, 4, 1, 5], [2, 6, 3, 7]) for i in (0, 2)]
    total = joined(pairs[0], pairs[1], [0, 1, 4, 5], [2, 3, 6, 7])
    return _folded(e, total, 4)


def _emit_tile(e: Emit, form: str, tokens: int, args: Any) -> None:
    """Add the sums of four rows times some tokens over some steps to i32.

    Args:
        e: where the code goes.
        form: as above.
        tokens: how many. Up to STREAMED the rows follow each other, as they lie in memory; more share loaded weights.
        args: weights of the first row, bytes to the next, number of the last row that there is (later ones repeat
            it), activations of the first token, bytes to the next, steps, and where the sums are: (tokens, UNIT), the
            first row's first.
    """
    b = e.b
    weights, next_row, last, x, next_token, steps, out = args
    xs = [b.add(x, b.mul(next_token, I64(t))) if t else x for t in range(tokens)]
    if tokens > STREAMED:
        rows = [weights]
        for r in range(1, 4):
            rows.append(b.add(weights, b.mul(b.select(b.icmp_signed("<", last, I64(r)), last, I64(r)), next_row)))
        totals = _emit_steps(e, form, rows, xs, steps, 1, b.mul(next_row, I64(4)))
        for t in range(tokens):
            place = e.at(out, 4 * UNIT * t)
            sums = _four_sums(e, [totals[r][t] for r in range(4)])
            e.store(b.add(sums, e.load(vector(I32, 4), place, 4)), place, 4)
        return
    turns, rest = b.sdiv(steps, I64(4)), b.srem(steps, I64(4))
    done = b.mul(turns, I64(4 * STEP))
    loop = e.loop(b.add(last, I64(1)), [weights, out])
    row, place = loop.values
    (many,) = _emit_steps(e, form, [row], xs, turns, 4, I64(AHEAD))
    (few,) = _emit_steps(e, form, [b.add(row, done)], [b.add(address, done) for address in xs], rest, 1, I64(AHEAD))
    for t in range(tokens):
        total, to = _folded(e, b.add(many[t], few[t]), 1), e.at(place, 4 * UNIT * t)
        e.store(b.add(b.extract_element(total, I32(0)), e.load(I32, to, 4)), to, 4)
    loop.end([b.add(row, next_row), e.at(place, 4)])


def _emit_steps(e: Emit, form: str, rows: Any, xs: Any, turns: Any, steps: int, ahead: Any) -> list[list[Any]]:
    """The vectors whose lanes add up to each row times each token, over so many turns of so many steps."""
    b = e.b
    size, kind = (STEP, vector(I32, 16)) if form == "vnni" else (16, vector(I32, 8))
    places = [(r, t, step) for r in range(len(rows)) for t in range(len(xs)) for step in range(steps)]
    loop = e.loop(turns, [e.zero(kind)] * len(places) + [I64(0)])
    total, offset = dict(zip(places, loop.values, strict=False)), loop.values[-1]
    for step in range(steps):
        for row in rows:
            e.prefetch(e.at(b.add(b.add(row, offset), ahead), STEP * step))
        for part in range(STEP * step, STEP * (step + 1), size):
            held = [_load(e, form, e.at(b.add(row, offset), part), 1, True) for row in rows]
            for t, x in enumerate(xs):
                own = _load(e, form, e.at(b.add(x, offset), part), size, False)
                for r in range(len(rows)):
                    total[r, t, step] = _multiply(e, form, total[r, t, step], held[r], own)
    ends = dict(zip(places, loop.end([*total.values(), b.add(offset, I64(STEP * steps))]), strict=False))
    return [
        [functools.reduce(b.add, [ends[r, t, step] for step in range(steps)]) for t in range(len(xs))]
        for r in range(len(rows))
    ]


def _load(e: Emit, form: str, address: Any, align: int, weights: bool) -> Any:
    if form == "portable":
        return e.b.sext(e.load(vector(I8, 16), address, align), vector(I32, 16))
    words = e.load(vector(I32, 16), address, align)
    return e.b.xor(words, e.splat(I32, 16, 0x80808080)) if weights else words


def _multiply(e: Emit, form: str, total: Any, weights: Any, x: Any) -> Any:
    if form == "vnni":
        return e.dot_u8(total, weights, x)
    products = e.b.mul(weights, x)
    even, odd = e.shuffle(products, list(range(0, 16, 2))), e.shuffle(products, list(range(1, 16, 2)))
    return e.b.add(total, e.b.add(even, odd))


def _tile_of(form: str, tokens: int) -> Any:
    """``_emit_tile`` as a function."""

    @intrinsic
    def tile(typing, weights, next_row, last, x, next_token, steps, out):
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _emit_tile(Emit(builder), form, tokens, values)
            return context.get_dummy_value()

        return types.void(*[_i64] * 7), code

    return tile


@_inner
def _finish(sums, x_scales, count, held, scales, biases, rows, out, next_out, out_kind):
    """Sums (count, UNIT) to results."""
    values, words = np.empty(UNIT, np.float32), np.empty(UNIT, np.uint16)
    for t in range(count):
        factor = x_scales[t]
        for i in range(UNIT):
            values[i] = np.float32(sums[t * UNIT + i]) * factor * scales[i]
        if held:
            for i in range(UNIT):
                values[i] += biases[i]
        if out_kind == F32_KIND:
            to = carray(f32_at(out + 4 * t * next_out), rows)
            for i in range(rows):
                to[i] = values[i]
            continue
        if out_kind == BF16_KIND:
            for i in range(UNIT):
                bits = bits_of(values[i])
                rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                special = (bits >> np.uint32(16)) | np.uint32(0x40)
                words[i] = np.uint16(special if np.isnan(values[i]) else rounded)
        else:
            for i in range(UNIT):
                words[i] = narrow(values[i])
        halves = carray(u16_at(out + 2 * t * next_out), rows)
        for i in range(rows):
            halves[i] = words[i]


def _rows_of(form: str, several: bool) -> Any:
    """The rows of one unit, from staged activations to the result."""
    most = TOKENS[form] if several else 1
    one, two, three, four, five, six = (_tile_of(form, min(t, most)) for t in range(1, 7))

    @_inner
    def rows(index, x, m, n, k, weights, scale, per_row, bias, bias_kind, out, out_kind, x_scales, starts):
        low = index * UNIT
        have = min(n - low, UNIT)
        first_row, padded, done = weights + low * k, (k + STEP - 1) // STEP * STEP, k // STEP * STEP
        block = padded if m <= most else K_BLOCK
        pieces = (done + block - 1) // block
        # Numba frees an array after its last use by name, whoever holds its address: the end uses sums and rest again.
        sums, scales, biases = np.empty(most * UNIT, np.int32), np.empty(UNIT, np.float32), np.empty(UNIT, np.float32)
        rest = np.zeros(UNIT * STEP, np.int8)
        if done < k:
            for r in range(have):
                end = carray(_i8_at(first_row + r * k + done), k - done)
                for i in range(k - done):
                    rest[r * STEP + i] = end[i]
        given = carray(f32_at(scale), n)
        for i in range(have):
            scales[i] = given[low + i if per_row else 0]
        if bias:
            read(bias_kind, bias + low * (4 if bias_kind == F32_KIND else 2), have, biases)
        all_scales, all_starts = carray(f32_at(x_scales), m), carray(_i32_at(starts), m)
        parts = (m + most - 1) // most
        at_once = (m + parts - 1) // parts
        for first in range(0, m, at_once):
            count = min(at_once, m - first)
            for t in range(count):
                sums[t * UNIT : t * UNIT + UNIT] = all_starts[first + t]
            for piece in range(pieces + (1 if done < k else 0)):
                at, next_row, steps = first_row + piece * block, k, min(block, done - piece * block) // STEP
                own = x + first * padded + min(piece * block, done)
                if piece == pieces:
                    at, next_row, steps = rest.ctypes.data, STEP, 1
                for r in range(0, have, 4):
                    last, here, to = min(have - r, 4) - 1, at + r * next_row, sums.ctypes.data + 4 * r
                    if most >= 6 and count == 6:
                        six(here, next_row, last, own, padded, steps, to)
                    elif most >= 5 and count == 5:
                        five(here, next_row, last, own, padded, steps, to)
                    elif most >= 4 and count == 4:
                        four(here, next_row, last, own, padded, steps, to)
                    elif most >= 3 and count == 3:
                        three(here, next_row, last, own, padded, steps, to)
                    elif most >= 2 and count == 2:
                        two(here, next_row, last, own, padded, steps, to)
                    else:
                        one(here, next_row, last, own, padded, steps, to)
            to_out = out + (first * n + low) * (4 if out_kind == F32_KIND else 2)
            _finish(sums, all_scales[first:], count, bias, scales, biases, have, to_out, n, out_kind)
        rest[0] = sums[0] = 0

    return rows


def _product_of(form: str, several: bool) -> Any:
    """x @ weight.T for one token, or for several. Numbers of bytes and rows are i64, arrays are addresses.

    Args of the function:
        x: (M, K), row-major, of dtype ``kind``.
        pre: (K,) f32, or 0.
        weights: (N, K) i8, row-major.
        scale: f32, one or N.
        bias: (N,) of dtype ``bias_kind``, or 0.
        out: (M, N) of dtype ``out_kind``.
        staged: scratch at a multiple of 64 for M tokens of whole steps of K bytes, and 8 bytes for each.
    """
    rows = _rows_of(form, several)
    unsigned = form == "vnni"

    def product(x, kind, pre, m, n, k, weights, scale, per_row, bias, bias_kind, out, out_kind, staged):
        padded = (k + STEP - 1) // STEP * STEP
        x_scales = staged + m * padded
        starts = x_scales + 4 * m
        if several:
            for t in prange(m):
                at = x + t * k * (4 if kind == F32_KIND else 2)
                _quantize(kind, at, pre, k, unsigned, staged + t * padded, x_scales + 4 * t, starts + 4 * t)
        else:
            _quantize(kind, x, pre, k, unsigned, staged, x_scales, starts)
        for index in prange((n + UNIT - 1) // UNIT):
            rows(index, staged, m, n, k, weights, scale, per_row, bias, bias_kind, out, out_kind, x_scales, starts)

    return jit.compiled(product, name=f"{form}_{'several' if several else 'one'}", parallel=True)


PRODUCTS = {(form, several): _product_of(form, several) for form in TOKENS for several in (False, True)}
"""By the name of a form, and whether there are several tokens."""
