"""Writes the figures of GPUs in README.md and docs/performance.md from benchmarks/results/*.jsonl.

``python -m benchmarks.gpu --out`` writes those. Usage: ``python scripts/gpu_table.py``, and with ``--check`` it writes
nothing and exits with 1 where a table is old.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = ROOT / "README.md"
PAGE: Final = ROOT / "docs" / "performance.md"
BEGIN: Final = "<!-- figures of GPUs: written by scripts/gpu_table.py -->\n"
END: Final = "<!-- end of figures of GPUs -->\n"
ROWS: Final = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
MANY_ROWS: Final = (256, 512, 1024, 4096)
"""Numbers of tokens that get a column, if they were measured: of the first table, and of that with FP8."""

Cells = dict[tuple[int, int], dict[int, str]]
"""By shape and number of tokens."""


def table(name: str, lines: Sequence[dict[str, Any]]) -> str:
    """The figures of one file of results, in Markdown."""
    run, end, rows = lines[0]["run"], lines[-1]["end"], lines[1:-1]
    cells: Cells = {}
    with_peers = False
    for facts, figures, seconds in _of_kind(rows, "default"):
        parts = [_us(seconds)]
        if "of ideal" in figures:
            parts.append(f"{figures['of ideal']:.2f}")
        if "x humming" in figures:
            with_peers = True
            parts.append(f"{figures['x humming']:.1f} x")
        cells.setdefault((facts["n"], facts["k"]), {})[facts["rows"]] = ", ".join(parts)
    versions, peer = run["versions"], ""
    if with_peers:
        peer = f", and how many times as fast as Humming {versions['humming-kernels']} that is"
    said = [
        f"On an {run['gpu']} (driver {run['driver']}, torch {versions['torch']}, Triton {versions['triton']}; "
        f"{run['date']}, commit {(run['commit'] or 'unknown')[:7]}), by",
        f"`{run['command']}`: the microseconds of `linear` with the kernel that `plan` picks,",
        f"the share of what the memory or the matrix units allow{peer}. All rows are in",
        f"`benchmarks/results/{name}`.",
        "",
        *_columns(cells, ROWS),
        "",
        *_many(rows),
        _beside(rows, end),
    ]
    return "\n".join(said) + "\n"


def _many(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of many tokens, exact and in FP8, if the latter was measured."""
    exact = {(f["n"], f["k"], f["rows"]): (figures, us) for f, figures, us in _of_kind(rows, "default")}
    cells: Cells = {}
    for facts, figures, seconds in _of_kind(rows, "fp8"):
        beside, exactly = exact.get((facts["n"], facts["k"], facts["rows"]), ({}, None))
        parts = [f"{_us(exactly)} exact" if exactly else "not exact"]
        if "x cublas bfloat16" in beside:
            parts[0] += f" ({beside['x cublas bfloat16']:.2f} x)"
        parts.append(f"{_us(seconds)} FP8")
        twin = next((value for name, value in figures.items() if name.startswith("x the time of ")), None)
        if twin is not None:
            parts[1] += f" ({twin:.2f})"
        cells.setdefault((facts["n"], facts["k"]), {})[facts["rows"]] = ", ".join(parts)
    if not cells:
        return []
    said = [
        "Of many tokens, microseconds: exact, and how many times as fast as cuBLAS with bfloat16 weights; with",
        '`precision="fp8"`, activations quantized inside, and its time over that of a resident FP8 twin in',
        "`torch._scaled_mm`, activations quantized too.",
    ]
    return [*said, "", *_columns(cells, MANY_ROWS), ""]


