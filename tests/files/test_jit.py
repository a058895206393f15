"""Compiled code: kept on disk, never stale, never trusted when damaged; threads, and processes that were forked."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import SOURCE, environment, run_cli
from halfbyte import jit
from halfbyte.errors import UsageError

pytestmark = pytest.mark.skipif(jit.missing() is not None, reason=f"nothing is compiled: {jit.missing()}")

SMALL = """
from numba import prange
from halfbyte import jit

@jit.compiled
def plus(a, b):
    return a + b + 40

@jit.compiled(parallel=True)
def fill(out):
    for i in prange(out.size):
        out[i] = i + 1

def filled(count=1000):
    import numpy as np
    out = np.zeros(count, np.int64)
    jit.run(fill, out)
    assert (out == np.arange(1, count + 1)).all()
    return "filled"
"""
ONCE = "import small; print(small.plus(1, 1), small.plus(1.0, 0.5))"
LINE = re.compile(r"compiling for this processor; the code is kept in (\S+)\n")
WARM = "42 41.5\n"


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A folder with a module of compiled functions, and one where their code is kept."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "small.py").write_text(SMALL)
    return folder


def python(folder, text, *options, cache=None, without=(), **more):
    """A fresh process that finds small.py; an exit status that is not 0 is for the caller."""
    env = environment(XDG_CACHE_HOME=str(cache or folder / "cache"), **more)
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    for name in ("HALFBYTE_THREADS", "HALFBYTE_CPU", "NUMBA_THREADING_LAYER", "NUMBA_NUM_THREADS", *without):
        if name not in more:
            env.pop(name, None)
    return subprocess.run(
        [*options, sys.executable, "-W", "error", "-c", text],
        capture_output=True, text=True, timeout=120, env=env, check=False, cwd=folder,
    )  # fmt: skip


def output(*args, **options):
    """What such a process prints; it says nothing else but that it compiles."""
    done = python(*args, **options)
    assert (done.returncode, LINE.sub("", done.stderr)) == (0, ""), done.stderr
    return done.stdout


def compiled_once(folder, text=ONCE, cache=None, **more):
    """Whether a process that gives the right numbers had to compile: it says so in one line."""
    done = python(folder, text, cache=cache, **more)
    assert (done.returncode, done.stdout) == (0, WARM), done.stderr
    assert done.stderr == "" or LINE.fullmatch(done.stderr), done.stderr
    return done.stderr != ""


class Kept:
    """Code on disk; each call looks at it as a fresh process does."""

    def __init__(self, code, caplog):
        self.code, self.caplog = code, caplog

    def compiled(self):
        """Whether something was compiled, for the right numbers: that is told once."""
        jit._announce.cache_clear()
        self.caplog.clear()
        module = self.module()
        assert (module.plus(1, 1), module.plus(1.0, 0.5)) == (42, 41.5)
        assert len(self.caplog.messages) <= 1
        return bool(self.caplog.messages)

    def module(self):
        spec = importlib.util.spec_from_file_location("small", self.code / "small.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def files(self, suffix):
        return list(jit.cache_folder().glob(f"small.plus*{suffix}"))


@pytest.fixture
def kept(code, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = Kept(code, caplog)
    assert kept.compiled()
    assert not kept.compiled()
    assert (len(kept.files(".nbi")), len(kept.files(".nbc"))) == (1, 2)
    return kept


# -- what is kept --


def test_a_second_process_finds_it(code, tmp_path):
    cache = tmp_path / "cache"
    first = python(code, ONCE, cache=cache)
    assert first.stdout == WARM
    (folder,) = (cache / "halfbyte").iterdir()
    assert LINE.fullmatch(first.stderr)[1] == str(folder)
    assert re.fullmatch(r"code-[0-9a-f]{24}", folder.name)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(before) == 3  # an index and code for two signatures
    second = python(code, ONCE, cache=cache)
    assert (second.stdout, second.stderr) == (WARM, "")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


DAMAGES = {
    "truncated": lambda b: b[: len(b) // 2],
    "empty": lambda b: b"",
    "flipped in the middle": lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 1]) + b[len(b) // 2 + 1 :],
    "flipped at the end": lambda b: b[:-20] + bytes([b[-20] ^ 0x10]) + b[-19:],
    "noise": lambda b: b"\x80\x04" + b"\xff" * 100,
    "another pickle": lambda b: b"\x80\x04K\x01.",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("suffix", [".nbc", ".nbi"])
def test_damaged_files_are_compiled_again(kept, suffix, damage):
    for path in kept.files(suffix):
        path.write_bytes(damage(path.read_bytes()))
    assert kept.compiled()
    assert not kept.compiled()  # and what was damaged is whole again


def test_an_index_that_leads_to_other_code(kept):
    """Code of another signature is not run: it would read numbers as others."""
    (index,) = kept.files(".nbi")
    text = index.read_bytes()
    assert text.count(b".1.nbc") == text.count(b".2.nbc") == 1
    index.write_bytes(text.replace(b".1.nbc", b".x.nbc").replace(b".2.nbc", b".1.nbc").replace(b".x.nbc", b".2.nbc"))
    assert kept.compiled()
    assert not kept.compiled()


def test_code_that_is_gone(kept):
    for path in kept.files(".nbc"):
        path.unlink()
    assert kept.compiled()
    assert not kept.compiled()


def test_what_is_compiled_for_given_types_is_found_too(kept):
    """``address_of`` names the types, and calls nothing."""
    from numba import int64

    jit._announce.cache_clear()
    kept.caplog.clear()
    for _ in range(2):
        assert jit.address_of(kept.module().plus, int64(int64, int64)) > 0
    assert not kept.compiled()
    assert len(kept.files(".nbc")) == 3
    jit._announce.cache_clear()
    kept.caplog.clear()
    jit.address_of(kept.module().plus, int64(int64, int64))
    assert not kept.caplog.messages


def test_times_of_files_do_not_matter(kept):
    os.utime(kept.code / "small.py", (0, 0))
    assert not kept.compiled()


def test_a_folder_that_cannot_be_written(code, tmp_path):
    (tmp_path / "file").write_text("no folder")
    for _ in range(2):
        assert compiled_once(code, cache=tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "no folder"


def test_no_variable_says_where(code):
    text = "from halfbyte import jit; print(jit.cache_folder().parent)"
    home = output(code, "import pwd, os; print(pwd.getpwuid(os.getuid()).pw_dir)").strip()
    assert output(code, text, without=["XDG_CACHE_HOME", "HOME"]) == f"{home}/.cache/halfbyte\n"
    assert output(code, text, without=["XDG_CACHE_HOME"], HOME="/some/where") == "/some/where/.cache/halfbyte\n"
    assert output(code, text, without=["HOME"]) == f"{code}/cache/halfbyte\n"


def test_no_home_at_all(code):
    """A user whom the system does not know has no folder, least of all one named ~ in the current one."""
    text = f"import pwd\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\n{ONCE}"
    for _ in range(2):
        assert compiled_once(code, text, without=["XDG_CACHE_HOME", "HOME"])
    assert not (code / "~").exists()


def test_another_source_is_other_code(code, tmp_path):
    """The digest is of the contents: what was compiled from older ones is not found, whatever the times of files."""
    package = tmp_path / "halfbyte"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = """
