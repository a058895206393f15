"""Weights that do not lie as their dialect says: the reading that the caller asks for, as views of the stored tensors.

A reading makes a checkpoint with a known fault, or of a writer with other habits, one like every other: all tools
then see codes with even k in the low nibble, block scales row by row, and a scale2 that their dialect can mean.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from halfbyte.errors import FormatError, UsageError
from halfbyte.experts import GATE_UP_ORDERS
from halfbyte.layouts import Atoms8x4, Atoms128x4
from halfbyte.layouts.executors import arrange, restore
from halfbyte.modules import COMFY_TENSOR, Module, Reading
from halfbyte.numerics import BLOCK, FULL_SCALE, reciprocal
from halfbyte.stored import FLOATS, Stored, View, as_array, read_tensor

ATOMS: Final = {"128x4": Atoms128x4().scales, "8x4": Atoms8x4().scales}
"""The orders of swizzled block scales."""

NIBBLE_ORDERS: Final = ("low", "high")
SCALE_LAYOUTS: Final[dict[str, tuple[tuple[str, bool], ...]]] = {
    "linear": (),
    **{atom: ((atom, True),) for atom in ATOMS},
    **{f"{atom}-twice": ((atom, True), (atom, True)) for atom in ATOMS},
    **{f"{atom}-undone": ((atom, False),) for atom in ATOMS},
}
"""Name -> the steps that make scales linear: (atom, whether it is taken apart or put together)."""
SCALE2: Final = ("multiplier", "divisor", "amax")


def checked(reading: Reading) -> Reading:
    """``reading`` itself.

    Raises:
        UsageError: a value that is not known.
    """
    known = {"nibble_order": NIBBLE_ORDERS, "scale_layout": SCALE_LAYOUTS, "scale2": SCALE2, "gate_up": GATE_UP_ORDERS}
    for name, values in known.items():
        if (value := getattr(reading, name)) not in (None, *values):
            raise UsageError(f"unknown {name.replace('_', ' ')}", got=repr(value), expected=" or ".join(values))
    return reading


def reduced(reading: Reading, divides: bool) -> Reading:
    """``reading`` without what a dialect says anyway; ``divides`` is what it says of scale2."""
    plain = {"nibble_order": "low", "scale_layout": "linear", "scale2": "divisor" if divides else "multiplier"}
    return replace(reading, **{name: None for name, value in plain.items() if getattr(reading, name) == value})


def combined(first: Reading, second: Reading, divides: bool) -> Reading | None:
    """The reading that amounts to ``second`` of what ``first`` gives, reduced; None where none does."""
    first, second = reduced(first, divides), reduced(second, divides)
    steps: list[tuple[str, bool]] = []
    for atom, apart in (s for r in (first, second) for s in SCALE_LAYOUTS[r.scale_layout or "linear"]):
        if steps and steps[-1] == (atom, not apart):
            steps.pop()
        else:
            steps.append((atom, apart))
    layout = next((name for name, known in SCALE_LAYOUTS.items() if known == tuple(steps)), None)
    scale2 = first.scale2 or second.scale2
    if first.scale2 and second.scale2:
        if "amax" in (first.scale2, second.scale2):
            return None
        scale2 = None  # inverted twice
    if layout is None:
        return None
    swapped = (first.nibble_order == "high") != (second.nibble_order == "high")
    gate_up = second.gate_up or first.gate_up
    return reduced(Reading("high" if swapped else None, layout, scale2, gate_up), divides)


@dataclass(frozen=True)
class SwapNibbles:
    """The two codes of each byte exchanged."""

    in_place: ClassVar[bool] = True

    def __call__(self, raw: Any) -> Any:
        """Bytes in any shape, in the same."""
        return (raw << np.uint8(4)) | (raw >> np.uint8(4))


@dataclass(frozen=True)
class Rearrange:
    """Block scales (rows, blocks) of one or several matrices, taken out of the order of an atom, or put into it."""

    atom: str
    shape: tuple[int, int]
    apart: bool

    def __call__(self, raw: Any) -> Any:
        """Bytes of all matrices, one after the other; padded where they lie in the order of the atom."""
        order = ATOMS[self.atom]
        if self.apart:
            flat = raw.reshape(-1, order.count(self.shape)) if prod(self.shape) else raw.reshape(0, 0)
            return np.stack([restore(order, one, self.shape) for one in flat]) if len(flat) else raw
        return np.stack([arrange(order, one) for one in raw.reshape(-1, *self.shape)])


@dataclass(frozen=True)
class Rescale:
    """Numbers as the dialect means them from what is stored: 1 / x, amax / 2688 or 2688 / amax."""

    dtype: str
    amax: bool
    inverse: bool

    def __call__(self, raw: Any) -> Any:
        """The f32 numbers."""
        with np.errstate(all="ignore"):
            x = as_array(np.ascontiguousarray(raw), self.dtype, (-1,)).astype(np.float32)
            x = x / np.float32(FULL_SCALE) if self.amax else x
        return reciprocal(x) if self.inverse else x


def reread(module: Module, reading: Reading, divides: bool) -> Module:
    """The module as ``reading`` says that it is stored; ``divides`` is what its dialect says of scale2.

    Raises:
        FormatError: block scales whose number is not that of the layout, or of a stack that lies in columns.
    """
    if (reading.nibble_order or reading.scale_layout) and any(_is_mark(t) for t in module.unknown):
        module = replace(module, unknown=tuple(t for t in module.unknown if not _is_mark(t)))
    if module.kind != "nvfp4" or not reading or "codes" not in module.roles:
        return module
    roles = dict(module.roles)
    if reading.nibble_order == "high":
        roles["codes"] = _viewed(roles["codes"], SwapNibbles())
    if reading.scale_layout and "scales" in roles:
        roles["scales"] = _linear(module, roles["scales"], SCALE_LAYOUTS[reading.scale_layout])
    stored = roles.get("scale2")
    if reading.scale2 and stored is not None and stored.dtype in FLOATS:
        inverse = (reading.scale2 == "divisor") != divides
        if inverse or reading.scale2 == "amax":
            size = 4 * prod(stored.shape)
            step = Rescale(stored.dtype, reading.scale2 == "amax", inverse)
            roles["scale2"] = replace(_viewed(stored, step), dtype="F32", nbytes=size)
    return replace(module, roles=roles)


def _is_mark(tensor: Stored) -> bool:
    """Whether a tensor says how its weight is stored, which the caller knows better."""
    return tensor.name.rpartition(".")[2] == COMFY_TENSOR


def before_inversion(tensor: View) -> Any | None:
    """The f32 numbers whose reciprocals a view gives, in its shape; None where it gives none."""
    step = tensor.steps[-1]
    if not isinstance(step, Rescale) or not step.inverse:
        return None
    return read_tensor(replace(tensor, steps=(*tensor.steps[:-1], replace(step, inverse=False))))


def _viewed(tensor: Stored, *steps: Any) -> View:
    if isinstance(tensor, View):
        return replace(tensor, steps=(*tensor.steps, *steps))
    known = {f.name: getattr(tensor, f.name) for f in fields(tensor)}
    return View(**known, region=tensor.nbytes, steps=steps)


def _linear(module: Module, scales: Stored, steps: tuple[tuple[str, bool], ...]) -> Stored:
    """The block scales in rows; those in the order of an atom may be padded, and lose the padding."""
    *experts, n, k = module.shape
    shape = (n, -(-k // BLOCK))
    if not steps:
        return scales
    if module.stack is not None and module.stack.columns:
        raise FormatError(
            "block scales of a stack whose rows lie as columns are in no order of atoms",
            file=scales.file,
            tensor=scales.name,
            got=list(scales.shape),
        )
    order = ATOMS[steps[0][0]]
    padded = order.count(shape) * prod(experts)
    whole = prod(shape) * prod(experts)
    if scales.nbytes != padded or (padded != whole and steps != ((steps[0][0], True),)):
        raise FormatError(
            "block scales of this shape do not lie so",
            file=scales.file,
            tensor=scales.name,
            got=list(scales.shape),
            expected=f"{padded} bytes, whole tiles of {list(order.multiples)}",
        )
    made = [Rearrange(atom, shape, apart) for atom, apart in steps]
    return replace(_viewed(scales, *made), shape=(*experts, *shape), nbytes=whole)
