"""``add_norm``, ``gate`` and ``attend`` by torch's operators, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from halfbyte.errors import UsageError
from halfbyte.kernels.base import Kernel, load_torch, why_not_torch
from halfbyte.kernels.step import (
    AddNormArgs,
    AttendArgs,
    GateArgs,
    StepCall,
    add_norm_cost,
    attend_cost,
    gate_cost,
    why_in_rows,
)


def _refuse(call: StepCall) -> tuple[str, ...]:
    return *why_not_torch(call.library), *why_in_rows(call)


def _bind_add_norm(args: AddNormArgs) -> Callable[..., None]:
    import torch

    def run(x: Any, residual: Any, weight: Any, eps: float, normed: Any, total: Any) -> None:
        if residual is not None:
            x = torch.add(x, residual, out=total)
        torch.mul(_normed(x, eps), weight, out=normed)

    return run


def _normed(x: Any, eps: float) -> Any:
    """Divided by the root of the mean square of the last axis, in float32, and rounded."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def activation_of(name: str) -> Callable[[Any], Any]:
    """Torch's function for one of ``halfbyte.kernels.step.ACTIVATIONS``."""
    from torch.nn import functional

    activations: dict[str, Callable[[Any], Any]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
        "relu2": lambda g: functional.relu(g).square(),
    }
    return activations[name]


def _bind_gate(args: GateArgs) -> Callable[..., None]:
    activation = activation_of(args.activation)

    def run(gate_up: Any, out: Any) -> None:
        gate, up = gate_up.float().chunk(2, -1)
        out.copy_(activation(gate) * up)

    return run


def _bind_attend(args: AttendArgs) -> Callable[..., None]:
    import torch

    window = args.window
    attention = torch.nn.functional.scaled_dot_product_attention

    def run(
        qkv: Any,
        cos: Any,
        sin: Any,
        positions: Any,
        keys: Any,
        values: Any,
        q_norm: Any,
        k_norm: Any,
        eps: float,
        scale: float,
        out: Any,
    ) -> None:
        b, kv, room, dim = keys.shape
        heads = out.shape[1] // dim
        q, k, v = qkv.view(b, -1, dim).tensor_split((heads, heads + kv), 1)
        q = q if q_norm is None else _normed(q, eps) * q_norm
        k = k if k_norm is None else _normed(k, eps) * k_norm
        places = positions.tolist() if positions.device.type == "cpu" else None
        if places is None:
            valid = (positions >= 0) & (positions < room)
            positions = positions.clamp(0, room - 1)
        elif not all(0 <= p < room for p in places):
            raise UsageError("positions are outside of the cache", got=places, expected=f"0..{room - 1}")
        both = torch.cat((q, k), 1).float()
        turned = torch.cat((-both[..., dim // 2 :], both[..., : dim // 2]), -1)
        both = (both * cos[positions][:, None] + turned * sin[positions][:, None]).to(q.dtype)
        grouped, k = both[:, :heads].reshape(b, kv, -1, dim), both[:, heads:]
        batch = torch.arange(b, device=positions.device)
        if places is None:
            for cache, new in ((keys, k), (values, v)):
                cache[batch, :, positions] = torch.where(valid[:, None, None], new, cache[batch, :, positions])
            entries = torch.arange(room, device=positions.device)
            seen = entries <= positions[:, None]
            if window is not None:
                seen &= entries > positions[:, None] - window
            hidden = ~seen[:, None, :, None]
            keys, values = (cache.masked_fill(hidden, 0) for cache in (keys, values))
            y = attention(grouped, keys, values, attn_mask=seen[:, None, None], scale=scale)
            out.copy_(y.reshape(out.shape).masked_fill_(~valid[:, None], float("nan")))
            return
        keys[batch, :, positions] = k
        values[batch, :, positions] = v
        out = out.view(b, kv, -1, dim)
        alike = len(set(places)) == 1
        for rows, p in [(slice(b), places[0])] if alike else [(slice(i, i + 1), p) for i, p in enumerate(places)]:
            span = slice(0 if window is None else max(0, p + 1 - window), p + 1)
            out[rows] = attention(grouped[rows], keys[rows, :, span], values[rows, :, span], scale=scale)

    return run


B = TypeVar("B", AddNormArgs, GateArgs, AttendArgs)


def _reference(bundle: type[B], description: str, bind: Callable[[B], Callable[..., None]], cost: Any) -> Any:
    return Kernel(
        name=f"{bundle.op.replace('_', '-')}-torch",
        bundle=bundle,
        description=description,
        refuse=_refuse,
        load=load_torch,
        bind=bind,
        cost=cost,
    )


ADD_NORM: Final = _reference(AddNormArgs, "torch's operators, any device", _bind_add_norm, add_norm_cost)
GATE: Final = _reference(GateArgs, "torch's operators, any device", _bind_gate, gate_cost)
ATTEND: Final = _reference(AttendArgs, "torch's scaled_dot_product_attention, any device", _bind_attend, attend_cost)
