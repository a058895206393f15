"""``convert``: from one dialect to another. Codes and block scales are carried; only names and scalars change."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte import jit
from halfbyte.bundles import Bundle, bundled
from halfbyte.casts import as_nvfp4, scale2_exponents, viewed
from halfbyte.checkpoint.consistency import config_facts, header_findings, quantized
from halfbyte.checkpoint.header import Header
from halfbyte.checkpoint.outputs import Made, source_bytes
from halfbyte.checkpoint.reader import PROVENANCE, Checkpoint, encode_provenance, open_checkpoint
from halfbyte.checkpoint.writer import CheckpointWriter, Shard, distribute, parse_size, shard_names
from halfbyte.dialects import Dialect, Facts, Output, Packed, dialect_named
from halfbyte.dialects.packed import Hold, Pack, Unpack, ZeroBlocks, encode_layouts, held, scales_alone
from halfbyte.errors import FormatError, LayoutError, UsageError
from halfbyte.experts import (
    COLUMNS,
    INTERLEAVED,
    METADATA,
    encode_stacks,
    expand,
    model_types,
    refuse_unordered,
)
from halfbyte.findings import Finding, Report, in_order
from halfbyte.layouts import Layout, parse
from halfbyte.layouts.executors import SMALL
from halfbyte.modules import COMFY_METADATA, LAYOUT_METADATA, QUANTIZED, Module, Reading, Stack, refuse_broken
from halfbyte.numerics import BLOCK, decode_e2m1, decode_e4m3
from halfbyte.stored import CHUNK, Stored, View, byte_count, read_tensor, rows_of
from halfbyte.tasks import Meter, Progress, Step, Where
from halfbyte.tools.base import same_bytes
from halfbyte.writing import File, Work, Writing, dropped_files, opened, write_checkpoint, write_side_files


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    layout: str | Layout | None = None,
    experts: str | None = None,
    mxfp4: str | None = None,
    lossy: bool = False,
    reading: Reading | None = None,
    prove: bool = False,
    max_shard_size: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    workers: int | None = None,
    executor: Where = None,
    progress: Progress | None = None,
) -> Report:
    """Write a quantized checkpoint in another dialect, without changing a code or a block scale.

    Args:
        src: a directory, a file, or a hub name.
        dst: the directory to make.
        to: the dialect to write, "modelopt" or "compressed-tensors"; or
        layout: the layout to write NVFP4 weights in, such as "marlin(scale_format=s0e5m3)", as packed buffers with
            metadata by which they are read again. Experts are split.
        experts: "split" writes every expert under its own name, "stacked" one tensor for all experts of a layer, as
            the model's definition has it, "stacked-rows" (E, N, K) and "stacked-columns" (E, K, N); by default they
            stay as they are.
        mxfp4: "nvfp4" carries MXFP4 layers as NVFP4, "keep" as they are; by default they become NVFP4 in a
            checkpoint that has no NVFP4 layer, and stay beside some.
        lossy: round the codes of MXFP4 blocks whose scales one scale2 cannot hold, instead of refusing them. A
            layout that rounds has a field of that name.
        reading: how the NVFP4 weights of ``src`` are stored, where that is not what their dialect says.
        prove: read the result back and compare every tensor with its source before it gets its name.
        max_shard_size: such as "5GB"; by default the shards stay as they are.
        force: replace ``dst`` if it exists; start over where a killed run has left unfinished work.
        dry_run: plan, sizes and peak memory; writes nothing.
        resume: go on with what a killed run of the same call has left, if there is any.
        workers: tasks at once; by default one for each core.
        executor: runs the tasks instead of threads.
        progress: told of bytes written, and with ``prove`` of bytes compared.

    Returns:
        A report; its facts are "src", "dst", "from", "to", "reading" (the options of one that is not what the
        dialect says), "tensors" and "files" (each with what became of it and why), "single" (experts that stay single
        though stacks were asked for, and why), "mxfp4" (the layers carried as NVFP4, each with its relative error),
        "layout" (its key), "rounded" (the layers whose block scales it rounds, each with its relative error) and
        "zeroed" (those with codes in blocks whose scale is 0 that it has as 0, each with the number of such blocks),
        "bytes_out", "workers", "peak_bytes" (the most memory that the run adds), "proven" (tensors compared) and
        "seconds".

    Raises:
        HalfbyteError: a source that cannot be read, a tensor the target has no place for, a weight that the layout
            cannot hold, a target that may not be written, or a proof that failed. Nothing is left behind.
    """
    how = Writing(dst, force, dry_run, resume, workers, executor, progress)
    target, experts = _target(to, layout, experts)
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    for name, value, known in (("experts", experts, EXPERTS), ("mxfp4", mxfp4, MXFP4)):
        if value not in (None, *known):
            raise UsageError(f"unknown value of {name}", got=repr(value), expected=" or ".join(known))
    with opened(src, how, reading) as checkpoint:
        if not quantized(checkpoint):
            raise UsageError(
                "there is nothing quantized in this checkpoint",
                file=str(checkpoint.path),
                hint="run halfbyte quantize to quantize it",
            )
        asked = _Asked(target, experts, mxfp4, lossy, limit)
        return write_checkpoint(_Convert(checkpoint, asked, prove, str(dst)), how)


def _target(to: str | None, layout: str | Layout | None, experts: str | None) -> tuple[Dialect, str | None]:
    """The dialect to write, and how experts are to lie in it."""
    if (to is None) == (layout is None):
        raise UsageError("pass what to write", expected="--to DIALECT or --layout NAME")
    if layout is None:
        return dialect_named(to or ""), experts
    if experts not in (None, "split"):
        raise UsageError("experts are packed one by one", got=f"experts {experts}", expected="split")
    return Packed(parse(layout) if isinstance(layout, str) else layout), "split"


EXPERTS = ("split", "stacked", "stacked-rows", "stacked-columns")
MXFP4 = ("keep", "nvfp4")


@dataclass(frozen=True)
class _Asked:
    """What decides the bytes of the result; see convert."""

    target: Dialect
    experts: str | None
    mxfp4: str | None
    lossy: bool
    limit: int | None


class _Convert(Work):
    """Copies and, for another dialect, numbers; in the same dialect with the same shards, copies of whole files."""

    command = "convert"

    def __init__(self, checkpoint: Checkpoint, asked: _Asked, prove: bool, dst: str) -> None:
        self.checkpoint, self.prove = checkpoint, prove
        target, source = asked.target, checkpoint.dialect
        cast = _to_cast(checkpoint, asked)
        self.same = target is source and not asked.experts and not cast and checkpoint.reading == Reading()
        self.verbatim = self.same and asked.limit is None
        self._layout = target.layout if isinstance(target, Packed) else None
        written = target.name if self._layout is None else self._layout.key
        self.options = vars(asked) | {"target": written, "reading": checkpoint.reading.options}
        self.facts = {"src": str(checkpoint.path), "dst": dst, "from": source.name, "to": target.name}
        self.facts["reading"] = checkpoint.read_with
        self._modules, stacks = checkpoint.parts, {}
        if self.same:
            outputs = [Output.of(t, t) for t in checkpoint.tensors.values()]
            stated = any(METADATA in shard.metadata for shard in checkpoint.shards)
            stacks = {m.name: m.stack for m in checkpoint.modules if m.stack is not None and stated}
        else:
            for module in checkpoint.modules:
                refuse_broken(module)
                refuse_unordered(module)
            if cast:
                self._modules, self.facts["mxfp4"] = _cast(self._modules, source, asked.lossy)
            if self._layout is not None:
                self.facts["layout"] = self._layout.key
                self._modules, told = _fitted(checkpoint, self._modules, self._layout)
                self.facts |= told
            entries, self.facts["single"] = _arranged(checkpoint, self._modules, asked.experts)
            outputs = _outputs(entries, target, source)
            stacks = {entry.name: entry.stack for entry in entries if isinstance(entry, Bundle)}
            self.config = target.config(_config_facts(checkpoint, entries))
        self._shapes = {m.name: m.shape for m in self._modules if m.kind == "nvfp4"} if self._layout else {}
        self._made = Made.of(checkpoint, outputs)
        outputs = self._made.outputs
        self._members = {} if self.verbatim else _shards(checkpoint, outputs, asked.limit)
        self.files = {name: self._file(members, stacks) for name, members in self._members.items()}
        if self.verbatim:
            self.files = {Path(shard.file).name: _whole(shard) for shard in checkpoint.shards}
        self.index = str(checkpoint.index) if asked.limit is None and checkpoint.index and not self.verbatim else ""
        self.checked_bytes = sum(t.nbytes for m in self._modules for t in m.tensors) if prove else 0
        self.task_bytes = self._made.task_bytes
        views = [t for m in self._modules for t in m.roles.values() if isinstance(t, View) and not t.in_place]
        made = [*views, *(m.roles["codes"] for m in self._modules if self._layout and m.kind == "nvfp4")]
        largest = max((t.nbytes for t in made), default=0)
        self.check_bytes += 8 * largest
        self.code_bytes = jit.code_bytes() if largest >= SMALL else 0
        self.facts |= {
            "tensors": _listed(outputs, checkpoint),
            "bytes_out": sum(byte_count(o.stored.dtype, o.stored.shape) for o in outputs),
        }

    def _file(self, members: list[Output], stacks: Mapping[str, Stack]) -> File:
        metadata = _metadata(self.checkpoint, members, self._made.originals, stacks)
        if self._layout is not None:
            names = {o.stored.name.rpartition(".")[0] for o in members}
            metadata |= encode_layouts(self._layout, {n: s for n, s in self._shapes.items() if n in names})
        return File([o.stored for o in members], source_bytes(members), self._made.copies(members), metadata)

    def steps(self, name: str, shard: Shard) -> Sequence[Step]:
        return self._made.tasks(self._members[name], shard)

    def side_files(self, writer: CheckpointWriter) -> list[dict[str, str]]:
        if not self.same:
            return write_side_files(writer, self.checkpoint, *self.config)
        return _carry_all(writer, self.checkpoint, self.verbatim)

    def check(self, sealed: Path, meter: Meter) -> dict[str, Any]:
        return {"proven": _prove(self.checkpoint, self._modules, sealed, meter)} if self.prove else {}

    def findings(self) -> tuple[Finding, ...]:
        found = [f for f in header_findings(self.checkpoint) if f.severity != "note"]
        rounded = [e for key in ("mxfp4", "rounded") for e in self.facts.get(key, ()) if e["relative"]]
        found += [Finding("HB302", e["name"], got=float(f"{e['relative']:.3g}"), expected="0") for e in rounded]
        found += [Finding("HB303", e["name"], got=f"{e['blocks']} blocks") for e in self.facts.get("zeroed", ())]
        return in_order(found)


def _whole(shard: Header) -> File:
    """A shard that is copied as it is; all that its header states must be there."""
    file, end = Path(shard.file), max((t.start + t.nbytes for t in shard.tensors), default=0)
    return File((), max(file.stat().st_size, end), whole=file)


def _to_cast(checkpoint: Checkpoint, asked: _Asked) -> bool:
    """Whether MXFP4 layers are to become NVFP4."""
    kinds = {module.kind for module in checkpoint.modules}
    if "mxfp4" not in kinds or asked.mxfp4 == "keep":
        return False
    if asked.mxfp4 == "nvfp4":
        return True
    return "nvfp4" not in kinds and not (asked.target is checkpoint.dialect and asked.experts is None)


def _cast(modules: Sequence[Module], source: Dialect, lossy: bool) -> tuple[list[Module], list[dict[str, Any]]]:
    """The modules with MXFP4 layers as NVFP4 ones; and the error of each."""
    exponents = scale2_exponents([m for m in modules if m.kind == "mxfp4"], lossy)
    made, errors = [], []
    for module in modules:
        if module.kind != "mxfp4":
            made.append(module)
            continue
        cast, relative = as_nvfp4(module, exponents[module.name], source.divides)
        made.append(cast)
        errors.append({"name": module.name, "relative": relative})
    return made, errors


def _fitted(
    checkpoint: Checkpoint, modules: Sequence[Module], layout: Layout
) -> tuple[list[Module], dict[str, list[dict[str, Any]]]]:
    """The modules as a layout holds them, and the facts "rounded" and "zeroed"; see convert.

    Raises:
        LayoutError: the first weight that it cannot hold.
        UsageError: there is none to pack.
    """
    if not any(module.kind == "nvfp4" for module in modules):
        raise UsageError("there is no NVFP4 weight to pack in this checkpoint", file=str(checkpoint.path))
    made: list[Module] = []
    rounded: list[dict[str, Any]] = []
    zeroed: list[dict[str, Any]] = []
    for module in modules:
        if module.kind != "nvfp4":
            made.append(module)
            continue
        stored = module.roles["scales"]
        weight = scales_alone(read_tensor(stored), module.shape)
        reason = layout.needs(module.shape) or layout.refuse(weight)
        if reason:
            message = f"layout {layout.name} cannot hold this weight: {reason}"
            raise LayoutError(message, file=stored.file, tensor=module.name, got=list(module.shape))
        scales, roles = held(layout, weight), dict(module.roles)
        if not np.array_equal(scales, weight.scales):
            rounded.append({"name": module.name, "relative": _rounding(module, weight.scales, scales)})
            roles["scales"] = viewed(stored, Hold(layout.key, (module.shape[0], module.shape[1])))
        blocks = _coded_zero_blocks(module, scales) if layout.zero_blocks == "canonical" else 0
        if blocks:
            zeroed.append({"name": module.name, "blocks": blocks})
            roles["codes"] = viewed(roles["codes"], ZeroBlocks(roles["scales"]))
        made.append(replace(module, roles=roles))
    return made, {"rounded": rounded, "zeroed": zeroed}


def _coded_zero_blocks(module: Module, scales: Any) -> int:
    """The blocks whose scale is 0, and codes are not all 0."""
    stored, (n, k) = module.roles["codes"], module.shape
    made = isinstance(stored, View) and not stored.in_place  # what is made is made whole
    step, count = n if made else max(1, CHUNK // max(k, 1)), 0
    for a in range(0, n, max(step, 1)):
        zero = scales[a : a + step] == 0
        if zero.any():
            codes = read_tensor(rows_of(stored, a, min(a + step, n))).view(np.uint8)
            count += int((zero & codes.reshape(*zero.shape, BLOCK // 2).any(-1)).sum())
    return count


def _rounding(module: Module, before: Any, after: Any) -> float:
    """The relative error of a module with other block scales."""
    lost = total = 0.0
    n, k = module.shape
    step = max(1, CHUNK // max(k, 1))
    for a in range(0, n, step):
        codes = read_tensor(rows_of(module.roles["codes"], a, min(a + step, n))).view(np.uint8)
        values = decode_e2m1(codes).reshape(-1, k // BLOCK, BLOCK)
        squares = np.square(values).sum(-1, dtype=np.float64)
        old, new = (decode_e4m3(s[a : a + step]).astype(np.float64) for s in (before, after))
        lost, total = lost + float((squares * (new - old) ** 2).sum()), total + float((squares * old**2).sum())
    return (lost / total) ** 0.5 if total else 0.0


def _arranged(
    checkpoint: Checkpoint, modules: Sequence[Module], experts: str | None
) -> tuple[list[Module | Bundle], dict[str, str]]:
    """The modules as they are to be written: experts single or in bundles."""
    if experts == "split":
        return list(modules), {}
    if experts is None:
        stacked = [m for m in checkpoint.modules if m.stack is not None]
        forms = {part.name: _form(checkpoint, m) for m in stacked for part in expand(m)}
        return bundled(modules, lambda module: forms.get(module.name))
    types = model_types(checkpoint.headers)
    columns = experts == "stacked-columns" or (experts == "stacked" and bool(types & COLUMNS))
    stack = Stack(columns, "interleaved" if types & INTERLEAVED else "concatenated")
    return bundled(modules, lambda module: stack)


def _form(checkpoint: Checkpoint, module: Module) -> Stack | None:
    """How a stack that stays one is to lie: as it does, but gate and up that the caller knows to lie in another order
    than the model's in that."""
    types = model_types(checkpoint.headers)
    if module.stack is None or module.stack.gate_up is None or not checkpoint.reading.gate_up or not types:
        return module.stack
    return replace(module.stack, gate_up="interleaved" if types & INTERLEAVED else "concatenated")


