"""``quantize``: a dense checkpoint to NVFP4."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    CONFIG,
    DOWN,
    E4M3,
    GATE,
    GOLDEN,
    GOLDENS,
    HIDDEN,
    INDEX,
    LINEARS,
    UP,
    K,
    Q,
    Raw,
    V,
    by_library,
    call,
    check_failure,
    f32,
    floats,
    header_of,
    leftovers,
    listing,
    make_float,
    others,
    read_json,
    save,
    tensors_of,
    write_json,
)
from halfbyte.checkpoint.reader import PROVENANCE
from halfbyte.errors import HalfbyteError, QuantizeError, UsageError

PEERS = {("modelopt", "float32"): "modelopt_f32", ("modelopt", "bfloat16"): "modelopt_bf16in"}
DIALECTS = pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])


def inputs(dtype=np.float32):
    return {f"{n}.weight": f32(t).astype(dtype) for n, t in tensors_of(GOLDEN / "inputs_f32.safetensors").items()}


def quantize(tmp_path, tensors=None, **options):
    src = make_float(tmp_path / "src", tensors)
    report = halfbyte.quantize_checkpoint(src, tmp_path / "out", **options)
    return tmp_path / "out", report


# --- the bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_modelopt(tmp_path, dtype):
    """Byte by byte what NVFP4QTensor.quantize makes of the same matrices."""
    out, _ = quantize(tmp_path, inputs({"float32": np.float32, "bfloat16": BF16}[dtype]))
    golden = {
        n: t for n, t in tensors_of(GOLDEN / f"{PEERS['modelopt', dtype]}.safetensors").items() if "dequant" not in n
    }
    assert tensors_of(out) == golden


def test_as_compressed_tensors(tmp_path):
    """Byte by byte what generate_gparam, calculate_qparams and NVFP4PackedCompressor make of the same matrices."""
    golden = tensors_of(GOLDEN / "compressed_tensors.safetensors")
    out, _ = quantize(tmp_path, inputs(), like="compressed-tensors", to="compressed-tensors")
    assert tensors_of(out) == {
        n: t for n, t in golden.items() if not n.startswith("bf16in") and "decompressed" not in n
    }


@DIALECTS
@pytest.mark.parametrize("like", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_as_the_function(tmp_path, to, like, dtype):
    """A file gives what hb.quantize gives for each matrix, whatever dialect it is written in."""
    rng = np.random.default_rng(0)
    tensors = {
        f"m{i}.weight": (rng.standard_normal((5, 48)) * 10.0 ** rng.integers(-3, 2)).astype(dtype) for i in range(9)
    }
    out, report = quantize(tmp_path, tensors, to=to, like=like)
    assert report.facts["dialect"] == to
    with halfbyte.open(out) as checkpoint:
        assert checkpoint.dialect.name == to
        weights = dict(checkpoint.weights())
    for name, dense in tensors.items():
        expected = halfbyte.quantize(dense, like=like)
        assert np.array_equal(weights[name[:-7]].codes, expected.codes)
        assert np.array_equal(weights[name[:-7]].scales, expected.scales)
        assert weights[name[:-7]].scale2 == expected.scale2, name


@DIALECTS
@pytest.mark.parametrize("like", ["modelopt", "compressed-tensors"])
def test_the_peers_own_number_is_stored(tmp_path, to, like):
    """What the peer would have stored: 200 amaxima, written in its own dialect and in the other."""
    rng = np.random.default_rng(1)
    tensors = {f"m{i}.weight": (rng.standard_normal((1, 16)) * 0.1).astype(np.float32) for i in range(200)}
    out, _ = quantize(tmp_path, tensors, to=to, like=like)
    made = tensors_of(out)
    suffix = "weight_scale_2" if to == "modelopt" else "weight_global_scale"
    for name, dense in tensors.items():
        amax = np.abs(dense).max()
        number = {"modelopt": amax / np.float32(2688), "compressed-tensors": np.float32(2688) * (np.float32(1) / amax)}
        expected = number[like] if like == to else np.float32(1) / number[like]
        assert f32(made[f"{name[:-7]}.{suffix}"]).reshape(()) == expected
    # and back: the other dialect's number returns
    halfbyte.convert(out, tmp_path / "back", to=like)
    suffix = "weight_scale_2" if like == "modelopt" else "weight_global_scale"
    back = tensors_of(tmp_path / "back")
    for name, dense in tensors.items():
        amax = np.abs(dense).max()
        number = {"modelopt": amax / np.float32(2688), "compressed-tensors": np.float32(2688) * (np.float32(1) / amax)}
        assert f32(back[f"{name[:-7]}.{suffix}"]).reshape(()) == number[like]


def test_provenance_is_of_the_numbers_that_need_it(tmp_path):
    out, _ = quantize(tmp_path, to="compressed-tensors")
    kept = json.loads(header_of(out / "model.safetensors")["__metadata__"].get(PROVENANCE, "{}"))
    made = tensors_of(out)
    for name in LINEARS:
        stored = f32(made[f"{name}.weight_global_scale"]).reshape(())
        dense = tensors_of(tmp_path / "src")[f"{name}.weight"]
        amax = np.abs(np.frombuffer(dense.data, BF16).astype(np.float32)).max()
        scale2 = amax / np.float32(2688)
        needs = np.float32(1) / stored != scale2
        assert (f"{name}.weight_global_scale" in kept) == needs
        if needs:
            assert struct.unpack(">f", bytes.fromhex(kept[f"{name}.weight_global_scale"]))[0] == scale2


def test_an_all_zero_weight(tmp_path):
    """ModelOpt stores NaN scales here; halfbyte stores zeros that decode."""
    out, _ = quantize(tmp_path, {"a.weight": np.zeros((4, 32), BF16)})
    with halfbyte.open(out) as checkpoint:
        weight = dict(checkpoint.weights())["a"]
    assert np.all(weight.dequantize() == 0)
    assert np.isfinite(weight.scale2).all()
    assert {f.code for f in halfbyte.verify(out).findings} <= {"HB116", "HB201"}
    assert halfbyte.verify(out).ok


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0), (1, 16)])
def test_small_and_empty_weights(tmp_path, shape):
    out, report = quantize(tmp_path, {"a.weight": np.ones(shape, BF16), "b.weight": np.ones((4, 16), BF16)})
    assert halfbyte.verify(out).ok
    assert {q["name"] for q in report.facts["quantized"]} | {s["name"][:-7] for s in report.facts["skipped"]} == {
        "a",
        "b",
    }


# --- what is quantized


def test_the_default_choice(tmp_path):
    tensors = others() | {f"{n}.weight": floats(*s) for n, s in LINEARS.items()}
    tensors |= {
        "model.layers.0.mlp.gate.weight": floats(4, HIDDEN),
        "model.layers.0.mlp.shared_expert_gate.weight": floats(1, HIDDEN),
        "model.odd.weight": floats(8, 40),
        "model.conv.weight": np.ones((4, 16, 3), BF16),
        "model.double.weight": np.ones((4, 16), np.float64),
        "model.ints.weight": np.ones((4, 16), np.int32),
        "model.loose": np.ones((16, 16), np.float32),
        f"{Q}.bias": np.ones(HIDDEN, BF16),
        "transformer.wte.weight": floats(16, 32),
        "embed_out.weight": floats(16, 32, 7),
    }
    out, report = quantize(tmp_path, tensors)
    facts = report.facts
    assert {q["name"] for q in facts["quantized"]} == set(LINEARS)
    assert {tuple(q["shape"]) for q in facts["quantized"]} == set(LINEARS.values())
    reasons = {s["name"]: s["reason"] for s in facts["skipped"]}
    assert reasons == {
        "lm_head.weight": "output head",
        "model.embed_tokens.weight": "embedding",
        "transformer.wte.weight": "embedding",
        "embed_out.weight": "output head",
        "model.layers.0.mlp.gate.weight": "router",
        "model.layers.0.mlp.shared_expert_gate.weight": "router",
        "model.odd.weight": "K = 40 is not a multiple of 16",
        "model.conv.weight": "not a matrix",
        "model.double.weight": "dtype F64",
        "model.ints.weight": "dtype I32",
        "model.loose": "not a weight",
    } | dict.fromkeys((n for n in others() if "norm" in n), "not a matrix")
    # every source tensor is written, quantized or as it was
    source, made = tensors_of(tmp_path / "src"), tensors_of(out)
    for name, tensor in source.items():
        if name[:-7] in LINEARS and name.endswith(".weight"):
            assert (made[name].dtype, made[f"{name}_scale"].dtype) == ("U8", "F8_E4M3")
        else:
            assert made[name] == tensor, name


CHOICES = {
    "targets": ({"targets": ["*.mlp.*"]}, {n for n in LINEARS if "mlp" in n}),
    "a class": ({"targets": ["Embedding"]}, {"model.embed_tokens"}),
    "every linear layer": ({"targets": ["Linear"]}, {*LINEARS, "lm_head"}),
    "an expression": ({"targets": [r"re:.*\.(q|o)_proj$"]}, {n for n in LINEARS if n.endswith(("q_proj", "o_proj"))}),
    "a name": ({"targets": ["lm_head"]}, {"lm_head"}),
    "a fused name": ({"targets": ["model.layers.0.self_attn.qkv_proj"]}, {Q, K, V}),
    "ignored": ({"ignore": ["*.self_attn.*"]}, {n for n in LINEARS if "mlp" in n}),
    "targets and ignored": ({"targets": ["Linear"], "ignore": ["lm_head", "*down*"]}, set(LINEARS) - {DOWN}),
    "one of a fused group ignored": ({"ignore": ["*.up_proj"]}, set(LINEARS) - {UP}),
    "one of a fused group by its ending": ({"ignore": ["*up_proj"]}, set(LINEARS) - {UP}),
}


@pytest.mark.parametrize("case", CHOICES)
@DIALECTS
def test_choices(tmp_path, case, to):
    options, expected = CHOICES[case]
    out, report = quantize(tmp_path, to=to, **options)
    assert {q["name"] for q in report.facts["quantized"]} == expected
    assert {s["name"][:-7] for s in report.facts["skipped"]} == {*LINEARS, *(n[:-7] for n in others())} - expected
    assert {f.code for f in halfbyte.verify(out).findings} <= {"HB110", "HB126"}


def test_ignored_names_its_pattern(tmp_path):
    _, report = quantize(tmp_path, ignore=["*.self_attn.*"])
    assert {"name": f"{Q}.weight", "reason": "ignored by *.self_attn.*"} in report.facts["skipped"]


@pytest.mark.parametrize("options", [{"targets": ["nothing"]}, {"ignore": ["*"]}, {"targets": ["model.norm"]}])
def test_nothing_to_quantize(tmp_path, options):
    with pytest.raises(UsageError, match="no weight to quantize"):
        quantize(tmp_path, **options)
    assert leftovers(tmp_path) == ["src"]


@pytest.mark.parametrize("name", GOLDENS)
def test_what_is_quantized_is_refused(tmp_path, name):
    check_failure(
        call("quantize", GOLDENS[name], tmp_path / "out"), 2, GOLDENS[name], "quantized already", "dequantize"
    )
    assert leftovers(tmp_path) == []


# --- shared scales


def test_shared_scale2(tmp_path):
    out, report = quantize(tmp_path, share_scale2=True)
    assert report.findings == ()
    assert halfbyte.verify(out).findings == ()
    with halfbyte.open(out) as checkpoint:
        weights = dict(checkpoint.weights())
        dense = {n: checkpoint_array(tmp_path, n) for n in LINEARS}
    for parts in ((Q, K, V), (GATE, UP)):
        amax = max(np.abs(dense[n]).max() for n in parts)
        assert {float(weights[n].scale2.reshape(())) for n in parts} == {float(amax / np.float32(2688))}
        for name in parts:
            expected = halfbyte.quantize(dense[name], scale2=amax / np.float32(2688))
            assert weights[name].same(expected)
    assert weights[DOWN].same(halfbyte.quantize(dense[DOWN]))


def checkpoint_array(tmp_path, name):
    with halfbyte.open(tmp_path / "src") as checkpoint:
        return checkpoint.read(f"{name}.weight").astype(np.float32)


def test_shared_scale2_across_shards(tmp_path):
    src = make_float(tmp_path / "src", shards=4)
    halfbyte.quantize_checkpoint(src, tmp_path / "out", share_scale2=True, max_shard_size="1KB")
    assert halfbyte.verify(tmp_path / "out").findings == ()
    halfbyte.quantize_checkpoint(src, tmp_path / "one", share_scale2=True)
    assert tensors_of(tmp_path / "out") == tensors_of(tmp_path / "one")


def test_without_sharing_fused_parts_are_named(tmp_path):
    _, report = quantize(tmp_path)
    assert {f.code for f in report.findings} == {"HB110"}
    (finding,) = report.findings
    assert "--share-scale2" in finding.hint
    named = [f for f in halfbyte.verify(tmp_path / "out").findings if f.code == "HB110"]
    assert finding.got.startswith(f"{len(named)} of 2 ")
    assert call("quantize", tmp_path / "src", tmp_path / "again").rc == 0


def test_sharing_with_an_ignored_part(tmp_path):
    out, _ = quantize(tmp_path, share_scale2=True, ignore=["*.v_proj"])
    assert {f.code for f in halfbyte.verify(out).findings} == {"HB126"}


# --- files


@DIALECTS
def test_what_is_written_is_sound(tmp_path, to):
    out, report = quantize(tmp_path, to=to, share_scale2=True)
    assert halfbyte.verify(out).findings == ()
    assert by_library(out / "model.safetensors")[0]["format"] == "pt"
    config = read_json(out / "config.json")
    section = config.pop("quantization_config")
    assert config == CONFIG
    assert section["quant_method"] == to
    assert (out / "hf_quant_config.json").exists() == (to == "modelopt")
    assert section["ignore"] == (["lm_head", "model.embed_tokens"] if to == "modelopt" else ["lm_head"])
    facts = report.facts
    assert facts["bytes_out"] == sum(len(t.data) for t in tensors_of(out).values())
    assert facts["bytes_in"] == sum(len(t.data) for t in tensors_of(tmp_path / "src").values())
    assert facts["bytes_on_disk"] == sum(len(b) for b in listing(out).values())


def test_tied_embeddings(tmp_path):
    tensors = others(lm_head=False) | {f"{n}.weight": floats(*s) for n, s in LINEARS.items()}
    src = make_float(tmp_path / "src", tensors)
    write_json(src / "config.json", CONFIG | {"tie_word_embeddings": True})
    for to in ("modelopt", "compressed-tensors"):
        halfbyte.quantize_checkpoint(src, tmp_path / to, to=to, share_scale2=True)
        assert halfbyte.verify(tmp_path / to).findings == ()
        assert "lm_head" in read_json(tmp_path / to / "config.json")["quantization_config"]["ignore"]


def test_a_config_of_before_is_replaced(tmp_path):
    src = make_float(tmp_path / "src")
    config = CONFIG | {
        "quantization_config": {"quant_method": "gptq"},
        "text_config": {"quantization_config": {"a": 1}},
    }
    write_json(src / "config.json", config)
    write_json(src / "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})
    halfbyte.quantize_checkpoint(src, tmp_path / "out", share_scale2=True)
    assert halfbyte.verify(tmp_path / "out").findings == ()
    assert read_json(tmp_path / "out" / "config.json")["text_config"] == {}


def test_other_files_come_along(tmp_path):
    src = make_float(tmp_path / "src")
    (src / "tokenizer.json").write_bytes(b"\xff\0 not text")
    (src / "original").mkdir()
    (src / "original" / "params.json").write_text("{}")
    report = halfbyte.quantize_checkpoint(src, tmp_path / "out")
    made = listing(tmp_path / "out")
    assert made["tokenizer.json"] == b"\xff\0 not text"
    assert made["original/params.json"] == b"{}"
    actions = {f["file"]: f["action"] for f in report.facts["files"]}
    assert actions == {
        "tokenizer.json": "copied",
        "original/params.json": "copied",
        "config.json": "converted",
        "hf_quant_config.json": "converted",
    }


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
def test_shards(tmp_path, to):
    src = make_float(tmp_path / "src", layers=3, shards=3)
    halfbyte.quantize_checkpoint(src, tmp_path / "one", to=to, share_scale2=True)
    halfbyte.quantize_checkpoint(src, tmp_path / "many", to=to, share_scale2=True, max_shard_size="4KB")
    assert tensors_of(tmp_path / "many") == tensors_of(tmp_path / "one")
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 4
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = read_json(tmp_path / "many" / INDEX)
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in tensors_of(tmp_path / "many").values())
    for file in files:
        tensors = tensors_of(tmp_path / "many" / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(tensors)
        assert len(tensors) == 1 or sum(len(t.data) for t in tensors.values()) <= 4000
    assert halfbyte.verify(tmp_path / "many").findings == ()


def test_a_single_file(tmp_path):
    save(tmp_path / "x.safetensors", {"a.weight": floats(16, 32)})
    halfbyte.quantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "out")
    assert halfbyte.verify(tmp_path / "out").findings == ()
    assert sorted(listing(tmp_path / "out")) == ["config.json", "hf_quant_config.json", "model.safetensors"]


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_the_number_of_threads_changes_no_byte(tmp_path, workers):
    src = make_float(tmp_path / "src", layers=2)
    halfbyte.quantize_checkpoint(src, tmp_path / "one", workers=1, share_scale2=True, to="compressed-tensors")
    halfbyte.quantize_checkpoint(src, tmp_path / "out", workers=workers, share_scale2=True, to="compressed-tensors")
    assert listing(tmp_path / "out") == listing(tmp_path / "one")


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    """One tensor for each thread, whatever the model's size."""
    import tracemalloc

    peaks = []
    for layers in (1, 12):
        tensors = {f"m{i}.weight": floats(256, 1024, i % 3) for i in range(layers)}
        src = make_float(tmp_path / f"src{layers}", tensors)
        tracemalloc.start()
        halfbyte.quantize_checkpoint(src, tmp_path / f"out{layers}", workers=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.2 + 1e6


# --- refusals: nothing is written


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("share", [False, True])
def test_values_that_are_not_finite(tmp_path, value, dtype, share):
    weight = np.ones((32, 48), dtype)
    weight[17, 33] = value
    tensors = {f"{Q}.weight": np.ones((16, 48), dtype), f"{K}.weight": weight}
    src = make_float(tmp_path / "src", tensors)
    with pytest.raises(QuantizeError) as caught:
        halfbyte.quantize_checkpoint(src, tmp_path / "out", share_scale2=share)
    assert (caught.value.tensor, caught.value.index) == (f"{K}.weight", [17, 33])
    assert caught.value.file == str(src / "model.safetensors")
    assert leftovers(tmp_path) == ["src"]
    args = ["quantize", src, tmp_path / "out", *(["--share-scale2"] if share else [])]
    check_failure(call(*args), 2, f"{K}.weight", "[17, 33]", "--ignore")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_in_what_is_not_quantized_are_carried(tmp_path, value):
    tensors = others() | {f"{Q}.weight": floats(16, 32), "model.norm.weight": np.full(HIDDEN, value, BF16)}
    out, _ = quantize(tmp_path, tensors)
    assert tensors_of(out)["model.norm.weight"] == tensors_of(tmp_path / "src")["model.norm.weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "magic"}, "unknown recipe"),
        ({"like": "vllm"}, "unknown peer"),
        ({"to": "gguf"}, "unknown dialect"),
        ({"max_shard_size": "big"}, "not a size"),
        ({"workers": 0}, "workers must be positive"),
        ({"targets": ["re:("]}, "not a regular expression"),
        ({"ignore": ["re:("]}, "not a regular expression"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path, options, message):
    with pytest.raises(HalfbyteError, match=message):
        quantize(tmp_path, **options)
    assert leftovers(tmp_path) == ["src"]
    flags = [f"--{key.replace('_', '-')}={v[0] if isinstance(v, list) else v}" for key, v in options.items()]
    check_failure(call("quantize", tmp_path / "src", tmp_path / "out", *flags), 2, message)
    assert leftovers(tmp_path) == ["src"]


def test_the_target_exists(tmp_path):
    out, _ = quantize(tmp_path)
    before = listing(out)
    check_failure(call("quantize", tmp_path / "src", out), 2, out, "the target exists", "--force")
    assert listing(out) == before
    assert call("quantize", tmp_path / "src", out, "--force", "--to", "compressed-tensors").rc == 0
    assert "hf_quant_config.json" not in listing(out)
    assert leftovers(tmp_path) == ["out", "src"]


def test_dry_run(tmp_path):
    src = make_float(tmp_path / "src")
    ran = call("quantize", src, tmp_path / "out", "--dry-run")
    assert (ran.rc, ran.stderr) == (0, "")
    assert "would write" in ran.stdout
    assert "peak memory" in ran.stdout
    assert leftovers(tmp_path) == ["src"]
    plan = halfbyte.quantize_checkpoint(src, tmp_path / "out", dry_run=True).facts
    done = halfbyte.quantize_checkpoint(src, tmp_path / "out").facts
    assert (plan["bytes_out"], plan["quantized"], plan["skipped"]) == (
        done["bytes_out"],
        done["quantized"],
        done["skipped"],
    )
    assert plan["shards"] == 1


def test_progress_ends_at_the_total(tmp_path):
    seen = []
    src = make_float(tmp_path / "src", layers=2)
    for share in (False, True):
        halfbyte.quantize_checkpoint(
            src,
            tmp_path / f"out{share}",
            share_scale2=share,
            max_shard_size="3KB",
            progress=lambda d, t: seen.append((d, t)),
        )
        done, total = seen[-1]
        assert done == total
        assert all(d <= t for d, t in seen)


# --- the line


def test_the_document(tmp_path):
    src = make_float(tmp_path / "src")
    ran = call("quantize", src, tmp_path / "out", "--json")
    assert ran.rc == 0
    document = ran.document
    assert (document["command"], document["ok"], document["recipe"]) == ("quantize", True, "rtn")
    assert len(document["quantized"]) == 7
    assert {s["reason"] for s in document["skipped"]} == {"embedding", "output head", "not a matrix"}


def test_each_matrix_left_dense_is_printed_with_its_reason(tmp_path):
    src = make_float(tmp_path / "src")
    ran = call("quantize", src, tmp_path / "out", "--share-scale2")
    assert "lm_head.weight (output head)" in ran.stdout
    assert "model.embed_tokens.weight (embedding)" in ran.stdout
    assert "7 weights" in ran.stdout
    assert ran.stderr == ""


def test_quantized_again_from_its_values(tmp_path):
    """quantize(dequantize(w)) keeps the values: the codes of rtn are a fixed point where amax is kept."""
    out, _ = quantize(tmp_path, dtype_free(), share_scale2=False)
    halfbyte.dequantize_checkpoint(out, tmp_path / "dense", dtype="float32")
    halfbyte.quantize_checkpoint(tmp_path / "dense", tmp_path / "again")
    with halfbyte.open(out) as one, halfbyte.open(tmp_path / "again") as two:
        for (name, a), (_, b) in zip(one.weights(), two.weights(), strict=True):
            assert np.array_equal(a.dequantize(), b.dequantize()), name


def dtype_free():
    """Weights of small integers times a power of two: exact in NVFP4 when each block's amax is 6."""
    rng = np.random.default_rng(5)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    made = {}
    for i in range(3):
        weight = rng.choice(values, (8, 64)) * rng.choice(np.float32([-1, 1]), (8, 64))
        weight.reshape(8, 4, 16)[..., 0] = 6
        made[f"m{i}.weight"] = (weight * np.float32(448 * 2.0**-10)).astype(np.float32)
    return made


def test_exact_weights_stay_exact(tmp_path):
    """Blocks of E2M1 values times the largest scale: no error at all."""
    tensors = dtype_free()
    out, _ = quantize(tmp_path, tensors)
    with halfbyte.open(out) as checkpoint:
        for name, weight in checkpoint.weights():
            assert np.array_equal(weight.dequantize(), tensors[f"{name}.weight"])


def test_two_neighbouring_blocks_get_their_own_scales(tmp_path):
    """A scale for 16 values, not for 32: amax 6 and 0.06 side by side."""
    weight = np.concatenate([np.full((1, 16), 6.0), np.full((1, 16), 0.06)], 1).astype(np.float32)
    out, _ = quantize(tmp_path, {"a.weight": weight})
    made = tensors_of(out)
    scales = np.frombuffer(made["a.weight_scale"].data, E4M3).astype(np.float32)
    assert scales[0] == 448
    assert scales[1] == pytest.approx(4.48, rel=0.07)
    assert made["a.weight"] == Raw("U8", (1, 16), b"\x77" * 16)


def test_values_above_2688(tmp_path):
    """A single level would clip them; the second scale does not."""
    weight = np.full((2, 32), 4000, np.float32)
    out, _ = quantize(tmp_path, {"a.weight": weight})
    with halfbyte.open(out) as checkpoint:
        assert np.allclose(dict(checkpoint.weights())["a"].dequantize(), 4000, rtol=1e-6)


# --- in pieces


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("whole", "piece"), [(0, 1), (0, 1 << 20), (2000, 500), (1 << 20, 1)])
@pytest.mark.parametrize("options", [
    {}, {"share_scale2": True, "max_shard_size": "1KB"}, {"like": "compressed-tensors", "max_shard_size": "700"},
], ids=["plain", "shared", "like"])  # fmt: skip
def test_the_pieces_change_no_byte(tmp_path, monkeypatch, options, whole, piece, workers):
    src = make_float(tmp_path / "src", layers=2)
    halfbyte.quantize_checkpoint(src, tmp_path / "one", workers=1, **options)
    monkeypatch.setattr("halfbyte.tools.quantize._WHOLE", whole)
    monkeypatch.setattr("halfbyte.tools.quantize._PIECE", piece)
    halfbyte.quantize_checkpoint(src, tmp_path / "out", workers=workers, **options)
    assert listing(tmp_path / "out") == listing(tmp_path / "one")


def test_scale2_is_of_the_whole_tensor_and_not_of_a_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.tools.quantize._WHOLE", 0)
    monkeypatch.setattr("halfbyte.tools.quantize._PIECE", 1)
    weight = np.ones((3, 16), np.float32)
    weight[2, 5] = 2688
    out, _ = quantize(tmp_path, {"a.weight": weight})
    made = tensors_of(out)
    assert f32(made["a.weight_scale_2"]) == 1
    assert np.frombuffer(made["a.weight_scale"].data, E4M3).astype(np.float32).tolist() == [0.171875, 0.171875, 448]


@pytest.mark.parametrize("piece", [1, 128, 1 << 20])
def test_the_position_of_a_value_that_is_not_finite(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("halfbyte.tools.quantize._WHOLE", 0)
    monkeypatch.setattr("halfbyte.tools.quantize._PIECE", piece)
    weight = np.ones((7, 16), np.float32)
    weight[5, 3] = np.nan
    with pytest.raises(QuantizeError) as caught:
        quantize(tmp_path, {"a.weight": weight})
    assert (caught.value.tensor, caught.value.index) == ("a.weight", [5, 3])
    assert leftovers(tmp_path) == ["src"]


def test_a_module_and_a_tensor_of_one_name(tmp_path):
    """``m`` is a tensor, ``m.weight`` the weight of a module m: the one is copied, the other quantized."""
    tensors = {"m": np.arange(4, dtype=np.float32), "m.weight": np.ones((2, 16), np.float32)}
    out, report = quantize(tmp_path, tensors)
    assert tensors_of(out)["m"] == tensors_of(tmp_path / "src")["m"]
    assert [q["name"] for q in report.facts["quantized"]] == ["m"]
