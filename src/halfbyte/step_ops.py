"""What a decoder does to each token between its products: each op chooses its kernel once for calls of one kind.

Tensors are torch's, without gradients. On a GPU nothing waits for the device, and all may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from halfbyte.errors import UsageError
from halfbyte.kernels import AddNormArgs, AttendArgs, DenseArgs, GateArgs, GatedArgs, PickArgs, select
from halfbyte.kernels.base import ALIGNED
from halfbyte.layouts import Packed
from halfbyte.operands import contiguous
from halfbyte.remembered import forced_name, keep, on_tensors

__all__ = ["add_norm", "attend", "dense", "gate", "gated", "pick"]

_known: Final[dict[Any, Callable[..., None]]] = {}
"""What runs on calls of one key."""


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalize the sum, rounding as transformers' RMSNorm.

    Args:
        x: (M, H) float32, bfloat16 or float16.
        residual: (M, H) of the same dtype; None for none.
        weight: (H,) of the same dtype.
        eps: added to the mean square.

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
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    key = "add_norm", _kind(x), residual is None or _kind(residual), _kind(weight), forced_name()
    run = _known.get(key)
    if run is None:
        args = AddNormArgs(x=x, residual=residual, weight=weight, eps=eps, normed=normed, total=total)
        run = _known[key] = _bound(args)
    run(x, residual, weight, eps, normed, total)
    return normed, total


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
) -> Tensor:
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

    Returns:
        (B, Hq D). On a GPU a position outside of the cache gives a row of NaN, and nothing is written.

    Raises:
        UsageError: tensors that do not fit each other; on the CPU a position outside of the cache.
        NoKernelError: HALFBYTE_KERNEL names a kernel that declines.
    """
    qkv = _whole(qkv)
    kv, dim = keys.shape[1], keys.shape[3]
    out = torch.empty((len(qkv), qkv.shape[-1] - 2 * kv * dim), dtype=qkv.dtype, device=qkv.device)
    key = (
        "attend", _kind(qkv), _kind(cos), _kind(sin), _kind(positions), _kind(keys), _kind(values),
        q_norm is None or _kind(q_norm), k_norm is None or _kind(k_norm), window, settled, forced_name(),
    )  # fmt: skip
    run = _known.get(key)
    if run is None:
        args = AttendArgs(
            qkv=qkv, cos=cos, sin=sin, positions=positions, keys=keys, values=values, q_norm=q_norm, k_norm=k_norm,
            eps=eps, scale=scale, window=window, settled=settled, out=out,
        )  # fmt: skip
        run = _known[key] = _bound(args)
    run(qkv, cos, sin, positions, keys, values, q_norm, k_norm, eps, scale, out)
    return out


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


def gated(x: Tensor, weight: Packed, activation: str, bias: Tensor | None = None) -> Tensor:
    """``gate`` of a product: for few tokens on Hopper in one launch.

    Args:
        x: (M, K) float32, bfloat16 or float16.
        weight: (2 I, K), the rows of the gate before those of up.
        activation: "silu", "gelu", "gelu_tanh" or "relu2".
        bias: (2 I,) float32, bfloat16 or float16.

    Returns:
        (M, I) ``round(activation(gate) * up)``, where gate and up are rounded as ``linear`` rounds.

    Raises:
        UsageError: an unknown activation, or tensors that do not fit each other.
        NoKernelError: nothing accepts this call.
    """
    kind = None if bias is None else _kind(bias)
    key = "gated", x.shape, x.dtype, x.device, kind, activation, forced_name()
    known = weight.memo.get(key)
    y: Tensor | None = None if known is None else known(x, bias)
    if y is None:
        x = _whole(x)
        y = torch.empty((len(x), weight.shape[-2] // 2), dtype=x.dtype, device=x.device)
        args = GatedArgs(x=x, weight=weight, bias=bias, activation=activation, out=y)
        kernel = select(GatedArgs, args.call())
        if kernel.bind is None:
            raise UsageError(f"kernel {kernel.name} cannot be bound")
        if y.numel():
            run = kernel.bind(args)
            keep(weight.memo, key, on_tensors(run, list(weight.buffers().values()), tuple(y.shape), y))
            run(x, bias, y)
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


def _bound(args: Any) -> Callable[..., None]:
    """What the kernel that is chosen does on arrays; nothing where there is no row."""
    kernel = select(type(args), args.call())
    if not prod(args.arrays()[0].shape):
        return lambda *arrays: None
    if kernel.bind is not None:
        bound: Callable[..., None] = kernel.bind(args)
        return bound
    raise UsageError(f"kernel {kernel.name} cannot be bound")
