"""Each code, each byte, each tie: the number formats in full, against ml_dtypes, the golden tables and float64."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from halfbyte import numerics as num
from helpers import assert_same_bytes, golden, nibbles

BYTES = np.arange(256, dtype=np.uint8)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E4M3 = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E8M0 = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)

with np.errstate(invalid="ignore"):
    HALVES = np.concatenate(
        [np.arange(1 << 16, dtype=np.uint16).view(t).astype(np.float32) for t in ("f2", ml_dtypes.bfloat16)]
    )
"""Every float16 and every bfloat16: all exponents of f32, and 2^3 to 2^10 mantissas of each."""


def nearest(x, values):
    """Index of the value nearest to each |x|, ties to the even index; ``values`` rise from 0."""
    a = np.abs(x.astype(np.float64))
    middles = (values[1:] + values[:-1]) / 2  # exact
    below, above = np.searchsorted(middles, a, "left"), np.searchsorted(middles, a, "right")
    return np.where(below % 2 == 0, below, above).astype(np.uint8)


def around(x):
    """Each value with the f32 below and the f32 above."""
    x = np.asarray(x, np.float32)
    return np.nextafter(x, np.float32(-np.inf)), x, np.nextafter(x, np.float32(np.inf))


# -- E2M1 --


def test_e2m1_values():
    assert_same_bytes(num.E2M1_VALUES, E2M1.astype(np.float32))
    assert_same_bytes(num.E2M1_VALUES, golden("layouts2")["T.e2m1"])


def test_e2m1_bytes_decode_low_nibble_first():
    expected = np.array([[E2M1[b & 15], E2M1[b >> 4]] for b in range(256)], np.float32)
    assert_same_bytes(num.E2M1_PAIRS, expected)
    assert_same_bytes(num.decode_e2m1(BYTES), expected.reshape(-1))
    assert_same_bytes(num.decode_e2m1(BYTES.reshape(2, 8, 16)), expected.reshape(2, 8, 32))


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[::-1],
        lambda a: a[:, ::2],
        lambda a: a[:, :0],
        lambda a: a[:0],
        np.asfortranarray,
        lambda a: np.broadcast_to(a[:1], (5, 16)),
    ],
    ids=["transposed", "reversed", "strided", "no columns", "no rows", "fortran", "broadcast"],
)
def test_e2m1_decodes_views(view):
    packed = view(BYTES.reshape(16, 16))
    assert_same_bytes(num.decode_e2m1(packed), E2M1[nibbles(packed)].astype(np.float32))


def test_e2m1_round_trip():
    codes = np.arange(16, dtype=np.uint8)
    back = num.encode_e2m1(num.E2M1_VALUES)
    assert back.tolist() == [0 if code == 8 else code for code in codes]  # -0.0 gives 0


def test_e2m1_ties_go_to_the_even_code():
    middles = (E2M1[1:8] + E2M1[:7]) / 2
    for i, (below, tie, above) in enumerate(zip(*around(middles), strict=True)):
        even = i if i % 2 == 0 else i + 1
        assert num.encode_e2m1(np.array([below, tie, above])).tolist() == [i, even, i + 1]
        assert num.encode_e2m1(np.array([-below, -tie, -above])).tolist() == [8 + i, 8 + even, 8 + i + 1]


def test_e2m1_saturates():
    large = np.array([5.0, np.nextafter(np.float32(5), np.float32(6)), 6, 7, 8, 1e30, 3.4028235e38, np.inf], np.float32)
    assert num.encode_e2m1(large).tolist() == [6] + [7] * 7
    assert num.encode_e2m1(-large).tolist() == [14] + [15] * 7


def test_e2m1_signs_of_zero():
    tiny = np.float32(2.0**-149)
    x = np.array([0.0, -0.0, tiny, -tiny, 0.25, -0.25], np.float32)
    assert num.encode_e2m1(x).tolist() == [0, 0, 0, 8, 0, 8]


def test_e2m1_nearest_for_all_half_precision_floats():
    x = HALVES[~np.isnan(HALVES)]
    finite = np.clip(x, -1e30, 1e30)
    assert_same_bytes(num.encode_e2m1(x), nearest(finite, E2M1[:8]) | np.where(x < 0, 8, 0).astype(np.uint8))


def test_e2m1_golden_sweep():
    g = golden("layouts2")
    assert_same_bytes(num.encode_e2m1(g["T.rne_in"]), g["T.rne_code"])


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3, 4)])
def test_encoders_keep_the_shape(shape):
    x = np.full(shape, 1.5, np.float32)
    for encode, byte in ((num.encode_e2m1, 3), (num.encode_e4m3, 0x3C), (num.encode_e8m0, 128)):
        encoded = encode(x)
        assert encoded.shape == shape
        assert encoded.dtype == np.uint8
        assert np.all(encoded == byte)


# -- nibbles --


def test_nibbles():
    assert num.pack_nibbles(np.array([1, 2, 15, 0], np.uint8)).tolist() == [0x21, 0x0F]
    assert num.unpack_nibbles(np.array([0x21, 0x0F], np.uint8)).tolist() == [1, 2, 15, 0]
    assert_same_bytes(num.pack_nibbles(num.unpack_nibbles(BYTES)), BYTES)
    assert_same_bytes(num.decode_e2m1(BYTES), num.E2M1_VALUES[num.unpack_nibbles(BYTES)])


@given(arrays(np.uint8, array_shapes(min_dims=1, max_dims=4, min_side=0), elements=st.integers(0, 255)))
@settings(deadline=None, derandomize=True)
def test_nibbles_round_trip(packed):
    codes = num.unpack_nibbles(packed)
    assert codes.shape == (*packed.shape[:-1], packed.shape[-1] * 2)
    assert np.all(codes < 16)
    assert_same_bytes(num.pack_nibbles(codes), packed)


# -- E4M3 --


def test_e4m3_values():
    value = num.E4M3_VALUES
    numbers = ~np.isnan(E4M3)
    assert_same_bytes(value[numbers], E4M3[numbers].astype(np.float32))
    assert np.flatnonzero(np.isnan(value)).tolist() == [0x7F, 0xFF]
    table = golden("layouts2")["T.e4m3fn"]
    assert_same_bytes(value[numbers], table[numbers])
    assert np.isnan(table[~numbers]).all()
    assert (value[0x01], value[0x07], value[0x08], value[0x38], value[0x7E]) == (2**-9, 7 * 2**-9, 2**-6, 1, 448)
    np.testing.assert_array_equal(num.decode_e4m3(BYTES.reshape(4, 64)), value.reshape(4, 64))


def test_e4m3_round_trip():
    finite = BYTES[~np.isnan(E4M3)]
    assert_same_bytes(num.encode_e4m3(num.E4M3_VALUES[finite]), finite)  # 80, which is -0, too


def test_e4m3_ties_go_to_the_even_byte():
    middles = (E4M3[1:0x7F] + E4M3[:0x7E]) / 2
    below, tie, above = around(middles)
    assert np.array_equal(tie.astype(np.float64), middles)
    byte = BYTES[:0x7E]
    even = byte + byte % 2
    for sign, bit in ((1, 0), (-1, 0x80)):
        assert_same_bytes(num.encode_e4m3(sign * below), byte | bit)
        assert_same_bytes(num.encode_e4m3(sign * tie), even | bit)
        assert_same_bytes(num.encode_e4m3(sign * above), (byte + 1) | bit)


def test_e4m3_subnormals():
    step = 2.0**-9
    x = np.array([0.5, 1, 1.5, 2.5, 6.5, 7.5, 8], np.float32) * np.float32(step)
    assert num.encode_e4m3(x).tolist() == [0x00, 0x01, 0x02, 0x02, 0x06, 0x08, 0x08]
    assert num.encode_e4m3(np.array([2.0**-11, 2.0**-126, 2.0**-149], np.float32)).tolist() == [0, 0, 0]


def test_e4m3_saturates():
    x = np.array([448, 463.9, 464, 465, 480, 1e30, 3.4028235e38, np.inf], np.float32)
    assert num.encode_e4m3(x).tolist() == [0x7E] * 8
    assert num.encode_e4m3(-x).tolist() == [0xFE] * 8


def test_e4m3_nan_and_signed_zero():
    assert set(num.encode_e4m3(np.array([np.nan, -np.nan], np.float32)) & 0x7F) == {0x7F}
    assert num.encode_e4m3(np.array([0.0, -0.0, -(2.0**-149)], np.float32)).tolist() == [0, 0x80, 0x80]


def test_e4m3_nearest_for_all_half_precision_floats():
    x = HALVES[~np.isnan(HALVES)]
    expected = nearest(np.clip(x, -448, 448), E4M3[:0x7F]) | np.where(np.signbit(x), 0x80, 0).astype(np.uint8)
    assert_same_bytes(num.encode_e4m3(x), expected)


def test_products_of_code_and_scale_fit_half_precision():
    product = np.outer(num.E2M1_VALUES, num.E4M3_VALUES[:0x7F])
    assert np.array_equal(product.astype(np.float64), np.outer(E2M1, E4M3[:0x7F]))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        assert np.array_equal(product.astype(dtype).astype(np.float32), product)
    assert product.max() == num.FULL_SCALE


# -- E8M0 --


def test_e8m0_values():
    numbers = ~np.isnan(E8M0)
    assert_same_bytes(num.E8M0_VALUES[numbers], E8M0[numbers].astype(np.float32))
    assert np.flatnonzero(np.isnan(num.E8M0_VALUES)).tolist() == [0xFF]
    np.testing.assert_array_equal(num.decode_e8m0(BYTES.reshape(2, 128)), num.E8M0_VALUES.reshape(2, 128))


def test_e8m0_round_trip():
    assert_same_bytes(num.encode_e8m0(num.E8M0_VALUES), BYTES)


def test_e8m0_ties_go_to_the_even_byte():
    below, tie, above = around(1.5 * E8M0[:254])
    byte = BYTES[:254]
    assert_same_bytes(num.encode_e8m0(below), byte)
    assert_same_bytes(num.encode_e8m0(tie), byte + byte % 2)
    assert_same_bytes(num.encode_e8m0(above), byte + 1)


def test_e8m0_extremes():
    x = np.array([0, -0.0, 2.0**-149, 2.0**-128, 2.0**-127, 3.4028235e38, np.inf, np.nan, -1, -np.inf, -(2.0**-149)])
    assert num.encode_e8m0(x.astype(np.float32)).tolist() == [0, 0, 0, 0, 0, 254, 254, 255, 255, 255, 255]


def test_e8m0_nearest_for_all_half_precision_floats():
    x = HALVES[(HALVES > 0) & np.isfinite(HALVES)]
    assert_same_bytes(num.encode_e8m0(x), nearest(np.clip(x, 2.0**-127, 2.0**127), E8M0[:255]))


def test_golden_mxfp4_decodes_as_its_nvfp4_twin():
    g = golden("layouts2")
    codes = num.decode_e2m1(g["M.mx_weight"]).astype(np.float64)
    mx = codes * np.repeat(num.decode_e8m0(g["M.mx_scale_e8m0"]), 32, -1)
    nv = codes * np.repeat(num.decode_e4m3(g["M.nv_weight_scale"].view(np.uint8)), 16, -1) * g["M.nv_weight_scale_2"]
    assert np.array_equal(mx, nv)
    assert np.any(mx)


# -- the rest --


def test_constants():
    assert num.BLOCK == 16
    assert num.E2M1_MAX == E2M1.max() == 6
    assert num.E4M3_MAX == np.nanmax(E4M3) == 448
    assert num.FULL_SCALE == 2688


def test_tables_cannot_be_written():
    for table in (num.E2M1_VALUES, num.E4M3_VALUES, num.E8M0_VALUES, num.E2M1_PAIRS):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1


def test_decoding_leaves_the_tables_alone():
    for decode in (num.decode_e2m1, num.decode_e4m3, num.decode_e8m0):
        before = decode(BYTES)
        decode(BYTES)[...] = 5
        np.testing.assert_array_equal(decode(BYTES), before)


def test_reciprocal_rounds_once():
    x = np.random.default_rng(0).uniform(1e-6, 1e6, 4096).astype(np.float32)
    assert_same_bytes(num.reciprocal(x), (1 / x.astype(np.float64)).astype(np.float32))
    assert num.reciprocal(0.0) == np.inf
    assert num.reciprocal(np.float32(2.0**-149)) == np.inf
    assert num.reciprocal(np.float32(np.inf)) == 0
