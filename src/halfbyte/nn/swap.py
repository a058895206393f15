"""A model filled from a checkpoint: its linear layers with NVFP4 weights become those of halfbyte.nn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from halfbyte.errors import HalfbyteError, UsageError, few
from halfbyte.nn.linear import Linear
from halfbyte.ops import pack
from halfbyte.weight import DenseWeight, Fp8Weight, Weight, to_torch

__all__ = ["SwapReport", "swap_linears"]


class Checkpoint(Protocol):
    """What swap_linears reads: modules by name for Weight and Fp8Weight, tensors by full name for DenseWeight."""

    def items(self) -> Iterable[tuple[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class SwapReport:
    """What swap_linears did with each entry of a checkpoint.

    Args:
        swapped: modules that hold an NVFP4 weight now.
        loaded: dense tensors that were copied into the model.
        dequantized: modules whose FP8 weight was dequantized into the model's dtype.
        unused: tensors that the model has no place for, such as scales of a quantized KV cache.
    """

    swapped: tuple[str, ...]
    loaded: tuple[str, ...]
    dequantized: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{len(self.swapped)} linear layers hold NVFP4 weights now",
            f"{len(self.loaded)} dense tensors loaded",
        ]
        if self.dequantized:
            lines.append(f"{len(self.dequantized)} FP8 weights dequantized: {few(self.dequantized)}")
        if self.unused:
            lines.append(f"{len(self.unused)} tensors unused: {few(self.unused)}")
        return "\n".join(lines)


def swap_linears(model: torch.nn.Module, checkpoint: Checkpoint, *, dtype: Any = None) -> SwapReport:
    """Fill a model from a checkpoint; its layers with NVFP4 weights become ``halfbyte.nn.Linear``.

    The model may be real or on the meta device, where it needs no memory; what is on meta comes to the CPU. No dense
    copy of an NVFP4 weight is ever made. Buffers that no checkpoint holds (the frequencies of rotary embeddings) are
    computed again for a model on meta, by building their module from its ``config`` once more.
    After an error the model is half filled: build it anew.

    Args:
        model: in which each quantized layer is a torch.nn.Linear; changed in place.
        checkpoint: its ``items()`` are read once, in order.
        dtype: of the floating-point parameters, "float32", "bfloat16", "float16" or a torch dtype; by default they
            keep theirs. Buffers always do.

    Returns:
        What became of each entry.

    Raises:
        UsageError: a quantized weight without its torch.nn.Linear in the model, a shape that differs, a parameter or
            buffer that is left without data. Each names the tensor.
        LayoutError: a weight that the layout rows cannot hold.
    """
    cast = None if dtype is None else _torch_dtype(dtype)
    filler = _Filler(model, cast)
    swapped: list[str] = []
    loaded: list[str] = []
    dequantized: list[str] = []
    unused: list[str] = []
    for name, value in checkpoint.items():
        if isinstance(value, Weight):
            _swap(model, name, value)
            swapped.append(name)
        elif isinstance(value, Fp8Weight):
            _linear_named(model, name, value.shape)
            filler.fill(f"{name}.weight", value.dequantize())
            dequantized.append(name)
        elif isinstance(value, DenseWeight):
            (loaded if filler.fill(name, value.data) else unused).append(name)
        else:
            raise UsageError("no model can be filled with this kind of weight", tensor=name, got=type(value).__name__)
    filler.finish()
    return SwapReport(
        swapped=tuple(swapped), loaded=tuple(loaded), dequantized=tuple(dequantized), unused=tuple(unused)
    )


def _swap(model: torch.nn.Module, name: str, weight: Weight) -> None:
    old = _linear_named(model, name, weight.shape)
    try:
        packed = pack(weight)
    except HalfbyteError as error:
        error.tensor = error.tensor or name
        raise
    new = Linear(packed.to(_real_device(old.weight)), old.bias)
    new.train(old.training)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def _linear_named(model: torch.nn.Module, name: str, shape: tuple[int, ...]) -> torch.nn.Linear:
    module = _submodule(model, name)
    if module is None or module is model:
        hint = "build the model from the checkpoint's own config"
        if ".experts." in name:
            hint = "experts that transformers fuses into one parameter cannot be swapped yet"
        raise UsageError("the model has no module of this name", tensor=name, hint=hint)
    if not isinstance(module, torch.nn.Linear):
        raise UsageError(
            "a quantized weight needs a linear layer",
            tensor=name,
            got=type(module).__name__,
            expected="torch.nn.Linear",
        )
    needed = (module.out_features, module.in_features)
    if tuple(shape) != needed:
        raise UsageError("the weight does not fit the model", tensor=name, got=tuple(shape), expected=needed)
    return module


class _Filler:
    """Copies dense tensors into a model, and knows which parameters have got theirs."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | None) -> None:
        self.model = model
        self.dtype = dtype
        self.filled: set[str] = set()
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.ties = {name: group for group in names.values() if len(group) > 1 for name in group}

    def fill(self, name: str, data: Any) -> bool:
        """Copy ``data`` into the parameter or buffer ``name``; False if the model has none."""
        owner, attribute, old = self._find(name)
        if old is None:
            if attribute == "bias" and isinstance(owner, (torch.nn.Linear, Linear)):
                raise UsageError("the checkpoint has a bias and the model's layer none", tensor=name)
            return False
        if tuple(data.shape) != tuple(old.shape):
            raise UsageError(
                "the tensor does not fit the model", tensor=name, got=tuple(data.shape), expected=tuple(old.shape)
            )
        parameter = isinstance(old, torch.nn.Parameter)
        dtype = self.dtype if self.dtype is not None and parameter and old.is_floating_point() else old.dtype
        try:
            new = to_torch(data).detach().to(device=_real_device(old), dtype=dtype)
        except TypeError:
            raise UsageError("torch has no such dtype", tensor=name, got=str(data.dtype)) from None
        twin = next((tied for tied in self.ties.get(name, []) if tied in self.filled), None)
        if twin is not None:
            if not torch.equal(old, new):
                raise UsageError(
                    f"the model ties this tensor to {twin}, and the checkpoint holds other values for it", tensor=name
                )
        elif not old.is_meta and old.dtype == dtype:
            with torch.no_grad():
                old.copy_(new)
        else:
            self._replace(name, new.clone(), old)
        self.filled.add(name)
        return True

    def _replace(self, name: str, new: Tensor, old: Tensor) -> None:
        if isinstance(old, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
        for tied in self.ties.get(name, [name]):
            owner, attribute, place = self._find(tied)
            if owner is not None and place is old:
                setattr(owner, attribute, new)

    def _find(self, name: str) -> tuple[torch.nn.Module | None, str, Tensor | None]:
        """The module that owns tensor ``name``, the attribute, and the tensor if a checkpoint may fill it."""
        path, _, attribute = name.rpartition(".")
        owner = _submodule(self.model, path)
        if owner is None:
            return None, attribute, None
        tensor: Tensor | None = owner._parameters.get(attribute)
        if tensor is None and not isinstance(owner, Linear) and attribute not in owner._non_persistent_buffers_set:
            tensor = owner._buffers.get(attribute)
        return owner, attribute, tensor

    def finish(self) -> None:
        """Tie what is tied, compute what no checkpoint holds; UsageError where something is left without data."""
        missing = self._missing()
        tie_weights: Any = getattr(self.model, "tie_weights", None)  # of transformers
        if missing and tie_weights is not None:
            tie_weights()
            missing = self._missing()
        if missing:
            raise UsageError(
                f"the checkpoint has no data for {len(missing)} tensors of the model",
                got=few(missing),
                hint="build the model from the checkpoint's own config",
            )
        for name, module in list(self.model.named_modules()):
            if any(tensor.is_meta for tensor in _own_tensors(module)):
                path, _, child = name.rpartition(".")
                setattr(self.model.get_submodule(path), child, _built_again(module, name))

    def _missing(self) -> list[str]:
        parameters = list(self.model.named_parameters(remove_duplicate=False))
        have = {id(parameter) for name, parameter in parameters if name in self.filled}
        missing = [name for name, parameter in parameters if id(parameter) not in have]
        stored = self.model.state_dict(keep_vars=True)
        return missing + [name for name, tensor in stored.items() if tensor.is_meta and name not in missing]


def _built_again(module: torch.nn.Module, name: str) -> torch.nn.Module:
    """A module on meta without parameters, made once more from its config on the CPU."""
    before = dict(module.named_buffers())
    if not list(module.parameters()) and not list(module.children()) and hasattr(module, "config"):
        with torch.device("cpu"):
            again = type(module)(module.config)
        after = dict(again.named_buffers())
        if {n: b.shape for n, b in after.items()} == {n: b.shape for n, b in before.items()}:
            return again.train(module.training)
    raise UsageError(
        "this module's buffers are on the meta device, no checkpoint holds them, and it cannot be built from a config",
        tensor=name,
        got=few(sorted(before)),
        hint="build the model on the CPU instead of the meta device",
    )


def _own_tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    """The module's own parameters, buffers and plain tensor attributes."""
    for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
        if isinstance(value, Tensor):
            yield value


def _submodule(model: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _real_device(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _torch_dtype(dtype: Any) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError("unknown dtype", got=repr(dtype), expected='"float32", "bfloat16" or "float16"')
    return found
