"""README's figures of GPUs are those of the results."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu_table():
    spec = importlib.util.spec_from_file_location("gpu_table", ROOT / "scripts" / "gpu_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def product(n, k, rows, kind, seconds, **figures):
    named = [{"name": name.replace("_", " "), "value": value} for name, value in figures.items()]
    return {"what": f"M={rows} {n}x{k}", "who": "some", "seconds": seconds, "figures": named} | {
        "facts": {"kind": kind, "n": n, "k": k, "rows": rows}
    }


RUN = {
    "gpu": "NVIDIA Made-up",
    "driver": "1.2.3",
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "humming-kernels": "0.1.20"},
    "commit": "0123456789abcdef+",
    "date": "2026-01-02",
    "command": "python -m benchmarks.gpu --peers",
}
ROWS = [
    {"what": "probe", "who": "read", "seconds": 1e-3, "figures": [{"name": "GB/s", "value": 4540.0}]},
    product(4096, 4096, 1, "default", 5.44e-6, of_ideal=0.6163, x_humming=1.78),
    product(4096, 4096, 1, "other", 6.5e-6, of_ideal=0.51),
    product(248077, 4096, 1, "default", 134e-6, of_ideal=0.94, x_humming=1.48),
    product(248064, 4096, 1, "whole", 134e-6, of_ideal=0.94),
    product(4096, 4096, 4096, "default", 178e-6, of_ideal=0.986),
    product(4096, 4096, 2, "default", 5.5e-6, of_ideal=0.6),
    {"what": "M=8 4096x4096", "who": "all", "missing": "no memory"},
    {"what": "host M=1 4096x4096", "who": "linear", "figures": [{"name": "us of the host", "value": 11.4}]},
    {"what": "pack 28672x8192", "who": "fragments", "figures": [{"name": "GB/s", "value": 402.7}]},
]
END = {"verdict": ["7 of 9 bounds met", "missed: ..."], "probes_off": 0, "seconds": 100}


def text(run=RUN, end=END):
    return "".join(json.dumps(line) + "\n" for line in ({"run": run}, *ROWS, {"end": end}))


def test_a_made_up_result(gpu_table):
    readme = f"before\n{gpu_table.BEGIN}old\n{gpu_table.END}after\n"
    assert gpu_table.written(readme, [("made-up.jsonl", text())]) == (
        "before\n"
        "<!-- figures of GPUs: written by scripts/gpu_table.py -->\n"
        "On an NVIDIA Made-up (driver 1.2.3, torch 2.11.0, Triton 3.6.0; 2026-01-02, commit 0123456), by\n"
        "`python -m benchmarks.gpu --peers`: the microseconds of `linear` with the kernel that `plan` picks,\n"
        "the share of what the memory or the matrix units allow, and how many times as fast as Humming 0.1.20 that is. "
        "All rows are in\n"
        "`benchmarks/results/made-up.jsonl`.\n"
        "\n"
        "| N x K | M = 1 | M = 4096 |\n"
        "|---|---|---|\n"
        "| 4096x4096 | 5.4, 0.62, 1.8 x | 178.0, 0.99 |\n"
        "| 248077x4096 | 134.0, 0.94, 1.5 x |  |\n"
        "\n"
        "7 of 9 bounds met. A call of `linear` with 4096x4096 and one token takes 11 us of the host. "
        "`pack` into `fragments` moves 403 GB/s, read and written.\n"
        "<!-- end of figures of GPUs -->\n"
        "after\n"
    )


def test_what_was_off_and_unknown_is_said(gpu_table):
    table = gpu_table.table(
        "a.jsonl", [json.loads(line) for line in text(RUN | {"commit": None}, END | {"probes_off": 2}).splitlines()]
    )
    assert "commit unknown)" in table
    assert table.endswith("A probe of the memory or of the matrix units was off by more than 8 % in this run.\n")


def test_no_results_say_nothing(gpu_table):
    readme = f"before\n{gpu_table.BEGIN}old\n{gpu_table.END}after\n"
    assert gpu_table.written(readme, []) == f"before\n{gpu_table.BEGIN}{gpu_table.END}after\n"


MANY = [
    product(4096, 4096, 1024, "default", 62.84e-6, of_ideal=0.7, x_cublas_bfloat16=0.716, x_humming=0.9),
    product(
        4096, 4096, 1024, "fp8", 37.5e-6, of_ideal=0.6, x_the_exact_product=1.68, **{"x the time of scaled-mm": 1.25}
    ),
    product(4096, 4096, 1024, "twin", 30e-6),
    product(64, 64, 256, "fp8", 2e-6, of_ideal=0.6),
]


def lines(*more):
    return [{"run": RUN}, *ROWS, *more, {"end": END}]


def test_fp8_has_a_table_of_its_own(gpu_table):
    table = gpu_table.table("a.jsonl", lines(*MANY))
    assert table.split("activations quantized too.\n\n")[1].startswith(
        "| N x K | M = 256 | M = 1024 |\n"
        "|---|---|---|\n"
        "| 4096x4096 |  | 62.8 exact (0.72 x), 37.5 FP8 (1.25) |\n"
        "| 64x64 | not exact, 2.0 FP8 |  |\n"
        "\n"
        "7 of 9 bounds met."
    )


def test_all_figures_and_what_was_missed(gpu_table):
    end = END | {"verdict": ["7 of 9 bounds met", "missed: this", "missed: that"]}
    page = gpu_table.details("a.jsonl", [*lines(*MANY)[:-1], {"end": end}])
    head, first, *_, last = page.split("\n\n")
    assert head == "### NVIDIA Made-up, 2026-01-02, commit 0123456"
    assert first == "`python -m benchmarks.gpu --peers`; all rows are in `benchmarks/results/a.jsonl`."
    assert "| 1024 | some | 62.8 | 0.70 | 0.72 | 0.90 | 37.5 | 1.68 | 1.25 |\n" in page
    assert "| 1 | some | 5.4 | 0.62 |  | 1.78 |  |  |  |\n" in page
    assert last == "- missed: this\n- missed: that\n"


def test_pages_are_what_the_results_say(gpu_table):
    for page, made in gpu_table.pages().items():
        assert page.read_text() == made, "run: python scripts/gpu_table.py"
