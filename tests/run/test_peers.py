"""nvidia-modelopt and compressed-tensors themselves: they quantize to our bytes and decode ours to our values."""

import warnings
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte.recipes import finite_amax, quantize, quantize_array, recipe_named
from halfbyte.weight import Weight, to_numpy, to_torch
from helpers import U32, assert_same_bytes, assert_within, exact, random_weight

BF16_HALF_ULP = 2.0**-8
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}


def gaussian(rng, n, k):
    return rng.standard_normal((n, k)) * 0.02


def outliers(rng, n, k):
    x = gaussian(rng, n, k)
    x[rng.random((n, k)) < 0.01] *= 300
    return x


def zero_rows(rng, n, k):
    x = gaussian(rng, n, k)
    x[::2] = 0
    x[1::3, :16] = -0.0
    return x


def many_scales(rng, n, k):
    """Rows of magnitudes from 2^-30 to 1: subnormal, smallest and replaced block scales."""
    return gaussian(rng, n, k) * np.exp2(-30 * rng.random((n, 1)))


def ties(rng, n, k):
    """Halves of E2M1 steps times powers of two, where a rounding decides."""
    x = rng.integers(-24, 25, (n, k)) / 4
    x[:, ::16] = 6
    return x * np.exp2(rng.integers(-8, 9, (n, 1)).astype(float))


def large(rng, n, k):
    return gaussian(rng, n, k) * 1e5


def half_subnormals(rng, n, k):
    """The smallest numbers of float16, where amax / 6 in that dtype rounds by up to a half."""
    x = rng.integers(-40, 41, (n, k)) * 2.0**-24
    x[0, 0] = 40 * 2.0**-24
    return x


FILLS = (gaussian, outliers, zero_rows, many_scales, ties, large, half_subnormals)
SHAPES = [(1, 16), (3, 48), (17, 80), (64, 256), (129, 1040)]


