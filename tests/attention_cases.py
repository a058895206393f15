"""Bundles of attention arguments with random arrays, and their results by loops over queries, heads and keys.

What no kernel may read (a cache beyond a sequence, pages of nobody) is NaN, and page numbers there do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from math import exp
from typing import Any

import ml_dtypes
import numpy as np

from halfbyte.arrays import float_dtype, to_numpy, to_torch
from halfbyte.kernels import AttentionArgs, FmhaV2Llm, FmhaV2Vit, LlmFmha, LlmFmhaPaged, VitFmha
from halfbyte.numerics import is_torch

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
PLAIN = {"attention_scale": 0.4, "q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "inv_o_scale": 1.0}
PAGE = 128


def np_dtype(name):
    return FLOAT8 if name == "float8_e4m3fn" else float_dtype(name)


def floats(shape, dtype, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(np_dtype(dtype))


def cumulative(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def outputs(q, out_dtype):
    return np.full(q.shape, np.nan, np_dtype(out_dtype))


def out_of(dtype):
    return "float16" if dtype == "float8_e4m3fn" else dtype


def llm(lengths=(5, 0, 9), *, s=4, hq=4, hkv=2, d=8, capacity=12, dtype="float32", **changes):
    q = floats((len(lengths), s, hq, d), dtype)
    kv = floats((len(lengths), 2, hkv, capacity, d), dtype, 1)
    for b, length in enumerate(lengths):
        kv[b, :, :, length:] = np.nan
    made = {
        "q": q,
        "kv": kv,
        "out": outputs(q, out_of(dtype)),
        "cu_kv_seqlens": cumulative(lengths),
        "batch_size": len(lengths),
        "seq_len_q": s,
        "num_q_heads": hq,
        "num_kv_heads": hkv,
        "head_dim": d,
        "kv_cache_capacity": capacity,
        "window_size_left": None,
        "skip_softmax_threshold_log2": 0.0,
    }
    return LlmFmha(**(made | PLAIN | changes))


def paged(lengths=(130, 0, 257), q_lengths=(3, 0, 2), *, s=4, hq=4, hkv=2, d=8, dtype="float32", **changes):
    """Keys and values of every sequence on pages in random order."""
    most = max(-(-length // PAGE) for length in lengths) + 1
    used = [-(-length // PAGE) for length in lengths for _ in "kv"]
    pages = sum(used) + 1
    order = iter(np.random.default_rng(3).permutation(pages))
    page_list = np.full((len(lengths), 2, most), 99, np.int32)
    pool = floats((pages, PAGE, hkv, d), dtype, 1)
    read = np.zeros((pages, PAGE), bool)
    for b, length in enumerate(lengths):
        for part in (0, 1):
            for i in range(-(-length // PAGE)):
                page_list[b, part, i] = next(order)
                read[page_list[b, part, i], : length - i * PAGE] = True
    pool[~read] = np.nan
    q = floats((len(lengths), s, hq, d), dtype)
    made = {
        "q": q,
        "kv_pool": pool,
        "page_list": page_list,
        "out": outputs(q, out_of(dtype)),
        "cu_q_seqlens": cumulative(q_lengths),
        "cu_kv_seqlens": cumulative(lengths),
        "batch_size": len(lengths),
        "seq_len_q": s,
        "num_q_heads": hq,
        "num_kv_heads": hkv,
        "head_dim": d,
        "num_pages": pages,
        "tokens_per_page": PAGE,
        "max_pages_per_seq": most,
        "causal": True,
        "window_size_left": None,
        "bidirectional_begin": None,
        "bidirectional_end": None,
        "skip_softmax_threshold_log2": 0.0,
    }
    return LlmFmhaPaged(**(made | PLAIN | changes))


def v2_llm(lengths=(5, 0, 9), *, s=4, hq=4, hkv=2, d=8, longest=11, dtype="float32", **changes):
    q = floats((len(lengths), s, hq, d), dtype)
    k, v = (floats((len(lengths), longest, hkv, d), dtype, seed) for seed in (1, 2))
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = np.nan
    made = {
        "q": q,
        "k": k,
        "v": v,
        "out": outputs(q, out_of(dtype)),
        "cu_kv_seqlens": cumulative(lengths),
        "batch_size": len(lengths),
        "seq_len_q": s,
        "kv_seq_len": longest,
        "num_q_heads": hq,
        "num_kv_heads": hkv,
        "head_dim": d,
        "window_size_left": None,
    }
    return FmhaV2Llm(**(made | PLAIN | changes))


def _packed(lengths, hq, hkv, d, dtype):
    total = sum(lengths)
    q = floats((total, hq, d), dtype)
    return {
        "q": q,
        "k": floats((total, hkv, d), dtype, 1),
        "v": floats((total, hkv, d), dtype, 2),
        "out": outputs(q, out_of(dtype)),
        "cu_seqlens": cumulative(lengths),
        "batch_size": len(lengths),
        "total_seq_len": total,
        "max_seq_len": max(lengths),
        "head_dim": d,
    }


def vit(lengths=(3, 0, 6, 1), *, h=3, d=8, dtype="float32", **changes):
    return VitFmha(**(_packed(lengths, h, h, d, dtype) | {"num_heads": h} | PLAIN | changes))


def v2_vit(lengths=(3, 0, 6, 1), *, hq=6, hkv=2, d=8, dtype="float32", **changes):
    heads = {"num_q_heads": hq, "num_kv_heads": hkv}
    return FmhaV2Vit(**(_packed(lengths, hq, hkv, d, dtype) | heads | PLAIN | changes))


MAKERS: dict[str, Callable[..., Any]] = {
    "llm_fmha": llm,
    "llm_fmha_paged": paged,
    "vit_fmha": vit,
    "fmha_v2_llm": v2_llm,
    "fmha_v2_vit": v2_vit,
}


def with_intervals():
    """Paged: queries of the first sequence see the keys 4 to 9 and 100 to 129, beside those of a window of 2."""
    begin, end = np.full((2, 3, 4), -1, np.int32)
    begin[0, :3], end[0, :3] = [4, 4, 100], [10, 10, 130]
    return paged(window_size_left=2, bidirectional_begin=begin, bidirectional_end=end)


CASES: dict[str, Callable[[], AttentionArgs]] = {
    "llm": llm,
    "llm one head": lambda: llm(hq=1, hkv=1),
    "llm mha": lambda: llm(hq=4, hkv=4),
    "llm mqa": lambda: llm(hq=6, hkv=1),
    "llm full": lambda: llm((12, 12), s=12),
    "llm decode": lambda: llm((1, 7, 12), s=1),
    "llm fewer keys than queries": lambda: llm((2, 3), s=6),
    "llm window 0": lambda: llm(window_size_left=0),
    "llm window 1": lambda: llm(window_size_left=1),
    "llm window of all but one": lambda: llm(window_size_left=7),
    "llm window of all": lambda: llm(window_size_left=100),
    "llm scales": lambda: llm(q_scale=0.5, k_scale=3.0, v_scale=0.25, inv_o_scale=1.5),
    "llm no batch": lambda: llm(()),
    "paged": paged,
    "paged whole pages": lambda: paged((128, 256), (4, 1)),
    "paged no mask": lambda: paged(causal=False),
    "paged window": lambda: paged(window_size_left=127),
    "paged intervals": with_intervals,
    "paged mqa": lambda: paged(hq=3, hkv=1),
    "vit": vit,
    "vit scales": lambda: vit(q_scale=0.5, k_scale=3.0, v_scale=0.25, inv_o_scale=1.5),
    "vit empty": lambda: vit((0, 0)),
    "v2 llm": v2_llm,
    "v2 llm window": lambda: v2_llm(window_size_left=3),
    "v2 llm full": lambda: v2_llm((11,), s=11, hq=5, hkv=5),
    "v2 vit": v2_vit,
    "v2 vit mqa": lambda: v2_vit(hq=4, hkv=1),
}


@dataclass
class Oracle:
    out: Any
    magnitude: Any
    """sum(p |v|) for each element of the result."""
    score: Any
    """The largest score_scale * sum|q k| of each query, and the number of keys."""
    keys: Any


def by_loops(args: AttentionArgs) -> Oracle:
    """What the definition says, key by key."""
    a = to_library(args, "numpy")
    q = a.q.astype(np.float64)
    out, magnitude = np.zeros(q.shape), np.zeros(q.shape)
    score, keys = np.zeros((*q.shape[:-1], 1)), np.zeros((*q.shape[:-1], 1))
    heads, kv_heads = q.shape[-2], getattr(a, "num_kv_heads", q.shape[-2])
    scale = a.attention_scale * a.q_scale * a.k_scale
    for at, kv_row, seen in queries(a):
        for h in range(heads):
            rows = [kv_row(j, h * kv_heads // heads) for j in seen]
            row = q[at][h]
            scores = [scale * float(row @ k.astype(np.float64)) for k, _ in rows]
            if not scores:
                continue
            weights = [exp(s - max(scores)) for s in scores]
            for w, (_, v) in zip(weights, rows, strict=True):
                out[at][h] += w / sum(weights) * a.v_scale * a.inv_o_scale * v.astype(np.float64)
                magnitude[at][h] += w / sum(weights) * a.v_scale * a.inv_o_scale * np.abs(v.astype(np.float64))
            score[at][h] = max(scale * float(np.abs(row) @ np.abs(k.astype(np.float64))) for k, _ in rows)
            keys[at][h] = len(rows)
    return Oracle(out, magnitude, score, keys)


def queries(a) -> Iterator[tuple[Any, Callable[[int, int], Any], list[int]]]:
    """Each query's index in q, how to read key and value j of a head, and which j it sees."""
    if isinstance(a, VitFmha | FmhaV2Vit):
        for start, end in zip(a.cu_seqlens, a.cu_seqlens[1:], strict=False):
            for i in range(start, end):
                yield i, lambda j, h: (a.k[j, h], a.v[j, h]), list(range(start, end))
        return
    for b in range(a.batch_size):
        kv_len = a.cu_kv_seqlens[b + 1] - a.cu_kv_seqlens[b]
        q_len = a.seq_len_q
        if isinstance(a, LlmFmhaPaged):
            q_len = a.cu_q_seqlens[b + 1] - a.cu_q_seqlens[b]
        for i in range(q_len):
            seen = []
            for j in range(kv_len):
                p = kv_len - q_len + i
                sees = j <= p and (a.window_size_left is None or p - j <= a.window_size_left)
                if isinstance(a, LlmFmhaPaged):
                    sees = sees or not a.causal
                    if a.bidirectional_begin is not None:
                        sees = sees or a.bidirectional_begin[b, i] <= j < a.bidirectional_end[b, i]
                if sees:
                    seen.append(j)
            yield (b, i), lambda j, h, b=b: row(a, b, j, h), seen


def row(a, b, j, h):
    if isinstance(a, LlmFmha):
        return a.kv[b, 0, h, j], a.kv[b, 1, h, j]
    if isinstance(a, FmhaV2Llm):
        return a.k[b, j, h], a.v[b, j, h]
    return tuple(a.kv_pool[a.page_list[b, part, j // PAGE], j % PAGE, h] for part in (0, 1))


def to_library(args, library, device="cpu"):
    """The same bundle in a library."""
    moved = {}
    for field in fields(args):
        value = getattr(args, field.name)
        if library == "torch" and isinstance(value, np.ndarray):
            moved[field.name] = torch_array(value, device)
        elif library == "numpy" and is_torch(value):
            moved[field.name] = numpy_array(value)
    return replace(args, **moved) if moved else args


def numpy_array(a):
    return to_numpy(a) if a.dtype.itemsize > 1 else to_numpy(a.float()).astype(FLOAT8)


def torch_array(a, device):
    import torch

    if a.dtype == FLOAT8:
        return to_torch(a.view(np.uint8), device).view(torch.float8_e4m3fn)
    return to_torch(a, device)
