"""``add_norm``, ``attend`` and ``gate`` on an NVIDIA GPU, in Triton: small programs, soon over.

They stand between products that read weights, and what a product waits for is lost. So on Hopper and later each starts
before the kernel ahead of it has ended, and lets the one behind start at once (programmatic dependent launch): that one
asks for its weights meanwhile. It is right because

- nothing is read or written before ``griddepcontrol.wait``, after which all that was ahead is over and visible; each
  program of every kernel waits, so what is ahead of the kernel ahead is over, too;
- until then lines are only asked for into L2, where every write arrives: those of a norm's weight;
- where the caller says that they are ``settled``, ``attend`` reads positions, cosines and the entries before the new
  one earlier: an ordinary launch, which starts when all that is ahead of it is over, stands between who wrote them and
  the kernel ahead;
- the kernel behind, if it is launched to start early, also waits before it reads or writes, and any other starts after
  this one has ended.

``add_norm`` has one program for each row, which holds it in registers. ``attend`` has ``splits`` for each key head of
a sequence and up to ``GROUP`` of its query heads: block j of entries is for split j mod splits, so each has about the
same share at every position. What splits find a kernel of its own adds up, in their order. So a result depends neither
on other rows nor on what runs first. All is float32 but what is read and written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from halfbyte.arrays import float_dtype
from halfbyte.kernels.base import ALIGNED, Kernel
from halfbyte.kernels.cuda.launch import Program, program, why_not
from halfbyte.kernels.cuda.shared import in_turn, workspace
from halfbyte.kernels.in_order import ROWS
from halfbyte.kernels.step import (
    AddNormArgs,
    AddNormCall,
    AttendArgs,
    AttendCall,
    GateArgs,
    GateCall,
    StepCall,
    add_norm_cost,
    attend_cost,
    gate_cost,
    why_in_rows,
)

TYPES: Final = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
HOPPER: Final = 90
"""The compute capability from which on kernels may overlap."""
MOST_WIDTH: Final = 16384
MOST_DIM: Final = 256
GROUP: Final = 4
"""Query heads of a program at the most."""
FILLED: Final = 512
"""Programs that fill a GPU."""
MOST_SPLITS: Final = 32
ADD_WARPS: Final = 4
GATE_BLOCK: Final = 1024
GATE_WARPS: Final = 4

LOG2E: Final = 1.4426950408889634


@dataclass(frozen=True)
class Attend:
    """How ``attend`` runs.

    Args:
        splits: programs for each key head of a sequence.
        entries: that a slot, some lanes of a warp, takes at once.
        warps: of a program.
        registers: of a thread, at most; None leaves it to the compiler.
    """

    splits: int
    entries: int = 4
    warps: int = 4
    registers: int | None = None


def configure(call: AttendCall) -> Attend:
    """As many splits as fill a GPU, with at least one block each."""
    block = Attend.entries * _slots(call, Attend.warps)
    pairs = call.rows * call.kv_heads * _parts(call)
    splits = min(max(1, FILLED // pairs), MOST_SPLITS, max(1, -(-call.room // block)))
    return Attend(splits=1 << splits.bit_length() - 1)


def add_norm_parts(
    dtype: str, width: int, residual: bool, capability: int, in_order: bool = False
) -> tuple[Any, Any, int]:
    """Signature, constants and warps; capability 0 for Triton's interpreter."""
    of = _type(dtype, capability)
    block = max(256, 1 << max(0, width - 1).bit_length())
    names = ("x", "residual", "weight", "normed", "total")
    signature = {**dict.fromkeys(names, of), "H": _int(width), "eps": "fp32"}
    constants = {"BLOCK": block, "RESIDUAL": residual, **_flags(dtype, capability), "ORDERS": in_order}
    return signature, constants, max(1, min(16, block // 256))


def gate_parts(dtype: str, width: int, activation: str, capability: int) -> tuple[Any, Any, int]:
    """As ``add_norm_parts``."""
    of = _type(dtype, capability)
    signature = {"gate_up": of, "out": of, "WIDTH": _int(width)}
    constants = {"BLOCK": GATE_BLOCK, "ACTIVATION": activation, **_flags(dtype, capability)}
    return signature, constants, GATE_WARPS


def attend_parts(call: AttendCall, made: Attend, capability: int, settled: bool = False) -> tuple[Any, Any, int]:
    """As ``add_norm_parts``."""
    of = _type(call.dtype, capability)
    signature = {
        "qkv": of, "cos": "*fp32:16", "sin": "*fp32:16", "positions": "*i64", "keys": of, "values": of,
        "q_norm": of, "k_norm": of, "out": of, "sums": "*fp32:16", "tops": "*fp32:16",
        "T": "i32", "eps": "fp32", "scale": "fp32",
    }  # fmt: skip
    group = call.heads // call.kv_heads
    constants = {
        "D": call.dim,
        "DP": _padded(call.dim),
        "G": group,
        "GROUP": -(-group // _parts(call)),
        "HKV": call.kv_heads,
        "R": _slots(call, made.warps),
        "W": made.entries,
        "S": made.splits,
        "WINDOW": 0 if call.window is None else min(call.window, call.room),
        "Q_NORM": call.q_norm,
        "K_NORM": call.k_norm,
        **_flags(call.dtype, capability),
        "SETTLED": settled,
    }
    return signature, constants, made.warps


def add_up_parts(call: AttendCall, shares: int, capability: int) -> tuple[Any, Any, int]:
    """As ``add_norm_parts``."""
    signature = {"sums": "*fp32:16", "tops": "*fp32:16", "out": _type(call.dtype, capability)}
    constants = {
        "D": call.dim,
        "DP": _padded(call.dim),
        "S": shares,
        "SP": 1 << (shares - 1).bit_length(),
        **_flags(call.dtype, capability),
        "ORDERS": call.heads if call.in_order else 0,
    }
    return signature, constants, ADD_WARPS if shares <= MOST_SPLITS else 2 * ADD_WARPS


def _padded(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _parts(call: AttendCall) -> int:
    """Programs among which the query heads of a key head are shared."""
    return -(-call.heads // (call.kv_heads * GROUP))


def _slots(call: AttendCall, warps: int) -> int:
    """Of a program: an entry is read by lanes of 16 bytes each."""
    lanes = _padded(call.dim) * float_dtype(call.dtype).itemsize // ALIGNED
    return max(1, 32 * warps // lanes)


def _type(dtype: str, capability: int) -> str:
    return f"{TYPES[dtype] if capability or dtype != 'bfloat16' else '*i16'}:16"


def _int(n: int) -> str:
    return "i32" if n % ALIGNED else "i32:16"


def _flags(dtype: str, capability: int) -> dict[str, bool]:
    return {"BITS": dtype == "bfloat16" and not capability, "EARLY": capability >= HOPPER}


def bind_add_norm(args: AddNormArgs, early: bool = True) -> Callable[..., None]:
    """What writes ``normed`` and ``total``."""
    from halfbyte.kernels.cuda.step_code import add_norm

    call = args.call()
    made = add_norm_parts(call.dtype, call.width, call.residual, call.capability, call.in_order)
    run = compiled(add_norm, *made, device=args.x.device, early=early)
    grid, width, plain = (call.rows, 1, 1), call.width, bool(run.plainly)

    def bound(x: Any, residual: Any, weight: Any, eps: float, normed: Any, total: Any) -> None:
        run(grid, (*_pointers(plain, x, residual, weight, normed, total), width, eps))

    return bound


def bind_gate(args: GateArgs, early: bool = True) -> Callable[..., None]:
    """What writes ``out``."""
    from halfbyte.kernels.cuda.step_code import gate

    call = args.call()
    made = gate_parts(call.dtype, call.width, call.activation, call.capability)
    run = compiled(gate, *made, device=args.out.device, early=early)
    grid, width, plain = (-(-call.width // GATE_BLOCK) * call.rows, 1, 1), call.width, bool(run.plainly)

    def bound(gate_up: Any, out: Any) -> None:
        run(grid, (*_pointers(plain, gate_up, out), width))

    return bound


def bind_attend(args: AttendArgs, made: Attend | None = None, early: bool = True) -> Callable[..., None]:
    """What writes the cache and ``out``."""
    from halfbyte.kernels.cuda.step_code import attend

    call = args.call()
    made = configure(call) if made is None else made
    parts = attend_parts(call, made, call.capability, args.settled)
    run = compiled(attend, *parts, device=args.out.device, early=early, registers=made.registers)
    return in_shares(
        call, run, (made.splits, call.kv_heads * _parts(call), call.rows), made.splits, args.out.device, early
    )


def in_shares(
    call: AttendCall, run: Program, grid: tuple[int, int, int], shares: int, device: Any, early: bool = True
) -> Callable[..., None]:
    """What runs a kernel, and adds up what it found for each head of a sequence in so many shares."""
    from halfbyte.kernels.cuda.step_code import add_up

    then = None
    if shares > 1:
        then = compiled(add_up, *add_up_parts(call, shares, call.capability), device=device, early=early)
    plain, room = bool(run.plainly), call.room
    found, rows = shares * call.rows * call.heads, (call.rows * call.heads, 1, 1)
    first, nbytes = found * call.dim, 4 * found * (call.dim + 2)

    def bound(
        qkv: Any, cos: Any, sin: Any, positions: Any, keys: Any, values: Any, q_norm: Any, k_norm: Any, eps: float,
        scale: float, out: Any,
    ) -> None:  # fmt: skip
        sums = tops = out
        if then is not None:
            sums = _memory(device, nbytes)
            tops = sums[first:]
        arrays = _pointers(plain, qkv, cos, sin, positions, keys, values, q_norm, k_norm, out, sums, tops)
        with in_turn:
            run(grid, (*arrays, room, eps, scale * LOG2E))
            if then is not None:
                then(rows, _pointers(plain, sums, tops, out))

    return bound


def _memory(device: Any, nbytes: int) -> Any:
    """f32 for what splits find."""
    import torch

    if device.type != "cuda":
        return torch.empty(nbytes // 4)
    return workspace(device, nbytes).view(torch.float32)


def compiled(
    kernel: Any, signature: Any, constants: Any, warps: int, *, device: Any, early: bool, registers: int | None = None
) -> Program:
    """A kernel as a program; it starts early where it can and may."""
    constants = constants | {"EARLY": constants["EARLY"] and early}
    pdl = constants["EARLY"]
    return program(kernel, signature, constants, device=device, warps=warps, pdl=pdl, maxnreg=registers)


def _pointers(plain: bool, *arrays: Any) -> tuple[Any, ...]:
    """Addresses; tensors where the program takes those."""
    return arrays if plain else tuple([None if a is None else a.data_ptr() for a in arrays])


def _why_not(call: StepCall, dtypes: tuple[str, ...] = tuple(TYPES)) -> list[str]:
    reasons = list(why_not(call))
    if call.dtype not in dtypes:
        reasons.append(f"takes {' or '.join(dtypes)}, not {call.dtype}")
    return reasons


def why_more(call: StepCall) -> tuple[str, ...]:
    """Why what can write in order declines a call."""
    many = call.in_order and call.rows > ROWS
    return (f"has room for {ROWS} tokens in order, not {call.rows}",) if many else ()


def _refuse_add_norm(call: AddNormCall) -> tuple[str, ...]:
    reasons = _why_not(call)
    if call.width > MOST_WIDTH:
        reasons.append(f"takes rows of up to {MOST_WIDTH} values, not {call.width}")
    return *reasons, *why_more(call)


def _refuse_gate(call: GateCall) -> tuple[str, ...]:
    return tuple(_why_not(call))


def _refuse_attend(call: AttendCall) -> tuple[str, ...]:
    reasons = _why_not(call)
    if call.dim > MOST_DIM or call.dim % 8:
        reasons.append(f"takes heads of multiples of 8 up to {MOST_DIM} values, not {call.dim}")
    return *reasons, *why_in_rows(call)


def _load_add_norm(call: AddNormCall) -> None:
    _compile("add_norm", call, *add_norm_parts(call.dtype, call.width, call.residual, call.capability, call.in_order))


def _load_gate(call: GateCall) -> None:
    _compile("gate", call, *gate_parts(call.dtype, call.width, call.activation, call.capability))


def _load_attend(call: AttendCall) -> None:
    made = configure(call)
    _compile("attend", call, *attend_parts(call, made, call.capability))
    load_add_up(call, made.splits)


def load_add_up(call: AttendCall, shares: int) -> None:
    """Compile what adds up so many shares."""
    if shares > 1:
        _compile("add_up", call, *add_up_parts(call, shares, call.capability))


def _compile(name: str, call: StepCall, signature: Any, constants: Any, warps: int) -> None:
    import torch

    from halfbyte.kernels.cuda import step_code

    compiled(getattr(step_code, name), signature, constants, warps, device=torch.device(call.device), early=True)


def _kernel(bundle: Any, description: str, refuse: Any, load: Any, bind: Callable[..., Any], cost: Any) -> Any:
    return Kernel(
        name=f"triton-{bundle.op.replace('_', '-')}",
        bundle=bundle,
        description=description,
        refuse=refuse,
        load=load,
        bind=bind,
        cost=cost,
    )


ADD_NORM: Final = _kernel(
    AddNormArgs, "one program for each row", _refuse_add_norm, _load_add_norm, bind_add_norm, add_norm_cost
)
GATE: Final = _kernel(GateArgs, "1024 values in a program", _refuse_gate, _load_gate, bind_gate, gate_cost)
ATTEND: Final = _kernel(
    AttendArgs, "splits the entries among programs", _refuse_attend, _load_attend, bind_attend, attend_cost
)
