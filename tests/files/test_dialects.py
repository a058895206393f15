"""ModelOpt and compressed-tensors: tensors, both config files, patterns; and the dialects that are not read yet."""

from __future__ import annotations

import copy
import dataclasses
import traceback

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    CONFIG,
    GOLDEN,
    GOLDENS,
    IGNORED,
    LINEARS,
    Q,
    codes,
    ct_section,
    fp8,
    make_dense,
    modelopt_section,
    named,
    nvfp4,
    quantized,
    read_json,
    save,
    write_json,
)
from contract_dialects import check_dialect, claimants, headers_of
from halfbyte.checkpoint.consistency import header_findings
from halfbyte.dialects import DIALECTS, detect, dialect_named, writable
from halfbyte.dialects.base import Facts
from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.modules import Headers, Module, kv_format, quant_section
from halfbyte.stored import Stored

MODELOPT, CT = dialect_named("modelopt"), dialect_named("compressed-tensors")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_contract(dialect, tmp_path):
    check_dialect(dialect, tmp_path)


def test_the_table():
    assert writable() == ["compressed-tensors", "modelopt"]
    for name in ("comfyui", "gguf", "nothing", "ModelOpt", ""):
        with pytest.raises(UsageError, match="compressed-tensors or modelopt"):
            dialect_named(name)


OF_GOLDEN = {
    "ct_llama_nvfp4": "compressed-tensors",
    "modelopt_llama_mixed_fp8_nvfp4_tied": "modelopt",
    "modelopt_llama_nvfp4": "modelopt",
    "modelopt_llama_w4a16": "modelopt",
    "modelopt_qwen3moe_w4a16": "modelopt",
}
CONTAINERS = {"comfy_c": "comfyui", "mlx_d": "mlx"}


@pytest.mark.parametrize("name", [*OF_GOLDEN, *CONTAINERS])
def test_exactly_one_dialect_claims_each_golden(name):
    path = GOLDENS[name] / "model.safetensors" if name in GOLDENS else GOLDEN / "containers" / f"{name}.safetensors"
    assert claimants(headers_of(path)) == [(OF_GOLDEN | CONTAINERS)[name]]


def test_no_golden_is_forgotten():
    assert set(OF_GOLDEN) == set(GOLDENS)


def headers(tensors, **more):
    return Headers({n: Stored(n, dtype, tuple(shape)) for n, (dtype, shape) in tensors.items()}, **more)


