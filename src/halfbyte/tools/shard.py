"""``shard``: a checkpoint for each rank of tensor or expert parallelism, cut without changing a bit."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.checkpoint.consistency import header_findings
from halfbyte.checkpoint.outputs import Made, source_bytes
from halfbyte.checkpoint.reader import PROVENANCE, Checkpoint, encode_provenance, open_checkpoint
from halfbyte.checkpoint.writer import CheckpointWriter, Shard
from halfbyte.cuts import Cut, Plan, expert_plan, tensor_plan
from halfbyte.dialects import Output, Piece
from halfbyte.errors import FormatError, UsageError
from halfbyte.experts import METADATA, encode_stacks, expand
from halfbyte.findings import Finding, Report, in_order
from halfbyte.modules import QUANTIZED, SHARD_METADATA, Module, Reading, refuse_broken
from halfbyte.numerics import BLOCK
from halfbyte.patterns import Patterns
from halfbyte.stored import CHUNK, DTYPE_BITS, Select, Stored, View, byte_count, read_tensor
from halfbyte.tasks import Meter, Progress, Step, Where
from halfbyte.tools.base import idle, same_bytes
from halfbyte.weight import Weight
from halfbyte.writing import File, Work, Writing, dropped_files, opened, write_checkpoint

_RUN = 64 << 10
"""Bytes that are copied by themselves; shorter runs are gathered in memory."""
_BIAS = "of row-parallel layers whole on every rank: add it once"


def shard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    tp: int | None = None,
    ep: int | None = None,
    multiple: int = BLOCK,
    vocab: bool = False,
    column: Sequence[str] = (),
    row: Sequence[str] = (),
    keep: Sequence[str] = (),
    gate_up: str | None = None,
    prove: bool = True,
    force: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    workers: int | None = None,
    executor: Where = None,
    progress: Progress | None = None,
) -> Report:
    """Write a checkpoint of the same dialect for each rank, as ``DST/rank-00000-of-0000N``.

    Args:
        src: a directory, a file, or a hub name.
        dst: the directory to make.
        tp: ranks of tensor parallelism; or
        ep: ranks of expert parallelism: each has a contiguous range of the experts. Single experts keep their
            numbers, a stack holds those of the rank alone; the metadata tell which.
        multiple: what K of a row-parallel NVFP4 or MXFP4 layer is cut at multiples of, itself a multiple of 16.
        vocab: whether embeddings and output heads are cut along the vocabulary, too.
        column, row, keep: patterns of modules that are column-parallel, row-parallel or whole on every rank,
            whatever their names; the first that matches in the order keep, column, row counts.
        gate_up: the order of gate and up in stacks, where neither metadata nor the model's definition tell it.
        prove: read all ranks back and compare them with the source before the result gets its name.
        force: replace ``dst`` if it exists; start over where a killed run has left unfinished work.
        dry_run: plan, sizes and peak memory; writes nothing.
        resume: go on with what a killed run of the same call has left, if there is any.
        workers: tasks at once; by default one for each core.
        executor: runs the tasks instead of threads.
        progress: told of bytes written, and with ``prove`` of bytes compared.

    Returns:
        A report; its facts are "src", "dst", "dialect", "mode" ("tensor" or "expert"), "degree", "ranks" (each with
        its directory, its tensors and their bytes), "modules" (each that is cut or dealt, and how), "whole" (layers
        that are not cut though their names say so, and why), "bytes_out", "workers", "peak_bytes", "files", "proven"
        (tensors compared) and "seconds".

    Raises:
        HalfbyteError: a layer that does not divide, naming it, its axis and the degrees that do; a source that cannot
            be read, a target that may not be written, or a proof that failed. Nothing is left behind.
    """
    how = Writing(dst, force, dry_run, resume, workers, executor, progress)
    degree = _degree(tp, ep)
    if multiple < BLOCK or multiple % BLOCK:
        raise UsageError(f"columns are cut at multiples of {BLOCK}", got=f"multiple = {multiple}")
    patterns = Patterns(keep), Patterns(column), Patterns(row)
    if ep is not None and (vocab or multiple != BLOCK or any(patterns)):
        raise UsageError("vocab, multiple and patterns are for tensor parallelism", hint="pass --tp instead of --ep")
    with opened(src, how, Reading(gate_up=gate_up)) as checkpoint:
        _refuse_source(checkpoint)
        if ep is not None:
            plan = expert_plan(checkpoint.modules, degree)
        else:
            plan = tensor_plan(checkpoint.modules, checkpoint.config, degree, multiple, vocab, patterns)
        found = idle(*patterns)
        return write_checkpoint(_Shard(checkpoint, plan, prove, str(dst), found), how)


def _degree(tp: int | None, ep: int | None) -> int:
    if (tp is None) == (ep is None):
        raise UsageError("pass the number of ranks of one kind", expected="--tp N or --ep N")
    degree = tp or ep or 0
    if not 1 <= degree <= 99_999:
        raise UsageError("not a number of ranks", got=degree, expected="1 or more")
    return degree


def _refuse_source(checkpoint: Checkpoint) -> None:
    stated = checkpoint.headers.metadata.get(SHARD_METADATA)
    file = str(checkpoint.path)
    if stated is not None:
        raise UsageError("this is the part of one rank already", file=file, got=stated[:80], hint="shard the whole")
    names: set[str] = set()
    for module in checkpoint.modules:
        if module.name in names:
            raise FormatError("a module is stored twice", file=file, tensor=module.name)
        names.add(module.name)
        if any(isinstance(t, View) for t in module.roles.values()):
            hint = "run halfbyte convert --to modelopt first"
            raise UsageError("packed buffers are not cut", file=file, got=module.name, hint=hint)
        if module.kind in QUANTIZED:
            refuse_broken(module)


def _cut_output(tensor: Stored, cut: Cut, rank: int, degree: int) -> Output:
    """What a rank has of a tensor, as copies of long runs or as bytes gathered from short ones."""
    ranges = cut.ranges(rank, degree)
    shape = list(tensor.shape)
    shape[cut.axis] = sum(b - a for a, b in ranges)
    made = Stored(tensor.name, tensor.dtype, tuple(shape))
    bits = prod(tensor.shape[cut.axis + 1 :]) * DTYPE_BITS[tensor.dtype]
    runs = [(a * bits // 8, b * bits // 8) for a, b in ranges]
    width, outer = tensor.shape[cut.axis] * bits // 8, prod(tensor.shape[: cut.axis])
    size = sum(b - a for a, b in runs)
    pieces = []
    if outer == 1 or min(b - a for a, b in runs) >= _RUN:
        at = 0
        for i in range(outer):
            for a, b in runs:
                pieces.append(Piece(at, (_view(tensor, i * width + a, b - a),)))
                at += b - a
    else:
        step = max(1, CHUNK // max(width, 1))
        for i in range(0, outer, step):
            count = min(step, outer - i)
            region = _view(tensor, i * width, count * width)
            some = replace(region, shape=(count * size,), nbytes=count * size, steps=(Select(width, tuple(runs)),))
            pieces.append(Piece(i * size, (some,)))
    if len(pieces) == 1 and outer == 1:  # a number may have provenance, which goes by its shape
        only = pieces[0].sources[0]
        pieces = [Piece(0, (replace(only, dtype=tensor.dtype, shape=tuple(shape)),))]
    return Output(made, tuple(pieces) or (Piece(0, (_view(tensor, 0, 0),)),))


def _view(tensor: Stored, start: int, nbytes: int) -> View:
    """Some bytes of a tensor."""
    known = {f.name: getattr(tensor, f.name) for f in fields(Stored)}
    known |= {"dtype": "U8", "shape": (nbytes,), "start": tensor.start + start, "nbytes": nbytes}
    return View(**known, region=nbytes)


class _Shard(Work):
    """Copies of whole tensors and of parts of others, rank by rank."""

    command = "shard"

    def __init__(self, checkpoint: Checkpoint, plan: Plan, prove: bool, dst: str, found: list[Finding]) -> None:
        self.checkpoint, self._cutting, self._prove, self._found = checkpoint, plan, prove, found
        self.index = str(checkpoint.index or "")
        self._stacks = {m.name: m.stack for m in checkpoint.modules if m.stack is not None}
        self._module_of = {t.name: m.name for m in checkpoint.modules for t in m.tensors}
        self._made: dict[str, Made] = {}
        self._members: dict[str, list[Output]] = {}
        self.files = {}
        ranks: list[dict[str, Any]] = []
        for rank in range(plan.degree):
            made = Made.of(checkpoint, self._outputs(rank))
            nbytes = sum(byte_count(o.stored.dtype, o.stored.shape) for o in made.outputs)
            ranks.append({"rank": rank, "path": self._folder(rank), "tensors": len(made.outputs), "bytes": nbytes})
            members: dict[str, list[Output]] = defaultdict(list)
            for output in made.outputs:
                members[f"{self._folder(rank)}/{os.path.basename(output.sources[0].file)}"].append(output)
            for name, some in members.items():
                self._made[name], self._members[name] = made, some
                copies, metadata = made.copies(some), self._metadata(rank, some, made.originals)
                self.files[name] = File([o.stored for o in some], source_bytes(some), copies, metadata)
            self.task_bytes = max(self.task_bytes, made.task_bytes)
        total = sum(entry["bytes"] for entry in ranks)
        self.checked_bytes = total if prove else 0
        self.check_bytes = 2 * CHUNK + _proof_bytes(checkpoint, plan)
        self.options = {
            "mode": plan.mode,
            "degree": plan.degree,
            "cuts": {name: {r: [c.axis, *c.parts] for r, c in cuts.items()} for name, cuts in plan.cuts.items()},
            "reading": checkpoint.reading.options,
        }
        self.facts = {"src": str(checkpoint.path), "dst": dst, "dialect": checkpoint.dialect_name}
        self.facts |= {"mode": plan.mode, "degree": plan.degree, "ranks": ranks, "modules": self._listed()}
        self.facts |= {"whole": dict(plan.whole), "bytes_out": total}

    def _folder(self, rank: int) -> str:
        return f"rank-{rank:05d}-of-{self._cutting.degree:05d}"

    def _outputs(self, rank: int) -> list[Output]:
        outputs = []
        for module in self.checkpoint.modules:
            if self._cutting.owners.get(module.name, rank) != rank:
                continue
            cuts = self._cutting.cuts.get(module.name, {})
            for role, tensor in module.roles.items():
                cut = cuts.get(role)
                whole = Output.of(Stored(tensor.name, tensor.dtype, tensor.shape), tensor)
                outputs.append(whole if cut is None else _cut_output(tensor, cut, rank, self._cutting.degree))
            outputs += [Output.of(Stored(t.name, t.dtype, t.shape), t) for t in module.unknown]
        return outputs

    def _metadata(self, rank: int, members: Sequence[Output], originals: Mapping[str, Any]) -> dict[str, str]:
        files, plan = {t.file for o in members for t in o.sources}, self._cutting
        merged = {k: v for s in self.checkpoint.shards if s.file in files for k, v in s.metadata.items()}
        merged.pop(PROVENANCE, None)
        merged.pop(METADATA, None)
        here = sorted({self._module_of[o.stored.name] for o in members})
        stated: dict[str, Any] = {"mode": plan.mode, "rank": rank, "degree": plan.degree}
        if plan.mode == "expert":
            share = {parent: count // plan.degree for parent, count in plan.counts.items()}
            stated["experts"] = {
                parent: [rank * share[parent], (rank + 1) * share[parent], count]
                for parent, count in plan.counts.items()
                if any(name.startswith(f"{parent}.") for name in here)
            }
        else:
            stated |= {how: [n for n in here if plan.parallel.get(n) == how] for how in ("column", "row")}
            stated["bias"] = _BIAS
        kept = {o.stored.name: originals[o.stored.name] for o in members if o.stored.name in originals}
        stacks = {name: self._stacks[name] for name in here if name in self._stacks}
        text = json.dumps(stated, separators=(",", ":"), ensure_ascii=False)
        return merged | encode_provenance(kept) | encode_stacks(stacks) | {SHARD_METADATA: text}

    def _listed(self) -> list[dict[str, Any]]:
        plan = self._cutting
        listed: list[dict[str, Any]] = []
        for module in self.checkpoint.modules:
            if module.name in plan.cuts:
                how = plan.parallel[module.name]
                axis = {"column": "N", "row": "K", "experts": "E"}[how]
                whole = how == "row" and "bias" in module.roles
                entry = {"name": module.name, "kind": module.kind, "shape": list(module.shape), "parallel": how}
                listed.append(entry | {"axis": axis} | ({"bias": "on every rank"} if whole else {}))
            elif module.name in plan.owners:
                owner = plan.owners[module.name]
                entry = {"name": module.name, "kind": module.kind, "shape": list(module.shape)}
                listed.append(entry | {"parallel": "experts", "rank": owner})
        return listed

    def steps(self, name: str, shard: Shard) -> Sequence[Step]:
        return self._made[name].tasks(self._members[name], shard)

    def side_files(self, writer: CheckpointWriter) -> list[dict[str, str]]:
        checkpoint = self.checkpoint
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        names = checkpoint.carried_files()
        names += [Path(n) for n in ("config.json", "hf_quant_config.json") if (folder / n).is_file()]
        for rank in range(self._cutting.degree):
            for name in names:
                writer.carry(folder / name, self._folder(rank) / name)
        listed = [{"file": str(name), "action": "copied", "reason": "to every rank"} for name in names]
        return listed + dropped_files(checkpoint)

    def check(self, sealed: Path, meter: Meter) -> dict[str, Any]:
        if not self._prove:
            return {}
        folders = [sealed / self._folder(rank) for rank in range(self._cutting.degree)]
        return {"proven": _Proof(self.checkpoint, self._cutting, folders, meter).run()}

    def findings(self) -> tuple[Finding, ...]:
        found = [f for f in header_findings(self.checkpoint) if f.severity != "note"]
        return in_order([*found, *self._found])


# --- the proof


def _proof_bytes(checkpoint: Checkpoint, plan: Plan) -> int:
    """Memory to prove a layer that is cut: it, a rank's part twice, and one of them as it is compared."""
    sizes = [0]
    for module in checkpoint.modules:
        if plan.mode == "tensor" and module.name in plan.cuts:
            experts = module.shape[0] if module.stack is not None else 1
            sizes.append(4 * sum(t.nbytes for t in module.tensors) // max(experts, 1))
    return max(sizes)


class _Proof:
    """Every rank read back: whole tensors byte by byte, parts as NumPy and Weight cut the layers of the source."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, folders: Sequence[Path], meter: Meter) -> None:
        self._checkpoint, self._plan, self._meter, self._compared = checkpoint, plan, meter, 0
        try:
            self._ranks = [open_checkpoint(folder, checkpoint.reading) for folder in folders]
        except FormatError as error:
            raise _failed(error.message, error.tensor, error.got) from None

    def run(self) -> int:
        """Compare all; returns how many tensors of the ranks.

        Raises:
            FormatError: the proof failed.
        """
        modules = [{(m.kind, m.name): m for m in rank.modules} for rank in self._ranks]
        for module in self._checkpoint.modules:
            owner = self._plan.owners.get(module.name)
            twins = [of.pop((module.kind, module.name), None) for of in modules]
            for rank, twin in enumerate(twins):
                if owner not in (None, rank):
                    if twin is not None:
                        raise _failed("an expert is on two ranks", module.name)
                elif twin is None or set(twin.roles) != set(module.roles) or twin.stack != module.stack:
                    raise _failed("a module is not as in the source", module.name)
            self._module(module, twins)
        more = [name for of in modules for _, name in of]
        if more:
            raise _failed("a rank holds more than the source", min(more))
        return self._compared

    def _module(self, module: Module, twins: Sequence[Module | None]) -> None:
        found = [(rank, twin) for rank, twin in zip(self._ranks, twins, strict=True) if twin is not None]
        held = [twin for _, twin in found]
        cuts, how = self._plan.cuts.get(module.name, {}), self._plan.parallel.get(module.name)
        for rank, twin in found:
            others = {t.name: t for t in twin.unknown}
            for mine in module.unknown:
                self._same(mine, rank, others.get(mine.name))
            for role, mine in module.roles.items():
                if role not in cuts:
                    self._same(mine, rank, twin.roles[role])
        if not cuts:
            return
        if how == "experts":
            self._stack(module, held, cuts)
            return
        parts = [expand(twin) for twin in held]
        for i, part in enumerate(expand(module)):
            self._layer(module, part, [of[i] for of in parts], cuts)
        self._compared += len(cuts) * len(held)
        self._meter.add(sum(twin.roles[role].nbytes for twin in held for role in cuts))

    def _same(self, mine: Stored, rank: Checkpoint, theirs: Stored | None) -> None:
        """A tensor that is whole on a rank, and in its numbers' provenance."""
        if theirs is None or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape) or not same_bytes(mine, theirs):
            raise _failed("a tensor differs from its source", mine.name)
        kept, there = self._checkpoint.original(mine), rank.original(theirs)
        if kept is not there and (kept is None or there is None or kept.tobytes() != there.tobytes()):
            raise _failed("a number's provenance differs from its source", mine.name)
        self._compared += 1
        self._meter.add(mine.nbytes)

    def _stack(self, module: Module, held: Sequence[Module], cuts: Mapping[str, Cut]) -> None:
        """A stack whose experts are dealt: the ranks' bytes, one after the other, are those of the whole."""
        for role in cuts:
            mine, start = module.roles[role], 0
            for twin in held:
                theirs = twin.roles[role]
                there = replace(_view(mine, start, theirs.nbytes), shape=theirs.shape, dtype=theirs.dtype)
                if start + theirs.nbytes > mine.nbytes or not same_bytes(there, theirs):
                    raise _failed("the experts of a rank differ from their source", mine.name)
                start += theirs.nbytes
                self._compared += 1
                self._meter.add(theirs.nbytes)
            if start != mine.nbytes:
                raise _failed("the ranks do not hold all experts", mine.name)

    def _layer(self, module: Module, part: Module, twins: Sequence[Module], cuts: Mapping[str, Cut]) -> None:
        """One layer of two axes, or a vector: its arrays as NumPy cuts them, and the weight as Weight does."""
        degree, how = self._plan.degree, self._plan.parallel[module.name]
        fused = cuts[next(iter(cuts))].parts if part.name == module.name else ()  # a stack's layers are taken apart
        whole = {role: read_tensor(part.roles[role]) for role in part.roles}
        weight = self._weight(self._checkpoint, part, whole)
        for rank, twin in enumerate(twins):
            held = {role: read_tensor(twin.roles[role]) for role in twin.roles}
            for role in cuts:
                axis = _axis(how, role, whole[role])
                sizes = cuts[role].parts if fused and how == "column" else (whole[role].shape[axis],)
                wanted = _share(whole[role], axis, sizes, rank, degree)
                same = wanted.dtype == held[role].dtype and wanted.shape == held[role].shape
                if not same or wanted.tobytes() != held[role].tobytes():
                    raise _failed(f"a part of rank {rank} differs from its source", part.roles[role].name)
            if weight is None:
                continue
            if how == "row":
                meant = weight.shard_columns(rank, degree)
            else:
                pieces = weight.split(fused or [weight.n])
                meant = Weight.concat([piece.shard_rows(rank, degree) for piece in pieces])
            other = self._weight(self._ranks[rank], twin, held)
            if other is None or not other.same(meant):
                raise _failed(f"the weight of rank {rank} is not that part of the whole", part.name)

    def _weight(self, checkpoint: Checkpoint, part: Module, arrays: Mapping[str, Any]) -> Weight | None:
        """The NVFP4 weight of a layer from arrays that have been read; None of another kind or with more beside it."""
        if part.kind != "nvfp4" or "lora_a" in part.roles:
            return None
        known = {id(stored): arrays[role] for role, stored in part.roles.items()}
        weight: Weight = checkpoint.dialect.read(part, lambda t: known[id(t)], checkpoint.original)
        return weight


def _axis(how: str, role: str, array: Any) -> int:
    """The axis of a layer's array that is cut."""
    if how == "column" or array.ndim == 1:
        return 0
    return 2 if role == "scale" and array.ndim == 4 else 1


def _share(array: Any, axis: int, sizes: Sequence[int], rank: int, degree: int) -> Any:
    """A rank's equal share of each part of an axis."""
    parts = np.split(array, np.cumsum(sizes)[:-1], axis)
    return np.concatenate([np.split(part, degree, axis)[rank] for part in parts], axis)


def _failed(why: str, tensor: str | None, got: Any = None) -> FormatError:
    return FormatError(f"the proof failed: {why}", tensor=tensor, got=got)
