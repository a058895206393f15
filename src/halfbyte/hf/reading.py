"""Weights of a checkpoint as torch tensors, those of one product read into one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import FormatError
from halfbyte.layouts import Rows
from halfbyte.modules import Module
from halfbyte.stored import Stored
from halfbyte.weight import Weight, to_torch


def read_weight(checkpoint: Checkpoint, parts: Sequence[Module]) -> Weight:
    """NVFP4 layers joined along N, (N, K) on the CPU; without input scales."""
    return _read(checkpoint, [parts], stacked=False)


def read_stack(checkpoint: Checkpoint, experts: Sequence[Sequence[Module]]) -> Weight:
    """NVFP4 layers of each expert joined along N, (E, N, K) on the CPU; without input scales."""
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
    arrays = (codes, scales, torch.from_numpy(scale2))
    if not stacked:
        arrays = tuple(a[0] for a in arrays)
    return Weight(codes=arrays[0], scales=arrays[1], scale2=arrays[2], pre_scale=pre_scale)


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
    """A scale of one layer that is one f32 number, as it multiplies.

    Raises:
        FormatError: Inf or NaN, or more than one number.
    """
    tensor = module.roles[role]
    value = checkpoint.dialect.meaning(module, role, checkpoint.read(tensor), checkpoint.original)
    if prod(value.shape) != 1 or not np.isfinite(value).all():
        got = "several numbers" if prod(value.shape) != 1 else float(value.reshape(()))
        raise FormatError(f"{role} is not one finite number", file=tensor.file, tensor=tensor.name, got=got)
    return value.reshape(())[()]  # type: ignore[no-any-return]


def read_dense(checkpoint: Checkpoint, tensor: Stored, dtype: Any = None, device: Any = None) -> torch.Tensor:
    """A dense tensor, of ``dtype`` on ``device``."""
    made: torch.Tensor = to_torch(checkpoint.read(tensor))
    return made.to(device=device, dtype=dtype)
