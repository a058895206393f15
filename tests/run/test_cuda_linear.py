"""``linear`` on CUDA tensors: traced without a GPU, and, on one, compiled, captured and under inference mode."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import halfbyte as hb
from halfbyte.errors import UsageError
from halfbyte.nn import Linear
from halfbyte.torch_ops import linear_op
from halfbyte.weight import to_torch
from helpers_run import random_floats, random_weight

WAYS = [
    ("rows", "float32"),
    ("rows", "bfloat16"),
    ("fragments(dtype=bfloat16)", "bfloat16"),
    ("fragments(dtype=float16)", "float16"),
    ("columns(align=16)", "bfloat16"),
]
"""Layouts, and dtypes of activations."""
each_way = pytest.mark.parametrize(("layout", "dtype"), WAYS, ids=str)


def on_fake_gpu(layout):
    """A Linear (48, 64) with a bias, whose tensors are a GPU's and hold nothing; and activations by shape and dtype."""
    layer = Linear(hb.pack(random_weight(48, 64), layout), random_floats((48,), "float32"))
    mode = FakeTensorMode()
    with mode:
        for name, buffer in dict(layer.named_buffers()).items():
            layer.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda"))
        layer.bias = torch.nn.Parameter(torch.empty(48, device="cuda"), requires_grad=False)

    def activations(*shape, dtype, device="cuda"):
        with mode:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    return layer, activations


class TestTraced:
    """Nothing is read from tensors, and none is expected on the CPU."""

    @each_way
    @pytest.mark.parametrize("strict", [False, True])
    def test_a_module_is_exported(self, layout, dtype, strict):
        layer, activations = on_fake_gpu(layout)
        x = activations(3, 64, dtype=dtype)
        exported = torch.export.export(
            layer, (x,), strict=strict, dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=64)},)
        )
        (node,) = [node for node in exported.graph.nodes if node.op == "call_function"]
        assert node.target is torch.ops.halfbyte.linear.default
        assert node.args[1:5] == (layout, 48, 64, "codes,scales,scale2")
        y = node.meta["val"]
        assert (y.device.type, y.dtype, y.dim(), y.shape[1]) == ("cuda", x.dtype, 2, 48)
        assert y.shape[0] == node.args[0].meta["val"].shape[0]
        assert not y.shape[0].node.is_constant()

    @each_way
    def test_the_shape_of_the_result(self, layout, dtype):
        layer, activations = on_fake_gpu(layout)
        held = layer.packed.buffers()
        x = activations(5, 2, 64, dtype=dtype)
        y = linear_op(x, layout, 48, 64, ",".join(held), list(held.values()), None, torch.float32)
        assert (y.device.type, y.dtype, y.shape) == ("cuda", torch.float32, (5, 2, 48))
        assert y.is_contiguous()

    def test_a_weight_on_another_device(self):
        layer, activations = on_fake_gpu("rows")
        held = layer.packed.buffers()
        x = activations(5, 64, dtype="float32", device="cpu")
        with pytest.raises(UsageError, match="the weight and x are on two devices: got the weight on cuda:0, x on cpu"):
            linear_op(x, "rows", 48, 64, ",".join(held), list(held.values()), None, torch.float32)


# On a GPU


def on_gpu(layout, dtype, n=272, k=1088):
    """A Linear, and activations by M."""
    packed = hb.pack(random_weight(n, k), layout)
    layer = Linear(packed, random_floats((n,), "float32")).cuda()
    return layer, lambda rows, seed=1: to_torch(random_floats((rows, k), dtype, seed), "cuda")


COMPILED = [
    ("rows", "float32", "default"),
    ("fragments(dtype=bfloat16)", "bfloat16", "default"),
    ("fragments(dtype=float16)", "float16", "reduce-overhead"),
    ("columns(align=16)", "bfloat16", "reduce-overhead"),
]
"""With graphs and without; torch takes some ten seconds for each."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # likewise
@pytest.mark.parametrize(("layout", "dtype", "mode"), COMPILED)
def test_compiled(layout, dtype, mode):
    layer, activations = on_gpu(layout, dtype)

    def around(x):
        return layer(2 * x) + 1

    torch._dynamo.reset()
    compiled = torch.compile(around, fullgraph=True, mode=mode, dynamic=False)
    for rows in (1, 3, 40):  # for 40 K is split
        for seed in range(4):
            x = activations(rows, seed)
            assert torch.equal(compiled(x), around(x)), (rows, seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@each_way
class TestOnGpu:
    def test_captured(self, layout, dtype):
        layer, activations = on_gpu(layout, dtype)
        held = activations(3)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside), torch.inference_mode():
            for _ in range(3):
                layer(held)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            y = layer(held)
            z = layer(held + 1)
        for seed in range(4):
            x = activations(3, seed)
            held.copy_(x)
            graph.replay()
            assert torch.equal(y, layer(x)), seed
            assert torch.equal(z, layer(x + 1)), seed

    def test_under_inference_mode(self, layout, dtype):
        layer, activations = on_gpu(layout, dtype)
        xs = [activations(2, seed) for seed in range(6)]
        expected = [layer(x) for x in xs]
        fresh, _ = on_gpu(layout, dtype)
        with torch.inference_mode():
            got = [fresh(x) for x in xs]
            assert all(y.is_inference() for y in got)
        assert all(map(torch.equal, got, expected))

    def test_on_another_stream(self, layout, dtype):
        layer, activations = on_gpu(layout, dtype)
        big, x = torch.ones(1 << 27, device="cuda"), activations(2)
        expected = layer(3 * x)
        torch.cuda.synchronize()
        aside = torch.cuda.Stream()
        for _ in range(5):
            with torch.cuda.stream(aside):
                big.add_(1)  # so that x is still to be written
                late = 3 * x
                y = layer(late)
                assert torch.equal(y, expected)

    def test_activations_that_are_strided_or_begin_anywhere(self, layout, dtype):
        layer, activations = on_gpu(layout, dtype)
        x = activations(4)
        expected = layer(x)
        for _ in range(3):
            assert torch.equal(layer(x.t().contiguous().t()), expected)
            odd = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
            assert torch.equal(layer(odd), expected)
            assert torch.equal(layer(x.view(2, 2, -1)), expected.view(2, 2, -1))

    def test_no_token(self, layout, dtype):
        layer, activations = on_gpu(layout, dtype)
        assert layer(activations(1)[:0]).shape == (0, 272)
