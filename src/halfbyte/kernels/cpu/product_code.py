"""Compiled products of activations with NVFP4 rows; Numba is imported here, so this is loaded only to run.

A thread takes some rows at a time and all tokens; K is cut into blocks whose activations stay in the first-level
cache. Weights come from memory once, in the order in which they lie, a piece ahead of their use.

``_product`` is compiled once; a unit's sums, once for each form, for one token and for several. It calls them by
address: by name, there would be machine code of each at every level of its loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from halfbyte import jit
from halfbyte.kernels.cpu.scalars import BF16_KIND, F32_KIND, bits_of, float_of, narrow, widen
from halfbyte.kernels.cpu.tiles import GAIN, ROUND, STEP, emit_sums, emit_tile, staging
from halfbyte.kernels.cpu.vectors import I8, I64, Emit

NAMES = ("bf16", "halves", "fma", "portable")
FORMS = (("bf16", 1), ("bf16", 2), ("fma", 1), ("portable", 1))
BF16, HALVES, FMA, PORTABLE = range(4)
"""Numbers of the forms: of bf16 activations, of fp16 ones in two bf16 parts, and of f32."""
FEW, UNIT, MANY = 32, 128, 4096
"""Rows that a thread takes at a time: UNIT where more than TOKENS tokens meet MANY rows, so that activations are read
less often; else FEW, so that all threads have some."""
K_BLOCK = 8192
"""Activations at a time: a token's fit the first-level cache."""
TOKENS = 16
"""Tokens at a time: their activations fit the second-level cache."""
AHEAD = 4096
"""Bytes of codes at the least between what is used and what is asked for."""

GAINS = tuple(np.float32(GAIN[form]) for form, _ in FORMS)
WIDTHS = tuple(2 * parts if form == "bf16" else 4 for form, parts in FORMS)
"""Bytes of a staged activation."""
_STAGING = np.array([staging(form) for form, _ in FORMS])
_PLACES = np.argsort(_STAGING, axis=1)
_i64, _f32 = types.int64, types.float32
_inner = njit(nogil=True, error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _place(context: Any, builder: Any, element: Any, address: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, context.get_value_type(element).as_pointer()), [index])


