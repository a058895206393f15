"""Figures of a whole model on a GPU: a Llama-3-8B with random NVFP4 weights beside the same in bfloat16.

    python -m benchmarks.models [--layers 32] [--new 256] [--quick] [--out FILE.json] [--device cpu]

A checkpoint of ModelOpt's is written into a temporary directory, lm_head left in bfloat16, and loaded by
``halfbyte.hf.from_pretrained``; the dense model has the same weights as bfloat16 holds them, exactly. Both run in
``halfbyte.generate``, in turns, medians of rounds. Nothing is said of models that do not compute the same: their logits
after a prompt must agree within the rounding of activations, and greedy texts with and without CUDA graphs must be
equal, as must those of all rounds.

"of the weight read" is (bytes that a step reads at the least) / (4.6 TB/s on an H200) / its time; the bytes are those
of all stored tensors, of the embedding the rows of the tokens alone, and of the keys and values at half of the new
tokens. "of the probe" is the same with the rate of a read of 4.3 GB in this run. The dense model's q, k and v, and gate
and up, are one product each, too. The first token is timed from the call.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import halfbyte as hb
from benchmarks import gpu_bounds, gpu_report, gpu_timing, timing
from benchmarks.gpu_bounds import Bound
from benchmarks.random_models import HEAD, RandomModel, llama, llama_3_8b
from benchmarks.timing import Figure, Row
from halfbyte.decoder.families import Decoder
from halfbyte.kernels.cuda.ceilings import CEILINGS

ROUNDS = 3
PROMPT, NEW, LONG_PROMPT = 512, 256, 2048
BATCHES = (1, 16)
PROBE_WORDS = 1 << 30
AGREE = 0.05
"""The relative error of logits beside those of the dense model, at most; other weights give more than 1."""


class DifferentError(RuntimeError):
    """What must be the same is not."""


@dataclass(frozen=True)
class Contender:
    """A model that takes part, and the bytes of its tensors as they are stored."""

    who: str
    model: Any
    stored: int


def read_bytes(config: Any, stored: int, batch: int, length: float) -> float:
    """Those that a step of decoding reads at the least.

    Args:
        stored: bytes of all tensors of the model, embedding and head among them; activations have 2 each.
        batch: sequences.
        length: of each, in tokens.
    """
    row = 2 * config.hidden_size
    cached = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return stored - (config.vocab_size - batch) * row + batch * length * cached


class Bench:
    """A run: its options, and its rows as they come."""

    def __init__(self, options: argparse.Namespace, gpu: str) -> None:
        self.options, self.device = options, options.device
        self.config = tiny(options.layers) if options.tiny else llama_3_8b(options.layers)
        ceiling = CEILINGS.get(gpu)
        self.read = ceiling.read if ceiling else None
        self.bounded = bool(ceiling) and not (options.quick or options.tiny) and options.layers == 32
        self.probed: float | None = None
        self.rows: list[Row] = []
        self.start = time.perf_counter()
        torch.manual_seed(0)

    def say(self, row: Row) -> None:
        self.rows.append(row)
        print(f"{time.perf_counter() - self.start:4.0f} s  {row}", flush=True)

    def bound(self, of: Bound | None) -> Bound | tuple[None, None]:
        return of if of and self.bounded else (None, None)

    def probe(self) -> None:
        """Read the memory."""
        if self.device != "cuda":
            return
        from benchmarks import gpu_probe

        memory = torch.empty(PROBE_WORDS, dtype=torch.int32, device="cuda").random_()
        gpu_probe.read(memory)
        torch.cuda.synchronize()
        seconds = gpu_timing.elapsed("cuda", lambda: gpu_probe.read(memory), 10) / 10
        self.probed = 4 * PROBE_WORDS / seconds
        self.say(Row("probe", "read", seconds, figures=(Figure("GB/s", self.probed / 1e9),)))

    def load(self, made: RandomModel) -> Contender:
        """Write the checkpoint and load it; what that takes of the device's memory."""
        import halfbyte.hf

        with tempfile.TemporaryDirectory(prefix="halfbyte-models-", dir=self.options.scratch) as scratch:
            stored, written = timed(lambda: made.write(Path(scratch)))
            self.free()
            before = self.allocated()
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            model, seconds = timed(lambda: halfbyte.hf.from_pretrained(scratch, device_map=self.device))
        self.free()
        figures = []
        if self.device == "cuda":
            bound = self.bound(gpu_bounds.MODEL_MEMORY)
            peak, after = torch.cuda.max_memory_allocated() - before, self.allocated() - before
            figures.append(Figure("of the stored bytes at most while loading", peak / stored, *bound, least=False))
            figures.append(Figure("of them after", after / stored, *bound, least=False))
        facts = {"stored": stored, "seconds_to_write": written}
        self.say(Row("load", "nvfp4", seconds, figures=tuple(figures), facts=facts))
        return Contender("nvfp4", model.eval(), stored)

    def dense(self, made: RandomModel) -> Contender:
        model = made.dense_model()
        Decoder.of(model, fuse_dense=True)
        return Contender("bfloat16", model, sum(parameter.nbytes for parameter in model.parameters()))

    def free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def prompt(self, batch: int, length: int) -> Any:
        random = torch.Generator().manual_seed(length)
        return torch.randint(0, self.config.vocab_size, (batch, length), generator=random).to(self.device)

    def agree(self, contender: Contender, dense: Contender) -> None:
        """Compare logits after a prompt; DifferentError where they are of another model."""
        with torch.inference_mode():
            got, expected = (
                one.model(self.prompt(1, self.options.prompt), use_cache=False, logits_to_keep=1).logits.double()
                for one in (contender, dense)
            )
        error = float((got - expected).norm() / expected.norm())
        if not error <= AGREE:
            raise DifferentError(f"the logits of {contender.who} are off by {error:.2g}, more than {AGREE:g}")
        said = f"after {self.options.prompt} tokens off by {error:.2g} of their norm beside those of bfloat16"
        self.say(Row("logits", contender.who, missing=said, facts={"relative_error": error}))

    def generate(self, contender: Contender, prompt: Any, new: int, **how: Any) -> Any:
        with forced(self.options.dense if contender.who == "bfloat16" else None):
            return hb.generate(contender.model, prompt, max_new_tokens=new, **how)

    def decoding(self, contenders: Sequence[Contender], batch: int) -> None:
        """Time a step of each, in turns; the dense model is the last."""
        prompt, new = self.prompt(batch, self.options.prompt), self.options.new
        texts = {one.who: self.generate(one, prompt, new).tokens for one in contenders}
        if self.device == "cuda":
            for one in contenders[:-1]:
                same(texts[one.who], self.generate(one, prompt, new, graph=False).tokens, f"{one.who} without graphs")
        seconds: dict[str, list[float]] = {one.who: [] for one in contenders}
        how = {}
        for one in in_turns(contenders, self.options.rounds):
            made = self.generate(one, prompt, new)
            same(texts[one.who], made.tokens, f"{one.who} once more")
            seconds[one.who].append(made.decode_seconds / made.steps)
            how[one.who] = made
        dense = statistics.median(seconds[contenders[-1].who])
        for one in contenders:
            step, made = statistics.median(seconds[one.who]), how[one.who]
            nbytes = read_bytes(self.config, one.stored, batch, self.options.prompt + new / 2)
            figures = [Figure("tokens/s", batch / step)]
            if self.read:
                bound = self.bound(gpu_bounds.DECODE_SHARE.get(batch)) if one.who == "nvfp4" else (None, None)
                figures.append(Figure("of the weight read", nbytes / self.read / step, *bound))
            if self.probed:
                figures.append(Figure("of the probe", nbytes / self.probed / step))
            if one is not contenders[-1]:
                bound = self.bound(gpu_bounds.DECODE_OVER_DENSE if batch == 1 and one.who == "nvfp4" else None)
                figures.append(Figure("x bfloat16", dense / step, *bound))
            facts = {
                "rounds": seconds[one.who],
                "bytes": nbytes,
                "own_bytes": made.bytes_per_step,
                "how": made.how,
                "prefill_seconds": made.prefill_seconds,
                "cache_bytes": made.memory,
                "memory_allocated": self.allocated(),
            }
            self.say(Row(f"decode batch {batch}", one.who, step, min(seconds[one.who]), tuple(figures), facts))

    def first_token(self, contenders: Sequence[Contender], nvfp4: Contender) -> None:
        """Time calls for one token after a long prompt, in turns with one whose products are of FP8."""
        prompt = self.prompt(1, self.options.long_prompt)
        seconds: dict[str, list[float]] = {who: [] for who in [*(one.who for one in contenders), "nvfp4 fp8"]}
        calls: list[tuple[str, Callable[[], Any]]] = [
            (one.who, lambda one=one: self.generate(one, prompt, 1)) for one in contenders
        ]
        calls.append(("nvfp4 fp8", lambda: in_fp8(nvfp4.model, lambda: self.generate(nvfp4, prompt, 1))))
        for _, call in calls:
            call()
        for who, call in in_turns(calls, 2 * self.options.rounds):
            self.synchronize()
            seconds[who].append(timed(call)[1])
        medians = {who: statistics.median(taken) for who, taken in seconds.items()}
        for who, median in medians.items():
            figures = []
            if who != contenders[-1].who:
                bound = self.bound(gpu_bounds.FIRST_TOKEN if who == "nvfp4" else None)
                ratio = median / medians[contenders[-1].who]
                figures.append(Figure("x the time of bfloat16", ratio, *bound, least=False))
            if who == "nvfp4 fp8":
                bound = self.bound(gpu_bounds.FP8_FIRST_TOKEN)
                figures.append(Figure("x as fast as exact", medians["nvfp4"] / median, *bound))
            facts = {"rounds": seconds[who]}
            what = f"first token of {self.options.long_prompt}"
            self.say(Row(what, who, median, min(seconds[who]), tuple(figures), facts))

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def run(self) -> None:
        self.probe()
        made = RandomModel(self.config, self.device)
        nvfp4, dense = self.load(made), self.dense(made)
        self.agree(nvfp4, dense)
        for batch in self.options.batches:
            self.decoding([nvfp4, dense], batch)
        self.first_token([nvfp4, dense], nvfp4)
        head = self.with_nvfp4_head(nvfp4, dense)
        self.agree(head, dense)
        self.decoding([head, dense], 1)
        self.probe()

    def with_nvfp4_head(self, contender: Contender, dense: Contender) -> Contender:
        """The model with an NVFP4 weight as its head; the dense one gets its values."""
        from halfbyte.nn import Linear

        n, k = self.config.vocab_size, self.config.hidden_size
        weight = RandomModel(self.config, self.device, nvfp4_head=True).weight(HEAD, n, k)
        layout = "fragments(dtype=bfloat16)" if self.device == "cuda" else "rows"
        setattr(contender.model, HEAD, Linear(hb.pack(weight, layout), out_dtype="float32"))
        with torch.no_grad():
            dense.model.lm_head.weight.copy_(weight.dequantize("bfloat16"))
        stored = contender.stored - 2 * n * k + n * k * 9 // 16 + 4
        return Contender("nvfp4, head too", contender.model, stored)


