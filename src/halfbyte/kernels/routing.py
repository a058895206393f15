"""``route``, which experts a token goes to and with what weights: what kernels are given, and torch's.

::

    s        = softmax(logits[t]) or sigmoid(logits[t])       float32, as all
    c        = s + bias                                       what is chosen by; without a bias and groups, the logits
    groups   the ``top_groups`` whose ``group_best`` largest c add up to most
    indices  the k experts of those groups with the largest c, the largest first
    weights  = s[indices] (/ their sum) * scale

Of equal values the first counts as larger, and NaN counts as infinity, so that indices always name k experts. Where
all weights of a token add up to 0 and are divided by that, they are 0: 1e-20 is added to a sum of sigmoids. Softmax and
sigmoid rise with the logits: these are the exact order, also where scores in float32 are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from halfbyte.arrays import dtype_name, float_dtype
from halfbyte.errors import UsageError
from halfbyte.kernels.base import Cost, Kernel, load_torch, why_not_torch
from halfbyte.kernels.step import StepCall, check, check_axes, place_of
from halfbyte.numerics import Array

SCORINGS: Final = ("softmax", "sigmoid")
TINY: Final = 1e-20
"""What is added to a sum of sigmoids."""
INDICES: Final = ("int32", "int64")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How experts are chosen.

    Args:
        top: k, the experts of a token.
        scoring: of ``SCORINGS``.
        renormalize: whether weights are divided by their sum.
        groups: of experts, of one size, one after the other.
        top_groups: from which the experts are chosen.
        group_best: how many experts' scores add up to a group's.
        scale: of the weights.

    Raises:
        UsageError: an unknown scoring, or numbers that cannot be meant.
    """

    top: int
    scoring: str = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise UsageError("unknown scoring", got=repr(self.scoring), expected=" or ".join(SCORINGS))
        if self.top < 1 or self.group_best < 1 or not 1 <= self.top_groups <= self.groups:
            raise UsageError(
                "no numbers to choose experts by",
                got=f"top {self.top}, {self.top_groups} of {self.groups} groups, group_best {self.group_best}",
                expected="all 1 or more, and no more top_groups than groups",
            )

    def check(self, experts: int) -> None:
        """UsageError where there are no k of so many experts to choose."""
        size = experts // self.groups
        if experts % self.groups or self.top > self.top_groups * size:
            raise UsageError(
                "experts do not fit the routing",
                got=f"{experts} experts in {self.groups} groups, top {self.top} of {self.top_groups} groups",
                expected="groups of one size, with as many experts in the top groups as a token takes",
            )


@dataclass(frozen=True, kw_only=True)
class RouteCall(StepCall):
    """As StepCall, of tokens and their logits; width is E.

    Args:
        width: E.
        rule: how experts are chosen.
        bias: there is one.
        indices: their dtype.
    """

    op: str = "route"
    width: int
    rule: Rule
    bias: bool
    indices: str


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteArgs:
    """The arguments of a kernel for ``route``.

    Args:
        logits: (T, E) float32, bfloat16 or float16.
        bias: (E,) float32, or None.
        rule: how experts are chosen.
        indices: (T, k) int32 or int64; written.
        weights: (T, k) float32; written.
    """

    op: ClassVar[str] = "route"
    logits: Array
    bias: Array | None
    rule: Rule
    indices: Array
    weights: Array

    def __post_init__(self) -> None:
        t, e = check_axes(self.logits, "logits", 2)
        self.rule.check(e)
        check(self.op, "logits", self.logits, self.logits, (t, e))
        if self.bias is not None:
            check(self.op, "bias", self.bias, self.logits, (e,), "float32")
        kind = dtype_name(self.indices.dtype)
        if kind not in INDICES:
            raise UsageError("indices are no integers of 32 or 64 bits", got=kind, expected=" or ".join(INDICES))
        check(self.op, "indices", self.indices, self.logits, (t, self.rule.top), kind)
        check(self.op, "weights", self.weights, self.logits, (t, self.rule.top), "float32")

    def arrays(self) -> tuple[Any, ...]:
        """What a bound kernel takes."""
        return self.logits, self.bias, self.indices, self.weights

    def call(self) -> RouteCall:
        """What decides which kernel runs on these arrays."""
        rows, width = self.logits.shape
        return RouteCall(
            width=width,
            rule=self.rule,
            bias=self.bias is not None,
            indices=dtype_name(self.indices.dtype),
            **place_of(self.logits, rows),
        )


def route_cost(call: RouteCall) -> Cost:
    """Logits read and choices written once."""
    chosen = call.rule.top * (4 + (8 if call.indices == "int64" else 4))
    each = call.width * float_dtype(call.dtype).itemsize + chosen
    return Cost(bytes=call.rows * each + 4 * call.width * call.bias, flops=call.rows * call.width * (4 + call.rule.top))


def _bind(args: RouteArgs) -> Callable[..., None]:
    rule = args.rule

    def run(logits: Any, bias: Any, indices: Any, weights: Any) -> None:
        logits = logits.float()
        scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
        by = logits if bias is None and rule.groups == 1 else scores if bias is None else scores + bias
        order = _order(by)
        if rule.groups > 1:
            order = _in_top_groups(order, by, rule)
        chosen = order.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top]
        own = scores.gather(1, chosen)
        if rule.renormalize:
            own = own / (own.sum(-1, keepdim=True) + (TINY if rule.scoring == "sigmoid" else 0.0))
        indices.copy_(chosen)
        weights.copy_(own * rule.scale)

    return run


def _order(values: Any) -> Any:
    """Integers in the order of floats: 0 and -0 alike, NaN above all."""
    import torch

    bits = (values + 0.0).view(torch.int32)
    return torch.where(values.isnan(), torch.iinfo(torch.int32).max, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _in_top_groups(order: Any, by: Any, rule: Rule) -> Any:
    """The order, below all others for experts of groups that are not chosen."""
    import torch

    shape = order.shape[0], rule.groups, -1
    size = by.shape[1] // rule.groups
    best = order.view(shape).sort(dim=-1, descending=True, stable=True).indices[..., : min(rule.group_best, size)]
    total = by.view(shape).gather(-1, best).sum(-1)
    chosen = _order(total).sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
    kept = torch.zeros_like(total, dtype=torch.bool).scatter_(1, chosen, True)
    return order.view(shape).masked_fill(~kept[..., None], torch.iinfo(torch.int32).min).view(order.shape)


TORCH: Final = Kernel(
    name="route-torch",
    bundle=RouteArgs,
    description="torch's operators, any device",
    refuse=lambda call: why_not_torch(call.library),
    load=load_torch,
    bind=_bind,
    cost=route_cost,
)
