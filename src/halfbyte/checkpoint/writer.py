"""Writing a checkpoint: into a hidden directory beside the target, which takes its name when all is on disk.

A shard's header is written first, since sizes follow from shapes; then each piece of a tensor goes to its offset,
in any order and from any process. Shards get their names when they are complete and synced, the index last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from halfbyte.checkpoint.header import encode_header
from halfbyte.checkpoint.reader import INDEX
from halfbyte.checkpoint.workdir import WorkDirectory, check_target, sync
from halfbyte.errors import FormatError, TargetError, UsageError
from halfbyte.stored import DTYPE_BITS, Stored, byte_count
from halfbyte.tasks import Task

_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}
_COPY_TASK = 256 << 20
"""Bytes that one task copies at most."""

_COPY_STEP = 64 << 20
"""Bytes that the kernel is asked to copy at once: Ctrl-C waits for so many."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB", "500MB" or "2GiB", as transformers writes them.

    Raises:
        UsageError: anything else, or a size that is not positive.
    """
    upper = text.strip().upper()
    unit = next((u for u in sorted(_UNITS, key=len, reverse=True) if upper.endswith(u)), "")
    number = upper.removesuffix(unit)
    try:
        size = int(float(number) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError("not a size", got=repr(text), expected="a number and KB, MB, GB or TB, such as 5GB")
    return size


class Shard:
    """One safetensors file under way.

    Args:
        file: where it is written; it must not exist.
        tensors: what it will hold; they are laid out by dtype, then by name, as the library does.
        metadata: of the file.
        room: the longest metadata that may be added at the end; room is kept for it.
        final: the name that it takes when it is complete; by default that of ``file``.
        kept: the file for what the end of the shard has to be remembered by.
    """

    def __init__(
        self,
        file: Path,
        tensors: Iterable[Stored],
        metadata: dict[str, str],
        room: dict[str, str] | None = None,
        final: Path | None = None,
        kept: Path | None = None,
    ) -> None:
        self.file, self.metadata, self.final, self.kept = file, metadata, final or file, kept
        self.tensors, self._room = laid_out(tensors, metadata | (room or {}), str(file))
        header = encode_header(self.tensors.values(), metadata, self._room)
        self._missing, self._lock = {t.name: t.nbytes for t in self.tensors.values()}, threading.Lock()
        with _opened(str(file), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            _write(fd, header, 0)

    def piece(self, name: str, start: int = 0, nbytes: int | None = None) -> Stored:
        """Bytes of a tensor (by default all) as the target of a task, which then has to write them.

        Raises:
            FormatError: more than the tensor has would be written, or it is not of this shard.
        """
        tensor = self.tensors.get(name)
        count = nbytes if nbytes is not None else tensor.nbytes if tensor is not None else 0
        with self._lock:
            left = self._missing.pop(name, -1) - count
            if tensor is None or left < 0 or start + count > tensor.nbytes:
                raise FormatError("a tensor is written twice, is too small, or is not of this shard", tensor=name)
            if left:
                self._missing[name] = left
        return replace(tensor, start=tensor.start + start, nbytes=count)

    def write(self, name: str, array: Any) -> None:
        """Write the bytes of ``array`` as tensor ``name``, here and now."""
        write_pieces([(self.piece(name), array)])

    def copies(self, pieces: Iterable[tuple[str, int, Stored]]) -> list[Task]:
        """Tasks that copy (name here, first byte in it, source); ranges that touch on both sides are joined."""
        by_file: dict[str, list[tuple[Stored, Stored]]] = defaultdict(list)
        for name, start, there in pieces:
            by_file[there.file].append((self.piece(name, start, there.nbytes), there))
        tasks = []
        for file, group in by_file.items():
            ranges: list[list[int]] = []
            for here, there in sorted(group, key=lambda pair: pair[0].start):
                last = ranges[-1] if ranges else [0, 0, -1]
                if last[0] + last[2] == there.start and last[1] + last[2] == here.start:
                    last[2] += here.nbytes
                else:
                    ranges.append([there.start, here.start, here.nbytes])
            tasks += _copy_tasks(file, str(self.file), ranges)
        return tasks

    def finish(self, metadata: dict[str, str] | None = None) -> None:
        """Make the file complete, here and now."""
        self.last(metadata).function()

    def last(self, metadata: dict[str, str] | None = None, kept: Any = None) -> Task:
        """The task that makes the file complete; every tensor must have been given to a task that has ended.

        Args:
            metadata: added to the header's.
            kept: JSON to remember the end of this shard by.
        """
        if self._missing:
            raise FormatError("a tensor was not written", file=str(self.file), tensor=min(self._missing))
        header = b""
        if metadata:
            header = encode_header(self.tensors.values(), self.metadata | metadata, self._room)
            if len(header) - 8 != self._room:
                raise FormatError("the header has outgrown its room", file=str(self.file))
        remembered = (str(self.kept), json.dumps(kept or {})) if self.kept else None
        return Task(partial(_finish, str(self.file), str(self.final), header, remembered))


def laid_out(tensors: Iterable[Stored], longest: dict[str, str], file: str) -> tuple[dict[str, Stored], int]:
    """Where tensors lie in a file by dtype, then by name, as the library lays them out; and the bytes of its header.

    Args:
        tensors: with their dtype and shape.
        longest: the metadata for which the header keeps room.
        file: of the tensors that are returned.
    """
    ordered = sorted(tensors, key=lambda t: (_RANK[t.dtype], t.name))
    offset = len(encode_header(ordered, longest))
    room, placed = offset - 8, {}
    for tensor in ordered:
        nbytes = byte_count(tensor.dtype, tensor.shape)
        placed[tensor.name] = replace(tensor, file=file, start=offset, nbytes=nbytes)
        offset += nbytes
    return placed, room


class FileCopy:
    """A file under way that is copied as a whole, header and all.

    Args:
        file: where it is written; it must not exist.
        source: what is copied.
        nbytes: its size.
        final, kept: as for Shard.
    """

    def __init__(self, file: Path, source: Path, nbytes: int, final: Path, kept: Path) -> None:
        self.file, self.source, self.nbytes, self.final, self.kept = file, source, nbytes, final, kept
        with _opened(str(file), os.O_WRONLY | os.O_CREAT | os.O_EXCL):
            pass

    def copies(self) -> list[Task]:
        """The tasks that copy it."""
        return _copy_tasks(str(self.source), str(self.file), [[0, 0, self.nbytes]])

    def last(self) -> Task:
        """The task that makes it complete and gives it its name."""
        return Task(partial(_finish, str(self.file), str(self.final), b"", (str(self.kept), "{}")))


def write_pieces(pieces: Iterable[tuple[Stored, Any]]) -> None:
    """Write arrays to their places: (piece of a shard, array), each of as many bytes.

    Raises:
        FormatError: an array of another size.
        OSError: of the target, with its name.
    """
    for file, group in groupby(pieces, key=lambda piece: piece[0].file):
        with _opened(file, os.O_WRONLY) as fd:
            for target, array in group:
                raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                if raw.nbytes != target.nbytes:
                    raise FormatError(
                        "wrong number of bytes", tensor=target.name, got=raw.nbytes, expected=target.nbytes
                    )
                _write(fd, raw, target.start)


def _copy_tasks(source: str, target: str, ranges: Iterable[Sequence[int]]) -> list[Task]:
    """Tasks for ranges (start there, start here, bytes), each of at most 256 MB."""
    groups: list[list[tuple[int, int, int]]] = []
    room = 0
    for start, offset, count in ranges:
        for done in range(0, count, _COPY_TASK):
            size = min(_COPY_TASK, count - done)
            if size > room:
                groups.append([])
                room = _COPY_TASK
            groups[-1].append((start + done, offset + done, size))
            room -= size
    return [Task(partial(copy_ranges, source, target, group), sum(r[2] for r in group)) for group in groups]


def copy_ranges(source: str, target: str, ranges: Iterable[tuple[int, int, int]]) -> None:
    """Copy ranges (start there, start here, bytes) from file to file.

    Raises:
        FormatError: the source ends before, or cannot be read.
        OSError: of the target, with its name.
    """
    with _opened(source, os.O_RDONLY) as there, _opened(target, os.O_WRONLY) as here:
        try:
            for start, offset, count in ranges:
                copy_range(there, here, start, offset, count)
        except FormatError as error:
            error.file = source
            raise


def _finish(file: str, final: str, header: bytes, kept: tuple[str, str] | None) -> None:
    """Sync a file and give it its name; what is kept of it is on disk before."""
    with _opened(file, os.O_WRONLY) as fd:
        if header:
            _write(fd, header, 0)
        os.fsync(fd)
    if kept:
        with _opened(kept[0], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            _write(fd, kept[1].encode(), 0)
            os.fsync(fd)
    if final != file:
        Path(file).rename(final)


def _write(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def copy_range(source: int, target: int, start: int, offset: int, count: int) -> None:
    """Copy ``count`` bytes between files, in the kernel where it can; where that fails in any way, through a buffer.

    Raises:
        FormatError: the source ends before, or cannot be read.
        OSError: of the target.
    """
    in_kernel = hasattr(os, "copy_file_range")
    while count:
        copied = 0
        if in_kernel:
            # Two file systems, a filter of system calls, a file system without it: it declines in many ways.
            with contextlib.suppress(OSError):
                copied = os.copy_file_range(source, target, min(count, _COPY_STEP), start, offset)
            in_kernel = copied > 0
        if not copied:
            try:
                data = os.pread(source, min(count, 1 << 20), start)
            except OSError as error:
                raise FormatError("cannot read the file", got=error.strerror) from None
            if not data:
                raise FormatError("the file became shorter while it was read", got=f"no byte at {start}")
            copied = os.pwrite(target, data, offset)
        start, offset, count = start + copied, offset + copied, count - copied


@contextlib.contextmanager
def _opened(file: str, flags: int) -> Iterator[int]:
    """A descriptor; an OSError gets the name of its file."""
    fd = os.open(file, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    except OSError as error:
        error.filename = error.filename or file
        raise
    finally:
        os.close(fd)


@dataclass
class CheckpointWriter:
    """A directory under way; use it as a context manager and call ``seal`` and ``commit`` at the end.

    Args:
        target: the directory to make.
        force: whether it may replace one that exists, or what a killed run has left.
        resume: whether to go on with what a killed run of the same plan has left.
        plan: what decides the result; without one nothing can be resumed.

    Raises:
        TargetError: a target that exists and may not be replaced, whose parent is missing, or that another run is
            writing; what a killed run has left, and neither ``force`` nor ``resume``; or a plan that differs from its.
    """

    target: Path
    force: bool = False
    resume: bool = False
    plan: Mapping[str, Any] = field(default_factory=dict)

    def __enter__(self) -> CheckpointWriter:
        check_target(self.target, self.force)
        self._shards: dict[str, Mapping[str, Stored]] = {}
        self._work = WorkDirectory(self.target)
        self._work.enter(self.plan, self.force, self.resume)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._work.leave()
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
        inside = isinstance(error, OSError) and str(self._work.path) in str(error.filename)
        if isinstance(error, OSError) and (full or error.filename is None or inside):
            raise TargetError("cannot write the target", file=str(self.target), got=error.strerror) from None

    def kept(self, name: str, tensors: Iterable[Stored]) -> Any:
        """What ``Shard.finish`` was told to keep of a shard that a killed run has finished; None if it has not.

        A shard that is there counts as written, and must not be begun again.
        """
        found = self._work.kept(name)
        placed, _ = laid_out(tensors, {}, "")
        if found is not None and placed:
            self._shards[name] = placed
        return found

    def shard(
        self, name: str, tensors: Iterable[Stored], metadata: dict[str, str], room: dict[str, str] | None = None
    ) -> Shard:
        """Begin a shard; see Shard. The name may be in a folder, which then is a checkpoint of its own."""
        work = self._work
        (work.out / name).parent.mkdir(exist_ok=True)
        shard = Shard(work.temporary(name), tensors, metadata, room, work.out / name, work.kept_file(name))
        self._shards[name] = shard.tensors
        return shard

    def copy(self, name: str, source: Path, nbytes: int) -> FileCopy:
        """Begin a shard that is the copy of a file."""
        work = self._work
        return FileCopy(work.temporary(name), source, nbytes, work.out / name, work.kept_file(name))

    def json(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        self._place(
            name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        )  # halves of surrogate pairs stay escapes

    def carry(self, source: Path, name: Path) -> None:
        """Copy a file as it is; ``name`` is relative to the directory."""
        to = self._work.out / name
        to.parent.mkdir(parents=True, exist_ok=True)
        expected = source.stat().st_size
        shutil.copyfile(source, to)
        if to.stat().st_size != expected:
            raise FormatError("the file became shorter while it was read", file=str(source))
        sync(to)

    def seal(self, index: str = "") -> Path:
        """Write the index, in each folder of shards its own; returns the directory, which is now a checkpoint.

        Args:
            index: its name; where one is given it is written for a single shard, too.
        """
        folders: dict[str, dict[str, Mapping[str, Stored]]] = defaultdict(dict)
        for name, tensors in self._shards.items():
            folder, slash, file = name.rpartition("/")
            folders[folder + slash][file] = tensors
        for folder, shards in folders.items():
            if len(shards) > 1 or index:
                table = {tensor: name for name, tensors in shards.items() for tensor in tensors}
                total = sum(t.nbytes for tensors in shards.values() for t in tensors.values())
                entries = {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}
                self.json(f"{folder}{index or INDEX}", entries)
            if folder:
                sync(self._work.out / folder)
        sync(self._work.out)
        return self._work.out

    def commit(self) -> None:
        """Let the sealed directory take its place; refuses a target that has come into being meanwhile."""
        check_target(self.target, self.force)
        self._work.commit()

    def _place(self, name: str, data: bytes) -> None:
        with open(self._work.out / name, "xb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())


def shard_names(count: int) -> list[str]:
    """``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def distribute(tensors: Sequence[Stored], max_bytes: int) -> list[list[Stored]]:
    """Tensors in order, in as few shards of at most ``max_bytes`` as that order allows; a larger one stands alone."""
    shards: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = byte_count(tensor.dtype, tensor.shape)
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes
    return shards
