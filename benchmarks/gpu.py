"""Figures of the GPU's kernels: products beside what the memory and the matrix units allow, and beside peers.

    python -m benchmarks.gpu [--quick] [--peers] [--shapes NxK ...] [--rows M ...] [--out FILE.jsonl] [--trust-tests]

For each shape and M all kernels that accept the product take turns with the peers; see benchmarks/gpu_timing.py. Copies
of the weight fill 300 MB at least. What is timed is checked: the result is poisoned, the graph replayed, 1280 rows
of the weight, spread over N, compared with a product in float64, and the rest looked at for what nobody wrote.

"ideal" is max(1.3 us + bytes / 4.6 TB/s, operations / 783 TFLOP/s) on an H200, the same in each run; FP8 has twice as
many operations. What has bounds is what ``plan`` picks, marked with a star, also with ``precision="fp8"``; beside the
latter stands the resident FP8 twin, and both quantize the activations. Two probes tell whether the run was a good one:
a read of 4.3 GB, and a bf16 product of 8192x8192x8192 by cuBLAS. Peers: cuBLAS with bf16 weights, cuBLAS with FP8
weights (twice the bytes, other results) and activations that are FP8 before, and Humming; they get N = 248064 where
ours is 248077.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import halfbyte as hb
from benchmarks import gpu_ahead, gpu_bounds, gpu_humming, gpu_report, gpu_subjects, gpu_timing
from benchmarks.gpu_report import Case, Measured
from benchmarks.gpu_subjects import Candidate, Result, Weights
from benchmarks.gpu_timing import Timed
from benchmarks.timing import Figure, Row
from halfbyte.kernels import KERNELS, Fp8Args, LinearArgs
from halfbyte.kernels.cuda.ceilings import CEILINGS
from halfbyte.numerics import BLOCK

ROOT = Path(__file__).parents[1]
ROUNDS = 5
HOT_ROWS, REST = 128, 0.05
"""From so many tokens on, where the matrix units are the limit, each batch waits so many seconds before."""
PROBE_WORDS, PROBE_SIDE = 1 << 30, 8192
HOST_SHAPE, PACK_SHAPE = (4096, 4096), (28672, 8192)


class Bench:
    """A run: its options, and its rows as they come."""

    def __init__(self, options: argparse.Namespace, gpu: str, lines: gpu_report.Lines) -> None:
        self.options, self.lines, self.device = options, lines, options.device
        self.gpu, self.ceiling = gpu, CEILINGS.get(gpu)
        self.rows: list[Row] = []
        self.probed: tuple[Any, ...] = ()
        torch.manual_seed(0)

    def say(self, row: Row) -> Row:
        self.rows.append(row)
        self.lines.add(row)
        return row

    def failed(self, what: str, who: str, error: Exception) -> Row:
        """A row that says why there is no figure; raises where the GPU is lost."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        first = (str(error).splitlines() or [""])[0]
        return self.say(Row(what, who, missing=f"{type(error).__name__}: {first}"))

    def probe(self) -> None:
        """Read the memory, multiply matrices; mark what is off."""
        if self.device != "cuda":
            return
        from benchmarks import gpu_probe

        if not self.probed:
            matrices = (torch.randn(PROBE_SIDE, PROBE_SIDE, device="cuda").bfloat16() for _ in range(3))
            self.probed = torch.empty(PROBE_WORDS, dtype=torch.int32, device="cuda").random_(), *matrices
        memory, a, b, out = self.probed
        read, matrix = gpu_bounds.PROBES.get(self.gpu, (None, None))
        self._probe("read", "GB/s", 1e9, 4 * PROBE_WORDS, lambda: gpu_probe.read(memory), read)
        self._probe("matrix", "TFLOP/s", 1e12, 2 * PROBE_SIDE**3, lambda: torch.mm(a, b, out=out), matrix)

    def _probe(
        self, name: str, unit: str, of: float, work: float, call: Callable[[], Any], reference: float | None
    ) -> None:
        call()
        torch.cuda.synchronize()
        time.sleep(4 * REST)
        seconds = gpu_timing.elapsed("cuda", call, 10) / 10
        rate, beside, off = work / seconds, "", False
        if reference:
            off = gpu_bounds.is_off(rate, reference)
            beside = f", {rate / reference:.2f} of its reference{' MARKED: too far off' if off else ''}"
        self.say(Row("probe", name, seconds, figures=(Figure(unit, rate / of),), facts={"off": off}))
        print(f"{name} probe {rate / of:.0f} {unit}{beside}", flush=True)

    def shape(self, n: int, k: int) -> None:
        """All products with weights of a shape."""
        self.probe()
        weights = Weights(n, k, self.options.megabytes, self.device)
        whole = weights.whole()
        for rows in self.options.rows:
            case = Case(n, k, rows, self.options.dtype, self.ceiling)
            try:
                said = self.products(case, weights, whole)
            except torch.OutOfMemoryError as error:
                said = [self.failed(str(case), "all", error)]
            print(gpu_report.line(case, said), flush=True)
        weights.held.clear()
        whole.held.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def candidates(self, weights: Weights, whole: Weights, x: Any, result: Result) -> Iterator[tuple[str, Any]]:
        """All that take turns, the default first: a name, and what prepares them."""
        yield "halfbyte", lambda: gpu_subjects.ours(weights, x, result)
        if whole is not weights:
            yield "halfbyte", lambda: [replace(gpu_subjects.ours(whole, x, result)[0], kind="whole")]
        yield "halfbyte fp8", lambda: gpu_subjects.ours_in_fp8(weights, x, result)
        if self.options.peers and self.device == "cuda":
            yield "cublas", lambda: [gpu_subjects.bf16(whole, x, result)]
            if x.dtype is torch.bfloat16:
                yield "cublas fp8", lambda: [gpu_subjects.fp8(whole, x, result)]
            if x.dtype is torch.bfloat16 and self.options.humming:
                yield "humming", lambda: [gpu_humming.candidate(whole, x, result)]

    def products(self, case: Case, weights: Weights, whole: Weights) -> list[Row]:
        """Those of one shape and M, in turns."""
        x = torch.randn(case.rows, case.k, device=self.device).to(getattr(torch, case.dtype))
        result = Result(case.rows, case.n, case.dtype, self.device)
        ready: list[tuple[Candidate, Timed, float]] = []
        failed: list[Row] = []
        for name, prepare in self.candidates(weights, whole, x, result):
            try:
                found = prepare()
            except Exception as error:
                failed.append(self.failed(str(case), name, error))
                continue
            for candidate in found:
                try:
                    ready.append((candidate, *self.prepared(case, candidate, x, result)))
                except Exception as error:
                    failed.append(self.failed(str(case), candidate.who, error))
        gpu_timing.in_rounds([timed for _, timed, _ in ready], ROUNDS, REST if case.rows >= HOT_ROWS else 0.0)
        measured = []
        for candidate, timed, off in ready:
            facts = {**candidate.facts, "batches": [round(seconds * 1e6, 3) for seconds in timed.seconds]}
            who, kind, n = candidate.who, candidate.kind, candidate.weights.n
            measured.append(Measured(who, kind, n, timed.median, min(timed.seconds), off, facts))
        return [*(self.say(gpu_report.row(case, one, measured)) for one in measured), *failed]

    def prepared(self, case: Case, candidate: Candidate, x: Any, result: Result) -> tuple[Timed, float]:
        """What is timed, and its error."""
        count = gpu_timing.launches(candidate.copies, case.ideal(case.n) or 1e-3)
        timed = Timed(candidate.call, candidate.copies, count, self.device)
        return timed, gpu_subjects.error(candidate, x, result, timed.replay)

    def host(self) -> Row:
        """The host's time for a small product, beside that of torch.mm."""
        n, k = HOST_SHAPE if self.device == "cuda" else (32, 64)
        weights = Weights(n, k, 1, self.device)
        x = torch.randn(1, k, device=self.device).to(getattr(torch, self.options.dtype))
        default = gpu_subjects.ours(weights, x, Result(1, n, self.options.dtype, self.device))[0]
        packed, dense = weights.packed(default.facts["layout"])[0], weights.dense(self.options.dtype)[0]
        out = x.new_empty(1, n)
        with torch.inference_mode():
            seconds = gpu_timing.host_seconds(lambda: hb.linear(x, packed))
            other = gpu_timing.host_seconds(lambda: torch.mm(x, dense.t(), out=out))
        bound = gpu_bounds.HOST_MICROSECONDS if self.ceiling else (None, None)
        figures = (
            Figure("us of the host", seconds * 1e6, *bound, least=False),
            Figure("us of torch.mm", other * 1e6),
        )
        return Row(
            f"host M=1 {n}x{k}", "linear", seconds, figures=figures, facts={**default.facts, "kernel": default.who}
        )

    def pack(self) -> Row:
        """A weight into fragments, all checks included."""
        n, k, weight, key = self.coded()
        bound = gpu_bounds.PACK_GIGABYTES if self.ceiling else (None, None)
        return self.moved(
            f"pack {n}x{k}", key, hb.pack(weight, key).nbytes + weight.nbytes, bound, hb.pack, weight, key
        )

    def unpack(self) -> Row:
        """And back."""
        n, k, weight, key = self.coded()
        packed = hb.pack(weight, key)
        return self.moved(f"unpack {n}x{k}", key, packed.nbytes + weight.nbytes, (None, None), hb.unpack, packed)

    def quantize(self) -> Row:
        """A dense weight, read twice: for scale2, and for scales and codes."""
        n, k, weight, _ = self.coded()
        dense = weight.dequantize(self.options.dtype)
        nbytes = 2 * dense.nbytes + weight.nbytes
        return self.moved(f"quantize {n}x{k}", self.options.dtype, nbytes, (None, None), hb.quantize, dense)

    def dequantize(self) -> Row:
        """Fragments to values."""
        n, k, weight, key = self.coded()
        packed = hb.pack(weight, key)
        nbytes = packed.nbytes + 2 * n * k
        return self.moved(f"dequantize {n}x{k}", key, nbytes, (None, None), packed.dequantize, self.options.dtype)

    def embedding(self) -> Row:
        """Rows of fragments, half as many as there are."""
        n, k, weight, key = self.coded()
        packed, ids = hb.pack(weight, key), torch.randint(0, n, (n // 2,), device=self.device)
        nbytes = n // 2 * (k * 9 // 16 + 2 * k + 8)
        run = hb.embedding if self.device == "cuda" else lambda ids, _: hb.embedding(ids, weight)
        return self.moved(f"embedding M={n // 2} {n}x{k}", key, nbytes, (None, None), run, ids, packed)

    def coded(self) -> tuple[int, int, Any, str]:
        """N, K, a weight and the key of fragments, for what does not multiply."""
        n, k = PACK_SHAPE if self.device == "cuda" else (256, 512)
        return n, k, Weights(n, k, 1, self.device).weight, gpu_subjects.LAYOUTS[0].format(dtype=self.options.dtype)

    def moved(self, what: str, who: str, nbytes: int, bound: Any, call: Callable[..., Any], *args: Any) -> Row:
        """The median of calls, checks and the host's time included, by the bytes that it reads and writes."""
        call(*args)
        taken = sorted(gpu_timing.elapsed(self.device, lambda: call(*args), 1) for _ in range(2 * ROUNDS))
        return Row(what, who, taken[ROUNDS], taken[0], (Figure("GB/s", nbytes / taken[ROUNDS] * 1e-9, *bound),))

    def run(self) -> None:
        for n, k in self.options.shapes:
            self.shape(n, k)
        for part in (self.host, self.pack, self.unpack, self.quantize, self.dequantize, self.embedding):
            try:
                print(self.say(part()), flush=True)
            except Exception as error:
                print(self.failed(part.__name__, "halfbyte", error), flush=True)
        self.probe()


def compile_ahead(options: argparse.Namespace) -> None:
    """Say how long it took, and what failed."""
    start = time.time()
    shapes = list(dict.fromkeys([*options.shapes, HOST_SHAPE, *whole(options.shapes)]))
    layouts = [layout.format(dtype=options.dtype) for layout in gpu_subjects.LAYOUTS[:-1]]
    mine = [kernel.name for kernel in KERNELS if kernel.bundle in (LinearArgs, Fp8Args)]
    names = [name for name in mine if not name.startswith(("cpu-", "reference-", "fp8-"))]
    peers = whole(options.shapes) if options.humming else []
    for line in gpu_ahead.compile_ahead(layouts, names, shapes, options.rows, options.dtype, peers):
        print(f"not compiled: {line}")
    print(f"compiled in {time.time() - start:.0f} s", flush=True)


def whole(shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(gpu_bounds.WHOLE.get(n, n), k) for n, k in shapes]


def tests_pass() -> bool:
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(["scripts/gpu_tests"], cwd=ROOT, env=environment, check=False).returncode == 0


def shape(text: str) -> tuple[int, int]:
    n, k = (int(size) for size in text.split("x"))
    if n < 1 or k < 1 or k % BLOCK:
        raise argparse.ArgumentTypeError(f"N is 1 or more and K a multiple of {BLOCK}, not {text}")
    return n, k


def tokens(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"1 or more, not {text}")
    return int(text)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four shapes; M = 1, 4, 8 and 16")
    parser.add_argument("--peers", action="store_true", help="cuBLAS and, where it is installed, Humming, too")
    parser.add_argument("--shapes", nargs="+", type=shape, help="NxK ...")
    parser.add_argument("--rows", nargs="+", type=tokens, help="numbers of tokens")
    parser.add_argument("--dtype", choices=tuple(gpu_bounds.ERROR), default="bfloat16", help="of activations")
    parser.add_argument("--megabytes", type=float, default=300, help="of copies that are rotated")
    parser.add_argument("--out", type=Path, help="a file for a line of JSON for each row")
    parser.add_argument("--trust-tests", action="store_true", help="measure without running the kernels' tests first")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the benchmark itself out")
    options = parser.parse_args(arguments)
    options.shapes = options.shapes or list(gpu_bounds.QUICK_SHAPES if options.quick else gpu_bounds.SHAPES)
    options.rows = options.rows or list(gpu_bounds.QUICK_ROWS if options.quick else gpu_bounds.ROWS)
    return options


def main(arguments: list[str] | None = None) -> None:
    options, start = parsed(arguments), time.time()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("not measured: torch sees no CUDA GPU")
    if on_gpu and not options.trust_tests and not tests_pass():
        sys.exit("not measured: the kernels' tests fail; run: scripts/gpu_tests")
    os.environ.pop("HALFBYTE_KERNEL", None)
    why = gpu_humming.missing() if options.peers else ""
    options.humming = on_gpu and why is None
    if why:
        print(f"humming: {why}")
    gpu = torch.cuda.get_device_name() if on_gpu else "no GPU"
    head = gpu_report.machine(gpu, sys.argv[1:] if arguments is None else arguments)
    print(f"{gpu}, driver {head['driver']}, torch {torch.__version__}, commit {head['commit']}", flush=True)
    if on_gpu:
        compile_ahead(options)
    lines = gpu_report.Lines(options.out, head)
    bench = Bench(options, gpu, lines)
    try:
        bench.run()
    except (RuntimeError, KeyboardInterrupt) as error:
        first = (str(error).splitlines() or ["interrupted"])[0]
        sys.exit(f"not finished: {first}" + (f"; rows until here are in {lines.part}" if options.out else ""))
    off = sum(row.what == "probe" and row.facts["off"] for row in bench.rows)
    end = {"verdict": gpu_report.verdict(bench.rows), "probes_off": off, "seconds": round(time.time() - start)}
    lines.finish(end)
    print("\n".join(end["verdict"]))
    print(f"{sum(row.seconds is None for row in bench.rows)} rows not measured, {off} probes off, {end['seconds']} s")


if __name__ == "__main__":
    main()
