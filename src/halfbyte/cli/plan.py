"""``halfbyte plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import numbers, pairs, shared_options, show, size
from halfbyte.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report


@click.command("plan")
@click.argument("path")
@click.option("--device", default="cpu", show_default=True, metavar="[cpu|cuda|cuda:sm_90]", help="That it runs on.")
@click.option("--tokens", default="1,16,512", show_default=True, metavar="M,...", help="Tokens of a step.")
@click.option("--precision", default="exact", show_default=True, metavar="[exact|int8|fp8|w4a4]", help="Of products.")
@click.option("--dtype", metavar="[bfloat16|float16|float32]", help="Of activations; by default the config's.")
@click.option("--layout", metavar="NAME", help="Of NVFP4 weights; by default fragments on a GPU, else rows.")
@click.option("--no-fuse", is_flag=True, help="q, k, v and gate, up are products of their own.")
@click.option("--ranks", default=1, show_default=True, metavar="N", help="Split over N GPUs; all is told of one.")
@click.option("--expert-parallel", is_flag=True, help="Ranks have whole experts, not columns of all.")
@shared_options
def command(path: str, tokens: str, no_fuse: bool, as_json: bool, quiet: bool, **given: Any) -> None:
    """Show which kernels would run a checkpoint, how long they take, and the memory held.

    Reads headers alone, and runs nothing. --device cuda:sm_90 plans for a GPU that is elsewhere: neither torch nor a
    GPU is needed here. `us` is what is expected of one product, >= where it is only known what the GPU takes at the
    least; `ideal` is that over the former.
    """
    from halfbyte.tools.plan import plan

    report = plan(path, tokens=numbers(tokens, "tokens"), fuse=not no_fuse, **given)
    show(report, as_json, quiet, _render)


def _render(report: Report, out: Console) -> None:
    from rich.table import Table

    facts = report.facts
    gpu = f" ({facts['gpu']}, reads {facts['read'] / 1e12:.3g} TB/s at best)" if facts["read"] else ""
    pairs(
        out,
        [
            ("checkpoint", f"{facts['path']}, {facts['dialect']}"),
            ("device", facts["device"] + gpu),
            ("products", f"{facts['precision']}, {facts['dtype']}{', fused' if facts['fused'] else ''}"),
            *([("ranks", f"{facts['ranks']}, of which one is shown")] if facts["ranks"] > 1 else []),
        ],
    )
    table = Table(box=None, pad_edge=False)
    for head in ("product", "kind", "shape", "number", "M", "calls", "kernel", "MB", "us", "ideal", "why", "how"):
        words = head in ("product", "kind", "kernel", "how")
        table.add_column(head, justify="left" if words else "right", overflow="fold", no_wrap=head != "how")
    reasons: dict[str, int] = {}
    for layer in facts["layers"]:
        for first, made in zip((True, *[False] * len(layer["plans"])), layer["plans"], strict=False):
            table.add_row(*(printable(cell) for cell in (*_head(layer, first), *_cells(made, reasons))))
    out.print()
    out.print(table)
    out.print()
    pairs(out, [(f"why {number}", why) for why, number in reasons.items()])
    out.print()
    pairs(out, [*_steps(facts), *_memory(facts["memory"]), *(("note", note) for note in facts["notes"])])


def _head(layer: dict[str, Any], first: bool) -> list[str]:
    if not first:
        return [""] * 4
    number = str(layer["count"]) + (f" x {layer['experts']}" if layer["experts"] else "")
    return [layer["name"], layer["kind"], "x".join(map(str, layer["shape"])), number]


def _cells(made: dict[str, Any], reasons: dict[str, int]) -> list[str]:
    seconds, at_least = made["expected"] or made["least"], "" if made["expected"] else ">= "
    return [
        str(made["rows"]),
        f"{made['calls']:g}",
        made["kernel"] or "none",
        f"{made['bytes'] / 1e6:.2f}",
        f"{at_least}{1e6 * seconds:.1f}" if seconds else "-",
        f"{made['share']:.2f}" if made["share"] else "-",
        str(reasons.setdefault(made["why"], len(reasons) + 1)),
        made["configuration"],
    ]


def _steps(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for step in facts["steps"]:
        text = f"{size(step['weight_bytes'])} of weights"
        if step["seconds"]:
            at_least = ">= " if step["not_measured"] else ""
            text += (
                f", all products {at_least}{1e3 * step['seconds']:.3f} ms ({step['tokens_per_second']:,.0f} tokens/s)"
            )
        if step["bound_tokens_per_second"]:
            text += f"; reading the weights allows {step['bound_tokens_per_second']:,.0f} tokens/s"
        if step["sums"]:
            text += f"; {step['sums']} sums over the ranks of {size(step['sum_bytes'])} each"
        rows.append((f"step of {step['tokens']}", text))
    return rows


def _memory(memory: dict[str, Any]) -> list[tuple[str, str]]:
    kinds = ", ".join(
        f"{kind.replace('_', ' ')} {size(memory[kind])}"
        for kind in ("nvfp4", "fp8", "dense", "head", "embedding", "other", "held_twice")
        if memory[kind]
    )
    cache = memory["cache_of_1000_tokens"]
    return [
        ("memory", f"{size(memory['weights'])} of weights: {kinds}"),
        ("KV cache", "unknown: the config does not tell" if cache is None else f"{size(cache)} for 1000 tokens"),
        *([("scratch", size(memory["scratch"]))] if memory["scratch"] else []),
    ]
