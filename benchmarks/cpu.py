"""Figures of the CPU kernels, the quantizer and the decoder, beside the memory's speed, llama.cpp, torch and ModelOpt.

    python -m benchmarks.cpu [--quick] [--only WORD ...] [--threads 2] [--out FILE] [--trust-tests]

Each figure is a ratio inside one run. Copies of one weight, 1 GB of them, are multiplied in rotation, so that no cache
holds them; all lie at addresses that are multiples of 64, and 256 random rows repeat along N. A product is checked
against one in float64 before it is timed. Times are medians of single calls, allocation of the result included; see
benchmarks/timing.py for how subjects take turns.

"of the probe" is the rate of 0.5625 bytes for each weight over that of benchmarks/probe.py, which reads 1 GB right
before and right after (the mean of both); "of its best" is over its fastest read in the same case. llama.cpp rounds
activations to 8 bits; it is looked for as the package llama_cpp (PYTHONPATH may name a folder that has it).
"portable" runs with HALFBYTE_CPU=portable. Kernels whose tests fail are not measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import halfbyte as hb
from benchmarks import ggml, timing
from benchmarks.timing import Figure, Remote, Row, Timed
from halfbyte import jit

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336)]
ROWS = (1, 2, 4, 8, 16, 64, 512)
DTYPES = ("float32", "bfloat16", "float16")
LIBRARIES = ("numpy", "torch")
TESTS = ("tests/run/test_cpu_kernels.py", "tests/run/test_int8.py", "tests/run/test_kernels.py")
DISTINCT = 256
PAYLOAD = 9 / 16  # bytes of codes and scales for each weight

# must, aim
PROBE = {(4096, 4096): (0.90, 0.95), (14336, 4096): (0.85, 0.95), (4096, 14336): (0.85, 0.95)}
PROBE_PORTABLE = (0.55, 0.70)
OVER_NVFP4 = {8: (2.2, 3.0), 512: (3.5, 4.0)}
INT8_OVER_Q4_K = {512: (1.15, 1.3)}
OVER_MODELOPT, QUANTIZE_RATE, DECODE_RATE = (10, 30), (0.6, 2), (2, 10)
CALL_MICROSECONDS = (15, 8)
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3, "int8": 0.03, "nvfp4": 0.02, "q4_k": 0.12}


def over_nvfp4(m: int, k: int) -> tuple[float, float] | None:
    if m == 1:
        return (1.8 if k == 14336 else 2.0), 2.3
    return OVER_NVFP4.get(m)


def dense(k: int) -> NDArray[np.float32]:
    return np.random.default_rng(k).normal(0, 0.02, (DISTINCT, k)).astype(np.float32)


def activations(m: int, k: int) -> NDArray[np.float32]:
    return np.random.default_rng(m).normal(0, 1, (m, k)).astype(np.float32)


def aligned(count: int, *shape: int) -> NDArray[np.uint8]:
    """So many arrays of bytes, one after another, each at a multiple of 64."""
    size = int(np.prod(shape))
    pitch = -(-size // 64) * 64
    memory = np.empty(count * pitch + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: count * pitch]
    memory[:] = 0
    return memory.reshape(count, pitch)[:, :size].reshape(count, *shape)


def copies_of(rows: NDArray[Any], n: int, count: int) -> NDArray[Any]:
    """Copies in memory of the rows, repeated to ``n`` of them."""
    held = aligned(count, n, rows.shape[1] * rows.itemsize).view(rows.dtype)
    held.reshape(count, n // len(rows), *rows.shape)[:] = rows
    return held


def to_library(a: NDArray[Any], library: str) -> Any:
    if library == "numpy":
        return a
    import torch

    return torch.from_numpy(a)


def cast(a: NDArray[np.float32], library: str, dtype: str) -> Any:
    if library == "numpy":
        return a.astype(getattr(ml_dtypes, dtype, dtype))
    import torch

    return torch.from_numpy(a).to(getattr(torch, dtype))


def as_doubles(a: Any) -> NDArray[np.float64]:
    return np.asarray(a if isinstance(a, np.ndarray) else a.double(), np.float64)


def check(y: Any, expected: NDArray[np.float64], tolerance: float) -> float:
    """The relative error of the first rows of the weight; AssertionError above the tolerance."""
    got = as_doubles(y)[:, :DISTINCT]
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    assert error <= tolerance, f"wrong by {error:.2g}, more than {tolerance:g}"
    return error


class Ours(timing.Subject):
    """halfbyte. Both libraries read the same copies."""

    def __init__(self, threads: int, megabytes: float) -> None:
        super().__init__(threads, megabytes)
        self.twins: dict[str, list[Any]] = {}
        import torch

        torch.set_num_threads(threads)

    def take(self, n: int, k: int, megabytes: float | None = None) -> None:
        """Hold copies of a weight of this shape."""
        if self.shape == (n, k):
            return
        self.forget((n, k))
        self.twins.clear()
        self.one = hb.quantize(dense(k))
        self.count = max(1, -(-int((megabytes or self.megabytes) * 1e6) // int(n * k * PAYLOAD)))
        self.codes = copies_of(self.one.codes, n, self.count)
        self.scales = copies_of(self.one.scales, n, self.count)

    def packed(self, library: str) -> list[Any]:
        if library not in self.weights:
            scale2 = to_library(np.array(self.one.scale2), library)
            self.weights[library] = [
                hb.pack(hb.Weight(codes=to_library(codes, library), scales=to_library(scales, library), scale2=scale2))
                for codes, scales in zip(self.codes, self.scales, strict=True)
            ]
        return self.weights[library]

    def int8(self, library: str) -> list[Any]:
        """Twins of the copies, also rotated over so many megabytes."""
        if library not in self.twins:
            twin = hb.to_int8(self.one)
            n, k = self.shape
            if "data" not in self.twins:
                self.twins["data"] = list(copies_of(twin.data, n, max(1, -(-int(self.megabytes * 1e6) // (n * k)))))
            scale = to_library(np.tile(twin.scale, (n // DISTINCT, 1)), library)
            self.twins[library] = [
                hb.Int8Weight(data=to_library(data, library), scale=scale) for data in self.twins["data"]
            ]
        return self.twins[library]

    def linear(self, key: str, n: int, k: int, m: int, library: str, dtype: str, kind: str) -> dict[str, Any]:
        """Offer a product; which kernel it is, and its error."""
        self.take(n, k)
        x = cast(activations(m, k), library, dtype)
        weights = self.packed(library) if kind == "exact" else self.int8(library)
        call: Callable[[int], Any] = lambda i: hb.linear(x, weights[i])  # noqa: E731
        expected = as_doubles(x) @ self.one.dequantize().astype(np.float64).T
        error = check(call(0), expected, TOLERANCE["int8" if kind == "int8" else dtype])
        self.offer(key, call, len(weights))
        if kind == "int8":
            return {"error": error}
        return {"error": error, "kernel": hb.plan("linear", weights[0], rows=m, dtype=dtype).kernel}

    def hot(self, key: str, library: str, dtype: str) -> dict[str, Any]:
        """Offer a product with one small weight, which the caches hold."""
        self.take(512, 512, megabytes=0.1)
        x, weight = cast(activations(1, 512), library, dtype), self.packed(library)[0]
        self.offer(key, lambda i: hb.linear(x, weight), 1)
        return {"kernel": hb.plan("linear", weight, rows=1, dtype=dtype).kernel}

    def quantize(self, key: str, n: int, k: int, library: str) -> None:
        rows = dense(k).astype(ml_dtypes.bfloat16).view(np.uint16)
        held = copies_of(rows, n, max(1, -(-int(self.megabytes * 1e6) // (2 * n * k))))
        if library == "numpy":
            sources: list[Any] = list(held.view(ml_dtypes.bfloat16))
        else:
            import torch

            sources = [torch.from_numpy(a).view(torch.bfloat16) for a in held]
        self.offer(key, lambda i: hb.quantize(sources[i]), len(sources))

    def decode(self, key: str, n: int, k: int, library: str) -> None:
        self.take(n, k)
        scale2 = to_library(np.array(self.one.scale2), library)
        weights = [
            hb.Weight(codes=to_library(codes, library), scales=to_library(scales, library), scale2=scale2)
            for codes, scales in zip(self.codes, self.scales, strict=True)
        ]
        self.offer(key, lambda i: weights[i].dequantize("bfloat16"), len(weights))


class Llama(timing.Subject):
    """llama.cpp's product, of its NVFP4 (the bytes of halfbyte's layout gguf) and of its Q4_K."""

    def __init__(self, threads: int, megabytes: float) -> None:
        super().__init__(threads, megabytes)
        self.ggml = ggml.Ggml(threads)
        self.products: dict[str, ggml.Products] = {}

    def version(self) -> str:
        return str(self.ggml.version)

    def linear(self, key: str, n: int, k: int, m: int, kind: str) -> dict[str, Any]:
        if self.shape != (n, k):
            self.forget((n, k))
        weight = hb.quantize(dense(k))
        if kind == "nvfp4":
            number, scale = ggml.NVFP4, float(weight.scale2.item())
            rows = np.asarray(hb.pack(weight, "gguf").buffers()["blocks"]).reshape(DISTINCT, -1)
            expected = weight.dequantize()
        else:
            number, scale, rows, expected = ggml.Q4_K, 1.0, self.ggml.quantize(ggml.Q4_K, dense(k)), dense(k)
        if kind not in self.weights:
            size = n * rows.shape[1]
            self.weights[kind] = list(copies_of(rows, n, max(1, -(-int(self.megabytes * 1e6) // size))))
        if old := self.products.pop(kind, None):
            old.close()
        x = activations(m, k)
        products = self.products[kind] = ggml.Products(self.ggml, number, self.weights[kind], x)
        products.run(0)
        error = check(products.out * scale, as_doubles(x) @ expected.astype(np.float64).T, TOLERANCE[kind])
        self.offer(key, products.run, len(self.weights[kind]))
        return {"error": error}


class Torch(timing.Subject):
    """Dense products of torch."""

    def linear(self, key: str, n: int, k: int, m: int, dtype: str) -> None:
        import torch

        torch.set_num_threads(self.threads)
        if self.shape != (n, k):
            self.forget((n, k))
        kind = getattr(torch, dtype)
        if dtype not in self.weights:
            rows = torch.from_numpy(dense(k)).to(kind).repeat(n // DISTINCT, 1)
            count = max(1, -(-int(self.megabytes * 1e6) // rows.nbytes))
            self.weights[dtype] = [rows.clone() for _ in range(count)]
        x, weights = torch.from_numpy(activations(m, k)).to(kind), self.weights[dtype]
        self.offer(key, lambda i: torch.nn.functional.linear(x, weights[i]), len(weights))


class ModelOpt(timing.Subject):
    """nvidia-modelopt's quantizer."""

    def quantize(self, key: str, n: int, k: int) -> None:
        import warnings

        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from modelopt.torch.quantization.qtensor import NVFP4QTensor  # type: ignore[import-untyped]

        torch.set_num_threads(self.threads)
        rows = torch.from_numpy(dense(k)).to(torch.bfloat16).repeat(n // DISTINCT, 1)
        sources = [rows.clone() for _ in range(max(1, -(-int(self.megabytes * 1e6) // rows.nbytes)))]
        self.offer(key, lambda i: NVFP4QTensor.quantize(sources[i], 16), len(sources))


class Probe(timing.Subject):
    """Reads of the memory."""

    def read(self, key: str) -> int:
        from benchmarks import probe

        size = int(self.megabytes * 1e6) // probe.CHUNK * probe.CHUNK
        memory, out = aligned(1, size)[0], np.zeros(size // probe.CHUNK, np.int64)
        memory.reshape(-1, probe.CHUNK)[:] = np.random.default_rng(0).integers(0, 256, probe.CHUNK, np.uint8)
        probe.read(memory, out)
        assert (out == np.bitwise_xor.reduce(memory[: probe.CHUNK].view(np.int64))).all()
        self.offer(key, lambda i: probe.read(memory, out), 1)
        return size


class Bench:
    """A run: its processes, its options, and its rows as they come."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.remotes: dict[Any, Remote] = {}
        self.probe_bytes = 0
        self.avx512 = timing.machine()["avx512"]

    def remote(self, make: type[timing.Subject], threads: int, portable: bool = False) -> Remote:
        """The process of a subject; started when it is first needed."""
        key = (make, threads, portable)
        if key not in self.remotes:
            count = str(threads)
            environment = dict.fromkeys(("HALFBYTE_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count)
            if portable:
                environment["HALFBYTE_CPU"] = "portable"
            self.remotes[key] = Remote(make, (threads, self.options.megabytes), environment)
        return self.remotes[key]

    def drop(self, *makes: type[timing.Subject]) -> None:
        """End processes, and with them what they hold in memory."""
        for key in [key for key in self.remotes if key[0] in makes]:
            self.remotes.pop(key).close()

    def say(self, row: Row) -> None:
        self.rows.append(row)
        print(row, flush=True)

    def wanted(self, what: str) -> bool:
        return not self.options.only or all(word in what for word in self.options.only)

    def prepare(self, what: str, who: str, remote: Remote, method: str, *arguments: Any) -> tuple[Timed, Any] | None:
        """What is timed, and what its process says of it; a row says why where it cannot be."""
        key = f"{what} {who}"
        try:
            facts = remote.ask(method, key, *arguments)
        except RuntimeError as error:
            self.say(Row(what, who, missing=str(error)))
            return None
        return Timed(remote, key), facts

    def row(
        self, what: str, who: str, timed: Timed, figures: list[Figure], facts: dict[str, Any] | None = None
    ) -> None:
        more = dict(facts or {}, calls=len(timed.seconds))
        if timed.disturbed:
            more["disturbed_batches"] = timed.disturbed
        self.say(Row(what, who, timed.median, min(timed.seconds), tuple(figures), more))

    def probe(self) -> Timed:
        remote = self.remote(Probe, self.options.threads)
        if not self.probe_bytes:
            self.probe_bytes = remote.ask("read", "probe")
        return Timed(remote, "probe")

    def linears(self, n: int, k: int, m: int) -> None:
        """All products of one shape and M, in turns; at M=1 beside the read probe."""
        what, threads = f"M={m} {n}x{k}", self.options.threads
        mine: list[tuple[str, str, Timed, dict[str, Any]]] = []
        peers: dict[str, Timed] = {}
        ours = self.remote(Ours, threads)
        bounded = m in (1, 8, 512)
        contenders = [("default", "exact", library) for library in (LIBRARIES if bounded else ("torch",))]
        if m == 1:
            contenders += [("portable", "exact", library) for library in LIBRARIES]
        if m >= 64:
            contenders += [("default", "int8", library) for library in (LIBRARIES if bounded else ("torch",))]
        for variant, kind, library in contenders:
            for dtype in DTYPES:
                name = " ".join(["halfbyte", *([variant] if variant == "portable" else []), kind, library, dtype])
                remote = self.remote(Ours, threads, portable=True) if variant == "portable" else ours
                ready = self.prepare(what, name, remote, "linear", n, k, m, library, dtype, kind)
                if ready:
                    mine.append((variant if kind == "exact" else kind, name, *ready))
        for kind in ("nvfp4", "q4_k"):
            ready = self.prepare(what, f"llama.cpp {kind}", self.remote(Llama, threads), "linear", n, k, m, kind)
            if ready:
                peers[f"llama.cpp {kind}"] = ready[0]
        for dtype in ("float32", "bfloat16"):
            ready = self.prepare(what, f"torch {dtype}", self.remote(Torch, threads), "linear", n, k, m, dtype)
            if ready:
                peers[f"torch {dtype}"] = ready[0]
        probe = self.probe() if m == 1 else None
        timing.in_turns([*(timed for _, _, timed, _ in mine), *peers.values()], self.options.turns, probe)
        if probe:
            rates = [self.probe_bytes / 1e9 / seconds for seconds in (probe.median, min(probe.seconds))]
            self.row(what, "read probe", probe, [Figure("GB/s", rates[0]), Figure("GB/s at best", rates[1])])
        for name, timed in peers.items():
            self.row(what, name, timed, [Figure("GF/s", 2e-9 * m * n * k / timed.median)])
        for variant, name, timed, facts in mine:
            said, figures = dict(facts), [Figure("GF/s", 2e-9 * m * n * k / timed.median)]
            if probe:
                size = n * k * PAYLOAD
                share, at_best = size / self.probe_bytes / timed.probes(), size / 1e9 / timed.median / rates[1]
                bound = PROBE_PORTABLE if variant == "portable" else PROBE[n, k] if self.avx512 else (None, None)
                figures = [Figure("GB/s", size / 1e9 / timed.median), Figure("of the probe", share, *bound)]
                figures.append(Figure("of its best", at_best))
                beside = [self.probe_bytes / 1e9 / seconds for _, seconds in timed.beside()]
                said |= {"probes": len(beside), "slowest_probe": min(beside), "fastest_probe": max(beside)}
            for peer, other in peers.items():
                limit = None
                if peer == "llama.cpp nvfp4" and variant == "default":
                    limit = over_nvfp4(m, k)
                if peer == "llama.cpp q4_k" and variant == "int8":
                    limit = INT8_OVER_Q4_K.get(m)
                figures.append(Figure(f"x {peer}", other.median / timed.median, *(limit or (None, None))))
            self.row(what, name, timed, figures, said)

    def quantizing(self, n: int, k: int) -> None:
        """bf16 to NVFP4 on 1 thread and on all, beside ModelOpt on as many."""
        for threads in sorted({1, self.options.threads}):
            what = f"quantize {n}x{k} T={threads}"
            if not self.wanted(what):
                continue
            mine = {}
            for library in LIBRARIES:
                name = f"halfbyte rtn {library} bfloat16"
                if ready := self.prepare(what, name, self.remote(Ours, threads), "quantize", n, k, library):
                    mine[name] = ready[0]
            peer = self.prepare(what, "modelopt", self.remote(ModelOpt, threads), "quantize", n, k)
            timing.in_turns([*mine.values(), *([peer[0]] if peer else [])], self.options.turns)
            if peer:
                self.row(what, "modelopt", peer[0], [Figure("GB/s", n * k * 2e-9 / peer[0].median)])
            for name, timed in mine.items():
                figures = [Figure("GB/s per core", n * k * 2e-9 / timed.median / threads, *QUANTIZE_RATE)]
                if peer:
                    figures.append(Figure("x modelopt", peer[0].median / timed.median, *OVER_MODELOPT))
                self.row(what, name, timed, figures)
        self.drop(Ours, ModelOpt)

    def decoding(self, n: int, k: int) -> None:
        """NVFP4 to bf16 on 1 thread and on all."""
        for threads in sorted({1, self.options.threads}):
            what = f"decode {n}x{k} T={threads}"
            if not self.wanted(what):
                continue
            mine = {}
            for library in LIBRARIES:
                name = f"halfbyte {library} bfloat16"
                if ready := self.prepare(what, name, self.remote(Ours, threads), "decode", n, k, library):
                    mine[name] = ready[0]
            timing.in_turns([*mine.values()], self.options.turns)
            for name, timed in mine.items():
                rate = n * k * 2e-9 / timed.median / threads
                self.row(what, name, timed, [Figure("GB/s per core", rate, *DECODE_RATE)])
        self.drop(Ours)

    def calling(self) -> None:
        """What a call costs: a small product, hot."""
        what = "call 512x512 M=1"
        mine = {}
        for library in LIBRARIES:
            for dtype in DTYPES:
                name = f"halfbyte {library} {dtype}"
                if ready := self.prepare(what, name, self.remote(Ours, self.options.threads), "hot", library, dtype):
                    mine[name] = ready
        timing.in_turns([timed for timed, _ in mine.values()], self.options.turns)
        for name, (timed, said) in mine.items():
            figure = Figure("us", timed.median * 1e6, *CALL_MICROSECONDS, least=False)
            self.row(what, name, timed, [figure], said)
        self.drop(Ours)

    def run(self) -> None:
        quick = self.options.quick
        if self.wanted("call 512x512 M=1"):
            self.calling()
        self.quantizing(4096, 4096)
        self.decoding(4096, 4096)
        for n, k in SHAPES[: 1 if quick else None]:
            for m in (1, 8, 512) if quick else ROWS:
                if self.wanted(f"M={m} {n}x{k}"):
                    self.linears(n, k, m)
            self.drop(Ours, Llama, Torch)


def bounded(rows: list[Row]) -> Iterator[tuple[Row, Figure]]:
    return ((row, figure) for row in rows for figure in row.figures if figure.must is not None)


def tests_pass() -> bool:
    """Run the tests of the kernels, quietly unless they fail."""
    root = Path(__file__).parent.parent
    present = [test for test in TESTS if (root / test).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *present]
    return bool(present) and subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, M = 1, 8 and 512, fewer turns")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name holds all of these words")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=None, help="batches of each subject")
    parser.add_argument("--megabytes", type=float, default=1000, help="of copies that are rotated")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for all rows")
    parser.add_argument("--trust-tests", action="store_true", help="measure without running the kernels' tests first")
    options = parser.parse_args()
    options.turns = options.turns or (3 if options.quick else 7)
    if not options.trust_tests and not tests_pass():
        sys.exit(f"not measured: the kernels' tests fail; run: python -m pytest {' '.join(TESTS)}")
    if why := jit.missing():
        sys.exit(f"not measured: {why}")
    os.environ.pop("HALFBYTE_CPU", None)  # set for "portable" alone
    machine = timing.machine()
    print(f"{machine.get('model name')}, {machine['cores']} cores, {machine['system']}, {options.threads} threads")
    start, bench = time.time(), Bench(options)
    try:
        bench.run()
    finally:
        for remote in bench.remotes.values():
            remote.close()
    figures = list(bounded(bench.rows))
    missed = [(row, figure) for row, figure in figures if not figure.met]
    unmeasured = sum(row.seconds is None for row in bench.rows)
    disturbed = sum(row.facts.get("disturbed_batches", 0) for row in bench.rows)
    print(
        f"{len(figures) - len(missed)} of {len(figures)} bounds met; {unmeasured} rows not measured, "
        f"{disturbed} batches disturbed; {time.time() - start:.0f} s"
    )
    for row, figure in missed:
        print(f"missed: {row.what}, {row.who}: {figure} (aim {figure.aim:g})")
    if options.out:
        timing.write(
            options.out, bench.rows, threads=options.threads, megabytes=options.megabytes, turns=options.turns
        )  # fmt: skip


if __name__ == "__main__":
    main()
