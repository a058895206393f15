"""What several test files use: golden tensors, random weights, values without a rounding, and one comparison."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from halfbyte.checkpoint.reader import open_checkpoint
from halfbyte.weight import Mxfp4Weight, Weight, to_numpy

GOLDEN = Path(__file__).parent / "golden"
INPUTS = ("A", "B", "C", "D")

U32 = 2.0**-24
"""Half a unit in the last place of f32, relative: what one rounding may add."""
TINY32 = 2.0**-149
"""The step of f32 subnormals: two roundings below the normal range."""


@cache
def golden(name: str) -> dict[str, Any]:
    """The tensors of tests/golden/<name>.safetensors as read-only NumPy arrays; float8 as those of ml_dtypes."""
    with open_checkpoint(GOLDEN / f"{name}.safetensors") as file:
        tensors = {tensor: file.read(tensor) for tensor in file.tensors}
    for array in tensors.values():
        array.setflags(write=False)
    return tensors


def modelopt(name: str, file: str = "modelopt_f32") -> Weight:
    """The golden ModelOpt weight of an input."""
    g = golden(file)
    return Weight(codes=g[f"{name}.weight"], scales=g[f"{name}.weight_scale"], scale2=g[f"{name}.weight_scale_2"])


def random_weight(
    rng: np.random.Generator,
    n: int,
    k: int,
    experts: tuple[int, ...] = (),
    *,
    per_row: bool = False,
    input_scale: bool = False,
    pre_scale: bool = False,
) -> Weight:
    """Every code byte and every finite, non-negative scale byte may come up; codes beyond K are 0."""
    blocks = -(-k // 16)
    codes = rng.integers(0, 256, (*experts, n, blocks * 8), np.uint8)
    codes[..., -(-k // 2) :] = 0
    if k % 2:
        codes[..., k // 2] &= 15
    return Weight(
        codes=codes,
        scales=rng.integers(0, 0x7F, (*experts, n, blocks), np.uint8),
        scale2=rng.uniform(1e-4, 1e-3, (*experts, n if per_row else 1, 1)).astype(np.float32),
        input_scale=rng.uniform(0.001, 0.1, experts).astype(np.float32) if input_scale else None,
        pre_scale=rng.uniform(0.5, 2, k).astype(ml_dtypes.bfloat16) if pre_scale else None,
        k=k,
    )


def random_mxfp4(rng: np.random.Generator, n: int, k: int, experts: tuple[int, ...] = ()) -> Mxfp4Weight:
    """Every code byte and every scale byte but NaN may come up; codes beyond K are 0."""
    blocks = -(-k // 32)
    codes = rng.integers(0, 256, (*experts, n, blocks * 16), np.uint8)
    codes[..., -(-k // 2) :] = 0
    if k % 2:
        codes[..., k // 2] &= 15
    return Mxfp4Weight(codes=codes, scales=rng.integers(0, 0xFF, (*experts, n, blocks), np.uint8), k=k)


def nibbles(packed: Any) -> Any:
    """(..., K/2) u8 to (..., K), low nibble first; on its own feet, so that it can judge the library's."""
    packed = to_numpy(packed)
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def exact(weight: Weight) -> Any:
    """The values, (*E, N, K) f64: no product of a code, a scale and an f32 needs more bits. By ml_dtypes' tables."""
    codes = nibbles(weight.codes).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = to_numpy(weight.scales).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    values = codes * np.repeat(scales, 16, -1) * to_numpy(weight.scale2).astype(np.float64)
    return values[..., : weight.k]


def assert_within(actual: Any, expected: Any, bound: Any) -> None:
    """``|actual - expected| <= bound`` for every element, NaN nowhere."""
    actual, expected = (np.asarray(to_numpy(a), np.float64) for a in (actual, expected))
    assert actual.shape == expected.shape
    error, bound = np.abs(actual - expected), np.broadcast_to(np.asarray(bound, np.float64), expected.shape)
    wrong = np.argwhere(~(error <= bound))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {error.size} elements out of bounds, the first at {list(at)}: got {actual[at]!r}, "
            f"expected {expected[at]!r} within {bound[at]:.3g}, off by {error[at]:.3g}"
        )


def assert_same_bytes(actual: Any, expected: Any) -> None:
    """Equal shape and bytes, whatever the dtypes of one byte; names the first difference."""
    actual, expected = (np.asarray(to_numpy(a), order="C") for a in (actual, expected))
    assert actual.shape == expected.shape
    assert actual.dtype.itemsize == expected.dtype.itemsize
    x, y = (a.reshape(-1).view(f"u{a.dtype.itemsize}").reshape(a.shape) for a in (actual, expected))
    wrong = np.argwhere(x != y)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        digits = 2 * x.dtype.itemsize
        raise AssertionError(
            f"{len(wrong)} of {x.size} differ, the first at {list(at)}: "
            f"got {int(x[at]):0{digits}X}, expected {int(y[at]):0{digits}X}"
        )
