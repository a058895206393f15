"""The quantized weights of a checkpoint beside the dense ones that they were made from.

Stacks of experts are taken apart on both sides, so that each expert's layer is measured by itself, however the two
checkpoints store it. Where nothing states the order of gate and up of a quantized stack, it is taken to be
"concatenated", and the other orders are among the readings; where nothing states that of a dense stack, it is taken
to be that of the quantized one.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.diagnose import (
    CALM,
    READINGS,
    Diagnosis,
    Errors,
    bound_of,
    diagnose,
    error_of,
    far,
    nearest,
)
from halfbyte.dialects import Dialect
from halfbyte.errors import FormatError
from halfbyte.experts import GATE_UP, GATE_UP_ORDERS, METADATA, expand, ordered, spelled
from halfbyte.findings import Finding
from halfbyte.modules import QUANTIZED, Module, Reading, refuse_broken, refuse_companions
from halfbyte.patterns import spellings
from halfbyte.reading import combined
from halfbyte.stored import FLOATS, Stored, as_array, byte_count

Tell = Callable[[int], None]
"""Is told of bytes that are done."""

_EXCHANGED: Final = {"concatenated": "up_first", "up_first": "concatenated"}
SHOWN: Final = 5
"""How many modules an advice names."""
NEAR: Final = 256
"""How many other modules of the same shape a weight may turn out to be: the nearest by name."""


class Lazy:
    """A dense tensor on disk whose rows are read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, tensor: Stored) -> None:
        self._checkpoint, self._tensor, self.shape = checkpoint, tensor, tensor.shape

    def __getitem__(self, rows: slice) -> Any:
        a, b, _ = rows.indices(self.shape[0])
        dtype, shape = self._tensor.dtype, (b - a, *self.shape[1:])
        raw = np.empty(byte_count(dtype, shape), np.uint8)
        self._checkpoint.read_into(self._tensor, byte_count(dtype, (a, *self.shape[1:])), raw)
        return as_array(raw, dtype, shape)


