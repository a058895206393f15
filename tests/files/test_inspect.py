"""``inspect``: what a checkpoint holds, from its headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    CONFIG,
    DOWN,
    E4M3,
    GOLDENS,
    HIDDEN,
    INTER,
    LINEARS,
    VOCAB,
    Q,
    call,
    environment,
    f4,
    floats,
    fp8,
    make_dense,
    make_float,
    modelopt_section,
    named,
    nvfp4,
    others,
    raw_safetensors,
    run_cli,
    save,
    save_sharded,
    write_json,
)
from halfbyte.checkpoint.header import encode_header
from halfbyte.stored import Stored, byte_count


def group(report, name):
    (found,) = [g for g in report.facts["groups"] if g["name"] == name]
    return found


KINDS = {
    "ct_llama_nvfp4": {"nvfp4": 7, "dense": 5},
    "modelopt_llama_mixed_fp8_nvfp4_tied": {"nvfp4": 3, "fp8": 4, "dense": 4},
    "modelopt_llama_nvfp4": {"nvfp4": 7, "dense": 5},
    "modelopt_llama_w4a16": {"nvfp4": 7, "dense": 5},
    "modelopt_qwen3moe_w4a16": {"nvfp4": 10, "dense": 8},
}


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name):
    report = halfbyte.inspect(GOLDENS[name])
    facts = report.facts
    assert {kind: sums["modules"] for kind, sums in facts["kinds"].items()} == KINDS[name]
    assert facts["dialect"] == ("compressed-tensors" if name.startswith("ct") else "modelopt")
    assert facts["readable"]
    assert report.findings == ()
    assert report.ok
    size = (GOLDENS[name] / "model.safetensors").stat().st_size
    assert facts["files"] == [{"name": "model.safetensors", "bytes": size}]


def test_logical_shapes_and_true_bits():
    """By hand: down_proj is 64x96; codes 3072, block scales 384, two scalars of 4 bytes: 3464 bytes, 6144 weights."""
    report = halfbyte.inspect(GOLDENS["modelopt_llama_nvfp4"])
    down = group(report, "model.layers.*.mlp.down_proj")
    assert down["shapes"] == [[64, 96]]
    assert (down["parameters"], down["bytes"]) == (6144, 3464)
    assert down["bits_per_parameter"] == round(8 * 3464 / 6144, 4) == 4.5104
    assert (down["kind"], down["class"], down["has"]) == ("nvfp4", "Linear", ["input_scale", "scale2"])
    total = report.facts["total"]
    assert (total["parameters"], total["bytes"]) == (39104, 34104)
    assert total["bits_per_parameter"] == round(8 * 34104 / 39104, 4)
    assert report.facts["kinds"]["dense"]["bits_per_parameter"] == 16


def test_bits_count_what_is_beside_the_weight(tmp_path):
    """4.5 bits and no more: 0.0625 for a scalar of 4 bytes on 512 weights."""
    path = save(tmp_path / "x.safetensors", named("modelopt", "a", nvfp4(16, 32)) | {"a.bias": np.ones(16, BF16)})
    assert halfbyte.inspect(path).facts["kinds"]["nvfp4"]["bits_per_parameter"] == 4.5 + 32 / 512


def test_fp8_bits():
    assert halfbyte.inspect(GOLDENS["modelopt_llama_mixed_fp8_nvfp4_tied"]).facts["kinds"]["fp8"][
        "bits_per_parameter"
    ] == pytest.approx(8.0208)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_f4_headers_count_codes(tmp_path, dialect):
    roles = nvfp4(16, 32)
    path = save(tmp_path / "x.safetensors", named(dialect, "a", roles | {"codes": f4(roles["codes"])}))
    assert group(halfbyte.inspect(path), "a")["shapes"] == [[16, 32]]
    assert halfbyte.inspect(path).facts["kinds"]["nvfp4"]["bits_per_parameter"] == 4.5625


def test_groups_join_layers(tmp_path):
    report = halfbyte.inspect(make_dense(tmp_path / "x", layers=3))
    found = group(report, "model.layers.*.self_attn.q_proj")
    assert (found["modules"], found["shapes"], found["parameters"]) == (3, [[32, 32]], 3 * 1024)
    assert len(report.facts["groups"]) == 7 + 5
    classes = {g["name"]: g["class"] for g in report.facts["groups"]}
    assert classes["model.embed_tokens"] == "Embedding"
    assert classes["lm_head"] == "Linear"
    assert classes["model.norm"] is None


def test_layers_of_two_kinds_are_two_groups(tmp_path):
    change = {f"{DOWN}.{suffix}": None for suffix in ("weight", "weight_scale", "weight_scale_2")}
    path = make_dense(tmp_path / "x", layers=2, change=change | {f"{DOWN}.weight": floats(HIDDEN, INTER)})
    found = [g for g in halfbyte.inspect(path).facts["groups"] if g["name"].endswith("down_proj")]
    assert sorted((g["kind"], g["modules"]) for g in found) == [("dense", 1), ("nvfp4", 1)]


def test_kv_scales_are_their_own(tmp_path):
    report = halfbyte.inspect(GOLDENS["modelopt_llama_mixed_fp8_nvfp4_tied"])
    assert group(report, "model.layers.*.self_attn.k_proj")["has"] == ["input_scale", "k_scale", "scale"]
    change = {"model.layers.0.self_attn.k_scale": np.ones(1, BF16)}
    report = halfbyte.inspect(make_dense(tmp_path / "x", change=change))
    assert group(report, "model.layers.*.self_attn.k_scale")["kind"] == "other"


def test_what_the_config_claims(tmp_path):
    section = modelopt_section("NVFP4", kv_cache_scheme={"num_bits": 8, "type": "float"})
    facts = halfbyte.inspect(make_dense(tmp_path / "x", section=section)).facts
    assert facts["config"] == {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache": "FP8",
        "model_type": "llama",
    }


def test_findings_of_headers_are_shown(tmp_path):
    """A single-level file says so; inspect still does its job."""
    path = make_dense(tmp_path / "x", change={f"{Q}.weight_scale_2": None})
    report = halfbyte.inspect(path)
    assert [(f.code, f.tensor) for f in report.findings] == [("HB105", f"{Q}.weight")]
    ran = call("inspect", path)
    assert ran.rc == 0
    assert "single-level" in ran.stderr
    assert f"{Q}.weight" in ran.stderr


def test_nothing_to_say_of_a_dense_checkpoint(tmp_path):
    report = halfbyte.inspect(make_float(tmp_path / "x"))
    assert (report.facts["dialect"], report.findings) == ("dense", ())
    assert set(report.facts["kinds"]) == {"dense"}


def test_an_empty_file(tmp_path):
    save(tmp_path / "model.safetensors", {})
    facts = halfbyte.inspect(tmp_path).facts
    assert (facts["tensors"], facts["total"]["bits_per_parameter"]) == (0, None)
    assert call("inspect", tmp_path).rc == 0


def test_shards(tmp_path):
    tensors = others() | named("modelopt", "a", nvfp4(16, 32))
    names = list(tensors)
    save_sharded(tmp_path / "x", [{n: tensors[n] for n in names[i::2]} for i in range(2)])
    facts = halfbyte.inspect(tmp_path / "x").facts
    assert [f["name"] for f in facts["files"]] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert facts["tensors"] == len(tensors)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"include": ["*.q_proj"]}, {"model.layers.*.self_attn.q_proj"}),
        (
            {"include": ["re:.*mlp"], "exclude": ["*up_proj"]},
            {"model.layers.*.mlp.down_proj", "model.layers.*.mlp.gate_proj"},
        ),
        ({"include": ["nothing"]}, set()),
    ],
)
def test_include_and_exclude(tmp_path, options, names):
    path = make_dense(tmp_path / "x")
    assert {g["name"] for g in halfbyte.inspect(path, **options).facts["groups"]} == names
    flags = [f"--{key}={pattern}" for key, patterns in options.items() for pattern in patterns]
    assert call("inspect", path, *flags).rc == 0


def test_long_lists_of_excluded_names_cost_little(tmp_path):
    """5,000 modules and 400 names, a tenth of what large exports list: their product is not walked."""
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{p}_proj"
        for i in range(10)
        for e in range(167)
        for p in ("gate", "up", "down")
    ]
    header, end = {}, 0
    for suffix, dtype, shape, nbytes in (
        ("weight_scale_2", "F32", [], 4),
        ("weight_scale", "F8_E4M3", [1, 1], 1),
        ("weight", "U8", [1, 8], 8),
    ):
        for name in names:
            header[f"{name}.{suffix}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
    raw_safetensors(tmp_path / "model.safetensors", header, bytes(end))
    ignore = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(100) for part in "qkvo"]
    ignore += [f"model.layers.{i}.{part}*" for i in range(100) for part in ("self_attn", "linear_attn")]
    write_json(tmp_path / "config.json", {"quantization_config": modelopt_section(ignore=ignore)})
    started = time.process_time()
    assert halfbyte.inspect(tmp_path).facts["kinds"]["nvfp4"]["modules"] == len(names)
    assert time.process_time() - started < 2.5


LAYERS, SHARDS = 50, 200


def make_many_tensors(folder):
    """100,200 tensors in 200 shards, which are holes but for their headers."""
    table, total = {}, 0
    for i in range(SHARDS):
        layer, quarter = f"model.layers.{i // 4}", i % 4
        tensors = [Stored(f"{layer}.norm_{quarter}_{part}.weight", "BF16", (4096,)) for part in "abc"]
        for j in range(166):
            stem = f"{layer}.mlp.experts.{quarter * 55 + j // 3}.{('gate', 'up', 'down')[j % 3]}_proj"
            stem = stem if j < 165 else f"{layer}.mlp.shared_{quarter}.gate_proj"
            n, k = (4096, 1536) if j % 3 == 2 else (1536, 4096)
            tensors += [Stored(f"{stem}.weight", "U8", (n, k // 2))]
            tensors += [
                Stored(f"{stem}.weight_scale", "F8_E4M3", (n, k // 16)),
                Stored(f"{stem}.weight_scale_2", "F32", ()),
            ]
        path = folder / f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors"
        head, size = encode_header(tensors, {"format": "pt"}), sum(byte_count(t.dtype, t.shape) for t in tensors)
        path.write_bytes(head)
        os.truncate(path, len(head) + size)
        table |= dict.fromkeys((t.name for t in tensors), path.name)
        total += size
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": table})
    section = modelopt_section(ignore=["lm_head", "*.mlp.gate", "model.layers.0.self_attn*"])
    write_json(folder / "config.json", {"num_hidden_layers": LAYERS, "quantization_config": section})
    return len(table)


MANY = """
import json, pathlib, sys, time
import halfbyte
def least(call, times):
    seconds = []
    for _ in range(times):
        start = time.process_time()  # not the clock: others may use the machine
        result = call()
        seconds.append(time.process_time() - start)
    return result, min(seconds)
