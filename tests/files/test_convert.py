"""``convert``: from one dialect to the other without changing a code, a block scale or a bit of a number."""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import halfbyte
from checkpoints import (
    BF16,
    CONFIG,
    E4M3,
    GOLDENS,
    HIDDEN,
    INDEX,
    LINEARS,
    VOCAB,
    K,
    Q,
    Raw,
    V,
    by_library,
    call,
    check_failure,
    codes,
    copy_golden,
    ct_section,
    f4,
    f32,
    floats,
    fp8,
    header_of,
    leftovers,
    listing,
    make_dense,
    make_float,
    modelopt_section,
    named,
    nvfp4,
    quantized,
    raw_safetensors,
    read_json,
    save,
    save_sharded,
    tensors_of,
    write_json,
)
from halfbyte.checkpoint.reader import PROVENANCE
from halfbyte.checkpoint.writer import CheckpointWriter
from halfbyte.errors import FormatError, HalfbyteError, UsageError
from halfbyte.stored import byte_count, header_dtype

CT, MODELOPT = "compressed-tensors", "modelopt"
OTHER = {CT: MODELOPT, MODELOPT: CT}
SUFFIX = {MODELOPT: "weight_scale_2", CT: "weight_global_scale"}


def dialect_of(name):
    return CT if name.startswith("ct") else MODELOPT


def convert(src, dst, to, **options):
    return halfbyte.convert(src, dst, to=to, prove=True, **options)


def weights(path):
    with halfbyte.open(path) as checkpoint:
        return dict(checkpoint.weights())


def assert_same_weights(a, b):
    one, two = weights(a), weights(b)
    assert set(one) == set(two)
    for name, weight in one.items():
        assert weight.same(two[name]), name


def same_section(a, b, ignored=()):
    """Two quantization_configs, key by key; the order of names in lists does not matter."""

    def plain(value):
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return sorted(map(str, value)) if isinstance(value, list) else value

    a, b = plain(a), plain(b)
    for key in sorted(set(a) | set(b)):
        if key not in ignored:
            assert a.get(key, "absent") == b.get(key, "absent"), key


# --- the goldens


