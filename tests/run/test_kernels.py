"""Every kernel of the table is held to the same contract: exact decoding, the derived bound, and refusals in words."""

from __future__ import annotations

import ast
import re
import threading
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte.kernels
from halfbyte import jit
from halfbyte.errors import LayoutError, NoKernelError, UsageError, WeightError
from halfbyte.kernels import KERNELS, Kernel, reference
from halfbyte.kernels.base import linear_cost
from halfbyte.layouts import LAYOUTS, Packed, Rows
from halfbyte.numerics import BLOCK
from halfbyte.ops import Plan, linear, pack, plan, unpack
from halfbyte.weight import Weight, float_dtype, to_numpy
from helpers_run import (
    DTYPES,
    HERE,
    LINEAR,
    assert_within_bound,
    call_like,
    everywhere,
    moved,
    places,
    random_floats,
    random_weight,
)

BOTH = (False, True)
SHAPES = [(1, 16), (3, 40), (64, 64), (65, 48), (100, 1000), (130, 31)]
"""(N, K): below, at and above one tile of rows; K of whole blocks, and K that ends inside one."""


@pytest.fixture
def forced(request, monkeypatch):
    """Only the kernel under test may run."""
    kernel: Kernel = request.getfixturevalue("kernel")
    monkeypatch.setenv("HALFBYTE_KERNEL", kernel.name)


