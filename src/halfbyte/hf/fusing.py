"""The layers that run as one product, the experts that run as one module, and the layout that either is packed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from halfbyte import gpu
from halfbyte.layouts import Fragments, Layout, Packed, Rows, parse
from halfbyte.nn import Experts
from halfbyte.patterns import SIBLINGS, has_two_inputs
from halfbyte.weight import Weight, dtype_name

ACTIVATIONS: Final = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
"""Class of an activation in transformers or torch -> its name for Experts."""


def siblings(paths: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The groups of layers, by their names in a model, that get the same input and are all there."""
    known = dict.fromkeys(paths)
    for path in known:
        parent, _, last = path.rpartition(".")
        for names in SIBLINGS:
            group = tuple(f"{parent}.{name}" if parent else name for name in names)
            if last == names[0] and known.keys() >= set(group) and not has_two_inputs(parent):
                yield group


def default_layout(device: Any, dtype: Any) -> Layout:
    """The layout that the kernels of a device read fastest, for activations of ``dtype``."""
    name = dtype_name(dtype)
    if torch.device(device).type == "cuda" and gpu.missing() is None and name in ("bfloat16", "float16"):
        return Fragments(dtype=name)
    return Rows()


def packed_for(weight: Weight, layout: Layout | str | None, dtype: Any) -> tuple[Packed, str | None]:
    """A weight packed where it lies, and why it is not in the layout that it should have, if so.

    Args:
        weight: torch tensors.
        layout: which, or None for the default one; that one gives way to rows where it cannot hold the weight.
        dtype: of activations.

    Raises:
        LayoutError: the layout that was asked for cannot hold it.
    """
    if layout is not None:
        return (parse(layout) if isinstance(layout, str) else layout).pack(weight), None
    best = default_layout(weight.codes.device, dtype)
    reason = best.needs(weight.shape) or best.refuse(weight)
    if reason is None:
        return best.place(weight), None
    return Rows().pack(weight), f"rows instead of {best.key}: {reason}"


def experts_refusal(old: Any) -> str | None:
    """Why a module of transformers that holds experts cannot be replaced by ``halfbyte.nn.Experts``; None if it can."""
    if not all(hasattr(old, name) for name in ("gate_up_proj", "down_proj", "act_fn", "num_experts")):
        return f"{type(old).__name__} has no gate_up_proj, down_proj, act_fn and num_experts"
    traits = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    for name, needed in (traits | {"has_post_expert_norm": False}).items():
        if getattr(old, name, needed) is not needed:
            return f"{type(old).__name__} has {name}={getattr(old, name)}"
    gate = getattr(type(old), "_apply_gate", None)
    if gate is not None and gate.__name__ != "_default_apply_gate":
        return f"{type(old).__name__} has a gate of its own"
    if type(old.act_fn).__name__ not in ACTIVATIONS:
        return f"the activation {type(old.act_fn).__name__} is not known"
    return None


def experts_of(old: Any, gate_up: Packed, down: Packed) -> Experts:
    """What takes the place of a module that ``experts_refusal`` lets pass.

    An index of ``num_experts`` or more names no expert there, and is skipped.
    """
    activation = ACTIVATIONS[type(old.act_fn).__name__]
    return Experts(gate_up, down, activation=activation, padding=True)
