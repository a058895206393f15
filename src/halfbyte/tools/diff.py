"""``diff``: two checkpoints compared by value, whatever their dialects."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from halfbyte.checkpoint.reader import Checkpoint, open_checkpoint
from halfbyte.experts import expand, numbered, ordered, spelled
from halfbyte.findings import Finding, Report, in_order
from halfbyte.modules import Module, Reading, fp8_scale, refuse_broken
from halfbyte.numerics import BLOCK, MX_BLOCK, decode_e2m1, decode_e4m3, decode_e8m0
from halfbyte.patterns import Patterns, fused_group
from halfbyte.stored import DTYPE_BITS, Stored, View, as_array
from halfbyte.tools.base import Meter, Progress, idle, run, worker_count

_STEP = 1 << 19
"""Elements that are compared at once, a multiple of every block: 2 MB in float32 on each side."""

_WEIGHT = ("codes", "scales", "scale2", "data", "scale")
"""Roles that make up a weight's values."""
_SCALES = ("input_scale", "pre_scale", "k_scale", "v_scale")
"""Roles beside a weight that scale something else."""

_Key: TypeAlias = tuple[str, bool, int]
_Choice: TypeAlias = tuple[Module, set[str] | None]
"""A module, and the names of its chosen layers; None for all."""


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    reading: Reading | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare two checkpoints module by module: the same, the same values in other bytes, or different.

    Modules are paired by name and scales by what they mean, so that the dialects may differ. Stacks of experts are
    compared expert by expert, however either side stores them. 0 equals -0 and NaN equals NaN. Of a finding ``got``
    is a's, ``expected`` b's, and ``index`` is the first place in a's tensor: [row, block] where both weights have
    equal blocks, otherwise [row, column], with the expert first in a stack. Configs are not compared.

    Args:
        a, b: directories, files, or hub names.
        reading: how the NVFP4 weights of ``a`` are stored, where that is not what their dialect says.
        include, exclude: patterns of modules; by default all.
        workers: threads; by default one for each core.
        progress: told of bytes of ``a`` compared.

    Returns:
        A report, not ok where there is a difference; its facts are "a" and "b", "dialects" of both, "reading" (the
        options of one that is not what the dialect of ``a`` says), the numbers of modules that are "same",
        "same_values", "different", "only_a" and "only_b", "bytes" of ``a`` compared, and "seconds".

    Raises:
        HalfbyteError: a checkpoint that cannot be read, or tensors that do not form a weight.
    """
    started = time.perf_counter()
    with open_checkpoint(a, reading) as first, open_checkpoint(b) as second:
        (ours, unused), (others, unused_too) = (_chosen(c, include, exclude) for c in (first, second))
        found = [f for f in unused if f in unused_too] + _agree(ours, others)
        mine, theirs = (_by_key(modules) for modules in (ours, others))
        pairs = [(module, theirs[key]) for key, module in mine.items() if key in theirs]
        lone = [[m for key, m in here.items() if key not in there] for here, there in ((mine, theirs), (theirs, mine))]
        for checkpoint, modules in zip((first, second), lone, strict=True):
            found += _alone(checkpoint, modules)
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
            "reading": first.read_with,
            **{key: outcomes.count(key) for key in ("same", "same_values", "different")},
            "only_a": len(lone[0]),
            "only_b": len(lone[1]),
            "bytes": meter.done,
            "seconds": round(time.perf_counter() - started, 3),
        }
        return Report("diff", in_order(found), facts)


def _chosen(
    checkpoint: Checkpoint, include: Sequence[str], exclude: Sequence[str]
) -> tuple[list[_Choice], list[Finding]]:
    """The modules of which something is chosen, and findings for idle patterns."""
    checkpoint.require_readable()
    wanted, unwanted = Patterns(include), Patterns(exclude)
    if not wanted and not unwanted:
        return [(module, None) for module in checkpoint.modules], []
    found: list[_Choice] = []
    for module in checkpoint.modules:
        yes, no = not wanted or wanted.first(module.name), unwanted.first(module.name)
        names = {module.name}
        if module.stack is not None and not no:
            refuse_broken(module)
            names = {part.name for m in (module, ordered(module, None)) for part in expand(m)}
            names = {n for n in names if (yes or wanted.first(n)) and not unwanted.first(n)}
        elif no or not yes:
            continue
        if names and not no:
            found.append((module, names))
    return found, idle(wanted, unwanted)


def _agree(ours: list[_Choice], others: list[_Choice]) -> list[Finding]:
    """Give stacks whose order of gate and up is not known the order of their counterparts, in place.

    So they are compared as they lie. Where the counterpart is gate and up of numbered experts, all of them are taken
    out, with a finding.
    """
    found: list[Finding] = []
    for here, there in ((ours, others), (others, ours)):
        stacks, apart = {}, defaultdict(list)
        for choice in there:
            name = spelled(choice[0].name)
            if choice[0].stack is not None:
                stacks[name] = choice[0].stack
            elif (expert := numbered(name)) is not None and fused_group(name):
                apart[f"{expert[0]}.gate_up_proj"].append(choice)
        for i, (module, names) in reversed(list(enumerate(here))):
            name, main = spelled(module.name), module.main
            if main is None or module.stack is None or module.stack.gate_up or not name.endswith("gate_up_proj"):
                continue
            if name in stacks:
                here[i] = (ordered(module, stacks[name].gate_up or "concatenated"), names)
                found.append(Finding("HB138", main.name, hint="both are compared as they lie"))
            elif name in apart:
                hint = "state it in the metadata halfbyte.experts, or by model_type in config.json; not compared"
                found.append(Finding("HB408", main.name, hint=hint))
                del here[i]
                there[:] = [choice for choice in there if not any(choice is other for other in apart[name])]
    return found


def _by_key(choices: list[_Choice]) -> dict[_Key, Module]:
    """The layers by name; a tensor by itself may have the name of a module, and a layer be stored twice."""
    found: dict[_Key, Module] = {}
    for module, names in choices:
        if module.stack is not None:
            refuse_broken(module)
        for part in expand(module):
            if names is None or part.name in names:
                key = (spelled(part.name), part.kind == "none", 0)
                while key in found:
                    key = (*key[:2], key[2] + 1)
                found[key] = part
    return found


def _alone(checkpoint: Checkpoint, modules: list[Module]) -> Iterator[Finding]:
    """A finding for each module without counterpart; one for all experts of a stack where none has one."""
    places: dict[str, dict[tuple[int, ...], None]] = defaultdict(dict)
    for module in modules:
        places[module.tensors[0].name].setdefault(tuple(module.tensors[0].place([])))
    for name, experts in places.items():
        whole = () in experts or len(experts) == checkpoint.tensors[name].shape[0]
        for index in [None] if whole else [list(expert) for expert in experts]:
            yield Finding("HB401", name, index, got=f"only in {checkpoint.path}")


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
        weight = ("data",) if self.module.kind == "unread" else _WEIGHT
        roles = {role: tensor for role, tensor in self.module.roles.items() if role not in weight}
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
    mine, theirs = a.beside, b.beside
    tell(sum(t.nbytes for role, t in a.module.roles.items() if role in ("scale2", "scale") and role not in mine))
    for role in [*mine, *(role for role in theirs if role not in mine)]:
        if role not in mine or role not in theirs:
            here, there = (a, b) if role in mine else (b, a)
            # A dense weight has no place for an input scale: HB406 says so already.
            if not (role == "input_scale" and there.module.kind == "dense"):
                tensor, got = (mine | theirs)[role], f"only in {here.checkpoint.path}"
                yield Finding("HB407", tensor.name, tensor.place([]) or None, got=got)
            tell(mine[role].nbytes if role in mine else 0)
        elif role == "input_scale":
            yield from _input_scales(a, b)
            tell(mine[role].nbytes)
        else:
            values = _Values.plain(a.checkpoint, mine[role]), _Values.plain(b.checkpoint, theirs[role])
            yield from _compared(*values, "HB405" if role in _SCALES else "HB402", tell)


def _input_scales(a: _Side, b: _Side) -> Iterator[Finding]:
    x, y = a.meaning("input_scale"), b.meaning("input_scale")
    stored = a.module.roles["input_scale"]
    name, index = stored.name, stored.place([]) or None
    if x.tobytes() == y.tobytes():
        return
    if x.shape != y.shape:
        yield Finding("HB404", name, index, got=list(x.shape), expected=list(y.shape))
    elif (place := _first(_unequal(x, y))) is not None:
        tally = _Tally()
        tally.add(x, y, _unequal(x, y), 0, 1)
        yield Finding("HB405", name, index, got=_told(x[place]), expected=_told(y[place]), hint=f"by {tally.gaps}")
    else:
        yield Finding("HB403", name, index)


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
    _made: dict[int, Any] = field(default_factory=dict, compare=False)
    """Number of a part that is not stored as it is meant -> its bytes: those of one expert's layer."""

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
        if module.kind == "mxfp4":
            return cls(checkpoint, main, shape, (main, module.roles["scales"]), _mxfp4, ("mxfp4",), MX_BLOCK)
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
        for i, tensor in enumerate(self.parts):
            begin, end = (at * tensor.nbytes // self.size for at in (start, stop))
            if isinstance(tensor, View) and not tensor.in_place:
                if i not in self._made:
                    self._made[i] = np.empty(tensor.nbytes, np.uint8)
                    self.checkpoint.read_into(tensor, 0, self._made[i])
                pieces.append(self._made[i][begin:end])
            else:
                pieces.append(np.empty(end - begin, np.uint8))
                self.checkpoint.read_into(tensor, begin, pieces[-1])
        return pieces


def _nvfp4(scale2: Any, pieces: list[Any], start: int) -> Any:
    values = decode_e2m1(pieces[0])
    values.reshape(-1, BLOCK)[...] *= decode_e4m3(pieces[1])[:, None]
    return values * scale2


def _mxfp4(pieces: list[Any], start: int) -> Any:
    values = decode_e2m1(pieces[0])
    values.reshape(-1, MX_BLOCK)[...] *= decode_e8m0(pieces[1])[:, None]
    return values


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
        at = a.main.place([]) or None
        yield Finding("HB404", a.main.name, at, got=list(a.shape), expected=list(b.shape))
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
        index = a.main.place(index)
        why = "; only the scale of the whole differs" if same_bytes else ""
        yield Finding(code, a.main.name, index or None, got=first[1], expected=first[2], hint=tally.text(a) + why)
    elif not (alike and same_bytes):
        dtypes = (str(a.main), str(b.main)) if a.main.dtype != b.main.dtype else (None, None)
        hint = "zero blocks, -0, or scales with the same product" if a.block == b.block > 1 else None
        yield Finding("HB403", a.main.name, a.main.place([]) or None, got=dtypes[0], expected=dtypes[1], hint=hint)


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
