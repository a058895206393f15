"""Stacks of experts: how they lie on disk, and the experts that they hold.

A stack is one tensor for all experts of a layer, with its companions joined by an underscore. It lies in one of two
orders, which the factor 8 between codes and scales tells apart::

    rows      codes (E, N, K/2)   scales (E, N, K/16)   as a layer lies; transformers' own order
    columns   codes (E, K/2, N)   scales (E, K/16, N)   bytes transposed; ModelOpt's Llama4 and gpt-oss

``gate_up_proj`` and ``w13`` hold two layers. Their rows are those of gate, then those of up ("concatenated"), the
reverse ("up_first"), or they alternate, gate first ("interleaved"). Nothing in the tensor tells which: the file's
metadata, the caller, or the model's definition does. Their scale2 and input_scale are (E,), or (E, 2) for gate and up.
Sources: nvidia-modelopt 0.47 ``unified_export_hf``; transformers 5.24 ``integrations/moe.py``.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np

from halfbyte.errors import FormatError
from halfbyte.modules import LAYOUT_METADATA, Headers, Module, Stack, structure
from halfbyte.stored import DTYPE_BITS, FLOATS, Stored, View

METADATA: Final = "halfbyte.experts"
"""Key in a file's metadata: JSON {stack: {"gate_up": order, "columns": bool}}."""

GATE_UP: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}
"""Stack -> the two layers that it holds."""
GATE_UP_ORDERS: Final = ("concatenated", "up_first", "interleaved")

INTERLEAVED: Final = {"gpt_oss"}
"""Model types whose gate and up alternate; those of all others are concatenated."""
COLUMNS: Final = {"gpt_oss", "llama4", "llama4_text", "aria", "aria_text", "openai_privacy_filter"}
"""Model types whose dense stacks are (E, K, N); those of all others are (E, N, K)."""

SPELLED: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "w13": "gate_up_proj"}
"""Layer or stack of experts -> its name in most models."""
_NUMBERED = re.compile(r"(.*\bexperts)\.(0|[1-9][0-9]{0,4})\.([^.]+)")
"""A larger number is not that of an expert: checks look at each number up to the largest."""
COMPANIONS: Final = {
    "_weight_scale": "scales",
    "_weight_scale_2": "scale2",
    "_input_scale": "input_scale",
    "_bias": "bias",
    "_pre_quant_scale": "pre_scale",
}
_MATRICES: Final = ("codes", "scales", "data")
_SCALARS: Final = ("scale2", "input_scale", "scale")


