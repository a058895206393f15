"""``halfbyte convert``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import DIALECTS, pairs, progress, shared_options, show, writing_options, wrote

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report


@click.command("convert")
@click.argument("src")
@click.argument("dst")
@click.option("--to", required=True, metavar=DIALECTS, help="Dialect to write.")
@click.option("--prove", is_flag=True, help="Read the result back and compare every weight before it gets its name.")
@click.option("--max-shard-size", default=None, help="Largest file; by default the shards stay as they are.")
@writing_options
@shared_options
def command(src: str, dst: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Write a quantized checkpoint in another dialect, without changing a code or a block scale."""
    from halfbyte.tools.convert import convert

    with progress("convert", quiet or as_json) as meter:
        report = convert(src, dst, progress=meter, **options)
    show(report, as_json, quiet, _render)


def _render(report: Report, out: Console) -> None:
    facts = report.facts
    actions: dict[tuple[str, str], int] = {}
    for entry in facts["tensors"]:
        key = (entry["action"], entry["reason"])
        actions[key] = actions.get(key, 0) + 1
    rows: list[tuple[str, Any]] = [
        (action, f"{n} tensors ({reason})") for (action, reason), n in sorted(actions.items())
    ]
    rows += [(f["action"], f"{f['file']} ({f['reason']})") for f in facts.get("files", ())]
    if "proven" in facts:
        rows.append(("proven", f"{facts['proven']} tensors read back and equal to their source"))
    pairs(out, [("dialect", f"{facts['from']} -> {facts['to']}"), *rows, *wrote(report, out)])
