"""``experts`` for many slots an expert on Hopper, layout ``fragments``: decoded weights are wgmma's first operand.

A tile is 128 features of each of the ``consumers`` and a block of ``slots`` of one expert; with a gate 64 of them are
gates and 64 the ups that belong to them, so that the activation is of what a thread holds. Programs stay on their
multiprocessor and take tiles in turn, of as many blocks as the lists have; where blocks take different times, the large
ones are dealt out first. Lanes copy the rows of x of a block's slots from where tokens are; h is kept in the order of
blocks, so that the copy engine (TMA) reads it; y lies where slots are.

Sums run along K in one order, as of ``gluon-gemm``: a slot's results depend on no other slot. What routing there is, is
known only when the kernel ahead is over; see ``halfbyte.kernels.cuda.experts``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import Kernel
from halfbyte.kernels.cuda import experts, experts_order
from halfbyte.kernels.cuda.experts import Layer, behind, slots_each
from halfbyte.kernels.cuda.fp8_gluon import FACTOR as FP8_FACTOR
from halfbyte.kernels.cuda.fp8_gluon import look_up_code, table_code
from halfbyte.kernels.cuda.fp8_quantize import pitch
from halfbyte.kernels.cuda.fragments import TILE, TYPES, UNIT, decode_code, scales_code
from halfbyte.kernels.cuda.gemm_gluon import BESIDE, GROUP, REGISTERS, SHARED, STAGES, described, multiprocessors
from halfbyte.kernels.cuda.launch import Program, boxes, program
from halfbyte.kernels.cuda.lists import most_blocks
from halfbyte.kernels.experts import ExpertsArgs, ExpertsCall, experts_cost
from halfbyte.layouts.fragments import FACTOR

NAME: Final = "gluon-experts-gemm"
HALF: Final = 64
"""Features of a half of a consumer's."""
STAGED: Final = 8192
"""Bytes of results of a consumer that are in shared memory at a time."""


