"""The Gluon decode kernel: its assembly evaluated, its machine code, its launches, and, on a GPU, its results."""

import contextlib
import itertools
import re
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
    on_gpu,
    replace_buffers,
    stand_in,
    still_being_written,
)
from gpu_codecs import needs_triton
from halfbyte.errors import NoKernelError
from halfbyte.kernels import LinearArgs
from halfbyte.kernels.cuda import decode_gluon
from halfbyte.kernels.cuda.decode_gluon import (
    CONFIGURATIONS,
    GLUON,
    Decode,
    constants,
    decode_code,
    scale_code,
    signature,
)
from halfbyte.kernels.cuda.launch import options_of
from halfbyte.layouts import Fragments, Packed, Rows
from halfbyte.layouts.fragments import FACTOR
from halfbyte.weight import Weight, to_numpy
from helpers_run import HALF_ULP, call_like, exact_linear, random_weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_assembly_decodes_every_code_with_every_scale(dtype):
    rng = np.random.default_rng(5)
    scales = rng.permuted(np.resize(np.arange(0x7F, dtype=np.uint8), 16 * 256)).reshape(16, 256)
    weight = Weight(codes=rng.integers(0, 256, (16, 2048), np.uint8), scales=scales, scale2=1.0)
    packed = Fragments(dtype).pack(weight).buffers()
    words = packed["codes"].view(np.uint32).reshape(64, 8, 4, 4).astype(np.uint64)
    pairs = packed["scales"].view(np.uint16).reshape(64, 8, 4, 1).astype(np.uint64)
    scales = evaluate(scale_code(dtype), **{"$1": pairs})["$0"]
    outputs = evaluate(decode_code(dtype), **{"$4": words, "$5": scales + 0 * words})
    products = np.stack([outputs[f"${o}"] for o in range(4)], -2)  # u g kt c (h rh) p
    rows = products.reshape(64, 8, 4, 4, 2, 2, 2).transpose(5, 1, 0, 2, 4, 3, 6).reshape(16, 4096)
    np.testing.assert_array_equal(rows * FACTOR, weight.dequantize("float32").astype(np.float64))


def test_every_unit_is_multiplied_once_and_none_is_read_beyond_the_last():
    for units in [*range(1, 70), 112, 128, 448]:
        for warps in (1, 2, 4, 8, 16):
            for ahead in (1, 2, 3, 4, 8):
                for unroll in (4, 16, 64):
                    made = Decode(warps=warps, ahead=ahead, prefetch=unroll, unroll=unroll)
                    held = constants((16, 64 * units), 1, "bfloat16", per_row=False, bias=False, made=made)
                    steps, looped = -(-units // warps), held["L"] * held["D"]
                    assert 1 <= held["D"] <= steps
                    assert 0 <= looped < steps
                    if looped:  # loads of the loop have no mask
                        assert steps > unroll
                        assert (looped + held["D"]) * warps <= units
                    assert steps - looped <= max(unroll, 2 * held["D"] + 1)
                    begun = held["D"] * warps
                    assert held["P"] == 0 or begun + held["P"] == min(units, made.prefetch)
                    assert held["P"] >= 0


def test_tiles_are_no_more_than_the_weight_has():
    made = Decode(tiles=4)
    assert [decode_gluon.tiles(n, made) for n in (0, 1, 16, 17, 33, 48, 49, 64, 65, 10**6)] == [
        1,
        1,
        1,
        2,
        2,
        2,
        4,
        4,
        4,
        4,
    ]


def accepted(**changes):
    fields = {"layout": Fragments(), "device": "cuda", "capability": 90} | changes
    return call_like(**fields)


@needs_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu", "capability": 0}, "runs on NVIDIA GPUs, not on cpu"),
        ({"capability": 80}, "is for sm_90, not sm_80"),
        ({"capability": 100}, "is for sm_90, not sm_100"),
        ({"layout": Rows()}, "reads the layout fragments(dtype=bfloat16), not rows"),
        ({"layout": Fragments("float16")}, "reads the layout fragments(dtype=bfloat16), not fragments(dtype=float16)"),
        ({"dtype": "float16"}, "reads the layout fragments(dtype=float16), not fragments(dtype=bfloat16)"),
        ({"dtype": "float32"}, "takes bfloat16 or float16 activations, not float32"),
        ({"dtype": "float32", "layout": Rows()}, "reads the layout fragments(dtype=bfloat16), not rows"),
        ({"shape": (3, 32, 64)}, "takes one matrix (N, K), not expert axes (3,)"),
        ({"shape": (32, 70)}, "takes a K that is a multiple of 16, not 70"),
        ({"pre_scale": True}, "multiplies activations as they come, without a pre_scale"),
        ({"rows": 17}, "takes up to 16 tokens, not 17"),
        ({"aligned": False}, "takes codes and scales that begin at multiples of 16 bytes; clone the buffers"),
    ],
)
def test_refusals(changes, reason):
    assert GLUON.refuse(accepted()) == ()
    assert reason in GLUON.refuse(accepted(**changes))


