"""``convert``: from one dialect to another. Codes and block scales are carried; only names and scalars change."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.checkpoint.consistency import config_facts, header_findings, quantized
from halfbyte.checkpoint.header import Header
from halfbyte.checkpoint.reader import PROVENANCE, Checkpoint, encode_provenance, open_checkpoint
from halfbyte.checkpoint.writer import CheckpointWriter, Shard, distribute, parse_size, shard_names, write_pieces
from halfbyte.dialects import Dialect, Output, dialect_named
from halfbyte.errors import FormatError, UsageError
from halfbyte.findings import Finding, Report, in_order
from halfbyte.modules import Module, refuse_broken
from halfbyte.numerics import reciprocal
from halfbyte.stored import Stored, byte_count
from halfbyte.tasks import Step, Task, Where
from halfbyte.tools.base import (
    CHUNK,
    File,
    Meter,
    Progress,
    Work,
    Writing,
    dropped_files,
    opened,
    write_checkpoint,
    write_side_files,
)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str,
    prove: bool = False,
    max_shard_size: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    workers: int | None = None,
    executor: Where = None,
    progress: Progress | None = None,
) -> Report:
    """Write a quantized checkpoint in another dialect, without changing a code or a block scale.

    Args:
        src: a directory, a file, or a hub name.
        dst: the directory to make.
        to: the dialect to write, "modelopt" or "compressed-tensors".
        prove: read the result back and compare every tensor with its source before it gets its name.
        max_shard_size: such as "5GB"; by default the shards stay as they are.
        force: replace ``dst`` if it exists; start over where a killed run has left unfinished work.
        dry_run: plan, sizes and peak memory; writes nothing.
        resume: go on with what a killed run of the same call has left, if there is any.
        workers: tasks at once; by default one for each core.
        executor: runs the tasks instead of threads.
        progress: told of bytes written, and with ``prove`` of bytes compared.

    Returns:
        A report; its facts are "src", "dst", "from", "to", "tensors" and "files" (each with what
        became of it and why), "bytes_out", "workers", "peak_bytes" (the most memory that the run adds), "proven"
        (tensors compared) and "seconds".

    Raises:
        HalfbyteError: a source that cannot be read, a tensor the target has no place for, a target that
            may not be written, or a proof that failed. Nothing is left behind.
    """
    how = Writing(dst, force, dry_run, resume, workers, executor, progress)
    target = dialect_named(to)
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    with opened(src, how) as checkpoint:
        if not quantized(checkpoint):
            raise UsageError(
                "there is nothing quantized in this checkpoint",
                file=str(checkpoint.path),
                hint="run halfbyte quantize to quantize it",
            )
        return write_checkpoint(_Convert(checkpoint, target, limit, prove, str(dst)), how)


class _Convert(Work):
    """Copies and, for another dialect, numbers; in the same dialect with the same shards, copies of whole files."""

    command = "convert"

    def __init__(self, checkpoint: Checkpoint, target: Dialect, limit: int | None, prove: bool, dst: str) -> None:
        self.checkpoint, self.prove = checkpoint, prove
        self.same = target is checkpoint.dialect
        self.verbatim = self.same and limit is None
        self.options = {"to": target.name, "max_shard_size": limit}
        outputs = _outputs(checkpoint, target)
        self._numbers, originals = _scalars(checkpoint, outputs)
        self._members = {} if self.verbatim else _shards(checkpoint, outputs, limit)
        self.files = {name: self._file(members, originals) for name, members in self._members.items()}
        if self.verbatim:
            self.files = {Path(shard.file).name: _whole(shard) for shard in checkpoint.shards}
        self.config = (
            None if self.same else target.config(config_facts(checkpoint, {m.name: m for m in quantized(checkpoint)}))
        )
        self.index = str(checkpoint.index) if limit is None and checkpoint.index and not self.verbatim else ""
        self.checked_bytes = sum(o.source.nbytes for o in outputs) if prove else 0
        self.facts = {
            "src": str(checkpoint.path),
            "dst": dst,
            "from": checkpoint.dialect.name,
            "to": target.name,
            "tensors": [_listed(o) for o in outputs],
            "bytes_out": sum(byte_count(o.stored.dtype, o.stored.shape) for o in outputs),
        }

    def _file(self, members: list[Output], originals: Mapping[str, np.float32]) -> File:
        copies = [(o.stored.name, o.source) for o in members if o.how == "copy"]
        metadata = _metadata(self.checkpoint, members, originals)
        return File([o.stored for o in members], sum(o.source.nbytes for o in members), copies, metadata)

    def steps(self, name: str, shard: Shard) -> list[Step]:
        scalars = [o for o in self._members[name] if o.how == "scalar"]
        pieces = [(shard.piece(o.stored.name), self._numbers[o.stored.name]) for o in scalars]
        return [Task(partial(write_pieces, pieces), sum(o.source.nbytes for o in scalars))] if pieces else []

    def side_files(self, writer: CheckpointWriter) -> list[dict[str, str]]:
        if self.config is not None:
            return write_side_files(writer, self.checkpoint, *self.config)
        return _carry_all(writer, self.checkpoint, self.verbatim)

    def check(self, sealed: Path, meter: Meter) -> dict[str, Any]:
        return {"proven": _prove(self.checkpoint, sealed, meter)} if self.prove else {}

    def findings(self) -> tuple[Finding, ...]:
        return in_order(f for f in header_findings(self.checkpoint) if f.severity != "note")


def _whole(shard: Header) -> File:
    """A shard that is copied as it is; all that its header states must be there."""
    file, end = Path(shard.file), max((t.start + t.nbytes for t in shard.tensors), default=0)
    return File((), max(file.stat().st_size, end), whole=file)


def _outputs(checkpoint: Checkpoint, target: Dialect) -> list[Output]:
    if target is checkpoint.dialect:
        return [Output(t, t, "copy") for t in checkpoint.tensors.values()]
    for module in checkpoint.modules:
        refuse_broken(module)
    outputs = [o for module in checkpoint.modules for o in target.outputs(module, checkpoint.dialect)]
    taken: dict[str, str] = {}
    for output in outputs:
        clash = taken.setdefault(output.stored.name, output.source.name)
        if clash != output.source.name:
            raise FormatError(
                "two tensors would get one name", tensor=output.stored.name, got=f"{clash}, {output.source.name}"
            )
    return outputs


def _listed(output: Output) -> dict[str, Any]:
    action, reason = "copied", "the same in both dialects"
    if output.invert:
        action, reason = "converted", "reciprocal"
    elif output.stored.name != output.source.name:
        action, reason = "converted", "renamed; same bytes"
    elif output.stored.shape != output.source.shape or output.stored.dtype != output.source.dtype:
        action, reason = "converted", "shape or dtype; same values"
    return {"tensor": output.source.name, "to": output.stored.name, "action": action, "reason": reason}


def _scalars(checkpoint: Checkpoint, outputs: list[Output]) -> tuple[dict[str, Any], dict[str, np.float32]]:
    """The numbers to store, and those whose reciprocal does not lead back to them.

    ModelOpt's x becomes RN(1/x), the number that compressed-tensors' own converter stores. For about one value
    in six 1/RN(1/x) is not x, and no neighbouring float would be either, so x is kept as provenance.
    """
    numbers: dict[str, Any] = {}
    originals: dict[str, np.float32] = {}
    for output in outputs:
        kept = checkpoint.original(output.source)
        if output.how == "copy":
            if kept is not None and output.source.nbytes == 4:
                originals[output.stored.name] = kept
            continue
        value = checkpoint.read(output.source).astype(np.float32).reshape(output.stored.shape)
        if not output.invert:
            numbers[output.stored.name] = value
            if kept is not None:
                originals[output.stored.name] = kept
            continue
        stored = reciprocal(value) if kept is None else np.full_like(value, kept)
        numbers[output.stored.name] = stored
        if not np.isfinite(stored).all() or not (stored > 0).all():
            raise FormatError(
                "a scale has no reciprocal in float32",
                file=output.source.file,
                tensor=output.source.name,
                got=float(value.reshape(-1)[0]),
                hint="see halfbyte verify",
            )
        back = reciprocal(stored)
        if value.size == 1 and back.reshape(()) != value.reshape(()):
            originals[output.stored.name] = np.float32(value.reshape(()))
        elif value.size != 1 and not np.array_equal(back, value):
            raise FormatError(
                "several scales in one tensor do not all survive a reciprocal",
                file=output.source.file,
                tensor=output.source.name,
            )
    return numbers, originals


def _shards(checkpoint: Checkpoint, outputs: list[Output], limit: int | None) -> dict[str, list[Output]]:
    """Shard name -> outputs: as in the source, or newly distributed."""
    shards: dict[str, list[Output]] = defaultdict(list)
    if limit is None:
        for shard in checkpoint.shards:
            shards[Path(shard.file).name] = []
        for output in outputs:
            shards[Path(output.source.file).name].append(output)
        return {name: members for name, members in shards.items() if members}
    by_name = {o.stored.name: o for o in outputs}
    groups = distribute([o.stored for o in outputs], limit)
    return {n: [by_name[t.name] for t in g] for n, g in zip(shard_names(len(groups)), groups, strict=True)}


def _metadata(checkpoint: Checkpoint, outputs: list[Output], originals: Mapping[str, np.float32]) -> dict[str, str]:
    files = {o.source.file for o in outputs}
    merged = {k: v for shard in checkpoint.shards if shard.file in files for k, v in shard.metadata.items()}
    merged.pop(PROVENANCE, None)
    return merged | encode_provenance(
        {o.stored.name: originals[o.stored.name] for o in outputs if o.stored.name in originals}
    )


def _carry_all(writer: CheckpointWriter, checkpoint: Checkpoint, verbatim: bool) -> list[dict[str, str]]:
    """Carry every file beside the weights: the configs and, where the shards are copied whole, their index."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    names = checkpoint.carried_files()
    names += [Path(n) for n in ("config.json", "hf_quant_config.json") if (folder / n).is_file()]
    names += [checkpoint.index] if verbatim and checkpoint.index else []
    for name in names:
        writer.carry(folder / name, name)
    names += [Path(Path(shard.file).name) for shard in checkpoint.shards] if verbatim else []
    listed = [{"file": str(name), "action": "copied", "reason": "the dialect stays"} for name in names]
    return listed + dropped_files(checkpoint)


