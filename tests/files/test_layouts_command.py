"""``halfbyte layouts``."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints import call, check_failure
from halfbyte.layouts import LAYOUTS, parse
from halfbyte.layouts.drawing import drawing
from halfbyte.numerics import BLOCK
from halfbyte.weight import Weight


def entry(name):
    ran = call("layouts", name, "--json")
    assert ran.rc == 0
    (found,) = ran.document["layouts"]
    return found


def test_the_list():
    ran = call("layouts")
    assert (ran.rc, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : len(LAYOUTS) + 1]] == [layout.name for layout in LAYOUTS]
    assert "K % 64 == 0" in next(line for line in lines if line.startswith("gguf"))


def test_the_list_as_json():
    found = call("layouts", "--json").document["layouts"]
    assert [(e["name"], e["key"], e["used_by"]) for e in found] == [(x.name, x.key, x.used_by) for x in LAYOUTS]
    assert not any("drawing" in e for e in found)
    assert all(e["about"].endswith(".") for e in found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_one(layout):
    found = entry(layout.name)
    assert found["key"] == layout.key
    assert found["drawing"] == drawing(layout)
    assert found["buffers"] == [*layout.buffers, *layout.extras]
    ran = call("layouts", layout.name)
    assert drawing(layout) in ran.stdout
    assert layout.used_by in ran.stdout


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rows", "kept", "are kept"),
        ("fragments(dtype=float16)", "kept", "are kept"),
        ("fragments", "canonical", "are packed as 0, and come back as 0"),
        ("gate_up(order=up_first, layout=fragments)", "canonical", "are packed as 0, and come back as 0"),
    ],
)
def test_what_becomes_of_zero_blocks(key, value, words):
    assert entry(key)["zero_blocks"] == value
    assert f"the codes of blocks whose scale is 0 {words}" in call("layouts", key).stdout


def test_fields():
    fields = {f["name"]: f for f in entry("marlin(scale_format=s0e5m3)")["fields"]}
    assert fields["scale_format"] == {
        "name": "scale_format",
        "value": "s0e5m3",
        "default": "e4m3",
        "choices": ["e4m3", "s0e5m3"],
        "type": "str",
    }
    (kind,) = (f for f in entry("columns")["fields"] if f["name"] == "kind")
    assert (kind["value"], kind["choices"]) == ("nvfp4", ["nvfp4", "mxfp4"])
    assert "K/32" in call("layouts", "columns(kind=mxfp4)").stdout
    assert fields["lossy"]["choices"] == [False, True]
    assert (fields["pad_n"]["value"], fields["pad_n"]["choices"], fields["pad_n"]["type"]) == (64, None, "int")
    assert "scale_format=e4m3|s0e5m3 (e4m3)" in call("layouts", "marlin").stdout


@pytest.mark.parametrize(
    ("key", "needs"),
    [
        ("rows", {"n": 1, "k": 1}),
        ("tiles64", {"n": 1, "k": 64}),
        ("experts_out_pair", {"n": 64, "k": 16}),
        ("gate_up(order=up_first_64, layout=gguf)", {"n": 128, "k": 64}),
    ],
)
def test_needs_are_those_of_the_layout(key, needs):
    assert entry(key)["needs"] == needs
    layout = parse(key)
    assert layout.needs((needs["n"], needs["k"])) is None
    for n, k in ((needs["n"] + 1, needs["k"]), (needs["n"], needs["k"] + BLOCK)):
        assert (layout.needs((n, k)) is None) == (n % needs["n"] == 0 and k % needs["k"] == 0)


def test_what_is_refused():
    """The words, and that the layout does refuse such a weight."""
    assert entry("rows")["refuses"] == "NaN and negative block scales"
    assert entry("gate_up(order=up_first, layout=rows(kind=mxfp4))")["refuses"] == "NaN block scales"
    rng = np.random.default_rng(0)
    weight = Weight(
        codes=rng.integers(0, 256, (64, 16), np.uint8), scales=rng.integers(1, 0x7F, (64, 2), np.uint8), scale2=1.0
    )
    for key, words in (
        ("marlin(scale_format=s0e5m3)", "block scales that S0E5M3 would change"),
        ("experts_out_pair(scale_form=atom)", "block scales that differ within 16 rows"),
    ):
        assert entry(key)["refuses"] == f"NaN and negative block scales, {words}"
        assert parse(key).refuse(weight) is not None
        assert words in entry(f"gate_up(order=up_first, layout={key})")["refuses"]
    for key in ("marlin", "marlin(scale_format=s0e5m3, lossy=True)", "experts_out_pair"):
        assert entry(key)["refuses"] == "NaN and negative block scales"
        assert parse(key).refuse(weight) is None


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("stripes", ("stripes", "rows or columns")),
        ("marlin(scale_format=fp8)", ("fp8", "e4m3 or s0e5m3")),
        ("rows(align=2)", ("no such field",)),
        ("gate_up(order=up_first)", ("lacks a field",)),
    ],
)
def test_a_name_that_is_not_known(name, parts):
    check_failure(call("layouts", name), 2, *parts)
    assert call("layouts", name, "--json").document["error"]["error"] == "LayoutError"
