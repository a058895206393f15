"""Compiles what a run of the GPU's benchmark will need, in several processes at once: each call is made once, on zeros.

Triton and Humming keep machine code on disk, where the run finds it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

PROCESSES = 10

Shape = tuple[int, int]


def pack(layout: str, shape: Shape) -> None:
    import torch

    import halfbyte as hb

    n, k = shape
    codes, scales = (torch.zeros(n, k // size, dtype=torch.uint8, device="cuda") for size in (2, 16))
    hb.pack(hb.Weight(codes=codes, scales=scales, scale2=torch.ones((), device="cuda")), layout)
    torch.cuda.synchronize()


def product(layout: str, shape: Shape, name: str, dtype: str, rows: Sequence[int]) -> None:
    """With what a kernel has for each of these numbers of tokens, if it accepts them."""
    import torch

    from halfbyte.kernels import KERNELS
    from halfbyte.layouts import Packed, parse

    (kernel,) = (kernel for kernel in KERNELS if kernel.name == name)
    how = parse(layout)
    sizes = how.sizes(shape).items()
    buffers = {part: torch.zeros(size, dtype=torch.uint8, device="cuda") for part, size in sizes}
    packed = Packed(how, shape, buffers | {"scale2": torch.ones(1, 1, device="cuda")})
    for m in rows:
        x = torch.zeros(m, shape[1], dtype=getattr(torch, dtype), device="cuda")
        args = kernel.bundle(x=x, weight=packed, bias=None, out=x.new_zeros(m, shape[0]))
        if not kernel.refuse(args.call()):
            kernel.run(args)
    torch.cuda.synchronize()


def humming(shapes: Sequence[Shape], rows: Sequence[int]) -> None:
    from benchmarks import gpu_humming

    gpu_humming.settle()
    gpu_humming.compile_ahead(shapes, rows)


def _attempt(task: Callable[..., None], arguments: tuple[Any, ...]) -> str:
    """Why it failed, in a line; not every error survives the way between processes."""
    try:
        task(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def compile_ahead(
    layouts: Sequence[str], kernels: Sequence[str], shapes: Sequence[Shape], rows: Sequence[int], dtype: str,
    peers: Sequence[Shape] = (),
) -> list[str]:  # fmt: skip
    """Compile all combinations, and what Humming needs for ``peers``; a line for each that failed."""
    tasks: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}
    if peers:
        tasks["Humming"] = humming, (peers, rows)
    for layout in layouts:
        for shape in shapes:
            what = f"{layout}, {shape[0]}x{shape[1]}"
            tasks |= {f"{name}, {what}": (product, (layout, shape, name, dtype, rows)) for name in kernels}
            tasks[f"pack, {what}"] = pack, (layout, shape)
    failed = []
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        futures = {name: pool.submit(_attempt, *task) for name, task in tasks.items()}
        for name, future in futures.items():
            try:
                why = future.result()
            except BrokenProcessPool as error:
                return [*failed, f"{name}: a process ended: {error}"]
            failed += [f"{name}: {why}"] if why else []
    return failed
