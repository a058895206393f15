"""``save_pretrained`` of models with NVFP4 weights: a ModelOpt checkpoint, written by the writer of the tools.

Weights come out of their modules one at a time. The directory gets its name when all is on disk.
"""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from halfbyte.checkpoint.consistency import facts_of
from halfbyte.checkpoint.reader import INDEX
from halfbyte.checkpoint.writer import CheckpointWriter, distribute, parse_size, shard_names
from halfbyte.dialects import dialect_named
from halfbyte.errors import TargetError, UsageError
from halfbyte.experts import numbered, spelled
from halfbyte.modules import QUANTIZED, Headers, Module, refuse_broken
from halfbyte.nn import Experts, Quantized, weights_of
from halfbyte.stored import Stored, header_dtype
from halfbyte.writing import without_quantization

_REPLACED = ("config.json", "hf_quant_config.json", INDEX)
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Files of an earlier checkpoint in the same directory."""


class Saver:
    """What ``model.save_pretrained`` is on a model of this library; it takes the arguments of transformers' own."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *,
        max_shard_size: int | str = "5GB",
        **others: Any,
    ) -> None:
        """See ``save_pretrained``.

        Raises:
            UsageError: another argument, unless its value asks for nothing.
        """
        nothing = {"save_original_format": True, "save_peft_format": True, "safe_serialization": True}
        for name, value in others.items():
            if value not in (None, False, nothing.get(name)) or (name in nothing and value is False):
                hint = "call model.push_to_hub(name)" if name == "push_to_hub" else "the model is written as it is"
                raise UsageError(f"save_pretrained of a quantized model takes no {name}", got=repr(value), hint=hint)
        if is_main_process:
            save_pretrained(self.model, save_directory, max_shard_size=max_shard_size)


