"""What was measured on GPUs orders the kernels and sets how they run, and plans show it; no GPU is needed."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

import halfbyte.kernels
from halfbyte import plans, tiers, tuning
from halfbyte.errors import FormatError, NoKernelError, UsageError
from halfbyte.kernels import KERNELS, Kernel, LinearArgs, ordered, select
from halfbyte.kernels.base import capability, linear_cost
from halfbyte.kernels.cuda import ceilings, choices, launch
from halfbyte.kernels.cuda.ceilings import Ceiling
from halfbyte.kernels.cuda.launch import why_not
from halfbyte.ops import pack, plan
from halfbyte.tuning import calls_of
from helpers_run import DTYPES, call_like, random_weight

MEASURED = {
    "gpu": "NVIDIA H200",
    "multiprocessors": 132,
    "driver": "570.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "date": "2026-11-30",
    "command": "python -m benchmarks.cuda",
}


def entry(shape, *rows, **changes):
    """One of the choices; rows are (last M or None, kernel, configuration, microseconds), in order."""
    kernels, first = {}, 1
    for to, name, made, times in rows:
        held = kernels.setdefault(name, {"measurement": "h200", "from": first, "rows": []})
        held["rows"].append({"to": to, "configuration": made, "microseconds": times})
        first = (to or 0) + 1
    head = {"op": "linear", "capability": 90, "dtypes": ["bfloat16"], "shape": shape}
    return head | {"kernels": kernels} | changes


def content(*entries):
    return {"format": choices.FORMAT, "measurements": {"h200": MEASURED}, "choices": entries}


def together(*names):
    """Kernels for all M, the fastest first."""
    return {
        name: {
            "measurement": "h200",
            "from": 1,
            "rows": [{"to": None, "configuration": {}, "microseconds": {"1": 1.0 + i}}],
        }
        for i, name in enumerate(names)
    }


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Choices that replace the file's."""

    def replace_with(*entries):
        file = tmp_path / "choices.json"
        file.write_text(json.dumps(content(*entries)))
        monkeypatch.setattr(choices, "SHIPPED", file)
        held = choices.read(file)
        choices._by_distance.cache_clear()
        monkeypatch.setattr(choices, "entries", lambda: held)

    yield replace_with
    choices._by_distance.cache_clear()


def names(capability, shape, rows, dtype):
    call = call_like(capability=capability, shape=shape, rows=rows, dtype=dtype)
    return [choice.kernel for choice in choices.pick(call)]


class TestPick:
    def test_the_first_range_that_reaches_m(self, measured):
        measured(entry([4096, 4096], (4, "a", {}, {}), (16, "b", {}, {}), (None, "c", {}, {})))
        found = {m: names(90, (4096, 4096), m, "bfloat16") for m in (0, 1, 4, 5, 16, 17, 10**6)}
        assert found == {0: ["a"], 1: ["a"], 4: ["a"], 5: ["b"], 16: ["b"], 17: ["c"], 10**6: ["c"]}
        assert choices.ends(call_like(shape=(4096, 4096), capability=90)) == (4, 16)

    @pytest.mark.parametrize(
        ("shape", "kernel"),
        [
            ((4096, 4096), "square"),
            ((14336, 4096), "tall"),
            ((4096, 14336), "wide"),
            ((5120, 5120), "square"),
            ((18944, 3584), "tall"),
            ((3584, 18944), "wide"),
            ((1, 16), "square"),
            ((8, 4096, 14336), "wide"),  # experts are as their matrices
            ((7168, 4096), "square"),  # log2 of the sizes 0.81 and 1, of N / K 0.81 and 1
            ((8192, 4096), "tall"),  # 1 and 0.81, 1 and 0.81
        ],
    )
    def test_the_nearest_shape(self, shape, kernel, measured):
        shapes = {"square": [4096, 4096], "tall": [14336, 4096], "wide": [4096, 14336]}
        measured(*(entry(of, (None, name, {}, {})) for name, of in shapes.items()))
        assert names(90, shape, 1, "bfloat16") == [kernel]

    def test_nothing_was_measured(self, measured):
        measured(entry([4096, 4096], (None, "a", {}, {})))
        assert names(90, (64, 64), 1, "bfloat16") == ["a"]
        assert names(80, (64, 64), 1, "bfloat16") == []
        assert names(90, (64, 64), 1, "float16") == []
        assert names(90, (0, 64), 1, "bfloat16") == []
        assert choices.ends(call_like(capability=80)) == ()

    def test_a_dtype_of_its_own(self, measured):
        both = entry([64, 64], (None, "a", {}, {}), dtypes=["bfloat16", "float16"])
        measured(both, entry([64, 64], (None, "b", {}, {}), capability=100))
        assert names(90, (64, 64), 1, "float16") == ["a"]
        assert names(100, (64, 64), 1, "bfloat16") == ["b"]


