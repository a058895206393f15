"""``route`` on an NVIDIA GPU, in Triton: a warp for each token, which takes the largest k times.

A launch starts early, and lets the one behind start early: see ``halfbyte.kernels.cuda.step``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from halfbyte.kernels.base import Kernel
from halfbyte.kernels.cuda.launch import Program, program, why_not
from halfbyte.kernels.routing import TINY, RouteArgs, RouteCall, route_cost

TYPES: Final = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
IDS: Final = {"int32": "*i32", "int64": "*i64"}
HOPPER: Final = 90
"""The compute capability from which on kernels may overlap."""
MOST: Final = 2048
"""Experts, each group rounded up to a power of two."""
MOST_TOP: Final = 64


def _padded(call: RouteCall) -> tuple[int, int]:
    groups = call.rule.groups
    return _power(groups), _power(call.width // groups)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def parts(call: RouteCall, capability: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Signature and constants; capability 0 for Triton's interpreter."""
    rule = call.rule
    signature = {
        "logits": TYPES[call.dtype], "bias": "*fp32", "indices": IDS[call.indices], "weights": "*fp32",
        "E": "i32", "scale": "fp32",
    }  # fmt: skip
    groups, size = _padded(call)
    constants = {
        "GROUPS": rule.groups,
        "GP": groups,
        "SP": size,
        "TOP": rule.top,
        "KP": _power(rule.top),
        "TOP_GROUPS": rule.top_groups,
        "BEST": min(rule.group_best, call.width // rule.groups),
        "SOFTMAX": rule.scoring == "softmax",
        "RENORMALIZE": rule.renormalize,
        "BIAS": call.bias,
        "TINY": TINY,
        "EARLY": capability >= HOPPER,
    }
    return signature, constants


def bind(args: RouteArgs) -> Callable[..., None]:
    """What writes ``indices`` and ``weights``."""
    call = args.call()
    run = _made(call, args.logits.device)
    grid, width, scale, plain = (call.rows, 1, 1), call.width, args.rule.scale, bool(run.plainly)

    def bound(logits: Any, bias: Any, indices: Any, weights: Any) -> None:
        arrays = (logits, bias, indices, weights)
        given = arrays if plain else tuple([None if a is None else a.data_ptr() for a in arrays])
        run(grid, (*given, width, scale))

    return bound


def _made(call: RouteCall, device: Any) -> Program:
    from halfbyte.kernels.cuda.routing_code import route

    signature, constants = parts(call, call.capability)
    return program(route, signature, constants, device=device, warps=1, pdl=constants["EARLY"])


def _refuse(call: RouteCall) -> tuple[str, ...]:
    reasons = list(why_not(call))
    groups, size = _padded(call)
    if groups * size > MOST:
        reasons.append(f"takes up to {MOST} experts, groups rounded up to powers of two, not {groups * size}")
    if call.rule.top > MOST_TOP:
        reasons.append(f"takes up to {MOST_TOP} experts of a token, not {call.rule.top}")
    return tuple(reasons)


def _load(call: RouteCall) -> None:
    import torch

    _made(call, torch.device(call.device, torch.cuda.current_device()))


TRITON: Final = Kernel(
    name="triton-route",
    bundle=RouteArgs,
    description="one launch; a warp takes the largest k times",
    refuse=_refuse,
    load=_load,
    bind=bind,
    cost=route_cost,
)
