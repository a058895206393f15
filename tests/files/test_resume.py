"""Killed runs that go on, runs that meet, and workers that die: the bytes are those of an unbroken run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    E4M3,
    Ran,
    call,
    check_failure,
    command_line,
    environment,
    leftovers,
    listing,
    named,
    nvfp4,
    run_cli,
    save_sharded,
    write_json,
)
from halfbyte.errors import HalfbyteError, TargetError, UsageError
from halfbyte.tasks import Crew

CT = "compressed-tensors"
LAYERS = 5
PARTS = ("q_proj", "k_proj", "v_proj")

WAYS = {
    "quantize": ("quantize", "dense", "--like", CT, "--max-shard-size", "300KB"),
    "quantize shared": ("quantize", "dense", "--to", CT, "--share-scale2", "--max-shard-size", "200KB"),
    "convert": ("convert", "nvfp4", "--to", CT, "--prove"),
    "convert resharded": ("convert", "nvfp4", "--to", "modelopt", "--max-shard-size", "150KB"),
    "convert verbatim": ("convert", "nvfp4", "--to", "modelopt"),
    "dequantize": ("dequantize", "nvfp4", "--max-shard-size", "1MB"),
}
"""What is run, and on which source: every way in which files are written."""

IN_PROCESSES = """
import sys
import halfbyte.tasks
halfbyte.tasks._ENOUGH = 1
from halfbyte.cli import main
main(sys.argv[1:])
"""
"""The command line, with processes however little there is to do."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A dense checkpoint and an NVFP4 one, of 15 shards each; a scale in the first shard is NaN."""
    path = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(0)
    dense, packed = [], []
    for layer in range(LAYERS):
        for i, part in enumerate(PARTS):
            name, seed = f"model.layers.{layer}.self_attn.{part}", 3 * layer + i
            weight = (rng.normal(0, 0.02, (512, 1024)) * (i + 1)).astype(BF16)
            dense.append({f"{name}.weight": weight, f"model.layers.{layer}.norm{i}.weight": np.ones(64, BF16)})
            packed.append(named("modelopt", name, nvfp4(256, 1024, seed, scale2=0.0001234 * (seed + 1))))
    nan = packed[0]["model.layers.0.self_attn.q_proj.weight_scale"].view(np.uint8).copy()
    nan[3, 5] = 0x7F
    packed[0]["model.layers.0.self_attn.q_proj.weight_scale"] = nan.view(E4M3)
    for name, shards in (("dense", dense), ("nvfp4", packed)):
        (path / name).mkdir()
        save_sharded(path / name, shards)
        write_json(path / name / "config.json", {"model_type": "llama", "dtype": "bfloat16"})
        (path / name / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def unbroken(sources, tmp_path_factory):
    """For each way: the files and the document of a run that nobody killed."""
    path, made = tmp_path_factory.mktemp("unbroken"), {}
    for way in WAYS:
        ran = call(*arguments(sources, way, path / way), "--json", "--workers", 1)
        assert ran.rc == 0, ran
        made[way] = listing(path / way), comparable(ran.document)
        assert sum(name.endswith(".safetensors") for name in made[way][0]) >= 10
    return made


def arguments(sources, way, out):
    verb, source, *options = WAYS[way]
    return [verb, sources / source, out, *options]


def comparable(document):
    return {k: v for k, v in document.items() if k not in ("seconds", "dst", "workers", "peak_bytes")}


def start(args, processes=False):
    line = [sys.executable, "-c", IN_PROCESSES, *map(str, args)] if processes else command_line(*args)
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def finished(work):
    return len(list((work / "out").glob("*.safetensors")))


def kill_after(process, work, shards, delay):
    """Kill a run some moments after so many shards have their names; whether it was still running."""
    while process.poll() is None and finished(work) < shards:
        time.sleep(0.0005)
    time.sleep(delay)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


CREWS = [(1, False), (2, False), (2, True)]


@pytest.mark.parametrize(("workers", "processes"), CREWS, ids=["1", "2 threads", "2 processes"])
@pytest.mark.parametrize("way", WAYS)
def test_killed_again_and_again(tmp_path, sources, unbroken, way, workers, processes):
    """Each run goes on where the last one was killed, until one comes to its end."""
    rng = random.Random(f"{way} {workers} {processes}")
    args = [*arguments(sources, way, tmp_path / "out"), "--workers", workers, "--json"]
    work, kills, more = tmp_path / ".halfbyte-out", 0, []
    for wanted in (0, 1, 5, 99):
        process = start([*args, *more], processes)
        if wanted == 99:
            ran = Ran(0, *process.communicate(timeout=60))
            assert process.returncode == 0, ran
            break
        before = {f.name: f.stat().st_ino for f in (work / "out").glob("*.safetensors")}
        if not kill_after(process, work, wanted, rng.uniform(0, 0.02)):
            break  # it was faster
        kills += 1
        if (tmp_path / "out").exists():  # all but done: the next run tidies up, and takes nothing from the result
            check_failure(call(*arguments(sources, way, tmp_path / "out"), "--resume"), 2, "the target exists")
            break
        after = {f.name: f.stat().st_ino for f in (work / "out").glob("*.safetensors")}
        assert after.items() >= before.items()
        more = ["--resume"]
    assert kills >= 2
    files, document = unbroken[way]
    assert listing(tmp_path / "out") == files
    assert leftovers(tmp_path) == ["out"]
    if wanted == 99:
        assert comparable(ran.document) == document


def killed(tmp_path, sources, way="quantize", shards=3, more=()):
    """What a run leaves that is killed after some shards."""
    work = tmp_path / ".halfbyte-out"
    for _ in range(5):
        process = start([*arguments(sources, way, tmp_path / "out"), *more])
        if kill_after(process, work, shards, 0):
            return work
        for file in (tmp_path / "out").iterdir():
            file.unlink()
    pytest.fail("too fast to kill")


def test_finished_shards_are_not_written_again(tmp_path, sources, unbroken):
    work = killed(tmp_path, sources)
    done = {f.name: f.stat().st_ino for f in (work / "out").glob("*.safetensors")}
    assert len(done) >= 3
    seen = []
    _, src, *_ = arguments(sources, "quantize", None)
    options = {"like": CT, "max_shard_size": "300KB"}
    halfbyte.quantize_checkpoint(src, tmp_path / "out", resume=True, progress=lambda *p: seen.append(p), **options)
    assert listing(tmp_path / "out") == unbroken["quantize"][0]
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in done} == done
    assert seen[-1][0] == seen[-1][1]


