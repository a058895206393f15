"""``linear`` as an operator of torch's, for ``torch.compile`` and ``torch.export``.

The operator takes a weight as its layout's key and its buffers; what kernels remember of a weight is about its
block scales, and kept with these for as long as they live.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from halfbyte import ops
from halfbyte.layouts import Packed, parse
from halfbyte.operands import check_arrays

_memos = WeakIdKeyDictionary()


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
    owner = packed.buffers().get("scales", buffers[0])
    memo = _memos.get(owner)  # type: ignore[no-untyped-call]
    if memo is None:
        memo = _memos[owner] = packed.memo
    packed.memo = memo
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
    _checked(x, layout, n, k, names, buffers, bias)
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)


linear_op.register_fake(_shape_of_linear)


def _checked(x: Tensor, layout: str, n: int, k: int, names: str, buffers: list[Tensor], bias: Tensor | None) -> Packed:
    """The weight, which x and bias fit."""
    packed = Packed(parse(layout), (n, k), dict(zip(names.split(","), buffers, strict=True)))
    check_arrays(x, packed, bias)
    return packed


def traced(
    x: Tensor,
    layout: str,
    shape: tuple[int, ...],
    buffers: dict[str, Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """``linear`` while torch traces it; the weight's shape is (N, K)."""
    to = x.dtype if out_dtype is None else out_dtype
    y: Tensor = linear_op(x, layout, *shape, ",".join(buffers), list(buffers.values()), bias, to)
    return y
