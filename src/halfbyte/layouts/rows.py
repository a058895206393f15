"""``rows``: the canonical order, as ModelOpt and compressed-tensors store it.

::

    codes   byte n * K/2 + k/2      low nibble (n, 2j), high nibble (n, 2j + 1)
    scales  byte n * K/16 + k/16    E4M3FN
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.layouts.base import Layout, Order


@dataclass(frozen=True)
class Rows(Layout):
    """Row-major codes and scales."""

    name: ClassVar[str] = "rows"
    used_by: ClassVar[str] = "ModelOpt, compressed-tensors, torchao (linear scales), MAX"

    @property
    def codes(self) -> Order:
        return Order("n k -> n k")

    @property
    def scales(self) -> Order:
        return Order("n k -> n k")
