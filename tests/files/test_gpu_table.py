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


def of_model(what, who, seconds, **figures):
    named = [{"name": name.replace("_", " "), "value": value} for name, value in figures.items()]
    return {"what": what, "who": who, "seconds": seconds, "figures": named}


MODELS = {
    "run": RUN
    | {"versions": {"torch": "2.11.0", "transformers": "5.17.0"}, "command": "python -m benchmarks.models"}
    | {"prompt": 512, "new": 256},
    "rows": [
        of_model("load", "nvfp4", 4.26, most=1.034, after=1.002) | {"facts": {"stored": 6_034_000_000}},
        of_model("decode batch 1", "nvfp4", 1.5e-3, tokens_s=666.7, of_the_weight_read=0.723, x_bfloat16=2.61),
        of_model("decode batch 1", "bfloat16", 3.92e-3, tokens_s=255.1, of_the_weight_read=0.9),
        of_model("first token of 2048", "nvfp4", 0.0601, x_the_time_of_bfloat16=1.071),
        of_model("first token of 2048", "bfloat16", 0.0561),
        of_model("first token of 2048", "nvfp4 fp8", 0.0451, x_the_time_of_bfloat16=0.804),
        of_model("decode batch 1", "nvfp4, head too", 1.2e-3, tokens_s=833.3, of_the_weight_read=0.7, x_bfloat16=3.3),
        of_model("decode batch 1", "bfloat16", 4.0e-3, tokens_s=250.0),
    ],
    "end": {"verdict": ["6 of 7 bounds met", "missed: ..."], "seconds": 90},
}
for _row in MODELS["rows"]:
    for _figure in _row["figures"]:
        _figure["name"] = _figure["name"].replace("tokens s", "tokens/s")


def test_a_whole_model(gpu_table):
    assert gpu_table.models("made-up-models.json", MODELS) == (
        "A Llama-3-8B with random weights on an NVIDIA Made-up (driver 1.2.3, torch 2.11.0, transformers 5.17.0; "
        "2026-01-02, commit 0123456), by\n"
        "`python -m benchmarks.models`: 256 tokens after 512, lm_head in bfloat16 unless said; beside it\n"
        "the same in bfloat16, both in `halfbyte.generate`. All rows are in `benchmarks/results/made-up-models.json`.\n"
        "\n"
        "| | NVFP4 | bfloat16 |\n"
        "|---|---|---|\n"
        "| decoding, batch 1 | 1.50 ms, 667 tokens/s, 0.72 of what its reads allow, 2.61 x "
        "| 3.92 ms, 255 tokens/s, 0.90 of what its reads allow |\n"
        "| first token of 2048 | 60 ms, 1.07 of the time | 56 ms |\n"
        '| first token of 2048, `precision="fp8"` | 45 ms, 0.80 of the time | 56 ms |\n'
        "| decoding, batch 1, head in NVFP4 | 1.20 ms, 833 tokens/s, 0.70 of what its reads allow, 3.30 x "
        "| 3.92 ms, 255 tokens/s, 0.90 of what its reads allow |\n"
        "\n"
        "Loading 6.03 GB takes 4.3 s and at most 1.03 times that of the device's memory, 1.00 times after. "
        "6 of 7 bounds met.\n"
    )


def test_the_page_has_what_a_model_missed(gpu_table):
    readme = f"{gpu_table.MODELS_BEGIN}{gpu_table.MODELS_END}"
    results = [("made-up-models.json", json.dumps(MODELS))]
    short, long = (gpu_table.with_models(readme, results, missed=missed) for missed in (False, True))
    assert long == short.replace("6 of 7 bounds met.\n", "6 of 7 bounds met.\n\n- missed: ...\n")
    assert long != short


