"""How the tensors to write are made: copied, computed by tasks, or numbers that are known beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.writer import Shard, write_pieces
from halfbyte.dialects import Output, Piece
from halfbyte.errors import FormatError
from halfbyte.numerics import reciprocal
from halfbyte.stored import Stored, View, byte_count, read_tensor
from halfbyte.tasks import Task

_PIECE = 4 << 20
"""Bytes that a task makes where each is made of the one in its place."""


@dataclass(frozen=True)
class Made:
    """Outputs of a checkpoint, ready to be written shard by shard.

    Attributes:
        outputs: with their final shapes.
        numbers: tensor name -> the f32 array to store.
        originals: tensor name -> the f32 array whose rounded reciprocals are stored, NaN where they lead back.
    """

    outputs: list[Output]
    numbers: Mapping[str, Any]
    originals: Mapping[str, Any]

    @classmethod
    def of(cls, checkpoint: Checkpoint, outputs: Iterable[Output]) -> Made:
        """Read the numbers.

        ModelOpt's x becomes RN(1/x), the number that compressed-tensors' own converter stores. For about one value
        in six 1/RN(1/x) is not x, and no neighbouring float would be either, so x is kept as provenance.

        Raises:
            FormatError: a number that has no reciprocal.
        """
        shaped, numbers, originals = [], {}, {}
        for output in outputs:
            made, number, kept = _numbers(checkpoint, output) if output.numbers else (output, None, None)
            shaped.append(made)
            if number is not None:
                numbers[made.stored.name] = number
            elif len(output.pieces) == 1:
                kept = checkpoint.original(output.sources[0])
            if kept is not None and not np.isnan(kept).all():
                originals[made.stored.name] = kept
        return cls(shaped, numbers, originals)

    @property
    def task_bytes(self) -> int:
        """Memory that one task needs at most."""
        made = (p for o in self.outputs for piece in o.pieces if _is_made(piece) for p in _cut(piece))
        return max(map(_made_bytes, made), default=0)

    def copies(self, members: Iterable[Output]) -> list[tuple[str, int, Stored]]:
        """(name here, first byte there, source) of what is copied."""
        pieces = ((o, piece) for o in members if not o.numbers for piece in o.pieces)
        return [(o.stored.name, piece.start, piece.sources[0]) for o, piece in pieces if not _is_made(piece)]

    def tasks(self, members: Iterable[Output], shard: Shard) -> list[Task]:
        """The tasks that write what is not copied."""
        known = [o for o in members if o.numbers]
        pieces = [(shard.piece(o.stored.name), self.numbers[o.stored.name]) for o in known]
        tasks = [Task(partial(write_pieces, pieces), source_bytes(known))] if pieces else []
        for output in members:
            ends = [piece.start for piece in output.pieces[1:]] + [byte_count(output.stored.dtype, output.stored.shape)]
            for whole, end in zip(output.pieces, ends, strict=True):
                for piece in _cut(whole) if not output.numbers and _is_made(whole) else ():
                    nbytes = end - whole.start if piece is whole else piece.sources[0].nbytes
                    target = shard.piece(output.stored.name, piece.start, nbytes)
                    tasks.append(Task(partial(_make, piece, target), sum(t.nbytes for t in piece.sources)))
        return tasks


def source_bytes(outputs: Iterable[Output]) -> int:
    """Bytes of all that outputs are made from."""
    return sum(tensor.nbytes for output in outputs for tensor in output.sources)


def _is_made(piece: Piece) -> bool:
    """Whether bytes have to be made, and not copied."""
    return piece.join is not None or any(isinstance(t, View) and t.steps for t in piece.sources)


def _cut(piece: Piece) -> list[Piece]:
    """A piece that has to be made, in ranges that are made by themselves where they can."""
    source = piece.sources[0]
    if piece.join is not None or not isinstance(source, View) or not source.in_place or source.nbytes <= _PIECE:
        return [piece]
    found = []
    for a in range(0, source.nbytes, _PIECE):
        count = min(_PIECE, source.nbytes - a)
        part = replace(source, dtype="U8", shape=(count,), start=source.start + a, nbytes=count, region=count)
        found.append(Piece(piece.start + a, (part,)))
    return found


def _made_bytes(piece: Piece) -> int:
    """Memory for making them: the sources' regions, what their steps make, and the result."""
    views = [t for t in piece.sources if isinstance(t, View)]
    copies = max(getattr(step, "copies", 3) for step in (piece.join, *(s for t in views for s in t.steps)))
    return sum((t.region if isinstance(t, View) else t.nbytes) + copies * t.nbytes for t in piece.sources)


def _make(piece: Piece, target: Stored) -> None:
    """The task that makes some bytes of a tensor and writes them."""
    arrays = [read_tensor(source) for source in piece.sources]
    write_pieces([(target, arrays[0] if piece.join is None else piece.join(arrays))])


def _numbers(checkpoint: Checkpoint, output: Output) -> tuple[Output, Any, Any]:
    """The output with its final shape, the numbers, and those whose reciprocals do not lead back to them."""
    value = np.concatenate([read_tensor(t).astype(np.float32).reshape(-1) for t in output.sources])
    known = np.concatenate([_original(checkpoint, t) for t in output.sources])
    if len(output.pieces) > 1 and output.stored.shape[1:] == (2,) and _in_pairs(value) and _in_pairs(known):
        # Gate and up of every expert have one number, which is stored once.
        value, known = value[::2], known[::2]
        output = replace(output, stored=replace(output.stored, shape=output.stored.shape[:1]))
    if output.invert:
        stored, kept = _inverted(output, value, known)
    else:
        stored, kept = value, np.where(reciprocal(value) == known, np.float32(np.nan), known)
    return output, stored.reshape(output.stored.shape), kept.reshape(output.stored.shape)


def _original(checkpoint: Checkpoint, tensor: Stored) -> Any:
    """The numbers whose reciprocals a tensor stores, NaN where they are not known, flat."""
    kept = checkpoint.original(tensor)
    return np.full(prod(tensor.shape), np.nan, np.float32) if kept is None else kept.reshape(-1)


def _in_pairs(x: Any) -> bool:
    return bool(np.array_equal(x[::2], x[1::2], equal_nan=True))


def _inverted(output: Output, value: Any, known: Any) -> tuple[Any, Any]:
    """What is stored for numbers that are inverted, and the numbers themselves where their reciprocals lose them."""
    stored = np.where(np.isnan(known), reciprocal(value), known)
    bad = ~(np.isfinite(stored) & (stored > 0))
    if bad.any():
        source = output.sources[int(bad.argmax()) if len(output.sources) == stored.size else 0]
        raise FormatError(
            "a scale has no reciprocal in float32",
            file=source.file,
            tensor=source.name,
            got=float(value[bad][0]),
            hint="see halfbyte verify",
        )
    return stored, np.where(reciprocal(stored) == value, np.float32(np.nan), value)
