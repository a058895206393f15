"""Reading a checkpoint: a directory of safetensors shards or one file, lazily and by position."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.checkpoint.header import MAX_HEADER, Header, parse_json, read_header
from halfbyte.dialects import Dialect, detect
from halfbyte.errors import FormatError, MissingExtraError, UnreadDialectError
from halfbyte.experts import expand, merged_metadata
from halfbyte.findings import Finding
from halfbyte.modules import QUANTIZED, Headers, Module, Reading
from halfbyte.numerics import reciprocal
from halfbyte.reading import before_inversion, checked, reduced, reread
from halfbyte.stored import DTYPE_BITS, Stored, View, read_into, read_tensor
from halfbyte.weight import DenseWeight, Fp8Weight, Weight

INDEX = "model.safetensors.index.json"
PROVENANCE = "halfbyte.scale2"
"""Key in a shard's metadata: JSON {tensor name: the bits, in hex, of each f32 whose rounded reciprocal is stored}."""

_PICKLED = {".bin", ".pt", ".pth", ".ckpt"}
_NOT_NEEDED = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*"]
_MAX_JSON = 256 << 20


@dataclass(repr=False)
class Checkpoint:
    """A checkpoint, opened. Only headers and configs are in memory; arrays are read when asked for.

    Attributes:
        path: the directory, or the file.
        shards: the headers of its files.
        tensors: all tensors by name, in the order of the shards.
        config: config.json, {} without one.
        quant: hf_quant_config.json, {} without one.
        dialect: of the tensors.
        evidence: why it is that dialect; "" for a dense checkpoint.
        modules: the tensors, grouped.
        reading: what the caller knows better than the dialect.
        findings: what was odd about the files.
    """

    path: Path
    shards: tuple[Header, ...]
    tensors: dict[str, Stored]
    config: dict[str, Any]
    quant: dict[str, Any]
    dialect: Dialect
    evidence: str
    modules: list[Module]
    findings: list[Finding] = field(default_factory=list)
    reading: Reading = field(default_factory=Reading)
    _originals: dict[str, Any] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: files are open only while they are read."""

    @property
    def dialect_name(self) -> str:
        """The dialect's name; "dense" where neither tensors nor config are of one."""
        return self.dialect.name if self.evidence else "dense"

    @property
    def index(self) -> Path | None:
        """The name of the index in the directory, or None where there is none."""
        found = _index_of(self.path) if self.path.is_dir() else None
        return Path(found.name) if found else None

    @functools.cached_property
    def headers(self) -> Headers:
        """The checkpoint as dialects see it."""
        metadata = merged_metadata(shard.metadata for shard in self.shards)
        return Headers(self.tensors, metadata, self.config, self.quant, self.reading)

    def read_into(self, tensor: Stored, start: int, out: Any) -> None:
        """Fill ``out`` (bytes,) u8 from byte ``start`` of a tensor.

        Raises:
            FormatError: the file has become shorter.
        """
        read_into(tensor, start, out)

    def read(self, tensor: Stored | str) -> Any:
        """The array of a tensor, in its dtype (bfloat16 and float8 are those of ml_dtypes).

        Raises:
            FormatError: no such tensor, or the file has become shorter.
        """
        if isinstance(tensor, str):
            if tensor not in self.tensors:
                raise FormatError("no such tensor", file=str(self.path), tensor=tensor)
            tensor = self.tensors[tensor]
        return read_tensor(tensor)

    def original(self, tensor: Stored) -> Any | None:
        """The f32 numbers whose rounded reciprocals ``tensor`` stores, in its shape, where the shard remembers them;
        of what is read as a reciprocal, the numbers that are stored."""
        if isinstance(tensor, View) and tensor.steps:
            return before_inversion(tensor)
        kept = self._originals.get(tensor.name)
        if kept is None or not isinstance(tensor, View):
            return kept
        first = (tensor.start - self.tensors[tensor.name].start) // (DTYPE_BITS[tensor.dtype] // 8)
        return kept.reshape(-1)[first : first + prod(tensor.shape)].reshape(tensor.shape)

    @property
    def read_with(self) -> list[str]:
        """The options of the reading, without what the dialect says anyway."""
        return reduced(self.reading, self.dialect.divides).options

    @functools.cached_property
    def parts(self) -> list[Module]:
        """``modules`` with each stack of experts as the layers that it holds."""
        return [part for module in self.modules for part in expand(module)]

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.dialect_name}, {len(self.tensors)} tensors)"

    def keys(self) -> list[str]:
        """The names that ``items`` gives and ``load`` takes."""
        self.require_readable()
        return [name for name, _, _ in self._entries()]

    def __getitem__(self, name: str) -> Weight | Fp8Weight | DenseWeight:
        """The same as ``load``."""
        weight: Weight | Fp8Weight | DenseWeight = self.load(name)
        return weight

    def load(self, module: Module | str) -> Any:
        """The Weight, Fp8Weight or DenseWeight of a module, given by itself or by one of ``keys``.

        Raises:
            FormatError: no such name, or tensors that do not form a weight.
            UnreadDialectError: a dialect that is not read yet.
        """
        self.require_readable()
        if isinstance(module, str):
            for name, owner, tensor in self._entries():
                if name == module:
                    return self.load(owner) if tensor is None else DenseWeight(self.read(tensor))
            for part in self.parts:
                if part.name == module and part.kind != "none":
                    return self.load(part)
            raise FormatError("no such weight", file=str(self.path), tensor=module, hint="see keys()")
        return self.dialect.read(module, self.read, self.original)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """(module name, weight) for every NVFP4 module, one in memory at a time."""
        self.require_readable()
        for module in self.modules:
            if module.kind == "nvfp4":
                yield module.name, self.load(module)

    def items(self) -> Iterator[tuple[str, Weight | Fp8Weight | DenseWeight]]:
        """Everything: quantized weights by module name, every other tensor as DenseWeight by its full name.

        Scales and input scales are inside the weights; biases and KV scales come by themselves.
        """
        self.require_readable()
        for name, module, tensor in self._entries():
            yield name, self.load(module) if tensor is None else DenseWeight(self.read(tensor))

    def _entries(self) -> Iterator[tuple[str, Module, Stored | None]]:
        """(name, module, tensor): a whole quantized module has no tensor of its own."""
        inside = {"codes", "data", "scales", "scale", "scale2", "input_scale", "pre_scale"}
        for module in self.modules:
            quantized = module.kind in QUANTIZED
            if quantized:
                yield module.name, module, None
            for role, tensor in module.roles.items():
                if not (quantized and role in inside):
                    yield tensor.name, module, tensor

    def require_readable(self) -> None:
        """Raise UnreadDialectError unless the tensors are of a dialect that is read."""
        if not self.dialect.readable:
            raise UnreadDialectError(
                f"this is a checkpoint of {self.dialect.title}, which is recognised and not read yet",
                file=str(self.path),
                got=self.evidence,
                expected="ModelOpt or compressed-tensors",
            )

    def carried_files(self) -> list[Path]:
        """The other files of the directory, relative to it: tokenizer, generation config, code, licence."""
        if self.path.is_file():
            return []
        taken = {Path(s.file).name for s in self.shards} | {"config.json", "hf_quant_config.json"}
        found = []
        for parent, folders, files in os.walk(self.path):
            folders[:] = sorted(f for f in folders if not f.startswith(".") and not holds_weights(Path(parent, f)))
            for name in sorted(files):
                relative = Path(parent, name).relative_to(self.path)
                weights = name.endswith((".safetensors", ".safetensors.index.json"))
                if not (len(relative.parts) == 1 and (name in taken or weights)) and not name.startswith(".halfbyte"):
                    found.append(relative)
        return found


