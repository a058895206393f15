"""The FP8 kernel in Gluon: its assembly evaluated, its machine code, its launches, and, on a GPU, its results."""

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

import gpu_fp8
import halfbyte as hb
from cuda_code import Program, compile_all, count
from gluon_cases import (
    DTYPES,
    U32,
    arguments,
    at_an_odd_address,
    check_chains,
    evaluate,
    guarded,
    on_gpu,
    replace_buffers,
    result_at,
    stand_in,
    still_being_written,
    without_a_driver,
)
from gpu_codecs import needs_triton
from halfbyte.kernels import Fp8Args, LinearArgs
from halfbyte.kernels.cuda import fp8_gluon, fp8_quantize, gemm, gemm_gluon
from halfbyte.kernels.cuda.fp8_gluon import (
    CONFIGURATIONS,
    ERROR,
    GLUON,
    Fp8,
    constants,
    look_up_code,
    signature,
    table_code,
)
from halfbyte.kernels.cuda.gemm_gluon import SHARED
from halfbyte.kernels.cuda.launch import Tensor, options_of
from halfbyte.kernels.cuda.shared import in_turn
from halfbyte.kernels.fp8 import quantized
from halfbyte.layouts import Fragments, Rows
from halfbyte.lossy import to_fp8
from halfbyte.numerics import decode_e4m3, encode_e4m3
from halfbyte.weight import Weight, to_numpy
from helpers_run import fp8_call_like


def test_the_tables_of_every_scale_are_what_codes_become():
    stored = Fragments().to_stored(SimpleNamespace(scales=np.arange(0x7F, dtype=np.uint8)))[0].astype(U32)
    for other in (0, 0xF7):
        made = evaluate(table_code(), **{"$4": stored | other << 8})
        found = np.stack([made["$0"], made["$1"]], -1).view(np.uint8)
        values = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
        expected = encode_e4m3(values * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32) / np.float32(6))
        np.testing.assert_array_equal(found, expected)
        swapped = evaluate(table_code(), **{"$4": stored << 8 | other})
        assert all((swapped[f"${i + 2}"] == made[f"${i}"]).all() for i in (0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_with_every_scale_becomes_the_byte_of_the_twin(dtype):
    rng = np.random.default_rng(5)
    scales = np.concatenate([rng.permutation(0x7F).astype(np.uint8) for _ in range(64)]).reshape(16, 508)
    codes = rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (16 * 508, 1)), axis=1).reshape(16, -1)
    weight = Weight(codes=codes[:, ::2] | codes[:, 1::2] << 4, scales=scales, scale2=1.0)
    packed = Fragments(dtype).pack(weight).buffers()
    words = packed["codes"].view(U32).reshape(127, 8, 4, 4)  # u g kt c
    pairs = packed["scales"].view(np.uint16).reshape(127, 8, 4).astype(U32)
    tables = evaluate(table_code(), **{"$4": pairs})
    given = {f"${4 + 4 * i}": tables[f"${i}"] for i in range(4)}
    found = []
    for s in (0, 1):
        made = evaluate(look_up_code(dtype), **given, **{"$20": words[..., 2 * s], "$24": words[..., 2 * s + 1]})
        found += [np.stack([made[f"${2 * e + rh}"] for rh in (0, 1)], -1) for e in (0, 1)]
    found = np.stack(found, 1)[..., None].view(np.uint8)  # u (s e) g kt rh j
    found = found.transpose(4, 2, 0, 1, 3, 5).reshape(16, -1)
    twin = gpu_fp8.in_order(to_fp8(weight).data)
    np.testing.assert_array_equal(np.where(found & 0x7F == 0, 0, found), np.where(twin & 0x7F == 0, 0, twin))


# What it takes


def accepted(**changes):
    return fp8_call_like(**({"shape": (4096, 4096)} | changes))


@needs_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu", "capability": 0}, "runs on NVIDIA GPUs, not on cpu"),
        ({"capability": 89}, "is for sm_90, not sm_89"),
        ({"capability": 100}, "is for sm_90, not sm_100"),
        ({"layout": Rows()}, "reads the layout fragments, not rows"),
        ({"layout": Rows(), "resident": True}, "multiplies by NVFP4, not by an Fp8Weight"),
        ({"shape": (3, 32, 64)}, "takes one matrix (N, K), not expert axes (3,)"),
        ({"aligned": False}, "takes codes and scales that begin at multiples of 16 bytes; clone the buffers"),
        ({"shape": (1 << 24, 16)}, "takes up to 16777215 features, not 16777216"),
        ({"rows": (1 << 31) - 511}, "takes up to 2147483136 tokens, not 2147483137"),
    ],
)
def test_refusals(changes, reason):
    assert GLUON.refuse(accepted(**changes)) == (reason,)