NV = {"a.weight": ("U8", (32, 32)), "a.weight_scale": ("F8_E4M3", (32, 4)), "a.weight_scale_2": ("F32", ())}
NVCT = {
    "a.weight_packed": ("U8", (32, 32)),
    "a.weight_scale": ("F8_E4M3", (32, 4)),
    "a.weight_global_scale": ("F32", (1,)),
}
STACK = {"": ("U8", (2, 32, 32)), "_weight_scale": ("F8_E4M3", (2, 32, 4)), "_weight_scale_2": ("F32", (2,))}
DETECTED = {
    "modelopt": (headers(NV), "modelopt"),
    "compressed-tensors": (headers(NVCT), "compressed-tensors"),
    "dense": (headers({"a.weight": ("BF16", (32, 64))}), "modelopt"),
    "nothing": (headers({}), "modelopt"),
    "dense with a CT config": (
        headers({"a.weight": ("BF16", (32, 64))}, config={"quantization_config": ct_section()}),
        "compressed-tensors",
    ),
    "tensors count, not the config": (headers(NV, config={"quantization_config": ct_section()}), "modelopt"),
    "comfy marker": (headers(NV | {"a.comfy_quant": ("U8", (20,))}), "comfyui"),
    "comfy metadata": (headers(NV, metadata={"_quantization_metadata": "{}"}), "comfyui"),
    "comfy padding": (headers(NV | {"a.weight_scale": ("F8_E4M3", (128, 4))}), "comfyui"),
    "mlx config": (headers(NV, config={"quantization": {"mode": "nvfp4", "bits": 4, "group_size": 16}}), "mlx"),
    "mlx tensors": (headers({"a.weight": ("U32", (32, 8)), "a.scales": ("U8", (32, 4))}), "mlx"),
    "torchao": (headers({"a.weight_qdata": ("U8", (32, 32))}), "torchao"),
    "torchao metadata": (headers({"a": ("U8", (32, 32))}, metadata={"a": '{"_type": "NVFP4Tensor"}'}), "torchao"),
    "fp-quant": (headers({"a.qweight": ("U8", (32, 32)), "a.forward_hadamard_matrix": ("BF16", (16, 16))}), "fp-quant"),
    "mxfp4 in CT": (
        headers({"a.weight_packed": ("U8", (32, 32)), "a.weight_scale": ("U8", (32, 2))}),
        "compressed-tensors",
    ),
    "mxfp4 in ModelOpt": (headers({"a.weight": ("U8", (32, 32)), "a.weight_scale": ("U8", (32, 2))}), "modelopt"),
    "gpt-oss": (headers({"a_blocks": ("U8", (2, 32, 2, 16)), "a_scales": ("U8", (2, 32, 2))}), "gpt-oss"),
    "block fp8": (headers({"a.weight": ("F8_E4M3", (32, 64)), "a.weight_scale_inv": ("F32", (1, 1))}), "fp8"),
    "block fp8 beside nvfp4": (headers(NV | {"b.weight_scale_inv": ("F32", (1, 1))}), "modelopt"),
    "a stack": (headers({f"e.up_proj{s}": t for s, t in STACK.items()}), "modelopt"),
    "integers": (headers({"a.weight_packed": ("I32", (32, 8)), "a.weight_scale": ("BF16", (32, 2))}), "pack-quantized"),
    "integers beside nvfp4": (headers(NVCT | {"b.weight_packed": ("I32", (32, 8))}), "compressed-tensors"),
    "scales of a full tile are no sign": (
        headers(NV | {"a.weight": ("U8", (128, 32)), "a.weight_scale": ("F8_E4M3", (128, 4))}),
        "modelopt",
    ),
}


@pytest.mark.parametrize("case", DETECTED)
def test_detection(case):
    made, name = DETECTED[case]
    dialect, evidence = detect(made)
    assert dialect.name == name
    assert bool(evidence) == (case not in ("dense", "nothing"))


def test_files_in_16_bit_mlx_shape_are_not_claimed():
    """GPTQ's integers are no MLX."""
    gptq = headers({"a.qweight": ("I32", (8, 32)), "a.scales": ("F16", (4, 32)), "a.qzeros": ("I32", (4, 4))})
    assert claimants(gptq) == []


# --- configs, as they are found


def layer_of(dialect, config=None, quant=None):
    found = dialect.layers(Headers({}, config=config or {}, quant=quant or {}))
    return lambda name, cls="Linear": found(name, cls) if found else "silent"


