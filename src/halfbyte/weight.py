"""The kinds of weight that a model holds, each in one canonical meaning.

Inside halfbyte scale2 always multiplies, codes are row-major with even k in the low nibble, and block
scales are row-major E4M3FN bytes. Letters: N output features, K input features, G = ceil(K/16), E experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np

from halfbyte.errors import WeightError
from halfbyte.numerics import (
    BLOCK,
    MX_BLOCK,
    Array,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    is_torch,
)

__all__ = ["DenseWeight", "Fp8Weight", "LossyWarning", "Mxfp4Weight", "Weight", "float_dtype", "to_numpy", "to_torch"]

ConcatPolicy = Literal["exact", "equal", "common"]

_FLOATS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_BYTE_DTYPES = ("uint8", "float8_e4m3fn", "int8", "float4_e2m1fn_x2")
_E8M0_DTYPES = ("uint8", "float8_e8m0fnu")


class LossyWarning(UserWarning):
    """An operation that was asked for has rounded; the message states the error."""


class _Immutable:
    """Fields are set once, by ``__init__``."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a {type(self).__name__} is immutable: make a new one instead of setting {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a {type(self).__name__} is immutable")

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: _frozen(value) for name, value in state.items() if isinstance(value, np.ndarray)}
        self.__dict__.update(state | arrays)