import numpy as np
import halfbyte
from halfbyte import decode, jit
assert halfbyte.__file__.startswith(FOLDER)
decode.SMALL = 0
w = halfbyte.Weight(codes=np.full((1, 8), 0x22, np.uint8), scales=np.full((1, 1), 0x38, np.uint8), scale2=1)
print(jit.cache_folder().name, w.dequantize()[0, 0])
""".replace("FOLDER", repr(str(tmp_path)))
    options = {"cache": tmp_path / "cache", "PYTHONDONTWRITEBYTECODE": "1"}  # Python's own go by times
    name, value = output(tmp_path, text, **options).split()
    assert value == "1.0"
    file = package / "decode_code.py"
    before, stat = file.read_text(), file.stat()
    after = before.replace("np.array(E4M3_VALUES)", "np.array(E4M3_VALUES) * 3")
    assert after != before
    file.write_text(after)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    name_after, value = output(tmp_path, text, **options).split()
    assert value == "3.0"
    assert name_after != name
    file.write_text(before)
    done = python(tmp_path, text, **options)
    assert (done.stdout, done.stderr) == (f"{name} 1.0\n", "")


def test_portable_code_is_other_code(monkeypatch):
    names = set()
    for asked in ("native", "portable", "native"):
        monkeypatch.setenv("HALFBYTE_CPU", asked)
        names.add(jit._digest.__wrapped__())
    assert len(names) == 2


# -- what the variables say --


def test_processor(monkeypatch):
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    has = jit.has.__wrapped__
    for asked in ("native", "", "portable"):
        monkeypatch.setenv("HALFBYTE_CPU", asked)
        assert {name for name in features if has(name)} == {
            name for name, there in features.items() if there and asked != "portable"
        }
        assert not has("sme")
    monkeypatch.setenv("HALFBYTE_CPU", "Portable")
    with pytest.raises(UsageError, match=r"unknown HALFBYTE_CPU: got 'Portable', expected native or portable"):
        has("avx512f")


def test_a_processor_that_numba_is_told(code):
    text = "from halfbyte import jit; print(jit.has('avx2'), jit.has('avx512f'))"
    assert output(code, text, NUMBA_CPU_FEATURES="+avx2,-avx512f") == "True False\n"
    assert output(code, text, NUMBA_CPU_FEATURES="") == "False False\n"
    assert output(code, text, NUMBA_ENABLE_AVX="0") == "False False\n"


def test_a_wrong_processor_is_one_line(tmp_path):
    save_file({"a.weight": np.ones((1024, 512), np.float32)}, tmp_path / "dense.safetensors")
    ran = run_cli("quantize", tmp_path / "dense.safetensors", tmp_path / "out", env={"HALFBYTE_CPU": "some"})
    assert ran.rc == 2
    assert "unknown HALFBYTE_CPU: got 'some', expected native or portable" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "out").exists()


COUNT = "from halfbyte import jit; print(jit.thread_count(), jit.alone(jit.thread_count), jit.thread_count())"


@pytest.mark.parametrize(
    ("asked", "cores", "count"), [("1", 4, 1), ("2", 4, 2), ("9", 4, 4), ("", 4, 4), (None, 3, 3), ("2", 1, 1)]
)
def test_threads(code, asked, cores, count):
    more = {} if asked is None else {"HALFBYTE_THREADS": asked}
    text = f"import os; os.sched_getaffinity = lambda pid: set(range({cores}))\n{COUNT}"
    assert output(code, text, **more) == f"{count} 1 {count}\n"


@pytest.mark.parametrize("asked", ["0", "x", "-1", "1.5", " "])
def test_no_number_of_threads(code, asked):
    done = python(code, COUNT, HALFBYTE_THREADS=asked)
    message = f"HALFBYTE_THREADS is not a number of threads: got {asked!r}, expected 1 or more"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"halfbyte.errors.UsageError: {message}")


def test_affinity(code):
    core = min(os.sched_getaffinity(0))
    text = f"import os; os.sched_setaffinity(0, [{core}])\n{COUNT}\nimport small; print(small.filled())"
    assert output(code, text) == "1 1 1\nfilled\n"


def test_alone():
    """One thread, of this thread of Python and while the function runs; what it raises comes out."""
    every, elsewhere = jit.thread_count(), []

    def inside():
        thread = threading.Thread(target=lambda: elsewhere.append(jit.thread_count()))
        thread.start()
        thread.join()
        assert jit.alone(jit.thread_count) == 1
        return jit.thread_count()

    assert jit.alone(inside) == 1
    assert elsewhere == [every]
    assert jit.thread_count() == every
    with pytest.raises(ZeroDivisionError):
        jit.alone(lambda: 1 // 0)
    assert jit.thread_count() == every


# -- threads and processes --

HIDDEN = 'import sys; sys.modules["numba.np.ufunc.omppool"] = sys.modules["numba.np.ufunc.tbbpool"] = None\n'
AT_ONCE = """
import threading
import numba
from halfbyte import jit
import small

