"""``dequantize``: a quantized checkpoint to a dense one, in float32, bfloat16 or float16, by rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from halfbyte import jit
from halfbyte.bundles import Gather
from halfbyte.checkpoint.consistency import quantized
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.writer import CheckpointWriter, Shard, distribute, parse_size, shard_names, write_pieces
from halfbyte.decode import SMALL
from halfbyte.dialects import Dialect
from halfbyte.errors import FormatError, UsageError
from halfbyte.experts import COLUMNS, INTERLEAVED, encode_stacks, expand, model_types, refuse_unordered, spelled
from halfbyte.findings import Finding, Report
from halfbyte.modules import Module, Reading, Stack, fp8_granularity, refuse_broken, refuse_companions
from halfbyte.stored import CHUNK, Stored, View, byte_count, header_dtype, read_tensor, rows_of
from halfbyte.tasks import Job, Progress, Step, Task, Where
from halfbyte.weight import Weight, float_dtype
from halfbyte.writing import File, Work, Writing, opened, pieces, write_checkpoint, write_side_files

_INSIDE = ("codes", "scales", "scale2", "data", "scale", "pre_scale")

_PIECE = 8 << 20
"""Bytes of float32 values that are made at once."""

_VALUE_BYTES = 20
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
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the values of every quantized weight as a dense tensor.

    A pre_scale is folded into its weight, so that the dense layer computes the same function. A stack of experts
    becomes one dense tensor, which lies as the model's definition has it.

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
        reading: how the NVFP4 weights of ``src`` are stored, where that is not what their dialect says.
        progress: told of source bytes done.

    Returns:
        A report; its facts are "src", "dst", "dtype", "reading" (the options of one that is not what the dialect
        says), "tensors" and "files" (each with what became of it and why), "bytes_in", "bytes_out", "workers",
        "peak_bytes" (the most memory that the run adds) and "seconds".

    Raises:
        HalfbyteError: a source that cannot be read, a target that may not be written. Nothing is left behind.
    """
    how = Writing(dst, force, dry_run, resume, workers, executor, progress)
    limit = parse_size(max_shard_size)
    with opened(src, how, reading) as checkpoint:
        modules = {m.name: m for m in quantized(checkpoint)}
        if not modules:
            raise UsageError("there is nothing quantized in this checkpoint", file=str(checkpoint.path))
        for module in modules.values():
            refuse_broken(module)
            refuse_unordered(module, ("scale2", "scale"))
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
                outputs.append(Stored(_dense_name(module), stored, self._dense_shape(module)))
            for role, tensor in module.roles.items():
                action, reason = _fate(role if inside else _kv_role(tensor))
                listed.append({"tensor": tensor.name, "action": action, "reason": reason})
                if action == "copied":
                    outputs.append(tensor)
        self._made = {_dense_name(m): m for m in modules.values()}
        shards = distribute(outputs, limit)
        self.files = {n: self._file(t) for n, t in zip(shard_names(len(shards)), shards, strict=True)}
        self.options = {"dtype": self._dtype, "asked": dtype, "max_shard_size": limit}
        self.options |= {"reading": checkpoint.reading.options}
        self.facts = {
            "src": str(checkpoint.path),
            "dst": dst,
            "dtype": self._dtype,
            "reading": checkpoint.read_with,
            "tensors": listed,
            "bytes_in": sum(t.nbytes for t in checkpoint.tensors.values()),
            "bytes_out": sum(byte_count(t.dtype, t.shape) for t in outputs),
        }
        self.task_bytes = max(map(self._task_bytes, modules.values()))
        self.code_bytes = jit.code_bytes() if any(map(_is_large, modules.values())) else 0

    def _form(self, module: Module) -> Stack:
        """How a dense stack is to lie: as the model has it."""
        types, stored = model_types(self.checkpoint.headers), module.stack or Stack()
        order = "interleaved" if types & INTERLEAVED else "concatenated" if types else stored.gate_up
        return Stack(bool(types & COLUMNS) if types else stored.columns, order if stored.gate_up else None)

    def _dense_shape(self, module: Module) -> tuple[int, ...]:
        if module.stack is None or not self._form(module).columns:
            return module.shape
        return (*module.shape[:-2], module.shape[-1], module.shape[-2])

    def _task_bytes(self, module: Module) -> int:
        """Memory that one task needs for a module: some rows, or one expert of a stack."""
        made = sum(2 * t.nbytes + t.region for t in module.roles.values() if isinstance(t, View) and t.steps)
        if module.stack is None:
            return _VALUE_BYTES * prod(_part(module, *_rows(module)[0]).shape) + made
        _, n, k = module.shape
        return n * k * (1 + 3 * float_dtype(self._dtype).itemsize) + _VALUE_BYTES * _PIECE // 4 + made

    def _file(self, tensors: list[Stored]) -> File:
        copies = [(t.name, 0, t) for t in tensors if t.file]
        made = sum(_inside_bytes(self._made[t.name]) for t in tensors if not t.file)
        stacks = {
            t.name.removesuffix(".weight"): self._form(self._made[t.name])
            for t in tensors
            if not t.file and self._made[t.name].stack is not None
        }
        stated = {} if model_types(self.checkpoint.headers) else encode_stacks(stacks)
        return File(tensors, made + sum(t.nbytes for *_, t in copies), copies, {"format": "pt"} | stated)

    def steps(self, name: str, shard: Shard) -> list[Step]:
        found = self._found.setdefault(name, [])
        return [self._module(self._made[t.name], shard, found) for t in self.files[name].tensors if not t.file]

    def _module(self, module: Module, shard: Shard, found: list[Finding]) -> Job:
        """The job for one weight; NaN and Inf that come from its scales are carried, and found."""
        tasks = self._by_rows(module, shard) if module.stack is None else self._by_experts(module, module.stack, shard)
        odd = [one for one in (yield tasks) if one.count]
        infinite = next((one.infinite for one in odd if one.infinite), None)
        if infinite and all(_finite(module.roles[r]) for r in ("scale2", "scale", "pre_scale") if r in module.roles):
            raise FormatError(
                f"a value does not fit {self._dtype}",
                file=module.main.file if module.main else None,
                tensor=module.name,
                index=list(infinite[0]),
                got=infinite[1],
                hint="choose another --dtype, or see halfbyte verify",
            )
        if odd:
            hint = "they come from the scales: see halfbyte verify on the source"
            got = f"{sum(one.count for one in odd)} values"
            found.append(Finding("HB118", _dense_name(module), list(odd[0].first), got=got, hint=hint))

    def _by_rows(self, module: Module, shard: Shard) -> list[Task]:
        """The tasks that make a weight in ranges of rows."""
        target, tasks, left = shard.tensors[_dense_name(module)], [], _inside_bytes(module)
        kept = {t.name: self.checkpoint.original(t) for t in module.roles.values()}
        ranges = _rows(module)
        for a, b in ranges:
            part, place = _part(module, a, b), rows_of(target, a, b)
            place = shard.piece(target.name, place.start - target.start, place.nbytes)
            done = left if (a, b) == ranges[-1] else sum(part.roles[r].nbytes for r in _BY_ROW if r in part.roles)
            left -= done
            tasks.append(Task(partial(_dequantize, part, a, self.checkpoint.dialect, kept, self._dtype, place), done))
        return tasks

    def _by_experts(self, module: Module, stack: Stack, shard: Shard) -> list[Task]:
        """The tasks that make a stack expert by expert."""
        target, parts = shard.tensors[_dense_name(module)], expand(module)
        experts = module.shape[0]
        each, halves = target.nbytes // max(experts, 1), len(parts) // max(experts, 1)
        item = float_dtype(self._dtype).itemsize
        form = self._form(module)
        gather, left, tasks = Gather(form, form.columns, item), _inside_bytes(module), []
        for e in range(experts):
            layers = parts[e * halves : (e + 1) * halves]
            place = shard.piece(target.name, e * each, each)
            done = left * (e + 1) // experts - left * e // experts
            make = partial(_dequantize_expert, layers, self.checkpoint.dialect, self._dtype, gather, place)
            tasks.append(Task(make, done))
        return tasks

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


