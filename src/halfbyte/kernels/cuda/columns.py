"""``linear`` for any number of tokens on NVIDIA GPUs, layout ``columns``: the transposed bytes of a checkpoint.

::

    y = round(sum(x * code * scale) * scale2 + bias)

Codes are bytes (K / 2, pitch), the order of a transposed checkpoint, so there is no second copy for kernels; N may be
odd, as that of a vocabulary. Up to 16 tokens run like ``triton-decode``: a program computes 8 ``bytes`` features, its
warps take 32 k in turn, and their sums are added in an order that their number fixes; a result depends neither on M
nor on the other rows of x. More tokens go by tiles, whose weights pass through shared memory, over all of K in order.
Errors are bounded as those of ``triton-decode``.

Rows that begin at multiples of 16 bytes are read 16 bytes at a time, or as many as ``bytes`` says: use
``"columns(align=16)"`` where N is odd. Others are read by words or bytes, which is several times slower. Between N and
the pitch bytes may be read, beyond it none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from halfbyte.kernels.base import Call, Kernel, LinearArgs, linear_cost
from halfbyte.kernels.cuda import choices, fragments
from halfbyte.kernels.cuda.fragments import TYPES
from halfbyte.kernels.cuda.launch import Program, program
from halfbyte.layouts import Columns
from halfbyte.layouts.fragments import PLACES
from halfbyte.numerics import Array

NAME: Final = "triton-columns"
FEW_ROWS: Final = 16


@dataclass(frozen=True)
class Few:
    """How up to 16 tokens run.

    Args:
        warps: of a program, among which k is split.
        bytes: of a lane's load, and so the features of a program in eights.
        ahead: steps of loads that are on their way.
    """

    warps: int = 8
    bytes: int = 8
    ahead: int = 1


@dataclass(frozen=True)
class Many:
    """How more tokens run.

    Args:
        tokens: of a tile.
        features: of a tile.
        depth: k of a step.
        stages: of the compiler's pipeline.
        warps: of a program.
        group: tiles along M that follow each other before N goes on.
    """

    tokens: int = 64
    features: int = 128
    depth: int = 64
    stages: int = 3
    warps: int = 4
    group: int = 8


CONFIGURATIONS: Final[tuple[Few | Many, ...]] = (
    *(Few(*fields) for fields in ((8, 8, 1), (8, 4, 2), (4, 16, 1), (4, 8, 1))),
    *(Many(*fields) for fields in ((64, 128, 64, 3, 4), (128, 128, 64, 3, 8))),
)
"""Those that are tested."""


def pitch_of(layout: Columns, n: int) -> tuple[int, int]:
    """The bytes from a row of codes to the next, and which of 16, 4 and 1 they are a multiple of."""
    pitch = -(-n // layout.align) * layout.align
    return pitch, next(size for size in (16, 4, 1) if pitch % size == 0)


def signature(call: Call, bias: str, made: Few | Many) -> dict[str, str]:
    """The types of the device code's arguments."""
    few, (_, whole) = isinstance(made, Few), _pitch(call)
    words = "*i32:16" if few and whole > 1 else "*u8:16"
    types = {
        "codes": words,
        "scales": words,
        "x": f"*{TYPES[call.dtype]}:16",
        "scale2": "*fp32",
        "bias": bias,
        "out": f"*{TYPES[call.out_dtype]}",
        "M": "i32",
        "N": "i32",
        "K": "i32:16",
        "pitch": "i32" if few or whole < 16 else "i32:16",
    }
    return types if few else types | {"tiles_m": "i32"}


def constants(call: Call, made: Few | Many) -> dict[str, Any]:
    """The constants of the device code."""
    pitch, whole = _pitch(call)
    k = call.shape[-1]
    same = {**fragments.constants(call), "PLACE": PLACES[call.dtype][0]}
    if isinstance(made, Few):
        return {
            "W": made.warps,
            "J": made.bytes,
            "D": made.ahead,
            "B": 1 if call.rows <= 8 else 2,
            "WIDE": fragments.wide(),
            "ALIGN": whole,
            "TAIL": k % (32 * made.warps * made.ahead) != 0 or pitch % (8 * made.bytes) != 0,
            **same,
        }
    return {
        "BM": made.tokens,
        "BN": made.features,
        "BK": made.depth,
        "STAGES": made.stages,
        "GROUP": made.group,
        "TAIL": k % made.depth != 0,
        **same,
    }


def _pitch(call: Call) -> tuple[int, int]:
    layout: Any = call.layout
    return pitch_of(layout, call.shape[-2])


def configure(call: Call) -> Few | Many:
    """The configuration for a call."""
    default: Few | Many = Few() if call.rows <= FEW_ROWS else Many()
    return choices.configured(call, NAME, default, CONFIGURATIONS)


def configurations(call: Call) -> tuple[Few | Many, ...]:
    """Those that can pay: all for so many tokens."""
    kind = Few if call.rows <= FEW_ROWS else Many
    return tuple(made for made in CONFIGURATIONS if isinstance(made, kind))


def refuse(call: Call) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = fragments.why_not_linear(call)
    if isinstance(call.layout, Columns):
        return reasons
    return (*reasons, f"reads the layout columns, not {call.layout.key}")


def bind(args: LinearArgs, made: Few | Many | None = None) -> Callable[[Array, Array | None, Array], None]:
    """What is left of a launch for calls like these; ``made`` instead of the configuration chosen."""
    call = args.call()
    made = configure(call) if made is None else made
    (n, k), rows, (pitch, whole) = call.shape, call.rows, _pitch(call)
    buffers = args.weight.buffers()
    codes, scales, scale2 = (buffers[name].data_ptr() for name in ("codes", "scales", "scale2"))
    run_program = _program(call, fragments.bias_type(args.bias), made, args.x.device)
    sizes: tuple[int, ...]
    if isinstance(made, Few):
        grid = (-(-n // (8 * made.bytes)), 1, 1)
        sizes = (rows, n, k, pitch // whole)
    else:
        tiles_m = -(-rows // made.tokens)
        grid = (tiles_m * -(-n // made.features), 1, 1)
        sizes = (rows, n, k, pitch, tiles_m)

    def run(x: Any, bias: Any, out: Any) -> None:
        x = fragments.aligned(x)
        added = None if bias is None else bias.data_ptr()
        run_program(grid, (codes, scales, x.data_ptr(), scale2, added, out.data_ptr(), *sizes))

    return run


def _program(call: Call, bias: str, made: Few | Many, device: Any) -> Program:
    from halfbyte.kernels.cuda.columns_code import few, many

    kernel = few if isinstance(made, Few) else many
    return program(kernel, signature(call, bias, made), constants(call, made), device=device, warps=made.warps)


def compile_as(call: Call, made: Few | Many) -> None:
    """Compile it in a configuration."""
    _program(call, "*fp32", made, call.device)


TRITON: Final = Kernel(
    name=NAME,
    bundle=LinearArgs,
    description="reads transposed bytes, in plain Triton; NVIDIA GPUs from sm_80 on, any number of tokens",
    refuse=refuse,
    cost=linear_cost,
    bind=bind,
    configure=configure,
    configurations=configurations,
    compile=compile_as,
)
