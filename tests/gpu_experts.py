"""``triton-experts`` and ``triton-grouped`` against float64; as a script, on the CPU, in Triton's interpreter.

TRITON_INTERPRET=1 python -m gpu_experts interpreted grouped
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from expert_cases import Case, assert_meant, routing, tokens
from halfbyte.kernels import ExpertsArgs, GroupedArgs
from halfbyte.kernels.cuda import grouped_triton
from halfbyte.kernels.cuda.experts_triton import CONFIGURATIONS, ONE, ExpertsTriton, listless, products_of
from halfbyte.kernels.cuda.lists import Lists, Numbers, bind_combine, bind_lists, bind_runs
from halfbyte.ops import pack
from halfbyte.weight import Weight

CASES = (
    # tokens, top, dtype, what Case.random is given
    (1, 3, "bfloat16", {}),
    (5, 2, "float16", {"per_row": True, "bias": True}),
    (40, 3, "bfloat16", {"hidden": 80, "inner": 144, "activation": "gelu", "gate_up_order": "up_first"}),
    (7, 2, "bfloat16", {"gated": False, "activation": "relu2", "inner": 16, "bias": True}),
    (3, 2, "float16", {"activation": "swigluoai", "limit": 0.75, "hidden": 16}),
    (9, 4, "bfloat16", {"experts": 5, "padding": True, "activation": "gelu_tanh"}),
)


def run(case: Case, layout: str, made: ExpertsTriton, hidden: Any, indices: Any, weights: Any) -> Any:
    """What the kernel makes of it, in float32, on the CPU."""
    one, two = (pack(w.torch(), layout) for w in (case.gate_up, case.down))
    out = torch.full(hidden.shape, -7.0)
    args = ExpertsArgs(
        hidden=hidden, indices=indices, weights=weights, gate_up=one, down=two, gate_up_bias=case.biases[0],
        down_bias=case.biases[1], mixture=case.mixture, out=out,
    )  # fmt: skip
    products, numbers = products_of(args, made), Numbers.of(case.mixture)
    count, top = indices.shape
    h, y = (
        torch.full((count * top, args.call().inner), torch.nan),
        torch.full((count * top, hidden.shape[1]), torch.nan),
    )
    lists: tuple[Any, ...] = ()
    if not listless(args.call(), made):
        lies = Lists(count, top, made.size, numbers)
        memory = torch.zeros(lies.nbytes // 4, dtype=torch.int32)
        bind_lists(lies, numbers.places("cpu"), "cpu", 0, word=torch.zeros(1, dtype=torch.int64))(indices, memory)
        lists = memory[lies.blocks :], memory[lies.slots :], memory[lies.count :]
    products(hidden, indices, weights, out, lists, h, y)
    dtypes = "int64", "float32", "float32"
    bind_combine(count, top, hidden.shape[1], dtypes, numbers, numbers.places("cpu"), "cpu", 0)(
        y, indices, weights, out
    )
    return out


def interpreted() -> Iterator[str]:
    for count, top, dtype, how in CASES:
        case = Case.random(**how)
        experts, width = case.down.shape[:2]
        hidden = tokens(count, width, dtype=dtype).to(getattr(torch, dtype))
        indices, weights = routing(count, top, experts)
        if case.mixture.padding:
            indices[np.arange(count) % 3 == 0, 1] = -1
            indices[4] = 5
        for made in (ONE, *CONFIGURATIONS):
            if made.size > 8 * count:
                continue
            layout = "fragments" if dtype == "bfloat16" else "fragments(dtype=float16)"
            y = run(case, layout, made, hidden, indices, weights)
            assert_meant(y, case, hidden.float(), indices, weights, dtype, out_dtype="float32")
            yield f"{count} {top} {how} {made.size}"


GROUPED = (
    # counts, N, K, dtype, bias, rows of x beyond their sum
    ((3, 0, 1, 9), 40, 80, "bfloat16", True, 0),
    ((40, 1, 0, 0, 70), 64, 128, "float16", False, 2),
    ((1,), 16, 16, "bfloat16", False, 0),
)


def grouped() -> Iterator[str]:
    """``triton-grouped``; rows beyond the sum of the counts are not written."""
    for counts, n, k, dtype, bias, beyond in GROUPED:
        rng = np.random.default_rng(k)
        experts, rows = len(counts), sum(counts) + beyond
        weight = Weight(
            codes=rng.integers(0, 256, (experts, n, k // 2), np.uint8),
            scales=rng.integers(50, 62, (experts, n, k // 16), np.uint8),
            scale2=rng.uniform(0.5, 1, (experts, n, 1)).astype(np.float32) / k,
        )
        packed = pack(weight.torch(), "fragments" if dtype == "bfloat16" else "fragments(dtype=float16)")
        x = tokens(rows, k, dtype=dtype).to(getattr(torch, dtype))
        added = torch.from_numpy(rng.standard_normal((experts, n), np.float32)) if bias else None
        expert = np.repeat(np.arange(experts), counts)
        wide = weight.dequantize().astype(np.float64)[expert]
        given = x[: len(expert)].double().numpy()
        want = np.einsum("tnk,tk->tn", wide, given) + (0 if added is None else added.double().numpy()[expert])
        size = np.einsum("tnk,tk->tn", np.abs(wide), np.abs(given)) + np.abs(want)
        for made in (ONE, *CONFIGURATIONS):
            out = torch.full((rows, n), -7.0)
            args = GroupedArgs(x=x, counts=torch.tensor(counts), weight=packed, bias=added, out=out)
            lies = grouped_triton.lists_of(args.call(), made)
            memory = torch.zeros(lies.nbytes // 4, dtype=torch.int32)
            bind_runs(lies, "cpu", 0)(args.counts, memory)
            lists = memory[lies.blocks :], memory[lies.slots :], memory[lies.count :]
            grouped_triton.product_of(args, made)(x, lists, out)
            off = np.abs(out[: len(expert)].double().numpy() - want)
            assert (off <= (k + 24) * 2.0**-23 * size).all(), (counts, made)
            assert (out[len(expert) :] == -7).all()
            yield f"{counts} {made.size}"


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(wanted, sum(1 for _ in globals()[wanted]()))
