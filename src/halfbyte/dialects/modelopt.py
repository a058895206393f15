"""ModelOpt: NVIDIA's unified Hugging Face export.

==================  =======  ===============  ================================================
key                 dtype    shape            meaning
==================  =======  ===============  ================================================
``weight``          U8       [N, K/2]         codes, low nibble = even k
``weight_scale``    F8_E4M3  [N, K/16]        block scales, row-major
``weight_scale_2``  F32      []               scale2, multiplies
``input_scale``     F32      []               amax / 2688, multiplies; absent in W4A16
``pre_quant_scale`` float    [K]              activations are multiplied by it (AWQ, SVDQuant)
``svdquant_lora_*`` float    low rank         y += (x a^T) b^T (SVDQuant)
==================  =======  ===============  ================================================

FP8 layers have the same key names: ``weight`` F8_E4M3 [N, K], ``weight_scale`` F32 [] or [N], ``input_scale``; so do
MXFP4 layers: ``weight`` U8 [N, K/2], ``weight_scale`` U8 [N, K/32], E8M0. Stacks of experts: see halfbyte.experts.
Facts: nvidia-modelopt 0.47, ``modelopt/torch/export``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from halfbyte.bundles import Bundle, Gather
from halfbyte.dialects.base import Dialect, Facts, Layer, Output, Piece
from halfbyte.errors import FormatError
from halfbyte.experts import COMPANIONS
from halfbyte.modules import (
    BYTES,
    Headers,
    Kind,
    Module,
    dicts_of,
    fp8_granularity,
    is_mx,
    nested_section,
    quant_section,
    refuse_companions,
    strings_of,
)
from halfbyte.numerics import BLOCK
from halfbyte.patterns import Patterns, module_class, spellings
from halfbyte.stored import DTYPE_BITS, Stored

_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
"""Engines accept the file by this name; the version is the one whose layout is written."""

_BESIDE = {"bias": "bias", "k_scale": "k_scale", "v_scale": "v_scale"}
_KINDS = {"NVFP4": "nvfp4", "MXFP4": "mxfp4", "MXFP8": "mxfp8", "FP8": "fp8"}


class ModelOpt(Dialect):
    """Read and write ModelOpt's tensors and both of its config files."""

    name: ClassVar[str] = "modelopt"
    title: ClassVar[str] = "ModelOpt"
    suffixes: ClassVar[Mapping[Kind, Mapping[str, str]]] = {
        "nvfp4": {
            "codes": "weight",
            "scales": "weight_scale",
            "scale2": "weight_scale_2",
            "input_scale": "input_scale",
            "pre_scale": "pre_quant_scale",
            "lora_a": "svdquant_lora_a",
            "lora_b": "svdquant_lora_b",
            **_BESIDE,
        },
        "fp8": {"data": "weight", "scale": "weight_scale", "input_scale": "input_scale", **_BESIDE},
        "mxfp4": {"codes": "weight", "scales": "weight_scale", **_BESIDE},
        "dense": {"data": "weight", **_BESIDE},
    }

    def claims(self, headers: Headers) -> str | None:
        if headers.swizzled_mark:
            return None
        for suffix, tensors in headers.by_suffix.items():
            if suffix == "weight_scale_2" or suffix.endswith("_weight_scale_2"):
                return f"tensor {tensors[0].name}"
        for scales in headers.by_suffix.get("weight_scale", ()):
            weight = headers.beside(scales, "weight")
            if weight is not None and weight.dtype in BYTES and is_mx(weight, scales):
                return f"tensor {scales.name}"
        return None

    def claims_config(self, headers: Headers) -> bool:
        method = quant_section(headers).get("quant_method")
        return (isinstance(method, str) and method.startswith("modelopt")) or "quantization" in headers.quant

    def stack_outputs(self, bundle: Bundle, source: Dialect) -> list[Output]:
        first, pair = bundle.module, len(bundle.experts[0]) == 2
        known = {*COMPANIONS.values(), "codes", "data", "scale"}
        for expert in bundle.experts:
            for module in expert:
                refuse_companions(module, set(module.roles) - known, "have no place in a stack of experts")
        endings = {role: ending for ending, role in COMPANIONS.items()} | {"scale": "_weight_scale"}
        endings |= dict.fromkeys(("codes", "data"), "_weight" if bundle.name.endswith((".w13", ".w2")) else "")
        invert = first.kind == "nvfp4" and source.divides
        outputs = []
        for role in first.roles:
            layers = [[module.roles[role] for module in expert] for expert in bundle.experts]
            name = f"{bundle.name}{endings[role]}"
            if role in ("scale2", "input_scale", "scale"):
                shape = (len(layers), 2) if pair else (len(layers),)
                pieces = tuple(Piece(4 * i, (t,)) for i, t in enumerate(t for layer in layers for t in layer))
                outputs.append(Output(Stored(name, "F32", shape), pieces, True, invert and role != "scale"))
            elif role == "pre_scale":
                k = bundle.shape[-1]
                pieces = tuple(Piece(e * layer[0].nbytes, tuple(layer), only) for e, layer in enumerate(layers))
                outputs.append(Output(Stored(name, layers[0][0].dtype, (len(layers), k)), pieces))
            else:
                outputs.append(_stacked(bundle, role, name, layers))
        return outputs

    def layers(self, headers: Headers) -> Callable[[str, str], Layer | None] | None:
        section = quant_section(headers) if self.claims_config(headers) else {}
        section = section or nested_section(headers)
        algo = section.get("quant_algo")
        if not isinstance(algo, str):
            return None
        if algo == "MIXED_PRECISION":
            table = dicts_of(section.get("quantized_layers"))
            return lambda name, cls: next(
                (_layer(table[n].get("quant_algo")) for n in (*spellings(name), *_experts(name)) if n in table), None
            )
        layer, excluded = _layer(algo), Patterns(exclusions(section))
        embeds = section.get("nvfp4_embed") is True

        def of(name: str, cls: str) -> Layer | None:
            covered = cls == "Linear" or (cls == "Embedding" and embeds)
            return layer if covered and not excluded.first(name, cls) else None

        return of

    def config(self, facts: Facts) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        algos = {name: _algo(module) for name, module in facts.quantized.items()}
        if facts.kv not in (None, "FP8", "NVFP4"):
            raise FormatError(
                "a KV cache of this format has no place in ModelOpt", got=facts.kv, expected="FP8 or NVFP4"
            )
        kv = facts.kv
        groups: dict[str, list[str]] = {}
        for name, algo in algos.items():
            groups.setdefault(algo, []).append(name)
        mixed = len(groups) > 1
        named = "MIXED_PRECISION" if mixed else next(iter(groups), None)
        ignore = [] if mixed else sorted(facts.dense)
        layers = {name: {"quant_algo": a} | _group_size(a) for name, a in algos.items()}
        section: dict[str, Any] = {
            "config_groups": {
                f"group_{i}": _group(a) | {"targets": sorted(names) if mixed else ["Linear"]}
                for i, (a, names) in enumerate(sorted(groups.items()))
            }
        }
        if mixed:
            section["quantized_layers"] = layers
        section |= {"ignore": ignore, "quant_algo": named}
        if kv:
            section["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"} if kv == "FP8" else kv
        section |= {"producer": dict(_PRODUCER), "quant_method": "modelopt"}
        inner: dict[str, Any] = {"quant_algo": named, "kv_cache_quant_algo": kv}
        if mixed:
            inner["quantized_layers"] = layers
        else:
            inner |= _group_size(named or "") | {"exclude_modules": ignore}
        if not mixed and any(module_class(n, len(m.shape)) == "Embedding" for n, m in facts.quantized.items()):
            section["nvfp4_embed"] = inner["nvfp4_embed"] = True  # vLLM's key
        return section, {"hf_quant_config.json": {"producer": dict(_PRODUCER), "quantization": inner}}


