"""Layouts: the table through its contract, and statements of layouts to come against golden bytes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from contract import check_layout
from halfbyte import layouts
from halfbyte.errors import LayoutError, WeightError
from halfbyte.layouts import LAYOUTS, Layout, Order, Packed, Rows, parse
from halfbyte.layouts.base import arrange, arrange_codes, restore, restore_codes
from halfbyte.weight import Weight
from helpers import assert_same_bytes, assert_within, exact, golden, modelopt, nibbles, random_weight
from orders import FUTURE, PLANES, Plane, orders

SHAPES = [
    ((), 1, 16),  # one block
    ((), 24, 80),  # five blocks a row
    ((), 37, 48),  # odd N
    ((), 3, 20),  # K ends inside a block
    ((), 5, 7),  # K is odd and less than a block
    ((), 130, 272),  # more than one tile of 128 rows and of 256 columns
    ((3,), 5, 32),
    ((2, 3), 4, 20),
    ((1,), 1, 16),
    ((), 0, 32),
    ((), 4, 0),
    ((2,), 0, 16),
    ((0,), 4, 32),  # a rank without experts
]
DOCUMENTED = {
    # name: (byte of code (n, k) and whether its nibble is the high one, byte of block scale (n, b)), size is K
    "rows": (lambda n, k, size: (n * size // 2 + k // 2, k % 2), lambda n, b, size: n * (size // 16) + b),
}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def ids(case):
    experts, n, k = case
    return "-".join([*(f"E{e}" for e in experts), f"N{n}", f"K{k}"])


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.key)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "per-row, input_scale, pre_scale"])
def test_contract(layout, shape, full, rng):
    experts, n, k = shape
    check_layout(layout, random_weight(rng, n, k, experts, per_row=full, input_scale=full, pre_scale=full))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.key)
@pytest.mark.parametrize(("n", "k"), [(5, 48), (3, 20), (2, 96)])
def test_documented_places(layout, n, k, rng):
    weight = random_weight(rng, n, k)
    padded = weight.scales.shape[-1] * 16
    codes, scales = DOCUMENTED[layout.name]
    buffers, values = layout.pack(weight).buffers(), nibbles(weight.codes)
    for row in range(n):
        for column in range(k):
            byte, high = codes(row, column, padded)
            assert buffers["codes"][byte] >> (4 * high) & 15 == values[row, column]
            assert layout.offset(row, column, weight.shape) == 2 * byte + high
            block = scales(row, column // 16, padded)
            assert buffers["scales"][block] == weight.scales[row, column // 16]
            assert layout.offset(row, column, weight.shape, "scales") == block


def test_table():
    names = [layout.name for layout in LAYOUTS]
    assert len(set(names)) == len(names)
    assert set(DOCUMENTED) == set(names)


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.key)
def test_golden_weights(layout, name):
    check_layout(layout, modelopt(name))


def test_null_is_not_packed():
    with pytest.raises(WeightError, match="another rank holds it"):
        Rows().pack(Weight.null((4, 32)))


# -- keys --


@pytest.mark.parametrize(
    "key",
    ["", "row", "Rows", "rows(", "rows)", "rows(x)", "rows(x=1)", "rows(=)", "rows rows", "rows(a=1,)", "rows()()"],
)
def test_unknown_keys(key):
    with pytest.raises(LayoutError):
        parse(key)


def test_unknown_key_text():
    with pytest.raises(LayoutError) as caught:
        parse("columns(align=16)")
    assert str(caught.value) == "unknown layout: got 'columns(align=16)', expected " + " or ".join(
        layout.name for layout in LAYOUTS
    )
    with pytest.raises(LayoutError) as caught:
        parse("rows(align=16)")
    assert str(caught.value) == "layout rows has no such field: got ['align'], expected []"


# -- what Packed refuses --


GOOD = {"codes": np.zeros(32, np.uint8), "scales": np.zeros(4, np.uint8), "scale2": np.ones((1, 1), np.float32)}


def test_packed_takes_good_buffers():
    packed = Packed(Rows(), (2, 32), GOOD)
    assert repr(packed) == "Packed(rows, shape=(2, 32), 40 bytes)"
    assert packed.nbytes == 40


@pytest.mark.parametrize(
    "wrong",
    [
        {"codes": np.zeros(32, np.float32)},
        {"codes": np.zeros((2, 16), np.uint8)},
        {"codes": np.zeros(31, np.uint8)},
        {"scales": np.zeros(4, np.float32)},
        {"scales": np.zeros(5, np.uint8)},
        {"scale2": np.ones((3, 1), np.float32)},
        {"scale2": np.ones((1, 1), np.float64)},
        {"input_scale": np.ones(3, np.float32)},
        {"pre_scale": np.ones(31, np.float32)},
        {"zeros": np.zeros(4, np.uint8)},
    ],
    ids=lambda wrong: " ".join(f"{name} {b.dtype} {b.shape}" for name, b in wrong.items()),
)
def test_packed_refuses(wrong):
    with pytest.raises(LayoutError):
        Packed(Rows(), (2, 32), GOOD | wrong)


@pytest.mark.parametrize("missing", GOOD)
def test_packed_refuses_missing(missing):
    with pytest.raises(LayoutError) as caught:
        Packed(Rows(), (2, 32), {name: b for name, b in GOOD.items() if name != missing})
    assert str(caught.value) == (f"wrong buffers: got {sorted(set(GOOD) - {missing})}, expected codes, scales, scale2")


@pytest.mark.parametrize("shape", [(), (32,), (-2, 32), (2, 16)])
def test_packed_refuses_shape(shape):
    with pytest.raises(LayoutError):
        Packed(Rows(), shape, GOOD)


# -- statements --


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("", {}),
        ("n k", {}),
        ("n -> n", {}),
        ("n k m -> n k m", {}),
        ("n k -> n", {}),
        ("n k -> n k n", {}),
        ("n k -> n m", {}),
        ("n k -> n k -> k n", {}),
        ("n n -> n n", {}),
        ("(n a) (k a) -> n a k a", {"a": 2}),
        ("(n n) k -> n n k", {"n": 2}),
        ("() k -> k", {}),
        ("(n a) k -> n a k", {}),
        ("n k -> n k", {"a": 2}),
        ("(n a) k -> a n k", {"n": 2}),
        ("(n a) k -> a n k", {"n": 2, "a": 2}),
        ("(n a) k -> n a k", {"a": 0}),
        ("(n a) k -> n a k", {"a": -2}),
        ("(n a) k -> n a k", {"a": 2.5}),
        ("(n (a b)) k -> n a b k", {"a": 2, "b": 2}),
    ],
    ids=str,
)
def test_malformed_statements_are_refused(pattern, sizes):
    with pytest.raises(LayoutError):
        Order(pattern, **sizes)


def test_order_is_a_value():
    order = Order("(n a) (k b) -> k n b a", a=2, b=4)
    assert order == Order("(n a) (k b) -> k n b a", b=4, a=2)
    assert hash(order) == hash(Order("(n a) (k b) -> k n b a", b=4, a=2))
    assert order != Order("(n a) (k b) -> k n b a", a=4, b=4)
    assert str(order) == "(n a) (k b) -> k n b a  a=2, b=4"
    assert str(Order("n k -> k n")) == "n k -> k n"
    assert order.axes == (["n", "a"], ["k", "b"])
    assert order.memory == ["k", "n", "b", "a"]
    assert order.multiples == (2, 4)
    assert order.digits((3, 9)) == {"n": 2, "a": 2, "k": 3, "b": 4}
    assert order.count((3, 9)) == 48
    with pytest.raises(AttributeError):
        order.pattern = "n k -> n k"


@pytest.mark.parametrize("plane", PLANES, ids=str)
def test_golden_bytes(plane: Plane):
    source, stored = plane.source(), plane.stored()
    forwards, back = (arrange_codes, restore_codes) if plane.codes else (arrange, restore)
    assert_same_bytes(forwards(plane.order, source).reshape(-1), stored.reshape(-1))
    shape = (source.shape[0], source.shape[1] * (2 if plane.codes else 1))
    assert_same_bytes(back(plane.order, stored.reshape(-1), shape), source)

    elements, flat = (nibbles(source), nibbles(stored.reshape(-1))) if plane.codes else (source, stored.reshape(-1))
    first, second = plane.order.offsets(shape)
    at = first[:, None] + second[None, :]
    assert_same_bytes(flat[at], elements)
    assert flat.size == plane.order.count(shape)
    assert not np.delete(flat, at).any()


def test_golden_row_maps():
    trtllm = Order("(n a b) k -> n b a k", a=8, b=4)
    rows = np.arange(128)[:, None]
    assert np.array_equal(arrange(trtllm, rows), golden("layouts")["D.trtllm_row_indices"])
    gated = Order("(h n a m) k -> n m h a k", n=4, a=8, m=2)
    assert np.array_equal(arrange(gated, rows), golden("layouts")["D.trtllm_gated_row_indices"])


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_swizzled_scales_of_others_decode(name):
    """Scales that torchao and comfy-kitchen swizzled themselves, restored and multiplied out."""
    order = FUTURE["atoms128x4"][1]
    ao, comfy = golden("torchao"), golden("comfy_kitchen_eager")
    codes, scales = ao[f"{name}.two.qdata"], ao[f"{name}.two.scale"]
    assert_same_bytes(restore(order, ao[f"{name}.swz.scale"].reshape(-1), scales.shape), scales)

    codes = comfy[f"{name}.hi0.weight"]
    scales = restore(order, comfy[f"{name}.hi0.weight_scale"].reshape(-1), (codes.shape[0], codes.shape[1] // 8))
    weight = Weight(codes=codes, scales=scales, scale2=comfy[f"{name}.weight_scale_2"])
    assert_within(comfy[f"{name}.dequant_f32"], exact(weight), 3 * 2.0**-24 * np.abs(exact(weight)))


@given(orders(), st.tuples(st.integers(0, 9), st.integers(0, 9)), st.sampled_from([(), (2,), (2, 3)]))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_any_statement(order, shape, lead):
    """Executor, inverse and offsets are read off one statement, so they agree; padding is zero."""
    count = order.count(shape)
    a = 1 + np.arange(int(np.prod((*lead, *shape))), dtype=np.uint16).reshape(*lead, *shape)
    flat = arrange(order, a)
    assert flat.shape == (*lead, count)
    assert flat.flags.c_contiguous
    assert np.array_equal(restore(order, flat, shape), a)
    first, second = order.offsets(shape)
    assert first.shape == (shape[0],)
    assert second.shape == (shape[1],)
    at = first[:, None] + second[None, :]
    assert np.array_equal(flat[..., at], a)
    assert np.count_nonzero(flat) == a.size


@given(orders(), st.integers(0, 5), st.integers(0, 3), st.sampled_from([(), (2,)]), st.integers(0, 2**32 - 1))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_any_statement_of_codes(order, n, blocks, lead, seed):
    """Packed codes travel as their nibbles do, also where whole bytes can be moved."""
    codes = np.random.default_rng(seed).integers(0, 256, (*lead, n, blocks * 8), np.uint8)
    shape = (n, blocks * 16)
    assume(order.count(shape) % 2 == 0)
    flat = arrange_codes(order, codes)
    assert_same_bytes(nibbles(flat), arrange(order, nibbles(codes)))
    assert_same_bytes(restore_codes(order, flat, shape), codes)


def test_odd_count_of_codes():
    order, codes = Order("n (k p) -> n k p", p=17), np.arange(1, 9, dtype=np.uint8)[None]
    flat = arrange_codes(order, codes)
    assert flat.shape == (9,)
    assert_same_bytes(nibbles(flat)[:16], nibbles(codes)[0])
    assert not nibbles(flat)[16:].any()
    assert_same_bytes(restore_codes(order, flat, (1, 16)), codes)


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 2)], ids=str)
def test_no_experts(lead):
    order, a = FUTURE["atoms128x4"][1], np.zeros((*lead, 3, 5), np.uint8)
    flat = arrange(order, a)
    assert flat.shape == (*lead, order.count((3, 5)))
    assert restore(order, flat, (3, 5)).shape == a.shape


def test_whole_bytes():
    assert Order("n k -> n k").whole_bytes() == Order("n k -> n k")
    assert Order("n (k p) -> k n p", p=2).whole_bytes() == Order("n (k p) -> k n p", p=1)
    assert Order("(n t) (k p) -> n k t p", p=64, t=8).whole_bytes() == Order("(n t) (k p) -> n k t p", p=32, t=8)
    assert Order("n k -> k n").whole_bytes() is None
    assert Order("n (k p) -> n p k", p=2).whole_bytes() is None
    assert Order("n (k p) -> k n p", p=3).whole_bytes() is None


# -- layouts to come are statements --


@dataclass(frozen=True)
class Stated(Layout):
    """Any of those statements as a layout."""

    name: ClassVar[str] = "stated"
    used_by: ClassVar[str] = "the tests"
    statement: str = "atoms128x4"
    most: int = 4096

    @property
    def codes(self):
        return FUTURE[self.statement][0]

    @property
    def scales(self):
        return FUTURE[self.statement][1]

    def needs(self, shape):
        return f"K = {shape[-1]} is above {self.most}" if shape[-1] > self.most else None


@dataclass(frozen=True)
class Switched(Rows):
    """A layout with a field that is true or false."""

    name: ClassVar[str] = "switched"
    on: bool = False


@pytest.fixture
def stated(monkeypatch):
    monkeypatch.setattr(layouts, "LAYOUTS", (*LAYOUTS, Stated(), Switched()))


@pytest.mark.usefixtures("stated")
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=ids)
@pytest.mark.parametrize("statement", FUTURE)
def test_contract_of_statements(statement, shape, rng):
    experts, n, k = shape
    check_layout(Stated(statement), random_weight(rng, n, k, experts, per_row=n % 2 == 1))


@pytest.mark.usefixtures("stated")
@pytest.mark.parametrize(
    "layout",
    [Stated(most=64), Stated("gguf", 16), Switched(on=True), Switched(on=False)],
    ids=lambda layout: layout.key,
)
def test_keys_carry_fields(layout):
    assert parse(layout.key) == layout


@pytest.mark.usefixtures("stated")
def test_key_text():
    assert Stated().key == "stated(statement=atoms128x4, most=4096)"
    assert parse("stated") == Stated()
    assert parse(" stated(most=64) ") == Stated(most=64)
    with pytest.raises(LayoutError):
        parse("stated(most=many)")


def test_needs_is_asked(rng):
    with pytest.raises(LayoutError) as caught:
        Stated(most=32).pack(random_weight(rng, 2, 48))
    assert str(caught.value) == "layout stated cannot hold this weight: K = 48 is above 32: got (2, 48)"
