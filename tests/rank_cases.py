"""What the ranks of ``ranks.Pool`` run: each case gives arrays that the tests compare."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor.parallel import parallelize_module

from halfbyte import nn
from halfbyte.lossy import to_fp8
from halfbyte.parallel import (
    ColumnParallel,
    ExpertParallel,
    ExpertTensorParallel,
    Ranks,
    RowParallel,
    load_balance,
)
from helpers_run import random_weight


def layer(kind: str, n: int, k: int, *, bias: bool = True, seed: int = 0, per_row: bool = True) -> Any:
    """The same whole layer on every rank: of kind "nvfp4", "fp8", "fp8-row" or "dense"."""
    own = torch.randn(n, generator=torch.Generator().manual_seed(seed)) if bias else None
    if kind == "dense":
        made = torch.nn.Linear(k, n, bias=bias)
        made.weight.data = torch.randn(n, k, generator=torch.Generator().manual_seed(seed + 1))
        if own is not None:
            made.bias.data = own
        return made.requires_grad_(False)
    weight = random_weight(n, k, seed=seed, per_row=per_row, pre_scale=seed % 2 == 1).torch("cpu")
    if kind == "nvfp4":
        return nn.Linear(weight, own)
    return nn.Fp8Linear(to_fp8(weight), own)


def inputs(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(9))


def column(mesh: Any, kind: str, n: int, k: int, options: dict[str, Any]) -> Any:
    """The whole layer's result, that of this rank's rows, and N of the rank."""
    whole, cut = layer(kind, n, k), layer(kind, n, k)
    parallelize_module(cut, mesh, ColumnParallel(**options))
    x = inputs(3, k)
    return whole(x).numpy(), cut(x).numpy(), cut.out_features


def row(mesh: Any, kind: str, n: int, k: int, dtype: str, seed: int) -> Any:
    """The whole layer's result, that of the sum over ranks, and what magnitudes their bound scales with."""
    whole, cut = layer(kind, n, k, seed=seed), layer(kind, n, k, seed=seed)
    parallelize_module(cut, mesh, RowParallel())
    x = inputs(3, k).to(getattr(torch, dtype))
    ranks = Ranks.of(mesh)
    each = k // ranks.size
    own = x[:, ranks.rank * each : (ranks.rank + 1) * each]
    return whole(x).float().numpy(), cut(own).float().numpy(), cut.in_features


def group(mesh: Any, sizes: list[int], k: int, biases: list[bool]) -> Any:
    """The columns of each part of a whole group, and of one whose parts are cut one after the other, and theirs."""
    weights = [random_weight(n, k, seed=i).torch("cpu") for i, n in enumerate(sizes)]

    def made() -> Any:
        own = [torch.arange(n) + 0.5 if given else None for n, given in zip(sizes, biases, strict=True)]
        return nn.Group.of(weights, "rows", own if any(biases) else None).parts()

    whole, cut = made(), made()
    for part in cut:
        parallelize_module(part, mesh, ColumnParallel())
    x = inputs(2, k)
    return [part(x).numpy() for part in whole], [part(x).numpy() for part in cut], [p.out_features for p in cut]


def experts_of(count: int, hidden: int, inner: int, *, bias: bool, **options: Any) -> Any:
    def weight(n: int, k: int, seed: int) -> Any:
        return random_weight(n, k, seed=seed).torch("cpu")

    layers = [
        (weight(inner, hidden, 3 * e), weight(inner, hidden, 3 * e + 1), weight(hidden, inner, 3 * e + 2))
        for e in range(count)
    ]
    if options.get("gated") is False:
        layers = [own[1:] for own in layers]
    rows = (1 if options.get("gated") is False else 2) * inner
    given = torch.Generator().manual_seed(5)
    more: dict[str, Any] = {}
    if bias:
        more["gate_up_bias"] = torch.randn(count, rows, generator=given)
        more["down_bias"] = torch.randn(count, hidden, generator=given)
    return nn.Experts.of(layers, **options, **more)


def routed(tokens: int, k: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    given = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=given).argsort(1)[:, :k]
    return ids, torch.rand(tokens, k, generator=given)


def mixture(mesh: Any, style: str, tokens: int, options: dict[str, Any], ids: Any = None, balance: bool = False) -> Any:
    """The whole experts' result for tokens, that of the split ones, and how evenly those were asked."""
    whole = experts_of(8, 64, 64, bias=True, **options)
    cut = experts_of(8, 64, 64, bias=True, **options)
    ranks = Ranks.of(mesh)
    styles = {
        "experts": ExpertParallel(count=balance),
        "own": ExpertParallel(tokens="own", count=balance),
        "columns": ExpertTensorParallel(),
    }
    parallelize_module(cut, mesh, styles[style])
    seed = ranks.rank if style == "own" else 0
    own = tokens + 2 * ranks.rank if style == "own" and tokens else tokens
    indices, weights = routed(own, 3, 8, seed)
    if ids is not None:
        indices = torch.tensor(ids)
        weights = torch.ones(indices.shape)
    x = torch.randn(len(indices), 64, generator=torch.Generator().manual_seed(seed))
    made = cut(x, indices, weights).numpy()
    told = load_balance(cut) if balance else None
    return whole(x, indices, weights).numpy(), made, told, str(told)
