"""``route`` as an operator of torch's, for ``torch.compile`` and ``torch.export``; as that for ``linear``."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import route_op
from halfbyte.kernels.routing import Rule


@torch.library.custom_op("halfbyte::route", mutates_args=())
def choose(
    logits: Tensor,
    bias: Tensor | None,
    top: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    group_best: int,
    scale: float,
    ids: str,
) -> tuple[Tensor, Tensor]:
    """``halfbyte.route``.

    Args:
        logits: (T, E).
        bias: (E,), or None.
        top: as of Rule.
        scoring: as of Rule.
        renormalize: as of Rule.
        groups: as of Rule.
        top_groups: as of Rule.
        group_best: as of Rule.
        scale: as of Rule.
        ids: the dtype of the numbers.

    Returns:
        (T, k) numbers, and (T, k) weights.
    """
    rule = Rule(
        top=top, scoring=scoring, renormalize=renormalize, groups=groups, top_groups=top_groups, group_best=group_best,
        scale=scale,
    )  # fmt: skip
    return route_op.compute(logits, bias, rule, ids)


def _shape(
    logits: Tensor,
    bias: Tensor | None,
    top: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    group_best: int,
    scale: float,
    ids: str,
) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top
    return logits.new_empty(shape, dtype=getattr(torch, ids)), logits.new_empty(shape, dtype=torch.float32)


choose.register_fake(_shape)


def traced(logits: Tensor, bias: Tensor | None, rule: Rule, ids: str) -> tuple[Tensor, Tensor]:
    """``route`` while torch traces it."""
    of = rule.top, rule.scoring, rule.renormalize, rule.groups, rule.top_groups, rule.group_best, rule.scale
    made: tuple[Tensor, Tensor] = choose(logits, bias, *of, ids)
    return made
