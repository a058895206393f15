"""``linear`` for any number of tokens on NVIDIA GPUs, layout ``fragments``: tiles of the matrix units' own kind.

::

    y = round(sum(x * code * scale) * scale2 + bias)

A program computes a tile of 16 ``stripes`` features and ``tokens`` tokens, or, with several ``parts``, its sums over a
part of K; then the last program of a tile to come adds the parts' sums, always in the same order. So a result does not
depend on the other rows of x, and on M only through the configuration.

The sums of parts take ``scratch`` bytes on the device, which all kernels share; the counters among them are 0 again
after every launch. Products are exact and sums in f32, as of ``triton-decode``; p parts add p to K + 24 there.

It is written in plain Triton: the tensor core's first operand is the weight, from registers on sm_90. For rows of x
that do not exist others are read, and their results never stored; beyond K nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from halfbyte.kernels.base import ALIGNED, Call, Kernel, LinearArgs, linear_cost
from halfbyte.kernels.cuda import choices, fragments
from halfbyte.kernels.cuda.fragments import TILE, TYPES, UNIT
from halfbyte.kernels.cuda.launch import Program, program
from halfbyte.kernels.cuda.shared import counters, in_turn, workspace
from halfbyte.numerics import Array

NAME: Final = "triton-gemm"


@dataclass(frozen=True)
class Gemm:
    """How the kernel runs.

    Args:
        stripes: of 16 features, of a tile.
        tokens: of a tile.
        units: of 64 k, of a step.
        parts: of K.
        stages: of the compiler's pipeline.
        warps: of a program.
        group: tiles along M that follow each other before N goes on.
    """

    stripes: int = 8
    tokens: int = 64
    units: int = 2
    parts: int = 1
    stages: int = 3
    warps: int = 4
    group: int = 8


CONFIGURATIONS: Final = tuple(
    Gemm(*fields)
    for fields in (
        *((8, 64, 2, 1, 3, 4), (8, 64, 2, 2, 3, 4), (4, 64, 1, 4, 4, 4)),
        *((8, 32, 2, 1, 3, 4), (8, 32, 2, 2, 3, 4), (4, 32, 1, 4, 4, 4)),
        *((8, 128, 1, 1, 4, 8), (4, 128, 1, 2, 4, 4)),
    )
)
"""Those that are tested. None has more than 64 sums in a lane: compilers got some of 128 wrong."""


_MANY: Final = 32768
"""Features, times 128 tokens, whose tiles keep any GPU busy."""


def signature(dtype: str, out_dtype: str, bias: str, whole: bool) -> dict[str, str]:
    """The types of the device code's arguments; ``whole``: rows of out begin at multiples of 16 bytes."""
    return {
        "codes": "*i32:16",
        "scales": "*i32:16",
        "x": f"*{TYPES[dtype]}:16",
        "scale2": "*fp32",
        "bias": bias,
        "out": f"*{TYPES[out_dtype]}" + ":16" * whole,
        "sums": "*fp32:16",
        "counts": "*i32:16",
        "M": "i32",
        "N": "i32" + ":16" * whole,
        "K": "i32:16",
        "share": "i32",
        "parts_m": "i32",
    }


def constants(call: Call, made: Gemm) -> dict[str, Any]:
    """The constants of the device code."""
    return {
        "T": made.stripes,
        "BM": made.tokens,
        "U": made.units,
        "SPLIT": made.parts,
        "STAGES": made.stages,
        "GROUP": made.group,
        "TAIL": call.shape[-1] % (UNIT * made.units) != 0,
        "HIDDEN": hidden(call, made),
        **fragments.constants(call),
        **fragments.decoding(call.dtype),
    }


def hidden(call: Call, made: Gemm) -> bool:
    """Whether sums are hidden from the compiler between steps.

    On sm_90 Triton from 3.7 on, and any where a lane has few sums, else emits wgmma that the assembler serialises.
    """
    few = TILE * made.stripes * made.tokens <= 16 * 32 * made.warps
    return call.capability == 90 and (few or not fragments.wide())


