"""gluon-experts-gemm and gluon-grouped: what they take, their machine code, their launches, and, on a GPU, results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_code import Program, count
from expert_cases import Case, Place, assert_meant, routing, tokens
from gluon_cases import on_gpu
from gpu_codecs import needs_triton
from halfbyte.kernels.cuda import experts_gemm
from halfbyte.kernels.cuda.experts_gemm import (
    CONFIGURATIONS,
    GLUON,
    MOST,
    SHARED,
    ExpertsGemm,
    Product,
    both,
    constants,
    for_slots,
    options,
    signature,
)
from halfbyte.kernels.cuda.launch import options_of
from halfbyte.ops import pack

EVERY = list(dict.fromkeys(way for made in CONFIGURATIONS for way in (made.first, made.second)))


@pytest.mark.parametrize("made", EVERY, ids=str)
def test_what_a_configuration_takes_is_there(made):
    for size in (2, 4):
        stages = made.stages(size)
        assert stages >= 2
        results = made.consumers * made.height(size) * 64 * size
        assert made.programs * (1024 + stages * made.stage + results) <= SHARED
    first, then = made.registers
    others = 2 if made.copiers == 4 else 1
    threads = 128 * (made.consumers + others)
    assert made.programs * first * threads <= 65536
    assert then * 128 * made.consumers + others * made.producer * 128 <= first * threads
    assert first % 8 == then % 8 == 0


def test_both_products_have_blocks_of_one_size():
    assert all(made.first.slots == made.second.slots for made in CONFIGURATIONS)


def test_more_slots_take_larger_blocks():
    sizes = [for_slots(each).first.slots for each in (0.5, *MOST, MOST[-1] + 1)]
    assert sizes == sorted(sizes)
    assert [for_slots(most) for most in MOST] == list(CONFIGURATIONS[:-1])
    assert for_slots(MOST[-1] + 1) == CONFIGURATIONS[-1]


def call_of(rows=300, top=2, dtype="bfloat16", layout="fragments", experts=6, hidden=64, inner=48, how=None, **of: Any):
    device = {"device": "cuda", "capability": 90, "library": "torch"}
    case = Case.random(experts, hidden, inner, **of)
    return case.call(device, dtype, layout, rows, top, **(how or {}))


@needs_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu", "capability": 0}, "runs on NVIDIA GPUs, not on cpu"),
        ({"capability": 80}, "is for sm_90, not sm_80"),
        ({"dtype": "float32"}, "takes bfloat16 or float16 activations, not float32"),
        ({"dtype": "float16"}, "reads the layout fragments(dtype=float16), not fragments(dtype=bfloat16)"),
        ({"precision": "fp8"}, "computes exactly, not in fp8"),
        ({"pre_scale": True}, "multiplies activations as they come, without a pre_scale"),
        ({"shape": (6, 96, 70)}, "takes hidden sizes that are multiples of 16, not 70"),
    ],
)
def test_refusals(changes, reason):
    assert GLUON.refuse(call_of()) == ()
    assert GLUON.refuse(replace(call_of(), **changes)).count(reason) == 1


@needs_triton
def test_interleaved_gates_are_refused_with_what_to_do():
    (reason,) = GLUON.refuse(call_of(gate_up_order="interleaved"))
    assert "permute_rows" in reason


FIRST = Product(1536, 2048, True, "silu", None, False, "bfloat16", "bfloat16", False, None, False, True)
SECOND = Product(2048, 768, False, None, None, False, "bfloat16", "float32", False, None, True)
CODES = [pair for made in CONFIGURATIONS for pair in ((made.first, FIRST), (made.second, SECOND))]
CODES += [
    (
        CONFIGURATIONS[0].first,
        replace(FIRST, k=720, activation="swigluoai", limit=7.0, up_first=True, per_row=True, bias="float32"),
    ),
    (CONFIGURATIONS[-1].first, replace(FIRST, gated=False, activation="relu2", dtype="float16", out_dtype="float16")),
]


@needs_triton
@pytest.mark.parametrize(("made", "product"), CODES, ids=str)
def test_machine_code(made, product):
    from halfbyte.kernels.cuda.experts_gemm_code import experts

    types = {name: of.removesuffix(":16") for name, of in signature(made, product).items()}
    code = Program(experts, types, constants(made, product), options_of(**options(made)), ("N", "K")).compile(90)
    print(code)
    assert code.warnings == []
    assert [count(loop.opcodes, r"(LDL|STL)\b") for loop in code.loops] == [0] * len(code.loops)
    assert len(code.loops) >= made.consumers
    assert all(count(loop.opcodes, r"(LDG|STG|STS)\b") == 0 for loop in code.loops)
    assert all(loop.shuffles == 0 for loop in code.loops)
    copies = count(code.opcodes, r"LDGSTS")
    assert copies == count(code.opcodes, r"LDGSTS\.E\.BYPASS\.128")
    assert bool(copies) == (made.copiers > 0)
    assert code.shared <= SHARED // made.programs - 1024


@needs_triton
def test_what_both_launches_are_given(monkeypatch):
    given: list[Any] = []

    class Stand:
        plainly = None

        def tensor(self, place, address, shape):
            return place, address, shape

        def __call__(self, grid, values):
            given.append((grid, values))

    monkeypatch.setattr(experts_gemm, "compiled", lambda made, product, device: Stand())
    monkeypatch.setattr(experts_gemm, "multiprocessors", lambda index: 3)
    case = Case.random(5, 96, 64)
    one, two = (pack(w.torch(), "fragments") for w in (case.gate_up, case.down))
    call = case.call({"device": "cpu"}, "bfloat16", "fragments", 40, 2)
    made = CONFIGURATIONS[0].first
    blocks = 5 + 75 // made.slots
    pair = both(call, None, None)
    for product, stack, way in zip(pair, (one, two), (made, CONFIGURATIONS[0].second), strict=True):
        launch = experts_gemm.bind_product(way, product, stack, None, 80, torch.device("cpu"))
        launch(16, 32, (48, 64, 80), 2)
    (grid, values), (_, down) = given
    codes, scales, scale2 = (one.buffers()[name].data_ptr() for name in ("codes", "scales", "scale2"))
    tiles = -(-64 // (64 * made.consumers))
    assert grid == (min(3 * made.programs, tiles * blocks), 1, 1)
    steps = -(-96 // (64 * made.units))
    assert values[:2] == ((0, codes, (5 * 128 // 16, 16, 16)), (1, scales, (40, 32)))
    assert values[2:] == (16, 32, scale2, None, None, 48, 64, 80, 128, 96, tiles, steps, 2)
    assert down[2] == (2, 16, (blocks * made.slots, 64))
    assert down[-5:] == (96, 64, -(-96 // (128 * made.consumers)), -(-64 // (64 * made.units)), 2)


# On a GPU


def place_of(dtype: str = "bfloat16") -> Place:
    device = {"device": "cuda", "capability": 90, "library": "torch"}
    return Place(GLUON, device, dtype, "fragments" if dtype == "bfloat16" else "fragments(dtype=float16)")


def forced(monkeypatch, made: ExpertsGemm | None) -> None:
    monkeypatch.setenv("HALFBYTE_KERNEL", GLUON.name)
    if made is not None:
        monkeypatch.setattr(experts_gemm, "for_slots", lambda each: made)


class TestOnAGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("made", CONFIGURATIONS, ids=str)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_every_configuration(self, made, dtype, monkeypatch):
        forced(monkeypatch, made)
        for hidden, inner, count_, per_row in ((2048, 352, 200, True), (112, 1856, 37, False), (64, 48, 1, True)):
            case = Case.random(5, hidden, inner, per_row=per_row, bias=per_row)
            given = tokens(count_, hidden, dtype=dtype), *routing(count_, 3, 5)
            assert_meant(place_of(dtype).run(case, *given), case, *given, dtype)

    @pytest.mark.parametrize("made", CONFIGURATIONS, ids=str)
    def test_blocks_that_are_full_and_nearly_empty(self, made, monkeypatch):
        forced(monkeypatch, made)
        size = made.first.slots
        for slots in sorted({1, 16, 17, 32, 33, 64, 65, size - 1, size, size + 1, size + 33, 2 * size}):
            case = Case.random(3, 128, 64)
            indices = torch.full((slots, 1), 1)
            given = tokens(slots, 128, dtype="bfloat16"), indices, torch.ones(slots, 1)
            assert_meant(place_of().run(case, *given), case, *given, "bfloat16")

    @pytest.mark.parametrize("gated", [True, False])
    def test_many_experts_of_a_token(self, gated, monkeypatch):
        forced(monkeypatch, None)
        case = Case.random(512, 64, 32, gated=gated, activation="relu2" if not gated else "silu")
        given = tokens(60, 64, dtype="bfloat16"), *routing(60, 22, 512)
        assert_meant(place_of().run(case, *given), case, *given, "bfloat16")

    def test_all_are_padding(self, monkeypatch):
        forced(monkeypatch, None)
        case = Case.random(padding=True)
        indices = torch.full((300, 2), -1)
        y = place_of().run(case, tokens(300, dtype="bfloat16"), indices, torch.ones(300, 2))
        assert torch.equal(y, torch.zeros_like(y))
