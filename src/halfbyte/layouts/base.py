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
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np

from halfbyte.errors import LayoutError
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


def arrange(order: Order, a: Array) -> Array:
    """Run ``order`` forwards with the executor of a's library; that of CUDA tensors is ``halfbyte.layouts.cuda``."""
    if _on_cuda(order, a, a.shape, codes=False):
        return _cuda().run(order, a, tuple(a.shape[-2:]), 8, back=False)
    return arrange_torch(order, a) if is_torch(a) else arrange_numpy(order, a)


def restore(order: Order, flat: Array, shape: tuple[int, int]) -> Array:
    """Run ``order`` backwards with the executor of flat's library."""
    if _on_cuda(order, flat, (*flat.shape[:-1], *shape), codes=False):
        return _cuda().run(order, flat, shape, 8, back=True)
    return restore_torch(order, flat, shape) if is_torch(flat) else restore_numpy(order, flat, shape)


def arrange_codes(order: Order, codes: Array) -> Array:
    """Packed codes (*E, N, K/2) to packed codes in memory order, (*E, ceil(count/2))."""
    shape = codes.shape[-2], 2 * codes.shape[-1]
    if _on_cuda(order, codes, (*codes.shape[:-2], *shape), codes=True):
        return _cuda().run(order, codes, shape, 4, back=False)
    whole = order.whole_bytes()
    if whole is not None:
        return arrange(whole, _swap(codes) if order.high_first else codes)
    return _pack(arrange(order, _unpack(codes)))  # an odd count leaves the last high nibble 0


def restore_codes(order: Order, flat: Array, shape: tuple[int, int]) -> Array:
    """The inverse of arrange_codes; ``shape`` is (N, K) with K even."""
    if _on_cuda(order, flat, (*flat.shape[:-1], *shape), codes=True):
        return _cuda().run(order, flat, shape, 4, back=True)
    n, k = shape
    whole = order.whole_bytes()
    if whole is not None:
        codes = restore(whole, flat, (n, k // 2))
        return _swap(codes) if order.high_first else codes
    return _pack(restore(order, _unpack(flat)[..., : order.count(shape)], shape))


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
        if len(parts) == 1:
            return first, second
        own, whole = parts[plane] * steps, sum(parts.values()) * steps
        before = sum(list(parts.values())[: list(parts).index(plane)]) * steps
        first, second = (at // own * whole + at % own for at in (first, second))
        return first + before, second

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
        planes: dict[Plane, Array] = {
            "codes": arrange_codes(self.codes, weight.codes),
            "scales": arrange(self.scales, scales),
        }
        buffers = {
            **{name: interleave(parts, planes) for name, parts in self.buffers.items()},
            **extras,
            "scale2": weight.scale2,
            "input_scale": weight.input_scale,
            "pre_scale": weight.pre_scale,
        }
        return Packed(self, weight.shape, {name: b for name, b in buffers.items() if b is not None})

    def unpack(self, packed: Packed) -> Weight:
        """The weight again, bit for bit."""
        b = packed.buffers()
        planes = {plane: a for name, parts in self.buffers.items() for plane, a in separate(parts, b[name]).items()}
        scales = restore(self.scales, planes["scales"], self.grid(packed.shape, "scales"))
        return Weight(
            codes=restore_codes(self.codes, planes["codes"], self.grid(packed.shape, "codes")),
            scales=self.from_stored(scales, {name: b[name] for name in self.extras}),
            scale2=b["scale2"],
            input_scale=b.get("input_scale"),
            pre_scale=b.get("pre_scale"),
            k=packed.shape[-1],
        )


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
