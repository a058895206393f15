"""Dialects: how each ecosystem names and means tensors. The table below is the whole set, in the order of asking."""

from __future__ import annotations

from halfbyte.dialects.base import Dialect, Facts, Layer, Output, Piece
from halfbyte.dialects.compressed_tensors import CompressedTensors
from halfbyte.dialects.fp8 import BlockFp8
from halfbyte.dialects.gpt_oss import GptOss
from halfbyte.dialects.modelopt import ModelOpt
from halfbyte.dialects.packed import Packed
from halfbyte.dialects.unread import UNREAD
from halfbyte.errors import UsageError
from halfbyte.modules import Headers

DIALECTS: tuple[Dialect, ...] = (Packed(), *UNREAD, CompressedTensors(), ModelOpt(), GptOss(), BlockFp8())

__all__ = [
    "DIALECTS",
    "Dialect",
    "Facts",
    "Layer",
    "Output",
    "Packed",
    "Piece",
    "detect",
    "dialect_named",
    "writable",
]


def detect(headers: Headers) -> tuple[Dialect, str]:
    """The dialect of a checkpoint and the evidence for it.

    Tensors decide; where no tensor is quantized, the config does. A checkpoint without either is dense and
    counts as ModelOpt, whose dense names are everybody's.
    """
    for dialect in DIALECTS:
        evidence = dialect.claims(headers)
        if evidence:
            return dialect, evidence
    for dialect in DIALECTS:
        if dialect.claims_config(headers):
            return dialect, "the config"
    return dialect_named("modelopt"), ""


def writable() -> list[str]:
    """The names of the dialects that halfbyte writes."""
    return [d.name for d in DIALECTS if d.writable]


def dialect_named(name: str) -> Dialect:
    """The dialect of that name; another name, or one that is not written yet, raises UsageError."""
    for dialect in DIALECTS:
        if dialect.name == name and dialect.writable:
            return dialect
    raise UsageError("unknown dialect", got=repr(name), expected=" or ".join(writable()))
