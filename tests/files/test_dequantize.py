"""``dequantize``: the values of a quantized checkpoint as a dense one."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    CONFIG,
    E4M3,
    GOLDEN,
    GOLDENS,
    HIDDEN,
    INDEX,
    LINEARS,
    VOCAB,
    K,
    Q,
    V,
    by_library,
    call,
    check_failure,
    ct_section,
    f32,
    fp8,
    leftovers,
    listing,
    make_dense,
    make_float,
    modelopt_section,
    named,
    nvfp4,
    read_json,
    save,
    tensors_of,
    write_json,
)
from halfbyte.errors import FormatError, UsageError, WeightError
from halfbyte.numerics import E2M1_VALUES, E4M3_VALUES, unpack_nibbles

DTYPES = {"float32": np.float32, "bfloat16": BF16, "float16": np.float16}
HEADER = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def values(roles):
    """e2m1(code) x e4m3(scale) x scale2, the long way, in float64; the product of code and scale is exact."""
    codes = E2M1_VALUES[unpack_nibbles(roles["codes"])].astype(np.float64)
    scales = E4M3_VALUES[roles["scales"].view(np.uint8)].astype(np.float64)
    return codes * np.repeat(scales, 16, 1) * np.float64(roles["scale2"])


def array(raw):
    return np.frombuffer(raw.data, {"F32": np.float32, "BF16": BF16, "F16": np.float16}[raw.dtype]).reshape(raw.shape)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(tmp_path, dialect, dtype):
    """scale2 multiplies once in float32, and the dtype rounds once more."""
    src = make_dense(tmp_path / "src", dialect, input_scale=True, shards=3)
    halfbyte.dequantize_checkpoint(src, tmp_path / "out", dtype=dtype)
    made = tensors_of(tmp_path / "out")
    for seed, (name, (n, k)) in enumerate(LINEARS.items()):
        expected = values(nvfp4(n, k, seed)).astype(np.float32).astype(DTYPES[dtype])
        assert made[f"{name}.weight"].dtype == HEADER[dtype]
        assert np.array_equal(array(made[f"{name}.weight"]), expected)
    source = tensors_of(src)
    assert {n: t for n, t in made.items() if n[:-7] not in LINEARS} == {
        n: t for n, t in source.items() if n.rpartition(".")[0] not in LINEARS
    }


def test_as_modelopt(tmp_path):
    """ModelOpt rounds scale x scale2 and then the product; halfbyte rounds once: three roundings apart at most."""
    golden = tensors_of(GOLDEN / "modelopt_f32.safetensors")
    save(tmp_path / "x.safetensors", {n: t for n, t in golden.items() if "dequant" not in n})
    halfbyte.dequantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "out", dtype="float32")
    made = tensors_of(tmp_path / "out")
    for matrix in "ABCD":
        ours, theirs = array(made[f"{matrix}.weight"]), f32(golden[f"{matrix}.dequant_f32"])
        assert np.allclose(ours, theirs, rtol=3 * 2.0**-24, atol=0)


def test_scale2_that_is_no_power_of_two(tmp_path):
    roles = nvfp4(16, 32, scale2=0.0003721)
    save(tmp_path / "x.safetensors", named("modelopt", "a", roles))
    halfbyte.dequantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "out", dtype="float32")
    exact = E2M1_VALUES[unpack_nibbles(roles["codes"])] * np.repeat(E4M3_VALUES[roles["scales"].view(np.uint8)], 16, 1)
    assert np.array_equal(array(tensors_of(tmp_path / "out")["a.weight"]), exact * roles["scale2"])


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(tmp_path, name):
    report = halfbyte.dequantize_checkpoint(GOLDENS[name], tmp_path / "out")
    result = halfbyte.verify(tmp_path / "out")
    assert result.findings == ()
    assert set(result.facts["modules"]) == {"dense"}
    assert read_json(tmp_path / "out" / "config.json") == {
        k: v for k, v in read_json(GOLDENS[name] / "config.json").items() if k != "quantization_config"
    }
    assert "hf_quant_config.json" not in listing(tmp_path / "out")
    assert report.facts["dtype"] == "bfloat16"
    assert {t.dtype for t in tensors_of(tmp_path / "out").values()} == {"BF16"}
    with halfbyte.open(GOLDENS[name]) as source, halfbyte.open(tmp_path / "out") as made:
        for module in source.modules:
            if module.kind in ("nvfp4", "fp8"):
                expected = source.load(module).dequantize("bfloat16")
                assert np.array_equal(made.read(f"{module.name}.weight"), expected)


def test_both_twins_give_the_same(tmp_path):
    """One ulp of the second scale apart at most."""
    for name in ("ct_llama_nvfp4", "modelopt_llama_nvfp4"):
        halfbyte.dequantize_checkpoint(GOLDENS[name], tmp_path / name, dtype="float32")
    a, b = (tensors_of(tmp_path / name) for name in ("ct_llama_nvfp4", "modelopt_llama_nvfp4"))
    assert set(a) == set(b)
    for name, tensor in a.items():
        if tensor.dtype == "F32":
            assert np.allclose(array(tensor), array(b[name]), rtol=2.0**-22, atol=0)
        else:
            assert tensor == b[name]


def test_fp8(tmp_path):
    tensors = {}
    for name, scale in {"t": 0.3, "row": np.linspace(0.1, 1, 32), "col": np.linspace(0.1, 1, 32)[:, None]}.items():
        tensors |= {f"{name}.{k}": v for k, v in fp8(32, 64, scale=scale).items()}
    tensors |= {f"block.{k}": v for k, v in fp8(130, 256, scale=[[1.0, 2.0], [3.0, 4.0]]).items()}
    save(tmp_path / "x.safetensors", tensors)
    halfbyte.dequantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "out", dtype="float32")
    made = tensors_of(tmp_path / "out")
    for name in ("t", "row", "col", "block"):
        scale = np.asarray(tensors[f"{name}.weight_scale"])
        if name == "block":
            scale = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:130]
        elif name == "row":
            scale = scale[:, None]
        assert np.array_equal(array(made[f"{name}.weight"]), tensors[f"{name}.weight"].astype(np.float32) * scale)
    assert set(made) == {"t.weight", "row.weight", "col.weight", "block.weight"}


def test_pre_quant_scale_is_folded_in(tmp_path):
    """x * s before the product is w * s after it; a dense layer that ignored it would be wrong in silence."""
    pre = np.linspace(0.5, 2, HIDDEN).astype(BF16)
    src = make_dense(tmp_path / "src", change={f"{Q}.pre_quant_scale": pre})
    report = halfbyte.dequantize_checkpoint(src, tmp_path / "out", dtype="float32")
    expected = values(nvfp4(HIDDEN, HIDDEN, 0)).astype(np.float32) * pre.astype(np.float32)
    assert np.array_equal(array(tensors_of(tmp_path / "out")[f"{Q}.weight"]), expected)
    assert f"{Q}.pre_quant_scale" not in tensors_of(tmp_path / "out")
    fate = {t["tensor"]: t for t in report.facts["tensors"]}[f"{Q}.pre_quant_scale"]
    assert fate["action"] == "converted"


def test_each_tensor_is_listed_with_its_fate(tmp_path):
    change = {f"{K}.k_scale": np.float32(1), f"{V}.v_scale": np.float32(1), f"{Q}.bias": np.ones(HIDDEN, BF16)}
    section = modelopt_section("NVFP4", kv_cache_scheme={"num_bits": 8, "type": "float"})
    src = make_dense(tmp_path / "src", change=change, section=section, input_scale=True)
    report = halfbyte.dequantize_checkpoint(src, tmp_path / "out")
    fates = {t["tensor"]: t["action"] for t in report.facts["tensors"]}
    assert fates[f"{Q}.weight"] == fates[f"{Q}.weight_scale"] == fates[f"{Q}.weight_scale_2"] == "converted"
    assert fates[f"{Q}.input_scale"] == fates[f"{K}.k_scale"] == fates[f"{V}.v_scale"] == "dropped"
    assert fates[f"{Q}.bias"] == "copied"
    assert all(t["reason"] for t in report.facts["tensors"])
    assert set(fates) >= {n for n in tensors_of(src) if n.rpartition(".")[0] in LINEARS}
    assert set(tensors_of(tmp_path / "out")) == {n for n in tensors_of(src) if fates.get(n, "copied") == "copied"} | {
        f"{n}.weight" for n in LINEARS
    }
    ran = call("dequantize", src, tmp_path / "again")
    assert "dropped" in ran.stdout


def test_every_source_tensor_is_listed(tmp_path):
    """Also those that are copied beside no quantized weight."""
    src = make_dense(tmp_path / "src")
    report = halfbyte.dequantize_checkpoint(src, tmp_path / "out")
    assert {t["tensor"] for t in report.facts["tensors"]} == set(tensors_of(src))


def test_kv_scales_of_the_attention_go_too(tmp_path):
    """A dense checkpoint whose config quantizes no KV cache holds no KV scales."""
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    change = {f"model.layers.0.self_attn.{n}": np.full(1, 0.5, BF16) for n in ("k_scale", "v_scale")}
    section = ct_section(kv_cache_scheme=scheme)
    src = make_dense(tmp_path / "src", "compressed-tensors", change=change, section=section)
    assert halfbyte.verify(src).findings == ()
    report = halfbyte.dequantize_checkpoint(src, tmp_path / "out")
    assert not [n for n in tensors_of(tmp_path / "out") if n.endswith(("k_scale", "v_scale"))]
    fates = {t["tensor"]: t["action"] for t in report.facts["tensors"]}
    assert {fates[name] for name in change} == {"dropped"}


@pytest.mark.parametrize("name", ["svdquant_lora_a", "svdquant_lora_b", "hadamard", "weight_zero_point"])
def test_companions_that_would_change_the_values_are_refused(tmp_path, name):
    src = make_dense(tmp_path / "src", change={f"{Q}.{name}": np.ones((2, HIDDEN), BF16)})
    check_failure(call("dequantize", src, tmp_path / "out"), 2, f"{Q}.{name}")
    assert leftovers(tmp_path) == ["src"]


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("role", ["scales", "scale2"])
def test_a_weight_without_its_scales_is_refused(tmp_path, dialect, role):
    """Never filled in with 1."""
    change = named(dialect, "model.extra", {k: v for k, v in nvfp4(4, 32).items() if k != role})
    src = make_dense(tmp_path / "src", dialect, change=change)
    with pytest.raises(FormatError) as caught:
        halfbyte.dequantize_checkpoint(src, tmp_path / "out")
    assert caught.value.tensor.startswith("model.extra.")
    assert leftovers(tmp_path) == ["src"]


def test_values_too_large_for_float16(tmp_path):
    """6 * 448 * 100 is above 65504: no Inf is written without a word, and no warning of NumPy's is the word."""
    roles = {"codes": np.full((1, 8), 0x77, np.uint8), "scales": np.full((1, 1), 448, E4M3), "scale2": np.float32(100)}
    src = make_dense(tmp_path / "src", change=named("modelopt", Q, roles))
    ran = call("dequantize", src, tmp_path / "out", "--dtype", "float16")
    assert "RuntimeWarning" not in ran.stderr
    assert "internal error" not in ran.stderr
    if ran.rc == 0:
        assert ran.stderr
        assert np.isfinite(array(tensors_of(tmp_path / "out")[f"{Q}.weight"]).astype(np.float32)).all()
    else:
        check_failure(ran, 2, Q, "float16")
        assert leftovers(tmp_path) == ["src"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_too_large_for_any_dtype(tmp_path, dtype):
    """6 * 448 * 1e36 is above the largest float32."""
    roles = {"codes": np.full((1, 8), 0x77, np.uint8), "scales": np.full((1, 1), 448, E4M3), "scale2": np.float32(1e36)}
    src = make_dense(tmp_path / "src", change=named("modelopt", Q, roles))
    check_failure(call("dequantize", src, tmp_path / "out", "--dtype", dtype), 2, Q)
    assert leftovers(tmp_path) == ["src"]


@pytest.mark.parametrize("name", ["scale", "scales", "data", "codes", "scale2", "pre_scale", "input_scale2"])
def test_dense_parameters_of_any_name_are_kept(tmp_path, name):
    """A norm's parameter may be called scale; it is no part of a quantized weight."""
    change = {f"model.norm.{name}": np.arange(4, dtype=np.float32), f"model.norm2.{name}": np.ones((2, 2), BF16)}
    change["model.norm2.weight"] = np.ones(4, BF16)
    src = make_dense(tmp_path / "src", change=change)
    report = halfbyte.dequantize_checkpoint(src, tmp_path / "out")
    source, made = tensors_of(src), tensors_of(tmp_path / "out")
    assert {n: made.get(n) for n in change} == {n: source[n] for n in change}
    fates = {t["tensor"]: t["action"] for t in report.facts["tensors"]}
    assert {fates[n] for n in change} == {"copied"}


def test_nan_scales_stay_nan(tmp_path):
    """A block of NaN becomes NaN weights, which verify finds in the dense file too."""
    scales = np.full((HIDDEN, 2), 0x38, np.uint8)
    scales[3, 1] = 0x7F
    src = make_dense(tmp_path / "src", change={f"{Q}.weight_scale": scales.view(E4M3)})
    ran = call("dequantize", src, tmp_path / "out")
    assert ran.rc == 0
    assert ran.lines[0].startswith(f"HB118 error: {Q}.weight: NaN or Inf in a tensor at [3, 16]: got 16 values")
    (finding,) = halfbyte.verify(tmp_path / "out").findings
    assert (finding.code, finding.tensor, finding.index, finding.got) == ("HB118", f"{Q}.weight", [3, 16], "16 values")


# --- files and options


@pytest.mark.parametrize(("config", "expected"), [
    ({"dtype": "float16"}, "float16"),
    ({"torch_dtype": "float16"}, "float16"),
    ({"dtype": "int8"}, "bfloat16"),
    ({"dtype": ["float16"]}, "bfloat16"),
    ({}, "bfloat16"),
])  # fmt: skip
def test_the_dtype_of_the_config(tmp_path, config, expected):
    base = {k: v for k, v in CONFIG.items() if k != "dtype"}
    src = make_dense(tmp_path / "src", config=base | config)
    assert halfbyte.dequantize_checkpoint(src, tmp_path / "out", dry_run=True).facts["dtype"] == expected


@pytest.mark.parametrize("dtype", ["float64", "int8", "bf16", "FLOAT32"])
def test_unknown_dtypes(tmp_path, dtype):
    src = make_dense(tmp_path / "src")
    with pytest.raises(WeightError):
        halfbyte.dequantize_checkpoint(src, tmp_path / "out", dtype=dtype)
    check_failure(call("dequantize", src, tmp_path / "out", "--dtype", dtype), 2, repr(dtype), "bfloat16")
    assert leftovers(tmp_path) == ["src"]


def test_dense_checkpoints_have_nothing_to_dequantize(tmp_path):
    src = make_float(tmp_path / "src")
    check_failure(call("dequantize", src, tmp_path / "out"), 2, src, "nothing quantized")
    with pytest.raises(UsageError):
        halfbyte.dequantize_checkpoint(src, tmp_path / "out")


def test_shards(tmp_path):
    src = make_dense(tmp_path / "src", shards=4, layers=2)
    halfbyte.dequantize_checkpoint(src, tmp_path / "one")
    halfbyte.dequantize_checkpoint(src, tmp_path / "many", max_shard_size="3KB")
    assert tensors_of(tmp_path / "many") == tensors_of(tmp_path / "one")
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert set(read_json(tmp_path / "many" / INDEX)["weight_map"].values()) == set(files)
    assert halfbyte.verify(tmp_path / "many").findings == ()
    assert by_library(tmp_path / "many" / files[0])[0] == {"format": "pt"}
    assert sorted(listing(tmp_path / "one")) == ["config.json", "model.safetensors"]


def test_dry_run(tmp_path):
    src = make_dense(tmp_path / "src")
    ran = call("dequantize", src, tmp_path / "out", "--dry-run")
    assert (ran.rc, ran.stderr) == (0, "")
    assert leftovers(tmp_path) == ["src"]
    plan = halfbyte.dequantize_checkpoint(src, tmp_path / "out", dry_run=True).facts
    done = halfbyte.dequantize_checkpoint(src, tmp_path / "out").facts
    assert (plan["tensors"], plan["bytes_out"], plan["shards"]) == (done["tensors"], done["bytes_out"], 1)


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path):
    src = make_dense(tmp_path / "src", change={f"{Q}.hadamard": np.ones(4, BF16)})
    assert call("dequantize", src, tmp_path / "out").rc == 2
    assert call("dequantize", src, tmp_path / "out", "--dry-run").rc == 2


