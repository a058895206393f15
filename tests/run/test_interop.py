"""transformers' own compressed-tensors loader opens what halfbyte writes, and computes what its weights mean."""

from __future__ import annotations

import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import disable_quantization
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import halfbyte
from checkpoints import CONFIG, GOLDENS, Raw, call, copy_golden, make_float, save, tensors_of

IDS = torch.arange(64)[None]
BF16_HALF_ULP = 2.0**-8
"""Relative to the value, the largest error of one rounding to bfloat16."""


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def load(path, dtype=None):
    return AutoModelForCausalLM.from_pretrained(path, **({"dtype": dtype} if dtype else {}))


def check_weights(model, exact, fp8=()):
    """Each decompressed weight is the exact one, rounded to bfloat16; of FP8 weights the scale is rounded too."""
    found = {n: p for n, p in model.state_dict().items() if n.endswith("_proj.weight")}
    wanted = exact.state_dict()
    assert set(found) == {n for n in wanted if n.endswith("_proj.weight")}
    for name, weight in found.items():
        assert weight.dtype == torch.bfloat16
        error = (weight.double() - wanted[name].double()).abs()
        # Beside that, the two ways to multiply by the scales round in float32, or two roundings multiply.
        twice = name.removesuffix(".weight") in fp8
        bound = 2 * BF16_HALF_ULP + 2.0**-15 if twice else BF16_HALF_ULP + 2.0**-22
        assert (error <= bound * wanted[name].double().abs()).all(), name


def check_logits(got, path_exact, path_dense):
    """No further from the exact model than twice the dense bfloat16 model is: both round everything to bfloat16."""
    exact = logits(load(path_exact, "float32"))
    rounding = (logits(load(path_dense)) - exact).norm()
    assert rounding > 0
    assert (got - exact).norm() <= 2 * rounding
    assert rounding < 0.02 * exact.norm()


@pytest.mark.parametrize("name", ["modelopt_llama_w4a16", "modelopt_llama_nvfp4"])
def test_a_converted_checkpoint(tmp_path, name):
    halfbyte.convert(GOLDENS[name], tmp_path / "ct", to="compressed-tensors", prove=True)
    halfbyte.dequantize_checkpoint(GOLDENS[name], tmp_path / "dense")
    halfbyte.dequantize_checkpoint(GOLDENS[name], tmp_path / "exact", dtype="float32")
    model = load(tmp_path / "ct")
    with_activations = logits(model)
    check_weights(model, load(tmp_path / "exact", "float32"))
    # A W4A4 checkpoint also quantizes its activations, which is no rounding to bfloat16; without that it is.
    model.apply(disable_quantization)
    check_logits(logits(model), tmp_path / "exact", tmp_path / "dense")
    assert torch.equal(logits(model), with_activations) == (name == "modelopt_llama_w4a16")


def test_the_twin_of_compressed_tensors_own_converter(tmp_path):
    """Bit by bit the logits of the checkpoint that compressed-tensors itself made of the same source.

    Its converter leaves scalars of shape [], which transformers does not load; here they are [1].
    """
    halfbyte.convert(GOLDENS["modelopt_llama_nvfp4"], tmp_path / "ct", to="compressed-tensors")
    twin = copy_golden("ct_llama_nvfp4", tmp_path / "twin") / "model.safetensors"
    tensors = {n: Raw(t.dtype, t.shape or (1,), t.data) for n, t in tensors_of(twin).items()}
    save(twin, tensors)
    ours, theirs = load(tmp_path / "ct"), load(tmp_path / "twin")
    assert torch.equal(logits(ours), logits(theirs))
    a, b = ours.state_dict(), theirs.state_dict()
    assert set(a) == set(b)
    for name, tensor in a.items():
        assert torch.equal(tensor.reshape(-1), b[name].reshape(-1)), name


