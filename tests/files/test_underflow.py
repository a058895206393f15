"""scale_report: shares by row, extremes, and the window within which scale2 costs nothing."""

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.errors import UsageError, WeightError
from halfbyte.recipes import quantize
from halfbyte.weight import Weight
from helpers import assert_same_bytes, exact, random_weight


def made(scales, code=0x77, scale2=1.0):
    scales = np.array(scales, np.uint8)
    codes = np.full((*scales.shape[:-1], scales.shape[-1] * 8), code, np.uint8)
    return Weight(codes=codes, scales=scales, scale2=scale2)


def test_by_hand():
    w = made([[0x00, 0x80, 0x01, 0x38], [0x07, 0x08, 0x88, 0x40], [0x38, 0x7F, 0xFF, 0xB8]])
    report = hb.scale_report(w)
    assert report.zero_rows.tolist() == [0.5, 0, 0]
    assert report.subnormal_rows.tolist() == [0.25, 0.25, 0]
    assert (report.zero, report.subnormal, report.nan) == (2 / 12, 2 / 12, 2)
    assert (report.largest, report.smallest) == (2, 2.0**-9)
    assert (report.amax_max, report.amax_min) == (12, 6 * 2.0**-9)
    assert report.window == (12, 28672 * 6 * 2.0**-9)
    assert not report.in_window


def test_the_window_ends_where_scales_become_subnormal():
    assert hb.scale_report(made([[0x08, 0x7E]])).in_window  # 2^-6 and 448, with a 6 in each block
    assert hb.scale_report(made([[0x08, 0x7E]])).window == (2688, 2688)
    assert not hb.scale_report(made([[0x07, 0x7E]])).in_window
    assert not hb.scale_report(made([[0x08, 0x7E]], code=0x66)).in_window  # a block of 4: its scale could be finer
    assert hb.scale_report(made([[0x00, 0x38]])).in_window
    assert hb.scale_report(made([[0x00, 0x00]])).in_window
    assert hb.scale_report(made([[0x38, 0x01]], code=0)).window == (0, 0)
    assert hb.scale_report(made([[0x38, 0x01]], code=0)).in_window


@pytest.mark.parametrize("experts", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(5, 48), (3, 20), (1, 31)])
def test_of_random_weights(experts, n, k, monkeypatch):
    w = random_weight(np.random.default_rng(0), n, k, experts, per_row=True)
    dirty = w.replace(codes=w.codes | np.uint8(0x70)) if k == 31 else w  # the nibble beyond K
    dirty = w.replace(codes=np.where(np.arange(w.codes.shape[-1]) == 15, dirty.codes, w.codes))
    report = hb.scale_report(dirty)
    blocks = -(-k // 16)
    unscaled = np.zeros((*experts, n, blocks * 16))
    unscaled[..., :k] = exact(w) / w.scale2
    amax = np.abs(unscaled).reshape(*experts, n, blocks, 16).max(-1)
    assert report.amax_max == pytest.approx(amax.max(), rel=1e-6)
    assert report.amax_min == pytest.approx(amax[amax > 0].min(), rel=1e-6)
    assert_same_bytes(report.zero_rows, (w.scales == 0).mean(-1))
    assert_same_bytes(report.subnormal_rows, ((w.scales < 8) & (w.scales > 0)).mean(-1))
    monkeypatch.setattr("halfbyte.underflow._CHUNK", 1)
    again = hb.scale_report(w)
    assert (again.amax_max, again.amax_min, again.zero, again.nan) == (
        report.amax_max, report.amax_min, report.zero, 0,
    )  # fmt: skip
    assert_same_bytes(again.subnormal_rows, report.subnormal_rows)


def test_an_outlier_row_harms_the_others_past_30000():
    """Features measured: up to a factor of 1e4 nothing is lost, at 1e6 the other rows are gone."""
    dense = np.random.default_rng(0).normal(0, 1, (64, 256)).astype(np.float32)
    reports = {}
    for factor in (1e3, 1e6):
        row = np.ones((64, 1), np.float32)
        row[7] = factor
        reports[factor] = hb.scale_report(quantize(dense * row))
    assert (reports[1e3].zero, reports[1e3].subnormal, reports[1e3].in_window) == (0, 0, True)
    lost = reports[1e6].zero_rows + reports[1e6].subnormal_rows
    assert lost[7] == 0
    assert np.delete(lost, 7).min() == 1
    assert not reports[1e6].in_window


@pytest.mark.parametrize("shape", [(0, 32), (4, 0)], ids=str)
def test_nothing(shape):
    report = hb.scale_report(random_weight(np.random.default_rng(0), *shape))
    assert (report.zero, report.subnormal, report.largest, report.smallest, report.window) == (0, 0, 0, 0, (0, 0))
    assert report.zero_rows.tolist() == [0] * shape[0]
    assert report.in_window


def test_refusals():
    with pytest.raises(WeightError, match="another rank holds it"):
        hb.scale_report(Weight.null((4, 32)))
    with pytest.raises(UsageError, match="not an NVFP4 weight: got ndarray, expected a Weight"):
        hb.scale_report(np.zeros(3))
