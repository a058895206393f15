"""quantize_model: in place, byte for byte what quantize_checkpoint makes; a refusal comes before anything changes."""

from __future__ import annotations

import copy
import json
import weakref

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM, T5Config, T5Model

import halfbyte
from gpu_codecs import needs_gpu, needs_triton
from halfbyte.errors import LayoutError, QuantizeError, UsageError
from halfbyte.hf import quantize_model, quantizing
from halfbyte.nn import Embedding, Experts, Linear, Part, TiedLinear, weights_of
from hf_models import MODELS, build, output


def quantized_checkpoint(model, folder, **options):
    """The directory that quantize_checkpoint makes of the model's weights."""
    model.save_pretrained(folder / "dense")
    halfbyte.quantize_checkpoint(folder / "dense", folder / "expected", **options)
    return folder / "expected"


def assert_same_files(a, b):
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    for name in ("config.json", "hf_quant_config.json"):
        assert json.loads((a / name).read_text()) == json.loads((b / name).read_text())
    assert halfbyte.verify(b).ok


class TestEqualsQuantizeCheckpoint:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("fuse", [True, False])
    def test_every_kind_of_model(self, name, fuse, tmp_path):
        model = build(name)
        expected = quantized_checkpoint(model, tmp_path)
        quantize_model(model, fuse=fuse)
        model.save_pretrained(tmp_path / "made")
        assert_same_files(expected, tmp_path / "made")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_dtypes(self, dtype, tmp_path):
        model = build("qwen2", dtype)
        expected = quantized_checkpoint(model, tmp_path)
        quantize_model(model)
        model.save_pretrained(tmp_path / "made")
        assert_same_files(expected, tmp_path / "made")

    @pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral"])
    def test_shared_scale2(self, name, tmp_path):
        model = build(name)
        expected = quantized_checkpoint(model, tmp_path, share_scale2=True)
        quantize_model(model, share_scale2=True)
        model.save_pretrained(tmp_path / "made")
        assert_same_files(expected, tmp_path / "made")
        assert not {f.code for f in halfbyte.verify(tmp_path / "made").findings}

    @pytest.mark.parametrize(
        ("include", "exclude"),
        [
            (["*.self_attn.*"], ["*o_proj"]),
            (["lm_head"], []),
            (["model.embed_tokens"], []),
            ([], ["re:.*experts", "model.layers.0"]),
            (["*mlp.gate"], []),
        ],
    )
    def test_patterns(self, include, exclude, tmp_path):
        model = build("qwen3_moe")
        if include == ["*mlp.gate"]:  # a class of its own in the model
            with pytest.raises(UsageError, match="there is no weight to quantize"):
                quantize_model(model, include=include)
            return
        expected = quantized_checkpoint(model, tmp_path, targets=include, ignore=exclude)
        quantize_model(model, include=include, exclude=exclude)
        model.save_pretrained(tmp_path / "made")
        assert_same_files(expected, tmp_path / "made")

    def test_weights_of_zeros(self, tmp_path):
        model = build("llama")
        model.model.layers[0].mlp.up_proj.weight.data.zero_()
        expected = quantized_checkpoint(model, tmp_path)
        report = quantize_model(model)
        model.save_pretrained(tmp_path / "made")
        assert_same_files(expected, tmp_path / "made")
        assert {layer.name: layer.error for layer in report.layers}["model.layers.0.mlp.up_proj"] == 0


