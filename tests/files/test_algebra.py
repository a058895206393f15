"""What can be done to a weight without changing a value: other orders, the shares of ranks, powers of two moved."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import WeightError
from halfbyte.ops import linear
from halfbyte.shifts import common_exponents
from halfbyte.weight import Weight
from helpers import assert_same_bytes, exact, random_weight

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def refusal(make):
    with pytest.raises(WeightError) as caught:
        make()
    return str(caught.value)


def full(rng, n, k, experts=(), per_row=True):
    return random_weight(rng, n, k, experts, per_row=per_row, input_scale=True, pre_scale=True)


def with_scales(scales, scale2=1.0):
    """Rows of one block each; the codes are 1.0."""
    scales = np.array(scales, np.uint8).reshape(-1, 1)
    return Weight(codes=np.full((len(scales), 8), 0x22, np.uint8), scales=scales, scale2=scale2)


# -- rows in another order --


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("experts", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("k", [48, 20])
def test_permute_rows_is_dequantize_then_permute(k, experts, per_row, rng):
    w, order = full(rng, 7, k, experts, per_row), rng.permutation(7)
    done = w.permute_rows(order)
    assert_same_bytes(done.dequantize(), w.dequantize()[..., order, :])
    assert_same_bytes(done.codes, w.codes[..., order, :])
    assert_same_bytes(done.pre_scale, w.pre_scale)
    assert_same_bytes(done.input_scale, w.input_scale)
    assert done.permute_rows(order, inverse=True).same(w)
    assert w.permute_rows(order, inverse=True).permute_rows(order).same(w)


def test_permute_rows_by_hand():
    w = with_scales([0x38, 0x40, 0x48], scale2=np.array([1, 10, 100], np.float32))  # 1, 2 and 4
    assert w.permute_rows([2, 0, 1]).dequantize()[:, 0].tolist() == [400, 1, 20]
    assert w.permute_rows([2, 0, 1], inverse=True).dequantize()[:, 0].tolist() == [20, 400, 1]
    assert w.permute_rows((0, 1, 2)).same(w)
    assert w.rows(0, 0).permute_rows([]).shape == (0, 16)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ([0, 1], "an index of rows has the wrong length: got 2, expected 4"),
        ([0, 1, 2, 3, 0], "an index of rows has the wrong length: got 5, expected 4"),
        ([0, 1, 1, 2], "not a permutation of rows: got 1 more than once, 3 never"),
        ([3, 3, 3, 3], "not a permutation of rows: got 3 more than once, 0 never"),
        ([0, 1, 4, 3], "an index of rows leaves its range at [2]: got 4, expected 0..3"),
        ([0, -1, 2, 3], "an index of rows leaves its range at [1]: got -1, expected 0..3"),
        ([0.0, 1.0, 2.0, 3.0], "an index of rows is not a vector of integers: got float64 (4,), expected (4,)"),
        ([True, False, True, True], "an index of rows is not a vector of integers: got bool (4,), expected (4,)"),
        ([[0, 1, 2, 3]], "an index of rows is not a vector of integers: got int64 (1, 4), expected (4,)"),
        (0, "an index of rows is not a vector of integers: got int64 (), expected (4,)"),
        ([], "an index of rows has the wrong length: got 0, expected 4"),
    ],
    ids=str,
)
def test_what_is_no_permutation(index, text, rng):
    w = full(rng, 4, 32, (4,))
    assert refusal(lambda: w.permute_rows(index)) == text
    assert refusal(lambda: w.permute_experts(index)) == text.replace("of rows", "of experts")


# -- experts --


@pytest.mark.parametrize("inner", [(), (2,)], ids=str)
@pytest.mark.parametrize("per_row", [False, True])
def test_slice_and_permute_experts(inner, per_row, rng):
    w, order = full(rng, 4, 20, (5, *inner), per_row), rng.permutation(5)
    part, done = w.slice_experts(1, 4), w.permute_experts(order)
    assert part.shape == (3, *inner, 4, 20)
    for name in ("codes", "scales", "scale2", "input_scale"):
        assert_same_bytes(getattr(part, name), getattr(w, name)[1:4])
        assert_same_bytes(getattr(done, name), getattr(w, name)[order])
    assert_same_bytes(part.pre_scale, w.pre_scale)
    assert_same_bytes(part.dequantize(), w.dequantize()[1:4])
    assert done.permute_experts(order, inverse=True).same(w)
    assert w.slice_experts(0, 5).same(w)
    assert w.slice_experts(2, 2).shape == (0, *inner, 4, 20)


def test_slice_as_many_experts_as_rows(rng):
    """Of E experts E' = N remain, where the shape of scale2 says little."""
    w = full(rng, 3, 32, (5,), per_row=False)
    assert_same_bytes(w.slice_experts(1, 4).dequantize(), w.dequantize()[1:4])


