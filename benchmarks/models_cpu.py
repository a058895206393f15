"""Figures of real models on the CPU: SmolLM2-135M against transformers in float32, MiniLM against itself in float32.

    python -m benchmarks.models_cpu [--quick] [--threads 2] [--only smollm2 minilm] [--out FILE]

Both models are in PyPI packages (see scripts/smollm2.py and benchmarks/minilm.py). SmolLM2 is quantized with rtn and
continued by ``halfbyte.generate``; beside it transformers' own ``generate`` continues the dense model in float32, with
its own cache. Each lives in a process of its own, and both take turns (benchmarks/timing.py). A call for one token and
a call for 65 alternate; the difference of their medians is the time of 64 steps, of either subject.

MiniLM is quantized in place with rtn by ``halfbyte.hf.quantize_model``; "cosine" is that of a sentence's embedding and
its embedding by the model in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import halfbyte as hb
from benchmarks import minilm, timing
from benchmarks.timing import Figure, Remote, Row, Timed

SCRIPTS = Path(__file__).parents[1] / "scripts"
PROMPT = "Tell a story of a lighthouse and a storm."
STEPS = 64
SENTENCES = 256

# must, aim
OVER_TRANSFORMERS = (2, None)
COSINE = (0.97, None)


class Speaker(timing.Subject):
    """A model that continues a prompt."""

    def __init__(self, threads: int, megabytes: float) -> None:
        super().__init__(threads, megabytes)
        import torch

        torch.set_num_threads(threads)

    def take(self, path: str, dtype: str, prompt: list[int], quantized: bool) -> dict[str, Any]:
        """Offer calls for one token and for all; the text, and what runs."""
        import torch
        from transformers import AutoModelForCausalLM

        kind = getattr(torch, dtype)
        if quantized:
            import halfbyte.hf

            model = halfbyte.hf.from_pretrained(path, dtype=kind).eval()
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=kind).eval()
        ids = torch.tensor([prompt])

        def ours(new: int) -> Any:
            return hb.generate(model, ids, max_new_tokens=new)

        def theirs(new: int) -> Any:
            options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
            with torch.inference_mode():
                return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

        call = ours if quantized else theirs
        self.offer("first", lambda i: call(1), 1)
        self.offer("all", lambda i: call(1 + STEPS), 1)
        made = call(1 + STEPS)
        text = made.tokens[0] if quantized else made[0, len(prompt) :].tolist()
        assert len(text) == 1 + STEPS
        return {"text": text, "how": made.how if quantized else "transformers' generate"}


def smollm2(options: argparse.Namespace) -> Iterator[Row]:
    """Tokens a second of decoding."""
    sys.path.insert(0, str(SCRIPTS))
    import smollm2 as package

    count = str(options.threads)
    environment = dict.fromkeys(("HALFBYTE_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count)
    with tempfile.TemporaryDirectory(prefix="halfbyte-models-") as scratch:
        dense, nvfp4 = Path(scratch, "dense"), Path(scratch, "nvfp4")
        package.build(dense)
        hb.quantize_checkpoint(dense, nvfp4, recipe="rtn", to="modelopt")
        subjects = [
            ("halfbyte float32", nvfp4, "float32", True),
            ("halfbyte bfloat16", nvfp4, "bfloat16", True),
            ("transformers float32", dense, "float32", False),
        ]
        prompt, timed, facts = tokens(dense), {}, {}
        remotes = []
        for who, path, dtype, quantized in subjects:
            remote = Remote(Speaker, (options.threads, 0.0), environment)
            remotes.append(remote)
            facts[who] = remote.ask("take", str(path), dtype, prompt, quantized)
            timed[who] = [Timed(remote, key) for key in ("first", "all")]
        timing.in_turns([one for both in timed.values() for one in both], options.turns)
        for remote in remotes:
            remote.close()
    steps = {who: (both[1].median - both[0].median) / STEPS for who, both in timed.items()}
    peer = subjects[-1][0]
    for who, seconds in steps.items():
        figures = [Figure("tokens/s", 1 / seconds)]
        if who != peer:
            bound = OVER_TRANSFORMERS if who == subjects[0][0] else (None, None)
            figures.append(Figure(f"x {peer}", steps[peer] / seconds, *bound))
        said = facts[who] | {
            "first_seconds": timed[who][0].median,
            "all_seconds": timed[who][1].median,
            "batches": [one.batches for one in timed[who]],
            "disturbed_batches": sum(one.disturbed for one in timed[who]),
        }
        yield Row(f"SmolLM2 decode T={options.threads}", who, seconds, figures=tuple(figures), facts=said)


def tokens(path: Path) -> list[int]:
    """The prompt's, with the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": PROMPT}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def embeddings(count: int) -> Iterator[Row]:
    """Sentences by MiniLM in NVFP4, and the error of each layer."""
    import torch

    import halfbyte.hf

    model, tokenizer = minilm.load()
    texts = minilm.sentences(count)
    dense = copy.deepcopy(model)
    with contextlib.redirect_stderr(io.StringIO()):
        halfbyte.hf.quantize_model(model, "rtn")
    start = time.perf_counter()
    cosine = (minilm.embed(dense, tokenizer, texts) * minilm.embed(model, tokenizer, texts)).sum(1).double()
    errors = dict(layer_errors(dense, model))
    figures = (
        Figure("mean cosine", float(cosine.mean()), *COSINE),
        Figure("least cosine", float(cosine.min())),
        Figure("mean relative error of a weight", sum(errors.values()) / len(errors)),
    )
    facts = {"sentences": count, "layer_errors": errors, "torch_threads": torch.get_num_threads()}
    yield Row("MiniLM embeddings", "halfbyte rtn", time.perf_counter() - start, figures=figures, facts=facts)


def layer_errors(dense: Any, quantized: Any) -> Iterator[tuple[str, float]]:
    """The norm of the error of each quantized weight over the weight's."""
    from halfbyte.nn import weights_of

    layers = dict(dense.named_modules())
    for name, weight in weights_of(quantized):
        exact = layers[name].weight.detach()
        yield name, float((weight.dequantize("float32") - exact).norm() / exact.norm())


PARTS = ("smollm2", "minilm")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, help="a JSON file for all rows")
    options = parser.parse_args(arguments)
    options.turns = 3 if options.quick else 7
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    rows: list[Row] = []
    for name, part in (("smollm2", smollm2(options)), ("minilm", embeddings(SENTENCES))):
        if name not in options.only:
            continue
        try:
            for row in part:
                rows.append(row)
                print(row, flush=True)
        except importlib.metadata.PackageNotFoundError as error:
            sys.exit(f"not measured: the package {error.name} is not installed; run: make test")
    if options.out:
        command = " ".join(["python -m benchmarks.models_cpu", *(sys.argv[1:] if arguments is None else arguments)])
        timing.write(options.out, rows, command=command, threads=options.threads)


if __name__ == "__main__":
    main()
