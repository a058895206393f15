"""The executor for CUDA tensors: tiles of words, loaded, their bits exchanged, and stored by a Triton kernel.

Where every digit of a statement has a power of two of values, a move permutes the bits of addresses. A word is as
many elements as lie together on both sides. A bit of the address that is inside words on one side only gets in by an
exchange between two vectors of words that differ in it; the rest is loads and stores of whole words, by tiles that
span long runs of both sides. Where an order states the bits of words of codes, those move once the codes are there.

A move is planned once for a statement, shape and direction, and compiled once for a plan and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

from halfbyte import gpu
from halfbyte.errors import LayoutError
from halfbyte.layouts.executors import Executor
from halfbyte.layouts.order import CODES, WORD, Order

WARPS: Final = 4
TILE: Final = 4096
"""Bytes of a tile of up to two vectors; more vectors have half of it each."""
RUN: Final = 128
"""Bytes of either side that a tile spans, where there are that many, before it grows otherwise."""
MOST: Final = 3
"""The most bits that are inside words on one side only: the kernel holds two to that power of vectors."""


class Bit(NamedTuple):
    """Bit ``place`` of a digit."""

    digit: str
    place: int


class Step(NamedTuple):
    """What a digit or bit adds on one side: elements of address, and to the two counts that have bounds there."""

    at: int
    first: int
    second: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The constants of a move; see ``cuda_kernel.move``.

    Args:
        word: bytes of a word.
        tile: bytes of a tile.
        tiles: of an expert.
        source: bytes of an expert.
        target: likewise, where they go.
        constants: of the kernel, by name.
        compiled: the kernel, by the number of the device.
    """

    word: int
    tile: int
    tiles: int
    source: int
    target: int
    constants: dict[str, Any]
    compiled: dict[int, Any] = field(default_factory=dict)


@dataclass
class _Side:
    """The matrix or the memory: the step of each digit, its elements, and the bounds of the two counts."""

    steps: dict[str, Step]
    order: Sequence[str]
    size: int
    bounds: tuple[int, int]
    inside: Sequence[Bit] = ()
    """The bits inside words, the lowest first."""

    def step(self, bit: Bit) -> Step:
        at, first, second = self.steps[bit.digit]
        return Step(at << bit.place, first << bit.place, second << bit.place)

    def reach(self, count: int, spans: dict[str, int]) -> int:
        """One more than the largest value of a count, where each digit has so many values."""
        return 1 + sum(step[1 + count] * (spans[d] - 1) for d, step in self.steps.items())

    def take(self, elements: int, run: Sequence[Bit]) -> bool:
        """Make words of so many elements, if they are whole."""
        count = elements.bit_length() - 1
        steps = [abs(self.step(bit).at) for bit in run]
        self.inside = run[:count]
        whole = not self.size % elements and not any(step % elements for step in steps[count:])
        return whole and steps[:count] == [1 << i for i in range(count)]