def _is_large(module: Module) -> bool:
    """Whether compiled code decodes it."""
    return module.kind == "nvfp4" and min(module.shape[-2] * module.shape[-1], _PIECE // 4) >= SMALL


def _part(module: Module, a: int, b: int) -> Module:
    """The module that rows a..b of a quantized one are, without what lies beside its weight."""
    roles = {role: module.roles[role] for role in _INSIDE if role in module.roles}
    roles |= {role: rows_of(roles[role], a, b) for role in _BY_ROW if role in roles}
    if module.kind == "fp8" and "scale" in roles and fp8_granularity(module) != "tensor":
        rows = _BLOCK_ROWS if fp8_granularity(module) == "block" else 1
        roles["scale"] = rows_of(roles["scale"], a // rows, -(-b // rows))
    return Module(module.name, module.kind, roles)


def _inside_bytes(module: Module) -> int:
    return sum(module.roles[role].nbytes for role in _INSIDE if role in module.roles)


def _dense_name(module: Module) -> str:
    """The name of the dense tensor that a quantized module becomes."""
    if module.stack is None or module.main is None:
        return module.member("weight")
    parent, _, stem = module.name.rpartition(".")
    if module.main.name == f"{module.name}_weight" and "bias" not in module.roles:
        stem = spelled(module.name).rpartition(".")[2]  # w13_weight is an engine's name: models have gate_up_proj
        return f"{parent}.{stem}" if parent else stem
    return module.main.name.removesuffix("_blocks").replace(".weight_packed", ".weight")


@dataclass(frozen=True)
class _Odd:
    """The values of some rows that are NaN or Inf.

    Attributes:
        count: how many.
        first: the place of the first: row and column, after the expert where there is one.
        infinite: the place and the unrounded value of the first that is Inf.
    """

    count: int = 0
    first: tuple[int, ...] = ()
    infinite: tuple[tuple[int, ...], float] | None = None


_Kept: TypeAlias = Mapping[str, Any | None]
"""Tensor name -> the numbers whose reciprocals it stores, where the file remembers them."""


def _dequantize(part: Module, row: int, dialect: Dialect, kept: _Kept, dtype: str, target: Stored) -> _Odd:
    """Write the dense values of rows, of which the first is ``row``; returns those that are not finite."""
    values, rounded = _values(part, dialect, kept, dtype)
    write_pieces([(target, rounded)])
    return _odd(values, rounded, lambda at: (row + at[0], at[1]))


def _dequantize_expert(layers: Sequence[Module], dialect: Dialect, dtype: str, gather: Gather, target: Stored) -> _Odd:
    """Write the dense values of one expert of a stack, made from ranges of rows of its layers."""
    made, odd = [], _Odd()
    for layer in layers:
        whole = np.empty(layer.shape, float_dtype(dtype))
        for a, b in _rows(layer):
            part = _part(layer, a, b)
            values, whole[a:b] = _values(part, dialect, {}, dtype)
            found = _odd(values, whole[a:b], (part.main or Stored("", "", ())).place)
            odd = odd if odd.count or not found.count else found
        made.append(whole)
    write_pieces([(target, gather(made))])
    return odd


def _values(part: Module, dialect: Dialect, kept: _Kept, dtype: str) -> tuple[Any, Any]:
    """The values of a module of few rows in f32, with its pre_scale, and rounded to ``dtype``."""
    weight = dialect.read(part, read_tensor, lambda tensor: kept.get(tensor.name))
    values = weight.dequantize("float32")
    if isinstance(weight, Weight) and weight.pre_scale is not None:
        with np.errstate(all="ignore"):
            values *= weight.pre_scale.astype(np.float32)
    with np.errstate(over="ignore"):
        return values, values.astype(float_dtype(dtype), copy=False)


def _odd(values: Any, rounded: Any, place: Callable[[Sequence[int]], Sequence[int]]) -> _Odd:
    odd = ~np.isfinite(rounded)
    if not odd.any():
        return _Odd()
    first, *_ = np.argwhere(odd)
    infinite = np.argwhere(np.isinf(rounded))[:1]
    found = [(tuple(place([int(i), int(j)])), float(values[i, j])) for i, j in infinite]
    return _Odd(int(odd.sum()), tuple(place([int(i) for i in first])), found[0] if found else None)


def _finite(tensor: Stored) -> bool:
    """Whether every number of a tensor is."""
    rows = pieces(tensor.shape[0], tensor.nbytes // max(tensor.shape[0], 1), CHUNK) if tensor.shape else [(0, 0)]
    parts = (rows_of(tensor, a, b) if tensor.shape else tensor for a, b in rows)
    return all(np.isfinite(read_tensor(part).astype(np.float32)).all() for part in parts)
