"""What a recipe is: a way to choose the scales and codes of a dense tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from halfbyte.errors import QuantizeError
from halfbyte.numerics import BLOCK, E4M3_MAX, F32, U8, reciprocal

Like = Literal["modelopt", "compressed-tensors"]
LIKES: tuple[Like, ...] = ("modelopt", "compressed-tensors")

_CHUNK = 1 << 18
"""Elements a step works on: its f32 temporaries stay in a core's second-level cache."""


@dataclass(frozen=True)
class TensorScale:
    """The second scale of a tensor.

    Attributes:
        scale2: multiplies.
        divisor: the reciprocal as computed, where a peer computes that first; scale2 is then its
            rounded reciprocal.
        fixed: the caller chose it, so a block that needs more room is refused and not clipped.
    """

    scale2: np.float32
    divisor: np.float32 | None = None
    fixed: bool = False

    @classmethod
    def from_divisor(cls, divisor: np.float32) -> TensorScale:
        """The scale whose stored form is ``divisor``."""
        return cls(np.float32(reciprocal(divisor)), divisor)


class Recipe:
    """How scales and codes are chosen. A subclass gives the names and the two methods."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def tensor_scale(self, amax: np.float32, like: Like) -> TensorScale:
        """The second scale for a tensor whose largest magnitude is ``amax``."""
        raise NotImplementedError

    def encode(self, x: F32, dtype: np.dtype[Any], scale: TensorScale, like: Like) -> tuple[U8, U8]:
        """Codes (N, K/2) and block scales (N, K/16) of ``x`` (N, K) f32, whose values came as ``dtype``."""
        raise NotImplementedError


def chunks(rows: int, k: int) -> Iterator[slice]:
    """Slices of rows, of about a quarter of a million elements each."""
    step = max(1, _CHUNK // max(k, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def finite_amax(dense: Any) -> np.float32:
    """The largest magnitude of (N, K), in f32.

    Raises:
        QuantizeError: a NaN or Inf, with its position.
    """
    amax = np.float32(0)
    for rows in chunks(*dense.shape):
        with np.errstate(invalid="ignore"):  # signalling NaN
            x = np.abs(dense[rows].astype(np.float32, copy=False))
        top = x.max(initial=np.float32(0))
        if not np.isfinite(top):
            row, column = (int(i) for i in np.argwhere(~np.isfinite(x))[0])
            raise QuantizeError(
                "the tensor holds a value that is not finite",
                index=[rows.start + row, column],
                got=float(dense[rows][row, column]),
                hint="repair the dense checkpoint, or leave this layer out with --ignore",
            )
        amax = np.maximum(amax, top)
    return np.float32(amax)


def block_amax(x: F32) -> F32:
    """(N, K) f32 to (N, K/16): the largest magnitude of each block."""
    amax: F32 = np.abs(x).reshape(x.shape[0], -1, BLOCK).max(-1)
    return amax


def refuse_overflow(scales: F32) -> None:
    """Refuse block scales (N, G) f32 that would not round to a finite E4M3FN value.

    Raises:
        QuantizeError: with the first block.
    """
    limit = E4M3_MAX * (1 + 2.0**-22)  # amax / 2688, rounded, may leave a quotient an ulp or two above 448
    if scales.size and scales.max() > limit:
        row, block = (int(i) for i in np.argwhere(scales > limit)[0])
        raise QuantizeError(
            "a block needs a larger scale than scale2 leaves room for",
            index=[row, block],
            got=float(scales[row, block]),
            expected=f"at most {E4M3_MAX:g}",
            hint="pass a larger scale2 (amax / 2688), or none",
        )
