"""Where the files of a checkpoint contradict each other. The tensors are the truth, the config a hint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from halfbyte.checkpoint.expert_checks import expert_findings
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.dialects import DIALECTS, Facts
from halfbyte.errors import UsageError
from halfbyte.experts import numbered
from halfbyte.findings import Finding, capped
from halfbyte.modules import (
    QUANTIZED,
    SHARD_METADATA,
    Module,
    dicts_of,
    kv_format,
    nested_section,
    quant_section,
    structure,
)
from halfbyte.patterns import fused_group, module_class

READABLE = "ModelOpt or compressed-tensors"

_LAYER = re.compile(r"(.*?\b(?:layers|blocks|h))\.(\d+)\.(.+)")
"""Name of a module of a numbered layer: (all layers, number, part)."""

_SCALE_NAMES = (
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "pre_quant_scale",
    "weight_scale_inv",
)


def header_findings(checkpoint: Checkpoint, every: bool = False) -> list[Finding]:
    """All that headers and configs show without reading a weight; 100 of each code, unless ``every``."""
    found = list(checkpoint.findings)
    if not checkpoint.dialect.readable:
        return [*found, Finding("HB134", got=f"{checkpoint.dialect.title}: {checkpoint.evidence}", expected=READABLE)]
    for module in checkpoint.modules:
        found += structure(module)
        if module.kind == "none":
            stem, _, suffix = module.name.rpartition(".")
            if suffix in _SCALE_NAMES and not _of_another_kind(checkpoint, stem):
                hint = "a quantized weight of that name is missing, or it is dense"
                found.append(Finding("HB121", module.name, hint=hint))
    found += _layer_findings(checkpoint)
    part = checkpoint.path.is_file() and any(checkpoint.path.parent.glob("*.safetensors.index.json"))
    part = part or SHARD_METADATA in checkpoint.headers.metadata  # the other experts are on other ranks
    found += expert_findings(checkpoint.modules, checkpoint.config, whole=not part)
    try:
        found += _config_findings(checkpoint)
    except UsageError as error:  # a pattern
        found.append(Finding("HB209", got=f"{error.got}", hint=error.hint))
    return capped(found, every)


def _layer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What the layers' likeness shows: parts that are quantized apart, and modules that one layer has lost."""
    groups: dict[str, dict[str, Module]] = defaultdict(dict)
    layers: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # part -> stem -> layers with it
    for module in checkpoint.modules:
        if module.main is None:
            continue
        if (group := fused_group(module.name)) is not None:
            groups[group[0]][module.name] = module
        if (match := _LAYER.fullmatch(module.name)) is not None:
            stem, number, part = match.groups()
            layers[part][stem].add(number)
    numbers: dict[str, set[str]] = defaultdict(set)  # stem -> its layers
    around: dict[tuple[str, str], set[str]] = defaultdict(set)  # (stem, parent of a part) -> layers with that parent
    for part, stems in layers.items():
        for stem, having in stems.items():
            numbers[stem] |= having
            around[stem, part.rpartition(".")[0]] |= having
    for parts in groups.values():
        kinds = {module.kind for module in parts.values()}
        if len(kinds) > 1:
            listed = ", ".join(f"{name.rpartition('.')[2]} {module.kind}" for name, module in sorted(parts.items()))
            yield Finding("HB126", min(parts), got=listed, expected="one kind")
    for part, stems in layers.items():
        for stem, having in stems.items():
            missing = numbers[stem] - having
            if len(missing) <= max(1, len(numbers[stem]) // 20) < len(having) and "." in part and not numbered(part):
                for number in sorted(missing & around[stem, part.rpartition(".")[0]], key=lambda n: (len(n), n)):
                    yield Finding("HB127", f"{stem}.{number}.{part}", got=f"{len(having)} other layers have it")
    wanted = checkpoint.config.get("num_hidden_layers")
    found = max((len(n) for stem, n in numbers.items() if stem.endswith("layers")), default=0)
    if isinstance(wanted, int) and 0 < found < wanted:
        yield Finding("HB211", got=found, expected=wanted)
    if checkpoint.path.is_dir() and len(checkpoint.shards) > 1 and checkpoint.index is None:
        yield Finding("HB135", got=f"{len(checkpoint.shards)} files")


def _of_another_kind(checkpoint: Checkpoint, stem: str) -> bool:
    """Whether a weight of integers lies beside: INT8 and the like, of which halfbyte makes no statement."""
    beside = (checkpoint.tensors.get(f"{stem}.{suffix}") for suffix in ("weight", "weight_packed", "qweight"))
    return any(t is not None and t.dtype[0] in "IU" for t in beside)


def quantized(checkpoint: Checkpoint) -> list[Module]:
    """The modules whose weight is quantized."""
    return [m for m in checkpoint.modules if m.kind in QUANTIZED]


def linear_modules(modules: Iterable[Module]) -> Iterator[tuple[str, str, Module]]:
    """(name, class, module) of the dense matrices that a config may name; a stack is known by what holds it."""
    for module in modules:
        if module.kind == "dense" and module.stack is not None:
            yield module.name.rpartition(".")[0], "Linear", module
        elif module.kind == "dense" and module.name and (cls := module_class(module.name, len(module.shape))):
            yield module.name, cls, module


def config_facts(checkpoint: Checkpoint, modules: Mapping[str, Module], others: Iterable[Module]) -> Facts:
    """What a config has to say of a checkpoint in which ``modules`` are quantized, and ``others`` are as they are."""
    return facts_of(checkpoint.config, kv_format(checkpoint.headers), modules, others)


def facts_of(
    config: Mapping[str, Any], kv: str | None, modules: Mapping[str, Module], others: Iterable[Module]
) -> Facts:
    """The same of a model with this config.json and format of the KV cache."""
    dense = {name: cls for name, cls, _ in linear_modules(others) if name not in modules}
    if config.get("tie_word_embeddings") is True and "lm_head" not in modules:
        dense["lm_head"] = "Linear"  # not on disk, but engines build it and ask how
    return Facts(modules, dense, kv)


def _config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    modules, headers = quantized(checkpoint), checkpoint.headers
    section = quant_section(headers)
    if modules and not section and not checkpoint.quant and checkpoint.config:
        yield Finding("HB201", got="no quantization_config", hint="engines will read the weights as dense")
    if modules and section:
        method = section.get("quant_method")
        if not checkpoint.dialect.claims_config(replace(headers, quant={})):
            expected = checkpoint.dialect.name
            yield Finding("HB206", got=f"quant_method {method!r}", expected=expected, hint=checkpoint.evidence)
    yield from _two_files(checkpoint)
    if any(m.kind == "nvfp4" for m in modules):
        fits = {16, 32} if any(m.kind == "mxfp4" for m in modules) else {16}
        for size in sorted((_group_sizes(section) | _group_sizes(nested_section(headers))) - fits):
            yield Finding("HB210", got=size, expected=16)
    dialect = next((d for d in DIALECTS if d.readable and d.claims_config(headers)), checkpoint.dialect)
    layer_of = dialect.layers(headers)
    if layer_of is None:
        return
    wants_input: dict[bool, list[Module]] = defaultdict(list)
    unread = [m for m in checkpoint.modules if m.kind == "unread"]
    for module in [*modules, *unread]:
        layer = layer_of(module.name, module_class(module.name, len(module.shape)) or "Linear")
        tensor = module.main.name if module.main else module.name
        if layer is None:
            yield Finding("HB202", tensor, got=module.kind, expected="unquantized", hint="the tensors decide")
        elif module.kind == "unread" and layer.kind not in QUANTIZED:
            pass  # the config may name its kind, and halfbyte does not know it
        elif layer.kind != module.kind:
            yield Finding("HB204", tensor, got=module.kind, expected=layer.kind, hint="the tensors decide")
        elif layer.static_input:
            wants_input["input_scale" in module.roles].append(module)
        elif layer.static_input is False and "input_scale" in module.roles:
            hint = "activations are not quantized: the scale is carried and not used"
            yield Finding("HB208", module.roles["input_scale"].name, hint=hint)
    if wants_input[True]:
        for module in wants_input[False]:
            tensor = module.main.name if module.main else module.name
            yield Finding(
                "HB111",
                tensor,
                expected=_input_scale_name(checkpoint, module),
                hint="calibrate again, or serve as W4A16",
            )
    elif wants_input[False]:
        yield Finding("HB112", got=f"{len(wants_input[False])} modules", hint="this is a W4A16 checkpoint")
    for _, cls, module in linear_modules(checkpoint.modules) if modules else ():
        layer = layer_of(module.name, cls)
        if layer is not None:
            hint = "add it to the list of ignored modules: engines look for its scales"
            yield Finding("HB203", module.roles["data"].name, got="dense", expected=layer.kind, hint=hint)
    yield from _kv_findings(checkpoint)


def _input_scale_name(checkpoint: Checkpoint, module: Module) -> str:
    main = module.main
    if module.stack is not None and main is not None and not main.name.startswith(f"{module.name}."):
        return f"{module.name}_input_scale"
    return module.member(checkpoint.dialect.suffixes["nvfp4"]["input_scale"])


def _group_sizes(section: Mapping[str, Any]) -> set[int]:
    """The group sizes that a config states for weights of four bits."""
    sizes = [section.get("group_size")] if "NVFP4" in str(section.get("quant_algo")) else []
    for group in dicts_of(section.get("config_groups")).values():
        weights = dicts_of(group).get("weights", {})
        if weights.get("num_bits") == 4 and weights.get("type") == "float":
            sizes.append(weights.get("group_size"))
    return {size for size in sizes if type(size) is int}


def _two_files(checkpoint: Checkpoint) -> Iterator[Finding]:
    section, nested = quant_section(checkpoint.headers), nested_section(checkpoint.headers)
    if not section or not nested:
        return
    headers = checkpoint.headers
    kv = [kv_format(replace(headers, quant={})), kv_format(replace(headers, config={}))]
    if kv[0] != kv[1]:
        here, there = f"config.json: KV cache {kv[0]}", f"hf_quant_config.json: KV cache {kv[1]}"
        yield Finding("HB205", got=here, expected=there)
    pairs = [("quant_algo", "quant_algo"), ("quantized_layers", "quantized_layers"), ("ignore", "exclude_modules")]
    for here, there in pairs:
        a, b = section.get(here), nested.get(there)
        if isinstance(a, list) and isinstance(b, list):
            a, b = sorted(map(str, a)), sorted(map(str, b))
        if a is not None and b is not None and a != b:
            got, expected = (_brief(here, a, b), _brief(there, b, a))
            yield Finding("HB205", got=f"config.json: {got}", expected=f"hf_quant_config.json: {expected}")


def _brief(key: str, value: Any, other: Any) -> str:
    """What of ``value`` is not in ``other``, short enough for one line."""
    if isinstance(value, list | dict) and isinstance(other, list | dict):
        value = [v for v in value if v not in list(other)]
    text = f"{key} = {value}"
    return text if len(text) <= 120 else text[:117] + "..."


def _kv_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    has = next((n for n in checkpoint.tensors if n.endswith((".k_scale", ".v_scale"))), None)
    kv = kv_format(checkpoint.headers)
    if kv and not has:
        yield Finding("HB207", got=f"{kv} and no k_scale or v_scale", hint="engines use 1.0 for the scales")
    if has and not kv:
        yield Finding("HB207", has, got="KV scales", expected="a KV cache format in the config")


def fused_parts(modules: list[Module]) -> dict[str, list[Module]]:
    """Fused name -> the NVFP4 modules that engines join under it, where there are at least two."""
    groups: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        group = fused_group(module.name)
        if group and module.kind == "nvfp4":
            groups[group[0]].append(module)
    return {name: parts for name, parts in groups.items() if len(parts) > 1}
