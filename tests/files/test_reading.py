"""Weights that do not lie as their dialect says, read as the caller knows that they lie."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    DOWN,
    E4M3,
    GOLDEN,
    Q,
    by_library,
    call,
    expert_weights,
    f32,
    listing,
    make_dense,
    named,
    nvfp4,
    raw_safetensors,
    save,
    stacked_experts,
    tensors_of,
)
from halfbyte import jit
from halfbyte.checkpoint.reader import open_checkpoint
from halfbyte.errors import FormatError, UsageError
from halfbyte.modules import Reading
from halfbyte.weight import Weight


def swizzled(scales: np.ndarray, rows: int) -> np.ndarray:
    """(N, G) block scales in the order of 128x4 or 8x4 atoms, padded with zeros, byte by byte."""
    n, g = scales.shape
    tiles, blocks = -(-n // rows), -(-g // 4)
    out = np.zeros(tiles * rows * blocks * 4, np.uint8)
    for i in range(n):
        for j in range(g):
            tile = (i // rows * blocks + j // 4) * rows * 4
            inner = (i % 32) * 16 + (i % rows) // 32 * 4 if rows == 128 else (i % 8) * 4
            out[tile + inner + j % 4] = scales[i, j]
    return out


def weights(path, **reading):
    with open_checkpoint(path, Reading(**reading)) as ck:
        return dict(ck.weights())


def altered(path, change, n=128, k=128, dialect="modelopt"):
    """A checkpoint with one weight whose roles have been changed, and the weight as it was."""
    roles = nvfp4(n, k, 7, scale2=2.0**-11, input_scale=0.5)
    good = Weight(**roles)
    path.mkdir(parents=True)
    save(path / "model.safetensors", named(dialect, "a", roles | change(dict(roles))))
    return path, good


def swap(codes):
    return ((codes & 15) << 4) | (codes >> 4)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_nibble_order(dialect, tmp_path):
    path, good = altered(tmp_path / "x", lambda r: {"codes": swap(r["codes"])}, dialect=dialect)
    assert weights(path, nibble_order="high")["a"].same(good)
    assert not weights(path, nibble_order="low")["a"].same(good)
    assert weights(path, nibble_order="low")["a"].same(weights(path)["a"])


@pytest.mark.parametrize("rows", [128, 8])
@pytest.mark.parametrize("shape", [(128, 64), (256, 192)])
def test_swizzled_scales(rows, shape, tmp_path):
    n, k = shape

    def change(roles):
        return {"scales": swizzled(roles["scales"].view(np.uint8), rows).reshape(n, k // 16)}

    path, good = altered(tmp_path / "x", change, n, k)
    assert weights(path, scale_layout=f"{rows}x4")["a"].same(good)
    both = altered(tmp_path / "y", lambda r: change(r) | {"codes": swap(r["codes"])}, n, k)[0]
    assert weights(both, scale_layout=f"{rows}x4", nibble_order="high")["a"].same(good)


@pytest.mark.parametrize("rows", [128, 8])
@pytest.mark.parametrize("shape", [(48, 80), (130, 16), (1, 16)])
def test_padded_scales(rows, shape, tmp_path):
    n, k = shape

    def change(roles):
        flat = swizzled(roles["scales"].view(np.uint8), rows)
        return {"scales": flat.reshape(-(-n // rows) * rows, -1)}

    path, good = altered(tmp_path / "x", change, n, k)
    assert weights(path, scale_layout=f"{rows}x4")["a"].same(good)


def test_scales_swizzled_twice_or_taken_out_of_an_order_that_they_never_had(tmp_path):
    def twice(roles):
        once = swizzled(roles["scales"].view(np.uint8), 128).reshape(roles["scales"].shape)
        return {"scales": swizzled(once, 128).reshape(once.shape)}

    path, good = altered(tmp_path / "x", twice, 128, 512)
    assert weights(path, scale_layout="128x4-twice")["a"].same(good)
    path, good = altered(tmp_path / "z", lambda r: undone(r["scales"].view(np.uint8)), 128, 64)
    assert weights(path, scale_layout="128x4-undone")["a"].same(good)


def undone(s):
    order = np.empty(s.size, np.int64)
    flat = {}
    for i in range(s.shape[0]):
        for j in range(s.shape[1]):
            flat[(i % 32) * 16 + i // 32 * 4 + j] = i * s.shape[1] + j
    order[:] = [flat[p] for p in range(s.size)]
    # Reading linear bytes as swizzled ones puts byte p where element order[p] belongs.
    out = np.empty(s.size, np.uint8)
    out[order] = s.reshape(-1)
    return {"scales": out.reshape(s.shape)}


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_scale2(dialect, tmp_path):
    scale2 = np.float32(2.0**-11)
    for stored, value in {"divisor": 1 / scale2, "amax": scale2 * 2688, "multiplier": scale2}.items():
        roles = nvfp4(32, 64, scale2=0)
        del roles["scale2"]
        name = "a.weight_scale_2" if dialect == "modelopt" else "a.weight_global_scale"
        tensors = named(dialect, "a", roles) | {name: np.full((), value, np.float32)}
        path = tmp_path / stored
        path.mkdir()
        save(path / "model.safetensors", tensors)
        assert weights(path, scale2=stored)["a"].scale2 == scale2


def test_stacks(tmp_path):
    made = expert_weights(2, 128, 64, ("up_proj", "down_proj"), scale2=lambda e, i: 2.0**-9)
    tensors = stacked_experts("m.experts", made)
    for name, array in tensors.items():
        if name.endswith("_weight_scale"):
            tensors[name] = np.stack(
                [swizzled(one.view(np.uint8), 128).reshape(-(-one.shape[0] // 128) * 128, -1) for one in array]
            )
        elif not name.endswith("scale_2"):
            tensors[name] = swap(array)
    path = tmp_path / "x"
    path.mkdir()
    save(path / "model.safetensors", tensors)
    with open_checkpoint(path, Reading(nibble_order="high", scale_layout="128x4")) as ck:
        assert {m.name: m.shape for m in ck.modules} == {
            "m.experts.up_proj": (2, 128, 64),
            "m.experts.down_proj": (2, 64, 128),
        }
        for e, part in made:
            assert ck[f"m.experts.{e}.{part}"].same(Weight(**made[e, part]))
        assert np.array_equal(ck["m.experts.down_proj"].codes[1], made[1, "down_proj"]["codes"])


def test_the_order_of_gate_and_up(tmp_path):
    made = expert_weights(2, 32, 32, scale2=lambda e, i: 2.0**-9)
    path = tmp_path / "x"
    path.mkdir()
    save(path / "model.safetensors", stacked_experts("m.experts", made, order="up_first"))
    with open_checkpoint(path, Reading(gate_up="up_first")) as ck:
        for e, part in made:
            assert ck[f"m.experts.{e}.{part}"].same(Weight(**made[e, part]))


def test_a_comfy_file_reads_right_when_its_order_is_told():
    """The golden file of comfy-kitchen: high nibble first, swizzled and padded scales."""
    path = GOLDEN / "containers" / "comfy_c.safetensors"
    dense = f32(tensors_of(GOLDEN / "inputs_f32.safetensors")["C"])
    errors = {}
    for nibbles in ("high", "low"):
        with open_checkpoint(path, Reading(nibble_order=nibbles, scale_layout="128x4")) as ck:
            assert ck.dialect_name == "modelopt"
            (module,) = (m for m in ck.modules if m.kind == "nvfp4")
            w = Weight(**{role: ck.read(module.roles[role]) for role in ("codes", "scales", "scale2")})
        errors[nibbles] = np.linalg.norm(w.dequantize()[: len(dense), : dense.shape[1]] - dense) / np.linalg.norm(dense)
    assert errors["high"] < 0.12
    assert errors["low"] > 1


def test_other_weights_stay(tmp_path):
    path = make_dense(tmp_path / "x")
    with open_checkpoint(path, Reading(nibble_order="high")) as ck, halfbyte.open(path) as plain:
        assert ck[Q].same(plain[Q].replace(codes=swap(plain[Q].codes)))
        assert np.array_equal(ck["lm_head.weight"].data, plain["lm_head.weight"].data)


def test_scales_that_cannot_lie_so(tmp_path):
    path = make_dense(tmp_path / "x")
    for layout in ("128x4", "8x4-twice", "128x4-undone"):
        with pytest.raises(FormatError, match="do not lie so") as caught:
            weights(path, scale_layout=layout)
        assert caught.value.tensor == f"{DOWN}.weight_scale"
        assert caught.value.got == [32, 3]


def test_unknown_readings(tmp_path):
    path = make_dense(tmp_path / "x")
    for reading in ({"nibble_order": "middle"}, {"scale_layout": "64x4"}, {"scale2": "half"}, {"gate_up": "both"}):
        with pytest.raises(UsageError, match="unknown"):
            open_checkpoint(path, Reading(**reading))


def test_options():
    assert Reading(nibble_order="high", scale2="divisor").options == ["--nibble-order high", "--scale2 divisor"]
    assert not Reading(gate_up="interleaved")
    assert not Reading()


# --- everywhere


def spoilt(path, dialect="modelopt"):
    """(a checkpoint with swapped nibbles and swizzled scales, padded where need be; the same as it should be)."""

    def change(tensors):
        for name in list(tensors):
            if name.endswith(("_proj.weight", "weight_packed")) and tensors[name].dtype == np.uint8:
                tensors[name] = swap(tensors[name])
            elif name.endswith("weight_scale"):
                scales = tensors[name].view(np.uint8)
                shape = (-(-scales.shape[0] // 128) * 128, -1)
                tensors[name] = swizzled(scales, 128).reshape(shape).view(E4M3)

    good = make_dense(path / "good", dialect)
    return make_dense(path / "spoilt", dialect, change=change), good


AS = Reading("high", "128x4")
OPTIONS = ("--nibble-order", "high", "--scale-layout", "128x4")
TOLD = ["--nibble-order high", "--scale-layout 128x4"]


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_verify_is_of_what_is_read(dialect, tmp_path):
    path, good = spoilt(tmp_path, dialect)
    report, plain = halfbyte.verify(path, reading=AS), halfbyte.verify(good)
    assert report.findings == plain.findings
    assert report.facts["reading"] == TOLD
    assert plain.facts["reading"] == []
    assert report.facts["share"] == 1
    low = Reading("low", "linear", "divisor" if dialect == "compressed-tensors" else "multiplier")
    assert halfbyte.verify(good, reading=low).facts["reading"] == []
    ran = call("verify", path, *OPTIONS)
    assert (ran.rc, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[1] == "read with --nibble-order high --scale-layout 128x4"


def test_an_index_inside_swizzled_scales_is_logical(tmp_path):
    def change(roles):
        scales = roles["scales"].view(np.uint8).copy()
        scales[77, 5], scales[100, 6], scales[3, 0] = 0x7F, 0x80, 0
        return {"scales": swizzled(scales, 128).reshape(256, 12), "codes": swap(roles["codes"])}

    path, good = altered(tmp_path / "x", change, 256, 192)
    findings = {f.code: f for f in halfbyte.verify(path, reading=AS).findings}
    assert findings["HB103"].index == [77, 5]
    assert findings["HB104"].index == [100, 6]
    assert {f.tensor for f in findings.values() if f.code in ("HB103", "HB104")} == {"a.weight_scale"}
    assert np.any(good.codes[3, :8] & 0x77)
    assert findings["HB115"].got == "1 blocks"
    plain = {f.code: f.index for f in halfbyte.verify(path).findings}
    assert plain["HB103"] != [77, 5]


def test_scale2_that_is_checked_is_the_one_that_is_read(tmp_path):
    path, _ = altered(tmp_path / "x", lambda r: {"scale2": np.float32(5000)})
    assert "HB108" in {f.code for f in halfbyte.verify(path).findings}
    assert "HB108" not in {f.code for f in halfbyte.verify(path, reading=Reading(scale2="divisor")).findings}


def test_inspect_and_diff(tmp_path):
    path, good = spoilt(tmp_path)
    seen, plain = halfbyte.inspect(path, reading=AS, stats=True).facts, halfbyte.inspect(good, stats=True).facts
    assert seen["stats"] == plain["stats"]
    assert [g["shapes"] for g in seen["groups"]] == [g["shapes"] for g in plain["groups"]]
    assert (seen["reading"], plain["reading"]) == (TOLD, [])
    (group,) = (g for g in seen["groups"] if g["name"].endswith("q_proj"))
    assert group["bytes"] == 32 * 16 + 128 * 4 + 4  # as they lie on disk, padding included
    report = halfbyte.diff(path, good, reading=AS)
    assert report.findings == ()
    assert report.facts["reading"] == TOLD
    ran = call("diff", path, good, *OPTIONS)
    assert ran.rc == 0
    assert ran.stdout.splitlines()[0].endswith(": modelopt, read with --nibble-order high --scale-layout 128x4")
    assert not ran.stdout.splitlines()[1].endswith("128x4")
    assert "read with" in call("inspect", path, *OPTIONS).stdout
    assert call("diff", good, path, *OPTIONS).rc == 2  # a's, and only a's


def test_dequantize(tmp_path):
    path, good = spoilt(tmp_path)
    assert call("dequantize", good, tmp_path / "a").rc == 0
    ran = call("dequantize", path, tmp_path / "b", *OPTIONS)
    assert ran.rc == 0
    assert "--nibble-order high --scale-layout 128x4" in ran.stdout
    assert listing(tmp_path / "a") == listing(tmp_path / "b")


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
def test_convert(dialect, to, tmp_path):
    path, good = spoilt(tmp_path, dialect)
    report = halfbyte.convert(path, tmp_path / "a", to=to, reading=AS, prove=True)
    assert report.facts["reading"] == TOLD
    halfbyte.convert(good, tmp_path / "b", to=to)
    # A copy in the same dialect keeps the config; anything else writes it anew.
    a, b = listing(tmp_path / "a"), listing(tmp_path / "b")
    assert a["model.safetensors"] == b["model.safetensors"]
    assert halfbyte.verify(tmp_path / "a").findings == halfbyte.verify(tmp_path / "b").findings


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_an_inverted_scale2_keeps_its_last_bit(dialect, to, tmp_path):
    """What is stored is kept beside its rounded reciprocal, so that it comes back whichever way it is meant."""
    stored = np.float32([x for x in np.linspace(1, 2, 997, dtype=np.float32) if 1 / np.float32(1 / x) != x][:4])
    suffix, other = ("weight_scale_2", "divisor") if dialect == "modelopt" else ("weight_global_scale", "multiplier")
    tensors = {}
    for i, value in enumerate(stored):
        number = value * np.float32(2.0**-11 if other == "multiplier" else 2.0**11)
        tensors |= named(dialect, f"m.{i}.a", nvfp4(32, 64, i)) | {f"m.{i}.a.{suffix}": np.full((1,), number)}
    path = tmp_path / "x"
    path.mkdir()
    save(path / "model.safetensors", tensors)
    halfbyte.convert(path, tmp_path / "y", to=to, reading=Reading(scale2=other), prove=True)
    with open_checkpoint(path, Reading(scale2=other)) as a, open_checkpoint(tmp_path / "y") as b:
        assert b.findings == []
        for i, value in enumerate(stored):
            exact = value * np.float32(2.0**-11) if other == "multiplier" else 1 / (value * np.float32(2.0**11))
            assert a[f"m.{i}.a"].scale2 == b[f"m.{i}.a"].scale2 == exact
    assert halfbyte.diff(path, tmp_path / "y", reading=Reading(scale2=other)).findings == ()


def test_scale2_of_a_stack_in_bfloat16(tmp_path):
    made = expert_weights(3, 32, 32, ("down_proj",), scale2=lambda e, i: 2.0 ** -(9 + e))
    tensors = stacked_experts("m.experts", made)
    (name,) = (n for n in tensors if n.endswith("scale_2"))
    tensors[name] = (1 / tensors[name]).astype(BF16)
    path = tmp_path / "x"
    path.mkdir()
    save(path / "model.safetensors", tensors)
    with open_checkpoint(path, Reading(scale2="divisor")) as ck:
        assert [float(ck[f"m.experts.{e}.down_proj"].scale2.reshape(())) for e in range(3)] == [
            2.0**-9,
            2.0**-10,
            2.0**-11,
        ]


def test_a_comfy_file_becomes_one_that_needs_no_reading(tmp_path):
    path = GOLDEN / "containers" / "comfy_c.safetensors"
    report = halfbyte.convert(path, tmp_path / "x", to="modelopt", reading=AS, prove=True)
    (dropped,) = (entry for entry in report.facts["tensors"] if entry["action"] == "dropped")
    assert dropped["tensor"] == "blk.lin.comfy_quant"
    assert halfbyte.diff(path, tmp_path / "x", reading=AS).findings == ()
    dense = f32(tensors_of(GOLDEN / "inputs_f32.safetensors")["C"])
    with halfbyte.open(tmp_path / "x") as ck:
        made = ck["blk.lin"].dequantize()[: len(dense), : dense.shape[1]]
    assert np.linalg.norm(made - dense) / np.linalg.norm(dense) < 0.12


def test_comfy_metadata_goes_with_what_it_says(tmp_path):
    path = make_dense(tmp_path / "x", metadata={"_quantization_metadata": "{}", "format": "pt", "more": "1"})
    halfbyte.convert(path, tmp_path / "y", to="modelopt", reading=Reading("low"))
    assert by_library(tmp_path / "y" / "model.safetensors")[0] == {"format": "pt", "more": "1"}
    with open_checkpoint(tmp_path / "y") as ck:
        assert ck.dialect_name == "modelopt"


def test_swapped_nibbles_are_read_and_written_in_pieces(tmp_path, monkeypatch):
    good = make_dense(tmp_path / "good")
    path = make_dense(tmp_path / "x", change=lambda t: t.update({f"{Q}.weight": swap(t[f"{Q}.weight"])}))
    reads, fill = [], halfbyte.stored._fill
    monkeypatch.setattr("halfbyte.stored._fill", lambda t, p, out: (reads.append(len(out)), fill(t, p, out)))
    monkeypatch.setattr("halfbyte.checkpoint.outputs._PIECE", 100)
    plan = halfbyte.convert(path, tmp_path / "y", to="modelopt", reading=Reading("high"), dry_run=True)
    halfbyte.convert(path, tmp_path / "y", to="modelopt", reading=Reading("high"))
    assert max(reads) == 100
    assert plan.facts["peak_bytes"]
    with halfbyte.open(tmp_path / "y") as made, halfbyte.open(good) as wanted:
        assert made[Q].same(wanted[Q])
        assert made[DOWN].same(wanted[DOWN].replace(codes=swap(wanted[DOWN].codes)))
    monkeypatch.setattr("halfbyte.tools.verify.CHUNK", 64)
    monkeypatch.setattr("halfbyte.tools.diff._STEP", 128)
    reads.clear()
    halfbyte.verify(path, reading=Reading("high"), include=[Q])
    halfbyte.diff(path, good, reading=Reading("high"), include=[Q])
    assert max(reads) == 64


def test_what_a_task_takes(tmp_path):
    """A large matrix: its nibbles are swapped in pieces, and only its swizzled scales are made whole."""
    n, k = 24832, 4096
    path = tmp_path / "x"
    path.mkdir()
    header = {
        "a.weight": {"dtype": "U8", "shape": [n, k // 2], "data_offsets": [0, n * k // 2]},
        "a.weight_scale": {"dtype": "F8_E4M3", "shape": [n, k // 16], "data_offsets": [n * k // 2, n * k // 16 * 9]},
        "a.weight_scale_2": {"dtype": "F32", "shape": [], "data_offsets": [n * k // 16 * 9, n * k // 16 * 9 + 4]},
    }
    file = raw_safetensors(path / "model.safetensors", header)
    with file.open("r+b") as handle:
        size = file.stat().st_size
        handle.truncate(size + n * k // 16 * 9 + 4)
        handle.seek(size + n * k // 16 * 9)
        handle.write(np.float32(2.0**-9).tobytes())

    def peak(**reading):
        options = {"reading": Reading(**reading), "dry_run": True, "workers": 1}
        return halfbyte.convert(path, tmp_path / "y", to="modelopt", **options).facts["peak_bytes"]

    assert peak(nibble_order="high") - peak() <= 4 * (4 << 20)
    code = jit.code_bytes()  # which moves the scales
    assert code + 4 * n * k // 16 <= peak(nibble_order="high", scale_layout="128x4") <= peak() + code + 4 * n * k // 16


def test_a_stack_in_columns_has_no_swizzled_scales(tmp_path):
    made = expert_weights(2, 128, 64, ("up_proj",), scale2=lambda e, i: 2.0**-9)
    path = tmp_path / "x"
    path.mkdir()
    save(path / "model.safetensors", stacked_experts("m.experts", made, columns=True))
    with pytest.raises(FormatError, match="lie as columns"):
        open_checkpoint(path, Reading(scale_layout="128x4"))
    with open_checkpoint(path, Reading("high")) as ck:
        assert ck["m.experts.1.up_proj"].codes.tobytes() == swap(made[1, "up_proj"]["codes"]).tobytes()
