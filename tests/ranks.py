"""Processes that are ranks over gloo, for tests: started once, given cases one after the other."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

PATIENCE = 120.0
"""Seconds after which a test gives up on its ranks."""


class Pool:
    """Four ranks, or as many as asked; a case runs on all of them, with a mesh of two (in pairs) or of all."""

    def __init__(self, size: int = 4, device: str = "cpu") -> None:
        self.size = size
        start = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")  # no forks of CUDA
        start.set_forkserver_preload(["torch.distributed.device_mesh", "rank_cases"])  # imported once for all ranks
        self._folder = tempfile.TemporaryDirectory()
        self._asked = [start.Queue() for _ in range(self.size)]
        self._told = start.Queue()
        store = f"file://{self._folder.name}/store"
        self.processes = [
            start.Process(
                target=_serve,
                args=(rank, self.size, store, device, self._asked[rank], self._told),
                daemon=True,
            )
            for rank in range(self.size)
        ]
        kept = {name: os.environ.get(name) for name in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)
        try:
            for process in self.processes:
                process.start()
        finally:
            for name, value in kept.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def run(self, case: Callable[..., Any], ranks: int, *args: Any, alive: int | None = None) -> list[Any]:
        """What the case gives on each of the first ``ranks`` processes; an error is given, not raised, as its text."""
        for asked in self._asked:
            asked.put((case, ranks, args))
        found: dict[int, Any] = {}
        while len(found) < (self.size if alive is None else alive):
            try:
                rank, answer = self._told.get(timeout=PATIENCE)
            except queue.Empty:
                raise AssertionError(f"ranks gave no answer; there are those of {sorted(found)}") from None
            found[rank] = answer
        return [found[rank] for rank in sorted(found)][:ranks]

    def close(self) -> None:
        for asked in self._asked:
            asked.put(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HALFBYTE_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}


class Failed(str):
    """The text of an error: its class and its message."""


def _serve(rank: int, size: int, store: str, device: str, asked: Any, told: Any) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    meshes = {size: init_device_mesh(device, (size,), mesh_dim_names=("ranks",))}
    if size > 2:
        meshes[2] = init_device_mesh(device, (size // 2, 2), mesh_dim_names=("pair", "ranks"))["ranks"]
    while (task := asked.get()) is not None:
        case, ranks, args = task
        try:
            answer = case(meshes[ranks], *args)
        except Exception as error:
            answer = Failed(f"{type(error).__name__}: {error}")
            if os.environ.get("SHOW"):
                traceback.print_exc()
        told.put((rank, answer))
    told.close()
    told.join_thread()
    os._exit(0)  # ranks that take their groups apart wait for each other
