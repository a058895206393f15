"""What a kernel is: one way to compute one op for one layout on one kind of device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from halfbyte.layouts import Layout
from halfbyte.numerics import Array
from halfbyte.weight import float_dtype

Library = Literal["numpy", "torch"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """All that decides which kernel runs; no arrays.

    Args:
        op: "linear".
        layout: where the weight's bytes are.
        shape: (*E, N, K) of the weight, K without padding.
        per_row: scale2 differs by output feature.
        pre_scale: the activations are multiplied by a (K,) vector first.
        rows: M, the rows of activations.
        dtype: of the activations, "float32", "bfloat16" or "float16".
        out_dtype: of the result, one of the same.
        device: "cpu", "cuda", ...
        library: that of all arrays.
        bias: a bias is added.
    """

    op: str = "linear"
    layout: Layout
    shape: tuple[int, ...]
    per_row: bool
    pre_scale: bool
    rows: int
    dtype: str
    out_dtype: str
    device: str
    library: Library
    bias: bool


@dataclass(frozen=True)
class Cost:
    """What a call must do at the least: bytes read and written once each, and floating-point operations."""

    bytes: int
    flops: int


class Launch(Protocol):
    """How a kernel runs."""

    def __call__(self, x: Array, buffers: Mapping[str, Array], bias: Array | None, out: Array) -> None:
        """Write ``out`` (M, N) from a contiguous ``x`` (M, K) and the buffers of a Packed; M is not 0."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute ``op``.

    Args:
        name: unique; what HALFBYTE_KERNEL and ``plan`` call it.
        op: "linear".
        description: one line for ``plan``.
        refuse: None if the kernel computes this call, else the reason in words.
        launch: runs an accepted call on the buffers of a Packed.
        cost: what an accepted call must move and compute.
    """

    name: str
    op: str
    description: str
    refuse: Callable[[Call], str | None]
    launch: Launch
    cost: Callable[[Call], Cost]


def linear_cost(call: Call) -> Cost:
    """The least that a linear call costs: the weight with its layout's padding, x, bias and result, once each."""
    *_, n, k = call.shape
    weight = sum(call.layout.sizes(call.shape).values())
    vectors = 4 * ((n if call.per_row else 1) + call.pre_scale * k + call.bias * n)
    moved = call.rows * (k * float_dtype(call.dtype).itemsize + n * float_dtype(call.out_dtype).itemsize)
    return Cost(bytes=weight + vectors + moved, flops=2 * call.rows * n * k)