NESTED = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}}
PLACES = {
    "config.json": ({"quantization_config": modelopt_section("NVFP4", ["lm_head"])}, {}),
    "config.json of a text model": (
        {"text_config": {"quantization_config": modelopt_section("NVFP4", ["lm_head"])}},
        {},
    ),
    "exclude_modules in config.json": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        {},
    ),
    "vLLM's method names": (
        {"quantization_config": modelopt_section("NVFP4", ["lm_head"]) | {"quant_method": "modelopt_fp4"}},
        {},
    ),
    "compression_config": ({"compression_config": modelopt_section("NVFP4", ["lm_head"])}, {}),
    "hf_quant_config.json nested": ({}, NESTED),
    "hf_quant_config.json flat": ({}, NESTED["quantization"]),
    "modules_to_not_convert": (
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "modules_to_not_convert": ["lm_head"],
            }
        },
        {},
    ),
    "an empty list beside a full one": (
        {"quantization_config": modelopt_section("NVFP4", []) | {"exclude_modules": ["lm_head"]}},
        {},
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_places_of_a_modelopt_config(case):
    of = layer_of(MODELOPT, *PLACES[case])
    assert (of(Q).kind, of(Q).static_input) == ("nvfp4", True)
    assert of("lm_head") is None
    assert of("model.embed_tokens", "Embedding") is None


@pytest.mark.parametrize("case", ["hf_quant_config.json nested", "hf_quant_config.json flat"])
def test_a_checkpoint_with_hf_quant_config_alone(tmp_path, case):
    """Old exports have no quantization_config in config.json."""
    quant = PLACES[case][1] | ({} if "nested" in case else {"kv_cache_quant_algo": None})
    quant = copy.deepcopy(quant)
    quant.get("quantization", quant)["kv_cache_quant_algo"] = None
    path = make_dense(tmp_path / "x", section={}, quant=quant, input_scale=True)
    assert halfbyte.verify(path).findings == ()
    config = halfbyte.inspect(path).facts["config"]
    assert config["quant_algo"] == "NVFP4"


ALGOS = {
    "NVFP4": ("nvfp4", True),
    "W4A16_NVFP4": ("nvfp4", False),
    "NVFP4_AWQ": ("nvfp4", True),
    "NVFP4_SVD": ("nvfp4", True),
    "FP8": ("fp8", None),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", None),
    "FP8_PB_WO": ("fp8", None),
    "MXFP4": ("mxfp4", None),
    "MXFP8": ("mxfp8", None),
}


@pytest.mark.parametrize("algo", ALGOS)
def test_quant_algos(algo):
    layer = layer_of(MODELOPT, {"quantization_config": modelopt_section(algo)})(Q)
    assert (layer.kind, layer.static_input) == ALGOS[algo]


def test_w4a8_has_input_scales_too(tmp_path):
    """Activations in FP8 with a static scale: its input_scale is used."""
    layer = layer_of(MODELOPT, {"quantization_config": modelopt_section("W4A8_NVFP4_FP8")})(Q)
    assert layer.kind == "nvfp4"
    path = make_dense(tmp_path / "x", section=modelopt_section("W4A8_NVFP4_FP8"), input_scale=True)
    assert halfbyte.verify(path).findings == ()


EXCLUDED = {
    "a name": (["lm_head"], {"lm_head": True, Q: False}),
    "the start of a name": (["model.layers.0"], {Q: True, "model.layers.1.mlp.up_proj": False}),
    "fnmatch": (["model.layers.0*", "*lm_head"], {Q: True, "lm_head": True, "model.layers.1.x": False}),
    "a regular expression": (["re:.*self_attn.*"], {Q: True, "model.layers.0.mlp.up_proj": False}),
    "a class": (["Linear"], {Q: True, "lm_head": True}),
    "a fused name": (["model.layers.0.self_attn.qkv_proj"], {Q: True, "model.layers.0.self_attn.o_proj": False}),
    "without the prefix": (["layers.0.self_attn.q_proj"], {Q: True}),
    "what is not text": ([None, 3, ["lm_head"], "lm_head"], {"lm_head": True, Q: False}),
}


@pytest.mark.parametrize("case", EXCLUDED)
@pytest.mark.parametrize("dialect", [MODELOPT, CT], ids=lambda d: d.name)
def test_excluded_modules(case, dialect):
    patterns, expected = EXCLUDED[case]
    section = modelopt_section("NVFP4", patterns) if dialect is MODELOPT else ct_section(ignore=patterns)
    of = layer_of(dialect, {"quantization_config": section})
    assert {name: of(name) is None for name in expected} == expected


def test_mixed_precision_names_each_layer():
    table = {
        "model.layers.0.self_attn.qkv_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.mlp.down_proj": {"quant_algo": "W4A16_NVFP4"},
        "broken": "NVFP4",
    }
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": table, "ignore": []}
    of = layer_of(MODELOPT, {"quantization_config": section})
    assert of(Q).kind == "fp8"
    assert (of("model.layers.0.mlp.up_proj").kind, of("model.layers.0.mlp.up_proj").static_input) == ("nvfp4", True)
    assert of("model.layers.0.mlp.down_proj").static_input is False
    assert of("lm_head") is None
    assert of("broken") is None


def groups(**targets):
    section = ct_section(ignore=[])
    group = section["config_groups"].pop("group_0")
    kinds = {
        "nvfp4": group,
        "fp8": group
        | {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "format": "float-quantized"},
        "int4": group | {"weights": {"num_bits": 4, "type": "int", "group_size": 128}, "format": "pack-quantized"},
        "mxfp4": group | {"weights": {"num_bits": 4, "type": "float", "group_size": 32}},
    }
    for i, (kind, patterns) in enumerate(targets.items()):
        section["config_groups"][f"group_{i}"] = kinds[kind] | {"targets": patterns}
    return {"quantization_config": section}


def kind(of, name):
    layer = of(name)
    return None if layer is None else layer.kind


def test_targets_of_compressed_tensors():
    of = layer_of(CT, groups(nvfp4=["re:.*mlp.*"], fp8=["model.layers.0.self_attn.q_proj"]))
    assert kind(of, "model.layers.0.mlp.up_proj") == "nvfp4"
    assert kind(of, Q) == "fp8"
    assert of("lm_head") is None


def test_overlapping_groups():
    """As compressed-tensors 0.20.1 resolves them: exact name, then expressions in alphabetical order, then class."""
    of = layer_of(CT, groups(nvfp4=["Linear"], fp8=["re:.*attn.*"], int4=[Q]))
    assert kind(of, Q) == "int4"
    assert kind(of, "model.layers.0.self_attn.k_proj") == "fp8"
    assert kind(of, "model.layers.0.mlp.up_proj") == "nvfp4"
    of = layer_of(CT, groups(nvfp4=["re:model.*"], fp8=["re:.*attn.*"]))
    assert kind(of, Q) == "fp8"
    of = layer_of(CT, groups(fp8=["re:model.*"], nvfp4=["re:.*attn.*"]))
    assert kind(of, Q) == "nvfp4"


def test_targets_do_not_select_siblings():
    """v_proj is the end of qkv_proj, and up_proj that of gate_up_proj."""
    of = layer_of(CT, groups(nvfp4=["Linear"], fp8=["re:.*v_proj$", "re:.*up_proj$"]))
    kinds = {name: kind(of, name) for name in LINEARS}
    assert kinds == {name: "fp8" if name.endswith(("v_proj", "up_proj")) else "nvfp4" for name in LINEARS}
    of = layer_of(CT, groups(nvfp4=["Linear"], fp8=["re:.*qkv_proj$"]))
    assert {name for name in LINEARS if kind(of, name) == "fp8"} == {
        n for n in LINEARS if n[-6:] in ("q_proj", "k_proj", "v_proj")
    }


def test_kinds_of_groups():
    for name, expected in {"nvfp4": "nvfp4", "fp8": "fp8", "int4": "int4", "mxfp4": "mxfp4"}.items():
        assert kind(layer_of(CT, groups(**{name: ["Linear"]})), Q) == expected


@pytest.mark.parametrize(
    ("inputs", "static"),
    [(None, False), ({}, False), ({"dynamic": "local"}, True), ({"dynamic": False}, True), ({"dynamic": True}, False)],
)
def test_static_inputs_of_compressed_tensors(inputs, static):
    section = ct_section()
    section["config_groups"]["group_0"]["input_activations"] = inputs
    assert layer_of(CT, {"quantization_config": section})(Q).static_input is static


def test_a_config_without_groups_is_silent():
    assert layer_of(CT, {"quantization_config": {"quant_method": "compressed-tensors"}})(Q) == "silent"
    assert layer_of(MODELOPT, {"quantization_config": {"quant_method": "modelopt"}})(Q) == "silent"
    assert layer_of(MODELOPT)(Q) == "silent"


@pytest.mark.parametrize(
    ("config", "quant", "expected"),
    [
        ({}, {}, None),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, {}, "FP8"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}}, {}, "NVFP4"),
        ({"quantization_config": {"kv_cache_scheme": "NVFP4"}}, {}, "NVFP4"),
        ({"quantization_config": {"kv_cache_scheme": None}}, {}, None),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, {}, "FP8"),
        ({}, {"quantization": {"kv_cache_quant_algo": "FP8"}}, "FP8"),
        ({}, {"kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
        ({}, {"quantization": {"kv_cache_quant_algo": None}}, None),
    ],
)
def test_kv_formats(config, quant, expected):
    assert kv_format(Headers({}, config=config, quant=quant)) == expected


