"""``dense`` on an NVIDIA GPU for one or two tokens, in plain Triton: the weight is read once, as it lies.

A warp has a row of the weight, of which up to 8 KiB are on their way before any is multiplied. Of each 512 bytes a lane
takes 16, and has a sum for each of its values; those are added first, in pairs and then one after the other, and the
lanes' in a tree. A bias adds one rounding, and the result is rounded once:

::

    |error| <= (ceil(K / width) + 4 + 5) * 2^-24 * sum|x * w|       width = 512 bytes of k

A row does not depend on the other rows of x.

**The first weights are asked for before the kernel ahead has ended** on Hopper and later (programmatic dependent
launch); all else is touched after ``griddepcontrol.wait``. That is right where the weight was written long ago. So the
first launch on a weight is an ordinary one, and later ones start early once it is known to be over. What torch writes
to the weight ends what is remembered of it, as does another address; of inference tensors torch does not count the
writes, so no launch on those is early. Who writes behind torch's back must wait for the device before the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from weakref import ref

from halfbyte.arrays import float_dtype
from halfbyte.kernels.base import Kernel
from halfbyte.kernels.cuda.launch import Program, program, why_not
from halfbyte.kernels.cuda.shared import Written
from halfbyte.kernels.dense import DenseArgs, DenseCall, dense_cost

TYPES: Final = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
HOPPER: Final = 90
"""The compute capability from which on it starts before the kernel ahead has ended."""
MOST_ROWS: Final = 2
"""Tokens; for each a warp reads as much of x as of the weight, so for more cuBLAS is faster."""
OF_TWO: Final = (1024, 8192)
"""The least and the largest K for two tokens: with less and with more cuBLAS was faster on an H200."""
MULTIPLE: Final = 32
"""K is one of it."""
STEP: Final = 512
"""Bytes of a row of the weight in a step of a warp."""
WARPS: Final = 4
AHEAD: Final = 16
"""Steps whose weights are on their way at the most; as many in each round of a row."""


def parts(call: DenseCall, capability: int) -> tuple[Any, Any]:
    """Signature and constants of the device code; capability 0 for Triton's interpreter."""
    size = call.shape[1] * float_dtype(call.dtype).itemsize
    bits = call.dtype == "bfloat16" and not capability
    of = "*i16" if bits else TYPES[call.dtype]
    signature = {"x": "*i32:16", "weight": "*i32:16", "bias": of, "out": f"{of}:16", "N": "i32", "K": "i32:16"}
    steps = -(-size // STEP)
    ahead = -(-steps // -(-steps // AHEAD))
    return signature, {
        "ROWS": call.rows,
        "W": WARPS,
        "D": ahead,
        "TAIL": size % (STEP * ahead) != 0,
        "BIAS": call.bias,
        "BITS": bits,
        "EARLY": capability >= HOPPER,
    }


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


def bind(args: DenseArgs) -> Callable[..., None]:
    """What writes ``out``."""
    call, device = args.call(), args.x.device
    ordinary = _program(call, device, pdl=False)
    early = _program(call, device, pdl=True) if call.capability >= HOPPER else None
    weights = _Weights(device)
    (n, k), plain = call.shape, bool(ordinary.plainly)
    grid, words = (-(-n // WARPS), 1, 1), k * float_dtype(call.dtype).itemsize // 4

    def run(x: Any, weight: Any, bias: Any, out: Any) -> None:
        arrays = x, weight, bias, out
        given = arrays if plain else tuple([None if a is None else a.data_ptr() for a in arrays])
        written = None if early is None else weights.written(weight)
        if early is not None and written is not None and written.over:
            early(grid, (*given, n, words))
            return
        ordinary(grid, (*given, n, words))
        if written is not None:
            written.launched()

    return run


def _program(call: DenseCall, device: Any, *, pdl: bool) -> Program:
    from halfbyte.kernels.cuda.dense_code import dense

    signature, constants = parts(call, call.capability)
    return program(dense, signature, constants, device=device, warps=WARPS, pdl=pdl)


def _refuse(call: DenseCall) -> tuple[str, ...]:
    reasons = list(why_not(call))
    k = call.shape[1]
    if call.dtype not in TYPES:
        return (*reasons, f"takes {' or '.join(TYPES)}, not {call.dtype}")
    if call.rows > MOST_ROWS:
        reasons.append(f"takes up to {MOST_ROWS} tokens, not {call.rows}: cuBLAS is faster")
    if not k or k % MULTIPLE:
        reasons.append(f"takes a K that is a multiple of {MULTIPLE}, not {k}")
    least, most = OF_TWO
    if call.rows == MOST_ROWS and not least <= k <= most:
        reasons.append(f"takes {MOST_ROWS} tokens with a K from {least} to {most}, not {k}: cuBLAS is faster")
    return tuple(reasons)


def _load(call: DenseCall) -> None:
    import torch

    for pdl in (False, True) if call.capability >= HOPPER else (False,):
        _program(call, torch.device(call.device, torch.cuda.current_device()), pdl=pdl)


TRITON: Final = Kernel(
    name="triton-dense",
    bundle=DenseArgs,
    description="reads the weight once, in plain Triton; NVIDIA GPUs from sm_80 on, one or two tokens",
    refuse=_refuse,
    load=_load,
    bind=bind,
    cost=dense_cost,
)
