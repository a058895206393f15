"""The timing protocol of the CPU's figures: who is measured in which process, in turns, and what a row says.

Each subject lives in a process of its own, started with its own environment, because the idle threads of one OpenMP
pool spin for a while and would disturb the next one's. Subjects take turns, a short batch each, so that a drift of the
machine hits all of them; what is compared comes from the same turns. Each batch stands between two of the read probe,
where one is compared with it. A batch of several calls begins with one that is not counted. A batch in which others
took more than 5 % of the machine, by the system's own count, is measured again, up to 8 times; rows count those that
stayed so.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DISTURBED = 0.05
STEADY = 1.15
ATTEMPTS = 8
BATCH_SECONDS = 0.15


class Subject:
    """What runs in a process of its own: ``prepare`` fills ``calls`` by key, ``batch`` times them in rotation."""

    def __init__(self, threads: int, megabytes: float) -> None:
        self.threads, self.megabytes = threads, megabytes
        self.calls: dict[str, Callable[[int], Any]] = {}
        self.copies: dict[str, int] = {}
        self.next: dict[str, int] = {}
        self.shape = (0, 0)
        self.weights: dict[str, list[Any]] = {}

    def forget(self, shape: tuple[int, int]) -> None:
        """Let go of all weights and calls; those of another shape come."""
        self.shape = shape
        self.weights.clear()
        self.calls.clear()

    def offer(self, key: str, call: Callable[[int], Any], copies: int) -> None:
        """``call(i)`` computes with copy ``i``."""
        self.calls[key], self.copies[key] = call, copies
        self.next.setdefault(key, 0)

    def batch(self, key: str, count: int) -> tuple[list[float], float]:
        """Seconds of so many calls, each on the next copy, and the share of the machine that others took."""
        call, copies = self.calls[key], self.copies[key]

        def once() -> float:
            i = self.next[key] = (self.next[key] + 1) % copies
            start = time.perf_counter()
            call(i)
            return time.perf_counter() - start

        gc.collect()
        gc.disable()
        if count > 1:
            once()
        start, busy, own = time.perf_counter(), _busy(), _own()
        seconds = [once() for _ in range(count)]
        wall = time.perf_counter() - start
        others = max(0.0, (_busy() - busy) - (_own() - own) - 0.02)  # the kernel counts in steps of 10 ms
        gc.enable()
        return seconds, others / (wall * (os.cpu_count() or 1))


def _busy() -> float:
    """Seconds that all cores together were not idle, stolen ones included."""
    if not Path("/proc/stat").exists():
        return _own()
    with open("/proc/stat") as stat:
        user, nice, system, _, _, irq, soft, steal, *_ = (int(field) for field in stat.readline().split()[1:])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    own = os.times()
    return own.user + own.system


class Remote:
    """A subject in its process.

    Args:
        make: builds the subject there.
        environment: what is set there, beside the caller's.
    """

    def __init__(
        self, make: Callable[..., Subject], arguments: tuple[Any, ...], environment: Mapping[str, str]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        with _environment(environment):
            self.process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
            self.process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method there; RuntimeError with one line where it raises."""
        try:
            self.pipe.send((method, arguments))
            answer, value = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise RuntimeError(f"its process ended with status {self.process.exitcode}") from None
        if answer == "error":
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        self.pipe.close()
        self.process.join()


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(pipe: Any, make: Callable[..., Subject], arguments: tuple[Any, ...]) -> None:
    subject: Subject | None = None
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            subject = subject or make(*arguments)
            pipe.send(("done", getattr(subject, method)(*given)))
        except Exception as error:
            lines = str(error).splitlines() or [""]
            name = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            pipe.send(("error", name + lines[0]))


@dataclass
class Timed:
    """One subject's calls: seconds of each batch, the probe's median before and after it, and what stayed disturbed."""

    remote: Remote
    key: str
    batches: list[list[float]] = field(default_factory=list)
    around: list[tuple[float, float]] = field(default_factory=list)
    disturbed: int = 0

    @property
    def seconds(self) -> list[float]:
        return [seconds for batch in self.batches for seconds in batch]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def beside(self) -> list[tuple[list[float], float]]:
        """Batches with the mean of their two probes, without those whose probes differ by more than 15 % if any agree.

        A virtual machine's share of the memory changes within a second, and stays what it is for some.
        """
        pairs = list(zip(self.batches, self.around, strict=True))
        steady = [(batch, both) for batch, both in pairs if max(both) <= STEADY * min(both)]
        return [(batch, statistics.mean(both)) for batch, both in steady or pairs]

    def probes(self) -> float:
        """How many of the probe's calls one of these takes: the median over batches, each beside its own probes."""
        return statistics.median(statistics.median(batch) / probe for batch, probe in self.beside())


