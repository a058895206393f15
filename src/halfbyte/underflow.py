"""How well scale2 suits the blocks of a weight: which block scales have lost bits, in which rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from halfbyte.arrays import to_numpy, without_padding
from halfbyte.errors import UsageError
from halfbyte.numerics import BLOCK, E2M1_VALUES, E4M3_VALUES, FULL_SCALE
from halfbyte.weight import Weight

__all__ = ["ScaleReport", "scale_report"]

_CHUNK: Final = 1 << 20
_SMALLEST_NORMAL: Final = 8  # the byte of 2^-6
_NAN: Final = 127
_REACH: Final = 28672
"""64 * 448: how far the largest block scale is above the smallest that keeps all its bits."""


@dataclass(frozen=True, eq=False)
class ScaleReport:
    """What the block scales of a weight say about its scale2.

    Block scales below 2^-6 have lost bits, and where one is 0 its block is gone. One scale2 for all rows does that to
    the others where a row is about 30,000 times larger; a scale2 for each row does not.

    Args:
        zero: the share of blocks whose scale is 0.
        subnormal: the share of blocks whose scale is below 2^-6, and not 0.
        zero_rows, subnormal_rows: the same for each row, (*E, N) f64.
        nan: the number of blocks whose scale is NaN; they count in no other field.
        largest, smallest: magnitudes of block scales, of those that are not 0; 0 where there are none.
        amax_max, amax_min: the largest magnitude in a block, as a multiple of scale2: of the largest block and of the
            smallest that is not zero; 0 where there are none.
    """

    zero: float
    subnormal: float
    zero_rows: Any
    subnormal_rows: Any
    nan: int
    largest: float
    smallest: float
    amax_max: float
    amax_min: float

    @property
    def window(self) -> tuple[float, float]:
        """What 2688 must lie within, so that no block clips and each has a scale with all its bits."""
        return self.amax_max, _REACH * self.amax_min

    @property
    def in_window(self) -> bool:
        """Whether it does; also where all blocks are zero."""
        low, high = self.window
        return not self.amax_max or low <= FULL_SCALE <= high


def scale_report(weight: Weight) -> ScaleReport:
    """Count what scale2 has cost the blocks of a weight.

    Args:
        weight: (*E, N, K), NumPy or torch; tensors are copied to the host some rows at a time.

    Raises:
        WeightError: a null weight.
    """
    if not isinstance(weight, Weight):
        raise UsageError("not an NVFP4 weight", got=type(weight).__name__, expected="a Weight")
    *experts, n, k = weight.shape
    zero, subnormal = np.zeros((*experts, n), np.int64), np.zeros((*experts, n), np.int64)
    seen = np.zeros(128, np.int64)
    amax_max, amax_min = 0.0, np.inf
    step = max(1, _CHUNK // max(k, 1))
    for expert in np.ndindex(*experts):
        for start in range(0, n, step):
            at = (*expert, slice(start, min(start + step, n)))
            scales = to_numpy(weight.scales[at]) & np.uint8(127)
            zero[at] = (scales == 0).sum(-1)
            subnormal[at] = (scales < _SMALLEST_NORMAL).sum(-1) - zero[at]
            seen += np.bincount(scales.reshape(-1), minlength=128)
            codes = to_numpy(without_padding(weight.codes[at], k))
            magnitudes = np.maximum(codes & np.uint8(7), codes >> np.uint8(4) & np.uint8(7))
            top = magnitudes.reshape(*scales.shape, BLOCK // 2).max(-1)
            amax = (E2M1_VALUES[top] * E4M3_VALUES[scales])[(scales != _NAN) & (scales != 0) & (top != 0)]
            if amax.size:
                amax_max, amax_min = max(amax_max, float(amax.max())), min(amax_min, float(amax.min()))
    used = np.flatnonzero(seen[1:_NAN]) + 1
    blocks = max(weight.scales.shape[-1], 1)
    total = max(zero.size * weight.scales.shape[-1], 1)
    return ScaleReport(
        zero=float(zero.sum() / total),
        subnormal=float(subnormal.sum() / total),
        zero_rows=zero / blocks,
        subnormal_rows=subnormal / blocks,
        nan=int(seen[_NAN]),
        largest=float(E4M3_VALUES[used[-1]]) if used.size else 0.0,
        smallest=float(E4M3_VALUES[used[0]]) if used.size else 0.0,
        amax_max=amax_max,
        amax_min=amax_min if amax_max else 0.0,
    )
