"""Tensors as they lie on disk: safetensors dtypes, and where a tensor's bytes are."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import ml_dtypes
import numpy as np

from halfbyte.errors import FormatError, LayoutError

DTYPE_BITS: Final[dict[str, int]] = {
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F32": 32, "U32": 32, "I32": 32,
    "BF16": 16, "F16": 16, "U16": 16, "I16": 16,
    "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "F8_E8M0": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E3M2": 6, "F6_E2M3": 6, "F4": 4,
}  # fmt: skip
"""Bits of one element of each dtype that a safetensors header may name (safetensors 0.8), in the order in
which the library lays tensors out in a file."""

_NUMPY: Final[dict[str, Any]] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
    "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip

_NAMED: Final = {np.dtype(dtype).name: name for name, dtype in _NUMPY.items()}

FLOATS: Final = ("F32", "BF16", "F16")
"""The dtypes of dense weights."""

CHUNK: Final = 4 << 20
"""Bytes that a scan looks at in one step: two of them fit a core's cache."""


@dataclass(slots=True, unsafe_hash=True)  # frozen takes three times as long to make, and there are 100,000
class Stored:
    """One tensor on disk; nothing changes one that is made.

    Attributes:
        name: full name.
        dtype: as the header spells it, such as "F8_E4M3".
        shape: as the header states it; F4 counts codes, not bytes.
        file: path of the shard.
        start: offset of the first byte in the file.
        nbytes: size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    start: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def place(self, index: Sequence[int]) -> list[int]:
        """Where an element of this tensor, or a block of it, stands in the tensor on disk."""
        return [int(i) for i in index]


@dataclass(slots=True, unsafe_hash=True)
class View(Stored):
    """A tensor that is part of another one on disk, or that is not stored as it is meant.

    ``name`` is that of the tensor on disk; ``shape`` and ``nbytes`` are of what ``steps`` make.

    Attributes:
        region: bytes on disk, from ``start``, that it is made from.
        steps: each makes an array from the one before; the first gets the region's bytes. Without steps the
            region is the tensor. A step whose attribute ``in_place`` is true changes bytes where they are.
        expert: of the stack on disk, or None.
        first, stride: row r here is row ``first + r * stride`` there.
    """

    region: int = 0
    steps: tuple[Callable[[Any], Any], ...] = ()
    expert: int | None = None
    first: int = 0
    stride: int = 1

    @property
    def in_place(self) -> bool:
        """Whether every byte is made of the one in its place, so that any range can be made by itself."""
        return all(getattr(step, "in_place", False) for step in self.steps)

    def make(self, raw: Any) -> Any:
        """The bytes of the tensor, u8 of one axis, from those of its region.

        Raises:
            LayoutError: bytes that a layout does not store, with the tensor's name.
        """
        for step in self.steps:
            try:
                raw = step(raw)
            except LayoutError as error:
                error.file, error.tensor = self.file, self.name
                raise
        return np.ascontiguousarray(raw).reshape(-1).view(np.uint8)

    def place(self, index: Sequence[int]) -> list[int]:
        """Where an element or a block stands on disk: the expert comes first."""
        at = [int(i) for i in index]
        if at:
            at[0] = self.first + at[0] * self.stride
        return at if self.expert is None else [self.expert, *at]


@dataclass(slots=True, unsafe_hash=True)
class Runs(Stored):
    """A tensor that is some bytes of each row of a matrix on disk.

    Attributes:
        width: bytes of a row there, the first of which begins at ``start``.
        ranges: the bytes of each row.
    """

    width: int = 0
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Select:
    """Some bytes of each row of a matrix, as a step of a View."""

    width: int
    ranges: tuple[tuple[int, int], ...]

    def __call__(self, raw: Any) -> Any:
        """Bytes of whole rows, ``width`` each, to (rows, bytes) u8."""
        matrix = np.ascontiguousarray(raw).reshape(-1).view(np.uint8).reshape(-1, self.width)
        return np.concatenate([matrix[:, a:b] for a, b in self.ranges], 1)


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; a last partial byte counts whole."""
    return -(-prod(shape) * DTYPE_BITS[dtype] // 8)


def as_array(raw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """(bytes,) u8 as an array of ``dtype``; F4 gives u8 with two codes a byte, so half the last axis."""
    if dtype == "F4" and shape[-1] % 2 == 0:
        return raw.reshape(*shape[:-1], shape[-1] // 2)
    if dtype not in _NUMPY:
        return raw  # of a type that NumPy does not know, or rows that end inside a byte
    return raw.view(_NUMPY[dtype]).reshape(shape)


def rows_of(tensor: Stored, a: int, b: int) -> Stored:
    """Entries a..b along the first axis of a tensor.

    They lie together, unless steps make the tensor of which not all keep every byte in its place: then all of it is
    made for them.
    """
    each = tensor.nbytes // max(tensor.shape[0], 1)
    part = replace(tensor, shape=(b - a, *tensor.shape[1:]), nbytes=(b - a) * each)
    if not isinstance(part, View):
        return replace(part, start=tensor.start + a * each)
    part = replace(part, first=part.first + a * part.stride)
    if part.in_place:
        return replace(part, start=part.start + a * each, region=(b - a) * each)
    return replace(part, steps=(*part.steps, Cut(a * each, b * each)))


def part_of(tensor: Stored, axis: int, ranges: Sequence[tuple[int, int]]) -> Stored:
    """Some entries along an axis of a tensor, one range after the other.

    Only their bytes are read, unless steps make the tensor: then all of it is made for them.

    Raises:
        FormatError: entries that begin or end inside a byte.
    """
    bits = prod(tensor.shape[axis + 1 :]) * DTYPE_BITS[tensor.dtype]
    if any(bits * at % 8 for run in ranges for at in run):
        raise FormatError("the tensor is cut inside a byte", file=tensor.file, tensor=tensor.name, got=list(ranges))
    runs = tuple((a * bits // 8, b * bits // 8) for a, b in ranges)
    width, outer = tensor.shape[axis] * bits // 8, prod(tensor.shape[:axis])
    shape = (*tensor.shape[:axis], sum(b - a for a, b in ranges), *tensor.shape[axis + 1 :])
    nbytes = outer * sum(b - a for a, b in runs)
    if isinstance(tensor, View) and tensor.steps:
        return replace(tensor, shape=shape, nbytes=nbytes, steps=(*tensor.steps, Select(width, runs)))
    if outer == 1 and len(runs) == 1:
        part = replace(tensor, shape=shape, start=tensor.start + runs[0][0], nbytes=nbytes)
        if isinstance(part, View):
            return replace(part, region=nbytes, first=part.first + ranges[0][0] * part.stride * (axis == 0))
        return part
    return Runs(tensor.name, tensor.dtype, shape, tensor.file, tensor.start, nbytes, width, runs)


@dataclass(frozen=True)
class Cut:
    """Bytes start..stop of what is made."""

    start: int
    stop: int

    def __call__(self, raw: Any) -> Any:
        """(stop - start,) u8."""
        return np.ascontiguousarray(raw).reshape(-1).view(np.uint8)[self.start : self.stop]


_KEPT = 4
_LAST = threading.local()


def read_into(tensor: Stored, start: int, out: Any) -> None:
    """Fill ``out`` (bytes,) u8 from byte ``start`` of a tensor, whose file is opened for it.

    A view that is made in steps, not all of them in place, is made whole; where a part of it is asked for, it is
    kept until others are read in this thread.

    Raises:
        FormatError: the file has become shorter, or cannot be read.
    """
    if isinstance(tensor, Runs):
        whole = out if len(out) == tensor.nbytes else np.empty(tensor.nbytes, np.uint8)
        _fill(tensor, tensor.start, whole, tensor.width, tensor.ranges)
        if whole is not out:
            out[...] = whole[start : start + len(out)]
        return
    if not isinstance(tensor, View) or tensor.in_place:
        _fill(tensor, tensor.start + start, out)
        if isinstance(tensor, View) and tensor.steps:
            out[...] = tensor.make(out)
        return
    cut = tensor.steps[-1]
    if not isinstance(cut, Cut) and len(out) == tensor.nbytes:
        out[...] = tensor.make(_region(tensor))
    else:
        begin = start + (cut.start if isinstance(cut, Cut) else 0)
        out[...] = _made(tensor)[begin : begin + len(out)]


def _made(view: View) -> Any:
    """All bytes of a view, before they are cut; the last four are kept: a few parts of one weight, read in turn."""
    steps = view.steps[:-1] if isinstance(view.steps[-1], Cut) else view.steps
    try:
        state = os.stat(view.file)
    except OSError as error:
        raise FormatError("cannot read the file", file=view.file, tensor=view.name, got=error.strerror) from None
    written = (state.st_ino, state.st_size, state.st_mtime_ns)
    key = (view.file, written, view.start, view.region, steps)
    kept: dict[Any, Any] = _LAST.__dict__.setdefault("made", {})
    if key not in kept:
        while len(kept) >= _KEPT:
            del kept[next(iter(kept))]
        kept[key] = replace(view, steps=steps).make(_region(view))
    return kept[key]


def _region(view: View) -> Any:
    """The bytes on disk that a view is made from."""
    raw = np.empty(view.region, np.uint8)
    _fill(view, view.start, raw)
    return raw


def _fill(
    tensor: Stored, position: int, out: Any, width: int = 0, ranges: Sequence[tuple[int, int]] | None = None
) -> None:
    """Read what lies together at a position, or in ranges of rows from there on, until ``out`` is full."""
    view = memoryview(out)
    fd = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ranges is None:
            _read_at(fd, tensor, position, view)
            return
        done = 0
        while done < len(view):
            for a, b in ranges:
                _read_at(fd, tensor, position + a, view[done : done + b - a])
                done += b - a
            position += width
    finally:
        os.close(fd)


def _read_at(fd: int, tensor: Stored, position: int, view: memoryview) -> None:
    while view:
        try:
            count = os.preadv(fd, [view], position)
        except OSError as error:
            raise FormatError(
                "cannot read the file", file=tensor.file, tensor=tensor.name, got=error.strerror
            ) from None
        if count == 0:
            raise FormatError("the file became shorter while it was read", file=tensor.file, tensor=tensor.name)
        view, position = view[count:], position + count


def read_tensor(tensor: Stored) -> Any:
    """The array of a tensor, in its dtype (bfloat16 and float8 are those of ml_dtypes).

    Raises:
        FormatError: the file has become shorter.
    """
    raw = np.empty(tensor.nbytes, np.uint8)
    read_into(tensor, 0, raw)
    return as_array(raw, tensor.dtype, tensor.shape)


def header_dtype(array: Any) -> str:
    """The header's name for the dtype of a NumPy array or a tensor.

    Raises:
        FormatError: one that safetensors files do not have.
    """
    name = str(array.dtype).removeprefix("torch.")
    if name not in _NAMED:
        raise FormatError("safetensors files have no such dtype", got=name)
    return _NAMED[name]
