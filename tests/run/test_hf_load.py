"""halfbyte.hf.from_pretrained: every dialect runs packed, as precisely as its dense values."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import halfbyte
from checkpoints import (
    CONFIG,
    DOWN,
    GATE,
    GOLDENS,
    HIDDEN,
    OUT,
    UP,
    VOCAB,
    K,
    Q,
    V,
    copy_golden,
    floats,
    fp8,
    make_dense,
    make_float,
    named,
    nvfp4,
    read_json,
    save,
    tensors_of,
    write_json,
)
from halfbyte.errors import FormatError, LayoutError, UsageError
from halfbyte.hf import LoadReport, filling, from_pretrained
from halfbyte.nn import Embedding, Experts, Fp8Linear, Linear, Part, TiedLinear, weights_of
from halfbyte.weight import DenseWeight, to_torch
from helpers_run import assert_within_bound

TINY = [name for name in GOLDENS if GOLDENS[name].parent.name == "tiny_ckpt"]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
IDS = torch.arange(16)[None] * 3 % 32


def dense_model(path, folder, dtype):
    """transformers' own model, filled with the values of a checkpoint's weights in ``dtype``."""
    values = {}
    with halfbyte.open(path) as checkpoint:
        for name, weight in checkpoint.items():
            if not name.endswith(("k_scale", "v_scale")):
                key = name if isinstance(weight, DenseWeight) else f"{name}.weight"
                values[key] = to_torch(np.array(weight.dequantize())).to(dtype)
    config = read_json(path / "config.json")
    config.pop("quantization_config", None)
    folder.mkdir()
    write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
    save_file(values, folder / "model.safetensors")
    # torch multiplies no groups of float64 matrices
    return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")


def logits(model):
    with torch.no_grad():
        return model(IDS.to(model.device)).logits.double().cpu()


def error(a, b):
    return float(torch.linalg.norm(a - b) / torch.linalg.norm(b))


class TestLogits:
    """The packed model rounds to its dtype where a dense one does, and nowhere else: products are exact, sums are in
    float32 and scale2 multiplies them once. So each layer is within the derived bound of what it is given, and the
    error of all is that of a dense model in the same dtype, whose weights are rounded, too. In float32 those are exact,
    and what differs is the order of sums and their number: twice the dense model's error covers it."""

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("fuse", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", TINY)
    def test_tiny_checkpoints(self, name, dtype, fuse, device, tmp_path):
        exact = logits(dense_model(GOLDENS[name], tmp_path / "f64", torch.float64))
        peer = error(logits(dense_model(GOLDENS[name], tmp_path / "same", dtype)), exact)
        model = from_pretrained(GOLDENS[name], dtype=dtype, device_map=device, fuse=fuse)
        assert model.device.type == device
        assert model.dtype == dtype
        assert not model.training
        assert 0 < error(logits(model), exact) <= 2 * peer

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", TINY)
    def test_each_layer_is_within_the_derived_bound_of_its_input(self, name, dtype, device):
        model = from_pretrained(GOLDENS[name], dtype=dtype, device_map=device)
        seen = {}

        def note(path):
            return lambda module, args, y: seen.__setitem__(path, (args[0], y))

        kinds = (Linear, Part)
        layers = {path: m for path, m in model.named_modules() if isinstance(m, kinds) and not path.endswith(".group")}
        hooks = [module.register_forward_hook(note(path)) for path, module in layers.items()]
        with torch.no_grad():
            model(IDS.to(device))
        for hook in hooks:
            hook.remove()
        assert layers
        assert seen.keys() == layers.keys()
        with halfbyte.open(GOLDENS[name]) as checkpoint:
            for path, (x, y) in seen.items():
                weight = checkpoint[path]
                flat = x.double().cpu().numpy().reshape(-1, weight.k)
                assert_within_bound(y.double().cpu().reshape(-1, weight.n), flat, weight, None, dtype)

    @pytest.mark.parametrize("name", TINY)
    def test_weights_are_the_checkpoints_bit_for_bit(self, name):
        found = dict(weights_of(from_pretrained(GOLDENS[name])))
        with halfbyte.open(GOLDENS[name]) as checkpoint:
            modules = [module for module in checkpoint.parts if module.kind in ("nvfp4", "fp8")]
            assert found.keys() == {module.name for module in modules}
            assert found
            for module in modules:
                expected, made = checkpoint.load(module), found[module.name]
                if module.kind == "nvfp4":
                    assert made.numpy().same(expected)
                else:
                    assert np.array_equal(made.data.numpy(), expected.data)
                    assert made.scale.item() == expected.scale.item()

    def test_fused_equals_apart_bit_for_bit_with_one_kernel(self, monkeypatch):
        monkeypatch.setenv("HALFBYTE_KERNEL", "reference-torch")
        for name in TINY:
            a, b = (logits(from_pretrained(GOLDENS[name], fuse=fuse)) for fuse in (True, False))
            assert torch.equal(a, b)

    def test_generate(self):
        model = from_pretrained(GOLDENS["modelopt_llama_w4a16"])
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        dynamic = model.generate(IDS[:, :5], **options)
        static = model.generate(IDS[:, :5], cache_implementation="static", disable_compile=True, **options)
        assert dynamic.shape == (1, 11)
        assert torch.equal(dynamic, static)

    def test_compiles_whole(self):
        model = from_pretrained(GOLDENS["modelopt_qwen3moe_w4a16"])
        dense = from_pretrained(GOLDENS["modelopt_llama_nvfp4"])
        for each in (model, dense):
            compiled = torch.compile(each.forward, fullgraph=True, backend="eager")
            with torch.no_grad():
                got = compiled(IDS, use_cache=False).logits
            assert torch.equal(got.double(), logits(each))


class TestWhatIsMade:
    def test_layers_of_one_input_are_one_product(self):
        model = from_pretrained(GOLDENS["modelopt_llama_nvfp4"])
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        assert all(isinstance(m, Part) for m in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj))
        assert attention.q_proj.group is attention.v_proj.group
        assert attention.q_proj.group.sizes == (64, 32, 32)
        assert mlp.up_proj.group.sizes == (96, 96)
        assert type(attention.o_proj) is Linear
        assert type(mlp.down_proj) is Linear
        report = model.halfbyte
        assert isinstance(report, LoadReport)
        assert report.notes == []
        assert {e.name.rpartition(".")[2]: e.held for e in report.entries if e.kind == "nvfp4"} == {
            **dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], "Part"),
            **dict.fromkeys(["o_proj", "down_proj"], "Linear"),
        }
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert report.nbytes == held
        text = str(report)
        assert "7 nvfp4 as rows on cpu" in text
        assert "dense tensors on cpu" in text
        assert "modelopt" in text

    def test_apart_where_asked(self):
        attention = from_pretrained(GOLDENS["modelopt_llama_nvfp4"], fuse=False).model.layers[0].self_attn
        assert type(attention.q_proj) is Linear
        assert type(attention.k_proj) is Linear

    def test_fp8_nvfp4_and_tied_embeddings(self):
        model = from_pretrained(GOLDENS["modelopt_llama_mixed_fp8_nvfp4_tied"])
        layer = model.model.layers[0]
        assert type(layer.self_attn.q_proj) is Fp8Linear
        assert type(layer.mlp.gate_proj) is Part
        assert layer.self_attn.q_proj.data.dtype == torch.uint8
        assert model.lm_head.weight is model.model.embed_tokens.weight
        report, parent = model.halfbyte, "model.layers.0.self_attn"
        assert report.kept.keys() == {f"{parent}.k_proj.k_scale", f"{parent}.v_proj.v_scale"}
        assert report.kv == "FP8"
        assert report.notes == [f"q_proj, k_proj, v_proj are fp8, so these are products of their own: {parent}"]
        assert "2 tensors kept, not computed with" in str(report)

    def test_experts(self):
        model = from_pretrained(GOLDENS["modelopt_qwen3moe_w4a16"])
        block = model.model.layers[0].mlp
        assert type(block.experts) is Experts
        assert block.experts.num_experts == 2
        assert isinstance(block.gate.weight, torch.nn.Parameter)

    def test_nothing_dense_is_left_of_a_quantized_weight(self):
        model = from_pretrained(GOLDENS["modelopt_llama_nvfp4"])
        assert {name.rpartition(".")[0].rpartition(".")[2] for name, _ in model.named_parameters()} == {
            "embed_tokens", "input_layernorm", "post_attention_layernorm", "norm", "lm_head",
        }  # fmt: skip
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))

    def test_layout_and_precision_as_asked(self):
        model = from_pretrained(GOLDENS["modelopt_llama_nvfp4"], layout="columns", precision="int8")
        assert model.model.layers[0].self_attn.o_proj.layout.key.startswith("columns")
        assert model.model.layers[0].self_attn.q_proj.group.precision == "int8"
        with pytest.raises(LayoutError, match="unknown layout"):
            from_pretrained(GOLDENS["modelopt_llama_nvfp4"], layout="best")

    @pytest.mark.parametrize("precision", [None, "fp8", "w4a4", "int8"])
    def test_precision_of_experts(self, precision):
        source = GOLDENS["modelopt_qwen3moe_w4a16"]
        experts = from_pretrained(source).model.layers[0].mlp.experts
        model = from_pretrained(source, precision=precision)
        own = model.model.layers[0].mlp.experts
        assert own.precision == {None: "exact", "int8": "exact"}.get(precision, precision)
        notes = [note for note in model.halfbyte.notes if "experts are not computed in INT8, but exactly" in note]
        assert len(notes) == (precision == "int8")
        x = torch.randn(3, own.hidden_size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        ids, weights = torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
        assert torch.equal(own(x, ids, weights), experts(x, ids, weights)) == (own.precision == "exact")

    def test_copies_keep_the_sharing(self):
        model = from_pretrained(GOLDENS["modelopt_llama_nvfp4"])
        other = copy.deepcopy(model)
        assert torch.equal(logits(model), logits(other))

    def test_packed_directories(self, tmp_path):
        source = GOLDENS["modelopt_llama_nvfp4"]
        halfbyte.convert(source, tmp_path / "packed", layout="marlin(scale_format=e4m3)")
        assert torch.equal(logits(from_pretrained(tmp_path / "packed")), logits(from_pretrained(source)))

    def test_shards(self, tmp_path):
        one, four = make_dense(tmp_path / "one"), make_dense(tmp_path / "four", shards=4)
        assert torch.equal(logits(from_pretrained(one)), logits(from_pretrained(four)))

    def test_input_scales_are_carried(self, tmp_path):
        path = make_dense(tmp_path / "a", input_scale=True, change={f"{K}.input_scale": np.float32(0.5)})
        found = dict(weights_of(from_pretrained(path)))
        scales = {name: float(found[name].input_scale) for name in (Q, K, V, GATE, UP, DOWN)}
        assert scales == dict.fromkeys((Q, V, GATE, UP, DOWN), 2.0**-10) | {K: 0.5}

    def test_pre_scales_of_one_input_or_apart(self, tmp_path):
        pre = np.linspace(0.5, 2, HIDDEN).astype(np.float32)
        change = {f"{name}.pre_quant_scale": pre for name in (Q, K, V, GATE)}
        model = from_pretrained(make_dense(tmp_path / "a", change=change), dtype="float32")
        layer = model.model.layers[0]
        assert type(layer.self_attn.k_proj) is Part
        assert type(layer.mlp.gate_proj) is Linear
        assert model.halfbyte.notes == [
            "gate_proj, up_proj have different pre_scales, so these are products of their own: model.layers.0.mlp"
        ]
        x = torch.randn(3, HIDDEN)
        with halfbyte.open(tmp_path / "a") as checkpoint, torch.no_grad():
            y = layer.self_attn.k_proj(x)
            assert_within_bound(y, x.numpy(), checkpoint[K], None, "float32")

    def test_biases(self, tmp_path):
        bias = {f"{name}.bias": floats(1, n, 9)[0] for name, n in ((Q, HIDDEN), (K, 16), (V, 16))}
        out = {"model.layers.0.self_attn.o_proj.bias": floats(1, HIDDEN, 9)[0]}
        path = make_dense(tmp_path / "a", change=bias | out, config=CONFIG | {"attention_bias": True})
        layer = from_pretrained(path).model.layers[0].self_attn
        assert torch.equal(layer.k_proj.bias.float(), torch.from_numpy(bias[f"{K}.bias"].astype(np.float32)))
        assert layer.o_proj.bias.dtype == torch.bfloat16

    def test_one_of_a_group_is_dense(self, tmp_path):
        dense = {f"{V}.{suffix}": None for suffix in ("weight_scale", "weight_scale_2")}
        path = make_dense(tmp_path / "a", change=dense | {f"{V}.weight": floats(16, HIDDEN)})
        model = from_pretrained(path)
        assert type(model.model.layers[0].self_attn.q_proj) is Linear
        assert model.halfbyte.notes == [
            "q_proj is nvfp4, k_proj is nvfp4, v_proj is dense, so these are products of their own: "
            "model.layers.0.self_attn"
        ]

    def test_on_several_devices(self, monkeypatch):
        def device(self, path):
            return torch.device("cpu:0" if path.endswith("v_proj") else "cpu")

        path = GOLDENS["modelopt_llama_nvfp4"]
        expected = logits(from_pretrained(path))
        monkeypatch.setattr(filling.Filling, "_device", device)
        model = from_pretrained(path)
        assert type(model.model.layers[0].self_attn.q_proj) is Linear
        assert model.halfbyte.notes == [
            "model.layers.0.self_attn.q_proj and those beside it are on several devices, so not one product"
        ]
        assert torch.equal(logits(model), expected)

    def test_a_dense_checkpoint_loads_too(self, tmp_path):
        model = from_pretrained(make_float(tmp_path / "a"))
        assert {entry.kind for entry in model.halfbyte.entries} == {"dense"}


@pytest.mark.parametrize("scale", ["tensor", "row", "block"])
def test_fp8_layers_of_each_granularity(scale, tmp_path):
    value = {"tensor": 2.0**-7, "row": np.linspace(0.01, 0.02, HIDDEN), "block": np.full((1, 1, 1, 1), 2.0**-6)}[scale]
    change = {f"{OUT}.{s}": v for s, v in fp8(HIDDEN, HIDDEN, scale=value).items()} | {f"{OUT}.weight_scale_2": None}
    path = make_dense(tmp_path / "a", change=change)
    model = from_pretrained(path, dtype="float32")
    layer, x = model.model.layers[0].self_attn.o_proj, torch.randn(3, HIDDEN)
    assert type(layer) is Fp8Linear
    assert layer.granularity == scale
    with halfbyte.open(path) as checkpoint, torch.no_grad():
        dense = torch.from_numpy(checkpoint[OUT].dequantize()).double()
        difference, bound = layer(x) - x.double() @ dense.T, HIDDEN * 2.0**-24 * (x.double().abs() @ dense.abs().T)
    assert bool((difference.abs() <= bound).all())


class TestHeadsAndEmbeddings:
    def test_an_nvfp4_head_gives_float32_logits(self, tmp_path):
        path = make_dense(tmp_path / "a", change=named("modelopt", "lm_head", nvfp4(VOCAB, HIDDEN)))
        model = from_pretrained(path)
        assert type(model.lm_head) is Linear
        with torch.no_grad():
            assert model(IDS).logits.dtype == torch.float32

    def test_an_nvfp4_embedding(self, tmp_path):
        path = make_dense(tmp_path / "a", change=named("modelopt", "model.embed_tokens", nvfp4(VOCAB, HIDDEN)))
        model = from_pretrained(path)
        assert type(model.model.embed_tokens) is Embedding
        with halfbyte.open(path) as checkpoint:
            rows = checkpoint["model.embed_tokens"].dequantize("bfloat16").astype(np.float32)
        assert np.array_equal(model.model.embed_tokens(IDS)[0].float().numpy(), rows[IDS[0].numpy()])

    def test_tied_to_one_packed_weight(self, tmp_path):
        change = named("modelopt", "model.embed_tokens", nvfp4(VOCAB, HIDDEN)) | {"lm_head.weight": None}
        path = make_dense(tmp_path / "a", change=change, config=CONFIG | {"tie_word_embeddings": True})
        model = from_pretrained(path)
        assert type(model.lm_head) is TiedLinear
        assert model.lm_head.holder is model.model.embed_tokens
        assert logits(model).shape == (1, 16, VOCAB)

    def test_a_head_of_its_own_though_the_config_ties(self, tmp_path):
        change = named("modelopt", "lm_head", nvfp4(VOCAB, HIDDEN))
        path = make_dense(tmp_path / "a", change=change, config=CONFIG | {"tie_word_embeddings": True})
        model = from_pretrained(path)
        assert type(model.lm_head) is Linear
        assert type(model.model.embed_tokens) is torch.nn.Embedding

    def test_a_base_model_without_its_head(self, tmp_path):
        path = make_dense(tmp_path / "a", config=CONFIG | {"architectures": ["LlamaModel"]})
        model = from_pretrained(path)
        assert type(model) is tf.LlamaModel
        assert model.halfbyte.notes == ["left out, since the class has no such head: lm_head.weight"]


EXPERTS = "model.layers.0.mlp.experts"


def moe_checkpoint(path, change=None, config=None):
    """The Qwen3-MoE golden, altered."""
    copy_golden("modelopt_qwen3moe_w4a16", path)
    tensors = tensors_of(path / "model.safetensors") | (change or {})
    save(path / "model.safetensors", {name: value for name, value in tensors.items() if value is not None})
    write_json(path / "config.json", read_json(path / "config.json") | (config or {}))
    return path


class TestExperts:
    def test_stacks_are_the_single_experts(self, tmp_path):
        single, stacked = GOLDENS["modelopt_qwen3moe_w4a16"], tmp_path / "stacked"
        halfbyte.convert(single, stacked, to="modelopt", experts="stacked")
        assert torch.equal(logits(from_pretrained(single)), logits(from_pretrained(stacked)))

    def test_an_expert_without_data(self, tmp_path):
        names = [f"{EXPERTS}.1.up_proj.{s}" for s in ("weight", "weight_scale", "weight_scale_2")]
        with pytest.raises(UsageError, match=rf"{EXPERTS}.1.up_proj.*has no data"):
            from_pretrained(moe_checkpoint(tmp_path / "a", dict.fromkeys(names)))

    def test_an_expert_too_many(self, tmp_path):
        extra = {}
        for part, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            extra |= named("modelopt", f"{EXPERTS}.2.{part}", nvfp4(*shape))
        with pytest.raises(UsageError, match=rf"{EXPERTS}.2.*no such expert"):
            from_pretrained(moe_checkpoint(tmp_path / "a", extra))

    def test_an_unknown_activation(self, tmp_path):
        with pytest.raises(UsageError, match=rf"{EXPERTS}.0.*the activation Tanh is not known"):
            from_pretrained(moe_checkpoint(tmp_path / "a", config={"hidden_act": "tanh"}))


@pytest.mark.parametrize(
    ("name", "scale"),
    [("modelopt_llama_w4a16", "weight_scale_2"), ("modelopt_llama_mixed_fp8_nvfp4_tied", "weight_scale")],
)
def test_a_negative_scale_is_refused(name, scale, tmp_path):
    source = next(path for path in GOLDENS.values() if path.name == name)
    shutil.copytree(source, tmp_path / "a")
    tensors = load_file(source / "model.safetensors")
    of = f"model.layers.0.self_attn.q_proj.{scale}"
    save_file(tensors | {of: -tensors[of]}, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=f"{of}: .* is negative"):
        from_pretrained(tmp_path / "a")


def test_a_config_that_names_what_is_no_model(tmp_path):
    source = next(path for path in GOLDENS.values() if path.name == "modelopt_llama_w4a16")
    shutil.copytree(source, tmp_path / "a")
    file = tmp_path / "a" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["AutoTokenizer", "logging"]}))
    assert type(from_pretrained(tmp_path / "a")).__name__ == "LlamaForCausalLM"
