"""The arguments of attention kernels: one frozen bundle for each shape of kernel.

::

    bundle        queries         keys and values                                   lengths
    LlmFmha       (B, S, Hq, D)   one cache (B, 2, Hkv, Cap, D)                     keys
    LlmFmhaPaged  (B, S, Hq, D)   pool (P, T, Hkv, D), page list (B, 2, max pages)  queries and keys
    VitFmha       (total, H, D)   (total, H, D) each                                of the packed sequences
    FmhaV2Llm     (B, S, Hq, D)   (B, Skv, Hkv, D) each                             keys
    FmhaV2Vit     (total, Hq, D)  (total, Hkv, D) each                              of the packed sequences

One bundle for all would let a field that decides on one path (the capacity of a cache, the tokens of a page) lie at
zero on another. Here every field is used and none has a default. Sizes are stated beside the arrays and held against
them, so that swapped axes are an error. Lengths are cumulative, (B + 1,) int32 from 0 on: sequence b has the entries
``lengths[b]`` to ``lengths[b + 1]``.

In the LLM bundles the last query of a sequence stands at its last key, and a query at position p sees the keys up to
p; with a window, those from ``p - window_size_left`` on. Query head h reads key head ``h // (Hq / Hkv)``. ::

    out = round(inv_o_scale * v_scale * softmax(attention_scale * q_scale * k_scale * q @ k.T) @ v)

A query that sees no key gives 0.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, log2
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import dtype_name, to_numpy
from halfbyte.errors import UsageError
from halfbyte.kernels.base import Cost, Library, device_of, library_of
from halfbyte.kernels.descriptors import TensorDesc
from halfbyte.numerics import Array, is_torch

FLOATS: Final = ("float32", "bfloat16", "float16")
INPUTS: Final = (*FLOATS, "float8_e4m3fn")
_ITEMSIZE: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """All that decides which attention kernel runs; no arrays.

    Args:
        op: that of the bundle, such as "llm_fmha".
        dtype: of queries, keys and values.
        out_dtype: of the result.
        head_dim: D.
        num_q_heads: Hq.
        num_kv_heads: Hkv.
        queries: rows of queries, padding included.
        keys: rows of keys that there is room for.
        longest: of them, the most that one sequence can have.
        causal: a query sees no key behind its position.
        window: there is a sliding window.
        paged: keys and values lie in pages.
        bidirectional: some queries see an interval of keys beside the causal ones.
        skip_softmax: keys below a threshold are left out.
        device: "cpu", "cuda", ...
        library: that of all arrays.
    """

    op: str
    dtype: str
    out_dtype: str
    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    queries: int
    keys: int
    longest: int
    causal: bool
    window: bool
    paged: bool
    bidirectional: bool
    skip_softmax: bool
    device: str
    library: Library

    def __str__(self) -> str:
        flags = [f for f in ("causal", "window", "paged", "bidirectional", "skip_softmax") if getattr(self, f)]
        return (
            f"{self.op} with D={self.head_dim}, Hq={self.num_q_heads}, Hkv={self.num_kv_heads}, "
            f"{self.dtype} to {self.out_dtype}, {' '.join(flags) or 'no mask'}, {self.library} on {self.device}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequence:
    """One sequence of a bundle, as views of its arrays where they can be.

    Args:
        q: (Sq, Hq, D).
        k: (Skv, Hkv, D).
        v: (Skv, Hkv, D).
        out: (Sq, Hq, D); written.
        visible: (Sq, Skv), which keys each query sees; None if it is all.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    visible: npt.NDArray[np.bool_] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionArgs(ABC):
    """What all bundles of attention have.

    Args:
        q: queries, float32, bfloat16, float16 or float8_e4m3fn; keys and values have the same dtype.
        out: float32, bfloat16 or float16, in the shape of q; written.
        head_dim: D.
        attention_scale: multiplies q @ k.T, usually 1 / sqrt(D).
        q_scale: multiplies the queries, as k_scale the keys and v_scale the values; 1 where they are not quantized.
        k_scale: of the keys.
        v_scale: of the values.
        inv_o_scale: multiplies the result; 1 where it is not quantized.

    Raises:
        UsageError: arrays that do not fit the sizes, each other or int32; numbers that cannot be meant.
    """

    op: ClassVar[str]
    q: Array
    out: Array
    head_dim: int
    attention_scale: float
    q_scale: float
    k_scale: float
    v_scale: float
    inv_o_scale: float

    def __post_init__(self) -> None:
        for name in ("attention_scale", "q_scale", "k_scale", "v_scale", "inv_o_scale"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise UsageError(f"{name} is not a positive number", got=value)
        _check_is_array("q", self.q)
        _check_is_array("out", self.out)
        if dtype_name(self.q.dtype) not in INPUTS:
            raise UsageError("q is of the wrong dtype", got=dtype_name(self.q.dtype), expected=" or ".join(INPUTS))
        if dtype_name(self.out.dtype) not in FLOATS:
            raise UsageError("out is of the wrong dtype", got=dtype_name(self.out.dtype), expected=" or ".join(FLOATS))
        if min(self._q_heads(), self._kv_heads(), self.head_dim) < 1:
            got = f"{self._q_heads()} query heads, {self._kv_heads()} key heads, head_dim {self.head_dim}"
            raise UsageError("there are no heads", got=got)
        for name, (shape, dtype) in self._arrays().items():
            _check_array(name, getattr(self, name), shape, dtype, self.q)
        if self._q_heads() % self._kv_heads():
            got = f"{self._q_heads()} query heads, {self._kv_heads()} key heads"
            raise UsageError("the query heads are no multiple of the key heads", got=got)

    @property
    def score_scale(self) -> float:
        """What q @ k.T is multiplied by in all."""
        return self.attention_scale * self.q_scale * self.k_scale

    @property
    def score_scale_log2(self) -> float:
        """The same for kernels that compute 2^x instead of e^x."""
        return self.score_scale * log2(np.e)

    @property
    def out_scale(self) -> float:
        """What softmax @ v is multiplied by."""
        return self.v_scale * self.inv_o_scale

    @abstractmethod
    def call(self) -> AttentionCall:
        """What decides which kernel runs on these arrays."""

    @abstractmethod
    def descriptors(self) -> dict[str, TensorDesc]:
        """What a compiled kernel is given for the arrays, in the order of its signature."""

    @abstractmethod
    def sequences(self) -> Iterator[Sequence]:
        """The sequences one by one; UsageError where the lengths or pages do not fit the arrays."""

    @abstractmethod
    def _arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape and dtype that each array must have."""

    @abstractmethod
    def _q_heads(self) -> int: ...

    @abstractmethod
    def _kv_heads(self) -> int: ...

    def _call(
        self,
        *,
        queries: int,
        keys: int,
        longest: int,
        causal: bool,
        window: bool,
        paged: bool,
        bidirectional: bool,
        skip_softmax: bool,
    ) -> AttentionCall:
        return AttentionCall(
            op=self.op,
            dtype=dtype_name(self.q.dtype),
            out_dtype=dtype_name(self.out.dtype),
            head_dim=self.head_dim,
            num_q_heads=self._q_heads(),
            num_kv_heads=self._kv_heads(),
            queries=queries,
            keys=keys,
            longest=longest,
            causal=causal,
            window=window,
            paged=paged,
            bidirectional=bidirectional,
            skip_softmax=skip_softmax,
            device=device_of(self.q),
            library=library_of(self.q),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped(AttentionArgs):
    """Queries and keys with their own numbers of heads.

    Args:
        num_q_heads: Hq, a multiple of Hkv.
        num_kv_heads: Hkv.
    """

    num_q_heads: int
    num_kv_heads: int

    def _q_heads(self) -> int:
        return self.num_q_heads

    def _kv_heads(self) -> int:
        return self.num_kv_heads


def attention_cost(call: AttentionCall) -> Cost:
    """At the most: every array once, and two products with each key that a sequence has room for."""
    rows = call.queries * call.num_q_heads * call.head_dim
    cache = 2 * call.keys * call.num_kv_heads * call.head_dim
    moved = (rows + cache) * _ITEMSIZE[call.dtype] + rows * _ITEMSIZE[call.out_dtype]
    return Cost(bytes=moved, flops=4 * rows * call.longest)


def sequence_lengths(name: str, cumulative: Array, *, each: int, total: int | None = None) -> list[tuple[int, int]]:
    """(start, length) of every sequence; UsageError where one is negative or longer than ``each``."""
    ends = [int(end) for end in to_numpy(cumulative)]
    if ends[0] != 0:
        raise UsageError("cumulative lengths start at 0", tensor=name, index=[0], got=ends[0])
    if total is not None and ends[-1] != total:
        raise UsageError("cumulative lengths end at the total", tensor=name, got=ends[-1], expected=total)
    pairs = [(start, end - start) for start, end in itertools.pairwise(ends)]
    for b, (_, length) in enumerate(pairs):
        if not 0 <= length <= each:
            raise UsageError(f"sequence {b} has no such length", tensor=name, got=length, expected=f"0..{each}")
    return pairs


def _check_is_array(name: str, array: Any) -> None:
    if not (is_torch(array) or isinstance(array, np.ndarray)):
        raise UsageError(f"{name} is not an array", got=type(array).__name__, expected="NumPy or torch")


def _check_array(name: str, array: Any, shape: tuple[int, ...], dtype: str, q: Array) -> None:
    _check_is_array(name, array)
    if min(shape) < 0:
        raise UsageError(f"a size of {name} is negative", got=shape)
    if is_torch(array) != is_torch(q) or (is_torch(q) and array.device != q.device):
        where = [f"{library_of(a)} on {device_of(a)}" for a in (array, q)]
        raise UsageError(f"{name} and q lie in two places", got=f"{name} in {where[0]}, q in {where[1]}")
    if tuple(array.shape) != shape:
        raise UsageError(f"{name} does not fit the sizes", got=tuple(array.shape), expected=shape)
    if dtype_name(array.dtype) != dtype:
        raise UsageError(f"{name} is of the wrong dtype", got=dtype_name(array.dtype), expected=dtype)
    if not (array.is_contiguous() if is_torch(array) else array.flags.c_contiguous):
        raise UsageError(f"{name} is not row-major without gaps", hint="copy it once")
