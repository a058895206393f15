"""``linear`` in W4A4 on FP4 matrix units, by ``torch._scaled_mm``; what it computes, halfbyte.kernels.w4a4 says.

It has been written from torch's own checks, and not yet been run on such a GPU. What it relies on: operands are
``torch.float4_e2m1fn_x2``, (M, K/2) by rows and (K/2, N) by columns, low nibble first; block scales are e4m3 in the
order of the layout ``atoms128x4``, padded to 128 rows and 4 blocks; the result may be float32, and has no second scale
and no bias: both come after, so that scale2 may differ by row and s by token.
"""

from __future__ import annotations

from typing import Any, Final

from halfbyte.activations import quantize_tokens
from halfbyte.kernels.base import Kernel, linear_cost, load_torch
from halfbyte.kernels.cuda.launch import why_not
from halfbyte.kernels.w4a4 import W4a4Args, W4a4Call, finish
from halfbyte.layouts import Atoms128x4

N_MULTIPLE: Final = 16
K_MULTIPLE: Final = 32


def swizzled(scales: Any) -> Any:
    """(M, G) u8 block scales in the order of ``atoms128x4``, as torch takes them."""
    import torch

    m, blocks = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -blocks % 4, 0, -m % 128))
    tiles = padded.view(-(-m // 128), 4, 32, -(-blocks // 4), 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e4m3fn)


def _launch(args: W4a4Args) -> None:
    import torch

    fp4, buffers = torch.float4_e2m1fn_x2, args.weight.buffers()
    k, n = args.x.shape[1], args.out.shape[1]
    rounded = quantize_tokens(args.x, buffers.get("input_scale"), pre_scale=buffers.get("pre_scale"))
    b = buffers["codes"].view(n, k // 2).view(fp4).t()
    scale_b = buffers["scales"].view(torch.float8_e4m3fn)
    sums = torch._scaled_mm(
        rounded.codes.view(fp4), b, swizzled(rounded.scales), scale_b, out_dtype=torch.float32, use_fast_accum=False
    )
    sums *= buffers["scale2"].reshape(-1)
    finish(sums, rounded.scale, args.bias, args.out)


def _refuse(call: W4a4Call) -> tuple[str, ...]:
    reasons = list(why_not(call, least=100))
    if not isinstance(call.layout, Atoms128x4):
        reasons.append(f"reads the layout atoms128x4, not {call.layout.key}")
    if len(call.shape) != 2:
        reasons.append(f"takes one matrix (N, K), not expert axes {call.shape[:-2]}")
    n, k = call.shape[-2:]
    if n % N_MULTIPLE or k % K_MULTIPLE:
        reasons.append(f"takes N in multiples of {N_MULTIPLE} and K of {K_MULTIPLE}, not {n} and {k}")
    if not reasons and not call.elsewhere and not _has_fp4():
        reasons.append("needs a torch that has float4_e2m1fn_x2")
    return tuple(reasons)


def _has_fp4() -> bool:
    import torch

    return hasattr(torch, "float4_e2m1fn_x2")


TORCH: Final = Kernel(
    name="w4a4-scaled-mm",
    bundle=W4a4Args,
    description="rounds activations to NVFP4, then torch._scaled_mm on FP4 matrix units; not yet run on such a GPU",
    refuse=_refuse,
    load=load_torch,
    launch=_launch,
    cost=linear_cost,
)
