"""``verify`` on mixtures of experts: stacks in both orders, experts by number, MXFP4, and formats that are not read."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    Raw,
    ct_section,
    floats,
    modelopt_section,
    named,
    nvfp4,
    save,
    stacked_experts,
    write_json,
)

MLP = "model.layers.0.mlp"
EXPERTS = f"{MLP}.experts"
GATE_UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
E, N, HIDDEN = 3, 32, 64
CONFIG = {"model_type": "qwen3_moe", "hidden_size": HIDDEN}
both = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])


def swap(array):
    return np.ascontiguousarray(np.swapaxes(array, -1, -2))


def stack(name, n, k, columns=False, scale2=None, input_scale=None, experts=E, seed=0):
    """The tensors of a sound NVFP4 stack; a stack of one scale2 for each expert by default."""
    roles = [nvfp4(n, k, 100 * seed + e) for e in range(experts)]
    codes, scales = (np.stack([r[role] for r in roles]) for role in ("codes", "scales"))
    if columns:
        codes, scales = swap(codes), swap(scales)
    scale2 = np.full(experts, 2.0**-12) if scale2 is None else scale2
    tensors = {name: codes, f"{name}_weight_scale": scales, f"{name}_weight_scale_2": np.array(scale2, np.float32)}
    return tensors | ({} if input_scale is None else {f"{name}_input_scale": np.array(input_scale, np.float32)})


def both_stacks(columns=False, **more):
    return stack(GATE_UP, 2 * N, HIDDEN, columns, **more) | stack(DOWN, HIDDEN, N, columns, seed=1, **more)


def model(path, tensors, algo="W4A16_NVFP4", section=None, **config):
    path.mkdir(parents=True, exist_ok=True)
    save(path / "model.safetensors", tensors)
    section = modelopt_section(algo, ignore=["*.mlp.gate"]) if section is None else section
    write_json(path / "config.json", CONFIG | config | {"quantization_config": section})
    return path


def found(path, **options):
    return halfbyte.verify(path, **options).findings


def told(findings):
    return [(f.code, f.tensor, f.index, f.got) for f in findings]


@both
@pytest.mark.parametrize("sample", [None, 0.1])
def test_sound_stacks(tmp_path, columns, sample):
    assert found(model(tmp_path / "x", both_stacks(columns)), sample=sample) == ()
    report = halfbyte.verify(tmp_path / "x")
    assert report.facts["bytes"] == sum(np.asarray(t).nbytes for t in both_stacks(columns).values())


# --- block scales and codes


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@both
def test_stacks_with_dotted_names(tmp_path, columns, dialect):
    tensors = {}
    for name in (GATE_UP, DOWN):
        codes, scales = (both_stacks(columns)[f"{name}{suffix}"] for suffix in ("", "_weight_scale"))
        tensors |= named(dialect, name, {"codes": codes, "scales": scales, "scale2": 2.0**-12}, (E,))
    section = ct_section() if dialect == "compressed-tensors" else None
    path = model(tmp_path / "x", tensors, section=section)
    assert found(path) == ()
    scales = tensors[f"{DOWN}.weight_scale"].view(np.uint8)
    scales[(1, 1, 9) if columns else (1, 9, 1)] = 0x7F
    assert told(found(model(path, tensors, section=section))) == [
        ("HB103", f"{DOWN}.weight_scale", [1, 9, 1], "byte 7F")
    ]


@both
@pytest.mark.parametrize(("byte", "code"), [(0x7F, "HB103"), (0xFF, "HB103"), (0x80, "HB104"), (0xB8, "HB104")])
def test_bad_block_scales(tmp_path, columns, byte, code):
    tensors = both_stacks(columns)
    scales = tensors[f"{GATE_UP}_weight_scale"].view(np.uint8)
    scales[(2, 3, 40) if columns else (2, 40, 3)] = byte
    (finding,) = found(model(tmp_path / "x", tensors))
    assert told([finding]) == [(code, f"{GATE_UP}_weight_scale", [2, 40, 3], f"byte {byte:02X}")]
    assert "(row 40, columns 48..63)" in str(finding)


@both
def test_hb115_zero_scales(tmp_path, columns):
    tensors = both_stacks(columns)
    codes, scales = tensors[GATE_UP], tensors[f"{GATE_UP}_weight_scale"].view(np.uint8)
    for e, row, block, keep in ((0, 5, 2, True), (1, 63, 3, True), (2, 0, 0, False)):
        scales[(e, block, row) if columns else (e, row, block)] = 0
        where = slice(block * 8, block * 8 + 8)
        codes[(e, where, row) if columns else (e, row, where)] = [0, 0, 0, 0, 0, 0, 0x30, 0] if keep else 0x80
    assert told(found(model(tmp_path / "x", tensors))) == [("HB115", GATE_UP, None, "2 blocks")]


def test_hb115_in_a_sample_of_columns(tmp_path):
    """A row of blocks is 8 rows of bytes, which are read together."""
    tensors = both_stacks(True)
    scales = tensors[f"{GATE_UP}_weight_scale"].view(np.uint8)
    scales[0, 0, 5] = scales[2, 3, 7] = scales[1, 0, 0] = 0
    path = model(tmp_path / "x", tensors)
    assert told(found(path, sample=0.01)) == [("HB115", GATE_UP, None, "2 blocks in 2 of 12 rows")]
    assert told(found(path)) == [("HB115", GATE_UP, None, "3 blocks")]


@both
@pytest.mark.parametrize("chunk", [1 << 22, 64])
def test_hb116_an_expert_that_was_not_written(tmp_path, columns, chunk, monkeypatch):
    monkeypatch.setattr("halfbyte.tools.verify.CHUNK", chunk)
    tensors = both_stacks(columns)
    tensors[DOWN][1] = 0x80
    (finding,) = found(model(tmp_path / "x", tensors))
    assert told([finding]) == [("HB116", DOWN, [1], "expert 1")]
    tensors[DOWN][...] = 0
    assert told(found(model(tmp_path / "x", tensors))) == [("HB116", DOWN, None, None)]


@both
def test_hb102_half_width(tmp_path, columns):
    shape = (E, HIDDEN // 32, 2 * N) if columns else (E, 2 * N, HIDDEN // 32)
    tensors = both_stacks(columns) | {f"{GATE_UP}_weight_scale": np.ones(shape, E4M3)}
    (finding,) = found(model(tmp_path / "x", tensors))
    full = [E, HIDDEN // 16, 2 * N] if columns else [E, 2 * N, HIDDEN // 16]
    assert (finding.code, finding.got, finding.expected) == ("HB102", list(shape), full)
    assert "half the columns" in finding.hint


def test_hb102_no_axis_that_is_an_eighth(tmp_path):
    tensors = both_stacks() | {f"{GATE_UP}_weight_scale": np.ones((E, 5, 7), E4M3)}
    (finding,) = found(model(tmp_path / "x", tensors))
    assert (finding.code, finding.tensor, finding.got) == ("HB102", f"{GATE_UP}_weight_scale", [E, 5, 7])
    assert "an eighth" in finding.hint


# --- scales of experts


BAD = [0.0, np.nan, np.inf, -1.0]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("axes", [(E,), (E, 1), (E, 1, 1)], ids=str)
@pytest.mark.parametrize(("role", "code"), [("weight_scale_2", "HB106"), ("input_scale", "HB113")])
def test_a_bad_scale_of_an_expert(tmp_path, bad, axes, role, code):
    values = np.array([2.0**-10, 2.0**-11, 2.0**-12], np.float32)
    tensors = both_stacks(input_scale=values)
    values[1] = bad
    tensors[f"{DOWN}_{role}"] = values.reshape(axes)
    (finding,) = found(model(tmp_path / "x", tensors, "NVFP4"))
    assert (finding.code, finding.tensor, finding.index) == (code, f"{DOWN}_{role}", [1])
    assert np.array_equal(finding.got, bad, equal_nan=True)


@pytest.mark.parametrize(("role", "code"), [("weight_scale_2", "HB106"), ("input_scale", "HB113")])
def test_bad_scales_of_gate_and_up(tmp_path, role, code):
    values = np.full((E, 2), 2.0**-12, np.float32)
    values[0, 1] = values[2, 0] = 0
    tensors = both_stacks(input_scale=[0.5, 0.25, 0.125])
    tensors[f"{GATE_UP}_{role}"] = values
    name = f"{GATE_UP}_{role}"
    assert told(found(model(tmp_path / "x", tensors, "NVFP4"))) == [
        (code, name, [0, 1], 0.0),
        (code, name, [2, 0], 0.0),
    ]


def test_hb108_scale2_above_1(tmp_path):
    tensors = stack(GATE_UP, 2 * N, HIDDEN, scale2=[0.5, 4, 20]) | stack(DOWN, HIDDEN, N, scale2=[[0.5], [1], [2]])
    findings = found(model(tmp_path / "x", tensors))
    assert told(findings) == [
        ("HB108", f"{DOWN}_weight_scale_2", [2], "2"),
        ("HB108", f"{GATE_UP}_weight_scale_2", [1], "4"),
        ("HB108", f"{GATE_UP}_weight_scale_2", [2], "20"),
    ]
    assert [f.hint is None for f in findings] == [True, True, False]


def test_hb107_bf16(tmp_path):
    tensors = both_stacks() | {f"{DOWN}_weight_scale_2": np.full(E, 2.0**-12, BF16)}
    assert told(found(model(tmp_path / "x", tensors))) == [("HB107", f"{DOWN}_weight_scale_2", None, "BF16")]


def test_hb109_as_many_scales_as_nothing(tmp_path):
    for shape in [(E + 1,), (E, 3), (E, 2, 2)]:
        tensors = both_stacks() | {f"{GATE_UP}_weight_scale_2": np.full(shape, 2.0**-12, np.float32)}
        assert told(found(model(tmp_path / "x", tensors))) == [
            ("HB109", f"{GATE_UP}_weight_scale_2", None, list(shape))
        ]


@pytest.mark.parametrize("form", ["stack", "gate_proj up_proj", "w1 w3"])
def test_hb110_gate_and_up_of_an_expert(tmp_path, form):
    pairs = [(2.0**-12, 2.0**-12), (2.0**-12, 2.0**-10), (2.0**-11, 2.0**-12)]
    if form == "stack":
        tensors, names = both_stacks() | {f"{GATE_UP}_weight_scale_2": np.float32(pairs)}, ("gate_proj", "up_proj")
    else:
        names, tensors = form.split(), {}
        for e, pair in enumerate(pairs):
            for name, scale2 in zip(names, pair, strict=True):
                tensors |= named("modelopt", f"{EXPERTS}.{e}.{name}", nvfp4(N, HIDDEN, e, scale2=scale2))
    findings = [f for f in found(model(tmp_path / "x", tensors)) if f.code == "HB110"]
    assert [f.got for f in findings] == [
        f"{names[0]}, {names[1]}: 0.000244141, 0.000976562",
        f"{names[0]}, {names[1]}: 0.000488281, 0.000244141",
    ]
    if form == "stack":
        assert [(f.tensor, f.index) for f in findings] == [(f"{GATE_UP}_weight_scale_2", [e]) for e in (1, 2)]
    else:
        assert [f.tensor for f in findings] == [f"{EXPERTS}.{e}.{names[0]}.weight_scale_2" for e in (1, 2)]
    assert ["4 times" in f.hint for f in findings] == [True, False]


def test_hb110_is_capped(tmp_path):
    tensors = stack(GATE_UP, 32, 32, experts=102, scale2=np.tile([0.5, 0.25], (102, 1)))
    path = model(tmp_path / "x", tensors)
    assert len(found(path)) == 101
    assert found(path)[0].got == "102 in all"
    assert len(found(path, every=True)) == 102


def test_hb125_input_scales_of_gate_and_up(tmp_path):
    tensors = both_stacks(input_scale=[0.5, 0.25, 0.125])
    tensors[f"{GATE_UP}_input_scale"] = np.float32([[1, 1], [1, 2], [4, 4]]) / 8
    assert told(found(model(tmp_path / "x", tensors, "NVFP4"))) == [
        ("HB125", f"{GATE_UP}_input_scale", [1], "gate_proj 0.125, up_proj 0.25")
    ]


@pytest.mark.parametrize("axes", [(E,), (E, 1)], ids=str)
def test_hb124_one_input_scale_in_all_experts(tmp_path, axes):
    """Not of gate and up, which read the layer's input."""
    tensors = both_stacks(input_scale=np.full(axes, 0.125))
    got = "down_proj 0.125 in 3 experts"
    assert told(found(model(tmp_path / "x", tensors, "NVFP4"))) == [("HB124", f"{DOWN}_input_scale", None, got)]
    tensors[f"{DOWN}_input_scale"] = np.float32([1, 1, 2]).reshape(axes)
    assert found(model(tmp_path / "x", tensors, "NVFP4")) == ()


