"""Figures of a layer of experts on a GPU, beside Humming's and torch's grouped products.

    python -m benchmarks.experts [--peers] [--models NAME ...] [--tokens T ...] [--out FILE.json] [--trust-tests]

"products" are gate_up with its activation and down, the lists that sort tokens by expert given; of the peers the two
products alone, without activation, of rows that lie sorted where that is their form. "layer" is all from the ids on:
lists, both products, the weighted sum. Routings are random, and rotate so that no cache holds the experts.

The floor is 1.3 us for each product and what the experts that have a token take at 4.6 TB/s, on an H200 and the mean
over routings; or, where that is more, the operations at 783 TFLOP/s. What is timed is checked: 4 tokens of each routing
against the layer in float64, all others for NaN.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import gpu_humming, gpu_report, gpu_timing, timing
from benchmarks.experts_subjects import (
    DEEPSEEK,
    FORMS,
    QWEN3,
    TINY,
    Candidate,
    Humming,
    Model,
    Routing,
    Stacks,
    torch_grouped,
)
from benchmarks.experts_subjects import routings as made_routings
from benchmarks.gpu_bounds import Bound
from benchmarks.timing import Figure, Row
from halfbyte.kernels import KERNELS, ExpertsArgs, select
from halfbyte.kernels.base import Cost
from halfbyte.kernels.cuda.ceilings import CEILINGS
from halfbyte.kernels.experts import Mixture
from halfbyte.trials import WrongResultError

ROOT: Final = Path(__file__).parents[1]
MODELS: Final = {"qwen3": QWEN3, "deepseek": DEEPSEEK}
TOKENS: Final = (1, 4, 16, 64, 128, 256, 1024, 4096)
ROUNDS: Final = 5
HOT_TOKENS: Final = 1024
REST: Final = 0.05
CHECKED: Final = 4
MOST_ERROR: Final = 8e-3
"""Of a checked token, relative to its norm: h and the result are rounded to bfloat16."""

_SHARE: Final[dict[str, dict[int, Bound]]] = {
    QWEN3.name: {1: (0.72, 0.85), 16: (0.82, 0.92), 64: (0.82, 0.92), 256: (0.60, 0.80)},
    DEEPSEEK.name: {1: (0.64, 0.80), 16: (0.84, 0.92), 64: (0.86, 0.93), 256: (0.76, 0.88)},
}
LAYER: Final[Bound] = (1.15, None)
"""From 16 tokens on, times the products."""
PEER: Final[Bound] = (1.0, None)


def floor(model: Model, found: Sequence[Routing], gpu: str) -> float | None:
    """Seconds of the two products."""
    ceiling = CEILINGS.get(gpu)
    if ceiling is None:
        return None
    touched = sum(routing.touched(model) for routing in found) / len(found)
    rows = sum(routing.rows(model) for routing in found) / len(found)
    of: list[float] = []
    for share in (2 / 3, 1 / 3):
        nbytes = round(touched * model.expert_bytes * share)
        of.append(ceiling.seconds(Cost(bytes=nbytes, flops=round(6 * rows * model.hidden * model.inner * share))))
    return sum(of)


class Bench:
    """A run: its options, and its rows as they come."""

    def __init__(self, options: argparse.Namespace, gpu: str) -> None:
        self.options, self.gpu, self.device = options, gpu, options.device
        self.rows: list[Row] = []

    def model(self, model: Model) -> None:
        stacks = Stacks(model, self.device)
        packed = stacks.packed("fragments(dtype=bfloat16)" if self.device == "cuda" else "rows")
        humming = Humming(stacks) if self.options.humming else None
        for tokens in self.options.tokens:
            found = made_routings(model, tokens, self.device)
            x = torch.randn(tokens, model.hidden, device=self.device).bfloat16()
            self.case(model, stacks, packed, humming, x, found)

    def case(self, model: Model, stacks: Stacks, packed: Any, humming: Humming | None, x: Any, found: Any) -> None:
        """A number of tokens."""
        makers: list[tuple[str, Callable[[], list[Candidate]]]] = [
            ("halfbyte", lambda: ours(model, stacks, packed, x, found, self.options.all))
        ]
        if self.device == "cuda" and self.options.peers:
            makers.append(("torch bfloat16", lambda: [torch_grouped(stacks, x, found)]))
        if humming is not None:
            makers += [(f"humming {form}", lambda form=form: [humming.candidate(form, x, found)]) for form in FORMS]  # type: ignore[misc]
        what, ideal = f"{model.name}, {len(x)} tokens", floor(model, found, self.gpu)
        ready: list[tuple[Candidate, gpu_timing.Timed]] = []
        for name, make in makers:
            try:
                for candidate in make():
                    count = gpu_timing.launches(len(found), ideal or 1e-3)
                    timed = gpu_timing.Timed(candidate.call, len(found), count, self.device)
                    if "check" in candidate.facts:
                        candidate.facts["error"] = candidate.facts.pop("check")(timed.replay)
                    ready.append((candidate, timed))
            except Exception as error:
                if self.device == "cuda":
                    torch.cuda.synchronize()
                first = (str(error).splitlines() or [""])[0]
                self.rows.append(Row(what, name, missing=f"{type(error).__name__}: {first}"))
                print(self.rows[-1], flush=True)
        if not ready:
            return
        gpu_timing.in_rounds([timed for _, timed in ready], ROUNDS, REST if len(x) >= HOT_TOKENS else 0.0)
        self.say(model, what, len(x), ideal, found, ready)

    def say(self, model: Model, what: str, tokens: int, ideal: float | None, found: Any, ready: Any) -> None:
        seconds = {(one.who, one.what): timed.median for one, timed in ready}
        peers = {who: s for (who, _), s in seconds.items() if who.startswith(("humming", "torch"))}
        said = []
        for candidate, timed in ready:
            taken, figures = timed.median, []
            mine = candidate.who not in peers
            default = mine and candidate.facts["picked"]
            if ideal and candidate.what == "products":
                bound = _SHARE.get(model.name, {}).get(tokens) if default else None
                figures.append(Figure("of the floor", ideal / taken, *(bound or (None, None))))
            if default and candidate.what == "products":
                beside = [s for who, s in peers.items() if who.startswith("humming")]
                if beside:
                    figures.append(Figure("x Humming", min(beside) / taken, *(PEER if ideal else (None, None))))
            if default and candidate.what == "layer" and (candidate.who, "products") in seconds:
                bound = LAYER if ideal and tokens >= 16 else None
                over = taken / seconds[candidate.who, "products"]
                figures.append(Figure("x its products", over, *(bound or (None, None)), least=False))
            facts = {
                "model": model.name, "tokens": tokens, "what": candidate.what, "floor": ideal,
                "touched": sum(r.touched(model) for r in found) / len(found), "routings": len(found),
                **candidate.facts,
            }  # fmt: skip
            self.rows.append(Row(what, candidate.who, taken, min(timed.seconds), tuple(figures), facts))
            missed = "".join(f" [{figure}]" for figure in figures if figure.met is False)
            star = "*" if default else ""
            share = f" ({figures[0].value:.2f})" if figures and candidate.what == "products" and ideal else ""
            said.append(f"{star}{candidate.who} {candidate.what} {taken * 1e6:.1f}{share}{missed}")
        print(f"{what:<40} floor {(ideal or 0) * 1e6:.1f} us: {', '.join(said)}", flush=True)


def ours(model: Model, stacks: Stacks, packed: Any, x: Any, found: Sequence[Routing], every: bool) -> list[Candidate]:
    """halfbyte's kernels, what ``plan`` picks first."""
    made: list[Candidate] = []
    mixture = Mixture(
        activation="silu", limit=None, gate_up_order="concatenated", experts=model.experts,
        local=tuple(range(model.held)), padding=False, null="skip",
    )  # fmt: skip

    def args_of(routing: Routing) -> ExpertsArgs:
        return ExpertsArgs(
            hidden=x, indices=routing.indices, weights=routing.weights, gate_up=packed[0], down=packed[1],
            gate_up_bias=None, down_bias=None, mixture=mixture, out=torch.empty_like(x),
        )  # fmt: skip

    all_args = [args_of(routing) for routing in found]
    call = all_args[0].call()
    picked = select(ExpertsArgs, call)
    kernels = [k for k in KERNELS if k.bundle is ExpertsArgs and (k is picked or (every and not k.refuse(call)))]
    for kernel in kernels:
        check = _check(stacks, x, found, all_args)
        facts = {"kernel": kernel.name, "picked": kernel is picked, "check": check}
        if kernel.bind is None:
            run = kernel.run
            made.append(Candidate(kernel.name, "layer", lambda i, run=run: run(all_args[i]), facts))  # type: ignore[misc]
            continue
        bound: list[Any] = [kernel.bind(args) for args in all_args]
        if hasattr(bound[0], "products"):
            for one, args in zip(bound, all_args, strict=True):
                one.lists(args.indices)

            def products(i: int, bound: Any = bound) -> None:
                a = all_args[i]
                bound[i].products(a.hidden, a.indices, a.weights, a.out)

            made.append(Candidate(kernel.name, "products", products, {k: v for k, v in facts.items() if k != "check"}))

        def layer(i: int, bound: Any = bound) -> None:
            a = all_args[i]
            bound[i](a.hidden, a.indices, a.weights, a.out)

        made.append(Candidate(kernel.name, "layer", layer, facts))
    return made


