"""``halfbyte verify``."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import plural, progress, reading_options, shared_options, show, size
from halfbyte.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report
    from halfbyte.modules import Reading

QUICK = 0.01
"""The share of rows that ``--sample`` reads."""
WORST = 10
"""Modules that ``--against`` lists."""


@click.command("verify")
@click.argument("path", required=False)
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@click.option("--all", "every", is_flag=True, help="Report every offending block, not the first 100 of a tensor.")
@click.option("--sample", is_flag=True, help=f"A quick look: all scalars and {QUICK:.0%} of the rows.")
@click.option("--explain", metavar="CODE", help="Say what a code of a finding means, or list all: --explain all.")
@click.option("--against", metavar="DENSE", help="Measure every weight against the checkpoint it was made from.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Read only these modules.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Do not read these modules.")
@click.option("--workers", type=int, default=None, help="Threads; by default one for each core.")
@reading_options
@shared_options
@click.pass_context
def command(
    ctx: click.Context,
    path: str | None,
    strict: bool,
    every: bool,
    sample: bool,
    explain: str | None,
    against: str | None,
    reading: Reading,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove a checkpoint sound, or name the tensor, row and block that is not.

    --nibble-order, --scale-layout, --scale2 and --gate-up say how the NVFP4 weights are stored, where that is not what
    their dialect says; findings are of what is read so. With --against, the last line is the command that repairs the
    checkpoint, where one does.
    """
    if explain is not None:
        _explain(explain, path, as_json)
        return
    if path is None:
        raise click.MissingParameter(ctx=ctx, param=next(p for p in ctx.command.params if p.name == "path"))
    from halfbyte.tools.verify import verify

    share = QUICK if sample else None
    with progress("verify", quiet or as_json) as meter:
        report = verify(
            path,
            against,
            reading=reading,
            every=every,
            sample=share,
            include=include,
            exclude=exclude,
            workers=workers,
            progress=meter,
        )
    show(report, as_json, quiet, _render)
    if not report.ok or (strict and report.count("warning")):
        ctx.exit(1)


def _explain(code: str, path: str | None, as_json: bool) -> None:
    """Print what a code means, or the table of all."""
    from halfbyte.errors import UsageError
    from halfbyte.explanations import explain
    from halfbyte.findings import CODES, Report

    if path is not None:
        raise UsageError("--explain reads no checkpoint", got=path, expected="--explain CODE alone")
    wanted = CODES if code.strip().lower() == "all" else [code]
    texts = {known.strip().upper(): explain(known) for known in wanted}
    if as_json:
        keys = ("code", "severity", "message", "explanation")
        listed = [dict(zip(keys, (known, *CODES[known], text), strict=True)) for known, text in texts.items()]
        print(json.dumps(Report("verify", (), {"explanations": listed}).json()))
        return
    for known, text in texts.items():
        severity, message = CODES[known]
        if len(texts) == 1:
            print(f"{known} {severity}: {message}\n\n{textwrap.fill(text, 100, break_on_hyphens=False)}")
        else:
            print(f"{known}  {severity:7}  {message}")


def _render(report: Report, out: Console) -> None:
    facts = report.facts
    modules = ", ".join(f"{number} {kind}" for kind, number in facts["modules"].items()) or "no weights"
    rate = facts["bytes"] / 1e9 / max(facts["seconds"], 1e-9)
    found = ", ".join(plural(report.count(s), s) for s in ("error", "warning", "note"))
    read = f"read {size(facts['bytes'])}"
    if facts["sample"] is not None:
        read += f", a sample of {100 * facts['share']:.3g} %,"
    out.print(f"{facts['path']}: {facts['dialect']}, {modules}; {read} at {rate:.2f} GB/s")
    if facts["reading"]:
        out.print(f"read with {' '.join(facts['reading'])}")
    sound = "sound" if facts["sample"] is None else "nothing wrong in the sample"
    if facts["selected"] < sum(facts["modules"].values()):
        sound = f"nothing wrong in the {plural(facts['selected'], 'module')} that were read"
    out.print(f"{sound if report.ok else 'NOT SOUND'}: {found}")
    if "against" in facts:
        _render_against(facts, out)


def _render_against(facts: dict[str, Any], out: Console) -> None:
    """The ten modules with the largest errors, and all together."""
    from rich.table import Table

    overall, rows = facts["against_overall"], sorted(facts["against"], key=lambda row: -row["relative"])
    table = Table(box=None, pad_edge=False)
    for name in ("module", "relative error", "SQNR dB", "worst block", "its error", "reading"):
        left = name in ("module", "reading")
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=name == "module")
    for row in rows[:WORST]:
        at, worst = ", ".join(map(str, row["worst"])), f"{row['worst_relative']:.4f}"
        numbers = (f"{row['relative']:.4f}", f"{row['sqnr']:.2f}", f"[{at}]", worst)
        table.add_row(printable(row["name"]), *numbers, printable(row["reading"] or ""))
    if len(rows) > WORST:
        table.add_row(f"... {len(rows) - WORST} more with smaller errors")
    table.add_row(f"all {overall['modules']}", f"{overall['relative']:.4f}", f"{overall['sqnr']:.2f}")
    out.print(f"against {printable(overall['path'])}")
    out.print(table)
    if overall["repair"] or overall["advice"]:
        out.print(printable(f"repair: {overall['repair'] or overall['advice']}"))
