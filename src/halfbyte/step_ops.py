"""What a decoder does to each token between its products: each op chooses its kernel once for calls of one kind.

Tensors are torch's, without gradients. On a GPU nothing waits for the device, and all may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from halfbyte.errors import NoKernelError, UsageError
from halfbyte.kernels import AddNormArgs, AttendArgs, DenseArgs, GateArgs, GatedArgs, InOrderArgs, PickArgs, select
from halfbyte.kernels.base import ALIGNED
from halfbyte.kernels.in_order import FEWEST, ROWS, length
from halfbyte.layouts import Packed
from halfbyte.operands import contiguous
from halfbyte.remembered import forced_name, keep, on_tensors

__all__ = ["InOrder", "add_norm", "attend", "dense", "gate", "gated", "linear_in_order", "pick", "takes_in_order"]

_known: Final[dict[Any, Callable[..., None]]] = {}
"""What runs on calls of one key."""


@dataclass(frozen=True, eq=False)
class InOrder:
    """Activations that lie as ``halfbyte.kernels.in_order`` has them, where a product takes them so.

    Attributes:
        data: (``length(K)``,).
        rows: M.
        width: K.
    """

    data: Tensor
    rows: int
    width: int

    @staticmethod
    def like(x: Tensor, width: int) -> InOrder:
        """Room for those of as many tokens as x (M, ...) has."""
        return InOrder(torch.empty(length(width), dtype=x.dtype, device=x.device), len(x), width)


def takes_in_order(weight: Packed, like: Tensor, activation: str | None = None) -> bool:
    """Whether a product, with the gate of an activation if that is not None, takes activations in order, which pays.

    Args:
        weight: (N, K).
        like: (M, ...), activations of the dtype and on the device of x.
        activation: "silu", "gelu", "gelu_tanh" or "relu2".
    """
    if not (like.is_cuda and FEWEST <= len(like) <= ROWS):
        return False
    key = "takes in order", len(like), like.dtype, like.device, activation, forced_name()
    known = weight.memo.get(key)
    if known is None:
        n, k = weight.shape[-2:]
        x = InOrder.like(like, k).data
        if activation is None:
            known = _accepted(InOrderArgs(x=x, weight=weight, bias=None, out=x.new_empty(len(like), n)))
        else:
            out, rows = InOrder.like(like, n // 2).data, len(like)
            known = _accepted(GatedArgs(x=x, weight=weight, bias=None, activation=activation, out=out, rows=rows))
        keep(weight.memo, key, known)
    return bool(known)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, in_order: bool = False
) -> tuple[Tensor | InOrder, Tensor]:
    """Add to the residual stream and normalize the sum, rounding as transformers' RMSNorm.

    Args:
        x: (M, H) float32, bfloat16 or float16.
        residual: (M, H) of the same dtype; None for none.
        weight: (H,) of the same dtype.
        eps: added to the mean square.
        in_order: the first result lies so where what computes it can write it so.

    Returns:
        (M, H) ``round(weight * round(sum * rsqrt(mean(sum * sum) + eps)))``, and (M, H) ``sum = round(x + residual)``,
        which is x itself where there is no residual.

    Raises:
        UsageError: tensors that do not fit each other.
        NoKernelError: HALFBYTE_KERNEL names a kernel that declines.
    """
    x = _whole(x)
    residual = None if residual is None else _whole(residual)
    weight = _whole(weight)
    key = "add_norm", _kind(x), residual is None or _kind(residual), _kind(weight), in_order, forced_name()
    run = _known.get(key)
    order = InOrder.like(x, x.shape[-1]) if in_order and run is not _in_rows else None
    normed = torch.empty_like(x) if order is None else order.data
    total = x if residual is None else torch.empty_like(x)
    if run is None:
        args = AddNormArgs(x=x, residual=residual, weight=weight, eps=eps, normed=normed, total=total)
        run = _known[key] = _bound(args) if order is None or _accepted(args) else _in_rows
    if run is _in_rows:
        return add_norm(x, residual, weight, eps)
    run(x, residual, weight, eps, normed, total)
    return normed if order is None else order, total


def attend(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    window: int | None = None,
    settled: bool = False,
    in_order: bool = False,
) -> Tensor | InOrder:
    """Rotate q and k of one new token of each sequence, write k and v to the cache, and attend to it.

    Args:
        qkv: (B, (Hq + 2 Hkv) D) float32, bfloat16 or float16: q, then k, then v.
        cos: (T or more, D) float32.
        sin: (T or more, D) float32.
        positions: (B,) int64, how many entries there are already: where the new one is written.
        keys: (B, Hkv, T, D), contiguous, of the dtype of qkv; written at ``positions``.
        values: the same.
        scale: of the scores.
        q_norm: (D,) of that dtype: each head of q is normalized before it is rotated, as by ``add_norm``; None: not.
        k_norm: the same of k.
        eps: of both norms.
        window: how many entries are seen at the most, the new one among them; None for all.
        settled: on a GPU, that an operator of torch's ran on the stream after positions, cos, sin and the entries
            before the new ones were written, and before what computed qkv. Then they are read while that still runs.
        in_order: the result lies so where what computes it can write it so.

    Returns:
        (B, Hq D). On a GPU a position outside of the cache gives a row of NaN, and nothing is written.

    Raises:
        UsageError: tensors that do not fit each other; on the CPU a position outside of the cache.
        NoKernelError: HALFBYTE_KERNEL names a kernel that declines.
    """
    qkv = _whole(qkv)
    kv, dim = keys.shape[1], keys.shape[3]
    width = qkv.shape[-1] - 2 * kv * dim
    key = (
        "attend", _kind(qkv), _kind(cos), _kind(sin), _kind(positions), _kind(keys), _kind(values),
        q_norm is None or _kind(q_norm), k_norm is None or _kind(k_norm), window, settled, in_order, forced_name(),
    )  # fmt: skip
    run = _known.get(key)
    order = InOrder.like(qkv, width) if in_order and run is not _in_rows else None
    out = torch.empty((len(qkv), width), dtype=qkv.dtype, device=qkv.device) if order is None else order.data
    if run is None:
        args = AttendArgs(
            qkv=qkv, cos=cos, sin=sin, positions=positions, keys=keys, values=values, q_norm=q_norm, k_norm=k_norm,
            eps=eps, scale=scale, window=window, settled=settled, out=out,
        )  # fmt: skip
        run = _known[key] = _bound(args) if order is None or _accepted(args) else _in_rows
    if run is _in_rows:
        return attend(
            qkv, cos, sin, positions, keys, values, scale=scale, q_norm=q_norm, k_norm=k_norm, eps=eps,
            window=window, settled=settled,
        )  # fmt: skip
    run(qkv, cos, sin, positions, keys, values, q_norm, k_norm, eps, scale, out)
    return out if order is None else order


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight that is not quantized.

    Args:
        x: (M, K) float32, bfloat16 or float16.
        weight: (N, K) of that dtype.
        bias: (N,) of that dtype.

    Returns:
        (M, N) ``round(sum(x * w) + bias)``, summed in float32.

    Raises:
        UsageError: tensors that do not fit each other.
        NoKernelError: HALFBYTE_KERNEL names a kernel that declines.
    """
    x, weight = _whole(x), _whole(weight)
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    key = "dense", _kind(x), _kind(weight), bias is None or _kind(bias), forced_name()
    run = _known.get(key)
    if run is None:
        run = _known[key] = _bound(DenseArgs(x=x, weight=weight, bias=bias, out=out))
    run(x, weight, bias, out)
    return out


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """Multiply by the activation of the gate.

    Args:
        gate_up: (M, 2 I) float32, bfloat16 or float16; gate, then up.
        activation: "silu", "gelu", "gelu_tanh" or "relu2".

    Returns:
        (M, I) ``round(activation(gate) * up)``.

    Raises:
        UsageError: an unknown activation, or no two halves.
        NoKernelError: HALFBYTE_KERNEL names a kernel that declines.
    """
    gate_up = _whole(gate_up)
    m, width = gate_up.shape
    out = torch.empty((m, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    key = "gate", _kind(gate_up), activation, forced_name()
    run = _known.get(key)
    if run is None:
        run = _known[key] = _bound(GateArgs(gate_up=gate_up, activation=activation, out=out))
    run(gate_up, out)
    return out


def gated(x: Tensor | InOrder, weight: Packed, activation: str, bias: Tensor | None = None) -> Tensor | InOrder:
    """``gate`` of a product: for few tokens on Hopper in one launch.

    Args:
        x: (M, K) float32, bfloat16 or float16; in order, if the weight ``takes_in_order`` so many.
        weight: (2 I, K), the rows of the gate before those of up.
        activation: "silu", "gelu", "gelu_tanh" or "relu2".
        bias: (2 I,) float32, bfloat16 or float16.

    Returns:
        (M, I) ``round(activation(gate) * up)``, where gate and up are rounded as ``linear`` rounds; in order if x is.

    Raises:
        UsageError: an unknown activation, or tensors that do not fit each other.
        NoKernelError: nothing accepts this call.
    """
    kind = None if bias is None else _kind(bias)
    if isinstance(x, InOrder):
        _check_width(x, weight)
    data, rows = (x.data, x.rows) if isinstance(x, InOrder) else (x, None)
    key = "gated", data.shape, rows, data.dtype, data.device, kind, activation, forced_name()
    known = weight.memo.get(key)
    y: Tensor | None = None if known is None else known(data, bias)
    half = weight.shape[-2] // 2
    if y is None:
        data = _whole(data)
        shape = (len(data), half) if rows is None else (length(half),)
        y = torch.empty(shape, dtype=data.dtype, device=data.device)
        args = GatedArgs(x=data, weight=weight, bias=bias, activation=activation, out=y, rows=rows)
        y = _first(args, key, y)
    return y if rows is None else InOrder(y, rows, half)


def linear_in_order(x: InOrder, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """``linear`` of activations that lie in order, on a weight that ``takes_in_order``.

    Args:
        x: of M tokens and K features.
        weight: (N, K).
        bias: (N,) float32, bfloat16 or float16.

    Returns:
        (M, N) of the dtype of x, exact as by ``linear``.

    Raises:
        UsageError: tensors that do not fit each other.
        NoKernelError: nothing accepts this call.
    """
    _check_width(x, weight)
    key = "in order", x.rows, x.data.dtype, x.data.device, None if bias is None else _kind(bias), forced_name()
    known = weight.memo.get(key)
    y: Tensor | None = None if known is None else known(x.data, bias)
    if y is None:
        y = torch.empty((x.rows, weight.shape[-2]), dtype=x.data.dtype, device=x.data.device)
        y = _first(InOrderArgs(x=x.data, weight=weight, bias=bias, out=y), key, y)
    return y


def pick(logits: Tensor, tokens: Tensor, counters: Tensor, log: Tensor) -> None:
    """Write the token with the largest logit of each sequence, the first of equal ones.

    Args:
        logits: (B, V) float32, bfloat16 or float16.
        tokens: (B,) int64; written.
        counters: (2, B) int64, positions and how many rows of the log each sequence has; each is increased by 1.
        log: (T, B) int64; each column is written at its row ``counters[1]``, which is within 0..T-1.

    Raises:
        UsageError: tensors that do not fit each other.
        NoKernelError: HALFBYTE_KERNEL names a kernel that declines.
    """
    logits = _whole(logits)
    key = "pick", _kind(logits), _kind(tokens), _kind(counters), _kind(log), forced_name()
    run = _known.get(key)
    if run is None:
        run = _known[key] = _bound(PickArgs(logits=logits, tokens=tokens, counters=counters, log=log))
    run(logits, tokens, counters, log)


def _kind(a: Tensor) -> tuple[Any, ...]:
    """All of a tensor that decides what runs on it."""
    return a.shape, a.dtype, a.device, a.is_contiguous(), a.data_ptr() % ALIGNED


def _whole(a: Tensor) -> Tensor:
    """Without gaps and aligned."""
    return contiguous(a) if not a.is_contiguous() or a.data_ptr() % ALIGNED else a


def _in_rows(*_: Any) -> None:
    """Stands for calls whose results nothing writes in order."""


def _check_width(x: InOrder, weight: Packed) -> None:
    if x.width != weight.shape[-1]:
        raise UsageError("x in order does not fit the weight's K", got=x.width, expected=weight.shape[-1])


def _first(args: GatedArgs | InOrderArgs, key: tuple[Any, ...], y: Tensor) -> Tensor:
    """A call on a weight, which remembers what it comes down to."""
    kernel = select(type(args), args.call())
    if kernel.bind is None:
        raise UsageError(f"kernel {kernel.name} cannot be bound")
    if y.numel():
        run = kernel.bind(args)
        keep(args.weight.memo, key, on_tensors(run, list(args.weight.buffers().values()), tuple(y.shape), y))
        run(args.x, args.bias, y)
    return y


def _accepted(args: Any) -> bool:
    """Whether some kernel computes it."""
    try:
        select(type(args), args.call())
    except NoKernelError:
        return False
    return True


def _bound(args: Any) -> Callable[..., None]:
    """What the kernel that is chosen does on arrays; nothing where there is no row."""
    kernel = select(type(args), args.call())
    if not prod(args.arrays()[0].shape):
        return lambda *arrays: None
    if kernel.bind is not None:
        bound: Callable[..., None] = kernel.bind(args)
        return bound
    raise UsageError(f"kernel {kernel.name} cannot be bound")
