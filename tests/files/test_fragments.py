"""Fragments of a tile: the lane map, equality with slices of the whole, ragged ends, and no byte read beyond them."""

import os
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from checkpoints import environment
from halfbyte.errors import UsageError, WeightError
from halfbyte.fragments import FragmentLoader, lane_origin
from halfbyte.weight import Weight
from helpers import assert_same_bytes, exact, random_weight

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), BF16, np.dtype(np.float16)]
SHAPES = [(16, 32, 16), (40, 64, 48), (100, 33, 96), (7, 5, 20), (1, 1, 2), (17, 70, 62), (3, 32, 30)]
"""(M, N, K): whole tiles, ragged M and N, and every kind of last block: whole, a few runs, part of a run."""


def made(m, n, k, dtype=BF16):
    """Activations, and a weight with garbage in the padding of K."""
    rng = np.random.default_rng([m, n, k])
    w = random_weight(rng, n, -(-k // 16) * 16).replace(scale2=1.0, k=k)
    return rng.standard_normal((m, k)).astype(dtype), w


def padded(a, rows, columns):
    out = np.zeros((rows, columns), a.dtype)
    out[: a.shape[0], : a.shape[1]] = a
    return out


def refusal(make):
    with pytest.raises(UsageError) as caught:
        make()
    return str(caught.value)


# -- the lane map --


def test_lane_origins_by_hand():
    assert [lane_origin(lane) for lane in (0, 1, 2, 5, 8, 16, 31)] == [
        (0, 0), (0, 4), (1, 0), (2, 4), (0, 8), (4, 0), (7, 12),
    ]  # fmt: skip


def test_lanes_cover_the_tile_once():
    origins = [lane_origin(lane) for lane in range(32)]
    assert sorted(origins) == [(row, column) for row in range(8) for column in (0, 4, 8, 12)]
    for tile_rows in (16, 32):
        held = [(r + 8 * j, c + i) for r, c in origins for j in range(tile_rows // 8) for i in range(4)]
        assert sorted(held) == [(row, column) for row in range(tile_rows) for column in range(16)]


@pytest.mark.parametrize("lane", [-1, 32])
def test_no_such_lane(lane):
    assert refusal(lambda: lane_origin(lane)) == f"no such lane: got {lane}, expected 0..31"


# -- activations --


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_load_a(m, n, k, dtype):
    a, w = made(m, n, k, dtype)
    loader, whole = FragmentLoader.of(a, w), padded(a, m + 16, k + 16)
    for row0 in (*range(0, m, 16), m - 1):
        for k0 in range(0, k, 16):
            tile = np.zeros((16, 16), dtype)
            inside = row0 + 16 <= m and k0 + 16 <= k
            for lane in range(32):
                got = loader.load_a(row0, k0, lane, bounded=True)
                assert got.dtype == dtype
                r, c = lane_origin(lane)
                tile[r, c : c + 4], tile[r + 8, c : c + 4] = got[:4], got[4:]
                if inside:
                    assert_same_bytes(loader.load_a(row0, k0, lane, bounded=False), got)
            assert_same_bytes(tile, whole[row0 : row0 + 16, k0 : k0 + 16])


def test_load_a_that_is_not_bounded():
    loader = FragmentLoader.of(*made(40, 64, 56))
    assert refusal(lambda: loader.load_a(32, 0, 0, bounded=False)) == (
        "a tile that is not bounded reaches outside: got rows 32..48, columns 0..16, expected within (40, 56); "
        "pass bounded=True on the last tiles"
    )
    assert "columns 48..64" in refusal(lambda: loader.load_a(0, 48, 0, bounded=False))
    for row0 in (-1, 40):
        assert refusal(lambda r=row0: loader.load_a(r, 0, 0, bounded=True)) == (
            f"row0 is outside: got {row0}, expected 0..39"
        )
    for k0 in (-16, 8, 64):
        assert refusal(lambda k=k0: loader.load_a(0, k, 0, bounded=True)) == (
            f"k0 is outside, or cuts a block: got {k0}, expected a multiple of 16 below 56"
        )


# -- weights --


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_decode_b(m, n, k, dtype):
    a, w = made(m, n, k, dtype)
    loader = FragmentLoader.of(a, w)
    whole = padded(w.dequantize(dtype.name), n + 32, k + 16)
    for col0 in (*range(0, n, 32), n - 1):
        for k0 in range(0, k, 16):
            tile = np.full((32, 16), np.nan, dtype)
            for lane in range(32):
                got = loader.decode_b(col0, k0, lane)
                assert got.dtype == dtype
                r, c = lane_origin(lane)
                for j in range(4):
                    tile[r + 8 * j, c : c + 4] = got[4 * j : 4 * j + 4]
            assert_same_bytes(tile, whole[col0 : col0 + 32, k0 : k0 + 16])


def test_every_code_and_scale_is_exact_in_bfloat16():
    codes = np.tile(np.frombuffer(bytes.fromhex("1032547698badcfe"), np.uint8), (127, 1))
    scales = np.arange(127, dtype=np.uint8)[:, None]
    w = Weight(codes=codes, scales=scales, scale2=1.0)
    loader = FragmentLoader(np.zeros((1, 16), BF16), codes, scales)
    for n in range(0, 96, 32):
        for lane in range(32):
            r, c = lane_origin(lane)
            got = loader.decode_b(n, 0, lane).astype(np.float64).reshape(4, 4)
            assert_same_bytes(got, exact(w)[n + r : n + 32 : 8, c : c + 4])


@pytest.mark.parametrize("cols", [2, 4, 8, 16])
@pytest.mark.parametrize("strip", [16, 32, 48])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_strips_put_together(m, n, k, strip, cols):
    a, w = made(m, n, k)
    loader = FragmentLoader.of(a, w)
    whole = padded(w.dequantize("bfloat16"), n, k + strip)
    for k0 in range(0, k, strip):
        view = np.full((n + 2, strip), np.nan, BF16)
        for row in range(n):
            for col0 in range(0, strip, cols):
                loader.decode_strip(view, row, row + 1, k0, col0, cols // 2, cols)
        assert_same_bytes(view[1:-1], whole[:, k0 : k0 + strip])
        assert np.isnan(view[[0, -1]].astype(np.float32)).all()  # no other row is written


def test_strips_refused():
    a, w = made(4, 6, 40)
    loader, view = FragmentLoader.of(a, w), np.zeros((2, 32), BF16)
    for nbytes, cols in ((16, 32), (3, 6), (4, 4), (0, 0), (6, 12)):
        assert refusal(lambda b=nbytes, c=cols: loader.decode_strip(view, 0, 0, 0, 0, b, c)) == (
            f"a run holds 2, 4, 8 or 16 columns: got nbytes={nbytes}, cols={cols}"
        )
    for n_local, col0 in ((2, 0), (-1, 0), (0, 32), (0, 4), (0, -8)):
        assert refusal(lambda r=n_local, c=col0: loader.decode_strip(view, 0, r, 0, c, 4, 8)) == (
            f"no such run in the view: got {(n_local, col0)}, expected within (2, 32)"
        )
    assert refusal(lambda: loader.decode_strip(view, 6, 0, 0, 0, 4, 8)) == "n_abs is outside: got 6, expected 0..5"
    assert refusal(lambda: loader.decode_strip(view, 0, 0, 8, 0, 4, 8)).startswith("k0 is outside, or cuts a block")
    for bad in (view.astype(np.float32), view[:, :24], view[0]):
        assert refusal(lambda b=bad: loader.decode_strip(b, 0, 0, 0, 0, 4, 8)).startswith("view does not fit: got")
    assert not view.any()


# -- what it is made from --


def test_the_arrays_are_bound_not_copied():
    a, w = made(4, 6, 40)
    loader = FragmentLoader.of(a, w)
    assert loader.a is a
    assert np.shares_memory(loader.packed, w.codes)
    assert (loader.packed.shape, loader.scales.shape, loader.m, loader.n, loader.k) == ((6, 20), (6, 3), 4, 6, 40)
    other = FragmentLoader(a, w.codes[:, :20], w.scales.view(ml_dtypes.float8_e4m3fn))
    assert np.shares_memory(other.scales, w.scales)
    assert_same_bytes(other.decode_b(0, 32, 9), loader.decode_b(0, 32, 9))


def test_what_does_not_fit():
    a, w = made(4, 6, 40)
    packed, scales = w.codes[:, :20], w.scales
    assert refusal(lambda: FragmentLoader(a, w.codes, scales)) == (
        "packed does not fit: got uint8 (6, 24), expected uint8 (6, 20)"
    )
    assert refusal(lambda: FragmentLoader(a, packed, scales[:, :2])) == (
        "scales does not fit: got uint8 (6, 2), expected uint8 (6, 3)"
    )
    assert refusal(lambda: FragmentLoader(a, packed, scales[:5])).startswith("scales does not fit: got uint8 (5, 3)")
    assert refusal(lambda: FragmentLoader(a, packed.astype(np.int32), scales)).startswith("packed does not fit")
    assert refusal(lambda: FragmentLoader(a.astype(np.float64), packed, scales)) == (
        "a does not fit: got float64 (4, 40), expected (M, K) float32, bfloat16, float16"
    )
    assert refusal(lambda: FragmentLoader(a[:, :39], packed, scales)) == (
        "K is odd: two codes share a byte: got 39; pad a and the weight with a zero"
    )
    assert refusal(lambda: FragmentLoader.of(a, random_weight(np.random.default_rng(0), 6, 40, (2,)))) == (
        "fragments are of one matrix (N, K), not of experts: got (2, 6, 40)"
    )
    assert refusal(lambda: FragmentLoader.of(a, w.replace(pre_scale=np.ones(40, np.float32)))) == (
        "fragments hold no pre_scale; multiply a by it, then pass replace(pre_scale=None)"
    )
    with pytest.raises(WeightError, match="another rank holds it"):
        FragmentLoader.of(a, Weight.null((6, 40)))


# -- nothing beyond the arrays is read --


GUARDED = """
import ctypes, mmap, sys
import ml_dtypes, numpy as np
from halfbyte.fragments import FragmentLoader

libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
maps = []

def guarded(a, at_the_end):
    # A copy of a between two pages that nobody may touch, against the last or the first of them.
    inner = -(-a.nbytes // page) * page
    maps.append(mmap.mmap(-1, inner + 2 * page))
    whole = np.frombuffer(maps[-1], np.uint8)
    start = page + (inner - a.nbytes if at_the_end else 0)
    copy = whole[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
    copy[...] = a
    for edge in (0, page + inner):
        assert libc.mprotect(whole.ctypes.data + edge, page, 0) == 0
    return copy

rng = np.random.default_rng(0)
beyond = sys.argv[1] == "beyond"
for m, n, k in [(40, 33, 62), (1, 1, 2), (16, 32, 16), (17, 70, 30), (100, 5, 4)]:
    for at_the_end in (True, False):
        a = guarded(rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16), at_the_end)
        packed = guarded(rng.integers(0, 256, (n, k // 2), np.uint8), at_the_end)
        scales = guarded(rng.integers(0, 127, (n, -(-k // 16)), np.uint8), at_the_end)
        if beyond:
            np.lib.stride_tricks.as_strided(packed, (packed.size + 1,), (1,))[-1].item()
        loader = FragmentLoader(a, packed, scales)
        view = guarded(np.zeros((1, 64), ml_dtypes.bfloat16), at_the_end)
        for k0 in range(0, k, 16):
            for lane in range(32):
                for row in range(m):
                    loader.load_a(row, k0, lane, True)
                for row in range(n):
                    loader.decode_b(row, k0, lane)
            for cols in (2, 4, 8, 16):
                for col0 in range(0, 64, cols):
                    loader.decode_strip(view, n - 1, 0, k0, col0, cols // 2, cols)
print("done")
"""


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
@pytest.mark.parametrize("what", ["within", "beyond"])
def test_guard_pages(what):
    """Every array ends, or begins, at a page that faults; one byte beyond, on purpose, kills the process."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, what],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )
    if what == "within":
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    else:
        assert done.returncode == -signal.SIGSEGV
