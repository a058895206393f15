"""What the ranks of ``ranks.Pool`` run: each case gives arrays that the tests compare."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from helpers_run import random_weight
from torch.distributed.tensor.parallel import parallelize_module

from halfbyte import nn
from halfbyte.parallel import ColumnParallel, Ranks, RowParallel
from halfbyte.lossy import to_fp8


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
