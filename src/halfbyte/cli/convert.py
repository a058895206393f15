"""``halfbyte convert``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import (
    DIALECTS,
    pairs,
    plural,
    progress,
    read_with,
    reading_options,
    shared_options,
    show,
    writing_options,
    wrote,
)

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report

EXPERTS = "[split|stacked|stacked-rows|stacked-columns]"


@click.command("convert")
@click.argument("src")
@click.argument("dst")
@click.option("--to", metavar=DIALECTS, help="Dialect to write.")
@click.option("--layout", metavar="NAME", help="Layout to pack NVFP4 weights in instead; see halfbyte layouts.")
@click.option("--experts", metavar=EXPERTS, help="One tensor for each expert, or for all of a layer.")
@click.option("--mxfp4", metavar="[keep|nvfp4]", help="MXFP4 layers: by default NVFP4 where there is no NVFP4 layer.")
@click.option("--lossy", is_flag=True, help="Round codes of MXFP4 where one scale2 cannot hold their scales.")
@click.option("--prove", is_flag=True, help="Read the result back and compare every weight before it gets its name.")
@click.option("--max-shard-size", default=None, help="Largest file; by default the shards stay as they are.")
@reading_options
@writing_options
@shared_options
def command(src: str, dst: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Write a quantized checkpoint in another dialect, without changing a code or a block scale.

    With --layout, such as "marlin(scale_format=s0e5m3)", weights become that layout's buffers, which --to brings back.

    The options on how the weights of SRC are stored (--nibble-order, --scale-layout, --scale2, --gate-up) are for
    checkpoints that do not lie as their dialect says: the result does.
    """
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
    rows += [("single", f"{name}: {reason}") for name, reason in facts.get("single", {}).items()]
    if "mxfp4" in facts:
        exact = sum(not entry["relative"] for entry in facts["mxfp4"])
        rows.append(("MXFP4", f"{exact} of {plural(len(facts['mxfp4']), 'layer')} as NVFP4 without changing a value"))
    if "layout" in facts:
        rows.append(("layout", facts["layout"]))
    if facts.get("zeroed"):
        blocks = sum(entry["blocks"] for entry in facts["zeroed"])
        rows.append(("zero blocks", f"codes of {plural(blocks, 'block')} whose scale is 0 are 0 now; no value changed"))
    if "proven" in facts:
        rows.append(("proven", f"{facts['proven']} tensors read back and equal to their source"))
    pairs(out, [("dialect", f"{facts['from']} -> {facts['to']}"), *read_with(facts), *rows, *wrote(report, out)])
