"""Layers fused into one product: equal to unfused to the bit, shared by their parts, and nothing kept."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import re

import numpy as np
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import halfbyte as hb
from gpu_codecs import needs_gpu, needs_triton
from halfbyte.errors import LayoutError, UsageError, WeightError
from halfbyte.kernels import KERNELS
from halfbyte.layouts import Fragments
from halfbyte.nn import Group, Linear, Part, weights_of
from helpers_run import call_like, random_floats, random_weight

SIZES = (48, 16, 80)
K = 64


def weights(**changes):
    return [random_weight(n, K, seed=seed, **changes) for seed, n in enumerate(SIZES)]


def given(*shape, dtype="float32"):
    return torch.from_numpy(random_floats(shape, "float32")).to(getattr(torch, dtype))


class Attention(torch.nn.Module):
    """What asks the parts as a model does."""

    def __init__(self, parts):
        super().__init__()
        self.q, self.k, self.v = parts

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def counted(group):
    """The group, and how many products it has made, in a list that grows."""
    made = []
    group.register_forward_hook(lambda module, args, y: made.append(y))
    return made


KERNELS_HERE = [
    pytest.param(kernel.name, dtype, id=f"{kernel.name}-{dtype}")
    for kernel, dtype in itertools.product(KERNELS, ("float32", "bfloat16"))
    if kernel.op == "linear" and not kernel.refuse(call_like(dtype=dtype, out_dtype=dtype))
]


class TestEqualToUnfused:
    @pytest.mark.parametrize(("kernel", "dtype"), KERNELS_HERE)
    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    def test_bit_for_bit_with_the_same_kernel(self, kernel, dtype, bias, monkeypatch):
        monkeypatch.setenv("HALFBYTE_KERNEL", kernel)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # on several MKL may cut K by the shape
        try:
            ws = weights()
            assert len({w.scale2.item() for w in ws}) == len(SIZES)
            biases = [random_floats((n,), "float32") for n in SIZES] if bias else [None] * len(SIZES)
            group = Group.of(ws, "rows", biases)
            assert group.packed.buffers()["scale2"].shape == (sum(SIZES), 1)
            for rows in (1, 5):
                x = given(rows, K, dtype=dtype)
                for part, w, own in zip(group.parts(), ws, biases, strict=True):
                    assert torch.equal(part(x), Linear(w, own)(x))
        finally:
            torch.set_num_threads(threads)

    def test_some_layers_have_no_bias(self):
        ws = weights()
        zero = ws[0].replace(scales=np.zeros_like(ws[0].scales))
        given_bias = random_floats((SIZES[1],), "float32")
        group = Group.of([zero, *ws[1:]], "rows", [None, given_bias, None])
        parts = group.parts()
        assert [part.bias is None for part in parts] == [True, False, True]
        assert np.array_equal(parts[1].bias.numpy(), given_bias)
        x = -given(3, K).abs()  # -0 of a weight of zeros is not to become 0
        expected = Linear(zero)(x)
        assert torch.equal(torch.signbit(parts[0](x)), torch.signbit(expected))
        assert torch.equal(parts[1](x), Linear(ws[1], given_bias)(x))

    def test_equal_scale2_stay_one(self):
        ws = [w.replace(scale2=np.float32(0.5)) for w in weights()]
        group = Group.of(ws)
        assert group.packed.buffers()["scale2"].shape == (1, 1)
        x = given(2, K)
        for part, w in zip(group.parts(), ws, strict=True):
            assert torch.equal(part(x), Linear(w)(x))

    def test_options(self):
        ws = weights()
        group = Group.of(ws, out_dtype="float32", precision="int8")
        x = given(3, K, dtype="bfloat16")
        for part, w in zip(group.parts(), ws, strict=True):
            y = part(x)
            assert y.dtype == torch.float32
            assert torch.equal(y, hb.linear(x, hb.pack(w.torch()), out_dtype="float32", precision="int8"))


class TestSharing:
    def test_one_product_for_all_parts(self):
        group = Group.of(weights())
        made, x = counted(group), given(2, 3, K)
        ys = [part(x) for part in group.parts()]
        assert len(made) == 1
        assert [y.shape for y in ys] == [(2, 3, n) for n in SIZES]
        assert all(y._base is made[0] or y._base is made[0]._base for y in ys)  # views, no copies
        assert torch.equal(torch.cat(ys, -1), group(x))
        assert all(torch.equal(a, b) for a, b in zip(group.split(group(x)), ys, strict=True))

    def test_in_any_order_and_again(self):
        group = Group.of(weights())
        parts, made, x = group.parts(), counted(group), given(2, K)
        for order in itertools.permutations(range(3)):
            before = len(made)
            for i in order:
                assert torch.equal(parts[i](x), group.forward(x)[:, sum(SIZES[:i]) : sum(SIZES[: i + 1])])
            assert len(made) == before + 1
            assert group._shared is None

    def test_one_part_asked_twice_computes_twice(self):
        group = Group.of(weights())
        (q, k, v), made, x = group.parts(), counted(group), given(2, K)
        assert torch.equal(q(x), q(x))
        assert len(made) == 2
        assert torch.equal(torch.cat([k(x), v(x)], -1), made[1][:, SIZES[0] :])
        assert len(made) == 2
        k(x)
        assert len(made) == 3

    def test_an_equal_x_is_not_the_same(self):
        group = Group.of(weights())
        (q, k, _), made, x = group.parts(), counted(group), given(2, K)
        q(x)
        k(x.clone())
        assert len(made) == 2

    def test_x_written_to_between_parts(self):
        ws = weights()
        group = Group.of(ws)
        (q, k, v), made, x = group.parts(), counted(group), given(2, K)
        q(x)
        x.mul_(2)
        assert torch.equal(k(x), Linear(ws[1])(x))
        assert len(made) == 2
        x[0, 0] = 7
        assert torch.equal(v(x), Linear(ws[2])(x))
        assert len(made) == 3

    def test_nothing_is_held_when_x_is_gone(self):
        group = Group.of(weights())
        q, k, _ = group.parts()

        def fails():
            x = given(2, K)
            q(x)
            assert group._shared is not None
            raise RuntimeError("between two parts")

        with pytest.raises(RuntimeError):
            fails()
        gc.collect()
        assert group._shared is None
        x = given(2, K)
        y = q(x)
        del x
        assert group._shared is None
        assert y.shape == (2, SIZES[0])
        assert k(given(2, K)).shape == (2, SIZES[1])

    def test_an_error_in_the_product_leaves_nothing(self):
        group = Group.of(weights())
        q, k, _ = group.parts()
        x = given(2, K)
        q(x)
        with pytest.raises(UsageError, match="the last axis of x"):
            k(given(2, K + 1))
        assert group._shared is None

    def test_a_gradient_that_only_one_part_wants(self):
        q, k, _ = Group.of(weights()).parts()
        x = given(2, K).requires_grad_()
        with torch.no_grad():
            assert not q(x).requires_grad
        with pytest.raises(UsageError, match="has no gradient"):
            k(x).sum().backward()

    def test_inference_mode(self):
        """Torch counts no writes to such tensors."""
        ws = weights()
        group = Group.of(ws)
        parts, made = group.parts(), counted(group)
        with torch.inference_mode():
            x = given(2, K) * 1
            for part, w in zip(parts, ws, strict=True):
                assert torch.equal(part(x), Linear(w)(x))
                x.mul_(2)
            assert made == []
        x = given(2, K)
        with torch.inference_mode():  # an ordinary tensor in it is counted
            assert [part(x).shape[-1] for part in parts] == list(SIZES)
        assert len(made) == 1

    def test_inference_mode_where_rows_do_not_lie_together(self):
        group = Group.of(weights(), "columns")
        assert not any(part.is_view for part in group.parts())
        made = []
        group.forward = lambda x: made.append(x) or torch.zeros(len(x), sum(SIZES))
        with torch.inference_mode():
            for part in group.parts():
                assert part(given(2, K) * 1).shape == (2, part.out_features)
        assert len(made) == 3


class TestAsModules:
    def test_the_state_dict_has_the_weight_once(self):
        model, other = (Attention(Group.of(weights(scales=s)).parts()) for s in ((40, 80), (50, 60)))
        assert list(model.state_dict()) == [f"q.group.{n}" for n in ("codes", "scales", "scale2", "_extra_state")]
        x = given(2, K)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert not torch.equal(other(x), model(x))
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(other(x), model(x))

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_share_among_themselves(self, duplicate):
        model, x = (
            Attention(Group.of(weights(), "rows", [random_floats((n,), "float32") for n in SIZES]).parts()),
            given(2, K),
        )
        expected = model(x)
        model.q(x)  # something is held
        twin = duplicate(model)
        assert twin.k.group is twin.v.group is twin.q.group is not model.q.group
        assert twin.q.group._shared is None
        model.q.group.codes.zero_()
        made = counted(twin.q.group)
        assert torch.equal(twin(x), expected)
        assert len(made) == 1

    def test_moving_and_casting(self):
        model = Attention(Group.of(weights(), "rows", [random_floats((n,), "float32") for n in SIZES]).parts())
        model.half()
        assert model.k.bias.dtype == torch.float16
        assert model.v.group.scale2.dtype == torch.float32
        x = given(2, K, dtype="float16")
        expected = model(x)
        model.to("meta")
        assert model.k.packed.buffers()["codes"].is_meta
        assert expected.dtype == torch.float16

    def test_on_meta(self):
        group = Group.empty("rows", sum(SIZES), K, per_row=True, bias=True, sizes=SIZES)
        model = Attention(group.parts())
        assert all(t.is_meta for t in (*model.buffers(), *model.parameters()))
        assert repr(group).endswith("kernel=no kernel: no data yet)")
        assert model(torch.empty(2, K, device="meta")).shape == (2, sum(SIZES))
        real = Attention(Group.of(weights(), "rows", [random_floats((n,), "float32") for n in SIZES]).parts())
        model.to_empty(device="cpu")
        model.load_state_dict(real.state_dict())
        assert torch.equal(model(given(2, K)), real(given(2, K)))

    def test_repr(self):
        group = Group.of(weights(), "rows", [None, np.zeros(SIZES[1], np.float32), None])
        assert repr(group).startswith("Group(sizes=(48, 16, 80), N=144, K=64, layout=rows, bias=True, kernel=")
        part = group.parts()[2]
        kernel = hb.plan("linear", group.packed, rows=1, dtype="float32").kernel
        assert repr(part) == f"Part(N=80, K=64, part 2 of 3, layout=rows, bias=False, kernel={kernel})"


class TestWeights:
    @pytest.mark.parametrize("layout", ["rows", "columns", "fragments(dtype=float16)"])
    def test_each_part_gives_its_own_back(self, layout):
        ws = weights()
        model = Attention(Group.of(ws, layout).parts())
        found = dict(weights_of(model))
        assert list(found) == ["q", "k", "v"]
        for name, w in zip("qkv", ws, strict=True):
            assert found[name].same(w.torch())
            part = getattr(model, name)
            assert part.weight().same(w.torch())
            assert np.array_equal(part.packed.dequantize().numpy(), w.dequantize())
            assert part.is_view == (layout != "columns")

    @pytest.mark.parametrize("layout", ["rows", "fragments"])
    def test_packed_is_a_view(self, layout):
        group = Group.of(weights(), layout)
        start, end = group.codes.data_ptr(), group.codes.data_ptr() + group.codes.nbytes
        at = start
        for part in group.parts():
            own = part.packed.buffers()
            assert own["codes"].data_ptr() == at
            at += own["codes"].nbytes
            assert own["scale2"].shape == (part.out_features, 1)
            assert part.packed is part.packed
        assert at == end

    def test_rows_that_end_inside_a_tile_are_copied(self):
        ws = [random_weight(n, K, seed=n) for n in (24, 40)]
        parts = Group.of(ws, Fragments("float16")).parts()
        assert [part.is_view for part in parts] == [False, False]
        for part, w in zip(parts, ws, strict=True):
            assert part.packed.unpack().same(part.weight().replace(scale2=part.packed.buffers()["scale2"]))
            assert np.array_equal(part.packed.dequantize().numpy(), w.dequantize())
        last = Group.of([random_weight(16, K), random_weight(24, K)], "fragments").parts()
        assert [part.is_view for part in last] == [True, True]

    def test_input_scales_that_differ_are_kept(self):
        ws = weights()
        scales = [np.float32(0.5), None, np.float32(0.25)]
        ws = [w.replace(input_scale=scale) for w, scale in zip(ws, scales, strict=True)]
        group = Group.of(ws)
        assert "input_scale" not in group.packed.buffers()
        group.half()
        assert group.input_scales.dtype == torch.float32
        for part, w in zip(group.parts(), ws, strict=True):
            assert part.weight().same(w.torch())
        same = [w.replace(input_scale=np.float32(0.5)) for w in ws]
        group = Group.of(same)
        assert group.input_scales is None
        assert float(group.parts()[1].weight().input_scale) == 0.5

    def test_errors(self):
        ws = weights()
        with pytest.raises(WeightError, match="a group needs at least one weight"):
            Group.of([])
        with pytest.raises(WeightError, match="pre_scale of part 1 differs"):
            Group.of([ws[0], ws[1].replace(pre_scale=np.ones(K, np.float32))])
        with pytest.raises(UsageError, match=re.escape("the sizes do not add up to N: got (48, 17), expected 48")):
            Group(hb.pack(ws[0]), (48, 17))
        with pytest.raises(UsageError, match=re.escape("the biases do not fit the layers: got [(3,), None, None]")):
            Group.of(ws, "rows", [np.zeros(3, np.float32), None, None])
        with pytest.raises(UsageError, match="the input scales do not fit the layers: got 1, expected 3"):
            Group(Group.of(ws).packed, SIZES, input_scales=[0.5])
        with pytest.raises(UsageError, match=r"the group has no such part: got 3, expected 0\.\.2"):
            Part(Group.of(ws), 3)
        with pytest.raises(LayoutError, match="unknown layout"):
            Group.of(ws, "stripes")


class Mlp(torch.nn.Module):
    def __init__(self, write=False):
        super().__init__()
        ws = [random_weight(96, K, seed=seed) for seed in (1, 2)]
        self.gate, self.up = Group.of(ws).parts()
        self.down = Linear(random_weight(K, 96, seed=3))
        self.write = write

    def forward(self, x):
        x = x * 2
        gate = torch.nn.functional.silu(self.gate(x))
        if self.write:
            x.add_(1)
        return self.down(gate * self.up(x))


class TestCompiled:
    def test_one_operator_for_all_parts(self):
        torch._dynamo.reset()
        graphs = []

        def compiler(graph, examples):
            graphs.append([node.target for node in graph.graph.nodes if "halfbyte" in str(node.target)])
            return graph.forward

        attention, mlp, x = Attention(Group.of(weights()).parts()), Mlp(), given(2, K)

        def both(x):
            return attention(x), mlp(x)

        run = torch.compile(both, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
        with torch.no_grad():
            for got, expected in zip(run(x), both(x), strict=True):
                assert torch.equal(got, expected)
        assert graphs == [[torch.ops.halfbyte.linear.default] * 3]
        assert attention.q.group._traced is mlp.gate.group._traced is None
        with torch.inference_mode():
            assert torch.equal(run(x)[0], attention(x))

    def test_a_write_between_parts_is_an_error(self):
        torch._dynamo.reset()
        with torch.no_grad(), pytest.raises(RuntimeError, match="columns_traced"):
            torch.compile(Mlp(write=True), fullgraph=True, backend="aot_eager")(given(2, K))


@pytest.mark.gpu
@needs_gpu
@needs_triton
class TestOnAGpu:
    def test_views_of_one_product_and_equal_with_the_same_kernel(self, monkeypatch):
        ws = [random_weight(n, 512, seed=n).torch("cuda") for n in (256, 64, 80)]
        parts, x = Group.of(ws, "fragments").parts(), given(1, 512, dtype="bfloat16").cuda()
        monkeypatch.setenv("HALFBYTE_KERNEL", "triton-gemm")
        made = counted(parts[0].group)
        for part, w in zip(parts, ws, strict=True):
            y = part(x)
            assert y._base is not None
            assert torch.equal(y, hb.linear(x, hb.pack(w, "fragments")))
        assert len(made) == 1

    def test_in_a_graph(self):
        ws = [random_weight(n, 512, seed=n).torch("cuda") for n in (256, 64, 80)]
        model, x = Attention(Group.of(ws, "fragments").parts()), given(1, 512, dtype="bfloat16").cuda()
        with torch.no_grad():
            expected = model(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = model(x)
        graph.replay()
        assert torch.equal(y, expected)
