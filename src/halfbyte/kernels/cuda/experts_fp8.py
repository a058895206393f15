"""``experts`` in FP8 on Hopper, layout ``fragments``: products of ``experts_gemm``, of E4M3 as ``fp8_gluon`` has it.

::

    q, s = x quantized for each row, as in halfbyte.kernels.fp8
    y = sum(q * e4m3(code * scale / 6)) * (6 * scale2) * s + bias

x are the tokens, and then h: both are rounded for each of their rows. The matrix units add as in ``fp8_gluon``; how far
a whole layer is off has not been measured but in its tests: less than 8e-2 of the norm beside the exact result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import ALIGNED, Kernel
from halfbyte.kernels.cuda import experts
from halfbyte.kernels.cuda.experts import Layer, behind, slots_each
from halfbyte.kernels.cuda.experts_gemm import ExpertsGemm, Grouped, bind_order, bind_product, both, compiled
from halfbyte.kernels.cuda.fp8_quantize import nbytes, quantizer, scales_at
from halfbyte.kernels.cuda.lists import most_blocks
from halfbyte.kernels.experts import ExpertsArgs, ExpertsCall, experts_cost

NAME: Final = "gluon-experts-fp8"
MOST_K: Final = 16384
"""The matrix units keep the sums of no more."""


CONFIGURATIONS: Final = (
    ExpertsGemm(Grouped(2, 64, 32, 2, 1, 4, 40, fp8=True), Grouped(2, 64, 32, 2, 1, 0, 32, fp8=True)),
    ExpertsGemm(Grouped(2, 128, 32, 2, 1, 4, 40, fp8=True), Grouped(2, 128, 32, 2, 1, 0, 32, fp8=True)),
)
"""Those that are tested."""
MOST: Final = 80.0
"""Slots of an expert, on average, that the first of them is for, at the most."""


def configure(call: ExpertsCall) -> ExpertsGemm:
    """The configuration for a call."""
    return CONFIGURATIONS[slots_each(call) > MOST]


def refuse(call: ExpertsCall) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = list(experts.refuse(call))
    if call.precision != "fp8":
        reasons.append("rounds weights and activations to FP8, which only precision='fp8' asks for")
    for name, width in (("hidden", call.shape[-1]), ("intermediate", call.inner)):
        if width > MOST_K:
            reasons.append(f"takes {name} sizes up to {MOST_K}, not {width}")
    return tuple(reasons)


def bind(args: ExpertsArgs, made: ExpertsGemm | None = None) -> Callable[[Any, Any, Any, Any], None]:
    """A call's launches; ``made`` instead of the configuration chosen."""
    call = args.call()
    made = configure(call) if made is None else made
    biases = [args.gate_up_bias, args.down_bias]
    one, two = both(call, *(None if b is None else dtype_name(b.dtype) for b in biases))
    device, tokens, width, inner = args.hidden.device, call.rows, call.shape[-1], call.inner
    slots, size = tokens * call.top, made.first.slots
    most = most_blocks(slots, call.shape[0], size)
    rows, beside = size * most, -(-4 * most // ALIGNED) * ALIGNED
    order = bind_order(made.first, most, device)
    first = bind_product(made.first, one, args.gate_up, biases[0], slots, device)
    second = bind_product(made.second, two, args.down, biases[1], slots, device)
    of_x = quantizer(device, call.dtype, width, ordered=True, early=True)
    of_h = quantizer(device, call.dtype, inner, ordered=True, early=True)
    memory = max(nbytes(tokens, width, ordered=True), nbytes(rows, inner, ordered=True))
    scales, of_scales = scales_at(tokens, width, ordered=True), scales_at(rows, inner, ordered=True)

    def products(hidden: Any, indices: Any, weights: Any, out: Any, lists: tuple[int, ...], h: int, y: int) -> None:
        at = y + behind(slots, width)
        lists = order(lists, at)
        at += beside  # x is no longer needed when h takes its place
        of_x(tokens, hidden.data_ptr(), None, at, at + scales)
        first(at, h, lists, call.top, at + scales)
        of_h(rows, h, None, at, at + of_scales)
        second(at, y, lists, 1, at + of_scales)

    return Layer(args, size, products, rows=rows, more=beside + memory)


def compile_as(call: ExpertsCall, made: ExpertsGemm) -> None:
    """Compile it in a configuration, and what quantizes."""
    import torch

    device = torch.device(call.device)
    bind_order(made.first, most_blocks(call.rows * call.top, call.shape[0], made.first.slots), device)
    biases = ("float32" if has else None for has in (call.bias, call.down_bias))
    for way, product in zip((made.first, made.second), both(call, *biases), strict=True):
        compiled(way, product, device)
    for k in (call.shape[-1], call.inner):
        quantizer(device, call.dtype, k, ordered=True, early=True, capability=call.capability)


GLUON: Final = Kernel(
    name=NAME,
    bundle=ExpertsArgs,
    description="quantizes activations for each row, and weights in wgmma's registers; Hopper, many tokens an expert",
    refuse=refuse,
    cost=experts_cost,
    bind=bind,
    configure=configure,
    compile=compile_as,
)
