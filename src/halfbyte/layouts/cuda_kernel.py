"""The Triton kernel of ``halfbyte.layouts.cuda``: it moves tiles of words, by the constants of a plan.

Constants are flat tuples of integers, since the oldest Triton that this runs on takes no others.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sums(i, DIGITS: tl.constexpr):
    """Of the digits of i, each (size, step, first, second) and the slowest first, the sums of digit times these."""
    step = i * 0
    first = i * 0
    second = i * 0
    for j in tl.static_range(len(DIGITS) // 4 - 1, -1, -1):
        digit = i % DIGITS[4 * j]
        step += digit * DIGITS[4 * j + 1]
        first += digit * DIGITS[4 * j + 2]
        second += digit * DIGITS[4 * j + 3]
        i = i // DIGITS[4 * j]
    return step, first, second


@triton.jit
def _shifted(x, SHIFTS: tl.constexpr):
    """The OR of x shifted to the left, or to the right where negative, and masked, for each (shift, mask)."""
    y = x
    for j in tl.static_range(len(SHIFTS) // 2):
        z = x << SHIFTS[2 * j] if SHIFTS[2 * j] >= 0 else x >> -SHIFTS[2 * j]
        z = z & SHIFTS[2 * j + 1]
        y = z if j == 0 else y | z
    return y


@triton.jit
def move(
    source,
    target,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    TABLES: tl.constexpr,
    SHAPE: tl.constexpr,
    ORDER: tl.constexpr,
    BEFORE: tl.constexpr,
    STAGES: tl.constexpr,
    AFTER: tl.constexpr,
    SOURCE: tl.constexpr,
    SOURCE_TILES: tl.constexpr,
    SOURCE_WORDS: tl.constexpr,
    SOURCE_TABLES: tl.constexpr,
    TARGET: tl.constexpr,
    TARGET_TILES: tl.constexpr,
    TARGET_WORDS: tl.constexpr,
    TARGET_TABLES: tl.constexpr,
):
    """Move one tile: ``TABLES`` vectors of ``WORDS`` words.

    Args:
        source: the words of all experts.
        target: likewise.
        TILES: of an expert.
        WORDS: of a vector.
        WIDE: whether offsets inside a tile need 64 bits.
        TABLES: how many vectors are loaded, and how many others are made of them and stored.
        SOURCE: words of an expert, the first word's place, whether there are bounds, and the two bounds.
        SOURCE_TILES: the digits of a tile's number, each its size and its step in words and both bounded counts.
        SOURCE_WORDS: likewise, of the number of a word in a vector.
        SOURCE_TABLES: for each vector its step in words and in both bounded counts.
        TARGET: as SOURCE.
        TARGET_TILES: as SOURCE_TILES.
        TARGET_WORDS: as SOURCE_WORDS.
        TARGET_TABLES: as SOURCE_TABLES.
        SHAPE: the digits of a word's number in the source.
        ORDER: these digits in the target's order.
        STAGES: for each (kind, shift, mask): kind 0, 1, 2 exchanges the bits of a mask, shifted, with those of the
            vector whose number differs in that bit; -1 exchanges bits inside each word, -2 halves of groups of bits.
        BEFORE: for each (shift, mask) what is taken of a word before the stages; none where it stays as it is.
        AFTER: likewise, after them.
    """
    number = tl.program_id(0)
    tile = (number % TILES).to(tl.int64)
    expert = (number // TILES).to(tl.int64)
    word = tl.arange(0, WORDS)
    if WIDE:
        word = word.to(tl.int64)

    at, first, second = _sums(tile, SOURCE_TILES)
    step, word_first, word_second = _sums(word, SOURCE_WORDS)
    origin = source + (expert * SOURCE[0] + SOURCE[1] + at)
    first = first.to(tl.int32) + word_first
    second = second.to(tl.int32) + word_second
    xs = ()
    for v in tl.static_range(TABLES):
        place = origin + (step + SOURCE_TABLES[3 * v])
        if SOURCE[2]:
            there = (first + SOURCE_TABLES[3 * v + 1] < SOURCE[3]) & (second + SOURCE_TABLES[3 * v + 2] < SOURCE[4])
            xs = xs + (_shifted(tl.load(place, mask=there, other=0), BEFORE),)
        else:
            xs = xs + (_shifted(tl.load(place), BEFORE),)

    for s in tl.static_range(len(STAGES) // 3):
        ys = ()
        for v in tl.static_range(TABLES):
            if STAGES[3 * s] >= 0:
                if (v >> STAGES[3 * s]) & 1:
                    low, high = xs[v ^ (1 << STAGES[3 * s])], xs[v]
                    y = high ^ (((low >> STAGES[3 * s + 1]) ^ high) & STAGES[3 * s + 2])
                else:
                    low, high = xs[v], xs[v ^ (1 << STAGES[3 * s])]
                    y = low ^ ((((low >> STAGES[3 * s + 1]) ^ high) & STAGES[3 * s + 2]) << STAGES[3 * s + 1])
            elif STAGES[3 * s] == -1:
                moved = ((xs[v] >> STAGES[3 * s + 1]) ^ xs[v]) & STAGES[3 * s + 2]
                y = xs[v] ^ moved ^ (moved << STAGES[3 * s + 1])
            else:
                high = (xs[v] >> STAGES[3 * s + 1]) & STAGES[3 * s + 2]
                y = high | ((xs[v] & STAGES[3 * s + 2]) << STAGES[3 * s + 1])
            ys = ys + (y,)
        xs = ys

    at, first, second = _sums(tile, TARGET_TILES)
    step, word_first, word_second = _sums(word, TARGET_WORDS)
    origin = target + (expert * TARGET[0] + TARGET[1] + at)
    first = first.to(tl.int32) + word_first
    second = second.to(tl.int32) + word_second
    for v in tl.static_range(TABLES):
        y = _shifted(xs[v], AFTER)
        y = tl.reshape(tl.permute(tl.reshape(y, SHAPE), tl.tuple(ORDER)), (WORDS,))
        place = origin + (step + TARGET_TABLES[3 * v])
        if TARGET[2]:
            there = (first + TARGET_TABLES[3 * v + 1] < TARGET[3]) & (second + TARGET_TABLES[3 * v + 2] < TARGET[4])
            tl.store(place, y, mask=there)
        else:
            tl.store(place, y)