def test_the_section_nearest_to_the_top_counts():
    config = {"text_config": {"quantization_config": {"a": 1}}, "quantization_config": {"a": 2}}
    assert quant_section(Headers({}, config=config)) == {"a": 2}
    assert quant_section(Headers({}, config={"vision_config": None, "text_config": []})) == {}


ODD = [None, 5, -1.5, True, "x", [], {}, [1], ["a", None], [{}], [["Linear"]], {"a": 1}, {"a": None}, {"num_bits": [8]}]


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def altered(value, path, new):
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_a_config_of_any_shape_is_a_hint_at_most(name, file):
    """Each value of a real config replaced by each odd one: read or refused in words, never an internal error."""
    if not (GOLDENS[name] / file).exists():
        pytest.skip("this dialect has no such file")
    broken = {}
    with halfbyte.open(GOLDENS[name]) as checkpoint:
        good = checkpoint.config if file == "config.json" else checkpoint.quant
        start = ("quantization_config",) if file == "config.json" else ()
        for path in places(good):
            if not path or path[: len(start)] != start:
                continue
            for new in ODD:
                value = altered(good, path, new)
                field = "config" if file == "config.json" else "quant"
                try:
                    odd = dataclasses.replace(checkpoint, **{field: value})
                    header_findings(odd)
                    kv_format(odd.headers)
                except HalfbyteError:
                    pass
                except Exception as error:
                    line = traceback.extract_tb(error.__traceback__)[-1]
                    broken[f"{line.filename.rpartition('/')[2]}:{line.line}"] = f"{path} = {new!r}: {error!r}"
    assert not broken


