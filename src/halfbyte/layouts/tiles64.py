"""``tiles64``: tiles of 64 codes along K, 32 bytes in two vectors of 16; the tiles of a row lie one after another.

Each tile has one word of 4 scales, in one of three orders:

========  ==========================================================================================================
atom      in tiles of 128x4; a reader for Marlin's decoding exchanges bytes 1 and 2 (``read_block_scale_word``)
linear    in the order of the tiles, bytes s0 s1 s2 s3
marlin    in the order of the tiles, bytes s0 s2 s1 s3: ready to use (``read_block_scale_word_linear``), as
          TensorRT's dynamic quantization writes activations
========  ==========================================================================================================

``Tiles`` reads any of them by three tile indices, of which x is the slowest.

``tiles64(scale_order=atom)``, drawn from its statement::

    needs K % 64 == 0
    codes (nibbles)  n kt k
        step       size  moves by
        1          64    +1 k
        64         K/64  +64 k
        64 * K/64  N     +1 n
        first: n0 k0, n0 k1, n0 k2, n0 k3, n0 k4, n0 k5, n0 k6, n0 k7
    scales (bytes)   nt kt r q c    padded: N to 128
        step        size   moves by
        1           4      +16 k
        4           4      +32 n
        16          32     +1 n
        512         K/64   +64 k
        512 * K/64  N/128  +128 n
        first: n0 k0, n0 k16, n0 k32, n0 k48, n32 k0, n32 k16, n32 k32, n32 k48
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

import numpy as np

from halfbyte.errors import LayoutError
from halfbyte.layouts.base import Layout, Packed
from halfbyte.layouts.order import Order
from halfbyte.numerics import Array
from halfbyte.weight import to_numpy

TILE: Final = 64
"""Codes of a tile."""
VECTORS: Final = 2
"""Vectors of 16 bytes, each 32 codes, in a tile: the unit of strides."""
LANES: Final = 4
"""Words of 32 bits, each 8 codes, in a vector."""

SCALE_ORDERS: Final = ("atom", "linear", "marlin")


@dataclass(frozen=True)
class Tiles64(Layout):
    """Codes in tiles of 64 along K.

    Args:
        scale_order: "atom", "linear" or "marlin".
    """

    name: ClassVar[str] = "tiles64"
    used_by: ClassVar[str] = "TensorRT Edge-LLM (NVFP4Tensor)"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {"scale_order": SCALE_ORDERS}
    scale_order: str = "atom"

    @property
    def codes(self) -> Order:
        return Order("n (kt k) -> n kt k", k=TILE)

    @property
    def scales(self) -> Order:
        return {
            "atom": Order("(nt q r) (kt c) -> nt kt r q c", q=4, r=32, c=4),
            "linear": Order("n (kt c) -> n kt c", c=4),
            "marlin": Order("n (kt h l) -> n kt l h", h=2, l=2),
        }[self.scale_order]

    @property
    def multiples(self) -> tuple[int, int]:
        return 1, TILE


@dataclass(frozen=True, eq=False)
class Tiles:
    """A view of codes and scales by three tile indices (x, y, z), in memory order with z the fastest.

    Args:
        codes: (X * Y * Z * 32,) u8 or any shape of that size.
        scales: u8 of any shape: one word of 4 bytes a tile, in ``scale_order``.
        grid: (X, Y, Z) tiles.
        m_axis: the index that counts rows of the scales: 1 for weights (expert, n, K/64), 0 for activations
            (m, K/64, 1).
        k_axis: the index that counts tiles along a row; the third is the expert.
        scale_order: "atom", "linear" or "marlin".
        global_scale: (E,) f32, or None for 1.0.

    Raises:
        LayoutError: arrays that do not fit the grid, or axes that are not two of the three.
    """

    codes: Array
    scales: Array
    grid: tuple[int, int, int]
    m_axis: int = 1
    k_axis: int = 2
    scale_order: str = "atom"
    global_scale: Array | None = None

    def __post_init__(self) -> None:
        if self.scale_order not in SCALE_ORDERS:
            raise LayoutError("unknown scale order", got=repr(self.scale_order), expected=" or ".join(SCALE_ORDERS))
        if len(self.grid) != 3 or min(self.grid) < 0:
            raise LayoutError("not a grid of tiles", got=self.grid, expected="(X, Y, Z)")
        if self.m_axis == self.k_axis or not {self.m_axis, self.k_axis} <= {0, 1, 2}:
            raise LayoutError("rows and columns are two of the axes 0, 1, 2", got=(self.m_axis, self.k_axis))
        experts = self.grid[self.expert_axis]
        words = prod(self.grid) if self.scale_order != "atom" else experts * self.scale_expert_stride
        for what, a, size in (("codes", self.codes, prod(self.grid) * 32), ("scales", self.scales, words * 4)):
            if prod(a.shape) != size or str(a.dtype).removeprefix("torch.") != "uint8":
                raise LayoutError(
                    f"{what} do not fit the grid", got=f"{a.dtype} {tuple(a.shape)}", expected=f"{size} u8"
                )
        if self.global_scale is not None and self.global_scale.shape[0] < experts:
            raise LayoutError("fewer global scales than experts", got=self.global_scale.shape[0], expected=experts)

    @staticmethod
    def of(packed: Packed) -> Tiles:
        """The view of a weight (N, K) or (E, N, K) in ``tiles64``, with the grid (E, N, K/64).

        Raises:
            LayoutError: another layout, more than one expert axis, or a scale2 for each row.
        """
        layout = packed.layout
        if not isinstance(layout, Tiles64):
            raise LayoutError("not tiles of 64", got=packed.key, expected="tiles64")
        if len(packed.shape) > 3:
            raise LayoutError("more than one expert axis", got=packed.shape, expected="(N, K) or (E, N, K)")
        experts, n, k = (1, *packed.shape)[-3:]
        buffers = packed.buffers()
        if buffers["scale2"].shape[-2] != 1:
            raise LayoutError("one global scale an expert cannot hold a scale2 for each row", got=packed.shape)
        return Tiles(
            codes=buffers["codes"],
            scales=buffers["scales"],
            grid=(experts, n, k // TILE),
            scale_order=layout.scale_order,
            global_scale=buffers["scale2"].reshape(experts),
        )

    @property
    def expert_axis(self) -> int:
        """The axis that counts neither rows nor columns."""
        return 3 - self.m_axis - self.k_axis

    @property
    def strides(self) -> tuple[int, int, int]:
        """Vectors of 16 bytes for one step of each index; 0 for an expert index of activations, which is always 0."""
        x, y, z = (prod(self.grid[axis + 1 :]) * VECTORS for axis in range(3))
        return x, y, (0 if self.expert_axis == 2 else z)

    @property
    def scale_k_tiles(self) -> int:
        """Tiles of 4 scale columns in a row: ceil(K/16/4), one for each 64 codes."""
        return self.grid[self.k_axis]

    @property
    def scale_expert_stride(self) -> int:
        """Words from one expert's scales to the next's, in the order atom."""
        return -(-self.grid[self.m_axis] // 128) * self.scale_k_tiles * 128

    def tile_offset(self, tile: Sequence[int]) -> int:
        """Where a tile's codes begin, in vectors of 16 bytes."""
        return sum(index * stride for index, stride in zip(self._checked(tile), self.strides, strict=True))

    def scale_index(self, tile: Sequence[int]) -> int:
        """Where a tile's word of scales is, in words."""
        tile = self._checked(tile)
        if self.scale_order != "atom":
            return self.tile_offset(tile) // VECTORS
        expert, m, k = (tile[axis] for axis in (self.expert_axis, self.m_axis, self.k_axis))
        inside = m // 128 * self.scale_k_tiles * 128 + k * 128 + m % 32 * 4 + m % 128 // 32
        return expert * self.scale_expert_stride + inside

    def read_block_scale_word(self, tile: Sequence[int]) -> int:
        """The tile's 4 scales s0 s2 s1 s3, the first in the low byte: the stored word with bytes 1 and 2 exchanged."""
        if self.scale_order == "marlin":
            raise LayoutError("these words are in that order already", hint="use read_block_scale_word_linear")
        word = self._word(tile)
        return word & 0xFF0000FF | (word & 0xFF00) << 8 | (word & 0xFF0000) >> 8

    def read_block_scale_word_linear(self, tile: Sequence[int]) -> int:
        """The tile's 4 scales s0 s2 s1 s3 from words that are stored so, in the order of the tiles."""
        if self.scale_order != "marlin":
            raise LayoutError(f"these words are in the order {self.scale_order}", hint="use read_block_scale_word")
        return self._word(tile)

    def load_tile_uint4(self, tile: Sequence[int], chunk: int) -> tuple[int, int, int, int]:
        """The 4 words of a tile's codes 0..31 (chunk 0) or 32..63 (chunk 1)."""
        if not 0 <= chunk < VECTORS:
            raise LayoutError("no such chunk", got=chunk, expected="0 or 1")
        start = (self.tile_offset(tile) + chunk) * 16
        words = to_numpy(self.codes.reshape(-1)[start : start + 16]).copy().view("<u4")
        a, b, c, d = (int(word) for word in words)
        return a, b, c, d

    def load_tile_uint32_lane(self, tile: Sequence[int], chunk: int, lane: int) -> int:
        """The word of a tile's codes 8 * (4 * chunk + lane) and the 7 after it, the first in the lowest nibble."""
        if not 0 <= lane < LANES:
            raise LayoutError("no such lane", got=lane, expected="0 to 3")
        return self.load_tile_uint4(tile, chunk)[lane]

    def scale_at(self, index: int) -> np.float32:
        """The global scale of an expert, 1.0 where there are none."""
        return np.float32(1 if self.global_scale is None else to_numpy(self.global_scale[index]))

    def _word(self, tile: Sequence[int]) -> int:
        start = self.scale_index(tile) * 4
        return int.from_bytes(to_numpy(self.scales.reshape(-1)[start : start + 4]).tobytes(), "little")

    def _checked(self, tile: Sequence[int]) -> Sequence[int]:
        if len(tile) != 3 or not all(0 <= index < size for index, size in zip(tile, self.grid, strict=True)):
            raise LayoutError("no such tile", got=tuple(tile), expected=f"below {self.grid}")
        return tile
