"""What the headers of a checkpoint show: its modules, whether each is sound, and what the configs state.

A module's tensors are known by roles, whatever their names on disk: ``codes``, ``scales``, ``scale2``,
``input_scale``, ``pre_scale``; ``data`` and ``scale`` of FP8 weights; ``bias``, ``k_scale``, ``v_scale`` beside any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Final, Literal

from halfbyte.errors import FormatError
from halfbyte.findings import Finding
from halfbyte.numerics import BLOCK
from halfbyte.stored import FLOATS, Stored

Kind = Literal["nvfp4", "fp8", "mxfp4", "unread", "dense", "none"]
QUANTIZED: Final = ("nvfp4", "fp8", "mxfp4")
"""Kinds whose weights are read and decoded."""

BYTES = ("U8", "I8", "F4")
"""Header dtypes that carry codes: one byte for two codes, or F4, which counts codes."""


COMFY_METADATA: Final = "_quantization_metadata"
COMFY_TENSOR: Final = "comfy_quant"
"""A key in a file's metadata and the suffix of a tensor: marks of ComfyUI, which tell how a weight is stored."""

LAYOUT_METADATA: Final = "halfbyte.layout"
"""Key in a file's metadata: JSON {module: {"layout": key, "shape": [N, K]}}, of weights that are packed buffers."""

SHARD_METADATA: Final = "halfbyte.shard"
"""Key in a file's metadata: JSON {"mode": "tensor" or "expert", "rank": r, "degree": n, ...}, of one rank's part."""


@dataclass(frozen=True)
class Reading:
    """How the bytes of NVFP4 weights are to be read where that is not what their dialect says; see halfbyte.reading.

    Attributes:
        nibble_order: "low" or "high": which nibble holds the even k.
        scale_layout: the order that block scales lie in, such as "128x4".
        scale2: what is stored: "multiplier", "divisor" or "amax".
        gate_up: the order of gate and up in stacks: "concatenated", "up_first" or "interleaved".
    """

    nibble_order: str | None = None
    scale_layout: str | None = None
    scale2: str | None = None
    gate_up: str | None = None

    def __bool__(self) -> bool:
        return any((self.nibble_order, self.scale_layout, self.scale2))

    @property
    def options(self) -> list[str]:
        """The command line's options that ask for it."""
        named = {name.replace("_", "-"): value for name, value in vars(self).items() if value is not None}
        return [f"--{name} {value}" for name, value in named.items()]