WHAT_TO_DO = "delete the file, and run halfbyte tune"
DAMAGED = {
    "": "damaged choices of kernels: got JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "[]": "damaged choices of kernels: got AttributeError: 'list' object has no attribute 'get'",
    '{"format": 2, "measurements": {}}': "damaged choices of kernels: got KeyError: 'choices'",
    '{"measurements": {}, "choices": []}': "choices of kernels in another format, expected 2",
    '{"format": 1}': "choices of kernels in another format: got 1, expected 2",
}


def rows(*ends):
    return [{"to": to, "configuration": {}, "microseconds": {}} for to in ends]


class TestFile:
    @pytest.mark.parametrize("text", DAMAGED)
    def test_one_that_is_damaged_or_older(self, text, tmp_path):
        file = tmp_path / "some.json"
        file.write_text(text)
        with pytest.raises(FormatError) as caught:
            choices.read(file)
        assert str(caught.value) == f"{file}: {DAMAGED[text]}; {WHAT_TO_DO}"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kernels": {"a": {"measurement": "none", "from": 1, "rows": []}}}, "KeyError: 'none'"),
            ({"kernels": {"a": {"measurement": "h200", "rows": []}}}, "KeyError: 'from'"),
            ({"kernels": []}, "AttributeError: 'list' object has no attribute 'items'"),
            ({"shape": [0, 64]}, "ValueError: N is a whole number from 1 on, not 0"),
            ({"dtypes": None}, "TypeError: cannot unpack non-iterable NoneType object"),
            ({"shape": [64, 1.5]}, "ValueError: K is a whole number from 1 on, not 1.5"),
            ({"op": ["linear"]}, "TypeError: ['linear'] is no text"),
            ({"capability": "90"}, "ValueError: a compute capability is a whole number from 1 on, not '90'"),
            ({"dtypes": "bfloat16"}, "TypeError: 'bfloat16' is no list of dtypes"),
            ({"dtypes": ["bfloat16", None]}, "TypeError: None is no text"),
            ({"dtypes": []}, "ValueError: not enough values to unpack (expected at least 1, got 0)"),
            ({"shape": [1, 64, 64]}, "ValueError: too many values to unpack (expected 2"),
            *(
                (
                    {"kernels": {"a": {"measurement": "h200", "from": first, "rows": rows(*ends)}}},
                    f"ValueError: rows of a do not rise: from {first} to {list(ends)}",
                )
                for first, ends in (
                    (1, ()),
                    (1, (8, 4)),
                    (1, (None, None)),
                    (1, (None, 8)),
                    (9, (8, None)),
                    (1, (4, 4)),
                )
            ),
            (
                {"kernels": {"a": {"measurement": "h200", "from": 1, "rows": [{"to": None, "configuration": {}}]}}},
                "KeyError: 'microseconds'",
            ),
            *(
                (
                    {"kernels": {"a": {"measurement": "h200", "from": first, "rows": rows(end, None)}}},
                    f"ValueError: M of a is a whole number from 1 on, not {wrong}",
                )
                for first, end, wrong in ((0, 8, 0), (1.5, 8, 1.5), (1, 8.5, 8.5), (1, True, True))
            ),
            *(
                ({"kernels": {"a": {"measurement": "h200", "from": 1, "rows": [rows(None)[0] | change]}}}, message)
                for change, message in (
                    ({"microseconds": {"1": 0}}, "ValueError: microseconds are a number above 0, not 0"),
                    ({"microseconds": {"1": math.nan}}, "ValueError: microseconds are a number above 0, not nan"),
                    ({"microseconds": {"1": "5"}}, "ValueError: microseconds are a number above 0, not '5'"),
                    ({"microseconds": {"0": 5}}, "ValueError: M is a whole number from 1 on, not 0"),
                    ({"configuration": []}, "TypeError: [] is no configuration of a"),
                )
            ),
        ],
    )
    def test_a_damaged_entry(self, changes, message, measured, tmp_path):
        with pytest.raises(FormatError) as caught:
            measured(entry([64, 64], (None, "a", {}, {})) | changes)
        said = f"{tmp_path / 'choices.json'}: damaged choices of kernels: got {message}"
        assert str(caught.value).startswith(said)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"multiprocessors": 0}, "ValueError: multiprocessors is a whole number from 1 on, not 0"),
            ({"multiprocessors": None}, "ValueError: multiprocessors is a whole number from 1 on, not None"),
            ({"gpu": ["H200"]}, "TypeError: ['H200'] is no text"),
        ],
    )
    def test_a_damaged_measurement(self, change, message, tmp_path):
        held = content() | {"measurements": {"h200": MEASURED | change}}
        (tmp_path / "some.json").write_text(json.dumps(held))
        with pytest.raises(FormatError) as caught:
            choices.read(tmp_path / "some.json")
        assert f"damaged choices of kernels: got {message}; {WHAT_TO_DO}" in str(caught.value)

    def test_one_that_is_too_deep(self, tmp_path):
        (tmp_path / "some.json").write_text("[" * 200_000)
        with pytest.raises(FormatError, match="damaged choices of kernels: got RecursionError"):
            choices.read(tmp_path / "some.json")

    def test_a_measurement_without_its_provenance(self, tmp_path):
        held = content() | {"measurements": {"h200": {"gpu": "NVIDIA H200", "date": "today"}}}
        (tmp_path / "some.json").write_text(json.dumps(held))
        with pytest.raises(FormatError) as caught:
            choices.read(tmp_path / "some.json")
        assert "a measurement states gpu, multiprocessors, driver, torch, triton, date, command, not gpu, date" in str(
            caught.value
        )


