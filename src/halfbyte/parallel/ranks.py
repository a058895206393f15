"""The ranks that a model is split over, and what they exchange."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from halfbyte import gpu
from halfbyte.errors import RankError, UsageError
from halfbyte.parallel.copies import VALUES, Copies
from halfbyte.parallel.push import MOST, Push

TIMEOUT: Final = 60.0
"""Seconds that a rank waits for the others."""
LARGE: Final = 1 << 22
"""From so many values on GPUs add by copies."""
CHUNK: Final = 1024
"""Rows that are copied while the next are multiplied."""
ALIGNED: Final = 16
"""What a width is a multiple of, so that all begins where many bytes are moved at once."""


def start(device: str | None = None, *, timeout: float = TIMEOUT) -> DeviceMesh:
    """Meet the other processes that torchrun has started, all in one mesh.

    Args:
        device: "cuda" (NCCL; process i takes GPU LOCAL_RANK) or "cpu" (gloo); by default "cuda" where torch sees one.
        timeout: seconds after which a rank that waits for another one fails.

    Returns:
        A mesh of one axis, "ranks".

    Raises:
        UsageError: no torchrun, or fewer GPUs than processes.
        RankError: not all processes came.
    """
    lacking = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if lacking and not dist.is_initialized():
        hint = "run: torchrun --nproc-per-node N program.py"
        raise UsageError("this process was not started as one of several", got=f"no {', '.join(lacking)}", hint=hint)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cuda", "cpu"):
        raise UsageError("ranks are on GPUs or on CPUs", got=repr(device), expected='"cuda" or "cpu"')
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda":
        if local >= torch.cuda.device_count():
            got = f"process {local} of this machine, {torch.cuda.device_count()} GPUs"
            raise UsageError("each rank needs a GPU of its own", got=got)
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        try:
            of = torch.device("cuda", local) if kind == "cuda" else None
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=of)
        except RuntimeError as error:
            raise _lost("the ranks did not all come together", error) from error
    made = DeviceMesh(kind, list(range(dist.get_world_size())), mesh_dim_names=("ranks",))
    Ranks.of(made).timeout = timeout
    return made


class Ranks:
    """The ranks of one mesh axis. Every rank has to make the same calls in the same order.

    A rank that fails makes the others fail: over gloo at once where they exchange with it, as its connection closes,
    else after the timeout of the process group. ``Ranks.of`` gives the same object for the same group.

    Attributes:
        group: of torch.distributed.
        rank: this one's number.
        size: how many there are.
        timeout: seconds that this rank waits for a GPU whose work waits for another rank.
        how: what sums go through, in words; "" before the first on GPUs.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise UsageError(
                "a model is split over one axis of a mesh",
                got=f"{mesh.ndim} axes",
                hint='pass mesh["name of the axis"]',
            )
        self.group: Any = mesh.get_group()
        self.rank, self.size, self.timeout = mesh.get_local_rank(), mesh.size(), TIMEOUT
        self.device_type = mesh.device_type
        self._made: dict[type, Any] = {}
        self._side: Any = None
        self.how = "gloo" if self.device_type == "cpu" else ""

    @staticmethod
    def of(mesh: DeviceMesh) -> Ranks:
        """Those of a mesh; UsageError where it has several axes, or is none."""
        if not isinstance(mesh, DeviceMesh):
            raise UsageError("this is no mesh", got=type(mesh).__name__, hint="pass what halfbyte.parallel.start gives")
        group: Any = mesh.get_group() if mesh.ndim == 1 else None
        known = _known.get(group) if group is not None else None
        if known is None:
            known = Ranks(mesh)
            _known[known.group] = known
        return known

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        raise UsageError("a model that is split over ranks is not pickled", hint="load it in each process")

    @property
    def device(self) -> torch.device:
        """Where what is exchanged lies."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    def sum(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The ranks' parts added in their dtype, then the bias in float32, then rounded: the same bits on every rank.

        Args:
            part: (..., N), of each rank the same shape; it may be overwritten.
            bias: (N,) or None.
            dtype: of the result.

        Raises:
            RankError: another rank failed, or did not come in time.
        """
        total = part.contiguous()
        if self.size > 1 and total.numel():
            if total.is_cuda and total.dtype == torch.float32:
                small = self._small() if total.numel() <= MOST else None
                if small is not None:
                    return small.sum(total, bias, torch.empty_like(total, dtype=dtype))
            self._call("a sum", lambda: dist.all_reduce(total, group=self.group))
        if bias is not None:
            total = total.float() + bias.float()
        return total.to(dtype)

    def copies(self, rows: int, width: int, dtype: torch.dtype) -> Copies | None:
        """What adds so many rows of float32 for a result of ``dtype`` beside products; None where ``sum`` does.

        Raises:
            RankError: as ``sum``.
        """
        if self.device_type != "cuda" or self.size == 1 or dtype.itemsize != 2 or not rows * width >= LARGE:
            return None
        if width % ALIGNED or width * CHUNK > VALUES:
            return None
        if Copies not in self._made:
            self._meet(Copies)
        made: Copies | None = self._made[Copies]
        return made

    def side_stream(self) -> Any:
        """A stream of this rank's GPU beside the current one."""
        if self._side is None:
            cuda: Any = torch.cuda
            self._side = cuda.Stream(self.device, priority=-1)
        return self._side

    def _small(self) -> Push | None:
        if Push not in self._made:
            self._meet(Push)
        made: Push | None = self._made[Push]
        return made

    def _meet(self, kind: type) -> None:
        """See whether the GPUs' memory can be written to by each other; once, and never in a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise UsageError("the ranks' first sum cannot be in a CUDA graph", hint="call the model once before")
        made, reason = None, gpu.missing()
        if reason is None:
            try:
                made = kind(self.group, self.rank, self.size, self.timeout)
            except (RuntimeError, ImportError, AttributeError, TypeError) as error:
                reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        able = torch.tensor([made is not None], dtype=torch.int32, device=self.device)
        self._call("a meeting", lambda: dist.all_reduce(able, dist.ReduceOp.MIN, group=self.group))
        self._made[kind] = made if int(able) else None
        told = "small sums by one kernel" if kind is Push else "large ones by copies"
        if not int(able):
            told = f"{'small' if kind is Push else 'large'} sums by NCCL ({reason or 'another rank cannot otherwise'})"
        self.how = f"{self.how}, {told}" if self.how else told

    def check(self) -> None:
        """Wait for this rank's GPU; RankError where another rank did not answer it."""
        small = self._made.get(Push)
        if small is not None:
            small.check()

    def gather(self, part: Tensor, width: int) -> Tensor:
        """The ranks' columns side by side; on GPUs a -0 may come out as 0.

        Args:
            part: (..., S or fewer): of the first ranks S columns, as ``share`` gives them.
            width: of all.

        Returns:
            (..., width).

        Raises:
            RankError: as ``sum``.
        """
        if self.size == 1:
            return part
        lead, most = part.shape[:-1], share(width, 0, self.size)[1]
        lanes = part.numel() // max(part.shape[-1], 1)
        small = self._small() if part.is_cuda and 0 < lanes * width <= MOST else None
        if small is not None:  # each rank's columns, and zeros beside them, are added
            whole = torch.zeros(*lead, width, dtype=torch.float32, device=part.device)
            whole[..., self.rank * most : self.rank * most + part.shape[-1]] = part
            return small.sum(whole, None, torch.empty_like(whole, dtype=part.dtype))
        own = part
        if most * self.size != width:
            own = part.new_zeros(*lead, most)
            own[..., : part.shape[-1]] = part
        if not own.numel():
            return part.new_zeros(*lead, width)
        every = self._all(own).reshape(self.size, -1, most)
        if every.shape[1] > 1:
            every = every.transpose(0, 1).contiguous()
        return every.reshape(*lead, self.size * most)[..., :width]

    def table(self, counts: Tensor) -> list[list[int]]:
        """The ranks' counts (C,) int64, one row for each, waiting for the device; RankError as ``sum``."""
        rows: list[list[int]] = self._all(counts).reshape(self.size, -1).tolist()
        return rows

    def exchange(self, rows: Tensor, send: list[int], take: list[int]) -> Tensor:
        """Rows to the other ranks, and theirs.

        Args:
            rows: (sum of send, ...): those for rank 0 come first.
            send: for each rank, how many go there.
            take: for each rank, how many come from there.

        Returns:
            (sum of take, ...); RankError as ``sum``.
        """
        made = rows.new_empty(sum(take), *rows.shape[1:])
        self._call("an exchange", lambda: dist.all_to_all_single(made, rows.contiguous(), take, send, group=self.group))
        return made

    def agreed(self, what: str, value: Any, number: int = 0) -> int:
        """Rank 0's number, where all ranks have the same value.

        Args:
            what: the value is, in words.
            value: with a ``repr`` that tells it from others.
            number: an int64.

        Raises:
            UsageError: another value on some rank; every rank raises it.
            RankError: as ``sum``.
        """
        digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])
        rows = self.table(torch.tensor([digest, number], dtype=torch.int64, device=self.device))
        other = [rank for rank, (found, _) in enumerate(rows) if found != rows[0][0]]
        if other:
            raise UsageError(f"{what} of the ranks differ", got=f"others on rank {', '.join(map(str, other))}")
        return int(rows[0][1])

    def wait(self, event: Any) -> None:
        """Wait for an event of CUDA; RankError where that takes longer than the timeout."""
        end = time.monotonic() + self.timeout
        while not self._done(event):
            if time.monotonic() > end:
                raise RankError(
                    f"another rank did not answer rank {self.rank} in {self.timeout:g} s",
                    hint="look for the first error among all ranks; this process cannot go on",
                )
            time.sleep(20e-6)

    def _done(self, event: Any) -> bool:
        try:
            return bool(event.query())
        except RuntimeError as error:
            raise _lost(f"the GPU of rank {self.rank} failed", error) from error

    def _all(self, own: Tensor) -> Tensor:
        """The ranks' tensors of one shape, one after the other, flat."""
        flat = own.contiguous().reshape(-1)
        every = flat.new_empty(self.size * flat.numel())
        self._call("a gathering", lambda: _gather(every, flat, group=self.group))
        return every

    def _call(self, what: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except RuntimeError as error:
            raise _lost(f"rank {self.rank} got no answer in {what} over {self.size} ranks", error) from error


_gather: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch's later name for it, and the former."""
_known: Final[WeakKeyDictionary[Any, Ranks]] = WeakKeyDictionary()


def _lost(message: str, error: RuntimeError) -> RankError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return RankError(message, got=reason[:200], hint="look for the first error among all ranks")


def share(size: int, rank: int, count: int) -> tuple[int, int]:
    """Which of ``size`` entries a rank has, where any size is taken: the last ranks have fewer.

    The parts are multiples of 16 where that leaves each rank some.
    """
    each = -(-size // (count * 16)) * 16
    if each * (count - 1) >= size:
        each = -(-size // count)
    return min(rank * each, size), min((rank + 1) * each, size)


def even_share(size: int, rank: int, count: int, unit: int, what: str) -> tuple[int, int]:
    """Which of ``size`` entries a rank has, where all have the same number of whole units.

    Raises:
        UsageError: a size that does not split so, naming ``what`` and the numbers of ranks that do.
    """
    if size % (count * unit):
        units = size // unit if size % unit == 0 else 1
        fit = ", ".join(str(n) for n in range(1, min(units, 128) + 1) if units % n == 0)
        each = f" in multiples of {unit}" if unit > 1 else ""
        raise UsageError(f"{what} = {size} does not split over {count} ranks{each}", expected=f"ranks among {fit}")
    return rank * size // count, (rank + 1) * size // count


def head_share(size: int, heads: int, rank: int, count: int) -> tuple[int, int]:
    """Which rows a rank has of a layer whose N are heads, none of which is cut.

    Fewer heads than ranks are copied where their number divides that of the ranks: rank r has head
    ``r * heads // count``, the one that its queries go with.

    Raises:
        UsageError: heads that do not split.
    """
    if heads < 1 or size % heads:
        raise UsageError("N is no multiple of the heads", got=f"N = {size}, {heads} heads")
    if heads % count == 0:
        return even_share(size, rank, count, 1, "N")
    if count % heads:
        fit = [n for n in range(1, 129) if heads % n == 0 or n % heads == 0]
        few = ", ".join(map(str, fit[:12]))
        raise UsageError(f"{heads} heads do not split over {count} ranks", expected=f"ranks among {few}, ...")
    dim, head = size // heads, rank * heads // count
    return head * dim, (head + 1) * dim
