"""``chain`` for up to 8 tokens on Hopper, layout ``fragments``: all of a layer between two attentions in one launch.

Four launches one after the other each lose microseconds until memory is busy, and again at their end. Here one program
stays on each multiprocessor, and a warp of it asks for the weights of all four products, as far ahead as shared memory
has room: while the others wait for each other between two products, the weights of the next ones arrive.

Stripes of 16 features are dealt to the programs. Warps take the units of 64 k of a stripe in turn, unit u by warp
u mod W, as in ``gluon-decode``; the W sums are added in their order. So a sum's order follows from W and K alone, and a
row does not depend on the others. Every rounding is that of ``linear``, ``add_norm`` and ``gate``.

Before a product whose input another program may have computed, all wait until all have stored theirs. So all must be on
the GPU at once: there is one for each multiprocessor, and two launches may not share the GPU, or each might keep the
places that the other waits for. So a launch starts behind the last one where that was on another stream
(``shared.alone``). In a CUDA graph nothing waits for another graph: who replays one does it under ``shared.alone``, and
no two launches of one graph may run side by side.

The programs start before the kernel ahead has ended (programmatic dependent launch), and ask for weights at once; what
that kernel computes, and anything that this one writes, is touched only behind ``griddepcontrol.wait``. When that is
right is as of ``gluon-decode``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from halfbyte.kernels.base import Call, Kernel
from halfbyte.kernels.chain import PARTS, ChainArgs, ChainCall, chain_cost
from halfbyte.kernels.cuda.fragments import (
    TILE,
    TYPES,
    UNIT,
    aligned,
    bias_type,
    decode_code,
    scale_code,
    why_not_fragments,
)
from halfbyte.kernels.cuda.gemm_gluon import multiprocessors
from halfbyte.kernels.cuda.launch import Program, Tensor, boxes, program, why_not
from halfbyte.kernels.cuda.shared import Written, alone, counters, in_turn, workspace
from halfbyte.layouts import Packed
from halfbyte.layouts.fragments import FACTOR

NAME: Final = "gluon-chain"
MOST_ROWS: Final = 4
LEAST_STAGES: Final = 4
COUNTERS: Final = 16
"""Bytes of them."""
SHARED: Final = 232448
"""Bytes of shared memory that a program can have."""
BESIDE: Final = 1024
"""Of those, what is not counted here: barriers, what alignment takes, and scratch."""


WARPS: Final = 4
"""Of a group of consumers."""
STEP: Final = 16
"""Units of a stage."""
STAGE: Final = STEP * 576
"""Bytes of it."""


@dataclass(frozen=True)
class Chain:
    """How the kernel runs.

    Args:
        stages: of the ring, at most; a multiple of 4.
        ahead: stages that are on their way, at most.
        registers: of a consumer's thread, and of the others'.
        start: registers of a thread at the start; None leaves it to the compiler.
    """

    stages: int = 20
    ahead: int = 6
    registers: tuple[int, int] = (104, 64)
    start: int | None = None
    fence: bool = True


ONE: Final = Chain()
"""The default for one token."""
FEW: Final = Chain()
"""The default for 2 to 8 tokens."""

_programs: Final[dict[Any, tuple[Program, Program]]] = {}


def shapes(call: ChainCall) -> tuple[int, int, int, int, int]:
    """K of each product, and N of the last."""
    of = [product.shape for product in call.products]
    return of[0][1], of[1][1], of[2][1], of[1][1], of[3][0] if len(of) > 3 else TILE


def rows(call: ChainCall) -> int:
    """Of activations in shared memory."""
    return 1 << (call.rows - 1).bit_length()


def stages(call: ChainCall, made: Chain) -> int:
    """Of the ring: as many as there is room for beside x, sums and what is small."""
    of_x = max(-(-k // (STEP * UNIT)) for k in shapes(call)[:3]) * STEP * UNIT * 2 * rows(call)
    small = 2048 * rows(call) + sum(rounds(call)) * 128 + rounds(call)[0] * 512
    return max(0, min(made.stages, (SHARED - of_x - 2 * 8192 - small - BESIDE) // STAGE) // 4 * 4)


def rounds(call: ChainCall) -> tuple[int, ...]:
    """Stripes, or pairs of them, of a program, rounded up to powers of two."""
    grid = multiprocessors(None)
    return tuple(1 << max(0, -(-n // grid) - 1).bit_length() for n in items(call))


def items(call: ChainCall) -> tuple[int, int, int, int]:
    """Stripes of each product, pairs of them of gate and up."""
    n = [product.shape[0] // TILE for product in call.products]
    return n[0], n[1] // 2, n[2], n[3] if len(n) > 3 else 0


def signature(call: ChainCall, biases: tuple[str, ...]) -> dict[str, str]:
    """The types of the device code's arguments."""
    half = f"*{TYPES[call.dtype]}:16"
    codes, scales = boxes("i32", (1, STEP, 128), 0), boxes("i16", (1, STEP, 32), 0)
    maps = {f"{kind}_{name}": of for name in PARTS for kind, of in (("codes", codes), ("scales", scales))}
    return {
        **maps,
        **dict.fromkeys(("residual", "attended", "norm_1", "norm_2"), half),
        **{f"scale2_{name}": "*fp32" for name in PARTS},
        **{f"bias_{name}": of for name, of in zip(PARTS, biases, strict=True)},
        **dict.fromkeys(("total", "gated", "behind", "out"), half),
        "counts": "*i32:16",
        "M": "i32",
        "eps_1": "fp32",
        "eps_2": "fp32",
        **{f"items_{name}": "i32" for name in PARTS},
    }


def constants(call: ChainCall, made: Chain, phases: int | None = None) -> dict[str, Any]:
    """The constants of the device code."""
    products: list[Call | None] = [*call.products, None][:4]
    return {
        "STAGES": stages(call, made),
        "SHAPES": shapes(call),
        "PHASES": len(call.products) if phases is None else phases,
        "R": rows(call),
        "ROUNDS": rounds(call),
        "AHEAD": made.ahead,
        "FENCE": made.fence,
        "PER_ROW": tuple(product is not None and product.per_row for product in products),
        "BIAS": tuple(product is not None and product.bias for product in products),
        "ACTIVATION": call.activation,
        "REGISTERS": made.registers,
        "DECODE": decode_code(call.dtype),
        "SCALE": scale_code(call.dtype),
        "FACTOR": FACTOR,
    }


def configure(call: ChainCall) -> Chain:
    """The configuration for a call."""
    return ONE if call.rows == 1 else FEW


def scratch(call: ChainCall) -> int:
    """Bytes of what is between the products, and of counters."""
    _, h, i, *_ = shapes(call)
    return call.rows * (h + i) * 2 + COUNTERS


def refuse(call: ChainCall) -> tuple[str, ...]:
    """Why it declines a call."""
    asked = [
        (*why_not(product, least=90, most=90, gluon=True), *why_not_fragments(product)) for product in call.products
    ]
    reasons = [reason for reasons in asked for reason in reasons]
    for name, product in zip(PARTS, call.products, strict=False):
        n = product.shape[0] // (2 if name == "gate_up" else 1)
        if n % TILE:
            reasons.append(f"takes multiples of {TILE} features, not {n} of {name}")
    if call.rows > MOST_ROWS:
        reasons.append(f"takes up to {MOST_ROWS} tokens, not {call.rows}")
    elif stages(call, configure(call)) < LEAST_STAGES:
        reasons.append(f"has no room in shared memory for rows of {max(shapes(call)[:3])} values")
    return tuple(dict.fromkeys(reasons))