@pytest.fixture
def user(monkeypatch, tmp_path):
    """A user's file, and another that is shipped; entries of each."""
    shipped, own = tmp_path / "shipped.json", tmp_path / "cache" / "halfbyte" / "choices.json"
    own.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HALFBYTE_CHOICES", raising=False)
    monkeypatch.setattr(choices, "SHIPPED", shipped)

    def write(*entries, own_entries=None):
        shipped.write_text(json.dumps(content(*entries)))
        if own_entries is not None:
            own.write_text(json.dumps(content(*own_entries)))
        choices.entries.cache_clear()
        choices._by_distance.cache_clear()
        return own

    yield write
    choices.entries.cache_clear()
    choices._by_distance.cache_clear()


class TestUsersFile:
    def call(self, **of):
        return call_like(**{"capability": 90, "shape": (4096, 4096), "rows": 1} | of)

    def test_it_replaces_the_kernels_and_shapes_that_it_has(self, user):
        own = user(
            entry([4096, 4096], (None, "a", {}, {"1": 5.0}), kernels=together("a", "b")),
            entry([8192, 8192], (None, "a", {}, {"1": 5.0})),
            own_entries=[entry([4096, 4096], (None, "a", {"warps": 8}, {"1": 9.0}))],
        )
        found = choices.pick(self.call())
        assert [(one.kernel, one.configuration, one.origin) for one in found] == [
            ("b", {}, "shipped"),
            ("a", {"warps": 8}, str(own)),
        ]
        (other,) = choices.pick(self.call(shape=(8192, 8192)))
        assert other.origin == "shipped"

    def test_its_shapes_are_beside_those_that_are_shipped(self, user):
        user(entry([4096, 4096], (None, "a", {}, {})), own_entries=[entry([1024, 1024], (None, "b", {}, {}))])
        assert [one.kernel for one in choices.pick(self.call())] == ["a"]
        assert [one.kernel for one in choices.pick(self.call(shape=(1500, 1024)))] == ["b"]

    def test_where_it_is(self, user, monkeypatch, tmp_path):
        own = user(entry([64, 64], (None, "a", {}, {})))
        assert choices.user_file() == own
        assert len(choices.entries()) == 1
        monkeypatch.setenv("HALFBYTE_CHOICES", str(tmp_path / "mine.json"))
        assert choices.user_file() == tmp_path / "mine.json"
        monkeypatch.setenv("HALFBYTE_CHOICES", "none")
        assert choices.user_file() is None

    def test_one_that_is_named_and_not_there(self, user, monkeypatch, tmp_path):
        user(entry([64, 64], (None, "a", {}, {})))
        monkeypatch.setenv("HALFBYTE_CHOICES", str(tmp_path / "mine.json"))
        with pytest.raises(UsageError) as caught:
            choices.entries()
        assert str(caught.value) == (
            f"HALFBYTE_CHOICES names no file: got {tmp_path / 'mine.json'}; "
            "run halfbyte tune, which writes it, or unset it"
        )

    def test_one_that_cannot_be_read(self, user):
        own = user(entry([64, 64], (None, "a", {}, {})))
        own.mkdir()
        with pytest.raises(UsageError) as caught:
            choices.entries()
        assert str(caught.value) == (
            f"{own}: choices of kernels cannot be read: got Is a directory; HALFBYTE_CHOICES=none"
        )

    def test_a_user_without_a_home(self, user, monkeypatch):
        user(entry([64, 64], (None, "a", {}, {})))
        monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-has-this-name")
        assert len(choices.entries()) == 1

    def test_a_damaged_one_is_told(self, user):
        own = user(entry([64, 64], (None, "a", {}, {})), own_entries=[])
        own.write_text("{")
        with pytest.raises(FormatError, match="damaged choices of kernels"):
            choices.pick(self.call())
        for precision in ("exact", "fp8"):  # what is not on a GPU needs none
            assert plan("linear", pack(random_weight(16, 16)), rows=1, precision=precision).kernel
        own.write_text(json.dumps({"choices": []}))
        with pytest.raises(FormatError, match="in another format, expected 2; delete the file, and run halfbyte tune"):
            choices.pick(self.call())

    @pytest.mark.parametrize("made", [{"lanes": 4}, {"warps": 3}, {"warps": "4"}, {"tiles": [1]}])
    def test_a_configuration_that_a_kernel_does_not_have(self, made, user):
        own = user(own_entries=[entry([64, 64], (None, "few", made, {}))])
        with pytest.raises(FormatError) as caught:
            choices.configured(self.call(), "few", Made(), KNOWN)
        assert str(caught.value) == (f"{own}: choices that few does not have: got {made}; {WHAT_TO_DO}")

    def test_a_configuration_is_one_of_the_kernels_own(self, user):
        user(own_entries=[entry([64, 64], (None, "few", {"warps": 8.0}, {}))])
        found = choices.configured(self.call(), "few", Made(), KNOWN)
        assert (found, type(found.warps)) == (Made(8, 1), int)

    def test_doctor_tells_both(self, user):
        own = user(
            entry([64, 64], (None, "a", {}, {})),
            entry([64, 128], (None, "a", {}, {})),
            own_entries=[entry([64, 64], (None, "a", {}, {}))],
        )
        assert tiers.chosen() == {
            "shipped": "2 shapes on NVIDIA H200, 2026-11-30",
            "user": f"1 shapes on NVIDIA H200, 2026-11-30 ({own})",
        }
        own.write_text("{}")
        assert tiers.chosen()["user"].startswith(f"{own}: choices of kernels in another format, expected 2")
        own.unlink()
        assert tiers.chosen()["user"] == f"none ({own})"


