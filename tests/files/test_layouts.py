"""Layouts: the table through its contract, and statements of layouts to come against golden bytes."""

import sys
import textwrap
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from contract import MX_VARIANTS, VARIANTS, check_layout, fitting, in_steps, stored_bytes
from halfbyte import layouts
from halfbyte.errors import LayoutError, WeightError
from halfbyte.layouts import (
    LAYOUTS,
    Atoms128x4,
    Columns,
    GateUp,
    Gguf,
    Layout,
    Marlin,
    Order,
    Packed,
    Rows,
    Tiles64,
    Trtllm,
    parse,
)
from halfbyte.layouts.drawing import drawing, with_drawings
from halfbyte.layouts.executors import arrange, arrange_codes, restore, restore_codes
from halfbyte.layouts.gate_up import ROWS
from halfbyte.weight import Fp8Weight, Mxfp4Weight, Weight
from helpers import (
    assert_same_bytes,
    assert_within,
    exact,
    golden,
    modelopt,
    nibbles,
    random_mxfp4,
    random_weight,
)
from orders import PLANES, Plane, orders
from places import PLACES

SHAPES = [
    ((), 1, 16),  # one block
    ((), 24, 80),  # five blocks a row
    ((), 37, 48),  # odd N
    ((), 3, 20),  # K ends inside a block
    ((), 5, 7),  # K is odd and less than a block
    ((), 130, 272),  # more than one tile of 128 rows and of 256 columns
    ((), 128, 64),  # whole tiles of every layout
    ((2,), 256, 192),
    ((3,), 5, 32),
    ((2, 3), 4, 20),
    ((1,), 1, 16),
    ((), 0, 32),
    ((), 4, 0),
    ((2,), 0, 16),
    ((0,), 4, 32),  # a rank without experts
]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def ids(case):
    experts, n, k = case
    return "-".join([*(f"E{e}" for e in experts), f"N{n}", f"K{k}"])


keyed = pytest.mark.parametrize("layout", VARIANTS, ids=lambda layout: layout.key)


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
@keyed
@pytest.mark.parametrize("full", [False, True], ids=["plain", "per-row, input_scale, pre_scale"])
def test_contract(layout, shape, full, rng):
    experts, n, k = shape
    check_layout(layout, random_weight(rng, n, k, experts, per_row=full, input_scale=full, pre_scale=full))


mx_keyed = pytest.mark.parametrize("layout", MX_VARIANTS, ids=lambda layout: layout.key)


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
@mx_keyed
def test_contract_of_mxfp4(layout, shape, rng):
    experts, n, k = shape
    check_layout(layout, random_mxfp4(rng, n, k, experts))


@keyed
def test_shapes_that_are_taken(layout):
    """The contract is not met by refusing."""
    assert not layout.needs((128, 64))
    assert not layout.needs((2, 256, 192))
    assert not layout.needs((0, 64))


