"""Small checkpoints for tests, built from NumPy arrays with the safetensors library or from raw bytes, and ways to run
the command line. Imports no torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import TensorSpec, safe_open, serialize_file

import halfbyte

GOLDEN = Path(__file__).parent / "golden"
TINY = GOLDEN / "tiny_ckpt"
GOLDENS = {path.name: path for path in sorted(TINY.iterdir())}
"""The five checkpoints that real tools wrote."""
SOURCE = Path(halfbyte.__file__).parent
"""The package under test."""

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
HIDDEN, INTER, VOCAB = 32, 48, 64
INDEX = "model.safetensors.index.json"

Tensors = dict[str, Any]
"""Name -> NumPy array or Raw."""


@dataclass(frozen=True)
class Raw:
    """A tensor of a dtype that NumPy lacks, or one that a header should misstate."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def f4(codes: np.ndarray) -> Raw:
    """Packed codes, (N, K/2) u8, as torch writes float4_e2m1fn_x2: the header counts codes."""
    return Raw("F4", (*codes.shape[:-1], codes.shape[-1] * 2), codes.tobytes())


# --- files


def raw_safetensors(path: Path, header: Mapping[str, Any] | bytes | str, data: bytes = b"", length: int | None = None):
    """A file with any header: an object, or text as it is; ``length`` is the length to claim."""
    text = json.dumps(header) if isinstance(header, Mapping) else header
    text = text.encode() if isinstance(text, str) else text
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def header_of(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, parsed without halfbyte."""
    with path.open("rb") as handle:
        return json.loads(handle.read(struct.unpack("<Q", handle.read(8))[0]))


def tensors_of(path: Path) -> Tensors:
    """All tensors of a file, or of all shards of a directory, as Raw."""
    if path.is_dir():
        return {n: t for file in sorted(path.glob("*.safetensors")) for n, t in tensors_of(file).items()}
    data = path.read_bytes()
    base = 8 + struct.unpack("<Q", data[:8])[0]
    return {
        name: Raw(e["dtype"], tuple(e["shape"]), data[base + e["data_offsets"][0] : base + e["data_offsets"][1]])
        for name, e in header_of(path).items()
        if name != "__metadata__"
    }


def by_library(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, list[int]]]]:
    """Metadata, and name -> (dtype, shape), as the safetensors library reads a file."""
    with safe_open(path, framework="np") as file:
        names = list(file.keys())
        slices = {name: file.get_slice(name) for name in names}
        return file.metadata() or {}, {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}


def f32(raw: Raw) -> np.ndarray:
    """An F32 tensor's numbers."""
    assert raw.dtype == "F32"
    return np.frombuffer(raw.data, np.float32).reshape(raw.shape)


_SPEC = {"F4": "float4_e2m1fn_x2"}


def save(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    """Write a file with the safetensors library."""
    arrays = {name: _array(value) for name, value in tensors.items()}
    specs = {
        name: TensorSpec(dtype=dtype, shape=shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, (dtype, shape, array) in arrays.items()
    }
    serialize_file(specs, path, metadata={"format": "pt"} if metadata is None else metadata or None)
    return path


_NUMPY_NAME = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "U8": "uint8", "I8": "int8",
    "F8_E8M0": "float8_e8m0fnu", "I32": "int32", "U32": "uint32", "I64": "int64", "F64": "float64",
}  # fmt: skip


def _array(value: Any) -> tuple[str, list[int], np.ndarray]:
    if isinstance(value, Raw):
        data = np.frombuffer(value.data or b"\0", np.uint8)[: len(value.data)]
        if value.dtype == "F4":
            return _SPEC["F4"], [*value.shape[:-1], value.shape[-1] // 2], data
        return _NUMPY_NAME[value.dtype], list(value.shape), data
    array = np.array(value, order="C")
    return array.dtype.name, list(array.shape), array


def save_sharded(path: Path, shards: Sequence[Tensors], total_size: int | None = None) -> Path:
    """Write shards with their index into a directory."""
    path.mkdir(parents=True, exist_ok=True)
    table = {}
    for i, tensors in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save(path / name, tensors)
        table |= dict.fromkeys(tensors, name)
    nbytes = sum(_array(t)[2].nbytes for tensors in shards for t in tensors.values())
    total = nbytes if total_size is None else total_size
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": table}))
    return path


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def listing(path: Path) -> dict[str, bytes]:
    """Relative name -> content of every file below a directory."""
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


def leftovers(parent: Path, *known: str) -> list[str]:
    """Entries of a directory beside the known ones, hidden ones included."""
    return sorted(entry.name for entry in parent.iterdir() if entry.name not in known)


def copy_golden(name: str, to: Path) -> Path:
    """A golden checkpoint that may be altered."""
    shutil.copytree(GOLDENS[name], to)
    return to


# --- weights

SUFFIXES = {
    "modelopt": {
        "codes": "weight", "scales": "weight_scale", "scale2": "weight_scale_2", "input_scale": "input_scale",
        "pre_scale": "pre_quant_scale",
    },
    "compressed-tensors": {
        "codes": "weight_packed", "scales": "weight_scale", "scale2": "weight_global_scale",
        "input_scale": "input_global_scale",
    },
}  # fmt: skip


def nvfp4(n: int, k: int, seed: int = 0, *, scale2: float = 2.0**-12, input_scale: float | None = None) -> Tensors:
    """The roles of a sound NVFP4 weight: every code, and every normal positive block scale, may occur."""
    rng = np.random.default_rng([n, k, seed])
    roles: Tensors = {
        "codes": rng.integers(0, 256, (n, k // 2), np.uint8),
        "scales": rng.integers(0x08, 0x7F, (n, k // 16), np.uint8).view(E4M3),
        "scale2": np.float32(scale2),
    }
    return roles if input_scale is None else roles | {"input_scale": np.float32(input_scale)}


def named(dialect: str, module: str, roles: Tensors, scalar_shape: tuple[int, ...] | None = None) -> Tensors:
    """The tensors of a weight under the names of a dialect, and reciprocals where it divides."""
    divides = dialect == "compressed-tensors"
    shape = ((1,) if divides else ()) if scalar_shape is None else scalar_shape
    tensors: Tensors = {}
    for role, value in roles.items():
        name = f"{module}.{SUFFIXES[dialect].get(role, role)}"
        if role in ("scale2", "input_scale"):
            with np.errstate(divide="ignore", over="ignore"):
                value = np.float32(1) / np.float32(value) if divides else np.float32(value)
            value = np.full(shape, value, np.float32)
        tensors[name] = value
    return tensors


def fp8(n: int, k: int, seed: int = 0, *, scale: Any = 2.0**-7) -> Tensors:
    """The roles of a sound FP8 weight."""
    rng = np.random.default_rng([n, k, seed, 8])
    data = (rng.integers(0, 0x7F, (n, k), np.uint8) | (rng.integers(0, 2, (n, k), np.uint8) << 7)).astype(np.uint8)
    return {"weight": data.view(E4M3), "weight_scale": np.asarray(scale, np.float32)}


def floats(n: int, k: int, seed: int = 0, dtype: Any = BF16, std: float = 0.02) -> np.ndarray:
    """A dense weight of Gaussian values."""
    return (np.random.default_rng([n, k, seed, 3]).standard_normal((n, k)) * std).astype(dtype)


ATTENTION = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (16, HIDDEN), "v_proj": (16, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
MLP = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}


def linears(layers: int = 1) -> dict[str, tuple[int, int]]:
    """Name -> (N, K) of the linear layers of the small model."""
    return {
        f"model.layers.{i}.{part}.{name}": shape
        for i in range(layers)
        for part, table in (("self_attn", ATTENTION), ("mlp", MLP))
        for name, shape in table.items()
    }


LINEARS = linears()
Q, K, V, OUT, GATE, UP, DOWN = LINEARS
"""Names of the linear layers of the small model of one layer."""


def others(layers: int = 1, lm_head: bool = True) -> Tensors:
    """Embedding, norms and lm_head of the small model, in bfloat16."""
    norms = [f"model.layers.{i}.{n}_layernorm" for i in range(layers) for n in ("input", "post_attention")]
    tensors = {f"{name}.weight": np.ones(HIDDEN, BF16) for name in [*norms, "model.norm"]}
    tensors["model.embed_tokens.weight"] = floats(VOCAB, HIDDEN, 1)
    return tensors | ({"lm_head.weight": floats(VOCAB, HIDDEN, 2)} if lm_head else {})


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": HIDDEN,
    "intermediate_size": INTER, "vocab_size": VOCAB, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
}  # fmt: skip
IGNORED = ["lm_head", "model.embed_tokens"]


def modelopt_section(algo: str = "W4A16_NVFP4", ignore: Sequence[str] = IGNORED, **more: Any) -> dict[str, Any]:
    """``quantization_config`` as ModelOpt writes it, without what readers do not need."""
    return {"quant_algo": algo, "ignore": list(ignore), "quant_method": "modelopt"} | more


def ct_section(static: bool = False, ignore: Sequence[str] = ("lm_head",), **more: Any) -> dict[str, Any]:
    """``quantization_config`` as compressed-tensors writes it."""
    args = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16, "strategy": "tensor_group"}
    group = {
        "targets": ["Linear"],
        "weights": args | {"dynamic": False},
        "input_activations": args | {"dynamic": "local"} if static else None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "config_groups": {"group_0": group},
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    } | more


def quantized(dialect: str = "modelopt", layers: int = 1, input_scale: bool = False) -> Tensors:
    """All tensors of the small model with NVFP4 linear layers; parts that engines fuse share their scales."""
    tensors = others(layers)
    for seed, (name, (n, k)) in enumerate(linears(layers).items()):
        roles = nvfp4(n, k, seed, scale2=2.0**-12, input_scale=2.0**-10 if input_scale else None)
        tensors |= named(dialect, name, roles)
    return tensors


def make_dense(
    path: Path,
    dialect: str = "modelopt",
    *,
    change: Mapping[str, Any] | Callable[[Tensors], Any] | None = None,
    section: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = CONFIG,
    quant: Mapping[str, Any] | None = None,
    input_scale: bool = False,
    layers: int = 1,
    shards: int = 1,
    metadata: dict[str, str] | None = None,
) -> Path:
    """A checkpoint of a small dense model (no experts) whose linear layers are NVFP4, sound unless changed.

    Args:
        path: the directory to make.
        dialect: "modelopt" or "compressed-tensors".
        change: tensors to set or, with None, to remove; or a function that alters them all.
        section: ``quantization_config``; by default one that says what the tensors are, with {} none.
        config: the rest of config.json; None leaves the file out.
        quant: hf_quant_config.json; by default left out.
        input_scale: whether activations have a static scale.
        layers, shards: how many; the tensors go to the shards in turn, so that weights and scales are apart.
        metadata: of the file, where there is one shard.
    """
    tensors = quantized(dialect, layers, input_scale)
    if callable(change):
        change(tensors)
    else:
        tensors = {name: value for name, value in (tensors | dict(change or {})).items() if value is not None}
    path.mkdir(parents=True)
    if shards == 1:
        save(path / "model.safetensors", tensors, metadata)
    else:
        names = list(tensors)
        save_sharded(path, [{n: tensors[n] for n in names[i::shards]} for i in range(shards)])
    if section is None:
        modelopt = dialect == "modelopt"
        section = modelopt_section("NVFP4" if input_scale else "W4A16_NVFP4") if modelopt else ct_section(input_scale)
    if config is not None:
        write_json(path / "config.json", dict(config) | ({"quantization_config": section} if section else {}))
    if quant is not None:
        write_json(path / "hf_quant_config.json", quant)
    return path


def make_float(path: Path, tensors: Tensors | None = None, *, dtype: Any = BF16, shards: int = 1, layers: int = 1):
    """A checkpoint of the small model before quantization."""
    if tensors is None:
        tensors = others(layers)
        for seed, (name, (n, k)) in enumerate(linears(layers).items()):
            tensors[f"{name}.weight"] = floats(n, k, seed, dtype)
    path.mkdir(parents=True)
    if shards == 1:
        save(path / "model.safetensors", tensors)
    else:
        names = list(tensors)
        save_sharded(path, [{n: tensors[n] for n in names[i::shards]} for i in range(shards)])
    write_json(path / "config.json", CONFIG)
    return path


# --- the command line


class Ran(NamedTuple):
    """What a command did."""

    rc: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        """Lines of stderr."""
        return self.stderr.splitlines()

    @property
    def document(self) -> Any:
        """The JSON document on stdout; Python's NaN and Infinity are not JSON."""
        return json.loads(self.stdout, parse_constant=_refuse)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def environment(**more: str) -> dict[str, str]:
    """Variables for a fresh process: the package under test, no hub, no colour or width of the caller's."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "HALFBYTE_DEBUG")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    path = os.pathsep.join([str(SOURCE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | more


def command_line(*args: Any) -> list[str]:
    """``python -m halfbyte`` with arguments."""
    return [sys.executable, "-m", "halfbyte", *map(str, args)]


def run_cli(*args: Any, timeout: float = 60, env: Mapping[str, str] | None = None, **options: Any) -> Ran:
    """Run the command line in a fresh process."""
    done = subprocess.run(
        command_line(*args),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**(env or {})),
        stdin=subprocess.DEVNULL,
        check=False,
        **options,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def call(*args: Any) -> Ran:
    """Run the command line in this process, which is faster."""
    from halfbyte.cli import main

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    code: Any = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main([str(a) for a in args])
        except SystemExit as ended:
            code = ended.code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return Ran(int(code or 0), out.getvalue(), err.getvalue())


def check_failure(ran: Ran, rc: int = 2, *parts: Any) -> str:
    """Assert a failure told in one line on stderr, with the given parts in it; returns the line."""
    assert ran.rc == rc, ran
    assert ran.stdout == "", ran
    assert len(ran.lines) == 1, ran.stderr
    assert ran.lines[0].startswith("halfbyte: "), ran.stderr
    for word in ("Traceback", "internal error", "Error:", "\\n"):
        assert word not in ran.stderr, ran.stderr
    for part in parts:
        assert str(part) in ran.lines[0], (part, ran.stderr)
    return ran.lines[0]


def codes(findings: Iterable[Any]) -> list[tuple[str, str | None, list[int] | None]]:
    """(code, tensor, index) of each finding."""
    return [(f.code, f.tensor, f.index) for f in findings]


# --- experts

GATE_UP = {"concatenated": (0, 1), "up_first": (1, 0), "interleaved": (0, 1)}


def joined(gate: np.ndarray, up: np.ndarray, order: str) -> np.ndarray:
    """The rows of gate and of up as a stack holds them."""
    if order == "interleaved":
        return np.stack([gate, up], 1).reshape(-1, *gate.shape[1:])
    return np.concatenate([gate, up] if order == "concatenated" else [up, gate])


def expert_weights(experts: int, inter: int, hidden: int, parts=("gate_proj", "up_proj", "down_proj"), **scales: Any):
    """(expert, part) -> roles of NVFP4 weights; ``scales`` holds scale2 and input_scale as functions of both."""
    shapes = {part: (hidden, inter) if part in ("down_proj", "w2") else (inter, hidden) for part in parts}
    made = {}
    for e in range(experts):
        for i, (part, (n, k)) in enumerate(shapes.items()):
            numbers = {role: of(e, i) for role, of in scales.items()}
            made[e, part] = nvfp4(n, k, 10 * e + i, **numbers)
    return made


def split_experts(parent: str, made: Mapping[tuple[int, str], Tensors], dialect: str = "modelopt") -> Tensors:
    """The tensors of experts under their own names."""
    return {n: t for (e, part), roles in made.items() for n, t in named(dialect, f"{parent}.{e}.{part}", roles).items()}


def stacked_experts(
    parent: str,
    made: Mapping[tuple[int, str], Tensors],
    *,
    columns: bool = False,
    order: str = "concatenated",
    halves: bool = False,
    dotted: bool = False,
) -> Tensors:
    """The tensors of the same experts as stacks: (E, N, ..), or (E, .., N) where ``columns``.

    scale2 and input_scale are (E,); with ``halves``, (E, 2) for gate and up.
    """
    experts = 1 + max(e for e, _ in made)
    parts = list(dict.fromkeys(part for _, part in made))
    pairs = {("gate_proj", "up_proj"): "gate_up_proj", ("w1", "w3"): "w13"}
    stems: dict[str, tuple[str, ...]] = {}
    for pair, stem in pairs.items():
        if set(pair) <= set(parts):
            stems[stem] = pair
    stems |= {p: (p,) for p in parts if not any(p in pair for pair in stems.values())}
    tensors: Tensors = {}
    for stem, members in stems.items():
        suffix = "_weight" if stem in ("w13", "w2") else ".weight" if dotted else ""
        mid = "." if dotted else "_"
        arrays: Tensors = {}
        for role in made[0, members[0]]:
            each = [[np.asarray(made[e, part][role]) for part in members] for e in range(experts)]
            if role in ("codes", "scales"):
                stack = np.stack([joined(*pair, order) if len(pair) == 2 else pair[0] for pair in each])
                arrays[role] = np.ascontiguousarray(stack.swapaxes(1, 2)) if columns else stack
            else:
                numbers = np.array(each, np.float32)
                arrays[role] = numbers if halves and len(members) == 2 else numbers[:, 0]
        names = {"codes": suffix, "scales": f"{mid}weight_scale", "scale2": f"{mid}weight_scale_2"}
        names |= {"input_scale": f"{mid}input_scale"}
        tensors |= {f"{parent}.{stem}{names[role]}": array for role, array in arrays.items()}
    return tensors


def mxfp4(n: int, k: int, seed: int = 0, low: int = 118, high: int = 130) -> Tensors:
    """Codes (N, K/2) and E8M0 scales (N, K/32) of an MXFP4 weight, exponents low - 127 to high - 127."""
    rng = np.random.default_rng([n, k, seed, 4])
    return {
        "codes": rng.integers(0, 256, (n, k // 2), np.uint8),
        "scales": rng.integers(low, high + 1, (n, k // 32), np.uint8),
    }
