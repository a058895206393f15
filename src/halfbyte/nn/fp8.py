"""Fp8Linear: a layer whose checkpoint has it in FP8, held as that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from halfbyte.errors import UsageError
from halfbyte.layouts import Layout, Rows
from halfbyte.nn.base import Quantized, apply_to_all_but_weights, as_bias, as_dtype
from halfbyte.operands import precision_of
from halfbyte.ops import linear
from halfbyte.weight import Fp8Weight, to_torch


class Fp8Linear(Quantized):
    """A linear layer on an FP8 weight, which stays in one byte for each value.

    By default activations are not rounded: each call decodes the weight of this one layer. With a scale for each
    tensor or row its values are exact in any dtype, and the scale multiplies sums in float32. With one for each block
    the decoded weight and the product are float32. ``precision="fp8"`` rounds activations for each token instead, and
    multiplies in FP8, as ``halfbyte.linear`` does with an Fp8Weight; a weight with blocks has no kernel for that.

    Args:
        weight: (N, K); NumPy arrays become tensors.
        bias: (N,) float32, bfloat16 or float16.
        out_dtype: as for Linear.
        precision: None or "exact", or "fp8".

    Raises:
        UsageError: another kind of weight, expert axes, a bias that does not fit, an unknown dtype or precision.
    """

    data: Tensor
    scale: Tensor
    input_scale: Tensor | None
    pre_scale: Tensor | None
    bias: torch.nn.Parameter | None

    def __init__(
        self, weight: Fp8Weight, bias: Any = None, *, out_dtype: Any = None, precision: str | None = None
    ) -> None:
        super().__init__()
        if not isinstance(weight, Fp8Weight):
            raise UsageError("not an FP8 weight", got=type(weight).__name__, expected="an Fp8Weight")
        if len(weight.shape) != 2:
            raise UsageError("an Fp8Linear holds one matrix", got=weight.shape, expected="(N, K)")
        if precision not in (None, "exact", "fp8"):
            precision_of(weight, precision)
        if precision == "fp8" and weight.block is not None:
            raise UsageError("no kernel takes an FP8 weight with a scale for each block", got=weight.block)
        self.out_features, self.in_features = self.shape = weight.shape
        self.block, self.granularity = weight.block, weight.granularity
        self.out_dtype = None if out_dtype is None else as_dtype(out_dtype, "out_dtype")
        self.precision = precision
        for name in ("data", "scale", "input_scale", "pre_scale"):
            buffer = getattr(weight, name)
            self.register_buffer(name, None if buffer is None else to_torch(buffer).contiguous())
        self.register_parameter("bias", as_bias(bias, (self.out_features,)))
        self._weight: Fp8Weight | None = None

    layout: Layout = Rows()

    @property
    def weight(self) -> Fp8Weight:
        """The weight as it is held; its arrays are views of the module's buffers."""
        buffers = tuple(self._buffers[name] for name in ("data", "scale", "input_scale", "pre_scale"))
        known = self._weight
        if known is None or self._of is None or any(a is not b for a, b in zip(self._of, buffers, strict=True)):
            data, scale, input_scale, pre_scale = buffers
            made: dict[str, Any] = {"data": data, "scale": scale, "block": self.block}
            known = Fp8Weight(**made, input_scale=input_scale, pre_scale=pre_scale)
            self._weight, self._of = known, buffers
        return known

    _of: tuple[Tensor | None, ...] | None = None

    def weights(self) -> Iterator[tuple[str, Fp8Weight]]:
        """As of every Quantized: the weight itself."""
        yield "", self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N) in x's dtype, or ``out_dtype``; UsageError where x has another K, or is no float."""
        to = x.dtype if self.out_dtype is None else self.out_dtype
        if self.precision == "fp8":
            y: Tensor = linear(x, self.weight, self.bias, out_dtype=to)
            return y
        k = self.in_features
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UsageError("x is of the wrong dtype", got=str(x.dtype), expected="float32, bfloat16, float16")
        if x.ndim < 1 or x.shape[-1] != k:
            raise UsageError("the last axis of x is not the weight's K", got=tuple(x.shape), expected=f"(..., {k})")
        rows = x.reshape(-1, k)
        if self.pre_scale is not None:
            rows = rows.float() * self.pre_scale.float()
        values = self.data.view(torch.float8_e4m3fn)
        if self.block is not None:
            scale = self.scale.repeat_interleave(self.block[0], 0)[: self.out_features]
            scale = scale.repeat_interleave(self.block[1], 1)[:, :k]
            total = rows.float() @ (values.float() * scale).T
        elif rows.is_cuda and rows.dtype != torch.float32:
            total = torch.mm(rows, values.to(rows.dtype).T, out_dtype=torch.float32) * self.scale.reshape(-1)
        else:
            total = (rows.float() @ values.float().T) * self.scale.reshape(-1)
        if self.bias is not None:
            total = total + self.bias.float()
        return total.to(to).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of the layer."""
        how = "activations rounded to FP8" if self.precision == "fp8" else "decoded in each call"
        return (
            f"N={self.out_features}, K={self.in_features}, FP8 rows with a scale for each {self.granularity}, "
            f"bias={self.bias is not None}, {how}"
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_weight": None, "_of": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        apply_to_all_but_weights(self, super()._apply, fn, recurse)
        return self
