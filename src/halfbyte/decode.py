"""NVFP4 decoded: by NumPy or torch, which are the truth, or by code that Numba or Triton compiles, to the same bytes.

The bits of a NaN are the GPU's own where Triton decodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfbyte import decode_cuda, gpu, jit
from halfbyte.arrays import cast, float_dtype
from halfbyte.numerics import BLOCK, Array, decode_e2m1, decode_e4m3, is_torch

SMALL = 1 << 18
"""Values below which NumPy does all: to load Numba takes longer."""


def dequantize(codes: Array, scales: Array, scale2: Array, k: int, dtype: Any) -> Array:
    """Values (*E, N, K) of codes (*E, N, G * 8), scales (*E, N, G) and scale2 (*E, 1 or N, 1), rounded to dtype."""
    if is_torch(codes) and _plain(codes, scales, scale2):
        import torch

        # NumPy asks for large pages, which torch does not: fresh memory is written three times as fast.
        values = np.empty((*codes.shape[:-1], k), float_dtype(dtype))
        arrays = [t.detach().numpy() for t in (codes, scales, scale2)]
        if _compiled(arrays, k, values.dtype.name, values.ctypes.data):
            plain = values.view(np.uint16) if values.dtype.name == "bfloat16" else values
            return torch.from_numpy(plain).view(getattr(torch, values.dtype.name))
    elif is_torch(codes) and by_triton(codes, scales, scale2):
        buffers = {"codes": codes, "scales": scales, "scale2": scale2}
        return decode_cuda.decode(decode_cuda.ROWS, buffers, (*codes.shape[:-1], k), dtype)
    elif not is_torch(codes) and executor(codes.size * 2) is None:
        values = np.empty((*codes.shape[:-1], k), float_dtype(dtype))
        if _compiled([codes, scales, scale2], k, values.dtype.name, values.ctypes.data):
            return values
    values = decode_e2m1(codes)
    blocks = values.reshape(*scales.shape, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN come out as such
        blocks *= decode_e4m3(scales)[..., None]
        values *= scale2
    return cast(values[..., :k], dtype)


def _plain(*tensors: Array) -> bool:
    """Whether these are large tensors in memory, which nothing traces or differentiates."""
    size = tensors[0].numel() * 2
    return executor(size) is None and all(t.device.type == "cpu" for t in tensors) and _eager(*tensors)


def _eager(*tensors: Array) -> bool:
    """Whether nothing traces or differentiates what these go through."""
    import torch

    return (
        all(type(t) is torch.Tensor for t in tensors)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and not torch.compiler.is_compiling()
    )


def by_triton(*tensors: Array) -> bool:
    """Whether Triton decodes these: CUDA tensors that nothing traces or differentiates."""
    return tensors[0].device.type == "cuda" and _eager(*tensors) and gpu.missing() is None


def executor(size: int) -> str | None:
    """None where compiled code decodes ``size`` values, else why NumPy or torch does; the bytes are the same."""
    return jit.missing() if size >= SMALL else f"{size} values are fewer than {SMALL}"


def _compiled(arrays: list[Any], k: int, dtype: str, out: int) -> bool:
    """Write the values at an address; False where a scale2 is NaN, whose bits are passed on."""
    codes, scales, scale2 = arrays
    if np.isnan(scale2).any():
        return False
    from halfbyte import decode_code
    from halfbyte.vectors import KINDS

    *experts, n, width = codes.shape
    per_row = np.broadcast_to(scale2, (*experts, n, 1)).reshape(-1)
    rows, one = len(per_row), scale2.size == 1
    codes, scales = _rows(codes), _rows(scales)
    if one and codes.flags.c_contiguous and scales.flags.c_contiguous and k == width * 2:
        rows, k, per_row = 1, rows * k, per_row[:1]
    total, threads = rows * -(-k // decode_code.CHUNK), jit.thread_count()
    arguments = (
        *(KINDS[dtype], codes.ctypes.data, codes.strides[0], scales.ctypes.data, scales.strides[0], k),
        *(per_row.ctypes.data, 0 if one else per_row.strides[0], out, k * (4 if dtype == "float32" else 2)),
    )
    if threads == 1:
        decode_code.decode_some(0, total, *arguments)
    else:
        jit.run(decode_code.decode_all, min(total, 8 * threads), total, *arguments)
    return True


def _rows(a: Any) -> Any:
    """(*E, N, X) as (rows, X), the values of a row side by side."""
    a = a.reshape(-1, a.shape[-1])
    return a if a.strides[1] == 1 else np.ascontiguousarray(a)
