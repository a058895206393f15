"""What became of the tensors of a checkpoint in a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from halfbyte.errors import few


@dataclass(frozen=True)
class Entry:
    """One module of a checkpoint in a model.

    Attributes:
        name: of the module in the model.
        kind: "nvfp4", "fp8" or "dense".
        held: what holds it, such as "Linear", "Part" or "Experts"; the first part has the bytes of its whole group.
        layout: the key of its layout; "" where it has none.
        device: where it lies.
        nbytes: what it takes there.
    """

    name: str
    kind: str
    held: str
    layout: str
    device: str
    nbytes: int


@dataclass
class LoadReport:
    """What a load did; ``model.halfbyte``.

    Attributes:
        path: of the checkpoint.
        dialect: of its tensors.
        entries: the quantized modules, and what the rest takes on each device.
        kept: tensors of the checkpoint that no module computes with, such as the scales of a quantized KV cache, by
            their names on disk; on the CPU.
        kv: the format that the checkpoint gives the KV cache, "FP8", "NVFP4" or None.
        notes: what was not done as asked, and why.
        seconds: of the whole load.
    """

    path: str
    dialect: str
    entries: list[Entry] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    kv: str | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, wherever they lie."""
        return sum(entry.nbytes for entry in self.entries)

    def __str__(self) -> str:
        groups: Counter[tuple[str, str, str]] = Counter()
        taken: Counter[tuple[str, str, str]] = Counter()
        for e in self.entries:
            key = e.kind, e.layout, e.device
            groups[key] += 1
            taken[key] += e.nbytes
        lines = [f"{self.path}: {self.dialect}, {self.nbytes / 1e6:.1f} MB in {self.seconds:.2f} s"]
        for key in sorted(groups):
            kind, layout, device = key
            what = "dense tensors" if kind == "dense" else f"{groups[key]} {kind}" + (f" as {layout}" if layout else "")
            lines.append(f"  {what} on {device}: {taken[key] / 1e6:.1f} MB")
        if self.kept:
            lines.append(f"  {len(self.kept)} tensors kept, not computed with: {few(self.kept)}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True)
class QuantizedLayer:
    """One weight that became NVFP4.

    Attributes:
        name: of the module, or of the parameter of an experts module.
        shape: (N, K), or (E, N, K).
        error: ``norm(q - w) / norm(w)``.
        bytes_before, bytes_after: of the weight.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, kw_only=True)
class QuantizeModelReport:
    """What quantize_model did.

    Attributes:
        layers: in the order of the model.
        skipped: (name, reason) of each other matrix.
        notes: patterns that selected nothing, and layouts that could not hold a weight.
        error: of all layers together.
        seconds: in all.
    """

    layers: tuple[QuantizedLayer, ...]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    error: float
    seconds: float

    @property
    def bytes_before(self) -> int:
        """Of the layers' weights."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """The same after."""
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        worst = max(self.layers, key=lambda layer: layer.error)
        lines = [
            f"{len(self.layers)} weights are NVFP4 now: {self.bytes_before / 1e6:.1f} MB became "
            f"{self.bytes_after / 1e6:.1f} MB in {self.seconds:.1f} s",
            f"relative error {self.error:.4f}; the largest is {worst.error:.4f}, of {worst.name}",
        ]
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.skipped:
            reasons[reason].append(name)
        lines += [f"{len(names)} stay as they are ({reason}): {names[0]}" for reason, names in reasons.items()]
        return "\n".join([*lines, *self.notes])
