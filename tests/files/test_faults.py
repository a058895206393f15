"""Ctrl-C, full disks and broken files under a real run: one line, the right status, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    GOLDENS,
    Ran,
    call,
    check_failure,
    command_line,
    environment,
    header_of,
    leftovers,
    listing,
    make_dense,
    make_float,
    raw_safetensors,
    read_json,
    run_cli,
    save,
    tensors_of,
)
from halfbyte.errors import HalfbyteError

CT = "compressed-tensors"
WRITING = ("quantize", "convert", "dequantize")


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """Sources that take a second or more to work on, and their arguments; the bytes lie on disk once."""
    path = tmp_path_factory.mktemp("big")
    rows, k = 4096, 2048
    weight = np.zeros((rows, k), BF16)
    weight[:, ::3] = 0.5
    (path / "dense").mkdir()
    save(path / "dense" / "model.safetensors", {f"m{i}.weight": weight for i in range(12)})
    codes = np.full((rows, k // 2), 0x21, np.uint8)
    scales = np.full((rows, k // 16), 0x38, np.uint8)
    (path / "nvfp4").mkdir()
    tensors = {}
    for i in range(24):
        tensors |= {f"m{i}.weight": codes, f"m{i}.weight_scale_2": np.float32(0.01)}
        tensors[f"m{i}.weight_scale"] = scales.view(E4M3)
    save(path / "nvfp4" / "model.safetensors", tensors)
    yield {
        "quantize": (path / "dense", ()),
        "convert": (path / "nvfp4", ("--to", CT, "--prove")),
        "dequantize": (path / "nvfp4", ()),
        "verify": (sparse(path / "sparse.safetensors"), ()),
    }
    shutil.rmtree(path)


def sparse(path, rows=1 << 23, k=2048):
    """A weight of nine gigabytes that take no space."""
    header, end = {"m.weight_scale_2": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, 4
    for name, dtype, columns in (("m.weight_scale", "F8_E4M3", k // 16), ("m.weight", "U8", k // 2)):
        header[name] = {"dtype": dtype, "shape": [rows, columns], "data_offsets": [end, end + rows * columns]}
        end += rows * columns
    raw_safetensors(path, header)
    os.truncate(path, path.stat().st_size + end)
    return path


def arguments(big, verb, out):
    src, more = big[verb]
    return [verb, src, *([] if verb == "verify" else [out]), *more]


@contextlib.contextmanager
def running(args, parent):
    """A command under way: it has begun a file in its hidden directory, or for verify has had time to begin."""
    process = subprocess.Popen(
        command_line(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        until = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < until:
            if args[0] == "verify":
                time.sleep(0.5)
                break
            if any(parent.glob(".halfbyte-*/*")):
                break
            time.sleep(0.005)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("verb", WRITING)
def test_interrupted(tmp_path, big, verb, number):
    with running(arguments(big, verb, tmp_path / "out"), tmp_path) as process:
        assert process.poll() is None, "too fast to interrupt"
        started = time.monotonic()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=20)
        assert time.monotonic() - started < 5
    assert process.returncode in (128 + number, 130)
    assert stdout == ""
    assert [line for line in stderr.splitlines() if line] == ["halfbyte: interrupted; nothing was written"]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["line", "json"])
def test_interrupted_without_writing(tmp_path, big, more):
    with running([*arguments(big, "verify", None), *more], tmp_path) as process:
        assert process.poll() is None, "too fast to interrupt"
        process.send_signal(signal.SIGINT)
        ran = Ran(0, *process.communicate(timeout=20))
    assert process.returncode == 130
    if more:
        assert ran.stderr == ""
        assert "interrupted" in ran.document["error"]["message"]
    else:
        assert ran.stdout == ""
        assert len(ran.lines) == 1


@pytest.mark.parametrize("verb", WRITING)
def test_interrupted_twice(tmp_path, big, verb):
    """An impatient user presses Ctrl-C again while the first is being obeyed."""
    with running(arguments(big, verb, tmp_path / "out"), tmp_path) as process:
        for _ in range(12):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(0.012)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in stderr
    assert "Exception ignored" not in stderr
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("module", ["click", "halfbyte.cli.base", "numpy", "halfbyte.tools.verify", "rich.table"])
def test_interrupted_while_it_starts(module):
    """Ctrl-C while a module is being imported, by the command as by halfbyte itself: no traceback."""
    code = f"""
