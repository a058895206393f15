"""Random checkpoints with experts, in every form: values by the tables of the formats, bytes there and back."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import halfbyte
from checkpoints import BF16, E4M3, joined, leftovers, save, save_sharded, tensors_of, write_json

SEEDS = range(int(os.environ.get("HALFBYTE_SEEDS", "12")))
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
HIDDEN = 64
TYPES = ("qwen3_moe", "mixtral", "llama4_text", "gpt_oss", None)
PAIRS = {("gate_proj", "up_proj"): "gate_up_proj", ("w1", "w3"): "w13"}


def unpacked(codes: np.ndarray) -> np.ndarray:
    """(.., K/2) bytes as (.., K) values, the low nibble first."""
    return E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)]


@dataclass
class Layer:
    """One expert's layer: what is stored under ModelOpt's names, and its values in float64."""

    kind: str
    roles: dict[str, np.ndarray]
    values: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        get = self.roles
        if self.kind == "nvfp4":
            scales = get["scales"].view(E4M3).astype(np.float64).repeat(16, -1)
            self.values = unpacked(get["codes"]) * scales * float(get["scale2"])
        elif self.kind == "fp8":
            self.values = get["data"].astype(np.float64) * float(get["scale"])
        else:
            self.values = get["data"].astype(np.float64)


def layer(rng: np.random.Generator, kind: str, n: int, k: int, companions: set[str], shared: bool) -> Layer:
    if kind == "nvfp4":
        roles = {
            "codes": rng.integers(0, 256, (n, k // 2), np.uint8),
            "scales": rng.integers(0, 0x7F, (n, k // 16), np.uint8),
            "scale2": np.float32(0.25 if shared else rng.uniform(1e-4, 1e-2)),
        }
        if "pre_scale" in companions:
            roles["pre_scale"] = np.ones(k, BF16)
        if "input_scale" in companions:
            roles["input_scale"] = np.float32(rng.uniform(1e-4, 1e-2))
    elif kind == "fp8":
        data = rng.integers(0, 0x7F, (n, k), np.uint8) | rng.integers(0, 2, (n, k), np.uint8) << 7
        roles = {"data": data.astype(np.uint8).view(E4M3), "scale": np.float32(rng.uniform(1e-4, 1e-2))}
    else:
        roles = {"data": rng.standard_normal((n, k)).astype(BF16)}
    if "bias" in companions:
        roles["bias"] = rng.standard_normal(n).astype(BF16)
    return Layer(kind, roles)


NAMES = {"codes": "weight", "data": "weight", "scales": "weight_scale", "scale": "weight_scale"}
NAMES |= {"scale2": "weight_scale_2", "input_scale": "input_scale", "bias": "bias", "pre_scale": "pre_quant_scale"}


def of_layer(name: str, made: Layer) -> dict[str, Any]:
    found = {f"{name}.{NAMES[role]}": array for role, array in made.roles.items()}
    return {n: a.view(E4M3) if n.endswith("weight_scale") and a.dtype == np.uint8 else a for n, a in found.items()}


def stacked(parent: str, experts: list[dict[str, Layer]], columns: bool, order: str) -> dict[str, Any]:
    """The tensors of stacks, written without the code under test."""
    parts = list(experts[0])
    pair = next((p for p in PAIRS if set(p) <= set(parts)), ())
    stems = {PAIRS[pair]: pair} if pair else {}
    stems |= {p: (p,) for p in parts if p not in pair}
    tensors: dict[str, Any] = {}
    for stem, members in stems.items():
        for role in experts[0][members[0]].roles:
            each = [[np.asarray(e[p].roles[role]) for p in members] for e in experts]
            ending = f"_{NAMES[role]}" if NAMES[role] != "weight" or stem in ("w13", "w2") else ""
            if role in ("scale2", "input_scale", "scale"):
                array = np.array(each, np.float32)
                array = array[:, 0] if (array == array[:, :1]).all() else array
            elif role == "pre_scale":
                array = np.stack([e[0] for e in each])
            else:
                array = np.stack([joined(*e, order) if len(e) == 2 else e[0] for e in each])
                array = np.ascontiguousarray(array.swapaxes(1, 2)) if columns and role != "bias" else array
            array = array.view(E4M3) if role == "scales" else array
            tensors[f"{parent}.{stem}{ending}"] = array
    return tensors


@dataclass
class Model:
    """A random model: its experts by layer, its other tensors, and config.json."""

    rng: np.random.Generator
    experts: dict[str, list[dict[str, Layer]]]
    others: dict[str, Any]
    config: dict[str, Any] | None
    kind: str | None

    @property
    def columns(self) -> bool:
        return self.kind in ("llama4_text", "gpt_oss")

    @property
    def order(self) -> str:
        return "interleaved" if self.kind == "gpt_oss" else "concatenated"

    def split(self) -> dict[str, Any]:
        tensors = dict(self.others)
        for parent, experts in self.experts.items():
            for e, parts in enumerate(experts):
                for part, made in parts.items():
                    tensors |= of_layer(f"{parent}.{e}.{part}", made)
        return tensors

    def stacks(self, columns: bool, order: str) -> dict[str, Any]:
        tensors = dict(self.others)
        for parent, experts in self.experts.items():
            tensors |= stacked(parent, experts, columns, order)
        return tensors

    def values(self) -> dict[str, np.ndarray]:
        return {
            f"{parent}.{e}.{part}": made.values
            for parent, experts in self.experts.items()
            for e, parts in enumerate(experts)
            for part, made in parts.items()
        }


def model(seed: int) -> Model:
    rng = np.random.default_rng([seed, 77])
    pick = lambda *values: values[int(rng.integers(len(values)))]  # noqa: E731
    kind = pick(*TYPES)
    experts: dict[str, list[dict[str, Layer]]] = {}
    for i in range(int(rng.integers(1, 4))):
        sort = "nvfp4" if i == 0 else pick("nvfp4", "nvfp4", "fp8", "dense")
        parts = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        parts = parts if pick(True, True, False) else parts[1:]
        parent = f"model.layers.{i}.{'block_sparse_moe' if kind == 'mixtral' else 'mlp'}.experts"
        inter, companions = pick(16, 32, 48), {c for c in ("bias", "input_scale", "pre_scale") if pick(True, False)}
        companions |= {"input_scale"} if "pre_scale" in companions else set()  # AWQ has static inputs
        shared = pick(True, False)
        made = []
        for _ in range(pick(1, 2, 3, 11)):
            shapes = {p: (HIDDEN, inter) if p in ("down_proj", "w2") else (inter, HIDDEN) for p in parts}
            made.append({p: layer(rng, sort, n, k, companions, shared) for p, (n, k) in shapes.items()})
        experts[parent] = made
    others: dict[str, Any] = {"lm_head.weight": rng.standard_normal((8, HIDDEN)).astype(BF16)}
    others["model.layers.0.mlp.gate.weight"] = rng.standard_normal((4, HIDDEN)).astype(BF16)
    others |= of_layer("model.layers.0.mlp.shared_expert.up_proj", layer(rng, "nvfp4", 32, HIDDEN, set(), True))
    text = {"model_type": kind, "hidden_size": HIDDEN}
    config = None if kind is None else {"text_config": text} if pick(True, False) else text
    return Model(rng, experts, others, config, kind)


def write(path, made: Model, tensors: dict[str, Any]):
    """In up to three shards, companions apart."""
    path.mkdir(parents=True)
    names, count = list(tensors), int(made.rng.integers(1, 4))
    made.rng.shuffle(names)
    if count == 1:
        save(path / "model.safetensors", tensors)
    else:
        save_sharded(path, [{n: tensors[n] for n in names[i::count]} for i in range(count)])
    if made.config is not None:
        write_json(path / "config.json", made.config)
    return path


def arrays(path) -> dict[str, np.ndarray]:
    types = {"U8": np.uint8, "F8_E4M3": E4M3, "F32": np.float32, "BF16": ml_dtypes.bfloat16}
    return {n: np.frombuffer(t.data, types[t.dtype]).reshape(t.shape) for n, t in tensors_of(path).items()}


def check_same(path, expected: dict[str, Any]) -> None:
    found = arrays(path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        array = np.asarray(array)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def check_report(report, source: dict[str, Any], path) -> None:
    listed = report.facts["tensors"]
    assert {t["tensor"] for t in listed} == set(source)
    assert {t["to"] for t in listed} == set(tensors_of(path))


def check_values(path, made: Model) -> None:
    with halfbyte.open(path) as checkpoint:
        for name, values in made.values().items():
            weight = checkpoint[name]
            found = weight.dequantize("float32") if hasattr(weight, "dequantize") else weight.data
            assert np.array_equal(np.asarray(found, np.float64), values.astype(np.float32)), name


@pytest.mark.parametrize("seed", SEEDS)
def test_split_and_stacked_forms_are_one(seed, tmp_path):
    made = model(seed)
    split = made.split()
    src = write(tmp_path / "src", made, split)
    columns = bool(made.rng.integers(2))
    form, order = "stacked-columns" if columns else "stacked-rows", made.order
    report = halfbyte.convert(src, tmp_path / "s", to="modelopt", experts=form, prove=True, workers=1)
    check_same(tmp_path / "s", made.stacks(columns, order))
    check_report(report, split, tmp_path / "s")
    assert halfbyte.verify(tmp_path / "s").ok
    check_values(tmp_path / "s", made)
    halfbyte.convert(tmp_path / "s", tmp_path / "b", to="modelopt", experts="split", prove=True, workers=2)
    check_same(tmp_path / "b", split)
    halfbyte.convert(src, tmp_path / "m", to="modelopt", experts="stacked", workers=1)
    check_same(tmp_path / "m", made.stacks(made.columns, made.order))
    assert halfbyte.diff(src, tmp_path / "m").facts["different"] == 0
    refused = any("pre_scale" in parts[p].roles for e in made.experts.values() for parts in e for p in parts)
    if not refused:
        halfbyte.convert(tmp_path / "m", tmp_path / "ct", to="compressed-tensors", experts="split", workers=1)
        check_values(tmp_path / "ct", made)
        assert halfbyte.verify(tmp_path / "ct").ok
        halfbyte.convert(tmp_path / "ct", tmp_path / "cb", to="modelopt", experts=form, prove=True, workers=1)
        check_same(tmp_path / "cb", made.stacks(columns, order))
    assert not [name for name in leftovers(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("seed", SEEDS)
def test_dequantized_stacks(seed, tmp_path):
    made = model(seed)
    columns = bool(made.rng.integers(2))
    src = write(tmp_path / "src", made, made.split())
    form = "stacked-columns" if columns else "stacked-rows"
    halfbyte.convert(src, tmp_path / "s", to="modelopt", experts=form, workers=1)
    halfbyte.dequantize_checkpoint(tmp_path / "s", tmp_path / "d", dtype="float32", workers=2)
    found = arrays(tmp_path / "d")
    lies = made.columns if made.kind else columns
    for parent, experts in made.experts.items():
        plain = [{p: Layer("dense", {"data": v.values}) for p, v in parts.items()} for parts in experts]
        kept = next(iter(experts[0].values())).kind == "dense"
        expected = stacked(parent, plain, columns if kept else lies, made.order)
        for name, values in expected.items():
            spelled = name.replace("w13_weight", "gate_up_proj").replace("w2_weight", "down_proj")
            name = name if kept or "bias" in next(iter(experts[0].values())).roles else spelled
            assert np.array_equal(found[name].astype(np.float64), values.astype(np.float32)), name
    halfbyte.dequantize_checkpoint(src, tmp_path / "ds", dtype="float32", workers=1)
    single = arrays(tmp_path / "ds")
    for name, values in made.values().items():
        assert np.array_equal(single[f"{name}.weight"].astype(np.float64), values.astype(np.float32)), name
