"""The one way in which checkpoints are written: opened, planned, every file made of tasks, and reported."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.reader import Checkpoint, holds_weights, open_checkpoint
from halfbyte.checkpoint.workdir import WorkDirectory, check_target
from halfbyte.checkpoint.writer import CheckpointWriter, Shard
from halfbyte.findings import Finding, Report
from halfbyte.modules import Reading
from halfbyte.stored import CHUNK, Stored
from halfbyte.tasks import Crew, Job, Meter, Progress, Step, Where, worker_count

_COPY_BYTES = 2 << 20
"""Memory that copying takes where the kernel does not copy."""


@dataclass(frozen=True)
class Writing:
    """The options that the writing tools share; each tool's function documents them."""

    dst: str | os.PathLike[str]
    force: bool = False
    dry_run: bool = False
    resume: bool = False
    workers: int | None = None
    executor: Where = None
    progress: Progress | None = None
    started: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class File:
    """One safetensors file to write.

    Attributes:
        tensors: what it will hold.
        nbytes: source bytes that are done when it is written.
        copies: (name here, first byte there, source) of the bytes that are copied.
        metadata: of the file.
        room: the longest metadata that may be added at its end.
        whole: the file to copy instead, header and all.
    """

    tensors: Sequence[Stored]
    nbytes: int
    copies: Sequence[tuple[str, int, Stored]] = ()
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})
    room: dict[str, str] = field(default_factory=dict)
    whole: Path | None = None


class Work:
    """What a tool writes. A subclass fills the fields and gives the methods that its files need.

    Attributes:
        command: the tool.
        checkpoint: the source.
        options: what decides the bytes of the result, as JSON.
        files: by name.
        facts: of the report; "bytes_out" is among them.
        task_bytes: memory that one task needs at most, for its arrays.
        code_bytes: memory that compiled code takes in each process that does tasks.
        checked_bytes: source bytes that ``check`` will look at once more.
        check_bytes: memory that it needs for that.
        index: the name of the index, where one is written for a single file, too.
    """

    command: str
    checkpoint: Checkpoint
    options: dict[str, Any]
    files: dict[str, File]
    facts: dict[str, Any]
    task_bytes: int = 0
    code_bytes: int = 0
    checked_bytes: int = 0
    check_bytes: int = 2 * CHUNK
    index: str = ""

    def steps(self, name: str, shard: Shard) -> Sequence[Step]:
        """The tasks and jobs that write what is not copied."""
        return []

    def ending(self, name: str) -> tuple[dict[str, str], Any]:
        """Metadata to add when a file's steps are done, and what to remember of them, as JSON."""
        return {}, None

    def recall(self, kept: Any) -> None:
        """Take back what ``ending`` gave to remember of a file that a killed run has finished."""

    def side_files(self, writer: CheckpointWriter) -> list[dict[str, str]]:
        """Write what lies beside the weights; one entry {"file", "action", "reason"} for each file."""
        raise NotImplementedError

    def check(self, sealed: Path, meter: Meter) -> dict[str, Any]:
        """Look at the result before it gets its name; further facts."""
        return {}

    def findings(self) -> Iterable[Finding]:
        """The findings of the report, when all files are written; of a dry run, before."""
        return ()


@contextlib.contextmanager
def opened(src: str | os.PathLike[str], how: Writing, reading: Reading | None = None) -> Iterator[Checkpoint]:
    """Open the source of a writing tool, which must be readable, and check its target and options."""
    worker_count(how.workers)
    with open_checkpoint(src, reading) as checkpoint:
        if not how.dry_run:
            WorkDirectory(Path(how.dst)).tidy()
        check_target(Path(how.dst), how.force, checkpoint.path)
        checkpoint.require_readable()
        yield checkpoint


def write_checkpoint(work: Work, how: Writing) -> Report:
    """Write all that a tool has planned, or with a dry run only say so; returns its report.

    Its facts are the work's, "workers", "peak_bytes", and "files", "bytes_on_disk" and "seconds" or "dry_run" and
    "shards".
    """
    todo = sum(file.nbytes for file in work.files.values())
    crew = Crew.of(how.workers, how.executor, todo)
    facts = work.facts | {"workers": str(crew), "peak_bytes": _peak_bytes(work, crew)}
    if how.dry_run:
        return Report(work.command, tuple(work.findings()), facts | {"dry_run": True, "shards": len(work.files)})
    with CheckpointWriter(Path(how.dst), how.force, how.resume, _plan(work)) as writer:
        meter = Meter(todo + work.checked_bytes, how.progress)
        left = {}
        for name, file in work.files.items():
            kept = writer.kept(name, file.tensors)
            if kept is None:
                left[name] = file
            else:
                work.recall(kept)
                meter.add(file.nbytes)
        crew.run((_write(work, writer, name, file) for name, file in left.items()), meter.add)
        facts["files"] = work.side_files(writer)
        sealed = writer.seal(work.index)
        facts |= work.check(sealed, meter)
        facts["bytes_on_disk"] = directory_bytes(sealed)
        writer.commit()
    facts["seconds"] = round(time.perf_counter() - how.started, 3)
    return Report(work.command, tuple(work.findings()), facts)


def _write(work: Work, writer: CheckpointWriter, name: str, file: File) -> Job:
    """The job that writes one file."""
    if file.whole is not None:
        copy = writer.copy(name, file.whole, file.nbytes)
        yield copy.copies()
        yield [copy.last()]
        return
    shard = writer.shard(name, file.tensors, file.metadata, file.room)
    yield [*work.steps(name, shard), *shard.copies(file.copies)]
    yield [shard.last(*work.ending(name))]


def _peak_bytes(work: Work, crew: Crew) -> int:
    """The most memory that a run adds to what the process has when its plan is made."""
    check = work.check_bytes if work.checked_bytes else 0
    processes = crew.own_processes + bool(crew.own_processes > 1 and work.checked_bytes)  # this one checks
    code = processes * work.code_bytes
    return crew.own_bytes + code + crew.width * max(work.task_bytes, _COPY_BYTES) + check


def _plan(work: Work) -> dict[str, Any]:
    """What decides the result: a run that resumes another must agree with it in all of this."""
    from halfbyte import __version__

    checkpoint = work.checkpoint
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    beside = [folder / name for name in ("config.json", "hf_quant_config.json", str(checkpoint.index or "")) if name]
    states = {f.name: f.stat() for f in [*(Path(s.file) for s in checkpoint.shards), *beside] if f.exists()}
    return {
        "command": work.command,
        "version": __version__,
        "source": str(checkpoint.path.resolve()),
        "options": work.options,
        "files": {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()},
        "shards": {name: [t.name for t in file.tensors] for name, file in work.files.items()},
    }


def pieces(rows: int, row_bytes: int, limit: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Ranges of rows of about ``limit`` bytes, each of a multiple of ``multiple`` rows; one range if there are none."""
    step = max(limit // max(row_bytes, 1) // multiple, 1) * multiple
    return [(a, min(a + step, rows)) for a in range(0, rows, step)] or [(0, 0)]


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
