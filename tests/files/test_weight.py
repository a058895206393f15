"""The canonical weight: what its constructor accepts and refuses, what cutting and joining keep, what it decodes to."""

import copy
import pickle
import re
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import WeightError
from halfbyte.kinds import DenseWeight, Fp8Weight, Int8Weight
from halfbyte.weight import LossyWarning, Weight
from helpers import INPUTS, U32, assert_same_bytes, assert_within, exact, golden, modelopt, random_weight

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
DTYPES = {"float32": np.dtype("f4"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("f2")}
HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def zeros(n=4, k=32, experts=(), scale2=1.0, **fields):
    blocks = -(-k // 16)
    codes, scales = np.zeros((*experts, n, blocks * 8), np.uint8), np.zeros((*experts, n, blocks), np.uint8)
    return Weight(codes=codes, scales=scales, scale2=scale2, k=k, **fields)


def ramp(*shape):
    """1, 2, 3, ... as f32."""
    return 1 + np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def refusal(make):
    with pytest.raises(WeightError) as caught:
        make()
    return str(caught.value)


# -- scale2 --


@pytest.mark.parametrize("value", [0.5, np.float64(0.5), np.array(0.5), np.array([0.5]), np.array([[0.5]], np.float16)])
@pytest.mark.parametrize("experts", [(), (3,), (2, 3)], ids=str)
def test_one_scale2_for_all(value, experts):
    w = zeros(experts=experts, scale2=value)
    assert w.scale2.dtype == np.float32
    assert_same_bytes(w.scale2, np.full((*experts, 1, 1), 0.5, np.float32))
    assert not w.per_row


@pytest.mark.parametrize(
    ("experts", "n", "given", "normal"),
    [
        ((), 4, (4,), (4, 1)),
        ((), 4, (4, 1), (4, 1)),
        ((), 1, (1, 1), (1, 1)),
        ((3,), 4, (3,), (3, 1, 1)),
        ((3,), 4, (3, 1), (3, 1, 1)),
        ((3,), 4, (3, 1, 1), (3, 1, 1)),
        ((3,), 4, (3, 4), (3, 4, 1)),
        ((3,), 4, (3, 4, 1), (3, 4, 1)),
        ((3,), 1, (3,), (3, 1, 1)),
        ((3,), 1, (3, 1), (3, 1, 1)),  # both readings are the same
        ((4,), 4, (4, 4), (4, 4, 1)),
        ((4,), 4, (4, 1, 1), (4, 1, 1)),
        ((4,), 4, (4, 4, 1), (4, 4, 1)),
        ((2, 3), 4, (2, 3), (2, 3, 1, 1)),
        ((2, 2), 2, (2, 2), (2, 2, 1, 1)),
        ((2, 3), 4, (2, 3, 1), (2, 3, 1, 1)),
        ((2, 3), 4, (2, 3, 4), (2, 3, 4, 1)),
        ((2, 3), 4, (2, 3, 4, 1), (2, 3, 4, 1)),
        ((1,), 4, (1,), (1, 1, 1)),
        ((), 0, (0,), (0, 1)),
        ((0,), 4, (0, 1, 1), (0, 1, 1)),
    ],
    ids=str,
)
def test_scale2_shapes(experts, n, given, normal):
    w = zeros(n, 32, experts, scale2=ramp(*given))
    assert_same_bytes(w.scale2, ramp(*given).reshape(normal))
    assert w.per_row == (normal[-2] != 1)


@pytest.mark.parametrize("given", [(4,), (4, 1)], ids=str)
def test_rows_shared_by_experts(given):
    w = zeros(4, 32, (3,), scale2=ramp(*given))
    assert_same_bytes(w.scale2, np.broadcast_to(ramp(4, 1), (3, 4, 1)))


@pytest.mark.parametrize("given", [(4,), (4, 1)], ids=str)
def test_ambiguous_scale2(given):
    """Four experts of four rows."""
    assert refusal(lambda: zeros(4, 32, (4,), scale2=ramp(*given))) == (
        f"scale2 is ambiguous: got {given}, expected (4, 1, 1) per tensor or (4, 4, 1) per row"
    )


@pytest.mark.parametrize(
    ("experts", "given"),
    [
        ((), (3,)),
        ((), (1, 4)),
        ((), (4, 2)),
        ((), (1, 1, 1)),
        ((3,), (2,)),
        ((3,), (1, 3)),
        ((3,), (4, 3)),
        ((3,), (12,)),
    ],
    ids=str,
)
def test_scale2_that_does_not_fit(experts, given):
    per_tensor, per_row = (*experts, 1, 1), (*experts, 4, 1)
    assert refusal(lambda: zeros(4, 32, experts, scale2=ramp(*given))) == (
        f"scale2 does not fit the codes: got {given}, expected {per_tensor} per tensor or {per_row} per row"
    )


@pytest.mark.parametrize("value", [0.25, np.array([0.25])])
@pytest.mark.parametrize("experts", [(), (2,), (2, 3)], ids=str)
def test_input_scale(value, experts):
    w = zeros(experts=experts, input_scale=value)
    assert_same_bytes(w.input_scale, np.full(experts, 0.25, np.float32))
    assert_same_bytes(zeros(experts=experts, input_scale=ramp(*experts)).input_scale, ramp(*experts))


def test_input_scale_that_does_not_fit():
    assert refusal(lambda: zeros(input_scale=ramp(2))) == "input_scale does not fit: got (2,), expected ()"
    assert (
        refusal(lambda: zeros(experts=(3,), input_scale=ramp(2))) == "input_scale does not fit: got (2,), expected (3,)"
    )


# -- shapes and dtypes --


CODES, SCALES = np.zeros((4, 16), np.uint8), np.zeros((4, 2), np.uint8)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"codes": CODES.astype(np.float32)},
            "codes are of the wrong dtype: got float32, expected uint8 or float8_e4m3fn",
        ),
        (
            {"scales": SCALES.astype(np.int32)},
            "scales are of the wrong dtype: got int32, expected uint8 or float8_e4m3fn",
        ),
        (
            {"scales": SCALES.view(ml_dtypes.float8_e5m2)},
            "scales are of the wrong dtype: got float8_e5m2, expected uint8 or float8_e4m3fn",
        ),
        ({"codes": [[0] * 16] * 4}, "codes are of the wrong dtype: got list, expected uint8 or float8_e4m3fn"),
        ({"codes": CODES[0]}, "codes need at least two axes: got (16,), expected (*E, N, K/2)"),
        (
            {"codes": CODES[:, :12], "scales": SCALES},
            "a row of codes holds K = 24, which is not a multiple of 16: got (4, 12), "
            "expected whole blocks of 8 bytes; pad the layer with zero codes and pass the true K as k=",
        ),
        ({"scales": SCALES[:, :1]}, "the block scales do not fit the codes: got (4, 1), expected (4, 2)"),
        ({"scales": SCALES[:3]}, "the block scales do not fit the codes: got (3, 2), expected (4, 2)"),
        ({"scales": SCALES.T}, "the block scales do not fit the codes: got (2, 4), expected (4, 2)"),
        ({"scales": SCALES[None]}, "the block scales do not fit the codes: got (1, 4, 2), expected (4, 2)"),
        ({"k": 16}, "k does not end in the last block: got 16, expected about 32"),
        ({"k": 33}, "k does not end in the last block: got 33, expected about 32"),
        ({"pre_scale": ramp(31)}, "pre_scale does not fit K: got (31,), expected (32,)"),
        ({"pre_scale": ramp(32), "k": 31}, "pre_scale does not fit K: got (32,), expected (31,)"),
        ({"pre_scale": ramp(1, 32)}, "pre_scale does not fit K: got (1, 32), expected (32,)"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_refusals(fields, text):
    assert refusal(lambda: Weight(**({"codes": CODES, "scales": SCALES, "scale2": 1.0} | fields))) == text


@pytest.mark.parametrize("k", [-1, -15])
def test_negative_k(k):
    refusal(lambda: Weight(codes=CODES[:, :0], scales=SCALES[:, :0], scale2=1.0, k=k))


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn], ids=str)
def test_views_of_bytes(dtype, rng):
    w = random_weight(rng, 4, 32)
    other = Weight(codes=w.codes.view(np.int8), scales=w.scales.view(dtype), scale2=w.scale2)
    assert other.codes.dtype == other.scales.dtype == np.uint8
    assert other.same(w)
    assert np.shares_memory(other.codes, w.codes)
    assert np.shares_memory(other.scales, w.scales)


