"""quantize from FP8, MXFP4 and stacked checkpoints: the bytes are those of quantizing the values that they hold."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    GOLDENS,
    Raw,
    call,
    check_failure,
    floats,
    joined,
    leftovers,
    mxfp4,
    read_json,
    save,
    tensors_of,
    write_json,
)
from halfbyte.numerics import E4M3_VALUES
from halfbyte.weight import Mxfp4Weight

P = "model.layers.0.mlp.experts"
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def make(path, tensors, config=None):
    path.mkdir(parents=True)
    save(path / "model.safetensors", tensors)
    write_json(path / "config.json", {"model_type": "x", "hidden_size": 32} | (config or {}))
    return path


def check(path, values, to="modelopt"):
    """Every weight is the one that quantizing its values gives."""
    with halfbyte.open(path) as ck:
        found = {m.name: ck.load(m) for m in ck.parts if m.kind == "nvfp4"}
    assert set(found) == set(values)
    for name, dense in values.items():
        expected = halfbyte.quantize(dense)
        assert np.array_equal(found[name].codes, expected.codes), name
        assert np.array_equal(found[name].scales, expected.scales), name
        with np.errstate(divide="ignore"):
            kept = expected.scale2 if to == "modelopt" else np.float32(1) / (np.float32(1) / expected.scale2)
        assert np.allclose(found[name].scale2, kept, rtol=2e-7, atol=0)


def fp8_values(data, scale):
    return E4M3_VALUES[data.view(np.uint8)] * np.asarray(scale, np.float32)


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("form", ["tensor", "row", "row of two axes", "block", "inverse name"])
def test_fp8(form, to, tmp_path):
    rng = np.random.default_rng(1)
    n, k = 272, 160
    data = (rng.integers(0, 0x7F, (n, k), np.uint8) | rng.integers(0, 2, (n, k), np.uint8) << 7).view(E4M3)
    blocks = rng.uniform(0.001, 0.01, (3, 2)).astype(np.float32)
    rows = rng.uniform(0.001, 0.01, n).astype(np.float32)
    scale, spread = {
        "tensor": (np.float32(0.004), np.float32(0.004)),
        "row": (rows, rows[:, None]),
        "row of two axes": (rows[:, None], rows[:, None]),
        "block": (blocks, blocks.repeat(128, 0)[:n].repeat(128, 1)[:, :k]),
        "inverse name": (blocks, blocks.repeat(128, 0)[:n].repeat(128, 1)[:, :k]),
    }[form]
    suffix = "weight_scale_inv" if form == "inverse name" else "weight_scale"
    head = floats(64, 32)
    tensors = {
        f"{Q}.weight": data,
        f"{Q}.{suffix}": scale,
        f"{Q}.input_scale": np.float32(0.5),
        f"{Q}.bias": np.ones(n, BF16),
        "lm_head.weight": head,
    }
    if form == "inverse name":
        tensors[f"{Q}.activation_scale"] = tensors.pop(f"{Q}.input_scale")
    src = make(tmp_path / "src", tensors)
    report = halfbyte.quantize_checkpoint(src, tmp_path / "out", to=to)
    check(tmp_path / "out", {Q: fp8_values(data, spread)}, to)
    found = tensors_of(tmp_path / "out")
    assert found[f"{Q}.bias"].data == np.ones(n, BF16).tobytes()
    assert found["lm_head.weight"].data == head.tobytes()
    assert len(found) == 5
    assert [entry["name"] for entry in report.facts["dropped"]] == [
        next(t for t in tensors if t.endswith(("input_scale", "activation_scale")))
    ]
    assert halfbyte.verify(tmp_path / "out").ok


def test_the_golden_fp8_layers(tmp_path):
    """Of the mixed golden file, with its NVFP4 layers left out: all that is FP8 becomes NVFP4."""
    golden = GOLDENS["modelopt_llama_mixed_fp8_nvfp4_tied"]
    with halfbyte.open(golden) as ck:
        keep = [t.name for m in ck.modules if m.kind != "nvfp4" for t in m.tensors]
        values = {m.name: ck.load(m).dequantize() for m in ck.modules if m.kind == "fp8"}
    tensors = tensors_of(golden)
    src = make(tmp_path / "src", {name: tensors[name] for name in keep})
    assert len(values) > 3
    halfbyte.quantize_checkpoint(src, tmp_path / "out")
    check(tmp_path / "out", values)


def test_fp8_layers_that_are_left_stay_fp8(tmp_path):
    data, ones = np.full((160, 32), 0x38, np.uint8).view(E4M3), np.ones((2, 1), np.float32)
    tensors = {f"{name}.weight": data for name in (Q, DOWN)} | {f"{name}.weight_scale_inv": ones for name in (Q, DOWN)}
    src = make(tmp_path / "src", tensors)
    halfbyte.quantize_checkpoint(src, tmp_path / "out", ignore=[DOWN])
    found = tensors_of(tmp_path / "out")
    assert found[f"{DOWN}.weight"].data == data.tobytes()
    assert found[f"{DOWN}.weight_scale"] == Raw("F32", (2, 1), ones.tobytes())
    table = read_json(tmp_path / "out" / "hf_quant_config.json")["quantization"]["quantized_layers"]
    assert table[DOWN]["quant_algo"].startswith("FP8")
    assert table[Q]["quant_algo"] == "W4A16_NVFP4"
    assert halfbyte.verify(tmp_path / "out").ok


def test_mxfp4_of_compressed_tensors(tmp_path):
    mx = mxfp4(48, 64)
    src = make(tmp_path / "src", {f"{Q}.weight_packed": mx["codes"], f"{Q}.weight_scale": mx["scales"]})
    halfbyte.quantize_checkpoint(src, tmp_path / "out")
    check(tmp_path / "out", {Q: Mxfp4Weight(**mx).dequantize()})


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_dense_stacks(kind, columns, tmp_path):
    rng = np.random.default_rng(2)
    dense = {
        f"{P}.{e}.{p}": (rng.standard_normal((32, 48) if p == "down_proj" else (48, 32)) * 0.02).astype(BF16)
        for e in range(3)
        for p in ("gate_proj", "up_proj", "down_proj")
    }
    order = "interleaved" if kind == "gpt_oss" else "concatenated"
    gate_up = np.stack([joined(dense[f"{P}.{e}.gate_proj"], dense[f"{P}.{e}.up_proj"], order) for e in range(3)])
    down = np.stack([dense[f"{P}.{e}.down_proj"] for e in range(3)])
    bias = np.arange(3 * 96).reshape(3, 96).astype(BF16)
    if columns:
        gate_up, down = (np.ascontiguousarray(t.swapaxes(1, 2)) for t in (gate_up, down))
    tensors = {f"{P}.gate_up_proj": gate_up, f"{P}.gate_up_proj_bias": bias, f"{P}.down_proj": down}
    tensors["model.layers.0.mlp.router.weight"] = floats(3, 32)
    src = make(tmp_path / "src", tensors, {"model_type": kind})
    report = halfbyte.quantize_checkpoint(src, tmp_path / "out", workers=1)
    check(tmp_path / "out", dense)
    halves = (bias[:, 0::2], bias[:, 1::2]) if kind == "gpt_oss" else (bias[:, :48], bias[:, 48:])
    found = tensors_of(tmp_path / "out")
    assert found[f"{P}.2.up_proj.bias"].data == halves[1][2].tobytes()
    assert [entry["reason"] for entry in report.facts["skipped"]] == ["router"]
    left = halfbyte.quantize_checkpoint(src, tmp_path / "some", ignore=[f"{P}.1.*", "re:.*down_proj"])
    assert len(left.facts["quantized"]) == 4
    some = tensors_of(tmp_path / "some")
    assert some[f"{P}.1.gate_proj.weight"].data == dense[f"{P}.1.gate_proj"].tobytes()
    assert some[f"{P}.down_proj"] == tensors_of(src)[f"{P}.down_proj"], "nothing of this stack is quantized"
    with halfbyte.open(tmp_path / "some") as ck:
        for part in ck.parts:
            if part.kind == "dense" and part.name in dense:
                assert np.array_equal(ck.load(part).data, dense[part.name])


def test_gpt_oss(tmp_path):
    gate_up = mxfp4(2 * 64, 32)
    tensors = {
        f"{P}.gate_up_proj_blocks": gate_up["codes"].reshape(2, 64, 1, 16),
        f"{P}.gate_up_proj_scales": gate_up["scales"].reshape(2, 64, 1),
    }
    src = make(tmp_path / "src", tensors, {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}})
    halfbyte.quantize_checkpoint(src, tmp_path / "out")
    values = Mxfp4Weight(**gate_up).dequantize().reshape(2, 64, 32)
    check(
        tmp_path / "out",
        {f"{P}.{e}.{p}": values[e, i::2] for e in range(2) for i, p in enumerate(("gate_proj", "up_proj"))},
    )
    assert "quant_method" in read_json(tmp_path / "out" / "config.json")["quantization_config"]


def test_a_large_fp8_weight_is_read_in_pieces(tmp_path, monkeypatch):
    """Pieces end at multiples of 128 rows, so that block scales fit."""
    monkeypatch.setattr("halfbyte.tools.quantize._WHOLE", 1 << 14)
    monkeypatch.setattr("halfbyte.tools.quantize._PIECE", 1 << 14)
    rng = np.random.default_rng(3)
    data = rng.integers(0, 0x7F, (700, 48), np.uint8).view(E4M3)
    blocks = rng.uniform(0.001, 0.01, (6, 1)).astype(np.float32)
    mx = mxfp4(700, 64)
    tensors = {f"{Q}.weight": data, f"{Q}.weight_scale": blocks}
    tensors |= {f"{DOWN}.weight": mx["codes"], f"{DOWN}.weight_scale": mx["scales"]}
    src = make(tmp_path / "src", tensors)
    halfbyte.quantize_checkpoint(src, tmp_path / "out", workers=2)
    spread = blocks.repeat(128, 0)[:700]
    check(tmp_path / "out", {Q: fp8_values(data, spread), DOWN: Mxfp4Weight(**mx).dequantize()})


def test_values_that_are_not_finite_are_named_by_their_place(tmp_path):
    data = np.full((32, 32), 0x38, np.uint8)
    data[3, 5] = 0x7F
    src = make(tmp_path / "a", {f"{Q}.weight": data.view(E4M3), f"{Q}.weight_scale": np.float32(1)})
    check_failure(call("quantize", src, tmp_path / "out"), 2, f"{Q}.weight", "[3, 5]")
    mx = mxfp4(64, 32)
    scales = mx["scales"].reshape(2, 32, 1).copy()
    scales[1, 7, 0] = 255
    tensors = {f"{P}.gate_up_proj_blocks": mx["codes"].reshape(2, 32, 1, 16), f"{P}.gate_up_proj_scales": scales}
    src = make(tmp_path / "b", tensors, {"model_type": "gpt_oss"})
    check_failure(call("quantize", src, tmp_path / "out"), 2, f"{P}.gate_up_proj_blocks", "[1, 7, 0]")
    assert leftovers(tmp_path, "a", "b") == []


def test_what_cannot_be_a_source(tmp_path):
    data = np.full((32, 32), 0x38, np.uint8).view(E4M3)
    cases = {
        "odd": {f"{Q}.weight": data, f"{Q}.weight_scale": np.float32(1), f"{Q}.odd": np.ones(2, np.float32)},
        "scale": {f"{Q}.weight": data, f"{Q}.weight_scale": np.ones(5, np.float32)},
        "none": {f"{Q}.weight": data},
        "mxfp8": {f"{Q}.weight": data, f"{Q}.weight_scale": np.full((32, 1), 127, np.uint8)},
    }
    for name, tensors in cases.items():
        check_failure(
            call("quantize", make(tmp_path / name, tensors), tmp_path / "out"), 2, name if name == "odd" else ""
        )
    assert leftovers(tmp_path, *cases) == []
