"""Packed: NVFP4 weights as the buffers of a layout, as ``halfbyte convert --layout`` writes them.

==================  =====  ========  =============================================================
key                 dtype  shape     meaning
==================  =====  ========  =============================================================
``codes``           U8     [bytes]   the layout's buffer of codes
``scales``          U8     [bytes]   that of block scales; some layouts have one buffer for both
``scale2``          F32    []        multiplies
``input_scale``     F32    []        multiplies; absent in W4A16
``pre_scale``       float  [K]       activations are multiplied by it
==================  =====  ========  =============================================================

and what else the layout has, such as marlin's ``factor``. The files' metadata, ``halfbyte.layout``, state the layout
and the logical shape of each module. FP8, MXFP4 and dense layers have ModelOpt's names; experts are single.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np

from halfbyte.dialects.base import Dialect, Facts, Output, Piece
from halfbyte.errors import FormatError, LayoutError
from halfbyte.layouts import GateUp, Layout, Marlin, parse
from halfbyte.layouts.blocks import without_zero_blocks
from halfbyte.layouts.executors import Plane, arrange, arrange_codes, interleave, restore, restore_codes, separate
from halfbyte.modules import BYTES, LAYOUT_METADATA, Headers, Kind, Module, is_mx, quant_section
from halfbyte.numerics import BLOCK
from halfbyte.stored import Stored, View, read_tensor
from halfbyte.weight import Weight

_BESIDE = {"bias": "bias", "k_scale": "k_scale", "v_scale": "v_scale"}
_METHOD = "halfbyte"

_COPIES: Final[Mapping[Plane, int]] = {"codes": 5, "scales": 14}
"""What packing takes: codes one to a byte, twice over, and the result; indices of 8 bytes into a table of scales."""

Shape = tuple[int, int]


class Packed(Dialect):
    """Read packed buffers, and with a layout write them.

    Args:
        layout: of the buffers to write.

    Raises:
        LayoutError: a layout of fused layers, which lie apart in a checkpoint, or of MXFP4 weights.
    """

    name: ClassVar[str] = "packed"
    title: ClassVar[str] = "packed buffers"
    writable: ClassVar[bool] = False
    """By that name alone: it needs a layout."""
    suffixes: ClassVar[Mapping[Kind, Mapping[str, str]]] = {
        "nvfp4": {
            "codes": "codes",
            "scales": "scales",
            "scale2": "scale2",
            "input_scale": "input_scale",
            "pre_scale": "pre_scale",
            "lora_a": "svdquant_lora_a",
            "lora_b": "svdquant_lora_b",
            **_BESIDE,
        },
        "fp8": {"data": "weight", "scale": "weight_scale", "input_scale": "input_scale", **_BESIDE},
        "mxfp4": {"codes": "weight", "scales": "weight_scale", **_BESIDE},
        "dense": {"data": "weight", **_BESIDE},
    }

    def __init__(self, layout: Layout | None = None) -> None:
        if isinstance(layout, GateUp):
            hint = "pack with the layout inside it, and order the rows when gate and up are joined"
            raise LayoutError("gate_up is for gate and up in one weight; in a checkpoint they lie apart", hint=hint)
        if layout is not None and layout.kind != "nvfp4":
            hint = "MXFP4 layers are written as they lie, and can become NVFP4 before"
            raise LayoutError("a checkpoint is packed as NVFP4 alone", got=layout.key, hint=hint)
        self.layout = layout

    def claims(self, headers: Headers) -> str | None:
        if LAYOUT_METADATA not in headers.metadata:
            return None
        keys = sorted({str(entry.get("layout")) for entry in _table(headers.metadata[LAYOUT_METADATA]).values()})
        return f"metadata {LAYOUT_METADATA}: {', '.join(keys)}"

    def claims_config(self, headers: Headers) -> bool:
        return quant_section(headers).get("quant_method") == _METHOD

    def _modules(self, headers: Headers, name: str, group: dict[str, Stored]) -> list[Module]:
        entry = _table(headers.metadata.get(LAYOUT_METADATA, "{}")).get(name)
        return super()._modules(headers, name, group) if entry is None else [_packed(name, entry, group)]

    def kind_of(self, group: Mapping[str, Stored]) -> Kind:
        weight, scales = group.get("weight"), group.get("weight_scale")
        if weight is not None and weight.dtype in BYTES and scales is not None and is_mx(weight, scales):
            return "mxfp4"
        return super().kind_of({s: t for s, t in group.items() if s not in ("codes", "scales", "scale2")})

    def outputs(self, module: Module, source: Dialect) -> list[Output]:
        found = super().outputs(module, source)
        if module.kind != "nvfp4" or self.layout is None:
            return found
        n, k = module.shape
        in_buffers = {module.member(role) for role in ("codes", "scales")}
        made = {name: Stored(module.member(name), "U8", (size,)) for name, size in self.layout.sizes((n, k)).items()}
        made |= {name: Stored(module.member(name), "F32", ()) for name in self.layout.extras}
        buffers = []
        for name, stored in made.items():
            planes: tuple[Plane, ...] = tuple(self.layout.buffers.get(name, ("scales",)))
            pack = Pack(self.layout.key, (n, k), name, planes)
            buffers.append(Output(stored, (Piece(0, tuple(module.roles[plane] for plane in planes), pack),)))
        return [*buffers, *(o for o in found if o.stored.name not in in_buffers)]

    def config(self, facts: Facts) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        section: dict[str, Any] = {"quant_method": _METHOD, "layout": self.layout.key if self.layout else None}
        if facts.kv:
            section["kv_cache_scheme"] = facts.kv
        return section | {"ignore": sorted(facts.dense)}, {}


def encode_layouts(layout: Layout, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """The metadata entry that states how packed modules lie; {} if there are none."""
    table = {name: {"layout": layout.key, "shape": list(shape)} for name, shape in sorted(shapes.items())}
    return {LAYOUT_METADATA: json.dumps(table, separators=(",", ":"), ensure_ascii=False)} if table else {}


@lru_cache(maxsize=1)
def _table(text: str) -> dict[str, dict[str, Any]]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise FormatError(f"the metadata {LAYOUT_METADATA} is no table of modules", got=text[:40])
    return table


@lru_cache(maxsize=64)
def _layout(key: str) -> Layout:
    return parse(key)


@lru_cache(maxsize=1024)
def _sizes(key: str, shape: Shape) -> dict[str, int]:
    return _layout(key).sizes(shape)


def _packed(name: str, entry: Mapping[str, Any], group: Mapping[str, Stored]) -> Module:
    """The module that packed buffers make.

    Raises:
        FormatError: a layout that is not known, or buffers that are not those of the layout and the shape.
    """
    key, shape = entry.get("layout"), _shape(name, entry.get("shape"))
    try:
        layout = _layout(key) if isinstance(key, str) else None
        usable = layout is not None and layout.kind == "nvfp4" and not isinstance(layout, GateUp)
        wrong = layout.needs(shape) if layout is not None and usable else "not a layout of a checkpoint"
    except LayoutError as error:
        layout, wrong = None, error.message
    if layout is None or wrong is not None:
        raise FormatError(f"the stated layout: {wrong}", tensor=name, got=repr(key)[:200])
    needed: dict[str, tuple[str, tuple[int, ...]]] = {
        b: ("U8", (size,)) for b, size in _sizes(layout.key, shape).items()
    }
    for buffer, (dtype, extent) in (needed | dict.fromkeys(layout.extras, ("F32", ()))).items():
        tensor = group.get(buffer)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, extent):
            raise FormatError(
                "a buffer is missing, or is not that of the stated layout and shape",
                file=tensor.file if tensor else None,
                tensor=f"{name}.{buffer}" if name else buffer,
                got=None if tensor is None else str(tensor),
                expected=f"{dtype} {list(extent)} for {layout.key} of {list(shape)}",
            )
    n, k = shape
    extras = tuple(group[extra] for extra in layout.extras)
    holder = {plane: buffer for buffer, planes in layout.buffers.items() for plane in planes}
    made: dict[Plane, tuple[str, Shape]] = {"codes": ("U8", (n, k // 2)), "scales": ("F8_E4M3", (n, k // BLOCK))}
    roles: dict[str, Stored] = {}
    for plane, (dtype, extent) in made.items():
        tensor = group[holder[plane]]
        step = Unpack(layout.key, shape, plane, extras if plane == "scales" else ())
        size = extent[0] * extent[1]
        roles[plane] = View(
            tensor.name, dtype, extent, tensor.file, tensor.start, size, region=tensor.nbytes, steps=(step,)
        )
    others = {role: s for role, s in Packed.suffixes["nvfp4"].items() if role not in made and s in group}
    roles |= {role: group[suffix] for role, suffix in others.items()}
    taken = {*holder.values(), *layout.extras, *others.values()}
    return Module(name, "nvfp4", roles, tuple(t for suffix, t in group.items() if suffix not in taken))


def _shape(name: str, value: Any) -> Shape:
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size >= 0 for size in value):
        n, k = value
        if k % BLOCK == 0:
            return n, k
    raise FormatError("the stated shape is none of a weight", tensor=name, got=repr(value)[:100], expected="[N, K]")


@dataclass(frozen=True)
class Unpack:
    """The codes or the block scales of a weight, from a layout's buffer.

    Attributes:
        key: the layout.
        shape: (N, K).
        plane: "codes" or "scales".
        extras: the layout's further buffers, in its order, which scales need.
    """

    key: str
    shape: Shape
    plane: Plane
    extras: tuple[Stored, ...] = ()

    @property
    def copies(self) -> int:
        """Memory that it takes, in times of what it makes."""
        return _COPIES[self.plane]

    def __call__(self, raw: Any) -> Any:
        """(bytes,) u8 to (N, K/2) or (N, K/16) u8."""
        layout = _layout(self.key)
        (parts,) = (parts for parts in layout.buffers.values() if self.plane in parts)
        flat, grid = separate(parts, raw)[self.plane], layout.grid(self.shape, self.plane)
        if self.plane == "codes":
            return restore_codes(layout.codes, flat, grid)
        extras = {name: read_tensor(tensor) for name, tensor in zip(layout.extras, self.extras, strict=True)}
        for name, tensor in zip(extras, self.extras, strict=True):
            if not (np.isfinite(extras[name]) and extras[name] > 0):
                raise FormatError("not a factor of scales", file=tensor.file, tensor=tensor.name, got=extras[name])
        return layout.from_stored(restore(layout.scales, flat, grid), extras)


@dataclass(frozen=True)
class Pack:
    """A buffer of a layout, from codes, block scales or both.

    Attributes:
        key: the layout.
        shape: (N, K).
        buffer: its name.
        planes: which arrays are given.
    """

    key: str
    shape: Shape
    buffer: str
    planes: tuple[Plane, ...]

    @property
    def copies(self) -> int:
        """Memory that it takes, in times of what it is made of."""
        return _COPIES[self.planes[-1] if len(self.planes) == 1 else "codes"]

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """The buffer, (bytes,) u8, or the f32 number."""
        layout, given = _layout(self.key), dict(zip(self.planes, arrays, strict=True))
        planes: dict[Plane, Any] = {}
        if "codes" in given:
            planes["codes"] = arrange_codes(layout.codes, given["codes"].reshape(self.shape[0], self.shape[1] // 2))
        if "scales" in given:
            stored, extras = _quiet(layout).to_stored(scales_alone(given["scales"], self.shape))
            if self.buffer in extras:
                return extras[self.buffer]
            planes["scales"] = arrange(layout.scales, stored)
        return interleave(layout.buffers[self.buffer], planes)


@dataclass(frozen=True)
class Hold:
    """Block scales as they come back from a layout that rounds them."""

    key: str
    shape: Shape

    def __call__(self, raw: Any) -> Any:
        """Bytes to (N, K/16) u8."""
        return held(_layout(self.key), scales_alone(raw, self.shape))


@dataclass(frozen=True)
class ZeroBlocks:
    """Codes as they come back from a layout that has none in blocks whose scale is 0; ``scales`` are theirs."""

    scales: Stored

    def __call__(self, raw: Any) -> Any:
        """Bytes to (N, K/2) u8."""
        scales = read_tensor(self.scales).view(np.uint8)
        return without_zero_blocks(raw.view(np.uint8).reshape(*scales.shape[:-1], -1), scales)


def scales_alone(scales: Any, shape: Sequence[int]) -> Weight:
    """A weight of these block scales and of codes that take no memory: layouts judge and store scales by themselves."""
    n, k = shape
    codes = np.broadcast_to(np.uint8(0), (n, k // 2))
    return Weight(codes=codes, scales=scales.reshape(n, k // BLOCK).view(np.uint8), scale2=1.0)


def held(layout: Layout, weight: Weight) -> Any:
    """The block scales (N, K/16) that a layout holds of a weight that it takes."""
    return layout.from_stored(*_quiet(layout).to_stored(weight))


def _quiet(layout: Layout) -> Layout:
    """The layout without its warning about what it rounds, which is for single weights."""
    return dataclasses.replace(layout, lossy=False) if isinstance(layout, Marlin) else layout
