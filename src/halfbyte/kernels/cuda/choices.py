"""Which kernel is tried first on a GPU, and in which configuration: what ``halfbyte tune`` measured there.

One file is shipped, ``choices.json`` beside this one, for the GPUs that it names. ``halfbyte tune`` writes another for
the GPU it runs on, to where ``HALFBYTE_CHOICES`` says or else to ``halfbyte/choices.json`` in the user's cache folder;
what that holds of a shape and kernel replaces what is shipped. Both are read once in a process::

    {"format": 2,
     "measurements": {"h200": {"gpu": ..., "multiprocessors": 132, "driver": ..., "torch": ..., "triton": ...,
                               "date": ..., "command": ...}},
     "choices": [
       {"op": "linear", "capability": 90, "dtypes": ["bfloat16", "float16"], "shape": [14336, 4096], "kernels": {
          "a": {"measurement": "h200", "from": 1, "rows": [
            {"to": 8, "configuration": {...}, "microseconds": {"1": 10.4, "8": 10.5}},
            {"to": null, "configuration": {...}, "microseconds": {"64": 20.1}}]}}}]}

``shape`` is (N, K). Of a kernel's ``rows`` each holds from the last one's ``to`` + 1, the first from ``from``, to its
own, and null is without end; ``configuration`` has the fields that are not their class's defaults. The first of
``dtypes`` was measured; the others have its choices, and no times. Kernels are tried in the order of their times at
the least number of rows measured that is not less than a call's. Nothing is measured at run time.

A weight takes the entry that is nearest, by the |log2| of the ratio of their sizes N * K plus that of the ratio of
their N / K. A kernel whose default configuration comes of a model of its time takes that instead where its own shape
was not measured: how full the last wave of tiles is changes from one N to the next, and the model knows it.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, log2
from pathlib import Path
from typing import Any, Final, TypeVar

from halfbyte.errors import FormatError, UsageError
from halfbyte.jit import user_folder
from halfbyte.kernels.base import Call

C = TypeVar("C")

FORMAT: Final = 2
SHIPPED: Final = Path(__file__).with_name("choices.json")
PROVENANCE: Final = ("gpu", "multiprocessors", "driver", "torch", "triton", "date", "command")
"""What a measurement states."""


@dataclass(frozen=True)
class Choice:
    """A kernel for some weights and rows.

    Attributes:
        kernel: its name.
        configuration: fields of the kernel's configuration that are not their class's defaults.
        microseconds: measured, by the number of rows.
        shape: (N, K) of the weight that was measured.
        dtype: of the activations that were measured.
        measurement: what was measured where, as in ``PROVENANCE``.
        file: that says so.
    """

    kernel: str
    configuration: dict[str, Any] = field(hash=False)
    microseconds: dict[int, float] = field(hash=False)
    shape: tuple[int, int]
    dtype: str
    measurement: dict[str, Any] = field(hash=False)
    file: Path

    @property
    def origin(self) -> str:
        """The file, in words."""
        return "shipped" if self.file == SHIPPED else str(self.file)


@dataclass(frozen=True)
class Range:
    """The rows for which a choice holds; ``last`` None is without end."""

    first: int
    last: int | None
    choice: Choice


@dataclass(frozen=True, eq=False)
class Entry:
    """What was measured of a weight's shape: for each kernel its ranges of rows."""

    op: str
    capability: int
    dtypes: tuple[str, ...]
    shape: tuple[int, int]
    kernels: Mapping[str, tuple[Range, ...]]

    @functools.cached_property
    def points(self) -> tuple[int, ...]:
        """The numbers of rows that were measured."""
        held = (one.choice.microseconds for ranges in self.kernels.values() for one in ranges)
        return tuple(sorted({rows for times in held for rows in times}))

    def at(self, rows: int) -> tuple[Choice, ...]:
        """The kernels that were measured for so many rows, the fastest first."""
        point = next((point for point in self.points if point >= rows), self.points[-1] if self.points else rows)
        found = [(_time(ranges, point), of(ranges, rows)) for ranges in self.kernels.values()]
        timed = [(time, choice) for time, choice in found if choice is not None]
        return tuple(choice for _, choice in sorted(timed, key=lambda one: one[0]))


def of(ranges: Iterable[Range], rows: int) -> Choice | None:
    """The choice of the range that holds so many rows; 0 rows are as 1."""
    rows = max(1, rows)
    return next((r.choice for r in ranges if r.first <= rows and (r.last is None or rows <= r.last)), None)


