"""What runs a statement: NumPy, torch, or compiled code, chosen by the size and the place of the array.

Several planes may share a buffer as records of some bytes of each in turn; that is stated here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from halfbyte import jit
from halfbyte.errors import LayoutError
from halfbyte.layouts import compiled
from halfbyte.layouts.order import Order
from halfbyte.numerics import Array, is_torch, pack_nibbles, unpack_nibbles

Plane = Literal["codes", "scales"]


def arrange_numpy(order: Order, a: Any) -> Any:
    """(*E, N, K) to (*E, count), in memory order; padding is zero."""
    lead, shape = a.shape[:-2], a.shape[-2:]
    padded = _padded(order, shape)
    if padded != shape:
        a = np.pad(a, [(0, 0)] * len(lead) + [(0, padded[0] - shape[0]), (0, padded[1] - shape[1])])
    to_memory, _ = _permutations(order, len(lead))
    grid = a.reshape(*lead, *order.digits(shape).values()).transpose(to_memory)
    grid = np.flip(grid, _flipped(order, len(lead)))
    return np.ascontiguousarray(grid).reshape(*lead, order.count(shape))


def restore_numpy(order: Order, flat: Any, shape: tuple[int, int]) -> Any:
    """The inverse of arrange_numpy; ``shape`` is (N, K)."""
    lead, digits = flat.shape[:-1], order.digits(shape)
    _, to_axes = _permutations(order, len(lead))
    grid = np.flip(flat.reshape(*lead, *(digits[d] for d in order.memory)), _flipped(order, len(lead)))
    grid = grid.transpose(to_axes)
    return np.ascontiguousarray(grid.reshape(*lead, *_padded(order, shape))[..., : shape[0], : shape[1]])


def arrange_torch(order: Order, a: Any) -> Any:
    """As arrange_numpy, for a torch tensor on any device."""
    import torch

    lead, shape = a.shape[:-2], tuple(a.shape[-2:])
    padded = _padded(order, shape)
    if padded != shape:
        a = torch.nn.functional.pad(a, (0, padded[1] - shape[1], 0, padded[0] - shape[0]))
    to_memory, _ = _permutations(order, len(lead))
    grid = a.reshape(*lead, *order.digits(shape).values()).permute(to_memory)
    if order.backwards:
        grid = grid.flip(_flipped(order, len(lead)))
    return grid.reshape(*lead, order.count(shape))


def restore_torch(order: Order, flat: Any, shape: tuple[int, int]) -> Any:
    """As restore_numpy, for a torch tensor on any device."""
    lead, digits = flat.shape[:-1], order.digits(shape)
    _, to_axes = _permutations(order, len(lead))
    grid = flat.reshape(*lead, *(digits[d] for d in order.memory))
    if order.backwards:
        grid = grid.flip(_flipped(order, len(lead)))
    grid = grid.permute(to_axes)
    return grid.reshape(*lead, *_padded(order, shape))[..., : shape[0], : shape[1]].contiguous()


def _padded(order: Order, shape: tuple[int, int]) -> tuple[int, int]:
    n, k = (-(-size // m) * m for size, m in zip(shape, order.multiples, strict=True))
    return n, k


def _permutations(order: Order, lead: int) -> tuple[list[int], list[int]]:
    digits = [d for axis in order.axes for d in axis]
    to_memory = [*range(lead), *(lead + digits.index(d) for d in order.memory)]
    to_axes = [*range(lead), *(lead + order.memory.index(d) for d in digits)]
    return to_memory, to_axes


def _flipped(order: Order, lead: int) -> tuple[int, ...]:
    return tuple(lead + order.memory.index(d) for d in order.backwards)


SMALL = 1 << 20
"""Bytes below which NumPy moves an array: a statement's code takes 0.2 to 0.6 s to compile, once in a process."""

Record = tuple[int, int, int]
"""Of a plane in a buffer of records: its bytes in a record, the bytes of the record, those before the plane's."""


