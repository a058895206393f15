"""``quantize``: a dense checkpoint to NVFP4, one tensor in memory for each thread."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.checkpoint.consistency import config_facts, quantized
from halfbyte.checkpoint.reader import Checkpoint, encode_provenance, open_checkpoint
from halfbyte.checkpoint.writer import CheckpointWriter, Shard, check_target, distribute, parse_size, shard_names
from halfbyte.dialects import Dialect, Facts, dialect_named
from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.findings import Finding, Report
from halfbyte.modules import Module
from halfbyte.numerics import BLOCK, reciprocal
from halfbyte.patterns import Patterns, fused_group, is_head, is_router, module_class
from halfbyte.recipes import LIKES, Like, Recipe, TensorScale, finite_amax, quantize_array, recipe_named
from halfbyte.stored import FLOATS, Stored, byte_count
from halfbyte.tools.base import (
    Job,
    Meter,
    Progress,
    copy_jobs,
    directory_bytes,
    idle,
    run,
    worker_count,
    write_side_files,
)


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
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Quantize the weights of a dense checkpoint and write it in a dialect.

    Args:
        src: a directory, a file, or a hub name.
        dst: the directory to make.
        recipe, like: as for ``halfbyte.quantize``.
        to: the dialect to write, "modelopt" or "compressed-tensors".
        targets: patterns of modules to quantize instead of the default: every floating 2-D weight with
            K % 16 == 0 but embeddings, ``lm_head`` and routers.
        ignore: patterns of modules to leave dense.
        share_scale2: one scale2 for the parts that engines fuse (q/k/v, gate/up).
        max_shard_size: such as "5GB".
        force: replace ``dst`` if it exists.
        dry_run: plan and sizes; writes nothing.
        workers: threads; by default one for each core.
        progress: told of source bytes done.

    Returns:
        A report; its facts are "src", "dst", "dialect", "quantized" and "skipped" (name and reason of
        each), "files", "bytes_in", "bytes_out", "peak_bytes" (an estimate) and "seconds".

    Raises:
        HalfbyteError: a source that cannot be read or quantized, a target that may not be written.
            Nothing is left behind.
    """
    started = time.perf_counter()
    chosen, target, size = recipe_named(recipe), dialect_named(to), parse_size(max_shard_size)
    if like not in LIKES:
        raise UsageError("unknown peer", got=repr(like), expected=" or ".join(LIKES))
    threads = worker_count(workers)
    with open_checkpoint(src) as checkpoint:
        check_target(Path(dst), force, checkpoint.path)
        wanted, unwanted = Patterns(targets), Patterns(ignore)
        chosen_modules, skipped = _choose(checkpoint, wanted, unwanted)
        findings = idle(wanted, unwanted)
        plan = _Plan(checkpoint, target, chosen, like, _shared(chosen_modules) if share_scale2 else {})
        outputs = [t for module in checkpoint.modules for t in plan.outputs(module, module.name in chosen_modules)]
        shards = distribute(outputs, size)
        facts: dict[str, Any] = {
            "src": str(checkpoint.path),
            "dst": str(dst),
            "dialect": target.name,
            "recipe": chosen.name,
            "quantized": [{"name": m.name, "shape": list(m.shape)} for m in chosen_modules.values()],
            "skipped": skipped,
            "bytes_in": sum(t.nbytes for t in checkpoint.tensors.values()),
            "bytes_out": sum(byte_count(t.dtype, t.shape) for t in outputs),
            "peak_bytes": plan.peak_bytes(chosen_modules, threads),
        }
        if dry_run:
            return Report("quantize", tuple(findings), facts | {"dry_run": True, "shards": len(shards)})
        with CheckpointWriter(Path(dst), force) as writer:
            meter = Meter(facts["bytes_in"], progress)
            for name, tensors in zip(shard_names(len(shards)), shards, strict=True):
                plan.write(writer, name, tensors, chosen_modules, meter, threads)
            section, extra = target.config(plan.facts(chosen_modules))
            facts["files"] = write_side_files(writer, checkpoint, section, extra, False)
            findings += plan.findings(chosen_modules)
            facts["bytes_on_disk"] = directory_bytes(writer.seal())
            writer.commit()
        facts["seconds"] = round(time.perf_counter() - started, 3)
        return Report("quantize", tuple(findings), facts)


