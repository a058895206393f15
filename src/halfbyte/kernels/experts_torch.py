"""``experts`` by the kernels of ``linear``, one expert after the other: for any layout and device.

On the CPU, and on a GPU outside of CUDA graphs, tokens are sorted by expert: a GPU's host waits once for their counts.
While a CUDA graph is captured nothing may wait. There every expert computes all tokens and the routing picks, or, where
that reads less, the bytes of each slot's expert are gathered first. So an expert may compute another number of tokens
in a graph than outside, and other kernels, which add in another order, may run: the results agree within their bounds,
and bit for bit only where the same kernels run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from halfbyte.errors import NoKernelError
from halfbyte.kernels.base import Kernel, LinearArgs, load_torch, why_not_torch
from halfbyte.kernels.cuda.shared import capturing
from halfbyte.kernels.experts import (
    SWIGLU,
    SWIGLU_ALPHA,
    ExpertsArgs,
    ExpertsCall,
    Mixture,
    check_ids,
    experts_cost,
    places,
)
from halfbyte.kernels.fp8 import Fp8Args
from halfbyte.kernels.grouped import expert_of
from halfbyte.kernels.step_torch import activation_of
from halfbyte.kernels.w4a4 import W4a4Args
from halfbyte.layouts import Packed

_BUNDLES: Final[dict[str, Any]] = {"exact": LinearArgs, "fp8": Fp8Args, "w4a4": W4a4Args}
_COPIED: Final = 3
"""How often the bytes of an expert that is gathered are moved: read, written, and read again."""


def activated(y: Any, mixture: Mixture) -> Any:
    """(M, 2I) sums of gate and up, or (M, I) of up alone, to (M, I), in float32."""
    import torch

    if not mixture.gated:
        return activation_of(mixture.activation)(y)
    if mixture.gate_up_order == "interleaved":
        gate, up = y[:, ::2], y[:, 1::2]
    else:
        gate, up = y.chunk(2, -1)
        if mixture.gate_up_order == "up_first":
            gate, up = up, gate
    if mixture.limit is not None:
        gate, up = gate.clamp(max=mixture.limit), up.clamp(-mixture.limit, mixture.limit)
    if mixture.activation == SWIGLU:
        return (up + 1) * (gate * torch.sigmoid(SWIGLU_ALPHA * gate))
    return activation_of(mixture.activation)(gate) * up


def _product(x: Any, weight: Packed, bias: Any, precision: str) -> Any:
    """(M, N) float32."""
    import torch

    from halfbyte.kernels import select

    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    bundle = _BUNDLES[precision]
    if x.shape[0]:
        args = bundle(x=x, weight=weight, bias=bias, out=out)
        select(bundle, args.call()).run(args)
    return out


def _mlp(x: Any, args: ExpertsArgs, gate_up: Packed, down: Packed, bias: Any, down_bias: Any) -> Any:
    both = _product(x, gate_up, bias, args.precision)
    return _product(activated(both, args.mixture).to(x.dtype), down, down_bias, args.precision)


def _at(args: ExpertsArgs, x: Any, e: int) -> Any:
    """(M, H) float32: x through the expert at place e."""
    biases = (None if b is None else b[e] for b in (args.gate_up_bias, args.down_bias))
    return _mlp(x, args, expert_of(args.gate_up, e), expert_of(args.down, e), *biases)


def _gathered(args: ExpertsArgs, x: Any, e: Any) -> Any:
    """The same for a place (1,) that only the device knows."""
    biases = (None if b is None else b.index_select(0, e)[0] for b in (args.gate_up_bias, args.down_bias))
    return _mlp(x, args, _taken(args.gate_up, e), _taken(args.down, e), *biases)


def _taken(stack: Packed, e: Any) -> Packed:
    """One expert of a stack, its bytes copied."""
    whole = {"pre_scale", *stack.layout.extras}
    buffers = {name: b if name in whole else b.index_select(0, e)[0] for name, b in stack.buffers().items()}
    return Packed(stack.layout, stack.shape[1:], buffers)


def _launch(args: ExpertsArgs) -> None:
    import torch

    if capturing(args.hidden.device):
        y = _in_graph(args)
    else:
        y = _sorted(args)
        if args.hidden.is_cuda:
            _ready(args)
    out = torch.zeros(args.hidden.shape, dtype=torch.float32, device=args.hidden.device)
    skipped = _skipped(args)
    for s in range(args.indices.shape[1]):
        term = y[:, s] * args.weights[:, s, None].float()
        out += term if skipped is None else term.masked_fill(skipped[:, s, None], 0)
    args.out.copy_(out)


def _skipped(args: ExpertsArgs) -> Any:
    """(T, k) bool, or None where nothing is skipped."""
    mixture, ids = args.mixture, args.indices
    known = (ids >= 0) & (ids < mixture.experts)
    if mixture.null == "skip":
        held = places(args)[ids.where(known, 0).long()] >= 0
        return ~(known & held) if mixture.padding else known & ~held
    return ~known if mixture.padding else None


def _sorted(args: ExpertsArgs) -> Any:
    """(T, k, H) float32: the result of each slot's expert; NaN where there is none."""
    import torch

    (tokens, k), experts, hidden = args.indices.shape, args.mixture.experts, args.hidden
    ids = args.indices.reshape(-1).long()
    ids = ids.where((ids >= 0) & (ids < experts), experts)
    counted = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts = counted.scatter_add_(0, ids, torch.ones_like(ids)).tolist()
    if hidden.is_cuda and sum(counts[e] for e in args.mixture.local) < tokens * k:
        check_ids(args.indices, args.mixture)
    of = {e: place for place, e in enumerate(args.mixture.local)}
    order = torch.argsort(ids, stable=True)
    y = torch.full((tokens * k, hidden.shape[1]), float("nan"), dtype=torch.float32, device=hidden.device)
    start = 0
    for e, count in enumerate(counts[:experts]):
        if count and e in of:
            own = order[start : start + count]
            y[own] = _at(args, hidden[own // k], of[e])
        start += count
    return y.reshape(tokens, k, hidden.shape[1])


def _in_graph(args: ExpertsArgs) -> Any:
    """The same without a look at the routing."""
    import torch

    (tokens, k), local, hidden = args.indices.shape, args.mixture.local, args.hidden
    y = torch.full((tokens, k, hidden.shape[1]), float("nan"), dtype=torch.float32, device=hidden.device)
    if _gathers(args):
        at = args.indices.long() - local[0]
        known = (at >= 0) & (at < len(local))
        at = at.clamp(0, len(local) - 1)
        for t in range(tokens):
            for s in range(k):
                y[t, s] = _gathered(args, hidden[t : t + 1], at[t, s : s + 1])[0]
        return y.masked_fill_(~known[..., None], float("nan"))
    for place, e in enumerate(local):
        y = torch.where((args.indices == e)[..., None], _at(args, hidden, place)[:, None], y)
    return y


def _gathers(args: ExpertsArgs) -> bool:
    """Whether a graph copies the expert of each slot, and does not let all experts compute all tokens."""
    local = args.mixture.local
    together = len(local) > 0 and local[-1] - local[0] + 1 == len(local)
    return together and _COPIED * args.indices.numel() < len(local)


def _ready(args: ExpertsArgs) -> None:
    """See that the kernels are compiled which the same call takes in a graph, where none can be; once for each call."""
    import torch

    hidden, memo = args.hidden, args.gate_up.memo
    key = "in a graph", tuple(args.indices.shape), hidden.dtype
    if hidden.shape[0] and args.mixture.local and key not in memo:
        if _gathers(args):
            _gathered(args, hidden[:1], torch.zeros(1, dtype=torch.int64, device=hidden.device))
        else:
            _at(args, hidden, 0)
        memo[key] = True


def _refuse(call: ExpertsCall) -> tuple[str, ...]:
    from halfbyte.kernels import select

    reasons = why_not_torch(call.library, call.elsewhere)
    try:
        for product in () if reasons else call.products():
            select(LinearArgs, product)
    except NoKernelError as error:
        return (f"there is no kernel for its products: {str(error).rpartition('the nearest is ')[2]}",)
    return reasons


LOOP: Final = Kernel(
    name="experts-loop",
    bundle=ExpertsArgs,
    description="linear for each expert, one after the other; any layout and device",
    refuse=_refuse,
    load=load_torch,
    launch=_launch,
    cost=experts_cost,
)


def chosen(call: ExpertsCall) -> tuple[Kernel[ExpertsArgs, ExpertsCall], str]:
    """The kernel that runs a call, and the precision that it computes in: where FP8 is allowed, a GPU may be exact.

    Raises:
        NoKernelError: nothing accepts this call.
    """
    from halfbyte.kernels import forced, ordered, select

    if call.precision == "fp8" and call.device == "cuda" and not forced(call.op):
        for kernel in ordered(ExpertsArgs, call):
            if kernel is not LOOP and not kernel.refuse(call):
                return kernel, "fp8"
        call = replace(call, precision="exact")
    return select(ExpertsArgs, call), call.precision
