"""What calls on a weight come down to, kept with the weight: the second call like one skips the choice."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod
from typing import Any, Final
from weakref import ref

import numpy as np

from halfbyte.kernels import LinearArgs, select
from halfbyte.kernels.base import ALIGNED
from halfbyte.layouts import Packed
from halfbyte.numerics import Array, is_torch
from halfbyte.operands import contiguous, empty

_FEW_ROWS: Final = 64
"""On a CPU, calls of more rows are not remembered: each number of rows would be, and they take long enough anyway."""
_FEW_CALLS: Final = 256
"""What is remembered of a weight, at most."""

Call = Callable[[Array, Array | None], Array | None]

_environment: Final[Any] = getattr(os.environ, "_data", {})  # os.environ.get() decodes anew, for 0.7 us
_FORCED: Final[Any] = getattr(os.environ, "encodekey", str)("HALFBYTE_KERNEL")


def key_of(x: Array, bias: Array | None, out_dtype: Any, precision: str | None) -> Any:
    """All of a call on a weight that decides what is done, but for its gradient."""
    how = None if bias is None else (bias.shape, bias.dtype, getattr(bias, "device", None))
    return x.shape, x.dtype, getattr(x, "device", None), how, out_dtype, precision, forced_name()


def forced_name() -> Any:
    """What HALFBYTE_KERNEL is, as the environment has it."""
    return _environment.get(_FORCED)


def remember(x: Array, packed: Packed, bias: Array | None, out_dtype: Any, to: str, precision: str | None) -> None:
    """Keep with the weight what a call like this one comes down to, if its kernel can say so.

    It is a function of x and bias, which gives None where it does not hold any more.
    """
    n, k = packed.shape[-2:]
    rows = prod(x.shape[:-1])
    native = is_torch(x) or (x.dtype.isnative and (bias is None or bias.dtype.isnative))
    few = rows <= _FEW_ROWS or (is_torch(x) and x.is_cuda)  # a GPU computes 500 rows while the host chooses
    if not (rows and few and n and k and native):
        return
    args = LinearArgs(x=x.reshape(rows, k), weight=packed, bias=bias, out=empty((rows, n), to, x))
    kernel = select(LinearArgs, args.call())
    if kernel.bind is None:
        return
    run, shape = kernel.bind(args), (*x.shape[:-1], n)
    buffers = list(packed.buffers().values())
    made = on_tensors(run, buffers, shape, args.out) if is_torch(x) else _on_arrays(run, shape, args.out.dtype)
    keep(packed.memo, key_of(x, bias, out_dtype, precision), made)


def keep(memo: dict[Any, Any], key: tuple[Any, ...], made: Any) -> None:
    """Keep what a call comes down to with its weight; of many calls all are forgotten first, but nothing else is."""
    if len(memo) > _FEW_CALLS:
        for known in list(memo):  # at once: other threads use it, too
            if isinstance(known, tuple):
                memo.pop(known, None)
    memo[key] = made


def _on_arrays(run: Callable[..., None], shape: tuple[int, ...], dtype: Any) -> Call:
    def call(x: Array, bias: Array | None) -> Array:
        out = np.empty(shape, dtype)
        run(np.ascontiguousarray(x), bias if bias is None else np.ascontiguousarray(bias), out)
        return out

    return call


def lookups(run: Callable[..., None], packed: Packed, dtype: Any) -> Callable[[Array], Array | None]:
    """What ``embedding`` of a weight on a GPU comes down to, for ids of one dtype; None where that changed.

    Args:
        run: of a kernel's ``bind``.
        packed: (N, K), its buffers without gaps and aligned.
        dtype: torch's, of the result.
    """
    import torch

    k, device = packed.shape[-1], packed.buffers()["codes"].device
    unchanged, make = _watched(list(packed.buffers().values())), torch.empty

    def call(ids: Array) -> Array | None:
        if not unchanged():
            return None
        if not ids.is_contiguous():
            ids = ids.contiguous()
        out = make((*ids.shape, k), dtype=dtype, device=device)
        if out.numel():
            run(ids, None, out)
        return out

    return call


def _watched(buffers: list[Any]) -> Callable[[], bool]:
    """A question: whether torch wrote to no buffer of a weight since, and on a GPU none has moved."""
    counted = [(b, b._version) for b in buffers if not b.is_inference()]
    moving = [(b, b.data_ptr()) for b in buffers if b.is_cuda]

    def unchanged() -> bool:
        for buffer, version in counted:
            if buffer._version != version:
                return False
        for buffer, address in moving:  # noqa: SIM110 (a generator takes longer)
            if buffer.data_ptr() != address:
                return False
        return True

    return unchanged


def watched_weakly(tensors: list[Any]) -> Callable[[], bool]:
    """The same question about tensors that it does not keep: False once one is gone."""
    # of a parameter that is cast, only the data is another
    watched = [(ref(a), a.data_ptr(), None if a.is_inference() else a._version) for a in tensors]

    def unchanged() -> bool:
        for known, address, version in watched:
            a = known()
            if a is None or a.data_ptr() != address or (version is not None and a._version != version):
                return False
        return True

    return unchanged


def on_tensors(run: Callable[..., None], buffers: list[Any], shape: tuple[int, ...], like: Array) -> Call:
    """What a call on a weight in tensors comes down to; None where that does not hold any more.

    Args:
        run: of a kernel's ``bind``.
        buffers: of the weight.
        shape: of the result.
        like: a result.
    """
    import torch

    with torch.inference_mode(False):
        pattern = torch.empty(1, dtype=like.dtype, device=like.device).expand(shape)  # holds one value
    make, allowed = torch.empty_like, torch.is_grad_enabled
    aligned = ALIGNED if like.is_cuda else 1
    unchanged = _watched(buffers)

    def call(x: Array, bias: Array | None) -> Array | None:
        if not unchanged():
            return None
        if (x.requires_grad or (bias is not None and bias.requires_grad)) and allowed():
            return None
        if not x.is_contiguous() or x.is_neg() or x.data_ptr() % aligned:
            x = contiguous(x)
        out = make(pattern)
        run(x, bias if bias is None else contiguous(bias), out)
        return out

    return call
