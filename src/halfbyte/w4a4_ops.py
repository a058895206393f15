"""``linear`` with activations rounded to NVFP4, where ``precision`` asks for it."""

from __future__ import annotations

from math import isfinite, prod
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.kernels import W4a4Args, W4a4Call, select
from halfbyte.kernels.base import capability_of, device_of, library_of, version_of
from halfbyte.kernels.cuda.shared import capturing
from halfbyte.layouts import Packed
from halfbyte.numerics import Array, is_torch
from halfbyte.operands import as_packed, check_arrays, checked_dtype, on_rows
from halfbyte.weight import Weight, dtype_name


def check_input_scale(w: Packed) -> None:
    """Look once at the input scale of a weight, if it has one.

    Raises:
        UsageError: it is not positive and finite.
    """
    scale = w.buffers().get("input_scale")
    version = version_of(w)
    if scale is None or w.memo.get("input_scale") == version or getattr(scale, "is_meta", False):
        return
    if is_torch(scale) and capturing(scale.device):
        return
    for number in scale.reshape(-1).tolist():
        if not (isfinite(number) and number > 0):
            raise UsageError(
                "the input scale is not positive and finite",
                got=number,
                hint="calibrate again, or leave out precision='w4a4': W4A16 ignores input scales",
            )
    w.memo["input_scale"] = version


def linear_w4a4(x: Array, w: Packed | Weight, bias: Array | None, out_dtype: Any) -> Array:
    """``linear`` in W4A4."""
    held = as_packed(w)
    check_arrays(x, held, bias)
    check_input_scale(held)
    to = dtype_name(x.dtype) if out_dtype is None else checked_dtype(out_dtype, "out_dtype")
    call = W4a4Call.of(
        held,
        rows=prod(x.shape[:-1]),
        dtype=dtype_name(x.dtype),
        out_dtype=to,
        device=device_of(x),
        library=library_of(x),
        bias=bias is not None,
        capability=capability_of(x),
    )
    kernel = select(W4a4Args, call)

    def run(x: Array, bias: Array | None, out: Array) -> None:
        if call.device != "meta":
            kernel.run(W4a4Args(x=x, weight=held, bias=bias, out=out))

    return on_rows(x, held.shape, bias, to, run)