import importlib.abc, os, runpy, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
runpy.run_module("halfbyte", run_name="__main__", alter_sys=True)
"""
    verb = "inspect" if module == "rich.table" else "verify"
    done = subprocess.run(
        [sys.executable, "-c", code, verb, str(GOLDENS["modelopt_llama_nvfp4"])],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode in (130, -signal.SIGINT), done
    assert "Traceback" not in done.stderr


def test_a_second_run_after_an_interrupted_one(tmp_path, big):
    with running(arguments(big, "convert", tmp_path / "out"), tmp_path) as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert run_cli(*arguments(big, "convert", tmp_path / "out"), "--quiet").rc == 0
    assert leftovers(tmp_path) == ["out"]


def test_force_keeps_the_old_target_when_interrupted(tmp_path, big):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with running([*arguments(big, "quantize", tmp_path / "out"), "--force"], tmp_path) as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert listing(tmp_path / "out") == {"mine": b"mine"}
    assert leftovers(tmp_path) == ["out"]


# --- disks that are full


@contextlib.contextmanager
def mounted(path, size, *options):
    """A tmpfs of a few bytes."""
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mounting is not permitted here: {made.stderr.strip()}")
    try:
        for option in options:
            subprocess.run(["mount", "-o", option, str(path)], check=True, capture_output=True)
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)


needs_mount = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or sys.platform != "linux", reason="only root may mount a tmpfs"
)


def model_of(tmp_path, verb):
    if verb == "quantize":
        weight = np.full((512, 512), 0.5, BF16)
        return make_float(tmp_path / "src", {f"m{i}.weight": weight for i in range(4)}), ()
    big_one = {f"m{i}.weight": np.full((512, 512), 0.5, BF16) for i in range(2)}
    src = make_dense(tmp_path / "src", change=big_one, shards=2)
    return src, ("--to", CT) if verb == "convert" else ()


@needs_mount
@pytest.mark.parametrize("verb", WRITING)
@pytest.mark.parametrize("size", ["4k", "64k", "400k"])
def test_a_full_disk(tmp_path, verb, size):
    src, more = model_of(tmp_path, verb)
    with mounted(tmp_path / "disk", size) as disk:
        ran = run_cli(verb, src, disk / "out", *more)
        line = check_failure(ran, 2, "No space left on device")
        assert str(disk / "out") in line
        assert leftovers(disk) == []


@needs_mount
@pytest.mark.parametrize("verb", WRITING)
def test_a_full_disk_as_json(tmp_path, verb):
    src, more = model_of(tmp_path, verb)
    with mounted(tmp_path / "disk", "64k") as disk:
        ran = run_cli(verb, src, disk / "out", *more, "--json")
        assert (ran.rc, ran.stderr) == (2, "")
        error = ran.document["error"]
        assert str(disk / "out") in error["file"]
        assert "No space left" in f"{error['message']}{error['got']}"


@needs_mount
def test_a_disk_too_small_for_the_other_files(tmp_path):
    src = make_dense(tmp_path / "src")
    (src / "tokenizer.json").write_bytes(bytes(300_000))
    with mounted(tmp_path / "disk", "100k") as disk:
        check_failure(run_cli("convert", src, disk / "out", "--to", CT), 2, "No space left on device", disk / "out")
        assert leftovers(disk) == []


@needs_mount
def test_a_disk_that_cannot_be_written(tmp_path):
    src = make_dense(tmp_path / "src")
    with mounted(tmp_path / "disk", "1m", "remount,ro") as disk:
        check_failure(run_cli("convert", src, disk / "out", "--to", CT), 2, disk, "Read-only file system")


@needs_mount
@pytest.mark.parametrize("flags", [(), ("--force",)])
def test_a_target_that_is_a_mount_point(tmp_path, flags):
    """A directory that cannot be moved: refused, and nothing is left beside it."""
    src = make_dense(tmp_path / "src")
    with mounted(tmp_path / "disk", "1m") as disk:
        if flags:
            (disk / "mine").write_text("mine")
        check_failure(run_cli("convert", src, disk, "--to", CT, *flags), 2, disk)
        assert leftovers(tmp_path) == ["disk", "src"]
        assert leftovers(disk) == (["mine"] if flags else [])


@needs_mount
def test_across_two_disks(tmp_path):
    """copy_file_range does not cross file systems everywhere; the bytes do."""
    src = make_dense(tmp_path / "src", shards=2)
    with mounted(tmp_path / "disk", "4m") as disk:
        assert run_cli("convert", src, disk / "out", "--to", CT, "--prove").rc == 0
        halfbyte.convert(disk / "out", tmp_path / "back", to="modelopt", prove=True)
    assert tensors_of(tmp_path / "back") == tensors_of(src)


def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.parametrize("verb", WRITING)
def test_a_file_that_may_not_grow(tmp_path, verb):
    src, more = model_of(tmp_path, verb)
    ran = run_cli(verb, src, tmp_path / "out", *more, preexec_fn=limited)
    check_failure(ran, 2, "File too large", tmp_path / "out")
    assert leftovers(tmp_path) == ["src"]


# --- targets


@pytest.mark.parametrize("verb", WRITING)
def test_the_target_exists(tmp_path, verb):
    src, more = model_of(tmp_path, verb)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    check_failure(call(verb, src, tmp_path / "out", *more), 2, tmp_path / "out", "the target exists", "--force")
    assert listing(tmp_path / "out") == {"mine": b"mine"}
    assert leftovers(tmp_path) == ["out", "src"]


@pytest.mark.parametrize("verb", WRITING)
def test_the_parent_of_the_target_is_missing(tmp_path, verb):
    src, more = model_of(tmp_path, verb)
    line = check_failure(call(verb, src, tmp_path / "a" / "b" / "out", *more), 2, f"mkdir -p {tmp_path}/a/b")
    assert "does not exist" in line
    assert leftovers(tmp_path) == ["src"]


@pytest.mark.parametrize("name", [".", "..", "/", "file", "file/out", "out/.."])
def test_odd_targets(tmp_path, name, monkeypatch):
    src = make_dense(tmp_path / "src")
    (tmp_path / "file").write_text("mine")
    work = tmp_path / "work"
    work.mkdir()
    (work / "mine").write_text("mine")
    monkeypatch.chdir(work)
    name = name.replace("file", "../file")
    for flags in ((), ("--force",)):
        check_failure(call("convert", src, name, "--to", CT, *flags), 2)
        assert leftovers(tmp_path) == ["file", "src", "work"]
        assert leftovers(work) == ["mine"]


@contextlib.contextmanager
def for_everybody():
    """A directory that any user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_nobody(path, *args):
    """Run a command as a user for whom file modes count; Python and halfbyte are loaded while we may read them."""
    code = """
import os, sys
from halfbyte.cli import main
def run(*args):
    try:
        main(args)
    except SystemExit as ended:
        return ended.code
golden, out, *args = sys.argv[1:]
run("verify", golden)
run("verify", golden + "/nothing")
run("convert", golden, out, "--to", "compressed-tensors", "--quiet")
print("ready", flush=True)
print("ready", flush=True, file=sys.stderr)
if os.geteuid() == 0:
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
sys.exit(run(*args))
"""
    warm = [GOLDENS["modelopt_llama_nvfp4"], path / "warm", *args]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, warm)], capture_output=True, text=True, env=environment(), check=False
    )
    shutil.rmtree(path / "warm")
    return Ran(done.returncode, *(text.split("ready\n", 1)[1] for text in (done.stdout, done.stderr)))


