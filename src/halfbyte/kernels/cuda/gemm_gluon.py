"""``linear`` for many tokens on Hopper, layout ``fragments``: decoded weights in registers are wgmma's first operand.

::

    y = round(sum(x * code * scale) * scale2 + bias)

A tile is 16 ``tiles`` features of each of the ``consumers`` and ``tokens`` tokens; its sums take steps of ``units``
along K. A program stays on its multiprocessor and takes items: whole tiles, and parts along K of those that are split,
whose sums meet in ``scratch`` bytes that all kernels share. There the last program of a tile to come adds the parts,
always in the same order; the counters among them are 0 again after every launch. So a result does not depend on the
other rows of x, and on M and the row's place only through what is split. Products are exact and sums in f32, as of
``gluon-decode``; p parts add p to K + 24 there.

Codes, scales and x come by the copy engine (TMA), which reads zeros beyond N, M and K. So does the result go out, where
rows of out begin at multiples of 16 bytes; else each lane stores one element, and lanes neighbours. The first stages of
codes and scales are asked for before the kernel ahead has ended, when that is right: see ``decode_gluon``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from halfbyte.kernels.base import ALIGNED, Call, Kernel, LinearArgs, linear_cost
from halfbyte.kernels.cuda import choices, fragments
from halfbyte.kernels.cuda.fragments import TILE, TYPES, UNIT, decode_code, scales_code
from halfbyte.kernels.cuda.launch import Program, Tensor, boxes, program, why_not
from halfbyte.kernels.cuda.shared import Written, counters, in_turn, workspace
from halfbyte.layouts.fragments import FACTOR
from halfbyte.numerics import Array

NAME: Final = "gluon-gemm"

GROUP: Final = 128
"""Threads of a consumer; the producer's warp takes as many registers as if it were one."""
PRODUCER: Final = 32
"""Registers of the producer's threads."""
REGISTERS: Final = 65536
"""Of a multiprocessor."""
SHARED: Final = 233472
"""Bytes of shared memory of a multiprocessor; each program takes 1 KiB more than it asks for."""
BESIDE: Final = 2048
"""Bytes of shared memory of a program beside stages and results: barriers, and what alignment takes."""
STAGES: Final = 12
"""At most."""
MOST_FEATURES: Final = (1 << 24) - 1
"""A few rows of results are within 32 bits of each other."""
MOST_TOKENS: Final = (1 << 31) - 512
"""So that those of a tile are numbers of 32 bits, too, where it goes on beyond them."""
HOPPER: Final = 132
"""Multiprocessors of an H200 and most H100, where there is no GPU to ask."""


