"""``halfbyte layouts``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import pairs, shared_options, show

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report
    from halfbyte.layouts import Layout


ZERO_BLOCKS = {
    "kept": "the codes of blocks whose scale is 0 are kept",
    "canonical": "the codes of blocks whose scale is 0 are packed as 0, and come back as 0",
}
"""What a layout's ``zero_blocks`` means, in words."""


@click.command("layouts")
@click.argument("name", required=False)
@shared_options
def command(name: str | None, as_json: bool, quiet: bool) -> None:
    """List the layouts of packed weights; with NAME, show where one puts its bytes.

    NAME may have fields: "marlin(scale_format=s0e5m3)".
    """
    from halfbyte.findings import Report
    from halfbyte.layouts import LAYOUTS, parse
    from halfbyte.layouts.drawing import drawing

    if name is None:
        facts: dict[str, Any] = {"layouts": [_facts(layout) for layout in LAYOUTS]}
    else:
        known = {layout.name: layout for layout in LAYOUTS}
        layout = known.get(name.strip()) or parse(name)
        facts = {"layouts": [_facts(layout) | {"drawing": drawing(layout)}]}
    show(Report("layouts", facts=facts), as_json, quiet, _list if name is None else _one)


def _facts(layout: Layout) -> dict[str, Any]:
    """What is to be said of a layout, as JSON."""
    import dataclasses
    import inspect
    from math import lcm

    from halfbyte.layouts import Layout

    inner = [layout]
    fields = []
    for field in dataclasses.fields(layout):
        value = getattr(layout, field.name)
        if isinstance(value, Layout):
            inner.append(value)
        needed = field.default is dataclasses.MISSING
        choices = layout.choices.get(field.name, (False, True) if isinstance(value, bool) else None)
        fields.append(
            {
                "name": field.name,
                "value": value.key if isinstance(value, Layout) else value,
                "default": None if needed else field.default,
                "choices": None if choices is None else list(choices),
                "type": "layout" if isinstance(value, Layout) else type(value).__name__,
            }
        )
    n, k = (lcm(*(one.multiples[axis] for one in inner)) for axis in range(2))
    return {
        "name": layout.name,
        "key": layout.key,
        "about": inspect.cleandoc(type(layout).__doc__ or "").partition("\n\n")[0].replace("\n", " "),
        "used_by": layout.used_by,
        "needs": {"n": n, "k": k},
        "refuses": layout.refuses,
        "zero_blocks": layout.zero_blocks,
        "buffers": [*layout.buffers, *layout.extras],
        "fields": fields,
    }


def _needs(entry: dict[str, Any]) -> str:
    found = [f"{axis.upper()} % {multiple} == 0" for axis, multiple in entry["needs"].items() if multiple > 1]
    return " and ".join(found) or "any shape"


def _choices(field: dict[str, Any]) -> str:
    """A field as text: its choices, or its type, the value that it has marked."""
    if field["choices"] is None:
        return f"{field['name']}={field['value']}"
    listed = "|".join(str(choice) for choice in field["choices"])
    return f"{field['name']}={listed} ({field['value']})"


def _list(report: Report, out: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("layout", "needs", "buffers", "used by"):
        table.add_column(title, no_wrap=True)
    for entry in report.facts["layouts"]:
        table.add_row(entry["name"], _needs(entry), ", ".join(entry["buffers"]), entry["used_by"])
    out.print(table)
    out.print("halfbyte layouts NAME tells the fields of one, what it refuses, and where its bytes go")


def _one(report: Report, out: Console) -> None:
    (entry,) = report.facts["layouts"]
    rows = [
        ("layout", entry["key"]),
        ("about", entry["about"]),
        ("used by", entry["used_by"]),
        ("needs", _needs(entry)),
        ("refuses", entry["refuses"]),
        ("zero blocks", ZERO_BLOCKS[entry["zero_blocks"]]),
        ("buffers", ", ".join(entry["buffers"])),
    ]
    pairs(out, rows + [("field", _choices(field)) for field in entry["fields"]])
    out.print()
    out.print(entry["drawing"])
