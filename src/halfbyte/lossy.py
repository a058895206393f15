"""Rounded twins of an NVFP4 weight, for matrix units that multiply bytes. They round, so nothing calls them unasked.

========  =====================================  ================================================
twin      scale                                  error on Gaussian weights of 256 rows, K = 2048
========  =====================================  ================================================
``fp8``   6 x scale2, per row where scale2 is    0.0143, whatever their size
``int8``  amax / 127 of each row                 0.008, more where a row has outliers
========  =====================================  ================================================

With 6 x scale2 the codes 6, 3 and 1.5 become scale, scale/2 and scale/4, which FP8 holds, and 448 is the largest
value: nothing saturates. A cast without a scale loses 0.023 to 0.052 for standard deviations of 0.05 to 0.01.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from halfbyte.arrays import broadcast, without_padding
from halfbyte.errors import UsageError, WeightError
from halfbyte.kinds import Fp8Weight, Int8Weight
from halfbyte.numerics import (
    BLOCK,
    E2M1_MAX,
    E2M1_PAIRS,
    E4M3_VALUES,
    Array,
    decode_e2m1,
    decode_e4m3,
    encode_e4m3,
    is_torch,
    lookup,
)
from halfbyte.weight import Weight

__all__ = ["to_fp8", "to_int8"]

_CHUNK: Final = 1 << 18
"""Elements that a step works on: its temporaries take about 10 MB."""

_INT8_MAX: Final = 127


def _fp8_tables() -> tuple[Any, Any, Any]:
    """By scale byte * 256 + byte of codes: two E4M3 bytes as an i16, their squared error, and the squared values.

    Of NaN scales, which no twin has, these are 0.
    """
    values = E4M3_VALUES[:, None, None] * E2M1_PAIRS  # exact; a sixth in f32 rounds to the nearest, too
    data = encode_e4m3(values / np.float32(E2M1_MAX))
    exact = values.astype(np.float64)
    lost = np.square(E4M3_VALUES[data] * E2M1_MAX - exact).sum(-1)
    return data.view(np.int16).reshape(-1), *(np.nan_to_num(a).reshape(-1) for a in (lost, np.square(exact).sum(-1)))


_FP8_PAIRS, _FP8_LOST, _SQUARES = _fp8_tables()


def to_fp8(weight: Weight) -> Fp8Weight:
    """Round an NVFP4 weight to FP8: ``data = e4m3(code * scale / 6)`` to nearest even, ``scale = 6 * scale2``.

    Args:
        weight: (*E, N, K), NumPy or torch on any device. Works on some rows at a time: scratch memory does not grow.

    Returns:
        The twin, with pre_scale, without input_scale (which is one for NVFP4 activations). Its ``error`` is the
        relative Frobenius error against the NVFP4 values, measured on this weight; the rounding of 6 * scale2 to
        float32, at most 2^-24, is not in it.

    Raises:
        WeightError: a null weight, a NaN block scale (with its index), or a scale2 above a sixth of float32's range.
    """
    _check(weight)
    data = _empty(weight, np.uint8)
    with np.errstate(over="ignore"):
        scale = _finite(weight.scale2 * E2M1_MAX)
    lost = total = 0.0
    for at, codes, scales, scale2 in _pieces(weight):
        index = _indices(codes, scales)
        data[at] = lookup(_FP8_PAIRS, index).view(data.dtype)[:, : weight.k]
        square = scale2[:, 0] ** 2
        lost, total = lost + _weighed(_FP8_LOST, index, square), total + _weighed(_SQUARES, index, square)
    return Fp8Weight(data=data, scale=scale, pre_scale=weight.pre_scale, error=_relative(lost, total))


def fp8_error(weight: Weight) -> float:
    """What ``to_fp8`` would state as its error; makes no twin.

    Args:
        weight: (*E, N, K), NumPy or torch on any device.

    Raises:
        WeightError: a null weight, or a NaN block scale (with its index).
    """
    _check(weight)
    if is_torch(weight.codes) and weight.codes.device.type == "cpu":
        weight = weight.numpy()  # which looks up 30 times as fast
    lost = total = 0.0
    for _, codes, scales, scale2 in _pieces(weight):
        index, square = _indices(codes, scales), scale2[:, 0] ** 2
        lost, total = lost + _weighed(_FP8_LOST, index, square), total + _weighed(_SQUARES, index, square)
    return _relative(lost, total)


def to_int8(weight: Weight) -> Int8Weight:
    """Round an NVFP4 weight to INT8, to nearest even, with the scale amax / 127 of each row (1 where a row is zero).

    Args:
        weight: (*E, N, K), NumPy or torch on any device. Works on some rows at a time: scratch memory does not grow.

    Returns:
        The twin, with pre_scale, without input_scale (which is one for NVFP4 activations). Its ``error`` is the
        relative Frobenius error against the NVFP4 values, measured on this weight.

    Raises:
        WeightError: a null weight, a NaN block scale (with its index), or values beyond float32's range.
    """
    _check(weight)
    data = _empty(weight, np.int8)
    scale = _empty(weight, np.float32, columns=1)
    lost = total = 0.0
    for at, codes, scales, scale2 in _pieces(weight):
        values = decode_e2m1(codes)
        values.reshape(*scales.shape, BLOCK)[...] *= decode_e4m3(scales)[..., None]
        top = _row_amax(values)
        quotients = values * _INT8_MAX / (top + (top == 0))
        rounded = quotients.round() if is_torch(quotients) else np.rint(quotients)
        data[at] = rounded[:, : weight.k]
        wide = top * scale2 / _INT8_MAX  # f64, as scale2 is
        with np.errstate(over="ignore"):
            scale[at] = wide + ((top == 0) | (scale2 == 0))
        _finite(scale[at])
        exact = values * scale2
        lost = lost + ((rounded * _doubles(scale[at]) - exact) ** 2).sum()
        total = total + (exact**2).sum()
    return Int8Weight(data=data, scale=scale, pre_scale=weight.pre_scale, error=_relative(lost, total))


def _check(weight: Weight) -> None:
    if not isinstance(weight, Weight):
        raise UsageError("not an NVFP4 weight", got=type(weight).__name__, expected="a Weight")


def _pieces(weight: Weight) -> Iterator[tuple[tuple[Any, ...], Array, Array, Array]]:
    """Some rows of an expert at a time: their index, codes (padding zeroed), block scales, and scale2 (rows, 1) f64."""
    *experts, n, k = weight.shape
    scale2 = broadcast(weight.scale2, (*experts, n, 1))
    step = max(1, _CHUNK // max(k, 1))
    for expert in np.ndindex(*experts):
        for start in range(0, n, step):
            at = (*expert, slice(start, min(start + step, n)))
            scales = weight.scales[at]
            nan = (scales & 127) == 127
            if bool(nan.any()):
                row, block = (int(i) for i in (nan.nonzero()[0] if is_torch(nan) else np.argwhere(nan)[0]))
                raise WeightError("a block scale is NaN", index=[*expert, start + row, block])
            yield at, without_padding(weight.codes[at], k), scales, _doubles(scale2[at])


def _indices(codes: Array, scales: Array) -> Array:
    """(rows, K/2) i32, where the tables have the two products of each byte of codes."""
    rows, blocks = scales.shape
    both = _integers(codes).reshape(rows, blocks, BLOCK // 2) + _integers(scales)[..., None] * 256
    return both.reshape(rows, -1)


def _weighed(table: Any, index: Array, square: Array) -> Any:
    """What a table has for the products of rows, each times its square of scale2, summed up."""
    return (lookup(table, index).sum(-1) * square).sum()


def _empty(weight: Weight, dtype: Any, columns: int | None = None) -> Array:
    """An array of the weight's shape, library and device; with another number of columns if given."""
    shape = (*weight.shape[:-1], weight.k if columns is None else columns)
    if not is_torch(weight.codes):
        return np.empty(shape, dtype)
    import torch

    return torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), device=weight.codes.device)


def _integers(a: Array) -> Array:
    return a.int() if is_torch(a) else a.astype(np.int32)


def _doubles(a: Array) -> Array:
    return a.double() if is_torch(a) else a.astype(np.float64)


def _row_amax(a: Array) -> Array:
    """(rows, 1); 0 for rows of nothing."""
    if not a.shape[-1]:
        return a.sum(-1)[:, None]
    return a.abs().amax(-1, keepdim=True) if is_torch(a) else np.abs(a).max(-1, keepdims=True)


def _finite(scale: Array) -> Array:
    """``scale`` itself; WeightError where it is Inf or NaN."""
    finite = scale.isfinite() if is_torch(scale) else np.isfinite(scale)
    if not bool(finite.all()):
        raise WeightError("scale2 is not finite, or too large for the scale of a rounded twin")
    return scale


def _relative(lost: Any, total: Any) -> float:
    return float(lost / total) ** 0.5 if float(total) else 0.0