def test_what_is_left_is_refused_with_both_ways_out(tmp_path, sources, unbroken):
    work = killed(tmp_path, sources)
    before = listing(work)
    args = arguments(sources, "quantize", tmp_path / "out")
    check_failure(call(*args), 2, work, "a run that was killed has left unfinished work", "--resume", "--force")
    assert listing(work) == before
    assert call(*args, "--dry-run").rc == 0
    assert listing(work) == before
    assert call(*args, "--force").rc == 0
    assert listing(tmp_path / "out") == unbroken["quantize"][0]
    assert leftovers(tmp_path) == ["out"]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_to_resume(tmp_path, sources, unbroken, way):
    assert call(*arguments(sources, way, tmp_path / "out"), "--resume").rc == 0
    assert listing(tmp_path / "out") == unbroken[way][0]
    assert leftovers(tmp_path) == ["out"]


@pytest.mark.parametrize("manifest", [None, b"", b"{", b"[]", b"\xff"])
def test_killed_before_there_was_a_plan(tmp_path, sources, unbroken, manifest):
    """A work directory without a manifest that can be read is nothing to resume, and no reason to refuse."""
    work = killed(tmp_path, sources)
    (work / "manifest.json").unlink()
    if manifest is not None:
        (work / "manifest.json").write_bytes(manifest)
    (work / "out" / "model-00001-of-00002.safetensors").write_text("rubbish")
    assert call(*arguments(sources, "quantize", tmp_path / "out"), *([] if manifest else ["--resume"])).rc == 0
    assert listing(tmp_path / "out") == unbroken["quantize"][0]
    assert leftovers(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        (["--like", "modelopt"], ["options like differs: got modelopt, expected compressed-tensors"]),
        (["--share-scale2"], ["options share_scale2 differs: got True, expected False"]),
        (["--max-shard-size", "400KB"], ["options max_shard_size differs: got 400000, expected 300000"]),
        (["--ignore", "*k_proj"], ["options quantized differs: got 10 entries, expected 15 entries"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_another_plan(tmp_path, sources, changed, parts):
    work = killed(tmp_path, sources)
    before = listing(work)
    args = [*arguments(sources, "quantize", tmp_path / "out"), *changed, "--resume"]
    for more in ([], ["--force"]):
        check_failure(call(*args, *more), 2, work, "of another plan", *parts, "--force without --resume")
        assert listing(work) == before


def test_another_command(tmp_path, sources):
    work = killed(tmp_path, sources, "dequantize")
    args = arguments(sources, "convert", tmp_path / "out")
    check_failure(call(*args, "--resume"), 2, work, "command differs: got convert, expected dequantize")


@pytest.mark.parametrize("what", ["shard", "config", "time"])
def test_the_source_has_changed(tmp_path, sources, what):
    work = killed(tmp_path, sources)
    name = "config.json" if what == "config" else "model-00004-of-00015.safetensors"
    file = sources / "dense" / name
    stat = file.stat()
    try:
        if what == "config":
            file.write_text(file.read_text() + " ")
        elif what == "time":
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        else:
            file.touch()
        args = arguments(sources, "quantize", tmp_path / "out")
        check_failure(call(*args, "--resume"), 2, work, f"files {name} differs")
        assert work.exists()
    finally:
        if what == "config":
            file.write_text(file.read_text().rstrip(" "))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_another_version(tmp_path, sources):
    work = killed(tmp_path, sources)
    manifest = json.loads((work / "manifest.json").read_text())
    write_json(work / "manifest.json", manifest | {"version": "0.0.0"})
    args = arguments(sources, "quantize", tmp_path / "out")
    check_failure(call(*args, "--resume"), 2, f"version differs: got {halfbyte.__version__}, expected 0.0.0")


def test_an_error_of_a_resumed_run_leaves_nothing(tmp_path, sources):
    killed(tmp_path, sources)

    def fail(done, total):
        if done > total // 2:
            raise RuntimeError("mine")

    options = {"like": CT, "max_shard_size": "300KB", "resume": True}
    with pytest.raises(RuntimeError, match="mine"):
        halfbyte.quantize_checkpoint(sources / "dense", tmp_path / "out", progress=fail, **options)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("moment", ["old moved away", "new moved in"])
def test_killed_while_the_target_is_replaced(tmp_path, sources, unbroken, moment, monkeypatch):
    """The old target comes back, or the new one is there: never neither."""
    args = [*arguments(sources, "quantize", tmp_path / "out"), "--force"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    name = "out" if moment == "new moved in" else "old"
    code = f"""
import os, sys
from pathlib import Path
from halfbyte.cli import main
real = Path.rename
def rename(self, to):
    made = real(self, to)
    if self.name == {"out"!r} and (Path(to).parent.name == "old") == ({name!r} == "old"):
        os.kill(os.getpid(), 9)
    return made
Path.rename = rename
main(sys.argv[1:])
"""
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out").exists() == (moment == "new moved in")
    ran = call(*args[:-1])
    check_failure(ran, 2, "the target exists")
    expected = unbroken["quantize"][0] if moment == "new moved in" else {"mine": b"mine"}
    assert listing(tmp_path / "out") == expected
    assert call(*args, "--resume").rc == 0
    assert listing(tmp_path / "out") == unbroken["quantize"][0]
    assert leftovers(tmp_path) == ["out"]


# --- two runs


def test_two_runs_on_one_target(tmp_path, sources, unbroken):
    """Exactly one wins; the other is refused at once, and the result is sound."""
    refused = 0
    for i in range(4):
        args = arguments(sources, "quantize", tmp_path / f"out{i}")
        runs = [start(args) for _ in range(2)]
        rans = [Ran(0, *run.communicate(timeout=60)) for run in runs]
        assert sorted(run.returncode for run in runs) == [0, 2]
        loser = rans[0] if runs[0].returncode else rans[1]
        (line,) = loser.lines
        assert "another run is writing this target" in line or "the target exists" in line
        refused += "another run" in line
        assert listing(tmp_path / f"out{i}") == unbroken["quantize"][0]
        assert leftovers(tmp_path) == [f"out{j}" for j in range(i + 1)]
    assert refused


def test_a_run_under_way_is_left_alone(tmp_path, sources, unbroken):
    """Neither --force nor --resume takes the work of a run that lives."""
    seen = []

    def progress(done, total):
        if done > total // 2 and not seen:
            for more in ({}, {"force": True}, {"resume": True}):
                with pytest.raises(TargetError, match="another run is writing this target") as caught:
                    halfbyte.quantize_checkpoint(sources / "dense", tmp_path / "out", like=CT, **more)
                seen.append(caught.value.file)

    halfbyte.quantize_checkpoint(
        sources / "dense", tmp_path / "out", like=CT, max_shard_size="300KB", progress=progress
    )
    assert seen == [str(tmp_path / "out")] * 3
    assert listing(tmp_path / "out") == unbroken["quantize"][0]


def test_long_names_have_their_own_directories(tmp_path, sources):
    names = ["n" * 250 + end for end in ("a", "b")]
    for name in names:
        halfbyte.convert(sources / "nvfp4", tmp_path / name, to="modelopt")
    assert leftovers(tmp_path) == names


# --- who does the work


class Deferred(Executor):
    """Somebody's executor: the tasks are pickled, and run in another order than they came."""

    def __init__(self):
        self.pool, self.seen = ThreadPoolExecutor(2), []

    def submit(self, fn, /, *args, **options):
        import pickle

        assert not args
        self.seen.append(len(pickle.dumps(fn)))
        return self.pool.submit(pickle.loads(pickle.dumps(fn)))


FUNCTIONS = {
    "quantize": lambda s, out, **more: halfbyte.quantize_checkpoint(
        s / "dense", out, like=CT, max_shard_size="300KB", **more
    ),
    "convert": lambda s, out, **more: halfbyte.convert(s / "nvfp4", out, to=CT, prove=True, **more),
    "dequantize": lambda s, out, **more: halfbyte.dequantize_checkpoint(s / "nvfp4", out, max_shard_size="1MB", **more),
}


@pytest.mark.parametrize("way", FUNCTIONS)
def test_any_executor(tmp_path, sources, unbroken, way):
    executor = Deferred()
    with executor.pool:
        report = FUNCTIONS[way](sources, tmp_path / "out", executor=executor, workers=3)
    assert report.facts["workers"] == "3 on Deferred"
    assert len(executor.seen) >= 15
    assert max(executor.seen) < 10_000
    assert listing(tmp_path / "out") == unbroken[way][0]


@pytest.mark.parametrize("way", FUNCTIONS)
def test_the_callers_processes(tmp_path, sources, unbroken, way):
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        FUNCTIONS[way](sources, tmp_path / "out", executor=executor)
        assert executor.submit(int).result() == 0  # it is the caller's to end
    assert listing(tmp_path / "out") == unbroken[way][0]


class Failing(Executor):
    """An executor that gives up after some tasks."""

    def __init__(self, error, after):
        self.error, self.after = error, after

    def submit(self, fn, /, *args, **options):
        self.after -= 1
        future = Future()
        if self.after < 0:
            future.set_exception(self.error)
        else:
            future.set_result(fn(*args, **options))
        return future


@pytest.mark.parametrize("way", FUNCTIONS)
@pytest.mark.parametrize("after", [0, 5])
def test_an_executor_that_breaks(tmp_path, sources, way, after):
    from concurrent.futures.process import BrokenProcessPool

    with pytest.raises(HalfbyteError, match=r"a worker process died.*__main__"):
        FUNCTIONS[way](sources, tmp_path / "out", executor=Failing(BrokenProcessPool(), after))
    assert leftovers(tmp_path) == []


def test_processes_start_where_there_is_enough_to_do():
    assert str(Crew.of(4, "processes", 1 << 20)) == "4 threads"
    assert str(Crew.of(4, "processes", (1 << 30) - 1)) == "4 threads"
    assert str(Crew.of(4, "processes", 1 << 30)) == "4 processes"
    assert str(Crew.of(4, "processes", 1 << 40)) == "4 processes"
    assert str(Crew.of(1, "processes", 1 << 40)) == "1 thread"
    assert str(Crew.of(4, None, 1 << 40)) == "4 threads"


@pytest.mark.parametrize(
    "executor", ["process", "threads", 2, object()], ids=["process", "threads", "number", "object"]
)
def test_what_is_no_executor(tmp_path, sources, executor):
    with pytest.raises(UsageError, match="not an executor"):
        halfbyte.convert(sources / "nvfp4", tmp_path / "out", to=CT, executor=executor)
    assert leftovers(tmp_path) == []


def children(pid):
    """The processes that a process has started, and that work."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def under_way(tmp_path, sources):
    """A run on two processes that has finished a shard."""
    process = start([*arguments(sources, "quantize", tmp_path / "out"), "--workers", 2], processes=True)
    while process.poll() is None and finished(tmp_path / ".halfbyte-out") < 1:
        time.sleep(0.0005)
    return process


def test_a_worker_process_that_is_killed(tmp_path, sources):
    process = under_way(tmp_path, sources)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    ran = Ran(0, *process.communicate(timeout=20))
    (line,) = ran.lines
    assert line.startswith("halfbyte: a worker process died; try fewer workers")
    assert (process.returncode, ran.stdout) == (2, "")
    assert leftovers(tmp_path) == []


def test_workers_end_with_a_run_that_is_killed(tmp_path, sources):
    process = under_way(tmp_path, sources)
    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate(timeout=20)
    until = time.monotonic() + 5
    while any(alive(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in workers)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_reaches_the_processes(tmp_path, sources):
    """The terminal sends it to all of them: one line, and nothing is left."""
    line = [sys.executable, "-c", IN_PROCESSES, *map(str, arguments(sources, "quantize", tmp_path / "out"))]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    for wait_for in ("manifest.json", "out/*.safetensors"):
        process = subprocess.Popen([*line, "--workers", "2"], env=environment(), **options)
        while process.poll() is None and not list((tmp_path / ".halfbyte-out").glob(wait_for)):
            time.sleep(0.0005)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=20)
        assert (process.returncode, stdout, stderr) == (130, "", "halfbyte: interrupted; nothing was written\n")
        assert leftovers(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a tmpfs")
@pytest.mark.parametrize("way", ["quantize", "dequantize"])
def test_a_disk_that_is_full_under_processes(tmp_path, sources, way):
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path / "disk"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        process = start([*arguments(sources, way, tmp_path / "disk" / "out"), "--workers", 2], processes=True)
        ran = Ran(0, *process.communicate(timeout=30))
        (line,) = ran.lines
        assert process.returncode == 2
        assert line == f"halfbyte: {tmp_path}/disk/out: cannot write the target: got No space left on device"
        assert leftovers(tmp_path / "disk") == []
    finally:
        subprocess.run(["umount", "-l", tmp_path / "disk"], check=True)


def test_a_script_without_a_main_guard(tmp_path, sources):
    """By default threads do the work, so that such a script runs; with processes of its own it is told what to do."""
    script = tmp_path / "script.py"
    script.write_text(f"import halfbyte\nhalfbyte.convert({str(sources / 'nvfp4')!r}, 'out', to='{CT}', workers=2)\n")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    script.write_text(
        f"import halfbyte, halfbyte.tasks\nhalfbyte.tasks._ENOUGH = 1\n"
        f"halfbyte.quantize_checkpoint({str(sources / 'dense')!r}, 'two', workers=2, executor='processes')\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "__name__ ==" in done.stderr.splitlines()[-1]
    assert leftovers(tmp_path) == ["out", "script.py"]


def test_the_report_says_who_worked(tmp_path, sources):
    assert "1 thread" in run_cli(*arguments(sources, "convert", tmp_path / "out"), "--workers", 1).stdout
