"""Which slot of a routing each expert computes, and the sum of a token's slots, on NVIDIA GPUs, in Triton.

Slot ``t * k + s`` is the s-th of token t. Slots are sorted by the place of their expert in the stack, then by their
number, and cut into blocks of ``size`` that are of one place each. What a consumer reads, i32 all:

::

    blocks   (most,)          the place of each block; places ascend
    slots    (most * size,)   the slots of each block, ascending; -1 after the last where a block is not full
    count    (1,)             how many blocks there are; what lies beyond in ``blocks`` and ``slots`` was not written
    offsets  (local + 1,)     of each place how many slots places before it have; the last: how many have a place

A slot has no place where its expert is not of the stack. It is then skipped or refused, as ``Numbers`` says: nothing
computes it, and ``combine`` adds nothing, or makes the token NaN, of which ``halfbyte.kernels.cuda.refused`` tells.

All is deterministic: a slot's place among the sorted ones is counted, by programs of 32 or 64 slots that each look
at all of them, or where there are many at what an earlier launch counted, and where there are very many a second one
added up. Each launch starts early, and lets the one behind start early (see ``halfbyte.kernels.cuda.step``), which must
not read lists before its own wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from halfbyte.errors import UsageError
from halfbyte.kernels.base import ALIGNED
from halfbyte.kernels.cuda import refused
from halfbyte.kernels.cuda.launch import Program, program
from halfbyte.kernels.experts import Mixture

TYPES: Final = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
IDS: Final = {"int32": "*i32", "int64": "*i64"}
HOPPER: Final = 90
"""The compute capability from which on kernels may overlap."""
SKIPPED: Final = -1
MOST_AT_ONCE: Final = 2048
"""Slots that a program looks at, of up to ``MOST_BINS`` experts; with more of either there are more launches."""
MOST_BINS: Final = 128
COUNTED: Final = 64
"""Slots of a program where there are more launches: at the least, and where there are three."""
MOST_COUNTED: Final = 256
"""At the most."""
CHUNKS: Final = 256
"""Programs where there are two launches, at the most; each adds up what all have counted."""
TABLE: Final = 16384
"""Counts that a program adds up at once, and ``TILES`` times so many at the most."""
TILES: Final = 2
ROWS: Final = 128
SOME: Final = 16
"""Chunks and places that a program adds up at once."""
RUNS: Final = 16
"""Blocks of a program, where slots are sorted already."""
WORD: Final = 4
BLOCK: Final = 512
"""Values of a program of ``combine``, one of few; of many twice as many, or four times where it passes over slots."""
MANY: Final = 1024
"""Programs of ``BLOCK`` that are few."""


@dataclass(frozen=True)
class Numbers:
    """Which numbers name which experts of a stack.

    Args:
        experts: how many there are, null ones too.
        local: the number of each that the stack holds, ascending.
        padding: whether numbers of no expert are skipped, not refused.
        remote: whether null experts are skipped, not refused.
    """

    experts: int
    local: tuple[int, ...]
    padding: bool = False
    remote: bool = False

    @staticmethod
    def of(mixture: Mixture) -> Numbers:
        """Those of a mixture."""
        return Numbers(mixture.experts, mixture.local, mixture.padding, mixture.null == "skip")

    @property
    def first(self) -> int:
        """The first of the stack where they follow each other; else -1: then kernels need ``places``."""
        whole = self.local and self.local[-1] - self.local[0] + 1 == len(self.local)
        return self.local[0] if whole else -1

    def places(self, device: Any) -> Any:
        """(experts,) i32 of each number its place, -1 for null ones; None where ``first`` says it."""
        if self.first >= 0:
            return None
        import torch

        made = torch.full((self.experts,), -1, dtype=torch.int32)
        made[list(self.local)] = torch.arange(len(self.local), dtype=torch.int32)
        return made.to(device)

    def constants(self) -> dict[str, Any]:
        """Those of the device code."""
        return {
            "EXPERTS": self.experts,
            "FIRST": self.first,
            "LOCAL": len(self.local),
            "NULL": SKIPPED if self.remote else -2,
            "UNKNOWN": SKIPPED if self.padding else -3,
        }


def most_blocks(slots: int, local: int, size: int) -> int:
    """How many blocks there are at the most."""
    touched = min(slots, local)
    return touched + (slots - touched) // size


@dataclass(frozen=True)
class Lists:
    """Where lists lie in memory, in words of 4 bytes.

    Args:
        tokens: T.
        top: k, slots of a token.
        size: slots of a block: a multiple of 8, or less than 8 and a power of two.
        numbers: of the experts.
        ids: the dtype of indices, "int32" or "int64".
    """

    tokens: int
    top: int
    size: int
    numbers: Numbers
    ids: str = "int64"

    def __post_init__(self) -> None:
        if self.size % 8 if self.size >= 8 else self.size not in (1, 2, 4):
            raise UsageError("no size of blocks", got=self.size, expected="a multiple of 8, or 1, 2 or 4")

    @property
    def most(self) -> int:
        """Blocks, at the most."""
        return most_blocks(self.tokens * self.top, len(self.numbers.local), self.size)

    @property
    def at_once(self) -> bool:
        """Whether there is one launch."""
        return self.launches == 1

    @property
    def launches(self) -> int:
        """One, or with more slots two, or three."""
        if self.tokens * self.top * max(MOST_BINS, _bins(self.numbers)) <= MOST_AT_ONCE * MOST_BINS:
            return 1
        return 2 if self._shared <= MOST_COUNTED else 3

    @property
    def chunk(self) -> int:
        """Slots of a program."""
        if self.launches == 3:
            return COUNTED
        if self.launches == 2:
            return self._shared
        return 32 if self.tokens * self.top <= MOST_AT_ONCE // 2 or _bins(self.numbers) <= 64 else 64

    @property
    def _shared(self) -> int:
        """Slots of each of so few programs that their counts are soon added up."""
        each = -(-self.tokens * self.top // min(CHUNKS, max(1, TILES * TABLE // _bins(self.numbers))))
        return max(COUNTED, 1 << (each - 1).bit_length())

    @property
    def chunks(self) -> int:
        """Programs."""
        return -(-self.tokens * self.top // self.chunk)

    @property
    def blocks(self) -> int:
        """The first word of ``blocks``."""
        return 0

    @property
    def slots(self) -> int:
        """The first word of ``slots``."""
        return _whole(self.most)

    @property
    def count(self) -> int:
        """The word of ``count``."""
        return self.slots + _whole(self.most * self.size)

    @property
    def offsets(self) -> int:
        """The first word of ``offsets``."""
        return self.count + _whole(1)

    @property
    def table(self) -> int:
        """The first word of what an earlier launch counts."""
        return self.offsets + _whole(len(self.numbers.local) + 1)

    @property
    def nbytes(self) -> int:
        """Of all."""
        counted = 0 if self.at_once else (self.chunks + 1) * _bins(self.numbers)
        return WORD * (self.table + counted)


def _whole(words: int) -> int:
    """Rounded up to what loads of 16 bytes take."""
    return -(-words * WORD // ALIGNED) * ALIGNED // WORD


def _bins(numbers: Numbers) -> int:
    return max(32, 1 << (len(numbers.local) - 1).bit_length())


def counts_parts(made: Lists, capability: int) -> tuple[dict[str, str], dict[str, Any], int]:
    """Signature, constants and warps; capability 0 for Triton's interpreter."""
    signature = {"indices": IDS[made.ids], "places": "*i32", "table": "*i32:16", "SLOTS": "i32"}
    numbers = made.numbers.constants()
    constants = {
        "CHUNK": made.chunk,
        "BINS": _bins(made.numbers),
        **{name: numbers[name] for name in ("EXPERTS", "FIRST", "LOCAL")},
        "EARLY": capability >= HOPPER,
    }
    return signature, constants, 4


