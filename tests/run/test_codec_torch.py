"""CPU tensors through the compiled quantizer and decoder: the bits that NumPy and torch give."""

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte import decode, jit
from halfbyte.errors import QuantizeError
from halfbyte.recipes import LIKES, base, quantize
from halfbyte.weight import Weight, to_torch
from helpers import assert_same_bytes, random_weight

pytestmark = pytest.mark.skipif(jit.missing() is not None, reason=f"nothing is compiled: {jit.missing()}")

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.fixture
def forced(monkeypatch):
    """Compiled code computes all but nothing, and counts its runs."""
    monkeypatch.setattr(decode, "SMALL", 1)
    monkeypatch.setattr(base, "SMALL", 1)
    ran, count = [], jit.thread_count
    monkeypatch.setattr(jit, "thread_count", lambda: (ran.append(1), count())[1])
    return ran


def by_numpy(monkeypatch, function, *args, **options):
    with monkeypatch.context() as patch:
        patch.setattr(jit, "missing", lambda: "numba is not here")
        return function(*args, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("experts", "n", "k"), [((), 5, 48), ((), 3, 4100), ((), 1, 1), ((2, 3), 4, 90), ((), 0, 32), ((), 4, 0)], ids=str
)
@pytest.mark.parametrize("per_row", [False, True])
def test_dequantize(experts, n, k, per_row, dtype, forced, monkeypatch):
    w = random_weight(np.random.default_rng(0), n, k, experts, per_row=per_row)
    wanted, by_torch = by_numpy(monkeypatch, lambda: (w.dequantize(dtype), w.torch().dequantize(dtype)))
    assert not forced
    values = w.torch().dequantize(dtype)
    assert bool(forced) == bool(n and k)
    assert values.dtype == getattr(torch, dtype)
    assert values.is_contiguous()
    assert_same_bytes(values, wanted)
    assert_same_bytes(by_torch, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale(dtype, forced, monkeypatch):
    """NaN and negative ones, and products beyond the range, too."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 32, 8).repeat(256, 0).reshape(256, 256)
    scales = np.arange(256, dtype=np.uint8)[:, None].repeat(32, 1)
    for scale2 in (1e-42, 1e-6, 1.0, 3e4, 3e38):
        w = Weight(codes=codes, scales=scales, scale2=scale2)
        values = w.torch().dequantize(dtype)
        assert forced
        assert_same_bytes(values, by_numpy(monkeypatch, w.dequantize, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_views(dtype, forced):
    w = random_weight(np.random.default_rng(0), 6, 96).torch()
    for view in (lambda a: a.mT.contiguous().mT, lambda a: a.flip(0), lambda a: a[::2], lambda a: a[:1].expand(5, -1)):
        other = Weight(codes=view(w.codes), scales=view(w.scales), scale2=w.scale2)
        assert_same_bytes(other.dequantize(dtype), other.numpy().dequantize(dtype))
    assert forced


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("like", LIKES)
def test_quantize(like, dtype, forced, monkeypatch):
    x = np.random.default_rng(0).normal(0, 0.02, (7, 4208)).astype(DTYPES[dtype])
    for view in (lambda a: a, lambda a: a.T[:48], lambda a: a[:, ::2][:, :160], lambda a: a[:, 3:40]):
        wanted = by_numpy(monkeypatch, quantize, view(x), like=like, pad=True)
        forced.clear()
        w = quantize(view(to_torch(x)), like=like, pad=True)
        assert len(forced) == 2
        assert isinstance(w.codes, torch.Tensor)
        assert w.same(wanted)


def test_refused(forced):
    x = torch.ones(300, 48)
    x[200, 20] = torch.nan
    with pytest.raises(QuantizeError) as caught:
        quantize(x)
    assert caught.value.index == [200, 20]
    x[200, 20] = 4000
    with pytest.raises(QuantizeError) as caught:
        quantize(x, scale2=1.0)
    assert caught.value.index == [200, 1]


def test_tensors_that_are_not_in_memory(forced):
    """They take torch's way: meta tensors, and what torch's compiler traces."""
    w = random_weight(np.random.default_rng(0), 4, 32).torch()
    meta = Weight(codes=w.codes.to("meta"), scales=w.scales.to("meta"), scale2=w.scale2.to("meta"))
    assert meta.dequantize().shape == (4, 32)
    assert not forced

    class Named(torch.Tensor):
        pass

    named = Weight(codes=w.codes.as_subclass(Named), scales=w.scales, scale2=w.scale2)
    assert isinstance(named.dequantize(), Named)
    assert not forced


def test_a_gradient_of_scale2(forced):
    w = random_weight(np.random.default_rng(0), 4, 32).torch()
    scale2 = w.scale2.clone().requires_grad_()
    learned = Weight(codes=w.codes, scales=w.scales, scale2=scale2)
    values = learned.dequantize()
    assert not forced
    values.sum().backward()
    assert scale2.grad.item() == pytest.approx((w.dequantize() / w.scale2).sum().item(), rel=1e-5)
    with torch.no_grad():
        assert_same_bytes(learned.dequantize(), values.detach())
    assert forced
