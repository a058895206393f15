"""Layouts over torch: the contract again, and byte for byte what NumPy gives."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from contract import MX_VARIANTS, VARIANTS, check_layout, fitting
from halfbyte.errors import LayoutError
from halfbyte.layouts import Fragments, Marlin, Order, Packed, Rows, Tiles, Tiles64
from halfbyte.layouts.executors import arrange, arrange_codes, restore, restore_codes
from halfbyte.weight import LossyWarning, to_torch
from helpers import assert_same_bytes, modelopt, nibbles, random_mxfp4, random_weight
from orders import PLANES, Plane, orders

SHAPES = [
    ((), 1, 16),
    ((), 24, 80),
    ((), 3, 20),
    ((3,), 5, 32),
    ((2, 3), 4, 20),
    ((), 128, 64),
    ((2,), 256, 192),
    ((), 0, 32),
    ((), 4, 0),
    ((2,), 0, 16),
    ((0,), 4, 32),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "per-row, input_scale, pre_scale"])
@pytest.mark.parametrize("layout", VARIANTS, ids=lambda layout: layout.key)
def test_contract(layout, shape, full):
    experts, n, k = shape
    rng = np.random.default_rng(0)
    weight = random_weight(rng, n, k, experts, per_row=full, input_scale=full, pre_scale=full)
    check_layout(layout, weight.torch())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", MX_VARIANTS, ids=lambda layout: layout.key)
def test_contract_of_mxfp4(layout, shape):
    experts, n, k = shape
    weight = random_mxfp4(np.random.default_rng(0), n, k, experts)
    check_layout(layout, weight.torch())
    if not layout.needs(weight.shape):
        packed = layout.pack(weight.torch())
        for name, buffer in layout.pack(weight).buffers().items():
            assert_same_bytes(packed.buffers()[name], buffer)
        assert layout.pack(weight).to("cpu").unpack().same(weight)


@pytest.mark.parametrize("name", ["A", "C", "D"])
@pytest.mark.parametrize("layout", VARIANTS, ids=lambda layout: layout.key)
def test_as_numpy(layout, name):
    weight = modelopt(name)
    if layout.needs(weight.shape):
        return
    weight = fitting(layout, weight)
    numpy, packed = layout.pack(weight), layout.pack(weight.torch())
    moved = numpy.to("cpu")
    assert packed.buffers().keys() == numpy.buffers().keys()
    for key, buffer in numpy.buffers().items():
        assert_same_bytes(packed.buffers()[key], buffer)
        assert_same_bytes(moved.buffers()[key], buffer)
        assert isinstance(moved.buffers()[key], torch.Tensor)
    assert packed.nbytes == numpy.nbytes
    assert moved.unpack().same(weight)


def test_views_of_tensors():
    """Parts of a tensor are packed as what they hold, not as what lies under them."""
    weight = random_weight(np.random.default_rng(0), 9, 64, (2,), per_row=True).torch()
    for part in (weight.rows(2, 7), weight.columns(16, 48), *weight.unstack()):
        check_layout(Rows(), part)


def test_fragments_as_numpy():
    """Every positive scale, zero blocks with codes, and codes that begin at an odd address."""
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 24, 80, (2,))
    scales = np.arange(weight.scales.size, dtype=np.uint8).reshape(weight.scales.shape) % 127
    scales[0, :, ::2] = 0
    weight = weight.replace(scales=scales)
    line = torch.zeros(weight.codes.size + 1, dtype=torch.uint8)
    line[1:] = weight.torch().codes.reshape(-1)
    odd = line[1:].view(weight.codes.shape)
    for layout in (Fragments(), Fragments("float16")):
        numpy = layout.pack(weight)
        for one in (weight.torch(), weight.torch().replace(codes=odd)):
            packed = layout.pack(one)
            for name, buffer in numpy.buffers().items():
                assert_same_bytes(packed.buffers()[name], buffer)
            assert packed.unpack().numpy().same(numpy.unpack())
    assert torch.equal(odd, weight.torch().codes)


def test_scales_that_fragments_cannot_have():
    """In NumPy and torch: each stored byte is read as the scale it was made of, or refused."""
    layout = Fragments()
    valid = layout.pack(random_weight(np.random.default_rng(0), 16, 64).replace(scales=np.full((16, 4), 8, np.uint8)))
    made = {0: 0, **{1 << i: 8 * (12 + i + 1) for i in range(3)}, 3: 116, 5: 122, 6: 124, 7: 126}
    made |= {byte: byte + 120 for byte in range(8, 127)}
    read = {stored: byte for byte, stored in made.items()}
    for stored in range(256):
        for packed in (valid, valid.to("cpu")):
            buffers = packed.buffers()
            buffers["scales"] = buffers["scales"] * 0 + stored
            changed = Packed(layout, packed.shape, buffers)
            if stored in read:
                assert (changed.unpack().scales == read[stored]).all()
                continue
            with pytest.raises(LayoutError) as caught:
                changed.unpack()
            assert str(caught.value) == (
                f"the stored block scale at [0, 0] is no positive E4M3 number: got byte {stored:02X}"
            )


def test_tiles_of_tensors():
    weight = random_weight(np.random.default_rng(0), 3, 128, (2,))
    for order in ("atom", "linear", "marlin"):
        views = [Tiles.of(Tiles64(order).pack(w)) for w in (weight, weight.torch())]
        for tile in [(0, 0, 0), (1, 2, 1)]:
            read = [
                (v.read_block_scale_word_linear if order == "marlin" else v.read_block_scale_word)(tile) for v in views
            ]
            assert read[0] == read[1]
            assert views[0].load_tile_uint4(tile, 1) == views[1].load_tile_uint4(tile, 1)
            assert views[0].scale_at(tile[0]) == views[1].scale_at(tile[0])


@pytest.mark.parametrize("rule", ["max", "min"])
def test_lossy_as_numpy(rule):
    layout = Marlin(scale_format="s0e5m3", rule=rule, lossy=True)
    weight = random_weight(np.random.default_rng(0), 64, 64)
    with pytest.warns(LossyWarning):
        expected = layout.pack(weight)
    with pytest.warns(LossyWarning):
        packed = layout.pack(weight.torch())
    for key, buffer in expected.buffers().items():
        assert_same_bytes(packed.buffers()[key], buffer)
    assert packed.unpack().same(expected.unpack())
    assert_same_bytes(layout.global_scale(packed, "bfloat16"), layout.global_scale(expected, "bfloat16"))


def test_libraries_are_not_mixed():
    good = Rows().pack(random_weight(np.random.default_rng(0), 2, 32)).buffers()
    with pytest.raises(LayoutError):
        Packed(Rows(), (2, 32), good | {"codes": to_torch(good["codes"].copy())})


@pytest.mark.parametrize("plane", PLANES, ids=str)
def test_golden_bytes(plane: Plane):
    source, stored = to_torch(plane.source()), to_torch(plane.stored())
    forwards, back = (arrange_codes, restore_codes) if plane.codes else (arrange, restore)
    assert_same_bytes(forwards(plane.order, source), stored)
    shape = (source.shape[0], source.shape[1] * (2 if plane.codes else 1))
    assert_same_bytes(back(plane.order, stored, shape), source)


def test_odd_count_of_codes():
    order, codes = Order("n (k p) -> n k p", p=17), np.arange(1, 9, dtype=np.uint8)[None]
    flat = arrange_codes(order, torch.from_numpy(codes))
    assert_same_bytes(flat, arrange_codes(order, codes))
    assert_same_bytes(restore_codes(order, flat, (1, 16)), codes)


@given(orders(), st.tuples(st.integers(0, 9), st.integers(0, 9)), st.sampled_from([(), (2,), (2, 3), (0,)]))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_any_statement(order, shape, lead):
    a = 1 + np.arange(int(np.prod((*lead, *shape))), dtype=np.int16).reshape(*lead, *shape)
    flat = arrange(order, torch.from_numpy(a))
    assert flat.is_contiguous()
    if 0 not in lead:
        assert_same_bytes(flat, arrange(order, a))
    assert flat.shape == (*lead, order.count(shape))
    back = restore(order, flat, shape)
    assert back.is_contiguous()
    assert_same_bytes(back, a)


@given(orders(), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2**32 - 1))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_any_statement_of_codes(order, n, blocks, seed):
    shape = (n, blocks * 16)
    assume(order.count(shape) % 2 == 0)
    codes = np.random.default_rng(seed).integers(0, 256, (n, blocks * 8), np.uint8)
    flat = arrange_codes(order, torch.from_numpy(codes))
    assert_same_bytes(flat, arrange_codes(order, codes))
    assert_same_bytes(nibbles(flat), arrange(order, nibbles(codes)))
    assert_same_bytes(restore_codes(order, flat, shape), codes)
