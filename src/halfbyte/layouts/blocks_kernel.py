"""The Triton kernels of ``halfbyte.layouts.blocks``; loaded only to run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def recode(source, table, target, count, SIZE: tl.constexpr):
    """``table[source]``, bytes.

    Args:
        source: (count,) u8.
        table: (256,) u8.
        target: as source.
        count: of bytes.
        SIZE: bytes of a program.
    """
    first = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, SIZE)
    if first + SIZE <= count:  # without masks whole words are loaded
        tl.store(target + first + at, tl.load(table + tl.load(source + first + at).to(tl.int32)))
    else:
        inside = first + at < count
        byte = tl.load(source + first + at, mask=inside, other=0).to(tl.int32)
        tl.store(target + first + at, tl.load(table + byte), mask=inside)


@triton.jit(do_not_specialize=["count"])
def peak(source, target, count, SIZE: tl.constexpr):
    """The largest of bytes.

    Args:
        source: (count,) u8.
        target: (1,) i32, at most the largest byte at first.
        count: of bytes.
        SIZE: bytes of a program.
    """
    first = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, SIZE)
    if first + SIZE <= count:
        found = tl.max(tl.load(source + first + at).to(tl.int32), axis=0)
    else:
        found = tl.max(tl.load(source + first + at, mask=first + at < count, other=0).to(tl.int32), axis=0)
    tl.atomic_max(target, found)


@triton.jit(do_not_specialize=["count"])
def without_zeros(codes, scales, target, count, BLOCKS: tl.constexpr):
    """Copy the codes of blocks, as 0 where the block's scale is 0.

    Args:
        codes: (count,) i64, the 16 codes of each block.
        scales: (count,) u8.
        target: as codes.
        count: of blocks.
        BLOCKS: of a program.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = at < count
    scale = tl.load(scales + at, mask=inside, other=0)
    word = tl.load(codes + at, mask=inside, other=0)
    tl.store(target + at, tl.where(scale == 0, 0, word), mask=inside)
