"""What the GPU's benchmark says of what it measured: rows with their bounds, lines on the screen, lines of JSON."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks import gpu_bounds, timing
from benchmarks.gpu_bounds import Bound
from benchmarks.timing import Figure, Row
from halfbyte.kernels.cuda.ceilings import Ceiling

Kind = Literal["default", "other", "whole", "fp8", "twin", "peer"]
"""Ours that ``plan`` picks, ours that it does not, the default with a whole N beside a ragged one, what it picks with
``precision="fp8"``, ours with a resident FP8 twin, and others'."""


@dataclass(frozen=True)
class Case:
    """A product that is measured.

    Args:
        ceiling: of the GPU; None where it is not known, and then nothing has a bound.
    """

    n: int
    k: int
    rows: int
    dtype: str
    ceiling: Ceiling | None

    def __str__(self) -> str:
        return f"M={self.rows} {self.n}x{self.k}"

    def ideal(self, n: int, kind: Kind = "default") -> float | None:
        return gpu_bounds.ideal(self.ceiling, n, self.k, self.rows, kind) if self.ceiling else None

    def bound(self, of: Bound | None) -> Bound | tuple[None, None]:
        return of if of and self.ceiling else (None, None)


@dataclass(frozen=True)
class Measured:
    """One candidate of a case; ``seconds`` are those of a call in each batch, ``error`` is relative."""

    who: str
    kind: Kind
    n: int
    seconds: float
    best: float
    error: float
    facts: Mapping[str, Any] = field(default_factory=dict)


def row(case: Case, one: Measured, beside: Iterable[Measured]) -> Row:
    """What is said of a candidate; of the default, how it stands beside the others of its turns."""
    n, k, rows = one.n, case.k, case.rows
    figures = []
    if ideal := case.ideal(n, one.kind):
        bound = gpu_bounds.share(n, k, rows) if one.kind == "default" else None
        figures.append(Figure("of ideal", ideal / one.seconds, *case.bound(bound)))
    figures.append(Figure("GB/s", gpu_bounds.moved(n, k, rows, one.kind) / one.seconds * 1e-9))
    figures.append(Figure("TFLOP/s", 2e-12 * rows * n * k / one.seconds))
    allowed = gpu_bounds.FP8_ERROR if one.kind in gpu_bounds.FP8 else gpu_bounds.ERROR[case.dtype]
    bound = None if one.kind == "peer" else allowed
    figures.append(Figure("relative error", one.error, *case.bound(bound), least=False))
    if one.kind == "default":
        figures += _beside(case, one, list(beside))
    if one.kind == "fp8":
        figures += _fp8_beside(case, one, list(beside))
    facts = {"kind": one.kind, "n": n, "k": k, "rows": rows, "dtype": case.dtype, **one.facts}
    return Row(str(case), one.who, one.seconds, one.best, tuple(figures), facts)


def _beside(case: Case, default: Measured, others: list[Measured]) -> list[Figure]:
    n, k, rows = case.n, case.k, case.rows
    figures = []
    for other in others:
        if other.kind == "peer":
            over = {"humming": gpu_bounds.over_humming, "cublas bfloat16": gpu_bounds.over_cublas}.get(other.who)
            bound = over(n, k, rows) if over else None
            figures.append(Figure(f"x {other.who}", other.seconds / default.seconds, *case.bound(bound)))
        elif other.kind == "whole":
            name, bound = f"x the time of N={other.n}", gpu_bounds.RAGGED
            figures.append(Figure(name, default.seconds / other.seconds, *case.bound(bound), least=False))
    layout = default.facts.get("layout")
    portable = [
        other.seconds for other in others if other.who.startswith("triton-") and other.facts.get("layout") == layout
    ]
    if portable and default.who.startswith("gluon-"):
        bound = gpu_bounds.portable(n, k, rows)
        figures.append(Figure("of its speed in the portable tier", default.seconds / min(portable), *case.bound(bound)))
    return figures


def _fp8_beside(case: Case, fp8: Measured, others: list[Measured]) -> list[Figure]:
    figures = []
    bounded = case.rows >= gpu_bounds.FP8_ROWS
    for other in others:
        if other.kind == "default":
            bound = case.bound(gpu_bounds.FP8_OVER_EXACT if bounded else None)
            figures.append(Figure("x the exact product", other.seconds / fp8.seconds, *bound))
        elif other.kind == "twin":
            bound = case.bound(gpu_bounds.FP8_BESIDE_TWIN if bounded else None)
            figures.append(Figure(f"x the time of {other.who}", fp8.seconds / other.seconds, *bound, least=False))
        elif other.kind == "peer":
            figures.append(Figure(f"x {other.who}", other.seconds / fp8.seconds))
    return figures


def line(case: Case, rows: Iterable[Row]) -> str:
    """All rows of a case: microseconds, of ours the share of ideal, and what missed its bound."""
    ideal = case.ideal(case.n)
    said = []
    for one in rows:
        if one.seconds is None:
            said.append(f"{one.who}: {one.missing}")
            continue
        kind = one.facts["kind"]
        names = {"default": f"*{one.who}", "fp8": f"*{one.who}", "whole": f"{one.who} N={one.facts['n']}"}
        name = names.get(kind, one.who)
        if kind == "other" and "fragments" not in one.facts["layout"]:
            name += f" {one.facts['layout'].split('(')[0]}"
        share = f" ({one.figures[0].value:.2f})" if ideal and kind != "peer" else ""
        missed = "".join(f" [{figure}]" for figure in one.figures if figure.met is False)
        said.append(f"{name} {one.seconds * 1e6:.1f}{share}{missed}")
    return f"{case!s:<20} {f'ideal {ideal * 1e6:.1f}, ' if ideal else ''}us: {', '.join(said)}"


def verdict(rows: Iterable[Row]) -> list[str]:
    """How many bounds are met, and a line for each that is not."""
    bounded = [(one, figure) for one in rows for figure in one.figures if figure.must is not None]
    missed = [(one, figure) for one, figure in bounded if not figure.met]
    lines = [f"{len(bounded) - len(missed)} of {len(bounded)} bounds met"]
    for one, figure in missed:
        aim = "" if figure.aim is None else f" (aim {figure.aim:g})"
        lines.append(f"missed: {one.what}, {one.who}: {figure}{aim}")
    return lines


def machine(gpu: str, arguments: Iterable[str], module: str = "gpu") -> dict[str, Any]:
    """Where and with what a run was made."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    return {
        "gpu": gpu,
        "driver": driver,
        "cuda": torch.version.cuda,
        "versions": timing.versions(),
        "python": timing.machine()["python"],
        "commit": os.environ.get("COMMIT") or timing.commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join([f"python -m benchmarks.{module}", *arguments]),
    }


class Lines:
    """A file of JSON lines: what a run says of itself, then its rows, and at the end its verdict.

    It gets its name when the run ends; until then it is ``<name>.part``.
    """

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.part = path.with_name(path.name + ".part")
            self.part.write_text(json.dumps({"run": head}) + "\n")

    def add(self, one: Row) -> None:
        self._write(timing.entry(one))

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.part.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def finish(self, end: Mapping[str, Any]) -> None:
        if self.path is not None:
            self._write({"end": end})
            self.part.replace(self.path)
