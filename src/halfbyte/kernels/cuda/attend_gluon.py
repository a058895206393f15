"""``attend`` on Hopper for D a multiple of 64 and up to 8 query heads of a key head: products by the matrix units.

A program of W warps takes blocks of 16 W entries, 16 each warp, in registers; its warps know nothing of each other, and
each share of W splits is added up. In all else it is as that of ``halfbyte.kernels.cuda.step``. Weights of values are
rounded to the dtype before they multiply, and their sum is of those that are not; so with p the position

    |error| <= (2 s + (p + 128) 2^-23 + h) * sum(weight * |v|) + h * |out|

where h is half a unit of the dtype, and s the largest rounding error of a score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from halfbyte.kernels.base import Kernel
from halfbyte.kernels.cuda.launch import why_not
from halfbyte.kernels.cuda.shared import counters, in_turn
from halfbyte.kernels.cuda.step import LOG2E, TYPES, _memory, _pointers, add_up_parts, compiled
from halfbyte.kernels.step import AttendArgs, AttendCall, attend_cost

DTYPES: Final = ("bfloat16", "float16")
MOST_GROUP: Final = 8
DIMS: Final = (64, 128)
ENTRIES: Final = 16
"""Of a warp at once."""
AT_ONCE: Final = {4: 396, 8: 132}
"""Programs of so many warps that the registers of an H200 hold."""
FEW_PAIRS: Final = 32
"""Key heads of all sequences for which programs have 8 warps."""
FEW_SPLITS: Final = 4


@dataclass(frozen=True)
class Attend:
    """How it runs.

    Args:
        splits: programs for each key head of a sequence.
        warps: of a program.
        ahead: whether a warp's next entries are on their way while it computes.
        asked: blocks that are asked for into L2 before they are read.
        fold: 0: shares of warps are added up; 1: those of programs; 2: by the last program.
        registers: of a thread, at most; None leaves it to the compiler.
    """

    splits: int
    warps: int = 4
    ahead: bool = False
    asked: int = 0
    fold: int = 0
    registers: int | None = None


def configure(call: AttendCall) -> Attend:
    """As many splits as are on a GPU at once, with a block each and, beyond ``FEW_SPLITS``, four."""
    pairs = call.rows * call.kv_heads
    warps = 8 if pairs <= FEW_PAIRS else 4
    blocks = -(-call.room // (ENTRIES * warps))
    splits = min(AT_ONCE[warps] // pairs, blocks, max(FEW_SPLITS, blocks // 4))
    return Attend(splits=1 << max(1, splits).bit_length() - 1, warps=warps)


def parts(call: AttendCall, made: Attend, settled: bool, passengers: int = 0, late: bool = False) -> tuple[Any, Any, int]:
    """Signature, constants and warps."""
    of = f"{TYPES[call.dtype]}:16"
    signature = {
        "qkv": of, "cos": "*fp32:16", "sin": "*fp32:16", "positions": "*i64", "keys": of, "values": of,
        "q_norm": of, "k_norm": of, "out": of, "sums": "*fp32:16", "tops": "*fp32:16", "counts": "*i32", "pieces": "*i64",
        "T": "i32", "eps": "fp32", "scale": "fp32", "B": "i32", "COUNT": "i32",
    }  # fmt: skip
    constants = {
        "D": call.dim,
        "G": call.heads // call.kv_heads,
        "HKV": call.kv_heads,
        "S": made.splits,
        "WINDOW": 0 if call.window is None else min(call.window, call.room),
        "Q_NORM": call.q_norm,
        "K_NORM": call.k_norm,
        "AHEAD": made.ahead,
        "ASKED": made.asked,
        "FOLD": made.fold,
        "PASS": passengers > 0,
        "LATE": late,
        "EARLY": True,
        "SETTLED": settled,
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
    return tuple(reasons)


def bind(
    args: AttendArgs, made: Attend | None = None, early: bool = True, pieces: Any = None, programs: int = 0,
    late: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """What writes the cache and ``out``."""
    from halfbyte.kernels.cuda.attend_gluon_code import attend
    from halfbyte.kernels.cuda.step_code import add_up

    call = args.call()
    made = configure(call) if made is None else made
    device = args.out.device
    of = parts(call, made, args.settled, programs, late)
    run = compiled(attend, *of, device=device, early=early, registers=made.registers)
    pairs = call.kv_heads * call.rows
    grid = made.splits * pairs + programs, 1, 1
    shares = made.splits * (1 if made.fold else made.warps)
    then = None
    if shares > 1 and made.fold < 2:
        then = compiled(add_up, *add_up_parts(call, shares, call.capability), device=device, early=early)
    heads = pairs * 8 if made.fold == 2 else call.rows * call.heads
    found, rows = shares * heads, (call.rows * call.heads, 1, 1)
    first, nbytes = found * call.dim, 4 * found * (call.dim + 2)
    plain, room, b = bool(run.plainly), call.room, call.rows
    at, count = (None, 0) if pieces is None else (pieces, len(pieces))

    def bound(
        qkv: Any, cos: Any, sin: Any, positions: Any, keys: Any, values: Any, q_norm: Any, k_norm: Any, eps: float,
        scale: float, out: Any,
    ) -> None:  # fmt: skip
        sums = tops = counts = out
        if shares > 1:
            sums = _memory(device, nbytes)
            tops = sums[first:]
        if made.fold == 2 and shares > 1:
            counts = counters(device, 4 * pairs)
        arrays = _pointers(plain, qkv, cos, sin, positions, keys, values, q_norm, k_norm, out, sums, tops, counts, at)
        with in_turn:
            run(grid, (*arrays, room, eps, scale * LOG2E, b, count))
            if then is not None:
                then(rows, _pointers(plain, sums, tops, out))

    return bound


def load(call: AttendCall) -> None:
    """Compile it."""
    import torch

    from halfbyte.kernels.cuda.attend_gluon_code import attend

    made = configure(call)
    compiled(attend, *parts(call, made, False), device=torch.device(call.device), early=True, registers=made.registers)


GLUON: Final = Kernel(
    name="gluon-attend",
    bundle=AttendArgs,
    description="splits the entries among programs, and multiplies by m16n8k16; Hopper",
    refuse=refuse,
    load=load,
    bind=bind,
    cost=attend_cost,
)
