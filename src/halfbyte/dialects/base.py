"""What a dialect is: how one ecosystem names and means tensors on disk.

A dialect is mostly a table: for each kind of weight, the suffix of each role; see halfbyte.modules for the roles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from halfbyte.bundles import Bundle
from halfbyte.errors import FormatError, UnreadDialectError
from halfbyte.experts import as_stack, stacked_arrays, stacks
from halfbyte.modules import (
    BYTES,
    QUANTIZED,
    Headers,
    Kind,
    Module,
    fp8_scale,
    is_mx,
    refuse_broken,
    refuse_companions,
)
from halfbyte.numerics import reciprocal
from halfbyte.stored import FLOATS, Stored, View
from halfbyte.weight import DenseWeight, Fp8Weight, Mxfp4Weight, Weight

Read = Callable[[Stored], Any]
"""Gives the array of a stored tensor."""


@dataclass(frozen=True)
class Piece:
    """Some bytes of a tensor to write.

    Attributes:
        start: where they begin in the tensor.
        sources: the tensors that they come from.
        join: makes them from the sources' arrays; without it they are the bytes of the one source.
    """

    start: int
    sources: tuple[Stored, ...]
    join: Callable[[Sequence[Any]], Any] | None = None


@dataclass(frozen=True)
class Output:
    """One tensor to write, and what it is made of.

    Attributes:
        stored: name, dtype and shape.
        pieces: cover it.
        numbers: whether it holds scales, which become f32 and may be inverted; one source for each piece.
        invert: whether the stored numbers are the reciprocals of the sources'.
    """

    stored: Stored
    pieces: tuple[Piece, ...]
    numbers: bool = False
    invert: bool = False

    @classmethod
    def of(cls, stored: Stored, source: Stored, numbers: bool = False, invert: bool = False) -> Output:
        """One made of one source."""
        return cls(stored, (Piece(0, (source,)),), numbers, invert)

    @property
    def sources(self) -> list[Stored]:
        """All tensors that it comes from."""
        return [source for piece in self.pieces for source in piece.sources]


@dataclass(frozen=True)
class Layer:
    """What a config says of one quantized module.

    Attributes:
        kind: "nvfp4", "fp8" or another name that the config uses.
        static_input: whether activations have a static scale on disk; None where the config is silent.
    """

    kind: str
    static_input: bool | None = None


@dataclass(frozen=True)
class Facts:
    """What a config has to state about a checkpoint.

    Attributes:
        quantized: module name -> module, NVFP4 and FP8.
        dense: names of dense modules with two axes, and their class.
        kv: the format of the KV cache, "FP8", "NVFP4" or None.
    """

    quantized: Mapping[str, Module]
    dense: Mapping[str, str]
    kv: str | None


class Dialect:
    """How one ecosystem names and means tensors. A subclass fills the tables and the two config methods."""

    name: ClassVar[str]
    title: ClassVar[str]
    readable: ClassVar[bool] = True
    writable: ClassVar[bool] = True
    suffixes: ClassVar[Mapping[Kind, Mapping[str, str]]] = {}
    """kind -> role -> suffix."""
    divides: ClassVar[bool] = False
    """Whether scale2 and input_scale of NVFP4 weights are stored as divisors."""
    scalar_shape: ClassVar[tuple[int, ...]] = ()
    """The shape in which a per-tensor scale is written."""
    row_scale_axes: ClassVar[int] = 1
    """Axes of the per-row scale of an FP8 weight: (N,) or (N, 1)."""

    def claims(self, headers: Headers) -> str | None:
        """Why the tensors are of this dialect, or None."""
        raise NotImplementedError

    def claims_config(self, headers: Headers) -> bool:
        """Whether the config says that this is the dialect."""
        return False

    def modules(self, headers: Headers) -> list[Module]:
        """All tensors, grouped by module, in the order of their names on disk."""
        groups: dict[str, dict[str, Stored]] = defaultdict(dict)
        deep = set()  # names of groups in which a stack may be
        for full, tensor in headers.tensors.items():
            name, _, suffix = full.rpartition(".")
            groups[name][suffix] = tensor
            if len(tensor.shape) > 2:
                deep.add(name)
        found: list[Module] = []
        for name, group in groups.items():
            if name in deep:
                found += stacks(headers, name, group)
            if group:
                found += self._modules(headers, name, group)
        return found

    def _modules(self, headers: Headers, name: str, group: dict[str, Stored]) -> list[Module]:
        """The module of a group without stacks, and tensors beside a dense one as modules of their own."""
        kind = self.kind_of(group)
        table = self.suffixes.get(kind, {})
        roles = {role: group[suffix] for role, suffix in table.items() if suffix in group}
        if kind == "fp8" and "scale" not in roles:
            # Block scales as DeepSeek names them multiply, too; layers of both names lie in one checkpoint.
            other = group.get("weight_scale_inv", group.get("weight_scale"))
            roles |= {} if other is None else {"scale": other}
        rest = []
        if len(roles) < len(group):
            taken = {tensor.name for tensor in roles.values()}
            rest = [tensor for tensor in group.values() if tensor.name not in taken]
        if kind in ("dense", "none"):
            beside = [Module(t.name, "none", {"data": t}) for t in rest]
            if not roles:
                return beside
            module = Module(name, kind, roles)
            if len(module.shape) == 3 and name.rpartition(".")[0].endswith("experts"):
                module = as_stack(headers, module)
            return [module, *beside]
        if kind == "unread":
            main = group.get("weight_packed", group.get("weight"))
            roles, rest = {"data" if t is main else suffix: t for suffix, t in group.items()}, []
        module = Module(name, kind, roles, tuple(rest))
        if kind in QUANTIZED and len(module.shape) > 2:
            module = as_stack(headers, module)
        return [module]

    def kind_of(self, group: Mapping[str, Stored]) -> Kind:
        """The kind of the weight in a group of suffix -> tensor; the tensors decide, not the config."""
        weight = group.get("weight")
        named = self.suffixes["nvfp4"]
        codes, scales, scale2 = group.get(named["codes"]), group.get(named["scales"]), group.get(named["scale2"])
        if codes is not None and codes.dtype in BYTES:
            # Bytes with other companions are INT8 or of another library; bytes alone lack their scales.
            if scales is not None and is_mx(codes, scales):
                return "mxfp4"
            fp8_scales = scales is not None and scales.dtype in ("F8_E4M3", "F8_E8M0", "U8")
            alone = codes.dtype != "I8" and group.keys() <= {"weight", "weight_packed", "bias"}
            return "nvfp4" if fp8_scales or scale2 is not None or alone else "unread"
        if codes is not None and scale2 is not None and codes.dtype not in FLOATS:
            return "nvfp4"  # of the wrong dtype, which structure reports
        scale = group.get("weight_scale")
        packed = group.get("weight_packed")
        if any(t is not None and t.dtype[0] in "IU" for t in (weight, packed)) and scale is not None:
            return "unread"
        if weight is None:
            return "none"
        if weight.dtype == "F8_E4M3":
            mxfp8 = scale is not None and scale.dtype in ("U8", "F8_E8M0")
            return "unread" if mxfp8 else "fp8"
        return "dense"

    def read(self, module: Module, read: Read, original: Callable[[Stored], Any | None]) -> Any:
        """The Weight, Fp8Weight or DenseWeight that a module holds.

        Args:
            module: one of ``modules``.
            read: gives the array of a tensor.
            original: the number before its reciprocal was stored, where the file remembers it.

        Raises:
            FormatError: tensors that do not form a weight, or companions that must not be ignored.
        """
        refuse_broken(module)
        if module.kind == "unread":
            raise FormatError("a weight of this format is not read", tensor=module.name, got=str(module.main))
        if module.kind in QUANTIZED:
            refuse_companions(module, {"lora_a", "lora_b"}, "cannot be read as a plain weight")
        get = {role: read(stored) for role, stored in module.roles.items()}
        if module.kind == "nvfp4":
            scalars: dict[str, Any] = {
                role: self.meaning(module, role, get[role], original)
                for role in ("scale2", "input_scale")
                if role in get
            }
            if module.stack is not None:
                get, scalars = stacked_arrays(module, get, scalars)
            return Weight(codes=get["codes"], scales=get["scales"], pre_scale=get.get("pre_scale"), **scalars)
        if module.kind == "mxfp4":
            codes = get["codes"].reshape(*module.shape[:-1], module.shape[-1] // 2)
            return Mxfp4Weight(codes=codes, scales=get["scales"].view(np.uint8))
        if module.kind == "fp8":
            if module.stack is not None:
                hint = "its experts are read one by one: load them by their own names, such as ...experts.0.up_proj"
                raise FormatError("a stack of FP8 experts is not one weight", tensor=module.name, hint=hint)
            scale, block = fp8_scale(module, get["scale"].astype(np.float32))
            return Fp8Weight(data=get["data"], scale=scale, block=block, input_scale=get.get("input_scale"))
        return DenseWeight(get["data"])

    def meaning(self, module: Module, role: str, value: Any, original: Callable[[Stored], Any | None]) -> Any:
        """The multipliers that a stored scale stands for, f32."""
        with np.errstate(all="ignore"):  # what is odd is verify's to report
            value = value.astype(np.float32)
        if not self.divides or module.kind != "nvfp4":
            return value
        kept = original(module.roles[role])
        return reciprocal(value) if kept is None else kept.reshape(value.shape)

    def outputs(self, module: Module, source: Dialect) -> list[Output]:
        """The tensors that this dialect writes for a module read from ``source``.

        Raises:
            FormatError: a weight or a companion that this dialect has no place for.
        """
        if module.kind in ("dense", "none"):
            beside = [Output.of(t, t) for t in module.unknown]
            return [self._dense(module, role, t) for role, t in module.roles.items()] + beside
        if module.kind == "unread":
            raise FormatError(
                f"a weight of this format has no place in {self.title}",
                file=module.main.file if module.main else None,
                tensor=module.name,
                got=str(module.main),
                hint="keep the checkpoint in its own dialect",
            )
        table = self.suffixes.get(module.kind, {})
        refuse_companions(module, set(module.roles) - set(table), f"have no place in {self.title}")
        invert = module.kind == "nvfp4" and self.divides != source.divides
        return [self._output(module, role, table[role], invert) for role in module.roles]

    def _dense(self, module: Module, role: str, source: Stored) -> Output:
        """A tensor that keeps its name, unless it is part of a stack."""
        name = module.member(self.suffixes["dense"][role]) if isinstance(source, View) else source.name
        return Output.of(Stored(name, source.dtype, source.shape), source)

    def _output(self, module: Module, role: str, suffix: str, invert: bool) -> Output:
        source, name = module.roles[role], module.member(suffix)
        if role == "codes":
            shape = (*module.shape[:-1], module.shape[-1] // 2)
            return Output.of(Stored(name, "U8", shape), source)
        if role in ("scale2", "input_scale", "scale") and source.dtype in FLOATS:
            shape = self.scalar_shape if prod(source.shape) == 1 else source.shape
            if role == "scale" and source.shape in ((module.shape[0],), (module.shape[0], 1)):
                shape = (module.shape[0], 1)[: self.row_scale_axes]
            return Output.of(Stored(name, "F32", shape), source, True, invert and role != "scale")
        return Output.of(Stored(name, source.dtype, source.shape), source)

    def stack_outputs(self, bundle: Bundle, source: Dialect) -> list[Output]:
        """The tensors that this dialect writes for a stack of experts.

        Raises:
            FormatError: it has no place for stacks, or for a companion.
        """
        raise FormatError(
            f"stacks of experts have no place in {self.title}", tensor=bundle.name, hint="pass --experts split"
        )

    def layers(self, headers: Headers) -> Callable[[str, str], Layer | None] | None:
        """What the config says: a function of (module name, class), or None where there is no such config."""
        return None

    def config(self, facts: Facts) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """(``quantization_config`` of config.json, further files by name) for what a checkpoint holds."""
        raise UnreadDialectError(f"{self.title} is not written yet", expected="modelopt or compressed-tensors")
