"""Weights of a checkpoint as torch tensors, those of one product read into one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import FormatError
from halfbyte.modules import Module, fp8_scale
from halfbyte.stored import Stored
from halfbyte.weight import Fp8Weight, Weight, to_torch


def read_weight(checkpoint: Checkpoint, parts: Sequence[Module]) -> Weight:
    """NVFP4 layers joined along N, (N, K) on the CPU; without input scales.

    Raises:
        FormatError: a scale that is Inf or NaN, a block scale that is NaN or negative, or a file that cannot be read.
    """
    return _read(checkpoint, [parts], stacked=False)


def read_stack(checkpoint: Checkpoint, experts: Sequence[Sequence[Module]]) -> Weight:
    """NVFP4 layers of each expert joined along N, (E, N, K) on the CPU; without input scales.

    Raises:
        FormatError: as ``read_weight``.
    """
    return _read(checkpoint, experts, stacked=True)


def _read(checkpoint: Checkpoint, experts: Sequence[Sequence[Module]], stacked: bool) -> Weight:
    sizes = [part.shape[-2] for part in experts[0]]
    lead, n, k = len(experts), sum(sizes), experts[0][0].shape[-1]
    codes = torch.empty((lead, n, k // 2), dtype=torch.uint8)
    scales = torch.empty((lead, n, k // 16), dtype=torch.uint8)
    scale2 = np.empty((lead, n, 1), np.float32)
    for e, parts in enumerate(experts):
        row = 0
        for part in parts:
            rows = slice(row, row + part.shape[-2])
            row = rows.stop
            _into(checkpoint, part.roles["codes"], codes[e, rows])
            _into(checkpoint, part.roles["scales"], scales[e, rows])
            _check_scales(part.roles["scales"], scales[e, rows])
            scale2[e, rows] = read_scale(checkpoint, part, "scale2")
    if bool((scale2 == scale2[:, :1]).all()):
        scale2 = np.ascontiguousarray(scale2[:, :1])
    pre = experts[0][0].roles.get("pre_scale")
    pre_scale = None if pre is None else to_torch(checkpoint.read(pre).reshape(k))
    made = codes, scales, torch.from_numpy(scale2)
    codes, scales, second = made if stacked else (a[0] for a in made)
    return Weight(codes=codes, scales=scales, scale2=second, pre_scale=pre_scale)


def _into(checkpoint: Checkpoint, tensor: Stored, rows: torch.Tensor) -> None:
    out = rows.numpy().reshape(-1)
    if tensor.nbytes != out.size:
        raise FormatError("the tensor has another size than its shape", tensor=tensor.name, got=tensor.nbytes)
    checkpoint.read_into(tensor, 0, out)


def _check_scales(tensor: Stored, scales: torch.Tensor) -> None:
    """FormatError where a block scale is NaN or negative."""
    array = scales.numpy()
    if not array.size or int(array.max()) < 127:
        return
    wrong = np.argwhere((array & 127 == 127) | (array > 127))
    at = tensor.place(wrong[0])
    byte = int(array[tuple(wrong[0])])
    what = "NaN" if byte & 127 == 127 else "negative"
    raise FormatError(
        f"a block scale is {what}",
        file=tensor.file,
        tensor=tensor.name,
        index=at,
        got=f"byte {byte:02X}",
        hint=f"{len(wrong)} in this tensor; halfbyte verify lists all",
    )


def read_scale(checkpoint: Checkpoint, module: Module, role: str) -> float:
    """A scale of one NVFP4 layer that is one f32 number, as it multiplies.

    Raises:
        FormatError: Inf, NaN or negative, or more than one number.
    """
    tensor = module.roles[role]
    value = checkpoint.dialect.meaning(module, role, checkpoint.read(tensor), checkpoint.original)
    if prod(value.shape) != 1:
        raise FormatError(f"{role} is not one number", file=tensor.file, tensor=tensor.name, got=list(value.shape))
    number = float(value.reshape(()))
    if not np.isfinite(number):
        raise FormatError(f"{role} is not finite", file=tensor.file, tensor=tensor.name, got=number)
    if number < 0:
        raise FormatError(f"{role} is negative", file=tensor.file, tensor=tensor.name, got=number)
    return number


def read_input_scale(checkpoint: Checkpoint, module: Module) -> float | None:
    """The multiplier of an NVFP4 layer's quantized activations, None where it has none."""
    return read_scale(checkpoint, module, "input_scale") if "input_scale" in module.roles else None


def read_fp8(checkpoint: Checkpoint, module: Module, device: Any) -> Fp8Weight:
    """An FP8 layer, (N, K), in tensors on ``device``.

    Raises:
        FormatError: a scale that is Inf, NaN or negative.
    """
    roles = module.roles
    read = {role: checkpoint.read(t) for role, t in roles.items() if role in ("scale", "input_scale", "pre_scale")}
    scale, block = fp8_scale(module, read.pop("scale").astype(np.float32))
    if not np.isfinite(scale).all():
        raise FormatError("a scale is not finite", file=roles["scale"].file, tensor=roles["scale"].name)
    if (scale < 0).any():
        raise FormatError("a scale is negative", file=roles["scale"].file, tensor=roles["scale"].name)
    data = torch.from_numpy(checkpoint.read(roles["data"]).view(np.uint8)).to(device)
    others = {role: to_torch(value, device) for role, value in read.items()}
    return Fp8Weight(data=data, scale=to_torch(scale, device), block=block, **others)


def read_dense(checkpoint: Checkpoint, tensor: Stored, dtype: Any = None, device: Any = None) -> torch.Tensor:
    """A dense tensor, of ``dtype`` on ``device``."""
    made: torch.Tensor = to_torch(checkpoint.read(tensor))
    return made.to(device=device, dtype=dtype)
