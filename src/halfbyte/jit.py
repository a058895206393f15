"""Numba as every compiled part uses it: where machine code is kept, how many threads run it, and who may call it.

Only modules that are loaded to run import this together with Numba; ``missing`` says why that would fail.

Machine code is kept in a folder whose name is a digest of all source files of the package and of the versions that
make the code, so that code of an older source cannot be found. A folder that cannot be written, or a file in it that
is damaged, costs the compilation again and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import pickle
import platform
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from halfbyte.errors import UnavailableError, UsageError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_log = logging.getLogger("halfbyte")

_CODE_BYTES: Final = 68 << 20
"""Memory of Numba in a process, and of what it takes to compile for one tool: 44 MB where the code is kept on disk."""


def missing() -> str | None:
    """None where Numba is at hand, else what to do; this imports it."""
    try:
        from numba import config
    except ModuleNotFoundError as error:
        if error.name == "numba":
            return "numba is not installed; run: pip install 'halfbyte[cpu]'"
        return f"numba cannot be imported: {error}"
    except ImportError as error:
        return f"numba cannot be imported: {error}"
    return "NUMBA_DISABLE_JIT is set" if getattr(config, "DISABLE_JIT", 0) else None


def code_bytes() -> int:
    """Memory that compiled code takes in a process before its first array; 0 where Numba is not installed."""
    if "numba" in sys.modules:
        there = sys.modules["numba"] is not None
    else:
        there = importlib.util.find_spec("numba") is not None
    return _CODE_BYTES if there else 0


def compiled(function: F | None = None, *, name: str | None = None, parallel: bool = False) -> Any:
    """Compile a function when it is first called, and keep its machine code on disk.

    Args:
        function: plain Python that Numba compiles; arithmetic is IEEE's, and divisions by zero do not raise.
        name: unique in its module; by default the function's own.
        parallel: it uses ``prange``; call it by ``run``.
    """
    import numba

    def decorate(function: F) -> Any:
        function.__qualname__ = name or function.__qualname__
        code = numba.njit(nogil=True, error_model="numpy", parallel=parallel)(function)
        code._cache = _cache_class()(function)
        return code

    return decorate if function is None else decorate(function)


def address_of(code: Any, signature: Any) -> int:
    """Where the machine code of a ``compiled`` function for arguments of some types begins, while ``code`` lives.

    It is called as a C function; it must not raise.
    """
    code.compile(signature)
    made = code.overloads[signature.args]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name))


@functools.cache
def has(feature: str) -> bool:
    """Whether the processor that Numba compiles for has what LLVM calls by that name.

    It is this one, unless NUMBA_CPU_FEATURES and the like say otherwise; HALFBYTE_CPU=portable hides all it has.

    Raises:
        UsageError: HALFBYTE_CPU is something else.
    """
    if _portable():
        return False
    from numba.core.registry import cpu_target

    return f"+{feature}" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


@functools.cache
def cpu_name() -> str:
    """What LLVM calls this processor, such as "znver4"."""
    from llvmlite import binding

    return str(binding.get_host_cpu_name())


def _portable() -> bool:
    asked = os.environ.get("HALFBYTE_CPU") or "native"
    if asked not in ("native", "portable"):
        raise UsageError("unknown HALFBYTE_CPU", got=repr(asked), expected="native or portable")
    return asked == "portable"


class _Here(threading.local):
    """Of this thread of Python."""

    alone = False
    """Whether others compute beside it."""


_here: Final = _Here()


def alone(function: Callable[[], T]) -> T:
    """Call a function that is one of several at once: what it computes, it computes on one thread."""
    before, _here.alone = _here.alone, True
    try:
        return function()
    finally:
        _here.alone = before


def thread_count() -> int:
    """How many threads compute: one under ``alone``, else HALFBYTE_THREADS or one for each core of this process.

    Raises:
        UsageError: HALFBYTE_THREADS is not a positive number.
    """
    return 1 if _here.alone else _all_threads()


@functools.cache
def _all_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("HALFBYTE_THREADS")
    if asked and not (asked.isdecimal() and int(asked) > 0):
        raise UsageError("HALFBYTE_THREADS is not a number of threads", got=repr(asked), expected="1 or more")
    return min(int(asked) if asked else cores, _most_threads())


class _Layer:
    """What is known of Numba's threads in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.used = False
        self.concurrent = False
        self.all_threads = False
        self.forked = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.lock = threading.Lock()
        self.forked, self.concurrent = self.used, False


_layer: Final = _Layer()


