"""``embedding`` as an operator of torch's, for ``torch.compile`` and ``torch.export``; as that for ``linear``."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import embedding_op
from halfbyte.layouts import Packed, parse


@torch.library.custom_op("halfbyte::embedding", mutates_args=())
def look_up(
    ids: Tensor, layout: str, n: int, k: int, names: str, buffers: list[Tensor], out_dtype: torch.dtype
) -> Tensor:
    """``halfbyte.embedding``.

    Args:
        ids: int32 or int64 of any shape.
        layout: the key of the weight's layout.
        n: N.
        k: K.
        names: of the buffers, joined by commas.
        buffers: those of the Packed.
        out_dtype: of the result.

    Returns:
        (*ids.shape, K).
    """
    packed = Packed(parse(layout), (n, k), dict(zip(names.split(","), buffers, strict=True)))
    y: Tensor = embedding_op.look_up(ids, packed, out_dtype)
    return y


def _shape(
    ids: Tensor, layout: str, n: int, k: int, names: str, buffers: list[Tensor], out_dtype: torch.dtype
) -> Tensor:
    return ids.new_empty((*ids.shape, k), dtype=out_dtype)


look_up.register_fake(_shape)


def traced(ids: Tensor, packed: Packed, out_dtype: str | torch.dtype) -> Tensor:
    """``embedding`` while torch traces it."""
    n, k = packed.shape
    buffers = packed.buffers()
    to = getattr(torch, out_dtype) if isinstance(out_dtype, str) else out_dtype
    y: Tensor = look_up(ids, packed.key, n, k, ",".join(buffers), list(buffers.values()), to)
    return y