def test_a_broken_expression_in_a_config_is_a_finding(tmp_path):
    path = make_dense(tmp_path / "x", section=modelopt_section(ignore=["re:("]))
    (finding,) = halfbyte.verify(path).findings
    assert (finding.code, finding.got) == ("HB209", "'re:('")


# --- configs, as they are written


def written(dialect, modules, dense=None, kv=None):
    """(section, further files) for modules given as name -> (kind, roles with shapes)."""
    made = {}
    for name, (kind_, roles) in modules.items():
        stored = {role: Stored(f"{name}.{role}", dtype, shape) for role, (dtype, shape) in roles.items()}
        made[name] = Module(name, kind_, stored)
    return dialect.config(Facts(made, dense or {}, kv))


NV_ROLES = {"codes": ("U8", (32, 32)), "scales": ("F8_E4M3", (32, 4)), "scale2": ("F32", ())}
FP8_ROLES = {"data": ("F8_E4M3", (32, 64)), "scale": ("F32", ())}
STATIC = {"input_scale": ("F32", ())}


def test_modelopt_w4a16():
    section, files = written(MODELOPT, {"a": ("nvfp4", NV_ROLES)}, {"lm_head": "Linear", "e": "Embedding"})
    golden = read_json(GOLDENS["modelopt_llama_w4a16"] / "config.json")["quantization_config"]
    quant = read_json(GOLDENS["modelopt_llama_w4a16"] / "hf_quant_config.json")
    assert section == golden | {"ignore": ["e", "lm_head"]}
    quant["quantization"]["exclude_modules"] = ["e", "lm_head"]
    assert files == {"hf_quant_config.json": quant}


