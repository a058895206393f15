"""``linear`` on a CPU, layout ``rows``, exact, compiled by Numba: the weight is read once, and decoded in registers.

::

    y = round(sum(x * code * scale) * scale2 + bias)

One token streams four rows at a time; 2, 4 or 8 tokens share what two or four rows decode to; more tokens go in blocks
of 16. A product of a code, a scale and an activation is exact in f32 up to the activation; sums are in f32, each in an
order that the shape fixes. With u as for the reference,

    |error| <= ((K + 24) * 2^-24 + u) * sum|x * w| + K * 2^-110 * max|w|

The last term stands for activations and products near the smallest f32, which the bf16 units count as zero; pre_scale
and a bias add 2^-24 each. Activations from 2^122 on may overflow where the result does not. With one-hot activations y
is the decoded weight, bit for bit but for the sign of zeros.

================ ============================================ ==========================================
kernel           needs                                        takes
================ ============================================ ==========================================
``cpu-bf16``     AVX-512 BF16 of AMD's (Zen 4 and later)      bfloat16; float16 as two bf16 that add up
``cpu-avx512``   AVX-512 BW                                   all; multiplies f32
``cpu-portable`` what LLVM compiles for; HALFBYTE_CPU=        all; multiplies f32
                 portable hides the others
================ ============================================ ==========================================
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from halfbyte import jit
from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import Call, Kernel, LinearArgs, linear_cost, why_not_torch
from halfbyte.layouts import Rows
from halfbyte.numerics import BLOCK, Array, is_torch

ROUND: Final = 256
KINDS: Final = {"float32": 0, "bfloat16": 1, "float16": 2}


def _data_word() -> int | None:
    """Where a NumPy array holds the address of its elements: behind what every object of CPython has; None if not."""
    place, probe = object.__basicsize__, np.empty(1, np.uint8)
    if sys.implementation.name != "cpython":
        return None
    found = ctypes.c_size_t.from_address(id(probe) + place).value
    return place if found == probe.__array_interface__["data"][0] else None


_DATA_WORD: Final = _data_word()
_word = ctypes.c_size_t.from_address


def address_of(a: Array) -> int:
    """Where an array's first element lies."""
    if is_torch(a):
        return int(a.data_ptr())
    if _DATA_WORD is None:
        return int(a.__array_interface__["data"][0])
    return _word(id(a) + _DATA_WORD).value  # 0.2 us, where the array's own answer takes 1 us