together, done = threading.Barrier(4), []

def work(alone):
    together.wait()
    for i in range(50):
        jit.alone(small.filled) if alone else small.filled(1000 + i)
    done.append(numba.get_num_threads())

threads = [threading.Thread(target=work, args=(i == 3,)) for i in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(done), set(done) == {numba.get_num_threads()}, numba.threading_layer())
"""


def layer(code):
    """What this machine has: Numba's own layer where there is no OpenMP."""
    return output(code, "import small, numba; small.filled(); print(numba.threading_layer())").strip()


@pytest.mark.parametrize("threads", ["1", "2"])
def test_threads_of_python(code, threads):
    assert output(code, AT_ONCE, HALFBYTE_THREADS=threads, NUMBA_NUM_THREADS="4") == f"4 True {layer(code)}\n"


def test_threads_of_python_without_openmp(code, tmp_path):
    for library in ("libgomp.so.1", "libgomp.so.1.0.0", "libtbb.so.12"):
        (tmp_path / library).touch()
    asked = {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "4"}
    assert output(code, AT_ONCE, **asked) == "4 True workqueue\n"
    assert output(code, HIDDEN + AT_ONCE, NUMBA_NUM_THREADS="4") == "4 True workqueue\n"
    hidden = output(code, AT_ONCE, NUMBA_NUM_THREADS="4", LD_LIBRARY_PATH=str(tmp_path))
    assert hidden == "4 True workqueue\n"


