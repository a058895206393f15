"""What the GPU's benchmark runs: weights, halfbyte's kernels, and the peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import gpu_bounds
from benchmarks.gpu_report import Kind
from halfbyte import trials
from halfbyte.errors import NoKernelError
from halfbyte.fp8_ops import kernel_for
from halfbyte.kernels import KERNELS, Fp8Args, LinearArgs, select
from halfbyte.kernels.base import Kernel
from halfbyte.kernels.reference import TORCH
from halfbyte.layouts import Packed
from halfbyte.remembered import _FEW_ROWS
from halfbyte.trials import GUARD, Result, WrongResultError

__all__ = ["GUARD", "Candidate", "Result", "Weights"]

LAYOUTS = ("fragments(dtype={dtype})", "columns(align=128)", "rows")
"""Those that kernels of GPUs read; what is packed in the first is what ``plan`` is asked about."""
CHECKED = 40_000
"""Elements that are checked of halfbyte's kernels, with other activations if need be: of fewer, the error scatters."""


class Weights(trials.Weights):
    """Those of ``halfbyte.trials``, and the same without a ragged end."""

    def whole(self) -> Weights:
        """Itself, or the same without its ragged end."""
        n = gpu_bounds.WHOLE.get(self.n)
        if n is None:
            return self
        cut = object.__new__(Weights)
        cut.n, cut.k, cut.megabytes, cut.device, cut.held = n, self.k, self.megabytes, self.device, {}
        cut.weight = self.weight.rows(0, n)
        return cut


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
        op: what is computed, for what is expected.
    """

    who: str
    kind: Kind
    call: Callable[[int], Any]
    copies: int
    out: Any
    weights: Weights
    most: float
    facts: dict[str, Any] = field(default_factory=dict)
    op: str = LinearArgs.op


def error(candidate: Candidate, x: Any, result: Result, replay: Callable[[], None]) -> float:
    """The norm of the error of the checked rows over theirs; WrongResultError where that is no rounding.

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
        here, all_here = result.errors(weights.stripes, weights.product(x, candidate.op))
        wrong, all_ = wrong + here, all_ + all_here
    found = math.sqrt(wrong / all_)
    if not found <= candidate.most:
        raise WrongResultError(f"wrong: off by {found:.2g} of the norm, more than {candidate.most:g}")
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


def ours_in_fp8(weights: Weights, x: Any, result: Result) -> list[Candidate]:
    """halfbyte's kernel that multiplies NVFP4 in FP8, if ``precision="fp8"`` picks one, and that of the twin."""
    out, found = result.view(weights.n), []
    key = LAYOUTS[0].format(dtype=str(x.dtype).removeprefix("torch."))
    first = Fp8Args(x=x, weight=weights.packed(key)[0], bias=None, out=out).call()
    kernel = kernel_for(first)
    held: list[tuple[Kind, Any, list[Any]]] = []
    if kernel is not None:
        held.append(("fp8", kernel, weights.packed(key)))
        twin = weights.fp8()
        held.append(("twin", select(Fp8Args, Fp8Args(x=x, weight=twin[0], bias=None, out=out).call()), twin))
    for kind, one, copies in held:
        made = "" if one.configure is None or kind == "twin" else repr(one.configure(first))
        facts = {"layout": key if kind == "fp8" else "twin", "configuration": made}
        call = _runner(one, [Fp8Args(x=x, weight=w, bias=None, out=out) for w in copies])
        found.append(Candidate(one.name, kind, call, len(copies), out, weights, 2e-2, facts, Fp8Args.op))
    return found


def _runner(kernel: Kernel[Any, Any], args: list[Any]) -> Callable[[int], None]:
    """As ``linear`` runs it: what is remembered of a weight that is used again."""
    x, out = args[0].x, args[0].out
    if kernel.bind is None or not (len(x) <= _FEW_ROWS or x.is_cuda):
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