def test_compressed_tensors_w4a16():
    section, files = written(CT, {"a": ("nvfp4", NV_ROLES)}, {"lm_head": "Linear", "e": "Embedding"})
    assert files == {}
    assert section["config_groups"]["group_0"]["input_activations"] is None
    assert section["ignore"] == ["lm_head"]
    assert section["format"] == "nvfp4-pack-quantized"


MIXES = {
    "static and not": {"a": ("nvfp4", NV_ROLES), "b": ("nvfp4", NV_ROLES | STATIC)},
    "with fp8": {"a": ("nvfp4", NV_ROLES), "b": ("fp8", FP8_ROLES)},
    "with fp8 rows": {"a": ("nvfp4", NV_ROLES), "b": ("fp8", FP8_ROLES | {"scale": ("F32", (32, 1))})},
    "with fp8 blocks": {
        "a": ("nvfp4", NV_ROLES),
        "b": ("fp8", {"data": ("F8_E4M3", (256, 256)), "scale": ("F32", (2, 2))}),
    },
    "with static fp8": {"a": ("nvfp4", NV_ROLES | STATIC), "b": ("fp8", FP8_ROLES | STATIC)},
    "fp8 alone": {"b": ("fp8", FP8_ROLES)},
}


@pytest.mark.parametrize("case", MIXES)
@pytest.mark.parametrize("dialect", [MODELOPT, CT], ids=lambda d: d.name)
def test_a_written_config_says_what_the_tensors_are(case, dialect):
    section, files = written(dialect, MIXES[case], {"lm_head": "Linear"})
    where = {"config": {"quantization_config": section}, "quant": files.get("hf_quant_config.json", {})}
    for only in ("config", "quant"):
        if where[only]:
            of = layer_of(dialect, **{only: where[only]})
            for name, (kind_, roles) in MIXES[case].items():
                assert of(name).kind == kind_
                if kind_ == "nvfp4":
                    assert bool(of(name).static_input) == ("input_scale" in roles)
            assert of("lm_head") is None


def test_one_group_for_each_scheme():
    section, _ = written(CT, MIXES["with fp8"])
    assert section["format"] == "mixed-precision"
    assert {g["format"]: g["targets"] for g in section["config_groups"].values()} == {
        "nvfp4-pack-quantized": ["a"],
        "float-quantized": ["b"],
    }


def test_kv_in_compressed_tensors():
    assert written(CT, {"a": ("nvfp4", NV_ROLES)}, kv="FP8")[0]["kv_cache_scheme"]["num_bits"] == 8
    assert written(CT, {"a": ("nvfp4", NV_ROLES)})[0]["kv_cache_scheme"] is None
    with pytest.raises(HalfbyteError, match="NVFP4"):
        written(CT, {"a": ("nvfp4", NV_ROLES)}, kv="NVFP4")


# --- whole checkpoints that are sound


