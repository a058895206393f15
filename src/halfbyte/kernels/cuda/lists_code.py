"""Device code of ``halfbyte.kernels.cuda.lists``, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.cuda.fragments_code import widened


@triton.jit
def places_of(
    at, there, places, EXPERTS: tl.constexpr, FIRST: tl.constexpr, LOCAL: tl.constexpr, NULL: tl.constexpr,
    UNKNOWN: tl.constexpr,
):  # fmt: skip
    """The place in the stack of the experts whose numbers lie at addresses; NULL or UNKNOWN where there is none.

    Args:
        at: addresses of i32 or i64.
        there: which of them are read; UNKNOWN for the others.
        places: (EXPERTS,) of each number its place, or negative; if FIRST is negative.
        EXPERTS: how many there are, null ones too.
        FIRST: the number of the first of the stack, where they follow each other; else negative.
        LOCAL: how many the stack holds.
        NULL: for those that it does not hold.
        UNKNOWN: for numbers of no expert.
    """
    number = tl.load(at, mask=there, other=-1)
    known = (number >= 0) & (number < EXPERTS)
    number = tl.where(known, number, 0).to(tl.int32)
    if FIRST < 0:
        place = tl.load(places + number, mask=known, other=-1)
    else:
        place = tl.where(known, number - FIRST, -1)
    return tl.where((place >= 0) & (place < LOCAL), place, tl.where(known, NULL, UNKNOWN))


@triton.jit
def counts(
    indices, places, table, SLOTS,
    CHUNK: tl.constexpr, BINS: tl.constexpr, EXPERTS: tl.constexpr, FIRST: tl.constexpr, LOCAL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """How often each place is among CHUNK slots: a row of (chunks, BINS)."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    place = places_of(indices + slot, slot < SLOTS, places, EXPERTS, FIRST, LOCAL, -1, -1)
    found = tl.histogram(tl.maximum(place, 0), BINS, mask=place >= 0)
    tl.store(table + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit
def sums(table, CHUNKS, ROWS: tl.constexpr, SOME: tl.constexpr, BINS: tl.constexpr, EARLY: tl.constexpr):
    """Of SOME places the counts in each of CHUNKS chunks to those in all before it; of all, in one more row."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * SOME + tl.arange(0, SOME)
    before = tl.zeros([SOME], tl.int32)
    for first in range(0, CHUNKS, ROWS):
        chunk = first + tl.arange(0, ROWS)[:, None]
        at = table + chunk * BINS + place[None, :]
        found = tl.load(at, mask=chunk < CHUNKS, other=0)
        tl.store(at, before[None, :] + tl.cumsum(found, 0) - found, mask=chunk < CHUNKS)
        before += tl.sum(found, 0)
    tl.store(table + CHUNKS * BINS + place, before)


@triton.jit(do_not_specialize=["SLOTS"])
def lists(
    indices, places, blocks, slots, count, offsets, table, refused, SLOTS,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    FILL: tl.constexpr, BINS: tl.constexpr, EXPERTS: tl.constexpr, FIRST: tl.constexpr, LOCAL: tl.constexpr,
    NULL: tl.constexpr, UNKNOWN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Where CHUNK slots go.

    A slot's rank among those of its place is how many are in earlier chunks, and earlier in its own.

    Args:
        indices: (SLOTS,) i32 or i64.
        places: as of ``places_of``.
        blocks: the place of each block.
        slots: SIZE for each block; -1 where a block is not full.
        count: (1,), of blocks.
        offsets: (LOCAL + 1,), of the slots of each place among all that have one.
        table: (chunks, BINS) as of ``counts``, or (chunks + 1, BINS) as of ``sums``, if ALL is 0.
        refused: (1,) i64: which slot is refused, as in ``halfbyte.kernels.cuda.refused``.
        SLOTS: how many there are.
        SIZE: slots of a block.
        CHUNK: slots of a program, a power of two.
        ALL: SLOTS or more, a power of two, if each program looks at all of them; else 0.
        ROWS: if ALL is 0, rows of ``table`` that are added up at once, a power of two, where it is as of ``counts``;
            else 0.
        TILES: of so many.
        FILL: SIZE or more, a power of two.
        BINS: LOCAL or more, a power of two.
        EXPERTS: as of ``places_of``.
        FIRST: as of ``places_of``.
        LOCAL: as of ``places_of``.
        NULL: as of ``places_of``: -1 if they are skipped, -2 if refused.
        UNKNOWN: as of ``places_of``: -1 if they are skipped, -3 if refused.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
    """
    start = tl.program_id(0) * CHUNK
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if ALL:
        each = tl.arange(0, ALL)
        every = places_of(indices + each, each < SLOTS, places, EXPERTS, FIRST, LOCAL, -1, -1)
        total = tl.histogram(tl.maximum(every, 0), BINS, mask=every >= 0)
        if ALL > CHUNK:
            before = tl.histogram(tl.maximum(every, 0), BINS, mask=(every >= 0) & (each < start))
        else:
            before = tl.zeros([BINS], tl.int32)
    elif ROWS:
        total = tl.zeros([BINS], tl.int32)
        before = tl.zeros([BINS], tl.int32)
        for tile in tl.static_range(TILES):
            row = tile * ROWS + tl.arange(0, ROWS)[:, None]
            found = tl.load(table + row * BINS + tl.arange(0, BINS)[None, :], mask=row < tl.num_programs(0), other=0)
            total += tl.sum(found, 0)
            before += tl.sum(tl.where(row < tl.program_id(0), found, 0), 0)
    else:
        total = tl.load(table + tl.num_programs(0) * BINS + tl.arange(0, BINS))
        before = tl.load(table + tl.program_id(0) * BINS + tl.arange(0, BINS))
    full = (total + (SIZE - 1)) // SIZE
    block = tl.cumsum(full, 0) - full
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        tl.store(count, tl.sum(full, 0))
        tl.store(offsets + 1 + bins, tl.cumsum(total, 0), mask=bins < LOCAL)
        tl.store(offsets, 0)

    slot = start + tl.arange(0, CHUNK)
    place = places_of(indices + slot, slot < SLOTS, places, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN)
    listed = place >= 0
    own = tl.maximum(place, 0)
    PART: tl.constexpr = min(CHUNK, 32)
    ahead = tl.zeros([CHUNK, PART], tl.int32)
    for part in tl.static_range(0, CHUNK, PART):
        again = start + part + tl.arange(0, PART)
        theirs = places_of(indices + again, again < SLOTS, places, EXPERTS, FIRST, LOCAL, -1, -1)
        ahead += ((theirs[None, :] == place[:, None]) & (again[None, :] < slot[:, None])).to(tl.int32)
    rank = tl.gather(before, own, 0) + tl.sum(ahead, 1)
    base = tl.gather(block, own, 0)
    last = listed & (rank + 1 == tl.gather(total, own, 0))
    tl.store(blocks + base + rank // SIZE, place, mask=listed & (rank % SIZE == 0))
    to = base * SIZE + rank
    tl.store(slots + to, slot, mask=listed)
    if not ALL:
        after = tl.arange(0, FILL)
        one = tl.program_id(0)
        while one < LOCAL:
            mine = tl.arange(0, BINS) == one
            many = tl.sum(tl.where(mine, total, 0), 0)
            end = tl.sum(tl.where(mine, block, 0), 0) * SIZE + many
            tl.store(slots + end + after, -1, mask=after < (SIZE - many % SIZE) % SIZE)
            one += tl.num_programs(0)
    else:
        STEP: tl.constexpr = 8 if SIZE > 8 else SIZE
        for step in tl.static_range(0, SIZE, STEP):
            after = 1 + step + tl.arange(0, STEP)[None, :]
            empty = last[:, None] & (rank[:, None] % SIZE + after < SIZE)
            tl.store(slots + (to[:, None] + after), -1, mask=empty)
    if NULL < -1 or UNKNOWN < -1:
        worst = tl.min(tl.where((place < -1) & (slot < SLOTS), slot, SLOTS), 0)
        if worst < SLOTS:
            tell(refused, indices, worst, EXPERTS)


@triton.jit
def tell(refused, indices, slot, EXPERTS: tl.constexpr):
    """Write which slot is refused, as in ``halfbyte.kernels.cuda.refused``."""
    number = tl.load(indices + slot).to(tl.int64)
    null = tl.where((number >= 0) & (number < EXPERTS), 1, 0).to(tl.int64)
    number = tl.minimum(tl.maximum(number, -2147483648), 2147483647)
    tl.store(refused, (number << 32) | (null << 31) | (slot + 1).to(tl.int64))


@triton.jit
def runs(
    sizes, blocks, slots, count, offsets, SLOTS,
    SIZE: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, LOCAL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """CHUNK blocks of slots that are sorted already.

    Args:
        sizes: (LOCAL,) i32 or i64, slots of each place; negative ones count as 0.
        blocks: as of ``lists``.
        slots: as of ``lists``; of slots from SLOTS on nothing is listed.
        count: as of ``lists``.
        offsets: as of ``lists``.
        SLOTS: how many there are.
        SIZE: slots of a block.
        WIDE: SIZE or more, a power of two.
        CHUNK: blocks of a program, a power of two.
        BINS: LOCAL or more, a power of two.
        LOCAL: places.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
    """
    bins = tl.arange(0, BINS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    size = tl.maximum(tl.load(sizes + bins, mask=bins < LOCAL, other=0), 0).to(tl.int32)
    ends = tl.cumsum(size, 0)
    starts = tl.minimum(ends - size, SLOTS)
    ends = tl.minimum(ends, SLOTS)
    size = ends - starts
    full = (size + (SIZE - 1)) // SIZE
    last = tl.cumsum(full, 0)
    block = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    there = block < tl.sum(full, 0)
    place = tl.sum((last[None, :] <= block[:, None]).to(tl.int32), 1)
    own = tl.minimum(place, BINS - 1)
    tl.store(blocks + block, place, mask=there)
    first = (block - tl.gather(last - full, own, 0)) * SIZE
    left = tl.gather(size, own, 0) - first
    slot = tl.gather(starts, own, 0) + first
    each = tl.arange(0, WIDE)[None, :]
    listed = tl.where(each < left[:, None], slot[:, None] + each, -1)
    tl.store(slots + block[:, None] * SIZE + each, listed, mask=there[:, None] & (each < SIZE))
    if tl.program_id(0) == 0:
        tl.store(count, tl.sum(full, 0))
        tl.store(offsets + 1 + bins, ends, mask=bins < LOCAL)
        tl.store(offsets, 0)


@triton.jit
def combine(
    y, indices, weights, places, out, H,
    TOP: tl.constexpr, BLOCK: tl.constexpr, SPARSE: tl.constexpr, KEEP: tl.constexpr, EXPERTS: tl.constexpr,
    FIRST: tl.constexpr, LOCAL: tl.constexpr, NULL: tl.constexpr, UNKNOWN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK values of a token: the results of its slots, each times its weight, added in the order of the slots.

    Args:
        y: (T TOP, H) f32; rows of slots that no place has are not read.
        indices: (T, TOP) i32 or i64.
        weights: (T, TOP) floats.
        places: as of ``places_of``.
        out: (T, H); NaN where a slot is refused.
        H: values of a token.
        TOP: slots of a token.
        BLOCK: a power of two.
        SPARSE: whether most slots are skipped, so that it pays to pass over them.
        KEEP: eviction policy of y.
        EXPERTS: as of ``lists``.
        FIRST: as of ``lists``.
        LOCAL: as of ``lists``.
        NULL: as of ``lists``.
        UNKNOWN: as of ``lists``.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
    """
    token = tl.program_id(0)  # along the first axis: the others end at 65535
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    refused = token < 0
    for s in tl.static_range(TOP):
        slot = token * TOP + s
        place = places_of(indices + slot, slot >= 0, places, EXPERTS, FIRST, LOCAL, NULL, UNKNOWN)
        if SPARSE:
            if place >= 0:
                weight = widened(tl.load(weights + slot), True)
                at = y + slot.to(tl.int64) * H + column
                total += tl.load(at, mask=column < H, other=0.0, eviction_policy=KEEP) * weight
        else:
            weight = tl.where(place >= 0, widened(tl.load(weights + slot), True), 0.0)
            there = (column < H) & (place >= 0)
            at = y + slot.to(tl.int64) * H + column
            total += tl.load(at, mask=there, other=0.0, eviction_policy=KEEP) * weight
        refused = refused | (place < -1)
    total = tl.where(refused, float("nan"), total)
    tl.store(out + token.to(tl.int64) * H + column, total.to(out.dtype.element_ty), mask=column < H)
