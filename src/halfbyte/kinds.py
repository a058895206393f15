"""The kinds of weight beside NVFP4: MXFP4, FP8, INT8 and dense.

FP8 and INT8 weights also serve as the rounded twins that halfbyte.lossy makes; a twin states its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from halfbyte.arrays import (
    E8M0_DTYPES,
    Immutable,
    as_bytes,
    as_f32,
    cast,
    check_parts,
    checked_pre_scale,
    code_shape,
    concat_arrays,
    frozen,
    library,
    per_tensor_or_row,
    same_bits,
    to_numpy,
    to_torch,
)
from halfbyte.errors import WeightError
from halfbyte.numerics import MX_BLOCK, Array, decode_e2m1, decode_e4m3, decode_e8m0, is_torch


class Mxfp4Weight(Immutable):
    """An MXFP4 weight: ``W[n, k] = e2m1(code) * 2^(scale byte - 127)``; halfbyte.mxfp4 casts it to NVFP4.

    Args:
        codes: (*E, N, ceil(K/32) * 16) u8, two codes a byte, even k in the low nibble.
        scales: (*E, N, ceil(K/32)) u8 or float8_e8m0fnu; FF is NaN.
        k: the true K where the last block is padded with zeros; by default all that codes hold.

    Raises:
        WeightError: shapes or dtypes that do not fit together, or a NumPy array and a tensor.
    """

    kind: ClassVar[str] = "mxfp4"
    codes: Array
    scales: Array
    shape: tuple[int, ...]

    def __init__(self, *, codes: Array, scales: Array, k: int | None = None) -> None:
        codes, scales = as_bytes(codes, "codes"), as_bytes(scales, "scales", E8M0_DTYPES)
        shape = code_shape(codes, scales, k, MX_BLOCK)
        self.__dict__.update(codes=frozen(codes), scales=frozen(scales), shape=shape)

    def __repr__(self) -> str:
        return f"Mxfp4Weight(shape={self.shape}, {library(self.codes)})"

    def replace(self, **changes: Any) -> Mxfp4Weight:
        """A copy with some of the constructor's arguments changed."""
        return Mxfp4Weight(**({"codes": self.codes, "scales": self.scales, "k": self.shape[-1]} | changes))

    @staticmethod
    def concat(parts: Sequence[Mxfp4Weight]) -> Mxfp4Weight:
        """Join weights of equal K and expert axes along N; no bit of a part changes.

        Raises:
            WeightError: nothing to join, or parts that do not fit.
        """
        check_parts(parts)
        joined = {name: concat_arrays([getattr(part, name) for part in parts], -2) for name in ("codes", "scales")}
        return parts[0].replace(**joined)

    def same(self, other: Mxfp4Weight) -> bool:
        """Whether both hold the same bits: codes, scales and shape."""
        return self.shape == other.shape and all(
            same_bits(getattr(self, name), getattr(other, name)) for name in ("codes", "scales")
        )

    def torch(self, device: Any = None) -> Mxfp4Weight:
        """The same weight as torch tensors, on ``device``; NumPy arrays are copied: torch has none read-only."""
        return self.replace(codes=to_torch(self.codes, device), scales=to_torch(self.scales, device))

    def numpy(self) -> Mxfp4Weight:
        """The same weight as NumPy arrays."""
        return self.replace(codes=to_numpy(self.codes), scales=to_numpy(self.scales))

    def dequantize(self, dtype: Any = "float32") -> Array:
        """The values, (*E, N, K): exact in f32, subnormals too, then rounded to ``dtype``.

        Products from 2^128 on become Inf: magnitudes 2 to 6 at scale byte 254, 4 and 6 at 253. A NaN scale
        gives NaN for its whole block.
        """
        values = decode_e2m1(self.codes)
        blocks = values.reshape(*self.scales.shape, MX_BLOCK)
        with np.errstate(over="ignore", invalid="ignore"):
            blocks *= decode_e8m0(self.scales)[..., None]
        return cast(values[..., : self.shape[-1]], dtype)


