"""FP8 and INT8 twins: the nearest byte, the stated scale, the measured error, and memory that does not grow."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.errors import UsageError, WeightError
from halfbyte.weight import Weight
from helpers import assert_same_bytes, exact, random_weight

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
TWINS = pytest.mark.parametrize("twin", [hb.to_fp8, hb.to_int8])


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def all_pairs(scale2=1.0):
    """Each of 16 codes under each of the 254 finite scales."""
    codes = np.tile(np.frombuffer(bytes.fromhex("1032547698badcfe"), np.uint8), (254, 1))
    scales = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])[:, None]
    return Weight(codes=codes, scales=scales, scale2=scale2)


def gaussian(sigma, rows=256):
    return hb.quantize(np.random.default_rng(0).normal(0, sigma, (rows, 2048)).astype(np.float32))


def values(twin):
    """The twin's values in f64, without a rounding."""
    data = E4M3[twin.data] if twin.kind == "fp8" else twin.data.astype(np.float64)
    return data * twin.scale.astype(np.float64)


def relative_error(twin, weight):
    return np.linalg.norm(values(twin) - exact(weight)) / np.linalg.norm(exact(weight))


def refusal(make):
    with pytest.raises(WeightError) as caught:
        make()
    return str(caught.value)


# -- which bytes --


def test_fp8_is_the_nearest_of_all_codes_and_scales():
    """code * scale / 6 to the nearest E4M3 number, ties to the even byte; the distances are exact in f64."""
    w = all_pairs()
    done = hb.to_fp8(w)
    finite = np.delete(np.arange(256), [0x7F, 0xFF])
    distance = np.abs(exact(w)[..., None] - 6 * E4M3[finite])
    nearest = distance.min(-1)
    assert_same_bytes(np.abs(6 * E4M3[done.data] - exact(w)), nearest)
    ties = (distance == nearest[..., None]).sum(-1) > 1
    magnitudes = done.data & 0x7F
    assert ties.sum() > 50
    assert not (magnitudes[ties] & 1).any()
    assert (E4M3[done.data] * exact(w) >= 0).all()


def test_fp8_by_hand():
    w = Weight(
        codes=np.frombuffer(bytes.fromhex("1032547698badcfe"), np.uint8)[None],
        scales=np.array([[0x38]], np.uint8),
        scale2=np.float32(0.25),
    )
    done = hb.to_fp8(w)
    assert_same_bytes(done.scale, np.array([[1.5]], np.float32))
    # 0 0.5 1 1.5 2 3 4 6, each by 6: 0 1/12 1/6 1/4 1/3 1/2 2/3 1
    positive = [0x00, 0x1B, 0x23, 0x28, 0x2B, 0x30, 0x33, 0x38]
    assert done.data[0].tolist() == positive + [0x80 + byte for byte in positive]
    assert E4M3[positive].tolist() == [0, 0.0859375, 0.171875, 0.25, 0.34375, 0.5, 0.6875, 1]


def test_fp8_does_not_overflow():
    w = Weight(codes=np.full((1, 8), 0xF7, np.uint8), scales=np.array([[0x7E]], np.uint8), scale2=1.0)
    assert hb.to_fp8(w).data[0].tolist() == [0x7E, 0xFE] * 8  # 448 and -448
    assert hb.to_fp8(w).error == 0


def test_int8_by_hand():
    """A row whose amax is 6: 127 for 6, and 21.17 for each 1; one of zeros; one under its own scale2."""
    codes = np.frombuffer(bytes.fromhex("1032547698badcfe"), np.uint8)[None].repeat(3, 0)
    scales = np.array([[0x38], [0x00], [0x40]], np.uint8)
    done = hb.to_int8(Weight(codes=codes, scales=scales, scale2=np.array([0.5, 0.5, 3], np.float32)))
    positive = [0, 11, 21, 32, 42, 64, 85, 127]  # 63.5 goes to the even 64
    assert done.data[0].tolist() == positive + [-v for v in positive]
    assert done.data[1].tolist() == [0] * 16
    assert_same_bytes(done.data[2], done.data[0])
    assert_same_bytes(done.scale, np.array([[3 / 127], [1], [36 / 127]], np.float32))


