"""Block FP8 as DeepSeek, Qwen and transformers write it (``quant_method: fp8``).

======================  =======  ======================  =========================================
key                     dtype    shape                   meaning
======================  =======  ======================  =========================================
``weight``              F8_E4M3  [N, K]
``weight_scale_inv``    F32      [N/128, K/128]          multiplies, in spite of its name; rounded up
``activation_scale``    F32      []                      static scale of the inputs, where there is one
======================  =======  ======================  =========================================

Read, and not written: ModelOpt and compressed-tensors have places for the same layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from halfbyte.dialects.base import Dialect, Layer
from halfbyte.modules import Headers, Kind, quant_section, strings_of
from halfbyte.patterns import Patterns

_BESIDE = {"bias": "bias", "k_scale": "k_scale", "v_scale": "v_scale"}


class BlockFp8(Dialect):
    """Read block FP8."""

    name: ClassVar[str] = "fp8"
    title: ClassVar[str] = "block FP8 (weight_scale_inv)"
    writable: ClassVar[bool] = False
    suffixes: ClassVar[Mapping[Kind, Mapping[str, str]]] = {
        "nvfp4": {"codes": "weight", "scales": "weight_scale", "scale2": "weight_scale_2"},
        "fp8": {"data": "weight", "scale": "weight_scale_inv", "input_scale": "activation_scale", **_BESIDE},
        "dense": {"data": "weight", **_BESIDE},
    }

    def claims(self, headers: Headers) -> str | None:
        others = ("weight_scale_2", "weight_global_scale", "weight_packed")
        if any(suffix in headers.by_suffix for suffix in others):
            return None  # FP8 layers beside NVFP4 ones: those are of another dialect
        found = headers.by_suffix.get("weight_scale_inv")
        return f"tensor {found[0].name}" if found else None

    def claims_config(self, headers: Headers) -> bool:
        return quant_section(headers).get("quant_method") == "fp8"

    def layers(self, headers: Headers) -> Callable[[str, str], Layer | None] | None:
        section = quant_section(headers)
        if section.get("quant_method") != "fp8":
            return None
        excluded = Patterns(strings_of(section.get("modules_to_not_convert")))

        def of(name: str, cls: str) -> Layer | None:
            return Layer("fp8") if cls == "Linear" and not excluded.first(name, cls) else None

        return of
