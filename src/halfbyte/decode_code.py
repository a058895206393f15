"""The compiled decoder of NVFP4: rows of codes and block scales to f32, bfloat16 or float16; loaded only to run."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import prange

from halfbyte import jit
from halfbyte.numerics import BLOCK, E2M1_VALUES, E4M3_VALUES
from halfbyte.vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    I16,
    LANES,
    LANES_F32,
    LANES_I8,
    LANES_I32,
    Vectors,
    copy,
    emitted,
)

CHUNK: Final = 256 * BLOCK
"""Values whose block scales are decoded before they are."""

_PERMUTES: Final = jit.has("avx512f")
_SCALES: Final = np.array(E4M3_VALUES)


def _permuted(v: Vectors, pairs: Any) -> tuple[Any, Any]:
    """The values of 32 codes, those of even and of odd k, by a table of 16 in a register."""
    type_ = ir.FunctionType(LANES_F32, [LANES_F32, LANES_I32])
    module = v.builder.module
    name = "llvm.x86.avx512.permvar.sf.512"
    permute = module.globals.get(name) or ir.Function(module, type_, name)
    table = ir.Constant(LANES_F32, [LANES_F32.element(float(value)) for value in E2M1_VALUES])
    even, odd = (v.builder.call(permute, [table, index]) for index in (pairs, v.shr(pairs, 4)))
    return even, odd


def _computed(v: Vectors, pairs: Any) -> tuple[Any, Any]:
    """The same by arithmetic, on bfloat16 bits in lanes of 16: 0x3F00 is 0.5, and the next codes but one follow it."""
    halves = ir.VectorType(I16, 2 * LANES)
    spread = v.builder.or_(v.masked(pairs, 15), v.shl(v.masked(pairs, 0xF0), 12))
    nibbles = v.builder.bitcast(spread, halves)
    code = v.masked(nibbles, 7)
    value = v.plus(v.shl(code, 6), 0x3F00)
    value = v.select(v.above(code, 1), value, v.ints(0x3F00, halves))
    value = v.select(v.above(code, 0), value, v.ints(0, halves))
    value = v.builder.or_(value, v.shl(v.masked(nibbles, 8), 12))
    both = v.builder.bitcast(value, LANES_I32)
    return v.floated(v.shl(both, 16)), v.floated(v.masked(both, 0xFFFF0000))


def _decode_pair(kind: int) -> Any:
    def decode(v: Vectors, codes: Any, factors: Any, scale2: Any, out: Any) -> None:
        pairs = v.builder.zext(v.load(codes, LANES_I8), LANES_I32)
        two = v.load(factors, ir.VectorType(LANES_F32.element, 2))
        one = v.load(scale2, ir.VectorType(LANES_F32.element, 1))
        factor, second = v.shuffle(two, two, [0] * 8 + [1] * 8), v.shuffle(one, one, [0] * LANES)
        values = _permuted(v, pairs) if _PERMUTES else _computed(v, pairs)
        even, odd = (v.builder.fmul(v.builder.fmul(value, factor), second) for value in values)
        v.store_even_and_odd(kind, even, odd, out)

    return emitted(decode)


_pair_float, _pair_bfloat, _pair_half = (_decode_pair(kind) for kind in (FLOAT32, BFLOAT16, FLOAT16))


@jit.compiled
def decode_some(first, last, kind, codes, codes_bytes, scales, scales_bytes, k, scale2, scale2_bytes, out, out_bytes):  # type: ignore[no-untyped-def]
    """Chunks first..last of all rows.

    Arguments: the kind of the output (``vectors.KINDS``); the address and the bytes from row to row of the codes, the
    block scales, the second scales (f32; 0 bytes where all rows have one) and the output; K, all of which is written
    and nothing else.
    """
    item = 4 if kind == FLOAT32 else 2
    per_row = (k + CHUNK - 1) // CHUNK
    bytes_ = np.empty(CHUNK // BLOCK + 1, np.uint8)
    factors = np.zeros(CHUNK // BLOCK + 1, np.float32)
    padded_codes = np.zeros(2 * BLOCK // 2, np.uint8)
    padded = np.empty(2 * BLOCK * item, np.uint8)
    at = factors.ctypes.data
    for chunk in range(first, last):
        row, part = chunk // per_row, chunk % per_row
        width = min(CHUNK, k - part * CHUNK)
        blocks = (width + BLOCK - 1) // BLOCK
        copy(bytes_.ctypes.data, scales + row * scales_bytes + part * (CHUNK // BLOCK), blocks)
        for i in range(blocks):
            factors[i] = _SCALES[bytes_[i]]
        source = codes + row * codes_bytes + part * (CHUNK // 2)
        target = out + row * out_bytes + part * CHUNK * item
        second = scale2 + row * scale2_bytes
        whole = width // (2 * BLOCK) * 2
        if kind == FLOAT32:
            for i in range(0, whole, 2):
                _pair_float(source + i * 8, at + i * 4, second, target + i * 64)
        elif kind == BFLOAT16:
            for i in range(0, whole, 2):
                _pair_bfloat(source + i * 8, at + i * 4, second, target + i * 32)
        else:
            for i in range(0, whole, 2):
                _pair_half(source + i * 8, at + i * 4, second, target + i * 32)
        if whole * BLOCK < width:
            copy(padded_codes.ctypes.data, source + whole * 8, (blocks - whole) * 8)
            if kind == FLOAT32:
                _pair_float(padded_codes.ctypes.data, at + whole * 4, second, padded.ctypes.data)
            elif kind == BFLOAT16:
                _pair_bfloat(padded_codes.ctypes.data, at + whole * 4, second, padded.ctypes.data)
            else:
                _pair_half(padded_codes.ctypes.data, at + whole * 4, second, padded.ctypes.data)
            copy(target + whole * BLOCK * item, padded.ctypes.data, (width - whole * BLOCK) * item)


@jit.compiled(parallel=True)
def decode_all(  # type: ignore[no-untyped-def]
    pieces, total, kind, codes, codes_bytes, scales, scales_bytes, k, scale2, scale2_bytes, out, out_bytes
):
    """As ``decode_some``, all chunks in ``pieces``."""
    for piece in prange(pieces):
        first, last = total * piece // pieces, total * (piece + 1) // pieces
        decode_some(
            first, last, kind, codes, codes_bytes, scales, scales_bytes, k, scale2, scale2_bytes, out, out_bytes
        )
