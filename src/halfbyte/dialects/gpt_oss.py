"""gpt-oss: MXFP4 stacks of experts, as OpenAI released them and transformers writes them (``quant_method: mxfp4``).

===========================  =====  ==================  ============================================
key                          dtype  shape               meaning
===========================  =====  ==================  ============================================
``gate_up_proj_blocks``      U8     [E, 2I, K/32, 16]   codes, low nibble = even k; rows alternate
``gate_up_proj_scales``      U8     [E, 2I, K/32]       E8M0: 2^(byte - 127)
``gate_up_proj_bias``        BF16   [E, 2I]
===========================  =====  ==================  ============================================

and the same for ``down_proj``. Read, and not written: engines that take the form hold no NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from halfbyte.dialects.base import Dialect, Layer
from halfbyte.modules import Headers, Kind, quant_section, strings_of
from halfbyte.patterns import Patterns


class GptOss(Dialect):
    """Read gpt-oss' tensors."""

    name: ClassVar[str] = "gpt-oss"
    title: ClassVar[str] = "gpt-oss (MXFP4 stacks)"
    writable: ClassVar[bool] = False
    suffixes: ClassVar[Mapping[Kind, Mapping[str, str]]] = {
        "nvfp4": {"codes": "weight", "scales": "weight_scale", "scale2": "weight_scale_2"},
        "mxfp4": {"codes": "weight", "scales": "weight_scale", "bias": "bias"},
        "fp8": {"data": "weight", "scale": "weight_scale", "bias": "bias"},
        "dense": {"data": "weight", "bias": "bias"},
    }

    def claims(self, headers: Headers) -> str | None:
        for suffix, tensors in headers.by_suffix.items():
            if suffix.endswith("_blocks"):
                for tensor in tensors:
                    if tensor.name.removesuffix("_blocks") + "_scales" in headers.tensors:
                        return f"tensor {tensor.name}"
        return None

    def claims_config(self, headers: Headers) -> bool:
        return quant_section(headers).get("quant_method") == "mxfp4"

    def layers(self, headers: Headers) -> Callable[[str, str], Layer | None] | None:
        section = quant_section(headers)
        if section.get("quant_method") != "mxfp4":
            return None
        excluded = Patterns(strings_of(section.get("modules_to_not_convert")))

        def of(name: str, cls: str) -> Layer | None:
            inside = name.rpartition(".")[0].endswith("experts")
            return Layer("mxfp4") if inside and not excluded.first(name, cls) else None

        return of
