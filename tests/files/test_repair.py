"""The command that ``verify --against`` prints where a reading explains what is wrong: it is run, and its result is
measured again."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    E4M3,
    call,
    expert_weights,
    floats,
    make_float,
    modelopt_section,
    save,
    stacked_experts,
    write_json,
)
from halfbyte.dialects import dialect_named
from halfbyte.layouts import Order
from halfbyte.layouts.executors import arrange, restore
from halfbyte.modules import Reading
from halfbyte.reading import combined
from halfbyte.twins import repair_command
from halfbyte.weight import Weight

N, WIDTH = 256, 768
NAMES = [f"model.layers.{i}.mlp.{part}" for i in range(2) for part in ("gate_proj", "up_proj", "down_proj")]
ORDERS = {
    "128x4": Order("(nt n4 n32) (kt k4) -> nt kt n32 n4 k4", n4=4, n32=32, k4=4),
    "8x4": Order("(nt n8) (kt k4) -> nt kt n8 k4", n8=8, k4=4),
}


def twins(tmp_path, change, to="modelopt", names=NAMES, width=WIDTH):
    """A dense checkpoint, and its quantized form with every tensor of some modules changed by its suffix."""
    source = make_float(tmp_path / "dense", {f"{n}.weight": floats(N, width, i) for i, n in enumerate(NAMES)})
    path = tmp_path / "the quantized one's"
    halfbyte.quantize_checkpoint(source, path, to=to, share_scale2=True)
    halfbyte.convert(path, tmp_path / "good", to=to)
    with halfbyte.open(path) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    for name in names:
        for suffix, alter in change.items():
            tensors[f"{name}.{suffix}"] = alter(tensors[f"{name}.{suffix}"])
    save(path / "model.safetensors", tensors)
    return path, source


def swap(codes):
    return (codes << 4) | (codes >> 4)


def swizzle(atom, times=1):
    def alter(scales):
        for _ in range(times):
            scales = arrange(ORDERS[atom], scales.view(np.uint8)).reshape(scales.shape)
        return scales.view(E4M3)

    return alter


def unswizzle(atom):
    return lambda scales: restore(ORDERS[atom], scales.view(np.uint8).reshape(-1), scales.shape).view(E4M3)


FAULTS = {
    ("modelopt", "--nibble-order high"): {"weight": swap},
    ("modelopt", "--scale2 divisor"): {"weight_scale_2": lambda x: 1 / x},
    ("modelopt", "--scale2 amax"): {"weight_scale_2": lambda x: x * np.float32(2688)},
    ("compressed-tensors", "--nibble-order high --scale-layout 128x4"): {
        "weight_packed": swap,
        "weight_scale": swizzle("128x4"),
    },
    ("compressed-tensors", "--scale2 multiplier"): {"weight_global_scale": lambda x: 1 / x},
    ("compressed-tensors", "--scale2 amax"): {"weight_global_scale": lambda x: np.float32(2688) / x},
}
for atom in ORDERS:
    for layout, alter in (
        (atom, swizzle(atom)),
        (f"{atom}-twice", swizzle(atom, 2)),
        (f"{atom}-undone", unswizzle(atom)),
    ):
        FAULTS["modelopt", f"--scale-layout {layout}"] = {"weight_scale": alter}


@pytest.mark.parametrize(("to", "options"), FAULTS, ids=lambda x: x.replace(" ", "_"))
def test_the_command_repairs(tmp_path, to, options):
    path, source = twins(tmp_path, FAULTS[to, options], to)
    ran = call("verify", path, "--against", source)
    command = f"halfbyte convert {shlex.quote(str(path))} {shlex.quote(f'{path}-repaired')} --to {to} {options}"
    assert ran.rc == 1
    assert ran.stdout.splitlines()[-1] == f"repair: {command}"
    told = [line for line in ran.lines if "HB501" in line]
    assert len(told) == 6
    assert all(line.endswith(f"; repair: {command}") for line in told)
    facts = halfbyte.verify(path, source).facts
    assert {row["repair"] for row in facts["against"]} == {command}
    assert (facts["against_overall"]["repair"], facts["against_overall"]["advice"]) == (command, None)

    assert call(*shlex.split(command)[1:], "--prove").rc == 0
    assert halfbyte.verify(f"{path}-repaired", source).findings == ()
    report = halfbyte.diff(f"{path}-repaired", tmp_path / "good")
    if "scale2" not in options:  # what a reciprocal rounds does not come back
        assert report.findings == ()
    with halfbyte.open(f"{path}-repaired") as made, halfbyte.open(tmp_path / "good") as good:
        for name, weight in good.weights():
            assert np.array_equal(made[name].codes, weight.codes)
            assert np.array_equal(made[name].scales, weight.scales)
            assert made[name].scale2 == pytest.approx(weight.scale2, rel=2e-7)


def test_some_modules_alone(tmp_path):
    """No one reading is right for all: the summary says so, and no command is given."""
    path, source = twins(tmp_path, {"weight": swap}, names=NAMES[1:3])
    report = halfbyte.verify(path, source)
    assert [f.code for f in report.findings] == ["HB501"] * 2
    assert not any("halfbyte convert" in f.hint for f in report.findings)
    assert {row["repair"] for row in report.facts["against"]} == {None}
    assert report.facts["against_overall"]["repair"] is None
    last = call("verify", path, "--against", source).stdout.splitlines()[-1]
    assert last == (
        "repair: no one reading is right for all modules, and convert reads all alike (--nibble-order high fits 2 of"
        f" 6); quantize these again: --include {NAMES[2]} --include {NAMES[1]}"
    )


def test_a_module_that_nothing_explains(tmp_path):
    path, source = twins(tmp_path, {"weight": swap})
    with halfbyte.open(path) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    tensors[f"{NAMES[0]}.weight"] = np.random.default_rng(0).integers(0, 256, (N, WIDTH // 2), np.uint8)
    save(path / "model.safetensors", tensors)
    overall = halfbyte.verify(path, source).facts["against_overall"]
    assert overall["repair"] is None
    assert "--nibble-order high fits 5 of 6" in overall["advice"]
    assert overall["advice"].endswith("and 1 more")
    some = halfbyte.verify(path, source, include=["*.layers.1.*"]).facts["against_overall"]
    assert some["repair"].endswith("--nibble-order high")


def test_a_fault_that_no_reading_expresses(tmp_path):
    path, source = twins(tmp_path, {"weight_scale_2": lambda x: x * np.float32(6)})
    report = halfbyte.verify(path, source)
    overall = report.facts["against_overall"]
    assert (overall["repair"], overall["advice"]) == (None, None)
    assert all(f.hint.endswith("its reciprocal (weight_global_scale)") for f in report.findings)
    assert "repair" not in call("verify", path, "--against", source).stdout


def test_a_module_that_two_readings_fit(tmp_path):
    """Scales of four blocks a row lie in 8x4 atoms as they do in rows."""
    path, source = twins(tmp_path, {"weight_scale": swizzle("8x4")})
    lone = make_float(tmp_path / "lone", {"a.weight": floats(N, 64, 9)})
    halfbyte.quantize_checkpoint(lone, tmp_path / "q")
    parts = [{}, {}]
    for tensors, folders in zip(parts, ((path, tmp_path / "q"), (source, lone)), strict=True):
        for folder in folders:
            with halfbyte.open(folder) as checkpoint:
                tensors |= {name: checkpoint.read(name) for name in checkpoint.tensors}
    save(path / "model.safetensors", parts[0])
    save(source / "model.safetensors", parts[1])
    facts = halfbyte.verify(path, source).facts
    assert facts["against_overall"]["repair"].endswith("--scale-layout 8x4")
    assert [row["name"] for row in facts["against"] if row["repair"] is None] == ["a"]


def test_beside_a_reading_that_is_given(tmp_path):
    path, source = twins(tmp_path, {"weight": swap, "weight_scale": swizzle("128x4")})
    report = halfbyte.verify(path, source, reading=Reading("high"))
    assert {row["reading"] for row in report.facts["against"]} == {"block scales swizzled (128x4)"}
    assert report.facts["reading"] == ["--nibble-order high"]
    assert report.facts["against_overall"]["repair"].endswith(" --nibble-order high --scale-layout 128x4")
    ran = call("verify", path, "--against", source, "--nibble-order", "high", "--scale-layout", "128x4")
    assert (ran.rc, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[1] == "read with --nibble-order high --scale-layout 128x4"


def test_a_reading_that_is_given_without_need(tmp_path):
    path, source = twins(tmp_path, {})
    overall = halfbyte.verify(path, source, reading=Reading("high", scale2="divisor")).facts["against_overall"]
    assert overall == overall | {"repair": None, "advice": None}  # two faults at once, of which no entry knows
    overall = halfbyte.verify(path, source, reading=Reading("high")).facts["against_overall"]
    assert overall["repair"] is None
    assert overall["advice"] == "none is needed: leave out --nibble-order high"


PARENT = "model.layers.0.mlp.experts"
GATE_UP, DOWN = f"{PARENT}.gate_up_proj", f"{PARENT}.down_proj"


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("order", ["up_first", "interleaved"])
@pytest.mark.parametrize("known", [True, False])
def test_gate_and_up(tmp_path, columns, order, known):
    """By the model's definition they are concatenated, and so they are written; without one the order is stated."""
    made = expert_weights(3, 64, 128, scale2=lambda e, i: 2.0**-9, input_scale=lambda e, i: 2.0 ** -(e + 1))
    path = tmp_path / "q"
    path.mkdir()
    save(path / "model.safetensors", stacked_experts(PARENT, made, columns=columns, order=order))
    config = {"model_type": "qwen3_moe"} if known else {}
    write_json(path / "config.json", config | {"quantization_config": modelopt_section("NVFP4")})
    dense = {f"{PARENT}.{e}.{part}.weight": Weight(**roles).dequantize() for (e, part), roles in made.items()}
    source = make_float(tmp_path / "d", dense)
    report = halfbyte.verify(path, source)
    command = report.facts["against_overall"]["repair"]
    assert command.endswith(f"--to modelopt --gate-up {order}")
    repaired = {row["name"] for row in report.facts["against"] if row["repair"]}
    assert repaired == {f"{PARENT}.{e}.{part}" for e in range(3) for part in ("gate_proj", "up_proj")}
    assert call(*shlex.split(command)[1:], "--prove").rc == 0
    after = halfbyte.verify(f"{path}-repaired", source)
    assert [f for f in after.findings if f.code.startswith("HB5")] == []
    with halfbyte.open(f"{path}-repaired") as checkpoint:
        lies = {m.name: m.stack.gate_up for m in checkpoint.modules}
        stated = json.loads(checkpoint.headers.metadata["halfbyte.experts"])
    assert lies == {GATE_UP: "concatenated" if known else order, DOWN: None}
    assert stated[GATE_UP]["gate_up"] == lies[GATE_UP]


