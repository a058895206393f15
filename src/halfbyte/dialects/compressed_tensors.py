"""compressed-tensors: the format ``nvfp4-pack-quantized`` of llm-compressor, AutoRound and others.

=======================  =======  =========  ==============================================
key                      dtype    shape      meaning
=======================  =======  =========  ==============================================
``weight_packed``        U8       [N, K/2]   codes, low nibble = even k
``weight_scale``         F8_E4M3  [N, K/16]  block scales, row-major
``weight_global_scale``  F32      [1] or []  1 / scale2: it divides
``input_global_scale``   F32      [1] or []  1 / input_scale; absent in NVFP4A16
=======================  =======  =========  ==============================================

FP8 layers (``float-quantized``): ``weight`` F8_E4M3, ``weight_scale`` [1] or [N, 1], ``input_scale``; these
multiply. MXFP4 layers (``mxfp4-pack-quantized``): ``weight_packed`` U8 and ``weight_scale`` U8 [N, K/32], E8M0, and
no global scale. Facts: compressed-tensors 0.20.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from halfbyte.dialects.base import Dialect, Facts, Layer
from halfbyte.errors import FormatError
from halfbyte.modules import BYTES, Headers, Kind, Module, dicts_of, fp8_granularity, quant_section, strings_of
from halfbyte.patterns import Patterns, module_class

_BESIDE = {"bias": "bias", "k_scale": "k_scale", "v_scale": "v_scale"}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "group_size": 16,
    "strategy": "tensor_group",
    "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}
_MXFP4 = _NVFP4 | {"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}


class CompressedTensors(Dialect):
    """Read and write compressed-tensors' tensors and config."""

    name: ClassVar[str] = "compressed-tensors"
    title: ClassVar[str] = "compressed-tensors"
    divides: ClassVar[bool] = True
    scalar_shape: ClassVar[tuple[int, ...]] = (1,)
    row_scale_axes: ClassVar[int] = 2
    suffixes: ClassVar[Mapping[Kind, Mapping[str, str]]] = {
        "nvfp4": {
            "codes": "weight_packed",
            "scales": "weight_scale",
            "scale2": "weight_global_scale",
            "input_scale": "input_global_scale",
            **_BESIDE,
        },
        "fp8": {"data": "weight", "scale": "weight_scale", "input_scale": "input_scale", **_BESIDE},
        "mxfp4": {"codes": "weight_packed", "scales": "weight_scale", **_BESIDE},
        "dense": {"data": "weight", **_BESIDE},
    }

    def claims(self, headers: Headers) -> str | None:
        for tensor in headers.by_suffix.get("weight_global_scale", ()):
            return f"tensor {tensor.name}"
        for tensor in headers.by_suffix.get("weight_packed", ()):
            if tensor.dtype in BYTES or quant_section(headers).get("quant_method") == self.name:
                return f"tensor {tensor.name}"
        return None

    def claims_config(self, headers: Headers) -> bool:
        return quant_section(headers).get("quant_method") == "compressed-tensors"

    def layers(self, headers: Headers) -> Callable[[str, str], Layer | None] | None:
        section = quant_section(headers)
        if not isinstance(section.get("config_groups"), dict):
            return None
        group_of: dict[str, dict[str, Any]] = {}
        for group in dicts_of(section["config_groups"]).values():
            for target in strings_of(group.get("targets")):
                group_of.setdefault(target, group)
        # compressed-tensors resolves an overlap as exact name, then regexes in alphabetical order, then class.
        classes = {t for t in group_of if t in ("Linear", "Embedding")}
        targets = Patterns(sorted(group_of.keys() - classes, key=lambda t: (t.startswith("re:"), t)))
        ignored = Patterns(strings_of(section.get("ignore")))

        def of(name: str, cls: str) -> Layer | None:
            if ignored.first(name, cls):
                return None
            target = targets.first(name) or (cls if cls in classes else None)
            return _layer(group_of[target]) if target else None

        return of

    def config(self, facts: Facts) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        if facts.kv not in (None, "FP8"):
            raise FormatError(
                f"a KV cache in {facts.kv} has no place in compressed-tensors",
                got=facts.kv,
                expected="FP8 or none",
                hint="keep the checkpoint in its own dialect",
            )
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name, module in facts.quantized.items():
            scheme = _scheme(module)
            groups.setdefault(repr(scheme), (scheme, []))[1].append(name)
        linear = all(module_class(name, len(m.shape)) == "Linear" for name, m in facts.quantized.items())
        simple = len(groups) == 1 and linear
        schemes = [({"targets": ["Linear"] if simple else sorted(names)} | s) for s, names in groups.values()]
        formats = {s["format"] for s in schemes}
        kv = _FP8 | {"strategy": "tensor", "dynamic": False} if facts.kv else None
        return {
            "config_groups": {f"group_{i}": scheme for i, scheme in enumerate(schemes)},
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": kv,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": sorted(name for name, cls in facts.dense.items() if cls == "Linear"),
        }, {}


def _layer(group: Mapping[str, Any]) -> Layer:
    halves = dicts_of(group)
    weights, inputs = halves.get("weights", {}), halves.get("input_activations", {})
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if kind != "float":
        return Layer(f"{kind}{bits}")
    if bits == 8:
        return Layer("mxfp8" if size == 32 else "fp8")
    if size == 32:
        return Layer("mxfp4")
    return Layer("nvfp4", bool(inputs) and inputs.get("dynamic") in (False, "local"))


def _scheme(module: Module) -> dict[str, Any]:
    inputs: dict[str, Any] | None
    if module.kind == "nvfp4":
        weights, fmt = dict(_NVFP4), "nvfp4-pack-quantized"
        inputs = _NVFP4 | {"dynamic": "local", "observer": "static_minmax"} if "input_scale" in module.roles else None
    elif module.kind == "mxfp4":
        weights, fmt, inputs = dict(_MXFP4), "mxfp4-pack-quantized", None
    else:
        granularity = fp8_granularity(module)
        strategy = "channel" if granularity == "row" else granularity
        weights, fmt = _FP8 | {"strategy": strategy, "dynamic": False}, "float-quantized"
        if strategy == "block":
            weights["block_structure"] = [128, 128]
        if "input_scale" in module.roles:
            inputs = _FP8 | {"strategy": "tensor", "dynamic": False}
        else:
            inputs = _FP8 | {"strategy": "token", "dynamic": True} if strategy == "channel" else None
    return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": fmt}