@pytest.mark.parametrize(("layout", "codes", "scales"), PLACES, ids=lambda x: getattr(x, "key", ""))
@pytest.mark.parametrize(("n", "k"), [(5, 48), (3, 20), (2, 96), (66, 64), (256, 128)])
def test_documented_places(layout, codes, scales, n, k, rng):
    """The closed forms of the formats' documents, for every element, with every byte that they do not name zero."""
    weight = random_weight(rng, n, k)
    if layout.needs(weight.shape):
        return
    weight = fitting(layout, weight)
    padded, stored = weight.scales.shape[-1] * 16, stored_bytes(layout, weight.scales)
    buffers, values = layout.pack(weight).buffers(), nibbles(weight.codes)
    expected = {name: np.zeros_like(nibbles(buffers[name])) for name in layout.buffers}
    in_codes, in_scales = (name for p in ("codes", "scales") for name, parts in layout.buffers.items() if p in parts)
    for row in range(n):
        for column in range(padded):
            byte, high = codes(row, column, n, padded)
            expected[in_codes][2 * byte + high] = values[row, column]
        for block in range(padded // 16):
            byte, scale = scales(row, block, n, padded), stored[row, block]
            expected[in_scales][2 * byte : 2 * byte + 2] = scale & 15, scale >> 4
    for name, wanted in expected.items():
        assert_same_bytes(nibbles(in_steps(layout, name, buffers)), wanted)
    byte, high = codes(n - 1, k - 1, n, padded)
    assert layout.offset(n - 1, k - 1, weight.shape) == 2 * byte + high
    assert layout.offset(n - 1, k - 1, weight.shape, "scales") == scales(n - 1, (k - 1) // 16, n, padded)


def test_table():
    names = [layout.name for layout in LAYOUTS]
    assert len(set(names)) == len(names)
    assert {layout.name for layout, _, _ in PLACES} == set(names)


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
@keyed
def test_golden_weights(layout, name):
    check_layout(layout, modelopt(name))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.key)
def test_drawings(layout):
    """Each module's docstring ends in the drawings of its layouts, made from their statements."""
    module = sys.modules[type(layout).__module__]
    own = [other for other in LAYOUTS if type(other).__module__ == module.__name__]
    assert module.__doc__ == with_drawings(module.__doc__, own), "run: python scripts/make_docs.py"
    assert textwrap.indent(drawing(layout), "    ") in module.__doc__


def test_drawings_are_replaced():
    docstring = "A layout.\n\nWords.\n"
    once = with_drawings(docstring, [Columns()])
    assert once.startswith("A layout.\n\nWords.\n\n``columns(align=1)``, drawn from its statement::\n\n    codes")
    assert with_drawings(once, [Columns()]) == once
    assert with_drawings(once, []) == docstring
    assert with_drawings(once, [Gguf(), Columns()]).count("drawn from") == 2


def test_a_drawing_of_rows():
    assert drawing(GateUp("interleaved", Rows())).splitlines()[10:15] == [
        "interleaved      i h",
        "    step  size  moves by",
        "    1     2     +N/2 n",
        "    2     N/2   +1 n",
        "    first, of N = 16: n0, n8, n1, n9, n2, n10, n3, n11",
    ]


def test_a_drawing():
    assert drawing(Gguf()) == (
        "needs K % 64 == 0\n"
        "blocks: in turn 4 of scales, 32 of codes\n"
        "scales (bytes)   n k\n"
        "    step  size  moves by\n"
        "    1     K/16  +16 k\n"
        "    K/16  N     +1 n\n"
        "    first: n0 k0, n0 k16, n0 k32, n0 k48, n0 k64, n0 k80, n0 k96, n0 k112\n"
        "codes (nibbles)  n k j h\n"
        "    step       size  moves by\n"
        "    1          2     +8 k\n"
        "    2          8     +1 k\n"
        "    16         K/16  +16 k\n"
        "    16 * K/16  N     +1 n\n"
        "    first: n0 k0, n0 k8, n0 k1, n0 k9, n0 k2, n0 k10, n0 k3, n0 k11"
    )


def test_keys():
    assert Marlin().key == ("marlin(pad_n=64, pad_k=16, scale_format=e4m3, dtype=bfloat16, rule=max, lossy=False)")
    assert (Columns(8).key, Columns(8, "mxfp4").key) == ("columns(align=8)", "columns(align=8, kind=mxfp4)")
    assert (Rows().key, Rows("mxfp4").key) == ("rows", "rows(kind=mxfp4)")
    assert parse("columns(kind=mxfp4)") == Columns(kind="mxfp4")
    assert parse("rows(kind=nvfp4)") == Rows()
    assert parse("marlin") == Marlin()
    assert parse("marlin(lossy=True,scale_format=s0e5m3)") == Marlin(scale_format="s0e5m3", lossy=True)
    assert parse(" columns(align=128) ") == Columns(align=128)
    gated = GateUp("up_first_64", Columns(align=128))
    assert gated.key == "gate_up(order=up_first_64, layout=columns(align=128))"
    assert parse(gated.key) == gated
    assert parse("gate_up(layout=gguf, order=interleaved)") == GateUp("interleaved", Gguf())
    with pytest.raises(LayoutError) as caught:
        parse("gate_up(layout=rows)")
    assert str(caught.value) == "layout gate_up lacks a field: got ['layout'], expected ['layout', 'order']"
    with pytest.raises(LayoutError) as caught:
        Tiles64("row")
    assert str(caught.value) == (
        "layout tiles64: not a value of scale_order: got 'row', expected atom or linear or marlin"
    )


def test_null_is_not_packed():
    with pytest.raises(WeightError, match="another rank holds it"):
        Rows().pack(Weight.null((4, 32)))


# -- MXFP4 --


@pytest.mark.parametrize("align", [1, 4, 16, 128])
@pytest.mark.parametrize(("n", "k"), [(5, 96), (3, 40), (128, 64), (1, 32)])
def test_mxfp4_in_columns(align, n, k, rng):
    """Bytes of codes (K/2, pitch) and scales (K/32, pitch), transposed by NumPy; every byte between them is zero."""
    weight, pitch = random_mxfp4(rng, n, k), -(-n // align) * align
    buffers = Columns(align, "mxfp4").pack(weight).buffers()
    assert buffers.keys() == {"codes", "scales"}
    for name, rows in (("codes", 16 * -(-k // 32)), ("scales", -(-k // 32))):
        wanted = np.zeros((rows, pitch), np.uint8)
        wanted[:, :n] = getattr(weight, name).T
        assert_same_bytes(buffers[name], wanted.reshape(-1))


def test_mxfp4_of_a_vocabulary(rng):
    """248077 rows of 32 at 128: the pitch is 248192 in both buffers, and its last 115 columns are zero."""
    weight = random_mxfp4(rng, 248077, 32)
    layout = Columns(align=128, kind="mxfp4")
    packed = layout.pack(weight)
    codes, scales = (packed.buffers()[name].reshape(-1, 248192) for name in ("codes", "scales"))
    assert (codes.shape, scales.shape) == ((16, 248192), (1, 248192))
    assert_same_bytes(codes[:, :248077], weight.codes.T)
    assert_same_bytes(scales[:, :248077], weight.scales.T)
    assert not codes[:, 248077:].any()
    assert not scales[:, 248077:].any()
    assert layout.offset(248076, 31, weight.shape) == 2 * (15 * 248192 + 248076) + 1
    assert layout.offset(248076, 31, weight.shape, "scales") == 248076
    assert packed.unpack().same(weight)


def test_several_mxfp4_weights_in_one_twin(rng):
    """Columns of the parts side by side, in one buffer whose pitch covers all."""
    parts = [random_mxfp4(rng, n, 64) for n in (3, 0, 5)]
    whole = Mxfp4Weight.concat(parts)
    assert whole.shape == (8, 64)
    buffers = Columns(4, "mxfp4").pack(whole).buffers()
    codes, scales = buffers["codes"].reshape(32, 8), buffers["scales"].reshape(2, 8)
    for part, columns in ((parts[0], slice(0, 3)), (parts[2], slice(3, 8))):
        assert_same_bytes(codes[:, columns], part.codes.T)
        assert_same_bytes(scales[:, columns], part.scales.T)


@pytest.mark.parametrize("layout", [layout for layout in VARIANTS if layout.of_kind("mxfp4") is None], ids=str)
def test_layouts_of_nvfp4_alone(layout, rng):
    with pytest.raises(LayoutError) as caught:
        layout.pack(random_mxfp4(rng, 128, 64))
    assert str(caught.value) == (
        f"layout {layout.name} does not pack this kind of weight: got mxfp4, expected nvfp4; "
        "cast it with halfbyte.mxfp4.to_nvfp4"
    )


def test_which_layouts_pack_mxfp4():
    assert [layout.name for layout in LAYOUTS if layout.of_kind("mxfp4")] == ["rows", "columns", "gate_up"]
    assert Columns(align=3).of_kind("mxfp4") == Columns(align=3, kind="mxfp4")
    assert Columns().of_kind("fp8") is None
    assert GateUp("up_first", Gguf()).of_kind("nvfp4") == GateUp("up_first", Gguf())


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        (Columns(128), "use columns(align=128, kind=mxfp4), or cast it with halfbyte.mxfp4.to_nvfp4"),
        (Rows(), "use rows(kind=mxfp4), or cast it with halfbyte.mxfp4.to_nvfp4"),
        (
            GateUp("up_first", Rows()),
            "use gate_up(order=up_first, layout=rows(kind=mxfp4)), or cast it with halfbyte.mxfp4.to_nvfp4",
        ),
    ],
    ids=lambda x: getattr(x, "key", ""),
)
def test_the_kind_is_stated(layout, hint, rng):
    """A layout never takes a weight of the other kind; the error tells which layout does."""
    name = f"layout {layout.name} does not pack this kind of weight"
    with pytest.raises(LayoutError) as caught:
        layout.pack(random_mxfp4(rng, 4, 32))
    assert str(caught.value) == f"{name}: got mxfp4, expected nvfp4; {hint}"
    with pytest.raises(LayoutError) as caught:
        layout.of_kind("mxfp4").pack(random_weight(rng, 4, 32))
    assert str(caught.value) == f"{name}: got nvfp4, expected mxfp4; use {layout.key}"
    with pytest.raises(LayoutError) as caught:
        layout.pack(Fp8Weight(data=np.zeros((4, 32), np.uint8), scale=1.0))
    assert str(caught.value) == f"{name}: got fp8, expected nvfp4"


def test_buffers_of_the_other_kind(rng):
    """Of one shape the kinds have scales of other lengths; the layout says which these are."""
    mx, nv = random_mxfp4(rng, 4, 64), random_weight(rng, 4, 64)
    given, layout = Columns(kind="mxfp4").pack(mx), Columns()
    with pytest.raises(LayoutError) as caught:
        Packed(layout, mx.shape, given.buffers())
    assert str(caught.value) == "wrong buffers: got ['codes', 'scales'], expected codes, scales, scale2"
    with pytest.raises(LayoutError) as caught:
        Packed(layout, mx.shape, given.buffers() | {"scale2": np.ones((1, 1), np.float32)})
    assert str(caught.value) == "buffer scales does not fit: got uint8 (8,), expected uint8 (16,)"
    with pytest.raises(LayoutError) as caught:
        Packed(given.layout, nv.shape, layout.pack(nv).buffers())
    assert str(caught.value) == "wrong buffers: got ['codes', 'scale2', 'scales'], expected codes, scales"
    assert repr(given) == "Packed(columns(align=1, kind=mxfp4), shape=(4, 64), 136 bytes)"


def test_a_drawing_of_mxfp4():
    assert drawing(Columns(kind="mxfp4")).splitlines()[-4:] == [
        "    step  size  moves by",
        "    1     N     +1 n",
        "    N     K/32  +32 k",
        "    first: n0 k0, n1 k0, n2 k0, n3 k0, n4 k0, n5 k0, n6 k0, n7 k0",
    ]


# -- keys --


@pytest.mark.parametrize(
    "key",
    [
        "gate_up",  # its order is never guessed
        "gate_up(layout=rows)",
        "gate_up(order=up_first)",
        "gate_up(order=up_last, layout=rows)",
        "gate_up(order=up_first, layout=row)",
        "gate_up(order=up_first, layout=rows",
        "gate_up(order=up_first, layout=gate_up(order=up_first, layout=rows))",
        "columns(align=0)",
        "columns(align=-1)",
        "columns(align=1.5)",
        "columns(align=)",
        "columns(kind=fp8)",
        "gguf(kind=mxfp4)",
        "marlin(scale_format=e5m2)",
        "marlin(pad_n=32)",
        "marlin(pad_k=8)",
        "marlin(lossy=1)",
        "marlin(lossy=True)",  # fields of s0e5m3 scales
        "marlin(rule=min)",
        "marlin(scale_format=s0e5m3, dtype=float16, rule=min)",
        "tiles64(scale_order=rows)",
        "trtllm(epilogue_tile=32)",
        "",
        "row",
        "Rows",
        "rows(",
        "rows)",
        "rows(x)",
        "rows(x=1)",
        "rows(=)",
        "rows rows",
        "rows(a=1,)",
        "rows()()",
    ],
)
def test_unknown_keys(key):
    with pytest.raises(LayoutError):
        parse(key)


def test_unknown_key_text():
    with pytest.raises(LayoutError) as caught:
        parse("pillars(align=16)")
    assert str(caught.value) == "unknown layout: got 'pillars(align=16)', expected " + " or ".join(
        layout.name for layout in LAYOUTS
    )
    with pytest.raises(LayoutError) as caught:
        parse("rows(align=16)")
    assert str(caught.value) == "layout rows has no such field: got ['align'], expected ['kind']"


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
        ("n (k p) -> n k --p", {"p": 2}),
        ("n (k -p) -> n k p", {"p": 2}),
        ("n (k p) -> n k - p", {"p": 2}),
        ("n k -> n -", {}),
        ("(n a) (k a) -> n a k a", {"a": 2}),
        ("(n n) k -> n n k", {"n": 2}),
        ("() k -> k", {}),
        ("(n a) k -> n a k", {}),
        ("n k -> n k", {"a": 2}),
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
    other = Order("(n a) k -> -a n -k", n=2)
    assert other.memory == ["a", "n", "k"]
    assert other.backwards == ["a", "k"]
    assert other.multiples == (2, 1)
    assert other.digits((5, 3)) == {"n": 2, "a": 3, "k": 3}


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
    """Row j in memory holds the old row of the golden's j; its gated input has up first, as a swapped w13."""
    rows = np.arange(128)[:, None]
    assert np.array_equal(arrange(Trtllm().codes, rows), golden("layouts")["D.trtllm_row_indices"])
    gated = arrange(Trtllm().codes, arrange(ROWS["interleaved"], rows)[:, None])
    assert np.array_equal(gated, golden("layouts")["D.trtllm_gated_row_indices"])
    swapped = arrange(ROWS["up_first"], rows)
    ours = arrange(Trtllm().codes, arrange(ROWS["up_first_interleaved"], rows)[:, None])
    assert np.array_equal(ours, swapped[golden("layouts")["D.trtllm_gated_row_indices"]])


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_swizzled_scales_of_others_decode(name):
    """Scales that torchao and comfy-kitchen swizzled themselves, restored and multiplied out."""
    order = Atoms128x4().scales
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
    order, a = Atoms128x4().scales, np.zeros((*lead, 3, 5), np.uint8)
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
    assert Order("n (k p) -> n k p", k=3).whole_bytes() is None  # K = 32 is padded to 33: p is 11
    assert Order("n (k p) -> n k -p", p=2).whole_bytes() == Order("n (k p) -> n k -p", p=1)
    assert Order("n (k p) -> n k -p", p=2).high_first
    assert not Order("n (k p) -> -n k p", p=2).high_first


# -- a layout is a statement --


@dataclass(frozen=True)
class Stated(Layout):
    """Any statement as a layout."""

    name: ClassVar[str] = "stated"
    used_by: ClassVar[str] = "the tests"
    statement: str = "n k"
    most: int = 4096
    on: bool = False

    @property
    def codes(self):
        return Order(f"n k -> {self.statement}")

    @property
    def scales(self):
        return Order("n k -> k n")

    def needs(self, shape):
        return f"K = {shape[-1]} is above {self.most}" if shape[-1] > self.most else None


@pytest.fixture
def stated(monkeypatch):
    monkeypatch.setattr(layouts, "LAYOUTS", (*LAYOUTS, Stated()))


@pytest.mark.usefixtures("stated")
@pytest.mark.parametrize("statement", ["n k", "k n", "-k n", "-n -k"])
@pytest.mark.parametrize("shape", [((), 5, 48), ((2,), 4, 20), ((), 3, 32)], ids=ids)
def test_contract_of_statements(statement, shape, rng):
    experts, n, k = shape
    check_layout(Stated(statement), random_weight(rng, n, k, experts, per_row=True))


@pytest.mark.usefixtures("stated")
def test_fields_in_keys():
    assert Stated().key == "stated(statement=n k, most=4096, on=False)"
    assert parse("stated") == Stated()
    assert parse(" stated(most=64, on=True) ") == Stated(most=64, on=True)
    for key in ("stated(most=many)", "stated(on=1)", "stated(most=0)"):
        with pytest.raises(LayoutError):
            parse(key)


def test_needs_is_asked(rng):
    with pytest.raises(LayoutError) as caught:
        Stated(most=32).pack(random_weight(rng, 2, 48))
    assert str(caught.value) == "layout stated cannot hold this weight: K = 48 is above 32: got (2, 48)"
