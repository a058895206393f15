"""``grouped`` on NVIDIA GPUs from sm_80 on, layout ``fragments``: the second product of ``triton-experts``, alone.

A token is a slot of its own. Which expert has which tokens the device finds from the counts: nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import ALIGNED, Kernel
from halfbyte.kernels.cuda import fragments
from halfbyte.kernels.cuda.experts_triton import FEW, ExpertsTriton, compiled, configured, constants, types
from halfbyte.kernels.cuda.fragments import TILE, TYPES
from halfbyte.kernels.cuda.launch import Program, why_not
from halfbyte.kernels.cuda.lists import WORD, Lists, Numbers, bind_runs
from halfbyte.kernels.cuda.shared import in_turn, workspace
from halfbyte.kernels.grouped import GroupedArgs, GroupedCall, grouped_cost
from halfbyte.layouts import Fragments
from halfbyte.layouts.fragments import STEPS
from halfbyte.numerics import BLOCK

NAME: Final = "triton-grouped"


def configure(call: GroupedCall) -> ExpertsTriton:
    """The configuration for a call, by the tokens of an expert on average."""
    return configured(call.rows / max(1, min(call.shape[0], call.rows)))


def lists_of(call: GroupedCall, made: ExpertsTriton) -> Lists:
    """The lists of a call's tokens."""
    experts = call.shape[0]
    return Lists(call.rows, 1, made.size, Numbers(experts, tuple(range(experts))), call.counts)


def _program(call: GroupedCall, made: ExpertsTriton, bias: str, whole: bool, device: Any) -> Program:
    """``whole``: rows of out begin at multiples of 16 bytes, as out does."""
    out = call.out_dtype if call.device == "cuda" else "float32"
    width = "i32" if call.shape[1] % ALIGNED else "i32:16"
    found = {
        "PART": 1,
        "ACTIVATION": None,
        "GATED": False,
        "UP_FIRST": False,
        "LIMIT": None,
        "PER_ROW": call.per_row,
        "BIAS": call.bias,
    }
    if made.size == FEW:
        found |= {"LISTED": True, **Numbers(1, (0,)).constants()}
    signature = types(made, call.dtype, f"*{TYPES[out]}" + ":16" * whole, bias, "int32", width)
    return compiled(call, made, signature, found | constants(call, made, call.shape[-1]), device)


def product_of(args: GroupedArgs, made: ExpertsTriton) -> Callable[[Any, tuple[Any, ...], Any], None]:
    """The launch behind the lists; in Triton's interpreter of tensors for addresses.

    Returns:
        A function of x, the addresses of blocks, slots and count, and out.
    """
    call, device, few = args.call(), args.x.device, made.size == FEW
    bias = "float32" if args.bias is None else dtype_name(args.bias.dtype)
    whole = call.shape[1] % ALIGNED == 0
    programs: dict[bool, Program | None] = {False: None, True: None} | {
        whole: _program(call, made, bias, whole, device)
    }
    plain = device.type != "cuda"

    def at(a: Any) -> Any:
        return a if plain or a is None else a.data_ptr()

    codes, scales, scale2 = (at(args.weight.buffers()[name]) for name in ("codes", "scales", "scale2"))
    added, (_, n, k) = at(args.bias), call.shape
    grid = (-(-n // (TILE * made.stripes)), lists_of(call, made).most, 1)

    def run(x: Any, lists: tuple[Any, ...], out: Any) -> None:
        fits = whole and not out.data_ptr() % ALIGNED
        launch = programs[fits]
        if launch is None:
            launch = programs[fits] = _program(call, made, bias, fits, device)
        routing = (None, None, *lists, None) if few else lists
        launch(grid, (codes, scales, at(fragments.aligned(x)), scale2, added, at(out), *routing, n, k, n))

    return run


def bind(args: GroupedArgs, made: ExpertsTriton | None = None) -> Callable[[Any, Any, Any], None]:
    """Both launches; ``made`` instead of the configuration chosen."""
    call, device = args.call(), args.x.device
    made = configure(call) if made is None else made
    lies, product = lists_of(call, made), product_of(args, made)
    runs = bind_runs(lies, device, call.capability)

    def run(x: Any, counts: Any, out: Any) -> None:
        with in_turn:
            base = workspace(device, lies.nbytes).data_ptr()
            runs(counts, base)
            product(x, tuple([base + WORD * word for word in (lies.blocks, lies.slots, lies.count)]), out)

    return run


def refuse(call: GroupedCall) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = list(why_not(call))
    needed = Fragments(call.dtype if call.dtype in STEPS else "bfloat16")
    if call.layout != needed:
        reasons.append(f"reads the layout {needed.key}, not {call.layout.key}")
    if call.dtype not in STEPS:
        reasons.append(f"takes {' or '.join(STEPS)} activations, not {call.dtype}")
    if call.shape[-1] % BLOCK:
        reasons.append(f"takes a K that is a multiple of {BLOCK}, not {call.shape[-1]}")
    if call.pre_scale:
        reasons.append("multiplies activations as they come, without a pre_scale")
    return tuple(reasons)


def compile_as(call: GroupedCall, made: ExpertsTriton) -> None:
    """Compile it in a configuration."""
    import torch

    _program(call, made, "float32", call.shape[1] % ALIGNED == 0, torch.device(call.device))


TRITON: Final = Kernel(
    name=NAME,
    bundle=GroupedArgs,
    description="blocks of tokens of one expert, in plain Triton; NVIDIA GPUs from sm_80 on",
    refuse=refuse,
    cost=grouped_cost,
    bind=bind,
    configure=configure,
    compile=compile_as,
)
