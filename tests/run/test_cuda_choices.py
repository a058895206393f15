"""What was measured on GPUs orders the kernels and sets how they run, and plans show it; no GPU is needed."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, fields, is_dataclass, replace

import numpy as np
import pytest
import torch

import halfbyte.kernels
from halfbyte import plans
from halfbyte.errors import FormatError, NoKernelError, UsageError
from halfbyte.kernels import KERNELS, Kernel, LinearArgs, ordered, select
from halfbyte.kernels.base import capability, linear_cost
from halfbyte.kernels.cuda import ceilings, choices, launch
from halfbyte.kernels.cuda.ceilings import Ceiling
from halfbyte.kernels.cuda.launch import why_not
from halfbyte.layouts import LAYOUTS, Columns, Fragments
from halfbyte.ops import pack, plan
from helpers_run import DTYPES, LINEAR, call_like, random_weight

MEASURED = {
    "gpu": "NVIDIA H200",
    "driver": "570.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "date": "2026-11-30",
    "command": "python -m benchmarks.cuda",
}


def entry(shape, *rows, **changes):
    """One of the choices; rows are (last M or None, kernel, configuration, microseconds)."""
    spans = [
        {"to": to, "kernels": [{"kernel": name, "configuration": made, "microseconds": times}]}
        for to, name, made, times in rows
    ]
    return {"measurement": "h200", "capability": 90, "dtypes": ["bfloat16"], "shape": shape, "rows": spans} | changes


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Choices that replace the file's."""

    def replace_with(*entries):
        file = tmp_path / "choices.json"
        file.write_text(json.dumps({"measurements": {"h200": MEASURED}, "choices": entries}))
        held = choices.read(file)
        choices._nearest.cache_clear()
        monkeypatch.setattr(choices, "entries", lambda: held)

    yield replace_with
    choices._nearest.cache_clear()


def names(*call):
    return [choice.kernel for choice in choices.pick(*call)]


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


DAMAGED = {
    "": "JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "[]": "TypeError: list indices must be integers or slices, not str",
    '{"measurements": {}}': "KeyError: 'choices'",
}


class TestFile:
    @pytest.mark.parametrize("text", DAMAGED)
    def test_one_that_is_damaged(self, text, tmp_path):
        (tmp_path / "some.json").write_text(text)
        with pytest.raises(FormatError) as caught:
            choices.read(tmp_path / "some.json")
        assert str(caught.value) == f"some.json is damaged: got {DAMAGED[text]}"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"measurement": "none"}, "KeyError: 'none'"),
            ({"capability": None, "dtypes": None}, "TypeError: cannot unpack non-iterable NoneType object"),
            ({"dtypes": []}, "ValueError: not enough values to unpack (expected at least 1, got 0)"),
            ({"rows": [{"to": 4, "kernels": []}]}, "ValueError: rows do not go up to null: [4]"),
            (
                {"rows": [{"to": to, "kernels": []} for to in (8, 4, None)]},
                "ValueError: rows do not go up to null: [8, 4, None]",
            ),
            (
                {"rows": [{"to": to, "kernels": []} for to in (None, None)]},
                "ValueError: rows do not go up to null: [None, None]",
            ),
            ({"rows": [{"to": None, "kernels": [{"kernel": "a"}]}]}, "KeyError: 'configuration'"),
        ],
    )
    def test_a_damaged_entry(self, changes, message, measured):
        with pytest.raises(FormatError) as caught:
            measured(entry([64, 64], (None, "a", {}, {}), **changes))
        assert str(caught.value) == f"choices.json is damaged: got {message}"

    def test_a_shape_of_three(self, measured):
        with pytest.raises(FormatError, match=r"choices.json is damaged: got ValueError: too many values to unpack"):
            measured(entry([1, 64, 64], (None, "a", {}, {})))

    def test_a_measurement_without_its_provenance(self, tmp_path):
        held = {"measurements": {"h200": {"gpu": "NVIDIA H200", "date": "today"}}, "choices": []}
        (tmp_path / "some.json").write_text(json.dumps(held))
        with pytest.raises(FormatError) as caught:
            choices.read(tmp_path / "some.json")
        assert str(caught.value) == (
            "some.json is damaged: got ValueError: "
            "a measurement states gpu, driver, torch, triton, date, command, not gpu, date"
        )


def problems(entries):
    """What of choices cannot be followed: kernels that are not there, or decline, and configurations that are none."""
    known = {kernel.name: kernel for kernel in LINEAR}
    for one in entries:
        first = 1
        for last, chosen in one.rows:
            for choice in chosen:
                where = f"{choice.kernel} at {one.shape}, M {first}-{last}"
                kernel = known.get(choice.kernel)
                if kernel is None:
                    yield f"{where}: no such kernel"
                    continue
                if any(rows < first or (last and rows > last) for rows in choice.microseconds):
                    yield f"{where}: measured at another M"
                for dtype in one.dtypes:
                    for rows in (first, last or 1 << 14):
                        of = {"shape": one.shape, "rows": rows, "capability": one.capability, "dtype": dtype}
                        yield from (f"{where}, {dtype}: {problem}" for problem in misfits(kernel, choice, of))
            first = (last or 0) + 1


def misfits(kernel, choice, of):
    layouts = [*LAYOUTS, *(Fragments(dtype) for dtype in ("bfloat16", "float16")), Columns(align=16)]
    calls = [call_like(device="cuda", layout=layout, **of) for layout in layouts]
    accepted = [call for call in calls if not kernel.refuse(call)]
    if not accepted:
        yield f"declined: {min(map(kernel.refuse, calls), key=len)}"
        return
    default = kernel.configure(accepted[0]) if kernel.configure else None
    own = {field.name for field in fields(default)} if is_dataclass(default) else set()
    if set(choice.configuration) - own:
        yield f"no such fields: {sorted(set(choice.configuration) - own)}"
        return
    made = replace(default, **choice.configuration) if own else default
    tested = getattr(sys.modules[kernel.launch.__module__], "CONFIGURATIONS", None)
    if tested is not None and made not in tested:
        yield f"not one of those that are tested: {made}"


