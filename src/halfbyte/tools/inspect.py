"""``inspect``: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.checkpoint.consistency import header_findings
from halfbyte.checkpoint.reader import Checkpoint, open_checkpoint, without_collection
from halfbyte.findings import Report, in_order
from halfbyte.modules import Module, Reading, kv_format, nested_section, quant_section, refuse_broken
from halfbyte.numerics import E4M3_VALUES
from halfbyte.patterns import is_router, module_class
from halfbyte.stored import Stored, View
from halfbyte.tools.base import chosen
from halfbyte.underflow import scale_report
from halfbyte.weight import Weight

_BESIDE = ("bias", "k_scale", "v_scale")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_KINDS = ("nvfp4", "fp8", "dense", "other")


@without_collection()
def inspect(
    path: str | os.PathLike[str],
    *,
    reading: Reading | None = None,
    stats: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Report:
    """Read the headers of a checkpoint.

    Args:
        path: a directory, a file, or a hub name.
        reading: how the NVFP4 weights are stored, where that is not what their dialect says.
        stats: also read the block scales and scale2 of every NVFP4 weight.
        include, exclude: patterns of the modules that are listed; by default all.

    Returns:
        A report; its facts are "path", "dialect", "evidence", "reading" (the options of one that is not what the
        dialect says), "files", "config" (what it claims), "total" and "kinds" (modules, parameters, bytes, bits for
        each parameter), "groups" (modules of one name but for their numbers) and, with ``stats``, "stats".

    Raises:
        HalfbyteError: a checkpoint whose headers cannot be read.
    """
    with open_checkpoint(path, reading) as checkpoint:
        readable = checkpoint.dialect.readable
        listed, idle = chosen(checkpoint.modules, include, exclude)
        modules = [m for m in listed if m.main is not None]
        groups = _groups(modules)
        kinds = [kind for kind in _KINDS if any(group["kind"] == kind for group in groups)]
        facts: dict[str, Any] = {
            "path": str(checkpoint.path),
            "dialect": checkpoint.dialect_name,
            "readable": readable,
            "evidence": checkpoint.evidence,
            "reading": checkpoint.read_with,
            "files": [{"name": Path(s.file).name, "bytes": os.stat(s.file).st_size} for s in checkpoint.shards],
            "config": {
                "quant_method": quant_section(checkpoint.headers).get("quant_method"),
                "quant_algo": quant_section(checkpoint.headers).get("quant_algo")
                or nested_section(checkpoint.headers).get("quant_algo"),
                "kv_cache": kv_format(checkpoint.headers),
                "model_type": checkpoint.config.get("model_type"),
            },
            "tensors": len(checkpoint.tensors),
            "total": _sum(groups) if readable else {"bytes": sum(t.nbytes for t in checkpoint.tensors.values())},
            "kinds": {kind: _sum([group for group in groups if group["kind"] == kind]) for kind in kinds},
            "groups": groups,
        }
        if stats:
            checkpoint.require_readable()
            facts["stats"] = [_stats(checkpoint, m) for m in modules if m.kind == "nvfp4"]
        findings = header_findings(checkpoint) + idle
        return Report("inspect", in_order(findings), facts)


def _kind(module: Module) -> str:
    """The kind of a module, where tensors beside no weight count as "other"."""
    return "other" if module.kind == "none" else module.kind


def _sum(groups: list[dict[str, Any]]) -> dict[str, Any]:
    return _sized(*(sum(group[key] for group in groups) for key in ("modules", "parameters", "bytes")))


def _sized(modules: int, parameters: int, nbytes: int) -> dict[str, Any]:
    bits = round(8 * nbytes / parameters, 4) if parameters else None
    return {"modules": modules, "parameters": parameters, "bytes": nbytes, "bits_per_parameter": bits}


def _groups(modules: list[Module]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Module]] = {}
    for module in modules:
        key = (_NUMBER.sub(".*", module.name), _kind(module))
        groups.setdefault(key, []).append(module)
    listed = []
    for (name, kind), members in groups.items():
        main = members[0].main
        counts = Counter(m.shape for m in members)
        shapes = sorted(counts)
        parameters = sum(prod(shape) * count for shape, count in counts.items())
        places = {(t.file, t.start): _on_disk(t) for m in members for role, t in m.roles.items() if role not in _BESIDE}
        nbytes = sum(places.values())  # codes and scales may lie in one buffer
        cls = "Router" if is_router(name) else module_class(name, len(shapes[0])) if kind != "other" else None
        listed.append(
            {"name": name, "kind": kind, "class": cls, "dtype": main.dtype if main else None}
            | {"shapes": [list(shape) for shape in shapes]}
            | {"has": sorted(set().union(*(m.roles for m in members)) - {"codes", "data", "scales"})}
            | _sized(len(members), parameters, nbytes)
        )
    return listed


def _on_disk(tensor: Stored) -> int:
    """Bytes of a tensor in its file, also of one that is read otherwise than it is stored."""
    return tensor.region if isinstance(tensor, View) else tensor.nbytes


def _stats(checkpoint: Checkpoint, module: Module) -> dict[str, Any]:
    """Facts about the scales of one NVFP4 module."""
    refuse_broken(module)
    codes, scales = (checkpoint.read(module.roles[role]).view(np.uint8) for role in ("codes", "scales"))
    if module.stack is not None and module.stack.columns:
        codes, scales = (np.ascontiguousarray(a.swapaxes(-1, -2)) for a in (codes, scales))
    numbers = {
        role: float(checkpoint.dialect.meaning(module, role, checkpoint.read(stored), checkpoint.original).max())
        for role, stored in module.roles.items()
        if role in ("scale2", "input_scale")
    }
    histogram = np.bincount(scales.reshape(-1), minlength=256)
    blocks = max(int(histogram.sum()), 1)
    used = np.flatnonzero(histogram[:127])
    top = int(used[-1]) if used.size else 0
    zero_codes = codes.reshape(*scales.shape, 8).view(np.uint64)[..., 0] & 0x7777777777777777 == 0
    empty = scales[zero_codes]
    return {
        "name": module.name,
        "shape": list(module.shape),
        "scale2": numbers["scale2"],
        "input_scale": numbers.get("input_scale"),
        "zero": float(histogram[0] / blocks),
        "subnormal": float(histogram[1:8].sum() / blocks),
        "largest": float(histogram[126] / blocks),
        "largest_scale": float(E4M3_VALUES[top]),
        "amax": float(E4M3_VALUES[top] * 6 * np.float32(numbers["scale2"])),
        "recipe": _guess(top, empty),
    } | _window(codes, scales, numbers["scale2"], module)


def _window(codes: Any, scales: Any, scale2: float, module: Module) -> dict[str, Any]:
    """The window of scale2 in which no block loses bits, of a weight with one scale2."""
    if module.stack is not None:
        return {"window": None, "in_window": None}
    report = scale_report(Weight(codes=codes, scales=scales, scale2=scale2))
    return {"window": list(report.window), "in_window": report.in_window}


_ZERO_BLOCK = {
    0x38: "ModelOpt",
    0x20: "compressed-tensors",
    0x08: "torchao",
    0x00: "comfy-kitchen or ggml",
}
"""The scale that each quantizer gives an all-zero block."""


def _guess(top: int, empty: Any) -> str:
    """A recipe that would leave these scales; a guess, since several can."""
    if top == 0x7E:
        recipe = "rtn (scale2 = amax / 2688)"
    elif top in (0x78, 0x7C):
        recipe = "four-over-six (scale2 = amax / 1536), or a shared scale2"
    else:
        recipe = "a scale2 that is shared, searched or a constant"
    makers = {_ZERO_BLOCK.get(int(byte)) for byte in np.unique(empty)} - {None}
    return f"{recipe}; zero blocks as {makers.pop()}" if len(makers) == 1 else recipe