@needs_triton
def test_it_takes_activations_of_every_dtype_from_either_copy():
    for dtype in DTYPES:
        for given in ("float32", *DTYPES):
            for out_dtype in ("float32", *DTYPES):
                call = accepted(layout=Fragments(dtype), dtype=given, out_dtype=out_dtype, pre_scale=True, per_row=True)
                assert GLUON.refuse(call) == ()


@pytest.mark.parametrize("made", CONFIGURATIONS, ids=str)
def test_what_a_configuration_takes_is_there(made):
    for size in (2, 4):
        results = made.form.features * made.form.height(size) * size
        stage = 2 * (made.form.features // 16 * 576 + made.tokens * 64)
        assert made.stages(size) >= 4
        assert 1024 + made.stages(size) * stage + results <= SHARED


# Launches


@pytest.fixture
def launches(monkeypatch):
    """What ``bind`` launches and describes, with stand-ins for the driver."""
    state = SimpleNamespace(kinds=[], values=[], described=[], quantized=[], asked=[])

    def program(call, bias, made, device, whole, split):
        return stand_in(state, "boxes" if whole else "elements")

    def quantizer(device, dtype, k, **how):
        state.asked.append((dtype, k, how))
        return lambda *given: state.quantized.append(given)

    monkeypatch.setattr(fp8_gluon, "_program", program)
    monkeypatch.setattr(fp8_gluon, "quantizer", quantizer)
    state.memory = without_a_driver(monkeypatch, fp8_gluon)
    return state


def fp8_arguments(*shape, **of):
    weight, args = arguments(*shape, **of)
    return weight, Fp8Args(x=args.x, weight=args.weight, bias=args.bias, out=args.out)


def test_what_a_launch_is_given(launches):
    _, args = fp8_arguments(n=40, k=272, rows=19, pre_scale=True)
    run = fp8_gluon.bind(args, Fp8(tokens=128, parts=2))
    for _ in range(2):
        run(args.x, None, args.out)
    assert launches.asked == [("bfloat16", 272, {"ordered": True, "pre_scale": True, "early": True})]
    at, counts = launches.memory
    buffers = args.weight.buffers()
    codes, scales, scale2, pre = (buffers[name].data_ptr() for name in ("codes", "scales", "scale2", "pre_scale"))
    out, of_x = args.out.data_ptr(), 19 * 320 + 80
    assert launches.quantized == [(19, args.x.data_ptr(), pre, at, at + 19 * 320)] * 2
    # weights once, activations and results once for each address
    assert launches.described == [(0, codes, (3, 40, 16)), (1, scales, (3, 80)), (2, at, (19, 320)), (3, out, (19, 40))]
    grid, values = launches.values[0]
    assert grid == (2, 1, 1)
    assert [v.address for v in values[:4]] == [codes, scales, at, out]
    assert values[4:] == (scale2, at + 19 * 320, None, at + of_x, counts, 19, 40, 2, 0, 2, 2, 1, 1, 3)


def test_results_at_odd_addresses_are_stored_by_element(launches):
    for n, at in ((40, 0), (40, 2), (41, 0)):
        _, args = fp8_arguments(n=n, k=80, rows=19)
        out = result_at(args.out, at)
        fp8_gluon.bind(args, Fp8())(args.x, None, out)
        assert launches.values[-1][1][7:9] == (None, None)  # nothing is split
    assert launches.kinds == ["boxes", "elements", "elements"]


def test_activations_at_odd_addresses_are_copied(launches):
    _, args = fp8_arguments(rows=1)
    odd = at_an_odd_address(80)
    fp8_gluon.bind(args, Fp8())(odd, None, args.out)
    assert launches.quantized[0][1] % 16 == 0


def test_both_launches_are_queued_in_one_turn(launches, monkeypatch):
    """Threads may share a stream, and what the first launch writes there the second reads."""
    free = []

    def seen(*_):
        def ask():
            free.append(in_turn.acquire(blocking=False))
            if free[-1]:
                in_turn.release()

        other = threading.Thread(target=ask)
        other.start()
        other.join()

    def program(*of):
        seen.tensor = lambda place, address, shape: Tensor(address, shape, ())
        return seen

    monkeypatch.setattr(fp8_gluon, "_program", program)
    monkeypatch.setattr(fp8_gluon, "quantizer", lambda *of, **how: seen)
    _, args = fp8_arguments(n=40, k=272, rows=19)
    fp8_gluon.bind(args, Fp8(tokens=128))(args.x, None, args.out)
    seen()
    monkeypatch.setattr(gemm_gluon, "_program", program)
    monkeypatch.setattr(gemm_gluon, "multiprocessors", lambda index, elsewhere=False: 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    linear = LinearArgs(x=args.x, weight=args.weight, bias=None, out=args.out)
    gemm_gluon.bind(linear, gemm_gluon.Gemm())(args.x, None, args.out)
    monkeypatch.setattr(gemm, "_program", program)
    gemm.bind(linear, gemm.Gemm())(args.x, None, args.out)
    assert free == [False, False, True, False, False]


# Machine code


def program_of(made, call, whole):
    types = signature(call.out_dtype, made, "*fp32", whole)
    return types, constants(call, made, whole, made.parts > 1)


CODES = [
    (Fp8(parts=2), {}, True),
    (Fp8(), {"layout": Fragments("float16"), "out_dtype": "float32", "per_row": True, "bias": True}, True),
    (Fp8(tokens=128, parts=3), {"out_dtype": "float16", "shape": (4096, 28672)}, False),
]


@needs_triton
@pytest.mark.parametrize(("made", "flags", "whole"), CODES, ids=str)
def test_machine_code(made, flags, whole):
    from halfbyte.kernels.cuda.fp8_gluon_code import fp8

    types, held = program_of(made, accepted(**flags), whole)
    types = {name: of.removesuffix(":16") for name, of in types.items()}
    code = Program(fp8, types, held, options_of()).compile(90)
    print(code)
    assert (code.stack, code.spills, code.warnings) == (0, 0, [])
    assert [(loop.matrix, loop.shuffles) for loop in code.loops] == [(8, 0)] * 2
    assert max(loop.per_matrix for loop in code.loops) <= 58
    assert all(count(loop.opcodes, r"(LDG|STG)\b") == 0 for loop in code.loops)
    assert code.shared <= SHARED - 1024
    (first, _), (expected, copied) = code.expected
    assert first == expected == copied


# On a GPU

# N, K, rows, configuration, dtypes of the copy, activations, results and bias; scale2 per row, pre_scale
RESULTS = [
    ((16, 1), 64, (17, 40), None, "bfloat16", "bfloat16", "bfloat16", None, False, False),
    ((16, 257), 16, (40, 300), None, "float16", "float16", "float16", "float16", True, True),
    ((4096, 40), 512, (256, 129), None, "bfloat16", "float32", "float32", "float32", False, False),
    ((33, 257), 14336, (1, 256), None, "float16", "bfloat16", "float32", None, True, False),
    ((300,), 28672, (256,), Fp8(), "bfloat16", "bfloat16", "bfloat16", None, True, False),
    ((136, 1001), 1104, (100, 513), Fp8(128, 3), "bfloat16", "float16", "bfloat16", "float32", True, True),
    ((1000, 17), 4133, (257, 65), Fp8(256, 4), "float16", "bfloat16", "float16", None, True, False),
]


def jobs():
    """All programs of what follows."""
    found = []
    for sizes, k, all_rows, made, copy, dtype, out_dtype, bias, per_row, pre in RESULTS:
        of = {"layout": Fragments(copy), "dtype": dtype, "out_dtype": out_dtype, "per_row": per_row, "pre_scale": pre}
        for n, rows in itertools.product(sizes, all_rows):
            found.append((accepted(shape=(n, k), rows=rows, bias=bias is not None, **of), bias or "float32", made))
    found += [(accepted(shape=RAGGED, rows=300, out_dtype="float32"), "float32", made) for made in CONFIGURATIONS]
    for call, bias, made in found:
        chosen = made or fp8_gluon.configure(call)
        split = fp8_gluon._schedule(call, chosen, 0).split > 0
        whole = call.shape[0] * (4 if call.out_dtype == "float32" else 2) % 16 == 0
        how = {"capability": 90, "ordered": True, "pre_scale": call.pre_scale, "early": True}
        types, held, warps = fp8_quantize.specified(call.dtype, call.shape[1], **how)
        yield "halfbyte.kernels.cuda.fp8_quantize_code", "quantize", (types, held, options_of(warps=warps))
        for fits in {whole, False}:
            types = signature(call.out_dtype, chosen, f"*{fp8_gluon.TYPES[bias]}", fits)
            program = types, constants(call, chosen, fits, split), options_of()
            yield "halfbyte.kernels.cuda.fp8_gluon_code", "fp8", program


RAGGED = (1000, 1024 + 48)


@pytest.fixture(scope="class")
def compiled():
    """All programs, compiled by all cores at once."""
    compile_all(list(jobs()), 90)


def result(args, made=None):
    fp8_gluon.bind(args, made)(args.x, args.bias, args.out)
    return args.out


def wanted(x, weight, bias):
    """What the same quantized values give, in f64."""
    twin = to_fp8(weight)
    q, scale = quantized(to_numpy(x), twin.pre_scale)
    product = decode_e4m3(q).astype(np.float64) @ decode_e4m3(twin.data).astype(np.float64).T
    product *= scale.astype(np.float64) * np.broadcast_to(twin.scale.reshape(-1), len(twin.data))
    return product if bias is None else product + to_numpy(bias).astype(np.float64)


def off(got, expected):
    return np.linalg.norm(to_numpy(got).astype(np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.usefixtures("compiled")
class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("case", RESULTS, ids=str)
    def test_results(self, case):
        sizes, k, all_rows, made, copy, dtype, out_dtype, bias, per_row, pre = case
        for n, rows in itertools.product(sizes, all_rows):
            of = {"scales": (0, 127), "per_row": per_row, "pre_scale": pre}
            weight, args = fp8_arguments(n, k, rows, copy, out_dtype, bias, "cuda", **of)
            poisoned, out = guarded(args.out, float("nan"))
            x = guarded(args.x.to(getattr(torch, dtype)), float("nan"))[1]
            args = replace(args, x=x, out=out, weight=replace_buffers(args.weight))
            expected = wanted(x, weight, args.bias)
            assert off(result(args, made), expected) <= ERROR, (n, rows)
            assert torch.isnan(poisoned).sum() == poisoned.numel() - out.numel()

    @pytest.mark.parametrize("copy", DTYPES)
    def test_one_token_at_a_time_is_the_twin(self, copy):
        rng = np.random.default_rng(7)
        scales = rng.permuted(np.resize(np.arange(0x7F, dtype=np.uint8), 48 * 40)).reshape(48, 40)
        weight = Weight(codes=rng.integers(0, 256, (48, 320), np.uint8), scales=scales, scale2=np.float32(0.25))
        packed = hb.pack(weight, Fragments(copy)).to("cuda")
        x = 448 * torch.eye(640, dtype=torch.bfloat16, device="cuda")  # with a scale of 1, and an exact product
        out = torch.empty(640, 48, device="cuda")
        got = to_numpy(result(Fp8Args(x=x, weight=packed, bias=None, out=out))).T
        twin = to_fp8(weight)
        np.testing.assert_array_equal(got, decode_e4m3(twin.data) * np.float32(448) * twin.scale)

    @pytest.mark.parametrize("made", CONFIGURATIONS, ids=str)
    def test_every_configuration_is_right_and_repeats_itself(self, made):
        weight, args = fp8_arguments(*RAGGED, 300, "bfloat16", "float32", None, "cuda", scales=(0, 127))
        poisoned, out = guarded(torch.empty(300, RAGGED[0], device="cuda"), float("nan"))
        args = replace(args, x=guarded(args.x, float("nan"))[1], out=out, weight=replace_buffers(args.weight))
        got = result(args, made).clone()
        assert off(got, wanted(args.x, weight, None)) <= ERROR
        for _ in range(3):
            poisoned.fill_(float("nan"))
            assert torch.equal(result(args, made), got)
        assert torch.isnan(poisoned).sum() == poisoned.numel() - out.numel()

    def test_a_row_does_not_depend_on_the_others(self):
        _, args = fp8_arguments(*RAGGED, 300, out_dtype="float32", device="cuda")
        for made in (Fp8(128, 2), Fp8()):
            whole = result(args, made).clone()
            x = args.x.clone()
            x[57] *= 2
            x[101, 5] = float("nan")
            other = result(replace(args, x=x, out=torch.empty_like(whole)), made)
            assert (other != whole).any(1).nonzero().flatten().tolist() == [57, 101]
            assert other[101].isnan().all()

    def test_repeats_in_graphs_and_chains_are_identical(self):
        """Each launch reads what the one ahead of it wrote; all of it is split, and in the same memory."""
        _, args = fp8_arguments(512, 512, 300, device="cuda", scales=(20, 30))
        run = fp8_gluon.bind(args, Fp8(128, 2))
        check_chains(run, args.x)

    def test_a_weight_written_right_before_the_call_is_read_whole(self):
        _, args = fp8_arguments(4096, 4096, 256, device="cuda")
        for weight, expected in still_being_written(args, result, 10):
            assert torch.equal(result(replace(args, weight=weight)), expected)
