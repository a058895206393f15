"""The bundles of language models: queries at the end of their keys, in a cache, in pages, or in arrays of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import dtype_name, to_numpy, to_torch
from halfbyte.errors import UsageError
from halfbyte.kernels.attention_base import AttentionCall, Grouped, Sequence, sequence_lengths
from halfbyte.kernels.descriptors import TensorDesc
from halfbyte.numerics import Array, is_torch

TOKENS_PER_PAGE: Final = 128
"""One tile of keys or values is one page, and the tiles of these kernels have 128 rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batched(Grouped):
    """Queries of a language model, (B, S, Hq, D).

    Args:
        cu_kv_seqlens: (B + 1,) int32, cumulative lengths of the keys.
        batch_size: B.
        seq_len_q: S.
        window_size_left: how many keys before its own position a query sees; None if all.
    """

    cu_kv_seqlens: Array
    batch_size: int
    seq_len_q: int
    window_size_left: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_size_left is not None and self.window_size_left < 0:
            raise UsageError("window_size_left is negative", got=self.window_size_left, hint="None is no window")

    def _arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        dtype, shape = dtype_name(self.q.dtype), (self.batch_size, self.seq_len_q, self.num_q_heads, self.head_dim)
        lengths = ((self.batch_size + 1,), "int32")
        return {"q": (shape, dtype), "out": (shape, dtype_name(self.out.dtype)), "cu_kv_seqlens": lengths}

    def _describe(self, name: str) -> TensorDesc:
        array = getattr(self, name)
        return TensorDesc.packed(array, tuple(array.shape))

    def _visible(self, q_len: int, kv_len: int) -> npt.NDArray[np.bool_]:
        return visible_keys(q_len, kv_len, self.window_size_left)


@dataclass(frozen=True, kw_only=True, eq=False)
class LlmFmha(_Batched):
    """Causal attention on one dense cache of keys and values.

    Args:
        kv: (B, 2, Hkv, Cap, D): keys, then values; what lies beyond a sequence's length is not read.
        kv_cache_capacity: Cap, the tokens that the cache has room for.
        skip_softmax_threshold_log2: keys whose weight is below 2 to this power may be left out; 0 is off. Not together
            with a window.
    """

    op: ClassVar[str] = "llm_fmha"
    kv: Array
    kv_cache_capacity: int
    skip_softmax_threshold_log2: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_threshold(self.skip_softmax_threshold_log2, self.window_size_left)

    def _arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        shape = (self.batch_size, 2, self.num_kv_heads, self.kv_cache_capacity, self.head_dim)
        return super()._arrays() | {"kv": (shape, dtype_name(self.q.dtype))}

    def call(self) -> AttentionCall:
        """What decides which kernel runs on these arrays."""
        return self._call(
            queries=self.batch_size * self.seq_len_q,
            keys=self.batch_size * self.kv_cache_capacity,
            longest=self.kv_cache_capacity,
            causal=True,
            window=self.window_size_left is not None,
            paged=False,
            bidirectional=False,
            skip_softmax=self.skip_softmax_threshold_log2 != 0,
        )

    def descriptors(self) -> dict[str, TensorDesc]:
        """Those of q, kv, out and cu_kv_seqlens."""
        tensors = {name: self._describe(name) for name in ("q", "kv", "out")}
        return tensors | {"cu_kv_seqlens": TensorDesc.cu_seqlens(self.cu_kv_seqlens, self.batch_size)}

    def sequences(self) -> Iterator[Sequence]:
        """One for each of the batch."""
        lengths = sequence_lengths("cu_kv_seqlens", self.cu_kv_seqlens, each=self.kv_cache_capacity)
        for b, (_, length) in enumerate(lengths):
            k, v = (self.kv[b, part, :, :length].swapaxes(0, 1) for part in (0, 1))
            mask = self._visible(self.seq_len_q, length)
            yield Sequence(q=self.q[b], k=k, v=v, out=self.out[b], visible=mask)


