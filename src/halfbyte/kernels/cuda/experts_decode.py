"""``experts`` for few slots an expert on Hopper, layout ``fragments``: weights are read once, and decoded in registers.

A program computes ``tiles`` times 16 results of up to 8 slots of one expert, as ``decode_gluon`` does those of up to 8
tokens: what is said there of the order of sums and of their error holds here. A slot's results depend on no other slot,
and those of a token are added in the order of its slots. So equal calls give equal bits. Another number of tokens, or
a routing that is settled, may take another configuration, which adds the terms of a product in another order.

Slots are listed by expert first and added at the end, in launches of their own. One token has the two products alone:
a program of the first takes a slot and reads its expert's number, and one of the second has all slots, each in a column
of its own of the matrix unit, and adds them.

What routing there is, is known only when the kernel ahead is over: the first product asks for no weight before. The
second one asks for its first weights while the first one ends; see ``halfbyte.kernels.cuda.experts``. Where all weights
of a token's experts fit into the shared memory of the multiprocessors, it asks for all of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import Kernel
from halfbyte.kernels.cuda import experts, refused
from halfbyte.kernels.cuda.decode_gluon import TILE, UNIT
from halfbyte.kernels.cuda.experts import Layer, slots_each, table_of
from halfbyte.kernels.cuda.fragments import TYPES, decode_code, scale_code
from halfbyte.kernels.cuda.launch import Program, program
from halfbyte.kernels.cuda.lists import Numbers, most_blocks
from halfbyte.kernels.experts import ExpertsArgs, ExpertsCall, experts_cost
from halfbyte.layouts.fragments import FACTOR

NAME: Final = "gluon-experts-decode"
COLUMNS: Final = 8
"""Slots of a block."""
MOST_TOP: Final = 32
_ALL_WARPS: Final = 2112
"""Of a launch; with fewer, an H200's memory has too little to do."""
_MULTIPROCESSORS: Final = 132
_HELD_BYTES: Final = 200 << 10
"""Of weights in the shared memory of a multiprocessor, at most."""


@dataclass(frozen=True)
class Product:
    """How a product runs; every configuration gives right results, and those with the same ``warps`` the same ones.

    Args:
        warps: of a program, among which k is split.
        tiles: of 16 results, of a program; with a gate it has as many of each half.
        ahead: units of each warp and tile that are on their way.
        unroll: units of a warp, of all its tiles, at most, that are not a loop.
        x_ahead: units of each warp of activations that are on their way, where there are lists.
        registers: of a thread, at most; None leaves it to the compiler.
    """

    warps: int = 4
    tiles: int = 1
    ahead: int = 3
    unroll: int = 32
    x_ahead: int = 0
    registers: int | None = None


@dataclass(frozen=True)
class Held:
    """How a product of one token runs whose programs have all their weights in shared memory, 16 results each.

    Args:
        warps: of a program, among which k is split; of down first the slots are, and there are as many at least.
        steps: units of each warp that are waited for together.
        registers: as of ``Product``.
    """

    warps: int = 4
    steps: int = 8
    registers: int | None = None


@dataclass(frozen=True)
class ExpertsDecode:
    """How both run.

    Args:
        first: gate_up.
        second: down.
        settled: gate_up where the routing of one token is settled; None for ``first``.
        together: slots of a token, at most, that a program of the second multiplies before it adds them.
        parts: of the warps of such a program, each of which takes another of those slots.
    """

    first: Product | Held = field(default_factory=Product)
    second: Product | Held = field(default_factory=Product)
    settled: Product | Held | None = None
    together: int = 8
    parts: int = 1


def weights_of(which: str, bias: str, x: str, out: str) -> dict[str, str]:
    """The types of the device code's first arguments; ``which`` names the activations."""
    return {
        "codes_ptr": "*i32:16", "scales_ptr": "*i16:16", "scale2_ptr": "*fp32", which: f"*{TYPES[x]}:16",
        "bias_ptr": f"*{TYPES[bias]}", "out_ptr": f"*{TYPES[out]}",
    }  # fmt: skip


def decoding(dtype: str, *, per_row: bool, bias: bool) -> dict[str, Any]:
    """The constants that all of the device code has."""
    return {
        "PER_ROW": per_row,
        "BIAS": bias,
        "DECODE": decode_code(dtype),
        "SCALE": scale_code(dtype),
        "FACTOR": FACTOR,
        "KEEP": "evict_first",
    }


