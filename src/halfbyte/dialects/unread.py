"""Dialects that are recognised by their tensors and not read yet, so that an error can name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halfbyte.dialects.base import Dialect
from halfbyte.modules import Headers


class Unread(Dialect):
    """A dialect of which halfbyte knows the marks and no more.

    Args:
        name: short name.
        title: as its makers write it.
        mark: gives the tensor or key that tells the dialect, or None.
    """

    readable = False
    writable = False

    def __init__(self, name: str, title: str, mark: Callable[[Headers], str | None]) -> None:
        self.__dict__.update(name=name, title=title)
        self._mark = mark

    def claims(self, headers: Headers) -> str | None:
        return self._mark(headers)


def _tensor(headers: Headers, *suffixes: str, dtype: str | None = None) -> str | None:
    for suffix in suffixes:
        for tensor in headers.by_suffix.get(suffix, ()):
            if dtype in (None, tensor.dtype):
                return f"tensor {tensor.name}"
    return None


def _mlx(headers: Headers) -> str | None:
    section: Any = headers.config.get("quantization")
    if isinstance(section, dict) and section.get("mode") == "nvfp4":
        return "config quantization.mode nvfp4"
    for scales in headers.by_suffix.get("scales", ()):
        weight = headers.beside(scales, "weight")
        if scales.dtype == "U8" and weight is not None and weight.dtype == "U32":
            return f"tensor {scales.name}"
    return None


def _torchao(headers: Headers) -> str | None:
    if "NVFP4Tensor" in "".join(headers.metadata.values()):
        return "metadata that names NVFP4Tensor"
    names = (suffix for suffix in headers.by_suffix if suffix.endswith("qdata"))
    return _tensor(headers, *names, dtype="U8")


def _integers(headers: Headers) -> str | None:
    """Integers of compressed-tensors, unless other layers of the checkpoint are read."""
    if _tensor(headers, "weight_global_scale") or _tensor(headers, "weight_packed", dtype="U8"):
        return None
    return _tensor(headers, "weight_packed", dtype="I32")


UNREAD: tuple[Dialect, ...] = (
    Unread("comfyui", "ComfyUI (comfy-kitchen)", lambda h: h.swizzled_mark),
    Unread("mlx", "MLX", _mlx),
    Unread("torchao", "torchao", _torchao),
    Unread("fp-quant", "FP-Quant", lambda h: _tensor(h, "forward_hadamard_matrix", "dqweight")),
    Unread("pack-quantized", "compressed-tensors with integers", _integers),
)
