"""``trtllm``: rows shuffled within 32 (or 16) for the matrix units' epilogue, and scales in tiles of 128x4.

With an epilogue tile of 128, old row i of each 32 moves to 8 * (i % 4) + i // 4; with a smaller one, old row i of each
16 moves to 8 * (i % 2) + i // 2. The scales move with their rows and are swizzled then.
Gated weights have the rows of gate and up interleaved before: ``GateUp("up_first_interleaved", Trtllm())``.

``trtllm(epilogue_tile=128)``, drawn from its statement::

    codes (nibbles)  n b a k    padded: N to 32
        step    size  moves by
        1       K     +1 k
        K       8     +4 n
        8 * K   4     +1 n
        32 * K  N/32  +32 n
        first: n0 k0, n0 k1, n0 k2, n0 k3, n0 k4, n0 k5, n0 k6, n0 k7
    scales (bytes)   nt kt h b a q c    padded: N to 128 and K to 64
        step        size   moves by
        1           4      +16 k
        4           4      +32 n
        16          8      +4 n
        128         4      +1 n
        512         K/64   +64 k
        512 * K/64  N/128  +128 n
        first: n0 k0, n0 k16, n0 k32, n0 k48, n32 k0, n32 k16, n32 k32, n32 k48
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halfbyte.layouts.base import Layout
from halfbyte.layouts.order import Order


@dataclass(frozen=True)
class Trtllm(Layout):
    """The shuffled A operand.

    Args:
        epilogue_tile: 128 for the map of 32 rows, 64 for that of 16.
    """

    name: ClassVar[str] = "trtllm"
    used_by: ClassVar[str] = "TensorRT-LLM (trtllm-gen) and FlashInfer"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {"epilogue_tile": (128, 64)}
    epilogue_tile: int = 128

    @property
    def codes(self) -> Order:
        return Order("(n a b) k -> n b a k", a=8, b=self.epilogue_tile // 32)

    @property
    def scales(self) -> Order:
        b = self.epilogue_tile // 32
        return Order("(nt q h a b) (kt c) -> nt kt h b a q c", q=4, h=4 // b, a=8, b=b, c=4)
