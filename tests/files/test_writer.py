"""Writing checkpoints: header first, any order, temporary names, the index last, and nothing left behind."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from checkpoints import (
    BF16,
    E4M3,
    GOLDEN,
    INDEX,
    Raw,
    by_library,
    header_of,
    leftovers,
    listing,
    read_json,
    save,
    tensors_of,
)
from halfbyte.checkpoint import writer as module
from halfbyte.checkpoint.header import read_header
from halfbyte.checkpoint.workdir import check_target
from halfbyte.checkpoint.writer import (
    CheckpointWriter,
    Shard,
    copy_ranges,
    distribute,
    parse_size,
    shard_names,
    write_pieces,
)
from halfbyte.errors import FormatError, HalfbyteError, TargetError, UsageError
from halfbyte.stored import Stored, byte_count

SIX = np.arange(6, dtype=np.float32).reshape(2, 3)


def put(file, tensors, metadata=None, **more):
    """Write Raw tensors through a Shard."""
    shard = Shard(file, [Stored(n, t.dtype, t.shape) for n, t in tensors.items()], metadata or {}, **more)
    for name, tensor in tensors.items():
        shard.write(name, np.frombuffer(tensor.data, np.uint8))
    return shard


# --- one shard


def test_a_shard(tmp_path):
    shard = Shard(tmp_path / "x", [Stored("a", "F32", (2, 3)), Stored("b", "U8", (5,))], {"format": "pt"})
    shard.write("b", np.arange(5, dtype=np.uint8))
    shard.write("a", SIX)
    shard.finish()
    assert {k: v.tolist() for k, v in load_file(tmp_path / "x").items()} == {
        "a": SIX.tolist(),
        "b": [0, 1, 2, 3, 4],
    }
    assert by_library(tmp_path / "x")[0] == {"format": "pt"}


@pytest.mark.parametrize("file", sorted(GOLDEN.rglob("*.safetensors")), ids=lambda p: str(p.relative_to(GOLDEN)))
def test_the_bytes_are_those_of_the_library(tmp_path, file):
    """Same order, same header, same data as safetensors writes; all golden files but MLX's come from it."""
    tensors = tensors_of(file)
    metadata = header_of(file).get("__metadata__", {})
    put(tmp_path / "ours", tensors, metadata).finish()
    save(tmp_path / "theirs", tensors, metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9).filter(lambda n: n != "__metadata__")
arrays = st.builds(
    lambda dtype, shape, seed: Raw(
        dtype, tuple(shape), np.random.default_rng(seed).bytes(byte_count(dtype, tuple(shape)))
    ),
    st.sampled_from(["F32", "BF16", "F16", "F8_E4M3", "U8", "I8", "I32", "I64", "F64", "F8_E8M0"]),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 99),
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, arrays, max_size=6), st.dictionaries(names, names, max_size=2))
def test_written_and_read_back(tmp_path, tensors, metadata):
    (tmp_path / "x").unlink(missing_ok=True)
    put(tmp_path / "x", tensors, metadata).finish()
    assert tensors_of(tmp_path / "x") == tensors
    assert by_library(tmp_path / "x") == (metadata, {n: (t.dtype, list(t.shape)) for n, t in tensors.items()})
    assert read_header(str(tmp_path / "x")).metadata == metadata


