"""How fast a GPU can be at best: what plans hold kernels against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from halfbyte.kernels.base import Cost


@dataclass(frozen=True)
class Ceiling:
    """What a GPU reaches with the simplest kernels, measured.

    Attributes:
        read: bytes a second, of memory that no cache holds.
        start: seconds of a kernel that does nothing.
        products: floating-point operations a second of its matrix units, on 16-bit floats; for FP8 twice as many are
            assumed, which is what the units are built for, not measured.
    """

    read: float
    start: float
    products: float

    @property
    def fp8(self) -> Ceiling:
        """The same for products of FP8."""
        return replace(self, products=2 * self.products)

    def seconds(self, cost: Cost) -> float:
        """The least time of a call."""
        return max(cost.bytes / self.read + self.start, cost.flops / self.products)

    def __str__(self) -> str:
        return f"{self.read / 1e12:.3g} TB/s + {self.start * 1e6:.3g} us, {self.products / 1e12:.3g} TFLOP/s"


CEILINGS: Final = {"NVIDIA H200": Ceiling(read=4.6e12, start=1.3e-6, products=783e12)}
"""By torch's name of the device."""
