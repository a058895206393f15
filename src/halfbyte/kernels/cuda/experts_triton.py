"""``experts`` on NVIDIA GPUs from sm_80 on, layout ``fragments``, for any number of slots an expert.

Two products between lists and a sum (see ``halfbyte.kernels.cuda.lists``); one token needs no lists. A program computes
some stripes of 16 results of a block of slots, which are of one expert. With a gate it has as many of up, so that the
activation is its own, and writes h. Blocks of 8 slots are multiplied as ``triton-decode`` does it, larger ones as
``triton-gemm``; what is said there of the order of sums and of their error holds here. A slot's results depend on no
other slot, but for the size of the blocks, which follows the number of tokens.

Each launch starts early, and lets the one behind start early: see ``halfbyte.kernels.cuda.step``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import Call, Kernel
from halfbyte.kernels.cuda import fragments, refused
from halfbyte.kernels.cuda.experts import Layer, declined, slots_each, table_of
from halfbyte.kernels.cuda.fragments import TILE, TYPES, UNIT
from halfbyte.kernels.cuda.launch import Program, program
from halfbyte.kernels.cuda.lists import HOPPER, IDS, Numbers, most_blocks
from halfbyte.kernels.experts import ExpertsArgs, ExpertsCall, experts_cost
from halfbyte.layouts.fragments import FACTOR

NAME: Final = "triton-experts"
FEW: Final = 8
"""Slots of the blocks that are multiplied as ``triton-decode`` does it."""


@dataclass(frozen=True)
class ExpertsTriton:
    """How the products run.

    Args:
        size: slots of a block, 8, 16, 32 or 64.
        warps: of a program.
        stripes: of 16 results, of a program, of gate and up together: an even number.
        units: of 64 k, of a step; with blocks of 8 one for each warp.
        stages: steps of loads that are on their way.
    """

    size: int = FEW
    warps: int = 4
    stripes: int = 2
    units: int = 1
    stages: int = 2


ONE: Final = ExpertsTriton(FEW, 4, 2, 1, 2)
"""For one token."""
CONFIGURATIONS: Final = (
    ExpertsTriton(FEW, 2, 2, 1, 2),
    ExpertsTriton(16, 4, 4, 2, 4),
    ExpertsTriton(32, 4, 8, 2, 3),
    ExpertsTriton(64, 4, 8, 1, 4),
)
"""Near the fastest of those tried by hand on an H200, with 128 experts of 2048 x 768 and 32 of 7168 x 2048."""
MOST_SLOTS: Final = (6.0, 10.0, 32.0)
"""Of an expert that has any, on average: up to which each of those but the last is taken."""


def configured(each: float) -> ExpertsTriton:
    """The configuration for so many slots of an expert: the smallest blocks that hold those of most experts."""
    found = zip(CONFIGURATIONS, MOST_SLOTS, strict=False)
    return next((made for made, most in found if each <= most), CONFIGURATIONS[-1])


def configure(call: ExpertsCall) -> ExpertsTriton:
    """The configuration for a call."""
    return ONE if call.rows == 1 else configured(slots_each(call))


def listless(call: ExpertsCall, made: ExpertsTriton) -> bool:
    """Whether there are no lists: a slot is a block."""
    return call.rows == 1 and made.size == FEW


def types(made: ExpertsTriton, x: str, out: str, bias: str, ids: str, width: str = "i32:16") -> dict[str, str]:
    """The signature of a product, by the types of x, out and bias, of ids, and of N and WIDTH."""
    few = made.size == FEW
    return {
        "codes": "*i32:16", "scales": "*i16:16" if few else "*i32:16", "x": f"*{TYPES[x]}:16", "scale2": "*fp32",
        "bias": f"*{TYPES[bias]}", "out": out,
        **({"indices": IDS[ids], "places": "*i32"} if few else {}),
        "blocks": "*i32:16", "slots": "*i32:16", "count": "*i32:16",
        **({"refused": "*i64"} if few else {}),
        "N": width, "K": "i32:16", "WIDTH": width,
    }  # fmt: skip


def constants(call: Call, made: ExpertsTriton, k: int) -> dict[str, Any]:
    """The constants of a product over K, but for what its results are of."""
    few = made.size == FEW
    found = {
        "SIZE": made.size,
        "TAIL": k % (UNIT * (made.warps * made.stages if few else made.units)) != 0,
        "EARLY": call.capability >= HOPPER,
        "HALF16": call.dtype == "float16",
        "FACTOR": FACTOR,
        "UP": call.device != "cuda",
        **fragments.decoding(call.dtype),
    }
    if few:
        return found | {"W": made.warps, "R": made.stripes, "D": made.stages, "WIDE": fragments.wide()}
    narrow = TILE * made.stripes * made.size <= 16 * 32 * made.warps
    hidden = call.capability == HOPPER and (narrow or not fragments.wide())
    return found | {"T": made.stripes, "U": made.units, "STAGES": made.stages, "HIDDEN": hidden}


def compiled(call: Call, made: ExpertsTriton, signature: Any, constants: dict[str, Any], device: Any) -> Program:
    """A product for a device."""
    from halfbyte.kernels.cuda import experts_triton_code as code

    kernel = code.few if made.size == FEW else code.many
    ordered = {name: constants[name] for name in kernel.arg_names if name in constants}
    return program(kernel, signature, ordered, device=device, warps=made.warps, pdl=call.capability >= HOPPER)


def parts(call: ExpertsCall, made: ExpertsTriton, bias: str, *, down: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Signature and constants of a product; on the CPU for Triton's interpreter."""
    mixture = call.mixture
    h = call.dtype if call.device == "cuda" else "float32"
    x, out = (h, "float32") if down else (call.dtype, h)
    gated = mixture.gated and not down
    found = {
        "PART": 1 if down else call.top,
        "ACTIVATION": None if down else mixture.activation,
        "GATED": gated,
        "UP_FIRST": gated and mixture.gate_up_order == "up_first",
        "LIMIT": mixture.limit if gated else None,
        "PER_ROW": call.down_per_row if down else call.per_row,
        "BIAS": call.down_bias if down else call.bias,
    }
    if made.size == FEW:
        found |= {"LISTED": not listless(call, made), **Numbers.of(mixture).constants()}
    signature = types(made, x, f"*{TYPES[out]}:16", bias, call.indices)
    return signature, found | constants(call, made, call.inner if down else call.shape[-1])


