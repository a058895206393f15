"""What decides about a weight, without the weight: to plan for one from its headers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from halfbyte.errors import LayoutError, UsageError
from halfbyte.kernels import Call, ExpertsCall, Fp8Call, Int8Call, W4a4Call
from halfbyte.kernels.experts import Mixture, check_stacks
from halfbyte.layouts import Layout, Rows, parse


@dataclass(frozen=True, kw_only=True)
class Form:
    """What decides about a weight that is not there yet; ``plan`` takes it in the place of one.

    Args:
        shape: (*E, N, K).
        layout: that it will be in, or its name; of an FP8 weight always rows.
        per_row: scale2, or the scale of an FP8 weight, differs by output feature.
        pre_scale: the activations are multiplied by a (K,) vector first.
        bias: one is added.
        kind: "nvfp4", or "fp8" for an Fp8Weight.
        blocks: an FP8 weight has a scale for each of its blocks.
        input_scale: the weight has one, by which W4A4 products round activations.

    Raises:
        UsageError: another kind, or no shape of a weight.
        LayoutError: a layout that is not known, or that has no such shape.
    """

    shape: tuple[int, ...]
    layout: Layout | str = "rows"
    per_row: bool = False
    pre_scale: bool = False
    bias: bool = False
    kind: str = "nvfp4"
    blocks: bool = False
    input_scale: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("nvfp4", "fp8"):
            raise UsageError("no product of this kind of weight is planned", got=self.kind, expected="nvfp4 or fp8")
        if len(self.shape) < 2 or min(self.shape) < 0:
            raise UsageError("not the shape of a weight", got=self.shape, expected="(*E, N, K)")
        layout = self.placed
        reason = layout.needs(self.shape) if self.kind == "nvfp4" else None
        if reason:
            raise LayoutError(f"layout {layout.name} has no such shape: {reason}", got=self.shape)

    @property
    def placed(self) -> Layout:
        """The layout itself."""
        return parse(self.layout) if isinstance(self.layout, str) else self.layout

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales in the layout with its padding, scale2 and pre_scale, or of FP8 data and scales."""
        *experts, n, k = self.shape
        if self.kind == "fp8":
            scales = -(-n // 128) * -(-k // 128) if self.blocks else n if self.per_row else 1
            return prod(experts) * (n * k + 4 * scales) + 4 * self.pre_scale * k
        packed = sum(self.placed.sizes(self.shape).values())
        return prod(experts) * (packed + 4 * (n if self.per_row else 1)) + 4 * self.pre_scale * k

    def call(self, precision: str, of: dict[str, Any], sm: int) -> Call | Int8Call:
        """The call in a precision that ``precision_of`` gave, with the rest of its fields."""
        of = of | {"shape": self.shape, "per_row": self.per_row, "pre_scale": self.pre_scale, "bias": self.bias}
        if precision == "int8":
            return Int8Call(**{name: of[name] for name in of if name != "elsewhere"} | {"per_row": True})
        if precision == "exact":
            return Call(layout=self.placed, capability=sm, **of)
        if precision == "w4a4":
            return W4a4Call(layout=self.placed, capability=sm, static=self.input_scale, **of)
        resident = self.kind == "fp8"
        layout = Rows() if resident else self.placed
        return Fp8Call(layout=layout, capability=sm, resident=resident, blocks=self.blocks, **of)


@dataclass(frozen=True, kw_only=True)
class ExpertsForm:
    """What decides about the weights of experts that are not there yet; ``plan`` of "experts" takes it.

    Args:
        gate_up: of the shape (E, 2I, H), or (E, I, H) without a gate.
        down: of the shape (E, H, I).
        mixture: how they compute.
        top: k, the experts of a token.

    Raises:
        UsageError: forms that do not fit each other, or are not NVFP4.
    """

    gate_up: Form
    down: Form
    mixture: Mixture
    top: int

    def __post_init__(self) -> None:
        check_stacks(self.gate_up.shape, self.down.shape, self.mixture)
        if self.gate_up.kind != "nvfp4" or self.down.kind != "nvfp4":
            raise UsageError("experts are NVFP4", got=f"{self.gate_up.kind} and {self.down.kind}")
        if not self.top >= 0:
            raise UsageError("a token has experts, or none", got=self.top)

    @staticmethod
    def of(
        experts: int,
        hidden: int,
        inner: int,
        *,
        top: int,
        layout: Layout | str = "rows",
        activation: str = "silu",
        gated: bool = True,
        local: int | None = None,
    ) -> ExpertsForm:
        """Of experts whose gate and up may have different scale2.

        Args:
            experts: how many there are.
            hidden: H.
            inner: I.
            top: k.
            layout: of both stacks.
            activation: as of ``halfbyte.nn.Experts``.
            gated: whether there is a gate.
            local: how many of them are held here; by default all.
        """
        count = experts if local is None else local
        mixture = Mixture(
            activation=activation, limit=None, gate_up_order="concatenated", experts=experts,
            local=tuple(range(count)), padding=True, gated=gated, null="skip",
        )  # fmt: skip
        rows = mixture.parts * inner
        return ExpertsForm(
            gate_up=Form(shape=(count, rows, hidden), layout=layout, per_row=gated),
            down=Form(shape=(count, hidden, inner), layout=layout),
            mixture=mixture,
            top=top,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of both stacks."""
        return self.gate_up.nbytes + self.down.nbytes

    def call(self, precision: str, of: dict[str, Any], sm: int) -> ExpertsCall:
        """The call in a precision, with the rest of its fields."""
        one, two = self.gate_up, self.down
        return ExpertsCall(
            layout=one.placed, shape=one.shape, per_row=one.per_row, pre_scale=one.pre_scale or two.pre_scale,
            bias=one.bias, capability=sm, mixture=self.mixture, top=self.top, indices="int64", weights="float32",
            down_layout=two.placed, down_per_row=two.per_row, down_bias=two.bias, precision=precision, **of,
        )  # fmt: skip
