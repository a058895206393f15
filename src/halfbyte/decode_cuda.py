"""NVFP4 in CUDA tensors decoded by Triton; ``kernels.cuda.embedding`` has the same code decode rows by their numbers.

A thread loads words of eight codes and writes 16 bytes of a row: from ``rows``, a word and half a block; from
``fragments``, the four words of a block, of which every other pair of codes belongs to the row, and the others to
another row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

from halfbyte import gpu
from halfbyte.arrays import float_dtype
from halfbyte.numerics import Array

_FEWEST: Final = 256

_compiled: Final[dict[Any, Any]] = {}


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


def decode(form: Form, buffers: Mapping[str, Array], shape: Sequence[int], dtype: Any) -> Array:
    """The values of a weight, (*E, N, K), in f32 and rounded once; arguments as of ``decode_into``.

    Args:
        dtype: "float32", "bfloat16" or "float16" of the result.
    """
    import torch

    out = torch.empty(tuple(shape), dtype=getattr(torch, float_dtype(dtype).name), device=buffers["codes"].device)
    decode_into(out, form, buffers, shape)
    return out


def decode_into(out: Array, form: Form, buffers: Mapping[str, Array], shape: Sequence[int]) -> None:
    """Decode a weight; all arrays lie on one device.

    Args:
        out: (*E, N, K), contiguous and aligned; it is written.
        form: of codes and scales.
        buffers: "codes" and "scales" u8, "scale2" f32 (*E, 1 or N, 1).
        shape: of the weight, (*E, N, K).
    """
    import torch

    from halfbyte.decode_cuda_code import decode as kernel

    if not out.numel():
        return
    if out.dtype == torch.bfloat16 and not out.is_cuda:  # Triton's interpreter would truncate
        exact = torch.empty_like(out, dtype=torch.float32)
        decode_into(exact, form, buffers, shape)
        out.copy_(exact)
        return
    *experts, n, k = shape
    codes, scales, scale2 = (gpu.aligned(buffers[name]) for name in ("codes", "scales", "scale2"))
    fixed = constants(form, k, lookup=False, experts=prod(experts) > 1, per_row=scale2.shape[-2] != 1)
    matrices, rows = (1, prod(experts) * n) if form.layout == ROWS.layout else (prod(experts), n)
    programs = matrices * -(-rows // form.rows) * -(-k // fixed["VALUES"])
    args = codes.view(torch.int32), scales, scale2, scale2, out, out.numel() // k, n, k, *fixed.values()
    key = out.device.index, out.dtype, k, *fixed.values()
    gpu.launch(_compiled, key, kernel, programs, args, num_warps=warps(form, fixed), enable_fp_fusion=True)


def warps(form: Form, fixed: Mapping[str, Any]) -> int:
    """Of a program with these constants."""
    count: int = max(1, fixed["VALUES"] // form.values)
    return count


def constants(form: Form, k: int, *, lookup: bool, experts: bool, per_row: bool) -> dict[str, Any]:
    """Those of the kernel by name, for rows of ``k`` values; ``per_row`` if each has a scale2 of its own."""
    return {
        "LAYOUT": form.layout,
        "LOOKUP": lookup,
        "EXPERTS": experts,
        "PER_ROW": per_row,
        "EACH": 1 if lookup else form.rows,
        "VALUES": min(form.most, max(_FEWEST, 1 << (k - 1).bit_length())),
        "KIND": form.kind,
        "STEPS": form.steps,
        "SCALE": form.scale,
    }
