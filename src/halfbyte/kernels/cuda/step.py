"""``add_norm``, ``attend`` and ``gate`` on an NVIDIA GPU, in Triton: small programs, few of them, soon over.

They stand between products that read weights, and what a product waits for is lost. So on Hopper and later each starts
before the kernel ahead of it has ended, and lets the one behind start at once (programmatic dependent launch): that one
asks for its weights meanwhile. It is right because

- nothing is read or written before ``griddepcontrol.wait``, after which all that was ahead is over and visible; each
  program of every kernel waits, so what is ahead of the kernel ahead is over, too;
- until then lines are only asked for into L2, where every write arrives: a norm's weight, and entries of the cache.
  Positions tell which of those; where they were not written yet, others are asked for;
- the kernel behind, if it is launched to start early, also waits before it reads or writes, and any other starts after
  this one has ended.

``add_norm`` has one program for each row, which holds it in registers. ``attend`` has ``splits`` for each key head of
a sequence; block j of ``block`` entries is for split j mod splits, so that each has about the same share at every
position, and what it finds is added up in that order by the last to finish. So a result does not depend on other rows,
nor on what runs first. Weights of values are rounded to the dtype, products of the matrix units summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from halfbyte.kernels.base import ALIGNED, Kernel
from halfbyte.kernels.cuda.launch import Program, program, why_not
from halfbyte.kernels.cuda.shared import counters, in_turn, workspace
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
)

TYPES: Final = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
HOPPER: Final = 90
"""The compute capability from which on kernels may overlap."""
MOST_WIDTH: Final = 16384
MOST_DIM: Final = 256
MOST_GROUP: Final = 16
GATE_BLOCK: Final = 1024
GATE_WARPS: Final = 4

_programs: Final[dict[Any, Program]] = {}


@dataclass(frozen=True)
class Attend:
    """How ``attend`` runs.

    Args:
        splits: programs for each key head of a sequence.
        block: entries that a program takes at once.
        warps: of a program.
        stages: blocks on their way.
        ahead: blocks that are asked for before the kernel ahead has ended.
    """

    splits: int
    block: int = 32
    warps: int = 4
    stages: int = 3
    ahead: int = 4


def configure(call: AttendCall) -> Attend:
    """As many splits as fill a GPU, with at least one block each."""
    block = 32 if call.dim <= 128 and call.dtype != "float32" else 16
    wanted = max(1, 256 // (call.rows * call.kv_heads))
    splits = min(wanted, 32, max(1, -(-call.room // block)), max(1, 32768 // _together(call)))
    return Attend(splits=1 << splits.bit_length() - 1, block=block)


def add_norm_parts(dtype: str, width: int, residual: bool, capability: int) -> tuple[Any, Any, int]:
    """Signature, constants and warps; capability 0 for Triton's interpreter."""
    of = _type(dtype, capability)
    block = max(256, 1 << max(0, width - 1).bit_length())
    names = ("x", "residual", "weight", "normed", "total")
    signature = {**dict.fromkeys(names, of), "H": _int(width), "eps": "fp32"}
    constants = {"BLOCK": block, "RESIDUAL": residual, **_flags(dtype, capability)}
    return signature, constants, max(1, min(16, block // 256))


def gate_parts(dtype: str, width: int, activation: str, capability: int) -> tuple[Any, Any, int]:
    """As ``add_norm_parts``."""
    of = _type(dtype, capability)
    signature = {"gate_up": of, "out": of, "WIDTH": _int(width)}
    constants = {"BLOCK": GATE_BLOCK, "ACTIVATION": activation, **_flags(dtype, capability)}
    return signature, constants, GATE_WARPS


def attend_parts(call: AttendCall, made: Attend, capability: int) -> tuple[Any, Any]:
    """Signature and constants; capability 0 for Triton's interpreter."""
    of = _type(call.dtype, capability)
    signature = {
        "qkv": of, "cos": "*fp32:16", "sin": "*fp32:16", "positions": "*i64", "keys": of, "values": of,
        "q_norm": of, "k_norm": of, "out": of, "sums": "*fp32:16", "counts": "*i32",
        "T": "i32", "eps": "fp32", "scale": "fp32",
    }  # fmt: skip
    padded = _padded(call.dim)
    group = call.heads // call.kv_heads
    held = 32 if padded > call.dim else 64
    room = 1 << (made.splits - 1).bit_length()
    constants = {
        "D": call.dim,
        "DP": padded,
        "G": group,
        "HKV": call.kv_heads,
        "N": made.block,
        "S": made.splits,
        "SP": room,
        "CHUNK": max(1, min(room, held * 32 * made.warps // _together(call))),
        "AHEAD": made.ahead,
        "STAGES": made.stages,
        "WINDOW": 0 if call.window is None else min(call.window, call.room),
        "Q_NORM": call.q_norm,
        "K_NORM": call.k_norm,
        **_flags(call.dtype, capability),
    }
    return signature, constants


def _padded(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _together(call: AttendCall) -> int:
    """Values of a split that are added up, with the padding."""
    return (1 << (call.heads // call.kv_heads - 1).bit_length()) * _padded(call.dim)


def _type(dtype: str, capability: int) -> str:
    return f"{TYPES[dtype] if capability or dtype != 'bfloat16' else '*i16'}:16"


def _int(n: int) -> str:
    return "i32" if n % ALIGNED else "i32:16"


def _flags(dtype: str, capability: int) -> dict[str, bool]:
    return {"BITS": dtype == "bfloat16" and not capability, "EARLY": capability >= HOPPER}


def launch_add_norm(args: AddNormArgs, early: bool = True) -> None:
    """Write ``normed`` and ``total``."""
    call = args.call()
    key = "add_norm", args.x.device, call.dtype, call.width, call.residual, early
    run = _programs.get(key)
    if run is None:
        from halfbyte.kernels.cuda.step_code import add_norm

        made = add_norm_parts(call.dtype, call.width, call.residual, call.capability)
        run = _programs[key] = _made(add_norm, *made, device=args.x.device, early=early)
    residual = None if args.residual is None else args.residual
    arrays = (args.x, residual, args.weight, args.normed, args.total)
    run((call.rows, 1, 1), (*_addresses(run, arrays), call.width, args.eps))


def launch_gate(args: GateArgs, early: bool = True) -> None:
    """Write ``out``."""
    call = args.call()
    key = "gate", args.out.device, call.dtype, call.width, call.activation, early
    run = _programs.get(key)
    if run is None:
        from halfbyte.kernels.cuda.step_code import gate

        made = gate_parts(call.dtype, call.width, call.activation, call.capability)
        run = _programs[key] = _made(gate, *made, device=args.out.device, early=early)
    run((-(-call.width // GATE_BLOCK), call.rows, 1), (*_addresses(run, (args.gate_up, args.out)), call.width))


def launch_attend(args: AttendArgs, made: Attend | None = None, early: bool = True) -> None:
    """Write the cache and ``out``."""
    call = args.call()
    made = configure(call) if made is None else made
    device = args.out.device
    key = call, device, made, early
    run = _programs.get(key)
    if run is None:
        from halfbyte.kernels.cuda.step_code import attend

        signature, constants = attend_parts(call, made, call.capability)
        run = _programs[key] = _made(attend, signature, constants, made.warps, device=device, early=early)
    of_sums, of_counts = scratch_of(call, made)
    if made.splits == 1:
        sums = counts = args.out
    elif call.capability:
        sums, counts = workspace(device, of_sums), counters(device, of_counts)
    else:
        import torch

        sums, counts = torch.empty(of_sums // 4), torch.zeros(of_counts // 4, dtype=torch.int32)
    arrays = (
        args.qkv, args.cos, args.sin, args.positions, args.keys, args.values, args.q_norm, args.k_norm, args.out,
        sums, counts,
    )  # fmt: skip
    numbers = (call.room, args.eps, args.scale * 1.4426950408889634)
    with in_turn:
        run((made.splits, call.kv_heads, call.rows), (*_addresses(run, arrays), *numbers))


def scratch_of(call: AttendCall, made: Attend) -> tuple[int, int]:
    """Bytes of what splits found, and of counters."""
    if made.splits == 1:
        return 0, 0
    return 4 * made.splits * call.rows * call.heads * (call.dim + 2), 4 * call.rows * call.kv_heads


def _made(kernel: Any, signature: Any, constants: Any, warps: int, *, device: Any, early: bool) -> Program:
    constants = constants | {"EARLY": constants["EARLY"] and early}
    return program(kernel, signature, constants, device=device, warps=warps, pdl=constants["EARLY"])


def _addresses(run: Program, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of tensors; tensors where the program takes those."""
    if run.plainly:
        return arrays
    return tuple([None if a is None else a.data_ptr() for a in arrays])


def _why_not(call: StepCall, dtypes: tuple[str, ...] = tuple(TYPES)) -> list[str]:
    reasons = list(why_not(call))
    if call.dtype not in dtypes:
        reasons.append(f"takes {' or '.join(dtypes)}, not {call.dtype}")
    return reasons


def _refuse_add_norm(call: AddNormCall) -> tuple[str, ...]:
    reasons = _why_not(call)
    if call.width > MOST_WIDTH:
        reasons.append(f"takes rows of up to {MOST_WIDTH} values, not {call.width}")
    return tuple(reasons)


def _refuse_gate(call: GateCall) -> tuple[str, ...]:
    return tuple(_why_not(call))


def _refuse_attend(call: AttendCall) -> tuple[str, ...]:
    reasons = _why_not(call)
    if call.dim > MOST_DIM or call.dim % 8:
        reasons.append(f"takes heads of multiples of 8 up to {MOST_DIM} values, not {call.dim}")
    if call.heads > MOST_GROUP * call.kv_heads:
        reasons.append(f"takes up to {MOST_GROUP} query heads for a key head, not {call.heads // call.kv_heads}")
    return tuple(reasons)


def _load_add_norm(call: AddNormCall) -> None:
    _compile("add_norm", call, *add_norm_parts(call.dtype, call.width, call.residual, call.capability))


def _load_gate(call: GateCall) -> None:
    _compile("gate", call, *gate_parts(call.dtype, call.width, call.activation, call.capability))


def _load_attend(call: AttendCall) -> None:
    made = configure(call)
    _compile("attend", call, *attend_parts(call, made, call.capability), made.warps)


def _compile(name: str, call: StepCall, signature: Any, constants: Any, warps: int) -> None:
    import torch

    from halfbyte.kernels.cuda import step_code

    _made(getattr(step_code, name), signature, constants, warps, device=torch.device(call.device), early=True)


def _kernel(bundle: Any, description: str, refuse: Any, load: Any, launch: Callable[..., None], cost: Any) -> Any:
    name = f"triton-{bundle.op.replace('_', '-')}"
    return Kernel(
        name=name, bundle=bundle, description=description, refuse=refuse, load=load, launch=launch, cost=cost
    )  # fmt: skip


ADD_NORM: Final = _kernel(
    AddNormArgs, "one program for each row", _refuse_add_norm, _load_add_norm, launch_add_norm, add_norm_cost
)
GATE: Final = _kernel(GateArgs, "1024 values in a program", _refuse_gate, _load_gate, launch_gate, gate_cost)
ATTEND: Final = _kernel(
    AttendArgs, "splits the entries among programs", _refuse_attend, _load_attend, launch_attend, attend_cost
)
