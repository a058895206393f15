"""The Gluon GEMM: its schedule, its assembly, its machine code, its launches, and, on a GPU, its results."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import halfbyte as hb
from cuda_code import Program, compile_ahead, count
from gluon_cases import (
    DTYPES,
    arguments,
    at_an_odd_address,
    check_an_untested_triton,
    check_chains,
    evaluate,
    guarded,
    halves,
    on_gpu,
    replace_buffers,
    result_at,
    stand_in,
    still_being_written,
    without_a_driver,
)
from gpu_codecs import needs_triton
from halfbyte.kernels import LinearArgs
from halfbyte.kernels.cuda import gemm_gluon
from halfbyte.kernels.cuda.gemm_gluon import (
    CONFIGURATIONS,
    GLUON,
    SHARED,
    Gemm,
    Schedule,
    constants,
    microseconds,
    options,
    scales_code,
    schedule,
    scratch_of,
    signature,
)
from halfbyte.kernels.cuda.launch import options_of
from halfbyte.layouts import Fragments, Rows
from halfbyte.weight import Weight, to_numpy
from helpers_run import HALF_ULP, call_like, exact_linear


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_assembly_makes_scales_of_every_byte(dtype):
    stored = Fragments(dtype).to_stored(SimpleNamespace(scales=np.arange(0x7F, dtype=np.uint8)))[0]
    padded = np.resize(stored, 128)
    made = evaluate(scales_code(dtype), **{"$2": padded.view(np.uint32).astype(np.uint64)})
    found = np.stack([halves(made[name], dtype) for name in ("$0", "$1")], 1).reshape(-1)[: len(stored)]
    expected = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    kept = stored > 0 if dtype == "bfloat16" else stored >= 0
    np.testing.assert_array_equal(found[kept], (expected * 2.0 ** {"bfloat16": 119, "float16": 7}[dtype])[kept])


# The schedule


@needs_triton
@pytest.mark.parametrize("split_all", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_every_step_of_every_tile_is_computed_once_and_split_tiles_come_last(parts, split_all, monkeypatch):
    from halfbyte.kernels.cuda import gemm_gluon_code as code

    monkeypatch.setattr(code, "gl", SimpleNamespace(maximum=max, minimum=min))
    for n, k, rows, processors in itertools.product((16, 1000, 5000), (16, 256, 700, 4096), (17, 600, 3000), (3, 132)):
        made = Gemm(tokens=128, units=1, parts=parts, all=split_all, group=3)
        held = schedule(n, k, rows, made, processors)
        work = (held.items, held.whole, held.share, held.parts, held.along_n, held.along_m, held.steps)
        tiles, steps = held.along_n * held.along_m, -(-k // 64)
        seen = [code.item_of.fn(t, work) for t in range(held.items)]
        assert held.grid == min(processors, held.items)
        assert all(part == -1 for _, part, _, _ in seen[: held.whole])
        assert all(part >= 0 for _, part, _, _ in seen[held.whole :])
        done = [(tile, first + i) for tile, _, first, length in seen for i in range(length)]
        assert sorted(done) == [(tile, step) for tile in range(tiles) for step in range(steps)]
        assert all(length > 0 for *_, length in seen)
        places = {code.place_of.fn(tile, work, made.group) for tile in range(tiles)}
        assert places == set(itertools.product(range(-(-rows // 128)), range(-(-n // 128))))
        if parts > 1 and steps > 1:
            assert held.split == (tiles if split_all else tiles % processors)


def test_a_schedule():
    """448 tiles are 3 waves and 52, each of those in two parts of 32 steps."""
    made = Gemm(tokens=256, units=1, parts=2)
    held = schedule(14336, 4096, 1024, made, 132)
    assert held == Schedule(items=500, whole=396, share=32, parts=2, along_n=112, along_m=4, steps=64, grid=132)
    assert scratch_of(made, held) == (52 * 2 * 128 * 256 * 4, 52 * 2 * 4)
    assert schedule(14336, 4096, 1024, replace(made, parts=1), 132).items == 448
    assert schedule(16, 64, 1, replace(made, parts=2, all=True), 132).parts == 1  # there is one step
    nothing = schedule(16, 0, 1, made, 132)
    assert (nothing.parts, nothing.steps, nothing.items) == (1, 0, 1)


@needs_triton
@pytest.mark.parametrize("precision", ["exact", "fp8"])
def test_a_weight_without_k_is_planned(precision):
    empty = np.zeros((32, 0), np.uint8)
    packed = hb.pack(Weight(codes=empty, scales=empty, scale2=1.0).torch(), Fragments())
    plan = hb.plan("linear", packed, rows=300, device="cuda:sm_90", precision=precision)
    assert plan.flops == 0


MEASURED = [
    ((4096, 4096), 32, {(1, 4, 32, 4, 2, 4, True): 7.7, (2, 4, 32, 4): 12.9}),
    ((4096, 4096), 128, {(2, 4, 64, 4, 1, 2, True): 13.0, (2, 4, 128, 2, 1, 4): 13.2, (2, 4, 128, 2): 21.9}),
    ((4096, 4096), 512, {(2, 4, 128, 2): 24.0, (2, 4, 256, 1, 1, 2): 29.9, (2, 4, 256, 1): 40.2}),
    ((14336, 4096), 256, {(2, 4, 256, 1): 41.6, (2, 8, 128, 2): 43.1, (2, 4, 256, 1, 1, 2): 55.2}),
    ((14336, 4096), 1024, {(2, 4, 256, 1, 1, 2): 152.1, (2, 8, 128, 2, 1, 2): 153.8, (2, 4, 256, 1): 163.2}),
    ((28672, 8192), 128, {(2, 8, 128, 2): 85.6, (2, 4, 128, 2): 95.1}),
    ((28672, 8192), 512, {(2, 4, 256, 1, 1, 2): 300.9, (2, 8, 128, 2, 1, 2): 304.0, (2, 8, 128, 2): 333.2}),
]
"""(N, K), tokens, and the microseconds of configurations on an H200, bfloat16."""


@pytest.mark.parametrize(("shape", "rows", "times"), MEASURED, ids=str)
def test_the_model_is_near_what_was_measured_and_picks_what_is_fast(shape, rows, times):
    by_model = {fields: microseconds(*shape, rows, Gemm(*fields), 132) for fields in times}
    assert all(0.8 <= by_model[fields] / us <= 1.25 for fields, us in times.items()), by_model
    assert times[min(by_model, key=by_model.get)] <= 1.05 * min(times.values())


def test_without_choices_the_model_decides(monkeypatch):
    monkeypatch.setattr(gemm_gluon.choices, "configured", lambda call, name, default, known, model: default)
    monkeypatch.setattr(gemm_gluon, "multiprocessors", lambda index, elsewhere=False: 132)
    call = accepted(shape=(14336, 4096), rows=1024)
    pays = gemm_gluon.configurations(call)
    assert gemm_gluon.configure(call) == pays[0]
    assert len(pays) == 8
    assert gemm_gluon.configurations(replace(call, rows=8)) == ()


@pytest.mark.parametrize("made", CONFIGURATIONS, ids=str)
def test_what_a_configuration_takes_is_there(made):
    for size in (2, 4):
        stages = made.stages(size)
        assert stages >= 3
        results = made.features * made.height(size) * size
        assert made.programs * (1024 + stages * made.stage + results) <= SHARED
    first, then = made.registers
    threads = 128 * (made.consumers + 1)
    assert made.programs * first * threads <= 65536
    assert then * 128 * made.consumers + 32 * 128 <= first * threads
    assert first % 8 == then % 8 == 0


# What it takes


def accepted(**changes):
    fields = {"layout": Fragments(), "device": "cuda", "capability": 90, "rows": 64, "shape": (4096, 4096)} | changes
    return call_like(**fields)


@needs_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu", "capability": 0}, "runs on NVIDIA GPUs, not on cpu"),
        ({"capability": 80}, "is for sm_90, not sm_80"),
        ({"capability": 100}, "is for sm_90, not sm_100"),
        ({"layout": Rows()}, "reads the layout fragments(dtype=bfloat16), not rows"),
        ({"dtype": "float16"}, "reads the layout fragments(dtype=float16), not fragments(dtype=bfloat16)"),
        ({"dtype": "float32"}, "takes bfloat16 or float16 activations, not float32"),
        ({"shape": (3, 32, 64)}, "takes one matrix (N, K), not expert axes (3,)"),
        ({"shape": (32, 70)}, "takes a K that is a multiple of 16, not 70"),
        ({"shape": (1 << 24, 16)}, "takes up to 16777215 features, not 16777216"),
        ({"rows": (1 << 31) - 511}, "takes up to 2147483136 tokens, not 2147483137"),
        ({"pre_scale": True}, "multiplies activations as they come, without a pre_scale"),
        ({"aligned": False}, "takes codes and scales that begin at multiples of 16 bytes; clone the buffers"),
    ],
)
def test_refusals(changes, reason):
    assert GLUON.refuse(accepted()) == ()
    assert GLUON.refuse(accepted(**changes)).count(reason) == 1


@needs_triton
def test_an_untested_triton_is_refused_by_name(monkeypatch):
    check_an_untested_triton(monkeypatch, GLUON.refuse, accepted())


# Launches


@pytest.fixture
def launches(monkeypatch):
    """What ``bind`` launches and describes, with stand-ins for the driver, torch's stream and event."""
    state = SimpleNamespace(kinds=[], values=[], described=[], finished=False)

    def program(call, bias, made, device, pdl, whole, split):
        return stand_in(state, ("early" if pdl else "ordinary", "boxes" if whole else "elements"))

    event = SimpleNamespace(query=lambda: state.finished)
    monkeypatch.setattr(gemm_gluon, "_program", program)
    state.memory = without_a_driver(monkeypatch, gemm_gluon)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: event))
    return state


