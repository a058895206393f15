"""Which kernel is tried first on a GPU, and in which configuration: what was measured there, in ``choices.json``.

::

    {"measurements": {"h200": {"gpu": ..., "driver": ..., "torch": ..., "triton": ..., "date": ..., "command": ...}},
     "choices": [
       {"measurement": "h200", "capability": 90, "dtypes": ["bfloat16"], "shape": [14336, 4096],
        "rows": [{"to": 8,    "kernels": [{"kernel": "a", "configuration": {...}, "microseconds": {"1": 10.4}}, ...]},
                 {"to": null, "kernels": [...]}]}]}

``shape`` is (N, K); each entry of ``rows`` holds from the last one's ``to`` + 1 to its own, and null is without end.
The first of ``dtypes`` was measured; the others have its choices, and no times.
A weight takes the entry whose shape is nearest: the least |log2| of the ratio of their sizes N * K plus half the
|log2| of the ratio of their N / K. Nothing is measured at run time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import log2
from pathlib import Path
from typing import Any, TypeVar

from halfbyte.errors import FormatError
from halfbyte.kernels.base import Call

C = TypeVar("C")

PROVENANCE = ("gpu", "driver", "torch", "triton", "date", "command")
"""What a measurement states."""


@dataclass(frozen=True)
class Choice:
    """A kernel for some weights and rows.

    Attributes:
        kernel: its name.
        configuration: fields of the kernel's configuration that are not its default's.
        microseconds: measured, by the number of rows.
        shape: (N, K) of the weight that was measured.
        dtype: of the activations that were measured.
        measurement: what was measured where, as in ``PROVENANCE``.
    """

    kernel: str
    configuration: dict[str, Any] = field(hash=False)
    microseconds: dict[int, float] = field(hash=False)
    shape: tuple[int, int]
    dtype: str
    measurement: dict[str, str] = field(hash=False)


@dataclass(frozen=True)
class _Entry:
    capability: int
    dtypes: tuple[str, ...]
    shape: tuple[int, int]
    rows: tuple[tuple[int | None, tuple[Choice, ...]], ...]


def read(path: Path) -> tuple[_Entry, ...]:
    """The entries of a file; FormatError where it is not as the module says."""
    try:
        held = json.loads(path.read_text())
        entries = tuple(_entry(entry, held["measurements"]) for entry in held["choices"])
        for measurement in held["measurements"].values():
            if set(measurement) != set(PROVENANCE):
                raise ValueError(f"a measurement states {', '.join(PROVENANCE)}, not {', '.join(measurement)}")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path.name} is damaged", got=f"{type(error).__name__}: {error}") from error
    return entries


def _entry(held: dict[str, Any], measurements: dict[str, dict[str, str]]) -> _Entry:
    n, k = held["shape"]
    measured, *others = held["dtypes"]
    ends = [span["to"] for span in held["rows"]]
    if ends[-1] is not None or None in ends[:-1] or ends[:-1] != sorted(set(ends[:-1])):
        raise ValueError(f"rows do not go up to null: {ends}")

    def choices(span: dict[str, Any]) -> Iterator[Choice]:
        for one in span["kernels"]:
            times = {int(rows): float(us) for rows, us in one.get("microseconds", {}).items()}
            measurement = measurements[held["measurement"]]
            yield Choice(one["kernel"], one["configuration"], times, (n, k), measured, measurement)

    spans = tuple((span["to"], tuple(choices(span))) for span in held["rows"])
    return _Entry(held["capability"], (measured, *others), (n, k), spans)


@functools.cache
def entries() -> tuple[_Entry, ...]:
    """Those of ``choices.json``."""
    return read(Path(__file__).with_name("choices.json"))


@functools.lru_cache(maxsize=4096)
def _nearest(capability: int, shape: tuple[int, int], dtype: str) -> _Entry | None:
    n, k = shape
    held = [e for e in entries() if e.capability == capability and dtype in e.dtypes]
    if not held or not n * k:
        return None

    def far(entry: _Entry) -> float:
        other, along = entry.shape
        return abs(log2(n * k / (other * along))) + abs(log2(n / k * along / other)) / 2

    return min(held, key=far)


def pick(capability: int, shape: tuple[int, ...], rows: int, dtype: str) -> tuple[Choice, ...]:
    """What to try for a weight (*E, N, K) and M rows, best first; () where nothing was measured."""
    entry = _nearest(capability, (shape[-2], shape[-1]), dtype)
    if entry is None:
        return ()
    return next(choices for end, choices in entry.rows if end is None or rows <= end)


def ends(call: Call) -> tuple[int, ...]:
    """The last M of each range in which the same is tried, but for the one without end."""
    entry = _nearest(call.capability, (call.shape[-2], call.shape[-1]), call.dtype)
    return () if entry is None else tuple(end for end, _ in entry.rows if end is not None)


def choice(call: Call, kernel: str) -> Choice | None:
    """What was measured of a kernel for calls like this one; None where it was not among the best."""
    found = pick(call.capability, call.shape, call.rows, call.dtype)
    return next((choice for choice in found if choice.kernel == kernel), None)


def configured(call: Call, kernel: str, default: C) -> C:
    """The configuration of a kernel, a frozen dataclass, for a call."""
    found = choice(call, kernel)
    made: Any = default
    return default if found is None else replace(made, **found.configuration)