def holds_weights(folder: Path) -> bool:
    """Whether a subdirectory is a checkpoint of its own, which is not part of the one around it."""
    return any(folder.glob("*.safetensors"))


def open_checkpoint(path: str | os.PathLike[str], reading: Reading | None = None) -> Checkpoint:
    """Open a directory, a safetensors file, or a name on the hub (from the local cache first).

    Args:
        path: where.
        reading: how NVFP4 weights are stored, where that is not what their dialect says.

    Raises:
        FormatError: nothing there that can be read, or files that contradict themselves or ``reading``.
        MissingExtraError: a hub name without the hub client.
        UsageError: a reading that is not known.
    """
    known = checked(Reading() if reading is None else reading)
    with without_collection():
        return _open(_locate(os.fspath(path)), known)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Leave the garbage collector out: it would look through a hundred thousand new objects, none of them garbage,
    again and again, which is a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _open(root: Path, reading: Reading) -> Checkpoint:
    findings: list[Finding] = []
    folder = root if root.is_dir() else root.parent
    file = _index_of(root) if root.is_dir() else None
    index = read_json(file) if file else None
    table = _weight_map(index, file) if index is not None and file else None
    files = _shard_files(root, table, findings)
    shards = tuple(read_header(str(shard)) for shard in files)
    tensors: dict[str, Stored] = {}
    for shard in shards:
        own = {tensor.name: tensor for tensor in shard.tensors}
        if not own.keys().isdisjoint(tensors.keys()):
            name = next(name for name in own if name in tensors)
            raise FormatError("a tensor lies in two shards", file=shard.file, tensor=name, got=tensors[name].file)
        tensors |= own
    if index is not None:
        _check_index(index, tensors, findings)
    config, quant = (read_json(folder / name) for name in ("config.json", "hf_quant_config.json"))
    metadata = merged_metadata(shard.metadata for shard in shards)
    headers = Headers(tensors, metadata, config, quant, reading)
    dialect, evidence = detect(headers)
    modules = dialect.modules(headers) if dialect.readable else []
    if reading:
        modules = [reread(module, reading, dialect.divides) for module in modules]
    checkpoint = Checkpoint(root, shards, tensors, config, quant, dialect, evidence, modules, findings, reading)
    for shard in shards:
        _recall(checkpoint, shard)
    return checkpoint


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object; {} if it does not exist.

    Raises:
        FormatError: anything else.
    """
    try:
        if file.stat().st_size > _MAX_JSON:
            raise FormatError("too large for a JSON file", file=str(file), got=f"{file.stat().st_size} bytes")
        text = file.read_bytes()
    except FileNotFoundError:
        return {}
    value = parse_json(text, str(file), constants=True)
    if not isinstance(value, dict):
        raise FormatError("not a JSON object", file=str(file), got=type(value).__name__)
    return value


def _locate(text: str) -> Path:
    path = Path(text)
    if path.exists():
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.startswith(".") and not path.parent.exists():
        return _from_hub(text)
    raise FormatError("no such file or directory", file=text)


def _from_hub(name: str) -> Path:
    try:
        import huggingface_hub as hub
    except ImportError:
        raise MissingExtraError("huggingface_hub", "hf", f"opening {name} from the hub") from None
    reason = ""
    for local in (True, False):
        try:
            folder = Path(hub.snapshot_download(name, local_files_only=local, ignore_patterns=_NOT_NEEDED))
            if not local or _is_whole(folder):
                return folder
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise FormatError("neither a local path nor a repository that the hub gives", file=name, got=reason)


def _is_whole(folder: Path) -> bool:
    """Whether a cached copy holds its weights, and not just the configs that somebody asked for."""
    try:
        file = _index_of(folder)
        named = (
            set(_weight_map(read_json(file), file).values()) if file else {f.name for f in folder.glob("*.safetensors")}
        )
    except FormatError:
        return False
    return bool(named) and all((folder / name).is_file() for name in named)


def _shard_files(root: Path, table: dict[str, str] | None, findings: list[Finding]) -> list[Path]:
    if not root.is_dir():
        return [_checked_file(root)]
    files = sorted(root.glob("*.safetensors"))
    if table is not None:
        named = sorted(set(table.values()))
        missing = next((name for name in named if not (root / name).is_file()), None)
        if missing is not None:
            raise FormatError("the index names a shard that is not there", file=str(_index_of(root)), got=missing)
        findings += [Finding("HB132", got=f.name, hint="it is not read") for f in files if f.name not in named]
        return [root / name for name in named]
    if files:
        return files
    for file in sorted(root.iterdir()):
        if file.suffix == ".gguf" or file.suffix in _PICKLED:
            _checked_file(file)
    raise FormatError("no safetensors files in this directory", file=str(root))


def _index_of(root: Path) -> Path | None:
    indexes = sorted(root.glob("*.safetensors.index.json"))
    return root / INDEX if root / INDEX in indexes else next(iter(indexes), None)


def _checked_file(file: Path) -> Path:
    if not file.is_file():
        raise FormatError("not a regular file", file=str(file))
    if file.suffix in _PICKLED:
        raise FormatError("not a safetensors file", file=str(file), hint=_unpickle(file.name))
    with open(file, "rb") as handle:
        magic = handle.read(8)
    if file.suffix == ".safetensors" and int.from_bytes(magic, "little") <= MAX_HEADER:
        return file
    if magic[:4] == b"GGUF" or file.suffix == ".gguf":
        raise UnreadDialectError(
            "this is a GGUF file, which is recognised and not read yet",
            file=str(file),
            expected="a safetensors file or a directory of them",
        )
    if magic[:2] == b"PK" or magic[:1] == b"\x80":
        raise FormatError("not a safetensors file", file=str(file), hint=_unpickle(file.name))
    return file


def _unpickle(name: str) -> str:
    code = (
        "import torch; from safetensors.torch import save_file; "
        f"save_file(torch.load({name!r}, weights_only=True), 'model.safetensors')"
    )
    command = f"python -c {shlex.quote(code)}"
    return f"pickled files can run code and are never opened; convert it where you trust it: {command}"


def _weight_map(index: dict[str, Any], file: Path) -> dict[str, str]:
    table = index.get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise FormatError("the index has no weight_map of names to files", file=str(file))
    bad = {n for n in set(table.values()) if n != os.path.basename(n) or n in ("", ".", "..") or "\\" in n or "\0" in n}
    for tensor, name in table.items() if bad else ():
        if name in bad:
            raise FormatError(
                "the index names a file outside the directory", file=str(file), tensor=tensor, got=repr(name)
            )
    return table


def _check_index(index: dict[str, Any], tensors: dict[str, Stored], findings: list[Finding]) -> None:
    table: dict[str, str] = index["weight_map"]
    base_name = {file: os.path.basename(file) for file in {t.file for t in tensors.values()}}
    held = {name: base_name[tensor.file] for name, tensor in tensors.items()}
    if held != table:
        for name, file in table.items():
            if held.get(name) != file:
                got = f"in {held[name]}" if name in held else "in no shard"
                findings.append(Finding("HB130", name, got=got, expected=file))
        findings += [Finding("HB131", name, got=file) for name, file in held.items() if name not in table]
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(t.nbytes for t in tensors.values())
    if total is not None and total != actual:
        findings.append(Finding("HB133", got=total, expected=actual))


def _recall(checkpoint: Checkpoint, shard: Header) -> None:
    """Take the provenance of a shard where each number's reciprocal rounds to what is stored."""
    text = shard.metadata.get(PROVENANCE)
    if text is None:
        return
    try:
        table = parse_json(text, shard.file)
    except FormatError:
        table = None
    if not isinstance(table, dict):
        hint = f"the metadata {PROVENANCE} is no table and is ignored: the stored numbers count"
        checkpoint.findings.append(Finding("HB122", got=text[:40], expected="a JSON object", hint=hint))
        return
    for name, number in table.items():
        tensor = checkpoint.tensors.get(name)
        try:
            kept = np.frombuffer(bytes.fromhex(number), ">f4").astype(np.float32)
        except (ValueError, TypeError):
            kept = np.empty(0, np.float32)
        fits = tensor is not None and tensor.dtype == "F32" and 4 <= tensor.nbytes == kept.nbytes
        stored = checkpoint.read(tensor) if tensor is not None and fits and not np.isnan(kept).all() else None
        if stored is not None:  # NaN stands for a number that the stored one leads back to
            leads, kept = np.isnan(kept), kept.reshape(stored.shape)
            kept = np.where(leads.reshape(stored.shape), reciprocal(stored), kept)
            fits = np.array_equal(reciprocal(kept).reshape(-1)[~leads], stored.reshape(-1)[~leads])
        if stored is None or not fits:
            one = stored is not None and stored.size == 1
            got = float(stored.reshape(())) if one and stored is not None else None
            hint = "it is ignored: the stored number counts"
            checkpoint.findings.append(Finding("HB122", name, got=got, expected=str(number)[:40], hint=hint))
        else:
            checkpoint._originals[name] = kept


def encode_provenance(originals: Mapping[str, Any]) -> dict[str, str]:
    """The metadata entry for numbers whose reciprocals were stored; {} if there are none."""
    table = {name: np.asarray(value, ">f4").tobytes().hex() for name, value in sorted(originals.items())}
    return {PROVENANCE: json.dumps(table, separators=(",", ":"), ensure_ascii=False)} if table else {}
