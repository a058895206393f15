"""``convert --layout``: weights as a layout's buffers, and back to the source's bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    GOLDENS,
    Raw,
    call,
    check_failure,
    codes,
    environment,
    expert_weights,
    f32,
    floats,
    fp8,
    header_of,
    leftovers,
    listing,
    make_dense,
    mxfp4,
    named,
    nvfp4,
    read_json,
    save,
    save_sharded,
    split_experts,
    stacked_experts,
    tensors_of,
    write_json,
)
from contract import VARIANTS, fitting
from halfbyte import jit
from halfbyte.dialects.packed import Pack
from halfbyte.errors import FormatError, HalfbyteError, LayoutError, UsageError
from halfbyte.layouts import Fragments, GateUp, Marlin, Rows
from halfbyte.weight import Weight

CT = "compressed-tensors"
LAYOUTS = [layout for layout in VARIANTS if not isinstance(layout, GateUp)]
SHAPES = ((64, 64), (128, 192), (130, 80), (1, 16), (0, 16))
KEY = "halfbyte.layout"


def weights(layout):
    """Name -> weight with everything that it may have, of each shape that the layout takes."""
    rng, made = np.random.default_rng(7), {}
    for i, (n, k) in enumerate(SHAPES):
        if layout.needs((n, k)) is None:
            weight = Weight(
                codes=rng.integers(0, 256, (n, k // 2), np.uint8),
                scales=rng.integers(0, 0x7F, (n, k // 16), np.uint8),
                scale2=0.0003 * (i + 1),
                input_scale=0.017 * (i + 1) if i % 2 else None,
                pre_scale=np.linspace(0.5, 2, k).astype(np.float16) if i == 1 else None,
            )
            made[f"m.{i}.proj"] = fitting(layout, weight)
    return made


def tensors_for(dialect, made):
    """The tensors of weights, named without halfbyte."""
    found = {}
    for name, w in made.items():
        roles = {"codes": w.codes, "scales": np.asarray(w.scales).view(E4M3), "scale2": w.scale2.item()}
        roles |= {} if w.input_scale is None else {"input_scale": w.input_scale.item()}
        found |= named(dialect, name, roles)
        if w.pre_scale is not None and dialect == "modelopt":
            found[f"{name}.pre_quant_scale"] = w.pre_scale
    return found


def make(path, tensors, config=None, metadata=None):
    path.mkdir(parents=True)
    save(path / "model.safetensors", tensors, metadata)
    write_json(path / "config.json", {"model_type": "llama"} | (config or {}))
    return path


def table_of(path):
    return json.loads(header_of(path / "model.safetensors")["__metadata__"][KEY])


@pytest.mark.parametrize("dialect", ["modelopt", CT])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.key)
def test_there_and_back(layout, dialect, tmp_path):
    """The buffers are those of ``pack``, the way back gives the source's bytes."""
    made = weights(layout)
    beside = {"n.weight": np.ones(64, BF16), "m.0.proj.bias": np.arange(64, dtype=np.float32)}
    src = make(tmp_path / "src", tensors_for(dialect, made) | beside)
    report = halfbyte.convert(src, tmp_path / "packed", layout=layout.key, prove=True)
    assert report.facts["proven"] == len(tensors_of(src))
    assert report.facts["layout"] == layout.key
    assert report.facts["rounded"] == report.facts["zeroed"] == []
    found = tensors_of(tmp_path / "packed")
    for name, weight in made.items():
        given = weight if dialect == "modelopt" else weight.replace(pre_scale=None)
        for buffer, array in layout.pack(given).buffers().items():
            a = np.asarray(array)
            if buffer in ("scale2", "input_scale"):
                a = a.reshape(())
                if dialect == CT:  # what 1 / (1 / x) leaves of it
                    a = np.float32(1) / (np.float32(1) / a)
            raw = found.pop(f"{name}.{buffer}")
            assert (raw.shape, raw.data) == (a.shape, a.tobytes()), (name, buffer)
    assert set(found) == set(beside)
    assert table_of(tmp_path / "packed") == {n: {"layout": layout.key, "shape": list(w.shape)} for n, w in made.items()}
    halfbyte.convert(tmp_path / "packed", tmp_path / "back", to=dialect, prove=True)
    assert tensors_of(tmp_path / "back") == tensors_of(src)
    assert KEY not in header_of(tmp_path / "back" / "model.safetensors")["__metadata__"]


