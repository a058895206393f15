"""``chain`` for up to 8 tokens on Hopper, layout ``fragments``: all of a layer between two attentions in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from halfbyte.kernels.base import Call
from halfbyte.kernels.chain import ChainCall
from halfbyte.kernels.cuda.fragments import TILE, TYPES, UNIT, decode_code, scale_code
from halfbyte.kernels.cuda.launch import boxes
from halfbyte.layouts.fragments import FACTOR

NAME: Final = "gluon-chain"
PRODUCTS: Final = ("o", "gate_up", "down", "qkv")
MOST_ROWS: Final = 8
SHARED: Final = 232448
"""Bytes of shared memory that a program can have."""
BESIDE: Final = 4096
"""Of those, what is not counted here: barriers, what alignment takes, and scratch."""


@dataclass(frozen=True)
class Chain:
    """How the kernel runs.

    Args:
        warps: that decode, among which k is split.
        units: of 64 k, of each warp in a stage.
        stages: of the ring, at most.
        registers: of a thread at the start; None leaves it to the compiler.
        leave: bytes of shared memory of a multiprocessor that are left to the kernel ahead.
    """

    warps: int = 16
    units: int = 2
    stages: int = 12
    registers: int | None = None
    leave: int = 0

    @property
    def step(self) -> int:
        """Units of a stage."""
        return self.warps * self.units


def steps(k: int, made: Chain) -> int:
    """Stages of a stripe."""
    return -(-k // (UNIT * made.step))


def shapes(call: ChainCall) -> tuple[int, int, int, int, int]:
    """K of each product, and N of the last."""
    of = [product.shape for product in call.products]
    return of[0][1], of[1][1], of[2][1], of[1][1], of[3][0] if len(of) > 3 else TILE


def held(call: ChainCall, made: Chain) -> int:
    """Bytes of shared memory beside the ring."""
    a, h, i, *_ = shapes(call)
    ks = (a, h, i) if call.rows == 1 else (h,)
    columns = max(steps(k, made) for k in ks) * made.step * UNIT
    return columns * 2 * (1 if call.rows == 1 else 8) + 2 * made.warps * 512 + BESIDE


def stages(call: ChainCall, made: Chain) -> int:
    """Of the ring."""
    return max(0, min(made.stages, (SHARED - made.leave - held(call, made)) // (made.step * 576)))


def items(call: ChainCall) -> tuple[int, int, int, int]:
    """Stripes of each product, pairs of them of gate and up."""
    n = [product.shape[0] // TILE for product in call.products]
    return n[0], n[1] // 2, n[2], n[3] if len(n) > 3 else 0


def signature(call: ChainCall, made: Chain, biases: tuple[str, ...]) -> dict[str, str]:
    """The types of the device code's arguments."""
    half = f"*{TYPES[call.dtype]}:16"
    codes, scales = boxes("i32", (1, made.step, 128), 0), boxes("i16", (1, made.step, 32), 0)
    maps = {f"{kind}_{name}": of for name in PRODUCTS for kind, of in (("codes", codes), ("scales", scales))}
    return {
        **maps,
        **dict.fromkeys(("residual", "attended", "norm_1", "norm_2"), half),
        **{f"scale2_{name}": "*fp32" for name in PRODUCTS},
        **{f"bias_{name}": of for name, of in zip(PRODUCTS, biases, strict=True)},
        **dict.fromkeys(("total", "gated", "behind", "out"), half),
        "counts": "*i32:16",
        "M": "i32",
        "eps_1": "fp32",
        "eps_2": "fp32",
        **{f"items_{name}": "i32" for name in PRODUCTS},
    }


def constants(call: ChainCall, made: Chain, phases: int | None = None) -> dict[str, Any]:
    """The constants of the device code."""
    products: list[Call | None] = [*call.products, None][:4]
    return {
        "W": made.warps,
        "US": made.units,
        "STAGES": stages(call, made),
        "SHAPES": shapes(call),
        "PHASES": len(call.products) if phases is None else phases,
        "ONE": call.rows == 1,
        "PER_ROW": tuple(product is not None and product.per_row for product in products),
        "BIAS": tuple(product is not None and product.bias for product in products),
        "ACTIVATION": call.activation,
        "REGISTERS": 40,
        "DECODE": decode_code(call.dtype),
        "SCALE": scale_code(call.dtype),
        "FACTOR": FACTOR,
    }
