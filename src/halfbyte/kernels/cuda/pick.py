"""``pick`` on an NVIDIA GPU, in Triton: programs share a row of logits, and the last to finish takes the best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from halfbyte.kernels.base import ALIGNED, Kernel
from halfbyte.kernels.cuda.launch import Program, program, why_not
from halfbyte.kernels.cuda.shared import counters as zeros
from halfbyte.kernels.cuda.shared import in_turn, workspace
from halfbyte.kernels.pick import PickArgs, PickCall, pick_cost

TYPES: Final = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
HOPPER: Final = 90
"""The compute capability from which on it starts before the kernel ahead has ended, and waits for it."""
BLOCK: Final = 2048
"""Logits of a program."""
MOST: Final = 1024
"""Programs of a row."""
WARPS: Final = 4


def parts(call: PickCall, capability: int) -> tuple[Any, Any]:
    """Signature and constants; capability 0 for Triton's interpreter."""
    names = {"tokens": "*i64", "counters": "*i64", "log": "*i64", "tops": "*i32", "places": "*i32", "arrived": "*i32"}
    of, width = f"{TYPES[call.dtype]}:16", "i32" if call.width % ALIGNED else "i32:16"
    signature = {"logits": of, **names, "V": width, "T": "i32", "B": "i32"}
    programs = -(-call.width // BLOCK)
    return signature, {"BLOCK": BLOCK, "SP": 1 << (programs - 1).bit_length(), "EARLY": capability >= HOPPER}


def bind(args: PickArgs) -> Callable[..., None]:
    """What writes all but the logits."""
    call = args.call()
    device, rows, width, room = args.logits.device, call.rows, call.width, args.log.shape[0]
    programs = -(-width // BLOCK)
    run = _made(call, device)
    plain = bool(run.plainly)

    def bound(logits: Any, tokens: Any, counters: Any, log: Any) -> None:
        found, arrived = _memory(device, 8 * programs * rows, 4 * rows)
        arrays = (logits, tokens, counters, log, found[: programs * rows], found[programs * rows :], arrived)
        given = arrays if plain else tuple(a.data_ptr() for a in arrays)
        with in_turn:
            run((programs, rows, 1), (*given, width, room, rows))

    return bound


def _memory(device: Any, nbytes: int, counted: int) -> tuple[Any, Any]:
    """i32 for what programs find, and zeros."""
    import torch

    if device.type != "cuda":
        return torch.empty(nbytes // 4, dtype=torch.int32), torch.zeros(counted // 4, dtype=torch.int32)
    return workspace(device, nbytes)[:nbytes].view(torch.int32), zeros(device, counted)[:counted].view(torch.int32)


def _made(call: PickCall, device: Any) -> Program:
    from halfbyte.kernels.cuda.pick_code import pick

    signature, constants = parts(call, call.capability)
    return program(pick, signature, constants, device=device, warps=WARPS, pdl=constants["EARLY"])


def _refuse(call: PickCall) -> tuple[str, ...]:
    reasons = list(why_not(call))
    if call.dtype not in TYPES:
        reasons.append(f"takes {' or '.join(TYPES)}, not {call.dtype}")
    if not 0 < call.width <= MOST * BLOCK:
        reasons.append(f"takes 1 to {MOST * BLOCK} logits, not {call.width}")
    return tuple(reasons)


def _load(call: PickCall) -> None:
    import torch

    _made(call, torch.device(call.device, torch.cuda.current_device()))


TRITON: Final = Kernel(
    name="triton-pick",
    bundle=PickArgs,
    description="one launch; the last program of a row takes the best",
    refuse=_refuse,
    load=_load,
    bind=bind,
    cost=pick_cost,
)