def tiles_of(rows: int, made: Product | Held) -> int:
    """Of a program: as configured, or what a narrow product has."""
    return 1 if isinstance(made, Held) else min(made.tiles, 1 << max(1, -(-rows // TILE)).bit_length() - 1)


def programs_of(rows: int, made: Product | Held) -> int:
    """Of a block, for so many results."""
    return -(-rows // (TILE * tiles_of(rows, made)))


def ahead_of(k: int, tiles: int, made: Product) -> dict[str, int]:
    """The constants of a product with lists that say what is on its way, and what is a loop."""
    ahead, loops = depth(k, tiles, made)
    return {"D": ahead, "L": loops, "X_AHEAD": min(made.x_ahead, ahead), "NB": COLUMNS}


def depth(k: int, tiles: int, made: Product) -> tuple[int, int]:
    """Units of each warp and tile ahead, and how often as many are a loop."""
    units = -(-k // UNIT)
    steps = -(-units // made.warps)
    ahead = min(made.ahead, steps)
    return ahead, max(0, k // UNIT // made.warps // ahead - 1) if steps * tiles > made.unroll else 0


def first_parts(call: ExpertsCall, bias: str, made: Product, settled: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """The signature and the constants of gate_up."""
    mixture, numbers, one = call.mixture, Numbers.of(call.mixture), listless(call)
    tiles = mixture.parts * tiles_of(call.inner, made)
    k = call.shape[-1]
    constants = {
        "N": call.shape[-2], "PROGRAMS": programs_of(call.inner, made), "K": k, "TOP": call.top, "R": tiles,
        **({"D": depth(k, tiles, made)[0], "ALL": _whole(numbers)} if one else ahead_of(k, tiles, made)),
        **decoding(call.dtype, per_row=call.per_row, bias=call.bias),
        "ACTIVATION": mixture.activation, "GATED": mixture.gated, "UP_FIRST": mixture.gate_up_order == "up_first",
        "LIMIT": mixture.limit, **(numbers.constants() if one else {}), "EARLY": settled,
    }  # fmt: skip
    lists = ("blocks_ptr", "slots_ptr", "count_ptr")
    routing = {"indices_ptr": _ids(call), "places_ptr": "*i32"} if one else dict.fromkeys(lists, "*i32")
    types = weights_of("x_ptr", bias, call.dtype, call.dtype) | routing
    return types, constants


def second_parts(call: ExpertsCall, bias: str, made: Product) -> tuple[dict[str, str], dict[str, Any]]:
    """The same of down with lists."""
    tiles = tiles_of(call.shape[-1], made)
    constants = {
        "N": call.shape[-1], "PROGRAMS": programs_of(call.shape[-1], made), "K": call.inner, "TOP": 1, "R": tiles,
        **ahead_of(call.inner, tiles, made),
        **decoding(call.dtype, per_row=call.down_per_row, bias=call.down_bias),
        "ACTIVATION": None, "GATED": False, "UP_FIRST": False, "LIMIT": None, "EARLY": True,
    }  # fmt: skip
    types = weights_of("x_ptr", bias, call.dtype, "float32")
    types |= dict.fromkeys(("blocks_ptr", "slots_ptr", "count_ptr"), "*i32")
    return types, constants


def summed_parts(
    call: ExpertsCall, bias: str, second: Product, together: int = 1, parts: int = 1
) -> tuple[dict[str, str], dict[str, Any]]:
    """The same of down where it adds the slots of a token."""
    numbers = Numbers.of(call.mixture)
    parts = min(parts, second.warps)
    group = max(1, min(together, call.top + parts - 1) // parts) * parts
    units = -(-call.inner // UNIT)
    steps = group // parts * -(-units // (second.warps // parts))
    constants = {
        "N": call.shape[-1], "PROGRAMS": programs_of(call.shape[-1], second),
        "K": call.inner, "TOP": call.top, "R": tiles_of(call.shape[-1], second), "D": min(second.ahead, steps),
        "G": group, "S": parts, "ALL": _whole(numbers) and group == call.top,
        **decoding(call.dtype, per_row=call.down_per_row, bias=call.down_bias),
        **numbers.constants(),
    }  # fmt: skip
    types = weights_of("h_ptr", bias, call.dtype, call.out_dtype) | {
        "indices_ptr": _ids(call), "places_ptr": "*i32", "weights_ptr": f"*{TYPES[call.weights]}",
        "refused_ptr": "*i64",
    }  # fmt: skip
    return types, constants


def held_parts(
    call: ExpertsCall, bias: str, made: Held, settled: bool | None
) -> tuple[Any, tuple[dict[str, str], dict[str, Any]]]:
    """The kernel, and the same, of a product with its weights in shared memory; of down where ``settled`` is None."""
    from halfbyte.kernels.cuda import experts_held_code as code

    like = Product(warps=made.warps)
    parts = summed_parts(call, bias, like) if settled is None else first_parts(call, bias, like, settled)
    kernel: Any = code.second if settled is None else code.first
    constants = parts[1] | {"C": made.steps}
    return kernel, (parts[0], {name: constants[name] for name in kernel.arg_names if name in constants})


def may_hold(call: ExpertsCall) -> bool:
    """Whether all weights of a token's experts find room in the multiprocessors' shared memory, and no slot is skipped.

    Slots are shared out among 16 warps.
    """
    unit = 9 * UNIT // 16 * TILE
    first = -(-call.top * (call.inner // TILE) // _MULTIPROCESSORS) * call.mixture.parts * -(-call.shape[-1] // UNIT)
    second = -(-(call.shape[-1] // TILE) // _MULTIPROCESSORS) * call.top * -(-call.inner // UNIT)
    return _whole(Numbers.of(call.mixture)) and call.top in (1, 2, 4, 8, 16) and (first + second) * unit <= _HELD_BYTES


def _whole(numbers: Numbers) -> bool:
    """Whether no slot is skipped."""
    return not numbers.padding and (not numbers.remote or len(numbers.local) == numbers.experts)


def _ids(call: ExpertsCall) -> str:
    return {"int32": "*i32", "int64": "*i64"}[call.indices]


def listless(call: ExpertsCall) -> bool:
    """Whether the two products are all: of one token."""
    return call.rows == 1


def configure(call: ExpertsCall) -> ExpertsDecode:
    """The configuration for a call: few warps a program where there are programs enough."""
    hidden, inner = (-(-k // UNIT) for k in (call.shape[-1], call.inner))
    if listless(call):
        first = Product(warps=8, ahead=2) if hidden <= 64 else Product(warps=8, ahead=7, registers=128)
        if may_hold(call):
            return ExpertsDecode(first, Held(warps=16, steps=2), Held())
        settled = first if hidden <= 64 else Product(warps=8, ahead=4, registers=96)
        if _whole(Numbers.of(call.mixture)):
            return ExpertsDecode(first, Product(ahead=16) if inner <= 16 else Product(warps=8, ahead=12), settled)
        return ExpertsDecode(first, Product(warps=4 if inner <= 32 else 8, ahead=8), settled, together=1)
    slots = call.rows * call.top * len(call.mixture.local) / max(1, call.mixture.experts)
    blocks = max(1.0, min(slots, call.touched))
    one, two = (_warps(blocks * programs_of(n, Product())) for n in (call.inner, call.shape[-1]))
    few = slots_each(call) < 2
    if hidden > 64:
        first = Product(warps=max(2, one), **({"ahead": 5, "x_ahead": 1} if few else {"ahead": 4}))
    else:
        first = Product(ahead=4, x_ahead=2, registers=128, warps=1) if one == 1 else Product(warps=one, x_ahead=2)
    if two > 1:
        second = Product(warps=two, ahead=4)
    elif inner > 16:
        of = {"tiles": 1, "ahead": 6} if few else {"tiles": 2, "ahead": 4, "registers": 96}
        second = Product(warps=1, unroll=64, x_ahead=1, **of)
    elif few:
        second = Product(warps=1, tiles=2, ahead=4, registers=96)
    else:
        second = Product(warps=1, tiles=4, ahead=2, unroll=64, x_ahead=1, registers=128)
    return ExpertsDecode(first, second)


def _warps(programs: float) -> int:
    """Of each, so that there are enough of all."""
    return next((warps for warps in (1, 2, 4) if warps * programs >= _ALL_WARPS), 8)


def first_of(made: ExpertsDecode, settled: bool) -> Product | Held:
    """How gate_up runs."""
    return made.settled if settled and made.settled is not None else made.first


def programs(
    call: ExpertsCall,
    made: ExpertsDecode,
    device: Any,
    biases: tuple[str, str] = ("float32", "float32"),
    settled: bool = False,
) -> tuple[Program, Program]:
    """Both products, compiled for a device."""
    from halfbyte.kernels.cuda import experts_decode_code as code

    def made_of(kernel: Any, parts: tuple[dict[str, str], dict[str, Any]], how: Product | Held) -> Program:
        return program(kernel, *parts, device=device, warps=how.warps, pdl=True, maxnreg=how.registers)

    first, second, few = first_of(made, settled), made.second, listless(call)
    if isinstance(first, Held):
        one = made_of(*held_parts(call, biases[0], first, settled), first)
    else:
        one = made_of(code.one_first if few else code.listed, first_parts(call, biases[0], first, settled), first)
    if isinstance(second, Held):
        two = made_of(*held_parts(call, biases[1], second, None), second)
    elif few:
        two = made_of(code.one_second, summed_parts(call, biases[1], second, made.together, made.parts), second)
    else:
        two = made_of(code.listed, second_parts(call, biases[1], second), second)
    return one, two


def refuse(call: ExpertsCall) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = list(experts.refuse(call))
    if call.precision != "exact":
        reasons.append(f"computes exactly, not in {call.precision}")
    if call.top > MOST_TOP:
        reasons.append(f"takes up to {MOST_TOP} experts of a token, not {call.top}")
    if slots_each(call) > experts.FEW_SLOTS:
        reasons.append(
            f"takes up to {experts.FEW_SLOTS:g} slots an expert on average, not {slots_each(call):.1f}: "
            "others are faster there"
        )
    return tuple(reasons)


def bind(args: ExpertsArgs, made: ExpertsDecode | None = None) -> Layer:
    """A call's launches; ``made`` instead of the configuration chosen."""
    call = args.call()
    made = configure(call) if made is None else made
    biases = [args.gate_up_bias, args.down_bias]
    one, two = ("float32" if b is None else dtype_name(b.dtype) for b in biases)
    stacks = [
        tuple(stack.buffers()[name].data_ptr() for name in ("codes", "scales", "scale2"))
        for stack in (args.gate_up, args.down)
    ]
    added = [None if b is None else b.data_ptr() for b in biases]
    alone = listless(call)
    blocks, device = expected_blocks(call), args.hidden.device
    last = ((1 if alone else blocks) * programs_of(call.shape[-1], made.second), 1, 1)
    table = table_of(args) if alone else None
    said = refused.word(device).data_ptr() if alone else 0

    def launches(settled: bool) -> Callable[..., None]:
        first, second = programs(call, made, device, (one, two), settled)
        grid = (blocks * programs_of(call.inner, first_of(made, settled)), 1, 1)

        def run(hidden: Any, indices: Any, weights: Any, out: Any, lists: tuple[int, ...], h: int, y: int) -> None:
            routing: tuple[Any, ...] = lists
            to, scaled = y, tuple[int, ...]()
            if alone:
                routing, to, scaled = (indices.data_ptr(), table), out.data_ptr(), (weights.data_ptr(), said)
            first(grid, (*stacks[0], hidden.data_ptr(), added[0], h, *routing))
            second(last, (*stacks[1], h, added[1], to, *routing, *scaled))

        return run

    return Layer(args, 0 if alone else COLUMNS, launches(False), settled=lambda: launches(True))


def expected_blocks(call: ExpertsCall) -> int:
    """How many blocks, or slots of one token, are launched; programs of those beyond take those of the first ones then.

    All where all experts are here, and all slots of one token where none is skipped, as with weights in shared memory,
    whose programs take one; else what an even routing takes, and some.
    """
    local, slots = len(call.mixture.local), call.rows * call.top
    if listless(call):
        whole = _whole(Numbers.of(call.mixture))
        return call.top if whole else min(call.top, -(-2 * slots * local // call.mixture.experts))
    most = most_blocks(slots, local, COLUMNS)
    even = most_blocks(-(-slots * local // call.mixture.experts), local, COLUMNS)
    return min(most, even + max(4, even // 2))


def compile_as(call: ExpertsCall, made: ExpertsDecode) -> None:
    """Compile it in a configuration."""
    import torch

    programs(call, made, torch.device(call.device))


GLUON: Final = Kernel(
    name=NAME,
    bundle=ExpertsArgs,
    description="decodes in registers to m16n8k16 fragments; Hopper, few tokens an expert",
    refuse=refuse,
    cost=experts_cost,
    bind=bind,
    configure=configure,
    compile=compile_as,
)
