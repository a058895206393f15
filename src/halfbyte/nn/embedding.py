"""Embedding: rows of an NVFP4 weight by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from halfbyte.embedding_op import embedding
from halfbyte.layouts import Layout, Packed
from halfbyte.nn.base import Holder, as_dtype, kernel_for_one, one_matrix, without_data
from halfbyte.torch_embedding import look_up
from halfbyte.weight import Weight


class Embedding(Holder):
    """Rows of an NVFP4 weight: ``halfbyte.embedding(ids, weight)``, bit for bit those of ``dequantize(dtype)``.

    ``.to(dtype)``, ``.half()`` and the like change ``dtype``, that of the result, and no weight.

    Args:
        weight: (N, K), N rows; a Weight is packed as rows.
        dtype: of the result, "float32", "bfloat16", "float16" or a torch dtype.

    Raises:
        UsageError: another kind of weight, expert axes, or an unknown dtype.
        WeightError: a null weight.
        LayoutError: a Weight that the layout rows cannot hold.
    """

    def __init__(self, weight: Packed | Weight, *, dtype: Any) -> None:
        super().__init__(one_matrix(weight, "an Embedding"))
        self.num_embeddings, self.embedding_dim = self.shape
        self.padding_idx = None
        self.dtype = as_dtype(dtype, "dtype")

    @classmethod
    def empty(
        cls, layout: Layout | str, n: int, k: int, *, dtype: Any, per_row: bool = False, device: Any = "meta"
    ) -> Embedding:
        """A module without data; arguments as of ``Linear.empty``."""
        made = without_data(layout, (n, k), per_row=per_row, input_scale=False, pre_scale=False, device=device)
        return cls(made, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int32 or int64 to (..., K).

        A number that names no row is refused on the CPU; on a GPU its row is NaN, as nothing waits for the device.
        """
        if torch.compiler.is_compiling():
            held, (n, k) = self.held(), self.shape
            looked: Tensor = look_up(ids, self._key, n, k, ",".join(held), list(held.values()), self.dtype)
            return looked
        y: Tensor = embedding(ids, self.packed, out_dtype=self.dtype)
        return y

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of it; the kernel is that for one row."""
        n, k = self.shape
        dtype = str(self.dtype).removeprefix("torch.")
        kernel = kernel_for_one(self.packed, "embedding", self.dtype)
        return f"N={n}, K={k}, layout={self.layout.key}, dtype={dtype}, kernel={kernel}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return self