@dataclass(frozen=True)
class Gemm:
    """How the kernel runs.

    Args:
        consumers: warpgroups that decode and multiply, 1 to 4.
        tiles: of 16 features of each, 4 or 8.
        tokens: of a tile: 32, 64, 128 or 256.
        units: of 64 k of a step: 1, 2 or 4.
        programs: of a multiprocessor.
        parts: of K, of tiles that are split.
        all: all tiles are split, not only those of the last, partial wave.
        group: tiles along M that follow each other before N goes on.
    """

    consumers: int = 2
    tiles: int = 4
    tokens: int = 64
    units: int = 2
    programs: int = 1
    parts: int = 1
    all: bool = False
    group: int = 8

    @property
    def features(self) -> int:
        """Of a tile."""
        return TILE * self.tiles * self.consumers

    @property
    def registers(self) -> tuple[int, int]:
        """Of each thread at the start, and of a consumer's threads then."""
        threads = GROUP * (self.consumers + 1)
        first = min(REGISTERS // self.programs // threads // 8 * 8, 248)
        then = (first * threads - PRODUCER * GROUP) // (GROUP * self.consumers) // 8 * 8
        return first, min(then, 240)

    def height(self, size: int) -> int:
        """Tokens that are stored at a time, of elements of so many bytes."""
        return min(self.tokens, 256 // size)

    def stages(self, size: int) -> int:
        """Of the ring: as many as fit beside results of so many bytes."""
        room = SHARED // self.programs - 1024 - BESIDE - self.features * self.height(size) * size
        return min(STAGES, room // self.stage)

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return self.units * (self.consumers * self.tiles * 576 + self.tokens * 128)


CONFIGURATIONS: Final = tuple(
    Gemm(*fields)
    for fields in (
        *((2, 4, 32, 4), (2, 4, 32, 4, 1, 2, True), (1, 4, 32, 4, 2), (1, 4, 32, 4, 2, 4, True), (2, 8, 32, 4)),
        *((4, 4, 32, 4), (4, 4, 32, 4, 1, 2, True)),
        *((2, 4, 64, 4), (2, 4, 64, 4, 1, 2, True), (1, 4, 64, 2, 2, 4, True), (2, 8, 64, 2), (3, 8, 64, 2)),
        *((4, 4, 64, 2), (4, 4, 64, 2, 1, 2, True)),
        *((2, 4, 128, 2), (2, 4, 128, 2, 1, 2), (2, 4, 128, 2, 1, 4)),
        *((2, 8, 128, 2), (2, 8, 128, 2, 1, 2), (2, 8, 128, 2, 1, 4)),
        *((2, 4, 256, 1), (2, 4, 256, 1, 1, 2), (2, 4, 256, 1, 1, 3), (2, 4, 256, 1, 1, 4)),
    )
)
"""Those that are tested."""


@dataclass(frozen=True)
class Schedule:
    """What programs compute; the order of items is the device code's ``item_of``.

    Args:
        items: of all programs.
        whole: of those, the tiles that are not split; they come first.
        share: steps of a part.
        parts: of a tile that is split.
        along_n: tiles.
        along_m: tiles.
        steps: of a tile.
        grid: programs.
    """

    items: int
    whole: int
    share: int
    parts: int
    along_n: int
    along_m: int
    steps: int
    grid: int

    @property
    def split(self) -> int:
        """Tiles that are."""
        return self.along_n * self.along_m - self.whole


def schedule(n: int, k: int, rows: int, made: Gemm, multiprocessors: int) -> Schedule:
    """Of a weight (N, K) and so many rows of x."""
    along_n, along_m = -(-n // made.features), -(-rows // made.tokens)
    steps = -(-k // (UNIT * made.units))
    tiles, programs = along_n * along_m, multiprocessors * made.programs
    share = max(1, -(-steps // made.parts))
    parts = max(1, -(-steps // share))
    last = tiles if made.all else tiles % programs
    whole = tiles if parts == 1 else tiles - last
    items = whole + (tiles - whole) * parts
    return Schedule(items, whole, share, parts, along_n, along_m, steps, min(programs, items))


@cache
def multiprocessors(index: int | None, elsewhere: bool = False) -> int:
    """Of a CUDA device of torch's, or of one that is not in this machine."""
    if elsewhere:
        return HOPPER
    import torch

    return torch.cuda.get_device_properties(index).multi_processor_count if torch.cuda.is_available() else HOPPER


def _size(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def signature(call: Call, made: Gemm, bias: str, whole: bool) -> dict[str, str]:
    """The types of the device code's arguments; ``whole``: rows of out begin at multiples of 16 bytes."""
    out = TYPES[call.out_dtype]
    numbers = ("M", "N", "items", "whole", "share", "parts", "along_n", "along_m", "steps")
    return {
        "codes_map": boxes("i32", (made.tiles, 8 * made.units, 16), 64),
        "scales_map": boxes("i32", (made.tiles, 16 * made.units), 0),
        "x_map": boxes(TYPES[call.dtype], (made.tokens, UNIT * made.units), 128),
        "out": boxes(out, (made.height(_size(call.out_dtype)), TILE * made.tiles), 128) if whole else f"*{out}",
        "scale2": "*fp32",
        "bias": bias,
        "sums": "*fp32:16",
        "counts": "*i32:16",
        **dict.fromkeys(numbers, "i32"),
    }


def constants(call: Call, made: Gemm, whole: bool, split: bool) -> dict[str, Any]:
    """The constants of the device code."""
    size = _size(call.out_dtype)
    return {
        "C": made.consumers,
        "R": made.tiles,
        "U": made.units,
        "NB": made.tokens,
        "STAGES": made.stages(size),
        "GROUP": made.group,
        "SPLIT": split,
        "HEIGHT": made.height(size if whole else 4),
        "REGISTERS": made.registers[1],
        "TMA": whole,
        "PER_ROW": call.per_row,
        "BIAS": call.bias,
        "DECODE": decode_code(call.dtype),
        "SCALES": scales_code(call.dtype),
        "FACTOR": FACTOR,
    }


def options(made: Gemm) -> dict[str, Any]:
    """What else decides the machine code, as arguments of ``program``."""
    return {} if made.programs == 1 else {"maxnreg": made.registers[0]}


def microseconds(n: int, k: int, rows: int, made: Gemm, processors: int) -> float:
    """What a call takes on an H200, by a model whose constants are fitted to measured times: within about 10 %.

    A step waits for the slowest of the matrix units, of the instructions that decode, of what comes from the second
    cache, and of itself where nothing else runs beside it.
    """
    held = schedule(n, k, rows, made, processors)
    busy = held.grid / processors
    area = made.features * made.tokens
    matrix = area * UNIT * made.units / 3.51e6 * busy
    decoding = made.consumers * made.tiles / 4 * made.units * 0.106 * busy
    arriving = made.stage * held.grid / 8.66e6
    step = max(matrix, decoding, arriving, 0.464 + 0.067 * made.units) + 0.037
    tile = held.steps * step + 2.38 * area / 32768
    part = held.share * step + 1.16 + 6.37 * area / 32768
    slots = processors * made.programs
    time = -(-held.whole // slots) * tile + -(-(held.items - held.whole) // slots) * part
    return 3.1 + max(time, n * k * 9 / 16 / 4.3e6)


def _by_model(call: Call) -> list[Gemm]:
    """All of ``CONFIGURATIONS``, the fastest first."""
    (n, k), rows = call.shape, choices.modelled_rows(call.rows)
    return sorted(
        CONFIGURATIONS, key=lambda made: microseconds(n, k, rows, made, multiprocessors(None, call.elsewhere))
    )


def configure(call: Call) -> Gemm:
    """The configuration for a call: for shapes that were not measured the best by the model."""
    return choices.configured(call, NAME, _by_model(call)[0], CONFIGURATIONS, model=True)


def configurations(call: Call) -> tuple[Gemm, ...]:
    """Those that can pay: from 9 tokens on, the best by the model."""
    return tuple(_by_model(call)[:8]) if call.rows > 8 else ()


def _schedule(call: Call, made: Gemm, index: int | None) -> Schedule:
    n, k = call.shape
    return schedule(n, k, call.rows, made, multiprocessors(index, call.elsewhere))


def scratch_of(made: Gemm, held: Schedule) -> tuple[int, int]:
    """Bytes of sums and of counters."""
    return held.split * held.parts * made.features * made.tokens * 4, held.split * made.consumers * 4


def scratch(call: Call) -> int:
    """Bytes of device memory for the sums of parts."""
    made = configure(call)
    return sum(scratch_of(made, _schedule(call, made, None)))


def refuse(call: Call) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = [*why_not(call, least=90, most=90, gluon=True), *fragments.why_not_fragments(call)]
    if call.shape[-2] > MOST_FEATURES:
        reasons.append(f"takes up to {MOST_FEATURES} features, not {call.shape[-2]}")
    if call.rows > MOST_TOKENS:
        reasons.append(f"takes up to {MOST_TOKENS} tokens, not {call.rows}")
    return tuple(dict.fromkeys(reasons))


def bind(args: LinearArgs, made: Gemm | None = None) -> Callable[[Array, Array | None, Array], None]:
    """What is left of a launch for calls like these; ``made`` instead of the configuration chosen."""
    call = args.call()
    made = configure(call) if made is None else made
    (n, k), rows, device = call.shape, call.rows, args.x.device
    held = _schedule(call, made, device.index)
    of_sums, of_counts = scratch_of(made, held)
    buffers = args.weight.buffers()
    scale2 = buffers["scale2"].data_ptr()
    units = -(-k // UNIT)
    bias_type = fragments.bias_type(args.bias)
    size = args.out.element_size()
    numbers = (rows, n, held.items, held.whole, held.share, held.parts, held.along_n, held.along_m, held.steps)
    grid = (held.grid, 1, 1)
    fits = n * size % ALIGNED == 0
    programs = {
        (pdl, fits): _program(call, bias_type, made, device, pdl, fits, held.split > 0) for pdl in (False, True)
    }
    first = programs[False, fits]
    codes = first.tensor(0, buffers["codes"].data_ptr(), (-(-n // TILE), 8 * units, 16))
    scales = first.tensor(1, buffers["scales"].data_ptr(), (-(-n // TILE), 16 * units))
    tensor = described(first, rows)
    written = Written(device)
    counted = not any(buffers[name].is_inference() for name in ("codes", "scales"))

    def run(x: Any, bias: Any, out: Any) -> None:
        x = fragments.aligned(x)
        to = out.data_ptr()
        whole = fits and not to % ALIGNED
        sums = counts = None
        if of_sums:  # both are held until the launch: what is not, the next allocation may get
            sums, counts = workspace(device, of_sums), counters(device, of_counts)
        values = (
            codes,
            scales,
            tensor(2, x.data_ptr(), k),
            tensor(3, to, n) if whole else to,
            scale2,
            None if bias is None else bias.data_ptr(),
            None if sums is None else sums.data_ptr(),
            None if counts is None else counts.data_ptr(),
            *numbers,
        )
        run_program = programs.get((written.over, whole))
        if run_program is None:
            run_program = _program(call, bias_type, made, device, written.over, whole, held.split > 0)
            programs[written.over, whole] = run_program
        with in_turn:
            run_program(grid, values)
        if counted and not written.over:
            written.launched()

    return run


KEPT: Final = 256
"""Descriptions of activations and results, of a weight and number of rows, that are kept."""


def described(first: Program, rows: int) -> Callable[[int, int, int], Tensor]:
    """What gives a parameter's place, an address and a width the description of so many rows there, once for each."""
    known: dict[tuple[int, int], Tensor] = {}

    def tensor(place: int, at: int, width: int) -> Tensor:
        found = known.get((place, at))
        if found is None:
            if len(known) >= KEPT:
                known.clear()
            found = known[place, at] = first.tensor(place, at, (rows, width))
        return found

    return tensor


def _program(call: Call, bias: str, made: Gemm, device: Any, pdl: bool, whole: bool, split: bool) -> Program:
    from halfbyte.kernels.cuda.gemm_gluon_code import gemm

    types = signature(call, made, bias, whole)
    return program(gemm, types, constants(call, made, whole, split), device=device, pdl=pdl, **options(made))


def compile_as(call: Call, made: Gemm) -> None:
    """Compile it in a configuration."""
    import torch

    split = _schedule(call, made, None).split > 0
    whole = call.shape[0] * _size(call.out_dtype) % ALIGNED == 0
    for pdl in (False, True):
        _program(call, "*fp32", made, torch.device(call.device), pdl, whole, split)


GLUON: Final = Kernel(
    name=NAME,
    bundle=LinearArgs,
    description="tiles of weights decoded to wgmma's registers; Hopper, many tokens",
    refuse=refuse,
    cost=linear_cost,
    bind=bind,
    configure=configure,
    scratch=scratch,
    configurations=configurations,
    compile=compile_as,
)
