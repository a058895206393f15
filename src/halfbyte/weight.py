"""The canonical NVFP4 weight, and what can be done to it without changing a bit.

Inside halfbyte scale2 always multiplies, codes are row-major with even k in the low nibble, and block
scales are row-major E4M3FN bytes. Letters: N output features, K input features, G = ceil(K/16), E experts.
The other kinds of weight (halfbyte.kinds) and the moves between libraries (halfbyte.arrays) can be had from here, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np

from halfbyte.arrays import (
    Immutable,
    as_bytes,
    broadcast,
    check_parts,
    checked_pre_scale,
    code_shape,
    concat_arrays,
    dtype_name,
    equal_or_none,
    float_dtype,
    frozen,
    library,
    normal_input,
    per_tensor_or_row,
    permutation,
    same_bits,
    stack_arrays,
    take,
    to_numpy,
    to_torch,
)
from halfbyte.decode import dequantize
from halfbyte.errors import WeightError
from halfbyte.kinds import DenseWeight, Fp8Weight, Int8Weight, Mxfp4Weight
from halfbyte.numerics import BLOCK, Array, decode_e4m3, encode_e4m3, is_torch
from halfbyte.shifts import common_exponents, mantissas, shift_scale2, shift_scales

__all__ = [
    "DenseWeight",
    "Fp8Weight",
    "Int8Weight",
    "LossyWarning",
    "Mxfp4Weight",
    "Weight",
    "dtype_name",
    "float_dtype",
    "to_numpy",
    "to_torch",
]

ConcatPolicy = Literal["exact", "equal", "shift", "common"]

_MOST_RANKS = 128
"""Larger degrees are not listed where a split is refused."""


class LossyWarning(UserWarning):
    """An operation that was asked for has rounded; the message states the error."""


class Weight(Immutable):
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
        codes, scales = as_bytes(codes, "codes"), as_bytes(scales, "scales")
        *experts, n, true_k = shape = code_shape(codes, scales, k, BLOCK)
        self._set(
            codes=frozen(codes),
            scales=frozen(scales),
            scale2=frozen(per_tensor_or_row(scale2, tuple(experts), n, codes)),
            input_scale=None if input_scale is None else frozen(normal_input(input_scale, tuple(experts), codes)),
            pre_scale=pre_scale if pre_scale is None else frozen(checked_pre_scale(pre_scale, true_k, codes)),
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
        return f"Weight({', '.join(parts)}, {library(self.codes)})"

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
        return dequantize(self.codes, self.scales, self.scale2, self.k, dtype)

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

    def permute_rows(self, index: Any, inverse: bool = False) -> Weight:
        """The output features in another order, with their codes, scales and per-row scale2.

        Args:
            index: (N,) integers; row i becomes what row index[i] was.
            inverse: undo that: row index[i] becomes what row i was.

        Raises:
            WeightError: not a permutation of the rows.
        """
        order = permutation(index, self.n, "rows", inverse)
        return self.replace(
            codes=take(self.codes, order, -2),
            scales=take(self.scales, order, -2),
            scale2=take(self.scale2, order, -2) if self.per_row else self.scale2,
        )

    def slice_experts(self, start: int, stop: int) -> Weight:
        """Experts start..stop of the first expert axis, with all that each has of its own."""
        self._check_experts()
        self._check_range(start, stop, self.shape[0], "experts")
        return self._map_experts(lambda a: a[start:stop])

    def permute_experts(self, index: Any, inverse: bool = False) -> Weight:
        """The experts of the first axis in another order; the arguments are those of permute_rows, with E integers."""
        self._check_experts()
        order = permutation(index, self.shape[0], "experts", inverse)
        return self._map_experts(lambda a: take(a, order, 0))

    def _check_experts(self) -> None:
        if not self.experts:
            raise WeightError("this weight has no expert axis", got=self.shape)

    def _map_experts(self, choose: Callable[[Array], Array]) -> Weight:
        names = ("codes", "scales", "scale2", "input_scale")
        return self.replace(**{n: choose(a) for n in names if (a := getattr(self, n)) is not None})

    def shard_rows(self, rank: int, degree: int, multiple: int = 1) -> Weight:
        """The rows of one of ``degree`` ranks (column-parallel layers: each rank computes some outputs).

        Args:
            rank: 0..degree-1.
            degree: the number of ranks; all get the same number of rows.
            multiple: what that number must be a multiple of, for example 128 where scales lie in 128x4 tiles.

        Raises:
            WeightError: N does not split so; the error names the degrees that do.
        """
        return self.rows(*_shard(self.n, rank, degree, multiple, "N"))

    def shard_columns(self, rank: int, degree: int, multiple: int = BLOCK) -> Weight:
        """The input features of one of ``degree`` ranks, with their part of pre_scale (row-parallel layers).

        The ranks' products add up to that of the whole. A K that ends inside a block is not split.

        Args:
            rank: 0..degree-1.
            degree: the number of ranks; all get the same number of columns.
            multiple: what that number must be a multiple of: 16, or more where a layout needs it, for example 64.

        Raises:
            WeightError: K does not split so; the error names its blocks and the degrees that divide.
        """
        if multiple % BLOCK:
            raise WeightError(f"columns are cut at multiples of {BLOCK}", got=f"multiple={multiple}")
        return self.columns(*_shard(self.k, rank, degree, multiple, "K"))

    def shard_experts(self, rank: int, degree: int) -> list[Weight]:
        """All E experts as one of ``degree`` ranks sees them: its own E/degree, and null for those of the others.

        Each expert is on one rank alone, so what the ranks compute adds up to what one would.

        Raises:
            WeightError: E does not split so; the error names the degrees that do.
        """
        self._check_experts()
        start, stop = _shard(self.shape[0], rank, degree, 1, "E")
        remote = Weight.null(self.shape[1:])
        own = self.slice_experts(start, stop).unstack()
        return [own[e - start] if start <= e < stop else remote for e in range(self.shape[0])]

    def shift_scale2(self, p: Any) -> Weight:
        """The same values with scale2 times 2^p and every block scale times 2^-p.

        Args:
            p: an integer, or integers of scale2's shape.

        Raises:
            WeightError: a block scale that would round (finer than E4M3's smallest step, or above 448), with the
                index of the first; or a scale2 that leaves the range of float32.
        """
        power = np.asarray(to_numpy(p))
        if power.dtype.kind not in "iu" or power.shape not in ((), tuple(self.scale2.shape)):
            got = f"{power.dtype} {power.shape}"
            raise WeightError("p must be an integer", got=got, expected=f"one, or {tuple(self.scale2.shape)}")
        power = np.broadcast_to(power.astype(np.int64), self.scale2.shape)
        return self.replace(scales=shift_scales(self.scales, power), scale2=shift_scale2(self.scale2, power))

    @staticmethod
    def share_scale2(parts: Sequence[Weight]) -> list[Weight]:
        """The same values under one scale2 for each expert, by powers of two alone.

        Of the scale2 that are exact for every block, it is the nearest to the largest of the parts.

        Raises:
            WeightError: two scale2 whose ratio is not a power of two, or a block scale that would round.
        """
        filled = [i for i, part in enumerate(parts) if part.n]
        found = [mantissas(to_numpy(parts[i].scale2)) for i in filled]
        for i, (m, _) in zip(filled, found, strict=True):
            if not (m == found[0][0][..., :1, :]).all():
                raise WeightError(
                    f"the scale2 of part {i} is not a power of two times that of part {filled[0]}",
                    got=[float(parts[j].scale2.reshape(-1)[0]) for j in filled],
                    hint='use concat with policy="exact" (per-row scale2) or policy="common" (rounds)',
                )
        shared = list(parts)
        if filled:
            exponents = [e for _, e in found]
            target = common_exponents([parts[i].scales for i in filled], exponents)
            for i, e in zip(filled, exponents, strict=True):
                try:
                    shifted = parts[i].shift_scale2(target - e)
                except WeightError as error:
                    error.message = f"part {i}: {error.message}"
                    raise
                shared[i] = shifted.replace(scale2=shifted.scale2[..., :1, :])
        return shared

    @staticmethod
    def concat(parts: Sequence[Weight], policy: ConcatPolicy = "exact") -> Weight:
        """Join weights along N, as fused layers (q/k/v, gate/up) do.

        A fused layer has one input, so parts whose input_scale or pre_scale differ are refused: nothing is averaged,
        and no largest one is taken unasked.

        Args:
            parts: weights of equal K and expert axes, with equal input_scale and pre_scale.
            policy: what happens where scale2 differs. "exact": it becomes per-row; no bit of a part
                changes. "equal": WeightError. "shift": as share_scale2; no value changes. "common": the block
                scales are rounded to the largest scale2, and a LossyWarning states the relative error.

        Raises:
            WeightError: nothing to join, parts that do not fit, or scale2 that "equal" or "shift" cannot join.
        """
        check_parts(parts)
        if policy not in ("exact", "equal", "shift", "common"):
            raise WeightError("unknown policy", got=repr(policy), expected="'exact', 'equal', 'shift' or 'common'")
        first = parts[0]
        for i, part in enumerate(parts[1:], 1):
            for name in ("input_scale", "pre_scale"):
                if not equal_or_none(getattr(part, name), getattr(first, name)):
                    raise WeightError(
                        f"the {name} of part {i} differs from that of part 0",
                        hint=f"decide it first, for example with part.replace({name}=None)",
                    )
        if policy == "shift":
            parts = Weight.share_scale2(parts)
        filled = [p for p in parts if p.n]
        common = filled[0].scale2[..., :1, :] if filled else first.scale2
        equal = all(bool((p.scale2 == common).all()) for p in filled)
        if not equal and policy == "equal":
            raise WeightError(
                "the parts have different scale2",
                got=[float(p.scale2.reshape(-1)[0]) for p in parts],
                hint='use policy="exact" (per-row scale2), "shift" (powers of two only) or "common" (rounds)',
            )
        if not equal and policy == "common":
            parts, common = _to_common_scale2(parts)
            equal = True
        rows = [p.scale2 if p.per_row else broadcast(p.scale2, (*p.experts, p.n, 1)) for p in parts]
        return first.replace(
            codes=concat_arrays([p.codes for p in parts], -2),
            scales=concat_arrays([p.scales for p in parts], -2),
            scale2=common if equal else concat_arrays(rows, -2),
        )

    def split(self, sizes: Sequence[int]) -> list[Weight]:
        """The inverse of concat: parts of the given N, each with its own scale2, per-tensor where its rows agree.

        input_scale and pre_scale are one for all, as concat demands, and each part gets them.
        """
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
            if not equal_or_none(expert.pre_scale, first.pre_scale):
                raise WeightError(f"the pre_scale of expert {i} differs from that of expert 0")
        per_row = any(e.per_row for e in experts)
        scale2 = [broadcast(e.scale2, (*e.experts, e.n, 1)) if per_row else e.scale2 for e in experts]
        return first.replace(
            codes=stack_arrays([e.codes for e in experts]),
            scales=stack_arrays([e.scales for e in experts]),
            scale2=stack_arrays(scale2),
            input_scale=None if first.input_scale is None else stack_arrays([e.input_scale for e in experts]),
        )

    def unstack(self) -> list[Weight]:
        """The weights along the first expert axis."""
        self._check_experts()
        inputs = [None] * self.shape[0] if self.input_scale is None else list(self.input_scale)
        return [
            self.replace(codes=self.codes[e], scales=self.scales[e], scale2=self.scale2[e], input_scale=inputs[e])
            for e in range(self.shape[0])
        ]

    def same(self, other: Weight) -> bool:
        """Whether both hold the same bits: codes, scales, scale2, input_scale, pre_scale and shape."""
        fields = ("codes", "scales", "scale2", "input_scale", "pre_scale")
        return self.shape == other.shape and all(same_bits(getattr(self, f), getattr(other, f)) for f in fields)

    def torch(self, device: Any = None) -> Weight:
        """The same weight as torch tensors, on ``device``; NumPy arrays are copied: torch has none read-only."""
        return self._map(lambda a: to_torch(a, device))

    def numpy(self) -> Weight:
        """The same weight as NumPy arrays."""
        return self._map(to_numpy)

    def _map(self, move: Any) -> Weight:
        arrays = ("codes", "scales", "scale2", "input_scale", "pre_scale")
        return self.replace(**{n: move(a) for n in arrays if (a := getattr(self, n)) is not None})


def _shard(size: int, rank: int, degree: int, multiple: int, axis: str) -> tuple[int, int]:
    """Where a rank's equal share of an axis begins and ends."""
    if degree < 1 or not 0 <= rank < degree:
        raise WeightError("no such rank", got=f"rank {rank} of {degree}", expected="0 <= rank < degree")
    if degree > 1 and size % (degree * multiple):
        units = 1 if size % multiple else size // multiple
        divide = [d for d in range(1, min(units, _MOST_RANKS) + 1) if units % d == 0]
        blocks = f" ({size // BLOCK} x {BLOCK}{f' + {size % BLOCK}' if size % BLOCK else ''})"
        each = f" in multiples of {multiple}" if multiple > 1 else ""
        raise WeightError(
            f"{axis} = {size}{blocks if axis == 'K' else ''} does not split over {degree} ranks{each}",
            expected=f"a degree among {', '.join(map(str, divide))}",
        )
    return size // degree * rank, size // degree * (rank + 1)


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
