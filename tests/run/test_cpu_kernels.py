"""The compiled kernels of the CPU: the derived bound for every shape and option, exact decoding, and no byte beyond."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import environment
from halfbyte import jit
from halfbyte.errors import NoKernelError
from halfbyte.kernels import LinearArgs
from halfbyte.kernels.cpu import exact, panels
from halfbyte.layouts import Fragments
from halfbyte.numerics import BLOCK, decode_e2m1, decode_e4m3
from halfbyte.ops import linear, pack, plan
from halfbyte.weight import Weight, float_dtype, to_numpy, to_torch
from helpers_run import DTYPES, HALF_ULP, call_like, exact_linear, moved, places, random_floats, random_weight

KERNELS = (exact.BF16, exact.AVX512, exact.PORTABLE)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
CASES = [(case[0].name, case[3]) for case in places(dtype=DTYPES) if case[0] in KERNELS and case[1] == "numpy"]
each = pytest.mark.parametrize(("kernel", "dtype"), CASES, ids=["-".join(case) for case in CASES])
"""Each kernel with each dtype of activations that it takes on this machine."""
TESTS = Path(__file__).parents[1]

needs_numba = pytest.mark.skipif(jit.missing() is not None, reason=f"{jit.missing()}")


def fastest(dtype):
    """The first kernel that takes it."""
    return next(kernel for kernel, taken in CASES if taken == dtype)


def run(kernel, x, weight, bias=None, out_dtype="float32"):
    """``linear`` by one kernel, as NumPy."""
    os.environ["HALFBYTE_KERNEL"] = kernel
    try:
        return to_numpy(linear(x, weight, bias, out_dtype=out_dtype))
    finally:
        del os.environ["HALFBYTE_KERNEL"]


def assert_within_bound(got, expected, magnitude, weight, out_dtype, more=0):
    """The bound in the kernels' description; ``more`` roundings are those of pre_scale and bias."""
    largest = 448 * 6 * np.abs(weight.scale2).max()
    roundings = (weight.k + 24 + more) * 2.0**-24 + HALF_ULP[out_dtype]
    assert got.shape == expected.shape
    error = np.abs(got.astype(np.float64) - expected)
    assert np.all(error <= roundings * magnitude + weight.k * 2.0**-110 * largest)


# -- sums --

SHAPES = [
    (4096, 16), (77, 48), (1, 80), (192, 80), (192, 576), (77, 576), (7, 4096), (192, 4096), (1, 14336), (7, 14336),
    (65, 40), (33, 8191),
]  # fmt: skip
"""(N, K): below, at and above a unit of rows and a round of codes; the last two end inside a block."""


@each
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_number_of_tokens(kernel, dtype, n, k):
    per_row = n % 2 == 1
    w, x = random_weight(n, k, per_row=per_row), random_floats((64, k), dtype)
    expected, magnitude = exact_linear(x, w)
    packed = {library: pack(moved(w, library)) for library in ("numpy", "torch")}
    for m in (*range(1, 18), 64):
        library, out_dtype = ("numpy", "torch")[m % 2], DTYPES[m % 3]
        got = run(kernel, moved(x[:m], library), packed[library], out_dtype=out_dtype)
        assert_within_bound(got, expected[:m], magnitude[:m], w, out_dtype)
    errors = np.abs(run(kernel, x, packed["numpy"]).astype(np.float64) - expected)
    assert np.linalg.norm(errors) <= 2 * np.sqrt(k + 24) * 2.0**-24 * np.linalg.norm(magnitude)


