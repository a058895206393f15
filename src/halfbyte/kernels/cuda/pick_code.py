"""Device code of ``halfbyte.kernels.cuda.pick``, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def pick(
    logits,
    tokens,
    counters,
    log,
    tops,
    places,
    arrived,
    V,
    T,
    B,
    BLOCK: tl.constexpr,
    SP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK logits of a row; what is best in the row, by the program that ends last.

    Args:
        logits: (B, V).
        tokens: (B,).
        counters: (2, B).
        log: (T, B).
        tops: (B, programs), scratch.
        places: (B, programs), scratch.
        arrived: (B,) zeros, and again at the end.
        V: logits of a row.
        T: rows of the log.
        B: rows.
        BLOCK: logits of a program.
        SP: programs of a row, or the next power of two.
        EARLY: it starts before the kernel ahead of it ends.
    """
    part, programs, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        gdc_wait()
    value = tl.load(logits + row.to(tl.int64) * V + at, mask=at < V, other=-float("inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)  # noqa: PLR0124 - NaN
    top, place = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(tops + row * programs + part, top.to(tl.int32, bitcast=True))
    tl.store(places + row * programs + part, part * BLOCK + place)
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
    if before == programs - 1:
        tl.debug_barrier()
        each = tl.arange(0, SP)
        found = tl.load(tops + row * programs + each, mask=each < programs, other=0, volatile=True)
        found = tl.where(each < programs, found.to(tl.float32, bitcast=True), -float("inf"))
        _, best = tl.max(found, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(places + row * programs + best, volatile=True).to(tl.int64)
        position, count = tl.load(counters + row), tl.load(counters + B + row)
        tl.store(tokens + row, token)
        tl.store(log + count * B + row, token, mask=(count >= 0) & (count < T))
        tl.store(counters + row, position + 1)
        tl.store(counters + B + row, count + 1)
        tl.store(arrived + row, 0)