class Weight(_Immutable):
    """An NVFP4 weight: ``W[n, k] = e2m1(code) * e4m3(scale) * scale2``.

    Its arrays share memory with those it was made from, and are read-only views of them.

    Args:
        codes: (*E, N, ceil(K/16) * 8) u8, two codes a byte, even k in the low nibble.
        scales: (*E, N, G) u8 or float8_e4m3fn, the E4M3FN block scales.
        scale2: f32, multiplies. A number, 0-d, (1,), (E,), (N,) where that is unambiguous, or the
            full shape: (*E, 1, 1) per tensor, (*E, N, 1) per row.
        input_scale: f32, the multiplier of quantized activations; a number or (*E,).
        pre_scale: (K,) float; activations are multiplied by it before the product.
        k: the true K where the last block is padded with zeros; by default all that codes hold.

    Raises:
        WeightError: shapes or dtypes that do not fit together, or NumPy arrays mixed with tensors.
    """

    kind: ClassVar[str] = "nvfp4"
    codes: Array
    scales: Array
    scale2: Array
    input_scale: Array | None
    pre_scale: Array | None
    shape: tuple[int, ...]
    is_null: bool

    def __init__(
        self,
        *,
        codes: Array,
        scales: Array,
        scale2: Any,
        input_scale: Any = None,
        pre_scale: Array | None = None,
        k: int | None = None,
    ) -> None:
        codes, scales = _as_bytes(codes, "codes"), _as_bytes(scales, "scales")
        *experts, n, true_k = shape = _checked_shape(codes, scales, k, BLOCK)
        self._set(
            codes=_frozen(codes),
            scales=_frozen(scales),
            scale2=_frozen(_normal_scale2(scale2, tuple(experts), n, codes)),
            input_scale=None if input_scale is None else _frozen(_normal_input(input_scale, tuple(experts), codes)),
            pre_scale=pre_scale if pre_scale is None else _frozen(_checked_pre_scale(pre_scale, true_k, codes)),
            shape=shape,
            is_null=False,
        )

    def _set(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    @classmethod
    def null(cls, shape: Sequence[int]) -> Weight:
        """A placeholder of the given (*E, N, K) for an expert that another rank holds; it has no data.

        Everything but ``shape`` and ``is_null`` raises WeightError.
        """
        weight = cls.__new__(cls)
        weight._set(shape=tuple(shape), is_null=True)
        return weight

    def __getattr__(self, name: str) -> Any:
        # Reached only for attributes that __init__ did not set.
        if not name.startswith("_") and self.__dict__.get("is_null"):
            raise WeightError("this weight is null: another rank holds it", hint="route its tokens to that rank")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self) -> str:
        if self.is_null:
            return f"Weight.null({self.shape})"
        parts = [f"shape={self.shape}", "per-row scale2" if self.per_row else "per-tensor scale2"]
        parts += [name for name in ("input_scale", "pre_scale") if getattr(self, name) is not None]
        return f"Weight({', '.join(parts)}, {_library(self.codes)})"

    @property
    def n(self) -> int:
        """N, the output features."""
        return self.shape[-2]

    @property
    def k(self) -> int:
        """K, the true input features."""
        return self.shape[-1]

    @property
    def experts(self) -> tuple[int, ...]:
        """The leading expert axes, () for a plain weight."""
        return self.shape[:-2]

    @property
    def per_row(self) -> bool:
        """Whether scale2 differs by row: its shape is (*E, N, 1) and N is not 1."""
        return bool(self.scale2.shape[-2] != 1)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and scale2."""
        return sum(prod(a.shape) * (4 if a is self.scale2 else 1) for a in (self.codes, self.scales, self.scale2))

    def replace(self, **changes: Any) -> Weight:
        """A copy with some of the constructor's arguments changed."""
        fields = {name: getattr(self, name) for name in ("codes", "scales", "scale2", "input_scale", "pre_scale", "k")}
        return Weight(**(fields | changes))

    def dequantize(self, dtype: Any = "float32") -> Array:
        """The values, (*E, N, K).

        The product of code and block scale is exact; scale2 multiplies it once in f32; ``dtype``
        ("float32", "bfloat16" or "float16") rounds once more. pre_scale is not applied: it belongs
        to the activations.
        """
        values = decode_e2m1(self.codes)
        blocks = values.reshape(*self.scales.shape, BLOCK)
        with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN come out as such
            blocks *= decode_e4m3(self.scales)[..., None]
            values *= self.scale2
        return _cast(values[..., : self.k], dtype)

    def rows(self, a: int, b: int) -> Weight:
        """Output features a..b, with their codes, scales and per-row scale2."""
        self._check_range(a, b, self.n, "rows")
        scale2 = self.scale2[..., a:b, :] if self.per_row else self.scale2
        return self.replace(codes=self.codes[..., a:b, :], scales=self.scales[..., a:b, :], scale2=scale2)

    def columns(self, a: int, b: int) -> Weight:
        """Input features a..b; both are multiples of 16, or b is K."""
        self._check_range(a, b, self.k, "columns")
        if a % BLOCK or (b % BLOCK and b != self.k):
            raise WeightError(
                f"columns {a}..{b} of K = {self.k} cut a block of {BLOCK}",
                hint=f"cut at multiples of {BLOCK}: K has {self.scales.shape[-1]} blocks",
            )
        first, last = a // BLOCK, -(-b // BLOCK)
        return self.replace(
            codes=self.codes[..., first * 8 : last * 8],
            scales=self.scales[..., first:last],
            pre_scale=None if self.pre_scale is None else self.pre_scale[a:b],
            k=b - a,
        )

    def _check_range(self, a: int, b: int, size: int, axis: str) -> None:
        if not 0 <= a <= b <= size:
            raise WeightError(f"{axis} {a}..{b} are not within 0..{size}")

    @staticmethod
    def concat(parts: Sequence[Weight], policy: ConcatPolicy = "exact") -> Weight:
        """Join weights along N, as fused layers (q/k/v, gate/up) do.

        Args:
            parts: weights of equal K and expert axes, with equal input_scale and pre_scale.
            policy: what happens where scale2 differs. "exact": it becomes per-row; no bit of a part
                changes. "equal": WeightError. "common": the block scales are rounded to the largest
                scale2, and a LossyWarning states the relative error.

        Raises:
            WeightError: nothing to join, or parts that do not fit.
        """
        if not parts:
            raise WeightError("concat needs at least one weight")
        if policy not in ("exact", "equal", "common"):
            raise WeightError("unknown policy", got=repr(policy), expected="'exact', 'equal' or 'common'")
        first = parts[0]
        for i, part in enumerate(parts[1:], 1):
            if is_torch(part.codes) != is_torch(first.codes):
                raise WeightError(f"part {i} and part 0 are of two libraries", hint="use .torch() or .numpy() first")
            if (part.k, part.experts) != (first.k, first.experts):
                raise WeightError(
                    f"part {i} has another K or E", got=part.shape, expected=f"(*{first.experts}, N, {first.k})"
                )
            for name in ("input_scale", "pre_scale"):
                if not _equal_or_none(getattr(part, name), getattr(first, name)):
                    raise WeightError(
                        f"the {name} of part {i} differs from that of part 0",
                        hint=f"decide it first, for example with part.replace({name}=None)",
                    )
        filled = [p for p in parts if p.n]
        common = filled[0].scale2[..., :1, :] if filled else first.scale2
        equal = all(bool((p.scale2 == common).all()) for p in filled)
        if not equal and policy == "equal":
            raise WeightError(
                "the parts have different scale2",
                got=[float(p.scale2.reshape(-1)[0]) for p in parts],
                hint='use policy="exact" (per-row scale2) or policy="common" (rounds)',
            )
        if not equal and policy == "common":
            parts, common = _to_common_scale2(parts)
            equal = True
        rows = [p.scale2 if p.per_row else _broadcast(p.scale2, (*p.experts, p.n, 1)) for p in parts]
        return first.replace(
            codes=_concat([p.codes for p in parts], -2),
            scales=_concat([p.scales for p in parts], -2),
            scale2=common if equal else _concat(rows, -2),
        )

    def split(self, sizes: Sequence[int]) -> list[Weight]:
        """The inverse of concat: parts of the given N, each per-tensor again where its rows agree."""
        if sum(sizes) != self.n or any(size < 0 for size in sizes):
            raise WeightError("the sizes do not add up to N", got=list(sizes), expected=self.n)
        parts, start = [], 0
        for size in sizes:
            part = self.rows(start, start + size)
            start += size
            if part.per_row and part.n and bool((part.scale2 == part.scale2[..., :1, :]).all()):
                part = part.replace(scale2=part.scale2[..., :1, :])
            parts.append(part)
        return parts

    @staticmethod
    def stack(experts: Sequence[Weight]) -> Weight:
        """E weights of one shape as one weight with a leading expert axis; all have input_scale or none."""
        if not experts:
            raise WeightError("stack needs at least one weight")
        first = experts[0]
        for i, expert in enumerate(experts):
            if is_torch(expert.codes) != is_torch(first.codes):
                raise WeightError(
                    f"expert {i} and expert 0 are of two libraries", hint="use .torch() or .numpy() first"
                )
            if expert.shape != first.shape:
                raise WeightError(f"expert {i} has another shape", got=expert.shape, expected=first.shape)
            if (expert.input_scale is None) != (first.input_scale is None):
                raise WeightError(f"expert {i} has an input_scale and expert 0 none, or the reverse")
            if not _equal_or_none(expert.pre_scale, first.pre_scale):
                raise WeightError(f"the pre_scale of expert {i} differs from that of expert 0")
        per_row = any(e.per_row for e in experts)
        scale2 = [_broadcast(e.scale2, (*e.experts, e.n, 1)) if per_row else e.scale2 for e in experts]
        return first.replace(
            codes=_stack([e.codes for e in experts]),
            scales=_stack([e.scales for e in experts]),
            scale2=_stack(scale2),
            input_scale=None if first.input_scale is None else _stack([e.input_scale for e in experts]),
        )

    def unstack(self) -> list[Weight]:
        """The weights along the first expert axis."""
        if not self.experts:
            raise WeightError("this weight has no expert axis", got=self.shape)
        inputs = [None] * self.shape[0] if self.input_scale is None else list(self.input_scale)
        return [
            self.replace(codes=self.codes[e], scales=self.scales[e], scale2=self.scale2[e], input_scale=inputs[e])
            for e in range(self.shape[0])
        ]

    def same(self, other: Weight) -> bool:
        """Whether both hold the same bits: codes, scales, scale2, input_scale, pre_scale and shape."""
        fields = ("codes", "scales", "scale2", "input_scale", "pre_scale")
        return self.shape == other.shape and all(_same_bits(getattr(self, f), getattr(other, f)) for f in fields)

    def torch(self, device: Any = None) -> Weight:
        """The same weight as torch tensors, on ``device``; NumPy arrays are copied: torch has none read-only."""
        return self._map(lambda a: to_torch(a, device))

    def numpy(self) -> Weight:
        """The same weight as NumPy arrays."""
        return self._map(to_numpy)

    def _map(self, move: Any) -> Weight:
        arrays = ("codes", "scales", "scale2", "input_scale", "pre_scale")
        return self.replace(**{n: move(a) for n in arrays if (a := getattr(self, n)) is not None})


