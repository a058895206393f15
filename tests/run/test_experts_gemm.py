"""gluon-experts-gemm, -fp8 and gluon-grouped: what they take, their machine code and launches, and results on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_code import Program, count
from expert_cases import Case, Place, assert_meant, routing, tokens
from gluon_cases import on_gpu
from gpu_codecs import needs_triton
from halfbyte.kernels.cuda import experts_fp8, experts_gemm, grouped_gluon
from halfbyte.kernels.cuda.experts_gemm import (
    CONFIGURATIONS,
    GLUON,
    MOST,
    SHARED,
    Product,
    both,
    constants,
    for_slots,
    options,
    signature,
)
from halfbyte.kernels.cuda.launch import options_of
from halfbyte.kernels.grouped import GroupedArgs, GroupedCall
from halfbyte.layouts import Fragments
from halfbyte.ops import pack
from helpers_run import call_like

FP8 = experts_fp8.CONFIGURATIONS
EVERY = list(dict.fromkeys(way for made in (*CONFIGURATIONS, *FP8) for way in (made.first, made.second)))


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
    assert all(made.first.slots == made.second.slots for made in (*CONFIGURATIONS, *FP8))
    assert all(bool(made.first.low) == bool(made.second.low) for made in (*CONFIGURATIONS, *FP8))


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
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "exact"}, "rounds weights and activations to FP8, which only precision='fp8' asks for"),
        ({"shape": (6, 96, 16400)}, "takes hidden sizes up to 16384, not 16400"),
        ({"device": "cpu", "capability": 0}, "runs on NVIDIA GPUs, not on cpu"),
    ],
)
def test_refusals_of_fp8(changes, reason):
    call = call_of(how={"precision": "fp8"})
    assert experts_fp8.refuse(call) == ()
    assert experts_fp8.refuse(replace(call, **changes)).count(reason) == 1


@needs_triton
@pytest.mark.parametrize(
    ("shape", "changes", "reason"),
    [
        ((3, 40, 64), {}, "takes a multiple of 16 features, not 40"),
        ((3, 48, 72), {}, "takes a K that is a multiple of 16, not 72"),
        ((3, 48, 64), {"dtype": "float32"}, "takes bfloat16 or float16 activations, not float32"),
        ((3, 48, 64), {"capability": 100}, "is for sm_90, not sm_100"),
    ],
)
def test_refusals_of_grouped(shape, changes, reason):
    call = call_like(layout=Fragments(), device="cuda", capability=90, rows=64, shape=shape)
    grouped = GroupedCall(**vars(call) | {"op": "grouped", "counts": "int64"} | changes)
    assert grouped_gluon.refuse(grouped).count(reason) == 1
    assert grouped_gluon.refuse(replace(grouped, shape=(3, 48, 64), dtype="bfloat16", capability=90)) == ()


@needs_triton
def test_interleaved_gates_are_refused_with_what_to_do():
    (reason,) = GLUON.refuse(call_of(gate_up_order="interleaved"))
    assert "permute_rows" in reason


FIRST = Product(1536, 2048, True, "silu", None, False, "bfloat16", "bfloat16", False, None, False, True)
SECOND = Product(2048, 768, False, None, None, False, "bfloat16", "float32", False, None, True)
SMALLEST, *_, LARGEST = CONFIGURATIONS
CODES = [
    (SMALLEST.first, replace(FIRST, k=720, activation="swigluoai", limit=7.0, up_first=True, per_row=True)),
    (SMALLEST.second, SECOND),
    (CONFIGURATIONS[1].first, replace(FIRST, k=720, bias="float32")),
    (CONFIGURATIONS[1].second, replace(SECOND, dtype="float16")),
    (CONFIGURATIONS[2].first, replace(FIRST, gated=False, activation="relu2", dtype="float16", out_dtype="float16")),
    (LARGEST.first, FIRST),
    *((made.first, FIRST) for made in FP8),
    *((made.second, SECOND) for made in FP8),
]


@needs_triton
@pytest.mark.parametrize(("made", "product"), CODES, ids=str)
def test_machine_code(made, product):
    from halfbyte.kernels.cuda.experts_gemm_code import experts

    types = {name: of.removesuffix(":16") for name, of in signature(made, product).items()}
    code = Program(experts, types, constants(made, product), options_of(**options(made)), ("N", "width")).compile(90)
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
    # a stage that waits for other bytes than come is never full; where a product is early its first ones get x later
    *first, (expected, copied) = code.expected
    assert len(first) == product.early
    rows = 0 if made.copiers else made.slots * 64 * made.units * (1 if made.fp8 else 2)
    assert expected == copied
    assert first == [(copied, copied - rows)] * len(first)


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
        launch(16, 32, (48, 64, 80, 96), 2)
    (grid, values), (_, down) = given
    codes, scales, scale2 = (one.buffers()[name].data_ptr() for name in ("codes", "scales", "scale2"))
    tiles = -(-64 // (64 * made.consumers))
    assert grid == (min(3 * made.programs, tiles * blocks), 1, 1)
    steps = -(-96 // (64 * made.units))
    assert values[:2] == ((0, codes, (5 * 128 // 16, 16, 16)), (1, scales, (40, 32)))
    assert values[2:] == (16, 32, scale2, None, None, 48, 64, 80, 96, 128, 96, tiles, steps, 2)
    assert down[2] == (2, 16, (blocks * made.slots, 64))
    assert down[-5:] == (96, 64, -(-96 // (128 * made.consumers)), -(-64 // (64 * made.units)), 2)


ORDER = """
import torch
from halfbyte.kernels.cuda.experts_order_code import order
for count in (0, 1, 5, 300):
    for low, mid in ((8, 8), (8, 16)):
        sizes = torch.randint(1, 33, (count,), generator=torch.Generator().manual_seed(count))
        slots = torch.where(torch.arange(32) < sizes[:, None], 7, -1).int()
        slots = torch.cat([slots, torch.full((3, 32), 9, dtype=torch.int32)])
        to = torch.full((count + 3,), -5, dtype=torch.int32)
        given = slots, torch.tensor([count], dtype=torch.int32), to
        order[(1,)](*given, SIZE=32, LOW=low, MID=mid, CHUNK=128, EARLY=False)
        kinds = [0 if n > mid else 1 if n > low else 2 for n in sizes.tolist()]
        expected = [b for kind in range(3) for b in range(count) if kinds[b] == kind]
        assert to.tolist() == expected + [-5] * 3, (count, low, mid)
