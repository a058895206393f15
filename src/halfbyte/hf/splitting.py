"""Which part of each layer is a rank's, by the tensor-parallel plan that transformers has for a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.cuts import part_of_module
from halfbyte.errors import UsageError
from halfbyte.hf.names import Names
from halfbyte.hf.plan import Layer, Stack
from halfbyte.modules import Module
from halfbyte.nn import Experts
from halfbyte.numerics import BLOCK
from halfbyte.parallel.experts import join_experts
from halfbyte.parallel.layers import gathered, summed
from halfbyte.parallel.ranks import Ranks, even_share
from halfbyte.parallel.styles import ColumnParallel

_WHOLE: Final = {
    *("replicated_with_grad_allreduce", "embedding_rowwise", "mla_kv_a_proj", "rowwise_split_input"),
    *("packed_colwise", "packed_rowwise", "grouped_gemm"),
}
"""Styles of what stays whole on every rank, or lies in experts, which are split here whatever the plan says."""
_GATHERED: Final = ("colwise_gather_output", "colwise_rep")
_QUERIES: Final = ("q_proj", "q_b_proj", "kv_b_proj")
_KEYS: Final = ("k_proj", "v_proj")


@dataclass(frozen=True)
class Part:
    """A rank's part of a layer.

    Attributes:
        how: "column" (rows of N), "gathered" (the same, and all results side by side), or "row" (columns of K).
        start: of the rows or columns.
        stop: where they end.
        size: of all.
    """

    how: str
    start: int
    stop: int
    size: int

    def of(self, module: Module) -> Module:
        """The part of a checkpoint's module."""
        return part_of_module(module, "row" if self.how == "row" else "column", [(self.start, self.stop)])

    def join(self, made: Any, ranks: Ranks) -> None:
        """Make a layer with this part exchange with the other ranks, where it must."""
        if self.how == "row":
            summed(made, ranks)
        elif self.how == "gathered":
            gathered(made, ranks, self.size)


class Split:
    """How a model is split over ranks.

    Args:
        model: of transformers, its layers as it defines them.
        ranks: over which.
        dealt: whether experts are dealt to the ranks whole; else each rank has columns of all.

    Attributes:
        parts: path of each layer that is cut -> this rank's part.

    Raises:
        UsageError: a model without a plan, a style that is not known, or a layer that does not split. Each names it.
    """

    def __init__(self, model: Any, ranks: Ranks, dealt: bool) -> None:
        self.ranks, self.dealt, self._model = ranks, dealt, model
        self.parts: dict[str, Part] = {}
        plan = dict(getattr(model, "_tp_plan", None) or {})
        if not plan:
            name = type(model).__name__
            raise UsageError("transformers has no tensor-parallel plan for this class, so it is not split", got=name)
        tied = {key.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for key in pair}
        for path, module in model.named_modules():
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
            if style is None or style in _WHOLE or not isinstance(module, torch.nn.Linear) or path in tied:
                continue
            try:
                part = self._part(path, module, style)
            except UsageError as error:
                error.tensor = error.tensor or path
                raise
            if part is not None:
                self.parts[path] = part

    @property
    def is_idle(self) -> bool:
        """Whether each rank holds all layers, but for a head."""
        return all(part.how == "gathered" for part in self.parts.values())

    def _part(self, path: str, module: torch.nn.Linear, style: str) -> Part | None:
        n, k, ranks = module.out_features, module.in_features, self.ranks
        if style == "rowwise":
            return Part("row", *even_share(k, ranks.rank, ranks.size, BLOCK, "K"), k)
        if style in _GATHERED:
            if module is not self._model.get_output_embeddings():
                return None
            return Part("gathered", *ColumnParallel(gather=True).rows(n, ranks), n)
        if style != "colwise":
            raise UsageError("this style of a layer is not known here", got=style)
        return Part("column", *ColumnParallel(heads=self._heads(path, n)).rows(n, ranks), n)

    def _heads(self, path: str, n: int) -> int | None:
        """How many heads the rows of a layer are, None where they are none; more ranks than query heads are refused."""
        parent, _, last = path.rpartition(".")
        if last not in (*_QUERIES, *_KEYS):
            return None
        attention: Any = self._model.get_submodule(parent)
        dim = getattr(attention, "head_dim", None)
        heads = n // dim if dim and last in ("q_proj", *_KEYS) else int(self._model.config.num_attention_heads)
        if last in _QUERIES:
            even_share(heads, 0, self.ranks.size, 1, "the number of heads")
        return heads

    def settle(self) -> None:
        """Tell each attention how many of its queries a head of keys goes with on this rank."""
        for path, part in self.parts.items():
            parent, _, last = path.rpartition(".")
            keys = self.parts.get(f"{parent}.k_proj")
            attention: Any = self._model.get_submodule(parent)
            if last == "q_proj" and keys is not None and hasattr(attention, "num_key_value_groups"):
                attention.num_key_value_groups = (part.stop - part.start) // (keys.stop - keys.start)

    def layer(self, layer: Layer) -> tuple[Part | None, Module]:
        """A rank's part of a quantized layer, and its module; the module itself where it is whole."""
        part = self.parts.get(layer.path)
        return part, layer.module if part is None else part.of(layer.module)

    def dense(
        self, checkpoint: Checkpoint, names: Names, quantized: Mapping[str, Any]
    ) -> dict[str, tuple[Part, Module]]:
        """Path -> part and module of the dense layers that are cut, whose tensors transformers must not load.

        Raises:
            UsageError: a layer whose tensors have no names of their own on disk.
        """
        wanted = {path: part for path, part in self.parts.items() if path not in quantized}
        found: dict[str, tuple[Part, Module]] = {}
        for module in checkpoint.modules:
            if module.kind == "dense" and len(module.shape) == 2:
                place = names.of(module.member("weight"))
                path = place.keys[0].removesuffix(".weight") if len(place.keys) == 1 else ""
                if path in wanted and not place.converted:
                    found[path] = wanted[path], wanted[path].of(module)
        missing = next((path for path in wanted if path not in found), None)
        if missing is not None:
            raise UsageError("this dense layer has no weight of its own on disk, so it is not split", tensor=missing)
        return found

    def stack(self, stack: Stack) -> Stack:
        """A rank's part of experts."""
        ranks, path = self.ranks, stack.path
        try:
            if self.dealt:
                a, b = even_share(len(stack.down), ranks.rank, ranks.size, 1, "the number of experts")
                return Stack(path, stack.gate_up[a:b], stack.down[a:b])
            if "bias" in stack.down[0][0].roles:
                raise UsageError("experts with biases do not split by columns", hint="deal them to the ranks whole")
            inner = stack.down[0][0].shape[-1]
            a, b = even_share(inner, ranks.rank, ranks.size, BLOCK, "the experts' inner width")
        except UsageError as error:
            error.tensor = path
            raise
        halves = [tuple(part_of_module(one, "column", [(a, b)]) for one in both) for both in stack.gate_up]
        down = [(part_of_module(one, "row", [(a, b)]),) for (one,) in stack.down]
        return Stack(path, [*halves], [*down])

    def experts(self, made: Experts, count: int) -> None:
        """Make experts with a rank's part exchange with the other ranks."""
        join_experts(made, self.ranks, count if self.dealt else None)