def test_it_is_a_dialect_of_its_own(tmp_path):
    src = make_dense(tmp_path / "src", input_scale=True)
    halfbyte.convert(src, tmp_path / "packed", layout="atoms128x4")
    facts = halfbyte.inspect(tmp_path / "packed").facts
    assert (facts["dialect"], facts["evidence"]) == ("packed", "metadata halfbyte.layout: atoms128x4")
    assert facts["config"]["quant_method"] == "halfbyte"
    shapes = {g["name"]: g["shapes"] for g in facts["groups"]}
    assert shapes["model.layers.*.mlp.down_proj"] == [[32, 48]]
    assert halfbyte.verify(tmp_path / "packed").findings == ()
    diff = halfbyte.diff(src, tmp_path / "packed")
    assert (diff.facts["different"], diff.findings) == (0, ())
    halfbyte.dequantize_checkpoint(src, tmp_path / "a")
    halfbyte.dequantize_checkpoint(tmp_path / "packed", tmp_path / "b")
    assert tensors_of(tmp_path / "a") == tensors_of(tmp_path / "b")
    halfbyte.convert(tmp_path / "packed", tmp_path / "back", to="modelopt")
    assert read_json(tmp_path / "back" / "config.json")["quantization_config"]["quant_algo"] == "NVFP4"
    with pytest.raises(UsageError, match="packed buffers are not cut"):
        halfbyte.shard(tmp_path / "packed", tmp_path / "ranks", tp=1)


def test_one_buffer_of_codes_and_scales_counts_once(tmp_path):
    src = make(tmp_path / "src", named("modelopt", "m.proj", nvfp4(32, 128)))
    halfbyte.convert(src, tmp_path / "packed", layout="gguf", prove=True)
    assert tensors_of(tmp_path / "packed")["m.proj.blocks"].shape == (32 * 2 * 36,)
    (group,) = halfbyte.inspect(tmp_path / "packed").facts["groups"]
    assert (group["bytes"], group["parameters"]) == (32 * 2 * 36 + 4, 32 * 128)


def test_from_one_layout_to_another(tmp_path):
    src = make(tmp_path / "src", tensors_for("modelopt", weights(Rows())))
    halfbyte.convert(src, tmp_path / "a", layout="marlin(scale_format=s0e5m3, dtype=float16)", prove=True)
    halfbyte.convert(tmp_path / "a", tmp_path / "b", layout="atoms8x4", prove=True)
    halfbyte.convert(src, tmp_path / "c", layout="atoms8x4")
    assert tensors_of(tmp_path / "b") == tensors_of(tmp_path / "c")
    halfbyte.convert(tmp_path / "b", tmp_path / "d", layout="rows", prove=True, max_shard_size="2KB")
    halfbyte.convert(tmp_path / "d", tmp_path / "back", to="modelopt", prove=True)
    assert tensors_of(tmp_path / "back") == tensors_of(src)


def test_the_number_that_compressed_tensors_stores_comes_back(tmp_path):
    """Its reciprocal does not lead back to it; both ways around."""
    for seed in range(40):
        tensors = named(CT, "m.proj", nvfp4(16, 16, scale2=0.0001 + seed * 1e-6))
        src = make(tmp_path / f"src{seed}", tensors)
        halfbyte.convert(src, tmp_path / f"p{seed}", layout="rows", prove=True)
        halfbyte.convert(tmp_path / f"p{seed}", tmp_path / f"b{seed}", to=CT, prove=True)
        assert tensors_of(tmp_path / f"b{seed}") == tensors_of(src)