def test_hb111_experts_without_input_scales(tmp_path):
    tensors = {}
    for e in range(E):
        for part in ("gate_proj", "up_proj"):
            tensors |= named("modelopt", f"{EXPERTS}.{e}.{part}", nvfp4(N, HIDDEN, e, input_scale=0.5))
        tensors |= named("modelopt", f"{EXPERTS}.{e}.down_proj", nvfp4(HIDDEN, N, e, input_scale=2.0**-e))
    for name in (f"{EXPERTS}.1.down_proj", f"{EXPERTS}.2.down_proj"):
        del tensors[f"{name}.input_scale"]
    findings = found(model(tmp_path / "x", tensors, "NVFP4"))
    assert [(f.code, f.tensor, f.expected) for f in findings] == [
        ("HB111", f"{EXPERTS}.{e}.down_proj.weight", f"{EXPERTS}.{e}.down_proj.input_scale") for e in (1, 2)
    ]


def test_hb111_a_stack_without_input_scales(tmp_path):
    tensors = both_stacks(input_scale=[0.5, 0.25, 0.125])
    del tensors[f"{DOWN}_input_scale"]
    (finding,) = found(model(tmp_path / "x", tensors, "NVFP4"))
    assert (finding.code, finding.tensor, finding.expected) == ("HB111", DOWN, f"{DOWN}_input_scale")