class Scratch(threading.local):
    """Host memory at a multiple of 64 that a thread keeps between calls."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._start = 0

    def take(self, nbytes: int) -> int:
        """The address of ``nbytes`` with unknown content."""
        if self._memory.size < nbytes + 64:
            self._memory = np.empty(nbytes + 64, np.uint8)
            self._start = -(-address_of(self._memory) // 64) * 64
        return self._start


scratch = Scratch()


@functools.cache
def _code(form: str, several: bool) -> Callable[..., None]:
    from halfbyte.kernels.cpu.product_code import product

    code: Callable[..., None] = product(form, several)
    return code


def _bind(args: LinearArgs, form: str, width: int) -> Callable[[Array, Array | None, Array], None]:
    """The compiled product for arrays like these."""
    m, true_k = args.x.shape
    k = -(-true_k // BLOCK) * BLOCK
    buffers = args.weight.buffers()
    scale2: Any = buffers["scale2"]
    pre: Any = buffers.get("pre_scale")
    tensors = is_torch(scale2)
    if pre is not None:
        pre = pre.float().contiguous() if tensors else np.ascontiguousarray(pre, np.float32)
    weight: list[Any] = [
        a.contiguous() if tensors else np.ascontiguousarray(a) for a in (buffers["codes"], buffers["scales"], scale2)
    ]
    fixed = (m, args.out.shape[1], true_k, k)
    per_row, kind, out_kind = (
        int(scale2.shape[-2] != 1),
        KINDS[dtype_name(args.x.dtype)],
        KINDS[dtype_name(args.out.dtype)],
    )
    bias_kind = 0 if args.bias is None else KINDS[dtype_name(args.bias.dtype)]
    needed = m * -(-k // ROUND) * ROUND * width
    code = _code(form, m != 1)
    if tensors:  # whose memory may move

        def run_torch(x: Array, bias: Array | None, out: Array) -> None:
            added = 0 if bias is None else bias.data_ptr()
            own = (0 if pre is None else pre.data_ptr(), *fixed, *[a.data_ptr() for a in weight], per_row)
            jit.run(code, x.data_ptr(), kind, *own, added, bias_kind, out.data_ptr(), out_kind, scratch.take(needed))

        return run_torch
    before = (kind, 0 if pre is None else address_of(pre), *fixed, *map(address_of, weight), per_row)

    def run_numpy(x: Array, bias: Array | None, out: Array) -> None:
        added = 0 if bias is None else address_of(bias)
        jit.run(code, address_of(x), *before, added, bias_kind, address_of(out), out_kind, scratch.take(needed))

    run_numpy.held = (weight, pre)  # type: ignore[attr-defined] # alive as long as their addresses are
    return run_numpy


def why_not_rows(call: Call) -> tuple[str, ...]:
    """Why no compiled product on the CPU takes a call."""
    reasons = []
    if call.device != "cpu":
        reasons.append(f"runs on the CPU, not on {call.device}")
    if not isinstance(call.layout, Rows):
        reasons.append(f"reads the layout rows, not {call.layout.key}")
    if len(call.shape) != 2:
        reasons.append(f"takes one matrix (N, K), not expert axes {call.shape[:-2]}")
    if call.odd_scales:
        reasons.append("takes positive, finite block scales (bytes 00 to 7E)")
    if call.library == "torch":
        reasons.extend(why_not_torch(call.library, call.elsewhere))
    missing = None if call.elsewhere else jit.missing()
    if missing:
        reasons.append(missing)
    return tuple(reasons)


def _kernel(
    name: str,
    description: str,
    features: tuple[str, ...],
    forms: dict[str, tuple[str, int]],
    makers: tuple[str, ...] = (),
) -> Kernel[Any, Any]:
    """A kernel that needs ``features``; ``forms``: for each dtype of x, the code and the bytes of a staged value.

    ``makers`` begin LLVM's names of the CPUs that it is for; () is all.
    """

    def refuse(call: Call) -> tuple[str, ...]:
        reasons = why_not_rows(call)
        lacking = [feature for feature in features if not reasons and not jit.has(feature)]
        if lacking:
            reasons += (f"needs {' and '.join(lacking)}, which this CPU has not or HALFBYTE_CPU hides",)
        elif not reasons and makers and not jit.cpu_name().startswith(makers):
            reasons += (f"is slower than float32's products on this CPU ({jit.cpu_name()})",)
        if call.dtype not in forms:
            reasons += (f"takes {' or '.join(forms)} activations, not {call.dtype}",)
        if call.pre_scale and "float32" not in forms:
            reasons += ("multiplies activations as they come, without a pre_scale",)
        return reasons

    def load(call: Call) -> None:
        _code(forms[call.dtype][0], call.rows != 1)

    def bind(args: LinearArgs) -> Callable[[Array, Array | None, Array], None]:
        return _bind(args, *forms[dtype_name(args.x.dtype)])

    def launch(args: LinearArgs) -> None:
        bind(args)(args.x, args.bias, args.out)

    return Kernel(
        name=name,
        bundle=LinearArgs,
        description=description,
        refuse=refuse,
        load=load,
        launch=launch,
        cost=linear_cost,
        bind=bind,
    )


_ALL: Final = ("float32", "bfloat16", "float16")
BF16 = _kernel(
    "cpu-bf16",
    "decodes in registers to bf16, which AVX-512 BF16 multiplies exactly",
    ("avx512bf16", "avx512bw"),
    {"bfloat16": ("bf16", 2), "float16": ("halves", 4)},
    makers=("znver",),  # a Xeon of Sapphire Rapids' kind: 66 GFLOP/s a core at M = 8, where cpu-avx512 has 90
)
AVX512 = _kernel(
    "cpu-avx512",
    "decodes in registers by AVX-512 permutes, and multiplies float32",
    ("avx512bw",),
    dict.fromkeys(_ALL, ("fma", 4)),
)
PORTABLE = _kernel(
    "cpu-portable",
    "decodes in registers by shifts, and multiplies float32; any CPU",
    (),
    dict.fromkeys(_ALL, ("portable", 4)),
)
