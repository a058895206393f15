"""What layers may be asked beyond their weight, embeddings, a tied head, and FP8 layers."""

from __future__ import annotations

import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch

import halfbyte as hb
from gpu_codecs import needs_gpu, needs_triton
from halfbyte.errors import LayoutError, UsageError, WeightError
from halfbyte.nn import Embedding, Fp8Linear, Linear, TiedLinear, weights_of
from halfbyte.torch_ops import linear_int8_op
from halfbyte.weight import Fp8Weight, Weight
from helpers_run import random_floats, random_weight

duplicates = pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])


def given(*shape, dtype="float32"):
    return torch.from_numpy(random_floats(shape, "float32")).to(getattr(torch, dtype))


class TestLinear:
    w = random_weight(48, 64)

    def test_out_dtype(self):
        x = given(3, 64, dtype="bfloat16")
        for dtype in ("float32", torch.float32):
            head = Linear(self.w, out_dtype=dtype)
            y = head(x)
            assert torch.equal(y, hb.linear(x, hb.pack(self.w.torch()), out_dtype="float32"))
            assert y.dtype == torch.float32
            assert not torch.equal(y, y.bfloat16().float())  # not rounded on the way
        assert head.half().out_dtype == torch.float32
        assert "out_dtype=float32, kernel=" in repr(head)

    @pytest.mark.parametrize("precision", ["exact", "int8", "fp8"])
    def test_precision(self, precision):
        x, packed = given(3, 64), hb.pack(self.w.torch())
        layer = Linear(packed, precision=precision)
        assert torch.equal(layer(x), hb.linear(x, packed, precision=precision))
        assert torch.equal(layer(x), Linear(packed)(x)) == (precision == "exact")
        assert f"precision={precision}" in repr(layer)

    def test_errors(self):
        with pytest.raises(UsageError, match="out_dtype is unknown: got int8"):
            Linear(self.w, out_dtype="int8")
        with pytest.raises(UsageError, match="unknown precision: got 'int4'"):
            Linear(self.w, precision="int4")
        with pytest.raises(LayoutError, match="unknown layout"):
            Linear.empty("stripes", 48, 64)

    @pytest.mark.parametrize("layout", ["rows", "fragments", "marlin"])
    @pytest.mark.parametrize("per_row", [False, True])
    def test_empty(self, layout, per_row):
        w = random_weight(64, 128, per_row=per_row).replace(input_scale=np.float32(0.5))
        w = w if layout != "marlin" or not per_row else w.replace(scale2=np.float32(1))
        full = Linear(hb.pack(w, layout), np.ones(64, np.float32))
        per_row = w.per_row
        layer = Linear.empty(layout, 64, 128, per_row=per_row, input_scale=True, bias=True, out_dtype="float32")
        assert all(tensor.is_meta for tensor in (*layer.buffers(), *layer.parameters()))
        assert {n: b.shape for n, b in layer.named_buffers()} == {n: b.shape for n, b in full.named_buffers()}
        assert "kernel=no kernel: no data yet" in repr(layer)
        layer.to_empty(device="cpu")
        layer.load_state_dict(full.state_dict())
        assert layer.packed.unpack().same(full.packed.unpack())
        assert layer.bias.dtype == torch.float32
        real = Linear.empty(layout, 64, 128, device="cpu", bias=True, dtype="bfloat16")
        assert real.codes.device.type == "cpu"
        assert real.bias.dtype == torch.bfloat16

    def test_a_state_dict_assigned_to_meta(self):
        full, layer = Linear(self.w), Linear.empty("rows", 48, 64)
        layer.load_state_dict(full.state_dict(), assign=True)
        assert torch.equal(layer(given(2, 64)), full(given(2, 64)))

    def test_one_scale2_or_one_for_each_row_can_be_loaded(self):
        one, each = Linear(self.w), Linear(random_weight(48, 64, seed=4, per_row=True))
        x = given(2, 64)
        for source, target in ((one, copy.deepcopy(each)), (each, copy.deepcopy(one))):
            target(x)
            target.load_state_dict(source.state_dict())
            assert torch.equal(target(x), source(x))
        wrong = one.state_dict() | {"scale2": torch.ones(3, 1)}
        with pytest.raises(RuntimeError, match="size mismatch for scale2"):
            one.load_state_dict(wrong)

    def test_repr_where_no_kernel_reads_the_layout(self):
        assert "kernel=no kernel: " in repr(Linear(hb.pack(random_weight(64, 128), "fragments")))

    def test_weights(self):
        model = torch.nn.Sequential(Linear(self.w), torch.nn.ReLU(), Linear(hb.pack(random_weight(32, 48), "columns")))
        found = dict(weights_of(model))
        assert list(found) == ["0", "2"]
        assert found["0"].same(self.w.torch())
        assert dict(weights_of(model[0]))[""].same(self.w.torch())

    def test_compiled(self):
        torch._dynamo.reset()
        packed = hb.pack(self.w.torch())
        layers = torch.nn.ModuleList(Linear(packed, out_dtype="float32", precision=p) for p in (None, "fp8", "int8"))
        run = torch.compile(lambda x: [layer(x) for layer in layers], fullgraph=True, backend="aot_eager")
        x = given(3, 64, dtype="bfloat16")
        with torch.no_grad():
            for got, layer in zip(run(x), layers, strict=True):
                assert got.dtype == torch.float32
                assert torch.equal(got, layer(x))
            with pytest.raises(RuntimeError, match="the last axis of x is not the weight"):
                run(x[:, :32])

    def test_opcheck_of_int8(self):
        packed = hb.pack(self.w.torch())
        names, buffers = zip(*packed.buffers().items(), strict=True)
        args = given(2, 64), packed.key, 48, 64, ",".join(names), list(buffers), None, torch.float32
        torch.library.opcheck(linear_int8_op, args)