def problems(entries):
    """What of choices cannot be followed: kernels that are not there, or decline, and configurations that are none."""
    known = {kernel.name: kernel for kernel in KERNELS}
    for one in entries:
        for name, ranges in one.kernels.items():
            for held in ranges:
                where = f"{name} at {one.shape}, M {held.first}-{held.last}"
                kernel = known.get(name)
                if kernel is None or kernel.op != one.op:
                    yield f"{where}: no such kernel"
                    continue
                if any(m < held.first or (held.last and m > held.last) for m in held.choice.microseconds):
                    yield f"{where}: measured at another M"
                for dtype in one.dtypes:
                    for m in (held.first, held.last or 1 << 14):
                        calls = calls_of(OPS[kernel.op], one.shape, m, dtype, one.capability)
                        yield from (f"{where}, {dtype}: {problem}" for problem in misfits(kernel, held.choice, calls))


OPS = {kind.op: kind for kind in tuning.OPS.values()}


def misfits(kernel, choice, calls):
    accepted = [call for call in calls if not kernel.refuse(call)]
    if not accepted:
        yield f"declined: {min(map(kernel.refuse, calls), key=len)}"
        return
    kinds = {type(made) for made in kernel.configurations(accepted[0])}
    own = {field.name for kind in kinds for field in fields(kind)}
    if set(choice.configuration) - own:
        yield f"no such fields: {sorted(set(choice.configuration) - own)}"
        return
    tested = sys.modules[kernel.module].CONFIGURATIONS
    if not any(kind(**choice.configuration) in tested for kind in kinds):
        yield f"not one of those that are tested: {choice.configuration}"