def test_the_target_exists(tmp_path):
    src = make_dense(tmp_path / "src")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    check_failure(call("dequantize", src, tmp_path / "out"), 2, "the target exists", "--force")
    assert listing(tmp_path / "out") == {"mine": b"mine"}
    assert call("dequantize", src, tmp_path / "out", "--force").rc == 0
    assert "mine" not in listing(tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 3])
def test_progress_ends_at_the_total(tmp_path, workers):
    seen = []
    change = {f"{K}.k_scale": np.float32(1), f"{V}.v_scale": np.float32(1), f"{Q}.bias": np.ones(HIDDEN, BF16)}
    src = make_dense(tmp_path / "src", change=change, input_scale=True)
    halfbyte.dequantize_checkpoint(src, tmp_path / "out", workers=workers, progress=lambda d, t: seen.append((d, t)))
    done, total = seen[-1]
    assert all(d <= t for d, t in seen)
    assert done == total


def test_the_document(tmp_path):
    src = make_dense(tmp_path / "src")
    ran = call("dequantize", src, tmp_path / "out", "--json", "--dtype", "float32")
    assert ran.rc == 0
    document = ran.document
    assert (document["command"], document["ok"], document["dtype"]) == ("dequantize", True, "float32")
    assert document["bytes_out"] == sum(len(t.data) for t in tensors_of(tmp_path / "out").values())


