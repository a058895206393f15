"""Device code of ``halfbyte.kernels.cuda.routing``, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.cuda.fragments_code import widened

LEAST = tl.constexpr(-2147483648)
NAN = tl.constexpr(2147483647)


@triton.jit
def _order(value):
    """i32 in the order of floats: 0 and -0 alike, NaN above all."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(value != value, NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # noqa: PLR0124 - NaN


@triton.jit
def _first(order, number, AXIS: tl.constexpr):
    """The first number of those with the largest order, along the last axis."""
    top = tl.max(order, AXIS, keep_dims=True)
    return tl.min(tl.where(order == top, number, NAN), AXIS, keep_dims=True)


@triton.jit
def _score(value, most, total, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        return tl.exp(value - most) / total
    return 1 / (1 + tl.exp(-value))


@triton.jit
def route(
    logits, bias, indices, weights, E, scale,
    GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, TOP: tl.constexpr, KP: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr,
    TINY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A token, in a warp.

    Args:
        logits: (T, E) floats.
        bias: (E,) f32, if BIAS.
        indices: (T, TOP) i32 or i64.
        weights: (T, TOP) f32.
        E: experts, GROUPS times their size.
        scale: of the weights.
        GROUPS: of experts.
        GP: GROUPS or more, a power of two.
        SP: the size of a group or more, a power of two.
        TOP: experts of a token.
        KP: TOP or more, a power of two.
        TOP_GROUPS: groups that are chosen.
        BEST: scores that add up to a group's, at most its size.
        SOFTMAX: whether scores are that of all; else each is a sigmoid.
        RENORMALIZE: whether weights are divided by their sum.
        BIAS: whether there is one.
        TINY: what is added to a sum of sigmoids.
        EARLY: it starts before the kernel ahead of it ends, and so may the one behind.
    """
    size = E // GROUPS
    column = tl.arange(0, GP * SP)
    number = column // SP * size + column % SP
    there = (column % SP < size) & (column // SP < GROUPS)
    token = tl.program_id(0).to(tl.int64)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = widened(tl.load(logits + token * E + number, mask=there, other=0.0), True)
    most = tl.max(tl.where(there, value, -float("inf")), 0)
    total = 1.0
    if SOFTMAX:
        total = tl.sum(tl.where(there, tl.exp(value - most), 0.0), 0)
    score = _score(value, most, total, SOFTMAX)
    if BIAS:
        by = score + tl.load(bias + number, mask=there, other=0.0)
    elif GROUPS > 1:
        by = score
    else:
        by = value
    order = tl.where(there, _order(by), LEAST)

    if GROUPS > 1:
        group = tl.arange(0, GP)
        member = tl.arange(0, SP)[None, :]
        left = tl.reshape(order, [GP, SP])
        values = tl.reshape(by, [GP, SP])
        sums = tl.zeros([GP], tl.float32)
        for _ in tl.static_range(BEST):
            best = member == _first(left, member, 1)
            sums += tl.sum(tl.where(best, values, 0.0), 1)
            left = tl.where(best, LEAST, left)
        ahead = tl.where(group < GROUPS, _order(sums), LEAST)
        kept = tl.zeros([GP], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best = group == _first(ahead, group, 0)
            kept = tl.where(best, 1, kept)
            ahead = tl.where(best, LEAST, ahead)
        kept = tl.reshape(tl.broadcast_to(kept[:, None], [GP, SP]), [GP * SP])
        order = tl.where(kept > 0, order, LEAST)

    place = tl.arange(0, KP)
    chosen = tl.zeros([KP], tl.int32)
    for k in tl.static_range(TOP):
        first = _first(order, column, 0)
        chosen = tl.where(place == k, first, chosen)
        order = tl.where(column == first, LEAST, order)
    chosen = chosen // SP * size + chosen % SP
    value = widened(tl.load(logits + token * E + chosen, mask=place < TOP, other=0.0), True)
    own = tl.where(place < TOP, _score(value, most, total, SOFTMAX), 0.0)
    if RENORMALIZE:
        own_sum = tl.sum(own, 0)
        if SOFTMAX:
            own = own / own_sum
        else:
            own = own / (own_sum + TINY)
    to = token * TOP + place
    tl.store(indices + to, chosen.to(indices.dtype.element_ty), mask=place < TOP)
    tl.store(weights + to, own * scale, mask=place < TOP)
