"""``linear`` with an INT8 twin, where ``precision`` asks for it: the twin of a weight, and the choice of its kernel."""

from __future__ import annotations

from math import prod
from typing import Any

from halfbyte.kernels import Int8Args, Int8Call, select
from halfbyte.kernels.base import device_of, library_of
from halfbyte.kinds import Int8Weight
from halfbyte.layouts import Packed
from halfbyte.lossy import to_int8
from halfbyte.numerics import Array, is_torch
from halfbyte.operands import (
    as_packed,
    check_arrays,
    checked_dtype,
    on_rows,
)
from halfbyte.weight import Weight, dtype_name


def twin_of(w: Packed | Int8Weight) -> Int8Weight:
    """The INT8 twin of a weight, kept with it until a buffer is written in place."""
    if isinstance(w, Int8Weight):
        return w
    buffers = w.buffers().values()
    versions = [b._version if is_torch(b) and not b.is_inference() else 0 for b in buffers]
    known = w.memo.get("int8")
    if known is None or known[0] != versions:
        weight: Any = w.unpack()  # NVFP4, as as_packed has seen to
        known = w.memo["int8"] = versions, to_int8(weight)
    twin: Int8Weight = known[1]
    return twin


def linear_int8(x: Array, w: Packed | Weight | Int8Weight, bias: Array | None, out_dtype: Any) -> Array:
    """``linear`` with the INT8 twin of a weight."""
    held = w if isinstance(w, Int8Weight) else as_packed(w)
    check_arrays(x, held, bias)
    to = dtype_name(x.dtype) if out_dtype is None else checked_dtype(out_dtype, "out_dtype")
    call = Int8Call.on(
        held,
        rows=prod(x.shape[:-1]),
        dtype=dtype_name(x.dtype),
        out_dtype=to,
        device=device_of(x),
        library=library_of(x),
        bias=bias is not None,
    )
    kernel = select(Int8Args, call)

    def run(x: Array, bias: Array | None, out: Array) -> None:
        kernel.run(Int8Args(x=x, weight=twin_of(held), bias=bias, out=out))

    return on_rows(x, held.shape, bias, to, run)