def test_what_a_launch_is_given(launches):
    _, args = arguments(n=40, k=80, rows=19)
    run = gemm_gluon.bind(args, Gemm(tokens=32, parts=2, all=True, units=1))
    for _ in range(3):
        run(args.x, None, args.out)
    launches.finished = True
    run(args.x, None, args.out)
    run(args.x, None, args.out)
    assert launches.kinds == [("ordinary", "boxes")] * 4 + [("early", "boxes")]
    codes, scales, scale2 = (args.weight.buffers()[name].data_ptr() for name in ("codes", "scales", "scale2"))
    x, out = args.x.data_ptr(), args.out.data_ptr()
    # weights once, activations and results once for each address
    assert launches.described == [(0, codes, (3, 16, 16)), (1, scales, (3, 32)), (2, x, (19, 80)), (3, out, (19, 40))]
    grid, values = launches.values[0]
    assert grid == (2, 1, 1)
    assert [v.address for v in values[:4]] == [codes, scales, x, out]
    assert values[4:] == (scale2, None, *launches.memory, 19, 40, 2, 0, 1, 2, 1, 1, 2)


def test_results_at_odd_addresses_are_stored_by_element(launches):
    for n, at in ((40, 0), (40, 2), (41, 0)):
        _, args = arguments(n=n, k=80, rows=19)
        out = result_at(args.out, at)
        gemm_gluon.bind(args, Gemm())(args.x, None, out)
    assert [kind for _, kind in launches.kinds] == ["boxes", "elements", "elements"]
    assert [v[1][3] for v in launches.values[1:]][-1] == out.data_ptr()
    assert [v[1][6:8] for v in launches.values] == [(None, None)] * 3  # nothing is split