@dataclass(frozen=True, kw_only=True, eq=False)
class LlmFmhaPaged(_Batched):
    """Attention on keys and values in pages of one pool.

    Args:
        kv_pool: (P, T, Hkv, D), the pages.
        page_list: (B, 2, max pages) int32: the pages of a sequence's keys, then those of its values, in order. Entries
            beyond its length are not read.
        cu_q_seqlens: (B + 1,) int32, cumulative lengths of the queries; rows of q beyond a length are padding and give
            0.
        num_pages: P.
        tokens_per_page: T, which is 128.
        max_pages_per_seq: columns of the page list.
        causal: False if every query sees all keys; then there is no window and no interval.
        bidirectional_begin: (B, S) int32, the first key of the interval that a query sees beside its causal keys; None
            if there are none, and then there is no end either.
        bidirectional_end: (B, S) int32, the key behind the interval; at or below the begin for an empty one.
        skip_softmax_threshold_log2: keys whose weight is below 2 to this power may be left out; 0 is off. Not together
            with a window.
    """

    op: ClassVar[str] = "llm_fmha_paged"
    kv_pool: Array
    page_list: Array
    cu_q_seqlens: Array
    num_pages: int
    tokens_per_page: int
    max_pages_per_seq: int
    causal: bool
    bidirectional_begin: Array | None
    bidirectional_end: Array | None
    skip_softmax_threshold_log2: float

    def __post_init__(self) -> None:
        if self.tokens_per_page != TOKENS_PER_PAGE:
            raise UsageError("pages have another number of tokens", got=self.tokens_per_page, expected=TOKENS_PER_PAGE)
        if (self.bidirectional_begin is None) != (self.bidirectional_end is None):
            raise UsageError("bidirectional_begin and bidirectional_end come together", expected="both or neither")
        super().__post_init__()
        _check_threshold(self.skip_softmax_threshold_log2, self.window_size_left)
        if not self.causal and (self.window_size_left is not None or self.bidirectional_begin is not None):
            raise UsageError("a window or bidirectional intervals need causal attention", got="causal=False")

    def _arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        pool = (self.num_pages, self.tokens_per_page, self.num_kv_heads, self.head_dim)
        arrays = super()._arrays() | {
            "kv_pool": (pool, dtype_name(self.q.dtype)),
            "page_list": ((self.batch_size, 2, self.max_pages_per_seq), "int32"),
            "cu_q_seqlens": ((self.batch_size + 1,), "int32"),
        }
        if self.bidirectional_begin is not None:
            rows = ((self.batch_size, self.seq_len_q), "int32")
            arrays |= {"bidirectional_begin": rows, "bidirectional_end": rows}
        return arrays

    def call(self) -> AttentionCall:
        """What decides which kernel runs on these arrays."""
        return self._call(
            queries=self.batch_size * self.seq_len_q,
            keys=self.batch_size * self._capacity,
            longest=self._capacity,
            causal=self.causal,
            window=self.window_size_left is not None,
            paged=True,
            bidirectional=self.bidirectional_begin is not None,
            skip_softmax=self.skip_softmax_threshold_log2 != 0,
        )

    def descriptors(self) -> dict[str, TensorDesc]:
        """Those of q, the pool as (P, Hkv, T, D) by its strides, page list, out, the lengths, and any intervals."""
        pages, tokens, heads, dim = self.num_pages, self.tokens_per_page, self.num_kv_heads, self.head_dim
        pool = TensorDesc.strided(self.kv_pool, (pages, heads, tokens, dim), (heads * tokens * dim, dim, heads * dim))
        tensors = {
            "q": self._describe("q"),
            "kv_pool": pool,
            "page_list": self._describe("page_list"),
            "out": self._describe("out"),
            "cu_q_seqlens": TensorDesc.cu_seqlens(self.cu_q_seqlens, self.batch_size),
            "cu_kv_seqlens": TensorDesc.cu_seqlens(self.cu_kv_seqlens, self.batch_size),
        }
        if self.bidirectional_begin is not None:
            tensors |= {name: self._describe(name) for name in ("bidirectional_begin", "bidirectional_end")}
        return tensors

    def sequences(self) -> Iterator[Sequence]:
        """One for each of the batch, then its padding rows as a sequence without keys."""
        q_lengths = sequence_lengths("cu_q_seqlens", self.cu_q_seqlens, each=self.seq_len_q)
        kv_lengths = sequence_lengths("cu_kv_seqlens", self.cu_kv_seqlens, each=self._capacity)
        pages = to_numpy(self.page_list)
        for b, ((_, q_len), (_, kv_len)) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
            k, v = (self._gathered(pages, b, part, kv_len) for part in (0, 1))
            mask = self._visible(q_len, kv_len) if self.causal else None
            if mask is not None and self.bidirectional_begin is not None:
                begin, end = (to_numpy(a)[b, :q_len, None] for a in (self.bidirectional_begin, self.bidirectional_end))
                key = np.arange(kv_len)
                mask |= (begin <= key) & (key < end)
            yield Sequence(q=self.q[b, :q_len], k=k, v=v, out=self.out[b, :q_len], visible=mask)
            yield Sequence(q=self.q[b, q_len:], k=k[:0], v=v[:0], out=self.out[b, q_len:], visible=None)

    @property
    def _capacity(self) -> int:
        return self.max_pages_per_seq * self.tokens_per_page

    def _gathered(self, pages: npt.NDArray[np.int32], b: int, part: int, length: int) -> Array:
        """(length, Hkv, D): the tokens of one sequence's pages."""
        used = pages[b, part, : -(-length // self.tokens_per_page)].astype(np.int64)
        wrong = (used < 0) | (used >= self.num_pages)
        if wrong.any():
            at = int(wrong.argmax())
            raise UsageError(
                "no such page",
                tensor="page_list",
                index=[b, part, at],
                got=used[at],
                expected=f"0..{self.num_pages - 1}",
            )
        index = to_torch(used, self.kv_pool.device) if is_torch(self.kv_pool) else used
        return self.kv_pool[index].reshape(len(used) * self.tokens_per_page, self.num_kv_heads, self.head_dim)[:length]


@dataclass(frozen=True, kw_only=True, eq=False)
class FmhaV2Llm(_Batched):
    """Causal attention on keys and values in arrays of their own.

    Args:
        k: (B, Skv, Hkv, D); what lies beyond a sequence's length is not read.
        v: the same of the values.
        kv_seq_len: Skv.
    """

    op: ClassVar[str] = "fmha_v2_llm"
    k: Array
    v: Array
    kv_seq_len: int

    def _arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        shape = (self.batch_size, self.kv_seq_len, self.num_kv_heads, self.head_dim)
        return super()._arrays() | dict.fromkeys(("k", "v"), (shape, dtype_name(self.q.dtype)))

    def call(self) -> AttentionCall:
        """What decides which kernel runs on these arrays."""
        return self._call(
            queries=self.batch_size * self.seq_len_q,
            keys=self.batch_size * self.kv_seq_len,
            longest=self.kv_seq_len,
            causal=True,
            window=self.window_size_left is not None,
            paged=False,
            bidirectional=False,
            skip_softmax=False,
        )

    def descriptors(self) -> dict[str, TensorDesc]:
        """Those of q, k, v, out and cu_kv_seqlens."""
        tensors = {name: self._describe(name) for name in ("q", "k", "v", "out")}
        return tensors | {"cu_kv_seqlens": TensorDesc.cu_seqlens(self.cu_kv_seqlens, self.batch_size)}

    def sequences(self) -> Iterator[Sequence]:
        """One for each of the batch."""
        for b, (_, length) in enumerate(sequence_lengths("cu_kv_seqlens", self.cu_kv_seqlens, each=self.kv_seq_len)):
            k, v, mask = self.k[b, :length], self.v[b, :length], self._visible(self.seq_len_q, length)
            yield Sequence(q=self.q[b], k=k, v=v, out=self.out[b], visible=mask)


def visible_keys(q_len: int, kv_len: int, window_size_left: int | None) -> npt.NDArray[np.bool_]:
    """(Sq, Skv): the keys that each query sees when the last query stands at the last key."""
    position = np.arange(kv_len - q_len, kv_len)[:, None]
    key = np.arange(kv_len)
    first = -inf if window_size_left is None else position - window_size_left
    mask: npt.NDArray[np.bool_] = (key <= position) & (key >= first)
    return mask


def _check_threshold(threshold: float, window: int | None) -> None:
    if not (isfinite(threshold) and threshold <= 0):
        raise UsageError("skip_softmax_threshold_log2 is not a number below 0, or 0 for off", got=threshold)
    if threshold and window is not None:
        raise UsageError("a sliding window skips no softmax", got=f"threshold {threshold}, window {window}")
