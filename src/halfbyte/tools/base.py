"""What the tools share: progress, the choice of modules, and threads for the verbs that only read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import numpy as np

from halfbyte.findings import Finding
from halfbyte.modules import Module
from halfbyte.patterns import Patterns
from halfbyte.stored import CHUNK, Stored, View, read_into
from halfbyte.tasks import Meter, Progress, worker_count

__all__ = ["CHUNK", "Meter", "Progress", "chosen", "idle", "run", "same_bytes", "worker_count"]


def chosen(
    modules: Sequence[Module], include: Iterable[str], exclude: Iterable[str]
) -> tuple[list[Module], list[Finding]]:
    """The modules that ``include`` (or all) selects and ``exclude`` does not, and findings for idle patterns."""
    wanted, unwanted = Patterns(include), Patterns(exclude)
    if not wanted and not unwanted:
        return list(modules), []
    both = [(m, wanted.first(m.name), unwanted.first(m.name)) for m in modules]
    return [m for m, yes, no in both if (yes or not wanted) and not no], idle(wanted, unwanted)


def idle(*patterns: Patterns) -> list[Finding]:
    """A finding for each pattern that has selected nothing."""
    return [Finding("HB301", got=pattern) for group in patterns for pattern in group.unused()]


def run(jobs: Sequence[Callable[[], None]], workers: int, meter: Meter) -> None:
    """Run jobs, which count their bytes on ``meter``, on threads; the first exception ends all, and is raised."""
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            job()
        return
    pool = ThreadPoolExecutor(min(workers, len(jobs)), thread_name_prefix="halfbyte")
    try:
        done, _ = wait([pool.submit(job) for job in jobs], return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    except BaseException:
        meter.cancel()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def same_bytes(mine: Stored, theirs: Stored) -> bool:
    """Whether two tensors hold the same bytes."""
    if mine.nbytes != theirs.nbytes:
        return False
    made = any(isinstance(t, View) and not t.in_place for t in (mine, theirs))
    step = max(mine.nbytes, 1) if made else CHUNK  # what is made is made whole
    buffers = [np.empty(min(step, mine.nbytes), np.uint8) for _ in range(2)]
    for start in range(0, mine.nbytes, step):
        pieces = [buffer[: min(step, mine.nbytes - start)] for buffer in buffers]
        read_into(mine, start, pieces[0])
        read_into(theirs, start, pieces[1])
        if not np.array_equal(pieces[0], pieces[1]):
            return False
    return True
