"""``halfbyte bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import model_options, numbers, pairs, progress, shared_options, show, size
from halfbyte.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report


@click.command("bench")
@click.argument("path")
@click.option("--prompt", default="512", show_default=True, metavar="M,...", help="Tokens of a prompt.")
@click.option("--new", type=int, default=64, show_default=True, metavar="M", help="Tokens that follow.")
@click.option("--batch", default="1", show_default=True, metavar="B,...", help="Prompts at once.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Of which the median is taken.")
@click.option("--against", metavar="PATH", help="Another checkpoint of the model, such as the dense one, in turn.")
@click.option("--anyway", is_flag=True, help="Measure though something is known to disturb.")
@model_options
@shared_options
def command(
    path: str, prompt: str, new: int, batch: str, rounds: int, against: str | None, anyway: bool, as_json: bool,
    quiet: bool, no_fuse: bool, layout: str | None, precision: str, **given: Any,
) -> None:  # fmt: skip
    """Measure how fast a checkpoint takes prompts and generates, beside what its device reads at best.

    Prompts are random tokens. `share` is what a step reads over what the device reads at best, measured in this run: 1
    is a step that waits for nothing but weights and cache. Where other programs keep the machine busy, or a variable
    slows kernels down, nothing is measured.
    """
    from halfbyte.session import Session, device_of, require

    require("halfbyte bench")
    from halfbyte.model_bench import Options, bench, settled

    options = Options(tuple(numbers(prompt, "--prompt")), new, tuple(numbers(batch, "--batch")), rounds)
    disturbed = settled(device_of(given["device"]), anyway)
    names = [path] if against is None else [path, against]
    sessions = {
        name: Session.load(
            name, tokenizer=False, fuse=not no_fuse, layout=layout, precision=precision if name == path else "exact",
            **given,
        )
        for name in names
    }  # fmt: skip
    with progress("bench", quiet or as_json, "calls") as report:
        found = bench(sessions, options, disturbed=disturbed, progress=report)
    show(found, as_json, quiet, _render)


def _render(report: Report, out: Console) -> None:
    from rich.table import Table

    facts = report.facts
    table = Table(box=None, pad_edge=False)
    columns = ("model", "prompt", "batch", "prefill ms", "tokens/s", "step ms", "tokens/s", "GB/s", "share", "faster")
    for head in columns:
        table.add_column(head, justify="left" if head == "model" else "right", no_wrap=True)
    for row in facts["rows"]:
        times = row["first_is_faster"]
        first = times["decode"] == times["prefill"] == 1
        cells = (
            Path(row["model"]).name,
            row["prompt"],
            row["batch"],
            f"{1e3 * row['prefill_seconds']:,.2f}",
            f"{row['prefill_tokens_per_second']:,.0f}",
            f"{1e3 * row['step_seconds']:,.3f}",
            f"{row['tokens_per_second']:,.1f}",
            f"{row['read'] / 1e9:,.1f}" if row["read"] else "-",
            f"{row['share']:.2f}" if row["share"] else "-",
            "" if first else f"{times['prefill']:.2f} x, {times['decode']:.2f} x",
        )
        table.add_row(*(printable(str(cell)) for cell in cells))
    out.print(table)
    out.print()
    place = facts["gpu"] or f"{facts['device']}, {facts['threads']} threads"
    rows = [
        ("device", place),
        ("reads", f"{size(facts['read'])}/s at best, measured in this run"),
        ("median of", f"{facts['rounds']} rounds of {facts['new']} tokens"),
    ]
    rows += [("weights", f"{name}: {size(count)}") for name, count in facts["weight_bytes"].items()]
    rows += [("how", f"{name}: {how}") for name, how in facts["how"].items()]
    if len(facts["how"]) > 1:
        rows.append(("faster", "how many times as fast the first model is: prefill, step"))
    rows += [("DISTURBED", reason) for reason in facts["disturbed"]]
    pairs(out, rows)
