"""Quantizing: the bytes of ModelOpt and compressed-tensors, bounds for any input, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halfbyte.errors import QuantizeError, UsageError
from halfbyte.recipes import LIKES, RECIPES, quantize, recipe_named
from halfbyte.weight import Weight
from helpers import INPUTS, TINY32, U32, assert_same_bytes, assert_within, exact, golden, modelopt, nibbles

BF16 = np.dtype(ml_dtypes.bfloat16)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E4M3 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
F32_MAX, F32_TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
ZERO_SCALE = {"modelopt": 0x38, "compressed-tensors": 0x20}  # what a block of zeros gets

every = pytest.mark.parametrize("like", LIKES)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def refusal(*args, **options):
    with pytest.raises(QuantizeError) as caught:
        quantize(*args, **options)
    return caught.value


# -- the bytes of others --


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
def test_golden_modelopt(name, dtype):
    w = quantize(golden("inputs_f32")[name].astype(dtype))
    g = golden("modelopt_bf16in" if dtype == BF16 else "modelopt_f32")
    assert_same_bytes(w.scale2.reshape(()), g[f"{name}.weight_scale_2"])
    assert_same_bytes(w.scales, g[f"{name}.weight_scale"])
    assert_same_bytes(w.codes, g[f"{name}.weight"])


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
def test_golden_compressed_tensors(name, dtype):
    x, g = golden("inputs_f32")[name].astype(dtype), golden("compressed_tensors")
    at = f"bf16in.{name}" if dtype == BF16 else name
    w = quantize(x, like="compressed-tensors")
    assert_same_bytes(w.scales, g[f"{at}.weight_scale"])
    assert_same_bytes(w.codes, g[f"{at}.weight_packed"])
    scale = recipe_named("rtn").tensor_scale(np.float32(np.abs(x.astype(np.float32)).max()), "compressed-tensors")
    assert_same_bytes(np.reshape(scale.divisor, 1), g[f"{at}.weight_global_scale"])
    assert_same_bytes(w.scale2.reshape(1), np.float32(1) / g[f"{at}.weight_global_scale"])


def test_golden_peers_differ():
    """Where their bytes are the same, the tests above could not tell one peer from the other."""
    x = golden("inputs_f32")["D"]
    a, b = (quantize(x, like=like) for like in LIKES)
    assert np.count_nonzero(nibbles(a.codes) != nibbles(b.codes)) == 25
    assert a.scale2 != b.scale2
    a, b = (quantize(x.astype(BF16), like=like) for like in LIKES)
    assert np.count_nonzero(a.scales != b.scales) == 18


@every
def test_float16_is_float32_or_rounds_as_its_peer(like, rng):
    x = (rng.standard_normal((64, 1024)) * 0.05).astype(np.float16)
    half, single = quantize(x, like=like), quantize(x.astype(np.float32), like=like)
    if like == "modelopt":
        assert half.same(single)
    else:  # compressed-tensors divides the largest magnitude by 6 in the input's dtype
        assert_same_bytes(half.scale2, single.scale2)
        wanted = (2688 / np.abs(x).max().astype(np.float64)) * (np.abs(x).reshape(64, 64, 16).max(-1) / np.float16(6))
        gap = np.abs(wanted[..., None] - E4M3).min(-1)
        assert_within(np.abs(E4M3[half.scales] - wanted), gap, 4 * U32 * wanted)
        assert np.any(half.scales != single.scales)


def test_names():
    assert [r.name for r in RECIPES] == ["rtn"]
    for recipe in RECIPES:
        assert recipe_named(recipe.name) is recipe
        assert recipe.summary
    with pytest.raises(UsageError) as caught:
        quantize(np.ones((1, 16), np.float32), "gptq")
    assert str(caught.value) == "unknown recipe: got 'gptq', expected rtn"
    with pytest.raises(UsageError) as caught:
        quantize(np.ones((1, 16), np.float32), like="torchao")
    assert str(caught.value) == "unknown peer: got 'torchao', expected modelopt or compressed-tensors"


# -- any input --

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
usual = st.floats(-8, 8, width=32)
FEW = [0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.75, -5.0, 2.0**-149, 448.0, 2688.0, F32_TINY]
matrices = st.tuples(st.integers(0, 3), st.integers(0, 3)).flatmap(
    lambda size: st.sampled_from([finite, usual, st.sampled_from(FEW)]).flatmap(
        lambda elements: arrays(np.float32, (size[0], size[1] * 16), elements=elements)
    )
)
examples = settings(deadline=None, derandomize=True, max_examples=250)


def check_codes(x, w):
    """Each code is the nearest, but for the roundings of the step and of the quotient; no sign is lost."""
    x = np.pad(x.astype(np.float64), [(0, 0), (0, -x.shape[1] % 16)])
    scales = np.repeat(E4M3[w.scales], 16, -1)
    step = scales * w.scale2.astype(np.float64)
    codes = nibbles(w.codes)
    distance = np.abs(x[..., None] - E2M1 * step[..., None])
    chosen = np.take_along_axis(distance, codes[..., None].astype(np.intp), -1)[..., 0]
    # two f32 roundings move a boundary by 2 half ulps, so the loss is up to twice that; below the normal
    # range the rounding of scale2 and of the step weigh a step of f32 each, times scale and code
    slack = 8 * U32 * np.abs(x) + (6 * scales + 12) * TINY32
    assert_within(chosen, distance.min(-1), slack)
    assert np.all(x[codes >= 8] < 0)
    assert np.all(codes[x < -TINY32 * (1 + step)] >= 8)  # a quotient below f32's range is a zero without a sign


@given(matrices, st.sampled_from(LIKES))
@examples
def test_codes_are_nearest_and_scales_finite(x, like):
    w = quantize(x, like=like)
    assert w.shape == x.shape
    assert w.scale2.shape == (1, 1)
    assert np.isfinite(w.scale2).all()
    assert (w.scale2 > 0).all()
    assert np.all((w.scales >= 1) & (w.scales <= 0x7E))  # neither 0, nor NaN, nor negative
    check_codes(x, w)


@given(matrices, st.sampled_from(LIKES))
@examples
def test_scales_are_nearest(x, like):
    w = quantize(x, like=like)
    amax = np.abs(x.astype(np.float64)).reshape(len(x), x.shape[1] // 16, 16).max(-1, initial=0)
    wanted = amax / 6 / w.scale2.astype(np.float64)
    underflows = amax / 6 < TINY32 if like == "compressed-tensors" else wanted < TINY32
    expected = np.clip(wanted, 2.0**-9 if like == "modelopt" else 0, 448)
    gap = np.abs(expected[..., None] - E4M3)
    zero = (amax == 0) | underflows | ((like == "compressed-tensors") & (expected < 2.0**-10 * (1 + 4 * U32)))
    # amax / 6, the quotient by scale2 and scale2 itself round; amax / 6 may be subnormal
    slack = 8 * U32 * expected + 2 * TINY32 / w.scale2
    replaced = zero & (w.scales == ZERO_SCALE[like])
    assert_within(np.where(replaced, 0, np.abs(E4M3[w.scales] - expected)), np.where(replaced, 0, gap.min(-1)), slack)
    assert np.all(w.scales[amax == 0] == ZERO_SCALE[like])
    assert np.all(nibbles(w.codes).reshape(*amax.shape, 16)[amax == 0] == 0)


@given(matrices, st.sampled_from(LIKES))
@examples
def test_error_of_each_block(x, like):
    """With a normal scale the largest magnitude meets 6 within 1/16, so a step is at most 17/16 of amax / 6.

    Rounding loses up to one step (half of the gap from 4 to 6), saturation up to a sixteenth of amax.
    """
    w = quantize(x, like=like)
    amax = np.abs(x.astype(np.float64)).reshape(len(x), x.shape[1] // 16, 16).max(-1, initial=0)
    normal = (amax / 6 / w.scale2 >= 2.0**-6) & (amax >= 2.0**-100)
    error = np.abs(x - exact(w)).reshape(*amax.shape, 16).max(-1, initial=0)
    assert_within(np.where(normal, error, 0), 0 * amax, 17 / 16 / 6 * amax * (1 + 8 * U32))


@given(matrices, st.sampled_from(LIKES))
@examples
def test_its_own_values_stay(x, like):
    """What a block with a code of 6 decodes to is quantized to itself under the same scale2, but for -0."""
    w = quantize(x, like=like)
    assume(w.scale2 >= 2.0**-100)  # products that are exact but for one rounding
    assume(float(w.scale2[0, 0]) * 2688 < F32_MAX)
    again = quantize(w.dequantize(), like=like, scale2=float(w.scale2[0, 0]))
    full = (nibbles(w.codes).reshape(*w.scales.shape, 16) & 7).max(-1, initial=0) == 7
    assert np.array_equal(again.scales[full], w.scales[full])
    values = [exact(v).reshape(*w.scales.shape, 16)[full] for v in (w, again)]
    assert np.array_equal(*values)


@given(matrices, st.sampled_from(LIKES), st.integers(-20, 20))
@examples
def test_powers_of_two_pass_through(x, like, p):
    amax = np.abs(x).max(initial=0)
    assume(amax == 0 or 2.0**-60 < amax < 2.0**60)
    x = np.where(np.abs(x) < 2.0**-60, 0, x).astype(np.float32)
    w, scaled = quantize(x, like=like), quantize(np.ldexp(x, p), like=like)
    assert_same_bytes(scaled.codes, w.codes)
    assert_same_bytes(scaled.scales, w.scales)
    assert_same_bytes(scaled.scale2, w.scale2 if amax == 0 else np.ldexp(w.scale2, p))


@given(matrices, st.sampled_from(LIKES), st.randoms())
@examples
def test_rows_and_signs(x, like, random):
    """A row does not see the others but through scale2, and a sign is only a sign."""
    w = quantize(x, like=like)
    order = random.sample(range(len(x)), len(x))
    assert_same_bytes(quantize(x[order], like=like).codes, w.codes[order])
    negated = quantize(-x, like=like)
    assert_same_bytes(negated.scales, w.scales)
    lost = (x != 0) & (nibbles(w.codes) == 0) & (nibbles(negated.codes) == 0)  # zero even before it is rounded
    assert np.all(np.abs(x[lost]) < TINY32 * (1 + np.repeat(E4M3[w.scales], 16, -1)[lost] * w.scale2))
    assert_same_bytes(nibbles(negated.codes), nibbles(w.codes) ^ np.where((x != 0) & ~lost, 8, 0).astype(np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@every
def test_every_number_of_16_bits(dtype, like):
    """All finite float16 (or all bfloat16 of a like range), so all binades under one scale2."""
    with np.errstate(invalid="ignore"):
        x = np.arange(1 << 16, dtype=np.uint16).view(np.float16 if dtype == np.float32 else dtype).astype(np.float32)
        x = np.where(np.abs(x) < 1e5, x, 0).reshape(-1, 256)
    w = quantize(x.astype(dtype), like=like)
    assert np.all((w.scales >= 1) & (w.scales <= 0x7E))
    check_codes(x, w)


# -- edges --


@every
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("shape", [(1, 16), (3, 48)], ids=str)
def test_all_zero(like, zero, shape):
    w = quantize(np.full(shape, zero, np.float32), like=like)
    assert_same_bytes(w.scale2, np.ones((1, 1), np.float32))
    assert np.all(w.scales == ZERO_SCALE[like])
    assert not w.codes.any()
    assert_same_bytes(w.dequantize(), np.zeros(shape, np.float32))


@every
def test_zero_blocks_and_negative_zeros(like):
    x = np.zeros((2, 48), np.float32)
    x[0, 16:32], x[1, :16], x[1, 40] = -0.0, -0.0, -3
    w = quantize(x, like=like)
    assert w.scales.tolist() == [[ZERO_SCALE[like]] * 3, [ZERO_SCALE[like]] * 2 + [0x7E]]
    assert np.flatnonzero(w.codes).tolist() == [24 + 20]
    assert w.codes[1, 20] == 0x0F
    assert_within(w.dequantize()[1, 40], -3, 3 * 4 * U32)


@every
def test_a_negative_number_that_rounds_to_zero_keeps_its_sign(like):
    x = np.full((1, 16), 6.0, np.float32)
    x[0, 1], x[0, 2] = -1e-3, -(2.0**-149)
    assert nibbles(quantize(x, like=like).codes)[0, :3].tolist() == [7, 8, 8]


@pytest.mark.parametrize("value", [2.0**-149, 2.0**-140, 1e-40, F32_TINY, 1e-37, 1e-36])
def test_tiny(value):
    """The smallest scale2 is the smallest normal f32."""
    x = np.full((1, 16), value, np.float32)
    w = quantize(x)
    assert w.scale2 == F32_TINY
    assert w.scales[0, 0] >= 1
    check_codes(x, w)
    w = quantize(x, like="compressed-tensors")  # the peer's fallback where 2688 / amax overflows
    assert_same_bytes(w.scale2, np.ones((1, 1), np.float32))
    assert (w.scales[0, 0], w.codes.any()) == (0x20, False)


@every
@pytest.mark.parametrize("value", [4000.0, 2688.0, 2.0**120, 2.0**127])
def test_large(like, value):
    x = np.full((2, 32), value, np.float32)
    x[1, 16:] = value / 1000
    w = quantize(x, like=like)
    assert (w.scales[0] == 0x7E).all()
    assert_within(w.dequantize()[0], x[0], 4 * U32 * x[0] if value < 2.0**126 else 2.0**-20 * x[0])
    check_codes(x, w)


def test_largest_float():
    x = np.full((1, 16), F32_MAX, np.float32)
    w = quantize(x)
    assert_within(w.dequantize(), x, 4 * U32 * F32_MAX)


@pytest.mark.parametrize(
    ("like", "value"),
    [*((like, value) for like in LIKES for value in (65504.0, 6e-5)), ("modelopt", 2.0**-24)],
)
def test_extremes_of_float16(like, value):
    x = np.full((1, 16), value, np.float16)
    w = quantize(x, like=like)
    check_codes(x, w)
    assert_within(w.dequantize(), x, 17 / 96 * x.astype(np.float64))


@every
@pytest.mark.parametrize("steps", [4, 5, 9, 23, 40, 1000])
def test_subnormal_float16(like, steps):
    """compressed-tensors divides by 6 in float16: 4 steps become 1, not 2/3, and the scale saturates at 448."""
    x = np.full((1, 16), steps * 2.0**-24, np.float16)
    w = quantize(x, like=like)
    assert (w.scales[0, 0], w.codes[0, 0]) == (0x7E, 0x77)
    check_codes(x.astype(np.float32), w)


@every
@pytest.mark.parametrize("shape", [(0, 32), (0, 0), (4, 0)], ids=str)
def test_empty(like, shape):
    w = quantize(np.zeros(shape, np.float32), like=like)
    assert w.shape == shape
    assert w.dequantize().shape == shape


# -- K that ends inside a block --


@every
@pytest.mark.parametrize("k", [1, 7, 15, 17, 20, 47])
def test_pad(like, k, rng):
    x = rng.standard_normal((5, k)).astype(np.float32)
    w = quantize(x, like=like, pad=True)
    padded = quantize(np.pad(x, [(0, 0), (0, -k % 16)]), like=like)
    assert w.shape == (5, k)
    for field in ("codes", "scales", "scale2"):
        assert_same_bytes(getattr(w, field), getattr(padded, field))
    assert not nibbles(w.codes)[:, k:].any()
    assert_same_bytes(w.dequantize(), padded.dequantize()[:, :k])
    check_codes(x, w)


def test_pad_where_nothing_is_missing(rng):
    x = rng.standard_normal((5, 32)).astype(np.float32)
    assert quantize(x, pad=True).same(quantize(x))


def test_k_is_refused():
    error = refusal(np.zeros((3, 20), np.float32))
    assert str(error) == ("K = 20 is not a multiple of 16: got (3, 20); pass pad=True, or leave this layer dense")


# -- refusals --


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("place", [(0, 0), (3, 17), (4, 31)], ids=str)
def test_not_finite(value, dtype, place):
    x = np.ones((5, 32), dtype)
    x[4, 31] = np.nan  # a later one
    x[place] = value
    error = refusal(x)
    assert error.index == list(place)
    assert str(error) == (
        f"the tensor holds a value that is not finite at {list(place)}: got {value}; "
        "repair the dense checkpoint, or leave this layer out with --ignore"
    )


def test_not_finite_in_a_later_chunk():
    x = np.ones((40, 1 << 14), np.float32)
    x[33, 5], x[39, 0] = np.inf, np.nan
    assert refusal(x).index == [33, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        np.ones((2, 16)),
        np.ones((2, 16), np.int8),
        np.ones((2, 16), ">f4"),
        np.ones((2, 16), ml_dtypes.float8_e4m3fn),
        np.ones(16, np.float32),
        np.ones((2, 2, 16), np.float32),
        np.ones((), np.float32),
    ],
    ids=lambda a: f"{a.dtype} {a.shape}",
)
def test_wrong_arrays(wrong):
    assert str(refusal(wrong)) == (
        f"cannot quantize this array: got {wrong.dtype} {wrong.shape}, expected (N, K) float32, bfloat16 or float16"
    )


# -- a given scale2 --


@every
def test_given_scale2_joins_exactly(like, rng):
    """Parts under the scale2 of the whole are the parts of the whole."""
    x = rng.standard_normal((12, 48)).astype(np.float32)
    whole = quantize(x, like="modelopt")
    parts = [quantize(part, scale2=float(whole.scale2[0, 0])) for part in (x[:5], x[5:])]
    assert Weight.concat(parts, "equal").same(whole)


@pytest.mark.parametrize("scale2", [0.5, np.float32(0.5), np.array(0.5, np.float32)])
@every
def test_given_scale2(like, scale2, rng):
    x = rng.uniform(-900, 900, (4, 32)).astype(np.float32)
    w = quantize(x, like=like, scale2=scale2)
    assert_same_bytes(w.scale2, np.full((1, 1), 0.5, np.float32))
    check_codes(x, w)


@every
def test_given_scale2_has_room_to_2688(like):
    """What is above would come back smaller; amax / 2688 itself, rounded, must fit."""
    x = np.full((1, 16), 448 * 6, np.float32)
    w = quantize(x, like=like, scale2=1.0)
    assert (w.scales[0, 0], w.codes[0, 0]) == (0x7E, 0x77)
    for amax in np.random.default_rng(0).lognormal(0, 3, 200).astype(np.float32):
        quantize(np.full((1, 16), amax, np.float32), like=like, scale2=amax / np.float32(2688))
    x[0, 3] = 2689
    error = refusal(x, like=like, scale2=1.0)
    assert error.index == [0, 0]
    assert str(error).startswith("a block needs a larger scale than scale2 leaves room for at [0, 0]: got 448.16")
    assert str(error).endswith(", expected at most 448; pass a larger scale2 (amax / 2688), or none")


@every
@pytest.mark.parametrize(("row", "k"), [(3, 64), (20, 1 << 14), (33, 1 << 14)])
def test_given_scale2_too_small_is_refused_by_position(like, row, k):
    x = np.ones((40, k), np.float32)
    x[row, 40], x[39, 0] = 6000, 7000
    error = refusal(x, like=like, scale2=1.0)
    assert error.index == [row, 2]
    assert error.got == 1000


@every
@pytest.mark.parametrize("scale2", [0.0, -1.0, np.nan, np.inf, -np.inf])
def test_given_scale2_must_be_positive(like, scale2):
    error = refusal(np.ones((1, 16), np.float32), like=like, scale2=scale2)
    assert str(error) == f"scale2 must be positive and finite: got {scale2}"


@every
@pytest.mark.parametrize("scale2", [2.0**-150, 3.5e38])
@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_given_scale2_must_be_positive_as_f32(like, scale2, fill):
    """As f32 these are 0 and Inf."""
    refusal(np.full((1, 16), fill, np.float32), like=like, scale2=scale2)


@every
@pytest.mark.parametrize("scale2", [2.0**-149, 1e-40, F32_TINY, 1e-37])
def test_given_scale2_may_be_tiny(like, scale2):
    """Zeros stay zeros under any scale2: no NaN, no warning."""
    w = quantize(np.zeros((1, 16), np.float32), like=like, scale2=scale2)
    assert w.scales.tolist() == [[ZERO_SCALE[like]]]
    assert not w.codes.any()


@every
@pytest.mark.parametrize("scale2", [2.0**-149, 1e-40, 1e-39])
def test_given_scale2_far_too_small(like, scale2):
    """The wanted scale overflows f32: refused as any other, without a warning."""
    error = refusal(np.ones((2, 16), np.float32), like=like, scale2=scale2)
    assert str(error).startswith("a block needs a larger scale than scale2 leaves room for at [0, 0]")


@every
def test_given_scale2_below_the_normal_range(like):
    """Steps of f32 that are as coarse as the numbers: still the nearest, still no division by zero."""
    x = np.array([[2.0**-149, -(2.0**-149), 2.0**-146, 0] * 4], np.float32)
    check_codes(x, quantize(x, like=like, scale2=2.0**-149))


# -- large tensors --


@every
def test_chunks_do_not_show(like, rng):
    x = (rng.standard_normal((40, 1 << 14)) * 0.02).astype(BF16)
    w = quantize(x, like=like)
    assert np.all(w.scales >= 1)
    scale = recipe_named("rtn").tensor_scale(np.float32(np.abs(x.astype(np.float32)).max()), like)
    for row in (0, 15, 16, 39):
        codes, scales = recipe_named("rtn").encode(x[row : row + 1].astype(np.float32), x.dtype, scale, like)
        assert_same_bytes(w.codes[row : row + 1], codes)
        assert_same_bytes(w.scales[row : row + 1], scales)


@pytest.mark.parametrize("view", [lambda a: a.T, lambda a: a[::-1, ::-1], lambda a: a[:, ::2], np.asfortranarray])
def test_views(view, rng):
    x = view(rng.standard_normal((32, 32)).astype(np.float32))
    before = x.copy()
    assert quantize(x).same(quantize(np.ascontiguousarray(x)))
    assert np.array_equal(x, before)


def test_read_only_input():
    x = golden("inputs_f32")["A"]
    assert not x.flags.writeable
    assert quantize(x).same(modelopt("A"))
