"""``dense`` on an NVIDIA GPU for up to 16 tokens, in plain Triton: the weight is read once, as it lies.

There are two ways. ``Few`` multiplies and adds: of a row a lane takes 16 bytes in each step, 256 k of 16-bit values by
a warp, and has a sum for each of its values; those are added first, in pairs and then one after the other, and the
lanes' in a tree:

::

    |error| <= (ceil(K / width) + 4 + 5) * 2^-24 * sum|x * w|       width = 512 bytes of k

``Many`` multiplies by matrix instructions, m16n8k16, on bfloat16 and float16: a product is exact, and sums are in f32,
which the matrix units may round down, so it is off by at most (K + 24) * 2^-23 * sum|x * w|. A bias adds one rounding,
and the result is rounded once. Which of them runs follows from dtype and M; a row does not depend on the others.

**The first weights are asked for before the kernel ahead has ended** on Hopper and later (programmatic dependent
launch); all else is touched after ``griddepcontrol.wait``. That is right where the weight was written long ago. So the
first launch on a weight is an ordinary one, and later ones start early once it is known to be over. What torch writes
to the weight ends what is remembered of it, as does another address; of inference tensors torch does not count the
writes, so no launch on those is early. Who writes behind torch's back must wait for the device before the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

from halfbyte.arrays import float_dtype
from halfbyte.kernels.base import Kernel
from halfbyte.kernels.cuda.fragments import wide
from halfbyte.kernels.cuda.launch import Program, program, why_not
from halfbyte.kernels.cuda.shared import Written
from halfbyte.kernels.dense import DenseArgs, DenseCall, dense_cost

TYPES: Final = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
HOPPER: Final = 90
"""The compute capability from which on it starts before the kernel ahead has ended."""
MOST_ROWS: Final = 16
MOST_FEW: Final = 4
"""Tokens of ``Few`` at the most."""
BY_FEW: Final = 2
"""Tokens up to which it is the default where there are matrix instructions, too."""
LEAST: Final = 1024
"""Rows of a weight; with fewer there are too few programs for a GPU."""
MULTIPLE: Final = 32
"""K is one of it."""
STEP: Final = 512
"""Bytes of a row of the weight in a step of ``Few``."""
UNIT: Final = 64
"""k of a warp in a step of ``Many``."""
STRIPE: Final = 16


@dataclass(frozen=True)
class Few:
    """By multiply-add.

    Args:
        warps: of a program.
        rows: of the weight, of a warp.
        ahead: steps whose weights are on their way.
    """

    warps: int = 4
    rows: int = 2
    ahead: int = 4


@dataclass(frozen=True)
class Many:
    """By matrix instructions.

    Args:
        warps: of a program, among which k is split.
        stripes: of 16 rows of the weight, of a program.
        ahead: steps whose weights are on their way.
    """

    warps: int = 4
    stripes: int = 1
    ahead: int = 4


Made = Few | Many


def configure(call: DenseCall) -> Made:
    """How it runs."""
    if call.dtype == "float32" or call.rows <= BY_FEW:
        return Few()
    return Many()


def parts(call: DenseCall, made: Made, capability: int, early: bool = True) -> tuple[str, Any, Any]:
    """Name, signature and constants of the device code; capability 0 for Triton's interpreter."""
    k = call.shape[1]
    bits = call.dtype == "bfloat16" and not capability
    of = "*i16" if bits else TYPES[call.dtype]
    words = "*i32:16" if isinstance(made, Few) else f"{of}:16"
    signature = {"x": words, "weight": "*i32:16", "bias": of, "out": f"{of}:16"}
    numbers = {"N": "i32", "K": "i32:16"}
    flags = {"BITS": bits, "EARLY": early and capability >= HOPPER}
    step = STEP // float_dtype(call.dtype).itemsize if isinstance(made, Few) else UNIT * made.warps
    ahead = max(1, min(made.ahead, -(-k // step)))
    tail = k % (step * ahead) != 0
    if isinstance(made, Few):
        held = {"ROWS": call.rows, "W": made.warps, "R": made.rows, "RP": 1 << (made.rows - 1).bit_length()}
        return "few", signature | numbers, held | {"D": ahead, "TAIL": tail, "BIAS": call.bias} | flags
    held = {"W": made.warps, "R": made.stripes, "D": ahead, "B": 1 if call.rows <= 8 else 2}
    held |= {"WIDE": wide(), "TAIL": tail, "BIAS": call.bias, "UP": not capability}
    return "many", signature | {"M": "i32"} | numbers, held | flags


def programs(call: DenseCall, made: Made) -> int:
    """So many run."""
    return -(-call.shape[0] // (made.warps * made.rows if isinstance(made, Few) else STRIPE * made.stripes))


class _Weights:
    """Of weights on a device, whether what was ahead of the first launch on each is over."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._known: dict[int, tuple[Any, int, int, Written]] = {}

    def written(self, weight: Any) -> Written | None:
        """None where torch does not count what is written."""
        if weight.is_inference():
            return None
        key, address, version = id(weight), weight.data_ptr(), weight._version
        known = self._known.get(key)
        if known is None or known[0]() is not weight or known[1:3] != (address, version):
            gone = ref(weight, lambda _: self._known.pop(key, None))
            known = self._known[key] = gone, address, version, Written(self._device)
        return known[3]


def bind(args: DenseArgs, made: Made | None = None) -> Callable[..., None]:
    """What writes ``out``; ``made`` instead of the configuration chosen."""
    call, device = args.call(), args.x.device
    made = configure(call) if made is None else made
    ordinary = _program(call, made, device, pdl=False)
    early = _program(call, made, device, pdl=True) if call.capability >= HOPPER else None
    weights = _Weights(device)
    (n, k), plain, grid = call.shape, bool(ordinary.plainly), (programs(call, made), 1, 1)
    words = k * float_dtype(call.dtype).itemsize // 4
    sizes = (n, words) if isinstance(made, Few) else (call.rows, n, words)

    def run(x: Any, weight: Any, bias: Any, out: Any) -> None:
        arrays = x, weight, bias, out
        given = arrays if plain else tuple([None if a is None else a.data_ptr() for a in arrays])
        written = None if early is None else weights.written(weight)
        if early is not None and written is not None and written.over:
            early(grid, (*given, *sizes))
            return
        ordinary(grid, (*given, *sizes))
        if written is not None:
            written.launched()

    return run


def _program(call: DenseCall, made: Made, device: Any, *, pdl: bool) -> Program:
    from halfbyte.kernels.cuda import dense_code

    name, signature, constants = parts(call, made, call.capability)
    return program(getattr(dense_code, name), signature, constants, device=device, warps=made.warps, pdl=pdl)


def _refuse(call: DenseCall) -> tuple[str, ...]:
    reasons = list(why_not(call))
    n, k = call.shape
    most = MOST_FEW if call.dtype == "float32" else MOST_ROWS
    if call.dtype not in TYPES:
        reasons.append(f"takes {' or '.join(TYPES)}, not {call.dtype}")
    if call.rows > most:
        reasons.append(f"takes up to {most} tokens of {call.dtype}, not {call.rows}")
    if not k or k % MULTIPLE:
        reasons.append(f"takes a K that is a multiple of {MULTIPLE}, not {k}")
    if n < LEAST:
        reasons.append(f"is for weights of {LEAST} rows or more, not {n}")
    return tuple(reasons)


def _load(call: DenseCall) -> None:
    import torch

    for pdl in (False, True) if call.capability >= HOPPER else (False,):
        _program(call, configure(call), torch.device(call.device, torch.cuda.current_device()), pdl=pdl)


TRITON: Final = Kernel(
    name="triton-dense",
    bundle=DenseArgs,
    description="reads the weight once, in plain Triton; NVIDIA GPUs from sm_80 on, up to 16 tokens",
    refuse=_refuse,
    load=_load,
    bind=bind,
    cost=dense_cost,
)