@dataclass(frozen=True)
class Headers:
    """A checkpoint as its headers show it.

    Attributes:
        tensors: by full name.
        metadata: ``__metadata__`` of all files, merged.
        config: config.json, {} if there is none.
        quant: hf_quant_config.json, {} if there is none.
        reading: what the caller knows better.
    """

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    quant: Mapping[str, Any] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)

    @cached_property
    def by_suffix(self) -> dict[str, list[Stored]]:
        """The tensors by what follows the last dot of their names."""
        found: dict[str, list[Stored]] = defaultdict(list)
        for name, tensor in self.tensors.items():
            found[name.rpartition(".")[2]].append(tensor)
        return found

    def beside(self, tensor: Stored, suffix: str) -> Stored | None:
        """The tensor of that suffix in the same module, or None."""
        module = tensor.name.rpartition(".")[0]
        return self.tensors.get(f"{module}.{suffix}" if module else suffix)

    @cached_property
    def swizzled_mark(self) -> str | None:
        """What tells that scales are swizzled and the high nibble comes first, as ComfyUI stores them, or None.

        It tells nothing where the caller says how they lie.
        """
        if self.reading.nibble_order or self.reading.scale_layout:
            return None
        if COMFY_METADATA in self.metadata:
            return f"metadata {COMFY_METADATA}"
        for tensor in self.by_suffix.get(COMFY_TENSOR, ()):
            return f"tensor {tensor.name}"
        # Without a marker: scales padded to 128 rows and 4 columns, which is the shape of the swizzled form.
        for scales in self.by_suffix.get("weight_scale", ()):
            if len(scales.shape) != 2 or scales.shape[0] % 128 or scales.shape[1] % 4:
                continue
            codes = self.beside(scales, "weight")
            if codes is not None and codes.dtype == "U8" and len(codes.shape) == 2:
                n, k = codes.shape[0], codes.shape[1] * 2
                padded = (-(-n // 128) * 128, -(-k // 64) * 4)
                if scales.shape == padded != (n, k // 16):
                    return f"padded block scales {scales.name}"
        return None


@dataclass(frozen=True)
class Stack:
    """How the experts of a stack lie; see halfbyte.experts.

    Attributes:
        columns: whether K comes before N: codes (E, K/2, N), dense (E, K, N).
        gate_up: "concatenated", "up_first" or "interleaved" where a stack holds gate and up; None where it does
            not, or the order is not known.
    """

    columns: bool = False
    gate_up: str | None = None


@dataclass  # frozen takes three times as long to make, and there are tens of thousands
class Module:
    """What one module of a checkpoint holds, from headers alone; nothing changes one that is made.

    Attributes:
        name: such as ``model.layers.0.mlp.up_proj``.
        kind: of its weight; "unread" for weights of other formats, "none" for tensors that are not beside a weight.
        roles: role -> tensor.
        unknown: tensors beside the weight whose meaning is not known.
        stack: how it lies if it is a stack of experts, else None.
    """

    name: str
    kind: Kind
    roles: Mapping[str, Stored]
    unknown: tuple[Stored, ...] = ()
    stack: Stack | None = None

    @property
    def main(self) -> Stored | None:
        """The tensor with the weight's values or codes."""
        return self.roles.get("codes") or self.roles.get("data")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The logical shape: (*E, N, K), or a dense tensor's own."""
        main = self.main
        if main is None or not main.shape:
            return ()
        shape = main.shape
        if self.kind == "mxfp4" and len(shape) == 4:  # gpt-oss: (E, N, K/32, 16) bytes
            shape = (*shape[:-2], shape[-2] * shape[-1])
        if self.stack is not None and self.stack.columns:
            shape = (*shape[:-2], shape[-1], shape[-2])
        packed = self.kind in ("nvfp4", "mxfp4") and main.dtype != "F4"
        return (*shape[:-1], shape[-1] * 2) if packed else shape

    def member(self, suffix: str) -> str:
        """The full name of a tensor of this module; a matrix saved by itself has no module name."""
        return f"{self.name}.{suffix}" if self.name else suffix

    @property
    def tensors(self) -> list[Stored]:
        """All of the module's tensors."""
        return [*self.roles.values(), *self.unknown]


def is_mx(codes: Stored, scales: Stored) -> bool:
    """Whether scales are MXFP4's: one E8M0 byte for 32 codes, which are 16 bytes."""
    fits = bool(codes.shape and scales.shape) and scales.shape[-1] * 16 == codes.shape[-1]
    return scales.dtype == "F8_E8M0" or (scales.dtype == "U8" and fits)


def structure(module: Module) -> list[Finding]:
    """Findings about a module that its headers alone show."""
    found: list[Finding] = []
    main = module.main
    if main is not None and module.stack is not None and module.kind != "dense" and 0 in module.shape:
        found.append(Finding("HB102", main.name, got=str(main), expected="at least one expert, row and column"))
    elif module.kind == "nvfp4" and main is not None:
        found += _nvfp4_structure(module, main)
    elif module.kind == "mxfp4" and main is not None:
        found += _mxfp4_structure(module, main)
    elif module.kind == "fp8" and main is not None:
        scale = module.roles.get("scale")
        if scale is None:
            found.append(Finding("HB101", main.name, expected=module.member("weight_scale")))
        elif scale.dtype not in FLOATS:
            found.append(Finding("HB114", scale.name, got=str(scale), expected="F32"))
        elif module.stack is not None:
            found += _scalar_shape(module, scale)
        elif len(main.shape) != 2:
            found.append(Finding("HB114", main.name, got=str(main), expected="FP8 with two axes"))
        elif all(scale.shape not in shapes for shapes in _fp8_scales(*main.shape).values()):
            allowed = (shape for shapes in _fp8_scales(*main.shape).values() for shape in reversed(shapes))
            need = " or ".join(str(list(shape)) for shape in allowed)
            found.append(Finding("HB109", scale.name, got=list(scale.shape), expected=need))
    elif module.kind == "unread":
        found.append(Finding("HB139", main.name if main else module.name, got=str(main) if main else None))
    found += [
        Finding("HB120", t.name, got=str(t), hint="convert to its own dialect carries it; another dialect refuses it")
        for t in module.unknown
    ]
    return found


def _nvfp4_structure(module: Module, codes: Stored) -> list[Finding]:
    found: list[Finding] = []
    scales, scale2 = module.roles.get("scales"), module.roles.get("scale2")
    if scales is None:
        return [Finding("HB101", codes.name, got=str(codes), expected=module.member("weight_scale"))]
    if len(module.shape) < 2:
        return [Finding("HB102", codes.name, got=str(codes), expected="codes with two axes")]
    if codes.dtype not in BYTES:
        return [Finding("HB114", codes.name, got=str(codes), expected="U8")]
    *experts, n, k = module.shape
    columns = module.stack is not None and module.stack.columns
    expected = [*experts, k // BLOCK, n] if columns else [*experts, n, k // BLOCK]
    if k % BLOCK:
        found.append(Finding("HB102", codes.name, got=f"K = {k}", expected=f"a multiple of {BLOCK}"))
    elif list(scales.shape) != expected:
        less = [*experts, k // BLOCK // 2, n] if columns else [*experts, n, k // BLOCK // 2]
        half = list(scales.shape) == less
        hint = "half the columns: exported from an already compressed model; export it again" if half else None
        if experts and not half:
            hint = "the axis of the scales that is an eighth of the codes' bytes is K: here there is none"
        found.append(Finding("HB102", scales.name, got=list(scales.shape), expected=expected, hint=hint))
    if scales.dtype not in ("F8_E4M3", "U8"):
        found.append(Finding("HB114", scales.name, got=str(scales), expected="F8_E4M3"))
    if scale2 is None:
        hint = "a single-level file has scale2 = 1: engines that expect one read rubbish"
        found.append(Finding("HB105", codes.name, hint=hint))
    for role in ("scale2", "input_scale"):
        scalar = module.roles.get(role)
        if scalar is None:
            continue
        if scalar.dtype not in FLOATS:
            found.append(Finding("HB114", scalar.name, got=str(scalar), expected="F32"))
        elif scalar.dtype != "F32":
            found.append(Finding("HB107", scalar.name, got=scalar.dtype, expected="F32"))
        found += _scalar_shape(module, scalar)
    pre = module.roles.get("pre_scale")
    stacked = (*experts, k), (*experts, 1, k)
    if pre is not None and pre.shape != (k,) and not (experts and pre.shape in stacked):
        found.append(Finding("HB109", pre.name, got=list(pre.shape), expected=[k]))
    return found


def _scalar_shape(module: Module, scalar: Stored) -> list[Finding]:
    """The finding about a scale that should be one number, or one for each expert or half of it."""
    experts = module.shape[:-2]
    fits = prod(scalar.shape) == 1 or scalar.shape in (experts, (*experts, 1), (*experts, 1, 1))
    halves = module.stack is not None and module.name.rpartition(".")[2] in ("gate_up_proj", "w13")
    if fits or (halves and scalar.shape == (*experts, 2)):
        return []
    expected = f"[], {list(experts)}" + (f" or {[*experts, 2]}" if halves else "") if experts else "[] or [1]"
    return [Finding("HB109", scalar.name, got=list(scalar.shape), expected=expected)]


def _mxfp4_structure(module: Module, codes: Stored) -> list[Finding]:
    scales = module.roles.get("scales")
    if scales is None:
        return [Finding("HB101", codes.name, got=str(codes), expected=module.member("weight_scale"))]
    found = [
        Finding("HB114", t.name, got=str(t), expected="U8")
        for t in (codes, scales)
        if t.dtype not in (*BYTES, "F8_E8M0")
    ]
    *experts, n, k = module.shape if len(module.shape) > 1 else (0, 0)
    blocks = len(codes.shape) != 4 or codes.shape[-1] == 16
    if k % 32 or not k or not blocks or list(scales.shape) != [*experts, n, k // 32]:
        found.append(Finding("HB102", scales.name, got=list(scales.shape), expected=[*experts, n, k // 32]))
    return found


def _fp8_scales(n: int, k: int) -> dict[str, list[tuple[int, ...]]]:
    """Granularity -> the shapes that the scale of an (n, k) FP8 weight can have, the plainest last."""
    blocks = (-(-n // 128), -(-k // 128))
    return {
        "tensor": [(1, 1), (1,), ()],
        "row": [(n, 1), (n,)],
        "block": [(blocks[0], 1, blocks[1], 1), blocks],
    }


def fp8_granularity(module: Module) -> str:
    """ "tensor", "row" or "block" (of 128x128), by the shape of the scale of a sound FP8 module."""
    scale = module.roles["scale"].shape
    return next(name for name, shapes in _fp8_scales(*module.shape).items() if scale in shapes)


def fp8_scale(module: Module, scale: Any) -> tuple[Any, tuple[int, int] | None]:
    """The scale of an FP8 module in the shape that Fp8Weight takes, and its block."""
    if fp8_granularity(module) != "block":
        return scale, None
    return scale.reshape(_fp8_scales(*module.shape)["block"][-1]), (128, 128)


def refuse_broken(module: Module) -> None:
    """Refuse a module whose headers show that it is not sound.

    Raises:
        FormatError: with the first error that ``structure`` finds.
    """
    problem = next((f for f in structure(module) if f.severity == "error"), None)
    if problem is not None:
        raise problem.error(module.main.file if module.main else None)


def refuse_companions(module: Module, roles: Iterable[str], why: str) -> None:
    """Refuse a module that has tensors beside its weight which would otherwise be ignored.

    Raises:
        FormatError: naming them.
    """
    left = [module.roles[r].name for r in roles if r in module.roles] + [t.name for t in module.unknown]
    if left:
        raise FormatError(
            f"the tensors beside this weight {why}",
            file=module.main.file if module.main else None,
            tensor=module.name,
            got=", ".join(sorted(left)),
            hint="dropping them would change the result: keep the checkpoint in its own dialect",
        )


def quant_section(headers: Headers) -> Mapping[str, Any]:
    """``quantization_config`` of config.json, at its top or inside the text model's config; {} if there is none."""
    places = [headers.config] + [v for v in headers.config.values() if isinstance(v, dict)]
    for place in places:
        for key in ("quantization_config", "compression_config"):
            if isinstance(section := place.get(key), dict):
                return section
    return {}


def kv_format(headers: Headers) -> str | None:
    """The format that a config gives the KV cache: "FP8", "NVFP4", another name, or None."""
    section = quant_section(headers)
    scheme = (
        nested_section(headers).get("kv_cache_quant_algo")
        or section.get("kv_cache_quant_algo")
        or section.get("kv_cache_scheme")
    )
    if isinstance(scheme, dict):
        bits = scheme.get("num_bits")
        return "FP8" if bits == 8 else "NVFP4" if bits == 4 else "unknown"
    return scheme if isinstance(scheme, str) else None


def nested_section(headers: Headers) -> Mapping[str, Any]:
    """The section of hf_quant_config.json, which is nested in new files and flat in old ones."""
    nested = headers.quant.get("quantization", headers.quant)
    return nested if isinstance(nested, dict) else {}


def dicts_of(value: Any) -> dict[str, dict[str, Any]]:
    """The entries of ``value`` that are objects; {} if it is none."""
    return {k: v for k, v in value.items() if isinstance(v, dict)} if isinstance(value, dict) else {}


def strings_of(value: Any) -> list[str]:
    """The strings of the list ``value``; [] if it is none."""
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []
