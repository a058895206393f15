"""The kernel that quantizes activations against NumPy; as a script, on the CPU, in Triton's interpreter.

TRITON_INTERPRET=1 python -m gpu_fp8
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from halfbyte.kernels.cuda import fp8_quantize
from halfbyte.kernels.fp8 import quantized
from halfbyte.numerics import E4M3_VALUES
from halfbyte.weight import float_dtype, to_numpy, to_torch

DTYPES = ("float32", "bfloat16", "float16")
FILL = 0x5A


def sources(dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Name, and (M, K) in ``dtype``."""
    rng, to = np.random.default_rng(0), float_dtype(dtype)
    for m, k in ((3, 16), (2, 1), (3, 100), (2, 512), (3, 4096), (2, 40000), (1, 57344)):
        yield f"normal {m}x{k}", rng.standard_normal((m, k), np.float32).astype(to)
    yield "none", np.zeros((0, 32), to)
    # Rows whose largest is 448 are rounded as they are: all small numbers, all ties, and what is beside them.
    words = np.arange(1 << 16, dtype=np.uint16)
    every = words.view(to) if to.itemsize == 2 else (words.astype(np.uint32) << 16).view(to)
    small = every[np.abs(every.astype(np.float32)) <= 448]
    yield "every small number", with_top(small, 448, to)
    values = E4M3_VALUES[:0x7F].astype(np.float64)
    ties = ((values[1:] + values[:-1]) / 2).astype(to)
    beside = (ties.view(f"i{to.itemsize}")[:, None] + np.arange(-1, 2, dtype=f"i{to.itemsize}")).view(to)
    yield "ties", with_top(np.concatenate([beside, -beside]).reshape(-1), 448, to)
    for top in (1.0, 3.7, 1e-3, 60000.0):
        yield f"up to {top}", with_top(rng.uniform(-top, top, 4096).astype(to), top, to)
    yield "zeros", np.array([[0.0] * 32, [-0.0] * 32, [0.0] * 31 + [1.0]], to)
    odd = rng.standard_normal((6, 80), np.float32)
    odd[0, 3], odd[1, 79], odd[2, 0], odd[4] = np.nan, np.inf, -np.inf, 0
    yield "not finite", odd.astype(to)
    if dtype != "float16":
        sizes = [1e-45, 3e-42, 1e-38, 1.3e-36, 2.0**-65, 2.0**-64, 1e30, 3e38]
        scaled = rng.uniform(-1, 1, (len(sizes), 64)) * np.array(sizes)[:, None]
        scaled[:, 0] = sizes
        yield "of any size", scaled.astype(to)


def with_top(values: np.ndarray, top: float, to: Any) -> np.ndarray:
    """(M, 1008 and the largest) of values."""
    padded = np.concatenate([values, np.zeros(-len(values) % 1007, to)]).reshape(-1, 1007)
    return np.concatenate([padded, np.full((len(padded), 1), top, to)], 1)


SCALED = ("normal 3x100", "normal 3x4096", "of any size")
"""The sources that are multiplied by a pre_scale, too."""


def cases() -> Iterator[tuple[str, np.ndarray, bool, bool]]:
    """Name, values, whether there is a pre_scale, and whether the data are ordered."""
    for dtype in DTYPES:
        for name, x in sources(dtype):
            for ordered in (False, True):
                for scaled in (False, True)[: 1 + (name in SCALED)]:
                    yield f"{name} {dtype}", x, scaled, ordered


def programs(capability: int) -> list[tuple[dict[str, str], dict[str, Any], dict[str, Any]]]:
    """What the cases are compiled to."""
    from halfbyte.kernels.cuda.launch import options_of

    found = []
    for _, x, scaled, ordered in cases():
        signature, constants, warps = fp8_quantize.specified(
            str(x.dtype), x.shape[1], capability=capability, ordered=ordered, pre_scale=scaled
        )
        found.append((signature, constants, options_of(warps=warps)))
    return found


def check(device: str) -> int:
    """Data and scales of every case as NumPy has them, bit for bit; how many."""
    count = 0
    for name, x, scaled, ordered in cases():
        pre = np.random.default_rng(1).uniform(0.5, 2, x.shape[1]).astype(np.float32) if scaled else None
        check_one(x, pre, ordered, device, (name, scaled, ordered))
        count += 1
    return count


def check_one(
    x: np.ndarray, pre: np.ndarray | None, ordered: bool, device: str, what: object, beside: int = 64
) -> None:
    """One array; of so many elements after x, data and scales none is read to any effect, or written."""
    m, k = x.shape
    width = fp8_quantize.pitch(k, ordered)
    held = torch.full((m * width + beside,), FILL, dtype=torch.uint8, device=device)
    scales = torch.full((m + beside,), 7.0, device=device)
    source = torch.full((m * k + beside,), torch.nan, dtype=getattr(torch, str(x.dtype)), device=device)
    source[: m * k] = to_torch(np.ascontiguousarray(x).reshape(-1), device)
    run = fp8_quantize.quantizer(held.device, str(x.dtype), k, ordered=ordered, pre_scale=pre is not None)
    if m:
        run(m, source, None if pre is None else to_torch(pre, device), held, scales)
    data, scale = quantized(x, pre)
    expected = np.zeros((m, width), np.uint8)
    if ordered:
        expected[:] = in_order(data)
    else:
        expected[:, :k] = data
    got, finite = to_numpy(held), np.isfinite(scale[:, 0])
    assert np.array_equal(got[: m * width].reshape(m, width)[finite], expected[finite]), what
    assert np.array_equal(to_numpy(scales)[:m], scale[:, 0], equal_nan=True), what
    assert (got[m * width :] == FILL).all(), what
    assert (to_numpy(scales)[m:] == 7).all(), what


def in_order(data: np.ndarray) -> np.ndarray:
    """Position 32 s + 16 e + 4 c + j of each 64 holds value 16 c + 4 s + 2 e + (0, 8, 1, 9)[j]; with zeros up to 64."""
    place = [16 * c + 4 * s + 2 * e + j for s in (0, 1) for e in (0, 1) for c in range(4) for j in (0, 8, 1, 9)]
    padded = np.pad(data, ((0, 0), (0, -data.shape[1] % 64)))
    return padded.reshape(len(data), padded.shape[1] // 64, 64)[:, :, place].reshape(padded.shape)


if __name__ == "__main__":
    sys.stdout.write(f"{check('cpu')}\n")
