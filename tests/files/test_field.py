"""What users of NVFP4 checkpoints have run into elsewhere, each as a small file and the right answer."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    CONFIG,
    DOWN,
    E4M3,
    GATE,
    LINEARS,
    OUT,
    UP,
    K,
    Q,
    V,
    call,
    check_failure,
    ct_section,
    expert_weights,
    f32,
    fp8,
    leftovers,
    make_dense,
    make_float,
    modelopt_section,
    named,
    nvfp4,
    read_json,
    save,
    split_experts,
    tensors_of,
    write_json,
)
from halfbyte.weight import Weight

P = "model.layers.0.mlp.experts"


def told(path, *names, **options):
    """code -> findings of verify, of the given codes or all."""
    found: dict[str, list] = {}
    for f in halfbyte.verify(path, **options).findings:
        if not names or f.code in names:
            found.setdefault(f.code, []).append(f)
    return found


def experts(path, made, change=None, **config):
    path.mkdir(parents=True)
    tensors = split_experts(P, made) | {"model.layers.0.mlp.gate.weight": np.ones((4, 32), BF16)} | (change or {})
    save(path / "model.safetensors", {n: t for n, t in tensors.items() if t is not None})
    section = modelopt_section(ignore=["model.layers.0.mlp.gate"])
    write_json(path / "config.json", {"quantization_config": section, "model_type": "qwen3_moe"} | config)
    return path


# --- conventions of scales


def test_the_reciprocal_is_the_one_that_compressed_tensors_stores(tmp_path):
    """0.00028 is stored as 3571.4285, not taken for a multiplier; and comes back as it was."""
    src = make_dense(tmp_path / "a", change=lambda t: t.update({f"{Q}.weight_scale_2": np.float32(0.00028)}))
    halfbyte.convert(src, tmp_path / "b", to="compressed-tensors")
    stored = f32(tensors_of(tmp_path / "b")[f"{Q}.weight_global_scale"])
    assert stored == np.float32(1) / np.float32(0.00028)
    assert round(float(stored[0]), 1) == 3571.4
    halfbyte.convert(tmp_path / "b", tmp_path / "c", to="modelopt")
    assert tensors_of(tmp_path / "c") == tensors_of(src)


def test_twins_of_two_dialects_have_the_same_values(tmp_path):
    """Text from the one must be the text from the other: no value differs, by no ulp."""
    rng = np.random.default_rng(0)

    def change(tensors):
        for name in LINEARS:
            tensors[f"{name}.weight_scale_2"] = np.float32(rng.uniform(1e-5, 1e-3))

    src = make_dense(tmp_path / "a", change=change)
    halfbyte.convert(src, tmp_path / "b", to="compressed-tensors")
    diff = halfbyte.diff(src, tmp_path / "b")
    assert diff.ok
    assert diff.facts["different"] == diff.facts["same_values"] == 0


def test_a_file_without_scale2_is_called_single_level(tmp_path):
    src = make_dense(tmp_path / "a", change=lambda t: [t.pop(f"{n}.weight_scale_2") for n in (Q,)])
    (finding,) = told(src, "HB105")["HB105"]
    assert finding.tensor == f"{Q}.weight"
    assert "single-level" in str(finding)


def test_signed_scales_are_errors_and_minus_zero_is_one_of_them(tmp_path):
    def change(tensors):
        bytes_ = tensors[f"{Q}.weight_scale"].view(np.uint8)
        bytes_[0, 0], bytes_[1, 1], bytes_[2, 0] = 0x80, 0xB8, 0xFF

    found = told(make_dense(tmp_path / "a", change=change))
    assert [f.index for f in found["HB104"]] == [[0, 0], [1, 1]]
    assert [f.index for f in found["HB103"]] == [[2, 0]]


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt"])
def test_no_tensor_is_dropped_in_silence(to, tmp_path):
    """A companion without a place in the target is refused by name; in its own dialect it is carried."""
    src = make_dense(tmp_path / "a", change=lambda t: t.update({f"{Q}.weight_other": np.ones(3, np.float32)}))
    assert [f.tensor for f in told(src, "HB120")["HB120"]] == [f"{Q}.weight_other"]
    if to == "modelopt":
        halfbyte.convert(src, tmp_path / "b", to=to)
        assert f"{Q}.weight_other" in tensors_of(tmp_path / "b")
    else:
        check_failure(call("convert", src, tmp_path / "b", "--to", to), 2, f"{Q}.weight_other")
        assert leftovers(tmp_path, "a") == []


def test_a_reciprocal_where_a_multiplier_is_meant(tmp_path):
    """By names it is a multiplier; its size says otherwise: a warning, and nothing is guessed."""
    src = make_dense(tmp_path / "a", change=lambda t: t.update({f"{Q}.weight_scale_2": np.float32(3571.4)}))
    (finding,) = told(src, "HB108")["HB108"]
    assert finding.severity == "warning"
    assert "reciprocal" in finding.hint
    both = make_dense(
        tmp_path / "b",
        "compressed-tensors",
        change=lambda t: t.update({f"{Q}.weight_global_scale": np.float32([0.00028])}),
    )
    assert [f.tensor for f in told(both, "HB108")["HB108"]] == [f"{Q}.weight_global_scale"]


def test_a_scale2_that_nothing_uses(tmp_path):
    """The weight beside it is dense: an engine that ignores the scale computes garbage."""

    def change(tensors):
        tensors[f"{Q}.weight"] = np.ones((32, 32), BF16)
        del tensors[f"{Q}.weight_scale"]

    found = told(make_dense(tmp_path / "a", change=change))
    assert [f.tensor for f in found["HB121"]] == [f"{Q}.weight_scale_2"]
    assert found["HB121"][0].severity == "error"


# --- shapes and kinds


def test_shapes_are_logical(tmp_path):
    """K is twice the bytes of a row."""
    src = make_dense(tmp_path / "a")
    shapes = {g["name"]: g["shapes"] for g in halfbyte.inspect(src).facts["groups"]}
    assert shapes["model.layers.*.mlp.down_proj"] == [[32, 48]]
    assert tensors_of(src)[f"{DOWN}.weight"].shape == (32, 24)


def test_half_of_the_scales(tmp_path):
    """As exports of models that were compressed already have written them."""
    half = np.ones((32, 1), E4M3)
    (finding,) = told(make_dense(tmp_path / "a", change={f"{Q}.weight_scale": half}), "HB102")["HB102"]
    assert (finding.tensor, finding.got, finding.expected) == (f"{Q}.weight_scale", [32, 1], [32, 2])
    assert "already compressed" in finding.hint


def test_an_export_that_holds_fp8_though_it_says_nvfp4(tmp_path):
    """8.0 bits a weight are told, and the config is contradicted."""

    def change(tensors):
        for suffix in ("weight", "weight_scale", "weight_scale_2"):
            tensors.pop(f"{Q}.{suffix}")
        tensors |= {f"{Q}.{s}": t for s, t in fp8(32, 32).items()}

    src = make_dense(tmp_path / "a", change=change)
    (finding,) = told(src, "HB204")["HB204"]
    assert (finding.got, finding.expected) == ("fp8", "nvfp4")
    kinds = halfbyte.inspect(src).facts["kinds"]
    assert kinds["fp8"]["bits_per_parameter"] > 8
    assert 4.5 < kinds["nvfp4"]["bits_per_parameter"] < 4.6


def test_mixed_fp8_and_nvfp4_of_compressed_tensors(tmp_path):
    """Each tensor has its own kind, whatever the order of overlapping groups."""

    def change(tensors):
        for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
            tensors.pop(f"{Q}.{suffix}")
        tensors |= {f"{Q}.{s}": t for s, t in fp8(32, 32, scale=np.full((32, 1), 0.01)).items()}

    groups = ct_section()["config_groups"]
    fp8_group = {"targets": ["re:.*q_proj$"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    for order in (("a", "b"), ("b", "a")):
        section = ct_section(config_groups={order[0]: groups["group_0"], order[1]: fp8_group}, format="mixed-precision")
        src = make_dense(tmp_path / order[0], "compressed-tensors", change=change, section=section)
        assert set(told(src)) == {"HB126"}, "q is FP8 and k is not: a warning"
        halfbyte.convert(src, tmp_path / f"{order[0]}2", to="modelopt", prove=True)
        table = read_json(tmp_path / f"{order[0]}2" / "hf_quant_config.json")["quantization"]["quantized_layers"]
        assert table[Q]["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
        assert table[K]["quant_algo"] == "W4A16_NVFP4"


def test_the_same_key_means_five_things(tmp_path):
    """weight_scale: a number, a row of numbers or blocks of FP8, E4M3 blocks of NVFP4, E8M0 blocks of MXFP4."""
    tensors = {
        f"nv.{s}": t
        for s, t in {
            "weight": nvfp4(32, 64)["codes"],
            "weight_scale": nvfp4(32, 64)["scales"],
            "weight_scale_2": np.float32(0.1),
        }.items()
    }
    tensors |= {"mx.weight": np.full((32, 32), 0x21, np.uint8), "mx.weight_scale": np.full((32, 2), 127, np.uint8)}
    for name, scale in {
        "one": np.float32(1),
        "rows": np.ones(256, np.float32),
        "blocks": np.ones((2, 1), np.float32),
    }.items():
        tensors |= {f"{name}.weight": np.ones((256, 64), E4M3), f"{name}.weight_scale": scale}
    (tmp_path / "a").mkdir()
    save(tmp_path / "a" / "model.safetensors", tensors)
    with halfbyte.open(tmp_path / "a") as ck:
        assert {m.name: m.kind for m in ck.modules} == dict.fromkeys(("one", "rows", "blocks"), "fp8") | {
            "nv": "nvfp4",
            "mx": "mxfp4",
        }
        assert {n: ck[n].granularity for n in ("one", "rows", "blocks")} == {
            "one": "tensor",
            "rows": "row",
            "blocks": "block",
        }


# --- activations


def test_without_input_scales_it_is_w4a16(tmp_path):
    src = make_dense(tmp_path / "a", section=modelopt_section("NVFP4"))
    found = told(src)
    assert set(found) == {"HB112"}
    assert found["HB112"][0].severity == "warning"
    halfbyte.convert(src, tmp_path / "b", to="compressed-tensors")
    group = read_json(tmp_path / "b" / "config.json")["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"] is None


def test_some_modules_lack_the_input_scale_that_the_others_have(tmp_path):
    src = make_dense(tmp_path / "a", input_scale=True, change={f"{V}.input_scale": None, f"{OUT}.input_scale": None})
    assert {f.tensor for f in told(src, "HB111")["HB111"]} == {f"{V}.weight", f"{OUT}.weight"}


def test_input_scales_are_carried_and_named(tmp_path):
    src = make_dense(tmp_path / "a", input_scale=True)
    report = halfbyte.convert(src, tmp_path / "b", to="compressed-tensors")
    assert {
        "tensor": f"{Q}.input_scale",
        "to": f"{Q}.input_global_scale",
        "action": "converted",
        "reason": "reciprocal",
    } in report.facts["tensors"]
    dense = halfbyte.dequantize_checkpoint(src, tmp_path / "c")
    fates = {t["tensor"]: t["action"] for t in dense.facts["tensors"]}
    assert fates[f"{Q}.input_scale"] == "dropped"


# --- quantizing


def test_neighbouring_blocks_have_their_own_scales():
    x = np.zeros((1, 32), np.float32)
    x[0, :16], x[0, 16:] = 6.0, 0.06
    w = halfbyte.quantize(x)
    first, second = (float(w.scales[0, i : i + 1].view(E4M3).astype(np.float32)[0]) for i in (0, 1))
    assert first / second == pytest.approx(100, rel=0.07)
    assert np.allclose(w.dequantize(), x, rtol=0.07)


def test_ties_go_to_even():
    """With scale 1 and scale2 1: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4."""
    x = np.zeros((1, 16), np.float32)
    x[0, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    w = halfbyte.quantize(x, scale2=1.0)
    assert w.scales[0, 0] == 0x38
    assert w.dequantize()[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


def test_codes_are_computed_with_the_rounded_scale():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((8, 64)).astype(np.float32)
    w = halfbyte.quantize(x)
    step = np.repeat(w.scales.view(E4M3).astype(np.float32), 16, 1) * w.scale2
    error = np.abs(w.dequantize() - x) / step
    inside = np.abs(x) / step <= 6
    assert error[inside].max() <= 1.0
    assert (error[inside & (np.abs(x) / step < 2)] <= 0.25 + 1e-6).all()


def test_large_values_are_not_clipped():
    """4000 is more than the 2688 that codes and block scales reach: scale2 takes the rest."""
    w = halfbyte.quantize(np.full((1, 16), 4000, np.float32))
    assert np.allclose(w.dequantize(), 4000, rtol=1e-6)


def test_an_all_zero_weight_stays_zero(tmp_path):
    """Where nvidia-modelopt 0.47 writes NaN scales and scale2 0."""
    w = halfbyte.quantize(np.zeros((2, 32), np.float32))
    assert not w.dequantize().any()
    assert np.isfinite(w.scale2).all()
    assert (w.scale2 > 0).all()
    bad = {
        f"{Q}.weight": np.zeros((32, 16), np.uint8),
        f"{Q}.weight_scale": np.full((32, 2), 0xFF, np.uint8).view(E4M3),
        f"{Q}.weight_scale_2": np.float32(0),
    }
    found = told(make_dense(tmp_path / "a", change=bad))
    assert {"HB103", "HB106"} <= set(found)


def test_fp8_checkpoints_are_sources(tmp_path):
    data = fp8(32, 32)
    src = make_float(tmp_path / "a", {f"{Q}.{s}": t for s, t in data.items()})
    halfbyte.quantize_checkpoint(src, tmp_path / "b")
    values = data["weight"].astype(np.float32) * data["weight_scale"]
    with halfbyte.open(tmp_path / "b") as ck:
        assert ck[Q].same(halfbyte.quantize(values))


# --- zero and small blocks


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x08, 0x20, 0x38, 0x7E])
def test_every_quantizers_zero_block_is_zero(byte, tmp_path):
    """00 of comfy-kitchen and ggml, 38 or 7E of nvidia-modelopt, 20 of compressed-tensors, 08 of torchao."""
    tensors = {}

    def change(t):
        t[f"{Q}.weight"][0, :8] = 0x80  # zeros and minus zeros
        t[f"{Q}.weight_scale"].view(np.uint8)[0, 0] = byte
        tensors.update(t)

    src = make_dense(tmp_path / "a", change=change)
    other = make_dense(
        tmp_path / "b", change=lambda t: (change(t), t[f"{Q}.weight_scale"].view(np.uint8).__setitem__((0, 0), 0x38))
    )
    with halfbyte.open(src) as ck:
        assert not ck[Q].dequantize()[0, :16].any()
    diff = halfbyte.diff(src, other)
    assert diff.ok
    assert diff.facts["same_values"] == (byte != 0x38)


def test_subnormal_and_dead_blocks_are_counted(tmp_path):
    def change(t):
        scales = t[f"{Q}.weight_scale"].view(np.uint8)
        scales[:4, 0], scales[4:6, 0] = 0x03, 0x00
        t[f"{Q}.weight"][:] |= 0x11

    found = told(make_dense(tmp_path / "a", change=change), "HB115", "HB117")
    assert found["HB117"][0].got.startswith("4 blocks")
    assert found["HB115"][0].got == "2 blocks"


# --- fused layers, experts, names


def test_parts_that_are_fused_have_scales_of_their_own(tmp_path):
    """1 : 2 : 8 would make the first part 8 times too large in an engine that takes the largest."""
    change = {f"{n}.weight_scale_2": np.float32(2.0**-12 * f) for n, f in ((Q, 1), (K, 2), (V, 8))}
    (finding,) = told(make_dense(tmp_path / "a", change=change), "HB110")["HB110"]
    assert "8 times too large" in finding.hint
    parts = [Weight(**nvfp4(16, 32, i, scale2=2.0**-12 * f)) for i, f in enumerate((1, 2, 8))]
    fused = Weight.concat(parts)
    assert np.array_equal(fused.dequantize(), np.concatenate([p.dequantize() for p in parts]))


def test_gate_and_up_are_not_exchanged(tmp_path):
    """A file in which they are is named by measuring it."""
    rng = np.random.default_rng(5)
    dense = {n: (rng.standard_normal(s) * 0.02).astype(np.float32) for n, s in LINEARS.items()}
    twin = make_float(tmp_path / "dense", {f"{n}.weight": t for n, t in dense.items()})
    good = halfbyte.quantize_checkpoint(twin, tmp_path / "good")
    assert good.ok
    tensors = tensors_of(tmp_path / "good")
    swapped = {
        n.replace("gate_proj", "X").replace("up_proj", "gate_proj").replace("X", "up_proj"): t
        for n, t in tensors.items()
    }
    (tmp_path / "bad").mkdir()
    save(tmp_path / "bad" / "model.safetensors", swapped)
    write_json(tmp_path / "bad" / "config.json", read_json(tmp_path / "good" / "config.json"))
    found = told(tmp_path / "bad", "HB501", against=twin)["HB501"]
    assert {f.tensor for f in found} == {f"{GATE}.weight", f"{UP}.weight"}
    assert all("gate and up exchanged" in f.hint for f in found)


def test_experts_that_nobody_calibrated(tmp_path):
    """One value in all experts, and none in some."""
    made = expert_weights(4, 48, 32, scale2=lambda e, i: 2.0**-9, input_scale=lambda e, i: 1.0)
    src = experts(tmp_path / "a", made, quantization_config=modelopt_section("NVFP4", ["model.layers.0.mlp.gate"]))
    assert [f.tensor for f in told(src, "HB124")["HB124"]] == [f"{P}.0.down_proj.input_scale"]
    some = experts(
        tmp_path / "b",
        made,
        {f"{P}.2.up_proj.input_scale": None},
        quantization_config=modelopt_section("NVFP4", ["model.layers.0.mlp.gate"]),
    )
    assert [f.tensor for f in told(some, "HB111")["HB111"]] == [f"{P}.2.up_proj.weight"]


def test_a_router_stays_dense(tmp_path):
    made = expert_weights(2, 48, 32, scale2=lambda e, i: 2.0**-9)
    router = named("modelopt", "model.layers.0.mlp.gate", nvfp4(4, 32))
    src = experts(tmp_path / "a", made, router)
    assert [f.tensor for f in told(src, "HB137")["HB137"]] == ["model.layers.0.mlp.gate.weight"]
    dense = make_float(
        tmp_path / "dense",
        {"model.layers.0.mlp.gate.weight": np.ones((16, 32), BF16), f"{P}.0.up_proj.weight": np.ones((48, 32), BF16)},
    )
    report = halfbyte.quantize_checkpoint(dense, tmp_path / "q")
    assert report.facts["skipped"] == [{"name": "model.layers.0.mlp.gate.weight", "reason": "router"}]
    exclude = read_json(tmp_path / "q" / "hf_quant_config.json")["quantization"]["exclude_modules"]
    assert exclude == ["model.layers.0.mlp.gate"]


def test_the_file_counts_not_the_config(tmp_path):
    """lm_head is NVFP4 on disk though the config leaves it out."""

    def change(tensors):
        del tensors["lm_head.weight"]
        tensors |= named("modelopt", "lm_head", nvfp4(64, 32))

    src = make_dense(tmp_path / "a", change=change)
    (finding,) = told(src)["HB202"]
    assert (finding.tensor, finding.severity) == ("lm_head.weight", "warning")
    with halfbyte.open(src) as ck:
        assert ck["lm_head"].kind == "nvfp4"
    halfbyte.convert(src, tmp_path / "b", to="compressed-tensors")
    assert "lm_head" not in read_json(tmp_path / "b" / "config.json")["quantization_config"]["ignore"]


@pytest.mark.parametrize("pattern", ["lm_head", "*lm_head", "re:.*lm_head$", "lm_head.weight"])
@pytest.mark.parametrize("key", ["ignore", "exclude_modules", "modules_to_not_convert"])
def test_three_ways_to_leave_a_module_out(pattern, key, tmp_path):
    section = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", key: [pattern, "model.embed_tokens"]}
    assert halfbyte.verify(make_dense(tmp_path / "a", section=section)).findings == ()


def test_fused_names_in_a_list_of_ignored_modules(tmp_path):
    """qkv_proj leaves out q_proj, k_proj and v_proj."""

    def change(tensors):
        for name in (Q, K, V):
            for suffix in ("weight", "weight_scale", "weight_scale_2"):
                tensors.pop(f"{name}.{suffix}")
            tensors[f"{name}.weight"] = np.ones(LINEARS[name], BF16)

    section = modelopt_section(ignore=["lm_head", "model.layers.0.self_attn.qkv_proj"])
    assert halfbyte.verify(make_dense(tmp_path / "a", change=change, section=section)).findings == ()


def test_scales_of_the_kv_cache_are_their_own_class(tmp_path):
    change = {f"{K}.k_scale": np.float32(0.5), f"{V}.v_scale": np.float32(0.25)}
    section = modelopt_section(kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"})
    src = make_dense(tmp_path / "a", change=change, section=section)
    assert halfbyte.verify(src).findings == ()
    halfbyte.convert(src, tmp_path / "b", to="compressed-tensors", prove=True)
    found = tensors_of(tmp_path / "b")
    assert (f32(found[f"{K}.k_scale"]), f32(found[f"{V}.v_scale"])) == (0.5, 0.25)
    below = make_dense(tmp_path / "c", change=change | {f"{K}.k_scale": np.float32(0)}, section=section)
    assert [f.code for f in halfbyte.verify(below).findings] == ["HB123"]


def test_odd_forms_of_scalars(tmp_path):
    """[], [1] and [1, 1] are one number; bfloat16 is one that is told."""
    for i, value in enumerate(
        (np.float32(2**-12), np.full(1, 2**-12, np.float32), np.full((1, 1), 2**-12, np.float32))
    ):
        src = make_dense(tmp_path / f"{i}", change={f"{Q}.weight_scale_2": value})
        assert halfbyte.verify(src).findings == ()
    src = make_dense(tmp_path / "bf16", change={f"{Q}.weight_scale_2": np.full((), 2**-12, ml_dtypes.bfloat16)})
    assert [f.code for f in halfbyte.verify(src).findings] == ["HB107"]


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_a_scale2_that_is_no_scale(value, tmp_path):
    src = make_dense(tmp_path / "a", change={f"{Q}.weight_scale_2": np.float32(value)})
    assert [f.tensor for f in told(src, "HB106")["HB106"]] == [f"{Q}.weight_scale_2"]
    assert call("verify", src).rc == 1


def test_pre_quant_scale_is_never_ignored(tmp_path):
    """It is part of the function: carried where there is a place, refused where there is none, folded when dense."""
    pre = np.linspace(0.5, 2, 32).astype(np.float32)
    src = make_dense(tmp_path / "a", change={f"{Q}.pre_quant_scale": pre})
    check_failure(call("convert", src, tmp_path / "b", "--to", "compressed-tensors"), 2, f"{Q}.pre_quant_scale")
    halfbyte.dequantize_checkpoint(src, tmp_path / "c", dtype="float32")
    with halfbyte.open(src) as ck:
        expected = ck[Q].dequantize() * pre
    assert np.array_equal(f32(tensors_of(tmp_path / "c")[f"{Q}.weight"]), expected)


def test_two_configs_that_disagree(tmp_path):
    quant = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    found = told(make_dense(tmp_path / "a", quant=quant), "HB205")["HB205"]
    assert len(found) == 2
    assert all("hf_quant_config.json" in f.expected for f in found)


def test_layers_of_another_format_are_named_and_carried(tmp_path):
    int4 = {
        "x.weight_packed": np.zeros((32, 4), np.int32),
        "x.weight_scale": np.ones((32, 1), BF16),
        "x.weight_shape": np.array([32, 32]),
    }
    src = make_dense(tmp_path / "a", "compressed-tensors", change=lambda t: t.update(int4))
    assert [f.tensor for f in told(src, "HB139")["HB139"]] == ["x.weight_packed"]
    halfbyte.convert(src, tmp_path / "b", to="compressed-tensors", max_shard_size="10KB")
    assert tensors_of(tmp_path / "b") == tensors_of(src)
    check_failure(call("convert", src, tmp_path / "c", "--to", "modelopt"), 2, "x", "no place")


def test_a_config_without_its_tensors_counts(tmp_path):
    """Layers that the config promises and the file lacks."""
    src = make_dense(tmp_path / "a", config=CONFIG | {"num_hidden_layers": 3})
    (finding,) = told(src, "HB211")["HB211"]
    assert (finding.got, finding.expected) == (1, 3)
    assert json.loads(json.dumps(finding.json()))["code"] == "HB211"
