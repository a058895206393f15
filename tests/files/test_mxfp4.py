"""MXFP4: what its weight accepts and decodes to, and its cast to NVFP4, against arithmetic in f64."""

import copy
import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte
from halfbyte import mxfp4
from halfbyte.errors import WeightError
from halfbyte.weight import LossyWarning, Mxfp4Weight
from helpers import assert_same_bytes, golden, nibbles, random_mxfp4

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
DTYPES = {"float32": np.dtype("f4"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("f2")}
ALL_CODES = (np.arange(16) * 0x11).astype(np.uint8)  # one block with every code, twice


def weight(codes, scales, k=None):
    return Mxfp4Weight(codes=np.array(codes, np.uint8), scales=np.array(scales, np.uint8), k=k)


def blocks_of(exponents, codes=ALL_CODES):
    """One row with a block of ``codes`` for each exponent."""
    return weight([np.tile(codes, len(exponents))], [[e + 127 for e in exponents]])


def true_values(w):
    """(*E, N, K) f64, exact; -0 keeps its sign."""
    unit = np.repeat(2.0 ** (w.scales.astype(np.float64) - 127), 32, -1)
    return (VALUES[nibbles(w.codes)] * unit)[..., : w.shape[-1]]


def nv_values(w):
    """The same of an NVFP4 weight, by ml_dtypes' table."""
    scales = w.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return (VALUES[nibbles(w.codes)] * np.repeat(scales, 16, -1) * w.scale2.astype(np.float64))[..., : w.shape[-1]]


def assert_exact(w, made):
    assert made.shape == w.shape
    assert_same_bytes(made.codes, w.codes[..., : made.codes.shape[-1]])
    assert_same_bytes(nv_values(made), true_values(w))
    assert_same_bytes(made.dequantize(), w.dequantize())
    assert np.isfinite(made.scale2).all()
    assert (made.scale2 >= 2.0**-126).all()
    assert ((made.scales >= 1) & (made.scales <= 0x78)).all()  # 2^-9 to 2^8


def refusal(f, *args, **kwargs):
    with pytest.raises(WeightError) as caught:
        f(*args, **kwargs)
    return caught.value


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# -- the weight --


def test_every_code_at_every_scale():
    w = weight(np.tile(ALL_CODES, (255, 1)), np.arange(255)[:, None])
    assert (w.kind, w.shape) == ("mxfp4", (255, 32))
    expected = true_values(w)
    with np.errstate(over="ignore"):
        single = expected.astype(np.float32)
        for dtype, numpy in DTYPES.items():
            assert_same_bytes(w.dequantize(dtype), single.astype(numpy))
    exact = np.abs(expected) < 2.0**128
    assert (single[exact] == expected[exact]).all()  # subnormals among them
    assert np.abs(single[0, 2:4]).tolist() == [2.0**-128, 2.0**-128]


def test_what_leaves_the_range_of_float32():
    values = weight([ALL_CODES] * 3, [[252], [253], [254]]).dequantize()[:, : 2 * 8 : 2]
    assert np.isfinite(values[0]).all()
    assert values[0, 7] == 1.5 * 2.0**127
    assert np.isinf(values).tolist() == [[False] * 8, [False] * 6 + [True] * 2, [False] * 4 + [True] * 4]


def test_a_nan_scale_makes_its_block_nan():
    w = weight(np.zeros((2, 32)), [[127, 255], [0, 127]])
    nan = np.isnan(w.dequantize())
    assert nan[0, 32:].all()
    assert nan.sum() == 32


def test_low_nibble_first_and_padding():
    w = weight(np.full((2, 3, 32), 0x72), np.full((2, 3, 2), 128), k=35)
    assert w.shape == (2, 3, 35)
    assert_same_bytes(w.dequantize(), np.tile(np.float32([2, 12] * 17 + [2]), (2, 3, 1)))


def test_facts(rng):
    codes, scales = rng.integers(0, 256, (2, 4, 32), np.uint8), rng.integers(0, 255, (2, 4, 2), np.uint8)
    w = Mxfp4Weight(codes=codes, scales=scales.view(ml_dtypes.float8_e8m0fnu))
    assert halfbyte.Mxfp4Weight is Mxfp4Weight
    assert repr(w) == "Mxfp4Weight(shape=(2, 4, 64), numpy)"
    assert_same_bytes(w.scales, scales)
    assert w.scales.dtype == np.uint8
    with pytest.raises(AttributeError, match="a Mxfp4Weight is immutable"):
        w.codes = codes
    for other in (w, copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert_same_bytes(other.codes, codes)
        assert other.shape == w.shape
        assert not other.codes.flags.writeable
        assert not other.scales.flags.writeable
    assert codes.flags.writeable


def test_concat(rng):
    parts = [random_mxfp4(rng, n, 40, (2,)) for n in (3, 0, 2)]
    whole = Mxfp4Weight.concat(parts)
    assert whole.shape == (2, 5, 40)
    for name in ("codes", "scales"):
        assert_same_bytes(getattr(whole, name)[:, :3], getattr(parts[0], name))
        assert_same_bytes(getattr(whole, name)[:, 3:], getattr(parts[2], name))
    assert Mxfp4Weight.concat(parts[:1]).same(parts[0])


def test_what_cannot_be_joined(rng):
    a = random_mxfp4(rng, 3, 40)
    assert str(refusal(Mxfp4Weight.concat, [])) == "concat needs at least one weight"
    for b in (random_mxfp4(rng, 3, 64), random_mxfp4(rng, 3, 41), random_mxfp4(rng, 3, 40, (2,))):
        message = f"part 1 has another K or E: got {b.shape}, expected (*(), N, 40)"
        assert str(refusal(Mxfp4Weight.concat, [a, b])) == message


def test_same(rng):
    a = random_mxfp4(rng, 3, 64)
    assert a.same(a.replace())
    assert not a.same(a.replace(codes=a.codes ^ np.uint8(128)))
    assert not a.same(a.replace(scales=a.scales ^ np.uint8(1)))
    assert not a.same(a.replace(k=63))
    assert a.replace(k=63).replace().shape == (3, 63)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codes": np.zeros(32, np.uint8)}, "codes need at least two axes: got (32,), expected (*E, N, K/2)"),
        (
            {"codes": np.zeros((4, 24), np.uint8)},
            "a row of codes holds K = 48, which is not a multiple of 32: got (4, 24), expected whole blocks of "
            "16 bytes; pad the layer with zero codes and pass the true K as k=",
        ),
        (
            {"scales": np.zeros((4, 4), np.uint8)},
            "the block scales do not fit the codes: got (4, 4), expected (4, 2)",
        ),
        (
            {"scales": np.zeros((1, 4, 2), np.uint8)},
            "the block scales do not fit the codes: got (1, 4, 2), expected (4, 2)",
        ),
        ({"codes": np.zeros((4, 32), "f4")}, "codes are of the wrong dtype: got float32"),
        (
            {"scales": np.zeros((4, 2), ml_dtypes.float8_e4m3fn)},
            "scales are of the wrong dtype: got float8_e4m3fn, expected uint8 or float8_e8m0fnu",
        ),
        ({"scales": [[0, 0]]}, "scales are of the wrong dtype: got list"),
        ({"k": 32}, "k does not end in the last block: got 32, expected about 64"),
        ({"k": 65}, "k does not end in the last block: got 65, expected about 64"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_refuses(fields, message):
    fields = {"codes": np.zeros((4, 32), np.uint8), "scales": np.zeros((4, 2), np.uint8)} | fields
    assert str(refusal(Mxfp4Weight, **fields)).startswith(message)


# -- the exact cast --


def test_golden():
    g = golden("layouts2")
    w = Mxfp4Weight(codes=g["M.mx_weight"], scales=g["M.mx_scale_e8m0"])
    made = mxfp4.to_nvfp4(w)
    assert_same_bytes(made.codes, g["M.mx_weight"])
    assert_same_bytes(made.scales, g["M.nv_weight_scale"])
    assert_same_bytes(made.scale2.reshape(()), g["M.nv_weight_scale_2"])
    assert_exact(w, made)


def test_every_exponent_alone():
    for e in range(-127, 128):
        w = blocks_of([e])
        made = mxfp4.to_nvfp4(w)
        assert made.scale2.item() == 2.0 ** max(e - 8, -126)
        assert_exact(w, made)


@pytest.mark.parametrize("span", range(21))
def test_every_span_at_every_exponent(span):
    for lo in range(-127, 128 - span):
        hi = lo + span
        w = blocks_of([hi, lo, lo + span // 2])
        assert mxfp4.exponents(w.codes, w.scales) == (lo, hi)
        if span <= 17:
            made = mxfp4.to_nvfp4(w)
            assert made.scale2.item() == 2.0 ** max(hi - 8, -126)
            assert_exact(w, made)
        else:
            assert str(refusal(mxfp4.scale2_exponent, lo, hi)) == (
                f"the MXFP4 scales are too far apart for one scale2: got 2^{lo} to 2^{hi}, a span of {span}, "
                "expected a span of at most 17; pass --lossy (lossy=True in Python) to round the codes of the "
                "smallest blocks"
            )
            assert mxfp4.scale2_exponent(lo, hi, lossy=True) == hi - 8 >= -126


@pytest.mark.parametrize("zero", [0x00, 0x80, 0x08, 0x88], ids="{:02X}".format)
def test_blocks_of_zeros_have_no_exponent(zero):
    """Their scale is the nearest in range, and -0 stays."""
    codes = [np.concatenate([np.full(16, zero), ALL_CODES, np.full(16, zero)])]
    w = weight(codes, [[254, 127, 0]])
    assert mxfp4.exponents(w.codes, w.scales) == (0, 0)
    made = mxfp4.to_nvfp4(w)
    assert made.scales.tolist() == [[0x78, 0x78, 0x78, 0x78, 0x01, 0x01]]
    assert made.scale2.item() == 2.0**-8
    assert_exact(w, made)
    assert mxfp4.cast(w.codes, w.scales, -8)[0] is w.codes


@pytest.mark.parametrize("at", range(32))
@pytest.mark.parametrize("code", [1, 15])
def test_one_code_makes_a_block_count(at, code):
    codes = np.zeros((1, 3, 16), np.uint8)
    codes[0, 1, at // 2] = code << 4 * (at % 2)
    assert mxfp4.exponents(codes.reshape(1, 48), np.array([[10, 20, 30]], np.uint8)) == (-107, -107)


@pytest.mark.parametrize("code", [0x00, 0x88])
def test_all_zero(code):
    w = weight(np.full((3, 32), code), [[0, 254], [127, 118], [119, 135]])
    assert mxfp4.exponents(w.codes, w.scales) is None
    made = mxfp4.to_nvfp4(w)
    assert made.scale2.item() == 1
    assert made.scales[:, ::2].tolist() == [[0x01, 0x78], [0x38, 0x01], [0x02, 0x78]]
    assert_exact(w, made)


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (2, 0, 1), (0, 2, 1)], ids=str)
def test_empty(shape):
    w = weight(np.zeros((*shape[:-1], shape[-1] * 16)), np.zeros(shape))
    assert mxfp4.exponents(w.codes, w.scales) is None
    made = mxfp4.to_nvfp4(w, lossy=True)
    assert made.shape == w.shape
    assert made.dequantize().shape == w.shape


@pytest.mark.parametrize("k", range(33, 65))
def test_padding(k, rng):
    w = weight(rng.integers(0, 256, (2, 32)), rng.integers(120, 130, (2, 2)), k=k)
    made = mxfp4.to_nvfp4(w)
    assert made.scales.shape == (2, 3 if k <= 48 else 4)
    assert_exact(w, made)


def test_each_expert_has_its_own_scale2():
    scales = np.array([[[[0]], [[254]]], [[[127]], [[130]]], [[[100]], [[200]]]], np.uint8)
    w = weight(np.broadcast_to(ALL_CODES, (3, 2, 1, 16)), scales)
    made = mxfp4.to_nvfp4(w)
    assert_same_bytes(made.scale2, np.float32(2.0 ** np.maximum(scales.astype(float) - 135, -126)))
    assert_exact(w, made)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_exact_for_any_weight(data):
    """Also in ragged chunks: spans and bytes are those of the whole."""
    n, g = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    span = data.draw(st.integers(0, 17))
    lo = data.draw(st.integers(0, 254 - span))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scales = rng.integers(lo, lo + span + 1, (n, g), np.uint8)
    codes = rng.integers(0, 256, (n, g, 16), np.uint8)
    zero = rng.random((n, g)) < data.draw(st.sampled_from([0, 0.3, 1]))
    codes[zero] &= 0x88
    scales[zero] = rng.integers(0, 255, zero.sum())
    w = weight(codes.reshape(n, -1), scales)
    used = scales[~zero & (VALUES[nibbles(codes)] != 0).any(-1)].astype(int) - 127
    expected = (used.min(), used.max()) if used.size else None
    assert mxfp4.exponents(w.codes, w.scales) == expected
    made = mxfp4.to_nvfp4(w, lossy=True)
    assert_exact(w, made)

    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))})
    chunks = [(w.codes[a:b], w.scales[a:b]) for a, b in itertools.pairwise(cuts)]
    spans = [mxfp4.exponents(*chunk) for chunk in chunks]
    k = mxfp4.share(spans)
    assert 2.0**k == made.scale2.item()
    parts = [mxfp4.cast(*chunk, k) for chunk in chunks]
    assert_same_bytes(np.concatenate([codes for codes, _ in parts]), made.codes)
    assert_same_bytes(np.concatenate([scales for _, scales in parts]), made.scales)
    assert all(mxfp4.squared_error(*chunk, k)[0] == 0 for chunk in chunks)


