"""Activations as NVFP4 and products with them: the stated values, never unasked, and what FP4 units would be given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import halfbyte as hb
from expert_cases import Case, routing, tokens
from halfbyte import kernels
from halfbyte.activations import Tokens, quantize_tokens
from halfbyte.errors import NoKernelError, UsageError
from halfbyte.expert_ops import Stacks, compute
from halfbyte.forms import Form
from halfbyte.kernels import LinearArgs, W4a4Args, W4a4Call, select, w4a4
from halfbyte.kernels.cuda import w4a4 as cuda_w4a4
from halfbyte.layouts import Atoms128x4, Rows
from halfbyte.nn import Group, Linear
from halfbyte.numerics import decode_e2m1, decode_e4m3
from halfbyte.ops import linear, pack, plan
from halfbyte.weight import Weight, float_dtype, to_numpy, to_torch
from helpers_run import DTYPES, HALF_ULP, random_floats, random_weight

libraries = pytest.mark.parametrize("library", ["numpy", "torch"])
dtypes = pytest.mark.parametrize("dtype", DTYPES)
STATIC = 0.004


def meant(x, weight: Weight, bias=None):
    """(M, N) float64 of the activations that ``quantize`` gives, and the sums of magnitudes."""
    v = x.astype(np.float32) if weight.pre_scale is None else x.astype(np.float32) * weight.pre_scale
    rows = []
    for row in v:
        s = weight.input_scale if weight.input_scale is not None else None
        rounded = hb.quantize(row[None], scale2=None if s is None else float(s), pad=True)
        rows.append(rounded.dequantize().astype(np.float64)[0])
    xs, w = np.array(rows), weight.replace(pre_scale=None).dequantize().astype(np.float64)
    b = np.zeros(1) if bias is None else bias.astype(np.float64)
    return xs @ w.T + b, np.abs(xs) @ np.abs(w.T) + np.abs(b)


class TestTokens:
    def test_by_hand(self):
        x = np.zeros((3, 32), np.float32)
        x[0, :5] = [2688, 224, -336, 1, -0.1]  # s = 1; the block's scale 448, codes 6, 0.5, -0.75 -> -1, 0, -0
        x[0, 16:19] = [3, 0.125, 0.375]  # scale 0.5: 6, 0.25 -> 0 (even), 0.75 -> 1 (even)
        x[1, :2] = [26.88, -26.88]
        found = quantize_tokens(x)
        assert found.scale.tolist() == [[1.0], [np.float32(26.88) / np.float32(2688)], [1.0]]
        assert found.scales.tolist() == [[0x7E, 0x30], [0x7E, 0x38], [0x38, 0x38]]
        assert decode_e2m1(found.codes)[0, :5].tolist() == [6, 0.5, -1, 0, 0]
        assert decode_e2m1(found.codes)[0, 16:19].tolist() == [6, 0, 1]
        assert found.values()[0, :3].tolist() == [2688, 224, -448]
        assert found.codes[0, :3].tolist() == [0x17, 0x0A, 0x08]
        assert found.dequantize()[2].tolist() == [0] * 32

    @libraries
    @dtypes
    @pytest.mark.parametrize("k", [16, 40, 256])
    @pytest.mark.parametrize("scale", [None, 0.01])
    def test_the_bytes_of_quantize(self, library, dtype, k, scale):
        x = random_floats((9, k), dtype)
        x[2], x[3, : min(k, 16)] = 0, 0
        found = quantize_tokens(to_torch(x) if library == "torch" else x, scale)
        for t in range(9):
            own = hb.quantize(x[t : t + 1], scale2=scale, pad=True)
            assert np.array_equal(to_numpy(found.codes)[t : t + 1], own.codes)
            assert np.array_equal(to_numpy(found.scales)[t : t + 1], own.scales)
            assert float(found.scale[t, 0]) == float(own.scale2.item())
        assert found.k == k

    @pytest.mark.parametrize("scale", [None, 2.0**-140, 1e-30, 1e-4, 3e33, "each"])
    def test_libraries_agree_bit_for_bit(self, scale):
        x = random_floats((40, 70), "float32")
        x[3, 5], x[4, 6], x[5] = np.nan, -np.inf, 0
        x[6], x[7], x[8, 0] = x[6] * np.float32(1e-38), x[7] * np.float32(1e36), -0.0
        pre = np.random.default_rng(0).uniform(0.5, 2, 70).astype(np.float32)
        if scale == "each":
            scale = np.random.default_rng(1).uniform(1e-4, 1e-3, (40, 1)).astype(np.float32)
        for given in (None, pre):
            torch_scale = torch.from_numpy(scale) if isinstance(scale, np.ndarray) else scale
            one = quantize_tokens(x, scale, pre_scale=given)
            two = quantize_tokens(to_torch(x), torch_scale, pre_scale=None if given is None else to_torch(given))
            assert isinstance(one, Tokens)
            for a, b in zip(one[:3], two[:3], strict=True):
                assert np.array_equal(a, to_numpy(b), equal_nan=True)
            assert np.isnan(one.scale[3:5]).all()
            assert np.isfinite(one.scale[5:]).all()

    def test_what_is_too_large_is_clipped(self):
        """``quantize`` refuses it."""
        x = np.full((1, 16), 100.0, np.float32)
        x[0, 1] = -7
        found = quantize_tokens(x, 0.01)  # up to 26.88
        assert np.allclose(found.dequantize()[0, :2], [26.88, -6.72], rtol=1e-6)
        assert np.array_equal(found.scales, [[0x7E]])

    @pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
    def test_an_input_scale_that_cannot_be_meant(self, scale):
        found = quantize_tokens(np.ones((2, 16), np.float32), scale)
        assert np.isnan(found.dequantize()).all()

    @libraries
    def test_every_dtype_holds_the_values(self, library):
        x = random_floats((64, 512), "float32") * np.float32(10) ** np.arange(-32, 32)[:, None].astype(np.float32)
        found = quantize_tokens(to_torch(x) if library == "torch" else x, 1e-5)
        exact = to_numpy(found.values())
        for dtype in ("bfloat16", "float16"):
            assert np.array_equal(to_numpy(found.values(dtype)).astype(np.float32), exact)

    @libraries
    def test_error_of_gaussian_values(self, library):
        x = random_floats((256, 1024), "float32")
        given = to_torch(x) if library == "torch" else x
        for scale in (None, float(np.abs(x).max()) / 2688):
            assert abs(quantize_tokens(given, scale).error(given) - w4a4.ERROR) < 0.001

    def test_errors(self):
        with pytest.raises(UsageError, match=r"activations are \(M, K\): got \(16,\)"):
            quantize_tokens(np.ones(16, np.float32))
        with pytest.raises(UsageError, match=r"input_scale does not fit the tokens: got \(3,\), expected"):
            quantize_tokens(np.ones((2, 16), np.float32), np.ones(3, np.float32))


class TestLinear:
    @libraries
    @dtypes
    @pytest.mark.parametrize("static", [False, True])
    @pytest.mark.parametrize("shape", [(1, 33, 48), (3, 65, 40), (20, 16, 272)])
    def test_values(self, library, dtype, static, shape):
        m, n, k = shape
        weight = random_weight(n, k, per_row=m == 3, pre_scale=m == 20)
        weight = weight.replace(input_scale=np.float32(STATIC)) if static else weight
        x, bias = random_floats((m, k), dtype), random_floats((n,), dtype) if m != 1 else None
        expected, size = meant(x, weight, bias)
        packed = pack(weight if library == "numpy" else weight.torch())
        given = (x, bias) if library == "numpy" else (to_torch(x), None if bias is None else to_torch(bias))
        y = linear(given[0], packed, given[1], precision="w4a4")
        assert to_numpy(y).dtype == float_dtype(dtype)
        off = np.abs(to_numpy(y).astype(np.float64) - expected)
        assert np.all(off <= ((k + 28) * 2.0**-24) * size + HALF_ULP[dtype] * np.abs(expected) + 2.0**-24)
        exact = to_numpy(linear(given[0], packed, given[1])).astype(np.float64)
        assert np.linalg.norm(exact - expected) > 0.02 * np.linalg.norm(expected)

    def test_error_is_that_of_the_activations(self):
        weight, x = hb.quantize(random_floats((512, 1024), "float32", 3)), random_floats((64, 1024), "float32")
        y, exact = linear(x, weight, precision="w4a4"), linear(x, weight)
        assert abs(np.linalg.norm(y - exact) / np.linalg.norm(exact) - w4a4.ERROR) < 0.003

    @libraries
    def test_a_token_does_not_depend_on_the_others(self, library):
        weight = random_weight(40, 64)
        x = random_floats((7, 64), "bfloat16")
        packed = pack(weight if library == "numpy" else weight.torch())
        as_given = to_torch if library == "torch" else np.array
        whole = to_numpy(linear(as_given(x), packed, precision="w4a4", out_dtype="float32"))
        x[1], x[2, 3], x[4] = np.nan, np.inf, x[4] * 1000
        other = to_numpy(linear(as_given(x), packed, precision="w4a4", out_dtype="float32"))
        assert np.array_equal(other[[0, 3, 5, 6]], whole[[0, 3, 5, 6]])
        assert np.isnan(other[1:3]).all()

    def test_never_unasked(self, monkeypatch):
        monkeypatch.setattr(w4a4, "quantize_tokens", lambda *a, **k: pytest.fail("activations were rounded"))
        weight = random_weight(32, 64).replace(input_scale=np.float32(STATIC)).torch()
        packed = pack(weight)
        for how in (None, "exact", "int8"):
            assert linear(torch.ones(2, 64), packed, precision=how).shape == (2, 32)
        assert Linear(weight)(torch.ones(2, 64)).shape == (2, 32)

    @pytest.mark.parametrize("scale", [0.0, np.nan])
    def test_an_uncalibrated_input_scale(self, scale):
        weight = random_weight(32, 64)
        packed = pack(weight.replace(input_scale=np.float32(1))).buffers() | {"input_scale": np.float32(scale)[None]}
        packed["input_scale"] = packed["input_scale"].reshape(())
        held = hb.layouts.Packed(Rows(), (32, 64), packed)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"the input scale is not positive and finite: got (0\.0|nan); "):
                linear(np.ones((1, 64), np.float32), held, precision="w4a4")
        assert np.isfinite(linear(np.ones((1, 64), np.float32), held)).all()

    def test_a_twin_has_no_such_product(self):
        twin = hb.to_fp8(random_weight(32, 64))
        with pytest.raises(UsageError, match="an FP8 weight is rounded: got precision 'w4a4'"):
            linear(np.ones((1, 64), np.float32), twin, precision="w4a4")

    def test_no_gradient(self):
        x = torch.ones(2, 64, requires_grad=True)
        with pytest.raises(UsageError, match="no gradient"):
            linear(x, random_weight(32, 64).torch(), precision="w4a4").sum().backward()

    @pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,), (2, 3, 64)])
    def test_shapes(self, shape):
        y = linear(torch.ones(shape), random_weight(32, 64).torch(), precision="w4a4")
        assert y.shape == (*shape[:-1], 32)

    def test_where_no_kernel_takes_the_product(self):
        packed = pack(random_weight(32, 64).torch(), "columns")
        with pytest.raises(NoKernelError, match=r"w4a4-composed: there is no kernel for its product: .*columns"):
            linear(torch.ones(1, 64), packed, precision="w4a4")


class TestModules:
    def test_linear(self):
        weight = random_weight(32, 64).replace(input_scale=np.float32(STATIC)).torch()
        layer = Linear(weight, precision="w4a4")
        x = torch.from_numpy(random_floats((3, 64), "float32"))
        expected = linear(x, weight, precision="w4a4")
        assert torch.equal(layer(x), expected)
        assert "precision=w4a4" in repr(layer)
        traced = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(traced(x), expected)

    def test_groups_of_different_input_scales(self):
        parts = [random_weight(16, 64, seed=i).torch().replace(input_scale=torch.tensor(1.0 + i)) for i in range(2)]
        assert Group.of(parts).input_scales.tolist() == [1, 2]
        with pytest.raises(UsageError, match="layers of different input scales are no one product in W4A4"):
            Group.of(parts, precision="w4a4")
        same = [part.replace(input_scale=torch.tensor(0.01)) for part in parts]
        x = torch.from_numpy(random_floats((3, 64), "float32"))
        y = Group.of(same, precision="w4a4")(x)
        assert torch.equal(y, torch.cat([linear(x, part, precision="w4a4") for part in same], 1))

    @pytest.mark.parametrize("static", [False, True])
    def test_experts(self, static):
        """Each expert by its own input scale."""
        case = Case.random(4, 64, 48)
        scales = np.array([1e-3, 2e-3, 4e-3, 8e-3], np.float32)
        if static:
            case = replace(
                case, gate_up=case.gate_up.replace(input_scale=scales), down=case.down.replace(input_scale=2 * scales)
            )
        hidden, (indices, weights) = tokens(6), routing(6, 2, 4)
        stacks = Stacks(gate_up=pack(case.gate_up.torch()), down=pack(case.down.torch()))
        y = compute(hidden, indices, weights, stacks, case.mixture, precision="w4a4")
        expected = torch.zeros(6, 64)
        for s in range(2):
            for t in range(6):
                e = int(indices[t, s])
                one, two = (Weight.unstack(w)[e].torch() for w in (case.gate_up, case.down))
                both = linear(hidden[t : t + 1], one, precision="w4a4")
                gate, up = both.chunk(2, 1)
                h = torch.nn.functional.silu(gate) * up
                expected[t] += linear(h, two, precision="w4a4")[0] * weights[t, s]
        assert torch.allclose(y, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))
        exact = compute(hidden, indices, weights, stacks, case.mixture)
        assert (exact - y).norm() > 0.05 * y.norm()


class TestPlan:
    def test_says_what_is_lost(self):
        weight = random_weight(64, 96)
        made = plan("linear", weight, rows=4, precision="w4a4", library="numpy")
        assert made.kernel == "w4a4-composed"
        assert dict(made.refusals)["w4a4-scaled-mm"].startswith("runs on NVIDIA GPUs, not on cpu")
        by = "activations are rounded to NVFP4, by each token's largest magnitude: there is no input scale"
        assert f"{by}; the weight is not rounded" in made.notes
        lost = "error of the result: 0.095 of its norm for Gaussian activations; Tokens.error measures yours"
        assert lost in made.notes
        assert lost in str(made)
        static = plan("linear", weight.replace(input_scale=np.float32(1)), rows=4, precision="w4a4")
        assert any("by the weight's input scale" in note for note in static.notes)

    def test_other_machines(self):
        form = Form(shape=(4096, 4096), layout="atoms128x4", input_scale=True)
        for sm in (100, 103, 120):
            made = plan("linear", form, rows=512, device=f"cuda:sm_{sm}", precision="w4a4")
            assert made.kernel == "w4a4-scaled-mm"
        with pytest.raises(NoKernelError, match="w4a4-scaled-mm: is for sm_100 or later, not sm_90"):
            plan("linear", form, rows=512, device="cuda:sm_90", precision="w4a4")
        fragments = Form(shape=(4096, 4096), layout="fragments")
        made = plan("linear", fragments, rows=512, device="cuda:sm_90", precision="w4a4")
        assert made.kernel == "w4a4-composed"
        refusals = dict(made.refusals)
        assert "is for sm_100 or later, not sm_90" in refusals["w4a4-scaled-mm"]
        assert "not yet run on such a GPU" in cuda_w4a4.TORCH.description


class TestScaledMm:
    """What torch would be given, on the CPU: the numbers of its product are those of ours."""

    @staticmethod
    def product(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum):
        """As torch's own checks say; see ``torch._meta_registrations``."""
        meta = [t.to("meta") for t in (a, b, scale_a, scale_b)]
        made = torch._scaled_mm(*meta, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
        (m, half), n = a.shape, b.shape[1]
        assert made.shape == (m, n)
        assert a.is_contiguous()
        assert b.t().is_contiguous()

        def wide(codes, scales, rows):
            blocks = half // 8
            tiles = scales.view(torch.uint8).view(-(-rows // 128), -(-blocks // 4), 32, 4, 4)
            flat = tiles.permute(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)[:rows, :blocks]
            values = decode_e2m1(codes.view(torch.uint8)).view(rows, blocks, 16) * decode_e4m3(flat)[..., None]
            return values.reshape(rows, -1)

        return wide(a, scale_a, m) @ wide(b.t(), scale_b, n).T

    @pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 32), (5, 144, 96), (130, 256, 416)])
    @pytest.mark.parametrize("static", [False, True])
    def test_operands(self, m, n, k, static, monkeypatch):
        weight = random_weight(n, k, per_row=True, pre_scale=True)
        weight = weight.replace(input_scale=np.float32(STATIC)) if static else weight
        x, bias = torch.from_numpy(random_floats((m, k), "float32")), torch.from_numpy(random_floats((n,), "float32"))
        expected = linear(x, weight.torch(), bias, precision="w4a4")
        monkeypatch.setattr(torch, "_scaled_mm", self._mocked(torch._scaled_mm))
        out = torch.full((m, n), torch.nan)
        args = W4a4Args(x=x, weight=pack(weight.torch(), "atoms128x4"), bias=bias, out=out)
        cuda_w4a4.TORCH.run(args)
        assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))

    def _mocked(self, own):
        def called(a, *rest, **how):
            if a.device.type == "meta":
                return own(a, *rest, **how)
            return self.product(a, *rest, **how)

        return called

    def test_scales_are_in_the_order_of_the_layout(self):
        weight = random_weight(130, 96).torch()
        packed = pack(weight, "atoms128x4")
        assert torch.equal(cuda_w4a4.swizzled(weight.scales).view(torch.uint8), packed.buffers()["scales"])

    def test_what_it_declines(self):
        def call(**changes):
            of = {
                "layout": Atoms128x4(), "shape": (64, 64), "per_row": False, "pre_scale": False, "rows": 4,
                "dtype": "bfloat16", "out_dtype": "bfloat16", "device": "cuda", "library": "torch", "bias": False,
                "capability": 100, "static": False, "elsewhere": True,
            }  # fmt: skip
            return W4a4Call(**(of | changes))

        refuse = cuda_w4a4.TORCH.refuse
        assert refuse(call()) == ()
        assert refuse(call(capability=90)) == ("is for sm_100 or later, not sm_90",)
        assert refuse(call(layout=Rows())) == ("reads the layout atoms128x4, not rows",)
        assert refuse(call(shape=(64, 48))) == ("takes N in multiples of 16 and K of 32, not 64 and 48",)
        assert refuse(call(shape=(8, 64))) == ("takes N in multiples of 16 and K of 32, not 8 and 64",)
        assert refuse(call(device="cpu", capability=0))[0] == "runs on NVIDIA GPUs, not on cpu"


def test_the_product_is_made_by_the_kernels_of_linear(monkeypatch):
    """Of 16-bit floats, which hold the values exactly: the fastest kernel of the machine."""
    weight = random_weight(64, 96).torch()
    seen = []
    own = kernels.select
    monkeypatch.setattr(kernels, "select", lambda bundle, call: seen.append(call) or own(bundle, call))
    linear(torch.ones(3, 96), weight, precision="w4a4")
    product = next(call for call in seen if call.op == "linear")
    assert (product.dtype, product.out_dtype, product.bias, product.rows) == ("bfloat16", "float32", False, 3)
    call = W4a4Args(x=torch.ones(3, 96).half(), weight=pack(weight), bias=None, out=torch.empty(3, 64)).call()
    assert call.product().dtype == "float16"
    assert select(LinearArgs, call.product()).op == "linear"