class TestEmbedding:
    w = random_weight(37, 80, per_row=True)
    ids = torch.tensor([[3, 36, 0], [3, 3, 5]])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float16])
    def test_rows_as_dequantized(self, dtype):
        table = Embedding(self.w, dtype=dtype)
        to = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        expected = torch.from_numpy(self.w.dequantize()).to(to)
        for ids in (self.ids, self.ids.int(), self.ids[:, :0]):
            y = table(ids)
            assert y.dtype == to
            assert torch.equal(y, expected[ids.long()])
        assert (table.num_embeddings, table.embedding_dim, table.padding_idx) == (37, 80, None)

    def test_a_number_that_names_no_row(self):
        with pytest.raises(UsageError, match="ids name no row"):
            Embedding(self.w, dtype="float32")(self.ids + 1)

    def test_casts_change_the_result_and_no_weight(self):
        table = Embedding(self.w, dtype="float32")
        model = torch.nn.Sequential(table)
        for cast, dtype in ((model.half, torch.float16), (model.bfloat16, torch.bfloat16)):
            cast()
            assert table(self.ids).dtype == dtype
            assert table.scale2.dtype == torch.float32
        model.to("cpu")
        assert table.dtype == torch.bfloat16

    @duplicates
    def test_copies_and_state(self, duplicate):
        table = Embedding(self.w, dtype="bfloat16")
        expected, twin = table(self.ids), duplicate(table)
        file = io.BytesIO()
        torch.save(table.state_dict(), file)
        file.seek(0)
        table.codes.zero_()
        assert torch.equal(twin(self.ids), expected)
        empty = Embedding.empty("rows", 37, 80, dtype="bfloat16", per_row=True)
        assert empty.codes.is_meta
        empty.to_empty(device="cpu").load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(empty(self.ids), expected)

    def test_repr_and_weights(self):
        table = Embedding(self.w, dtype="bfloat16")
        assert repr(table) == "Embedding(N=37, K=80, layout=rows, dtype=bfloat16, kernel=embedding-torch)"
        assert dict(weights_of(table))[""].same(self.w.torch())

    def test_errors(self):
        with pytest.raises(UsageError, match="dtype is unknown: got int8"):
            Embedding(self.w, dtype="int8")
        with pytest.raises(UsageError, match=re.escape("an Embedding holds one matrix: got (2, 16, 16)")):
            Embedding(Weight.stack([random_weight(16, 16)] * 2), dtype="float32")
        with pytest.raises(WeightError, match="null"):
            Embedding(Weight.null((16, 16)), dtype="float32")


