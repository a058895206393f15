"""Writes the figures of GPUs, whole models and experts in README.md and docs/performance.md from benchmarks/results.

``python -m benchmarks.gpu --out``, and ``--out`` of ``models``, ``models_cpu`` and ``experts`` beside it, write those.
Usage: ``python scripts/gpu_table.py``, and with ``--check`` it writes nothing and exits with 1 where a table is old.
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
MODELS_BEGIN: Final = "<!-- figures of models: written by scripts/gpu_table.py -->\n"
MODELS_END: Final = "<!-- end of figures of models -->\n"
EXPERTS_BEGIN: Final = "<!-- figures of experts: written by scripts/gpu_table.py -->\n"
EXPERTS_END: Final = "<!-- end of figures of experts -->\n"
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


def models(name: str, document: dict[str, Any]) -> str:
    """The figures of a whole model on a GPU, or of real models on a CPU, in Markdown."""
    return _on_gpu(name, document) if "run" in document else _on_cpu(name, document)


def _on_gpu(name: str, document: dict[str, Any]) -> str:
    run, rows = document["run"], document["rows"]
    versions = run["versions"]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row["what"], row["who"]), row)
    lines = []
    for (what, who), row in found.items():
        if not what.startswith(("decode batch ", "first token of ")) or who == DENSE:
            continue
        title = what.replace("decode batch", "decoding, batch") + MODEL_TITLES[who]
        lines.append(f"| {title} | {_model(row)} | {_model(found[what, DENSE])} |")
    said = [
        f"A Llama-3-8B with random weights on an {run['gpu']} (driver {run['driver']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}; {run['date']}, commit {(run['commit'] or 'unknown')[:7]}), by",
        f"`{run['command']}`: {run['new']} tokens after {run['prompt']}, lm_head in bfloat16 unless said; beside it",
        f"the same in bfloat16, both in `halfbyte.generate`. All rows are in `benchmarks/results/{name}`.",
        "",
        "| | NVFP4 | bfloat16 |",
        "|---|---|---|",
        *lines,
        "",
        " ".join([*_loading(found), f"{document['end']['verdict'][0]}."]),
    ]
    return "\n".join(said) + "\n"


DENSE: Final = "bfloat16"
MODEL_TITLES: Final = {"nvfp4": "", "nvfp4, head too": ", head in NVFP4", "nvfp4 fp8": ', `precision="fp8"`'}


def _model(row: dict[str, Any]) -> str:
    figures = {figure["name"]: figure["value"] for figure in row.get("figures", [])}
    parts = [f"{row['seconds'] * 1e3:.2f} ms" if "tokens/s" in figures else f"{row['seconds'] * 1e3:.0f} ms"]
    if "tokens/s" in figures:
        parts.append(f"{figures['tokens/s']:.0f} tokens/s")
    if "of the weight read" in figures:
        parts.append(f"{figures['of the weight read']:.2f} of what its reads allow")
    if "x bfloat16" in figures:
        parts.append(f"{figures['x bfloat16']:.2f} x")
    if "x the time of bfloat16" in figures:
        parts.append(f"{figures['x the time of bfloat16']:.2f} of the time")
    return ", ".join(parts)


def _loading(found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    row = found.get(("load", "nvfp4"))
    if row is None or not row.get("figures"):
        return
    most, after = (figure["value"] for figure in row["figures"])
    yield (
        f"Loading {row['facts']['stored'] / 1e9:.2f} GB takes {row['seconds']:.1f} s and at most {most:.2f} times "
        f"that of the device's memory, {after:.2f} times after."
    )


def _on_cpu(name: str, document: dict[str, Any]) -> str:
    machine, parts, last = document["machine"], [], ""
    for row in document["rows"]:
        figures = {figure["name"]: figure["value"] for figure in row["figures"]}
        if row["what"].startswith("SmolLM2"):
            over = next((f", {value:.2f} x" for key, value in figures.items() if key.startswith("x ")), "")
            parts.append(f"{row['who']} {figures['tokens/s']:.1f} tokens/s{over}")
        else:
            cosine = f"{figures['mean cosine']:.4f} (the least {figures['least cosine']:.3f})"
            last = f"MiniLM's embeddings of {row['facts']['sentences']} sentences keep a mean cosine of {cosine}."
    speeds = f"SmolLM2-135M decodes, {document['threads']} threads: {', '.join(parts)}. " if parts else ""
    return (
        f"On an {machine['model name']} ({machine['cores']} cores), by `{document['command']}`\n"
        f"(`benchmarks/results/{name}`): {speeds}{last}\n"
    )


def written(
    page: str,
    results: Iterable[tuple[str, str]],
    part: Callable[[str, Sequence[dict[str, Any]]], str] = table,
) -> str:
    """A page with the figures of these results, (name, text) each, and without any others."""
    tables = [part(name, [json.loads(line) for line in text.splitlines()]) for name, text in results]
    return _between(page, BEGIN, END, tables)


def with_models(page: str, results: Iterable[tuple[str, str]], *, missed: bool = False) -> str:
    """Likewise those of models, and if asked the bounds that were missed."""
    parts = []
    for name, text in results:
        document = json.loads(text)
        lines = document["end"]["verdict"][1:] if missed and "end" in document else []
        parts.append(models(name, document) + ("\n" + "".join(f"- {line}\n" for line in lines) if lines else ""))
    return _between(page, MODELS_BEGIN, MODELS_END, parts)


def experts(name: str, document: dict[str, Any]) -> str:
    """The figures of layers of experts on a GPU, in Markdown, and the bounds that were missed."""
    run, versions = document["run"], document["run"]["versions"]
    cases: dict[str, dict[str, Any]] = {}
    for row in document["rows"]:
        if row.get("seconds"):
            key = "default" if row["facts"].get("picked") else row["who"].split()[0]
            held = cases.setdefault(row["what"], {})
            best = held.get((key, row["facts"]["what"]))
            if best is None or row["seconds"] < best["seconds"]:
                held[key, row["facts"]["what"]] = row
    lines = []
    for what, held in cases.items():
        products, layer = (held.get(("default", part)) for part in ("products", "layer"))
        if products is None or layer is None:
            continue
        figures = {figure["name"]: figure["value"] for figure in products["figures"]}
        peers = [held.get((peer, "products")) for peer in ("humming", "torch")]
        cells = [what, products["who"], f"{products['facts']['floor'] * 1e6:.1f}", _us(products["seconds"])]
        cells += [f"{figures['of the floor']:.2f}", _us(layer["seconds"])]
        lines.append(f"| {' | '.join([*cells, *('' if one is None else _us(one['seconds']) for one in peers)])} |")
    said = [
        f"On an {run['gpu']} (driver {run['driver']}, torch {versions['torch']}, Triton {versions['triton']}; "
        f"{run['date']}, commit {(run['commit'] or 'unknown')[:7]}), by",
        f"`{run['command']}`, microseconds; all rows are in `benchmarks/results/{name}`.",
        "",
        "| layer, tokens | kernel | floor | two products | of the floor | whole layer | Humming | torch bf16 |",
        "|---|---|---|---|---|---|---|---|",
        *lines,
        "",
        f"{document['verdict'][0]}.",
        *(f"- {line}" for line in document["verdict"][1:]),
    ]
    return "\n".join(said) + "\n"


def with_experts(page: str, results: Iterable[tuple[str, str]]) -> str:
    """A page with the figures of experts on GPUs."""
    documents = ((name, json.loads(text)) for name, text in results)
    parts = [experts(name, document) for name, document in documents if "run" in document]
    return _between(page, EXPERTS_BEGIN, EXPERTS_END, parts)


def _between(page: str, begin: str, end: str, parts: Sequence[str]) -> str:
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    return head + begin + "\n".join(parts) + end + tail


def results(ending: str = ".jsonl") -> list[tuple[str, str]]:
    """The files that there are."""
    return [(file.name, file.read_text()) for file in sorted((ROOT / "benchmarks" / "results").glob(f"*{ending}"))]


def pages() -> dict[Path, str]:
    """Both as they must be."""
    parts = {README: table, PAGE: details}
    made = {page: written(page.read_text(), results(), part) for page, part in parts.items()}
    made = {page: with_models(text, results("-models.json"), missed=page == PAGE) for page, text in made.items()}
    made[PAGE] = with_experts(made[PAGE], results("-experts.json"))
    return made


def main() -> int:
    """Write both, or with ``--check`` compare them."""
    if "--check" in sys.argv[1:]:
        return int(any(page.read_text() != text for page, text in pages().items()))
    for page, text in pages().items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
