"""``linear`` with an INT8 twin on a CPU, compiled by Numba; what it computes, halfbyte.kernels.int8 says, bit for bit.

=================== ============================ ================================================================
kernel              needs                        multiplies
=================== ============================ ================================================================
``int8-vnni``       AVX-512 VNNI                 four bytes to 32 bits in each lane
``int8-portable``   what LLVM compiles for       i8 widened, in pairs: PMADDWD on x86, SMULL on aarch64
=================== ============================ ================================================================

One token streams four rows at a time, at the speed of memory; up to six tokens share them in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from halfbyte import jit
from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import Kernel, why_not_torch
from halfbyte.kernels.cpu.exact import address_of
from halfbyte.kernels.int8 import Int8Args, Int8Call, cost, refuse
from halfbyte.numerics import is_torch

_STEP: Final = 64
_KINDS: Final = {"float32": 0, "bfloat16": 1, "float16": 2}


@functools.cache
def _code(form: str, several: bool) -> Callable[..., None]:
    from halfbyte.kernels.cpu.int8_code import PRODUCTS

    code: Callable[..., None] = PRODUCTS[form, several]
    return code


def _contiguous(a: Any) -> Any:
    return None if a is None else a.contiguous() if is_torch(a) else np.ascontiguousarray(a)


def _launch(form: str, args: Int8Args) -> None:
    x, out, weight = args.x, args.out, args.weight
    m, k = x.shape
    bias, scale, pre = (_contiguous(a) for a in (args.bias, weight.scale, weight.pre_scale))
    if pre is not None:
        pre = pre.float() if is_torch(pre) else pre.astype(np.float32)
    staged = np.empty(m * (-(-k // _STEP) * _STEP + 8) + _STEP, np.uint8)
    jit.run(
        _code(form, m != 1),
        address_of(x),
        _KINDS[dtype_name(x.dtype)],
        0 if pre is None else address_of(pre),
        m,
        out.shape[1],
        k,
        address_of(weight.data),
        address_of(scale),
        int(scale.shape[-2] != 1),
        0 if bias is None else address_of(bias),
        0 if bias is None else _KINDS[dtype_name(bias.dtype)],
        address_of(out),
        _KINDS[dtype_name(out.dtype)],
        -(-address_of(staged) // _STEP) * _STEP,
    )


def _kernel(form: str, description: str, feature: str | None) -> Kernel[Any, Any]:
    """The kernel of a form, which needs what LLVM calls ``feature``."""

    def declined(call: Int8Call) -> tuple[str, ...]:
        reasons = refuse(call) + (why_not_torch(call.library) if call.library == "torch" else ())
        missing = jit.missing()
        if missing:
            return (*reasons, missing)
        if feature and not jit.has(feature):
            return (*reasons, f"needs {feature}, which this CPU has not or HALFBYTE_CPU hides")
        return reasons

    def load(call: Int8Call) -> None:
        _code(form, call.rows != 1)

    def launch(args: Int8Args) -> None:
        _launch(form, args)

    return Kernel(
        name=f"int8-{form}",
        bundle=Int8Args,
        description=description,
        refuse=declined,
        load=load,
        launch=launch,
        cost=cost,
    )


VNNI = _kernel("vnni", "multiplies bytes by AVX-512 VNNI", "avx512vnni")
PORTABLE = _kernel("portable", "multiplies bytes widened to 16 or 32 bits; any CPU", None)
