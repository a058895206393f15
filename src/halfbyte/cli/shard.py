"""``halfbyte shard``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import GATE_UP, pairs, plural, progress, shared_options, show, size, writing_options, wrote

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report

AXES = {
    "column": "along N (column-parallel)",
    "row": "along K (row-parallel)",
    "experts": "between experts (expert-parallel)",
}


@click.command("shard")
@click.argument("src")
@click.argument("dst")
@click.option("--tp", type=int, metavar="N", help="Ranks of tensor parallelism: layers are cut.")
@click.option("--ep", type=int, metavar="N", help="Ranks of expert parallelism: experts are dealt.")
@click.option(
    "--multiple", type=int, default=16, show_default=True, help="K of 4-bit layers is cut at multiples of it."
)
@click.option("--vocab", is_flag=True, help="Cut embeddings and output heads, too.")
@click.option("--column", multiple=True, metavar="PATTERN", help="These modules are column-parallel: cut along N.")
@click.option("--row", multiple=True, metavar="PATTERN", help="These modules are row-parallel: cut along K.")
@click.option("--keep", multiple=True, metavar="PATTERN", help="These modules stay whole on every rank.")
@click.option("--gate-up", metavar=GATE_UP, help="Order of gate and up in stacks of experts.")
@click.option("--no-prove", is_flag=True, help="Do not read the result back and compare it before it gets its name.")
@writing_options
@shared_options
def command(src: str, dst: str, as_json: bool, quiet: bool, no_prove: bool, **options: Any) -> None:
    """Write a checkpoint for each rank of tensor or expert parallelism, without changing a bit.

    DST/rank-00000-of-0000N and so on are checkpoints of the dialect of SRC. Layers are known by their names (q_proj,
    gate_proj, w1 ...: cut along N; o_proj, down_proj, w2 ...: along K); all else is on every rank.
    """
    from halfbyte.tools.shard import shard

    with progress("shard", quiet or as_json) as meter:
        report = shard(src, dst, prove=not no_prove, progress=meter, **options)
    show(report, as_json, quiet, _render)


def _render(report: Report, out: Console) -> None:
    facts = report.facts
    cut = Counter(entry["parallel"] for entry in facts["modules"])
    rows: list[tuple[str, Any]] = [("dialect", facts["dialect"]), ("ranks", f"{facts['degree']} ({facts['mode']})")]
    rows += [("cut", f"{plural(count, 'module')} {AXES[how]}") for how, count in sorted(cut.items())]
    rows += [("whole", f"{name} ({why})") for name, why in facts["whole"].items()]
    rows += [("rank", f"{entry['path']}: {size(entry['bytes'])}") for entry in facts["ranks"]]
    if "proven" in facts:
        rows.append(("proven", f"{facts['proven']} tensors read back and equal to that part of the source"))
    pairs(out, rows + wrote(report, out))
