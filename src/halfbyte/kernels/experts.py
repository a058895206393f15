"""``experts``, the MLPs of a mixture of experts on two stacks of weights: what kernels are given, and what decides.

::

    h = round(activation(x @ gate_up[e].T + bias))     sums and activation in float32, rounded to x's dtype
    y = h @ down[e].T + bias                           in float32
    out = round(sum of weight * y over a token's slots)   in float32, in the order of the slots

The activation is of the gate times up, or of up alone where there is no gate. A token's result depends on no other
token, but for the order of the sums within a product, which may follow how many tokens an expert has.

A slot is skipped where ``padding`` is set and its id names no expert, and where ``null`` is "skip" and its id names an
expert that is not held here; ids that are neither held nor skipped are refused. On the CPU that is looked at before a
kernel runs. On a GPU nothing waits: the result of a token with an id that is refused is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Final

from halfbyte.arrays import dtype_name, float_dtype
from halfbyte.errors import UsageError, WeightError
from halfbyte.kernels.base import Call, Cost, capability_of, check_kind, device_of, library_of
from halfbyte.kernels.step import ACTIVATIONS, check_axes
from halfbyte.kernels.step import check as check_array
from halfbyte.layouts import Layout, Packed
from halfbyte.numerics import Array

ORDERS: Final = ("concatenated", "up_first", "interleaved")
SWIGLU: Final = "swigluoai"
"""gpt-oss: ``(up + 1) * gate * sigmoid(1.702 * gate)``."""
SWIGLU_ALPHA: Final = 1.702
NULL: Final = ("refuse", "skip")
PRECISIONS: Final = ("exact", "fp8", "w4a4")
_MANY: Final = 256
"""Ids from which on torch looks for the least and the largest faster than Python goes through them."""


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
        gated: whether there is a gate; without one the activation is of up alone.
        null: "refuse" a token that is routed to an expert which is not held here, or "skip" that slot, as where the
            results of several ranks are added.

    Raises:
        UsageError: an unknown activation or order, numbers of experts that cannot be meant, or what needs a gate
            where there is none.
    """

    activation: str
    limit: float | None
    gate_up_order: str
    experts: int
    local: tuple[int, ...]
    padding: bool
    gated: bool = True
    null: str = "refuse"

    def __post_init__(self) -> None:
        known = (*ACTIVATIONS, SWIGLU)
        if self.activation not in known:
            raise UsageError("unknown activation", got=repr(self.activation), expected=" or ".join(known))
        if self.gate_up_order not in ORDERS:
            raise UsageError("unknown order of gate and up", got=repr(self.gate_up_order), expected=" or ".join(ORDERS))
        if self.null not in NULL:
            raise UsageError("unknown way with null experts", got=repr(self.null), expected=" or ".join(NULL))
        if self.limit is not None and not self.limit > 0:
            raise UsageError("the limit of gate and up is positive", got=self.limit)
        if not self.gated and (self.activation == SWIGLU or self.limit is not None or self.gate_up_order != ORDERS[0]):
            raise UsageError(
                "experts without a gate have neither its limit nor an order",
                got=f"activation {self.activation!r}, limit {self.limit}, order {self.gate_up_order!r}",
                expected=f"an activation of {', '.join(ACTIVATIONS)}, no limit and the order {ORDERS[0]!r}",
            )
        if sorted(set(self.local)) != list(self.local) or not all(0 <= e < self.experts for e in self.local):
            raise UsageError(
                "the numbers of the experts do not ascend within those that there are",
                got=self.local,
                expected=f"within 0..{self.experts - 1}",
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.activation, self.limit, self.gate_up_order, self.experts, self.local))

    @cached_property
    def held(self) -> frozenset[int]:
        """The numbers of the experts in the stacks."""
        return frozenset(self.local)

    @property
    def parts(self) -> int:
        """How many rows of gate_up make one of h: 2, or 1 without a gate."""
        return 2 if self.gated else 1