def _time(ranges: Iterable[Range], rows: int) -> float:
    """Microseconds for so many rows, between those that were measured on a line of logarithms."""
    times = {m: us for one in ranges for m, us in one.choice.microseconds.items()}
    below, above = (
        max((m for m in times if m <= rows), default=None),
        min((m for m in times if m >= rows), default=None),
    )
    if below is None or above is None:
        return inf if not times else times[above] if above else times[below or 0] * rows / (below or 1)
    part = 0.0 if below == above else log2(rows / below) / log2(above / below)
    return float(times[below] * (times[above] / times[below]) ** part)


def user_file() -> Path | None:
    """Where the user's choices are, or would be; None where HALFBYTE_CHOICES is "none"."""
    asked = os.environ.get("HALFBYTE_CHOICES")
    if asked == "none":
        return None
    return Path(asked) if asked else user_folder() / "choices.json"


def read(path: Path) -> tuple[Entry, ...]:
    """The entries of a file.

    Raises:
        FormatError: it is not as the module says, or of another format.
        OSError: it cannot be read.
    """
    return tuple(_entries(load(path), path))


def load(path: Path) -> dict[str, Any]:
    """A file's JSON, of which ``read`` makes entries; raises as that."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe or a device, which may have no end
        raise OSError(errno.EINVAL, "It is no regular file")
    try:
        held: dict[str, Any] = json.loads(path.read_text())
        found = held.get("format")
    except (AttributeError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    if found != FORMAT:
        raise FormatError(
            "choices of kernels in another format", file=str(path), got=found, expected=FORMAT, hint=_HINT
        )
    list(_entries(held, path))
    return held


_HINT: Final = "delete the file, and run halfbyte tune"


def _damaged(path: Path, error: Exception) -> FormatError:
    return FormatError("damaged choices of kernels", file=str(path), got=f"{type(error).__name__}: {error}", hint=_HINT)


def _entries(held: dict[str, Any], path: Path) -> Iterator[Entry]:
    try:
        for measurement in held["measurements"].values():
            if set(measurement) != set(PROVENANCE):
                raise ValueError(f"a measurement states {', '.join(PROVENANCE)}, not {', '.join(measurement)}")
            _count(measurement["multiprocessors"], "multiprocessors")
            _text(*(of for name, of in measurement.items() if name != "multiprocessors"))
        for entry in held["choices"]:
            n, k = entry["shape"]
            _count(n, "N")
            _count(k, "K")
            if isinstance(entry["dtypes"], str):
                raise TypeError(f"{entry['dtypes']!r} is no list of dtypes")
            measured, *others = entry["dtypes"]
            _text(entry["op"], measured, *others)
            _count(entry["capability"], "a compute capability")
            kernels = {}
            for name, of_kernel in entry["kernels"].items():
                measurement = held["measurements"][of_kernel["measurement"]]
                kernels[name] = tuple(_ranges(name, of_kernel, (n, k), measured, measurement, path))
            yield Entry(entry["op"], entry["capability"], (measured, *others), (n, k), kernels)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _count(value: Any, what: str) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{what} is a whole number from 1 on, not {value!r}")


def _text(*values: Any) -> None:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} is no text")


def _microseconds(held: dict[str, Any]) -> dict[int, float]:
    times = {int(rows): us for rows, us in held.items()}
    for rows, us in times.items():
        _count(rows, "M")
        if isinstance(us, bool) or not isinstance(us, int | float) or not 0 < us < inf:
            raise ValueError(f"microseconds are a number above 0, not {us!r}")
    return {rows: float(us) for rows, us in times.items()}


def _ranges(
    kernel: str, held: dict[str, Any], shape: tuple[int, int], dtype: str, measurement: dict[str, Any], path: Path
) -> Iterator[Range]:
    first, ends = held["from"], [one["to"] for one in held["rows"]]
    for end in (first, *(end for end in ends if end is not None)):
        _count(end, f"M of {kernel}")
    rising = [first - 1, *(inf if end is None else end for end in ends)]
    if not ends or any(last >= end for last, end in pairwise(rising)):
        raise ValueError(f"rows of {kernel} do not rise: from {first} to {ends}")
    for one in held["rows"]:
        if not isinstance(one["configuration"], dict):
            raise TypeError(f"{one['configuration']!r} is no configuration of {kernel}")
        times = _microseconds(one["microseconds"])
        choice = Choice(kernel, dict(one["configuration"]), times, shape, dtype, measurement, path)
        yield Range(first, one["to"], choice)
        first = (one["to"] or 0) + 1


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Those that are shipped, and the user's, which replace them.

    Raises:
        FormatError: as ``read``.
        UsageError: HALFBYTE_CHOICES names a file that is not there, or the user's cannot be read.
    """
    held = {_key(entry): entry for entry in read(SHIPPED)}
    for entry in _users():
        before = held.get(_key(entry))
        kernels = {**(before.kernels if before else {}), **entry.kernels}
        held[_key(entry)] = Entry(entry.op, entry.capability, entry.dtypes, entry.shape, kernels)
    return tuple(held.values())


