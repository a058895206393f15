"""The view by three tile indices: strides, words, lanes, and activations in the same tiles."""

import itertools

import numpy as np
import pytest

from halfbyte.activations import quantize_activation
from halfbyte.errors import LayoutError, QuantizeError
from halfbyte.layouts import ExpertsOutPair, Rows, Tiles, Tiles64
from halfbyte.recipes import quantize
from helpers import assert_same_bytes, nibbles, random_weight


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def no_data(grid, m_axis, k_axis, scale_order="atom", experts=None):
    """A view of a size that needs no memory."""
    x, y, z = grid
    third = grid[3 - m_axis - k_axis]
    words = x * y * z if scale_order != "atom" else third * -(-grid[m_axis] // 128) * grid[k_axis] * 128
    scale = None if experts is None else np.ones(experts, np.float32)
    byte = np.zeros(1, np.uint8)
    codes, scales = np.broadcast_to(byte, (x, y, z, 32)), np.broadcast_to(byte, (words, 4))
    return Tiles(codes, scales, grid, m_axis, k_axis, scale_order, scale)


def expert_tiles(weight):
    """The view of experts in K-major form: (expert, k, N/64), a row of scales for each k."""
    buffers = ExpertsOutPair("atom").pack(weight).buffers()
    experts, n, k = weight.shape
    return Tiles(buffers["codes"], buffers["scales"], (experts, k, n // 64), global_scale=buffers["scale2"].reshape(-1))


def test_strides():
    """In vectors of 16 bytes: up (E, H, I/64), down (E, I, H/64), activations (M, H/64, 1)."""
    hidden, inter = 2048, 768
    up, down = no_data((8, hidden, inter // 64), 1, 2), no_data((8, inter, hidden // 64), 1, 2)
    activations = no_data((5, hidden // 64, 1), 0, 1, "marlin")
    assert up.strides == (hidden * inter // 64 * 2, inter // 64 * 2, 2)
    assert down.strides == (inter * hidden // 32, hidden // 32, 2)
    assert activations.strides == (hidden // 64 * 2, 2, 0)
    assert (up.expert_axis, activations.expert_axis) == (0, 2)
    assert up.scale_k_tiles == -(-inter // 16 // 4)
    assert up.scale_expert_stride == hidden // 128 * (inter // 64) * 128
    assert no_data((2, 130, 3), 1, 2).scale_expert_stride == 2 * 3 * 128


def test_offsets_beyond_32_bits():
    """64 experts of 2^16 x 2^16: the last tile begins at 8.6e9 vectors of 16 bytes."""
    tiles = no_data((64, 2**16, 2**10), 1, 2)
    assert tiles.tile_offset((63, 2**16 - 1, 2**10 - 1)) == 64 * 2**26 * 2 - 2
    assert tiles.scale_index((63, 2**16 - 1, 2**10 - 1)) == 64 * 2**26 - 1


def test_tile_offsets_are_memory_order():
    tiles = no_data((3, 5, 4), 1, 2)
    for tile in itertools.product(range(3), range(5), range(4)):
        assert tiles.tile_offset(tile) == 2 * np.ravel_multi_index(tile, (3, 5, 4))


def test_scale_indices_are_the_tiles_of_128x4(rng):
    """Against pad, reshape, transpose; and four times the index is the byte of the formula in 16-wide columns."""
    experts, n, k_tiles = 2, 130, 3
    words = rng.integers(0, 2**32, (experts, n, k_tiles), np.uint32)
    padded = np.zeros((experts, 256, k_tiles), np.uint32)
    padded[:, :n] = words
    atoms = padded.reshape(experts, 2, 4, 32, k_tiles).transpose(0, 1, 4, 3, 2).reshape(-1)
    tiles = no_data((experts, n, k_tiles), 1, 2)
    for tile in itertools.product(range(experts), range(n), range(k_tiles)):
        assert atoms[tiles.scale_index(tile)] == words[tile]
    for m, chunk in ((0, 0), (33, 4), (129, 8)):  # kChunk counts 16 columns, the tile 64
        byte = m // 128 * k_tiles * 512 + chunk // 4 * 512 + m % 32 * 16 + m % 128 // 32 * 4 + chunk % 4
        assert tiles.scale_index((0, m, chunk // 4)) * 4 == byte


def test_bytes_1_and_2_are_exchanged():
    scales = np.array([1, 2, 3, 4], np.uint8)
    linear = Tiles(np.zeros(32, np.uint8), scales, (1, 1, 1), scale_order="linear")
    assert linear.read_block_scale_word((0, 0, 0)) == 0x04020301
    marlin = Tiles(np.zeros(32, np.uint8), scales, (1, 1, 1), scale_order="marlin")
    assert marlin.read_block_scale_word_linear((0, 0, 0)) == 0x04030201


def test_three_orders_read_the_same_scales(rng):
    weight = random_weight(rng, 130, 192, (2,))
    views = {order: Tiles.of(Tiles64(order).pack(weight)) for order in ("atom", "linear", "marlin")}
    for tile in itertools.product(range(2), range(130), range(3)):
        e, n, k = tile
        s0, s1, s2, s3 = (int(s) for s in weight.scales[e, n, 4 * k : 4 * k + 4])
        word = s0 | s2 << 8 | s1 << 16 | s3 << 24
        assert views["atom"].read_block_scale_word(tile) == word
        assert views["linear"].read_block_scale_word(tile) == word
        assert views["marlin"].read_block_scale_word_linear(tile) == word


def test_words_are_not_exchanged_twice(rng):
    weight = random_weight(rng, 2, 64)
    with pytest.raises(LayoutError, match="use read_block_scale_word_linear"):
        Tiles.of(Tiles64("marlin").pack(weight)).read_block_scale_word((0, 0, 0))
    for order in ("atom", "linear"):
        with pytest.raises(LayoutError, match="use read_block_scale_word"):
            Tiles.of(Tiles64(order).pack(weight)).read_block_scale_word_linear((0, 0, 0))


def test_codes_of_a_tile(rng):
    weight = random_weight(rng, 3, 128, (2,))
    tiles = Tiles.of(Tiles64().pack(weight))
    codes = nibbles(weight.codes)
    for e, n, k in itertools.product(range(2), range(3), range(2)):
        for chunk in (0, 1):
            words = tiles.load_tile_uint4((e, n, k), chunk)
            for lane in range(4):
                word = tiles.load_tile_uint32_lane((e, n, k), chunk, lane)
                assert word == words[lane]
                start = 64 * k + (chunk * 4 + lane) * 8
                assert [word >> 4 * i & 15 for i in range(8)] == codes[e, n, start : start + 8].tolist()


def test_the_codes_are_those_of_rows(rng):
    weight = random_weight(rng, 5, 192)
    buffers = Tiles64().pack(weight).buffers()
    assert_same_bytes(buffers["codes"], Rows().pack(weight).buffers()["codes"])
    assert Tiles64().sizes((1, 64))["codes"] == 32
    assert buffers["codes"].ctypes.data % 16 == 0


@pytest.mark.parametrize("k", [16, 80, 20])
def test_k_is_whole_tiles(rng, k):
    with pytest.raises(LayoutError) as caught:
        Tiles64().pack(random_weight(rng, 4, k))
    assert str(caught.value) == (
        f"layout tiles64 cannot hold this weight: K = {k} is not a multiple of 64: got (4, {k})"
    )


def test_global_scale(rng):
    """An absent one is 1.0, as ones are; each expert has its own."""
    weight = random_weight(rng, 2, 64, (3,))
    tiles = Tiles.of(Tiles64().pack(weight))
    assert [tiles.scale_at(e) for e in range(3)] == weight.scale2.reshape(-1).tolist()
    absent, ones = no_data((3, 2, 1), 1, 2), no_data((3, 2, 1), 1, 2, experts=3)
    for e in range(3):
        assert absent.scale_at(e).tobytes() == ones.scale_at(e).tobytes() == np.float32(1).tobytes()
    with pytest.raises(LayoutError) as caught:
        no_data((3, 2, 1), 1, 2, experts=2)
    assert str(caught.value) == "fewer global scales than experts: got 2, expected 3"
    with pytest.raises(LayoutError, match="cannot hold a scale2 for each row"):
        Tiles.of(Tiles64().pack(random_weight(rng, 2, 64, per_row=True)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m_axis": 2}, r"two of the axes 0, 1, 2: got \(2, 2\)"),
        ({"k_axis": 3}, r"two of the axes 0, 1, 2: got \(1, 3\)"),
        ({"m_axis": -1}, r"two of the axes 0, 1, 2: got \(-1, 2\)"),
        ({"grid": (1, 2)}, "not a grid of tiles"),
        ({"grid": (1, -2, 1)}, "not a grid of tiles"),
        ({"grid": (1, 3, 1)}, "codes do not fit the grid: got uint8 .64,., expected 96 u8"),
        ({"scales": np.zeros(508, np.uint8)}, "scales do not fit the grid: got uint8 .508,., expected 512 u8"),
        ({"codes": np.zeros(64, np.int8)}, "codes do not fit the grid"),
        ({"scale_order": "rows"}, "unknown scale order: got 'rows', expected atom or linear or marlin"),
    ],
    ids=str,
)
def test_views_that_cannot_be(changes, message):
    good = {"codes": np.zeros(64, np.uint8), "scales": np.zeros(512, np.uint8), "grid": (1, 2, 1)}
    assert Tiles(**good).grid == (1, 2, 1)
    with pytest.raises(LayoutError, match=message):
        Tiles(**good | changes)


def test_indices_that_are_not_there(rng):
    tiles = Tiles.of(Tiles64().pack(random_weight(rng, 2, 64)))
    for tile in ((1, 0, 0), (0, 2, 0), (0, 0, 1), (0, -1, 0), (0, 0)):
        for read in (tiles.tile_offset, tiles.scale_index, tiles.read_block_scale_word):
            with pytest.raises(LayoutError, match="no such tile"):
                read(tile)
    with pytest.raises(LayoutError, match="no such chunk: got 2, expected 0 or 1"):
        tiles.load_tile_uint4((0, 0, 0), 2)
    with pytest.raises(LayoutError, match="no such lane: got 4, expected 0 to 3"):
        tiles.load_tile_uint32_lane((0, 0, 0), 0, 4)
    with pytest.raises(LayoutError, match="not tiles of 64: got rows, expected tiles64"):
        Tiles.of(Rows().pack(random_weight(rng, 2, 64)))
    with pytest.raises(LayoutError, match="more than one expert axis"):
        Tiles.of(Tiles64().pack(random_weight(rng, 2, 64, (2, 3))))


def test_experts_in_tiles_along_the_output(rng):
    """A tile of the K-major form is 64 output features of one k; the word of its scales is for 16 of them each."""
    weight = random_weight(rng, 128, 48, (2,))
    weight = weight.replace(scales=weight.scales[:, ::16].repeat(16, 1))
    tiles, codes = expert_tiles(weight), nibbles(weight.codes)
    for e, k, chunk in itertools.product(range(2), range(48), range(2)):
        s0, s1, s2, s3 = (int(s) for s in weight.scales[e, chunk * 64 : chunk * 64 + 64 : 16, k // 16])
        assert tiles.read_block_scale_word((e, k, chunk)) == s0 | s2 << 8 | s1 << 16 | s3 << 24
        words = tiles.load_tile_uint4((e, k, chunk), 0) + tiles.load_tile_uint4((e, k, chunk), 1)
        column = codes[e, chunk * 64 : chunk * 64 + 64, k].tolist()
        assert [words[i >> 3] >> 4 * (i & 7) & 15 for i in range(64)] == column
    assert tiles.scale_at(1) == weight.scale2[1, 0, 0]


# -- activations --


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_activations(rng, dtype):
    x = rng.normal(0, 1, (5, 192)).astype(dtype)
    scale = float(np.abs(x).max()) / 2688
    tiles = quantize_activation(x, scale)
    weight = quantize(x, scale2=scale)
    assert (tiles.grid, tiles.m_axis, tiles.k_axis) == ((5, 3, 1), 0, 1)
    assert tiles.strides == (6, 2, 0)
    assert_same_bytes(tiles.codes.reshape(5, 96), weight.codes)
    for m, k in itertools.product(range(5), range(3)):
        s0, s1, s2, s3 = (int(s) for s in weight.scales[m, 4 * k : 4 * k + 4])
        word = s0 | s2 << 8 | s1 << 16 | s3 << 24
        assert tiles.read_block_scale_word_linear((m, k, 0)) == word
        assert tiles.scale_index((m, k, 0)) == tiles.tile_offset((m, k, 0)) // 2 == m * 3 + k
        swizzled = Tiles.of(Tiles64("atom").pack(weight))
        assert swizzled.read_block_scale_word((0, m, k)) == word
    assert tiles.scale_at(0) == np.float32(scale)
    assert np.linalg.norm(weight.dequantize() - x) < 0.11 * np.linalg.norm(x.astype(np.float32))


def test_activations_that_cannot_be():
    x = np.ones((2, 64), np.float32)
    tiles = quantize_activation(x, 1.0)  # 1 / 6 rounds to 0.171875, and 1 / 0.171875 to 6
    assert tiles.read_block_scale_word_linear((1, 0, 0)) == 0x23232323
    assert tiles.load_tile_uint4((1, 0, 0), 1) == (0x77777777,) * 4
    with pytest.raises(LayoutError, match="K = 80 is not a multiple of 64"):
        quantize_activation(np.ones((2, 80), np.float32), 1.0)
    with pytest.raises(LayoutError, match="K = 70 is not a multiple of 64"):
        quantize_activation(np.ones((2, 70), np.float32), 1.0)
    with pytest.raises(QuantizeError, match="larger scale"):
        quantize_activation(x * 3000, 1.0)
    with pytest.raises(QuantizeError, match="not finite"):
        quantize_activation(x * np.inf, 1.0)
    with pytest.raises(QuantizeError, match="positive and finite"):
        quantize_activation(x, 0.0)


def test_no_activations():
    tiles = quantize_activation(np.zeros((0, 64), np.float32), 1.0)
    assert tiles.grid == (0, 1, 1)
    assert tiles.codes.size == tiles.scales.size == 0
