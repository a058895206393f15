"""The reference for ``linear``, layout ``rows``, in NumPy and in torch on any device.

::

    y = round(((x * pre_scale) @ (code * scale).T) * scale2 + bias)

Code times block scale has at most six significant bits, so the decoded weight is exact; everything else is
float32, and the result is rounded once. With one-hot activations y is the decoded weight, bit for bit but for the
sign of zeros. In general, with u = 0 for a float32 result, 2^-11 for float16 and 2^-8 for bfloat16::

    |error| <= ((K + 1) * 2^-24 + u) * sum|x * w|        pre_scale and a bias add 2^-24 each

Weights are decoded into a scratch of 8 MiB (or TILE rows, if that is more), so memory does not grow with N.
BLAS chooses its order of summation by the shape of the product: MKL takes other code for the last N % 8 rows and
for a single row, OpenBLAS also for small products. Therefore N is padded to whole tiles. In NumPy each product is one
tile, so an output feature depends on nothing but its own weights. In torch, where that would be slow, the same holds
for MKL on one thread; on several, MKL may cut K by the shape too (a Xeon with 2 to 16 threads does, an EPYC with 2
does not).
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Final

import numpy as np

from halfbyte.kernels.base import (
    Call,
    Kernel,
    LinearArgs,
    linear_cost,
    load_torch,
    nothing_to_load,
    why_not_float32,
    why_not_numpy,
    why_not_torch,
)
from halfbyte.layouts import Rows
from halfbyte.numerics import BLOCK, E2M1_PAIRS, E4M3_VALUES, F32, U8, Array, decode_e4m3

TILE: Final = 64
"""Output features in the smallest product that is handed to BLAS."""

SCRATCH_BYTES: Final = 8 << 20
"""At K = 576 and 4096, 4 to 16 MiB are equally fast; 1 MiB takes twice as long, 64 MiB leaves the L3 cache.
(2 cores of an EPYC with 32 MiB L3, torch 2.13)"""

_NUMPY_BYTES: Final = 4
"""Scratch for each weight: the f32."""

_TORCH_BYTES: Final = 7
"""Scratch for each weight: the f32, the integer before it, and a quarter of an i64 index."""

_CODE_BYTES: Final = BLOCK // 2
_PAIRS = E2M1_PAIRS.view(np.int64)[:, 0]  # two f32 as one 8-byte word: gathered in one step


def _quads() -> Any:
    """(65536,) i32: twice the values of four codes, as four i8. 256 KiB, which a core's L2 cache holds."""
    pairs = (2 * E2M1_PAIRS).astype(np.int8).view(np.uint16)[:, 0].astype(np.uint32)
    return (pairs[:, None] << 16 | pairs).reshape(-1).view(np.int32)


class _Scratch(threading.local):
    """Host memory that a thread keeps between calls: fresh pages would cost six times the decoding."""

    def __init__(self) -> None:
        self._memory: U8 = np.empty(0, np.uint8)
        self.decoders: dict[tuple[int, int], _Decoder] = {}
        """Those of torch, by (rows, K): making their views again in each call would cost 20 us."""

    def take(self, nbytes: int) -> U8:
        """``nbytes`` of memory with unknown content."""
        if self._memory.size < nbytes:
            self.decoders.clear()
            self._memory = np.empty(max(nbytes, SCRATCH_BYTES), np.uint8)
        return self._memory[:nbytes]


_scratch = _Scratch()


