"""Tensors as they lie on disk: safetensors dtypes, and where a tensor's bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

import ml_dtypes
import numpy as np

DTYPE_BITS: Final[dict[str, int]] = {
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F32": 32, "U32": 32, "I32": 32,
    "BF16": 16, "F16": 16, "U16": 16, "I16": 16,
    "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "F8_E8M0": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E3M2": 6, "F6_E2M3": 6, "F4": 4,
}  # fmt: skip
"""Bits of one element of each dtype that a safetensors header may name (safetensors 0.8), in the order in
which the library lays tensors out in a file."""

_NUMPY: Final[dict[str, Any]] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
    "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip

FLOATS: Final = ("F32", "BF16", "F16")
"""The dtypes of dense weights."""


@dataclass(slots=True, unsafe_hash=True)  # frozen takes three times as long to make, and there are 100,000
class Stored:
    """One tensor on disk; nothing changes one that is made.

    Attributes:
        name: full name.
        dtype: as the header spells it, such as "F8_E4M3".
        shape: as the header states it; F4 counts codes, not bytes.
        file: path of the shard.
        start: offset of the first byte in the file.
        nbytes: size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    start: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; a last partial byte counts whole."""
    return -(-prod(shape) * DTYPE_BITS[dtype] // 8)


def as_array(raw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """(bytes,) u8 as an array of ``dtype``; F4 gives u8 with two codes a byte, so half the last axis."""
    if dtype == "F4" and shape[-1] % 2 == 0:
        return raw.reshape(*shape[:-1], shape[-1] // 2)
    if dtype not in _NUMPY:
        return raw  # of a type that NumPy does not know, or rows that end inside a byte
    return raw.view(_NUMPY[dtype]).reshape(shape)


def header_dtype(array: Any) -> str:
    """The header's name for the dtype of a NumPy array."""
    return next(name for name, dtype in _NUMPY.items() if array.dtype == dtype)
