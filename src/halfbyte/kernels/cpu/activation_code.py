"""The activations of gates, compiled; Numba is imported here, so this is loaded only to run."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from halfbyte.kernels.cpu.scalars import bits_of, float_of
from halfbyte.kernels.experts import SWIGLU_ALPHA

SILU, GELU, GELU_TANH, RELU2, SWIGLU = range(5)
"""Numbers of ``halfbyte.kernels.step.ACTIVATIONS``, then of ``halfbyte.kernels.experts.SWIGLU``."""

_strict = njit(nogil=True, error_model="numpy")

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_NEAREST = np.float32(3 << 22)
_SMALLEST, _LARGEST = np.float32(-87.3), np.float32(88.3)
_ONE, _HALF, _SQRT_HALF = np.float32(1), np.float32(0.5), np.float32(0.7071067811865476)
_TANH = np.float32(0.7978845608028654)
_ALPHA = np.float32(SWIGLU_ALPHA)
_POLYNOMIAL = tuple(
    map(np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5))
)


@_strict
def exp(x):
    """e to the x, off by at most 2 units in the last place; 0 and infinity end near 1e-38 and 2e38."""
    low = x if x > _SMALLEST or np.isnan(x) else _SMALLEST
    top = low if low < _LARGEST or np.isnan(low) else _LARGEST
    turned = top * _LOG2E + _NEAREST
    whole = turned - _NEAREST
    r = top - whole * _LN2_HIGH - whole * _LN2_LOW
    p = _POLYNOMIAL[0]
    for i in range(1, 6):
        p = p * r + _POLYNOMIAL[i]
    power = np.uint32(np.uint32(bits_of(turned) + np.uint32(127)) << np.uint32(23))
    return (p * r * r + r + _ONE) * float_of(power)


@_strict
def activate(activation, first, up, count):
    """``first``, f32, becomes its activation times ``up``."""
    if activation == SILU:
        for i in range(count):
            first[i] = first[i] / (_ONE + exp(-first[i])) * up[i]
    elif activation == GELU:
        for i in range(count):
            first[i] *= _HALF * (_ONE + np.float32(math.erf(first[i] * _SQRT_HALF))) * up[i]
    elif activation == GELU_TANH:
        for i in range(count):
            g = first[i]
            inner = _TANH * (g + np.float32(0.044715) * g * g * g)
            first[i] = g * _HALF * (_ONE + np.float32(math.tanh(inner))) * up[i]
    elif activation == RELU2:
        for i in range(count):
            g = max(first[i], np.float32(0))
            first[i] = g * g * up[i]
    else:
        for i in range(count):
            first[i] = (up[i] + _ONE) * (first[i] / (_ONE + exp(-_ALPHA * first[i])))
