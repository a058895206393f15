"""What the tests of the run world share: random weights, float64 references, bounds, and where kernels run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.kernels import KERNELS, Call, Fp8Call
from halfbyte.kernels.base import capability
from halfbyte.layouts import LAYOUTS, Fragments
from halfbyte.numerics import BLOCK, decode_e2m1, decode_e4m3
from halfbyte.weight import Weight, float_dtype, to_numpy, to_torch

LINEAR = [kernel for kernel in KERNELS if kernel.op == "linear"]
DTYPES = ("float32", "bfloat16", "float16")
HALF_ULP = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The last rounding, relative to the result; a float32 sum is not rounded again."""


HERE: list[dict[str, Any]] = [{"library": "numpy", "device": "cpu"}, {"library": "torch", "device": "cpu"}]
"""Fields of a call, for each library and device of this machine."""
if torch.cuda.is_available():
    HERE.append({"library": "torch", "device": "cuda", "capability": capability(torch.cuda.current_device())})


def random_weight(
    n: int, k: int, *, seed: int = 0, per_row: bool = False, pre_scale: bool = False, scales: tuple[int, int] = (40, 80)
) -> Weight:
    """Every code byte, block-scale bytes within ``scales``; the padding of the last block is not zero."""
    rng = np.random.default_rng([seed, n, k])
    blocks = -(-k // BLOCK)
    return Weight(
        codes=rng.integers(0, 256, (n, blocks * BLOCK // 2), np.uint8),
        scales=rng.integers(*scales, (n, blocks), np.uint8),
        scale2=rng.uniform(0.01, 0.02, (n, 1) if per_row else ()).astype(np.float32),
        pre_scale=rng.uniform(0.5, 2, k).astype(np.float32) if pre_scale else None,
        k=k,
    )


def random_floats(shape: tuple[int, ...], dtype: str, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(float_dtype(dtype))


def exact_linear(x: np.ndarray, weight: Weight, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(M, N) f64 results, and the sums of magnitudes that their error bound scales with."""
    w = decode_e2m1(weight.codes).astype(np.float64)
    w *= np.repeat(decode_e4m3(weight.scales), BLOCK, axis=-1)
    w = w[:, : weight.k] * weight.scale2
    x = x.astype(np.float64)
    if weight.pre_scale is not None:
        x = x * weight.pre_scale
    b = np.zeros(1) if bias is None else bias.astype(np.float64)
    return x @ w.T + b, np.abs(x) @ np.abs(w.T) + np.abs(b)


def assert_within_bound(
    y: object, x: np.ndarray, weight: Weight, bias: np.ndarray | None, out_dtype: str, kernel: str = "cpu"
) -> None:
    """Each element within the derived bound of a kernel, and the whole within a relative Frobenius error."""
    got = to_numpy(y).astype(np.float64)
    expected, magnitude = exact_linear(x, weight, bias)
    own = 1 if kernel.startswith("reference") else 24
    roundings = weight.k + own + (weight.pre_scale is not None) + (bias is not None)
    assert got.shape == expected.shape
    assert np.all(np.abs(got - expected) <= (roundings * 2.0**-24 + HALF_ULP[out_dtype]) * magnitude)
    # Errors of random sign add up to the root of their number; twice that also covers the worst case of up to four.
    sums, last = 2 * np.sqrt(roundings) * 2.0**-24 * np.linalg.norm(magnitude), np.linalg.norm(expected)
    assert np.linalg.norm(got - expected) <= sums + HALF_ULP[out_dtype] * last


def call_like(**changes: object) -> Call:
    fields = {
        "layout": LAYOUTS[0],
        "shape": (32, 64),
        "per_row": False,
        "pre_scale": False,
        "rows": 1,
        "dtype": "bfloat16",
        "out_dtype": "bfloat16",
        "device": "cpu",
        "library": "torch",
        "bias": False,
    }
    return Call(**(fields | changes))


def fp8_call_like(**changes: object) -> Fp8Call:
    """What decides of (32, 64) in fragments by 512 tokens on Hopper, with changes."""
    fields: dict[str, Any] = {
        "layout": Fragments(), "shape": (32, 64), "per_row": False, "pre_scale": False, "rows": 512,
        "dtype": "bfloat16", "out_dtype": "bfloat16", "device": "cuda", "library": "torch", "bias": False,
        "capability": 90,
    }  # fmt: skip
    return Fp8Call(**(fields | changes))


def places(**axes: Iterable[object]) -> Iterator[tuple[Any, ...]]:
    """(kernel, library, device, *changes) for each call that a kernel for linear takes on this machine.

    Args:
        axes: values for fields of the call.
    """
    for kernel in LINEAR:
        for place in HERE:
            for values in product(*axes.values()):
                if not kernel.refuse(call_like(**place, **dict(zip(axes, values, strict=True)))):
                    yield kernel, place["library"], place["device"], *values


def everywhere(**axes: Iterable[object]) -> pytest.MarkDecorator:
    """A test of every kernel for linear, in each library and on each device, for each of the calls that it takes."""
    cases = [
        pytest.param(*case, id="-".join(str(part) for part in (case[0].name, *case[1:]))) for case in places(**axes)
    ]
    return pytest.mark.parametrize(("kernel", "library", "device", *axes), cases)


def moved(a: np.ndarray | Weight | None, library: str, device: str = "cpu") -> object:
    """The array or weight in ``library`` on ``device``."""
    if a is None or library == "numpy":
        return a
    return a.torch(device) if isinstance(a, Weight) else to_torch(np.array(a), device)
