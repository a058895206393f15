"""``experts`` compiled; Numba is imported here, so this is loaded only to run.

Slots are sorted by the place of their expert, then by their number. Then all rows of all experts that have tokens are
computed in one parallel region, and all rows of their ``down`` in another: an item of either is some rows of an expert
times up to TOKENS of its tokens. An item's sums are those of ``product_code``, each token's in an order that depends on
nothing but the shape; so does its result.

Arrays are addresses, sizes are i64, and what is the same in all calls is a record of them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit, prange, types

from halfbyte import jit
from halfbyte.kernels.cpu.activation_code import activate
from halfbyte.kernels.cpu.product_code import (
    FEW,
    GAINS,
    TOKENS,
    UNIT,
    call_at,
    reads,
    stage_one,
    sums_memory,
    whole_rounds,
    writes,
)
from halfbyte.kernels.cpu.scalars import F32_KIND, f32_at, float_of, read, write
from halfbyte.numerics import BLOCK

CONCATENATED, UP_FIRST, INTERLEAVED, UNGATED = range(4)

_ITEMS = 16
"""Items for each thread, where there are rows enough."""

(
    TOP, EXPERTS, HELD, PLACES, WIDE_IDS, WEIGHTS_KIND, KIND, FORM, WIDTH, UNIT_CODE, STAGE_CODE, ORDER,
    ACTIVATION, LIMITED, LIMIT, OUT_KIND, HIDDEN, INNER, PRE, DOWN_PRE, CODES, SCALES, SCALE2, PER_ROW, BIAS, BIAS_KIND,
    DOWN_CODES, DOWN_SCALES, DOWN_SCALE2, DOWN_PER_ROW, DOWN_BIAS, DOWN_BIAS_KIND, SORTED, POSITION, CURSOR,
    PLACE, FIRST, CHUNK, X, H, Y,
) = range(41)  # fmt: skip
"""What is the same in all calls. Sizes, numbers and addresses of ``halfbyte.kernels.experts.ExpertsArgs``, then:

- places: (experts,) i32, the place of each expert in the stacks by its number, or -1;
- limit: the bits of an f32, where ``limited``;
- unit_code, stage_code: the addresses of the parts of ``product_code``;
- sorted: and all that follow, where they begin in the scratch of a call: slots by the place of their expert, i64; of
  each slot where it is among those, or -1; for each expert held where its next slot goes; of the experts that have
  slots the place, the first slot, and the first group of up to TOKENS; then staged activations, staged h, and y in f32.
