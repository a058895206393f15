"""Sums of many values over GPUs that see each other's memory, by copies that need none of their processors.

Each rank adds some of the rows. What it adds is copied to it by the others, and its sums, rounded, to them, while its
processors multiply what comes next. All add in the order of the ranks, so that they have the same bits.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from halfbyte import gpu

VALUES: Final = 1 << 23
"""Values of a chunk at most."""
BLOCK: Final = 2048
"""Values of a program that adds."""


class Copies:
    """Buffers that the ranks of a group copy to, one of each rank. All ranks make it together.

    Args:
        group: of torch.distributed, NCCL's.
        rank: this one's number.
        size: how many there are.
        timeout: seconds that a GPU waits for another one; then it fails.

    Raises:
        RuntimeError: these GPUs do not see each other's memory.
    """

    def __init__(self, group: Any, rank: int, size: int, timeout: float) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        self.rank, self.size, self._patience = rank, size, int(1000 * timeout)
        self._buffer = symmetric.empty(6 * VALUES, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self._buffer, group)
        self._inboxes = [self._handle.get_buffer(r, (VALUES,), torch.float32, 0) for r in range(size)]
        self._sums = [self._handle.get_buffer(r, (VALUES,), torch.int16, 2 * VALUES) for r in range(size)]

    def rows(self, width: int) -> int:
        """How many rows of a width a chunk has at most: as many for each rank; 0 where one is too wide."""
        return VALUES // width // self.size * self.size

    def add(self, part: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Add a chunk's parts, on the current stream.

        Args:
            part: (M, N) float32, at most ``rows(N)`` rows, as many for each rank.
            bias: (N,) or None.
            out: (M, N) bfloat16 or float16; written.
        """
        from halfbyte.parallel.push_code import add_parts

        each, rank = part.numel() // self.size, self.rank
        parts, made = part.view(self.size, each), out.view(self.size, each)
        places = [slice(r * each, (r + 1) * each) for r in range(self.size)]
        others = [(rank + step) % self.size for step in range(1, self.size)]
        for other in others:
            self._inboxes[other][places[rank]].copy_(parts[other])
        self._meet()
        with gpu.device_of(part):
            add_parts[(-(-each // BLOCK),)](
                parts[rank], self._inboxes[rank], out if bias is None else bias, made[rank], each, part.shape[-1],
                RANK=rank, RANKS=self.size, BLOCK=BLOCK, BIAS=bias is not None, num_warps=4,
            )  # fmt: skip
        for other in others:
            self._sums[other][places[rank]].copy_(made[rank].view(torch.int16))
        self._meet()
        for other in others:
            made[other].view(torch.int16).copy_(self._sums[rank][places[other]])

    def _meet(self) -> None:
        """Wait on the device until all ranks have come here, and all that they have copied is there."""
        self._handle.barrier(channel=0, timeout_ms=self._patience)
