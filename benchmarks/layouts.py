"""Figures of the executors of layouts: one thread, by its time on the core, beside a plain copy of the same bytes.

    python -m benchmarks.layouts [--megabytes 256] [--only NAME]

Inputs and outputs are rotated over so many megabytes each, so that no cache holds them; outputs exist before, for the
copy too. Medians. "there" is into the layout, "back" is out of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfbyte import layouts
from halfbyte.layouts import executors

SHAPES = [(14336, 4096), (4096, 14336), (4096, 4096)]


@dataclass(frozen=True)
class Case:
    """Planes of a layout, and the GB/s that each way must reach."""

    name: str
    layout: layouts.Layout
    planes: tuple[executors.Plane, ...]
    bound: float | None = None


CASES = [
    Case("128x4 scales", layouts.Atoms128x4(), ("scales",), 3),
    Case("gguf blocks", layouts.Gguf(), ("scales", "codes"), 4),
    Case("columns codes", layouts.Columns(), ("codes",), 2),
    Case("columns scales", layouts.Columns(), ("scales",)),
    Case("npacked codes", layouts.NPacked(), ("codes",), 2),
    Case("marlin codes", layouts.Marlin(), ("codes",), 2),
    Case("marlin scales", layouts.Marlin(), ("scales",)),
    Case("trtllm codes", layouts.Trtllm(), ("codes",)),
    Case("trtllm scales", layouts.Trtllm(), ("scales",)),
    Case("comfy codes", layouts.Comfy(), ("codes",)),
    Case("fragments codes", layouts.Fragments(), ("codes",), 2),
    Case("fragments f16", layouts.Fragments("float16"), ("codes",), 2),
    Case("fragments scales", layouts.Fragments(), ("scales",)),
]


class Planes:
    """Random planes of a case as they lie in a weight, and the buffer of the layout."""

    def __init__(self, case: Case, shape: tuple[int, int], seed: int) -> None:
        self.case, self.shape = case, shape
        rng = np.random.default_rng(seed)
        self.grids = {plane: case.layout.grid(shape, plane) for plane in case.planes}
        self.rows = {
            plane: rng.integers(0, 256, (n, k // 2 if plane == "codes" else k), np.uint8)
            for plane, (n, k) in self.grids.items()
        }
        ((name, self.parts),) = ((n, p) for n, p in case.layout.buffers.items() if set(case.planes) <= set(p))
        self.buffer = np.zeros(case.layout.sizes(shape)[name], np.uint8)
        self.nbytes = sum(a.nbytes for a in self.rows.values())
        self.copy()  # touches every page

    def there(self) -> None:
        for plane, a in self.rows.items():
            order, codes = self._order(plane)
            executors.arrange_compiled(order, a, codes, self.buffer, executors.record_of(self.parts, plane))

    def back(self) -> None:
        for plane, a in self.rows.items():
            order, codes = self._order(plane)
            executors.restore_compiled(
                order, self.buffer, self.grids[plane], codes, a, executors.record_of(self.parts, plane)
            )

    def copy(self) -> None:
        start = 0
        for a in self.rows.values():
            flat = a.reshape(-1)
            np.copyto(self.buffer[start : start + flat.size], flat[: self.buffer.size - start])
            start += flat.size

    def numpy_there(self) -> Any:
        moved: dict[executors.Plane, Any] = {}
        for plane, a in self.rows.items():
            order, codes = self._order(plane)
            moved[plane] = executors.arrange_codes(order, a) if codes else executors.arrange(order, a)
        return executors.interleave(self.parts, moved)

    def numpy_back(self) -> Any:
        flat = executors.separate(self.parts, self.buffer)
        for plane, grid in self.grids.items():
            order, codes = self._order(plane)
            a = (
                executors.restore_codes(order, flat[plane], grid)
                if codes
                else executors.restore(order, flat[plane], grid)
            )
        return a

    def _order(self, plane: executors.Plane) -> tuple[layouts.Order, bool]:
        return (self.case.layout.codes, True) if plane == "codes" else (self.case.layout.scales, False)


def seconds(call: Callable[[], Any]) -> float:
    """On the core: time in which another process has it does not count."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(case: Case, shape: tuple[int, int], megabytes: float) -> None:
    first = Planes(case, shape, 0)
    sets = [first, *(Planes(case, shape, seed) for seed in range(1, -(-int(megabytes * 1e6) // first.nbytes)))]
    for way in ("there", "back"):
        compile_seconds = seconds(getattr(first, way))
        ours, copies = [], []
        for _ in range(max(2, -(-9 // len(sets)))):
            ours += [seconds(getattr(planes, way)) for planes in sets]
            copies += [seconds(planes.copy) for planes in sets]
        small, executors.SMALL = executors.SMALL, 1 << 62
        numpy = statistics.median(seconds(getattr(first, f"numpy_{way}")) for _ in range(3))
        executors.SMALL = small
        rate, copy, slow = (first.nbytes / 1e9 / t for t in (statistics.median(ours), statistics.median(copies), numpy))
        bound = f"at least {case.bound:g}" if case.bound else ""
        what = f"{case.name:<17}{shape[0]:>6} x{shape[1]:>6}  {way:<6}"
        print(
            f"{what}{rate:>8.2f}{slow:>8.2f}{copy:>8.2f}{rate / copy:>7.0%}{compile_seconds:>9.2f} s  {bound}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=256, help="that inputs are rotated over")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    options = parser.parse_args()
    print(f"{platform.platform()}, Python {platform.python_version()}, one of {os.cpu_count()} cores")
    print(f"{'GB/s':<39}compiled   NumPy  memcpy  share first call  bound")
    for case in CASES:
        if options.only in case.name:
            for shape in SHAPES:
                measure(case, shape, options.megabytes)


if __name__ == "__main__":
    main()
