"""``halfbyte verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from halfbyte.cli.base import plural, progress, shared_options, show, size

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report


@click.command("verify")
@click.argument("path")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@click.option("--all", "every", is_flag=True, help="Report every offending block, not the first 100 of a tensor.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Read only these modules.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Do not read these modules.")
@click.option("--workers", type=int, default=None, help="Threads; by default one for each core.")
@shared_options
@click.pass_context
def command(
    ctx: click.Context,
    path: str,
    strict: bool,
    every: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove a checkpoint sound, or name the tensor, row and block that is not."""
    from halfbyte.tools.verify import verify

    with progress("verify", quiet or as_json) as meter:
        report = verify(path, every=every, include=include, exclude=exclude, workers=workers, progress=meter)
    show(report, as_json, quiet, _render)
    if not report.ok or (strict and report.count("warning")):
        ctx.exit(1)


def _render(report: Report, out: Console) -> None:
    facts = report.facts
    modules = ", ".join(f"{number} {kind}" for kind, number in facts["modules"].items()) or "no weights"
    rate = facts["bytes"] / 1e9 / max(facts["seconds"], 1e-9)
    found = ", ".join(plural(report.count(s), s) for s in ("error", "warning", "note"))
    out.print(f"{facts['path']}: {facts['dialect']}, {modules}; read {size(facts['bytes'])} at {rate:.2f} GB/s")
    out.print(f"{'sound' if report.ok else 'NOT SOUND'}: {found}")
