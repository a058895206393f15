"""What a device kernel loads: the fragments of a 16x16 tile of activations and of a 32x16 tile of weights.

Thirty-two lanes share a tile. Lane l begins at row ``((l >> 2) & 4) | ((l >> 1) & 3)``, 0..7, and column
``(((l >> 2) & 2) | (l & 1)) * 4``, which is 0, 4, 8 or 12; no two lanes begin at the same place::

    load_a    8 values: rows r and r + 8, four columns each
    decode_b  16 values: rows r, r + 8, r + 16, r + 24 of the weight, four columns of K each: two bytes and one
              block scale for each row

Here both are plain loops over rows, so that a kernel can be read against them and tested value for value. Bytes that
are not there are never read: beyond M, N and K the values are 0. scale2 is not applied; a kernel multiplies its sum.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from halfbyte.arrays import to_numpy
from halfbyte.errors import UsageError
from halfbyte.numerics import BLOCK, E2M1_PAIRS, E4M3_VALUES, Array, is_torch
from halfbyte.weight import Weight

__all__ = ["LANES", "FragmentLoader", "lane_origin"]

LANES: Final = 32
TILE: Final = 16
"""Rows and columns of a tile of activations, and columns of a tile of weights."""
_RUN: Final = 4
"""Columns of one row that a lane holds."""
_STEP: Final = 8
"""Rows between two that a lane holds."""
_FLOATS: Final = ("float32", "bfloat16", "float16")


def lane_origin(lane: int) -> tuple[int, int]:
    """The (row, column) within a tile that a lane begins at."""
    if not 0 <= lane < LANES:
        raise UsageError("no such lane", got=lane, expected=f"0..{LANES - 1}")
    return (lane >> 2) & 4 | (lane >> 1) & 3, ((lane >> 2) & 2 | lane & 1) * _RUN


class FragmentLoader:
    """Fragments of activations and weights, as the lanes of a device hold them.

    The arrays are bound, not copied; torch tensors must be on the CPU.

    Args:
        a: (M, K) float32, bfloat16 or float16. K is even, and need not be a multiple of 16.
        packed: (N, K/2) u8 codes, even k in the low nibble; nothing beyond K.
        scales: (N, ceil(K/16)) u8 or float8_e4m3fn.

    Raises:
        UsageError: shapes or dtypes that do not fit together.
    """

    def __init__(self, a: Array, packed: Array, scales: Array) -> None:
        self.a, self.packed, self.scales = (
            _host(x, what) for x, what in ((a, "a"), (packed, "packed"), (scales, "scales"))
        )
        if self.scales.dtype.name == "float8_e4m3fn":
            self.scales = self.scales.view(np.uint8)
        if self.a.ndim != 2 or self.a.dtype.name not in _FLOATS:
            raise UsageError("a does not fit", got=_described(self.a), expected=f"(M, K) {', '.join(_FLOATS)}")
        self.m, self.k = self.a.shape
        self.n = self.packed.shape[0] if self.packed.ndim else 0
        if self.k % 2:
            raise UsageError("K is odd: two codes share a byte", got=self.k, hint="pad a and the weight with a zero")
        for what, array, width in (("packed", self.packed, self.k // 2), ("scales", self.scales, -(-self.k // BLOCK))):
            if array.dtype != np.uint8 or array.shape != (self.n, width):
                raise UsageError(f"{what} does not fit", got=_described(array), expected=f"uint8 {(self.n, width)}")

    @classmethod
    def of(cls, a: Array, weight: Weight) -> FragmentLoader:
        """The loader of activations (M, K) and a weight (N, K); a view of its codes without the padding of K.

        Raises:
            UsageError: experts, or a pre_scale, which no fragment holds.
        """
        if len(weight.shape) != 2:
            raise UsageError("fragments are of one matrix (N, K), not of experts", got=weight.shape)
        if weight.pre_scale is not None:
            raise UsageError("fragments hold no pre_scale", hint="multiply a by it, then pass replace(pre_scale=None)")
        return cls(a, weight.codes[:, : -(-weight.k // 2)], weight.scales)

    def load_a(self, row0: int, k0: int, lane: int, bounded: bool) -> Any:
        """A lane's part of the tile of ``a`` at (row0, k0).

        Args:
            row0: the first row; any.
            k0: the first column, a multiple of 16.
            lane: 0..31.
            bounded: the tile may reach beyond M or K, and is 0 there. False states that it does not.

        Returns:
            (8,) of a's dtype: value i is a[row0 + r + 8 * (i // 4), k0 + c + i % 4], with (r, c) of lane_origin.

        Raises:
            UsageError: a tile that begins outside, or reaches outside though ``bounded`` is false.
        """
        self._check(row0, self.m, "row0", k0)
        if not bounded and (row0 + TILE > self.m or k0 + TILE > self.k):
            raise UsageError(
                "a tile that is not bounded reaches outside",
                got=f"rows {row0}..{row0 + TILE}, columns {k0}..{k0 + TILE}",
                expected=f"within {self.a.shape}",
                hint="pass bounded=True on the last tiles",
            )
        row, column = lane_origin(lane)
        out = np.zeros((2, _RUN), self.a.dtype)
        for j in range(2):
            if row0 + row + _STEP * j < self.m:
                run = self.a[row0 + row + _STEP * j, k0 + column : k0 + column + _RUN]  # ends at K at the latest
                out[j, : len(run)] = run
        return out.reshape(-1)

    def decode_b(self, col0: int, k0: int, lane: int) -> Any:
        """A lane's part of the tile of weights for output features col0..col0+31 and input features k0..k0+15.

        Args:
            col0: the first output feature (a row of the weight); any.
            k0: the first input feature, a multiple of 16: the tile is one block wide.
            lane: 0..31.

        Returns:
            (16,) of a's dtype, exact: value i is code * scale of row col0 + r + 8 * (i // 4), k0 + c + i % 4.

        Raises:
            UsageError: a tile that begins outside.
        """
        self._check(col0, self.n, "col0", k0)
        row, column = lane_origin(lane)
        rows = [col0 + row + _STEP * j for j in range(4)]
        return np.concatenate([self._decode(n, k0 + column, _RUN // 2) for n in rows])

    def decode_strip(self, view: Array, n_abs: int, n_local: int, k0: int, col0: int, nbytes: int, cols: int) -> None:
        """Decode a run of one row into shared memory: ``view[n_local, col0 : col0 + cols]``.

        Args:
            view: (BN, BK) of a's dtype; BK is a multiple of 16. A torch tensor must be on the CPU.
            n_abs: the row of the weight.
            n_local: the row of ``view``.
            k0: the input feature of the view's first column, a multiple of 16.
            col0: the first column of the run, a multiple of ``cols``.
            nbytes: bytes of codes in the run.
            cols: 2 * nbytes, a divisor of 16, so that the run has one block scale.

        Raises:
            UsageError: a run of another length, or one that begins outside or leaves the view.
        """
        if cols != 2 * nbytes or not 0 < cols <= BLOCK or BLOCK % cols:
            raise UsageError("a run holds 2, 4, 8 or 16 columns", got=f"nbytes={nbytes}, cols={cols}")
        target = _host(view, "view")
        if target.ndim != 2 or target.dtype != self.a.dtype or target.shape[1] % BLOCK:
            raise UsageError("view does not fit", got=_described(target), expected=f"(BN, BK) {self.a.dtype.name}")
        self._check(n_abs, self.n, "n_abs", k0)
        if col0 % cols or not (0 <= n_local < target.shape[0] and 0 <= col0 < target.shape[1]):
            raise UsageError("no such run in the view", got=(n_local, col0), expected=f"within {target.shape}")
        target[n_local, col0 : col0 + cols] = self._decode(n_abs, k0 + col0, nbytes)

    def _decode(self, n: int, k: int, nbytes: int) -> Any:
        """(2 * nbytes,): one load of codes, cut at K, and one of a scale; 0 beyond N and K."""
        out = np.zeros((nbytes, 2), self.a.dtype)
        if n < self.n and k < self.k:
            codes = self.packed[n, k // 2 : k // 2 + nbytes]
            out[: len(codes)] = E2M1_PAIRS[codes] * E4M3_VALUES[self.scales[n, k // BLOCK]]
        return out.reshape(-1)

    def _check(self, row: int, rows: int, what: str, k0: int) -> None:
        if not 0 <= row < rows:
            raise UsageError(f"{what} is outside", got=row, expected=f"0..{rows - 1}")
        if not 0 <= k0 < self.k or k0 % TILE:
            raise UsageError("k0 is outside, or cuts a block", got=k0, expected=f"a multiple of {TILE} below {self.k}")


def _host(a: Array, what: str) -> Any:
    """A NumPy view of an array or of a tensor on the CPU."""
    if is_torch(a) and a.device.type != "cpu":
        raise UsageError(f"{what} is not on the CPU", got=str(a.device), hint="pass it as .cpu()")
    return to_numpy(a)


def _described(a: Any) -> str:
    return f"{a.dtype.name} {a.shape}"
