"""How the layers of a model are cut for the ranks of tensor parallelism, and its experts dealt to those of another.

Tensor-parallel, each rank computes some outputs of column-parallel layers, whose rows N are cut, and some terms of
row-parallel ones, whose columns K are cut at whole blocks; the ranks' products add up. Expert-parallel, each rank
holds some experts whole. All else is on every rank, also the bias of a row-parallel layer, which is to be added once,
as engines do: they load it everywhere and add it on rank 0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any, Final

from halfbyte.errors import FormatError, UsageError
from halfbyte.modules import QUANTIZED, Module, fp8_granularity, refuse_companions
from halfbyte.numerics import BLOCK, MX_BLOCK
from halfbyte.patterns import Patterns, is_head, module_class
from halfbyte.stored import Stored, part_of

COLUMN: Final = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj"),
    *("w1", "w3", "w13", "fc1", "wi", "wi_0", "wi_1", "dense_h_to_4h"),
}
"""Last names of column-parallel layers."""
ROW: Final = {"o_proj", "out_proj", "down_proj", "w2", "fc2", "wo", "dense_4h_to_h"}
"""Last names of row-parallel layers. By these two, layers are cut only where some of either lie in one module."""

_FUSED: Final = ("gate_up_proj", "w13")
_FP8_BLOCK: Final = 128
_MOST: Final = 128
"""Larger degrees are not listed where a cut is refused."""
_EXPERT = re.compile(r"(.*\bexperts)\.(0|[1-9][0-9]{0,4})\.")


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut: along an axis that is made of parts, each of which gives every rank an equal share."""

    axis: int
    parts: tuple[int, ...]

    def ranges(self, rank: int, degree: int) -> list[tuple[int, int]]:
        """What a rank has of the axis."""
        found, start = [], 0
        for size in self.parts:
            share = size // degree
            found.append((start + rank * share, start + (rank + 1) * share))
            start += size
        return found


@dataclass(frozen=True)
class Plan:
    """What each rank gets.

    Attributes:
        mode: "tensor" or "expert".
        degree: the number of ranks.
        cuts: module name -> role -> how its tensor is cut; other tensors are whole.
        parallel: module name -> "column", "row" or "experts", of those that are cut.
        owners: name of a numbered expert's module -> its rank.
        counts: what holds experts -> how many there are.
        whole: layer -> why it is not cut.
    """

    mode: str
    degree: int
    cuts: Mapping[str, Mapping[str, Cut]]
    parallel: Mapping[str, str]
    owners: Mapping[str, int]
    counts: Mapping[str, int]
    whole: Mapping[str, str]


def tensor_plan(
    modules: Sequence[Module],
    config: Mapping[str, Any],
    degree: int,
    multiple: int,
    vocab: bool,
    patterns: tuple[Patterns, Patterns, Patterns],
) -> Plan:
    """Which layers are cut, and how each of their tensors is.

    Args:
        modules: all modules.
        config: config.json, which may tell the heads.
        degree: the number of ranks.
        multiple: what K of a 4-bit layer is cut at multiples of.
        vocab: whether embeddings and output heads are cut, too.
        patterns: of modules that are to stay whole, be column-parallel and be row-parallel.

    Raises:
        FormatError: a layer that does not divide, or of which it is not known how it is to be cut.
    """
    parallel, whole = _parallel(modules, vocab, patterns)
    cuts = {}
    for module in modules:
        how = parallel.get(module.name)
        if how is not None and module.main is not None:
            _check_heads(config, module, degree)
            cut = _columns(module, degree, _parts(config, module)) if how == "column" else None
            cuts[module.name] = _rows(module, degree, multiple) if cut is None else cut
    return Plan("tensor", degree, cuts, parallel, {}, {}, whole)


