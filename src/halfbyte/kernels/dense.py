"""``dense``, a product with a weight that is not quantized, such as a head's: what kernels are given, and torch's.

::

    y = round(sum(x * w) + bias)        sums in float32, in an order that the kernel fixes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from halfbyte.arrays import float_dtype
from halfbyte.kernels.base import Cost, Kernel, load_torch, why_not_torch
from halfbyte.kernels.step import StepCall, check, check_axes, place_of
from halfbyte.numerics import Array


@dataclass(frozen=True, kw_only=True)
class DenseCall(StepCall):
    """As StepCall; with N and K."""

    op: str = "dense"
    shape: tuple[int, int]
    bias: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseArgs:
    """The arguments of a kernel for ``dense``.

    Args:
        x: (M, K) float32, bfloat16 or float16.
        weight: (N, K) of the dtype of x.
        bias: (N,) of the dtype of x, or None.
        out: (M, N) of the dtype of x; written.
    """

    op: ClassVar[str] = "dense"
    x: Array
    weight: Array
    bias: Array | None
    out: Array

    def __post_init__(self) -> None:
        m, k = check_axes(self.x, "x", 2)
        n = check_axes(self.weight, "weight", 2)[0]
        check(self.op, "x", self.x, self.x, (m, k))
        check(self.op, "weight", self.weight, self.x, (n, k))
        check(self.op, "out", self.out, self.x, (m, n))
        if self.bias is not None:
            check(self.op, "bias", self.bias, self.x, (n,))

    def arrays(self) -> tuple[Any, ...]:
        """What a bound kernel takes."""
        return self.x, self.weight, self.bias, self.out

    def call(self) -> DenseCall:
        """What decides which kernel runs on these arrays."""
        n, k = self.weight.shape
        return DenseCall(shape=(n, k), bias=self.bias is not None, **place_of(self.x, self.x.shape[0]))


def dense_cost(call: DenseCall) -> Cost:
    """The weight, activations, bias and results, once each."""
    (n, k), size = call.shape, float_dtype(call.dtype).itemsize
    return Cost(bytes=size * (n * k + call.rows * (n + k) + n * call.bias), flops=2 * call.rows * n * k)


def _bind(args: DenseArgs) -> Callable[..., None]:
    import torch

    def run(x: Any, weight: Any, bias: Any, out: Any) -> None:
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    return run


TORCH: Final = Kernel(
    name="dense-torch",
    bundle=DenseArgs,
    description="torch's linear, any device",
    refuse=lambda call: why_not_torch(call.library, call.elsewhere),
    load=load_torch,
    bind=_bind,
    cost=dense_cost,
)
