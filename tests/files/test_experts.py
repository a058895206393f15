"""Stacks of experts: told from their bytes, their config or their metadata, and read as the layers that they hold."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    GATE_UP,
    expert_weights,
    joined,
    mxfp4,
    nvfp4,
    save,
    split_experts,
    stacked_experts,
    write_json,
)
from halfbyte.bundles import gather
from halfbyte.errors import FormatError
from halfbyte.experts import encode_stacks, numbered
from halfbyte.modules import Stack
from halfbyte.weight import Weight

P = "model.layers.0.mlp.experts"
E, INTER, H = 3, 48, 32
NAMES = ("gate_proj", "up_proj", "down_proj")


def checkpoint(path, tensors, config=None, metadata=None):
    path.mkdir(parents=True)
    save(path / "model.safetensors", tensors, {"format": "pt"} | (metadata or {}))
    if config is not None:
        write_json(path / "config.json", config)
    return path


def plain(roles):
    return Weight(
        codes=roles["codes"], scales=roles["scales"], **{r: roles[r] for r in roles if "scale2" in r or "_s" in r}
    )


def weights(path):
    """Name -> Weight of every expert's layer, through the stacks."""
    with halfbyte.open(path) as ck:
        return {part.name: ck.load(part) for part in ck.parts if part.kind == "nvfp4"}


def same_as(made, found, parent=P):
    assert set(found) == {f"{parent}.{e}.{part}" for e, part in made}
    for (e, part), roles in made.items():
        assert found[f"{parent}.{e}.{part}"].same(plain(roles)), (e, part)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("order", GATE_UP)
@pytest.mark.parametrize("dotted", [False, True], ids=["underscore", "dotted"])
def test_layers_of_a_stack(columns, order, dotted, tmp_path):
    made = expert_weights(E, INTER, H, scale2=lambda e, i: 2.0 ** -(8 + e), input_scale=lambda e, i: 0.25 * (e + 1))
    metadata = encode_stacks({f"{P}.gate_up_proj": Stack(columns, order)})
    stacked = stacked_experts(P, made, columns=columns, order=order, dotted=dotted)
    path = checkpoint(tmp_path / "x", stacked, metadata=metadata)
    same_as(made, weights(path))
    with halfbyte.open(path) as ck:
        assert {m.name: m.shape for m in ck.modules} == {
            f"{P}.gate_up_proj": (E, 2 * INTER, H),
            f"{P}.down_proj": (E, H, INTER),
        }
        whole = ck[f"{P}.gate_up_proj"]
        expected = np.stack(
            [
                joined(plain(made[e, "gate_proj"]).dequantize(), plain(made[e, "up_proj"]).dequantize(), order)
                for e in range(E)
            ]
        )
        assert np.array_equal(whole.dequantize(), expected)
        assert ck[f"{P}.1.down_proj"].same(plain(made[1, "down_proj"]))


@pytest.mark.parametrize("order", GATE_UP)
def test_gate_and_up_with_a_scale2_each(order, tmp_path):
    made = expert_weights(E, INTER, H, scale2=lambda e, i: 2.0 ** -(8 + e + i), input_scale=lambda e, i: 0.25)
    stacked = stacked_experts(P, made, halves=True, order=order)
    assert stacked[f"{P}.gate_up_proj_weight_scale_2"].shape == (E, 2)
    metadata = encode_stacks({f"{P}.gate_up_proj": Stack(False, order)})
    path = checkpoint(tmp_path / "x", stacked, metadata=metadata)
    same_as(made, weights(path))
    with halfbyte.open(path) as ck:
        whole = ck.load(f"{P}.gate_up_proj")
    assert whole.per_row
    pairs = [[plain(made[e, part]).dequantize() for part in NAMES[:2]] for e in range(E)]
    assert np.array_equal(whole.dequantize(), np.stack([joined(*pair, order) for pair in pairs]))


def test_the_model_states_the_order_of_gate_and_up(tmp_path):
    made = expert_weights(E, INTER, H, scale2=lambda e, i: 2.0**-9)
    for i, (kind, order) in enumerate(
        {"gpt_oss": "interleaved", "llama4_text": "concatenated", "x": "concatenated"}.items()
    ):
        stacked = stacked_experts(P, made, order=order)
        for config in ({"model_type": kind}, {"model_type": "outer", "text_config": {"model_type": kind}}):
            path = checkpoint(tmp_path / f"{i}{len(config)}", stacked, config)
            same_as(made, weights(path))


