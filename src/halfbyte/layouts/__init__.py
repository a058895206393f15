"""Layouts: where the bytes of a weight go. The table below is the whole set; a new layout adds one line."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from halfbyte.errors import LayoutError
from halfbyte.layouts.base import Layout, Order, Packed
from halfbyte.layouts.rows import Rows

LAYOUTS: tuple[Layout, ...] = (Rows(),)

__all__ = ["LAYOUTS", "Layout", "Order", "Packed", "Rows", "parse"]


def parse(key: str) -> Layout:
    """The layout that ``key`` names, such as ``"rows"``; fields follow in parentheses.

    Raises:
        LayoutError: an unknown name or field.
    """
    match = re.fullmatch(r"(\w+)(?:\((\w+=[^=,()]+(?:,\s*\w+=[^=,()]+)*)\))?", key.strip())
    known = {layout.name: layout for layout in LAYOUTS}
    if match is None or match[1] not in known:
        raise LayoutError("unknown layout", got=repr(key), expected=" or ".join(known))
    layout = known[match[1]]
    fields = dict(part.split("=") for part in re.split(r",\s*", match[2] or "") if part)
    default = {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)}
    if not set(fields) <= set(default):
        raise LayoutError(f"layout {layout.name} has no such field", got=sorted(fields), expected=sorted(default))
    return dataclasses.replace(layout, **{name: _value(text, default[name]) for name, text in fields.items()})


def _value(text: str, default: Any) -> Any:
    """``text`` as a value of the default's type."""
    try:
        return {"True": True, "False": False}[text] if isinstance(default, bool) else type(default)(text)
    except (KeyError, ValueError):
        raise LayoutError("not a value of that field", got=repr(text), expected=type(default).__name__) from None