def _rows_at_once(blocks: int, bytes_per_weight: int) -> int:
    """Whole tiles whose decoding fits the scratch."""
    tile_bytes = max(1, TILE * blocks * BLOCK * bytes_per_weight)
    return max(1, SCRATCH_BYTES // tile_bytes) * TILE


def _whole_tiles(n: int) -> int:
    return -(-n // TILE) * TILE


def _launch_numpy(args: LinearArgs) -> None:
    buffers = args.weight.buffers()
    m, k = args.x.shape
    n, blocks = args.out.shape[1], -(-k // BLOCK)
    codes = buffers["codes"].reshape(n, blocks * _CODE_BYTES)
    scales = buffers["scales"].reshape(n, blocks)
    # Infinities and NaN pass through without a word, as they do in torch.
    with np.errstate(over="ignore", invalid="ignore"):
        x = args.x.astype(np.float32)
        if "pre_scale" in buffers:
            x *= buffers["pre_scale"].astype(np.float32)
        total = np.empty((_whole_tiles(n), m), np.float32)
        step = _rows_at_once(blocks, _NUMPY_BYTES)
        for start in range(0, n, step):
            rows = slice(start, start + step)
            w = _decode_numpy(codes[rows], scales[rows])
            product = np.matmul(w.reshape(-1, TILE, blocks * BLOCK)[..., :k], x.T)
            total[start : start + len(w)] = product.reshape(len(w), m)
        y = total[:n].T
        y *= buffers["scale2"].reshape(-1)
        if args.bias is not None:
            y += args.bias.astype(np.float32)
        args.out[...] = y


def _decode_numpy(codes: U8, scales: U8) -> F32:
    """(rows, K/2) and (rows, G) u8 to f32 without scale2, in the scratch; rows of 0 fill the last tile."""
    rows, blocks = scales.shape
    k, padded = blocks * BLOCK, _whole_tiles(rows)
    w = _scratch.take(padded * k * _NUMPY_BYTES).view(np.float32).reshape(padded, k)
    w[rows:] = 0
    np.take(_PAIRS, codes, out=w[:rows].view(np.int64), mode="clip")  # mode="raise" would buffer the output
    w[:rows].reshape(rows, blocks, BLOCK)[...] *= decode_e4m3(scales)[..., None]
    return w


class _Decoder:
    """Decodes some rows in torch, as _decode_numpy does; called with codes and scales, gives (K, rows) f32.

    Four codes are gathered at once, as integers of twice their value, and widened: 1.5x gathering two f32. torch
    gathers by int64 only, and on all cores only through a table that is expanded to one for each row: that is 3x
    torch.embedding and 10x table[index].
    """

    def __init__(self, rows: int, k: int, device: Any) -> None:
        import torch

        blocks = -(-k // BLOCK)
        row, padded = blocks * BLOCK, _whole_tiles(rows)
        count = padded * row
        with torch.inference_mode(False):
            if device.type == "cpu":
                memory = torch.from_numpy(_scratch.take(count * _TORCH_BYTES))
            else:
                memory = torch.empty(count * _TORCH_BYTES, dtype=torch.uint8, device=device)
            w = memory[: count * 4].view(torch.float32).view(padded, row)
            index = memory[count * 4 : count * 6].view(torch.int64)
            integers = memory[count * 6 :][: rows * row]
            quads, halves = _torch_tables(device)
            self.quads, self.halves = quads.expand(rows, -1), halves.expand(rows, -1)
            self.code_index = index[: rows * row // 4].view(rows, row // 4)
            self.words = integers.view(torch.int32).view(rows, row // 4)
            self.integers = integers.view(torch.int8).view(rows, row)
            self.scale_index = index[: rows * blocks].view(rows, blocks)
            self.scale = index[rows * blocks :].view(torch.float32)[: rows * blocks].view(rows, blocks)
            self.scale_of_block = self.scale[..., None]
            self.values = w[:rows]
            self.blocks = w[:rows].view(rows, blocks, BLOCK)
            self.padding = w[rows:] if padded > rows else None
            self.decoded = w.T[:k]

    def __call__(self, codes: Array, scales: Array) -> Array:
        import torch

        self.code_index.copy_(codes.view(torch.uint16))
        torch.gather(self.quads, 1, self.code_index, out=self.words)
        self.values.copy_(self.integers)
        self.scale_index.copy_(scales)
        torch.gather(self.halves, 1, self.scale_index, out=self.scale)
        self.blocks.mul_(self.scale_of_block)
        if self.padding is not None:
            self.padding.zero_()
        return self.decoded


@functools.cache
def _torch_tables(device: Any) -> tuple[Any, Any]:
    """The table of _quads as (1, 65536) i32, and half of each E4M3 value as (1, 256) f32, on ``device``."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(_quads()[None], device=device), torch.tensor(E4M3_VALUES[None] / 2, device=device)


def _decoder(rows: int, k: int, device: Any) -> _Decoder:
    if device.type != "cpu":
        return _Decoder(rows, k, device)
    known = _scratch.decoders.get((rows, k))
    if known is None:
        known = _Decoder(rows, k, device)
        _scratch.decoders[rows, k] = known
    return known


def _launch_torch(args: LinearArgs) -> None:
    import torch

    buffers = args.weight.buffers()
    m, k = args.x.shape
    n, blocks = args.out.shape[1], -(-k // BLOCK)
    codes = buffers["codes"].reshape(n, blocks * _CODE_BYTES)
    if codes.storage_offset() % 2:
        codes = codes.clone()  # read by 16 bits
    scales = buffers["scales"].reshape(n, blocks)
    x = args.x.float()
    if "pre_scale" in buffers:
        x = x * buffers["pre_scale"].float()
    total = torch.empty(m, _whole_tiles(n), device=x.device, dtype=torch.float32)
    step = _rows_at_once(blocks, _TORCH_BYTES)
    for start in range(0, n, step):
        rows = min(step, n - start)
        w = _decoder(rows, k, x.device)(codes[start : start + rows], scales[start : start + rows])
        torch.mm(x, w, out=total[:, start : start + w.shape[1]])
    y = total[:, :n]
    y *= buffers["scale2"].reshape(-1)
    if args.bias is not None:
        y += args.bias.float()
    args.out.copy_(y)


def _refuse(call: Call) -> tuple[str, ...]:
    reasons = []
    if not isinstance(call.layout, Rows):
        reasons.append(f"reads the layout rows, not {call.layout.key}")
    if len(call.shape) != 2:
        reasons.append(f"takes one matrix (N, K), not expert axes {call.shape[:-2]}")
    return tuple(reasons)


def _refuse_numpy(call: Call) -> tuple[str, ...]:
    return why_not_numpy(call.library) + _refuse(call)


def _refuse_torch(call: Call) -> tuple[str, ...]:
    no_torch = why_not_torch(call.library, call.elsewhere)
    return no_torch + (() if no_torch or call.elsewhere else why_not_float32(call.device)) + _refuse(call)


def _load_torch(call: Call) -> None:
    load_torch(call)
    import torch

    _torch_tables(torch.device(call.device))


TORCH = Kernel(
    name="reference-torch",
    bundle=LinearArgs,
    description="decodes a few rows at a time to float32, then a float32 matmul; any device",
    refuse=_refuse_torch,
    load=_load_torch,
    launch=_launch_torch,
    cost=linear_cost,
)
NUMPY = Kernel(
    name="reference-numpy",
    bundle=LinearArgs,
    description="decodes a few rows at a time to float32, then a float32 matmul",
    refuse=_refuse_numpy,
    load=nothing_to_load,
    launch=_launch_numpy,
    cost=linear_cost,
)