def test_facts(rng):
    w = random_weight(rng, 5, 20, (2, 3), per_row=True, input_scale=True, pre_scale=True)
    assert (w.kind, w.shape, w.n, w.k, w.experts, w.per_row) == ("nvfp4", (2, 3, 5, 20), 5, 20, (2, 3), True)
    assert w.nbytes == 2 * 3 * 5 * (16 + 2 + 4)
    assert repr(w) == "Weight(shape=(2, 3, 5, 20), per-row scale2, input_scale, pre_scale, numpy)"
    assert repr(zeros()) == "Weight(shape=(4, 32), per-tensor scale2, numpy)"
    assert zeros(1, scale2=ramp(1, 1)).per_row is False


# -- immutable --


def test_fields_are_set_once(rng):
    w = random_weight(rng, 4, 32)
    for name in ("codes", "scale2", "shape", "k", "anything"):
        with pytest.raises(AttributeError, match=f"immutable.* {name}|property"):
            setattr(w, name, None)
        with pytest.raises(AttributeError):
            delattr(w, name)
    with pytest.raises(AttributeError, match="Weight has no attribute 'anything'"):
        w.anything  # noqa: B018


ARRAYS = ("codes", "scales", "scale2", "input_scale", "pre_scale")


def writable(weight):
    return [name for name in ARRAYS if getattr(weight, name) is not None and getattr(weight, name).flags.writeable]