class TestContract:
    def test_all_in_the_file_can_be_followed(self, monkeypatch):
        monkeypatch.setattr(launch, "missing", lambda: None)
        monkeypatch.setattr(launch, "untested", lambda: None)
        assert list(problems(choices.read(choices.SHIPPED))) == []

    def test_its_measurements_have_ceilings(self):
        held = [one.choice for entry in choices.read(choices.SHIPPED) for of in entry.kernels.values() for one in of]
        assert {choice.measurement["gpu"] for choice in held} <= set(ceilings.CEILINGS)

    def test_what_cannot_be_followed_is_found(self, measured, monkeypatch):
        monkeypatch.setattr(launch, "missing", lambda: None)
        monkeypatch.setattr(launch, "untested", lambda: None)
        measured(
            entry([64, 64], (4, "fastest", {}, {}), (None, "triton-gemm", {}, {"4": 3.5})),
            entry([64, 32], (16, "triton-decode", {"tiles": 4}, {}), (None, "triton-gemm", {"parts": 3}, {})),
            entry([64, 16], (None, "triton-decode", {}, {})),
        )
        assert list(problems(choices.entries())) == [
            "fastest at (64, 64), M 1-4: no such kernel",
            "triton-gemm at (64, 64), M 5-None: measured at another M",
            *["triton-decode at (64, 32), M 1-16, bfloat16: no such fields: ['tiles']"] * 2,
            *["triton-gemm at (64, 32), M 17-None, bfloat16: not one of those that are tested: {'parts': 3}"] * 2,
            "triton-decode at (64, 16), M 1-None, bfloat16: declined: ('takes up to 16 tokens, not 16384',)",
        ]


# Plans on a GPU that is not there


@dataclass(frozen=True)
class Made:
    warps: int = 4
    tiles: int = 1


KNOWN = tuple(Made(warps, tiles) for warps in (4, 8) for tiles in (1, 2, 3, 4, 8))


def for_gpus(name, *, most_rows=None, scratch=None):
    """A kernel as those for GPUs are."""

    def refuse(call):
        reasons = list(why_not(call))
        if most_rows is not None and call.rows > most_rows:
            reasons.append(f"takes up to {most_rows} tokens, not {call.rows}")
        return tuple(reasons)

    def run(args):
        raise AssertionError("a plan runs nothing")

    run.__module__ = "halfbyte.kernels.cuda.standin"
    return Kernel(
        name=name,
        bundle=LinearArgs,
        description="",
        refuse=refuse,
        load=lambda call: None,
        launch=run,
        cost=linear_cost,
        configure=lambda call: choices.configured(call, name, Made(tiles=2 if call.rows > 8 else 1), KNOWN),
        scratch=scratch,
    )


