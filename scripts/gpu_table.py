"""Writes README's figures of GPUs from benchmarks/results/*.jsonl, which ``python -m benchmarks.gpu --out`` writes.

Usage: ``python scripts/gpu_table.py``, and with ``--check`` it writes nothing and exits with 1 where the table is old.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- figures of GPUs: written by scripts/gpu_table.py -->\n"
END: Final = "<!-- end of figures of GPUs -->\n"
ROWS: Final = (1, 4, 8, 16, 64, 256, 1024, 4096)
"""Numbers of tokens that get a column, if they were measured."""


def table(name: str, lines: Sequence[dict[str, Any]]) -> str:
    """The figures of one file of results, in Markdown."""
    run, end, rows = lines[0]["run"], lines[-1]["end"], lines[1:-1]
    cells: dict[tuple[int, int], dict[int, str]] = {}
    with_peers = False
    for row in rows:
        facts = row.get("facts", {})
        if facts.get("kind") != "default":
            continue
        figures = {figure["name"]: figure["value"] for figure in row["figures"]}
        parts = [f"{row['seconds'] * 1e6:.1f}"]
        if "of ideal" in figures:
            parts.append(f"{figures['of ideal']:.2f}")
        if "x humming" in figures:
            with_peers = True
            parts.append(f"{figures['x humming']:.1f} x")
        cells.setdefault((facts["n"], facts["k"]), {})[facts["rows"]] = ", ".join(parts)
    columns = [rows for rows in ROWS if any(rows in row for row in cells.values())]
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
        "| N x K | " + " | ".join(f"M = {rows}" for rows in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
        *(
            f"| {n}x{k} | " + " | ".join(by_rows.get(rows, "") for rows in columns) + " |"
            for (n, k), by_rows in cells.items()
        ),
        "",
        _beside(rows, end),
    ]
    return "\n".join(said) + "\n"


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


def written(readme: str, results: Iterable[tuple[str, str]]) -> str:
    """README with the figures of these results, (name, text) each, and without any others."""
    head, rest = readme.split(BEGIN)
    _, tail = rest.split(END)
    tables = [table(name, [json.loads(line) for line in text.splitlines()]) for name, text in results]
    return head + BEGIN + "\n".join(tables) + END + tail


def results() -> list[tuple[str, str]]:
    """The files that there are."""
    return [(file.name, file.read_text()) for file in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))]


def main() -> int:
    """Write README, or with ``--check`` compare it."""
    now = README.read_text()
    then = written(now, results())
    if "--check" in sys.argv[1:]:
        return int(now != then)
    README.write_text(then)
    return 0


if __name__ == "__main__":
    sys.exit(main())
