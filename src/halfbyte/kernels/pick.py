"""``pick``, the token with the largest logit written where a decoder looks for it: what kernels are given, and torch's.

::

    token       = argmax(logits[b])        the first of equal ones; NaN counts as infinity
    tokens[b]   = log[counters[1, b], b] = token
    counters[:, b] += 1                    positions, and how many tokens the log has
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from halfbyte.arrays import float_dtype
from halfbyte.kernels.base import Cost, Kernel, load_torch, why_not_torch
from halfbyte.kernels.step import StepCall, check, check_axes, place_of
from halfbyte.numerics import Array


@dataclass(frozen=True, kw_only=True)
class PickCall(StepCall):
    """As StepCall; width is V."""

    op: str = "pick"
    width: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PickArgs:
    """The arguments of a kernel for ``pick``.

    Args:
        logits: (B, V) float32, bfloat16 or float16, V at least 1.
        tokens: (B,) int64; written.
        counters: (2, B) int64; each is increased by 1.
        log: (T, B) int64; row counters[1, b] of each column b is written, if it is within.
    """

    op: ClassVar[str] = "pick"
    logits: Array
    tokens: Array
    counters: Array
    log: Array

    def __post_init__(self) -> None:
        b, _ = check_axes(self.logits, "logits", 2)
        room = check_axes(self.log, "log", 2)[0]
        check(self.op, "logits", self.logits, self.logits, tuple(self.logits.shape))
        for name, shape in {"tokens": (b,), "counters": (2, b), "log": (room, b)}.items():
            check(self.op, name, getattr(self, name), self.logits, shape, "int64")

    def arrays(self) -> tuple[Any, ...]:
        """What a bound kernel takes."""
        return self.logits, self.tokens, self.counters, self.log

    def call(self) -> PickCall:
        """What decides which kernel runs on these arrays."""
        rows, width = self.logits.shape
        return PickCall(width=width, **place_of(self.logits, rows))


def pick_cost(call: PickCall) -> Cost:
    """Logits read once."""
    return Cost(bytes=call.rows * (call.width * float_dtype(call.dtype).itemsize + 48), flops=call.rows * call.width)


def _bind(args: PickArgs) -> Callable[..., None]:
    import torch

    def run(logits: Any, tokens: Any, counters: Any, log: Any) -> None:
        torch.argmax(logits, -1, out=tokens)
        log.scatter_(0, counters[1:], tokens[None])
        counters.add_(1)

    return run


TORCH: Final = Kernel(
    name="pick-torch",
    bundle=PickArgs,
    description="torch's operators, any device",
    refuse=lambda call: why_not_torch(call.library),
    load=load_torch,
    bind=_bind,
    cost=pick_cost,
)