def test_other_files_come_along(tmp_path):
    src = make_dense(tmp_path / "src", quant={"quantization": {"quant_algo": "W4A16_NVFP4"}})
    (src / "tokenizer.json").write_text("{}")
    report = halfbyte.dequantize_checkpoint(src, tmp_path / "out")
    actions = {f["file"]: f["action"] for f in report.facts["files"]}
    assert actions == {"tokenizer.json": "copied", "config.json": "converted", "hf_quant_config.json": "dropped"}


def test_nested_configs_lose_their_quantization_too(tmp_path):
    src = make_dense(tmp_path / "src")
    write_json(src / "config.json", {"text_config": {"quantization_config": modelopt_section(), "dtype": "bfloat16"}})
    halfbyte.dequantize_checkpoint(src, tmp_path / "out")
    assert read_json(tmp_path / "out" / "config.json") == {"text_config": {"dtype": "bfloat16"}}


def test_an_embedding(tmp_path):
    roles = nvfp4(VOCAB, HIDDEN, 9)
    src = make_dense(
        tmp_path / "src",
        change=named("modelopt", "model.embed_tokens", roles),
        section=modelopt_section(ignore=["lm_head"], nvfp4_embed=True),
    )
    halfbyte.dequantize_checkpoint(src, tmp_path / "out", dtype="float32")
    made = array(tensors_of(tmp_path / "out")["model.embed_tokens.weight"])
    assert np.array_equal(made, values(roles).astype(np.float32))


