"""``diff``: two checkpoints compared by value, whatever their dialects."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from halfbyte.checkpoint.reader import Checkpoint, open_checkpoint
from halfbyte.findings import Finding, Report, in_order
from halfbyte.modules import Module, fp8_scale, refuse_broken
from halfbyte.numerics import BLOCK, decode_e2m1, decode_e4m3
from halfbyte.stored import DTYPE_BITS, Stored, as_array
from halfbyte.tools.base import Meter, Progress, chosen, run, worker_count

_STEP = 1 << 19
"""Elements that are compared at once, a multiple of every block: 2 MB in float32 on each side."""

_WEIGHT = ("codes", "scales", "scale2", "data", "scale")
"""Roles that make up a weight's values."""
_SCALES = ("input_scale", "pre_scale", "k_scale", "v_scale")
"""Roles beside a weight that scale something else."""

_Key: TypeAlias = tuple[str, bool]


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare two checkpoints module by module: the same, the same values in other bytes, or different.

    Modules are paired by name and scales by what they mean, so that the dialects may differ. 0 equals -0 and
    NaN equals NaN. Of a finding ``got`` is a's, ``expected`` b's, and ``index`` is the first place: [row, block]
    where both weights have equal blocks, otherwise [row, column]. Configs are not compared.

    Args:
        a, b: directories, files, or hub names.
        include, exclude: patterns of modules; by default all.
        workers: threads; by default one for each core.
        progress: told of bytes of ``a`` compared.

    Returns:
        A report, not ok where there is a difference; its facts are "a" and "b", "dialects" of both, the
        numbers of modules that are "same", "same_values", "different", "only_a" and "only_b", "bytes" of
        ``a`` compared, and "seconds".

    Raises:
        HalfbyteError: a checkpoint that cannot be read, or tensors that do not form a weight.
    """
    started = time.perf_counter()
    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        (mine, idle), (theirs, idle_too) = (_by_key(c, include, exclude) for c in (first, second))
        pairs = [(module, theirs[key]) for key, module in mine.items() if key in theirs]
        lone = [[m for key, m in here.items() if key not in there] for here, there in ((mine, theirs), (theirs, mine))]
        found = [f for f in idle if f in idle_too]
        for checkpoint, modules in zip((first, second), lone, strict=True):
            found += [Finding("HB401", m.tensors[0].name, got=f"only in {checkpoint.path}") for m in modules]
        meter = Meter(sum(t.nbytes for module, _ in pairs for t in module.tensors), progress)
        outcomes: list[str] = []

        def compare(module: Module, twin: Module) -> None:
            told = list(_differences(_Side(first, module), _Side(second, twin), meter.add))
            found.extend(told)
            severities = {f.severity for f in told}
            outcomes.append("different" if "error" in severities else "same_values" if severities else "same")

        run([partial(compare, *pair) for pair in pairs], worker_count(workers), meter)
        order = {name: i for i, name in enumerate(dict.fromkeys([*first.tensors, *second.tensors]))}
        found.sort(key=lambda f: order.get(f.tensor or "", -1))
        facts: dict[str, Any] = {
            "a": str(first.path),
            "b": str(second.path),
            "dialects": [first.dialect_name, second.dialect_name],
            **{key: outcomes.count(key) for key in ("same", "same_values", "different")},
            "only_a": len(lone[0]),
            "only_b": len(lone[1]),
            "bytes": meter.done,
            "seconds": round(time.perf_counter() - started, 3),
        }
        return Report("diff", in_order(found), facts)


def _by_key(
    checkpoint: Checkpoint, include: Sequence[str], exclude: Sequence[str]
) -> tuple[dict[_Key, Module], list[Finding]]:
    """The chosen modules, by name; a tensor by itself may have the name of a module."""
    checkpoint.require_readable()
    modules, idle = chosen(checkpoint.modules, include, exclude)
    return {(m.name, m.kind == "none"): m for m in modules}, idle


@dataclass(frozen=True)
class _Side:
    """One of the two modules of a pair, and where it lies."""

    checkpoint: Checkpoint
    module: Module

    def meaning(self, role: str) -> Any:
        """The multiplier that a scale stands for, f32, flat."""
        read, original = self.checkpoint.read, self.checkpoint.original
        value = read(self.module.roles[role])
        return self.checkpoint.dialect.meaning(self.module, role, value, original).reshape(-1)

    @property
    def beside(self) -> dict[str, Stored]:
        """The tensors that are not part of the weight, by role; unknown ones by name."""
        roles = {role: tensor for role, tensor in self.module.roles.items() if role not in _WEIGHT}
        return roles | {tensor.name: tensor for tensor in self.module.unknown}


def _differences(a: _Side, b: _Side, tell: Callable[[int], None]) -> Iterator[Finding]:
    """The findings about a pair; ``tell`` gets the bytes of ``a`` compared."""
    main, other = a.module.main, b.module.main
    if main is not None and other is not None:
        if a.module.kind != b.module.kind:
            yield Finding("HB406", main.name, got=a.module.kind, expected=b.module.kind)
        last = a.module.name.rpartition(".")[2]
        code = "HB405" if a.module.kind == "none" and last in _SCALES else "HB402"
        yield from _compared(_Values.of(a), _Values.of(b), code, tell)
    tell(sum(a.module.roles[role].nbytes for role in ("scale2", "scale") if role in a.module.roles))
    mine, theirs = a.beside, b.beside
    for role in [*mine, *(role for role in theirs if role not in mine)]:
        if role not in mine or role not in theirs:
            here, there = (a, b) if role in mine else (b, a)
            # A dense weight has no place for an input scale: HB406 says so already.
            if not (role == "input_scale" and there.module.kind == "dense"):
                yield Finding("HB407", (mine | theirs)[role].name, got=f"only in {here.checkpoint.path}")
            tell(mine[role].nbytes if role in mine else 0)
        elif role == "input_scale":
            yield from _input_scales(a, b)
            tell(mine[role].nbytes)
        else:
            values = _Values.plain(a.checkpoint, mine[role]), _Values.plain(b.checkpoint, theirs[role])
            yield from _compared(*values, "HB405" if role in _SCALES else "HB402", tell)


def _input_scales(a: _Side, b: _Side) -> Iterator[Finding]:
    x, y = a.meaning("input_scale"), b.meaning("input_scale")
    name = a.module.roles["input_scale"].name
    if x.tobytes() == y.tobytes():
        return
    if x.shape != y.shape:
        yield Finding("HB404", name, got=list(x.shape), expected=list(y.shape))
    elif (place := _first(_unequal(x, y))) is not None:
        tally = _Tally()
        tally.add(x, y, _unequal(x, y), 0, 1)
        yield Finding("HB405", name, got=_told(x[place]), expected=_told(y[place]), hint=f"by {tally.gaps}")
    else:
        yield Finding("HB403", name)


@dataclass(frozen=True)
class _Values:
    """The values of a weight or a tensor, by ranges of its flattened elements.

    Attributes:
        checkpoint: where it lies.
        main: the tensor that findings name.
        shape: logical.
        parts: the tensors that hold its bytes.
        decode: the values from (bytes of each part, first element).
        reads: what decode depends on beside the bytes: equal bytes have equal values where this is equal.
        block: elements that share a scale, or 1.
    """

    checkpoint: Checkpoint
    main: Stored
    shape: tuple[int, ...]
    parts: tuple[Stored, ...]
    decode: Callable[[list[Any], int], Any]
    reads: tuple[Any, ...]
    block: int = 1

    @classmethod
    def of(cls, side: _Side) -> _Values:
        """The weight of a module.

        Raises:
            FormatError: tensors that do not form one.
        """
        module, checkpoint = side.module, side.checkpoint
        refuse_broken(module)
        main, shape = module.roles.get("codes") or module.roles["data"], module.shape
        if module.kind == "nvfp4":
            scale2 = side.meaning("scale2")
            parts = (main, module.roles["scales"])
            return cls(checkpoint, main, shape, parts, partial(_nvfp4, scale2), ("nvfp4", scale2.tobytes()), BLOCK)
        if module.kind == "fp8":
            scale, block = fp8_scale(module, side.meaning("scale"))
            reads = ("fp8", block, scale.tobytes())
            return cls(checkpoint, main, shape, (main,), partial(_fp8, shape[1], scale, block), reads)
        return cls.plain(checkpoint, main)

    @classmethod
    def plain(cls, checkpoint: Checkpoint, tensor: Stored) -> _Values:
        """A tensor that holds its values itself; below 8 bits they are compared as bytes."""
        dtype, shape = tensor.dtype, tensor.shape
        if DTYPE_BITS[dtype] < 8:
            shape = (tensor.nbytes,)
        return cls(checkpoint, tensor, shape, (tensor,), partial(_plain, dtype), (dtype,))

    @property
    def size(self) -> int:
        """How many values there are."""
        return prod(self.shape)

    def raw(self, start: int, stop: int) -> list[Any]:
        """The bytes of each part for elements start..stop."""
        pieces = []
        for tensor in self.parts:
            begin, end = (at * tensor.nbytes // self.size for at in (start, stop))
            pieces.append(np.empty(end - begin, np.uint8))
            self.checkpoint.read_into(tensor, begin, pieces[-1])
        return pieces


def _nvfp4(scale2: Any, pieces: list[Any], start: int) -> Any:
    values = decode_e2m1(pieces[0])
    values.reshape(-1, BLOCK)[...] *= decode_e4m3(pieces[1])[:, None]
    return values * scale2


def _fp8(k: int, scale: Any, block: tuple[int, int] | None, pieces: list[Any], start: int) -> Any:
    values = decode_e4m3(pieces[0])
    if scale.size == 1:
        return values * scale
    row, column = np.divmod(np.arange(start, start + values.size), k)
    if block is not None:
        row = row // block[0] * -(-k // block[1]) + column // block[1]
    return values * scale.reshape(-1)[row]


def _plain(dtype: str, pieces: list[Any], start: int) -> Any:
    if DTYPE_BITS[dtype] < 8:
        return pieces[0]
    values = as_array(pieces[0], dtype, (pieces[0].nbytes * 8 // DTYPE_BITS[dtype],))
    return values if values.dtype.kind in "biufc" and values.itemsize >= 4 else values.astype(np.float32)


def _compared(a: _Values, b: _Values, code: str, tell: Callable[[int], None]) -> Iterator[Finding]:
    """The finding about two sets of values: ``code`` where they differ, or none; in one pass and bounded memory."""
    total = sum(tensor.nbytes for tensor in a.parts)
    if a.shape != b.shape and not a.size == b.size == 1:
        yield Finding("HB404", a.main.name, got=list(a.shape), expected=list(b.shape))
        tell(total)
        return
    alike, tally, first = a.reads == b.reads, _Tally(), None
    same_bytes = a.reads[0] == b.reads[0]
    for start in range(0, a.size, _STEP):
        stop = min(start + _STEP, a.size)
        mine, theirs = a.raw(start, stop), b.raw(start, stop)
        equal = len(mine) == len(theirs) and all(map(np.array_equal, mine, theirs))
        same_bytes &= equal
        if not (alike and equal):
            with np.errstate(all="ignore"):
                x, y = a.decode(mine, start), b.decode(theirs, start)
            unequal = _unequal(x, y)
            place = _first(unequal)
            if place is not None:
                tally.add(x, y, unequal, start, a.shape[-1] if len(a.shape) > 1 else a.size)
                first = first or (start + place, _told(x[place]), _told(y[place]))
        tell(sum(piece.nbytes for piece in mine))
    if first is not None:
        index = [int(i) for i in np.unravel_index(first[0], a.shape)]
        if a.block == b.block and index:
            index[-1] //= a.block
        why = "; only the scale of the whole differs" if same_bytes else ""
        yield Finding(code, a.main.name, index or None, got=first[1], expected=first[2], hint=tally.text(a) + why)
    elif not (alike and same_bytes):
        dtypes = (str(a.main), str(b.main)) if a.main.dtype != b.main.dtype else (None, None)
        hint = "zero blocks, -0, or scales with the same product" if a.block == b.block > 1 else None
        yield Finding("HB403", a.main.name, got=dtypes[0], expected=dtypes[1], hint=hint)


class _Tally:
    """How many values differ, in how many rows, and how far."""

    def __init__(self) -> None:
        self.count, self.rows, self._row = 0, 0, -1
        self._gap = self._relative = 0.0

    def add(self, x: Any, y: Any, unequal: Any, start: int, k: int) -> None:
        """Count the ``unequal`` values of a piece that begins at element ``start`` of rows of ``k``."""
        places = np.flatnonzero(unequal)
        rows = np.unique((places + start) // k)
        self.count += len(places)
        self.rows += len(rows) - int(rows[0] == self._row)
        self._row = int(rows[-1])
        wide = np.complex128 if "c" in x.dtype.kind + y.dtype.kind else np.float64
        with np.errstate(all="ignore"):
            p, q = x[unequal].astype(wide), y[unequal].astype(wide)
            gap = np.abs(p - q)
            relative = gap / np.maximum(np.abs(p), np.abs(q))
        # NaN against a number is as far as can be.
        self._gap = max(self._gap, float(np.where(np.isnan(gap), np.inf, gap).max()))
        self._relative = max(self._relative, float(np.where(np.isnan(relative), np.inf, relative).max()))

    @property
    def gaps(self) -> str:
        """The largest difference, and the largest in relation to its values."""
        return f"{self._gap:.3g} (relative {self._relative:.3g})"

    def text(self, values: _Values) -> str:
        """A sentence."""
        rows = f" in {self.rows} of {values.size // values.shape[-1]} rows" if len(values.shape) > 1 else ""
        return f"{self.count} of {values.size} elements{rows} differ, by at most {self.gaps}"


def _unequal(x: Any, y: Any) -> Any:
    unequal = x != y
    return unequal & ~(np.isnan(x) & np.isnan(y)) if unequal.any() else unequal


def _first(mask: Any) -> int | None:
    """Where the first True is, or None."""
    place = int(mask.argmax()) if mask.size else 0
    return place if mask.size and mask[place] else None


def _told(value: Any) -> Any:
    """A NumPy number as JSON knows it."""
    return str(value) if value.dtype.kind == "c" else value.item()
