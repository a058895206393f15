"""Quantized layers put into a transformers model: placeholders first, then the layers, one at a time."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte import nn
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.hf.fusing import experts_of, first_stack, packed_for
from halfbyte.hf.names import Names
from halfbyte.hf.pending import Pending
from halfbyte.hf.plan import Layer, Stack, plan
from halfbyte.hf.reading import read_dense, read_fp8, read_input_scale, read_stack, read_weight
from halfbyte.hf.report import Entry, LoadReport
from halfbyte.hf.saving import attach
from halfbyte.hf.splitting import Part, Split
from halfbyte.layouts import Packed
from halfbyte.modules import Module, kv_format
from halfbyte.parallel import Ranks
from halfbyte.weight import Weight


@dataclass(frozen=True)
class Options:
    """How a checkpoint is loaded; see ``halfbyte.hf.from_pretrained``.

    Attributes:
        device: where all of the model goes; None where transformers says what goes where.
        ranks: over which the model is split, or None.
        dealt: whether experts are dealt to the ranks whole; else each rank has columns of all.
    """

    fuse: bool = True
    precision: str | None = None
    layout: str | None = None
    device: Any = None
    ranks: Ranks | None = None
    dealt: bool = False


class Filling:
    """A model of which transformers loads what is dense.

    Making one proves the checkpoint against the model and puts placeholders in; ``finish`` puts the layers in.

    Args:
        model: of transformers, on meta.
        checkpoint: its files.
        dtype: of activations.
        options: how.

    Raises:
        FormatError: a checkpoint that is not sound by its headers.
        UsageError: a tensor that the model has no place for, or a part of it without data.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, dtype: Any, options: Options) -> None:
        self.started = time.perf_counter()
        checkpoint.require_readable()
        self.model, self.checkpoint, self.options = model, checkpoint, options
        self.dtype = dtype or torch.get_default_dtype()
        self.names = Names(model)
        self.plan = plan(model, checkpoint, self.names, options.fuse)
        if options.dealt and not self.plan.stacks:
            raise UsageError("there are no NVFP4 experts to deal to the ranks", hint="leave expert_parallel out")
        self.head = _path_of(model, model.get_output_embeddings())
        self.split = Split(model, options.ranks, options.dealt) if options.ranks is not None else None
        if self.split is not None and not self.plan.stacks and self.split.is_idle:
            name = type(model).__name__
            raise UsageError("transformers' tensor-parallel plan for this class leaves all layers whole", got=name)
        self.dense: dict[str, tuple[Part, Module]] = {}
        self.report = LoadReport(
            str(checkpoint.path), checkpoint.dialect_name, notes=self.plan.notes, kv=kv_format(checkpoint.headers)
        )
        self._place()

    def _place(self) -> None:
        sizes: dict[str, int] = {}
        for layer in (layer for group in self.plan.groups for layer in group):
            sizes |= {layer.path: _size([layer.module]), **dict.fromkeys(layer.tied, 0)}
        for stack in self.plan.stacks:
            sizes[stack.path] = _size([part for parts in (*stack.gate_up, *stack.down) for part in parts])
        if self.split is not None:
            self.dense = self.split.dense(self.checkpoint, self.names, sizes)
            sizes |= {path: _size([module]) for path, (_, module) in self.dense.items()}
        self.old = {path: self.model.get_submodule(path) for path in sizes}
        for path, size in sizes.items():
            _put(self.model, path, Pending(self.old[path], size))
        for key in self.plan.untied:
            self.model.all_tied_weights_keys.pop(key, None)
        self.ignored = self.model._keys_to_ignore_on_load_unexpected
        self.model._keys_to_ignore_on_load_unexpected = {""}  # all that is left has been judged

    def finish(self) -> None:
        """Put the layers where their placeholders lie, and say in ``model.halfbyte`` what became of what."""
        self.model._keys_to_ignore_on_load_unexpected = self.ignored
        self._cast_renamed()
        if self.options.device is not None:
            self.model.to(self.options.device)
        self.model._weight_conversions = [t for t in self.names.transforms if t.was_used()]
        dense = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        for path in self.old:
            dense.pop(id(self.model.get_submodule(path).place))
        sizes: dict[str, int] = defaultdict(int)
        for tensor in dense.values():
            sizes[str(tensor.device)] += tensor.nbytes
        with torch.no_grad():
            for group in self.plan.groups:
                self._layers(group)
            for stack in self.plan.stacks:
                self._experts(stack)
            for path, (part, module) in self.dense.items():
                self._dense(path, part, module)
        if self.split is not None:
            self.split.settle()
        self.report.kept = {t.name: read_dense(self.checkpoint, t) for t in self.plan.kept}
        self.report.entries += [Entry("", "dense", "", "", device, size) for device, size in sizes.items()]
        self.report.seconds = time.perf_counter() - self.started
        self.model.halfbyte = self.report
        attach(self.model)

    def _cast_renamed(self) -> None:
        """Cast what transformers 5.17 leaves in the dtype of the file: in quantized models, all that it renamed."""
        kept = self.model._get_dtype_plan(self.dtype)  # patterns of what stays float32
        for key in self.plan.renamed:
            if key.rpartition(".")[0] in self.dense:
                continue
            tensor = self.model.get_parameter_or_buffer(key)
            own = (dtype for pattern, dtype in kept.items() if re.search(pattern.replace("*", ".*"), key))
            tensor.data = tensor.data.to(next(own, self.names.tensors[key].dtype))

    def _layers(self, group: list[Layer]) -> None:
        """One layer, or those that become one product."""
        first, split = group[0], self.split
        both = [(None, layer.module) if split is None else split.layer(layer) for layer in group]
        part, modules = both[0][0], [module for _, module in both]
        device = self._device(first.path)
        if any(self._device(layer.path) != device for layer in group):
            self.report.notes.append(f"{first.path} and those beside it are on several devices, so not one product")
            for layer in group:
                self._layers([layer])
            return
        stored = [layer.bias and module.roles["bias"] for layer, module in zip(group, modules, strict=True)]
        biases = [bias and read_dense(self.checkpoint, bias, self.dtype, device) for bias in stored]
        own = self._own(first.path)
        if first.module.kind == "fp8":
            fp8 = read_fp8(self.checkpoint, modules[0], device)
            if own["precision"] != "fp8" or fp8.block is not None:
                own["precision"] = None
            self._put(first, self._joined(nn.Fp8Linear(fp8, biases[0], **own), part))
            return
        inputs = [read_input_scale(self.checkpoint, module) for module in modules]
        one = inputs[0] if len(set(inputs)) == 1 else None
        weight = read_weight(self.checkpoint, modules).torch(device).replace(input_scale=one)
        packed = self._packed(first.path, weight)
        if first.embedding:
            self._put(first, nn.Embedding(packed, dtype=self.dtype))
        elif len(group) == 1:
            self._put(first, self._joined(nn.Linear(packed, biases[0], **own), part))
        else:
            sizes = [module.shape[0] for module in modules]
            made = nn.Group(packed, sizes, biases, **own, input_scales=inputs if len(set(inputs)) > 1 else None)
            for layer, place in zip(group, made.parts(), strict=True):
                self._put(layer, place)

    def _joined(self, made: Any, part: Part | None) -> Any:
        """A layer that exchanges with other ranks where its part needs it."""
        if part is not None and self.split is not None:
            part.join(made, self.split.ranks)
        return made

    def _dense(self, path: str, part: Part, module: Module) -> None:
        """A dense layer of which this rank has a part."""
        device, dtype = self._device(path), self.names.tensors[f"{path}.weight"].dtype
        weight = read_dense(self.checkpoint, module.roles["data"], dtype, device)
        made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in module.roles, device="meta")
        made.weight = torch.nn.Parameter(weight, requires_grad=False)
        if "bias" in module.roles:
            made.bias = torch.nn.Parameter(read_dense(self.checkpoint, module.roles["bias"], dtype, device), False)
        self._joined(made, part)
        size = sum(t.nbytes for t in made.parameters())
        self.report.entries.append(Entry(path, "dense", type(made).__name__, "", str(device), size))
        self._replace(path, made)

    def _experts(self, stack: Stack) -> None:
        device, stacks, count = self._device(stack.path), [], len(stack.down)
        first = first_stack(self.old[stack.path])
        if self.split is not None:
            stack = self.split.stack(stack)
        for name, layers in ((first, stack.gate_up), ("down_proj", stack.down)):
            inputs = [{read_input_scale(self.checkpoint, part) for part in parts} for parts in layers]
            one: Any = None
            if all(len(scales) == 1 and None not in scales for scales in inputs):
                one = torch.tensor([scales.pop() for scales in inputs], device=device)
            elif any(scales != {None} for scales in inputs):
                note = "input scales that some layers of an expert lack, or that differ, are not held"
                self.report.notes.append(f"{stack.path}.{name}: {note}")
            weight = read_stack(self.checkpoint, layers).torch(device).replace(input_scale=one)
            stacks.append(self._packed(f"{stack.path}.{name}", weight))
        biases = [self._bias(layers, device) for layers in (stack.gate_up, stack.down)]
        made = experts_of(self.old[stack.path], stacks[0], stacks[1], biases, precision=self._precision(stack.path))
        if self.split is not None:
            self.split.experts(made, count)
        self._put(stack, made)

    def _precision(self, path: str) -> str:
        """That of experts: the one asked for, but for INT8, which they do not have."""
        asked = self.options.precision
        if asked == "int8":
            self.report.notes.append(f"{path}: experts are not computed in INT8, but exactly")
        return "exact" if asked in (None, "int8") else asked

    def _bias(self, experts: list[tuple[Module, ...]], device: torch.device) -> Any:
        """(E, N) of the layers of each expert, None where they have none."""
        if not experts or "bias" not in experts[0][0].roles:
            return None
        rows = (
            [read_dense(self.checkpoint, part.roles["bias"], self.dtype, device) for part in parts] for parts in experts
        )
        return torch.stack([torch.cat(row) for row in rows])

    def _packed(self, path: str, weight: Weight) -> Packed:
        try:
            packed, note = packed_for(weight, self.options.layout, self.dtype)
        except HalfbyteError as error:
            error.tensor = error.tensor or path
            raise
        if note:
            self.report.notes.append(f"{path}: {note}")
        return packed

    def _put(self, what: Layer | Stack, made: Any) -> None:
        """Put a module, and those that share its weight, where placeholders are."""
        module = what.module if isinstance(what, Layer) else None
        layout = "" if isinstance(made, nn.Fp8Linear) else made.layout.key
        size = sum(t.nbytes for t in (*made.parameters(), *made.buffers()))
        kind, device = module.kind if module else "nvfp4", str(self._device(what.path))
        self.report.entries.append(Entry(what.path, kind, type(made).__name__, layout, device, size))
        self._replace(what.path, made)
        for path in what.tied if isinstance(what, Layer) else ():
            self._replace(path, self._shared(path, made))

    def _own(self, path: str) -> dict[str, Any]:
        """What a layer is asked for beyond its weight: the head's logits are float32."""
        return {"out_dtype": torch.float32 if path == self.head else None, "precision": self.options.precision}

    def _shared(self, path: str, holder: Any) -> torch.nn.Module:
        """A module with the weight of another."""
        device = self._device(path)
        packed = holder.packed
        if packed.buffers()["scale2"].device != device:
            self.report.notes.append(f"{path}: on another device than the weight it shares, so there is a copy")
            packed = packed.to(device)
            holder = None
        if type(self.old[path]) is torch.nn.Embedding:
            return nn.Embedding(packed, dtype=self.dtype)
        own = self._own(path)
        return nn.Linear(packed, **own) if holder is None else nn.TiedLinear(holder, **own)

    def _device(self, path: str) -> torch.device:
        """Where transformers put a placeholder."""
        place: torch.Tensor = self.model.get_submodule(path).place
        if place.is_meta:
            hint = "give it a device in device_map, or more memory"
            raise UsageError("NVFP4 layers are not offloaded", tensor=path, hint=hint)
        return place.device

    def _replace(self, path: str, made: torch.nn.Module) -> None:
        made.train(self.model.training)
        hook = getattr(self.model.get_submodule(path), "_hf_hook", None)
        if hook is not None:  # accelerate's, which moves activations between devices
            from accelerate.hooks import add_hook_to_module  # type: ignore[import-untyped]

            add_hook_to_module(made, hook)
        _put(self.model, path, made)


def _size(modules: Iterable[Module]) -> int:
    """Bytes of the tensors of some modules."""
    return sum(tensor.nbytes for module in modules for tensor in module.roles.values())


def _path_of(model: Any, wanted: Any) -> str | None:
    """The name of a module in a model."""
    return next((name for name, module in model.named_modules() if module is wanted), None) if wanted else None


def _put(model: Any, path: str, module: torch.nn.Module) -> None:
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
