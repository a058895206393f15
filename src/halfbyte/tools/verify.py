"""``verify``: prove a checkpoint sound, or name the tensor, row and block that is not."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil, prod
from typing import Any

import numpy as np

from halfbyte.checkpoint.consistency import fused_parts, header_findings
from halfbyte.checkpoint.reader import Checkpoint, open_checkpoint
from halfbyte.errors import UsageError
from halfbyte.experts import GATE_UP, numbered
from halfbyte.findings import CAP, Finding, Report, capped, in_order
from halfbyte.modules import Module, Reading
from halfbyte.numerics import BLOCK, MX_BLOCK
from halfbyte.patterns import fused_group
from halfbyte.reading import reduced
from halfbyte.stored import FLOATS, Stored
from halfbyte.suspicion import TILE, readable, suspect, tiles
from halfbyte.tools.base import CHUNK, Meter, Progress, chosen, run, worker_count
from halfbyte.twins import Twins

_EXPONENT: dict[str, tuple[Any, int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}
"""Float dtype -> the unsigned type of its bits, and the exponent of Inf and NaN."""

_MASK = 1 << 30
"""Bytes of block scales up to which zero ones are compared with their codes: a file of holes may state any size."""

_SCALARS = ("scale2", "input_scale", "scale", "k_scale", "v_scale")
"""Roles that are read whole, also in a sample."""


def verify(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    reading: Reading | None = None,
    every: bool = False,
    sample: float | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check the headers, the configs and every byte of a checkpoint.

    Args:
        path: a directory, a file, or a hub name.
        against: the dense checkpoint that it was quantized from: the error of every NVFP4 and FP8 weight is measured,
            whole, and where it is more than the format needs, the reading of the bytes that explains it is looked for.
        reading: how the NVFP4 weights are stored, where that is not what their dialect says. All checks are of what
            is read so; the names of tensors stay those on disk, and indices are logical.
        every: report every offending block; otherwise 100 for each tensor and code, then their number.
        sample: the share of rows, above 0 and up to 1, that is read of each matrix; by default all. Scales of whole
            tensors and vectors are read in any case.
        include, exclude: patterns of modules whose values are read; by default all.
        workers: threads; by default one for each core.
        progress: told of bytes read.

    Returns:
        A report; its facts are "path", "dialect", "reading" (the options of one that is not what the dialect says),
        "modules" (kind -> number), "selected" (how many of them were
        read), "bytes", "share" (of all bytes, that was read), "sample" and "seconds". With ``against`` also
        "against", a list of {"name", "relative", "sqnr" (dB), "worst" [row, block], "worst_relative", "reading" (what
        explains the error, or None), "repair" (the command that does away with it, or None)}, and "against_overall",
        {"path", "modules", "relative", "sqnr", "repair" (the command, where one reading is right for all NVFP4 weights
        that were measured), "advice" (what to do otherwise, or None)}.

    Raises:
        UsageError: a sample that is no share or goes with ``against``, or a reading that is not known.
        HalfbyteError: a checkpoint that cannot be read at all, or not as ``reading`` says.
    """
    if sample is not None and not 0 < sample <= 1:
        raise UsageError("no share of the rows", got=sample, expected="above 0 and up to 1")
    if sample is not None and against is not None:
        raise UsageError("a sample cannot be measured", hint="a dense checkpoint is compared in every value")
    started = time.perf_counter()
    with open_checkpoint(path, reading) as checkpoint:
        checkpoint.require_readable()
        scan = _Scan(checkpoint, None if every else CAP, sample)
        scan.found += header_findings(checkpoint, every)
        modules, idle = chosen(checkpoint.modules, include, exclude)
        if not modules and (include or exclude):
            raise UsageError(
                "no module is left to verify", got=", ".join([*include, *exclude]), hint="see halfbyte inspect"
            )
        scan.found += idle
        scan.meter = Meter(sum(scan.planned(m) for m in modules), progress)
        run([partial(scan.read, module) for module in modules], worker_count(workers), scan.meter)
        scan.found += capped(scan.compare_fused(modules), every)
        scan.found += capped(scan.compare_input_scales(modules), every)
        order = {name: i for i, name in enumerate(checkpoint.tensors)}
        twins = Twins(checkpoint, modules, os.fspath(path))
        second = Meter(0, None)
        if against is not None:
            with open_checkpoint(against) as dense:
                twins.pair(dense)
                second = Meter(twins.nbytes, progress)
                run(twins.jobs(second.add), worker_count(workers), second)
                twins.settle()
            scan.found += capped(twins.findings(), every)
        scan.found.sort(key=lambda f: order.get(f.tensor or "", -1))
        kinds = [m.kind for m in checkpoint.modules if m.kind != "none"]
        facts: dict[str, Any] = {
            "path": str(checkpoint.path),
            "dialect": checkpoint.dialect_name,
            "reading": checkpoint.read_with,
            "modules": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "selected": sum(m.kind != "none" for m in modules),
            "bytes": scan.meter.done + second.done,
            "share": scan.meter.done / (sum(t.nbytes for m in checkpoint.modules for t in m.tensors) or 1),
            "sample": sample,
            "seconds": round(time.perf_counter() - started, 3),
        }
        facts |= twins.facts() if against is not None else {}
        return Report("verify", in_order(scan.found), facts)