def test_activations_at_odd_addresses_are_copied(launches):
    _, args = arguments(rows=1)
    odd = at_an_odd_address(80)
    gemm_gluon.bind(args, Gemm())(odd, None, args.out)
    assert launches.values[0][1][2].address % 16 == 0


# Machine code


def code_of(made, shape=(14336, 4096), rows=1024, dtype="bfloat16", out_dtype="bfloat16", **flags):
    from halfbyte.kernels.cuda.gemm_gluon_code import gemm

    call = accepted(shape=shape, rows=rows, dtype=dtype, out_dtype=out_dtype, layout=Fragments(dtype), **flags)
    whole = shape[0] % 8 == 0
    types = {name: of.removesuffix(":16") for name, of in signature(call, made, "*fp32", whole).items()}
    held = constants(call, made, whole, schedule(*shape, rows, made, 132).split > 0)
    return Program(gemm, types, held, options_of(**options(made))).compile(90)


CODES = [
    (Gemm(2, 4, 256, 1, 1, 2), {}),
    (Gemm(2, 4, 64, 4), {"rows": 64, "dtype": "float16", "out_dtype": "float32", "per_row": True}),
    (Gemm(2, 4, 32, 2, 2, 2, True), {"rows": 32, "shape": (4099, 4096), "bias": True}),
    (Gemm(2, 8, 128, 2, 1, 2), {"rows": 300}),
    (Gemm(2, 4, 256, 1), {"shape": (248077, 4096)}),
]


