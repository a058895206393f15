"""INT8 twins in ``linear``: exact integers, the stated bound, never unasked, and no byte beyond the arrays."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import halfbyte as hb
from checkpoints import environment
from halfbyte import jit
from halfbyte.errors import NoKernelError, UsageError, WeightError
from halfbyte.kernels import KERNELS, Int8Args, Int8Call, select
from halfbyte.kernels.int8 import LARGEST_K
from halfbyte.kinds import Int8Weight
from halfbyte.ops import linear, pack, plan
from halfbyte.weight import float_dtype, to_numpy, to_torch
from helpers_run import DTYPES, HALF_ULP, moved, random_floats, random_weight

INT8 = [kernel for kernel in KERNELS if kernel.bundle is Int8Args]
needs_numba = pytest.mark.skipif(jit.missing() is not None, reason=f"compiled kernels cannot run: {jit.missing()}")
SHAPES = [(1, 1), (3, 40), (33, 64), (70, 200), (129, 31), (4, 4160)]
"""(N, K): below, at and above a unit of 32 rows; K of no whole step of 64, of whole ones, and with a rest."""


def call_like(**changes):
    fields = {
        "shape": (32, 64), "per_row": True, "pre_scale": False, "rows": 1, "dtype": "bfloat16", "out_dtype": "bfloat16",
        "device": "cpu", "library": "torch", "bias": False,
    }  # fmt: skip
    return Int8Call(**(fields | changes))


RUNNING = [kernel for kernel in INT8 if not kernel.refuse(call_like())]
each = pytest.mark.parametrize("kernel", RUNNING, ids=lambda k: k.name)
libraries = pytest.mark.parametrize("library", ["numpy", "torch"])


@pytest.fixture
def forced(kernel, monkeypatch):
    monkeypatch.setenv("HALFBYTE_KERNEL", kernel.name)


def random_twin(n, k, *, per_row=True, pre_scale=False):
    rng = np.random.default_rng([n, k])
    return Int8Weight(
        data=rng.integers(-128, 128, (n, k)).astype(np.int8),
        scale=rng.uniform(0.01, 0.02, (n, 1) if per_row else (1, 1)).astype(np.float32),
        pre_scale=rng.uniform(0.5, 2, k).astype(np.float32) if pre_scale else None,
    )


def in_library(twin, library):
    if library == "numpy":
        return twin
    pre = None if twin.pre_scale is None else to_torch(np.array(twin.pre_scale))
    return Int8Weight(data=to_torch(np.array(twin.data)), scale=to_torch(np.array(twin.scale)), pre_scale=pre)


def quantized(x, twin):
    """(M, K) integers and (M, 1) scales of activations, by the stated formula in float32."""
    x = x.astype(np.float32) * (np.float32(1) if twin.pre_scale is None else twin.pre_scale)
    amax = np.abs(x).max(-1, keepdims=True)
    return np.rint(x / np.where(amax, amax, np.float32(1)) * np.float32(127)), amax / np.float32(127)


def assert_exact(y, x, twin, bias, out_dtype):
    """Within a few roundings of the product of the quantized values in float64."""
    q, scale = quantized(x, twin)
    b = np.zeros(1) if bias is None else bias.astype(np.float64)
    product = (q.astype(np.float64) @ twin.data.astype(np.float64).T) * scale * twin.scale.reshape(-1)
    bound = (4 * 2.0**-24 + HALF_ULP[out_dtype]) * (np.abs(product) + np.abs(b))
    assert y.dtype == float_dtype(out_dtype)
    assert np.all(np.abs(y.astype(np.float64) - product - b) <= bound)


@pytest.mark.usefixtures("forced")
class TestEveryKernel:
    @each
    @libraries
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("n", "k"), SHAPES)
    def test_it_is_exact_on_the_quantized_values(self, kernel, library, dtype, n, k):
        for m in (1, 2, 3, 7, 8, 13):
            twin, x = random_twin(n, k), random_floats((m, k), dtype)
            y = to_numpy(linear(moved(x, library), in_library(twin, library)))
            assert_exact(y, x, twin, None, dtype)

    @each
    @libraries
    @pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
    @pytest.mark.parametrize("out_dtype", DTYPES)
    @pytest.mark.parametrize("per_row", [False, True])
    @pytest.mark.parametrize("pre_scale", [False, True])
    def test_bias_scales_and_results(self, kernel, library, bias_dtype, out_dtype, per_row, pre_scale):
        twin = random_twin(70, 104, per_row=per_row, pre_scale=pre_scale)
        bias = random_floats((70,), bias_dtype) if bias_dtype else None
        for m in (1, 4, 6, 12):
            x = random_floats((m, 104), "float16")
            y = linear(moved(x, library), in_library(twin, library), moved(bias, library), out_dtype=out_dtype)
            assert_exact(to_numpy(y), x, twin, bias, out_dtype)

    @each
    @libraries
    def test_results_are_those_of_numpy_bit_for_bit(self, kernel, library, monkeypatch):
        for dtype in DTYPES:
            twin, x = random_twin(67, 333, pre_scale=True), random_floats((9, 333), dtype)
            bias = random_floats((67,), "float32")
            y = to_numpy(linear(moved(x, library), in_library(twin, library), moved(bias, library)))
            with monkeypatch.context() as other:
                other.setenv("HALFBYTE_KERNEL", "int8-numpy")
                expected = linear(x, twin, bias)
            assert y.tobytes() == expected.tobytes()

    @each
    @libraries
    @pytest.mark.parametrize("lead", [(), (1,), (2, 3), (0,), (2, 0, 3)])
    def test_leading_axes_are_kept(self, kernel, library, lead):
        twin, x = random_twin(33, 70), random_floats((*lead, 70), "float32")
        y = to_numpy(linear(moved(x, library), in_library(twin, library)))
        assert y.shape == (*lead, 33)
        for at in np.ndindex(*lead):
            assert np.array_equal(y[at], linear(x[at], twin))

    @each
    @libraries
    def test_no_features_and_no_k(self, kernel, library):
        for n, k in ((0, 64), (5, 0), (0, 0)):
            twin = in_library(Int8Weight(data=np.zeros((n, k), np.int8), scale=np.ones((n, 1), np.float32)), library)
            assert to_numpy(linear(moved(np.ones((2, k), np.float32), library), twin)).tolist() == [[0.0] * n] * 2
        bias = moved(np.arange(5, dtype=np.float32), library)
        twin = in_library(Int8Weight(data=np.zeros((5, 0), np.int8), scale=np.ones((5, 1), np.float32)), library)
        assert to_numpy(linear(moved(np.ones((1, 0), np.float32), library), twin, bias)).tolist() == [[0, 1, 2, 3, 4]]

    @each
    @pytest.mark.parametrize("sign", [1, -1])
    def test_the_largest_sums_are_exact(self, kernel, sign):
        """Sums of bytes without a sign leave 32 bits on their way, and those with one nearly fill 32."""
        twin = Int8Weight(data=np.full((5, LARGEST_K), -128, np.int8), scale=np.float32(1))
        y = linear(np.full((2, LARGEST_K), 127 * sign, np.float32), twin)
        assert y.tolist() == [[-128.0 * 127 * LARGEST_K * sign] * 5] * 2

    @each
    @libraries
    def test_what_is_not_finite_stays_in_its_token(self, kernel, library):
        twin, x = random_twin(40, 96), random_floats((9, 96), "float32")
        x[1, 5], x[3, 95], x[4, 0], x[6] = np.nan, np.inf, -np.inf, 0
        y = to_numpy(linear(moved(x, library), in_library(twin, library)))
        assert np.isnan(y[[1, 3, 4]]).all()
        assert not y[6].any()
        rest = [0, 2, 5, 7, 8]
        assert np.array_equal(y[rest], linear(x[rest], twin))
        for token in (1, 3, 6):
            alone = linear(x[token], twin)
            assert np.array_equal(alone, y[token], equal_nan=True)

    @each
    @pytest.mark.parametrize("size", [1e-44, 1e-38, 1e37, 3e38])
    def test_activations_of_any_size(self, kernel, size):
        x = np.array([[1, -0.5, 0.25, 0]], np.float32) * np.float32(size)
        twin = Int8Weight(data=np.eye(4, dtype=np.int8), scale=np.float32(1))
        q, scale = quantized(x, twin)
        assert np.array_equal(linear(x, twin), q * scale)
        assert np.isfinite(q).all()
        assert q[0, 0] == 127

    @each
    def test_ties_are_rounded_to_even(self, kernel):
        x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, 63.5, -126.5]], np.float32)
        twin = Int8Weight(data=np.eye(8, dtype=np.int8), scale=np.float32(1))
        assert linear(x, twin).tolist() == [[127, 0, 2, 2, 0, -2, 64, -126]]

    @each
    @libraries
    def test_strided_arrays(self, kernel, library):
        twin = random_twin(40, 96)
        x, bias = random_floats((10, 192), "float32"), random_floats((80,), "float32")
        expected = linear(np.ascontiguousarray(x[::2, ::2]), twin, np.ascontiguousarray(bias[::2]))
        y = linear(moved(x, library)[::2, ::2], in_library(twin, library), moved(bias, library)[::2])
        assert np.array_equal(to_numpy(y), expected)

    @each
    @libraries
    def test_repeats_and_threads_give_the_same_bytes(self, kernel, library):
        cases = [
            (random_twin(300, 640 + s), random_floats((m, 640 + s), "float32", s)) for s, m in enumerate((1, 5, 64))
        ]
        cases = [(moved(x, library), in_library(twin, library)) for twin, x in cases]
        expected = [to_numpy(linear(x, twin)).tobytes() for x, twin in cases]
        wrong = []

        def work(i):
            wrong.extend(i for _ in range(20) if to_numpy(linear(*cases[i])).tobytes() != expected[i])

        threads = [threading.Thread(target=work, args=(i % 3,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    @each
    @pytest.mark.parametrize("m", [1, 32])
    def test_the_total_error_on_gaussian_values(self, kernel, m):
        rng = np.random.default_rng(0)
        w = hb.quantize(rng.normal(0, 0.02, (512, 4096)).astype(np.float32))
        x = rng.standard_normal((m, 4096), np.float32)
        expected = x.astype(np.float64) @ w.dequantize().astype(np.float64).T
        y = linear(x, w, precision="int8")
        assert 0.011 < np.linalg.norm(y - expected) / np.linalg.norm(expected) < 0.0135
        assert 0.0078 < hb.to_int8(w).error < 0.0095


class TestPrecision:
    w = random_weight(64, 96, per_row=True, pre_scale=True)
    x = random_floats((3, 96), "float32")

    @libraries
    def test_a_packed_weight_keeps_its_twin(self, library):
        packed, x = pack(moved(self.w, library)), moved(self.x, library)
        exact = to_numpy(linear(x, packed))
        assert "int8" not in packed.memo
        rounded = to_numpy(linear(x, packed, precision="int8"))
        twin = packed.memo["int8"][1]
        assert np.array_equal(rounded, to_numpy(linear(x, hb.to_int8(moved(self.w, library)))))
        assert np.array_equal(rounded, to_numpy(linear(x, moved(self.w, library), precision="int8")))
        assert np.array_equal(rounded, to_numpy(linear(x, packed, precision="int8")))
        assert packed.memo["int8"][1] is twin
        assert 0 < np.linalg.norm(rounded - exact) < 0.03 * np.linalg.norm(exact)
        assert np.array_equal(to_numpy(linear(x, packed, precision="exact")), exact)
        assert np.array_equal(to_numpy(linear(x, packed)), exact)

    @pytest.mark.parametrize("layout", ["columns", "atoms128x4"])
    def test_any_layout_has_a_twin(self, layout):
        w = random_weight(128, 128)
        x = random_floats((3, 128), "float32")
        assert np.array_equal(linear(x, pack(w, layout), precision="int8"), linear(x, hb.to_int8(w)))

    def test_a_buffer_that_was_written_has_another_twin(self):
        packed, x = pack(self.w.torch()), torch.from_numpy(self.x)
        before = linear(x, packed, precision="int8")
        packed.buffers()["scale2"].mul_(2)
        assert torch.equal(linear(x, packed, precision="int8"), before * 2)
        packed.buffers()["codes"].zero_()
        assert not linear(x, packed, precision="int8").any()

    @libraries
    def test_never_unasked(self, library):
        for weight in (moved(self.w, library), pack(moved(self.w, library))):
            for rows in (1, 16, 512):
                for dtype in DTYPES:
                    for precision in (None, "exact"):
                        chosen = plan("linear", weight, rows=rows, dtype=dtype, precision=precision)
                        assert "int8" not in str(chosen).lower()

    def test_no_gradient(self):
        x = torch.ones(3, 96, requires_grad=True)
        y = linear(x, self.w.torch(), precision="int8")
        with pytest.raises(UsageError, match="has no gradient"):
            y.sum().backward()

    def test_inference_mode(self):
        packed, x = pack(self.w.torch()), torch.from_numpy(self.x)
        with torch.inference_mode():
            inside = linear(x, pack(self.w.torch()), precision="int8")
            kept = linear(x, packed, precision="int8")
        assert torch.equal(inside, linear(x, packed, precision="int8"))
        assert torch.equal(inside, kept)


class TestPlan:
    w = random_weight(64, 96)

    def test_it_tells_the_error_and_the_bytes(self, monkeypatch):
        monkeypatch.setenv("HALFBYTE_KERNEL", "int8-numpy")
        error = hb.to_int8(self.w).error
        lines = str(plan("linear", pack(self.w), rows=4, dtype="float32", precision="int8")).splitlines()
        words = [re.split("  +", line, maxsplit=1) for line in lines]
        assert [word for word in words if not word[0].startswith("not ")][:7] == [
            ["op", "linear-int8 N=64 K=96 M=4, INT8 rows"],
            ["arrays", "numpy on cpu, float32 to float32"],
            ["kernel", "int8-numpy (forced by HALFBYTE_KERNEL)"],
            ["bytes", f"{64 * 96 + 4 * 64 + 4 * (4 * 96 + 4 * 64):,}"],
            ["flops", "49,152"],
            ["extra", "6,400 bytes of the weight held twice"],
            ["note", f"error of the weight by rounding to INT8: {error:.4f} of its norm, measured"],
        ]

    def test_a_twin_is_held_once(self):
        twin = hb.to_int8(self.w)
        chosen = plan("linear", twin, rows=1)
        assert (chosen.extra_bytes, chosen.kernel) == (0, RUNNING[0].name)
        assert any(f"{twin.error:.4f}" in note for note in chosen.notes)
        assert any("unknown" in note for note in plan("linear", random_twin(3, 8), rows=1).notes)

    def test_a_weight_makes_its_twin_each_time(self):
        assert any("to_int8 once" in note for note in plan("linear", self.w, rows=1, precision="int8").notes)

    @needs_numba
    def test_portable(self, monkeypatch):
        jit.has.cache_clear()
        monkeypatch.setenv("HALFBYTE_CPU", "portable")
        try:
            chosen = plan("linear", self.w, rows=1, precision="int8")
        finally:
            jit.has.cache_clear()
        assert chosen.kernel == "int8-portable"
        assert chosen.refusals == (("int8-vnni", "needs avx512vnni, which this CPU has not or HALFBYTE_CPU hides"),)

    def test_without_numba(self, monkeypatch):
        monkeypatch.setattr(jit, "missing", lambda: "numba is not installed")
        chosen = plan("linear", self.w, rows=1, precision="int8")
        assert chosen.kernel == "int8-numpy"
        assert chosen.refusals == (("int8-vnni", "numba is not installed"), ("int8-portable", "numba is not installed"))


class TestErrors:
    w = random_weight(20, 32)
    x = np.ones((2, 32), np.float32)

    def test_an_unknown_precision(self):
        for call in (
            lambda p: linear(self.x, self.w, precision=p),
            lambda p: plan("linear", self.w, rows=1, precision=p),
        ):
            with pytest.raises(UsageError) as caught:
                call("fp4")
            assert str(caught.value) == "unknown precision: got 'fp4', expected 'exact' or 'int8' or 'fp8' or 'w4a4'"

    def test_a_twin_is_not_exact(self):
        with pytest.raises(UsageError) as caught:
            linear(self.x, hb.to_int8(self.w), precision="exact")
        assert str(caught.value) == (
            "an INT8 weight is rounded: got precision 'exact', expected the NVFP4 weight, or 'int8'"
        )

    def test_cuda(self):
        for kernel in INT8:
            assert "runs on the CPU, not on cuda" in kernel.refuse(call_like(device="cuda"))
        with pytest.raises(NoKernelError, match="int8-vnni: runs on the CPU, not on cuda"):
            plan("linear", self.w, rows=1, device="cuda:0", precision="int8", library="torch")

    def test_expert_axes(self):
        experts = hb.Weight.stack([self.w, self.w])
        for weight, precision in ((hb.to_int8(experts), None), (experts, "int8")):
            with pytest.raises(NoKernelError, match=r"takes one matrix \(N, K\), not expert axes \(2,\)"):
                linear(self.x, weight, precision=precision)

    def test_a_large_k(self):
        assert LARGEST_K == 132_104
        assert not RUNNING[0].refuse(call_like(shape=(1, LARGEST_K)))
        with pytest.raises(NoKernelError, match="takes K up to 132104, whose sums fit 32 bits, not 132105"):
            select(Int8Args, call_like(shape=(1, LARGEST_K + 1)))

    def test_what_does_not_fit(self):
        twin = hb.to_int8(self.w)
        with pytest.raises(UsageError, match=r"the last axis of x is not the weight's K: got \(2, 31\)"):
            linear(self.x[:, :31], twin)
        with pytest.raises(UsageError, match="the weight and x are of two libraries"):
            linear(torch.ones(2, 32), twin)
        with pytest.raises(UsageError, match=r"bias does not fit the weight's N: got \(3,\), expected \(20,\)"):
            linear(self.x, twin, self.x[0, :3])
        with pytest.raises(UsageError, match="out_dtype is unknown: got int8"):
            linear(self.x, twin, out_dtype="int8")
        with pytest.raises(UsageError, match="x is of the wrong dtype: got float64"):
            linear(self.x.astype(np.float64), twin)

    def test_a_twin_that_is_not_row_major(self):
        data = np.zeros((32, 20), np.int8).T
        with pytest.raises(
            UsageError, match=r"not row-major: got strides \(1, 20\); make an Int8Weight of a contiguous"
        ):
            linear(self.x, Int8Weight(data=data, scale=np.float32(1)))
        with pytest.raises(UsageError, match="not row-major"):
            linear(torch.ones(2, 32), Int8Weight(data=torch.zeros(32, 20, dtype=torch.int8).T, scale=1.0))

    def test_null_and_nan(self):
        with pytest.raises(WeightError, match="null"):
            linear(self.x, hb.Weight.null((20, 32)), precision="int8")


GUARDED = """
import ctypes, mmap, sys
import numpy as np
from halfbyte.kinds import Int8Weight
from halfbyte.kernels import Int8Args, KERNELS

