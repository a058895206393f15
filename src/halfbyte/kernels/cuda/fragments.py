"""What the Triton kernels share: types, constants of the layout ``fragments``, and what all of them refuse."""

from __future__ import annotations

import functools
from typing import Any, Final

from halfbyte.kernels.base import ALIGNED, Call
from halfbyte.kernels.cuda.launch import why_not
from halfbyte.layouts import Fragments
from halfbyte.layouts.fragments import FACTOR, SCALE, STEPS
from halfbyte.numerics import BLOCK

TYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Triton's names."""
UNIT: Final = 64
"""k of a tile of the layout."""
TILE: Final = 16
"""n of a tile of the layout."""


def constants(call: Call) -> dict[str, Any]:
    """What a call decides of every kernel's constants."""
    return {"PER_ROW": call.per_row, "BIAS": call.bias, "FACTOR": FACTOR, "UP": call.device != "cuda"}


def decoding(dtype: str) -> dict[str, Any]:
    """The constants of ``fragments_code`` for words and scales: the layout's, as flat tuples."""
    outputs = [[*steps, (0, 0)][:2] for steps in STEPS[dtype]]
    return {"STEPS": tuple(n for steps in outputs for step in steps for n in step), "SCALE": SCALE[dtype]}


def decode_code(dtype: str) -> str:
    """Assembly of the decoding, from the layout's ``STEPS``: $4 a word, $5 a pair of scales -> $0 to $3, products.

    The product is a fused one with -0 added, since bf16 has no other before sm_90.
    """
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    lines = [".reg .b16 l, h;", ".reg .b32 s0, s1, none, o, t;", "mov.b32 {l, h}, $5;"]
    lines += ["mov.b32 s0, {l, l};", "mov.b32 s1, {h, h};", "mov.b32 none, 0x80008000;"]
    for output, steps in enumerate(STEPS[dtype]):
        for i, (rotate, mask) in enumerate(steps):
            wrapped = mask & ((1 << rotate) - 1)
            if not rotate:
                lines.append("mov.b32 t, $4;")
            elif not wrapped:
                lines.append(f"shl.b32 t, $4, {rotate};")
            elif wrapped == mask:
                lines.append(f"shr.u32 t, $4, {32 - rotate};")
            else:
                lines.append(f"shf.l.wrap.b32 t, $4, $4, {rotate};")
            lines.append(f"lop3.b32 o, t, {mask:#x}, o, 0xEA;" if i else f"and.b32 o, t, {mask:#x};")
        lines.append(f"fma.rn.{kind} ${output}, o, s{output & 1}, none;")
    return "{ " + " ".join(lines) + " }"


def scale_code(dtype: str) -> str:
    """Assembly of the scales, from the layout's ``SCALE``: $1 two bytes -> $0 a pair of 16-bit floats."""
    shift, base = SCALE[dtype]
    apart = ".reg .b32 t; cvt.u32.u16 t, $1; prmt.b32 t, t, 0, 0x4140;"
    return f"{{ {apart} mad.lo.u32 $0, t, {1 << shift}, {base * 0x10001:#x}; }}"


def scales_code(dtype: str) -> str:
    """Assembly of the scales, from the layout's ``SCALE``: $2 four bytes -> $0 and $1, pairs of 16-bit floats."""
    shift, base = SCALE[dtype]
    apart = "prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;"
    scaled = " ".join(f"mad.lo.u32 ${i}, {r}, {1 << shift}, {base * 0x10001:#x};" for i, r in enumerate("ab"))
    return f"{{ .reg .b32 a, b; {apart} {scaled} }}"


@functools.cache
def wide() -> bool:
    """Whether Triton gives a lane of an operand from registers four values of k together, not two.

    The other one is right too, but moves values between lanes.
    """
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) < (3, 7)


def why_not_linear(call: Call) -> tuple[str, ...]:
    """What keeps every Triton kernel for ``linear`` from a call, whatever the layout."""
    reasons = list(why_not(call))
    if call.dtype not in STEPS:
        reasons.append(f"takes {' or '.join(STEPS)} activations, not {call.dtype}")
    if len(call.shape) != 2:
        reasons.append(f"takes one matrix (N, K), not expert axes {call.shape[:-2]}")
    if call.shape[-1] % BLOCK:
        reasons.append(f"takes a K that is a multiple of {BLOCK}, not {call.shape[-1]}")
    if call.pre_scale:
        reasons.append("multiplies activations as they come, without a pre_scale")
    return tuple(reasons)


def why_not_fragments(call: Call) -> tuple[str, ...]:
    """As ``why_not_linear``, for kernels on the layout ``fragments``."""
    reasons = list(why_not_linear(call))
    needed = Fragments(call.dtype if call.dtype in STEPS else "bfloat16")
    if call.layout != needed:
        reasons.append(f"reads the layout {needed.key}, not {call.layout.key}")
    return tuple(reasons)


def aligned(x: Any) -> Any:
    """The activations, copied where they begin at an odd address."""
    return x.clone() if x.data_ptr() % ALIGNED else x


def bias_type(bias: Any) -> str:
    """Triton's pointer to a bias, or to none."""
    return "*fp32" if bias is None else f"*{TYPES[str(bias.dtype).removeprefix('torch.')]}"
