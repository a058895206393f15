"""``halfbyte quantize``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import DIALECTS, pairs, progress, shared_options, show, size, writing_options, wrote
from halfbyte.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report


@click.command("quantize")
@click.argument("src")
@click.argument("dst")
@click.option("--recipe", default="rtn", show_default=True, metavar="[rtn]", help="How scales and codes are chosen.")
@click.option("--like", default="modelopt", show_default=True, metavar=DIALECTS, help="Whose bytes to reproduce.")
@click.option("--to", default="modelopt", show_default=True, metavar=DIALECTS, help="Dialect to write.")
@click.option("--targets", multiple=True, metavar="PATTERN", help="Quantize these modules instead of the default.")
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Leave these modules dense.")
@click.option("--share-scale2", is_flag=True, help="One scale2 for the parts that engines fuse (q/k/v, gate/up).")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file.")
@writing_options
@shared_options
def command(src: str, dst: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Quantize a dense checkpoint to NVFP4.

    A PATTERN is a module name or its beginning, an fnmatch pattern, re:REGEX, or Linear or Embedding. By default
    every floating 2-D weight with K % 16 == 0 is quantized but embeddings, lm_head, norms and routers.
    """
    from halfbyte.tools.quantize import quantize_checkpoint

    with progress("quantize", quiet or as_json) as meter:
        report = quantize_checkpoint(src, dst, executor="processes", progress=meter, **options)
    show(report, as_json, quiet, _render)


def _render(report: Report, out: Console) -> None:
    facts = report.facts
    reasons: dict[str, list[str]] = {}
    for entry in facts["skipped"]:
        reasons.setdefault(entry["reason"], []).append(entry["name"])
    for reason, names in reasons.items():
        # Norms and biases are many and never in doubt; matrices left dense are listed by name.
        listed = names if reason not in ("not a matrix", "not a weight", "not a target") else names[:1]
        for name in listed:
            out.print(printable(f"left as it is: {name} ({reason})"))
        if len(listed) < len(names):
            out.print(f"left as it is: {len(names) - len(listed)} more ({reason}; --json lists them)")
    pairs(
        out,
        [
            ("quantized", f"{len(facts['quantized'])} weights with {facts['recipe']}, for {facts['dialect']}"),
            ("tensors", f"{size(facts['bytes_in'])} -> {size(facts['bytes_out'])}"),
            *wrote(report, out),
        ],
    )
