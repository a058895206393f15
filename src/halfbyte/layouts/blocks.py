"""Bytes of block scales by a table, and codes of blocks whose scale is 0; for CUDA tensors one pass each, by Triton."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np

from halfbyte import gpu
from halfbyte.layouts.executors import as_words
from halfbyte.numerics import U8, Array, is_torch, lookup

SIZE: Final = 2048
"""Bytes that a program recodes."""
PEAK: Final = 8192
"""Bytes of which a program looks for the largest."""
BLOCKS: Final = 1024
"""Blocks whose codes a program copies."""
WARPS: Final = 4

_compiled: Final[dict[Any, Any]] = {}


def largest(scales: Array) -> int:
    """The largest byte, 0 where there are none; of a GPU this waits for it, once."""
    if not prod(scales.shape):
        return 0
    if is_torch(scales) and scales.device.type == "cpu":
        scales = scales.numpy()  # 40 times as fast as torch's own
    return int(peak(scales) if _by_triton(scales) else scales.max())


def peak(scales: Array) -> Array:
    """The same by Triton, as a tensor (1,) i32."""
    import torch

    from halfbyte.layouts.blocks_kernel import peak as kernel

    scales = gpu.aligned(scales)
    made = torch.zeros(1, dtype=torch.int32, device=scales.device)
    count = scales.numel()
    key = kernel, scales.device.index, count >> 31 > 0
    gpu.launch(_compiled, key, kernel, -(-count // PEAK), (scales, made, count, PEAK), num_warps=WARPS)
    return made


def present(scales: Array) -> U8:
    """The bytes that occur, each once, from the smallest."""
    if not is_torch(scales):
        return np.unique(scales)
    counts = scales.reshape(-1).bincount(minlength=256)
    return np.flatnonzero(counts.cpu().numpy()).astype(np.uint8)


def recoded(table: U8, a: Array) -> Array:
    """``table[a]`` for bytes of any shape; the table has 256."""
    if not _by_triton(a):
        return lookup(table, a)
    return recode(_on_device(table.tobytes(), a.device), a)


def recode(table: Array, a: Array) -> Array:
    """The same by Triton, with the table where a is."""
    import torch

    from halfbyte.layouts.blocks_kernel import recode as kernel

    a = gpu.aligned(a)
    made = torch.empty_like(a)
    count = a.numel()
    key = kernel, a.device.index, count >> 31 > 0
    gpu.launch(_compiled, key, kernel, -(-count // SIZE), (a, table, made, count, SIZE), num_warps=WARPS)
    return made


def without_zero_blocks(codes: Array, scales: Array) -> Array:
    """The codes (*E, N, K/2), 0 in blocks whose scale, of (*E, N, G), is 0."""
    if _by_triton(codes):
        return copy_without_zeros(codes, scales)
    zero = scales == 0
    asked = not is_torch(zero) or not zero.is_cuda  # an answer from a GPU is later than the words
    if asked and not bool(zero.any()):
        return codes
    words = as_words(codes, 8)
    kept = words.reshape(*zero.shape, words.shape[0] // max(1, prod(zero.shape))) * ~zero[..., None]
    return kept.reshape(-1).view(codes.dtype).reshape(codes.shape)


def copy_without_zeros(codes: Array, scales: Array) -> Array:
    """The same by Triton: blocks of 16 codes, which are one word."""
    import torch

    from halfbyte.layouts.blocks_kernel import without_zeros as kernel

    codes, scales = gpu.aligned(codes), gpu.aligned(scales)
    made = torch.empty_like(codes)
    count = scales.numel()
    key = kernel, codes.device.index, count >> 31 > 0
    words, target = (a.reshape(-1).view(torch.int64) for a in (codes, made))
    gpu.launch(_compiled, key, kernel, -(-count // BLOCKS), (words, scales, target, count, BLOCKS), num_warps=WARPS)
    return made


def _by_triton(a: Array) -> bool:
    return is_torch(a) and a.is_cuda and bool(prod(a.shape)) and gpu.missing() is None


@lru_cache(maxsize=64)
def _on_device(table: bytes, device: Any) -> Any:
    import torch

    return torch.tensor(list(table), dtype=torch.uint8, device=device)