@lru_cache(maxsize=1024)
def plan(order: Order, shape: tuple[int, int], bits: int, back: bool) -> Plan | str:
    """The plan of moving a matrix (N, K), or the reason why there is none.

    Args:
        order: of elements of ``bits`` bits.
        shape: (N, K), in elements, none 0.
        bits: 8, or 4 with the first of a byte in its low nibble.
        back: from memory order to the matrix.
    """
    sizes = dict(order.sizes)
    for d, size in sizes.items():
        if size & (size - 1):
            return f"digit {d} has {size} values, which is no power of two"
    for d in order.backwards:
        if d not in sizes:
            return f"digit {d} has no size and runs backwards"
    digits = order.digits(shape)
    source, target = _matrix(order, digits, shape), _memory(order, digits)
    if back:
        source, target = target, source
    runs = [
        [Bit(d, i) for d in reversed(side.order) for i in range(_width(order, digits, d))] for side in (source, target)
    ]
    for word in (8, 4, 2, 1):
        elements = word * 8 // bits
        whole = [side.take(elements, run) for side, run in zip((source, target), runs, strict=True)]
        vectors = len(set(target.inside) - set(source.inside))
        if all(whole) and not shape[1] % elements and vectors <= MOST:
            break
    else:
        return f"pairs of codes are not whole bytes, by digits of {', '.join(f'{d}={n}' for d, n in digits.items())}"
    shifts: tuple[int, ...] = ()
    if order.bits and bits == 4:
        if elements < CODES:
            return f"words of {elements} codes, where the bits of {CODES} move"
        shifts = _in_words(order.shifts(back), elements // CODES)
    tile = _tile(runs, [*source.inside, *target.inside], max(TILE, TILE << vectors >> 1) * 8 // bits, RUN * 8 // bits)
    parts = {d: 1 << sum(bit.digit == d for bit in tile) for d in digits}
    counts = {d: -(-digits[d] // parts[d]) for d in digits}
    cut = [d for d in digits if counts[d] > 1]
    into = [bit for bit in target.inside if bit not in source.inside]
    out = [bit for bit in source.inside if bit not in target.inside]
    stages, out = _stages(order, source.inside, target.inside, into, out, bits, back)
    words = [bit for bit in tile if bit not in source.inside and bit not in target.inside]
    by_source, by_target = (sorted(words, key=lambda bit, s=side: -abs(s.step(bit).at)) for side in (source, target))  # type: ignore[misc]
    groups = _groups(by_source, by_target)
    constants: dict[str, Any] = {
        "TILES": prod(counts.values()),
        "WORDS": 1 << len(words),
        "WIDE": max(sum(abs(side.step(bit).at) for bit in tile) for side in (source, target)) >= elements << 31,
        "TABLES": 1 << vectors,
        "SHAPE": tuple(1 << len(group) for group in groups),
        "ORDER": tuple(sorted(range(len(groups)), key=lambda i: [by_target.index(bit) for bit in groups[i]])),
        "BEFORE": shifts if back else (),
        "STAGES": stages,
        "AFTER": () if back else shifts,
    }
    spans = {d: parts[d] * counts[d] for d in digits}
    for name, side, run, lanes, between in (
        ("SOURCE", source, runs[0], by_source, into),
        ("TARGET", target, runs[1], by_target, out),
    ):
        base = sum(max(0, -side.step(bit).at) for bit in run if bit not in side.inside)
        masked = any(side.reach(j, spans) > side.bounds[j] for j in (0, 1))
        constants[name] = (side.size // elements, base // elements, int(masked), *side.bounds)
        pieces = [(counts[d], *(step * parts[d] for step in side.steps[d])) for d in cut]
        constants[f"{name}_TILES"] = _flat(pieces, elements)
        constants[f"{name}_WORDS"] = _flat(_merged([(2, *side.step(bit)) for bit in lanes]), elements)
        tables = [[side.step(bit) for i, bit in enumerate(between) if v >> i & 1] for v in range(1 << vectors)]
        constants[f"{name}_TABLES"] = tuple(
            sum(step[j] for step in steps) // (1 if j else elements) for steps in tables for j in range(3)
        )
    return Plan(
        word=elements * bits // 8,
        tile=(1 << len(tile)) * bits // 8,
        tiles=constants["TILES"],
        source=source.size * bits // 8,
        target=target.size * bits // 8,
        constants=constants,
    )


def _width(order: Order, digits: dict[str, int], d: str) -> int:
    """The bits of a digit that tiles may hold: all, but where others of its axis come before it no more than it fills.

    There a value beyond the digit's last would be an element of the next value of those before.
    """
    size = digits[d]
    return (size - 1).bit_length() if d in (order.axes[0][0], order.axes[1][0]) else (size & -size).bit_length() - 1


def _matrix(order: Order, digits: dict[str, int], shape: tuple[int, int]) -> _Side:
    """The row-major matrix, bounded by N and K."""
    steps = {}
    for axis, step in zip(order.axes, (Step(shape[1], 1, 0), Step(1, 0, 1)), strict=True):
        size = 1
        for d in reversed(axis):
            steps[d] = Step(step.at * size, step.first * size, step.second * size)
            size *= digits[d]
    return _Side(steps, [*order.axes[0], *order.axes[1]], shape[0] * shape[1], shape)


def _memory(order: Order, digits: dict[str, int]) -> _Side:
    """The memory order, bounded by the digits that have no size; one that runs backwards steps down."""
    steps, size = {}, 1
    n, k = (next(d for d in axis if d not in dict(order.sizes)) for axis in order.axes)
    for d in reversed(order.memory):
        steps[d] = Step(-size if d in order.backwards else size, int(d == n), int(d == k))
        size *= digits[d]
    return _Side(steps, order.memory, size, (digits[n], digits[k]))


def _tile(runs: Sequence[Sequence[Bit]], words: Sequence[Bit], size: int, run: int) -> list[Bit]:
    """The bits of a tile of at most ``size`` elements: those of words, then the lowest of the side that has fewer."""
    found = list(dict.fromkeys(words))
    while 1 << len(found) < size:
        left = [[bit for bit in side if bit not in found] for side in runs]
        if not left[0]:
            break
        spans = [1 << side.index(rest[0]) for side, rest in zip(runs, left, strict=True)]
        found.append(left[spans[1] < min(spans[0], run)][0])
    return found


def _stages(
    order: Order,
    source: Sequence[Bit],
    target: Sequence[Bit],
    into: Sequence[Bit],
    out: Sequence[Bit],
    bits: int,
    back: bool,
) -> tuple[tuple[int, ...], list[Bit]]:
    """What makes words of the target of words of the source, and ``out`` in the order in which ``into`` replaces it."""
    now, width = list(source), len(source)
    stages: list[int] = []

    def mask(clear: int, given: int | None = None) -> int:
        """Ones in the elements whose number has bit ``clear`` 0 and bit ``given`` 1."""
        chosen = [i for i in range(1 << width) if not i >> clear & 1 and (given is None or i >> given & 1)]
        return sum(((1 << bits) - 1) << i * bits for i in chosen)

    def flips(inside: Sequence[Bit]) -> None:
        for i, bit in enumerate(inside):
            if bit.digit in order.backwards:
                stages.extend((-2, bits << i, mask(i)))

    if back:
        flips(source)
    free, replaced = list(out), {}
    for bit in sorted(into, key=lambda bit: source[target.index(bit)] not in out):
        same = source[target.index(bit)]
        replaced[bit] = same if same in free else free[0]
        free.remove(replaced[bit])
    for i, bit in enumerate(into):
        place = now.index(replaced[bit])
        stages.extend((i, bits << place, mask(place)))
        now[place] = bit
    for low, bit in enumerate(target):
        high = now.index(bit)
        if high != low:
            stages.extend((-1, (bits << high) - (bits << low), mask(high, low)))
            now[low], now[high] = now[high], now[low]
    if not back:
        flips(target)
    return tuple(stages), [replaced[bit] for bit in into]


def _in_words(shifts: Sequence[tuple[int, int]], count: int) -> tuple[int, ...]:
    """Shifts and masks, for words that hold ``count`` of those of ``order``; the masks are signed."""
    found: list[int] = []
    for shift, mask in shifts:
        whole = sum(mask << WORD * i for i in range(count))
        found += shift, whole - (whole >> WORD * count - 1 << WORD * count)
    return tuple(found)


def _groups(one: Sequence[Bit], other: Sequence[Bit]) -> list[list[Bit]]:
    """The bits in the order of one, those together that follow each other in both."""
    groups: list[list[Bit]] = []
    for bit in one:
        if groups and other.index(bit) == other.index(groups[-1][-1]) + 1:
            groups[-1].append(bit)
        else:
            groups.append([bit])
    return groups or [[]]


def _merged(digits: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same digits, neighbours as one where they step alike; so the compiler sees runs of addresses."""
    found: list[tuple[int, ...]] = []
    for size, *steps in digits:
        if found and list(found[-1][1:]) == [step * size for step in steps]:
            found[-1] = (found[-1][0] * size, *steps)
        else:
            found.append((size, *steps))
    return found


def _flat(digits: Sequence[tuple[int, ...]], elements: int) -> tuple[int, ...]:
    """Digits of (size, at, first, second), ``at`` in words."""
    return tuple(n for size, at, first, second in digits for n in (size, at // elements, first, second))


def refuse(order: Order, shape: Sequence[int], *, codes: bool = False) -> str | None:
    """None if this moves bytes, or packed codes, of ``shape`` (*E, N, K) in elements, both ways; else the reason."""
    if not prod(shape) or order.moves_nothing(shape[-2:]):
        return "nothing moves"
    reason = gpu.missing()
    if reason:
        return reason
    for back in (False, True):
        made = plan(order, (shape[-2], shape[-1]), 4 if codes else 8, back)
        if isinstance(made, str):
            return made
        if made.tiles * prod(shape[:-2]) >= 2**31:
            return "more tiles than a launch takes"
    return None


def executor(order: Order, shape: Sequence[int], *, codes: bool = False) -> Executor:
    """What moves CUDA tensors; arguments as of ``refuse``."""
    reason = refuse(order, shape, codes=codes)
    if reason:
        return Executor("torch", reason)
    made = plan(order, (shape[-2], shape[-1]), 4 if codes else 8, False)
    assert isinstance(made, Plan)
    return Executor("triton", f"tiles of {made.tile} bytes, by words of {made.word}")


def run(order: Order, a: Any, shape: tuple[int, int], bits: int, back: bool) -> Any:
    """Move (*E, ...) bytes of a torch tensor into memory order, (*E, bytes), or back to (*E, N, K * bits / 8).

    Args:
        order: one that ``refuse`` does not.
        a: a tensor of elements of one byte.
        shape: (N, K), in elements.
        bits: 8 or 4.
        back: from memory order to the matrix.

    Raises:
        LayoutError: an order that is refused, or memory of another size.
    """
    import torch

    made = plan(order, shape, bits, back)
    if isinstance(made, str):
        raise LayoutError(f"the CUDA executor does not take this: {made}", got=str(order))
    lead, extent = (a.shape[:-1], a.shape[-1:]) if back else (a.shape[:-2], a.shape[-2:])
    if prod(extent) != made.source:
        raise LayoutError("not the size of this order", got=tuple(a.shape), expected=f"{made.source} bytes an expert")
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[made.word]
    source = gpu.aligned(a).reshape(-1)
    target = torch.empty(prod(lead) * made.target, dtype=torch.uint8, device=a.device)
    launch(made, source.view(torch.uint8).view(words), target.view(words), made.tiles * prod(lead))
    return target.view(a.dtype).reshape(*lead, *((shape[0], shape[1] * bits // 8) if back else (made.target,)))


def launch(made: Plan, source: Any, target: Any, programs: int) -> None:
    """Run the kernel."""
    from halfbyte.layouts.cuda_kernel import move

    args = source, target, *made.constants.values()
    gpu.launch(made.compiled, source.device.index, move, programs, args, num_warps=WARPS)
