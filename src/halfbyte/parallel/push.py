"""Sums of few values over GPUs that see each other's memory: one kernel, in which each rank writes to all others.

Every rank adds in the order of the ranks, so that all have the same bits.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from halfbyte import gpu
from halfbyte.errors import RankError

BLOCK: Final = 128
"""Values of a program, one for each thread."""
SLOTS: Final = 4096
"""Programs at most."""
HOPPER: Final = (9, 0)
"""From which compute capability on it starts before the kernel ahead has ended, and waits for it."""
MOST: Final = SLOTS * BLOCK
"""Values of a sum at most; NCCL is faster with more."""


class Push:
    """Buffers that the ranks of a group write to, one of each rank. All ranks make it together.

    Args:
        group: of torch.distributed, NCCL's.
        rank: this one's number.
        size: how many there are.
        timeout: seconds that the kernel waits for another rank.

    Raises:
        RuntimeError: these GPUs do not see each other's memory.
    """

    def __init__(self, group: Any, rank: int, size: int, timeout: float) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        self.rank, self.size, self.patience = rank, size, int(1e9 * timeout)
        self._buffer = symmetric.empty(2 * size * MOST, dtype=torch.int64, device=device)
        self._buffer.zero_()
        self._handle: Any = symmetric.rendezvous(self._buffer, group)
        seen = [self._handle.get_buffer(r, (2 * size * MOST,), torch.int64) for r in range(size)]
        if seen[rank].data_ptr() != self._buffer.data_ptr():
            raise RuntimeError("symmetric memory begins elsewhere than its tensor")
        self._addresses = torch.tensor([one.data_ptr() for one in seen], dtype=torch.int64, device=device)
        self._counters = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # ``made`` meets the other ranks next: all buffers are zero before anyone writes

    def sum(self, part: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """As ``Ranks.sum``, of at most ``MOST`` values in float32. A rank that does not answer makes it NaN."""
        from halfbyte.parallel.push_code import push_sum

        n, width = part.numel(), part.shape[-1]
        early = torch.cuda.get_device_capability(part.device) >= HOPPER
        more = {"launch_pdl": True} if early else {}
        with gpu.device_of(part):
            push_sum[(-(-n // BLOCK),)](
                part, out if bias is None else bias, out, self._addresses, self._counters, self.failed, n, width,
                self.patience, RANK=self.rank, RANKS=self.size, SLOTS=SLOTS, BLOCK=BLOCK, BIAS=bias is not None,
                EARLY=early, num_warps=BLOCK // 32, **more,
            )  # fmt: skip
        return out

    def check(self) -> None:
        """Wait for the device; RankError where another rank did not answer since this was made."""
        if int(self.failed):
            raise RankError(
                f"rank {self.rank} got no answer in a sum over {self.size} ranks within {self.patience / 1e9:g} s",
                hint="look for the first error among all ranks; this process cannot go on",
            )
