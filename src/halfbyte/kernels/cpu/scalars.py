"""Numbers in compiled products: dtypes by number, and bits as values; loaded only to run."""

from __future__ import annotations

from typing import Any

from numba import types
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
