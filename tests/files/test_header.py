"""The safetensors header: read without data, and believed only as far as it is consistent."""

from __future__ import annotations

import json
import os
import struct
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    GOLDEN,
    GOLDENS,
    Raw,
    by_library,
    call,
    check_failure,
    header_of,
    raw_safetensors,
    save,
)
from halfbyte.checkpoint.header import MAX_HEADER, _by_columns, _by_entries, encode_header, parse_json, read_header
from halfbyte.errors import FormatError
from halfbyte.stored import DTYPE_BITS, Stored, byte_count, header_dtype


def seen(header):
    return {t.name: (t.dtype, list(t.shape)) for t in header.tensors}


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)} | more


def test_a_sound_file(tmp_path):
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.zeros((), np.float32),
        "c": np.zeros((2, 16), E4M3),
        "d": np.zeros((0, 4), BF16),
        "e": Raw("F4", (2, 32), bytes(32)),
        "ü.é": np.zeros(3, np.int8),
    }
    header = read_header(str(save(tmp_path / "x.safetensors", tensors, {"k": "v"})))
    assert header.metadata == {"k": "v"}
    found = {t.name: (t.dtype, t.shape, t.nbytes) for t in header.tensors}
    assert found == {
        "b": ("F32", (2, 3), 24),
        "a": ("F32", (), 4),
        "c": ("F8_E4M3", (2, 16), 32),
        "d": ("BF16", (0, 4), 0),
        "e": ("F4", (2, 32), 32),
        "ü.é": ("I8", (3,), 3),
    }
    data = (tmp_path / "x.safetensors").read_bytes()
    b = next(t for t in header.tensors if t.name == "b")
    assert data[b.start : b.start + b.nbytes] == tensors["b"].tobytes()
    assert [t.start for t in header.tensors] == sorted(t.start for t in header.tensors)


@pytest.mark.parametrize("file", sorted(GOLDEN.rglob("*.safetensors")), ids=lambda p: str(p.relative_to(GOLDEN)))
def test_as_the_library_reads_it(file):
    header = read_header(str(file))
    assert (header.metadata, seen(header)) == by_library(file)


def both_ways(path):
    """The header by columns, or None where it is not so tidy, and by the parser."""
    data = path.read_bytes()
    text = data[8 : 8 + struct.unpack("<Q", data[:8])[0]]
    return _by_columns(text, str(path), len(data)), _by_entries(text, str(path), len(data))


@pytest.mark.parametrize("path", GOLDENS.values(), ids=GOLDENS)
def test_files_of_the_library_are_read_by_columns(path):
    columns, entries = both_ways(path / "model.safetensors")
    assert columns == entries
    assert columns.tensors


UNTIDY = {
    "spaces": '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
    "another order of keys": '{"a":{"shape":[4],"dtype":"U8","data_offsets":[0,4]}}',
    "a key more": '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":"y"}}',
    "an escape in a name": r'{"\u0061":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "a line's end": '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}\n',
    "metadata last": '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"__metadata__":{}}',
    "the second tensor first": '{"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]},'
    '"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
}


@pytest.mark.parametrize("text", UNTIDY.values(), ids=UNTIDY)
def test_untidy_headers_are_read_by_the_parser(tmp_path, text):
    path = raw_safetensors(tmp_path / "x", text, bytes(4))
    columns, entries = both_ways(path)
    assert columns is None
    assert read_header(str(path)) == entries
    assert seen(entries) == by_library(path)[1]


def test_no_tensors_at_all(tmp_path):
    assert read_header(str(raw_safetensors(tmp_path / "x", "{}"))).tensors == ()


