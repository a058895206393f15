"""Dialects that are recognised by their tensors and not read yet, so that an error can name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halfbyte.dialects.base import Dialect, Headers, is_mx, swizzled_mark


class Unread(Dialect):
    """A dialect of which halfbyte knows the marks and no more.

    Args:
        name: short name.
        title: as its makers write it.
        mark: gives the tensor or key that tells the dialect, or None.
    """

    readable = False

    def __init__(self, name: str, title: str, mark: Callable[[Headers], str | None]) -> None:
        self.__dict__.update(name=name, title=title)
        self._mark = mark

    def claims(self, headers: Headers) -> str | None:
        return self._mark(headers)


def _tensor(headers: Headers, *endings: str, dtype: str | None = None) -> str | None:
    for tensor in headers.tensors.values():
        if tensor.name.endswith(endings) and dtype in (None, tensor.dtype):
            return f"tensor {tensor.name}"
    return None


def _mlx(headers: Headers) -> str | None:
    section: Any = headers.config.get("quantization")
    if isinstance(section, dict) and section.get("mode") == "nvfp4":
        return "config quantization.mode nvfp4"
    for tensor in headers.tensors.values():
        scales = headers.tensors.get(f"{tensor.name.removesuffix('weight')}scales")
        if tensor.dtype == "U32" and tensor.name.endswith("weight") and scales is not None and scales.dtype == "U8":
            return f"tensor {scales.name}"
    return None


def _torchao(headers: Headers) -> str | None:
    if "NVFP4Tensor" in "".join(headers.metadata.values()):
        return "metadata that names NVFP4Tensor"
    return _tensor(headers, "qdata", dtype="U8")


def _mxfp4(headers: Headers) -> str | None:
    for tensor in headers.tensors.values():
        stem, blocks, _ = tensor.name.rpartition("_blocks")
        if blocks and f"{stem}_scales" in headers.tensors:
            return f"tensor {tensor.name}"
        for suffix in (".weight_packed", ".weight"):
            scales = headers.tensors.get(f"{tensor.name.removesuffix(suffix)}.weight_scale")
            if tensor.name.endswith(suffix) and tensor.dtype == "U8" and scales is not None and is_mx(tensor, scales):
                return f"tensor {scales.name}"
    return None


def _block_fp8(headers: Headers) -> str | None:
    if _tensor(headers, ".weight_scale_2", ".weight_packed", ".weight_global_scale"):
        return None  # FP8 layers beside NVFP4 ones, which are read
    return _tensor(headers, ".weight_scale_inv")


UNREAD: tuple[Dialect, ...] = (
    Unread("comfyui", "ComfyUI (comfy-kitchen)", swizzled_mark),
    Unread("mlx", "MLX", _mlx),
    Unread("torchao", "torchao", _torchao),
    Unread("fp-quant", "FP-Quant", lambda h: _tensor(h, ".forward_hadamard_matrix", ".dqweight")),
    Unread("mxfp4", "MXFP4", _mxfp4),
    Unread("fp8-block", "block FP8 (weight_scale_inv)", _block_fp8),
    Unread("pack-quantized", "compressed-tensors with integers", lambda h: _tensor(h, ".weight_packed", dtype="I32")),
)
