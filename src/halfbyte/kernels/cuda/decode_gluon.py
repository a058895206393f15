"""``linear`` for up to 16 tokens on Hopper, layout ``fragments``: the weight is read once, and decoded in registers.

::

    y = round(sum(x * code * scale) * scale2 + bias)

A program computes ``tiles`` times 16 features of all tokens. Its W warps take the units of 64 k in turn, unit u by warp
u mod W; each multiplies them in order by m16n8k16, and the W sums are added in a tree. So a sum's order follows from W
and K alone: not from M, the other rows of x, or any other field of the configuration.

A product of a code, a scale and an activation is exact; sums are in f32, which the matrix units round down, so a sum of
K products is off by at most K + 24 units of 2^-23. With u as for the reference,

    |error| <= ((K + 24) * 2^-23 + u) * sum|x * w|

and a bias adds 2^-24. With one-hot activations y is the decoded weight, bit for bit but for the sign of zeros.

A product has 8 columns at the least. Of M tokens, a power of two up to 4, each has 8 / M, and those hold x of as many
units of a warp at once: so x is loaded once for 8 / M units and not once for each, which takes longer than to multiply.
The column of a unit counts in its product, and is what the next unit's is added to.

The code is compiled for K: a model has few. What is read, and how far ahead, is then known in it.

The weight is read from global memory as it lies, ``ahead`` units of each warp before they are multiplied; units after
those, up to ``prefetch`` of a tile, are asked for into L2 at the start. x of rows that do not exist is that of the last
one, and never stored. K is a multiple of 16: what a unit has beyond it is a weight of 0, by the layout, times 0 where x
is not read; the true K of a weight whose last block is padded is refused.

**The first units are read before the kernel ahead has ended** (programmatic dependent launch): x, scale2, bias and out
are touched only after ``griddepcontrol.wait``, but codes and scales may be asked for while that kernel still runs. That
is right where they were written long ago, and not where the kernel ahead writes them. So the first launch on a weight
is an ordinary one, which starts after all that is ahead of it; an event behind it tells when that is over, and only
launches from then on start early. What torch writes to the buffers later ends what is remembered of a weight, and it
begins anew; so do CUDA graphs whose capture no finished launch precedes: they hold ordinary launches. Of inference
tensors torch does not count the writes, so no launch on those is early. Who writes codes or scales behind torch's
back, by address or through ``.data``, must wait for the device before the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import ALIGNED, Call, Kernel, LinearArgs, linear_cost
from halfbyte.kernels.cuda import choices
from halfbyte.kernels.cuda.fragments import decode_code, scale_code
from halfbyte.kernels.cuda.launch import Program, program, why_not
from halfbyte.kernels.cuda.shared import Written
from halfbyte.kernels.gated import GatedArgs, GatedCall, gated_cost
from halfbyte.kernels.in_order import FEWEST, InOrderArgs, InOrderCall, in_order_cost
from halfbyte.layouts import Fragments
from halfbyte.layouts.fragments import FACTOR, STEPS
from halfbyte.numerics import BLOCK, Array

NAME: Final = "gluon-decode"
MOST_ROWS: Final = 16
UNIT: Final = 64
"""k of a unit."""
TILE: Final = 16
"""Features of a unit."""

MOST_FEW: Final = 4
"""Tokens up to which columns of a product are for several units; with a gate it is one."""

_PROGRAMS: Final = 64
"""Fewer are too few for a GPU that this runs on."""

_TYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Decode:
    """How the kernel runs; every configuration gives right results, and those with the same ``warps`` the same ones.

    Args:
        warps: of a program, among which k is split.
        tiles: of 16 features, of a program.
        ahead: units of each warp and tile that are on their way.
        prefetch: units of a tile, at most, that are on their way at the start: those of ``ahead`` to registers, the
            others to L2.
        unroll: units of a warp, of all its tiles, at most, that are not a loop.
        registers: of a thread, at most; None leaves it to the compiler.
    """

    warps: int = 4
    tiles: int = 1
    ahead: int = 5
    prefetch: int = 0
    unroll: int = 32
    registers: int | None = None


FEW: Final = Decode()
"""The default for up to 8 tokens."""
MANY: Final = Decode(tiles=2, ahead=3)
"""The default for 9 to 16 tokens."""
FEW_GATED: Final = Decode(tiles=2, ahead=2)
MANY_GATED: Final = Decode(tiles=2, ahead=2, registers=128)
"""The same of products with a gate."""
CONFIGURATIONS: Final = (
    FEW,
    MANY,
    Decode(warps=2, tiles=4, ahead=1),
    Decode(warps=4, tiles=1, ahead=2),
    Decode(warps=4, tiles=1, ahead=5, prefetch=32),
    Decode(warps=4, tiles=1, ahead=6),
    Decode(warps=4, tiles=1, ahead=6, prefetch=32),
    Decode(warps=4, tiles=1, ahead=6, prefetch=64),
    Decode(warps=4, tiles=2, ahead=3, registers=128),
    Decode(warps=4, tiles=2, ahead=4),
    Decode(warps=8, tiles=1, ahead=2, prefetch=32),
    Decode(warps=8, tiles=1, ahead=3, prefetch=64, registers=64),
    Decode(warps=8, tiles=1, ahead=3, prefetch=128),
    Decode(warps=8, tiles=1, ahead=3),
    Decode(warps=8, tiles=1, ahead=3, registers=80),
    Decode(warps=8, tiles=1, ahead=4),
    Decode(warps=8, tiles=1, ahead=4, prefetch=64),
    Decode(warps=8, tiles=1, ahead=5, registers=128),
    Decode(warps=8, tiles=1, ahead=5, prefetch=64),
    Decode(warps=8, tiles=1, ahead=6),
    Decode(warps=8, tiles=1, ahead=6, prefetch=64),
    Decode(warps=8, tiles=2, ahead=2),
    Decode(warps=8, tiles=2, ahead=3),
    Decode(warps=16, tiles=1, ahead=3, registers=64),
    Decode(warps=16, tiles=1, ahead=4, registers=64),
)
"""All that are chosen."""

LONG: Final = 128
"""Units of k of which more are shared by 8 warps, where x lies in order."""
AT_ONCE: Final = 396
"""Programs of 4 warps with 168 registers that an H200 holds."""


def signature(dtype: str, out_dtype: str, bias_dtype: str) -> dict[str, str]:
    """The types of the device code's arguments."""
    return {
        "codes_ptr": "*i32:16",
        "scales_ptr": "*i16:16",
        "scale2_ptr": "*fp32",
        "x_ptr": f"*{_TYPES[dtype]}:16",
        "bias_ptr": f"*{_TYPES[bias_dtype]}",
        "out_ptr": f"*{_TYPES[out_dtype]}",
        "M": "i32",
        "N": "i32",
    }