def test_hb128_one_scale2_for_all(tmp_path):
    tensors = both_stacks() | {f"{DOWN}_weight_scale_2": np.float32(2.0**-12)}
    got = "one number for 3 experts"
    (finding,) = found(model(tmp_path / "x", tensors))
    assert told([finding]) == [("HB128", f"{DOWN}_weight_scale_2", None, got)]
    assert finding.severity == "note"
    assert found(model(tmp_path / "one", stack(DOWN, HIDDEN, N, experts=1, scale2=2.0**-12))) == ()


# --- which experts there are


def numbered(numbers, layer=0, parts=("gate_proj", "up_proj", "down_proj")):
    tensors = {}
    for e in numbers:
        for part in parts:
            shape = (HIDDEN, N) if part in ("down_proj", "w2") else (N, HIDDEN)
            tensors |= named("modelopt", f"model.layers.{layer}.mlp.experts.{e}.{part}", nvfp4(*shape, e))
    return tensors


def test_hb129_a_hole(tmp_path):
    (finding,) = found(model(tmp_path / "x", numbered([0, 1, 4])))
    assert told([finding]) == [("HB129", EXPERTS, None, "without 2, 3")]
    assert (finding.expected, finding.severity) == ("0 to 4", "error")


def test_hb129_a_part_of_an_expert(tmp_path):
    tensors = numbered(range(4)) | numbered(range(4), 1)
    tensors = {name: t for name, t in tensors.items() if not name.startswith(f"{EXPERTS}.2.up_proj")}
    assert told(found(model(tmp_path / "x", tensors))) == [("HB129", EXPERTS, None, "without 2.up_proj")]


