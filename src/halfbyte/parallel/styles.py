"""Styles for ``torch.distributed.tensor.parallel.parallelize_module``: layers that are whole are cut in place.

::

    plan = {"layers.*.mlp.gate_proj": ColumnParallel(), "layers.*.mlp.down_proj": RowParallel(), ...}
    parallelize_module(model, mesh, plan)

Activations are ordinary tensors: those of a column-parallel layer are a rank's own columns, which a row-parallel one
takes. Each rank cuts the weights that it holds; nothing is sent for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from halfbyte import nn
from halfbyte.errors import UsageError
from halfbyte.parallel.experts import keep_columns, keep_experts
from halfbyte.parallel.layers import SINGLE, cut_columns, cut_part, cut_rows, gathered, summed
from halfbyte.parallel.ranks import Ranks, even_share, head_share, share


class ColumnParallel(ParallelStyle):
    """A layer of which each rank has some rows of N, with their scale2 and bias.

    It is for ``nn.Linear``, ``nn.Fp8Linear``, ``torch.nn.Linear``, an ``nn.Part``, and an ``nn.Group``, of which each
    layer is cut by itself.

    Args:
        gather: whether the result has the columns of all ranks, as that of an output head; then any N is taken. Else
            it has the rank's own, and N must split into equal parts.
        heads: N is that of so many heads, none of which is cut. Fewer heads than ranks are copied where their number
            divides that of the ranks, as heads of keys and values need it.

    Raises:
        UsageError: when it is applied, an N or a module that does not split.
    """

    def __init__(self, *, gather: bool = False, heads: int | None = None) -> None:
        super().__init__()
        if gather and heads is not None:
            raise UsageError("the columns of heads are not gathered", hint="pass gather or heads")
        self.gather, self.heads = gather, heads

    def rows(self, n: int, ranks: Ranks) -> tuple[int, int]:
        """Which of N rows a rank has.

        Raises:
            UsageError: an N that does not split.
        """
        if self.heads is not None:
            return head_share(n, self.heads, ranks.rank, ranks.size)
        if not self.gather:
            return even_share(n, ranks.rank, ranks.size, 1, "N")
        if share(n, ranks.size - 1, ranks.size)[0] == n:
            raise UsageError(f"N = {n} gives some of {ranks.size} ranks nothing", hint="leave it whole")
        return share(n, ranks.rank, ranks.size)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        ranks = Ranks.of(device_mesh)
        whole: Any = module
        if type(module) is nn.Part and not self.gather:
            cut_part(module, [self.rows(module.out_features, ranks)])
        elif type(module) is nn.Group and not self.gather and self.heads is None:
            own = [self.rows(size, ranks) for size in module.sizes]
            cut_rows(module, [(start + a, start + b) for start, (a, b) in zip(module.starts, own, strict=True)])
        elif type(module) in SINGLE:
            n = whole.out_features
            cut_rows(whole, [self.rows(n, ranks)])
            if self.gather:
                gathered(whole, ranks, n)
        else:
            raise UsageError("a module of this class is not column-parallel", got=type(module).__name__)
        return module


class RowParallel(ParallelStyle):
    """A layer of which each rank has some columns of K, in whole blocks of 16, with their part of pre_scale.

    Its x is the rank's own columns. The ranks' products are added in float32, then the bias, once; the sum is rounded
    once and is the same on all ranks. It is for ``nn.Linear``, ``nn.Fp8Linear`` and ``torch.nn.Linear``.

    Raises:
        UsageError: when it is applied, a K or a module that does not split.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if type(module) not in SINGLE:
            raise UsageError("a module of this class is not row-parallel", got=type(module).__name__)
        ranks = Ranks.of(device_mesh)
        cut_columns(module, ranks)
        summed(module, ranks)
        return module


class ExpertParallel(ParallelStyle):
    """``nn.Experts`` of which each rank has equally many; what it has not is null there.

    Args:
        tokens: "same" where all ranks have the same tokens, as behind tensor-parallel attention: each computes what
            its experts make of them, and an all-reduce adds the results. "own" where each rank has its own tokens:
            they are sent to the ranks of their experts and back, in two all-to-alls.

    Raises:
        UsageError: when it is applied, another module, or experts that do not split.
    """

    def __init__(self, *, tokens: str = "same") -> None:
        super().__init__()
        if tokens not in ("same", "own"):
            raise UsageError("it is not known which tokens ranks have", got=repr(tokens), expected="'same' or 'own'")
        self.tokens = tokens

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        keep_experts(_checked_experts(module), Ranks.of(device_mesh), self.tokens == "own")
        return module


class ExpertTensorParallel(ParallelStyle):
    """``nn.Experts`` of which each rank has the same columns of every expert's inner width, in whole blocks of 16.

    All ranks are given the same tokens; an all-reduce adds what they make of them.

    Raises:
        UsageError: when it is applied, another module, or a width that does not split.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        keep_columns(_checked_experts(module), Ranks.of(device_mesh))
        return module


def _checked_experts(module: torch.nn.Module) -> torch.nn.Module:
    if type(module) is not nn.Experts:
        raise UsageError("these are no experts that can be split", got=type(module).__name__, expected="nn.Experts")
    return module
