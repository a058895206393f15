"""Sums of many values over GPUs that see each other's memory, for the most part by copies that need no processor.

Each rank adds some rows of every chunk: the others copy their parts of them to it while the next chunk is multiplied.
When all are there it adds them in the order of the ranks, so that all have the same bits, and writes what it rounded to
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from halfbyte import gpu

VALUES: Final = 1 << 25
"""Values of a sum at most; their parts take four bytes each on every rank, and sums two."""
BLOCK: Final = 2048
"""Values of a program that adds."""


class Copies:
    """Buffers that the ranks of a group write to, one of each rank. All ranks make it together.

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
        if self._inboxes[rank].data_ptr() != self._buffer.data_ptr():
            raise RuntimeError("symmetric memory begins elsewhere than its tensor")
        addresses = [made.data_ptr() for made in self._sums]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)

    def send(self, part: Tensor, at: int) -> None:
        """Copy a chunk's rows to the ranks that add them, on the current stream.

        Args:
            part: (M, N) float32, with as many rows for each rank.
            at: how many values of the sum come before it.
        """
        each = part.numel() // self.size
        parts = part.view(self.size, each)
        place = slice(at + self.rank * each, at + (self.rank + 1) * each)
        for other in self._others():
            self._inboxes[other][place].copy_(parts[other])

    def finish(self, parts: Sequence[Tensor], bias: Tensor | None, out: Tensor) -> None:
        """Add the chunks that all ranks have sent, on a stream that is behind their copies.

        Args:
            parts: the chunks one after the other.
            bias: (N,) or None.
            out: (M, N) bfloat16 or float16, M of all chunks; written.
        """
        from halfbyte.parallel.push_code import add_parts

        rank, flat = self.rank, out.view(-1)
        bits, sums = flat.view(torch.int16), self._sums[rank]
        self._meet()
        at, places = 0, []
        for part in parts:
            each = part.numel() // self.size
            own = at + rank * each
            with gpu.device_of(part):
                add_parts[(-(-each // BLOCK),)](
                    part.view(-1)[rank * each :], self._inboxes[rank][at:], out if bias is None else bias, flat[own:],
                    self._addresses, own, each, part.shape[-1],
                    RANK=rank, RANKS=self.size, BLOCK=BLOCK, BIAS=bias is not None, num_warps=4,
                )  # fmt: skip
            places += [slice(at + r * each, at + (r + 1) * each) for r in self._others()]
            at += part.numel()
        self._meet()
        for place in places:
            bits[place].copy_(sums[place])

    def _others(self) -> list[int]:
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _meet(self) -> None:
        """Wait on the device until all ranks have come here, and all that they have written is there."""
        self._handle.barrier(channel=0, timeout_ms=self._patience)