class Mxfp4Weight(_Immutable):
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
        codes, scales = _as_bytes(codes, "codes"), _as_bytes(scales, "scales", _E8M0_DTYPES)
        shape = _checked_shape(codes, scales, k, MX_BLOCK)
        self.__dict__.update(codes=_frozen(codes), scales=_frozen(scales), shape=shape)

    def __repr__(self) -> str:
        return f"Mxfp4Weight(shape={self.shape}, {_library(self.codes)})"

    def dequantize(self, dtype: Any = "float32") -> Array:
        """The values, (*E, N, K): exact in f32, subnormals too, then rounded to ``dtype``.

        Products from 2^128 on become Inf: magnitudes 2 to 6 at scale byte 254, 4 and 6 at 253. A NaN scale
        gives NaN for its whole block.
        """
        values = decode_e2m1(self.codes)
        blocks = values.reshape(*self.scales.shape, MX_BLOCK)
        with np.errstate(over="ignore", invalid="ignore"):
            blocks *= decode_e8m0(self.scales)[..., None]
        return _cast(values[..., : self.shape[-1]], dtype)


class Fp8Weight(_Immutable):
    """An FP8 weight: ``W = e4m3(data) * scale``. Rounded twins of an NVFP4 weight carry their error.

    Args:
        data: (N, K) u8 or float8_e4m3fn.
        scale: f32, multiplies. A number, (), (1,) or (1, 1) per tensor, (N,) or (N, 1) per row, or
            (ceil(N/b0), ceil(K/b1)) where ``block`` is given.
        block: (b0, b1), the extent of one block scale, or None.
        input_scale: f32, the multiplier of quantized activations, or None.
        error: relative Frobenius error against the weight that this one was rounded from, or None.

    Raises:
        WeightError: shapes or dtypes that do not fit together.
    """

    kind: ClassVar[str] = "fp8"
    data: Array
    scale: Array
    block: tuple[int, int] | None
    input_scale: Array | None
    error: float | None

    def __init__(
        self,
        *,
        data: Array,
        scale: Any,
        block: tuple[int, int] | None = None,
        input_scale: Any = None,
        error: float | None = None,
    ) -> None:
        data = _as_bytes(data, "data")
        if data.ndim != 2:
            raise WeightError("FP8 data need two axes", got=tuple(data.shape), expected="(N, K)")
        n, k = data.shape
        scale = _as_f32(scale, data)
        if block is not None:
            needed = (-(-n // block[0]), -(-k // block[1]))
        elif tuple(scale.shape) in ((), (1,), (1, 1)):
            needed = (1, 1)
        else:
            needed = (n, 1)
        if tuple(scale.shape) != needed and (block is not None or tuple(scale.shape) not in ((), (1,), (n,))):
            raise WeightError("the scale does not fit the data", got=tuple(scale.shape), expected=needed)
        scale = scale.reshape(needed)
        if input_scale is not None:
            input_scale = _as_f32(input_scale, data)
            if prod(input_scale.shape) != 1:
                raise WeightError("input_scale does not fit", got=tuple(input_scale.shape), expected=())
        self.__dict__.update(
            data=_frozen(data),
            scale=_frozen(scale),
            block=block,
            input_scale=None if input_scale is None else _frozen(input_scale.reshape(())),
            error=error,
        )

    def __repr__(self) -> str:
        return f"Fp8Weight(shape={self.shape}, scale {tuple(self.scale.shape)}, {_library(self.data)})"

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K)."""
        return tuple(self.data.shape)

    @property
    def granularity(self) -> str:
        """ "tensor", "row" or "block"."""
        return "block" if self.block else "tensor" if prod(self.scale.shape) == 1 else "row"

    def dequantize(self, dtype: Any = "float32") -> Array:
        """The values, (N, K): one f32 product, rounded to ``dtype``."""
        values = decode_e4m3(self.data)
        scale = self.scale
        if self.block is not None:
            n, k = self.shape
            row, column = np.arange(n) // self.block[0], np.arange(k) // self.block[1]
            scale = scale[row[:, None], column[None, :]]
        with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN come out as such
            return _cast(values * scale, dtype)


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
        return _cast(self.data, dtype)


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


def _cast(values: Array, dtype: Any) -> Array:
    numpy_dtype = float_dtype(dtype)
    if is_torch(values):
        import torch

        return values.to(getattr(torch, dtype_name(dtype)))
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtype, copy=False)


def _library(a: Array) -> str:
    return f"torch on {a.device}" if is_torch(a) else "numpy"


def _as_bytes(a: Array, what: str, dtypes: tuple[str, ...] = _BYTE_DTYPES) -> Array:
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


def _checked_shape(codes: Array, scales: Array, k: int | None, block: int) -> tuple[int, ...]:
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


def _as_f32(value: Any, like: Array) -> Array:
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


def _normal_scale2(value: Any, experts: tuple[int, ...], n: int, like: Array) -> Array:
    scale2 = _as_f32(value, like)
    shape = tuple(scale2.shape)
    ones = (1,) * len(experts)
    per_tensor, per_row = (*experts, 1, 1), (*experts, n, 1)
    if shape in (per_tensor, per_row):
        return scale2
    if prod(shape) == 1 and len(shape) <= 2:
        return _broadcast(scale2.reshape(*ones, 1, 1), per_tensor)
    fits = []
    if shape in (experts, (*experts, 1)):
        fits.append(scale2.reshape(per_tensor))
    if shape == (*experts, n) and per_row != per_tensor:
        fits.append(scale2.reshape(per_row))
    elif shape in ((n,), (n, 1)):
        fits.append(_broadcast(scale2.reshape(*ones, n, 1), per_row))
    if len(fits) != 1:
        raise WeightError(
            "scale2 is ambiguous" if fits else "scale2 does not fit the codes",
            got=shape,
            expected=f"{per_tensor} per tensor or {per_row} per row",
        )
    return fits[0]


def _normal_input(value: Any, experts: tuple[int, ...], like: Array) -> Array:
    scale = _as_f32(value, like)
    if prod(scale.shape) == 1:
        return _broadcast(scale.reshape((1,) * len(experts)), experts)
    if tuple(scale.shape) != experts:
        raise WeightError("input_scale does not fit", got=tuple(scale.shape), expected=experts)
    return scale


def _checked_pre_scale(pre_scale: Array, k: int, like: Array) -> Array:
    if not hasattr(pre_scale, "shape") or "float" not in str(pre_scale.dtype):
        raise WeightError("pre_scale is not an array of floats", got=type(pre_scale).__name__)
    if is_torch(pre_scale) != is_torch(like):
        raise WeightError("pre_scale and codes are of two libraries")
    if tuple(pre_scale.shape) != (k,):
        raise WeightError("pre_scale does not fit K", got=tuple(pre_scale.shape), expected=(k,))
    return pre_scale


def _frozen(a: Array) -> Array:
    """A read-only view of a NumPy array; torch has none, so a tensor is passed on."""
    if is_torch(a):
        return a
    view = a.view()
    view.setflags(write=False)
    return view


def _broadcast(a: Array, shape: tuple[int, ...]) -> Array:
    return a.broadcast_to(shape) if is_torch(a) else np.broadcast_to(a, shape)


def _concat(arrays: list[Array], axis: int) -> Array:
    if is_torch(arrays[0]):
        import torch

        return torch.cat(arrays, axis)
    return np.concatenate(arrays, axis)


def _stack(arrays: list[Array]) -> Array:
    if is_torch(arrays[0]):
        import torch

        return torch.stack(arrays)
    return np.stack(arrays)


def _equal_or_none(a: Array | None, b: Array | None) -> bool:
    if a is None or b is None:
        return a is b
    return tuple(a.shape) == tuple(b.shape) and bool((a == b).all())


def _same_bits(a: Array | None, b: Array | None) -> bool:
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


def _to_common_scale2(parts: Sequence[Weight]) -> tuple[list[Weight], Array]:
    """Round the block scales of all parts to the largest scale2, which is also returned; warns with the error."""
    plain = [p.numpy() for p in parts]
    largest = np.max([p.scale2.max(axis=-2, keepdims=True) for p in plain if p.n], axis=0)
    if any((p.scale2 < 0).any() for p in plain):
        raise WeightError("a negative scale2 has no common one")
    rounded, wrong, total = [], 0.0, 0.0
    for part in plain:
        ratio = np.divide(part.scale2, largest, out=np.ones_like(part.scale2 + largest), where=largest != 0)
        scales = encode_e4m3(decode_e4m3(part.scales) * ratio)
        new = part.replace(scales=scales, scale2=largest)
        before = part.dequantize().astype(np.float64)
        wrong += float(np.square(new.dequantize() - before).sum())
        total += float(np.square(before).sum())
        rounded.append(new)
    error = (wrong / total) ** 0.5 if total else 0.0
    if error:
        warnings.warn(
            f"concat to a common scale2 rounded the block scales: relative error {error:.3g}",
            LossyWarning,
            stacklevel=3,
        )
    like = parts[0].codes
    if is_torch(like):
        return [w.torch(like.device) for w in rounded], to_torch(largest, like.device)
    return rounded, largest
