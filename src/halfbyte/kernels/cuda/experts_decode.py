"""``experts`` for few slots an expert on Hopper, layout ``fragments``: weights are read once, and decoded in registers.

A program computes ``tiles`` times 16 results of up to 8 slots of one expert, as ``decode_gluon`` does those of up to 8
tokens: what is said there of the order of sums and of their error holds here. A slot's results depend on no other slot,
and those of a token are added in the order of its slots. So equal calls give equal bits, on any number of tokens that
takes the same launches.

There are three ways through the launches, by the number of tokens:

- With few there are two launches. A block of the first product is a slot, and each reads its expert's weights: another
  slot of the same expert finds them in L2. A program of the second has all slots of a token, each in a column of its
  own of the matrix unit, and adds them there.
- Otherwise slots are listed by expert first and added at the end, in launches of their own.

What routing there is, is known only when the kernel ahead is over: the first product asks for no weight before. The
second one asks for its first weights while the first one ends; see ``halfbyte.kernels.cuda.experts``.
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
FEW_TOKENS: Final = 1
"""Up to so many there are two launches."""
MOST_TOP: Final = 32


@dataclass(frozen=True)
class Product:
    """How a product runs; every configuration gives right results, and those with the same ``warps`` the same ones.

    Args:
        warps: of a program, among which k is split.
        tiles: of 16 results, of a program; with a gate it has as many of each half.
        ahead: units of each warp and tile that are on their way.
        unroll: units of a warp, of all its tiles, at most, that are not a loop.
        registers: of a thread, at most; None leaves it to the compiler.
    """

    warps: int = 4
    tiles: int = 1
    ahead: int = 3
    unroll: int = 32
    registers: int | None = None


@dataclass(frozen=True)
class ExpertsDecode:
    """How both run.

    Args:
        first: gate_up.
        second: down.
        together: slots of a token, at most, that a program of the second multiplies before it adds them.
        parts: of the warps of such a program, each of which takes another of those slots.
    """

    first: Product = field(default_factory=Product)
    second: Product = field(default_factory=Product)
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


def tiles_of(rows: int, made: Product) -> int:
    """Of a program: as configured, or what a narrow product has."""
    return min(made.tiles, 1 << max(1, -(-rows // TILE)).bit_length() - 1)


def programs_of(rows: int, made: Product) -> int:
    """Of a block, for so many results."""
    return -(-rows // (TILE * tiles_of(rows, made)))


def depth(k: int, tiles: int, made: Product) -> tuple[int, int]:
    """Units of each warp and tile ahead, and how often as many are a loop."""
    units = -(-k // UNIT)
    steps = -(-units // made.warps)
    ahead = min(made.ahead, steps)
    return ahead, max(0, units // made.warps // ahead - 1) if steps * tiles > made.unroll else 0


def first_parts(call: ExpertsCall, bias: str, made: Product, *, listed: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """The signature and the constants of gate_up."""
    mixture = call.mixture
    tiles = mixture.parts * tiles_of(call.inner, made)
    ahead, loops = depth(call.shape[-1], tiles, made)
    constants = {
        "K": call.shape[-1], "TOP": call.top, "R": tiles, "D": ahead, "L": loops,
        **({"NB": COLUMNS} if listed else {}),
        **decoding(call.dtype, per_row=call.per_row, bias=call.bias),
        "ACTIVATION": mixture.activation, "GATED": mixture.gated, "UP_FIRST": mixture.gate_up_order == "up_first",
        "LIMIT": mixture.limit,
        **({"EARLY": False} if listed else Numbers.of(call.mixture).constants()),
    }  # fmt: skip
    lists = ("blocks_ptr", "slots_ptr", "count_ptr")
    routing = dict.fromkeys(lists, "*i32") if listed else {"indices_ptr": _ids(call), "places_ptr": "*i32"}
    types = weights_of("x_ptr", bias, call.dtype, call.dtype) | routing | {"N": "i32", "PROGRAMS": "i32"}
    return types, constants


def second_parts(call: ExpertsCall, bias: str, made: Product) -> tuple[dict[str, str], dict[str, Any]]:
    """The same of down with lists."""
    tiles = tiles_of(call.shape[-1], made)
    ahead, loops = depth(call.inner, tiles, made)
    constants = {
        "K": call.inner, "TOP": 1, "R": tiles, "D": ahead, "L": loops, "NB": COLUMNS,
        **decoding(call.dtype, per_row=call.down_per_row, bias=call.down_bias),
        "ACTIVATION": None, "GATED": False, "UP_FIRST": False, "LIMIT": None, "EARLY": True,
    }  # fmt: skip
    types = weights_of("x_ptr", bias, call.dtype, "float32")
    types |= dict.fromkeys(("blocks_ptr", "slots_ptr", "count_ptr"), "*i32") | {"N": "i32", "PROGRAMS": "i32"}
    return types, constants


def summed_parts(call: ExpertsCall, bias: str, made: ExpertsDecode) -> tuple[dict[str, str], dict[str, Any]]:
    """The same of down where it adds the slots of a token."""
    numbers, second = Numbers.of(call.mixture), made.second
    whole = not numbers.padding and (not numbers.remote or len(numbers.local) == numbers.experts)
    parts = min(made.parts, second.warps)
    group = min(made.together, -(-call.top // parts) * parts)
    units = -(-call.inner // UNIT)
    steps = group // parts * -(-units // (second.warps // parts))
    constants = {
        "K": call.inner, "TOP": call.top, "R": tiles_of(call.shape[-1], second), "D": min(second.ahead, steps),
        "G": group, "S": parts, "ALL": whole and group == call.top,
        **decoding(call.dtype, per_row=call.down_per_row, bias=call.down_bias),
        **numbers.constants(),
    }  # fmt: skip
    types = weights_of("h_ptr", bias, call.dtype, call.out_dtype) | {
        "indices_ptr": _ids(call), "places_ptr": "*i32", "weights_ptr": f"*{TYPES[call.weights]}",
        "refused_ptr": "*i64", "N": "i32", "PROGRAMS": "i32",
    }  # fmt: skip
    return types, constants


def _ids(call: ExpertsCall) -> str:
    return {"int32": "*i32", "int64": "*i64"}[call.indices]


def listless(call: ExpertsCall) -> bool:
    """Whether there are two launches."""
    return call.rows <= FEW_TOKENS


def configure(call: ExpertsCall) -> ExpertsDecode:
    """The configuration for a call."""
    return ExpertsDecode()


def programs(
    call: ExpertsCall, made: ExpertsDecode, device: Any, biases: tuple[str, str] = ("float32", "float32")
) -> tuple[Program, Program]:
    """Both products, compiled for a device."""
    from halfbyte.kernels.cuda import experts_decode_code as code

    first, second, few = made.first, made.second, listless(call)
    one = program(
        code.each if few else code.listed,
        *first_parts(call, biases[0], first, listed=not few),
        device=device,
        warps=first.warps,
        pdl=True,
        maxnreg=first.registers,
    )
    parts = summed_parts(call, biases[1], made) if few else second_parts(call, biases[1], second)
    two = program(
        code.summed if few else code.listed,
        *parts,
        device=device,
        warps=second.warps,
        pdl=True,
        maxnreg=second.registers,
    )
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


def bind(args: ExpertsArgs, made: ExpertsDecode | None = None) -> Callable[[Any, Any, Any, Any], None]:
    """A call's launches; ``made`` instead of the configuration chosen."""
    call = args.call()
    made = configure(call) if made is None else made
    biases = [args.gate_up_bias, args.down_bias]
    one, two = ("float32" if b is None else dtype_name(b.dtype) for b in biases)
    first, second = programs(call, made, args.hidden.device, (one, two))
    stacks = [
        tuple(stack.buffers()[name].data_ptr() for name in ("codes", "scales", "scale2"))
        for stack in (args.gate_up, args.down)
    ]
    added = [None if b is None else b.data_ptr() for b in biases]
    rows = call.shape[-2], call.shape[-1]
    each = programs_of(call.inner, made.first), programs_of(rows[1], made.second)
    slots = call.rows * call.top

    if listless(call):
        table = table_of(args)
        said = refused.word(args.hidden.device).data_ptr()
        grids = (slots * each[0], 1, 1), (call.rows * each[1], 1, 1)

        def products(hidden: Any, indices: Any, weights: Any, out: Any, lists: Any, h: int, y: int) -> None:
            ids = indices.data_ptr()
            first(grids[0], (*stacks[0], hidden.data_ptr(), added[0], h, ids, table, rows[0], each[0]))
            second(
                grids[1],
                (*stacks[1], h, added[1], out.data_ptr(), ids, table, weights.data_ptr(), said, rows[1], each[1]),
            )

        return Layer(args, 0, products)

    blocks = expected_blocks(call)
    grids = (blocks * each[0], 1, 1), (blocks * each[1], 1, 1)

    def listed(hidden: Any, indices: Any, weights: Any, out: Any, lists: tuple[int, ...], h: int, y: int) -> None:
        first(grids[0], (*stacks[0], hidden.data_ptr(), added[0], h, *lists, rows[0], each[0]))
        second(grids[1], (*stacks[1], h, added[1], y, *lists, rows[1], each[1]))

    return Layer(args, COLUMNS, listed)


def expected_blocks(call: ExpertsCall) -> int:
    """How many blocks are launched; programs of those beyond take those of the first ones then."""
    local, slots = len(call.mixture.local), call.rows * call.top
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
