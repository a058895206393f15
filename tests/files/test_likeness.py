"""What the likeness of layers shows, and what a config says of their number and of the groups of 16."""

import numpy as np
import pytest

import halfbyte
from checkpoints import make_dense, modelopt_section, named, nvfp4, read_json, save, write_json
from halfbyte.errors import FormatError, UsageError
from halfbyte.weight import DenseWeight, Weight

MLP = ("gate_proj", "up_proj", "down_proj")


def layered(path, layers, lost=(), dense=(), **config):
    """A checkpoint of MLPs without those modules that are lost, (layer, part) each; some of them dense."""
    path.mkdir(exist_ok=True)
    tensors = {}
    for layer in range(layers):
        for part in MLP:
            name = f"model.layers.{layer}.mlp.{part}"
            if (layer, part) in dense:
                tensors[f"{name}.weight"] = np.ones((16, 32), np.float32)
            elif (layer, part) not in lost:
                tensors |= named("modelopt", name, nvfp4(16, 32, scale2=2.0**-12))
    save(path / "model.safetensors", tensors)
    ignore = [f"model.layers.{layer}.mlp.{part}" for layer, part in dense]
    write_json(path / "config.json", config | {"quantization_config": modelopt_section(ignore=ignore)})
    return path


def found(path):
    return [(f.code, f.tensor, f.got) for f in halfbyte.verify(path).findings]


def test_sound_layers(tmp_path):
    assert found(layered(tmp_path / "x", 12, num_hidden_layers=12)) == []
    assert found(layered(tmp_path / "more", 12, num_hidden_layers=11)) == []  # layers for multi-token prediction


def test_hb127_a_lost_module(tmp_path):
    path = layered(tmp_path / "x", 12, lost=[(3, "up_proj")])
    assert found(path) == [("HB127", "model.layers.3.mlp.up_proj", "11 other layers have it")]


def test_layers_that_differ_on_purpose(tmp_path):
    every_third = [(layer, "up_proj") for layer in range(0, 12, 3)]
    assert found(layered(tmp_path / "third", 12, lost=every_third)) == []
    whole = [(0, part) for part in MLP]
    assert found(layered(tmp_path / "whole", 12, lost=whole)) == []


def test_hb126_a_part_left_dense(tmp_path):
    path = layered(tmp_path / "x", 3, dense=[(1, "up_proj")])
    assert found(path) == [("HB126", "model.layers.1.mlp.gate_proj", "gate_proj nvfp4, up_proj dense")]
    assert found(layered(tmp_path / "both", 3, dense=[(1, "up_proj"), (1, "gate_proj")])) == []


def test_hb211_fewer_layers_than_the_config_says(tmp_path):
    assert found(layered(tmp_path / "x", 11, num_hidden_layers=12)) == [("HB211", None, 11)]


def test_hb210_group_size(tmp_path):
    path = make_dense(tmp_path / "x")
    config = read_json(path / "config.json")
    weights = {"num_bits": 4, "type": "float", "group_size": 32}
    config["quantization_config"]["config_groups"] = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    write_json(path / "config.json", config)
    assert found(path) == [("HB210", None, 32)]


def test_hb206_a_method_of_another_dialect_beside_hf_quant_config(tmp_path):
    path = make_dense(tmp_path / "x")
    quant = {"quantization": {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["lm_head"]}}
    write_json(path / "hf_quant_config.json", quant)
    config = read_json(path / "config.json")
    config["quantization_config"]["quant_method"] = "compressed-tensors"
    write_json(path / "config.json", config)
    assert "HB206" in [code for code, _, _ in found(path)]


def test_hb135_shards_without_an_index(tmp_path):
    path = make_dense(tmp_path / "x", shards=2)
    (path / "model.safetensors.index.json").unlink()
    assert found(path) == [("HB135", None, "2 files")]


def test_nothing_left_to_verify_is_no_proof(tmp_path):
    path = make_dense(tmp_path / "x")
    for options in ({"include": ["lm_heed"]}, {"exclude": ["*"]}):
        with pytest.raises(UsageError, match="no module is left to verify"):
            halfbyte.verify(path, **options)


def test_a_weight_by_its_name(tmp_path):
    with halfbyte.open(make_dense(tmp_path / "x")) as checkpoint:
        everything = dict(checkpoint.items())
        assert checkpoint.keys() == list(everything)
        name = next(n for n, w in everything.items() if isinstance(w, Weight))
        assert checkpoint[name].same(everything[name])
        assert isinstance(checkpoint["model.norm.weight"], DenseWeight)
        with pytest.raises(FormatError, match="no such weight"):
            checkpoint.load("model.nothing")
        assert len(repr(checkpoint)) < 300


def test_a_report_prints_its_findings(tmp_path):
    text = str(halfbyte.verify(layered(tmp_path / "x", 11, num_hidden_layers=12)))
    assert text.splitlines()[0] == "verify: ok, 1 findings"
    assert "HB211" in text
