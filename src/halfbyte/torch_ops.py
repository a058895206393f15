"""``linear`` as an operator of torch's, for ``torch.compile`` and ``torch.export``.

The operator takes a weight as its layout's key and its buffers; what kernels remember of a weight is about its
block scales, and kept with these for as long as they live.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from halfbyte import fp8_ops, int8_ops, ops, w4a4_ops
from halfbyte.errors import UsageError
from halfbyte.kernels.cuda.shared import keeping_nothing
from halfbyte.kinds import Fp8Weight
from halfbyte.layouts import Packed, parse
from halfbyte.operands import DTYPES, check_arrays, checked_dtype

_memos = WeakIdKeyDictionary()
FP8 = "fp8"
"""Stands for the layout where the weight is an Fp8Weight."""


@torch.library.custom_op("halfbyte::linear", mutates_args=())
def linear_op(
    x: Tensor,
    layout: str,
    n: int,
    k: int,
    names: str,
    buffers: list[Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``halfbyte.linear``.

    Args:
        x: (..., K) float32, bfloat16 or float16.
        layout: the key of the weight's layout.
        n: N.
        k: K.
        names: of the buffers, joined by commas.
        buffers: those of the Packed.
        bias: (N,), or None.
        out_dtype: of the result.

    Returns:
        (..., N).
    """
    packed = _checked(x, layout, n, k, names, buffers, bias)
    packed.memo = memo_of(packed.buffers().get("scales", buffers[0]))
    with keeping_nothing():
        y: Tensor = ops.compute(x, packed, bias, out_dtype)
    return y


def _shape_of_linear(
    x: Tensor,
    layout: str,
    n: int,
    k: int,
    names: str,
    buffers: list[Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if layout == FP8:
        _twin(x, names, buffers, bias)
    else:
        _checked(x, layout, n, k, names, buffers, bias)
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)


linear_op.register_fake(_shape_of_linear)


@torch.library.custom_op("halfbyte::linear_fp8", mutates_args=())
def linear_fp8_op(
    x: Tensor,
    layout: str,
    n: int,
    k: int,
    names: str,
    buffers: list[Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``halfbyte.linear`` with the precision "fp8"; arguments as of ``linear_op``, or of an Fp8Weight.

    Args:
        x: (..., K) float32, bfloat16 or float16.
        layout: the key of the weight's layout, or "fp8".
        n: N.
        k: K.
        names: of the buffers, joined by commas; of an Fp8Weight "data", "scale" and, if it has one, "pre_scale".
        buffers: those of the Packed, or of the Fp8Weight.
        bias: (N,), or None.
        out_dtype: of the result.

    Returns:
        (..., N).
    """
    to = str(out_dtype).removeprefix("torch.")
    y: Any
    if layout == FP8:
        twin = _twin(x, names, buffers, bias)
        vars(twin)["memo"] = memo_of(twin.data)
        with keeping_nothing():
            y = fp8_ops.compute(x, twin, bias, to)
    else:
        packed = _checked(x, layout, n, k, names, buffers, bias)
        packed.memo = memo_of(packed.buffers().get("scales", buffers[0]))
        with keeping_nothing():
            y = fp8_ops.compute(x, packed, bias, to)
            y = ops.compute(x, packed, bias, to) if y is None else y
    result: Tensor = y
    return result


linear_fp8_op.register_fake(_shape_of_linear)


@torch.library.custom_op("halfbyte::linear_int8", mutates_args=())
def linear_int8_op(
    x: Tensor,
    layout: str,
    n: int,
    k: int,
    names: str,
    buffers: list[Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``halfbyte.linear`` with the precision "int8"; arguments as of ``linear_op``."""
    packed = _checked(x, layout, n, k, names, buffers, bias)
    packed.memo = memo_of(packed.buffers().get("scales", buffers[0]))
    y: Tensor = int8_ops.linear_int8(x, packed, bias, str(out_dtype).removeprefix("torch."))
    return y


linear_int8_op.register_fake(_shape_of_linear)


@torch.library.custom_op("halfbyte::linear_w4a4", mutates_args=())
def linear_w4a4_op(
    x: Tensor,
    layout: str,
    n: int,
    k: int,
    names: str,
    buffers: list[Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``halfbyte.linear`` with the precision "w4a4"; arguments as of ``linear_op``."""
    packed = _checked(x, layout, n, k, names, buffers, bias)
    packed.memo = memo_of(packed.buffers().get("scales", buffers[0]))
    with keeping_nothing():
        y: Tensor = w4a4_ops.linear_w4a4(x, packed, bias, str(out_dtype).removeprefix("torch."))
    return y


linear_w4a4_op.register_fake(_shape_of_linear)
_OPS: Final[dict[str | None, Any]] = {"fp8": linear_fp8_op, "int8": linear_int8_op, "w4a4": linear_w4a4_op}


def memo_of(owner: Tensor) -> dict[Any, Any]:
    """What is remembered of the weight with this buffer."""
    memo: dict[Any, Any] | None = _memos.get(owner)  # type: ignore[no-untyped-call]
    if memo is None:
        memo = _memos[owner] = {}
    return memo


def _twin(x: Tensor, names: str, buffers: list[Tensor], bias: Tensor | None) -> Fp8Weight:
    """The FP8 weight, which x and bias fit."""
    arrays: dict[str, Any] = dict(zip(names.split(","), buffers, strict=True))
    twin = Fp8Weight(**arrays)
    check_arrays(x, twin, bias)
    return twin


def _checked(x: Tensor, layout: str, n: int, k: int, names: str, buffers: list[Tensor], bias: Tensor | None) -> Packed:
    """The weight, which x and bias fit."""
    packed = Packed(parse(layout), (n, k), dict(zip(names.split(","), buffers, strict=True)))
    check_arrays(x, packed, bias)
    return packed


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """N and K; UsageError where there are experts."""
    if len(shape) != 2:
        raise UsageError("linear takes one matrix", got=shape, expected="(N, K)", hint="apply packed.expert(e)")
    n, k = shape
    return n, k


def _dtype(x: Tensor, out_dtype: Any) -> torch.dtype:
    """Torch's dtype of a result; UsageError where it is unknown."""
    if out_dtype is None:
        return x.dtype
    known = out_dtype in DTYPES or out_dtype in (torch.float32, torch.bfloat16, torch.float16)
    name = (
        str(out_dtype).removeprefix("torch.") if known else checked_dtype(out_dtype, "out_dtype")
    )  # torch warns of it
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def traced(
    x: Tensor,
    layout: str,
    shape: tuple[int, ...],
    buffers: dict[str, Tensor],
    bias: Tensor | None,
    out_dtype: Any,
    precision: str | None = None,
) -> Tensor:
    """``linear`` while torch traces it; the weight's shape is (N, K)."""
    n, k = _matrix(shape)
    to = _dtype(x, out_dtype)
    op = _OPS.get(precision, linear_op)
    y: Tensor = op(x, layout, n, k, ",".join(buffers), list(buffers.values()), bias, to)
    return y


def traced_twin(x: Tensor, twin: Fp8Weight, bias: Tensor | None, out_dtype: Any) -> Tensor:
    """``linear`` with an Fp8Weight (N, K) while torch traces it; UsageError where it has a scale for each block."""
    if twin.block is not None:
        raise UsageError("no kernel takes an FP8 weight with a scale for each block", got=twin.block)
    every = {"data": twin.data, "scale": twin.scale, "pre_scale": twin.pre_scale}
    return traced(x, FP8, twin.shape, {k: b for k, b in every.items() if b is not None}, bias, out_dtype, "fp8")