@pytest.mark.parametrize("name", GOLDENS)
def test_there_and_back(tmp_path, name):
    """Every byte of the weights' file returns, metadata and order too, and both configs."""
    src, here = GOLDENS[name], dialect_of(name)
    convert(src, tmp_path / "there", OTHER[here])
    assert halfbyte.verify(tmp_path / "there").findings == ()
    assert_same_weights(src, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", here)
    assert halfbyte.verify(tmp_path / "back").findings == ()
    assert_same_weights(src, tmp_path / "back")
    if here == MODELOPT:
        assert listing(tmp_path / "back")["model.safetensors"] == listing(src)["model.safetensors"]
    else:
        # The golden's scalars are [], as compressed-tensors' converter leaves them; halfbyte writes [1].
        theirs, ours = tensors_of(src), tensors_of(tmp_path / "back")
        assert {n: t.data for n, t in ours.items()} == {n: t.data for n, t in theirs.items()}
        assert {n: t.shape for n, t in ours.items()} == {
            n: t.shape or (1,) if "global" in n else t.shape for n, t in theirs.items()
        }


@pytest.mark.parametrize("name", GOLDENS)
def test_the_config_returns_key_by_key(tmp_path, name):
    src, here = GOLDENS[name], dialect_of(name)
    convert(src, tmp_path / "there", OTHER[here])
    convert(tmp_path / "there", tmp_path / "back", here)
    theirs, ours = (read_json(path / "config.json") for path in (src, tmp_path / "back"))
    # compressed-tensors' to_dict writes every field it knows; null is what an absent one means.
    ignored = ("moe_sparsity_config",) if here == CT else ()
    same_section(ours.pop("quantization_config"), theirs.pop("quantization_config"), ignored)
    assert ours == theirs
    if here == MODELOPT:
        a, b = (read_json(path / "hf_quant_config.json") for path in (src, tmp_path / "back"))
        assert a["producer"] == b["producer"]
        same_section(a["quantization"], b["quantization"])


def test_the_tensors_of_the_golden_twin(tmp_path):
    """compressed-tensors' own converter made ct_llama_nvfp4 of modelopt_llama_nvfp4: the same names and bytes."""
    convert(GOLDENS["modelopt_llama_nvfp4"], tmp_path / "out", CT)
    theirs, ours = tensors_of(GOLDENS["ct_llama_nvfp4"]), tensors_of(tmp_path / "out")
    assert {n: (t.dtype, t.data) for n, t in ours.items()} == {n: (t.dtype, t.data) for n, t in theirs.items()}
    assert {t.shape for n, t in ours.items() if "global" in n} == {(1,)}


def test_the_config_of_the_golden_twin_key_by_key(tmp_path):
    convert(GOLDENS["modelopt_llama_nvfp4"], tmp_path / "out", CT)
    ours, theirs = (read_json(p / "config.json") for p in (tmp_path / "out", GOLDENS["ct_llama_nvfp4"]))
    same_section(ours["quantization_config"], theirs["quantization_config"], ("moe_sparsity_config",))
    assert "hf_quant_config.json" not in listing(tmp_path / "out")


def test_the_twin_back_to_its_source(tmp_path):
    """Without provenance, the numbers are the reciprocals of what is stored."""
    convert(GOLDENS["ct_llama_nvfp4"], tmp_path / "out", MODELOPT)
    source, made = tensors_of(GOLDENS["modelopt_llama_nvfp4"]), tensors_of(tmp_path / "out")
    assert set(source) == set(made)
    for name, tensor in source.items():
        if tensor.dtype == "F32":
            x = f32(tensor)
            assert f32(made[name]) == np.float32(1) / (np.float32(1) / x)
        else:
            assert made[name] == tensor
    ours, theirs = (read_json(p / "config.json") for p in (tmp_path / "out", GOLDENS["modelopt_llama_nvfp4"]))
    same_section(ours["quantization_config"], theirs["quantization_config"])


@pytest.mark.parametrize("name", GOLDENS)
def test_the_same_dialect_changes_nothing(tmp_path, name):
    src = copy_golden(name, tmp_path / "src")
    (src / "tokenizer.json").write_text("{}")
    report = convert(src, tmp_path / "out", dialect_of(name))
    assert listing(tmp_path / "out") == listing(src)
    assert {t["action"] for t in report.facts["tensors"]} == {"copied"}
    assert {f["action"] for f in report.facts["files"]} == {"copied"}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dialect", OTHER)
def test_the_same_dialect_changes_nothing_else_either(tmp_path, dialect, shards):
    src = make_dense(tmp_path / "src", dialect, shards=shards, input_scale=True)
    convert(src, tmp_path / "out", dialect)
    assert listing(tmp_path / "out") == listing(src)


def test_the_same_dialect_with_odd_tensors(tmp_path):
    """Companions of unknown meaning have their place in their own dialect."""
    change = {f"{Q}.hadamard": np.eye(4, dtype=np.float32), f"{Q}.svdquant_lora_a": floats(2, HIDDEN)}
    src = make_dense(tmp_path / "src", change=change)
    convert(src, tmp_path / "out", MODELOPT)
    assert listing(tmp_path / "out") == listing(src)


def test_the_same_dialect_in_other_shards(tmp_path):
    src = make_dense(tmp_path / "src", CT, input_scale=True)
    convert(src, tmp_path / "out", CT, max_shard_size="2KB")
    assert tensors_of(tmp_path / "out") == tensors_of(src)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert read_json(tmp_path / "out" / "config.json") == read_json(src / "config.json")
    assert halfbyte.verify(tmp_path / "out").findings == ()


# --- numbers


def numbers():
    """330 numbers: 150 random ones, 100 whose reciprocal's reciprocal is another, powers of two, extremes."""
    rng = np.random.default_rng(7)
    x = np.exp(rng.uniform(np.log(1e-6), np.log(10), 4000)).astype(np.float32)
    away = x[np.float32(1) / (np.float32(1) / x) != x]
    assert len(away) > 400
    extremes = np.array([1e-37, 3.7e37, 2.0**-120, 1.0, 1 / 3, np.nextafter(np.float32(1), np.float32(2))], np.float32)
    neighbours = np.nextafter(away[:60], np.float32(0))
    return np.concatenate([x[:150], away[:100], 2.0 ** np.arange(-10, 4, dtype=np.float32), neighbours, extremes])


def number_model(tmp_path, dialect, values):
    tensors = {}
    for i, x in enumerate(values):
        tensors |= named(MODELOPT, f"m{i}", nvfp4(1, 16, i, scale2=x, input_scale=values[-1 - i]))
    if dialect == CT:
        tensors = {
            n.replace("weight_scale_2", "weight_global_scale").replace("input_scale", "input_global_scale"): t
            for n, t in tensors.items()
        }
        tensors = {
            n.removesuffix("weight") + "weight_packed" if n.endswith(".weight") else n: t for n, t in tensors.items()
        }
        tensors = {n: np.reshape(t, (1,)) if "global" in n else t for n, t in tensors.items()}
    path = tmp_path / "src"
    path.mkdir()
    save(path / "model.safetensors", tensors)
    return path


@pytest.mark.parametrize("dialect", OTHER)
def test_every_number_returns_bit_by_bit(tmp_path, dialect):
    values = numbers()
    assert len(values) >= 300
    src = number_model(tmp_path, dialect, values)
    convert(src, tmp_path / "there", OTHER[dialect])
    convert(tmp_path / "there", tmp_path / "back", dialect)
    assert tensors_of(tmp_path / "back") == tensors_of(src)
    convert(tmp_path / "back", tmp_path / "again", OTHER[dialect])
    assert listing(tmp_path / "again") == listing(tmp_path / "there")


@pytest.mark.parametrize("dialect", OTHER)
def test_the_stored_number_is_the_rounded_reciprocal(tmp_path, dialect):
    """As compressed-tensors' own converter stores it; and 1 / (1 / x) is kept where it is not x."""
    values = numbers()
    src = number_model(tmp_path, dialect, values)
    convert(src, tmp_path / "there", OTHER[dialect])
    made = tensors_of(tmp_path / "there")
    kept = json.loads(header_of(tmp_path / "there" / "model.safetensors")["__metadata__"][PROVENANCE])
    count = 0
    for i, x in enumerate(values):
        name = f"m{i}.{SUFFIX[OTHER[dialect]]}"
        stored = f32(made[name]).reshape(())
        assert stored == np.float32(1) / x
        assert (name in kept) == (np.float32(1) / stored != x)
        if name in kept:
            assert kept[name] == struct.pack(">f", x).hex()
            count += 1
    assert count >= 100
    assert all(len(v) == 8 for v in kept.values())


def test_weights_mean_the_same_in_both(tmp_path):
    """ModelOpt's number is kept, so the weight read from compressed-tensors is the same to the last bit."""
    src = number_model(tmp_path, MODELOPT, numbers())
    convert(src, tmp_path / "there", CT)
    assert_same_weights(src, tmp_path / "there")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(float(np.float32(1e-30)), float(np.float32(1e30)), width=32), min_size=1, max_size=8))
def test_any_number_returns(tmp_path_factory, values):
    tmp_path = tmp_path_factory.mktemp("numbers")
    src = number_model(tmp_path, MODELOPT, np.array(values, np.float32))
    convert(src, tmp_path / "there", CT)
    convert(tmp_path / "there", tmp_path / "back", MODELOPT)
    assert listing(tmp_path / "back")["model.safetensors"] == listing(src)["model.safetensors"]


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, -np.inf, 1e-40])
@pytest.mark.parametrize("name", ["weight_scale_2", "input_scale"])
def test_numbers_without_a_reciprocal_are_refused(tmp_path, value, name):
    src = make_dense(tmp_path / "src", change={f"{Q}.{name}": np.float32(value)}, input_scale=True)
    with pytest.raises(FormatError) as caught:
        convert(src, tmp_path / "out", CT)
    assert caught.value.tensor == f"{Q}.{name}"
    check_failure(call("convert", src, tmp_path / "out", "--to", CT), 2, f"{Q}.{name}", "halfbyte verify")
    assert leftovers(tmp_path) == ["src"]