@pytest.mark.parametrize(
    ("spans", "k"),
    [
        ([], 0),
        ([None, None], 0),
        ([(3, 5)], -3),
        ([(-10, -5), None, (0, 7)], -1),
        ([(-10, -5), (0, 8)], None),
        ([(-127, -127), (-126, -120)], -126),
        ([(100, 127), None], None),
    ],
    ids=str,
)
def test_share(spans, k):
    assert mxfp4.share(spans) == k
    assert mxfp4.share(spans[::-1]) == k


# -- what is refused --


@pytest.mark.parametrize(("row", "block"), [(0, 0), (2, 1), (4, 2)])
def test_the_first_nan(row, block):
    codes, scales = np.zeros((5, 48), np.uint8), np.full((5, 3), 127, np.uint8)
    scales[row, block] = 255
    scales[4, 2] = 255
    message = f"a scale of MXFP4 is NaN (FF) at [{row}, {block}]"
    for f in (mxfp4.exponents, lambda c, s: mxfp4.cast(c, s, -8), lambda c, s: mxfp4.squared_error(c, s, -8)):
        assert str(refusal(f, codes, scales)) == message
    assert str(refusal(mxfp4.to_nvfp4, weight(codes, scales), lossy=True)) == message
    assert refusal(mxfp4.exponents, codes[row:], scales[row:], first_row=row).index == [row, block]
    assert refusal(mxfp4.exponents, codes[None], scales[None]).index == [0, row, block]


