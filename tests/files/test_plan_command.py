"""``plan``: which kernels would run a checkpoint, told from its headers, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    CONFIG,
    GOLDENS,
    HIDDEN,
    VOCAB,
    K,
    Q,
    V,
    call,
    check_failure,
    environment,
    expert_weights,
    floats,
    fp8,
    make_dense,
    make_float,
    modelopt_section,
    named,
    nvfp4,
    raw_safetensors,
    run_cli,
    save,
    split_experts,
    stacked_experts,
    write_json,
)
from halfbyte.errors import LayoutError, UnavailableError, UsageError
from halfbyte.kernels.cuda import decode_gluon
from halfbyte.kernels.cuda.ceilings import CEILINGS
from halfbyte.kernels.cuda.choices import SHIPPED
from halfbyte.products import products, touched
from halfbyte.tools.plan import plan

HOPPER = "cuda:sm_90"
H200 = CEILINGS["NVIDIA H200"]
LLAMA = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""The products of Llama 3 8B, (N, K)."""


@pytest.fixture(autouse=True)
def _shipped_choices(monkeypatch):
    monkeypatch.setenv("HALFBYTE_CHOICES", "none")


def layer(report, end):
    (found,) = [one for one in report.facts["layers"] if one["name"].endswith(end)]
    return found


def at(one, tokens):
    (found,) = [made for made in one["plans"] if made["tokens"] == tokens]
    return found