def _of_kind(rows: Iterable[dict[str, Any]], kind: str) -> Iterator[tuple[dict[str, Any], dict[str, float], float]]:
    """Facts, figures by name and seconds of the rows of a kind that have any."""
    for row in rows:
        facts = row.get("facts", {})
        if facts.get("kind") == kind and row.get("seconds"):
            facts = facts | {"kernel": row["who"]}
            yield facts, {figure["name"]: figure["value"] for figure in row["figures"]}, row["seconds"]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _columns(cells: Cells, wanted: Sequence[int]) -> list[str]:
    columns = [rows for rows in wanted if any(rows in row for row in cells.values())]
    return [
        "| N x K | " + " | ".join(f"M = {rows}" for rows in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
        *(
            f"| {n}x{k} | " + " | ".join(by_rows.get(rows, "") for rows in columns) + " |"
            for (n, k), by_rows in cells.items()
        ),
    ]


def details(name: str, lines: Sequence[dict[str, Any]]) -> str:
    """All that was measured of products, by shape, and the bounds that were missed; in Markdown."""
    run, end, rows = lines[0]["run"], lines[-1]["end"], lines[1:-1]
    fp8 = {(f["n"], f["k"], f["rows"]): (figures, us) for f, figures, us in _of_kind(rows, "fp8")}
    shapes: dict[tuple[int, int], list[str]] = {}
    for facts, figures, seconds in _of_kind(rows, "default"):
        key = facts["n"], facts["k"], facts["rows"]
        beside, other = fp8.get(key, ({}, None))
        cells = [str(facts["rows"]), facts.get("kernel", ""), _us(seconds), *_shown(figures, *_EXACT)]
        cells += ["" if other is None else _us(other), *_shown(beside, *_FP8)]
        shapes.setdefault(key[:2], []).append("| " + " | ".join(cells) + " |")
    heads = (
        "M",
        "kernel",
        "us",
        "of ideal",
        "x cuBLAS bf16",
        "x Humming",
        "us in FP8",
        "x exact",
        "of the twin's time",
    )
    said = [f"### {run['gpu']}, {run['date']}, commit {(run['commit'] or 'unknown')[:7]}", ""]
    said += [f"`{run['command']}`; all rows are in `benchmarks/results/{name}`.", ""]
    for (n, k), held in shapes.items():
        said += [f"{n}x{k}:", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *held, ""]
    said += [f"{end['verdict'][0]}.", "", *(f"- {line}" for line in end["verdict"][1:])]
    return "\n".join(said).rstrip() + "\n"


_EXACT: Final = ("of ideal", "x cublas bfloat16", "x humming")
_FP8: Final = ("x the exact product", "x the time of scaled-mm")


def _shown(figures: dict[str, float], *names: str) -> list[str]:
    return [f"{figures[name]:.2f}" if name in figures else "" for name in names]


def _beside(rows: Iterable[dict[str, Any]], end: dict[str, Any]) -> str:
    """The other figures in a sentence."""
    parts = [f"{end['verdict'][0]}."]
    for row in rows:
        value = row["figures"][0]["value"] if row.get("figures") else None
        if value is not None and row["what"].startswith("host "):
            parts.append(f"A call of `linear` with 4096x4096 and one token takes {value:.0f} us of the host.")
        if value is not None and row["what"].startswith("pack "):
            parts.append(f"`pack` into `fragments` moves {value:.0f} GB/s, read and written.")
    if end["probes_off"]:
        parts.append("A probe of the memory or of the matrix units was off by more than 8 % in this run.")
    return " ".join(parts)


def written(
    page: str,
    results: Iterable[tuple[str, str]],
    part: Callable[[str, Sequence[dict[str, Any]]], str] = table,
) -> str:
    """A page with the figures of these results, (name, text) each, and without any others."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    tables = [part(name, [json.loads(line) for line in text.splitlines()]) for name, text in results]
    return head + BEGIN + "\n".join(tables) + END + tail


def results() -> list[tuple[str, str]]:
    """The files that there are."""
    return [(file.name, file.read_text()) for file in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))]


def pages() -> dict[Path, str]:
    """Both as they must be."""
    parts = {README: table, PAGE: details}
    return {page: written(page.read_text(), results(), part) for page, part in parts.items()}


def main() -> int:
    """Write both, or with ``--check`` compare them."""
    if "--check" in sys.argv[1:]:
        return int(any(page.read_text() != text for page, text in pages().items()))
    for page, text in pages().items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
