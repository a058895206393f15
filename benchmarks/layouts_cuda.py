"""How long a GPU takes to move a weight into each layout and back, beside a copy of the same bytes.

    python -m benchmarks.layouts_cuda [--json FILE]

Every figure is the median of replays of a CUDA graph of many moves, each from an input and to an output of its own,
more than twice the L2 cache together; the copy is measured the same way in the same run. Results are compared with
those of PyTorch's own operations first, and any that differs ends the run. The status is 1 if a move takes more than
``BOUND`` times the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from halfbyte.layouts import (
    LAYOUTS,
    Columns,
    ExpertsOutPair,
    Fragments,
    Layout,
    Marlin,
    Order,
    Tiles64,
    Trtllm,
    cuda,
    executors,
)

SHAPES = ((28672, 8192), (14336, 4096))
BOUND = 4.0
REPLAYS = 15
VARIANTS = (
    *LAYOUTS,
    Columns(align=32),
    Tiles64("linear"),
    Tiles64("marlin"),
    ExpertsOutPair("atom"),
    Marlin(pad_n=128, pad_k=64),
    Trtllm(epilogue_tile=64),
    Fragments("float16"),
)


def seconds(call: Callable[[Any], Any], inputs: list[Any]) -> float:
    """Of the GPU, for one of ``call(x)`` for each x of inputs."""
    call(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(x) for x in inputs]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for i in range(REPLAYS + 2):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) * 1e-3)
    del outputs
    return statistics.median(times) / len(inputs)


def host_seconds(call: Callable[[Any], Any], x: Any, count: int = 300) -> float:
    """Of the host, for one call on a small input."""
    call(x)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call(x)
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / count


def planes() -> Iterator[tuple[Layout, str, Order]]:
    """The statements of all layouts, each once; those that move nothing take no time."""
    seen = set()
    for layout in VARIANTS:
        for plane, order in (("codes", layout.codes), ("scales", layout.scales)):
            key = plane, order, layout.scale_block if plane == "scales" else None
            if key not in seen and not order.moves_nothing(layout.grid(SHAPES[0], plane)):
                seen.add(key)
                yield layout, plane, order


def moves(plane: str, order: Order, grid: tuple[int, int]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Into the order and back, as a pack and an unpack do it."""
    if plane == "codes":
        return lambda x: executors.arrange_codes(order, x), lambda x: executors.restore_codes(order, x, grid)
    return lambda x: executors.arrange(order, x), lambda x: executors.restore(order, x, grid)


def eager(plane: str, order: Order, x: Any) -> Any:
    """Into the order by PyTorch's own operations."""
    if plane == "scales":
        return executors.arrange_torch(order, x)
    codes = torch.stack([x & 15, x >> 4], -1).flatten(-2)
    moved = executors.arrange_torch(order, codes)
    packed = moved[..., 0::2] | (moved[..., 1::2] << 4)
    if not order.bits:
        return packed
    words, whole = packed.view(torch.int32), torch.zeros((), dtype=torch.int32, device=x.device)
    for first, second in enumerate(order.bits):
        whole = whole | (words >> first & 1) << second
    return whole.view(torch.uint8)


def measure(shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """A row for each statement and direction."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    copies: dict[int, float] = {}
    for layout, plane, order in planes():
        codes = plane == "codes"
        grid = layout.grid(shape, plane)  # type: ignore[arg-type]
        width = grid[1] // 2 if codes else grid[1]
        size = grid[0] * width
        inputs = [
            torch.randint(0, 256, (grid[0], width), dtype=torch.uint8, device="cuda")
            for _ in range(max(2, -(-2 * cache // size)))
        ]
        if size not in copies:
            copies[size] = seconds(torch.clone, inputs)
        name, why = cuda.executor(order, grid, codes=codes)
        forwards, back = moves(plane, order, grid)
        stored = [forwards(x) for x in inputs]
        if not torch.equal(stored[0], eager(plane, order, inputs[0])):
            raise SystemExit(f"{layout.key} {plane}: the bytes are not those of PyTorch's operations")
        if not all(torch.equal(back(y), x) for x, y in zip(inputs, stored, strict=True)):
            raise SystemExit(f"{layout.key} {plane}: not the same after going there and back")
        for direction, call, given in (("pack", forwards, inputs), ("unpack", back, stored)):
            taken = seconds(call, given)
            yield {
                "layout": layout.key,
                "plane": plane,
                "direction": direction,
                "shape": list(shape),
                "bytes": size,
                "executor": f"{name}: {why}",
                "microseconds": round(taken * 1e6, 2),
                "gigabytes_per_second": round((size + stored[0].nbytes) / taken / 1e9, 1),
                "copy_microseconds": round(copies[size] * 1e6, 2),
                "times_a_copy": round(taken / copies[size], 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("not measured: torch sees no CUDA GPU")
    rows = []
    for shape in SHAPES:
        print(f"{shape[0]} x {shape[1]}")
        for row in measure(shape):
            rows.append(row)
            print(
                f"  {row['layout'][:48]:48} {row['plane']:6} {row['direction']:6} {row['microseconds']:9.2f} us"
                f" {row['gigabytes_per_second']:7.1f} GB/s {row['times_a_copy']:6.2f} copies  {row['executor']}",
                flush=True,
            )
    small = torch.zeros(256, 128, dtype=torch.uint8, device="cuda")
    host = {
        "move": round(host_seconds(moves("codes", Marlin().codes, (256, 256))[0], small) * 1e6, 1),
        "copy": round(host_seconds(torch.clone, small) * 1e6, 1),
    }
    print(f"host: {host['move']} us to launch a small move, {host['copy']} us to launch a copy")
    worst = max(rows, key=lambda row: row["times_a_copy"])
    print(f"worst: {worst['layout']} {worst['plane']} {worst['direction']}: {worst['times_a_copy']:.2f} copies")
    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "commit": os.environ.get("COMMIT", "unknown"),
        "bound": BOUND,
        "worst": worst["times_a_copy"],
        "host_microseconds": host,
        "rows": rows,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if worst["times_a_copy"] > BOUND else 0)


if __name__ == "__main__":
    main()