def _choose(
    checkpoint: Checkpoint, wanted: Patterns, unwanted: Patterns
) -> tuple[dict[str, Module], list[dict[str, str]]]:
    """The modules to quantize by name, and the other weights with the reason why not."""
    checkpoint.require_readable()
    if done := quantized(checkpoint):
        raise UsageError(
            "the checkpoint is quantized already",
            file=str(checkpoint.path),
            tensor=done[0].main.name if done[0].main else done[0].name,
            got=done[0].kind,
            hint="run halfbyte dequantize first, or halfbyte convert to change the dialect",
        )
    chosen, skipped = {}, []
    for module in checkpoint.modules:
        reason = _reason_to_skip(module, wanted, unwanted)
        if reason is None:
            chosen[module.name] = module
        elif module.main is not None:
            skipped.append({"name": module.main.name, "reason": reason})
    if not chosen:
        hint = "see halfbyte inspect" if wanted else "see halfbyte inspect, or name targets"
        raise UsageError("there is no weight to quantize", file=str(checkpoint.path), hint=hint)
    return chosen, skipped


def _reason_to_skip(module: Module, targets: Patterns, ignore: Patterns) -> str | None:
    if module.kind != "dense":
        return "not a weight"
    cls = module_class(module.name, len(module.shape))
    if cls is None:
        return "not a matrix"
    pattern, target = ignore.first(module.name, cls), targets.first(module.name, cls)
    if module.main is not None and module.main.dtype not in FLOATS:
        return f"dtype {module.main.dtype}"
    if pattern:
        return f"ignored by {pattern}"
    if module.shape[1] % BLOCK:
        return f"K = {module.shape[1]} is not a multiple of {BLOCK}"
    if targets:
        return None if target else "not a target"
    if cls == "Embedding":
        return "embedding"
    if is_head(module.name):
        return "output head"
    return "router" if is_router(module.name) else None


def _shared(modules: Mapping[str, Module]) -> dict[str, list[Module]]:
    """Module name -> all parts of the layer that engines fuse it into."""
    groups: dict[str, list[Module]] = defaultdict(list)
    for name, module in modules.items():
        if group := fused_group(name):
            groups[group[0]].append(module)
    return {part.name: parts for parts in groups.values() for part in parts}


