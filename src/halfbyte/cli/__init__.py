"""The command line: one file for each verb, which parses and renders and decides nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from halfbyte import __version__
from halfbyte.errors import HalfbyteError, printable

VERBS = ("inspect", "verify", "quantize", "convert", "dequantize", "doctor")
"""In the order of the help text."""

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
    Exit status: 0 sound or done; 1 verify found an error; 2 wrong use or
    unreadable input, nothing written; 3 needs hardware or an extra.
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status; every failure is one line on stderr (or one JSON object)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _terminated)
    as_json = "--json" in arguments
    try:
        status = cli.main(arguments, prog_name="halfbyte", standalone_mode=False)
        sys.stdout.flush()
        code = status if isinstance(status, int) else 0
    except HalfbyteError as error:
        code = _fail(error.facts(), str(error), error.exit_code, as_json)
    except click.ClickException as error:
        text = printable(error.format_message())
        usage = f"; see: {error.ctx.command_path} --help" if isinstance(error, click.UsageError) and error.ctx else ""
        code = _fail({"error": "UsageError", "message": text}, text + usage, 2, as_json)
    except (KeyboardInterrupt, click.Abort):
        code = _fail(
            {"error": "Interrupted", "message": "interrupted"},
            "interrupted; nothing was written",
            _INTERRUPTED,
            as_json,
        )
    except BrokenPipeError:
        # The reader of stdout has gone; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        text = printable(f"{where}{error.strerror or error}")
        code = _fail({"error": type(error).__name__, "message": text, "file": error.filename}, text, 2, as_json)
    except MemoryError:
        code = _fail({"error": "MemoryError", "message": "out of memory"}, "out of memory; try --workers 1", 2, as_json)
    except Exception as error:
        if os.environ.get("HALFBYTE_DEBUG"):
            raise
        text = printable(f"internal error: {type(error).__name__}: {error}")
        code = _fail({"error": "Internal", "message": text}, f"{text}; HALFBYTE_DEBUG=1 shows where", 2, as_json)
    sys.exit(code)


def _fail(facts: dict[str, Any], line: str, code: int, as_json: bool) -> int:
    if as_json:
        head = {"schema": 1, "tool": "halfbyte", "version": __version__, "ok": False}
        print(json.dumps(head | {"findings": [], "error": facts}))
    else:
        print(f"halfbyte: {line}", file=sys.stderr)
    return code


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt
