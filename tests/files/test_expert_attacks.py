"""Checkpoints with experts that mislead: stored twice, without an order, empty, huge, or rewritten between two runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    Raw,
    call,
    check_failure,
    expert_weights,
    leftovers,
    raw_safetensors,
    run_cli,
    save,
    save_sharded,
    split_experts,
    stacked_experts,
    tensors_of,
    write_json,
)
from halfbyte.experts import METADATA, encode_stacks
from halfbyte.modules import Stack

P = "model.layers.0.mlp.experts"
E, INTER, H = 3, 48, 32
EACH = {"scale2": lambda e, i: 2.0 ** -(9 + e), "input_scale": lambda e, i: 0.25 * (e + 1)}


def make(path, tensors, kind="qwen3_moe", metadata=None):
    path.mkdir(parents=True, exist_ok=True)
    save(path / "model.safetensors", tensors, {"format": "pt"} | (metadata or {}))
    if kind:
        section = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
        write_json(path / "config.json", {"model_type": kind, "hidden_size": H, "quantization_config": section})
    return path


def stack(experts: int, n: int, k: int, columns: bool = False, **more):
    """A stack of gate and up, in NVFP4."""
    codes, scales = ((experts, k // d, n) if columns else (experts, n, k // d) for d in (2, 16))
    return {
        f"{P}.gate_up_proj": np.full(codes, 0x31, np.uint8),
        f"{P}.gate_up_proj_weight_scale": np.full(scales, 0x38, np.uint8).view(E4M3),
        f"{P}.gate_up_proj_weight_scale_2": np.full(experts, 0.5, np.float32),
    } | more


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_was_rewritten_is_read_again(workers, tmp_path):
    for i in range(3):
        made = expert_weights(1, H, H, ("down_proj",), scale2=lambda e, i: 2.0**-9)
        made[0, "down_proj"]["codes"] ^= np.uint8(i)
        src = make(tmp_path / "src", stacked_experts(P, made, columns=True))
        halfbyte.convert(src, tmp_path / f"{i}", to="modelopt", experts="split", prove=True, workers=workers)
        assert tensors_of(tmp_path / f"{i}")[f"{P}.0.down_proj.weight"].data == made[0, "down_proj"]["codes"].tobytes()


@pytest.mark.parametrize("form", ["split", "stacked", "stacked-rows", "stacked-columns"])
def test_a_layer_that_is_stored_twice(form, tmp_path):
    again = expert_weights(E, INTER, H, ("gate_proj", "up_proj"), **EACH)
    src = make(tmp_path / "src", stacked_experts(P, expert_weights(E, INTER, H, **EACH)) | split_experts(P, again))
    ran = call("convert", src, tmp_path / "out", "--to", "modelopt", "--experts", form)
    check_failure(ran, 2, f"{P}.0.gate_proj", f"{P}.gate_up_proj")
    assert leftovers(tmp_path, "src") == []


@pytest.mark.parametrize("number", ["01", "\u0661", "9" * 5000])
def test_names_that_are_not_numbers_of_experts(number, tmp_path):
    split = split_experts(P, expert_weights(2, INTER, H, **EACH))
    odd = {n.replace(".1.", f".{number}."): t for n, t in split.items() if ".1." in n}
    src = make(tmp_path / "src", split | odd)
    halfbyte.convert(src, tmp_path / "out", to="modelopt", experts="stacked", prove=True)
    found = tensors_of(tmp_path / "out")
    assert found[f"{P}.gate_up_proj"].shape == (2, 2 * INTER, H // 2)
    assert odd.keys() <= found.keys()


def test_the_last_of_a_hundred_thousand_experts(tmp_path):
    split = split_experts(P, expert_weights(2, INTER, H, **EACH))
    src = make(tmp_path / "src", {n.replace(".1.", ".99999."): t for n, t in split.items()})
    (found,) = (f for f in halfbyte.verify(src).findings if f.code == "HB129")
    assert found.got == "without 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 99988 more"
    ran = call("convert", src, tmp_path / "out", "--to", "modelopt", "--experts", "stacked")
    check_failure(ran, 2, "got 2 experts, without 1")


@pytest.mark.parametrize("role", ["scale2", "input_scale"])
def test_gate_and_up_with_a_scale_each_in_no_known_order(role, tmp_path):
    numbers = {"scale2": lambda e, i: 2.0**-9} | {role: lambda e, i: 2.0 ** -(9 + e + i)}
    made = expert_weights(E, INTER, H, **numbers)
    tensors = stacked_experts(P, made, halves=True)
    if role == "input_scale":
        tensors[f"{P}.gate_up_proj_weight_scale_2"] = np.full(E, 2.0**-9, np.float32)
    src = make(tmp_path / "src", tensors, kind=None)
    name = f"{P}.gate_up_proj_{'weight_scale_2' if role == 'scale2' else role}"
    for form in ("split", "stacked", "stacked-columns"):
        ran = call("convert", src, tmp_path / "out", "--to", "modelopt", "--experts", form)
        check_failure(ran, 2, name, "--gate-up")
    if role == "scale2":
        check_failure(call("dequantize", src, tmp_path / "out"), 2, name, "--gate-up")
    assert leftovers(tmp_path, "src") == []
    ran = call(
        "convert",
        src,
        tmp_path / "out",
        "--to",
        "modelopt",
        "--experts",
        "split",
        "--gate-up",
        "concatenated",
        "--quiet",
    )
    assert ran.rc == 0
    assert halfbyte.verify(tmp_path / "out").ok


@pytest.mark.parametrize("n", [1, 3])
def test_gate_and_up_of_an_odd_number_of_rows_stay_together(n, tmp_path):
    src = make(tmp_path / "src", stack(2, n, 16))
    halfbyte.convert(src, tmp_path / "split", to="modelopt", experts="split", prove=True)
    assert tensors_of(tmp_path / "split")[f"{P}.1.gate_up_proj.weight"] == Raw("U8", (n, 8), b"\x31" * 8 * n)
    halfbyte.convert(src, tmp_path / "stacked", to="modelopt", experts="stacked-columns", prove=True)
    assert tensors_of(tmp_path / "stacked")[f"{P}.gate_up_proj"].shape == (2, 8, n)
    halfbyte.dequantize_checkpoint(src, tmp_path / "dense")
    assert tensors_of(tmp_path / "dense")[f"{P}.gate_up_proj"].shape == (2, n, 16)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(0, 32, 32), (2, 0, 32), (2, 32, 0), (0, 0, 0)])
def test_empty_stacks(shape, columns, tmp_path):
    beside = {"a.weight": np.ones((16, 32), BF16)}
    src = make(tmp_path / "src", stack(*shape, columns, **beside))
    for command in ("dequantize", "convert"):
        more = ["--to", "modelopt", "--experts", "split"] if command == "convert" else []
        check_failure(call(command, src, tmp_path / "out", *more), 2, f"{P}.gate_up_proj", "at least one expert")
    assert [f.code for f in halfbyte.verify(src).findings if f.severity == "error"] == ["HB102"]
    dense = make(tmp_path / "dense", {f"{P}.gate_up_proj": np.zeros(shape, BF16)} | beside)
    halfbyte.quantize_checkpoint(dense, tmp_path / "out")
    assert tensors_of(tmp_path / "out")[f"{P}.gate_up_proj"] == Raw("BF16", shape, b"")


def test_a_trillion_experts_without_a_byte(tmp_path):
    many = 10**12
    entries = {
        "dense": {f"{P}.down_proj": ("BF16", [many, 0, 5])},
        "nvfp4": {f"{P}.down_proj": ("U8", [many, 0, 8]), f"{P}.down_proj_weight_scale": ("F8_E4M3", [many, 0, 1])},
        "mxfp4": {f"{P}.down_proj_blocks": ("U8", [many, 0, 1, 16]), f"{P}.down_proj_scales": ("U8", [many, 0, 1])},
    }
    for kind, tensors in entries.items():
        path = tmp_path / kind
        path.mkdir()
        header = {n: {"dtype": d, "shape": s, "data_offsets": [0, 0]} for n, (d, s) in tensors.items()}
        raw_safetensors(path / "model.safetensors", header)
        write_json(path / "config.json", {"model_type": "qwen3_moe", "hidden_size": 5})
        for args in (
            ["diff", path, path],
            ["quantize", path, tmp_path / "out"],
            ["dequantize", path, tmp_path / "out"],
        ):
            ran = run_cli(*args, timeout=20)
            assert ran.rc in (0, 2), ran
            assert "internal error" not in ran.stderr
    assert leftovers(tmp_path, *entries) == []


def test_many_stacks_and_what_the_metadata_states_of_them(tmp_path):
    """Seconds, not the square of them."""
    count = 20_000
    names = [f"m.layers.{i}.experts.down_proj" for i in range(count)]
    header = {n: {"dtype": "BF16", "shape": [0, 32, 16], "data_offsets": [0, 0]} for n in names}
    stated = {"halfbyte.experts": json.dumps({n: {"columns": True} for n in names})}
    for i, entries in enumerate(({"__metadata__": stated} | header, {f"m.experts.s{n}": t for n, t in header.items()})):
        path = tmp_path / f"{i}"
        path.mkdir()
        raw_safetensors(path / "model.safetensors", entries)
        write_json(path / "config.json", {"model_type": "qwen3_moe", "hidden_size": 32})
        code = f"import halfbyte; print(len(halfbyte.open({str(path)!r}).modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15, check=True)
        assert int(done.stdout) == count


def test_each_shard_states_how_its_own_stacks_lie(tmp_path):
    parents = [f"model.layers.{i}.mlp.experts" for i in range(3)]
    made = expert_weights(E, INTER, H, **EACH)
    split = {n: t for p in parents for n, t in split_experts(p, made).items()}
    shards = [{n: t for n, t in split.items() if n.startswith(p)} for p in parents]
    save_sharded(tmp_path / "src", shards)
    section = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    write_json(tmp_path / "src" / "config.json", {"model_type": "gpt_oss", "quantization_config": section})
    halfbyte.convert(tmp_path / "src", tmp_path / "stacked", to="modelopt", experts="stacked")
    (tmp_path / "stacked" / "config.json").unlink()
    tables = [json.loads(s.metadata[METADATA]) for s in halfbyte.open(tmp_path / "stacked").shards]
    assert [len(table) for table in tables] == [2, 2, 2]
    halfbyte.convert(tmp_path / "stacked", tmp_path / "back", to="modelopt", experts="split")
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / "src")


@pytest.mark.parametrize("parent", ["model.layers.0.moe", "model.layers.0.mlp.shared_experts"])
def test_stacks_of_another_parent_stay_stacks(parent, tmp_path):
    made = expert_weights(E, INTER, H, **EACH)
    stated = encode_stacks({f"{parent}.gate_up_proj": Stack(False, "concatenated")})
    src = make(tmp_path / "src", stacked_experts(parent, made), metadata=stated)
    halfbyte.convert(src, tmp_path / "out", to="modelopt", experts="stacked-columns", prove=True)
    assert tensors_of(tmp_path / "out").keys() == tensors_of(src).keys()
    ran = call("convert", src, tmp_path / "high", "--to", "modelopt", "--nibble-order", "high", "--quiet")
    assert ran.rc == 0
    assert tensors_of(tmp_path / "high").keys() == tensors_of(src).keys()


def test_stats_of_a_stack_that_is_not_one_weight(tmp_path):
    """Gate and up have scales of their own, in an order that is not known."""
    made = expert_weights(E, INTER, H, scale2=lambda e, i: 2.0 ** -(9 + e + i), input_scale=lambda e, i: 0.5 + e + i)
    for columns in (False, True):
        tensors = stacked_experts(P, made, columns=columns, halves=True)
        src = make(tmp_path / f"{columns}", tensors, kind=None)
        _, gate_up = halfbyte.inspect(src, stats=True).facts["stats"]
        assert (gate_up["shape"], gate_up["scale2"], gate_up["input_scale"]) == ([E, 2 * INTER, H], 2.0**-9, 3.5)


def test_a_dense_stack_has_the_name_of_dense_weights(tmp_path):
    made = expert_weights(E, INTER, H, ("down_proj",), scale2=lambda e, i: 0.5)
    dotted = stacked_experts(P, made, dotted=True)
    names = {"weight": "weight_packed", "weight_scale": "weight_scale", "weight_scale_2": "weight_global_scale"}
    tensors = {f"{P}.down_proj.{names[n.rpartition('.')[2]]}": t for n, t in dotted.items()}
    halfbyte.dequantize_checkpoint(make(tmp_path / "src", tensors), tmp_path / "out")
    assert list(tensors_of(tmp_path / "out")) == [f"{P}.down_proj.weight"]


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_quantized_stacks_that_are_not_quantized_again(kind, to, tmp_path):
    """They are written as the layers that they hold, as all others are."""
    if kind == "fp8":
        data = np.full((2, H, INTER), 0x38, np.uint8).view(E4M3)
        experts = {f"{P}.down_proj": data, f"{P}.down_proj_weight_scale": np.float32([0.5, 2])}
    else:
        codes, scales = np.full((2, H, 1, 16), 0x31, np.uint8), np.full((2, H, 1), 127, np.uint8)
        experts = {f"{P}.down_proj_blocks": codes, f"{P}.down_proj_scales": scales}
    src = make(tmp_path / "src", experts | {"a.q_proj.weight": np.ones((16, 32), BF16)})
    halfbyte.quantize_checkpoint(src, tmp_path / "out", to=to, ignore=["*experts*"])
    assert halfbyte.verify(tmp_path / "out").ok
    with halfbyte.open(tmp_path / "out") as checkpoint:
        assert {m.name: m.kind for m in checkpoint.modules} == {
            "a.q_proj": "nvfp4",
            f"{P}.0.down_proj": kind,
            f"{P}.1.down_proj": kind,
        }


def test_an_input_scale_of_halves_for_a_stack_that_has_none(tmp_path):
    made = expert_weights(E, H, H, ("down_proj",), scale2=lambda e, i: 0.5)
    odd = {f"{P}.down_proj_input_scale": np.ones((E, 2), np.float32)}
    src = make(tmp_path / "src", stacked_experts(P, made) | odd)
    assert "HB109" in {f.code for f in halfbyte.verify(src).findings}


def test_experts_without_rows_stay_single(tmp_path):
    made = expert_weights(E, 0, H, ("up_proj",), scale2=lambda e, i: 0.5)
    src = make(tmp_path / "src", split_experts(P, made))
    report = halfbyte.convert(src, tmp_path / "out", to="modelopt", experts="stacked-columns", prove=True)
    assert report.facts["single"] == {f"{P}.*.up_proj": "no rows or columns"}
    assert tensors_of(tmp_path / "out") == tensors_of(src)


@pytest.mark.parametrize("scale", [None, np.ones(3, np.float32)])
@pytest.mark.parametrize("shape", [(16, 32), (2, 0, 32), (2, 16, 32)])
def test_a_broken_fp8_weight_is_refused_even_where_it_stays(shape, scale, tmp_path):
    stem = "." if len(shape) == 2 else "_"
    name = f"{P}.down_proj"
    tensors = {f"{name}.weight" if stem == "." else name: np.full(shape, 0x38, np.uint8).view(E4M3)}
    tensors |= {} if scale is None and stem == "." else {f"{name}{stem}weight_scale": np.ones(3, np.float32)}
    src = make(tmp_path / "src", tensors | {"a.q_proj.weight": np.ones((16, 32), BF16)})
    check_failure(call("quantize", src, tmp_path / "out", "--ignore", "*experts*"), 2, name)
    assert leftovers(tmp_path, "src") == []


def test_dense_stacks_have_the_names_of_models(tmp_path):
    parent = "model.layers.0.block_sparse_moe.experts"
    made = expert_weights(E, INTER, H, ("w1", "w3", "w2"), scale2=lambda e, i: 0.5)
    src = make(tmp_path / "src", stacked_experts(parent, made), kind="mixtral")
    halfbyte.dequantize_checkpoint(src, tmp_path / "out")
    assert set(tensors_of(tmp_path / "out")) == {f"{parent}.gate_up_proj", f"{parent}.down_proj"}


@pytest.mark.parametrize("entry", [{"x": "\udada"}, {"\udada": "x"}])
def test_metadata_that_is_not_text(entry, tmp_path):
    """Half of a surrogate pair, which no file can hold but as an escape."""
    body = {"a.weight": {"dtype": "BF16", "shape": [16, 16], "data_offsets": [0, 512]}}
    raw_safetensors(tmp_path / "model.safetensors", {"__metadata__": entry} | body, b"\0" * 512)
    check_failure(call("quantize", tmp_path / "model.safetensors", tmp_path / "out"), 2, "__metadata__")
    assert leftovers(tmp_path, "model.safetensors") == []


def test_a_config_that_is_not_text_is_carried(tmp_path):
    src = make(tmp_path / "src", stacked_experts(P, expert_weights(1, INTER, H, **EACH)))
    config = {"model_type": "qwen3_moe", "odd": "\udada\u00e9"}
    (src / "config.json").write_text(json.dumps(config))
    halfbyte.convert(src, tmp_path / "out", to="modelopt", experts="split")
    written = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert {key: written[key] for key in config} == config


def test_a_directory_whose_name_is_not_text(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    made = expert_weights(1, INTER, H, **EACH)
    folder.mkdir()
    make(tmp_path / "src", stacked_experts(P, made)).rename(folder / "src")
    halfbyte.convert(folder / "src", folder / "out", to="modelopt", experts="split")
    assert leftovers(folder) == ["out", "src"]
