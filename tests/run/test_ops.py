"""Calls that are remembered, experts, and linear inside torch.compile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte import nn, ops, remembered
from halfbyte.errors import UsageError
from halfbyte.kernels import KERNELS, grouped
from halfbyte.layouts import Packed

RNG = np.random.default_rng(7)


def weight(n=48, k=64, seed=0):
    return hb.quantize(np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32))


def activations(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


class TestRemembered:
    """The second call on a weight takes another way through Python than the first."""

    @pytest.mark.parametrize("library", ["numpy", "torch"])
    @pytest.mark.parametrize("bias", [False, True])
    def test_the_second_call_gives_the_first_ones_bits(self, library, bias):
        w, x, b = weight(), activations(2, 3, 64), activations(48) if bias else None
        packed = hb.pack(w)
        if library == "torch":
            packed, x, b = packed.to("cpu"), torch.from_numpy(x), None if b is None else torch.from_numpy(b)
        first, second, other = (hb.linear(x, packed, b) for _ in range(3))
        assert first.shape == (2, 3, 48)
        assert np.array_equal(np.asarray(first), np.asarray(second))
        second[...] = 0  # each result is memory of its own
        assert np.array_equal(np.asarray(first), np.asarray(other))

    @pytest.mark.parametrize("library", ["numpy", "torch"])
    def test_strided_arrays(self, library):
        packed, x, b = hb.pack(weight()), activations(6, 128), activations(96)
        expected = hb.linear(x[::2, ::2].copy(), packed, b[::2].copy())
        if library == "torch":
            packed, x, b = packed.to("cpu"), torch.from_numpy(x), torch.from_numpy(b)
        for _ in range(2):
            assert np.array_equal(np.asarray(hb.linear(x[::2, ::2], packed, b[::2])), expected)

    def test_the_other_order_of_bytes(self):
        packed, x, b = hb.pack(weight()), activations(1, 64), activations(48)
        expected = hb.linear(x, packed, b)
        for _ in range(2):
            assert np.array_equal(hb.linear(x.astype(">f4"), packed, b.astype(">f4")), expected)
        rounded = hb.linear(x, packed, b, precision="int8")
        assert np.array_equal(hb.linear(x.astype(">f4"), packed, b.astype(">f4"), precision="int8"), rounded)

    def test_a_negated_view(self):
        packed, x = hb.pack(weight()).to("cpu"), torch.from_numpy(activations(1, 64))
        view = torch.complex(torch.zeros(1, 64), -x).conj().imag
        assert view.is_neg()
        for _ in range(2):
            assert torch.equal(hb.linear(view, packed), hb.linear(x, packed))

    def test_a_kernel_that_is_forced_later(self, monkeypatch):
        packed, x = hb.pack(weight()), activations(1, 64)
        hb.linear(x, packed)
        monkeypatch.setenv("HALFBYTE_KERNEL", "reference-torch")
        with pytest.raises(hb.errors.NoKernelError):
            hb.linear(x, packed)

    def test_a_gradient_that_is_wanted_later(self):
        packed, x = hb.pack(weight()).to("cpu"), torch.from_numpy(activations(1, 64))
        hb.linear(x, packed)
        y = hb.linear(x.requires_grad_(), packed)
        with pytest.raises(UsageError, match="no gradient"):
            y.sum().backward()

    def test_a_buffer_that_is_written_to(self):
        packed, x = hb.pack(weight()).to("cpu"), torch.from_numpy(activations(1, 64))
        hb.linear(x, packed)
        packed.buffers()["scales"].zero_()
        assert not hb.linear(x, packed).any()
        packed.buffers()["scales"].fill_(0x7F)
        assert hb.linear(x, packed).isnan().all()

    def test_a_pre_scale_that_is_written_to(self):
        pre = torch.full((64,), 2.0, dtype=torch.bfloat16)
        packed = hb.pack(weight().torch().replace(pre_scale=pre.clone()))
        x = torch.from_numpy(activations(1, 64))
        twice = hb.linear(x, packed)
        packed.buffers()["pre_scale"].fill_(1.0)
        assert torch.equal(hb.linear(x, packed) * 2, twice)

    def test_a_buffer_that_moves(self):
        packed, x = hb.pack(weight()).to("cpu"), torch.from_numpy(activations(1, 64))
        expected = hb.linear(x, packed)
        for buffer in packed.buffers().values():
            buffer.share_memory_()
        assert torch.equal(hb.linear(x, packed), expected)

    def test_wrong_arrays_are_refused_after_right_ones(self):
        packed, x = hb.pack(weight()), activations(1, 64)
        hb.linear(x, packed)
        for wrong in (activations(1, 80), x.astype(np.float64), torch.from_numpy(x)):
            with pytest.raises(UsageError):
                hb.linear(wrong, packed)
        with pytest.raises(UsageError):
            hb.linear(x, packed, activations(47))

    @pytest.mark.parametrize(("which", "wrong"), [("x", [0.0] * 64), ("x", None), ("bias", [0.0] * 48)])
    def test_what_is_no_array_is_named(self, which, wrong):
        arrays = {"x": activations(1, 64), "bias": activations(48)} | {which: wrong}
        with pytest.raises(UsageError, match=f"{which} is of the wrong type: got {type(wrong).__name__}"):
            hb.linear(arrays["x"], hb.pack(weight()), arrays["bias"])

    def test_a_bias_on_another_device_is_refused_after_a_right_one(self):
        packed, x = hb.pack(weight()).to("cpu"), torch.from_numpy(activations(1, 64))
        hb.linear(x, packed, torch.ones(48))
        with pytest.raises(UsageError, match="bias and x are on two devices: got bias on meta, x on cpu"):
            hb.linear(x, packed, torch.ones(48, device="meta"))

    def test_no_kernel_runs_for_an_empty_result(self, monkeypatch):
        def refused(*args):
            raise AssertionError("a kernel ran")

        chosen = replace(KERNELS[0], refuse=lambda call: (), launch=refused, bind=refused)
        monkeypatch.setattr(ops, "select", lambda bundle, call: chosen)
        monkeypatch.setattr(remembered, "select", lambda bundle, call: chosen)
        for n, rows in ((0, 3), (48, 0)):
            packed = hb.pack(weight()) if n else hb.pack(weight().rows(0, 0))
            assert hb.linear(activations(rows, 64), packed).shape == (rows, n)

    def test_many_shapes_are_not_kept_for_ever(self):
        packed = hb.pack(weight())
        for a in range(1, 30):
            for b in range(1, 30):
                hb.linear(np.zeros((a, b, 64), np.float32), packed)
        assert len(packed.memo) < 300


class TestExperts:
    @pytest.mark.parametrize("library", ["numpy", "torch"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("counts", [(3, 0, 1, 5), (0, 0, 0, 1), (0, 0, 0, 0)])
    def test_each_expert_is_a_linear(self, library, dtype, bias, counts):
        experts = [weight(seed=e) for e in range(4)]
        x = torch.from_numpy(activations(sum(counts), 64)).to(getattr(torch, dtype))
        b = torch.from_numpy(activations(4, 48)) if bias else None
        packed = hb.pack(hb.Weight.stack(experts)).to("cpu")
        starts = np.cumsum([0, *counts])
        expected = torch.cat(
            [
                hb.linear(x[starts[e] : starts[e + 1]], hb.pack(w).to("cpu"), None if b is None else b[e])
                for e, w in enumerate(experts)
            ]
        )
        if library == "numpy":
            y = hb.grouped_linear(
                as_numpy(x), hb.pack(hb.Weight.stack(experts)), counts, None if b is None else b.numpy()
            )
            assert y.dtype.name == dtype
            assert np.array_equal(y.astype(np.float32), expected.float().numpy())
        else:
            for _ in range(2):
                assert torch.equal(hb.grouped_linear(x, packed, counts, b), expected)

    @pytest.mark.parametrize("counts", [(1, 1), (1, 1, 1, 1, 0), (5, 0, 0, -1), (4, 0, 0, 1)])
    def test_counts_that_do_not_fit(self, counts):
        w = hb.Weight.stack([weight()] * 4)
        with pytest.raises(UsageError, match="counts do not fit"):
            hb.grouped_linear(activations(4, 64), w, counts)

    def test_the_second_call_is_bound_already(self, monkeypatch):
        bound = []

        def bind(args):
            bound.append(args)
            return lambda x, counts, out: out.copy_(counts.sum() + args.bias[0, 0])

        made = replace(grouped.LOOP, launch=None, bind=bind)
        monkeypatch.setattr(ops, "select", lambda bundle, call: made)
        packed, x = hb.pack(hb.Weight.stack([weight()] * 4)).to("cpu"), torch.ones(4, 64)
        bias = torch.zeros(48, 4).T
        for counts in ([4, 0, 0, 0], [1, 1, 1, 1]):
            assert hb.grouped_linear(x, packed, counts, bias).eq(4).all()
        assert len(bound) == 1
        bias += 1
        assert hb.grouped_linear(x, packed, [4, 0, 0, 0], bias).eq(5).all()
        packed.buffers()["codes"].zero_()
        hb.grouped_linear(x, packed, [4, 0, 0, 0], bias)
        hb.grouped_linear(x[:3], packed, [3, 0, 0, 0], bias)
        hb.grouped_linear(x, packed, torch.tensor([4, 0, 0, 0]), bias.clone())
        assert len(bound) == 5

    def test_a_weight_without_experts(self):
        with pytest.raises(UsageError, match="one expert axis"):
            hb.grouped_linear(activations(4, 64), weight(), [4])

    def test_a_bias_that_does_not_fit(self):
        with pytest.raises(UsageError, match="bias does not fit"):
            hb.grouped_linear(activations(4, 64), hb.Weight.stack([weight()] * 4), [1] * 4, activations(48))


def as_numpy(x):
    import ml_dtypes

    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


class TestCompile:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_module_without_a_break(self, backend):
        module = nn.Linear(weight(), np.ones(48, np.float32))
        compiled = torch.compile(module, fullgraph=True, backend=backend)
        for rows in (3, 2, 1):
            x = torch.from_numpy(activations(rows, 64))
            assert torch.equal(compiled(x), module(x))

    def test_a_function_without_a_break(self):
        packed = hb.pack(weight()).to("cpu")
        compiled = torch.compile(
            lambda x: hb.linear(x, packed, out_dtype=torch.float32) + 1, fullgraph=True, backend="aot_eager"
        )
        x = torch.from_numpy(activations(3, 64)).bfloat16()
        assert torch.equal(compiled(x), hb.linear(x, packed, out_dtype="float32") + 1)

    @pytest.mark.parametrize("precision", ["exact", "fp8"])
    @pytest.mark.parametrize("out_dtype", ["bfloat16", torch.bfloat16, None])
    def test_any_name_of_a_dtype(self, precision, out_dtype):
        packed, x = hb.pack(weight()).to("cpu"), torch.from_numpy(activations(3, 64))

        def call(x):
            return hb.linear(x, packed, out_dtype=out_dtype, precision=precision)

        y = torch.compile(call, fullgraph=True, backend="eager")(x)
        assert y.dtype == (torch.bfloat16 if out_dtype else torch.float32)
        assert torch.equal(y, call(x))

    @pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
    @pytest.mark.parametrize("precision", ["exact", "fp8"])
    def test_what_cannot_be_is_told(self, precision):
        w = weight()
        packed, experts = hb.pack(w).to("cpu"), hb.pack(hb.Weight.stack([w, w])).to("cpu")
        x = torch.from_numpy(activations(3, 64))
        with pytest.raises(UsageError, match="out_dtype is unknown: got float64, expected float32 or bfloat16"):
            torch.compile(
                lambda x: hb.linear(x, packed, out_dtype=torch.float64, precision=precision), backend="eager"
            )(x)
        with pytest.raises(UsageError, match=r"linear takes one matrix: got \(2, 48, 64\), expected \(N, K\); apply"):
            torch.compile(lambda x: hb.linear(x, experts, precision=precision), backend="eager")(x)

    def test_calls_on_a_twin_are_remembered_with_its_data(self):
        from halfbyte import torch_ops

        twin = hb.to_fp8(weight().torch())
        of = torch_ops.FP8, 48, 64, "data,scale", [twin.data, twin.scale]
        x = torch.from_numpy(activations(3, 64))
        seen = []

        def compute(x, twin, bias, to):
            seen.append(twin.memo)
            return torch.zeros(3, 48)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_ops.fp8_ops, "compute", compute)
            torch_ops.linear_fp8_op(x, *of, None, torch.float32)
            torch_ops.linear_fp8_op(x, *of, None, torch.float32)
        assert seen[0] is seen[1] is torch_ops.memo_of(twin.data)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_opcheck(self, dtype):
        from halfbyte.torch_ops import linear_op

        packed = hb.pack(weight()).to("cpu")
        held = packed.buffers()
        x = torch.from_numpy(activations(2, 3, 64)).to(dtype)
        args = (x, packed.key, 48, 64, ",".join(held), list(held.values()), torch.ones(48), dtype)
        assert set(torch.library.opcheck(linear_op, args).values()) == {"SUCCESS"}

    def test_arrays_that_do_not_fit(self):
        """K = 50 has as many bytes as 64: only the shape tells."""
        from halfbyte.torch_ops import linear_op

        packed = hb.pack(weight()).to("cpu")
        held = packed.buffers()
        of = ("rows", 48, 64, ",".join(held), list(held.values()))
        for wrong in (torch.ones(2, 50), torch.empty(2, 50, device="meta")):
            with pytest.raises(UsageError, match=r"the last axis of x is not the weight's K: got \(2, 50\)"):
                linear_op(wrong, *of, None, torch.float32)
        with pytest.raises(UsageError, match=r"bias does not fit the weight's N: got \(47,\), expected \(48,\)"):
            linear_op(torch.ones(2, 64), *of, torch.ones(47), torch.float32)
        with pytest.raises(UsageError, match="the weight and x are on two devices: got the weight on cpu, x on meta"):
            linear_op(torch.empty(2, 64, device="meta"), *of, None, torch.float32)
        with pytest.raises(Exception, match="the last axis of x is not the weight's K"):
            torch.compile(nn.Linear(packed), fullgraph=True, backend="eager")(torch.ones(2, 50))

    def test_two_weights_of_the_same_codes(self):
        from halfbyte import torch_ops

        x, packed = torch.from_numpy(activations(1, 64)), hb.pack(weight()).to("cpu")
        held = packed.buffers()
        negative = held | {"scales": held["scales"] | 0x80}
        for buffers in (held, negative):
            expected = hb.linear(x, Packed(packed.layout, packed.shape, buffers))
            of = "rows", 48, 64, ",".join(buffers), list(buffers.values())
            assert torch.equal(torch_ops.linear_op(x, *of, None, torch.float32), expected)

    def test_what_is_remembered_dies_with_the_weight(self):
        import gc

        from halfbyte import torch_ops

        gc.collect()
        before = len(torch_ops._memos)
        held = hb.pack(weight()).to("cpu").buffers()
        x = torch.from_numpy(activations(1, 64))
        torch_ops.linear_op(x, "rows", 48, 64, ",".join(held), list(held.values()), None, torch.float32)
        assert len(torch_ops._memos) == before + 1
        del held
        gc.collect()
        assert len(torch_ops._memos) == before