@needs_triton
@pytest.mark.parametrize(("made", "flags"), CODES, ids=str)
def test_machine_code(made, flags):
    code = code_of(made, **flags)
    print(code)
    assert code.warnings == []
    assert code.stack <= 16  # what all partitions begin with may be put aside, once
    assert [count(loop.opcodes, r"(LDL|STL)\b") for loop in code.loops] == [0] * made.consumers
    assert len(code.loops) == made.consumers
    assert [loop.shuffles for loop in code.loops] == [0] * made.consumers
    assert max(loop.per_matrix for loop in code.loops) <= 31
    assert all(count(loop.opcodes, r"(LDG|STG|STS)\b") == 0 for loop in code.loops)
    assert all(count(loop.opcodes, r"LDSM") for loop in code.loops)
    assert code.shared <= SHARED // made.programs - 1024
    (first, _), (expected, copied) = code.expected
    assert first == expected == copied


# On a GPU

OTHERS = [
    Gemm(3, 4, 128, 1, 1, 2, True),
    Gemm(4, 4, 32, 1, 1, 3, True),
    Gemm(1, 4, 64, 2, 2, 2, True, group=1),
    Gemm(2, 8, 128, 1, 1, 3, True),
    Gemm(2, 4, 256, 1, 1, 4, True, group=2),
]
EVERY = [*CONFIGURATIONS, *OTHERS]

# N, K, rows, configuration, dtypes of activations, results and bias, scale2 per row
RESULTS = [
    ((16, 1), 64, (17, 1), None, "bfloat16", "bfloat16", None, False),
    ((16, 257), 16, (40, 300), None, "float16", "float16", "float16", True),
    ((4096, 40), 512, (64, 129), None, "bfloat16", "float32", "float32", False),
    ((33, 257), 14336, (33, 256), None, "float16", "float32", None, True),
    ((136, 1001), 1088, (100, 513), OTHERS[0], "float16", "bfloat16", "float32", True),
    ((1000, 17), 1104, (31, 65), OTHERS[1], "bfloat16", "float16", None, True),
    ((1000, 65), 4144, (64, 130), OTHERS[2], "float16", "float16", "bfloat16", False),
    ((520, 64), 4144, (257, 19), OTHERS[3], "bfloat16", "float32", None, True),
    ((257, 1024), 1088, (600, 255), OTHERS[4], "float16", "bfloat16", None, False),
]


def programs():
    """Of all that follows: a call, its bias and a configuration for each."""
    for sizes, k, all_rows, made, dtype, out_dtype, bias, per_row in RESULTS:
        of = {"dtype": dtype, "layout": Fragments(dtype), "out_dtype": out_dtype, "per_row": per_row}
        for n, rows in itertools.product(sizes, all_rows):
            yield accepted(shape=(n, k), rows=rows, bias=bias is not None, **of), bias or "float32", made
    for made in EVERY:
        yield accepted(shape=RAGGED, rows=300, out_dtype="float32"), "float32", made


RAGGED = (1000, 1024 + 48)


@pytest.fixture(scope="class")
def compiled():
    """All programs, compiled by all cores at once."""
    found = []
    for call, bias, made in programs():
        chosen = made or gemm_gluon.configure(call)
        split = gemm_gluon._schedule(call, chosen, 0).split > 0
        whole = call.shape[0] * (4 if call.out_dtype == "float32" else 2) % 16 == 0
        for fits in {whole, False}:
            types = signature(call, chosen, f"*{gemm_gluon.TYPES[bias]}", fits)
            found.append((types, constants(call, chosen, fits, split), options_of(**options(chosen))))
    compile_ahead("halfbyte.kernels.cuda.gemm_gluon_code", "gemm", found, 90)


def result(args, made=None):
    gemm_gluon.bind(args, made)(args.x, args.bias, args.out)
    return args.out