class Twins:
    """The quantized layers of some modules and their dense twins; its jobs run on several threads.

    Args:
        checkpoint: the quantized one.
        modules: those of it that are measured.
        source: the quantized checkpoint as the caller names it.
    """

    def __init__(self, checkpoint: Checkpoint, modules: Sequence[Module], source: str) -> None:
        self.checkpoint, self.source = checkpoint, source
        self.path = ""
        self.errors: dict[str, Errors] = {}
        self.repair: str | None = None
        self.advice: str | None = None
        self._told: dict[str, Diagnosis | None] = {}
        self._modules = [m for m in modules if m.kind in QUANTIZED and m.main is not None]
        self._parts: list[Module] = []
        self._unknown: list[str] = []
        self._pairs: list[tuple[Module, Stored]] = []
        self._stacks: dict[str, Module] = {}
        self._assumed: set[str] = set()
        self._found: dict[str, Finding] = {}
        self._dense: dict[str, Lazy] = {}
        self._by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)

    def pair(self, dense: Checkpoint) -> None:
        """Find the twins of all layers in a dense checkpoint."""
        self.path = str(dense.path)
        for module in self._modules:
            self._parts += self._apart(module)
        known = _Dense(dense, {stack.name: stack for stack in self._stacks.values()})
        self._unknown = known.unknown
        for part in self._parts:
            twin = self._twin(part, known) if part.name not in self._found else None
            if twin is not None:
                self._pairs.append((part, twin))
                self._dense[part.name] = Lazy(dense, twin)
                self._by_shape[twin.shape].append(part.name)

    @property
    def nbytes(self) -> int:
        """Bytes of all pairs."""
        return sum(t.nbytes for m, twin in self._pairs for t in (*m.tensors, twin))

    def jobs(self, tell: Tell) -> list[Callable[[], None]]:
        """One job for each pair, that measures it; ``tell`` gets the bytes of those that are done."""
        return [partial(self._one, part, twin, tell) for part, twin in self._pairs]

    def settle(self) -> None:
        """Look for one reading with which all weights are right; to be called when the jobs are done."""
        needs: dict[str, Reading | None] = {}
        for part, _ in self._pairs:
            found = self._reading(part)
            if part.name in self._told and (part.kind == "nvfp4" or found is not None):
                needs[part.name] = found
        wanted = [reading for reading, _ in Counter(needs.values()).most_common() if reading is not None]
        for reading in wanted if None not in needs.values() else ():
            if all(needs.get(part.name) == reading or self._right(part, reading) for part, _ in self._pairs):
                self._answer(reading)
                return
        if wanted:
            self.advice = self._each_its_own(needs, wanted)

    def _reading(self, part: Module) -> Reading | None:
        """The reading that a layer needs beside the one that the checkpoint is read with, or None."""
        told = self._told.get(part.name)
        reading = told.readings[self.checkpoint.dialect.divides] if told is not None else None
        if reading is None or self._whole(reading) is None:
            return None
        return reading if part.kind == "nvfp4" or reading.gate_up else None

    def _whole(self, reading: Reading) -> Reading | None:
        return combined(self.checkpoint.reading, reading, self.checkpoint.dialect.divides)

    def _right(self, part: Module, reading: Reading) -> bool:
        """Whether a layer is right with a reading that another one needs."""
        if part.name not in self.errors:
            return True
        if reading.gate_up:
            if part.name not in self._stacks:
                return True
            weight = self.checkpoint.load(self._ordered(part, reading.gate_up))
        elif part.kind == "nvfp4":
            weight = self.checkpoint.load(part)
            entry = next(e for e in READINGS if e.readings[self.checkpoint.dialect.divides] == reading)
            if not entry.fits(weight):
                return False
            weight = entry.read(weight)
        else:
            return True
        values, told = self._dense[part.name][:], self._told.get(part.name)
        limit = bound_of(weight, values)
        return error_of(weight, values).relative <= (limit if told is None else max(limit, told.relative))

    def _answer(self, reading: Reading) -> None:
        whole = self._whole(reading)
        if whole == Reading():
            self.advice = f"none is needed: leave out {' '.join(self.checkpoint.read_with)}"
        elif whole is not None:
            self.repair = repair_command(self.source, self.checkpoint.dialect, whole)

    def _each_its_own(self, needs: Mapping[str, Reading | None], wanted: Sequence[Reading]) -> str:
        """What to do where no one reading is right for all weights."""
        fits = []
        for reading in wanted:
            whole, count = self._whole(reading), sum(need == reading for need in needs.values())
            options = " ".join(whole.options if whole is not None else ()) or "no option"
            fits.append(f"{options} fits {count} of {len(self.errors)}")
        patterns = [f"--include {shlex.quote(name)}" for name in needs]
        more = f" and {len(patterns) - SHOWN} more" if len(patterns) > SHOWN else ""
        again = f"quantize these again: {' '.join(patterns[:SHOWN])}{more}"
        return f"no one reading is right for all modules, and convert reads all alike ({'; '.join(fits)}); {again}"

    def findings(self) -> list[Finding]:
        """What the comparison found, in the order of the modules."""
        if not self._modules:
            return [Finding("HB503", got="no quantized module", hint="there is nothing to measure")]
        hint = "of the dense twin: both are measured as they lie"
        notes = [Finding("HB138", name, hint=hint) for name in self._unknown]
        return notes + [self._with_repair(part) for part in self._parts if part.name in self._found]

    def _with_repair(self, part: Module) -> Finding:
        finding, command = self._found[part.name], self._repair_of(part)
        return finding if command is None else replace(finding, hint=f"{finding.hint}; repair: {command}")

    def _repair_of(self, part: Module) -> str | None:
        """The command, for a layer that it repairs."""
        return self.repair if self._reading(part) is not None else None

    def facts(self) -> dict[str, Any]:
        """The facts of the report."""
        rows = [(part, self.errors[part.name]) for part in self._parts if part.name in self.errors]
        overall = Errors(sum(e.noise for _, e in rows), sum(e.signal for _, e in rows))
        return {
            "against": [
                {
                    "name": part.name,
                    "relative": error.relative,
                    "sqnr": error.sqnr,
                    "worst": list(error.worst),
                    "worst_relative": error.worst_relative,
                    "reading": told.name if (told := self._told.get(part.name)) is not None else None,
                    "repair": self._repair_of(part),
                }
                for part, error in rows
            ],
            "against_overall": {
                "path": self.path,
                "modules": len(rows),
                "relative": overall.relative,
                "sqnr": overall.sqnr,
                "repair": self.repair,
                "advice": self.advice,
            },
        }

    def _apart(self, module: Module) -> list[Module]:
        """The layers of a module: those of its experts if it is a stack."""
        if module.stack is None:
            return [module]
        try:
            refuse_broken(module)
        except FormatError as error:
            self._found[module.name] = _not_measured(module, error)
            return [module]
        if module.name.rpartition(".")[2] not in GATE_UP:
            return expand(module)
        assumed = module.stack.gate_up is None
        module = ordered(module, module.stack.gate_up or "concatenated")
        parts = expand(module)
        names = [part.name for part in parts]
        self._stacks |= dict.fromkeys(names, module)
        self._assumed |= set(names if assumed else ())
        return parts

    def _twin(self, part: Module, known: _Dense) -> Stored | None:
        """The dense twin of a layer; where there is none that can be compared, a finding."""
        name, index = _where(part)
        twin = known.find(part.name)
        if twin is None:
            expected = f"{part.name}.weight"
            self._found[part.name] = Finding("HB503", name, index, expected=expected)
        elif twin.dtype not in FLOATS:
            hint, need = "it is quantized itself: dequantize it first", " or ".join(FLOATS)
            self._found[part.name] = Finding("HB503", name, index, str(twin), need, hint)
        elif twin.shape != part.shape:
            self._found[part.name] = Finding("HB504", name, index, list(part.shape), list(twin.shape))
        else:
            return twin
        return None

    def _one(self, part: Module, twin: Stored, tell: Tell) -> None:
        try:
            refuse_broken(part)
            refuse_companions(part, {"lora_a", "lora_b"}, "are not in the dense twin's weight")
        except FormatError as error:
            self._found[part.name] = _not_measured(part, error)
        else:
            self._compare(part, self.checkpoint.load(part))
        tell(twin.nbytes + sum(t.nbytes for t in part.tensors))

    def _compare(self, part: Module, weight: Any) -> None:
        twin = self._dense[part.name]
        error = self.errors[part.name] = error_of(weight, twin)
        if error.relative <= CALM[weight.kind]:
            return
        values = twin[:]
        bound = bound_of(weight, values)
        if error.relative <= bound:
            return
        near = nearest(part.name, self._by_shape[twin.shape])[:NEAR]
        told = diagnose(weight, values, {other: self._dense[other] for other in near}, part.name)
        vague = told is None or told.name.startswith("rows permuted") or part.name in self._assumed
        if part.name in self._stacks and vague:
            told = self._in_another_order(part, bound) or told
        if told is not None and told.name.startswith("gate and up exchanged") and part.name in self._stacks:
            stack = self._stacks[part.name].stack
            order = _EXCHANGED.get(stack.gate_up or "") if stack is not None else None
            told = replace(told, readings=(Reading(gate_up=order),) * 2) if order else told
        self._told[part.name] = told
        if told is not None:
            hint = f"{told.name}: {told.relative:.4g} if read so; {told.hint}"
        else:
            hint = f"no reading explains it; the worst block is {list(error.worst)}"
        if error.signal != error.signal or error.signal == float("inf"):
            hint = "the dense twin holds NaN or Inf"
        name, index = _where(part)
        self._found[part.name] = Finding(
            "HB501" if error.relative > far(bound, weight.kind) else "HB502",
            name,
            index,
            got=float(f"{error.relative:.4g}"),
            expected=f"at most {bound:.3g}",
            hint=hint if index is None else f"{part.name.rpartition('.')[2]}: {hint}",
        )

    def _in_another_order(self, part: Module, bound: float) -> Diagnosis | None:
        """Whether gate and up of a stack lie in another order than is stated."""
        for order in GATE_UP_ORDERS:
            other = self.checkpoint.load(self._ordered(part, order))
            relative = error_of(other, self._dense[part.name]).relative
            if relative <= bound:
                name, reading = f"gate and up that lie {order.replace('_', ' ')}", Reading(gate_up=order)
                hint = f'state "gate_up": "{order}" in the metadata {METADATA}'
                return Diagnosis(name, relative, hint, (reading, reading))
        return None

    def _ordered(self, part: Module, order: str) -> Module:
        """A layer of a stack, if gate and up lie in that order."""
        module = self._stacks[part.name]
        at = [p.name for p in expand(module)].index(part.name)
        return expand(ordered(module, order))[at]