@pytest.fixture
def table(monkeypatch):
    """Two kernels for GPUs, and the reference."""
    kernels = (
        for_gpus("few", most_rows=16),
        for_gpus("many", scratch=lambda call: 1024 * call.rows),
        *(kernel for kernel in KERNELS if kernel.name == "reference-torch"),
    )
    monkeypatch.setattr(launch, "missing", lambda: None)
    monkeypatch.setattr(launch, "unknown", lambda: None)
    monkeypatch.setattr(halfbyte.kernels, "KERNELS", kernels)
    monkeypatch.setattr(plans, "KERNELS", kernels)


def planned(rows=1, device="cuda:sm_90", shape=(4096, 4096), **arguments):
    return plan("linear", pack(random_weight(*shape)), rows=rows, device=device, **arguments)


@pytest.mark.usefixtures("table")
class TestOrder:
    def order(self, rows, **of):
        return [kernel.name for kernel in ordered(LinearArgs, call_like(device="cuda", rows=rows, **of))]

    def test_the_best_measured_comes_first(self, measured):
        measured(
            entry(
                [64, 64],
                (2, "reference-torch", {}, {"1": 3.0, "2": 4.0}),
                (None, "many", {}, {"4": 2.0}),
            )
        )
        assert self.order(2, capability=90) == ["reference-torch", "few", "many"]
        assert self.order(3, capability=90) == ["many", "few", "reference-torch"]
        assert self.order(2, capability=80) == self.order(2) == ["few", "many", "reference-torch"]
        assert select(LinearArgs, call_like(device="cuda", capability=90)).name == "reference-torch"

    def test_times_at_the_next_measured_m_decide(self, measured):
        """Between two of a kernel's own they lie on a line of logarithms."""
        held = {
            "few": [{"to": None, "configuration": {}, "microseconds": {"1": 1.0, "16": 16.0}}],
            "many": [{"to": None, "configuration": {}, "microseconds": {"4": 3.0, "16": 20.0}}],
        }
        kernels = {name: {"measurement": "h200", "from": 1, "rows": rows} for name, rows in held.items()}
        measured(entry([64, 64], (None, "a", {}, {}), kernels=kernels))
        found = {m: names(90, (64, 64), m, "bfloat16") for m in (1, 2, 4, 5, 16, 64)}
        few, many = ["few", "many"], ["many", "few"]
        assert found == {1: few, 2: many, 4: many, 5: few, 16: few, 64: few}
        assert choices.ends(call_like(shape=(64, 64), capability=90)) == (1, 4, 16)

    def test_an_op_has_its_own(self, measured):
        measured(entry([64, 64], (None, "a", {}, {})), entry([64, 64], (None, "b", {}, {}), op="linear-fp8"))
        calls = [call_like(shape=(64, 64), capability=90, op=op) for op in ("linear", "linear-fp8", "other")]
        assert [[one.kernel for one in choices.pick(call)] for call in calls] == [["a"], ["b"], []]

    def test_ranges_begin_where_they_say(self, measured):
        """Below, another shape's choices hold."""
        measured(
            entry([64, 64], (None, "many", {}, {}), kernels={"many": together("many")["many"] | {"from": 17}}),
            entry([64, 128], (None, "few", {}, {})),
        )
        assert names(90, (64, 64), 16, "bfloat16") == ["few"]
        assert names(90, (64, 64), 17, "bfloat16") == ["many"]

    def test_configurations_are_the_class_s_defaults_but_for_what_was_measured(self, measured):
        measured(entry([64, 64], (4, "few", {"warps": 8}, {}), (None, "few", {}, {})))
        few = halfbyte.kernels.KERNELS[0]
        of = {"device": "cuda", "capability": 90}
        assert few.configure(call_like(rows=1, **of)) == Made(warps=8, tiles=1)
        assert few.configure(call_like(rows=16, **of)) == Made(warps=4, tiles=1)
        assert halfbyte.kernels.KERNELS[1].configure(call_like(rows=1, **of)) == Made()
        assert few.configure(call_like(rows=16, **of | {"capability": 80})) == Made(tiles=2)

    def test_a_model_holds_where_the_shape_was_not_measured(self, measured):
        measured(entry([64, 64], (None, "few", {"warps": 8}, {})))
        call = call_like(shape=(64, 64), capability=90)
        there, elsewhere = call, replace(call, shape=(64, 128))
        default, known = Made(tiles=3), (Made(tiles=3), Made(warps=8))
        found = [choices.configured(c, "few", default, known, model=True) for c in (there, elsewhere)]
        assert found == [Made(warps=8), default]
        assert [choices.configured(c, "few", default, known) for c in (there, elsewhere)] == [Made(warps=8)] * 2