@pytest.fixture(scope="module")
def modelopt():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script(_method)?` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "transformers .* is not tested with current version of modelopt", UserWarning)
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    return NVFP4QTensor


@pytest.fixture(scope="module")
def ct():
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return SimpleNamespace(
        compressor=NVFP4PackedCompressor, scheme=scheme, qparams=calculate_qparams, gparam=generate_gparam
    )


def bytes_of(tensor):
    return tensor.view(torch.uint8).numpy()


def by_ct(ct, x, divisor=None):
    """Codes, scales and the divisor that compressed-tensors gives x, observed as its observers do."""
    blocks = x.reshape(x.shape[0], -1, 16)
    divisor = ct.gparam(x.float().min(), x.float().max()) if divisor is None else divisor
    scales, _ = ct.qparams(blocks.amin(-1), blocks.amax(-1), ct.scheme.weights, global_scale=divisor)
    state = {"weight": x, "weight_scale": scales, "weight_global_scale": divisor}
    return ct.compressor.compress(state, ct.scheme)


CASES = [
    pytest.param(fill, dtype, shape, i, id=f"{fill.__name__}-{dtype}-N{shape[0]}-K{shape[1]}")
    for i, fill in enumerate(FILLS)
    for dtype in DTYPES
    for shape in SHAPES
]


def made(fill, dtype, shape, seed):
    return fill(np.random.default_rng(seed), *shape).astype(DTYPES[dtype])


@pytest.mark.parametrize(("fill", "dtype", "shape", "seed"), CASES)
def test_modelopt_quantizes_to_our_bytes(modelopt, fill, dtype, shape, seed):
    x = made(fill, dtype, shape, seed)
    ours = quantize(x)
    theirs, scales, scale2 = modelopt.quantize(to_torch(x.copy()), 16)
    if not x.any():  # it writes NaN scales for a tensor of zeros, which we do not
        assert np.all(bytes_of(scales) & 0x7F == 0x7F)
        assert np.all(ours.scales == 0x38)
        return
    assert_same_bytes(scale2.reshape(()), ours.scale2.reshape(()))
    assert_same_bytes(bytes_of(scales), ours.scales)
    assert_same_bytes(theirs._quantized_data, ours.codes)


@pytest.mark.parametrize("k", [1, 20, 47])
def test_modelopt_pads_as_we_do(modelopt, k):
    x = made(gaussian, "f32", (5, k), k)
    ours = quantize(x, pad=True)
    theirs, scales, scale2 = modelopt.quantize(to_torch(x.copy()), 16)
    assert_same_bytes(scale2.reshape(()), ours.scale2.reshape(()))
    assert_same_bytes(bytes_of(scales), ours.scales)
    assert_same_bytes(theirs._quantized_data, ours.codes)


@pytest.mark.parametrize("amax", [0.05, 1.0, 3.7])
def test_modelopt_with_a_shared_scale2(modelopt, amax):
    x = made(outliers, "f32", (17, 80), 1)
    x *= np.float32(amax * 0.8) / np.abs(x).max()
    scale2 = np.float32(amax) / np.float32(2688)
    ours = quantize(x, scale2=float(scale2))
    theirs, scales, _ = modelopt.quantize(to_torch(x.copy()), 16, weights_scaling_factor_2=torch.tensor(scale2))
    assert_same_bytes(bytes_of(scales), ours.scales)
    assert_same_bytes(theirs._quantized_data, ours.codes)


@pytest.mark.parametrize(("fill", "dtype", "shape", "seed"), CASES)
def test_compressed_tensors_quantizes_to_our_bytes(ct, fill, dtype, shape, seed):
    x = made(fill, dtype, shape, seed)
    ours = quantize(x, like="compressed-tensors")
    theirs = by_ct(ct, to_torch(x.copy()))
    assert_same_bytes(bytes_of(theirs["weight_scale"]), ours.scales)
    assert_same_bytes(theirs["weight_packed"], ours.codes)
    divisor = theirs["weight_global_scale"]
    assert divisor.shape == (1,)
    assert_same_bytes((1 / divisor).reshape(()), ours.scale2.reshape(()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_compressed_tensors_with_a_shared_divisor(ct, dtype):
    """Fused parts: the least divisor of all serves each."""
    parts = [made(outliers, dtype, (17, 80), seed) for seed in range(3)]
    rtn = recipe_named("rtn")
    scales = [rtn.tensor_scale(finite_amax(x), "compressed-tensors") for x in parts]
    shared = min(scales, key=lambda scale: scale.divisor)
    assert len({float(scale.divisor) for scale in scales}) == 3
    for x in parts:
        codes, blocks = quantize_array(x, rtn, shared, "compressed-tensors")
        theirs = by_ct(ct, to_torch(x.copy()), torch.tensor([shared.divisor]))
        assert_same_bytes(bytes_of(theirs["weight_scale"]), blocks)
        assert_same_bytes(theirs["weight_packed"], codes)


@pytest.mark.parametrize("like", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("amax", [2.0**-149, 1e-40, 1e-37, 1e-35, 1e-34, 1e30, 1e38, float(np.finfo(np.float32).max)])
def test_extreme_magnitudes(modelopt, ct, like, amax):
    """Where ModelOpt's own scale2 would be below the normal range, ours is the smallest normal number instead."""
    x = np.full((2, 32), amax, np.float32)
    x[1] /= 37
    ours = quantize(x, like=like)
    if like == "compressed-tensors":
        theirs = by_ct(ct, to_torch(x.copy()))
        codes, scales = theirs["weight_packed"], theirs["weight_scale"]
    else:
        scale2 = (
            None if np.float32(amax) / np.float32(2688) >= np.finfo(np.float32).tiny else to_torch(ours.scale2.copy())
        )
        theirs, scales, scale2 = modelopt.quantize(to_torch(x.copy()), 16, weights_scaling_factor_2=scale2)
        codes = theirs._quantized_data
        assert_same_bytes(scale2.reshape(()), ours.scale2.reshape(()))
    assert_same_bytes(bytes_of(scales), ours.scales)
    assert_same_bytes(codes, ours.codes)


# quantized tensors, and one with every finite scale byte and every pair of codes
WEIGHTS = {fill.__name__: quantize(made(fill, "f32", (17, 80), 2)) for fill in FILLS}
WEIGHTS["random bytes"] = random_weight(np.random.default_rng(0), 64, 256)


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_modelopt_dequantizes_to_our_values(modelopt, weight: Weight):
    """It rounds scale * scale2 and then the product, we only the product: three half ulps apart at most."""
    w = weight.torch()
    theirs = modelopt(w.shape, torch.float32, w.codes).dequantize(
        dtype=torch.float32,
        scale=w.scales.view(torch.float8_e4m3fn),
        double_scale=w.scale2.reshape(()),
        block_sizes={-1: 16},
    )
    assert_within(theirs, weight.dequantize(), 3 * U32 * np.abs(exact(weight)))


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_compressed_tensors_decompresses_to_our_values(ct, weight: Weight):
    """Both end in bf16; before that each has two roundings of f32, and the reciprocal that we store has one."""
    w = weight.torch()
    state = {
        "weight_packed": w.codes,
        "weight_scale": w.scales.view(torch.float8_e4m3fn),
        "weight_global_scale": (1 / w.scale2).reshape(1),
    }
    theirs = ct.compressor.decompress(state, ct.scheme)["weight"]
    assert theirs.dtype == torch.bfloat16
    bound = (2 * BF16_HALF_ULP + 5 * U32) * (1 + BF16_HALF_ULP) * np.abs(exact(weight))
    assert_within(to_numpy(theirs).astype(np.float64), weight.dequantize("bfloat16").astype(np.float64), bound)
    assert np.mean(to_numpy(theirs) == weight.dequantize("bfloat16")) > 0.99