@dataclass(frozen=True)
class Grouped:
    """How a product runs.

    Args:
        consumers: warpgroups that decode and multiply 128 features each, 1 or 2.
        slots: of a block: 16, 32, 64 or 128.
        low: as many are multiplied, by m16n8k16, where a block has no more; 0 where it is always all.
        units: of 64 k of a step: 1, 2 or 4.
        programs: of a multiprocessor.
        copiers: warps that copy rows of x, 1 or 4; 0 where its rows are in the order of slots.
        producer: registers of their threads.
        small: all slots are multiplied by m16n8k16, not by wgmma.
        mid: as many are multiplied where a block has more than ``low`` and no more than these; 0 where none are.
        fp8: codes become E4M3, as activations are.
    """

    consumers: int = 2
    slots: int = 32
    low: int = 0
    units: int = 2
    programs: int = 1
    copiers: int = 4
    producer: int = 40
    small: bool = False
    mid: int = 0
    fp8: bool = False

    @property
    def registers(self) -> tuple[int, int]:
        """Of each thread at the start, and of a consumer's threads then."""
        others = 1 if self.copiers < GROUP // 32 else 2
        threads = GROUP * (self.consumers + others)
        first = min(REGISTERS // self.programs // threads // 8 * 8, 248)
        then = (first * threads - others * self.producer * GROUP) // (GROUP * self.consumers) // 8 * 8
        return first, min(then, 240)

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return self.units * (self.consumers * 8 * 576 + self.slots * (64 if self.fp8 else 128))

    def height(self, size: int) -> int:
        """Slots that are stored at a time, of elements of so many bytes."""
        return min(self.slots, STAGED // (HALF * size))

    def stages(self, size: int) -> int:
        """Of the ring: as many as fit beside results of so many bytes."""
        room = SHARED // self.programs - 1024 - BESIDE - self.consumers * self.height(size) * HALF * size
        return min(STAGES, room // self.stage)

    def tiles(self, features: int, *, gated: bool) -> int:
        """Of a block, for so many results."""
        return -(-features // (self.consumers * (HALF if gated else 2 * HALF)))


@dataclass(frozen=True)
class ExpertsGemm:
    """How both run; their blocks are of one size.

    Args:
        first: gate_up.
        second: down.
    """

    first: Grouped
    second: Grouped


CONFIGURATIONS: Final = (
    ExpertsGemm(Grouped(2, 16, 0, 4, 2, 1, 40), Grouped(2, 16, 0, 4, 2, 0, 32, True)),
    ExpertsGemm(Grouped(2, 32, 0, 4, 1, 4, 40), Grouped(2, 32, 0, 2, 2, 0, 32)),
    ExpertsGemm(Grouped(2, 64, 16, 2, 1, 4, 40), Grouped(1, 64, 16, 2, 2, 0, 32)),
    ExpertsGemm(Grouped(2, 128, 32, 2, 1, 4, 40, mid=64), Grouped(2, 128, 32, 2, 1, 0, 32, mid=64)),
)
"""Those that are tested."""
MOST: Final = (10.0, 24.0, 80.0)
"""Slots of an expert, on average, that each but the last of them is for, at the most.

Between few points that were tried by hand: two shapes, at 64 to 4096 tokens."""


@dataclass(frozen=True)
class Product:
    """A product, as the device code sees it.

    Args:
        features: N, of gate and up together.
        k: K.
        gated: half of the features are gates.
        activation: of ``halfbyte.kernels.experts``, or None.
        limit: of gate and up, or None.
        up_first: ups come before gates.
        dtype: of activations.
        out_dtype: of results.
        per_row: scale2 differs by feature.
        bias: the dtype of the bias, or None.
        early: weights are asked for before the kernel ahead is over, which lists are older than.
        sorted: results are stored in the order of blocks, not of slots.
    """

    features: int
    k: int
    gated: bool
    activation: str | None
    limit: float | None
    up_first: bool
    dtype: str
    out_dtype: str
    per_row: bool
    bias: str | None
    early: bool
    sorted: bool = False

    @property
    def results(self) -> int:
        """Features of its results."""
        return self.features // 2 if self.gated else self.features


def both(call: ExpertsCall, bias: str | None, down_bias: str | None) -> tuple[Product, Product]:
    """gate_up and down of a call, and their biases' dtypes."""
    mixture, dtype = call.mixture, call.dtype
    up_first = mixture.gate_up_order == "up_first"
    first = Product(
        call.shape[-2], call.shape[-1], mixture.gated, mixture.activation, mixture.limit, up_first, dtype, dtype,
        call.per_row, bias, False, True,
    )  # fmt: skip
    second = Product(
        call.shape[-1], call.inner, False, None, None, False, dtype, "float32", call.down_per_row, down_bias, True
    )
    return first, second


def signature(made: Grouped, product: Product) -> dict[str, str]:
    """The types of the device code's arguments."""
    of = "fp8e4nv" if made.fp8 else TYPES[product.dtype]
    return {
        "codes_map": boxes("i32", (4 * made.consumers, 8 * made.units, 16), 64),
        "scales_map": boxes("i32", (4 * made.consumers, 16 * made.units), 0),
        "x": f"*{of}:16" if made.copiers else boxes(of, (made.slots, 64 * made.units), 128),
        "out": f"*{TYPES[product.out_dtype]}:16",
        "scale2": "*fp32",
        "xscale": "*fp32",
        "bias": f"*{TYPES[product.bias or 'float32']}",
        **dict.fromkeys(("blocks", "slots", "count", "order"), "*i32:16"),
        "N": "i32:16",
        "width": "i32:16",
        **dict.fromkeys(("along_n", "steps", "share"), "i32"),
    }


def constants(made: Grouped, product: Product) -> dict[str, Any]:
    """The constants of the device code."""
    size = _size(product.out_dtype)
    return {
        "C": made.consumers,
        "U": made.units,
        "NB": made.slots,
        "LOW": made.low,
        "STAGES": made.stages(size),
        "HEIGHT": made.height(size),
        "REGISTERS": made.registers[1],
        "PRODUCER": made.producer,
        "COPIERS": made.copiers,
        "GATED": product.gated,
        "EARLY": product.early,
        "EVEN": width_of(made, product.k) % (UNIT * made.units) == 0,
        "PER_ROW": product.per_row,
        "BIAS": product.bias is not None,
        "ACTIVATION": product.activation,
        "LIMIT": product.limit,
        "UP_FIRST": product.up_first,
        "DECODE": look_up_code(product.dtype) if made.fp8 else decode_code(product.dtype),
        "SCALES": table_code() if made.fp8 else scales_code(product.dtype),
        "FACTOR": FP8_FACTOR if made.fp8 else FACTOR,
        "SMALL": made.small,
        "MID": made.mid,
        "LISTED": made.copiers > 0,
        "SORTED": product.sorted,
        "ORDERED": made.low > 0,
    }


def width_of(made: Grouped, k: int) -> int:
    """Of rows of x."""
    return pitch(k, ordered=True) if made.fp8 else k


def options(made: Grouped) -> dict[str, Any]:
    """What else decides the machine code, as arguments of ``program``."""
    return {} if made.programs == 1 else {"maxnreg": made.registers[0]}


def _size(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def for_slots(each: float) -> ExpertsGemm:
    """The configuration for so many slots of an expert, on average."""
    return CONFIGURATIONS[sum(each > most for most in MOST)]


def configure(call: ExpertsCall) -> ExpertsGemm:
    """The configuration for a call."""
    return for_slots(slots_each(call))


def refuse(call: ExpertsCall) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = list(experts.refuse(call))
    if call.precision != "exact":
        reasons.append(f"computes exactly, not in {call.precision}")
    return tuple(reasons)


def bind_order(made: Grouped, most: int, device: Any) -> Callable[[tuple[int, ...], int], tuple[int, ...]]:
    """What finds the order of up to ``most`` blocks, where their sizes matter; see ``experts_order``.

    Returns:
        A function of the addresses of blocks, slots and count, and of memory, (most,) i32; it gives what products take.
    """
    if not made.low:
        return lambda lists, at: (*lists, 0)
    order = experts_order.bind(made.slots, made.low, made.mid or made.low, most, device)

    def ordered(lists: tuple[int, ...], at: int) -> tuple[int, ...]:
        order(lists[1], lists[2], at)
        return (*lists, at)

    return ordered


def bind_product(
    made: Grouped, product: Product, stack: Any, bias: Any, slots: int, device: Any
) -> Callable[..., None]:
    """What launches a product, its stack and bias given.

    Args:
        made: how.
        product: which.
        stack: (E, N, K) Packed.
        bias: (E, N), or None.
        slots: there are so many.
        device: of torch's, with an index.

    Returns:
        A function of the addresses of x and out, of blocks, slots, count and order, of how many slots share a row of
        x, and, in FP8, of the address of x's scales.
    """
    run = compiled(made, product, device)
    buffers = stack.buffers()
    count, n, k = stack.shape
    units = -(-k // UNIT)
    codes = run.tensor(0, buffers["codes"].data_ptr(), (count * n // TILE, 8 * units, 16))
    scales = run.tensor(1, buffers["scales"].data_ptr(), (count * n // TILE, 16 * units))
    scale2 = buffers["scale2"].data_ptr()
    added = None if bias is None else bias.data_ptr()
    along = made.tiles(product.results, gated=product.gated)
    steps = -(-k // (UNIT * made.units))
    blocks = most_blocks(slots, count, made.slots)
    grid = (min(multiprocessors(device.index) * made.programs, blocks * along), 1, 1)
    boxed = None if made.copiers else described(run, blocks * made.slots)

    width = width_of(made, k)

    def launch(x: int, out: int, lists: tuple[int, ...], share: int, xscale: int | None = None) -> None:
        rows = x if boxed is None else boxed(2, x, width)
        run(grid, (codes, scales, rows, out, scale2, xscale, added, *lists, n, width, along, steps, share))

    return launch


def compiled(made: Grouped, product: Product, device: Any) -> Program:
    """The program of a product."""
    from halfbyte.kernels.cuda.experts_gemm_code import experts as code

    return program(code, signature(made, product), constants(made, product), device=device, pdl=True, **options(made))


def bind(args: ExpertsArgs, made: ExpertsGemm | None = None) -> Callable[[Any, Any, Any, Any], None]:
    """A call's launches; ``made`` instead of the configuration chosen."""
    call = args.call()
    made = configure(call) if made is None else made
    biases = [args.gate_up_bias, args.down_bias]
    one, two = both(call, *(None if b is None else dtype_name(b.dtype) for b in biases))
    device, top, slots = args.hidden.device, call.top, call.rows * call.top
    first = bind_product(made.first, one, args.gate_up, biases[0], slots, device)
    second = bind_product(made.second, two, args.down, biases[1], slots, device)

    size = made.first.slots
    most = most_blocks(slots, call.shape[0], size)
    order = bind_order(made.first, most, device)

    def products(hidden: Any, indices: Any, weights: Any, out: Any, lists: tuple[int, ...], h: int, y: int) -> None:
        lists = order(lists, y + behind(slots, call.shape[-1]))
        first(hidden.data_ptr(), h, lists, top)
        second(h, y, lists, 1)

    return Layer(args, size, products, rows=size * most, more=4 * most)


def compile_as(call: ExpertsCall, made: ExpertsGemm) -> None:
    """Compile it in a configuration."""
    import torch

    device = torch.device(call.device)
    bind_order(made.first, most_blocks(call.rows * call.top, call.shape[0], made.first.slots), device)
    biases = ("float32" if has else None for has in (call.bias, call.down_bias))
    for way, product in zip((made.first, made.second), both(call, *biases), strict=True):
        compiled(way, product, device)


GLUON: Final = Kernel(
    name=NAME,
    bundle=ExpertsArgs,
    description="tiles of weights decoded to wgmma's registers; Hopper, many tokens an expert",
    refuse=refuse,
    cost=experts_cost,
    bind=bind,
    configure=configure,
    compile=compile_as,
)
