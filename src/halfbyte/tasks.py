"""Work in pieces: tasks that run in this thread, on threads, on processes or on any executor, and jobs that await them.

A task is a call of a module-level function with plain arguments: it opens its files by path, reads and writes by
position, and returns something small, so that it can be pickled and run anywhere. A job is a generator in this
thread: it yields a list of tasks and further jobs, is sent the list of their results, and returns its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from halfbyte import jit
from halfbyte.errors import HalfbyteError, UsageError

PROCESS_BYTES = 24 << 20
"""Memory of a process of ours before its first task: the interpreter, NumPy, the modules of halfbyte."""

_ENOUGH = 256 << 20
"""Source bytes for each process that repay its start: about a second of work, beside a fifth of one.

Up to four, threads are as fast: NumPy lets go of the interpreter's lock. Beyond, they wait for it and for memory:
quantizing 8.6 GB on 16 cores took 11.5 s on 8 threads and 15.8 s on 16, and on as many processes 9.3 s and 5.8 s.
"""

Where: TypeAlias = Executor | Literal["processes"] | None
"""Where tasks run: on an executor, on processes where that pays, or (None) on threads."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread but one at a time."""


class Meter:
    """Counts bytes over threads and tells a progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done = total, 0
        self._progress, self._lock, self._cancelled = progress, threading.Lock(), False
        self.add(0)

    def cancel(self) -> None:
        """Make every further ``add`` raise, so that jobs on other threads end soon."""
        self._cancelled = True

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        if self._cancelled:
            raise CancelledError
        with self._lock:
            self.done += count
            if self._progress is not None:
                self._progress(self.done, self.total)


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Attributes:
        function: called without arguments; to be run elsewhere it must be picklable.
        nbytes: source bytes that are done when it is.
    """

    function: Callable[[], Any]
    nbytes: int = 0


Job: TypeAlias = Generator[Sequence["Step"], list[Any], Any]
Step: TypeAlias = Task | Job


def worker_count(workers: int | None) -> int:
    """How many workers to use: the number asked for, or one for each core this process may use."""
    if workers is not None and workers < 1:
        raise UsageError("workers must be positive", got=workers)
    affinity = getattr(os, "sched_getaffinity", None)
    return workers or (len(affinity(0)) if affinity else os.cpu_count() or 1)


@dataclass(frozen=True)
class Crew:
    """Who does the tasks.

    Attributes:
        kind: "thread", "process", or the name of the caller's executor class.
        width: how many tasks run at once.
        executor: the caller's, or None.
    """

    kind: str
    width: int
    executor: Executor | None = None

    @classmethod
    def of(cls, workers: int | None, where: Where, nbytes: int) -> Crew:
        """The crew for work on ``nbytes`` source bytes."""
        width = worker_count(workers)
        if isinstance(where, Executor):
            return cls(type(where).__name__, width, where)
        if where not in (None, "processes"):
            raise UsageError(
                "not an executor", got=repr(where), expected='a concurrent.futures.Executor or "processes"'
            )
        pays = width > 1 and nbytes >= width * _ENOUGH
        return cls("process" if where == "processes" and pays else "thread", width)

    def __str__(self) -> str:
        if self.executor is not None:
            return f"{self.width} on {self.kind}"
        plural = {"thread": "threads", "process": "processes"}[self.kind]
        return f"{self.width} {self.kind if self.width == 1 else plural}"

    @property
    def _starts_processes(self) -> bool:
        return self.kind == "process" and self.executor is None

    @property
    def own_bytes(self) -> int:
        """Memory that the crew takes before its first task."""
        return (self.width + 1) * PROCESS_BYTES if self._starts_processes else 0

    @property
    def own_processes(self) -> int:
        """How many processes of this machine do tasks, as far as the crew knows."""
        return self.width if self._starts_processes else 1

    def run(self, jobs: Iterable[Job], done: Callable[[int], None]) -> None:
        """Run jobs to their ends; the first exception ends all, waits for the tasks under way, and is raised.

        Args:
            jobs: begun in order, and the tasks of the first ones come first.
            done: told of source bytes, in this thread, as tasks end.

        Raises:
            HalfbyteError: a worker process died; else what a task raised.
        """
        with self._started() as (executor, limit):
            try:
                _Run(executor, limit, self.width, done).all(jobs)
            except BrokenExecutor:
                hint = "try fewer workers if it lacked memory; a script with processes needs if __name__ == '__main__':"
                raise HalfbyteError("a worker process died", hint=hint) from None

    @contextlib.contextmanager
    def _started(self) -> Iterator[tuple[Executor, int]]:
        if self.executor is not None:
            yield self.executor, 2 * self.width
        elif self.kind == "process":
            from concurrent.futures import ProcessPoolExecutor  # these two take longer to import than all else here
            from multiprocessing import get_context

            pool = ProcessPoolExecutor(self.width, get_context("spawn"), initializer=_follow_parent)
            # In a thread of its own Ctrl-C does not interrupt the start, and the processes inherit that they ignore it.
            starter = threading.Thread(target=_start, args=(pool, self.width))
            try:
                starter.start()
                starter.join()
                yield pool, 2 * self.width
            finally:
                starter.join()
                pool.shutdown(wait=True, cancel_futures=True)
        elif self.width > 1:
            with ThreadPoolExecutor(self.width, thread_name_prefix="halfbyte") as threads:
                yield threads, self.width
        else:
            yield _Here(), 1


