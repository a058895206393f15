"""Which weights of a model in memory become NVFP4, by the rules of ``halfbyte quantize``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from halfbyte.errors import UsageError
from halfbyte.hf.fusing import experts_refusal, stacks_refusal
from halfbyte.nn import Quantized
from halfbyte.patterns import Patterns, reason_to_skip

STACKS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""Parameter of an experts module -> the layers that it holds for each expert."""


def stacks_of(module: Any) -> dict[str, tuple[str, ...]]:
    """Those that a module of experts has; empty for other modules."""
    found = {
        name: parts
        for name, parts in STACKS.items()
        if isinstance(held := module._parameters.get(name), Tensor) and held.ndim == 3
    }
    return found if len(found) == 2 and "down_proj" in found else {}


@dataclass(frozen=True)
class Matrix:
    """One matrix to quantize; it is looked up in the model when it is needed, so that nothing else holds it.

    Attributes:
        name: as patterns know it.
        module: the name of the module that has it.
        parameter: of that module.
        expert, half: which part of a stack.
    """

    name: str
    module: str
    parameter: str = "weight"
    expert: int | None = None
    half: tuple[int, int] = (0, 1)

    def of(self, model: Any) -> Tensor:
        """(N, K), a view."""
        whole: Tensor = getattr(model.get_submodule(self.module), self.parameter)
        if self.expert is None:
            return whole
        (i, of), n = self.half, whole.shape[1]
        return whole[self.expert, i * n // of : (i + 1) * n // of]


class Chosen:
    """Which weights of a model become NVFP4.

    Attributes:
        layers: in the order of the model.
        paths: in the order of the model, module with chosen weights -> all modules that share them, itself first;
            an experts module has none that share.
        skipped: name -> reason of the other matrices.

    Raises:
        UsageError: nothing is chosen; or a choice that cannot be: some experts of a module, a weight without the
            modules that share it, a module with hooks, or the model itself.
    """

    def __init__(self, model: Any, include: Patterns, exclude: Patterns) -> None:
        self._model, self._include, self._exclude = model, include, exclude
        self.layers: list[Matrix] = []
        self.paths: dict[str, list[str]] = {}
        self.skipped: dict[str, str] = {}
        done: set[int] = set()
        shared: dict[int, list[str]] = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(weight := module._parameters.get("weight"), Tensor) and weight.ndim == 2:
                shared[id(weight)].append(name)
        ties = {key.removesuffix(".weight") for key in getattr(model, "all_tied_weights_keys", {})}
        for name, module in model.named_modules():
            weight = module._parameters.get("weight")
            if isinstance(module, Quantized):
                self.skipped[name] = "quantized already"
            elif stacks_of(module):
                self._experts(name, module)
            elif weight is not None and weight.ndim == 2 and id(weight) not in done:
                done.add(id(weight))
                self._matrix(sorted(shared[id(weight)], key=lambda path: path in ties))
        if not self.layers:
            raise UsageError("there is no weight to quantize", got=f"{len(self.skipped)} that are skipped")

    def idle(self) -> list[str]:
        """The patterns that selected nothing, in words."""
        unused = [*self._include.unused(), *self._exclude.unused()]
        return [f"the pattern {pattern!r} selects nothing" for pattern in unused]

    def _matrix(self, paths: list[str]) -> None:
        """Decide on a weight with two axes that the modules ``paths`` share; checkpoints have it under the first."""
        name, *others = paths
        if not name:
            raise UsageError("a layer by itself is not quantized in place", hint="pass the model that holds it")
        modules = [self._model.get_submodule(path) for path in paths]
        reason = reason_to_skip(name, modules[0].weight.shape, self._include, self._exclude)
        plain = torch.nn.Embedding, torch.nn.Linear
        if reason is None and type(modules[0]) not in plain:
            reason = f"{type(modules[0]).__name__} is not a linear layer of torch"
        if reason is None and type(modules[0]) is torch.nn.Embedding and not self._include:
            reason = "embedding"
        if reason is not None:
            self.skipped[name] = reason
            wanted = [path for path in others if self._include.first(path, "Linear")]
            if wanted:
                raise UsageError("the weight is shared with a module that is not included", tensor=wanted[0], got=name)
            return
        for path, module in zip(others, modules[1:], strict=True):
            if module is not modules[0] and (type(module) is not torch.nn.Linear or module.bias is not None):
                kind = f"{type(module).__name__} {path}"
                raise UsageError("the weight is shared with a module that cannot share it", tensor=name, got=kind)
        for path, module in zip(paths, modules, strict=True):
            _refuse_hooks(path, module)
        self.layers.append(Matrix(name, name))
        self.paths[name] = paths

    def _experts(self, name: str, module: Any) -> None:
        """Decide on the experts of one module: all of them or none."""
        refusal = experts_refusal(module) or stacks_refusal(module)
        if refusal is not None:
            self.skipped[name] = refusal
            return
        layers = [
            Matrix(f"{name}.{e}.{part}", name, parameter, e, (i, len(parts)))
            for e in range(module.num_experts)
            for parameter, parts in stacks_of(module).items()
            for i, part in enumerate(parts)
        ]
        reasons = {
            layer.name: reason_to_skip(layer.name, layer.of(self._model).shape, self._include, self._exclude)
            for layer in layers
        }
        chosen = [layer.name for layer in layers if reasons[layer.name] is None]
        if not chosen:
            self.skipped[name] = str(reasons[layers[0].name])
            return
        if left := [layer.name for layer in layers if reasons[layer.name] is not None]:
            hint = "the experts of one module are quantized together: select all of them, or none"
            raise UsageError("some experts would stay dense", tensor=left[0], got=reasons[left[0]], hint=hint)
        _refuse_hooks(name, module)
        self.layers += layers
        self.paths[name] = [name]


def _refuse_hooks(name: str, module: Any) -> None:
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
        hint = "remove it, or quantize the model before it is dispatched over devices"
        raise UsageError("the module has a hook, which its successor would not have", tensor=name, hint=hint)
