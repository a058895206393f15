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


def moved(n: int, k: int, rows: int, kind: str = "default") -> int:
    """Bytes of codes, block scales and scale2, or of the FP8 twin, and 16-bit activations and results, once each."""
    weight = n * k if kind == "twin" else n * k // 2 + n * k // 16
    return weight + 4 + 2 * rows * (n + k)


def ideal(ceiling: Ceiling, n: int, k: int, rows: int, kind: str = "default") -> float:
    """The seconds of a product at the GPU's ceilings, which stay the same from run to run."""
    limits = ceiling.fp8 if kind in FP8 else ceiling
    return limits.seconds(Cost(bytes=moved(n, k, rows, kind), flops=2 * rows * n * k))


FP8: Final = ("fp8", "twin")
"""Kinds of candidates that multiply in FP8."""


def is_off(measured: float, reference: float) -> bool:
    """Whether a probe is too far off its reference."""
    return abs(measured / reference - 1) > PROBE_OFF


# must, aim
Bound = tuple[float, float | None]

_SHARE: Final[Mapping[tuple[int, int], tuple[Bound, Bound, Bound, Bound]]] = {
    (14336, 4096): ((0.78, 0.92), (0.58, 0.80), (0.48, 0.75), (0.74, 0.92)),
    (28672, 8192): ((0.78, 0.92), (0.58, 0.80), (0.56, 0.75), (0.80, 0.92)),
    (248077, 4096): ((0.86, 0.96), (0.72, 0.80), (0.66, 0.75), (0.82, 0.92)),
    (4096, 4096): ((0.58, 0.75), (0.45, 0.80), (0.24, 0.75), (0.30, 0.92)),
}
"""For 1 to 8, 16, 32 and 64, and 128 and 256 tokens."""
_PLACES: Final[Mapping[int, int]] = {1: 0, 4: 0, 8: 0, 16: 1, 32: 2, 64: 2, 128: 3, 256: 3}
_SMALL, _SIXTEEN, _LARGE = 8, 16, 512


def share(n: int, k: int, rows: int) -> Bound | None:
    """Of ideal, what the kernel chosen by default reaches."""
    bounds = _SHARE.get((n, k))
    return bounds[_PLACES[rows]] if bounds and rows in _PLACES else None


def over_cublas(n: int, k: int, rows: int) -> Bound | None:
    """How many times as fast as cuBLAS with bf16 weights it is."""
    if (n, k) not in _SHARE or rows < _LARGE:
        return None
    far = (n, k) == (4096, 4096) or (n, k, rows) == (14336, 4096, 1024)
    return (1 / 1.16 if far else 1 / 1.10, 1)


def over_humming(n: int, k: int, rows: int) -> Bound | None:
    """How many times as fast as Humming it is."""
    if (n, k) in _SHARE and rows <= _SMALL:
        return (1.3, None)
    if (n, k) == (14336, 4096):
        return (0.97 if rows == 1024 else 1, None)
    return (1, None) if (n, k) == (28672, 8192) or ((n, k) == (4096, 4096) and rows <= 32) else None


FP8_ROWS: Final = 256
FP8_OVER_EXACT: Final[Bound] = (1.25, None)
"""How many times as fast as the exact product FP8 is, from ``FP8_ROWS`` tokens on."""
FP8_BESIDE_TWIN: Final[Bound] = (1.30, 1.05)
"""Its time over that of the resident twin, at most; both quantize the activations."""


def portable(n: int, k: int, rows: int) -> Bound | None:
    """The portable tier's speed over the Gluon tier's."""
    return (0.6, None) if (n, k) in _SHARE and rows <= _SIXTEEN else None


RAGGED: Final[Bound] = (1.02, None)
"""The time of a ragged N over that of the whole one, at most."""

ERROR: Final[Mapping[str, Bound]] = {"bfloat16": (1.7e-3, None), "float16": (2.2e-4, None)}
"""The norm of the error over that of the result, at most: one rounding."""
FP8_ERROR: Final[Bound] = (5e-3, None)
"""Likewise, beside the product of the values that are quantized."""

HOST_MICROSECONDS: Final[Bound] = (12, None)
"""Of ``linear`` on the host, 4096x4096, one token."""

PACK_GIGABYTES: Final[Bound] = (300, None)
"""A second, read and written, by ``pack`` into fragments."""

DECODE_SHARE: Final[Mapping[int, Bound]] = {1: (0.70, None), 16: (0.60, None)}
"""By sequences, of a whole model's decoding: of the time that reading all it must read takes."""
DECODE_OVER_DENSE: Final[Bound] = (2.5, None)
"""How many times as fast as the same model in bfloat16 it is, one sequence."""
FIRST_TOKEN: Final[Bound] = (1.1, None)
"""The time to the first token over that of the model in bfloat16, at most."""
FP8_FIRST_TOKEN: Final[Bound] = (1, None)
"""How many times as fast as exact it is in FP8."""
MODEL_MEMORY: Final[Bound] = (1.1, None)
"""A device's memory while a model is loaded, and after, over the bytes of the checkpoint's tensors, at most."""
