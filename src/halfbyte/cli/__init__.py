"""The command line: one file for each verb, which parses and renders and decides nothing."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from halfbyte import __version__
from halfbyte.errors import HalfbyteError, UsageError

VERBS = (
    "inspect",
    "verify",
    "diff",
    "quantize",
    "convert",
    "shard",
    "dequantize",
    "layouts",
    "run",
    "plan",
    "bench",
    "tune",
    "doctor",
)
"""In the order of the help text."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = 128 + signal.SIGINT


class _Verbs(click.Group):
    """The group of verbs; a verb's file is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"halfbyte.cli.{cmd_name}").command
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="halfbyte")
def cli() -> None:
    """Open, prove, quantize and convert NVFP4 weights.

    \b
    Exit status: 0 sound or done; 1 verify found an error or diff a
    difference; 2 wrong use or unreadable input, nothing written; 3 needs
    hardware or an extra; 130 interrupted, nothing written.
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status; every failure is one line on stderr (or one JSON object)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup a hang-up stays ignored
            signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the locale cannot spell is no reason to fail
    try:
        code = _invoke(arguments)
    except BaseException as error:
        if not isinstance(error, Exception | KeyboardInterrupt) or os.environ.get("HALFBYTE_DEBUG"):
            raise
        code = _fail(error, arguments)
    sys.exit(code)


def _invoke(arguments: list[str]) -> int:
    try:
        with cli.make_context("halfbyte", list(arguments)) as context:
            cli.invoke(context)
        code = 0
    except BrokenPipeError:  # the reader of the help has gone
        code = 0
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = 2
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()  # its reader has gone, and needs no more; the verdict stays
    return code


def _fail(error: BaseException, arguments: list[str]) -> int:
    """Say what went wrong; returns the exit status."""
    known = _as_error(error)
    code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else known.exit_code
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _drop_stdout()  # it may be what is full, and would fail once more at exit
    elif "--json" in arguments:
        command = next((a for a in arguments if a in VERBS), None)
        head = {"schema": 1, "tool": "halfbyte", "version": __version__, "command": command, "ok": False}
        try:
            print(json.dumps(head | {"findings": [], "error": known.facts()}), flush=True)
            return code
        except OSError:
            _drop_stdout()  # nobody reads it, or it is full: a line on stderr instead
    print(f"halfbyte: {known}", file=sys.stderr)
    return code


def _as_error(error: BaseException) -> HalfbyteError:
    """Any exception as one of ours."""
    if isinstance(error, HalfbyteError):
        return error
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        path = context.command_path if context else "halfbyte"
        return UsageError(error.format_message().rstrip("."), hint=f"see: {path} --help")
    if isinstance(error, KeyboardInterrupt):
        return HalfbyteError("interrupted; nothing was written")
    if isinstance(error, MemoryError):
        return HalfbyteError("out of memory", hint="try --workers 1")
    if isinstance(error, OSError):
        return HalfbyteError(error.strerror or str(error), file=str(error.filename) if error.filename else None)
    return HalfbyteError(f"internal error: {type(error).__name__}: {error}", hint="HALFBYTE_DEBUG=1 shows where")


def _drop_stdout() -> None:
    """Let stdout lead nowhere, so that the interpreter does not fail to flush it at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(number: int, frame: object) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # once is enough: what follows cleans up
    raise KeyboardInterrupt