def test_gate_and_up_of_one_expert(tmp_path):
    made = expert_weights(2, 32, 64, scale2=lambda e, i: 2.0**-9)
    dense = {f"{PARENT}.{e}.{part}.weight": Weight(**roles).dequantize() for (e, part), roles in made.items()}
    made[1, "gate_proj"], made[1, "up_proj"] = made[1, "up_proj"], made[1, "gate_proj"]
    path = tmp_path / "q"
    path.mkdir()
    metadata = {"halfbyte.experts": json.dumps({GATE_UP: {"gate_up": "concatenated"}})}
    save(path / "model.safetensors", stacked_experts(PARENT, made), metadata)
    overall = halfbyte.verify(path, make_float(tmp_path / "d", dense)).facts["against_overall"]
    assert overall["repair"] is None
    assert "(--gate-up up_first fits 2 of 6)" in overall["advice"]
    assert f"--include {PARENT}.1.gate_proj --include {PARENT}.1.up_proj" in overall["advice"]


def test_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    (tmp_path / "m.safetensors").touch()
    (tmp_path / "-x").mkdir()
    names = {
        "a b/": "'a b/' 'a b-repaired'",
        "m.safetensors": "m.safetensors m-repaired",
        "org/model": "org/model model-repaired",
        ".": f". {tmp_path}-repaired",
        "-x": "./-x ./-x-repaired",
    }
    for source, shown in names.items():
        command = repair_command(source, dialect_named("modelopt"), Reading("high"))
        assert command == f"halfbyte convert {shown} --to modelopt --nibble-order high"


def test_readings_together():
    high, swizzled = Reading("high"), Reading(scale_layout="128x4")
    divisor, amax = Reading(scale2="divisor"), Reading(scale2="amax")
    assert combined(high, swizzled, False) == Reading("high", "128x4")
    assert combined(high, high, False) == Reading()
    assert combined(swizzled, swizzled, False) == Reading(scale_layout="128x4-twice")
    assert combined(swizzled, Reading(scale_layout="128x4-undone"), False) == Reading()
    assert combined(swizzled, Reading(scale_layout="8x4"), False) is None
    assert combined(Reading(scale2="multiplier"), divisor, False) == divisor
    assert combined(Reading(scale2="multiplier"), divisor, True) == Reading(scale2="multiplier")
    assert combined(divisor, divisor, False) == Reading()
    assert combined(divisor, amax, False) is None
    assert combined(Reading(gate_up="up_first"), Reading(gate_up="interleaved"), False).gate_up == "interleaved"
