"""``dequantize``: a quantized checkpoint to a dense one, in float32, bfloat16 or float16, by rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from halfbyte.checkpoint.consistency import quantized
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.writer import CheckpointWriter, Shard, distribute, parse_size, shard_names, write_pieces
from halfbyte.dialects import Dialect
from halfbyte.errors import FormatError, UsageError
from halfbyte.findings import Finding, Report
from halfbyte.modules import Module, fp8_granularity, refuse_broken, refuse_companions
from halfbyte.stored import Stored, byte_count, header_dtype, read_tensor, rows_of
from halfbyte.tasks import Job, Step, Task, Where
from halfbyte.tools.base import CHUNK, File, Progress, Work, Writing, opened, pieces, write_checkpoint, write_side_files
from halfbyte.weight import Weight, float_dtype

_INSIDE = ("codes", "scales", "scale2", "data", "scale", "pre_scale")

_PIECE = 8 << 20
"""Bytes of float32 values that are made at once."""

_VALUE_BYTES = 16
"""Memory for one value while it is made: codes, products, indices of block scales, the rounded value."""

_BY_ROW = ("codes", "scales", "data")

_BLOCK_ROWS = 128
"""Rows of one block scale of FP8."""


def dequantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    force: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    workers: int | None = None,
    executor: Where = None,
    progress: Progress | None = None,
) -> Report:
    """Write the values of every quantized weight as a dense tensor.

    A pre_scale is folded into its weight, so that the dense layer computes the same function.

    Args:
        src: a directory, a file, or a hub name.
        dst: the directory to make.
        dtype: of the weights that were quantized: "float32", "bfloat16" or "float16"; by default that of
            config.json, or bfloat16. Dense tensors stay as they are; a dtype that is asked for goes into
            config.json, by which loaders cast.
        max_shard_size: such as "5GB".
        force: replace ``dst`` if it exists; start over where a killed run has left unfinished work.
        dry_run: plan, sizes and peak memory; writes nothing.
        resume: go on with what a killed run of the same call has left, if there is any.
        workers: tasks at once; by default one for each core.
        executor: runs the tasks instead of threads; "processes" starts some where there is enough work, which a
            script must then call for under ``if __name__ == "__main__":``.
        progress: told of source bytes done.

    Returns:
        A report; its facts are "src", "dst", "dtype", "tensors" and "files" (each with what became of
        it and why), "bytes_in", "bytes_out", "workers", "peak_bytes" (the most memory that the run adds) and
        "seconds".

    Raises:
        HalfbyteError: a source that cannot be read, a target that may not be written. Nothing is left behind.
    """
    how = Writing(dst, force, dry_run, resume, workers, executor, progress)
    limit = parse_size(max_shard_size)
    with opened(src, how) as checkpoint:
        modules = {m.name: m for m in quantized(checkpoint)}
        if not modules:
            raise UsageError("there is nothing quantized in this checkpoint", file=str(checkpoint.path))
        for module in modules.values():
            refuse_broken(module)
            refuse_companions(module, {"lora_a", "lora_b"}, "cannot be part of a dense weight")
        return write_checkpoint(_Dequantize(checkpoint, modules, dtype, limit, str(dst)), how)


class _Dequantize(Work):
    """Values of the quantized modules, and copies of all else that a dense checkpoint has."""

    command = "dequantize"

    def __init__(
        self, checkpoint: Checkpoint, modules: Mapping[str, Module], dtype: str | None, limit: int, dst: str
    ) -> None:
        self.checkpoint, self._modules, self._asked = checkpoint, modules, dtype
        self._dtype = dtype or _config_dtype(checkpoint)
        self._found: dict[str, list[Finding]] = {}
        stored = header_dtype(np.empty(0, float_dtype(self._dtype)))
        listed: list[dict[str, str]] = []
        outputs: list[Stored] = []
        for module in checkpoint.modules:
            inside = modules.get(module.name) is module
            if inside:
                outputs.append(Stored(module.member("weight"), stored, module.shape))
            for role, tensor in module.roles.items():
                action, reason = _fate(role if inside else _kv_role(tensor))
                listed.append({"tensor": tensor.name, "action": action, "reason": reason})
                if action == "copied":
                    outputs.append(tensor)
        self._made = {m.member("weight"): m for m in modules.values()}
        shards = distribute(outputs, limit)
        self.files = {n: self._file(t) for n, t in zip(shard_names(len(shards)), shards, strict=True)}
        self.options = {"dtype": self._dtype, "asked": dtype, "max_shard_size": limit}
        self.facts = {
            "src": str(checkpoint.path),
            "dst": dst,
            "dtype": self._dtype,
            "tensors": listed,
            "bytes_in": sum(t.nbytes for t in checkpoint.tensors.values()),
            "bytes_out": sum(byte_count(t.dtype, t.shape) for t in outputs),
        }
        self.task_bytes = max(_VALUE_BYTES * prod(_part(m, *_rows(m)[0]).shape) for m in modules.values())

    def _file(self, tensors: list[Stored]) -> File:
        copies = [(t.name, 0, t) for t in tensors if t.file]
        made = sum(_inside_bytes(self._made[t.name]) for t in tensors if not t.file)
        return File(tensors, made + sum(t.nbytes for *_, t in copies), copies)

    def steps(self, name: str, shard: Shard) -> list[Step]:
        found = self._found.setdefault(name, [])
        return [self._module(self._made[t.name], shard, found) for t in self.files[name].tensors if not t.file]

    def _module(self, module: Module, shard: Shard, found: list[Finding]) -> Job:
        """The job for one weight; NaN and Inf that come from its scales are carried, and found."""
        target, tasks, left = shard.tensors[module.member("weight")], [], _inside_bytes(module)
        kept = {t.name: self.checkpoint.original(t) for t in module.roles.values()}
        ranges = _rows(module)
        for a, b in ranges:
            part, place = _part(module, a, b), rows_of(target, a, b)
            place = shard.piece(target.name, place.start - target.start, place.nbytes)
            done = left if (a, b) == ranges[-1] else sum(part.roles[r].nbytes for r in _BY_ROW if r in part.roles)
            left -= done
            tasks.append(Task(partial(_dequantize, part, a, self.checkpoint.dialect, kept, self._dtype, place), done))
        odd = [one for one in (yield tasks) if one.count]
        infinite = next((one.infinite for one in odd if one.infinite), None)
        if infinite and all(_finite(module.roles[r]) for r in ("scale2", "scale", "pre_scale") if r in module.roles):
            raise FormatError(
                f"a value does not fit {self._dtype}",
                file=module.main.file if module.main else None,
                tensor=module.name,
                index=list(infinite[:2]),
                got=infinite[2],
                hint="choose another --dtype, or see halfbyte verify",
            )
        if odd:
            hint = "they come from the scales: see halfbyte verify on the source"
            got = f"{sum(one.count for one in odd)} values"
            found.append(Finding("HB118", module.member("weight"), list(odd[0].first), got=got, hint=hint))

    def ending(self, name: str) -> tuple[dict[str, str], Any]:
        found = self._found.setdefault(name, [])
        return {}, {"findings": [[f.code, f.tensor, f.index, f.got, f.hint] for f in found]}

    def recall(self, kept: Any) -> None:
        for code, tensor, index, got, hint in kept["findings"]:
            self._found.setdefault("", []).append(Finding(code, tensor, index, got=got, hint=hint))

    def side_files(self, writer: CheckpointWriter) -> list[dict[str, str]]:
        return write_side_files(writer, self.checkpoint, None, {}, False, self._dtype if self._asked else None)

    def findings(self) -> list[Finding]:
        return sorted((f for found in self._found.values() for f in found), key=str)


def _kv_role(tensor: Stored) -> str:
    """k_scale or v_scale, wherever it lies; "" for other tensors."""
    suffix = tensor.name.rpartition(".")[2]
    return suffix if suffix in ("k_scale", "v_scale") else ""


def _fate(role: str) -> tuple[str, str]:
    """What becomes of a tensor by its role; one without a role is kept."""
    if role in _INSIDE:
        return "converted", "part of the dense weight"
    if role in ("input_scale", "k_scale", "v_scale"):
        return "dropped", "a dense checkpoint does not quantize activations or the KV cache"
    return "copied", "the same"


def _config_dtype(checkpoint: Checkpoint) -> str:
    named = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype"))
    return named if named in ("float32", "bfloat16", "float16") else "bfloat16"


def _rows(module: Module) -> list[tuple[int, int]]:
    """The ranges of rows in which a weight is made."""
    n, k = module.shape
    by_block = module.kind == "fp8" and fp8_granularity(module) == "block"
    return pieces(n, 4 * k, _PIECE, _BLOCK_ROWS if by_block else 1)


def _part(module: Module, a: int, b: int) -> Module:
    """The module that rows a..b of a quantized one are, without what lies beside its weight."""
    roles = {role: module.roles[role] for role in _INSIDE if role in module.roles}
    roles |= {role: rows_of(roles[role], a, b) for role in _BY_ROW if role in roles}
    if module.kind == "fp8" and fp8_granularity(module) != "tensor":
        rows = _BLOCK_ROWS if fp8_granularity(module) == "block" else 1
        roles["scale"] = rows_of(roles["scale"], a // rows, -(-b // rows))
    return Module(module.name, module.kind, roles)


def _inside_bytes(module: Module) -> int:
    return sum(module.roles[role].nbytes for role in _INSIDE if role in module.roles)


@dataclass(frozen=True)
class _Odd:
    """The values of some rows that are NaN or Inf.

    Attributes:
        count: how many.
        first: row and column of the first.
        infinite: row, column and unrounded value of the first that is Inf.
    """

    count: int = 0
    first: tuple[int, int] = (0, 0)
    infinite: tuple[int, int, float] | None = None


def _dequantize(
    part: Module, row: int, dialect: Dialect, kept: Mapping[str, np.float32 | None], dtype: str, target: Stored
) -> _Odd:
    """Write the dense values of rows, of which the first is ``row``; returns those that are not finite."""
    weight = dialect.read(part, read_tensor, lambda tensor: kept.get(tensor.name))
    values = weight.dequantize("float32")
    if isinstance(weight, Weight) and weight.pre_scale is not None:
        with np.errstate(all="ignore"):
            values *= weight.pre_scale.astype(np.float32)
    with np.errstate(over="ignore"):
        rounded = values.astype(float_dtype(dtype), copy=False)
    write_pieces([(target, rounded)])
    odd = ~np.isfinite(rounded)
    if not odd.any():
        return _Odd()
    first, *_ = np.argwhere(odd)
    infinite = np.argwhere(np.isinf(rounded))[:1]
    found = [(row + int(i), int(j), float(values[i, j])) for i, j in infinite]
    return _Odd(int(odd.sum()), (row + int(first[0]), int(first[1])), found[0] if found else None)


def _finite(tensor: Stored) -> bool:
    """Whether every number of a tensor is."""
    rows = pieces(tensor.shape[0], tensor.nbytes // max(tensor.shape[0], 1), CHUNK) if tensor.shape else [(0, 0)]
    parts = (rows_of(tensor, a, b) if tensor.shape else tensor for a, b in rows)
    return all(np.isfinite(read_tensor(part).astype(np.float32)).all() for part in parts)
