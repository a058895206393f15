"""In which order blocks of slots are dealt out to programs: the large ones first, so that all have as many of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from halfbyte.kernels.cuda.launch import program

MOST: Final = 1024
"""Blocks that are looked at together."""


def specified(size: int, low: int, mid: int, most: int, early: bool = True) -> tuple[dict[str, str], dict[str, Any]]:
    """The kernel's signature and constants; arguments as of ``bind``."""
    chunk = min(MOST, max(128, 1 << (most - 1).bit_length()))
    constants = {"SIZE": size, "LOW": low, "MID": mid, "CHUNK": chunk, "EARLY": early}
    return dict.fromkeys(("slots", "count", "to"), "*i32:16"), constants


def bind(size: int, low: int, mid: int, most: int, device: Any) -> Callable[[int, int, int], None]:
    """What finds the order: blocks with more than ``mid`` slots, then with more than ``low``, then the others.

    Args:
        size: slots of a block.
        low: see above.
        mid: see above; ``low`` at the least.
        most: blocks, at the most.
        device: of torch's, with an index, of Hopper or later.

    Returns:
        A function of the addresses of slots, of count, and of (most,) i32, which is written.
    """
    from halfbyte.kernels.cuda.experts_order_code import order

    run = program(order, *specified(size, low, mid, most), device=device, pdl=True)

    def bound(slots: int, count: int, to: int) -> None:
        run((1, 1, 1), (slots, count, to))

    return bound
