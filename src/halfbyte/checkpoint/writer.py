"""Writing a checkpoint: into a hidden directory beside the target, which takes its name when all is on disk.

A shard's header is written first, since sizes follow from shapes; then each tensor goes to its offset, in any
order and from any thread. Shards get their names when they are complete and synced, the index last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from halfbyte.checkpoint.header import encode_header
from halfbyte.checkpoint.reader import INDEX
from halfbyte.errors import FormatError, TargetError, UsageError
from halfbyte.stored import DTYPE_BITS, Stored, byte_count

_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}
_COPY_STEP = 64 << 20
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
        file: where it is written.
        tensors: what it will hold; they are laid out by dtype, then by name, as the library does.
        metadata: of the file.
        largest: the longest metadata that ``finish`` may be given; room is kept for it.
    """

    def __init__(
        self, file: Path, tensors: Iterable[Stored], metadata: dict[str, str], largest: dict[str, str] | None = None
    ) -> None:
        ordered = sorted(tensors, key=lambda t: (_RANK[t.dtype], t.name))
        self.file, self.metadata = file, metadata
        self._room = len(encode_header(ordered, metadata | (largest or {}))) - 8
        header = encode_header(ordered, metadata, self._room)
        offset = len(header)
        self.tensors: dict[str, Stored] = {}
        for tensor in ordered:
            nbytes = byte_count(tensor.dtype, tensor.shape)
            self.tensors[tensor.name] = replace(tensor, file=str(file), start=offset, nbytes=nbytes)
            offset += nbytes
        self._missing, self._lock = set(self.tensors), threading.Lock()
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._write(header, 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, array: Any) -> None:
        """Write the bytes of ``array`` as tensor ``name``."""
        tensor = self._take(name)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if raw.nbytes != tensor.nbytes:
            raise FormatError("wrong number of bytes", tensor=name, got=raw.nbytes, expected=tensor.nbytes)
        self._write(raw, tensor.start)

    def copy(self, pairs: Sequence[tuple[str, Stored]], source: int, done: Callable[[int], None]) -> None:
        """Copy tensors from an open file; ranges that touch on both sides go in one piece.

        Args:
            pairs: (name here, tensor there).
            source: descriptor of the file there.
            done: told of bytes as they are copied.
        """
        ranges: list[list[int]] = []
        for name, there in sorted(pairs, key=lambda pair: self.tensors[pair[0]].start):
            here = self._take(name)
            if here.nbytes != there.nbytes:
                raise FormatError("wrong number of bytes", tensor=name, got=there.nbytes, expected=here.nbytes)
            if ranges and ranges[-1][0] + ranges[-1][2] == there.start and ranges[-1][1] + ranges[-1][2] == here.start:
                ranges[-1][2] += here.nbytes
            else:
                ranges.append([there.start, here.start, here.nbytes])
        for there_start, here_start, count in ranges:
            with _naming(self.file):
                copy_range(source, self._fd, there_start, here_start, count, done)

    def finish(self, metadata: dict[str, str] | None = None) -> None:
        """Sync and close; every tensor must have been written. ``metadata`` is added to the header's."""
        if self._missing:
            raise FormatError("a tensor was not written", file=str(self.file), tensor=min(self._missing))
        if metadata:
            header = encode_header(self.tensors.values(), self.metadata | metadata, self._room)
            if len(header) - 8 != self._room:
                raise FormatError("the header has outgrown its room", file=str(self.file))
            self._write(header, 0)
        with _naming(self.file):
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Close without checking."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self, name: str) -> Stored:
        with self._lock:
            if name not in self._missing:
                raise FormatError("a tensor is written twice, or is not of this shard", tensor=name)
            self._missing.discard(name)
        return self.tensors[name]

    def _write(self, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        with _naming(self.file):
            while len(view):
                written = os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written


def copy_range(source: int, target: int, start: int, offset: int, count: int, done: Callable[[int], None]) -> None:
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
        done(copied)


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Give an OSError of a descriptor the name of its file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


@dataclass
class CheckpointWriter:
    """A directory under way; use it as a context manager and call ``seal`` and ``commit`` at the end.

    Args:
        target: the directory to make.
        force: whether it may replace one that exists.

    Raises:
        TargetError: a target that exists and may not be replaced, or whose parent is missing.
    """

    target: Path
    force: bool = False

    def __enter__(self) -> CheckpointWriter:
        check_target(self.target, self.force)
        self._shards: dict[str, Shard] = {}
        parent = self.target.absolute().parent
        self._work = parent / f".halfbyte-{self.target.name[:100]}-{secrets.token_hex(4)}"
        try:
            self._work.mkdir()
        except OSError as error:
            raise TargetError("cannot write into the directory", file=str(parent), got=error.strerror) from None
        except BaseException:  # interrupted before __exit__ is responsible
            shutil.rmtree(self._work, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shard in self._shards.values():
            shard.close()
        shutil.rmtree(self._work, ignore_errors=True)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
        if isinstance(error, OSError) and (full or error.filename is None or str(self._work) in str(error.filename)):
            raise TargetError("cannot write the target", file=str(self.target), got=error.strerror) from None

    def shard(
        self, name: str, tensors: Iterable[Stored], metadata: dict[str, str], largest: dict[str, str] | None = None
    ) -> Shard:
        """Begin a shard; see Shard."""
        self._shards[name] = Shard(self._work / f"{name}.tmp", tensors, metadata, largest)
        return self._shards[name]

    def json(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        self._place(name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())

    def carry(self, source: Path, name: Path) -> None:
        """Copy a file as it is; ``name`` is relative to the directory."""
        to = self._work / name
        to.parent.mkdir(parents=True, exist_ok=True)
        expected = source.stat().st_size
        shutil.copyfile(source, to)
        if to.stat().st_size != expected:
            raise FormatError("the file became shorter while it was read", file=str(source))
        _sync(to)

    def seal(self, index: str = "") -> Path:
        """Name the finished shards and write the index; returns the directory, which is now a checkpoint.

        Args:
            index: its name; where one is given it is written for a single shard, too.
        """
        for name, shard in self._shards.items():
            shard.file.rename(self._work / name)
        if len(self._shards) > 1 or (index and self._shards):
            table = {tensor: name for name, shard in self._shards.items() for tensor in shard.tensors}
            total = sum(t.nbytes for shard in self._shards.values() for t in shard.tensors.values())
            self.json(index or INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))})
        _sync(self._work)
        return self._work

    def commit(self) -> None:
        """Let the sealed directory take its place; refuses a target that has come into being meanwhile."""
        check_target(self.target, self.force)
        with _set_aside(self.target):
            self._work.rename(self.target)
        _sync(self.target.absolute().parent)

    def _place(self, name: str, data: bytes) -> None:
        with open(self._work / name, "xb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())


def check_target(target: Path, force: bool, source: Path | None = None) -> None:
    """Refuse a target that cannot or may not be written, or that holds ``source``.

    Raises:
        TargetError: with what to do.
    """
    parent = target.absolute().parent
    if not target.name:
        raise TargetError("not a name for a directory", file=str(target))
    if not parent.is_dir():
        raise TargetError(
            "the directory to write into does not exist", file=str(parent), hint=f"run: mkdir -p {parent}"
        )
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise TargetError("the target exists and is not a directory", file=str(target), hint="choose another name")
    if source is not None and target.resolve() in (source.resolve(), *source.resolve().parents):
        raise TargetError("the target is or holds the source", file=str(target), hint="choose another name")
    if force and _is_something_else(target):
        raise TargetError(
            "the target is not a checkpoint, and --force replaces nothing else",
            file=str(target),
            hint="choose another name",
        )
    if not force and any(target.iterdir()):
        raise TargetError(
            "the target exists", file=str(target), hint="choose another name, or pass --force to replace it"
        )


def _is_something_else(folder: Path) -> bool:
    """Whether a directory is a repository, or holds directories and no weights: not what anybody means to replace."""
    weights = any(folder.glob("*.safetensors"))
    return (folder / ".git").exists() or (not weights and any(path.is_dir() for path in folder.iterdir()))


@contextlib.contextmanager
def _set_aside(target: Path) -> Iterator[None]:
    """Move an existing target away, and back if what follows fails."""
    if not target.exists():
        yield
        return
    aside = Path(tempfile.mkdtemp(prefix=f".halfbyte-{target.name[:100]}-old-", dir=target.absolute().parent))
    try:
        target.rename(aside / target.name)
        yield
    except BaseException:
        if (aside / target.name).exists():
            (aside / target.name).rename(target)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
