"""``halfbyte doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from halfbyte.cli.base import pairs, shared_options, show, size

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report


@click.command("doctor")
@shared_options
def command(as_json: bool, quiet: bool) -> None:
    """Show what this machine and installation can do."""
    from halfbyte.tools.doctor import doctor

    show(doctor(), as_json, quiet, _render)


def _render(report: Report, out: Console) -> None:
    facts = report.facts
    gpus = [f"{g['name']}, {size(g['bytes'])}, sm_{g['capability'].replace('.', '')}" for g in facts["gpus"]]
    kernels = {place.upper(): held for place, held in facts["kernels"].items()}
    pairs(
        out,
        [
            ("python", f"{facts['python']} on {facts['platform']}"),
            ("processor", f"{facts['cpu']['model']}, {facts['cores']} cores"),
            ("instructions", ", ".join(facts["cpu"]["features"]) or "unknown"),
            ("gpus", "; ".join(gpus) or "none that torch sees"),
            ("packages", ", ".join(f"{name} {v or '-'}" for name, v in facts["packages"].items())),
            ("layouts", facts["layouts"]),
            ("quantize", facts["quantize"]),
            ("dequantize", facts["dequantize"]),
            *((name, f"on the {place}: {state}") for place, held in kernels.items() for name, state in held.items()),
            ("triton", facts["triton"]),
            *((f"choices {whose}", held) for whose, held in facts["choices"].items()),
            *((f"extra {extra}", state) for extra, state in facts["extras"].items()),
        ],
    )
