"""save_pretrained: what was loaded or quantized comes back bit for bit, and nothing is left half written."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import halfbyte
from gpu_codecs import needs_gpu, needs_triton
from halfbyte.errors import FormatError, TargetError, UsageError
from halfbyte.hf import from_pretrained, quantize_model, save_pretrained, saving
from halfbyte.nn import Linear, weights_of
from halfbyte.stored import read_tensor
from halfbyte.weight import Weight
from hf_models import MODELS, build, output

TINY = Path(__file__).parents[1] / "golden" / "tiny_ckpt"
MODELOPT = sorted(path.name for path in TINY.iterdir() if path.name.startswith("modelopt"))


def tensors_of(folder):
    """Name -> (dtype, shape, bytes) of all tensors of a directory."""
    with halfbyte.open(folder) as checkpoint:
        return {
            name: (t.dtype, t.shape, np.ascontiguousarray(read_tensor(t)).tobytes())
            for name, t in checkpoint.tensors.items()
        }


def json_of(file):
    return json.loads(file.read_text())


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def quantized():
    model = build("llama")
    quantize_model(model)
    return model


class TestLoaded:
    @pytest.mark.parametrize("name", MODELOPT)
    @pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, from_pretrained])
    def test_every_tensor_and_both_configs_come_back(self, name, load, tmp_path):
        model = load(TINY / name)
        model.save_pretrained(tmp_path / "saved")
        assert tensors_of(tmp_path / "saved") == tensors_of(TINY / name)
        for file in ("config.json", "hf_quant_config.json"):
            made, before = json_of(tmp_path / "saved" / file), json_of(TINY / name / file)
            assert made | {"transformers_version": None} == before | {"transformers_version": None}, file
        assert halfbyte.verify(tmp_path / "saved").ok

    @pytest.mark.parametrize("name", MODELOPT)
    def test_unfused_ones_too(self, name, tmp_path):
        from_pretrained(TINY / name, fuse=False).save_pretrained(tmp_path / "saved")
        assert tensors_of(tmp_path / "saved") == tensors_of(TINY / name)

    def test_compressed_tensors_become_modelopt(self, tmp_path):
        model = from_pretrained(TINY / "ct_llama_nvfp4")
        model.save_pretrained(tmp_path / "saved")
        halfbyte.convert(TINY / "ct_llama_nvfp4", tmp_path / "converted", to="modelopt")
        assert tensors_of(tmp_path / "saved") == tensors_of(tmp_path / "converted")
        assert json_of(tmp_path / "saved/hf_quant_config.json") == json_of(tmp_path / "converted/hf_quant_config.json")

    @pytest.mark.parametrize("layout", ["columns", "fragments", "marlin"])
    def test_other_layouts(self, layout, tmp_path):
        name = "modelopt_llama_nvfp4"
        from_pretrained(TINY / name, layout=layout).save_pretrained(tmp_path / "saved")
        assert tensors_of(tmp_path / "saved") == tensors_of(TINY / name)

    def test_kv_scales_are_kept(self, tmp_path):
        source = tmp_path / "source"
        with_kv_scales(TINY / "modelopt_llama_nvfp4", source)
        from_pretrained(source).save_pretrained(tmp_path / "saved")
        assert tensors_of(tmp_path / "saved") == tensors_of(source)
        assert json_of(tmp_path / "saved/hf_quant_config.json")["quantization"]["kv_cache_quant_algo"] == "FP8"
        assert json_of(tmp_path / "saved/config.json")["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
        assert halfbyte.verify(tmp_path / "saved").ok


def with_kv_scales(source, target):
    """A copy of a checkpoint, whose KV cache is FP8."""

    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for i, layer in enumerate(sorted({name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name})):
        for j, scale in enumerate(("k_proj.k_scale", "v_proj.v_scale")):
            tensors[f"{layer}.self_attn.{scale}"] = torch.tensor(1 + 2.0 ** -(2 * i + j + 1))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config, quant = json_of(target / "config.json"), json_of(target / "hf_quant_config.json")
    config["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    quant["quantization"]["kv_cache_quant_algo"] = "FP8"
    (target / "config.json").write_text(json.dumps(config))
    (target / "hf_quant_config.json").write_text(json.dumps(quant))


class TestQuantized:
    @pytest.mark.parametrize("name", MODELS)
    def test_it_loads_again(self, name, tmp_path):
        model = build(name)
        quantize_model(model)
        model.save_pretrained(tmp_path / "saved")
        auto = AutoModelForCausalLM if hasattr(model, "lm_head") else AutoModel
        again = from_pretrained(tmp_path / "saved")
        assert type(again) is type(model)
        assert torch.equal(output(again), output(model))
        if name not in ("bert_mlm", "llava"):  # of others AutoModel takes the inner model
            assert torch.equal(output(auto.from_pretrained(tmp_path / "saved")), output(model))

    def test_a_tied_head(self, tmp_path):
        model = build("llama", tie_word_embeddings=True)
        quantize_model(model, include=["Linear", "Embedding"])
        model.save_pretrained(tmp_path / "saved")
        assert not any(name.startswith("lm_head") for name in tensors_of(tmp_path / "saved"))
        assert torch.equal(output(from_pretrained(tmp_path / "saved")), output(model))

    def test_a_dense_tied_head(self, tmp_path):
        model = build("llama", tie_word_embeddings=True)
        quantize_model(model)
        model.save_pretrained(tmp_path / "saved")
        assert not any(name.startswith("lm_head") for name in tensors_of(tmp_path / "saved"))
        again = from_pretrained(tmp_path / "saved")
        assert again.lm_head.weight is again.model.embed_tokens.weight

    def test_a_model_inside(self, quantized, tmp_path):
        quantized.model.save_pretrained(tmp_path / "saved")
        assert halfbyte.verify(tmp_path / "saved").ok
        again = from_pretrained(tmp_path / "saved")
        assert type(again) is type(quantized.model)
        assert torch.equal(output(again), output(quantized.model))

    def test_a_model_inside_a_loaded_one(self, tmp_path):
        model = from_pretrained(TINY / "modelopt_llama_w4a16")
        model.model.save_pretrained(tmp_path / "saved")
        expected = {name.removeprefix("model."): t for name, t in tensors_of(TINY / "modelopt_llama_w4a16").items()}
        del expected["lm_head.weight"]
        assert tensors_of(tmp_path / "saved") == expected

    def test_a_model_inside_another_module(self, tmp_path):
        whole = torch.nn.Sequential(build("bert"))
        quantize_model(whole)
        whole[0].save_pretrained(tmp_path / "saved")
        assert torch.equal(output(from_pretrained(tmp_path / "saved")), output(whole[0]))

    def test_saved_twice(self, quantized, tmp_path):
        quantized.save_pretrained(tmp_path / "a")
        from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
        assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()

    def test_input_scales_of_fused_parts(self, quantized, tmp_path):
        """Each part has its own, though they are one product."""
        quantized.save_pretrained(tmp_path / "a")
        names = [f"model.layers.0.self_attn.{p}_proj.input_scale" for p in "qkv"]

        tensors = load_file(tmp_path / "a/model.safetensors")
        tensors |= {name: torch.tensor(i / 7) for i, name in enumerate(names, 1)}
        save_file(tensors, tmp_path / "a/model.safetensors", {"format": "pt"})
        from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
        assert tensors_of(tmp_path / "b") == tensors_of(tmp_path / "a")


class TestFiles:
    def test_shards(self, quantized, tmp_path):
        quantized.save_pretrained(tmp_path / "one")
        quantized.save_pretrained(tmp_path / "many", max_shard_size="20KB")
        shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
        assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        assert len(shards) > 3
        assert all(sum(a.nbytes for a in load_file(tmp_path / "many" / n).values()) <= 20_000 for n in shards)
        index = json_of(tmp_path / "many/model.safetensors.index.json")
        assert set(index["weight_map"].values()) == set(shards)
        assert tensors_of(tmp_path / "many") == tensors_of(tmp_path / "one")
        assert halfbyte.verify(tmp_path / "many").ok
        assert torch.equal(output(AutoModelForCausalLM.from_pretrained(tmp_path / "many")), output(quantized))
        quantized.save_pretrained(tmp_path / "bytes", max_shard_size=20_000)
        assert names_in(tmp_path / "bytes") == names_in(tmp_path / "many")

    def test_weights_come_out_one_by_one(self, quantized, tmp_path, monkeypatch):
        made, alive, to_bytes, weights = [], [], saving._bytes, saving.weights_of

        def noted(model):
            for name, weight in weights(model):
                made.append(weakref.ref(weight))
                yield name, weight

        def counted(array):
            alive.append(sum(ref() is not None for ref in made))
            return to_bytes(array)

        monkeypatch.setattr(saving, "weights_of", noted)
        monkeypatch.setattr(saving, "_bytes", counted)
        quantized.save_pretrained(tmp_path / "saved")
        assert len(made) == 2 * 14  # their shapes, then their bytes
        assert max(alive) == 1

    def test_what_there_is(self, quantized, tmp_path):
        quantized.save_pretrained(tmp_path / "new" / "deep")
        assert names_in(tmp_path / "new" / "deep") == [
            *("config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors")
        ]
        assert names_in(tmp_path / "new") == ["deep"]
        config = json_of(tmp_path / "new/deep/config.json")
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["dtype"] == "bfloat16"

    def test_the_config_has_one_section(self, tmp_path):
        """Also where it stood in the config of a model inside."""
        model = build("llava")
        quantize_model(model)
        model.config.text_config.quantization_config = {"quant_method": "modelopt", "quant_algo": "FP8"}
        model.save_pretrained(tmp_path / "saved")
        config = json_of(tmp_path / "saved/config.json")
        assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
        assert "quantization_config" not in config["text_config"]
        assert "quantization_config" not in config["vision_config"]

    def test_another_directory_is_replaced_but_for_other_files(self, quantized, tmp_path):
        target = tmp_path / "saved"
        quantized.save_pretrained(target, max_shard_size="20KB")
        (target / "tokenizer.json").write_text("{}")
        (target / "code").mkdir()
        (target / "code/model.py").write_text("x = 1")
        (target / "adapter_model.safetensors").write_bytes(b"adapter")
        quantized.save_pretrained(target)
        assert sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()) == [
            *("adapter_model.safetensors", "code/model.py", "config.json", "generation_config.json"),
            *("hf_quant_config.json", "model.safetensors", "tokenizer.json"),
        ]
        assert (target / "tokenizer.json").read_text() == "{}"
        assert names_in(tmp_path) == ["saved"]

    def test_the_model_may_come_from_the_directory_itself(self, quantized, tmp_path):
        quantized.save_pretrained(tmp_path / "saved")
        before = tensors_of(tmp_path / "saved")
        from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "saved")
        assert tensors_of(tmp_path / "saved") == before

    def test_a_link_to_a_directory(self, quantized, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        quantized.save_pretrained(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert halfbyte.verify(tmp_path / "real").ok

    def test_other_weights_are_refused(self, quantized, tmp_path):
        (tmp_path / "consolidated.safetensors").write_bytes(b"weights")
        with pytest.raises(TargetError, match="holds other weights"):
            quantized.save_pretrained(tmp_path)
        assert names_in(tmp_path) == ["consolidated.safetensors"]

    @pytest.mark.parametrize("at", [0, 3, 30])
    def test_an_error_leaves_what_was(self, quantized, tmp_path, monkeypatch, at):
        target = tmp_path / "saved"
        quantized.save_pretrained(target)
        before = {path.name: path.read_bytes() for path in target.iterdir()}
        calls, to_bytes = [], saving._bytes

        def failing(array):
            calls.append(1)
            if len(calls) > at:
                raise MemoryError
            return to_bytes(array)

        monkeypatch.setattr(saving, "_bytes", failing)
        for folder in (target, tmp_path / "new"):
            with pytest.raises(MemoryError):
                quantized.save_pretrained(folder)
        assert {path.name: path.read_bytes() for path in target.iterdir()} == before
        assert names_in(tmp_path) == ["saved"]


class TestRefused:
    def test_arguments_that_would_be_ignored(self, quantized, tmp_path):
        for name, value in (
            ("state_dict", {}),
            ("variant", "fp8"),
            ("push_to_hub", True),
            ("save_original_format", False),
        ):
            with pytest.raises(UsageError, match=f"takes no {name}"):
                quantized.save_pretrained(tmp_path / "saved", **{name: value})
        quantized.save_pretrained(
            *(tmp_path / "saved", True), state_dict=None, push_to_hub=False, variant=None, save_original_format=True
        )
        assert halfbyte.verify(tmp_path / "saved").ok

    def test_other_processes_write_nothing(self, quantized, tmp_path):
        quantized.save_pretrained(tmp_path / "saved", is_main_process=False)
        assert not names_in(tmp_path)

    def test_a_dense_model(self, tmp_path):
        with pytest.raises(UsageError, match="no quantized weight"):
            save_pretrained(build("llama"), tmp_path / "saved")
        assert not names_in(tmp_path)

    def test_an_offloaded_tensor(self, quantized, tmp_path):
        quantized.model.norm.to("meta")
        with pytest.raises(UsageError, match="offloaded") as caught:
            quantized.save_pretrained(tmp_path / "saved")
        assert caught.value.tensor == "model.norm.weight"
        assert not names_in(tmp_path)

    def test_a_scale2_for_each_row(self, quantized, tmp_path):
        old: Weight = quantized.model.layers[0].self_attn.o_proj.packed.unpack()
        rows = old.replace(scale2=torch.rand(64, 1) + 1)
        quantized.model.layers[0].self_attn.o_proj = Linear(rows)
        with pytest.raises(FormatError, match=r"model\.layers\.0\.self_attn\.o_proj\.weight_scale_2"):
            quantized.save_pretrained(tmp_path / "saved")
        assert not names_in(tmp_path)

    def test_the_method_of_the_class(self, quantized, tmp_path):
        with pytest.raises(ValueError, match="not serializable"):
            PreTrainedModel.save_pretrained(quantized, tmp_path / "saved")
        assert not names_in(tmp_path)


class TestCopies:
    """Whole models: each copy saves itself."""

    @pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
    def test_a_copy_is_a_model_of_its_own(self, name, how, tmp_path):
        model = build(name, tie_word_embeddings=True)
        quantize_model(model, include=["Linear", "Embedding"])
        if how == "deepcopy":
            other = copy.deepcopy(model)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        assert torch.equal(output(other), output(model))
        assert other.lm_head.packed is other.model.embed_tokens.packed
        assert not {id(b) for b in other.buffers()} & {id(b) for b in model.buffers()}
        model.save_pretrained(tmp_path / "a")
        with torch.no_grad():
            other.model.norm.weight.fill_(3)
        other.save_pretrained(tmp_path / "b")
        a, b = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
        assert [key for key in a if a[key] != b[key]] == ["model.norm.weight"]

    @pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "bert"])
    def test_state_dict(self, name, tmp_path):
        model, other = build(name, torch.float32, 0), build(name, torch.float32, 1)
        quantize_model(model)
        quantize_model(other)
        assert not torch.equal(output(other), output(model))
        torch.save(model.state_dict(), tmp_path / "state.pt")
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert torch.equal(output(other), output(model))
        empty = copy.deepcopy(other).to("meta")
        empty.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), assign=True)
        for (key, buffer), mine in zip(model.named_buffers(), empty.buffers(), strict=True):
            if mine.is_meta:  # what transformers leaves out of state dicts: frequencies, positions
                owner, _, last = key.rpartition(".")
                empty.get_submodule(owner).register_buffer(last, buffer, persistent=False)
        assert torch.equal(output(empty), output(model))

    def test_to_a_dtype_changes_what_is_dense(self, tmp_path):
        model = build("qwen3_moe")
        quantize_model(model)
        model.save_pretrained(tmp_path / "a")
        before = {name: weight.numpy() for name, weight in weights_of(model)}
        model.to(torch.float32)
        assert model.model.norm.weight.dtype == torch.float32
        assert all(weight.numpy().same(before[name]) for name, weight in weights_of(model))
        assert output(model).dtype == torch.float32
        model.to(torch.bfloat16).save_pretrained(tmp_path / "b")
        assert tensors_of(tmp_path / "b") == tensors_of(tmp_path / "a")
        with pytest.raises(ValueError, match=r"`.half\(\)` is not supported"):  # transformers' own word
            model.half()


@pytest.mark.gpu
@needs_triton
@needs_gpu
class TestOnAGpu:
    @pytest.mark.parametrize("name", MODELOPT)
    def test_every_tensor_comes_back(self, name, tmp_path):
        """From the default layout of the device, and after a move there and back."""
        model = from_pretrained(TINY / name, device_map="cuda")
        model.save_pretrained(tmp_path / "cuda")
        assert halfbyte.diff(TINY / name, tmp_path / "cuda").ok
        model = from_pretrained(TINY / name, layout="rows")
        model.to("cuda").save_pretrained(tmp_path / "moved")
        assert tensors_of(tmp_path / "moved") == tensors_of(TINY / name)
        model.to("cpu").save_pretrained(tmp_path / "back")
        assert tensors_of(tmp_path / "back") == tensors_of(TINY / name)

    def test_a_tied_head_moves_once(self, tmp_path):
        model = build("llama", tie_word_embeddings=True)
        quantize_model(model, include=["Linear", "Embedding"])
        expected = output(model)
        model.to("cuda")
        assert model.lm_head.packed is model.model.embed_tokens.packed
        with torch.no_grad():
            found = model(torch.arange(7, device="cuda")[None])[0].cpu()
        assert torch.allclose(found, expected, atol=0.05)
        model.save_pretrained(tmp_path / "saved")
        assert not any(name.startswith("lm_head") for name in tensors_of(tmp_path / "saved"))


class TestTargets:
    def test_the_working_directory_is_not_replaced(self, quantized, tmp_path, monkeypatch):
        (tmp_path / "in").mkdir()
        monkeypatch.chdir(tmp_path / "in")
        for path in (".", "", "..", "/"):
            with pytest.raises(TargetError, match="the working directory is, or lies in, the target"):
                quantized.save_pretrained(path)
        assert names_in(tmp_path / "in") == []
        quantized.save_pretrained("saved")
        assert (tmp_path / "in" / "saved" / "config.json").is_file()

    def test_below_a_file(self, quantized, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(TargetError, match="cannot make the directory"):
            quantized.save_pretrained(tmp_path / "file" / "saved")

    @pytest.mark.parametrize("size", [0, -1, None])
    def test_sizes_of_shards_that_cannot_be(self, quantized, size, tmp_path):
        with pytest.raises(UsageError, match="not a size"):
            quantized.save_pretrained(tmp_path / "saved", max_shard_size=size)
        assert not (tmp_path / "saved").exists()