def _key(entry: Entry) -> Any:
    return entry.op, entry.capability, entry.dtypes[0], entry.shape


def _users() -> tuple[Entry, ...]:
    path = user_file()
    try:
        return read(path) if path else ()
    except FileNotFoundError:
        if not os.environ.get("HALFBYTE_CHOICES"):
            return ()
        raise UsageError(
            "HALFBYTE_CHOICES names no file", got=str(path), hint="run halfbyte tune, which writes it, or unset it"
        ) from None
    except NotADirectoryError:  # a user without a home
        return ()
    except OSError as error:
        raise UsageError(
            "choices of kernels cannot be read", file=str(path), got=error.strerror, hint="HALFBYTE_CHOICES=none"
        ) from error


@functools.lru_cache(maxsize=4096)
def _by_distance(op: str, capability: int, shape: tuple[int, int], dtype: str) -> tuple[Entry, ...]:
    n, k = shape
    held = [e for e in entries() if e.op == op and e.capability == capability and dtype in e.dtypes]
    if not n * k:
        return ()

    def far(entry: Entry) -> tuple[float, bool]:
        other, along = entry.shape
        return abs(log2(n * k / (other * along))) + abs(log2(n / k * along / other)), entry.dtypes[0] != dtype

    return tuple(sorted(held, key=far))


def _near(call: Call) -> tuple[Entry, ...]:
    if not call.capability:  # on a CPU, which no file is about
        return ()
    return _by_distance(call.op, call.capability, (call.shape[-2], call.shape[-1]), call.dtype)


def pick(call: Call) -> tuple[Choice, ...]:
    """What to try for a call, best first: of the nearest entry that has such rows; () where nothing was measured."""
    return next((found for entry in _near(call) if (found := entry.at(call.rows))), ())


def ends(call: Call) -> tuple[int, ...]:
    """The last M of each range in which the same is tried, as far as the nearest entry says; there may be others."""
    near = _near(call)[:1]
    lasts = {one.last for entry in near for ranges in entry.kernels.values() for one in ranges}
    firsts = {ranges[0].first - 1 for entry in near for ranges in entry.kernels.values()}
    points = {point for entry in near for point in entry.points}
    return tuple(sorted(end for end in {*lasts, *firsts, *points} if end))


def choice(call: Call, kernel: str) -> Choice | None:
    """What was measured of a kernel for calls like this one, where that is nearest; None where it was not."""
    found = (of(entry.kernels.get(kernel, ()), call.rows) for entry in _near(call))
    return next((choice for choice in found if choice is not None), None)


def measured(call: Call, kernel: str) -> tuple[tuple[int, int], float] | None:
    """The nearest shape at which a kernel was measured, and its microseconds there for a call's rows; else None."""
    for entry in _near(call):
        ranges = entry.kernels.get(kernel, ())
        if of(ranges, call.rows) is not None:
            return entry.shape, _time(ranges, max(1, call.rows))
    return None


MANY_ROWS: Final = 4096
"""More than these run as these do."""


def modelled_rows(rows: int) -> int:
    """For how many rows a model decides: the next power of two, so that what runs does not change with each M."""
    return min(MANY_ROWS, 1 << max(0, rows - 1).bit_length())


def configured(call: Call, kernel: str, default: C, known: Collection[C], *, model: bool = False) -> C:
    """The configuration of a kernel, a frozen dataclass, for a call.

    Args:
        call: what is computed.
        kernel: its name.
        default: where nothing was measured; of the class that the call takes.
        known: the configurations that there are.
        model: the default is better than what was measured at another shape.

    Raises:
        FormatError: a file has one that the kernel has not.
    """
    found = choice(call, kernel)
    if found is None or (model and found.shape != tuple(call.shape[-2:])):
        return default
    made = None
    with suppress(TypeError):
        made = type(default)(**found.configuration)
    for one in known:
        if one == made:
            return one
    raise FormatError(f"choices that {kernel} does not have", file=str(found.file), got=found.configuration, hint=_HINT)
