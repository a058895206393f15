"""``normed``, a product of what ``add_norm`` gives: what kernels are given, and the one that calls others.

::

    total = round(x + residual)
    normed = round(norm * round(total / sqrt(mean(total * total) + eps)))
    out = round(normed @ weight.T + bias)

These are ``add_norm`` and ``linear`` one after the other, to the bit where the sums are in the same order.
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
from halfbyte.kernels.gated import bound_linear
from halfbyte.kernels.step import AddNormArgs, check
from halfbyte.layouts import Packed
from halfbyte.numerics import Array


@dataclass(frozen=True, kw_only=True)
class NormedCall(Call):
    """As Call; results are of the activations' dtype."""

    op: str = "normed"

    def linear(self) -> Call:
        """The product alone."""
        return Call(**{field.name: getattr(self, field.name) for field in fields(Call) if field.name != "op"})


@dataclass(frozen=True, kw_only=True, eq=False)
class NormedArgs:
    """The arguments of a kernel for ``normed``.

    Args:
        x: (M, K) float32, bfloat16 or float16, row-major.
        residual: (M, K) of that dtype.
        norm: (K,) of that dtype.
        eps: added to the mean of squares.
        weight: (N, K).
        bias: (N,) float32, bfloat16 or float16, or None.
        out: (M, N) of the dtype of x; written.
        total: (M, K) of that dtype; written.
    """

    op: ClassVar[str] = "normed"
    x: Array
    residual: Array
    norm: Array
    eps: float
    weight: Packed
    bias: Array | None
    out: Array
    total: Array

    def __post_init__(self) -> None:
        check_kind(self.weight.layout)
        (n, k), m = self.weight.shape[-2:], self.x.shape[0]
        if tuple(self.x.shape) != (m, k) or tuple(self.out.shape) != (m, n):
            raise UsageError(
                "x, weight and out do not fit each other",
                got=f"{tuple(self.x.shape)}, {self.weight.shape} and {tuple(self.out.shape)}",
                expected="(M, K), (N, K) and (M, N)",
            )
        for name, shape in {"residual": (m, k), "norm": (k,), "total": (m, k)}.items():
            check(self.op, name, getattr(self, name), self.x, shape)
        if dtype_name(self.out.dtype) != dtype_name(self.x.dtype):
            raise UsageError("out is of another dtype than x", got=dtype_name(self.out.dtype))

    def arrays(self) -> tuple[Any, ...]:
        """What a bound kernel takes."""
        return self.x, self.residual, self.norm, self.eps, self.bias, self.out, self.total

    def call(self) -> NormedCall:
        """What decides which kernel runs on these arrays."""
        linear = Call.on(
            self.weight,
            rows=self.x.shape[0],
            dtype=dtype_name(self.x.dtype),
            out_dtype=dtype_name(self.x.dtype),
            device=device_of(self.x),
            library=library_of(self.x),
            bias=self.bias is not None,
            capability=capability_of(self.x),
        )
        return NormedCall(**{field.name: getattr(linear, field.name) for field in fields(Call) if field.name != "op"})


def normed_cost(call: NormedCall) -> Cost:
    """The product's, with the residual, the sum and the norm's weight."""
    product = linear_cost(call.linear())
    width, size = call.shape[-1], float_dtype(call.dtype).itemsize
    return Cost(
        bytes=product.bytes + (2 * call.rows + 1) * width * size, flops=product.flops + 5 * call.rows * width
    )


def _bind(args: NormedArgs) -> Callable[..., None]:
    import torch

    from halfbyte.kernels import select

    shape, of = tuple(args.x.shape), {"dtype": args.x.dtype, "device": args.x.device}
    between = torch.empty(shape, **of)
    norm_args = AddNormArgs(
        x=args.x, residual=args.residual, weight=args.norm, eps=args.eps, normed=between, total=args.total
    )
    add_norm = select(AddNormArgs, norm_args.call()).bind
    assert add_norm is not None
    normalize = add_norm(norm_args)
    multiply = bound_linear(LinearArgs(x=between, weight=args.weight, bias=args.bias, out=args.out))

    def run(x: Any, residual: Any, norm: Any, eps: float, bias: Any, out: Any, total: Any) -> None:
        between = torch.empty(shape, **of)
        normalize(x, residual, norm, eps, between, total)
        multiply(between, bias, out)

    return run


COMPOSED: Final = Kernel(
    name="normed-composed",
    bundle=NormedArgs,
    description="add_norm and linear one after the other",
    refuse=lambda call: why_not_torch(call.library),
    load=load_torch,
    bind=_bind,
    cost=normed_cost,
)
