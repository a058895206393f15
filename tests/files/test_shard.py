"""Checkpoints for the ranks of tensor and expert parallelism: every tensor is the slice that NumPy cuts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    GATE_UP,
    GOLDENS,
    INDEX,
    Raw,
    call,
    check_failure,
    codes,
    environment,
    expert_weights,
    f4,
    floats,
    fp8,
    header_of,
    leftovers,
    listing,
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
from halfbyte.errors import FormatError, TargetError, UsageError
from halfbyte.experts import encode_stacks
from halfbyte.modules import Stack
from halfbyte.tools import shard as tool

CT = "compressed-tensors"
L = "model.layers.0"
ATTENTION, MLP, P = f"{L}.self_attn", f"{L}.mlp", f"{L}.mlp.experts"
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


def make(path, tensors, config=None, metadata=None, quant="modelopt"):
    path.mkdir(parents=True)
    save(path / "model.safetensors", tensors, {"format": "pt"} | (metadata or {}))
    write_json(path / "config.json", CONFIG | (config or {}) | ({"quantization_config": {"quant_method": quant}}))
    return path


def raw(tensors):
    """Name -> Raw of arrays."""
    found = {}
    types = {"uint8": "U8", "float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    for name, t in tensors.items():
        a = t if isinstance(t, Raw) else np.asarray(t)
        found[name] = a if isinstance(a, Raw) else Raw(types[a.dtype.name], a.shape, a.tobytes())
    return found


def share(a, axis, rank, degree):
    """A rank's part of an array."""
    size = a.shape[axis] // degree
    return np.ascontiguousarray(np.take(a, range(rank * size, (rank + 1) * size), axis))


def roles_of(roles, axis, rank, degree):
    """The roles of a weight cut along N (0) or K (1)."""
    return {
        role: share(a, axis, rank, degree)
        if role in ("codes", "scales")
        else share(a, 0, rank, degree)
        if role == "pre_scale" and axis == 1
        else a
        for role, a in roles.items()
    }


def rank_of(path, rank, degree):
    return path / f"rank-{rank:05d}-of-{degree:05d}"


def check_ranks(path, degree, expected):
    """Each rank holds the tensors that ``expected(rank)`` gives, and no more, and nothing is found in it."""
    assert leftovers(path) == [f"rank-{r:05d}-of-{degree:05d}" for r in range(degree)]
    for rank in range(degree):
        assert tensors_of(rank_of(path, rank, degree)) == raw(expected(rank))


def stated(path):
    """What the metadata say of a rank."""
    return json.loads(header_of(path / "model.safetensors")["__metadata__"]["halfbyte.shard"])


def told_of(path):
    """The codes of what verify finds."""
    return {finding.code for finding in halfbyte.verify(path).findings}


LAYERS = {
    f"{ATTENTION}.q_proj": ((64, 64), 0),
    f"{ATTENTION}.k_proj": ((32, 64), 0),
    f"{ATTENTION}.v_proj": ((32, 64), 0),
    f"{ATTENTION}.o_proj": ((64, 64), 1),
    f"{MLP}.gate_proj": ((128, 64), 0),
    f"{MLP}.up_proj": ((128, 64), 0),
    f"{MLP}.down_proj": ((64, 128), 1),
}
"""Name -> shape, and the axis that is cut."""
WHOLE = {
    "model.embed_tokens.weight": floats(128, 64, 1),
    "lm_head.weight": floats(128, 64, 2),
    "model.norm.weight": np.ones(64, BF16),
    f"{ATTENTION}.q_norm.weight": np.ones(8, BF16),
    f"{MLP}.gate.weight": floats(4, 64, 3),
}


def small(dialect="modelopt", rank=0, degree=1, **more):
    """The tensors of a small model, or a rank's part of them."""
    tensors = dict(WHOLE)
    for i, (name, ((n, k), axis)) in enumerate(LAYERS.items()):
        roles = nvfp4(n, k, i, scale2=0.0003 * (i + 1), input_scale=0.017 * (i + 1)) | {
            role: of(n, k) for role, of in more.items()
        }
        tensors |= named(dialect, name, roles_of(roles, axis, rank, degree))
        bias = np.arange(n).astype(BF16)
        tensors[f"{name}.bias"] = share(bias, 0, rank, degree) if axis == 0 else bias
    return tensors


