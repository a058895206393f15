"""Linear: a layer on an NVFP4 weight; and one on a weight that another module holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfbyte.layouts import Layout, Packed
from halfbyte.nn.base import Holder, Quantized, as_bias, as_dtype, kernel_for_one, one_matrix, without_data
from halfbyte.operands import precision_of
from halfbyte.ops import linear
from halfbyte.torch_ops import traced
from halfbyte.weight import Weight


class Linear(Holder):
    """A linear layer on an NVFP4 weight: ``halfbyte.linear(x, weight, bias)``.

    Its buffers are those of the Packed. ``.to(device)`` moves them; ``.to(dtype)``, ``.half()`` and the like change
    the bias alone: a weight has no other dtype. There is no gradient.

    Args:
        weight: (N, K); a Weight is packed as rows. NumPy arrays become tensors.
        bias: (N,) float32, bfloat16 or float16.
        out_dtype: of the result, "float32", "bfloat16", "float16" or a torch dtype; by default that of x.
        precision: as for ``halfbyte.linear``.

    Raises:
        UsageError: another kind of weight, expert axes, a bias that does not fit, an unknown dtype or precision.
        WeightError: a null weight.
        LayoutError: a Weight that the layout rows cannot hold.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self, weight: Packed | Weight, bias: Any = None, *, out_dtype: Any = None, precision: str | None = None
    ) -> None:
        super().__init__(one_matrix(weight, f"a {type(self).__name__}"))
        self.out_features, self.in_features = self.shape
        self.out_dtype = None if out_dtype is None else as_dtype(out_dtype, "out_dtype")
        precision_of(self.packed, precision)
        self.precision = precision
        self.register_parameter("bias", as_bias(bias, (self.out_features,)))

    @classmethod
    def empty(
        cls,
        layout: Layout | str,
        n: int,
        k: int,
        *,
        per_row: bool = False,
        input_scale: bool = False,
        pre_scale: bool = False,
        bias: bool = False,
        dtype: Any = "float32",
        device: Any = "meta",
        **options: Any,
    ) -> Linear:
        """A layer without data, to be filled by ``load_state_dict``.

        Args:
            layout: a Layout or its key.
            n: N.
            k: K.
            per_row: whether scale2 differs by row.
            input_scale: whether the weight has one.
            pre_scale: whether the weight has one, in float32.
            bias: whether there is one.
            dtype: of the bias.
            device: where the buffers are; on "meta" they take no memory.
            options: the others that the class takes: ``out_dtype`` and ``precision``, and ``sizes`` of a Group.

        Raises:
            LayoutError: an unknown layout, or a shape that it cannot hold.
        """
        scales = {"per_row": per_row, "input_scale": input_scale, "pre_scale": pre_scale}
        packed = without_data(layout, (n, k), **scales, device=device)
        own = torch.empty(n, dtype=as_dtype(dtype, "dtype"), device=device) if bias else None
        return cls(packed, bias=own, **options)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N) in x's dtype, or ``out_dtype``."""
        if torch.compiler.is_compiling():
            bias = self._parameters["bias"]
            return traced(x, self._key, self.shape, self.held(), bias, self.out_dtype, self.precision)
        y: Tensor = linear(x, self.packed, self.bias, out_dtype=self.out_dtype, precision=self.precision)
        return y

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of the layer; the kernel is that for one token."""
        return ", ".join(
            [
                f"N={self.out_features}, K={self.in_features}, layout={self.layout.key}, bias={self.bias is not None}",
                *options_of(self.out_dtype, self.precision),
                f"kernel={kernel_for_one(self.packed, out_dtype=self.out_dtype)}",
            ]
        )


class TiedLinear(Quantized):
    """A linear layer on the weight that another module holds, such as a head tied to its embedding.

    It has no buffers of its own: a state dict, ``.to()`` and the like see the weight once, where it is held. A copy of
    a model that has both keeps them tied.

    Args:
        holder: an Embedding or a Linear.
        out_dtype: as for Linear.
        precision: as for Linear.
    """

    def __init__(self, holder: Holder, *, out_dtype: Any = None, precision: str | None = None) -> None:
        super().__init__()
        self.__dict__["holder"] = holder  # not registered as a child
        self.out_features, self.in_features = holder.shape
        self.out_dtype = None if out_dtype is None else as_dtype(out_dtype, "out_dtype")
        precision_of(holder.packed, precision)
        self.precision = precision

    holder: Holder

    @property
    def layout(self) -> Layout:
        """Of the weight."""
        return self.holder.layout

    @property
    def packed(self) -> Packed:
        """The weight as it is held elsewhere."""
        return self.holder.packed

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N) in x's dtype, or ``out_dtype``."""
        holder = self.holder
        if torch.compiler.is_compiling():
            return traced(x, holder._key, holder.shape, holder.held(), None, self.out_dtype, self.precision)
        y: Tensor = linear(x, holder.packed, out_dtype=self.out_dtype, precision=self.precision)
        return y

    def extra_repr(self) -> str:
        """As of Linear."""
        return ", ".join(
            [
                f"N={self.out_features}, K={self.in_features}, layout={self.layout.key}, tied",
                *options_of(self.out_dtype, self.precision),
                f"kernel={kernel_for_one(self.packed, out_dtype=self.out_dtype)}",
            ]
        )


def options_of(out_dtype: torch.dtype | None, precision: str | None) -> list[str]:
    """What a layer was asked for beyond its weight."""
    made = [] if out_dtype is None else [f"out_dtype={str(out_dtype).removeprefix('torch.')}"]
    return made if precision is None else [*made, f"precision={precision}"]
