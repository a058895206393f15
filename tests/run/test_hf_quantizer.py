"""transformers' own from_pretrained on NVFP4 checkpoints: what it loads, what it refuses, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers as tf
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import halfbyte
from checkpoints import (
    CONFIG,
    E4M3,
    GOLDENS,
    HIDDEN,
    INTER,
    OUT,
    UP,
    K,
    Q,
    environment,
    floats,
    fp8,
    make_dense,
    make_float,
    mxfp4,
    named,
    nvfp4,
    read_json,
)
from halfbyte.errors import FormatError, HalfbyteError, UsageError
from halfbyte.hf import HalfbyteConfig, HalfbyteQuantizer, from_pretrained
from halfbyte.hf.pending import Pending
from halfbyte.nn import Linear, Part

MODELOPT = [name for name in GOLDENS if name.startswith("modelopt")]
IDS = torch.arange(16)[None] * 3 % 32


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


class TestAutoModel:
    @pytest.mark.parametrize("name", MODELOPT)
    def test_loads_as_from_pretrained_does(self, name):
        model = AutoModelForCausalLM.from_pretrained(GOLDENS[name])
        assert torch.equal(logits(model), logits(from_pretrained(GOLDENS[name])))
        assert model.halfbyte.dialect == "modelopt"
        assert not model.training
        assert model.is_quantized
        assert model.quantization_method == "modelopt"
        assert isinstance(model.hf_quantizer, HalfbyteQuantizer)
        assert model.hf_quantizer.is_compileable
        assert not model.hf_quantizer.is_trainable
        section = read_json(GOLDENS[name] / "config.json")["quantization_config"]
        assert model.config.quantization_config.to_dict() == section
        assert not any(isinstance(module, Pending) for module in model.modules())

    @pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, torch.device("cpu")])
    def test_device_maps(self, device_map):
        model = AutoModelForCausalLM.from_pretrained(GOLDENS["modelopt_llama_nvfp4"], device_map=device_map)
        assert type(model.model.layers[0].self_attn.o_proj) is Linear
        assert torch.equal(logits(model), logits(from_pretrained(GOLDENS["modelopt_llama_nvfp4"])))

    def test_hooks_of_accelerate_come_to_the_layers(self):
        """Two names of one device make it dispatch; here one of our layers is a block of its own."""
        layer = "model.layers.0"
        names = [f"{layer}.{name}" for name in ("self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
        names += [f"{layer}.mlp.act_fn", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        names += ["model.embed_tokens", "model.norm", "model.rotary_emb"]
        device_map = dict.fromkeys(names, "cpu") | {"lm_head": torch.device("cpu")}
        path = GOLDENS["modelopt_llama_nvfp4"]
        model = AutoModelForCausalLM.from_pretrained(path, device_map=device_map)
        assert model.model.layers[0].mlp.down_proj._hf_hook.execution_device == torch.device("cpu")
        assert torch.equal(logits(model), logits(from_pretrained(path)))

    def test_dtype(self):
        model = AutoModelForCausalLM.from_pretrained(GOLDENS["modelopt_llama_nvfp4"], dtype=torch.float16)
        assert logits(model).dtype == torch.float16
        assert model.model.embed_tokens.weight.dtype == torch.float16

    def test_options_of_transformers(self):
        path = GOLDENS["modelopt_llama_nvfp4"]
        options = {"low_cpu_mem_usage": True, "local_files_only": True, "attn_implementation": "eager"}
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
        assert not any(info.values())
        assert model.config._attn_implementation == "eager"

    def test_a_subfolder(self, tmp_path):
        make_dense(tmp_path / "a" / "b")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", subfolder="b")
        assert isinstance(model.model.layers[0].self_attn.q_proj, Part)
        with pytest.raises(
            UsageError, match="subfolder is not taken here: got 'b'; pass the path of the folder itself"
        ):
            from_pretrained(tmp_path / "a", subfolder="b")

    def test_an_encoder(self, tmp_path):
        config = tf.BertConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
        )
        torch.manual_seed(0)
        tf.BertModel(config).eval().save_pretrained(tmp_path / "dense")
        halfbyte.quantize_checkpoint(tmp_path / "dense", tmp_path / "a")
        for model in (AutoModel.from_pretrained(tmp_path / "a"), from_pretrained(tmp_path / "a")):
            attention = model.encoder.layer[1].attention
            assert type(model) is tf.BertModel
            assert isinstance(attention.self.key, Part)
            assert type(attention.output.dense) is Linear
            with torch.no_grad():
                assert model(IDS).last_hidden_state.shape == (1, 16, 32)

    def test_packed_checkpoints(self, tmp_path):
        halfbyte.convert(GOLDENS["modelopt_llama_nvfp4"], tmp_path / "packed", layout="rows")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
        assert model.halfbyte.dialect == "packed"
        assert model.quantization_method == "halfbyte"


class TestRegistration:
    def test_only_free_names_are_taken(self):
        ours = {name for name, cls in AUTO_QUANTIZER_MAPPING.items() if cls is HalfbyteQuantizer}
        assert ours == {"modelopt", "halfbyte"}
        assert {n for n, c in AUTO_QUANTIZATION_CONFIG_MAPPING.items() if c is HalfbyteConfig} == ours
        assert AUTO_QUANTIZER_MAPPING["compressed-tensors"].__module__.startswith("transformers.")

    @pytest.mark.parametrize("name", ["plain", "ct_llama_nvfp4"])
    def test_importing_changes_nothing_for_other_checkpoints(self, name, tmp_path):
        path = make_float(tmp_path / "plain") if name == "plain" else GOLDENS[name]
        code = (
            "import json, sys, torch\n"
            "if sys.argv[1] == 'with': import halfbyte.hf\n"
            "from transformers import AutoModelForCausalLM\n"
            "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known\n"
            "others = sorted((k, v.__name__) for k, v in known.items() if k not in ('modelopt', 'halfbyte'))\n"
            "try:\n"
            "    model = AutoModelForCausalLM.from_pretrained(sys.argv[2])\n"
            "    with torch.no_grad(): y = model(torch.arange(8)[None]).logits\n"
            "    print(json.dumps([str(model), y.float().tolist(), others]))\n"
            "except Exception as error:\n"
            "    print(json.dumps([repr(error), others]))\n"
        )
        found = [
            subprocess.run(
                [sys.executable, "-c", code, how, str(path)],
                capture_output=True, text=True, check=True, env=environment(),
            ).stdout
            for how in ("with", "without")
        ]  # fmt: skip
        assert found[0] == found[1]
        assert name != "plain" or "LlamaForCausalLM" in json.loads(found[0])[0]

    def test_a_dense_model_is_not_quantized_by_loading(self, tmp_path):
        with pytest.raises(UsageError, match=r"use halfbyte\.hf\.quantize_model"):
            AutoModelForCausalLM.from_pretrained(make_float(tmp_path / "a"), quantization_config=HalfbyteConfig())


def scales_with(byte, at=(1, 1)):
    """The scales of Q with one byte set."""
    scales = np.array(nvfp4(HIDDEN, HIDDEN)["scales"]).view(np.uint8)
    scales[at] = byte
    return {f"{Q}.weight_scale": scales.view(E4M3)}


UNSOUND = {
    "a missing scale": ({f"{Q}.weight_scale": None}, FormatError, f"{Q}.weight"),
    "a missing scale2": ({f"{Q}.weight_scale_2": None}, FormatError, f"{Q}.weight"),
    "a scale of another shape": (
        {f"{Q}.weight_scale": np.ones((HIDDEN, 1), E4M3)},
        FormatError,
        f"{Q}.weight_scale: ",
    ),
    "NaN": (scales_with(0x7F), FormatError, f"{Q}.weight_scale: a block scale is NaN at [1, 1]: got byte 7F"),
    "-NaN": (scales_with(0xFF), FormatError, f"{Q}.weight_scale: a block scale is NaN at [1, 1]: got byte FF"),
    "negative": (scales_with(0x80), FormatError, f"{Q}.weight_scale: a block scale is negative at [1, 1]: got byte 80"),
    "most negative": (scales_with(0xFE), FormatError, f"{Q}.weight_scale: a block scale is negative at [1, 1]"),
    "an infinite scale2": ({f"{Q}.weight_scale_2": np.float32(np.inf)}, FormatError, f"{Q}.weight_scale_2: "),
    "codes of another shape": (
        named("modelopt", Q, nvfp4(HIDDEN, HIDDEN * 2)),
        UsageError,
        f"{Q}.weight: the tensor does not fit",
    ),
    "a weight that no module uses": (
        named("modelopt", "model.layers.7.mlp.up_proj", nvfp4(INTER, HIDDEN)),
        UsageError,
        "model.layers.7.mlp.up_proj.weight: no module",
    ),
    "an odd tensor beside a weight": (
        {f"{Q}.output_scale": np.float32(1)},
        UsageError,
        f"{Q}.output_scale: no module",
    ),
    "a dense tensor that no module uses": (
        {"model.extra.weight": floats(4, 4)},
        UsageError,
        "model.extra.weight: no module",
    ),
    "a bias that no layer has": (
        {f"{Q}.bias": floats(1, HIDDEN)[0]},
        UsageError,
        f"{Q}.bias: the checkpoint has a bias",
    ),
    "a quantized norm": (
        {"model.norm.weight": None} | named("modelopt", "model.norm", nvfp4(1, HIDDEN)),
        UsageError,
        "model.norm.weight: a quantized weight needs",
    ),
    "a layer without data": (
        dict.fromkeys([f"{OUT}.{s}" for s in ("weight", "weight_scale", "weight_scale_2")]),
        UsageError,
        f"{OUT}.weight: the checkpoint has no data",
    ),
    "a norm without data": ({"model.norm.weight": None}, UsageError, "model.norm.weight: the checkpoint has no data"),
    "a dense tensor of another shape": (
        {"model.norm.weight": floats(1, 8)[0]},
        UsageError,
        "model.norm.weight: the tensor does not fit",
    ),
    "MXFP4": (
        {f"{UP}.weight_scale_2": None}
        | dict(zip((f"{UP}.weight", f"{UP}.weight_scale"), mxfp4(INTER, HIDDEN).values(), strict=True)),
        UsageError,
        f"{UP}.weight: a layer of this format does not run: got mxfp4",
    ),
    "INT8": (
        {f"{UP}.weight_scale_2": None, f"{UP}.weight_scale": np.ones(INTER, np.float32)}
        | {f"{UP}.weight": np.ones((INTER, HIDDEN), np.int8)},
        UsageError,
        f"{UP}.weight: a layer of this format does not run: got I8",
    ),
    "an FP8 scale that is NaN": (
        {f"{OUT}.{s}": v for s, v in fp8(HIDDEN, HIDDEN, scale=np.nan).items()} | {f"{OUT}.weight_scale_2": None},
        FormatError,
        f"{OUT}.weight_scale: a scale is not finite",
    ),
}
"""What is wrong: what is changed in a sound checkpoint, the error, and how its text begins."""


class TestUnsound:
    """No model comes out, and the error is halfbyte's, with the tensor's full name."""

    @pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, from_pretrained], ids=["auto", "hf"])
    @pytest.mark.parametrize("name", UNSOUND)
    def test_refused_before_any_forward(self, name, load, tmp_path, monkeypatch):
        change, error, text = UNSOUND[name]
        path = make_dense(tmp_path / "a", change=change)
        monkeypatch.setattr(torch.nn.Module, "__call__", lambda *_, **__: pytest.fail("a forward ran"))
        with pytest.raises(error) as caught:
            load(path)
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_the_row_of_a_fused_part_is_its_own(self, tmp_path):
        scales = np.array(nvfp4(16, HIDDEN)["scales"]).view(np.uint8)
        scales[3, 1] = 0x7F
        path = make_dense(tmp_path / "a", change={f"{K}.weight_scale": scales.view(E4M3)})
        with pytest.raises(FormatError, match=rf"{K}.weight_scale: a block scale is NaN at \[3, 1\]"):
            from_pretrained(path)

    def test_an_unread_dialect(self, tmp_path):
        path = make_dense(tmp_path / "a", change={f"{Q}.comfy_quant": np.zeros(4, np.uint8)})
        with pytest.raises(HalfbyteError, match="recognised and not read yet"):
            from_pretrained(path)

    @pytest.mark.parametrize("device_map", [{"model": "cpu", "lm_head": "disk"}, {"model": "cpu", "lm_head": "cuda:0"}])
    def test_offloading_is_refused(self, device_map):
        with pytest.raises(UsageError, match="NVFP4 layers are not offloaded: got cpu, "):
            AutoModelForCausalLM.from_pretrained(GOLDENS["modelopt_llama_nvfp4"], device_map=device_map)

    def test_a_config_that_transformers_cannot_read(self, tmp_path):
        path = make_dense(tmp_path / "a", config=CONFIG | {"model_type": "no_such_model"})
        with pytest.raises(FormatError, match=r"a: transformers cannot read the config: got .*no_such_model"):
            from_pretrained(path)

    def test_a_name_that_is_not_in_the_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(FormatError, match="nobody/nothing: not in the local cache"):
            from_pretrained("nobody/nothing", local_files_only=True)

    @pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, from_pretrained], ids=["auto", "hf"])
    def test_a_dtype_without_kernels(self, load):
        with pytest.raises(UsageError, match="the model's dtype is unknown: got float64"):
            load(GOLDENS["modelopt_llama_nvfp4"], dtype=torch.float64)

    def test_a_file_without_a_config(self):
        with pytest.raises(UsageError, match="a model is loaded from a directory"):
            from_pretrained(GOLDENS["modelopt_llama_nvfp4"] / "model.safetensors")

    def test_no_such_directory(self):
        with pytest.raises(FormatError, match="no such file or directory"):
            from_pretrained("/nowhere/at/all")

    def test_an_option_that_cannot_be_meant(self):
        with pytest.raises(UsageError, match="not a device"):
            from_pretrained(GOLDENS["modelopt_llama_nvfp4"], device_map="gpu")

    def test_another_checkpoint_in_the_directory(self, tmp_path):
        path = make_dense(tmp_path / "a")
        (path / "model.safetensors").rename(path / "model.other.safetensors")
        with pytest.raises(OSError, match="no file named"):
            AutoModelForCausalLM.from_pretrained(path)
        make_dense(tmp_path / "b")
        (tmp_path / "b" / "model.safetensors").rename(path / "model.safetensors")
        with pytest.raises(HalfbyteError, match=r"lies in two shards|chose other files"):
            AutoModelForCausalLM.from_pretrained(path)


def test_heads_of_a_tied_embedding_without_data(tmp_path):
    change = {"lm_head.weight": None, "model.embed_tokens.weight": None}
    path = make_dense(tmp_path / "a", change=change, config=CONFIG | {"tie_word_embeddings": True})
    with pytest.raises(UsageError, match="has no data for 2 tensors"):
        from_pretrained(path)


def test_gpt2_layers_are_refused_by_name(tmp_path):
    config = tf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    tf.GPT2LMHeadModel(config).save_pretrained(tmp_path / "a")
    halfbyte.quantize_checkpoint(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UsageError, match="needs a plain linear layer or embedding: got Conv1D"):
        from_pretrained(tmp_path / "b")


def test_a_name_of_the_hub(monkeypatch):
    known = GOLDENS["modelopt_llama_nvfp4"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: known)
    assert from_pretrained("some/model", local_files_only=True).halfbyte.path == str(known)