def _parallel(
    modules: Iterable[Module], vocab: bool, patterns: tuple[Patterns, Patterns, Patterns]
) -> tuple[dict[str, str], dict[str, str]]:
    """Module name -> "column" or "row"; and the layers that stay whole though their names are of either, with why."""
    keep, column, row = patterns
    found: dict[str, str] = {}
    named: dict[str, dict[str, str]] = defaultdict(dict)
    sinks: dict[str, str] = {}
    whole: dict[str, str] = {}
    for module in modules:
        main = module.main
        if main is None:
            continue
        parent, _, last = module.name.rpartition(".")
        cls = module_class(module.name, len(module.shape))
        if keep.first(module.name, cls):
            whole[module.name] = "asked for"
        elif column.first(module.name, cls):
            found[module.name] = "column"
        elif row.first(module.name, cls):
            found[module.name] = "row"
        elif vocab and (cls == "Embedding" or (cls == "Linear" and is_head(module.name))):
            found[module.name] = "column"
        elif last == "sinks" and len(main.shape) == 1:
            sinks[module.name] = parent
        elif last in COLUMN | ROW:
            named[parent][module.name] = "column" if last in COLUMN else "row"
    for parent, layers in named.items():
        if set(layers.values()) == {"column", "row"}:
            found |= layers
            found |= {name: "column" for name, above in sinks.items() if above == parent}
        else:
            lacking = "row" if "column" in layers.values() else "column"
            whole |= dict.fromkeys(layers, f"no {lacking}-parallel layer beside it")
    return found, whole


