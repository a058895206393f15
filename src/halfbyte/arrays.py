"""What weights do with arrays, NumPy or torch: moving, viewing, joining, and checking their shapes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from halfbyte.errors import WeightError
from halfbyte.numerics import Array, is_torch

_FLOATS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
BYTE_DTYPES = ("uint8", "float8_e4m3fn", "int8", "float4_e2m1fn_x2")
E8M0_DTYPES = ("uint8", "float8_e8m0fnu")


class Immutable:
    """An object whose fields are set once, by ``__init__``."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a {type(self).__name__} is immutable: make a new one instead of setting {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a {type(self).__name__} is immutable")

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: frozen(value) for name, value in state.items() if isinstance(value, np.ndarray)}
        self.__dict__.update(state | arrays)


@functools.cache
def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as text, as torch's or as NumPy's."""
    if isinstance(dtype, str) or type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    return str(np.dtype(dtype).name)


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of float32, bfloat16 or float16, by name or as anybody's dtype; others raise WeightError."""
    name = dtype_name(dtype)
    if name not in _FLOATS:
        raise WeightError("unknown dtype", got=repr(name), expected=" or ".join(_FLOATS))
    return _FLOATS[name]


def cast(values: Array, dtype: Any) -> Array:
    """``values`` in float32, bfloat16 or float16, rounded to nearest; other dtypes raise WeightError."""
    numpy_dtype = float_dtype(dtype)
    if is_torch(values):
        import torch

        return values.to(getattr(torch, dtype_name(dtype)))
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtype, copy=False)


def library(a: Array) -> str:
    """Where ``a`` lies, in words."""
    return f"torch on {a.device}" if is_torch(a) else "numpy"


def as_bytes(a: Array, what: str, dtypes: tuple[str, ...] = BYTE_DTYPES) -> Array:
    """View any of ``dtypes``, each of one byte, as u8."""
    name = str(a.dtype).removeprefix("torch.") if hasattr(a, "dtype") else type(a).__name__
    if name not in dtypes:
        raise WeightError(f"{what} are of the wrong dtype", got=name, expected=" or ".join(dtypes[:2]))
    if name == "uint8":
        return a
    if is_torch(a):
        import torch

        return a.view(torch.uint8)
    return a.view(np.uint8)