class Fp8Weight(Immutable):
    """An FP8 weight: ``W = e4m3(data) * scale``. Rounded twins of an NVFP4 weight carry their error.

    Args:
        data: (*E, N, K) u8 or float8_e4m3fn.
        scale: f32, multiplies. As scale2 of a Weight: per tensor, (*E, 1, 1), or per row, (*E, N, 1), or a
            shape that can mean only one of them; (*E, ceil(N/b0), ceil(K/b1)) where ``block`` is given.
        block: (b0, b1), the extent of one block scale, or None.
        input_scale: f32, the multiplier of quantized activations, or None.
        pre_scale: (K,) float; activations are multiplied by it before the product.
        error: relative Frobenius error against the weight that this one was rounded from, or None.

    Raises:
        WeightError: shapes or dtypes that do not fit together.
    """

    kind: ClassVar[str] = "fp8"
    data: Array
    scale: Array
    block: tuple[int, int] | None
    input_scale: Array | None
    pre_scale: Array | None
    error: float | None
    memo: dict[Any, Any]

    def __init__(
        self,
        *,
        data: Array,
        scale: Any,
        block: tuple[int, int] | None = None,
        input_scale: Any = None,
        pre_scale: Array | None = None,
        error: float | None = None,
    ) -> None:
        data = as_bytes(data, "data")
        if data.ndim < 2:
            raise WeightError("FP8 data need two axes", got=tuple(data.shape), expected="(*E, N, K)")
        *experts, n, k = data.shape
        if block is None:
            scale = per_tensor_or_row(scale, tuple(experts), n, data, "the scale", "the data")
        else:
            scale = as_f32(scale, data)
            needed = (*experts, -(-n // block[0]), -(-k // block[1]))
            if tuple(scale.shape) != needed:
                raise WeightError("the scale does not fit the data", got=tuple(scale.shape), expected=needed)
        if input_scale is not None:
            input_scale = as_f32(input_scale, data)
            if prod(input_scale.shape) != 1:
                raise WeightError("input_scale does not fit", got=tuple(input_scale.shape), expected=())
        self.__dict__.update(
            data=frozen(data),
            scale=frozen(scale),
            block=block,
            input_scale=None if input_scale is None else frozen(input_scale.reshape(())),
            pre_scale=None if pre_scale is None else frozen(checked_pre_scale(pre_scale, k, data)),
            error=error,
            memo={},
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"memo": {}}

    def __repr__(self) -> str:
        return f"Fp8Weight(shape={self.shape}, scale {tuple(self.scale.shape)}, {library(self.data)})"

    @property
    def shape(self) -> tuple[int, ...]:
        """(*E, N, K)."""
        return tuple(self.data.shape)

    @property
    def granularity(self) -> str:
        """ "tensor", "row" or "block"."""
        return "block" if self.block else "tensor" if self.scale.shape[-2] == 1 else "row"

    def dequantize(self, dtype: Any = "float32") -> Array:
        """The values, (*E, N, K): one f32 product, rounded to ``dtype``. pre_scale is not applied."""
        values = decode_e4m3(self.data)
        scale = self.scale
        if self.block is not None:
            n, k = self.shape[-2:]
            row, column = np.arange(n) // self.block[0], np.arange(k) // self.block[1]
            scale = scale[..., row[:, None], column[None, :]]
        with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN come out as such
            return cast(values * scale, dtype)


class Int8Weight(Immutable):
    """An INT8 weight: ``W = data * scale``, symmetric. Rounded twins of an NVFP4 weight carry their error.

    Args:
        data: (*E, N, K) int8.
        scale: f32, multiplies; as that of an Fp8Weight without blocks.
        pre_scale: (K,) float; activations are multiplied by it before the product.
        error: relative Frobenius error against the weight that this one was rounded from, or None.

    Raises:
        WeightError: shapes or dtypes that do not fit together.
    """

    kind: ClassVar[str] = "int8"
    data: Array
    scale: Array
    pre_scale: Array | None
    error: float | None

    def __init__(self, *, data: Array, scale: Any, pre_scale: Array | None = None, error: float | None = None) -> None:
        name = str(data.dtype).removeprefix("torch.") if hasattr(data, "dtype") else type(data).__name__
        if name != "int8":
            raise WeightError("data are of the wrong dtype", got=name, expected="int8")
        if data.ndim < 2:
            raise WeightError("INT8 data need two axes", got=tuple(data.shape), expected="(*E, N, K)")
        *experts, n, k = data.shape
        self.__dict__.update(
            data=frozen(data),
            scale=frozen(per_tensor_or_row(scale, tuple(experts), n, data, "the scale", "the data")),
            pre_scale=None if pre_scale is None else frozen(checked_pre_scale(pre_scale, k, data)),
            error=error,
        )

    def __repr__(self) -> str:
        return f"Int8Weight(shape={self.shape}, scale {tuple(self.scale.shape)}, {library(self.data)})"

    @property
    def shape(self) -> tuple[int, ...]:
        """(*E, N, K)."""
        return tuple(self.data.shape)

    def dequantize(self, dtype: Any = "float32") -> Array:
        """The values, (*E, N, K): one f32 product, rounded to ``dtype``. pre_scale is not applied."""
        values = self.data.float() if is_torch(self.data) else self.data.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            return cast(values * self.scale, dtype)


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A weight that is not quantized: ``data`` (N, K) or any shape, float32, bfloat16, float16 or float64."""

    data: Array
    kind: ClassVar[str] = "dense"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        return tuple(self.data.shape)

    def dequantize(self, dtype: Any = "float32") -> Array:
        """The values in ``dtype``."""
        return cast(self.data, dtype)
