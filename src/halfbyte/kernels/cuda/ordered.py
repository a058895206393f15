"""Activations of 5 to 16 tokens in the order in which the lanes of ``decode_gluon`` need them.

Its x is otherwise (M, K): a lane reads four pieces of 16 bytes of a unit of 64 k, each from another row, and lines of
all rows go through the cache. In order, of a unit first come k with bit 3 clear of the first 8 rows, then those with it
set, then both of the other rows; and of each of these four lane 4 g + q reads the piece of row g and block q as the one
behind that of lane 4 g + q - 1. There is always room for 16 rows; what lies in those from M on is never used.
"""

from __future__ import annotations

from typing import Any, Final

ROWS: Final = 16
UNIT: Final = 64


def length(k: int) -> int:
    """Elements of (M, K) in order."""
    return ROWS * UNIT * -(-k // UNIT)


def ordered(x: Any) -> Any:
    """(M, K) of torch's in order, (``length(K)``,); zeros where there is nothing."""
    from torch.nn.functional import pad

    m, k = x.shape
    x = pad(x, (0, -k % UNIT, 0, ROWS - m))
    return x.reshape(2, 8, -1, 4, 2, 8).permute(2, 0, 4, 1, 3, 5).reshape(-1)  # rh g u q i e -> u rh i g q e


def in_rows(a: Any, m: int, k: int) -> Any:
    """The (M, K) that lie in order in (``length(K)``,)."""
    x = a.reshape(-1, 2, 2, 8, 4, 8).permute(1, 3, 0, 4, 2, 5)
    return x.reshape(ROWS, -1)[:m, :k]
