"""Layouts: where the bytes of a weight go. The table below is the whole set; a new layout adds one line."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from halfbyte.errors import LayoutError
from halfbyte.layouts.atoms import Atoms8x4, Atoms128x4
from halfbyte.layouts.base import Layout, Packable, Packed
from halfbyte.layouts.columns import Columns
from halfbyte.layouts.comfy import Comfy
from halfbyte.layouts.executors import Executor, executor
from halfbyte.layouts.experts_out_pair import ExpertsOutPair
from halfbyte.layouts.fragments import Fragments
from halfbyte.layouts.gate_up import GateUp
from halfbyte.layouts.gguf import Gguf
from halfbyte.layouts.marlin import Marlin
from halfbyte.layouts.npacked import NPacked
from halfbyte.layouts.order import Order
from halfbyte.layouts.rows import Rows
from halfbyte.layouts.tiles64 import Tiles, Tiles64
from halfbyte.layouts.trtllm import Trtllm

LAYOUTS: tuple[Layout, ...] = (
    Rows(),
    Columns(),
    NPacked(),
    Atoms128x4(),
    Atoms8x4(),
    Tiles64(),
    ExpertsOutPair(),
    Marlin(),
    Trtllm(),
    Comfy(),
    Gguf(),
    Fragments(),
    GateUp("up_first", Rows()),
)

__all__ = [
    "LAYOUTS",
    "Atoms8x4",
    "Atoms128x4",
    "Columns",
    "Comfy",
    "Executor",
    "ExpertsOutPair",
    "Fragments",
    "GateUp",
    "Gguf",
    "Layout",
    "Marlin",
    "NPacked",
    "Order",
    "Packable",
    "Packed",
    "Rows",
    "Tiles",
    "Tiles64",
    "Trtllm",
    "executor",
    "parse",
]

_FIELD = r"\w+=[^=,()]+(?:\([^()]*\))?"


def parse(key: str) -> Layout:
    """The layout that ``key`` names, such as ``"rows"``; fields follow in parentheses, as in ``"columns(align=128)"``.

    A field that is a layout is written as its key: ``"gate_up(order=up_first, layout=columns(align=128))"``.

    Raises:
        LayoutError: an unknown name or field.
    """
    match = re.fullmatch(rf"(\w+)(?:\(({_FIELD}(?:,\s*{_FIELD})*)\))?", key.strip())
    known = {layout.name: layout for layout in LAYOUTS}
    if match is None or match[1] not in known:
        raise LayoutError("unknown layout", got=repr(key), expected=" or ".join(known))
    layout = known[match[1]]
    given = dict(field.split("=", 1) for field in re.findall(_FIELD, match[2] or ""))
    fields = {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)}
    if not set(given) <= set(fields):
        raise LayoutError(f"layout {layout.name} has no such field", got=sorted(given), expected=sorted(fields))
    needed = {f.name for f in dataclasses.fields(layout) if f.default is dataclasses.MISSING}
    if not needed <= set(given):
        raise LayoutError(f"layout {layout.name} lacks a field", got=sorted(given), expected=sorted(needed))
    return dataclasses.replace(layout, **{name: _value(text, fields[name]) for name, text in given.items()})


def _value(text: str, default: Any) -> Any:
    """``text`` as a value of the default's type."""
    if isinstance(default, Layout):
        return parse(text)
    try:
        return {"True": True, "False": False}[text] if isinstance(default, bool) else type(default)(text)
    except (KeyError, ValueError):
        raise LayoutError("not a value of that field", got=repr(text), expected=type(default).__name__) from None
