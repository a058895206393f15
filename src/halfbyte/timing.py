"""The timing protocol of figures and of ``halfbyte tune``, on a GPU.

What is compared is captured in CUDA graphs of many launches each, weights in rotation, and the graphs take turns, each
round in another order. A batch is one replay that is not counted, and then as many as fill 3 ms, between two events. On
a CPU, where what measures is itself tried out, calls are made one after another.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

BATCH_SECONDS = 3e-3
GRAPH_SECONDS = 1e-3
"""A graph is at least this long, so that its start does not count."""


def launches(copies: int, seconds: float) -> int:
    """How many launches a graph has: whole turns of the copies, of about so many seconds each."""
    return copies * max(1, math.ceil(GRAPH_SECONDS / (copies * seconds)))


@dataclass
class Timed:
    """A candidate's calls, and the seconds of one in each batch.

    Args:
        call: computes with weight ``i``.
        copies: of the weight.
        count: calls in a replay.
        device: "cuda", or "cpu".
        batch_seconds: how long a batch takes, at least one replay.
    """

    call: Callable[[int], Any]
    copies: int
    count: int
    device: str
    seconds: list[float] = field(default_factory=list)
    graph: Any = None
    batch_seconds: float = BATCH_SECONDS

    def __post_init__(self) -> None:
        for _ in range(3):  # compiles; and what is used again and again may be launched early, while the last one ends
            for i in range(self.copies):
                self.call(i)
            if self.device == "cuda":
                torch.cuda.synchronize()
        if self.device == "cuda":
            gc.disable()  # a graph that it frees would break the capture; torch.cuda.graph collects all before each one
            try:
                self.capture()
            finally:
                gc.enable()

    def capture(self) -> None:
        """Put the calls of a replay into a graph."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_capturing()):
            self.graph.capture_begin()
            try:
                self._calls()
            finally:
                self.graph.capture_end()

    def _calls(self) -> None:
        for i in range(self.count):
            self.call(i % self.copies)

    def replay(self) -> None:
        """Run them once."""
        if self.graph is None:
            self._calls()
        else:
            self.graph.replay()

    def batch(self) -> None:
        """Measure once."""
        replays = 1
        if self.seconds:
            replays = max(1, round(self.batch_seconds / (self.seconds[-1] * self.count)))
        self.replay()
        self.seconds.append(elapsed(self.device, self.replay, replays) / (replays * self.count))

    @property
    def median(self) -> float:
        """Of the batches' seconds."""
        return statistics.median(self.seconds)


@functools.cache
def _capturing() -> Any:
    """The stream of captures: libraries keep memory for each that they see."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def elapsed(device: str, call: Callable[[], Any], count: int) -> float:
    """Seconds of the device for so many calls, one after another."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


def in_rounds(all_timed: Sequence[Timed], rounds: int, pause: float = 0.0) -> None:
    """Measure all in each round, each time another one first; the first batch of each is not counted.

    Args:
        all_timed: what takes turns; of one that has batches already the first of those is not counted.
        rounds: how many.
        pause: seconds of rest before each batch: long products heat the GPU until it slows down.
    """
    for timed in all_timed:
        if not timed.seconds:
            timed.batch()
    for i in range(rounds):
        first = i % len(all_timed)
        for timed in [*all_timed[first:], *all_timed[:first]]:
            time.sleep(pause)
            timed.batch()
    for timed in all_timed:
        del timed.seconds[0]


READ_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""What a probe reads: more than caches hold."""


def read_rate(device: str) -> float:
    """Bytes a second that a device of torch's reads at best, of memory that no cache holds: the best of ten sums."""
    kind = torch.device(device).type
    memory = torch.ones(READ_BYTES.get(kind, 256 << 20) // 4, device=device)
    memory.sum()
    return memory.nbytes / min(elapsed(kind, memory.sum, 1) for _ in range(10))