def without_padding(codes: Array, k: int) -> Array:
    """Packed codes (..., K/2) with zeros beyond K: a copy, or themselves where there is nothing beyond."""
    if codes.shape[-1] * 2 == k:
        return codes
    codes = codes.clone() if is_torch(codes) else codes.copy()
    codes[..., -(-k // 2) :] = 0
    if k % 2:
        codes[..., k // 2] &= 15
    return codes


def code_shape(codes: Array, scales: Array, k: int | None, block: int) -> tuple[int, ...]:
    """(*E, N, K) of codes with one scale for every ``block`` of them along K; WeightError where they do not fit."""
    if is_torch(codes) != is_torch(scales):
        raise WeightError("codes and scales are of two libraries: use NumPy arrays or torch tensors for both")
    if codes.ndim < 2:
        raise WeightError("codes need at least two axes", got=tuple(codes.shape), expected="(*E, N, K/2)")
    *rows, row_bytes = codes.shape
    full_k = row_bytes * 2
    if full_k % block:
        raise WeightError(
            f"a row of codes holds K = {full_k}, which is not a multiple of {block}",
            got=tuple(codes.shape),
            expected=f"whole blocks of {block // 2} bytes",
            hint="pad the layer with zero codes and pass the true K as k=",
        )
    if tuple(scales.shape) != (*rows, full_k // block):
        raise WeightError(
            "the block scales do not fit the codes", got=tuple(scales.shape), expected=(*rows, full_k // block)
        )
    true_k = full_k if k is None else k
    if not max(full_k - block, -1) < true_k <= full_k:
        raise WeightError("k does not end in the last block", got=true_k, expected=f"about {full_k}")
    return (*rows, true_k)


def as_f32(value: Any, like: Array) -> Array:
    """``value`` as f32 in the library (and on the device) of ``like``."""
    if is_torch(like):
        import torch

        if isinstance(value, np.ndarray):
            raise WeightError("a NumPy array among torch tensors: use one library for all of a weight")
        value = value if is_torch(value) else torch.as_tensor(np.array(value, np.float32))
        return value.to(device=like.device, dtype=torch.float32)
    if is_torch(value):
        raise WeightError("a torch tensor among NumPy arrays: use one library for all of a weight")
    with np.errstate(over="ignore"):
        return np.asarray(value, np.float32)


def per_tensor_or_row(
    value: Any, experts: tuple[int, ...], n: int, like: Array, what: str = "scale2", beside: str = "the codes"
) -> Array:
    """``value`` as f32 of shape (*E, 1, 1) or (*E, N, 1); WeightError where neither or both can be meant."""
    scale = as_f32(value, like)
    shape = tuple(scale.shape)
    ones = (1,) * len(experts)
    per_tensor, per_row = (*experts, 1, 1), (*experts, n, 1)
    if shape in (per_tensor, per_row):
        return scale
    if prod(shape) == 1 and len(shape) <= 2:
        return broadcast(scale.reshape(*ones, 1, 1), per_tensor)
    fits = []
    if shape in (experts, (*experts, 1)):
        fits.append(scale.reshape(per_tensor))
    if shape == (*experts, n) and per_row != per_tensor:
        fits.append(scale.reshape(per_row))
    elif shape in ((n,), (n, 1)):
        fits.append(broadcast(scale.reshape(*ones, n, 1), per_row))
    if len(fits) != 1:
        raise WeightError(
            f"{what} is ambiguous" if fits else f"{what} does not fit {beside}",
            got=shape,
            expected=f"{per_tensor} per tensor or {per_row} per row",
        )
    return fits[0]


def normal_input(value: Any, experts: tuple[int, ...], like: Array) -> Array:
    """An input_scale as f32 of shape ``experts``; WeightError where it does not fit."""
    scale = as_f32(value, like)
    if prod(scale.shape) == 1:
        return broadcast(scale.reshape((1,) * len(experts)), experts)
    if tuple(scale.shape) != experts:
        raise WeightError("input_scale does not fit", got=tuple(scale.shape), expected=experts)
    return scale


def checked_pre_scale(pre_scale: Array, k: int, like: Array) -> Array:
    """``pre_scale`` itself; WeightError where it is not (K,) floats in the library of ``like``."""
    if not hasattr(pre_scale, "shape") or "float" not in str(pre_scale.dtype):
        raise WeightError("pre_scale is not an array of floats", got=type(pre_scale).__name__)
    if is_torch(pre_scale) != is_torch(like):
        raise WeightError("pre_scale and codes are of two libraries")
    if tuple(pre_scale.shape) != (k,):
        raise WeightError("pre_scale does not fit K", got=tuple(pre_scale.shape), expected=(k,))
    return pre_scale


def frozen(a: Array) -> Array:
    """A read-only view of a NumPy array; torch has none, so a tensor is passed on."""
    if is_torch(a):
        return a
    view = a.view()
    view.setflags(write=False)
    return view


def broadcast(a: Array, shape: tuple[int, ...]) -> Array:
    """A view of ``a`` in a larger shape."""
    return a.broadcast_to(shape) if is_torch(a) else np.broadcast_to(a, shape)


def concat_arrays(arrays: Sequence[Array], axis: int) -> Array:
    """Arrays of one library joined along an axis."""
    if is_torch(arrays[0]):
        import torch

        return torch.cat(list(arrays), axis)
    return np.concatenate(arrays, axis)


def check_parts(parts: Sequence[Any]) -> None:
    """WeightError where weights cannot be joined along N: none at all, two libraries, or another K or E."""
    if not parts:
        raise WeightError("concat needs at least one weight")
    *experts, _, k = parts[0].shape
    for i, part in enumerate(parts):
        if is_torch(part.codes) != is_torch(parts[0].codes):
            raise WeightError(f"part {i} and part 0 are of two libraries", hint="use .torch() or .numpy() first")
        if (*part.shape[:-2], part.shape[-1]) != (*experts, k):
            raise WeightError(f"part {i} has another K or E", got=part.shape, expected=f"(*{tuple(experts)}, N, {k})")


def stack_arrays(arrays: Sequence[Array]) -> Array:
    """Arrays of one library and shape along a new first axis."""
    if is_torch(arrays[0]):
        import torch

        return torch.stack(list(arrays))
    return np.stack(arrays)


def take(a: Array, index: Any, axis: int) -> Array:
    """The entries of ``a`` along an axis that a NumPy index names, in its order."""
    if is_torch(a):
        return a.index_select(axis, to_torch(index, a.device))
    return np.take(a, index, axis)


def permutation(index: Any, size: int, what: str, inverse: bool) -> Any:
    """``index`` as (size,) i64, or its inverse; WeightError where it is not a permutation of 0..size-1."""
    order = np.asarray(to_numpy(index))
    if order.size == 0:
        order = order.astype(np.int64)
    if order.ndim != 1 or order.dtype.kind not in "iu":
        got = f"{order.dtype} {order.shape}"
        raise WeightError(f"an index of {what} is not a vector of integers", got=got, expected=f"({size},)")
    if order.size != size:
        raise WeightError(f"an index of {what} has the wrong length", got=order.size, expected=size)
    outside = (order < 0) | (order >= size)
    if outside.any():
        at = int(outside.argmax())
        raise WeightError(f"an index of {what} leaves its range", index=[at], got=order[at], expected=f"0..{size - 1}")
    order = order.astype(np.int64)
    counts = np.bincount(order, minlength=size)
    if (counts != 1).any():
        got = f"{int(counts.argmax())} more than once, {int(counts.argmin())} never"
        raise WeightError(f"not a permutation of {what}", got=got)
    return np.argsort(order) if inverse else order


def equal_or_none(a: Array | None, b: Array | None) -> bool:
    """Whether both are None, or arrays of equal shape and numbers."""
    if a is None or b is None:
        return a is b
    return tuple(a.shape) == tuple(b.shape) and bool((a == b).all())


def same_bits(a: Array | None, b: Array | None) -> bool:
    """Whether both are None, or arrays of equal shape, dtype and bytes, in either library."""
    if a is None or b is None:
        return a is b
    x, y = to_numpy(a), to_numpy(b)
    return bool(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())


def to_torch(a: Array, device: Any = None) -> Array:
    """``a`` as a torch tensor on ``device``; a writable NumPy array is shared where it can be."""
    import torch

    if is_torch(a):
        return a.to(device)
    if not a.flags.writeable or min(a.strides, default=0) < 0:
        a = a.copy()  # torch has no read-only tensors, and no negative strides
    if a.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(a).to(device)


def to_numpy(a: Array) -> Any:
    """``a`` as a NumPy array on the host; torch's bfloat16 becomes that of ml_dtypes."""
    if not is_torch(a):
        return a
    import torch

    a = a.detach().cpu()
    if a.dtype == torch.bfloat16:
        return a.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return a.numpy()
