"""``halfbyte tune``: what is measured, what is chosen and written; with a machine that computes its times, or a CPU."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import halfbyte as hb
from checkpoints import call
from gpu_codecs import needs_triton
from halfbyte import timing, trials, tuned, tuning, tuning_cuda
from halfbyte.cli import tune as command
from halfbyte.errors import FormatError, NoKernelError, TargetError, UnavailableError, UsageError
from halfbyte.kernels import KERNELS, Kernel, LinearArgs
from halfbyte.kernels.base import linear_cost, nothing_to_load
from halfbyte.kernels.cuda import choices, fp8_quantize, launch
from halfbyte.layouts import parse
from halfbyte.tuned import spans
from halfbyte.tuning import Job, LostError, Options, Result, tune
from helpers_run import call_like

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")

FACTS = {"gpu": "GPU", "multiprocessors": 100, "driver": "1", "torch": "2", "triton": "3"}


@dataclass(frozen=True)
class Few:
    size: int = 1


@dataclass(frozen=True)
class Many:
    size: int = 1
    wide: bool = False


def a_kernel(name, kinds, *, op_of=LinearArgs, bind=None, most=None):
    """A kernel for CUDA; ``kinds`` are (last M or None, configurations)."""

    def configurations(call):
        return next(held for last, held in kinds if last is None or call.rows <= last)

    def refuse(call):
        reasons = () if call.layout.name == "fragments" else ("reads fragments",)
        return reasons if most is None or call.rows <= most else (*reasons, f"takes up to {most} tokens")

    return Kernel(
        name=name,
        bundle=op_of,
        description="",
        refuse=refuse,
        load=nothing_to_load,
        launch=print,
        cost=linear_cost,
        bind=bind,
        configurations=configurations,
    )


DECODE = a_kernel("decode", [(None, (Few(1), Few(2)))], most=16)
GEMM = a_kernel("gemm", [(16, (Few(1), Few(4))), (None, (Many(1), Many(2, True)))])


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(tuning, "KERNELS", (DECODE, GEMM, *(k for k in KERNELS if k.name == "reference-torch")))


class Fake:
    """A machine whose times are a function of jobs: seconds, or a Result."""

    facts, capability = FACTS, 90

    def __init__(self, seconds=None):
        self.seconds = seconds or (lambda job: 1e-6 * (job.call.rows + job.made.size))
        self.compiled, self.measured, self.closed = [], [], False

    def compile(self, jobs):
        self.compiled = list(jobs)

    def measure(self, jobs):
        self.measured.append([str(job) for job in jobs])
        found = [self.seconds(job) for job in jobs]
        return [one if isinstance(one, Result) else Result(one) for one in found]

    def close(self):
        self.closed = True


def options(tmp_path, **changes):
    given = {"shapes": ((64, 64),), "rows": (1, 8, 16, 32), "precisions": ("exact",), "out": tmp_path / "made.json"}
    return Options(**given | changes)


# Ranges


def ends(times, fits=lambda made, rows: True):
    return [(one.last, one.made) for one in spans(times, fits)]


class TestSpans:
    def test_one_configuration_for_all_m_where_it_is_nearly_the_best(self):
        times = {1: {"a": 10.0, "b": 10.1}, 8: {"a": 12.1, "b": 12.0}, 16: {"a": 20.0, "b": 19.7}}
        assert spans(times, lambda made, rows: True) == [tuned.Span(None, "b", {1: 10.1, 8: 12.0, 16: 19.7})]

    def test_as_few_ranges_as_can_be(self):
        """The best alone would change three times."""
        times = {
            1: {"a": 1.0, "b": 1.019},
            2: {"a": 1.05, "b": 1.0},
            4: {"a": 1.0, "b": 1.015},
            8: {"a": 1.0, "b": 1.03},
        }
        assert ends(times) == [(4, "b"), (None, "a")]

    def test_beyond_the_limit_another_runs(self):
        assert ends({1: {"a": 1.0, "b": 1.021}, 2: {"a": 1.03, "b": 1.0}}) == [(1, "a"), (None, "b")]
        assert ends({1: {"a": 1.0, "b": 1.019}, 2: {"a": 1.03, "b": 1.0}}) == [(None, "b")]

    def test_what_was_not_measured_everywhere(self):
        assert ends({1: {"a": 1.0}, 2: {"b": 1.0}, 4: {"b": 1.0, "a": 0.5}}) == [(1, "a"), (2, "b"), (None, "a")]

    def test_a_range_goes_as_far_as_the_next_does_not_fit(self):
        fits = {"a": lambda rows: rows <= 16, "b": lambda rows: rows > 16}
        assert ends({8: {"a": 1.0}, 64: {"b": 1.0}}, lambda made, rows: fits[made](rows)) == [(16, "a"), (None, "b")]

    def test_the_last_goes_as_far_as_it_fits(self):
        assert ends({8: {"a": 1.0}}, lambda made, rows: rows <= 37) == [(37, "a")]


# The whole


@pytest.mark.usefixtures("kernels")
class TestTune:
    def test_what_is_written_is_what_is_chosen(self, tmp_path):
        def seconds(job):
            if job.kernel is DECODE:
                return (
                    {Few(1): 5e-6, Few(2): 6e-6}[job.made]
                    if job.call.rows <= 8
                    else {Few(1): 9e-6, Few(2): 8e-6}[job.made]
                )
            return 1e-6 * (20 + job.call.rows) * (1.5 if job.made in (Few(4), Many(1)) else 1)

        machine, seen = Fake(seconds), []
        report = tune(options(tmp_path), machine, lambda done, total: seen.append((done, total)))
        file = tmp_path / "made.json"
        (entry,) = choices.read(file)
        assert (entry.op, entry.capability, entry.dtypes) == ("linear", 90, ("bfloat16", "float16"))
        held = {
            name: [(one.first, one.last, one.choice.configuration, one.choice.microseconds) for one in ranges]
            for name, ranges in entry.kernels.items()
        }
        assert held == {
            "decode": [(1, 8, {}, {1: 5, 8: 5}), (9, 16, {"size": 2}, {16: 8})],
            "gemm": [(1, 16, {}, {1: 21, 8: 28, 16: 36}), (17, None, {"size": 2, "wide": True}, {32: 52})],
        }
        assert [one.kernel for one in entry.at(16)] == ["decode", "gemm"]
        assert [one.kernel for one in entry.at(17)] == ["gemm"]
        measurement = entry.at(1)[0].measurement
        assert {name: measurement[name] for name in FACTS} == FACTS
        assert measurement["command"] == "halfbyte tune --shapes 64x64 --rows 1,8,16,32 --precision exact"
        assert seen == [(4, 14), (8, 14), (12, 14), (14, 14)]
        assert (len(machine.compiled), machine.closed) == (14, True)
        facts = report.facts
        assert (facts["measured"], facts["wrong"], facts["failed"], facts["left_out"]) == (14, [], [], [])
        assert facts["choices"][1] == {
            "op": "linear", "shape": [64, 64], "kernel": "decode", "first": 9, "last": 16, "configuration": "size=2",
            "microseconds": {"16": 8.0},
        }  # fmt: skip
        assert len(facts["times"]) == 14
        assert json.dumps(report.json())

    def test_a_wrong_one_is_told_and_never_chosen(self, tmp_path):
        def seconds(job):
            if job.made == Few(1):
                return Result(why="off by 0.5 of the norm", wrong=True)
            return Result(why="not compiled: no") if job.made == Many(1) else 1e-6

        report = tune(options(tmp_path, rows=(8, 32)), Fake(seconds))
        assert report.facts["wrong"] == [
            f"{name} size=1 at 64x64, M=8, bfloat16: off by 0.5 of the norm" for name in ("decode", "gemm")
        ]
        assert report.facts["failed"] == ["gemm size=1 wide=False at 64x64, M=32, bfloat16: not compiled: no"]
        (entry,) = choices.read(tmp_path / "made.json")
        made = {name: [one.choice.configuration for one in held] for name, held in entry.kernels.items()}
        assert made == {"decode": [{"size": 2}], "gemm": [{"size": 4}, {"size": 2, "wide": True}]}

    def test_a_kernel_of_which_all_are_wrong_is_not_in_the_file(self, tmp_path):
        tune(options(tmp_path), Fake(lambda job: Result(why="no", wrong=True) if job.kernel is DECODE else 1e-6))
        (entry,) = choices.read(tmp_path / "made.json")
        assert list(entry.kernels) == ["gemm"]

    def test_a_shape_of_which_nothing_is_right_is_not_in_the_file(self, tmp_path):
        many = options(tmp_path, shapes=((64, 64), (128, 64)))
        tune(many, Fake(lambda job: Result(why="no") if job.call.shape[0] == 64 else 1e-6))
        assert [entry.shape for entry in choices.read(many.out)] == [(128, 64)]

    def test_other_shapes_and_kernels_stay(self, tmp_path):
        first = options(tmp_path, shapes=((64, 64), (128, 64)))
        tune(first, Fake())
        before = {entry.shape: entry.kernels for entry in choices.read(first.out)}
        again = replace(first, shapes=((64, 64),), kernels=("gemm",), rows=(32,))
        tune(again, Fake(lambda job: 7e-6))
        after = {entry.shape: entry.kernels for entry in choices.read(first.out)}
        assert str(after[128, 64]) == str(before[128, 64])
        assert str(after[64, 64]["decode"]) == str(before[64, 64]["decode"])
        (gemm,) = after[64, 64]["gemm"]
        assert (gemm.first, gemm.last, gemm.choice.microseconds) == (17, None, {32: 7})
        assert [one.kernel for one in next(e for e in choices.read(first.out) if e.shape == (64, 64)).at(1)] == [
            "decode"
        ]
        commands = {m["command"] for m in json.loads(first.out.read_text())["measurements"].values()}
        assert commands == {first.command, again.command}
        tune(first, Fake())
        assert len(json.loads(first.out.read_text())["measurements"]) == 1

    def test_another_dtype_is_another_entry(self, tmp_path):
        tune(options(tmp_path), Fake())
        tune(options(tmp_path, dtype="float16"), Fake())
        assert [one.dtypes for one in choices.read(tmp_path / "made.json")] == [
            ("bfloat16", "float16"),
            ("float16", "bfloat16"),
        ]

    def test_when_the_time_is_over_no_shape_is_begun(self, tmp_path):
        now = iter(range(0, 1000, 60))
        many = options(tmp_path, shapes=((64, 64), (128, 64), (256, 64)), seconds=100.0)
        report = tune(many, Fake(), clock=lambda: next(now))
        assert report.facts["left_out"] == ["linear 128x64: the time was over", "linear 256x64: the time was over"]
        assert [entry.shape for entry in choices.read(many.out)] == [(64, 64)]

    def test_a_lost_gpu_leaves_what_was_measured(self, tmp_path):
        def seconds(job):
            if job.call.shape == (128, 64) and job.call.rows == 8:
                raise LostError("the GPU is lost")
            return 1e-6

        report = tune(options(tmp_path, shapes=((64, 64), (128, 64), (256, 64))), Fake(seconds))
        assert report.facts["left_out"] == [
            "linear 128x64: the GPU is lost",
            "linear 256x64: the GPU is lost",
        ]
        assert [entry.shape for entry in choices.read(tmp_path / "made.json")] == [(64, 64)]

    def test_nothing_measured_writes_nothing(self, tmp_path):
        report = tune(options(tmp_path, seconds=-1.0), Fake())
        assert report.facts["choices"] == []
        assert not (tmp_path / "made.json").exists()

    def test_a_damaged_file_is_told_before_anything_is_measured(self, tmp_path):
        file, machine = tmp_path / "made.json", Fake()
        for text, words in (("{", "damaged choices"), ('{"choices": []}', "in another format")):
            file.write_text(text)
            with pytest.raises(FormatError, match=words):
                tune(options(tmp_path), machine)
            assert (file.read_text(), machine.measured) == (text, [])

    def test_all_of_a_file_or_nothing(self, tmp_path, monkeypatch):
        file = tmp_path / "made.json"
        tune(options(tmp_path), Fake())
        before = file.read_text()

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tuned.os, "replace", full)
        with pytest.raises(TargetError) as caught:
            tune(options(tmp_path, rows=(1,)), Fake())
        assert str(caught.value) == f"{file}: choices of kernels cannot be written: got No space left on device"
        assert file.read_text() == before
        assert [one.name for one in tmp_path.iterdir()] == ["made.json"]

    def test_what_another_run_has_written_meanwhile_stays(self, tmp_path):
        def seconds(job):
            if job.call.rows == 32:
                tune(options(tmp_path, shapes=((128, 64),)), Fake())
            return 1e-6

        tune(options(tmp_path), Fake(seconds))
        assert {entry.shape for entry in choices.read(tmp_path / "made.json")} == {(64, 64), (128, 64)}

    def test_two_that_write_at_once_take_turns(self, tmp_path):
        file, order = tmp_path / "made.json", []

        def second():
            tune(options(tmp_path, shapes=((128, 64),)), Fake())
            order.append("second")

        other = threading.Thread(target=second)
        with tuned.alone(file):
            other.start()
            other.join(0.2)
            order.append("first")
        other.join()
        assert order == ["first", "second"]
        assert [one.name for one in tmp_path.iterdir()] == ["made.json"]

    def test_a_place_that_cannot_be_is_told_before_anything_is_measured(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        asked = []
        monkeypatch.setattr(tuned.os, "access", lambda folder, mode: asked.append(folder) or folder != tmp_path)
        cannot = "choices of kernels cannot be written: got"
        for out, words in (
            (tmp_path, "choices of kernels cannot be read: got Is a directory"),
            (tmp_path / "file" / "made.json", "choices of kernels cannot be read: got Not a directory"),
            (tmp_path / "new" / "made.json", f"{cannot} {tmp_path}, and it may not be written to"),
            (Path("/dev/full"), "choices of kernels cannot be read: got It is no regular file"),
            (tmp_path / ("x" * 300), "choices of kernels cannot be read: got File name too long"),
        ):
            machine = Fake()
            with pytest.raises(TargetError) as caught:
                tune(options(tmp_path, out=out), machine)
            assert (str(caught.value), machine.compiled, machine.measured) == (f"{out}: {words}", [], [])
        assert asked == [tmp_path]
        assert [one.name for one in tmp_path.iterdir()] == ["file"]

    def test_ctrl_c_ends_the_machine_and_leaves_the_file(self, tmp_path):
        tune(options(tmp_path), Fake())
        before = (tmp_path / "made.json").read_text()

        def seconds(job):
            if job.call.rows == 8:
                raise KeyboardInterrupt
            return 1e-3

        machine = Fake(seconds)
        with pytest.raises(KeyboardInterrupt):
            tune(options(tmp_path), machine)
        assert (machine.closed, (tmp_path / "made.json").read_text()) == (True, before)

    def test_the_users_file_by_default(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HALFBYTE_CHOICES", str(tmp_path / "new" / "mine.json"))
        report = tune(options(tmp_path, out=None), Fake())
        assert report.facts["out"] == str(tmp_path / "new" / "mine.json")
        assert len(choices.read(tmp_path / "new" / "mine.json")) == 1
        monkeypatch.setenv("HALFBYTE_CHOICES", "none")
        with pytest.raises(UsageError, match="there is no place for the choices: got HALFBYTE_CHOICES=none; name one"):
            tune(options(tmp_path, out=None), Fake())

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"shapes": ((64, 65),)}, "unknown shape: got 64x65, expected N from 1 and K a multiple of 16"),
            ({"rows": (4, 0)}, "rows are 1 or more: got 0"),
            ({"dtype": "float32"}, "unknown dtype of activations: got float32, expected bfloat16 or float16"),
            ({"precisions": ("int8",)}, "unknown precision: got int8, expected exact or fp8"),
            ({"shapes": ()}, "no shapes to measure; see: halfbyte tune --help"),
            ({"rows": ()}, "no rows to measure; see: halfbyte tune --help"),
            ({"seconds": math.nan}, "the budget is no number of seconds: got nan"),
            ({"kernels": ("none",)}, "unknown kernel: got none, expected decode or gemm"),
        ],
    )
    def test_what_cannot_be_meant(self, changes, words, tmp_path):
        with pytest.raises(UsageError) as caught:
            tune(options(tmp_path, **changes), Fake())
        assert str(caught.value) == words

    def test_nothing_to_tune(self, tmp_path):
        with pytest.raises(NoKernelError) as caught:
            tune(options(tmp_path, kernels=("decode",), rows=(32,)), Fake())
        assert str(caught.value) == "there is nothing to tune: got decode: takes up to 16 tokens"


class TestDefaults:
    """Of the kernels that there are, as if there were a GPU."""

    @pytest.fixture(autouse=True)
    def there(self, monkeypatch):
        monkeypatch.setattr(launch, "missing", lambda: None)
        monkeypatch.setattr(launch, "untested", lambda: None)

    def test_configurations_are_tested_ones_and_there_are_some(self):
        import sys

        work = list(tuning.planned(Options(), 90))
        jobs = [job for one in work for jobs in one.jobs for job in jobs]
        for job in jobs:
            assert job.made in sys.modules[job.kernel.module].CONFIGURATIONS
            assert type(job.made)(**tuned.changed(job.made)) == job.made
            assert job.kernel.compile
        assert len({(one.call.op, one.shape) for one in work}) == len(work)
        rows = {job.call.rows for job in jobs if job.call.op == "linear" and job.call.layout.name == "fragments"}
        assert rows == set(tuning.ROWS)
        for name in {job.kernel.name for job in jobs}:
            of_one = [job for job in jobs if job.kernel.name == name and job.call.shape == (4096, 4096)]
            counts = {rows: sum(job.call.rows == rows for job in of_one) for rows in tuning.ROWS}
            assert max(counts.values()) <= 20, name

    def test_fp8_is_measured_where_it_is_used(self):
        found = {
            job.call.rows for one in tuning.planned(Options(precisions=("fp8",)), 90) for js in one.jobs for job in js
        }
        assert found == {256, 512, 1024, 2048, 4096}

    def test_by_default_no_product_is_larger_than_needed(self):
        def rows(shape, precision="exact", **of):
            return tuning._rows_of(Options(**of), precision, shape)

        assert rows((4096, 4096)) == list(tuning.ROWS)
        assert rows((28672, 8192)) == [1, 8, 16, 32, 64, 128, 256, 512, 1024]
        assert rows((248077, 4096)) == [1, 8, 16, 32, 64, 128, 256]
        assert rows((248077, 4096), "fp8") == [256]
        assert rows((1 << 20, 1 << 14), "fp8") == [256]
        assert rows((248077, 4096), rows=(8, 4096)) == [8, 4096]

    def test_known_shapes(self):
        assert len(set(tuning.SHAPES)) == len(tuning.SHAPES) == 30
        assert {(4096, 4096), (14336, 4096), (28672, 8192), (248077, 4096)} <= set(tuning.SHAPES)

    @needs_triton
    def test_what_is_compiled_ahead_is_what_bind_asks_for(self, monkeypatch):
        """For each kernel, at an even and an odd N: the same sources, without a GPU."""
        monkeypatch.setattr(fp8_quantize, "_capability", lambda device: 90)
        for shape in ((96, 128), (77, 64)):
            for one in tuning.planned(Options(shapes=(shape,), rows=(8, 64, 256)), 90):
                for job in (job for jobs in one.jobs for job in jobs):
                    with launch.recorded() as ahead:
                        job.kernel.compile(job.call, job.made)
                    weight = trials.Weights(*shape, 0.001, "cpu").packed(job.call.layout.key)[0]
                    x = torch.zeros(job.call.rows, shape[1], dtype=torch.bfloat16)
                    args = job.kernel.bundle(x=x, weight=weight, bias=None, out=x.new_zeros(len(x), shape[0]))
                    monkeypatch.setattr(type(args), "call", lambda self, job=job: job.call)
                    with launch.recorded() as bound, suppress(AttributeError):  # of the program, which is none
                        job.kernel.bind(args, job.made)
                    asked = {source.key for source in bound}
                    assert asked
                    assert asked <= {source.key for source in ahead}, job


# What measures


def on_cpu(weight, made, x, out):
    values = weight.dequantize().double()
    return lambda x, bias, out: out.copy_(x.double() @ values.T * (2 if made == Few(2) else 1))


def bound(args, made):
    if made == Few(4):
        raise hb.errors.UnavailableError("too many registers")
    return on_cpu(args.weight, made, args.x, args.out)


CPU = a_kernel("cpu", [(None, (Few(1), Few(2), Few(4)))], bind=bound)


class TestGpu:
    """On a CPU in the GPU's place."""

    def test_right_ones_are_timed_and_wrong_ones_told(self, monkeypatch):
        monkeypatch.setattr(tuning_cuda, "MEGABYTES", 0.01)
        monkeypatch.setattr(tuning_cuda, "BATCH_SECONDS", 1e-4)
        machine = tuning_cuda.Gpu(workers=1, device="cpu")
        jobs = [Job(CPU, call_like(layout=parse("fragments"), shape=(48, 64), rows=3), Few(i)) for i in (1, 2, 4)]
        right, wrong, failed = machine.measure(jobs)
        assert 0 < right.seconds < 1
        assert (wrong.seconds, wrong.wrong) == (None, True)
        assert wrong.why == "off by 1 of the norm, more than 0.004"
        assert failed == Result(why="too many registers")
        assert machine._of_shape(jobs[0].call) is machine._of_shape(jobs[0].call)
        machine.close()

    def test_what_does_not_fit_the_memory_is_told(self, monkeypatch):
        """The others of a run go on."""
        machine = tuning_cuda.Gpu(workers=1, device="cpu")
        job = Job(CPU, call_like(layout=parse("fragments"), shape=(48, 64), rows=3), Few(1))

        def too_much(call):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.\nSee the manual.")

        monkeypatch.setattr(machine, "_of_shape", too_much)
        assert (
            machine.measure([job, job])
            == [Result(why="OutOfMemoryError: CUDA out of memory. Tried to allocate 1 TiB.")] * 2
        )

        def lost(call):
            raise LostError("the GPU is lost")

        monkeypatch.setattr(machine, "_of_shape", lost)
        with pytest.raises(LostError):
            machine.measure([job])

    def test_fp8_is_held_against_the_quantized_values(self):
        weights = trials.Weights(64, 64, 0.001, "cpu")
        x = torch.randn(5, 64).bfloat16()
        y = hb.linear(x, hb.to_fp8(weights.weight)).double()
        expected = weights.product(x, "linear-fp8")
        assert (y[:, weights.stripes] - expected).norm() < 3e-3 * expected.norm()
        plain = x.double() @ weights.exact.T
        assert 0.01 < (plain - expected).norm() / plain.norm() < 0.06

    def test_slow_ones_are_timed_once(self, monkeypatch):
        batches = []

        class Timed(timing.Timed):
            def __post_init__(self):
                pass

            def batch(self):
                slow = self.call is calls[1]
                batches.append(slow)
                self.seconds.append(2.0 if slow else 1.0)

        calls = [lambda i: None, lambda i: None]
        machine = tuning_cuda.Gpu(workers=1, device="cpu")
        made = iter(Timed(call, 2, 2, "cpu") for call in calls)
        monkeypatch.setattr(machine, "_timed", lambda *args: next(made))
        monkeypatch.setattr(machine, "_check", lambda *args: None)
        jobs = [Job(CPU, call_like(layout=parse("fragments"), shape=(48, 64), rows=3), Few(i)) for i in (1, 2)]
        assert machine.measure(jobs) == [Result(1.0), Result(2.0)]
        assert (batches.count(False), batches.count(True)) == (1 + tuning_cuda.ROUNDS, 1)

    @needs_triton
    def test_processes_compile_into_tritons_folder(self, tmp_path, monkeypatch):
        from halfbyte.kernels.cuda import decode

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kept"))
        machine = tuning_cuda.Gpu(workers=1)
        of = call_like(layout=parse("fragments"), shape=(64, 64), device="cuda", capability=90)
        good, bad = (Job(decode.TRITON, of, decode.Decode(warps)) for warps in (4, 3))
        machine.compile([good, good, bad])
        try:
            assert len(machine._compiled) == 2
            assert machine._why_not(good) == ""
            assert machine._why_not(bad).startswith("not compiled: ")
        finally:
            machine.close()
        assert list((tmp_path / "kept").rglob("*.cubin"))

    def test_what_the_host_cannot_compile_is_told(self):
        machine = tuning_cuda.Gpu(workers=1)
        broken = replace(CPU, compile=lambda call, made: 1 / 0)
        job = Job(broken, call_like(), Few())
        machine.compile([job])
        assert machine._why_not(job) == "not compiled: ZeroDivisionError: division by zero"
        assert machine._why_not(Job(CPU, call_like(), Few())) == ""
        machine._needed[job], machine._compiled["key"] = (["key"], ""), Future()
        machine._compiled["key"].set_exception(BrokenProcessPool("it was killed"))
        with pytest.raises(LostError, match="a process that compiles has ended: got it was killed"):
            machine._why_not(job)
        machine.close()

    def test_a_lost_gpu(self, monkeypatch):
        def lost():
            raise RuntimeError("CUDA error: an illegal memory access\nmore")

        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        with pytest.raises(LostError) as caught:
            tuning_cuda.Gpu(workers=1)._alive(ValueError("odd"))
        assert str(caught.value) == (
            "the GPU is lost: got RuntimeError: CUDA error: an illegal memory access; after ValueError: odd"
        )
        tuning_cuda.Gpu(workers=1, device="cpu")._alive(ValueError("odd"))

    def test_nothing_is_recorded_outside(self):
        with launch.recorded() as sources:
            pass
        assert (sources, launch._recorded) == ([], None)