class _Here(Executor):
    """Runs a task when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **options))
        return future


def _start(pool: Executor, width: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    with contextlib.suppress(BrokenExecutor):
        for _ in range(width):
            pool.submit(_nothing)


def _nothing() -> None:
    """The first task of each process."""


def _follow_parent() -> None:
    """End with the parent, also if it is killed: a process that waits for its next task would wait for ever."""
    from multiprocessing import parent_process

    parent = parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@dataclass(eq=False)
class _Root:
    """A job of the first level, with what is ready to run of it and of the jobs below it."""

    ready: deque[tuple[Step, _Node | None, int]]
    running: int = 0


@dataclass(eq=False)
class _Node:
    """A job that awaits the results of its last steps."""

    job: Job
    root: _Root
    parent: _Node | None
    slot: int
    results: list[Any] = field(default_factory=list)
    missing: int = 0


@dataclass
class _Run:
    executor: Executor
    limit: int
    width: int
    done: Callable[[int], None]

    def all(self, jobs: Iterable[Job]) -> None:
        """Run the jobs to their ends."""
        self.waiting = iter(jobs)
        self.roots: list[_Root] = []
        self.flying: dict[Future[Any], tuple[Task, _Node, int]] = {}
        try:
            while self._submit():
                finished, _ = wait(self.flying, return_when=FIRST_COMPLETED)
                for future in finished:
                    task, node, slot = self.flying.pop(future)
                    node.root.running -= 1
                    result = future.result()
                    self.done(task.nbytes)
                    self._deliver(node, slot, result)
        except BaseException:
            wait([future for future in self.flying if not future.cancel()])
            raise

    def _submit(self) -> bool:
        """Hand out tasks up to the limit; whether any is under way."""
        while len(self.flying) < self.limit:
            root = self._next_root()
            if root is None:
                break
            step, node, slot = root.ready.popleft()
            if isinstance(step, Task) and node is not None:
                self.flying[self.executor.submit(functools.partial(jit.alone, step.function))] = step, node, slot
                root.running += 1
            elif not isinstance(step, Task):
                self._advance(_Node(step, root, node, slot), None)
        return bool(self.flying)

    def _next_root(self) -> _Root | None:
        """The first job that has something ready; another one is begun where none has, up to one for each worker."""
        while True:
            ready = next((root for root in self.roots if root.ready), None)
            job = next(self.waiting, None) if ready is None and len(self.roots) < self.width else None
            if job is None:
                return ready
            self.roots.append(_Root(deque([(job, None, 0)])))

    def _deliver(self, node: _Node, slot: int, result: Any) -> None:
        node.results[slot] = result
        node.missing -= 1
        if not node.missing:
            self._advance(node, node.results)

    def _advance(self, node: _Node, results: list[Any] | None) -> None:
        """Send a job its results and take its next steps; they come before what else is ready of the same root."""
        try:
            steps = node.job.send(results)  # type: ignore[arg-type]
            while not steps:
                steps = node.job.send([])
        except StopIteration as end:
            if node.parent is None:
                self.roots.remove(node.root)
            else:
                self._deliver(node.parent, node.slot, end.value)
            return
        node.results, node.missing = [None] * len(steps), len(steps)
        node.root.ready.extendleft((step, node, slot) for slot, step in reversed(list(enumerate(steps))))
