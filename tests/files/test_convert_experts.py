"""Experts split and stacked, and MXFP4 layers carried as NVFP4: by the bytes, there and back."""

from __future__ import annotations

import contextlib
import json
import random

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    GATE_UP,
    GOLDENS,
    Raw,
    call,
    check_failure,
    expert_weights,
    joined,
    leftovers,
    listing,
    mxfp4,
    named,
    read_json,
    save,
    save_sharded,
    split_experts,
    stacked_experts,
    tensors_of,
    write_json,
)
from halfbyte.errors import FormatError, HalfbyteError, UsageError
from halfbyte.experts import encode_stacks
from halfbyte.modules import Stack
from halfbyte.weight import Mxfp4Weight, Weight

P = "model.layers.0.mlp.experts"
E, INTER, HIDDEN = 4, 48, 32
PARTS = ("gate_proj", "up_proj", "down_proj")


def section(**more):
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"} | more}


def make(path, tensors, config=None, metadata=None):
    path.mkdir(parents=True)
    save(path / "model.safetensors", tensors, {"format": "pt"} | (metadata or {}))
    write_json(path / "config.json", section() | {"model_type": "qwen3_moe", "hidden_size": HIDDEN} | (config or {}))
    return path


def convert(src, dst, to="modelopt", **options):
    return halfbyte.convert(src, dst, to=to, prove=True, **options)


def raw(tensors):
    """Name -> Raw of arrays."""
    found = {}
    for name, t in tensors.items():
        t = np.asarray(t)
        dtype = {"uint8": "U8", "float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16"}[t.dtype.name]
        found[name] = Raw(dtype, t.shape, t.tobytes())
    return found


