"""Compiled products of activations with NVFP4 rows; Numba is imported here, so this is loaded only to run.

A thread takes UNIT rows at a time and all tokens; K is cut into blocks whose activations stay in the first-level
cache. Weights come from memory once, in the order in which they lie, a piece ahead of their use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, prange, types
from numba.extending import intrinsic

from halfbyte import jit
from halfbyte.kernels.cpu.tiles import GAIN, ROUND, STEP, emit_tile, staging
from halfbyte.kernels.cpu.vectors import F16, F32, Emit

NAMES = ("bf16", "halves", "fma", "portable")
FORMS = (("bf16", 1), ("bf16", 2), ("fma", 1), ("portable", 1))
BF16, HALVES, FMA, PORTABLE = range(4)
"""Numbers of the forms: of bf16 activations, of fp16 ones in two bf16 parts, and of f32."""
F32_KIND, BF16_KIND, F16_KIND = range(3)
"""Numbers of dtypes in calls."""

UNIT = 32
"""Rows that a thread takes at a time."""
K_BLOCK = 8192
"""Activations at a time: a token's fit the first-level cache."""
TOKENS = 16
"""Tokens at a time: their activations fit the second-level cache."""
AHEAD = 8192
"""Bytes of codes between what is used and what is asked for."""

_GAINS = tuple(np.float32(GAIN[form]) for form, _ in FORMS)
_STAGING = tuple(staging(form) for form, _ in FORMS)
_i64, _f32 = types.int64, types.float32
_inner = njit(nogil=True, error_model="numpy")


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(_i64), code

    return pointer


_f32_at, _u32_at, _u16_at, _u8_at = (_pointer_to(t) for t in (_f32, types.uint32, types.uint16, types.uint8))


@intrinsic
def _widen(typing: Any, bits: Any) -> Any:
    """Bits of an fp16 to f32."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fpext(builder.bitcast(values[0], F16), F32)

    return _f32(types.uint16), code


@intrinsic
def _narrow(typing: Any, value: Any) -> Any:
    """f32 to the bits of the nearest fp16."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], F16), context.get_value_type(types.uint16))

    return types.uint16(_f32), code


@intrinsic
def _bits(typing: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], context.get_value_type(types.uint32))

    return types.uint32(_f32), code


@intrinsic
def _float(typing: Any, bits: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], F32)

    return _f32(types.uint32), code


@_inner
def _get(kind, address, index):
    """Element ``index`` of an array of a dtype, as f32."""
    if kind == F32_KIND:
        return carray(_f32_at(address), index + 1)[index]
    bits = carray(_u16_at(address), index + 1)[index]
    if kind == BF16_KIND:
        return _float(np.uint32(bits) << np.uint32(16))
    return _widen(bits)


@_inner
def _put(kind, address, index, value):
    """Round to nearest even and store."""
    if kind == F32_KIND:
        carray(_f32_at(address), index + 1)[index] = value
    elif kind == BF16_KIND:
        bits = _bits(value)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        if np.isnan(value):
            rounded = (bits >> np.uint32(16)) | np.uint32(0x40)
        carray(_u16_at(address), index + 1)[index] = np.uint16(rounded)
    else:
        carray(_u16_at(address), index + 1)[index] = _narrow(value)


_WIDTH = tuple(2 * parts if form == "bf16" else 4 for form, parts in FORMS)
"""Bytes of a staged activation."""


@_inner
def _whole_rounds(k):
    return (k + ROUND - 1) // ROUND * ROUND


