"""What became of the tensors of a checkpoint in a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One module of a checkpoint in a model.

    Attributes:
        name: of the module in the model.
        kind: "nvfp4", "fp8" or "dense".
        held: what holds it, such as "Linear" or "Part of q_proj, k_proj, v_proj".
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
            what = f"{groups[key]} {kind}" + (f" as {layout}" if layout else "")
            lines.append(f"  {what} on {device}: {taken[key] / 1e6:.1f} MB")
        if self.kept:
            lines.append(f"  {len(self.kept)} tensors kept, not computed with: {few(self.kept)}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def few(names: Any) -> str:
    """Some names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