def test_a_number_of_another_dtype(tmp_path):
    """bfloat16 second scales of old exports: converted by value."""
    x = np.full((), 0.0123, BF16)
    src = make_dense(tmp_path / "src", change={f"{Q}.weight_scale_2": x})
    convert(src, tmp_path / "out", CT)
    made = tensors_of(tmp_path / "out")[f"{Q}.weight_global_scale"]
    assert f32(made) == [np.float32(1) / x.astype(np.float32)]
    assert_same_weights(src, tmp_path / "out")


def test_the_three_duties_in_one_line():
    """0.00028 is stored as 3571.4."""
    assert float(np.float32(1) / np.float32(0.00028)) == pytest.approx(3571.4, abs=0.1)


# --- provenance tampered with


def tampered(tmp_path, alter):
    src = number_model(tmp_path, MODELOPT, numbers()[140:200])
    convert(src, tmp_path / "there", CT)
    file = tmp_path / "there" / "model.safetensors"
    metadata, _ = by_library(file)
    table = json.loads(metadata[PROVENANCE])
    name = next(n for n in table if "weight" in n)
    alter(table, name)
    save(file, tensors_of(file), metadata | {PROVENANCE: json.dumps(table)})
    return tmp_path / "there", name


@pytest.mark.parametrize("bits", ["3f800000", "7fc00000", "", "zz", "00000000", 5])
def test_what_does_not_fit_is_ignored_with_a_finding(tmp_path, bits):
    path, name = tampered(tmp_path, lambda table, name: table.update({name: bits}))
    assert [f for f in codes(halfbyte.verify(path).findings) if f[0] != "HB108"] == [("HB122", name, None)]
    convert(path, tmp_path / "back", MODELOPT)
    stored = f32(tensors_of(path)[name])[0]
    made = tensors_of(tmp_path / "back")
    for i in range(60):
        here = f"m{i}.weight_scale_2"
        original = f32(tensors_of(tmp_path / "src")[here])
        expected = np.float32(1) / stored if f"m{i}.weight_global_scale" == name else original
        assert f32(made[here]) == expected


def test_a_number_that_was_changed_after_the_conversion(tmp_path):
    """Someone rescaled a tensor: the stored number counts, not the remembered one."""
    src = number_model(tmp_path, MODELOPT, numbers()[150:152])
    convert(src, tmp_path / "there", CT)
    file = tmp_path / "there" / "model.safetensors"
    tensors = tensors_of(file)
    tensors["m0.weight_global_scale"] = np.full(1, 64, np.float32)
    save(file, tensors, by_library(file)[0])
    assert codes(halfbyte.verify(tmp_path / "there").findings) == [("HB122", "m0.weight_global_scale", None)]
    assert weights(tmp_path / "there")["m0"].scale2 == 1 / 64


def test_provenance_taken_out(tmp_path):
    """Other tools drop a file's metadata; then the number is one ulp off at most, and nothing is reported."""
    src = number_model(tmp_path, MODELOPT, numbers())
    convert(src, tmp_path / "there", CT)
    file = tmp_path / "there" / "model.safetensors"
    save(file, tensors_of(file), {"format": "pt"})
    assert {f.code for f in halfbyte.verify(tmp_path / "there").findings} <= {"HB108"}
    convert(tmp_path / "there", tmp_path / "back", MODELOPT)
    a, b = tensors_of(src), tensors_of(tmp_path / "back")
    for name, tensor in a.items():
        if tensor.dtype == "F32":
            bits = [np.frombuffer(t.data, np.int32)[0] for t in (tensor, b[name])]
            assert abs(bits[0] - bits[1]) <= 1


# --- headers and shapes


