"""Tasks and jobs: results come back in their places, the first jobs come first, and the first error ends all."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from halfbyte.errors import UsageError
from halfbyte.tasks import Crew, Task, worker_count


def give(value, seen=None, seconds=0.0):
    time.sleep(seconds)
    if seen is not None:
        seen.append(value)
    return value


def fail(message):
    raise ValueError(message)


def ran(jobs, width, done=lambda count: None):
    Crew("thread", width).run(jobs, done)


WIDTHS = pytest.mark.parametrize("width", [1, 2, 5])


@WIDTHS
def test_results_are_in_the_order_of_the_steps(width):
    got = []

    def job():
        got.append((yield [Task(partial(give, i, None, 0.002 * (5 - i))) for i in range(5)]))
        got.append((yield [Task(partial(give, "a"))]))

    ran([job()], width)
    assert got == [[0, 1, 2, 3, 4], ["a"]]


@WIDTHS
def test_jobs_in_jobs(width):
    """A step may be a job; what it returns is its result, also where it has nothing to do."""
    got = []

    def inner(n):
        values = yield [Task(partial(give, n, None, 0.001)), Task(partial(give, n * n))]
        more = (yield [leaf(values)])[0] if n % 2 else 0
        return sum(values) + more

    def leaf(values):
        nothing = yield []
        assert nothing == []
        return 100 * len(values)

    def outer():
        got.extend((yield [inner(1), Task(partial(give, -1)), inner(2), leaf([]), inner(3)]))

    ran([outer(), outer()], width)
    assert got == [202, -1, 6, 0, 212] * 2


def test_depth_first_and_in_order():
    """A job of the first level is at its end before the next is begun, and a step before the next."""
    seen = []

    def inner(name):
        yield [Task(partial(give, f"{name}1", seen))]
        yield [Task(partial(give, f"{name}2", seen))]

    def outer(name):
        seen.append(f"begin {name}")
        yield [inner(f"{name}a"), Task(partial(give, f"{name}t", seen)), inner(f"{name}b")]
        yield [Task(partial(give, f"end {name}", seen))]

    ran([outer("x"), outer("y")], 1)
    order = ["begin {}", "{}a1", "{}a2", "{}t", "{}b1", "{}b2", "end {}"]
    assert seen == [text.format(name) for name in "xy" for text in order]


@WIDTHS
def test_no_more_at_once_than_the_width(width):
    lock, now, most = threading.Lock(), [0], [0]

    def work():
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.003)
        with lock:
            now[0] -= 1

    def job():
        yield [Task(work) for _ in range(5)]

    ran((job() for _ in range(4)), width)
    assert most == [width]


@WIDTHS
def test_an_error_ends_all(width):
    """It is raised here; jobs that wait are not begun, and the tasks under way have ended."""
    seen, begun = [], []

    def job(name):
        begun.append(name)
        yield [Task(partial(give, name, seen)), Task(partial(fail, name)), Task(partial(give, name, seen, 0.01))]
        raise AssertionError

    with pytest.raises(ValueError, match="a" if width == 1 else "^[a-j]$"):
        ran((job(name) for name in "abcdefghij"), width)
    count = len(seen)
    time.sleep(0.03)
    assert len(seen) == count < 20
    assert len(begun) < 10


@WIDTHS
def test_an_error_of_a_job_and_of_the_progress(width):
    def job():
        yield [Task(partial(give, 1), 3)]
        raise KeyError("mine")

    def stop(count):
        raise RuntimeError(count)

    with pytest.raises(KeyError, match="mine"):
        ran([job()], width)
    with pytest.raises(RuntimeError, match="3"):
        ran([job()], width, stop)


@WIDTHS
def test_bytes_are_counted_in_this_thread(width):
    counted = []

    def job(count):
        yield [Task(partial(give, 0), count), Task(partial(give, 0), 10)]

    ran([job(1), job(2)], width, lambda count: counted.append((count, threading.current_thread())))
    assert sum(count for count, _ in counted) == 23
    assert {thread for _, thread in counted} == {threading.main_thread()}


def test_nothing_to_do():
    ran([], 3)


def test_the_number_of_workers():
    assert worker_count(3) == 3
    assert worker_count(None) >= 1
    for wrong in (0, -1):
        with pytest.raises(UsageError, match="workers must be positive"):
            worker_count(wrong)
