"""Block scales in another order than they are read in: suspected where rows have sizes of their own, else never."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte
from checkpoints import E4M3, call, expert_weights, named, nvfp4, save, stacked_experts
from halfbyte.layouts.executors import arrange_numpy, restore_numpy
from halfbyte.modules import Reading
from halfbyte.reading import ATOMS
from halfbyte.suspicion import WORDS, readable, suspect, tiles

atoms = pytest.mark.parametrize("atom", ATOMS)


def made(n, k, rows=0.0, columns=0.0, patches=0.0, seed=0):
    """(N, K/16) u8 scales around 1/2: log2, in eighths, is a number for the row, for the column and for the column in
    each 256 rows, of these deviations, plus noise of deviation 3."""
    rng = np.random.default_rng([n, k, seed])
    g = k // 16
    steps = 48 + 3 * rng.normal(size=(n, g)) + rows * rng.normal(size=(n, 1)) + columns * rng.normal(size=g)
    patch = patches * rng.normal(size=(-(-n // 256), g))
    return np.clip(np.rint(steps + patch.repeat(256, 0)[:n]), 1, 126).astype(np.uint8)


def swizzled(scales, atom):
    return arrange_numpy(ATOMS[atom], scales).reshape(scales.shape)


def unswizzled(scales, atom):
    return restore_numpy(ATOMS[atom], scales.reshape(-1), scales.shape)


@atoms
def test_the_orders_of_words_are_those_of_bytes(atom):
    scales = np.random.default_rng(0).integers(0, 256, (256, 12), np.uint8)
    words = arrange_numpy(WORDS[atom], scales.view(np.uint32))
    assert words.view(np.uint8).tolist() == arrange_numpy(ATOMS[atom], scales).tolist()


@atoms
@pytest.mark.parametrize("k", [1024, 3072, 4096, 7168])
@pytest.mark.parametrize("columns", [0, 4])
def test_swizzled_taken_for_linear(atom, k, columns):
    scales = made(512, k, rows=4, columns=columns)
    found = suspect(swizzled(scales, atom))
    assert found.scale_layout == atom
    share = (16 + columns**2) / (25 + columns**2)  # of the variance, but for chance
    assert found.share == pytest.approx(share, abs=0.05)
    assert found.share_read < found.share / 2
    assert suspect(scales) is None


@atoms
@pytest.mark.parametrize("k", [1024, 3072, 4096, 7168])
def test_linear_taken_for_swizzled(atom, k):
    scales = made(512, k, rows=4, columns=4)
    found = suspect(unswizzled(scales, atom), atom)
    assert found.scale_layout == "linear"
    assert found.share == pytest.approx(32 / 41, abs=0.05)
    assert suspect(scales, atom) is None


@atoms
def test_the_share_is_exact_without_chance(atom):
    """Half of the rows are 8 steps above the others, a variance of 16; a chessboard of 0 and 1 adds 1/4."""
    high = np.random.default_rng(0).permutation(256) < 128
    scales = np.full((256, 16), 48, np.uint8) + 8 * high[:, None].astype(np.uint8)
    scales[0::2, 0::2] += 1
    scales[1::2, 1::2] += 1
    found = suspect(swizzled(scales, atom))
    by_chance = (256 + 16 - 2) * (1 / 4) / (256 * 16 - 1 - (256 + 16 - 2))  # of the 1/4, by as many free numbers
    assert found.share == pytest.approx((16 - by_chance) / 16.25, rel=1e-12)


@pytest.mark.parametrize("k", [192, 128, 576, 2048, 4096, 8192])
@pytest.mark.parametrize("n", [128, 256, 1024])
def test_scales_that_do_not_depend_on_the_row_are_never_suspected(n, k):
    for seed in range(4):
        scales = made(n, k, seed=seed)
        assert suspect(scales) is None
        for atom in ATOMS:
            assert suspect(scales, atom) is None


@pytest.mark.parametrize("k", [1024, 2048, 3072, 8192])
@pytest.mark.parametrize("parts", [(4, 0, 0), (0, 4, 0), (20, 4, 0), (1, 20, 0), (0, 0, 4), (4, 0, 4), (0.2, 0.2, 8)])
def test_linear_scales_are_not_suspected_whatever_their_structure(parts, k):
    """Also where K is a power of two, so that the other order has one column of these in each row."""
    scales = made(512, k, *parts)
    assert suspect(scales) is None
    for atom in ATOMS:
        assert suspect(scales, atom) is None


def test_smooth_scales_are_not_suspected():
    """Neighbours are alike in both directions, which is neither a row's size nor a column's."""
    for n, k in ((256, 2048), (512, 4096)):
        rows, columns = np.meshgrid(np.arange(n) / 20, np.arange(k // 16) / 12, indexing="ij")
        wave = np.sin(rows + columns) + np.sin(0.7 * rows - 1.3 * columns)
        scales = np.rint(48 + 8 * wave + np.random.default_rng(n).normal(size=wave.shape)).astype(np.uint8)
        assert suspect(scales) is None


@pytest.mark.parametrize("fill", [0, 56, 127, 255])
def test_constant_scales(fill):
    scales = np.full((256, 16), fill, np.uint8)
    assert suspect(scales) is None
    assert suspect(scales, "8x4") is None


def test_quantized_gaussians_are_not_suspected():
    for seed in range(3):
        dense = np.random.default_rng(seed).normal(0, 0.02, (256, 1024)).astype(np.float32)
        scales = np.asarray(halfbyte.quantize(dense).scales)
        assert suspect(scales) is None
        assert all(suspect(swizzled(scales, atom)) is None for atom in ATOMS)


@atoms
def test_quantized_rows_of_different_size_are(atom):
    rng = np.random.default_rng(5)
    dense = rng.normal(0, 0.02, (256, 1024)) * np.exp(rng.normal(0, 0.3, (256, 1)))
    scales = np.asarray(halfbyte.quantize(dense.astype(np.float32)).scales)
    assert suspect(swizzled(scales, atom)).scale_layout == atom
    assert suspect(scales) is None


def test_tiles():
    assert tiles(128, 64) == [0]
    assert tiles(256, 64) == [0, 128]
    assert tiles(384, 64) == [0, 256]
    assert tiles(128 * 40, 64) == [128 * (i * 39 // 15) for i in range(16)]
    assert tiles(128 * 40, 256) == [128 * t for t in (0, 13, 26, 39)]
    assert tiles(128 * 40, 1 << 15) == [0, 128 * 39]


def test_readable():
    assert readable(128, 8, None)
    assert readable(256, 36, "128x4")
    assert not readable(128, 8, "128x4-undone")
    assert not readable(64, 8, None)
    assert not readable(192, 8, None)
    assert not readable(0, 8, None)
    assert not readable(128, 4, None)  # one atom wide: both orders keep the four of a row together
    assert not readable(128, 10, None)
    assert not readable(128, 1 << 16, None)


# --- verify


def written(path, change, n=256, k=1024, dialect="modelopt"):
    """A checkpoint with one weight, whose scales ``change`` makes of structured ones."""
    path.mkdir()
    roles = nvfp4(n, k, scale2=2.0**-11)
    roles["scales"] = change(made(n, k, rows=4)).view(E4M3)
    return save(path / "model.safetensors", named(dialect, "a", roles))


def suspected(path, **options):
    return [f for f in halfbyte.verify(path, **options).findings if f.code == "HB140"]


@atoms
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_verify_says_what_to_try(atom, dialect, tmp_path):
    path = written(tmp_path / "x", lambda s: swizzled(s, atom), dialect=dialect)
    (finding,) = suspected(path)
    assert (finding.severity, finding.tensor, finding.index) == ("note", "a.weight_scale", None)
    assert finding.hint == f"try --scale-layout {atom}; only --against the dense model tells"
    share = finding.got.removeprefix("rows and columns explain ").split(" % of log2(scale) as it is read, ")
    assert int(share[0]) < 20
    assert share[1] in [f"{p} % as {atom}" for p in range(60, 69)]  # 16 of 25
    assert suspected(path, reading=Reading(scale_layout=atom)) == []
    assert suspected(path, sample=0.5) == []
    assert call("verify", path).rc == 0


@atoms
def test_verify_of_linear_scales_read_as_swizzled(atom, tmp_path):
    path = written(tmp_path / "x", lambda s: s)
    assert suspected(path) == []
    (finding,) = suspected(path, reading=Reading(scale_layout=atom))
    assert finding.hint == f"try it without --scale-layout {atom}; only --against the dense model tells"
    assert suspected(path, reading=Reading(scale_layout=f"{atom}-undone")) == []


@atoms
def test_verify_of_a_stack_of_experts(atom, tmp_path):
    """Three experts, swizzled each for itself; those that lie transposed are not judged."""
    weights = expert_weights(3, 128, 256, ("down_proj",), scale2=lambda e, i: 2.0**-11)
    for (e, _), roles in weights.items():
        roles["scales"] = swizzled(made(256, 128, rows=6, seed=e), atom).view(E4M3)
    path = save(tmp_path / "x.safetensors", stacked_experts("model.layers.0.mlp.experts", weights))
    (finding,) = suspected(path)
    assert (finding.tensor, finding.index) == ("model.layers.0.mlp.experts.down_proj_weight_scale", None)
    assert f"--scale-layout {atom}" in finding.hint
    columns = stacked_experts("model.layers.0.mlp.experts", weights, columns=True)
    assert suspected(save(tmp_path / "y.safetensors", columns)) == []


@pytest.mark.parametrize(("n", "k"), [(192, 1024), (64, 1024), (256, 64), (256, 1040)])
def test_verify_judges_whole_tiles_only(n, k, tmp_path):
    path = written(tmp_path / "x", lambda s: s[::-1], n=n, k=k)
    assert suspected(path) == []