# --- tensor parallel


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("dialect", ["modelopt", CT])
def test_a_dense_model(dialect, degree, tmp_path):
    src = make(tmp_path / "src", small(dialect), quant=dialect)
    report = halfbyte.shard(src, tmp_path / "out", tp=degree)
    check_ranks(tmp_path / "out", degree, lambda rank: small(dialect, rank, degree))
    assert report.ok
    assert report.facts["proven"] == degree * len(small(dialect))
    assert (report.facts["mode"], report.facts["degree"]) == ("tensor", degree)
    assert [entry["name"] for entry in report.facts["modules"]] == sorted(LAYERS)
    assert report.facts["whole"] == {}
    for rank in range(degree):
        here = rank_of(tmp_path / "out", rank, degree)
        assert read_json(here / "config.json") == read_json(src / "config.json")
        told = stated(here)
        assert (told["mode"], told["rank"], told["degree"]) == ("tensor", rank, degree)
        assert told["row"] == [f"{MLP}.down_proj", f"{ATTENTION}.o_proj"]
        assert told["column"] == sorted(name for name, (_, axis) in LAYERS.items() if axis == 0)
        assert halfbyte.verify(here).ok
        with halfbyte.open(here) as part, halfbyte.open(src) as whole:
            for name, (_, axis) in LAYERS.items():
                cut = whole[name].shard_columns if axis else whole[name].shard_rows
                assert part[name].same(cut(rank, degree))


def test_the_ranks_products_add_up(tmp_path):
    """Column-parallel outputs joined, row-parallel ones added: what one rank would compute."""
    make(tmp_path / "src", small(pre_scale=lambda n, k: np.linspace(0.5, 2, k).astype(np.float32)))
    halfbyte.shard(tmp_path / "src", tmp_path / "out", tp=2)
    with halfbyte.open(tmp_path / "src") as whole:
        ranks = [halfbyte.open(rank_of(tmp_path / "out", r, 2)) for r in range(2)]
        up, down = f"{MLP}.up_proj", f"{MLP}.down_proj"
        joined = np.concatenate([rank[up].dequantize() for rank in ranks])
        assert np.array_equal(joined, whole[up].dequantize())
        joined = np.concatenate([rank[down].dequantize() for rank in ranks], 1)
        assert np.array_equal(joined, whole[down].dequantize())
        assert np.array_equal(np.concatenate([rank[down].pre_scale for rank in ranks]), whole[down].pre_scale)
        assert np.array_equal(ranks[1][up].pre_scale, whole[up].pre_scale)


def test_provenance_goes_along(tmp_path):
    """A scale2 that compressed-tensors' reciprocal does not lead back to comes back from every rank."""
    src = make(tmp_path / "src", small())
    halfbyte.convert(src, tmp_path / "ct", to=CT)
    halfbyte.shard(tmp_path / "ct", tmp_path / "out", tp=2)
    for rank in range(2):
        halfbyte.convert(rank_of(tmp_path / "out", rank, 2), tmp_path / f"back{rank}", to="modelopt", prove=True)
        assert tensors_of(tmp_path / f"back{rank}") == raw(small(rank=rank, degree=2))
        metadata = header_of(rank_of(tmp_path / "out", rank, 2) / "model.safetensors")["__metadata__"]
        assert "halfbyte.scale2" in metadata


@pytest.mark.parametrize("run", [1, 1 << 30], ids=["copied", "gathered"])
def test_long_and_short_runs(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "_RUN", run)
    monkeypatch.setattr(tool, "CHUNK", 1000)
    halfbyte.shard(make(tmp_path / "src", small()), tmp_path / "out", tp=2, workers=1)
    check_ranks(tmp_path / "out", 2, lambda rank: small(rank=rank, degree=2))


def test_codes_of_the_dtype_f4(tmp_path):
    """Its header counts codes, not bytes."""

    def tensors(rank=0, degree=1):
        made = small(rank=rank, degree=degree)
        return {n: f4(t) if n.endswith("proj.weight") else t for n, t in made.items()}

    halfbyte.shard(make(tmp_path / "src", tensors()), tmp_path / "out", tp=2)
    check_ranks(tmp_path / "out", 2, lambda rank: tensors(rank, 2))


def low_rank(rank=0, degree=1):
    """SVDQuant's factors: the one along the axis that is cut is cut with it."""
    tensors = {}
    for name, (n, k), axis in (("up_proj", (64, 32), 0), ("down_proj", (32, 64), 1)):
        tensors |= named("modelopt", f"m.{name}", roles_of(nvfp4(n, k), axis, rank, degree))
        a, b = floats(4, k, 1), floats(n, 4, 2)
        tensors[f"m.{name}.svdquant_lora_a"] = share(a, 1, rank, degree) if axis == 1 else a
        tensors[f"m.{name}.svdquant_lora_b"] = share(b, 0, rank, degree) if axis == 0 else b
    return tensors


def test_low_rank_factors(tmp_path):
    halfbyte.shard(make(tmp_path / "src", low_rank()), tmp_path / "out", tp=2)
    check_ranks(tmp_path / "out", 2, lambda rank: low_rank(rank, 2))