@dataclass
class _Plan:
    """What is written for each module, and how."""

    checkpoint: Checkpoint
    target: Dialect
    recipe: Recipe
    like: Like
    shared: Mapping[str, list[Module]]

    def __post_init__(self) -> None:
        self._scales: dict[str, TensorScale] = {}
        self._locks = {parts[0].name: threading.Lock() for parts in self.shared.values()}
        # The stored number and the recipe's are reciprocals of each other, so the one may not give the other back.
        self._may_round = self.target.divides != (self.like == "compressed-tensors")

    def _names(self, module: Module) -> dict[str, Stored]:
        """Role -> tensor to write for a quantized module."""
        n, k = module.shape
        suffix = self.target.suffixes["nvfp4"]
        return {
            "codes": Stored(module.member(suffix["codes"]), "U8", (n, k // 2)),
            "scales": Stored(module.member(suffix["scales"]), "F8_E4M3", (n, k // BLOCK)),
            "scale2": Stored(module.member(suffix["scale2"]), "F32", self.target.scalar_shape),
        }

    def outputs(self, module: Module, chosen: bool) -> list[Stored]:
        """The tensors to write for a module."""
        if not chosen:
            return module.tensors
        return [*self._names(module).values(), *(t for role, t in module.roles.items() if role != "data")]

    def facts(self, chosen: Mapping[str, Module]) -> Facts:
        """What the config has to say."""
        modules = {name: Module(name, "nvfp4", self._names(m)) for name, m in chosen.items()}
        return config_facts(self.checkpoint, modules)

    def findings(self, chosen: Mapping[str, Module]) -> list[Finding]:
        """Parts that engines fuse, quantized with different scale2."""
        groups = {id(p): p for p in _shared(chosen).values()}.values()
        unequal = sum(len({float(self._scales[m.name].scale2) for m in parts}) > 1 for parts in groups)
        if not unequal:
            return []
        hint = "pass --share-scale2 for engines that fuse them"
        return [Finding("HB110", got=f"{unequal} of {len(groups)} fused layers (q/k/v, gate/up)", hint=hint)]

    def peak_bytes(self, chosen: Mapping[str, Module], threads: int) -> int:
        """An estimate of the memory that the arrays need at their peak."""
        dense = sorted((m.main.nbytes for m in chosen.values() if m.main), reverse=True)[:threads]
        return sum(dense) + sum(dense) // 3 + threads * (24 << 20)

    def write(
        self,
        writer: CheckpointWriter,
        name: str,
        tensors: Sequence[Stored],
        chosen: Mapping[str, Module],
        meter: Meter,
        threads: int,
    ) -> None:
        """Write one shard."""
        names = {t.name for t in tensors}
        mine = [m for m in chosen.values() if any(t.name in names for t in self._names(m).values())]
        largest = {self._names(m)["scale2"].name: np.float32(0) for m in mine} if self._may_round else {}
        shard = writer.shard(name, tensors, {"format": "pt"}, encode_provenance(largest))
        copied = [(t.name, t) for t in tensors if t.file]
        jobs: list[Job] = [partial(self._quantize, module, shard, names, meter) for module in mine]
        run(jobs + copy_jobs(self.checkpoint, shard, copied, meter), threads, meter)
        shard.finish(encode_provenance(self._originals(mine, names)))

    def _originals(self, modules: Sequence[Module], names: set[str]) -> dict[str, np.float32]:
        """Numbers that the stored form does not give back, by tensor."""
        kept: dict[str, np.float32] = {}
        for module in modules if self._may_round else ():
            scale, tensor = self._scales[module.name], self._names(module)["scale2"].name
            other = scale.scale2 if self.target.divides else scale.divisor
            if tensor in names and other is not None:
                stored = self._stored_number(scale)
                if reciprocal(stored) != other and reciprocal(other) == stored:
                    kept[tensor] = other
        return kept

    def _stored_number(self, scale: TensorScale) -> np.float32:
        if not self.target.divides:
            return scale.scale2
        return np.float32(reciprocal(scale.scale2)) if scale.divisor is None else scale.divisor

    def _quantize(self, module: Module, shard: Shard, names: set[str], meter: Meter) -> None:
        stored = self._names(module)
        scale = self._shared_scale(module) if module.name in self.shared else None
        dense = self._dense(module)
        if scale is None:
            scale = self._scales[module.name] = self.recipe.tensor_scale(self._amax(module, dense), self.like)
        if stored["scale2"].name in names:
            number = np.full(self.target.scalar_shape, self._stored_number(scale), np.float32)
            shard.write(stored["scale2"].name, number)
        wanted = [role for role in ("codes", "scales") if stored[role].name in names]
        if wanted:
            try:
                arrays = dict(
                    zip(("codes", "scales"), quantize_array(dense, self.recipe, scale, self.like), strict=True)
                )
            except HalfbyteError as error:
                raise self._located(error, module) from None
            for role in wanted:
                shard.write(stored[role].name, arrays[role])
        if "codes" in wanted and module.main is not None:
            meter.add(module.main.nbytes)

    def _dense(self, module: Module) -> Any:
        return self.checkpoint.read(module.roles["data"])

    def _shared_scale(self, module: Module) -> TensorScale:
        """The scale of the fused layer, from one part after the other; the first part that asks computes it."""
        parts = self.shared[module.name]
        with self._locks[parts[0].name]:
            if module.name not in self._scales:
                amax = max(self._amax(part, self._dense(part)) for part in parts)
                scale = self.recipe.tensor_scale(amax, self.like)
                self._scales.update({part.name: scale for part in parts})
        return self._scales[module.name]

    def _amax(self, module: Module, dense: Any) -> np.float32:
        try:
            return finite_amax(dense)
        except HalfbyteError as error:
            raise self._located(error, module) from None

    def _located(self, error: HalfbyteError, module: Module) -> HalfbyteError:
        tensor = module.roles["data"]
        error.file, error.tensor = tensor.file, tensor.name
        return error
