"""``verify --against``: the error of every weight, and what is wrong with each one that was spoilt on purpose."""

from __future__ import annotations

import math

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    call,
    check_failure,
    codes,
    floats,
    make_float,
    save,
    write_json,
)
from halfbyte import diagnose as dg
from halfbyte.errors import FormatError, UsageError, WeightError
from halfbyte.layouts import Order
from halfbyte.layouts.executors import arrange, restore
from halfbyte.modules import Reading
from halfbyte.numerics import pack_nibbles, unpack_nibbles
from halfbyte.weight import Fp8Weight, Weight
from helpers import exact

SHAPES = [(256, 512), (200, 336), (1024, 256)]
GAUSSIAN = (0.09, 0.10)


def gaussian(n, k, seed=0, std=0.02):
    return (np.random.default_rng([n, k, seed, 5]).standard_normal((n, k)) * std).astype(np.float32)


def to_fp8(dense, per_row=False):
    scale = np.abs(dense).max(axis=1 if per_row else None, keepdims=True) / np.float32(448)
    return Fp8Weight(data=(dense / scale).astype(E4M3), scale=scale)


# --- errors


@pytest.mark.parametrize("shape", [*SHAPES, (1, 16), (3, 4112), (700, 1000)])
def test_errors_are_those_of_the_definition(shape):
    """Against f64 sums over the whole tensor, by ml_dtypes' tables; K that is no multiple of 16 included."""
    n, k = shape
    dense = gaussian(n, k)
    padded = np.pad(dense, ((0, 0), (0, -k % 16)))
    weight = halfbyte.quantize(padded)
    weight = weight.replace(k=k)
    error = dg.error_of(weight, dense)
    wrong = exact(weight) - dense
    assert error.relative == pytest.approx(np.linalg.norm(wrong) / np.linalg.norm(dense), rel=1e-6)
    assert error.sqnr == pytest.approx(-20 * math.log10(error.relative))
    squares = [np.square(np.pad(x, ((0, 0), (0, -k % 16)))).reshape(n, -1, 16).sum(-1) for x in (wrong, dense * 1.0)]
    share = squares[0] / np.maximum(squares[1], squares[1].mean(-1, keepdims=True))
    assert error.worst == np.unravel_index(share.argmax(), share.shape)
    assert error.worst_relative == pytest.approx(math.sqrt(share.max()), rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_gaussian_weights_have_the_format_s_own_error(shape):
    dense = gaussian(*shape)
    weight = halfbyte.quantize(dense)
    assert GAUSSIAN[0] < dg.error_of(weight, dense).relative < GAUSSIAN[1]
    assert dg.needed(dense) == dg.error_of(weight, dense).relative
    assert dg.diagnose(weight, dense) is None


def test_the_worst_block_is_found():
    dense = gaussian(300, 512)
    weight = halfbyte.quantize(dense)
    scales = weight.scales.copy()
    scales[277, 13] = 0
    error = dg.error_of(weight.replace(scales=scales), dense)
    assert error.worst == (277, 13)
    norm = np.linalg.norm(dense.reshape(300, 32, 16)[277], axis=-1)
    assert error.worst_relative == pytest.approx(min(1, norm[13] / np.sqrt(np.square(norm).mean())), rel=1e-5)


def test_values_that_are_not_finite():
    dense = gaussian(32, 64)
    weight = halfbyte.quantize(dense)
    scales = weight.scales.copy()
    scales[5, 2] = 0x7F
    error = dg.error_of(weight.replace(scales=scales), dense)
    assert (error.relative, error.sqnr, error.worst, error.worst_relative) == (math.inf, -math.inf, (5, 2), math.inf)
    assert dg.diagnose(weight.replace(scales=scales), dense) is None


def test_zeros():
    zeros = np.zeros((32, 64), np.float32)
    error = dg.error_of(halfbyte.quantize(zeros), zeros)
    assert (error.relative, error.sqnr, error.worst_relative) == (0, math.inf, 0)
    assert dg.diagnose(halfbyte.quantize(zeros), zeros) is None
    error = dg.error_of(halfbyte.quantize(gaussian(32, 64)), zeros)
    assert (error.relative, error.sqnr, error.worst_relative) == (math.inf, -math.inf, math.inf)
    assert dg.diagnose(halfbyte.quantize(gaussian(32, 64)), zeros) is None
    assert (
        dg.error_of(
            Weight(codes=np.zeros((0, 8), np.uint8), scales=np.zeros((0, 1), np.uint8), scale2=1), zeros[:0, :16]
        )
        == dg.Errors()
    )


def test_another_shape_is_refused():
    with pytest.raises(WeightError, match="another shape"):
        dg.error_of(halfbyte.quantize(gaussian(32, 64)), gaussian(64, 32))


def test_pre_scale_is_part_of_the_weight():
    dense = gaussian(64, 128)
    pre = np.exp2(np.random.default_rng(1).integers(-2, 3, 128)).astype(np.float32)
    weight = halfbyte.quantize(dense / pre).replace(pre_scale=pre.astype(BF16))
    assert dg.error_of(weight, dense).relative == pytest.approx(dg.needed(dense, weight.pre_scale), rel=1e-5)
    assert dg.error_of(weight, dense).relative < dg.bound_of(weight, dense)
    assert dg.diagnose(weight, dense) is None


@pytest.mark.parametrize("per_row", [False, True])
def test_fp8(per_row):
    dense = gaussian(200, 336)
    assert 0.02 < dg.error_of(to_fp8(dense, per_row), dense).relative < 0.03
    assert dg.diagnose(to_fp8(dense, per_row), dense) is None


def test_fp8_blocks():
    rng = np.random.default_rng(2)
    weight = Fp8Weight(
        data=rng.integers(0, 0x7E, (300, 200), np.uint8), scale=rng.uniform(1, 2, (3, 2)), block=(128, 128)
    )
    assert dg.error_of(weight, weight.dequantize()).relative == 0
    taken = dg._take(weight, np.arange(100, 280))
    assert np.array_equal(taken.dequantize(), weight.dequantize()[100:280])


# --- sound weights: nothing is named


def shaped(n, k, kind):
    rng = np.random.default_rng([n, k, 7])
    x = rng.standard_normal((n, k))
    if kind == "outliers":
        x[rng.random((n, k)) < 1e-3] *= 50
    elif kind == "one outlier":
        x[n // 2, k // 2] = 1e5
    elif kind == "outlier columns":
        x[:, ::64] *= 30
    elif kind == "heavy tails":
        x = rng.standard_t(2, (n, k))
    elif kind == "Cauchy":
        x = rng.standard_cauchy((n, k))
    elif kind == "Laplace":
        x = rng.laplace(size=(n, k))
    elif kind == "uniform":
        x = rng.uniform(-1, 1, (n, k))
    elif kind == "tiny":
        x *= 1e-30
    elif kind == "huge":
        x *= 1e30
    elif kind == "constant rows":
        x = np.repeat(rng.standard_normal((n, 1)), k, 1)
    elif kind == "equal rows":
        x = np.repeat(rng.standard_normal((1, k)), n, 0)
    elif kind == "zero rows":
        x[rng.random(n) < 0.3] = 0
    elif kind == "sparse":
        x[rng.random((n, k)) < 0.9] = 0
    elif kind == "zeros":
        x[:] = 0
    elif kind == "rows of all sizes":
        x *= np.exp2(rng.uniform(-12, 0, (n, 1)))
    elif kind == "low rank":
        x = rng.standard_normal((n, 2)) @ rng.standard_normal((2, k))
    else:
        assert kind == "Gaussian"
    return x.astype(np.float32)


KINDS = [
    "Gaussian", "outliers", "one outlier", "outlier columns", "heavy tails", "Cauchy", "Laplace", "uniform", "tiny",
    "huge", "constant rows", "equal rows", "zero rows", "sparse", "zeros", "rows of all sizes", "low rank",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("like", ["modelopt", "compressed-tensors"])
def test_sound_weights_are_not_suspected(kind, shape, like):
    dense = shaped(*shape, kind)
    weight = halfbyte.quantize(dense, like=like)
    error = dg.error_of(weight, dense)
    assert error.relative < dg.FAR
    assert error.relative <= dg.bound_of(weight, dense)
    assert dg.diagnose(weight, dense, {"other": shaped(*shape, "Gaussian")}) is None


# --- each reading, on purpose

A128 = Order("(nt n4 n32) (kt k4) -> nt kt n32 n4 k4", n4=4, n32=32, k4=4)
A8 = Order("(nt n8) (kt k4) -> nt kt n8 k4", n8=8, k4=4)


def swapped(w):
    return w.replace(codes=pack_nibbles(unpack_nibbles(w.codes).reshape(w.n, -1, 2)[..., ::-1].reshape(w.n, -1)))


def halves(w):
    c = unpack_nibbles(w.codes).reshape(w.n, -1, 2, 8)
    return w.replace(codes=pack_nibbles(np.stack([c[..., 0, :], c[..., 1, :]], -1).reshape(w.n, -1)))


def arranged(order):
    return lambda w: w.replace(scales=arrange(order, w.scales).reshape(w.scales.shape))


def restored(order):
    return lambda w: w.replace(scales=restore(order, w.scales.reshape(-1), w.scales.shape))


def times(factor):
    return lambda w: w.replace(scale2=w.scale2 * np.float32(factor))


def fp8_scale(change):
    return lambda w: Fp8Weight(data=w.data, scale=change(w.scale))


PRE = np.exp2(np.random.default_rng(3).uniform(-1.5, 1.5, 4096)).astype(np.float32)

SPOIL = {
    "nibbles swapped": swapped,
    "nibbles in halves of a block": halves,
    "scale2 inverted": lambda w: w.replace(scale2=1 / w.scale2),
    "scale2 that belongs to nobody": lambda w: w.replace(scale2=0.0007),
    "scale2 that is amax": times(2688),
    "scale2 that is 1 / amax": lambda w: w.replace(scale2=1 / (w.scale2 * 2688)),
    "scale2 divided by 2688 twice": times(1 / 2688),
    "scale2 that is amax / 448": times(6),
    "scale2 that is amax / 6": times(448),
    "scale2 divided by 6 once too often": times(1 / 6),
    "scale2 divided by 448 once too often": times(1 / 448),
    "pre_scale that the dense twin does not have": lambda w: w.replace(pre_scale=PRE[: w.k]),
    "pre_scale inverted": lambda w: w.replace(pre_scale=1 / w.pre_scale),
    "FP8 scale inverted": fp8_scale(lambda s: 1 / s),
    "FP8 scale that is amax": fp8_scale(lambda s: s * 448),
}
for atom, order in (("128x4", A128), ("8x4", A8)):
    for title, spoil in (
        ("swizzled", [arranged(order)]),
        ("unswizzled though they were linear", [restored(order)]),
        ("swizzled twice", [arranged(order)] * 2),
    ):
        SPOIL[f"block scales {title} ({atom})"] = lambda w, steps=spoil: [w := step(w) for step in steps][-1]
        SPOIL[f"nibbles swapped and block scales {title} ({atom})"] = lambda w, steps=spoil: swapped(
            [w := step(w) for step in steps][-1]
        )


def sound(entry, n, k, kind="Gaussian"):
    """A weight and its twin as an entry needs them before they are spoilt."""
    dense = shaped(n, k, kind) * np.float32(0.02)
    if "fp8" in entry.kinds:
        return to_fp8(dense), dense
    if entry.name == "scale2 that belongs to nobody":
        dense *= np.float32(2688) / np.abs(dense).max()
        return halfbyte.quantize(dense, scale2=1.0), dense
    if entry.name == "pre_scale inverted":
        return halfbyte.quantize(dense / PRE[:k]).replace(pre_scale=PRE[:k]), dense
    return halfbyte.quantize(dense), dense


def same(a, b):
    """Whether two weights hold the same bytes, but for the rounding of a scale."""
    if a.kind == "fp8":
        return np.allclose(a.scale, b.scale, rtol=1e-6, atol=0)
    pre = [np.ones(1) if w.pre_scale is None else w.pre_scale for w in (a, b)]
    alike = np.allclose(a.scale2, b.scale2, rtol=1e-6, atol=0) and np.allclose(*pre, rtol=1e-6)
    return alike and np.array_equal(a.codes, b.codes) and np.array_equal(a.scales, b.scales)


def test_every_reading_is_spoilt_here():
    assert set(SPOIL) == {entry.name for entry in dg.READINGS}
    assert len(SPOIL) == len(dg.READINGS)


@pytest.mark.parametrize("entry", dg.READINGS, ids=lambda e: e.name)
@pytest.mark.parametrize("kind", ["Gaussian", "heavy tails", "outliers", "zero rows"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_reading_is_named(entry, kind, shape):
    weight, dense = sound(entry, *shape, kind)
    if not entry.fits(weight):
        assert shape == (200, 336)  # of no whole tiles: such bytes have another size
        return
    spoilt = SPOIL[entry.name](weight)
    if "nvfp4" in entry.kinds and spoilt.same(weight):
        assert "twice" in entry.name  # an order that is its own inverse at this shape
        return
    equal = [e.name for e in dg.READINGS if e.fits(spoilt) and same(e.read(spoilt), weight)] or [entry.name]
    assert entry.name in equal
    before = dg.error_of(weight, dense).relative
    assert dg.error_of(spoilt, dense).relative > dg.FAR
    reading = dg.diagnose(spoilt, dense, {"other": gaussian(*shape, 9)})
    assert reading is not None
    assert reading.name == equal[0]
    assert reading.hint
    assert reading.relative == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("factor", [3, 1 / 50, 1e4])
def test_a_factor(factor):
    dense = gaussian(256, 512)
    reading = dg.diagnose(times(factor)(halfbyte.quantize(dense)), dense)
    assert reading is not None
    assert float(reading.name.split()[3]) == pytest.approx(factor, rel=0.02)


def test_scale2_that_was_lost():
    dense = gaussian(256, 512)
    weight = halfbyte.quantize(dense)
    reading = dg.diagnose(weight.replace(scale2=1.0), dense)
    assert reading is not None
    assert reading.name == "scale2 dropped: the file holds 1"
    assert float(reading.hint.split()[1]) == pytest.approx(float(weight.scale2.reshape(())), rel=0.02)


# --- rows and modules


def rows_of(weight, index):
    return dg._take(weight, index)


@pytest.mark.parametrize("kind", ["Gaussian", "heavy tails", "outliers"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", [halfbyte.quantize, to_fp8])
def test_usual_orders_of_rows(shape, kind, make):
    dense = shaped(*shape, kind)
    orders = list(dg.permutations(shape[0]))
    assert len(orders) >= 3
    for _, hint, index in orders:
        assert sorted(index) == list(range(shape[0]))
        reading = dg.diagnose(rows_of(make(dense), index), dense)
        assert reading is not None
        alike = [n for n, _, other in orders if np.array_equal(other, index)]
        assert (reading.name, bool(reading.hint)) == (alike[0], bool(hint))


def test_orders_of_rows_by_hand():
    orders = {name: list(index) for name, _, index in dg.permutations(6)}
    assert orders["rows whose halves are exchanged"] == [3, 4, 5, 0, 1, 2]
    assert orders["rows whose halves are interleaved"] == [0, 3, 1, 4, 2, 5]
    assert orders["rows taken apart that alternate in the dense twin"] == [0, 2, 4, 1, 3, 5]
    assert list(dg.permutations(5)) == []


@pytest.mark.parametrize("shape", [*SHAPES, (4500, 64), (37, 64)], ids=str)
def test_any_order_of_rows(shape):
    dense = gaussian(*shape)
    index = np.random.default_rng(4).permutation(shape[0])
    reading = dg.diagnose(rows_of(halfbyte.quantize(dense), index), dense)
    assert reading is not None
    assert reading.name.startswith("rows permuted: 1 of them")
    assert reading.relative < GAUSSIAN[1]


def test_some_rows_in_another_place():
    dense = gaussian(400, 256)
    index = np.arange(400)
    index[:100] = np.random.default_rng(5).permutation(100)
    weight = rows_of(halfbyte.quantize(dense), index)
    codes = weight.codes.copy()
    codes[300:340] = 0x5A
    reading = dg.diagnose(weight.replace(codes=codes), dense)
    assert reading is not None
    assert reading.name.startswith("rows permuted: 0.9 of them are rows of the dense twin, 0.2")


RELATED = {
    ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"): "gate and up exchanged",
    ("model.layers.0.mlp.experts.3.w1", "model.layers.0.mlp.experts.3.w3"): "gate and up exchanged",
    ("model.layers.0.mlp.experts.3.up_proj", "model.layers.0.mlp.experts.5.up_proj"): "experts permuted",
    ("model.layers.0.mlp.up_proj", "model.layers.7.mlp.up_proj"): "wrong layer",
    ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"): "another module",
    ("model.layers.0.mlp.up_proj", "lm_head"): "another module",
    ("", "lm_head"): "another module",
}


@pytest.mark.parametrize(("name", "other"), RELATED)
@pytest.mark.parametrize("make", [halfbyte.quantize, to_fp8])
def test_the_weight_of_another_module(name, other, make):
    dense, twin = gaussian(200, 336), gaussian(200, 336, 1)
    others = {"far.away": gaussian(200, 336, 2), "wide": gaussian(200, 352), other: twin}
    reading = dg.diagnose(make(twin), dense, others, name)
    assert reading is not None
    assert reading.name == f"{RELATED[name, other]}: it holds {other}"


def test_what_nothing_explains():
    dense = gaussian(256, 512)
    assert dg.diagnose(halfbyte.quantize(gaussian(256, 512, 1)), dense, {"x": gaussian(256, 512, 2)}) is None
    noisy = halfbyte.quantize(dense + gaussian(256, 512, 3, 0.01))
    assert dg.error_of(noisy, dense).relative > dg.FAR
    assert dg.diagnose(noisy, dense) is None


def test_the_nearest_names_come_first():
    names = [f"l.{i}.mlp.{p}" for i in range(9) for p in ("gate", "up")] + ["head"]
    near = dg.nearest("l.4.mlp.up", names)
    assert near[:3] == ["l.4.mlp.gate", "l.3.mlp.up", "l.5.mlp.up"]
    assert near[-1] == "head"
    assert len(near) == len(names) - 1


# --- verify

N, WIDTH = 256, 512
MLP = ("gate_proj", "up_proj", "down_proj")
NAMES = [f"model.layers.{i}.mlp.{part}" for i in range(2) for part in MLP]
GATE, UP, DOWN, GATE1, UP1, DOWN1 = NAMES


def twins(tmp_path, change=None, to="modelopt"):
    """A dense checkpoint, and its quantized form, whose tensors may be changed."""
    dense = {f"{name}.weight": floats(N, WIDTH, seed) for seed, name in enumerate(NAMES)}
    source = make_float(tmp_path / "dense", dense)
    halfbyte.quantize_checkpoint(source, tmp_path / "q", to=to, share_scale2=True)
    if change is not None:
        file = tmp_path / "q" / "model.safetensors"
        with halfbyte.open(tmp_path / "q") as checkpoint:
            tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
        change(tensors)
        save(file, {name: value for name, value in tensors.items() if value is not None})
    return tmp_path / "q", source


def exchange(a, b):
    def change(tensors):
        for suffix in ("weight", "weight_scale", "weight_scale_2"):
            x, y = f"{a}.{suffix}", f"{b}.{suffix}"
            tensors[x], tensors[y] = tensors[y], tensors[x]

    return change


def against(findings):
    return [f for f in findings if f.code.startswith("HB5")]


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_sound_checkpoint(tmp_path, to, workers):
    path, source = twins(tmp_path, to=to)
    report = halfbyte.verify(path, against=source, workers=workers)
    assert report.findings == ()
    rows = report.facts["against"]
    assert sorted(row["name"] for row in rows) == sorted(NAMES)
    for row in rows:
        assert set(row) == {"name", "relative", "sqnr", "worst", "worst_relative", "reading", "repair"}
        assert GAUSSIAN[0] < row["relative"] < GAUSSIAN[1]
        assert 20 < row["sqnr"] < 21
        assert row["relative"] < row["worst_relative"] < 0.2
        assert row["reading"] is None
        assert row["repair"] is None
    overall = report.facts["against_overall"]
    assert (overall["path"], overall["modules"]) == (str(source), 6)
    assert (overall["repair"], overall["advice"]) == (None, None)
    assert min(r["relative"] for r in rows) <= overall["relative"] <= max(r["relative"] for r in rows)


def test_without_against_nothing_is_added(tmp_path):
    path, _ = twins(tmp_path)
    assert not [key for key in halfbyte.verify(path).facts if key.startswith("against")]


def test_bytes_and_progress(tmp_path):
    path, source = twins(tmp_path)
    seen = []
    alone = halfbyte.verify(path).facts
    both = halfbyte.verify(path, source, progress=lambda done, total: seen.append((done, total))).facts
    dense = 6 * N * WIDTH * 2
    assert both["bytes"] == 2 * alone["bytes"] + dense
    assert both["share"] == alone["share"]
    assert seen[-1] == (alone["bytes"] + dense,) * 2


def test_hb501_gate_and_up_exchanged(tmp_path):
    path, source = twins(tmp_path, exchange(GATE, UP))
    report = halfbyte.verify(path, source)
    assert codes(report.findings) == [("HB501", f"{GATE}.weight", None), ("HB501", f"{UP}.weight", None)]
    assert not report.ok
    one, two = report.findings
    assert one.hint.startswith(f"gate and up exchanged: it holds {UP}: 0.09")
    assert two.hint.startswith(f"gate and up exchanged: it holds {GATE}: 0.09")
    assert 1.3 < one.got < 1.5
    assert one.expected == "at most 0.142"  # 1.5 times what rounding its twin costs


def test_hb501_wrong_layer(tmp_path):
    path, source = twins(tmp_path, exchange(DOWN, DOWN1))
    hints = [f.hint for f in halfbyte.verify(path, source).findings]
    assert [hint.split(": 0.09")[0] for hint in hints] == [
        f"wrong layer: it holds {DOWN1}",
        f"wrong layer: it holds {DOWN}",
    ]


def as_comfy(tensors):
    """High nibble first and swizzled scales, in a file that does not say so: its shapes are whole tiles."""
    for name in NAMES:
        tensors[f"{name}.weight"] = (tensors[f"{name}.weight"] << 4) | (tensors[f"{name}.weight"] >> 4)
        scales = tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight_scale"] = arrange(A128, scales.view(np.uint8)).reshape(scales.shape).view(E4M3)


def test_hb501_a_comfyui_file_without_marks(tmp_path):
    path, source = twins(tmp_path, as_comfy)
    report = halfbyte.verify(path, source)
    assert [f.code for f in report.findings] == ["HB501"] * 6
    for finding in report.findings:
        assert finding.hint.startswith("nibbles swapped and block scales swizzled (128x4): 0.09")
        assert "--nibble-order high" in finding.hint
        assert "--scale-layout 128x4" in finding.hint
    assert halfbyte.verify(path, source, reading=Reading("high", "128x4")).findings == ()
    ran = call("verify", path, "--against", source, "--nibble-order", "high", "--scale-layout", "128x4")
    assert (ran.rc, ran.stderr) == (0, "")
    half = halfbyte.verify(path, source, reading=Reading("high"))
    assert {row["reading"] for row in half.facts["against"]} == {"block scales swizzled (128x4)"}


def test_hb501_that_nothing_explains(tmp_path):
    def change(tensors):
        tensors[f"{UP}.weight"] = np.random.default_rng(0).integers(0, 256, (N, WIDTH // 2), np.uint8)

    path, source = twins(tmp_path, change)
    (finding,) = halfbyte.verify(path, source).findings
    assert finding.code == "HB501"
    assert finding.hint.startswith("no reading explains it; the worst block is [")


def test_hb501_nan_in_the_twin(tmp_path):
    path, _ = twins(tmp_path)
    dense = {f"{name}.weight": floats(N, WIDTH, seed) for seed, name in enumerate(NAMES)}
    dense[f"{UP}.weight"][3, 5] = np.nan
    (finding,) = halfbyte.verify(path, make_float(tmp_path / "nan", dense)).findings
    assert (finding.code, finding.hint) == ("HB501", "the dense twin holds NaN or Inf")


def test_hb502_more_than_the_format_needs(tmp_path):
    noise = {f"{name}.weight": floats(N, WIDTH, seed) for seed, name in enumerate(NAMES)}
    noise[f"{UP}.weight"] = (noise[f"{UP}.weight"].astype(np.float32) + gaussian(N, WIDTH, 3, 0.0025)).astype(BF16)
    path, _ = twins(tmp_path)
    report = halfbyte.verify(path, make_float(tmp_path / "noise", noise))
    assert codes(report.findings) == [("HB502", f"{UP}.weight", None)]
    assert report.ok
    assert 0.143 < report.findings[0].got < 0.2


def test_hb503_no_twin(tmp_path):
    path, _ = twins(tmp_path)
    few = {f"{name}.weight": floats(N, WIDTH, seed) for seed, name in enumerate(NAMES) if name != GATE1}
    few[f"{UP}.weight"] = few[f"{UP}.weight"].view(np.int16)
    report = halfbyte.verify(path, make_float(tmp_path / "few", few))
    assert codes(report.findings) == [("HB503", f"{UP}.weight", None), ("HB503", f"{GATE1}.weight", None)]
    assert [f.expected for f in report.findings] == ["F32 or BF16 or F16", f"{GATE1}.weight"]
    assert report.ok
    assert report.facts["against_overall"]["modules"] == 4


def test_hb503_a_dense_checkpoint_has_nothing_to_measure(tmp_path):
    _, source = twins(tmp_path)
    report = halfbyte.verify(source, source)
    assert codes(report.findings) == [("HB503", None, None)]
    assert report.facts["against"] == []


def test_hb503_a_module_that_is_not_sound(tmp_path):
    def change(tensors):
        tensors[f"{UP}.weight_scale"] = None
        tensors[f"{GATE}.svdquant_lora_a"] = floats(4, WIDTH)
        tensors[f"{GATE}.svdquant_lora_b"] = floats(N, 4)

    path, source = twins(tmp_path, change)
    report = halfbyte.verify(path, source)
    assert codes(against(report.findings)) == [("HB503", f"{GATE}.weight", None), ("HB503", f"{UP}.weight", None)]


def test_hb504_another_shape(tmp_path):
    path, _ = twins(tmp_path)
    dense = {f"{name}.weight": floats(N, WIDTH, seed) for seed, name in enumerate(NAMES)}
    dense[f"{UP}.weight"] = floats(WIDTH, N)
    (finding,) = halfbyte.verify(path, make_float(tmp_path / "turned", dense)).findings
    assert (finding.code, finding.got, finding.expected) == ("HB504", [N, WIDTH], [WIDTH, N])


def test_scales_that_cannot_be_swizzled(tmp_path):
    source = make_float(tmp_path / "dense", {"a.up_proj.weight": floats(200, 336)})
    halfbyte.quantize_checkpoint(source, tmp_path / "q")
    with pytest.raises(FormatError, match="do not lie so") as caught:
        halfbyte.verify(tmp_path / "q", source, reading=Reading(scale_layout="128x4"))
    assert (caught.value.tensor, caught.value.got) == ("a.up_proj.weight_scale", [200, 21])


def test_names_after_a_rename(tmp_path):
    """The twin is found where transformers has put a prefix into the names of the quantized file."""
    source = make_float(tmp_path / "dense", {"model.layers.0.mlp.up_proj.weight": floats(32, 64)})
    renamed = {"model.language_model.layers.0.mlp.up_proj.weight": floats(32, 64)}
    halfbyte.quantize_checkpoint(make_float(tmp_path / "renamed", renamed), tmp_path / "q")
    assert halfbyte.verify(tmp_path / "q", source).findings == ()


def test_fp8_modules(tmp_path):
    dense = gaussian(N, WIDTH)
    weight = to_fp8(dense)
    tensors = {"a.weight": weight.data.view(E4M3), "a.weight_scale": weight.scale.reshape(())}
    tensors |= {"b.weight": weight.data.view(E4M3), "b.weight_scale": 1 / weight.scale.reshape(())}
    (tmp_path / "q").mkdir()
    save(tmp_path / "q" / "model.safetensors", tensors)
    write_json(tmp_path / "q" / "config.json", {})
    source = make_float(tmp_path / "dense", {"a.weight": dense, "b.weight": dense})
    report = halfbyte.verify(tmp_path / "q", source)
    assert codes(against(report.findings)) == [("HB501", "b.weight", None)]
    assert against(report.findings)[0].hint.startswith("FP8 scale inverted: 0.02")
    assert 0.02 < report.facts["against"][0]["relative"] < 0.03


def test_include(tmp_path):
    path, source = twins(tmp_path, exchange(GATE, UP))
    report = halfbyte.verify(path, source, include=["*.layers.1.*"])
    assert report.findings == ()
    assert sorted(row["name"] for row in report.facts["against"]) == sorted(NAMES[3:])


def test_wrong_use(tmp_path):
    path, source = twins(tmp_path)
    with pytest.raises(UsageError, match="unknown nibble order"):
        halfbyte.verify(path, source, reading=Reading(nibble_order="x"))


# --- the command line


def test_the_table(tmp_path):
    path, source = twins(tmp_path, exchange(GATE, UP))
    ran = call("verify", path, "--against", source)
    assert ran.rc == 1
    lines = ran.stdout.splitlines()
    at = lines.index(f"against {source}")
    assert lines[at + 1].split("  ")[0] == "module"
    assert {lines[at + 2].split()[0], lines[at + 3].split()[0]} == {GATE, UP}
    assert "gate and up exchanged" in lines[at + 2]
    assert lines[at + 8].startswith("all 6")
    assert ran.stderr.count("HB501 error") == 2


def test_ten_modules_are_listed(tmp_path):
    source = make_float(tmp_path / "dense", {f"l.{i}.up_proj.weight": floats(32, 64, i) for i in range(13)})
    halfbyte.quantize_checkpoint(source, tmp_path / "q")
    ran = call("verify", tmp_path / "q", "--against", source)
    assert ran.rc == 0
    assert ran.stdout.count("up_proj") == 10
    assert "... 3 more with smaller errors" in ran.stdout


def test_json(tmp_path):
    dense = np.zeros((32, 64), BF16)
    source = make_float(tmp_path / "dense", {"a.up_proj.weight": dense})
    halfbyte.quantize_checkpoint(source, tmp_path / "q")
    document = call("verify", tmp_path / "q", "--against", source, "--json").document
    assert document["against"][0]["sqnr"] == "inf"
    assert document["against_overall"]["relative"] == 0


def test_a_twin_that_is_not_there(tmp_path):
    path, _ = twins(tmp_path)
    check_failure(call("verify", path, "--against", tmp_path / "nowhere"), 2, "nowhere")
