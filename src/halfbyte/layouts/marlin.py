"""``marlin``: codes in the order of tensor-core fragments, 8 to an int32; (K/16, 2N) int32 in all.

A tile of 16 k and 64 n is 128 words. With n = w % 4 * 16 + w // 16 and k = w // 4 % 4 * 2, the nibbles of word w are,
the lowest first, (n, k) (n, k+8) (n+8, k) (n+8, k+8) (n, k+1) (n, k+9) (n+8, k+1) (n+8, k+9).

The scales, (K/16, N), lie in the matching order in one of two forms:

========  ==========================================================================================================
e4m3      the bytes as they are (TensorRT Edge-LLM)
s0e5m3    the top 8 bits of ``half(scale * factor) * 2^7 << 1`` (vLLM), with the factor in a buffer of its own
========  ==========================================================================================================

vLLM's bfloat16 kernel takes the top bit of a byte as set, so what stays below 2 is lost there. Its two rules for the
factor lose different scales: "max" (now) those that the largest scale leaves no room for, "min" (before) those that
overflow half beside a small one. A weight that would lose some is refused unless ``lossy`` is set, which warns with
the error. In float16 the factor is 1 and nothing is lost.

``marlin(pad_n=64, pad_k=16, scale_format=e4m3, dtype=bfloat16, rule=max, lossy=False)``, drawn from its statement::

    codes (nibbles)  kt k nt n c t j rl b rh    padded: N to 64
        step         size  moves by
        1            2     +8 k
        2            2     +8 n
        4            2     +1 k
        8            4     +16 n
        32           4     +2 k
        128          8     +1 n
        1024         N/64  +64 n
        1024 * N/64  K/16  +16 k
        first: n0 k0, n0 k8, n8 k0, n8 k8, n0 k1, n0 k9, n8 k1, n8 k9
    scales (bytes)   kt k nt n i ja jc jb    padded: N to 64
        step       size  moves by
        1          2     +16 n
        2          2     +8 n
        4          2     +32 n
        8          8     +1 n
        64         N/64  +64 n
        64 * N/64  K/16  +16 k
        first: n0 k0, n16 k0, n8 k0, n24 k0, n32 k0, n48 k0, n40 k0, n56 k0
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from halfbyte.errors import LayoutError
from halfbyte.layouts.base import Layout, Packable, Packed, first_true
from halfbyte.layouts.blocks import largest, present, recoded
from halfbyte.layouts.order import Order
from halfbyte.numerics import E4M3_MAX, E4M3_VALUES, U8, Array, encode_e4m3, is_torch
from halfbyte.weight import LossyWarning, to_numpy, to_torch

_EXPONENT = {"bfloat16": 126 - 7, "float16": 14 - 7}
"""What the second scale makes up for: the kernel's decoding of codes and scales is short by these powers of two."""


