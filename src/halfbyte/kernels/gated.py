"""``gated``, a product with the gate behind it: what kernels are given, and the one that calls two others.

::

    out = round(activation(round(x @ gate.T + bias)) * round(x @ up.T + bias))

These are ``linear`` and ``gate`` one after the other, to the bit where the sums are in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from halfbyte.arrays import dtype_name, float_dtype
from halfbyte.errors import UsageError
from halfbyte.kernels.base import (
    Call,
    Cost,
    Kernel,
    LinearArgs,
    capability_of,
    check_kind,
    device_of,
    library_of,
    linear_cost,
    load_torch,
    why_not_torch,
)
from halfbyte.kernels.in_order import length
from halfbyte.kernels.step import ACTIVATIONS, GateArgs
from halfbyte.layouts import Packed
from halfbyte.numerics import Array


@dataclass(frozen=True, kw_only=True)
class GatedCall(Call):
    """As Call, of a weight (2 I, K); results are of the activations' dtype."""

    op: str = "gated"
    activation: str
    in_order: bool = False

    def linear(self) -> Call:
        """The product alone."""
        same = {field.name: getattr(self, field.name) for field in fields(Call) if field.name != "op"}
        return Call(**same)


@dataclass(frozen=True, kw_only=True, eq=False)
class GatedArgs:
    """The arguments of a kernel for ``gated``.

    Args:
        x: (M, K) float32, bfloat16 or float16, row-major; or (``length(K)``,), which lies in order.
        weight: (2 I, K), the rows of the gate before those of up.
        bias: (2 I,) float32, bfloat16 or float16, or None.
        activation: one of ``ACTIVATIONS``.
        out: (M, I) of the dtype of x, or (``length(I)``,) if x lies in order; written.
        rows: M, if x lies in order.
    """

    op: ClassVar[str] = "gated"
    x: Array
    weight: Packed
    bias: Array | None
    activation: str
    out: Array
    rows: int | None = None

    def __post_init__(self) -> None:
        check_kind(self.weight.layout)
        if self.activation not in ACTIVATIONS:
            raise UsageError("unknown activation", got=repr(self.activation), expected=" or ".join(ACTIVATIONS))
        n, k = self.weight.shape[-2:]
        m = self.x.shape[0]
        x, out = ((m, k), (m, n // 2)) if self.rows is None else ((length(k),), (length(n // 2),))
        if n % 2 or tuple(self.x.shape) != x or tuple(self.out.shape) != out:
            raise UsageError(
                "x, weight and out do not fit each other",
                got=f"{tuple(self.x.shape)}, {self.weight.shape} and {tuple(self.out.shape)}",
                expected="(M, K), (2 I, K) and (M, I)" if self.rows is None else f"{x}, (2 I, K) and {out}",
            )
        if dtype_name(self.out.dtype) != dtype_name(self.x.dtype):
            raise UsageError("out is of another dtype than x", got=dtype_name(self.out.dtype))

    def call(self) -> GatedCall:
        """What decides which kernel runs on these arrays."""
        linear = Call.on(
            self.weight,
            rows=self.x.shape[0] if self.rows is None else self.rows,
            dtype=dtype_name(self.x.dtype),
            out_dtype=dtype_name(self.x.dtype),
            device=device_of(self.x),
            library=library_of(self.x),
            bias=self.bias is not None,
            capability=capability_of(self.x),
        )
        same = {field.name: getattr(linear, field.name) for field in fields(Call) if field.name != "op"}
        return GatedCall(activation=self.activation, in_order=self.rows is not None, **same)


def gated_cost(call: GatedCall) -> Cost:
    """The product's, with half of its results."""
    whole = linear_cost(call.linear())
    half = call.rows * call.shape[-2] // 2
    return Cost(bytes=whole.bytes - half * float_dtype(call.dtype).itemsize, flops=whole.flops + 4 * half)


def _refuse(call: GatedCall) -> tuple[str, ...]:
    return *why_not_torch(call.library), *(("multiplies x in rows",) if call.in_order else ())


def _bind(args: GatedArgs) -> Callable[[Array, Array | None, Array], None]:
    import torch

    from halfbyte.kernels import select

    rows, n = args.x.shape[0], args.weight.shape[0]
    of = {"dtype": args.x.dtype, "device": args.x.device}
    both = torch.empty((rows, n), **of)
    weight, activation = args.weight, args.activation
    linear_args = LinearArgs(x=args.x, weight=weight, bias=args.bias, out=both)
    gate_args = GateArgs(gate_up=both, activation=activation, out=args.out)
    product, gate = select(LinearArgs, linear_args.call()), select(GateArgs, gate_args.call())
    multiply = None if product.bind is None else product.bind(linear_args)
    activate = gate.bind(gate_args) if gate.bind else None

    def run(x: Any, bias: Any, out: Any) -> None:
        both = torch.empty((rows, n), **of)
        if multiply is None:
            product.run(LinearArgs(x=x, weight=weight, bias=bias, out=both))
        else:
            multiply(x, bias, both)
        if activate is None:
            gate.run(GateArgs(gate_up=both, activation=activation, out=out))
        else:
            activate(both, out)

    return run


COMPOSED: Final = Kernel(
    name="gated-composed",
    bundle=GatedArgs,
    description="linear and gate one after the other",
    refuse=_refuse,
    load=load_torch,
    bind=_bind,
    cost=gated_cost,
)
