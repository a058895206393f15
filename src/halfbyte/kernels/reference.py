"""The reference for ``linear``, layout ``rows``, in NumPy and in torch on any device.

::

    y = round(((x * pre_scale) @ (code * scale).T) * scale2 + bias)

Code times block scale has at most six significant bits, so the decoded weight is exact; everything else is
float32, and the result is rounded once. With one-hot activations y is the decoded weight, bit for bit but for the
sign of zeros. In general, with u = 0 for a float32 result, 2^-11 for float16 and 2^-8 for bfloat16::

    |error| <= ((K + 1) * 2^-24 + u) * sum|x * w|        pre_scale and a bias add 2^-24 each

Weights are decoded into a scratch of 8 MiB (or TILE rows, if that is more), so memory does not grow with N.
BLAS chooses its order of summation by the shape of the product: MKL takes other code for the last N % 8 rows and
for a single row, OpenBLAS also for small products. Therefore N is padded to whole tiles: MKL then sums each output
feature in one order, whatever its position, N and the number of threads; for OpenBLAS each product is one tile.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from halfbyte.kernels.base import Call, Kernel, linear_cost
from halfbyte.layouts import Rows
from halfbyte.numerics import BLOCK, E2M1_PAIRS, E4M3_VALUES, U8, Array, decode_e4m3

TILE: Final = 64
"""Output features in the smallest product that is handed to BLAS."""

SCRATCH_BYTES: Final = 8 << 20
"""At K = 576 and 4096, 4 to 16 MiB are equally fast; 1 MiB takes twice as long, 64 MiB leaves the L3 cache.
(2 cores of an EPYC with 32 MiB L3, torch 2.13)"""

_CODE_BYTES: Final = BLOCK // 2
_PAIRS = E2M1_PAIRS.view(np.int64)[:, 0]  # two f32 as one 8-byte word: gathered in one step


class _Scratch(threading.local):
    """Host memory that a thread keeps between calls: fresh pages would cost six times the decoding."""

    def __init__(self) -> None:
        self._memory: U8 = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> U8:
        """``nbytes`` of memory with unknown content."""
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]


_scratch = _Scratch()


def _chunks(n: int, blocks: int, bytes_per_weight: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of rows ``(start, stop, padded)`` whose decoding fits the scratch; padded is a multiple of TILE."""
    row_bytes = max(1, blocks * BLOCK * bytes_per_weight)
    step = max(1, SCRATCH_BYTES // (row_bytes * TILE)) * TILE
    for start in range(0, n, step):
        stop = min(start + step, n)
        yield start, stop, -(-(stop - start) // TILE) * TILE


def _launch_numpy(x: Array, buffers: Mapping[str, Array], bias: Array | None, out: Array) -> None:
    m, k = x.shape
    n, blocks = out.shape[1], -(-k // BLOCK)
    codes = buffers["codes"].reshape(n, blocks * _CODE_BYTES)
    scales = buffers["scales"].reshape(n, blocks)
    # Infinities and NaN pass through without a word, as they do in torch.
    with np.errstate(over="ignore", invalid="ignore"):
        x = x.astype(np.float32)
        if "pre_scale" in buffers:
            x *= buffers["pre_scale"].astype(np.float32)
        total = np.empty((-(-n // TILE) * TILE, m), np.float32)
        for start, stop, padded in _chunks(n, blocks, 4):
            count = stop - start
            w = _scratch.take(padded * blocks * BLOCK * 4).view(np.float32).reshape(padded, blocks * BLOCK)
            w[count:] = 0
            # mode="clip" only because "raise" would buffer the output
            np.take(_PAIRS, codes[start:stop], out=w[:count].view(np.int64), mode="clip")
            w[:count].reshape(count, blocks, BLOCK)[...] *= decode_e4m3(scales[start:stop])[..., None]
            product = np.matmul(w.reshape(-1, TILE, blocks * BLOCK)[..., :k], x.T)
            total[start : start + padded] = product.reshape(padded, m)
        y = total[:n].T
        y *= buffers["scale2"].reshape(-1)
        if bias is not None:
            y += bias.astype(np.float32)
        out[...] = y


@functools.cache
def _torch_tables(device: Any) -> tuple[Any, Any]:
    """The pairs of code values as int64 words (256,), and the E4M3 values (256,) f32, on ``device``."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(_PAIRS, device=device), torch.tensor(E4M3_VALUES, device=device)


def _torch_scratch(nbytes: int, device: Any) -> Any:
    import torch

    if device.type == "cpu":
        return torch.from_numpy(_scratch.take(nbytes))
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _launch_torch(x: Array, buffers: Mapping[str, Array], bias: Array | None, out: Array) -> None:
    import torch

    m, k = x.shape
    n, blocks = out.shape[1], -(-k // BLOCK)
    codes = buffers["codes"].view(n, blocks * _CODE_BYTES)
    scales = buffers["scales"].view(n, blocks)
    pairs, values = _torch_tables(x.device)
    x = x.float()
    if "pre_scale" in buffers:
        x = x * buffers["pre_scale"].float()
    total = torch.empty(m, -(-n // TILE) * TILE, device=x.device, dtype=torch.float32)
    for start, stop, padded in _chunks(n, blocks, 8):
        count = stop - start
        # Half of the scratch for the decoded rows, half for indices: torch gathers by int64 only. Through a table
        # that is expanded to one for each row, it gathers on all cores: 3x torch.embedding, 10x table[index].
        memory = _torch_scratch(padded * blocks * BLOCK * 8, x.device)
        half = padded * blocks * BLOCK * 4
        w = memory[:half].view(torch.float32).view(padded, blocks * BLOCK)
        words = memory[half:].view(torch.int64)
        index = words[: count * blocks * _CODE_BYTES].view(count, -1)
        index.copy_(codes[start:stop])
        torch.gather(pairs.expand(count, -1), 1, index, out=w[:count].view(torch.int64))
        index = words[: count * blocks].view(count, -1)
        index.copy_(scales[start:stop])
        scale = words[count * blocks :].view(torch.float32)[: count * blocks].view(count, -1)
        torch.gather(values.expand(count, -1), 1, index, out=scale)
        w[:count].view(count, blocks, BLOCK).mul_(scale[..., None])
        w[count:].zero_()
        torch.mm(x, w[:, :k].T, out=total[:, start : start + padded])
    y = total[:, :n].mul_(buffers["scale2"].view(-1))
    if bias is not None:
        y.add_(bias.float())
    out.copy_(y)


def _refuse(call: Call) -> str | None:
    if not isinstance(call.layout, Rows):
        return f"reads the layout rows, not {call.layout.key}"
    if len(call.shape) != 2:
        return f"takes one matrix (N, K), not expert axes {call.shape[:-2]}"
    return None


def _refuse_numpy(call: Call) -> str | None:
    if call.library != "numpy":
        return f"takes NumPy arrays, not {call.library} tensors"
    return _refuse(call)


def _refuse_torch(call: Call) -> str | None:
    if call.library != "torch":
        return "takes torch tensors, not NumPy arrays"
    try:
        precision = _matmul_precision(call.device)
    except ImportError:
        return "needs the package torch, which is not installed; run: pip install 'halfbyte[torch]'"
    if precision not in ("none", "ieee", "highest"):
        return (
            f"torch may compute float32 products in {precision} here; "
            'call torch.set_float32_matmul_precision("highest") for exact ones'
        )
    return _refuse(call)


def _matmul_precision(device: str) -> str:
    """What torch is set to compute float32 products in; "none", "ieee" and "highest" mean float32."""
    import torch

    backend = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    matmul: Any = getattr(backend, "matmul", None)
    precision = getattr(matmul, "fp32_precision", None)  # torch 2.9 and later
    return torch.get_float32_matmul_precision() if precision is None else str(precision)


TORCH = Kernel(
    name="reference-torch",
    op="linear",
    description="decodes a few rows at a time to float32, then a float32 matmul; any device",
    refuse=_refuse_torch,
    launch=_launch_torch,
    cost=linear_cost,
)
NUMPY = Kernel(
    name="reference-numpy",
    op="linear",
    description="decodes a few rows at a time to float32, then a float32 matmul",
    refuse=_refuse_numpy,
    launch=_launch_numpy,
    cost=linear_cost,
)