def in_turns(those: Sequence[Any], rounds: int) -> list[Any]:
    """All of them in each round, each time another one first."""
    return [those[(i + first) % len(those)] for first in range(rounds) for i in range(len(those))]


def same(expected: list[list[int]], got: list[list[int]], who: str) -> None:
    for text, other in zip(expected, got, strict=True):
        if text != other:
            at = next(i for i in range(len(text)) if text[: i + 1] != other[: i + 1])
            raise DifferentError(f"{who} gives another text, from token {at} on")


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    value = call()
    return value, time.perf_counter() - start


def in_fp8(model: Any, call: Callable[[], Any]) -> Any:
    """Call with all NVFP4 products of many tokens in FP8."""
    from halfbyte import nn

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    before = [layer.precision for layer in layers]
    try:
        for layer in layers:
            layer.precision = "fp8"
        return call()
    finally:
        for layer, precision in zip(layers, before, strict=True):
            layer.precision = precision


def tiny(layers: int) -> Any:
    """A config that tries the benchmark out."""
    return llama(
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        vocab_size=512,
        max_position_embeddings=512,
    )


@contextmanager
def forced(kernel: str | None) -> Iterator[None]:
    """Meanwhile HALFBYTE_KERNEL names a kernel, or none."""
    if kernel is not None:
        os.environ["HALFBYTE_KERNEL"] = kernel
    try:
        yield
    finally:
        os.environ.pop("HALFBYTE_KERNEL", None)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds; no bounds")
    parser.add_argument("--new", type=int, help="tokens of a text")
    parser.add_argument("--rounds", type=int, help="of each measurement")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--scratch", type=Path, help="where the checkpoint lies while it is loaded")
    parser.add_argument("--out", type=Path, help="a JSON file for all rows")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries out the benchmark itself")
    parser.add_argument("--dense", default="dense-torch", help="the kernel of the dense model's products")
    parser.add_argument("--tiny", action="store_true", help="a model of 128 features, to try out the benchmark itself")
    options = parser.parse_args(arguments)
    few = options.quick or options.tiny
    options.prompt = 64 if few else PROMPT
    options.new = options.new or (16 if few else NEW)
    options.long_prompt = 300 if few else LONG_PROMPT
    options.rounds = options.rounds or (2 if few else ROUNDS)
    return options


def main(arguments: list[str] | None = None) -> None:
    options, start = parsed(arguments), time.time()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("not measured: torch sees no CUDA GPU")
    os.environ.pop("HALFBYTE_KERNEL", None)
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "no GPU"
    given = sys.argv[1:] if arguments is None else arguments
    head = gpu_report.machine(gpu, given, "models")
    print(f"{gpu}, driver {head['driver']}, torch {torch.__version__}, commit {head['commit']}", flush=True)
    bench = Bench(options, gpu)
    try:
        bench.run()
    except DifferentError as error:
        sys.exit(f"not measured: {error}")
    end = {"verdict": gpu_report.verdict(bench.rows), "seconds": round(time.time() - start)}
    print("\n".join(end["verdict"]))
    print(f"{end['seconds']} s")
    if options.out:
        head |= {"prompt": options.prompt, "new": options.new}
        document = {"run": head, "rows": [timing.entry(row) for row in bench.rows], "end": end}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