def test_an_unreadable_file():
    with for_everybody() as path:
        src = make_dense(path / "src", shards=2)
        (src / "tokenizer.json").write_text("{}")
        for file in src.iterdir():
            file.chmod(0o644)
        assert as_nobody(path, "verify", src).rc == 0
        for name in ("model-00002-of-00002.safetensors", "config.json", "model.safetensors.index.json"):
            (src / name).chmod(0)
            check_failure(as_nobody(path, "verify", src), 2, src / name, "Permission denied")
            (src / name).chmod(0o644)
        (src / "tokenizer.json").chmod(0)
        (path / "parent").mkdir()
        (path / "parent").chmod(0o777)
        args = ("convert", src, path / "parent" / "out", "--to", CT)
        check_failure(as_nobody(path, *args), 2, src / "tokenizer.json", "Permission denied")
        assert leftovers(path / "parent") == []
        (path / "parent").chmod(0o755)
        check_failure(as_nobody(path, *args), 2, path / "parent", "Permission denied")


# --- sources that break under the reader


def test_a_truncated_shard(tmp_path):
    src = make_dense(tmp_path / "src", shards=3)
    shard = src / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    for args in (
        ("verify", src),
        ("convert", src, tmp_path / "out", "--to", CT),
        ("dequantize", src, tmp_path / "out"),
    ):
        check_failure(call(*args), 2, shard, "truncated")
    assert leftovers(tmp_path) == ["src"]


def shrinking(src, action, after=1):
    """Run an action whose source loses its last bytes once some work is done."""
    files = sorted(src.glob("*.safetensors"))
    seen = []

    def progress(done, total):
        seen.append(done)
        if len(seen) == after:
            for file in files:
                os.truncate(file, header_end(file))

    return action(progress)


def header_end(file):
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


