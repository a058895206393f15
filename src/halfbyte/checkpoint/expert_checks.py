"""What the headers show of mixtures of experts: experts that are missing or stored twice, routers, odd stacks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, Final

from halfbyte.experts import GATE_UP, METADATA, SPELLED, expert_number, numbered, spelled
from halfbyte.findings import Finding
from halfbyte.modules import QUANTIZED, Module
from halfbyte.patterns import is_router

_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a config that state how many experts a layer has."""


def expert_findings(modules: Iterable[Module], config: Mapping[str, Any], whole: bool) -> Iterator[Finding]:
    """The findings about routers, stacks and numbered experts.

    Args:
        modules: all modules.
        config: config.json.
        whole: whether these are all modules of the model, so that one may be missing.
    """
    layers: dict[str, _Layer] = {}
    around: dict[str, _Layer] = {}  # what stands before an expert's number -> its layer
    for module in modules:
        if module.main is None or module.kind == "none":
            continue
        if "experts" not in module.name:
            if module.kind in (*QUANTIZED, "unread") and is_router(module.name):
                yield Finding("HB137", module.main.name, got=module.kind, expected="dense")
            continue
        if module.stack is not None:
            parent, _, last = spelled(module.name).rpartition(".")
            yield from _stack_findings(module, last)
            if parent not in layers:
                layers[parent] = _Layer(module.name.rpartition(".")[0])
            layers[parent].add_stack(module, last)
            continue
        above, _, last = module.name.rpartition(".")
        above, _, text = above.rpartition(".")
        number = expert_number(text)
        if number is None:
            continue
        if above not in around:
            found = numbered(spelled(module.name))
            if found is None:
                continue
            around[above] = layers.setdefault(found[0], _Layer(above))
        around[above].add(module, number, last)
    for layer in layers.values():
        yield from layer.twice()
    if whole:
        yield from _missing(layers.values(), config)


def _stack_findings(module: Module, stem: str) -> Iterator[Finding]:
    scale2, experts = module.roles.get("scale2"), prod(module.shape[:-2])
    if scale2 is not None and prod(scale2.shape) == 1 and experts > 1:
        hint = "experts of small weights lose precision: see the subnormal scales, HB117"
        yield Finding("HB128", scale2.name, got=f"one number for {experts} experts", hint=hint)
    if module.main is not None and stem in GATE_UP and module.stack is not None and module.stack.gate_up is None:
        hint = f'state it in the metadata, {METADATA}: {{"{module.name}": {{"gate_up": "concatenated"}}}}, or by the'
        yield Finding("HB138", module.main.name, hint=f"{hint} config's model_type")


class _Layer:
    """The experts of one layer, under the spelling of most models."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._having: dict[str, set[int]] = {}  # part as it is named -> experts that have it
        self._forms: dict[str, dict[str, str]] = defaultdict(dict)  # part -> form -> a tensor of it
        self._stacked = 0

    def add(self, module: Module, number: int, part: str) -> None:
        """Take in a layer of one expert."""
        having = self._having.get(part)
        if having is None:
            having = self._having[part] = set()
            for half in _halves(part):
                self._tell(half, f"N.{part}", module)
        having.add(number)

    def add_stack(self, module: Module, stem: str) -> None:
        """Take in a stack."""
        self._stacked = max(self._stacked, module.shape[0])
        for half in _halves(stem):
            self._tell(half, module.main.name.removeprefix(f"{self.name}.") if module.main else stem, module)

    def _tell(self, half: str, form: str, module: Module) -> None:
        self._forms[half].setdefault(form, module.main.name if module.main else module.name)

    @property
    def count(self) -> int:
        """How many experts there are, missing ones among them included."""
        return max([self._stacked, *(max(numbers) + 1 for numbers in self._having.values())])

    def twice(self) -> Iterator[Finding]:
        """A finding for each part that is stored in several forms."""
        told: set[tuple[str, ...]] = set()
        for forms in self._forms.values():
            if len(forms) > 1 and tuple(forms) not in told:
                told.add(tuple(forms))
                yield Finding("HB136", next(iter(forms.values())), got=" and ".join(forms), expected="one of them")

    def lacking(self) -> list[str]:
        """The missing experts, such as "3", and missing parts of others, such as "5.up_proj"."""
        halves: dict[str, set[int]] = defaultdict(set)
        for part, having in self._having.items():
            for half in _halves(part):
                halves[half] |= having
        every = set(range(1 + max((max(having) for having in halves.values()), default=-1)))
        lack = {half: every - having for half, having in halves.items()}
        found = []
        for number in sorted(set().union(*lack.values())):
            parts = [half for half, numbers in lack.items() if number in numbers]
            found += [str(number)] if len(parts) == len(halves) else [f"{number}.{half}" for half in parts]
        return found


def _halves(part: str) -> tuple[str, ...]:
    """The layers of an expert that one of this name holds, as most models spell them."""
    name = SPELLED.get(part, part)
    return GATE_UP.get(name, (name,))


def _missing(layers: Iterable[_Layer], config: Mapping[str, Any]) -> Iterator[Finding]:
    configs = [config, *(v for v in config.values() if isinstance(v, dict))]
    stated = [(key, c[key]) for c in configs for key in _COUNTS if type(c.get(key)) is int]
    key, wanted = max(stated, key=lambda pair: pair[1], default=("", 0))
    most: dict[str, int] = defaultdict(int)
    for layer in layers:
        most[_alike(layer.name)] = max(most[_alike(layer.name)], layer.count)
    for layer in layers:
        if lacking := layer.lacking():
            more = f" and {len(lacking) - 10} more" if len(lacking) > 10 else ""
            got, last = ", ".join(lacking[:10]) + more, layer.count - 1
            yield Finding("HB129", layer.name, got=f"without {got}", expected=f"0 to {last}")
        need, hint = (wanted, f"{key} of the config") if wanted else (most[_alike(layer.name)], "as another layer has")
        if layer.count < need:
            yield Finding("HB212", layer.name, got=layer.count, expected=need, hint=hint)


def _alike(name: str) -> str:
    """The name without its numbers: that of the other layers, too."""
    return re.sub(r"\.\d+\b", ".*", name)