def test_a_dense_model_round_trip(tmp_path):
    """From ModelOpt's file to logits without a loader of ours: the values of dequantize in a plain model."""
    name = "modelopt_llama_w4a16"
    halfbyte.dequantize_checkpoint(GOLDENS[name], tmp_path / "dense", dtype="float32")
    with halfbyte.open(GOLDENS[name]) as checkpoint:
        weights = dict(checkpoint.weights())
    model = load(tmp_path / "dense", "float32")
    for module, weight in weights.items():
        assert np.array_equal(model.get_submodule(module).weight.detach().numpy(), weight.dequantize())


@pytest.mark.parametrize("like", ["modelopt", "compressed-tensors"])
def test_a_quantized_checkpoint(tmp_path, like):
    """quantize to compressed-tensors, then transformers."""
    src = make_float(tmp_path / "src")
    halfbyte.quantize_checkpoint(src, tmp_path / "ct", to="compressed-tensors", like=like, share_scale2=True)
    halfbyte.dequantize_checkpoint(tmp_path / "ct", tmp_path / "dense")
    halfbyte.dequantize_checkpoint(tmp_path / "ct", tmp_path / "exact", dtype="float32")
    model = load(tmp_path / "ct")
    check_logits(logits(model), tmp_path / "exact", tmp_path / "dense")
    check_weights(model, load(tmp_path / "exact", "float32"))


def test_sharded_output(tmp_path):
    halfbyte.convert(GOLDENS["modelopt_llama_w4a16"], tmp_path / "one", to="compressed-tensors")
    halfbyte.convert(GOLDENS["modelopt_llama_w4a16"], tmp_path / "many", to="compressed-tensors", max_shard_size="6KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert torch.equal(logits(load(tmp_path / "many")), logits(load(tmp_path / "one")))


def test_tied_embeddings(tmp_path):
    """Mixed FP8 and NVFP4, lm_head tied: the config leaves lm_head alone although the file has none."""
    name = "modelopt_llama_mixed_fp8_nvfp4_tied"
    halfbyte.convert(GOLDENS[name], tmp_path / "ct", to="compressed-tensors")
    halfbyte.dequantize_checkpoint(GOLDENS[name], tmp_path / "dense")
    halfbyte.dequantize_checkpoint(GOLDENS[name], tmp_path / "exact", dtype="float32")
    model = load(tmp_path / "ct")
    logits(model)
    fp8 = {f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"}
    check_weights(model, load(tmp_path / "exact", "float32"), fp8)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    model.apply(disable_quantization)
    check_logits(logits(model), tmp_path / "exact", tmp_path / "dense")


def test_a_model_that_transformers_saved(tmp_path):
    """save_pretrained -> quantize -> transformers: names and files as the library writes them."""
    torch.manual_seed(0)
    config = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "dtype")}
    LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16).save_pretrained(tmp_path / "src")
    halfbyte.quantize_checkpoint(tmp_path / "src", tmp_path / "ct", to="compressed-tensors", share_scale2=True)
    assert halfbyte.verify(tmp_path / "ct").findings == ()
    assert "generation_config.json" in {p.name for p in (tmp_path / "ct").iterdir()}
    got, dense = logits(load(tmp_path / "ct")), logits(load(tmp_path / "src"))
    # NVFP4 of Gaussian weights is off by 9.5 %; through two layers of residuals less than that shows.
    assert 0 < (got - dense).norm() / dense.norm() < 0.2
    assert set(tensors_of(tmp_path / "src")) == set(load(tmp_path / "src").state_dict())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "it's here.pt"])
def test_the_command_for_pickled_files_converts_them(tmp_path, name):
    """The hint of the refusal, run as it stands, in the directory of the file."""
    torch.save({"a.weight": torch.ones(4, 16), "b": torch.zeros(2)}, tmp_path / name)
    line = call("verify", tmp_path / name).lines[0]
    _, *command = shlex.split(line[line.index("python -c") :])
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, capture_output=True)
    assert set(tensors_of(tmp_path / "model.safetensors")) == {"a.weight", "b"}
