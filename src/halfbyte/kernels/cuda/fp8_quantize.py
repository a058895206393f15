"""Activations quantized to FP8 for each token on an NVIDIA GPU, as halfbyte.kernels.fp8 states it, bit for bit.

One program reads a row once and keeps it in registers; a row of more than ``MOST`` values is read a second time, which
a cache then has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from halfbyte.kernels.base import ALIGNED
from halfbyte.kernels.cuda.launch import program

KINDS: Final = {"float32": 0, "bfloat16": 1, "float16": 2}
LEAST: Final = 512
MOST: Final = 32768
"""Values that a program holds."""
PART: Final = 16384
"""The same where a row is read twice."""
EACH: Final = 32
"""Values of a thread."""
UNIT: Final = 64
"""Values among which those of a row are ordered."""
HOPPER: Final = 90
"""The compute capability from which on an instruction rounds f32 to E4M3, and kernels may overlap.

Before it, on sm_89, ptxas makes two roundings of that: toward zero to float16, and to E4M3."""

Quantizer = Callable[[int, Any, Any, Any, Any], None]
"""Takes the number of rows, and x, pre_scale or None, data and scales: tensors, or their addresses, which is faster."""


def pitch(k: int, ordered: bool = False) -> int:
    """Bytes from row to row of the data: K rounded up to a multiple of 16, or, in the order of kernels, of 64."""
    multiple = UNIT if ordered else ALIGNED
    return -(-k // multiple) * multiple


def scales_at(rows: int, k: int, ordered: bool = False) -> int:
    """Where the scales begin in memory that begins with the data."""
    return rows * pitch(k, ordered)


def nbytes(rows: int, k: int, ordered: bool = False) -> int:
    """Of data and scales together, a multiple of 16."""
    return scales_at(rows, k, ordered) + -(-4 * rows // ALIGNED) * ALIGNED


def specified(
    dtype: str, k: int, *, capability: int, ordered: bool, pre_scale: bool = False, early: bool = False
) -> tuple[dict[str, str], dict[str, Any], int]:
    """The kernel's signature, constants and warps for rows of K values; arguments as of ``quantizer``.

    Args:
        capability: the GPU's, 90 for sm_90; 0 for Triton's interpreter.
    """
    block = min(1 << max(k - 1, LEAST - 1).bit_length(), MOST if k <= MOST else PART)
    whole = not k % ALIGNED
    word = "i32" if dtype == "float32" else "i16"
    signature = {
        "x": f"*{word}:16" if whole else f"*{word}",
        "pre": "*fp32",
        "data": "*u8:16",
        "scales": "*fp32",
        "k": "i32:16" if whole else "i32",
        "pitch": "i32:16",
    }
    constants = {
        "KIND": KINDS[dtype],
        "PRE": pre_scale,
        "BLOCK": block,
        "ROUNDS": -(-k // block),
        "ORDERED": ordered,
        "CONVERT": capability >= HOPPER,
        "EARLY": early and capability >= HOPPER,
    }
    return signature, constants, max(1, block // (32 * EACH))


def quantizer(
    device: Any,
    dtype: str,
    k: int,
    *,
    ordered: bool,
    pre_scale: bool = False,
    early: bool = False,
    capability: int | None = None,
) -> Quantizer:
    """A function that launches the kernel; see ``Quantizer``.

    The rows of x have no gaps; x and data begin at multiples of 16 bytes. Data are (M, ``pitch(k, ordered)``) u8 with
    zeros from K on, scales (M,) f32, pre_scale (K,) f32.

    Args:
        device: of torch's, with an index; the CPU under Triton's interpreter.
        dtype: of x, "float32", "bfloat16" or "float16".
        k: K.
        ordered: position 32 s + 16 e + 4 c + j of each 64 holds value 16 c + 4 s + 2 e + (0, 8, 1, 9)[j], as
            ``gluon-fp8`` reads them.
        pre_scale: x is multiplied by one first.
        early: it starts before the kernel ahead of it ends, and lets the one behind it do so, which then waits
            (``griddepcontrol.wait``) before it reads the data or scales.
        capability: of the device; None to ask it.
    """
    from halfbyte.kernels.cuda.fp8_quantize_code import quantize

    capability = _capability(device) if capability is None else capability
    signature, constants, warps = specified(
        dtype, k, capability=capability, ordered=ordered, pre_scale=pre_scale, early=early
    )
    run = program(quantize, signature, constants, device=device, warps=warps, pdl=constants["EARLY"])
    width = pitch(k, ordered)

    def quantized(rows: int, x: Any, pre: Any, data: Any, scales: Any) -> None:
        run((rows, 1, 1), (x, pre, data, scales, k, width))

    return quantized


def _capability(device: Any) -> int:
    if device.type != "cuda":
        return 0
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
