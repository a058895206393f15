"""The arrays of a call: whether they fit each other, and as kernels take them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.kernels.base import ALIGNED, check_kind
from halfbyte.kinds import Fp8Weight, Int8Weight
from halfbyte.layouts import Packed, Rows
from halfbyte.numerics import Array, is_torch
from halfbyte.weight import Mxfp4Weight, Weight, dtype_name, float_dtype

DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("exact", "int8", "fp8", "w4a4")


def precision_of(w: Any, precision: str | None) -> str:
    """The precision of a call on a weight; UsageError where it is unknown or the weight cannot give it."""
    if precision not in (None, *PRECISIONS):
        raise UsageError("unknown precision", got=repr(precision), expected=" or ".join(map(repr, PRECISIONS)))
    own = "int8" if isinstance(w, Int8Weight) else "fp8" if isinstance(w, Fp8Weight) else None
    if own is not None and precision not in (None, own):
        raise UsageError(
            f"an {own.upper()} weight is rounded",
            got=f"precision {precision!r}",
            expected=f"the NVFP4 weight, or {own!r}",
        )
    return own or precision or "exact"


def as_packed(weight: Packed | Weight) -> Packed:
    """What kernels take; a Weight is packed as rows.

    Raises:
        UsageError: another kind of weight than NVFP4.
    """
    if isinstance(weight, Packed):
        check_kind(weight.layout)
        return weight
    if isinstance(weight, Weight):
        return Rows().pack(weight)
    hint = "cast it with halfbyte.mxfp4.to_nvfp4" if isinstance(weight, Mxfp4Weight) else None
    raise UsageError("not a weight", got=type(weight).__name__, expected="a Packed or a Weight", hint=hint)


def check_arrays(x: Array, packed: Packed | Int8Weight | Fp8Weight, bias: Array | None) -> None:
    """UsageError where x, weight and bias are not of one library, one device and fitting shapes."""
    n, k = packed.shape[-2:]
    check_float(x, "x")
    if len(x.shape) < 1 or x.shape[-1] != k:
        raise UsageError("the last axis of x is not the weight's K", got=tuple(x.shape), expected=f"(..., {k})")
    check_beside(scale_of(packed), "the weight", x)
    if bias is not None:
        check_float(bias, "bias")
        check_beside(bias, "bias", x)
        if tuple(bias.shape) != (n,):
            raise UsageError("bias does not fit the weight's N", got=tuple(bias.shape), expected=(n,))


def check_float(a: Array, what: str) -> None:
    """UsageError where this is no array, or of a dtype that no kernel takes."""
    if not (is_torch(a) or isinstance(a, np.ndarray)):
        raise UsageError(
            f"{what} is of the wrong type", got=type(a).__name__, expected="a NumPy array or a torch tensor"
        )
    name = dtype_name(a.dtype)
    if name not in DTYPES:
        raise UsageError(f"{what} is of the wrong dtype", got=name, expected=", ".join(DTYPES), hint="cast it first")


def check_beside(a: Array, what: str, x: Array, other: str = "x") -> None:
    """UsageError where two arrays are of two libraries, or on two devices."""
    if is_torch(a) != is_torch(x):
        one, two = ("torch", "numpy") if is_torch(a) else ("numpy", "torch")
        raise UsageError(
            f"{what} and {other} are of two libraries",
            got=f"{what} in {one}, {other} in {two}",
            expected="one library",
            hint="move the weight once: packed.to(device), or weight.torch() and weight.numpy()",
        )
    if is_torch(a) and a.device != x.device:
        raise UsageError(
            f"{what} and {other} are on two devices",
            got=f"{what} on {a.device}, {other} on {x.device}",
            expected="one device",
            hint=f"move it once: .to({str(x.device)!r})",
        )


def checked_dtype(dtype: Any, what: str) -> str:
    """The name of a dtype of ``DTYPES``; UsageError where it is another."""
    try:
        name = "None" if dtype is None else dtype_name(dtype)  # which NumPy takes for float64
    except TypeError:
        name = repr(dtype)
    if name not in DTYPES:
        raise UsageError(f"{what} is unknown", got=name, expected=" or ".join(DTYPES))
    return name


def contiguous(x: Array) -> Array:
    """Row-major, in this machine's order of bytes, no view that torch negates when it is read, on a GPU aligned."""
    if is_torch(x):
        made = x.resolve_neg().contiguous()
        return made.clone() if made.is_cuda and made.data_ptr() % ALIGNED else made
    return np.ascontiguousarray(x, x.dtype.newbyteorder("="))


def empty(shape: tuple[int, int], dtype: str, like: Array) -> Array:
    """An array with unknown content in the library, and on the device, of ``like``."""
    if not is_torch(like):
        return np.empty(shape, float_dtype(dtype))
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


def on_rows(
    x: Array, shape: tuple[int, ...], bias: Array | None, to: str, run: Callable[[Array, Array | None, Array], None]
) -> Array:
    """(..., N) of dtype ``to`` that has no gradient, for a weight of a shape.

    ``run`` is given x as (M, K) and the bias, both as kernels take them, and (M, N) to write; nothing if one is empty.
    """
    (n, k), lead = shape[-2:], tuple(x.shape[:-1])
    rows = prod(lead)

    def computed(x: Array) -> Array:
        out = empty((rows, n), to, x)
        if not k:
            out[...] = 0 if bias is None else bias
        elif rows and n:
            run(contiguous(x.reshape(rows, k)), None if bias is None else contiguous(bias), out)
        return out.reshape(*lead, n)

    if is_torch(x) and wants_gradient(x, bias):
        return without_gradient()(x, bias, computed)
    return computed(x)


def wants_gradient(x: Array, bias: Array | None) -> bool:
    """Whether torch is to differentiate a call."""
    import torch

    return torch.is_grad_enabled() and bool(x.requires_grad or (bias is not None and bias.requires_grad))


@functools.cache
def without_gradient() -> Callable[[Array, Array | None, Callable[[Array], Array]], Array]:
    """A torch function that runs forward and raises in backward, instead of cutting the graph in silence."""
    import torch

    class WithoutGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Array, bias: Array | None, run: Callable[[Array], Array]) -> Array:
            return run(x)  # bias is an argument so that its wish for a gradient counts, too

        @staticmethod
        def backward(ctx: Any, *gradients: Array) -> Any:
            raise UsageError(
                "halfbyte has no gradient", hint="run the model under torch.no_grad(), or detach its output"
            )

    apply: Callable[[Array, Array | None, Callable[[Array], Array]], Array] = WithoutGradient.apply
    return apply


def scale_of(w: Packed | Int8Weight | Fp8Weight) -> Array:
    """The array that tells the library and device of a weight."""
    return w.buffers()["scale2"] if isinstance(w, Packed) else w.scale