HOSTILE = {
    "empty": (None, b"", "too short", None),
    "seven bytes": (None, b"\0" * 7, "too short", None),
    "length beyond the file": ("{}", b"", "the header does not fit", None),
    "not JSON": ("{", b"", "not valid JSON", None),
    "NaN": ('{"__metadata__":{},"a":NaN}', b"", "not valid JSON", None),
    "nested without end": ('{"a":' * 100_000, b"", "not valid JSON", None),
    "number without end": ('{"a":' + "9" * 5000 + "}", b"", "not valid JSON", None),
    "not UTF-8": (b'{"\xff":1}', b"", "not valid JSON", None),
    "a list": ("[]", b"", "not a JSON object", None),
    "null": ("null", b"", "not a JSON object", None),
    "key twice": ('{"a":%s,"a":%s}' % ((json.dumps(entry()),) * 2), bytes(4), "a key appears twice", "a"),
    "key twice inside": ('{"a":{"dtype":"U8","dtype":"I8"}}', b"", "a key appears twice", "dtype"),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', b"", "a key appears twice", "__metadata__"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "not an object of strings", None),
    "metadata a list": ({"__metadata__": []}, b"", "not an object of strings", None),
    "entry a number": ({"a": 1}, b"", "entry is incomplete", "a"),
    "entry a string": ({"a": "dtype"}, b"", "entry is incomplete", "a"),
    "entry a list": ({"a": []}, b"", "entry is incomplete", "a"),
    "entry null": ({"a": None}, b"", "entry is incomplete", "a"),
    "entry without shape": ({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, bytes(4), "entry is incomplete", "a"),
    "three offsets": ({"a": entry(offsets=(0, 2, 4))}, bytes(4), "entry is incomplete", "a"),
    "offsets a number": ({"a": entry() | {"data_offsets": 4}}, bytes(4), "entry is incomplete", "a"),
    "offsets of text": ({"a": entry() | {"data_offsets": "04"}}, bytes(4), "non-negative integers", "a"),
    "dtype unknown": ({"a": entry("U9")}, bytes(4), "unknown dtype", "a"),
    "dtype null": ({"a": entry(None)}, bytes(4), "unknown dtype", "a"),
    "dtype a list": ({"a": entry(["U8"])}, bytes(4), "unknown dtype", "a"),
    "dtype an object": ({"a": entry({})}, bytes(4), "unknown dtype", "a"),
    "shape negative": ({"a": entry(shape=(-4,))}, bytes(4), "non-negative integers", "a"),
    "shape of fractions": ({"a": entry(shape=(4.0,))}, bytes(4), "non-negative integers", "a"),
    "shape of booleans": ({"a": entry("U8", (True,), (0, 1))}, b"0", "non-negative integers", "a"),
    "shape of text": ({"a": entry() | {"shape": "4"}}, bytes(4), "non-negative integers", "a"),
    "shape too large": ({"a": entry(shape=(2**63,))}, bytes(4), "non-negative integers", "a"),
    "shape overflows": ({"a": entry(shape=(2**40, 2**40))}, bytes(4), "does not fit its offsets", "a"),
    "shape of many axes": ({"a": entry("U8", (1,) * 65, (0, 1))}, b"0", "too many axes", "a"),
    "half a byte": ({"a": entry("F4", (3,), (0, 2))}, bytes(2), "", "a"),
    "half a byte alone": ({"a": entry("F4", (), (0, 1))}, b"0", "", "a"),
    "offsets backwards": ({"a": entry(offsets=(4, 0))}, bytes(4), "does not fit its offsets", "a"),
    "offsets too few": ({"a": entry(offsets=(0, 3))}, bytes(4), "does not fit its offsets", "a"),
    "a hole before": ({"a": entry(offsets=(1, 5))}, bytes(5), "leaves a hole", "a"),
    "a hole between": ({"a": entry(), "b": entry(offsets=(5, 9))}, bytes(9), "leaves a hole", "b"),
    "overlap": ({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6), "overlaps", "b"),
    "the same bytes twice": ({"a": entry(), "b": entry()}, bytes(4), "overlaps", "b"),
    "truncated": ({"a": entry()}, bytes(3), "the file is truncated", None),
    "too long": ({"a": entry()}, bytes(5), "bytes after the last tensor", None),
    "half a name": (r'{"\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(4), "", None),
}
"""What is wrong: (header, data, part of the message, the tensor named)."""


@pytest.fixture(params=HOSTILE)
def hostile(request, tmp_path):
    header, data, message, tensor = HOSTILE[request.param]
    path = tmp_path / "x.safetensors"
    if header is None:
        path.write_bytes(data)
    else:
        raw_safetensors(path, header, data, length=3 if request.param == "length beyond the file" else None)
    return path, message, tensor


def test_a_hostile_header_is_refused_and_named(hostile):
    path, message, tensor = hostile
    with pytest.raises(FormatError) as caught:
        read_header(str(path))
    assert message in str(caught.value)
    assert (caught.value.file, caught.value.tensor) == (str(path), tensor)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_hostile_header_is_left_to_the_parser(hostile):
    data = hostile[0].read_bytes()
    assert _by_columns(data[8:], "f", len(data)) is None
    if len(data) >= 8:
        assert _by_columns(data[8 : 8 + struct.unpack("<Q", data[:8])[0]], "f", len(data)) is None


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_hostile_header_is_one_line_and_status_2(hostile, verb):
    path, message, _ = hostile
    check_failure(call(verb, path), 2, path, message)


def test_the_library_refuses_them_too(hostile):
    """What halfbyte refuses is no file that others read."""
    path, message, tensor = hostile
    if message == "too many axes" or (message == "a key appears twice" and tensor == "a"):
        pytest.skip("the library takes it")
    with pytest.raises((SafetensorError, OSError, UnicodeError)):
        by_library(path)


@pytest.mark.parametrize("length", [0x80, 0x180, 0x1080, 0x4B50, 0x14B50])
def test_a_length_that_looks_like_another_format(tmp_path, length):
    """80 begins a pickle and PK a zip file; as the first bytes of a header's length they mean nothing."""
    head = encode_header([Stored("a.weight", "U8", (4, 1))], {"format": "pt"}, length)
    assert len(head) == 8 + length
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + bytes(4))
    assert list(by_library(path)[1]) == ["a.weight"]
    with halfbyte.open(path) as checkpoint:
        assert list(checkpoint.tensors) == ["a.weight"]


def test_a_length_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", MAX_HEADER + 1) + b"{}")
    os.truncate(path, MAX_HEADER + 100)
    with pytest.raises(FormatError, match="does not fit"):
        read_header(str(path))


def test_only_the_header_is_read(tmp_path):
    """A file of a terabyte, all hole."""
    size = 1 << 40
    path = raw_safetensors(tmp_path / "x.safetensors", {"a": entry("U8", (size,), (0, size))})
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError:
        pytest.skip("the file system holds no file of a terabyte")
    assert read_header(str(path)).tensors[0].nbytes == size
    assert call("inspect", path).rc == 0


def test_control_characters_in_names_are_escaped(tmp_path):
    path = raw_safetensors(tmp_path / "x.safetensors", {"\x1b[31mred\n": entry("U9")}, bytes(4))
    line = check_failure_raw(call("verify", path))
    assert "\x1b" not in line
    assert "\\x1b[31mred\\n" in line


def check_failure_raw(ran):
    assert ran.rc == 2
    assert len(ran.lines) == 1
    return ran.lines[0]


@pytest.mark.parametrize("name", ["\x1b]0;title\x07\x1b[2Jgone.weight", "a\nb.weight", "a\rb.weight"])
def test_control_characters_do_not_reach_the_terminal(tmp_path, name):
    save(tmp_path / "model.safetensors", {name: np.zeros((2, 2), np.float32)})
    ran = call("inspect", tmp_path)
    assert ran.rc == 0, ran
    assert not set("\x1b\x07\r") & set(ran.stdout + ran.stderr)
    assert "a\nb" not in ran.stdout


@pytest.mark.parametrize("text", ['{"a":1,"a":1}', "NaN", "-Infinity", "[" * 100_000, "", b"\xff\xfe"])
def test_json_that_python_would_take(text):
    with pytest.raises(FormatError, match=r"^f: ") as caught:
        parse_json(text, "f")
    assert "\n" not in str(caught.value)


def test_json():
    assert parse_json(b'{"a": [1, 2.5, "x", null]}', "f") == {"a": [1, 2.5, "x", None]}


names = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda n: n != "__metadata__")
stored = st.builds(
    lambda name, dtype, shape: Stored(name, dtype, tuple(shape)),
    names,
    st.sampled_from([d for d in DTYPE_BITS if DTYPE_BITS[d] >= 8]),
    st.lists(st.integers(0, 5), max_size=3),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(stored, unique_by=lambda t: t.name, max_size=6), st.dictionaries(names, names), st.integers(0, 2000))
