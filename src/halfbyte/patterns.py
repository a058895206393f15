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
from collections.abc import Iterable
from fnmatch import translate

from halfbyte.errors import UsageError

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Modules that engines run as one, and their parts on disk."""

_PART_OF = {part: fused for fused, parts in FUSED.items() for part in parts}
_EMBEDDINGS = {"wte", "wpe", "shared", "relative_attention_bias"}
_HEADS = {"lm_head", "embed_out", "output_layer", "score", "classifier"}
_ROUTERS = re.compile(
    r"(^|\.)((mlp|block_sparse_moe|feed_forward|moe|ffn)\.gate|router|routers|shared_expert_gate|wg)$"
)


def fused_group(name: str) -> tuple[str, str] | None:
    """(fused name, part) if ``name`` is a part of a module that engines fuse."""
    parent, _, last = name.rpartition(".")
    fused = _PART_OF.get(last)
    return (f"{parent}.{fused}", last) if fused else None


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


def spellings(name: str, fused: bool = True) -> list[str]:
    """``name``, the fused name that it is a part of, and both without a leading ``model.`` or the like."""
    group = fused_group(name) if fused else None
    names = [name, group[0]] if group else [name]
    for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model."):
        names += [n.replace(prefix, other, 1) for n in names if n.startswith(prefix) for other in ("", "model.")]
    return list(dict.fromkeys(names))


class Patterns:
    """Patterns, prepared to be asked about many modules: ten thousand literal names cost as much as one.

    Raises:
        UsageError: a regular expression that does not compile.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = list(dict.fromkeys(p.removesuffix(".weight") for p in patterns))
        self._used: set[int] = set()
        self._literal: dict[str, int] = {}
        self._rules: list[tuple[int, re.Pattern[str]]] = []
        for i, pattern in enumerate(self.patterns):
            if pattern.startswith("re:"):
                self._rules.append((i, _compiled(pattern)))
                continue
            self._literal.setdefault(pattern, i)  # also one with brackets may be a name
            if any(c in pattern for c in "*?["):
                self._rules.append((i, re.compile(translate(pattern))))

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def first(self, name: str, cls: str | None = None) -> str | None:
        """The first pattern that selects ``name`` of class ``cls`` under one of its spellings, or None.

        The fused spelling counts only for a pattern that spells it out: ``*up_proj`` does not mean
        gate_up_proj's gate.
        """
        names = spellings(name)
        group = fused_group(name)
        fused = group[0].rpartition(".")[2] if group else None
        found = [self._literal[key] for n in names for key in _beginnings(n) if key in self._literal]
        if cls in self._literal:
            found.append(self._literal[cls])
        plain = spellings(name, fused=False)
        for i, rule in self._rules:
            if any(rule.match(n) for n in (names if fused and fused in self.patterns[i] else plain)):
                found.append(i)
        self._used.update(found)
        return self.patterns[min(found)] if found else None

    def unused(self) -> list[str]:
        """The patterns that have selected nothing so far."""
        return [pattern for i, pattern in enumerate(self.patterns) if i not in self._used]


def _beginnings(name: str) -> list[str]:
    """``name`` and the modules that it is in."""
    return [name, *(name[:i] for i, c in enumerate(name) if c == ".")]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern[3:])
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError("not a regular expression", got=repr(pattern), hint=str(error)) from None
