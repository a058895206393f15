"""What a layout is: a statement of where the bytes of a weight go, and a weight in one.

A layout is data. For codes and for scales it states an ``Order``: how the axes N and K are padded and
split into digits, and in which order the digits lie in memory. Packing, unpacking, ``offset`` and the drawing
in each layout's docstring are all read off that statement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np

from halfbyte.errors import LayoutError
from halfbyte.layouts.blocks import largest, without_zero_blocks
from halfbyte.layouts.executors import (
    Executor,
    Plane,
    arrange,
    arrange_codes,
    arrange_compiled,
    choose,
    executor,
    in_records,
    interleave,
    record_of,
    restore,
    restore_codes,
    restore_compiled,
    separate,
)
from halfbyte.layouts.order import Order
from halfbyte.numerics import BLOCK, MX_BLOCK, Array, is_torch
from halfbyte.weight import Mxfp4Weight, Weight, to_numpy, to_torch

Kind = Literal["nvfp4", "mxfp4"]
KINDS: Final[tuple[Kind, ...]] = ("nvfp4", "mxfp4")

Packable: TypeAlias = Weight | Mxfp4Weight
"""The kinds of weight that have layouts."""


@dataclass(frozen=True)
class Layout:
    """Where the bytes of a weight go: a frozen value, compared and hashed by its fields.

    A subclass gives ``name``, ``used_by`` and the two orders, and where they differ from the defaults here the
    kind of weight, the buffers, the shapes it takes and the form that it stores block scales in.
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
    def kind(self) -> Kind:
        """The kind of weight that it packs. A layout of several has a field for it, which ``choices`` lists."""
        return "nvfp4"

    @property
    def codes(self) -> Order:
        """The order of the 4-bit codes (n, k); two share a byte, the first in the low nibble."""
        raise NotImplementedError

    @property
    def scales(self) -> Order:
        """The order of the block-scale bytes (n, k // group), or as ``scale_block`` says."""
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
    def beside(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The buffers of what the kind has beside codes and scales: those that it always has, and those it may have."""
        return (("scale2",), ("input_scale", "pre_scale")) if self.kind == "nvfp4" else ((), ())

    @property
    def multiples(self) -> tuple[int, int]:
        """What N and K must be multiples of. Smaller tiles than the orders' are padded with zeros."""
        return 1, 1

    @property
    def refuses(self) -> str:
        """The values that ``refuse`` refuses, in words."""
        return "NaN and negative block scales" if self.kind == "nvfp4" else "NaN block scales"

    @property
    def zero_blocks(self) -> Literal["kept", "canonical"]:
        """Whether the codes of blocks whose scale is 0 are kept, or packed as 0 and so come back as 0."""
        return "kept"

    @property
    def group(self) -> int:
        """The codes along K that share a block scale."""
        return BLOCK if self.kind == "nvfp4" else MX_BLOCK

    @property
    def scale_block(self) -> tuple[int, int]:
        """The rows and columns of the weight that share a byte of the stored scales."""
        return 1, self.group

    @property
    def key(self) -> str:
        """The layout as text, for state dicts and custom ops; ``halfbyte.layouts.parse`` reads it.

        All fields are in it, but a kind that is NVFP4.
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if values.get("kind") == "nvfp4":
            del values["kind"]
        fields = [f"{name}={value.key if isinstance(value, Layout) else value}" for name, value in values.items()]
        return self.name + (f"({', '.join(fields)})" if fields else "")

    def of_kind(self, kind: str) -> Layout | None:
        """The same layout for another kind of weight; None if there is none."""
        if kind == self.kind:
            return self
        if kind not in self.choices.get("kind", ()):
            return None
        changes: dict[str, Any] = {"kind": kind}
        return dataclasses.replace(self, **changes)

    def check_kind(self, weight: Packable) -> None:
        """LayoutError where a weight is of another kind than this layout packs."""
        if weight.kind == self.kind:
            return
        other = self.of_kind(weight.kind)
        ways = [f"use {other.key}"] if other else []
        if weight.kind == "mxfp4":
            ways.append("cast it with halfbyte.mxfp4.to_nvfp4")
        raise LayoutError(
            f"layout {self.name} does not pack this kind of weight",
            got=weight.kind,
            expected=self.kind,
            hint=", or ".join(ways) or None,
        )

    def needs(self, shape: Sequence[int]) -> str | None:
        """None if a weight of ``shape`` (*E, N, K) fits, else the reason in words."""
        for axis, size, multiple in zip("NK", shape[-2:], self.multiples, strict=True):
            if size % multiple:
                return f"{axis} = {size} is not a multiple of {multiple}"
        return None

    def refuse(self, weight: Packable) -> str | None:
        """None if the values of ``weight`` fit, else the reason in words, naming the first block.

        No layout takes a NaN block scale or, where scales have a sign, one with its sign bit set.
        """
        if largest(weight.scales) <= _LARGEST[self.kind]:
            return None
        wrong = _wrong_scales(self.kind, weight.scales)
        what, bad = next((what, bad) for what, bad in wrong.items() if bool(bad.any()))
        index = first_true(bad)
        byte = int(weight.scales[tuple(index)])
        return f"the block scale at {index} is {what} (byte {byte:02X})"

    def to_stored(self, weight: Packable) -> tuple[Array, dict[str, Array]]:
        """The scales in the form and shape that ``scales`` orders, and the ``extras``."""
        return weight.scales, {}

    def from_stored(self, scales: Array, extras: Mapping[str, Array]) -> Array:
        """The inverse: (*E, N, G) block scales."""
        return scales

    def grid(self, shape: Sequence[int], plane: Plane) -> tuple[int, int]:
        """The rows and columns of a plane of a weight of ``shape``."""
        n, k = shape[-2], -(-shape[-1] // self.group) * self.group
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
        Where the order states bits, ``codes.bits`` moves those of each 8 steps then.
        """
        order, steps = (self.codes, 2) if plane == "codes" else (self.scales, 1)
        first, second = order.offsets(self.grid(shape, plane))
        if plane == "scales":
            n, k = self.grid(shape, "codes")
            first, second = first[np.arange(n) // self.scale_block[0]], second[np.arange(k) // self.scale_block[1]]
        (parts,) = (parts for parts in self.buffers.values() if plane in parts)
        record = record_of(parts, plane)
        return (first, second) if record is None else in_records(record, steps, first, second)

    def offset(self, n: int, k: int, shape: Sequence[int], plane: Plane = "codes") -> int:
        """Where element (n, k) of one expert lies: in 4-bit steps for codes, in bytes for scales."""
        needed = self.grid(shape, "codes")
        if not (0 <= n < needed[0] and 0 <= k < needed[1]):
            raise LayoutError("no such element", got=(n, k), expected=f"within {needed}")
        first, second = self.offsets(shape, plane)
        return int(first[n] + second[k])

    def pack(self, weight: Packable) -> Packed:
        """The weight in this layout; where ``zero_blocks`` says so, without the codes of blocks whose scale is 0.

        Raises:
            LayoutError: another kind of weight, or a shape or value that this layout cannot hold.
        """
        self.check_kind(weight)
        reason = self.needs(weight.shape) or self.refuse(weight)
        if reason:
            raise LayoutError(f"layout {self.name} cannot hold this weight: {reason}", got=weight.shape)
        return self.place(weight)

    def place(self, weight: Packable) -> Packed:
        """``pack`` of a weight that this layout is known to hold."""
        scales, extras = self.to_stored(weight)
        codes = weight.codes if self.zero_blocks == "kept" else without_zero_blocks(weight.codes, weight.scales)
        planes: dict[Plane, Array] = {"codes": codes, "scales": scales}
        always, optional = self.beside
        buffers = {
            **{name: self._arranged(name, planes, weight.shape) for name in self.buffers},
            **extras,
            **{name: getattr(weight, name) for name in (*always, *optional)},
        }
        return Packed(self, weight.shape, {name: b for name, b in buffers.items() if b is not None})

    def unpack(self, packed: Packed) -> Packable:
        """The weight again, bit for bit but for what ``zero_blocks`` says."""
        b = packed.buffers()
        planes: dict[Plane, Array] = {}
        for name in self.buffers:
            planes |= self._restored(name, b[name], packed.shape)
        codes, scales = planes["codes"], self.from_stored(planes["scales"], {name: b[name] for name in self.extras})
        always, optional = self.beside
        others = {name: b.get(name) for name in (*always, *optional)}
        make = Weight if self.kind == "nvfp4" else Mxfp4Weight
        return make(codes=codes, scales=scales, k=packed.shape[-1], **others)

    def dequantize(self, packed: Packed, dtype: Any = "float32") -> Array:
        """The values, (*E, N, K), as of the weight that ``unpack`` gives."""
        return packed.unpack().dequantize(dtype)

    def executors(self, shape: Sequence[int], device: str | None = None) -> dict[Plane, Executor]:
        """What moves each plane of a weight of ``shape`` (*E, N, K) in NumPy arrays, or torch tensors on ``device``."""
        found: dict[Plane, Executor] = {}
        for parts in self.buffers.values():
            grids = {plane: (*shape[:-2], *self.grid(shape, plane)) for plane in parts}
            sizes = {plane: prod(grid) // (2 if plane == "codes" else 1) for plane, grid in grids.items()}
            for plane, grid in grids.items():
                order, codes = self._order(plane)
                if device is None:
                    found[plane] = choose(order, grid, codes, record_of(parts, plane), sum(sizes.values()))
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


class Packed:
    """A weight in a layout: the layout, the logical shape (*E, N, K), and named buffers.

    Not a tensor: an operation that does not know it fails, and nothing dequantizes it unasked.

    Args:
        layout: the layout that wrote the buffers.
        shape: (*E, N, K).
        buffers: those of the layout, for most "codes" and "scales", (*E, bytes) u8 each; of NVFP4 also "scale2"
            (*E, 1 or N, 1) f32; and, where the weight has them, "input_scale" and "pre_scale".
    """

    __slots__ = ("_buffers", "layout", "memo", "shape")

    def __init__(self, layout: Layout, shape: Sequence[int], buffers: Mapping[str, Array]) -> None:
        always, optional = layout.beside
        names = [*layout.buffers, *layout.extras, *always]
        if set(names) - set(buffers) or set(buffers) - {*names, *optional}:
            raise LayoutError("wrong buffers", got=sorted(buffers), expected=", ".join(names))
        self.layout = layout
        self.shape = tuple(int(size) for size in shape)
        self._buffers = dict(buffers)
        self.memo: dict[Any, Any] = {}
        if len(self.shape) < 2 or min(self.shape) < 0:
            raise LayoutError("not the shape of a weight", got=self.shape, expected="(*E, N, K)")
        if len({is_torch(buffer) for buffer in buffers.values()}) > 1:
            raise LayoutError("the buffers are of two libraries: use NumPy arrays or torch tensors for all")
        *experts, n, k = self.shape
        reason = layout.needs(self.shape)
        if reason:
            raise LayoutError(f"layout {layout.name} has no such shape: {reason}", got=self.shape)
        per_tensor, per_row = (*experts, 1, 1), (*experts, n, 1)
        scale2 = buffers.get("scale2")
        needed: dict[str, tuple[str | None, tuple[int, ...]]] = {
            **{name: ("uint8", (*experts, size)) for name, size in layout.sizes(self.shape).items()},
            **dict.fromkeys(layout.extras, ("float32", ())),
            "scale2": ("float32", per_row if scale2 is not None and tuple(scale2.shape) == per_row else per_tensor),
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

    def __reduce__(self) -> Any:
        return Packed, (self.layout, self.shape, self._buffers)

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

    def expert(self, index: int) -> Packed:
        """One expert of the first expert axis; its buffers are views."""
        if len(self.shape) < 3:
            raise LayoutError("this weight has no expert axis", got=self.shape)
        whole = {"pre_scale", *self.layout.extras}
        buffers = {name: b if name in whole else b[index] for name, b in self._buffers.items()}
        return Packed(self.layout, self.shape[1:], buffers)

    def unpack(self) -> Packable:
        """The weight again, bit for bit, with one exception: where the layout's ``zero_blocks`` is "canonical", codes
        of blocks whose scale is 0 come back as 0, so -0 as 0. No other value changes."""
        return self.layout.unpack(self)

    def dequantize(self, dtype: Any = "float32") -> Array:
        """The values (*E, N, K) in "float32", "bfloat16" or "float16", as of ``Weight.dequantize``."""
        return self.layout.dequantize(self, dtype)


_LARGEST: Final[Mapping[Kind, int]] = {"nvfp4": 0x7E, "mxfp4": 0xFE}
"""The largest byte of a block scale that layouts take."""


def _wrong_scales(kind: Kind, scales: Array) -> dict[str, Array]:
    """Which block scales no layout takes, by what they are."""
    if kind == "mxfp4":
        return {"NaN": scales == 255}
    return {"NaN": (scales & 127) == 127, "negative": scales >= 128}


def first_true(bad: Array) -> list[int]:
    """The index of the first true element."""
    return [int(i) for i in np.argwhere(to_numpy(bad))[0]]
