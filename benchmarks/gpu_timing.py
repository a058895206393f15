"""The timing protocol of the GPU's figures: that of ``halfbyte.timing``, and the host's time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from halfbyte.timing import Timed, elapsed, in_rounds, launches

__all__ = ["Timed", "elapsed", "host_seconds", "in_rounds", "launches"]


def host_seconds(call: Callable[[], Any], batches: int = 9, count: int = 200) -> float:
    """Of the host for one call, while the device keeps up: the median of batches."""
    for _ in range(count):
        call()
    taken = []
    for _ in range(batches):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        taken.append((time.perf_counter() - start) / count)
    return statistics.median(taken)