@dataclass(frozen=True, kw_only=True)
class ExpertsCall(Call):
    """All that decides which kernel runs: of gate_up as Call, where M is T, the tokens.

    ``aligned``, ``whole`` and ``odd_scales`` are about both stacks, ``bias`` is gate_up's.

    Args:
        mixture: how they compute.
        top: k, the experts of a token.
        indices: their dtype, "int32" or "int64".
        weights: the dtype of what results are multiplied by.
        down_layout: of down.
        down_per_row: its scale2 differs by output feature.
        down_bias: a bias is added to its results.
        precision: of ``PRECISIONS``.
    """

    op: str = "experts"
    mixture: Mixture
    top: int
    indices: str
    weights: str
    down_layout: Layout
    down_per_row: bool
    down_bias: bool
    precision: str = "exact"

    @staticmethod
    def of(
        gate_up: Packed,
        down: Packed,
        mixture: Mixture,
        *,
        rows: int,
        top: int,
        dtype: str,
        device: str,
        out_dtype: str | None = None,
        library: Any = "torch",
        indices: str = "int64",
        weights: str = "float32",
        bias: bool = False,
        down_bias: bool = False,
        precision: str = "exact",
        capability: int = 0,
    ) -> ExpertsCall:
        """The call on two stacks."""
        how: dict[str, Any] = {
            "rows": rows, "dtype": dtype, "out_dtype": out_dtype or dtype, "device": device, "library": library,
            "capability": capability,
        }  # fmt: skip
        one, two = Call.on(gate_up, bias=bias, **how), Call.on(down, bias=down_bias, **how)
        both = {
            "op": ExpertsCall.op,
            "aligned": one.aligned and two.aligned,
            "whole": one.whole and two.whole,
            "odd_scales": one.odd_scales or two.odd_scales,
            "pre_scale": one.pre_scale or two.pre_scale,
        }
        return ExpertsCall(
            **vars(one) | both,
            mixture=mixture,
            top=top,
            indices=indices,
            weights=weights,
            down_layout=two.layout,
            down_per_row=two.per_row,
            down_bias=down_bias,
            precision=precision,
        )

    def __str__(self) -> str:
        e, _, k = self.shape
        of = f"{e} of {self.mixture.experts}" if e != self.mixture.experts else str(e)
        how = "" if self.precision == "exact" else f", precision {self.precision}"
        return (
            f"experts with layout {self.layout.key}, {of} experts of hidden {k} and intermediate {self.inner}, "
            f"T={self.rows}, top {self.top}, {self.dtype}{how}, {self.library} on {self.place}"
        )

    @property
    def inner(self) -> int:
        """I, the width of h."""
        return self.shape[-2] // self.mixture.parts

    def products(self) -> tuple[Call, Call]:
        """Of gate_up and of down for one expert that all tokens are routed to; results are float32."""
        of = {field.name: getattr(self, field.name) for field in fields(Call)}
        one = of | {"op": "linear", "shape": self.shape[1:], "out_dtype": "float32"}
        down = {"shape": (self.shape[-1], self.inner), "layout": self.down_layout}
        return Call(**one), Call(**one | down | {"per_row": self.down_per_row, "bias": self.down_bias})

    @property
    def touched(self) -> float:
        """How many of the experts held here have tokens, expected where routing is even and slots are alike."""
        whole = self.mixture.experts
        none = (1 - min(self.top, whole) / whole) ** self.rows if whole else 1.0
        return len(self.mixture.local) * (1 - none)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsArgs:
    """The arguments of a kernel for ``experts``.

    A kernel's ``bind`` may keep the addresses of both stacks and of the biases: what it gives is a function of
    hidden, indices, weights and out.

    Args:
        hidden: (T, H) float32, bfloat16 or float16, row-major, as all.
        indices: (T, k) int32 or int64, the experts of each token.
        weights: (T, k) floats, what each expert's result is multiplied by.
        gate_up: (E, 2I, H), or (E, I, H) without a gate.
        down: (E, H, I).
        gate_up_bias: (E, 2I) or (E, I) floats, or None.
        down_bias: (E, H) floats, or None.
        mixture: how they compute.
        precision: of ``PRECISIONS``.
        out: (T, H) of the dtype of hidden, or float32; written.

    Raises:
        UsageError: stacks that are not NVFP4, or arrays that do not fit each other.
    """

    op: ClassVar[str] = "experts"
    hidden: Array
    indices: Array
    weights: Array
    gate_up: Packed
    down: Packed
    gate_up_bias: Array | None
    down_bias: Array | None
    mixture: Mixture
    precision: str = "exact"
    out: Array

    def __post_init__(self) -> None:
        check_kind(self.gate_up.layout)
        check_kind(self.down.layout)
        check_stacks(self.gate_up.shape, self.down.shape, self.mixture)
        if self.precision not in PRECISIONS:
            raise UsageError("unknown precision", got=repr(self.precision), expected=" or ".join(PRECISIONS))
        tokens, width = check_axes(self.hidden, "hidden", 2)
        ids = check_axes(self.indices, "indices", 2)
        if width != self.down.shape[1] or ids[0] != tokens:
            raise UsageError(
                "hidden, indices and experts do not fit each other",
                got=f"{(tokens, width)}, {ids} and hidden {self.down.shape[1]}",
                expected="(T, H), (T, k) and H",
            )
        for name, shape, dtype in (
            ("hidden", (tokens, width), None),
            ("out", (tokens, width), "float32" if dtype_name(self.out.dtype) == "float32" else None),
            ("weights", ids, dtype_name(self.weights.dtype)),
        ):
            check_array(self.op, name, getattr(self, name), self.hidden, shape, dtype)

    def arrays(self) -> tuple[Any, ...]:
        """What a bound kernel takes."""
        return self.hidden, self.indices, self.weights, self.out

    def call(self) -> ExpertsCall:
        """What decides which kernel runs on these arrays."""
        return ExpertsCall.of(
            self.gate_up,
            self.down,
            self.mixture,
            rows=self.hidden.shape[0],
            top=self.indices.shape[1],
            dtype=dtype_name(self.hidden.dtype),
            out_dtype=dtype_name(self.out.dtype),
            indices=dtype_name(self.indices.dtype),
            weights=dtype_name(self.weights.dtype),
            device=device_of(self.hidden),
            library=library_of(self.hidden),
            bias=self.gate_up_bias is not None,
            down_bias=self.down_bias is not None,
            precision=self.precision,
            capability=capability_of(self.hidden),
        )


