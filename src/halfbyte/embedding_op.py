"""Rows of a weight looked up by their numbers, as an embedding does."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.gpu import ALIGNED
from halfbyte.kernels import EmbeddingArgs, select
from halfbyte.kernels.embedding import DTYPES
from halfbyte.layouts import Fragments, Packed
from halfbyte.numerics import Array, is_torch
from halfbyte.operands import as_packed, check_beside, checked_dtype, contiguous, empty
from halfbyte.remembered import forced_name, lookups
from halfbyte.weight import Weight, dtype_name


def embedding(ids: Array, w: Packed | Weight, *, out_dtype: Any = None) -> Array:
    """Look rows of an NVFP4 weight up by their numbers: ``dequantize(w, out_dtype)[ids]``, to the bit.

    On the CPU a number that names no row is refused. On a GPU that would need to wait for the device: there its row of
    the result is NaN, and nothing outside the weight is read.

    Args:
        ids: int32 or int64 of any shape.
        w: (N, K) in a layout that some kernel reads on the device of ids: rows, on a GPU also fragments; a Weight is
            packed as rows first.
        out_dtype: "float32", "bfloat16" or "float16" of the result; by default that of the activations for which
            fragments are packed, float32 with other layouts.

    Returns:
        (*ids.shape, K).

    Raises:
        UsageError: ids that are no integers, or on the CPU not within 0..N-1; arrays of two libraries or devices.
        WeightError: a null weight.
        LayoutError: a Weight that the layout rows cannot hold.
        NoKernelError: nothing accepts this call; the error lists each candidate and why it declined.
    """
    if is_torch(ids) and sys.modules["torch"].compiler.is_compiling():
        from halfbyte.torch_embedding import traced

        packed = as_packed(w)
        return traced(ids, packed, dtype_of(packed) if out_dtype is None else out_dtype)
    if type(w) is not Packed:
        return look_up(ids, as_packed(w), out_dtype)
    key = "embedding", getattr(ids, "device", None), getattr(ids, "dtype", None), out_dtype, forced_name()
    known = w.memo.get(key)
    if known is not None:
        y: Array | None = known(ids)
        if y is not None:
            return y
    return look_up(ids, as_packed(w), out_dtype, key)


def dtype_of(packed: Packed) -> str:
    """What ``embedding`` gives by default."""
    return packed.layout.dtype if isinstance(packed.layout, Fragments) else "float32"


def look_up(ids: Array, packed: Packed, out_dtype: Any, key: Any = None) -> Array:
    """``embedding`` of a packed weight, outside of traces; on a GPU what calls of this key come down to is kept."""
    if not (is_torch(ids) or isinstance(ids, np.ndarray)) or dtype_name(ids.dtype) not in DTYPES:
        got = str(getattr(ids, "dtype", type(ids).__name__))
        raise UsageError("ids are no integers of 32 or 64 bits", got=got, expected="int32 or int64, in an array")
    check_beside(packed.buffers()["scale2"], "the weight", ids, "ids")
    to = dtype_of(packed) if out_dtype is None else checked_dtype(out_dtype, "out_dtype")
    n, k = packed.shape[-2:]
    flat = contiguous(ids.reshape(-1))
    args = EmbeddingArgs(ids=flat, weight=packed, out=empty((len(flat), k), to, ids))
    call = args.call()
    kernel = select(EmbeddingArgs, call)
    if call.device == "cpu":
        _check_range(ids, n)
    if prod(args.out.shape):
        kernel.run(args)
        if key is not None and kernel.bind is not None and packed.shape[0] and _as_it_lies(packed):
            packed.memo[key] = lookups(kernel.bind(args), packed, args.out.dtype)
    return args.out.reshape(*ids.shape, k)


def _as_it_lies(packed: Packed) -> bool:
    """Whether a kernel for GPUs reads the buffers of a weight as they lie."""
    buffers = packed.buffers()
    return all(b.is_contiguous() for b in buffers.values()) and not buffers["codes"].data_ptr() % ALIGNED


def _check_range(ids: Array, n: int) -> None:
    wrong = np.asarray((ids < 0) | (ids >= n))
    if wrong.any():
        index = [int(i) for i in np.argwhere(wrong)[0]]
        raise UsageError("ids name no row", index=index, got=int(ids[tuple(index)]), expected=f"0..{n - 1}")
