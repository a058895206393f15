"""``halfbyte run``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from halfbyte.cli.base import console, is_terminal, model_options, pairs, plural, shared_options, show, size
from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.findings import Report
    from halfbyte.session import Answer, Session


@click.command("run")
@click.argument("path")
@click.argument("prompt")
@click.option("--max-new-tokens", "-n", type=int, default=256, show_default=True, help="At most.")
@click.option("--system", metavar="TEXT", help="A system prompt, for the chat template.")
@click.option("--no-chat", is_flag=True, help="The prompt as it is, without the tokenizer's chat template.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most probable token.")
@click.option("--top-p", type=float, help="Draw among the most probable tokens that have this probability together.")
@click.option("--top-k", type=int, help="Draw among so many of the most probable tokens.")
@click.option("--seed", type=int, help="Of what is drawn.")
@click.option("--no-graph", is_flag=True, help="On a GPU, no CUDA graph.")
@model_options
@shared_options
def command(
    path: str, prompt: str, system: str | None, no_chat: bool, max_new_tokens: int, no_graph: bool, as_json: bool,
    quiet: bool, temperature: float, top_p: float | None, top_k: int | None, seed: int | None, **given: Any,
) -> None:  # fmt: skip
    """Load a checkpoint and answer PROMPT, or what stdin says if that is "-".

    The text goes to stdout as it comes. Then stderr tells how fast it was, beside the time that reading the weights
    takes at the least, and what memory is held.
    """
    from halfbyte.session import Session, require

    require("halfbyte run")
    text = _read() if prompt == "-" else prompt
    if max_new_tokens < 1:
        raise UsageError("--max-new-tokens is 1 or more", got=max_new_tokens)
    session = Session.load(path, fuse=not given.pop("no_fuse"), **given)
    tokens = session.tokens(text, system=system, chat=not no_chat)
    how: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    if no_graph:
        how["graph"] = False
    emit = (lambda text: None) if as_json else _write
    try:
        answer = session.answer(tokens, max_new_tokens=max_new_tokens, emit=emit, **how)
    except KeyboardInterrupt:
        if not as_json:
            _write("\n")
        raise
    if not as_json:
        _write("" if answer.text.endswith("\n") else "\n")
    report = _report(session, answer)
    if as_json:
        show(report, True, quiet, _render)
    elif not quiet:
        _render(report, console(stderr=True))


def _read() -> str:
    if sys.stdin is None:
        raise UsageError("stdin is closed, and the prompt is to come from there")
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            "the prompt on stdin is not UTF-8", got=f"byte {data[error.start]:02X}", index=[error.start]
        ) from None


def _write(text: str) -> None:
    if sys.stdout is None:
        return
    if is_terminal(sys.stdout):  # which the text of a model does not steer
        text = "".join(c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else ascii(c)[1:-1] for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(session: Session, answer: Answer) -> Report:
    from halfbyte.findings import Report

    made = answer.generated
    return Report(
        "run",
        (),
        {
            "path": str(session.path),
            "device": session.device,
            "quantized": session.quantized,
            "text": answer.text,
            "tokens": made.tokens[0],
            "prompt_tokens": answer.prompt,
            "prefill_seconds": made.prefill_seconds,
            "setup_seconds": made.setup_seconds,
            "decode_seconds": made.decode_seconds,
            "steps": made.steps,
            "tokens_per_second": made.tokens_per_second,
            "bytes_per_step": made.bytes_per_step,
            "read": answer.read_rate,
            "read_at_best": answer.read,
            "read_at_best_measured": answer.measured,
            "share": answer.share,
            "weight_bytes": session.weight_bytes,
            "cache_bytes": made.memory,
            "how": made.how,
        },
    )


def _render(report: Report, out: Console) -> None:
    facts = report.facts
    first = facts["setup_seconds"] + facts["prefill_seconds"]
    compiling = "with what a first call loads and compiles (halfbyte bench measures without)"
    rows = [("prompt", f"{plural(facts['prompt_tokens'], 'token')} in {first:.3f} s, {compiling}")]
    if facts["steps"]:
        rate = facts["tokens_per_second"]
        rows.append(
            ("decode", f"{plural(facts['steps'], 'token')} in {facts['decode_seconds']:.3f} s, {rate:,.1f} tokens/s")
        )
    if facts["share"] is not None:
        best = (
            f"{size(facts['read_at_best'])}/s that {'were measured' if facts['read_at_best_measured'] else 'are known'}"
        )
        each = f"{size(facts['bytes_per_step'])} a token, {size(facts['read'])}/s"
        rows.append(("reads", f"{each}: {facts['share']:.0%} of the {best} at best"))
    rows.append(("memory", f"weights {size(facts['weight_bytes'])}, cache {size(facts['cache_bytes'])}"))
    rows.append(("how", facts["how"]))
    if not facts["quantized"]:
        rows.append(("note", "no layer of this checkpoint is NVFP4 or FP8: torch ran dense weights"))
    pairs(out, rows)