REMADE = {
    "as made": lambda w: w,
    "replace": lambda w: w.replace(k=w.k),
    "numpy": lambda w: w.numpy(),
    "rows": lambda w: w.rows(0, 2),
    "columns": lambda w: w.columns(0, 16),
    "concat": lambda w: Weight.concat([w, w]),
    "split": lambda w: w.split([1, 3])[1],
    "unstack": lambda w: w.unstack()[1],
    "stack": lambda w: Weight.stack(w.unstack()),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
}


@pytest.mark.parametrize("remade", REMADE.values(), ids=REMADE)
def test_arrays_cannot_be_written(remade, rng):
    w = random_weight(rng, 4, 32, (2,), per_row=True, input_scale=True, pre_scale=True)
    assert writable(remade(w)) == []


def test_the_callers_array_stays_writable():
    codes = CODES.copy()
    w = Weight(codes=codes, scales=SCALES, scale2=1.0)
    codes[0, 0] = 1
    assert not w.codes.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        w.codes[0, 0] = 2


def test_replace(rng):
    w = random_weight(rng, 4, 20, per_row=True, input_scale=True, pre_scale=True)
    assert w.replace().same(w)
    assert w.replace(input_scale=None).input_scale is None
    assert_same_bytes(w.replace(scale2=2.0).scale2, np.full((1, 1), 2, np.float32))
    assert w.replace(k=32, pre_scale=None).shape == (4, 32)
    with pytest.raises(TypeError):
        w.replace(scale=1.0)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies(again, rng):
    w = random_weight(rng, 4, 20, (2,), per_row=True, input_scale=True, pre_scale=True)
    assert again(w).same(w)
    assert again(w).shape == w.shape
    assert again(Weight.null((2, 4, 20))).shape == (2, 4, 20)
    assert again(Weight.null((4, 20))).is_null
    f = Fp8Weight(data=np.arange(32, dtype=np.uint8).reshape(4, 8), scale=ramp(2, 2), block=(2, 4), error=0.5)
    assert_same_bytes(again(f).dequantize(), f.dequantize())
    assert (again(f).block, again(f).error) == ((2, 4), 0.5)


# -- same --


def test_same(rng):
    w = random_weight(rng, 4, 32, (2,), input_scale=True, pre_scale=True)
    assert w.same(w)
    assert w.same(random_weight(np.random.default_rng(0), 4, 32, (2,), input_scale=True, pre_scale=True))
    nan = w.replace(scale2=np.nan, scales=np.full_like(w.scales, 0x7F))
    assert nan.same(nan.replace())
    plus, minus = zeros(), zeros().replace(codes=np.full_like(CODES, 0x88))
    assert np.array_equal(plus.dequantize(), minus.dequantize())
    others = {
        "codes": w.codes ^ 8,
        "scales": w.scales ^ 1,
        "scale2": np.nextafter(w.scale2, np.float32(1)),
        "input_scale": None,
        "pre_scale": w.pre_scale.astype(np.float32),  # the same numbers
        "k": 31,
    }
    for name, value in others.items():
        changes = {name: value} if name != "k" else {"k": 31, "pre_scale": w.pre_scale[:31]}
        assert not w.same(w.replace(**changes))
        assert not w.replace(**changes).same(w)
    assert not plus.same(minus)
    assert not w.same(w.replace(scale2=np.repeat(w.scale2, 4, -2)))  # the same numbers, one for each row
    assert zeros(scale2=0.0).same(zeros(scale2=0.0))
    assert not zeros(scale2=0.0).same(zeros(scale2=-0.0))


# -- values --


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 48), (5, 20), (1, 1), (0, 32), (4, 0)], ids=str)
@pytest.mark.parametrize("experts", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("per_row", [False, True], ids=["per tensor", "per row"])
def test_dequantize(dtype, shape, experts, per_row, rng):
    w = random_weight(rng, *shape, experts, per_row=per_row)
    values = w.dequantize(dtype)
    assert values.dtype == DTYPES[dtype]
    assert values.shape == w.shape
    assert_same_bytes(values, exact(w).astype(np.float32).astype(DTYPES[dtype]))
    second = 0 if dtype == "float32" else U32 * (1 + HALF_ULP[dtype])
    assert_within(values, exact(w), (HALF_ULP[dtype] + second) * np.abs(exact(w)) + SMALLEST[dtype])


def test_dequantize_all_codes_and_scales():
    """Each of 16 codes with each of 256 scales, and a scale2 that needs all 24 bits."""
    codes = np.tile(np.frombuffer(bytes.fromhex("1032547698badcfe"), np.uint8), (256, 1))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    w = Weight(codes=codes, scales=scales, scale2=np.float32(1) + np.float32(2.0**-23))
    numbers = ~np.isnan(E4M3)
    assert_same_bytes(w.dequantize()[numbers], exact(w)[numbers].astype(np.float32))
    assert np.isnan(w.dequantize()[~numbers]).all()
    assert w.rows(0, 1).dequantize().tolist() == [[0.0] * 16]


def test_dequantize_leaves_the_weight_alone(rng):
    w = random_weight(rng, 4, 32)
    before = w.dequantize()
    w.dequantize()[...] = 5
    assert_same_bytes(w.dequantize(), before)


@pytest.mark.parametrize("view", [np.asfortranarray, lambda a: a[::-1], lambda a: np.repeat(a, 2, 0)[::2]])
def test_dequantize_of_views(view, rng):
    w = random_weight(rng, 6, 48, per_row=True)
    other = Weight(codes=view(w.codes), scales=view(w.scales), scale2=view(w.scale2))
    assert_same_bytes(other.dequantize(), exact(other).astype(np.float32))


def test_unknown_dtype(rng):
    text = refusal(lambda: random_weight(rng, 4, 32).dequantize("float64"))
    assert text == "unknown dtype: got 'float64', expected float32 or bfloat16 or float16"


@pytest.mark.parametrize("name", INPUTS)
def test_golden_modelopt(name):
    """ModelOpt rounds scale * scale2 first and then the product: two roundings where we have one, so 3 half ulps."""
    w = modelopt(name)
    assert_within(w.dequantize(), golden("modelopt_f32")[f"{name}.dequant_f32"], 3 * U32 * np.abs(exact(w)))


@pytest.mark.parametrize("name", INPUTS)
def test_golden_compressed_tensors(name):
    """bf16 of code * (scale / divisor): two f32 roundings; ours has those of 1 / divisor and of the product."""
    g = golden("compressed_tensors")
    w = Weight(
        codes=g[f"{name}.weight_packed"],
        scales=g[f"{name}.weight_scale"],
        scale2=np.float32(1) / g[f"{name}.weight_global_scale"],
    )
    bound = (2 * HALF_ULP["bfloat16"] * (1 + 2 * U32) + 4 * U32) * np.abs(exact(w))
    assert_within(w.dequantize("bfloat16"), g[f"{name}.decompressed"], bound)


@pytest.mark.parametrize("name", INPUTS)
def test_golden_torchao(name):
    g = golden("torchao")
    w = Weight(codes=g[f"{name}.two.qdata"], scales=g[f"{name}.two.scale"], scale2=g[f"{name}.two.per_tensor_scale"])
    assert_within(w.dequantize(), g[f"{name}.two.dequant_f32"], 3 * U32 * np.abs(exact(w)))


@pytest.mark.parametrize("name", ["A", "B", "C"])
@pytest.mark.parametrize("kind", ["f32.gs", "bf16.gs", "f32.nogs", "bf16.nogs"])
def test_golden_mlx(name, kind):
    """MLX keeps the amax: scale2 is amax / 2688, one more rounding on either side."""
    g = golden("mlx_cpu")
    at = f"{name}.{kind}"
    scale2 = g[f"{at}.global_scale"] / np.float32(2688) if kind.endswith(".gs") else 1.0
    w = Weight(codes=g[f"{at}.weight"], scales=g[f"{at}.scales"], scale2=scale2)
    assert_within(w.dequantize(), g[f"{at}.dequant_f32"], 5 * U32 * np.abs(exact(w)))


def test_golden_unscaled():
    assert_same_bytes(modelopt("D").replace(scale2=1.0).dequantize(), golden("layouts")["D.dequant_unscaled_f32"])


# -- rows and columns --


@given(st.data())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_rows(data):
    w = random_weight(
        np.random.default_rng(0), 6, 20, data.draw(st.sampled_from([(), (2,)])), per_row=data.draw(st.booleans())
    )
    a = data.draw(st.integers(0, 6))
    b = data.draw(st.integers(a, 6))
    part = w.rows(a, b)
    assert part.shape == (*w.experts, b - a, 20)
    assert_same_bytes(part.dequantize(), w.dequantize()[..., a:b, :])
    assert_same_bytes(part.codes, w.codes[..., a:b, :])


@pytest.mark.parametrize("experts", [(), (2,)], ids=str)
@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 16), (16, 48), (32, 56), (48, 56), (0, 56), (48, 48)])
def test_columns(a, b, experts, rng):
    w = random_weight(rng, 3, 56, experts, per_row=True, input_scale=True, pre_scale=True)
    part = w.columns(a, b)
    assert part.shape == (*experts, 3, b - a)
    assert_same_bytes(part.dequantize(), w.dequantize()[..., a:b])
    assert_same_bytes(part.pre_scale, w.pre_scale[a:b])
    assert_same_bytes(part.scale2, w.scale2)
    assert_same_bytes(part.input_scale, w.input_scale)


def test_columns_and_rows_that_cannot_be_cut(rng):
    w = random_weight(rng, 3, 56)
    assert refusal(lambda: w.columns(0, 24)) == (
        "columns 0..24 of K = 56 cut a block of 16; cut at multiples of 16: K has 4 blocks"
    )
    assert refusal(lambda: w.columns(8, 16)).startswith("columns 8..16 of K = 56 cut a block")
    assert refusal(lambda: w.columns(56, 56)).startswith("columns 56..56 of K = 56 cut a block")
    assert refusal(lambda: w.columns(0, 64)) == "columns 0..64 are not within 0..56"
    assert refusal(lambda: w.columns(32, 16)) == "columns 32..16 are not within 0..56"
    assert refusal(lambda: w.rows(0, 4)) == "rows 0..4 are not within 0..3"
    assert refusal(lambda: w.rows(-1, 2)) == "rows -1..2 are not within 0..3"


