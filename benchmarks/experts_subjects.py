"""What the benchmark of experts runs: stacks, routings, halfbyte's kernels, Humming's and torch's grouped products."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks import gpu_humming
from halfbyte.layouts import Packed, parse
from halfbyte.weight import Weight

FORMS: Final = ("grouped_contiguous", "indexed")
"""Humming's two forms of grouped products: of rows that lie sorted by expert, and of rows that it gathers itself."""


@dataclass(frozen=True)
class Model:
    """A layer of experts.

    Args:
        name: of the model.
        experts: how many there are.
        held: how many of them, from the first on, lie on this GPU.
        top_k: of a token.
        hidden: H.
        inner: I.
    """

    name: str
    experts: int
    held: int
    top_k: int
    hidden: int
    inner: int

    @property
    def expert_bytes(self) -> int:
        """Of codes and block scales of gate, up and down of one expert."""
        return 3 * self.hidden * self.inner * 9 // 16


QWEN3: Final = Model("Qwen3-30B-A3B", 128, 128, 8, 2048, 768)
DEEPSEEK: Final = Model("DeepSeek-V3, 32 of 256 experts", 256, 32, 8, 7168, 2048)
TINY: Final = Model("tiny", 8, 4, 2, 64, 32)


@dataclass(frozen=True)
class Routing:
    """Which experts each token has: (T, k) numbers and weights."""

    indices: Tensor
    weights: Tensor

    def touched(self, model: Model) -> int:
        """Experts held here that have a token."""
        return int(self.indices[self.indices < model.held].unique().numel())

    def rows(self, model: Model) -> int:
        """Tokens that experts held here have, each as often as it has one."""
        return int((self.indices < model.held).sum())


def routings(model: Model, tokens: int, device: str) -> list[Routing]:
    """So many that none finds its experts in a cache; random, top_k of a token without repetition, one held at least.

    Those of one token have other experts each, where there are so many.
    """
    wanted, found, seed = 16 if tokens == 1 else 6 if tokens <= 16 else 3, [], 0
    apart = tokens == 1 and wanted * model.top_k <= model.experts == model.held
    order = torch.randperm(model.experts, generator=torch.Generator().manual_seed(0))
    while len(found) < wanted:
        random = torch.Generator().manual_seed(seed)
        seed += 1
        indices = torch.randn(tokens, model.experts, generator=random).topk(model.top_k).indices
        if apart:
            indices = order[len(found) * model.top_k :][: model.top_k][None]
        if not (indices < model.held).any():
            continue
        weights = torch.rand(tokens, model.top_k, generator=random)
        weights = weights / weights.sum(-1, keepdim=True)
        found.append(Routing(indices.int().to(device), weights.to(device)))
    return found