def test_int8_is_the_nearest(rng):
    w = random_weight(rng, 9, 40, (2,), per_row=True)
    done = hb.to_int8(w)
    unscaled = exact(w) / w.scale2.astype(np.float64)
    top = np.abs(unscaled).max(-1, keepdims=True)
    assert_same_bytes(done.data, np.rint(unscaled * 127 / top).astype(np.int8))
    assert_same_bytes(done.scale, (top * w.scale2.astype(np.float64) / 127).astype(np.float32))
    assert np.abs(done.data.astype(int)).max(-1).tolist() == [[127] * 9] * 2


# -- scale, shape and what is carried --


@TWINS
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("experts", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(7, 48), (5, 20), (1, 17), (3, 31), (1, 1)])
def test_shapes(twin, experts, per_row, n, k, rng):
    w = random_weight(rng, n, k, experts, per_row=per_row, input_scale=True, pre_scale=True)
    done = twin(w)
    assert done.shape == w.shape
    assert_same_bytes(done.pre_scale, w.pre_scale)
    assert getattr(done, "input_scale", None) is None
    rows = n if per_row or done.kind == "int8" else 1
    assert done.scale.shape == (*experts, rows, 1)
    if done.kind == "fp8":
        assert_same_bytes(done.scale, w.scale2 * np.float32(6))
    assert done.error == pytest.approx(relative_error(done, w), rel=1e-5, abs=1e-6)
    for at in np.ndindex(*experts):  # an expert's twin is the twin's expert
        one = Weight(codes=w.codes[at], scales=w.scales[at], scale2=w.scale2[at], k=k)
        assert_same_bytes(twin(one).data, done.data[at])
        assert_same_bytes(twin(one).scale, done.scale[at])


@TWINS
@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0)], ids=str)
def test_nothing(twin, shape, rng):
    done = twin(random_weight(rng, *shape))
    assert done.shape == shape
    assert done.error == 0


@TWINS
@pytest.mark.parametrize("k", [17, 20, 31])
def test_codes_beyond_k_are_not_seen(twin, k, rng):
    clean = random_weight(rng, 3, k)
    nibbles = np.zeros((3, 32), np.uint8)
    nibbles[:, k:] = 7
    dirty = clean.replace(codes=clean.codes | nibbles[:, 0::2] | nibbles[:, 1::2] << 4)
    assert not dirty.same(clean)
    assert_same_bytes(twin(dirty).data, twin(clean).data)
    assert_same_bytes(twin(dirty).scale, twin(clean).scale)
    assert twin(dirty).error == twin(clean).error


@TWINS
def test_the_pieces_fit_together(twin, rng, monkeypatch):
    w = random_weight(rng, 7, 48, (2,), per_row=True)
    whole = twin(w)
    monkeypatch.setattr("halfbyte.lossy._CHUNK", 100)  # two rows
    pieces = twin(w)
    assert_same_bytes(pieces.data, whole.data)
    assert_same_bytes(pieces.scale, whole.scale)
    assert pieces.error == pytest.approx(whole.error, rel=1e-12)


# -- the error --


@pytest.mark.parametrize("sigma", [1e-6, 0.005, 0.01, 0.02, 0.05, 1.0])
def test_fp8_error_on_gaussian_weights(sigma):
    w = gaussian(sigma)
    done = hb.to_fp8(w)
    assert 0.0138 < done.error < 0.0148
    assert done.error == pytest.approx(relative_error(done, w), rel=1e-5)


