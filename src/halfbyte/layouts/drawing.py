"""The drawing of a layout, as it stands in each layout's docstring, made from the layout's statement."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from math import lcm, prod

import numpy as np

from halfbyte.layouts.base import Layout
from halfbyte.layouts.order import Order

_SHOWN = 8
_DRAWN = ", drawn from its statement"


def drawing(layout: Layout) -> str:
    """Where ``layout`` puts codes and scales: what lies first in memory, and what a step in memory moves by.

    Steps are in nibbles for codes, the low one of a byte first, and in bytes for scales. ``n3 k16`` is the code in row
    3 and column 16, or the scale of the block that begins there. N and K stand for the padded sizes. Where the bits of
    each 8 codes are moved, a line says where to in their 32 bits, those of the first byte the lowest. Of a layout that
    moves whole rows, all its orders are drawn, a step being a row in memory.
    """
    if layout.row_orders:
        return "\n".join(_drawn(name, o, (1, 0), (o.multiples[0], 1)) for name, o in layout.row_orders.items())
    needs = [f"{x} % {m} == 0" for x, m in zip("NK", layout.multiples, strict=True) if m > 1]
    parts = [f"needs {' and '.join(needs)}"] if needs else []
    for buffer, planes in layout.buffers.items():
        if len(planes) > 1:
            records = ", ".join(f"{size} of {plane}" for plane, size in planes.items())
            parts.append(f"{buffer}: in turn {records}")
        for plane in planes:
            whole = layout.multiples[0], lcm(layout.multiples[1], layout.group)
            if plane == "codes":
                parts.append(_drawn("codes (nibbles)", layout.codes, (1, 1), whole))
            else:
                parts.append(_drawn("scales (bytes)", layout.scales, layout.scale_block, whole))
    return "\n".join(parts)


def with_drawings(docstring: str, layouts: Sequence[Layout]) -> str:
    """The docstring of a module with the drawings of its layouts as its last part, in place of those it had."""
    text = re.sub(rf"\n\n[^\n]*{_DRAWN}::\n.*", "", docstring, flags=re.DOTALL).rstrip()
    for layout in layouts:
        drawn = drawing(layout)
        name = layout.name if layout.row_orders else layout.key
        text += f"\n\n``{name}``{_DRAWN}::\n\n{textwrap.indent(drawn, '    ')}"
    return text + "\n"


def _drawn(title: str, order: Order, block: tuple[int, int], whole: tuple[int, int]) -> str:
    """The drawing of a statement; an entry covers ``block`` elements of N and K, (1, 0) where whole rows move.

    N and K are multiples of ``whole`` before they are padded.
    """
    multiples = [m * b for m, b in zip(order.multiples, block, strict=True)]
    padded = [f"{x} to {m}" for x, m, w in zip("NK", multiples, whole, strict=True) if m and w % m]
    memory = [d for d in order.pattern.split("->")[1].split() if d != "k" or block[1]]
    head = f"{title:<15}  {' '.join(memory)}" + (f"    padded: {' and '.join(padded)}" if padded else "")
    rows, step = [("step", "size", "moves by")], 1
    free: list[str] = []
    for digit in reversed(order.memory):
        axis = int(digit in order.axes[1])
        letter, size = "NK"[axis], dict(order.sizes).get(digit)
        if not block[axis] or size == 1:
            continue
        count = str(size) if size else _over(letter, multiples[axis])
        rows.append(
            (_times(step, free), count, ("-" if digit in order.backwards else "+") + _move(order, digit, block))
        )
        if size:
            step *= size
        else:
            free.append(count)
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    table = [f"    {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows]
    table.append(f"    first{_sample(order, block)}: " + ", ".join(_first(order, block)))
    if order.bits:
        codes = [" ".join(map(str, order.bits[i : i + 4])) for i in range(0, len(order.bits), 4)]
        table += [f"    their bits, the lowest first: {', '.join(codes[:4])},", f"        {', '.join(codes[4:])}"]
    return "\n".join([head, *table])


def _move(order: Order, digit: str, block: tuple[int, int]) -> str:
    """What one step of a digit adds to n or k."""
    axis = int(digit in order.axes[1])
    sizes, digits = dict(order.sizes), order.axes[axis]
    inner = digits[digits.index(digit) + 1 :]
    known = prod(sizes.get(d, 1) for d in inner) * block[axis]
    if all(d in sizes for d in inner):
        return f"{known} {'nk'[axis]}"
    return f"{_over('NK'[axis], order.multiples[axis] * block[axis] // known)} {'nk'[axis]}"


def _first(order: Order, block: tuple[int, int]) -> list[str]:
    """The elements that lie first, of a matrix of several tiles."""
    shape = tuple(m * _SHOWN if b else 1 for m, b in zip(order.multiples, block, strict=True))
    first, second = order.offsets((shape[0], shape[1]))
    at = first[:, None] + second[None, :]
    places = np.unravel_index(np.argsort(at, axis=None)[:_SHOWN], at.shape)
    return [
        " ".join(f"{x}{i * b}" for x, i, b in zip("nk", p, block, strict=True) if b) for p in zip(*places, strict=True)
    ]


def _sample(order: Order, block: tuple[int, int]) -> str:
    """What the first elements are of, where they depend on it."""
    return "" if block[1] else f", of N = {order.multiples[0] * _SHOWN}"


def _over(letter: str, multiple: int) -> str:
    return letter if multiple == 1 else f"{letter}/{multiple}"


def _times(step: int, free: list[str]) -> str:
    return " * ".join(([str(step)] if step > 1 or not free else []) + free)
