"""What a W4A4 kernel is given, what it computes, and the one that runs anywhere.

::

    q, b, s = the rounded activations of ``halfbyte.activations``, by the weight's input_scale where it has one
    y = round((sum(q * b * code * scale) * scale2) * s + bias)

The weight is not rounded again; the products are exact, and what follows the sum is float32, in this order, and rounded
once. With an input scale this is what a checkpoint calibrated for W4A4 means, without one each token has its own. A
token with Inf or NaN, and an input scale that is not positive and finite, give NaN. For Gaussian activations y is off
the exact product by 0.095 of its norm, as q * b * s is off them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

import numpy as np

from halfbyte.activations import quantize_tokens
from halfbyte.arrays import float_dtype
from halfbyte.errors import NoKernelError
from halfbyte.kernels.base import (
    Call,
    Kernel,
    LinearArgs,
    check_kind,
    check_shapes,
    linear_cost,
)
from halfbyte.layouts import Packed
from halfbyte.numerics import Array, is_torch


@dataclass(frozen=True, kw_only=True)
class W4a4Call(Call):
    """As of ``linear``.

    Args:
        op: "linear-w4a4".
        static: the weight has an input scale.
    """

    op: str = "linear-w4a4"
    static: bool

    @staticmethod
    def of(weight: Packed, **how: Any) -> W4a4Call:
        """The call on a weight, ``how`` as for ``Call.on``; UsageError where it is not NVFP4."""
        static = "input_scale" in weight.buffers()
        return W4a4Call(**(vars(Call.on(weight, **how)) | {"op": W4a4Call.op, "static": static}))

    def product(self) -> Call:
        """The exact product of the rounded activations, which are 16-bit floats."""
        own = {one.name: getattr(self, one.name) for one in fields(Call) if one.name != "op"}
        dtype = getattr(self.layout, "dtype", None) or ("float16" if self.dtype == "float16" else "bfloat16")
        return Call(**own | {"dtype": dtype, "out_dtype": "float32", "bias": False, "pre_scale": False})


@dataclass(frozen=True, kw_only=True, eq=False)
class W4a4Args:
    """The arguments of a kernel for ``linear`` in W4A4, whose result goes to ``out``.

    Args:
        x: (M, K) float32, bfloat16 or float16, row-major.
        weight: (*E, N, K), in the library and on the device of x.
        bias: (N,) float32, bfloat16 or float16, or None.
        out: (M, N) float32, bfloat16 or float16; written.

    Raises:
        UsageError: a weight that is not NVFP4, or shapes that do not fit each other.
    """

    op: ClassVar[str] = "linear-w4a4"
    x: Array
    weight: Packed
    bias: Array | None
    out: Array

    def __post_init__(self) -> None:
        check_kind(self.weight.layout)
        check_shapes(self.weight.shape, self.x, self.bias, self.out)

    def call(self) -> W4a4Call:
        """What decides which kernel runs on these arrays."""
        exact = LinearArgs(x=self.x, weight=self.weight, bias=self.bias, out=self.out).call()
        return W4a4Call(**vars(exact) | {"op": self.op, "static": "input_scale" in self.weight.buffers()})


def finish(sums: Array, s: Array, bias: Array | None, out: Array) -> None:
    """The last of the above, from (M, N) float32 sums times scale2, which are overwritten."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums *= s
        if bias is not None:
            sums += bias.float() if is_torch(bias) else bias.astype(np.float32)
        out[...] = sums


def _plain(weight: Packed) -> Packed:
    """The weight without what its activations are multiplied by."""
    known = weight.memo.get("w4a4")
    if known is None:
        buffers = {name: b for name, b in weight.buffers().items() if name not in ("pre_scale", "input_scale")}
        known = weight.memo["w4a4"] = Packed(weight.layout, weight.shape, buffers)
    plain: Packed = known
    return plain


def _launch(args: W4a4Args) -> None:
    from halfbyte.kernels import select

    buffers = args.weight.buffers()
    rounded = quantize_tokens(args.x, buffers.get("input_scale"), pre_scale=buffers.get("pre_scale"))
    x, sums = rounded.values(args.call().product().dtype), _float32(args.out)
    product = LinearArgs(x=x, weight=_plain(args.weight), bias=None, out=sums)
    select(LinearArgs, product.call()).run(product)
    finish(sums, rounded.scale, args.bias, args.out)


def _float32(like: Array) -> Array:
    if not is_torch(like):
        return np.empty(like.shape, float_dtype("float32"))
    import torch

    return torch.empty_like(like, dtype=torch.float32)


def _refuse(call: W4a4Call) -> tuple[str, ...]:
    from halfbyte.kernels import select

    try:
        select(LinearArgs, call.product())
    except NoKernelError as error:
        return (f"there is no kernel for its product: {str(error).rpartition('the nearest is ')[2]}",)
    return ()


def _load(call: W4a4Call) -> None:
    from halfbyte.kernels import preflight

    preflight(LinearArgs, call.product())


COMPOSED: Final = Kernel(
    name="w4a4-composed",
    bundle=W4a4Args,
    description="rounds activations to NVFP4, then linear with the values that they stand for; any layout and device",
    refuse=_refuse,
    load=_load,
    launch=_launch,
    cost=linear_cost,
)


def notes(call: W4a4Call) -> Iterator[str]:
    """What a product in this precision is to be asked for knowingly."""
    by = "by the weight's input scale" if call.static else "by each token's largest magnitude: there is no input scale"
    yield f"activations are rounded to NVFP4, {by}; the weight is not rounded"
    yield f"error of the result: {ERROR} of its norm for Gaussian activations; Tokens.error measures yours"


ERROR: Final = 0.095
"""What Gaussian activations lose, of their norm, and so do results; tests measure it."""
