"""What a layout is: a statement of where the bytes go, and the executors that run any statement.

A layout is data. For codes and for scales it states an ``Order``: how the axes N and K are padded and
split into digits, and in which order the digits lie in memory. Packing, unpacking and ``offset`` are all
read off that statement.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np

from halfbyte.errors import LayoutError
from halfbyte.numerics import BLOCK, Array, is_torch, pack_nibbles, unpack_nibbles
from halfbyte.weight import Weight, to_numpy, to_torch

Plane = Literal["codes", "scales"]


_AXIS = r"\s*(?:\w+|\(\s*\w+(?:\s+\w+)*\s*\))"
_STATEMENT = re.compile(rf"{_AXIS}(?:\s+|(?<=\))|(?=\s*\())(?:{_AXIS})\s*->\s*\w+(?:\s+\w+)*\s*")


@dataclass(frozen=True)
class Order:
    """A padding and a digit permutation of a matrix (N, K), written ``"axes -> memory"``.

    ``Order("(nt n32) k -> nt k n32", n32=32)`` pads N to a multiple of 32, splits it into the digits nt
    and n32 (slowest first), and lays the digits nt, k, n32 in memory, slowest first. The first digit of
    each axis has no size: it is what remains.

    Args:
        pattern: two axes, N then K, each a digit or a parenthesised list of digits; then the memory order.
        sizes: the size of each digit but the first of an axis.
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
        if not once or sorted(n + k) != sorted(self.memory) or set(sizes) != set(n[1:] + k[1:]):
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
        return self.pattern.split("->")[1].split()

    @property
    def multiples(self) -> tuple[int, int]:
        """What N and K are padded to multiples of."""
        sizes = dict(self.sizes)
        n, k = self.axes
        return prod(sizes[d] for d in n[1:]), prod(sizes[d] for d in k[1:])

    def digits(self, shape: tuple[int, int]) -> dict[str, int]:
        """The size of each digit for a matrix of ``shape``, in axis order."""
        found = dict(self.sizes)
        for axis, size, multiple in zip(self.axes, shape, self.multiples, strict=True):
            found[axis[0]] = -(-size // multiple)
        return {d: found[d] for axis in self.axes for d in axis}

    def count(self, shape: tuple[int, int]) -> int:
        """Elements in memory for a matrix of ``shape``, padding included."""
        return prod(self.digits(shape).values())

    def offsets(self, shape: tuple[int, int]) -> tuple[Any, Any]:
        """Two i64 vectors (N,) and (K,): element (n, k) lies at ``first[n] + second[k]``."""
        digits = self.digits(shape)
        strides, step = {}, 1
        for d in reversed(self.memory):
            strides[d] = step
            step *= digits[d]
        vectors = []
        for axis, size in zip(self.axes, shape, strict=True):
            rest, offset = np.arange(size), np.zeros(size, np.int64)
            for d in reversed(axis):
                offset += rest % digits[d] * strides[d]
                rest = rest // digits[d]
            vectors.append(offset)
        return vectors[0], vectors[1]

    def whole_bytes(self) -> Order | None:
        """For an order of 4-bit codes: the same order of bytes, where pairs along K stay together."""
        k = self.axes[1]
        last = k[-1]
        if self.memory[-1] != last:
            return None
        sizes = dict(self.sizes)
        if len(k) > 1:
            if sizes[last] % 2:
                return None
            sizes[last] //= 2
        return Order(self.pattern, **sizes)


def arrange_numpy(order: Order, a: Any) -> Any:
    """(*E, N, K) to (*E, count), in memory order; padding is zero."""
    lead, shape = a.shape[:-2], a.shape[-2:]
    padded = _padded(order, shape)
    if padded != shape:
        a = np.pad(a, [(0, 0)] * len(lead) + [(0, padded[0] - shape[0]), (0, padded[1] - shape[1])])
    to_memory, _ = _permutations(order, len(lead))
    grid = a.reshape(*lead, *order.digits(shape).values()).transpose(to_memory)
    return np.ascontiguousarray(grid).reshape(*lead, order.count(shape))


def restore_numpy(order: Order, flat: Any, shape: tuple[int, int]) -> Any:
    """The inverse of arrange_numpy; ``shape`` is (N, K)."""
    lead, digits = flat.shape[:-1], order.digits(shape)
    _, to_axes = _permutations(order, len(lead))
    grid = flat.reshape(*lead, *(digits[d] for d in order.memory)).transpose(to_axes)
    return np.ascontiguousarray(grid.reshape(*lead, *_padded(order, shape))[..., : shape[0], : shape[1]])


def arrange_torch(order: Order, a: Any) -> Any:
    """As arrange_numpy, for a torch tensor on any device."""
    import torch

    lead, shape = a.shape[:-2], tuple(a.shape[-2:])
    padded = _padded(order, shape)
    if padded != shape:
        a = torch.nn.functional.pad(a, (0, padded[1] - shape[1], 0, padded[0] - shape[0]))
    to_memory, _ = _permutations(order, len(lead))
    return a.reshape(*lead, *order.digits(shape).values()).permute(to_memory).reshape(*lead, order.count(shape))


def restore_torch(order: Order, flat: Any, shape: tuple[int, int]) -> Any:
    """As restore_numpy, for a torch tensor on any device."""
    lead, digits = flat.shape[:-1], order.digits(shape)
    _, to_axes = _permutations(order, len(lead))
    grid = flat.reshape(*lead, *(digits[d] for d in order.memory)).permute(to_axes)
    return grid.reshape(*lead, *_padded(order, shape))[..., : shape[0], : shape[1]].contiguous()


def _padded(order: Order, shape: tuple[int, int]) -> tuple[int, int]:
    n, k = (-(-size // m) * m for size, m in zip(shape, order.multiples, strict=True))
    return n, k


def _permutations(order: Order, lead: int) -> tuple[list[int], list[int]]:
    digits = [d for axis in order.axes for d in axis]
    to_memory = [*range(lead), *(lead + digits.index(d) for d in order.memory)]
    to_axes = [*range(lead), *(lead + order.memory.index(d) for d in digits)]
    return to_memory, to_axes


def arrange(order: Order, a: Array) -> Array:
    """Run ``order`` forwards with the executor of a's library."""
    return arrange_torch(order, a) if is_torch(a) else arrange_numpy(order, a)


def restore(order: Order, flat: Array, shape: tuple[int, int]) -> Array:
    """Run ``order`` backwards with the executor of flat's library."""
    return restore_torch(order, flat, shape) if is_torch(flat) else restore_numpy(order, flat, shape)


def arrange_codes(order: Order, codes: Array) -> Array:
    """Packed codes (*E, N, K/2) to packed codes in memory order, (*E, ceil(count/2))."""
    whole = order.whole_bytes()
    if whole is not None:
        return arrange(whole, codes)
    return _pack(arrange(order, _unpack(codes)))  # an odd count leaves the last high nibble 0


def restore_codes(order: Order, flat: Array, shape: tuple[int, int]) -> Array:
    """The inverse of arrange_codes; ``shape`` is (N, K) with K even."""
    n, k = shape
    whole = order.whole_bytes()
    if whole is not None:
        return restore(whole, flat, (n, k // 2))
    return _pack(restore(order, _unpack(flat)[..., : order.count(shape)], shape))


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

    A subclass gives ``name``, ``used_by`` and the two orders; what its bytes cannot hold it says in
    ``needs`` (shapes) and ``refuse`` (values).
    """

    name: ClassVar[str]
    used_by: ClassVar[str]

    @property
    def codes(self) -> Order:
        """The order of the 4-bit codes (n, k); two share a byte, the first in the low nibble."""
        raise NotImplementedError

    @property
    def scales(self) -> Order:
        """The order of the block-scale bytes (n, k // 16)."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """The layout as text, for state dicts and custom ops; ``halfbyte.layouts.parse`` reads it."""
        fields = [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)]
        return self.name + (f"({', '.join(fields)})" if fields else "")

    def needs(self, shape: Sequence[int]) -> str | None:
        """None if a weight of ``shape`` (*E, N, K) fits, else the reason in words."""
        return None

    def refuse(self, weight: Weight) -> str | None:
        """None if the values of ``weight`` fit, else the reason in words, naming the first block.

        No layout takes a NaN block scale or one with its sign bit set.
        """
        for what, bad in (("NaN", (weight.scales & 127) == 127), ("negative", weight.scales >= 128)):
            if bool(bad.any()):
                index = _first(bad)
                byte = int(weight.scales[tuple(index)])
                return f"the block scale at {index} is {what} (byte {byte:02X})"
        return None

    def offset(self, n: int, k: int, shape: Sequence[int], plane: Plane = "codes") -> int:
        """Where element (n, k) of one expert lies: in 4-bit steps for codes, in bytes for scales."""
        rows, blocks = shape[-2], -(-shape[-1] // BLOCK)
        if not (0 <= n < rows and 0 <= k < blocks * BLOCK):
            raise LayoutError("no such element", got=(n, k), expected=f"within {(rows, blocks * BLOCK)}")
        if plane == "scales":
            first, second = self.scales.offsets((rows, blocks))
            return int(first[n] + second[k // BLOCK])
        first, second = self.codes.offsets((rows, blocks * BLOCK))
        return int(first[n] + second[k])

    def pack(self, weight: Weight) -> Packed:
        """The weight in this layout.

        Raises:
            LayoutError: a shape or value that this layout cannot hold.
        """
        reason = self.needs(weight.shape) or self.refuse(weight)
        if reason:
            raise LayoutError(f"layout {self.name} cannot hold this weight: {reason}", got=weight.shape)
        buffers = {
            "codes": arrange_codes(self.codes, weight.codes),
            "scales": arrange(self.scales, weight.scales),
            "scale2": weight.scale2,
            "input_scale": weight.input_scale,
            "pre_scale": weight.pre_scale,
        }
        return Packed(self, weight.shape, {name: b for name, b in buffers.items() if b is not None})

    def unpack(self, packed: Packed) -> Weight:
        """The weight again, bit for bit."""
        n, k = packed.shape[-2:]
        blocks = -(-k // BLOCK)
        b = packed.buffers()
        return Weight(
            codes=restore_codes(self.codes, b["codes"], (n, blocks * BLOCK)),
            scales=restore(self.scales, b["scales"], (n, blocks)),
            scale2=b["scale2"],
            input_scale=b.get("input_scale"),
            pre_scale=b.get("pre_scale"),
            k=k,
        )


class Packed:
    """A weight in a layout: the layout, the logical shape (*E, N, K), and named buffers.

    Not a tensor: an operation that does not know it fails, and nothing dequantizes it unasked.

    Args:
        layout: the layout that wrote the buffers.
        shape: (*E, N, K).
        buffers: "codes" (*E, bytes) u8, "scales" (*E, bytes) u8, "scale2" (*E, 1 or N, 1) f32 and,
            where the weight has them, "input_scale" and "pre_scale".
    """

    __slots__ = ("_buffers", "layout", "shape")

    def __init__(self, layout: Layout, shape: Sequence[int], buffers: Mapping[str, Array]) -> None:
        missing = {"codes", "scales", "scale2"} - set(buffers)
        unknown = set(buffers) - {"codes", "scales", "scale2", "input_scale", "pre_scale"}
        if missing or unknown:
            raise LayoutError("wrong buffers", got=sorted(buffers), expected="codes, scales, scale2")
        self.layout = layout
        self.shape = tuple(int(size) for size in shape)
        self._buffers = dict(buffers)
        if len(self.shape) < 2 or min(self.shape) < 0:
            raise LayoutError("not the shape of a weight", got=self.shape, expected="(*E, N, K)")
        if len({is_torch(buffer) for buffer in buffers.values()}) > 1:
            raise LayoutError("the buffers are of two libraries: use NumPy arrays or torch tensors for all")
        *experts, n, k = self.shape
        blocks = -(-k // BLOCK)
        code_bytes, scale_bytes = -(-layout.codes.count((n, blocks * BLOCK)) // 2), layout.scales.count((n, blocks))
        per_row = (*experts, n, 1)
        needed = {
            "codes": ("uint8", (*experts, code_bytes)),
            "scales": ("uint8", (*experts, scale_bytes)),
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


def _first(bad: Array) -> list[int]:
    """The index of the first true element."""
    return [int(i) for i in np.argwhere(to_numpy(bad))[0]]
