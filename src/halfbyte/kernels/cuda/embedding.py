"""``embedding`` on an NVIDIA GPU, layouts ``rows`` and ``fragments``: one program decodes up to 2048 values of a row.

Only the rows that are named are read. A number below 0 or not below N gives a row of NaN and reads row 0 instead. A
row does not depend on the other numbers. The result is the bits of ``dequantize``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from halfbyte import decode_cuda, gpu
from halfbyte.arrays import dtype_name
from halfbyte.kernels.base import Kernel, load_torch
from halfbyte.kernels.cuda.launch import Program, program, why_not
from halfbyte.kernels.embedding import EmbeddingArgs, EmbeddingCall, cost, refuse
from halfbyte.layouts import Fragments, Layout, Packed, Rows
from halfbyte.numerics import Array

_TYPES: Final = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32", "int64": "*i64"}


def _refuse(call: EmbeddingCall) -> tuple[str, ...]:
    wrong = f"reads the layouts rows and fragments, not {call.layout.key}"
    return (*why_not(call), *(() if isinstance(call.layout, Rows | Fragments) else (wrong,)), *refuse(call))


def _load(call: EmbeddingCall) -> None:
    load_torch(call)
    from halfbyte import decode_cuda_code  # noqa: F401


def specified(layout: Layout, k: int, per_row: bool, ids: str, out: str) -> tuple[dict[str, str], dict[str, Any], int]:
    """The kernel's signature, constants and warps, for numbers of dtype ``ids`` and results of ``out``."""
    form = layout.form if isinstance(layout, Fragments) else decode_cuda.ROWS
    fixed = decode_cuda.constants(form, k, lookup=True, experts=False, per_row=per_row)
    arrays = {"codes": "*i32:16", "scales": "*u8", "scale2": "*fp32", "ids": _TYPES[ids], "out": f"{_TYPES[out]}:16"}
    numbers = {"count": "i32", "n": "i32", "k": "i32" if k % gpu.ALIGNED else "i32:16"}
    return arrays | numbers, fixed, decode_cuda.warps(form, fixed)


def _program(args: EmbeddingArgs, out: Array) -> tuple[Program, int]:
    """The program, and how many of it run for each number."""
    from halfbyte.decode_cuda_code import decode

    k = args.weight.shape[1]
    per_row = args.weight.buffers()["scale2"].shape[-2] != 1
    dtypes = dtype_name(args.ids.dtype), dtype_name(out.dtype)
    signature, fixed, warps = specified(args.weight.layout, k, per_row, *dtypes)
    made = program(decode, signature, fixed, device=out.device, warps=warps)
    return made, -(-k // fixed["VALUES"])


def _planes(weight: Packed) -> list[Array]:
    buffers = weight.buffers()
    return [gpu.aligned(buffers["codes"]), buffers["scales"].contiguous(), buffers["scale2"].contiguous()]


def launch(args: EmbeddingArgs) -> None:
    """Write the rows that ``args.ids`` name."""
    import torch

    (n, k), m = args.weight.shape, len(args.ids)
    if not n:
        args.out.fill_(float("nan"))
    if not (n and m and k):
        return
    interpreted = not args.out.is_cuda and args.out.dtype == torch.bfloat16  # where it would be truncated
    inexact = interpreted or not args.out.is_contiguous() or args.out.data_ptr() % gpu.ALIGNED
    dtype = torch.float32 if interpreted else args.out.dtype
    out = torch.empty((m, k), dtype=dtype, device=args.out.device) if inexact else args.out
    run, chunks = _program(args, out)
    run((m * chunks, 1, 1), (*_planes(args.weight), args.ids, out, m, n, k))
    if inexact:
        args.out.copy_(out)


def bind(args: EmbeddingArgs) -> Callable[[Array, Array | None, Array], None]:
    """What is left of ``launch``, on ids without gaps and a new ``out``; of a weight without gaps, and aligned."""
    run, chunks = _program(args, args.out)
    (n, k), planes = args.weight.shape, [plane.data_ptr() for plane in _planes(args.weight)]

    def bound(ids: Array, _: Array | None, out: Array) -> None:
        m = ids.numel()
        run((m * chunks, 1, 1), (*planes, ids.data_ptr(), out.data_ptr(), m, n, k))

    return bound


TRITON = Kernel(
    name="triton-embedding",
    bundle=EmbeddingArgs,
    description="decodes the rows that are named, in registers",
    refuse=_refuse,
    load=_load,
    launch=launch,
    bind=bind,
    cost=cost,
)