def launch(args: ChainArgs, made: Chain | None = None, early: bool = True) -> None:
    """Write ``total`` and ``qkv``; with ``early`` before the kernel ahead has ended, where that is right."""
    call = args.call()
    made = configure(call) if made is None else made
    device = args.residual.device
    types = tuple(map(bias_type, args.biases))
    key = call, made, types, device
    ready = _programs.get(key)
    if ready is None:
        ready = _programs[key] = (
            _program(call, made, types, device, False), _program(call, made, types, device, True)
        )  # fmt: skip
    written = _written(args.weights, device)
    weights = [args.weights[min(i, len(args.weights) - 1)] for i in range(len(PARTS))]
    maps = [tensor for weight in weights for tensor in _described(weight, ready[0])]
    scale2 = [weight.buffers()["scale2"].data_ptr() for weight in weights]
    biases = [None if bias is None else bias.data_ptr() for bias in (*args.biases, None)][: len(PARTS)]
    x = [aligned(given) for given in (args.residual, args.attended, args.norms[0], args.norms[-1])]
    total, qkv = aligned(args.total), None if args.qkv is None else aligned(args.qkv)
    _, h, inner, *_ = shapes(call)
    with in_turn:  # what holds memory is held until the launch: what is not, the next allocation may get
        between, counts = workspace(device, call.rows * (h + inner) * 2), counters(device, COUNTERS)
        s1 = between.data_ptr()
        values = (
            *maps, *(given.data_ptr() for given in x), *scale2, *biases, s1, s1 + call.rows * h * 2, total.data_ptr(),
            (total if qkv is None else qkv).data_ptr(), counts.data_ptr(), call.rows, args.eps[0], args.eps[-1],
            *items(call),
        )  # fmt: skip
        with alone(device):
            ready[early and written is not None and written.over]((multiprocessors(device.index), 1, 1), values)
    if written is not None and not written.over:
        written.launched()
    for given, written_here in ((args.total, total), (args.qkv, qkv)):
        if given is not None and written_here is not given:
            given.copy_(written_here)


def _state(weights: tuple[Packed, ...]) -> tuple[Any, ...] | None:
    """Of the codes and scales: where they are, and how often torch wrote to them; None where it does not count that."""
    buffers = [weight.buffers()[name] for weight in weights for name in ("codes", "scales")]
    if any(buffer.is_inference() for buffer in buffers):
        return None
    return tuple((buffer.data_ptr(), buffer._version) for buffer in buffers)


def _written(weights: tuple[Packed, ...], device: Any) -> Written | None:
    """Kept with the first of the weights, for as long as torch writes to none of them."""
    state = _state(weights)
    if state is None:
        return None
    known = weights[0].memo.get((NAME, "written"))
    if known is None or known[0] != state:
        known = weights[0].memo[NAME, "written"] = state, Written(device)
    found: Written = known[1]
    return found


def _described(weight: Packed, first: Program) -> tuple[Tensor, Tensor]:
    """Codes and scales for the copy engine; kept with the weight for as long as they stay where they are."""
    codes, scales = (weight.buffers()[name].data_ptr() for name in ("codes", "scales"))
    key = NAME, "described"
    known = weight.memo.get(key)
    if known is None or known[0] != (codes, scales):
        extent = -(-weight.shape[0] // TILE), -(-weight.shape[1] // UNIT)
        both = first.tensor(0, codes, (*extent, 128)), first.tensor(1, scales, (*extent, 32))
        known = weight.memo[key] = (codes, scales), both
    found: tuple[Tensor, Tensor] = known[1]
    return found


def _program(call: ChainCall, made: Chain, biases: tuple[str, ...], device: Any, pdl: bool) -> Program:
    from halfbyte.kernels.cuda.chain_gluon_code import chain

    types = signature(call, (*biases, "*fp32")[: len(PARTS)])
    return program(chain, types, constants(call, made), device=device, warps=WARPS, maxnreg=made.start, pdl=pdl)


def compile_as(call: ChainCall, made: Chain) -> None:
    """Compile it in a configuration."""
    import torch

    for pdl in (False, True):
        _program(call, made, ("*fp32",) * len(call.products), torch.device(call.device), pdl)


GLUON: Final = Kernel(
    name=NAME,
    bundle=ChainArgs,
    description="a layer between two attentions in one launch; Hopper, up to 8 tokens",
    refuse=refuse,
    cost=chain_cost,
    launch=launch,
    configure=configure,
    scratch=scratch,
    compile=compile_as,
)