class Executor(NamedTuple):
    """What moves an array: "tiles" and "elements" are compiled by Numba, "triton" by Triton, the others by nothing."""

    name: Literal["tiles", "elements", "numpy", "triton", "torch"]
    why: str


def executor(order: Order, shape: Sequence[int], *, codes: bool = False, device: str | None = None) -> Executor:
    """What moves an array of ``shape`` (*E, N, K) by ``order``, both ways.

    Bytes, and packed codes, in NumPy arrays of at least ``SMALL`` bytes are moved by compiled code where Numba is
    installed (the extra ``cpu``): by tiles of whole lines, or element by element where the statement's digits leave no
    tile. Those in CUDA tensors are moved by compiled code where Triton is installed and every digit with a size has a
    power of two of values. NumPy's and PyTorch's own operations move the rest.

    Args:
        order: of bytes, or of 4-bit codes.
        shape: in elements: for codes, K is twice the bytes of a row.
        codes: whether the elements are 4-bit codes.
        device: that of a torch tensor, such as "cuda"; None for a NumPy array.
    """
    if device is None:
        return choose(order, tuple(shape), codes, None, prod(shape) // (2 if codes else 1))
    if device.partition(":")[0] != "cuda":
        return Executor("torch", f"the tensor is on {device}")
    found: Executor = _cuda().executor(order, shape, codes=codes)
    return found


def choose(order: Order, shape: tuple[int, ...], codes: bool, record: Record | None, size: int) -> Executor:
    """What moves bytes in NumPy arrays: ``size`` of them, a plane's or, in records, all of the buffer's."""
    if not size or (record is None and order.moves_nothing(shape[-2:])):
        return Executor("numpy", "nothing moves")
    if size < SMALL:
        return Executor("numpy", f"{size} bytes are fewer than {SMALL}")
    reason = jit.missing()
    if reason:
        return Executor("numpy", reason)
    move = _move(order, (shape[-2], shape[-1]), codes, record, False)
    if move.tiles is None:
        return Executor("elements", "the digits leave no tile")
    return Executor("tiles", f"{move.tiles.bytes} bytes each, {move.tiled:.1%} of the elements")


def _is_compiled(order: Order, a: Any, shape: Sequence[int], codes: bool) -> bool:
    if is_torch(a) or a.dtype.itemsize != 1:
        return False
    size = prod(shape) // (2 if codes else 1)
    return size >= SMALL and choose(order, tuple(shape), codes, None, size).name != "numpy"


@lru_cache(maxsize=64)
def _move(order: Order, shape: tuple[int, int], codes: bool, record: Record | None, back: bool) -> compiled.Move:
    """The move of a matrix (N, K) of bytes or codes into memory order, or back."""
    bits = 8
    if codes:
        whole = order.whole_bytes()
        if whole is not None and not order.high_first:
            order, shape = whole, (shape[0], shape[1] // 2)
        else:
            bits = 4
    first, second = order.offsets(shape)
    if record is not None:
        first, second = in_records(record, 8 // bits, first, second)
    rows = compiled.Places(np.arange(shape[0]) * shape[1], np.arange(shape[1]))
    memory = compiled.Places(first, second)
    words = compiled.Words(order.bits, order.shifts(back), back) if codes and order.bits else None
    return compiled.Move(bits, memory, rows, words) if back else compiled.Move(bits, rows, memory, words)


def in_records(record: Record, steps: int, first: Any, second: Any) -> tuple[Any, Any]:
    """Offsets in a plane, of so many steps a byte, as offsets in the buffer of records."""
    own, whole, before = (size * steps for size in record)
    first, second = (at // own * whole + at % own for at in (first, second))
    return first + before, second


def arrange_compiled(order: Order, a: Any, codes: bool, into: Any | None = None, record: Record | None = None) -> Any:
    """As arrange_numpy, or arrange_codes, for bytes; ``into`` is zero wherever there is padding."""
    *lead, n, k = a.shape
    k *= 2 if codes else 1
    if into is None:
        count = order.count((n, k))
        make = np.zeros if count > n * k else np.empty
        into = make((*lead, -(-count // 2) if codes else count), np.uint8).view(a.dtype)
    move = _move(order, (n, k), codes, record, False)
    _each(move, prod(lead), np.ascontiguousarray(a), into)
    return into


def restore_compiled(
    order: Order,
    flat: Any,
    shape: tuple[int, int],
    codes: bool,
    into: Any | None = None,
    record: Record | None = None,
) -> Any:
    """As restore_numpy, or restore_codes, for bytes."""
    if into is None:
        into = np.empty((*flat.shape[:-1], shape[0], shape[1] // (2 if codes else 1)), flat.dtype)
    move = _move(order, shape, codes, record, True)
    _each(move, prod(flat.shape[:-1]), np.ascontiguousarray(flat), into)
    return into


def _each(move: compiled.Move, experts: int, source: Any, target: Any) -> None:
    for one, other in zip(*(a.view(np.uint8).reshape(experts, -1) for a in (source, target)), strict=True):
        move.run(one, other)


def arrange(order: Order, a: Array) -> Array:
    """Run ``order`` forwards with the executor of a's library; see ``executor``."""
    if _is_compiled(order, a, a.shape, codes=False):
        return arrange_compiled(order, a, codes=False)
    if _on_cuda(order, a, a.shape, codes=False):
        return _cuda().run(order, a, (a.shape[-2], a.shape[-1]), 8, back=False)
    return _arrange(order, a)


def restore(order: Order, flat: Array, shape: tuple[int, int]) -> Array:
    """Run ``order`` backwards with the executor of flat's library."""
    _check_size(flat, order.count(shape))
    if _is_compiled(order, flat, (*flat.shape[:-1], *shape), codes=False):
        return restore_compiled(order, flat, shape, codes=False)
    if _on_cuda(order, flat, (*flat.shape[:-1], *shape), codes=False):
        return _cuda().run(order, flat, shape, 8, back=True)
    return _restore(order, flat, shape)


def arrange_codes(order: Order, codes: Array) -> Array:
    """Packed codes (*E, N, K/2) to packed codes in memory order, (*E, ceil(count/2))."""
    shape = codes.shape[-2], 2 * codes.shape[-1]
    if _is_compiled(order, codes, (*codes.shape[:-2], *shape), codes=True):
        return arrange_compiled(order, codes, codes=True)
    if _on_cuda(order, codes, (*codes.shape[:-2], *shape), codes=True):
        return _cuda().run(order, codes, shape, 4, back=False)
    whole = order.whole_bytes()
    if whole is not None:
        return _arrange(whole, _swap(codes) if order.high_first else codes)
    flat = _pack(_arrange(order, _unpack(codes)))  # an odd count leaves the last high nibble 0
    return _shifted(flat, order.shifts())


def restore_codes(order: Order, flat: Array, shape: tuple[int, int]) -> Array:
    """The inverse of arrange_codes; ``shape`` is (N, K) with K even."""
    _check_size(flat, -(-order.count(shape) // 2))
    if _is_compiled(order, flat, (*flat.shape[:-1], *shape), codes=True):
        return restore_compiled(order, flat, shape, codes=True)
    if _on_cuda(order, flat, (*flat.shape[:-1], *shape), codes=True):
        return _cuda().run(order, flat, shape, 4, back=True)
    n, k = shape
    whole = order.whole_bytes()
    if whole is not None:
        codes = _restore(whole, flat, (n, k // 2))
        return _swap(codes) if order.high_first else codes
    flat = _shifted(flat, order.shifts(back=True))
    return _pack(_restore(order, _unpack(flat)[..., : order.count(shape)], shape))


def _arrange(order: Order, a: Array) -> Array:
    return arrange_torch(order, a) if is_torch(a) else arrange_numpy(order, a)


def _restore(order: Order, flat: Array, shape: tuple[int, int]) -> Array:
    return restore_torch(order, flat, shape) if is_torch(flat) else restore_numpy(order, flat, shape)


def _check_size(flat: Array, size: int) -> None:
    if flat.shape[-1] != size:
        raise LayoutError("not the length of this order", got=tuple(flat.shape), expected=f"(*E, {size})")


def _on_cuda(order: Order, a: Any, shape: Sequence[int], codes: bool) -> bool:
    """Whether Triton moves this; if not, PyTorch does."""
    bytes_on_cuda = is_torch(a) and a.is_cuda and a.dtype.itemsize == 1
    return bytes_on_cuda and _cuda().refuse(order, shape, codes=codes) is None


def _cuda() -> Any:
    from halfbyte.layouts import cuda

    return cuda


def _swap(packed: Array) -> Array:
    """The nibbles of each byte exchanged."""
    return (packed >> 4) | (packed << 4)


def _shifted(flat: Array, shifts: Sequence[tuple[int, int]]) -> Array:
    """The bits of each 4 bytes moved."""
    if not shifts:
        return flat
    words = as_words(flat, 4)
    if not is_torch(flat):
        return _or(words, shifts).view(np.uint8).reshape(flat.shape)
    import torch

    signed = [(shift, mask - (mask >> 31 << 32)) for shift, mask in shifts]
    return _or(words, signed).view(torch.uint8).reshape(flat.shape)


def as_words(a: Array, size: int) -> Any:
    """All bytes in one row, as integers of so many of them: unsigned in NumPy, signed in torch; copied if need be."""
    if not is_torch(a):
        return np.ascontiguousarray(a).reshape(-1).view(f"<u{size}")
    import torch

    line: Any = a.reshape(-1)
    if line.storage_offset() % size or line.stride() != (1,):
        line = line.clone(memory_format=torch.contiguous_format)
    return line.view({4: torch.int32, 8: torch.int64}[size])


def _or(words: Any, shifts: Sequence[tuple[int, int]]) -> Any:
    """One to the right may copy the sign, which no mask keeps."""
    moved = words & 0
    for shift, mask in shifts:
        moved |= (words << shift if shift >= 0 else words >> -shift) & mask
    return moved


def _unpack(packed: Array) -> Array:
    if not is_torch(packed):
        return unpack_nibbles(packed)
    import torch

    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _pack(codes: Array) -> Array:
    """Nibbles to bytes along the last axis; an odd one gets a zero beside it."""
    odd = codes.shape[-1] % 2
    if not is_torch(codes):
        return pack_nibbles(np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, 1)]) if odd else codes)
    import torch

    codes = torch.nn.functional.pad(codes, (0, 1)) if odd else codes
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def record_of(parts: Mapping[Plane, int], plane: Plane) -> Record | None:
    """How a plane lies in its buffer; None where it has the buffer to itself."""
    if len(parts) == 1:
        return None
    before = list(parts.values())[: list(parts).index(plane)]
    return parts[plane], sum(parts.values()), sum(before)


def interleave(parts: Mapping[Plane, int], planes: Mapping[Plane, Array]) -> Array:
    """One buffer (*E, bytes) of the planes, each (*E, bytes): records of so many bytes of each in turn."""
    if len(parts) == 1:
        return planes[next(iter(parts))]
    lead = next(iter(planes.values())).shape[:-1]
    records = [planes[plane].reshape(*lead, planes[plane].shape[-1] // size, size) for plane, size in parts.items()]
    if is_torch(records[0]):
        import torch

        return torch.cat(records, -1).flatten(-2)
    joined = np.concatenate(records, -1)
    return joined.reshape(*lead, joined.shape[-2] * joined.shape[-1])


def separate(parts: Mapping[Plane, int], buffer: Array) -> dict[Plane, Array]:
    """The inverse of interleave."""
    if len(parts) == 1:
        return {next(iter(parts)): buffer}
    whole, start, found = sum(parts.values()), 0, {}
    lead, count = buffer.shape[:-1], buffer.shape[-1] // whole
    for plane, size in parts.items():
        found[plane] = buffer.reshape(*lead, count, whole)[..., start : start + size].reshape(*lead, count * size)
        start += size
    return found
