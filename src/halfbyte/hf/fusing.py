"""The layers that run as one product, the experts that run as one module, and the layout that either is packed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from halfbyte import gpu
from halfbyte.kernels.experts import SWIGLU, Mixture
from halfbyte.kernels.experts_torch import activated
from halfbyte.kernels.step import ACTIVATIONS as STEP_ACTIVATIONS
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


LIMITS: Final = ("limit", "swiglu_limit")
"""What classes of transformers call the limit of gate and up."""


def first_stack(old: Any) -> str:
    """The parameter that is multiplied first in a module of transformers that holds experts."""
    return "gate_up_proj" if getattr(old, "has_gate", True) else "up_proj"


def experts_refusal(old: Any) -> str | None:
    """Why a module of transformers that holds experts cannot be replaced by ``halfbyte.nn.Experts``; None if it can."""
    how = _how(old)
    return how if isinstance(how, str) else None


def stacks_refusal(old: Any) -> str | None:
    """Why the dense stacks of such a module are not quantized where they are; None if they can be."""
    for name, needed in {"has_bias": False, "is_transposed": False, "is_concatenated": True}.items():
        if getattr(old, name, needed) is not needed:
            return f"{type(old).__name__} has {name}={getattr(old, name)}"
    return None


def experts_of(
    old: Any, gate_up: Packed, down: Packed, biases: Any = (None, None), *, precision: str = "exact"
) -> Experts:
    """What takes the place of a module that ``experts_refusal`` lets pass, gate before up.

    An index of ``num_experts`` or more names no expert there, and is skipped.
    """
    how = _how(old)
    assert isinstance(how, dict)
    own: dict[str, Any] = {"gate_up_bias": biases[0], "down_bias": biases[1], "precision": precision}
    return Experts(gate_up, down, padding=True, **own, **how)


def _how(old: Any) -> dict[str, Any] | str:
    """How experts of transformers compute, as options of Experts; or why that is not known."""
    kind, needed = type(old).__name__, (first_stack(old), "down_proj", "num_experts")
    if not all(hasattr(old, name) for name in needed):
        return f"{kind} has no {', '.join(needed[:-1])} and {needed[-1]}"
    if getattr(old, "has_post_expert_norm", False):
        return f"{kind} normalizes the results of its experts"
    gated = first_stack(old) == "gate_up_proj"
    gate = getattr(type(old), "_apply_gate", None)
    if gated and gate is not None and gate.__name__ != "_default_apply_gate":
        return _recognised(old) or f"{kind} has a gate of its own that is not known"
    if not getattr(old, "is_concatenated", True):
        return f"{kind} has gate and up in turns, and no gate of its own"
    activation = type(getattr(old, "act_fn", None)).__name__
    if activation not in ACTIVATIONS:
        return f"the activation {activation} is not known"
    return {"activation": ACTIVATIONS[activation], "gated": gated}


def _recognised(old: Any) -> dict[str, Any] | None:
    """The activation and limit that do what a gate of transformers' own does to some numbers; None if there is none."""
    stated = (getattr(where, name, None) for where in (old, getattr(old, "config", None)) for name in LIMITS)
    limits = sorted({float(found) for found in stated if found is not None})
    tried = torch.linspace(-2, 2, 97) * max(12.0, *limits)
    both = torch.stack((tried.repeat_interleave(97), tried.repeat(97)), -1)
    meant = old._apply_gate(both).reshape(-1)
    for limit in (None, *limits):
        for activation in (*STEP_ACTIVATIONS, SWIGLU):
            mixture = Mixture(
                activation=activation, limit=limit, gate_up_order="concatenated", experts=0, local=(), padding=True
            )
            if torch.allclose(activated(both, mixture).reshape(-1), meant, rtol=1e-5, atol=1e-5):
                return {"activation": activation, "limit": limit}
    return None