@pytest.mark.parametrize("layout", ["fragments", "fragments(dtype=float16)", "columns(align=128)"])
@pytest.mark.parametrize("shape", [(16, 64), (77, 192), (40, 80)])
def test_tiles_apart_are_the_same_bytes(layout, shape):
    weight = trials.Weights(*shape, 0.001, "cpu").weight
    one, other = trials.packed(weight, layout), hb.pack(weight, layout)
    assert (one.key, one.shape) == (other.key, other.shape)
    for name, buffer in other.buffers().items():
        assert torch.equal(one.buffers()[name], buffer)


# The command


class TestCommand:
    def test_without_a_gpu_it_says_so(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        ran = call("tune")
        said = "halfbyte tune needs an NVIDIA GPU, and torch sees none"
        assert (ran.rc, ran.stdout, ran.stderr) == (3, "", f"halfbyte: {said}\n")
        assert call("tune", "--json").document["error"]["message"] == said

    def test_without_triton(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            "halfbyte.gpu.missing", lambda: "triton is not installed; run: pip install 'halfbyte[cuda]'"
        )
        with pytest.raises(UnavailableError, match="halfbyte tune needs Triton: triton is not installed; run: pip"):
            command.gpu(None)

    @pytest.mark.usefixtures("kernels")
    def test_a_run(self, monkeypatch, tmp_path):
        def seconds(job):
            return Result(why="off by 1", wrong=True) if job.made == Few(4) else 1e-6 * job.call.rows

        monkeypatch.setattr(command, "gpu", lambda workers: Fake(seconds))
        file = tmp_path / "made.json"
        arguments = ("tune", "--shapes", "64x64,96x128", "--shapes", "4096x4096", "--rows", "1,32", "--out", file)
        ran = call(*arguments, "--precision", "exact")
        assert (ran.rc, ran.stderr) == (0, "")
        lines = [line.split() for line in ran.stdout.splitlines()]
        assert ["linear", "64x64", "1-16", "decode", "size=1", "1", "at", "1"] in lines
        assert ["linear", "96x128", "17-", "gemm", "size=1", "wide=False", "32", "at", "32"] in lines
        assert "WRONG, and not chosen: gemm size=4 at 64x64, M=1, bfloat16: off by 1" in ran.stdout
        assert ["gpu", "GPU"] in lines
        assert ["wrote", str(file)] in lines
        assert [entry.shape for entry in choices.read(file)] == [(64, 64), (96, 128), (4096, 4096)]
        document = call(*arguments, "--kernels", "gemm", "--budget", "100", "--json").document
        assert (document["command"], document["ok"]) == ("tune", True)
        assert document["repeat"] == "halfbyte tune --shapes 64x64,96x128,4096x4096 --rows 1,32 --kernels gemm"
        assert {row["kernel"] for row in document["times"]} == {"gemm"}
        quiet = call(*arguments, "--quiet")
        assert (quiet.rc, quiet.stdout, quiet.stderr) == (0, "", "")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--shapes", "64"), "not a number: got ''; see: halfbyte tune --help"),
            (("--shapes", "axb"), "not a number: got 'a'; see: halfbyte tune --help"),
            (("--shapes", "64x65"), "unknown shape: got 64x65, expected N from 1 and K a multiple of 16"),
            (("--rows", ","), "no rows to measure; see: halfbyte tune --help"),
            (("--shapes", ""), "no shapes to measure; see: halfbyte tune --help"),
            (("--budget", "nan"), "the budget is no number of seconds: got nan"),
            (("--rows", "1,x"), "not a number: got 'x'; see: halfbyte tune --help"),
            (("--precision", "int8"), "unknown precision: got int8, expected exact or fp8"),
            (("--workers", "0"), "workers are 1 or more: got 0"),
        ],
    )
    def test_what_cannot_be_meant(self, arguments, said):
        ran = call("tune", *arguments)
        assert (ran.rc, ran.stderr) == (2, f"halfbyte: {said}\n")


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu(tmp_path):
    out = tmp_path / "made.json"
    given = Options(shapes=((512, 256), (77, 128)), rows=(8, 64), kernels=("triton-decode", "triton-gemm"), out=out)
    report = tune(given, tuning_cuda.Gpu(workers=4))
    assert report.facts["wrong"] == report.facts["failed"] == report.facts["left_out"] == []
    held = choices.read(out)
    assert {entry.shape for entry in held} == {(512, 256), (77, 128)}
    assert all(8 in choice.microseconds for entry in held for choice in entry.at(8))
    assert {choice.kernel for entry in held for choice in entry.at(64)} == {"triton-gemm"}
    assert report.facts["gpu"] == torch.cuda.get_device_name()