def sums_parts(made: Lists, capability: int) -> tuple[dict[str, str], dict[str, Any], int]:
    """As ``counts_parts``."""
    constants = {"ROWS": ROWS, "SOME": SOME, "BINS": _bins(made.numbers), "EARLY": capability >= HOPPER}
    return {"table": "*i32:16", "CHUNKS": "i32"}, constants, 4


def lists_parts(made: Lists, capability: int) -> tuple[dict[str, str], dict[str, Any], int]:
    """As ``counts_parts``."""
    slots = made.tokens * made.top
    every = max(made.chunk, 1 << (slots - 1).bit_length()) if made.at_once else 0
    bins = _bins(made.numbers)
    rows = min(max(1, TABLE // bins), 1 << (made.chunks - 1).bit_length()) if made.launches == 2 else 0
    signature = {
        "indices": IDS[made.ids], "places": "*i32", "blocks": "*i32:16", "slots": "*i32:16", "count": "*i32:16",
        "offsets": "*i32:16", "table": "*i32:16", "refused": "*i64", "SLOTS": "i32",
    }  # fmt: skip
    constants = {
        "SIZE": made.size,
        "CHUNK": made.chunk,
        "ALL": every,
        "ROWS": rows,
        "TILES": -(-made.chunks // rows) if rows else 0,
        "FILL": 1 << (made.size - 1).bit_length(),
        "BINS": bins,
        **made.numbers.constants(),
        "EARLY": capability >= HOPPER,
    }
    return signature, constants, 8 if made.chunk > 128 or (every > MOST_AT_ONCE // 2 and made.chunk > 32) else 4


def runs_parts(made: Lists, capability: int) -> tuple[dict[str, str], dict[str, Any], int]:
    """As ``counts_parts``."""
    signature = {
        "sizes": IDS[made.ids], "blocks": "*i32:16", "slots": "*i32:16", "count": "*i32:16", "offsets": "*i32:16",
        "SLOTS": "i32",
    }  # fmt: skip
    constants = {
        "SIZE": made.size,
        "WIDE": 1 << (made.size - 1).bit_length(),
        "CHUNK": RUNS,
        "BINS": _bins(made.numbers),
        "LOCAL": len(made.numbers.local),
        "EARLY": capability >= HOPPER,
    }
    return signature, constants, 4


def combine_parts(
    h: int, top: int, dtypes: tuple[str, str, str], numbers: Numbers, capability: int, tokens: int = 1
) -> tuple[dict[str, str], dict[str, Any], int]:
    """As ``counts_parts``; dtypes of indices, weights and out, which is float32 in the interpreter."""
    ids, weights, out = dtypes
    signature = {
        "y": "*fp32:16", "indices": IDS[ids], "weights": TYPES[weights], "places": "*i32", "out": f"{TYPES[out]}:16",
        "H": "i32:16" if h % ALIGNED == 0 else "i32",
    }  # fmt: skip
    block, sparse = block_of(h, tokens, numbers), _sparse(h, tokens, numbers)
    once = block > BLOCK and not sparse
    constants = {
        "TOP": top,
        "BLOCK": block,
        "SPARSE": sparse,
        "KEEP": "evict_first" if once else "",
        **numbers.constants(),
        "EARLY": capability >= HOPPER,
    }
    return signature, constants, 8 if once else 4


def block_of(h: int, tokens: int, numbers: Numbers) -> int:
    """Values of a program of ``combine``."""
    return BLOCK if tokens * h <= MANY * BLOCK else 4 * BLOCK if _sparse(h, tokens, numbers) else 2 * BLOCK


def _sparse(h: int, tokens: int, numbers: Numbers) -> bool:
    """Whether most slots are skipped, and programs many."""
    return tokens * h > MANY * BLOCK and 2 * len(numbers.local) <= numbers.experts


def bind_lists(
    made: Lists, places: Any, device: Any, capability: int, early: bool = True, word: Any = None
) -> Callable[[Any, Any], None]:
    """What makes lists.

    Args:
        made: what is made, and where.
        places: of ``Numbers.places``; the caller keeps it.
        device: of torch's, with an index; "cpu" for Triton's interpreter.
        capability: of the device, 90 for sm_90.
        early: whether it may start before the kernel ahead of it ends.
        word: where it writes which slot is refused; by default that of ``refused``.

    Returns:
        A function of indices (T, k), without gaps, and of memory: (nbytes / 4,) i32, or on a GPU its address.
    """
    from halfbyte.kernels.cuda.lists_code import counts, lists, sums

    slots = made.tokens * made.top
    run = _program(lists, lists_parts(made, capability), device, early)
    count = add = None
    if made.launches > 1:
        count = _program(counts, counts_parts(made, capability), device, early)
    if made.launches == 3:
        add = _program(sums, sums_parts(made, capability), device, early)
    chunks, some = (made.chunks, 1, 1), (-(-_bins(made.numbers) // SOME), 1, 1)
    words = (made.blocks, made.slots, made.count, made.offsets, made.table)
    plain, noted = bool(run.plainly), refused.word(device) if word is None else word
    named = None if places is None else (places if plain else places.data_ptr())

    def bound(indices: Any, memory: Any) -> None:
        if plain:
            ids, told = indices, noted
            blocks, listed, total, offsets, table = (memory[word:] for word in words)
        else:
            ids, told = indices.data_ptr(), noted.data_ptr()
            blocks, listed, total, offsets, table = [memory + WORD * word for word in words]
        if count is not None:
            count(chunks, (ids, named, table, slots))
        if add is not None:
            add(some, (table, made.chunks))
        run(chunks, (ids, named, blocks, listed, total, offsets, table, told, slots))

    return bound


def bind_runs(made: Lists, device: Any, capability: int, early: bool = True) -> Callable[[Any, Any], None]:
    """What makes the same of T slots that are sorted already: those of place 0 come first.

    Args:
        made: what is made, and where; ``top`` is 1, and ``ids`` the dtype of the sizes.
        device: as of ``bind_lists``.
        capability: as of ``bind_lists``.
        early: as of ``bind_lists``.

    Returns:
        A function of sizes (local,), how many slots each place has, and of memory, as of ``bind_lists``. Slots beyond
        their sum are in no block, and sizes beyond T are cut.
    """
    from halfbyte.kernels.cuda.lists_code import runs

    run = _program(runs, runs_parts(made, capability), device, early)
    grid, plain, slots = (max(1, -(-made.most // RUNS)), 1, 1), bool(run.plainly), made.tokens
    words = (made.blocks, made.slots, made.count, made.offsets)

    def bound(sizes: Any, memory: Any) -> None:
        if plain:
            run(grid, (sizes, *(memory[word:] for word in words), slots))
        else:
            run(grid, (sizes.data_ptr(), *[memory + WORD * word for word in words], slots))

    return bound


def bind_combine(
    tokens: int,
    top: int,
    h: int,
    dtypes: tuple[str, str, str],
    numbers: Numbers,
    places: Any,
    device: Any,
    capability: int,
    early: bool = True,
) -> Callable[[Any, Any, Any, Any], None]:
    """What adds the results of slots: out[t] = round(sum of weights[t, s] * y[t * top + s]), in float32 in their order.

    Args:
        tokens: T.
        top: k.
        h: values of a token.
        dtypes: of indices, weights and out.
        numbers: of the experts.
        places: of ``Numbers.places``; the caller keeps it.
        device: as of ``bind_lists``.
        capability: as of ``bind_lists``.
        early: as of ``bind_lists``.

    Returns:
        A function of y (T k, H) float32, or on a GPU its address, and of indices, weights and out.
    """
    from halfbyte.kernels.cuda.lists_code import combine

    run = _program(combine, combine_parts(h, top, dtypes, numbers, capability, tokens), device, early)
    grid, plain = (tokens, -(-h // block_of(h, tokens, numbers)), 1), bool(run.plainly)
    named = None if places is None else (places if plain else places.data_ptr())

    def bound(y: Any, indices: Any, weights: Any, out: Any) -> None:
        if plain:
            run(grid, (y, indices, weights, named, out, h))
        else:
            run(grid, (y, indices.data_ptr(), weights.data_ptr(), named, out.data_ptr(), h))

    return bound


def _program(kernel: Any, parts: tuple[Any, Any, int], device: Any, early: bool) -> Program:
    signature, constants, warps = parts
    pdl = constants["EARLY"] and early
    return program(kernel, signature, constants | {"EARLY": pdl}, device=device, warps=warps, pdl=pdl)
