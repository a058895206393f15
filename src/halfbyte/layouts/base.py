"""What a layout is: a statement of where the bytes go, and the executors that run any statement.

A layout is data. For codes and for scales it states an ``Order``: how the axes N and K are padded and
split into digits, and in which order the digits lie in memory. Packing, unpacking, ``offset`` and the drawing
in each layout's docstring are all read off that statement.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from halfbyte import jit
from halfbyte.errors import LayoutError
from halfbyte.layouts import compiled
from halfbyte.numerics import BLOCK, Array, is_torch, pack_nibbles, unpack_nibbles
from halfbyte.weight import Weight, to_numpy, to_torch

Plane = Literal["codes", "scales"]


_AXIS = r"\s*(?:\w+|\(\s*\w+(?:\s+\w+)*\s*\))"
_STATEMENT = re.compile(rf"{_AXIS}(?:\s+|(?<=\))|(?=\s*\())(?:{_AXIS})\s*->\s*-?\w+(?:\s+-?\w+)*\s*")


@dataclass(frozen=True)
class Order:
    """A padding and a digit permutation of a matrix (N, K), written ``"axes -> memory"``.

    ``Order("(nt n32) k -> nt k n32", n32=32)`` pads N to a multiple of 32, splits it into the digits nt
    and n32 (slowest first), and lays the digits nt, k, n32 in memory, slowest first. One digit of each axis
    has no size: it is what remains. A digit with a minus in the memory order runs backwards there:
    ``"n (k p) -> n k -p"`` with p=2 has the odd k of each pair first, which for codes is the high nibble first.

    Args:
        pattern: two axes, N then K, each a digit or a parenthesised list of digits; then the memory order.
        sizes: the size of each digit but one of each axis.
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...]

    def __init__(self, pattern: str, **sizes: int) -> None:
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))
        if not _STATEMENT.fullmatch(pattern):
            raise LayoutError("not a statement", got=repr(pattern), expected="two axes -> digits in memory order")
        n, k = self.axes
        once = len(set(n + k)) == len(n + k)
        rest = [len(set(axis) - set(sizes)) for axis in (n, k)]
        if not once or sorted(n + k) != sorted(self.memory) or not set(sizes) <= set(n + k) or rest != [1, 1]:
            raise LayoutError("the statement's digits, memory order and sizes do not agree", got=str(self))
        if not all(type(size) is int and size > 0 for size in sizes.values()):
            raise LayoutError("the size of a digit is not a positive integer", got=str(self))

    def __str__(self) -> str:
        return f"{self.pattern}  {', '.join(f'{name}={size}' for name, size in self.sizes)}".rstrip()

    @property
    def axes(self) -> tuple[list[str], list[str]]:
        """The digits of N and of K, slowest first."""
        n, k = (group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", self.pattern.split("->")[0]))
        return n, k

    @property
    def memory(self) -> list[str]:
        """The digits in memory order, slowest first."""
        return [d.removeprefix("-") for d in self.pattern.split("->")[1].split()]

    @property
    def backwards(self) -> list[str]:
        """The digits that run backwards in memory."""
        return [d[1:] for d in self.pattern.split("->")[1].split() if d.startswith("-")]

    @property
    def multiples(self) -> tuple[int, int]:
        """What N and K are padded to multiples of."""
        sizes = dict(self.sizes)
        n, k = (prod(sizes.get(d, 1) for d in axis) for axis in self.axes)
        return n, k

    def digits(self, shape: tuple[int, int]) -> dict[str, int]:
        """The size of each digit for a matrix of ``shape``, in axis order."""
        found = dict(self.sizes)
        for axis, size, multiple in zip(self.axes, shape, self.multiples, strict=True):
            (rest,) = set(axis) - set(dict(self.sizes))
            found[rest] = -(-size // multiple)
        return {d: found[d] for axis in self.axes for d in axis}

    def count(self, shape: tuple[int, int]) -> int:
        """Elements in memory for a matrix of ``shape``, padding included."""
        return prod(self.digits(shape).values())

    def offsets(self, shape: tuple[int, int]) -> tuple[Any, Any]:
        """Two i64 vectors (N,) and (K,): element (n, k) lies at ``first[n] + second[k]``."""
        digits, backwards = self.digits(shape), self.backwards
        strides, step = {}, 1
        for d in reversed(self.memory):
            strides[d] = step
            step *= digits[d]
        vectors = []
        for axis, size in zip(self.axes, shape, strict=True):
            rest, offset = np.arange(size), np.zeros(size, np.int64)
            for d in reversed(axis):
                digit = rest % digits[d]
                offset += (digits[d] - 1 - digit if d in backwards else digit) * strides[d]
                rest = rest // digits[d]
            vectors.append(offset)
        return vectors[0], vectors[1]

    def whole_bytes(self) -> Order | None:
        """For an order of 4-bit codes: the same order of bytes, where pairs along K stay together."""
        last = self.axes[1][-1]
        if self.memory[-1] != last:
            return None
        sizes = dict(self.sizes)
        if last not in sizes:
            return self if self.multiples[1] == 1 else None
        if sizes[last] % 2:
            return None
        sizes[last] //= 2
        return Order(self.pattern, **sizes)

    def moves_nothing(self, shape: Sequence[int]) -> bool:
        """Whether memory is the matrix as it lies: no digit moves and nothing is padded."""
        n, k = self.axes
        still = self.memory == n + k and not self.backwards
        return still and all(size % multiple == 0 for size, multiple in zip(shape, self.multiples, strict=True))

    @property
    def high_first(self) -> bool:
        """For an order of 4-bit codes that has ``whole_bytes``: whether the even k of a pair is the high nibble."""
        return self.memory[-1] in self.backwards


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
        return _chosen(order, tuple(shape), codes, None, prod(shape) // (2 if codes else 1))
    if device.partition(":")[0] != "cuda":
        return Executor("torch", f"the tensor is on {device}")
    found: Executor = _cuda().executor(order, shape, codes=codes)
    return found


def _chosen(order: Order, shape: tuple[int, ...], codes: bool, record: Record | None, size: int) -> Executor:
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
    return size >= SMALL and _chosen(order, tuple(shape), codes, None, size).name != "numpy"


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
        first, second = _in_records(record, 8 // bits, first, second)
    rows = compiled.Places(np.arange(shape[0]) * shape[1], np.arange(shape[1]))
    memory = compiled.Places(first, second)
    return compiled.Move(bits, memory, rows) if back else compiled.Move(bits, rows, memory)


def _in_records(record: Record, steps: int, first: Any, second: Any) -> tuple[Any, Any]:
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
    return _pack(_arrange(order, _unpack(codes)))  # an odd count leaves the last high nibble 0


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


@dataclass(frozen=True)
class Layout:
    """Where the bytes of a weight go: a frozen value, compared and hashed by its fields.

    A subclass gives ``name``, ``used_by`` and the two orders, and where they differ from the defaults here the
    buffers, the shapes it takes and the form that it stores block scales in.
    """

    name: ClassVar[str]
    used_by: ClassVar[str]
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """The values that each field of few values may have."""
    row_orders: ClassVar[Mapping[str, Order]] = {}
    """For a layout that moves whole rows inside another: its orders of rows by name."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, allowed = getattr(self, field.name), self.choices.get(field.name)
            if allowed is not None and value not in allowed:
                known = " or ".join(map(str, allowed))
                raise LayoutError(f"layout {self.name}: not a value of {field.name}", got=repr(value), expected=known)
            if type(value) is int and value < 1:
                raise LayoutError(f"layout {self.name}: {field.name} is not positive", got=value)

    @property
    def codes(self) -> Order:
        """The order of the 4-bit codes (n, k); two share a byte, the first in the low nibble."""
        raise NotImplementedError

    @property
    def scales(self) -> Order:
        """The order of the block-scale bytes (n, k // 16), or as ``scale_block`` says."""
        raise NotImplementedError

    @property
    def buffers(self) -> Mapping[str, Mapping[Plane, int]]:
        """Each buffer by its name: one plane, or records of so many bytes of each plane in turn."""
        return {"codes": {"codes": 1}, "scales": {"scales": 1}}

    @property
    def extras(self) -> tuple[str, ...]:
        """The buffers of one f32 for all experts that the scales' form needs."""
        return ()

    @property
    def multiples(self) -> tuple[int, int]:
        """What N and K must be multiples of. Smaller tiles than the orders' are padded with zeros."""
        return 1, 1

    @property
    def refuses(self) -> str:
        """The values that ``refuse`` refuses, in words."""
        return "NaN and negative block scales"

    @property
    def scale_block(self) -> tuple[int, int]:
        """The rows and columns of the weight that share a byte of the stored scales."""
        return 1, BLOCK

    @property
    def key(self) -> str:
        """The layout as text, for state dicts and custom ops; ``halfbyte.layouts.parse`` reads it."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields = [f"{name}={value.key if isinstance(value, Layout) else value}" for name, value in values.items()]
        return self.name + (f"({', '.join(fields)})" if fields else "")

    def needs(self, shape: Sequence[int]) -> str | None:
        """None if a weight of ``shape`` (*E, N, K) fits, else the reason in words."""
        for axis, size, multiple in zip("NK", shape[-2:], self.multiples, strict=True):
            if size % multiple:
                return f"{axis} = {size} is not a multiple of {multiple}"
        return None

    def refuse(self, weight: Weight) -> str | None:
        """None if the values of ``weight`` fit, else the reason in words, naming the first block.

        No layout takes a NaN block scale or one with its sign bit set.
        """
        for what, bad in (("NaN", (weight.scales & 127) == 127), ("negative", weight.scales >= 128)):
            if bool(bad.any()):
                index = first_true(bad)
                byte = int(weight.scales[tuple(index)])
                return f"the block scale at {index} is {what} (byte {byte:02X})"
        return None

    def to_stored(self, weight: Weight) -> tuple[Array, dict[str, Array]]:
        """The scales in the form and shape that ``scales`` orders, and the ``extras``."""
        return weight.scales, {}

    def from_stored(self, scales: Array, extras: Mapping[str, Array]) -> Array:
        """The inverse: (*E, N, G) block scales."""
        return scales

    def grid(self, shape: Sequence[int], plane: Plane) -> tuple[int, int]:
        """The rows and columns of a plane of a weight of ``shape``."""
        n, k = shape[-2], -(-shape[-1] // BLOCK) * BLOCK
        rows, columns = self.scale_block if plane == "scales" else (1, 1)
        return -(-n // rows), -(-k // columns)

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """The bytes of each buffer, for one expert of a weight of ``shape``."""
        codes = -(-self.codes.count(self.grid(shape, "codes")) // 2)
        planes: dict[Plane, int] = {"codes": codes, "scales": self.scales.count(self.grid(shape, "scales"))}
        return {name: sum(planes[plane] for plane in parts) for name, parts in self.buffers.items()}

    def offsets(self, shape: Sequence[int], plane: Plane) -> tuple[Any, Any]:
        """Two i64 vectors over N and over K, of whole blocks: element (n, k) lies at ``first[n] + second[k]``.

        In 4-bit steps for codes, the low nibble of a byte first, and in bytes for scales, of the plane's buffer.
        """
        order, steps = (self.codes, 2) if plane == "codes" else (self.scales, 1)
        first, second = order.offsets(self.grid(shape, plane))
        if plane == "scales":
            n, k = self.grid(shape, "codes")
            first, second = first[np.arange(n) // self.scale_block[0]], second[np.arange(k) // self.scale_block[1]]
        (parts,) = (parts for parts in self.buffers.values() if plane in parts)
        record = record_of(parts, plane)
        return (first, second) if record is None else _in_records(record, steps, first, second)

    def offset(self, n: int, k: int, shape: Sequence[int], plane: Plane = "codes") -> int:
        """Where element (n, k) of one expert lies: in 4-bit steps for codes, in bytes for scales."""
        needed = self.grid(shape, "codes")
        if not (0 <= n < needed[0] and 0 <= k < needed[1]):
            raise LayoutError("no such element", got=(n, k), expected=f"within {needed}")
        first, second = self.offsets(shape, plane)
        return int(first[n] + second[k])

    def pack(self, weight: Weight) -> Packed:
        """The weight in this layout.

        Raises:
            LayoutError: a shape or value that this layout cannot hold.
        """
        reason = self.needs(weight.shape) or self.refuse(weight)
        if reason:
            raise LayoutError(f"layout {self.name} cannot hold this weight: {reason}", got=weight.shape)
        scales, extras = self.to_stored(weight)
        planes: dict[Plane, Array] = {"codes": weight.codes, "scales": scales}
        buffers = {
            **{name: self._arranged(name, planes, weight.shape) for name in self.buffers},
            **extras,
            "scale2": weight.scale2,
            "input_scale": weight.input_scale,
            "pre_scale": weight.pre_scale,
        }
        return Packed(self, weight.shape, {name: b for name, b in buffers.items() if b is not None})

    def unpack(self, packed: Packed) -> Weight:
        """The weight again, bit for bit."""
        b = packed.buffers()
        planes: dict[Plane, Array] = {}
        for name in self.buffers:
            planes |= self._restored(name, b[name], packed.shape)
        return Weight(
            codes=planes["codes"],
            scales=self.from_stored(planes["scales"], {name: b[name] for name in self.extras}),
            scale2=b["scale2"],
            input_scale=b.get("input_scale"),
            pre_scale=b.get("pre_scale"),
            k=packed.shape[-1],
        )

    def executors(self, shape: Sequence[int], device: str | None = None) -> dict[Plane, Executor]:
        """What moves each plane of a weight of ``shape`` (*E, N, K) in NumPy arrays, or torch tensors on ``device``."""
        found: dict[Plane, Executor] = {}
        for parts in self.buffers.values():
            grids = {plane: (*shape[:-2], *self.grid(shape, plane)) for plane in parts}
            sizes = {plane: prod(grid) // (2 if plane == "codes" else 1) for plane, grid in grids.items()}
            for plane, grid in grids.items():
                order, codes = self._order(plane)
                if device is None:
                    found[plane] = _chosen(order, grid, codes, record_of(parts, plane), sum(sizes.values()))
                else:
                    found[plane] = executor(order, grid, codes=codes, device=device)
        return found

    def _order(self, plane: Plane) -> tuple[Order, bool]:
        return (self.codes, True) if plane == "codes" else (self.scales, False)

    def _in_place(self, parts: Mapping[Plane, int], shape: Sequence[int], like: Array) -> bool:
        """Whether compiled code moves planes to and from records as they lie."""
        return len(parts) > 1 and not is_torch(like) and self.executors(shape)[next(iter(parts))].name != "numpy"

    def _arranged(self, name: str, planes: Mapping[Plane, Array], shape: Sequence[int]) -> Array:
        """A buffer, of the planes (*E, rows, columns) that it holds."""
        parts = self.buffers[name]
        if not self._in_place(parts, shape, planes["codes"]):
            arranged: dict[Plane, Array] = {}
            for plane in parts:
                order, codes = self._order(plane)
                arranged[plane] = (arrange_codes if codes else arrange)(order, planes[plane])
            return interleave(parts, arranged)
        buffer = np.zeros((*shape[:-2], self.sizes(shape)[name]), np.uint8)
        for plane in parts:
            order, codes = self._order(plane)
            arrange_compiled(order, planes[plane], codes, buffer, record_of(parts, plane))
        return buffer

    def _restored(self, name: str, buffer: Array, shape: Sequence[int]) -> dict[Plane, Array]:
        """The planes that a buffer holds."""
        parts, found = self.buffers[name], {}
        in_place = self._in_place(parts, shape, buffer)
        flat = {} if in_place else separate(parts, buffer)
        for plane in parts:
            order, codes = self._order(plane)
            grid = self.grid(shape, plane)
            if in_place:
                found[plane] = restore_compiled(order, buffer, grid, codes, record=record_of(parts, plane))
            else:
                found[plane] = (restore_codes if codes else restore)(order, flat[plane], grid)
        return found


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


class Packed:
    """A weight in a layout: the layout, the logical shape (*E, N, K), and named buffers.

    Not a tensor: an operation that does not know it fails, and nothing dequantizes it unasked.

    Args:
        layout: the layout that wrote the buffers.
        shape: (*E, N, K).
        buffers: those of the layout, for most "codes" and "scales", (*E, bytes) u8 each; "scale2"
            (*E, 1 or N, 1) f32; and, where the weight has them, "input_scale" and "pre_scale".
    """

    __slots__ = ("_buffers", "layout", "shape")

    def __init__(self, layout: Layout, shape: Sequence[int], buffers: Mapping[str, Array]) -> None:
        names = [*layout.buffers, *layout.extras, "scale2"]
        if set(names) - set(buffers) or set(buffers) - {*names, "input_scale", "pre_scale"}:
            raise LayoutError("wrong buffers", got=sorted(buffers), expected=", ".join(names))
        self.layout = layout
        self.shape = tuple(int(size) for size in shape)
        self._buffers = dict(buffers)
        if len(self.shape) < 2 or min(self.shape) < 0:
            raise LayoutError("not the shape of a weight", got=self.shape, expected="(*E, N, K)")
        if len({is_torch(buffer) for buffer in buffers.values()}) > 1:
            raise LayoutError("the buffers are of two libraries: use NumPy arrays or torch tensors for all")
        *experts, n, k = self.shape
        reason = layout.needs(self.shape)
        if reason:
            raise LayoutError(f"layout {layout.name} has no such shape: {reason}", got=self.shape)
        per_row = (*experts, n, 1)
        needed: dict[str, tuple[str | None, tuple[int, ...]]] = {
            **{name: ("uint8", (*experts, size)) for name, size in layout.sizes(self.shape).items()},
            **dict.fromkeys(layout.extras, ("float32", ())),
            "scale2": ("float32", per_row if tuple(buffers["scale2"].shape) == per_row else (*experts, 1, 1)),
            "input_scale": ("float32", tuple(experts)),
            "pre_scale": (None, (k,)),
        }
        for name, buffer in self._buffers.items():
            dtype, extent = needed[name]
            got = str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape)
            if got[1] != extent or dtype not in (None, got[0]):
                raise LayoutError(
                    f"buffer {name} does not fit", got=f"{got[0]} {got[1]}", expected=f"{dtype or 'float'} {extent}"
                )

    def __repr__(self) -> str:
        return f"Packed({self.layout.key}, shape={self.shape}, {self.nbytes} bytes)"

    @property
    def key(self) -> str:
        """The layout as text."""
        return self.layout.key

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(prod(b.shape) * b.dtype.itemsize for b in self._buffers.values())

    def buffers(self) -> dict[str, Array]:
        """The named buffers; the dict is the caller's, the arrays are shared."""
        return dict(self._buffers)

    @staticmethod
    def from_buffers(layout: Layout, shape: Sequence[int], buffers: Mapping[str, Array]) -> Packed:
        """The inverse of ``buffers()``."""
        return Packed(layout, shape, buffers)

    def to(self, device: Any) -> Packed:
        """The same with all buffers, as torch tensors, on ``device``."""
        return Packed(self.layout, self.shape, {name: to_torch(b, device) for name, b in self._buffers.items()})

    def unpack(self) -> Weight:
        """The weight again, bit for bit."""
        return self.layout.unpack(self)


def first_true(bad: Array) -> list[int]:
    """The index of the first true element."""
    return [int(i) for i in np.argwhere(to_numpy(bad))[0]]
