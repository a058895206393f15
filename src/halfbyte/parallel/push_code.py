"""Device code of ``halfbyte.parallel.push``, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_SEND = tl.constexpr("""
{
st.relaxed.sys.global.b64 [$1], $2;
mov.u32 $0, 0;
}
""")
_TAKE = tl.constexpr("""
{
.reg .pred here, early;
.reg .b32 flag;
.reg .b64 word, began, now;
mov.u64 began, %globaltimer;
mov.u32 $1, 1;
again:
ld.relaxed.sys.global.b64 word, [$2];
mov.b64 {$0, flag}, word;
setp.eq.u32 here, flag, $3;
@here bra done;
mov.u64 now, %globaltimer;
sub.u64 now, now, began;
setp.lt.u64 early, now, $4;
@early bra again;
mov.u32 $1, 0;
done:
}
""")


@triton.jit
def push_sum(
    part,
    bias,
    out,
    buffers,
    counters,
    failed,
    n,
    width,
    patience,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK values: this rank's go to every other rank's buffer, theirs are awaited in this one's, all are added.

    A word of a buffer is a value and, in its upper half, the number of the call, so that whoever sees the number sees
    the value. Of two halves of a buffer calls take one in turn: a rank that writes to one again has had the other's
    answer to the call between, which began after the other had read it.

    Args:
        part: (n,) f32.
        bias: (width,), or anything where not BIAS.
        out: (n,).
        buffers: (RANKS,) i64, addresses of the buffers (2, RANKS, SLOTS * BLOCK) i64 of all ranks.
        counters: (SLOTS,) i32, how many calls this program was in.
        failed: (1,) i32, set where another rank did not answer; it is not waited for again.
        patience: nanoseconds to wait for it, i64.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    call = tl.load(counters + pid) + 1
    patience = tl.where(tl.load(failed) == 0, patience, 0)
    own = tl.load(part + at, at < n, other=0.0)
    word = (call.to(tl.int64) << 32) | (own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    half = (call & 1).to(tl.int64) * RANKS
    for r in tl.static_range(RANKS):
        if r != RANK:
            there = tl.load(buffers + r) + ((half + RANK) * (SLOTS * BLOCK) + at) * 8
            tl.inline_asm_elementwise(_SEND, "=r,l,l", [there, word], dtype=tl.int32, is_pure=False, pack=1)
    total = tl.zeros((BLOCK,), tl.float32)
    came = tl.full((BLOCK,), 1, tl.int32)
    mine = tl.load(buffers + RANK)
    for r in tl.static_range(RANKS):
        if r == RANK:
            term = own
        else:
            here = mine + ((half + r) * (SLOTS * BLOCK) + at) * 8
            bits, ok = tl.inline_asm_elementwise(
                _TAKE,
                "=&r,=&r,l,r,l",
                [here, tl.zeros((BLOCK,), tl.int32) + call, tl.zeros((BLOCK,), tl.int64) + patience],
                dtype=(tl.int32, tl.int32),
                is_pure=False,
                pack=1,
            )
            term = bits.to(tl.float32, bitcast=True)
            came = came & ok
        total = term if r == 0 else total + term
    if BIAS:
        total += tl.load(bias + at % width, at < n, other=0.0).to(tl.float32)
    total = tl.where(came != 0, total, float("nan"))
    tl.store(out + at, total.to(out.dtype.element_ty), at < n)
    if tl.min(came, 0) == 0:  # behind its barrier every warp has read the counter
        tl.store(failed, 1)
    tl.store(counters + pid, call)


@triton.jit
def add_parts(
    own,
    others,
    bias,
    out,
    sums,
    start,
    n,
    width,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """BLOCK values of all ranks' parts added in the order of the ranks, then the bias, rounded, and told to all.

    Args:
        own: (n,) f32, this rank's.
        others: (RANKS, n) f32, those of the others.
        bias: (width,), or anything where not BIAS.
        out: (n,) bf16 or f16, whole rows.
        sums: (RANKS,) i64, addresses of buffers of all ranks, of which the others get the values, too.
        start: where, in values.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(RANKS):
        part = own if r == RANK else others + r * n
        term = tl.load(part + at, at < n, other=0.0)
        total = term if r == 0 else total + term
    if BIAS:
        total += tl.load(bias + at % width, at < n, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + at, rounded, at < n)
    for r in tl.static_range(RANKS):
        if r != RANK:
            there = tl.load(sums + r).to(tl.pointer_type(out.dtype.element_ty)) + start
            tl.store(tl.multiple_of(there, 16) + at, rounded, at < n)
