"""What a kernel that multiplies in FP8 is given, what it computes, and those that need only NumPy or torch.

::

    v = x * pre_scale                       in float32
    s = amax(v) / 448                       of each token, in float32
    q = e4m3(v * (448 / amax(v)))           to nearest even; 448 / amax and the product rounded to float32 each
    W = e4m3(code * scale / 6)              to nearest even, the twin that ``to_fp8`` makes
    y = round(sum(q * W) * (6 * scale2) * s + bias)

Where amax is below 2^-64, v and amax are multiplied by 2^64 first, so that 448 / amax is finite. A token of zeros gives
zero before the bias; one with Inf or NaN gives NaN in all features, and its q mean nothing. What follows the sum is
float32, in this order, and rounded once. Here the sum is exact: products are multiples of 2^-18 up to 2^17.7, which
float64 adds without loss up to ``LARGEST_K``. With u = 0 for a float32 result, 2^-11 for float16 and 2^-8 for bfloat16,
and without subnormals, y is off the product of the values that q and W stand for by at most

    (4 * 2^-24 + u) * (|product| + |bias|)

A kernel on matrix units adds what they lose in their sums. q * s is off v by at most max(|v| / 16, s / 1024), up to the
roundings to float32, and W * 6 * scale2 off the weight by as much. For Gaussian values that is 0.026 of the norm of v,
0.014 of that of the weight, and 0.030 of the result's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import (
    Call,
    Cost,
    Kernel,
    Library,
    capability_of,
    check_row_major,
    check_shapes,
    cost_of,
    device_of,
    library_of,
    linear_cost,
    load_torch,
    nothing_to_load,
    why_not_numpy,
    why_not_torch,
)
from halfbyte.kinds import Fp8Weight
from halfbyte.layouts import Packed, Rows
from halfbyte.lossy import to_fp8
from halfbyte.numerics import E4M3_MAX, Array, decode_e4m3, encode_e4m3, is_torch
from halfbyte.weight import Weight

LARGEST_K: Final = 1 << 17
"""Above this K float64 may round a sum."""

SMALL: Final = 2.0**-64
"""Where the largest magnitude of a token is below it, its values are divided by it first."""

SCRATCH_BYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Fp8Call(Call):
    """All that decides which kernel multiplies in FP8: as for ``linear``, and of which kind the weight is.

    Args:
        op: "linear-fp8".
        resident: the weight is an Fp8Weight, row-major; else it is NVFP4 in ``layout``.
        blocks: a resident weight has a scale for each of its blocks.
    """

    op: str = "linear-fp8"
    resident: bool = False
    blocks: bool = False

    @staticmethod
    def of(
        weight: Packed | Fp8Weight,
        *,
        rows: int,
        dtype: str,
        out_dtype: str,
        device: str,
        library: Library,
        bias: bool,
        capability: int = 0,
    ) -> Fp8Call:
        """The call on a weight; UsageError where a packed one is not NVFP4."""
        how: dict[str, Any] = {
            "rows": rows, "dtype": dtype, "out_dtype": out_dtype, "device": device, "library": library, "bias": bias,
            "capability": capability,
        }  # fmt: skip
        if isinstance(weight, Packed):
            return Fp8Call(**(vars(Call.on(weight, **how)) | {"op": Fp8Call.op}))
        return Fp8Call(
            layout=Rows(),
            shape=weight.shape,
            per_row=weight.granularity == "row",
            pre_scale=weight.pre_scale is not None,
            resident=True,
            blocks=weight.block is not None,
            **how,
        )

    def __str__(self) -> str:
        form = "FP8 rows" if self.resident else f"layout {self.layout.key}"
        what = f"{self.op} with {form}, shape {self.shape}"
        return f"{what}, M={self.rows}, {self.dtype}, {self.library} on {self.place}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp8Args:
    """The arguments of a kernel for ``linear`` in FP8, whose result goes to ``out``.

    Args:
        x: (M, K) float32, bfloat16 or float16, row-major.
        weight: (*E, N, K), NVFP4 in a layout or the FP8 twin, row-major; in the library and on the device of x.
        bias: (N,) float32, bfloat16 or float16, or None.
        out: (M, N) float32, bfloat16 or float16; written.

    Raises:
        UsageError: another kind of weight, shapes that do not fit each other, or a twin that is not row-major.
    """

    op: ClassVar[str] = "linear-fp8"
    x: Array
    weight: Packed | Fp8Weight
    bias: Array | None
    out: Array

    def __post_init__(self) -> None:
        check_shapes(self.weight.shape, self.x, self.bias, self.out)
        if isinstance(self.weight, Fp8Weight):
            check_row_major("FP8", self.weight.data)

    def call(self) -> Fp8Call:
        """What decides which kernel runs on these arrays."""
        return Fp8Call.of(
            self.weight,
            rows=self.x.shape[0],
            dtype=dtype_name(self.x.dtype),
            out_dtype=dtype_name(self.out.dtype),
            device=device_of(self.x),
            library=library_of(self.x),
            bias=self.bias is not None,
            capability=capability_of(self.x),
        )


def cost(call: Fp8Call) -> Cost:
    """The least that a call costs: the weight as it is held, x, bias and result, once each."""
    return cost_of(call, prod(call.shape[-2:])) if call.resident else linear_cost(call)


def refuse(call: Fp8Call) -> tuple[str, ...]:
    """What keeps every kernel from a call."""
    reasons = []
    if len(call.shape) != 2:
        reasons.append(f"takes one matrix (N, K), not expert axes {call.shape[:-2]}")
    if call.blocks:
        reasons.append("takes a scale of the weight or of each row, not of blocks")
    return tuple(reasons)


def quantized(x: Array, pre_scale: Array | None = None) -> tuple[Array, Array]:
    """The E4M3 bytes of activations, (M, K) u8, and the scale of each token, (M, 1) f32, NaN where it is not finite.

    Args:
        x: (M, K) float32, bfloat16 or float16.
        pre_scale: (K,) that x is multiplied by first.
    """
    return _quantized_torch(x, pre_scale) if is_torch(x) else _quantized_numpy(x, pre_scale)


def _quantized_numpy(x: Any, pre_scale: Any) -> tuple[Array, Array]:
    with np.errstate(all="ignore"):
        v = x.astype(np.float32)
        if pre_scale is not None:
            v = v * pre_scale.astype(np.float32)
        amax = np.abs(v).max(1, keepdims=True)
        finite = np.isfinite(amax)
        scale = np.where(finite, amax / np.float32(E4M3_MAX), np.float32(np.nan))
        factor = np.where(amax < SMALL, np.float32(1 / SMALL), np.float32(1))
        inverse = np.where(amax > 0, np.float32(E4M3_MAX) / (amax * factor), np.float32(0))
        return encode_e4m3(np.where(finite, (v * factor) * inverse, np.float32(0))), scale


def _quantized_torch(x: Any, pre_scale: Any) -> tuple[Array, Array]:
    import torch

    v = x.float()
    if pre_scale is not None:
        v = v * pre_scale.float()
    amax = v.abs().amax(1, keepdim=True)
    finite = amax.isfinite()
    largest = torch.full_like(amax, E4M3_MAX)  # by a number torch would multiply with an inverse
    scale = (amax / largest).where(finite, torch.nan)
    factor = torch.ones_like(amax).masked_fill(amax < SMALL, 1 / SMALL)
    inverse = (largest / (amax * factor)).where(amax > 0, 0.0)
    q = ((v * factor) * inverse).where(finite, 0.0).clamp(-E4M3_MAX, E4M3_MAX)
    return q.to(torch.float8_e4m3fn).view(torch.uint8), scale


def _rows_of(weight: Packed | Fp8Weight) -> Iterator[tuple[slice, Array, Array]]:
    """Some rows at a time: which, their E4M3 bytes, and the scale of each or of all."""
    held: Any = weight if isinstance(weight, Fp8Weight) else weight.unpack()
    n, k = held.shape
    step = max(1, SCRATCH_BYTES // (8 * k))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        if isinstance(held, Weight):
            twin = to_fp8(held.rows(rows.start, rows.stop))
            yield rows, twin.data, twin.scale
        else:
            yield rows, held.data[rows], held.scale if held.granularity == "tensor" else held.scale[rows]


def _launch(args: Fp8Args) -> None:
    q, scale = quantized(args.x, args.weight.pre_scale if isinstance(args.weight, Fp8Weight) else _pre(args.weight))
    x = _wide(q).T  # (K, M): a slice of the result's rows is then a whole product
    with np.errstate(over="ignore", invalid="ignore"):
        for rows, data, factor in _rows_of(args.weight):
            y = _f32(_wide(data) @ x).T * factor.reshape(-1) * scale
            if args.bias is not None:
                y = y + _f32(args.bias[rows])
            args.out[:, rows] = y


def _pre(weight: Packed) -> Array | None:
    return weight.buffers().get("pre_scale")


def _wide(data: Array) -> Array:
    """The values of E4M3 bytes as float64."""
    values = decode_e4m3(data)
    return values.double() if is_torch(values) else values.astype(np.float64)


def _f32(a: Array) -> Array:
    return a.float() if is_torch(a) else a.astype(np.float32)


def _refuse_here(call: Fp8Call) -> tuple[str, ...]:
    too_long = f"takes K up to {LARGEST_K}, whose sums fit float64, not {call.shape[-1]}"
    return (*refuse(call), *((too_long,) if call.shape[-1] > LARGEST_K else ()))


def _refuse_numpy(call: Fp8Call) -> tuple[str, ...]:
    return why_not_numpy(call.library) + _refuse_here(call)


def _refuse_torch(call: Fp8Call) -> tuple[str, ...]:
    return why_not_torch(call.library, call.elsewhere) + _refuse_here(call)


TORCH: Final = Kernel(
    name="fp8-torch",
    bundle=Fp8Args,
    description="multiplies the FP8 values as float64; any device",
    refuse=_refuse_torch,
    load=load_torch,
    launch=_launch,
    cost=cost,
)
NUMPY: Final = Kernel(
    name="fp8-numpy",
    bundle=Fp8Args,
    description="multiplies the FP8 values as float64, by BLAS",
    refuse=_refuse_numpy,
    load=nothing_to_load,
    launch=_launch,
    cost=cost,
)