def test_experts_that_are_not_there(rng):
    w = full(rng, 4, 32, (3,))
    assert refusal(lambda: w.slice_experts(1, 4)) == "experts 1..4 are not within 0..3"
    assert refusal(lambda: w.slice_experts(2, 1)) == "experts 2..1 are not within 0..3"
    plain = full(rng, 4, 32)
    for touch in (
        lambda: plain.slice_experts(0, 1),
        lambda: plain.permute_experts([0]),
        lambda: plain.shard_experts(0, 1),
    ):
        assert refusal(touch) == "this weight has no expert axis: got (4, 32)"


# -- the shares of ranks --


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("experts", [(), (2,)], ids=str)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_shards_put_together(degree, experts, per_row, rng):
    w = full(rng, 12, 192, experts, per_row)
    rows = [w.shard_rows(rank, degree) for rank in range(degree)]
    assert {part.shape for part in rows} == {(*experts, 12 // degree, 192)}
    assert Weight.concat(rows).same(w)
    columns = [w.shard_columns(rank, degree) for rank in range(degree)]
    assert {part.shape for part in columns} == {(*experts, 12, 192 // degree)}
    for name in ("codes", "scales", "pre_scale"):
        assert_same_bytes(np.concatenate([getattr(part, name) for part in columns], -1), getattr(w, name))
    for part in columns:
        assert_same_bytes(part.scale2, w.scale2)
        assert_same_bytes(part.input_scale, w.input_scale)
    # the second rank's scale2 is its own, not the first rows of the whole
    if degree > 1 and per_row:
        assert_same_bytes(rows[1].scale2, w.scale2[..., 12 // degree : 24 // degree, :])


def test_ranks_add_up(rng):
    """Row-parallel: the sum of the ranks' products; column-parallel: their outputs beside each other, bit for bit."""
    w = full(rng, 64, 128)
    x = rng.integers(-2, 3, (3, 128)).astype(np.float32)
    y = linear(x, w)
    beside = np.concatenate([linear(x, w.shard_rows(rank, 4)) for rank in range(4)], -1)
    assert_same_bytes(beside, y)
    exact_y = (x.astype(np.float64) * w.pre_scale.astype(np.float64)) @ exact(w).T
    total = sum(
        linear(x[:, 32 * rank : 32 * rank + 32], w.shard_columns(rank, 4)).astype(np.float64) for rank in range(4)
    )
    bound = 130 * 2.0**-24 * ((np.abs(x) * w.pre_scale.astype(np.float64)) @ np.abs(exact(w)).T)
    assert (np.abs(total - exact_y) <= bound).all()
    assert (np.abs(y - exact_y) <= bound).all()


def test_shards_that_do_not_fit(rng):
    w = random_weight(rng, 12, 1856)
    assert refusal(lambda: w.shard_columns(0, 8)) == (
        "K = 1856 (116 x 16) does not split over 8 ranks in multiples of 16, "
        "expected a degree among 1, 2, 4, 29, 58, 116"
    )
    assert refusal(lambda: w.shard_columns(0, 2, multiple=64)) == (
        "K = 1856 (116 x 16) does not split over 2 ranks in multiples of 64, expected a degree among 1, 29"
    )
    assert refusal(lambda: w.shard_columns(0, 2, multiple=8)) == "columns are cut at multiples of 16: got multiple=8"
    assert refusal(lambda: w.shard_rows(0, 8)) == (
        "N = 12 does not split over 8 ranks, expected a degree among 1, 2, 3, 4, 6, 12"
    )
    assert refusal(lambda: w.shard_rows(0, 4, multiple=4)) == (
        "N = 12 does not split over 4 ranks in multiples of 4, expected a degree among 1, 3"
    )
    for rank, degree in ((2, 2), (-1, 2), (0, 0)):
        assert refusal(lambda r=rank, d=degree: w.shard_rows(r, d)) == (
            f"no such rank: got rank {rank} of {degree}, expected 0 <= rank < degree"
        )
    ragged = random_weight(rng, 3, 20)
    assert refusal(lambda: ragged.shard_columns(0, 2)) == (
        "K = 20 (1 x 16 + 4) does not split over 2 ranks in multiples of 16, expected a degree among 1"
    )
    assert ragged.shard_columns(0, 1).same(ragged)
    experts = random_weight(rng, 3, 32, (6,))
    assert refusal(lambda: experts.shard_experts(0, 4)) == (
        "E = 6 does not split over 4 ranks, expected a degree among 1, 2, 3, 6"
    )


@pytest.mark.parametrize("degree", [1, 2, 3, 6])
def test_expert_parallel_sums_to_one_rank(degree, rng):
    """Six experts, each token routed to two of them; a rank skips what is remote."""
    w = random_weight(rng, 5, 32, (6,), per_row=True, input_scale=True)
    x = rng.integers(-3, 4, (8, 32)).astype(np.float32)
    routes = np.array([rng.choice(6, 2, replace=False) for _ in range(8)])

    def outputs(experts):
        """(tokens, 2 routes, N); zero where the expert is remote."""
        y = np.zeros((8, 2, 5), np.float32)
        for token, slot in np.ndindex(8, 2):
            expert = experts[routes[token, slot]]
            if not expert.is_null:
                y[token, slot] = linear(x[token], expert)
        return y

    ranks = [w.shard_experts(rank, degree) for rank in range(degree)]
    held = np.array([[not e.is_null for e in rank] for rank in ranks])
    assert (held.sum(0) == 1).all()
    assert (held.sum(1) == 6 // degree).all()
    assert all(e.shape == (5, 32) for rank in ranks for e in rank)
    alone = outputs(w.unstack())
    assert_same_bytes(np.sum([outputs(rank) for rank in ranks], 0, dtype=np.float32), alone)
    assert np.count_nonzero(alone) > 70
    for rank, one in enumerate(ranks):
        for e, expert in enumerate(one):
            assert expert.is_null == (e // (6 // degree) != rank)
            assert expert.is_null or expert.same(w.unstack()[e])


def test_computing_with_a_remote_expert():
    null = Weight.null((4, 32))
    x = np.ones((1, 32), np.float32)
    for touch in (
        lambda: linear(x, null),
        lambda: null.permute_rows([0, 1, 2, 3]),
        lambda: null.shard_rows(0, 2),
        lambda: null.shard_columns(0, 2),
        lambda: null.shift_scale2(0),
        lambda: Weight.share_scale2([null, null]),
        lambda: Weight.null((2, 4, 32)).slice_experts(0, 1),
    ):
        assert refusal(touch) == "this weight is null: another rank holds it; route its tokens to that rank"


# -- powers of two between block scales and scale2 --


@given(byte=st.integers(0, 255), p=st.integers(-20, 20))
@settings(deadline=None, derandomize=True, max_examples=400)
def test_shift_is_exact_or_refused(byte, p):
    """Of one block: whether some E4M3 number is scale * 2^-p, by ml_dtypes' table."""
    w = with_scales([byte], scale2=np.float32(0.3))
    wanted = E4M3[byte] * 2.0**-p
    if np.isnan(wanted) or (wanted == E4M3).any():
        done = w.shift_scale2(p)
        assert_same_bytes(done.dequantize(), w.dequantize())
        assert_same_bytes(done.scale2, np.float32([[0.3 * 2.0**p]]))
        assert (done.scales[0, 0] >> 7) == (byte >> 7)
        assert_same_bytes(done.shift_scale2(-p).scales, w.scales)
    else:
        assert f"(byte {byte:02X})" in refusal(lambda: w.shift_scale2(p))


def test_shift_by_hand():
    w = with_scales([0x38, 0x7E, 0x00], scale2=0.5)  # 1, 448 and 0
    up = w.shift_scale2(3)
    assert up.scales[:, 0].tolist() == [0x20, 0x66, 0x00]  # 1/8, 56 and 0
    assert up.scale2.tolist() == [[4.0]]
    with pytest.raises(WeightError) as caught:
        w.shift_scale2(-1)
    assert caught.value.index == [1, 0]
    assert str(caught.value) == (
        "2^-1 cannot move from a block scale into scale2: it would round at [1, 0]: "
        "got the scale 448 (byte 7E), expected p within 0..15 for this block"
    )
    with pytest.raises(WeightError, match=r"at \[0, 0\]: got the scale 1 \(byte 38\), expected p within -8\.\.9 "):
        w.shift_scale2(10)


@pytest.mark.parametrize("experts", [(), (2,)], ids=str)
def test_shift_by_row(experts, rng):
    w = random_weight(rng, 4, 32, experts, per_row=True)
    w = w.replace(scales=0x38 + w.scales % 8)
    p = rng.integers(-3, 4, w.scale2.shape)
    done = w.shift_scale2(p)
    assert_same_bytes(done.dequantize(), w.dequantize())
    assert_same_bytes(done.scale2, np.ldexp(w.scale2, p))
    assert_same_bytes(E4M3[done.scales], E4M3[w.scales] * np.exp2(-p))


def test_shift_of_scale2_at_the_ends_of_float32():
    top, low = with_scales([0x78], scale2=2.0**126), with_scales([0x38], scale2=3 * 2.0**-149)
    assert top.shift_scale2(1).scale2.tolist() == [[2.0**127]]
    assert refusal(lambda: top.shift_scale2(2)) == (
        "scale2 leaves the range of float32 at [0, 0]: got 8.50706e+37 times 2^p"
    )
    assert low.shift_scale2(1).scale2.tolist() == [[6 * 2.0**-149]]
    assert "leaves the range" in refusal(lambda: low.shift_scale2(-1))
    for p in (0.5, True, [1], np.zeros((2, 1), int)):
        assert refusal(lambda p=p: top.shift_scale2(p)).startswith("p must be an integer")


def test_share_scale2_by_hand():
    """q, k, v with scale2 1 : 2 : 8, the scales all 1: the largest is shared."""
    parts = [with_scales([0x38, 0x38], scale2=s) for s in (0.75, 1.5, 6.0)]
    shared = Weight.share_scale2(parts)
    assert [w.scale2.tolist() for w in shared] == [[[6.0]]] * 3
    assert [E4M3[w.scales[0, 0]] for w in shared] == [0.125, 0.25, 1]
    w = Weight.concat(parts, "shift")
    assert (w.per_row, w.scale2.tolist()) == (False, [[6.0]])
    assert_same_bytes(w.dequantize(), np.concatenate([p.dequantize() for p in parts]))


def test_share_scale2_takes_the_nearest_that_is_exact():
    fine, coarse = with_scales([0x01], scale2=1.0), with_scales([0x40], scale2=8.0)  # 2^-9 cannot shrink
    assert [w.scale2.tolist() for w in Weight.share_scale2([fine, coarse])] == [[[1.0]]] * 2
    assert [w.scale2.tolist() for w in Weight.share_scale2([coarse, fine])] == [[[1.0]]] * 2
    finer = with_scales([0x02], scale2=1.0)  # 2^-8 can, once
    assert [w.scale2.tolist() for w in Weight.share_scale2([finer, coarse])] == [[[2.0]]] * 2
    full_up = with_scales([0x7E], scale2=8.0)
    assert refusal(lambda: Weight.share_scale2([full_up, fine])) == (
        "part 1: 2^3 cannot move from a block scale into scale2: it would round at [0, 0]: "
        "got the scale 0.00195312 (byte 01), expected p within -17..0 for this block"
    )


def test_share_scale2_refuses_other_ratios():
    parts = [with_scales([0x38], scale2=s) for s in (1.0, 2.0, 3.0)]
    assert refusal(lambda: Weight.share_scale2(parts)) == (
        "the scale2 of part 2 is not a power of two times that of part 0: got [1.0, 2.0, 3.0]; "
        'use concat with policy="exact" (per-row scale2) or policy="common" (rounds)'
    )
    for bad in (0.0, -1.0, np.nan):
        assert "part 1" in refusal(lambda s=bad: Weight.concat([parts[0], with_scales([0x38], scale2=s)], "shift"))
    rows = with_scales([0x38, 0x38], scale2=np.array([1, 3], np.float32))
    assert "part 0" in refusal(lambda: Weight.share_scale2([rows]))


@pytest.mark.parametrize("experts", [(), (2,)], ids=str)
def test_share_scale2_of_stacks_rows_and_empty_parts(experts, rng):
    parts = [random_weight(rng, n, 32, experts, per_row=n == 3) for n in (2, 0, 3, 4)]
    base = rng.uniform(0.5, 1, (*experts, 1, 1)).astype(np.float32)  # each expert has its own
    parts = [
        p.replace(scales=0x30 + p.scales % 32, scale2=np.ldexp(base, rng.integers(-2, 3, p.scale2.shape)))
        for p in parts
    ]
    shared = Weight.share_scale2(parts)
    for before, after in zip(parts, shared, strict=True):
        assert_same_bytes(after.dequantize(), before.dequantize())
    w = Weight.concat(parts, "shift")
    assert w.scale2.shape == (*experts, 1, 1)
    assert_same_bytes(w.scale2 / base, np.exp2(np.log2(w.scale2 / base).round()).astype(np.float32))
    assert_same_bytes(w.dequantize(), np.concatenate([p.dequantize() for p in parts], -2))
    assert Weight.share_scale2([]) == []


def test_zero_scales_stand_any_shift():
    zero, one = with_scales([0x00], scale2=2.0**-60), with_scales([0x38], scale2=2.0**40)
    assert Weight.concat([zero, one], "shift").dequantize()[:, 0].tolist() == [0, 2.0**40]
    assert common_exponents([zero.scales, one.scales], [np.array([[-60]]), np.array([[40]])]).tolist() == [[40]]


def test_nothing_is_shared_unasked():
    """Powers of two apart, yet the default keeps every bit and gives each row its own scale2."""
    parts = [with_scales([0x38, 0x38], scale2=s) for s in (1.0, 2.0, 8.0)]
    w = Weight.concat(parts)
    assert w.scale2[:, 0].tolist() == [1, 1, 2, 2, 8, 8]  # no average, no largest
    assert set(w.scales.reshape(-1).tolist()) == {0x38}
    with pytest.raises(WeightError, match="different scale2"):
        Weight.concat(parts, "equal")


@pytest.mark.parametrize("policy", ["exact", "shift", "common"])
def test_a_fused_product_is_the_separate_ones(policy, rng):
    """q, k, v with scale2 1 : 2 : 8, bit for bit through the reference kernel; by powers of two all three can."""
    parts = [random_weight(rng, n, 48).replace(scale2=s) for n, s in ((64, 0.3), (64, 0.6), (128, 2.4))]
    parts = [p.replace(scales=0x30 + p.scales % 32) for p in parts]
    x = rng.standard_normal((5, 48), np.float32)
    w = Weight.concat(parts, policy)
    separate = np.concatenate([linear(x, p) for p in parts], -1)
    assert_same_bytes(linear(x, w), separate)
    for part, own in zip(w.split([64, 64, 128]), parts, strict=True):
        assert_same_bytes(part.dequantize(), own.dequantize())
        assert part.same(own) or policy != "exact"


def test_a_fused_product_of_other_ratios(rng):
    parts = [random_weight(rng, n, 48, per_row=n == 5) for n in (3, 5, 7)]
    x = rng.integers(-4, 5, (5, 48)).astype(np.float32)
    assert_same_bytes(linear(x, Weight.concat(parts)), np.concatenate([linear(x, p) for p in parts], -1))