def test_hb129_not_in_one_shard_of_many(tmp_path):
    path = model(tmp_path / "x", numbered([4, 5]))
    assert [f.code for f in found(path / "model.safetensors")] == ["HB129"]
    names = dict.fromkeys(numbered([4, 5]), "model.safetensors")
    write_json(path / "model.safetensors.index.json", {"weight_map": names})
    assert found(path / "model.safetensors") == ()


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("form", ["numbered", "stack"])
def test_hb212_fewer_than_the_config_says(tmp_path, key, form):
    tensors = numbered(range(E)) if form == "numbered" else both_stacks()
    (finding,) = found(model(tmp_path / "x", tensors, **{key: 4}))
    assert (finding.code, finding.tensor, finding.got, finding.expected) == ("HB212", EXPERTS, 3, 4)
    assert found(model(tmp_path / "x", tensors, text_config={key: 3})) == ()
    assert [f.code for f in found(model(tmp_path / "x", tensors, text_config={key: 4}))] == ["HB212"]


def test_hb212_fewer_than_the_other_layers(tmp_path):
    tensors = numbered(range(4)) | numbered(range(3), 1) | numbered(range(4), 2)
    (finding,) = found(model(tmp_path / "x", tensors))
    assert told([finding]) == [("HB212", "model.layers.1.mlp.experts", None, 3)]
    assert finding.expected == 4
    assert found(model(tmp_path / "x", tensors, num_experts=3)) == ()


