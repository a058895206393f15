"""``experts`` on a CPU, layout ``rows``, exact, compiled by Numba: two parallel regions for all experts with tokens.

Of each region the rows of all these experts are shared out among threads, so that a few experts, or one with most of
the tokens, keep all of them busy. Weights are decoded in registers, as for ``linear``: in bf16 pairs where this CPU
multiplies them fast, else in float32. Products are exact, and sums are in float32, each in an order that the shape
fixes: a token's result is the same bits whatever other tokens there are, and on any number of threads.

The bound of ``halfbyte.kernels.cpu.exact`` holds for both products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from halfbyte import jit
from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import Kernel, why_not_torch
from halfbyte.kernels.cpu.exact import KINDS, ROUND, Scratch, address_of, scratch
from halfbyte.kernels.experts import ORDERS, SWIGLU, ExpertsArgs, ExpertsCall, experts_cost
from halfbyte.kernels.step import ACTIVATIONS
from halfbyte.layouts import Rows
from halfbyte.numerics import Array, is_torch

PASS: Final = 64 << 20
"""Bytes of scratch at the most, by which tokens are computed some at a time."""
KEPT: Final = 8 << 20
"""Of scratch, between calls."""


def form_of(dtype: str, pre_scale: bool) -> str:
    """How weights are decoded and multiplied for activations of a dtype."""
    if dtype != "float32" and not pre_scale and jit.has("avx512bf16") and jit.cpu_name().startswith("znver"):
        return "bf16" if dtype == "bfloat16" else "halves"
    return "fma" if jit.has("avx512bw") else "portable"


def _bind(args: ExpertsArgs) -> Callable[..., None]:
    """The compiled code with all that calls on the same stacks share, as a record of numbers and addresses."""
    from halfbyte.kernels.cpu import experts_code
    from halfbyte.kernels.cpu.product_code import parts

    mixture, dtype = args.mixture, dtype_name(args.hidden.dtype)
    (tokens, top), (held, hidden, inner) = args.indices.shape, args.down.shape
    one, two = args.gate_up.buffers(), args.down.buffers()
    form, width, unit, stage = parts(form_of(dtype, "pre_scale" in one or "pre_scale" in two))
    places = np.full(mixture.experts, -1, np.int32)
    places[list(mixture.local)] = np.arange(held, dtype=np.int32)
    kept: list[Any] = [places]

    def at(a: Any, wide: bool = False) -> int:
        """The address of an array, of float32 where ``wide``; 0 of None. What had to be copied is kept."""
        if a is None:
            return 0
        if is_torch(a):
            made = (a.float() if wide else a).contiguous()
        else:
            made = np.ascontiguousarray(a, np.float32 if wide else None)
        if made is not a:
            kept.append(made)
        return address_of(made)

    limit = np.float32(0 if mixture.limit is None else mixture.limit)
    fixed: dict[str, Any] = {
        "top": top, "experts": mixture.experts, "held": held, "places": address_of(places),
        "wide_ids": dtype_name(args.indices.dtype) == "int64", "limited": mixture.limit is not None,
        "limit": limit.view(np.uint32),
        "kind": KINDS[dtype], "out_kind": KINDS[dtype_name(args.out.dtype)],
        "weights_kind": KINDS[dtype_name(args.weights.dtype)], "form": form, "width": width, "unit_code": unit,
        "stage_code": stage,
        "order": ORDERS.index(mixture.gate_up_order) if mixture.gated else len(ORDERS),
        "activation": (*ACTIVATIONS, SWIGLU).index(mixture.activation),
        "hidden": hidden, "inner": inner,
        "pre": at(one.get("pre_scale"), wide=True), "down_pre": at(two.get("pre_scale"), wide=True),
    }  # fmt: skip
    for name, buffers, bias in (("", one, args.gate_up_bias), ("down_", two, args.down_bias)):
        fixed |= {f"{name}{part}": at(buffers[part]) for part in ("codes", "scales", "scale2")}
        fixed[f"{name}per_row"] = buffers["scale2"].shape[-2] != 1
        fixed[f"{name}bias"], fixed[f"{name}bias_kind"] = at(bias), 0 if bias is None else KINDS[dtype_name(bias.dtype)]
    x, h = (-(-size // ROUND) * ROUND * width for size in (hidden, inner))
    of_slot = {"sorted": 8, "position": 8, "x": x, "h": h, "y": 4 * hidden}
    step = min(tokens, max(1, PASS // (top * sum(of_slot.values()))))
    sizes = {name: size * step * top for name, size in of_slot.items()}
    sizes |= dict.fromkeys(("cursor", "place", "first", "chunk"), 8 * (held + 1))
    need = 0
    for name, size in sizes.items():
        fixed[name], need = need, need + -(-size // 64) * 64
    record = np.zeros(len(fixed), np.int64)
    for name, number in fixed.items():
        record[getattr(experts_code, name.upper())] = number
    kept.append(record)
    code, where = experts_code.experts(), address_of(record)
    rows = [a.itemsize * a.shape[1] for a in (args.hidden, args.indices, args.weights, args.out)]

    def run(*arrays: Array) -> None:
        memory = scratch if need <= KEPT else Scratch()
        staged = memory.take(need)
        starts = [address_of(a) for a in arrays]
        if tokens == step:
            jit.run(code, jit.thread_count(), where, tokens, *starts, staged)
            return
        for first in range(0, tokens, step):
            here = [start + first * size for start, size in zip(starts, rows, strict=True)]
            jit.run(code, jit.thread_count(), where, min(step, tokens - first), *here, staged)

    run.held = kept  # type: ignore[attr-defined] # alive as long as their addresses are
    return run


def _refuse(call: ExpertsCall) -> tuple[str, ...]:
    reasons = []
    if call.device != "cpu":
        reasons.append(f"runs on the CPU, not on {call.device}")
    reasons.extend(
        f"reads the layout rows, not {layout.key}"
        for layout in dict.fromkeys((call.layout, call.down_layout))
        if not isinstance(layout, Rows)
    )
    if call.odd_scales:
        reasons.append("takes positive, finite block scales (bytes 00 to 7E)")
    if call.precision != "exact":
        reasons.append(f"computes exactly, not in {call.precision}")
    if call.library == "torch":
        reasons.extend(why_not_torch(call.library, call.elsewhere))
    missing = None if call.elsewhere else jit.missing()
    if missing:
        reasons.append(missing)
    return tuple(reasons)


def _load(call: ExpertsCall) -> None:
    from halfbyte.kernels.cpu.experts_code import experts
    from halfbyte.kernels.cpu.product_code import parts

    parts(form_of(call.dtype, call.pre_scale))
    experts()


EXPERTS: Final = Kernel(
    name="cpu-experts",
    bundle=ExpertsArgs,
    description="all rows of all experts that have tokens, decoded in registers",
    refuse=_refuse,
    load=_load,
    bind=_bind,
    cost=experts_cost,
)
