"""What measures for ``halfbyte tune``: a GPU of NVIDIA's, with torch and Triton."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from math import sqrt
from typing import Any, Final

import torch
import triton

from halfbyte import timing, trials
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.base import Call, capability
from halfbyte.kernels.cuda import launch
from halfbyte.trials import WrongResultError
from halfbyte.tuning import Job, LostError, Result

MEGABYTES: Final = 150
"""Of copies of a weight, which take turns, so that no cache holds them."""
ROUNDS: Final = 3
BATCH_SECONDS: Final = 2e-3
SHORT: Final = 1e-4
FAR: Final = 1.1
"""What takes so many times as long as the best in its first batch is not timed again."""
HOT_ROWS, REST = 256, 0.003
"""From so many tokens on, each batch waits so many seconds before: products heat the GPU until it slows down."""
WRONG: Final = {"bfloat16": 4e-3, "float16": 1e-3}
"""An error larger than this part of the result's norm is no rounding."""
WRONG_FP8: Final = 1e-2
"""Beside the product of the quantized values; what the sums of FP8 matrix units lose grows with K."""


class Gpu:
    """The current CUDA device, and processes that compile beside it.

    Args:
        workers: processes; by default one less than there are cores.
        device: "cuda", or "cpu" to try this out.
    """

    def __init__(self, workers: int | None = None, device: str = "cuda") -> None:
        self.device = device
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._workers = workers or max(1, cores - 1)
        self._pool: ProcessPoolExecutor | None = None
        self._compiled: dict[Any, Future[str]] = {}
        self._needed: dict[Job, tuple[list[Any], str]] = {}
        self._weights: trials.Weights | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        """What of a measurement's provenance it knows."""
        properties = torch.cuda.get_device_properties()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError):
            said = []
        return {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "driver": said[0] if said else "unknown",
            "torch": str(torch.__version__),
            "triton": triton.__version__,
        }

    @property
    def capability(self) -> int:
        """The compute capability."""
        return capability(torch.cuda.current_device())

    def compile(self, jobs: Sequence[Job]) -> None:
        """Begin to compile what these will need, in their order, on processes that see no GPU."""
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self._workers, context, initializer=launch.settle)
        for job in jobs:
            try:
                with launch.recorded() as sources:
                    if job.kernel.compile:
                        job.kernel.compile(job.call, job.made)
            except Exception as error:
                self._needed[job] = [], _line(error)
                continue
            self._needed[job] = [source.key for source in sources], ""
            for source in sources:
                if source.key not in self._compiled:
                    kernel = source.kernel.__module__, source.kernel.__name__
                    how = dict(source.signature), dict(source.constants), dict(source.options)
                    try:
                        future = self._pool.submit(launch.compile_named, job.call.capability, *kernel, *how)
                    except BrokenProcessPool as error:
                        raise LostError("a process that compiles has ended", got=str(error)) from error
                    self._compiled[source.key] = future

    def _why_not(self, job: Job) -> str:
        """Wait for what a job needs; why it cannot be measured, or nothing."""
        keys, why = self._needed.get(job, ([], ""))
        for key in keys:
            try:
                why = why or self._compiled[key].result()
            except BrokenProcessPool as error:
                raise LostError("a process that compiles has ended", got=str(error)) from error
        return why and f"not compiled: {why}"

    def measure(self, jobs: Sequence[Job]) -> list[Result]:
        """Check and time jobs of one shape, M and op."""
        try:
            return self._measured(jobs)
        except LostError:
            raise
        except Exception as error:  # of memory, or of a kernel that was right at first
            self._alive(error)
            return [Result(why=_line(error))] * len(jobs)

    def _measured(self, jobs: Sequence[Job]) -> list[Result]:
        call = jobs[0].call
        results: dict[Job, Result] = {}
        ready: dict[Job, timing.Timed] = {}
        weights = self._of_shape(call)
        x = torch.randn(call.rows, call.shape[1], device=self.device).to(getattr(torch, call.dtype))
        result = trials.Result(call.rows, call.shape[0], call.out_dtype, self.device)
        expected: Any = None
        for job in jobs:
            why = self._why_not(job)
            if why:
                results[job] = Result(why=why)
                continue
            try:
                timed = self._timed(job, weights, x, result)
                if expected is None:
                    expected = weights.product(x, call.op)
                self._check(timed, weights, result, expected, call)
                ready[job] = timed
            except Exception as error:
                self._alive(error)
                results[job] = Result(why=_line(error), wrong=isinstance(error, WrongResultError))
        rest = REST if call.rows >= HOT_ROWS else 0.0
        if ready:
            for timed in ready.values():
                timed.batch()
            best = min(timed.median for timed in ready.values())
            timing.in_rounds([timed for timed in ready.values() if timed.median <= FAR * best], ROUNDS, rest)
        results |= {job: Result(timed.median) for job, timed in ready.items()}
        return [results[job] for job in jobs]

    def _of_shape(self, call: Call) -> trials.Weights:
        held = self._weights
        if held is None or (held.n, held.k) != call.shape:
            self._weights = held = None
            if self.device == "cuda":
                torch.cuda.empty_cache()
            n, k = call.shape
            self._weights = held = trials.Weights(n, k, MEGABYTES, self.device)
        return held

    def _timed(self, job: Job, weights: trials.Weights, x: Any, result: trials.Result) -> timing.Timed:
        kernel, call = job.kernel, job.call
        assert kernel.bind is not None
        out = result.view(call.shape[0])
        packed = weights.packed(call.layout.key)
        result.poison()
        runs = [kernel.bind(kernel.bundle(x=x, weight=one, bias=None, out=out), job.made) for one in packed]
        runs[0](x, None, out)
        seconds = timing.elapsed(self.device, lambda: runs[1](x, None, out), 1)
        if seconds < SHORT:  # most of it may be the launch
            seconds = timing.elapsed(self.device, lambda: runs[1](x, None, out), 8) / 8
        count = timing.launches(len(runs), seconds)
        return timing.Timed(lambda i: runs[i](x, None, out), len(runs), count, self.device, batch_seconds=BATCH_SECONDS)

    def _check(
        self, timed: timing.Timed, weights: trials.Weights, result: trials.Result, expected: Any, call: Call
    ) -> None:
        result.view(call.shape[0])
        result.poison()
        timed.replay()
        wrong, all_ = result.errors(weights.stripes, expected)
        most = WRONG[call.dtype] if call.op == Call.op else WRONG_FP8
        if not sqrt(wrong) <= most * sqrt(all_):
            raise WrongResultError(f"off by {sqrt(wrong / all_):.2g} of the norm, more than {most:g}")

    def _alive(self, error: Exception) -> None:
        """Raise LostError where the device computes no more."""
        if self.device != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise LostError("the GPU is lost", got=_line(lost), hint=f"after {_line(error)}") from error

    def close(self) -> None:
        """End the processes."""
        self._weights = None
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _line(error: BaseException) -> str:
    if isinstance(error, HalfbyteError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
