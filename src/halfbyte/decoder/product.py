"""One function for the linear layers of a model that have the same input, dense or NVFP4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from halfbyte import nn, ops
from halfbyte.layouts import Packed
from halfbyte.route_op import route
from halfbyte.step_ops import InOrder, dense, linear_in_order, takes_in_order

ROUTERS: Final = ("Qwen3MoeTopKRouter", "MixtralTopKRouter")
"""Classes of transformers that choose by a softmax of all logits; the mlp does nothing beside its experts."""


@dataclass(frozen=True, eq=False)
class Product:
    """What takes (M, K) to (M, N); calling it does so.

    Attributes:
        run: the function.
        packed: the weight, where it is NVFP4 and the result exact and of the dtype of x; else None.
        bias: beside it.
    """

    run: Callable[[Tensor], Tensor]
    packed: Packed | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor | InOrder) -> Tensor:
        """(M, K) to (M, N)."""
        if isinstance(x, InOrder):
            assert self.packed is not None
            return linear_in_order(x, self.packed, self.bias)
        return self.run(x)

    def takes_in_order(self, like: Tensor, activation: str | None = None) -> bool:
        """As ``step_ops.takes_in_order`` of the weight; False of what is not packed."""
        return self.packed is not None and takes_in_order(self.packed, like, activation)


def product(modules: Sequence[Any]) -> Product:
    """One function for linear layers that have the same input: their results side by side."""
    if len(modules) > 1:
        if all(type(module) is torch.nn.Linear for module in modules):
            weight = _joint([module.weight for module in modules])
            biases = [module.bias for module in modules]
            bias = None if biases[0] is None else _joint(biases)
            if weight is not None and (bias is not None) == any(b is not None for b in biases):
                return _dense(weight, bias)
        group = _group(modules)
        if group is not None:
            return product([group])
        parts = [product([module]) for module in modules]
        return Product(lambda x: torch.cat([part(x) for part in parts], -1))
    (module,) = modules
    if type(module) is torch.nn.Linear:
        return _dense(module.weight.detach(), None if module.bias is None else module.bias.detach())
    if isinstance(module, nn.Linear | nn.TiedLinear) and not hasattr(module, "ranks"):
        packed, bias = module.packed, getattr(module, "bias", None)
        to, precision = module.out_dtype, module.precision
        plain = to is None and precision in (None, "exact")
        return Product(
            lambda x: ops.linear(x, packed, bias, out_dtype=to, precision=precision), packed if plain else None, bias
        )
    return Product(module)


def routed(mlp: Any) -> Product | None:
    """The mlp of a mixture of experts in NVFP4, whose router ``ROUTERS`` knows; None of others.

    Routing weights stay float32, where Qwen3-MoE's own router rounds them.
    """
    router: Any = getattr(mlp, "gate", None)
    experts = getattr(mlp, "experts", None)
    if type(router).__name__ not in ROUTERS or not isinstance(experts, nn.Experts):
        return None
    logits, top = _dense(router.weight.detach(), None), router.top_k
    renormalize = getattr(router, "norm_topk_prob", True)

    def run(x: Tensor) -> Tensor:
        y: Tensor = experts(x, *route(logits(x), top, renormalize=renormalize))
        return y

    return Product(run)


def _group(modules: Sequence[Any]) -> nn.Group | None:
    """The group whose parts the modules are, all of them in their order; or None."""
    group: nn.Group | None = getattr(modules[0], "group", None)
    places = [(getattr(module, "group", None), getattr(module, "index", None)) for module in modules]
    return group if group is not None and places == [(group, i) for i in range(len(group.sizes))] else None


def _dense(weight: Tensor, bias: Tensor | None) -> Product:
    if type(weight) is not Tensor:  # one of another library's, which has no address
        return Product(lambda x: linear(x, weight, bias))
    return Product(lambda x: dense(x, weight, bias))


def join(modules: list[Any]) -> None:
    """Make the weights of dense layers views of one tensor, if they are not, and so their biases."""
    if not all(type(module) is torch.nn.Linear for module in modules):
        return
    for name in ("weight", "bias"):
        sources = [getattr(module, name) for module in modules]
        if any(source is None for source in sources) or _joint(sources) is not None:
            continue
        joint = torch.cat([source.detach() for source in sources])
        views = torch.split(joint, [source.shape[0] for source in sources])
        for module, view, source in zip(modules, views, sources, strict=True):
            setattr(module, name, torch.nn.Parameter(view, requires_grad=source.requires_grad))


def _joint(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor of all rows, where the tensors lie one after the other in one storage; else None."""
    end: int | None = None
    first = tensors[0]
    for tensor in tensors:
        if tensor is None or first is None or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return None
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if end is not None and tensor.data_ptr() != end:
            return None
        end = tensor.data_ptr() + tensor.nbytes
    assert first is not None
    rows = sum(tensor.shape[0] for tensor in tensors if tensor is not None)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