report, seconds = least(lambda: halfbyte.inspect(sys.argv[1]), 2)
peak = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024
texts = [f.open("rb").read(300_000) for f in pathlib.Path(sys.argv[1]).glob("*.safetensors")]
texts = [text[8 : 8 + int.from_bytes(text[:8], "little")] for text in texts]
_, parsing = least(lambda: [json.loads(text) for text in texts], 5)
print(json.dumps(report.json() | {"seconds": seconds, "peak": peak, "parsing": parsing}))
"""


def test_a_hundred_thousand_tensors(tmp_path):
    """Time is measured beside that of parsing the same headers, memory in a fresh process."""
    count = make_many_tensors(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MANY, tmp_path], env=environment(), capture_output=True, check=True, timeout=60
    )
    facts = json.loads(done.stdout)
    assert (facts["tensors"], count, len(facts["files"])) == (100_200, 100_200, SHARDS)
    assert facts["findings"] == []
    assert {kind: sums["modules"] for kind, sums in facts["kinds"].items()} == {"nvfp4": 33_200, "dense": 600}
    assert facts["peak"] < 200e6
    assert facts["seconds"] < 10 * facts["parsing"], (facts["seconds"], facts["parsing"])


# --- statistics of the scales


def with_scales(tmp_path, scales, codes=None, scale2=2.0**-12):
    scales = np.array(scales, np.uint8)
    roles = nvfp4(len(scales), scales.shape[1] * 16, scale2=scale2) | {"scales": scales.view(E4M3)}
    if codes is not None:
        roles["codes"] = codes
    save(tmp_path / "model.safetensors", named("modelopt", "a", roles))
    (row,) = halfbyte.inspect(tmp_path, stats=True).facts["stats"]
    return row


def test_stats(tmp_path):
    row = with_scales(tmp_path, [[0x00, 0x01, 0x07, 0x08], [0x7E, 0x7E, 0x7E, 0x38]])
    assert row["name"] == "a"
    assert row["shape"] == [2, 64]
    assert (row["scale2"], row["input_scale"]) == (2.0**-12, None)
    assert (row["zero"], row["subnormal"], row["largest"]) == (1 / 8, 2 / 8, 3 / 8)
    assert (row["largest_scale"], row["amax"]) == (448, 448 * 6 * 2.0**-12)


def test_stats_tell_whether_scale2_suits_all_blocks(tmp_path):
    """In units of scale2: no block above 2688, none below 2688 / 28672."""
    codes = np.full((1, 16), 0x77, np.uint8)
    fits, lost = with_scales(tmp_path, [[0x7E, 0x08]], codes), with_scales(tmp_path, [[0x7E, 0x07]], codes)
    assert (fits["window"], fits["in_window"]) == ([2688, 28672 * 6 / 64], True)
    assert (lost["window"], lost["in_window"]) == ([2688, 28672 * 6 * 7 / 512], False)


def test_stats_of_goldens():
    for name, path in GOLDENS.items():
        rows = halfbyte.inspect(path, stats=True).facts["stats"]
        assert len(rows) == KINDS[name]["nvfp4"]
        assert all(row["zero"] == 0 for row in rows)
    ran = call("inspect", GOLDENS["modelopt_llama_nvfp4"], "--stats")
    assert ran.rc == 0
    assert "448 %" in ran.stdout
    assert "rtn" in ran.stdout


ZERO = np.zeros((1, 16), np.uint8)
GUESSES = {
    "rtn": ([[0x7E, 0x30]], None, "rtn"),
    "four over six": ([[0x78, 0x30]], None, "four-over-six"),
    "384 is four over six too": ([[0x7C, 0x30]], None, "four-over-six"),
    "shared": ([[0x70, 0x30]], None, "shared"),
    "zero blocks of ModelOpt": ([[0x7E, 0x38]], "second", "ModelOpt"),
    "zero blocks of compressed-tensors": ([[0x7E, 0x20]], "second", "compressed-tensors"),
    "zero blocks of torchao": ([[0x7E, 0x08]], "second", "torchao"),
    "zero blocks of comfy-kitchen": ([[0x7E, 0x00]], "second", "comfy-kitchen"),
    "negative zeros are zeros": ([[0x7E, 0x38]], "negative", "ModelOpt"),
}


@pytest.mark.parametrize("case", GUESSES)
def test_guessed_recipe(tmp_path, case):
    scales, blank, expected = GUESSES[case]
    codes = np.full((1, 16), 0x77, np.uint8)
    if blank:
        codes[:, 8:] = 0x88 if blank == "negative" else 0
    assert expected in with_scales(tmp_path, scales, codes)["recipe"]


def test_stats_of_a_share_of_underflow(tmp_path):
    """Blocks that a too large scale2 has flattened: scale 00."""
    assert with_scales(tmp_path, [[0, 0, 0, 0x7E]])["zero"] == 0.75


@pytest.mark.parametrize("shape", [(0, 16), (4, 0)])
def test_stats_of_nothing(tmp_path, shape):
    n, k = shape
    roles = {"codes": np.zeros((n, k // 2), np.uint8), "scales": np.zeros((n, k // 16), E4M3), "scale2": np.float32(1)}
    save(tmp_path / "model.safetensors", named("modelopt", "a", roles))
    ran = call("inspect", tmp_path, "--stats")
    assert (ran.rc, ran.stderr) == (0, "")


@pytest.mark.parametrize("value", [np.nan, np.inf, 0, -1])
def test_stats_of_odd_numbers_are_json(tmp_path, value):
    """NaN and Infinity are not JSON."""
    save(tmp_path / "model.safetensors", named("modelopt", "a", nvfp4(4, 32, scale2=value)))
    ran = call("inspect", tmp_path, "--stats", "--json")
    assert ran.rc in (0, 2)
    assert ran.document["command"] == "inspect" if ran.rc == 0 else ran.document["error"]


# --- on the terminal


def test_the_document(tmp_path):
    document = call("inspect", make_dense(tmp_path / "x"), "--json").document
    assert {key: document[key] for key in ("schema", "tool", "version", "command", "ok", "findings")} == {
        "schema": 1,
        "tool": "halfbyte",
        "version": halfbyte.__version__,
        "command": "inspect",
        "ok": True,
        "findings": [],
    }
    assert document["kinds"]["nvfp4"]["modules"] == len(LINEARS)
    assert CONFIG["vocab_size"] == VOCAB


def test_the_table_is_not_folded_where_there_is_no_terminal(tmp_path):
    ran = run_cli("inspect", make_dense(tmp_path / "x", input_scale=True))
    assert ran.rc == 0
    assert ran.stderr == ""
    lines = ran.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("model.layers.*.self_attn.q_proj")]
    for cell in ("nvfp4", "32x32", "4.5625", "input_scale"):
        assert cell in line
    assert "\x1b" not in ran.stdout


def test_fp8_is_named(tmp_path):
    tensors = {f"a.{k}": v for k, v in fp8(16, 32).items()}
    save(tmp_path / "model.safetensors", tensors)
    assert group(halfbyte.inspect(tmp_path), "a")["kind"] == "fp8"