# -- concat and split --


def fused():
    """(parts, g) of the golden q/k/v."""
    g = golden("layouts2")
    parts = [
        Weight(codes=g[f"F.{x}.weight"], scales=g[f"F.{x}.weight_scale"], scale2=g[f"F.{x}.weight_scale_2"])
        for x in "qkv"
    ]
    return parts, g


def test_golden_fusion_is_exact():
    parts, g = fused()
    w = Weight.concat(parts)
    assert_same_bytes(w.codes, g["F.fused.weight"])
    assert_same_bytes(w.scales, g["F.fused.weight_scale"])
    assert_same_bytes(w.scale2[:, 0], g["F.fused.weight_scale_2_rows"])
    assert [part.same(other) for part, other in zip(w.split([16, 16, 16]), parts, strict=True)] == [True] * 3


def common(parts):
    """concat to one scale2, and the error that it states."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        w = Weight.concat(parts, policy="common")
    assert [c.category for c in caught] == [LossyWarning]
    assert caught[0].filename == __file__
    match = re.fullmatch(
        r"concat to a common scale2 rounded the block scales: relative error (\S+)", str(caught[0].message)
    )
    return w, float(match[1])


def relative_error(w, parts):
    before = np.concatenate([exact(p) for p in parts], -2)
    return np.linalg.norm(exact(w) - before) / np.linalg.norm(before)


def test_golden_fusion_to_a_common_scale2():
    parts, g = fused()
    w, error = common(parts)
    assert_same_bytes(w.codes, g["F.fused.weight"])
    assert_same_bytes(w.scales, g["F.common.weight_scale"])
    assert_same_bytes(w.scale2.reshape(()), g["F.common.weight_scale_2"])
    assert_within(error, relative_error(w, parts), 0.006 * relative_error(w, parts))  # three digits are printed
    assert error > 0.001


@pytest.mark.parametrize("experts", [(), (2,)], ids=str)
@pytest.mark.parametrize("k", [48, 20])
def test_concat_exact(experts, k, rng):
    parts = [random_weight(rng, n, k, experts, per_row=n == 5, pre_scale=False) for n in (3, 5, 1, 0)]
    w = Weight.concat(parts)
    assert w.shape == (*experts, 9, k)
    assert w.per_row
    assert_same_bytes(w.dequantize(), np.concatenate([p.dequantize() for p in parts], -2))
    for part, other in zip(w.split([3, 5, 1]), parts, strict=False):
        assert part.same(other)


def test_concat_keeps_one_scale2(rng):
    pre, scale2 = ramp(32), np.float32(0.3)
    parts = [random_weight(rng, n, 32).replace(scale2=scale2, input_scale=0.5, pre_scale=pre) for n in (3, 4)]
    for policy in ("exact", "equal", "common"):
        w = Weight.concat(parts, policy)
        assert_same_bytes(w.scale2, np.full((1, 1), scale2))
        assert_same_bytes(w.input_scale, np.float32(0.5))
        assert_same_bytes(w.pre_scale, pre)
        assert w.split([3, 4])[1].same(parts[1])
    assert Weight.concat(parts[:1]).same(parts[0])


def test_concat_equal_refuses(rng):
    parts = [random_weight(rng, 2, 32).replace(scale2=s) for s in (0.5, 0.25)]
    assert refusal(lambda: Weight.concat(parts, "equal")) == (
        "the parts have different scale2: got [0.5, 0.25]; "
        'use policy="exact" (per-row scale2), "shift" (powers of two only) or "common" (rounds)'
    )


def test_concat_equal_compares_numbers(rng):
    parts = [random_weight(rng, 2, 32).replace(scale2=s) for s in (0.5, np.array([0.5, 0.5]))]
    assert_same_bytes(Weight.concat(parts, "equal").dequantize(), np.concatenate([p.dequantize() for p in parts]))


@pytest.mark.parametrize("experts", [(), (2,)], ids=str)
def test_concat_common(experts, rng):
    parts = [random_weight(rng, n, 48, experts, per_row=n == 5) for n in (3, 5, 2)]
    w, error = common(parts)
    largest = np.max([p.scale2.max(-2) for p in parts], axis=0)[..., None]
    assert_same_bytes(w.scale2, largest)
    assert_same_bytes(w.codes, np.concatenate([p.codes for p in parts], -2))
    wanted = np.concatenate([E4M3[p.scales] * p.scale2.astype(np.float64) / largest for p in parts], -2)
    gap = np.abs(wanted[..., None] - E4M3[:0x7F])
    assert_within(np.abs(E4M3[w.scales] - wanted), gap.min(-1), 2 * U32 * wanted)  # nearest, but for the f32 ratio
    assert_within(error, relative_error(w, parts), 0.006 * relative_error(w, parts))
    assert error > 0


def test_concat_common_by_a_power_of_two_is_exact(rng):
    a = random_weight(rng, 4, 32)
    a = a.replace(scales=0x40 + a.scales % 16)
    w = Weight.concat([a, a.replace(scale2=a.scale2 / 4)], policy="common")  # nothing rounds, so nothing warns
    assert_same_bytes(exact(w), np.concatenate([exact(a), exact(a) / 4]))


@pytest.mark.parametrize("sizes", [(4, 0), (0, 4), (0, 3, 0, 1), (0, 4, 4)], ids=str)
@pytest.mark.parametrize("per_row", [False, True])
def test_concat_with_empty_parts(sizes, per_row, rng):
    """An empty part has nothing to say about scale2."""
    parts = [random_weight(rng, n, 32, per_row=per_row) for n in sizes]
    before = np.concatenate([exact(p) for p in parts])
    assert_same_bytes(exact(Weight.concat(parts)), before)
    filled = [p for p in parts if p.n]
    if per_row or len(filled) > 1:
        w, error = common(parts)
        assert_same_bytes(w.scale2.reshape(()), max(p.scale2.max() for p in filled))
        assert_within(error, relative_error(w, parts), 0.006 * relative_error(w, parts))
    else:
        assert_same_bytes(exact(Weight.concat(parts, "equal")), before)


def test_concat_of_nothing_but_empty_parts(rng):
    for per_row in (False, True):
        parts = [random_weight(rng, 0, 32, per_row=per_row) for _ in range(2)]
        for policy in ("exact", "equal", "common"):
            assert Weight.concat(parts, policy).shape == (0, 32)


def test_concat_refuses(rng):
    a = random_weight(rng, 2, 32, input_scale=True, pre_scale=True)
    assert refusal(lambda: Weight.concat([])) == "concat needs at least one weight"
    assert refusal(lambda: Weight.concat([a, a], "lossy")) == (
        "unknown policy: got 'lossy', expected 'exact', 'equal', 'shift' or 'common'"
    )
    assert refusal(lambda: Weight.concat([a, random_weight(rng, 2, 48)])) == (
        "part 1 has another K or E: got (2, 48), expected (*(), N, 32)"
    )
    assert "another K or E" in refusal(lambda: Weight.concat([a, a.replace(k=31, pre_scale=a.pre_scale[:31])]))
    assert "another K or E" in refusal(lambda: Weight.concat([a, random_weight(rng, 2, 32, (1,))]))
    for name in ("input_scale", "pre_scale"):
        for value in (None, getattr(a, name) * 2):
            assert refusal(lambda n=name, v=value: Weight.concat([a, a, a.replace(**{n: v})])) == (
                f"the {name} of part 2 differs from that of part 0; "
                f"decide it first, for example with part.replace({name}=None)"
            )
    assert "another rank holds it" in refusal(lambda: Weight.concat([a, Weight.null((2, 32))]))


def test_split(rng):
    w = random_weight(rng, 6, 20, (2,), per_row=True, input_scale=True, pre_scale=True)
    parts = w.split([1, 0, 5])
    assert [p.shape for p in parts] == [(2, 1, 20), (2, 0, 20), (2, 5, 20)]
    assert Weight.concat(parts).same(w)
    assert_same_bytes(parts[2].dequantize(), w.dequantize()[:, 1:])
    assert refusal(lambda: w.split([1, 2])) == "the sizes do not add up to N: got [1, 2], expected 6"
    assert refusal(lambda: w.split([7, -1])) == "the sizes do not add up to N: got [7, -1], expected 6"
    assert refusal(lambda: w.split([])) == "the sizes do not add up to N: got [], expected 6"


def test_split_is_per_tensor_where_rows_agree(rng):
    w = random_weight(rng, 6, 32).replace(scale2=np.array([1, 1, 2, 3, 3, 3], np.float32))
    same, differ, last = w.split([2, 2, 2])
    assert (same.per_row, differ.per_row, last.per_row) == (False, True, False)
    assert_same_bytes(last.scale2, np.full((1, 1), 3, np.float32))
    # experts whose rows agree each for itself
    w = random_weight(rng, 2, 32, (2,)).replace(scale2=np.array([[1, 1], [2, 2]], np.float32)[..., None])
    assert_same_bytes(w.split([2])[0].scale2, np.array([1, 2], np.float32).reshape(2, 1, 1))


# -- experts --


@pytest.mark.parametrize("inner", [(), (3,)], ids=str)
@pytest.mark.parametrize("full", [False, True])
def test_stack(inner, full, rng):
    one = random_weight(rng, 4, 20, inner, pre_scale=True).pre_scale
    experts = [random_weight(rng, 4, 20, inner, per_row=full and i == 1, input_scale=full) for i in range(3)]
    experts = [e.replace(pre_scale=one) for e in experts]
    w = Weight.stack(experts)
    assert w.shape == (3, *inner, 4, 20)
    assert w.per_row == full
    for back, expert in zip(w.unstack(), experts, strict=True):
        assert_same_bytes(back.dequantize(), expert.dequantize())
        assert (back.input_scale is None) == (not full)
        assert back.same(expert) or (full and not expert.per_row)
    assert Weight.stack(w.unstack()).same(w)


def test_stack_as_many_experts_as_rows(rng):
    """E = N, where shapes say little."""
    experts = [random_weight(rng, 3, 32, per_row=i == 2, input_scale=True) for i in range(3)]
    w = Weight.stack(experts)
    assert_same_bytes(w.dequantize(), np.stack([e.dequantize() for e in experts]))
    assert_same_bytes(w.unstack()[2].scale2, experts[2].scale2)


def test_stack_refuses(rng):
    a = random_weight(rng, 2, 32, input_scale=True, pre_scale=True)
    assert refusal(lambda: Weight.stack([])) == "stack needs at least one weight"
    assert refusal(lambda: Weight.stack([a, random_weight(rng, 3, 32)])) == (
        "expert 1 has another shape: got (3, 32), expected (2, 32)"
    )
    assert refusal(lambda: Weight.stack([a, a.replace(input_scale=None)])) == (
        "expert 1 has an input_scale and expert 0 none, or the reverse"
    )
    assert refusal(lambda: Weight.stack([a, a.replace(pre_scale=a.pre_scale * 2)])) == (
        "the pre_scale of expert 1 differs from that of expert 0"
    )
    assert refusal(a.unstack) == "this weight has no expert axis: got (2, 32)"


def test_golden_bmm_is_the_transpose_of_each_expert():
    g = golden("layouts2")
    w = Weight(
        codes=g["F.bmm.weight"].transpose(0, 2, 1),
        scales=g["F.bmm.weight_scale"].transpose(0, 2, 1),
        scale2=g["F.bmm.weight_scale_2"],
    )
    parts, _ = fused()
    held = [any(np.array_equal(e.dequantize(), p.dequantize()) for p in parts) for e in w.unstack()]
    assert held == [True, True]


def test_null():
    w = Weight.null((2, 4, 32))
    assert w.is_null
    assert w.shape == (2, 4, 32)
    assert repr(w) == "Weight.null((2, 4, 32))"
    assert not zeros().is_null
    for touch in (
        lambda: w.codes,
        lambda: w.per_row,
        lambda: w.nbytes,
        w.dequantize,
        w.numpy,
        w.unstack,
        w.replace,
        lambda: w.rows(0, 1),
        lambda: w.columns(0, 16),
        lambda: w.split([4]),
        lambda: w.same(zeros(experts=(2,))),
        lambda: Weight.concat([w, w]),
        lambda: Weight.stack([w, w]),
    ):
        assert refusal(touch) == "this weight is null: another rank holds it; route its tokens to that rank"


# -- true K --


@pytest.mark.parametrize("k", [17, 20, 31, 32])
def test_true_k(k, rng):
    w = random_weight(rng, 3, k)
    assert w.shape == (3, k)
    assert w.codes.shape == (3, 16)
    assert w.dequantize().shape == (3, k)
    assert w.rows(1, 3).k == w.replace(scale2=1.0).k == w.numpy().k == k
    assert Weight.concat([w, w]).shape == (6, k)
    assert Weight.stack([w, w]).unstack()[1].shape == (3, k)
    assert w.columns(16, k).shape == (3, k - 16)


# -- FP8 --


DATA = np.arange(252, dtype=np.uint8).reshape(18, 14) % 0x7F


@pytest.mark.parametrize(
    ("scale", "kind"),
    [
        (0.5, "tensor"),
        (ramp(), "tensor"),
        (ramp(1), "tensor"),
        (ramp(1, 1), "tensor"),
        (ramp(18), "row"),
        (ramp(18, 1), "row"),
    ],
    ids=str,
)
def test_fp8(scale, kind):
    w = Fp8Weight(data=DATA.view(ml_dtypes.float8_e4m3fn), scale=scale)
    assert (w.kind, w.granularity, w.shape, w.block) == ("fp8", kind, (18, 14), None)
    assert w.scale.shape == ((18, 1) if kind == "row" else (1, 1))
    assert w.data.dtype == np.uint8
    expected = E4M3[DATA] * np.asarray(scale, np.float64).reshape(w.scale.shape)
    for dtype, numpy in DTYPES.items():
        assert_same_bytes(w.dequantize(dtype), expected.astype(np.float32).astype(numpy))


@pytest.mark.parametrize("block", [(1, 1), (4, 4), (8, 16), (18, 14), (128, 128), (1, 14)], ids=str)
def test_fp8_blocks(block):
    grid = (-(-18 // block[0]), -(-14 // block[1]))
    scale = ramp(*grid) / 7
    w = Fp8Weight(data=DATA, scale=scale, block=block)
    assert w.granularity == "block"
    n, k = np.mgrid[:18, :14]
    expected = E4M3[DATA] * scale[n // block[0], k // block[1]].astype(np.float64)
    assert_same_bytes(w.dequantize(), expected.astype(np.float32))


def test_fp8_experts():
    data = np.stack([DATA, DATA[::-1]])
    for scale, kind in ((ramp(2), "tensor"), (ramp(2, 18), "row"), (ramp(18), "row")):
        w = Fp8Weight(data=data, scale=scale)
        assert (w.shape, w.granularity) == ((2, 18, 14), kind)
        per_row = np.broadcast_to(scale if scale.shape != (2,) else scale[:, None], (2, 18))
        assert_same_bytes(w.dequantize(), (E4M3[data] * per_row[..., None]).astype(np.float32))
    w = Fp8Weight(data=data, scale=ramp(2, 5, 4), block=(4, 4))
    for e in range(2):
        one = Fp8Weight(data=data[e], scale=ramp(2, 5, 4)[e], block=(4, 4))
        assert_same_bytes(w.dequantize()[e], one.dequantize())


def test_int8():
    data = np.arange(-128, 124, dtype=np.int8).reshape(18, 14)
    for scale in (0.3, ramp(18) / 7):
        w = Int8Weight(data=data, scale=scale, pre_scale=ramp(14), error=0.01)
        assert (w.kind, w.shape, w.error, w.scale.shape) == ("int8", (18, 14), 0.01, (np.size(scale), 1))
        expected = data.astype(np.float64) * w.scale.astype(np.float64)
        for dtype, numpy in DTYPES.items():
            assert_same_bytes(w.dequantize(dtype), expected.astype(np.float32).astype(numpy))
    assert repr(w) == "Int8Weight(shape=(18, 14), scale (18, 1), numpy)"
    assert not any(a.flags.writeable for a in (w.data, w.scale, w.pre_scale))
    stacked = Int8Weight(data=data.reshape(2, 9, 14), scale=[0.5, 2.0])
    assert_same_bytes(stacked.dequantize(), data.reshape(2, 9, 14) * np.array([0.5, 2], np.float32).reshape(2, 1, 1))
    assert refusal(lambda: Int8Weight(data=data.view(np.uint8), scale=1.0)) == (
        "data are of the wrong dtype: got uint8, expected int8"
    )
    assert refusal(lambda: Int8Weight(data=data[0], scale=1.0)) == (
        "INT8 data need two axes: got (14,), expected (*E, N, K)"
    )
    assert refusal(lambda: Int8Weight(data=data, scale=ramp(14))).startswith("the scale does not fit the data")
    assert refusal(lambda: Int8Weight(data=data, scale=1.0, pre_scale=ramp(18))).startswith("pre_scale does not fit K")


def test_fp8_facts():
    w = Fp8Weight(data=DATA, scale=ramp(18), input_scale=np.array([0.5]), error=0.0143)
    assert_same_bytes(w.input_scale, np.float32(0.5))
    assert w.error == 0.0143
    assert repr(w) == "Fp8Weight(shape=(18, 14), scale (18, 1), numpy)"
    with pytest.raises(AttributeError, match="a Fp8Weight is immutable"):
        w.scale = 1
    for a in (w.data, w.scale, w.input_scale):
        assert not a.flags.writeable


@pytest.mark.parametrize(
    "fields",
    [
        {"data": DATA[0]},
        {"data": DATA[None], "scale": ramp(1, 4, 14)},
        {"data": DATA.astype(np.float32)},
        {"scale": ramp(14)},
        {"scale": ramp(1, 14)},
        {"scale": ramp(1, 18)},  # a row of scales is not a column of them
        {"scale": ramp(2, 9)},
        {"scale": ramp(18, 14)},
        {"scale": ramp(4, 5), "block": (4, 4)},  # (5, 4) transposed
        {"scale": ramp(2, 10), "block": (4, 4)},
        {"scale": ramp(18), "block": (4, 4)},
        {"input_scale": ramp(2)},
    ],
    ids=lambda fields: " ".join(f"{name} {getattr(value, 'shape', value)}" for name, value in fields.items()),
)
def test_fp8_refuses(fields):
    refusal(lambda: Fp8Weight(**({"data": DATA, "scale": 1.0} | fields)))


def test_fp8_refusal_text():
    assert refusal(lambda: Fp8Weight(data=DATA, scale=ramp(3))) == (
        "the scale does not fit the data: got (3,), expected (1, 1) per tensor or (18, 1) per row"
    )
    assert refusal(lambda: Fp8Weight(data=DATA, scale=ramp(3), block=(8, 8))) == (
        "the scale does not fit the data: got (3,), expected (3, 2)"
    )
    assert refusal(lambda: Fp8Weight(data=DATA[0], scale=1.0)) == (
        "FP8 data need two axes: got (14,), expected (*E, N, K)"
    )


# -- dense --


@pytest.mark.parametrize("source", [*DTYPES.values(), np.dtype("f8")], ids=str)
def test_dense(source, rng):
    data = rng.standard_normal((3, 5)).astype(source)
    w = DenseWeight(data)
    assert (w.kind, w.shape) == ("dense", (3, 5))
    for dtype, numpy in DTYPES.items():
        assert_same_bytes(w.dequantize(dtype), data.astype(numpy))
    with pytest.raises(WeightError, match="unknown dtype"):
        w.dequantize("int8")
    with pytest.raises(AttributeError):
        w.data = None
    assert DenseWeight(np.zeros(())).shape == ()