def _check(stacks: Stacks, x: Any, found: Sequence[Routing], all_args: Sequence[Any]) -> Callable[[Any], float]:
    def check(replay: Callable[[], None]) -> float:
        for args in all_args:
            args.out.fill_(float("nan"))
        replay()
        worst = 0.0
        for args, routing in zip(all_args, found, strict=True):
            if not args.out.isfinite().all():
                raise WrongResultError("wrong: not all of the result is written")
            for token in {round(j * (len(x) - 1) / max(1, CHECKED - 1)) for j in range(CHECKED)}:
                expected = stacks.layer(x, routing, token)
                off = (args.out[token].double() - expected).norm() / expected.norm().clamp(min=1e-30)
                worst = max(worst, float(off))
        if not worst <= MOST_ERROR:
            raise WrongResultError(f"wrong: off by {worst:.2g} of the norm, more than {MOST_ERROR:g}")
        return worst

    return check


def tests_pass() -> bool:
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(["scripts/gpu_tests", "-k", "expert"], cwd=ROOT, env=environment, check=False).returncode == 0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", action="store_true", help="torch's grouped products and, where it is installed, Humming"
    )
    parser.add_argument("--all", action="store_true", help="all kernels that take a case, not only what plan picks")
    parser.add_argument("--models", nargs="+", choices=(*MODELS, "tiny"), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--out", type=Path, help="a file of JSON")
    parser.add_argument("--trust-tests", action="store_true", help="measure without running the kernels' tests first")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the benchmark itself out")
    options, start = parser.parse_args(arguments), time.time()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("not measured: torch sees no CUDA GPU")
    if on_gpu and not options.trust_tests and not tests_pass():
        sys.exit("not measured: the kernels' tests fail; run: scripts/gpu_tests")
    os.environ.pop("HALFBYTE_KERNEL", None)
    torch.manual_seed(0)
    why = gpu_humming.missing() if options.peers and on_gpu else ""
    options.humming = on_gpu and options.peers and why is None
    if why:
        print(f"humming: {why}")
    gpu = torch.cuda.get_device_name() if on_gpu else "no GPU"
    head = gpu_report.machine(gpu, sys.argv[1:] if arguments is None else arguments, "experts")
    bench = Bench(options, gpu)
    for name in options.models:
        bench.model({**MODELS, "tiny": TINY}[name])
        if on_gpu:
            torch.cuda.empty_cache()
    verdict = gpu_report.verdict(bench.rows)
    print("\n".join(verdict), f"{time.time() - start:.0f} s", sep="\n")
    if options.out:
        document = {"run": head, "rows": [timing.entry(row) for row in bench.rows], "verdict": verdict}
        part = options.out.with_name(options.out.name + ".part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(options.out)


if __name__ == "__main__":
    main()