class TestModel:
    def test_it_computes_as_its_dequantized_twin(self):
        model = build("qwen2", torch.float32)
        twin = copy.deepcopy(model)
        quantize_model(model)
        for name, weight in weights_of(model):
            twin.get_submodule(name).weight.data = weight.dequantize("float32")
        assert torch.allclose(output(model), output(twin), atol=1e-5)

    def test_what_the_layers_become(self):
        model = build("qwen3_moe")
        quantize_model(model)
        layer = model.model.layers[0]
        assert [type(m) for m in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.experts)] == [
            *(Part, Linear, Experts)
        ]
        assert layer.self_attn.q_proj.group is layer.self_attn.v_proj.group
        assert type(model.lm_head) is torch.nn.Linear
        assert not any(module.training for module in model.modules())
        assert output(model).isfinite().all()

    def test_a_model_that_casts_to_the_dtype_of_a_weight(self):
        """T5 does so where the weight is a tensor."""
        torch.manual_seed(0)
        model = T5Model(T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=32)).eval()
        ids = torch.arange(5)[None]
        with torch.no_grad():
            dense = model(input_ids=ids, decoder_input_ids=ids)[0]
            quantize_model(model)
            found = model(input_ids=ids, decoder_input_ids=ids)[0]
        assert 0 < (found - dense).norm() / dense.norm() < 0.2

    def test_biases_stay_the_same_parameter(self):
        model = build("bert")
        bias = model.pooler.dense.bias
        quantize_model(model)
        assert model.pooler.dense.bias is bias

    def test_a_head_gives_float32(self):
        model = build("llama")
        quantize_model(model, include=["lm_head"])
        assert model.lm_head.out_dtype == torch.float32
        assert output(model).dtype == torch.float32

    def test_a_tied_weight_is_quantized_once(self, tmp_path):
        model = build("llama", tie_word_embeddings=True)
        expected = quantized_checkpoint(model, tmp_path, targets=["Linear", "Embedding"])
        report = quantize_model(model, include=["Linear", "Embedding"])
        assert [layer.name for layer in report.layers].count("model.embed_tokens") == 1
        assert isinstance(model.model.embed_tokens, Embedding)
        assert isinstance(model.lm_head, TiedLinear)
        assert model.lm_head.packed is model.model.embed_tokens.packed
        model.save_pretrained(tmp_path / "made")
        assert_same_files(expected, tmp_path / "made")

    def test_a_module_in_two_places_stays_one(self):
        shared = torch.nn.Linear(16, 16)
        model = torch.nn.ModuleDict({"a": shared, "b": shared, "c": torch.nn.Linear(16, 16)})
        quantize_model(model)
        assert isinstance(model["a"], Linear)
        assert model["a"] is model["b"] is not model["c"]

    def test_dense_weights_are_freed_one_by_one(self, monkeypatch):
        model = build("llama")
        dense = [weakref.ref(m.weight) for m in model.modules() if type(m) is torch.nn.Linear][:-1]
        alive, quantize = [], quantizing.quantize

        def counted(*args, **kwargs):
            alive.append(sum(ref() is not None for ref in dense))
            return quantize(*args, **kwargs)

        monkeypatch.setattr(quantizing, "quantize", counted)
        quantize_model(model)
        assert alive == [14, 14, 14, 11, 10, 10, 8, 7, 7, 7, 4, 3, 3, 1]

    def test_report(self):
        model = build("qwen3_moe", torch.float32)
        w = model.model.layers[1].self_attn.o_proj.weight.detach().numpy().copy()
        report = quantize_model(model, exclude=["nothing", "model.layers.0"])
        assert [layer.name.removeprefix("model.layers.1.") for layer in report.layers] == [
            *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            *("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ]
        q = halfbyte.quantize(w).dequantize()
        layer = report.layers[3]
        assert layer.error == pytest.approx(np.linalg.norm(q - w) / np.linalg.norm(w), rel=1e-6)
        assert layer.shape == (64, 64)
        assert (layer.bytes_before, layer.bytes_after) == (64 * 64 * 4, 64 * 64 // 2 + 64 * 4 + 4)
        experts = report.layers[4]
        assert experts.shape == (4, 64, 64)
        assert experts.bytes_after == 4 * (64 * 64 // 2 + 64 * 4 + 64 * 4)
        assert report.bytes_before == sum(layer.bytes_before for layer in report.layers)
        assert 0.09 < report.error < 0.1
        skipped = dict(report.skipped)
        assert skipped["lm_head"] == "output head"
        assert skipped["model.embed_tokens"] == "embedding"
        assert skipped["model.layers.1.mlp.gate"] == "router"
        assert skipped["model.layers.0.mlp.experts"] == "ignored by model.layers.0"
        assert report.notes == ("the pattern 'nothing' selects nothing",)
        assert str(report).startswith("6 weights are NVFP4 now: 0.1 MB became 0.0 MB in ")

    def test_a_layout_by_name(self):
        model = build("llama")
        quantize_model(model, layout="columns")
        assert model.model.layers[0].mlp.down_proj.layout.name == "columns"


class TestSkipped:
    @pytest.mark.parametrize(
        ("layer", "reason"),
        [
            (torch.nn.Linear(24, 16), "K = 24 is not a multiple of 16"),
            (torch.nn.Embedding(16, 16), "embedding"),
            (torch.nn.Bilinear(16, 16, 1).to(torch.float32), None),
        ],
    )
    def test_what_stays(self, layer, reason):
        model = torch.nn.ModuleDict({"a": layer, "b": torch.nn.Linear(16, 16)})
        report = quantize_model(model)
        assert dict(report.skipped) == ({"a": reason} if reason else {})
        assert model["a"] is layer

    def test_subclasses_of_linear(self):
        attention = torch.nn.MultiheadAttention(16, 2)
        model = torch.nn.ModuleDict({"a": attention, "b": torch.nn.Linear(16, 16)})
        report = quantize_model(model)
        reason = "NonDynamicallyQuantizableLinear is not a linear layer of torch"
        assert dict(report.skipped) == {"a.out_proj": reason}

    def test_conv1d(self):
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=32, tie_word_embeddings=False))
        with pytest.raises(UsageError, match="there is no weight to quantize"):
            quantize_model(model)

    def test_experts_that_lie_otherwise(self):
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = GptOssConfig(**sizes, num_key_value_heads=2, vocab_size=32, num_local_experts=2, head_dim=16)
        report = quantize_model(GptOssForCausalLM(config))
        assert dict(report.skipped)["model.layers.0.mlp.experts"].startswith("GptOssExperts has ")

    def test_again(self):
        model = build("llama")
        quantize_model(model, include=["*mlp*"])
        report = quantize_model(model)
        assert dict(report.skipped)["model.layers.0.mlp.gate_proj"] == "quantized already"
        with pytest.raises(UsageError, match="there is no weight to quantize"):
            quantize_model(model)


class TestRefused:
    """Nothing is replaced."""

    @pytest.fixture
    def model(self):
        model = build("qwen3_moe")
        before = dict(model.named_modules())
        yield model
        assert dict(model.named_modules()) == before
        assert not hasattr(model, "hf_quantizer")

    def test_not_finite(self, model):
        model.model.layers[1].self_attn.o_proj.weight.data[3, 5] = torch.nan
        with pytest.raises(QuantizeError, match="not finite") as caught:
            quantize_model(model)
        assert caught.value.tensor == "model.layers.1.self_attn.o_proj"
        assert caught.value.index == [3, 5]

    def test_not_finite_in_an_expert(self, model):
        model.model.layers[1].mlp.experts.gate_up_proj.data[2, 33, 7] = -torch.inf
        with pytest.raises(QuantizeError, match="not finite") as caught:
            quantize_model(model)
        assert caught.value.tensor == "model.layers.1.mlp.experts.2.up_proj"
        assert caught.value.index == [1, 7]

    def test_dtype(self, model):
        model.model.layers[1].self_attn.o_proj.double()
        with pytest.raises(QuantizeError, match=r"got torch\.float64"):
            quantize_model(model)

    def test_meta(self, model):
        model.model.layers[1].self_attn.o_proj.to("meta")
        with pytest.raises(UsageError, match="on the meta device"):
            quantize_model(model)

    def test_hooks(self, model):
        hook = model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *args: None)
        with pytest.raises(UsageError, match="has a hook"):
            quantize_model(model)
        hook.remove()

    def test_recipe_and_layout(self, model):
        with pytest.raises(UsageError, match="unknown recipe"):
            quantize_model(model, "best")
        with pytest.raises(LayoutError, match="layout"):
            quantize_model(model, layout="best")
        with pytest.raises(UsageError, match="is not a multiple of 64"):
            quantize_model(model, layout="tiles64")

    def test_a_layer_by_itself(self):
        with pytest.raises(UsageError, match="a layer by itself"):
            quantize_model(torch.nn.Linear(16, 16))

    def test_some_experts(self, model):
        with pytest.raises(UsageError, match="some experts would stay dense") as caught:
            quantize_model(model, exclude=["*experts.3.up_proj"])
        assert caught.value.tensor == "model.layers.0.mlp.experts.3.up_proj"

    def test_one_of_two_tied(self):
        model = build("llama", tie_word_embeddings=True)
        with pytest.raises(UsageError, match="shared with a module that is not included") as caught:
            quantize_model(model, include=["lm_head"])
        assert caught.value.tensor == "lm_head"
        model = build("bert_mlm")
        with pytest.raises(UsageError, match="shared with a module that cannot share it"):
            quantize_model(model, include=["Embedding"])


class TestInterrupted:
    @pytest.mark.parametrize("at", [0, 1, 5, 12])
    def test_the_model_runs_and_a_second_call_goes_on(self, at, monkeypatch, tmp_path):
        model = build("qwen3_moe")
        expected = quantized_checkpoint(model, tmp_path)
        calls, quantize = [], quantizing.quantize

        def failing(*args, **kwargs):
            calls.append(1)
            if len(calls) > at:
                raise MemoryError
            return quantize(*args, **kwargs)

        monkeypatch.setattr(quantizing, "quantize", failing)
        with pytest.raises(MemoryError):
            quantize_model(model)
        assert output(model).isfinite().all()
        monkeypatch.setattr(quantizing, "quantize", quantize)
        quantize_model(model)
        model.save_pretrained(tmp_path / "made")
        assert_same_files(expected, tmp_path / "made")


@pytest.mark.gpu
@needs_triton
@needs_gpu
class TestOnAGpu:
    @pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "mixtral", "bert"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_the_bytes_of_the_cpu(self, name, dtype, tmp_path):
        model = build(name, dtype)
        expected = quantized_checkpoint(model, tmp_path)
        quantize_model(model.cuda())
        layout = "rows" if dtype == torch.float32 else "fragments"
        assert {m.layout.name for m in model.modules() if hasattr(m, "layout")} == {layout}
        model.save_pretrained(tmp_path / "made")
        if layout == "rows":
            assert_same_files(expected, tmp_path / "made")
        else:  # codes of blocks whose scale is 0 become 0
            assert halfbyte.diff(expected, tmp_path / "made").ok

    def test_memory(self):
        sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
        model = build("llama", **sizes).cuda()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        report = quantize_model(model)
        torch.cuda.synchronize()
        freed = before - torch.cuda.memory_allocated()
        assert freed >= report.bytes_before - 1.1 * report.bytes_after
        largest = 2 * 4096 * 1024  # gate and up: their codes and scales, packed and not, and float32 of some rows
        assert torch.cuda.max_memory_allocated() - before < 2 * largest + (96 << 20)