def attach(model: torch.nn.Module) -> None:
    """Let ``save_pretrained`` of a model, and of each one inside it, write what it holds."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _holders(module):
            module.__dict__["save_pretrained"] = Saver(module)  # a method that is the instance's own


def save_pretrained(model: Any, path: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
    """Write a model as a ModelOpt checkpoint that transformers, halfbyte and engines load.

    Codes, scales and scale2 are those that were loaded or quantized, bit for bit (but for what the ``zero_blocks`` of
    a layout says), under the names that the model's own checkpoints have: fused layers and experts one by one. Other
    files that lie in the directory stay, such as those of a tokenizer.

    Args:
        model: a PreTrainedModel with modules of ``halfbyte.nn``.
        path: the directory; one that exists is replaced when the new one is complete.
        max_shard_size: such as "5GB", or in bytes.

    Raises:
        UsageError: a weight that ModelOpt cannot hold, such as one with a scale2 for each row.
        TargetError: a directory that cannot be written, or that holds something else. Nothing is left behind.
    """
    size = parse_size(max_shard_size if isinstance(max_shard_size, str) else str(max_shard_size))
    target = Path(os.path.realpath(path))
    if target == Path.cwd() or target in Path.cwd().parents:
        hint = "choose another directory: this one would be replaced by a new one of its name"
        raise TargetError("the working directory is, or lies in, the target", file=str(target), hint=hint)
    content = _Content(model)
    section, extra = content.config()
    shards = distribute(content.stored, size)
    names = shard_names(len(shards))
    kept = _files_to_keep(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetError("cannot make the directory", file=str(target.parent), got=error.strerror) from error
    with CheckpointWriter(target, force=True) as writer, tempfile.TemporaryDirectory() as folder:
        _write_configs(model, Path(folder), section)
        for name in _files(Path(folder)):
            writer.carry(Path(folder, name), name)
            kept.discard(name)
        for file, value in extra.items():
            writer.json(file, value)
        for name in sorted(kept):
            writer.carry(target / name, name)
        arrays = content.arrays()
        for file, members in zip(names, shards, strict=True):
            shard = writer.shard(file, members, {"format": "pt"})
            for stored, array in zip(members, arrays, strict=False):
                shard.write(stored.name, array)
            shard.finish()
        writer.seal()
        writer.commit()


class _Content:
    """What a checkpoint of a model holds.

    Attributes:
        stored: the tensors to write, in the order in which ``arrays`` gives them.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._dialect = model, dialect_named("modelopt")
        self._report = getattr(model, "halfbyte", None)
        self._dense = self._dense_tensors()
        self.stored = [Stored(name, header_dtype(t), tuple(t.shape)) for name, t in self._dense.items()]
        headers: dict[str, tuple[Any, dict[str, Stored]]] = {}
        for name, weight in weights_of(model):
            headers[name] = weight.kind, _headers(weight)
        if not headers:
            raise UsageError("the model holds no quantized weight", hint="quantize it: halfbyte.hf.quantize_model")
        names = _disk_names(model, list(headers))
        for name, (kind, roles) in headers.items():
            outputs = self._dialect.outputs(Module(names[name], kind, roles), self._dialect)
            self.stored += [output.stored for output in outputs]

    def arrays(self) -> Iterator[Any]:
        """The bytes of each tensor; one weight is in memory at a time."""
        for tensor in self._dense.values():
            yield _bytes(tensor)
        for _, weight in weights_of(self._model):
            yield from (_bytes(array) for array in _arrays(weight).values())

    def config(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """``quantization_config`` and the further files, as ModelOpt has them for these tensors.

        Raises:
            FormatError: a weight that ModelOpt cannot hold.
        """
        config = self._model.config.to_dict()
        headers = Headers({t.name: t for t in self.stored}, config=config)
        modules = self._dialect.modules(headers)
        quantized = {m.name: m for m in modules if m.kind in QUANTIZED}
        for module in quantized.values():
            refuse_broken(module)
        kv = getattr(self._report, "kv", None)
        return self._dialect.config(facts_of(config, kv, quantized, modules))

    def _dense_tensors(self) -> dict[str, torch.Tensor]:
        """All other tensors by their names on disk, tied ones once."""
        holders = _holders(self._model)
        state: dict[str, torch.Tensor] = {}
        for key, tensor in self._model.state_dict().items():
            if _owner(key, holders) is None and key not in (self._model._keys_to_ignore_on_save or ()):
                if tensor.is_meta:
                    hint = "load the model without offloading, and save that"
                    raise UsageError("the model does not hold this tensor: it is offloaded", tensor=key, hint=hint)
                state[key] = tensor
        for name, holder in holders.items():
            if (bias := getattr(holder, "bias", None)) is not None:
                state[f"{name}.bias"] = bias.detach()
            elif isinstance(holder, Experts):
                state |= {f"{name}.{layer}.bias": bias for layer, bias in holder.biases()}
        state = revert_weight_conversion(self._model, remove_tied_weights_from_state_dict(state, self._model))
        return state | dict(getattr(self._report, "kept", {}))


def _holders(model: Any) -> dict[str, Any]:
    """The modules that hold quantized weights by name, without what they are made of."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, Quantized) and _owner(name, found) is None:
            found[name] = module
    return found


def _owner(key: str, holders: Mapping[str, Any]) -> str | None:
    """The module among ``holders`` that ``key`` lies in."""
    parts = key.split(".")
    return next((name for i in range(1, len(parts)) if (name := ".".join(parts[:i])) in holders), None)


def _disk_names(model: Any, names: Sequence[str]) -> dict[str, str]:
    """Module in the model -> its name in checkpoints, where transformers names it otherwise."""
    experts = {name: m for name, m in model.named_modules() if isinstance(m, Experts)}
    of = {name: found for name in names if (found := numbered(name)) is not None and found[0] in experts}
    plain = {name: torch.empty(1, 1, device="meta") for name in names if name not in of}
    renamed = revert_weight_conversion(model, {f"{name}.weight": t for name, t in plain.items()})
    keys = {id(t): key.removesuffix(".weight") for key, t in renamed.items()}
    disk = {name: keys.get(id(t), name) for name, t in plain.items()}
    for name, held in experts.items():
        count = 1 + max(number for parent, number, _ in of.values() if parent == name)
        disk |= _expert_names(model, name, count, held.mixture.gated)
    return {name: disk.get(name, name) for name in names}


def _expert_names(model: Any, name: str, count: int, gated: bool) -> dict[str, str]:
    """The same for the layers of ``count`` experts, which checkpoints store one by one."""
    first = {"gate_up_proj": (count, 2, 1)} if gated else {"up_proj": (count, 1, 1)}
    sizes = first | {"down_proj": (count, 1, 1)}
    whole = {f"{name}.{part}": torch.empty(size, device="meta") for part, size in sizes.items()}
    disk = [key.removesuffix(".weight") for key in revert_weight_conversion(model, whole)]
    found = {key: numbered(key) for key in disk}
    return {f"{name}.{of[1]}.{spelled(key).rpartition('.')[2]}": key for key, of in found.items() if of is not None}


_BYTES: Mapping[str, str] = {"codes": "U8", "scales": "F8_E4M3", "data": "F8_E4M3"}
_ROLES: Mapping[str, tuple[str, ...]] = {
    "nvfp4": ("codes", "scales", "scale2", "input_scale", "pre_scale"),
    "fp8": ("data", "scale", "input_scale", "pre_scale"),
}


def _arrays(weight: Any) -> dict[str, Any]:
    """Role -> array of a weight, without the roles that it does not have."""
    roles = {role: getattr(weight, role) for role in _ROLES[weight.kind]}
    return {role: array for role, array in roles.items() if array is not None}


def _headers(weight: Any) -> dict[str, Stored]:
    """Role -> dtype and shape; a single scale has no axes."""
    found = {}
    for role, array in _arrays(weight).items():
        single = role in ("scale2", "scale", "input_scale") and all(size == 1 for size in array.shape)
        found[role] = Stored(role, _BYTES.get(role) or header_dtype(array), () if single else tuple(array.shape))
    return found


def _bytes(array: Any) -> Any:
    """The bytes of a tensor on any device, (bytes,) u8."""
    return array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _write_configs(model: Any, folder: Path, section: dict[str, Any]) -> None:
    """What transformers writes beside weights, and the model's own code where it has some."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, str(folder), config=config)
    config.save_pretrained(str(folder))
    file = folder / "config.json"
    written = without_quantization(json.loads(file.read_bytes())) | {"quantization_config": section}
    file.write_text(json.dumps(written, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    if model.can_generate():
        model.generation_config.save_pretrained(str(folder))


def _files(folder: Path) -> set[Path]:
    """All files below a directory, relative to it."""
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def _files_to_keep(target: Path) -> set[Path]:
    """The files of a directory that a checkpoint in it does not replace.

    Raises:
        TargetError: weights of another name: whoever reads the directory would read them, too.
    """
    kept = {name for name in _files(target) if str(name) not in _REPLACED} if target.is_dir() else set()
    mine = {name for name in kept if _SHARD.fullmatch(str(name))}
    for name in sorted(kept - mine):
        if name.match("*.safetensors") and len(name.parts) == 1 and not name.name.startswith("adapter"):
            hint = "move them, or choose another directory"
            raise TargetError("the directory holds other weights", file=str(target / name), hint=hint)
    return kept - mine
