"""The GPU's benchmark: its arithmetic, its verdicts and checks, and a whole run on a CPU in the GPU's place."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import gpu, gpu_ahead, gpu_bounds, gpu_humming, gpu_report, gpu_subjects, gpu_timing
from benchmarks.gpu_report import Case, Measured
from benchmarks.gpu_subjects import Candidate, Result, Weights

import gpu_fp8
import halfbyte as hb
from gpu_codecs import needs_triton
from halfbyte.kernels import Fp8Args
from halfbyte.kernels.cuda import fp8_quantize
from halfbyte.kernels.cuda.ceilings import CEILINGS
from halfbyte.kernels.fp8 import quantized
from halfbyte.trials import WrongResultError

H200 = CEILINGS["NVIDIA H200"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")


@pytest.mark.parametrize(
    ("n", "k", "rows", "microseconds"),
    [(4096, 4096, 1, 3.3551), (14336, 4096, 1, 8.4885), (248077, 4096, 8, 126.4313), (28672, 8192, 8192, 4914.83)],
)
def test_ideal(n, k, rows, microseconds):
    assert gpu_bounds.ideal(H200, n, k, rows) * 1e6 == pytest.approx(microseconds, rel=1e-4)


LARGE = ((28672, 8192, 512), (14336, 4096, 1024), (4096, 4096, 4096), (14336, 4096, 2048))


def test_bounds_of_shapes_and_tokens():
    assert gpu_bounds.share(248077, 4096, 8) == (0.86, 0.96)
    assert gpu_bounds.share(4096, 4096, 16) == (0.45, 0.80)
    assert [gpu_bounds.share(*case) for case in ((14336, 4096, 2), (4096, 14336, 1), (4096, 4096, 512))] == [None] * 3
    assert gpu_bounds.share(28672, 8192, 64) == gpu_bounds.share(28672, 8192, 32) == (0.56, 0.75)
    assert gpu_bounds.share(14336, 4096, 256) == gpu_bounds.share(14336, 4096, 128) == (0.74, 0.92)
    assert gpu_bounds.over_cublas(14336, 4096, 256) is gpu_bounds.over_cublas(4096, 14336, 512) is None
    assert [round(1 / gpu_bounds.over_cublas(*case)[0], 3) for case in LARGE] == [1.1, 1.16, 1.16, 1.1]
    assert gpu_bounds.over_humming(28672, 8192, 2) == (1.3, None)
    assert gpu_bounds.over_humming(28672, 8192, 4096) == gpu_bounds.over_humming(4096, 4096, 32) == (1, None)
    assert gpu_bounds.over_humming(14336, 4096, 1024) == (0.97, None)
    assert gpu_bounds.over_humming(4096, 4096, 64) is gpu_bounds.over_humming(248077, 4096, 16) is None
    assert gpu_bounds.is_off(4.1e12, 4.54e12)
    assert gpu_bounds.is_off(850e12, 783e12)
    assert not gpu_bounds.is_off(4.3e12, 4.54e12)


def test_what_fp8_moves():
    """Twice the operations; the packed weight, or the twin."""
    assert gpu_bounds.ideal(H200, 28672, 8192, 1024, "fp8") * 1e6 == pytest.approx(307.1789, rel=1e-4)
    assert gpu_bounds.moved(4096, 4096, 256, "twin") - gpu_bounds.moved(4096, 4096, 256) == 4096 * 4096 * 7 // 16


FRAGMENTS = {"layout": "fragments(dtype=bfloat16)"}
MEASURED = [
    Measured("gluon-decode", "default", 248077, 150e-6, 149e-6, 1.66e-3, FRAGMENTS),
    Measured("triton-decode", "other", 248077, 240e-6, 239e-6, 1.66e-3, FRAGMENTS),
    Measured("triton-gemm", "other", 248077, 300e-6, 299e-6, 1.75e-3, FRAGMENTS),
    Measured("triton-columns", "other", 248077, 200e-6, 199e-6, 1.66e-3, {"layout": "columns(align=128)"}),
    Measured("gluon-decode", "whole", 248064, 146e-6, 145e-6, 1.66e-3, FRAGMENTS),
    Measured("cublas bfloat16", "peer", 248064, 490e-6, 489e-6, 2.3e-3),
    Measured("humming", "peer", 248064, 198e-6, 197e-6, 3e-3),
]


def test_figures_and_their_verdicts():
    case = Case(248077, 4096, 1, "bfloat16", H200)
    rows = [gpu_report.row(case, one, MEASURED) for one in MEASURED]
    default = {figure.name: (round(figure.value, 4), figure.must, figure.met) for figure in rows[0].figures}
    assert default == {
        "of ideal": (0.8378, 0.86, False),
        "GB/s": (3813.8251, None, None),
        "TFLOP/s": (13.5483, None, None),
        "relative error": (0.0017, 1.7e-3, True),
        "x the time of N=248064": (1.0274, 1.02, False),
        "x cublas bfloat16": (3.2667, None, None),
        "x humming": (1.32, 1.3, True),
        "of its speed in the portable tier": (0.625, 0.6, True),
    }
    assert [figure.met for figure in rows[2].figures if figure.must] == [False]
    assert not any(figure.must for row in rows[5:] for figure in row.figures)
    assert gpu_report.verdict(rows) == [
        "6 of 9 bounds met",
        "missed: M=1 248077x4096, gluon-decode: 0.838 of ideal, at least 0.86: MISSED (aim 0.96)",
        "missed: M=1 248077x4096, gluon-decode: 1.03 x the time of N=248064, at most 1.02: MISSED",
        "missed: M=1 248077x4096, triton-gemm: 0.00175 relative error, at most 0.0017: MISSED",
    ]
    assert gpu_report.line(case, rows) == (
        "M=1 248077x4096      ideal 125.7, us: *gluon-decode 150.0 (0.84) [0.838 of ideal, at least 0.86: MISSED] "
        "[1.03 x the time of N=248064, at most 1.02: MISSED], triton-decode 240.0 (0.52), "
        "triton-gemm 300.0 (0.42) [0.00175 relative error, at most 0.0017: MISSED], "
        "triton-columns columns 200.0 (0.63), gluon-decode N=248064 146.0 (0.86), cublas bfloat16 490.0, humming 198.0"
    )


def test_fp8_stands_beside_the_exact_product_and_the_twin():
    case = Case(28672, 8192, 256, "bfloat16", H200)
    measured = [
        Measured("gluon-gemm", "default", 28672, 170e-6, 169e-6, 1.66e-3, FRAGMENTS),
        Measured("gluon-fp8", "fp8", 28672, 120e-6, 119e-6, 2.4e-3, FRAGMENTS),
        Measured("scaled-mm", "twin", 28672, 100e-6, 99e-6, 5.1e-3, {"layout": "twin"}),
        Measured("cublas bfloat16", "peer", 28672, 180e-6, 180e-6, 2.3e-3),
    ]
    rows = [gpu_report.row(case, one, measured) for one in measured]
    found = {figure.name: (round(figure.value, 4), figure.must, figure.met) for figure in rows[1].figures}
    assert found == {
        "of ideal": (0.6399, None, None),
        "GB/s": (1258.2912, None, None),
        "TFLOP/s": (1002.159, None, None),
        "relative error": (0.0024, 5e-3, True),
        "x the exact product": (1.4167, 1.25, True),
        "x the time of scaled-mm": (1.2, 1.3, True),
        "x cublas bfloat16": (1.5, None, None),
    }
    assert [figure.name for figure in rows[2].figures if figure.met is False] == ["relative error"]
    assert "*gluon-fp8 120.0 (0.64), scaled-mm 100.0 (" in gpu_report.line(case, rows)
    few = Case(28672, 8192, 64, "bfloat16", H200)
    assert not [f.name for f in gpu_report.row(few, measured[1], measured).figures if f.must and f.name[0] == "x"]


def test_an_unknown_gpu_has_no_bounds():
    case = Case(4096, 4096, 1, "bfloat16", None)
    row = gpu_report.row(case, MEASURED[0], MEASURED)
    assert [figure.name for figure in row.figures[:2]] == ["GB/s", "TFLOP/s"]
    assert not any(figure.must for figure in row.figures)
    assert gpu_report.verdict([row]) == ["0 of 0 bounds met"]


def test_a_run_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(gpu_bounds.WHOLE, 136, 128)
    monkeypatch.setattr(gpu_subjects, "CHECKED", 2000)
    monkeypatch.setenv("HALFBYTE_THREADS", "1")
    out = tmp_path / "results" / "made.jsonl"
    arguments = [
        "--device",
        "cpu",
        "--shapes",
        "136x64",
        "48x128",
        "--rows",
        "1",
        "3",
        "--megabytes",
        "0.02",
        "--peers",
    ]
    gpu.main([*arguments, "--out", str(out)])
    run, *rows, end = map(json.loads, out.read_text().splitlines())
    assert run["run"]["gpu"] == "no GPU"
    assert run["run"]["command"] == f"python -m benchmarks.gpu {' '.join([*arguments, '--out', str(out)])}"
    assert run["run"]["versions"]["torch"] == torch.__version__
    assert end["end"]["verdict"] == ["0 of 0 bounds met"]
    assert not list(out.parent.glob("*.part"))
    kinds = [(row["what"], row["facts"]["kind"]) for row in rows if row["what"].startswith("M=")]
    for what in ("M=1 136x64", "M=3 136x64", "M=1 48x128", "M=3 48x128"):
        assert kinds.count((what, "default")) == 1
        assert kinds.count((what, "whole")) == ("136" in what)
        assert kinds.count((what, "fp8")) == kinds.count((what, "twin")) == 1
    for row in rows:
        figures = {figure["name"]: figure["value"] for figure in row["figures"]}
        assert row["seconds"] > 0
        assert 0 < figures.get("relative error", 1e-3) < 2e-3
        if row.get("facts", {}).get("kind") == "fp8":
            assert {"x the exact product", "x the time of fp8-torch"} <= set(figures)
        assert len(row["facts"]["batches"]) == gpu.ROUNDS if row["what"].startswith("M=") else True
    assert [row["what"] for row in rows[-6:]] == [
        "host M=1 32x64",
        *(f"{what} 256x512" for what in ("pack", "unpack", "quantize", "dequantize", "embedding M=128")),
    ]
    said = capsys.readouterr().out
    assert "humming: not installed: python3 -m pip install --no-deps humming-kernels==0.1.20\n" in said
    assert said.endswith("0 rows not measured, 0 probes off, " + said.rsplit(", ", 1)[1])


def test_nothing_is_measured_on_red(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: types.SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match="not measured: the kernels' tests fail; run: scripts/gpu_tests"):
        gpu.main(["--quick"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "64x65"], "argument --shapes: N is 1 or more and K a multiple of 16, not 64x65"),
        (["--shapes", "64"], "argument --shapes: invalid shape value: '64'"),
        (["--rows", "1", "0"], "argument --rows: 1 or more, not 0"),
    ],
)
def test_what_cannot_be_measured(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--device", "cpu", *arguments])
    assert capsys.readouterr().err.endswith(f"error: {said}\n")


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="not measured: torch sees no CUDA GPU"):
        gpu.main(["--quick"])


def test_a_lost_gpu_ends_the_run_with_what_there_is(tmp_path, monkeypatch):
    def lost(self):
        self.say(gpu.Row("M=1 8x16", "some", missing="why"))
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(gpu.Bench, "run", lost)
    out = tmp_path / "made.jsonl"
    with pytest.raises(
        SystemExit,
        match=r"not finished: CUDA error: an illegal memory access; rows until here are in .*/made.jsonl.part",
    ):
        gpu.main(["--device", "cpu", "--out", str(out)])
    assert not out.exists()
    assert [*map(json.loads, out.with_name("made.jsonl.part").read_text().splitlines())][1:] == [
        {"what": "M=1 8x16", "who": "some", "missing": "why"}
    ]


def test_quick_and_chosen():
    quick = gpu.parsed(["--quick", "--rows", "2"])
    assert (quick.shapes, quick.rows) == (list(gpu_bounds.QUICK_SHAPES), [2])
    assert gpu.parsed([]).rows == list(gpu_bounds.ROWS)
    assert gpu.parsed(["--shapes", "8x16", "24x32"]).shapes == [(8, 16), (24, 32)]


@pytest.fixture
def product():
    """Weights, activations, a result for two tokens, and a candidate that is right."""
    weights = Weights(1600, 32, 0.01, "cpu")
    x, result = torch.randn(2, 32).bfloat16(), Result(2, 1600, "bfloat16", "cpu")
    out, decoded = result.view(1600), weights.weight.dequantize().double()

    def call(i):
        out.copy_(x.double() @ decoded.T)

    return weights, x, result, Candidate("c", "other", call, 2, out, weights, 1e-2)


def test_one_rounding_is_what_is_allowed(product):
    weights, x, result, candidate = product
    seen = []

    def replay():
        seen.append(x.clone())
        candidate.call(0)

    assert 1.61e-3 < gpu_subjects.error(candidate, x, result, replay) < gpu_bounds.ERROR["bfloat16"][0]
    assert len(seen) == 16
    assert not torch.equal(seen[0], seen[1])
    assert weights.stripes[:8].tolist() == list(range(8))
    assert weights.stripes[-1] == 1599
    assert weights.stripes.unique().numel() == 1280


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda memory, out: out[1, 77].fill_(float("nan")), "some elements were not written"),
        (lambda memory, out: memory[gpu_subjects.GUARD - 1].fill_(0), "wrote outside"),
        (lambda memory, out: memory[gpu_subjects.GUARD + 3200].fill_(0), "wrote outside"),
        (lambda memory, out: out[:, :8].mul_(2), "off by"),
        (lambda memory, out: out[:, 1592:].mul_(2), "off by"),
    ],
)
def test_what_is_wrong_is_found(product, spoil, words):
    _, x, result, candidate = product

    def replay():
        candidate.call(0)
        spoil(result.memory, candidate.out)

    with pytest.raises(WrongResultError, match=words):
        gpu_subjects.error(candidate, x, result, replay)


def test_a_kernel_that_fails_is_a_row(monkeypatch, capsys):
    ours = gpu_subjects.ours

    def broken(weights, x, result):
        first, *others = ours(weights, x, result)
        return [gpu.replace(first, call=lambda i: 1 / 0), *others]

    monkeypatch.setattr(gpu_subjects, "ours", broken)
    monkeypatch.setattr(gpu_subjects, "CHECKED", 2000)
    options = gpu.parsed(["--device", "cpu", "--shapes", "32x64", "--rows", "2", "--megabytes", "0.01"])
    bench = gpu.Bench(options, "no GPU", gpu_report.Lines(None, {}))
    bench.shape(32, 64)
    assert [row.missing for row in bench.rows if row.seconds is None] == ["ZeroDivisionError: division by zero"]
    assert sum(row.seconds is not None for row in bench.rows) >= 1


def test_copies_take_turns_in_whole_turns():
    assert gpu_timing.launches(32, 3.4e-6) == 320
    assert gpu_timing.launches(2, 5e-3) == 2
    calls = []
    timed = gpu_timing.Timed(calls.append, 3, 6, "cpu")
    timed.replay()
    assert calls == [0, 1, 2] * 5


def test_rounds_begin_with_another_each(monkeypatch):
    order = []

    class Timed(gpu_timing.Timed):
        def batch(self):
            order.append(self.copies)
            self.seconds.append(len(order))

    all_timed = [Timed(lambda i: None, i, 1, "cpu") for i in range(3)]
    gpu_timing.in_rounds(all_timed, 3)
    assert order == [0, 1, 2, 0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert [timed.seconds for timed in all_timed] == [[4, 9, 11], [5, 7, 12], [6, 8, 10]]
    assert all_timed[0].median == 9


def test_why_humming_is_missing(monkeypatch, tmp_path):
    for name in ("CACHE_DIR", "TMP_DIR"):
        monkeypatch.setenv(f"HUMMING_{name}", str(tmp_path))
    monkeypatch.setenv("HUMMING_COMPILER", "nvcc")
    monkeypatch.setitem(sys.modules, "humming", None)
    assert "humming" in gpu_humming.missing()
    monkeypatch.setitem(sys.modules, "humming", types.ModuleType("humming"))
    assert gpu_humming.missing() is None


def test_what_cannot_be_compiled_ahead_is_a_line():
    why = gpu_ahead._attempt(
        gpu_ahead.product, ("fragments(dtype=nothing)", (8, 16), "reference-torch", "bfloat16", (1,))
    )
    assert why.startswith("LayoutError: ")
    assert gpu_ahead._attempt(print, ()) == ""


def test_humming_is_driven_by_its_layer(monkeypatch):
    """With its API in its place: which weight is launched with what."""
    launched, layers = [], []

    class Layer(torch.nn.Module):
        def __init__(self, shape_n, shape_k, weight_config, torch_dtype):
            super().__init__()
            layers.append((shape_n, shape_k, weight_config, torch_dtype))
            self.locks = torch.zeros(4)

        def load_from_tensors(self, tensors):
            for name, tensor in tensors.items():
                setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))

        def transform(self):
            self.humming_config = types.SimpleNamespace(to_str=lambda: "config")

    modules = {
        "humming": {},
        "humming.layer": {"HummingLayer": Layer},
        "humming.kernel": {},
        "humming.kernel.humming": {"HummingKernel": types.SimpleNamespace(prepare_kernels=lambda *a: a)},
        "humming.ops": {"launch_kernel": lambda **given: launched.append(given)},
        "humming.tune": {"get_heuristics_config": lambda config, shape_m, device: {"m": shape_m}},
    }
    for name, held in modules.items():
        module = types.ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch, "device", lambda name: torch.inference_mode(False))
    weights = Weights(64, 32, 0.003, "cpu")
    x, result = torch.randn(4, 32).bfloat16(), Result(4, 64, "bfloat16", "cpu")
    candidate = gpu_humming.candidate(weights, x, result)
    assert (candidate.who, candidate.kind, candidate.copies) == ("humming", "peer", 3)
    assert layers == [(64, 32, {"quant_method": "modelopt", "quant_algo": "nvfp4"}, torch.bfloat16)]
    for i in range(3):
        candidate.call(i)
    first, second, _ = launched
    assert first["configs"] == ("config", None, {"m": 4}, 0)
    assert first["weight"].data_ptr() != second["weight"].data_ptr()
    assert torch.equal(second["weight"], weights.weight.codes)
    assert second["weight_scale"].dtype == torch.float8_e4m3fn
    assert second["weight_scale_2"].tolist() == pytest.approx([1.7e-3])
    assert all(given["outputs"] is candidate.out and given["locks"] is first["locks"] for given in launched)


@pytest.fixture
def ragged(monkeypatch):
    """scripts/gpu_ragged.py on small shapes, for the CPU; activations are quantized by torch."""
    spec = importlib.util.spec_from_file_location("gpu_ragged", gpu.ROOT / "scripts" / "gpu_ragged.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def quantizer(device, dtype, k, *, ordered, pre_scale):
        def run(rows, x, pre, data, scales):
            q, scale = quantized(x[: rows * k].view(rows, k), pre)
            q = torch.from_numpy(gpu_fp8.in_order(q.numpy())) if ordered else q
            data.view(rows, -1).zero_()[:, : q.shape[1]] = q
            scales[:] = scale[:, 0]

        return run

    monkeypatch.setattr(fp8_quantize, "quantizer", quantizer)
    for name, few in {
        "LAYOUTS": ("rows",), "SHAPES": ((17, 48),), "FP8_SHAPES": ((17, 45),), "ACTIVATIONS": ((3, 100),)
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, few)
    return module


def test_ragged_products_are_compared(ragged, capsys):
    assert ragged.main("cpu") == 0
    said = capsys.readouterr().out
    assert " calls, 0 wrong, by cpu-" in said
    assert said.endswith(", dequantize, embedding, fp8-torch, quantize, quantizer, reference-torch\n")


def test_a_ragged_call_is_of_every_kind(ragged):
    calls = list(ragged.cases())
    assert {form for bundle, form, *_ in calls if bundle is Fp8Args} == {*ragged.FP8_FORMS}
    assert {rows for bundle, *_, rows, _ in calls if bundle is Fp8Args} == {9, 257}
    done = [ragged.case(*one, "cpu") for one in calls if one[0] is Fp8Args]
    assert [line.split(" M=")[0] for lines in done for line in lines] == [
        f"fp8-torch {form} 17x45" for _ in range(2) for form in ragged.FP8_FORMS for _ in range(2)
    ]


def test_wrong_ragged_calls_are_told(ragged, monkeypatch, capsys):
    monkeypatch.setattr(ragged.fp8_gluon, "ERROR", 1e-9)
    assert ragged.main("cpu") == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert {line.split()[0] for line in wrong} == {"fp8-torch"}
    monkeypatch.setattr(ragged, "ERROR", dict.fromkeys(ragged.ERROR, 1e-9))
    assert ragged.main("cpu") == 1
    assert "cpu-portable rows 17x48 M=1: WRONG by " in capsys.readouterr().out
    right = fp8_quantize.quantizer

    def off(*args, **how):
        def run(rows, x, pre, data, scales):
            right(*args, **how)(rows, x, pre, data, scales)
            data[-1] ^= 1

        return run

    monkeypatch.setattr(fp8_quantize, "quantizer", off)
    assert all("WRONG" in line for line in ragged.activations((3, 100), "float16", "cpu"))
    monkeypatch.setattr(ragged, "KERNELS", ())
    assert ragged.main("cpu") == 1


@needs_triton
def test_the_read_probe_reads_by_16_bytes():
    from benchmarks import gpu_probe

    from cuda_code import Program

    types_, constants = {"memory": "*i32", "out": "*i32", "size": "i32"}, {"block": gpu_probe.BLOCK}
    code = Program(gpu_probe._read, types_, constants, {"num_warps": 4}, ("size",)).compile(90)
    assert code.spills == 0
    (loop,) = code.loops
    assert loop.opcodes["LDG.E.128"] == 8


@pytest.mark.gpu
@pytest.mark.alone
@needs_gpu
def test_a_graph_takes_copies_in_turns_and_is_timed():
    sums = torch.zeros(3, device="cuda")
    timed = gpu_timing.Timed(lambda i: sums[i].add_(1), 3, 6, "cuda")
    sums.zero_()
    timed.replay()
    assert sums.tolist() == [2, 2, 2]
    gpu_timing.in_rounds([timed], 2)
    assert len(timed.seconds) == 2
    assert all(0 < seconds < 1e-3 for seconds in timed.seconds)


@pytest.mark.gpu
@needs_gpu
def test_the_read_probe_reads_all_words():
    from benchmarks import gpu_probe

    memory = torch.randint(-(2**31), 2**31 - 1, (37 * gpu_probe.BLOCK,), device="cuda").int()
    parts = gpu_probe.read(memory).cpu().numpy()
    assert np.bitwise_xor.reduce(parts) == np.bitwise_xor.reduce(memory.cpu().numpy())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["scripts/gpu_check"], "not measured: torch sees no CUDA GPU\n"),
        ([sys.executable, "scripts/gpu_ragged.py"], "not run: torch sees no CUDA GPU\n"),
        pytest.param(
            [sys.executable, "-m", "benchmarks.layouts_cuda"],
            "not measured: torch sees no CUDA GPU\n",
            marks=needs_triton,
        ),
    ],
    ids=["gpu_check", "gpu_ragged", "layouts_cuda"],
)
def test_without_a_gpu_each_command_ends_with_one_line(command, said):
    source = Path(hb.__file__).parents[1]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "PYTHONPATH": str(source)}
    done = subprocess.run(command, cwd=gpu.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_gpu_check_tells_its_options():
    done = subprocess.run(["scripts/gpu_check", "--help"], cwd=gpu.ROOT, capture_output=True, text=True, check=True)
    assert "scripts/gpu_check [--sanitize] [OPTION of benchmarks.gpu ...]" in done.stdout
    assert "#" not in done.stdout


@pytest.mark.parametrize("xdist", [True, False])
@pytest.mark.parametrize(
    ("together", "alone", "status"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (5, 0, 5), (1, 2, 2)], ids=str
)
def test_gpu_tests_run_side_by_side_and_alone_and_tell_both_results(tmp_path, xdist, together, alone, status):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase $1 in -c) exit {int(not xdist)};; esac\necho "$@"\n'
        f'case "$*" in *"and not alone"*) exit {together};; *) exit {alone};; esac\n'
    )
    python.chmod(0o755)
    command = ["scripts/gpu_tests", "-k", "some"]
    environment = os.environ | {"PYTHON": str(python)}
    done = subprocess.run(command, cwd=gpu.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, "")
    *said, first, second = done.stdout.splitlines()
    assert said == ([] if xdist else ["pytest-xdist is not installed: one test runs after the other"])
    assert first.startswith(
        "-m pytest -m gpu and not alone -n logical " if xdist else "-m pytest -m gpu and not alone -q"
    )
    assert second.startswith("-m pytest -m gpu and alone -q ")
    for line in (first, second):
        marked = {
            f"tests/run/{name.name}"
            for name in Path(__file__).parent.glob("test_*.py")
            if any(word in name.read_text() for word in ("mark.gpu", "on_gpu", "needs_gpu", "expert_cases"))
        }
        assert {word for word in line.split() if word.endswith(".py")} == marked
        assert line.endswith(" -k some")