def constants(
    shape: tuple[int, int], rows: int, dtype: str, *, per_row: bool, bias: bool, made: Decode, gate: str | None = None,
    in_order: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The constants of the device code for a weight (N, K) and so many tokens."""
    n, k = shape
    units = -(-k // UNIT)
    steps = -(-units // made.warps)
    ahead = min(made.ahead, steps)
    r = tiles_of(n, made, gate)
    loops = max(0, units // made.warps // ahead - 1) if steps * r > made.unroll else 0
    return {
        "K": k,
        "R": r,
        "D": ahead,
        "L": loops,
        "P": max(0, min(made.prefetch, units) - ahead * made.warps),
        "NB": 8 if rows <= 8 else 16,
        "S": 1 if rows > (MOST_FEW if gate is None else 1) or loops else 8 >> max(0, rows - 1).bit_length(),
        "PER_ROW": per_row,
        "BIAS": bias,
        "DECODE": decode_code(dtype),
        "SCALE": scale_code(dtype),
        "FACTOR": FACTOR,
        "KEEP": "evict_first",
        "GATE": gate,
        "ORDERED": in_order,
    }


def parts(
    call: Call, bias_dtype: str, made: Decode, gate: str | None = None, in_order: bool = False
) -> tuple[dict[str, str], dict[str, Any]]:
    """The signature and the constants for a call; without a bias its dtype is any.

    Args:
        call: what is multiplied.
        bias_dtype: of the bias.
        made: the configuration.
        gate: an activation, or None.
        in_order: x lies so (``halfbyte.kernels.in_order``); with a gate the result, too.
    """
    n, k = call.shape
    held = constants(
        (n, k), call.rows, call.dtype, per_row=call.per_row, bias=call.bias, made=made, gate=gate, in_order=in_order
    )
    return signature(call.dtype, call.out_dtype, bias_dtype), held


def tiles(n: int, made: Decode) -> int:
    """Of a program: as configured, or what a narrow weight has; 1 where it has none."""
    return min(made.tiles, 1 << max(1, -(-n // TILE)).bit_length() - 1)


def tiles_of(n: int, made: Decode, gate: str | None) -> int:
    """The same with a gate: of both halves, so 2 at the least."""
    return tiles(n, made) if gate is None else 2 * tiles(n // 2, replace(made, tiles=max(1, made.tiles // 2)))


def configure(call: Call) -> Decode:
    """The configuration for a call."""
    return choices.configured(call, NAME, FEW if call.rows <= 8 else MANY, CONFIGURATIONS)


def configurations(call: Call) -> tuple[Decode, ...]:
    """Those that can pay: enough programs for a GPU, as many loads on their way as pay, and no code twice."""
    n, k = call.shape[-2:]
    few = call.rows <= 8
    found: dict[Any, Decode] = {}
    for made in CONFIGURATIONS:
        many = made.tiles == 1 or n >= _PROGRAMS * TILE * made.tiles
        pays = made.ahead >= 3 and made.ahead * made.tiles <= 6 if few else made.ahead <= 5
        if many and pays:
            held = constants((n, k), call.rows, call.dtype, per_row=False, bias=False, made=made)
            found.setdefault((made.warps, made.registers, *held.values()), made)
    return tuple(found.values())


def refuse(call: Call) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = list(why_not(call, least=90, most=90, gluon=True))
    needed = Fragments(call.dtype if call.dtype in STEPS else "bfloat16")
    if call.layout != needed:
        reasons.append(f"reads the layout {needed.key}, not {call.layout.key}")
    if call.dtype not in STEPS:
        reasons.append(f"takes {' or '.join(STEPS)} activations, not {call.dtype}")
    if len(call.shape) != 2:
        reasons.append(f"takes one matrix (N, K), not expert axes {call.shape[:-2]}")
    if call.shape[-1] % BLOCK:
        reasons.append(f"takes a K that is a multiple of {BLOCK}, not {call.shape[-1]}")
    if call.pre_scale:
        reasons.append("multiplies activations as they come, without a pre_scale")
    if call.rows > MOST_ROWS:
        reasons.append(f"takes up to {MOST_ROWS} tokens, not {call.rows}")
    return tuple(reasons)


def bind(args: LinearArgs, made: Decode | None = None) -> Callable[[Array, Array | None, Array], None]:
    """What is left of a launch for calls like these; ``made`` instead of the configuration chosen."""
    call = args.call()
    return _bind(args, call, configure(call) if made is None else made)


def bind_in_order(args: InOrderArgs, made: Decode | None = None) -> Callable[[Array, Array | None, Array], None]:
    """As ``bind``, of x in order."""
    call = args.call()
    return _bind(args, call, configure_in_order(call) if made is None else made, in_order=True)


def bind_gated(args: GatedArgs, made: Decode | None = None) -> Callable[[Array, Array | None, Array], None]:
    """As ``bind``, with a gate."""
    call = args.call()
    made = configure_gated(call) if made is None else made
    return _bind(args, call.linear(), made, args.activation, call.in_order)


def _bind(
    args: LinearArgs | GatedArgs | InOrderArgs, call: Call, made: Decode, gate: str | None = None,
    in_order: bool = False,
) -> Callable[[Array, Array | None, Array], None]:  # fmt: skip
    n, rows = call.shape[0], call.rows
    buffers = args.weight.buffers()
    codes, scales, scale2 = (buffers[name].data_ptr() for name in ("codes", "scales", "scale2"))
    device = args.x.device
    grid = (-(-n // (TILE * tiles_of(n, made, gate))), 1, 1)
    bias_dtype = "float32" if args.bias is None else dtype_name(args.bias.dtype)
    ordinary, early = (_program(call, bias_dtype, made, device, pdl, gate, in_order) for pdl in (False, True))
    written = Written(device)
    counted = not any(buffers[name].is_inference() for name in ("codes", "scales"))

    def run(x: Any, bias: Any, out: Any) -> None:
        at = x.data_ptr()
        if at % ALIGNED:
            x = x.clone()
            at = x.data_ptr()
        added = None if bias is None else bias.data_ptr()
        values = (codes, scales, scale2, at, added, out.data_ptr(), rows, n)
        if written.over:
            early(grid, values)
        else:
            ordinary(grid, values)
            if counted:
                written.launched()

    return run


def _program(
    call: Call, bias_dtype: str, made: Decode, device: Any, pdl: bool, gate: str | None = None, in_order: bool = False
) -> Program:
    from halfbyte.kernels.cuda.decode_gluon_code import decode

    return program(
        decode,
        *parts(call, bias_dtype, made, gate, in_order),
        device=device,
        warps=made.warps,
        pdl=pdl,
        maxnreg=made.registers,
    )


def configure_gated(call: GatedCall) -> Decode:
    """The configuration for a call with a gate."""
    if not call.in_order:
        return FEW_GATED if call.rows <= 8 else MANY_GATED
    units = -(-call.shape[-1] // UNIT)
    warps = 2 if 2 * units <= LONG else 4 if units <= LONG else 8
    return Decode(warps=warps, tiles=2, ahead=3, unroll=64, registers=128)


def configure_in_order(call: InOrderCall) -> Decode:
    """The configuration for a call of x in order: the more registers the fewer programs there are."""
    n, k = call.shape
    if k > LONG * UNIT:
        return Decode(warps=8, ahead=6, unroll=64, registers=128)
    few = -(-n // TILE) <= AT_ONCE
    return Decode(warps=4, ahead=8 if few else 6, registers=168 if few else 128)


def refuse_gated(call: GatedCall) -> tuple[str, ...]:
    """Why it declines a call with a gate."""
    reasons = _refuse_in_order(call) if call.in_order else (*refuse(call), *_refuse_forced())
    if call.shape[-2] % (2 * TILE):
        reasons = (*reasons, f"takes gates that are a multiple of {TILE}, not {call.shape[-2] / 2:g}")
    return reasons


def _refuse_in_order(call: Call) -> tuple[str, ...]:
    reasons = (*refuse(call), *_refuse_forced())
    if call.rows < FEWEST:
        reasons = (*reasons, f"takes {FEWEST} tokens or more in order, not {call.rows}")
    return reasons


def _refuse_forced() -> tuple[str, ...]:
    from halfbyte.kernels import forced

    wanted = forced(LinearArgs.op)
    return () if wanted in (None, NAME) else (f"HALFBYTE_KERNEL asks for {wanted}",)


def load_gated(call: GatedCall) -> None:
    """Compile it."""
    import torch

    for pdl in (False, True):
        made, device = configure_gated(call), torch.device(call.device)
        _program(call.linear(), "float32", made, device, pdl, call.activation, call.in_order)


def _load_in_order(call: InOrderCall) -> None:
    import torch

    for pdl in (False, True):
        made, device = configure_in_order(call), torch.device(call.device)
        _program(call.linear(), "float32", made, device, pdl, in_order=True)


def compile_as(call: Call, made: Decode) -> None:
    """Compile it in a configuration."""
    import torch

    for pdl in (False, True):
        _program(call, "float32", made, torch.device(call.device), pdl)


GLUON: Final = Kernel(
    name=NAME,
    bundle=LinearArgs,
    description="decodes in registers to m16n8k16 fragments; Hopper, up to 16 tokens",
    refuse=refuse,
    cost=linear_cost,
    bind=bind,
    configure=configure,
    configurations=configurations,
    compile=compile_as,
)
GATED: Final = Kernel(
    name="gluon-gated",
    bundle=GatedArgs,
    description="gluon-decode, with the activation of the gate; Hopper, up to 16 tokens",
    refuse=refuse_gated,
    cost=gated_cost,
    load=load_gated,
    bind=bind_gated,
)
IN_ORDER: Final = Kernel(
    name="gluon-in-order",
    bundle=InOrderArgs,
    description="gluon-decode of 9 to 16 tokens that lie in the order of its lanes; Hopper",
    refuse=_refuse_in_order,
    cost=in_order_cost,
    load=_load_in_order,
    bind=bind_in_order,
)
