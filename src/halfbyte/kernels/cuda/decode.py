"""``linear`` for up to 16 tokens on NVIDIA GPUs, layout ``fragments``: the weight is read once, decoded in registers.

::

    y = round(sum(x * code * scale) * scale2 + bias)

A program computes ``stripes`` times 16 features of all tokens. Its warps take the units of 64 k in turn, multiply them
by m16n8k16, and their sums are added in an order that their number fixes: so a result depends neither on M, nor on the
other rows of x, nor on ``stripes`` and ``ahead``.

A product of a code, a scale and an activation is exact; sums are in f32, which the matrix units may round down, so a
sum of K products is off by at most K + 24 units of 2^-23. With u as for the reference,

    |error| <= ((K + 24) * 2^-23 + u) * sum|x * w|

and a bias adds 2^-24. With one-hot activations y is the decoded weight, bit for bit but for the sign of zeros.

It is written in plain Triton, without assembly or layouts of registers: it runs from sm_80 on and in Triton's
interpreter, and no value moves between lanes or through shared memory before the warps' sums are added. x of rows that
do not exist is that of the last one, and never stored; beyond K nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from halfbyte.kernels.base import Call, Kernel, LinearArgs, linear_cost
from halfbyte.kernels.cuda import choices, fragments
from halfbyte.kernels.cuda.fragments import TILE, TYPES, UNIT
from halfbyte.kernels.cuda.launch import Program, program
from halfbyte.numerics import Array

NAME: Final = "triton-decode"
MOST_ROWS: Final = 16


@dataclass(frozen=True)
class Decode:
    """How the kernel runs.

    Args:
        warps: of a program, among which k is split.
        stripes: of 16 features, of a program.
        ahead: steps of loads that are on their way; half as many for more than 8 tokens.
    """

    warps: int = 4
    stripes: int = 1
    ahead: int = 4


CONFIGURATIONS: Final = (Decode(4, 1, 4), Decode(4, 2, 2), Decode(8, 1, 4))
"""Those that are tested."""


def signature(dtype: str, out_dtype: str, bias: str) -> dict[str, str]:
    """The types of the device code's arguments."""
    return {
        "codes": "*i32:16",
        "scales": "*i16:16",
        "x": f"*{TYPES[dtype]}:16",
        "scale2": "*fp32",
        "bias": bias,
        "out": f"*{TYPES[out_dtype]}",
        "M": "i32",
        "N": "i32",
        "K": "i32:16",
    }


def constants(call: Call, made: Decode) -> dict[str, Any]:
    """The constants of the device code."""
    eights = 1 if call.rows <= 8 else 2
    ahead = max(1, made.ahead // eights)
    return {
        "W": made.warps,
        "R": made.stripes,
        "D": ahead,
        "B": eights,
        "WIDE": fragments.wide(),
        "TAIL": call.shape[-1] % (UNIT * made.warps * ahead) != 0,
        **fragments.constants(call),
        **fragments.decoding(call.dtype),
    }


def configure(call: Call) -> Decode:
    """The configuration for a call."""
    return choices.configured(call, NAME, Decode(), CONFIGURATIONS)


def configurations(call: Call) -> tuple[Decode, ...]:
    """Those that can pay: all."""
    return CONFIGURATIONS


def refuse(call: Call) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = fragments.why_not_fragments(call)
    return reasons if call.rows <= MOST_ROWS else (*reasons, f"takes up to {MOST_ROWS} tokens, not {call.rows}")


def bind(args: LinearArgs, made: Decode | None = None) -> Callable[[Array, Array | None, Array], None]:
    """What is left of a launch for calls like these; ``made`` instead of the configuration chosen."""
    call = args.call()
    made = configure(call) if made is None else made
    (n, k), rows = call.shape, call.rows
    buffers = args.weight.buffers()
    codes, scales, scale2 = (buffers[name].data_ptr() for name in ("codes", "scales", "scale2"))
    run_program = _program(call, fragments.bias_type(args.bias), made, args.x.device)
    grid = (-(-n // (TILE * made.stripes)), 1, 1)

    def run(x: Any, bias: Any, out: Any) -> None:
        x = fragments.aligned(x)
        added = None if bias is None else bias.data_ptr()
        run_program(grid, (codes, scales, x.data_ptr(), scale2, added, out.data_ptr(), rows, n, k))

    return run


def _program(call: Call, bias: str, made: Decode, device: Any) -> Program:
    from halfbyte.kernels.cuda.decode_code import decode

    types = signature(call.dtype, call.out_dtype, bias)
    return program(decode, types, constants(call, made), device=device, warps=made.warps)


def compile_as(call: Call, made: Decode) -> None:
    """Compile it in a configuration."""
    _program(call, "*fp32", made, call.device)


TRITON: Final = Kernel(
    name=NAME,
    bundle=LinearArgs,
    description="decodes in registers, in plain Triton; NVIDIA GPUs from sm_80 on, up to 16 tokens",
    refuse=refuse,
    cost=linear_cost,
    bind=bind,
    configure=configure,
    configurations=configurations,
    compile=compile_as,
)