def _outputs(entries: Iterable[Module | Bundle], target: Dialect, source: Dialect) -> list[Output]:
    outputs = []
    for entry in entries:
        outputs += target.outputs(entry, source) if isinstance(entry, Module) else target.stack_outputs(entry, source)
    taken: dict[str, str] = {}
    for output in outputs:
        first = output.sources[0].name
        clash = taken.setdefault(output.stored.name, first)
        if clash != first:
            raise FormatError("two tensors would get one name", tensor=output.stored.name, got=f"{clash}, {first}")
    return outputs


def _config_facts(checkpoint: Checkpoint, entries: Sequence[Module | Bundle]) -> Facts:
    """What the config has to say of the result; a stack of experts is known by the module that holds it."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        if isinstance(entry, Bundle):
            kinds[entry.name.rpartition(".")[0]].add(entry.module.kind)
    found: dict[str, Module] = {}
    others: list[Module] = []
    for entry in entries:
        module, name = (entry, entry.name) if isinstance(entry, Module) else (entry.module, entry.name)
        parent = name.rpartition(".")[0]
        if isinstance(entry, Bundle) and len(kinds[parent]) == 1:
            name = parent
        if module.kind in QUANTIZED:
            found[name] = module
        elif isinstance(entry, Module):
            others.append(entry)
        else:
            others.append(Module(f"{name}.weight", module.kind, {}, (), entry.stack))  # known by what holds it
    return config_facts(checkpoint, found, others)


def _listed(outputs: Iterable[Output], checkpoint: Checkpoint) -> list[dict[str, Any]]:
    listed: dict[tuple[str, str], dict[str, Any]] = {}
    for output in outputs:
        for source in output.sources:
            action, reason = _fate(output, source)
            key = (source.name, output.stored.name)
            listed[key] = {"tensor": key[0], "to": key[1], "action": action, "reason": reason}
    taken, reason = {name for name, _ in listed}, "a mark of how weights were stored"
    left = [{"tensor": n, "to": None, "action": "dropped", "reason": reason} for n in checkpoint.tensors.keys() - taken]
    return [*listed.values(), *sorted(left, key=str)]


def _fate(output: Output, source: Stored) -> tuple[str, str]:
    """What became of a tensor, and why."""
    stored = output.stored
    if isinstance(output.pieces[0].join, Pack):
        return "converted", f"packed as {output.pieces[0].join.key}"
    if isinstance(source, View) and any(isinstance(step, Unpack) for step in source.steps):
        return "converted", "taken out of a layout"
    if isinstance(source, View) and source.expert is not None and len(output.pieces) == 1:
        return "converted", "an expert's part of a stack"
    if len(output.pieces) > 1:
        return "converted", "part of a stack of experts"
    if isinstance(source, View):
        return "converted", "read otherwise than its dialect says"
    if output.invert:
        return "converted", "reciprocal"
    if stored.name != source.name:
        return "converted", "renamed; same bytes"
    if stored.shape != source.shape or stored.dtype != source.dtype:
        return "converted", "shape or dtype; same values"
    return "copied", "the same in both dialects"


def _shards(checkpoint: Checkpoint, outputs: list[Output], limit: int | None) -> dict[str, list[Output]]:
    """Shard name -> outputs: as in the source, or newly distributed."""
    shards: dict[str, list[Output]] = defaultdict(list)
    if limit is None:
        for shard in checkpoint.shards:
            shards[Path(shard.file).name] = []
        for output in outputs:
            shards[Path(output.sources[0].file).name].append(output)
        return {name: members for name, members in shards.items() if members}
    by_name = {o.stored.name: o for o in outputs}
    groups = distribute([o.stored for o in outputs], limit)
    return {n: [by_name[t.name] for t in g] for n, g in zip(shard_names(len(groups)), groups, strict=True)}


def _metadata(
    checkpoint: Checkpoint, outputs: list[Output], originals: Mapping[str, Any], stacks: Mapping[str, Stack]
) -> dict[str, str]:
    files = {t.file for o in outputs for t in o.sources}
    merged = {k: v for shard in checkpoint.shards if shard.file in files for k, v in shard.metadata.items()}
    merged.pop(PROVENANCE, None)
    merged.pop(METADATA, None)
    merged.pop(LAYOUT_METADATA, None)
    if checkpoint.reading.nibble_order or checkpoint.reading.scale_layout:
        merged.pop(COMFY_METADATA, None)
    names = [o.stored.name for o in outputs]
    here = {n: stack for n, stack in stacks.items() if any(name.startswith(n) for name in names)}
    kept = {name: originals[name] for name in names if name in originals}
    return merged | encode_provenance(kept) | encode_stacks(here)


def _carry_all(writer: CheckpointWriter, checkpoint: Checkpoint, verbatim: bool) -> list[dict[str, str]]:
    """Carry every file beside the weights: the configs and, where the shards are copied whole, their index."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    names = checkpoint.carried_files()
    names += [Path(n) for n in ("config.json", "hf_quant_config.json") if (folder / n).is_file()]
    names += [checkpoint.index] if verbatim and checkpoint.index else []
    for name in names:
        writer.carry(folder / name, name)
    names += [Path(Path(shard.file).name) for shard in checkpoint.shards] if verbatim else []
    listed = [{"file": str(name), "action": "copied", "reason": "the dialect stays"} for name in names]
    return listed + dropped_files(checkpoint)


