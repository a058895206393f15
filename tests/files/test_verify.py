"""``verify``: each finding code, provoked by a small input, with the exact tensor and index."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    DOWN,
    E4M3,
    GATE,
    GOLDENS,
    HIDDEN,
    INDEX,
    INTER,
    LINEARS,
    MLP,
    OUT,
    UP,
    VOCAB,
    K,
    Q,
    Raw,
    V,
    call,
    codes,
    copy_golden,
    ct_section,
    floats,
    fp8,
    make_dense,
    make_float,
    modelopt_section,
    named,
    nvfp4,
    quantized,
    read_json,
    save,
    save_sharded,
    write_json,
)
from halfbyte.checkpoint.reader import PROVENANCE
from halfbyte.errors import UsageError
from halfbyte.findings import CODES

KV = {"num_bits": 8, "type": "float", "dynamic": False}


def report(tmp_path, *args, **options):
    return halfbyte.verify(make_dense(tmp_path / "x", *args, **options))


def found(tmp_path, *args, **options):
    return codes(report(tmp_path, *args, **options).findings)


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_are_sound(name):
    result = halfbyte.verify(GOLDENS[name])
    assert result.findings == ()
    assert result.ok
    ran = call("verify", GOLDENS[name], "--strict")
    assert (ran.rc, ran.stderr) == (0, "")
    assert "sound: 0 errors, 0 warnings, 0 notes" in ran.stdout


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("input_scale", [False, True])
@pytest.mark.parametrize("shards", [1, 5])
def test_made_ones_are_sound(tmp_path, dialect, input_scale, shards):
    assert found(tmp_path, dialect, input_scale=input_scale, shards=shards) == []


def test_facts(tmp_path):
    facts = report(tmp_path, input_scale=True).facts
    assert facts["modules"] == {"dense": 5, "nvfp4": 7}
    assert facts["dialect"] == "modelopt"
    assert facts["bytes"] == sum(np.asarray(t).nbytes for t in quantized(input_scale=True).values())


def test_a_dense_checkpoint_is_not_called_modelopt(tmp_path):
    path = make_float(tmp_path / "x")
    assert halfbyte.verify(path).facts["dialect"] == "dense"
    assert "modelopt" not in call("verify", path).stdout


# --- scales: HB101 to HB109


SUFFIX = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}
both = pytest.mark.parametrize("dialect", SUFFIX)


@both
def test_hb101_no_block_scales(tmp_path, dialect):
    weight, scales, *_ = SUFFIX[dialect]
    result = report(tmp_path, dialect, change={f"{Q}.{scales}": None})
    (finding,) = result.findings
    assert (finding.code, finding.tensor, finding.index) == ("HB101", f"{Q}.{weight}", None)
    assert finding.expected == f"{Q}.weight_scale"
    assert not result.ok


def test_hb101_fp8_without_scale(tmp_path):
    change = {f"lm_head.{k}": v for k, v in fp8(VOCAB, HIDDEN).items() if k == "weight"}
    assert ("HB101", "lm_head.weight", None) in found(tmp_path, change=change)


def test_hb102_half_the_columns(tmp_path):
    """What ModelOpt exported from an already compressed model."""
    result = report(tmp_path, change={f"{Q}.weight_scale": np.ones((HIDDEN, HIDDEN // 32), E4M3)})
    (finding,) = [f for f in result.findings if f.severity == "error"]
    assert (finding.code, finding.tensor, finding.index) == ("HB102", f"{Q}.weight_scale", None)
    assert (finding.got, finding.expected) == ([HIDDEN, HIDDEN // 32], [HIDDEN, HIDDEN // 16])
    assert "half the columns" in finding.hint


@both
@pytest.mark.parametrize("shape", [(HIDDEN, 3), (HIDDEN + 1, 2), (HIDDEN,), (HIDDEN // 16, HIDDEN), (), (1, HIDDEN, 2)])
def test_hb102_other_shapes(tmp_path, dialect, shape):
    result = report(tmp_path, dialect, change={f"{Q}.weight_scale": np.ones(shape, E4M3)})
    (finding,) = [f for f in result.findings if f.severity == "error"]
    assert (finding.code, finding.tensor) == ("HB102", f"{Q}.weight_scale")
    assert finding.expected == [HIDDEN, HIDDEN // 16]


@pytest.mark.parametrize("k", [24, 40, 8])
def test_hb102_k_is_not_whole_blocks(tmp_path, k):
    change = {f"{Q}.weight": np.full((HIDDEN, k // 2), 0x22, np.uint8)}
    change[f"{Q}.weight_scale"] = np.ones((HIDDEN, -(-k // 16)), E4M3)
    (finding,) = report(tmp_path, change=change).findings
    assert (finding.code, finding.tensor, finding.got) == ("HB102", f"{Q}.weight", f"K = {k}")


def with_bytes(tmp_path, bytes_, name=Q, dialect="modelopt", every=False):
    """The model with (row, block) -> scale byte set in one weight."""

    def change(tensors):
        scales = tensors[f"{name}.weight_scale"].view(np.uint8).copy()
        for at, byte in bytes_.items():
            scales[at] = byte
        tensors[f"{name}.weight_scale"] = scales.view(E4M3)

    return halfbyte.verify(make_dense(tmp_path / "x", dialect, change=change), every=every)


@both
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_hb103_nan(tmp_path, dialect, byte):
    result = with_bytes(tmp_path, {(5, 1): byte}, dialect=dialect)
    (finding,) = result.findings
    assert (finding.code, finding.tensor, finding.index) == ("HB103", f"{Q}.weight_scale", [5, 1])
    assert finding.got == f"byte {byte:02X}"
    assert not result.ok


@both
@pytest.mark.parametrize("byte", [0x80, 0x81, 0xB8, 0xFE])
def test_hb104_negative(tmp_path, dialect, byte):
    result = with_bytes(tmp_path, {(0, 0): byte}, dialect=dialect)
    (finding,) = result.findings
    assert (finding.code, finding.tensor, finding.index) == ("HB104", f"{Q}.weight_scale", [0, 0])
    assert finding.got == f"byte {byte:02X}"


def test_both_kinds_have_their_own_code_and_each_block_its_finding(tmp_path):
    result = with_bytes(tmp_path, {(0, 1): 0x7F, (3, 0): 0xFF, (3, 1): 0x80, (31, 1): 0xFE})
    assert codes(result.findings) == [
        ("HB103", f"{Q}.weight_scale", [0, 1]),
        ("HB103", f"{Q}.weight_scale", [3, 0]),
        ("HB104", f"{Q}.weight_scale", [3, 1]),
        ("HB104", f"{Q}.weight_scale", [31, 1]),
    ]


def test_all_bytes_have_the_right_code(tmp_path):
    """256 blocks, each with its own byte."""
    roles = nvfp4(16, 256) | {"scales": np.arange(256, dtype=np.uint8).reshape(16, 16).view(E4M3)}
    save(tmp_path / "model.safetensors", named("modelopt", "a", roles))
    at = {tuple(f.index): f.code for f in halfbyte.verify(tmp_path, every=True).findings if f.index}
    for byte in range(256):
        expected = "HB103" if byte in (0x7F, 0xFF) else "HB104" if byte >= 0x80 else None
        assert at.get((byte // 16, byte % 16)) == expected, hex(byte)


def many(tmp_path, count):
    scales = np.full((20, 16), 0x38, np.uint8)
    scales.reshape(-1)[:count] = 0xFF
    scales.reshape(-1)[-3:] = 0x80
    save(tmp_path / "model.safetensors", named("modelopt", "a", nvfp4(20, 256) | {"scales": scales.view(E4M3)}))
    return tmp_path


@pytest.mark.parametrize("count", [99, 100, 101, 250])
def test_a_hundred_findings_and_then_their_number(tmp_path, count):
    path = many(tmp_path, count)
    nan = [f for f in halfbyte.verify(path).findings if f.code == "HB103"]
    places = [f for f in nan if f.index is not None]
    assert [f.index for f in places] == [[i // 16, i % 16] for i in range(min(count, 100))]
    rest = nan[len(places) :]
    assert len(rest) == (count > 100)
    for finding in rest:
        assert (finding.tensor, finding.index) == ("a.weight_scale", None)
        assert str(count) in str(finding.got)
        assert "--all" in finding.hint
    assert len([f for f in halfbyte.verify(path).findings if f.code == "HB104"]) == 3


def test_all_lifts_the_limit(tmp_path):
    path = many(tmp_path, 250)
    expected = [[i // 16, i % 16] for i in range(250)]
    assert [f.index for f in halfbyte.verify(path, every=True).findings if f.code == "HB103"] == expected
    document = call("verify", path, "--all", "--json").document
    assert [f["index"] for f in document["findings"] if f["code"] == "HB103"] == expected


def test_positions_beyond_the_first_chunk(tmp_path, monkeypatch):
    from halfbyte.tools import verify as module

    monkeypatch.setattr(module, "CHUNK", 64)
    scales = np.full((50, 6), 0x38, np.uint8)
    wanted = [[0, 0], [10, 5], [21, 3], [49, 5]]
    for row, block in wanted:
        scales[row, block] = 0x7F
    save(tmp_path / "model.safetensors", named("modelopt", "a", nvfp4(50, 96) | {"scales": scales.view(E4M3)}))
    assert [f.index for f in halfbyte.verify(tmp_path).findings] == wanted


@both
def test_hb105_no_second_scale(tmp_path, dialect):
    weight, _, scale2, _ = SUFFIX[dialect]
    assert found(tmp_path, dialect, change={f"{DOWN}.{scale2}": None}) == [("HB105", f"{DOWN}.{weight}", None)]


@both
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, np.nan, np.inf, -np.inf])
def test_hb106_second_scale(tmp_path, dialect, shape, value):
    """The index of a scalar is null, whatever its shape."""
    name = f"{DOWN}.{SUFFIX[dialect][2]}"
    assert found(tmp_path, dialect, change={name: np.full(shape, value, np.float32)}) == [("HB106", name, None)]


def test_hb106_a_divisor_too_small_to_divide_by(tmp_path):
    """1 / 1e-40 is Inf in float32, and so is every weight."""
    name = f"{DOWN}.weight_global_scale"
    assert found(tmp_path, "compressed-tensors", change={name: np.full(1, 1e-40, np.float32)}) == [
        ("HB106", name, None)
    ]


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_hb106_scale_of_fp8(tmp_path, value):
    scale = np.ones((VOCAB, 1), np.float32)
    scale[3] = value
    change = {f"lm_head.{k}": v for k, v in fp8(VOCAB, HIDDEN, scale=scale).items()}
    result = [f for f in found(tmp_path, change=change) if f[0] not in ("HB202", "HB204")]
    assert result == [("HB106", "lm_head.weight_scale", [3, 0])]


def test_a_zero_scale_of_an_fp8_row_is_sound(tmp_path):
    scale = np.ones((VOCAB, 1), np.float32)
    scale[3] = 0
    tensors = quantized() | {f"lm_head.{k}": v for k, v in fp8(VOCAB, HIDDEN, scale=scale).items()}
    save(tmp_path / "model.safetensors", tensors)
    assert halfbyte.verify(tmp_path).findings == ()


@both
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_hb107_unusual_dtype(tmp_path, dialect, dtype):
    """Some old exports hold second scales in bfloat16."""
    name = f"{OUT}.{SUFFIX[dialect][2]}"
    value = 2.0**12 if dialect == "compressed-tensors" else 2.0**-12
    (finding,) = report(tmp_path, dialect, change={name: np.full((), value, dtype)}).findings
    assert (finding.code, finding.tensor, finding.severity) == ("HB107", name, "warning")
    assert finding.expected == "F32"


def test_hb108_second_scale_above_one(tmp_path):
    """ModelOpt's name with compressed-tensors' number: 3571.4 where 0.00028 is meant."""
    (finding,) = report(tmp_path, change={f"{OUT}.weight_scale_2": np.float32(3571.4)}).findings
    assert (finding.code, finding.tensor, finding.got) == ("HB108", f"{OUT}.weight_scale_2", "3571.4")
    assert "reciprocal" in finding.hint


def test_hb108_in_compressed_tensors(tmp_path):
    """The reverse: a multiplier where the divisor is meant. The hint must say it that way round."""
    name = f"{OUT}.weight_global_scale"
    (finding,) = report(tmp_path, "compressed-tensors", change={name: np.full(1, 0.00028, np.float32)}).findings
    assert (finding.code, finding.tensor) == ("HB108", name)
    assert re.search(r"multiplier.*where a (reciprocal|divisor)", finding.hint)


@pytest.mark.parametrize("value", [1.0, 0.999, 1e-30])
def test_hb108_up_to_one_is_nothing_odd(tmp_path, value):
    """input_scale1 recipes and tensors of amax 2688 have 1.0."""
    assert found(tmp_path, change={f"{OUT}.weight_scale_2": np.float32(value)}) == []


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{Q}.weight_scale_2", (2,)),
        (f"{Q}.weight_scale_2", (HIDDEN,)),
        (f"{Q}.input_scale", (3,)),
        (f"{Q}.pre_quant_scale", (HIDDEN + 1,)),
        (f"{Q}.pre_quant_scale", (1, HIDDEN)),
    ],
)
def test_hb109_shapes(tmp_path, name, shape):
    result = report(tmp_path, change={name: np.ones(shape, np.float32)})
    assert [(f.code, f.tensor, f.index) for f in result.findings if f.severity == "error"] == [("HB109", name, None)]


@pytest.mark.parametrize("shape", [(3,), (HIDDEN, 2), (VOCAB, HIDDEN)])
def test_hb109_fp8(tmp_path, shape):
    change = {f"lm_head.{k}": v for k, v in fp8(VOCAB, HIDDEN, scale=np.ones(shape)).items()}
    result = report(tmp_path, change=change, section={})
    assert ("HB109", "lm_head.weight_scale", None) in codes(result.findings)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("name", ["weight_scale_2", "input_scale"])
def test_rubbish_in_a_scale_is_a_finding_and_no_warning_of_numpy(tmp_path, dtype, name):
    """Uninitialised memory is often a signalling NaN, whose very conversion NumPy warns of."""
    bits = {"F32": b"\x01\0\x80\x7f", "BF16": b"\x81\x7f", "F16": b"\x01\x7c"}[dtype]
    path = make_dense(tmp_path / "x", change={f"{Q}.{name}": Raw(dtype, (), bits)}, input_scale=True)
    ran = call("verify", path, "--quiet")
    assert ran.rc == 1
    assert all(line.startswith("HB") for line in ran.lines), ran.stderr
    assert ("HB106" if name == "weight_scale_2" else "HB113") in ran.stderr


# --- HB110 to HB117


def test_hb110_fused_parts(tmp_path):
    """q, k, v with 1:2:8, as vLLM multiplies them all by the largest."""
    change = {f"{name}.weight_scale_2": np.float32(2.0**-12 * f) for name, f in ((Q, 1), (K, 2), (V, 8))}
    result = report(tmp_path, change=change)
    (finding,) = result.findings
    assert (finding.code, finding.tensor, finding.severity) == ("HB110", f"{K}.weight_scale_2", "warning")
    assert finding.got.startswith("k_proj, q_proj, v_proj: ")
    assert "8 times" in finding.hint
    assert result.ok


@both
def test_hb110_one_for_each_group(tmp_path, dialect):
    name = SUFFIX[dialect][2]
    change = {f"{m}.{name}": np.float32(2.0**-11 if dialect == "modelopt" else 2.0**11) for m in (GATE, K)}
    result = report(tmp_path, dialect, change=change)
    assert {f.code for f in result.findings} == {"HB110"}
    assert {f.tensor.rsplit(".", 2)[0] for f in result.findings} == {"model.layers.0.mlp", "model.layers.0.self_attn"}


def test_hb110_experts_and_layers_do_not_mix(tmp_path):
    """gate and up of one expert share; experts differ."""
    tensors = {}
    for layer in range(2):
        for e in range(3):
            for part in ("gate_proj", "up_proj"):
                name = f"model.layers.{layer}.mlp.experts.{e}.{part}"
                tensors |= named("modelopt", name, nvfp4(16, 32, scale2=2.0 ** -(10 + e + layer)))
    save(tmp_path / "model.safetensors", tensors)
    assert halfbyte.verify(tmp_path).findings == ()


@both
def test_hb111_some_lack_the_input_scale(tmp_path, dialect):
    weight, *_, name = SUFFIX[dialect]
    change = {f"{m}.{name}": None for m in (UP, DOWN)}
    result = report(tmp_path, dialect, change=change, input_scale=True)
    assert sorted(codes(result.findings)) == [("HB111", f"{m}.{weight}", None) for m in sorted((UP, DOWN))]
    assert not result.ok


@both
def test_hb112_all_lack_it(tmp_path, dialect):
    section = modelopt_section("NVFP4") if dialect == "modelopt" else ct_section(static=True)
    result = report(tmp_path, dialect, section=section)
    (finding,) = result.findings
    assert (finding.code, finding.tensor, finding.severity) == ("HB112", None, "warning")
    assert "W4A16" in finding.hint
    assert result.ok


def test_hb112_layers_that_the_config_ignores_do_not_count(tmp_path):
    change = {f"{m}.input_scale": None for m in LINEARS if "mlp" not in m}
    section = modelopt_section("NVFP4", ["lm_head", "model.embed_tokens", "*self_attn*"])
    result = report(tmp_path, change=change, section=section, input_scale=True)
    assert {f.code for f in result.findings} == {"HB202"}


@both
@pytest.mark.parametrize("value", [0.0, -2.0, np.nan, np.inf])
def test_hb113_input_scale(tmp_path, dialect, value):
    """An input scale of 0 is what an engine that never initialised it multiplies by."""
    name = f"{Q}.{SUFFIX[dialect][3]}"
    change = {name: np.full((1,), value, np.float32)}
    assert found(tmp_path, dialect, change=change, input_scale=True) == [("HB113", name, None)]


def test_hb123_kv_scale(tmp_path):
    change = {f"{K}.k_scale": np.float32(0), f"{V}.v_scale": np.float32(1)}
    (finding,) = report(tmp_path, change=change, section=modelopt_section(kv_cache_scheme=KV)).findings
    assert (finding.code, finding.tensor, finding.index) == ("HB123", f"{K}.k_scale", None)
    assert (finding.severity, "input scale" in finding.message) == ("error", False)


DTYPES = {
    "second scale of integers": (f"{Q}.weight_scale_2", np.int32(1)),
    "second scale of doubles": (f"{Q}.weight_scale_2", np.float64(1)),
    "input scale of integers": (f"{Q}.input_scale", np.int32(1)),
    "block scales in float32": (f"{Q}.weight_scale", np.ones((HIDDEN, 2), np.float32)),
    "block scales in bfloat16": (f"{Q}.weight_scale", np.ones((HIDDEN, 2), BF16)),
}


@pytest.mark.parametrize("case", DTYPES)
def test_hb114_dtypes(tmp_path, case):
    name, value = DTYPES[case]
    result = report(tmp_path, change={name: value})
    assert [(f.code, f.tensor, f.index) for f in result.findings if f.severity == "error"] == [("HB114", name, None)]


def test_hb114_fp8_scale_in_fp8(tmp_path):
    change = {"lm_head.weight": fp8(VOCAB, HIDDEN)["weight"], "lm_head.weight_scale": np.ones((VOCAB, 2), E4M3)}
    assert ("HB114", "lm_head.weight_scale", None) in found(tmp_path, change=change)


def zeroed(block_scale, packed):
    """The model with block [1, 1] of q_proj set to one scale byte and one byte of codes."""

    def change(tensors):
        scales = tensors[f"{Q}.weight_scale"].view(np.uint8).copy()
        scales[1, 1] = block_scale
        tensors[f"{Q}.weight_scale"] = scales.view(E4M3)
        tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].copy()
        tensors[f"{Q}.weight"][1, 8:16] = packed

    return change


def test_hb115_scale_zero_and_codes_that_are_not(tmp_path):
    (finding,) = report(tmp_path, change=zeroed(0, 0x21)).findings
    assert (finding.code, finding.tensor, finding.severity) == ("HB115", f"{Q}.weight", "note")
    assert finding.got == "1 blocks"


@pytest.mark.parametrize("packed", [0x00, 0x88, 0x80], ids=hex)
@pytest.mark.parametrize("scale", [0x00, 0x38, 0x20, 0x08], ids=hex)
def test_hb115_zero_blocks_of_every_tool_are_sound(tmp_path, packed, scale):
    """-0 is code 8, and a block of them is a zero block."""
    assert found(tmp_path, change=zeroed(scale, packed)) == []


def test_hb116_all_codes_zero(tmp_path):
    assert found(tmp_path, change={f"{Q}.weight": np.zeros((HIDDEN, HIDDEN // 2), np.uint8)}) == [
        ("HB116", f"{Q}.weight", None)
    ]


def test_hb116_not_for_a_single_code(tmp_path):
    codes_ = np.zeros((HIDDEN, HIDDEN // 2), np.uint8)
    codes_[-1, -1] = 0x10
    assert found(tmp_path, change={f"{Q}.weight": codes_}) == []


def test_hb117_subnormal(tmp_path):
    (finding,) = with_bytes(tmp_path, {(0, 0): 0x01, (4, 1): 0x07, (5, 1): 0x08}).findings
    assert (finding.code, finding.tensor, finding.severity) == ("HB117", f"{Q}.weight_scale", "note")
    assert finding.got.startswith("2 blocks")


def test_largest_scale_below_448_is_nothing_odd(tmp_path):
    """Four-over-six stops at 256 or 384, shared scales lower."""
    change = {f"{Q}.weight_scale": np.full((HIDDEN, 2), 0x78, np.uint8).view(E4M3)}
    assert found(tmp_path, change=change) == []


def test_an_all_zero_weight_of_modelopt_047(tmp_path):
    """Scale bytes FF and a second scale of 0: NaN when decoded."""
    change = {
        f"{OUT}.weight": np.zeros((HIDDEN, HIDDEN // 2), np.uint8),
        f"{OUT}.weight_scale": np.full((HIDDEN, 2), 0xFF, np.uint8).view(E4M3),
        f"{OUT}.weight_scale_2": np.float32(0),
    }
    result = report(tmp_path, change=change)
    assert not result.ok
    assert {"HB103", "HB106"} <= {f.code for f in result.findings}


# --- HB118 to HB122


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_hb118_dense(tmp_path, dtype, value):
    weight = np.ones((VOCAB, HIDDEN), dtype)
    weight[7, 3] = weight[9, 0] = value
    (finding,) = report(tmp_path, change={"lm_head.weight": weight}).findings
    assert (finding.code, finding.tensor, finding.index) == ("HB118", "lm_head.weight", [7, 3])
    assert finding.got == "2 values"


def test_hb118_everywhere(tmp_path):
    """A norm, a bias, a pre_quant_scale, a loose parameter, a scalar."""
    bad = {
        "model.norm.weight": np.full(HIDDEN, np.nan, BF16),
        f"{Q}.bias": np.array([0] * 31 + [np.inf], BF16),
        f"{Q}.pre_quant_scale": np.array([np.nan] + [1] * 31, BF16),
        "model.A_log": np.array([[1, np.nan]], np.float32),
        "model.scalar": np.float32(np.nan),
    }
    result = codes(report(tmp_path, change=bad).findings)
    assert sorted(f for f in result if f[0] == "HB118") == sorted(
        [
            ("HB118", "model.norm.weight", [0]),
            ("HB118", f"{Q}.bias", [31]),
            ("HB118", f"{Q}.pre_quant_scale", [0]),
            ("HB118", "model.A_log", [0, 1]),
            ("HB118", "model.scalar", None),
        ]
    )


def test_hb118_finite_extremes_are_sound(tmp_path):
    weight = np.full((VOCAB, HIDDEN), np.finfo(np.float32).max, np.float32)
    weight[0] = -np.finfo(np.float32).max
    weight[1] = np.finfo(np.float32).tiny / 4
    assert found(tmp_path, change={"lm_head.weight": weight}) == []


def test_hb119_nan_in_fp8(tmp_path):
    roles = fp8(VOCAB, HIDDEN)
    data = roles["weight"].view(np.uint8).copy()
    data[2, 30] = 0xFF
    data[40, 1] = 0x7F
    save(tmp_path / "model.safetensors", {"a.weight": data.view(E4M3), "a.weight_scale": roles["weight_scale"]})
    assert codes(halfbyte.verify(tmp_path).findings) == [("HB119", "a.weight", [2, 30])]


@pytest.mark.parametrize("name", ["hadamard", "weight_zero_point", "g_idx", "weight_scale_inv"])
def test_hb120_unknown_companion(tmp_path, name):
    result = report(tmp_path, change={f"{Q}.{name}": np.ones(4, BF16)})
    (finding,) = result.findings
    assert (finding.code, finding.tensor, finding.severity) == ("HB120", f"{Q}.{name}", "warning")
    assert result.ok
    assert call("verify", tmp_path / "x", "--strict").rc == 1


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"])
def test_hb121_scale_without_a_weight(tmp_path, name):
    assert found(tmp_path, change={f"model.gone.{name}": np.ones((), np.float32)}) == [
        ("HB121", f"model.gone.{name}", None)
    ]


def test_hb121_scales_beside_a_dense_weight(tmp_path):
    """The config says nothing; the second scale would be multiplied by nobody."""
    change = {"lm_head.weight_scale_2": np.float32(1)}
    assert found(tmp_path, change=change) == [("HB121", "lm_head.weight_scale_2", None)]


def test_hb122_provenance(tmp_path):
    bits = struct.pack(">f", 0.5).hex()
    metadata = {PROVENANCE: f'{{"{Q}.weight_global_scale": "{bits}"}}'}
    (finding,) = report(tmp_path, "compressed-tensors", metadata=metadata).findings
    assert (finding.code, finding.tensor, finding.severity) == ("HB122", f"{Q}.weight_global_scale", "warning")
    assert (finding.got, finding.expected) == (4096.0, bits)


def experts(tmp_path, scale, dialect="modelopt", parts=("gate_proj", "up_proj", "down_proj"), count=3):
    """A layer of experts whose input scales are ``scale(expert, part)``; shared experts are not numbered."""
    tensors = {}
    for e in range(count):
        for part in parts:
            tensors |= named(dialect, f"m.mlp.experts.{e}.{part}", nvfp4(16, 32, e, input_scale=scale(e, part)))
    for part in parts:
        tensors |= named(dialect, f"m.mlp.shared_experts.{part}", nvfp4(16, 32, input_scale=2.0**-9))
    save(tmp_path / "model.safetensors", tensors)
    return halfbyte.verify(tmp_path).findings


@both
@pytest.mark.parametrize("down", ["down_proj", "w2"])
def test_hb124_one_input_scale_in_all_experts(tmp_path, dialect, down):
    (finding,) = experts(tmp_path, lambda e, part: 2.0**-10, dialect, parts=("gate_proj", "up_proj", down))
    name = f"m.mlp.experts.0.{down}.{SUFFIX[dialect][3]}"
    assert (finding.code, finding.tensor, finding.index, finding.severity) == ("HB124", name, None, "warning")
    assert finding.got == f"{down} 0.000976562 in 3 experts"


def test_hb124_not_where_the_experts_differ(tmp_path):
    assert experts(tmp_path, lambda e, part: 2.0 ** -(8 + e)) == ()


def test_hb124_not_for_parts_that_read_the_input_of_the_layer(tmp_path):
    """Where each expert is shown every token, gate and up of all experts see the same largest value."""
    assert experts(tmp_path, lambda e, part: 2.0**-10 if part != "down_proj" else 2.0 ** -(8 + e)) == ()


def test_hb124_not_for_one_expert(tmp_path):
    assert experts(tmp_path, lambda e, part: 2.0**-10, count=1) == ()


@both
def test_hb125_fused_parts_with_other_input_scales(tmp_path, dialect):
    name = f"{V}.{SUFFIX[dialect][3]}"
    value = np.full((), 2.0**-9 if dialect == "modelopt" else 2.0**9, np.float32)
    (finding,) = report(tmp_path, dialect, change={name: value}, input_scale=True).findings
    first = f"{K}.{SUFFIX[dialect][3]}"
    assert (finding.code, finding.tensor, finding.severity) == ("HB125", first, "warning")
    assert finding.got == "k_proj 0.000976562, q_proj 0.000976562, v_proj 0.00195312"


# --- the index: HB130 to HB134, also in test_reader


@pytest.fixture
def shards(tmp_path):
    tensors = quantized()
    names = list(tensors)
    path = save_sharded(tmp_path / "x", [{n: tensors[n] for n in names[i::2]} for i in range(2)])
    write_json(path / "config.json", {"quantization_config": modelopt_section()})
    return path


def test_hb130_to_hb133(shards):
    index = read_json(shards / INDEX)
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    del index["weight_map"]["lm_head.weight"]
    index["metadata"]["total_size"] += 1
    write_json(shards / INDEX, index)
    save(shards / "other.safetensors", {"a": np.ones(3, np.float32)})
    assert sorted(codes(halfbyte.verify(shards).findings), key=str) == [
        ("HB130", "ghost", None),
        ("HB131", "lm_head.weight", None),
        ("HB132", None, None),
        ("HB133", None, None),
    ]


def test_hb134_dialect_not_read(tmp_path):
    save(tmp_path / "model.safetensors", {"a.comfy_quant": np.zeros(3, np.uint8)})
    (finding,) = halfbyte.inspect(tmp_path).findings
    assert (finding.code, finding.tensor, finding.severity) == ("HB134", None, "error")
    assert "ComfyUI" in finding.got


# --- configs: HB201 to HB208


def test_hb201_a_config_that_says_nothing(tmp_path):
    (finding,) = report(tmp_path, section={}).findings
    assert (finding.code, finding.tensor, finding.severity) == ("HB201", None, "warning")


def test_hb202_excluded_and_quantized(tmp_path):
    """The config excludes lm_head, the file holds it in NVFP4: the file counts."""
    change = named("modelopt", "lm_head", nvfp4(VOCAB, HIDDEN))
    result = report(tmp_path, change=change)
    (finding,) = result.findings
    assert (finding.code, finding.tensor, finding.got) == ("HB202", "lm_head.weight", "nvfp4")
    assert result.ok
    with halfbyte.open(tmp_path / "x") as checkpoint:
        assert "lm_head" in dict(checkpoint.weights())


def test_hb203_quantized_by_the_config_and_dense(tmp_path):
    change = {f"{UP}.{s}": None for s in ("weight_scale", "weight_scale_2")}
    change[f"{UP}.weight"] = floats(*MLP["up_proj"])
    parts, finding = report(tmp_path, change=change).findings
    assert (parts.code, parts.got) == ("HB126", "gate_proj nvfp4, up_proj dense")
    assert (finding.code, finding.tensor, finding.got, finding.expected) == ("HB203", f"{UP}.weight", "dense", "nvfp4")


def test_hb203_router_missing_from_the_list(tmp_path):
    change = {"model.layers.0.mlp.gate.weight": floats(4, HIDDEN)}
    assert found(tmp_path, change=change) == [("HB203", "model.layers.0.mlp.gate.weight", None)]
    section = modelopt_section(ignore=["lm_head", "model.embed_tokens", "model.layers.*.mlp.gate"])
    assert found(tmp_path / "listed", change=change, section=section) == []


@pytest.mark.parametrize("ignored", ["model.layers.0.mlp.gate_up_proj", "*gate_up_proj", "re:.*gate_up_proj"])
def test_hb203_not_where_the_fused_name_is_ignored(tmp_path, ignored):
    change = {}
    for name in (GATE, UP):
        change |= {f"{name}.{s}": None for s in ("weight_scale", "weight_scale_2")}
        change[f"{name}.weight"] = floats(INTER, HIDDEN)
    assert (
        found(tmp_path, change=change, section=modelopt_section(ignore=["lm_head", "model.embed_tokens", ignored]))
        == []
    )


def test_hb204_fp8_where_the_config_says_nvfp4(tmp_path):
    """An "NVFP4" export that held FP8: 8 bits for each parameter."""
    change = {f"{DOWN}.weight_scale_2": None} | {f"{DOWN}.{k}": v for k, v in fp8(HIDDEN, INTER).items()}
    (finding,) = report(tmp_path, change=change).findings
    assert (finding.code, finding.tensor, finding.got, finding.expected) == ("HB204", f"{DOWN}.weight", "fp8", "nvfp4")


DISAGREE = {
    "algorithms": {"quant_algo": "FP8"},
    "lists": {"exclude_modules": ["lm_head"]},
    "KV formats": {"kv_cache_quant_algo": "FP8"},
}


@pytest.mark.parametrize("case", DISAGREE)
def test_hb205_two_files_disagree(tmp_path, case):
    inner = {
        "quant_algo": "W4A16_NVFP4",
        "exclude_modules": ["model.embed_tokens", "lm_head"],
        "kv_cache_quant_algo": None,
    }
    agreeing = make_dense(
        tmp_path / "good", quant={"quantization": inner}, section=modelopt_section(kv_cache_scheme=None)
    )
    assert halfbyte.verify(agreeing).findings == ()
    quant = {"quantization": inner | DISAGREE[case]}
    result = report(tmp_path, quant=quant, section=modelopt_section(kv_cache_scheme=None))
    assert "HB205" in [f.code for f in result.findings]
    (finding,) = [f for f in result.findings if f.code == "HB205"]
    assert finding.tensor is None
    assert "config.json" in finding.got
    assert "hf_quant_config.json" in finding.expected


def test_hb205_in_a_flat_file_too(tmp_path):
    quant = {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model.embed_tokens"]}
    assert [f.code for f in report(tmp_path, quant=quant).findings] == ["HB205"]


@pytest.mark.parametrize(
    ("dialect", "section"),
    [("modelopt", ct_section()), ("compressed-tensors", modelopt_section()), ("modelopt", {"quant_method": "gptq"})],
)
def test_hb206_config_of_another_dialect(tmp_path, dialect, section):
    """Both exporters can say nvfp4-pack-quantized; the names of the tensors tell the convention."""
    result = report(tmp_path, dialect, section=section)
    finding = next(f for f in result.findings if f.code == "HB206")
    assert (finding.tensor, finding.severity, finding.expected) == (None, "warning", dialect)
    assert not [f for f in result.findings if f.severity == "error"]


def test_hb207_kv_format_without_scales(tmp_path):
    assert found(tmp_path, section=modelopt_section(kv_cache_scheme=KV)) == [("HB207", None, None)]


def test_hb207_kv_scales_without_a_format(tmp_path):
    change = {f"{K}.k_scale": np.float32(1), f"{V}.v_scale": np.float32(1)}
    assert found(tmp_path, change=change) == [("HB207", f"{K}.k_scale", None)]


def test_hb208_input_scale_of_w4a16(tmp_path):
    change = {f"{Q}.input_scale": np.float32(1)}
    assert found(tmp_path, change=change) == [("HB208", f"{Q}.input_scale", None)]


# --- the whole


def test_hb209_a_pattern_of_the_config_that_does_not_compile(tmp_path):
    result = report(tmp_path, section=modelopt_section(ignore=["re:(", "lm_head"]))
    assert [(f.code, f.severity, f.got) for f in result.findings] == [("HB209", "warning", "'re:('")]


def test_hb301_a_pattern_that_selects_nothing(tmp_path):
    path = make_dense(tmp_path / "x")
    for options in ({"include": ["*.q_proj", "lm_heed"]}, {"exclude": ["lm_heed"]}):
        assert [(f.code, f.got) for f in halfbyte.verify(path, **options).findings] == [("HB301", "lm_heed")]
        assert [(f.code, f.got) for f in halfbyte.inspect(path, **options).findings] == [("HB301", "lm_heed")]


def test_every_code_has_a_test():
    names = (
        "verify",
        "reader",
        "diff",
        "against",
        "likeness",
        "expert_checks",
        "expert_twins",
        "convert_experts",
        "suspicion",
        "packed",
    )
    text = "".join((Path(__file__).parent / f"test_{name}.py").read_text() for name in names)
    missing = [code for code in CODES if code not in re.findall(r"HB\d+", text)]
    assert not missing


def test_every_code_has_a_severity_and_a_meaning():
    for code, (severity, meaning) in CODES.items():
        assert re.fullmatch(r"HB\d{3}", code)
        assert severity in ("error", "warning", "note")
        assert meaning
    assert list(CODES) == sorted(CODES)


def test_errors_come_first(tmp_path):
    change = {f"{Q}.weight_scale_2": None, f"{OUT}.weight_scale_2": np.float32(50)}
    change[f"{K}.weight"] = np.zeros((16, HIDDEN // 2), np.uint8)
    severities = [f.severity for f in report(tmp_path, change=change).findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert set(severities) >= {"error", "warning"}


def test_several_faults_are_all_found(tmp_path):
    """One pass names everything: nothing hides behind the first."""
    change = {
        f"{Q}.weight_scale": None,
        f"{K}.weight_scale_2": np.float32(np.nan),
        f"{DOWN}.weight_scale": np.full((HIDDEN, 3), 0xFF, np.uint8).view(E4M3),
        "lm_head.weight": np.full((VOCAB, HIDDEN), np.nan, BF16),
    }
    result = codes(report(tmp_path, change=change).findings)
    assert {(code, tensor) for code, tensor, _ in result} >= {
        ("HB101", f"{Q}.weight"),
        ("HB106", f"{K}.weight_scale_2"),
        ("HB103", f"{DOWN}.weight_scale"),
        ("HB118", "lm_head.weight"),
    }


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(tmp_path, workers):
    path = many(tmp_path, 120)
    expected = [str(f) for f in halfbyte.verify(path, workers=1).findings]
    assert [str(f) for f in halfbyte.verify(path, workers=workers).findings] == expected


def test_the_order_does_not_depend_on_the_threads(tmp_path):
    scales = np.full((HIDDEN, 2), 0xFF, np.uint8).view(E4M3)
    path = make_dense(
        tmp_path / "x", layers=4, change={f"model.layers.{i}.self_attn.q_proj.weight_scale": scales for i in range(4)}
    )
    expected = codes(halfbyte.verify(path, workers=1).findings)
    for _ in range(5):
        assert codes(halfbyte.verify(path, workers=4).findings) == expected


@pytest.mark.parametrize("workers", [0, -1])
def test_no_threads(tmp_path, workers):
    with pytest.raises(UsageError):
        halfbyte.verify(make_dense(tmp_path / "x"), workers=workers)


def test_include_and_exclude_choose_what_is_read(tmp_path):
    path = make_dense(tmp_path / "x", change={"lm_head.weight": np.full((VOCAB, HIDDEN), np.nan, BF16)})
    assert not halfbyte.verify(path).ok
    assert halfbyte.verify(path, exclude=["lm_head"]).ok
    assert halfbyte.verify(path, include=["*q_proj"]).ok
    assert not halfbyte.verify(path, include=["lm_head"]).ok
    assert halfbyte.verify(path, include=["*q_proj"]).facts["bytes"] < 1000


@pytest.mark.parametrize("sample", [None, 1e-9, 0.1, 1.0])
def test_progress_ends_at_the_total(tmp_path, sample):
    seen = []
    path = make_dense(tmp_path / "x", change={f"lm_head.{k}": v for k, v in fp8(VOCAB, HIDDEN).items()})
    halfbyte.verify(path, sample=sample, progress=lambda done, total: seen.append((done, total)))
    done, total = seen[-1]
    assert done == total == max(t for _, t in seen)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


# --- a sample


def large(tmp_path, *places, **roles):
    """A weight of 1000 rows with (place, byte) pairs set in its block scales, a dense one, and a vector."""
    scales = np.full((1000, 4), 0x38, np.uint8)
    for at, byte in places:
        scales[at] = byte
    tensors = named("modelopt", "a", nvfp4(1000, 64) | {"scales": scales.view(E4M3)} | roles)
    more = {"lm_head.weight": floats(1000, 32), "norm.weight": np.ones(32, BF16)}
    save(tmp_path / "model.safetensors", tensors | more)
    return tmp_path


@pytest.mark.parametrize(("share", "rows"), [(1e-9, 2), (0.002, 2), (0.01, 10), (0.0101, 11), (0.5, 500), (1, 1000)])
def test_a_sample_reads_its_share_of_the_rows(tmp_path, share, rows):
    facts = halfbyte.verify(large(tmp_path), sample=share).facts
    whole = halfbyte.verify(tmp_path).facts
    scalars = 4 + 64  # scale2, and the norm
    assert facts["bytes"] == rows * (32 + 4 + 64) + scalars
    assert (whole["bytes"], whole["share"], whole["sample"]) == (1000 * (32 + 4 + 64) + scalars, 1.0, None)
    assert facts["share"] == facts["bytes"] / whole["bytes"]
    assert facts["sample"] == share


def test_a_sample_is_spread_and_finds_what_lies_in_it(tmp_path):
    """Every row has a NaN: those that are reported are those that were read."""
    path = large(tmp_path, (np.s_[:, 2], 0x7F))
    found = halfbyte.verify(path, sample=0.005).findings
    assert codes(found) == [("HB103", "a.weight_scale", [row, 2]) for row in (0, 249, 499, 749, 999)]


def test_a_sample_sees_codes_and_scales_of_the_same_rows(tmp_path):
    ones = np.full((1000, 32), 0x11, np.uint8)
    path = large(tmp_path, (np.s_[:, 0], 0x00), (np.s_[:, 1], 0x01), codes=ones)
    found = {f.code: f.got for f in halfbyte.verify(path, sample=0.01).findings}
    assert found == {"HB115": "10 blocks in 10 of 1000 rows", "HB117": "10 blocks (25 %) in 10 of 1000 rows"}
    path = large(tmp_path, codes=ones * 0)
    assert [(f.code, f.got) for f in halfbyte.verify(path, sample=0.01).findings] == [("HB116", "in 10 of 1000 rows")]


def test_a_sample_reads_all_scalars_and_headers(tmp_path):
    path = large(tmp_path, scale2=np.float32(np.nan))
    assert codes(halfbyte.verify(path, sample=1e-9).findings) == [("HB106", "a.weight_scale_2", None)]
    scale = np.ones((1000, 1), np.float32)
    scale[501] = np.nan
    save(path / "model.safetensors", {f"a.{k}": v for k, v in fp8(1000, 32, scale=scale).items()})
    assert codes(halfbyte.verify(path, sample=1e-9).findings) == [("HB106", "a.weight_scale", [501, 0])]


@both
@pytest.mark.parametrize("sample", [1e-9, 0.3, 1.0])
def test_a_sample_of_a_sound_one_is_sound(tmp_path, dialect, sample):
    path = make_dense(tmp_path / "x", dialect, input_scale=True, shards=3)
    assert halfbyte.verify(path, sample=sample).findings == ()


def test_a_sample_in_small_chunks(tmp_path, monkeypatch):
    from halfbyte.tools import verify as module

    monkeypatch.setattr(module, "CHUNK", 16)
    path = large(tmp_path, ((999, 3), 0xFF))
    assert codes(halfbyte.verify(path, sample=0.01).findings) == [("HB103", "a.weight_scale", [999, 3])]


@pytest.mark.parametrize("name", GOLDENS)
def test_a_sample_of_a_golden(name):
    assert halfbyte.verify(GOLDENS[name], sample=0.1).findings == ()


@pytest.mark.parametrize("sample", [0, -0.1, 1.01, np.nan, np.inf])
def test_no_share(tmp_path, sample):
    with pytest.raises(UsageError, match="share"):
        halfbyte.verify(tmp_path, sample=sample)


def test_a_sample_is_not_measured(tmp_path):
    with pytest.raises(UsageError, match="sample"):
        halfbyte.verify(tmp_path, against=tmp_path, sample=0.1)


def test_the_command_line_does_not_claim_that_all_was_read(tmp_path):
    path = large(tmp_path)
    ran = call("verify", path, "--sample")
    assert (ran.rc, ran.stderr) == (0, "")
    assert re.search(r"read 1\.\d kB, a sample of 1\.07 %, at", ran.stdout)
    assert not re.search("^sound", ran.stdout, re.M)
    assert "nothing wrong in the sample: 0 errors" in ran.stdout
    assert "sample" not in call("verify", path).stdout
    document = call("verify", path, "--sample", "--json").document
    assert (document["sample"], document["ok"]) == (0.01, True)
    assert 0.01 < document["share"] < 0.02
    ran = call("verify", large(tmp_path, ((0, 0), 0x7F)), "--sample")
    assert ran.rc == 1
    assert "NOT SOUND: 1 error" in ran.stdout


def test_exit_codes(tmp_path):
    sound = make_dense(tmp_path / "sound")
    warned = make_dense(tmp_path / "warned", section={})
    wrong = make_dense(tmp_path / "wrong", change={f"{Q}.weight_scale_2": None})
    assert [call("verify", p).rc for p in (sound, warned, wrong)] == [0, 0, 1]
    assert [call("verify", p, "--strict").rc for p in (sound, warned, wrong)] == [0, 1, 1]
    noted = make_dense(tmp_path / "noted", change=zeroed(0, 0x21))
    assert call("verify", noted, "--strict").rc == 0


def test_the_document(tmp_path):
    path = make_dense(tmp_path / "x", change={f"{Q}.weight_scale_2": None})
    ran = call("verify", path, "--json")
    assert (ran.rc, ran.stderr) == (1, "")
    document = ran.document
    assert not document["ok"]
    (finding,) = document["findings"]
    assert {k: finding[k] for k in ("code", "severity", "tensor", "index", "got", "expected")} == {
        "code": "HB105",
        "severity": "error",
        "tensor": f"{Q}.weight",
        "index": None,
        "got": None,
        "expected": None,
    }
    assert finding["hint"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_odd_numbers_are_json(tmp_path, value):
    """NaN and Infinity are not JSON, and half of all parsers stop at them."""
    for name, more in ((f"{Q}.weight_scale_2", {}), (f"{Q}.input_scale", {"input_scale": True})):
        path = make_dense(tmp_path / name, change={name: np.float32(value)}, **more)
        assert call("verify", path, "--json").document["findings"]


def test_lines_of_findings(tmp_path):
    ran = call("verify", make_dense(tmp_path / "x", change={f"{Q}.weight_scale_2": None}))
    assert ran.rc == 1
    assert "NOT SOUND: 1 error," in ran.stdout
    (line,) = ran.lines
    assert line.startswith("HB105 error: ")
    assert f"{Q}.weight" in line


def test_quiet_prints_findings_only(tmp_path):
    path = make_dense(tmp_path / "x", change={f"{Q}.weight_scale_2": None})
    ran = call("verify", path, "--quiet")
    assert (ran.rc, ran.stdout, len(ran.lines)) == (1, "", 1)


@pytest.mark.parametrize("name", GOLDENS)
def test_a_scale_byte_of_a_golden_set_to_nan_is_found(tmp_path, name):
    path = copy_golden(name, tmp_path / "x")
    with halfbyte.open(path) as checkpoint:
        scales = [t for t in checkpoint.tensors.values() if t.dtype == "F8_E4M3" and t.name.endswith("weight_scale")]
    for tensor in scales[:2]:
        file = Path(tensor.file)
        before = file.read_bytes()
        at = tensor.nbytes - 3
        data = bytearray(before)
        data[tensor.start + at] = 0x7F
        file.write_bytes(bytes(data))
        row, block = divmod(at, tensor.shape[1])
        assert codes(halfbyte.verify(path).findings) == [("HB103", tensor.name, [row, block])]
        file.write_bytes(before)