def reads(element: Any) -> Any:
    """A function for element ``index`` of an array, given its address."""

    @intrinsic
    def read(typing: Any, address: Any, index: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.load(_place(context, builder, element, *values))

        return element(_i64, _i64), code

    return read


def writes(element: Any) -> Any:
    """A function that sets element ``index`` of an array, given its address."""

    @intrinsic
    def write(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            builder.store(values[2], _place(context, builder, element, *values[:2]))
            return context.get_dummy_value()

        return types.void(_i64, _i64, element), code

    return write


_read_f32, _read_u16, _read_u8 = (reads(t) for t in (_f32, types.uint16, types.uint8))
_write_f32, _write_u16, _write_u8 = (writes(t) for t in (_f32, types.uint16, types.uint8))


def _stack_of(nbytes: int) -> Any:
    """The address of memory of the function that asks, at a multiple of 64."""

    @intrinsic
    def stack(typing: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            with builder.goto_entry_block():
                memory = builder.alloca(ir.ArrayType(I8, nbytes))  # alloca_once would clear it, byte by byte
            memory.align = 64
            return builder.ptrtoint(memory, I64)

        return _i64(), code

    return stack


_step_memory = _stack_of(4 * STEP)
_SUMS = 4 * TOKENS * UNIT
sums_memory = _stack_of(_SUMS)
_TAIL = 4 * (ROUND // 2 + ROUND // 16)
_tail_memory = _stack_of(_TAIL)
"""What is left of four rows after whole rounds."""
_lanes_memory = _stack_of(64 * UNIT)
"""The sums of one token before their lanes are added up."""


@_inner
def _get(kind, address, index):
    """Element ``index`` of an array of a dtype, as f32."""
    if kind == F32_KIND:
        return _read_f32(address, index)
    bits = _read_u16(address, index)
    if kind == BF16_KIND:
        return float_of(np.uint32(bits) << np.uint32(16))
    return widen(bits)


@_inner
def _put(kind, address, index, value):
    """Round to nearest even and store."""
    if kind == F32_KIND:
        _write_f32(address, index, value)
    elif kind == BF16_KIND:
        bits = bits_of(value)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        if np.isnan(value):
            rounded = (bits >> np.uint32(16)) | np.uint32(0x40)
        _write_u16(address, index, np.uint16(rounded))
    else:
        _write_u16(address, index, narrow(value))


@_inner
def whole_rounds(k):
    """K filled up."""
    return (k + ROUND - 1) // ROUND * ROUND


@_inner
def _stage_parts(form, out, place, value):
    """One bf16, or two that add up, at a place among those of steps."""
    high = bits_of(value) & np.uint32(0xFFFF0000)
    at = place // 32 * 32 * (2 if form == HALVES else 1) + place % 32
    _write_u16(out, at, np.uint16(high >> np.uint32(16)))
    if form == HALVES:
        low = value - float_of(high)
        if np.isnan(low):  # of an infinity, or of what is not a number already
            low = np.float32(0)
        _write_u16(out, at + 32, np.uint16(bits_of(low) >> np.uint32(16)))


@jit.compiled
def _stage(form, kind, x, pre, true_k, k, out):
    """One token's activations in the order of ``staging``, zeros after K."""
    step = _step_memory()
    for start in range(0, whole_rounds(k), STEP):
        size = max(0, min(STEP, true_k - start))
        if size == STEP and not pre and form == BF16 and kind == BF16_KIND:
            for place in range(STEP):
                _write_u16(out, start + place, _read_u16(x, start + _STAGING[form, place]))
            continue
        if size == STEP and not pre and form >= FMA and kind == F32_KIND:
            for place in range(STEP):
                _write_f32(out, start + place, _read_f32(x, start + _STAGING[form, place]))
            continue
        for i in range(size):
            _write_f32(step, i, _get(kind, x, start + i))
        if pre:
            for i in range(size):
                _write_f32(step, i, _read_f32(step, i) * _read_f32(pre, start + i))
        for i in range(size, STEP):
            _write_f32(step, i, np.float32(0))
        if form >= FMA:
            for place in range(STEP):
                _write_f32(out, start + place, _read_f32(step, _STAGING[form, place]))
            continue
        for place in range(STEP):
            _stage_parts(form, out, start + place, _read_f32(step, _STAGING[form, place]))
    return 0


@_inner
def stage_one(form, out, index, value):
    """Put one activation where ``_stage`` would; of ``bf16`` it is one already."""
    place = index // STEP * STEP + _PLACES[form, index % STEP]
    if form >= FMA:
        _write_f32(out, place, value)
    else:
        _stage_parts(form, out, place, value)


def _tile_of(form: int, rows: int, tokens: int) -> Any:
    """``emit_tile`` as a function."""
    name, parts = FORMS[form]

    @intrinsic
    def tile(typing, codes, scales, x, rounds, next_codes, next_scales, next_token, last, ahead, ahead_scales, out):
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit_tile(Emit(builder), name, parts, rows, tokens, 4 * UNIT, values)
            return context.get_dummy_value()

        return types.void(*[_i64] * 11), code

    return tile


@intrinsic
def _add_lanes(typing: Any, lanes: Any, out: Any) -> Any:
    """``emit_sums`` as a function."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit_sums(Emit(builder), *values)
        return context.get_dummy_value()

    return types.void(_i64, _i64), code


@_inner
def _copy_rest(codes, scales, next_codes, next_scales, last, rest, tail, tail_scales):
    """What is left of four rows after their whole rounds, filled up with zeros to one round."""
    for r in range(last + 1):
        for i in range(ROUND // 2):
            code = _read_u8(codes + r * next_codes, i) if i < rest // 2 else np.uint8(0)
            _write_u8(tail + r * (ROUND // 2), i, code)
        for i in range(ROUND // 16):
            scale = _read_u8(scales + r * next_scales, i) if i < rest // 16 else np.uint8(0)
            _write_u8(tail_scales + r * (ROUND // 16), i, scale)


@jit.compiled
def _finish(form, low, high, sums, scale2, per_row, bias, bias_kind, count, n, out, out_kind):
    """Sums (T, UNIT) of rows ``low`` to ``high`` to the results of T tokens."""
    gain = GAINS[form]
    for t in range(count):
        for row in range(low, high):
            value = (_read_f32(sums, t * UNIT + row - low) * gain) * _read_f32(scale2, row if per_row else 0)
            if bias:
                value += _get(bias_kind, bias, row)
            _put(out_kind, out, t * n + row, value)
    return 0


def _unit_of(form: int, several: bool, alike: bool = False) -> Any:
    """The sums (T, UNIT) of rows ``low`` to ``high`` and up to TOKENS tokens, without gain.

    At its end it asks for what ``then_codes`` and ``then_scales`` say comes next, in rows of the same size. Where
    ``alike``, the sums of a token do not depend on how many there are: eight f32 tokens at once would be added
    otherwise, four and fewer are not.
    """
    eights = not (alike and form >= FMA)
    width = WIDTHS[form]
    one = _tile_of(form, 4, 1)
    two, four, eight = (_tile_of(form, r, t) if several else one for r, t in ((4, 2), (2, 4), (2, 8)))

    def unit(low, high, x, count, k, codes, scales, next_token, then_codes, then_scales, sums):
        tail, lanes = _tail_memory(), _lanes_memory()
        tail_scales = tail + 4 * (ROUND // 2)
        for i in range(count * UNIT):
            _write_f32(sums, i, np.float32(0))
        pieces = (k + K_BLOCK - 1) // K_BLOCK
        block = whole_rounds((k + pieces - 1) // pieces)
        jump = 4 * (1 + max(1, AHEAD // (2 * block)))  # of four rows the last is asked for last, and used at once
        for start in range(0, k, block):
            size = min(block, k - start)
            done = size // ROUND * ROUND
            for phase in range(2):  # whole rounds, then the rest as one round
                rounds, rest = (done // ROUND, 0) if phase == 0 else (1, size - done)
                if rounds == 0 or (phase == 1 and rest == 0):
                    continue
                at_x = x + (start + phase * done) * width
                for row in range(low, high, 4):
                    last = min(high - row, 4) - 1
                    next_codes, next_scales = k // 2, k // 16
                    at_codes = codes + row * next_codes + start // 2
                    at_scales = scales + row * next_scales + start // 16
                    if phase == 0:
                        to_row, to_start = row + jump, start
                        if to_row >= high:
                            to_row, to_start = to_row - high + low, start + block
                        ahead = (to_row - row) * next_codes + (to_start - start) // 2
                        ahead_scales = (to_row - row) * next_scales + (to_start - start) // 16
                        if to_start >= k:
                            ahead = then_codes + (to_row - low) * next_codes - at_codes
                            ahead_scales = then_scales + (to_row - low) * next_scales - at_scales
                    else:
                        _copy_rest(at_codes + done // 2, at_scales + done // 16, next_codes, next_scales, last,
                                   rest, tail, tail_scales)  # fmt: skip
                        at_codes, at_scales, next_codes, next_scales = tail, tail_scales, ROUND // 2, ROUND // 16
                        ahead, ahead_scales = 0, 0
                    token = 0
                    while several and token < count - 1:
                        here, to = at_x + token * next_token, sums + 4 * (token * UNIT + row - low)
                        if count - token < 4:
                            two(at_codes, at_scales, here, rounds, next_codes, next_scales, next_token, last,
                                ahead, ahead_scales, to)  # fmt: skip
                            token += 2
                            continue
                        step = 8 if eights and count - token >= 8 else 4
                        for r in range(0, last + 1, 2):
                            c, s, final = at_codes + r * next_codes, at_scales + r * next_scales, min(last - r, 1)
                            if step == 8:
                                eight(c, s, here, rounds, next_codes, next_scales, next_token, final, ahead,
                                      ahead_scales, to + 4 * r)  # fmt: skip
                            else:
                                four(c, s, here, rounds, next_codes, next_scales, next_token, final, ahead,
                                     ahead_scales, to + 4 * r)  # fmt: skip
                        token += step
                    if token < count:
                        one(at_codes, at_scales, at_x + token * next_token, rounds, next_codes, next_scales,
                            next_token, last, ahead, ahead_scales, lanes + 64 * (row - low))  # fmt: skip
                if not several or count % 2:
                    for row in range(0, high - low, 16):
                        _add_lanes(lanes + 64 * row, sums + 4 * ((count - 1) * UNIT + row))
        return 0

    return jit.compiled(unit, name=f"{NAMES[form]}_{'alike' if alike else 'several' if several else 'one'}")


def _numbers(count: int) -> Any:
    """The signature of a function of i64."""
    return _i64(*[_i64] * count)


@intrinsic
def call_at(typing: Any, function: Any, args: Any) -> Any:
    """Call a function of i64, given its address and a tuple."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(I64, [I64] * len(args)).as_pointer()
        return builder.call(builder.inttoptr(values[0], kind), cgutils.unpack_tuple(builder, values[1]))

    return _i64(_i64, args), code


@functools.partial(jit.compiled, parallel=True)
def _product(
    unit, stage, finish, form, width, x, kind, pre, m, n, true_k, k, codes, scales, scale2, per_row, bias, bias_kind,
    out, out_kind, staged,
):  # fmt: skip
    next_token = whole_rounds(k) * width
    if m == 1:
        call_at(stage, (form, kind, x, pre, true_k, k, staged))
    else:
        for t in prange(m):
            at = x + t * true_k * (4 if kind == F32_KIND else 2)
            call_at(stage, (form, kind, at, pre, true_k, k, staged + t * next_token))
    size = UNIT if m > TOKENS and n >= MANY else FEW
    for index in prange((n + size - 1) // size):
        low = index * size
        high = min(n, low + size)
        sums, then_codes, then_scales = sums_memory(), codes + high * (k // 2), scales + high * (k // 16)
        for first in range(0, m, TOKENS):
            count = min(TOKENS, m - first)
            x = staged + first * next_token
            call_at(unit, (low, high, x, count, k, codes, scales, next_token, then_codes, then_scales, sums))
            to = out + first * n * (4 if out_kind == F32_KIND else 2)
            call_at(finish, (form, low, high, sums, scale2, per_row, bias, bias_kind, count, n, to, out_kind))


_units = {(form, several): _unit_of(form, several) for form in range(len(FORMS)) for several in (False, True)}
_alike = [_unit_of(form, True, alike=True) if form >= FMA else _units[form, True] for form in range(len(FORMS))]


def parts(name: str) -> tuple[int, int, int, int]:
    """The number of a form, the bytes of a staged activation, and the addresses of its alike unit and of ``_stage``."""
    form = NAMES.index(name)
    codes = ((_alike[form], 11), (_stage, 7))
    unit, stage = (jit.address_of(code, _numbers(count)) for code, count in codes)
    return form, WIDTHS[form], unit, stage


@functools.cache
def product(name: str, several: bool) -> Callable[..., None]:
    """x @ weight.T for one token, or for several, compiled. Numbers of bytes and rows are i64, arrays are addresses.

    Args:
        name: of the form.
        several: there is more than one token.

    Returns:
        Parallel code, for ``jit.run``, with these arguments:

        - x: (M, true K), row-major, of dtype ``kind``;
        - pre: (true K,) f32, or 0;
        - m, n, true_k, and k, a multiple of 16;
        - codes, scales: those of the layout rows, for K;
        - scale2: f32, N of them where ``per_row``;
        - bias: (N,) of dtype ``bias_kind``, or 0;
        - out: (M, N) of dtype ``out_kind``;
        - staged: scratch for M tokens of whole rounds of K, at a multiple of 64.
    """
    form = NAMES.index(name)
    unit, stage, finish = (
        jit.address_of(code, _numbers(count))
        for code, count in ((_units[form, several], 11), (_stage, 7), (_finish, 12))
    )
    return functools.partial(_product, unit, stage, finish, form, WIDTHS[form])