print("right")
"""


@needs_triton
def test_larger_blocks_are_dealt_out_first():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "right\n", done.stderr[-2000:]


# On a GPU


def place_of(kernel: Any = GLUON, dtype: str = "bfloat16") -> Place:
    device = {"device": "cuda", "capability": 90, "library": "torch"}
    return Place(kernel, device, dtype, "fragments" if dtype == "bfloat16" else "fragments(dtype=float16)")


class TestOnAGpu:
    pytestmark = on_gpu

    @pytest.fixture(params=[*range(len(CONFIGURATIONS))], ids=lambda i: f"of{CONFIGURATIONS[i].first.slots}")
    def made(self, request, monkeypatch):
        """Every configuration in turn; programs are the same in all tests of one."""
        monkeypatch.setenv("HALFBYTE_KERNEL", GLUON.name)
        monkeypatch.setattr(experts_gemm, "for_slots", lambda each: CONFIGURATIONS[request.param])
        return CONFIGURATIONS[request.param]

    def test_shapes(self, made):
        for hidden, inner, rows in ((2096, 352, 200), (112, 1856, 37), (80, 48, 1)):
            case = Case.random(5, hidden, inner, per_row=True)
            given = tokens(rows, hidden, dtype="bfloat16"), *routing(rows, 3, 5)
            assert_meant(place_of().run(case, *given), case, *given, "bfloat16")

    def test_blocks_that_are_full_and_nearly_empty(self, made):
        size = made.first.slots
        for slots in sorted({1, 16, 17, 32, 33, 64, 65, size - 1, size, size + 1, size + 33, 2 * size}):
            case = Case.random(3, 144, 80, per_row=True)
            given = tokens(slots, 144, dtype="bfloat16"), torch.full((slots, 1), 1), torch.ones(slots, 1)
            assert_meant(place_of().run(case, *given), case, *given, "bfloat16")

    def test_many_experts_of_a_token(self, made):
        case = Case.random(512, 80, 48, per_row=True)
        given = tokens(60, 80, dtype="bfloat16"), *routing(60, 22, 512)
        assert_meant(place_of().run(case, *given), case, *given, "bfloat16")

    def test_experts_that_are_elsewhere_and_padding(self, made):
        whole = Case.random(8, 80, 48, per_row=True, padding=True)
        case = whole.part((2, 3, 6), "skip")
        indices, weights = routing(300, 2, 8)
        indices[::5, 0] = -1
        given = tokens(300, 80, dtype="bfloat16"), indices, weights
        held = torch.isin(indices, torch.tensor([2, 3, 6]))
        expected = place_of().run(whole, given[0], indices, weights.where(held, 0))
        assert torch.equal(place_of().run(case, *given), expected)
        none = place_of().run(case, given[0], torch.full_like(indices, -1), weights)
        assert torch.equal(none, torch.zeros_like(none))

    @pytest.mark.parametrize("rows", [40, 700])
    def test_fp8_is_near_the_exact_result(self, rows, monkeypatch):
        case = Case.random(4, 272, 176, per_row=True)
        given = tokens(rows, 272, dtype="bfloat16"), *routing(rows, 2, 4)
        monkeypatch.setenv("HALFBYTE_KERNEL", experts_fp8.NAME)
        found = place_of(experts_fp8.GLUON).run(case, *given, precision="fp8").double()
        monkeypatch.setenv("HALFBYTE_KERNEL", GLUON.name)
        exact = place_of().run(case, *given).double()
        assert 5e-3 < float((found - exact).norm() / exact.norm()) < 8e-2

    @pytest.mark.parametrize("rows", [5, 90, 600])
    def test_grouped(self, rows):
        case = Case.random(4, 144, 80, per_row=True)
        weight = pack(case.down.torch("cuda"), "fragments")
        x = tokens(rows, 80, dtype="bfloat16").bfloat16().cuda()
        counts = torch.tensor([rows // 3, 0, rows - rows // 3 - 1, 1])
        out = torch.full((rows, 144), float("nan"), dtype=torch.bfloat16, device="cuda")
        args = GroupedArgs(x=x, counts=counts.cuda(), weight=weight, bias=None, out=out)
        grouped_gluon.bind(args)(x, args.counts, out)
        whole = case.down.torch().dequantize().double()
        expected = torch.cat([a @ w.T for a, w in zip(x.cpu().double().split(counts.tolist()), whole, strict=True)])
        assert float((out.cpu().double() - expected).norm() / expected.norm()) < 2.5e-3