def test_written_headers_are_read_back_by_both(tmp_path, tensors, metadata, room):
    path = tmp_path / "x.safetensors"
    head = encode_header(tensors, metadata, room)
    assert len(head) % 8 == 0
    assert len(head) >= 8 + room
    path.write_bytes(head + bytes(sum(byte_count(t.dtype, t.shape) for t in tensors)))
    ours = read_header(str(path))
    assert ours.metadata == metadata
    assert seen(ours) == {t.name: (t.dtype, list(t.shape)) for t in tensors}
    assert by_library(path) == (metadata, seen(ours))


GOOD = GOLDENS["modelopt_llama_w4a16"] / "model.safetensors"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@example(None)
def test_an_altered_header_is_refused_or_still_true(tmp_path, data):
    """Every accepted file is one that the library accepts, with the same tensors."""
    good = GOOD.read_bytes()
    length = struct.unpack("<Q", good[:8])[0]
    text = bytearray(good[: 8 + length])
    for _ in range(data.draw(st.integers(1, 3)) if data else 0):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789"[]{},:')))
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(text) + good[8 + length :])
    try:
        ours = read_header(str(path))
    except FormatError:
        return
    assert by_library(path)[1] == seen(ours)
    assert both_ways(path)[1] == ours


def test_header_of_agrees():
    assert set(header_of(GOOD)) - {"__metadata__"} == {t.name for t in read_header(str(GOOD)).tensors}


def test_names_of_dtypes():
    """Also of torch's, by their own names."""
    for dtype, name in (("float32", "F32"), ("bool", "BOOL"), ("uint8", "U8"), ("int64", "I64")):
        assert header_dtype(np.empty(0, dtype)) == name
    assert header_dtype(np.empty(0, ml_dtypes.bfloat16)) == "BF16"
    assert header_dtype(np.empty(0, ml_dtypes.float8_e4m3fn)) == "F8_E4M3"
    assert header_dtype(SimpleNamespace(dtype="torch.float8_e8m0fnu")) == "F8_E8M0"
    with pytest.raises(FormatError, match=r"no such dtype: got complex128"):
        header_dtype(np.empty(0, np.complex128))