def _prove(checkpoint: Checkpoint, result: Path, meter: Meter) -> int:
    """Compare every tensor of the result with its source; returns how many."""
    try:
        other = open_checkpoint(result)
    except FormatError as error:
        raise FormatError(f"the proof failed: {error.message}", tensor=error.tensor, got=error.got) from None
    with other:
        theirs = {(m.kind, m.name): m for m in other.modules}
        compared = 0
        for module in checkpoint.modules:
            twin = theirs.pop((module.kind, module.name), None)
            if twin is None or set(twin.roles) != set(module.roles):
                got = None if twin is None else f"{twin.kind}: {', '.join(twin.roles)}"
                raise FormatError("the proof failed: a module is not as in the source", tensor=module.name, got=got)
            for role, mine in module.roles.items():
                same = (
                    _meaning(checkpoint, module, role) == _meaning(other, twin, role)
                    if role in ("scale2", "input_scale", "scale")
                    else _same_bytes(checkpoint, mine, other, twin.roles[role])
                )
                if not same:
                    raise FormatError("the proof failed: a tensor differs from its source", tensor=mine.name)
                meter.add(mine.nbytes)
                compared += 1
            companions = {t.name: t for t in twin.unknown}
            for mine in module.unknown:
                there = companions.pop(mine.name, None)
                if there is None or not _same_bytes(checkpoint, mine, other, there):
                    raise FormatError("the proof failed: a tensor differs from its source", tensor=mine.name)
                meter.add(mine.nbytes)
                compared += 1
            if companions:
                raise FormatError("the proof failed: the result holds more than the source", tensor=min(companions))
        if theirs:
            raise FormatError("the proof failed: the result holds more than the source", tensor=min(theirs)[1])
        return compared


def _meaning(checkpoint: Checkpoint, module: Module, role: str) -> bytes:
    value = checkpoint.read(module.roles[role])
    return bytes(checkpoint.dialect.meaning(module, role, value, checkpoint.original).tobytes())


def _same_bytes(a: Checkpoint, mine: Stored, b: Checkpoint, theirs: Stored) -> bool:
    if mine.nbytes != theirs.nbytes:
        return False
    buffers = [np.empty(min(CHUNK, mine.nbytes), np.uint8) for _ in range(2)]
    for start in range(0, mine.nbytes, CHUNK):
        pieces = [buffer[: min(CHUNK, mine.nbytes - start)] for buffer in buffers]
        a.read_into(mine, start, pieces[0])
        b.read_into(theirs, start, pieces[1])
        if not np.array_equal(pieces[0], pieces[1]):
            return False
    return True
