"""A mixture of experts on stacks of NVFP4 weights: the gated MLP of each expert for its own tokens, weighted and added.

::

    h = round(activation(x @ gate_up[e].T + bias))     sums and activation in float32, rounded to x's dtype
    y = h @ down[e].T + bias                           in float32
    out = round(sum of weight * y over a token's slots)   in float32, in the order of the slots

On the CPU, and on a GPU outside of CUDA graphs, tokens are sorted by expert: a GPU's host waits once for their counts.
While a CUDA graph is captured nothing may wait. There every expert computes all tokens and the routing picks, or, where
that reads less, the bytes of each slot's expert are gathered first. So an expert may compute another number of tokens
in a graph than outside, and other kernels, which add in another order, may run: the results agree within their bounds,
and bit for bit only where the same kernels run. In a graph nothing can be raised either: a token whose routing is
refused elsewhere is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from halfbyte.errors import UsageError, WeightError
from halfbyte.kernels.cuda.shared import capturing
from halfbyte.kernels.step import ACTIVATIONS
from halfbyte.kernels.step_torch import activation_of
from halfbyte.layouts import Packed
from halfbyte.operands import check_beside, check_float, wants_gradient, without_gradient
from halfbyte.ops import compute as product
from halfbyte.ops import linear

ORDERS: Final = ("concatenated", "up_first", "interleaved")
SWIGLU_ALPHA: Final = 1.702
SWIGLU: Final = "swigluoai"
"""gpt-oss: ``(up + 1) * gate * sigmoid(1.702 * gate)``."""
_COPIED: Final = 3
"""How often the bytes of an expert that is gathered are moved: read, written, and read again."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How experts compute, beside their weights.

    Args:
        activation: of ``ACTIVATIONS``, or ``SWIGLU``.
        limit: gate is at most this, and up within plus or minus it, before the activation; None for no limit.
        gate_up_order: of the rows of gate and up, of ``ORDERS``.
        experts: how many there are, null ones too.
        local: the number of each expert that the stacks hold.
        padding: whether ids that name no expert are skipped, not refused.

    Raises:
        UsageError: an unknown activation or order, or numbers of experts that cannot be meant.
    """

    activation: str
    limit: float | None
    gate_up_order: str
    experts: int
    local: tuple[int, ...]
    padding: bool

    def __post_init__(self) -> None:
        known = (*ACTIVATIONS, SWIGLU)
        if self.activation not in known:
            raise UsageError("unknown activation", got=repr(self.activation), expected=" or ".join(known))
        if self.gate_up_order not in ORDERS:
            raise UsageError("unknown order of gate and up", got=repr(self.gate_up_order), expected=" or ".join(ORDERS))
        if self.limit is not None and not self.limit > 0:
            raise UsageError("the limit of gate and up is positive", got=self.limit)
        if sorted(set(self.local)) != list(self.local) or not all(0 <= e < self.experts for e in self.local):
            raise UsageError(
                "the numbers of the experts do not ascend within those that there are",
                got=self.local,
                expected=f"within 0..{self.experts - 1}",
            )

    def activated(self, y: Tensor) -> Tensor:
        """(M, 2I) sums of gate and up to (M, I), in float32."""
        if self.gate_up_order == "interleaved":
            gate, up = y[:, ::2], y[:, 1::2]
        else:
            gate, up = y.chunk(2, -1)
            if self.gate_up_order == "up_first":
                gate, up = up, gate
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.activation == SWIGLU:
            return (up + 1) * (gate * torch.sigmoid(SWIGLU_ALPHA * gate))
        made: Tensor = activation_of(self.activation)(gate) * up
        return made


@dataclass(frozen=True, kw_only=True, eq=False)
class Stacks:
    """The weights of experts.

    Args:
        gate_up: (E, 2I, H).
        down: (E, H, I).
        gate_up_bias: (E, 2I), or None.
        down_bias: (E, H), or None.
        remember: whether the stacks keep what calls come down to.
    """

    gate_up: Packed
    down: Packed
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    remember: bool = True

    def mlp(self, x: Tensor, e: int, mixture: Mixture) -> Tensor:
        """(M, H) float32: x through the expert at place e."""
        bias, down_bias = (None if b is None else b[e] for b in (self.gate_up_bias, self.down_bias))
        kept = _remembered if self.remember else product
        return _mlp(x, self._expert(self.gate_up, e), self._expert(self.down, e), bias, down_bias, mixture, kept)

    def gathered(self, x: Tensor, e: Tensor, mixture: Mixture) -> Tensor:
        """The same for a place (1,) that only the device knows."""
        biases = (self.gate_up_bias, self.down_bias)
        bias, down_bias = (None if b is None else b.index_select(0, e)[0] for b in biases)
        return _mlp(x, _taken(self.gate_up, e), _taken(self.down, e), bias, down_bias, mixture, product)

    def _expert(self, stack: Packed, e: int) -> Packed:
        memo = stack.memo
        if self.remember:
            if "experts" not in memo:
                memo["experts"] = [stack.expert(i) for i in range(stack.shape[0])]
            known: Packed = memo["experts"][e]
            return known
        own = stack.expert(e)
        own.memo = memo.setdefault(("expert", e), {})
        return own


def _mlp(
    x: Tensor,
    gate_up: Packed,
    down: Packed,
    bias: Tensor | None,
    down_bias: Tensor | None,
    mixture: Mixture,
    linear: Callable[..., Any],
) -> Tensor:
    both = linear(x, gate_up, bias, "float32")
    y: Tensor = linear(mixture.activated(both).to(x.dtype), down, down_bias, "float32")
    return y


def _remembered(x: Tensor, weight: Packed, bias: Tensor | None, out_dtype: str) -> Any:
    return linear(x, weight, bias, out_dtype=out_dtype)


def _taken(stack: Packed, e: Tensor) -> Packed:
    """One expert of a stack, its bytes copied."""
    whole = {"pre_scale", *stack.layout.extras}
    buffers = {name: b if name in whole else b.index_select(0, e)[0] for name, b in stack.buffers().items()}
    return Packed(stack.layout, stack.shape[1:], buffers)


def compute(hidden: Tensor, indices: Tensor, weights: Tensor, stacks: Stacks, mixture: Mixture) -> Tensor:
    """What the experts make of tokens.

    Args:
        hidden: (T, H) float32, bfloat16 or float16.
        indices: (T, k) int32 or int64, the experts of each token.
        weights: (T, k) floats, what each expert's result is multiplied by.
        stacks: the weights, on the device of the others.
        mixture: how they compute.

    Returns:
        (T, H) in hidden's dtype.

    Raises:
        UsageError: tensors that do not fit; ids that name no expert, unless ``padding``.
        WeightError: a token that is routed to a null expert.
    """
    check(hidden, indices, weights, stacks)
    if wants_gradient(hidden, weights):
        made: Tensor = without_gradient()(hidden, weights, lambda x: _compute(x, indices, weights, stacks, mixture))
        return made
    return _compute(hidden, indices, weights, stacks, mixture)


def _compute(hidden: Tensor, indices: Tensor, weights: Tensor, stacks: Stacks, mixture: Mixture) -> Tensor:
    if capturing(hidden.device):
        y = _in_graph(hidden, indices, stacks, mixture)
    else:
        y = _sorted(hidden, indices, stacks, mixture)
        if hidden.is_cuda:
            _ready(hidden, indices, stacks, mixture)
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    skipped = (indices < 0) | (indices >= mixture.experts) if mixture.padding else None
    for s in range(indices.shape[1]):
        term = y[:, s] * weights[:, s, None].float()
        out += term if skipped is None else term.masked_fill(skipped[:, s, None], 0)
    return out.to(hidden.dtype)


def _sorted(hidden: Tensor, indices: Tensor, stacks: Stacks, mixture: Mixture) -> Tensor:
    """(T, k, H) float32: the result of each slot's expert; 0 where it is skipped."""
    (tokens, k), experts = indices.shape, mixture.experts
    ids = indices.reshape(-1).long()
    ids = ids.where((ids >= 0) & (ids < experts), experts)
    counted = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts = counted.scatter_add_(0, ids, torch.ones_like(ids)).tolist()
    if counts[experts] and not mixture.padding:
        flat = [int(i) for i in indices.reshape(-1).tolist()]
        at = next(i for i, e in enumerate(flat) if not 0 <= e < experts)
        raise UsageError("ids name no expert", index=[at // k, at % k], got=flat[at], expected=f"0..{experts - 1}")
    places = {e: place for place, e in enumerate(mixture.local)}
    order = torch.argsort(ids, stable=True)
    y = torch.zeros(tokens * k, hidden.shape[1], dtype=torch.float32, device=hidden.device)
    start = 0
    for e, count in enumerate(counts[:experts]):
        if not count:
            continue
        if e not in places:
            raise WeightError(
                f"{count} tokens are routed to expert {e}, which is null: another rank holds it",
                hint="route its tokens to that rank",
            )
        own = order[start : start + count]
        y[own] = stacks.mlp(hidden[own // k], places[e], mixture)
        start += count
    return y.reshape(tokens, k, hidden.shape[1])


def _in_graph(hidden: Tensor, indices: Tensor, stacks: Stacks, mixture: Mixture) -> Tensor:
    """The same without a look at the routing; NaN where it cannot be followed."""
    (tokens, k), local = indices.shape, mixture.local
    y = torch.full((tokens, k, hidden.shape[1]), float("nan"), dtype=torch.float32, device=hidden.device)
    first = local[0] if local else 0
    if _gathers(indices, mixture):
        places = indices.long() - first
        known = (places >= 0) & (places < len(local))
        places = places.clamp(0, len(local) - 1)
        for t in range(tokens):
            for s in range(k):
                y[t, s] = stacks.gathered(hidden[t : t + 1], places[t, s : s + 1], mixture)[0]
        return y.masked_fill_(~known[..., None], float("nan"))
    for place, e in enumerate(local):
        y = torch.where((indices == e)[..., None], stacks.mlp(hidden, place, mixture)[:, None], y)
    return y


def _gathers(indices: Tensor, mixture: Mixture) -> bool:
    """Whether a graph copies the expert of each slot, and does not let all experts compute all tokens."""
    local = mixture.local
    together = len(local) > 0 and local[-1] - local[0] + 1 == len(local)
    return together and _COPIED * indices.numel() < len(local)


def _ready(hidden: Tensor, indices: Tensor, stacks: Stacks, mixture: Mixture) -> None:
    """See that the kernels are compiled which the same call takes in a graph, where none can be; once for each call."""
    key = "in a graph", tuple(indices.shape), hidden.dtype
    if hidden.shape[0] and mixture.local and key not in stacks.gate_up.memo:
        if _gathers(indices, mixture):
            first = torch.zeros(1, dtype=torch.int64, device=hidden.device)
            stacks.gathered(hidden[:1], first, mixture)
        else:
            stacks.mlp(hidden, 0, mixture)
        stacks.gate_up.memo[key] = True


def check(hidden: Tensor, indices: Tensor, weights: Tensor, stacks: Stacks) -> None:
    """UsageError where tensors do not fit each other or the weights."""
    check_float(hidden, "hidden")
    check_beside(stacks.gate_up.buffers()["scale2"], "the weight", hidden, "hidden")
    width = stacks.gate_up.shape[-1]
    if hidden.ndim != 2 or hidden.shape[1] != width:
        raise UsageError("hidden does not fit the experts", got=tuple(hidden.shape), expected=f"(T, {width})")
    if indices.dtype not in (torch.int32, torch.int64):
        raise UsageError("indices are no integers of 32 or 64 bits", got=str(indices.dtype), expected="int32 or int64")
    if indices.ndim != 2 or indices.shape[0] != hidden.shape[0]:
        raise UsageError(
            "indices do not fit hidden", got=tuple(indices.shape), expected=f"({hidden.shape[0]}, experts of a token)"
        )
    if weights.shape != indices.shape or not weights.is_floating_point():
        got = f"{str(weights.dtype).removeprefix('torch.')} {tuple(weights.shape)}"
        raise UsageError("routing weights do not fit indices", got=got, expected=f"floats {tuple(indices.shape)}")
    for array, what in ((indices, "indices"), (weights, "routing weights")):
        check_beside(array, what, hidden, "hidden")
