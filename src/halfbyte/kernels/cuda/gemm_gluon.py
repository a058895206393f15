"""(docstring to come)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from halfbyte.kernels.base import Call
from halfbyte.kernels.cuda.decode_gluon import decode_code
from halfbyte.kernels.cuda.fragments import TILE, TYPES, UNIT
from halfbyte.layouts.fragments import FACTOR, SCALE

NAME: Final = "gluon-gemm"


@dataclass(frozen=True)
class Gemm:
    """How the kernel runs.

    Args:
        consumers: warpgroups that decode and multiply, 1 to 4.
        tiles: of 16 features of each, 4 or 8.
        tokens: of a tile, 32 to 256.
        units: of 64 k of a step, 1, 2 or 4.
        stages: of the ring; 0 for as many as fit.
        programs: of a multiprocessor.
        parts: of K, of all tiles; 0 splits those of the last wave that is not full, and only them.
        group: tiles along M that follow each other before N goes on.
    """

    consumers: int = 2
    tiles: int = 4
    tokens: int = 64
    units: int = 2
    stages: int = 0
    programs: int = 1
    parts: int = 1
    group: int = 8


def scales_code(dtype: str) -> str:
    """Assembly of the scales, from the layout's ``SCALE``: $2 four bytes -> $0, $1 pairs of 16-bit floats."""
    shift, base = SCALE[dtype]
    apart = "prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;"
    scaled = " ".join(f"mad.lo.u32 ${i}, {r}, {1 << shift}, {base * 0x10001:#x};" for i, r in enumerate("ab"))
    return f"{{ .reg .b32 a, b; {apart} {scaled} }}"


THREADS: Final = 128
SHARED: Final = 232448
REGISTERS: Final = 65536
PRODUCER: Final = 32

def boxed(dtype, box, swizzle, bits):
    return f"tensordesc<{dtype}[{','.join(map(str, box))}],NVMMASharedLayout({swizzle}, {bits}, {len(box)})>"


def height(out_dtype, made):
    return min(made.tokens, 64 if out_dtype == "float32" else 128)


def signature(call: Call, made: Gemm, bias: str, whole: bool) -> dict[str, str]:
    wide = 32 if call.out_dtype == "float32" else 16
    out = boxed(TYPES[call.out_dtype], (height(call.out_dtype, made), TILE * made.tiles), 128, wide)
    return {
        "codes_map": boxed("i32", (made.tiles, 8 * made.units, 16), 64, 32),
        "scales_map": boxed("i32", (made.tiles, 16 * made.units), 0, 32),
        "x_map": boxed(TYPES[call.dtype], (made.tokens, UNIT * made.units), 128, 16),
        "out": out if whole else f"*{TYPES[call.out_dtype]}",
        "scale2": "*fp32",
        "bias": bias,
        "sums": "*fp32:16",
        "counts": "*i32:16",
        **dict.fromkeys(("M", "N", "items", "whole", "share", "parts", "along_n", "along_m", "steps"), "i32"),
    }


def registers(made: Gemm) -> tuple[int, int]:
    """Of a thread at the start, and of a consumer's."""
    threads = THREADS * (made.consumers + 1)
    each = min(REGISTERS // made.programs // threads // 8 * 8, 248)
    consumer = (each * threads - PRODUCER * THREADS) // (THREADS * made.consumers) // 8 * 8
    return each, min(consumer, 240)


def stages(call: Call, made: Gemm) -> int:
    room = (233472 - made.programs * 1024) // made.programs
    out = made.consumers * height(call.out_dtype, made) * TILE * made.tiles * (4 if call.out_dtype == "float32" else 2)
    stage = made.consumers * made.tiles * made.units * 576 + made.tokens * made.units * 128
    fit = (room - out - 1024 - 256) // stage
    return min(fit, made.stages or 8)


def constants(call: Call, made: Gemm, whole: bool, split: bool) -> dict[str, Any]:
    return {
        "C": made.consumers,
        "R": made.tiles,
        "U": made.units,
        "NB": made.tokens,
        "STAGES": stages(call, made),
        "GROUP": made.group,
        "SPLIT": split,
        "HEIGHT": height(call.out_dtype, made),
        "REGISTERS": registers(made)[1],
        "TMA": whole,
        "PER_ROW": call.per_row,
        "BIAS": call.bias,
        "DECODE": decode_code(call.dtype),
        "SCALES": scales_code(call.dtype),
        "FACTOR": FACTOR,
    }