def _prove(checkpoint: Checkpoint, modules: Sequence[Module], result: Path, meter: Meter) -> int:
    """Compare every tensor of the result with what it is made from, expert by expert; returns how many."""
    try:
        other = open_checkpoint(result)
    except FormatError as error:
        raise FormatError(f"the proof failed: {error.message}", tensor=error.tensor, got=error.got) from None
    with other:
        theirs = {(m.kind, m.name): m for m in other.parts}
        compared = 0
        for module in modules:
            twin = theirs.pop((module.kind, module.name), None)
            if twin is None or set(twin.roles) != set(module.roles):
                got = None if twin is None else f"{twin.kind}: {', '.join(twin.roles)}"
                raise FormatError("the proof failed: a module is not as in the source", tensor=module.name, got=got)
            for role, mine in module.roles.items():
                same = (
                    _meaning(checkpoint, module, role) == _meaning(other, twin, role)
                    if role in ("scale2", "input_scale", "scale")
                    else same_bytes(mine, twin.roles[role])
                )
                if not same:
                    raise FormatError("the proof failed: a tensor differs from its source", tensor=mine.name)
                meter.add(mine.nbytes)
                compared += 1
            companions = {t.name: t for t in twin.unknown}
            for mine in module.unknown:
                there = companions.pop(mine.name, None)
                if there is None or not same_bytes(mine, there):
                    raise FormatError("the proof failed: a tensor differs from its source", tensor=mine.name)
                meter.add(mine.nbytes)
                compared += 1
            if companions:
                raise FormatError("the proof failed: the result holds more than the source", tensor=min(companions))
        if theirs:
            raise FormatError("the proof failed: the result holds more than the source", tensor=min(theirs)[1])
        return compared


def _meaning(checkpoint: Checkpoint, module: Module, role: str) -> bytes:
    value = checkpoint.read(module.roles[role])
    return bytes(checkpoint.dialect.meaning(module, role, value, checkpoint.original).tobytes())
