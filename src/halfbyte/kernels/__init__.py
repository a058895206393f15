"""Kernels: the ways to compute. The table below is the whole set, fastest first; a new kernel adds one line."""

from __future__ import annotations

from halfbyte.kernels import reference
from halfbyte.kernels.base import Call, Cost, Kernel

KERNELS: tuple[Kernel, ...] = (reference.TORCH, reference.NUMPY)

__all__ = ["KERNELS", "Call", "Cost", "Kernel"]