def test_an_order_that_nothing_states_is_not_guessed(tmp_path):
    made = expert_weights(E, INTER, H, scale2=lambda e, i: 2.0**-9)
    path = checkpoint(tmp_path / "x", stacked_experts(P, made))
    found = weights(path)
    assert sorted(found) == sorted(f"{P}.{e}.{part}" for e in range(E) for part in ("gate_up_proj", "down_proj"))
    both = np.concatenate([plain(made[1, part]).dequantize() for part in NAMES[:2]])
    assert np.array_equal(found[f"{P}.1.gate_up_proj"].dequantize(), both)
    halves = checkpoint(tmp_path / "y", stacked_experts(P, made, halves=True))
    with halfbyte.open(halves) as ck, pytest.raises(FormatError, match="gate and up"):
        ck.load(f"{P}.gate_up_proj")


def test_metadata_that_lies_about_nothing_is_ignored(tmp_path):
    made = expert_weights(E, INTER, H, scale2=lambda e, i: 2.0**-9)
    for i, text in enumerate(
        ["", "[]", "{", '{"x": 1}', json.dumps({f"{P}.gate_up_proj": {"gate_up": "sideways"}}), "[" * 5000]
    ):
        path = checkpoint(tmp_path / str(i), stacked_experts(P, made), {"model_type": "x"}, {"halfbyte.experts": text})
        same_as(made, weights(path))


def test_names_of_mixtral(tmp_path):
    made = expert_weights(E, INTER, H, ("w1", "w3", "w2"), scale2=lambda e, i: 2.0**-9, input_scale=lambda e, i: 0.5)
    parent = "model.layers.0.block_sparse_moe.experts"
    same_as(made, weights(checkpoint(tmp_path / "split", split_experts(parent, made))), parent)
    stacked = stacked_experts(parent, made)
    assert f"{parent}.w13_weight" in stacked
    assert f"{parent}.w13_weight_scale" in stacked
    same_as(made, weights(checkpoint(tmp_path / "stacked", stacked, {"model_type": "mixtral"})), parent)


def test_experts_without_a_gate(tmp_path):
    made = expert_weights(E, INTER, H, ("up_proj", "down_proj"), scale2=lambda e, i: 2.0**-9)
    same_as(made, weights(checkpoint(tmp_path / "x", stacked_experts(P, made))))


@pytest.mark.parametrize(("n", "k"), [(16, 128), (128, 16), (64, 64), (16, 16), (48, 32)])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_the_factor_of_eight_tells_the_order(n, k, columns, tmp_path):
    """Also where N and K/2, or N and K/16, are equal."""
    made = {(e, "up_proj"): nvfp4(n, k, e) for e in range(2)}
    path = checkpoint(tmp_path / "x", stacked_experts(P, made, columns=columns))
    same_as(made, weights(path))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (E,), (E, 1), (E, 1, 1)])
def test_shapes_of_scale2(shape, tmp_path):
    made = expert_weights(E, INTER, H, ("up_proj", "down_proj"), scale2=lambda e, i: 2.0**-9)
    stacked = stacked_experts(P, made)
    for stem in ("up_proj", "down_proj"):
        stacked[f"{P}.{stem}_weight_scale_2"] = np.full(shape, 2.0**-9, np.float32)
    path = checkpoint(tmp_path / "x", stacked)
    same_as(made, weights(path))
    with halfbyte.open(path) as ck:
        assert np.array_equal(ck[f"{P}.up_proj"].scale2, np.full((E, 1, 1), 2.0**-9, np.float32))