ATTENTION = "model.layers.0.self_attn"
FP8_KV = modelopt_section(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False})
SOUND = {
    "a quantized lm_head": (
        named("modelopt", "lm_head", nvfp4(65, 32)),
        modelopt_section(ignore=["model.embed_tokens"]),
    ),
    "a quantized embedding": (
        named("modelopt", "model.embed_tokens", nvfp4(65, 32)),
        modelopt_section(ignore=["lm_head"], nvfp4_embed=True),
    ),
    "tied embeddings": ({}, modelopt_section(ignore=["model.embed_tokens"])),
    "biases": ({f"{Q}.bias": np.ones(32, BF16)}, modelopt_section()),
    "a small norm of heads": ({"model.layers.0.self_attn.q_norm.weight": np.ones(16, BF16)}, modelopt_section()),
    "KV scales": (
        {f"{ATTENTION}.k_proj.k_scale": np.float32(0.5), f"{ATTENTION}.v_proj.v_scale": np.float32(1)},
        FP8_KV,
    ),
    "KV scales of the attention": (
        {f"{ATTENTION}.k_scale": np.ones(1, BF16), f"{ATTENTION}.v_scale": np.ones(1, BF16)},
        FP8_KV,
    ),
    "loose parameters": (
        {"model.layers.0.A_log": np.ones(8, np.float32), "scalar": np.float32(3), "steps": np.arange(4)},
        modelopt_section(),
    ),
    "a pre_quant_scale": (
        {f"{Q}.pre_quant_scale": np.ones(32, BF16)} | {f"{n}.input_scale": np.float32(1) for n in LINEARS},
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "ignore": IGNORED},
    ),
    "FP8 layers": (
        {f"lm_head.{k}": v for k, v in fp8(64, 32).items()},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {n: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for n in LINEARS}
            | {"lm_head": {"quant_algo": "FP8"}},
        },
    ),
    "names of another version of the library": ({}, modelopt_section(ignore=["lm_head", "embed_tokens"])),
    "no config at all": ({}, None),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_modelopt_checkpoints(tmp_path, case):
    change, section = SOUND[case]
    change = dict(change)
    if case in ("a quantized embedding", "tied embeddings"):
        change.setdefault("lm_head.weight", None if case.startswith("tied") else np.ones((65, 32), BF16))
    path = make_dense(tmp_path / "x", change=change, section=section, config=None if section is None else CONFIG)
    assert halfbyte.verify(path).findings == ()


def test_a_vision_tower_is_left_dense(tmp_path):
    """A multimodal model: the text model's config is nested, the tower's layers are ignored by pattern."""
    prefix = "model.language_model."
    tensors = {n.replace("model.", prefix, 1): v for n, v in quantized().items()}
    tensors["model.visual.blocks.0.attn.qkv.weight"] = np.ones((96, 32), BF16)
    tensors["model.visual.patch_embed.proj.weight"] = np.ones((32, 3, 2, 14, 14), BF16)
    save(tmp_path / "model.safetensors", tensors)
    ignore = ["lm_head", "model.visual*", "model.language_model.embed_tokens"]
    section = modelopt_section(ignore=ignore)
    write_json(tmp_path / "config.json", {"model_type": "x", "text_config": {"quantization_config": section}})
    assert halfbyte.verify(tmp_path).findings == ()


def test_a_mixed_group_of_compressed_tensors(tmp_path):
    change = {f"lm_head.{k}": v for k, v in fp8(64, 32, scale=np.ones((64, 1))).items()}
    section = groups(fp8=["re:.*lm_head"], nvfp4=["Linear"])["quantization_config"] | {"format": "mixed-precision"}
    path = make_dense(tmp_path / "x", "compressed-tensors", change=change, section=section)
    assert halfbyte.verify(path).findings == ()
    assert halfbyte.verify(path).facts["modules"]["fp8"] == 1


def test_deepseek_block_fp8_is_not_called_broken(tmp_path):
    """weight_scale_inv is the scale of FP8 blocks; a weight that has it does not lack its scales."""
    tensors = {f"a.{k}": v for k, v in fp8(256, 256, scale=np.ones((2, 2))).items()}
    tensors["a.weight_scale_inv"] = tensors.pop("a.weight_scale")
    save(tmp_path / "model.safetensors", tensors)
    assert "HB101" not in [code for code, _, _ in codes(halfbyte.inspect(tmp_path).findings)]


def test_integer_weights_are_not_called_broken(tmp_path):
    """compressed-tensors' int4: recognised, or at least not a list of scales without weights."""
    tensors = {
        "a.weight_packed": np.zeros((32, 8), np.int32),
        "a.weight_scale": np.ones((32, 1), BF16),
        "a.weight_shape": np.array([32, 64]),
    }
    save(tmp_path / "model.safetensors", tensors)
    write_json(tmp_path / "config.json", groups(int4=["Linear"]))
    assert "HB121" not in [code for code, _, _ in codes(halfbyte.inspect(tmp_path).findings)]


def test_e4m3_dense_without_scale_is_fp8():
    module = next(iter(MODELOPT.modules(headers({"a.weight": ("F8_E4M3", (4, 16))}))))
    assert module.kind == "fp8"
