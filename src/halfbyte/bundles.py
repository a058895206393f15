"""Single experts as stacks: which layers make one, and its bytes; ``halfbyte.experts`` is the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Any, Final

import numpy as np

from halfbyte.errors import FormatError
from halfbyte.experts import GATE_UP, numbered
from halfbyte.modules import Module, Stack
from halfbyte.stored import View


@dataclass(frozen=True)
class Bundle:
    """Layers of experts that are to be one stack.

    Attributes:
        name: of the stack, such as ``model.layers.0.mlp.experts.gate_up_proj``.
        stack: how it is to lie.
        experts: the layers of each expert; two of them are gate and up.
    """

    name: str
    stack: Stack
    experts: tuple[tuple[Module, ...], ...]

    @property
    def module(self) -> Module:
        """The first layer of the first expert, which all others are like."""
        return self.experts[0][0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K) of the stack."""
        n, k = self.module.shape
        return len(self.experts), n * len(self.experts[0]), k


_STEM_OF: Final = {pair: stem for stem, pair in GATE_UP.items()}


def bundled(
    modules: Iterable[Module], form: Callable[[Module], Stack | None]
) -> tuple[list[Module | Bundle], dict[str, str]]:
    """Layers of experts as bundles, and the other modules, in the order of their first tensors.

    Experts stay single where no stack is written of their kind; the second result gives them with the reason.

    Args:
        modules: layers of two axes, and others.
        form: how the stack of a layer is to lie; None leaves it single.

    Raises:
        FormatError: the experts of a layer are not numbered 0 to E - 1, or not alike.
    """
    families: dict[tuple[str, str], dict[int, Module]] = {}
    order: list[Module | tuple[str, str]] = []
    forms: dict[tuple[str, str], Stack] = {}
    for module in modules:
        stack = form(module)
        found = numbered(module.name) or _taken_apart(module)
        if found is None or len(module.shape) != 2 or stack is None:
            order.append(module)
            continue
        parent, number, part = found
        if (parent, part) not in families:
            order.append((parent, part))
            forms[parent, part] = stack
        family = families.setdefault((parent, part), {})
        if number in family:
            twice = [m.main.name if m.main else m.name for m in (family[number], module)]
            raise FormatError("an expert is stored twice", tensor=module.name, got=" and ".join(twice))
        family[number] = module
    result: list[Module | Bundle] = []
    left: dict[str, str] = {}
    for entry in order:
        if isinstance(entry, Module):
            result.append(entry)
            continue
        if entry not in families:
            continue  # gone into the stack of its pair
        parent, part = entry
        pair = next((pair for pair in _STEM_OF if part in pair and all((parent, p) in families for p in pair)), None)
        names = pair or (part,)
        members = [families.pop((parent, name)) for name in names]
        reason = _alone(members)
        if reason is not None:
            left[f"{parent}.*.{'|'.join(names)}"] = reason
            result += [m for family in members for _, m in sorted(family.items())]
            continue
        stem = _STEM_OF[pair] if pair else part
        name = f"{parent}.{stem}" if parent else stem
        _check_alike(name, members)
        experts = tuple(tuple(family[e] for family in members) for e in range(len(members[0])))
        stack = forms[parent, part]
        result.append(Bundle(name, stack if pair else replace(stack, gate_up=None), experts))
    return result, left


def _taken_apart(module: Module) -> tuple[str, int, str] | None:
    """As ``numbered``, of a layer of a stack, whatever the stack's name."""
    if not isinstance(module.main, View) or module.main.expert is None:
        return None
    above, _, part = module.name.rpartition(".")
    parent, _, number = above.rpartition(".")
    return parent, int(number), part


def _alone(families: list[dict[int, Module]]) -> str | None:
    """Why experts of this kind are not stacked, or None."""
    kinds = {module.kind for family in families for module in family.values()}
    if all(0 in module.shape for family in families for module in family.values()):
        return "no rows or columns"
    if kinds == {"fp8"}:
        per_tensor = all(prod(m.roles["scale"].shape) == 1 for f in families for m in f.values() if "scale" in m.roles)
        return None if per_tensor else "FP8 with a scale for each row or block"
    odd = kinds - {"nvfp4", "dense"}
    return f"kind {min(odd)}" if odd and len(kinds) == 1 else None


def _check_alike(name: str, families: list[dict[int, Module]]) -> None:
    first = families[0][min(families[0])]
    for family in families:
        if sorted(family) != list(range(len(families[0]))):
            missing = next(e for e in count() if e not in family)
            hole = missing <= max(map(max, families))
            raise FormatError(
                "the experts of a stack must be numbered from 0 without a hole",
                tensor=name,
                got=f"{len(family)} experts" + (f", without {missing}" if hole else ""),
                expected=f"{len(families[0])}",
                hint="pass --experts split, or add the missing experts",
            )
        for module in family.values():
            mine, theirs = ((m.kind, m.shape, sorted(m.roles), m.main.dtype if m.main else "") for m in (module, first))
            if mine != theirs:
                raise FormatError(
                    "the experts of a stack must be alike",
                    file=module.main.file if module.main else None,
                    tensor=module.name,
                    got=f"{mine[0]} {list(mine[1])} with {', '.join(mine[2])}",
                    expected=f"{theirs[0]} {list(theirs[1])} with {', '.join(theirs[2])}",
                    hint="pass --experts split",
                )


@dataclass(frozen=True)
class Gather:
    """The bytes of one expert of a stack from its layers' matrices; see gather."""

    stack: Stack
    columns: bool
    item: int

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """(bytes,) u8 of matrices (rows, ...) of any dtype."""
        return gather(self.stack, self.columns, self.item, [_rows_of_bytes(a) for a in arrays])


def _rows_of_bytes(a: Any) -> Any:
    return np.ascontiguousarray(a).reshape(a.shape[0], -1).view(np.uint8)


def gather(stack: Stack, columns: bool, item: int, parts: list[Any]) -> Any:
    """The bytes of a stack's expert from its layers' matrices, (rows, bytes) u8 each; the inverse of experts.Take."""
    if len(parts) == 2 and stack.gate_up == "interleaved":
        rows: Any = np.stack(parts, 1).reshape(-1, parts[0].shape[-1])
    else:
        rows = np.concatenate(parts if stack.gate_up != "up_first" else parts[::-1])
    if columns:
        rows = rows.reshape(len(rows), -1, item).swapaxes(0, 1)
    return np.ascontiguousarray(rows).reshape(-1)
