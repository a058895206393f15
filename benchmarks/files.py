"""Figures of the file side: start-up, headers of many tensors, conversion against a plain copy, verification.

    python -m benchmarks.files [--gigabytes 4] [--dir DIR]

Each figure is measured in fresh processes on a synthetic ModelOpt checkpoint; a copy of the same files with
cp and fsync runs right before and right after every conversion.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from halfbyte.checkpoint.header import encode_header
from halfbyte.checkpoint.writer import CheckpointWriter, shard_names
from halfbyte.stored import Stored, byte_count

N, K = 14336, 4096
WEIGHT_BYTES = N * K // 2 + N * K // 16

_CHILD = """
import json, os, resource, sys, time
import halfbyte as hb
import halfbyte.tools.convert, halfbyte.tools.verify, halfbyte.tools.quantize
def anon():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) * 1024
from threading import Thread, Event
stop, top, base = Event(), [0], anon()
def watch():
    while not stop.wait(0.005):
        top[0] = max(top[0], anon())
Thread(target=watch, daemon=True).start()
t = time.perf_counter()
{call}
seconds = time.perf_counter() - t
stop.set()
print(json.dumps({{"seconds": seconds, "growth": max(top[0], anon()) - base, "torch": "torch" in sys.modules}}))
"""


def child(call: str) -> dict[str, float]:
    """Run a call of halfbyte in a fresh process; seconds, growth of RssAnon in bytes."""
    run = subprocess.run([sys.executable, "-c", _CHILD.format(call=call)], check=True, capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def make_checkpoint(folder: Path, gigabytes: float) -> Path:
    """A ModelOpt checkpoint of about that size, in shards of half a gigabyte."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, N * K // 2, np.uint8)
    scales = rng.integers(8, 127, N * K // 16, np.uint8)
    count = max(1, round(gigabytes * 1e9 / WEIGHT_BYTES))
    per_shard = max(1, int(5e8 / WEIGHT_BYTES))
    target = folder / "modelopt"
    with CheckpointWriter(target) as writer:
        shards = [range(i, min(i + per_shard, count)) for i in range(0, count, per_shard)]
        for name, layers in zip(shard_names(len(shards)), shards, strict=True):
            stem = [f"model.layers.{i}.mlp.up_proj" for i in layers]
            tensors = [Stored(f"{s}.weight", "U8", (N, K // 2)) for s in stem]
            tensors += [Stored(f"{s}.weight_scale", "F8_E4M3", (N, K // 16)) for s in stem]
            tensors += [Stored(f"{s}.weight_scale_2", "F32", ()) for s in stem]
            shard = writer.shard(name, tensors, {"format": "pt"})
            for s in stem:
                shard.write(f"{s}.weight", codes)
                shard.write(f"{s}.weight_scale", scales)
                shard.write(f"{s}.weight_scale_2", rng.uniform(1e-5, 1e-3, ()).astype(np.float32))
            shard.finish()
        quantization = {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": [],
        }
        writer.json("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": quantization})
        writer.json("config.json", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}})
        writer.seal()
        writer.commit()
    return target


def make_many_tensors(folder: Path) -> Path:
    """100,200 tensors of a mixture of experts in 200 shards, which take no room: all but the headers is a hole."""
    target, table, total = folder / "many", {}, 0
    target.mkdir()
    for i, name in enumerate(shard_names(200)):
        layer, quarter = f"model.layers.{i // 4}", i % 4
        tensors = [Stored(f"{layer}.norm_{quarter}_{part}.weight", "BF16", (4096,)) for part in "abc"]
        for j in range(166):
            stem = f"{layer}.mlp.experts.{quarter * 55 + j // 3}.{('gate', 'up', 'down')[j % 3]}_proj"
            stem = stem if j < 165 else f"{layer}.mlp.shared_{quarter}.gate_proj"
            tensors.append(Stored(f"{stem}.weight", "U8", (1536, 2048)))
            tensors.append(Stored(f"{stem}.weight_scale", "F8_E4M3", (1536, 256)))
            tensors.append(Stored(f"{stem}.weight_scale_2", "F32", ()))
        head, size = encode_header(tensors, {"format": "pt"}), sum(byte_count(t.dtype, t.shape) for t in tensors)
        (target / name).write_bytes(head)
        os.truncate(target / name, len(head) + size)
        table |= dict.fromkeys((t.name for t in tensors), name)
        total += size
    index = {"metadata": {"total_size": total}, "weight_map": table}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    section = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head", "*.mlp.gate"]}
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": 50, "quantization_config": section}))
    return target


def command_costs(*arguments: str) -> tuple[float, float]:
    """Seconds and peak memory in bytes of the command in a fresh process."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "halfbyte", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def copy_seconds(source: Path, target: Path) -> float:
    """cp and fsync of all files."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def row(what: str, value: str, bound: str) -> None:
    print(f"{what:<46} {value:>26}   {bound}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--dir", default=None, help="where to put the files")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="halfbyte-bench-", dir=options.dir))
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores, files in {folder}")
    try:
        times = [command_costs("--help")[0] for _ in range(15)]
        row("--help, median of 15", f"{statistics.median(times):.3f} s", "at most 0.15 s")
        many = make_many_tensors(folder)
        times, peaks = zip(*(command_costs("inspect", str(many)) for _ in range(6)), strict=True)
        seconds = statistics.median(times[1:])  # the first warms the page cache
        row("inspect of 100,200 tensors, median of 5", f"{seconds:.2f} s", "at most 1.2 s")
        row("inspect of 100,200 tensors, peak memory", f"{max(peaks) / 1e6:.0f} MB", "at most 200 MB")
        source = make_checkpoint(folder, options.gigabytes)
        size = sum(f.stat().st_size for f in source.iterdir())
        copy_seconds(source, folder / "copy")  # warms the page cache
        copies, conversions, growth = [], [], 0.0
        for _ in range(options.repeat):
            copies.append(copy_seconds(source, folder / "copy"))
            shutil.rmtree(folder / "ct", ignore_errors=True)
            result = child(f"hb.convert({str(source)!r}, {str(folder / 'ct')!r}, to='compressed-tensors')")
            conversions.append(result["seconds"])
            growth = max(growth, result["growth"])
            copies.append(copy_seconds(source, folder / "copy"))
        copy, convert = statistics.median(copies), statistics.median(conversions)
        row(f"cp and fsync of {size / 1e9:.2f} GB, median", f"{copy:.2f} s", "")
        row("convert, median", f"{convert:.2f} s = {convert / copy:.2f} x cp", "at most 1.5 x cp")
        row("convert, growth of RssAnon", f"{growth / 1e6:.0f} MB", "at most 300 MB")
        rates = [size / child(f"assert hb.verify({str(source)!r}).ok")["seconds"] for _ in range(options.repeat)]
        row("verify, warm cache, median", f"{statistics.median(rates) / 1e9:.2f} GB/s", "at least 1 GB/s")
        result = child(
            f"hb.convert({str(source)!r}, {str(folder / 'ct')!r}, to='compressed-tensors', prove=True, force=True)"
        )
        row("convert --prove", f"{result['seconds']:.2f} s, {result['growth'] / 1e6:.0f} MB", "")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
