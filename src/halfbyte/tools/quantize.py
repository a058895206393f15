"""``quantize``: a dense checkpoint to NVFP4, in pieces of some megabytes."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from halfbyte import jit
from halfbyte.casts import dense_rows
from halfbyte.checkpoint.consistency import config_facts, quantized
from halfbyte.checkpoint.outputs import Made, source_bytes
from halfbyte.checkpoint.reader import Checkpoint, encode_provenance
from halfbyte.checkpoint.writer import CheckpointWriter, Shard, distribute, parse_size, shard_names, write_pieces
from halfbyte.dialects import Dialect, Output, dialect_named
from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.experts import expand
from halfbyte.findings import Finding, Report
from halfbyte.modules import QUANTIZED, Module, refuse_broken, refuse_companions
from halfbyte.numerics import BLOCK, reciprocal
from halfbyte.patterns import Patterns, fused_group, reason_to_skip
from halfbyte.recipes import LIKES, Like, Recipe, TensorScale, finite_amax, quantize_array, recipe_named
from halfbyte.recipes.base import SMALL
from halfbyte.stored import DTYPE_BITS, FLOATS, Stored, View, byte_count
from halfbyte.tasks import Job, Progress, Step, Task, Where
from halfbyte.tools.base import idle
from halfbyte.writing import File, Work, Writing, opened, pieces, write_checkpoint, write_side_files

_WHOLE = 32 << 20
"""Bytes of a dense tensor that is read once; a larger one is read twice, for its largest value and to encode it."""

_PIECE = 16 << 20
"""Bytes of it that are read at once then."""

_SCRATCH = 16 << 20
"""Memory for the temporaries of a recipe, which works on a quarter of a million values at a time."""


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    recipe: str = "rtn",
    like: Like = "modelopt",
    to: str = "modelopt",
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    share_scale2: bool = False,
    max_shard_size: str = "5GB",
    force: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    workers: int | None = None,
    executor: Where = None,
    progress: Progress | None = None,
) -> Report:
    """Quantize the weights of a dense, FP8 or MXFP4 checkpoint and write it in a dialect.

    Args:
        src: a directory, a file, or a hub name.
        dst: the directory to make.
        recipe, like: as for ``halfbyte.quantize``.
        to: the dialect to write, "modelopt" or "compressed-tensors".
        targets: patterns of modules to quantize instead of the default: every dense, FP8 or MXFP4 weight with two
            axes and K % 16 == 0, but embeddings, ``lm_head`` and routers. Stacks of experts count as the layers that
            they hold, and are written as such.
        ignore: patterns of modules to leave dense.
        share_scale2: one scale2 for the parts that engines fuse (q/k/v, gate/up).
        max_shard_size: such as "5GB".
        force: replace ``dst`` if it exists; start over where a killed run has left unfinished work.
        dry_run: plan, sizes and peak memory; writes nothing.
        resume: go on with what a killed run of the same call has left, if there is any.
        workers: tasks at once; by default one for each core.
        executor: runs the tasks instead of threads; "processes" starts some where there is enough work, which a
            script must then call for under ``if __name__ == "__main__":``.
        progress: told of source bytes done.

    Returns:
        A report; its facts are "src", "dst", "dialect", "quantized", "skipped" and "dropped" (name and reason of
        each), "files", "bytes_in", "bytes_out", "workers", "peak_bytes" (the most memory that the run adds) and
        "seconds".

    Raises:
        HalfbyteError: a source that cannot be read or quantized, a target that may not be written.
            Nothing is left behind.
    """
    how = Writing(dst, force, dry_run, resume, workers, executor, progress)
    chosen, target, size = recipe_named(recipe), dialect_named(to), parse_size(max_shard_size)
    if like not in LIKES:
        raise UsageError("unknown peer", got=repr(like), expected=" or ".join(LIKES))
    with opened(src, how) as checkpoint:
        wanted, unwanted = Patterns(targets), Patterns(ignore)
        modules, skipped = _choose(checkpoint, wanted, unwanted)
        work = _Quantize(checkpoint, target, chosen, like, modules, share_scale2, size, idle(wanted, unwanted))
        work.facts |= {"dst": str(dst), "skipped": skipped}
        return write_checkpoint(work, how)


def _choose(
    checkpoint: Checkpoint, wanted: Patterns, unwanted: Patterns
) -> tuple[dict[str, Module], list[dict[str, str]]]:
    """The modules to quantize by name, and the other weights with the reason why not."""
    if done := [m for m in quantized(checkpoint) if m.kind == "nvfp4"]:
        raise UsageError(
            "the checkpoint is quantized already",
            file=str(checkpoint.path),
            tensor=done[0].main.name if done[0].main else done[0].name,
            got=done[0].kind,
            hint="run halfbyte dequantize first, or halfbyte convert to change the dialect",
        )
    chosen, skipped = {}, []
    for module in checkpoint.parts:
        reason = _reason_to_skip(module, wanted, unwanted)
        if module.kind in QUANTIZED:
            refuse_broken(module)
        if reason is None:
            if module.kind != "dense":
                refuse_companions(module, (), "would be lost")
            chosen[module.name] = module
        elif module.main is not None:
            skipped.append({"name": module.main.name, "reason": reason})
    if not chosen:
        hint = "see halfbyte inspect" if wanted else "see halfbyte inspect, or name targets"
        raise UsageError("there is no weight to quantize", file=str(checkpoint.path), hint=hint)
    return chosen, list({entry["name"]: entry for entry in skipped}.values())


def _reason_to_skip(module: Module, targets: Patterns, ignore: Patterns) -> str | None:
    if module.kind not in ("dense", "fp8", "mxfp4"):
        return "a format that is not read" if module.kind == "unread" else "not a weight"
    reason = reason_to_skip(module.name, module.shape, targets, ignore)
    if module.kind == "dense" and len(module.shape) == 2 and module.roles["data"].dtype not in FLOATS:
        return f"dtype {module.roles['data'].dtype}"
    return reason


def _shared(modules: Mapping[str, Module]) -> dict[str, list[Module]]:
    """Module name -> all parts of the layer that engines fuse it into."""
    groups: dict[str, list[Module]] = defaultdict(list)
    for name, module in modules.items():
        if group := fused_group(name):
            groups[group[0]].append(module)
    return {part.name: parts for parts in groups.values() for part in parts}


class _Quantize(Work):
    """Codes, scales and scale2 of the chosen modules, and copies of all else."""

    command = "quantize"

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Dialect,
        recipe: Recipe,
        like: Like,
        modules: Mapping[str, Module],
        share: bool,
        size: int,
        findings: list[Finding],
    ) -> None:
        self.checkpoint, self.target, self.recipe, self.like = checkpoint, target, recipe, like
        self._modules, self._found = modules, findings
        self._groups = _shared(modules)
        self._shared = self._groups if share else {}
        self._scales: dict[str, TensorScale] = {}
        # The stored number and the recipe's are reciprocals of each other, so the one may not give the other back.
        self._may_round = target.divides != (like == "compressed-tensors")
        parts = _whole_stacks(checkpoint, modules)
        carried = [o for module in parts for o in self._beside(module)]
        self._made = Made.of(checkpoint, carried)
        beside = iter(self._made.outputs)
        outputs: list[Stored] = []
        for module in parts:
            outputs += self._names(module).values() if self._chosen(module) else ()
            outputs += [next(beside).stored for _ in self._beside(module)]
        self._outputs = {o.stored.name: o for o in self._made.outputs}
        self._others = [m for m in parts if not self._chosen(m)]
        self._kept = {m.name: m for m in self._others if m.kind in QUANTIZED}
        shards = distribute(outputs, size)
        owners = {t.name: m for m in modules.values() for t in self._names(m).values()}
        self._members = {
            name: list({owners[t.name].name: owners[t.name] for t in tensors if t.name in owners}.values())
            for name, tensors in zip(shard_names(len(shards)), shards, strict=True)
        }
        self.files = {n: self._file(n, t) for n, t in zip(shard_names(len(shards)), shards, strict=True)}
        self.options = {
            "recipe": recipe.name,
            "like": like,
            "to": target.name,
            "share_scale2": share,
            "max_shard_size": size,
            "quantized": list(modules),
        }
        self.facts = {
            "src": str(checkpoint.path),
            "dialect": target.name,
            "recipe": recipe.name,
            "quantized": [{"name": m.name, "shape": list(m.shape)} for m in modules.values()],
            "dropped": [
                {"name": m.roles["input_scale"].name, "reason": "of FP8 activations"}
                for m in modules.values()
                if "input_scale" in m.roles
            ],
            "bytes_in": sum(t.nbytes for t in checkpoint.tensors.values()),
            "bytes_out": sum(byte_count(t.dtype, t.shape) for t in outputs),
        }
        split = [rows for m in modules.values() for rows in _split(m)]
        self.task_bytes = max(_SCRATCH + max(rows.task_bytes for rows in split), self._made.task_bytes)
        self.code_bytes = jit.code_bytes() if max(rows.count for rows in split) >= SMALL else 0

    def _names(self, module: Module) -> dict[str, Stored]:
        """Role -> tensor to write for a quantized module."""
        n, k = module.shape
        suffix = self.target.suffixes["nvfp4"]
        return {
            "codes": Stored(module.member(suffix["codes"]), "U8", (n, k // 2)),
            "scales": Stored(module.member(suffix["scales"]), "F8_E4M3", (n, k // BLOCK)),
            "scale2": Stored(module.member(suffix["scale2"]), "F32", self.target.scalar_shape),
        }

    def _chosen(self, module: Module) -> bool:
        return self._modules.get(module.name) is module

    def _beside(self, module: Module) -> list[Output]:
        """What is written for a module that stays, or beside one that is quantized."""
        if not self._chosen(module):
            return self.target.outputs(module, self.checkpoint.dialect)
        roles = {role: t for role, t in module.roles.items() if role in ("bias", "k_scale", "v_scale")}
        return self.target.outputs(Module(module.name, "dense", roles, module.unknown), self.checkpoint.dialect)

    def _file(self, name: str, tensors: Sequence[Stored]) -> File:
        names = {t.name for t in tensors}
        carried = [self._outputs[t.name] for t in tensors if t.name in self._outputs]
        mine = self._members[name]
        encoded = sum(_weight_bytes(m) for m in mine if self._names(m)["codes"].name in names)
        room = {self._names(m)["scale2"].name: np.float32(0) for m in mine} if self._may_round else {}
        nbytes = encoded + source_bytes(carried)
        return File(tensors, nbytes, self._made.copies(carried), room=encode_provenance(room))

    def steps(self, name: str, shard: Shard) -> Sequence[Step]:
        carried = [self._outputs[t.name] for t in self.files[name].tensors if t.name in self._outputs]
        return [self._shard(self._members[name], shard), *self._made.tasks(carried, shard)]

    def _shard(self, members: Sequence[Module], shard: Shard) -> Job:
        """The job for the modules of a shard: codes and scales, then all numbers at once."""
        groups: dict[str, list[Module]] = defaultdict(list)
        for module in members:
            groups[self._shared.get(module.name, [module])[0].name].append(module)
        yield [self._group(group, shard) for group in groups.values()]
        numbers = []
        for module in members:
            name = self._names(module)["scale2"].name
            if name in shard.tensors:
                stored = self._stored_number(self._scales[module.name])
                numbers.append((shard.piece(name), np.full(self.target.scalar_shape, stored, np.float32)))
        yield [Task(partial(write_pieces, numbers))]

    def _group(self, members: Sequence[Module], shard: Shard) -> Job:
        """The job for the modules of a shard that have one scale2, for which all parts of their layer count."""
        first = members[0]
        parts = self._shared.get(first.name, [first])
        written = any(self._names(first)[role].name in shard.tensors for role in ("codes", "scales"))
        if first.name not in self._scales and (len(parts) > 1 or len(_split(first)) > 1 or not written):
            amax = yield [Task(partial(_amax, rows)) for part in parts for rows in _split(part)]
            scale = self.recipe.tensor_scale(np.float32(max(amax)), self.like)
            self._scales.update({part.name: scale for part in parts})
        used = yield [task for module in members for task in self._encoders(module, shard)]
        if first.name not in self._scales:
            self._scales[first.name] = used[0]

    def _encoders(self, module: Module, shard: Shard) -> list[Task]:
        """The tasks that write the codes and scales of a module as far as they are of this shard."""
        names = {role: stored.name for role, stored in self._names(module).items()}
        wanted = [role for role in ("codes", "scales") if names[role] in shard.tensors]
        scale, k = self._scales.get(module.name), module.shape[1]
        tasks = []
        for rows in _split(module) if wanted else ():
            width = {"codes": k // 2, "scales": k // BLOCK}
            targets = {
                role: shard.piece(names[role], rows.a * width[role], (rows.b - rows.a) * width[role]) for role in wanted
            }
            encode = partial(_encode, rows, self.recipe.name, self.like, scale, targets)
            tasks.append(Task(encode, rows.nbytes if "codes" in wanted else 0))
        return tasks

    def ending(self, name: str) -> tuple[dict[str, str], Any]:
        members, names = self._members[name], {t.name for t in self.files[name].tensors}
        originals: dict[str, np.float32] = {}
        for module in members if self._may_round else ():
            scale, tensor = self._scales[module.name], self._names(module)["scale2"].name
            other = scale.scale2 if self.target.divides else scale.divisor
            if tensor in names and other is not None:
                stored = self._stored_number(scale)
                if reciprocal(stored) != other and reciprocal(other) == stored:
                    originals[tensor] = other
        kept = {
            m.name: [_bits(s) for s in (self._scales[m.name].scale2, self._scales[m.name].divisor)] for m in members
        }
        return encode_provenance(originals), {"scales": kept}

    def recall(self, kept: Any) -> None:
        for name, (scale2, divisor) in kept["scales"].items():
            self._scales[name] = TensorScale(_number(scale2), None if divisor is None else _number(divisor))

    def _stored_number(self, scale: TensorScale) -> np.float32:
        if not self.target.divides:
            return scale.scale2
        return np.float32(reciprocal(scale.scale2)) if scale.divisor is None else scale.divisor

    def side_files(self, writer: CheckpointWriter) -> list[dict[str, str]]:
        modules = {name: Module(name, "nvfp4", self._names(m)) for name, m in self._modules.items()} | self._kept
        section, extra = self.target.config(config_facts(self.checkpoint, modules, self._others))
        return write_side_files(writer, self.checkpoint, section, extra, False)

    def findings(self) -> list[Finding]:
        """Idle patterns; and, when their scales are known, parts that engines fuse and that differ in scale2."""
        groups = list({id(parts): parts for parts in self._groups.values()}.values()) if self._scales else []
        unequal = sum(len({float(self._scales[m.name].scale2) for m in parts}) > 1 for parts in groups)
        hint = "pass --share-scale2 for engines that fuse them"
        got = f"{unequal} of {len(groups)} fused layers (q/k/v, gate/up)"
        return self._found + ([Finding("HB110", got=got, hint=hint)] if unequal else [])


def _whole_stacks(checkpoint: Checkpoint, chosen: Mapping[str, Module]) -> list[Module]:
    """The modules; a stack of experts counts as the layers that it holds, unless it is dense and stays so."""
    found: list[Module] = []
    parts = iter(checkpoint.parts)
    for module in checkpoint.modules:
        layers = [next(parts) for _ in expand(module)]
        split = module.kind != "dense" or any(chosen.get(m.name) is m for m in layers)
        found += layers if split or module.stack is None else [module]
    return found


def _weight_bytes(module: Module) -> int:
    """Bytes of the tensors that become codes and scales."""
    return sum(t.nbytes for role, t in module.roles.items() if role in ("data", "scale", "codes", "scales"))


@dataclass(frozen=True)
class _Rows:
    """Rows a..b of a module, read in one piece.

    Attributes:
        module: what is quantized.
        a, b: the rows.
        nbytes: source bytes.
    """

    module: Module
    a: int
    b: int
    nbytes: int

    @property
    def count(self) -> int:
        """Of values."""
        return (self.b - self.a) * self.module.shape[1]

    @property
    def task_bytes(self) -> int:
        """Memory for the rows and for what is made of them."""
        stored = 0 if self.module.kind == "dense" else self.nbytes
        made = sum(t.nbytes + t.region for t in self.module.roles.values() if isinstance(t, View) and t.steps)
        return self.count * _item(self.module) + self.count * 9 // 16 + stored + made

    def read(self) -> Any:
        """(b - a, K) in the dtype of the module, or f32.

        Raises:
            HalfbyteError: the file cannot be read, or the rows do not form a weight.
        """
        return dense_rows(self.module, self.a, self.b)


def _item(module: Module) -> int:
    """Bytes of a value as it is read: FP8 and MXFP4 become f32, through another f32 array."""
    return DTYPE_BITS[module.roles["data"].dtype] // 8 if module.kind == "dense" else 8


def _split(module: Module) -> list[_Rows]:
    """A module in the pieces in which it is read."""
    (n, k), nbytes = module.shape, _weight_bytes(module)
    width = k * _item(module)
    if n * width <= _WHOLE:
        return [_Rows(module, 0, n, nbytes)]
    ranges = pieces(n, width, _PIECE, 1 if module.kind == "dense" else 128)
    return [_Rows(module, a, b, nbytes * b // n - nbytes * a // n) for a, b in ranges]


def _amax(rows: _Rows) -> np.float32:
    with _located(rows):
        return finite_amax(rows.read())


def _encode(
    rows: _Rows, recipe: str, like: Like, scale: TensorScale | None, targets: Mapping[str, Stored]
) -> TensorScale:
    """Write the codes and scales of rows; a scale2 that is not given is that of these rows. Returns it."""
    chosen, dense = recipe_named(recipe), rows.read()
    with _located(rows):
        if scale is None:
            scale = chosen.tensor_scale(finite_amax(dense), like)
        arrays = dict(zip(("codes", "scales"), quantize_array(dense, chosen, scale, like), strict=True))
    write_pieces([(target, arrays[role]) for role, target in targets.items()])
    return scale


@contextlib.contextmanager
def _located(rows: _Rows) -> Iterator[None]:
    """Give an error about rows the tensor's name and the position in it."""
    try:
        yield
    except HalfbyteError as error:
        main = rows.module.main
        if main is not None:
            error.file, error.tensor = main.file, main.name
            if error.index is not None:
                error.index = main.place([error.index[0] + rows.a, *error.index[1:]])
        raise


def _bits(number: np.float32 | None) -> int | None:
    return None if number is None else int(number.view(np.uint32))


def _number(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)
