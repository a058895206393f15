"""Fragments from torch tensors on the CPU: bound, not copied, and written through."""

import numpy as np
import pytest
import torch

from halfbyte.errors import UsageError
from halfbyte.fragments import FragmentLoader
from helpers import assert_same_bytes, random_weight


def test_tensors_are_bound():
    w = random_weight(np.random.default_rng(0), 33, 62).replace(scale2=1.0).torch()
    a = torch.randn(17, 62, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    loader, numpy = FragmentLoader.of(a, w), FragmentLoader.of(a.float().numpy(), w.numpy())
    assert loader.packed.ctypes.data == w.codes.data_ptr()
    for lane in range(32):
        assert_same_bytes(loader.load_a(16, 48, lane, True).astype(np.float32), numpy.load_a(16, 48, lane, True))
        assert_same_bytes(loader.decode_b(1, 48, lane).astype(np.float32), numpy.decode_b(1, 48, lane))
    view = torch.full((2, 64), torch.nan, dtype=torch.bfloat16)
    for col0 in range(0, 64, 16):
        loader.decode_strip(view, 32, 1, 0, col0, 8, 16)
    assert_same_bytes(view[1, :62], w.dequantize("bfloat16")[32])
    assert view[1, 62:].tolist() == [0, 0]
    assert view[0].isnan().all()


def test_a_device_is_refused():
    w = random_weight(np.random.default_rng(0), 4, 32).torch("meta")
    with pytest.raises(UsageError) as caught:
        FragmentLoader(torch.zeros(1, 32, device="meta"), w.codes, w.scales)
    assert str(caught.value) == "a is not on the CPU: got meta; pass it as .cpu()"