def check_stacks(gate_up: tuple[int, ...], down: tuple[int, ...], mixture: Mixture) -> None:
    """UsageError where the shapes of two stacks do not fit each other, or how they compute."""
    if len(gate_up) != 3 or len(down) != 3:
        raise UsageError("Experts hold two stacks", got=f"{gate_up} and {down}", expected="(E, N, K) each")
    count, hidden, inner = down
    if gate_up != (count, mixture.parts * inner, hidden):
        raise UsageError("gate_up does not fit down", got=gate_up, expected=(count, mixture.parts * inner, hidden))
    if len(mixture.local) != count:
        raise UsageError(
            "the numbers of the experts do not fit the stacks", got=mixture.local, expected=f"{count} of them"
        )


def check_ids(indices: Any, mixture: Mixture) -> None:
    """Look at the ids of a call, on a GPU by waiting for them.

    Raises:
        UsageError: one names no expert, unless ``padding``.
        WeightError: one names a null expert, unless those are skipped.
    """
    k, experts, held = indices.shape[1], mixture.experts, mixture.held
    if indices.numel() > _MANY and len(held) == experts and 0 <= int(indices.min()) <= int(indices.max()) < experts:
        return
    ids = indices.reshape(-1).tolist()
    if len(held) == experts and ids and min(ids) >= 0 and max(ids) < experts:
        return
    for at, e in enumerate(ids):
        if e in held:
            continue
        if 0 <= e < experts:
            if mixture.null == "skip":
                continue
            raise WeightError(
                f"tokens are routed to expert {e}, which is null: another rank holds it",
                index=[at // k, at % k],
                hint="route its tokens to that rank",
            )
        if not mixture.padding:
            raise UsageError("ids name no expert", index=[at // k, at % k], got=e, expected=f"0..{experts - 1}")


def places(args: ExpertsArgs) -> Any:
    """(experts,) i32 beside the stacks: the place of each expert in them by its number, -1 for null ones; kept."""
    import torch

    mixture = args.mixture
    memo = args.gate_up.memo.setdefault("places", {})  # never forgotten: CUDA graphs read there
    key = mixture.experts, mixture.local, args.hidden.device
    found = memo.get(key)
    if found is None:
        numbers = [-1] * mixture.experts
        for place, e in enumerate(mixture.local):
            numbers[e] = place
        found = memo.setdefault(key, torch.tensor(numbers, dtype=torch.int32).to(args.hidden.device))
    return found


def experts_cost(call: ExpertsCall) -> Cost:
    """The least that a call costs: the experts touched, as far as can be expected, tokens and routing, once each."""
    e, n, k = call.shape
    if not e:
        return Cost(bytes=0, flops=0)
    sizes = (call.layout.sizes((n, k)), call.down_layout.sizes((k, call.inner)))
    one = sum(sum(size.values()) for size in sizes)
    one += 4 * (n if call.per_row else 1) + 4 * (k if call.down_per_row else 1)
    one += float_dtype(call.dtype).itemsize * (n * call.bias + k * call.down_bias)
    tokens = call.rows * k * (float_dtype(call.dtype).itemsize + float_dtype(call.out_dtype).itemsize)
    routing = call.rows * call.top * (8 if call.indices == "int64" else 4) + call.rows * call.top * 4
    slots = call.rows * call.top * len(call.mixture.local) / max(1, call.mixture.experts)
    return Cost(
        bytes=round(call.touched * one) + tokens + routing,
        flops=round(2 * slots * (n * k + k * call.inner)),
    )