def test_hb136_stacked_and_by_number(tmp_path):
    tensors = both_stacks() | numbered(range(E))
    findings = found(model(tmp_path / "x", tensors))
    assert {f.code for f in findings} == {"HB136"}
    assert {(f.tensor, f.got) for f in findings} == {
        (f"{EXPERTS}.0.gate_proj.weight", "N.gate_proj and gate_up_proj"),
        (f"{EXPERTS}.0.up_proj.weight", "N.up_proj and gate_up_proj"),
        (f"{EXPERTS}.0.down_proj.weight", "N.down_proj and down_proj"),
    }


def test_hb136_two_spellings(tmp_path):
    tensors = numbered(range(E)) | numbered(range(E), parts=("w1", "w2", "w3"))
    assert [f.got for f in found(model(tmp_path / "x", tensors))] == [
        "N.down_proj and N.w2", "N.gate_proj and N.w1", "N.up_proj and N.w3",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [f"{MLP}.gate", f"{MLP}.router", "model.layers.0.block_sparse_moe.gate"])
def test_hb137_a_router(tmp_path, name):
    tensors = both_stacks() | named("modelopt", name, nvfp4(16, HIDDEN))
    findings = found(model(tmp_path / "x", tensors, section=modelopt_section(ignore=[])))
    assert told(findings) == [("HB137", f"{name}.weight", None, "nvfp4")]
    dense = both_stacks() | {f"{name}.weight": floats(16, HIDDEN)}
    assert found(model(tmp_path / "x", dense, section=modelopt_section(ignore=[name]))) == ()


def test_hb138_an_order_that_nothing_states(tmp_path):
    path = model(tmp_path / "x", both_stacks())
    write_json(path / "config.json", {"quantization_config": modelopt_section()})
    (finding,) = found(path)
    assert told([finding]) == [("HB138", GATE_UP, None, None)]
    assert "halfbyte.experts" in finding.hint
    assert "model_type" in finding.hint
    stated = {"halfbyte.experts": f'{{"{GATE_UP}": {{"gate_up": "up_first"}}}}'}
    save(path / "model.safetensors", both_stacks(), stated)
    assert found(path) == ()