@dataclass(frozen=True)
class Marlin(Layout):
    """The order of W4A16 kernels for tensor cores from SM80 on.

    Args:
        pad_n: N is padded to a multiple of it, itself a multiple of 64: 64 in vLLM, 128 in TensorRT Edge-LLM.
        pad_k: the same for K, a multiple of 16: 16 in vLLM, 64 in TensorRT Edge-LLM.
        scale_format: "e4m3" or "s0e5m3".
        dtype: of the activations that s0e5m3 scales are for, "bfloat16" or "float16".
        rule: "max" or "min", how the factor of s0e5m3 scales is chosen for bfloat16.
        lossy: take a weight whose scales s0e5m3 cannot hold, with a LossyWarning that states the error; ``unpack``
            gives what is held.
    """

    name: ClassVar[str] = "marlin"
    used_by: ClassVar[str] = "vLLM, SGLang, TensorRT Edge-LLM (W4A16)"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scale_format": ("e4m3", "s0e5m3"),
        "dtype": ("bfloat16", "float16"),
        "rule": ("max", "min"),
    }
    pad_n: int = 64
    pad_k: int = 16
    scale_format: str = "e4m3"
    dtype: str = "bfloat16"
    rule: str = "max"
    lossy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pad_n % 64 or self.pad_k % 16:
            raise LayoutError("layout marlin pads to whole tiles of 64 n and 16 k", got=(self.pad_n, self.pad_k))
        if self.scale_format == "e4m3" and (self.dtype, self.rule, self.lossy) != ("bfloat16", "max", False):
            raise LayoutError("dtype, rule and lossy are for scale_format=s0e5m3", got=self.key)
        if self.dtype == "float16" and (self.rule, self.lossy) != ("max", False):
            raise LayoutError("rule and lossy are for bfloat16: float16 loses nothing", got=self.key)

    @property
    def codes(self) -> Order:
        pattern = "(nt n j b c) (kt k rh t rl) -> kt k nt n c t j rl b rh"
        return Order(pattern, n=self.pad_n // 64, j=4, b=2, c=8, k=self.pad_k // 16, rh=2, t=4, rl=2)

    @property
    def scales(self) -> Order:
        pattern = "(nt n ja jb jc i) (kt k) -> kt k nt n i ja jc jb"
        return Order(pattern, n=self.pad_n // 64, ja=2, jb=2, jc=2, i=8, k=self.pad_k // 16)

    @property
    def extras(self) -> tuple[str, ...]:
        return ("factor",) if self.scale_format == "s0e5m3" else ()

    @property
    def refuses(self) -> str:
        loses = self.scale_format == "s0e5m3" and self.dtype == "bfloat16" and not self.lossy
        return super().refuses + (", block scales that S0E5M3 would change" if loses else "")

    def refuse(self, weight: Packable) -> str | None:
        reason = super().refuse(weight)
        if reason or self.scale_format == "e4m3" or self.lossy:
            return reason
        factor = self.factor(weight.scales)
        held, found = _held(factor, self.dtype), present(weight.scales)
        if (held[found] == found).all():
            return None
        index = first_true(recoded(held, weight.scales) != weight.scales)
        byte = int(weight.scales[tuple(index)])
        before, after = E4M3_VALUES[byte], E4M3_VALUES[held[byte]]
        return (
            f"S0E5M3 with factor {factor:g} turns the block scale at {index} from {before:g} (byte {byte:02X}) into "
            f"{after:g}; use scale_format=e4m3 or lossy=True"
        )

    def factor(self, scales: Array) -> float:
        """The power of two that s0e5m3 scales are multiplied by, one for all experts."""
        if self.dtype == "float16":
            return 1.0
        values = E4M3_VALUES[present(scales)]
        values = values[values > 0]
        if not values.size:
            return 1.0
        if self.rule == "max":
            return float(2 ** np.floor(np.log2(E4M3_MAX / values.max())))
        return float(max(1.0, 2 ** np.ceil(np.log2(2 / (values.min() * 2**7)))))

    def to_stored(self, weight: Packable) -> tuple[Array, dict[str, Array]]:
        if self.scale_format == "e4m3":
            return weight.scales, {}
        factor = self.factor(weight.scales)
        if self.lossy:
            self._warn(weight, factor)
        extra = np.array(factor, np.float32)
        if is_torch(weight.scales):
            extra = to_torch(extra, weight.scales.device)
        return recoded(_encoding(factor, self.dtype), weight.scales), {"factor": extra}

    def from_stored(self, scales: Array, extras: Mapping[str, Array]) -> Array:
        if self.scale_format == "e4m3":
            return scales
        factor = float(extras["factor"])
        read = recoded(_decoding(factor), scales)
        if largest(read) == 255:
            index = first_true(read == 255)
            byte = int(scales[tuple(index)])
            raise LayoutError(
                f"the S0E5M3 block scale at {index} is no E4M3 number with this factor (byte {byte:02X})", got=factor
            )
        return read

    def global_scale(self, packed: Packed, dtype: str) -> Array:
        """What a kernel for activations of ``dtype`` multiplies by: scale2 / factor * 2^119, or * 2^7 for float16; f32.

        Raises:
            LayoutError: float16, and a number that is not in its normal range.
        """
        if dtype not in _EXPONENT:
            raise LayoutError("not a dtype of activations", got=repr(dtype), expected=" or ".join(_EXPONENT))
        buffers = packed.buffers()
        scale = buffers["scale2"] * 2.0 ** _EXPONENT[dtype]
        if "factor" in buffers:
            scale = scale / buffers["factor"]
        if dtype == "float16" and not bool(((scale >= 2.0**-14) & (scale <= 65504)).all()):
            wrong = first_true(~((scale >= 2.0**-14) & (scale <= 65504)))
            raise LayoutError("a global scale that float16 rounds or cannot hold", got=float(scale[tuple(wrong)]))
        return scale

    def _warn(self, weight: Packable, factor: float) -> None:
        held = weight.replace(scales=recoded(_held(factor, self.dtype), weight.scales))
        before, after = (to_numpy(w.dequantize()).astype(np.float64) for w in (weight, held))
        error, total = np.linalg.norm(after - before), np.linalg.norm(before)
        if error:
            warnings.warn(
                f"S0E5M3 block scales with factor {factor:g} lost some: relative error {error / total:.3g}",
                LossyWarning,
                stacklevel=4,
            )


def _encoding(factor: float, dtype: str) -> U8:
    """(256,) u8: the S0E5M3 byte of each E4M3 byte."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = (np.abs(E4M3_VALUES) * np.float32(factor)).astype(np.float16) * np.float16(2**7)
    if dtype == "bfloat16":
        values[values < 2] = 0
    shifted: U8 = (values.view(np.uint16) >> 7).astype(np.uint8)
    return shifted


def _decoding(factor: float) -> U8:
    """(256,) u8: the E4M3 byte of each S0E5M3 byte, 255 where there is none."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3, bits & 7
    normal = (1 + mantissa / 8) * np.exp2(exponent - 15.0)
    values = (np.where(exponent == 0, mantissa * 2.0**-17, normal) / 2**7 / factor).astype(np.float32)
    encoded = encode_e4m3(values)
    encoded[E4M3_VALUES[encoded] != values] = 255
    return encoded


def _held(factor: float, dtype: str) -> U8:
    """(256,) u8: what each E4M3 byte comes back as."""
    held: U8 = _decoding(factor)[_encoding(factor, dtype)]
    return held