def configure(call: Call) -> Gemm:
    """The configuration for a call; without choices the best of those that were measured on H200 at N 4096 to 28672."""
    n, rows = call.shape[-2], call.rows
    tokens = next((size for size in (32, 64) if rows <= size), 128)
    if tokens == 128:
        split = n < 12800 and rows <= 256
        made = Gemm(stripes=4, tokens=128, units=1, parts=2, stages=4) if split else Gemm(8, 128, 1, 1, 4, 8)
    elif n < 12800:
        made = Gemm(stripes=4, tokens=tokens, units=1, parts=4, stages=4)
    else:
        made = Gemm(tokens=tokens, parts=1 if n >= 25600 else 2)
    return choices.configured(call, NAME, made, CONFIGURATIONS)


def configurations(call: Call) -> tuple[Gemm, ...]:
    """Those that can pay: of tiles that hold the tokens, or of the largest; parts of K only where tiles are few."""
    tokens = next((size for size in (32, 64) if call.rows <= size), 128)
    sizes = {tokens, 64} if call.rows <= 512 else {tokens}
    few = call.shape[-2] * max(1, call.rows // 128) < _MANY
    return tuple(made for made in CONFIGURATIONS if made.tokens in sizes and (made.parts == 1 or few))


def tiles_of(call: Call, made: Gemm) -> tuple[int, int]:
    """Tiles along N and M."""
    return -(-call.shape[-2] // (TILE * made.stripes)), -(-call.rows // made.tokens)


def scratch_of(call: Call, made: Gemm) -> tuple[int, int]:
    """Bytes of sums and of counters."""
    along_n, along_m = tiles_of(call, made)
    if made.parts == 1:
        return 0, 0
    return along_n * along_m * made.parts * TILE * made.stripes * made.tokens * 4, along_n * along_m * 4


def scratch(call: Call) -> int:
    """Bytes of device memory for the sums of parts."""
    return sum(scratch_of(call, configure(call)))


def bind(args: LinearArgs, made: Gemm | None = None) -> Callable[[Array, Array | None, Array], None]:
    """What is left of a launch for calls like these; ``made`` instead of the configuration chosen."""
    call = args.call()
    made = configure(call) if made is None else made
    (n, k), rows, device, parts = call.shape, call.rows, args.x.device, made.parts
    buffers = args.weight.buffers()
    codes, scales, scale2 = (buffers[name].data_ptr() for name in ("codes", "scales", "scale2"))
    along_n, along_m = tiles_of(call, made)
    units = -(-k // UNIT)
    share = -(-units // (parts * made.units)) * made.units
    of_sums, of_counts = scratch_of(call, made)
    grid = (along_n * along_m, parts, 1)
    bias_type = fragments.bias_type(args.bias)
    whole = n % ALIGNED == 0
    programs: dict[bool, Program | None] = {False: None, True: None} | {
        whole: _program(call, bias_type, made, device, whole)
    }

    def run(x: Any, bias: Any, out: Any) -> None:
        x = fragments.aligned(x)
        fits = whole and not out.data_ptr() % ALIGNED
        run_program = programs[fits]
        if run_program is None:
            run_program = programs[fits] = _program(call, bias_type, made, device, fits)
        sums, counts = (workspace(device, of_sums), counters(device, of_counts)) if parts > 1 else (out, out)
        added = None if bias is None else bias.data_ptr()
        pointers = (codes, scales, x.data_ptr(), scale2, added, out.data_ptr(), sums.data_ptr(), counts.data_ptr())
        with in_turn:
            run_program(grid, (*pointers, rows, n, k, share, along_m))

    return run


def _program(call: Call, bias: str, made: Gemm, device: Any, whole: bool) -> Program:
    from halfbyte.kernels.cuda.gemm_code import gemm

    types = signature(call.dtype, call.out_dtype, bias, whole)
    return program(gemm, types, constants(call, made), device=device, warps=made.warps)


def compile_as(call: Call, made: Gemm) -> None:
    """Compile it in a configuration."""
    _program(call, "*fp32", made, call.device, call.shape[0] % ALIGNED == 0)


TRITON: Final = Kernel(
    name=NAME,
    bundle=LinearArgs,
    description="tiles of decoded weights, in plain Triton; NVIDIA GPUs from sm_80 on, any number of tokens",
    refuse=fragments.why_not_fragments,
    cost=linear_cost,
    bind=bind,
    configure=configure,
    configurations=configurations,
    compile=compile_as,
    scratch=scratch,
)