@pytest.mark.parametrize(("sigma", "least"), [(0.005, 0.07), (0.01, 0.05), (0.02, 0.025), (0.05, 0.022)])
def test_a_plain_cast_is_worse(sigma, least):
    w = gaussian(sigma)
    plain = exact(w).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    error = np.linalg.norm(plain - exact(w)) / np.linalg.norm(exact(w))
    assert error > least > 1.5 * hb.to_fp8(w).error


def test_another_scale_is_worse():
    """Six is not one choice among many: amax / 448 of the tensor, and 5.75 or 8 times scale2, all lose more."""
    w = gaussian(0.02)
    amax = np.abs(exact(w)).max()
    for scale in (amax / 448 * 0.97, 5.75 * float(w.scale2[0, 0]), 8 * float(w.scale2[0, 0])):
        rounded = np.clip(exact(w) / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
        assert np.linalg.norm(rounded - exact(w)) / np.linalg.norm(exact(w)) > 1.4 * hb.to_fp8(w).error


def test_int8_error_on_gaussian_weights():
    for sigma in (1e-6, 0.02, 1.0):
        done = hb.to_int8(gaussian(sigma))
        assert 0.0075 < done.error < 0.009
        assert done.error == pytest.approx(relative_error(done, gaussian(sigma)), rel=1e-5)


def test_the_error_weighs_rows_by_their_scale2():
    """One row is exact in FP8, the other not; the larger scale2 decides."""
    codes = np.array([[0x77] * 8, [0x66] * 8], np.uint8)  # 6 and 4
    scales = np.full((2, 1), 0x38, np.uint8)
    lost, total = 16 * (6 * 0.6875 - 4) ** 2, np.array([16 * 36, 16 * 16])
    for scale2 in ((1, 1), (1000, 1), (1, 1000)):
        w = Weight(codes=codes, scales=scales, scale2=np.array(scale2, np.float32))
        expected = (lost * scale2[1] ** 2 / (total * np.square(np.array(scale2, float))).sum()) ** 0.5
        assert hb.to_fp8(w).error == pytest.approx(expected, rel=1e-12)


@TWINS
def test_zeros(twin):
    w = Weight(codes=np.zeros((2, 8), np.uint8), scales=np.zeros((2, 1), np.uint8), scale2=0.0)
    assert twin(w).error == 0
    assert not twin(w).dequantize().any()


# -- refusals and memory --


@TWINS
def test_refusals(twin, rng):
    w = random_weight(rng, 4, 48, (2,))
    scales = w.scales.copy()
    scales[1, 2, 1] = 0x7F
    assert refusal(lambda: twin(w.replace(scales=scales))) == "a block scale is NaN at [1, 2, 1]"
    scales[0, 3, 2] = 0xFF
    assert refusal(lambda: twin(w.replace(scales=scales))) == "a block scale is NaN at [0, 3, 2]"
    assert refusal(lambda: twin(w.replace(scale2=np.nan))).startswith("scale2 is not finite")
    assert refusal(lambda: twin(w.replace(scale2=np.float32(3e38)))).startswith("scale2 is not finite")
    assert "another rank holds it" in refusal(lambda: twin(Weight.null((4, 32))))
    with pytest.raises(UsageError, match="not an NVFP4 weight: got ndarray, expected a Weight"):
        twin(w.codes)


@TWINS
def test_scratch_memory_does_not_grow(twin, rng):
    peaks = []
    for rows in (256, 2048):
        w = Weight(
            codes=rng.integers(0, 256, (2, rows, 1024), np.uint8),
            scales=rng.integers(1, 0x7F, (2, rows, 128), np.uint8),
            scale2=1.0,
        ).columns(0, 1024)  # not contiguous: no whole copy may be made of it
        tracemalloc.start()
        done = twin(w)
        peaks.append(tracemalloc.get_traced_memory()[1] - done.data.nbytes - done.scale.nbytes)
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1_000_000
    assert peaks[1] < 12_000_000
