"""``verify``: prove a checkpoint sound, or name the tensor, row and block that is not."""

from __future__ import annotations

import os
import re
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
from halfbyte.diagnose import (
    CALM,
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    Errors,
    bound_of,
    diagnose,
    error_of,
    far,
    nearest,
    reinterpret,
)
from halfbyte.errors import FormatError, UsageError, WeightError
from halfbyte.findings import CAP, Finding, Report, capped, in_order
from halfbyte.modules import Module, refuse_broken, refuse_companions
from halfbyte.patterns import fused_group, spellings
from halfbyte.stored import FLOATS, Stored, as_array, byte_count
from halfbyte.tools.base import CHUNK, Meter, Progress, chosen, run, worker_count

_EXPONENT: dict[str, tuple[Any, int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}
"""Float dtype -> the unsigned type of its bits, and the exponent of Inf and NaN."""

_SCALARS = ("scale2", "input_scale", "scale", "k_scale", "v_scale")
"""Roles that are read whole, also in a sample."""

_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.(.+)")
"""Name of one of a row of numbered experts: (all experts of the layer, part)."""


def verify(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    nibble_order: str | None = None,
    scale_layout: str | None = None,
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
        nibble_order, scale_layout: "high" and "128x4" measure the NVFP4 weights as if they were stored so.
        every: report every offending block; otherwise 100 for each tensor and code, then their number.
        sample: the share of rows, above 0 and up to 1, that is read of each matrix; by default all. Scales of whole
            tensors and vectors are read in any case.
        include, exclude: patterns of modules whose values are read; by default all.
        workers: threads; by default one for each core.
        progress: told of bytes read.

    Returns:
        A report; its facts are "path", "dialect", "modules" (kind -> number), "selected" (how many of them were
        read), "bytes", "share" (of all bytes, that was read), "sample" and "seconds". With ``against`` also
        "against", a list of {"name", "relative", "sqnr" (dB), "worst" [row, block], "worst_relative", "reading" (what
        explains the error, or None)}, and "against_overall", {"path", "modules", "relative", "sqnr"}.

    Raises:
        UsageError: a sample that is no share or goes with ``against``, or a nibble order or scale layout that is
            unknown or goes without it.
        HalfbyteError: a checkpoint that cannot be read at all.
    """
    if sample is not None and not 0 < sample <= 1:
        raise UsageError("no share of the rows", got=sample, expected="above 0 and up to 1")
    if sample is not None and against is not None:
        raise UsageError("a sample cannot be measured", hint="a dense checkpoint is compared in every value")
    for what, value, known in (("nibble order", nibble_order, NIBBLE_ORDERS), ("layout", scale_layout, SCALE_LAYOUTS)):
        if value is not None and (value not in known or against is None):
            hint = f"a {what} is for measuring: name a dense checkpoint, too" if against is None else None
            raise UsageError(f"cannot use this {what}", got=value, expected=" or ".join(known), hint=hint)
    started = time.perf_counter()
    with open_checkpoint(path) as checkpoint:
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
        scan.compare_fused(modules)
        scan.compare_input_scales(modules)
        order = {name: i for i, name in enumerate(checkpoint.tensors)}
        twins = _Twins(checkpoint, nibble_order or "low", scale_layout or "linear")
        if against is not None:
            twins.measure(against, modules, worker_count(workers), progress)
            scan.found += capped(twins.findings(modules), every)
        scan.found.sort(key=lambda f: order.get(f.tensor or "", -1))
        kinds = [m.kind for m in checkpoint.modules if m.kind != "none"]
        facts: dict[str, Any] = {
            "path": str(checkpoint.path),
            "dialect": checkpoint.dialect_name,
            "modules": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "selected": sum(m.kind != "none" for m in modules),
            "bytes": scan.meter.done + twins.meter.done,
            "share": scan.meter.done / (sum(t.nbytes for t in checkpoint.tensors.values()) or 1),
            "sample": sample,
            "seconds": round(time.perf_counter() - started, 3),
        }
        facts |= twins.facts(modules) if against is not None else {}
        return Report("verify", in_order(scan.found), facts)


class _Scan:
    """The pass over the values; its jobs run on several threads."""

    def __init__(self, checkpoint: Checkpoint, cap: int | None, sample: float | None = None) -> None:
        self.checkpoint, self.cap, self.sample = checkpoint, cap, sample
        self.found: list[Finding] = []
        self.scale2: dict[str, float] = {}
        self.input_scale: dict[str, float] = {}
        self.meter = Meter(0, None)
        self._local = threading.local()

    def compare_fused(self, modules: list[Module]) -> None:
        """Report parts with different scale2, and how wrong an engine gets that takes the largest."""
        for parts in fused_parts(modules).values():
            values = {m.name: self.scale2[m.name] for m in parts if m.name in self.scale2}
            if len(set(values.values())) > 1 and min(values.values()) > 0:
                names = ", ".join(name.rpartition(".")[2] for name in values)
                factor = max(values.values()) / min(values.values())
                self.found.append(
                    Finding(
                        "HB110",
                        parts[0].roles["scale2"].name,
                        got=f"{names}: {', '.join(f'{v:.6g}' for v in values.values())}",
                        expected="one value",
                        hint=f"an engine that takes the largest makes the smallest part {factor:.3g} times too large",
                    )
                )

    def compare_input_scales(self, modules: list[Module]) -> None:
        """Report parts of one input with different input scales, and experts of different inputs with one."""
        for parts in fused_parts(modules).values():
            values = {m.name: self.input_scale[m.name] for m in parts if m.name in self.input_scale}
            if len(set(values.values())) > 1:
                tensor = next(m.roles["input_scale"].name for m in parts if m.name in values)
                got = ", ".join(f"{name.rpartition('.')[2]} {value:.6g}" for name, value in values.items())
                self.found.append(Finding("HB125", tensor, got=got, expected="one value"))
        layers: dict[tuple[str, ...], list[Module]] = defaultdict(list)
        for module in modules:
            # Parts that engines fuse read the layer's input, for which experts may agree.
            found = _EXPERT.fullmatch(module.name)
            if found and module.name in self.input_scale and not fused_group(module.name):
                layers[found.groups()].append(module)
        for (_, part), experts in layers.items():
            same = {self.input_scale[m.name] for m in experts}
            if len(experts) > 1 and len(same) == 1:
                got = f"{part} {same.pop():.6g} in {len(experts)} experts"
                hint = "they were not calibrated, or one value was given to all"
                self.found.append(Finding("HB124", experts[0].roles["input_scale"].name, got=got, hint=hint))

    def planned(self, module: Module) -> int:
        """How many bytes ``read`` reads of a module."""
        whole = sum(t.nbytes for role, t in module.roles.items() if role in _SCALARS and t.dtype in FLOATS)
        rest = [t for role, t in module.roles.items() if not (role in _SCALARS and t.dtype in FLOATS)]
        return whole + sum(stop - start for t in (*rest, *module.unknown) for start, stop in self._spans(t))

    def _spans(self, tensor: Stored) -> Iterator[tuple[int, int]]:
        """The bytes (start, stop) to read of a tensor: all, or those of rows spread from the first to the last."""
        rows = prod(tensor.shape[:-1])
        count = rows if self.sample is None else max(ceil(rows * self.sample), 2)
        if len(tensor.shape) < 2 or count >= rows or tensor.nbytes % rows:
            yield 0, tensor.nbytes
            return
        width = tensor.nbytes // rows
        for i in range(count):
            row = i * (rows - 1) // (count - 1)
            yield row * width, (row + 1) * width

    def _of_sample(self, tensor: Stored) -> str:
        """What a count is to be followed by where not all was counted."""
        rows, read = prod(tensor.shape[:-1]), sum(1 for _ in self._spans(tensor))
        return "" if read == 1 else f" in {read} of {rows} rows"

    def read(self, module: Module) -> None:
        """Read all tensors of one module, or a sample of their rows."""
        for role, tensor in module.roles.items():
            if role in _SCALARS and tensor.dtype in FLOATS:
                self._positive(module, role, tensor)
            elif tensor.dtype in _EXPONENT:
                self._finite(tensor)
            elif role == "data" and tensor.dtype == "F8_E4M3":
                self._fp8(tensor)
            elif not (module.kind == "nvfp4" and role in ("codes", "scales")):
                self._skim(tensor)
        for tensor in module.unknown:
            self._finite(tensor) if tensor.dtype in _EXPONENT else self._skim(tensor)
        if module.kind == "nvfp4":
            self._blocks(module)

    def _chunks(self, tensor: Stored) -> Any:
        """(start, bytes) pieces of a tensor, in one buffer for each thread."""
        if getattr(self._local, "buffer", None) is None:
            self._local.buffer = np.empty(CHUNK, np.uint8)
        for first, stop in self._spans(tensor):
            for start in range(first, stop, CHUNK):
                piece = self._local.buffer[: min(CHUNK, stop - start)]
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
        bad = ~(np.isfinite(values) & (values > 0) & np.isfinite(multiplier) & (multiplier > 0))
        if role == "scale":
            bad &= values != 0
        if bad.any():
            code = "HB106" if role in ("scale2", "scale") else "HB123" if role in ("k_scale", "v_scale") else "HB113"
            index = [int(i) for i in np.argwhere(bad)[0]] if values.size > 1 else None
            self.found.append(
                Finding(code, tensor.name, index, got=float(values[bad][0]), expected="positive and finite")
            )
        elif role == "scale2" and values.size == 1:
            value = float(multiplier.reshape(()))
            self.scale2[module.name] = value
            if value > 1:
                pair = ("divisor", "multiplier") if self.checkpoint.dialect.divides else ("multiplier", "reciprocal")
                hint = f"a {pair[1]} may be stored where a {pair[0]} is meant" if value > 16 else None
                self.found.append(Finding("HB108", tensor.name, got=f"{value:.6g}", expected="below 1", hint=hint))
        elif role == "input_scale" and values.size == 1:
            self.input_scale[module.name] = float(multiplier.reshape(()))

    def _finite(self, tensor: Stored) -> None:
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
            index = [int(i) for i in np.unravel_index(bad[0], tensor.shape)]
            self.found.append(
                Finding("HB118", tensor.name, index or None, got=f"{count} values{self._of_sample(tensor)}")
            )

    def _fp8(self, tensor: Stored) -> None:
        for start, piece in self._chunks(tensor):
            nan = (piece & 127) == 127
            if nan.any():
                index = [int(i) for i in np.unravel_index(start + int(nan.argmax()), tensor.shape)]
                self.found.append(Finding("HB119", tensor.name, index))
                return

    def _blocks(self, module: Module) -> None:
        codes, scales = module.roles.get("codes"), module.roles.get("scales")
        if codes is None:
            return
        zero: Any = None
        whole = scales is not None and scales.nbytes * 8 == codes.nbytes
        if scales is not None and scales.dtype in ("F8_E4M3", "U8"):
            zero = self._scales(scales)
        elif scales is not None:
            self._skim(scales)
        any_code, empty = False, 0
        for start, piece in self._chunks(codes):
            if piece.nbytes % 8 or (any_code and (zero is None or not whole)):
                any_code = any_code or bool((piece & 0x77).any())
                continue
            blocks = piece.view(np.uint64) & 0x7777777777777777 != 0  # a code of -0 is zero, too
            any_code = any_code or bool(blocks.any())
            if zero is not None and whole:
                empty += int(np.count_nonzero(blocks & zero[start // 8 : (start + piece.nbytes) // 8]))
        if empty:
            self.found.append(
                Finding("HB115", codes.name, got=f"{empty} blocks{self._of_sample(codes)}", hint="they decode to zero")
            )
        if codes.nbytes and not any_code:
            got = self._of_sample(codes).strip() or None
            self.found.append(Finding("HB116", codes.name, got=got, hint="a zero weight, or a file with a hole"))

    def _scales(self, tensor: Stored) -> Any:
        """Report bad block scales; returns the mask of zero ones, or None where there is none."""
        zero, subnormal, read = None, 0, 0
        positions: dict[str, list[tuple[int, int]]] = {"HB103": [], "HB104": []}
        counts = dict.fromkeys(positions, 0)
        for start, piece in self._chunks(tensor):
            if not piece.size:
                continue
            read += piece.nbytes
            top, low = piece.max(), piece.min()
            if top >= 127:
                nan = (piece & 127) == 127
                for code, bad in (("HB103", nan), ("HB104", (piece >= 128) & ~nan)):
                    where = np.flatnonzero(bad)
                    counts[code] += len(where)
                    room = len(where) if self.cap is None else max(0, self.cap - len(positions[code]))
                    positions[code] += [(int(i) + start, int(piece[i])) for i in where[:room]]
            if low < 8:
                subnormal += int(np.count_nonzero((piece > 0) & (piece < 8)))
            if low == 0:
                zero = np.zeros(tensor.nbytes, bool) if zero is None else zero
                zero[start : start + piece.nbytes] = piece == 0
        for code, found in positions.items():
            for position, byte in found:
                index = [int(i) for i in np.unravel_index(position, tensor.shape)]
                self.found.append(Finding(code, tensor.name, index, got=f"byte {byte:02X}", expected="00 to 7E"))
            if counts[code] > len(found):
                total = f"{counts[code]} blocks{self._of_sample(tensor) or ' in all'}"
                self.found.append(Finding(code, tensor.name, got=total, hint="--all lists each"))
        if subnormal:
            share = f"{100 * subnormal / read:.2g} %"
            self.found.append(
                Finding("HB117", tensor.name, got=f"{subnormal} blocks ({share}){self._of_sample(tensor)}")
            )
        return zero


class _Lazy:
    """A dense tensor on disk whose rows are read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, tensor: Stored) -> None:
        self._checkpoint, self._tensor, self.shape = checkpoint, tensor, tensor.shape

    def __getitem__(self, rows: slice) -> Any:
        a, b, _ = rows.indices(self.shape[0])
        dtype, shape = self._tensor.dtype, (b - a, *self.shape[1:])
        raw = np.empty(byte_count(dtype, shape), np.uint8)
        self._checkpoint.read_into(self._tensor, byte_count(dtype, (a, *self.shape[1:])), raw)
        return as_array(raw, dtype, shape)


class _Twins:
    """The quantized weights beside those that they were made from; its jobs run on several threads."""

    NEAR = 256
    """How many other modules of the same shape a weight may turn out to be: the nearest by name."""

    def __init__(self, checkpoint: Checkpoint, nibble_order: str, scale_layout: str) -> None:
        self.checkpoint, self.nibble_order, self.scale_layout = checkpoint, nibble_order, scale_layout
        self.path = ""
        self.errors: dict[str, Errors] = {}
        self.readings: dict[str, str] = {}
        self.meter = Meter(0, None)
        self._found: dict[str, Finding] = {}
        self._dense: dict[str, _Lazy] = {}
        self._by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)

    def measure(
        self, against: str | os.PathLike[str], modules: Sequence[Module], workers: int, progress: Progress | None
    ) -> None:
        """Compare all quantized modules with their twins in a dense checkpoint."""
        with open_checkpoint(against) as dense:
            self.path = str(dense.path)
            pairs = []
            for module in self._quantized(modules):
                twin = self._pair(module, dense)
                if twin is not None:
                    pairs.append((module, twin))
                    self._dense[module.name] = _Lazy(dense, twin)
                    self._by_shape[twin.shape].append(module.name)
            self.meter = Meter(sum(t.nbytes for m, twin in pairs for t in (*m.tensors, twin)), progress)
            run([partial(self._one, module, dense, twin) for module, twin in pairs], workers, self.meter)

    def findings(self, modules: Sequence[Module]) -> list[Finding]:
        """What the comparison found, in the order of the modules."""
        names = [m.name for m in self._quantized(modules)]
        if not names:
            return [Finding("HB503", got="no quantized module", hint="there is nothing to measure")]
        return [self._found[name] for name in names if name in self._found]

    def facts(self, modules: Sequence[Module]) -> dict[str, Any]:
        """The facts of the report."""
        rows = [(m.name, self.errors[m.name]) for m in modules if m.name in self.errors]
        overall = Errors(sum(e.noise for _, e in rows), sum(e.signal for _, e in rows))
        return {
            "against": [
                {
                    "name": name,
                    "relative": error.relative,
                    "sqnr": error.sqnr,
                    "worst": list(error.worst),
                    "worst_relative": error.worst_relative,
                    "reading": self.readings.get(name),
                }
                for name, error in rows
            ],
            "against_overall": {
                "path": self.path,
                "modules": len(rows),
                "relative": overall.relative,
                "sqnr": overall.sqnr,
            },
        }

    @staticmethod
    def _quantized(modules: Sequence[Module]) -> list[Module]:
        return [m for m in modules if m.kind in ("nvfp4", "fp8") and m.main is not None]

    def _pair(self, module: Module, dense: Checkpoint) -> Stored | None:
        """The dense twin of a module; where there is none that can be compared, a finding."""
        name = module.main.name if module.main else module.name
        names = [f"{n}.weight" for n in (module.name, *spellings(module.name, fused=False))]
        twin = next((dense.tensors[n] for n in names if n in dense.tensors), None)
        if twin is None:
            self._found[module.name] = Finding("HB503", name, expected=names[0])
        elif twin.dtype not in FLOATS:
            hint = "it is quantized itself: dequantize it first"
            self._found[module.name] = Finding("HB503", name, got=str(twin), expected=" or ".join(FLOATS), hint=hint)
        elif twin.shape != module.shape:
            self._found[module.name] = Finding("HB504", name, got=list(module.shape), expected=list(twin.shape))
        else:
            return twin
        return None

    def _one(self, module: Module, dense: Checkpoint, twin: Stored) -> None:
        name = module.main.name if module.main else module.name
        try:
            refuse_broken(module)
            refuse_companions(module, {"lora_a", "lora_b"}, "are not in the dense twin's weight")
        except FormatError as error:
            hint = f"not measured: {error.message}"
            self._found[module.name] = Finding("HB503", name, got=error.got, expected=error.expected, hint=hint)
        else:
            weight = self.checkpoint.load(module)
            try:
                if module.kind == "nvfp4":
                    weight = reinterpret(weight, self.nibble_order, self.scale_layout)
            except WeightError as error:
                self._found[module.name] = Finding("HB504", name, None, error.got, error.expected, error.message)
            else:
                self._compare(module, weight, dense, twin)
        self.meter.add(twin.nbytes + sum(t.nbytes for t in module.tensors))

    def _compare(self, module: Module, weight: Any, dense: Checkpoint, twin: Stored) -> None:
        error = self.errors[module.name] = error_of(weight, self._dense[module.name])
        if error.relative <= CALM[weight.kind]:
            return
        values = dense.read(twin)
        bound = bound_of(weight, values)
        if error.relative <= bound:
            return
        near = nearest(module.name, self._by_shape[twin.shape])[: self.NEAR]
        reading = diagnose(weight, values, {other: self._dense[other] for other in near}, module.name)
        if reading is not None:
            self.readings[module.name] = reading.name
            hint = f"{reading.name}: {reading.relative:.4g} if read so; {reading.hint}"
        else:
            hint = f"no reading explains it; the worst block is {list(error.worst)}"
        if error.signal != error.signal or error.signal == float("inf"):
            hint = "the dense twin holds NaN or Inf"
        self._found[module.name] = Finding(
            "HB501" if error.relative > far(bound) else "HB502",
            module.main.name if module.main else module.name,
            got=float(f"{error.relative:.4g}"),
            expected=f"at most {bound:.3g}",
            hint=hint,
        )
