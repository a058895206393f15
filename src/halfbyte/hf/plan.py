"""What of a checkpoint goes where in a transformers model, proven from headers before anything is read or made."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import UsageError, few
from halfbyte.experts import SPELLED, expand, numbered
from halfbyte.hf.fusing import experts_refusal, first_stack, siblings
from halfbyte.hf.names import Names
from halfbyte.modules import Module, refuse_broken
from halfbyte.stored import Stored

KV_SCALES: Final = ("k_scale", "v_scale", "q_scale")
_PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")


@dataclass
class Layer:
    """A quantized layer of the checkpoint and the module that it takes the place of.

    Attributes:
        path: of the module in the model.
        module: of the checkpoint.
        embedding: whether it looks rows up.
        bias: on disk.
        tied: paths of further modules that have the same weight.
    """

    path: str
    module: Module
    embedding: bool = False
    bias: Stored | None = None
    tied: list[str] = field(default_factory=list)


@dataclass
class Stack:
    """The experts of one module.

    Attributes:
        path: of the module in the model.
        gate_up: for each expert its layers gate and up, or up alone where there is no gate.
        down: for each expert its layer down.
    """

    path: str
    gate_up: list[tuple[Module, ...]]
    down: list[tuple[Module, ...]]


@dataclass
class Plan:
    """What of a checkpoint becomes what.

    Attributes:
        groups: of layers that run as one product; most are of one layer.
        stacks: of experts.
        kept: tensors that are carried, and not computed with.
        renamed: state dict keys of dense tensors that have another name on disk.
        notes: what was not done as asked, and why.
        untied: state dict keys that the model ties, whose modules have quantized weights now.
    """

    groups: list[list[Layer]] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    kept: list[Stored] = field(default_factory=list)
    renamed: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    untied: set[str] = field(default_factory=set)


def plan(model: Any, checkpoint: Checkpoint, names: Names, fuse: bool) -> Plan:
    """Prove that a checkpoint fills a model.

    Args:
        model: of transformers, its layers as it defines them.
        checkpoint: a dialect that is read.
        names: of the model.
        fuse: whether layers of one input become one.

    Raises:
        FormatError: a quantized module that is not sound by its headers.
        UsageError: a tensor that no module takes, or a module that gets none. Each names the tensor.
    """
    return _Planner(model, checkpoint, names).run(fuse)


class _Planner:
    def __init__(self, model: Any, checkpoint: Checkpoint, names: Names) -> None:
        self.model, self.checkpoint, self.names = model, checkpoint, names
        self.made = Plan()
        self.layers: dict[str, Layer] = {}
        self.experts: dict[str, dict[tuple[int, str], Module]] = defaultdict(dict)
        self.filled: set[str] = set()
        self.left: list[Stored] = []

    def run(self, fuse: bool) -> Plan:
        for module in self.checkpoint.modules:
            if module.kind in ("nvfp4", "fp8"):
                self._quantized(module)
            elif module.kind in ("mxfp4", "unread"):
                hint = "halfbyte quantize makes NVFP4 of MXFP4 layers" if module.kind == "mxfp4" else None
                raise UsageError(
                    "a layer of this format does not run",
                    tensor=_main(module),
                    got=module.kind if module.kind == "mxfp4" else str(module.main),
                    expected="NVFP4, FP8 or dense",
                    hint=hint,
                )
            else:
                for tensor in module.tensors:
                    self._dense(tensor)
        for path, parts in self.experts.items():
            self._stack(path, parts)
        self._tie()
        self._refuse_left()
        self._refuse_missing()
        self._group(fuse)
        return self.made

    def _quantized(self, module: Module) -> None:
        refuse_broken(module)
        stack = module.stack is not None
        name = module.name if stack else module.member("weight")
        place = self.names.of(name)
        main = _main(module)
        self.made.kept += [tensor for role, tensor in module.roles.items() if role in KV_SCALES]
        self.left += module.unknown
        if not place.keys and (parent := self._of_an_expert(name)) is not None:
            self._expert(module, (f"{parent}.down_proj",), main)
            return
        if not place.keys:
            if self._outside(name):
                self.made.notes.append(f"left out, since the class has no such head: {main}")
                return
            raise UsageError(
                "no module of the model uses this tensor",
                tensor=main,
                got=f"{module.kind} {list(module.shape)}",
                hint="build the model from the checkpoint's own config",
            )
        if stack or place.converted:
            self._expert(module, place.keys, main)
            return
        path = place.keys[0].removesuffix(".weight")
        old = self.model.get_submodule(path)
        embedding = type(old) is torch.nn.Embedding
        if not embedding and type(old) is not torch.nn.Linear:
            raise UsageError(
                "a quantized weight needs a plain linear layer or embedding",
                tensor=main,
                got=type(old).__name__,
                expected="torch.nn.Linear or torch.nn.Embedding",
            )
        self._fits(main, module.shape, old.weight.shape)
        if embedding and module.kind != "nvfp4":
            raise UsageError("an embedding is NVFP4 or dense", tensor=main, got=module.kind)
        bias, needed = module.roles.get("bias"), getattr(old, "bias", None)
        if bias is None and needed is not None:
            raise UsageError("the model's layer has a bias and the checkpoint none", tensor=module.member("bias"))
        if bias is not None:
            if needed is None:
                raise UsageError("the checkpoint has a bias and the model's layer none", tensor=bias.name)
            self._fits(bias.name, bias.shape, needed.shape)
            self.filled.add(f"{path}.bias")
        if path in self.layers:
            raise UsageError("two weights are for one module", tensor=main, got=self.layers[path].module.name)
        self.layers[path] = Layer(path, module, embedding, bias)
        self.filled.add(f"{path}.weight")

    def _fits(self, name: str, got: Iterable[int], needed: Iterable[int]) -> None:
        if tuple(got) != tuple(needed):
            raise UsageError("the tensor does not fit the model", tensor=name, got=tuple(got), expected=tuple(needed))

    def _of_an_expert(self, name: str) -> str | None:
        """The model's module that holds the expert of a layer, where transformers has no such name for the latter."""
        single = numbered(name.removesuffix(".weight"))
        try:
            found = None if single is None else self.model.get_submodule(single[0])
        except AttributeError:
            return None
        return single[0] if single is not None and hasattr(found, "num_experts") else None

    def _expert(self, module: Module, keys: tuple[str, ...], main: str) -> None:
        path = keys[0].rpartition(".")[0]
        if module.kind != "nvfp4":
            raise UsageError("experts are NVFP4 or dense", tensor=main, got=module.kind)
        reason = experts_refusal(self.model.get_submodule(path))
        if reason is not None:
            raise UsageError(f"these experts cannot be replaced: {reason}", tensor=main)
        biased = getattr(self.model.get_submodule(path), "has_bias", False)
        if (bias := module.roles.get("bias")) is not None and not biased:
            raise UsageError("the checkpoint has a bias and the model's experts none", tensor=bias.name)
        if bias is None and biased:
            raise UsageError("the model's experts have a bias and the checkpoint none", tensor=module.member("bias"))
        for part in expand(module):
            found = numbered(part.name)
            role = SPELLED.get(found[2], found[2]) if found else None
            if found is None or role not in _PROJECTIONS:
                raise UsageError("not the layer of an expert", tensor=main, got=part.name, expected=_PROJECTIONS)
            self.experts[path][found[1], role] = part

    def _stack(self, path: str, parts: dict[tuple[int, str], Module]) -> None:
        old = self.model.get_submodule(path)
        first = first_stack(old)
        turned = -1 if getattr(old, "is_transposed", False) else 1
        n, k = getattr(old, first).shape[-2:][::turned]
        halves = ("gate_proj", "up_proj") if first == "gate_up_proj" else ("up_proj",)
        shapes = dict.fromkeys(halves, (n // len(halves), k)) | {"down_proj": tuple(old.down_proj.shape[-2:][::turned])}
        made = Stack(path, [], [])
        for expert in range(old.num_experts):
            found = {role: parts.pop((expert, role), None) for role in shapes}
            for role, part in found.items():
                if part is None:
                    raise UsageError("an expert has no data", tensor=f"{path}.{expert}.{role}")
                self._fits(_main(part), part.shape, shapes[role])
            *both, down = (part for part in found.values() if part is not None)
            made.gate_up.append(tuple(both))
            made.down.append((down,))
        if parts:
            extra = _main(next(iter(parts.values())))
            raise UsageError("the model has no such expert", tensor=extra, expected=f"{old.num_experts} experts")
        self.made.stacks.append(made)
        biases = ("", "_bias") if getattr(old, "has_bias", False) else ("",)
        self.filled |= {f"{path}.{stack}{end}" for stack in (first, "down_proj") for end in biases}

    def _dense(self, tensor: Stored) -> None:
        place = self.names.of(tensor.name)
        for key in place.keys:
            if not place.converted:
                self._fits(tensor.name, tensor.shape, self.names.tensors[key].shape)
            self.filled.add(key)
            if key != tensor.name:
                self.made.renamed.add(key)
        if place.keys:
            return
        if tensor.name.rpartition(".")[2] in KV_SCALES:
            self.made.kept.append(tensor)
        else:
            self.left.append(tensor)

    def _outside(self, name: str) -> bool:
        """Whether a tensor belongs to a head, and the model is the base that was saved with it."""
        prefix = self.model.base_model_prefix
        own = getattr(self.model, prefix, None) if prefix else self.model
        if not prefix or (own is not None and own is not self.model) or name.startswith(f"{prefix}."):
            return False
        return any(other.startswith(f"{prefix}.") for other in self.checkpoint.tensors)

    def _tie(self) -> None:
        """What one tensor on disk fills by the model's ties."""
        for pair in self.model.all_tied_weights_keys.items():
            there = [key in self.filled for key in pair]
            ours = [key for key in pair if key.removesuffix(".weight") in self.layers]
            if ours:
                self.made.untied.add(pair[0])
            if not any(there) or all(there):
                continue
            other = pair[there.index(False)]
            self.filled.add(other)
            if ours:
                self._share(self.layers[ours[0].removesuffix(".weight")], other.removesuffix(".weight"))

    def _share(self, layer: Layer, path: str) -> None:
        old, main = self.model.get_submodule(path), _main(layer.module)
        plain = type(old) is torch.nn.Embedding or (type(old) is torch.nn.Linear and old.bias is None)
        if layer.module.kind != "nvfp4" or not plain:
            raise UsageError("this weight cannot be shared with the module it is tied to", tensor=main, got=path)
        layer.tied.append(path)

    def _refuse_left(self) -> None:
        """UsageError where a tensor on disk is nobody's."""
        ignored = [*(self.model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        pattern = re.compile("|".join(f"({p})" for p in (*ignored, r"(^|\.)position_ids$")))
        heads = []
        for tensor in self.left:
            if self._outside(tensor.name):
                heads.append(tensor.name)
            elif pattern.search(tensor.name) is None:
                raise UsageError("no module of the model uses this tensor", tensor=tensor.name, got=str(tensor))
        if heads:
            self.made.notes.append(f"left out, since the class has no such head: {few(heads)}")

    def _refuse_missing(self) -> None:
        """UsageError where a part of the model gets no data."""
        patterns = self.model._keys_to_ignore_on_load_missing or ()
        ignored = re.compile("|".join(f"({p})" for p in patterns)) if patterns else None
        missing = [k for k in self.names.tensors if k not in self.filled and not (ignored and ignored.search(k))]
        if missing:
            raise UsageError(
                f"the checkpoint has no data for {len(missing)} tensors of the model",
                tensor=missing[0],
                got=few(missing),
                hint="build the model from the checkpoint's own config",
            )

    def _group(self, fuse: bool) -> None:
        paths = [key.removesuffix(".weight") for key in self.names.tensors]
        joined: dict[str, list[Layer]] = {}
        apart: dict[str, list[str]] = defaultdict(list)
        for group in siblings(paths) if fuse else ():
            found = [self.layers[path] for path in group if path in self.layers]
            if not found:
                continue
            reason = self._refusal(group)
            if reason is None:
                joined |= dict.fromkeys(group, found)
            else:
                apart[reason].append(group[0].rpartition(".")[0])
        for reason, parents in apart.items():
            self.made.notes.append(f"{reason}, so these are products of their own: {few(parents)}")
        done: set[str] = set()
        for path in paths:
            layer = self.layers.get(path)
            if layer is not None and path not in done:
                group_of = joined.get(path, [layer])
                done |= {one.path for one in group_of}
                self.made.groups.append(group_of)

    def _refusal(self, group: tuple[str, ...]) -> str | None:
        """Why layers of one input do not become one product."""
        names = [path.rpartition(".")[2] for path in group]
        found = [self.layers.get(path) for path in group]
        kinds = ["dense" if layer is None else layer.module.kind for layer in found]
        if len(set(kinds)) > 1:
            return ", ".join(f"{name} is {kind}" for name, kind in zip(names, kinds, strict=True))
        layers = [layer for layer in found if layer is not None]
        if kinds[0] != "nvfp4":
            return f"{', '.join(names)} are {kinds[0]}"
        if len({layer.module.shape[-1] for layer in layers}) > 1:
            return f"{', '.join(names)} have different K"
        if any(layer.tied or layer.embedding for layer in layers):
            return f"some of {', '.join(names)} are tied"
        scales = [layer.module.roles.get("pre_scale") for layer in layers]
        read = [None if s is None else self.checkpoint.read(s).tobytes() for s in scales]
        return f"{', '.join(names)} have different pre_scales" if len(set(read)) > 1 else None


def _main(module: Module) -> str:
    """The name of the tensor that holds a module's weight."""
    return module.main.name if module.main else module.name