def test_the_expert_of_an_error():
    codes, scales = np.broadcast_to(ALL_CODES, (2, 3, 4, 16)), np.full((2, 3, 4, 1), 127, np.uint8)
    scales[1, 2, 3] = 255
    assert refusal(mxfp4.to_nvfp4, weight(codes, scales)).index == [1, 2, 3, 0]
    scales[1, 2, 3] = 127
    scales[1, 0, 3] = 145
    error = refusal(mxfp4.to_nvfp4, weight(codes, scales))
    assert error.index == [1, 0]
    assert "2^0 to 2^18, a span of 18" in str(error)
    assert refusal(mxfp4.to_nvfp4, blocks_of([0, 18])).index is None


def test_a_scale2_that_is_too_small():
    """Nothing is clipped but blocks of zeros."""
    w = blocks_of([0, 8])
    assert mxfp4.cast(w.codes, w.scales, 0)[1].tolist() == [[0x38, 0x38, 0x78, 0x78]]
    assert str(refusal(mxfp4.cast, w.codes, w.scales, -1)) == "scale2 is too small for the MXFP4 scales: got 2^-1"


# -- the lossy cast --


def nearest(values):
    """The value of E2M1 nearest to each, by trying all eight; ties go to the even code."""
    distance = np.abs(np.abs(values)[..., None] - MAGNITUDES)
    tied = distance == distance.min(-1, keepdims=True)
    even_first = np.argmax(tied * np.array([2, 1] * 4), -1)
    return np.copysign(MAGNITUDES[even_first], values)