def test_what_is_carried(tmp_path):
    """FP8, MXFP4 and dense layers, biases and KV scales, as they are; the KV cache's format comes back."""
    mx = mxfp4(32, 64)
    tensors = {
        **named("modelopt", "h.0.k_proj", nvfp4(32, 32)),
        "h.0.k_proj.bias": np.arange(32, dtype=np.float32),
        "h.0.k_proj.k_scale": np.float32(0.5),
        **{f"h.0.o_proj.{n}": t for n, t in fp8(32, 32).items()},
        "h.0.m_proj.weight": mx["codes"],
        "h.0.m_proj.weight_scale": mx["scales"],
        "h.0.norm.weight": np.ones(32, BF16),
        "lm_head.weight": floats(64, 32),
    }
    section = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    src = make(tmp_path / "src", tensors, {"quantization_config": section})
    (src / "tokenizer.json").write_text("{}")
    report = halfbyte.convert(src, tmp_path / "packed", layout="trtllm", prove=True)
    assert report.facts["proven"] == len(tensors)
    found, source = tensors_of(tmp_path / "packed"), tensors_of(src)
    assert set(found) - set(source) == {f"h.0.k_proj.{b}" for b in ("codes", "scales", "scale2")}
    assert all(found[name] == source[name] for name in set(found) & set(source))
    facts = halfbyte.inspect(tmp_path / "packed").facts
    assert facts["config"]["kv_cache"] == "FP8"
    assert halfbyte.verify(tmp_path / "packed").ok
    halfbyte.convert(tmp_path / "packed", tmp_path / "back", to="modelopt", prove=True)
    assert tensors_of(tmp_path / "back") == source
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert halfbyte.inspect(tmp_path / "back").facts["config"]["kv_cache"] == "FP8"


def test_shards_stay_and_say_how_their_own_weights_lie(tmp_path):
    src = tmp_path / "src"
    shards = [named("modelopt", f"h.{i}.q_proj", nvfp4(32, 32, i)) for i in range(3)]
    save_sharded(src, shards)
    halfbyte.convert(src, tmp_path / "packed", layout="npacked", prove=True)
    for i, file in enumerate(sorted((tmp_path / "packed").glob("*.safetensors"))):
        assert set(json.loads(header_of(file)["__metadata__"][KEY])) == {f"h.{i}.q_proj"}
    with halfbyte.open(tmp_path / "packed") as checkpoint:
        assert [name for name, _ in checkpoint.weights()] == [f"h.{i}.q_proj" for i in range(3)]
    halfbyte.convert(tmp_path / "packed", tmp_path / "back", to="modelopt", prove=True)
    assert tensors_of(tmp_path / "back") == tensors_of(src)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_stacks_are_packed_expert_by_expert(columns, tmp_path):
    p = "model.layers.0.mlp.experts"
    made = expert_weights(3, 48, 32, scale2=lambda e, i: 2.0 ** -(9 + e), input_scale=lambda e, i: 0.5)
    config = {"model_type": "qwen3_moe", "hidden_size": 32}
    src = make(tmp_path / "src", stacked_experts(p, made, columns=columns), config)
    halfbyte.convert(src, tmp_path / "packed", layout="marlin", prove=True)
    assert set(table_of(tmp_path / "packed")) == {f"{p}.{e}.{part}" for e, part in made}
    form = "stacked-columns" if columns else "stacked-rows"
    halfbyte.convert(tmp_path / "packed", tmp_path / "back", to="modelopt", experts=form, prove=True)
    assert tensors_of(tmp_path / "back") == tensors_of(src)
    halfbyte.convert(tmp_path / "packed", tmp_path / "split", to="modelopt", prove=True)
    assert tensors_of(tmp_path / "split") == tensors_of(make(tmp_path / "single", split_experts(p, made)))