def run(code: Callable[..., None], *args: Any) -> None:
    """Call parallel code on ``thread_count`` threads; safe from several threads of Python.

    Numba's own layer of threads ("workqueue", used where the system has no OpenMP) aborts the process when two threads
    of Python call it at once: there, calls wait for each other. GNU's OpenMP ends a child that was forked after its
    parent used it: there, a call raises.

    Raises:
        UnavailableError: in such a child.
        UsageError: as ``thread_count``.
    """
    if _layer.concurrent:
        if _layer.all_threads and not _here.alone:
            code(*args)
        else:
            _on_threads(code, args)
        return
    if _layer.forked:
        raise UnavailableError(
            "this process was forked after its parent had computed with threads, which a fork does not copy",
            hint='start processes by "spawn" or "forkserver": multiprocessing.get_context("spawn")',
        )
    with _layer.lock:
        _layer.used = True
        _on_threads(code, args)
        import numba

        _layer.all_threads = _all_threads() == _most_threads()
        _layer.concurrent = numba.threading_layer() != "workqueue"


def _on_threads(code: Callable[..., None], args: tuple[Any, ...]) -> None:
    wanted = thread_count()
    if wanted == _most_threads():  # or fewer, where the caller told Numba so itself
        code(*args)
        return
    from numba import get_num_threads, set_num_threads

    before = get_num_threads()  # of this thread of Python
    set_num_threads(wanted)
    try:
        code(*args)
    finally:
        set_num_threads(before)


@functools.cache
def _most_threads() -> int:
    from numba import config

    return int(config.NUMBA_NUM_THREADS)


def user_folder() -> Path:
    """Where files of ours that belong to the user are kept; it need not exist, nor be a place for files."""
    home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")  # noqa: PTH111 (raises nothing)
    if home.startswith("~"):  # the user has none
        home = os.devnull
    return Path(home) / "halfbyte"


def cache_folder() -> Path:
    """Where machine code of this source and these versions is kept, likewise."""
    return user_folder() / f"code-{_digest()}"


@functools.cache
def _digest() -> str:
    import llvmlite
    import numba
    import numpy as np

    digest = hashlib.blake2b(digest_size=12)
    digest.update(
        repr((sys.version, platform.machine(), numba.__version__, llvmlite.__version__, np.__version__)).encode()
    )
    digest.update(b"portable" if _portable() else b"native")
    package = Path(__file__).parent
    for file in sorted(package.rglob("*.py")):
        digest.update(f"\0{file.relative_to(package)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _announce(folder: str) -> None:
    """One line in a process, the first time that something is compiled."""
    _log.warning("compiling for this processor; the code is kept in %s", folder)


@functools.cache
def _cache_class() -> Any:
    """Numba's cache of a function, in our folder, with a digest of what it holds, and without errors."""
    from numba.core import caching, serialize, sigutils

    class Locator(caching.UserProvidedCacheLocator):  # type: ignore[misc]
        def __init__(self, py_func: Any, py_file: str) -> None:
            super().__init__(py_func, py_file)
            self._cache_path = str(cache_folder())

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            return cls(py_func, py_file)

        def get_source_stamp(self) -> Any:
            return None  # the folder stands for all sources

    class Proven(caching.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes: ClassVar[list[Any]] = [Locator]

        def reduce(self, cres: Any) -> Any:
            held = serialize.dumps(super().reduce(cres))
            return hashlib.sha256(held).digest(), held

        def rebuild(self, target_context: Any, payload: Any) -> Any:
            digest, held = payload
            if hashlib.sha256(held).digest() != digest:
                raise ValueError("damaged machine code")
            return super().rebuild(target_context, pickle.loads(held))

    class Kept(caching.FunctionCache):  # type: ignore[misc]
        _impl_class = Proven

        def _index_key(self, sig: Any, codegen: Any) -> Any:
            return sig, codegen.magic_tuple()  # not what a closure holds: it is made by the same sources

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                found = super().load_overload(sig, target_context)
                if found is not None and found.signature.args != tuple(sigutils.normalize_signature(sig)[0]):
                    raise ValueError("damaged index")
            except Exception:  # whatever a damaged file raises
                found = None
                with suppress(Exception):
                    self.flush()  # a damaged index would stay
            if found is None:
                _announce(self.cache_path)
            return found

        def save_overload(self, sig: Any, data: Any) -> None:
            with suppress(Exception):  # no room, no permission: compiled again next time
                super().save_overload(sig, data)

    return Kept