@pytest.mark.parametrize("below", range(1, 9))
def test_each_code_that_is_rounded(below):
    w = blocks_of([0, -17 - below])
    with pytest.warns(LossyWarning):
        made = mxfp4.to_nvfp4(w, lossy=True)
    assert made.scale2.item() == 2.0**-8
    assert made.scales.tolist() == [[0x78, 0x78, 1, 1]]
    assert_same_bytes(made.codes[:, :16], w.codes[:, :16])
    assert_same_bytes(nv_values(made)[:, 32:], nearest(true_values(w)[:, 32:] * 2.0**17) * 2.0**-17)
    magnitude = nibbles(made.codes)[0, 32:48:2] & 7
    table = {1: [0, 0, 1, 2, 2, 3, 4, 5], 2: [0, 0, 0, 1, 1, 2, 2, 3], 3: [0, 0, 0, 0, 0, 1, 1, 2]}
    table |= {4: [0, 0, 0, 0, 0, 0, 0, 1]}
    assert magnitude.tolist() == table.get(below, [0] * 8)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(18, 60), st.sampled_from([(), (1,), (3,)]))
def test_lossy(seed, span, experts):
    rng = np.random.default_rng(seed)
    lo = rng.integers(0, 255 - span)
    scales = rng.integers(lo, lo + span + 1, (*experts, 4, 3), np.uint8)
    scales[..., 0, 0], scales[..., 1, 0] = lo, lo + span
    codes = rng.integers(0, 256, (*experts, 4, 48), np.uint8)
    codes[..., :2, 0] = 0x77
    w = weight(codes, scales)
    with pytest.raises(WeightError, match=f"a span of {span}"):
        mxfp4.to_nvfp4(w)
    with pytest.warns(LossyWarning) as caught:
        made = mxfp4.to_nvfp4(w, lossy=True)
    (warning,) = caught
    assert warning.filename == __file__
    before, after = true_values(w), nv_values(made)
    lost, total = np.square(after - before).sum(), np.square(before).sum()
    assert str(warning.message) == (
        f"the cast of MXFP4 to NVFP4 rounded codes: relative error {(lost / total) ** 0.5:.3g}"
    )
    unit = np.repeat(np.maximum(scales.astype(float) - 127, int(lo) + span - 144), 32, -1)
    assert_same_bytes(after, nearest(before / 2.0**unit) * 2.0**unit)

    first = w.codes[(0,) * len(experts)], w.scales[(0,) * len(experts)]
    k = int(lo) + span - 127 - 8
    whole = mxfp4.squared_error(*first, k)
    parts = [mxfp4.squared_error(first[0][a:b], first[1][a:b], k) for a, b in ((0, 1), (1, 4))]
    np.testing.assert_allclose(whole, np.sum(parts, 0), rtol=1e-14)
    chosen = (0,) * len(experts)
    expected = np.square((after - before)[chosen]).sum(), np.square(before[chosen]).sum()
    np.testing.assert_allclose(whole, expected, rtol=1e-14)


def test_rounding_that_changes_no_value_does_not_warn():
    """2 and 4 at 2^-18 are 1 and 2 at 2^-17."""
    w = weight([np.concatenate([ALL_CODES, np.full(16, 0x64)])], [[127, 109]])
    made = mxfp4.to_nvfp4(w, lossy=True)
    assert_same_bytes(made.codes[:, 16:], np.full((1, 16), 0x42, np.uint8))
    assert_same_bytes(nv_values(made), true_values(w))


def test_the_source_is_not_written():
    w = blocks_of([0, -20])
    before = w.codes.copy()
    codes, _ = mxfp4.cast(w.codes, w.scales, -8)
    assert (codes != before).any()
    assert_same_bytes(w.codes, before)
