"""CUDA tensors quantized and decoded: in Triton's interpreter and on a GPU, to the bytes of NumPy."""

import sys

import numpy as np
import pytest
import torch

import gpu_codecs
import halfbyte as hb
from gpu_codecs import interpreted, needs_gpu, needs_triton
from halfbyte import gpu
from halfbyte.decode import by_triton
from halfbyte.errors import QuantizeError
from halfbyte.layouts import LAYOUTS, Fragments
from halfbyte.recipes.base import LIKES
from helpers import assert_same_bytes, random_mxfp4, random_weight

RNG = np.random.default_rng(0)


@needs_triton
def test_quantize_in_the_interpreter():
    assert interpreted("quantize", "views") == ["156", "None"]


@needs_triton
def test_dequantize_in_the_interpreter():
    assert interpreted("dequantize", "every_code") == ["18", "None"]


def test_the_sources_are_what_they_are_named_for():
    """Quotients on cuts and beside them, steps outside the fast division's range, both signs of zero."""
    named = {name: (dense, scale2) for name, dense, scale2 in gpu_codecs.sources("float32")}
    dense, scale2 = named["exact ties of 1"]
    cuts = np.abs(dense.reshape(-1, 16)[:, 1:] / (np.abs(dense.reshape(-1, 16)[:, :1]) / np.float32(6)))
    assert set(gpu_codecs.CUTS) <= set(cuts.reshape(-1))
    assert not set(cuts.reshape(-1)) <= set(gpu_codecs.CUTS)
    assert scale2 == 1
    scales = [scale2 or np.abs(dense).max() / 2688 for dense, scale2 in named.values()]
    assert min(scales) < 2.0**-80
    assert max(scales) > 2.0**10
    zeros = named["zeros of both signs"][0]
    assert (zeros[::2, :16] == 0).all()
    assert np.signbit(zeros[::2, :16]).all()
    assert (np.abs(named["subnormal beside large"][0]).min(1) < 1e-43).all()


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = "triton is not installed; run: pip install 'halfbyte[cuda]'"
    assert gpu.missing() == reason

    class OnCuda(torch.Tensor):
        device = torch.device("cuda")

    dense = torch.ones(2, 16).as_subclass(OnCuda)
    with pytest.raises(QuantizeError) as caught:
        hb.quantize(dense)
    said = "this quantizer runs on the CPU and, with Triton, on CUDA devices: got cuda; pass dense.cpu(); "
    assert str(caught.value) == said + reason


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_packed_weights_decode_to_what_they_unpack_to(layout):
    weight = random_weight(RNG, 128, 256)
    packed = layout.pack(weight)
    for one in (packed, packed.to("cpu")):
        for dtype in ("float32", "bfloat16"):
            assert_same_bytes(one.dequantize(dtype), one.unpack().dequantize(dtype))
    if layout.name == "rows":
        assert_same_bytes(packed.dequantize(), weight.dequantize())
        mx = random_mxfp4(RNG, 4, 64)
        assert_same_bytes(hb.pack(mx, "rows(kind=mxfp4)").dequantize(), mx.dequantize())


@pytest.mark.gpu
@needs_triton
@needs_gpu
class TestOnAGpu:
    def test_quantize(self):
        assert gpu_codecs.check_quantize("cuda") == 156
        gpu_codecs.check_views("cuda")

    def test_dequantize(self):
        assert gpu_codecs.check_dequantize("cuda") == 18
        gpu_codecs.check_every_code("cuda")

    @pytest.mark.parametrize("like", LIKES)
    @pytest.mark.parametrize("dtype", gpu_codecs.DTYPES)
    def test_public(self, dtype, like):
        dense = torch.from_numpy(RNG.standard_normal((200, 520), np.float32)).to(getattr(torch, dtype))
        for options in ({}, {"scale2": 0.01}):
            made, expected = (hb.quantize(a, like=like, pad=True, **options) for a in (dense.cuda(), dense))
            assert made.codes.is_cuda
            assert made.torch("cpu").same(expected)
            assert_same_bytes(made.dequantize(dtype).cpu(), expected.dequantize(dtype))
            packed = Fragments().pack(made)
            assert_same_bytes(packed.dequantize(dtype).cpu(), packed.to("cpu").dequantize(dtype))

    def test_refusals_are_those_of_the_cpu(self):
        dense = torch.ones(40, 64)
        dense[7, 17] = 3000
        for change, options in ((torch.inf, {}), (torch.nan, {}), (3000.0, {"scale2": 1.0})):
            dense[9, 33] = change
            said = []
            for a in (dense, dense.cuda()):
                with pytest.raises(QuantizeError) as caught:
                    hb.quantize(a, **options)
                said.append(str(caught.value))
            assert said[0] == said[1]

    def test_empty(self):
        for shape in ((0, 16), (3, 0)):
            made, expected = (hb.quantize(torch.zeros(shape, device=device)) for device in ("cuda", "cpu"))
            assert made.torch("cpu").same(expected)
            assert made.dequantize("bfloat16").shape == shape

    def test_parts_and_gradients(self):
        weight = hb.quantize(torch.randn(32, 64))
        moved = weight.torch("cuda")
        for part, expected in ((moved.rows(1, 7), weight.rows(1, 7)), (moved.columns(16, 48), weight.columns(16, 48))):
            assert torch.equal(part.dequantize().cpu(), expected.dequantize())
        assert by_triton(moved.codes, moved.scales, moved.scale2)
        scale2 = moved.scale2.clone().requires_grad_()
        assert not by_triton(moved.codes, scale2)
        moved.replace(scale2=scale2).dequantize().sum().backward()
        assert scale2.grad is not None
