"""``add_norm``, ``gate`` and ``attend`` compiled; Numba is imported here, so this is loaded only to run.

Arrays are addresses, sizes are i64, and dtypes their numbers. Sums are in f32, in an order that LLVM fixes for a
processor: it may split them among lanes.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import carray, njit, prange, types

from halfbyte import jit
from halfbyte.kernels.cpu.activation_code import activate, exp
from halfbyte.kernels.cpu.scalars import F32_KIND, dot, f32_at, pointer_to, read, summing, write

_i64_at = pointer_to(types.int64)

_strict = njit(nogil=True, error_model="numpy")
_ONE = np.float32(1)


@_strict
def _normalize(kind, values, eps, count, scratch):
    """Divided by the root of the mean square, and rounded to the dtype, whose bits go to ``scratch``."""
    mean = dot(values, values, count) / np.float32(count)
    factor = _ONE / np.float32(math.sqrt(mean + eps))
    for i in range(count):
        values[i] *= factor
    if kind != F32_KIND:
        write(kind, scratch, count, values)


@_strict
def _size(kind):
    return 4 if kind == F32_KIND else 2


@jit.compiled
def add_norm(kind, m, h, x, residual, weight, eps, normed, total):
    """``halfbyte.kernels.step.AddNormArgs``; residual may be 0, and total then is not written."""
    values, other, size = np.empty(h, np.float32), np.empty(h, np.float32), _size(kind)
    for row in range(m):
        at = row * h * size
        read(kind, x + at, h, values)
        if residual:
            read(kind, residual + at, h, other)
            for i in range(h):
                values[i] += other[i]
            write(kind, total + at, h, values)
        _normalize(kind, values, np.float32(eps), h, normed + at)
        read(kind, weight, h, other)
        for i in range(h):
            values[i] *= other[i]
        write(kind, normed + at, h, values)


@jit.compiled
def gate(kind, m, width, activation, both, out):
    """``halfbyte.kernels.step.GateArgs``."""
    first, up, size = np.empty(width, np.float32), np.empty(width, np.float32), _size(kind)
    for row in range(m):
        read(kind, both + row * 2 * width * size, width, first)
        read(kind, both + (row * 2 + 1) * width * size, width, up)
        activate(activation, first, up, width)
        write(kind, out + row * width * size, width, first)


@summing
def _turned(kind, at, norm, eps, dim, cos, sin, values, other, to):
    """A head normalized, rotated and rounded, in ``values``; its bits go to the address ``to``."""
    read(kind, at, dim, values)
    if norm:
        _normalize(kind, values, eps, dim, to)
        read(kind, norm, dim, other)
        for i in range(dim):
            values[i] *= other[i]
        if kind != F32_KIND:
            write(kind, to, dim, values)
    half = dim // 2
    for i in range(half):
        other[i] = values[i] * cos[i] - values[half + i] * sin[i]
        other[half + i] = values[half + i] * cos[half + i] + values[i] * sin[half + i]
    for i in range(dim):
        values[i] = other[i]
    write(kind, to, dim, values)


@summing
def _attend_one(kind, sizes, index, qkv, cos, sin, positions, keys, values, q_norm, k_norm, eps, scale, window, out):
    """A key head of one sequence, and the query heads that share it."""
    heads, kv, dim, room = sizes
    row, head, group, size = index // kv, index % kv, heads // kv, _size(kind)
    p = carray(_i64_at(positions), row + 1)[row]
    first = max(0, p + 1 - window) if window else 0
    count = p + 1 - first
    turn_cos, turn_sin = carray(f32_at(cos + p * dim * 4), dim), carray(f32_at(sin + p * dim * 4), dim)
    own = qkv + row * (heads + 2 * kv) * dim * size
    cache = index * room * dim * size
    line, other = np.empty(dim, np.float32), np.empty(dim, np.float32)
    queries, sums = np.empty((group, dim), np.float32), np.zeros((group, dim), np.float32)
    scores = np.empty((group, count), np.float32)
    to = out + (row * heads + head * group) * dim * size
    for g in range(group):
        _turned(
            kind, own + (head * group + g) * dim * size, q_norm, eps, dim, turn_cos, turn_sin, queries[g], other,
            to + g * dim * size,
        )  # fmt: skip
        for i in range(dim):
            queries[g, i] *= scale
    place = cache + p * dim * size
    _turned(kind, own + (heads + head) * dim * size, k_norm, eps, dim, turn_cos, turn_sin, line, other, keys + place)
    read(kind, own + (heads + kv + head) * dim * size, dim, line)
    write(kind, values + place, dim, line)
    for t in range(count):
        at = keys + cache + (first + t) * dim * size
        if kind == F32_KIND:
            key = carray(f32_at(at), dim)
            for g in range(group):
                scores[g, t] = dot(queries[g], key, dim)
        else:
            read(kind, at, dim, line)
            for g in range(group):
                scores[g, t] = dot(queries[g], line, dim)
    for g in range(group):
        top = scores[g, 0]
        for t in range(count):
            top = max(top, scores[g, t])
        for t in range(count):
            scores[g, t] = exp(scores[g, t] - top)
        total = np.float32(0)
        for t in range(count):
            total += scores[g, t]
        other[0] = _ONE / total
        for t in range(count):
            scores[g, t] *= other[0]
    for t in range(count):
        at = values + cache + (first + t) * dim * size
        if kind == F32_KIND:
            value = carray(f32_at(at), dim)
            for g in range(group):
                weight = scores[g, t]
                for i in range(dim):
                    sums[g, i] += weight * value[i]
        else:
            read(kind, at, dim, line)
            for g in range(group):
                weight = scores[g, t]
                for i in range(dim):
                    sums[g, i] += weight * line[i]
    for g in range(group):
        write(kind, to + g * dim * size, dim, sums[g])


@jit.compiled
def attend(kind, batch, sizes, *rest):
    """``halfbyte.kernels.step.AttendArgs`` on one thread; ``sizes`` are Hq, Hkv, D and T; norms, window may be 0."""
    for index in range(batch * sizes[1]):
        _attend_one(kind, sizes, index, *rest)


@functools.partial(jit.compiled, parallel=True)
def attend_parallel(kind, batch, sizes, *rest):
    """The same on threads, for ``jit.run``."""
    for index in prange(batch * sizes[1]):
        _attend_one(kind, sizes, index, *rest)