@pytest.mark.usefixtures("compiled")
class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("case", RESULTS, ids=str)
    def test_results(self, case):
        sizes, k, all_rows, made, dtype, out_dtype, bias, per_row = case
        for n, rows in itertools.product(sizes, all_rows):
            of = {"scales": (40, 60), "per_row": per_row}
            weight, args = arguments(n, k, rows, dtype, out_dtype, bias, "cuda", **of)
            poisoned, out = guarded(args.out, float("nan"))
            args = replace(args, x=guarded(args.x, float("nan"))[1], out=out, weight=replace_buffers(args.weight))
            got = to_numpy(result(args, made)).astype(np.float64)
            bias_values = None if bias is None else to_numpy(args.bias).astype(np.float64)
            expected, magnitude = exact_linear(to_numpy(args.x).astype(np.float64), weight, bias_values)
            parts = (made or gemm_gluon.configure(args.call())).parts
            bound = ((k + 24 + parts) * 2.0**-23 + 2.0**-24) * magnitude + HALF_ULP[out_dtype] * abs(expected)
            tiny = 2.0**-25 if out_dtype == "float16" else 0.0
            assert (abs(got - expected) <= 1.01 * bound + tiny).all(), (n, rows)
            assert torch.isnan(poisoned).sum() == poisoned.numel() - out.numel()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_token_at_a_time_is_the_decoded_weight(self, dtype):
        rng = np.random.default_rng(7)
        scales = rng.permuted(np.resize(np.arange(0x7F, dtype=np.uint8), 48 * 40)).reshape(48, 40)
        weight = Weight(codes=rng.integers(0, 256, (48, 320), np.uint8), scales=scales, scale2=np.float32(0.37))
        packed = hb.pack(weight, Fragments(dtype)).to("cuda")
        x = torch.eye(640, dtype=getattr(torch, dtype), device="cuda")
        out = torch.empty(640, 48, device="cuda")
        got = result(LinearArgs(x=x, weight=packed, bias=None, out=out))
        np.testing.assert_array_equal(to_numpy(got).T, weight.dequantize("float32"))

    @pytest.mark.parametrize("made", EVERY, ids=str)
    def test_every_configuration_is_right_and_repeats_itself(self, made):
        weight, args = arguments(*RAGGED, 300, "bfloat16", "float32", None, "cuda", scales=(40, 60))
        poisoned, out = guarded(args.out, float("nan"))
        args = replace(args, x=guarded(args.x, float("nan"))[1], out=out, weight=replace_buffers(args.weight))
        expected, magnitude = exact_linear(to_numpy(args.x).astype(np.float64), weight)
        bound = 1.01 * ((RAGGED[1] + 32) * 2.0**-23 + 2.0**-24) * magnitude
        got = result(args, made).clone()
        assert (abs(to_numpy(got) - expected) <= bound).all()
        for _ in range(3):
            poisoned.fill_(float("nan"))
            assert torch.equal(result(args, made), got)
        assert torch.isnan(poisoned).sum() == poisoned.numel() - out.numel()

    def test_a_row_does_not_depend_on_the_others(self):
        _, args = arguments(*RAGGED, 300, out_dtype="float32", device="cuda")
        for made in (OTHERS[0], OTHERS[4], CONFIGURATIONS[0]):
            whole = result(args, made).clone()
            x = args.x.clone()
            x.view(torch.int16)[57, 17] += 1  # the neighbouring bfloat16
            x[101, 5] = float("nan")
            other = result(replace(args, x=x, out=torch.empty_like(whole)), made)
            assert (other != whole).any(1).nonzero().flatten().tolist() == [57, 101]
            assert other[101].isnan().all()

    def test_repeats_in_graphs_and_chains_are_identical(self):
        """Each launch reads what the one ahead of it wrote, and starts before that has ended; all of it is split."""
        _, args = arguments(512, 512, 40, device="cuda", scales=(20, 30))
        run = gemm_gluon.bind(args, Gemm(tokens=32, parts=4, all=True, units=1))
        check_chains(run, args.x)

    def test_a_weight_written_right_before_the_call_is_read_whole(self):
        _, args = arguments(4096, 4096, 64, device="cuda")
        for weight, expected in still_being_written(args, result, 10):
            assert torch.equal(result(replace(args, weight=weight)), expected)
