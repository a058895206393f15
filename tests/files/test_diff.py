"""``diff``: what is the same, what has the same values in other bytes, and the first place that differs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    GOLDENS,
    LINEARS,
    OUT,
    UP,
    K,
    Q,
    Raw,
    call,
    check_failure,
    codes,
    copy_golden,
    f4,
    floats,
    fp8,
    make_dense,
    named,
    nvfp4,
    quantized,
    read_json,
    run_cli,
    save,
    tensors_of,
    write_json,
)
from halfbyte.errors import FormatError, UnreadDialectError
from halfbyte.numerics import E2M1_VALUES, E4M3_VALUES
from halfbyte.tools import diff as module

CT = "compressed-tensors"
NVFP4, TWIN = GOLDENS["modelopt_llama_nvfp4"], GOLDENS["ct_llama_nvfp4"]


def pair(tmp_path, mine, theirs, **options):
    """The report on two files."""
    paths = [save(tmp_path / f"{name}.safetensors", tensors) for name, tensors in (("a", mine), ("b", theirs))]
    return halfbyte.diff(*paths, **options)


def counts(report):
    return tuple(report.facts[key] for key in ("same", "same_values", "different", "only_a", "only_b"))


def altered(roles, role, place, value):
    """The roles of a weight with one element set."""
    array = np.array(roles[role])
    array.view(np.uint8)[place] = value
    return roles | {role: array}


def weight(roles):
    return named("modelopt", "m", roles)


# --- the same


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_are_themselves(name):
    report = halfbyte.diff(GOLDENS[name], GOLDENS[name])
    assert report.findings == ()
    with halfbyte.open(GOLDENS[name]) as checkpoint:
        assert counts(report) == (len(checkpoint.modules), 0, 0, 0, 0)
        assert report.facts["bytes"] == sum(t.nbytes for t in checkpoint.tensors.values())


@pytest.mark.parametrize("name", [n for n in GOLDENS if not n.startswith("ct")])
def test_our_conversion_is_equal(tmp_path, name):
    halfbyte.convert(GOLDENS[name], tmp_path / "ct", to=CT)
    report = halfbyte.diff(GOLDENS[name], tmp_path / "ct")
    assert report.findings == ()
    assert report.facts["same"] > 0
    assert report.facts["dialects"] == ["modelopt", CT]
    assert halfbyte.diff(tmp_path / "ct", GOLDENS[name]).findings == ()


def test_the_twin_differs_by_the_rounding_of_its_reciprocals():
    """Where 1/RN(1/x) is x, the modules are the same; elsewhere scale2 is one float off, and no more."""
    report = halfbyte.diff(NVFP4, TWIN)
    with halfbyte.open(NVFP4) as a, halfbyte.open(TWIN) as b:
        mine, theirs = dict(a.weights()), dict(b.weights())
    off = {name for name, w in mine.items() if w.scale2 != theirs[name].scale2}
    assert off
    for name in off:
        assert abs(int(mine[name].scale2.view(np.int32)[0, 0]) - int(theirs[name].scale2.view(np.int32)[0, 0])) == 1
    inputs = {name for name, w in mine.items() if w.input_scale != theirs[name].input_scale}
    assert {f.tensor for f in report.findings if f.code == "HB402"} == {f"{name}.weight" for name in off}
    assert {f.tensor for f in report.findings if f.code == "HB405"} == {f"{name}.input_scale" for name in inputs}
    assert counts(report) == (12 - len(off | inputs), 0, len(off | inputs), 0, 0)
    assert all("only the scale of the whole differs" in f.hint for f in report.findings if f.code == "HB402")


def test_provenance_is_part_of_the_meaning(tmp_path):
    """Our conversion has the twin's bytes and remembers more: it is the source, and the twin is not."""
    halfbyte.convert(NVFP4, tmp_path / "ct", to=CT)
    ours, peer = ({n: t.data for n, t in tensors_of(path).items()} for path in (tmp_path / "ct", TWIN))
    assert ours == peer
    assert codes(halfbyte.diff(tmp_path / "ct", TWIN).findings) == [
        (code, tensor.replace(".weight", ".weight_packed"), index)
        for code, tensor, index in codes(halfbyte.diff(NVFP4, TWIN).findings)
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_and_dtypes_of_bytes_do_not_matter(tmp_path, workers):
    change = {f"{Q}.weight": f4(quantized()[f"{Q}.weight"])}
    change[f"{K}.weight_scale"] = quantized()[f"{K}.weight_scale"].view(np.uint8)
    a = make_dense(tmp_path / "a", shards=3)
    b = make_dense(tmp_path / "b", CT)
    c = make_dense(tmp_path / "c", change=change)
    for other in (b, c):
        report = halfbyte.diff(a, other, workers=workers)
        assert report.findings == ()
        assert counts(report) == (12, 0, 0, 0, 0)


# --- the same values in other bytes: HB403


def zero_blocks():
    """Two spellings of a weight with a zero block: zero codes of scale 1, and any codes of scale 0."""
    roles = nvfp4(4, 64)
    one, other = (np.array(roles["codes"]), np.array(roles["scales"])), np.array(roles["scales"])
    one[0][2, 8:16] = 0
    one[1].view(np.uint8)[2, 1] = 0x38
    other.view(np.uint8)[2, 1] = 0
    return roles | {"codes": one[0], "scales": one[1]}, roles | {"scales": other}


def minus_zero():
    roles = altered(nvfp4(4, 64), "codes", (3, 5), 0x01)
    return roles, altered(roles, "codes", (3, 5), 0x81)


def doubled():
    """Block scales and scale2 with the same product."""
    roles = nvfp4(4, 64) | {"scales": np.full((4, 4), 0x38, np.uint8).view(E4M3)}
    twice = {"scales": np.full((4, 4), 0x40, np.uint8).view(E4M3), "scale2": roles["scale2"] / 2}
    return roles, roles | twice


@pytest.mark.parametrize("spellings", [zero_blocks, minus_zero, doubled], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dialect", ["modelopt", CT])
def test_same_values(tmp_path, spellings, dialect):
    mine, theirs = spellings()
    report = pair(tmp_path, weight(mine), named(dialect, "m", theirs))
    assert codes(report.findings) == [("HB403", "m.weight", None)]
    assert report.ok
    assert counts(report) == (0, 1, 0, 0, 0)
    ran = call("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert ran.rc == 0
    assert "equal: 0 modules the same, 1 the same values in other bytes" in ran.stdout
    assert ran.stderr.startswith("HB403 note: m.weight: same values in other bytes")


def test_nan_is_nan(tmp_path):
    """Whatever its codes, a block of a NaN scale is NaN."""
    roles = altered(nvfp4(4, 64), "scales", (1, 1), 0x7F)
    other = altered(altered(roles, "scales", (1, 1), 0xFF), "codes", (1, 9), 0x77)
    assert codes(pair(tmp_path, weight(roles), weight(other)).findings) == [("HB403", "m.weight", None)]
    (finding,) = pair(tmp_path, weight(roles), weight(nvfp4(4, 64))).findings
    assert (finding.code, finding.index) == ("HB402", [1, 1])
    assert np.isnan(finding.got)
    assert "by at most inf" in finding.hint


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_dense_in_another_dtype(tmp_path, dtype):
    mine = floats(4, 8, std=1.0).astype(np.float16).astype(BF16)
    (finding,) = pair(tmp_path, {"m.weight": mine}, {"m.weight": mine.astype(dtype)}).findings
    assert (finding.code, finding.got) == ("HB403", "BF16 [4, 8]")


def test_an_fp8_scale_for_each_row_or_for_all(tmp_path):
    mine, theirs = (
        {f"m.{name}": array for name, array in fp8(4, 8, scale=scale).items()} for scale in (0.5, np.full((4, 1), 0.5))
    )
    assert codes(pair(tmp_path, mine, theirs).findings) == [("HB403", "m.weight", None)]


# --- different: HB402


def value(roles, row, column):
    """One value, from the tables alone."""
    byte = int(roles["codes"][row, column // 2])
    scale = E4M3_VALUES[int(roles["scales"].view(np.uint8)[row, column // 16])]
    return float(np.float32(E2M1_VALUES[byte >> 4 if column % 2 else byte & 15] * scale) * roles["scale2"])


@pytest.mark.parametrize("dialect", ["modelopt", CT])
@pytest.mark.parametrize("column", [0, 17, 30, 63])
def test_one_code(tmp_path, dialect, column):
    roles = altered(nvfp4(8, 64), "codes", (5, column // 2), 0x22)
    other = altered(roles, "codes", (5, column // 2), 0x52 if column % 2 else 0x25)
    (finding,) = pair(tmp_path, named(dialect, "m", roles), weight(other)).findings
    name = {"modelopt": "m.weight", CT: "m.weight_packed"}[dialect]
    assert (finding.code, finding.tensor, finding.index) == ("HB402", name, [5, column // 16])
    assert (finding.got, finding.expected) == (value(roles, 5, column), value(other, 5, column))
    gap = value(other, 5, column) - value(roles, 5, column)
    assert finding.hint == f"1 of 512 elements in 1 of 8 rows differ, by at most {gap:.3g} (relative 0.667)"


def test_one_scale_byte(tmp_path):
    roles = altered(nvfp4(8, 64), "codes", (6, slice(16, 24)), 0x22)
    roles = altered(roles, "scales", (6, 2), 0x38)
    (finding,) = pair(tmp_path, weight(roles), weight(altered(roles, "scales", (6, 2), 0x40))).findings
    assert (finding.code, finding.index) == ("HB402", [6, 2])
    assert (finding.got, finding.expected) == (2.0**-12, 2.0**-11)
    assert finding.hint.startswith("16 of 512 elements in 1 of 8 rows differ, by at most 0.000244 (relative 0.5)")


def test_scale2(tmp_path):
    roles = altered(nvfp4(8, 64), "codes", (0, slice(0, 24)), 0)
    (finding,) = pair(tmp_path, weight(roles), weight(roles | {"scale2": np.float32(2.0**-13)})).findings
    assert (finding.code, finding.index) == ("HB402", [0, 3])
    assert finding.got == 2 * finding.expected
    assert "in 8 of 8 rows" in finding.hint
    assert finding.hint.endswith("(relative 0.5); only the scale of the whole differs")


def test_the_last_value_of_many_rows(tmp_path, monkeypatch):
    """The first place and the counts do not depend on how the elements are cut."""
    roles = altered(nvfp4(37, 96), "codes", (36, 47), 0x22)
    other = altered(altered(roles, "codes", (36, 47), 0x52), "scales", (20, 5), 0x09)
    roles = altered(roles, "scales", (20, 5), 0x39)
    reports = []
    for step in (32, 64, 1 << 19):
        monkeypatch.setattr(module, "_STEP", step)
        reports.append(pair(tmp_path, weight(roles), weight(other)).findings)
    assert reports[0] == reports[1] == reports[2]
    assert codes(reports[0]) == [("HB402", "m.weight", [20, 5])]
    assert "in 2 of 37 rows" in reports[0][0].hint


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64, np.int64, np.int8, np.bool_])
@pytest.mark.parametrize("shape", [(), (8,), (3, 8), (2, 3, 8)], ids=str)
def test_dense(tmp_path, dtype, shape):
    mine = np.zeros(shape, dtype)
    theirs = mine.copy()
    place = tuple(n - 1 for n in shape)
    theirs[place] = 1
    (finding,) = pair(tmp_path, {"m.table": mine}, {"m.table": theirs}).findings
    assert codes([finding]) == [("HB402", "m.table", list(place) or None)]
    assert (finding.got, finding.expected) == (0, 1)


def test_formats_without_numbers_are_compared_as_bytes(tmp_path):
    mine, theirs = ({"m.table": Raw("F4", (4, 4), bytes([1] * 7 + [last]))} for last in (1, 2))
    assert pair(tmp_path, mine, mine).findings == ()
    assert codes(pair(tmp_path, mine, theirs).findings) == [("HB402", "m.table", [7])]


@pytest.mark.parametrize("scale", [0.5, np.full((300, 1), 0.5), np.full((3, 2), 0.5)], ids=["tensor", "row", "block"])
def test_fp8(tmp_path, scale):
    mine = {f"m.{name}": array for name, array in fp8(300, 200, scale=scale).items()}
    mine["m.weight"].view(np.uint8)[299, 150] = 0x38
    changed = np.array(mine["m.weight_scale"])
    changed[(-1,) * changed.ndim] = 0.25
    assert pair(tmp_path, mine, mine).findings == ()
    (finding,) = pair(tmp_path, mine, mine | {"m.weight_scale": changed}).findings
    row, column = {0: (0, 0), 300: (299, 0), 6: (256, 128)}[changed.size if changed.ndim else 0]
    assert finding.code == "HB402"
    assert finding.index[0] == row
    assert finding.index[1] >= column  # the first that is not zero
    data = np.array(mine["m.weight"])
    data.view(np.uint8)[299, 150] = 0x40
    (finding,) = pair(tmp_path, mine, mine | {"m.weight": data}).findings
    assert (finding.index, finding.got, finding.expected) == ([299, 150], 0.5, 1.0)


@pytest.mark.parametrize("make", [np.asarray, f4], ids=["U8", "F4"])
def test_mxfp4(tmp_path, make):
    codes = np.zeros((2, 32), np.uint8)
    codes[1, 20] = 0x20  # 1 at column 41
    mine = {"x.weight": make(codes), "x.weight_scale": Raw("F8_E8M0", (2, 2), b"\x7f\x7f\x7f\x80")}
    assert pair(tmp_path, mine, mine).findings == ()
    theirs = mine | {"x.weight_scale": Raw("F8_E8M0", (2, 2), b"\x70\x7f\x7f\x80")}
    assert [(f.code, f.tensor, f.index) for f in pair(tmp_path, mine, theirs).findings] == [("HB403", "x.weight", None)]
    theirs = mine | {"x.weight_scale": Raw("F8_E8M0", (2, 2), b"\x7f\x7f\x7f\x7f")}
    (finding,) = pair(tmp_path, mine, theirs).findings
    assert (finding.code, finding.index, finding.got, finding.expected) == ("HB402", [1, 1], 2.0, 1.0)


def test_bias_and_unknown_tensors(tmp_path):
    mine = weight(nvfp4(8, 64)) | {"m.bias": np.zeros(8, BF16), "m.zero_point": np.zeros(2, np.int64)}
    bias, point = np.zeros(8, BF16), np.array([0, 4])
    bias[5] = 1
    theirs = mine | {"m.bias": bias, "m.zero_point": point}
    found = codes(pair(tmp_path, mine, theirs).findings)
    assert sorted(found) == [("HB402", "m.bias", [5]), ("HB402", "m.zero_point", [1])]
    bias[5] = -0.0
    assert codes(pair(tmp_path, mine, mine | {"m.bias": bias}).findings) == [("HB403", "m.bias", None)]


# --- modules, shapes, kinds and scales: HB401, HB404 to HB407


def test_a_module_in_one_only(tmp_path):
    gone = [name for name in quantized() if name.startswith((f"{Q}.", "lm_head."))]
    a, b = make_dense(tmp_path / "a"), make_dense(tmp_path / "b", change=dict.fromkeys(gone))
    report = halfbyte.diff(a, b)
    assert {(f.code, f.tensor, f.got) for f in report.findings} == {
        ("HB401", f"{Q}.weight", f"only in {a}"),
        ("HB401", "lm_head.weight", f"only in {a}"),
    }
    assert counts(report) == (10, 0, 0, 2, 0)
    report = halfbyte.diff(b, a)
    assert {f.got for f in report.findings} == {f"only in {a}"}
    assert counts(report) == (10, 0, 0, 0, 2)
    assert call("diff", a, b).rc == call("diff", b, a).rc == 1


def test_another_shape(tmp_path):
    mine, theirs = (weight(nvfp4(n, k)) for n, k in ((8, 64), (8, 32)))
    mine["n.weight"], theirs["n.weight"] = np.zeros((2, 3), BF16), np.zeros((3, 2), BF16)
    report = pair(tmp_path, mine, theirs)
    assert {(f.code, f.tensor, str(f.got), str(f.expected)) for f in report.findings} == {
        ("HB404", "m.weight", "[8, 64]", "[8, 32]"),
        ("HB404", "n.weight", "[2, 3]", "[3, 2]"),
    }
    assert counts(report) == (0, 0, 2, 0, 0)


@pytest.mark.parametrize("exact", [True, False])
def test_dense_against_quantized(tmp_path, exact):
    roles = nvfp4(8, 64, input_scale=0.5)
    mine = weight(roles)
    with halfbyte.open(save(tmp_path / "x.safetensors", mine)) as checkpoint:
        values = next(checkpoint.weights())[1].dequantize()
    column = int(np.flatnonzero(values[7] != 0)[-1])
    values[7, column] *= 1 if exact else 2
    report = pair(tmp_path, mine, {"m.weight": values})
    kinds = report.findings[-1] if not exact else report.findings[0]
    assert (kinds.code, kinds.got, kinds.expected) == ("HB406", "nvfp4", "dense")
    other = ("HB403", "m.weight", None) if exact else ("HB402", "m.weight", [7, column])
    assert other in codes(report.findings)
    assert len(report.findings) == 2
    assert report.ok == exact


def test_a_dequantized_checkpoint_has_the_same_values(tmp_path):
    halfbyte.dequantize_checkpoint(NVFP4, tmp_path / "dense", dtype="float32")
    report = halfbyte.diff(NVFP4, tmp_path / "dense")
    assert report.ok
    assert counts(report) == (5, 7, 0, 0, 0)
    assert {f.code for f in report.findings} == {"HB403", "HB406"}
    halfbyte.dequantize_checkpoint(NVFP4, tmp_path / "rounded", dtype="bfloat16")
    assert not halfbyte.diff(NVFP4, tmp_path / "rounded").ok


@pytest.mark.parametrize("dialect", ["modelopt", CT])
def test_input_scales(tmp_path, dialect):
    mine, theirs = (named(dialect, "m", nvfp4(8, 64, input_scale=s)) for s in (0.5, 0.25))
    name = {"modelopt": "m.input_scale", CT: "m.input_global_scale"}[dialect]
    (finding,) = pair(tmp_path, mine, theirs).findings
    assert (finding.code, finding.tensor, finding.index) == ("HB405", name, None)
    assert (finding.got, finding.expected, finding.hint) == (0.5, 0.25, "by 0.25 (relative 0.5)")
    (finding,) = pair(tmp_path, mine, weight(nvfp4(8, 64))).findings
    assert (finding.code, finding.tensor, finding.got) == ("HB407", name, f"only in {tmp_path / 'a.safetensors'}")
    (finding,) = pair(tmp_path, weight(nvfp4(8, 64)), mine).findings
    assert (finding.code, finding.tensor, finding.got) == ("HB407", name, f"only in {tmp_path / 'b.safetensors'}")


@pytest.mark.parametrize("suffix", ["k_scale", "v_scale", "pre_quant_scale"])
def test_other_scales(tmp_path, suffix):
    ones = np.ones(64 if suffix == "pre_quant_scale" else (), np.float32)
    mine = weight(nvfp4(8, 64)) | {f"m.{suffix}": ones}
    index = [0] if ones.ndim else None
    assert codes(pair(tmp_path, mine, mine | {f"m.{suffix}": ones * 2}).findings) == [("HB405", f"m.{suffix}", index)]
    assert codes(pair(tmp_path, mine, weight(nvfp4(8, 64))).findings) == [("HB407", f"m.{suffix}", None)]


def test_kv_scales_of_a_module_without_weight(tmp_path):
    """[] and [1] are one number."""
    mine, theirs, other = ({"attn.k_scale": np.array(v, np.float32)} for v in (0.5, [0.5], 0.25))
    assert pair(tmp_path, mine, theirs).findings == ()
    assert codes(pair(tmp_path, mine, other).findings) == [("HB405", "attn.k_scale", None)]


# --- options, errors and the command line


def test_include_and_exclude(tmp_path):
    change = {f"{Q}.weight_scale_2": np.float32(2.0**-11), f"{UP}.weight_scale_2": np.float32(2.0**-11)}
    a, b = make_dense(tmp_path / "a"), make_dense(tmp_path / "b", change=change)
    assert {f.tensor for f in halfbyte.diff(a, b).findings} == {f"{Q}.weight", f"{UP}.weight"}
    assert [f.tensor for f in halfbyte.diff(a, b, include=["*.q_proj"]).findings] == [f"{Q}.weight"]
    assert [f.tensor for f in halfbyte.diff(a, b, exclude=["*.q_proj"]).findings] == [f"{UP}.weight"]
    report = halfbyte.diff(a, b, include=[OUT, "nothing"])
    assert [(f.code, f.got) for f in report.findings] == [("HB301", "nothing")]
    assert counts(report) == (1, 0, 0, 0, 0)
    assert call("diff", a, b, "--include", OUT).rc == 0


def test_a_pattern_of_modules_in_one_only_is_not_idle(tmp_path):
    mine, theirs = {"m.weight": floats(2, 4)}, {"n.weight": floats(2, 4)}
    assert {f.code for f in pair(tmp_path, mine, theirs, include=["m", "n"]).findings} == {"HB401"}


def test_a_tensor_by_itself_with_the_name_of_a_module(tmp_path):
    mine = {"m.part": np.zeros(2, np.float32), "m.part.weight": np.zeros((2, 2), np.float32)}
    report = pair(tmp_path, mine, mine | {"m.part": np.ones(2, np.float32)})
    assert codes(report.findings) == [("HB402", "m.part", [0])]
    assert counts(report) == (1, 0, 1, 0, 0)


def test_findings_are_in_the_order_of_the_first(tmp_path):
    change = {f"{name}.weight_scale_2": np.float32(2.0**-11) for name in LINEARS}
    a, b = make_dense(tmp_path / "a"), make_dense(tmp_path / "b", change=change)
    reports = [halfbyte.diff(a, b, workers=workers).findings for workers in (1, 4)]
    assert reports[0] == reports[1]
    with halfbyte.open(a) as checkpoint:
        order = [name for name in checkpoint.tensors if name.removesuffix(".weight") in LINEARS]
    assert [f.tensor for f in reports[0]] == order


@pytest.mark.parametrize("other", ["shape", "kind", "scales"])
def test_progress_ends_at_all_bytes(tmp_path, other):
    mine = weight(nvfp4(8, 64, input_scale=0.5)) | {"m.bias": np.zeros(8, BF16), "d.weight": floats(4, 8)}
    theirs = {
        "shape": weight(nvfp4(8, 32, input_scale=0.25)) | {"m.bias": np.zeros(4, BF16), "d.weight": floats(8, 4)},
        "kind": {"m.weight": floats(8, 64), "d.weight": floats(4, 8)},
        "scales": weight(nvfp4(8, 64, scale2=1.0)) | {"d.weight": floats(4, 8, 1)},
    }[other]
    told = []
    report = pair(tmp_path, mine, theirs, progress=lambda done, total: told.append((done, total)))
    total = sum(np.asarray(t).nbytes for t in mine.values())
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert report.facts["bytes"] == total


def test_weights_that_are_none_are_refused(tmp_path):
    """A weight without its scales has no values to compare: verify's to tell."""
    path = make_dense(tmp_path / "a", change={f"{Q}.weight_scale": None})
    with pytest.raises(FormatError, match="without its scales"):
        halfbyte.diff(path, make_dense(tmp_path / "b"))
    check_failure(call("diff", path, tmp_path / "b"), 2, f"{Q}.weight")
    assert halfbyte.diff(path, tmp_path / "b", exclude=[Q]).ok


def test_dialects_that_are_not_read_are_refused(tmp_path):
    path = save(tmp_path / "x.safetensors", {"m.weight": np.zeros((4, 8), np.uint8), "m.comfy_quant": np.zeros(4)})
    with pytest.raises(UnreadDialectError):
        halfbyte.diff(path, NVFP4)
    check_failure(call("diff", NVFP4, path), 2, path)


def test_statuses(tmp_path):
    same = call("diff", NVFP4, NVFP4)
    assert (same.rc, same.stderr) == (0, "")
    assert "equal: 12 modules the same" in same.stdout
    different = run_cli("diff", NVFP4, TWIN)
    assert different.rc == 1
    assert "DIFFERENT: " in different.stdout
    assert all(line.startswith("HB40") for line in different.lines)
    check_failure(call("diff", NVFP4, tmp_path / "nothing"), 2, tmp_path / "nothing")
    check_failure(call("diff", NVFP4), 2, "halfbyte diff --help")
    check_failure(call("diff", NVFP4, NVFP4, "--workers", "0"), 2, "workers")
    quiet = call("diff", NVFP4, TWIN, "--quiet")
    assert (quiet.rc, quiet.stdout) == (1, "")


def test_json(tmp_path):
    ran = call("diff", NVFP4, TWIN, "--json")
    assert (ran.rc, ran.stderr) == (1, "")
    assert ran.document["ok"] is False
    assert ran.document["command"] == "diff"
    assert {f["code"] for f in ran.document["findings"]} <= {"HB402", "HB405"}
    nan = {"m.weight": np.array([np.nan, 1], np.float32)}
    pair(tmp_path, nan, {"m.weight": np.ones(2, np.float32)})
    (finding,) = call("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json").document["findings"]
    assert (finding["got"], finding["expected"], finding["index"]) == ("nan", 1.0, [0])


def test_complex_numbers(tmp_path):
    mine, theirs = (Raw("C64", (2,), np.array([1j, second], np.complex64).tobytes()) for second in (2, 3 + 4j))
    paths = []
    for name, raw in (("a", mine), ("b", theirs)):
        header = f'{{"m.freqs":{{"dtype":"C64","shape":[2],"data_offsets":[0,{len(raw.data)}]}}}}'.encode()
        paths.append(tmp_path / f"{name}.safetensors")
        paths[-1].write_bytes(len(header).to_bytes(8, "little") + header + raw.data)
    (finding,) = call("diff", *paths, "--json").document["findings"]
    assert (finding["index"], finding["got"], finding["expected"]) == ([1], "(2+0j)", "(3+4j)")


def test_configs_are_not_compared(tmp_path):
    path = copy_golden("modelopt_llama_nvfp4", tmp_path / "x")
    write_json(path / "config.json", read_json(path / "config.json") | {"vocab_size": 1})
    assert halfbyte.diff(NVFP4, path).findings == ()


@pytest.mark.parametrize("differ", [False, True])
def test_memory_does_not_grow_with_rows(tmp_path, differ, monkeypatch):
    monkeypatch.setattr(module, "_STEP", 1 << 14)
    peaks = []
    for rows in (64, 4096):
        roles = nvfp4(rows, 512)
        other = roles | {"scale2": np.float32(2.0**-11)} if differ else roles
        mine, theirs = (weight(r) | {"d.weight": floats(rows, 512)} for r in (roles, other))
        paths = [save(tmp_path / f"{name}{rows}.safetensors", t) for name, t in (("a", mine), ("b", theirs))]
        halfbyte.diff(*paths, workers=1)
        tracemalloc.start()
        report = halfbyte.diff(*paths, workers=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert report.ok != differ
    assert peaks[1] < peaks[0] * 1.2 + 1e5


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0,)], ids=str)
def test_nothing_in_a_tensor(tmp_path, shape):
    mine = {"m.weight": np.zeros(shape, np.float32)}
    assert pair(tmp_path, mine, mine).findings == ()
    assert codes(pair(tmp_path, mine, {"m.weight": np.zeros((0, 3), np.float32)}).findings) == [
        ("HB404", "m.weight", None)
    ]
