"""Moves by the CUDA executor against those by NumPy; as a script, on the CPU, in Triton's interpreter.

TRITON_INTERPRET=1 python -m moves
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from contract import MX_VARIANTS, VARIANTS
from halfbyte.layouts import Marlin, Order, cuda
from halfbyte.layouts.executors import arrange_codes, arrange_numpy
from halfbyte.weight import to_numpy
from orders import PLANES

SHAPES = ((64, 128), (130, 64), (24, 80), (128, 192))
"""Small enough for the interpreter; several tiles of some, tiles cut off, and padding."""

BITS = (*range(31, 15, -1), *range(16))
WORDS = (
    (Order("(n a) (k b c) -> k n -b a c", bits=BITS, a=2, b=2, c=2), True, (6, 64)),
    (Order("n (k p) -> k n p", bits=BITS, p=8), True, (5, 48)),
    (Order("(n a) k -> k n -a", bits=BITS, a=16), True, (24, 32)),
)
"""Words whose bits move: of 8 and of 4 bytes, with codes backwards, and with exchanges."""


def statements() -> Iterator[tuple[Order, bool, tuple[int, int]]]:
    """Every order of every layout once: itself, whether it is of codes, and a matrix of each shape."""
    for shape in SHAPES:
        seen = set()
        for layout in (*VARIANTS, *MX_VARIANTS):
            if layout.needs(shape):
                continue
            cases = [
                (layout.codes, True, layout.grid(shape, "codes")),
                (layout.scales, False, layout.grid(shape, "scales")),
            ]
            cases += [(order, False, (shape[0], shape[1] // 2)) for order in layout.row_orders.values()]
            for case in cases:
                if case not in seen:
                    seen.add(case)
                    yield case


def any_statements(count: int) -> Iterator[tuple[Order, bool, tuple[int, int]]]:
    """Statements of up to four digits an axis in any order, some backwards, all with a power of two of values."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        axes = [[f"{axis}{i}" for i in range(rng.integers(1, 5))] for axis in "nk"]
        free = [str(rng.choice(axis)) for axis in axes]
        sizes = {d: 1 << int(rng.integers(0, 4)) for axis in axes for d in axis if d not in free}
        memory = [("-" if d in sizes and rng.random() < 0.2 else "") + d for d in rng.permutation(axes[0] + axes[1])]
        pattern = f"({' '.join(axes[0])}) ({' '.join(axes[1])}) -> {' '.join(memory)}"
        codes = bool(rng.integers(2))
        moves_bits = codes and math.prod(sizes.values()) % 8 == 0 and rng.random() < 0.5
        order = Order(pattern, bits=rng.permutation(32).tolist() if moves_bits else (), **sizes)
        shape = int(rng.integers(1, 70)), 16 * int(rng.integers(1, 9)) if codes else int(rng.integers(1, 70))
        if isinstance(cuda.plan(order, shape, 4 if codes else 8, False), cuda.Plan):
            yield order, codes, shape


def check(order: Order, codes: bool, shape: tuple[int, int], device: str) -> None:
    """Two experts there and back, byte for byte as NumPy."""
    bits = 4 if codes else 8
    a = np.random.default_rng(0).integers(0, 256, (2, shape[0], shape[1] * bits // 8), np.uint8)
    stored = (arrange_codes if codes else arrange_numpy)(order, a)
    for source, expected, back in ((a, stored, False), (stored, a, True)):
        moved = to_numpy(cuda.run(order, torch.from_numpy(source).to(device), shape, bits, back))
        assert moved.shape == expected.shape, (order, shape, back)
        assert np.array_equal(moved, expected), (order, shape, back)


def check_all(device: str, random: int, part: slice = slice(None)) -> int:
    """Check every statement that is not refused, of a part of them; how many."""
    count = 0
    for order, codes, shape in [*statements(), *WORDS, *any_statements(random)][part]:
        if cuda.refuse(order, shape, codes=codes) is None:
            check(order, codes, shape, device)
            count += 1
    return count


def check_golden(device: str) -> int:
    """The golden bytes of every plane that is moved, there and back; how many."""
    count = 0
    for plane in PLANES:
        source, stored = plane.source(), plane.stored()
        bits = 4 if plane.codes else 8
        shape = source.shape[0], source.shape[1] * 8 // bits
        if cuda.refuse(plane.order, shape, codes=plane.codes) is not None:
            continue
        count += 1
        for given, expected, back in ((source, stored, False), (stored, source, True)):
            moved: Any = cuda.run(plane.order, torch.from_numpy(np.array(given)).to(device), shape, bits, back)
            assert np.array_equal(to_numpy(moved), expected), (str(plane), back)
    return count


def stores(plan: cuda.Plan) -> Any:
    """How often one expert's move writes each word of the target."""
    words, base, masked, *bounds = plan.constants["TARGET"]
    tables = np.reshape(plan.constants["TARGET_TABLES"], (-1, 3))
    parts = [tables]
    for name, count in (("TARGET_TILES", plan.tiles), ("TARGET_WORDS", plan.constants["WORDS"])):
        number, sums = np.arange(count), np.zeros((count, 3), np.int64)
        for size, *steps in np.reshape(plan.constants[name], (-1, 4))[::-1]:
            sums += (number % size)[:, None] * np.array(steps)
            number //= size
        parts.append(sums)
    at, first, second = np.moveaxis(parts[0] + parts[1][:, None] + parts[2][:, None, None], -1, 0)
    there = (first < bounds[0]) & (second < bounds[1]) if masked else np.ones_like(at, bool)
    return np.bincount(base + at[there], minlength=words)


def check_wide(device: str) -> None:
    """With offsets of 64 bits, as for tiles that span more than 2^31 words."""
    order, shape = Marlin().codes, (130, 96)
    a = np.random.default_rng(0).integers(0, 256, (130, 48), np.uint8)
    stored = arrange_codes(order, a)
    for source, expected, back in ((a, stored, False), (stored, a, True)):
        plan = cuda.plan(order, shape, 4, back)
        assert isinstance(plan, cuda.Plan)
        wide = dataclasses.replace(plan, constants=plan.constants | {"WIDE": True}, compiled={})
        target = torch.empty(plan.target, dtype=torch.uint8, device=device).view(torch.int64)
        assert plan.word == target.itemsize
        cuda.launch(wide, torch.from_numpy(source).to(device).reshape(-1).view(torch.int64), target, plan.tiles)
        assert np.array_equal(to_numpy(target.view(torch.uint8)), expected.reshape(-1))


if __name__ == "__main__":
    check_wide("cpu")
    print(check_all("cpu", random=25), check_golden("cpu"))
