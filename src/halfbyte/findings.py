"""Findings: facts about a checkpoint, each with a stable code. The table below documents every code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from halfbyte import errors

Severity = Literal["error", "warning", "note"]

CODES: Final[dict[str, tuple[Severity, str]]] = {
    # files and tensors
    "HB101": ("error", "quantized weight without its scales"),
    "HB102": ("error", "block scales whose shape does not fit the codes"),
    "HB103": ("error", "NaN block scale"),
    "HB104": ("error", "negative block scale"),
    "HB105": ("error", "weight without a second scale (single-level)"),
    "HB106": ("error", "weight scale that is zero, negative, Inf or NaN"),
    "HB107": ("warning", "scale of an unusual dtype"),
    "HB108": ("warning", "second scale above 1"),
    "HB109": ("error", "scale whose shape does not fit the weight"),
    "HB110": ("warning", "parts that engines fuse have different second scales"),
    "HB111": ("error", "some quantized modules lack the static input scale that the others have"),
    "HB112": ("warning", "the config asks for static input scales and no module has one"),
    "HB113": ("error", "input scale that is zero, negative, Inf or NaN"),
    "HB114": ("error", "dtype that a quantized weight cannot have"),
    "HB115": ("note", "blocks with scale 0 and codes that are not"),
    "HB116": ("warning", "all codes are zero"),
    "HB117": ("note", "subnormal block scales, which some kernels flush to zero"),
    "HB118": ("error", "NaN or Inf in a tensor"),
    "HB119": ("error", "NaN in FP8 data"),
    "HB120": ("warning", "tensor beside a quantized weight whose meaning is not known"),
    "HB121": ("error", "scale without a weight"),
    "HB122": ("warning", "stored reciprocal that is not the one its provenance says"),
    "HB123": ("error", "KV-cache scale that is zero, negative, Inf or NaN"),
    "HB124": ("warning", "input scales that are the same in all experts of a layer"),
    "HB125": ("warning", "parts that engines fuse have different input scales"),
    "HB126": ("warning", "fused layer of which one part is quantized and another is not"),
    "HB127": ("warning", "module that the other layers have and this one lacks"),
    "HB128": ("note", "one second scale for a whole stack of experts"),
    "HB129": ("error", "experts missing among those of a layer"),
    "HB130": ("error", "tensor that the index names and no shard holds"),
    "HB131": ("warning", "tensor that a shard holds and the index does not name"),
    "HB132": ("warning", "shard that the index does not name"),
    "HB133": ("note", "total size in the index that is not the sum of the tensors"),
    "HB134": ("error", "dialect that is recognised and not read yet"),
    "HB135": ("warning", "several shards and no index"),
    "HB136": ("warning", "layer of experts that is stored twice"),
    "HB137": ("warning", "router that is quantized"),
    "HB138": ("note", "stack of experts whose order of gate and up is not known"),
    "HB139": ("note", "weight of a format that is not read: it is carried as it is"),
    "HB140": ("note", "block scales that seem to lie in another order (a suspicion)"),
    # config
    "HB201": ("warning", "quantized tensors, and a config that does not say so"),
    "HB202": ("warning", "module that the config leaves unquantized, and the file holds quantized"),
    "HB203": ("warning", "module that the config quantizes, and the file holds dense"),
    "HB204": ("warning", "module whose kind in the config is not the kind in the file"),
    "HB205": ("warning", "config.json and hf_quant_config.json disagree"),
    "HB206": ("warning", "config of another dialect than the tensors"),
    "HB207": ("warning", "config that quantizes the KV cache, and no KV scales, or the reverse"),
    "HB208": ("warning", "input scale of a module whose activations the config does not quantize"),
    "HB209": ("warning", "pattern in the config that is not a regular expression"),
    "HB210": ("warning", "group size in the config that is not the 16 of the tensors"),
    "HB211": ("warning", "fewer layers than the config says"),
    "HB212": ("warning", "fewer experts than the config says or the other layers have"),
    # options
    "HB301": ("warning", "pattern that selects no module"),
    "HB302": ("warning", "weight whose values the conversion has rounded"),
    "HB303": ("note", "blocks with scale 0 whose codes the layout has as 0"),
    # diff
    "HB401": ("error", "module in one checkpoint only"),
    "HB402": ("error", "values differ"),
    "HB403": ("note", "same values in other bytes"),
    "HB404": ("error", "shapes differ"),
    "HB405": ("error", "scales beside the weight differ"),
    "HB406": ("note", "kinds differ; their values are told separately"),
    "HB407": ("error", "tensor beside the weight in one checkpoint only"),
    "HB408": ("error", "stack of experts that cannot be taken apart: its order of gate and up is not known"),
    # against
    "HB501": ("error", "weight far from its dense twin"),
    "HB502": ("warning", "error above what the format needs"),
    "HB503": ("warning", "module without a dense twin"),
    "HB504": ("error", "shape that differs from the dense twin's"),
}
"""Every code: its severity and what it means."""


CAP: Final = 100
"""Findings of one code (for block scales: of one code and tensor) that are listed unless all are asked for."""


@dataclass(frozen=True)
class Finding:
    """One fact about a checkpoint.

    Attributes:
        code: a key of CODES; severity and message follow from it.
        tensor: full name on disk, or None for the whole checkpoint.
        index: [row, block] (expert first where there are experts), or None for a whole tensor.
        got, expected, hint: what is there, what is needed, what to do.
        width: columns of a block.
    """

    code: str
    tensor: str | None = None
    index: list[int] | None = None
    got: Any = None
    expected: Any = None
    hint: str | None = None
    width: int = 16

    @property
    def severity(self) -> Severity:
        """ "error", "warning" or "note"."""
        return CODES[self.code][0]

    @property
    def message(self) -> str:
        """What the code means."""
        return CODES[self.code][1]

    def __str__(self) -> str:
        at = f" at {self.index}" if self.index is not None else ""
        if self.index is not None and self.code in ("HB103", "HB104"):
            row, block = self.index[-2:]
            first = block * self.width
            at += f" (row {row}, columns {first}..{first + self.width - 1})"
        got = f": got {self.got}" if self.got is not None else ""
        need = f", expected {self.expected}" if self.expected is not None else ""
        hint = f"; {self.hint}" if self.hint else ""
        tensor = f"{self.tensor}: " if self.tensor else ""
        return errors.printable(f"{self.code} {self.severity}: {tensor}{self.message}{at}{got}{need}{hint}")

    def json(self) -> dict[str, Any]:
        """The finding as one JSON object."""
        return {
            "code": self.code,
            "severity": self.severity,
            "tensor": self.tensor,
            "index": self.index,
            "got": self.got,
            "expected": self.expected,
            "hint": self.hint,
            "message": self.message,
        }

    def error(self, file: str | None) -> errors.FormatError:
        """The finding as an exception, for code that cannot go on."""
        return errors.FormatError(
            self.message,
            file=file,
            tensor=self.tensor,
            index=self.index,
            got=self.got,
            expected=self.expected,
            hint=self.hint,
        )


@dataclass(frozen=True)
class Report:
    """What a tool found and did.

    Attributes:
        command: the tool, such as "verify".
        findings: all findings, errors first.
        facts: the rest, ready for JSON; each tool documents its keys.
    """

    command: str
    findings: tuple[Finding, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        head = f"{self.command}: {'ok' if self.ok else 'NOT OK'}, {len(self.findings)} findings"
        return "\n".join([head, *map(str, self.findings)])

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(f.severity == "error" for f in self.findings)

    def count(self, severity: Severity) -> int:
        """How many findings are of a severity."""
        return Counter(f.severity for f in self.findings)[severity]

    def json(self) -> dict[str, Any]:
        """The report as one JSON document."""
        from halfbyte import __version__

        head = {"schema": 1, "tool": "halfbyte", "version": __version__, "command": self.command, "ok": self.ok}
        document: dict[str, Any] = _finite(head | {"findings": [f.json() for f in self.findings]} | self.facts)
        return document


def capped(findings: Iterable[Finding], every: bool) -> list[Finding]:
    """The first 100 findings of each code, then their number; all of them with ``every``."""
    listed: list[Finding] = []
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.code] += 1
        if every or counts[finding.code] <= CAP:
            listed.append(finding)
    more = (code for code, count in counts.items() if count > CAP and not every)
    return listed + [Finding(code, got=f"{counts[code]} in all", hint="--all lists each") for code in more]


def _finite(value: Any) -> Any:
    """NaN and Inf, which JSON does not have, as text."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes; otherwise as they came."""
    rank = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(findings, key=lambda f: rank[f.severity]))