def test_shapes_that_do_not_fit(tmp_path):
    made = expert_weights(E, INTER, H, scale2=lambda e, i: 2.0**-9)
    cases = {
        "down_proj_weight_scale_2": np.ones((E, 2), np.float32),
        "gate_up_proj_weight_scale_2": np.ones((E, 3), np.float32),
        "gate_up_proj_weight_scale": np.ones((E, 2 * INTER, H // 32), np.uint8),
    }
    for i, (name, array) in enumerate(cases.items()):
        path = checkpoint(tmp_path / str(i), stacked_experts(P, made) | {f"{P}.{name}": array})
        found = [f for f in halfbyte.verify(path).findings if f.severity == "error"]
        assert [f.tensor for f in found] == [f"{P}.{name}"]
        assert found[0].code == ("HB102" if name.endswith("scale") else "HB109")


def test_biases_go_with_their_rows(tmp_path):
    made = expert_weights(E, INTER, H, scale2=lambda e, i: 2.0**-9)
    bias = {
        (e, part): np.arange(INTER if part != "down_proj" else H).astype(BF16) * (e + 1) + i
        for e in range(E)
        for i, part in enumerate(NAMES)
    }
    for i, order in enumerate(GATE_UP):
        stacked = stacked_experts(P, made, order=order, columns=i == 1)
        stacked[f"{P}.gate_up_proj_bias"] = np.stack(
            [joined(bias[e, "gate_proj"], bias[e, "up_proj"], order) for e in range(E)]
        )
        stacked[f"{P}.down_proj_bias"] = np.stack([bias[e, "down_proj"] for e in range(E)])
        metadata = encode_stacks({f"{P}.gate_up_proj": Stack(i == 1, order)})
        with halfbyte.open(checkpoint(tmp_path / order, stacked, metadata=metadata)) as ck:
            found = {m.name: ck.read(m.roles["bias"]) for m in ck.parts}
        for (e, part), expected in bias.items():
            assert np.array_equal(found[f"{P}.{e}.{part}"], expected)


def test_dense_stacks(tmp_path):
    rng = np.random.default_rng(0)
    dense = {
        (e, part): rng.standard_normal((H, INTER) if part == "down_proj" else (INTER, H)).astype(BF16)
        for e in range(E)
        for part in NAMES
    }
    rows = {
        f"{P}.gate_up_proj": np.stack([np.concatenate([dense[e, p] for p in NAMES[:2]]) for e in range(E)]),
        f"{P}.down_proj": np.stack([dense[e, "down_proj"] for e in range(E)]),
    }
    columns = {name: np.ascontiguousarray(t.swapaxes(1, 2)) for name, t in rows.items()}
    config = {"model_type": "qwen3_moe", "hidden_size": H}
    for i, tensors in enumerate((rows, columns)):
        with halfbyte.open(checkpoint(tmp_path / str(i), tensors, config)) as ck:
            assert {m.name: m.shape for m in ck.modules} == {n: t.shape for n, t in rows.items()}
            for part in ck.parts:
                *_, e, name = part.name.split(".")
                assert np.array_equal(ck.load(part).data, dense[int(e), name])


@pytest.mark.parametrize(("kind", "columns"), [("llama4_text", True), ("gpt_oss", True), ("qwen3_moe", False)])
def test_square_dense_stacks_lie_as_their_model_says(kind, columns, tmp_path):
    stack = np.arange(2 * 32 * 32, dtype=np.float32).reshape(2, 32, 32)
    path = checkpoint(tmp_path / "x", {f"{P}.down_proj": stack}, {"model_type": kind, "hidden_size": 32})
    with halfbyte.open(path) as ck:
        assert np.array_equal(ck[f"{P}.1.down_proj"].data, stack[1].T if columns else stack[1])


def test_a_dense_stack_of_no_known_order_is_a_tensor(tmp_path):
    path = checkpoint(tmp_path / "x", {f"{P}.down_proj": np.ones((2, 32, 32), np.float32)})
    with halfbyte.open(path) as ck:
        assert [(m.name, m.kind) for m in ck.modules] == [(f"{P}.down_proj", "none")]


def test_convolutions_are_no_experts(tmp_path):
    tensors = {"conv.weight": np.ones((4, 3, 2), np.float32), "block.experts_norm": np.ones((2, 2, 2), np.float32)}
    with halfbyte.open(checkpoint(tmp_path / "x", tensors, {"model_type": "x"})) as ck:
        assert all(m.stack is None for m in ck.modules)
        assert ck.parts == ck.modules


def test_gpt_oss(tmp_path):
    gate_up, down = mxfp4(E * 2 * INTER, H), mxfp4(E * H, 64, 1)
    tensors = {
        f"{P}.gate_up_proj_blocks": gate_up["codes"].reshape(E, 2 * INTER, H // 32, 16),
        f"{P}.gate_up_proj_scales": gate_up["scales"].reshape(E, 2 * INTER, H // 32),
        f"{P}.gate_up_proj_bias": np.arange(E * 2 * INTER).reshape(E, -1).astype(BF16),
        f"{P}.down_proj_blocks": down["codes"].reshape(E, H, 2, 16),
        f"{P}.down_proj_scales": down["scales"].reshape(E, H, 2),
        "model.layers.0.mlp.router.weight": np.ones((E, H), BF16),
    }
    path = checkpoint(
        tmp_path / "x", tensors, {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    )
    values = (
        halfbyte.Mxfp4Weight(codes=gate_up["codes"], scales=gate_up["scales"]).dequantize().reshape(E, 2 * INTER, H)
    )
    with halfbyte.open(path) as ck:
        assert ck.dialect_name == "gpt-oss"
        kinds = {m.name.rpartition(".")[2]: (m.kind, m.shape) for m in ck.modules}
        assert kinds["gate_up_proj"] == ("mxfp4", (E, 2 * INTER, H))
        assert np.array_equal(ck[f"{P}.gate_up_proj"].dequantize(), values)
        assert np.array_equal(ck[f"{P}.2.gate_proj"].dequantize(), values[2, 0::2])
        assert np.array_equal(ck[f"{P}.2.up_proj"].dequantize(), values[2, 1::2])
        bias = {m.name: ck.read(m.roles["bias"]) for m in ck.parts if "bias" in m.roles}
        assert np.array_equal(bias[f"{P}.1.up_proj"], tensors[f"{P}.gate_up_proj_bias"][1, 1::2])


def test_places_on_disk(tmp_path):
    """An index of a part leads to the same byte of the whole tensor."""
    made = expert_weights(E, INTER, H, scale2=lambda e, i: 2.0**-9)
    for order in GATE_UP:
        metadata = encode_stacks({f"{P}.gate_up_proj": Stack(False, order)})
        stacked = stacked_experts(P, made, order=order)
        with halfbyte.open(checkpoint(tmp_path / order, stacked, metadata=metadata)) as ck:
            for part in ck.parts:
                scales = part.roles["scales"]
                array = ck.read(scales).view(np.uint8)
                for index in ((0, 0), (5, 1), (array.shape[0] - 1, array.shape[1] - 1)):
                    there = stacked[scales.name].view(np.uint8)[tuple(scales.place(index))]
                    assert there == array[index]


@pytest.mark.parametrize(("columns", "order", "item"), list(itertools.product([False, True], GATE_UP, [1, 2])))
def test_gather_is_the_inverse_of_reading(columns, order, item):
    rng = np.random.default_rng(1)
    gate, up = (rng.integers(0, 256, (6, 8), np.uint8) for _ in range(2))
    rows = joined(gate, up, order)
    expected = rows.reshape(12, -1, item).swapaxes(0, 1).reshape(-1) if columns else rows.reshape(-1)
    assert np.array_equal(gather(Stack(columns, order), columns, item, [gate, up]), expected)
    alone = gate.reshape(6, -1, item).swapaxes(0, 1).reshape(-1) if columns else gate.reshape(-1)
    assert np.array_equal(gather(Stack(columns, order), columns, item, [gate]), alone)


def test_numbers_of_experts():
    """A name that only looks like an expert's is like any other, and costs nothing."""
    assert numbered("m.layers.3.mlp.experts.12.up_proj") == ("m.layers.3.mlp.experts", 12, "up_proj")
    assert numbered("experts.0.w1") == ("experts", 0, "w1")
    for name in ("experts.012.w1", "experts.100000.w1", f"experts.{'9' * 5000}.w1", "experts.٣.w1", "experts.1.w1.x"):
        assert numbered(name) is None


def test_a_stack_whose_companion_looks_like_a_stack(tmp_path):
    """Both names could be that of the codes: the first takes the other with it, as something unknown."""
    made = {(e, "q_proj"): nvfp4(32, 32, e) for e in range(2)}
    tensors = stacked_experts(P, made)
    tensors[f"{P}.q_proj_weight"] = tensors[f"{P}.q_proj"]
    path = checkpoint(tmp_path / "x", tensors)
    with halfbyte.open(path) as ck:
        (module,) = ck.modules
        assert {t.name for t in module.tensors} == set(tensors)
        assert len(module.unknown) == 1
