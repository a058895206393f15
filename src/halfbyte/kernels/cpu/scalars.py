"""Numbers in compiled code: dtypes by number, bits as values, and arrays by address; loaded only to run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from halfbyte.kernels.cpu.vectors import F16, F32

F32_KIND, BF16_KIND, F16_KIND = range(3)
"""Numbers of dtypes in calls."""

_f32, _u16, _u32 = types.float32, types.uint16, types.uint32


@intrinsic
def widen(typing: Any, bits: Any) -> Any:
    """Bits of an fp16 to f32."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fpext(builder.bitcast(values[0], F16), F32)

    return _f32(_u16), code


@intrinsic
def narrow(typing: Any, value: Any) -> Any:
    """f32 to the bits of the nearest fp16."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], F16), context.get_value_type(_u16))

    return _u16(_f32), code


@intrinsic
def bits_of(typing: Any, value: Any) -> Any:
    """The bits of an f32."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], context.get_value_type(_u32))

    return _u32(_f32), code


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """The f32 of some bits."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], F32)

    return _f32(_u32), code


def pointer_to(element: Any) -> Any:
    """A function that makes a pointer to elements of an address."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), code

    return pointer


f32_at, u16_at = pointer_to(_f32), pointer_to(_u16)
_inner = njit(nogil=True, error_model="numpy")
summing = njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
"""Compiles a function whose sums may be split among lanes."""


@_inner
def read(kind, address, count, to):
    """Elements of an array of a dtype, as f32."""
    if kind == F32_KIND:
        floats = carray(f32_at(address), count)
        for i in range(count):
            to[i] = floats[i]
        return
    words = carray(u16_at(address), count)
    if kind == BF16_KIND:
        for i in range(count):
            to[i] = float_of(np.uint32(np.uint32(words[i]) << np.uint32(16)))
    else:
        for i in range(count):
            to[i] = widen(words[i])


@_inner
def write(kind, address, count, values):
    """Elements of an array of a dtype, from f32, rounded to nearest even; ``values`` become what was written."""
    if kind == F32_KIND:
        floats = carray(f32_at(address), count)
        for i in range(count):
            floats[i] = values[i]
        return
    words = carray(u16_at(address), count)
    if kind == BF16_KIND:
        for i in range(count):
            bits = bits_of(values[i])
            rounded = np.uint32((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
            quiet = np.uint32((bits >> np.uint32(16)) | np.uint32(0x40))
            words[i] = np.uint16(quiet if np.isnan(values[i]) else rounded)
            values[i] = float_of(np.uint32(np.uint32(words[i]) << np.uint32(16)))
    else:
        for i in range(count):
            words[i] = narrow(values[i])
            values[i] = widen(words[i])


@summing
def dot(a, b, count):
    """The sum of the products of two f32 arrays."""
    total = np.float32(0)
    for i in range(count):
        total += a[i] * b[i]
    return total
