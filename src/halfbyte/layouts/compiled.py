"""The compiled executor: elements moved from ``rows[i] + columns[j]`` to another such place, by Numba.

A statement is separable: element (n, k) lies at a number for n plus a number for k, on both sides. Where flipping
one bit of n or of k always moves an element by the same step, that bit is a bit of the address, and so a move is a
permutation of address bits. Bits that are the lowest of either side make a tile, whose lines of 64 bytes are
loaded into vector registers whole, permuted there (an exchange of a bit of the register's number with one of the
byte's is a shuffle of two registers, and one with the nibble's is two shifts), and stored as whole lines. What no
whole tile covers is moved element by element. Where one side states the bits of words of 8 codes, a tile has whole
words of it, and their bits move once these are in registers.

The code of a tile depends on the permutation alone, not on the shape: it is compiled once and kept in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from halfbyte.errors import LayoutError
from halfbyte.layouts.order import CODES

LINE: Final = 64
"""Bytes of a cache line, and of the vectors: LLVM splits them where a machine's are shorter."""
LARGEST: Final = 2048
"""Bytes of the largest tile."""
SMALLEST: Final = 8
"""Bytes of the smallest tile that is worth a vector."""
BLOCK: Final = 8
"""Tiles along the inner axis before the outer one moves on, where a tile has more than FEW lines."""
FEW: Final = 32
"""Lines of a tile, loaded and stored, that a cache holds beside those of its neighbours."""
PIECE: Final = 8
SLOW: Final = 20
"""What a byte costs that is moved alone; one in a tile costs 1, and ``PIECE`` by the bytes of a load and of a store."""

_LOCK: Final = threading.Lock()
_COMPILED: Final[dict[Any, Callable[..., None]]] = {}


class Places(NamedTuple):
    """Where elements lie: (i, j) at ``rows[i] + columns[j]``, i64, in elements."""

    rows: Any
    columns: Any


class Words(NamedTuple):
    """The bits of each 8 codes of one side, as ``Order`` has them.

    Args:
        places: where each bit lies.
        shifts: what moves them, to there or back.
        back: from there; the source's side has them.
    """

    places: tuple[int, ...]
    shifts: tuple[tuple[int, int], ...]
    back: bool


class Bit(NamedTuple):
    """A bit of an address: flipping bit ``place`` of an axis moves an element by these steps."""

    axis: int
    place: int
    source: int
    target: int


@dataclass(frozen=True)
class Network:
    """What the code of a tile depends on.

    Args:
        bits: of an element, 4 or 8.
        order: for each bit of the target's index, the lowest first, the bit of the source's index.
        flips: the bits of the target's index that are the opposite of the source's.
        load: bits of the index of the pieces that are loaded.
        store: bits of the index of those that are stored.
        words: what moves the bits of words, or None where they lie as they are.
    """

    bits: int
    order: tuple[int, ...]
    flips: frozenset[int]
    load: int
    store: int
    words: Words | None


@dataclass(frozen=True)
class Tiles:
    """A tile and where its copies lie: ``steps`` is what one spans of each axis."""

    network: Network
    tile: tuple[Bit, ...]
    steps: tuple[int, int]
    loads: Any
    stores: Any

    @property
    def bytes(self) -> int:
        """Of one tile."""
        return (1 << len(self.tile)) * self.network.bits // 8


def bits_of(source: Any, target: Any, axis: int) -> list[Bit]:
    """The bits of an axis whose flip moves every element by the same steps, in whole blocks of that bit."""
    found, place = [], 0
    while (step := 1 << place) * 2 <= len(source):
        whole = len(source) // (2 * step) * 2 * step
        moved = []
        for at in (source, target):
            pairs = at[:whole].reshape(-1, 2, step)
            moves = pairs[:, 1] - pairs[:, 0]
            moved.append(int(moves[0, 0]) if (moves == moves[0, 0]).all() else None)
        if moved[0] is not None and moved[1] is not None:
            found.append(Bit(axis, place, moved[0], moved[1]))
        place += 1
    return found