@pytest.mark.parametrize("dialect", OTHER)
@pytest.mark.parametrize("packed", ["I8", "F4"])
def test_codes_become_u8(tmp_path, dialect, packed):
    tensors = {}
    for i, shape in enumerate([(3, 32), (16, 48)]):
        roles = nvfp4(*shape, i)
        value = roles["codes"].view(np.int8) if packed == "I8" else f4(roles["codes"])
        tensors |= named(dialect, f"m{i}", roles | {"codes": value})
    src = tmp_path / "src"
    src.mkdir()
    save(src / "model.safetensors", tensors)
    report = convert(src, tmp_path / "out", OTHER[dialect])
    made = tensors_of(tmp_path / "out")
    suffix = "weight" if dialect == CT else "weight_packed"
    for i, (n, k) in enumerate([(3, 32), (16, 48)]):
        assert made[f"m{i}.{suffix}"] == Raw("U8", (n, k // 2), nvfp4(n, k, i)["codes"].tobytes())
    actions = {t["to"]: t["action"] for t in report.facts["tensors"]}
    assert actions[f"m0.{suffix}"] == "converted"
    # and in its own dialect nothing changes
    convert(src, tmp_path / "same", dialect)
    assert tensors_of(tmp_path / "same") == tensors_of(src)


@pytest.mark.parametrize("dialect", OTHER)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_shapes_of_scalars(tmp_path, dialect, shape):
    src = tmp_path / "src"
    src.mkdir()
    save(src / "model.safetensors", named(dialect, "m", nvfp4(3, 32, scale2=0.3, input_scale=0.7), shape))
    convert(src, tmp_path / "out", OTHER[dialect])
    made = tensors_of(tmp_path / "out")
    scalars = {n: t.shape for n, t in made.items() if t.dtype == "F32"}
    assert set(scalars.values()) == {(1,) if dialect == MODELOPT else ()}
    assert len(scalars) == 2
    assert_same_weights(src, tmp_path / "out")


@pytest.mark.parametrize("dialect", OTHER)
def test_every_byte_of_codes_and_scales(tmp_path, dialect):
    """All 256 code bytes and all 256 scale bytes, NaN and negative ones too: carried as they are."""
    src = tmp_path / "src"
    src.mkdir()
    roles = {
        "codes": np.arange(256, dtype=np.uint8).repeat(8).reshape(16, 128),
        "scales": np.arange(256, dtype=np.uint8).reshape(16, 16).view(E4M3),
        "scale2": np.float32(0.5),
    }
    save(src / "model.safetensors", named(dialect, "m", roles))
    convert(src, tmp_path / "out", OTHER[dialect])
    data = {t.data for t in tensors_of(tmp_path / "out").values()}
    assert {roles["codes"].tobytes(), roles["scales"].tobytes()} <= data


# --- what is beside the weights


def fp8_model(tmp_path, scale):
    change = {f"lm_head.{k}": v for k, v in fp8(VOCAB, HIDDEN, scale=scale).items()}
    table = {n: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for n in LINEARS}
    algo = "FP8" if np.size(scale) == 1 else "FP8_PER_CHANNEL_PER_TOKEN"
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    section["quantized_layers"] = table | {"lm_head": {"quant_algo": algo}}
    return make_dense(tmp_path / "src", change=change, section=section)


@pytest.mark.parametrize("scale", [0.3, [0.3], np.linspace(0.1, 1, VOCAB)], ids=["[]", "[1]", "[N]"])
def test_fp8_layers_multiply_in_both(tmp_path, scale):
    src = fp8_model(tmp_path, scale)
    convert(src, tmp_path / "there", CT)
    made = tensors_of(tmp_path / "there")
    assert np.array_equal(f32(made["lm_head.weight_scale"]).reshape(-1), np.float32(np.reshape(scale, -1)))
    assert made["lm_head.weight_scale"].shape == ((1,) if np.size(scale) == 1 else (VOCAB, 1))
    assert made["lm_head.weight"] == tensors_of(src)["lm_head.weight"]
    assert halfbyte.verify(tmp_path / "there").findings == ()
    section = read_json(tmp_path / "there" / "config.json")["quantization_config"]
    assert section["format"] == "mixed-precision"
    convert(tmp_path / "there", tmp_path / "back", MODELOPT)
    assert halfbyte.verify(tmp_path / "back").findings == ()
    source, back = tensors_of(src), tensors_of(tmp_path / "back")
    assert {n: t.data for n, t in back.items()} == {n: t.data for n, t in source.items()}


def test_kv_scales_come_along(tmp_path):
    section = modelopt_section(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False})
    change = {f"{K}.k_scale": np.float32(0.25), f"{V}.v_scale": np.float32(0.5)}
    src = make_dense(tmp_path / "src", change=change, section=section)
    convert(src, tmp_path / "there", CT)
    made = tensors_of(tmp_path / "there")
    assert f32(made[f"{K}.k_scale"]).reshape(()) == 0.25
    assert f32(made[f"{V}.v_scale"]).reshape(()) == 0.5
    assert read_json(tmp_path / "there" / "config.json")["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    assert halfbyte.verify(tmp_path / "there").findings == ()
    convert(tmp_path / "there", tmp_path / "back", MODELOPT)
    quant = read_json(tmp_path / "back" / "hf_quant_config.json")["quantization"]
    assert quant["kv_cache_quant_algo"] == "FP8"
    assert tensors_of(tmp_path / "back") == tensors_of(src)


def test_kv_scales_of_compressed_tensors(tmp_path):
    """On the attention itself, in bfloat16."""
    scheme = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor", "symmetric": True}
    change = {f"model.layers.0.self_attn.{n}": np.full(1, 0.5, BF16) for n in ("k_scale", "v_scale")}
    src = make_dense(tmp_path / "src", CT, change=change, section=ct_section(kv_cache_scheme=scheme))
    convert(src, tmp_path / "there", MODELOPT)
    assert halfbyte.verify(tmp_path / "there").findings == ()
    convert(tmp_path / "there", tmp_path / "back", CT)
    assert tensors_of(tmp_path / "back") == tensors_of(src)


def test_an_nvfp4_kv_cache_has_no_place(tmp_path):
    src = make_dense(tmp_path / "src", section=modelopt_section(kv_cache_scheme="NVFP4"))
    check_failure(call("convert", src, tmp_path / "out", "--to", CT), 2, "NVFP4", "KV cache")
    assert leftovers(tmp_path) == ["src"]


COMPANIONS = ["pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "hadamard", "weight_zero_point"]


@pytest.mark.parametrize("name", COMPANIONS)
def test_companions_without_a_place_are_refused(tmp_path, name):
    change = {f"{Q}.{name}": np.ones(HIDDEN, BF16)}
    src = make_dense(tmp_path / "src", change=change)
    line = check_failure(call("convert", src, tmp_path / "out", "--to", CT), 2, f"{Q}.{name}", "compressed-tensors")
    assert "own dialect" in line
    assert leftovers(tmp_path) == ["src"]
    convert(src, tmp_path / "same", MODELOPT)
    assert f"{Q}.{name}" in tensors_of(tmp_path / "same")


def test_biases_and_loose_parameters_come_along(tmp_path):
    change = {
        f"{Q}.bias": floats(1, HIDDEN)[0],
        "model.A_log": np.ones(4, np.float32),
        "scalar": np.float32(3),
        "ints": np.arange(5),
        "empty.weight": np.zeros((0, 4), BF16),
    }
    src = make_dense(tmp_path / "src", change=change)
    report = convert(src, tmp_path / "out", CT)
    source, made = tensors_of(src), tensors_of(tmp_path / "out")
    for name in change:
        assert made[name] == source[name]
    assert {t["tensor"] for t in report.facts["tensors"]} == set(source)
    assert {t["to"] for t in report.facts["tensors"]} == set(made)


def test_each_tensor_is_listed_with_its_fate(tmp_path):
    src = make_dense(tmp_path / "src", input_scale=True)
    report = convert(src, tmp_path / "out", CT)
    listed = {t["tensor"]: (t["to"], t["action"], t["reason"]) for t in report.facts["tensors"]}
    assert listed[f"{Q}.weight"] == (f"{Q}.weight_packed", "converted", "renamed; same bytes")
    assert listed[f"{Q}.weight_scale"] == (f"{Q}.weight_scale", "copied", "the same in both dialects")
    assert listed[f"{Q}.weight_scale_2"] == (f"{Q}.weight_global_scale", "converted", "reciprocal")
    assert listed[f"{Q}.input_scale"] == (f"{Q}.input_global_scale", "converted", "reciprocal")
    assert listed["lm_head.weight"] == ("lm_head.weight", "copied", "the same in both dialects")
    files = {f["file"]: f["action"] for f in report.facts["files"]}
    assert files == {"config.json": "converted"}


def test_dropped_files_are_listed(tmp_path):
    src = make_dense(tmp_path / "src", quant={"quantization": {"quant_algo": "W4A16_NVFP4"}})
    report = convert(src, tmp_path / "out", CT)
    files = {f["file"]: f["action"] for f in report.facts["files"]}
    assert files == {"config.json": "converted", "hf_quant_config.json": "dropped"}
    assert all(f["reason"] for f in report.facts["files"])


@pytest.mark.parametrize("to", OTHER)
def test_a_shard_outside_the_index_is_not_lost_in_silence(tmp_path, to):
    """consolidated.safetensors beside the shards of the index: carried or dropped, but listed."""
    src = make_dense(tmp_path / "src", shards=2)
    save(src / "consolidated.safetensors", {"a": np.ones(3, np.float32)})
    report = convert(src, tmp_path / "out", to)
    assert "consolidated.safetensors" in {f["file"] for f in report.facts["files"]}


def test_quantized_embeddings_and_heads(tmp_path):
    change = named(MODELOPT, "model.embed_tokens", nvfp4(VOCAB, HIDDEN)) | named(
        MODELOPT, "lm_head", nvfp4(VOCAB + 1, HIDDEN)
    )
    src = make_dense(tmp_path / "src", change=change, section=modelopt_section(ignore=[], nvfp4_embed=True))
    assert halfbyte.verify(src).findings == ()
    convert(src, tmp_path / "there", CT)
    assert halfbyte.verify(tmp_path / "there").findings == ()
    convert(tmp_path / "there", tmp_path / "back", MODELOPT)
    assert halfbyte.verify(tmp_path / "back").findings == ()
    assert tensors_of(tmp_path / "back") == tensors_of(src)


@pytest.mark.parametrize("dialect", OTHER)
def test_w4a16_where_there_are_no_input_scales(tmp_path, dialect):
    """Without input scales a W4A4 config would be a lie."""
    section = modelopt_section("NVFP4") if dialect == MODELOPT else ct_section(static=True)
    src = make_dense(tmp_path / "src", dialect, section=section)
    convert(src, tmp_path / "out", OTHER[dialect])
    section = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    if dialect == MODELOPT:
        assert section["config_groups"]["group_0"]["input_activations"] is None
    else:
        assert section["quant_algo"] == "W4A16_NVFP4"
    assert halfbyte.verify(tmp_path / "out").findings == ()


def test_a_mix_of_static_and_not_is_written_as_it_is(tmp_path):
    change = {f"{m}.input_global_scale": None for m in LINEARS if "mlp" in m}
    src = make_dense(tmp_path / "src", CT, change=change, input_scale=True)
    convert(src, tmp_path / "out", MODELOPT)
    section = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert section["quant_algo"] == "MIXED_PRECISION"
    algos = {n: layer["quant_algo"] for n, layer in section["quantized_layers"].items()}
    assert algos == {n: "W4A16_NVFP4" if "mlp" in n else "NVFP4" for n in LINEARS}
    assert halfbyte.verify(tmp_path / "out").findings == ()


def test_the_rest_of_the_config_is_kept(tmp_path):
    src = make_dense(tmp_path / "src", config=CONFIG | {"text_config": {"a": [1, {"b": "ü"}]}, "rope": {"x": 1e-05}})
    convert(src, tmp_path / "out", CT)
    config = read_json(tmp_path / "out" / "config.json")
    del config["quantization_config"]
    assert config == CONFIG | {"text_config": {"a": [1, {"b": "ü"}]}, "rope": {"x": 1e-05}}
    assert list(config) == list(read_json(src / "config.json"))[:-1]


def test_a_checkpoint_without_a_config(tmp_path):
    src = make_dense(tmp_path / "src", config=None)
    convert(src, tmp_path / "out", CT)
    assert read_json(tmp_path / "out" / "config.json")["quantization_config"]["quant_method"] == CT
    assert halfbyte.verify(tmp_path / "out").findings == ()


# --- shards


@pytest.mark.parametrize("dialect", OTHER)
@pytest.mark.parametrize("shards", [2, 5])
def test_weight_and_scales_in_different_shards(tmp_path, dialect, shards):
    src = make_dense(tmp_path / "src", dialect, shards=shards, input_scale=True)
    convert(src, tmp_path / "there", OTHER[dialect])
    assert halfbyte.verify(tmp_path / "there").findings == ()
    names = {p.name for p in src.glob("*.safetensors")}
    assert {p.name for p in (tmp_path / "there").glob("*.safetensors")} == names
    index = read_json(tmp_path / "there" / INDEX)
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in tensors_of(tmp_path / "there").values())
    convert(tmp_path / "there", tmp_path / "back", dialect)
    assert tensors_of(tmp_path / "back") == tensors_of(src)
    assert read_json(tmp_path / "back" / INDEX) == read_json(src / INDEX) | {
        "weight_map": dict(sorted(read_json(src / INDEX)["weight_map"].items()))
    }


def test_provenance_lies_with_its_tensor(tmp_path):
    values = numbers()[150:250]
    tensors = {}
    for i, x in enumerate(values):
        tensors |= named(MODELOPT, f"m{i}", nvfp4(1, 16, i, scale2=x))
    names = list(tensors)
    src = save_sharded(tmp_path / "src", [{n: tensors[n] for n in names[i::3]} for i in range(3)])
    convert(src, tmp_path / "there", CT)
    for file in (tmp_path / "there").glob("*.safetensors"):
        table = json.loads(header_of(file)["__metadata__"].get(PROVENANCE, "{}"))
        assert set(table) <= set(tensors_of(file))
    for size in ("1KB", None):
        convert(tmp_path / "there", tmp_path / f"back{size}", MODELOPT, max_shard_size=size)
        assert tensors_of(tmp_path / f"back{size}") == tensors_of(src)
    convert(tmp_path / "there", tmp_path / "resharded", CT, max_shard_size="700")
    convert(tmp_path / "resharded", tmp_path / "home", MODELOPT)
    assert tensors_of(tmp_path / "home") == tensors_of(src)


@pytest.mark.parametrize("to", OTHER)
def test_one_shard_with_an_index(tmp_path, to):
    """model-00001-of-00001 with its index: loaders find a file of that name by the index only."""
    src = save_sharded(tmp_path / "src", [quantized()])
    write_json(src / "config.json", {"quantization_config": modelopt_section()})
    convert(src, tmp_path / "out", to)
    files = set(listing(tmp_path / "out"))
    assert "model.safetensors" in files or INDEX in files


def test_max_shard_size(tmp_path):
    src = make_dense(tmp_path / "src", layers=2)
    convert(src, tmp_path / "out", CT, max_shard_size="3KB")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    for file in files:
        tensors = tensors_of(file)
        assert len(tensors) == 1 or sum(len(t.data) for t in tensors.values()) <= 3000
    assert_same_weights(src, tmp_path / "out")


def test_metadata_of_the_source_is_kept(tmp_path):
    src = make_dense(tmp_path / "src", metadata={"format": "pt", "author": "ü"})
    convert(src, tmp_path / "out", CT)
    assert by_library(tmp_path / "out" / "model.safetensors")[0] == {"format": "pt", "author": "ü"}


@pytest.mark.parametrize("to", OTHER)
def test_a_single_file(tmp_path, to):
    src = make_dense(tmp_path / "src", quant={"quantization": {"quant_algo": "W4A16_NVFP4"}})
    convert(src / "model.safetensors", tmp_path / "out", to)
    assert_same_weights(src, tmp_path / "out")
    assert halfbyte.verify(tmp_path / "out").findings == ()


# --- the proof


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("same", [False, True], ids=["other dialect", "same dialect"])
def test_the_proof_sees_every_byte(tmp_path, monkeypatch, same):
    """One bit of the written result altered, in each tensor in turn: no result gets its name."""
    src = make_dense(tmp_path / "src", input_scale=True, change={f"{Q}.bias": np.ones(HIDDEN, BF16)})
    to = MODELOPT if same else CT
    halfbyte.convert(src, tmp_path / "good", to=to)
    header = header_of(tmp_path / "good" / "model.safetensors")
    base = 8 + struct.unpack("<Q", (tmp_path / "good" / "model.safetensors").read_bytes()[:8])[0]
    real = CheckpointWriter.seal
    for name, entry in header.items():
        if name == "__metadata__":
            continue

        def seal(self, index, at=base + entry["data_offsets"][1] - 1):
            sealed = real(self, index)
            flip(sealed / "model.safetensors", at)
            return sealed

        monkeypatch.setattr(CheckpointWriter, "seal", seal)
        with pytest.raises(FormatError, match="the proof failed") as caught:
            halfbyte.convert(src, tmp_path / "out", to=to, prove=True)
        assert caught.value.tensor.startswith(name.rpartition(".")[0])
        assert leftovers(tmp_path) == ["good", "src"]
    # without the proof nobody looks
    assert "proven" not in halfbyte.convert(src, tmp_path / "out", to=to).facts


def test_the_proof_sees_companions_too(tmp_path, monkeypatch):
    """In the same dialect a companion of unknown meaning is carried, so it is compared."""
    src = make_dense(tmp_path / "src", change={f"{Q}.hadamard": np.ones(4, np.float32)})
    real = CheckpointWriter.seal

    def seal(self, index):
        sealed = real(self, index)
        file = sealed / "model.safetensors"
        tensors = tensors_of(file)
        tensors[f"{Q}.hadamard"] = np.zeros(4, np.float32)
        save(file, tensors)
        return sealed

    monkeypatch.setattr(CheckpointWriter, "seal", seal)
    with pytest.raises(FormatError, match="the proof failed"):
        halfbyte.convert(src, tmp_path / "out", to=MODELOPT, prove=True)


@pytest.mark.parametrize("what", ["missing", "more"])
def test_the_proof_sees_what_is_missing_and_what_is_more(tmp_path, monkeypatch, what):
    src = make_dense(tmp_path / "src")
    real = CheckpointWriter.seal

    def seal(self, index):
        sealed = real(self, index)
        file = sealed / "model.safetensors"
        tensors = tensors_of(file)
        if what == "missing":
            del tensors["model.norm.weight"]
        else:
            tensors["more.weight"] = np.ones((2, 2), np.float32)
        save(file, tensors)
        return sealed

    monkeypatch.setattr(CheckpointWriter, "seal", seal)
    with pytest.raises(FormatError, match="the proof failed"):
        halfbyte.convert(src, tmp_path / "out", to=CT, prove=True)
    check_failure(call("convert", src, tmp_path / "out", "--to", CT, "--prove"), 2, "the proof failed")
    assert leftovers(tmp_path) == ["src"]


def test_the_proof_of_a_sound_result(tmp_path):
    src = make_dense(tmp_path / "src", input_scale=True)
    report = convert(src, tmp_path / "out", CT)
    assert report.facts["proven"] == len(tensors_of(src))
    ran = call("convert", src, tmp_path / "again", "--to", CT, "--prove")
    assert ran.rc == 0
    assert f"{len(tensors_of(src))} tensors read back" in ran.stdout


def test_the_proof_of_numbers_that_overflow_nothing(tmp_path):
    """A NaN block scale is carried and proven: convert is no judge."""
    scales = np.full((HIDDEN, 2), 0xFF, np.uint8).view(E4M3)
    src = make_dense(
        tmp_path / "src", change={f"{Q}.weight_scale": scales, "lm_head.weight": np.full((2, 2), np.nan, BF16)}
    )
    convert(src, tmp_path / "out", CT)
    assert tensors_of(tmp_path / "out")[f"{Q}.weight_scale"].data == b"\xff" * HIDDEN * 2


# --- refusals


def test_dense_checkpoints_have_nothing_to_convert(tmp_path):
    src = make_float(tmp_path / "src")
    check_failure(call("convert", src, tmp_path / "out", "--to", CT), 2, src, "nothing quantized", "halfbyte quantize")
    with pytest.raises(UsageError):
        convert(src, tmp_path / "out", CT)


@pytest.mark.parametrize("to", ["gguf", "comfyui", "CT", "", "ModelOpt"])
def test_unknown_targets(tmp_path, to):
    src = make_dense(tmp_path / "src")
    check_failure(call("convert", src, tmp_path / "out", "--to", to), 2, repr(to), "compressed-tensors or modelopt")
    assert leftovers(tmp_path) == ["src"]


BROKEN = {
    "no block scales": {f"{Q}.weight_scale": None},
    "no second scale": {f"{Q}.weight_scale_2": None},
    "half the columns": {f"{Q}.weight_scale": np.ones((HIDDEN, 1), E4M3)},
    "ragged K": {f"{Q}.weight": np.zeros((HIDDEN, 12), np.uint8)},
    "integers as second scale": {f"{Q}.weight_scale_2": np.int32(1)},
    "two second scales": {f"{Q}.weight_scale_2": np.ones(2, np.float32)},
    "a row of second scales": {f"{Q}.weight_scale_2": np.full(HIDDEN, 0.3, np.float32)},
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_weights_are_refused_or_carried_but_never_misread(tmp_path, case):
    """What verify calls an error is not passed on under new names without a word."""
    src = make_dense(tmp_path / "src", change=BROKEN[case])
    assert not halfbyte.verify(src).ok
    ran = call("convert", src, tmp_path / "out", "--to", CT)
    assert "internal error" not in ran.stderr
    if ran.rc == 0:
        assert not halfbyte.verify(tmp_path / "out").ok, "an unsound checkpoint became a sound one"
        assert ran.stderr, "and nothing was said about it"
    else:
        check_failure(ran, 2, Q)
        assert leftovers(tmp_path) == ["src"]


def test_two_tensors_of_one_name(tmp_path):
    """a.weight would become a.weight_packed, and that is there already."""
    tensors = named(MODELOPT, "a", nvfp4(4, 32))
    src = tmp_path / "src"
    src.mkdir()
    save(
        src / "model.safetensors",
        tensors | {"a.weight_scale_2": np.float32(1), "a.weight_packed": np.zeros(3, np.uint8)},
    )
    for to in (CT, MODELOPT):
        with contextlib.suppress(HalfbyteError):
            assert not halfbyte.convert(src, tmp_path / to, to=to).ok, "carried as it is, and named"
            assert tensors_of(tmp_path / to) == tensors_of(src)
    assert set(leftovers(tmp_path)) <= {"src", CT, MODELOPT}


def test_the_source_is_never_written_to(tmp_path):
    src = make_dense(tmp_path / "src", shards=2)
    before = listing(src)
    stamps = {p: os.stat(p).st_mtime_ns for p in src.rglob("*")}
    convert(src, tmp_path / "out", CT)
    assert listing(src) == before
    assert {p: os.stat(p).st_mtime_ns for p in src.rglob("*")} == stamps


def test_a_target_inside_the_source(tmp_path):
    src = make_dense(tmp_path / "src")
    convert(src, src / "ct", CT)
    assert_same_weights(src, src / "ct")
    assert not [n for n in listing(src) if ".halfbyte" in n]


@pytest.mark.parametrize("verb", ["convert", "dequantize"])
def test_a_target_that_holds_the_source_is_not_replaced(tmp_path, verb):
    """--force replaces a directory; not the one that the source is in."""
    (tmp_path / "models").mkdir()
    src = make_dense(tmp_path / "models" / "src")
    (tmp_path / "models" / "mine").write_text("mine")
    before = listing(tmp_path / "models")
    more = ["--to", CT] if verb == "convert" else []
    check_failure(call(verb, src, tmp_path / "models", *more, "--force"), 2, tmp_path / "models")
    assert listing(tmp_path / "models") == before
    assert leftovers(tmp_path) == ["models"]


@pytest.mark.parametrize("force", [False, True])
def test_onto_itself(tmp_path, force):
    """The source is never replaced by what is made of it."""
    src = make_dense(tmp_path / "src")
    before = listing(src)
    with pytest.raises(HalfbyteError, match="the target is or holds the source"):
        convert(src, src, CT, force=force)
    assert listing(src) == before
    assert leftovers(tmp_path) == ["src"]


@pytest.mark.parametrize("inside", [".git", "src"])
def test_force_replaces_no_other_directory(tmp_path, inside):
    src = make_dense(tmp_path / "from")
    (tmp_path / "project" / inside).mkdir(parents=True)
    (tmp_path / "project" / inside / "work").write_text("mine")
    check_failure(call("convert", src, tmp_path / "project", "--to", CT, "--force"), 2, "--force replaces nothing else")
    assert (tmp_path / "project" / inside / "work").read_text() == "mine"


def test_dry_run(tmp_path):
    src = make_dense(tmp_path / "src", shards=2)
    ran = call("convert", src, tmp_path / "out", "--to", CT, "--dry-run")
    assert (ran.rc, ran.stderr) == (0, "")
    assert "in 2 shards" in ran.stdout
    assert leftovers(tmp_path) == ["src"]
    plan = halfbyte.convert(src, tmp_path / "out", to=CT, dry_run=True).facts
    done = convert(src, tmp_path / "out", CT).facts
    assert (plan["tensors"], plan["bytes_out"]) == (done["tensors"], done["bytes_out"])


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path):
    src = make_dense(tmp_path / "src", section=modelopt_section(kv_cache_scheme="NVFP4"))
    assert call("convert", src, tmp_path / "out", "--to", CT).rc == 2
    assert call("convert", src, tmp_path / "out", "--to", CT, "--dry-run").rc == 2


@pytest.mark.parametrize("workers", [1, 2, 6])
def test_the_number_of_threads_changes_no_byte(tmp_path, workers):
    src = make_dense(tmp_path / "src", shards=5, input_scale=True, layers=2)
    convert(src, tmp_path / "one", CT, workers=1)
    convert(src, tmp_path / "out", CT, workers=workers)
    assert listing(tmp_path / "out") == listing(tmp_path / "one")


SUFFIXES = [
    "weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "bias",
    "input_global_scale", "pre_quant_scale", "svdquant_lora_a", "weight_scale_inv", "scale", "zero_point", "k_scale",
]  # fmt: skip
SHAPES = [(), (1,), (1, 1), (4,), (4, 1), (4, 2), (4, 16), (4, 32), (0, 16), (4, 0), (2, 4, 16), (32,), (128, 4)]
DTYPES = ["U8", "I8", "F4", "F8_E4M3", "F32", "BF16", "F16", "F64", "I32", "F8_E8M0", "BOOL", "F8_E5M2"]


def any_tensors(rng):
    """Modules of all kinds, of which some tensors are missing, misshapen or of no use."""
    tensors = {}
    for module in rng.sample([Q, K, "lm_head", "model.embed_tokens", "model.norm"], rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.6:
            scale2 = rng.choice([0.001, 0.3, 5.0, 1e-40, 0.0, float("nan")])
            roles = nvfp4(4, 32, rng.randint(0, 3), scale2=scale2, input_scale=rng.choice([None, 0.1]))
            tensors |= named(rng.choice(list(OTHER)), module, roles, rng.choice([(), (1,), (1, 1)]))
        elif kind < 0.8:
            scale = rng.choice([0.5, [0.5], [0.5] * 4, [[0.5]] * 4])
            tensors |= {f"{module}.{k}": v for k, v in fp8(4, 32, scale=scale).items()}
        for _ in range(rng.choice([0, 0, 1, 2])):
            dtype, shape = rng.choice(DTYPES), rng.choice(SHAPES)
            data = rng.randbytes(byte_count(dtype, shape))
            tensors[f"{module}.{rng.choice(SUFFIXES)}"] = Raw(dtype, shape, data)
        if tensors and rng.random() < 0.2:
            tensors.pop(rng.choice(list(tensors)))
    return tensors


def raw(value):
    if isinstance(value, Raw):
        return value
    array = np.asarray(value)
    return Raw(header_dtype(array), array.shape, array.tobytes())


def write_raw(path, tensors):
    header, data = {}, b""
    for name, value in tensors.items():
        tensor = raw(value)
        end = len(data) + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [len(data), end]}
        data += tensor.data
    raw_safetensors(path, header, data)


@pytest.mark.parametrize("seed", range(12))
def test_any_tensors_are_carried_or_refused(tmp_path, seed):
    """Whatever the tensors are: refused in words, or each listed, written, and back by value; nothing else."""
    rng = random.Random(seed)
    sections = [{}, modelopt_section("NVFP4"), modelopt_section(), ct_section(), ct_section(static=True)]
    done = 0
    for case in range(25):
        src, tensors = tmp_path / f"{case}", any_tensors(rng)
        src.mkdir()
        write_raw(src / "model.safetensors", tensors)
        write_json(src / "config.json", {"quantization_config": rng.choice(sections)})
        for look in (halfbyte.verify, halfbyte.inspect, lambda path: halfbyte.inspect(path, stats=True)):
            with contextlib.suppress(HalfbyteError):
                json.dumps(look(src).json(), allow_nan=False)
        for to in OTHER:
            there, back = src / to, src / f"{to}-back"
            with contextlib.suppress(HalfbyteError):
                report = convert(src, there, to)
                assert {t["tensor"] for t in report.facts["tensors"]} == set(tensors)
                assert {t["to"] for t in report.facts["tensors"]} == set(tensors_of(there))
                convert(there, back, report.facts["from"])
                made = {n: numbers_of(t) for n, t in tensors_of(back).items()}
                assert made == {n: numbers_of(raw(t)) for n, t in tensors.items()}
                done += 1
        with contextlib.suppress(HalfbyteError):
            report = halfbyte.dequantize_checkpoint(src, src / "dense", dtype="float32")
            made = tensors_of(src / "dense")
            assert {t["tensor"] for t in report.facts["tensors"]} == set(tensors)
            for entry in report.facts["tensors"]:
                assert entry["action"] != "copied" or made[entry["tensor"]] == raw(tensors[entry["tensor"]])
            done += 1
    assert done > 5


def numbers_of(tensor):
    """The bytes; of a half-precision scalar or row of scales, those in float32."""
    if tensor.dtype in ("BF16", "F16") and len(tensor.data) <= 8:
        return np.frombuffer(tensor.data, BF16 if tensor.dtype == "BF16" else np.float16).astype(np.float32).tobytes()
    return tensor.data


@pytest.mark.parametrize("to", OTHER)
@pytest.mark.parametrize("prove", [False, True])
def test_progress_ends_at_the_total(tmp_path, to, prove):
    seen = []
    src = make_dense(tmp_path / "src", shards=2)
    halfbyte.convert(src, tmp_path / "out", to=to, prove=prove, progress=lambda d, t: seen.append((d, t)))
    done, total = seen[-1]
    assert done == total
    assert all(d <= t for d, t in seen)


def test_the_document(tmp_path):
    src = make_dense(tmp_path / "src")
    document = call("convert", src, tmp_path / "out", "--to", CT, "--json").document
    assert (document["command"], document["ok"], document["from"], document["to"]) == ("convert", True, MODELOPT, CT)
    assert {t["action"] for t in document["tensors"]} == {"copied", "converted"}