def numbered(name: str) -> tuple[str, int, str] | None:
    """(experts, number, part) of the name of one expert's layer, such as ``model.layers.0.mlp.experts.7.up_proj``."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2]), found[3]) if found else None


def expert_number(text: str) -> int | None:
    """The number of an expert, as ``numbered`` takes it, or None."""
    plain = len(text) <= 5 and text.isascii() and text.isdecimal() and (text == "0" or text[0] != "0")
    return int(text) if plain else None


def spelled(name: str) -> str:
    """The name of a layer or stack of experts as most models have it, such as gate_proj for w1."""
    parent, _, last = name.rpartition(".")
    if not parent.endswith("experts"):
        above, _, number = parent.rpartition(".")
        if not (number.isdecimal() and above.endswith("experts")):
            return name
    return f"{parent.replace('.block_sparse_moe.', '.mlp.')}.{SPELLED.get(last, last)}"


def stacks(headers: Headers, parent: str, group: dict[str, Stored]) -> Iterator[Module]:
    """Take the stacks out of ``group`` (suffix -> tensor of the module ``parent``) and give them as modules."""
    in_order = sorted(group)
    for suffix, tensor in [(s, t) for s, t in group.items() if len(t.shape) >= 3]:
        found = _stack_of(suffix, tensor, parent, group) if suffix in group else None
        if found is None:
            continue  # not a stack, or beside one that has been taken out
        stem, kind, roles = found
        taken = {t.name for t in roles.values()}
        beside = in_order[bisect_left(in_order, f"{stem}_") : bisect_left(in_order, f"{stem}`")]  # ` follows _
        unknown = [t for s in beside if (t := group.get(s)) is not None and t.name not in taken]
        name = f"{parent}.{stem}" if parent else stem
        module = Module(name, kind, roles, tuple(unknown))
        module = as_stack(headers, module)
        if module.stack is None:
            continue
        for t in module.tensors:
            del group[t.name.rpartition(".")[2]]
        yield module


def _stack_of(
    suffix: str, tensor: Stored, parent: str, group: Mapping[str, Stored]
) -> tuple[str, Any, dict[str, Stored]] | None:
    """(stem, kind, roles) of the stack whose codes or data ``tensor`` is, or None."""
    if suffix.endswith("_blocks") and (scales := group.get(f"{suffix.removesuffix('_blocks')}_scales")) is not None:
        stem = suffix.removesuffix("_blocks")
        return stem, "mxfp4", {"codes": tensor, "scales": scales} | _roles(stem, group, ("bias",))
    stem = suffix.removesuffix("_weight")
    if tensor.dtype in ("U8", "I8", "F4") and f"{stem}_weight_scale" in group:
        return stem, "nvfp4", {"codes": tensor} | _roles(stem, group, COMPANIONS.values())
    if not parent.rpartition(".")[2].endswith("experts") or len(tensor.shape) != 3:
        return None
    if tensor.dtype == "F8_E4M3" and f"{stem}_weight_scale" in group:
        roles = _roles(stem, group, ("scales", "input_scale", "bias"))
        return stem, "fp8", {"data": tensor, "scale": roles.pop("scales")} | roles
    if tensor.dtype in FLOATS and not suffix.endswith(tuple(COMPANIONS)):
        return stem, "dense", {"data": tensor} | _roles(stem, group, ("bias",))
    return None


def _roles(stem: str, group: Mapping[str, Stored], wanted: Iterable[str]) -> dict[str, Stored]:
    names = {role: f"{stem}{ending}" for ending, role in COMPANIONS.items() if role in wanted}
    return {role: group[name] for role, name in names.items() if name in group}


def as_stack(headers: Headers, module: Module) -> Module:
    """The module with its stack, if it can be told how it lies; a bias of another shape is not one."""
    module = replace(module, stack=stack_form(headers, module))
    bias = module.roles.get("bias")
    if module.stack is None or bias is None or bias.shape == module.shape[:-1]:
        return module
    roles = {role: tensor for role, tensor in module.roles.items() if role != "bias"}
    return replace(module, roles=roles, unknown=(*module.unknown, bias))


def stack_form(headers: Headers, module: Module) -> Stack | None:
    """How the stack ``module`` lies, or None where that cannot be told: then it is a tensor like any other."""
    stated = _stated(headers).get(module.name, {})
    columns = _columns(headers, module, stated)
    if columns is None:
        return None
    stem = module.name.rpartition(".")[2]
    types = model_types(headers)
    gate_up = None
    if stem in GATE_UP:
        gate_up = headers.reading.gate_up or stated.get("gate_up")
        if gate_up not in GATE_UP_ORDERS and types:
            gate_up = "interleaved" if types & INTERLEAVED else "concatenated"
    return Stack(columns, gate_up if gate_up in GATE_UP_ORDERS else None)


def _columns(headers: Headers, module: Module, stated: Mapping[str, Any]) -> bool | None:
    main, scales = module.roles.get("codes"), module.roles.get("scales")
    if module.kind == "mxfp4":
        return False
    if main is not None:
        if scales is None or len(main.shape) != 3 or len(scales.shape) != 3:
            return False  # structure says what is wrong
        (_, a, b), (_, c, d) = main.shape, scales.shape
        return b == d and a != c  # only one of the two axes shrinks, by 8: that one is K
    if isinstance(stated.get("columns"), bool):
        return bool(stated["columns"])
    _, a, b = module.roles["data"].shape
    hidden = _hidden_size(headers)
    if a != b and hidden in (a, b):
        narrow = module.name.rpartition(".")[2] in ("down_proj", "w2")  # these give hidden features, the others take
        return (a == hidden) != narrow
    types = model_types(headers)
    return bool(types & COLUMNS) if types else None


def _stated(headers: Headers) -> dict[str, dict[str, Any]]:
    return _table(headers.metadata.get(METADATA, "{}"))


@lru_cache(maxsize=1)
def _table(text: str) -> dict[str, dict[str, Any]]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {k: v for k, v in table.items() if isinstance(v, dict)} if isinstance(table, dict) else {}


def encode_stacks(stacks: Mapping[str, Stack]) -> dict[str, str]:
    """The metadata entry that states how stacks lie; {} if there are none."""
    table = {
        name: ({"gate_up": stack.gate_up} if stack.gate_up else {}) | {"columns": stack.columns}
        for name, stack in sorted(stacks.items())
    }
    return {METADATA: json.dumps(table, separators=(",", ":"), ensure_ascii=False)} if table else {}


def merged_metadata(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The metadata of several files as one, in which each states how its own stacks and buffers lie."""
    parts = list(parts)
    merged = {k: v for part in parts for k, v in part.items()}
    for key in (METADATA, LAYOUT_METADATA):
        texts = [part[key] for part in parts if key in part]
        if len(texts) > 1:
            tables = {k: v for text in texts for k, v in _table(text).items()}
            merged[key] = json.dumps(tables, separators=(",", ":"), ensure_ascii=False)
    return merged


