"""The header of a safetensors file, read without its data and believed only as far as it is consistent.

::

    8 bytes    length L of the header, little endian
    L bytes    JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}
    the rest   the tensors' bytes, without holes or overlaps
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

from halfbyte.errors import FormatError
from halfbyte.stored import DTYPE_BITS, Stored, byte_count

MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""

_MAX_INTEGER = 2**63
METADATA = "__metadata__"

_MAX_COLUMNS = 1 << 24
"""Bytes of a header that is cut into columns: a larger one would take too much memory at once."""

_COLUMNS = {1: ":{", 2: "dtype", 3: ":", 5: ",", 6: "shape", 8: "data_offsets"}
"""What quotes cut an entry of the safetensors library into, where that is always the same: 0 is the tensor's name,
4 its dtype, 7 its shape, 9 its offsets and the comma before the next entry."""


@dataclass(frozen=True)
class Header:
    """What the header of one file says.

    Attributes:
        file: its path.
        tensors: in the order of their data.
        metadata: the ``__metadata__`` of the file.
    """

    file: str
    tensors: tuple[Stored, ...]
    metadata: dict[str, str]


def read_header(file: str) -> Header:
    """Read and check the header of one safetensors file.

    Raises:
        FormatError: a header that lies about the file or about itself, naming the tensor where one is to blame.
    """
    if not Path(file).is_file():
        raise FormatError("not a regular file", file=file)
    with open(file, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        head = handle.read(8)
        if len(head) < 8:
            raise FormatError("not a safetensors file: too short", file=file, got=f"{size} bytes")
        (length,) = struct.unpack("<Q", head)
        if length > min(size - 8, MAX_HEADER):
            raise FormatError(
                "not a safetensors file, or a truncated one: the header does not fit",
                file=file,
                got=f"a header of {length} bytes in a file of {size}",
                expected=f"at most {min(size - 8, MAX_HEADER)}",
            )
        text = handle.read(length)
    if len(text) < length:
        raise FormatError("the file became shorter while it was read", file=file)
    return _by_columns(text, file, size) or _by_entries(text, file, size)


def _by_columns(raw: bytes, file: str, size: int) -> Header | None:
    """The header, if it is sound and written just as the safetensors library writes it; else None.

    Quotes cut such a text into ten pieces for each tensor, and whole columns of pieces are compared with what they
    must be: several times as fast as a parser. Whatever differs is left to ``_by_entries``, which says what is wrong.
    """
    if len(raw) > _MAX_COLUMNS:
        return None
    try:
        metadata, entries = _split(raw.decode().rstrip(" "))
    except (ValueError, RecursionError, _DuplicateKeyError):
        return None
    if 5 * entries.count('"') > len(entries):  # the shortest entry has 51 letters
        return None
    start, *pieces = entries.split('"')
    names, dtypes, shapes, offsets = (pieces[i::10] for i in (0, 4, 7, 9))
    count, joined = len(names), "".join(names)
    if start or len(pieces) != 10 * count or any(pieces[i::10].count(piece) != count for i, piece in _COLUMNS.items()):
        return None
    if "\\" in joined or not joined.isprintable() or len({METADATA, *names}) != count + 1:
        return None
    base = 8 + len(raw)
    known: dict[tuple[str, str], tuple[str, tuple[int, ...], int]] = {}
    for i, key in enumerate(zip(dtypes, shapes, strict=True)):
        if key not in known:
            try:
                shape, place = parse_json(shapes[i][1:-1], file), parse_json(offsets[i][1:-2], file)
                entry = {"dtype": dtypes[i], "shape": shape, "data_offsets": place}
                tensor = _tensor(names[i], entry, file, base)
            except FormatError:
                return None
            if f":{json.dumps(shape, separators=(',', ':'))}," != shapes[i]:
                return None
            known[key] = tensor.dtype, tensor.shape, tensor.nbytes
    kinds, extents, sizes = zip(*map(known.__getitem__, zip(dtypes, shapes, strict=True)), strict=True)
    starts = list(accumulate(sizes, initial=base))
    spelled = [str(start - base) for start in starts]
    if starts[-1] != size or offsets != [f":[{begin},{end}]}}," for begin, end in pairwise(spelled)]:
        return None
    return Header(file, tuple(map(Stored, names, kinds, extents, repeat(file), starts, sizes)), metadata)


def _split(text: str) -> tuple[dict[str, str], str]:
    """The metadata of a header, and the text of its entries with a comma after each.

    Raises:
        ValueError: the text is otherwise.
    """
    head, end = f'{{"{METADATA}":', 0
    metadata: dict[str, str] = {}
    if text.startswith(head):
        decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
        metadata, end = decoder.raw_decode(text, len(head))
    if text[end : end + 1] != ("," if end else "{") or not text.endswith("}}") or not _are_strings(metadata):
        raise ValueError
    return metadata, text[end + 1 : -1] + ","


def _by_entries(text: bytes, file: str, size: int) -> Header:
    """The header by way of the JSON parser.

    Raises:
        FormatError: naming the tensor that is to blame.
    """
    try:
        parsed = parse_json(text, file)
    except FormatError as error:
        error.message = error.message.replace("not valid JSON", "the header is not valid JSON")
        raise
    if not isinstance(parsed, dict):
        raise FormatError("the header is not a JSON object", file=file, got=type(parsed).__name__)
    metadata = parsed.pop(METADATA, {})
    if not _are_strings(metadata):
        raise FormatError(f"{METADATA} is not an object of strings", file=file)
    base = 8 + len(text)
    tensors = sorted(
        (_tensor(name, entry, file, base) for name, entry in parsed.items()), key=attrgetter("start", "nbytes")
    )
    end = base
    for tensor in tensors:
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            raise FormatError(f"data {what}", file=file, tensor=tensor.name, got=tensor.start, expected=end)
        end += tensor.nbytes
    if end != size:
        what = "the file is truncated" if end > size else "the file has bytes after the last tensor"
        raise FormatError(what, file=file, got=f"{size} bytes", expected=end)
    return Header(file, tuple(tensors), metadata)


def _tensor(name: str, entry: Any, file: str, base: int) -> Stored:
    if not name.isascii() and not _is_text(name):
        raise FormatError("a tensor's name is not text", file=file, got=name)
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise FormatError(
            "the header's entry is incomplete", file=file, tensor=name, expected="dtype, shape, data_offsets"
        ) from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError("unknown dtype", file=file, tensor=name, got=repr(dtype))
    bits = DTYPE_BITS[dtype]
    for number in (*shape, begin, end) if isinstance(shape, list) else (None,):
        if type(number) is not int or not 0 <= number < _MAX_INTEGER:
            raise FormatError("shape and offsets are not all non-negative integers", file=file, tensor=name)
    if len(shape) > 64:
        raise FormatError("too many axes", file=file, tensor=name, got=len(shape))
    bits *= prod(shape)
    if bits % 8:
        raise FormatError(f"{dtype} {shape} ends inside a byte", file=file, tensor=name)
    expected = bits // 8
    if end - begin != expected:
        raise FormatError(
            f"{dtype} {shape} does not fit its offsets",
            file=file,
            tensor=name,
            got=f"{end - begin} bytes",
            expected=expected,
        )
    return Stored(name, dtype, tuple(shape), file, base + begin, end - begin)


def _are_strings(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(
        isinstance(value, str) and _is_text(key) and _is_text(value) for key, value in metadata.items()
    )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def parse_json(text: bytes | str, file: str, constants: bool = False) -> Any:
    """JSON without the leniencies of Python's: a duplicate key or bottomless nesting is an error.

    Args:
        text: the JSON.
        file: named in errors.
        constants: accept NaN and Infinity, which transformers writes into some configs.

    Raises:
        FormatError: text that is not such JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=float if constants else _no_constant)
    except _DuplicateKeyError as error:
        raise FormatError("a key appears twice", file=file, tensor=error.args[0]) from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise FormatError("not valid JSON", file=file, got=why) from None


class _DuplicateKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKeyError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def encode_header(tensors: Iterable[Stored], metadata: dict[str, str], room: int = 0) -> bytes:
    """The header of a file whose tensors lie in the given order, without holes.

    Args:
        tensors: with their dtype and shape.
        metadata: of the file.
        room: bytes to leave for metadata that comes later; spaces fill them, as the format allows.
    """
    entries: dict[str, Any] = {METADATA: metadata} if metadata else {}
    offset = 0
    for tensor in tensors:
        nbytes = byte_count(tensor.dtype, tensor.shape)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-max(len(text), room) // 8) * 8
    return struct.pack("<Q", length) + text.ljust(length)
