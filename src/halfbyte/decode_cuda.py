"""NVFP4 in CUDA tensors decoded by Triton: whole weights, or the rows that a lookup names.

A thread loads words of eight codes and writes 16 bytes of a row: from ``rows``, a word and half a block; from
``fragments``, the four words of a block, of which every other pair of codes belongs to the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final, NamedTuple

from halfbyte import gpu
from halfbyte.arrays import float_dtype
from halfbyte.numerics import Array

_ALIGNED: Final = 16
_FEWEST: Final = 256


class Form(NamedTuple):
    """How codes and scales lie, as the kernel's constants; see ``decode_cuda_code.decode``.

    Args:
        layout: 0 for rows, 1 for fragments.
        values: that a warp decodes.
        most: values of a row that a program decodes.
        rows: of a program.
        kind: of fragments, 1 for bfloat16 and 2 for float16.
        steps: of fragments, rotates and masks in turn.
        scale: of fragments, (shift, base).
    """

    layout: int
    values: int
    most: int
    rows: int
    kind: int = 0
    steps: tuple[int, ...] = (0, 0)
    scale: tuple[int, int] = (0, 0)


ROWS: Final = Form(0, 256, 1024, 8)


def fragments(dtype: str, steps: Sequence[Sequence[tuple[int, int]]], scale: tuple[int, int]) -> Form:
    """The form of the layout of that name, by what it states of its activations' dtype."""
    count = max(map(len, steps))
    flat = [number for output in steps for step in (*output, *[(0, 0)] * (count - len(output))) for number in step]
    return Form(1, 512, 2048, 16, 1 if dtype == "bfloat16" else 2, tuple(flat), scale)


def decode(
    form: Form,
    codes: Array,
    scales: Array,
    scale2: Array,
    shape: Sequence[int],
    dtype: Any,
    ids: Array | None = None,
) -> Array:
    """The values of a weight (*E, N, K), or of the rows of one of (N, K) that ids name; in f32, rounded once.

    Args:
        form: of the codes and scales.
        codes: u8.
        scales: u8.
        scale2: (*E, 1 or N, 1) f32.
        shape: of the weight.
        dtype: "float32", "bfloat16" or "float16" of the result.
        ids: i32 or i64 of any shape; those that name no row give rows of NaN. All are trusted to be on one device.

    Returns:
        (*E, N, K) or (*ids.shape, K).
    """
    import torch

    from halfbyte.decode_cuda_code import decode as kernel

    *experts, n, k = shape
    lead = (*experts, n) if ids is None else tuple(ids.shape)
    named = getattr(torch, float_dtype(dtype).name)
    interpreted = not codes.is_cuda  # by Triton's interpreter, which truncates to bfloat16
    out = torch.empty((*lead, k), dtype=torch.float32 if interpreted else named, device=codes.device)
    count = prod(lead)
    if n == 0:
        out.fill_(float("nan"))
    elif out.numel():
        values = min(form.most, max(_FEWEST, 1 << (k - 1).bit_length()))
        rows = form.rows if ids is None else 1
        with gpu.device_of(codes):
            kernel[(-(-count // rows) * -(-k // values),)](
                *(_aligned(codes).view(torch.int32), scales.contiguous(), scale2.contiguous()),
                *(scale2 if ids is None else ids.contiguous(), out, count, n, k),
                LAYOUT=form.layout,
                LOOKUP=ids is not None,
                EXPERTS=prod(experts) > 1,
                PER_ROW=scale2.shape[-2] != 1,
                EACH=rows,
                VALUES=values,
                KIND=form.kind,
                STEPS=form.steps,
                SCALE=form.scale,
                num_warps=max(1, values // form.values),
                enable_fp_fusion=True,
            )
    return out.to(named)


def _aligned(codes: Array) -> Array:
    codes = codes.contiguous()
    return codes.clone() if codes.data_ptr() % _ALIGNED else codes
