"""What tests of experts share: stacks, routings, float64 values with their bounds, and where kernels run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.expert_ops import Mixture, Stacks, compute
from halfbyte.kernels import KERNELS, ExpertsCall, Kernel
from halfbyte.kernels.experts import SWIGLU_ALPHA
from halfbyte.ops import pack
from halfbyte.weight import Weight
from helpers_run import HALF_ULP, HERE

KINDS = [kernel for kernel in KERNELS if kernel.op == "experts"]
LAYOUTS = ("rows", "fragments", "fragments(dtype=float16)")


@dataclass(frozen=True)
class Case:
    """One call: weights (E, parts * I, H) and (E, H, I), and how they compute."""

    gate_up: Weight
    down: Weight
    mixture: Mixture
    biases: tuple[Any, Any] = (None, None)

    @staticmethod
    def random(
        experts: int = 6,
        hidden: int = 64,
        inner: int = 48,
        *,
        seed: int = 0,
        per_row: bool = False,
        bias: bool = False,
        **how: Any,
    ) -> Case:
        """Of random codes under block scales near 1, every expert with a scale2 of its own; results are near 1."""
        rng = np.random.default_rng([seed, experts, hidden, inner])
        gated = how.get("gated", True)

        def stack(n: int, k: int) -> Weight:
            scale2 = rng.uniform(0.5, 1, (experts, n if per_row else 1, 1)) / np.sqrt(40.0 * k)
            return Weight(
                codes=rng.integers(0, 256, (experts, n, k // 2), np.uint8),
                scales=rng.integers(50, 62, (experts, n, k // 16), np.uint8),
                scale2=scale2.astype(np.float32),
            )

        rows = (2 if gated else 1) * inner
        made = [torch.from_numpy(rng.standard_normal((experts, n), np.float32)) for n in (rows, hidden)]
        of: dict[str, Any] = {
            "activation": "silu", "limit": None, "gate_up_order": "concatenated", "experts": experts,
            "local": tuple(range(experts)), "padding": False,
        }  # fmt: skip
        mixture = Mixture(**of | how)
        return Case(stack(rows, hidden), stack(hidden, inner), mixture, (made[0], made[1]) if bias else (None, None))

    def call(self, place: dict[str, Any], dtype: str, layout: str, rows: int, top: int, **how: Any) -> ExpertsCall:
        one, two = (pack(w.torch(), layout) for w in (self.gate_up, self.down))
        of = {"bias": self.biases[0] is not None, "down_bias": self.biases[1] is not None}
        return ExpertsCall.of(one, two, self.mixture, rows=rows, top=top, dtype=dtype, **place, **of, **how)

    def part(self, local: tuple[int, ...], null: str) -> Case:
        """What a rank holds of it."""
        at = list(local)
        mixture = replace(self.mixture, local=local, null=null)
        stacks = (Weight.stack([w.unstack()[e] for e in at]) for w in (self.gate_up, self.down))
        biases = tuple(None if b is None else b[at] for b in self.biases)
        return Case(*stacks, mixture, (biases[0], biases[1]))


@dataclass(frozen=True)
class Place:
    """A kernel with a device, a dtype of activations and a layout that it takes."""

    kernel: Kernel[Any, Any]
    device: dict[str, Any]
    dtype: str
    layout: str

    def __str__(self) -> str:
        return f"{self.kernel.name}-{self.device['device']}-{self.dtype}-{self.layout}"

    def run(self, case: Case, hidden: Any, indices: Any, weights: Any, **how: Any) -> torch.Tensor:
        """What the kernel makes of it, on the CPU; the test is skipped where the kernel declines in words."""
        named = how | {"indices": indices.dtype, "weights": weights.dtype}
        given = {k: str(v).removeprefix("torch.") for k, v in named.items()}
        reasons = self.kernel.refuse(case.call(self.device, self.dtype, self.layout, *indices.shape, **given))
        if reasons:
            pytest.skip(f"{self.kernel.name} {', and '.join(reasons)}")
        to = self.device["device"]
        one, two = (pack(w.torch(to), self.layout) for w in (case.gate_up, case.down))
        biases = [None if b is None else b.to(to) for b in case.biases]
        stacks = Stacks(gate_up=one, down=two, gate_up_bias=biases[0], down_bias=biases[1])
        arrays = (hidden.to(getattr(torch, self.dtype)), indices, weights)
        with torch.no_grad():
            first, second = (compute(*(a.to(to) for a in arrays), stacks, case.mixture, **how) for _ in range(2))
        bits = [y.float().cpu().numpy().tobytes() for y in (first, second)]
        assert bits[0] == bits[1], "a call like the first gave other bits"
        return first.cpu()


def places(precision: str = "exact") -> Iterator[Any]:
    """Every kernel with all devices of this machine, dtypes and layouts that it takes a small call of."""
    case = Case.random()
    for kernel in KINDS:
        for device in (place for place in HERE if place["library"] == "torch"):
            for dtype in ("float32", "bfloat16", "float16"):
                for layout in LAYOUTS:
                    tried = (case.call(device, dtype, layout, rows, 2, precision=precision) for rows in (1, 64))
                    if not all(kernel.refuse(call) for call in tried):
                        place = Place(kernel, device, dtype, layout)
                        marks = pytest.mark.gpu if device["device"] != "cpu" else ()
                        yield pytest.param(place, id=str(place), marks=marks)


def routing(tokens: int, top: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, k) int64 different experts for each token, and (T, k) float32 weights that add up to 1."""
    rng = np.random.default_rng([seed, tokens, top, experts])
    indices = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top]
    weights = rng.uniform(0.1, 1, (tokens, top)).astype(np.float32)
    return torch.from_numpy(indices.copy()), torch.from_numpy(weights / weights.sum(1, keepdims=True, dtype=np.float32))