class _Dense:
    """The dense layers of a checkpoint by their names, stacks of experts taken apart."""

    def __init__(self, checkpoint: Checkpoint, stacks: Mapping[str, Module]) -> None:
        """``stacks``: the quantized ones, of known order."""
        self._tensors = checkpoint.tensors
        self._layers: dict[str, Stored] = {}
        self.unknown: list[str] = []
        """Stacks whose order is taken to be that of their quantized twins."""
        orders = {spelled(n): m.stack for name, m in stacks.items() for n in spellings(name, fused=False)}
        for module in checkpoint.modules:
            stack, twin = module.stack, orders.get(spelled(module.name))
            if stack is not None and not stack.gate_up and twin is not None:
                self.unknown += [module.main.name] if module.main else []
                parts = expand(ordered(module, twin.gate_up))
            else:
                parts = expand(module)
            for part in parts:
                if part.main is not None:
                    self._layers.setdefault(spelled(part.name), part.main)

    def find(self, name: str) -> Stored | None:
        """The tensor of a layer."""
        names = [name, *spellings(name, fused=False)]
        plain = (self._tensors.get(f"{n}.weight") for n in names)
        return next((t for t in (*plain, *(self._layers.get(spelled(n)) for n in names)) if t is not None), None)


def repair_command(source: str, dialect: Dialect, reading: Reading) -> str:
    """The command that writes a checkpoint anew, beside it, as its dialect says that weights are stored."""
    path = source if Path(source).exists() else source.rpartition("/")[2]  # a name on the hub is no directory
    target = path.rstrip("/").removesuffix(".safetensors")
    if os.path.basename(target) in ("", ".", ".."):
        target = str(Path(source).resolve())
    names = [f"./{name}" if name.startswith("-") else name for name in (source, f"{target}-repaired")]
    to = dialect.name if dialect.writable else "modelopt"
    return " ".join(["halfbyte convert", *map(shlex.quote, names), "--to", to, *reading.options])


def _where(part: Module) -> tuple[str, list[int] | None]:
    """The tensor of a layer on disk, and which expert's it is."""
    return (part.main.name, part.main.place([]) or None) if part.main is not None else (part.name, None)


def _not_measured(module: Module, error: FormatError) -> Finding:
    name, index = _where(module)
    return Finding("HB503", name, index, error.got, error.expected, f"not measured: {error.message}")