@pytest.fixture
def one_thread():
    """On several threads MKL may choose another order of summation for each shape."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kernel", LINEAR, ids=lambda kernel: kernel.name)
def test_every_kernel_runs_here(kernel):
    """Or it says what this machine lacks: then nothing below is about it."""
    if any(case[0] is kernel for case in places(dtype=DTYPES)):
        return
    reasons = min((kernel.refuse(call_like(dtype=d, **place)) for d in DTYPES for place in HERE), key=len)
    lacking = "needs |numba |triton |NUMBA_|runs on NVIDIA GPUs|is for sm_|Gluon is tested"
    elsewhere = "is for 128 tokens|reads the layout"  # tests of such a kernel are in a file of its own
    assert all(re.match(f"{lacking}|{elsewhere}", reason) for reason in reasons), reasons
    pytest.skip(f"{kernel.name} {', '.join(reasons)}")


@pytest.mark.usefixtures("forced")
class TestEveryKernel:
    @everywhere(dtype=DTYPES, per_row=BOTH)
    def test_one_hot_activations_give_the_decoded_weight(self, kernel, library, device, dtype, per_row):
        w = random_weight(70, 88, per_row=per_row)
        one_hot = moved(np.eye(88, dtype=float_dtype(dtype)), library, device)
        y = to_numpy(linear(one_hot, moved(w, library, device)))
        assert np.array_equal(y.T, w.dequantize(dtype))

    @everywhere(dtype=DTYPES, out_dtype=["float32"])
    def test_every_finite_scale_code_and_every_code_decode(self, kernel, library, device, dtype, out_dtype):
        codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
        w = Weight(
            codes=codes[:, 0::2] | codes[:, 1::2] << 4,
            scales=np.arange(127, dtype=np.uint8)[:, None],  # 00 and the 126 positive finite ones
            scale2=1.0,
        )
        one_hot = np.eye(BLOCK, dtype=float_dtype(dtype))
        y = to_numpy(linear(moved(one_hot, library, device), moved(w, library, device), out_dtype=out_dtype))
        e4m3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        assert np.array_equal(y.T, e4m3[:, None] * e2m1)

    @everywhere(dtype=DTYPES)
    @pytest.mark.parametrize("m", [0, 1, 7])
    @pytest.mark.parametrize(("n", "k"), SHAPES)
    def test_random_activations_stay_within_the_bound(self, kernel, library, device, dtype, m, n, k):
        w, x = random_weight(n, k), random_floats((m, k), dtype)
        y = linear(moved(x, library, device), moved(w, library, device))
        assert_within_bound(y, x, w, None, dtype, kernel.name)

    @everywhere(dtype=DTYPES, pre_scale=BOTH, per_row=BOTH, out_dtype=DTYPES)
    @pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
    def test_options_stay_within_the_bound(
        self, kernel, library, device, dtype, bias_dtype, pre_scale, per_row, out_dtype
    ):
        w = random_weight(33, 72, per_row=per_row, pre_scale=pre_scale)
        x = random_floats((5, 72), dtype)
        bias = None if bias_dtype is None else random_floats((33,), bias_dtype)
        place = library, device
        y = linear(moved(x, *place), moved(w, *place), moved(bias, *place), out_dtype=out_dtype)
        assert str(y.dtype).removeprefix("torch.") == out_dtype
        assert_within_bound(y, x, w, bias, out_dtype, kernel.name)

    @everywhere(dtype=["float16"], out_dtype=["float32"])
    @settings(max_examples=25, deadline=None)
    @given(m=st.integers(1, 9), n=st.integers(1, 80), k=st.integers(1, 80), seed=st.integers(0, 2**16))
    def test_any_shape(self, kernel, library, device, dtype, out_dtype, m, n, k, seed):
        w, x = random_weight(n, k, seed=seed, scales=(0, 127)), random_floats((m, k), dtype, seed)
        y = linear(moved(x, library, device), moved(w, library, device), out_dtype=out_dtype)
        assert_within_bound(y, x, w, None, out_dtype, kernel.name)

    @everywhere(dtype=DTYPES)
    @pytest.mark.parametrize("lead", [(), (1,), (2, 3), (0,), (4, 0), (2, 1, 3)])
    def test_leading_axes_are_kept(self, kernel, library, device, dtype, lead):
        w = random_weight(20, 32)
        x = random_floats((*lead, 32), dtype)
        y = to_numpy(linear(moved(x, library, device), moved(w, library, device)))
        assert y.shape == (*lead, 20)
        assert_within_bound(y.reshape(-1, 20), x.reshape(-1, 32), w, None, dtype, kernel.name)

    @everywhere(dtype=DTYPES)
    def test_activations_may_be_strided(self, kernel, library, device, dtype):
        w = moved(random_weight(20, 32), library, device)
        x = moved(random_floats((32, 6), dtype), library, device)
        assert np.array_equal(
            to_numpy(linear(x.T, w)), to_numpy(linear(moved(to_numpy(x).T.copy(), library, device), w))
        )
        every_other = moved(random_floats((4, 64), dtype), library, device)[:, ::2]
        y = linear(every_other, w)
        assert_within_bound(y, to_numpy(every_other), random_weight(20, 32), None, dtype, kernel.name)

    @everywhere(dtype=DTYPES)
    def test_a_packed_weight_gives_the_same_as_the_weight(self, kernel, library, device, dtype):
        w, x = moved(random_weight(40, 64), library, device), moved(random_floats((3, 64), dtype), library, device)
        assert np.array_equal(to_numpy(linear(x, w)), to_numpy(linear(x, pack(w))))

    @everywhere(dtype=["float16"])
    def test_infinities_and_nan_pass_through(self, kernel, library, device, dtype):
        w = random_weight(20, 32).replace(codes=np.full((20, 16), 0x22, np.uint8), scale2=1.0)
        x = np.zeros((3, 32), dtype)
        x[0, 5], x[1, 5], x[2] = np.inf, np.nan, 60000
        y = to_numpy(linear(moved(x, library, device), moved(w, library, device)))
        assert np.isposinf(y[0]).all()
        assert np.isnan(y[1]).all()
        assert np.isposinf(y[2]).all()

    @pytest.mark.usefixtures("one_thread")
    @everywhere(dtype=DTYPES)
    @pytest.mark.parametrize("m", [1, 2, 5, 33])
    def test_a_feature_does_not_depend_on_its_neighbours(self, kernel, library, device, dtype, m):
        w, x = random_weight(130, 576), moved(random_floats((m, 576), dtype), library, device)
        order = np.random.default_rng(0).permutation(130)
        shuffled = w.replace(codes=w.codes[order], scales=w.scales[order])
        whole = to_numpy(linear(x, moved(w, library, device)))
        assert np.array_equal(to_numpy(linear(x, moved(shuffled, library, device))), whole[:, order])
        for a, b in ((0, 1), (63, 66), (7, 130)):
            assert np.array_equal(to_numpy(linear(x, moved(w.rows(a, b), library, device))), whole[:, a:b])

    @everywhere(dtype=DTYPES)
    def test_no_features(self, kernel, library, device, dtype):
        w = random_weight(20, 32).rows(0, 0)
        x = moved(random_floats((3, 32), dtype), library, device)
        assert linear(x, moved(w, library, device)).shape == (3, 0)

    @everywhere()
    def test_the_cost_counts_each_array_once(self, kernel, library, device):
        packed = pack(random_weight(70, 64, per_row=True, pre_scale=True))
        call = call_like(
            shape=(70, 64), per_row=True, pre_scale=True, rows=3, library=library, out_dtype="float32", bias=True
        )
        assert kernel.cost(call).bytes == packed.nbytes + 3 * 64 * 2 + 3 * 70 * 4 + 70 * 4
        assert kernel.cost(call).flops == 2 * 3 * 70 * 64


def test_numpy_and_torch_agree_within_the_bound():
    w, x = random_weight(100, 1000, per_row=True), random_floats((7, 1000), "bfloat16")
    one = linear(x, w, out_dtype="float32").astype(np.float64)
    two = to_numpy(linear(moved(x, "torch"), w.torch(), out_dtype="float32")).astype(np.float64)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(w.dequantize().astype(np.float64).T)
    assert np.all(np.abs(one - two) <= 2 * 1001 * 2.0**-24 * magnitude)


on_the_cpu = pytest.mark.parametrize("library", ["numpy", "torch"])


@pytest.mark.usefixtures("one_thread")
@on_the_cpu
@pytest.mark.parametrize("m", [1, 2, 5, 33])
@pytest.mark.parametrize(("n", "k"), [(200, 48), (257, 576), (130, 1000)])
def test_results_of_the_reference_do_not_depend_on_the_chunks(library, m, n, k, monkeypatch):
    monkeypatch.setenv("HALFBYTE_KERNEL", f"reference-{library}")
    w, x = moved(random_weight(n, k), library), moved(random_floats((m, k), "float32"), library)
    whole = to_numpy(linear(x, w))
    for tiles in (1, 2, 3):
        monkeypatch.setattr(reference, "SCRATCH_BYTES", tiles * reference.TILE * -(-k // BLOCK) * BLOCK * 7)
        assert np.array_equal(to_numpy(linear(x, w)), whole)


def test_memory_does_not_grow_with_the_weight(monkeypatch):
    monkeypatch.setenv("HALFBYTE_KERNEL", "reference-numpy")
    w, x = random_weight(30_000, 512), random_floats((1, 512), "float32")
    linear(x, w)
    tracemalloc.start()
    linear(x, w)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    decoded = w.n * w.k * 4
    assert peak < 2 * reference.SCRATCH_BYTES < decoded / 3


@pytest.mark.usefixtures("forced")
@everywhere(dtype=DTYPES)
def test_threads_do_not_share_scratch(kernel, library, device, dtype):
    cases = [(random_weight(300, 256, seed=s), random_floats((2, 256), dtype, s)) for s in range(4)]
    cases = [(moved(w, library, device), moved(x, library, device)) for w, x in cases]
    expected = [to_numpy(linear(x, w)) for w, x in cases]
    wrong = []

    def work(i: int) -> None:
        for _ in range(20):
            if not np.array_equal(to_numpy(linear(cases[i][1], cases[i][0])), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


in_torch = pytest.mark.parametrize(
    "kernel", [case[0] for case in places(dtype=["float32"]) if case[1:3] == ("torch", "cpu")], ids=lambda k: k.name
)


@pytest.mark.usefixtures("forced")
class TestTorch:
    @in_torch
    def test_autocast_does_not_round_the_products(self, kernel):
        w, x = random_weight(40, 64).torch(), moved(random_floats((3, 64), "float32"), "torch")
        plain = linear(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(linear(x, w), plain)

    @in_torch
    def test_buffers_may_start_at_an_odd_byte(self, kernel):
        w, x = random_weight(20, 32).torch(), torch.ones(1, 32)
        odd = torch.empty(w.codes.numel() + 1, dtype=torch.uint8)[1:].view(w.codes.shape).copy_(w.codes)
        assert torch.equal(linear(x, w.replace(codes=odd)), linear(x, w))

    @in_torch
    def test_inference_mode_leaves_nothing_behind(self, kernel):
        w, x = random_weight(40, 64).torch(), moved(random_floats((3, 64), "float32"), "torch")
        reference._torch_tables.cache_clear()
        with torch.inference_mode():
            first = linear(x, w)
        assert torch.equal(first, linear(x, w))

    @in_torch
    def test_backward_raises_instead_of_losing_the_gradient(self, kernel):
        w, x = random_weight(40, 64).torch(), torch.ones(3, 64, requires_grad=True)
        y = linear(x, w)
        assert y.requires_grad
        with pytest.raises(UsageError, match="has no gradient"):
            y.sum().backward()
        with torch.no_grad():
            assert torch.equal(linear(x, w), y.detach())

    @pytest.mark.parametrize("kernel", [reference.TORCH], ids=lambda k: k.name)
    @pytest.mark.parametrize("precision", ["high", "medium"])
    def test_reduced_float32_products_are_refused(self, kernel, precision):
        w, x = random_weight(40, 64).torch(), torch.ones(3, 64)
        try:
            torch.set_float32_matmul_precision(precision)
            with pytest.raises(NoKernelError, match="reference-torch: torch may compute float32 products in"):
                linear(x, w)
        finally:
            torch.set_float32_matmul_precision("highest")
        linear(x, w)


class TestErrors:
    w = random_weight(20, 32)
    x = np.ones((2, 32), np.float32)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([1.0], w), "x is of the wrong type: got list, expected a NumPy array or a torch tensor"),
            (
                (x.astype(np.float64), w),
                "x is of the wrong dtype: got float64, expected float32, bfloat16, float16; cast it first",
            ),
            ((x[:, :31], w), "the last axis of x is not the weight's K: got (2, 31), expected (..., 32)"),
            ((x[0, 0], w), "x is of the wrong type: got float32, expected a NumPy array or a torch tensor"),
            ((x, x), "not a weight: got ndarray, expected a Packed or a Weight"),
            ((x, w, x[0]), "bias does not fit the weight's N: got (32,), expected (20,)"),
            (
                (x, w, np.ones(20, np.int32)),
                "bias is of the wrong dtype: got int32, expected float32, bfloat16, float16; cast it first",
            ),
            (
                (torch.ones(2, 32), w),
                "the weight and x are of two libraries: got the weight in numpy, x in torch, expected one library; "
                "move the weight once: packed.to(device), or weight.torch() and weight.numpy()",
            ),
        ],
    )
    def test_each_says_what_came_and_what_is_needed(self, arguments, message):
        with pytest.raises(UsageError) as caught:
            linear(*arguments)
        assert str(caught.value) == message

    def test_bias_and_x_of_two_libraries(self):
        with pytest.raises(UsageError, match="bias and x are of two libraries"):
            linear(self.x, self.w, torch.ones(20))

    def test_two_devices(self):
        with pytest.raises(UsageError, match=r"the weight and x are on two devices: got the weight on cpu, x on meta"):
            linear(torch.ones(2, 32, device="meta"), self.w.torch())

    def test_out_dtype(self):
        with pytest.raises(UsageError, match="out_dtype is unknown: got int8"):
            linear(self.x, self.w, out_dtype="int8")

    def test_null_weight(self):
        with pytest.raises(WeightError, match="null"):
            linear(self.x, Weight.null((20, 32)))

    def test_nan_scales_cannot_be_packed(self):
        scales = self.w.scales.copy()
        scales[3, 1] = 0x7F
        with pytest.raises(LayoutError, match=r"block scale at \[3, 1\] is NaN"):
            linear(self.x, self.w.replace(scales=scales))

    def test_experts_are_refused_in_words(self):
        experts = Weight.stack([self.w, self.w])
        with pytest.raises(NoKernelError, match=r"reference-numpy: takes one matrix \(N, K\), not expert axes \(2,\)"):
            linear(self.x, experts)


class TestPack:
    @pytest.mark.parametrize("layout", ["rows", Rows()])
    def test_the_way_back_is_exact(self, layout):
        w = random_weight(20, 40, per_row=True, pre_scale=True)
        packed = pack(w, layout)
        assert isinstance(packed, Packed)
        assert unpack(packed).same(w)

    def test_unknown_layout(self):
        with pytest.raises(LayoutError, match="unknown layout"):
            pack(random_weight(16, 16), "no_such_layout")

    def test_what_is_none(self):
        with pytest.raises(
            UsageError, match=r"^not a layout: got NoneType, expected a Layout or its key, such as 'rows'$"
        ):
            pack(random_weight(16, 16), None)
        with pytest.raises(
            UsageError, match=r"^not a packed weight: got Weight, expected a Packed; see halfbyte\.pack$"
        ):
            unpack(random_weight(16, 16))


@pytest.fixture
def any_cpu(monkeypatch):
    """One of which no more is known than that LLVM compiles for it."""
    monkeypatch.setattr(jit, "has", lambda feature: False)


def on_the_cpu_only(refusals):
    """Without kernels for GPUs, each of which says so first."""
    gpu = {kernel.name for kernel in LINEAR if kernel.on_gpu}
    assert all(reasons.startswith("runs on NVIDIA GPUs, not on cpu") for name, reasons in refusals if name in gpu)
    return [(name, reasons) for name, reasons in refusals if name not in gpu]


@pytest.mark.usefixtures("any_cpu")
class TestPlan:
    packed = pack(random_weight(576, 1536))

    def test_it_names_the_kernel_and_why_others_declined(self):
        chosen = plan("linear", self.packed, rows=16, library="torch")
        assert isinstance(chosen, Plan)
        assert chosen.kernel == "cpu-portable"
        assert on_the_cpu_only(chosen.refusals) == [
            ("cpu-bf16", "needs avx512bf16 and avx512bw, which this CPU has not or HALFBYTE_CPU hides"),
            ("cpu-panels", "is for 128 tokens and more, not 16"),
            ("cpu-avx512", "needs avx512bw, which this CPU has not or HALFBYTE_CPU hides"),
            ("reference-numpy", "takes NumPy arrays, not torch tensors"),
        ]
        assert (chosen.bytes, chosen.flops) == (linear_cost(chosen.call).bytes, 2 * 16 * 576 * 1536)
        assert chosen.extra_bytes == 0
        assert plan("linear", self.packed, rows=16).call.library == "numpy"
        assert plan("linear", self.packed.to("cpu"), rows=16).call.library == "torch"

    def test_without_numba_it_is_the_reference(self, monkeypatch):
        missing = "numba is not installed; run: pip install 'halfbyte[cpu]'"
        monkeypatch.setattr(jit, "missing", lambda: missing)
        chosen = plan("linear", self.packed, rows=16)
        assert chosen.kernel == "reference-numpy"
        assert on_the_cpu_only(chosen.refusals) == [
            ("cpu-bf16", missing),
            (
                "cpu-panels",
                f"{missing}, and takes torch tensors, not NumPy arrays, and is for 128 tokens and more, not 16",
            ),
            ("cpu-avx512", missing),
            ("cpu-portable", missing),
            ("reference-torch", "takes torch tensors, not NumPy arrays"),
        ]
        assert plan("linear", self.packed.to("cpu"), rows=16).kernel == "reference-torch"

    def test_it_prints_as_a_table(self):
        chosen = plan("linear", self.packed, rows=16, out_dtype="float32", library="torch")
        lines = str(chosen).splitlines()
        width = 2 + max(len(f"not {name}") for name, _ in chosen.refusals)
        assert all(line[width - 2 : width] == "  " and line[width] != " " for line in lines)
        gpu = [f"not {k.name}" for k in LINEAR if k.on_gpu]
        assert [(line[:width].rstrip(), line[width:]) for line in lines if not line.startswith(tuple(gpu))] == [
            ("op", "linear N=576 K=1536 M=16, layout rows"),
            ("arrays", "torch on cpu, bfloat16 to float32"),
            ("kernel", "cpu-portable (first in the table that accepts)"),
            ("bytes", "583,684"),
            ("flops", "28,311,552"),
            ("extra", "0 bytes of the weight held twice"),
            ("not cpu-bf16", "needs avx512bf16 and avx512bw, which this CPU has not or HALFBYTE_CPU hides"),
            ("not cpu-panels", "is for 128 tokens and more, not 16"),
            ("not cpu-avx512", "needs avx512bw, which this CPU has not or HALFBYTE_CPU hides"),
            ("not reference-numpy", "takes NumPy arrays, not torch tensors"),
            ("note", "activations that are not contiguous are copied once: 24,576 values"),
        ]

    def test_a_weight_is_packed_each_time(self):
        w = random_weight(64, 64)
        chosen = plan("linear", w, rows=1)
        assert chosen.extra_bytes == 0
        assert any("pack it once" in note for note in chosen.notes)
        strided = w.replace(codes=np.asfortranarray(w.codes))
        assert plan("linear", strided, rows=1).extra_bytes == w.codes.size

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"op": "convolve"}, "unknown op: got 'convolve', expected linear or embedding or experts"),
            ({"rows": -1}, "rows cannot be negative: got -1"),
            ({"rows": 1.5}, "rows are a whole number: got 1.5"),
            ({"rows": "1"}, "rows are a whole number: got '1'"),
            ({"library": "jax"}, "unknown library: got 'jax', expected 'numpy' or 'torch'"),
            ({"dtype": "int8"}, "dtype is unknown: got int8, expected float32 or bfloat16 or float16"),
            ({"dtype": None}, "dtype is unknown: got None, expected float32 or bfloat16 or float16"),
            ({"dtype": 5}, "dtype is unknown: got 5, expected float32 or bfloat16 or float16"),
            ({"out_dtype": []}, "out_dtype is unknown: got [], expected float32 or bfloat16 or float16"),
        ],
    )
    def test_arguments_that_cannot_be_meant(self, changes, message):
        with pytest.raises(UsageError) as caught:
            plan(**({"op": "linear", "weight": self.packed, "rows": 1} | changes))
        assert str(caught.value) == message

    def test_rows_may_be_any_whole_number(self):
        assert plan("linear", self.packed, rows=np.int64(4), device="cuda:sm_90").call.rows == 4

    def test_torch_dtypes_and_devices_are_understood(self):
        call = plan("linear", self.packed, rows=1, dtype=torch.float16, device=torch.device("cpu", 0)).call
        assert (call.dtype, call.out_dtype, call.device) == ("float16", "float16", "cpu")

    def test_nothing_accepts(self):
        experts = pack(Weight.stack([random_weight(16, 16)] * 2))
        with pytest.raises(NoKernelError) as caught:
            plan("linear", experts, rows=1, library="torch")
        first, *others = re.split(f"; (?={'|'.join(f'{kernel.name}: ' for kernel in LINEAR)})", str(caught.value))
        assert first == (
            "no kernel computes linear with layout rows, shape (2, 16, 16), M=1, bfloat16, torch on cpu; "
            "the nearest is cpu-bf16: takes one matrix (N, K), not expert axes (2,)"
        )
        assert len(others) == len(LINEAR) - 1
        assert on_the_cpu_only([tuple(other.split(": ", 1)) for other in others]) == [
            ("cpu-avx512", "takes one matrix (N, K), not expert axes (2,)"),
            ("cpu-portable", "takes one matrix (N, K), not expert axes (2,)"),
            ("reference-torch", "takes one matrix (N, K), not expert axes (2,)"),
            ("cpu-panels", "takes one matrix (N, K), not expert axes (2,), and is for 128 tokens and more, not 1"),
            (
                "reference-numpy",
                "takes NumPy arrays, not torch tensors, and takes one matrix (N, K), not expert axes (2,)",
            ),
        ]


class TestForcedKernel:
    packed = pack(random_weight(16, 16))

    def test_it_runs(self, monkeypatch):
        monkeypatch.setenv("HALFBYTE_KERNEL", "reference-numpy")
        chosen = plan("linear", self.packed, rows=1, library="numpy")
        assert (chosen.kernel, chosen.why) == ("reference-numpy", "forced by HALFBYTE_KERNEL")

    def test_unknown(self, monkeypatch):
        monkeypatch.setenv("HALFBYTE_KERNEL", "fastest")
        with pytest.raises(NoKernelError) as caught:
            plan("linear", self.packed, rows=1)
        known = " or ".join(kernel.name for kernel in LINEAR)
        assert str(caught.value) == f"HALFBYTE_KERNEL names no kernel for linear: got 'fastest', expected {known}"

    def test_one_that_refuses(self, monkeypatch):
        monkeypatch.setenv("HALFBYTE_KERNEL", "reference-numpy")
        with pytest.raises(
            NoKernelError, match=r"\(forced by HALFBYTE_KERNEL\); the nearest is reference-numpy: takes NumPy arrays"
        ):
            linear(torch.ones(1, 16), self.packed.to("cpu"))


class TestTable:
    def test_names_are_unique(self):
        assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)

    def test_each_module_of_the_folder_is_listed(self):
        folder = Path(halfbyte.kernels.__file__).parent
        defined = 0
        for file in folder.rglob("*.py"):
            tree = ast.parse(file.read_text())
            defined += sum(
                isinstance(node, ast.Assign | ast.AnnAssign)
                and isinstance(node.value, ast.Call)
                and getattr(node.value.func, "id", "") in ("Kernel", "_kernel", "_reference")
                for node in tree.body
            )
        assert defined == len(KERNELS)

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_a_layout_that_no_kernel_reads_is_refused_by_name(self, layout):
        for kernel in LINEAR:
            assert all(reason[0].islower() for reason in kernel.refuse(call_like(layout=layout)))
