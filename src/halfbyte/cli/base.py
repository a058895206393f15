"""What the verbs share: common options, progress, and how findings, sizes and reports are shown."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from halfbyte.errors import UsageError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report

F = TypeVar("F", bound=Callable[..., Any])

DIALECTS = "[modelopt|compressed-tensors]"
"""The dialects that are written, as help texts show them."""

GATE_UP = "[concatenated|up_first|interleaved]"
SCALE_LAYOUTS = "[linear|128x4|8x4|128x4-twice|8x4-twice|128x4-undone|8x4-undone]"

_LINE_EVERY = 5.0
"""Seconds between progress lines where there is no terminal."""


def shared_options(command: F) -> F:
    """``--json`` and ``--quiet``."""
    command = click.option("--quiet", "-q", is_flag=True, help="No progress and no table: only findings and errors.")(
        command
    )
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(command)


def reading_options(command: F) -> F:
    """How the NVFP4 weights of a checkpoint are stored, where that is not what their dialect says: ``reading``."""

    @functools.wraps(command)
    def with_reading(
        nibble_order: str | None, scale_layout: str | None, scale2: str | None, gate_up: str | None, **options: Any
    ) -> Any:
        import numpy  # noqa: F401  before ml_dtypes, which prints a traceback if Ctrl-C comes while it imports it

        from halfbyte.modules import Reading

        return command(reading=Reading(nibble_order, scale_layout, scale2, gate_up), **options)

    for option in (
        click.option("--gate-up", metavar=GATE_UP, help="Order of gate and up in stacks of experts."),
        click.option("--scale2", metavar="[multiplier|divisor|amax]", help="What is stored as the second scale."),
        click.option("--scale-layout", metavar=SCALE_LAYOUTS, help="Order that block scales lie in."),
        click.option("--nibble-order", metavar="[low|high]", help="Which nibble of a byte holds the even k."),
    ):
        with_reading = option(with_reading)
    return with_reading  # type: ignore[return-value]


def writing_options(command: F) -> F:
    """Options of every verb that writes a checkpoint."""
    for option in (
        click.option("--workers", type=int, default=None, help="Tasks at once; by default one for each core."),
        click.option("--dry-run", is_flag=True, help="Plan, sizes and peak memory; writes nothing."),
        click.option("--force", is_flag=True, help="Replace DST if it exists; start over where a run was killed."),
        click.option("--resume", is_flag=True, help="Go on with what a killed run of the same command has left."),
    ):
        command = option(command)
    return command


def model_options(command: F) -> F:
    """How a model is loaded."""
    for option in (
        click.option("--no-fuse", is_flag=True, help="q, k, v and gate, up are products of their own."),
        click.option("--layout", metavar="NAME", help="Of NVFP4 weights; by default the one for the device."),
        click.option(
            "--precision", default="exact", show_default=True, metavar="[exact|int8|fp8|w4a4]", help="Of products."
        ),
        click.option("--dtype", metavar="[float32|bfloat16|float16]", help="Of activations; by default the config's."),
        click.option("--device", metavar="[cpu|cuda|cuda:0]", help="By default a GPU, where torch sees one."),
    ):
        command = option(command)
    return command


def console(stderr: bool = False) -> Console:
    """A rich console that neither highlights nor interprets what it prints."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1

    # Where there is no terminal there is no width either: a table that is piped must not be folded at 80 columns.
    width = None if is_terminal(sys.stderr if stderr else sys.stdout) else 200
    return Plain(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


@contextlib.contextmanager
def progress(label: str, quiet: bool, noun: str | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """A progress callback: a bar on a terminal, now and then a line elsewhere; it counts bytes, or what ``noun`` is."""
    if quiet:
        yield None
    elif is_terminal(sys.stderr):
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        count = (MofNCompleteColumn(),) if noun else (DownloadColumn(), TransferSpeedColumn())
        columns = (BarColumn(), *count, TimeRemainingColumn())
        with Progress(TextColumn("{task.description}"), *columns, console=console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last > _LINE_EVERY:
                last = time.monotonic()
                with contextlib.suppress(OSError):  # nobody listens
                    counts = f"{done} of {total} {noun}" if noun else f"{size(done)} of {size(total)}"
                    print(f"{label}: {counts}", file=sys.stderr)

        yield line


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a stream is there and is a terminal; a closed one is None."""
    return stream is not None and stream.isatty()


def size(count: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def show(report: Report, as_json: bool, quiet: bool, render: Callable[[Report, Console], None]) -> None:
    """Print a report: as JSON, or rendered on stdout with its findings on stderr."""
    with contextlib.suppress(BrokenPipeError):  # a reader that has gone does not change the verdict
        if as_json:
            print(json.dumps(report.json()))
            return
        if not quiet:
            render(report, console())
        show_findings(report)


def show_findings(report: Report) -> None:
    """One line for each finding, on stderr."""
    if sys.stdout is not None:
        sys.stdout.flush()
    colours = {"error": "bold red", "warning": "yellow", "note": "dim"}
    out = console(stderr=True)
    for finding in report.findings:
        out.print(str(finding), style=colours[finding.severity] if out.is_terminal else None)


def numbers(text: str, what: str) -> list[int]:
    """The whole numbers of a list such as "1,16,512".

    Raises:
        UsageError: something that is none.
    """
    parts = text.replace(",", " ").split()
    wrong = next((part for part in parts if not (part.isascii() and part.isdecimal() and len(part) < 10)), None)
    if wrong is not None or not parts:
        raise UsageError(
            f"{what} are whole numbers", got=repr(text if wrong is None else wrong), expected="such as 1,16"
        )
    return [int(part) for part in parts]


def plural(count: int, noun: str) -> str:
    """ "1 shard", "2 shards"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def pairs(out: Console, rows: list[tuple[str, Any]]) -> None:
    """Print (label, value) rows, aligned."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, printable(str(value)))
    out.print(table)


def read_with(facts: dict[str, Any]) -> list[tuple[str, Any]]:
    """The row on a reading that is not what the dialect says, if there is one."""
    return [("read with", " ".join(facts["reading"]))] if facts["reading"] else []


def wrote(report: Report, out: Console) -> list[tuple[str, Any]]:
    """The rows that every writing verb ends with."""
    facts = report.facts
    if facts.get("dry_run"):
        return [
            ("would write", f"{size(facts['bytes_out'])} in {plural(facts['shards'], 'shard')}"),
            ("peak memory", f"at most {size(facts['peak_bytes'])} more than the headers, with {facts['workers']}"),
        ]
    return [
        ("workers", facts["workers"]),
        ("wrote", f"{facts['dst']} ({size(facts['bytes_on_disk'])})"),
        ("seconds", facts["seconds"]),
    ]
