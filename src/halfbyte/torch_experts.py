"""A mixture of experts as an operator of torch's, for ``torch.compile`` and ``torch.export``; as that of ``linear``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.expert_ops import Mixture, Stacks, check, compute
from halfbyte.kernels.cuda.shared import keeping_nothing
from halfbyte.layouts import Packed, parse
from halfbyte.torch_ops import memo_of


@torch.library.custom_op("halfbyte::experts", mutates_args=())
def experts_op(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    layouts: str,
    shapes: list[int],
    names: str,
    gate_up: list[Tensor],
    down: list[Tensor],
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    limit: float | None,
    gate_up_order: str,
    experts: int,
    local: list[int],
    padding: bool,
    gated: bool,
    null: str,
    precision: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """``halfbyte.expert_ops.compute``.

    Args:
        hidden: (T, H).
        indices: (T, k).
        weights: (T, k).
        layouts: the keys of the layouts of gate_up and down, joined by a semicolon.
        shapes: E, 2I, H of gate_up, then E, H, I of down.
        names: of the buffers of both, joined by commas, the two joined by a semicolon.
        gate_up: the buffers of its Packed.
        down: the buffers of its Packed.
        gate_up_bias: (E, 2I), or None.
        down_bias: (E, H), or None.
        activation: as of Mixture.
        limit: as of Mixture.
        gate_up_order: as of Mixture.
        experts: as of Mixture.
        local: as of Mixture.
        padding: as of Mixture.
        gated: as of Mixture.
        null: as of Mixture.
        precision: as of ``compute``.
        out_dtype: as of ``compute``.

    Returns:
        (T, H).
    """
    stacks = _stacks(layouts, shapes, names, gate_up, down, gate_up_bias, down_bias)
    for stack in (stacks.gate_up, stacks.down):
        stack.memo = memo_of(next(iter(stack.buffers().values())))
    mixture = _mixture(activation, limit, gate_up_order, experts, tuple(local), padding, gated, null)
    with keeping_nothing():
        return compute(hidden, indices, weights, stacks, mixture, precision=precision, out_dtype=out_dtype)


@functools.lru_cache
def _mixture(
    activation: str,
    limit: float | None,
    gate_up_order: str,
    experts: int,
    local: tuple[int, ...],
    padding: bool,
    gated: bool,
    null: str,
) -> Mixture:
    return Mixture(
        activation=activation,
        limit=limit,
        gate_up_order=gate_up_order,
        experts=experts,
        local=local,
        padding=padding,
        gated=gated,
        null=null,
    )


def _shape_of_experts(hidden: Tensor, indices: Tensor, weights: Tensor, *others: Any) -> Tensor:
    check(hidden, indices, weights, _stacks(*others[:7]))
    return torch.empty_like(hidden, dtype=others[-1], memory_format=torch.contiguous_format)


experts_op.register_fake(_shape_of_experts)


def _stacks(
    layouts: str,
    shapes: list[int],
    names: str,
    gate_up: list[Tensor],
    down: list[Tensor],
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Stacks:
    one, two = (
        Packed(parse(layout), shape, dict(zip(named.split(","), buffers, strict=True)))
        for layout, shape, named, buffers in zip(
            layouts.split(";"), (shapes[:3], shapes[3:]), names.split(";"), (gate_up, down), strict=True
        )
    )
    return Stacks(gate_up=one, down=two, gate_up_bias=gate_up_bias, down_bias=down_bias)


def traced(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    stacks: Sequence[Any],
    mixture: Mixture,
    precision: str,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """``compute`` while torch traces it.

    Args:
        hidden: as of ``compute``.
        indices: as of ``compute``.
        weights: as of ``compute``.
        stacks: of gate_up and then of down the layout's key, the shape, the buffers by name, and the bias.
        mixture: as of ``compute``.
        precision: as of ``compute``.
        out_dtype: as of ``compute``.
    """
    (key, shape, buffers, bias), (down_key, down_shape, down_buffers, down_bias) = stacks
    made: Tensor = experts_op(
        hidden,
        indices,
        weights,
        f"{key};{down_key}",
        [*shape, *down_shape],
        f"{','.join(buffers)};{','.join(down_buffers)}",
        list(buffers.values()),
        list(down_buffers.values()),
        bias,
        down_bias,
        mixture.activation,
        mixture.limit,
        mixture.gate_up_order,
        mixture.experts,
        list(mixture.local),
        mixture.padding,
        mixture.gated,
        mixture.null,
        precision,
        hidden.dtype if out_dtype is None else out_dtype,
    )
    return made