@each
@pytest.mark.parametrize("pre_scale", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_options(kernel, dtype, pre_scale, per_row):
    if BY_NAME[kernel].refuse(call_like(library="numpy", dtype=dtype, pre_scale=pre_scale)):
        with pytest.raises(Exception, match="without a pre_scale"):
            run(kernel, random_floats((1, 600), dtype), random_weight(45, 600, pre_scale=pre_scale))
        return
    w = random_weight(45, 600, per_row=per_row, pre_scale=pre_scale)
    for library in ("numpy", "torch"):
        packed = pack(moved(w, library))
        for bias_dtype in (None, *DTYPES):
            bias = None if bias_dtype is None else random_floats((45,), bias_dtype)
            for m in (1, 3, 18):
                x = random_floats((m, 600), dtype)
                for out_dtype in DTYPES:
                    got = run(kernel, moved(x, library), packed, moved(bias, library), out_dtype)
                    more = pre_scale + (bias is not None)
                    assert_within_bound(got, *exact_linear(x, w, bias), w, out_dtype, more)


@each
def test_axes_and_strides(kernel, dtype):
    w = random_weight(37, 272)
    packed = pack(w)
    x = random_floats((2, 3, 272), dtype)
    flat = run(kernel, x.reshape(6, 272), packed)
    assert np.array_equal(run(kernel, x, packed), flat.reshape(2, 3, 37))
    assert np.array_equal(run(kernel, np.asfortranarray(x), packed), flat.reshape(2, 3, 37))
    wide = np.zeros((6, 544), x.dtype)
    wide[:, ::2] = x.reshape(6, 272)
    assert np.array_equal(run(kernel, wide[:, ::2], packed), flat)
    assert np.array_equal(run(kernel, to_torch(wide)[:, ::2], pack(w.torch())), flat)
    assert np.array_equal(run(kernel, x[0, 0], packed), run(kernel, x[:1, 0], packed)[0])
    assert run(kernel, x[:0], packed).shape == (0, 3, 37)
    assert run(kernel, x[0, :0], packed).shape == (0, 37)


# -- panels, which are for many tokens and other CPUs --


@pytest.fixture
def intel(monkeypatch):
    """A CPU whose float32 products have no wider unit beside them."""
    monkeypatch.setattr(jit, "cpu_name", lambda: "sapphirerapids")
    monkeypatch.setattr(panels, "_blas_threads", jit.thread_count)


@needs_numba
@pytest.mark.usefixtures("intel")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 1, 16), (129, 77, 48), (130, 192, 4096), (131, 300, 8191), (128, 33, 600)]
)
def test_panels(dtype, m, n, k, monkeypatch):
    monkeypatch.setattr(panels, "_PANEL", 1 << 20)
    per_row, out_dtype = n % 2 == 1, DTYPES[m % 3]
    w, x = random_weight(n, k, per_row=per_row, pre_scale=k == 600), random_floats((m, k), dtype)
    bias = random_floats((n,), dtype) if m % 2 else None
    monkeypatch.setenv("HALFBYTE_KERNEL", "cpu-panels")
    tensors = moved(x, "torch"), pack(w.torch()), moved(bias, "torch")
    got = to_numpy(linear(*tensors, out_dtype=out_dtype))
    assert_within_bound(got, *exact_linear(x, w, bias), w, out_dtype, 2)


@needs_numba
@pytest.mark.usefixtures("intel")
def test_panels_decode_exactly(monkeypatch):
    w = all_products(600)
    exactly = decode_e2m1(w.codes) * np.repeat(decode_e4m3(w.scales), BLOCK, axis=-1) * w.scale2
    monkeypatch.setenv("HALFBYTE_KERNEL", "cpu-panels")
    y = linear(to_torch(np.eye(600, dtype=np.float32)), pack(w.torch()))
    assert np.array_equal(to_numpy(y).T, exactly[:, :600])


@needs_numba
@pytest.mark.usefixtures("intel")
def test_panels_are_exact_under_autocast(monkeypatch):
    monkeypatch.setenv("HALFBYTE_KERNEL", "cpu-panels")
    x, packed = to_torch(random_floats((128, 64), "float32")), pack(random_weight(32, 64).torch())
    expected = linear(x, packed)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, packed), expected)


