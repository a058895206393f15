"""``from_pretrained``: a transformers model from any checkpoint that ``halfbyte.open`` reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import huggingface_hub
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from halfbyte.checkpoint.reader import open_checkpoint
from halfbyte.errors import FormatError, UsageError
from halfbyte.hf.filling import Options
from halfbyte.hf.quantizer import METHOD, HalfbyteConfig
from halfbyte.modules import quant_section
from halfbyte.parallel import Ranks

_REFUSED: Final = {
    "subfolder": "pass the path of the folder itself",
    "state_dict": "pass a directory",
    "gguf_file": "convert the file first",
    "quantization_config": "the checkpoint's tensors say how they are quantized",
    "revision": "download it, and pass the directory",
    "variant": "pass a directory that holds one checkpoint",
    "key_mapping": "tensors go by the names of the checkpoint",
    "tp_plan": "pass a mesh",
}


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    device_map: Any = None,
    fuse: bool = True,
    precision: str | None = None,
    layout: str | None = None,
    mesh: Any = None,
    expert_parallel: bool = False,
    **options: Any,
) -> Any:
    """Load a model of transformers from an NVFP4 checkpoint of any dialect that is read; its weights stay packed.

    Args:
        path: a directory, or a name on the hub (from the local cache first).
        dtype: of what is dense, and of activations; by default the config's.
        device_map: as transformers takes it; NVFP4 layers are packed on their device.
        fuse: whether layers of one input (q, k and v; gate and up) become one product where they can.
        precision: of the products of NVFP4 layers; see ``halfbyte.linear``. Experts stay exact with "int8".
        layout: the key of a layout for all NVFP4 layers; by default "fragments" of the model's dtype on an NVIDIA GPU
            where Triton is at hand, else "rows".
        mesh: of one axis, as ``halfbyte.parallel.start`` gives it: the model is split over its ranks, by the plan that
            transformers has for its class. Each rank reads its part of the weights alone. The ranks call this together.
        expert_parallel: with a mesh, whether experts are dealt to the ranks whole; else each rank has columns of all.
        options: what transformers' ``from_pretrained`` takes beside.

    Returns:
        The model, of the class that its config names; ``model.halfbyte`` is a LoadReport.

    Raises:
        FormatError: no such checkpoint, or one that is not sound: a scale is missing, NaN or negative.
        UsageError: a tensor that the model has no place for, a part of the model without data, or an option that
            cannot be meant. Each error names the tensor; no model is made then.
    """
    for name, hint in _REFUSED.items():
        if options.get(name) not in (None, "", "main"):
            raise UsageError(f"{name} is not taken here", got=repr(options[name])[:80], hint=hint)
        options.pop(name, None)
    folder, section = _located(path, bool(options.get("local_files_only")))
    trusted = {"trust_remote_code": options["trust_remote_code"]} if "trust_remote_code" in options else {}
    config = options.pop("config", None) or _config(folder, trusted)
    device, ranks = _one_device(device_map), None
    if mesh is not None:
        if device_map is not None:
            raise UsageError("a mesh tells the device of each rank", got="device_map, too", hint="pass mesh alone")
        ranks = Ranks.of(mesh)
        device = ranks.device
    elif expert_parallel:
        raise UsageError("experts are dealt to the ranks of a mesh", hint="pass mesh, too")
    how = Options(fuse, precision, layout, device, ranks, expert_parallel)
    config.quantization_config = HalfbyteConfig(section, METHOD, how)
    if dtype is not None:
        options["dtype"] = dtype
    if device is None:
        options["device_map"] = device_map
    return _class_of(config).from_pretrained(folder, config=config, **options)


def _one_device(device_map: Any) -> torch.device | None:
    """The device on which a device_map puts all of a model; None where it tells more, or nothing."""
    if isinstance(device_map, dict) and device_map.keys() == {""}:
        device_map = device_map[""]
    if isinstance(device_map, dict) or device_map in (None, "auto", "balanced", "balanced_low_0", "sequential", "disk"):
        return None
    try:
        return torch.device(device_map)
    except (RuntimeError, TypeError):
        raise UsageError("not a device", got=repr(device_map), expected='such as "cuda", "cpu" or "auto"') from None


def _located(path: str | os.PathLike[str], local_only: bool) -> tuple[Path, dict[str, Any]]:
    """The directory of a checkpoint, and its quantization_config."""
    if local_only and not Path(path).exists():
        try:
            path = huggingface_hub.snapshot_download(os.fspath(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise FormatError("not in the local cache", file=os.fspath(path)) from error
    checkpoint = open_checkpoint(path)
    checkpoint.require_readable()
    if not checkpoint.path.is_dir():
        raise UsageError("a model is loaded from a directory", got=str(checkpoint.path), expected="its config, too")
    return checkpoint.path, dict(quant_section(checkpoint.headers))


def _config(folder: Path, trusted: dict[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, **trusted)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FormatError("transformers cannot read the config", file=str(folder), got=reason[0]) from error


def _class_of(config: Any) -> Any:
    """The class of transformers that a config names."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    return AutoModelForCausalLM if causal else AutoModel