# --- in pieces


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("piece", [1, 700, 1 << 16])
def test_the_pieces_change_no_byte(tmp_path, monkeypatch, piece, workers):
    """NVFP4 with a pre_scale, and FP8 by tensor, row and block, of which the last one has a remainder."""
    tensors = named("modelopt", "n", nvfp4(37, 64)) | {"n.pre_quant_scale": np.linspace(0.5, 2, 64).astype(BF16)}
    scales = {"t": 0.3, "row": np.linspace(0.1, 1, 300), "col": np.linspace(0.1, 1, 300)[:, None]}
    scales["block"] = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    scales["four"] = np.arange(1, 7, dtype=np.float32).reshape(3, 1, 2, 1)
    for name, scale in scales.items():
        tensors |= {f"{name}.{k}": v for k, v in fp8(300, 250, scale=scale).items()}
    save(tmp_path / "x.safetensors", tensors)
    halfbyte.dequantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "one", workers=1)
    monkeypatch.setattr("halfbyte.tools.dequantize._PIECE", piece)
    halfbyte.dequantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "out", workers=workers)
    assert listing(tmp_path / "out") == listing(tmp_path / "one")
    with halfbyte.open(tmp_path / "x.safetensors") as source:
        for name in scales:
            expected = source[name].dequantize("bfloat16")
            assert np.array_equal(array(tensors_of(tmp_path / "out")[f"{name}.weight"]), expected)


