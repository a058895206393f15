"""Models that cannot be taken apart: transformers' own forward with its static cache, one call for each token."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from halfbyte.decoder.sampling import Sampling

Take = Callable[[Sequence[int], list[int]], bool]
"""Takes the next tokens of prompts, and their numbers; whether some go on."""


@dataclass
class Times:
    """What running took, and held."""

    prefill: float = 0.0
    decode: float = 0.0
    steps: int = 0
    memory: int = 0


def cache_name(model: Module) -> str:
    """What a model's forward calls its cache: it differs between versions of transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def run(model: Module, rows: list[list[int]], new: int, sampling: Sampling, seed: int, take: Take) -> Times:
    """Generate; prompts of each length together, one length after the other."""
    from transformers import StaticCache

    times, name = Times(), cache_name(model)
    config: Any = model.config
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for length in dict.fromkeys(map(len, rows)):
        group = [i for i, row in enumerate(rows) if len(row) == length]
        cache: Any = StaticCache(config=config, max_cache_len=length + new)
        tokens = torch.tensor([rows[i] for i in group], device=device)
        begin = time.perf_counter()
        for step in range(new):
            out: Any = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{name: cache})
            logits: Tensor = out.logits[:, -1]
            tokens = torch.empty(len(group), dtype=torch.int64, device=device)
            sampling.choose(logits, generator, tokens)
            more = take(tokens.tolist(), group)
            tokens = tokens[:, None]
            now = time.perf_counter()
            if step:
                times.decode, times.steps = times.decode + now - begin, times.steps + 1
            else:
                times.prefill += now - begin
            begin = now
            if not more:
                break
        held = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values")]
        times.memory = max(times.memory, sum(t.nbytes for t in held if isinstance(t, Tensor)))
    return times
