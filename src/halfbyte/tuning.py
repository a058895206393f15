"""``halfbyte tune``: which kernel and configuration is fastest on this GPU, for which shapes and numbers of tokens.

For each shape and M all configurations that can pay are compiled ahead, checked against float64, and timed in turns;
``choices`` says what is written of that, and how it is used. What measures is a ``Machine``: ``tuning_cuda`` has that
of a GPU. Nothing here needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, Final, Protocol

from halfbyte.errors import HalfbyteError, NoKernelError, TargetError, UsageError
from halfbyte.findings import Report
from halfbyte.fp8_ops import FEWEST
from halfbyte.kernels import KERNELS, Call, Fp8Call, Kernel
from halfbyte.kernels.cuda import choices
from halfbyte.layouts import Columns, Fragments, Layout
from halfbyte.numerics import BLOCK
from halfbyte.tuned import alone, check_place, in_microseconds, merge, words, write

SHAPES: Final = (
    *((4096, 4096), (14336, 4096), (28672, 8192), (248077, 4096), (4096, 14336), (8192, 28672)),
    *((6144, 4096), (28672, 4096), (1024, 4096), (128256, 4096), (151936, 4096), (11008, 4096), (4096, 11008)),
    *((5120, 5120), (25600, 5120), (5120, 25600), (13824, 5120), (8192, 5120), (5120, 8192)),
    *((18944, 3584), (3584, 18944), (2048, 2048), (8192, 2048), (2048, 8192), (3072, 3072), (8192, 3072), (3072, 8192)),
    *((4096, 2560), (8192, 8192), (53248, 16384)),
)
"""(N, K) of layers of models from 1 to 405 billion weights, and of their vocabularies, in the order of measuring."""
ROWS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of tokens; in FP8 those from which on it is used."""
OPS: Final[Mapping[str, type[Call]]] = {"exact": Call, "fp8": Fp8Call}
"""For each precision the class of its calls."""
ENOUGH: Final = 800_000_000_000
"""Operations of a product whose tiles fill so many waves of a GPU that with more of them nothing changes."""
DTYPES: Final = ("bfloat16", "float16")
SECONDS: Final = 240.0


@dataclass(frozen=True)
class Options:
    """What is measured.

    Args:
        shapes: (N, K) of weights.
        rows: numbers of tokens.
        dtype: of activations and results.
        precisions: keys of ``OPS``.
        kernels: their names; () for all that have configurations.
        seconds: after so many no further shape is begun.
        out: the file; what it holds of other shapes and kernels stays.
    """

    shapes: tuple[tuple[int, int], ...] = SHAPES
    rows: tuple[int, ...] = ROWS
    dtype: str = "bfloat16"
    precisions: tuple[str, ...] = tuple(OPS)
    kernels: tuple[str, ...] = ()
    seconds: float = SECONDS
    out: Path | None = None

    def __post_init__(self) -> None:
        for name in ("shapes", "rows", "precisions"):
            if not getattr(self, name):
                raise UsageError(f"no {name} to measure", hint="see: halfbyte tune --help")
        if isnan(self.seconds):
            raise UsageError("the budget is no number of seconds", got=self.seconds)
        for n, k in self.shapes:
            if n < 1 or k < 1 or k % BLOCK:
                raise UsageError("unknown shape", got=f"{n}x{k}", expected=f"N from 1 and K a multiple of {BLOCK}")
        if any(rows < 1 for rows in self.rows):
            raise UsageError("rows are 1 or more", got=min(self.rows))
        if self.dtype not in DTYPES:
            raise UsageError("unknown dtype of activations", got=self.dtype, expected=" or ".join(DTYPES))
        for precision in self.precisions:
            if precision not in OPS:
                raise UsageError("unknown precision", got=precision, expected=" or ".join(OPS))

    @property
    def command(self) -> str:
        """What repeats it, but for the file."""
        parts = ["halfbyte tune"]
        if self.shapes != SHAPES:
            parts.append(f"--shapes {','.join(f'{n}x{k}' for n, k in self.shapes)}")
        if self.rows != ROWS:
            parts.append(f"--rows {','.join(map(str, self.rows))}")
        if self.dtype != DTYPES[0]:
            parts.append(f"--dtype {self.dtype}")
        if self.kernels:
            parts.append(f"--kernels {','.join(self.kernels)}")
        if self.precisions != tuple(OPS):
            parts.append(f"--precision {','.join(self.precisions)}")
        return " ".join(parts)