class Tied(torch.nn.Module):
    """An embedding and the head on the same weight."""

    def __init__(self):
        super().__init__()
        self.embed = Embedding(random_weight(40, 64), dtype="bfloat16")
        self.head = TiedLinear(self.embed, out_dtype="float32")

    def forward(self, ids):
        return self.head(self.embed(ids))


class TestTied:
    ids = torch.tensor([[1, 2, 3]])

    def test_the_weight_is_held_once(self):
        model = Tied()
        assert all(name.startswith("embed.") for name in model.state_dict())
        assert model.head.packed is model.embed.packed
        x = given(2, 64, dtype="bfloat16")
        assert torch.equal(model.head(x), Linear(random_weight(40, 64), out_dtype="float32")(x))
        assert [name for name, _ in weights_of(model)] == ["embed"]
        assert "layout=rows, tied, out_dtype=float32, kernel=" in repr(model.head)

    @duplicates
    def test_copies_are_tied(self, duplicate):
        model = Tied()
        expected, twin = model(self.ids), duplicate(model)
        model.embed.codes.zero_()
        assert torch.equal(twin(self.ids), expected)
        assert twin.head.holder is twin.embed
        twin.to("meta")
        assert twin.head.packed.buffers()["codes"].is_meta

    def test_compiled(self):
        torch._dynamo.reset()
        model = Tied()
        with torch.no_grad():
            run = torch.compile(model, fullgraph=True, backend="aot_eager")
            assert torch.equal(run(self.ids), model(self.ids))


def fp8(shape=(48, 64), **changes) -> Fp8Weight:
    data = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    data[(data & 0x7F) == 0x7F] = 0  # NaN
    return Fp8Weight(**({"data": data, "scale": np.float32(0.25)} | changes))


