"""FP8 and INT8 twins over torch tensors: the bytes that NumPy gives."""

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.errors import WeightError
from helpers import assert_same_bytes, random_weight

TWINS = pytest.mark.parametrize("twin", [hb.to_fp8, hb.to_int8])
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


@TWINS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("experts", [(), (2, 3)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(7, 48), (5, 20), (3, 31), (0, 32), (4, 0)])
def test_same_bytes(twin, device, experts, per_row, n, k):
    w = random_weight(np.random.default_rng(0), n, k, experts, per_row=per_row, pre_scale=True)
    numpy, done = twin(w), twin(w.torch(device))
    assert done.data.dtype == (torch.uint8 if twin is hb.to_fp8 else torch.int8)
    assert done.data.device.type == done.scale.device.type == device
    for name in ("data", "scale", "pre_scale"):
        assert_same_bytes(getattr(done, name), getattr(numpy, name))
    assert done.error == pytest.approx(numpy.error, rel=1e-9)
    assert type(done.error) is float
    for dtype in ("float32", "bfloat16"):
        assert_same_bytes(done.dequantize(dtype), numpy.dequantize(dtype))


@TWINS
def test_nan(twin):
    w = random_weight(np.random.default_rng(0), 4, 48, (2,))
    scales = w.scales.copy()
    scales[1, 2, 1] = 0xFF
    with pytest.raises(WeightError) as caught:
        twin(w.replace(scales=scales).torch())
    assert str(caught.value) == "a block scale is NaN at [1, 2, 1]"


def test_scale_report():
    w = random_weight(np.random.default_rng(0), 5, 31, (2,))
    ours, theirs = hb.scale_report(w.torch()), hb.scale_report(w)
    assert (ours.zero, ours.subnormal, ours.window, ours.largest) == (
        theirs.zero,
        theirs.subnormal,
        theirs.window,
        theirs.largest,
    )
    assert_same_bytes(ours.subnormal_rows, theirs.subnormal_rows)
