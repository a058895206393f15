"""The Triton kernels for every NVIDIA GPU: refusals, plans, launches, results in the interpreter and on a GPU."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import halfbyte as hb
from cuda_code import compile_all
from gpu_codecs import needs_triton
from halfbyte.errors import NoKernelError
from halfbyte.kernels import LinearArgs
from halfbyte.kernels.cuda import columns, decode, gemm, shared
from halfbyte.layouts import Columns, Fragments, Packed, Rows
from halfbyte.weight import to_numpy
from helpers_run import call_like, random_weight
from portable import arguments, bound, every_product, sources, transposed

capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
too_old = pytest.mark.skipif(capability < (8, 0), reason="torch sees no GPU from sm_80 on")
on_gpu = [pytest.mark.gpu, needs_triton, too_old]
DTYPES = ("bfloat16", "float16")
MADE = [
    *((kernel, Fragments, made) for kernel in (decode, gemm) for made in kernel.CONFIGURATIONS),
    *((columns, transposed(16), made) for made in columns.CONFIGURATIONS),
]
"""Every kernel, layout and configuration."""


def named(case):
    kernel, _, made = case[:3]
    return f"{kernel.NAME}-{'-'.join(str(field) for field in vars(made).values())}"


def accepted(kernel, **changes):
    layout = Columns(align=16) if kernel is columns else Fragments(changes.get("dtype", "bfloat16"))
    return call_like(**{"layout": layout, "device": "cuda", "capability": 90, "rows": 16} | changes)


# Refusals, and plans for GPUs that are not there

each = pytest.mark.parametrize("kernel", [decode, gemm, columns], ids=lambda kernel: kernel.NAME)


@needs_triton
@each
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu", "capability": 0}, "runs on NVIDIA GPUs, not on cpu"),
        ({"capability": 0}, "needs an NVIDIA GPU, and torch sees none"),
        ({"capability": 75}, "is for sm_80 or later, not sm_75"),
        ({"dtype": "float32"}, "takes bfloat16 or float16 activations, not float32"),
        ({"shape": (3, 32, 64)}, "takes one matrix (N, K), not expert axes (3,)"),
        ({"shape": (32, 72)}, "takes a K that is a multiple of 16, not 72"),
        ({"pre_scale": True}, "multiplies activations as they come, without a pre_scale"),
        ({"aligned": False}, "takes codes and scales that begin at multiples of 16 bytes; clone the buffers"),
    ],
)
def test_refusals(kernel, changes, reason):
    assert kernel.TRITON.refuse(replace(accepted(kernel), **changes))[:1] == (reason,)


@needs_triton
@each
def test_nothing_else_is_refused(kernel):
    for sm, dtype, out_dtype, bias in itertools.product(
        (80, 86, 89, 90, 100, 120), DTYPES, (*DTYPES, "float32"), (False, True)
    ):
        call = accepted(kernel, capability=sm, dtype=dtype, out_dtype=out_dtype, bias=bias, shape=(31, 48))
        assert kernel.TRITON.refuse(call) == ()


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        (decode, {"rows": 17}, "takes up to 16 tokens, not 17"),
        (decode, {"layout": Rows()}, "reads the layout fragments(dtype=bfloat16), not rows"),
        (
            gemm,
            {"layout": Fragments("float16")},
            "reads the layout fragments(dtype=bfloat16), not fragments(dtype=float16)",
        ),
        (columns, {"layout": Rows()}, "reads the layout columns, not rows"),
    ],
)
def test_refusals_of_one(kernel, changes, reason):
    assert kernel.TRITON.refuse(accepted(kernel, **changes)) == (reason,)


@needs_triton
@pytest.mark.parametrize("sm", [80, 89, 100, 120])
def test_plans_for_every_gpu(sm):
    weight = random_weight(64, 80)
    for layout, names in ((Fragments(), ["triton-decode", "triton-gemm"]), (Columns(), ["triton-columns"] * 2)):
        packed = hb.pack(weight, layout)
        plans = [hb.plan("linear", packed, rows=rows, device=f"cuda:sm_{sm}") for rows in (16, 17)]
        assert [plan.kernel for plan in plans] == names
        assert all(plan.configuration for plan in plans)


@needs_triton
def test_an_older_gpu_is_told_what_is_needed():
    with pytest.raises(NoKernelError, match="triton-gemm: is for sm_80 or later, not sm_75"):
        hb.plan("linear", hb.pack(random_weight(64, 80), Fragments()), rows=64, device="cuda:sm_75")


@pytest.mark.parametrize(
    ("n", "tokens", "parts"),
    [
        (4096, [32, 32, 64, 64, 128, 128, 128], [4, 4, 4, 4, 2, 2, 1]),
        (12800, [32, 32, 64, 64, 128, 128, 128], [2, 2, 2, 2, 1, 1, 1]),
        (28672, [32, 32, 64, 64, 128, 128, 128], [1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_configurations_follow_the_shape(n, tokens, parts):
    calls = [accepted(gemm, capability=80, shape=(n, 4096), rows=m) for m in (1, 32, 33, 64, 65, 256, 257)]
    made = [gemm.configure(call) for call in calls]
    assert [one.tokens for one in made] == tokens
    assert [one.parts for one in made] == parts
    assert set(made) <= set(gemm.CONFIGURATIONS)


def test_few_tokens_of_columns_go_another_way():
    assert isinstance(columns.configure(accepted(columns, capability=80, rows=16)), columns.Few)
    assert isinstance(columns.configure(accepted(columns, capability=80, rows=17)), columns.Many)


def test_memory_for_sums_of_parts():
    call = accepted(gemm, capability=80, shape=(4096, 4096), rows=17)
    assert gemm.scratch(call) == 4096 * 32 * 4 * 4 + 64 * 4
    assert gemm.scratch(replace(call, rows=9999)) == 0


# Launches


@needs_triton
def test_activations_at_odd_addresses_are_copied_and_results_there_have_a_program(monkeypatch):
    """Results may be stored 16 bytes at a time only where every row of them begins at a multiple of 16."""
    launched = []

    def program(call, bias, made, device, whole):
        return lambda grid, values: launched.append((whole, values[2] % 16, values[5] % 16))

    monkeypatch.setattr(gemm, "_program", program)
    for n in (64, 40):
        args = arguments(random_weight(n, 64), Fragments(), 2, "bfloat16", "bfloat16")
        run = gemm.bind(args, gemm.Gemm())
        run(args.x, None, args.out)
        odd = torch.empty(2 * 64 + 2 * n + 2, dtype=torch.bfloat16)
        run(odd[1 : 1 + 128].view(2, 64), None, odd[1 + 128 : 1 + 128 + 2 * n].view(2, n))
    assert launched == [(True, 0, 0), (False, 0, 2), (False, 0, 0), (False, 0, 2)]


# In the interpreter


def interpret(*words):
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    tests = Path(__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-m", "portable", *words], capture_output=True, text=True, env=environment, cwd=tests
    )


@needs_triton
def test_results_in_the_interpreter():
    """Every read and write is within its argument, whose last byte is followed by a page that ends the process."""
    done = interpret()
    assert (done.returncode, done.stdout) == (0, "36 18\n"), done.stderr


@needs_triton
def test_a_read_beyond_an_argument_ends_the_interpreter():
    done = interpret("beyond")
    assert done.returncode < 0, done.stderr
    assert not done.stdout


# On a GPU

GUARD = {"codes": 0xA5, "scales": 0xF6, "scale2": float("nan")}
"""Codes that decode to numbers and scales that are none."""


def guarded(a, fill):
    """A copy with values before and behind it that no kernel may read to any effect, or write."""
    room = 4096 // a.element_size()
    whole = torch.full((a.numel() + 2 * room,), fill, dtype=a.dtype, device=a.device)
    whole[room : room + a.numel()] = a.reshape(-1)
    return whole, whole[room : room + a.numel()].view(a.shape)


def guard(args):
    """The arguments between guards, and the memory around the result."""
    buffers = {name: guarded(b, GUARD[name])[1] for name, b in args.weight.buffers().items()}
    weight = Packed.from_buffers(args.weight.layout, args.weight.shape, buffers)
    memory, out = guarded(args.out, float("nan"))
    bias = None if args.bias is None else guarded(args.bias, float("nan"))[1]
    return memory, replace(args, x=guarded(args.x, float("nan"))[1], weight=weight, bias=bias, out=out)


def result(kernel, args, made):
    kernel.bind(args, made)(args.x, args.bias, args.out)
    return args.out


def rows_of(made):
    return (1, 8, 9, 16) if isinstance(made, decode.Decode | columns.Few) else (1, 17, 64, 130)


# layout, kernel, configuration or None, N, K, dtypes of activations, results and bias, scale2 per row
RESULTS = [
    (kernel, layout, made, *((257, 4144) if i % 2 else (100, 1088)), DTYPES[i % 2], (*DTYPES, "float32")[i % 3],
     (None, "float32", "bfloat16", "float16")[i % 4], bool(i // 2 % 2))
    for i, (kernel, layout, made) in enumerate(MADE)
] + [
    (decode, Fragments, decode.Decode(), 1, 16, "float16", "bfloat16", None, False),
    (gemm, Fragments, gemm.Gemm(), 1, 16, "bfloat16", "float32", None, True),
    (columns, transposed(1), columns.Few(), 37, 208, "bfloat16", "bfloat16", None, True),
    (columns, transposed(4), columns.Few(), 37, 208, "float16", "float32", None, True),
    (columns, transposed(1), columns.Many(), 37, 208, "bfloat16", "float32", None, True),
]  # fmt: skip
SOME = [
    next(case for case in MADE if type(case[2]) is kind)
    for kind in (decode.Decode, gemm.Gemm, columns.Few, columns.Many)
]
"""One configuration of each device code."""
PARTS = (gemm, Fragments, next(made for made in gemm.CONFIGURATIONS if made.parts == 4))
ALIKE = [decode.Decode(4, *fields) for fields in ((1, 4), (1, 1), (2, 2), (2, 1))]
SAME = [*SOME, PARTS]
LINEAR = [
    *((decode, Fragments(), rows) for rows in (0, 1, 16)),
    *((gemm, Fragments(), rows) for rows in (1, 17, 70)),
    *((columns, Columns(align), rows) for align in (1, 16) for rows in (1, 17)),
]
MANY = (65536, 64)


def programs():
    """Of all that follows."""
    for kernel, layout, made, n, k, dtype, out_dtype, bias, per_row in RESULTS:
        for rows in rows_of(made):
            of = {"dtype": dtype, "out_dtype": out_dtype, "per_row": per_row, "bias": bias is not None, "rows": rows}
            yield from sources(kernel, accepted(kernel, shape=(n, k), layout=layout(dtype), **of), bias, made)
    held = {"out_dtype": "float32", "rows": 16}
    for kernel, layout, made in SAME:
        for dtype in DTYPES:
            of = {"dtype": dtype, "layout": layout(dtype)}
            yield from sources(kernel, accepted(kernel, shape=(127, 64), **of, **held), None, made)
        for rows in (8, 16):
            call = accepted(kernel, shape=(100, 4144), layout=layout("bfloat16"), out_dtype="float32", rows=rows)
            yield from sources(kernel, call, None, made)
    for made in ALIKE:
        yield from sources(decode, accepted(decode, shape=(100, 4144), out_dtype="float32", rows=5), None, made)
    for kernel, layout, made in (SOME[1], SOME[3]):
        call = accepted(kernel, shape=MANY, layout=layout("bfloat16"), rows=64)
        yield from sources(kernel, call, None, made)
    for kernel, layout, rows in LINEAR:
        call = accepted(kernel, shape=(127, 208), layout=layout, rows=rows, bias=True)
        yield from sources(kernel, call, "bfloat16", kernel.configure(call))


@pytest.fixture(scope="class")
def compiled():
    """All programs, compiled by all cores at once."""
    compile_all(list(programs()), 10 * capability[0] + capability[1])


@pytest.mark.usefixtures("compiled")
class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("case", RESULTS, ids=named)
    def test_results(self, case):
        kernel, layout, made, n, k, dtype, out_dtype, bias, per_row = case
        weight = random_weight(n, k, per_row=per_row, scales=(40, 60))
        for rows in rows_of(made):
            args = arguments(weight, layout(dtype), rows, dtype, out_dtype, bias, "cuda")
            memory, args = guard(args)
            got = to_numpy(result(kernel, args, made)).astype(np.float64)
            added = None if bias is None else to_numpy(args.bias).astype(np.float64)
            expected, off = bound(to_numpy(args.x), weight, added, out_dtype, more=4)
            assert (np.abs(got - expected) <= off).all(), rows
            assert torch.isnan(memory).sum() == memory.numel() - args.out.numel()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("case", SAME, ids=named)
    def test_one_token_at_a_time_is_the_decoded_weight(self, case, dtype):
        kernel, layout, made = case
        weight = every_product(4)
        packed = hb.pack(weight, layout(dtype)).to("cuda")
        eye, rows = torch.eye(64, dtype=getattr(torch, dtype), device="cuda"), []
        for part in eye.split(16):
            out = torch.full((16, 127), float("nan"), device="cuda")
            rows.append(result(kernel, LinearArgs(x=part, weight=packed, bias=None, out=out), made))
        np.testing.assert_array_equal(to_numpy(torch.cat(rows)).T, weight.dequantize("float32"))

    @pytest.mark.parametrize("case", SAME, ids=named)
    def test_a_row_does_not_depend_on_the_others(self, case):
        kernel, layout, made = case
        most = rows_of(made)[-1]
        args = arguments(random_weight(100, 4144), layout("bfloat16"), most, "bfloat16", "float32", device="cuda")
        whole = result(kernel, args, made).clone()
        for rows in range(1, 17) if most == 16 else (1, 5, 16, 17, 63, 64, 65, 129):
            for at in {0, 1, (most - rows) // 2, most - rows}:
                part = args.x[at : at + rows].clone()
                held = replace(args, x=part, out=torch.empty(len(part), 100, device="cuda"))
                assert torch.equal(result(kernel, held, made), whole[at : at + rows]), (rows, at)
        x = args.x.clone()
        x.view(torch.int16)[5, 17] += 1  # the neighbouring bfloat16
        other = result(kernel, replace(args, x=x, out=torch.empty_like(whole)), made)
        assert (other != whole).any(1).tolist() == [i == 5 for i in range(most)]
        args.x[3, 100] = float("nan")
        got = result(kernel, args, made)
        assert got.isnan().all(1).tolist() == got.isnan().any(1).tolist() == [i == 3 for i in range(most)]

    def test_the_same_warps_give_the_same_bytes(self):
        args = arguments(random_weight(100, 4144), Fragments(), 5, "bfloat16", "float32", device="cuda")
        whole = result(decode, args, ALIKE[0]).clone()
        for made in ALIKE[1:]:
            args.out.fill_(float("nan"))
            assert torch.equal(result(decode, args, made), whole)

    @pytest.mark.parametrize("case", SAME, ids=named)
    def test_repeats_and_graphs_are_identical(self, case):
        kernel, layout, made = case
        args = arguments(random_weight(100, 4144), layout("bfloat16"), 16, "bfloat16", "float32", device="cuda")
        run = kernel.bind(args, made)
        first = result(kernel, args, made).clone()
        assert torch.isfinite(first).all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(args.x, None, args.out)
        for again in (lambda: run(args.x, None, args.out), graph.replay):
            for _ in range(20):
                args.out.fill_(float("nan"))
                again()
                assert torch.equal(args.out, first)

    def test_sums_of_parts_need_no_clean_memory_and_leave_counters_at_zero(self):
        kernel, layout, made = PARTS
        args = arguments(random_weight(100, 4144), layout("bfloat16"), 130, "bfloat16", "float32", device="cuda")
        sizes = gemm.scratch_of(args.call(), made)
        first = result(kernel, args, made).clone()
        for _ in range(20):
            shared.workspace(args.x.device, sizes[0]).view(torch.float32).fill_(float("nan"))
            args.out.fill_(float("nan"))
            assert torch.equal(result(kernel, args, made), first)
            assert not shared.counters(args.x.device, sizes[1]).any()

    @pytest.mark.parametrize("case", [SOME[1], SOME[3]], ids=named)
    def test_more_results_than_32_bits_count(self, case):
        kernel, layout, made = case
        n, rows = MANY[0], 32800
        args = arguments(random_weight(*MANY), layout("bfloat16"), 64, "bfloat16", "bfloat16", device="cuda")
        few = result(kernel, args, made)
        out = torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        x = args.x.repeat(-(-rows // 64), 1)[:rows].contiguous()
        result(kernel, replace(args, x=x, out=out), made)
        assert torch.equal(out[-32:], few[:32])
        assert not any(part.isnan().any() for part in out.split(4096))

    @pytest.mark.parametrize(("kernel", "layout", "rows"), LINEAR, ids=lambda part: getattr(part, "NAME", str(part)))
    def test_linear(self, kernel, layout, rows, monkeypatch):
        monkeypatch.setenv("HALFBYTE_KERNEL", kernel.NAME)
        weight = random_weight(127, 208, scales=(40, 60))
        args = arguments(weight, layout, rows, "bfloat16", "bfloat16", "bfloat16", "cuda")
        expected, off = bound(to_numpy(args.x), weight, to_numpy(args.bias).astype(np.float64), "bfloat16", more=4)
        for _ in range(2):  # the second call takes another way
            got = hb.linear(args.x, args.weight, args.bias)
            assert got.shape == (rows, 127)
            assert (np.abs(to_numpy(got).astype(np.float64) - expected) <= off).all()