def test_mxfp4_alone_becomes_nvfp4_first(tmp_path):
    mx = mxfp4(32, 64, low=120, high=126)
    src = make(tmp_path / "src", {"m.proj.weight": mx["codes"], "m.proj.weight_scale": mx["scales"]})
    report = halfbyte.convert(src, tmp_path / "packed", layout="atoms128x4", prove=True)
    assert report.facts["mxfp4"] == [{"name": "m.proj", "relative": 0.0}]
    assert list(table_of(tmp_path / "packed")) == ["m.proj"]


# --- layouts that round

LOSSY = "marlin(scale_format=s0e5m3, lossy=True)"


def with_subnormals():
    roles = nvfp4(64, 64)
    scales = roles["scales"].view(np.uint8).copy()
    scales[3, 2], scales[0, 1] = 1, 0x7E
    roles["scales"] = scales.view(E4M3)
    return roles


def test_a_layout_that_rounds_says_by_how_much(tmp_path):
    src = make(
        tmp_path / "src", named("modelopt", "m.odd", with_subnormals()) | named("modelopt", "m.even", nvfp4(16, 16))
    )
    with pytest.raises(
        LayoutError, match=r"turns the block scale at \[3, 2\] from 0.00195312 \(byte 01\) into 0"
    ) as no:
        halfbyte.convert(src, tmp_path / "packed", layout="marlin(scale_format=s0e5m3)")
    assert no.value.tensor == "m.odd"
    assert leftovers(tmp_path) == ["src"]
    report = halfbyte.convert(src, tmp_path / "packed", layout=LOSSY, prove=True)
    roles = with_subnormals()
    before = Weight(**roles)
    scales = roles["scales"].view(np.uint8).copy()
    scales[3, 2] = 0
    meant = Weight(**roles | {"scales": scales})
    exact = before.dequantize().astype(np.float64)
    relative = np.linalg.norm(meant.dequantize() - exact) / np.linalg.norm(exact)
    (entry,) = report.facts["rounded"]
    assert entry["name"] == "m.odd"
    assert entry["relative"] == pytest.approx(relative, rel=1e-6)
    assert [(f.code, f.tensor, f.got) for f in report.findings if f.code == "HB302"] == [
        ("HB302", "m.odd", float(f"{relative:.3g}"))
    ]
    with halfbyte.open(tmp_path / "packed") as checkpoint:
        assert checkpoint["m.odd"].same(meant)
        assert checkpoint["m.even"].same(Weight(**nvfp4(16, 16)))


# --- layouts that have no codes in blocks whose scale is 0


def with_zero_blocks(n, k, seed=0):
    """The roles of a weight of which two blocks have the scale 0: one with codes, one without; and those it becomes."""
    roles = nvfp4(n, k, seed)
    scales, given = roles["scales"].view(np.uint8).copy(), roles["codes"].copy()
    scales[3, 1] = scales[n - 1, 0] = 0
    given[n - 1, :8] = 0
    given[3, 8:16] = 0x80
    kept = given.copy()
    kept[3, 8:16] = 0
    roles = roles | {"scales": scales.view(E4M3), "codes": given}
    return roles, roles | {"codes": kept}


def zero_block_findings(report):
    return [(f.severity, f.tensor, f.got) for f in report.findings if f.code == "HB303"]


