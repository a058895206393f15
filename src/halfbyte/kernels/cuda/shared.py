"""What launches on a GPU share: the memory of partial results, and what may run before what.

Launches of several threads, of CUDA graphs, and those that start before the kernel ahead has ended, meet here.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from halfbyte.errors import UnavailableError


class Written:
    """Whether what was ahead of the first launch on a weight, so all that wrote it, is over."""

    def __init__(self, device: Any) -> None:
        self.over = False
        self._device = device
        self._event: Any = None

    def launched(self) -> None:
        """After an ordinary launch."""
        import torch

        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return
            if self._event is None:
                self._event = torch.cuda.current_stream().record_event()
            elif self._event.query():
                self.over = True


_shared: Final[dict[Any, Any]] = {}

in_turn: Final = threading.RLock()
"""Held while a call's launches on ``workspace`` are queued: threads may share a stream, and its memory."""


_thread: Final = threading.local()


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """While it lasts no memory of ``workspace`` or ``counters`` is kept for this thread's next calls.

    Where torch makes CUDA graphs of what it compiled, it runs that once before and once while it captures, in the
    memory of its graphs, and what is still held of it then is an error.
    """
    before = getattr(_thread, "keeps_nothing", False)
    _thread.keeps_nothing = True
    try:
        yield
    finally:
        _thread.keeps_nothing = before


def capturing(device: Any) -> bool:
    """Whether what is computed on a device of torch's goes to a CUDA graph, and is not there yet."""
    import torch

    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def workspace(device: Any, nbytes: int) -> Any:
    """Memory for partial results: (at least ``nbytes``,) u8, one for each device and stream, shared by all kernels.

    Its content lasts until the next launch on the stream; a kernel launched with ``pdl`` waits before it writes there.
    While a CUDA graph is captured the memory is the graph's own, and in torch's operators the call's.

    Args:
        device: of torch's, with an index.
        nbytes: needed now.
    """
    return _of_stream("partial results", device, nbytes, zeros=False)


def counters(device: Any, nbytes: int) -> Any:
    """As ``workspace``, but of zeros; every kernel leaves zeros there. A CUDA graph sets them once for each stream."""
    return _of_stream("counters", device, nbytes, zeros=True)


def forget() -> None:
    """Let go of both: each is then made anew, and no larger than is needed."""
    _shared.clear()


def _of_stream(kind: str, device: Any, nbytes: int, *, zeros: bool) -> Any:
    import torch

    make = torch.zeros if zeros else torch.empty
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    held: dict[Any, Any] = _shared
    key: tuple[Any, ...] = kind, device.index, stream
    captured = torch._C._cuda_isCurrentStreamCapturing()
    if getattr(_thread, "keeps_nothing", False) or (captured and not zeros):
        return make(nbytes, dtype=torch.uint8, device=device)
    if captured:
        held, key = _captured, (*key, capture_of(stream))
        for old in [old for old in held if old[-1] != key[-1]]:
            del held[old]
    found = held.get(key)
    if found is None or found.numel() < nbytes:
        size = nbytes if found is None else max(nbytes, 2 * found.numel())
        found = held[key] = make(size, dtype=torch.uint8, device=device)
    return found


_captured: Final[dict[Any, Any]] = {}
"""Counters of the capture that is under way."""


def capture_of(stream: int) -> int:
    """The number of the capture that a stream is in."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    none = ctypes.c_void_p()
    ask = _driver().cuStreamGetCaptureInfo_v2
    found = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), none, none, none)
    if found:
        raise UnavailableError("the driver does not tell which CUDA graph is captured", got=f"error {found}")
    return number.value


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
