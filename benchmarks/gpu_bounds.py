"""What is measured on a GPU, and what the kernels must reach there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from halfbyte.kernels.base import Cost
from halfbyte.kernels.cuda.ceilings import Ceiling

SHAPES: Final = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672), (248077, 4096))
QUICK_SHAPES: Final = ((4096, 4096), (14336, 4096), (28672, 8192), (248077, 4096))
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_ROWS: Final = (1, 4, 8, 16)

WHOLE: Final[Mapping[int, int]] = {248077: 248064}
"""N -> the same without its ragged end, which peers take."""


PROBES: Final[Mapping[str, tuple[float, float]]] = {"NVIDIA H200": (4.54e12, 783e12)}
"""By torch's name of the GPU, in a good run: bytes a second of the read probe, operations a second of the other."""

PROBE_OFF: Final = 0.08
"""How far a probe may be off its reference; figures of a run where one is further are marked."""


def moved(n: int, k: int, rows: int) -> int:
    """Bytes of codes, block scales, scale2, and 16-bit activations and results, once each."""
    return n * k // 2 + n * k // 16 + 4 + 2 * rows * (n + k)


def ideal(ceiling: Ceiling, n: int, k: int, rows: int) -> float:
    """The seconds of a product at the GPU's ceilings, which stay the same from run to run."""
    return ceiling.seconds(Cost(bytes=moved(n, k, rows), flops=2 * rows * n * k))


def is_off(measured: float, reference: float) -> bool:
    """Whether a probe is too far off its reference."""
    return abs(measured / reference - 1) > PROBE_OFF


# must, aim
Bound = tuple[float, float | None]

_SHARE: Final[Mapping[tuple[int, int], tuple[Bound, Bound]]] = {
    (14336, 4096): ((0.78, 0.92), (0.58, 0.80)),
    (28672, 8192): ((0.78, 0.92), (0.58, 0.80)),
    (248077, 4096): ((0.86, 0.96), (0.72, 0.80)),
    (4096, 4096): ((0.58, 0.75), (0.45, 0.80)),
}
_SMALL, _SIXTEEN = (1, 4, 8), 16


def share(n: int, k: int, rows: int) -> Bound | None:
    """Of ideal, what the kernel chosen by default reaches."""
    bounds = _SHARE.get((n, k))
    if bounds and rows in _SMALL:
        return bounds[0]
    return bounds[1] if bounds and rows == _SIXTEEN else None


def over_humming(n: int, k: int, rows: int) -> Bound | None:
    """How many times as fast as Humming it is."""
    return (1.3, None) if (n, k) in _SHARE and rows <= max(_SMALL) else None


def portable(n: int, k: int, rows: int) -> Bound | None:
    """The portable tier's speed over the Gluon tier's."""
    return (0.6, None) if (n, k) in _SHARE and rows <= _SIXTEEN else None


RAGGED: Final[Bound] = (1.02, None)
"""The time of a ragged N over that of the whole one, at most."""

ERROR: Final[Mapping[str, Bound]] = {"bfloat16": (1.7e-3, None), "float16": (2.2e-4, None)}
"""The norm of the error over that of the result, at most: one rounding."""

HOST_MICROSECONDS: Final[Bound] = (12, None)
"""Of ``linear`` on the host, 4096x4096, one token."""

PACK_GIGABYTES: Final[Bound] = (300, None)
"""A second, read and written, by ``pack`` into fragments."""
