"""The decoders over torch tensors: bit for bit those over NumPy."""

import numpy as np
import pytest
import torch

from halfbyte import numerics as num
from helpers import assert_same_bytes, nibbles

BYTES = np.arange(256, dtype=np.uint8)


def test_is_torch():
    assert num.is_torch(torch.zeros(1))
    assert num.is_torch(torch.nn.Parameter(torch.zeros(1)))
    for other in (np.zeros(1), 1.0, None, [torch.zeros(1)], torch.float32):
        assert not num.is_torch(other)


@pytest.mark.parametrize("decode", [num.decode_e4m3, num.decode_e8m0])
@pytest.mark.parametrize("shape", [(256,), (4, 64), (2, 0), ()], ids=str)
def test_scales(decode, shape):
    scales = np.resize(BYTES, shape).astype(np.uint8)
    values = decode(torch.from_numpy(scales.reshape(shape)))
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), decode(scales.reshape(shape)))


@pytest.mark.parametrize(
    "view",
    [lambda a: a, lambda a: a.T, lambda a: a[:, ::2], lambda a: a[:, :0], lambda a: a[:0], lambda a: a[0]],
    ids=["plain", "transposed", "strided", "no columns", "no rows", "one axis"],
)
def test_codes(view):
    packed = view(torch.from_numpy(BYTES.reshape(16, 16)))
    values = num.decode_e2m1(packed)
    assert values.dtype == torch.float32
    assert_same_bytes(values, num.E2M1_VALUES[nibbles(packed)])


def test_torch_agrees_with_its_own_float8():
    own = torch.from_numpy(BYTES).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(num.E4M3_VALUES, own)
    e8m0 = torch.from_numpy(BYTES).view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(num.E8M0_VALUES, e8m0)


def test_encoding_agrees_with_torch():
    """Up to 448; above it torch's cast differs from version to version."""
    x = np.random.default_rng(0).uniform(-448, 448, 1 << 14).astype(np.float32) * np.exp2(-(np.arange(1 << 14) % 24))
    x = x.astype(np.float32)
    assert_same_bytes(num.encode_e4m3(x), torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8))