class _Scan:
    """The pass over the values; its jobs run on several threads."""

    def __init__(self, checkpoint: Checkpoint, cap: int | None, sample: float | None = None) -> None:
        self.checkpoint, self.cap, self.sample = checkpoint, cap, sample
        self.found: list[Finding] = []
        self.scalars: dict[tuple[str, str], Any] = {}
        """(module, role) -> (experts or 1, halves or 1), the multipliers, where all of them are sound."""
        self.meter = Meter(0, None)
        self._local = threading.local()

    def compare_fused(self, modules: list[Module]) -> Iterator[Finding]:
        """Report parts with different scale2, and how wrong an engine gets that takes the largest."""
        for names, values, tensor, index in self._fused(modules, "scale2"):
            if len(set(values)) > 1 and min(values) > 0:
                factor = max(values) / min(values)
                got = f"{', '.join(names)}: {', '.join(f'{v:.6g}' for v in values)}"
                hint = f"an engine that takes the largest makes the smallest part {factor:.3g} times too large"
                yield Finding("HB110", tensor, index, got, "one value", hint)

    def compare_input_scales(self, modules: list[Module]) -> Iterator[Finding]:
        """Report parts of one input with different input scales, and experts of different inputs with one."""
        for names, values, tensor, index in self._fused(modules, "input_scale"):
            if len(set(values)) > 1:
                got = ", ".join(f"{name} {value:.6g}" for name, value in zip(names, values, strict=True))
                yield Finding("HB125", tensor, index, got=got, expected="one value")
        layers: dict[tuple[str, str], list[tuple[Stored, float]]] = defaultdict(list)
        for module in modules:
            # Parts that engines fuse read the layer's input, for which experts may agree.
            values = self.scalars.get((module.name, "input_scale"), ())
            parent, _, last = module.name.rpartition(".")
            if module.stack is not None and last not in GATE_UP:
                layers[parent, last] += [
                    (module.roles["input_scale"], v[0]) for v in values if len(values) > 1 == len(v)
                ]
            elif (found := numbered(module.name)) and len(values) and not fused_group(module.name):
                layers[found[0], found[2]].append((module.roles["input_scale"], float(values[0, 0])))
        for (_, part), experts in layers.items():
            same = {value for _, value in experts}
            if len(experts) > 1 and len(same) == 1:
                got = f"{part} {same.pop():.6g} in {len(experts)} experts"
                hint = "they were not calibrated, or one value was given to all"
                yield Finding("HB124", experts[0][0].name, got=got, hint=hint)

    def _fused(
        self, modules: list[Module], role: str
    ) -> Iterator[tuple[list[str], list[float], str, list[int] | None]]:
        """(parts, their scales, a tensor, the expert) of what engines join: layers, or gate and up of a stack."""
        for parts in fused_parts(modules).values():
            known = [m for m in parts if self.scalars.get((m.name, role), np.empty(0)).size == 1]
            if known:
                values = [float(self.scalars[m.name, role][0, 0]) for m in known]
                yield [m.name.rpartition(".")[2] for m in known], values, known[0].roles[role].name, None
        for module in modules:
            table = self.scalars.get((module.name, role))
            if module.stack is not None and table is not None and table.shape[1] == 2:
                names = list(GATE_UP.get(module.name.rpartition(".")[2], ("first", "second")))
                for expert, values in enumerate(table.tolist()):
                    yield names, values, module.roles[role].name, [expert]

    def planned(self, module: Module) -> int:
        """How many bytes ``read`` reads of a module."""
        count = sum(t.nbytes for role, t in module.roles.items() if role in _SCALARS and t.dtype in FLOATS)
        for role, tensor in module.roles.items():
            if not (role in _SCALARS and tensor.dtype in FLOATS):
                count += sum(stop - start for start, stop in self._spans(tensor, _together(module, role)))
        return count + sum(stop - start for t in module.unknown for start, stop in self._spans(t))

    def _spans(self, tensor: Stored, together: int = 1) -> Iterator[tuple[int, int]]:
        """The bytes (start, stop) to read of a tensor: all, or those of rows spread from the first to the last.

        Rows that belong ``together`` are read together.
        """
        rows = prod(tensor.shape[:-1]) // together
        count = rows if self.sample is None else max(ceil(rows * self.sample), 2)
        if len(tensor.shape) < 2 or count >= rows or tensor.nbytes % rows:
            yield 0, tensor.nbytes
            return
        width = tensor.nbytes // rows
        for i in range(count):
            row = i * (rows - 1) // (count - 1)
            yield row * width, (row + 1) * width

    def _of_sample(self, tensor: Stored, together: int = 1) -> str:
        """What a count is to be followed by where not all was counted."""
        rows, read = prod(tensor.shape[:-1]) // together, sum(1 for _ in self._spans(tensor, together))
        return "" if read == 1 else f" in {read} of {rows} rows"

    def read(self, module: Module) -> None:
        """Read all tensors of one module, or a sample of their rows."""
        coded = module.kind in ("nvfp4", "mxfp4")
        for role, tensor in module.roles.items():
            if role in _SCALARS and tensor.dtype in FLOATS:
                self._positive(module, role, tensor)
            elif tensor.dtype in _EXPONENT:
                self._finite(module, role, tensor)
            elif role == "data" and tensor.dtype == "F8_E4M3":
                self._fp8(module, tensor)
            elif not (coded and role in ("codes", "scales")):
                self._skim(tensor)
        for tensor in module.unknown:
            self._finite(module, "", tensor) if tensor.dtype in _EXPONENT else self._skim(tensor)
        if coded:
            self._blocks(module)

    def _chunks(self, tensor: Stored, together: int = 1) -> Any:
        """(start, bytes) pieces of a tensor, in one buffer for each thread; rows ``together`` are in one piece."""
        unit = max(together * tensor.shape[-1], 1) if together > 1 else 1
        step = max(CHUNK // unit, 1) * unit
        if getattr(self._local, "buffer", np.empty(0)).nbytes < step:
            self._local.buffer = np.empty(max(step, CHUNK), np.uint8)
        for first, stop in self._spans(tensor, together):
            for start in range(first, stop, step):
                piece = self._local.buffer[: min(step, stop - start)]
                self.checkpoint.read_into(tensor, start, piece)
                self.meter.add(piece.nbytes)
                yield start, piece

    def _skim(self, tensor: Stored) -> None:
        for _ in self._chunks(tensor):
            pass

    def _positive(self, module: Module, role: str, tensor: Stored) -> None:
        with np.errstate(all="ignore"):
            values = self.checkpoint.read(tensor).astype(np.float64)
        self.meter.add(tensor.nbytes)
        if self.checkpoint.dialect.divides and module.kind == "nvfp4" and role in ("scale2", "input_scale"):
            with np.errstate(all="ignore"):
                multiplier = (1 / values).astype(np.float32)  # what a reader multiplies by
        else:
            multiplier = values
        experts = module.shape[0] if module.stack is not None else 1
        if values.size in (experts, 2 * experts) and values.size > 1:  # however many axes of 1 there are
            shape = (experts,) if values.size == experts else (experts, 2)
            values, multiplier = values.reshape(shape), multiplier.reshape(shape)
        bad = ~(np.isfinite(values) & (values > 0) & np.isfinite(multiplier) & (multiplier > 0))
        if role == "scale":
            bad &= values != 0
        told = []
        if bad.any():
            code = "HB106" if role in ("scale2", "scale") else "HB123" if role in ("k_scale", "v_scale") else "HB113"
            for place in np.argwhere(bad)[: None if module.stack is not None else 1]:
                index = [int(i) for i in place] if values.size > 1 else None
                got = float(values[tuple(place)])
                told.append(Finding(code, tensor.name, index, got=got, expected="positive and finite"))
        if role == "scale2" and (module.stack is not None or values.size == 1):
            pair = ("divisor", "multiplier") if self.checkpoint.dialect.divides else ("multiplier", "reciprocal")
            for place in np.argwhere(~bad & (multiplier > 1)):
                value = float(multiplier[tuple(place)])
                hint = f"a {pair[1]} may be stored where a {pair[0]} is meant" if value > 16 else None
                index = [int(i) for i in place] if values.size > 1 else None
                told.append(Finding("HB108", tensor.name, index, f"{value:.6g}", "below 1", hint))
        self.found += capped(told, self.cap is None)
        if role in ("scale2", "input_scale") and not bad.any() and values.size in (1, experts, 2 * experts):
            self.scalars[module.name, role] = multiplier.reshape(-1, 2 if values.size == 2 * experts else 1)

    def _finite(self, module: Module, role: str, tensor: Stored) -> None:
        bits, exponent = _EXPONENT[tensor.dtype]
        bad: list[int] = []
        count = 0
        for start, piece in self._chunks(tensor):
            words = piece.view(bits)
            magnitude = words & (exponent | (exponent & -exponent) - 1)
            if magnitude.max(initial=0) >= exponent:
                where = np.flatnonzero(magnitude >= exponent)
                count += len(where)
                bad += (where[: CAP - len(bad)] + start // words.itemsize).tolist()
        if count:
            index = _place(module, role, tensor, bad[0])
            self.found.append(
                Finding("HB118", tensor.name, index or None, got=f"{count} values{self._of_sample(tensor)}")
            )

    def _fp8(self, module: Module, tensor: Stored) -> None:
        for start, piece in self._chunks(tensor):
            nan = (piece & 127) == 127
            if nan.any():
                index = _place(module, "data", tensor, start + int(nan.argmax()))
                self.found.append(Finding("HB119", tensor.name, index))
                return

    def _blocks(self, module: Module) -> None:
        codes, scales = module.roles.get("codes"), module.roles.get("scales")
        if codes is None:
            return
        zero: Any = None
        if scales is not None and scales.dtype in ("F8_E4M3", "U8") and module.kind == "nvfp4":
            zero = self._scales(module, scales)
            self._order(module, scales)
        elif scales is not None and scales.dtype in ("F8_E8M0", "U8"):
            self._mx_scales(module, scales)
        elif scales is not None:
            self._skim(scales)
        if scales is None or scales.nbytes * 8 != codes.nbytes:
            zero = None
        together, empty = _together(module, "codes"), 0
        experts = _Filled(module.shape[0] if module.stack is not None else 1, codes.nbytes)
        for start, piece in self._chunks(codes, together):
            if zero is not None and piece.nbytes % (8 * (codes.shape[-1] if together > 1 else 1)) == 0:
                used = _used(piece, codes.shape[-1] if together > 1 else 1)
                empty += int(np.count_nonzero(used & zero[start // 8 : (start + piece.nbytes) // 8]))
            experts.look(start, piece)
        sample = self._of_sample(codes, together)
        if empty:
            got = f"{empty} blocks{sample}"
            self.found.append(Finding("HB115", codes.name, got=got, hint="they decode to zero"))
        holes = experts.empty
        if codes.nbytes and len(holes) == experts.read:
            hint = "a zero weight, or a file with a hole"
            self.found.append(Finding("HB116", codes.name, got=sample.strip() or None, hint=hint))
        else:
            hint = "one expert was not written, or was pruned"
            told = [Finding("HB116", codes.name, [e], f"expert {e}{sample}", hint=hint) for e in holes]
            self.found += capped(told, self.cap is None)

    def _scales(self, module: Module, tensor: Stored) -> Any:
        """Report bad block scales; returns the mask of zero ones, or None where there is none."""
        zero, subnormal, read = None, 0, 0
        small, skipped = max(tensor.nbytes, 8 * max(tensor.shape, default=0)) <= _MASK, False
        bad = {code: _Places(self.cap) for code in ("HB103", "HB104")}
        for start, piece in self._chunks(tensor):
            if not piece.size:
                continue
            read += piece.nbytes
            top, low = piece.max(), piece.min()
            if top >= 127:
                nan = (piece & 127) == 127
                bad["HB103"].add(start, piece, nan)
                bad["HB104"].add(start, piece, (piece >= 128) & ~nan)
            if low < 8:
                subnormal += int(np.count_nonzero((piece > 0) & (piece < 8)))
            skipped |= low == 0 and not small
            if low == 0 and small:
                zero = np.zeros(tensor.nbytes, bool) if zero is None else zero
                zero[start : start + piece.nbytes] = piece == 0
        for code, places in bad.items():
            self._tell(code, module, tensor, places, "00 to 7E")
        if skipped:
            hint = "the zero scales of so large a tensor are not compared with its codes"
            self.found.append(Finding("HB115", tensor.name, got="not counted", hint=hint))
        if subnormal:
            share = f"{100 * subnormal / read:.2g} %"
            self.found.append(
                Finding("HB117", tensor.name, got=f"{subnormal} blocks ({share}){self._of_sample(tensor)}")
            )
        return zero

    def _order(self, module: Module, tensor: Stored) -> None:
        """Report block scales that seem to lie in another order; looks at some tiles of rows, and at none of a sample.

        These bytes have been read before, and are not counted again.
        """
        layout = reduced(self.checkpoint.reading, self.checkpoint.dialect.divides).scale_layout
        columns = module.stack is not None and module.stack.columns
        if self.sample is not None or columns or len(module.shape) < 2:
            return
        n, k = module.shape[-2:]
        rows, blocks = prod(module.shape[:-1]), k // BLOCK
        whole = n % TILE == 0 and k % BLOCK == 0 and tensor.nbytes == rows * blocks
        if not whole or not readable(rows, blocks, layout):
            return
        starts = tiles(rows, blocks)
        scales = np.empty((len(starts), TILE * blocks), np.uint8)
        for start, tile in zip(starts, scales, strict=True):
            self.checkpoint.read_into(tensor, start * blocks, tile)
        found = suspect(scales.reshape(-1, blocks), layout)
        if found is not None:
            read, other = (f"{100 * share:.0f} %" for share in (found.share_read, found.share))
            got = f"rows and columns explain {read} of log2(scale) as it is read, {other} as {found.scale_layout}"
            option = f"--scale-layout {found.scale_layout if layout is None else layout}"
            hint = f"try {option}" if layout is None else f"try it without {option}"
            hint += "; only --against the dense model tells"
            self.found.append(Finding("HB140", tensor.name, got=got, hint=hint))

    def _mx_scales(self, module: Module, tensor: Stored) -> None:
        """Report the bad block scales of MXFP4: FF alone is one."""
        nan = _Places(self.cap)
        for start, piece in self._chunks(tensor):
            if piece.max(initial=0) == 255:
                nan.add(start, piece, piece == 255)
        self._tell("HB103", module, tensor, nan, "00 to FE")

    def _tell(self, code: str, module: Module, tensor: Stored, places: _Places, expected: str) -> None:
        width = MX_BLOCK if module.kind == "mxfp4" else BLOCK
        for position, byte in places.first:
            index = _place(module, "scales", tensor, position)
            got = f"byte {byte:02X}"
            self.found.append(Finding(code, tensor.name, index, got=got, expected=expected, width=width))
        if places.count > len(places.first):
            total = f"{places.count} blocks{self._of_sample(tensor) or ' in all'}"
            self.found.append(Finding(code, tensor.name, got=total, hint="--all lists each"))


class _Places:
    """Where bad bytes are: the first of them, and how many."""

    def __init__(self, cap: int | None) -> None:
        self.cap, self.count = cap, 0
        self.first: list[tuple[int, int]] = []

    def add(self, start: int, piece: Any, bad: Any) -> None:
        """Take in the bad bytes of a piece."""
        where = np.flatnonzero(bad)
        self.count += len(where)
        room = len(where) if self.cap is None else max(0, self.cap - len(self.first))
        self.first += [(int(i) + start, int(piece[i])) for i in where[:room]]


class _Filled:
    """Which experts of a tensor have a code that is not zero; a tensor that is no stack is one expert."""

    def __init__(self, experts: int, nbytes: int) -> None:
        self._size = max(nbytes // max(experts, 1), 1)
        self._filled: dict[int, bool] = {}

    def look(self, start: int, piece: Any) -> None:
        """Take in a piece."""
        stop = start + piece.nbytes
        for expert in range(start // self._size, -(-stop // self._size)):
            if not self._filled.get(expert):
                first, last = max(expert * self._size, start), min((expert + 1) * self._size, stop)
                self._filled[expert] = bool((piece[first - start : last - start] & 0x77).any())

    @property
    def read(self) -> int:
        """How many experts something was read of."""
        return len(self._filled)

    @property
    def empty(self) -> list[int]:
        """Those without such a code in what was read."""
        return sorted(expert for expert, filled in self._filled.items() if not filled)


def _used(piece: Any, stride: int) -> Any:
    """Whether the 8 bytes of each block, ``stride`` bytes apart, have a code other than 0 and -0."""
    if stride == 1:
        return piece.view(np.uint64) & 0x7777777777777777 != 0
    return (np.bitwise_or.reduce(piece.reshape(-1, 8, stride), axis=1) & 0x77 != 0).reshape(-1)


def _together(module: Module, role: str) -> int:
    """How many rows of a tensor on disk make whole blocks: where K comes before N, 8 rows of bytes."""
    columns = module.stack is not None and module.stack.columns
    shape = module.roles[role].shape
    return 8 if columns and role == "codes" and prod(shape[:-1]) % 8 == 0 and 8 * max(shape) <= _MASK else 1


def _place(module: Module, role: str, tensor: Stored, position: int) -> list[int]:
    """The index of an element, or of a block: [expert, row, block] also where rows lie as columns."""
    index = [int(i) for i in np.unravel_index(position, tensor.shape)]
    if role in ("scales", "data") and module.stack is not None and module.stack.columns:
        index[-2:] = index[:-3:-1]
    return index
