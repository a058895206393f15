"""``linear`` in FP8: the stated values, the stated bound, never unasked, and what a GPU makes of it."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte import fp8_ops, kernels, remembered
from halfbyte.errors import NoKernelError, UsageError
from halfbyte.kernels import Fp8Args, Kernel, fp8, select
from halfbyte.kernels.cuda import choices
from halfbyte.kernels.fp8 import LARGEST_K, cost, quantized
from halfbyte.kinds import Fp8Weight
from halfbyte.layouts import Fragments, Rows
from halfbyte.lossy import fp8_error
from halfbyte.numerics import decode_e4m3
from halfbyte.ops import linear, pack, plan
from halfbyte.plans import FP8_ACTIVATIONS
from halfbyte.weight import float_dtype, to_numpy, to_torch
from helpers_run import DTYPES, HALF_ULP, fp8_call_like, moved, random_floats, random_weight

libraries = pytest.mark.parametrize("library", ["numpy", "torch"])
SHAPES = [(1, 16), (3, 40), (65, 48), (33, 130)]
"""(N, K): K of whole blocks, and K that ends inside one."""


def on_cpu(twin):
    """The same twin in torch."""
    pre = None if twin.pre_scale is None else to_torch(np.array(twin.pre_scale))
    data, scale = to_torch(np.array(twin.data)), to_torch(np.array(twin.scale))
    return Fp8Weight(data=data, scale=scale, pre_scale=pre, block=twin.block, error=twin.error)


def assert_exact(y, x, weight, bias, out_dtype):
    """Within a few roundings of the product of the quantized values in float64."""
    twin = hb.to_fp8(weight)
    q, scale = quantized(x, twin.pre_scale)
    b = np.zeros(1) if bias is None else bias.astype(np.float64)
    product = decode_e4m3(q).astype(np.float64) @ decode_e4m3(twin.data).astype(np.float64).T
    product *= scale.astype(np.float64) * twin.scale.reshape(-1)
    bound = (4 * 2.0**-24 + HALF_ULP[out_dtype]) * (np.abs(product) + np.abs(b))
    assert y.dtype == float_dtype(out_dtype)
    assert np.all(np.abs(y.astype(np.float64) - product - b) <= bound)


class TestQuantized:
    def test_by_hand(self):
        x = np.array([[1, -0.5, 1 / 3, 2.0**-12, 0], [448, -17, 18, 465, -896]], np.float32)
        data, scale = quantized(x)
        assert scale.tolist() == [[np.float32(1 / 448)], [2.0]]
        # 448, -224, 149.3 -> 144, 0.109 -> 0.109375, 0; 224, -8.5 -> -8 (even), 9, 232.5 -> 240, -448
        expected = np.array([[448, -224, 144, 0.109375, 0], [224, -8, 9, 240, -448]], ml_dtypes.float8_e4m3fn)
        assert data.tolist() == expected.view(np.uint8).tolist()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_libraries_agree_bit_for_bit(self, dtype):
        x = random_floats((300, 1024), dtype)
        x[3, 5], x[4, 6], x[5] = np.nan, np.inf, 0
        pre = np.random.default_rng(0).uniform(0.5, 2, 1024).astype(np.float32)
        for given in (None, pre):
            numpy = quantized(x, given)
            torch_ = quantized(to_torch(x), None if given is None else to_torch(given))
            for one, two in zip(numpy, torch_, strict=True):
                assert np.array_equal(one, to_numpy(two), equal_nan=True)

    def test_bound(self):
        for size in (1.0, 1e30, 1e-30):
            x = random_floats((64, 512), "float32") * np.float32(size)
            data, scale = quantized(x)
            lost = np.abs(decode_e4m3(data).astype(np.float64) * scale - x)
            # The two roundings to float32 add to half a step: 2^-23 of the value.
            assert np.all(lost <= np.maximum(np.abs(x) / 16, scale / 1024) * (1 + 2.0**-20))
            assert decode_e4m3(data).max() == 448

    @pytest.mark.parametrize("size", [1e-45, 3e-42, 1.3e-36, 2.0**-65, 2.0**-64, 3e38])
    @libraries
    def test_of_any_size(self, size, library):
        x = np.array([[1, -0.5, 0.25, 0]], np.float32) * np.float32(size)
        data, scale = (to_numpy(a) for a in quantized(moved(x, library)))
        assert decode_e4m3(data)[0, 0] == 448
        assert decode_e4m3(data)[0, 3] == 0
        assert scale[0, 0] == np.float32(size) / np.float32(448)
        if size > 1e-43:  # else half of it is no number
            assert decode_e4m3(data)[0, :3].tolist() == [448, -224, 112]

    @libraries
    def test_what_is_not_finite(self, library):
        x = np.ones((4, 32), np.float32)
        x[0, 3], x[1, 31], x[2, 0] = np.nan, np.inf, -np.inf
        data, scale = (to_numpy(a) for a in quantized(moved(x, library)))
        assert np.isnan(scale[:3]).all()
        assert not data[:3].any()
        assert scale[3, 0] == np.float32(1 / 448)

    def test_activations_lose_what_plan_says(self):
        """Also in each dtype: 16-bit values are rounded to it first, which is not counted."""
        for dtype in DTYPES:
            x = random_floats((64, 4096), dtype)
            data, scale = quantized(x)
            lost = decode_e4m3(data).astype(np.float64) * scale - x.astype(np.float64)
            assert np.linalg.norm(lost) / np.linalg.norm(x.astype(np.float64)) == pytest.approx(
                FP8_ACTIVATIONS, abs=3e-4
            )


class TestReference:
    @libraries
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("n", "k"), SHAPES)
    def test_it_is_exact_on_the_quantized_values(self, library, dtype, n, k):
        for m in (1, 2, 7):
            w, x = random_weight(n, k, scales=(0, 127)), random_floats((m, k), dtype)
            assert_exact(to_numpy(linear(moved(x, library), moved(w, library), precision="fp8")), x, w, None, dtype)

    @libraries
    @pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
    @pytest.mark.parametrize("out_dtype", DTYPES)
    @pytest.mark.parametrize("per_row", [False, True])
    @pytest.mark.parametrize("pre_scale", [False, True])
    def test_bias_scales_and_results(self, library, bias_dtype, out_dtype, per_row, pre_scale):
        w, x = random_weight(70, 104, per_row=per_row, pre_scale=pre_scale), random_floats((5, 104), "float16")
        bias = random_floats((70,), bias_dtype) if bias_dtype else None
        given = moved(x, library), moved(w, library), moved(bias, library)
        y = to_numpy(linear(*given, out_dtype=out_dtype, precision="fp8"))
        assert_exact(y, x, w, bias, out_dtype)
        twin = hb.to_fp8(w) if library == "numpy" else on_cpu(hb.to_fp8(w))
        assert np.array_equal(to_numpy(linear(given[0], twin, given[2], out_dtype=out_dtype)), y)
        assert np.array_equal(to_numpy(linear(given[0], twin, given[2], out_dtype=out_dtype, precision="fp8")), y)

    @libraries
    @pytest.mark.parametrize(
        "layout", ["columns", "atoms128x4", "tiles64", "fragments(dtype=bfloat16)", "fragments(dtype=float16)"]
    )
    def test_any_layout_gives_the_same(self, library, layout):
        w, x = moved(random_weight(128, 128), library), moved(random_floats((3, 128), "float32"), library)
        expected = to_numpy(linear(x, pack(w), precision="fp8"))
        assert np.array_equal(to_numpy(linear(x, pack(w, layout), precision="fp8")), expected)

    @libraries
    def test_results_do_not_depend_on_the_chunks(self, library, monkeypatch):
        w, x = moved(random_weight(70, 96, per_row=True), library), moved(random_floats((5, 96), "float32"), library)
        bias = moved(random_floats((70,), "float32"), library)
        whole = to_numpy(linear(x, w, bias, precision="fp8"))
        for rows in (1, 32, 69):
            monkeypatch.setattr(fp8, "SCRATCH_BYTES", rows * 8 * 96)
            assert np.array_equal(to_numpy(linear(x, w, bias, precision="fp8")), whole)

    @libraries
    @pytest.mark.parametrize("lead", [(), (1,), (2, 3), (0,), (2, 0, 3)])
    def test_leading_axes_are_kept(self, library, lead):
        w, x = random_weight(33, 64), random_floats((*lead, 64), "float32")
        y = to_numpy(linear(moved(x, library), moved(w, library), precision="fp8"))
        assert y.shape == (*lead, 33)
        for at in np.ndindex(*lead):
            assert np.array_equal(y[at], linear(x[at], w, precision="fp8"))

    @libraries
    def test_no_features_and_no_k(self, library):
        for n, k in ((0, 64), (5, 0), (0, 0)):
            twin = Fp8Weight(data=np.zeros((n, k), np.uint8), scale=np.ones((n, 1), np.float32))
            twin = twin if library == "numpy" else on_cpu(twin)
            bias = moved(np.arange(n, dtype=np.float32), library)
            y = to_numpy(linear(moved(np.ones((2, k), np.float32), library), twin, bias))
            assert y.tolist() == [list(range(n))] * 2

    @libraries
    def test_what_is_not_finite_stays_in_its_token(self, library):
        w, x = random_weight(40, 96), random_floats((9, 96), "float32")
        x[1, 5], x[3, 95], x[4, 0], x[6] = np.nan, np.inf, -np.inf, 0
        y = to_numpy(linear(moved(x, library), moved(w, library), precision="fp8"))
        assert np.isnan(y[[1, 3, 4]]).all()
        assert not y[6].any()
        rest = [0, 2, 5, 7, 8]
        assert np.array_equal(y[rest], linear(x[rest], w, precision="fp8"))

    @libraries
    def test_strided_arrays(self, library):
        w = moved(random_weight(40, 96), library)
        x, bias = random_floats((10, 192), "float32"), random_floats((80,), "float32")
        held = np.ascontiguousarray(x[::2, ::2]), np.ascontiguousarray(bias[::2])
        expected = linear(moved(held[0], library), w, moved(held[1], library), precision="fp8")
        y = linear(moved(x, library)[::2, ::2], w, moved(bias, library)[::2], precision="fp8")
        assert np.array_equal(to_numpy(y), to_numpy(expected))

    def test_the_largest_sums_are_exact(self):
        """All products 448^2, and one of 2^-18 more."""
        data = np.full((2, LARGEST_K), 0x7E, np.uint8)
        data[1, 0] = 1
        x = np.full((1, LARGEST_K), 448, np.float32)
        y = linear(x, Fp8Weight(data=data, scale=np.float32(1)))
        assert y.tolist() == [[np.float32(448 * 448 * LARGEST_K), np.float32(448 * 448 * (LARGEST_K - 1) + 0.875)]]


class TestErrorOnGaussianValues:
    """Of a layer as models have it: quantized to NVFP4, then multiplied in FP8."""

    dense = np.random.default_rng(0).normal(0, 0.02, (512, 4096))
    x = np.random.default_rng(1).standard_normal((128, 4096))

    def test_it_adds_little_to_that_of_nvfp4(self):
        w, x = hb.quantize(self.dense.astype(np.float32)), self.x.astype(ml_dtypes.bfloat16)
        true = x.astype(np.float64) @ self.dense.T
        exact = x.astype(np.float64) @ w.dequantize().astype(np.float64).T
        y = linear(x, w, out_dtype="float32", precision="fp8").astype(np.float64)
        own, total = (np.linalg.norm(a - true) / np.linalg.norm(true) for a in (exact, y))
        assert 0.08 < own < 0.11
        assert own < total < 1.08 * own
        assert 0.028 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.032

    def test_the_weights_part_is_told_without_a_twin(self):
        w = hb.quantize(self.dense.astype(np.float32))
        per_row = random_weight(70, 96, per_row=True)
        for weight in (w, per_row, per_row.torch(), w.torch(), random_weight(3, 31), hb.Weight.stack([w, w])):
            assert fp8_error(weight) == pytest.approx(hb.to_fp8(weight).error, rel=1e-12)
        assert 0.0135 < fp8_error(w) < 0.0150
        assert fp8_error(random_weight(4, 0)) == 0


@dataclass(frozen=True)
class Configuration:
    warps: int = 4


def stand_in(**changes):
    """A kernel for FP8 that takes NVFP4 on an H200 and on the CPU, and keeps what it was called with."""
    calls = []

    def launch(args):
        calls.append(("launch", args))
        fp8.TORCH.launch(args)

    def bind(args):
        calls.append(("bind", args))

        def run(x, bias, out):
            calls.append(("run", x.shape[0]))
            fp8.TORCH.launch(Fp8Args(x=x, weight=args.weight, bias=bias, out=out))

        return run

    fields = {
        "name": "gluon-stand-in", "bundle": Fp8Args, "description": "",
        "refuse": lambda call: () if call.capability in (0, 90) else (f"is for sm_90, not sm_{call.capability}",),
        "load": lambda call: None, "launch": launch, "cost": cost, "bind": bind,
        "configure": lambda call: Configuration(4 if call.rows <= 512 else 8), "scratch": lambda call: call.rows * 100,
    }  # fmt: skip
    return Kernel(**(fields | changes)), calls


@pytest.fixture
def fast(monkeypatch):
    """A table with the stand-in first, and its calls."""
    kernel, calls = stand_in()
    others = tuple(k for k in kernels.KERNELS if not k.name.startswith("gluon-"))
    monkeypatch.setattr(kernels, "KERNELS", (kernel, *others))
    monkeypatch.setattr("halfbyte.plans.KERNELS", (kernel, *others))
    return calls


class TestChoice:
    w = random_weight(64, 96)
    x = random_floats((3, 96), "float32")

    @libraries
    def test_never_unasked(self, library, fast):
        for weight in (moved(self.w, library), pack(moved(self.w, library))):
            for rows in (1, 16, 512):
                for dtype in DTYPES:
                    for precision in (None, "exact"):
                        chosen = plan("linear", weight, rows=rows, dtype=dtype, precision=precision)
                        assert "fp8" not in str(chosen).lower()
        exact = to_numpy(linear(moved(self.x, library), moved(self.w, library)))
        rounded = to_numpy(linear(moved(self.x, library), moved(self.w, library), precision="fp8"))
        assert 0 < np.linalg.norm(rounded - exact) < 0.06 * np.linalg.norm(exact)

    def test_on_a_gpu_from_256_tokens_on(self, fast):
        assert fp8_ops.FEWEST == 256
        for rows, name in ((1, None), (255, None), (256, "gluon-stand-in"), (100_000, "gluon-stand-in")):
            chosen = fp8_ops.kernel_for(fp8_call_like(rows=rows))
            assert (chosen and chosen.name) == name

    def test_the_reference_is_no_reason_to_leave_exact_kernels(self, fast):
        assert fp8_ops.kernel_for(fp8_call_like(capability=80)) is None
        assert fp8_ops.kernel_for(fp8_call_like(shape=(2, 32, 64))).name == "gluon-stand-in"
        assert fp8_ops.kernel_for(fp8_call_like(shape=(2, 32, 64), capability=80)) is None

    def test_forced(self, fast, monkeypatch):
        monkeypatch.setenv("HALFBYTE_KERNEL", "fp8-torch")
        assert fp8_ops.kernel_for(fp8_call_like(rows=1)) is fp8.TORCH
        monkeypatch.setenv("HALFBYTE_KERNEL", "gluon-stand-in")
        assert fp8_ops.kernel_for(fp8_call_like(rows=1)).name == "gluon-stand-in"
        with pytest.raises(NoKernelError, match="is for sm_90, not sm_80"):
            fp8_ops.kernel_for(fp8_call_like(rows=512, capability=80))
        monkeypatch.setenv("HALFBYTE_KERNEL", "triton-gemm")  # of another op
        assert fp8_ops.kernel_for(fp8_call_like(rows=255)) is None
        assert fp8_ops.kernel_for(fp8_call_like(rows=256)).name == "gluon-stand-in"

    def test_what_was_measured_to_be_slower_is_exact(self, fast, monkeypatch):
        """At one shape; between what was measured the times lie on a line of logarithms."""

        def entry(op, shape, kernel, times):
            choice = choices.Choice(kernel, {}, times, shape, "bfloat16", {"multiprocessors": 132}, choices.SHIPPED)
            return choices.Entry(op, 90, ("bfloat16",), shape, {kernel: (choices.Range(1, None, choice),)})

        exact = entry("linear", (4096, 4096), "triton-gemm", {256: 10.0, 1024: 40.0})
        for shape, times, expected in (
            ((4096, 4096), {256: 12.0, 1024: 30.0}, {256: False, 300: False, 1024: True, 4096: True}),
            ((4096, 4096), {256: 10.0, 1024: 40.0}, {256: False, 1024: False}),
            ((4096, 8192), {256: 99.0, 1024: 99.0}, {256: True, 1024: True}),
        ):
            held = exact, entry("linear-fp8", shape, "gluon-stand-in", times)
            monkeypatch.setattr(choices, "entries", lambda held=held: held)
            choices._by_distance.cache_clear()
            try:
                for rows, chosen in expected.items():
                    call = fp8_call_like(shape=(4096, 4096), rows=rows)
                    assert (fp8_ops.kernel_for(call) is not None) == chosen, (shape, rows)
                    assert fp8_ops.slower(call) == (None if chosen else "gluon-stand-in"), (shape, rows)
                assert choices.measured(fp8_call_like(shape=(4096, 4096), rows=512), "gluon-stand-in")[0] == shape
                half = choices.measured(fp8_ops.exact(fp8_call_like(shape=(64, 64), rows=512)), "triton-gemm")
                assert half == ((4096, 4096), pytest.approx(20.0))
                assert choices.measured(fp8_call_like(), "no such kernel") is None
            finally:
                choices._by_distance.cache_clear()

    def test_a_twin_is_never_exact(self):
        for rows in (1, 512):
            call = fp8_call_like(layout=Rows(), resident=True, rows=rows, device="cpu", capability=0)
            assert fp8_ops.kernel_for(call) is fp8.TORCH
        assert select(Fp8Args, replace(call, library="numpy")) is fp8.NUMPY

    def test_no_gradient(self):
        x = torch.ones(3, 96, requires_grad=True)
        y = linear(x, self.w.torch(), precision="fp8")
        with pytest.raises(UsageError, match="has no gradient"):
            y.sum().backward()


class TestRemembered:
    x = to_torch(random_floats((3, 96), "float32"))

    def held(self, kind):
        w = random_weight(64, 96, per_row=True).torch()
        return pack(w) if kind == "packed" else hb.to_fp8(w)

    @pytest.mark.parametrize("kind", ["packed", "twin"])
    def test_the_second_call_runs_what_the_first_bound(self, fast, kind):
        w = self.held(kind)
        first = linear(self.x, w, precision="fp8")
        assert [name for name, _ in fast] == ["bind", "run"]
        assert torch.equal(linear(self.x, w, precision="fp8"), first)
        assert [name for name, _ in fast] == ["bind", "run", "run"]
        assert linear(self.x[None, :2], w, precision="fp8").shape == (1, 2, 64)
        assert [name for name, _ in fast][3:] == ["bind", "run"]

    @pytest.mark.parametrize("kind", ["packed", "twin"])
    def test_what_was_written_is_bound_again(self, fast, kind):
        w = self.held(kind)
        first = linear(self.x, w, precision="fp8")
        (w.buffers()["scale2"] if kind == "packed" else w.scale).mul_(2)
        assert torch.equal(linear(self.x, w, precision="fp8"), first * 2)
        assert [name for name, _ in fast] == ["bind", "run", "bind", "run"]

    def test_exact_calls_are_others(self, fast):
        w = self.held("packed")
        rounded = linear(self.x, w, precision="fp8")
        exact = linear(self.x, w)
        assert not torch.equal(rounded, exact)
        assert torch.equal(linear(self.x, w, precision="fp8"), rounded)
        assert torch.equal(linear(self.x, w), exact)

    def test_that_exact_kernels_run_is_remembered(self, monkeypatch):
        w, asked = self.held("packed"), []
        monkeypatch.setattr(fp8_ops, "kernel_for", asked.append)
        exact = linear(self.x, w)
        for _ in range(3):
            assert torch.equal(linear(self.x, w, precision="fp8"), exact)
        assert len(asked) == 1

    def test_many_calls_are_forgotten_and_nothing_else(self):
        from halfbyte.remembered import keep

        memo = {"int8": 1, (0, "own"): 2}
        for rows in range(600):
            keep(memo, ("fp8", rows), None)
        assert len(memo) <= 257
        assert memo["int8"] == 1
        assert ("fp8", 599) in memo
        assert (0, "own") not in memo

    def test_another_thread_may_forget_the_same_meanwhile(self):
        class Shared(dict):
            def __iter__(self):
                found = list(dict.__iter__(self))
                self.clear()
                return iter(found)

        memo = Shared({(i,): print for i in range(300)})
        remembered.keep(memo, ("new",), print)
        assert dict.items(memo) == {("new",): print}.items()

    def test_a_twin_is_copied_and_pickled_without_it(self, fast):
        w = self.held("twin")
        first = linear(self.x, w)
        assert w.memo
        for other in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
            assert not other.memo
            assert torch.equal(linear(self.x, other), first)

    def test_a_weight_that_is_packed_in_each_call(self, fast):
        linear(self.x, random_weight(64, 96).torch(), precision="fp8")
        assert [name for name, _ in fast] == ["launch"]

    def test_inference_mode(self, fast):
        w = self.held("packed")
        with torch.inference_mode():
            inside = linear(self.x, self.held("packed"), precision="fp8")
            kept = linear(self.x, w, precision="fp8")
        assert torch.equal(inside, linear(self.x, w, precision="fp8"))
        assert torch.equal(inside, kept)


def lines_of(chosen):
    return [re.split("  +", line, maxsplit=1) for line in str(chosen).splitlines()]


class TestPlan:
    w = random_weight(64, 96)
    packed = pack(w, Fragments())
    error = hb.to_fp8(w).error
    notes = (
        ["note", f"error of the weight by rounding to FP8: {error:.4f} of its norm, measured"],
        ["note", "error of the activations by rounding to FP8 for each token: 0.0265 of their norm if Gaussian"],
        ["note", f"error of the result by both: about {(error**2 + 0.0265**2) ** 0.5:.3f} of its norm"],
    )

    def test_on_a_gpu(self, fast):
        found = lines_of(plan("linear", self.packed, rows=512, device="cuda:sm_90", precision="fp8"))
        assert [line for line in found if line[0] in ("op", "kernel", "how", "extra", "scratch")] == [
            ["op", "linear-fp8 N=64 K=96 M=512, layout fragments(dtype=bfloat16)"],
            ["kernel", "gluon-stand-in (first in the table that accepts; nothing was measured for it on sm_90)"],
            ["how", "warps=4"],
            ["extra", "0 bytes of the weight held twice"],
            ["scratch", "51,200 bytes, shared by a stream's kernels"],
        ]
        assert [line for line in found if line[0].startswith("M ")][-2:] == [
            ["M 256-512", "gluon-stand-in warps=4"],
            ["M 513-", "gluon-stand-in warps=8"],
        ]
        notes = [line for line in found if line[0] == "note"]
        assert notes[:3] == [*self.notes]
        assert (
            notes[3][1]
            == "FP8 from 256 tokens on, where a kernel takes the layout and is faster; other calls are exact"
        )
        assert all("FP8" not in line[1] and "fp8" not in line[1] for line in found if line[0].startswith("M 1"))

    def test_for_few_tokens_on_a_gpu(self, fast):
        exact = plan("linear", self.packed, rows=17, device="cuda:sm_90")
        chosen = plan("linear", self.packed, rows=17, device="cuda:sm_90", precision="fp8")
        assert (chosen.call, chosen.kernel, chosen.configuration) == (exact.call, exact.kernel, exact.configuration)
        assert chosen.ranges[-2:] == ((256, 512, "gluon-stand-in warps=4"), (513, None, "gluon-stand-in warps=8"))
        assert [["note", note] for note in chosen.notes[:3]] == [*self.notes]

    def test_where_no_kernel_is_fast(self, fast):
        chosen = plan("linear", self.packed, rows=512, device="cuda:sm_80", precision="fp8")
        assert chosen.kernel == "triton-gemm"
        assert ("gluon-stand-in", "is for sm_90, not sm_80") in chosen.refusals
        assert not any("stand-in" in runs for _, _, runs in chosen.ranges)

    def test_on_the_cpu(self):
        chosen = plan("linear", pack(self.w), rows=4, dtype="float32", precision="fp8")
        assert (chosen.kernel, chosen.extra_bytes, chosen.ranges) == ("fp8-numpy", 0, ())
        assert [["note", note] for note in chosen.notes[:3]] == [*self.notes]
        assert any("pack it once" in note for note in plan("linear", self.w, rows=4, precision="fp8").notes)

    def test_the_error_is_measured_once(self, monkeypatch):
        packed = pack(self.w.torch())
        first = plan("linear", packed, rows=4, precision="fp8")
        monkeypatch.setattr(fp8_ops, "fp8_error", lambda weight: 0.5)
        assert plan("linear", packed, rows=4, precision="fp8").notes == first.notes
        packed.buffers()["scales"].add_(1)
        assert "0.5000 of its norm" in plan("linear", packed, rows=4, precision="fp8").notes[0]

    def test_it_says_that_fp8_was_measured_to_be_no_faster(self, fast, monkeypatch):
        monkeypatch.setattr(fp8_ops, "_slower", lambda kernel, call: True)
        for rows, said in ((512, True), (255, False)):
            chosen = plan("linear", hb.pack(random_weight(20, 32)), rows=rows, precision="fp8", device="cuda:sm_90")
            assert chosen.kernel == "reference-torch"
            line = "gluon-stand-in", "was measured to be no faster than reference-torch here"
            assert (line in chosen.refusals) == said

    def test_meta_tensors(self):
        """Shapes alone, as with exact kernels."""
        packed = hb.pack(random_weight(20, 32).torch()).to("meta")
        y = linear(torch.ones(3, 32, device="meta"), packed, precision="fp8")
        assert (y.device.type, y.shape, y.dtype) == ("meta", (3, 20), torch.float32)
        for device in ("meta", "cpu"):
            notes = plan("linear", packed, rows=3, precision="fp8", device=device).notes
            assert notes[0] == "error of the weight by rounding to FP8: unknown: there are no values yet"
            assert plan("linear", packed, rows=3, device=device).kernel

    def test_a_twin(self):
        twin = hb.to_fp8(self.w)
        chosen = plan("linear", twin, rows=4)
        assert lines_of(chosen)[0] == ["op", "linear-fp8 N=64 K=96 M=4, FP8 rows"]
        assert (chosen.kernel, chosen.extra_bytes) == ("fp8-numpy", 0)
        assert chosen.bytes == 64 * 96 + 4 + 2 * (4 * 96 + 4 * 64)
        assert chosen.notes[:3] == tuple(note for _, note in self.notes)
        unknown = Fp8Weight(data=np.zeros((3, 16), np.uint8), scale=1.0)
        assert "unknown" in plan("linear", unknown, rows=1).notes[0]

    def test_a_twin_on_a_gpu(self):
        pytest.importorskip("triton")
        data = np.zeros((33, 40), np.uint8)
        chosen = plan("linear", Fp8Weight(data=data, scale=1.0), rows=256, device="cuda:sm_90")
        assert chosen.kernel == "scaled-mm"
        assert chosen.extra_bytes == 48 * 48 + 4 * 48
        assert chosen.scratch_bytes == 256 * 48 + 4 * 256
        assert chosen.ranges == ((1, None, "scaled-mm"),)
        whole = plan("linear", Fp8Weight(data=data[:32, :32], scale=1.0), rows=256, device="cuda:sm_89")
        assert (whole.kernel, whole.extra_bytes) == ("scaled-mm", 4 * 32)
        older = plan("linear", Fp8Weight(data=data, scale=1.0), rows=256, device="cuda:sm_80")
        assert older.kernel == "fp8-torch"
        assert ("scaled-mm", "is for sm_89 or later, not sm_80") in older.refusals

    def test_the_ceiling_is_that_of_fp8(self, fast, monkeypatch):
        big = fp8_call_like(shape=(28672, 8192), rows=4096)
        from halfbyte.plans import _ceiling

        assert _ceiling("NVIDIA H200", big).seconds(cost(big)) == pytest.approx(big.rows * 28672 * 8192 * 2 / 1566e12)


class TestErrors:
    w = random_weight(20, 32)
    x = np.ones((2, 32), np.float32)

    @pytest.mark.parametrize("precision", ["exact", "int8"])
    def test_a_twin_is_not_of_another_precision(self, precision):
        for call in (
            lambda p: linear(self.x, hb.to_fp8(self.w), precision=p),
            lambda p: plan("linear", hb.to_fp8(self.w), rows=1, precision=p),
        ):
            with pytest.raises(UsageError) as caught:
                call(precision)
            assert str(caught.value) == (
                f"an FP8 weight is rounded: got precision {precision!r}, expected the NVFP4 weight, or 'fp8'"
            )
        with pytest.raises(UsageError, match="an INT8 weight is rounded: got precision 'fp8'"):
            linear(self.x, hb.to_int8(self.w), precision="fp8")

    def test_an_embedding_has_no_precision(self):
        with pytest.raises(UsageError, match="an embedding is exact"):
            plan("embedding", hb.to_fp8(self.w), rows=1)

    def test_expert_axes(self):
        experts = hb.Weight.stack([self.w, self.w])
        for weight, precision in ((hb.to_fp8(experts), None), (experts, "fp8")):
            with pytest.raises(NoKernelError, match=r"takes one matrix \(N, K\), not expert axes \(2,\)"):
                linear(self.x, weight, precision=precision)

    def test_blocks(self):
        twin = Fp8Weight(data=np.zeros((4, 32), np.uint8), scale=np.ones((2, 2), np.float32), block=(2, 16))
        with pytest.raises(NoKernelError, match="takes a scale of the weight or of each row, not of blocks"):
            linear(self.x, twin)

    def test_a_large_k(self):
        assert not fp8.NUMPY.refuse(fp8_call_like(shape=(1, LARGEST_K), library="numpy", device="cpu"))
        with pytest.raises(NoKernelError, match="takes K up to 131072, whose sums fit float64, not 131073"):
            select(Fp8Args, fp8_call_like(shape=(1, LARGEST_K + 1), device="cpu", capability=0))

    def test_what_does_not_fit(self):
        twin = hb.to_fp8(self.w)
        with pytest.raises(UsageError, match=r"the last axis of x is not the weight's K: got \(2, 31\)"):
            linear(self.x[:, :31], twin)
        with pytest.raises(UsageError, match="the weight and x are of two libraries"):
            linear(torch.ones(2, 32), twin)
        with pytest.raises(UsageError, match=r"bias does not fit the weight's N: got \(3,\), expected \(20,\)"):
            linear(self.x, twin, self.x[0, :3])
        with pytest.raises(UsageError, match="out_dtype is unknown: got int8"):
            linear(self.x, twin, out_dtype="int8")
        with pytest.raises(UsageError, match="x is of the wrong type: got list"):
            linear([1.0], twin)
        with pytest.raises(UsageError, match=r"out does not fit the weight and x: got \(2, 19\)"):
            Fp8Args(x=self.x, weight=twin, bias=None, out=np.empty((2, 19), np.float32))

    @pytest.mark.parametrize("weight", [hb.pack(w), hb.to_fp8(w)])
    def test_what_is_no_dtype_or_precision(self, weight):
        for out_dtype in (5, [], {}):
            with pytest.raises(UsageError) as caught:
                linear(self.x, weight, out_dtype=out_dtype, precision="fp8")
            assert str(caught.value) == (
                f"out_dtype is unknown: got {out_dtype}, expected float32 or bfloat16 or float16"
            )
        for precision in (8, [], {}):
            with pytest.raises(UsageError, match=re.escape(f"unknown precision: got {precision}, expected 'exact'")):
                linear(self.x, weight, precision=precision)

    def test_a_twin_that_is_not_row_major(self):
        data = np.zeros((32, 20), np.uint8).T
        with pytest.raises(
            UsageError, match=r"not row-major: got strides \(1, 20\); make an Fp8Weight of a contiguous"
        ):
            linear(self.x, Fp8Weight(data=data, scale=np.float32(1)))
        with pytest.raises(UsageError, match="not row-major"):
            linear(torch.ones(2, 32), Fp8Weight(data=torch.zeros(32, 20, dtype=torch.uint8).T, scale=1.0))