def test_codes_of_zero_blocks_are_told(tmp_path):
    roles, kept = with_zero_blocks(40, 80)
    others = named("modelopt", "m.even", nvfp4(16, 16))
    src = make(tmp_path / "src", named("modelopt", "m.odd", roles) | others)
    assert halfbyte.convert(src, tmp_path / "packed", layout="fragments", dry_run=True).facts["zeroed"]
    report = halfbyte.convert(src, tmp_path / "packed", layout="fragments", prove=True)
    assert report.facts["zeroed"] == [{"name": "m.odd", "blocks": 1}]
    assert report.facts["rounded"] == []
    assert zero_block_findings(report) == [("note", "m.odd", "1 blocks")]
    packed = Fragments().pack(Weight(**roles))
    assert tensors_of(tmp_path / "packed")["m.odd.codes"].data == packed.buffers()["codes"].tobytes()
    with halfbyte.open(tmp_path / "packed") as checkpoint:
        assert checkpoint["m.odd"].same(Weight(**kept))
        assert np.array_equal(checkpoint["m.odd"].dequantize(), Weight(**roles).dequantize())
    back = halfbyte.convert(tmp_path / "packed", tmp_path / "back", to="modelopt", prove=True)
    assert zero_block_findings(back) == []
    assert tensors_of(tmp_path / "back") == tensors_of(
        make(tmp_path / "kept", named("modelopt", "m.odd", kept) | others)
    )
    told = call("convert", src, tmp_path / "again", "--layout", "fragments")
    assert told.rc == 0
    assert "codes of 1 block whose scale is 0 are 0 now; no value changed" in told.stdout
    assert "HB303" in told.stderr


@pytest.mark.parametrize("layout", ["fragments(dtype=float16)", "marlin"])
def test_codes_of_zero_blocks_that_a_layout_keeps(layout, tmp_path):
    src = make(tmp_path / "src", named("modelopt", "m.odd", with_zero_blocks(40, 80)[0]))
    report = halfbyte.convert(src, tmp_path / "packed", layout=layout, prove=True)
    assert report.facts["zeroed"] == zero_block_findings(report) == []
    halfbyte.convert(tmp_path / "packed", tmp_path / "back", to="modelopt", prove=True)
    assert tensors_of(tmp_path / "back") == tensors_of(src)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_codes_of_zero_blocks_in_stacks(columns, tmp_path):
    p = "model.layers.0.mlp.experts"
    parts = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    both = {(e, part): with_zero_blocks(*shape, e) for e in range(2) for part, shape in parts.items()}
    made, kept = ({key: pair[i] for key, pair in both.items()} for i in (0, 1))
    config = {"model_type": "qwen3_moe", "hidden_size": 32}
    src = make(tmp_path / "src", stacked_experts(p, made, columns=columns), config)
    report = halfbyte.convert(src, tmp_path / "packed", layout="fragments", prove=True)
    assert sorted((z["name"], z["blocks"]) for z in report.facts["zeroed"]) == sorted(
        (f"{p}.{e}.{part}", 1) for e, part in both
    )
    form = "stacked-columns" if columns else "stacked-rows"
    halfbyte.convert(tmp_path / "packed", tmp_path / "back", to="modelopt", experts=form, prove=True)
    assert tensors_of(tmp_path / "back") == tensors_of(
        make(tmp_path / "kept", stacked_experts(p, kept, columns=columns))
    )


# --- refusals


def nan_scale():
    roles = nvfp4(32, 64)
    scales = roles["scales"].view(np.uint8).copy()
    scales[5, 1] = 0x7F
    return roles | {"scales": scales.view(E4M3)}


REFUSED = {
    "K": (nvfp4(32, 48), "tiles64", "K = 48 is not a multiple of 64"),
    "N": (nvfp4(33, 48), "npacked", "N = 33 is not a multiple of 2"),
    "NaN": (nan_scale(), "rows", r"the block scale at \[5, 1\] is NaN \(byte 7F\)"),
}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_layout_cannot_hold(case, dry_run, tmp_path):
    roles, layout, reason = REFUSED[case]
    fine = {f"a.{i}.weight": floats(8, 8, i) for i in range(3)}
    src = make(tmp_path / "src", fine | named("modelopt", "b.good", nvfp4(64, 64)) | named("modelopt", "c.bad", roles))
    with pytest.raises(LayoutError, match=reason) as failed:
        halfbyte.convert(src, tmp_path / "out", layout=layout, dry_run=dry_run)
    assert failed.value.tensor == "c.bad"
    assert leftovers(tmp_path) == ["src"]


