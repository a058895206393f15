"""Modules of one kind as modules of another: MXFP4 layers as NVFP4 ones, and FP8 and MXFP4 layers as dense ones.

The module that is given has views for tensors: nothing is read before a tensor is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from halfbyte import mxfp4
from halfbyte.errors import HalfbyteError
from halfbyte.modules import Module, fp8_scale
from halfbyte.numerics import BLOCK
from halfbyte.patterns import fused_group
from halfbyte.stored import Stored, View, read_tensor, rows_of
from halfbyte.weight import Fp8Weight, Mxfp4Weight

_STEP = 16 << 20
"""Bytes of codes that are looked at in one step."""


@dataclass(frozen=True)
class CastScales:
    """E8M0 scales of 32 codes as E4M3 scales of 16, under scale2 = 2^k."""

    k: int

    def __call__(self, raw: Any) -> Any:
        """Bytes (n,) to bytes (2 n,)."""
        return mxfp4.cast_scales(raw, self.k)


@dataclass(frozen=True)
class RoundCodes:
    """The codes of MXFP4 under scale2 = 2^k, where some blocks have to be rounded; ``scales`` are theirs."""

    k: int
    scales: Stored

    def __call__(self, raw: Any) -> Any:
        """Bytes, in the shape (N, K/2) or as they come, in (N, K/2)."""
        scales = read_tensor(self.scales).view(np.uint8)
        return mxfp4.cast(raw.reshape(*scales.shape[:-1], -1), scales, self.k)[0]


@dataclass(frozen=True)
class Constant:
    """A number that is not on disk."""

    value: float

    def __call__(self, raw: Any) -> Any:
        """The number, f32, for no bytes."""
        return np.full(1, self.value, np.float32)


@dataclass(frozen=True)
class Span:
    """What one MXFP4 module needs of its scale2.

    Attributes:
        low, high: the exponents of its scales; of those of blocks with a code that is not zero, where all of them
            span too much. None where no block has one.
    """

    low: int | None
    high: int | None

    @classmethod
    def of(cls, module: Module) -> Span:
        """From the scales, and where they span too much from the codes, too.

        Raises:
            HalfbyteError: a NaN scale, with its place.
        """
        low: int | None = None
        high: int | None = None
        for whole in (False, True):
            low = high = None
            for row, codes, scales in _chunks(module):
                used = codes if whole else np.full((*scales.shape[:-1], scales.shape[-1] * 16), 1, np.uint8)
                try:
                    found = mxfp4.exponents(used, scales, row)
                except HalfbyteError as error:
                    raise _located(error, module) from None
                if found is not None:
                    low = found[0] if low is None else min(low, found[0])
                    high = found[1] if high is None else max(high, found[1])
            if low is None or high is None or high - low <= mxfp4.SPAN:
                break
        return cls(low, high)

    @property
    def pair(self) -> mxfp4.Span | None:
        """(low, high), or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def _chunks(module: Module) -> Iterator[tuple[int, Any, Any]]:
    """(first row, codes, scales) of an MXFP4 module of two axes, u8, in bounded pieces."""
    n, k = module.shape
    step = max(1, _STEP // max(k // 2, 1))
    for a in range(0, n, step):
        b = min(a + step, n)
        yield a, *(rows(module.roles[role], a, b).view(np.uint8) for role in ("codes", "scales"))


def rows(tensor: Stored, a: int, b: int) -> Any:
    """The array of rows a..b of a tensor."""
    return read_tensor(rows_of(tensor, a, b))


def _located(error: HalfbyteError, module: Module) -> HalfbyteError:
    """``error`` about an MXFP4 module, with the names and the place on disk."""
    tensor = module.roles["scales"]
    error.file, error.tensor = tensor.file, tensor.name
    if error.index is not None:
        error.index = tensor.place(error.index)
    return error


def scale2_exponents(modules: Sequence[Module], lossy: bool) -> dict[str, int]:
    """Module name -> k of scale2 = 2^k for MXFP4 modules of two axes; parts that engines fuse share it where they can.

    Raises:
        HalfbyteError: a NaN scale, or, unless ``lossy``, scales that one scale2 cannot hold.
    """
    spans = {module.name: Span.of(module).pair for module in modules}
    chosen: dict[str, int] = {}
    for module in modules:
        span = spans[module.name]
        try:
            chosen[module.name] = 0 if span is None else mxfp4.scale2_exponent(*span, lossy)
        except HalfbyteError as error:
            raise _located(error, module) from None
    groups: dict[str, list[str]] = {}
    for name in spans:
        if (group := fused_group(name)) is not None:
            groups.setdefault(group[0], []).append(name)
    for names in groups.values():
        common = mxfp4.share([spans[name] for name in names])
        if common is not None:
            chosen |= dict.fromkeys(names, common)
    return chosen


def as_nvfp4(module: Module, k: int, divides: bool) -> tuple[Module, float]:
    """An MXFP4 module of two axes as an NVFP4 one, and the relative error that rounding its codes makes.

    Args:
        module: what is cast.
        k: scale2 is 2^k.
        divides: whether the dialect of the module stores the reciprocal.
    """
    n, columns = module.shape
    codes, scales = module.roles["codes"], module.roles["scales"]
    roles = dict(module.roles)
    lost = total = 0.0
    for _, some_codes, some_scales in _chunks(module):
        more = mxfp4.squared_error(some_codes, some_scales, k) if _rounds(some_scales, k) else (0.0, 0.0)
        lost, total = lost + more[0], total + more[1]
    shape = (n, columns // 2)
    roles["codes"] = replace(codes, shape=shape, dtype="U8")
    if lost:
        roles["codes"] = viewed(roles["codes"], RoundCodes(k, scales))
    cast = viewed(scales, CastScales(k))
    roles["scales"] = replace(cast, dtype="F8_E4M3", shape=(n, columns // BLOCK), nbytes=n * columns // BLOCK)
    number = viewed(scales, Constant(2.0 ** (-k if divides else k)))
    roles["scale2"] = replace(number, dtype="F32", shape=(), nbytes=4, region=0, steps=number.steps[-1:])
    return Module(module.name, "nvfp4", roles, module.unknown), math.sqrt(lost / total) if lost else 0.0


def _rounds(scales: Any, k: int) -> bool:
    """Whether some blocks may have to be rounded."""
    return bool((scales.astype(np.int16) < k - 9 + 127).any())


def viewed(tensor: Stored, step: Any) -> View:
    """A tensor through one more step, which keeps its dtype, shape and bytes unless they are replaced."""
    if isinstance(tensor, View):
        return replace(tensor, steps=(*tensor.steps, step))
    known = {f.name: getattr(tensor, f.name) for f in fields(Stored)}
    return View(**known, region=tensor.nbytes, steps=(step,))


def dense_rows(module: Module, a: int, b: int) -> Any:
    """Rows a..b of a dense, FP8 or MXFP4 module of two axes, in its dtype or f32; a is a multiple of 128."""
    if module.kind == "dense":
        return rows(module.roles["data"], a, b)
    if module.kind == "mxfp4":
        codes, scales = (rows(module.roles[role], a, b).view(np.uint8) for role in ("codes", "scales"))
        return Mxfp4Weight(codes=codes, scales=scales).dequantize()
    scale, block = fp8_scale(module, read_tensor(module.roles["scale"]).astype(np.float32))
    if block is not None:
        scale = scale[a // block[0] : -(-b // block[0])]
    elif scale.size != 1:
        scale = scale.reshape(-1, 1)[a:b]
    return Fp8Weight(data=rows(module.roles["data"], a, b).view(np.uint8), scale=scale, block=block).dequantize()