class TestContract:
    def test_all_in_the_file_can_be_followed(self, monkeypatch):
        monkeypatch.setattr(launch, "missing", lambda: None)
        monkeypatch.setattr(launch, "untested", lambda: None)
        assert list(problems(choices.entries())) == []

    def test_its_measurements_have_ceilings(self):
        gpus = {choice.measurement["gpu"] for one in choices.entries() for _, held in one.rows for choice in held}
        assert gpus <= set(ceilings.CEILINGS)

    def test_what_cannot_be_followed_is_found(self, measured):
        measured(
            entry([64, 64], (4, "fastest", {}, {}), (None, "reference-torch", {}, {"8": 3.5})),
            entry([64, 32], (8, "reference-torch", {"tiles": 4}, {"16": 3.5}), (None, "cpu-bf16", {}, {})),
        )
        assert [line.removesuffix("()") for line in problems(choices.entries())] == [
            "fastest at (64, 64), M 1-4: no such kernel",
            "reference-torch at (64, 32), M 1-8: measured at another M",
            *["reference-torch at (64, 32), M 1-8, bfloat16: no such fields: ['tiles']"] * 2,
            *["cpu-bf16 at (64, 32), M 9-None, bfloat16: declined: ('runs on the CPU, not on cuda',)"] * 2,
        ]


# Plans on a GPU that is not there


@dataclass(frozen=True)
class Made:
    warps: int = 4
    tiles: int = 1


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
        configure=lambda call: choices.configured(call, name, Made(tiles=2 if call.rows > 8 else 1)),
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
    def test_the_best_measured_comes_first(self, measured):
        measured(
            entry(
                [64, 64],
                (None, "many", {}, {}),
                rows=[
                    {
                        "to": 2,
                        "kernels": [{"kernel": name, "configuration": {}} for name in ("reference-torch", "many")],
                    },
                    {"to": None, "kernels": [{"kernel": "many", "configuration": {}}]},
                ],
            )
        )

        def order(rows, **of):
            return [kernel.name for kernel in ordered(LinearArgs, call_like(device="cuda", rows=rows, **of))]

        assert order(2, capability=90) == ["reference-torch", "many", "few"]
        assert order(3, capability=90) == ["many", "few", "reference-torch"]
        assert order(2, capability=80) == order(2) == ["few", "many", "reference-torch"]
        assert select(LinearArgs, call_like(device="cuda", capability=90)).name == "reference-torch"

    def test_configurations_are_the_defaults_but_for_what_was_measured(self, measured):
        measured(entry([64, 64], (4, "few", {"warps": 8}, {}), (None, "few", {}, {})))
        few = halfbyte.kernels.KERNELS[0]
        of = {"device": "cuda", "capability": 90}
        assert few.configure(call_like(rows=1, **of)) == Made(warps=8, tiles=1)
        assert few.configure(call_like(rows=16, **of)) == Made(warps=4, tiles=2)
        assert halfbyte.kernels.KERNELS[1].configure(call_like(rows=1, **of)) == Made()


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
            ["kernel", "few (best on NVIDIA H200 at 4096x4096, measured 2026-11-30)"],
            ["how", "warps=8 tiles=1"],
            ["M 1-8", "few warps=8 tiles=1"],
            ["M 9-16", "few warps=8 tiles=2"],
            ["M 17-", "many warps=4 tiles=2"],
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
            (1, 8, "few warps=8 tiles=1"),
            (9, 16, "few warps=8 tiles=2"),
            (17, None, "many warps=4 tiles=2"),
        )
        # What is expected scales with what the call takes at the least, from the nearest M and shape.
        larger = planned(shape=(8192, 4096))
        ratio = (linear_cost(larger.call).bytes / 4e12 + 1e-6) / (linear_cost(chosen.call).bytes / 4e12 + 1e-6)
        assert larger.time.endswith(f"; {6 * ratio:.1f} us expected")
        assert larger.why == "best on NVIDIA H200 at 4096x4096, measured 2026-11-30"
        assert planned(16).time.endswith("; 7.0 us expected")
        assert planned(512).time.endswith("; 50.0 us expected")
        assert planned(512).refusals == (("few", "takes up to 16 tokens, not 512"),)
        assert planned(512).time.startswith(f"at least {1e6 * 2 * 512 * 4096**2 / 800e12:.1f} us on")

    def test_another_dtype_than_what_was_measured(self, measured):
        measured(entry([64, 64], (None, "few", {"warps": 8}, {"1": 3.5}), dtypes=["bfloat16", "float16"]))
        assert planned().why == "best on NVIDIA H200 at 64x64, measured 2026-11-30"
        other = planned(dtype="float16")
        assert other.why == "best with bfloat16 on NVIDIA H200 at 64x64, measured 2026-11-30"
        assert other.configuration == planned().configuration == "warps=8 tiles=1"
        assert planned().time.endswith(" us expected")
        assert other.time.endswith("; not measured")

    def test_the_best_declines(self, measured):
        measured(
            entry(
                [64, 64],
                (None, "few", {}, {}),
                rows=[{"to": None, "kernels": [{"kernel": name, "configuration": {}} for name in ("few", "many")]}],
            )
        )
        assert planned(17).why == "best of those that accept on NVIDIA H200 at 64x64, measured 2026-11-30"
        assert planned(17).time.endswith("; not measured")

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
