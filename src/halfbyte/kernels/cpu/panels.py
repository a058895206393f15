"""``linear`` on a CPU, layout ``rows``, exact, for many tokens: rows decode to float32 panels that the BLAS multiplies.

::

    y = round(sum(x * code * scale) * scale2 + bias)

A panel is some MiB of rows, decoded by compiled code without scale2, which is exact. The BLAS is torch's, in float32;
its order of sums is its own. The bound is that of the other compiled products.

It pays where float32 products have no wider unit: on Intel's CPUs with AVX-512, MKL multiplies 1.8 times as fast as
``cpu-avx512`` from some hundred tokens on; AMD's Zen 4 gains nothing.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np

from halfbyte import jit
from halfbyte.kernels.base import Call, Kernel, LinearArgs, linear_cost, why_not_float32, why_not_torch
from halfbyte.kernels.cpu.exact import address_of, why_not_rows
from halfbyte.numerics import BLOCK

FEWEST: Final = 128
"""Tokens from which on it is used: below, decoding is not shared by enough of them."""
_PANEL: Final = 4 << 20
"""Bytes of a panel."""
_ONE: Final = np.ones(1, np.float32)


class _Scratch(threading.local):
    """Memory that a thread of Python keeps between calls."""

    def __init__(self) -> None:
        self.panel = np.empty(0, np.float32)


_scratch = _Scratch()


def _panels(args: LinearArgs) -> Any:
    """Decode: yields (first row, the panel's rows (R, K) f32 in NumPy), the same memory each time."""
    from halfbyte import decode_code
    from halfbyte.vectors import KINDS

    buffers = args.weight.buffers()
    n, k = args.out.shape[1], args.x.shape[1]
    width = -(-k // BLOCK) * BLOCK
    planes = buffers["codes"], buffers["scales"]
    codes, scales = (a.contiguous() for a in planes)
    rows = max(1, min(n, _PANEL // (4 * k)))
    if _scratch.panel.size < rows * k:
        _scratch.panel = np.empty(rows * k, np.float32)
    panel = _scratch.panel[: rows * k].reshape(rows, k)
    for start in range(0, n, rows):
        count = min(rows, n - start)
        total = count * -(-k // decode_code.CHUNK)
        jit.run(
            decode_code.decode_all,
            min(total, 8 * jit.thread_count()),
            total,
            KINDS["float32"],
            address_of(codes) + start * (width // 2),
            width // 2,
            address_of(scales) + start * (width // BLOCK),
            width // BLOCK,
            k,
            address_of(_ONE),
            0,
            address_of(panel),
            4 * k,
        )
        yield start, panel[:count]


def _launch(args: LinearArgs) -> None:
    import torch

    buffers = args.weight.buffers()
    x = args.x.float()
    if "pre_scale" in buffers:
        x = x * buffers["pre_scale"].float()
    scale2 = buffers["scale2"].reshape(-1)
    for start, panel in _panels(args):
        rows = slice(start, start + len(panel))
        y = torch.mm(x, torch.from_numpy(panel).T, out=x.new_empty(len(x), len(panel)))  # as no autocast rounds it
        y *= scale2[rows] if len(scale2) > 1 else scale2
        if args.bias is not None:
            y += args.bias[rows].float()
        args.out[:, rows] = y


def _refuse(call: Call) -> tuple[str, ...]:
    reasons = list(why_not_rows(call))
    if call.library != "torch":  # NumPy's own BLAS waits for Numba's threads, which wait for work
        reasons.extend(why_not_torch(call.library))
    if call.rows < FEWEST:
        reasons.append(f"is for {FEWEST} tokens and more, not {call.rows}")
    if reasons:
        return tuple(reasons)
    if jit.has("avx512bw") and jit.cpu_name().startswith("znver"):
        reasons.append(f"is no faster than cpu-avx512 on this CPU ({jit.cpu_name()})")
    reasons.extend(why_not_float32(call.device))
    threads, blas = jit.thread_count(), _blas_threads()
    if threads != blas:
        reasons.append(f"computes on the {blas} threads of torch, where {threads} are asked for")
    return tuple(reasons)


def _blas_threads() -> int:
    import torch

    return int(torch.get_num_threads())


def _load(call: Call) -> None:
    from halfbyte import decode_code  # noqa: F401


PANELS = Kernel(
    name="cpu-panels",
    bundle=LinearArgs,
    description="decodes some rows at a time to float32, which the BLAS multiplies; for many tokens",
    refuse=_refuse,
    load=_load,
    launch=_launch,
    cost=linear_cost,
)