@pytest.mark.usefixtures("table")
class TestPlans:
    def test_what_was_measured(self, measured, monkeypatch):
        monkeypatch.setitem(ceilings.CEILINGS, "NVIDIA H200", Ceiling(read=4e12, start=1e-6, products=800e12))
        measured(
            entry([4096, 4096], (16, "few", {"warps": 8}, {"1": 6.0, "16": 7.0}), (None, "many", {}, {"512": 50.0}))
        )
        chosen = planned()
        lines = [re.split("  +", line, maxsplit=1) for line in str(chosen).splitlines()]
        assert lines == [
            ["op", "linear N=4096 K=4096 M=1, layout rows"],
            ["arrays", "torch on cuda (sm_90), bfloat16 to bfloat16"],
            ["kernel", "few (best on NVIDIA H200 at 4096x4096, measured 2026-11-30, shipped)"],
            ["how", "warps=8 tiles=1"],
            ["M 1-16", "few warps=8 tiles=1"],
            ["M 17-", "many warps=4 tiles=1"],
            ["bytes", "9,453,572"],
            ["flops", "33,554,432"],
            ["time", "at least 3.4 us on NVIDIA H200 (4 TB/s + 1 us, 800 TFLOP/s); 6.0 us expected"],
            ["extra", "0 bytes of the weight held twice"],
            [
                "note",
                "activations that are not contiguous or do not begin at a multiple of 16 bytes "
                "are copied once: 4,096 values",
            ],
        ]
        assert chosen.ranges == (
            (1, 16, "few warps=8 tiles=1"),
            (17, None, "many warps=4 tiles=1"),
        )
        # What is expected scales with what the call takes at the least, from the nearest M and shape.
        larger = planned(shape=(8192, 4096))
        ratio = (linear_cost(larger.call).bytes / 4e12 + 1e-6) / (linear_cost(chosen.call).bytes / 4e12 + 1e-6)
        assert larger.time.endswith(f"; {6 * ratio:.1f} us expected")
        assert larger.why == "best on NVIDIA H200 at 4096x4096, measured 2026-11-30, shipped"
        assert planned(16).time.endswith("; 7.0 us expected")
        assert planned(512).time.endswith("; 50.0 us expected")
        assert planned(512).refusals == (("few", "takes up to 16 tokens, not 512"),)
        assert planned(512).time.startswith(f"at least {1e6 * 2 * 512 * 4096**2 / 800e12:.1f} us on")

    def test_another_dtype_than_what_was_measured(self, measured):
        measured(entry([64, 64], (None, "few", {"warps": 8}, {"1": 3.5}), dtypes=["bfloat16", "float16"]))
        assert planned().why == "best on NVIDIA H200 at 64x64, measured 2026-11-30, shipped"
        other = planned(dtype="float16")
        assert other.why == "best with bfloat16 on NVIDIA H200 at 64x64, measured 2026-11-30, shipped"
        assert other.configuration == planned().configuration == "warps=8 tiles=1"
        assert planned().time.endswith(" us expected")
        assert other.time.endswith("; not measured")

    def test_the_best_declines(self, measured):
        measured(entry([64, 64], (None, "few", {}, {}), kernels=together("few", "many")))
        assert planned(17).why == "best of those that accept on NVIDIA H200 at 64x64, measured 2026-11-30, shipped"
        assert planned(17).time.endswith(" us expected")

    def test_another_than_what_was_measured(self, measured):
        measured(entry([64, 64], (None, "many", {}, {})))
        assert planned(device="cuda:sm_80").kernel == "few"
        assert (
            planned(device="cuda:sm_80").why == "first in the table that accepts; nothing was measured for it on sm_80"
        )
        assert planned(device="cuda:sm_80").time == "unknown: no ceilings of a GPU of sm_80 are known"
        refused = planned(device="cuda:sm_75")
        assert (refused.kernel, refused.ranges) == ("reference-torch", ((1, None, "reference-torch"),))
        assert refused.refusals == tuple((name, "is for sm_80 or later, not sm_75") for name in ("few", "many"))

    def test_forced(self, measured, monkeypatch):
        measured(entry([64, 64], (None, "many", {}, {})))
        monkeypatch.setenv("HALFBYTE_KERNEL", "few")
        assert (planned().kernel, planned().why) == ("few", "forced by HALFBYTE_KERNEL")
        assert planned().ranges == ((1, 8, "few warps=4 tiles=1"), (9, 16, "few warps=4 tiles=2"))
        with pytest.raises(NoKernelError, match=r"the nearest is few: takes up to 16 tokens, not 17"):
            planned(17)

    def test_scratch_and_bytes_held_twice(self, measured):
        measured()
        assert planned(32).scratch_bytes == 32768
        assert re.search(r"^scratch +32,768 bytes, shared by a stream's kernels$", str(planned(32)), re.MULTILINE)
        assert planned(1).scratch_bytes == 0
        assert "scratch" not in str(planned(1))
        w = random_weight(64, 64)
        assert plan("linear", w, rows=1, device="cuda:sm_90").extra_bytes == 0
        strided = w.replace(codes=np.asfortranarray(w.codes))
        assert plan("linear", strided, rows=1, device="cuda:sm_90").extra_bytes == w.codes.size

    def test_slow_launches_are_a_note(self, measured, monkeypatch):
        measured()
        assert not any("launcher" in note for note in planned().notes)
        monkeypatch.setattr(launch, "unknown", lambda: "the launcher of Triton 9 is not known")
        assert planned().notes[-1] == "the launcher of Triton 9 is not known"
        monkeypatch.setenv("HALFBYTE_KERNEL", "reference-torch")
        assert not any("launcher" in note for note in planned().notes)

    def test_a_gpu_that_is_there(self, measured, monkeypatch):
        """Its name says which ceilings are its; one without is told."""
        measured()
        gpus = ["NVIDIA H200", "NVIDIA Future"]
        capability.cache_clear()
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9 + index, 0))
        try:
            assert planned(device="cuda:0").call.place == "cuda (sm_90)"
            assert planned(device="cuda:0").time.endswith("; not measured")
            for device in ("cuda", "cuda:1", torch.device("cuda", 1)):
                assert planned(device=device).call.capability == 100
                assert planned(device=device).time == "unknown: no ceilings of NVIDIA Future are known"
        finally:
            capability.cache_clear()
        missing = planned(device="cuda:2")
        assert (missing.kernel, missing.call.capability, missing.ranges, missing.time) == ("reference-torch", 0, (), "")
        assert missing.refusals[0] == ("few", "needs an NVIDIA GPU, and torch sees none")

    @pytest.mark.parametrize("device", ["cuda:first", "cuda:sm_", "cuda:sm_9x", "cuda:-1", "gpu", "cpu:x", "", None])
    def test_unknown_devices(self, device):
        with pytest.raises(UsageError) as caught:
            planned(device=device)
        assert str(caught.value) == f"unknown device: got {device}, expected such as cpu, cuda, cuda:0 or cuda:sm_90"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_for_gpus_is_for_torch(dtype, monkeypatch):
    """And where none was measured, some kernel computes rows on any GPU."""
    monkeypatch.setattr(launch, "missing", lambda: None)
    for sm in (70, 80, 89, 90, 100, 120):
        call = call_like(device="cuda", capability=sm, dtype=dtype)
        assert select(LinearArgs, call).name.startswith(("reference-torch", "triton-", "gluon-"))
