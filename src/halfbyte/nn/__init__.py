"""Modules that hold quantized weights, and swapping them into a model.

Needs torch; of halfbyte, only ``halfbyte.hf`` and ``halfbyte.decoder`` import it.
"""

from __future__ import annotations

from halfbyte.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ImportError:
    raise MissingExtraError("torch", "torch", "halfbyte.nn") from None

from halfbyte.nn.base import Holder, Quantized, weights_of
from halfbyte.nn.embedding import Embedding
from halfbyte.nn.experts import Experts
from halfbyte.nn.fp8 import Fp8Linear
from halfbyte.nn.grouped import Group, Part
from halfbyte.nn.linear import Linear, TiedLinear
from halfbyte.nn.swap import SwapReport, swap_linears

__all__ = [
    "Embedding",
    "Experts",
    "Fp8Linear",
    "Group",
    "Holder",
    "Linear",
    "Part",
    "Quantized",
    "SwapReport",
    "TiedLinear",
    "swap_linears",
    "weights_of",
]
