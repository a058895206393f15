"""``attend`` on Hopper for D a multiple of 64 and up to 8 query heads of a key head: products by the matrix units.

A program of W warps takes blocks of 16 W entries, 16 each warp, in registers; its warps know nothing of each other
until all are done, and what they found is added up in shared memory. In all else it is as that of
``halfbyte.kernels.cuda.step``. Weights of values are rounded to the dtype before they multiply, and their sum is of
those that are not; so with p the position

    |error| <= (2 s + (p + 128) 2^-23 + h) * sum(weight * |v|) + h * |out|

where h is half a unit of the dtype, and s the largest rounding error of a score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from halfbyte.kernels.base import Kernel
from halfbyte.kernels.cuda.launch import why_not
from halfbyte.kernels.cuda.step import TYPES, compiled, in_shares, load_add_up, why_more
from halfbyte.kernels.step import AttendArgs, AttendCall, attend_cost

DTYPES: Final = ("bfloat16", "float16")
MOST_GROUP: Final = 8
DIMS: Final = (64, 128)
ENTRIES: Final = 16
"""Of a warp at once."""
AT_ONCE: Final = 264
"""Programs of 4 warps that the registers of an H200 hold; of those with 8 half as many."""
FEW: Final = 66
"""Programs of 8 warps that leave half of it to the kernels behind."""
SHORT: Final = 4
"""Blocks of each of those at the most."""


@dataclass(frozen=True)
class Attend:
    """How it runs.

    Args:
        splits: programs for each key head of a sequence.
        warps: of a program.
        registers: of a thread, at most; None leaves it to the compiler.
    """

    splits: int
    warps: int = 4
    registers: int | None = None


def configure(call: AttendCall) -> Attend:
    """``FEW`` programs where they are soon over, or else ``AT_ONCE``; fewer, where the largest is then no larger."""
    pairs = call.rows * call.kv_heads
    soon = call.room <= SHORT * (FEW // pairs) * ENTRIES * 8
    many = AT_ONCE // 8 < pairs <= AT_ONCE // 2
    warps, programs = (8, FEW) if soon else (8, AT_ONCE // 2) if many else (4, AT_ONCE)
    blocks = -(-call.room // (ENTRIES * warps))
    most = max(1, programs // pairs)
    return Attend(splits=-(-blocks // -(-blocks // most)), warps=warps, registers=168 if many and not soon else None)


def parts(call: AttendCall, made: Attend, settled: bool) -> tuple[Any, Any, int]:
    """Signature, constants and warps."""
    of = f"{TYPES[call.dtype]}:16"
    signature = {
        "qkv": of, "cos": "*fp32:16", "sin": "*fp32:16", "positions": "*i64", "keys": of, "values": of,
        "q_norm": of, "k_norm": of, "out": of, "sums": "*fp32:16", "tops": "*fp32:16",
        "T": "i32", "eps": "fp32", "scale": "fp32",
    }  # fmt: skip
    constants = {
        "D": call.dim,
        "G": call.heads // call.kv_heads,
        "HKV": call.kv_heads,
        "S": made.splits,
        "WINDOW": 0 if call.window is None else min(call.window, call.room),
        "Q_NORM": call.q_norm,
        "K_NORM": call.k_norm,
        "EARLY": True,
        "SETTLED": settled,
        "ORDERS": call.in_order and made.splits == 1,
    }
    return signature, constants, made.warps


def refuse(call: AttendCall) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = list(why_not(call, least=90, most=90, gluon=True))
    if call.dtype not in DTYPES:
        reasons.append(f"takes {' or '.join(DTYPES)}, not {call.dtype}")
    if call.dim not in DIMS:
        reasons.append(f"takes heads of {' or '.join(map(str, DIMS))} values, not {call.dim}")
    if call.heads > MOST_GROUP * call.kv_heads:
        reasons.append(f"takes up to {MOST_GROUP} query heads for a key head, not {call.heads // call.kv_heads}")
    reasons += why_more(call)
    return tuple(reasons)


def bind(args: AttendArgs, made: Attend | None = None, early: bool = True) -> Callable[..., None]:
    """What writes the cache and ``out``."""
    from halfbyte.kernels.cuda.attend_gluon_code import attend

    call = args.call()
    made = configure(call) if made is None else made
    device = args.out.device
    of = parts(call, made, args.settled)
    run = compiled(attend, *of, device=device, early=early, registers=made.registers)
    grid = made.splits, call.kv_heads, call.rows
    return in_shares(call, run, grid, made.splits, device, early)


def load(call: AttendCall) -> None:
    """Compile it."""
    import torch

    from halfbyte.kernels.cuda.attend_gluon_code import attend

    made = configure(call)
    compiled(attend, *parts(call, made, False), device=torch.device(call.device), early=True, registers=made.registers)
    load_add_up(call, made.splits)


GLUON: Final = Kernel(
    name="gluon-attend",
    bundle=AttendArgs,
    description="splits the entries among programs, and multiplies by m16n8k16; Hopper",
    refuse=refuse,
    load=load,
    bind=bind,
    cost=attend_cost,
)
