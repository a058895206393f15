"""``embedding`` on an NVIDIA GPU, layouts ``rows`` and ``fragments``: one program decodes up to 2048 values of a row.

Only the rows that are named are read. A number below 0 or not below N gives a row of NaN and reads row 0 instead. A
row does not depend on the other numbers. The result is the bits of ``dequantize``.
"""

from __future__ import annotations

from halfbyte import decode_cuda
from halfbyte.kernels.base import Kernel, load_torch
from halfbyte.kernels.cuda.launch import why_not
from halfbyte.kernels.embedding import EmbeddingArgs, EmbeddingCall, cost, refuse
from halfbyte.layouts import Fragments, Rows


def _refuse(call: EmbeddingCall) -> tuple[str, ...]:
    wrong = f"reads the layouts rows and fragments, not {call.layout.key}"
    return (*why_not(call), *(() if isinstance(call.layout, Rows | Fragments) else (wrong,)), *refuse(call))


def _load(call: EmbeddingCall) -> None:
    load_torch(call)
    from halfbyte import decode_cuda_code  # noqa: F401


def launch(args: EmbeddingArgs) -> None:
    """Write the rows that ``args.ids`` name."""
    layout = args.weight.layout
    form = layout.form if isinstance(layout, Fragments) else decode_cuda.ROWS
    decode_cuda.decode_into(args.out, form, args.weight.buffers(), args.weight.shape, args.ids)


TRITON = Kernel(
    name="triton-embedding",
    bundle=EmbeddingArgs,
    description="decodes the rows that are named, in registers",
    refuse=_refuse,
    load=_load,
    launch=launch,
    cost=cost,
)
