"""Attention on every bundle of arguments: NumPy in float64, and torch's scaled_dot_product_attention on any device.

The NumPy kernels are the reference: all in float64, rounded once to the result's dtype. The torch kernels compute in
the dtype of q (float8_e4m3fn in float32), sum in float32, and round the weights, the result and the result in its
dtype. With u = 2^-24, h = 2^-11 for float16, 2^-8 for bfloat16 and u for float32, h_out the same of the result, s the
largest rounding error of a score, (D + 8) u score_scale sum|q k|, and an exponential that is good to 20 ulp::

    |error| <= (2 s + (Skv + 128) u + 2 h + h_out) * out_scale * sum(p |v|)

Both go through the sequences one by one; neither skips any softmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfbyte.kernels.attention_base import AttentionArgs, AttentionCall, Sequence, attention_cost
from halfbyte.kernels.base import Kernel, load_torch, nothing_to_load, why_not_float32, why_not_numpy, why_not_torch
from halfbyte.kernels.fmha_llm import FmhaV2Llm, LlmFmha, LlmFmhaPaged
from halfbyte.kernels.fmha_vit import FmhaV2Vit, VitFmha
from halfbyte.numerics import Array


def _launch_numpy(args: AttentionArgs) -> None:
    for sequence in args.sequences():
        with np.errstate(over="ignore", invalid="ignore"):
            sequence.out[...] = _attend(sequence, args.score_scale) * args.out_scale


def _attend(sequence: Sequence, score_scale: float) -> Any:
    """(Sq, Hq, D) f64: softmax(score_scale * q @ k.T) @ v over the visible keys; 0 where there are none."""
    rows, heads, dim = sequence.q.shape
    keys, kv_heads, _ = sequence.k.shape
    visible = np.ones((rows, keys), bool) if sequence.visible is None else sequence.visible
    seeing = visible.any(1)
    out = np.zeros((rows, heads, dim))
    group = heads // kv_heads
    for head in range(heads):
        q = sequence.q[:, head].astype(np.float64)
        k, v = (a[:, head // group].astype(np.float64) for a in (sequence.k, sequence.v))
        scores = np.where(visible, score_scale * (q @ k.T), -np.inf)
        weights = np.exp(scores[seeing] - scores[seeing].max(1, keepdims=True, initial=-np.inf))
        out[seeing, head] = weights @ v / weights.sum(1, keepdims=True)
    return out


def _launch_torch(args: AttentionArgs) -> None:
    import torch

    for sequence in args.sequences():
        if not sequence.q.shape[0]:
            continue
        if not sequence.k.shape[0]:
            sequence.out.zero_()
            continue
        q, k, v = (_heads_first(a) for a in (sequence.q, sequence.k, sequence.v))
        mask = seeing = None
        causal = False
        if sequence.visible is not None:
            mask, causal = _mask(sequence.visible, q.device)
            seeing = sequence.visible.any(1)
        with torch.no_grad():
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=args.score_scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            y = y[0].transpose(0, 1)
            if args.out_scale != 1:
                y = y.float() * args.out_scale
            if seeing is not None and not seeing.all():
                y = y.masked_fill(torch.from_numpy(~seeing).to(y.device)[:, None, None], 0)
            sequence.out.copy_(y)


def _heads_first(a: Array) -> Array:
    """(S, H, D) as (1, H, S, D), float8 as float32."""
    a = a.transpose(0, 1)[None]
    return a.float() if a.dtype.itemsize == 1 else a


def _mask(visible: Any, device: Any) -> tuple[Array | None, bool]:
    """The attn_mask and is_causal that give ``visible``."""
    import torch

    rows, keys = visible.shape
    if rows == keys and np.array_equal(visible, np.tri(rows, dtype=bool)):
        return None, True
    return torch.from_numpy(visible).to(device), False


def _refuse(call: AttentionCall) -> tuple[str, ...]:
    if call.skip_softmax:
        return ("skips no softmax: skip_softmax_threshold_log2 must be 0",)
    return ()


def _refuse_numpy(call: AttentionCall) -> tuple[str, ...]:
    return why_not_numpy(call.library) + _refuse(call)


def _refuse_torch(call: AttentionCall) -> tuple[str, ...]:
    no_torch = why_not_torch(call.library)
    needs_float32 = not no_torch and call.dtype in ("float32", "float8_e4m3fn")
    return no_torch + (why_not_float32(call.device) if needs_float32 else ()) + _refuse(call)


LLM_TORCH = Kernel(
    name="llm-fmha-torch",
    bundle=LlmFmha,
    description="torch's scaled_dot_product_attention; any device",
    refuse=_refuse_torch,
    load=load_torch,
    launch=_launch_torch,
    cost=attention_cost,
)
LLM_NUMPY = Kernel(
    name="llm-fmha-numpy",
    bundle=LlmFmha,
    description="float64, head by head",
    refuse=_refuse_numpy,
    load=nothing_to_load,
    launch=_launch_numpy,
    cost=attention_cost,
)
LLM_PAGED_TORCH = Kernel(
    name="llm-fmha-paged-torch",
    bundle=LlmFmhaPaged,
    description="torch's scaled_dot_product_attention; any device",
    refuse=_refuse_torch,
    load=load_torch,
    launch=_launch_torch,
    cost=attention_cost,
)
LLM_PAGED_NUMPY = Kernel(
    name="llm-fmha-paged-numpy",
    bundle=LlmFmhaPaged,
    description="float64, head by head",
    refuse=_refuse_numpy,
    load=nothing_to_load,
    launch=_launch_numpy,
    cost=attention_cost,
)
VIT_TORCH = Kernel(
    name="vit-fmha-torch",
    bundle=VitFmha,
    description="torch's scaled_dot_product_attention; any device",
    refuse=_refuse_torch,
    load=load_torch,
    launch=_launch_torch,
    cost=attention_cost,
)
VIT_NUMPY = Kernel(
    name="vit-fmha-numpy",
    bundle=VitFmha,
    description="float64, head by head",
    refuse=_refuse_numpy,
    load=nothing_to_load,
    launch=_launch_numpy,
    cost=attention_cost,
)
V2_LLM_TORCH = Kernel(
    name="fmha-v2-llm-torch",
    bundle=FmhaV2Llm,
    description="torch's scaled_dot_product_attention; any device",
    refuse=_refuse_torch,
    load=load_torch,
    launch=_launch_torch,
    cost=attention_cost,
)
V2_LLM_NUMPY = Kernel(
    name="fmha-v2-llm-numpy",
    bundle=FmhaV2Llm,
    description="float64, head by head",
    refuse=_refuse_numpy,
    load=nothing_to_load,
    launch=_launch_numpy,
    cost=attention_cost,
)
V2_VIT_TORCH = Kernel(
    name="fmha-v2-vit-torch",
    bundle=FmhaV2Vit,
    description="torch's scaled_dot_product_attention; any device",
    refuse=_refuse_torch,
    load=load_torch,
    launch=_launch_torch,
    cost=attention_cost,
)
V2_VIT_NUMPY = Kernel(
    name="fmha-v2-vit-numpy",
    bundle=FmhaV2Vit,
    description="float64, head by head",
    refuse=_refuse_numpy,
    load=nothing_to_load,
    launch=_launch_numpy,
    cost=attention_cost,
)
