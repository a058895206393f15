"""The next token from logits, on the device and without waiting for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from halfbyte.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: divides the logits; 0 takes the largest.
        top_k: only so many of the largest logits can be chosen.
        top_p: only the most probable tokens can be chosen, as few as have this probability together.

    Raises:
        UsageError: a value that cannot be meant.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        for name, kind in (("temperature", Real), ("top_k", Integral), ("top_p", Real)):
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name == "temperature"):
                raise UsageError(f"{name} is not a number that it can be", got=repr(value)[:80])
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError("temperature is a number from 0 on", got=self.temperature)
        if self.top_k is not None and self.top_k < 1:
            raise UsageError("top_k is a number from 1 on", got=self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError("top_p is above 0 and at most 1", got=self.top_p)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken."""
        return self.temperature == 0

    def choose(self, logits: Tensor, generator: torch.Generator, out: Tensor) -> None:
        """Write the next token of each row of logits (B, V) to out (B,).

        The chance of a token is its probability: of probabilities divided by exponential noise the largest is taken.
        """
        if self.greedy:
            torch.argmax(logits, -1, out=out)
            return
        scores, ids = logits.float() / self.temperature, None
        if self.top_k is not None or self.top_p is not None:
            k = scores.shape[-1] if self.top_k is None else min(int(self.top_k), scores.shape[-1])
            scores, ids = torch.topk(scores, k, sorted=True) if k < scores.shape[-1] else scores.sort(-1, True)
        chances = torch.softmax(scores, -1)
        if self.top_p is not None:
            chances = chances.where(chances.cumsum(-1) - chances < self.top_p, 0)
        noise = torch.empty_like(chances).exponential_(generator=generator)
        best = chances.div_(noise).argmax(-1, keepdim=True)
        out.copy_((best if ids is None else ids.gather(-1, best))[:, 0])
