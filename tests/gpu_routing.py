"""The kernels that route against float64 in NumPy; as a script, on the CPU, in Triton's interpreter.

TRITON_INTERPRET=1 python -m gpu_routing routed equal odd
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from halfbyte.kernels.cuda import routing as cuda
from halfbyte.kernels.routing import RouteArgs, Rule

QWEN = Rule(top=8)
MIXTRAL = Rule(top=2)
PLAIN = Rule(top=4, renormalize=False)
DEEPSEEK = Rule(top=8, scoring="sigmoid", groups=8, top_groups=4, scale=2.5)
DEEPSEEK2 = Rule(top=6, renormalize=False, groups=8, top_groups=3, group_best=1, scale=16.0)
NEMOTRON = Rule(top=22, scoring="sigmoid", scale=5.0)
CASES = (
    # experts, rule, bias
    (128, QWEN, False),
    (8, MIXTRAL, False),
    (60, PLAIN, False),
    (256, DEEPSEEK, True),
    (160, DEEPSEEK2, False),
    (512, NEMOTRON, True),
    (6, Rule(top=3, scoring="sigmoid", groups=3, top_groups=2, group_best=3), True),
    (1, Rule(top=1), False),
)
EPSILON = 2.0**-20
"""Scores that differ by less may come in either order, and sums of four of them."""


def case(experts: int, bias: bool, dtype: str = "float32", tokens: int = 7, device: str = "cpu") -> Any:
    """Logits and a bias."""
    made = torch.Generator().manual_seed(experts)
    logits = 3 * torch.randn(tokens, experts, generator=made)
    added = torch.randn(experts, generator=made) / 4 if bias else None
    return logits.to(getattr(torch, dtype)).to(device), None if added is None else added.to(device)


def order(values: Any) -> Any:
    """Numbers, those of the largest values first, the lower of equal ones first."""
    return np.argsort(-values, kind="stable")


def expected(logits: Any, bias: Any, rule: Rule) -> tuple[list[int], Any, bool]:
    """Of a token (E,) in float64: numbers, weights, and whether all that decides is far enough apart."""
    e = len(logits)
    raised = np.exp(logits - logits.max())
    score = raised / raised.sum() if rule.scoring == "softmax" else 1 / (1 + np.exp(-logits))
    by = score if bias is None else score + bias
    apart, kept = True, np.ones(e, bool)
    if rule.groups > 1:
        total = np.sort(by.reshape(rule.groups, -1), 1)[:, ::-1][:, : rule.group_best].sum(1)
        ranked = order(total)
        kept = np.repeat(np.isin(np.arange(rule.groups), ranked[: rule.top_groups]), e // rule.groups)
        apart &= rule.top_groups == rule.groups or bool(
            total[ranked[rule.top_groups - 1]] - total[ranked[rule.top_groups]] > EPSILON
        )
    elif bias is None:
        by = logits
    chosen = order(np.where(kept, by, -np.inf))
    if by is not logits:
        near = by[chosen[: rule.top + 1]][: kept.sum()]
        apart &= bool((np.diff(near) < -EPSILON).all())
    numbers = chosen[: rule.top]
    weights = score[numbers]
    return numbers.tolist(), (weights / weights.sum() if rule.renormalize else weights) * rule.scale, apart


def check(logits: Any, bias: Any, rule: Rule, indices: Any, weights: Any) -> None:
    """Rows are as in float64; those that float32 may decide otherwise are few, and left out."""
    wide = logits.cpu().double().numpy()
    added = None if bias is None else bias.cpu().double().numpy()
    found = [expected(row, added, rule) for row in wide]
    assert sum(apart for *_, apart in found) >= 0.8 * len(found)
    for (numbers, values, apart), got, weight in zip(found, indices.tolist(), weights.cpu().double(), strict=True):
        if apart:
            assert got == numbers
            np.testing.assert_allclose(weight, values, rtol=1e-5, atol=1e-30)


def run(logits: Any, bias: Any, rule: Rule, dtype: Any = torch.int64) -> tuple[Any, Any]:
    shape = len(logits), rule.top
    indices = torch.full(shape, -7, dtype=dtype, device=logits.device)
    weights = torch.full(shape, -7.0, device=logits.device)
    args = RouteArgs(logits=logits, bias=bias, rule=rule, indices=indices, weights=weights)
    cuda.bind(args)(*args.arrays())
    return indices, weights


def routed(device: str) -> Iterator[str]:
    for (experts, rule, bias), dtype, ids in itertools.product(
        CASES, ("float32", "bfloat16", "float16"), (torch.int64, torch.int32)
    ):
        logits, added = case(experts, bias, dtype, device=device)
        indices, weights = run(logits, added, rule, ids)
        assert indices.dtype == ids
        check(logits, added, rule, indices, weights)
        yield f"{experts} {rule} {dtype}"


def equal(device: str) -> Iterator[str]:
    """Of equal values the lowest numbers."""
    for experts, rule, bias in CASES:
        logits, added = torch.zeros(3, experts, device=device), torch.zeros(experts, device=device) if bias else None
        logits[1, ::2] = -0.0
        indices, weights = run(logits, added, rule)
        assert indices.tolist() == [list(range(rule.top))] * 3
        assert len(weights.unique()) == 1
        yield str(rule)


def odd(device: str) -> Iterator[str]:
    """NaN comes first, infinities and what a bias excludes are in order, and numbers are always k different ones."""
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[0.0, nan, 1, nan, -inf, 2], [nan] * 6, [-inf, -inf, 3, -inf, -inf, -inf]], device=device)
    for scoring in ("softmax", "sigmoid"):
        indices, weights = run(logits, None, Rule(top=4, scoring=scoring))
        assert indices.tolist() == [[1, 3, 5, 2], [0, 1, 2, 3], [2, 0, 1, 3]]
        assert weights[:2].isnan().all()
        assert weights[2].tolist() == [1, 0, 0, 0]
        yield scoring
    bias = torch.tensor([-inf, 0, -inf, 0, -inf, -inf], device=device)
    indices, _ = run(logits[2:], bias, Rule(top=4, scoring="sigmoid", groups=2, top_groups=2))
    assert indices.tolist() == [[1, 3, 0, 2]]
    yield "bias"


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(wanted, sum(1 for _ in globals()[wanted]("cpu")))