page, maps = mmap.PAGESIZE, []
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def guarded(a, at_the_end):
    # A copy of a between two pages that nobody may touch, against the last or the first of them.
    inner = -(-a.nbytes // page) * page
    maps.append(mmap.mmap(-1, inner + 2 * page))
    whole = np.frombuffer(maps[-1], np.uint8)
    start = page + (inner - a.nbytes if at_the_end else 0)
    copy = whole[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
    copy[...] = a
    for edge in (0, page + inner):
        assert libc.mprotect(whole.ctypes.data + edge, page, 0) == 0
    return copy

rng = np.random.default_rng(0)
(kernel,) = (k for k in KERNELS if k.name == sys.argv[2])
for n, k in ((1, 1), (3, 63), (35, 64), (33, 130), (32, 4161)):
    for m in (1, 2, 3, 4, 5, 6, 8):
        for at_the_end in (True, False):
            x = guarded(rng.standard_normal((m, k), np.float32).astype(np.float16), at_the_end)
            data = guarded(rng.integers(-128, 128, (n, k)).astype(np.int8), at_the_end)
            scale, pre = (guarded(np.ones(s, np.float32), at_the_end) for s in ((n, 1), (k,)))
            bias, out = (guarded(np.zeros(s, np.float16), at_the_end) for s in ((n,), (m, n)))
            if sys.argv[1] == "beyond":
                np.lib.stride_tricks.as_strided(data, (data.size + 1,), (1,))[-1].item()
            weight = Int8Weight(data=data, scale=scale, pre_scale=pre)
            assert weight.data.ctypes.data == data.ctypes.data
            kernel.run(Int8Args(x=x, weight=weight, bias=bias, out=out))
            assert np.isfinite(out).all() and out.any()
print("done")
"""


def guarded_run(argument, kernel):
    return subprocess.run(
        [sys.executable, "-c", GUARDED, argument, kernel],
        capture_output=True, text=True, timeout=300, env=environment(), check=False,
    )  # fmt: skip


@each
def test_nothing_beyond_the_arrays_is_touched(kernel):
    done = guarded_run("inside", kernel.name)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_the_guard_would_catch_it():
    assert guarded_run("beyond", "int8-numpy").returncode == -signal.SIGSEGV


@needs_numba
class TestCode:
    def assembly(self, form):
        import numba

        from halfbyte.kernels.cpu import int8_code

        rows = int8_code._rows_of(form, True)
        rows.compile((numba.int64,) * 14)
        return "".join(rows.inspect_asm().values())

    @pytest.mark.skipif(not jit.missing() and not jit.has("avx512vnni"), reason="this CPU has no AVX-512 VNNI")
    def test_vnni_multiplies_bytes(self):
        assembly = self.assembly("vnni")
        assert len(re.findall(r"vpdpbusd\s.*zmm", assembly)) >= 4 * (6 + 5 + 4 + 3)
        assert "vpdpbusds" not in assembly

    def test_portable_does_not(self):
        assert "vpdpbusd" not in self.assembly("portable")


@needs_numba
def test_portable_in_a_process_of_its_own():
    code = """
import numpy as np, halfbyte as hb
w = hb.Int8Weight(data=np.eye(70, dtype=np.int8), scale=1.0)
x = np.arange(-35, 35, dtype=np.float32)[None].repeat(3, 0) * 2
print(hb.plan("linear", w, rows=3).kernel, float(abs(hb.linear(x, w) - x).max()) < 0.28)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=300, env=environment(HALFBYTE_CPU="portable"), check=False,
    )  # fmt: skip
    assert done.stdout == "int8-portable True\n", done.stderr