def test_weights_of_other_formats(tmp_path):
    """An INT8 layer is whole by --keep, and is not cut unasked or by halves."""
    tensors = named("modelopt", "m.up_proj", nvfp4(32, 32)) | {
        "m.down_proj.weight": np.zeros((32, 32), np.int8),
        "m.down_proj.weight_scale": np.ones(32, np.float32),
    }
    src = make(tmp_path / "src", tensors)
    ran = call("shard", src, tmp_path / "out", "--tp", 2)
    check_failure(ran, 2, "m.down_proj", "a weight of this form is not cut", "--keep")
    assert call("shard", src, tmp_path / "out", "--tp", 2, "--keep", "m.down_proj").rc == 0
    found = tensors_of(rank_of(tmp_path / "out", 1, 2))
    assert found == tensors_of(src)  # up_proj has no counterpart left


def test_memory_is_what_the_dry_run_says(tmp_path):
    tensors = {}
    for i in range(3):
        tensors |= named("modelopt", f"m.{i}.up_proj", nvfp4(4096, 2048, i))
        tensors |= named("modelopt", f"m.{i}.down_proj", nvfp4(2048, 4096, i))
    src = make(tmp_path / "src", tensors)
    told = halfbyte.shard(src, tmp_path / "x", tp=2, dry_run=True, workers=1).facts["peak_bytes"]
    tracemalloc.start()
    try:
        halfbyte.shard(src, tmp_path / "x", tp=2, workers=1)
        there = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert there < told < 4 * there


