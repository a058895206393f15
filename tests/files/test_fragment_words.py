"""``fragments``: its words and scale bytes read by the tables of steps alone, as a kernel reads them."""

import ml_dtypes
import numpy as np
import pytest

from halfbyte.errors import LayoutError
from halfbyte.layouts import Fragments, GateUp, Packed, parse
from halfbyte.layouts.fragments import CODE, FACTOR, SCALE, STEPS
from halfbyte.numerics import E2M1_VALUES, E4M3_VALUES
from halfbyte.weight import Weight
from helpers import assert_same_bytes, random_weight

FLOATS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
dtypes = pytest.mark.parametrize("dtype", FLOATS)


def rotl(words, rotate):
    return words << rotate | words >> (32 - rotate) % 32 if rotate else words


def outputs(words, dtype):
    """(..., 4, 2) of the dtype: output o = 2 h + rh of each word, and of it p = 0 and 1."""
    found = []
    for steps in STEPS[dtype]:
        whole = np.zeros_like(words)
        for rotate, mask in steps:
            whole |= rotl(words, rotate) & np.uint32(mask)
        found += [whole & np.uint32(0xFFFF), whole >> 16]
    return np.stack(found, -1).astype(np.uint16).view(FLOATS[dtype]).reshape(*words.shape, 4, 2)


def scale_floats(stored, dtype):
    shift, base = SCALE[dtype]
    return (base | stored.astype(np.uint16) << shift).view(FLOATS[dtype])


def read(packed):
    """(N, K) f64 without scale2, and what lies beyond N and K."""
    n, k = packed.shape
    tiles, units, dtype = -(-n // 16), -(-k // 64), packed.layout.dtype
    buffers = packed.buffers()
    codes = outputs(buffers["codes"].view("<u4").reshape(tiles, units, 8, 4, 4), dtype)
    scales = scale_floats(buffers["scales"].reshape(tiles, units, 8, 4, 1, 1, 2, 1), dtype)
    codes = codes.reshape(tiles, units, 8, 4, 4, 2, 2, 2)  # t u g kt c h rh p
    product = codes * scales
    assert product.dtype == FLOATS[dtype]
    exact = codes.astype(np.float64) * scales.astype(np.float64)
    assert np.array_equal(product.astype(np.float64), exact)
    return (exact * FACTOR).transpose(0, 6, 2, 1, 3, 5, 4, 7).reshape(16 * tiles, 64 * units)


@dtypes
def test_steps_give_every_bit_a_place(dtype):
    for bit in range(32):
        word = np.array(1 << bit, np.uint32)
        assert sum(int((rotl(word, r) & np.uint32(mask)) != 0) for steps in STEPS[dtype] for r, mask in steps) == 1


@dtypes
def test_codes_as_floats(dtype):
    """Each of the 16 codes at each of the 8 places of a word."""
    for row, column in [(rh * 8, 8 * h + p) for rh in (0, 1) for h in (0, 1) for p in (0, 1)]:
        for code in range(16):
            codes = np.zeros((16, 8), np.uint8)
            codes[row, column // 2] = code << column % 2 * 4
            packed = Fragments(dtype).pack(Weight(codes=codes, scales=np.full((16, 1), 0x38, np.uint8), scale2=1.0))
            words = packed.buffers()["codes"].view("<u4")
            wanted = np.zeros((128, 4, 2), FLOATS[dtype])
            wanted[0, column // 8 * 2 + row // 8, column % 2] = E2M1_VALUES[code] * CODE[dtype]
            assert_same_bytes(outputs(words, dtype), wanted)


@dtypes
def test_scales_as_floats(dtype):
    """All positive scales, subnormal ones too, and 0 where the dtype has it."""
    scales = np.zeros((16, 8), np.uint8)
    scales.reshape(-1)[:127] = np.arange(127)
    packed = Fragments(dtype).pack(Weight(codes=np.zeros((16, 64), np.uint8), scales=scales, scale2=1.0))
    stored = packed.buffers()["scales"].reshape(2, 8, 4, 2).transpose(3, 1, 0, 2).reshape(16, 8)
    unit = FACTOR * CODE[dtype]  # a scale's, times a code's, is the value's
    values = scale_floats(stored, dtype).astype(np.float64) * unit
    held = (scales > 0) | (dtype == "float16")
    assert np.array_equal(values[held], E4M3_VALUES[scales[held]])
    assert not stored[scales == 0].any()


@dtypes
@pytest.mark.parametrize(("n", "k"), [(1, 16), (16, 64), (17, 80), (40, 96), (33, 112), (64, 192), (5, 20)])
def test_read_by_steps(dtype, n, k):
    weight = random_weight(np.random.default_rng(n), n, k).replace(scale2=np.ones((1, 1), np.float32))
    found = read(Fragments(dtype).pack(weight))
    assert np.array_equal(found[:n, :k], weight.dequantize().astype(np.float64))
    assert not found[n:].any()
    assert not found[:, k:].any()


def test_codes_of_zero_blocks():
    """bfloat16 has no scale of 0, so codes there are 0; nothing else is lost. float16 loses nothing."""
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 24, 80)
    scales = np.where(rng.integers(0, 3, weight.scales.shape) == 0, 0, np.maximum(weight.scales, 1)).astype(np.uint8)
    weight = weight.replace(scales=scales)
    assert Fragments("float16").zero_blocks == "kept"
    assert Fragments("float16").pack(weight).unpack().same(weight)
    for layout in (Fragments(), GateUp("up_first", Fragments())):
        assert layout.zero_blocks == "canonical"
        back = layout.pack(weight).unpack()
        kept = weight.replace(codes=np.where((scales == 0).repeat(8, -1), 0, weight.codes).astype(np.uint8))
        assert not kept.same(weight)
        assert back.same(kept)
        assert np.array_equal(back.dequantize(), weight.dequantize())


@dtypes
def test_a_stored_scale_that_is_none(dtype):
    packed = Fragments(dtype).pack(random_weight(np.random.default_rng(0), 16, 64))
    buffers = packed.buffers()
    scales = buffers["scales"].copy()
    scales[3] = 0x01  # g 0, kt 1, rh 1
    with pytest.raises(LayoutError) as caught:
        Packed.from_buffers(packed.layout, packed.shape, buffers | {"scales": scales}).unpack()
    assert str(caught.value) == "the stored block scale at [8, 1] is no positive E4M3 number: got byte 01"


def test_a_dtype_that_is_none():
    with pytest.raises(LayoutError, match="not a value of dtype: got 'float32', expected bfloat16 or float16"):
        parse("fragments(dtype=float32)")
