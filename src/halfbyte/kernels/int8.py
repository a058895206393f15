"""What a kernel of an INT8 twin is given, what it computes, and the one that needs only NumPy.

::

    q = rint(x * pre_scale / amax * 127)              with the amax of each token; in float32, to nearest even
    y = round(sum(q * data) * (amax / 127) * scale + bias)

The sum is exact, in integers. What follows is float32, in this order, and rounded once. A token of zeros gives zero
before the bias; one with Inf or NaN gives NaN in all features. With u = 0 for a float32 result, 2^-11 for float16 and
2^-8 for bfloat16, and without subnormals, y is off the product of the values that q and data stand for by at most

    (4 * 2^-24 + u) * (|product| + |bias|)

and those are off x and the weight W of the twin by at most half a step each, so that y is off x @ W.T by at most

    amax / 254 * sum|data * scale| + scale / 2 * sum|x| + the above

With Gaussian weights and activations that is 0.0123 of the norm of the result: 0.0086 of the twin, 0.0088 of q.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import (
    Cost,
    Kernel,
    Library,
    check_row_major,
    check_shapes,
    cost_of,
    device_of,
    library_of,
    nothing_to_load,
)
from halfbyte.kinds import Int8Weight
from halfbyte.layouts import Packed
from halfbyte.numerics import Array, is_torch

LARGEST_K: Final = (2**31 - 1) // (127 * 128)
"""Above this K a sum may leave 32 bits."""

SCRATCH_BYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Int8Call:
    """All that decides which kernel of an INT8 twin runs; no arrays.

    Args:
        op: "linear-int8".
        shape: (*E, N, K).
        per_row: the scale differs by output feature.
        pre_scale: the activations are multiplied by a (K,) vector first.
        rows: M, the rows of activations.
        dtype: of the activations, "float32", "bfloat16" or "float16".
        out_dtype: of the result, one of the same.
        device: "cpu", "cuda", ...
        library: that of all arrays.
        bias: a bias is added.
    """

    op: str = "linear-int8"
    shape: tuple[int, ...]
    per_row: bool
    pre_scale: bool
    rows: int
    dtype: str
    out_dtype: str
    device: str
    library: Library
    bias: bool

    @staticmethod
    def on(
        weight: Packed | Int8Weight, *, rows: int, dtype: str, out_dtype: str, device: str, library: Library, bias: bool
    ) -> Int8Call:
        """The call on a twin, or on the twin of a packed weight, which need not be made for that."""
        if isinstance(weight, Int8Weight):
            per_row, pre_scale = weight.scale.shape[-2] != 1, weight.pre_scale is not None
        else:
            per_row, pre_scale = True, "pre_scale" in weight.buffers()
        return Int8Call(
            shape=weight.shape,
            per_row=per_row,
            pre_scale=pre_scale,
            rows=rows,
            dtype=dtype,
            out_dtype=out_dtype,
            device=device,
            library=library,
            bias=bias,
        )

    def __str__(self) -> str:
        return f"{self.op} with shape {self.shape}, M={self.rows}, {self.dtype}, {self.library} on {self.device}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Int8Args:
    """The arguments of a kernel for ``linear`` with an INT8 twin, whose result goes to ``out``.

    Args:
        x: (M, K) float32, bfloat16 or float16, row-major.
        weight: (*E, N, K), row-major, in the library and on the device of x.
        bias: (N,) float32, bfloat16 or float16, or None.
        out: (M, N) float32, bfloat16 or float16; written.

    Raises:
        UsageError: shapes that do not fit each other, or a twin that is not row-major.
    """

    op: ClassVar[str] = "linear-int8"
    x: Array
    weight: Int8Weight
    bias: Array | None
    out: Array

    def __post_init__(self) -> None:
        check_shapes(self.weight.shape, self.x, self.bias, self.out)
        check_row_major("INT8", self.weight.data)

    def call(self) -> Int8Call:
        """What decides which kernel runs on these arrays."""
        return Int8Call.on(
            self.weight,
            rows=self.x.shape[0],
            dtype=dtype_name(self.x.dtype),
            out_dtype=dtype_name(self.out.dtype),
            device=device_of(self.x),
            library=library_of(self.x),
            bias=self.bias is not None,
        )


def refuse(call: Int8Call) -> tuple[str, ...]:
    """What keeps every kernel here from a call."""
    reasons = []
    if call.device != "cpu":
        reasons.append(f"runs on the CPU, not on {call.device}")
    if len(call.shape) != 2:
        reasons.append(f"takes one matrix (N, K), not expert axes {call.shape[:-2]}")
    if call.shape[-1] > LARGEST_K:
        reasons.append(f"takes K up to {LARGEST_K}, whose sums fit 32 bits, not {call.shape[-1]}")
    return tuple(reasons)


def cost(call: Int8Call) -> Cost:
    """The least that a call costs: the twin, x, bias and result, once each."""
    return cost_of(call, prod(call.shape[-2:]))


def _numpy(a: Array) -> Any:
    """The same values in NumPy; bfloat16 and float16 as float32."""
    if not is_torch(a):
        return a if a.dtype == np.int8 else a.astype(np.float32)
    return (a.detach().float() if a.is_floating_point() else a.detach()).numpy()


def _launch_numpy(args: Int8Args) -> None:
    weight = args.weight
    x, data, scale = _numpy(args.x), _numpy(weight.data), _numpy(weight.scale).reshape(-1)
    n, k = data.shape
    with np.errstate(over="ignore", invalid="ignore"):
        if weight.pre_scale is not None:
            x = x * _numpy(weight.pre_scale)
        amax = np.abs(x).max(1, keepdims=True)
        amax[~np.isfinite(amax)] = np.nan
        q = np.rint(x / np.where(amax == 0, np.float32(1), amax) * np.float32(127)).astype(np.float64)
        total = np.empty((len(x), n), np.float32)
        step = max(1, SCRATCH_BYTES // (8 * k))
        for start in range(0, n, step):  # integers below 2^53, which float64 adds exactly
            total[:, start : start + step] = q @ data[start : start + step].astype(np.float64).T
        y = total * (amax / np.float32(127)) * scale
        if args.bias is not None:
            y += _numpy(args.bias)
        if not is_torch(args.out):
            args.out[...] = y
            return
    import torch

    args.out.copy_(torch.from_numpy(y))


NUMPY = Kernel(
    name="int8-numpy",
    bundle=Int8Args,
    description="multiplies integers as float64, by BLAS",
    refuse=refuse,
    load=nothing_to_load,
    launch=_launch_numpy,
    cost=cost,
)
