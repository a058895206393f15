"""What decides about a weight, without the weight: to plan for one from its headers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from halfbyte.errors import LayoutError, UsageError
from halfbyte.kernels import Call, Fp8Call, Int8Call
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
        resident = self.kind == "fp8"
        layout = Rows() if resident else self.placed
        return Fp8Call(layout=layout, capability=sm, resident=resident, blocks=self.blocks, **of)
