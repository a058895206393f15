"""``diff`` and ``verify --against`` on mixtures of experts: the same weights in all forms in which they are stored."""

from __future__ import annotations

import json

import numpy as np
import pytest

import halfbyte
from checkpoints import BF16, E4M3, modelopt_section, named, save, write_json
from halfbyte import diagnose as dg
from halfbyte.modules import Reading
from halfbyte.mxfp4 import to_nvfp4
from halfbyte.numerics import decode_e8m0, encode_e2m1, pack_nibbles
from halfbyte.weight import Mxfp4Weight

E, N, HIDDEN = 3, 64, 128
PARENT = "model.layers.0.mlp.experts"
GATE_UP, DOWN = f"{PARENT}.gate_up_proj", f"{PARENT}.down_proj"
PARTS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
ORDERS = ("concatenated", "up_first", "interleaved")


def dense(expert, part):
    n, k = (HIDDEN, N) if part == "down_proj" else (N, HIDDEN)
    return (np.random.default_rng([expert, PARTS.index(part)]).standard_normal((n, k)) * 0.02).astype(BF16)


DENSE = {(e, part): dense(e, part) for e in range(E) for part in PARTS}
WEIGHTS = {at: halfbyte.quantize(x.astype(np.float32)) for at, x in DENSE.items()}


def swap(array):
    return np.ascontiguousarray(np.swapaxes(array, -1, -2))


def rows(gate, up, order):
    if order == "interleaved":
        return np.stack([gate, up], 1).reshape(-1, gate.shape[-1])
    return np.concatenate([gate, up] if order == "concatenated" else [up, gate])


def roles(weight, input_scale):
    return {
        "codes": np.array(weight.codes),
        "scales": np.array(weight.scales).view(E4M3),
        "scale2": np.float32(weight.scale2.reshape(())),
        "input_scale": np.float32(input_scale),
    }


def quantized(path, form, weights=WEIGHTS, order="concatenated", stated=True, config=True, change=None):
    """A checkpoint of the experts: "modelopt", "compressed-tensors" or "mixtral" by number, or stacks."""
    tensors, metadata = {}, {}
    if form in ("modelopt", "compressed-tensors", "mixtral"):
        for (e, part), weight in weights.items():
            name = f"{PARENT}.{e}.{MIXTRAL[part] if form == 'mixtral' else part}"
            tensors |= named("modelopt" if form == "mixtral" else form, name, roles(weight, 2.0 ** -(e + 1)))
    else:
        names = ("w13_weight", "w2_weight") if form == "w13" else ("gate_up_proj", "down_proj")
        for name, halves in zip(names, (PARTS[:2], PARTS[2:]), strict=True):
            stem = f"{PARENT}.{name.removesuffix('_weight')}"
            for role, suffix in (("codes", name.removeprefix(stem)), ("scales", "_weight_scale")):
                each = [[roles(weights[e, part], 1)[role] for part in halves] for e in range(E)]
                array = np.stack([rows(*parts, order) if len(parts) > 1 else parts[0] for parts in each])
                at = f"{PARENT}.{name}" if role == "codes" else f"{stem}{suffix}"
                tensors[at] = swap(array) if form == "columns" else array
            scale2 = np.array([[weights[e, part].scale2.reshape(()) for part in halves] for e in range(E)])
            tensors[f"{stem}_weight_scale_2"] = scale2.reshape(E, len(halves)) if len(halves) > 1 else scale2[:, 0]
            tensors[f"{stem}_input_scale"] = np.float32([0.5, 0.25, 0.125])
            if len(halves) > 1 and stated:
                metadata["halfbyte.experts"] = json.dumps({stem: {"gate_up": order}})
    return write(path, tensors, metadata, config, change, modelopt_section("NVFP4"))


def floats(path, form, order="concatenated", model_type="qwen3_moe", change=None, weights=DENSE):
    """A dense checkpoint of the experts: "number", "mixtral", "rows" or "columns"."""
    tensors, metadata = {}, {}
    if form in ("number", "mixtral"):
        for (e, part), x in weights.items():
            tensors[f"{PARENT}.{e}.{MIXTRAL[part] if form == 'mixtral' else part}.weight"] = x
    else:
        gate_up = np.stack([rows(weights[e, "gate_proj"], weights[e, "up_proj"], order) for e in range(E)])
        down = np.stack([weights[e, "down_proj"] for e in range(E)])
        tensors = {GATE_UP: gate_up, DOWN: down}
        table = {GATE_UP: {"gate_up": order, "columns": form == "columns"}, DOWN: {"columns": form == "columns"}}
        metadata["halfbyte.experts"] = json.dumps(table)
        if form == "columns":
            tensors = {name: swap(x) for name, x in tensors.items()}
    return write(path, tensors, metadata, {"model_type": model_type}, change)


