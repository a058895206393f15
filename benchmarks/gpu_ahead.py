"""Compiles what a run of the GPU's benchmark will need, in several processes at once: each call is made once, on zeros.

Triton and Humming keep machine code on disk, where the run finds it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

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
    """With each configuration that a kernel has for these numbers of tokens, if it accepts them."""
    import torch

    from halfbyte.kernels import KERNELS, LinearArgs
    from halfbyte.layouts import Packed, parse

    (kernel,) = (kernel for kernel in KERNELS if kernel.name == name)
    how, done = parse(layout), set()
    sizes = how.sizes(shape).items()
    buffers = {part: torch.zeros(size, dtype=torch.uint8, device="cuda") for part, size in sizes}
    packed = Packed(how, shape, buffers | {"scale2": torch.ones(1, 1, device="cuda")})
    for m in rows:
        x = torch.zeros(m, shape[1], dtype=getattr(torch, dtype), device="cuda")
        args = LinearArgs(x=x, weight=packed, bias=None, out=x.new_zeros(m, shape[0]))
        if not kernel.refuse(args.call()):
            runs = m if kernel.configure is None else kernel.configure(args.call())
            if runs not in done:
                kernel.run(args)
            done.add(runs)
    torch.cuda.synchronize()


def humming(shapes: Sequence[Shape], rows: Sequence[int]) -> None:
    from benchmarks import gpu_humming

    if gpu_humming.present():
        gpu_humming.compile_ahead(shapes, rows)


def compile_ahead(
    layouts: Sequence[str], kernels: Sequence[str], shapes: Sequence[Shape], rows: Sequence[int], dtype: str,
    peers: Sequence[Shape] = (),
) -> list[str]:  # fmt: skip
    """Compile all combinations, and what Humming needs for ``peers``; a line for each that failed."""
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        tasks: dict[Future[None], str] = {}
        if peers:
            tasks[pool.submit(humming, peers, rows)] = "Humming"
        for layout in layouts:
            for shape in shapes:
                for name in kernels:
                    task = pool.submit(product, layout, shape, name, dtype, rows)
                    tasks[task] = f"{name}, {layout}, {shape[0]}x{shape[1]}"
                tasks[pool.submit(pack, layout, shape)] = f"pack, {layout}, {shape[0]}x{shape[1]}"
        failed = []
        for task in as_completed(tasks):
            if error := task.exception():
                first = (str(error).splitlines() or [""])[0]
                failed.append(f"{tasks[task]}: {type(error).__name__}: {first}")
        return failed
