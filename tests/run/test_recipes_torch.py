"""Quantizing torch tensors: the bytes of the same array, as a torch weight."""

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte.errors import QuantizeError
from halfbyte.recipes import LIKES, quantize
from halfbyte.weight import to_torch
from helpers import INPUTS, golden

DTYPES = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


@pytest.mark.parametrize("like", LIKES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_same_bytes(name, dtype, like):
    x = golden("inputs_f32")[name].astype(DTYPES[dtype])
    tensor = to_torch(x)
    assert tensor.dtype == dtype
    w = quantize(tensor, like=like)
    for field, kind in (("codes", torch.uint8), ("scales", torch.uint8), ("scale2", torch.float32)):
        assert getattr(w, field).dtype == kind
        assert getattr(w, field).device.type == "cpu"
    assert w.same(quantize(x, like=like))
    assert to_torch(x).equal(tensor)


VIEWS = {
    "transposed": lambda x: x.T,
    "strided": lambda x: x[:, ::2],
    "sliced": lambda x: x[1:, 16:],
    "expanded": lambda x: x[:1].expand(5, -1),
    "with a gradient": lambda x: x.requires_grad_(),
    "parameter": torch.nn.Parameter,
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views(view, dtype):
    x = view(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(dtype))
    plain = to_torch(np.ascontiguousarray(x.detach().float().numpy()).astype(DTYPES[dtype]))
    w = quantize(x)
    assert w.same(quantize(plain))
    assert not w.codes.requires_grad


@pytest.mark.parametrize("like", LIKES)
def test_options(like):
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    w = quantize(x, like=like, scale2=0.25, pad=True)
    assert w.same(quantize(x.numpy(), like=like, scale2=0.25, pad=True))
    assert w.shape == (4, 20)
    assert isinstance(w.dequantize(), torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_wrong_dtype(dtype):
    with pytest.raises(QuantizeError, match="cannot quantize this array"):
        quantize(torch.ones(2, 16, dtype=dtype))


def test_float8_is_refused():
    with pytest.raises(QuantizeError, match="float8_e4m3fn"):
        quantize(torch.ones(2, 16).to(torch.float8_e4m3fn))


def test_refusals():
    x = torch.ones(2, 32)
    x[1, 17] = torch.nan
    with pytest.raises(QuantizeError) as caught:
        quantize(x)
    assert caught.value.index == [1, 17]
    with pytest.raises(QuantizeError, match="K = 20 is not a multiple of 16"):
        quantize(torch.ones(2, 20))
    with pytest.raises(QuantizeError) as caught:
        quantize(torch.ones(2, 16, device="meta"))
    said = "this quantizer runs on the CPU and, with Triton, on CUDA devices: got meta; pass dense.cpu()"
    assert str(caught.value) == said