def test_real_models_on_a_cpu(gpu_table):
    rows = [
        of_model("SmolLM2 decode T=2", "halfbyte float32", 8e-3, **{"tokens/s": 125.0, "x transformers float32": 2.5}),
        of_model("SmolLM2 decode T=2", "transformers float32", 2e-2, **{"tokens/s": 50.0}),
        of_model("MiniLM embeddings", "halfbyte rtn", 1.0, mean_cosine=0.97314, least_cosine=0.956)
        | {"facts": {"sentences": 256}},
    ]
    document = {"machine": {"model name": "Made-up", "cores": 2}, "command": "some", "threads": 2, "rows": rows}
    readme = f"before\n{gpu_table.MODELS_BEGIN}old\n{gpu_table.MODELS_END}after\n"
    assert gpu_table.with_models(readme, [("made-up-cpu-models.json", json.dumps(document))]) == (
        f"before\n{gpu_table.MODELS_BEGIN}"
        "On an Made-up (2 cores), by `some`\n"
        "(`benchmarks/results/made-up-cpu-models.json`): SmolLM2-135M decodes, 2 threads: halfbyte float32 "
        "125.0 tokens/s, 2.50 x, transformers float32 50.0 tokens/s. MiniLM's embeddings of 256 sentences keep a mean "
        "cosine of 0.9731 (the least 0.956).\n"
        f"{gpu_table.MODELS_END}after\n"
    )


def test_pages_are_what_the_results_say(gpu_table):
    for page, made in gpu_table.pages().items():
        assert page.read_text() == made, "run: python scripts/gpu_table.py"


def of_experts(who, part, seconds, picked=None, **figures):
    named = [{"name": name.replace("_", " "), "value": value} for name, value in figures.items()]
    facts = {"what": part, "floor": 7.2e-6} | ({} if picked is None else {"picked": picked})
    return {"what": "made-up, 1 tokens", "who": who, "seconds": seconds, "figures": named, "facts": facts}


def test_experts(gpu_table):
    rows = [
        of_experts("one", "products", 10.44e-6, True, of_the_floor=0.6897, x_Humming=2.3),
        of_experts("one", "layer", 11.9e-6, True),
        of_experts("other", "products", 9e-6, False, of_the_floor=0.8),
        of_experts("humming grouped", "products", 25.8e-6),
        of_experts("humming indexed", "products", 24.4e-6),
        {"what": "made-up, 1 tokens", "who": "torch bfloat16", "missing": "no memory"},
        of_experts("one", "products", 1e-6, True, of_the_floor=0.1) | {"what": "without a layer"},
    ]
    run = RUN | {"command": "python -m benchmarks.experts"}
    document = {"run": run, "rows": rows, "verdict": ["1 of 2 bounds met", "missed: one"]}
    page = f"before\n{gpu_table.EXPERTS_BEGIN}old\n{gpu_table.EXPERTS_END}after\n"
    on_a_cpu = json.dumps({"machine": {}, "rows": []})
    made = gpu_table.with_experts(page, [("cpu-experts.json", on_a_cpu), ("a-experts.json", json.dumps(document))])
    assert made == (
        f"before\n{gpu_table.EXPERTS_BEGIN}"
        "On an NVIDIA Made-up (driver 1.2.3, torch 2.11.0, Triton 3.6.0; 2026-01-02, commit 0123456), by\n"
        "`python -m benchmarks.experts`, microseconds; all rows are in `benchmarks/results/a-experts.json`.\n"
        "\n"
        "| layer, tokens | kernel | floor | two products | of the floor | whole layer | Humming | torch bf16 |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| made-up, 1 tokens | one | 7.2 | 10.4 | 0.69 | 11.9 | 24.4 |  |\n"
        "\n"
        "1 of 2 bounds met.\n"
        "- missed: one\n"
        f"{gpu_table.EXPERTS_END}after\n"
    )
    assert gpu_table.with_experts(page, []) == f"before\n{gpu_table.EXPERTS_BEGIN}{gpu_table.EXPERTS_END}after\n"
