"""Tensors as compiled kernels are told of them: a pointer, int32 sizes and int64 strides, in one C struct.

::

    struct { void *data; int32_t dynamic_shapes[R]; int64_t dynamic_strides[R - 1]; }     R > 1
    struct { void *data; int32_t dynamic_shapes[1]; }                                     R = 1

Strides count elements; that of the last axis is 1 and is not stored. Nothing is copied: a descriptor points into the
array that it was built from and keeps it alive.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np

from halfbyte.arrays import dtype_name
from halfbyte.errors import UsageError
from halfbyte.numerics import Array, is_torch

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class TensorDesc:
    """One tensor argument of a compiled kernel; made by ``packed``, ``strided``, ``rank1``, ``cu_seqlens`` or ``of``.

    Args:
        data: address of the first element.
        shape: sizes, the slowest axis first.
        strides: in elements, without that of the last axis; () at rank 1.
        owner: the array that holds the memory, None where only an address was given.
    """

    data: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: Array | None = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.shape:
            raise UsageError("a descriptor needs at least one axis")
        for axis, size in enumerate(self.shape):
            if not 0 <= size <= INT32_MAX:
                raise UsageError(f"axis {axis} does not fit int32", got=size, expected=f"0..{INT32_MAX}")
        if len(self.strides) != self.rank - 1:
            raise UsageError(
                f"a descriptor of rank {self.rank} has {self.rank - 1} strides, that of the last axis is 1",
                got=f"{len(self.strides)} strides",
            )
        for axis, stride in enumerate(self.strides):
            if not 0 <= stride <= INT64_MAX:
                raise UsageError(f"the stride of axis {axis} does not fit int64", got=stride, expected="0..2^63 - 1")
        if self.extent > INT64_MAX:
            raise UsageError("the last element lies beyond int64", got=self.extent)
        if self.extent and not 0 < self.data < 2**64:
            raise UsageError("not an address", got=self.data)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first to the last one, both counted; 0 if there are none."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, (*self.strides, 1), strict=True))

    @classmethod
    def packed(cls, data: Array | int, shape: Sequence[int]) -> TensorDesc:
        """Row-major without gaps.

        Args:
            data: a contiguous array of as many elements, or an address.
            shape: at least two axes; a rank-1 descriptor has no strides and is made by ``rank1``.

        Raises:
            UsageError: sizes or strides that do not fit, or an array that is not so.
        """
        if len(shape) < 2:
            raise UsageError("a packed descriptor has at least two axes", got=tuple(shape), hint="use rank1")
        sizes = _sizes(shape)
        strides = [*itertools.accumulate(reversed(sizes[1:]), operator.mul)][::-1]
        desc = cls(data=_address(data), shape=sizes, strides=tuple(strides), owner=_owner(data))
        if desc.owner is not None and prod(desc.shape) != _elements(desc.owner):
            raise UsageError("the array has another number of elements", got=_elements(desc.owner), expected=desc.shape)
        return desc

    @classmethod
    def strided(cls, data: Array | int, shape: Sequence[int], strides: Sequence[int]) -> TensorDesc:
        """With given strides, in elements, without that of the last axis, which is 1.

        Args:
            data: a contiguous array that holds all of it, or an address.
            shape: at least two axes.
            strides: one for each axis but the last.

        Raises:
            UsageError: counts, sizes or strides that do not fit, or an array that is too small.
        """
        if len(shape) < 2:
            raise UsageError("a strided descriptor has at least two axes", got=tuple(shape), hint="use rank1")
        desc = cls(data=_address(data), shape=_sizes(shape), strides=_sizes(strides), owner=_owner(data))
        if desc.owner is not None and desc.extent > _elements(desc.owner):
            raise UsageError("the array ends before the descriptor", got=_elements(desc.owner), expected=desc.extent)
        return desc

    @classmethod
    def rank1(cls, data: Array | int, length: int) -> TensorDesc:
        """A vector: no strides.

        Raises:
            UsageError: a length that does not fit int32, or an array that is not a vector of this length.
        """
        desc = cls(data=_address(data), shape=_sizes([length]), strides=(), owner=_owner(data))
        if desc.owner is not None and tuple(desc.owner.shape) != desc.shape:
            raise UsageError("not a vector of this length", got=tuple(desc.owner.shape), expected=desc.shape)
        return desc

    @classmethod
    def cu_seqlens(cls, data: Array, batch_size: int) -> TensorDesc:
        """Cumulative lengths of ``batch_size`` sequences: (B + 1,) int32.

        Raises:
            UsageError: another dtype or length.
        """
        _check_array(data)
        if dtype_name(data.dtype) != "int32":
            raise UsageError("cumulative lengths are int32", got=dtype_name(data.dtype))
        return cls.rank1(data, batch_size + 1)

    @classmethod
    def of(cls, array: Array) -> TensorDesc:
        """An array as it lies.

        Args:
            array: NumPy or torch; its last axis contiguous, no stride negative.

        Raises:
            UsageError: an array that no descriptor can point to.
        """
        _check_array(array)
        shape, strides = _sizes(array.shape), _element_strides(array)
        if shape and shape[-1] > 1 and strides[-1] != 1:
            raise UsageError("the last axis is not contiguous", got=f"stride {strides[-1]}", expected="stride 1")
        return cls(data=_pointer(array), shape=shape, strides=strides[:-1], owner=array)

    def struct(self) -> ctypes.Structure:
        """The C struct; valid while this descriptor lives."""
        made: ctypes.Structure = c_struct(self.rank)()
        made.data = self.data
        made.dynamic_shapes = (ctypes.c_int32 * self.rank)(*self.shape)
        if self.strides:
            made.dynamic_strides = (ctypes.c_int64 * (self.rank - 1))(*self.strides)
        return made


@functools.cache
def c_struct(rank: int) -> Any:
    """The ctypes class of descriptors of one rank; 48, 40 and 16 bytes at rank 4, 3 and 1."""
    fields: list[tuple[str, Any]] = [("data", ctypes.c_void_p), ("dynamic_shapes", ctypes.c_int32 * rank)]
    if rank > 1:
        fields.append(("dynamic_strides", ctypes.c_int64 * (rank - 1)))
    return type(f"Tensor{rank}", (ctypes.Structure,), {"_fields_": fields})


def _sizes(values: Sequence[int]) -> tuple[int, ...]:
    """As Python integers, which do not overflow; others raise UsageError."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise UsageError("sizes and strides are integers", got=repr(value))
    return tuple(int(value) for value in values)


def _owner(data: Array | int) -> Array | None:
    return None if isinstance(data, int) else data


def _address(data: Array | int) -> int:
    if isinstance(data, int):
        return data
    _check_array(data)
    contiguous = data.is_contiguous() if is_torch(data) else data.flags.c_contiguous
    if not contiguous:
        raise UsageError(
            "the array is not row-major without gaps", got=f"strides {_element_strides(data)}", hint="use TensorDesc.of"
        )
    return _pointer(data)


def _check_array(data: Any) -> None:
    if not (is_torch(data) or isinstance(data, np.ndarray)):
        raise UsageError("not an array", got=type(data).__name__, expected="NumPy, torch or an address")


def _pointer(array: Array) -> int:
    return int(array.data_ptr() if is_torch(array) else array.ctypes.data)


def _elements(array: Array) -> int:
    return prod(array.shape)


def _element_strides(array: Array) -> tuple[int, ...]:
    if is_torch(array):
        return tuple(array.stride())
    if any(stride % array.itemsize for stride in array.strides):
        raise UsageError("a stride is no whole number of elements", got=f"{array.strides} bytes", hint="copy the array")
    return tuple(stride // array.itemsize for stride in array.strides)
