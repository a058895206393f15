"""How fast models generate: prefill and decode, several models in turn, beside what their device reads at best."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from halfbyte.decoder import Decoder, Generated, generate
from halfbyte.errors import UnavailableError, UsageError
from halfbyte.findings import Report
from halfbyte.session import Session
from halfbyte.timing import read_rate

Progress = Callable[[int, int], None]

_SLOW: Final = {
    "TRITON_INTERPRET": "kernels are interpreted",
    "CUDA_LAUNCH_BLOCKING": "every launch waits for the device",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation waits for the device",
    "HALFBYTE_KERNEL": "one kernel is forced",
}
"""Variables under which nothing runs as it does otherwise."""
_OTHERS: Final = 2 << 30
"""Bytes of a GPU that others may hold: more is another program's model."""
_BUSY: Final = 0.35
"""Of a core, what other programs may take of each."""


@dataclass(frozen=True)
class Options:
    """What is measured.

    Args:
        prompts: tokens of a prompt.
        new: tokens that follow.
        batches: prompts at once.
        rounds: of which medians are taken.

    Raises:
        UsageError: numbers that cannot be meant.
    """

    prompts: Sequence[int] = (512,)
    new: int = 64
    batches: Sequence[int] = (1,)
    rounds: int = 3

    def __post_init__(self) -> None:
        for what, values in (("--prompt", self.prompts), ("--batch", self.batches), ("--rounds", [self.rounds])):
            if not values or min(values) < 1:
                raise UsageError(f"{what} is from 1 on", got=", ".join(map(str, values)) or "nothing")
        if self.new < 2:
            raise UsageError("--new is from 2 on: the first token is the prefill's", got=self.new)


def circumstances(device: str) -> list[str]:
    """Why what is measured now would mislead; empty where nothing is known to be wrong."""
    found = [f"{name} is set: {why}" for name, why in _SLOW.items() if os.environ.get(name)]
    if torch.device(device).type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        if others > _OTHERS:
            found.append(f"other programs hold {others / 1e9:.1f} GB of the GPU")
    elif hasattr(os, "getloadavg"):
        cores = os.cpu_count() or 1
        load = os.getloadavg()[0]
        if load > _BUSY * cores + 0.5:
            found.append(f"other programs kept {load:.1f} of {cores} cores busy in the last minute")
    return found


def settled(device: str, anyway: bool = False) -> list[str]:
    """``circumstances`` before anything is loaded.

    Raises:
        UnavailableError: there are some, and not ``anyway``.
    """
    wrong = circumstances(device)
    if wrong and not anyway:
        raise UnavailableError("this would not measure the model", got="; ".join(wrong), hint="--anyway measures")
    return wrong


def bench(
    sessions: Mapping[str, Session],
    options: Options,
    *,
    disturbed: Sequence[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Measure models on one device, one after the other in each round.

    Args:
        sessions: by the names that they are told by; the first is held against the others.
        options: what is measured.
        disturbed: circumstances that are told with the figures.
        progress: called with how many calls are done, of how many.

    Returns:
        A report; its facts are "device", "gpu", "threads", "disturbed", "read" (bytes a second, the best of a
        probe before and one after), "rows" (each model at each number of tokens and batch, seconds as medians) and
        "how" (what ran, for each model).

    Raises:
        UsageError: models on several devices, or more positions than one has.
    """
    (device, *others) = dict.fromkeys(session.device for session in sessions.values())
    if others:
        raise UsageError("models are on several devices", got=", ".join([device, *others]))
    before = read_rate(device)
    for session in sessions.values():
        if not session.quantized and session.parted:
            Decoder.of(session.model, fuse_dense=True)
    settings = [(prompt, batch) for prompt in options.prompts for batch in options.batches]
    total = len(settings) * len(sessions) * (options.rounds + 1)
    done = 0
    made: dict[tuple[str, int, int], list[Generated]] = {}
    for prompt, batch in settings:
        for number in range(options.rounds + 1):
            for name, session in sessions.items():
                one = _once(session, prompt, batch, options.new)
                if number:
                    made.setdefault((name, prompt, batch), []).append(one)
                done += 1
                if progress is not None:
                    progress(done, total)
    read = max(before, read_rate(device))
    cuda = torch.device(device).type == "cuda"
    facts: dict[str, Any] = {
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "threads": torch.get_num_threads(),
        "disturbed": list(disturbed),
        "read": read,
        "new": options.new,
        "rounds": options.rounds,
        "weight_bytes": {name: session.weight_bytes for name, session in sessions.items()},
        "rows": [_row(*key, ones, read) for key, ones in made.items()],
        "how": {name: made[name, *settings[0]][0].how for name in sessions},
    }
    _compare(facts["rows"], next(iter(sessions)))
    return Report("bench", (), facts)


def _once(session: Session, prompt: int, batch: int, new: int) -> Generated:
    numbers = torch.Generator().manual_seed(prompt)
    rows = torch.randint(0, session.vocabulary, (batch, prompt), generator=numbers)
    return generate(session.model, rows, max_new_tokens=new)


def _row(name: str, prompt: int, batch: int, ones: list[Generated], read: float) -> dict[str, Any]:
    prefill = statistics.median(one.prefill_seconds for one in ones)
    step = statistics.median(one.decode_seconds / one.steps for one in ones)
    nbytes = ones[0].bytes_per_step
    return {
        "model": name,
        "prompt": prompt,
        "batch": batch,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": batch * prompt / prefill,
        "step_seconds": step,
        "tokens_per_second": batch / step,
        "bytes_per_step": nbytes,
        "read": nbytes / step if nbytes else None,
        "share": nbytes / step / read if nbytes else None,
        "cache_bytes": ones[0].memory,
    }


def _compare(rows: list[dict[str, Any]], first: str) -> None:
    """Adds how many times as fast the first model is as each other."""
    own = {(row["prompt"], row["batch"]): row for row in rows if row["model"] == first}
    for row in rows:
        mine = own[row["prompt"], row["batch"]]
        row["first_is_faster"] = {
            "prefill": row["prefill_seconds"] / mine["prefill_seconds"],
            "decode": row["step_seconds"] / mine["step_seconds"],
        }