WRONG = {
    "neither": ([], "--to DIALECT or --layout NAME"),
    "both": (["--layout", "rows", "--to", CT], "--to DIALECT or --layout NAME"),
    "unknown": (["--layout", "stripes"], "stripes"),
    "stacked": (["--layout", "rows", "--experts", "stacked"], "packed one by one"),
    "gate_up": (["--layout", "gate_up(order=up_first, layout=rows)"], "they lie apart"),
    "mxfp4": (["--layout", "columns(kind=mxfp4)"], "packed as NVFP4 alone: got columns(align=1, kind=mxfp4)"),
    "to packed": (["--to", "packed"], "packed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case, tmp_path):
    options, message = WRONG[case]
    src = make(tmp_path / "src", named("modelopt", "m.proj", nvfp4(16, 16)))
    check_failure(call("convert", src, tmp_path / "out", *options), 2, message)
    assert leftovers(tmp_path) == ["src"]


def test_another_tensor_of_the_weights_name(tmp_path):
    """A stack that is packed in parts, and a vector of an expert's own name."""
    p = "m.experts"
    made = stacked_experts(p, expert_weights(2, 16, 16))
    src = make(tmp_path / "src", made | {f"{p}.0.up_proj": np.ones(4, np.float32)}, {"model_type": "qwen3_moe"})
    report = halfbyte.convert(src, tmp_path / "packed", layout="rows", prove=True)
    assert report.facts["proven"] == 2 * 3 * 3 + 1
    assert tensors_of(tmp_path / "packed")[f"{p}.0.up_proj"] == tensors_of(src)[f"{p}.0.up_proj"]


def test_nothing_to_pack(tmp_path):
    src = make(tmp_path / "src", {f"m.proj.{n}": t for n, t in fp8(16, 16).items()})
    with pytest.raises(UsageError, match="there is no NVFP4 weight to pack"):
        halfbyte.convert(src, tmp_path / "out", layout="rows")


def test_the_proof_finds_a_wrong_buffer(tmp_path, monkeypatch):
    src = make(tmp_path / "src", named("modelopt", "m.proj", nvfp4(16, 32)))
    pack = Pack.__call__
    monkeypatch.setattr(Pack, "__call__", lambda self, arrays: pack(self, arrays)[::-1].copy())
    with pytest.raises(FormatError, match="the proof failed: a tensor differs from its source"):
        halfbyte.convert(src, tmp_path / "out", layout="atoms8x4", prove=True)
    assert leftovers(tmp_path) == ["src"]


# --- files that lie


def packed_file(path, change=None, table=None, text=None):
    """A packed checkpoint of one weight whose metadata or tensors have been altered."""
    src = make(path.parent / f"{path.name}-src", named("modelopt", "m.proj", nvfp4(16, 32)))
    halfbyte.convert(src, path, layout="marlin(scale_format=s0e5m3)")
    tensors = tensors_of(path) | (change or {})
    entry = table_of(path)["m.proj"] | (table or {})
    metadata = {KEY: json.dumps({"m.proj": entry}) if text is None else text}
    save(path / "model.safetensors", {n: t for n, t in tensors.items() if t is not None}, metadata)
    return path


LIES = {
    "not JSON": ({"text": "{"}, "is no table of modules"),
    "a list": ({"text": "[]"}, "is no table of modules"),
    "entries of text": ({"text": '{"m.proj": "rows"}'}, "is no table of modules"),
    "deep": ({"text": "[" * 100_000}, "is no table of modules"),
    "no layout": ({"table": {"layout": None}}, "the stated layout"),
    "unknown layout": ({"table": {"layout": "stripes"}}, "unknown layout"),
    "another layout": ({"table": {"layout": "rows"}}, "m.proj.codes: a buffer is missing, or is not that"),
    "rows of gate and up": ({"table": {"layout": "gate_up(order=up_first, layout=rows)"}}, "not a layout of a"),
    "of MXFP4": ({"table": {"layout": "columns(align=1, kind=mxfp4)"}}, "not a layout of a"),
    "a huge field": ({"table": {"layout": f"columns(align={10**400})"}}, "m.proj.codes"),
    "no shape": ({"table": {"shape": None}}, "the stated shape"),
    "one axis": ({"table": {"shape": [512]}}, "the stated shape"),
    "half a block": ({"table": {"shape": [16, 24]}}, "the stated shape"),
    "negative": ({"table": {"shape": [-16, 32]}}, "the stated shape"),
    "huge": ({"table": {"shape": [10**15, 10**15 * 16]}}, "m.proj.codes"),
    "true": ({"table": {"shape": [True, 32]}}, "the stated shape"),
    "no codes": ({"change": {"m.proj.codes": None}}, "m.proj.codes: a buffer is missing"),
    "no factor": ({"change": {"m.proj.factor": None}}, "m.proj.factor: a buffer is missing"),
    "short scales": ({"change": {"m.proj.scales": np.zeros(3, np.uint8)}}, "m.proj.scales"),
    "scales of F32": ({"change": {"m.proj.scales": np.zeros(32, np.float32)}}, "m.proj.scales"),
}


@pytest.mark.parametrize("case", LIES)
def test_metadata_that_lie_are_one_error(case, tmp_path):
    options, message = LIES[case]
    path = packed_file(tmp_path / "x", **options)
    for verb in ("inspect", "verify"):
        assert message in check_failure(call(verb, path), 2)


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
def test_a_factor_that_is_none(factor, tmp_path):
    path = packed_file(tmp_path / "x", {"m.proj.factor": np.float32(factor)})
    assert call("inspect", path).rc == 0
    check_failure(call("verify", path), 2, "m.proj.factor", "not a factor of scales")


def test_scales_that_no_weight_has(tmp_path):
    """The error names their tensor, whichever command reads them."""
    path = packed_file(tmp_path / "x", {"m.proj.scales": np.full(64 * 2, 1, np.uint8)})
    with pytest.raises(HalfbyteError, match=r"m\.proj\.scales: .*is no E4M3 number"):
        halfbyte.verify(path)
    src = make(tmp_path / "src", named("modelopt", "m.proj", nvfp4(16, 32)))
    halfbyte.convert(src, tmp_path / "y", layout="fragments")
    change = {"m.proj.scales": np.full(16 * 4, 0xFF, np.uint8)}
    metadata = header_of(tmp_path / "y" / "model.safetensors")["__metadata__"]
    save(tmp_path / "y" / "model.safetensors", tensors_of(tmp_path / "y") | change, metadata)
    said = "model.safetensors: m.proj.scales: the stored block scale at [0, 0] is no positive E4M3 number: got byte FF"
    for command in (["verify"], ["convert", "--to", "modelopt"], ["dequantize"], ["inspect", "--stats"]):
        verb, *options = command
        target = [tmp_path / "z"] if verb in ("convert", "dequantize") else []
        check_failure(call(verb, tmp_path / "y", *target, *options), 2, said)
    assert not (tmp_path / "z").exists()


def test_a_second_scale_that_is_missing_is_a_finding(tmp_path):
    path = packed_file(tmp_path / "x", {"m.proj.scale2": None})
    assert [c for c, *_ in codes(halfbyte.verify(path).findings)] == ["HB105"]


def test_a_nan_scale_is_told_by_its_row_and_block(tmp_path):
    src = make(tmp_path / "src", named("modelopt", "m.proj", nvfp4(16, 64)))
    halfbyte.convert(src, tmp_path / "x", layout="columns")
    tensors = tensors_of(tmp_path / "x")
    scales = bytearray(tensors["m.proj.scales"].data)
    scales[2 * 16 + 5] = 0x7F
    metadata = header_of(tmp_path / "x" / "model.safetensors")["__metadata__"]
    save(tmp_path / "x" / "model.safetensors", tensors | {"m.proj.scales": Raw("U8", (64,), bytes(scales))}, metadata)
    assert codes(halfbyte.verify(tmp_path / "x").findings) == [("HB103", "m.proj.scales", [5, 2])]


def test_tensors_of_such_names_without_metadata_are_no_weight(tmp_path):
    src = make(tmp_path / "src", {"m.codes": np.zeros(8, np.uint8), "m.scales": np.ones(8, np.float32)})
    assert halfbyte.inspect(src).facts["dialect"] == "dense"


# --- how it is written

KILLED = """
import os, sys
from halfbyte.tools import convert as tool
tool._Convert.side_files = lambda self, writer: os._exit(9)
tool.convert(sys.argv[1], sys.argv[2], layout=sys.argv[3], workers=1)
"""


def test_resume(tmp_path):
    src = make(tmp_path / "src", tensors_for("modelopt", weights(Rows())))
    line = [sys.executable, "-c", KILLED, src, tmp_path / "out", "marlin"]
    assert subprocess.run(line, env=environment(), check=False).returncode == 9
    other = call("convert", src, tmp_path / "out", "--layout", "marlin(pad_n=128)", "--resume")
    check_failure(other, 2, "another plan", "options target")
    assert call("convert", src, tmp_path / "out", "--layout", "marlin", "--resume", "--prove").rc == 0
    halfbyte.convert(src, tmp_path / "whole", layout=Marlin())
    assert listing(tmp_path / "out") == listing(tmp_path / "whole")


def test_workers_processes_and_dry_run(tmp_path):
    src = make_dense(tmp_path / "src", layers=2, shards=3)
    ran = call("convert", src, tmp_path / "a", "--layout", "marlin", "--dry-run", "--json")
    assert ran.document["dry_run"]
    assert leftovers(tmp_path) == ["src"]
    for workers in (1, 4):
        halfbyte.convert(src, tmp_path / str(workers), layout="marlin", workers=workers)
    assert listing(tmp_path / "1") == listing(tmp_path / "4")
    total = sum(len(t.data) for t in tensors_of(tmp_path / "1").values())
    assert ran.document["bytes_out"] == total


@pytest.mark.parametrize("layout", ["marlin", LOSSY, "gguf"])
def test_memory_is_what_the_dry_run_says(layout, tmp_path):
    """Of one module, however many there are; and that of the proof. What is compiled comes on top, once."""
    tensors = {}
    for i in range(4):
        tensors |= named("modelopt", f"m.{i}.proj", nvfp4(1024, 4096, i))
    src = make(tmp_path / "src", tensors)
    told = halfbyte.convert(src, tmp_path / "x", layout=layout, dry_run=True, workers=1, prove=True).facts["peak_bytes"]
    code = jit.code_bytes()
    halfbyte.convert(src, tmp_path / "before", layout=layout, workers=1)  # Numba is there from now on, if it is
    tracemalloc.start()
    try:
        halfbyte.convert(src, tmp_path / "x", layout=layout, workers=1, prove=True)
        there = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        back = halfbyte.convert(tmp_path / "x", tmp_path / "y", to="modelopt", workers=1, prove=True)
        again = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert there < told - code < 8 * there
    assert again < back.facts["peak_bytes"] - code < 8 * again


def test_the_table_and_json(tmp_path):
    ran = call("convert", GOLDENS["modelopt_llama_nvfp4"], tmp_path / "out", "--layout", "atoms128x4", "--prove")
    assert (ran.rc, ran.stderr) == (0, "")
    for text in ("modelopt -> packed", "packed as atoms128x4", "layout", "proven"):
        assert text in ran.stdout
    back = call("convert", tmp_path / "out", tmp_path / "back", "--to", "modelopt", "--json", "--prove")
    assert back.document["from"] == "packed"
    assert "taken out of a layout" in {entry["reason"] for entry in back.document["tensors"]}
    assert tensors_of(tmp_path / "back") == tensors_of(GOLDENS["modelopt_llama_nvfp4"])
    scale2 = next(t for n, t in tensors_of(tmp_path / "out").items() if n.endswith(".scale2"))
    assert f32(scale2).shape == ()
