"""Products with dense rows compiled; Numba is imported here, so this is loaded only to run."""

from __future__ import annotations

import functools

import numpy as np
from numba import carray, prange

from halfbyte import jit
from halfbyte.kernels.cpu.scalars import BF16_KIND, F32_KIND, dot, f32_at, float_of, read, summing, u16_at, write

UNIT = 64
"""Rows that a thread takes at a time."""


@summing
def _dot_bf16(x, row, count):
    total = np.float32(0)
    for i in range(count):
        total += x[i] * float_of(np.uint32(np.uint32(row[i]) << np.uint32(16)))
    return total


@functools.partial(jit.compiled, parallel=True)
def product(kind, m, n, k, x, weight, bias, out):
    """``halfbyte.kernels.dense.DenseArgs``, for ``jit.run``: arrays are addresses, a bias may be 0."""
    size = 4 if kind == F32_KIND else 2
    values = np.empty((m, k), np.float32)
    for t in range(m):
        read(kind, x + t * k * size, k, values[t])
    for index in prange((n + UNIT - 1) // UNIT):
        low = index * UNIT
        count = min(UNIT, n - low)
        sums, line = np.empty((m, UNIT), np.float32), np.empty(max(k, UNIT), np.float32)
        for row in range(count):
            at = weight + (low + row) * k * size
            if kind == F32_KIND:
                floats = carray(f32_at(at), k)
                for t in range(m):
                    sums[t, row] = dot(values[t], floats, k)
            elif kind == BF16_KIND:
                words = carray(u16_at(at), k)
                for t in range(m):
                    sums[t, row] = _dot_bf16(values[t], words, k)
            else:
                read(kind, at, k, line)
                for t in range(m):
                    sums[t, row] = dot(values[t], line, k)
        if bias:
            read(kind, bias + low * size, count, line)
            for t in range(m):
                for row in range(count):
                    sums[t, row] += line[row]
        for t in range(m):
            write(kind, out + (t * n + low) * size, count, sums[t])
