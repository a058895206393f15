"""The experts' products for many tokens on Hopper, layout ``fragments``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from halfbyte.kernels.cuda.fragments import TYPES, decode_code, scales_code
from halfbyte.kernels.cuda.gemm_gluon import BESIDE, GROUP, REGISTERS, SHARED
from halfbyte.kernels.cuda.launch import boxes
from halfbyte.layouts.fragments import FACTOR

HALF: Final = 64
"""Features of a half of a consumer's."""
STAGED: Final = 8192
"""Bytes of results of a consumer that are in shared memory at a time."""


@dataclass(frozen=True)
class Grouped:
    """How a product runs.

    Args:
        consumers: warpgroups that decode and multiply 128 features each, 1 to 3.
        slots: of a block: 16, 32, 64 or 128.
        low: as many are multiplied where a block has no more; 0 where it is always all.
        units: of 64 k of a step: 1, 2 or 4.
        programs: of a multiprocessor.
        copiers: warps that copy rows, 1 or 4.
        producer: registers of their threads.
    """

    consumers: int = 2
    slots: int = 32
    low: int = 0
    units: int = 2
    programs: int = 1
    copiers: int = 4
    producer: int = 40

    @property
    def registers(self) -> tuple[int, int]:
        """Of each thread at the start, and of a consumer's threads then."""
        threads = GROUP * (self.consumers + 1)
        first = min(REGISTERS // self.programs // threads // 8 * 8, 248)
        then = (first * threads - self.producer * GROUP) // (GROUP * self.consumers) // 8 * 8
        return first, min(then, 240)

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return self.units * (self.consumers * 8 * 576 + self.slots * 128)

    def height(self, size: int) -> int:
        """Slots that are stored at a time, of elements of so many bytes."""
        return min(self.slots, STAGED // (HALF * size))

    def stages(self, size: int) -> int:
        """Of the ring: as many as fit."""
        room = SHARED // self.programs - 1024 - BESIDE - self.consumers * self.height(size) * HALF * size
        return min(12, room // self.stage)


def features(made: Grouped, gated: bool) -> int:
    """Results of a program."""
    return made.consumers * (HALF if gated else 2 * HALF)


def signature(made: Grouped, dtype: str, out_dtype: str, bias: str, gather: bool = True) -> dict[str, str]:
    """The types of the device code's arguments."""
    return {
        "codes_map": boxes("i32", (4, 8 * made.units, 16), 64),
        "scales_map": boxes("i32", (4, 16 * made.units), 0),
        "x": f"*{TYPES[dtype]}:16" if gather else boxes(TYPES[dtype], (made.slots, 64 * made.units), 128),
        "out": f"*{TYPES[out_dtype]}:16",
        "scale2": "*fp32",
        "bias": bias,
        **dict.fromkeys(("blocks", "slots", "count", "to"), "*i32:16"),
        "N": "i32:16",
        "K": "i32:16",
        **dict.fromkeys(("stripes", "apart", "along_n", "steps", "share"), "i32"),
    }


def constants(
    made: Grouped,
    dtype: str,
    size: int,
    k: int,
    *,
    gated: bool,
    early: bool,
    per_row: bool,
    bias: bool,
    activation: str | None,
    limit: float | None,
    up_first: bool = False,
    gather: bool = True,
) -> dict[str, Any]:
    """The constants of the device code."""
    return {
        "C": made.consumers,
        "U": made.units,
        "NB": made.slots,
        "LOW": made.low,
        "STAGES": made.stages(size),
        "HEIGHT": made.height(size),
        "REGISTERS": made.registers[1],
        "PRODUCER": made.producer,
        "COPIERS": made.copiers,
        "GATED": gated,
        "EARLY": early,
        "EVEN": k % (64 * made.units) == 0,
        "PER_ROW": per_row,
        "BIAS": bias,
        "ACTIVATION": activation,
        "LIMIT": limit,
        "UP_FIRST": up_first,
        "DECODE": decode_code(dtype),
        "SCALES": scales_code(dtype),
        "FACTOR": FACTOR,
        "GATHER": gather,
    }


def options(made: Grouped) -> dict[str, Any]:
    """What else decides the machine code, as arguments of ``program``."""
    return {} if made.programs == 1 else {"maxnreg": made.registers[0]}