def _parts(config: Mapping[str, Any], module: Module) -> tuple[int, ...]:
    """The parts of N that are cut each by itself.

    Raises:
        FormatError: a fused layer whose parts are not known.
    """
    last = module.name.rpartition(".")[2]
    n = module.shape[-2] if len(module.shape) > 1 else module.shape[0]
    if last in _FUSED:
        if module.stack is not None and module.stack.gate_up is None:
            hint = "pass --gate-up concatenated, up_first or interleaved"
            raise FormatError("the order of gate and up is not known", tensor=module.name, hint=hint)
        if module.stack is not None and module.stack.gate_up == "interleaved":
            return (n,)
        return (n // 2, n - n // 2)
    if last == "qkv_proj":
        heads, groups, dim = _heads(config, module.name)
        count = (heads or 0) + 2 * (groups or 0)
        if heads is None or groups is None or count * (dim or n // count) != n:
            raise FormatError(
                "q, k and v lie in one weight, and the config's heads do not tell where each begins",
                tensor=module.name,
                got=f"N = {n}, {heads} heads, {groups} of keys and values, head_dim {dim}",
                hint="pass --keep with its name and that of the layer behind it",
            )
        return tuple(n // count * size for size in (heads, groups, groups))
    return (n,)


def _heads(config: Mapping[str, Any], name: str) -> tuple[int | None, int | None, int | None]:
    """The numbers of attention heads and of heads of keys and values, and a head's size, where a config says so."""
    sees = re.search(r"\bvis(?:ion|ual)", name) is not None
    inner = [v for k, v in config.items() if isinstance(v, dict) and ("vision" in k) == sees]
    places = inner if sees else [*inner, config]

    def number(key: str) -> int | None:
        return next((p[key] for p in places if type(p.get(key)) is int and p[key] > 0), None)

    heads = number("num_attention_heads")
    return heads, number("num_key_value_heads") or heads, number("head_dim")


def _check_heads(config: Mapping[str, Any], module: Module, degree: int) -> None:
    """Refuse to cut through heads, and more ranks than heads of keys and values.

    Raises:
        FormatError: with the degrees that divide.
    """
    last = module.name.rpartition(".")[2]
    heads, groups, _ = _heads(config, module.name)
    counts = [("heads", heads)] if last in ("q_proj", "qkv_proj", "o_proj", "sinks") else []
    counts += [("heads of keys and values", groups)] if last in ("k_proj", "v_proj", "qkv_proj") else []
    for what, count in counts:
        if count is not None and count % degree:
            raise FormatError(
                f"{count} {what} do not split over {degree} ranks",
                tensor=module.name,
                got=f"{degree} ranks",
                expected=_degrees(count),
                hint="a head is on one rank alone; --keep 'PATTERN' leaves layers whole on every rank",
            )


def _columns(module: Module, degree: int, parts: tuple[int, ...]) -> dict[str, Cut]:
    """The cuts of a column-parallel layer, along N."""
    last = module.name.rpartition(".")[2]
    lead = module.shape[:-2] if module.stack is not None else ()
    if module.kind == "none" or (module.kind == "dense" and len(module.shape) == 1):
        _check(module, "N", parts, 1, degree)
        return {"data": Cut(0, parts)}
    _refuse_uncuttable(module)
    block = module.kind == "fp8" and module.stack is None and fp8_granularity(module) == "block"
    alternate = module.stack is not None and last in _FUSED and module.stack.gate_up == "interleaved"
    _check(module, "N", parts, _FP8_BLOCK if block else 2 if alternate else 1, degree)
    swapped = module.stack is not None and module.stack.columns
    matrix = Cut(len(lead) + swapped, parts)
    cuts = {role: matrix for role in ("codes", "scales", "data") if role in module.roles}
    if "bias" in module.roles:
        cuts["bias"] = Cut(len(module.roles["bias"].shape) - 1, parts)
    if "lora_b" in module.roles:
        cuts["lora_b"] = Cut(0, parts)
    if module.kind == "fp8" and module.stack is None and fp8_granularity(module) != "tensor":
        cuts["scale"] = Cut(0, tuple(part // _FP8_BLOCK for part in parts) if block else parts)
    return cuts


def _rows(module: Module, degree: int, multiple: int) -> dict[str, Cut]:
    """The cuts of a row-parallel layer, along K; its bias stays whole."""
    _refuse_uncuttable(module)
    k, lead = module.shape[-1], module.shape[:-2] if module.stack is not None else ()
    granularity = fp8_granularity(module) if module.kind == "fp8" and module.stack is None else ""
    unit = {"nvfp4": multiple, "mxfp4": lcm(multiple, MX_BLOCK)}.get(module.kind, 1)
    _check(module, "K", (k,), _FP8_BLOCK if granularity == "block" else unit, degree)
    swapped = module.stack is not None and module.stack.columns
    cuts = {}
    for role, tensor in module.roles.items():
        axis = len(lead) + 1 - swapped if role in ("codes", "scales", "data") else None
        if role in ("pre_scale", "lora_a"):
            axis = len(tensor.shape) - 1
        elif role == "scale" and granularity == "block":
            axis = len(tensor.shape) // 2
        if axis is not None:
            cuts[role] = Cut(axis, (tensor.shape[axis],))
    return cuts


def part_of_module(module: Module, how: str, ranges: Sequence[tuple[int, int]]) -> Module:
    """Some rows, or some columns, of a layer that is no stack, one range after the other.

    Args:
        module: dense, NVFP4 or FP8.
        how: "column" for rows of N, or "row" for columns of K.
        ranges: of them.

    Raises:
        FormatError: a layer that is not cut, or ranges that cut a block of scales.
    """
    size = module.shape[0] if how == "column" else module.shape[-1]
    cuts = _columns(module, 1, (size,)) if how == "column" else _rows(module, 1, BLOCK)
    roles = dict(module.roles)
    for role, cut in cuts.items():
        tensor = roles[role]
        unit = -(-size // max(tensor.shape[cut.axis], 1))
        if any(a % unit or (b % unit and b != size) for a, b in ranges):
            raise FormatError(
                f"{'N' if how == 'column' else 'K'} = {size} is cut inside a block of {unit}",
                file=tensor.file,
                tensor=tensor.name,
                got=list(ranges),
            )
        roles[role] = part_of(tensor, cut.axis, [(a // unit, -(-b // unit)) for a, b in ranges])
    return replace(module, roles=roles)


def _refuse_uncuttable(module: Module) -> None:
    """Refuse a layer of which it is not known how each of its tensors is to be cut.

    Raises:
        FormatError: naming it.
    """
    hint = "pass --keep with its name to leave it whole on every rank"
    main = module.main
    file = main.file if main else None
    if module.kind not in (*QUANTIZED, "dense") or len(module.shape) != (2 if module.stack is None else 3):
        raise FormatError("a weight of this form is not cut", file=file, tensor=module.name, got=str(main), hint=hint)
    refuse_companions(module, (), "have no known place in a part of it")
    for role in ("k_scale", "v_scale"):
        scale = module.roles.get(role)
        if scale is not None and prod(scale.shape) != 1:
            raise FormatError(
                "a scale of this shape is not cut", file=file, tensor=scale.name, got=str(scale), hint=hint
            )


def _check(module: Module, axis: str, parts: Sequence[int], unit: int, degree: int) -> None:
    """Refuse a size that does not give each rank the same number of whole units.

    Raises:
        FormatError: naming the layer, the axis, the size, its blocks, and the degrees that divide.
    """
    wrong = next((size for size in parts if size % (degree * unit) and degree > 1), None)
    if wrong is None:
        return
    main = module.main
    block = {"nvfp4": BLOCK, "mxfp4": MX_BLOCK}.get(module.kind, _FP8_BLOCK if unit == _FP8_BLOCK else 1)
    rest = f" + {wrong % block}" if wrong % block else ""
    blocks = f" ({wrong // block} blocks of {block}{rest})" if block > 1 and (axis == "K" or unit > 2) else ""
    each = f" in multiples of {unit}" if unit > 1 else ""
    raise FormatError(
        f"{axis} = {wrong}{blocks} does not split over {degree} ranks{each}",
        file=main.file if main else None,
        tensor=module.name,
        got=f"{degree} ranks",
        expected=_degrees(wrong // unit if wrong % unit == 0 else 1),
    )


def _degrees(units: int) -> str:
    return "a degree among " + ", ".join(str(d) for d in range(1, min(units, _MOST) + 1) if units % d == 0)


def expert_plan(modules: Sequence[Module], degree: int) -> Plan:
    """Which rank has which experts: contiguous ranges of equal size.

    Raises:
        FormatError: a number of experts that does not divide, experts that are missing, or a stack that is not known.
        UsageError: no experts.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    single: dict[str, tuple[str, int]] = {}
    cuts: dict[str, dict[str, Cut]] = {}
    counts: dict[str, int] = {}
    for module in modules:
        parent = module.name.rpartition(".")[0]
        found = _EXPERT.match(f"{module.name}.")
        if found is not None:
            single[module.name] = found[1], int(found[2])
            numbers[found[1]].add(int(found[2]))
        elif module.stack is not None:
            refuse_companions(module, (), "have no known place in a part of the stack")
            experts = module.shape[0]
            _check(module, "E", (experts,), 1, degree)
            if counts.setdefault(parent, experts) != experts:
                raise FormatError(
                    "stacks of one layer differ", tensor=module.name, got=experts, expected=counts[parent]
                )
            cuts[module.name] = {
                role: Cut(0, (experts,)) for role, tensor in module.roles.items() if _of_each(role, tensor, experts)
            }
        elif module.main is not None and parent.endswith("experts") and len(module.main.shape) > 2:
            raise FormatError(
                "it cannot be told how the experts of this tensor lie", tensor=module.name, got=str(module.main)
            )
    for parent, having in numbers.items():
        if having != set(range(len(having))):
            missing = next(e for e in range(max(having)) if e not in having)
            raise FormatError("experts are missing", tensor=parent, got=f"none of number {missing}")
        if len(having) % degree:
            message = f"E = {len(having)} does not split over {degree} ranks"
            raise FormatError(message, tensor=parent, got=f"{degree} ranks", expected=_degrees(len(having)))
        counts[parent] = len(having)
    if not counts:
        raise UsageError("there are no experts in this checkpoint", hint="pass --tp instead")
    owners = {name: number // (counts[parent] // degree) for name, (parent, number) in single.items()}
    return Plan("expert", degree, cuts, dict.fromkeys(cuts, "experts"), owners, counts, {})


def _of_each(role: str, tensor: Stored, experts: int) -> bool:
    """Whether a tensor of a stack has something for each expert."""
    alone = prod(tensor.shape) == 1 and experts > 1
    return not alone and tensor.shape[:1] == (experts,) and not (role == "pre_scale" and len(tensor.shape) == 1)