@_inner
def _stage(form, kind, x, pre, true_k, k, out):
    """One token's activations in the order of ``staging``, zeros after K."""
    order = _STAGING[form]
    parts = 2 if form == HALVES else 1
    words, floats = carray(_u16_at(out), 1), carray(_f32_at(out), 1)
    step = np.empty(STEP, np.float32)
    for start in range(0, _whole_rounds(k), STEP):
        size = max(0, min(STEP, true_k - start))
        for i in range(size):
            step[i] = _get(kind, x, start + i)
        if pre:
            factors = carray(_f32_at(pre + 4 * start), STEP)
            for i in range(size):
                step[i] *= factors[i]
        step[size:] = 0
        if form >= FMA:
            for place in range(STEP):
                floats[start + place] = step[order[place]]
            continue
        for place in range(STEP):
            value = step[order[place]]
            high = _bits(value) & np.uint32(0xFFFF0000)
            at = (start + place // 32 * 32) * parts + place % 32
            words[at] = np.uint16(high >> np.uint32(16))
            if form == HALVES:
                low = value - _float(high)
                if np.isnan(low):  # of an infinity, or of what is not a number already
                    low = np.float32(0)
                words[at + 32] = np.uint16(_bits(low) >> np.uint32(16))


def _tile_of(form: int, rows: int, tokens: int) -> Any:
    """``emit_tile`` as a function."""
    name, parts = FORMS[form]

    @intrinsic
    def tile(typing, codes, scales, x, rounds, next_codes, next_scales, next_token, last, ahead, ahead_scales, out):
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit_tile(Emit(builder), name, parts, rows, tokens, values)
            return context.get_dummy_value()

        return types.void(*[_i64] * 11), code

    return tile


@_inner
def _copy_rest(codes, scales, next_codes, next_scales, last, rest, tail, tail_scales):
    """What is left of four rows after their whole rounds, filled up with zeros to one round."""
    for r in range(last + 1):
        own, held = carray(_u8_at(codes + r * next_codes), 1), carray(_u8_at(tail + r * (ROUND // 2)), 1)
        for i in range(ROUND // 2):
            held[i] = own[i] if i < rest // 2 else 0
        own, held = carray(_u8_at(scales + r * next_scales), 1), carray(_u8_at(tail_scales + r * (ROUND // 16)), 1)
        for i in range(ROUND // 16):
            held[i] = own[i] if i < rest // 16 else 0


@_inner
def _add(result, rows, tokens, last, sums):
    """Add a tile of R rows, of which ``last`` + 1 exist, times T tokens to (T, UNIT)."""
    tile, total = carray(_f32_at(result), 1), carray(_f32_at(sums), 1)
    for r in range(last + 1):
        for t in range(tokens):
            total[t * UNIT + r] += tile[r * tokens + t]


@_inner
def _finish(low, high, sums, gain, scale2, per_row, bias, bias_kind, count, n, out, out_kind):
    """Sums (T, UNIT) of rows ``low`` to ``high`` to the results of T tokens."""
    total, second = carray(_f32_at(sums), 1), carray(_f32_at(scale2), 1)
    for t in range(count):
        for row in range(low, high):
            value = (total[t * UNIT + row - low] * gain) * second[row if per_row else 0]
            if bias:
                value += _get(bias_kind, bias, row)
            _put(out_kind, out, t * n + row, value)


def _name(form: int, several: bool) -> str:
    return f"{NAMES[form]}_{'several' if several else 'one'}"


def _rows_of(form: int, several: bool) -> Any:
    """The rows of one unit, from staged activations to the result."""
    width, gain = _WIDTH[form], _GAINS[form]
    one = _tile_of(form, 4, 1)
    two, four, eight = (_tile_of(form, r, t) if several else one for r, t in ((4, 2), (2, 4), (2, 8)))

    def rows(index, x, m, n, k, codes, scales, scale2, per_row, bias, bias_kind, out, out_kind, next_token):
        low = index * UNIT
        high = min(n, low + UNIT)
        memory = np.empty(2048 + 64 + 4 * TOKENS * UNIT, np.uint8)
        tail = (memory.ctypes.data + 63) // 64 * 64
        tail_scales, result, sums = tail + 4 * (ROUND // 2), tail + 1024, tail + 2048
        pieces = (k + K_BLOCK - 1) // K_BLOCK
        block = _whole_rounds((k + pieces - 1) // pieces)
        jump = 4 * max(1, AHEAD // (2 * block))
        for first in range(0, m, TOKENS):
            count = min(TOKENS, m - first)
            carray(_f32_at(sums), TOKENS * UNIT)[:] = 0
            for start in range(0, k, block):
                size = min(block, k - start)
                done = size // ROUND * ROUND
                for row in range(low, high, 4):
                    last = min(high - row, 4) - 1
                    next_codes, next_scales, rounds = k // 2, k // 16, done // ROUND
                    at_codes, at_scales = (
                        codes + row * next_codes + start // 2,
                        scales + row * next_scales + start // 16,
                    )
                    to_row, to_start = row + jump, start
                    if to_row >= high:
                        to_row, to_start = to_row - high + low, start + block
                        if to_start >= k:
                            to_row, to_start = to_row + high - low, 0
                    ahead = (to_row - row) * next_codes + (to_start - start) // 2
                    ahead_scales = (to_row - row) * next_scales + (to_start - start) // 16
                    at_x = x + first * next_token + start * width
                    for phase in range(2):  # whole rounds, then the rest as one round
                        if phase == 1:
                            rest = size - done
                            _copy_rest(at_codes + done // 2, at_scales + done // 16, next_codes, next_scales, last,
                                       rest, tail, tail_scales)  # fmt: skip
                            at_codes, at_scales, next_codes, next_scales = tail, tail_scales, ROUND // 2, ROUND // 16
                            rounds, at_x, ahead, ahead_scales = min(rest, 1), at_x + done * width, 0, 0
                        if not rounds:
                            continue
                        token = 0
                        while several and token < count - 1:
                            here, to = at_x + token * next_token, sums + 4 * (token * UNIT + row - low)
                            if count - token < 4:
                                two(at_codes, at_scales, here, rounds, next_codes, next_scales, next_token, last,
                                    ahead, ahead_scales, result)  # fmt: skip
                                _add(result, 4, 2, last, to)
                                token += 2
                                continue
                            step = 8 if count - token >= 8 else 4
                            for r in range(0, last + 1, 2):
                                c, s, final = at_codes + r * next_codes, at_scales + r * next_scales, min(last - r, 1)
                                if step == 8:
                                    eight(c, s, here, rounds, next_codes, next_scales, next_token, final, ahead,
                                          ahead_scales, result)  # fmt: skip
                                else:
                                    four(c, s, here, rounds, next_codes, next_scales, next_token, final, ahead,
                                         ahead_scales, result)  # fmt: skip
                                _add(result, 2, step, final, to + 4 * r)
                            token += step
                        if token < count:
                            here, to = at_x + token * next_token, sums + 4 * (token * UNIT + row - low)
                            one(at_codes, at_scales, here, rounds, next_codes, next_scales, next_token, last, ahead,
                                ahead_scales, result)  # fmt: skip
                            _add(result, 4, 1, last, to)
            to_out = out + first * n * (4 if out_kind == F32_KIND else 2)
            _finish(low, high, sums, gain, scale2, per_row, bias, bias_kind, count, n, to_out, out_kind)

    # Symbols of code from the cache meet in one process: two of one name would be taken for the same.
    rows.__qualname__ = f"rows_{_name(form, several)}"
    return _inner(rows)


def _product_of(form: int, several: bool) -> Any:
    """x @ weight.T for one token, or for several. Numbers of bytes and rows are i64, arrays are addresses.

    Args of the function:
        x: (M, true K), row-major, of dtype ``kind``.
        pre: (true K,) f32, or 0.
        codes, scales: those of the layout rows, for K, a multiple of 16.
        scale2: f32, one or N.
        bias: (N,) of dtype ``bias_kind``, or 0.
        out: (M, N) of dtype ``out_kind``.
        staged: scratch for M tokens of whole rounds of K, at a multiple of 64.
    """
    rows, width = _rows_of(form, several), _WIDTH[form]

    def product(x, kind, pre, m, n, true_k, k, codes, scales, scale2, per_row, bias, bias_kind, out, out_kind, staged):
        next_token = _whole_rounds(k) * width
        if m == 1:
            _stage(form, kind, x, pre, true_k, k, staged)
        else:
            for t in prange(m):
                at = x + t * true_k * (4 if kind == F32_KIND else 2)
                _stage(form, kind, at, pre, true_k, k, staged + t * next_token)
        for index in prange((n + UNIT - 1) // UNIT):
            rows(index, staged, m, n, k, codes, scales, scale2, per_row, bias, bias_kind, out, out_kind, next_token)

    return jit.compiled(product, name=_name(form, several), parallel=True)


PRODUCTS = {
    (NAMES[form], several): _product_of(form, several) for form in range(len(FORMS)) for several in (False, True)
}
"""By the name of a form, and whether there are several tokens."""