ACTIONS = {
    "verify": lambda src, out: lambda p: halfbyte.verify(src, progress=p),
    "convert": lambda src, out: lambda p: halfbyte.convert(src, out, to=CT, progress=p),
    "convert to the same": lambda src, out: lambda p: halfbyte.convert(src, out, to="modelopt", progress=p),
    "convert and prove": lambda src, out: lambda p: halfbyte.convert(src, out, to=CT, prove=True, progress=p),
    "dequantize": lambda src, out: lambda p: halfbyte.dequantize_checkpoint(src, out, progress=p),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_file_that_shrinks(tmp_path, action, shards):
    """Another process truncates the source while it is read: an error that names the file, not a crash."""
    src = make_dense(tmp_path / "src", shards=shards)
    with pytest.raises(HalfbyteError) as caught:
        shrinking(src, ACTIONS[action](src, tmp_path / "out"))
    assert str(src) in str(caught.value)
    assert "safetensors" in str(caught.value)
    assert leftovers(tmp_path) == ["src"]


def test_a_dense_file_that_shrinks(tmp_path):
    src = make_float(tmp_path / "src", shards=2)
    with pytest.raises(HalfbyteError) as caught:
        shrinking(src, lambda p: halfbyte.quantize_checkpoint(src, tmp_path / "out", progress=p))
    assert str(src) in str(caught.value)
    assert leftovers(tmp_path) == ["src"]


def test_a_file_that_goes_away(tmp_path):
    src = make_dense(tmp_path / "src", shards=2)
    with halfbyte.open(src) as checkpoint:
        (src / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises((HalfbyteError, OSError)) as caught:
            [checkpoint.read(t) for t in checkpoint.tensors.values()]
    assert "model-00002-of-00002.safetensors" in str(caught.value)


def test_a_directory_in_the_place_of_a_file(tmp_path):
    src = make_dense(tmp_path / "src")
    (src / "model.safetensors").rename(src / "moved")
    (src / "model.safetensors").mkdir()
    check_failure(call("verify", src), 2, src / "model.safetensors")


@pytest.mark.parametrize("kind", ["fifo", "broken link", "link to a directory", "socket"])
def test_odd_files_beside_the_weights(tmp_path, kind):
    """Carried, or refused by name; not silently left out, and no hang."""
    src = make_dense(tmp_path / "src")
    odd = src / "odd"
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "broken link":
        odd.symlink_to(src / "nothing")
    elif kind == "link to a directory":
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "a.py").write_text("pass")
        odd.symlink_to(tmp_path / "code")
    else:
        before = Path.cwd()
        os.chdir(src)
        try:
            with socket.socket(socket.AF_UNIX) as s:
                s.bind("odd")
        finally:
            os.chdir(before)
    ran = run_cli("convert", src, tmp_path / "out", "--to", CT, "--json", timeout=20)
    assert ran.stderr == ""
    if ran.rc == 0:
        assert any(f["file"].startswith("odd") for f in ran.document["files"])
    else:
        assert ran.rc == 2
        assert "odd" in json_text(ran.document["error"])
        assert not (tmp_path / "out").exists()
    assert not [n for n in leftovers(tmp_path) if n.startswith(".halfbyte")]


def json_text(error):
    return f"{error.get('file')} {error['message']}"


# --- failures in the middle of the work


@pytest.mark.parametrize("workers", [1, 4])
def test_a_failure_on_one_thread_ends_the_others(tmp_path, workers):
    """The last of many tensors holds a NaN: nothing is left, whatever the other threads were doing."""
    tensors = {f"m{i:02}.weight": np.full((64, 256), 0.5, BF16) for i in range(20)}
    tensors["m19.weight"] = np.full((64, 256), np.nan, BF16)
    src = make_float(tmp_path / "src", tensors)
    check_failure(run_cli("quantize", src, tmp_path / "out", "--workers", workers), 2, "m19.weight", "not finite")
    assert leftovers(tmp_path) == ["src"]


def test_a_progress_callback_that_fails(tmp_path):
    src = make_dense(tmp_path / "src")

    def progress(done, total):
        if done > 1000:
            raise RuntimeError("mine")

    for action in ACTIONS.values():
        with pytest.raises(RuntimeError, match="mine"):
            action(src, tmp_path / "out")(progress)
        assert leftovers(tmp_path) == ["src"]


def test_the_written_files_are_whole(tmp_path, big):
    """What a run under load leaves is complete: every byte of the result is accounted for."""
    assert run_cli(*arguments(big, "convert", tmp_path / "out"), "--quiet").rc == 0
    file = tmp_path / "out" / "model.safetensors"
    end = max(e["data_offsets"][1] for n, e in header_of(file).items() if n != "__metadata__")
    assert file.stat().st_size == header_size(file) + end
    assert read_json(tmp_path / "out" / "config.json")["quantization_config"]["quant_method"] == CT


def header_size(file):
    with file.open("rb") as handle:
        return 8 + int.from_bytes(handle.read(8), "little")
