"""``verify``: prove a checkpoint sound, or name the tensor, row and block that is not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from halfbyte.checkpoint.consistency import fused_parts, header_findings
from halfbyte.checkpoint.reader import Checkpoint, open_checkpoint
from halfbyte.dialects import Module
from halfbyte.findings import CAP, Finding, Report, in_order
from halfbyte.stored import FLOATS, Stored
from halfbyte.tools.base import CHUNK, Meter, Progress, chosen, run, worker_count

_EXPONENT: dict[str, tuple[Any, int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}
"""Float dtype -> the unsigned type of its bits, and the exponent of Inf and NaN."""


def verify(
    path: str | os.PathLike[str],
    *,
    every: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check the headers, the configs and every byte of a checkpoint.

    Args:
        path: a directory, a file, or a hub name.
        every: report every offending block; otherwise 100 for each tensor and code, then their number.
        include, exclude: patterns of modules whose values are read; by default all.
        workers: threads; by default one for each core.
        progress: told of bytes read.

    Returns:
        A report; its facts are "path", "dialect", "modules" (kind -> number), "bytes" and "seconds".

    Raises:
        HalfbyteError: a checkpoint that cannot be read at all.
    """
    started = time.perf_counter()
    with open_checkpoint(path) as checkpoint:
        checkpoint.require_readable()
        scan = _Scan(checkpoint, None if every else CAP)
        scan.found += header_findings(checkpoint, every)
        modules, idle = chosen(checkpoint.modules, include, exclude)
        scan.found += idle
        scan.meter = Meter(sum(t.nbytes for m in modules for t in m.tensors), progress)
        run([partial(scan.read, module) for module in modules], worker_count(workers), scan.meter)
        scan.compare_fused(modules)
        order = {name: i for i, name in enumerate(checkpoint.tensors)}
        scan.found.sort(key=lambda f: order.get(f.tensor or "", -1))
        kinds = [m.kind for m in checkpoint.modules if m.kind != "none"]
        facts: dict[str, Any] = {
            "path": str(checkpoint.path),
            "dialect": checkpoint.dialect_name,
            "modules": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "bytes": scan.meter.done,
            "seconds": round(time.perf_counter() - started, 3),
        }
        return Report("verify", in_order(scan.found), facts)


class _Scan:
    """The pass over the values; its jobs run on several threads."""

    def __init__(self, checkpoint: Checkpoint, cap: int | None) -> None:
        self.checkpoint, self.cap = checkpoint, cap
        self.found: list[Finding] = []
        self.scale2: dict[str, float] = {}
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

    def read(self, module: Module) -> None:
        """Read all tensors of one module."""
        for role, tensor in module.roles.items():
            if role in ("scale2", "input_scale", "scale", "k_scale", "v_scale") and tensor.dtype in FLOATS:
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

    def _chunks(self, tensor: Stored, unit: int = 8) -> Any:
        """(start, bytes) pieces of a tensor, whole multiples of ``unit`` bytes, in one buffer for each thread."""
        step = max(CHUNK // unit, 1) * unit
        if getattr(self._local, "buffer", None) is None or self._local.buffer.nbytes < step:
            self._local.buffer = np.empty(step, np.uint8)
        for start in range(0, tensor.nbytes, step):
            piece = self._local.buffer[: min(step, tensor.nbytes - start)]
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
            self.found.append(Finding("HB118", tensor.name, index or None, got=f"{count} values"))

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
            self.found.append(Finding("HB115", codes.name, got=f"{empty} blocks", hint="they decode to zero"))
        if codes.nbytes and not any_code:
            self.found.append(Finding("HB116", codes.name, hint="a zero weight, or a file with a hole"))

    def _scales(self, tensor: Stored) -> Any:
        """Report bad block scales; returns the mask of zero ones, or None where there is none."""
        zero, subnormal = None, 0
        positions: dict[str, list[tuple[int, int]]] = {"HB103": [], "HB104": []}
        counts = dict.fromkeys(positions, 0)
        for start, piece in self._chunks(tensor):
            if not piece.size:
                continue
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
                self.found.append(
                    Finding(code, tensor.name, got=f"{counts[code]} blocks in all", hint="--all lists each")
                )
        if subnormal:
            share = 100 * subnormal / tensor.nbytes
            self.found.append(Finding("HB117", tensor.name, got=f"{subnormal} blocks ({share:.2g} %)"))
        return zero
