"""Figures of a mixture of experts on the CPU, beside the memory's speed: a layer of Qwen3-30B-A3B's shape.

    python -m benchmarks.experts_cpu [--quick] [--threads 2] [--out FILE]

Some layers of 128 experts, 1 GB of them, are asked in rotation: a token takes 8 experts of one layer, the next call
others, of another layer, until all were asked, so that no cache holds them. "of the probe" is the rate of codes and
block scales of the experts that have tokens over that of benchmarks/probe.py, which reads 1 GB right before and right
after. A result is checked against float64 before it is timed. Beside it runs ``experts-loop``, one expert after the
other by the kernels of ``linear``. Times are medians of single calls; see benchmarks/timing.py for the turns.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.cpu import Probe, as_doubles
from benchmarks.timing import Figure, Remote, Row, Timed

EXPERTS, TOP, HIDDEN, INNER = 128, 8, 2048, 768
TOKENS = (1, 4, 16, 64, 512)
DTYPES = ("bfloat16", "float32")
SHARE = (0.80, 0.90)  # must, aim: of the probe, for 1 token of bfloat16
TOLERANCE = {"bfloat16": 8e-3, "float32": 1e-5}


class Layers(timing.Subject):
    """Experts of some layers, and routings that ask all of them in turn."""

    def __init__(self, threads: int, megabytes: float) -> None:
        super().__init__(threads, megabytes)
        import torch

        import halfbyte as hb
        from halfbyte.nn import Experts

        torch.set_num_threads(threads)
        self.rng = np.random.default_rng(0)

        def stack(n: int, k: int) -> Any:
            codes = self.rng.integers(0, 256, (EXPERTS, n, k // 2), np.uint8)
            scales = self.rng.integers(50, 62, (EXPERTS, n, k // 16), np.uint8)
            scale2 = self.rng.uniform(0.5, 1, (EXPERTS, 1, 1)) / np.sqrt(40.0 * k)
            return hb.Weight(codes=codes, scales=scales, scale2=scale2.astype(np.float32)).torch()

        self.expert_bytes = 9 * 3 * HIDDEN * INNER // 16
        count = max(1, -(-int(megabytes * 1e6) // (EXPERTS * self.expert_bytes)))
        self.layers = [Experts(stack(2 * INNER, HIDDEN), stack(HIDDEN, INNER)) for _ in range(count)]

    def routings(self, tokens: int) -> list[Any]:
        """(T, k) of experts, over all that there are before any comes again."""
        import torch

        rows: list[Any] = []
        while len(rows) % tokens or len(rows) < 2 * EXPERTS // TOP:
            rows += list(self.rng.permutation(EXPERTS).reshape(-1, TOP))
        return list(torch.from_numpy(np.array(rows)).split(tokens))

    def experts(self, key: str, tokens: int, dtype: str) -> dict[str, Any]:
        """Offer a call; the bytes of the experts that have tokens, the kernel, and the error."""
        import torch

        generator = torch.Generator().manual_seed(tokens)
        hidden = torch.randn(tokens, HIDDEN, generator=generator).to(getattr(torch, dtype))
        weights = torch.full((tokens, TOP), 1 / TOP)
        routings, layers = self.routings(tokens), self.layers

        def call(i: int) -> Any:
            return layers[i % len(layers)](hidden, routings[i // len(layers) % len(routings)], weights)

        with torch.inference_mode():
            error = self._error(call(0)[:1], hidden[:1], routings[0][0].tolist())
        assert error <= TOLERANCE[dtype], f"wrong by {error:.2g}"

        def timed(i: int) -> None:
            with torch.inference_mode():
                call(i)

        self.offer(key, timed, len(layers) * len(routings))
        asked = float(np.mean([len(routing.unique()) for routing in routings]))
        return {"bytes": asked * self.expert_bytes, "experts": asked, "error": error}

    def _error(self, got: Any, x: Any, ids: list[int]) -> float:
        one, two = self.layers[0].gate_up.packed, self.layers[0].down.packed
        expected, wide = np.zeros((1, HIDDEN)), as_doubles(x)
        for e in ids:
            gate, up = np.split(wide @ as_doubles(one.expert(e).dequantize()).T, 2, 1)
            expected += (gate / (1 + np.exp(-gate)) * up) @ as_doubles(two.expert(e).dequantize()).T / TOP
        return float(np.linalg.norm(as_doubles(got) - expected) / np.linalg.norm(expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 token of bfloat16, fewer turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=None, help="batches of each subject")
    parser.add_argument("--megabytes", type=float, default=1000, help="of layers that are rotated")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for all rows")
    options = parser.parse_args()
    turns = options.turns or (3 if options.quick else 7)
    start, machine, rows = time.time(), timing.machine(), []
    print(f"{machine.get('model name')}, {machine['cores']} cores, {machine['system']}, {options.threads} threads")
    environment = dict.fromkeys(("HALFBYTE_THREADS", "OMP_NUM_THREADS"), str(options.threads))
    ours = Remote(Layers, (options.threads, options.megabytes), environment)
    loop = Remote(Layers, (options.threads, options.megabytes), environment | {"HALFBYTE_KERNEL": "experts-loop"})
    probing = Remote(Probe, (options.threads, options.megabytes), environment)
    size, probe = probing.ask("read", "probe"), Timed(probing, "probe")
    try:
        for tokens in TOKENS[: 1 if options.quick else None]:
            mine = []
            for dtype in DTYPES[: 1 if options.quick else None]:
                for who, remote in (("cpu-experts", ours), ("experts-loop", loop)):
                    key = f"{tokens} {dtype}"
                    mine.append((dtype, who, Timed(remote, key), remote.ask("experts", key, tokens, dtype)))
            probe = Timed(probing, "probe")
            timing.in_turns([timed for _, _, timed, _ in mine], turns, probe)
            what = f"T={tokens} top {TOP} of {EXPERTS}"
            rows.append(
                Row(what, "read probe", probe.median, min(probe.seconds), (Figure("GB/s", size / 1e9 / probe.median),))
            )
            for dtype, who, timed, facts in mine:
                bound = SHARE if (tokens, dtype, who) == (1, "bfloat16", "cpu-experts") else (None, None)
                rate, flops = facts["bytes"] / 1e9 / timed.median, 6e-9 * tokens * TOP * HIDDEN * INNER
                figures = [
                    Figure("GB/s", rate),
                    Figure("of the probe", facts["bytes"] / size / timed.probes(), *bound),
                    Figure("GF/s", flops / timed.median),
                ]
                beside = [size / 1e9 / seconds for _, seconds in timed.beside()]
                said = facts | {
                    "calls": len(timed.seconds), "disturbed_batches": timed.disturbed,
                    "slowest_probe": min(beside), "fastest_probe": max(beside),
                }  # fmt: skip
                rows.append(Row(what, f"{who} {dtype}", timed.median, min(timed.seconds), tuple(figures), said))
            for row in rows[-1 - len(mine) :]:
                print(row, flush=True)
    finally:
        for remote in (ours, loop, probing):
            remote.close()
    print(
        f"{sum(row.facts.get('disturbed_batches', 0) for row in rows)} batches disturbed; {time.time() - start:.0f} s"
    )
    if options.out:
        timing.write(options.out, rows, threads=options.threads, megabytes=options.megabytes, turns=turns)


if __name__ == "__main__":
    main()
