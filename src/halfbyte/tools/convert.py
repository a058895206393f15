"""``convert``: from one dialect to another. Codes and block scales are carried; only names and scalars change."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.checkpoint.consistency import config_facts, header_findings, quantized
from halfbyte.checkpoint.reader import PROVENANCE, Checkpoint, encode_provenance, open_checkpoint
from halfbyte.checkpoint.writer import CheckpointWriter, check_target, distribute, parse_size, shard_names
from halfbyte.dialects import Dialect, Output, dialect_named
from halfbyte.errors import FormatError, UsageError
from halfbyte.findings import Report, in_order
from halfbyte.modules import Module, refuse_broken
from halfbyte.numerics import reciprocal
from halfbyte.stored import Stored, byte_count
from halfbyte.tools.base import (
    CHUNK,
    Meter,
    Progress,
    copy_jobs,
    directory_bytes,
    dropped_files,
    run,
    worker_count,
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
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write a quantized checkpoint in another dialect, without changing a code or a block scale.

    Args:
        src: a directory, a file, or a hub name.
        dst: the directory to make.
        to: the dialect to write, "modelopt" or "compressed-tensors".
        prove: read the result back and compare every tensor with its source before it gets its name.
        max_shard_size: such as "5GB"; by default the shards stay as they are.
        force: replace ``dst`` if it exists.
        dry_run: plan and sizes; writes nothing.
        workers: threads; by default one for each core.
        progress: told of bytes written, and with ``prove`` of bytes compared.

    Returns:
        A report; its facts are "src", "dst", "from", "to", "tensors" and "files" (each with what
        became of it and why), "bytes_out", "proven" (tensors compared) and "seconds".

    Raises:
        HalfbyteError: a source that cannot be read, a tensor the target has no place for, a target that
            may not be written, or a proof that failed. Nothing is left behind.
    """
    started = time.perf_counter()
    target = dialect_named(to)
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    threads = worker_count(workers)
    with open_checkpoint(src) as checkpoint:
        check_target(Path(dst), force, checkpoint.path)
        checkpoint.require_readable()
        if not quantized(checkpoint):
            raise UsageError(
                "there is nothing quantized in this checkpoint",
                file=str(checkpoint.path),
                hint="run halfbyte quantize to quantize it",
            )
        source = checkpoint.dialect
        same = target is source
        outputs = _outputs(checkpoint, target)
        numbers, originals = _scalars(checkpoint, outputs)
        shards = _shards(checkpoint, outputs, limit)
        config = None if same else target.config(config_facts(checkpoint, {m.name: m for m in quantized(checkpoint)}))
        findings = in_order(f for f in header_findings(checkpoint) if f.severity != "note")
        facts: dict[str, Any] = {
            "src": str(checkpoint.path),
            "dst": str(dst),
            "from": source.name,
            "to": target.name,
            "tensors": [_listed(o) for o in outputs],
            "bytes_out": sum(byte_count(o.stored.dtype, o.stored.shape) for o in outputs),
        }
        if dry_run:
            return Report("convert", findings, facts | {"dry_run": True, "shards": len(shards), "peak_bytes": 64 << 20})
        verbatim = same and limit is None
        with CheckpointWriter(Path(dst), force) as writer:
            meter = Meter(sum(o.source.nbytes for o in outputs) * (2 if prove else 1), progress)

            def write(name: str, members: list[Output]) -> None:
                metadata = _metadata(checkpoint, members, originals)
                shard = writer.shard(name, [o.stored for o in members], metadata)
                for output in members:
                    if output.how == "scalar":
                        shard.write(output.stored.name, numbers[output.stored.name])
                        meter.add(output.source.nbytes)
                pairs = [(o.stored.name, o.source) for o in members if o.how == "copy"]
                run(copy_jobs(checkpoint, shard, pairs, meter), 1, meter)
                shard.finish()

            # One shard is copied while another is synced.
            run([partial(write, *shard) for shard in shards.items()] if not verbatim else [], threads, meter)
            if config is None:
                facts["files"] = _carry_all(writer, checkpoint, verbatim, meter)
            else:
                facts["files"] = write_side_files(writer, checkpoint, *config)
            mirrored = limit is None and checkpoint.index is not None and not verbatim
            sealed = writer.seal(str(checkpoint.index) if mirrored else "")
            if prove:
                facts["proven"] = _prove(checkpoint, sealed, meter)
            facts["bytes_on_disk"] = directory_bytes(sealed)
            writer.commit()
        facts["seconds"] = round(time.perf_counter() - started, 3)
        return Report("convert", findings, facts)


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


def _carry_all(writer: CheckpointWriter, checkpoint: Checkpoint, shards: bool, meter: Meter) -> list[dict[str, str]]:
    """Carry every file: the configs and, with ``shards``, the weights and their index."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    names = checkpoint.carried_files()
    names += [Path(n) for n in ("config.json", "hf_quant_config.json") if (folder / n).is_file()]
    if shards:
        names += [Path(Path(shard.file).name) for shard in checkpoint.shards]
        names += [checkpoint.index] if checkpoint.index else []
    for name in names:
        writer.carry(folder / name, name)
    for shard in checkpoint.shards if shards else ():
        size, expected = os.stat(shard.file).st_size, max((t.start + t.nbytes for t in shard.tensors), default=0)
        if size < expected:
            raise FormatError("the file became shorter while it was read", file=shard.file, got=size, expected=expected)
    if shards:
        meter.add(sum(t.nbytes for t in checkpoint.tensors.values()))
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