def fp8_layers(rank=0, degree=1):
    """gate_up per tensor, per row and in blocks; down the same."""
    tensors = {}
    for i, (form, block) in enumerate((("tensor", 0), ("row", 1), ("block", 128))):
        here = f"model.layers.{i}.mlp"
        for name, (n, k), axis in (("up_proj", (512, 256), 0), ("down_proj", (256, 512), 1)):
            sizes = {"tensor": (), "row": (n,), "block": (n // 128, k // 128)}[form]
            scale = (np.arange(np.prod(sizes, dtype=int)).reshape(sizes) + 1).astype(np.float32) * 2.0**-9
            layer = fp8(n, k, i, scale=scale)
            layer["weight"] = share(layer["weight"].view(np.uint8), axis, rank, degree).view(E4M3)
            if block == 128 or (block == 1 and axis == 0):
                layer["weight_scale"] = share(layer["weight_scale"], axis, rank, degree)
            tensors |= {f"{here}.{name}.{suffix}": value for suffix, value in layer.items()}
    return tensors


@pytest.mark.parametrize("degree", [2])
def test_fp8(degree, tmp_path):
    src = make(tmp_path / "src", fp8_layers())
    halfbyte.shard(src, tmp_path / "out", tp=degree)
    check_ranks(tmp_path / "out", degree, lambda rank: fp8_layers(rank, degree))


def test_fp8_blocks_that_do_not_divide(tmp_path):
    src = make(tmp_path / "src", fp8_layers())
    ran = call("shard", src, tmp_path / "out", "--tp", 8)
    check_failure(ran, 2, "model.layers.2.mlp", "128", "a degree among 1, 2, 4")
    assert leftovers(tmp_path) == ["src"]


def dense_and_mxfp4(rank=0, degree=1):
    tensors = {
        "h.0.mlp.fc1.weight": share(floats(96, 40), 0, rank, degree),
        "h.0.mlp.fc1.bias": share(np.arange(96, dtype=np.float32), 0, rank, degree),
        "h.0.mlp.fc2.weight": share(floats(40, 96), 1, rank, degree),
        "h.0.mlp.fc2.bias": np.arange(40, dtype=np.float32),
    }
    for name, (n, k), axis in (("gate_proj", (64, 64), 0), ("down_proj", (64, 128), 1)):
        roles = mxfp4(n, k, axis)
        tensors |= {
            f"h.1.mlp.{name}.{suffix}": share(roles[role], axis, rank, degree)
            for role, suffix in (("codes", "weight"), ("scales", "weight_scale"))
        }
    return tensors


def test_dense_and_mxfp4_layers(tmp_path):
    halfbyte.shard(make(tmp_path / "src", dense_and_mxfp4()), tmp_path / "out", tp=4)
    check_ranks(tmp_path / "out", 4, lambda rank: dense_and_mxfp4(rank, 4))
    with pytest.raises(FormatError, match=r"K = 128 \(4 blocks of 32\) does not split over 8 ranks") as failed:
        halfbyte.shard(tmp_path / "src", tmp_path / "more", tp=8)
    assert failed.value.tensor == "h.1.mlp.down_proj"
    assert failed.value.expected == "a degree among 1, 2, 4"


# --- experts, tensor parallel

E, INTER, HIDDEN = 4, 64, 32
EACH = {"scale2": lambda e, i: 0.0001 * (3 * e + i + 1), "input_scale": lambda e, i: 0.25 * (e + 1)}
SHARED = {"scale2": lambda e, i: 0.0001 * (e + 1), "input_scale": lambda e, i: 0.25 * (e + 1)}
MOE = {"model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_experts": E}


def cut_experts(made, rank, degree):
    return {(e, p): roles_of(r, int(p in ("down_proj", "w2")), rank, degree) for (e, p), r in made.items()}


@pytest.mark.parametrize("halves", [False, True], ids=["one scale2", "a scale2 each"])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("order", GATE_UP)
def test_stacks(order, columns, halves, tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **(EACH if halves else SHARED))

    def stacks(rank=0, degree=1):
        return stacked_experts(P, cut_experts(made, rank, degree), columns=columns, order=order, halves=halves)

    metadata = encode_stacks({f"{P}.gate_up_proj": Stack(columns, order)})
    src = make(tmp_path / "src", stacks(), MOE, metadata)
    halfbyte.shard(src, tmp_path / "out", tp=2)
    check_ranks(tmp_path / "out", 2, lambda rank: stacks(rank, 2))
    for rank in range(2):
        here = rank_of(tmp_path / "out", rank, 2)
        assert told_of(here) == told_of(src)
        halfbyte.convert(here, tmp_path / f"split{rank}", to="modelopt", experts="split", prove=True)
        assert tensors_of(tmp_path / f"split{rank}") == raw(split_experts(P, cut_experts(made, rank, 2)))


@pytest.mark.parametrize("dialect", ["modelopt", CT])
@pytest.mark.parametrize("parts", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")], ids=str)
def test_single_experts(parts, dialect, tmp_path):
    made = expert_weights(E, INTER, HIDDEN, parts, **EACH)
    src = make(tmp_path / "src", split_experts(P, made, dialect), MOE, quant=dialect)
    halfbyte.shard(src, tmp_path / "out", tp=4)
    check_ranks(tmp_path / "out", 4, lambda rank: split_experts(P, cut_experts(made, rank, 4), dialect))


def test_a_stack_of_unknown_order(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **SHARED)
    src = make(tmp_path / "src", stacked_experts(P, made, order="interleaved"), {"model_type": None})
    ran = call("shard", src, tmp_path / "out", "--tp", 2)
    check_failure(ran, 2, f"{P}.gate_up_proj", "the order of gate and up is not known", "--gate-up")
    assert call("shard", src, tmp_path / "out", "--tp", 2, "--gate-up", "interleaved").rc == 0
    check_ranks(tmp_path / "out", 2, lambda rank: stacked_experts(P, cut_experts(made, rank, 2), order="interleaved"))
    with halfbyte.open(rank_of(tmp_path / "out", 1, 2)) as part:  # the metadata tell it now
        (stack,) = (m.stack for m in part.modules if m.name.endswith("gate_up_proj"))
        assert stack == Stack(False, "interleaved")


def test_dense_and_fp8_stacks(tmp_path):
    rng = np.random.default_rng(5)
    gate, up = (rng.normal(size=(E, INTER, HIDDEN)).astype(BF16) for _ in range(2))
    down = rng.integers(0, 0x7F, (E, HIDDEN, INTER), np.uint8)
    scale = np.arange(1, E + 1, dtype=np.float32)

    def tensors(rank=0, degree=1):
        halves = [share(a, 1, rank, degree) for a in (gate, up)]
        return {
            f"{P}.gate_up_proj": np.concatenate(halves, 1),
            f"{P}.gate_up_proj_bias": np.concatenate([share(a[..., 0], 1, rank, degree) for a in (gate, up)], 1),
            f"{P}.down_proj": share(down, 2, rank, degree).view(E4M3),
            f"{P}.down_proj_weight_scale": scale,
        }

    halfbyte.shard(make(tmp_path / "src", tensors(), MOE), tmp_path / "out", tp=2)
    check_ranks(tmp_path / "out", 2, lambda rank: tensors(rank, 2))


def gpt_oss(rank=0, degree=1):
    """MXFP4 stacks whose rows alternate, biases, and sinks."""
    up, down = ([mxfp4(*shape, e) for e in range(E)] for shape in ((2 * INTER, HIDDEN), (HIDDEN, INTER)))
    tensors = {}
    for name, weights, axis in (("gate_up_proj", up, 0), ("down_proj", down, 1)):
        for role, suffix in (("codes", "blocks"), ("scales", "scales")):
            stack = np.stack([share(w[role], axis, rank, degree) for w in weights])
            tensors[f"{P}.{name}_{suffix}"] = stack.reshape(*stack.shape[:2], -1, 16) if role == "codes" else stack
    biases = np.arange(E * 2 * INTER).reshape(E, 2 * INTER).astype(BF16)
    tensors[f"{P}.gate_up_proj_bias"] = share(biases, 1, rank, degree)
    tensors[f"{P}.down_proj_bias"] = biases[:, :HIDDEN]
    for name, (shape, axis) in {"q_proj": ((64, 32), 0), "o_proj": ((32, 64), 1)}.items():
        tensors[f"{ATTENTION}.{name}.weight"] = share(floats(*shape), axis, rank, degree)
    return tensors | {f"{ATTENTION}.sinks": share(np.arange(8).astype(BF16), 0, rank, degree)}


def test_gpt_oss(tmp_path):
    src = make(tmp_path / "src", gpt_oss(), {"model_type": "gpt_oss", "hidden_size": HIDDEN}, quant="mxfp4")
    halfbyte.shard(src, tmp_path / "out", tp=2)
    check_ranks(tmp_path / "out", 2, lambda rank: gpt_oss(rank, 2))


# --- fused layers, patterns, the vocabulary


def test_fused_layers_are_cut_part_by_part(tmp_path):
    """64 rows of q, 32 of k and of v; 128 of gate and of up, as one weight each."""
    parts = {
        f"{ATTENTION}.qkv_proj": [nvfp4(n, 64, n + i) for i, n in enumerate((64, 32, 32))],
        f"{MLP}.gate_up_proj": [nvfp4(128, 64, i) for i in range(2)],
    }

    def tensors(rank=0, degree=1):
        made = {}
        for name, some in parts.items():
            cut = [roles_of(r, 0, rank, degree) for r in some]
            fused = {role: np.concatenate([r[role] for r in cut]) for role in ("codes", "scales")}
            made |= named("modelopt", name, fused | {"scale2": 0.001})
        for name, k in ((f"{ATTENTION}.o_proj", 64), (f"{MLP}.down_proj", 128)):
            made |= named("modelopt", name, roles_of(nvfp4(64, k), 1, rank, degree))
        return made

    src = make(tmp_path / "src", tensors())
    halfbyte.shard(src, tmp_path / "out", tp=4)
    check_ranks(tmp_path / "out", 4, lambda rank: tensors(rank, 4))
    write_json(src / "config.json", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 8})
    with pytest.raises(FormatError, match="the config's heads do not tell where each begins"):
        halfbyte.shard(src, tmp_path / "more", tp=1)


def test_patterns_and_layers_without_a_counterpart(tmp_path):
    tensors = {
        "a.up_proj.weight": floats(32, 32, 1),
        "b.first.weight": floats(32, 32, 2),
        "b.last.weight": floats(32, 32, 3),
        "c.fc1.weight": floats(32, 32, 4),
        "c.fc2.weight": floats(32, 32, 5),
    }
    src = make(tmp_path / "src", tensors | named("modelopt", "d.q", nvfp4(16, 16)))
    report = halfbyte.shard(src, tmp_path / "out", tp=2, column=["b.first"], row=["*.last", "no"], keep=["c"])
    assert report.facts["whole"] == {
        "c.fc1": "asked for",
        "c.fc2": "asked for",
        "a.up_proj": "no row-parallel layer beside it",
    }
    assert codes(report.findings) == [("HB301", None, None)]
    found = tensors_of(rank_of(tmp_path / "out", 1, 2))
    expected = tensors | {
        "b.first.weight": share(tensors["b.first.weight"], 0, 1, 2),
        "b.last.weight": share(tensors["b.last.weight"], 1, 1, 2),
    }
    assert {n: t for n, t in found.items() if not n.startswith("d.")} == raw(expected)


def test_vocab(tmp_path):
    halfbyte.shard(make(tmp_path / "src", small()), tmp_path / "out", tp=4, vocab=True)
    cut = ("model.embed_tokens.weight", "lm_head.weight")
    check_ranks(tmp_path / "out", 4, lambda r: small(rank=r, degree=4) | {n: share(WHOLE[n], 0, r, 4) for n in cut})


# --- expert parallel


def test_single_experts_are_dealt(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    router = {f"{L}.mlp.gate.weight": floats(E, HIDDEN)}
    src = make(tmp_path / "src", split_experts(P, made) | router, MOE)
    report = halfbyte.shard(src, tmp_path / "out", ep=2)
    check_ranks(
        tmp_path / "out",
        2,
        lambda rank: split_experts(P, {k: r for k, r in made.items() if k[0] // 2 == rank}) | router,
    )
    assert {(m["name"], m["rank"]) for m in report.facts["modules"]} == {(f"{P}.{e}.{p}", e // 2) for e, p in made}
    for rank in range(2):
        here = rank_of(tmp_path / "out", rank, 2)
        told = stated(here)
        assert told == {"mode": "expert", "rank": rank, "degree": 2, "experts": {P: [2 * rank, 2 * rank + 2, E]}}
        assert told_of(here) == told_of(src)
    assert report.facts["proven"] == E * 3 * 4 + 2


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_stacks_are_dealt(columns, tmp_path):
    made = expert_weights(E, INTER, HIDDEN, **EACH)

    def stacks(rank=0, degree=1):
        each = E // degree
        some = {(e - rank * each, p): r for (e, p), r in made.items() if e // each == rank}
        return stacked_experts(P, some, columns=columns, halves=True)

    src = make(tmp_path / "src", stacks(), MOE)
    halfbyte.shard(src, tmp_path / "out", ep=4)
    check_ranks(tmp_path / "out", 4, lambda rank: stacks(rank, 4))
    for rank in range(4):
        assert told_of(rank_of(tmp_path / "out", rank, 4)) == told_of(src)


def test_a_scale2_for_all_experts_stays_whole(tmp_path):
    made = expert_weights(E, INTER, HIDDEN, scale2=lambda e, i: 0.5)
    tensors = stacked_experts(P, made)
    for stem in ("gate_up_proj", "down_proj"):
        tensors[f"{P}.{stem}_weight_scale_2"] = np.float32(0.5)
    halfbyte.shard(make(tmp_path / "src", tensors, MOE), tmp_path / "out", ep=2)
    found = tensors_of(rank_of(tmp_path / "out", 1, 2))
    assert found[f"{P}.down_proj_weight_scale_2"] == Raw("F32", (), np.float32(0.5).tobytes())
    assert found[f"{P}.down_proj"].shape == (2, HIDDEN, INTER // 2)


# --- refusals


def lacking(tensors):
    return {n: t for n, t in tensors.items() if not n.startswith(f"{P}.2.")}


REFUSED = {
    "columns": (small(), {"tp": 3}, "down_proj", r"K = 128 \(8 blocks of 16\) does not split over 3", "1, 2, 4, 8"),
    "heads": (
        small(),
        {"tp": 3, "keep": ["*.mlp.*", "*.k_proj", "*.v_proj"]},
        f"{ATTENTION}.",
        "8 heads do",
        "1, 2, 4, 8",
    ),
    "heads of keys": (small(), {"tp": 8}, "k_proj", "4 heads of keys and values do not split over 8", "1, 2, 4"),
    "multiple": (small(), {"tp": 2, "multiple": 64}, "o_proj", r"K = 64 \(4 blocks of 16\) does not split", "1"),
    "experts": (split_experts(P, expert_weights(4, 32, 32)), {"ep": 3}, P, "E = 4 does not split over 3", "1, 2, 4"),
    "a stack": (stacked_experts(P, expert_weights(4, 32, 32)), {"ep": 3}, P, "E = 4 does not split", "1, 2, 4"),
    "a missing expert": (lacking(split_experts(P, expert_weights(4, 32, 32))), {"ep": 3}, P, "experts are missing", ""),
    "K in blocks": (
        {
            **named("modelopt", "m.up_proj", nvfp4(48, 32)),
            **named("modelopt", "m.down_proj", nvfp4(32, 48)),
        },
        {"tp": 2},
        "m.down_proj",
        r"K = 48 \(3 blocks of 16\) does not split over 2 ranks in multiples of 16",
        "1, 3",
    ),
    "unknown companion": (
        {
            **named("modelopt", "m.up_proj", nvfp4(32, 32)),
            **named("modelopt", "m.down_proj", nvfp4(32, 32)),
            "m.up_proj.g_idx": np.zeros(32, np.int32),
        },
        {"tp": 2},
        "m.up_proj",
        "have no known place in a part",
        "",
    ),
    "a KV scale for each head": (
        small() | {f"{ATTENTION}.k_proj.k_scale": np.ones(4, np.float32)},
        {"tp": 2},
        "k_scale",
        "not cut",
        "",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case, tmp_path):
    tensors, options, name, message, degrees = REFUSED[case]
    src = make(tmp_path / "src", tensors, {"num_experts": None, "model_type": "qwen3_moe"})
    with pytest.raises(FormatError, match=message) as failed:
        halfbyte.shard(src, tmp_path / "out", **options)
    assert name in failed.value.tensor
    assert not degrees or failed.value.expected == f"a degree among {degrees}"
    assert leftovers(tmp_path) == ["src"]


WRONG = {
    "neither": ([], "--tp N or --ep N"),
    "both": (["--tp", "2", "--ep", "2"], "--tp N or --ep N"),
    "no ranks": (["--tp", "0"], "not a number of ranks"),
    "negative": (["--tp", "-2"], "not a number of ranks"),
    "multiple": (["--tp", "2", "--multiple", "24"], "multiples of 16"),
    "ep and vocab": (["--ep", "2", "--vocab"], "tensor parallelism"),
    "ep without experts": (["--ep", "2"], "there are no experts"),
    "gate_up": (["--tp", "2", "--gate-up", "sideways"], "sideways"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case, tmp_path):
    options, message = WRONG[case]
    src = make(tmp_path / "src", small())
    check_failure(call("shard", src, tmp_path / "out", *options), 2, message)
    assert leftovers(tmp_path) == ["src"]


def test_a_rank_is_not_cut_again(tmp_path):
    halfbyte.shard(make(tmp_path / "src", small()), tmp_path / "out", tp=2)
    with pytest.raises(UsageError, match="this is the part of one rank already"):
        halfbyte.shard(rank_of(tmp_path / "out", 0, 2), tmp_path / "again", tp=2)


# --- the proof, and how it is written


def wrong_rank(output):
    return lambda tensor, cut, rank, degree: output(tensor, cut, 1 - rank, degree)


def test_the_proof_finds_a_rank_that_has_anothers_part(tmp_path, monkeypatch):
    src = make(tmp_path / "src", small())
    monkeypatch.setattr(tool, "_cut_output", wrong_rank(tool._cut_output))
    with pytest.raises(FormatError, match="the proof failed: a part of rank 0 differs") as failed:
        halfbyte.shard(src, tmp_path / "out", tp=2)
    assert failed.value.tensor.startswith(L)
    assert leftovers(tmp_path) == ["src"]
    report = halfbyte.shard(src, tmp_path / "out", tp=2, prove=False)
    assert "proven" not in report.facts
    assert leftovers(tmp_path) == ["out", "src"]


def test_the_proof_finds_experts_of_another_rank(tmp_path, monkeypatch):
    src = make(tmp_path / "src", stacked_experts(P, expert_weights(E, INTER, HIDDEN)), MOE)
    monkeypatch.setattr(tool, "_cut_output", wrong_rank(tool._cut_output))
    with pytest.raises(FormatError, match="the experts of a rank differ from their source"):
        halfbyte.shard(src, tmp_path / "out", ep=2)
    assert leftovers(tmp_path) == ["src"]


def test_shards_index_and_other_files(tmp_path):
    """A rank has the files of the source, but those of which it holds nothing."""
    made = expert_weights(E, INTER, HIDDEN, **EACH)
    tensors = split_experts(P, made)
    first = {n: t for n, t in tensors.items() if f"{P}.3." in n}
    src = tmp_path / "src"
    save_sharded(src, [first, {n: t for n, t in tensors.items() if n not in first}])
    write_json(src / "config.json", MOE | {"quantization_config": {"quant_method": "modelopt"}})
    (src / "tokenizer.json").write_text("{}")
    (src / "code").mkdir()
    (src / "code" / "a.py").write_text("1")
    halfbyte.shard(src, tmp_path / "out", ep=2)
    beside = ["code", "config.json", INDEX, "tokenizer.json"]
    two = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert leftovers(rank_of(tmp_path / "out", 0, 2)) == sorted([*beside, two[1]])
    assert leftovers(rank_of(tmp_path / "out", 1, 2)) == sorted([*beside, *two])
    table = read_json(rank_of(tmp_path / "out", 1, 2) / INDEX)
    assert set(table["weight_map"]) == {n for n in tensors if f"{P}.2." in n or f"{P}.3." in n}
    assert told_of(rank_of(tmp_path / "out", 0, 2)) == told_of(src)


def test_force_replaces_ranks_and_nothing_else(tmp_path):
    src = make(tmp_path / "src", small())
    halfbyte.shard(src, tmp_path / "out", tp=4)
    with pytest.raises(TargetError, match="the target exists"):
        halfbyte.shard(src, tmp_path / "out", tp=2)
    halfbyte.shard(src, tmp_path / "out", tp=2, force=True)
    check_ranks(tmp_path / "out", 2, lambda rank: small(rank=rank, degree=2))
    (tmp_path / "home" / "photos").mkdir(parents=True)
    with pytest.raises(TargetError, match="not a checkpoint"):
        halfbyte.shard(src, tmp_path / "home", tp=2, force=True)


KILLED = """
import os, sys
from halfbyte.tools import shard as tool
tool._Shard.side_files = lambda self, writer: os._exit(9)
tool.shard(sys.argv[1], sys.argv[2], tp=2, workers=1)
"""


def test_resume(tmp_path):
    """A run that is killed when the files are written goes on without writing them again."""
    src = make(tmp_path / "src", small())
    done = subprocess.run([sys.executable, "-c", KILLED, src, tmp_path / "out"], env=environment(), check=False)
    assert done.returncode == 9
    (work,) = (tmp_path / name for name in leftovers(tmp_path, "src"))
    files = [work / "out" / f"rank-0000{r}-of-00002" / "model.safetensors" for r in range(2)]
    before = [(f.stat().st_ino, f.stat().st_mtime_ns) for f in files]
    (files[0].parent / "half").write_text("x")
    check_failure(call("shard", src, tmp_path / "out", "--tp", 4, "--resume"), 2, "another plan")
    ran = call("shard", src, tmp_path / "out", "--tp", 2, "--resume", "--json")
    assert ran.rc == 0
    after = [rank_of(tmp_path / "out", r, 2) / "model.safetensors" for r in range(2)]
    assert [(f.stat().st_ino, f.stat().st_mtime_ns) for f in after] == before
    unbroken = halfbyte.shard(src, tmp_path / "whole", tp=2)
    assert listing(tmp_path / "out") == listing(tmp_path / "whole")
    assert ran.document["proven"] == unbroken.facts["proven"]


def test_dry_run_and_json(tmp_path):
    src = make(tmp_path / "src", small())
    ran = call("shard", src, tmp_path / "out", "--tp", 2, "--dry-run", "--json")
    assert leftovers(tmp_path) == ["src"]
    document = ran.document
    assert (ran.rc, document["ok"], document["dry_run"], document["shards"]) == (0, True, True, 2)
    total = sum(len(t.data) for t in raw(small(rank=0, degree=2)).values())
    assert [entry["bytes"] for entry in document["ranks"]] == [total, total]
    assert document["bytes_out"] == 2 * total
    by_name = {entry["name"]: entry for entry in document["modules"]}
    assert by_name[f"{MLP}.down_proj"] == {
        "name": f"{MLP}.down_proj",
        "kind": "nvfp4",
        "shape": [64, 128],
        "parallel": "row",
        "axis": "K",
        "bias": "on every rank",
    }
    assert "bias" not in by_name[f"{MLP}.up_proj"]


def test_the_table(tmp_path):
    src = make(tmp_path / "src", small())
    ran = call("shard", src, tmp_path / "out", "--tp", 2, "--no-prove")
    assert (ran.rc, ran.stderr) == (0, "")
    for text in ("5 modules along N", "2 modules along K", "rank-00001-of-00002"):
        assert text in ran.stdout
    assert "proven" not in ran.stdout


@pytest.mark.parametrize("name", GOLDENS)
def test_checkpoints_of_the_real_tools(name, tmp_path):
    report = halfbyte.shard(GOLDENS[name], tmp_path / "out", tp=1)
    assert tensors_of(rank_of(tmp_path / "out", 0, 1)) == tensors_of(GOLDENS[name])
    assert report.facts["proven"] == len(tensors_of(GOLDENS[name]))


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed, tmp_path):
    """Sizes, kinds, stacks and degrees at random: the ranks' tensors, joined by NumPy, are the source's."""
    rng = random.Random(seed)
    degree = rng.choice([1, 2, 3, 4])
    hidden, inter = 16 * rng.randint(1, 4), 16 * degree * rng.randint(1, 3)
    experts, order = degree * rng.randint(1, 2), rng.choice(list(GATE_UP))
    columns = rng.random() < 0.5
    made = expert_weights(experts, inter, hidden, **SHARED)
    dense = {"m.up_proj.weight": floats(inter, hidden), "m.down_proj.weight": floats(hidden, inter)}
    metadata = encode_stacks({f"{P}.gate_up_proj": Stack(columns, order)})
    stacks = stacked_experts(P, made, columns=columns, order=order)
    src = make(tmp_path / "src", stacks | dense, MOE | {"hidden_size": hidden}, metadata)
    halfbyte.shard(src, tmp_path / "tp", tp=degree, workers=rng.choice([1, 2]))

    def expected(rank):
        cut = stacked_experts(P, cut_experts(made, rank, degree), columns=columns, order=order)
        some = {n: share(t, int("down" in n), rank, degree) for n, t in dense.items()}
        return cut | some

    check_ranks(tmp_path / "tp", degree, expected)
    halfbyte.shard(src, tmp_path / "ep", ep=degree)
    check_ranks(tmp_path / "ep", degree, lambda rank: {n: share(t, 0, rank, degree) for n, t in stacks.items()} | dense)


def test_more_workers_give_the_same(tmp_path):
    src = make(tmp_path / "src", small())
    for workers in (1, 3):
        halfbyte.shard(src, tmp_path / f"out{workers}", tp=2, workers=workers)
    assert listing(tmp_path / "out1") == listing(tmp_path / "out3")
