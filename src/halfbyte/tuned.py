"""What ``halfbyte tune`` measured becomes ranges of rows, and a file as ``kernels.cuda.choices`` reads it."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from math import log
from pathlib import Path
from typing import Any, Final

from halfbyte.errors import TargetError

SAME: Final = 1.02
"""Of configurations whose times differ by no more, one runs for several M."""
ANY_ROWS: Final = 1 << 17

Times = Mapping[int, Mapping[Any, float]]
"""Of a kernel: seconds by rows and configuration."""
Fits = Callable[[Any, int], bool]
"""Whether a kernel takes so many rows in a configuration."""


@dataclass(frozen=True)
class Span:
    """A configuration for the rows up to ``last``; None is without end."""

    last: int | None
    made: Any
    seconds: Mapping[int, float]


def spans(times: Times, fits: Fits) -> list[Span]:
    """The fewest ranges of rows in each of which one configuration is within ``SAME`` of the best at all M measured.

    Args:
        times: seconds by rows and configuration.
        fits: whether a kernel takes so many rows in a configuration; of one that does not a range goes less far.
    """
    groups: list[list[int]] = []
    good: set[Any] = set()
    for rows in sorted(times):
        best = min(times[rows].values())
        here = {made for made, seconds in times[rows].items() if seconds <= SAME * best}
        if groups and good & here:
            good &= here
            groups[-1].append(rows)
        else:
            good = here
            groups.append([rows])
    found: list[Span] = []
    chosen = [_best(times, group) for group in groups]
    for i, (group, made) in enumerate(zip(groups, chosen, strict=True)):
        last: int | None = None
        if group is not groups[-1]:
            last = _least(group[-1], groups[i + 1][0], partial(fits, chosen[i + 1])) - 1
        elif not fits(made, ANY_ROWS):
            last = _least(group[-1], ANY_ROWS, lambda rows: not fits(chosen[-1], rows)) - 1
        found.append(Span(last, made, {rows: times[rows][made] for rows in group}))
    return found


def _best(times: Times, group: Sequence[int]) -> Any:
    """Of what is good in all of a group, that whose times are least beside the best."""
    good = [made for made in times[group[0]] if all(made in times[rows] for rows in group)]

    def beside(made: Any) -> tuple[float, float]:
        ratios = [times[rows][made] / min(times[rows].values()) for rows in group]
        return float(max(ratios) > SAME), sum(map(log, ratios))

    return min(good, key=beside)


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number above ``low`` from which something holds, that holds at ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# The file


def merge(
    held: dict[str, Any], head: Mapping[str, Any], kernels: Mapping[str, tuple[Times, int, Fits]],
    measurement: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Put what was measured of a shape into a file's content.

    Args:
        held: the content; it is changed.
        head: op, capability, dtypes and shape; the first of dtypes was measured.
        kernels: for each its times, the first M for which they hold, and what it takes.
        measurement: what was measured where.

    Yields:
        A row for each range of each kernel, for people.
    """
    keys = ("op", "capability", "shape")
    same = (
        one for one in held["choices"]
        if one["dtypes"][0] == head["dtypes"][0] and all(one[key] == head[key] for key in keys)
    )  # fmt: skip
    entry = next(same, None)
    if entry is None:
        held["choices"].append(entry := {**head, "kernels": {}})
    for name, (times, start, fits) in kernels.items():
        first, rows = start, list[dict[str, Any]]()
        entry["kernels"][name] = {"measurement": _named(held, measurement), "from": first, "rows": rows}
        for span in spans(times, fits):
            microseconds = {str(m): in_microseconds(seconds) for m, seconds in span.seconds.items()}
            rows.append({"to": span.last, "configuration": changed(span.made), "microseconds": microseconds})
            yield {
                "op": head["op"], "shape": head["shape"], "kernel": name, "first": first, "last": span.last,
                "configuration": words(span.made), "microseconds": microseconds,
            }  # fmt: skip
            first = (span.last or 0) + 1


def _named(held: dict[str, Any], measurement: Mapping[str, Any]) -> str:
    """The name of a measurement in a file's content, where it is put if it is not there."""
    for name, one in held["measurements"].items():
        if one == measurement:
            return str(name)
    name = str(1 + max((int(one) for one in held["measurements"] if one.isdecimal()), default=0))
    held["measurements"][name] = dict(measurement)
    return name


def in_microseconds(seconds: float) -> float:
    """With four digits."""
    return float(f"{seconds * 1e6:.4g}")


def changed(made: Any) -> dict[str, Any]:
    """The fields of a configuration that are not its class's defaults."""
    default = type(made)()
    return {
        one.name: getattr(made, one.name)
        for one in fields(made)
        if getattr(made, one.name) != getattr(default, one.name)
    }


def words(made: Any) -> str:
    """A configuration, as ``plan`` has it."""
    return " ".join(f"{one.name}={getattr(made, one.name)}" for one in fields(made))


def text(held: Mapping[str, Any]) -> str:
    """A file of a content: a line for each range of rows, and no measurement that nothing refers to."""
    used = {kernel["measurement"] for entry in held["choices"] for kernel in entry["kernels"].values()}
    measurements = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(one)}" for name, one in held["measurements"].items() if name in used
    )
    entries = []
    for entry in held["choices"]:
        head = ", ".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in entry.items() if name != "kernels")
        kernels = []
        for name, kernel in entry["kernels"].items():
            start = f'{{"measurement": {json.dumps(kernel["measurement"])}, "from": {kernel["from"]}, "rows": ['
            rows = ",\n".join(f"        {json.dumps(row)}" for row in kernel["rows"])
            kernels.append(f"      {json.dumps(name)}: {start}\n{rows}]}}")
        entries.append(f'    {{{head}, "kernels": {{\n' + ",\n".join(kernels) + "}}")
    body = ",\n".join(entries)
    return (
        f'{{\n  "format": {held["format"]},\n  "measurements": {{\n{measurements}\n  }},\n'
        f'  "choices": [\n{body}\n  ]\n}}\n'
    )


def check_place(path: Path) -> None:
    """TargetError where a file cannot be written, as far as that can be told without writing."""
    try:
        there = next(folder for folder in path.absolute().parents if folder.exists())
    except OSError as error:
        raise TargetError("choices of kernels cannot be written", file=str(path), got=error.strerror) from error
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "it may not be written to" if there.is_dir() else "it is no folder"
        raise TargetError("choices of kernels cannot be written", file=str(path), got=f"{there}, and {reason}")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """While no other process that asks for this writes a file in the same folder; TargetError where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise TargetError("choices of kernels cannot be written", file=str(path), got=error.strerror) from error
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write(path: Path, held: Mapping[str, Any]) -> None:
    """A file of a content in a folder that is there, all of it or nothing; TargetError where it cannot be."""
    made = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            made = file.name
            file.write(text(held))
            file.flush()
            os.fsync(file.fileno())
        Path(made).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(made, path)
    except OSError as error:
        raise TargetError("choices of kernels cannot be written", file=str(path), got=error.strerror) from error
    finally:
        if made is not None:
            with suppress(OSError):
                Path(made).unlink()
