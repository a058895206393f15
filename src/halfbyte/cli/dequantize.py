"""``halfbyte dequantize``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import (
    pairs,
    progress,
    read_with,
    reading_options,
    shared_options,
    show,
    size,
    writing_options,
    wrote,
)

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report


@click.command("dequantize")
@click.argument("src")
@click.argument("dst")
@click.option(
    "--dtype",
    default=None,
    metavar="[float32|bfloat16|float16]",
    help="Of the weights that were quantized; by default that of config.json.",
)
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file.")
@reading_options
@writing_options
@shared_options
def command(src: str, dst: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Write the values of a quantized checkpoint as a dense one.

    --nibble-order, --scale-layout, --scale2 and --gate-up say how the NVFP4 weights of SRC are stored, where that is
    not what their dialect says.
    """
    from halfbyte.tools.dequantize import dequantize_checkpoint

    with progress("dequantize", quiet or as_json) as meter:
        report = dequantize_checkpoint(src, dst, executor="processes", progress=meter, **options)
    show(report, as_json, quiet, _render)


def _render(report: Report, out: Console) -> None:
    facts = report.facts
    dropped: dict[str, int] = {}
    for entry in facts["tensors"]:
        if entry["action"] == "dropped":
            dropped[entry["reason"]] = dropped.get(entry["reason"], 0) + 1
    rows: list[tuple[str, Any]] = [("dropped", f"{number} tensors ({reason})") for reason, number in dropped.items()]
    sizes = f"{size(facts['bytes_in'])} -> {size(facts['bytes_out'])} in {facts['dtype']}"
    pairs(out, [("tensors", sizes), *read_with(facts), *rows, *wrote(report, out)])
