"""Activations of 9 to 16 tokens in the order in which the lanes of ``gluon-decode`` need them, and the product of such.

That kernel's x is otherwise (M, K): a lane reads four pieces of 16 bytes of a unit of 64 k, each from another row, and
lines of all rows go through the cache. In order, of a unit first come k with bit 3 clear of the first 8 rows, then
those with it set, then both of the other rows; and of each of these four lane 4 g + q reads the piece of row g and
block q as the one behind that of lane 4 g + q - 1. There is always room for 16 rows and whole units; what lies in rows
from M on and beyond K is never used.

Only ops of a decoder's step write or read this. What else computes declines it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from halfbyte.arrays import dtype_name
from halfbyte.errors import UsageError
from halfbyte.kernels.base import Call, Cost, capability_of, check_kind, device_of, library_of, linear_cost
from halfbyte.layouts import Packed
from halfbyte.numerics import Array

FEWEST: Final = 9
"""Tokens from which on it pays; fewer fill half of the room, and their rows are read as fast."""
ROWS: Final = 16
UNIT: Final = 64


def length(k: int) -> int:
    """Elements of (M, K) in order."""
    return ROWS * UNIT * -(-k // UNIT)


def shape_of(a: Array, m: int, k: int) -> tuple[int, ...]:
    """What (m, k) must be shaped as to lie as ``a`` does: in order if that has one axis, else in rows."""
    return (length(k),) if len(a.shape) == 1 else (m, k)


def ordered(x: Any) -> Any:
    """(M, K) of torch's in order, (``length(K)``,); zeros where there is nothing."""
    from torch.nn.functional import pad

    m, k = x.shape
    x = pad(x, (0, -k % UNIT, 0, ROWS - m))
    return x.reshape(2, 8, -1, 4, 2, 8).permute(2, 0, 4, 1, 3, 5).reshape(-1)  # rh g u q i e -> u rh i g q e


def in_rows(a: Any, m: int, k: int) -> Any:
    """The (M, K) that lie in order in (``length(K)``,)."""
    x = a.reshape(-1, 2, 2, 8, 4, 8).permute(1, 3, 0, 4, 2, 5)
    return x.reshape(ROWS, -1)[:m, :k]


@dataclass(frozen=True, kw_only=True)
class InOrderCall(Call):
    """As Call, of x in order."""

    op: str = "linear_in_order"

    def linear(self) -> Call:
        """The same product of rows."""
        same = {field.name: getattr(self, field.name) for field in fields(Call) if field.name != "op"}
        return Call(**same)


@dataclass(frozen=True, kw_only=True, eq=False)
class InOrderArgs:
    """The arguments of a kernel for ``linear_in_order``, ``linear`` of an x that lies in order.

    Args:
        x: (``length(K)``,) bfloat16 or float16.
        weight: (N, K).
        bias: (N,) float32, bfloat16 or float16, or None.
        out: (M, N) of the dtype of x; written.

    Raises:
        UsageError: a weight that is not NVFP4, or shapes that do not fit each other.
    """

    op: ClassVar[str] = "linear_in_order"
    x: Array
    weight: Packed
    bias: Array | None
    out: Array

    def __post_init__(self) -> None:
        check_kind(self.weight.layout)
        n, k = self.weight.shape[-2:]
        got = tuple(self.x.shape), self.weight.shape, tuple(self.out.shape)
        if tuple(self.x.shape) != (length(k),) or tuple(self.out.shape[1:]) != (n,):
            raise UsageError(
                "x, weight and out do not fit each other", got=f"{got[0]}, {got[1]} and {got[2]}",
                expected=f"({length(k)},), (N, K) and (M, N)",
            )  # fmt: skip

    def call(self) -> InOrderCall:
        """What decides which kernel runs on these arrays."""
        linear = Call.on(
            self.weight,
            rows=self.out.shape[0],
            dtype=dtype_name(self.x.dtype),
            out_dtype=dtype_name(self.out.dtype),
            device=device_of(self.x),
            library=library_of(self.x),
            bias=self.bias is not None,
            capability=capability_of(self.x),
        )
        same = {field.name: getattr(linear, field.name) for field in fields(Call) if field.name != "op"}
        return InOrderCall(**same)


def in_order_cost(call: InOrderCall) -> Cost:
    """As of rows."""
    return linear_cost(call.linear())
