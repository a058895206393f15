"""Which experts tokens go to, and with what weights: each kind of call chooses its kernel once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from halfbyte.errors import UsageError
from halfbyte.kernels import select
from halfbyte.kernels.routing import INDICES, RouteArgs, Rule
from halfbyte.numerics import is_torch
from halfbyte.operands import check_beside, check_float, contiguous, wants_gradient, without_gradient
from halfbyte.remembered import forced_name, keep
from halfbyte.weight import dtype_name

if TYPE_CHECKING:
    from torch import Tensor

_known: Final[dict[Any, Callable[..., None]]] = {}
"""What runs on calls of one key; of many all are forgotten."""


def route(
    logits: Tensor,
    top: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    scale: float = 1.0,
    dtype: Any = "int64",
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts by the logits of a router, which stays dense.

    All is float32, also for logits of 16 bits. Of equal scores the lowest number is taken. Where neither ``bias`` nor
    groups say otherwise, experts are chosen by their logits: so exactly, also where scores in float32 are equal.

    Args:
        logits: (T, E) float32, bfloat16 or float16.
        top: k, the experts of a token.
        scoring: "softmax" over all experts (Qwen3-MoE, Mixtral), or "sigmoid" (DeepSeek-V3, Nemotron-H).
        renormalize: whether a token's weights are divided by their sum.
        bias: (E,) float32, added to scores to choose by, but not to weights (``e_score_correction_bias``).
        groups: E is cut into so many of one size.
        top_groups: from how many of them experts are chosen: those whose best scores add up to most.
        group_best: how many scores of a group add up: 2 as in DeepSeek-V3, 1 as in DeepSeek-V2.
        scale: of the weights (``routed_scaling_factor``).
        dtype: "int64" or "int32", of the numbers.

    Returns:
        The experts' numbers (T, k), the best first, and their weights (T, k) in float32: what ``nn.Experts`` takes.

    Raises:
        UsageError: an unknown scoring, or numbers or tensors that do not fit each other.
        NoKernelError: HALFBYTE_KERNEL names a kernel that declines.
    """
    rule = Rule(
        top=top, scoring=scoring, renormalize=renormalize, groups=groups, top_groups=top_groups, group_best=group_best,
        scale=float(scale),
    )  # fmt: skip
    if not is_torch(logits):
        raise UsageError("route takes torch tensors", got=type(logits).__name__)
    ids = dtype if isinstance(dtype, str) else dtype_name(dtype)
    if ids not in INDICES:
        raise UsageError("indices are no integers of 32 or 64 bits", got=ids, expected=" or ".join(INDICES))
    if sys.modules["torch"].compiler.is_compiling():
        from halfbyte.torch_routing import traced

        return traced(logits, bias, rule, ids)
    return compute(logits, bias, rule, ids)


def compute(logits: Tensor, bias: Tensor | None, rule: Rule, ids: str) -> tuple[Tensor, Tensor]:
    """``route`` by a rule, outside of traces."""
    check_float(logits, "logits")
    if logits.ndim != 2:
        raise UsageError("logits have other axes", got=tuple(logits.shape), expected="(T, E)")
    if bias is not None:
        check_beside(bias, "the bias", logits, "logits")
    if wants_gradient(logits, bias):
        made: Any = without_gradient()(logits, bias, lambda x: _compute(x, bias, rule, ids))
        return made[0], made[1]
    return _compute(logits, bias, rule, ids)


def _compute(logits: Tensor, bias: Tensor | None, rule: Rule, ids: str) -> tuple[Tensor, Tensor]:
    import torch

    logits = contiguous(logits)
    bias = None if bias is None else contiguous(bias)
    shape = logits.shape[0], rule.top
    indices = torch.empty(shape, dtype=getattr(torch, ids), device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    of_bias = None if bias is None else (bias.shape, bias.dtype)
    key = logits.shape, logits.dtype, logits.device, of_bias, rule, ids, forced_name()
    known = _known.get(key)
    if known is None:
        args = RouteArgs(logits=logits, bias=bias, rule=rule, indices=indices, weights=weights)
        kernel = select(RouteArgs, args.call())
        if kernel.bind is None:
            raise UsageError(f"kernel {kernel.name} cannot be bound")
        known = kernel.bind(args) if shape[0] else _nothing
        keep(_known, key, known)
    known(logits, bias, indices, weights)
    return indices, weights


def _nothing(*arrays: Any) -> None:
    """For no tokens."""
