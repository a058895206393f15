"""``halfbyte inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import pairs, read_with, reading_options, shared_options, show, size
from halfbyte.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report
    from halfbyte.modules import Reading


@click.command("inspect")
@click.argument("path")
@click.option("--stats", is_flag=True, help="Also read the scales of every NVFP4 weight.")
@click.option("--include", multiple=True, metavar="PATTERN", help="List only these modules.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out these modules.")
@reading_options
@shared_options
@click.pass_context
def command(
    ctx: click.Context,
    path: str,
    reading: Reading,
    stats: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Show what a checkpoint holds, from its headers alone.

    --nibble-order, --scale-layout, --scale2 and --gate-up say how the NVFP4 weights are stored, where that is not what
    their dialect says.
    """
    from halfbyte.tools.inspect import inspect

    report = inspect(path, reading=reading, stats=stats, include=include, exclude=exclude)
    show(report, as_json, quiet, _render)
    if not report.facts["readable"]:
        ctx.exit(2)


def _render(report: Report, out: Console) -> None:
    from rich.table import Table

    facts = report.facts
    total, config = facts["total"], facts["config"]
    claims = [f"{k} {v}" for k, v in config.items() if v and k != "model_type"]
    files = facts["files"]
    bits = total.get("bits_per_parameter")
    pairs(
        out,
        [
            ("checkpoint", facts["path"]),
            ("dialect", facts["dialect"] + (f" ({facts['evidence']})" if facts["evidence"] else "")),
            *read_with(facts),
            ("config says", ", ".join(claims) or "nothing about quantization"),
            ("files", f"{len(files)}, {size(sum(f['bytes'] for f in files))}"),
            ("tensors", f"{facts['tensors']}, {size(total['bytes'])}"),
        ]
        + ([("parameters", f"{total['parameters']:,} at {bits} bits each")] if bits else []),
    )
    if not facts["readable"]:
        return
    table = Table(box=None, pad_edge=False, title_justify="left")
    for name in ("modules", "kind", "number", "shape", "bits/param", "bytes", "beside the weight"):
        table.add_column(
            name, justify="right" if name in ("number", "bits/param", "bytes") else "left", overflow="fold"
        )
    for group in facts["groups"]:
        table.add_row(*(printable(str(cell)) for cell in _row(group)))
    for kind, sums in facts["kinds"].items():
        table.add_row(
            f"all {kind}", "", str(sums["modules"]), "", str(sums["bits_per_parameter"]), size(sums["bytes"]), ""
        )
    out.print()
    out.print(table)
    if "stats" in facts:
        out.print()
        out.print(_stats_table(facts["stats"]))


def _row(group: dict[str, Any]) -> list[Any]:
    shapes = group["shapes"]
    shown = ", ".join("x".join(map(str, s)) or "scalar" for s in shapes[:2]) + (" ..." if len(shapes) > 2 else "")
    beside = ", ".join(role for role in group["has"] if role not in ("scale2", "scale"))
    kind = group["kind"] if group["kind"] not in ("dense", "other") else f"{group['kind']} {group['dtype']}"
    return [group["name"], kind, group["modules"], shown, group["bits_per_parameter"], size(group["bytes"]), beside]


def _stats_table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("module", "scale2", "largest scale", "zero %", "subnormal %", "448 %", "looks like"):
        left, whole = name in ("module", "looks like"), name == "module"
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=whole)
    for row in rows:
        shares = [f"{100 * row[key]:.3g}" for key in ("zero", "subnormal", "largest")]
        table.add_row(
            printable(row["name"]), f"{row['scale2']:.4g}", f"{row['largest_scale']:g}", *shares, row["recipe"]
        )
    return table