def test_f4(tmp_path):
    tensors = {"a": Raw("F4", (2, 32), bytes(range(32)))}
    put(tmp_path / "ours", tensors).finish()
    save(tmp_path / "theirs", tensors, {})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_the_header_is_there_before_the_data(tmp_path):
    Shard(tmp_path / "x", [Stored("a", "F32", (2, 3))], {})
    assert header_of(tmp_path / "x")["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def test_metadata_that_comes_at_the_end(tmp_path):
    room = {"k": "x" * 500}
    shard = put(tmp_path / "x", {"a": Raw("U8", (3,), b"abc")}, {"format": "pt"}, room=room)
    shard.finish({"k": "short"})
    assert tensors_of(tmp_path / "x") == {"a": Raw("U8", (3,), b"abc")}
    assert by_library(tmp_path / "x")[0] == {"format": "pt", "k": "short"}


def test_metadata_that_outgrows_its_room(tmp_path):
    shard = put(tmp_path / "x", {"a": Raw("U8", (3,), b"abc")}, {}, room={"k": "x"})
    with pytest.raises(FormatError, match="outgrown"):
        shard.finish({"k": "x" * 50})


def test_each_tensor_is_written_once(tmp_path):
    shard = Shard(tmp_path / "x", [Stored("a", "U8", (2,)), Stored("b", "U8", (2,))], {})
    shard.write("a", np.zeros(2, np.uint8))
    with pytest.raises(FormatError, match="twice"):
        shard.write("a", np.zeros(2, np.uint8))
    with pytest.raises(FormatError, match="not of this shard"):
        shard.write("c", np.zeros(2, np.uint8))
    with pytest.raises(FormatError, match="wrong number of bytes"):
        shard.write("b", np.zeros(3, np.uint8))


def test_an_unwritten_tensor_is_an_error(tmp_path):
    shard = Shard(tmp_path / "x", [Stored("a", "U8", (2,)), Stored("b", "U8", (2,))], {})
    shard.write("b", np.zeros(2, np.uint8))
    with pytest.raises(FormatError, match="a: a tensor was not written"):
        shard.finish()


def test_a_file_that_exists_is_not_overwritten(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        Shard(tmp_path / "x", [], {})
    assert (tmp_path / "x").read_text() == "mine"


def test_arrays_that_are_not_contiguous(tmp_path):
    shard = Shard(tmp_path / "x", [Stored("a", "F32", (3, 2)), Stored("s", "F32", ())], {})
    shard.write("a", SIX.T)
    shard.write("s", np.float32(2))
    shard.finish()
    assert np.array_equal(load_file(tmp_path / "x")["a"], SIX.T)
    assert load_file(tmp_path / "x")["s"] == 2


def test_any_order_from_many_threads(tmp_path):
    count = 40
    data = {f"t{i:02}": np.random.default_rng(i).integers(0, 256, 4000 + i, np.uint8) for i in range(count)}
    shard = Shard(tmp_path / "x", [Stored(n, "U8", a.shape) for n, a in data.items()], {})
    threads = [threading.Thread(target=shard.write, args=item) for item in reversed(data.items())]
    [t.start() for t in threads]
    [t.join() for t in threads]
    shard.finish()
    assert all(np.array_equal(a, data[n]) for n, a in load_file(tmp_path / "x").items())


# --- copying


@pytest.fixture
def big(tmp_path):
    tensors = {f"t{i}": np.random.default_rng(i).integers(0, 256, 1000 * (i + 1), np.uint8) for i in range(5)}
    tensors["f"] = np.ones((4, 4), BF16)
    return save(tmp_path / "source.safetensors", tensors)


def copy_all(shard, pairs):
    """Run the tasks of a copy; returns their bytes."""
    tasks = shard.copies((name, 0, tensor) for name, tensor in pairs)
    for task in tasks:
        task.function()
    return [task.nbytes for task in tasks]


@pytest.mark.parametrize("kernel", [True, False], ids=["copy_file_range", "buffer"])
def test_copy(tmp_path, big, kernel, monkeypatch):
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    there = {t.name: t for t in read_header(str(big)).tensors}
    shard = Shard(tmp_path / "x", there.values(), {})
    counted = copy_all(shard, there.items())
    shard.finish()
    assert tensors_of(tmp_path / "x") == tensors_of(big)
    assert counted == [sum(t.nbytes for t in there.values())]


def test_copy_joins_ranges_that_touch(tmp_path, big, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "copy_range", lambda *args: calls.append(args[2:]))
    there = {t.name: t for t in read_header(str(big)).tensors}
    shard = Shard(tmp_path / "x", there.values(), {})
    copy_all(shard, there.items())
    assert len(calls) == 1


@pytest.mark.parametrize("limit", [700, 1000, 2500, 1 << 20])
def test_large_copies_are_cut(tmp_path, big, monkeypatch, limit):
    monkeypatch.setattr(module, "_COPY_TASK", limit)
    there = {t.name: t for t in read_header(str(big)).tensors}
    shard = Shard(tmp_path / "x", there.values(), {})
    counted = copy_all(shard, there.items())
    shard.finish()
    assert tensors_of(tmp_path / "x") == tensors_of(big)
    assert max(counted) <= limit
    assert sum(counted) == 15032
    assert len(counted) == -(-15032 // limit)


def test_copy_under_other_names(tmp_path, big):
    there = {t.name: t for t in read_header(str(big)).tensors}
    shard = Shard(tmp_path / "x", [Stored(f"z{5 - i}", "U8", there[f"t{i}"].shape) for i in range(5)], {})
    copy_all(shard, [(f"z{5 - i}", there[f"t{i}"]) for i in range(5)])
    shard.finish()
    old, new = tensors_of(big), tensors_of(tmp_path / "x")
    assert all(new[f"z{5 - i}"] == old[f"t{i}"] for i in range(5))


def test_a_copy_of_another_size(tmp_path, big):
    there = {t.name: t for t in read_header(str(big)).tensors}
    shard = Shard(tmp_path / "x", [Stored("a", "U8", (999,))], {})
    with pytest.raises(FormatError, match="a: a tensor is written twice"):
        shard.copies([("a", 0, there["t0"])])
    shard = Shard(tmp_path / "y", [Stored("a", "U8", (1001,))], {})
    shard.copies([("a", 0, there["t0"])])
    with pytest.raises(FormatError, match="a: a tensor was not written"):
        shard.finish()


def test_copies_into_parts_of_a_tensor(tmp_path, big):
    there = {t.name: t for t in read_header(str(big)).tensors}
    shard = Shard(tmp_path / "x", [Stored("a", "U8", (3000,))], {})
    for task in shard.copies([("a", 2000, there["t0"]), ("a", 0, there["t1"])]):
        task.function()
    shard.finish()
    old = tensors_of(big)
    assert tensors_of(tmp_path / "x")["a"].data == old["t1"].data + old["t0"].data


def test_pieces_in_any_order(tmp_path):
    """Rows of one tensor by several hands; each byte is given out once."""
    shard = Shard(tmp_path / "x", [Stored("a", "F32", (2, 3)), Stored("b", "U8", (2,))], {})
    last, first = shard.piece("a", 12, 12), shard.piece("a", 0, 12)
    write_pieces([(last, SIX[1:]), (shard.piece("b"), np.array([7, 8], np.uint8)), (first, SIX[:1])])
    with pytest.raises(FormatError, match="a: a tensor is written twice"):
        shard.piece("a", 0, 12)
    shard.finish()
    assert load_file(tmp_path / "x")["a"].tolist() == SIX.tolist()


@pytest.mark.parametrize(("start", "nbytes"), [(0, 25), (24, 1), (20, 8)])
def test_pieces_end_in_their_tensor(tmp_path, start, nbytes):
    shard = Shard(tmp_path / "x", [Stored("a", "F32", (2, 3)), Stored("b", "U8", (9,))], {})
    with pytest.raises(FormatError):
        shard.piece("a", start, nbytes)


def test_a_tensor_of_which_a_piece_is_missing(tmp_path):
    shard = Shard(tmp_path / "x", [Stored("a", "F32", (2, 3))], {})
    write_pieces([(shard.piece("a", 0, 20), SIX.reshape(-1)[:5])])
    with pytest.raises(FormatError, match="a: a tensor was not written"):
        shard.finish()


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_copy_in_the_kernel(tmp_path, monkeypatch, number):
    def cannot(*_):
        raise OSError(number, "no")

    monkeypatch.setattr(os, "copy_file_range", cannot, raising=False)
    check_copy(tmp_path)


def test_copies_in_small_steps(tmp_path, monkeypatch):
    """The kernel may copy less than it was asked for."""
    real = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, n, x, y: real(a, b, min(n, 1001), x, y))
    check_copy(tmp_path)


def check_copy(tmp_path):
    data = np.random.default_rng(0).bytes(3_000_000)
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").touch()
    copy_ranges(str(tmp_path / "a"), str(tmp_path / "b"), [(5, 7, len(data) - 10)])
    assert (tmp_path / "b").read_bytes() == bytes(7) + data[5:-5]


@pytest.mark.parametrize("kernel", [True, False], ids=["copy_file_range", "buffer"])
def test_a_source_that_ends_early(tmp_path, big, kernel, monkeypatch):
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    there = {t.name: t for t in read_header(str(big)).tensors}
    os.truncate(big, big.stat().st_size - 10)
    shard = Shard(tmp_path / "x", there.values(), {})
    with pytest.raises(FormatError, match=f"{big}: the file became shorter"):
        copy_all(shard, there.items())


# --- a whole checkpoint


def write(target, *, shards=2, force=False, fail=None, before=None):
    with CheckpointWriter(target, force) as writer:
        for i in range(shards):
            shard = writer.shard(f"m{i}.safetensors", [Stored(f"t{i}", "U8", (4,))], {"format": "pt"})
            shard.write(f"t{i}", np.full(4, i, np.uint8))
            shard.finish()
        writer.json("config.json", {"a": "ü", "b": [1.5, None]})
        if fail:
            raise fail
        if before:
            before(writer)
        writer.seal()
        writer.commit()


def test_a_checkpoint(tmp_path):
    write(tmp_path / "out")
    assert sorted(listing(tmp_path / "out")) == ["config.json", "m0.safetensors", "m1.safetensors", INDEX]
    assert read_json(tmp_path / "out" / INDEX) == {
        "metadata": {"total_size": 8},
        "weight_map": {"t0": "m0.safetensors", "t1": "m1.safetensors"},
    }
    assert read_json(tmp_path / "out" / "config.json") == {"a": "ü", "b": [1.5, None]}
    assert tensors_of(tmp_path / "out") == {f"t{i}": Raw("U8", (4,), bytes([i] * 4)) for i in range(2)}
    assert leftovers(tmp_path, "out") == []


def test_one_shard_has_no_index(tmp_path):
    write(tmp_path / "out", shards=1)
    assert sorted(listing(tmp_path / "out")) == ["config.json", "m0.safetensors"]


def test_nothing_has_its_name_before_it_is_whole(tmp_path):
    def look(writer):
        assert not (tmp_path / "out").exists()
        (hidden,) = leftovers(tmp_path)
        assert hidden == ".halfbyte-out"
        assert not [n for n in listing(tmp_path / hidden) if n.endswith(".index.json")]
        shard = writer.shard("m9.safetensors", [Stored("t9", "U8", (4,))], {})
        shard.write("t9", np.zeros(4, np.uint8))
        assert not (tmp_path / hidden / "out" / "m9.safetensors").exists()
        shard.finish()
        assert (tmp_path / hidden / "out" / "m9.safetensors").exists()

    write(tmp_path / "out", before=look)


def test_the_index_is_last(tmp_path, monkeypatch):
    real, order = CheckpointWriter.json, []

    def json(self, name, value):
        order.append(name)
        if name == INDEX:
            files = {p.name for p in self._work.out.iterdir()}
            assert {"m0.safetensors", "m1.safetensors", "config.json"} <= files
        real(self, name, value)

    monkeypatch.setattr(CheckpointWriter, "json", json)
    write(tmp_path / "out")
    assert order[-1] == INDEX


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)):
        write(tmp_path / "out", fail=error)
    assert leftovers(tmp_path) == []