class Stacks:
    """Random weights of the experts held here."""

    def __init__(self, model: Model, device: str) -> None:
        self.model, self.device = model, device
        random = torch.Generator(device).manual_seed(0)

        def weight(n: int, k: int) -> Weight:
            codes = torch.randint(0, 256, (model.held, n, k // 2), dtype=torch.uint8, device=device, generator=random)
            scales = torch.randint(
                0x20, 0x50, (model.held, n, k // 16), dtype=torch.uint8, device=device, generator=random
            )
            scale2 = (torch.rand(model.held, device=device, generator=random) + 0.5) * 4e-3
            return Weight(codes=codes, scales=scales, scale2=scale2)

        self.gate_up = weight(2 * model.inner, model.hidden)
        self.down = weight(model.hidden, model.inner)

    def packed(self, layout: str) -> tuple[Packed, Packed]:
        how = parse(layout)
        return how.pack(self.gate_up), how.pack(self.down)

    def layer(self, x: Tensor, routing: Routing, token: int) -> Tensor:
        """(H,) f64: what a token becomes, h rounded to x's dtype as halfbyte has it."""
        total = torch.zeros(self.model.hidden, dtype=torch.float64, device=x.device)
        for e, w in zip(routing.indices[token].tolist(), routing.weights[token].double(), strict=True):
            if e >= self.model.held:
                continue
            both = self._matrix(self.gate_up, e) @ x[token].double()
            gate, up = both.chunk(2)
            h = (gate * torch.sigmoid(gate) * up).to(x.dtype).double()
            total += w * (self._matrix(self.down, e) @ h)
        return total

    @staticmethod
    def _matrix(weight: Weight, e: int) -> Tensor:
        one = Weight(codes=weight.codes[e], scales=weight.scales[e], scale2=weight.scale2[e].reshape(()))
        made: Any = one.dequantize("float32")
        return torch.as_tensor(made).double()

    @cached_property
    def dense(self) -> tuple[Tensor, Tensor]:
        """(E, N, K) bf16 each."""
        return tuple(torch.as_tensor(w.dequantize("bfloat16")) for w in (self.gate_up, self.down))  # type: ignore[return-value]


@dataclass
class Candidate:
    """One way to compute a case: ``call(i)`` does so for routing i.

    Args:
        who: kernel or peer.
        what: "products": gate_up and down alone, what they need of the routing given; "layer": all, from the ids on.
        call: computes.
        facts: for the results.
    """

    who: str
    what: str
    call: Callable[[int], Any]
    facts: dict[str, Any] = field(default_factory=dict)


def torch_grouped(stacks: Stacks, x: Tensor, found: Sequence[Routing]) -> Candidate:
    """torch's grouped products of bfloat16 weights, rows gathered before."""
    one, two = (w.transpose(1, 2) for w in stacks.dense)
    given = [_sorted(stacks.model, x, routing) for routing in found]
    inner = [torch.randn(len(rows), stacks.model.inner, device=x.device).to(x.dtype) for rows, _ in given]

    def call(i: int) -> None:
        rows, counts = given[i]
        offsets = counts.cumsum(0).int()
        torch._grouped_mm(rows, one, offs=offsets)
        torch._grouped_mm(inner[i], two, offs=offsets)

    return Candidate("torch bfloat16", "products", call)


def _sorted(model: Model, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """The rows of x sorted by expert, and how many each expert held here has."""
    flat = routing.indices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    order = order[flat[order] < model.held]
    counts = torch.bincount(flat[order], minlength=model.held)
    return x[order // model.top_k].contiguous(), counts


class Humming:
    """Its two grouped products, one kernel each, of its own choice."""

    def __init__(self, stacks: Stacks) -> None:
        self.stacks, model = stacks, stacks.model
        self.layers = [
            _layer(model.held, 2 * model.inner, model.hidden, stacks.gate_up),
            _layer(model.held, model.hidden, model.inner, stacks.down),
        ]

    def candidate(self, form: str, x: Tensor, found: Sequence[Routing]) -> Candidate:
        """One of ``FORMS``."""
        from humming.kernel.humming import HummingKernel  # type: ignore[import-not-found]
        from humming.ops import launch_kernel  # type: ignore[import-not-found]
        from humming.tune import get_heuristics_config  # type: ignore[import-not-found]

        model, compute, runs, said = self.stacks.model, json.dumps({"gemm_type": form}), [], []
        rows = max(1, round(sum(r.rows(model) for r in found) / len(found)))
        for layer, is_down in zip(self.layers, (False, True), strict=True):
            tuning = get_heuristics_config(layer.humming_config, shape_m=rows, gemm_type=form, device=0)
            configs = HummingKernel.prepare_kernels(layer.humming_config.to_str(), compute, tuning, 0)
            said.append(json.dumps(tuning))
            weights = {name: getattr(layer, name).data for name in ("weight", "weight_scale", "weight_scale_2")}
            given = [self._given(form, x, r, is_down, tuning["block_shape"][0], layer.shape_n) for r in found]
            runs.append((configs, layer.locks, weights, given))

        def call(i: int) -> None:
            for configs, locks, weights, given in runs:
                launch_kernel(configs=configs, locks=locks, **given[i], **weights)

        return Candidate(f"humming {form.split('_', maxsplit=1)[0]}", "products", call, {"configuration": said})

    def _given(self, form: str, x: Tensor, routing: Routing, is_down: bool, block: int, n: int) -> dict[str, Any]:
        model = self.stacks.model
        if form == "grouped_contiguous":
            rows, counts = _sorted(model, x, routing)
            if is_down:
                rows = torch.randn(len(rows), model.inner, device=x.device).to(x.dtype)
            layout = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).long()
            return {"inputs": rows, "outputs": x.new_empty(len(rows), n), "expert_layout": layout, "top_k": model.top_k}
        tokens, flat = len(x), routing.indices.reshape(-1)
        ids, experts = [], []
        for e in range(model.held):
            own = torch.where(flat == e)[0]
            blocks = -(-len(own) // block)
            ids.append(torch.nn.functional.pad(own, (0, blocks * block - len(own)), value=flat.numel()))
            experts += [e] * blocks
        sorted_ids = torch.cat(ids).int()
        of: dict[str, Any] = {"dtype": torch.int32, "device": x.device}
        rows = torch.randn(tokens * model.top_k, model.inner, device=x.device).to(x.dtype) if is_down else x
        return {
            "inputs": rows,
            "outputs": x.new_empty(tokens * model.top_k, n),
            "sorted_ids": sorted_ids,
            "expert_ids": torch.tensor(experts, **of),
            "num_tokens_padded": torch.tensor(len(sorted_ids), **of),
            "top_k": 1 if is_down else model.top_k,
        }


def _layer(experts: int, n: int, k: int, weight: Weight) -> Any:
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    gpu_humming.settle()
    schema = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    with torch.device("cuda"):
        layer = HummingLayer(
            shape_n=n, shape_k=k, num_experts=experts, weight_config=schema, torch_dtype=torch.bfloat16
        )
    scales: Any = weight.scales
    layer.load_from_tensors(
        {
            "weight": weight.codes,
            "weight_scale": scales.view(torch.float8_e4m3fn),
            "weight_scale_2": weight.scale2.reshape(layer.weight_scale_2.shape),
        }
    )
    layer.transform()
    return layer
