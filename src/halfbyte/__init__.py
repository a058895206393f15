"""halfbyte: NVFP4 weights opened, inspected, proven, quantized, converted and run.

Everything is imported when it is first used: ``import halfbyte`` loads neither NumPy nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "CODES": "findings",
    "Checkpoint": "checkpoint.reader",
    "DenseWeight": "kinds",
    "ExpertsForm": "forms",
    "Finding": "findings",
    "Form": "forms",
    "Fp8Weight": "kinds",
    "FragmentLoader": "fragments",
    "HalfbyteError": "errors",
    "Int8Weight": "kinds",
    "Mxfp4Weight": "kinds",
    "Packed": "layouts",
    "Plan": "plans",
    "Reading": "modules",
    "Report": "findings",
    "Weight": "weight",
    "attention": "ops",
    "convert": "tools.convert",
    "dequantize_checkpoint": "tools.dequantize",
    "diff": "tools.diff",
    "embedding": "embedding_op",
    "explain": "explanations",
    "generate": "decoder.loop",
    "grouped_linear": "ops",
    "inspect": "tools.inspect",
    "linear": "ops",
    "open": "checkpoint.reader",
    "pack": "ops",
    "plan": "plans",
    "quantize": "recipes",
    "quantize_checkpoint": "tools.quantize",
    "route": "route_op",
    "scale_report": "underflow",
    "shard": "tools.shard",
    "to_fp8": "lossy",
    "to_int8": "lossy",
    "unpack": "ops",
    "verify": "tools.verify",
}
_MODULES = ("errors", "kernels", "layouts", "nn")
_NAMED = {"open": "open_checkpoint"}

__all__ = [
    "CODES",
    "Checkpoint",
    "DenseWeight",
    "ExpertsForm",
    "Finding",
    "Form",
    "Fp8Weight",
    "FragmentLoader",
    "HalfbyteError",
    "Int8Weight",
    "Mxfp4Weight",
    "Packed",
    "Plan",
    "Reading",
    "Report",
    "Weight",
    "__version__",
    "attention",
    "convert",
    "dequantize_checkpoint",
    "diff",
    "embedding",
    "errors",
    "explain",
    "generate",
    "grouped_linear",
    "inspect",
    "kernels",
    "layouts",
    "linear",
    "open",
    "pack",
    "plan",
    "quantize",
    "quantize_checkpoint",
    "route",
    "scale_report",
    "shard",
    "to_fp8",
    "to_int8",
    "unpack",
    "verify",
]

if TYPE_CHECKING:
    from halfbyte import errors, kernels, layouts
    from halfbyte import nn as nn  # not in __all__: a star import must not need torch
    from halfbyte.checkpoint.reader import Checkpoint
    from halfbyte.checkpoint.reader import open_checkpoint as open  # noqa: A004 - torch and safetensors say open too
    from halfbyte.decoder.loop import generate
    from halfbyte.embedding_op import embedding
    from halfbyte.errors import HalfbyteError
    from halfbyte.explanations import explain
    from halfbyte.findings import CODES, Finding, Report
    from halfbyte.forms import ExpertsForm, Form
    from halfbyte.fragments import FragmentLoader
    from halfbyte.kinds import DenseWeight, Fp8Weight, Int8Weight, Mxfp4Weight
    from halfbyte.layouts import Packed
    from halfbyte.lossy import to_fp8, to_int8
    from halfbyte.modules import Reading
    from halfbyte.ops import attention, grouped_linear, linear, pack, unpack
    from halfbyte.plans import Plan, plan
    from halfbyte.recipes import quantize
    from halfbyte.route_op import route
    from halfbyte.tools.convert import convert
    from halfbyte.tools.dequantize import dequantize_checkpoint
    from halfbyte.tools.diff import diff
    from halfbyte.tools.inspect import inspect
    from halfbyte.tools.quantize import quantize_checkpoint
    from halfbyte.tools.shard import shard
    from halfbyte.tools.verify import verify
    from halfbyte.underflow import scale_report
    from halfbyte.weight import Weight


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        value = getattr(import_module(f"halfbyte.{_HOMES[name]}"), _NAMED.get(name, name))
    elif name in _MODULES:
        value = import_module(f"halfbyte.{name}")
    else:
        raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