def write(path, tensors, metadata, config, change, section=None):
    path.mkdir(parents=True, exist_ok=True)
    if change is not None:
        change(tensors)
    save(path / "model.safetensors", tensors, metadata)
    base = {"model_type": "qwen3_moe"} if config is True else config or {}
    write_json(path / "config.json", base | ({"quantization_config": section} if section else {}))
    return path


FORMS = [("modelopt", "concatenated"), ("mixtral", "concatenated"), ("w13", "concatenated")]
FORMS += [(form, order) for form in ("rows", "columns") for order in ORDERS]
forms = pytest.mark.parametrize(("form", "order"), FORMS, ids=lambda x: x)


def told(report):
    return [(f.code, f.tensor, f.index) for f in report.findings]


# --- diff


@forms
@pytest.mark.parametrize("other", ["modelopt", "columns"])
def test_all_forms_are_the_same(tmp_path, form, order, other):
    a, b = quantized(tmp_path / "a", form, order=order), quantized(tmp_path / "b", other)
    for report in (halfbyte.diff(a, b), halfbyte.diff(b, a, workers=1)):
        assert report.findings == ()
        assert report.facts["same"] == 3 * E


def test_the_other_dialect(tmp_path):
    weights = {at: halfbyte.quantize(x.astype(np.float32), scale2=2.0**-14) for at, x in DENSE.items()}
    a, b = (quantized(tmp_path / form, form, weights) for form in ("columns", "compressed-tensors"))
    assert halfbyte.diff(a, b).findings == ()


def value_at(tensors, form, order, e, half, row, block):
    """The name of the gate_up codes, and the place on disk of the first byte of a block."""
    last = {"concatenated": half * N + row, "up_first": (1 - half) * N + row, "interleaved": 2 * row + half}[order]
    if form == "columns":
        return GATE_UP, (e, block * 8, last), last
    return (f"{PARENT}.w13_weight" if form == "w13" else GATE_UP), (e, last, block * 8), last


@pytest.mark.parametrize(("form", "order"), FORMS[2:], ids=lambda x: x)
@pytest.mark.parametrize("half", [0, 1])
def test_the_first_place(tmp_path, form, order, half):
    def change(tensors):
        name, at, _ = value_at(tensors, form, order, 1, half, 40, 5)
        tensors[name][at] ^= 0x07 if tensors[name][at] & 7 != 7 else 0x01

    a, b = quantized(tmp_path / "a", form, order=order, change=change), quantized(tmp_path / "b", "modelopt")
    name, _, row = value_at({}, form, order, 1, half, 40, 5)
    assert told(halfbyte.diff(a, b)) == [("HB402", name, [1, row, 5])]
    assert halfbyte.diff(a, b).facts["different"] == 1
    part = f"{PARENT}.1.{PARTS[half]}"
    assert told(halfbyte.diff(b, a)) == [("HB402", f"{part}.weight", [40, 5])]
    assert halfbyte.diff(a, b, exclude=[f"re:.*1.({PARTS[half]}|{MIXTRAL[PARTS[half]]})$"]).facts["same"] == 3 * E - 1
    assert halfbyte.diff(a, a, exclude=[name.removesuffix("_weight")]).facts["same"] == E
    assert halfbyte.diff(a, a, include=[name.removesuffix("_weight")]).facts["same"] == 2 * E
    assert not halfbyte.diff(a, b, include=[f"{PARENT}.1"]).ok
    assert halfbyte.diff(a, b, exclude=[f"{PARENT}.1"]).facts["same"] == 3 * (E - 1)


def test_input_scales_of_experts(tmp_path):
    def change(tensors):
        tensors[f"{DOWN}_input_scale"][2] = 0.75

    a, b = quantized(tmp_path / "a", "rows", change=change), quantized(tmp_path / "b", "modelopt")
    (finding,) = halfbyte.diff(a, b).findings
    assert (finding.code, finding.tensor, finding.index) == ("HB405", f"{DOWN}_input_scale", [2])
    assert (finding.got, finding.expected) == (0.75, 0.125)