def in_turns(all_timed: list[Timed], turns: int, probe: Timed | None = None) -> None:
    """Measure all in turns, a batch of about 0.15 s each and at least a call, the probe before and after every one."""
    counts = {}
    for timed in [*all_timed, *([probe] if probe else [])]:
        timed.remote.ask("batch", timed.key, 1)  # compiles, touches pages
        (first,), _ = timed.remote.ask("batch", timed.key, 1)
        counts[id(timed)] = max(1, round(BATCH_SECONDS / first))
    for _ in range(turns):
        before = _quiet_batch(probe, counts[id(probe)]) if probe else 0.0
        for timed in all_timed:
            _quiet_batch(timed, counts[id(timed)])
            if probe:
                after = _quiet_batch(probe, counts[id(probe)])
                timed.around.append((before, after))
                before = after


def _quiet_batch(timed: Timed, count: int) -> float:
    """Measure until others leave the machine alone, or keep the best of the attempts; the median of the batch."""
    kept: tuple[float, list[float]] | None = None
    for attempt in range(ATTEMPTS):
        seconds, others = timed.remote.ask("batch", timed.key, count)
        if kept is None or others < kept[0]:
            kept = others, seconds
        if kept[0] <= DISTURBED:
            break
        time.sleep(0.05 * attempt)
    assert kept is not None
    timed.disturbed += kept[0] > DISTURBED
    timed.batches.append(kept[1])
    return statistics.median(kept[1])


@dataclass(frozen=True)
class Figure:
    """A number of a row, with what it must reach and what it aims at; ``least`` says whether more is better."""

    name: str
    value: float
    must: float | None = None
    aim: float | None = None
    least: bool = True

    @property
    def met(self) -> bool | None:
        if self.must is None:
            return None
        return self.value >= self.must if self.least else self.value <= self.must

    def __str__(self) -> str:
        text = f"{self.value:.3g} {self.name}"
        if self.must is None:
            return text
        return f"{text}, {'at least' if self.least else 'at most'} {self.must:g}: {'met' if self.met else 'MISSED'}"


@dataclass(frozen=True)
class Row:
    """What was measured, its median and fastest seconds, and its figures; or why there are none."""

    what: str
    who: str
    seconds: float | None = None
    best: float | None = None
    figures: tuple[Figure, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""

    def __str__(self) -> str:
        head = f"{self.what:<25}{self.who:<40}"
        if self.seconds is None:
            return f"{head}{self.missing}"
        return f"{head}{self.seconds * 1e6:>11.1f} us  {' | '.join(map(str, self.figures))}"


def machine() -> dict[str, Any]:
    """The processor and the system."""
    found: dict[str, Any] = {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "flags", "cpu family", "model", "cache size"):
            found.setdefault(name.strip(), value.strip())
    found["avx512"] = {"avx512f", "avx512bw", "avx512vl"} <= set(found.pop("flags", "").split())
    return found


def versions() -> dict[str, str | None]:
    """Of the packages that figures depend on."""
    found: dict[str, str | None] = {}
    for name in (
        "numpy",
        "numba",
        "llvmlite",
        "torch",
        "triton",
        "transformers",
        "nvidia-modelopt",
        "llama-cpp-python",
        "humming-kernels",
    ):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """Of the source, with a + where files differ from it; None outside a repository or without git."""
    here = Path(__file__).parent
    try:
        head, changed = (
            subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except OSError:
        return None
    return None if head.returncode else head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def entry(row: Row) -> dict[str, Any]:
    """A row as JSON holds it, without what is empty."""
    found = {name: value for name, value in asdict(row).items() if value not in (None, "", {}, ())}
    if row.figures:
        found["figures"] = [asdict(figure) | {"met": figure.met} for figure in row.figures]
    return found


def write(path: Path, rows: list[Row], **more: Any) -> None:
    """All of it as JSON."""
    held = [entry(row) for row in rows]
    document = {"machine": machine(), "versions": versions(), "commit": commit(), **more, "rows": held}
    path.write_text(json.dumps(document, indent=1) + "\n")
