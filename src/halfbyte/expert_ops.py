"""A mixture of experts on stacks of NVFP4 weights; ``halfbyte.kernels.experts`` states what is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from halfbyte.errors import UsageError
from halfbyte.kernels import ExpertsArgs, Kernel
from halfbyte.kernels.base import ALIGNED
from halfbyte.kernels.cuda import refused
from halfbyte.kernels.experts import Mixture, check_ids
from halfbyte.kernels.experts_torch import LOOP, chosen
from halfbyte.layouts import Packed
from halfbyte.operands import check_beside, check_float, contiguous, wants_gradient, without_gradient
from halfbyte.remembered import forced_name, keep, watched_weakly

__all__ = ["Mixture", "Stacks", "check", "compute"]

_FEW_TOKENS: Final = 64
"""On a CPU, calls of more tokens are not remembered."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stacks:
    """The weights of experts.

    Args:
        gate_up: (E, 2I, H), or (E, I, H) without a gate.
        down: (E, H, I).
        gate_up_bias: (E, 2I) or (E, I), or None.
        down_bias: (E, H), or None.
    """

    gate_up: Packed
    down: Packed
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells these from others with the same gate_up."""
        one, two = self.gate_up_bias, self.down_bias
        biases = None if one is None else (id(one), one.dtype), None if two is None else (id(two), two.dtype)
        return self.down.layout, *map(id, self.down.buffers().values()), *biases

    def tensors(self) -> list[Tensor]:
        """All of them."""
        biases = [b for b in (self.gate_up_bias, self.down_bias) if b is not None]
        return [*self.gate_up.buffers().values(), *self.down.buffers().values(), *biases]


def compute(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    stacks: Stacks,
    mixture: Mixture,
    *,
    precision: str = "exact",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What the experts make of tokens.

    Args:
        hidden: (T, H) float32, bfloat16 or float16.
        indices: (T, k) int32 or int64, the experts of each token.
        weights: (T, k) floats, what each expert's result is multiplied by.
        stacks: the weights, on the device of the others.
        mixture: how they compute.
        precision: "exact", or "fp8" to allow that activations and weights are rounded to E4M3: on a GPU where a kernel
            does so and is faster, elsewhere always; or "w4a4", which rounds activations to NVFP4 before each product.
        out_dtype: of the result: that of hidden, which is the default, or float32.

    Returns:
        (T, H).

    Raises:
        UsageError: tensors that do not fit; ids that name no expert, unless ``padding``; on a GPU in a later call.
        WeightError: a token that is routed to a null expert, unless those are skipped; on a GPU in a later call.
    """
    to = hidden.dtype if out_dtype is None else out_dtype
    if hidden.is_cuda:
        refused.look(hidden.device)
    key = (
        "experts", hidden.shape, hidden.dtype, hidden.device, indices.shape, indices.dtype, indices.device,
        weights.shape, weights.dtype, weights.device, *stacks.identity, mixture, precision, to, forced_name(),
    )  # fmt: skip
    known = stacks.gate_up.memo.get(key)
    run = None if known is None or not known[0]() else known[1]
    if run is not None and not wants_gradient(hidden, weights):
        return _run(run, hidden, indices, weights, mixture, to)
    if run is None:
        check(hidden, indices, weights, stacks)

    def computed(x: Tensor) -> Tensor:
        if run is not None:
            return _run(run, x, indices, weights, mixture, to)
        return _first(x, indices, weights, stacks, mixture, precision, to, key)

    if wants_gradient(hidden, weights):
        made: Tensor = without_gradient()(hidden, weights, computed)
        return made
    return computed(hidden)


def _first(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    stacks: Stacks,
    mixture: Mixture,
    precision: str,
    to: torch.dtype,
    key: Any,
) -> Tensor:
    """A call of its kind whose kernel is not known; what it comes down to is kept with gate_up."""
    args = ExpertsArgs(
        hidden=contiguous(hidden),
        indices=contiguous(indices),
        weights=contiguous(weights),
        gate_up=stacks.gate_up,
        down=stacks.down,
        gate_up_bias=_whole(stacks.gate_up_bias),
        down_bias=_whole(stacks.down_bias),
        mixture=mixture,
        precision=precision,
        out=torch.empty(hidden.shape, dtype=to, device=hidden.device),
    )
    kernel, computed = chosen(args.call())
    if not hidden.numel():
        return torch.empty_like(hidden, dtype=to)
    args = args if computed == precision else replace(args, precision=computed)
    if not (args.indices.numel() and mixture.local):
        kernel = LOOP
    if kernel.bind is None:
        return _run(functools.partial(_unbound, kernel, args), args.hidden, args.indices, args.weights, mixture, to)
    run = kernel.bind(args)
    if hidden.is_cuda or len(hidden) <= _FEW_TOKENS:
        biases = (args.gate_up_bias, stacks.gate_up_bias), (args.down_bias, stacks.down_bias)
        copies = [used for used, given in biases if used is not given]  # which the kernel knows by address
        keep(stacks.gate_up.memo, key, (watched_weakly(stacks.tensors()), run, copies))
    return _run(run, hidden, indices, weights, mixture, to)


def _unbound(kernel: Kernel[Any, Any], like: ExpertsArgs, *arrays: Tensor) -> None:
    hidden, indices, weights, out = arrays
    kernel.run(replace(like, hidden=hidden, indices=indices, weights=weights, out=out))


def _run(
    run: Callable[..., None], hidden: Tensor, indices: Tensor, weights: Tensor, mixture: Mixture, to: torch.dtype
) -> Tensor:
    hidden, indices, weights = _plain(hidden), _plain(indices), _plain(weights)
    if not hidden.is_cuda:
        check_ids(indices, mixture)
    out = torch.empty_like(hidden, dtype=to)
    run(hidden, indices, weights, out)
    return out


def _plain(a: Tensor) -> Tensor:
    """``contiguous``, in less time where there is nothing to do."""
    return contiguous(a) if not a.is_contiguous() or a.data_ptr() % ALIGNED or a.is_neg() else a


def _whole(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else contiguous(bias)


def check(hidden: Tensor, indices: Tensor, weights: Tensor, stacks: Stacks) -> None:
    """UsageError where tensors do not fit each other or the weights."""
    check_float(hidden, "hidden")
    check_beside(stacks.gate_up.buffers()["scale2"], "the weight", hidden, "hidden")
    width = stacks.gate_up.shape[-1]
    if hidden.ndim != 2 or hidden.shape[1] != width:
        raise UsageError("hidden does not fit the experts", got=tuple(hidden.shape), expected=f"(T, {width})")
    if indices.dtype not in (torch.int32, torch.int64):
        raise UsageError("indices are no integers of 32 or 64 bits", got=str(indices.dtype), expected="int32 or int64")
    if indices.ndim != 2 or indices.shape[0] != hidden.shape[0]:
        raise UsageError(
            "indices do not fit hidden", got=tuple(indices.shape), expected=f"({hidden.shape[0]}, experts of a token)"
        )
    if weights.shape != indices.shape or not weights.is_floating_point():
        got = f"{str(weights.dtype).removeprefix('torch.')} {tuple(weights.shape)}"
        raise UsageError("routing weights do not fit indices", got=got, expected=f"floats {tuple(indices.shape)}")
    for array, what in ((indices, "indices"), (weights, "routing weights")):
        check_beside(array, what, hidden, "hidden")
    check_float(weights, "routing weights")
