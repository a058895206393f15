"""``halfbyte tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import pairs, plural, progress, shared_options, show
from halfbyte.errors import MissingExtraError, UnavailableError, UsageError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report
    from halfbyte.tuning import Machine


@click.command("tune")
@click.option("--shapes", multiple=True, metavar="NxK,...", help="Of weights; by default those of known models.")
@click.option("--rows", multiple=True, metavar="M,...", help="Numbers of tokens; by default from 1 to 4096.")
@click.option("--dtype", default="bfloat16", show_default=True, metavar="[bfloat16|float16]", help="Of activations.")
@click.option("--precision", default="all", show_default=True, metavar="[exact|fp8|all]", help="Which products.")
@click.option("--kernels", multiple=True, metavar="NAME,...", help="Only these; by default all that have a choice.")
@click.option("--budget", type=float, metavar="SECONDS", help="When they are over no further shape is begun.")
@click.option("--workers", type=int, help="Processes that compile; by default one less than there are cores.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="By default what every run reads.")
@shared_options
def command(out: Path | None, workers: int | None, as_json: bool, quiet: bool, **given: Any) -> None:
    """Measure which kernels are fastest on this GPU, and keep that.

    The file has the choices of each shape for all M; `halfbyte doctor` and hb.plan say where it lies and what comes
    from it. What it holds of other shapes and kernels stays. A configuration that computes something else than
    float64 does is told, and never chosen.
    """
    from halfbyte.tuning import tune

    wanted = options(out=out, **given)
    if workers is not None and workers < 1:
        raise UsageError("workers are 1 or more", got=workers)
    machine = gpu(workers)
    with progress("tune", quiet or as_json, "configurations") as report:
        found = tune(wanted, machine, report)
    show(found, as_json, quiet, _render)


def options(
    shapes: tuple[str, ...], rows: tuple[str, ...], dtype: str, precision: str, kernels: tuple[str, ...],
    budget: float | None, out: Path | None,
) -> Any:  # fmt: skip
    """What is measured, from the text of options."""
    from halfbyte import tuning

    given: dict[str, Any] = {"dtype": dtype, "out": out}
    try:
        if shapes:
            given["shapes"] = tuple(_shape(one) for one in _listed(shapes))
        if rows:
            given["rows"] = tuple(int(one) for one in _listed(rows))
    except ValueError as error:
        raise UsageError(
            "not a number", got=str(error).rpartition(": ")[2], hint="see: halfbyte tune --help"
        ) from error
    if kernels:
        given["kernels"] = tuple(_listed(kernels))
    if precision != "all":
        given["precisions"] = (precision,)
    if budget is not None:
        given["seconds"] = budget
    return tuning.Options(**given)


def _listed(values: tuple[str, ...]) -> list[str]:
    return [one for value in values for one in value.replace(",", " ").split()]


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    return int(n), int(k)


def gpu(workers: int | None) -> Machine:
    """The GPU that is there; UnavailableError where there is none."""
    from halfbyte.gpu import missing

    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", "cuda", "halfbyte tune") from None
    if not torch.cuda.is_available():
        raise UnavailableError("halfbyte tune needs an NVIDIA GPU, and torch sees none")
    reason = missing()
    if reason:
        raise UnavailableError(f"halfbyte tune needs Triton: {reason}")
    from halfbyte.tuning_cuda import Gpu

    return Gpu(workers)


def _render(report: Report, out: Console) -> None:
    from rich.table import Table

    facts = report.facts
    table = Table(box=None, pad_edge=False)
    for head in ("product", "shape", "M", "kernel", "how", "us at M"):
        table.add_column(head, justify="right" if head in ("shape", "M") else "left", no_wrap=head != "how")
    for row in facts["choices"]:
        span = f"{row['first']}-{'' if row['last'] is None else row['last']}"
        times = ", ".join(f"{us:g} at {m}" for m, us in row["microseconds"].items())
        n, k = row["shape"]
        table.add_row(row["op"], f"{n}x{k}", span, row["kernel"], row["configuration"], times)
    out.print(table)
    told = (("wrong", "WRONG, and not chosen"), ("failed", "not measured"), ("left_out", "left out"))
    for name, head in told:
        for line in facts[name]:
            out.print(f"{head}: {printable(line)}")
    wrote = facts["out"] if facts["choices"] else "nothing"
    counts = f"{plural(facts['measured'], 'configuration')} in {facts['seconds']} s"
    pairs(out, [("gpu", facts["gpu"]), ("measured", counts), ("wrote", wrote)])