def programs(
    call: ExpertsCall, made: ExpertsTriton, device: Any, biases: tuple[str, str] = ("float32", "float32")
) -> tuple[Program, Program]:
    """Both products, compiled for a device."""
    one, two = (
        compiled(call, made, *parts(call, made, bias, down=down), device)
        for bias, down in zip(biases, (False, True), strict=True)
    )
    return one, two


def products_of(args: ExpertsArgs, made: ExpertsTriton) -> Callable[..., None]:
    """What ``Layer`` takes: both launches; in Triton's interpreter of tensors for addresses."""
    call, device, few = args.call(), args.hidden.device, made.size == FEW
    biases = [args.gate_up_bias, args.down_bias]
    kinds = ["float32" if b is None else dtype_name(b.dtype) for b in biases]
    first, second = programs(call, made, device, (kinds[0], kinds[1]))
    plain = bool(first.plainly)

    def at(a: Any) -> Any:
        return a if plain or a is None else a.data_ptr()

    stacks = [
        tuple(at(stack.buffers()[name]) for name in ("codes", "scales", "scale2"))
        for stack in (args.gate_up, args.down)
    ]
    added = [at(b) for b in biases]
    width, inner, n = call.shape[-1], call.inner, call.shape[-2]
    blocks = call.rows * call.top
    if not listless(call, made):
        blocks = most_blocks(blocks, len(call.mixture.local), made.size)
    each = TILE * made.stripes
    grids = (-(-inner // (each // call.mixture.parts)), blocks, 1), (-(-width // each), blocks, 1)
    table = at(table_of(args)) if few and listless(call, made) else None
    told = at(refused.word(device)) if few and not plain else None
    nowhere = (None, None, None)

    def products(hidden: Any, indices: Any, weights: Any, out: Any, lists: Any, h: Any, y: Any) -> None:
        routing = (at(indices), table, *(lists or nowhere), told) if few else lists
        first(grids[0], (*stacks[0][:2], at(hidden), stacks[0][2], added[0], h, *routing, n, width, inner))
        second(grids[1], (*stacks[1][:2], h, stacks[1][2], added[1], y, *routing, width, inner, width))

    return products


def refuse(call: ExpertsCall) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = list(declined(call))
    if call.precision != "exact":
        reasons.append(f"computes exactly, not in {call.precision}")
    return tuple(reasons)


def bind(args: ExpertsArgs, made: ExpertsTriton | None = None) -> Callable[[Any, Any, Any, Any], None]:
    """A call's launches; ``made`` instead of the configuration chosen."""
    call = args.call()
    made = configure(call) if made is None else made
    return Layer(args, 0 if listless(call, made) else made.size, products_of(args, made), adds=False)


def compile_as(call: ExpertsCall, made: ExpertsTriton) -> None:
    """Compile it in a configuration."""
    import torch

    programs(call, made, torch.device(call.device))


TRITON: Final = Kernel(
    name=NAME,
    bundle=ExpertsArgs,
    description="two products between lists and a sum, in plain Triton; NVIDIA GPUs from sm_80 on",
    refuse=refuse,
    cost=experts_cost,
    bind=bind,
    configure=configure,
    compile=compile_as,
)
