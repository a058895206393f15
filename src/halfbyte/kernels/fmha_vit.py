"""The bundles of image encoders: packed sequences in which every query sees every key of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from halfbyte.arrays import dtype_name
from halfbyte.kernels.attention_base import AttentionArgs, AttentionCall, Grouped, Sequence, sequence_lengths
from halfbyte.kernels.descriptors import TensorDesc
from halfbyte.numerics import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class _Packed(AttentionArgs):
    """Sequences of an image encoder one after the other; each query sees all keys of its own sequence.

    Args:
        k: (total, Hkv, D).
        v: (total, Hkv, D).
        cu_seqlens: (B + 1,) int32, cumulative lengths; the last is the total.
        batch_size: B.
        total_seq_len: rows of q, k and v.
        max_seq_len: the longest sequence, at least.
    """

    k: Array
    v: Array
    cu_seqlens: Array
    batch_size: int
    total_seq_len: int
    max_seq_len: int

    def _arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        dtype = dtype_name(self.q.dtype)
        queries = (self.total_seq_len, self._q_heads(), self.head_dim)
        keys = (self.total_seq_len, self._kv_heads(), self.head_dim)
        return {
            "q": (queries, dtype),
            "k": (keys, dtype),
            "v": (keys, dtype),
            "out": (queries, dtype_name(self.out.dtype)),
            "cu_seqlens": ((self.batch_size + 1,), "int32"),
        }

    def call(self) -> AttentionCall:
        """What decides which kernel runs on these arrays."""
        return self._call(
            queries=self.total_seq_len,
            keys=self.total_seq_len,
            longest=self.max_seq_len,
            causal=False,
            window=False,
            paged=False,
            bidirectional=False,
            skip_softmax=False,
        )

    def descriptors(self) -> dict[str, TensorDesc]:
        """Those of q, k, v, out and cu_seqlens."""
        arrays = {name: getattr(self, name) for name in ("q", "k", "v", "out")}
        tensors = {name: TensorDesc.packed(array, tuple(array.shape)) for name, array in arrays.items()}
        return tensors | {"cu_seqlens": TensorDesc.cu_seqlens(self.cu_seqlens, self.batch_size)}

    def sequences(self) -> Iterator[Sequence]:
        """One for each of the batch."""
        lengths = sequence_lengths("cu_seqlens", self.cu_seqlens, each=self.max_seq_len, total=self.total_seq_len)
        for start, length in lengths:
            q, k, v, out = (a[start : start + length] for a in (self.q, self.k, self.v, self.out))
            yield Sequence(q=q, k=k, v=v, out=out, visible=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class VitFmha(_Packed):
    """An image encoder whose queries and keys have the same heads.

    Args:
        num_heads: H.
    """

    op: ClassVar[str] = "vit_fmha"
    num_heads: int

    def _q_heads(self) -> int:
        return self.num_heads

    def _kv_heads(self) -> int:
        return self.num_heads


@dataclass(frozen=True, kw_only=True, eq=False)
class FmhaV2Vit(Grouped, _Packed):
    """An image encoder with fewer heads of keys than of queries."""

    op: ClassVar[str] = "fmha_v2_vit"