def hollow(path: Path, layers: int = 2, head: str = "BF16") -> Path:
    """Llama 3 8B with few layers, of which only the headers are real: the rest is a hole in the file."""
    shapes = {
        **{f"self_attn.{part}_proj": (n, 4096) for part, n in (("q", 4096), ("k", 1024), ("v", 1024), ("o", 4096))},
        **{f"mlp.{part}_proj": (14336, 4096) for part in ("gate", "up")},
        "mlp.down_proj": (4096, 14336),
    }
    tensors = {"model.embed_tokens.weight": ("BF16", [128256, 4096]), "lm_head.weight": (head, [128256, 4096])}
    for i in range(layers):
        tensors[f"model.layers.{i}.input_layernorm.weight"] = ("BF16", [4096])
        for name, (n, k) in shapes.items():
            base = f"model.layers.{i}.{name}.weight"
            tensors |= {base: ("U8", [n, k // 2]), f"{base}_scale": ("F8_E4M3", [n, k // 16])}
            tensors[f"{base}_scale_2"] = ("F32", [])
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4}[dtype]
        for axis in shape:
            size *= axis
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    path.mkdir()
    file = raw_safetensors(path / "model.safetensors", header)
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size + end)
    config = {
        "model_type": "llama", "dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
        "quantization_config": modelopt_section(),
    }  # fmt: skip
    write_json(path / "config.json", config)
    return path


def microseconds(kernel: str, shape: tuple[int, int], rows: int) -> float:
    """What the shipped file says was measured."""
    held = json.loads(SHIPPED.read_text())["choices"]
    (entry,) = [one for one in held if one["op"] == "linear" and tuple(one["shape"]) == shape]
    times = [one["microseconds"] for one in entry["kernels"][kernel]["rows"]]
    return next(held[str(rows)] for held in times if str(rows) in held)


class TestGpu:
    def test_measured_times(self, tmp_path):
        report = plan(hollow(tmp_path / "a"), device=HOPPER, tokens=[1])
        names = ("q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj")
        total = 0.0
        for name, shape in zip(names, LLAMA.values(), strict=True):
            one = layer(report, name)
            made = at(one, 1)
            assert (tuple(one["shape"]), one["count"], one["layout"]) == (shape, 2, "fragments(dtype=bfloat16)")
            assert made["kernel"] == "gluon-decode"
            assert "warps=" in made["configuration"]
            n, k = shape
            assert made["why"] == f"best on NVIDIA H200 at {n}x{k}, measured 2026-11-30, shipped"
            assert made["expected"] == pytest.approx(1e-6 * microseconds("gluon-decode", shape, 1), rel=0.01)
            assert made["seconds"] == 2 * made["expected"]
            assert made["share"] == made["least"] / made["expected"] < 1
            held = n * k // 2 + n * k // 16 + 4 * (n if "+" in name else 1)
            assert (one["bytes"], one["held"]) == (held, 2 * held)
            assert made["bytes"] == held + 2 * (n + k)
            assert made["least"] == pytest.approx(made["bytes"] / H200.read + H200.start)
            total += made["seconds"]
        head = at(layer(report, "lm_head"), 1)
        size = 2 * 128256 * 4096
        assert (head["kernel"], head["why"], head["expected"]) == ("triton-dense", "stored as BF16", None)
        assert head["seconds"] == head["least"] == (size + 2 * (128256 + 4096)) / H200.read + H200.start
        (step,) = report.facts["steps"]
        assert step["seconds"] == pytest.approx(total + head["least"])
        assert step["tokens_per_second"] == pytest.approx(1 / step["seconds"])
        assert step["not_measured"] == ["lm_head"]
        read = size + sum(one["held"] for one in report.facts["layers"] if one["kind"] == "nvfp4")
        assert step["weight_bytes"] == read
        assert step["bound_tokens_per_second"] == pytest.approx(H200.read / read)

    def test_more_tokens_take_another_kernel(self, tmp_path):
        report = plan(hollow(tmp_path / "a"), device=HOPPER, tokens=[1, 16, 512])
        down = layer(report, "down_proj")
        assert [at(down, m)["kernel"] for m in (1, 16, 512)] == ["gluon-decode", "gluon-decode", "gluon-gemm"]
        assert at(down, 512)["scratch_bytes"] > 0
        assert report.facts["memory"]["scratch"] >= at(down, 512)["scratch_bytes"]
        bounds = [step["bound_tokens_per_second"] for step in report.facts["steps"]]
        assert bounds == pytest.approx([bounds[0], 16 * bounds[0], 512 * bounds[0]])

    def test_fp8(self, tmp_path):
        report = plan(hollow(tmp_path / "a"), device=HOPPER, tokens=[1, 512], precision="fp8")
        gate = layer(report, "gate_proj+up_proj")
        assert [at(gate, m)["kernel"] for m in (1, 512)] == ["gluon-decode", "gluon-fp8"]
        assert at(gate, 512)["expected"] < at(layer(plan(tmp_path / "a", device=HOPPER), "up_proj"), 512)["expected"]

    def test_apart(self, tmp_path):
        report = plan(hollow(tmp_path / "a"), device=HOPPER, fuse=False)
        shapes = {one["name"].rpartition(".")[2]: tuple(one["shape"]) for one in report.facts["layers"]}
        assert shapes == {
            "q_proj": (4096, 4096), "k_proj": (1024, 4096), "v_proj": (1024, 4096), "o_proj": (4096, 4096),
            "gate_proj": (14336, 4096), "up_proj": (14336, 4096), "down_proj": (4096, 14336),
            "lm_head": (128256, 4096),
        }  # fmt: skip

    def test_memory(self, tmp_path):
        memory = plan(hollow(tmp_path / "a"), device=HOPPER).facts["memory"]
        codes = 2 * sum(n * k * 9 // 16 for n, k in LLAMA.values()) + 2 * 4 * (6144 + 28672 + 1 + 1)
        rows = 2 * 128256 * 4096
        assert memory == {
            "nvfp4": codes, "fp8": 0, "dense": 0, "head": rows, "embedding": rows, "other": 2 * 2 * 4096,
            "held_twice": 0, "weights": codes + 2 * rows + 4 * 4096, "scratch": memory["scratch"],
            "cache_of_1000_tokens": 1000 * 2 * 2 * 8 * 128 * 2,
        }  # fmt: skip

    def test_layouts(self, tmp_path):
        """K = 48 is padded to 64 in fragments; rows have no such padding, and torch decodes them in each call."""
        path = make_dense(tmp_path / "a")
        down = layer(plan(path, device=HOPPER), "down_proj")
        assert down["bytes"] == 32 * 64 // 2 + 32 * 4 + 4
        down = layer(plan(path, device=HOPPER, layout="rows"), "down_proj")
        assert (down["bytes"], at(down, 1)["kernel"]) == (32 * 48 // 2 + 32 * 3 + 4, "reference-torch")
        none = at(layer(plan(path, device=HOPPER, layout="marlin"), "o_proj"), 1)
        assert (none["kernel"], none["seconds"]) == (None, None)
        assert none["why"].startswith("no kernel computes linear with layout marlin")

    def test_a_dense_head(self, tmp_path):
        report = plan(hollow(tmp_path / "a"), device=HOPPER, tokens=[1, 2, 3, 16])
        kernels = [made["kernel"] for made in layer(report, "lm_head")["plans"]]
        assert kernels == ["triton-dense", "triton-dense", "dense-torch", "dense-torch"]
        small = layer(plan(make_dense(tmp_path / "b"), device=HOPPER, tokens=[1, 2]), "lm_head")
        assert (at(small, 1)["kernel"], at(small, 2)["kernel"]) == ("triton-dense", "dense-torch")

    def test_a_dense_head_that_the_kernel_asked_for_declines(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HALFBYTE_KERNEL", "triton-dense")
        report = plan(hollow(tmp_path / "a"), device=HOPPER, tokens=[1, 16])
        first, second = layer(report, "lm_head")["plans"]
        assert (first["kernel"], second["kernel"], second["seconds"]) == ("triton-dense", None, None)
        assert second["why"].endswith("takes up to 2 tokens, not 16: cuBLAS is faster")
        assert any(note.startswith("lm_head: no kernel computes dense of 16 rows") for note in report.facts["notes"])

    def test_what_was_not_measured(self, tmp_path):
        report = plan(make_dense(tmp_path / "a"), device="cuda:sm_80")
        down = at(layer(report, "down_proj"), 1)
        assert (down["kernel"], down["least"], down["expected"]) == ("triton-decode", None, None)
        (step, *_) = report.facts["steps"]
        assert (step["seconds"], step["bound_tokens_per_second"], report.facts["gpu"]) == (None, None, None)


class TestForms:
    def test_the_small_model(self, tmp_path):
        report = plan(make_dense(tmp_path / "a", layers=3), device=HOPPER)
        found = {one["name"]: (one["kind"], tuple(one["shape"]), one["count"]) for one in report.facts["layers"]}
        prefix = "model.layers.*."
        assert found == {
            f"{prefix}self_attn.q_proj+k_proj+v_proj": ("nvfp4", (64, 32), 3),
            f"{prefix}self_attn.o_proj": ("nvfp4", (32, 32), 3),
            f"{prefix}mlp.gate_proj+up_proj": ("nvfp4", (96, 32), 3),
            f"{prefix}mlp.down_proj": ("nvfp4", (32, 48), 3),
            "lm_head": ("dense", (64, 32), 1),
        }

    @pytest.mark.parametrize("why", ["k_proj dense", "v_proj missing", "k_proj has a pre_scale", "another K"])
    def test_parts_that_do_not_fit_stay_apart(self, tmp_path, why):
        def change(tensors):
            part = {"v_proj missing": V}.get(why, K)
            for name in [name for name in tensors if name.startswith(f"{part}.")]:
                if why != "k_proj has a pre_scale":
                    del tensors[name]
            if why == "k_proj dense":
                tensors[f"{K}.weight"] = floats(16, HIDDEN)
            if why == "k_proj has a pre_scale":
                tensors[f"{K}.pre_quant_scale"] = floats(1, HIDDEN)[0]
            if why == "another K":
                tensors |= named("modelopt", K, nvfp4(16, 2 * HIDDEN))

        report = plan(make_dense(tmp_path / "a", change=change), device=HOPPER)
        names = [one["name"].rpartition(".")[2] for one in report.facts["layers"]]
        assert {"q_proj", "k_proj", "v_proj"} - {"v_proj" if why == "v_proj missing" else ""} <= set(names)
        assert "gate_proj+up_proj" in names
        notes = [note for note in report.facts["notes"] if "k_proj is dense" in note]
        assert bool(notes) == (why == "k_proj dense")

    def test_a_tied_head_reads_the_embedding_and_holds_nothing(self, tmp_path):
        config = CONFIG | {"tie_word_embeddings": True}
        report = plan(make_dense(tmp_path / "a", change={"lm_head.weight": None}, config=config), device=HOPPER)
        head = layer(report, "lm_head (the embedding)")
        assert (head["held"], at(head, 1)["weight_bytes"]) == (0, 2 * VOCAB * HIDDEN)
        assert (report.facts["memory"]["head"], report.facts["memory"]["embedding"]) == (0, 2 * VOCAB * HIDDEN)

    def test_an_nvfp4_embedding_and_head(self, tmp_path):
        change = dict.fromkeys(["lm_head.weight", "model.embed_tokens.weight"])
        change |= named("modelopt", "lm_head", nvfp4(VOCAB, HIDDEN)) | named(
            "modelopt", "model.embed_tokens", nvfp4(VOCAB, HIDDEN)
        )
        report = plan(make_dense(tmp_path / "a", change=change), device=HOPPER)
        looked_up, head = layer(report, "embed_tokens"), layer(report, "lm_head")
        assert at(looked_up, 16)["kernel"] == "triton-embedding"
        assert at(looked_up, 16)["weight_bytes"] == 0
        assert at(head, 16)["kernel"] == "gluon-decode"
        assert report.facts["memory"]["head"] == report.facts["memory"]["embedding"] == 64 * 32 + 64 * 4 + 4

    def test_fp8_layers(self, tmp_path):
        tensors = {f"{Q}.weight_scale_2": None, **{f"{Q}.{name}": t for name, t in fp8(HIDDEN, HIDDEN).items()}}
        path = make_dense(tmp_path / "a", change=tensors)
        report = plan(path, device=HOPPER)
        q = layer(report, "q_proj")
        assert (q["kind"], q["bytes"], q["layout"]) == ("fp8", HIDDEN * HIDDEN + 4, None)
        assert (at(q, 1)["kernel"], at(q, 1)["why"]) == ("torch", "FP8, decoded in each call")
        assert at(q, 1)["bytes"] == 5 * HIDDEN * HIDDEN + 2 * 2 * HIDDEN
        assert report.facts["memory"]["fp8"] == HIDDEN * HIDDEN + 4
        assert at(layer(plan(path, device=HOPPER, precision="fp8"), "q_proj"), 1)["kernel"] == "scaled-mm"
        assert any("--precision fp8 multiplies in FP8" in note for note in report.facts["notes"])

    @pytest.mark.parametrize("stacked", [False, True])
    def test_experts(self, tmp_path, stacked):
        """Eight experts, two for each token: two are asked by one token, all but a few by 16."""
        parent = "model.layers.0.mlp.experts"
        made = expert_weights(8, 16, HIDDEN)
        tensors = stacked_experts(parent, made) if stacked else split_experts(parent, made)
        for part in ("gate_proj", "up_proj", "down_proj"):
            for suffix in ("", "_scale", "_scale_2"):
                tensors[f"model.layers.0.mlp.{part}.weight{suffix}"] = None
        tensors["model.layers.0.mlp.gate.weight"] = floats(8, HIDDEN)
        config = CONFIG | {"model_type": "qwen3_moe", "num_experts_per_tok": 2}
        report = plan(make_dense(tmp_path / "a", change=tensors, config=config), device=HOPPER, tokens=[1, 16])
        one = layer(report, "experts.gate_up_proj+down_proj" if stacked else "experts.*.gate_proj+up_proj+down_proj")
        assert (tuple(one["shape"]), one["experts"], one["count"]) == ((32, 32, 16), 8, 1)
        assert [(made["rows"], made["calls"]) for made in one["plans"]] == [(1, 1), (16, 1)]
        form = halfbyte.ExpertsForm.of(8, 32, 16, top=2, layout="fragments")
        assert one["held"] == form.nbytes == 8 * one["bytes"]
        for count, asked in ((1, 2), (16, 8 * (1 - 0.75**16))):
            own = halfbyte.plan("experts", form, rows=count, device=HOPPER)
            assert (at(one, count)["kernel"], at(one, count)["bytes"]) == (own.kernel, own.bytes)
            assert at(one, count)["seconds"] == (own.expected or own.least)
            assert at(one, count)["weight_bytes"] == round(asked * one["bytes"])
            assert f"routing is taken to be even: {asked:.1f} experts have tokens" in own.notes
        assert [x["name"] for x in report.facts["layers"] if "experts" in x["name"]] == [one["name"]]
        assert report.facts["memory"]["other"] == 2 * HIDDEN * 3  # norms
        router = layer(report, "mlp.gate")
        assert (router["role"], router["kind"], router["shape"]) == ("router", "dense", [8, HIDDEN])
        assert "a token takes 2 experts, each of them as likely as any other" in report.facts["notes"]

    def test_ranks(self, tmp_path):
        path = hollow(tmp_path / "a", head="BF16")
        whole, half = (plan(path, device=HOPPER, tokens=[1, 16], ranks=ranks) for ranks in (1, 2))
        ends = ("k_proj+v_proj", "o_proj", "up_proj", "down_proj", "lm_head")
        shapes = [tuple(layer(half, end)["shape"]) for end in ends]
        assert shapes == [(3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168), (64128, 4096)]
        assert half.facts["ranks"] == 2
        assert [(step["sums"], step["sum_bytes"]) for step in half.facts["steps"]] == [(4, 16384), (4, 16 * 16384)]
        assert [step["sums"] for step in whole.facts["steps"]] == [0, 0]
        one, two = (report.facts["memory"] for report in (whole, half))
        assert (two["head"], two["embedding"]) == (one["head"] // 2, one["embedding"])
        assert two["cache_of_1000_tokens"] == one["cache_of_1000_tokens"] // 2
        assert (
            "products and memory are those of one rank; what the ranks exchange takes time of its own"
            in (half.facts["notes"])
        )
        wide = plan(path, device=HOPPER, ranks=16)  # two heads of queries, and one of the eight of keys
        assert layer(wide, "k_proj+v_proj")["shape"] == [4 * 128, 4096]
        assert wide.facts["memory"]["cache_of_1000_tokens"] == one["cache_of_1000_tokens"] // 8
        with pytest.raises(UsageError, match="the number of heads = 32 does not split over 3 ranks"):
            plan(path, device=HOPPER, ranks=3)
        with pytest.raises(UsageError, match="ranks are from 1 to 1024"):
            plan(path, device=HOPPER, ranks=1, expert_parallel=True)
        with pytest.raises(UsageError, match="there are no experts to deal to the ranks; leave expert_parallel out"):
            plan(path, device=HOPPER, ranks=2, expert_parallel=True)

    def test_experts_over_ranks(self, tmp_path):
        tensors = {}
        for i in range(2):
            tensors |= split_experts(f"model.layers.{i}.mlp.experts", expert_weights(8, 32, HIDDEN))
        for part in ("gate_proj", "up_proj", "down_proj"):
            for suffix in ("", "_scale", "_scale_2"):
                tensors[f"model.layers.0.mlp.{part}.weight{suffix}"] = None
        tensors["model.layers.0.mlp.experts.3.up_proj.input_scale"] = np.float32(0.01)
        config = CONFIG | {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "num_attention_heads": 2}
        path = make_dense(tmp_path / "a", change=tensors, config=config)
        columns, dealt = (plan(path, device=HOPPER, ranks=2, expert_parallel=how) for how in (False, True))
        found = [layer(one, "experts.*.gate_proj+up_proj+down_proj") for one in (columns, dealt)]
        assert [(one["shape"], one["experts"]) for one in found] == [([32, 32, 16], 8), ([64, 32, 32], 4)]
        sums = [one.facts["steps"][0]["sums"] - 1 for one in (columns, dealt)]  # but that of o_proj
        assert sums == [2, 2]

    def test_the_config_does_not_say_how_many_experts(self, tmp_path):
        tensors = split_experts("model.layers.0.mlp.experts", expert_weights(4, 16, HIDDEN))
        report = plan(make_dense(tmp_path / "a", change=tensors), device=HOPPER, tokens=[1])
        one = layer(report, "experts.*.gate_proj+up_proj+down_proj")
        assert at(one, 1)["weight_bytes"] == one["held"] == 4 * one["bytes"]
        assert "the config does not say how many experts a token takes: all are counted" in report.facts["notes"]

    def test_touched(self):
        assert touched(8, 2, 1) == 2
        assert touched(8, 8, 1) == 8
        assert touched(2, 1, 2) == 1.5

    def test_vision_is_memory_alone(self, tmp_path):
        change = named("modelopt", "visual.blocks.0.mlp.fc1", nvfp4(32, 32))
        report = plan(make_dense(tmp_path / "a", change=change), device=HOPPER)
        assert not [one for one in report.facts["layers"] if "visual" in one["name"]]
        assert report.facts["memory"]["other"] == 3 * 2 * HIDDEN + 32 * 16 + 32 * 2 + 4

    def test_products_count_what_is_alike(self, tmp_path):
        with halfbyte.open(make_dense(tmp_path / "a", layers=2)) as checkpoint:
            found = products(checkpoint.modules)
        norms = [one for one in found if one.role == "other"]
        assert [(one.name, one.count, one.stored) for one in norms] == [
            ("model.layers.*.input_layernorm", 2, 2 * 64),
            ("model.layers.*.post_attention_layernorm", 2, 2 * 64),
            ("model.norm", 1, 64),
        ]

    def test_products_of_one_input(self, tmp_path):
        weight, base = nvfp4(32, 32), "decoder.block.0.layer"
        names = [f"{base}.{i}.{parent}.{part}" for i, parent in enumerate(("SelfAttention", "EncDecAttention"))
                 for part in "qkv"]  # fmt: skip
        names += [f"{base}.2.DenseReluDense.wi_{i}" for i in range(2)]
        change = {key: tensor for name in names for key, tensor in named("modelopt", name, weight).items()}
        with halfbyte.open(make_dense(tmp_path / "a", change=change)) as checkpoint:
            found = {one.name: one.shape for one in products(checkpoint.modules) if one.name.startswith("decoder")}
        assert found == {
            **{f"decoder.block.*.layer.*.EncDecAttention.{part}": (32, 32) for part in "qkv"},
            "decoder.block.*.layer.*.SelfAttention.q+k+v": (96, 32),
            "decoder.block.*.layer.*.DenseReluDense.wi_0+wi_1": (64, 32),
        }


class TestCommand:
    @pytest.mark.parametrize("name", GOLDENS)
    def test_the_goldens(self, name):
        ran = call("plan", GOLDENS[name], "--device", HOPPER)
        assert (ran.rc, ran.stderr) == (0, "")
        for text in (
            "gate_proj+up_proj",
            "gluon-decode",
            "step of 512",
            "KV cache",
            "why 1",
            "128.0 kB for 1000 tokens",
        ):
            assert text in ran.stdout

    def test_json(self):
        path = GOLDENS["modelopt_llama_w4a16"]
        document = call("plan", path, "--device", HOPPER, "--tokens", "1,2", "--json").document
        assert (document["command"], document["ok"], document["tokens"]) == ("plan", True, [1, 2])
        assert document["layers"] == json.loads(json.dumps(plan(path, device=HOPPER, tokens=[1, 2]).facts["layers"]))

    def test_quiet(self):
        ran = call("plan", GOLDENS["modelopt_llama_w4a16"], "--quiet")
        assert ran == (0, "", "")

    def test_the_cpu_without_torch(self):
        code = (
            "import sys\nfor name in ('torch', 'transformers', 'numba', 'triton'): sys.modules[name] = None\n"
            "from halfbyte.cli import main\nmain(sys.argv[1:])"
        )
        path = str(GOLDENS["modelopt_llama_w4a16"])
        for device, kernel in (("cpu", "reference-numpy"), (HOPPER, "gluon-decode")):
            done = subprocess.run(
                [sys.executable, "-W", "error", "-c", code, "plan", path, "--json", "--device", device],
                capture_output=True, text=True, env=environment(), timeout=60, check=False,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (0, "")
            document = json.loads(done.stdout)
            assert document["layers"][0]["plans"][0]["kernel"] == kernel
            assert ("torch is not installed here: planned for NumPy arrays" in document["notes"]) == (device == "cpu")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--tokens", "0"], ["tokens of a step are from 1 to 16777216", "got 0"]),
            (["--tokens", ""], ["tokens are whole numbers"]),
            (["--tokens", "1,x"], ["tokens are whole numbers", "'x'"]),
            (["--tokens", "-1"], ["tokens are whole numbers", "'-1'"]),
            (["--tokens", "16777217"], ["from 1 to 16777216"]),
            (["--device", "gpu"], ["unknown device", "gpu"]),
            (["--device", "cuda:x"], ["unknown device"]),
            (["--precision", "int4"], ["unknown precision", "exact or int8 or fp8"]),
            (["--dtype", "int8"], ["unknown dtype"]),
            (["--layout", "nothing"], ["unknown layout"]),
            (["--layout", "fragments(dtype=int8)"], ["not a value of dtype"]),
            (["--layout", "gguf"], ["mlp.down_proj: layout gguf has no such shape", "K = 96"]),
        ],
    )
    def test_what_cannot_be_meant(self, arguments, words):
        check_failure(call("plan", GOLDENS["modelopt_llama_w4a16"], *arguments), 2, *words)

    def test_no_checkpoint(self, tmp_path):
        check_failure(call("plan", tmp_path / "nothing"), 2, "no such file or directory")
        check_failure(call("plan", tmp_path), 2, "no safetensors files")

    def test_a_dense_checkpoint(self, tmp_path):
        ran = call("plan", make_float(tmp_path / "a"))
        check_failure(ran, 2, "nothing here is quantized", "halfbyte quantize")

    def test_damaged_headers(self, tmp_path):
        path = make_dense(tmp_path / "a", change={f"{Q}.weight_scale": None})
        check_failure(call("plan", path, "--device", HOPPER), 2, f"{Q}.weight", "without its scales")

    def test_a_file_without_a_config(self, tmp_path):
        file = save(tmp_path / "one.safetensors", named("modelopt", "a.b", nvfp4(32, 32)))
        document = call("plan", file, "--json", "--device", HOPPER).document
        assert document["memory"]["cache_of_1000_tokens"] is None
        assert document["layers"][0]["name"] == "a.b"

    def test_a_closed_pipe(self):
        done = subprocess.run(
            f"{sys.executable} -m halfbyte plan {GOLDENS['modelopt_llama_w4a16']} --device {HOPPER} | head -0",
            shell=True, capture_output=True, text=True, env=environment(), timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_gpu_that_is_not_there(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        ran = run_cli("plan", GOLDENS["modelopt_llama_w4a16"], "--device", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
        check_failure(ran, 3, "torch sees no such GPU here", "--device cuda:sm_90")


def test_errors_have_their_classes(tmp_path):
    path = GOLDENS["modelopt_llama_w4a16"]
    with pytest.raises(UsageError, match="from 1 to"):
        plan(path, tokens=[])
    with pytest.raises(UnavailableError, match="torch sees no such GPU"):
        plan(path, device="cuda:99")


class TestForm:
    """A weight that is not there is planned as the weight would be."""

    def weight(self, per_row=False):
        rng = np.random.default_rng(0)
        return halfbyte.Weight(
            codes=rng.integers(0, 256, (48, 80), np.uint8),
            scales=rng.integers(40, 80, (48, 10), np.uint8),
            scale2=np.full((48, 1), 0.5, np.float32) if per_row else 0.5,
        )

    @pytest.mark.parametrize("layout", ["rows", "fragments", "columns"])
    @pytest.mark.parametrize("per_row", [False, True])
    @pytest.mark.parametrize("precision", [None, "fp8"])
    def test_the_same_plan(self, layout, per_row, precision):
        held = halfbyte.pack(self.weight(per_row), layout)
        form = halfbyte.Form(shape=(48, 160), layout=layout, per_row=per_row)
        assert form.nbytes == held.nbytes
        for rows in (1, 300):
            how = {"rows": rows, "device": HOPPER, "precision": precision}
            of_weight, of_form = (halfbyte.plan("linear", one, **how) for one in (held, form))
            assert replace(of_form, notes=()) == replace(of_weight, notes=())
            assert of_form.expected is None or of_form.expected > of_form.least > 0

    def test_the_same_embedding(self):
        held = halfbyte.pack(self.weight(), "rows")
        form = halfbyte.Form(shape=(48, 160))
        both = [halfbyte.plan("embedding", one, rows=5, device=HOPPER) for one in (held, form)]
        assert both[0] == both[1]

    def test_the_same_int8(self):
        form = halfbyte.Form(shape=(48, 160), per_row=True)
        how = {"rows": 5, "precision": "int8", "library": "numpy"}
        of_weight, of_form = (
            halfbyte.plan("linear", one, **how) for one in (halfbyte.pack(self.weight(), "rows"), form)
        )
        assert replace(of_form, notes=()) == replace(of_weight, notes=())
        assert of_form.notes[0] == "error of the weight by rounding to INT8: unknown: there are no values yet"

    @pytest.mark.parametrize("blocks", [False, True])
    @pytest.mark.parametrize("experts", [(), (3,)])
    def test_bytes_of_fp8(self, blocks, experts):
        form = halfbyte.Form(shape=(*experts, 200, 300), kind="fp8", blocks=blocks)
        assert form.nbytes == (3 if experts else 1) * (200 * 300 + 4 * (6 if blocks else 1))

    def test_what_cannot_be_meant(self):
        with pytest.raises(UsageError, match="no product of this kind of weight is planned: got mxfp4"):
            halfbyte.Form(shape=(16, 32), kind="mxfp4")
        with pytest.raises(UsageError, match="not the shape of a weight"):
            halfbyte.Form(shape=(16,))
        with pytest.raises(LayoutError, match="unknown layout"):
            halfbyte.Form(shape=(16, 32), layout="nothing")
        with pytest.raises(LayoutError, match="layout gguf has no such shape: K = 32 is not a multiple of 64"):
            halfbyte.Form(shape=(16, 32), layout="gguf")

    def test_gpus_elsewhere_need_nothing_here(self, monkeypatch):
        """What is missing here is no reason there; on this machine it is."""
        from halfbyte.kernels.cuda import launch

        monkeypatch.setattr(launch, "missing", lambda: "triton is not installed")
        form = halfbyte.Form(shape=(4096, 4096), layout="fragments")
        assert halfbyte.plan("linear", form, rows=1, device=HOPPER).kernel == "gluon-decode"
        here = form.call("exact", HERE, 90)
        assert "triton is not installed" in gluon.refuse(here)
        assert gluon.refuse(replace(here, elsewhere=True)) == ()


HERE = {"rows": 1, "dtype": "bfloat16", "out_dtype": "bfloat16", "device": "cuda", "library": "torch"}
gluon = decode_gluon.GLUON
