"""The statement of a layout: how the axes N and K are padded and split into digits, and how these lie in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final

import numpy as np

from halfbyte.errors import LayoutError

WORD: Final = 32
"""Bits of a word whose bits an order may state."""
CODES: Final = WORD // 4
"""Codes of such a word."""

_AXIS = r"\s*(?:\w+|\(\s*\w+(?:\s+\w+)*\s*\))"
_STATEMENT = re.compile(rf"{_AXIS}(?:\s+|(?<=\))|(?=\s*\())(?:{_AXIS})\s*->\s*-?\w+(?:\s+-?\w+)*\s*")


@dataclass(frozen=True)
class Order:
    """A padding and a digit permutation of a matrix (N, K), written ``"axes -> memory"``.

    ``Order("(nt n32) k -> nt k n32", n32=32)`` pads N to a multiple of 32, splits it into the digits nt
    and n32 (slowest first), and lays the digits nt, k, n32 in memory, slowest first. One digit of each axis
    has no size: it is what remains. A digit with a minus in the memory order runs backwards there:
    ``"n (k p) -> n k -p"`` with p=2 has the odd k of each pair first, which for codes is the high nibble first.

    An order of 4-bit codes may state where bits lie too: of each 8 codes that follow each other in memory, a
    little-endian word whose lowest nibble is the first, bit i lies at ``bits[i]``.

    Args:
        pattern: two axes, N then K, each a digit or a parenthesised list of digits; then the memory order.
        bits: a permutation of 0 to 31; empty where bits lie as they are.
        sizes: the size of each digit but one of each axis.
    """

    pattern: str
    bits: tuple[int, ...]
    sizes: tuple[tuple[str, int], ...]

    def __init__(self, pattern: str, *, bits: Sequence[int] = (), **sizes: int) -> None:
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "bits", tuple(bits))
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))
        if not _STATEMENT.fullmatch(pattern):
            raise LayoutError("not a statement", got=repr(pattern), expected="two axes -> digits in memory order")
        n, k = self.axes
        once = len(set(n + k)) == len(n + k)
        rest = [len(set(axis) - set(sizes)) for axis in (n, k)]
        if not once or sorted(n + k) != sorted(self.memory) or not set(sizes) <= set(n + k) or rest != [1, 1]:
            raise LayoutError("the statement's digits, memory order and sizes do not agree", got=str(self))
        if not all(type(size) is int and size > 0 for size in sizes.values()):
            raise LayoutError("the size of a digit is not a positive integer", got=str(self))
        if bits and (sorted(bits) != list(range(WORD)) or prod(sizes.values()) % CODES):
            raise LayoutError(
                "not bits of words of whole tiles",
                got=f"{self}; {self.bits}",
                expected="each of 0 to 31, 8 codes a word",
            )

    def __str__(self) -> str:
        return f"{self.pattern}  {', '.join(f'{name}={size}' for name, size in self.sizes)}".rstrip()

    @cached_property
    def axes(self) -> tuple[list[str], list[str]]:
        """The digits of N and of K, slowest first."""
        n, k = (group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", self.pattern.split("->")[0]))
        return n, k

    @cached_property
    def memory(self) -> list[str]:
        """The digits in memory order, slowest first."""
        return [d.removeprefix("-") for d in self.pattern.split("->")[1].split()]

    @cached_property
    def backwards(self) -> list[str]:
        """The digits that run backwards in memory."""
        return [d[1:] for d in self.pattern.split("->")[1].split() if d.startswith("-")]

    @cached_property
    def multiples(self) -> tuple[int, int]:
        """What N and K are padded to multiples of."""
        sizes = dict(self.sizes)
        n, k = (prod(sizes.get(d, 1) for d in axis) for axis in self.axes)
        return n, k

    def digits(self, shape: tuple[int, int]) -> dict[str, int]:
        """The size of each digit for a matrix of ``shape``, in axis order."""
        found = dict(self.sizes)
        for axis, size, multiple in zip(self.axes, shape, self.multiples, strict=True):
            (rest,) = set(axis) - set(dict(self.sizes))
            found[rest] = -(-size // multiple)
        return {d: found[d] for axis in self.axes for d in axis}

    def count(self, shape: tuple[int, int]) -> int:
        """Elements in memory for a matrix of ``shape``, padding included."""
        return prod(self.digits(shape).values())

    def offsets(self, shape: tuple[int, int]) -> tuple[Any, Any]:
        """Two i64 vectors (N,) and (K,): element (n, k) lies at ``first[n] + second[k]``."""
        digits, backwards = self.digits(shape), self.backwards
        strides, step = {}, 1
        for d in reversed(self.memory):
            strides[d] = step
            step *= digits[d]
        vectors = []
        for axis, size in zip(self.axes, shape, strict=True):
            rest, offset = np.arange(size), np.zeros(size, np.int64)
            for d in reversed(axis):
                digit = rest % digits[d]
                offset += (digits[d] - 1 - digit if d in backwards else digit) * strides[d]
                rest = rest // digits[d]
            vectors.append(offset)
        return vectors[0], vectors[1]

    def whole_bytes(self) -> Order | None:
        """For an order of 4-bit codes: the same order of bytes, where pairs along K stay together."""
        last = self.axes[1][-1]
        if self.memory[-1] != last or self.bits:
            return None
        sizes = dict(self.sizes)
        if last not in sizes:
            return self if self.multiples[1] == 1 else None
        if sizes[last] % 2:
            return None
        sizes[last] //= 2
        return Order(self.pattern, bits=(), **sizes)

    def shifts(self, back: bool = False) -> tuple[tuple[int, int], ...]:
        """(shift, mask) of what moves the bits of a word to their places, or back: the OR of ``word << shift & mask``.

        Where shift is negative it is to the right; none where bits lie as they are.
        """
        masks: dict[int, int] = {}
        for first, second in enumerate(self.bits):
            source, target = (second, first) if back else (first, second)
            masks[target - source] = masks.get(target - source, 0) | 1 << target
        return tuple(sorted(masks.items()))

    def moves_nothing(self, shape: Sequence[int]) -> bool:
        """Whether memory is the matrix as it lies: no digit moves and nothing is padded."""
        n, k = self.axes
        still = self.memory == n + k and not self.backwards and not self.bits
        return still and all(size % multiple == 0 for size, multiple in zip(shape, self.multiples, strict=True))

    @property
    def high_first(self) -> bool:
        """For an order of 4-bit codes that has ``whole_bytes``: whether the even k of a pair is the high nibble."""
        return self.memory[-1] in self.backwards
