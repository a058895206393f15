"""What a recipe is: a way to choose the scales and codes of a dense tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from halfbyte import jit
from halfbyte.errors import QuantizeError
from halfbyte.numerics import BLOCK, E4M3_MAX, F32, U8, Array, reciprocal

Like = Literal["modelopt", "compressed-tensors"]
LIKES: tuple[Like, ...] = ("modelopt", "compressed-tensors")

_CHUNK = 1 << 18
"""Elements a step works on: its f32 temporaries stay in a core's second-level cache."""


LARGEST_SCALE = np.float32(E4M3_MAX * (1 + 2.0**-22))
"""What a block may want under a fixed scale2: amax / 2688, rounded, may leave a quotient an ulp or two above 448."""


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

    def encode_compiled(self, dense: Dense, scale: TensorScale, like: Like, codes: Any, scales: Any) -> bool:
        """The same to contiguous u8 arrays, by compiled code; False where a fixed scale2 leaves no room for a block."""
        raise NotImplementedError

    def encode_cuda(self, dense: Array, scale: TensorScale, like: Like) -> tuple[Array, Array] | None:
        """Codes and block scales of a finite CUDA tensor (N, K), by Triton; None as False of ``encode_compiled``."""
        raise NotImplementedError


def chunks(rows: int, k: int) -> Iterator[slice]:
    """Slices of rows, of about a quarter of a million elements each."""
    step = max(1, _CHUNK // max(k, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


SMALL = 1 << 18
"""Values below which NumPy does all: to load Numba takes longer."""


def executor(size: int) -> str | None:
    """None where compiled code quantizes ``size`` values, else why NumPy does; the bytes are the same."""
    return jit.missing() if size >= SMALL else f"{size} values are fewer than {SMALL}"


@dataclass(frozen=True)
class Dense:
    """Rows of values as compiled code is told of them.

    Attributes:
        array: (N, K), which keeps the memory; values of a row are neighbours.
        address: of the first value.
        row_bytes: from row to row.
        n, k: rows and values in a row; a matrix without gaps or padding counts as one row.
        kind: as in ``halfbyte.vectors``.
    """

    array: Any
    address: int
    row_bytes: int
    n: int
    k: int
    kind: int

    @classmethod
    def of(cls, array: Any) -> Dense:
        """(N, K) float32, bfloat16 or float16, copied if its rows have gaps."""
        from halfbyte.vectors import KINDS

        n, k = array.shape
        if array.strides[1] != array.itemsize:
            array = np.ascontiguousarray(array)
        if array.flags.c_contiguous and k % BLOCK == 0:
            n, k = 1, n * k
        return cls(array, array.ctypes.data, array.strides[0], n, k, KINDS[array.dtype.name])

    def chunks(self, size: int) -> int:
        """How many pieces of rows, of ``size`` values, there are."""
        return self.n * -(-self.k // size)


def pieces(total: int, threads: int) -> int:
    """In how many pieces ``threads`` share chunks: some for each, so that a slow one does not keep the others."""
    return max(1, min(total, 8 * threads))


def finite_amax(dense: Any) -> np.float32:
    """The largest magnitude of (N, K), in f32.

    Raises:
        QuantizeError: a NaN or Inf, with its position.
    """
    if executor(dense.size) is None:
        amax = max((_peak(Dense.of(dense[rows])) for rows in contiguous(dense)), default=np.float32(0))
        if np.isfinite(amax):
            return amax
    return finite_amax_numpy(dense)


def _peak(dense: Dense) -> np.float32:
    from halfbyte.recipes import blocks_code

    total, threads = dense.chunks(blocks_code.CHUNK), jit.thread_count()
    tops = np.zeros((pieces(total, threads), 64), np.uint8)
    where = dense.kind, dense.address, dense.row_bytes, dense.k
    if threads == 1:
        blocks_code.peaks(0, total, *where, tops.ctypes.data)
    else:
        jit.run(blocks_code.peaks_all, total, *where, tops)
    bits = np.uint32 if dense.array.itemsize == 4 else np.uint16
    top = tops.view(bits).max().view(np.float32 if dense.array.itemsize == 4 else dense.array.dtype)
    return np.float32(top)


def contiguous(dense: Any) -> list[slice]:
    """Slices of rows: all of them, or some millions of values each where a row's are no neighbours and are copied."""
    n, k = dense.shape
    step = n if dense.strides[1] == dense.itemsize else max(1, (16 * _CHUNK) // max(k, 1))
    return [slice(start, min(start + step, n)) for start in range(0, n, max(step, 1))]


def finite_amax_numpy(dense: Any) -> np.float32:
    """As ``finite_amax``."""
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
    if scales.size and scales.max() > LARGEST_SCALE:
        row, block = (int(i) for i in np.argwhere(scales > LARGEST_SCALE)[0])
        raise QuantizeError(
            "a block needs a larger scale than scale2 leaves room for",
            index=[row, block],
            got=float(scales[row, block]),
            expected=f"at most {E4M3_MAX:g}",
            hint="pass a larger scale2 (amax / 2688), or none",
        )
