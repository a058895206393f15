"""Patterns that select modules: the three ways in use, and the names that engines fuse.

==========================  =============================================================
``model.layers.0.mlp``      a module name, or the start of one (ModelOpt, transformers)
``model.layers.*.mlp.*``    fnmatch (ModelOpt)
``re:.*mlp.gate$``          a regular expression that the start of the name matches (compressed-tensors)
``Linear``                  a class (compressed-tensors)
==========================  =============================================================
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import translate
from typing import TypeAlias

from halfbyte.errors import UsageError
from halfbyte.numerics import BLOCK

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Modules that engines run as one, and their parts on disk."""

SIBLINGS: tuple[tuple[str, ...], ...] = (
    *FUSED.values(),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("wi_0", "wi_1"),
)
"""Layers of one parent that get the same input and run here as one product, in the order in which they are joined."""

_PART_OF = {part: fused for fused, parts in FUSED.items() for part in parts}
_CROSS = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)
_EMBEDDINGS = {"wte", "wpe", "shared", "relative_attention_bias"}
_HEADS = {"lm_head", "embed_out", "output_layer", "score", "classifier"}
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_ROUTERS = re.compile(
    r"(^|\.)((mlp|mixer|block_sparse_moe|feed_forward|moe|ffn)\.gate|router|routers|shared_expert_gate|wg)$"
)


def fused_group(name: str) -> tuple[str, str] | None:
    """(fused name, part) if ``name`` is a part of a module that engines fuse."""
    parent, _, last = name.rpartition(".")
    fused = _PART_OF.get(last)
    return (f"{parent}.{fused}", last) if fused else None


def has_two_inputs(parent: str) -> bool:
    """Whether keys and values of the attention ``parent`` come from another input than queries, by its usual names."""
    return _CROSS.search(parent.rpartition(".")[2]) is not None


def module_class(name: str, ndim: int) -> str | None:
    """ "Embedding" or "Linear" for a module with a weight of ``ndim`` axes, None for norms and the like."""
    last = name.rpartition(".")[2]
    if ndim != 2:
        return None
    return "Embedding" if ("embed" in last and last not in _HEADS) or last in _EMBEDDINGS else "Linear"


def is_head(name: str) -> bool:
    """Whether ``name`` is the output head of a language model, by its usual names."""
    return name == "output" or name.rpartition(".")[2] in _HEADS


def is_router(name: str) -> bool:
    """Whether ``name`` is the gate of a mixture of experts, by its usual names."""
    return _ROUTERS.search(name) is not None


def reason_to_skip(name: str, shape: Sequence[int], targets: Patterns, ignore: Patterns) -> str | None:
    """Why a weight is not quantized, in words; None if it is.

    Without targets all are with two axes and K % 16 == 0, but embeddings, output heads and routers.

    Args:
        name: of its module.
        shape: (N, K) if it has two axes.
        targets: patterns of the modules to quantize instead of that default.
        ignore: patterns of modules to leave as they are.
    """
    cls = module_class(name, len(shape))
    if cls is None:
        return "not a matrix"
    pattern, target = ignore.first(name, cls), targets.first(name, cls)
    if pattern:
        return f"ignored by {pattern}"
    if shape[1] % BLOCK:
        return f"K = {shape[1]} is not a multiple of {BLOCK}"
    if targets:
        return None if target else "not a target"
    if cls == "Embedding":
        return "embedding"
    if is_head(name):
        return "output head"
    return "router" if is_router(name) else None


def spellings(name: str, fused: bool = True) -> list[str]:
    """``name``, the fused name that it is a part of, and both without a leading ``model.`` or the like."""
    group = fused_group(name) if fused else None
    names = [name, group[0]] if group else [name]
    if name.startswith("model.") and not name.startswith(_PREFIXES[0]):  # nearly every name
        return names + [n.removeprefix("model.") for n in names]
    for prefix in _PREFIXES:
        names += [n.replace(prefix, other, 1) for n in names if n.startswith(prefix) for other in ("", "model.")]
    return list(dict.fromkeys(names))


_Rule: TypeAlias = tuple[int, re.Pattern[str] | None]
"""A pattern's number and what matches it: None where it is a name, which ends there or goes on with a dot."""

_Table: TypeAlias = defaultdict[int, defaultdict[str, list[_Rule]]]
"""Length -> how a name must begin or end, in so many letters -> the rules for such names."""


class Patterns:
    """Patterns, prepared to be asked about many modules: ten thousand cost as much as one, regular expressions apart.

    Raises:
        UsageError: a regular expression that does not compile, or one string, whose letters would be patterns.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        if isinstance(patterns, str):
            raise UsageError("patterns are a list", got=repr(patterns), expected=repr([patterns]))
        self.patterns = list(dict.fromkeys(p.removesuffix(".weight") for p in patterns))
        self._used: set[int] = set()
        self._number = {pattern: i for i, pattern in enumerate(self.patterns)}
        self._rules: list[_Rule] = []
        self._by_head: _Table = defaultdict(lambda: defaultdict(list))
        self._by_tail: _Table = defaultdict(lambda: defaultdict(list))
        for i, pattern in enumerate(self.patterns):
            if pattern.startswith("re:"):
                self._rules.append((i, _compiled(pattern)))
                continue
            self._by_head[len(pattern)][pattern].append((i, None))  # also one with brackets may be a name
            head, *others = re.split(r"[*?[\]]", pattern)
            if not others:
                continue
            rule = i, re.compile(translate(pattern))
            if head:
                self._by_head[len(head)][head].append(rule)
            elif others[-1]:
                self._by_tail[len(others[-1])][others[-1]].append(rule)
            else:
                self._rules.append(rule)
        self._fused = {fused for fused in FUSED if any(fused in pattern for pattern in self.patterns)}

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def first(self, name: str, cls: str | None = None) -> str | None:
        """The first pattern that selects ``name`` of class ``cls`` under one of its spellings, or None.

        The fused spelling counts only for a pattern that spells it out: ``*up_proj`` does not mean
        gate_up_proj's gate.
        """
        fused = _PART_OF.get(name.rpartition(".")[2])
        found = {self._number[cls]} if cls in self._number else set()
        for spelling in spellings(name, fused in self._fused):
            rules = self._rules
            for length, table in self._by_head.items():
                if near := table.get(spelling[:length]):
                    rules = rules + near
            for length, table in self._by_tail.items():
                if near := table.get(spelling[-length:]):
                    rules = rules + near
            for i, rule in rules:
                pattern = self.patterns[i]
                if fused and spelling.endswith(fused) and fused not in pattern:
                    continue
                if rule.match(spelling) if rule else spelling[len(pattern) :][:1] in ("", "."):
                    found.add(i)
        self._used |= found
        return self.patterns[min(found)] if found else None

    def unused(self) -> list[str]:
        """The patterns that have selected nothing so far."""
        return [pattern for i, pattern in enumerate(self.patterns) if i not in self._used]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern[3:])
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError("not a regular expression", got=repr(pattern), hint=str(error)) from None