@pytest.mark.parametrize("piece", [1, 700, 1 << 20])
def test_findings_and_errors_of_pieces(tmp_path, monkeypatch, piece):
    """Positions and counts are those in the tensor, and an Inf is an error by what all of its scales are."""
    monkeypatch.setattr("halfbyte.tools.dequantize._PIECE", piece)
    scales = np.full((HIDDEN, 2), 0x38, np.uint8)
    scales[3, 1] = scales[9, 0] = 0x7F
    src = make_dense(tmp_path / "src", change={f"{Q}.weight_scale": scales.view(E4M3)})
    (finding,) = halfbyte.dequantize_checkpoint(src, tmp_path / "out").findings
    assert (finding.code, finding.tensor, finding.index, finding.got) == ("HB118", f"{Q}.weight", [3, 16], "32 values")
    data = np.full((40, 16), 0x7E, np.uint8).view(E4M3)
    row_scale = np.ones(40, np.float32)
    row_scale[20] = 200
    save(tmp_path / "x.safetensors", {"a.weight": data, "a.weight_scale": row_scale})
    with pytest.raises(FormatError, match="does not fit float16") as caught:
        halfbyte.dequantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "half", dtype="float16")
    assert (caught.value.tensor, caught.value.index, caught.value.got) == ("a", [20, 0], 448 * 200)
    row_scale[30] = np.inf
    save(tmp_path / "x.safetensors", {"a.weight": data, "a.weight_scale": row_scale})
    (finding,) = halfbyte.dequantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "half", dtype="float16").findings
    assert (finding.index, finding.got) == ([20, 0], "32 values")