@needs_triton
def test_the_true_k_of_a_weight_whose_last_block_is_padded_is_refused():
    """Activations of the true K lie too near to each other for whole blocks of them to be read."""
    packed = hb.pack(random_weight(40, 70), Fragments())
    assert packed.shape == (40, 70)
    with pytest.raises(NoKernelError, match="gluon-decode: takes a K that is a multiple of 16, not 70"):
        hb.plan("linear", packed, rows=1, device="cuda:sm_90")


@needs_triton
def test_an_untested_triton_is_refused_by_name(monkeypatch):
    check_an_untested_triton(monkeypatch, GLUON.refuse, accepted())


# Launches: the first ones wait for all that is ahead of them


@pytest.fixture
def launches(monkeypatch):
    """What ``bind`` launches, with stand-ins for torch's stream and event."""
    state = SimpleNamespace(kinds=[], values=[], capturing=False, finished=False, recorded=0)

    def program(call, bias_dtype, made, device, pdl, gate, in_order):
        return stand_in(state, "early" if pdl else "ordinary")

    def record_event():
        state.recorded += 1
        return SimpleNamespace(query=lambda: state.finished)

    monkeypatch.setattr(decode_gluon, "_program", program)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=record_event))
    return state


def test_no_launch_starts_early_before_the_first_one_is_over(launches):
    _, args = arguments()
    run = decode_gluon.bind(args, Decode(tiles=2))
    run(args.x, None, args.out)
    run(args.x, None, args.out)
    assert (launches.kinds, launches.recorded) == (["ordinary"] * 2, 1)
    launches.finished = True
    run(args.x, None, args.out)  # which learns of it
    run(args.x, None, args.out)
    assert launches.kinds == ["ordinary"] * 3 + ["early"]
    buffers = args.weight.buffers()
    addresses = [buffers[name].data_ptr() for name in ("codes", "scales", "scale2")]
    expected = (*addresses, args.x.data_ptr(), None, args.out.data_ptr(), 3, 40)
    assert launches.values == [((2, 1, 1), expected)] * 4


def test_a_capture_with_no_finished_launch_before_it_holds_ordinary_ones(launches):
    _, args = arguments()
    run = decode_gluon.bind(args, Decode())
    launches.capturing = launches.finished = True
    run(args.x, None, args.out)
    run(args.x, None, args.out)
    assert (launches.kinds, launches.recorded) == (["ordinary"] * 2, 0)
    launches.capturing = False
    run(args.x, None, args.out)
    run(args.x, None, args.out)
    launches.capturing = True
    run(args.x, None, args.out)
    assert launches.kinds == ["ordinary"] * 4 + ["early"]


def test_no_launch_starts_early_on_a_weight_whose_writes_are_not_counted(launches):
    with torch.inference_mode():
        _, args = arguments()
        moved = {name: buffer.clone() for name, buffer in args.weight.buffers().items()}
        args = replace(args, weight=Packed(args.weight.layout, args.weight.shape, moved))
    run = decode_gluon.bind(args, Decode())
    launches.finished = True
    for _ in range(4):
        run(args.x, None, args.out)
    assert (launches.kinds, launches.recorded) == (["ordinary"] * 4, 0)


def test_activations_at_odd_addresses_are_copied(launches):
    _, args = arguments(rows=1)
    run = decode_gluon.bind(args, Decode())
    odd = at_an_odd_address(80)
    run(odd, None, args.out)
    assert launches.values[0][1][3] % 16 == 0


# Machine code