def only(arrays: Sequence[Any]) -> Any:
    """The array that all of ``arrays`` are.

    Raises:
        FormatError: they differ.
    """
    if any(not np.array_equal(a, arrays[0]) for a in arrays):
        raise FormatError("gate and up have different pre_scales", hint="pass --experts split")
    return arrays[0]


def _stacked(bundle: Bundle, role: str, name: str, layers: Sequence[Sequence[Stored]]) -> Output:
    """The matrices or biases of all experts as one tensor."""
    experts, n, k = bundle.shape
    like = layers[0][0]
    width = {"codes": k // 2, "scales": k // BLOCK, "data": k}.get(role)
    dtype = "U8" if role == "codes" else like.dtype
    item = DTYPE_BITS[dtype] // 8
    columns = bundle.stack.columns and width is not None
    shape = (experts, n) if width is None else (experts, width, n) if columns else (experts, n, width)
    each, pieces = n * (width or 1) * item, []
    apart = len(layers[0]) == 1 or bundle.stack.gate_up != "interleaved"
    for e, layer in enumerate(layers):
        if columns or not apart:
            pieces.append(Piece(e * each, tuple(layer), Gather(bundle.stack, columns, item)))
            continue
        ordered = layer if bundle.stack.gate_up != "up_first" else layer[::-1]
        pieces += [Piece(e * each + i * each // len(layer), (part,)) for i, part in enumerate(ordered)]
    return Output(Stored(name, dtype, shape), tuple(pieces))


def exclusions(section: Mapping[str, Any]) -> list[str]:
    """The patterns of modules that a section leaves unquantized."""
    keys = ("ignore", "exclude_modules", "modules_to_not_convert")
    return [pattern for key in keys for pattern in strings_of(section.get(key))]


def _experts(name: str) -> list[str]:
    """The module that holds a stack of experts, which is what a table names."""
    parent = name.rpartition(".")[0]
    return spellings(parent) if parent.endswith("experts") else []


def _layer(algo: Any) -> Layer:
    algo = str(algo)
    weights = algo.removeprefix("W4A16_").removeprefix("W4A8_")
    kind = next((kind for prefix, kind in _KINDS.items() if weights.startswith(prefix)), algo)
    return Layer(kind, not algo.startswith("W4A16") if kind == "nvfp4" else None)


def _algo(module: Module) -> str:
    if module.kind == "nvfp4":
        if "lora_a" in module.roles:
            return "NVFP4_SVD"
        if "pre_scale" in module.roles:
            return "NVFP4_AWQ"
        return "NVFP4" if "input_scale" in module.roles else "W4A16_NVFP4"
    if module.kind == "mxfp4":
        return "MXFP4"
    return {"tensor": "FP8", "row": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}[fp8_granularity(module)]


def _group_size(algo: str) -> dict[str, int]:
    return {"group_size": 16} if "NVFP4" in algo else {"group_size": 32} if "MX" in algo else {}


def _group(algo: str) -> dict[str, Any]:
    bits = {"dynamic": False, "num_bits": 8, "type": "float"}
    args = bits | ({"num_bits": 4} | _group_size(algo) if "FP4" in algo else {})
    weights_only = algo.startswith("W4A16") or algo in ("FP8_PB_WO", "MXFP4")
    return ({} if weights_only else {"input_activations": dict(args)}) | {"weights": dict(args)}
