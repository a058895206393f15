"""Whether block scales look as if they lay in another order than they are read in: a suspicion from their values alone.

The rows of a real weight differ in size, and so do its columns, so that log2(scale) is about a number for the row plus
one for the column. Bytes that are read in a wrong order mix rows, and that sum explains less of their differences. A
scale's byte is its log2 in eighths, up to 0.09 of an octave.

Another order is suspected where the sum explains, beyond what chance gives (six standard deviations at least), twice
as much as in the order that is read, and neighbours differ less. The order that is read is favoured: columns may
differ anew in every 256 rows of it, and not in the other. What is a row plus a column plus independent noise is then
not suspected, however large or small its parts; scales without structure are the same in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from halfbyte.layouts import Order
from halfbyte.layouts.executors import arrange, restore

__all__ = ["TILE", "WORDS", "Suspicion", "readable", "suspect", "tiles"]

WORDS: Final = {
    "128x4": Order("(nt n4 n32) k -> nt k n32 n4", n4=4, n32=32),
    "8x4": Order("(nt n8) k -> nt k n8", n8=8),
}
"""The orders of swizzled block scales, of words of four: these stay together."""

TILE: Final = 128
"""Rows that both atoms keep together, so that some tiles of a matrix tell as much as all."""
_BUDGET: Final = 1 << 17
"""Block scales that are looked at, where two tiles are not more."""
_WINDOW: Final = 2 * TILE
_TIMES: Final = 2
_DEVIATIONS: Final = 6
_WIDEST: Final = 1 << 15
"""Blocks of a row up to which two tiles are read."""


@dataclass(frozen=True)
class Suspicion:
    """An order that fits better.

    Attributes:
        scale_layout: "128x4", "8x4" or "linear".
        share, share_read: of the differences of log2(scale), what rows and columns explain beyond chance, in that
            order and as it is read.
    """

    scale_layout: str
    share: float
    share_read: float


def readable(rows: int, blocks: int, scale_layout: str | None) -> bool:
    """Whether block scales of N rows and G blocks can be judged, read with ``scale_layout`` (None: as they lie)."""
    known = scale_layout is None or scale_layout in WORDS
    return known and rows > 0 and rows % TILE == 0 and 4 < blocks <= _WIDEST and blocks % 4 == 0


def tiles(rows: int, blocks: int) -> list[int]:
    """The first rows of the tiles to look at, spread over all ``rows``: an even number, or the only one."""
    count = min(rows // TILE, max(_BUDGET // (TILE * blocks), 2))
    count -= count % 2 if count > 1 else 0
    return [i * (rows // TILE - 1) // max(count - 1, 1) * TILE for i in range(count)]


def suspect(scales: Any, scale_layout: str | None = None) -> Suspicion | None:
    """Judge block scales.

    Args:
        scales: (T * 128, G) u8 in the order that is read, rows of ``tiles``; T is even or 1, G a multiple of 4.
        scale_layout: the order of atoms that they have been taken out of, None if they are as they lie.

    Returns:
        The order that fits better, or None: for scales as they lie one of the atoms, for others "linear".
    """
    steps = np.ascontiguousarray(scales & np.uint8(127))
    words = steps.view(np.uint32)
    if scale_layout is None:
        others = {name: restore(atom, words.reshape(-1), words.shape) for name, atom in WORDS.items()}
    else:
        others = {"linear": arrange(WORDS[scale_layout], words).reshape(words.shape)}
    middle = np.rint(steps.mean())
    wide = _numbers(steps, middle)
    squares, size = float(np.vdot(wide, wide)), len(steps)
    total = squares - float(wide.sum(dtype=np.float64)) ** 2 / wide.size
    read, freedom, noise = _explained(wide, min(size, _WINDOW), squares)
    if noise <= 0:
        return None
    best: Suspicion | None = None
    for name, other in others.items():
        moved = _numbers(other.view(np.uint8), middle)
        explained, more, _ = _explained(moved, size, squares)
        chance = _DEVIATIONS * noise * (2 * (freedom + more)) ** 0.5
        if explained > _TIMES * max(read, chance) and _roughness(moved) < _roughness(wide):
            found = Suspicion(name, explained / total, max(read, 0.0) / total)
            best = found if best is None or found.share > best.share else best
    return best


def _numbers(steps: Any, middle: Any) -> Any:
    return steps.astype(np.float32) - np.float32(middle)  # small integers: their sums stay exact


def _explained(a: Any, window: int, squares: float) -> tuple[float, int, float]:
    """What a number for each row and for each column of a window explains of the sum of squares, beyond chance; the
    number of such numbers that are free; and the mean square of what is left."""
    rows, columns = a.shape
    count = rows // window
    of_rows = (a @ np.ones(columns, np.float32)).astype(np.float64)
    of_columns = (np.ones(window, np.float32) @ a.reshape(count, window, columns)).astype(np.float64)
    middle = (of_columns.sum(1) ** 2).sum() / (window * columns)
    both = (of_rows**2).sum() / columns + (of_columns**2).sum() / window - 2 * middle
    freedom = count * (window + columns - 2)
    noise = (squares - middle - both) / (a.size - count - freedom)
    return both - freedom * noise, freedom, noise


def _roughness(a: Any) -> float:
    """The mean square of the difference of neighbours: along rows from one atom to the next, with the means of the
    columns taken away, or along columns, whichever is less."""
    down = np.square(a[1:] - a[:-1]).mean()
    centred = a - a.mean(0)
    return float(min(down, np.square(centred[:, 4::4] - centred[:, 3:-1:4]).mean()))