def test_interrupted_as_soon_as_the_hidden_directory_is_there(tmp_path, monkeypatch):
    """Ctrl-C between making the directory and entering the block that removes it."""

    real = Path.mkdir

    def interrupted(self, *args, **options):
        real(self, *args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_no_seal_no_checkpoint(tmp_path):
    with CheckpointWriter(tmp_path / "out"):
        pass
    assert leftovers(tmp_path) == []


def test_a_failed_write_names_the_target(tmp_path):
    with pytest.raises(TargetError) as caught:
        write(tmp_path / "out", fail=OSError(errno.ENOSPC, "No space left on device"))
    assert str(tmp_path / "out") in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("step", ["pwrite", "fsync", "rename"])
def test_every_step_may_fail(tmp_path, monkeypatch, number, step):
    def fail(*args, **_):
        raise OSError(number, os.strerror(number))

    if step == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    else:
        monkeypatch.setattr(os, step, fail)
    with pytest.raises(HalfbyteError) as caught:
        write(tmp_path / "out")
    assert str(tmp_path / "out") in str(caught.value)
    monkeypatch.undo()
    assert leftovers(tmp_path) == []


def test_the_target_exists(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(TargetError, match="--force"):
        write(tmp_path / "out")
    assert listing(tmp_path / "out") == {"mine": b"mine"}
    assert leftovers(tmp_path, "out") == []


@pytest.mark.parametrize("kind", ["full", "empty", "file", "link"])
def test_a_target_that_comes_into_being_meanwhile(tmp_path, kind):
    """Hours of work may lie between looking and renaming: what is there by then is not replaced without force."""
    out = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()

    def appear(writer):
        if kind == "file":
            out.write_text("mine")
        elif kind == "link":
            out.symlink_to(tmp_path / "elsewhere")
        else:
            out.mkdir()
            if kind == "full":
                (out / "mine").write_text("mine")

    if kind == "empty":
        write(out, before=appear)
        assert (out / INDEX).exists()
    else:
        with pytest.raises(TargetError):
            write(out, before=appear)
        assert out.is_symlink() == (kind == "link")
        assert kind != "file" or out.read_text() == "mine"
        assert kind != "full" or listing(out) == {"mine": b"mine"}
    assert leftovers(tmp_path) == ["elsewhere", "out"]


def test_an_empty_target_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert (tmp_path / "out" / INDEX).exists()
    assert leftovers(tmp_path, "out") == []


def test_force_replaces_the_whole_target(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    write(tmp_path / "out", force=True)
    assert "mine" not in listing(tmp_path / "out")
    assert leftovers(tmp_path, "out") == []


def test_force_keeps_the_old_target_when_writing_fails(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(ValueError, match="x"):
        write(tmp_path / "out", force=True, fail=ValueError("x"))
    assert listing(tmp_path / "out") == {"mine": b"mine"}
    assert leftovers(tmp_path, "out") == []


@pytest.mark.parametrize("which", [0, 1], ids=["moving the old away", "moving the new in"])
def test_force_keeps_the_old_target_when_a_rename_fails(tmp_path, monkeypatch, which):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    real, seen = Path.rename, []

    def rename(self, to):
        if "out" in (self.name, Path(to).name):
            seen.append(self)
            if len(seen) == which + 1:
                raise OSError(errno.EBUSY, "Device or resource busy", str(self))
        return real(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((HalfbyteError, OSError)):
        write(tmp_path / "out", force=True)
    assert listing(tmp_path / "out") == {"mine": b"mine"}
    assert leftovers(tmp_path, "out") == []


@pytest.mark.parametrize("force", [False, True])
def test_targets_that_are_refused(tmp_path, force):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    for name in ("file", "link", "broken"):
        with pytest.raises(TargetError, match="not a directory"):
            check_target(tmp_path / name, force)
    with pytest.raises(TargetError, match="mkdir -p"):
        check_target(tmp_path / "a" / "b", force)
    with pytest.raises(TargetError, match="does not exist"):
        check_target(tmp_path / "file" / "b", force)
    with pytest.raises(TargetError):
        check_target(Path(), force)


def test_long_names(tmp_path):
    name = "n" * 250
    write(tmp_path / name)
    assert leftovers(tmp_path, name) == []


def test_relative_targets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("out"))
    assert (tmp_path / "out" / INDEX).exists()


def test_the_mode_is_that_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out" / "m0.safetensors").stat().st_mode & 0o777 == 0o640


def test_carry(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_bytes(b"\0\1")
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.carry(tmp_path / "source" / "a", Path("deep/er/a"))
        writer.seal()
        writer.commit()
    assert listing(tmp_path / "out") == {"deep/er/a": b"\0\1"}


# --- sizes and shards


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("1.5GB", 15 * 10**8),
        ("2GiB", 2**31),
        ("10kb", 10**4),
        ("1TB", 10**12),
        (" 7 MiB ", 7 * 2**20),
        ("123", 123),
        ("1e3", 1000),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "0.0001", "nan", "nanGB", "inf", "infGB", "5 apples", "5GBGB"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="not a size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_shard_names():
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 50))
def test_distribute(sizes, limit):
    tensors = [Stored(f"t{i}", "U8", (size,)) for i, size in enumerate(sizes)]
    shards = distribute(tensors, limit)
    assert [t for shard in shards for t in shard] == tensors
    assert all(len(shard) == 1 or sum(t.shape[0] for t in shard) <= limit for shard in shards)
    assert all(shards) or shards == [[]]


def test_e4m3_is_one_byte(tmp_path):
    shard = Shard(tmp_path / "x", [Stored("a", "F8_E4M3", (3,))], {})
    shard.write("a", np.ones(3, E4M3))
    shard.finish()
    assert tensors_of(tmp_path / "x")["a"].data == b"\x38" * 3
