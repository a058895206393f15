"""The comparisons that the other tests rest on can fail."""

import ml_dtypes
import numpy as np
import pytest

from helpers import assert_same_bytes, assert_within, exact, golden, nibbles, random_weight


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
def test_comparisons_fail(shape):
    a = np.full(shape, 1, np.float32)
    b = np.nextafter(a, np.float32(2))
    assert_same_bytes(a, a.copy())
    assert_within(a, b, 2.0**-23)
    with pytest.raises(AssertionError, match="got 3F800000, expected 3F800001"):
        assert_same_bytes(a, b)
    with pytest.raises(AssertionError, match=r"off by 1\.19e-07"):
        assert_within(a, b, 2.0**-24)
    with pytest.raises(AssertionError, match="out of bounds"):
        assert_within(a * np.nan, a, np.inf)
    with pytest.raises(AssertionError):
        assert_same_bytes(a * 0, -a * 0)
    for other in (a[None], a.astype(np.float64)):
        with pytest.raises(AssertionError):
            assert_same_bytes(a, other)
    with pytest.raises(AssertionError):
        assert_within(a, a[None], 1)


def test_exact_is_written_out():
    w = random_weight(np.random.default_rng(0), 2, 20, per_row=True)
    values, codes = exact(w), nibbles(w.codes)
    assert values.shape == (2, 20)
    assert codes.shape == (2, 32)
    assert not codes[:, 20:].any()
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for n, k in ((0, 0), (0, 1), (1, 15), (1, 16), (1, 19)):
        byte = int(w.codes[n, k // 2])
        code = byte >> 4 if k % 2 else byte & 15
        sign = -1 if code >= 8 else 1
        scale = w.scales[n, k // 16 : k // 16 + 1].view(ml_dtypes.float8_e4m3fn).astype(float)[0]
        assert values[n, k] == sign * table[code & 7] * scale * float(w.scale2[n, 0])


def test_golden_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        golden("inputs_f32")["A"][0, 0] = 1
