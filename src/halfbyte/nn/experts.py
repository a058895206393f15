"""Experts: the MLPs of a mixture of experts, on stacks of NVFP4 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import HalfbyteError, UsageError, WeightError
from halfbyte.expert_ops import Mixture, Stacks, compute
from halfbyte.forms import ExpertsForm, Form
from halfbyte.kernels import ExpertsCall
from halfbyte.kernels.base import capability
from halfbyte.kernels.experts import ORDERS, PRECISIONS, check_stacks
from halfbyte.kernels.experts_torch import chosen
from halfbyte.layouts import Layout, Packed, Rows
from halfbyte.nn.base import Holder, Quantized, as_bias, as_dtype, dtype_for, without_data
from halfbyte.numerics import is_torch
from halfbyte.operands import as_packed
from halfbyte.ops import pack
from halfbyte.torch_experts import traced
from halfbyte.weight import Fp8Weight, Weight


class Stack(Holder):
    """One weight of all experts, (E, N, K), with its bias (E, N).

    Args:
        packed: the weight.
        bias: its own, or None.
        order: of its rows, where they are gate and up, as of Experts.
    """

    bias: torch.nn.Parameter | None

    def __init__(self, packed: Packed, bias: Any, order: str = ORDERS[0]) -> None:
        super().__init__(packed)
        self._order = order
        self.register_parameter("bias", as_bias(bias, self.shape[:-1]))

    def weights(self) -> Iterator[tuple[str, Weight | Fp8Weight]]:
        """Nothing: the Experts give each expert's layers."""
        return iter(())

    def get_extra_state(self) -> Tensor:
        """As of every Holder, and the order of gate and up where it is not the usual one."""
        return _as_state(self._state())

    def set_extra_state(self, state: Tensor) -> None:
        """UsageError if a state dict's layout or order is not this module's."""
        held = bytes(state.tolist()).decode()
        if held != self._state():
            raise UsageError("the state dict holds another layout", got=held, expected=self._state())

    def _state(self) -> str:
        return self._key if self._order == ORDERS[0] else f"{self._key}, {self._order}"

    def extra_repr(self) -> str:
        """Shape and layout."""
        e, n, k = self.shape
        return f"E={e}, N={n}, K={k}, layout={self.layout.key}, bias={self.bias is not None}"