@needs_numba
def test_when_panels_are_chosen(monkeypatch, intel):
    w = random_weight(32, 64).torch()
    monkeypatch.setattr(jit, "has", lambda feature: feature == "avx512bw")
    for rows, name in ((127, "cpu-avx512"), (128, "cpu-panels"), (512, "cpu-panels")):
        assert plan("linear", w, rows=rows, dtype="float32").kernel == name
    of_numpy = plan("linear", w.numpy(), rows=128, dtype="float32")
    assert of_numpy.kernel == "cpu-avx512"
    assert dict(of_numpy.refusals)["cpu-panels"] == "takes torch tensors, not NumPy arrays"
    monkeypatch.setattr(jit, "cpu_name", lambda: "znver4")
    chosen = plan("linear", w, rows=128, dtype="float32")
    assert chosen.kernel == "cpu-avx512"
    assert dict(chosen.refusals)["cpu-panels"] == "is no faster than cpu-avx512 on this CPU (znver4)"
    monkeypatch.setattr(jit, "cpu_name", lambda: "znver3")
    monkeypatch.setattr(jit, "has", lambda feature: False)
    assert plan("linear", w, rows=128, dtype="float32").kernel == "cpu-panels"
    monkeypatch.setattr(panels, "_blas_threads", lambda: 99)
    reason = f"computes on the 99 threads of torch, where {jit.thread_count()} are asked for"
    assert dict(plan("linear", w, rows=128, dtype="float32").refusals)["cpu-panels"] == reason


# -- values --


def all_products(k):
    """(127, K): every scale byte from 00 to 7E with every code at every place of a block."""
    rng = np.random.default_rng(k)
    blocks = -(-k // BLOCK)
    codes = np.argsort(rng.random((127, blocks, BLOCK)), axis=-1).astype(np.uint8).reshape(127, -1)
    scales = np.argsort(rng.random((127, blocks)), axis=0).astype(np.uint8)
    scale2 = rng.uniform(0.5, 2, (127, 1)).astype(np.float32)
    return Weight(codes=codes[:, 0::2] | codes[:, 1::2] << 4, scales=scales, scale2=scale2, k=k)


@each
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 16])
def test_one_hot_activations_give_the_decoded_weight(kernel, dtype, tokens):
    w = all_products(600)
    exactly = decode_e2m1(w.codes) * np.repeat(decode_e4m3(w.scales), BLOCK, axis=-1) * w.scale2
    packed, one_hot = pack(w), np.eye(600, dtype=float_dtype(dtype))
    for start in range(0, 600, tokens):
        y = run(kernel, one_hot[start : start + tokens], packed)
        assert np.array_equal(y.T, exactly[:, start : start + y.shape[0]])