def tokens(count: int, hidden: int = 64, seed: int = 0, dtype: str = "float32") -> torch.Tensor:
    """(T, H) float32 of values that ``dtype`` holds."""
    made = np.random.default_rng([seed, count, hidden]).standard_normal((count, hidden), np.float32)
    return torch.from_numpy(made).to(getattr(torch, dtype)).float()


def activated(name: str, gate: Any, up: Any) -> tuple[Any, Any, Any]:
    """The values in float64, and the slopes by gate and by up at most, near there."""
    if name == "silu":
        s = 1 / (1 + np.exp(-gate))
        return gate * s * up, 1.1 * np.abs(up), np.abs(gate * s)
    if name == "swigluoai":
        s = 1 / (1 + np.exp(-SWIGLU_ALPHA * gate))
        return (up + 1) * gate * s, 1.1 * np.abs(up + 1), np.abs(gate * s)
    if name == "relu2":
        g = np.maximum(gate, 0)
        return g**2 * up, 2 * g * np.abs(up) + 1e-4 * np.abs(up), g**2
    if name == "gelu":
        value = 0.5 * gate * (1 + torch.erf(torch.from_numpy(gate / np.sqrt(2))).numpy())
    else:
        value = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return value * up, 1.13 * np.abs(up), np.abs(value)


def meaning(
    case: Case, hidden: Any, indices: Any, weights: Any, dtype: str, out_dtype: str | None = None
) -> tuple[Any, Any]:
    """(T, H) float64 values, and how far from them a kernel's may be.

    Sums of n products in float32 are off by (n + 24) 2^-24 of their magnitudes at most, h is rounded once to ``dtype``
    behind an activation that is off by 2^-18 of itself, and the result once.
    """
    u, mixture = 2.0**-24, case.mixture
    x = hidden.numpy().astype(np.float64)
    out, error = np.zeros(x.shape), np.zeros(x.shape)
    magnitude = np.zeros(x.shape)
    place = {e: i for i, e in enumerate(mixture.local)}
    matrices: dict[int, Any] = {}
    for t, (ids, factors) in enumerate(zip(indices.tolist(), weights.double().numpy(), strict=True)):
        for e, factor in zip(ids, factors, strict=True):
            if e not in place:
                assert mixture.null == "skip" if 0 <= e < mixture.experts else mixture.padding
                continue
            i = place[e]
            if i not in matrices:
                matrices[i] = [w.unstack()[i].dequantize().astype(np.float64) for w in (case.gate_up, case.down)]
            gate_up, down = matrices[i]
            biases = [0.0 if b is None else b[i].double().numpy() for b in case.biases]
            both = gate_up @ x[t] + biases[0]
            off = (x.shape[1] + 24) * u * (np.abs(gate_up) @ np.abs(x[t]) + np.abs(biases[0]))
            h, off = _hidden(mixture, both, off)
            off = off + (2.0**-18 + HALF_ULP[dtype]) * np.abs(h) + 2.0**-25 * (dtype == "float16")
            y = down @ h + biases[1]
            size = np.abs(down) @ np.abs(h) + np.abs(biases[1])
            off = np.abs(down) @ off * (1 + 1e-3) + (len(h) + 24) * u * size
            out[t] += factor * y
            error[t] += abs(factor) * off
            magnitude[t] += abs(factor) * np.abs(y)
    error += (indices.shape[1] + 2) * u * magnitude + (HALF_ULP[out_dtype or dtype] + u) * np.abs(out)
    return out, error * (1 + 1e-3) + 1e-30 + 2.0**-25 * ((out_dtype or dtype) == "float16")


def _hidden(mixture: Mixture, both: Any, off: Any) -> tuple[Any, Any]:
    if not mixture.gated:
        one = np.ones_like(both)
        h, slope, _ = activated(mixture.activation, both, one)
        return h, slope * off + off * off
    if mixture.gate_up_order == "interleaved":
        gate, up, dg, du = both[::2], both[1::2], off[::2], off[1::2]
    else:
        (gate, up), (dg, du) = np.split(both, 2), np.split(off, 2)
        if mixture.gate_up_order == "up_first":
            gate, up, dg, du = up, gate, du, dg
    if mixture.limit is not None:
        gate, up = np.minimum(gate, mixture.limit), np.clip(up, -mixture.limit, mixture.limit)
    h, by_gate, by_up = activated(mixture.activation, gate, up)
    return h, by_gate * dg + by_up * du + 3 * dg * du + np.abs(up) * dg * dg + 1e-12


def assert_meant(y: torch.Tensor, case: Case, hidden: Any, indices: Any, weights: Any, dtype: str, **how: Any) -> None:
    """Each element within the bound of what is meant, and a bound that tells something."""
    to = str(how.get("out_dtype", dtype)).removeprefix("torch.")
    expected, bound = meaning(case, hidden, indices, weights, dtype, to)
    assert str(y.dtype).removeprefix("torch.") == to
    assert y.shape == expected.shape
    got = y.double().numpy()
    wrong = ~(np.abs(got - expected) <= bound)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}, first {np.argwhere(wrong)[0]}"
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(got - expected) <= (8 * HALF_ULP[dtype] + 1e-4) * norm
