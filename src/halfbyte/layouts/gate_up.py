"""``gate_up``: the rows of a fused gate and up in the order that a kernel takes them, in any other layout.

A wrapper, and no field of each layout: the order says what the rows mean and not where their bytes go, so it is stated
once, every layout takes it, and the buffers are exactly those that the inner layout gives for the rows in that order.
A kernel of the inner layout runs on them unchanged; a second scale for each row is in that order too.

The weight itself always has all rows of gate first, then all of up (h: gate or up, i: the row within).

``gate_up``, drawn from its statement::

    concatenated     h i
        step  size  moves by
        1     N/2   +1 n
        N/2   2     +N/2 n
        first, of N = 16: n0, n1, n2, n3, n4, n5, n6, n7
    up_first         -h i
        step  size  moves by
        1     N/2   +1 n
        N/2   2     -N/2 n
        first, of N = 16: n8, n9, n10, n11, n12, n13, n14, n15
    interleaved      i h
        step  size  moves by
        1     2     +N/2 n
        2     N/2   +1 n
        first, of N = 16: n0, n8, n1, n9, n2, n10, n3, n11
    up_first_interleaved  i -h
        step  size  moves by
        1     2     -N/2 n
        2     N/2   +1 n
        first, of N = 16: n8, n0, n9, n1, n10, n2, n11, n3
    up_first_64      i -h r
        step  size   moves by
        1     64     +1 n
        64    2      -N/2 n
        128   N/128  +64 n
        first, of N = 1024: n512, n513, n514, n515, n516, n517, n518, n519
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from halfbyte.errors import LayoutError
from halfbyte.layouts.base import Kind, Layout, Packable, Packed
from halfbyte.layouts.executors import Plane, arrange, restore
from halfbyte.layouts.order import Order
from halfbyte.numerics import Array
from halfbyte.weight import Weight

ROWS: Mapping[str, Order] = {
    "concatenated": Order("(h i) k -> h i k", h=2),
    "up_first": Order("(h i) k -> -h i k", h=2),
    "interleaved": Order("(h i) k -> i h k", h=2),
    "up_first_interleaved": Order("(h i) k -> i -h k", h=2),
    "up_first_64": Order("(h i r) k -> i -h r k", h=2, r=64),
}
"""Who takes which: concatenated gate|up most engines; up|gate FlashInfer's CUTLASS path and Edge-LLM on SM120;
interleaved gpt-oss; up before gate, row by row, TensorRT-LLM (trtllm-gen); in runs of 64 Edge-LLM on SM110."""


@dataclass(frozen=True)
class GateUp(Layout):
    """The rows of gate and up in a stated order, inside another layout.

    Args:
        order: "concatenated", "up_first", "interleaved", "up_first_interleaved" or "up_first_64". There is no default:
            a wrong order is silent garbage.
        layout: where the bytes of the rows in that order go.
    """

    name: ClassVar[str] = "gate_up"
    used_by: ClassVar[str] = "fused gate and up of gated layers, dense and experts"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {"order": tuple(ROWS)}
    row_orders: ClassVar[Mapping[str, Order]] = ROWS
    order: str
    layout: Layout

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.layout, GateUp):
            raise LayoutError("gate_up inside gate_up", got=self.key)

    @property
    def rows(self) -> Order:
        """The order of the rows alone, for any number of columns."""
        return ROWS[self.order]

    @property
    def kind(self) -> Kind:
        return self.layout.kind

    @property
    def codes(self) -> Order:
        return self.layout.codes

    @property
    def scales(self) -> Order:
        return self.layout.scales

    @property
    def buffers(self) -> Mapping[str, Mapping[Plane, int]]:
        return self.layout.buffers

    @property
    def extras(self) -> tuple[str, ...]:
        return self.layout.extras

    @property
    def multiples(self) -> tuple[int, int]:
        return self.rows.multiples[0], 1

    @property
    def scale_block(self) -> tuple[int, int]:
        return self.layout.scale_block

    @property
    def refuses(self) -> str:
        return self.layout.refuses

    @property
    def zero_blocks(self) -> Literal["kept", "canonical"]:
        return self.layout.zero_blocks

    def of_kind(self, kind: str) -> Layout | None:
        inner = self.layout.of_kind(kind)
        return None if inner is None else dataclasses.replace(self, layout=inner)

    def needs(self, shape: Sequence[int]) -> str | None:
        return super().needs(shape) or self.layout.needs(shape)

    def refuse(self, weight: Packable) -> str | None:
        reason = super().refuse(weight)
        if reason is None:
            inner = self.layout.refuse(self._in_order(weight))
            reason = inner and f"with its rows {self.order}, {inner}"
        return reason

    def offsets(self, shape: Sequence[int], plane: Plane) -> tuple[Any, Any]:
        first, second = self.layout.offsets(shape, plane)
        moved, _ = self.rows.offsets((shape[-2], 1))
        return first[moved], second

    def place(self, weight: Packable) -> Packed:
        return Packed(self, weight.shape, self.layout.place(self._in_order(weight)).buffers())

    def unpack(self, packed: Packed) -> Packable:
        weight = self.layout.unpack(Packed(self.layout, packed.shape, packed.buffers()))
        return _by_rows(
            weight,
            lambda a: restore(self.rows, a.reshape(*a.shape[:-2], a.shape[-2] * a.shape[-1]), tuple(a.shape[-2:])),
        )

    def _in_order(self, weight: Packable) -> Packable:
        return _by_rows(weight, lambda a: arrange(self.rows, a).reshape(a.shape))


def _by_rows(weight: Packable, move: Callable[[Array], Array]) -> Packable:
    """The weight with all that it has for each row moved."""
    moved = {"codes": move(weight.codes), "scales": move(weight.scales)}
    if isinstance(weight, Weight) and weight.per_row:
        moved["scale2"] = move(weight.scale2)
    return weight.replace(**moved)