def test_numba_would_abort_without_us(code):
    """The reason for the lock, and that the test above can fail."""
    text = AT_ONCE.replace("import small\n", "import small\njit.run = lambda code, *args: code(*args)\n")
    done = python(code, text, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="4")
    assert done.returncode < 0
    assert "Concurrent access has been detected" in done.stderr + done.stdout


def test_one_line_from_several_threads(code, tmp_path):
    done = python(code, AT_ONCE, cache=tmp_path)
    assert done.returncode == 0
    assert LINE.fullmatch(done.stderr)


FORKED = """
import os
import small
from halfbyte.errors import UnavailableError
if {used}:
    small.filled()
pid = os.fork()
if not pid:
    try:
        print(small.filled(), flush=True)
    except UnavailableError as error:
        print(error, flush=True)
    print(small.plus(1, 1), flush=True)
    os._exit(0)
print(os.waitpid(pid, 0)[1], small.filled())
"""
REFUSED = (
    "this process was forked after its parent had computed with threads, which a fork does not copy; "
    'start processes by "spawn" or "forkserver": multiprocessing.get_context("spawn")'
)


@pytest.mark.parametrize("layer", [{}, {"NUMBA_THREADING_LAYER": "workqueue"}], ids=["default", "workqueue"])
def test_fork(code, layer):
    assert output(code, FORKED.format(used=True), **layer) == f"{REFUSED}\n42\n0 filled\n"
    assert output(code, FORKED.format(used=False), **layer) == "filled\n42\n0 filled\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start_processes(code, method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"""
import multiprocessing
import small
if __name__ == "__main__":
    small.filled()
    processes = [multiprocessing.get_context("{method}").Process(target=small.filled) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])
""")
    text = f"import runpy, sys; sys.argv = [{str(script)!r}]; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert output(code, text) == "[0, 0]\n"