def _configs(headers: Headers) -> list[Mapping[str, Any]]:
    """config.json and the configs of the models in it."""
    return [headers.config, *(v for v in headers.config.values() if isinstance(v, dict))]


def model_types(headers: Headers) -> set[str]:
    """What the config calls the model and the models in it."""
    return {t for c in _configs(headers) if isinstance(t := c.get("model_type"), str)}


def _hidden_size(headers: Headers) -> int | None:
    sizes = [c.get("hidden_size") for c in _configs(headers)]
    return next((size for size in sizes if type(size) is int), None)


@dataclass(frozen=True)
class Take:
    """Rows ``first``, ``first + stride``, ... of the matrix that a region holds.

    Attributes:
        shape: of the region, (rows, columns) in bytes; where ``columns``, (columns, rows), ``item`` bytes each.
        first, stride, count: which rows.
        columns: whether the matrix lies transposed.
        item: bytes of an element.
    """

    shape: tuple[int, int]
    first: int
    stride: int
    count: int
    columns: bool
    item: int

    def __call__(self, raw: Any) -> Any:
        """The rows, (count, bytes) or (count, columns, item) u8, of a region, (bytes,) u8."""
        if self.columns:
            matrix = raw.reshape(self.shape[0], self.shape[1] // self.item, self.item)
            return matrix[:, self._rows].swapaxes(0, 1)
        return raw.reshape(self.shape)[self._rows]

    @property
    def _rows(self) -> slice:
        return slice(self.first, self.first + self.count * self.stride, self.stride)


def expand(module: Module) -> list[Module]:
    """The layers of a stack's experts, as if each were stored by itself; another module, or one that is not sound,
    gives itself.

    Where the order of gate and up is not known, or its rows are not halves, ``gate_up_proj`` stays one layer of each
    expert. Companions whose meaning is not known stay with the first expert. An empty stack gives itself.
    """
    if module.stack is None or 0 in module.shape or any(f.severity == "error" for f in structure(module)):
        return [module]
    parent, _, stem = module.name.rpartition(".")
    halves = stem in GATE_UP and module.stack.gate_up and module.shape[-2] % 2 == 0
    parts = GATE_UP[stem] if halves else (stem,)
    found: list[Module] = []
    for expert in range(module.shape[0]):
        for half, part in enumerate(parts):
            roles = {
                role: _part(module, module.stack, role, tensor, expert, half, len(parts))
                for role, tensor in module.roles.items()
            }
            unknown = module.unknown if not found else ()
            name = f"{parent}.{expert}.{part}" if parent else f"{expert}.{part}"
            found.append(Module(name, module.kind, roles, unknown))
    return found


def refuse_unordered(module: Module, roles: Sequence[str] = _SCALARS) -> None:
    """Refuse a stack that cannot be taken apart: gate and up have scales of their own, and their order is not known.

    Raises:
        FormatError: naming the scale.
    """
    stem = module.name.rpartition(".")[2]
    if module.stack is None or stem not in GATE_UP or (module.stack.gate_up and module.shape[-2] % 2 == 0):
        return
    for role in roles:
        scale = module.roles.get(role)
        if scale is not None and prod(scale.shape) == 2 * module.shape[0]:
            raise FormatError(
                "gate and up have a scale each, and their order is not known",
                file=scale.file,
                tensor=scale.name,
                got=list(scale.shape),
                hint=f"pass --gate-up {', '.join(GATE_UP_ORDERS[:2])} or {GATE_UP_ORDERS[2]}",
            )


def ordered(module: Module, gate_up: str | None) -> Module:
    """A stack, taken to have that order of gate and up."""
    return module if module.stack is None else replace(module, stack=replace(module.stack, gate_up=gate_up))


def _part(module: Module, stack: Stack, role: str, tensor: Stored, expert: int, half: int, halves: int) -> Stored:
    """What of ``tensor`` belongs to one half of one expert."""
    experts, n, _ = module.shape
    whole = tensor if isinstance(tensor, View) else View(**_fields(tensor), region=tensor.nbytes)
    if role in _SCALARS:
        if prod(tensor.shape) == 1:
            return replace(whole, shape=())
        width = prod(tensor.shape[1:])
        item, made, each = (
            whole.region // (experts * width),
            tensor.nbytes // (experts * width),
            1 if width == halves else width,
        )
        start = tensor.start + (expert * width + (half if width == halves else 0)) * item
        scalar: tuple[int, ...] = () if each == 1 else (each,)
        return replace(
            whole, shape=scalar, start=start, nbytes=each * made, region=each * item, expert=expert, first=half
        )
    if role == "pre_scale" and tensor.shape[0] != experts:
        return tensor
    size, region = tensor.nbytes // experts, whole.region // experts
    one = replace(whole, start=tensor.start + expert * region, nbytes=size, region=region, expert=expert)
    if role == "pre_scale":
        return replace(one, shape=tensor.shape[-1:])
    count = n // halves
    first, stride = _rows_of(stack, half, count, halves)
    columns = stack.columns and role in _MATRICES
    width, item = size // max(n, 1), 1 if role != "data" else DTYPE_BITS[tensor.dtype] // 8
    shape: tuple[int, ...]
    if role not in _MATRICES:
        shape = (count,)
    elif columns:
        shape = (count, tensor.shape[1])
    elif tensor.dtype == "F4":
        shape = (count, tensor.shape[-1])
    else:
        shape = (count, width // item)
    part = replace(one, shape=shape, nbytes=count * width, first=first, stride=stride)
    if stride == 1 and not columns and one.in_place:
        return replace(part, start=one.start + first * width, region=count * width)
    take = Take((tensor.shape[1], n * item) if columns else (n, width), first, stride, count, columns, item)
    return replace(part, steps=(*one.steps, take))


def _fields(tensor: Stored) -> dict[str, Any]:
    return {f.name: getattr(tensor, f.name) for f in fields(tensor)}


def _rows_of(stack: Stack, half: int, count: int, halves: int) -> tuple[int, int]:
    """(first row, stride) of one half."""
    if halves == 1:
        return 0, 1
    if stack.gate_up == "interleaved":
        return half, 2
    return (half if stack.gate_up == "concatenated" else 1 - half) * count, 1


def stacked_arrays(
    module: Module, arrays: Mapping[str, Any], scalars: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of an NVFP4 stack as a Weight takes them: N before K, and a scale2 of gate and up for each row.

    Raises:
        FormatError: gate and up have scales of their own, and their order is not known or one Weight cannot hold both.
    """
    experts, n, _ = module.shape
    stack = module.stack or Stack()
    get, out = dict(arrays), dict(scalars)
    if stack.columns:
        get |= {role: np.ascontiguousarray(np.swapaxes(get[role], -1, -2)) for role in ("codes", "scales")}
    for role, value in scalars.items():
        if value.size == 1:
            out[role] = value.reshape(())
        elif value.size == experts:
            out[role] = value.reshape((experts, 1, 1) if role == "scale2" else (experts,))
        elif role == "input_scale" and np.array_equal(value[:, 0], value[:, 1]):
            out[role] = value[:, 0]
        elif role == "scale2" and stack.gate_up is not None:
            half = np.empty(n, np.int64)
            for i in range(2):
                first, stride = _rows_of(stack, i, n // 2, 2)
                half[first : first + (n // 2 - 1) * stride + 1 : stride] = i
            out[role] = value[:, half][..., None]
        else:
            raise FormatError(
                f"gate and up have an {role} each" if role == "input_scale" else "gate and up have a scale2 each",
                tensor=module.roles[role].name,
                got=list(value.shape),
                hint="the experts are read one by one: load them by their own names, such as ...experts.0.up_proj",
            )
    if (pre := get.get("pre_scale")) is not None and pre.ndim > 1:
        if (pre != pre[:1]).any():
            raise FormatError("the experts have different pre_scales", tensor=module.roles["pre_scale"].name)
        get["pre_scale"] = pre.reshape(experts, -1)[0]
    return get, out