def code_of(shape=(14336, 4096), rows=8, dtype="bfloat16", out_dtype="bfloat16", made=None, **flags):
    from halfbyte.kernels.cuda.decode_gluon_code import decode

    made = made or made_of({"rows": rows})
    flags = {"per_row": True, "bias": False} | flags
    held = constants(shape, rows, dtype, made=made, **flags)
    types = {name: of.removesuffix(":16") for name, of in signature(dtype, out_dtype, "float32").items()}
    options = {"num_warps": made.warps} | ({"maxnreg": made.registers} if made.registers else {})
    return Program(decode, types, held, options).compile(90), held


def made_of(case):
    return case.get("made") or (decode_gluon.FEW if case.get("rows", 8) <= 8 else decode_gluon.MANY)


CODES = [
    ({}, 64, 16.5),
    ({"rows": 16}, 112, 10.5),
    ({"rows": 16, "made": Decode(warps=8, ahead=4), "shape": (4096, 4096)}, 96, 12.0),
    ({"dtype": "float16", "out_dtype": "float32", "bias": True, "per_row": False}, 64, 17.5),
    ({"shape": (28672, 8192), "made": Decode(unroll=8)}, 72, 17.5),
    ({"shape": (100, 4096 + 48), "made": Decode(tiles=2, prefetch=1000, unroll=64)}, 104, 16.5),
    ({"rows": 1}, 64, 16.5),
    ({"rows": 2, "made": Decode(warps=8, ahead=3), "shape": (6144, 4096)}, 64, 16.5),
    ({"rows": 4, "made": Decode(warps=16, ahead=4, registers=64), "shape": (4096, 14336)}, 64, 16.5),
]


