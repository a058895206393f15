"""Sums by copies, ranks as threads of one process; as a script, in Triton's interpreter.

TRITON_INTERPRET=1 python -m gpu_copies sums
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from halfbyte.parallel import push_code
from halfbyte.parallel.copies import Copies


class InTurn:
    """A kernel that one thread runs at a time: the interpreter is not made for more."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.lock = kernel, threading.Lock()

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **options: Any) -> None:
            with self.lock:
                self.kernel[grid](*args, **options)

        return run


def added(parts: list[Tensor], bias: Tensor | None, chunk: int) -> list[Tensor]:
    """What each rank gets, chunk by chunk, after a sum of other values."""
    size = len(parts)
    inboxes = [torch.full((1 << 20,), float("nan")) for _ in parts]
    sums = [torch.full((1 << 20,), -1, dtype=torch.int16) for _ in parts]
    outs = [torch.full(part.shape, float("nan"), dtype=torch.float16) for part in parts]
    together = threading.Barrier(size)

    def work(rank: int) -> None:
        made = object.__new__(Copies)
        made.rank, made.size, made._inboxes, made._sums = rank, size, inboxes, sums
        made._addresses = torch.tensor([one.data_ptr() for one in sums])
        made._meet = together.wait  # type: ignore[assignment, method-assign]
        for turn in (1.0, 0.0):
            chunks = list((parts[rank] + turn).split(chunk))
            at = 0
            for one in chunks:
                made.send(one, at)
                at += one.numel()
            made.finish(chunks, bias, outs[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outs


def sums() -> Iterator[str]:
    """In the order of the ranks, rounded once, the same on every rank."""
    push_code.add_parts = InTurn(push_code.add_parts)
    for size, rows, width, biased in itertools.product((2, 3, 4), (1, 5), (16, 1008), (False, True)):
        random = torch.Generator().manual_seed(size)
        parts = [torch.randn(rows * size, width, generator=random) for _ in range(size)]
        bias = torch.randn(width, generator=random) if biased else None
        wanted = parts[0].clone()
        for part in parts[1:]:
            wanted += part
        wanted = wanted if bias is None else wanted + bias
        name = f"{size} {rows} {width} {biased}"
        for made in added(parts, bias, 2 * size):
            assert torch.equal(made, wanted.half()), name
        yield name


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(case, sum(1 for _ in globals()[case]()))
