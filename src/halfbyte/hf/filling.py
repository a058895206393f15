"""Quantized layers put into a transformers model: placeholders first, then the layers, one at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

from halfbyte import nn
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import UsageError
from halfbyte.hf.fusing import default_layout, packed_for
from halfbyte.hf.names import Names
from halfbyte.hf.pending import Pending
from halfbyte.hf.plan import Layer, Stack, plan
from halfbyte.hf.reading import read_dense, read_weight
from halfbyte.hf.report import Entry, LoadReport
from halfbyte.modules import kv_format


class Filling:
    """A model of which transformers loads what is dense.

    Making one proves the checkpoint against the model and puts placeholders in; ``finish`` puts the layers in.

    Args:
        model: of transformers, on meta.
        checkpoint: its files.
        dtype: of activations.
        options: fuse, precision and layout.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, dtype: Any, options: Any) -> None:
        self.started = time.perf_counter()
        checkpoint.require_readable()
        self.model, self.checkpoint, self.options = model, checkpoint, options
        self.dtype = dtype or torch.get_default_dtype()
        self.names = Names(model)
        self.plan = plan(model, checkpoint, self.names, False)
        self.head = _path_of(model, model.get_output_embeddings())
        self.report = LoadReport(
            str(checkpoint.path), checkpoint.dialect_name, notes=self.plan.notes, kv=kv_format(checkpoint.headers)
        )
        self._place()

    def _place(self) -> None:
        for group in self.plan.groups:
            for layer in group:
                _put(self.model, layer.path, Pending(sum(t.nbytes for t in layer.module.roles.values())))
                for path in layer.tied:
                    _put(self.model, path, Pending(0))
        for stack in self.plan.stacks:
            parts = [part for layers in (*stack.gate_up, *stack.down) for part in layers]
            _put(self.model, stack.path, Pending(sum(t.nbytes for part in parts for t in part.roles.values())))
        for key in self.plan.untied:
            self.model.all_tied_weights_keys.pop(key, None)
        self.ignored = self.model._keys_to_ignore_on_load_unexpected
        self.model._keys_to_ignore_on_load_unexpected = {""}  # all that is left has been judged

    def finish(self) -> None:
        """Put the layers where their placeholders lie, and say in ``model.halfbyte`` what became of what."""
        self.model._keys_to_ignore_on_load_unexpected = self.ignored
        self.model._weight_conversions = [t for t in self.names.transforms if t.was_used()]
        dense: dict[str, int] = defaultdict(int)
        for tensor in {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}.values():
            dense[str(tensor.device)] += tensor.nbytes
        with torch.no_grad():
            for group in self.plan.groups:
                self._layers(group)
            for stack in self.plan.stacks:
                self._experts(stack)
        self.report.kept = {t.name: read_dense(self.checkpoint, t) for t in self.plan.kept}
        self.report.entries += [Entry("", "dense", "", "", device, size) for device, size in dense.items()]
        self.report.seconds = time.perf_counter() - self.started
        self.model.halfbyte = self.report

    def _device(self, path: str) -> torch.device:
        pending = self.model.get_submodule(path)
        if pending.place.is_meta:
            raise UsageError(
                "NVFP4 layers are not offloaded", tensor=path, hint="give it a device in device_map, or more memory"
            )
        device: torch.device = pending.place.device
        return device

    def _layers(self, group: list[Layer]) -> None:
        device = self._device(group[0].path)
        (layer,) = group
        weight = read_weight(self.checkpoint, [layer.module]).torch(device)
        packed, note = packed_for(weight, self.options.layout, self.dtype)
        if note:
            self.report.notes.append(f"{layer.path}: {note}")
        bias = None if layer.bias is None else read_dense(self.checkpoint, layer.bias, self.dtype, device)
        made = nn.Linear(packed, bias)
        self._replace(layer.path, made)

    def _replace(self, path: str, made: torch.nn.Module) -> None:
        made.train(self.model.training)
        old = self.model.get_submodule(path)
        hook = getattr(old, "_hf_hook", None)
        if hook is not None:
            from accelerate.hooks import add_hook_to_module

            add_hook_to_module(made, hook)
        _put(self.model, path, made)

    def _experts(self, stack: Stack) -> None:
        raise NotImplementedError


def _path_of(model: Any, wanted: Any) -> str | None:
    """The name of a module in a model."""
    return next((name for name, module in model.named_modules() if module is wanted), None) if wanted else None


def _put(model: Any, path: str, module: torch.nn.Module) -> None:
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
