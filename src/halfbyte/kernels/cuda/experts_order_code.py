"""Device code of ``halfbyte.kernels.cuda.experts_order``, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def order(
    slots,
    count,
    to,
    SIZE: tl.constexpr,
    LOW: tl.constexpr,
    MID: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Blocks with more than MID slots first, then those with more than LOW, then the others; each in their order.

    Args:
        slots: (blocks, SIZE) i32, -1 behind the last one of each block.
        count: i32, how many blocks there are.
        to: (blocks,) i32, written.
        SIZE: slots of a block.
        LOW: see above.
        MID: see above; LOW at the least.
        CHUNK: blocks that are looked at together.
        EARLY: it may start before the kernel ahead of it ends, and the one behind before this one does.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    blocks = tl.load(count)
    placed = tl.zeros((), tl.int32)
    for kind in tl.static_range(3):
        for start in range(0, blocks, CHUNK):
            block = start + tl.arange(0, CHUNK)
            there = block < blocks
            large = tl.load(slots + block * SIZE + MID, mask=there, other=-1) >= 0
            small = tl.load(slots + block * SIZE + LOW, mask=there, other=-1) < 0
            mine = there & (tl.where(large, 0, tl.where(small, 2, 1)) == kind)
            rank = tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(to + placed + rank, block, mask=mine)
            placed += tl.sum(mine.to(tl.int32), 0)
