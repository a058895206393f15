"""What the tools share: threads, progress, and the parts of writing that do not depend on the tool."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from halfbyte.checkpoint.reader import Checkpoint, holds_weights
from halfbyte.errors import FormatError, UsageError
from halfbyte.findings import Finding
from halfbyte.modules import Module
from halfbyte.patterns import Patterns
from halfbyte.stored import Stored

if TYPE_CHECKING:
    from halfbyte.checkpoint.writer import CheckpointWriter, Shard  # inspect writes nothing and starts sooner

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread but one at a time."""

Job: TypeAlias = Callable[[], None]

CHUNK = 4 << 20
"""Bytes that a scan looks at in one step: two of them fit a core's cache."""


class Meter:
    """Counts bytes over threads and tells a progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done = total, 0
        self._progress, self._lock, self._cancelled = progress, threading.Lock(), False
        self.add(0)

    def cancel(self) -> None:
        """Make every further ``add`` raise, so that jobs on other threads end soon."""
        self._cancelled = True

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        if self._cancelled:
            raise CancelledError
        with self._lock:
            self.done += count
            if self._progress is not None:
                self._progress(self.done, self.total)


def chosen(
    modules: Sequence[Module], include: Iterable[str], exclude: Iterable[str]
) -> tuple[list[Module], list[Finding]]:
    """The modules that ``include`` (or all) selects and ``exclude`` does not, and findings for idle patterns."""
    wanted, unwanted = Patterns(include), Patterns(exclude)
    if not wanted and not unwanted:
        return list(modules), []
    both = [(m, wanted.first(m.name), unwanted.first(m.name)) for m in modules]
    return [m for m, yes, no in both if (yes or not wanted) and not no], idle(wanted, unwanted)


def idle(*patterns: Patterns) -> list[Finding]:
    """A finding for each pattern that has selected nothing."""
    return [Finding("HB301", got=pattern) for group in patterns for pattern in group.unused()]


def worker_count(workers: int | None) -> int:
    """How many threads to use: the number asked for, or one for each core this process may use."""
    if workers is not None and workers < 1:
        raise UsageError("workers must be positive", got=workers)
    affinity = getattr(os, "sched_getaffinity", None)
    return workers or (len(affinity(0)) if affinity else os.cpu_count() or 1)


def run(jobs: Sequence[Job], workers: int, meter: Meter) -> None:
    """Run jobs, which count their bytes on ``meter``, on threads; the first exception ends all, and is raised."""
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            job()
        return
    pool = ThreadPoolExecutor(min(workers, len(jobs)), thread_name_prefix="halfbyte")
    try:
        done, _ = wait([pool.submit(job) for job in jobs], return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    except BaseException:
        meter.cancel()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def copy_jobs(checkpoint: Checkpoint, shard: Shard, pairs: Iterable[tuple[str, Stored]], meter: Meter) -> list[Job]:
    """One job for each source file: copy tensors, given as (name here, tensor there), into a shard."""
    by_file: dict[str, list[tuple[str, Stored]]] = defaultdict(list)
    for name, source in pairs:
        by_file[source.file].append((name, source))

    def job(file: str, group: list[tuple[str, Stored]]) -> None:
        try:
            with checkpoint.descriptor(file) as source:
                shard.copy(group, source, meter.add)
        except FormatError as error:
            error.file = file
            raise

    return [partial(job, file, group) for file, group in by_file.items()]


def write_side_files(
    writer: CheckpointWriter,
    checkpoint: Checkpoint,
    section: Mapping[str, Any] | None,
    extra: Mapping[str, Mapping[str, Any]],
    other_weights: bool = True,
    dtype: str | None = None,
) -> list[dict[str, str]]:
    """Carry the other files and write config.json with the given ``quantization_config``.

    ``other_weights=False`` leaves out the same weights in other formats, which the result replaces; ``dtype``
    becomes the one of config.json.

    Returns:
        One entry {"file", "action", "reason"} for each file.
    """
    listed = []
    for name in checkpoint.carried_files():
        if other_weights is False and _is_weights(name):
            listed.append({"file": str(name), "action": "dropped", "reason": "weights in another format"})
            continue
        writer.carry(checkpoint.path / name, name)
        listed.append({"file": str(name), "action": "copied", "reason": "not a weight"})
    if checkpoint.config or section is not None:
        config = without_quantization(checkpoint.config)
        if dtype is not None:
            config = _with_dtype(config, dtype) | ({} if "torch_dtype" in config else {"dtype": dtype})
        if section is not None:
            config["quantization_config"] = dict(section)
        writer.json("config.json", config)
        listed.append({"file": "config.json", "action": "converted", "reason": "quantization_config"})
    for name_, value in extra.items():
        writer.json(name_, value)
        listed.append({"file": name_, "action": "converted", "reason": "written from the tensors"})
    if checkpoint.quant and "hf_quant_config.json" not in extra:
        reason = "the target has no such file"
        listed.append({"file": "hf_quant_config.json", "action": "dropped", "reason": reason})
    return listed + dropped_files(checkpoint)


def _is_weights(name: Path) -> bool:
    pickled = name.suffix == ".bin" and name.name.startswith("pytorch_model")
    return pickled or name.suffix in (".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors")


def dropped_files(checkpoint: Checkpoint) -> list[dict[str, str]]:
    """The entries for what is not carried: shards that the index does not name, and links to directories."""
    strays = [str(f.got) for f in checkpoint.findings if f.code == "HB132"]
    listed = [{"file": name, "action": "dropped", "reason": "not in the index"} for name in strays]
    folder = checkpoint.path if checkpoint.path.is_dir() else None
    for path in sorted(folder.iterdir()) if folder else ():
        if path.is_dir() and path.is_symlink():
            listed.append({"file": path.name, "action": "dropped", "reason": "a link to a directory"})
        elif path.is_dir() and holds_weights(path):
            listed.append({"file": path.name, "action": "dropped", "reason": "a checkpoint of its own"})
    return listed


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of config.json without its quantization sections, also those of nested models."""
    gone = ("quantization_config", "compression_config")
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in gone
    }


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A copy of config.json in which every dtype, also of nested models, is ``dtype``."""
    return {
        key: dtype
        if key in ("dtype", "torch_dtype")
        else _with_dtype(value, dtype)
        if isinstance(value, dict)
        else value
        for key, value in config.items()
    }


def directory_bytes(path: Path) -> int:
    """Bytes of all regular files below ``path``."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