@needs_triton
@pytest.mark.parametrize("columns", [2, 4, 8])
def test_sums_are_passed_from_column_to_column(columns):
    """Lane c of a quad holds columns 2 c and 2 c + 1."""
    from halfbyte.kernels.cuda.decode_gluon_code import _passed_code

    held = [[None, None] for _ in range(4)]
    for first in range(0, 8, columns):
        held[first // 2][0] = f"of {first}"
    for j in range(20):
        before, held = held, [[None, None] for _ in range(4)]
        for lane in range(4):
            registers = dict(zip(("$2", "$3"), before[lane], strict=True))
            for line in _passed_code(j, columns).split(";")[:-1]:
                name, *words = line.replace(",", "").split()
                if name == "mov.b32":
                    registers[words[0]] = registers[words[1]]
                elif name in ("shfl.sync.up.b32", "shfl.sync.down.b32"):
                    other = lane + int(words[2]) * (-1 if "up" in name else 1)
                    registers[words[0]] = before[other][("$2", "$3").index(words[1])] if 0 <= other < 4 else None
                else:
                    raise AssertionError(line)
            held[lane] = [registers["$0"], registers["$1"]]
        for first in range(0, 8, columns):
            column = first + (j + 1) % columns
            assert held[column // 2][column % 2] == f"of {first}", j


@needs_triton
@pytest.mark.parametrize(("case", "registers", "per_step"), CODES)
def test_machine_code(case, registers, per_step):
    code, held = code_of(**case)
    opcodes = [opcode for _, _, opcode, _ in code.instructions]
    matrix = [i for i, opcode in enumerate(opcodes) if opcode.startswith("HMMA.16816")]
    (wait,) = (i for i, opcode in enumerate(opcodes) if opcode.startswith("ACQBULK"))
    loads = [i for i, opcode in enumerate(opcodes) if opcode.startswith("LDG")]
    print(code, len(matrix))
    assert (code.stack, code.spills, code.warnings) == (0, 0, [])
    assert code.registers <= registers
    passed = 2 * held["R"] * sum(j % 2 for j in range(-(-held["K"] // (64 * made_of(case).warps)) - 1))
    behind = sum(opcode.startswith("SHFL") for opcode in opcodes[matrix[-1] :])
    assert count(code.opcodes, r"SHFL") == behind + (passed if held["S"] > 2 else 0)
    steps = 4 * held["R"] * held["NB"] // 8
    assert not len(matrix) % steps
    inside = matrix[-1] - matrix[0] + 1
    assert inside / len(matrix) <= per_step
    first = [opcodes[i] for i in loads if i < wait]
    assert sorted(first) == sorted(["LDG.E.EF.128", "LDG.E.EF.U16"] * held["R"] * held["D"])
    asked = [int(n) for n in re.findall(r"bulk.prefetch.L2.global \[\S+\], (\d+);", code.ptx)]
    assert asked == [512 * held["P"], 64 * held["P"]] * (held["R"] if held["P"] else 0)
    assert count(code.opcodes, "UBLKPF") == len(asked)
    assert not [opcode for opcode in opcodes if opcode.startswith("LDG.E.EF") and opcode[9:] not in ("128", "U16")]


# On a GPU


def result(args, made=None):
    run = decode_gluon.bind(args, made)
    run(args.x, args.bias, args.out)
    return args.out


OTHERS = [
    Decode(warps=8, ahead=3, prefetch=1000),
    Decode(warps=16, ahead=4, unroll=16),
    Decode(warps=4, tiles=2, ahead=2, prefetch=20),
    Decode(warps=2, ahead=8, unroll=4),
    Decode(warps=8, tiles=4, ahead=1, unroll=2, prefetch=9),
]
"""Beside those that are chosen, with more warps, loops or tiles."""
EVERY = [*CONFIGURATIONS, *OTHERS]
RAGGED = (100, 4096 + 48)

# N, K, configuration, dtypes of activations, results and bias, scale2 per row
RESULTS = [
    ((16, 1), 64, None, "bfloat16", "bfloat16", None, False),
    ((16, 257), 16, None, "float16", "float16", "float16", True),
    ((4096, 40), 512, None, "bfloat16", "float32", "float32", False),
    ((33, 257), 14336, None, "float16", "float32", None, True),
    ((33,), 28672, None, "bfloat16", "bfloat16", "bfloat16", False),
    ((40, 1), 80, OTHERS[0], "float16", "bfloat16", "float32", True),
    ((100, 17), 1088, OTHERS[1], "bfloat16", "float16", None, True),
    ((17, 257), 4144, OTHERS[2], "float16", "float16", "bfloat16", False),
    ((100, 64), 4144, OTHERS[3], "bfloat16", "float32", None, True),
    ((257, 100), 1088, OTHERS[4], "float16", "bfloat16", None, False),
]


def programs():
    """Of all that follows: a call, its bias and a configuration for each."""
    for sizes, k, made, dtype, out_dtype, bias, per_row in RESULTS:
        of = {"dtype": dtype, "layout": Fragments(dtype), "out_dtype": out_dtype, "per_row": per_row}
        for n, rows in itertools.product(sizes, (1, 3, 8, 16)):
            yield accepted(shape=(n, k), rows=rows, bias=bias is not None, **of), bias or "float32", made
    for dtype in DTYPES:
        yield (
            accepted(shape=(48, 640), rows=16, dtype=dtype, layout=Fragments(dtype), out_dtype="float32"),
            "float32",
            None,
        )
    for made in EVERY:
        few = (("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 4)) if made in OTHERS[:3] else ()
        for dtype, rows in (("bfloat16", 8), ("bfloat16", 16), ("float16", 8), *few):
            of = {"dtype": dtype, "layout": Fragments(dtype), "out_dtype": "float32"}
            yield accepted(shape=RAGGED, rows=rows, **of), "float32", made
    yield accepted(shape=(64, 512), rows=8, out_dtype="float32"), "float32", None
    yield accepted(shape=(512, 512), rows=4), "float32", None
    yield accepted(shape=(4096, 4096)), "float32", None


@pytest.fixture(scope="class")
def compiled():
    """All programs, compiled by all cores at once."""
    held = [(call, bias, made or decode_gluon.configure(call)) for call, bias, made in programs()]
    compile_ahead(
        "halfbyte.kernels.cuda.decode_gluon_code",
        "decode",
        [
            (*decode_gluon.parts(call, bias, made), options_of(warps=made.warps, maxnreg=made.registers))
            for call, bias, made in held
        ],
        90,
    )


@pytest.mark.usefixtures("compiled")
class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("case", RESULTS, ids=str)
    def test_results(self, case):
        sizes, k, made, dtype, out_dtype, bias, per_row = case
        for n in sizes:
            for rows in (1, 3, 8, 9, 16):
                of = {"scales": (40, 60), "per_row": per_row}
                weight, args = arguments(n, k, rows, dtype, out_dtype, bias, "cuda", **of)
                poisoned, out = guarded(args.out, float("nan"))
                args = replace(args, x=guarded(args.x, float("nan"))[1], out=out)
                args = replace(args, weight=replace_buffers(args.weight))
                got = to_numpy(result(args, made)).astype(np.float64)
                bias_values = None if bias is None else to_numpy(args.bias).astype(np.float64)
                expected, magnitude = exact_linear(to_numpy(args.x).astype(np.float64), weight, bias_values)
                bound = ((k + 24) * 2.0**-23 + 2.0**-24) * magnitude + HALF_ULP[out_dtype] * abs(expected)
                tiny = 2.0**-25 if out_dtype == "float16" else 0.0
                assert (abs(got - expected) <= 1.01 * bound + tiny).all(), (n, rows)
                assert torch.isnan(poisoned).sum() == poisoned.numel() - out.numel()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_token_at_a_time_is_the_decoded_weight(self, dtype):
        rng = np.random.default_rng(7)
        scales = rng.permuted(np.resize(np.arange(0x7F, dtype=np.uint8), 48 * 40)).reshape(48, 40)
        weight = Weight(codes=rng.integers(0, 256, (48, 320), np.uint8), scales=scales, scale2=np.float32(0.37))
        packed = hb.pack(weight, Fragments(dtype)).to("cuda")
        eye = torch.eye(640, dtype=getattr(torch, dtype), device="cuda")
        rows = []
        for i in range(0, 640, 16):
            out = torch.empty(16, 48, device="cuda")
            rows.append(result(LinearArgs(x=eye[i : i + 16], weight=packed, bias=None, out=out)))
        np.testing.assert_array_equal(to_numpy(torch.cat(rows)).T, weight.dequantize("float32"))

    @pytest.mark.parametrize("made", OTHERS[:3], ids=str)
    def test_a_row_does_not_depend_on_the_others(self, made):
        _, args = arguments(*RAGGED, 16, out_dtype="float32", device="cuda")
        whole = result(args, made).clone()
        for rows in range(1, 17):
            for at in range(17 - rows):
                part = replace(args, x=args.x[at : at + rows].clone(), out=torch.empty(rows, 100, device="cuda"))
                assert torch.equal(result(part, made), whole[at : at + rows]), (rows, at)
        x = args.x.clone()
        x.view(torch.int16)[5, 17] += 1  # the neighbouring bfloat16
        other = result(replace(args, x=x, out=torch.empty_like(whole)), made)
        assert (other != whole).any(1).tolist() == [i == 5 for i in range(16)]

    @pytest.mark.parametrize("warps", sorted({made.warps for made in EVERY}))
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_configuration_is_right_and_the_same_warps_give_the_same_bytes(self, dtype, warps):
        weight, args = arguments(*RAGGED, 16, dtype, "float32", None, "cuda", scales=(40, 60))
        args = replace(args, x=guarded(args.x, float("nan"))[1], weight=replace_buffers(args.weight))
        expected, magnitude = exact_linear(to_numpy(args.x).astype(np.float64), weight)
        bound = 1.01 * ((RAGGED[1] + 24) * 2.0**-23 + 2.0**-24) * magnitude
        first = None
        for made in (made for made in EVERY if made.warps == warps):
            for rows in (16, 5) if dtype == "bfloat16" else (5,):
                poisoned, out = guarded(torch.empty(rows, RAGGED[0], device="cuda"), float("nan"))
                got = result(replace(args, x=args.x[:rows], out=out), made)
                first = got if first is None else first
                assert torch.equal(got, first[:rows]), (made, rows)
                assert torch.isnan(poisoned).sum() == poisoned.numel() - out.numel()
        assert (abs(to_numpy(first) - expected[: len(first)]) <= bound[: len(first)]).all()

    def test_a_nan_stays_in_its_row(self):
        _, args = arguments(64, 512, 8, out_dtype="float32", device="cuda")
        whole = result(args).clone()
        args.x[3, 100] = float("nan")
        got = result(args)
        assert got[3].isnan().all()
        assert torch.equal(got[[0, 1, 2, 4, 5, 6, 7]], whole[[0, 1, 2, 4, 5, 6, 7]])

    def test_repeats_in_graphs_and_chains_are_identical(self):
        """Each launch reads what the one ahead of it wrote, and starts before that has ended."""
        _, args = arguments(512, 512, 4, device="cuda", scales=(20, 30))
        run = decode_gluon.bind(args)
        check_chains(run, args.x)

    def test_a_weight_written_right_before_the_call_is_read_whole(self):
        _, args = arguments(4096, 4096, 1, device="cuda")
        for weight, expected in still_being_written(args, result, 20):
            got = hb.linear(args.x, weight)
            assert torch.equal(got, expected)
            weight.buffers()["codes"].zero_()
            assert not hb.linear(args.x, weight).any()