@dataclass(frozen=True, eq=False)
class Job:
    """A configuration of a kernel for a call."""

    kernel: Kernel[Any, Any]
    call: Call
    made: Any

    def __str__(self) -> str:
        n, k = self.call.shape
        return f"{self.kernel.name} {words(self.made)} at {n}x{k}, M={self.call.rows}, {self.call.dtype}"


@dataclass(frozen=True)
class Result:
    """What came of a job: seconds of a call, or why there are none; ``wrong`` where it computed something else."""

    seconds: float | None = None
    why: str = ""
    wrong: bool = False


class LostError(HalfbyteError):
    """Nothing can be measured any more."""


class Machine(Protocol):
    """What compiles and measures."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What of ``choices.PROVENANCE`` it knows: all but the date and the command."""

    @property
    def capability(self) -> int:
        """The compute capability, 90 for sm_90."""

    def compile(self, jobs: Sequence[Job]) -> None:
        """Begin to compile what these will need, in their order, beside what else is done."""

    def measure(self, jobs: Sequence[Job]) -> list[Result]:
        """Check and time jobs of one shape, M and op, one result for each; raises LostError."""

    def close(self) -> None:
        """End what was begun."""


Times = dict[str, dict[int, dict[Any, float]]]
"""Seconds by kernel, rows and configuration."""


@dataclass
class _Shape:
    """What is measured of a weight's shape in one op."""

    call: type[Call]
    capability: int
    shape: tuple[int, int]
    jobs: list[list[Job]]
    times: Times = field(default_factory=dict)
    done: bool = False

    @property
    def count(self) -> int:
        return sum(map(len, self.jobs))

    def __str__(self) -> str:
        return f"{self.call.op} {self.shape[0]}x{self.shape[1]}"


