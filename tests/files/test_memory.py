"""Memory: what --dry-run prints is what a run takes, however large the largest tensor is."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints import command_line, environment, raw_safetensors
from halfbyte import jit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

IN_PROCESSES = """
import sys
import halfbyte.tasks
halfbyte.tasks._ENOUGH = 1
from halfbyte.cli import main
main(sys.argv[1:])
"""

K = 4096
SOURCES = {
    "dense": {"a.weight": ("BF16", [40_000, K]), "b.weight": ("BF16", [3_900, K]), "c.weight": ("BF16", [4, K])},
    "nvfp4": {
        "a.weight_scale_2": ("F32", []),
        "a.weight_scale": ("F8_E4M3", [40_000, K // 16]),
        "a.weight": ("U8", [40_000, K // 2]),
    },
    "fp8": {"a.weight_scale": ("F32", [157, 32]), "a.weight": ("F8_E4M3", [20_000, K])},
    "layer": {
        "a.weight_scale_2": ("F32", []),
        "a.weight_scale": ("F8_E4M3", [4096, K // 16]),
        "a.weight": ("U8", [4096, K // 2]),
    },
    "packed": {
        "a.weight_scale_2": ("F32", []),
        "a.weight_scale": ("F8_E4M3", [160_000, K // 16]),
        "a.weight": ("U8", [160_000, K // 2]),
    },
}
"""Tensors that are, or become, 320 MB large, and one of a layer: zeros, which need no disk, and a scale2 of 1."""


def make(path, tensors):
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "F32": 4}.get(dtype, 1)
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw_safetensors(path, header, struct.pack("<f", 1.0) if "a.weight_scale_2" in tensors else b"")
    with path.open("rb") as handle:
        start = 8 + int.from_bytes(handle.read(8), "little")
    os.truncate(path, start + end)
    return path


def anonymous(pid):
    """RssAnon of a process and of all below it, in bytes."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        own = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon")) << 10
    except (OSError, StopIteration):
        return 0
    return own + sum(map(anonymous, below))


def watched(*args, processes=False):
    """The document of a run, and the most memory that it had."""
    line = [sys.executable, "-c", IN_PROCESSES, *map(str, args)] if processes else command_line(*args)
    process = subprocess.Popen([*line, "--json"], stdout=subprocess.PIPE, text=True, env=environment())
    top = 0
    while process.poll() is None:
        top = max(top, anonymous(process.pid))
        time.sleep(0.002)
    assert process.returncode == 0
    return json.loads(process.communicate()[0]), top


RUNS = {
    "quantize": ("quantize", "dense"),
    "dequantize": ("dequantize", "nvfp4"),
    "dequantize fp8": ("dequantize", "fp8", "--dtype", "float32"),
    "convert": ("convert", "packed", "--to", "compressed-tensors", "--prove"),
    "convert to a layout": ("convert", "layer", "--layout", "marlin"),
    "convert verbatim": ("convert", "packed", "--to", "modelopt"),
}


COMPILED = ("quantize", "dequantize", "convert to a layout")
"""Those whose memory is also that of Numba and of the code that it makes."""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_keeps_to_what_the_dry_run_prints(tmp_path, run, workers):
    verb, source, *options = RUNS[run]
    args = [verb, make(tmp_path / "src.safetensors", SOURCES[source]), tmp_path / "out", *options, "--workers", workers]
    processes = workers > 1 and verb != "convert"
    plan, base = watched(*args, "--dry-run", processes=processes)
    done, top = watched(*args, processes=processes)
    assert (
        done["workers"]
        == plan["workers"]
        == {1: "1 thread", 2: f"2 {'processes' if processes else 'threads'}"}[workers]
    )
    code = jit.code_bytes() if run in COMPILED else 0
    assert done["peak_bytes"] == plan["peak_bytes"] < 200_000_000 + (workers if processes else 1) * code
    assert plan["peak_bytes"] > code
    assert top - base <= plan["peak_bytes"] * 1.1 + (64 << 20)
    assert top - base >= plan["peak_bytes"] * 0.4 or verb == "convert"
    for file in (tmp_path / "out").iterdir():
        file.unlink()