def tiles(bits: int, source: Places, target: Places, words: Words | None) -> Tiles | None:
    """The tile that moves these elements in the least time, or None where no bits of both sides make one."""
    found = [bit for axis in (0, 1) for bit in bits_of(source[axis], target[axis], axis)]
    nibble = int(bits == 4)
    longest = LINE.bit_length() - 1 + nibble
    runs = [_run(found, side, longest) for side in ("source", "target")]
    least_run = [nibble, nibble]
    if words:
        least_run[not words.back] = CODES.bit_length() - 1
    best: Tiles | None = None
    least = float(SLOW)
    for load, store in product(*(range(len(run), few - 1, -1) for run, few in zip(runs, least_run, strict=True))):
        together = {*runs[0][:load], *runs[1][:store]}
        steps = [max((2 << bit.place for bit in together if bit.axis == axis), default=1) for axis in (0, 1)]
        sizes = [len(source[axis]) for axis in (0, 1)]
        tiled = prod(size // step * step for size, step in zip(sizes, steps, strict=True)) / prod(sizes)
        cost = tiled * (1 + PIECE / (1 << load - nibble) + PIECE / (1 << store - nibble)) + (1 - tiled) * SLOW
        if SMALLEST <= 1 << len(together) - nibble <= LARGEST and cost < least:
            made = _tile(bits, together, (steps[0], steps[1]), load, store, words)
            origins = _origins(made, source, target)
            sides = [*origins[::2], made.loads], [*origins[1::2], made.stores]
            if not any((at % (1 << few)).any() for few, side in zip(least_run, sides, strict=True) for at in side):
                best, least = made, cost
    return best


def _tile(bits: int, together: set[Bit], steps: tuple[int, int], load: int, store: int, words: Words | None) -> Tiles:
    by_source = sorted(together, key=lambda bit: abs(bit.source))
    by_target = sorted(together, key=lambda bit: abs(bit.target))
    return Tiles(
        network=Network(
            bits=bits,
            order=tuple(by_source.index(bit) for bit in by_target),
            flips=frozenset(i for i, bit in enumerate(by_target) if (bit.source < 0) != (bit.target < 0)),
            load=load,
            store=store,
            words=words,
        ),
        tile=tuple(by_source),
        steps=steps,
        loads=_sums([abs(bit.source) for bit in by_source[load:]]),
        stores=_sums([abs(bit.target) for bit in by_target[store:]]),
    )


def _run(found: Sequence[Bit], side: str, longest: int) -> list[Bit]:
    """The bits that are the lowest of the addresses of a side."""
    by_step = {abs(getattr(bit, side)): bit for bit in found}
    run: list[Bit] = []
    while len(run) < longest and (1 << len(run)) in by_step:
        run.append(by_step[1 << len(run)])
    return run


def _sums(steps: Sequence[int]) -> Any:
    """The sums of all subsets, the first step's bit the lowest."""
    sums = np.zeros(1, np.int64)
    for step in steps:
        sums = np.concatenate([sums, sums + step])
    return sums


def _step(at: Any) -> float:
    """How far the second place is from the first."""
    return abs(int(at[1] - at[0])) if len(at) > 1 else np.inf


def _origins(made: Tiles, source: Places, target: Places) -> list[Any]:
    """Of the rows and then of the columns of the tiles, where a tile begins in the source and in the target."""
    found = []
    for axis in (0, 1):
        bits = [bit for bit in made.tile if bit.axis == axis]
        index = np.arange(len(source[axis]) // made.steps[axis] * made.steps[axis])
        for bit in bits:
            index = index[index >> bit.place & 1 == 0]
        found.append(source[axis][index] + sum(min(0, bit.source) for bit in bits))
        found.append(target[axis][index] + sum(min(0, bit.target) for bit in bits))
    return found


class Move:
    """A move of elements, ready to be run any number of times.

    Args:
        bits: of an element: 8, or 4 with the first of a byte in its low nibble.
        source: where each element is.
        target: where it goes; no two to one place.
        words: what moves the bits of words of 8 codes, of one side.
    """

    def __init__(self, bits: int, source: Places, target: Places, words: Words | None = None) -> None:
        self.bits, self.words = bits, words
        self.tiles = tiles(bits, source, target, words)
        size = len(source.rows), len(source.columns)
        steps = self.tiles.steps if self.tiles else size
        whole = size[0] // steps[0] * steps[0], size[1] // steps[1] * steps[1]
        if self.tiles is None or not all(whole):
            self.tiles, whole = None, (0, 0)
        self.tiled = whole[0] * whole[1] / (size[0] * size[1])
        """The share of the elements that tiles move."""
        if self.tiles is not None:
            self._tile_arguments = self._in_loops(self.tiles, source, target)
        self._edges = []
        for rows, columns in ((slice(whole[0], None), slice(None)), (slice(whole[0]), slice(whole[1], None))):
            edge = source.rows[rows], target.rows[rows], source.columns[columns], target.columns[columns]
            if len(edge[0]) and len(edge[2]):
                self._edges.append([np.ascontiguousarray(at, np.int64) for at in edge])
        self._needs = [
            _bytes_spanned(bits, places, words is not None and words.back == (places is source))
            for places in (source, target)
        ]

    def run(self, source: Any, target: Any) -> None:
        """Move the elements of one array of bytes to another, both contiguous u8.

        Raises:
            LayoutError: an array that is shorter than the places reach, or a target that is read-only.
        """
        for what, a, needed in zip(("source", "target"), (source, target), self._needs, strict=True):
            if a.size < needed or a.dtype != np.uint8 or not a.flags.c_contiguous:
                raise LayoutError(f"the {what} does not fit", got=f"{a.dtype} {a.shape}", expected=f"{needed} u8")
        if not target.flags.writeable:
            raise LayoutError("the target is read-only")
        if self.tiles is not None:
            _tile_code(self.tiles.network)(source.ctypes.data, target.ctypes.data, *self._tile_arguments)
        for edge in self._edges:
            _element_code(self.bits, self.words)(source.reshape(-1), target.reshape(-1), *edge)

    def _in_loops(self, made: Tiles, source: Places, target: Places) -> list[Any]:
        """The arguments of a tile's code; the inner loop is along the axis whose tiles are neighbours in the source."""
        rows, to_rows, columns, to_columns = (at * self.bits // 8 for at in _origins(made, source, target))
        if _step(rows) < _step(columns):
            rows, to_rows, columns, to_columns = columns, to_columns, rows, to_rows
        tables = [made.loads * self.bits // 8, made.stores * self.bits // 8]
        parts = [np.ascontiguousarray(at, np.int64) for at in (rows, to_rows, columns, to_columns, *tables)]
        return [*parts, BLOCK if sum(map(len, tables)) > FEW else len(columns)]


def _bytes_spanned(bits: int, places: Places, words: bool) -> int:
    """The bytes up to the last element, or its word; none is before the first byte."""
    first, last = (sum(int(reach(at)) for at in places) for reach in (np.min, np.max))
    if first < 0:
        raise LayoutError("a place before the first", got=first)
    return (last // CODES + 1) * CODES // 2 if words else last * bits // 8 + 1


def _kept(key: Any, make: Callable[[], Callable[..., None]]) -> Callable[..., None]:
    """The compiled function of ``key``, compiled on first use; one thread compiles."""
    if key not in _COMPILED:
        with _LOCK:
            if key not in _COMPILED:
                _COMPILED[key] = make()
    return _COMPILED[key]


def _element_code(bits: int, words: Words | None) -> Callable[..., None]:
    def make() -> Callable[..., None]:
        import numba

        def move_bytes(source, target, rows, to_rows, columns, to_columns):  # type: ignore[no-untyped-def]
            for i in range(rows.size):
                for j in range(columns.size):
                    target[to_rows[i] + to_columns[j]] = source[rows[i] + columns[j]]

        def move_nibbles(source, target, rows, to_rows, columns, to_columns):  # type: ignore[no-untyped-def]
            for i in range(rows.size):
                for j in range(columns.size):
                    at, to = rows[i] + columns[j], to_rows[i] + to_columns[j]
                    code = source[at >> 1] >> (at & 1) * 4 & 15
                    target[to >> 1] = target[to >> 1] & (240 >> (to & 1) * 4) | code << (to & 1) * 4

        straight = np.arange(4 * CODES)
        sides = [straight, straight]
        if words:
            sides[not words.back] = np.array(words.places)
        of_source, of_target = sides

        def move_bits(source, target, rows, to_rows, columns, to_columns):  # type: ignore[no-untyped-def]
            for i in range(rows.size):
                for j in range(columns.size):
                    at, to = rows[i] + columns[j], to_rows[i] + to_columns[j]
                    for bit in range(4):
                        one = of_source[(at & 7) * 4 + bit] + (at >> 3) * 32
                        other = of_target[(to & 7) * 4 + bit] + (to >> 3) * 32
                        value = source[one >> 3] >> (one & 7) & 1
                        target[other >> 3] = target[other >> 3] & (255 ^ 1 << (other & 7)) | value << (other & 7)

        code = move_bytes if bits == 8 else move_bits if words else move_nibbles
        return numba.njit(_signature(["const", "bytes", *["at"] * 4]), nogil=True)(code)  # type: ignore[no-any-return]

    return _kept((bits, words), make)


def _signature(kinds: Sequence[str]) -> Any:
    from numba import types

    known = {
        "const": types.Array(types.uint8, 1, "C", readonly=True),
        "bytes": types.Array(types.uint8, 1, "C"),
        "at": types.Array(types.int64, 1, "C"),
        "address": types.uint64,
        "count": types.int64,
    }
    return types.void(*(known[kind] for kind in kinds))


def _tile_code(network: Network) -> Callable[..., None]:
    def make() -> Callable[..., None]:
        import numba
        from numba.extending import intrinsic

        u64 = numba.types.uint64

        def typed(typing: Any, source: Any, target: Any, loads: Any, stores: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                emit(network, builder, *args)
                return context.get_dummy_value()

            return numba.types.void(u64, u64, u64, u64), codegen

        tile: Any = intrinsic(typed)

        def move(source, target, rows, to_rows, columns, to_columns, loads, stores, block):  # type: ignore[no-untyped-def]
            at_loads, at_stores = loads.ctypes.data, stores.ctypes.data
            for start in range(0, columns.size, block):
                for i in range(rows.size):
                    for j in range(start, min(start + block, columns.size)):
                        tile(
                            u64(source + u64(rows[i] + columns[j])),
                            u64(target + u64(to_rows[i] + to_columns[j])),
                            u64(at_loads),
                            u64(at_stores),
                        )

        return numba.njit(_signature(["address", "address", *["at"] * 6, "count"]), nogil=True)(move)  # type: ignore[no-any-return]

    return _kept(network, make)


def emit(network: Network, builder: Any, source: Any, target: Any, loads: Any, stores: Any) -> None:
    """Write the code of a tile: the addresses are integers, those of the tables of offsets too."""
    from llvmlite import ir

    nibble = int(network.bits == 4)
    total = len(network.order)
    inside = min(total, LINE.bit_length() - 1 + nibble)  # bits of the index inside a vector
    width = 1 << (inside - nibble)
    i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
    whole = ir.VectorType(i8, width)

    def address(base: Any, table: Any, index: int) -> Any:
        slot = builder.inttoptr(builder.add(table, i64(8 * index)), i64.as_pointer())
        return builder.add(base, builder.load(slot))

    def shuffle(a: Any, b: Any, places: Sequence[int]) -> Any:
        mask = ir.Constant(ir.VectorType(i32, len(places)), [i32(place) for place in places])
        return builder.shuffle_vector(a, b, mask)

    def constant(values: Sequence[int]) -> Any:
        return ir.Constant(whole, [i8(value) for value in values])

    low, high, four = constant([15] * width), constant([240] * width), constant([4] * width)

    def up(a: Any) -> Any:
        return builder.shl(a, four)

    def down(a: Any) -> Any:
        return builder.lshr(a, four)

    def both(a: Any, b: Any) -> Any:
        """The low nibbles of a and the high ones of b."""
        return builder.or_(builder.and_(a, low), builder.and_(b, high))

    def load(register: int) -> Any:
        per = 1 << (inside - network.load)
        piece = ir.VectorType(i8, 1 << (network.load - nibble))
        parts = [
            builder.load(builder.inttoptr(address(source, loads, register * per + i), piece.as_pointer()), align=1)
            for i in range(per)
        ]
        while len(parts) > 1:
            size = 2 * parts[0].type.count
            parts = [shuffle(a, b, range(size)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def shifted(a: Any, words: Words) -> Any:
        lanes = ir.VectorType(i32, width // 4)
        given, parts = builder.bitcast(a, lanes), []
        for shift, mask in words.shifts:
            count = ir.Constant(lanes, [i32(abs(shift))] * lanes.count)
            part = builder.shl(given, count) if shift > 0 else builder.lshr(given, count)
            parts.append(builder.and_(part, ir.Constant(lanes, [i32(mask)] * lanes.count)))
        return builder.bitcast(reduce(builder.or_, parts), whole)

    registers = [load(r) for r in range(1 << (total - inside))]
    if network.words and network.words.back:
        registers = [shifted(a, network.words) for a in registers]
    at = list(range(total))  # which bit of the source's index lies at each place: inside a vector, then its number

    def pairs(place: int) -> list[tuple[int, int]]:
        bit = 1 << (place - inside)
        return [(r, r | bit) for r in range(len(registers)) if not r & bit]

    def exchange(a: int, b: int) -> None:
        at[a], at[b] = at[b], at[a]

    if nibble and network.order[0] != 0:
        place = at.index(network.order[0])
        if place >= inside:
            for r, s in pairs(place):
                a, b = registers[r], registers[s]
                registers[r], registers[s] = both(a, up(b)), both(down(a), b)
        else:
            bit = 1 << (place - 1)
            second = constant([255 if byte & bit else 0 for byte in range(width)])
            first = constant([0 if byte & bit else 255 for byte in range(width)])
            for r, a in enumerate(registers):
                e = shuffle(a, a, [byte & ~bit for byte in range(width)])
                o = shuffle(a, a, [byte | bit for byte in range(width)])
                chosen = builder.and_(both(e, up(o)), first), builder.and_(both(down(e), o), second)
                registers[r] = builder.or_(*chosen)
        exchange(0, place)

    wanted = network.order[:inside]
    coming = [bit for bit in wanted if at.index(bit) >= inside]
    for bit in coming:
        place = at.index(bit)
        own = wanted.index(bit)
        leave = own if at[own] not in wanted else next(i for i in range(nibble, inside) if at[i] not in wanted)
        step = 1 << (leave - nibble)
        for r, s in pairs(place):
            a, b = registers[r], registers[s]
            second_half = [width if byte & step else 0 for byte in range(width)]
            registers[r] = shuffle(a, b, [(byte & ~step) + second_half[byte] for byte in range(width)])
            registers[s] = shuffle(a, b, [(byte | step) + second_half[byte] for byte in range(width)])
        exchange(leave, place)

    final = []
    for byte in range(width):
        value = 0
        for i in range(nibble, inside):
            value |= ((byte >> (i - nibble) & 1) ^ (i in network.flips)) << (at.index(wanted[i]) - nibble)
        final.append(value)
    if final != list(range(width)):
        registers = [shuffle(a, a, final) for a in registers]
    if nibble and 0 in network.flips:
        registers = [both(down(a), up(a)) for a in registers]
    if network.words and not network.words.back:
        registers = [shifted(a, network.words) for a in registers]

    per = 1 << (inside - network.store)
    size = 1 << (network.store - nibble)
    for r, a in enumerate(registers):
        number = 0
        for i in range(inside, total):
            number |= ((r >> (at.index(network.order[i]) - inside) & 1) ^ (i in network.flips)) << (i - inside)
        for i in range(per):
            part = a if per == 1 else shuffle(a, a, range(i * size, (i + 1) * size))
            to = address(target, stores, number * per + i)
            builder.store(part, builder.inttoptr(to, part.type.as_pointer()), align=1)