# --- MXFP4


def mxfp4(name, dialect, n=4, k=64):
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 256, (n, k // 2), np.uint8)
    scales = np.full((n, k // 32), 0x7F, np.uint8)
    scales[0, 0], scales[1, 1], scales[2, 0], scales[3, 0] = 0, 0x80, 0xFE, 0x05
    suffix = "weight_packed" if dialect == "compressed-tensors" else "weight"
    return {f"{name}.{suffix}": codes, f"{name}.weight_scale": scales}


def gpt_oss(experts=2, n=8, k=64):
    rng = np.random.default_rng(3)
    return {
        f"{DOWN}_blocks": rng.integers(0, 256, (experts, n, k // 32, 16), np.uint8),
        f"{DOWN}_scales": rng.integers(0x60, 0x90, (experts, n, k // 32), np.uint8),
        f"{DOWN}_bias": np.zeros((experts, n), BF16),
    }


MX_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}}
MX_SECTION = {
    "modelopt": modelopt_section("MXFP4", ignore=[]),
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {"group_0": MX_GROUP}, "ignore": []},
}


@pytest.mark.parametrize("dialect", MX_SECTION)
def test_mxfp4_is_sound(tmp_path, dialect):
    """Any byte but FF is a scale, and there is no second one."""
    path = model(tmp_path / "x", mxfp4("a.up_proj", dialect), section=MX_SECTION[dialect])
    report = halfbyte.verify(path)
    assert report.findings == ()
    assert report.facts["modules"] == {"mxfp4": 1}
    assert report.facts["dialect"] == dialect


@pytest.mark.parametrize("dialect", MX_SECTION)
@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_hb103_mxfp4(tmp_path, dialect, dtype):
    tensors = mxfp4("a.up_proj", dialect)
    tensors["a.up_proj.weight_scale"][3, 1] = 0xFF
    tensors["a.up_proj.weight_scale"] = Raw(dtype, (4, 2), tensors["a.up_proj.weight_scale"].tobytes())
    (finding,) = found(model(tmp_path / "x", tensors, section=MX_SECTION[dialect]))
    assert told([finding]) == [("HB103", "a.up_proj.weight_scale", [3, 1], "byte FF")]
    assert finding.expected == "00 to FE"
    assert "(row 3, columns 32..63)" in str(finding)


def test_mxfp4_codes_that_are_zero(tmp_path):
    tensors = mxfp4("a.up_proj", "modelopt")
    tensors["a.up_proj.weight"][...] = 0x08
    path = model(tmp_path / "x", tensors, section=MX_SECTION["modelopt"])
    assert told(found(path)) == [("HB116", "a.up_proj.weight", None, None)]


def test_mxfp4_of_another_shape(tmp_path):
    tensors = mxfp4("a.up_proj", "modelopt") | {"a.up_proj.weight_scale": Raw("F8_E8M0", (4, 3), b"\x7f" * 12)}
    (finding,) = found(model(tmp_path / "x", tensors, section=MX_SECTION["modelopt"]))
    assert (finding.code, finding.got, finding.expected) == ("HB102", [4, 3], [4, 2])


def test_gpt_oss(tmp_path):
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    path = model(tmp_path / "x", gpt_oss(), section=section, model_type="gpt_oss")
    assert found(path) == ()
    tensors = gpt_oss()
    tensors[f"{DOWN}_scales"][1, 5, 1] = 0xFF
    tensors[f"{DOWN}_blocks"][0] = 0
    assert told(found(model(path, tensors, section=section, model_type="gpt_oss"))) == [
        ("HB103", f"{DOWN}_scales", [1, 5, 1], "byte FF"),
        ("HB116", f"{DOWN}_blocks", [0], "expert 0"),
    ]


def test_mxfp4_where_the_config_says_nvfp4(tmp_path):
    (finding,) = found(model(tmp_path / "x", mxfp4("a.up_proj", "modelopt")))
    assert (finding.code, finding.got, finding.expected) == ("HB204", "mxfp4", "nvfp4")


# --- formats that are not read

INT4 = {
    "weight_packed": np.ones((8, 8), np.int32),
    "weight_scale": np.ones((8, 2), BF16),
    "weight_shape": np.array([8, 64]),
}
INT8 = {"weight": np.ones((8, 64), np.int8), "weight_scale": np.ones((8, 1), np.float32)}
MXFP8 = {"weight": np.ones((8, 64), E4M3), "weight_scale": np.full((8, 2), 0x7F, np.uint8)}


def groups(**kinds):
    """The config of layers "a" (NVFP4) and "b" (of the given arguments)."""
    section = ct_section()
    section["config_groups"]["group_0"]["targets"] = ["a.up_proj"]
    section["config_groups"]["group_1"] = {"targets": ["b.up_proj"], "weights": kinds}
    return section


UNREAD = {
    "INT4": (INT4, {"num_bits": 4, "type": "int", "group_size": 32}),
    "INT8": (INT8, {"num_bits": 8, "type": "int"}),
    "MXFP8": (MXFP8, {"num_bits": 8, "type": "float", "group_size": 32}),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_hb139_a_format_that_is_not_read(tmp_path, kind):
    group, args = UNREAD[kind]
    tensors = named("compressed-tensors", "a.up_proj", nvfp4(8, 64)) | {f"b.up_proj.{s}": t for s, t in group.items()}
    path = model(tmp_path / "x", tensors, section=groups(**args))
    main = "b.up_proj.weight_packed" if kind == "INT4" else "b.up_proj.weight"
    (finding,) = found(path)
    assert (finding.code, finding.tensor, finding.severity) == ("HB139", main, "note")
    wrong = found(model(path, tensors, section=groups(num_bits=4, type="float", group_size=16)))
    assert [(f.code, f.got, f.expected) for f in wrong] == [("HB204", "unread", "nvfp4"), ("HB139", finding.got, None)]
    absent = found(model(path, tensors, section=groups(**args) | {"ignore": ["b.up_proj"]}))
    assert [f.code for f in absent] == ["HB202", "HB139"]


def test_floats_of_a_format_that_is_not_read(tmp_path):
    scale = np.ones((8, 2), BF16)
    scale[3, 1] = np.nan
    group = INT4 | {"weight_scale": scale}
    tensors = named("compressed-tensors", "a.up_proj", nvfp4(8, 64)) | {f"b.up_proj.{s}": t for s, t in group.items()}
    findings = found(model(tmp_path / "x", tensors, section=groups(**UNREAD["INT4"][1])))
    assert told(findings)[0] == ("HB118", "b.up_proj.weight_scale", [3, 1], "1 values")
    assert [f.code for f in findings] == ["HB118", "HB139"]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("limit", "told"), [(1 << 30, True), (500, False), (100, False)])
def test_memory_for_zero_scales_is_bounded(columns, limit, told, tmp_path, monkeypatch):
    """A file of holes may state any size: above a limit zero scales are not compared with their codes."""
    monkeypatch.setattr("halfbyte.tools.verify._MASK", limit)
    made = {(e, "up_proj"): nvfp4(48, 96, e) for e in range(2)}
    for roles in made.values():
        roles["scales"].view(np.uint8)[0, 0] = 0
    save(tmp_path / "model.safetensors", stacked_experts("m.experts", made, columns=columns))
    (finding,) = (f for f in halfbyte.verify(tmp_path).findings if f.code == "HB115")
    assert (finding.got == "2 blocks") is told
    assert (finding.got == "not counted") is not told