@each
@pytest.mark.parametrize("m", [1, 2, 4, 13])
def test_blocks_of_zeros_and_values_that_are_not_finite(kernel, dtype, m):
    w = random_weight(70, 336, scales=(0, 127))
    scales, codes = w.scales.copy(), w.codes.copy()
    scales[::3, ::2], codes[5], codes[6] = 0, 0x80, 0x08
    w = w.replace(scales=scales, codes=codes)
    packed = pack(w)
    assert not run(kernel, np.zeros((m, 336), float_dtype(dtype)), packed).any()
    assert not run(kernel, -np.zeros((m, 336), float_dtype(dtype)), packed).any()
    decoded = w.dequantize().astype(np.float64)
    for value in (np.inf, -np.inf, np.nan):
        x = random_floats((m, 336), dtype)
        x[m // 2, 37] = value
        y = run(kernel, x, packed)
        with np.errstate(invalid="ignore"):
            expected = x.astype(np.float64) @ decoded.T
            expected[m // 2] = value * decoded[:, 37]  # an infinity or NaN: what the others add changes nothing
        assert np.array_equal(np.isnan(y), np.isnan(expected))
        infinite = np.isinf(expected)
        assert np.array_equal(y[infinite], expected[infinite])
        assert np.isfinite(y[~infinite & ~np.isnan(expected)]).all()


@each
def test_infinities_of_both_signs_make_nan(kernel, dtype):
    w = Weight(codes=np.full((3, 16), 0x22, np.uint8), scales=np.full((3, 2), 0x38, np.uint8), scale2=1.0)
    x = np.zeros((2, 32), float_dtype(dtype))
    x[0, 1], x[0, 30], x[1, 2] = np.inf, -np.inf, np.inf
    y = run(kernel, x, w)
    assert np.isnan(y[0]).all()
    assert np.isposinf(y[1]).all()


@each
@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_tiny_and_huge_activations(kernel, dtype, m):
    w = random_weight(40, 528, scales=(40, 60))
    largest = float(np.finfo(np.float16).max) if dtype == "float16" else 2.0**118
    smallest = 2.0**-24 if dtype == "float16" else 2.0**-126
    for size in (largest, smallest, smallest * 8):
        x = (np.sign(random_floats((m, 528), "float32")) * size).astype(float_dtype(dtype))
        assert np.all(x != 0)
        assert_within_bound(run(kernel, x, w), *exact_linear(x, w), w, "float32")


@each
def test_subnormal_float16_results_are_rounded_to_even(kernel, dtype):
    w = Weight(codes=np.array([[0x12] + [0] * 7], np.uint8), scales=np.array([[0x38]], np.uint8), scale2=2.0**-24)
    x = np.zeros((1, 16), float_dtype(dtype))
    for value, expected in ((1, 1), (0.5, 0), (1.5, 2), (2.5, 2), (2.75, 3)):
        x[0, 0] = value
        assert run(kernel, x, w, out_dtype="float16")[0, 0] == np.float16(expected * 2.0**-24)


@each
def test_results_round_to_even(kernel, dtype):
    """Sums that lie half way between two values of the result."""
    w = Weight(codes=np.array([[0x22] + [0] * 7], np.uint8), scales=np.array([[0x38]], np.uint8), scale2=1.0)
    x = np.zeros((2, 16), float_dtype(dtype))
    for bits, out_dtype in ((8, "bfloat16"), (11, "float16")):
        x[:, 0], x[0, 1], x[1, 1] = 1, 2.0**-bits, 3 * 2.0**-bits
        got = run(kernel, x, w, out_dtype=out_dtype).astype(np.float64)
        assert got.ravel().tolist() == [1, 1 + 4 * 2.0**-bits]


# -- what is refused --


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("byte", [0x7F, 0x80, 0x85, 0xFF])
def test_scales_that_are_nan_or_negative_go_to_the_reference(dtype, byte):
    w, x = random_weight(20, 48, per_row=True), random_floats((3, 48), dtype)
    decoded = decode_e2m1(w.codes) * np.repeat(decode_e4m3(w.scales), BLOCK, axis=-1)
    for library in ("numpy", "torch"):
        scales = moved(w.scales.copy(), library)
        packed = pack(moved(w, library).replace(scales=scales))
        if library == "torch":  # what is known of the scales does not outlast a change
            assert plan("linear", packed, rows=3, dtype=dtype).kernel == fastest(dtype)
            assert np.array_equal(to_numpy(linear(moved(x, library), packed)), to_numpy(linear(x, w)))
        scales[1, 2] = byte
        chosen = plan("linear", packed, rows=3, dtype=dtype)
        assert chosen.kernel == f"reference-{library}"
        for kernel in (kernel for kernel, taken in CASES if taken == dtype):
            assert "positive, finite block scales (bytes 00 to 7E)" in dict(chosen.refusals)[kernel]
        got = to_numpy(linear(moved(x, library), packed, out_dtype="float32"))
        changed = decoded.copy()
        changed[1, 32:48] = decode_e2m1(w.codes)[1, 32:48] * decode_e4m3(np.array([byte], np.uint8))
        expected = x.astype(np.float32) @ changed.T * w.scale2[:, 0]
        assert np.allclose(got, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert np.isnan(got[:, 1]).all() == (byte in (0x7F, 0xFF))
        scales[1, 2] = 0x38
        if library == "torch":
            assert plan("linear", packed, rows=3, dtype=dtype).kernel == fastest(dtype)


def test_scales_are_told_of_in_the_layout_rows_only():
    """Another layout's bytes of scales say nothing about them."""
    w = random_weight(32, 64)
    with pytest.raises(NoKernelError, match="reads the layout rows") as caught:
        plan("linear", Fragments().pack(w), rows=1, dtype="float32")
    assert "block scales" not in str(caught.value)


def test_each_says_what_it_does_not_take():
    call = call_like(library="numpy")
    for kernel in KERNELS:
        assert "runs on the CPU, not on cuda" in kernel.refuse(call_like(device="cuda"))
        odd = call_like(library="numpy", odd_scales=True)
        assert "takes positive, finite block scales (bytes 00 to 7E)" in kernel.refuse(odd)
        experts = call_like(library="numpy", shape=(2, 32, 64))
        assert "takes one matrix (N, K), not expert axes (2,)" in kernel.refuse(experts)
    if jit.missing() is None and jit.has("avx512bf16"):
        assert exact.BF16.refuse(call) == ()
        reason = "takes bfloat16 or float16 activations, not float32"
        assert exact.BF16.refuse(call_like(library="numpy", dtype="float32")) == (reason,)


@each
def test_the_kernel_that_is_named_runs(kernel, dtype, monkeypatch):
    monkeypatch.setenv("HALFBYTE_KERNEL", kernel)
    chosen = plan("linear", random_weight(32, 64), rows=2, dtype=dtype)
    assert (chosen.kernel, chosen.why) == (kernel, "forced by HALFBYTE_KERNEL")


def test_each_takes_over_from_the_next(monkeypatch):
    for features, dtype, name in (
        (("avx512bw", "avx512bf16"), "bfloat16", "cpu-bf16"),
        (("avx512bw", "avx512bf16"), "float16", "cpu-bf16"),
        (("avx512bw", "avx512bf16"), "float32", "cpu-avx512"),
        (("avx512bw",), "bfloat16", "cpu-avx512"),
        ((), "bfloat16", "cpu-portable"),
    ):
        monkeypatch.setattr(jit, "has", lambda feature, features=features: feature in features)
        monkeypatch.setattr(jit, "missing", lambda: None)
        assert plan("linear", random_weight(32, 64), rows=2, dtype=dtype).kernel == name


# -- the same bytes, however often, beside whatever, on however many threads --


@each
@pytest.mark.parametrize("m", [1, 3, 7, 33])
def test_a_token_depends_on_no_other(kernel, dtype, m):
    w, x = pack(random_weight(99, 592)), random_floats((m, 592), dtype)
    whole = run(kernel, x, w)
    assert np.array_equal(run(kernel, x, w), whole)
    for t in range(m):
        other = random_floats((m, 592), dtype, seed=2)
        other[(t + 1) % m] = np.nan
        other[t] = x[t]
        assert np.array_equal(run(kernel, other, w)[t], whole[t])


@each
def test_several_threads_of_python(kernel, dtype, monkeypatch):
    monkeypatch.setenv("HALFBYTE_KERNEL", kernel)
    shapes = [(1, 130, 576), (5, 64, 4096), (17, 33, 48), (1, 7, 8208)]
    cases = [(random_floats((m, k), dtype), pack(random_weight(n, k))) for m, n, k in shapes]
    expected = [linear(x, w) for x, w in cases]
    wrong = []

    def work(i):
        for _ in range(30):
            if not np.array_equal(linear(*cases[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


DIGESTS = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from test_cpu_kernels import digest
from halfbyte import jit
from halfbyte.ops import plan
from helpers_run import random_weight
print(jit.thread_count(), plan("linear", random_weight(32, 64), rows=1).kernel)
for case in sys.argv[3:]:
    print(case, digest(*case.split(":")))
"""


def digest(kernel, dtype):
    """Of the results of some shapes."""
    of = hashlib.sha256()
    for m, n, k in ((1, 200, 576), (1, 9, 8208), (3, 77, 592), (8, 64, 256), (21, 131, 4096)):
        of.update(run(kernel, random_floats((m, k), dtype), random_weight(n, k)).tobytes())
    return of.hexdigest()


def subprocess_lines(cases, **env):
    command = [sys.executable, "-c", DIGESTS, str(TESTS), str(TESTS / "run"), *(":".join(case) for case in cases)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(NUMBA_NUM_THREADS="2", **env), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_numba
def test_the_number_of_threads_changes_no_byte():
    expected = [f"{':'.join(case)} {digest(*case)}" for case in CASES]
    for threads in ("1", "2"):
        first, *lines = subprocess_lines(CASES, HALFBYTE_THREADS=threads)
        assert first == f"{threads} {fastest('bfloat16')}"
        assert lines == expected


@needs_numba
def test_portable_code_is_chosen_by_a_variable():
    cases = [case for case in CASES if case[0] == "cpu-portable"]
    first, *lines = subprocess_lines(cases, HALFBYTE_CPU="portable")
    assert first.split()[1] == "cpu-portable"
    assert lines == [f"{':'.join(case)} {digest(*case)}" for case in cases]


@needs_numba
def test_code_of_several_processes_works_in_one(tmp_path):
    """Symbols of what one process compiled and kept must not be taken for those of another."""
    cases = [case for case in CASES if case[1] == "float32"][:1] + [case for case in CASES if case[1] == "bfloat16"][:1]
    for case in cases:
        done = one_token(tmp_path, case)
        assert done.returncode == 0, done.stderr
        assert "compiling for this processor" in done.stderr
    done = one_token(tmp_path, *cases)
    assert (done.returncode, done.stderr) == (0, "")


ONE_TOKEN = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import numpy as np
from test_cpu_kernels import assert_within_bound, run
from helpers_run import exact_linear, random_floats, random_weight
w = random_weight(50, 304)
for case in sys.argv[3:]:
    kernel, dtype = case.split(":")
    x = random_floats((1, 304), dtype)
    assert_within_bound(run(kernel, x, w), *exact_linear(x, w), w, "float32")
"""


def one_token(folder, *cases):
    command = [sys.executable, "-c", ONE_TOKEN, str(TESTS), str(TESTS / "run"), *(":".join(case) for case in cases)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(XDG_CACHE_HOME=str(folder)), check=False
    )


# -- no byte beyond the arrays --


GUARDED = """
import ctypes, mmap, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import numpy as np
from halfbyte.ops import pack
from halfbyte.kernels import LinearArgs
from halfbyte.layouts import Packed
from helpers_run import DTYPES, call_like, exact_linear, random_floats, random_weight
from test_cpu_kernels import BY_NAME, assert_within_bound

libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def guarded(a, at_the_end, maps):
    # A copy of a between two pages that nobody may touch, against the last or the first of them.
    if a is None:
        return None
    inner = max(1, -(-a.nbytes // page)) * page
    maps.append(mmap.mmap(-1, inner + 2 * page))
    whole = np.frombuffer(maps[-1], np.uint8)
    start = page + (inner - a.nbytes if at_the_end else 0)
    copy = whole[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
    copy[...] = a
    for edge in (0, page + inner):
        assert libc.mprotect(whole.ctypes.data + edge, page, 0) == 0
    return copy

beyond = sys.argv[3] == "beyond"
for case in sys.argv[4:]:
    name, dtype = case.split(":")
    kernel = BY_NAME[name]
    for m, n, k in ((1, 1, 16), (1, 5, 48), (1, 35, 600), (3, 33, 592), (5, 39, 272), (17, 3, 41), (1, 2, 8500)):
        pre = not kernel.refuse(call_like(library="numpy", dtype=dtype, pre_scale=True))
        for at_the_end in (True, False):
            for out_dtype in DTYPES:
                maps = []
                w = random_weight(n, k, per_row=True, pre_scale=pre)
                copies = {f: guarded(getattr(w, f), at_the_end, maps)
                          for f in ("codes", "scales", "scale2", "pre_scale")}
                x, bias = random_floats((m, k), dtype), random_floats((n,), out_dtype)
                out = guarded(np.zeros((m, n), bias.dtype), at_the_end, maps)
                packed = pack(w.replace(**copies))
                for given, held in (("codes", "codes"), ("scales", "scales"), ("scale2", "scale2")):
                    assert packed.buffers()[held].ctypes.data == copies[given].ctypes.data
                args = LinearArgs(x=guarded(x, at_the_end, maps), weight=packed,
                                  bias=guarded(bias, at_the_end, maps), out=out)
                if beyond:
                    np.lib.stride_tricks.as_strided(args.x[-1], (k + 1,), (x.itemsize,))[-1].item()
                kernel.run(args)
                assert_within_bound(out, *exact_linear(x, w, bias), w, out_dtype, 2)
print("done")
"""


def guarded_run(argument):
    cases = [":".join(case) for case in CASES]
    return subprocess.run(
        [sys.executable, "-c", GUARDED, str(TESTS), str(TESTS / "run"), argument, *cases],
        capture_output=True, text=True, timeout=300, env=environment(), check=False,
    )  # fmt: skip


@needs_numba
def test_nothing_beyond_the_arrays_is_touched():
    done = guarded_run("inside")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@needs_numba
def test_the_guard_would_catch_it():
    assert guarded_run("beyond").returncode == -signal.SIGSEGV


@each
def test_what_lies_around_the_result_stays(kernel, dtype):
    for m, n in ((1, 5), (3, 33), (8, 70)):
        w, x = random_weight(n, 80), random_floats((m, 80), dtype)
        memory = np.full(m * n + 64, 7.0, np.float32)
        out = memory[32:-32].reshape(m, n)
        BY_NAME[kernel].run(LinearArgs(x=x, weight=pack(w), bias=None, out=out))
        assert np.array_equal(out, run(kernel, x, w))
        assert np.all(memory[:32] == 7)
        assert np.all(memory[-32:] == 7)


# -- instructions --


def host_assembly(form, several):
    """Of the sums of a unit of rows, as Numba makes it here."""
    from numba.core import caching

    from halfbyte.kernels.cpu import product_code

    code = product_code._unit_of(product_code.NAMES.index(form), several)
    code._cache = caching.NullCache()
    code.compile(product_code._numbers(11))
    return "\n".join(code.inspect_asm().values())


@needs_numba
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("form", "features", "there", "not_there"),
    [
        ("bf16", ("avx512bf16", "avx512bw"), (r"vdpbf16ps.*zmm", r"vpermw.*zmm", r"prefetcht1"), ()),
        ("fma", ("avx512bw",), (r"vperm(ps|d).*zmm", r"vfmadd\d+ps.*zmm", r"prefetcht1"), (r"vdpbf16ps",)),
        ("portable", ("f16c",), (r"vcvtph2ps", r"prefetcht1"), (r"vpermw", r"vdpbf16ps")),
    ],
)
def test_instructions_of_a_unit(form, features, there, not_there, several):
    from llvmlite import binding

    known = binding.get_host_cpu_features()
    lacking = [feature for feature in features if not known.get(feature)]
    if lacking:
        pytest.skip(f"this CPU has no {' and '.join(lacking)}")
    assembly = host_assembly(form, several)
    for pattern in there:
        assert re.search(pattern, assembly), pattern
    for pattern in not_there:
        assert not re.search(pattern, assembly), pattern


def tile_assembly(form, parts, rows, tokens, triple, cpu):
    """Of one tile, for any processor."""
    from llvmlite import binding, ir

    from halfbyte.kernels.cpu.tiles import emit_tile
    from halfbyte.kernels.cpu.vectors import I64, Emit

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = ir.Module("tile")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 11), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    emit_tile(Emit(builder), form, parts, rows, tokens, 512, function.args)
    builder.ret_void()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    parsed = binding.parse_assembly(str(module))
    parsed.triple = triple
    parsed.verify()
    return machine.emit_assembly(parsed)


X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


@needs_numba
@pytest.mark.parametrize(("rows", "tokens"), [(4, 1), (4, 2), (2, 4), (2, 8)])
@pytest.mark.parametrize(
    ("form", "parts", "triple", "cpu", "there"),
    [
        ("bf16", 1, X86, "znver4", ("vdpbf16ps", "vpermw", "prefetcht1")),
        ("bf16", 2, X86, "sapphirerapids", ("vdpbf16ps", "vpermw", "prefetcht1")),
        ("fma", 1, X86, "skylake-avx512", ("vperm", "vfmadd", "%zmm", "prefetcht1")),
        ("portable", 1, X86, "x86-64-v3", ("vcvtph2ps", "vfmadd", "%ymm", "prefetcht1")),
        ("portable", 1, ARM, "generic", ("fcvtl", "fmla", "prfm")),
        ("portable", 1, ARM, "apple-m1", ("fcvtl", "fmla", "prfm")),
    ],
)
def test_instructions_of_tiles(form, parts, triple, cpu, there, rows, tokens):
    assembly = tile_assembly(form, parts, rows, tokens, triple, cpu)
    for instruction in there:
        assert instruction in assembly
    calls = re.findall(r"^\s*(?:callq?|bl)\s+(\S+)", assembly, re.MULTILINE)
    assert not calls
