"""The compiled quantizer: what recipes do with blocks, a chunk of 256 at a time; loaded only to run.

A chunk goes through steps whose results stay in the first-level cache: the largest magnitude of each block, scales
by a rule, codes. What is not a whole number of vectors is copied into a padded buffer first.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import prange

from halfbyte import jit
from halfbyte.numerics import BLOCK, E2M1_MAX, E4M3_MAX
from halfbyte.vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    I16,
    I32,
    LANES,
    LANES_F32,
    LANES_I8,
    LANES_I32,
    Vectors,
    bits_of,
    clear,
    copy,
    emitted,
)

CHUNK: Final = 256 * BLOCK
"""Values that go through all steps before the next ones do."""
PEAK: Final = 1024
"""Bytes that ``peaks`` takes at once."""

MODELOPT: Final = 0
BY_SCALE2: Final = 1
BY_DIVISOR: Final = 2
"""Rules: nvidia-modelopt's, and compressed-tensors' with a given scale2 or with its own divisor."""

_SMALLEST_SCALE: Final = np.float32(2.0**-9)
_SMALLEST: Final = np.finfo(np.float32).smallest_subnormal
_LARGEST_CODE: Final = np.float32(E2M1_MAX)
_ONE, _ZERO = np.float32(1), np.float32(0)


def _magnitudes(v: Vectors, kind: int, address: Any, size: int) -> list[Any]:
    """The bits of ``size`` bytes of values without their signs, in vectors of 64 bytes."""
    element, mask = (I32, 0x7FFFFFFF) if kind == FLOAT32 else (I16, 0x7FFF)
    type_ = ir.VectorType(element, 512 // element.width)
    return [v.masked(v.load(address, type_, at), mask) for at in range(0, size, 64)]


def _block_amax(v: Vectors, kind: int, address: Any, out: Any) -> None:
    found = _magnitudes(v, kind, address, 16 * BLOCK * (4 if kind == FLOAT32 else 2))
    half = BLOCK // 2
    while half:
        count = found[0].type.count
        first = [lane for lane in range(count * min(2, len(found))) if not lane & half]
        second = [lane + half for lane in first]
        pairs = [(a, b) for a, b in zip(found[::2], found[1::2], strict=True)] if len(found) > 1 else [(found[0],) * 2]
        found = [v.max(v.shuffle(a, b, first), v.shuffle(a, b, second)) for a, b in pairs]
        half //= 2
    bits = found[0]
    if kind == FLOAT32:
        v.store(v.floated(bits), out)
        return
    wide = v.builder.zext(bits, LANES_I32)
    v.store(v.floated(v.shl(wide, 16)) if kind == BFLOAT16 else v.half_to_float(wide), out)


def _peak(v: Vectors, kind: int, address: Any, top: Any) -> None:
    found = _magnitudes(v, kind, address, PEAK)
    while len(found) > 1:
        found = [v.max(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    v.store(v.max(found[0], v.load(top, found[0].type)), top)


def _e2m1(v: Vectors, x: Any) -> Any:
    """The codes of f32, in lanes of 32 bits."""
    b = v.builder
    magnitude = v.min(v.masked(v.bits(x), 0x7FFFFFFF), v.ints(bits_of(E2M1_MAX)))
    # Adding 2^22 times the power of two below it (1 or more) rounds a number to the spacing of E2M1 there.
    power = v.max(v.masked(magnitude, 0x7F800000), v.ints(bits_of(1.0)))
    large = v.plus(power, 22 << 23)
    steps = b.sub(v.bits(b.fadd(v.floated(magnitude), v.floated(large))), large)
    code = b.add(steps, v.plus(v.shr(power, 22), -254 & 0xFFFFFFFF))
    negative = b.fcmp_ordered("<", x, v.floats(0.0))
    return b.or_(code, v.select(negative, v.ints(8), v.ints(0)))


def _encode_pair(v: Vectors, kind: int, address: Any, steps: Any, out: Any) -> None:
    two = v.load(steps, ir.VectorType(LANES_F32.element, 2))
    step = v.shuffle(two, two, [0] * 8 + [1] * 8)
    even, odd = (_e2m1(v, v.builder.fdiv(x, step)) for x in v.even_and_odd(kind, address))
    v.store(v.builder.trunc(v.builder.or_(even, v.shl(odd, 4)), LANES_I8), out)


@emitted
def encode_scales(v: Vectors, wanted: Any, zero: Any, codes: Any, values: Any) -> None:
    """The E4M3FN bytes of 16 f32 that are not negative, ``zero`` in place of 0, and their values."""
    b = v.builder
    bits = v.min(v.load(wanted, LANES_I32), v.ints(bits_of(E4M3_MAX)))
    even = v.masked(v.shr(bits, 20), 1)
    normal = v.shr(b.add(v.plus(bits, 0x7FFFF - (120 << 23) & 0xFFFFFFFF), even), 20)
    sum_ = b.fadd(v.floated(bits), v.floats(2.0**14))
    tiny = v.plus(v.bits(sum_), -bits_of(2.0**14) & 0xFFFFFFFF)
    code = v.select(v.above(bits, bits_of(2.0**-6) - 1), normal, tiny)
    one = b.insert_element(ir.Constant(ir.VectorType(I32, LANES), ir.Undefined), b.trunc(zero, I32), I32(0))
    code = v.select(v.above(code, 0), code, v.shuffle(one, one, [0] * LANES))
    v.store(b.trunc(code, LANES_I8), codes)
    small = b.fmul(b.sitofp(code, LANES_F32), v.floats(2.0**-9))
    large = v.plus(v.shl(code, 20), 120 << 23)
    v.store(v.select(v.above(code, 7), v.floated(large), small), values)


@emitted
def round_bfloat(v: Vectors, address: Any) -> None:
    """16 f32 rounded to bfloat16, in place."""
    v.store(v.floated(v.masked(v.rounded_bfloat(v.load(address, LANES_F32)), 0xFFFF0000)), address)


@emitted
def round_half(v: Vectors, address: Any) -> None:
    """16 finite f32 rounded to float16, in place."""
    v.store(v.half_to_float(v.float_to_half(v.load(address, LANES_F32))), address)


def _of_kind(emit: Any, kind: int, arity: int) -> Any:
    if arity == 2:

        def two(v: Vectors, a: Any, b: Any) -> None:
            emit(v, kind, a, b)

        return emitted(two)

    def three(v: Vectors, a: Any, b: Any, c: Any) -> None:
        emit(v, kind, a, b, c)

    return emitted(three)


_amax_float, _amax_bfloat, _amax_half = (_of_kind(_block_amax, kind, 2) for kind in (FLOAT32, BFLOAT16, FLOAT16))
_pair_float, _pair_bfloat, _pair_half = (_of_kind(_encode_pair, kind, 3) for kind in (FLOAT32, BFLOAT16, FLOAT16))
_peak_float, _peak_short = _of_kind(_peak, FLOAT32, 2), _of_kind(_peak, BFLOAT16, 2)


@jit.compiled
def block_amax(kind, x, count, out):  # type: ignore[no-untyped-def]
    """The largest magnitude of each block as f32; ``count`` is a multiple of 16, x and out are addresses."""
    for i in range(0, count, 16):
        if kind == FLOAT32:
            _amax_float(x + i * 64, out + i * 4)
        elif kind == BFLOAT16:
            _amax_bfloat(x + i * 32, out + i * 4)
        else:
            _amax_half(x + i * 32, out + i * 4)


@jit.compiled
def encode_blocks(kind, x, count, steps, codes):  # type: ignore[no-untyped-def]
    """The packed codes of blocks divided by their steps; ``count`` is even, all else addresses."""
    for i in range(0, count, 2):
        if kind == FLOAT32:
            _pair_float(x + i * 64, steps + i * 4, codes + i * 8)
        elif kind == BFLOAT16:
            _pair_bfloat(x + i * 32, steps + i * 4, codes + i * 8)
        else:
            _pair_half(x + i * 32, steps + i * 4, codes + i * 8)


@jit.compiled
def choose_scales(kind, rule, scale2, divisor, amax, count, scales, steps):  # type: ignore[no-untyped-def]
    """By rtn's rule, the scale bytes and the steps of blocks, and the largest scale that one wanted.

    ``amax`` (f32) becomes what the scales are rounded from; ``count`` is a multiple of 16.
    """
    top = _ZERO
    if rule == MODELOPT:
        full = _LARGEST_CODE * scale2
        for i in range(count):
            amax[i] = amax[i] / full
        for i in range(count):
            top = amax[i] if amax[i] > top else top
        for i in range(count):
            wanted = amax[i] if amax[i] != _ZERO else _ONE
            amax[i] = wanted if wanted > _SMALLEST_SCALE else _SMALLEST_SCALE
    else:
        for i in range(count):
            amax[i] = amax[i] / _LARGEST_CODE
        if kind != FLOAT32:
            for i in range(0, count, 16):
                if kind == BFLOAT16:
                    round_bfloat(amax.ctypes.data + i * 4)
                else:
                    round_half(amax.ctypes.data + i * 4)
        if rule == BY_SCALE2:
            for i in range(count):
                amax[i] = amax[i] / scale2
        else:
            for i in range(count):
                amax[i] = divisor * amax[i]
        for i in range(count):
            top = amax[i] if amax[i] > top else top
    for i in range(0, count, 16):
        encode_scales(amax.ctypes.data + i * 4, 0x20, scales.ctypes.data + i, steps.ctypes.data + i * 4)
    if rule == BY_DIVISOR:
        for i in range(count):
            steps[i] = steps[i] / divisor
    else:
        for i in range(count):
            steps[i] = steps[i] * scale2
    for i in range(count):
        steps[i] = steps[i] if steps[i] > _SMALLEST else _SMALLEST
    return top


@jit.compiled
def encode_some(first, last, kind, x, row_bytes, k, rule, scale2, divisor, codes, scales):  # type: ignore[no-untyped-def]
    """Chunks first..last of all rows; the largest scale that a block wanted. x, codes and scales are addresses."""
    item = 4 if kind == FLOAT32 else 2
    per_row = (k + CHUNK - 1) // CHUNK
    row_blocks = (k + BLOCK - 1) // BLOCK
    padded_x = np.empty(CHUNK * item, np.uint8)
    padded_codes = np.empty(CHUNK // 2, np.uint8)
    chunk_scales = np.empty(CHUNK // BLOCK, np.uint8)
    amax = np.empty(CHUNK // BLOCK, np.float32)
    steps = np.empty(CHUNK // BLOCK, np.float32)
    top = _ZERO
    for chunk in range(first, last):
        row, part = chunk // per_row, chunk % per_row
        width = min(CHUNK, k - part * CHUNK)
        blocks = (width + BLOCK - 1) // BLOCK
        whole = (blocks + 15) // 16 * 16
        source = x + row * row_bytes + part * CHUNK * item
        place = row * row_blocks + part * (CHUNK // BLOCK)
        target = codes + place * (BLOCK // 2)
        if whole * BLOCK != width:
            clear(padded_x.ctypes.data, whole * BLOCK * item)
            copy(padded_x.ctypes.data, source, width * item)
            source, target = padded_x.ctypes.data, padded_codes.ctypes.data
        block_amax(kind, source, whole, amax.ctypes.data)
        wanted = choose_scales(kind, rule, scale2, divisor, amax, whole, chunk_scales, steps)
        top = wanted if wanted > top else top
        encode_blocks(kind, source, whole, steps.ctypes.data, target)
        if whole * BLOCK != width:
            copy(codes + place * (BLOCK // 2), target, blocks * (BLOCK // 2))
        copy(scales + place, chunk_scales.ctypes.data, blocks)
    return top


@jit.compiled
def peaks(first, last, kind, x, row_bytes, k, top):  # type: ignore[no-untyped-def]
    """Chunks first..last of all rows: the largest bits without their sign, in each of the lanes of 64 bytes at top."""
    item = 4 if kind == FLOAT32 else 2
    per_row = (k + CHUNK - 1) // CHUNK
    padded = np.empty(PEAK, np.uint8)
    for chunk in range(first, last):
        row, part = chunk // per_row, chunk % per_row
        size = min(CHUNK, k - part * CHUNK) * item
        source = x + row * row_bytes + part * CHUNK * item
        for at in range(0, size, PEAK):
            address = source + at
            if size - at < PEAK:
                clear(padded.ctypes.data, PEAK)
                copy(padded.ctypes.data, address, size - at)
                address = padded.ctypes.data
            if kind == FLOAT32:
                _peak_float(address, top)
            else:
                _peak_short(address, top)


@jit.compiled(parallel=True)
def encode_all(total, kind, x, row_bytes, k, rule, scale2, divisor, codes, scales, tops):  # type: ignore[no-untyped-def]
    """As ``encode_some``, all chunks in as many pieces as ``tops`` (f32) has room for."""
    pieces = tops.size
    for piece in prange(pieces):
        first, last = total * piece // pieces, total * (piece + 1) // pieces
        tops[piece] = encode_some(first, last, kind, x, row_bytes, k, rule, scale2, divisor, codes, scales)


@jit.compiled(parallel=True)
def peaks_all(total, kind, x, row_bytes, k, tops):  # type: ignore[no-untyped-def]
    """As ``peaks``, all chunks in as many pieces as ``tops`` (u8) has rows of 64."""
    pieces = tops.shape[0]
    for piece in prange(pieces):
        first, last = total * piece // pieces, total * (piece + 1) // pieces
        peaks(first, last, kind, x, row_bytes, k, tops.ctypes.data + 64 * piece)
