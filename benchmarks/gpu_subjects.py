"""What the GPU's benchmark runs: weights, halfbyte's kernels, and the peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

import halfbyte as hb
from benchmarks import gpu_bounds
from benchmarks.gpu_report import Kind
from halfbyte.errors import NoKernelError
from halfbyte.kernels import KERNELS, LinearArgs, select
from halfbyte.kernels.base import Kernel
from halfbyte.kernels.reference import TORCH
from halfbyte.layouts import Packed
from halfbyte.remembered import _FEW_ROWS

LAYOUTS = ("fragments(dtype={dtype})", "columns(align=128)", "rows")
"""Those that kernels of GPUs read; what is packed in the first is what ``plan`` is asked about."""
STRIPES, STRIPE = 160, 8
"""Rows of the weight whose products are checked: so many runs of so many, the first and the last among them."""
CHECKED = 40_000
"""Elements that are checked of halfbyte's kernels, with other activations if need be: of fewer, the error scatters."""
GUARD = 256
"""Elements before and after a result that no kernel may write."""
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


class Weights:
    """Random codes and scales of a shape; what lies in several copies fills ``megabytes`` at least."""

    def __init__(self, n: int, k: int, megabytes: float, device: str, seed: int = 0) -> None:
        self.n, self.k, self.megabytes, self.device = n, k, megabytes, device
        random = torch.Generator(device).manual_seed(seed)

        def bytes_(low: int, high: int, *shape: int) -> Any:
            return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=random)

        scales, wide = bytes_(0x20, 0x58, n, k // 16), bytes_(0, 0x58, n, k // 16)
        scales = torch.where(bytes_(0, 50, n, k // 16) == 0, wide, scales)
        scale2 = torch.full((), 1.7e-3, device=device)
        self.weight = hb.Weight(codes=bytes_(0, 256, n, k // 2), scales=scales, scale2=scale2)
        self.held: dict[str, list[Any]] = {}

    def whole(self) -> Weights:
        """Itself, or the same without its ragged end."""
        n = gpu_bounds.WHOLE.get(self.n)
        if n is None:
            return self
        cut = object.__new__(Weights)
        cut.n, cut.k, cut.megabytes, cut.device, cut.held = n, self.k, self.megabytes, self.device, {}
        cut.weight = self.weight.rows(0, n)
        return cut

    @cached_property
    def stripes(self) -> Any:
        """(rows,) i64: which rows are checked."""
        last = max(0, self.n - STRIPE)
        starts = {round(i * last / (STRIPES - 1)) for i in range(STRIPES)}
        rows = {start + j for start in starts for j in range(STRIPE) if start + j < self.n}
        return torch.tensor(sorted(rows), device=self.device)

    @cached_property
    def exact(self) -> Any:
        """(rows, K) f64: those rows, decoded without halfbyte."""
        codes, scales = self.weight.codes[self.stripes], self.weight.scales[self.stripes]
        values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=self.device)
        decoded = values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
        factors = scales.view(torch.float8_e4m3fn).double() * self.weight.scale2.double()
        return decoded * factors.repeat_interleave(16, dim=-1)

    def copies(self, name: str, make: Callable[[], Any], nbytes: float, clone: Callable[[Any], Any]) -> list[Any]:
        """What ``make`` gives, and clones, two at least."""
        if name not in self.held:
            first = make()
            count = max(2, -(-int(self.megabytes * 1e6) // int(nbytes)))
            self.held[name] = [first, *(clone(first) for _ in range(count - 1))]
        return self.held[name]

    def packed(self, layout: str) -> list[Packed]:
        return self.copies(layout, lambda: hb.pack(self.weight, layout), 9 / 16 * self.n * self.k, _clone)

    def dense(self, dtype: str) -> list[Any]:
        return self.copies(dtype, lambda: self.weight.dequantize(dtype), 2 * self.n * self.k, lambda w: w.clone())


def _clone(packed: Packed) -> Packed:
    buffers = {name: buffer.clone() for name, buffer in packed.buffers().items()}
    return Packed.from_buffers(packed.layout, packed.shape, buffers)


class Result:
    """(M, N) to be written, between guards; all of it is NaN before."""

    def __init__(self, rows: int, n: int, dtype: str, device: str) -> None:
        self.memory = torch.empty(rows * n + 2 * GUARD, dtype=getattr(torch, dtype), device=device)
        self.rows, self.size = rows, 0
        self.view(n)

    def view(self, n: int) -> Any:
        """Its first elements as (M, N)."""
        self.size = self.rows * n
        return self.memory[GUARD : GUARD + self.size].view(self.rows, n)

    def poison(self) -> None:
        self.memory.fill_(float("nan"))

    def whole(self) -> bool:
        """Whether nothing beside the view was written."""
        return bool(self.memory[:GUARD].isnan().all() and self.memory[GUARD + self.size :].isnan().all())


@dataclass(frozen=True)
class Candidate:
    """One way to compute a case.

    Args:
        who: kernel or peer.
        kind: what it is in its case.
        call: computes with copy ``i`` into ``out``.
        copies: of the weight.
        out: (M, N), a view of the case's result.
        weights: what was multiplied.
        most: a larger relative error is no rounding but a wrong result.
        facts: for the results.
    """

    who: str
    kind: Kind
    call: Callable[[int], Any]
    copies: int
    out: Any
    weights: Weights
    most: float
    facts: dict[str, Any] = field(default_factory=dict)


def error(candidate: Candidate, x: Any, result: Result, replay: Callable[[], None]) -> float:
    """The norm of the error of the checked rows over theirs; RuntimeError where that is no rounding.

    The result is poisoned before, and looked at for what nobody wrote, or wrote beside it.

    Args:
        replay: runs the candidate; it reads ``x``, which gets other values.
    """
    weights, wrong, all_ = candidate.weights, 0.0, 0.0
    turns = 1 if candidate.kind == "peer" else -(-CHECKED // (len(x) * len(weights.stripes)))
    for turn in range(turns):
        if turn:
            x.copy_(torch.randn(x.shape, device=x.device))
        result.view(weights.n)
        result.poison()
        replay()
        if bool(candidate.out.isnan().any()):
            raise RuntimeError("wrong: some elements were not written, or are NaN")
        if not result.whole():
            raise RuntimeError("wrong: it wrote outside of its result")
        expected = x.double() @ weights.exact.T
        wrong += float((candidate.out[:, weights.stripes].double() - expected).square().sum())
        all_ += float(expected.square().sum())
    found = math.sqrt(wrong / all_)
    if not found <= candidate.most:
        raise RuntimeError(f"wrong: off by {found:.2g} of the norm, more than {candidate.most:g}")
    return found


def kernels(packed: Packed, x: Any, out: Any) -> Iterator[tuple[Kernel[Any, Any], bool, str]]:
    """Those that accept a product, whether each is what ``plan`` picks, and how it is configured.

    Each runs as if HALFBYTE_KERNEL forced it. The reference is there only where it is picked.
    """
    call = LinearArgs(x=x, weight=packed, bias=None, out=out).call()
    try:
        picked = select(LinearArgs, call)
    except NoKernelError:
        return
    for kernel in KERNELS:
        if kernel is picked or (kernel.bundle is LinearArgs and kernel is not TORCH and not kernel.refuse(call)):
            yield kernel, kernel is picked, "" if kernel.configure is None else repr(kernel.configure(call))


def ours(weights: Weights, x: Any, result: Result) -> list[Candidate]:
    """halfbyte's kernels, first what ``plan`` picks for the first layout that any takes."""
    found: list[Candidate] = []
    out = result.view(weights.n)
    for layout in LAYOUTS:
        if found and layout == "rows":
            break
        key, first = layout.format(dtype=str(x.dtype).removeprefix("torch.")), not found
        packed = weights.packed(key)
        for kernel, picked, configuration in kernels(packed[0], x, out):
            kind: Kind = "default" if picked and first else "other"
            facts = {"layout": key, "configuration": configuration}
            call = _runner(kernel, [LinearArgs(x=x, weight=p, bias=None, out=out) for p in packed])
            found.append(Candidate(kernel.name, kind, call, len(packed), out, weights, 1e-2, facts))
    return sorted(found, key=lambda candidate: candidate.kind != "default")


def _runner(kernel: Kernel[Any, Any], args: list[LinearArgs]) -> Callable[[int], None]:
    """As ``linear`` runs it: what is remembered of a weight that is used again, for few tokens."""
    x, out = args[0].x, args[0].out
    if kernel.bind is None or len(x) > _FEW_ROWS:
        return lambda i: kernel.run(args[i])
    runs = [kernel.bind(one) for one in args]
    return lambda i: runs[i](x, None, out)


def bf16(weights: Weights, x: Any, result: Result) -> Candidate:
    """cuBLAS on the decoded weight, in x's dtype."""
    dtype = str(x.dtype).removeprefix("torch.")
    dense, out = weights.dense(dtype), result.view(weights.n)

    def call(i: int) -> None:
        torch.mm(x, dense[i].t(), out=out)

    return Candidate(f"cublas {dtype}", "peer", call, len(dense), out, weights, 4e-3)


def fp8(weights: Weights, x: Any, result: Result) -> Candidate:
    """cuBLAS on FP8 weights and activations, one scale for each tensor; x is quantized before."""
    f8, out = torch.float8_e4m3fn, result.view(weights.n)

    def quantized(a: Any) -> tuple[Any, Any]:
        scale = a.abs().max().float() / torch.finfo(f8).max
        return (a / scale).to(f8), scale

    held = weights.copies(
        "fp8", lambda: quantized(weights.dense("bfloat16")[0]), weights.n * weights.k, lambda w: (w[0].clone(), w[1])
    )
    x8, scale = quantized(x)

    def call(i: int) -> None:
        w, other = held[i]
        torch._scaled_mm(x8, w.t(), scale, other, out_dtype=out.dtype, use_fast_accum=True, out=out)

    return Candidate("cublas fp8", "peer", call, len(held), out, weights, 6e-2)
