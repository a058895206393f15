"""``grouped`` on Hopper, layout ``fragments``: one of the products of ``experts_gemm``, of tokens that are sorted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import ALIGNED, Kernel
from halfbyte.kernels.cuda.experts_gemm import Grouped, Product, bind_order, bind_product, compiled, for_slots
from halfbyte.kernels.cuda.fragments import TILE, aligned
from halfbyte.kernels.cuda.launch import why_not
from halfbyte.kernels.cuda.lists import WORD, Lists, Numbers, bind_runs, most_blocks
from halfbyte.kernels.cuda.shared import in_turn, workspace
from halfbyte.kernels.grouped import GroupedArgs, GroupedCall, grouped_cost
from halfbyte.layouts import Fragments
from halfbyte.layouts.fragments import STEPS
from halfbyte.numerics import BLOCK

NAME: Final = "gluon-grouped"


def refuse(call: GroupedCall) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = list(why_not(call, least=90, most=90, gluon=True))
    needed = Fragments(call.dtype if call.dtype in STEPS else "bfloat16")
    if call.layout != needed:
        reasons.append(f"reads the layout {needed.key}, not {call.layout.key}")
    if call.dtype not in STEPS:
        reasons.append(f"takes {' or '.join(STEPS)} activations, not {call.dtype}")
    if call.shape[-1] % BLOCK or not call.shape[-1]:
        reasons.append(f"takes a K that is a multiple of {BLOCK}, not {call.shape[-1]}")
    if call.shape[-2] % TILE:
        reasons.append(f"takes a multiple of {TILE} features, not {call.shape[-2]}")
    if call.pre_scale:
        reasons.append("multiplies activations as they come, without a pre_scale")
    return tuple(reasons)


def configure(call: GroupedCall) -> Grouped:
    """The configuration for a call, where all experts have as many tokens."""
    return for_slots(call.rows / max(1, call.shape[0])).first


def _product(call: GroupedCall, bias: str | None) -> Product:
    n, k = call.shape[-2:]
    return Product(n, k, False, None, None, False, call.dtype, call.out_dtype, call.per_row, bias, False)


def bind(args: GroupedArgs, made: Grouped | None = None) -> Callable[[Any, Any, Any], None]:
    """A call's launches; ``made`` instead of the configuration chosen."""
    call = args.call()
    made = configure(call) if made is None else made
    device, experts = args.x.device, call.shape[0]
    held = Lists(call.rows, 1, made.slots, Numbers(experts, tuple(range(experts))), call.counts)
    lists = bind_runs(held, device, call.capability)
    product = _product(call, None if args.bias is None else dtype_name(args.bias.dtype))
    most = most_blocks(call.rows, experts, made.slots)
    order, behind = bind_order(made, most, device), -(-held.nbytes // ALIGNED) * ALIGNED
    launch = bind_product(made, product, args.weight, args.bias, call.rows, device)
    words = WORD * held.blocks, WORD * held.slots, WORD * held.count

    def run(x: Any, counts: Any, out: Any) -> None:
        x = aligned(x)
        to = out if out.data_ptr() % ALIGNED == 0 else out.clone()
        with in_turn:
            at = workspace(device, behind + 4 * most).data_ptr()
            lists(counts, at)
            launch(x.data_ptr(), to.data_ptr(), order(tuple([at + word for word in words]), at + behind), 1)
        if to is not out:
            out.copy_(to)

    return run


def compile_as(call: GroupedCall, made: Grouped) -> None:
    """Compile it in a configuration."""
    import torch

    bind_order(made, most_blocks(call.rows, call.shape[0], made.slots), torch.device(call.device))
    compiled(made, _product(call, "float32" if call.bias else None), torch.device(call.device))


GLUON: Final = Kernel(
    name=NAME,
    bundle=GroupedArgs,
    description="a product of gluon-experts-gemm for tokens that are sorted by expert; Hopper",
    refuse=refuse,
    cost=grouped_cost,
    bind=bind,
    configure=configure,
    compile=compile_as,
)
