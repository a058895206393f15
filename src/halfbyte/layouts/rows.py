"""``rows``: the canonical order, as ModelOpt and compressed-tensors store it.

``rows``, drawn from its statement::

    codes (nibbles)  n k
        step  size  moves by
        1     K     +1 k
        K     N     +1 n
        first: n0 k0, n0 k1, n0 k2, n0 k3, n0 k4, n0 k5, n0 k6, n0 k7
    scales (bytes)   n k
        step  size  moves by
        1     K/16  +16 k
        K/16  N     +1 n
        first: n0 k0, n0 k16, n0 k32, n0 k48, n0 k64, n0 k80, n0 k96, n0 k112
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halfbyte.layouts.base import KINDS, Kind, Layout
from halfbyte.layouts.order import Order


@dataclass(frozen=True)
class Rows(Layout):
    """Row-major codes and scales.

    Args:
        kind: of the weights, "nvfp4" or "mxfp4".
    """

    name: ClassVar[str] = "rows"
    used_by: ClassVar[str] = "ModelOpt, compressed-tensors, torchao (linear scales), MAX"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {"kind": KINDS}
    kind: Kind = "nvfp4"

    @property
    def codes(self) -> Order:
        return Order("n k -> n k")

    @property
    def scales(self) -> Order:
        return Order("n k -> n k")
