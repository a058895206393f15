"""add_norm with passengers; and passengers alone."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.cuda.step_code import _ask, _narrow, _rounded, _wide


@triton.jit
def ask_pieces(pieces, count, i, programs, LANES: tl.constexpr):
    j = tl.arange(0, LANES) * programs + i
    at = tl.load(pieces + 2 * j, mask=j < count, other=0)
    nbytes = tl.load(pieces + 2 * j + 1, mask=j < count, other=0)
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [at, nbytes.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def ask_all(pieces, COUNT, LANES: tl.constexpr):
    ask_pieces(pieces, COUNT, tl.program_id(0), tl.num_programs(0), LANES)


@triton.jit
def add_norm(
    x, residual, weight, normed, total, H, eps, pieces, COUNT, ROWS, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
    BITS: tl.constexpr, EARLY: tl.constexpr, PASS: tl.constexpr, LATE: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < H
    if EARLY:
        gdc_launch_dependents()
    if PASS:
        if tl.program_id(0) >= ROWS:
            if LATE:
                gdc_wait()
            ask_pieces(pieces, COUNT, tl.program_id(0) - ROWS, tl.num_programs(0) - ROWS, 512)
            return
    if EARLY:
        line = tl.arange(0, BLOCK // 64) * 64
        _ask(weight + tl.minimum(line, H - 1))
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * H + column
    v = _wide(tl.load(x + at, mask=inside, other=0), BITS)
    w = _wide(tl.load(weight + column, mask=inside, other=0), BITS)
    if RESIDUAL:
        v += _wide(tl.load(residual + at, mask=inside, other=0), BITS)
        v = _rounded(v, x.dtype.element_ty, BITS)
        tl.store(total + at, _narrow(v, x.dtype.element_ty, BITS), mask=inside)
    mean = tl.sum(v * v, 0) / H
    v = _rounded(v * tl.rsqrt(mean + eps), x.dtype.element_ty, BITS)
    tl.store(normed + at, _narrow(v * w, x.dtype.element_ty, BITS), mask=inside)
