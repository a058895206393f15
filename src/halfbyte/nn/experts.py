"""Experts: the MLPs of a mixture of experts, on stacks of NVFP4 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import UsageError, WeightError
from halfbyte.expert_ops import Mixture, Stacks, compute
from halfbyte.layouts import Layout, Packed
from halfbyte.nn.base import Holder, Quantized, as_bias, kernel_for_one, without_data
from halfbyte.operands import as_packed
from halfbyte.ops import pack
from halfbyte.torch_experts import traced
from halfbyte.weight import Fp8Weight, Weight


class Stack(Holder):
    """One weight of all experts, (E, N, K), with its bias (E, N)."""

    bias: torch.nn.Parameter | None

    def __init__(self, packed: Packed, bias: Any) -> None:
        super().__init__(packed)
        self.register_parameter("bias", as_bias(bias, self.shape[:-1]))

    def weights(self) -> Iterator[tuple[str, Weight | Fp8Weight]]:
        """Nothing: the Experts give each expert's layers."""
        return iter(())

    def extra_repr(self) -> str:
        """Shape and layout."""
        e, n, k = self.shape
        return f"E={e}, N={n}, K={k}, layout={self.layout.key}, bias={self.bias is not None}"


class Experts(Quantized):
    """The gated MLPs of a mixture of experts; ``halfbyte.expert_ops`` states what is computed.

    A token's result is the sum of its experts', each times its routing weight, in float32 in the order of its slots:
    the same bits in every run. Experts that another rank holds are null: a token that is routed to one raises. Inside a
    CUDA graph nothing can be raised: there the token's result is NaN, and the same goes for ids that name no expert.

    On a GPU outside of CUDA graphs a call waits once for the device, to learn how many tokens each expert has. While a
    graph is captured it does not: every expert computes all tokens, or each slot's expert is copied first where that
    moves less.

    Args:
        gate_up: (E, 2I, H), the experts held here.
        down: (E, H, I).
        activation: "silu", "gelu", "gelu_tanh", "relu2", or "swigluoai": (up + 1) * gate * sigmoid(1.702 * gate).
        limit: gate is at most this and up within plus or minus it before the activation; None for no limit.
        gate_up_order: of the rows of gate_up: "concatenated" (gate first), "up_first" or "interleaved" (gate even).
        gate_up_bias: (E, 2I), or None.
        down_bias: (E, H), or None.
        experts: how many there are with those that other ranks hold; by default E.
        local: the numbers, ascending, of the experts held here; by default 0..E-1.
        padding: whether ids that name no expert, such as -1, are skipped; else they are refused.

    Raises:
        UsageError: stacks that do not fit each other, an unknown activation or order, a bias that does not fit.
        WeightError: a null weight.
    """

    def __init__(
        self,
        gate_up: Packed | Weight,
        down: Packed | Weight,
        *,
        activation: str = "silu",
        limit: float | None = None,
        gate_up_order: str = "concatenated",
        gate_up_bias: Any = None,
        down_bias: Any = None,
        experts: int | None = None,
        local: Sequence[int] | None = None,
        padding: bool = False,
    ) -> None:
        super().__init__()
        one, two = as_packed(gate_up), as_packed(down)
        if len(one.shape) != 3 or len(two.shape) != 3:
            raise UsageError("Experts hold two stacks", got=f"{one.shape} and {two.shape}", expected="(E, N, K) each")
        count, hidden, inner = two.shape
        if one.shape != (count, 2 * inner, hidden):
            raise UsageError("gate_up does not fit down", got=one.shape, expected=(count, 2 * inner, hidden))
        numbers = tuple(range(count)) if local is None else tuple(int(e) for e in local)
        if len(numbers) != count:
            raise UsageError(
                "the numbers of the experts do not fit the stacks", got=numbers, expected=f"{count} of them"
            )
        self.mixture = Mixture(
            activation=activation,
            limit=limit,
            gate_up_order=gate_up_order,
            experts=count if experts is None else experts,
            local=numbers,
            padding=padding,
        )
        self.num_experts, self.hidden_size, self.intermediate_size = self.mixture.experts, hidden, inner
        self.gate_up, self.down = Stack(one, gate_up_bias), Stack(two, down_bias)

    @classmethod
    def of(
        cls,
        layers: Sequence[tuple[Weight, Weight, Weight]],
        layout: Layout | str = "rows",
        **options: Any,
    ) -> Experts:
        """The experts of (gate, up, down) each: no bit of any changes, and different scale2 become per-row.

        Args:
            layers: one for each expert; three ``Weight.null`` for one that another rank holds.
            layout: a Layout or its key.
            options: ``activation``, ``limit`` and ``padding``, and biases of the experts held here.

        Raises:
            WeightError: no expert that is not null, one that is null in part, or weights that do not fit.
            LayoutError: a shape or value that the layout cannot hold.
        """
        for e, three in enumerate(layers):
            if len({weight.is_null for weight in three}) > 1:
                raise WeightError(f"expert {e} is null in part")
        local = [e for e, three in enumerate(layers) if not three[0].is_null]
        if not local:
            raise WeightError("all experts are null", got=f"{len(layers)} experts")
        gate_up = Weight.stack([Weight.concat(layers[e][:2], policy="exact") for e in local])
        down = Weight.stack([layers[e][2] for e in local])
        return cls(pack(gate_up, layout), pack(down, layout), experts=len(layers), local=local, **options)

    @classmethod
    def empty(
        cls,
        layout: Layout | str,
        experts: int,
        hidden: int,
        intermediate: int,
        *,
        per_row: bool = False,
        device: Any = "meta",
        **options: Any,
    ) -> Experts:
        """Experts without data, to be filled by ``load_state_dict``; ``per_row`` is about gate_up."""
        of: dict[str, Any] = {"input_scale": False, "pre_scale": False, "device": device}
        gate_up = without_data(layout, (experts, 2 * intermediate, hidden), per_row=per_row, **of)
        down = without_data(layout, (experts, hidden, intermediate), per_row=False, **of)
        return cls(gate_up, down, **options)

    @property
    def layout(self) -> Layout:
        """Of gate_up."""
        return self.gate_up.layout

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """(T, H), with (T, k) int32 or int64 experts and (T, k) routing weights, to (T, H) in hidden's dtype.

        Raises:
            UsageError: tensors that do not fit; ids that name no expert, unless ``padding``.
            WeightError: a token that is routed to a null expert.
        """
        one, two = self.gate_up, self.down
        if torch.compiler.is_compiling():
            held = [(s._key, s.shape, s.held(), s._parameters["bias"]) for s in (one, two)]
            return traced(hidden, indices, weights, held, self.mixture)
        stacks = Stacks(gate_up=one.packed, down=two.packed, gate_up_bias=one.bias, down_bias=two.bias)
        return compute(hidden, indices, weights, stacks, self.mixture)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Each expert's layers, such as ("7.up_proj", weight), one expert unpacked at a time."""
        for place, e in enumerate(self.mixture.local):
            both: Any = self.gate_up.packed.expert(place).unpack()
            gate, up = _halves(both, self.mixture.gate_up_order)
            down: Any = self.down.packed.expert(place).unpack()
            yield f"{e}.gate_proj", gate
            yield f"{e}.up_proj", up
            yield f"{e}.down_proj", down

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of them; the kernel is that for one token of one expert."""
        m = self.mixture
        held = "" if len(m.local) == m.experts else f", {len(m.local)} held here"
        limit = "" if m.limit is None else f", limit={m.limit}"
        kernel = kernel_for_one(self.gate_up.packed.expert(0)) if m.local else "no kernel: no experts"
        return (
            f"experts={m.experts}{held}, hidden={self.hidden_size}, intermediate={self.intermediate_size}, "
            f"activation={m.activation}{limit}, gate_up={m.gate_up_order}, layout={self.layout.key}, kernel={kernel}"
        )


def _halves(both: Weight, order: str) -> tuple[Weight, Weight]:
    """Gate and up of one expert."""
    if order == "interleaved":
        even = torch.arange(0, both.n, 2)
        both = both.permute_rows(torch.cat([even, even + 1]))
    half = both.n // 2
    first, second = both.split([half, half])
    return (second, first) if order == "up_first" else (first, second)
