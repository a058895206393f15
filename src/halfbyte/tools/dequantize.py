"""``dequantize``: a quantized checkpoint to a dense one, in float32, bfloat16 or float16."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.checkpoint.consistency import quantized
from halfbyte.checkpoint.reader import Checkpoint, open_checkpoint
from halfbyte.checkpoint.writer import CheckpointWriter, Shard, check_target, distribute, parse_size, shard_names
from halfbyte.errors import FormatError, UsageError
from halfbyte.findings import Finding, Report
from halfbyte.modules import Module, refuse_broken, refuse_companions
from halfbyte.stored import Stored, byte_count, header_dtype
from halfbyte.tools.base import Job, Meter, Progress, copy_jobs, directory_bytes, run, worker_count, write_side_files
from halfbyte.weight import Weight, float_dtype

_INSIDE = ("codes", "scales", "scale2", "data", "scale", "pre_scale")


def dequantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    force: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
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
        force: replace ``dst`` if it exists.
        dry_run: plan and sizes; writes nothing.
        workers: threads; by default one for each core.
        progress: told of source bytes done.

    Returns:
        A report; its facts are "src", "dst", "dtype", "tensors" and "files" (each with what became of
        it and why), "bytes_in", "bytes_out" and "seconds".

    Raises:
        HalfbyteError: a source that cannot be read, a target that may not be written. Nothing is left behind.
    """
    started = time.perf_counter()
    threads, limit = worker_count(workers), parse_size(max_shard_size)
    with open_checkpoint(src) as checkpoint:
        check_target(Path(dst), force, checkpoint.path)
        checkpoint.require_readable()
        modules = {m.name: m for m in quantized(checkpoint)}
        if not modules:
            raise UsageError("there is nothing quantized in this checkpoint", file=str(checkpoint.path))
        for module in modules.values():
            refuse_broken(module)
            refuse_companions(module, {"lora_a", "lora_b"}, "cannot be part of a dense weight")
        name = dtype or _config_dtype(checkpoint)
        stored = header_dtype(np.empty(0, float_dtype(name)))
        dense = {m.name: Stored(m.member("weight"), stored, m.shape) for m in modules.values()}
        listed: list[dict[str, str]] = []
        outputs: list[Stored] = []
        for module in checkpoint.modules:
            inside = module.kind != "none" and module.name in modules
            if inside:
                outputs.append(dense[module.name])
            for role, tensor in module.roles.items():
                action, reason = _fate(role if inside else _kv_role(tensor))
                listed.append({"tensor": tensor.name, "action": action, "reason": reason})
                if action == "copied":
                    outputs.append(tensor)
        shards = distribute(outputs, limit)
        facts: dict[str, Any] = {
            "src": str(checkpoint.path),
            "dst": str(dst),
            "dtype": name,
            "tensors": listed,
            "bytes_in": sum(t.nbytes for t in checkpoint.tensors.values()),
            "bytes_out": sum(byte_count(t.dtype, t.shape) for t in outputs),
        }
        if dry_run:
            largest = sorted((byte_count("F32", t.shape) for t in dense.values()), reverse=True)[:threads]
            return Report(
                "dequantize", (), facts | {"dry_run": True, "shards": len(shards), "peak_bytes": 2 * sum(largest)}
            )
        found: list[Finding] = []
        by_output = {t.name: modules[n] for n, t in dense.items()}
        with CheckpointWriter(Path(dst), force) as writer:
            dropped = {entry["tensor"] for entry in listed if entry["action"] == "dropped"}
            meter = Meter(facts["bytes_in"], progress)
            meter.add(sum(t.nbytes for t in checkpoint.tensors.values() if t.name in dropped))
            for shard_name, tensors in zip(shard_names(len(shards)), shards, strict=True):
                shard = writer.shard(shard_name, tensors, {"format": "pt"})
                mine = [by_output[t.name] for t in tensors if not t.file]
                jobs: list[Job] = [partial(_write, checkpoint, module, shard, name, meter, found) for module in mine]
                run(
                    jobs + copy_jobs(checkpoint, shard, [(t.name, t) for t in tensors if t.file], meter), threads, meter
                )
                shard.finish()
            facts["files"] = write_side_files(writer, checkpoint, None, {}, False, name if dtype else None)
            facts["bytes_on_disk"] = directory_bytes(writer.seal())
            writer.commit()
        facts["seconds"] = round(time.perf_counter() - started, 3)
        return Report("dequantize", tuple(sorted(found, key=str)), facts)


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


def _write(
    checkpoint: Checkpoint, module: Module, shard: Shard, dtype: str, meter: Meter, found: list[Finding]
) -> None:
    """Write the dense weight of a module; NaN and Inf that come from its scales are carried, and ``found``."""
    weight = checkpoint.load(module)
    values = weight.dequantize("float32")
    if isinstance(weight, Weight) and weight.pre_scale is not None:
        with np.errstate(all="ignore"):
            values *= weight.pre_scale.astype(np.float32)
    with np.errstate(over="ignore"):
        rounded = values.astype(float_dtype(dtype), copy=False)
    scales = [weight.scale2 if isinstance(weight, Weight) else weight.scale]
    scales += [weight.pre_scale] if isinstance(weight, Weight) and weight.pre_scale is not None else []
    if np.isinf(rounded).any() and all(np.isfinite(s.astype(np.float32)).all() for s in scales):
        row, column = (int(i) for i in np.argwhere(np.isinf(rounded))[0])
        raise FormatError(
            f"a value does not fit {dtype}",
            file=module.main.file if module.main else None,
            tensor=module.name,
            index=[row, column],
            got=float(values[row, column]),
            hint="choose another --dtype, or see halfbyte verify",
        )
    if not np.isfinite(rounded).all():
        odd = ~np.isfinite(rounded)
        index = [int(i) for i in np.argwhere(odd)[0]]
        hint = "they come from the scales: see halfbyte verify on the source"
        found.append(Finding("HB118", module.member("weight"), index, got=f"{odd.sum()} values", hint=hint))
    shard.write(module.member("weight"), rounded)
    meter.add(sum(t.nbytes for role, t in module.roles.items() if role in _INSIDE))