def test_a_stack_in_one_only(tmp_path):
    def change(tensors):
        for name in [n for n in tensors if "down_proj" in n]:
            del tensors[name]

    a, b = quantized(tmp_path / "a", "rows"), quantized(tmp_path / "b", "rows", change=change)
    assert told(halfbyte.diff(a, b)) == [("HB401", DOWN, None)]
    assert halfbyte.diff(a, b).facts["only_a"] == E


def test_an_expert_in_one_only(tmp_path):
    def change(tensors):
        for name in [n for n in tensors if ".1.down_proj" in n]:
            del tensors[name]

    a, b = quantized(tmp_path / "a", "rows"), quantized(tmp_path / "b", "modelopt", change=change)
    assert told(halfbyte.diff(a, b)) == [("HB401", DOWN, [1])]


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("form", ["rows", "columns"])
def test_an_order_that_is_not_known_on_one_side(tmp_path, form, stated):
    """Whole stacks are compared as they lie."""
    a = quantized(tmp_path / "a", form, order="interleaved", stated=False, config=False)
    b = quantized(tmp_path / "b", "rows", order="interleaved", stated=stated, config=False)
    report = halfbyte.diff(a, b)
    assert {f.code for f in report.findings} == {"HB138"}
    assert report.facts["same"] == 3 * E
    c = quantized(tmp_path / "c", "rows", order="concatenated", config=False)
    assert not halfbyte.diff(a, c).ok


def test_hb408_an_order_that_is_not_known(tmp_path):
    a, b = quantized(tmp_path / "a", "rows", stated=False, config=False), quantized(tmp_path / "b", "mixtral")
    for report in (halfbyte.diff(a, b), halfbyte.diff(b, a)):
        assert told(report) == [("HB408", GATE_UP, None)]
        assert not report.ok
        assert report.facts["same"] == E


def test_a_layer_that_is_stored_twice(tmp_path):
    """Both forms are compared with both."""
    both = {}
    quantized(tmp_path / "a", "modelopt", change=both.update)
    a = quantized(tmp_path / "b", "rows", change=lambda t: t.update(both))
    assert halfbyte.diff(a, a).findings == ()
    assert halfbyte.diff(a, a).facts["same"] == 6 * E


def test_dense_stacks(tmp_path):
    a, b = floats(tmp_path / "a", "columns", "interleaved"), floats(tmp_path / "b", "number")
    assert halfbyte.diff(a, b).findings == ()
    different = floats(tmp_path / "c", "rows", weights=DENSE | {(2, "up_proj"): DENSE[1, "up_proj"]})
    assert told(halfbyte.diff(a, different)) == [("HB402", GATE_UP, [2, 1, 0])]


def to_mxfp4(x):
    """By the rule of OCP: scales rounded down."""
    x = np.asarray(x, np.float32)
    blocks = x.reshape(len(x), -1, 32)
    scales = (np.floor(np.log2(np.abs(blocks).max(-1))) - 2 + 127).astype(np.uint8)
    codes = encode_e2m1(blocks / decode_e8m0(scales)[..., None])
    return Mxfp4Weight(codes=pack_nibbles(codes).reshape(len(x), -1), scales=scales)


MX = {at: to_mxfp4(x) for at, x in DENSE.items()}


def gpt_oss(path, weights=MX, change=None):
    tensors = {}
    for name, halves in ((GATE_UP, PARTS[:2]), (DOWN, PARTS[2:])):
        for suffix, role in (("blocks", "codes"), ("scales", "scales")):
            each = [[getattr(weights[e, part], role) for part in halves] for e in range(E)]
            array = np.stack([rows(*parts, "interleaved") if len(parts) > 1 else parts[0] for parts in each])
            tensors[f"{name}_{suffix}"] = array.reshape(*array.shape[:2], -1, 16) if suffix == "blocks" else array
    section = {"quant_method": "mxfp4"}
    return write(path, tensors, {}, {"model_type": "gpt_oss"}, change, section)


def test_mxfp4_and_its_cast(tmp_path):
    a, b = gpt_oss(tmp_path / "a"), quantized(tmp_path / "b", "columns", {at: to_nvfp4(w) for at, w in MX.items()})
    tensors = {f.tensor for f in halfbyte.diff(a, b).findings if f.code != "HB407"}
    report = halfbyte.diff(a, b)
    assert tensors == {f"{GATE_UP}_blocks", f"{DOWN}_blocks"}
    assert {f.code for f in report.findings} == {"HB403", "HB406", "HB407"}  # an input scale on one side
    assert halfbyte.diff(a, a).findings == ()