class Experts(Quantized):
    """The MLPs of a mixture of experts; ``halfbyte.kernels.experts`` states what is computed.

    A token's result is the sum of its experts', each times its routing weight, in float32 in the order of its slots:
    the same bits in every run. Experts that another rank holds are null.

    On the CPU a call refuses ids that name no expert, and null experts. On a GPU nothing waits for the device: the
    results of such a token are NaN, and a later call on that GPU raises what this one could not; no call does while a
    CUDA graph is captured. Layouts that only ``experts-loop`` reads are slower there: it waits once for how many tokens
    each expert has, and in a graph every expert computes all tokens, or each slot's expert is copied first.

    Args:
        gate_up: (E, 2I, H), the experts held here; (E, I, H) without a gate.
        down: (E, H, I).
        activation: "silu", "gelu", "gelu_tanh", "relu2", or "swigluoai": (up + 1) * gate * sigmoid(1.702 * gate).
        limit: gate is at most this and up within plus or minus it before the activation; None for no limit.
        gate_up_order: of the rows of gate_up: "concatenated" (gate first), "up_first" or "interleaved" (gate even).
            Of a Weight, and of what is packed as rows, the rows are put in the first order once, and held so.
        gate_up_bias: (E, 2I) or (E, I), in the order of the rows; or None.
        down_bias: (E, H), or None.
        experts: how many there are with those that other ranks hold; by default E.
        local: the numbers, ascending, of the experts held here; by default 0..E-1.
        padding: whether ids that name no expert, such as -1, are skipped; else they are refused.
        gated: whether there is a gate; without one the activation is of up alone.
        null: "refuse" tokens that are routed to null experts, or "skip" those slots.
        precision: "exact", or "fp8" to allow that activations and weights are rounded as ``linear`` does in FP8: on a
            GPU where a kernel does so and is faster, elsewhere always. With "w4a4" activations are rounded to NVFP4,
            slowly, to measure accuracy.
        out_dtype: of the result, float32; by default that of the activations.

    Raises:
        UsageError: stacks that do not fit each other, an unknown activation, order or precision, a bias that does
            not fit.
        WeightError: a null weight.
    """

    def __init__(
        self,
        gate_up: Packed | Weight,
        down: Packed | Weight,
        *,
        activation: str = "silu",
        limit: float | None = None,
        gate_up_order: str = ORDERS[0],
        gate_up_bias: Any = None,
        down_bias: Any = None,
        experts: int | None = None,
        local: Sequence[int] | None = None,
        padding: bool = False,
        gated: bool = True,
        null: str = "refuse",
        precision: str = "exact",
        out_dtype: Any = None,
    ) -> None:
        super().__init__()
        count = down.shape[0]
        mixture = Mixture(
            activation=activation,
            limit=limit,
            gate_up_order=gate_up_order,
            experts=count if experts is None else experts,
            local=tuple(range(count)) if local is None else tuple(int(e) for e in local),
            padding=padding,
            gated=gated,
            null=null,
        )
        check_stacks(gate_up.shape, down.shape, mixture)
        if precision not in PRECISIONS:
            raise UsageError("unknown precision", got=repr(precision), expected=" or ".join(PRECISIONS))
        bias = as_bias(gate_up_bias, gate_up.shape[:-1])
        gate_up, bias, order = _in_order(gate_up, bias, gate_up_order)
        self.mixture = replace(mixture, gate_up_order=order)
        self.precision, self.out_dtype = precision, None if out_dtype is None else as_dtype(out_dtype, "out_dtype")
        self.num_experts, (_, self.hidden_size, self.intermediate_size) = self.mixture.experts, down.shape
        self.gate_up, self.down = Stack(as_packed(gate_up), bias, order), Stack(as_packed(down), down_bias)

    @classmethod
    def of(cls, layers: Sequence[Sequence[Weight]], layout: Layout | str = "rows", **options: Any) -> Experts:
        """The experts of (gate, up, down) each: no bit of any changes, and different scale2 become per-row.

        Args:
            layers: one for each expert, (up, down) where ``gated`` is False; all ``Weight.null`` for one that another
                rank holds.
            layout: a Layout or its key.
            options: of the constructor, and biases of the experts held here.

        Raises:
            UsageError: another number of layers.
            WeightError: no expert that is not null, one that is null in part, or weights that do not fit.
            LayoutError: a shape or value that the layout cannot hold.
        """
        needed = 3 if options.get("gated", True) else 2
        for e, own in enumerate(layers):
            if len(own) != needed:
                raise UsageError(f"expert {e} has other layers", got=len(own), expected=f"{needed} of them")
            if len({weight.is_null for weight in own}) > 1:
                raise WeightError(f"expert {e} is null in part")
        local = [e for e, own in enumerate(layers) if not own[0].is_null]
        if not local:
            raise WeightError("all experts are null", got=f"{len(layers)} experts")
        gate_up = Weight.stack([Weight.concat(layers[e][:-1], policy="exact") for e in local])
        down = Weight.stack([layers[e][-1] for e in local])
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
        rows = (2 if options.get("gated", True) else 1) * intermediate
        gate_up = without_data(layout, (experts, rows, hidden), per_row=per_row, **of)
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
        modules: Any = self._modules  # at once, where an attribute of a module takes a search
        one, two = modules["gate_up"], modules["down"]
        if torch.compiler.is_compiling():
            held = [(s._key, s.shape, s.held(), s._parameters["bias"]) for s in (one, two)]
            return traced(hidden, indices, weights, held, self.mixture, self.precision, self.out_dtype)
        biases = one._parameters["bias"], two._parameters["bias"]
        stacks = Stacks(gate_up=one.packed, down=two.packed, gate_up_bias=biases[0], down_bias=biases[1])
        of = self.mixture, self.precision, self.out_dtype
        return compute(hidden, indices, weights, stacks, of[0], precision=of[1], out_dtype=of[2])

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Each expert's layers, such as ("7.up_proj", weight), one expert unpacked at a time."""
        for place, e in enumerate(self.mixture.local):
            both: Any = self.gate_up.packed.expert(place).unpack()
            if self.mixture.gated:
                gate, both = _halves(both, self.mixture.gate_up_order)
                yield f"{e}.gate_proj", gate
            yield f"{e}.up_proj", both
            down: Any = self.down.packed.expert(place).unpack()
            yield f"{e}.down_proj", down

    def biases(self) -> Iterator[tuple[str, Tensor]]:
        """Those of each expert's layers, such as ("7.up_proj", bias), where there are any."""
        order = self.mixture.gate_up_order
        for place, e in enumerate(self.mixture.local):
            if self.gate_up.bias is not None:
                own = self.gate_up.bias.detach()[place]
                if self.mixture.gated:
                    gate, own = (own[::2], own[1::2]) if order == "interleaved" else own.chunk(2)
                    gate, own = (own, gate) if order == "up_first" else (gate, own)
                    yield f"{e}.gate_proj", gate
                yield f"{e}.up_proj", own
            if self.down.bias is not None:
                yield f"{e}.down_proj", self.down.bias.detach()[place]

    def form(self, top: int) -> ExpertsForm:
        """What decides which kernel runs where a token has ``top`` experts, for ``halfbyte.plan``."""
        gate_up, down = (
            Form(
                shape=stack.shape,
                layout=stack.layout,
                per_row=stack.held()["scale2"].shape[-2] != 1,
                pre_scale="pre_scale" in stack.held(),
                bias=stack.bias is not None,
            )
            for stack in (self.gate_up, self.down)
        )
        return ExpertsForm(gate_up=gate_up, down=down, mixture=self.mixture, top=top)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of them; the kernel is that for one token."""
        m = self.mixture
        held = "" if len(m.local) == m.experts else f", {len(m.local)} held here"
        limit = "" if m.limit is None else f", limit={m.limit}"
        how = f"gate_up={m.gate_up_order}" if m.gated else "no gate"
        precision = "" if self.precision == "exact" else f", precision={self.precision}"
        return (
            f"experts={m.experts}{held}, hidden={self.hidden_size}, intermediate={self.intermediate_size}, "
            f"activation={m.activation}{limit}, {how}{precision}, layout={self.layout.key}, kernel={self._kernel()}"
        )

    def _kernel(self) -> str:
        one, two = self.gate_up.packed, self.down.packed
        device: torch.device = one.buffers()["scale2"].device
        if device.type == "meta":
            return "no kernel: no data yet"
        if not self.mixture.local:
            return "no kernel: no experts"
        call = ExpertsCall.of(
            one,
            two,
            self.mixture,
            rows=1,
            top=1,
            dtype=dtype_for(self.layout, device),
            device=device.type,
            bias=self.gate_up.bias is not None,
            down_bias=self.down.bias is not None,
            precision=self.precision,
            capability=capability(device.index) if device.type == "cuda" else 0,
        )
        try:
            return chosen(call)[0].name
        except HalfbyteError as error:
            return f"no kernel: {str(error).rpartition('the nearest is ')[2]}"


def _in_order(
    gate_up: Packed | Weight, bias: torch.nn.Parameter | None, order: str
) -> tuple[Packed | Weight, torch.nn.Parameter | None, str]:
    """Gate_up with its gates first, where that is only a copy of rows; and the order that it is in then."""
    rows = isinstance(gate_up, Weight) or (isinstance(gate_up.layout, Rows) and not _is_meta(gate_up))
    if order == ORDERS[0] or not rows:
        return gate_up, bias, order
    weight: Any = gate_up if isinstance(gate_up, Weight) else gate_up.unpack()
    at = torch.arange(weight.n)
    moved = torch.cat([at[::2], at[1::2]]) if order == "interleaved" else at.roll(weight.n // 2)
    made = weight.permute_rows(moved if is_torch(weight.codes) else moved.numpy())
    if bias is not None:
        bias = torch.nn.Parameter(bias.detach()[:, moved.to(bias.device)], requires_grad=False)
    return made, bias, ORDERS[0]


def _is_meta(packed: Packed) -> bool:
    return bool(getattr(packed.buffers()["scale2"], "is_meta", False))


def _as_state(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _halves(both: Weight, order: str) -> tuple[Weight, Weight]:
    """Gate and up of one expert."""
    if order == "interleaved":
        even = torch.arange(0, both.n, 2)
        both = both.permute_rows(torch.cat([even, even + 1]))
    half = both.n // 2
    first, second = both.split([half, half])
    return (second, first) if order == "up_first" else (first, second)