"""

_get, _set, _get_i32 = reads(types.int64), writes(types.int64), reads(types.int32)
_get_f32, _set_f32 = reads(types.float32), writes(types.float32)
_plain = njit(nogil=True, error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_plain
def _size(kind):
    return 4 if kind == F32_KIND else 2


@jit.compiled
def _sort(fixed, tokens, ids, scratch):
    """Fill ``sorted`` to ``chunk``; how many experts have slots."""
    slots, experts, held = tokens * _get(fixed, TOP), _get(fixed, EXPERTS), _get(fixed, HELD)
    order, position = scratch + _get(fixed, SORTED), scratch + _get(fixed, POSITION)
    cursor, place = scratch + _get(fixed, CURSOR), scratch + _get(fixed, PLACE)
    first, chunk = scratch + _get(fixed, FIRST), scratch + _get(fixed, CHUNK)
    places, wide = _get(fixed, PLACES), _get(fixed, WIDE_IDS)
    for p in range(held):
        _set(cursor, p, 0)
    for slot in range(slots):
        e = _get(ids, slot) if wide else np.int64(_get_i32(ids, slot))
        p = np.int64(_get_i32(places, e)) if 0 <= e < experts else np.int64(-1)
        _set(position, slot, p)
        if p >= 0:
            _set(cursor, p, _get(cursor, p) + 1)
    touched, start, chunks = 0, 0, 0
    for p in range(held):
        count = _get(cursor, p)
        if count:
            _set(place, touched, p)
            _set(first, touched, start)
            _set(chunk, touched, chunks)
            _set(cursor, p, start)
            start += count
            chunks += (count + TOKENS - 1) // TOKENS
            touched += 1
    _set(first, touched, start)
    _set(chunk, touched, chunks)
    for slot in range(slots):
        p = _get(position, slot)
        if p >= 0:
            at = _get(cursor, p)
            _set(position, slot, at)
            _set(order, at, slot)
            _set(cursor, p, at + 1)
    return touched


@_plain
def _item(fixed, scratch, touched, n, rows, index):
    """Place, first token and number of tokens, and rows of an item: by expert, then rows, then tokens."""
    blocks = (n + rows - 1) // rows
    first, chunk = scratch + _get(fixed, FIRST), scratch + _get(fixed, CHUNK)
    at, end = 0, touched
    while end - at > 1:
        middle = (at + end) // 2
        if blocks * _get(chunk, middle) <= index:
            at = middle
        else:
            end = middle
    chunks, own = _get(chunk, at + 1) - _get(chunk, at), index - blocks * _get(chunk, at)
    start = _get(first, at) + own % chunks * TOKENS
    low = own // chunks * rows
    place = _get(scratch + _get(fixed, PLACE), at)
    return place, start, min(TOKENS, _get(first, at + 1) - start), low, min(n, low + rows)


@njit(nogil=True, error_model="numpy")
def _multiply(fixed, which, place, n, k, x, next_token, count, low, high, then_place, then_row, sums):
    """Results (T, UNIT) f32 of some rows of the expert at a place; ``which`` is 0 for gate and up, else for down.

    The rows that the next item begins with are asked for at the end.
    """
    all_codes, all_scales = _get(fixed, CODES + which), _get(fixed, SCALES + which)
    then = then_place * n + then_row
    codes, scales = all_codes + place * n * (k // 2), all_scales + place * n * (k // 16)
    per_row = _get(fixed, PER_ROW + which)
    scale2 = _get(fixed, SCALE2 + which) + place * 4 * (n if per_row else 1)
    bias, bias_kind = _get(fixed, BIAS + which), _get(fixed, BIAS_KIND + which)
    if bias:
        bias += place * n * _size(bias_kind)
    then_codes, then_scales = all_codes + then * (k // 2), all_scales + then * (k // 16)
    call_at(_get(fixed, UNIT_CODE), (low, high, x, count, k, codes, scales, next_token, then_codes, then_scales, sums))
    gain, rows, whole = GAINS[_get(fixed, FORM)], high - low, carray(f32_at(scale2), n if per_row else 1)
    added = np.empty(UNIT if bias else 0, np.float32)
    if bias:
        read(bias_kind, bias + low * _size(bias_kind), rows, added)
    for t in range(count):
        values = carray(f32_at(sums + 4 * t * UNIT), UNIT)
        if per_row:
            for i in range(rows):
                values[i] = values[i] * gain * whole[low + i]
        else:
            for i in range(rows):
                values[i] = values[i] * gain * whole[0]
        if bias:
            for i in range(rows):
                values[i] += added[i]


@_plain
def _whole_blocks(k):
    return (k + BLOCK - 1) // BLOCK * BLOCK


@jit.compiled
def _up(fixed, scratch, touched, next_token, rows, items, index):
    """An item of gate and up: some values of h, staged."""
    inner, order, kind, form = _get(fixed, INNER), _get(fixed, ORDER), _get(fixed, KIND), _get(fixed, FORM)
    place, start, count, low, high = _item(fixed, scratch, touched, inner, rows, index)
    then_place, _, _, then_low, _ = _item(fixed, scratch, touched, inner, rows, min(index + 1, items - 1))
    k, m, n = _whole_blocks(_get(fixed, HIDDEN)), high - low, inner if order == UNGATED else 2 * inner
    x = scratch + _get(fixed, X) + start * next_token
    gates, ups = sums_memory(), sums_memory()
    halves = 2 if order < INTERLEAVED else 1
    for half in range(halves):
        begin, end, follows, row = low, high, then_place, then_low
        if order == INTERLEAVED:
            begin, end, row = 2 * low, 2 * high, 2 * then_low
        elif order != UNGATED:
            first, second = inner * (order == UP_FIRST), inner * (order != UP_FIRST)
            begin, end, row = low + first, high + first, low + second
            follows = place
            if half:
                begin, end, follows, row = low + second, high + second, then_place, then_low + first
        _multiply(fixed, 0, place, n, k, x, next_token, count, begin, end, follows, row, ups if half else gates)
    factor, limit = _get(fixed, DOWN_PRE), float_of(np.uint32(_get(fixed, LIMIT)))
    whole = whole_rounds(_whole_blocks(inner))
    h = scratch + _get(fixed, H) + start * whole * _get(fixed, WIDTH)
    for t in range(count):
        gate, up = carray(f32_at(gates + 4 * t * UNIT), UNIT), carray(f32_at(ups + 4 * t * UNIT), UNIT)
        if order == INTERLEAVED:
            for i in range(m):
                up[i] = gate[2 * i + 1]
            for i in range(m):
                gate[i] = gate[2 * i]
        elif order == UNGATED:
            for i in range(m):
                up[i] = np.float32(1)
        if _get(fixed, LIMITED):
            for i in range(m):
                gate[i] = limit if gate[i] > limit else gate[i]
                up[i] = limit if up[i] > limit else -limit if up[i] < -limit else up[i]
        activate(_get(fixed, ACTIVATION), gate, up, m)
        if kind != F32_KIND:
            write(kind, ups + 4 * t * UNIT, m, gate)
        for i in range(m):
            value = gate[i] * _get_f32(factor, low + i) if factor else gate[i]
            stage_one(form, h, low + i, value)
        if high == inner:
            for i in range(inner, whole):
                stage_one(form, h, i, np.float32(0))
        h += whole * _get(fixed, WIDTH)
    return 0


@jit.compiled
def _down(fixed, scratch, touched, rows, items, index):
    """An item of down: some values of y."""
    hidden, k = _get(fixed, HIDDEN), _whole_blocks(_get(fixed, INNER))
    place, start, count, low, high = _item(fixed, scratch, touched, hidden, rows, index)
    then_place, _, _, then_low, _ = _item(fixed, scratch, touched, hidden, rows, min(index + 1, items - 1))
    next_h, sums = whole_rounds(k) * _get(fixed, WIDTH), sums_memory()
    h = scratch + _get(fixed, H) + start * next_h
    _multiply(fixed, DOWN_CODES - CODES, place, hidden, k, h, next_h, count, low, high, then_place, then_low, sums)
    y = scratch + _get(fixed, Y) + 4 * start * hidden
    for t in range(count):
        for i in range(high - low):
            _set_f32(y, t * hidden + low + i, _get_f32(sums, t * UNIT + i))
    return 0


@jit.compiled
def _combine(fixed, scratch, token, weights, out):
    """The result of a token: of each slot its weight times y, added in order."""
    hidden, top, kind = _get(fixed, HIDDEN), _get(fixed, TOP), _get(fixed, OUT_KIND)
    total, weight, weights_kind = np.zeros(hidden, np.float32), np.empty(1, np.float32), _get(fixed, WEIGHTS_KIND)
    for slot in range(token * top, (token + 1) * top):
        at = _get(scratch + _get(fixed, POSITION), slot)
        if at >= 0:
            read(weights_kind, weights + slot * _size(weights_kind), 1, weight)
            y = carray(f32_at(scratch + _get(fixed, Y) + 4 * at * hidden), hidden)
            for i in range(hidden):
                total[i] += weight[0] * y[i]
    write(kind, out + token * hidden * _size(kind), hidden, total)
    return 0


@_plain
def _rows(n, chunks, threads):
    """Rows of an item: as many as leave items enough for all threads."""
    rows = UNIT // 2
    while rows > FEW and (n + rows - 1) // rows * chunks < _ITEMS * threads:
        rows //= 2
    return rows


@functools.partial(jit.compiled, parallel=True)
def _experts(sort, up, down, combine, threads, fixed, tokens, x, ids, weights, out, scratch):
    form, kind, pre, stage = _get(fixed, FORM), _get(fixed, KIND), _get(fixed, PRE), _get(fixed, STAGE_CODE)
    inner, hidden, top = _get(fixed, INNER), _get(fixed, HIDDEN), _get(fixed, TOP)
    k, size = _whole_blocks(hidden), hidden * _size(kind)
    staged, order, next_token = scratch + _get(fixed, X), scratch + _get(fixed, SORTED), 0
    touched = call_at(sort, (fixed, tokens, ids, scratch))
    slots = _get(scratch + _get(fixed, FIRST), touched)
    chunks = _get(scratch + _get(fixed, CHUNK), touched)
    if tokens == 1:  # whose slots share it
        call_at(stage, (form, kind, x, pre, hidden, k, staged))
    else:
        next_token = whole_rounds(k) * _get(fixed, WIDTH)
        for i in prange(slots):
            token = _get(order, i) // top
            call_at(stage, (form, kind, x + token * size, pre, hidden, k, staged + i * next_token))
    rows = _rows(inner, chunks, threads)
    items = (inner + rows - 1) // rows * chunks
    for index in prange(items):
        call_at(up, (fixed, scratch, touched, next_token, rows, items, index))
    down_rows = _rows(hidden, chunks, threads)
    down_items = (hidden + down_rows - 1) // down_rows * chunks
    for index in prange(down_items):
        call_at(down, (fixed, scratch, touched, down_rows, down_items, index))
    if tokens == 1:
        call_at(combine, (fixed, scratch, 0, weights, out))
    else:
        for token in prange(tokens):
            call_at(combine, (fixed, scratch, token, weights, out))


@functools.cache
def experts() -> Any:
    """Compiled parallel code, for ``jit.run``.

    Its arguments are how many threads there are, (41,) i64 of what is the same in all calls, T, hidden, indices,
    weights, out, and scratch at a multiple of 64.
    """
    codes = ((_sort, 4), (_up, 7), (_down, 6), (_combine, 5))
    return functools.partial(_experts, *[jit.address_of(code, types.int64(*[types.int64] * n)) for code, n in codes])
