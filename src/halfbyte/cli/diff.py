"""``halfbyte diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from halfbyte.cli.base import plural, progress, reading_options, shared_options, show, size

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report
    from halfbyte.modules import Reading


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--include", multiple=True, metavar="PATTERN", help="Compare only these modules.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Do not compare these modules.")
@click.option("--workers", type=int, default=None, help="Threads; by default one for each core.")
@reading_options
@shared_options
@click.pass_context
def command(
    ctx: click.Context,
    a: str,
    b: str,
    reading: Reading,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare two checkpoints by value, whatever their dialects; exit with 1 where they differ.

    --nibble-order, --scale-layout, --scale2 and --gate-up say how the NVFP4 weights of A are stored, where that is not
    what their dialect says; B is read as its dialect says.
    """
    from halfbyte.tools.diff import diff

    with progress("diff", quiet or as_json) as meter:
        report = diff(a, b, reading=reading, include=include, exclude=exclude, workers=workers, progress=meter)
    show(report, as_json, quiet, _render)
    if not report.ok:
        ctx.exit(1)


def _render(report: Report, out: Console) -> None:
    facts = report.facts
    for side, dialect in zip("ab", facts["dialects"], strict=True):
        reading = f", read with {' '.join(facts['reading'])}" if side == "a" and facts["reading"] else ""
        out.print(f"{side}: {facts[side]}: {dialect}{reading}")
    rate = facts["bytes"] / 1e9 / max(facts["seconds"], 1e-9)
    out.print(f"compared {size(facts['bytes'])} of a at {rate:.2f} GB/s")
    told = [f"{plural(facts['same'], 'module')} the same", f"{facts['same_values']} the same values in other bytes"]
    told += [f"{facts['different']} different", f"{facts['only_a']} only in a", f"{facts['only_b']} only in b"]
    out.print(f"{'equal' if report.ok else 'DIFFERENT'}: {', '.join(told)}")