def tune(
    options: Options,
    machine: Machine,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Measure, and write what is best.

    Args:
        options: what, and where to.
        machine: which measures.
        progress: called with (configurations measured, all of them).
        clock: seconds.

    Returns:
        A report; its facts are "gpu", "capability", "out", "repeat" (the command), "seconds", "measured" (how many
        configurations), "wrong" and "failed" (a line for each that was not chosen for that), "left_out" (shapes that
        were not measured, for lack of time), "choices" (a row for each range: op, shape, first, last, kernel,
        configuration, microseconds) and "times" (all: op, shape, kernel, rows, configuration, microseconds).

    Raises:
        UsageError: no kernel of that name, or a place for the file that cannot be.
        NoKernelError: no kernel has configurations for any of the calls.
        FormatError: the file is there and damaged.
        TargetError: it cannot be read or written; before anything is measured, as far as that can be told.
    """
    start = clock()
    out = options.out or choices.user_file()
    if out is None:
        raise UsageError("there is no place for the choices", got="HALFBYTE_CHOICES=none", hint="name one with --out")
    _content(out)
    work = list(planned(options, machine.capability))
    check_place(out)
    measurement = {**machine.facts, "date": time.strftime("%Y-%m-%d", time.gmtime()), "command": options.command}
    facts: dict[str, Any] = {
        "gpu": measurement["gpu"], "capability": machine.capability, "out": str(out), "repeat": options.command,
        "measured": 0, "wrong": [], "failed": [], "left_out": [],
    }  # fmt: skip
    total = sum(one.count for one in work)
    try:
        machine.compile([job for one in work for jobs in one.jobs for job in jobs])
        why = ""
        for one in work:
            why = why or ("the time was over" if clock() - start > options.seconds else "")
            try:
                for jobs in () if why else one.jobs:
                    _note(one.times, jobs, machine.measure(jobs), facts)
                    if progress:
                        progress(facts["measured"], total)
                one.done = not why
            except LostError as error:
                why = str(error)
            if why:
                facts["left_out"].append(f"{one}: {why}")
    finally:
        machine.close()
    facts["choices"] = []
    done = [one for one in work if one.done and one.times]
    if done:
        with alone(out):  # another run may have written since
            held = _content(out)
            facts["choices"] = [row for one in done for row in _into(held, one, measurement, options.dtype)]
            write(out, held)
    facts["seconds"] = round(clock() - start, 1)
    facts["times"] = [
        {"op": one.call.op, "shape": one.shape, "kernel": name, "rows": rows, "configuration": words(made),
         "microseconds": in_microseconds(seconds)}
        for one in work for name, by_rows in one.times.items()
        for rows, times in by_rows.items() for made, seconds in times.items()
    ]  # fmt: skip
    return Report("tune", facts=facts)


def _content(path: Path) -> dict[str, Any]:
    """What a file holds, or one that is not there yet would.

    Raises:
        FormatError: it is damaged.
        TargetError: it cannot be read.
    """
    try:
        return choices.load(path)
    except FileNotFoundError:
        return {"format": choices.FORMAT, "measurements": {}, "choices": []}
    except OSError as error:
        raise TargetError("choices of kernels cannot be read", file=str(path), got=error.strerror) from error


def _into(held: dict[str, Any], one: _Shape, measurement: Mapping[str, Any], dtype: str) -> Iterator[dict[str, Any]]:
    """Put what was measured of a shape into a file's content."""
    dtypes = [dtype, *(other for other in DTYPES if other != dtype)]
    head = {"op": one.call.op, "capability": one.capability, "dtypes": dtypes, "shape": list(one.shape)}
    kernels = {}
    for name, times in one.times.items():
        job = next(job for jobs in one.jobs for job in jobs if job.kernel.name == name)
        first = 1 + max((rows for rows in ROWS if rows < min(times)), default=0)
        kernels[name] = times, first, partial(_fits, job)
    return merge(held, head, kernels, measurement)


def _fits(job: Job, made: Any, rows: int) -> bool:
    """Whether a job's kernel takes so many rows in a configuration."""
    call, configurations = replace(job.call, rows=rows), job.kernel.configurations
    assert configurations is not None
    return not job.kernel.refuse(call) and type(made) in map(type, configurations(call))


def _note(times: Times, jobs: Sequence[Job], results: Sequence[Result], facts: dict[str, Any]) -> None:
    for job, result in zip(jobs, results, strict=True):
        facts["measured"] += 1
        if result.seconds is not None:
            times.setdefault(job.kernel.name, {}).setdefault(job.call.rows, {})[job.made] = result.seconds
        else:
            facts["wrong" if result.wrong else "failed"].append(f"{job}: {result.why}")


def planned(options: Options, capability: int) -> Iterator[_Shape]:
    """What there is to measure, in the order of the shapes."""
    known = {kernel.name: kernel for kernel in KERNELS if kernel.configurations is not None}
    unknown = [name for name in options.kernels if name not in known]
    if unknown:
        raise UsageError("unknown kernel", got=unknown[0], expected=" or ".join(known))
    kernels = [known[name] for name in dict.fromkeys(options.kernels)] or list(known.values())
    found, reasons = False, [options.command]
    for shape in options.shapes:
        for precision in options.precisions:
            one = _Shape(OPS[precision], capability, shape, [])
            own = [kernel for kernel in kernels if kernel.op == one.call.op]
            for rows in _rows_of(options, precision, shape):
                calls = calls_of(one.call, shape, rows, options.dtype, capability)
                jobs = [job for kernel in own for job in _jobs(kernel, calls, reasons)]
                if jobs:
                    one.jobs.append(jobs)
            if one.jobs:
                found = True
                yield one
    if not found:
        raise NoKernelError("there is nothing to tune", got=reasons[-1])


def _rows_of(options: Options, precision: str, shape: tuple[int, int]) -> list[int]:
    """The numbers of tokens of a shape; by default none that is too large to tell more than a smaller one."""
    least = FEWEST if precision == "fp8" else 1
    most = ENOUGH // (2 * shape[0] * shape[1]) if options.rows == ROWS else max(options.rows)
    return sorted({rows for rows in options.rows if least <= rows <= max(most, least)})


def _jobs(kernel: Kernel[Any, Any], calls: Sequence[Call], reasons: list[str]) -> list[Job]:
    """The configurations of a kernel for the first call that it takes; where there is none, why."""
    assert kernel.configurations is not None
    refusals: list[tuple[str, ...]] = [kernel.refuse(call) for call in calls]
    if () not in refusals:
        reasons.append(f"{kernel.name}: {', and '.join(min((len(one), one) for one in refusals)[1])}")
        return []
    call = calls[refusals.index(())]
    return [Job(kernel, call, made) for made in kernel.configurations(call)]


def calls_of(kind: type[Call], shape: tuple[int, int], rows: int, dtype: str, capability: int) -> list[Call]:
    """The calls that kernels are asked about, one for each layout that kernels of GPUs read."""
    layouts: tuple[Layout, ...] = (Fragments(dtype), Columns(align=128))
    return [
        kind(
            layout=layout,
            shape=shape,
            per_row=False,
            pre_scale=False,
            rows=rows,
            dtype=dtype,
            out_dtype=dtype,
            device="cuda",
            library="torch",
            bias=False,
            capability=capability,
        )
        for layout in layouts
    ]