class TestFp8Linear:
    granularities = pytest.mark.parametrize(
        "changes",
        [
            {},
            {"scale": np.float32(2.0 ** np.random.default_rng(1).integers(-3, 3, (48, 1)))},
            {"scale": np.float32([[1, 2, 0.5], [4, 1, 1]]), "block": (32, 24)},
            {"pre_scale": np.float32(2.0 ** np.random.default_rng(2).integers(-1, 2, 64))},
        ],
        ids=["tensor", "row", "block", "pre_scale"],
    )

    @granularities
    def test_exact(self, changes):
        """Powers of two as scales, and one activation for each token: every product is one value of the weight."""
        w, bias = fp8(**changes), np.arange(48, dtype=np.float32)
        x = torch.diag(2.0 ** torch.arange(-2, 2).repeat(16).float())
        expected = torch.from_numpy(w.dequantize() * (1 if w.pre_scale is None else w.pre_scale)) * x.diag()
        for dtype in (torch.float32, torch.bfloat16):
            layer = Fp8Linear(w, out_dtype="float32")
            assert torch.equal(layer(x.to(dtype)), expected.T)
            assert torch.equal(
                Fp8Linear(w, bias, out_dtype="float32")(x.to(dtype)), expected.T + torch.from_numpy(bias)
            )
        y = Fp8Linear(w)(x.bfloat16().reshape(4, 16, 64))
        assert (y.dtype, y.shape) == (torch.bfloat16, (4, 16, 48))
        assert torch.equal(y.reshape(64, 48), expected.T.bfloat16())

    @granularities
    def test_one_byte_for_each_value(self, changes):
        layer = Fp8Linear(fp8(**changes), np.zeros(48, np.float32))
        layer.half()
        assert layer.data.dtype == torch.uint8
        assert layer.bias.dtype == torch.float16
        assert layer.scale.dtype == torch.float32
        assert layer.weight is layer.weight
        assert np.array_equal(layer.weight.dequantize().numpy(), fp8(**changes).dequantize())

    def test_activations_are_rounded_where_that_is_asked(self):
        w = hb.to_fp8(random_weight(48, 64))
        x = given(3, 64)
        layer = Fp8Linear(w, precision="fp8")
        twin = Fp8Weight(data=torch.from_numpy(np.array(w.data)), scale=torch.from_numpy(np.array(w.scale)))
        assert torch.equal(layer(x), hb.linear(x, twin))
        assert not torch.equal(layer(x), Fp8Linear(w)(x))
        assert "activations rounded to FP8" in repr(layer)

    @duplicates
    def test_copies_and_state(self, duplicate):
        layer = Fp8Linear(fp8(input_scale=np.float32(3)))
        layer.weight  # noqa: B018 - remembered
        x = given(2, 64)
        expected, twin = layer(x), duplicate(layer)
        other = Fp8Linear(fp8(data=np.zeros((48, 64), np.uint8), input_scale=np.float32(1)))
        other.load_state_dict(layer.state_dict())
        layer.data.zero_()
        assert torch.equal(twin(x), expected)
        assert torch.equal(other(x), expected)
        (found,) = (w for _, w in weights_of(twin))
        assert float(found.input_scale) == 3
        assert np.array_equal(found.data.numpy(), fp8().data)
        twin.to("meta")
        assert twin.weight.data.is_meta

    def test_repr(self):
        assert repr(Fp8Linear(fp8())) == (
            "Fp8Linear(N=48, K=64, FP8 rows with a scale for each tensor, bias=False, decoded in each call)"
        )

    def test_errors(self):
        block = {"scale": np.ones((2, 3), np.float32), "block": (32, 24)}
        with pytest.raises(UsageError, match="no kernel takes an FP8 weight with a scale for each block"):
            Fp8Linear(fp8(**block), precision="fp8")
        with pytest.raises(UsageError, match="an FP8 weight is rounded: got precision 'int8'"):
            Fp8Linear(fp8(), precision="int8")
        with pytest.raises(UsageError, match="not an FP8 weight: got Weight"):
            Fp8Linear(random_weight(16, 16))
        with pytest.raises(UsageError, match=re.escape("an Fp8Linear holds one matrix: got (2, 48, 64)")):
            Fp8Linear(fp8((2, 48, 64)))
        with pytest.raises(UsageError, match="the last axis of x is not the weight's K: got \\(2, 16\\)"):
            Fp8Linear(fp8())(given(2, 16))

    def test_compiled(self):
        torch._dynamo.reset()
        layers = torch.nn.ModuleList([Fp8Linear(fp8()), Fp8Linear(fp8(), precision="fp8")])
        run = torch.compile(lambda x: [layer(x) for layer in layers], fullgraph=True, backend="aot_eager")
        x = given(3, 64)
        with torch.no_grad():
            for got, layer in zip(run(x), layers, strict=True):
                assert torch.equal(got, layer(x))


@pytest.mark.gpu
@needs_gpu
@needs_triton
class TestOnAGpu:
    def test_moved_modules_compute_what_they_did(self):
        model = Tied()
        expected = model(TestTied.ids)
        model.to("cuda")
        assert model.head.packed.buffers()["codes"].is_cuda
        got = model(TestTied.ids.cuda()).cpu()
        assert (got - expected).norm() <= 1e-5 * expected.norm()
        layer = Fp8Linear(fp8())
        x = given(5, 64, dtype="bfloat16")
        assert (layer.cuda()(x.cuda()).cpu().float() - Fp8Linear(fp8())(x).float()).norm() <= 1e-2 * 400

    def test_in_a_cuda_graph(self):
        model, ids = Tied().cuda(), TestTied.ids.cuda()
        with torch.no_grad():
            expected = model(ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = model(ids)
        graph.replay()
        assert torch.equal(y, expected)