def test_memory_is_that_of_an_expert(tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.tools.diff._STEP", 512)
    reads = []
    fill = halfbyte.stored._fill
    monkeypatch.setattr("halfbyte.stored._fill", lambda t, p, out: (reads.append(len(out)), fill(t, p, out)))
    a, b = quantized(tmp_path / "a", "columns"), quantized(tmp_path / "b", "columns")
    assert halfbyte.diff(a, b, workers=1).findings == ()
    assert max(reads) == 2 * N * HIDDEN // 2  # the codes of one expert
    assert reads.count(max(reads)) == 2 * 2 * E  # gate and up of each, on both sides


# --- verify --against


def measured(path, source, **options):
    report = halfbyte.verify(path, against=source, **options)
    return [f for f in report.findings if f.code.startswith("HB5")], report.facts


@forms
@pytest.mark.parametrize("source", ["number", "mixtral", "rows", "columns"])
def test_all_forms_are_measured(tmp_path, form, order, source):
    findings, facts = measured(quantized(tmp_path / "q", form, order=order), floats(tmp_path / "d", source))
    assert findings == []
    assert len(facts["against"]) == 3 * E
    assert all(0.085 < row["relative"] < 0.105 for row in facts["against"])
    assert facts["against_overall"]["relative"] == pytest.approx(0.095, abs=0.003)


def exchange(*pairs):
    """The weights with some of them exchanged."""
    weights = dict(WEIGHTS)
    for a, b in pairs:
        weights[a], weights[b] = WEIGHTS[b], WEIGHTS[a]
    return weights


@forms
def test_experts_permuted(tmp_path, form, order):
    weights = exchange(*(((0, part), (2, part)) for part in PARTS))
    path = quantized(tmp_path / "q", form, weights, order)
    findings, facts = measured(path, floats(tmp_path / "d", "rows"))
    readings = {row["name"]: row["reading"] for row in facts["against"] if row["reading"]}
    last = MIXTRAL if form in ("mixtral", "w13") else {part: part for part in PARTS}
    assert readings == {
        f"{PARENT}.{a}.{last[part]}": f"experts permuted: it holds {PARENT}.{b}.{last[part]}"
        for a, b in ((0, 2), (2, 0))
        for part in PARTS
    }
    assert {f.code for f in findings} == {"HB501"}
    if form in ("rows", "columns"):
        assert sorted((f.tensor, f.index) for f in findings) == [(DOWN, [0]), (DOWN, [2])] + [
            (GATE_UP, [e]) for e in (0, 0, 2, 2)
        ]


@forms
def test_gate_and_up_exchanged(tmp_path, form, order):
    path = quantized(tmp_path / "q", form, exchange(((1, "gate_proj"), (1, "up_proj"))), order)
    findings, facts = measured(path, floats(tmp_path / "d", "columns"))
    readings = [row["reading"] for row in facts["against"] if row["reading"]]
    assert [reading.partition(":")[0] for reading in readings] == ["gate and up exchanged"] * 2
    assert [f.index for f in findings] == ([[1]] * 2 if form in ("rows", "columns", "w13") else [None] * 2)


@pytest.mark.parametrize("form", ["rows", "columns", "modelopt"])
def test_nibbles_of_one_expert(tmp_path, form):
    weights = WEIGHTS | {(1, "down_proj"): dg.swap_nibbles(WEIGHTS[1, "down_proj"])}
    (finding,), _ = measured(quantized(tmp_path / "q", form, weights), floats(tmp_path / "d", "rows"))
    assert finding.code == "HB501"
    assert finding.index == (None if form == "modelopt" else [1])
    assert "nibbles swapped" in finding.hint
    swapped = quantized(tmp_path / "all", form, {at: dg.swap_nibbles(w) for at, w in WEIGHTS.items()})
    assert measured(swapped, tmp_path / "d", reading=Reading("high"))[0] == []


def test_scale2_of_one_expert(tmp_path):
    def change(tensors):
        tensors[f"{DOWN}_weight_scale_2"][2] *= 6

    (finding,), _ = measured(quantized(tmp_path / "q", "rows", change=change), floats(tmp_path / "d", "number"))
    assert (finding.code, finding.tensor, finding.index) == ("HB501", DOWN, [2])
    assert finding.hint.startswith("down_proj: scale2 that is amax / 448")


@pytest.mark.parametrize("form", ["rows", "columns"])
@pytest.mark.parametrize("order", ["concatenated", "interleaved"])
def test_an_order_that_is_stated_wrongly(tmp_path, form, order):
    stated = "interleaved" if order == "concatenated" else "concatenated"
    path = quantized(tmp_path / "q", form, order=order)
    with halfbyte.open(path) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    save(path / "model.safetensors", tensors, {"halfbyte.experts": json.dumps({GATE_UP: {"gate_up": stated}})})
    findings, facts = measured(path, floats(tmp_path / "d", "number"))
    readings = {row["name"]: row["reading"] for row in facts["against"] if row["reading"]}
    title = f"gate and up that lie {order}"
    assert readings == {f"{PARENT}.{e}.{part}": title for e in range(E) for part in PARTS[:2]}
    assert [f.index for f in findings] == [[0], [0], [1], [1], [2], [2]]
    assert all(f'state "gate_up": "{order}"' in f.hint for f in findings)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", ["number", "columns"])
def test_the_order_of_a_stack_is_found(tmp_path, order, source):
    """Nothing states it: the dense twin tells."""
    path = quantized(tmp_path / "q", "rows", order=order, stated=False, config=False)
    findings, facts = measured(path, floats(tmp_path / "d", source))
    readings = {row["name"]: row["reading"] for row in facts["against"] if "down_proj" not in row["name"]}
    title = None if order == "concatenated" else f"gate and up that lie {order.replace('_', ' ')}"
    assert readings == {f"{PARENT}.{e}.{part}": title for e in range(E) for part in PARTS[:2]}
    assert len(findings) == (0 if title is None else 2 * E)
    assert "HB138" in {f.code for f in halfbyte.verify(path).findings}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stated", [False, True])
def test_a_dense_twin_of_an_order_that_is_not_known(tmp_path, order, stated):
    """Both are measured as they lie."""
    path = quantized(tmp_path / "q", "columns", order=order, stated=stated, config=False)
    source = floats(tmp_path / "d", "rows", order)
    with halfbyte.open(source) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    table = {name: {"columns": False} for name in (GATE_UP, DOWN)}
    save(source / "model.safetensors", tensors, {"halfbyte.experts": json.dumps(table)})
    write_json(source / "config.json", {})
    findings, facts = measured(path, source)
    assert findings == []
    assert len(facts["against"]) == 3 * E
    notes = [f for f in halfbyte.verify(path, against=source).findings if f.code == "HB138"]
    assert len(notes) == (1 if stated else 2)
    assert "as they lie" in notes[0].hint + notes[-1].hint


def test_hb503_and_hb504(tmp_path):
    def change(tensors):
        del tensors[f"{PARENT}.1.down_proj.weight"]
        tensors[f"{PARENT}.2.down_proj.weight"] = np.zeros((HIDDEN, N + 16), BF16)

    findings, _ = measured(quantized(tmp_path / "q", "rows"), floats(tmp_path / "d", "number", change=change))
    assert [(f.code, f.tensor, f.index) for f in findings] == [("HB504", DOWN, [2]), ("HB503", DOWN, [1])]
    assert (findings[0].got, findings[0].expected) == ([HIDDEN, N], [HIDDEN, N + 16])
    assert findings[1].expected == f"{PARENT}.1.down_proj.weight"


def test_a_stack_that_is_not_sound(tmp_path):
    def change(tensors):
        tensors[f"{DOWN}_weight_scale"] = np.ones((E, 5, 7), E4M3)

    findings, facts = measured(quantized(tmp_path / "q", "rows", change=change), floats(tmp_path / "d", "number"))
    assert [(f.code, f.tensor, f.index) for f in findings] == [("HB503", DOWN, None)]
    assert "not measured" in findings[0].hint
    assert len(facts["against"]) == 2 * E


def test_bytes(tmp_path):
    path, source = quantized(tmp_path / "q", "rows"), floats(tmp_path / "d", "rows")
    told_ = []
    _, facts = measured(path, source, progress=lambda done, total: told_.append((done, total)))
    assert told_[-1][0] == told_[-1][1]
    with halfbyte.open(path) as a, halfbyte.open(source) as b:
        once, twin = (sum(t.nbytes for t in c.tensors.values()) for c in (a, b))
        shared_input = 4 * E  # gate's and up's input scale is one number, and read for each
    assert facts["bytes"] == 2 * once + twin + shared_input


# --- MXFP4


@pytest.mark.parametrize("source", ["number", "rows"])
def test_mxfp4_has_its_own_bound(tmp_path, source):
    findings, facts = measured(gpt_oss(tmp_path / "q"), floats(tmp_path / "d", source))
    assert findings == []
    assert len(facts["against"]) == 3 * E
    assert all(0.105 < row["relative"] < 0.125 for row in facts["against"])


def test_mxfp4_faults(tmp_path):
    gate = MX[0, "gate_proj"]
    weights = MX | {
        (1, "down_proj"): dg.swap_nibbles(MX[1, "down_proj"]),
        (2, "down_proj"): Mxfp4Weight(codes=MX[2, "down_proj"].codes, scales=MX[2, "down_proj"].scales + np.uint8(1)),
        (0, "gate_proj"): MX[0, "up_proj"],
        (0, "up_proj"): gate,
    }
    findings, _ = measured(gpt_oss(tmp_path / "q", weights), floats(tmp_path / "d", "number"))
    assert {f.code for f in findings} == {"HB501"}
    hints = [(f.tensor, f.index, f.hint.split(": ")[1]) for f in findings]
    assert hints == [
        (f"{DOWN}_blocks", [1], "nibbles swapped"),
        (f"{DOWN}_blocks", [2], "MXFP4 scales that are 2 times the right ones"),
        (f"{GATE_UP}_blocks", [0], "gate and up exchanged"),
        (f"{GATE_UP}_blocks", [0], "gate and up exchanged"),
    ]


def test_mxfp4_in_halves(tmp_path):
    weight, x = MX[0, "gate_proj"], DENSE[0, "gate_proj"].astype(np.float32)
    halves = dg.join_halves(weight)  # of 16 codes each; twice is not the same
    codes = np.array([[c & 15, c >> 4] for c in weight.codes.reshape(-1)], np.uint8).reshape(N, -1, 32)
    packed = (codes[..., :16] | codes[..., 16:] << 4).reshape(N, -1)
    spoilt = Mxfp4Weight(codes=packed, scales=weight.scales)
    assert np.array_equal(dg.join_halves(spoilt).codes, weight.codes)
    assert dg.diagnose(spoilt, x).name == "nibbles in halves of a block"
    assert not np.array_equal(halves.codes, weight.codes)


def test_the_worst_block_of_mxfp4():
    x = DENSE[0, "gate_proj"].astype(np.float32)
    scales = MX[0, "gate_proj"].scales.copy()
    scales[50, 3] += 3
    weight = Mxfp4Weight(codes=MX[0, "gate_proj"].codes, scales=scales)
    assert dg.error_of(weight, x).worst == (50, 3)


@pytest.mark.parametrize("kind", ["Gaussian", "Laplace", "t", "one size", "spikes", "zeros"])
@pytest.mark.parametrize("rule", [np.floor, np.ceil])
def test_sound_mxfp4_is_not_suspected(kind, rule):
    rng = np.random.default_rng(9)
    x = {
        "Gaussian": rng.standard_normal((64, 256)),
        "Laplace": rng.laplace(size=(64, 256)),
        "t": rng.standard_t(2, (64, 256)),
        "one size": np.full((64, 256), 7.9),
        "spikes": np.where(np.arange(256) % 32 == 0, 4, 0.2499) * np.ones((64, 1)),
        "zeros": np.zeros((64, 256)),
    }[kind].astype(np.float32)
    blocks = x.reshape(64, -1, 32)
    top = np.maximum(np.abs(blocks).max(-1), np.float32(2.0**-100))
    exponent = np.floor(np.log2(top)) - 2 if rule is np.floor else np.ceil(np.log2(top / 6))
    scales = (exponent + 127).astype(np.uint8)
    codes = encode_e2m1(blocks / decode_e8m0(scales)[..., None])
    weight = Mxfp4Weight(codes=pack_nibbles(codes).reshape(64, -1), scales=scales)
    error = dg.error_of(weight, x)
    assert error.relative < dg.FAR_MX
    assert error.relative <= dg.bound_of(weight, x)
    assert dg.diagnose(weight, x) is None