EACH = {"scale2": lambda e, i: 2.0 ** -(9 + e), "input_scale": lambda e, i: 0.25 * (e + 1 + 7 * (i == 2))}


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("order", GATE_UP)
def test_stacks_are_split(columns, order, tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    stacked = stacked_experts(P, made, columns=columns, order=order)
    metadata = encode_stacks({f"{P}.gate_up_proj": Stack(columns, order)})
    src = make(tmp_path / "src", stacked | {"lm_head.weight": np.ones((64, HIDDEN), BF16)}, metadata=metadata)
    report = convert(src, tmp_path / "split", experts="split")
    expected = raw(split_experts(P, made) | {"lm_head.weight": np.ones((64, HIDDEN), BF16)})
    assert tensors_of(tmp_path / "split") == expected
    assert halfbyte.verify(tmp_path / "split").findings == ()
    assert {t["tensor"] for t in report.facts["tensors"]} == {*stacked, "lm_head.weight"}
    ct = convert(src, tmp_path / "ct", "compressed-tensors", experts="split")
    assert tensors_of(tmp_path / "ct") == raw(
        split_experts(P, made, "compressed-tensors") | {"lm_head.weight": np.ones((64, HIDDEN), BF16)}
    )
    assert ct.facts["proven"] == report.facts["proven"] == E * 3 * 4 + 1


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_experts_are_stacked(dialect, columns, tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    src = make(tmp_path / "src", split_experts(P, made, dialect))
    form = "stacked-columns" if columns else "stacked-rows"
    convert(src, tmp_path / "stacked", experts=form)
    assert tensors_of(tmp_path / "stacked") == raw(stacked_experts(P, made, columns=columns))
    convert(tmp_path / "stacked", tmp_path / "back", dialect, experts="split")
    assert tensors_of(tmp_path / "back") == tensors_of(src)
    diff = halfbyte.diff(src, tmp_path / "stacked")
    assert diff.facts["different"] == 0


def test_gate_and_up_with_a_scale_each(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, scale2=lambda e, i: 2.0 ** -(9 + e + i), input_scale=lambda e, i: 0.5)
    src = make(tmp_path / "src", split_experts(P, made))
    convert(src, tmp_path / "stacked", experts="stacked")
    found = tensors_of(tmp_path / "stacked")
    assert found[f"{P}.gate_up_proj_weight_scale_2"].shape == (E, 2)
    assert found[f"{P}.gate_up_proj_input_scale"].shape == (E,)
    halves = stacked_experts(P, made, halves=True)
    assert found[f"{P}.gate_up_proj_weight_scale_2"] == raw(halves)[f"{P}.gate_up_proj_weight_scale_2"]
    convert(tmp_path / "stacked", tmp_path / "back", experts="split")
    assert tensors_of(tmp_path / "back") == tensors_of(src)


def test_reciprocals_survive_stacks(tmp_path):
    """From compressed-tensors into a stack and back, for divisors of which one in six has no float32 reciprocal."""
    rng = np.random.default_rng(3)
    numbers = {(e, i): float(rng.uniform(1e-4, 1e-3)) for e in range(E) for i in range(3)}
    made = expert_weights(E, INTER, HIDDEN, scale2=lambda e, i: numbers[e, i], input_scale=lambda e, i: numbers[e, i])
    for dialect, other in (("compressed-tensors", "modelopt"), ("modelopt", "compressed-tensors")):
        src = make(tmp_path / dialect, split_experts(P, made, dialect))
        stacked, back = tmp_path / f"{dialect}-s", tmp_path / f"{dialect}-b"
        convert(src, stacked, experts="stacked")
        convert(stacked, back, dialect, experts="split")
        assert tensors_of(back) == tensors_of(src)
        there, again = tmp_path / f"{dialect}-o", tmp_path / f"{dialect}-a"
        convert(stacked, there, other, experts="split")
        convert(there, again, dialect)
        assert tensors_of(again) == tensors_of(src)


def test_names_of_mixtral_and_of_models_without_a_gate(tmp_path):
    for i, parts in enumerate((("w1", "w3", "w2"), ("up_proj", "down_proj"))):
        parent = "model.layers.0.block_sparse_moe.experts"
        made = expert_weights(E, INTER, HIDDEN, parts, **EACH)
        src = make(tmp_path / f"{i}", split_experts(parent, made), {"model_type": "mixtral"})
        convert(src, tmp_path / f"{i}s", experts="stacked")
        assert tensors_of(tmp_path / f"{i}s") == raw(stacked_experts(parent, made))
        convert(tmp_path / f"{i}s", tmp_path / f"{i}b", experts="split")
        assert tensors_of(tmp_path / f"{i}b") == tensors_of(src)


@pytest.mark.parametrize(
    ("kind", "columns", "order"),
    [("gpt_oss", True, "interleaved"), ("llama4_text", True, "concatenated"), ("qwen3_moe", False, "concatenated")],
)
def test_stacks_lie_as_the_model_has_them(kind, columns, order, tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    src = make(tmp_path / "src", split_experts(P, made), {"model_type": kind})
    convert(src, tmp_path / "stacked", experts="stacked")
    assert tensors_of(tmp_path / "stacked") == raw(stacked_experts(P, made, columns=columns, order=order))


def test_the_order_of_gate_and_up_is_stated(tmp_path):
    """So that the way back needs no config."""
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    src = make(tmp_path / "src", split_experts(P, made), {"model_type": "gpt_oss"})
    convert(src, tmp_path / "stacked", experts="stacked")
    (tmp_path / "stacked" / "config.json").unlink()
    convert(tmp_path / "stacked", tmp_path / "back", experts="split")
    assert tensors_of(tmp_path / "back") == tensors_of(src)
    metadata = halfbyte.open(tmp_path / "stacked").shards[0].metadata
    assert json.loads(metadata["halfbyte.experts"]) == {
        f"{P}.gate_up_proj": {"gate_up": "interleaved", "columns": True},
        f"{P}.down_proj": {"columns": True},
    }
    convert(tmp_path / "stacked", tmp_path / "sharded", max_shard_size="2KB")
    convert(tmp_path / "sharded", tmp_path / "again", experts="split")
    assert dict(tensors_of(tmp_path / "again").items()) == tensors_of(src)


def test_biases_and_dense_experts(tmp_path):
    rng = np.random.default_rng(0)
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    shapes = {part: (HIDDEN, INTER) if part == "down_proj" else (INTER, HIDDEN) for part in PARTS}
    other = "model.layers.1.mlp.experts"
    dense = {f"{other}.{e}.{p}.weight": rng.standard_normal(shapes[p]).astype(BF16) for e in range(E) for p in PARTS}
    bias = {f"{P}.{e}.{p}.bias": rng.standard_normal(shapes[p][0]).astype(BF16) for e in range(E) for p in PARTS}
    src = make(tmp_path / "src", split_experts(P, made) | bias | dense)
    for form, columns in (("stacked-rows", False), ("stacked-columns", True)):
        convert(src, tmp_path / form, experts=form)
        found = tensors_of(tmp_path / form)
        pairs = [[dense[f"{other}.{e}.{p}.weight"] for p in PARTS[:2]] for e in range(E)]
        stack = np.stack([joined(*pair, "concatenated") for pair in pairs])
        assert found[f"{other}.gate_up_proj"].data == (stack.swapaxes(1, 2) if columns else stack).tobytes()
        rows = np.stack([np.concatenate([bias[f"{P}.{e}.{p}.bias"] for p in PARTS[:2]]) for e in range(E)])
        assert found[f"{P}.gate_up_proj_bias"] == Raw("BF16", (E, 2 * INTER), rows.tobytes())
        convert(tmp_path / form, tmp_path / f"{form}-back", experts="split")
        assert tensors_of(tmp_path / f"{form}-back") == tensors_of(src)
    ignored = read_json(tmp_path / "stacked-rows" / "hf_quant_config.json")["quantization"]["exclude_modules"]
    assert ignored == [other]


def test_experts_lie_in_several_shards(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    split = split_experts(P, made)
    names = list(split)
    random.Random(0).shuffle(names)
    src = tmp_path / "src"
    save_sharded(src, [{n: split[n] for n in names[i::3]} for i in range(3)])
    write_json(src / "config.json", section() | {"model_type": "qwen3_moe"})
    for workers in (1, 3):
        out = tmp_path / f"out{workers}"
        convert(src, out, experts="stacked", workers=workers)
        assert tensors_of(out) == raw(stacked_experts(P, made))
    assert listing(tmp_path / "out1") == listing(tmp_path / "out3")


def test_the_golden_mixture_of_experts(tmp_path):
    src = GOLDENS["modelopt_qwen3moe_w4a16"]
    convert(src, tmp_path / "stacked", experts="stacked")
    stacked = tensors_of(tmp_path / "stacked")
    assert stacked[f"{P}.gate_up_proj"].shape == (2, 64, 32)
    assert halfbyte.verify(tmp_path / "stacked").ok
    convert(tmp_path / "stacked", tmp_path / "back", experts="split")
    assert tensors_of(tmp_path / "back") == tensors_of(src)
    convert(tmp_path / "stacked", tmp_path / "ct", "compressed-tensors", experts="split")
    convert(tmp_path / "ct", tmp_path / "again", "modelopt")
    assert tensors_of(tmp_path / "again") == tensors_of(src)


# --- what is refused


def test_compressed_tensors_has_no_stacks(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    src = make(tmp_path / "src", stacked_experts(P, made))
    for args in ((), ("--experts", "stacked")):
        ran = call("convert", src, tmp_path / "out", "--to", "compressed-tensors", *args)
        check_failure(ran, 2, f"{P}.", "--experts split")
    assert leftovers(tmp_path, "src") == []


@pytest.mark.parametrize("gone", [0, 1, E - 1])
def test_missing_experts(gone, tmp_path):
    made = {key: roles for key, roles in expert_weights(E, INTER, HIDDEN, **EACH).items() if key != (gone, "up_proj")}
    src = make(tmp_path / "src", split_experts(P, made))
    check_failure(
        call("convert", src, tmp_path / "out", "--to", "modelopt", "--experts", "stacked"), 2, f"{P}.gate_up_proj"
    )
    assert leftovers(tmp_path, "src") == []


def test_unlike_experts(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    cases = {
        "shape": dict(
            named("modelopt", f"{P}.1.down_proj", expert_weights(1, 64, HIDDEN, **EACH)[0, "down_proj"]).items()
        ),
        "companion": {f"{P}.1.down_proj.input_scale": None},
        "kind": {f"{P}.1.down_proj.{s}": None for s in ("weight_scale", "weight_scale_2", "input_scale")}
        | {f"{P}.1.down_proj.weight": np.ones((HIDDEN, INTER), BF16)},
    }
    for case, change in cases.items():
        tensors = {n: t for n, t in (split_experts(P, made) | change).items() if t is not None}
        src = make(tmp_path / case, tensors)
        ran = call("convert", src, tmp_path / "out", "--to", "modelopt", "--experts", "stacked")
        check_failure(ran, 2, f"{P}.1.down_proj", "alike")
    assert leftovers(tmp_path, *cases) == []


def test_companions_that_no_expert_has_a_place_for(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    src = make(tmp_path / "src", split_experts(P, made) | {f"{P}.2.up_proj.odd": np.ones(3, np.float32)})
    check_failure(call("convert", src, tmp_path / "out", "--to", "modelopt", "--experts", "stacked"), 2, "odd")
    src = make(tmp_path / "s", stacked_experts(P, made) | {f"{P}.up_proj_odd": np.ones(3, np.float32)})
    convert(src, tmp_path / "o", experts="split")  # beside no stack: carried by its own name


def test_experts_of_a_kind_that_is_not_stacked_stay_single(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    row = {
        f"model.layers.1.mlp.experts.{e}.up_proj.{s}": t
        for e in range(E)
        for s, t in {"weight": np.ones((INTER, HIDDEN), E4M3), "weight_scale": np.ones(INTER, np.float32)}.items()
    }
    src = make(tmp_path / "src", split_experts(P, made) | row)
    report = convert(src, tmp_path / "out", experts="stacked")
    assert report.facts["single"] == {"model.layers.1.mlp.experts.*.up_proj": "FP8 with a scale for each row or block"}
    assert set(row) < set(tensors_of(tmp_path / "out"))


def test_fp8_experts_are_stacked(tmp_path):
    parent = "model.layers.1.mlp.experts"
    tensors = {}
    rng = np.random.default_rng(0)
    for e in range(E):
        tensors[f"{parent}.{e}.up_proj.weight"] = rng.integers(0, 0x7F, (INTER, HIDDEN), np.uint8).view(E4M3)
        tensors[f"{parent}.{e}.up_proj.weight_scale"] = np.float32(2.0**-e)
        tensors[f"{parent}.{e}.up_proj.input_scale"] = np.float32(1 + e)
    src = make(tmp_path / "src", tensors)
    for form in ("stacked-rows", "stacked-columns"):
        convert(src, tmp_path / form, experts=form)
        assert set(tensors_of(tmp_path / form)) == {
            f"{parent}.up_proj{s}" for s in ("", "_weight_scale", "_input_scale")
        }
        convert(tmp_path / form, tmp_path / f"{form}b", experts="split")
        assert tensors_of(tmp_path / f"{form}b") == tensors_of(src)


def test_unknown_choices(tmp_path):
    src = make(tmp_path / "src", split_experts(P, expert_weights(1, INTER, HIDDEN, **EACH)))
    for options in ({"experts": "both"}, {"mxfp4": "mxfp8"}):
        with pytest.raises(UsageError, match="unknown value"):
            halfbyte.convert(src, tmp_path / "out", to="modelopt", **options)


# --- MXFP4


def gpt_oss(path, low=118, high=130, **config):
    """A gpt-oss layer, and name -> Mxfp4Weight of its layers."""
    gate_up, down = mxfp4(E * 2 * INTER, HIDDEN, 0, low, high), mxfp4(E * HIDDEN, 64, 1, low, high)
    tensors = {
        f"{P}.gate_up_proj_blocks": gate_up["codes"].reshape(E, 2 * INTER, HIDDEN // 32, 16),
        f"{P}.gate_up_proj_scales": gate_up["scales"].reshape(E, 2 * INTER, HIDDEN // 32),
        f"{P}.gate_up_proj_bias": np.arange(E * 2 * INTER).reshape(E, -1).astype(BF16),
        f"{P}.down_proj_blocks": down["codes"].reshape(E, HIDDEN, 2, 16),
        f"{P}.down_proj_scales": down["scales"].reshape(E, HIDDEN, 2),
        "model.layers.0.mlp.router.weight": np.ones((E, HIDDEN), BF16),
    }
    path.mkdir(parents=True)
    save(path / "model.safetensors", tensors)
    quant = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}}
    write_json(path / "config.json", {"model_type": "gpt_oss", "hidden_size": HIDDEN} | quant)
    codes, scales = gate_up["codes"].reshape(E, 2 * INTER, -1), gate_up["scales"].reshape(E, 2 * INTER, -1)
    values = {}
    for e in range(E):
        values[f"{P}.{e}.gate_proj"] = Mxfp4Weight(codes=codes[e, 0::2], scales=scales[e, 0::2]).dequantize()
        values[f"{P}.{e}.up_proj"] = Mxfp4Weight(codes=codes[e, 1::2], scales=scales[e, 1::2]).dequantize()
        d = slice(e * HIDDEN, (e + 1) * HIDDEN)
        values[f"{P}.{e}.down_proj"] = Mxfp4Weight(codes=down["codes"][d], scales=down["scales"][d]).dequantize()
    return path, values


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("experts", ["split", None])
def test_gpt_oss_as_nvfp4(to, experts, tmp_path):
    src, values = gpt_oss(tmp_path / "src")
    if to == "compressed-tensors" and experts is None:
        with pytest.raises(FormatError, match="--experts split"):
            convert(src, tmp_path / "out", to)
        return
    report = convert(src, tmp_path / "out", to, experts=experts)
    assert {e["relative"] for e in report.facts["mxfp4"]} == {0.0}
    with halfbyte.open(tmp_path / "out") as ck:
        assert ck.dialect_name == to
        parts = {m.name: ck.load(m) for m in ck.parts if m.kind == "nvfp4"}
    assert set(parts) == set(values)
    for name, expected in values.items():
        assert np.array_equal(parts[name].dequantize(), expected), name
        assert np.log2(parts[name].scale2).item() % 1 == 0
    assert all(
        np.array_equal(parts[f"{P}.{e}.gate_proj"].scale2, parts[f"{P}.{e}.up_proj"].scale2) for e in range(E)
    ), "engines fuse them"
    assert halfbyte.verify(tmp_path / "out").findings == ()
    found = tensors_of(tmp_path / "out")
    if experts is None:  # as it was: rows, those of gate and up in turn
        assert found[f"{P}.gate_up_proj"].shape == (E, 2 * INTER, HIDDEN // 2)
        assert found[f"{P}.gate_up_proj_bias"] == tensors_of(src)[f"{P}.gate_up_proj_bias"]
    assert ("model.layers.0.mlp.router" in json.dumps(read_json(tmp_path / "out" / "config.json"))) is True


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_mxfp4_beside_nvfp4_stays(dialect, tmp_path):
    other = "compressed-tensors" if dialect == "modelopt" else "modelopt"
    made = expert_weights(1, INTER, HIDDEN, scale2=lambda e, i: 2.0**-9)
    mx = mxfp4(32, 64)
    suffix = {"modelopt": "weight", "compressed-tensors": "weight_packed"}
    tensors = split_experts(P, made, dialect)
    tensors |= {f"a.{suffix[dialect]}": mx["codes"], "a.weight_scale": mx["scales"]}
    src = make(tmp_path / "src", tensors)
    report = convert(src, tmp_path / "there", other)
    assert "mxfp4" not in report.facts
    there = tensors_of(tmp_path / "there")
    assert there[f"a.{suffix[other]}"].data == mx["codes"].tobytes()
    assert there["a.weight_scale"].data == mx["scales"].tobytes()
    config = read_json(tmp_path / "there" / "config.json")["quantization_config"]
    if other == "modelopt":
        assert config["quantized_layers"]["a"] == {"quant_algo": "MXFP4", "group_size": 32}
    else:
        group = next(g for g in config["config_groups"].values() if g["format"] == "mxfp4-pack-quantized")
        assert group["targets"] == ["a"]
        assert group["weights"]["group_size"] == 32
        assert config["format"] == "mixed-precision"
    assert halfbyte.verify(tmp_path / "there").ok
    convert(tmp_path / "there", tmp_path / "back", dialect)
    assert tensors_of(tmp_path / "back") == tensors_of(src)
    convert(src, tmp_path / "cast", dialect, mxfp4="nvfp4")
    with halfbyte.open(tmp_path / "cast") as ck, halfbyte.open(src) as plain:
        assert {m.kind for m in ck.modules} == {"nvfp4"}
        assert np.array_equal(ck["a"].dequantize(), plain["a"].dequantize())


def test_a_span_that_one_scale2_does_not_hold(tmp_path):
    src, values = gpt_oss(tmp_path / "src", 100, 127)
    ran = call("convert", src, tmp_path / "out", "--to", "modelopt", "--experts", "split")
    check_failure(ran, 2, P, "span", "--lossy")
    assert leftovers(tmp_path, "src") == []
    report = convert(src, tmp_path / "out", experts="split", lossy=True)
    told = {f.tensor: f.got for f in report.findings if f.code == "HB302"}
    assert set(told) == set(values)
    with halfbyte.open(tmp_path / "out") as ck:
        for name, expected in values.items():
            gap = np.linalg.norm(ck[name].dequantize().astype(np.float64) - expected) / np.linalg.norm(expected)
            entry = next(e for e in report.facts["mxfp4"] if e["name"] == name)
            assert entry["relative"] == pytest.approx(gap, rel=1e-6)
            assert told[name] == pytest.approx(gap, rel=0.01)


def test_a_nan_scale(tmp_path):
    src, _ = gpt_oss(tmp_path / "src")
    tensors = dict(tensors_of(src).items())
    scales = np.frombuffer(tensors[f"{P}.gate_up_proj_scales"].data, np.uint8).copy().reshape(E, 2 * INTER, 1)
    scales[2, 5, 0] = 255
    bad = tmp_path / "bad"
    bad.mkdir()
    save(bad / "model.safetensors", tensors | {f"{P}.gate_up_proj_scales": scales})
    write_json(bad / "config.json", read_json(src / "config.json"))
    ran = call("convert", bad, tmp_path / "out", "--to", "modelopt")
    check_failure(ran, 2, f"{P}.gate_up_proj_scales", "[2, 5, 0]")


@pytest.mark.parametrize("seed", range(6))
def test_any_experts(tmp_path, seed):
    """Stacks of any form, split and stacked again in any form, hold the same weights; nothing is lost."""
    rng = random.Random(seed)
    for case in range(6):
        experts, inter, hidden = rng.choice([1, 2, 5]), rng.choice([16, 48]), rng.choice([16, 32, 80])
        parts = rng.choice([PARTS, ("w1", "w3", "w2"), ("up_proj", "down_proj")])
        scales = {"scale2": lambda e, i: rng.choice([2.0**-9, 3e-4, 7e-5])}
        if rng.random() < 0.5:
            scales["input_scale"] = lambda e, i: rng.choice([0.5, 0.3])
        made = expert_weights(experts, inter, hidden, parts, **scales)
        dialect = rng.choice(["modelopt", "compressed-tensors"])
        here = make(tmp_path / f"{case}", split_experts(P, made, dialect))
        for step in range(4):
            to = rng.choice(["modelopt", "compressed-tensors"])
            form = rng.choice(["split", "stacked", "stacked-rows", "stacked-columns"]) if to == "modelopt" else "split"
            there = tmp_path / f"{case}.{step}"
            convert(here, there, to, experts=form, max_shard_size=rng.choice([None, "1KB", "1MB"]))
            here = there
        convert(here, tmp_path / f"{case}.end", dialect, experts="split")
        assert tensors_of(tmp_path / f"{case}.end") == tensors_of(tmp_path / f"{case}")


def test_any_damage_is_refused_in_words(tmp_path):
    rng = random.Random(5)
    made = expert_weights(2, 16, 32, **EACH)
    for case in range(40):
        tensors = stacked_experts(P, made, columns=rng.random() < 0.5, halves=rng.random() < 0.3)
        name = rng.choice(list(tensors))
        array = tensors[name]
        tensors[name] = rng.choice(
            [array[:1], array.reshape(-1), array[..., :1], array.astype(np.float32), array[None]]
        )
        src = make(tmp_path / f"{case}", tensors)
        for options in ({"experts": "split"}, {"experts": "stacked-columns"}, {}):
            with contextlib.suppress(HalfbyteError):
                convert(src, tmp_path / "out", force=True, **options)
            halfbyte.verify(src)


# --- dequantize


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text", "qwen3_moe", None])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_a_stack_becomes_a_dense_stack_as_the_model_has_it(kind, columns, tmp_path):
    made = expert_weights(E, INTER, HIDDEN, scale2=lambda e, i: 2.0 ** -(9 + e + i), input_scale=lambda e, i: 0.5)
    order = "up_first"
    stacked = stacked_experts(P, made, columns=columns, order=order, halves=True)
    metadata = encode_stacks({f"{P}.gate_up_proj": Stack(columns, order)})
    src = make(tmp_path / "src", stacked, {"model_type": kind}, metadata)
    report = halfbyte.dequantize_checkpoint(src, tmp_path / "dense", dtype="float32")
    values = {key: Weight(**roles).dequantize() for key, roles in made.items()}
    dense_order = {"gpt_oss": "interleaved", None: "up_first"}.get(kind, "concatenated")
    turned = columns if kind is None else kind in ("gpt_oss", "llama4_text")
    pairs = [joined(values[e, "gate_proj"], values[e, "up_proj"], dense_order) for e in range(E)]
    expected = {"gate_up_proj": np.stack(pairs), "down_proj": np.stack([values[e, "down_proj"] for e in range(E)])}
    found = tensors_of(tmp_path / "dense")
    assert set(found) == {f"{P}.{name}" for name in expected}
    for name, array in expected.items():
        array = array.swapaxes(1, 2) if turned else array
        assert found[f"{P}.{name}"] == Raw("F32", array.shape, array.tobytes())
    assert {t["tensor"] for t in report.facts["tensors"]} == set(stacked)
    assert {t["action"] for t in report.facts["tensors"] if "input_scale" in t["tensor"]} == {"dropped"}


def test_gpt_oss_becomes_dense(tmp_path):
    src, values = gpt_oss(tmp_path / "src")
    halfbyte.dequantize_checkpoint(src, tmp_path / "dense", dtype="float32")
    found = tensors_of(tmp_path / "dense")
    assert found[f"{P}.gate_up_proj"].shape == (E, HIDDEN, 2 * INTER)
    assert found[f"{P}.gate_up_proj_bias"] == tensors_of(src)[f"{P}.gate_up_proj_bias"]
    with halfbyte.open(tmp_path / "dense") as ck:
        dense = {m.name: ck.load(m).data for m in ck.parts if m.name in values}
    assert set(dense) == set(values)
    for name, expected in values.items():
        assert np.array_equal(dense[name], expected)


def test_values_of_a_stack_that_are_not_finite_are_named_by_expert(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    stacked = stacked_experts(P, made, columns=True)
    scales = stacked[f"{P}.gate_up_proj_weight_scale"].view(np.uint8).copy()
    scales[2, 1, INTER + 5] = 0x7F  # row 5 of up, columns 16 to 31
    src = make(tmp_path / "src", stacked | {f"{P}.gate_up_proj_weight_scale": scales.view(E4M3)})
    report = halfbyte.dequantize_checkpoint(src, tmp_path / "dense")
    (finding,) = report.findings
    assert (finding.code, finding.tensor) == ("HB118", f"{P}.gate_up_proj")
    assert finding.index == [2, INTER + 5, 16]
    assert finding.got == "16 values"


def test_dense_stacks_beside_quantized_ones_are_ignored_by_name(tmp_path):
    """A config that quantizes the one part of the experts must not quantize the other."""
    made = {k: r for k, r in expert_weights(E, INTER, HIDDEN, **EACH).items() if k[1] == "down_proj"}
    shape = (INTER, HIDDEN)
    dense = {f"{P}.{e}.{p}.weight": np.ones(shape, BF16) for e in range(E) for p in PARTS[:2]}
    other = {f"model.layers.1.mlp.experts.{e}.{p}.weight": np.ones(shape, BF16) for e in range(E) for p in PARTS[:2]}
    src = make(tmp_path / "src", split_experts(P, made) | dense | other)
    convert(src, tmp_path / "out", experts="stacked")
    ignored = read_json(tmp_path / "out" / "hf_quant_config.json")["quantization"]["exclude_modules"]
    assert ignored == [f"{P}.gate_up_proj", "model.layers.1.mlp.experts"]
    assert not [f for f in halfbyte.verify(tmp_path / "out").findings if f.code in ("HB202", "HB203", "HB204")]
    config = read_json(tmp_path / "out" / "config.json")
    config["quantization_config"]["ignore"] = []
    quant = tmp_path / "out" / "hf_quant_config.json"
    quant.unlink()
    write_json(tmp_path / "out" / "config.json", config)
    told = {f.tensor for f in halfbyte.verify(tmp_path / "out").findings if f.code == "HB203"}
    assert told == {f"{P}.gate_up_proj", "model.layers.1.mlp.experts.gate_up_proj"}


def test_dotted_dense_stacks(tmp_path):
    stack = np.arange(E * INTER * HIDDEN, dtype=np.float32).reshape(E, INTER, HIDDEN)
    src = make(tmp_path / "src", {f"{P}.up_proj.weight": stack})
    halfbyte.quantize_checkpoint(src, tmp_path / "out")
    with halfbyte.open(tmp_path / "out") as ck:
        assert ck[f"{P}.2.up_proj"].same(halfbyte.quantize(stack[2]))
    back = tmp_path / "back"
    convert(tmp_path / "out", tmp_path / "stacked", experts="stacked")
    halfbyte.dequantize_checkpoint(tmp_path / "stacked", back, dtype="float32")
    assert tensors_of(back)[f"{P}.up_proj"].shape == stack.shape


def test_provenance_of_some_of_a_stack(tmp_path):
    """The reciprocals of most numbers lead back to them; of the last one they do not, and it is kept."""
    made = expert_weights(3, 32, 32, ("down_proj",), scale2=lambda e, i: 2.0**-9)
    tensors = split_experts("m.experts", made, "compressed-tensors")
    odd = next(x for x in np.linspace(1, 2, 997, dtype=np.float32) if 1 / np.float32(1 / x) != x) * np.float32(2**9)
    tensors["m.experts.2.down_proj.weight_global_scale"] = np.full(1, odd)
    (tmp_path / "a").mkdir()
    save(tmp_path / "a" / "model.safetensors", tensors)
    halfbyte.convert(tmp_path / "a", tmp_path / "b", to="modelopt", experts="stacked", prove=True)
    halfbyte.convert(tmp_path / "b", tmp_path / "c", to="compressed-tensors", experts="split", prove=True)
    assert halfbyte.open(tmp_path / "b").findings == []
    assert tensors_of(tmp_path / "c") == tensors_of(tmp_path / "a")


def test_a_dense_stack_of_no_known_model_states_how_it_lies(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    metadata = encode_stacks({f"{P}.gate_up_proj": Stack(True, "interleaved")})
    stacked = stacked_experts(P, made, columns=True, order="interleaved")
    src = make(tmp_path / "src", stacked, {"model_type": None}, metadata)
    halfbyte.dequantize_checkpoint(src, tmp_path / "dense", dtype="float32")
    assert not halfbyte.open(tmp_path / "dense").config.get("model_type")
    with halfbyte.open(tmp_path / "dense") as ck:
        for (e, part), roles in made.items():
            assert np.array_equal(ck[f"{P}.{e}.{part}"].data, Weight(**roles).dequantize())


def test_fp8_layers_of_both_names(tmp_path):
    data = np.full((160, 32), 0x38, np.uint8).view(E4M3)
    ones = np.ones((2, 1), np.float32)
    tensors = {"a.weight": data, "a.weight_scale_inv": ones, "b.weight": data, "b.weight_scale": ones}
    src = make(tmp_path / "src", tensors)
    assert not [f for f in halfbyte.verify(src).findings if f.severity == "error"]
    convert(src, tmp_path / "out")
    assert set(tensors_of(tmp_path / "out")) == {"a.weight", "a.weight_scale", "b.weight", "b.weight_scale"}
