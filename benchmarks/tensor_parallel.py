"""A stack of layers of Llama-3-70B's shape on two GPUs, against one of them in the same run.

``python -m benchmarks.tensor_parallel`` starts a process for each GPU. Each makes the whole stack with the same random
weights, times it alone, cuts it by the library's styles, compares the results, and times what is left. One token
attends to 512 others, 4096 tokens to each other (without rotation); all is one CUDA graph. ``--device cpu --tiny``
tries the program itself.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from halfbyte import nn
from halfbyte.layouts import Fragments, Rows
from halfbyte.parallel import ColumnParallel, Ranks, RowParallel
from halfbyte.parallel import layers as split_layers
from halfbyte.parallel.copies import Copies
from halfbyte.parallel.push import Push
from halfbyte.step_ops import add_norm, attend, gated
from halfbyte.weight import Weight

LLAMA_70B = {"hidden": 8192, "heads": 64, "kv": 8, "dim": 128, "inner": 28672}
TINY = {"hidden": 256, "heads": 8, "kv": 4, "dim": 32, "inner": 512}
CONTEXT = 512
EPS = 1e-5


def random_weight(n: int, k: int, generator: torch.Generator, device: Any) -> Weight:
    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.uint8)

    return Weight(codes=draw(0, 256, n, k // 2), scales=draw(0x30, 0x40, n, k // 16), scale2=1 / (3.4 * k**0.5))


class Layer(torch.nn.Module):
    """One layer: attention and a gated MLP, each behind a norm."""

    def __init__(self, of: dict[str, int], generator: torch.Generator, device: Any, layout: Any) -> None:
        super().__init__()
        hidden, heads, kv, dim, inner = (of[name] for name in ("hidden", "heads", "kv", "dim", "inner"))

        def packed(n: int, k: int) -> Any:
            return layout.place(random_weight(n, k, generator, device))

        sizes = [heads * dim, kv * dim, kv * dim]
        self.qkv = nn.Group(packed(sum(sizes), hidden), sizes)
        self.o = nn.Linear(packed(hidden, heads * dim))
        self.gate_up = nn.Group(packed(2 * inner, hidden), [inner, inner])
        self.down = nn.Linear(packed(hidden, inner))


class Stack(torch.nn.Module):
    """Layers, and what one rank's part of them computes."""

    def __init__(self, of: dict[str, int], layers: int, device: Any, dtype: torch.dtype, layout: Any) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        self.dim, self.dtype, self.device = of["dim"], dtype, device
        self.layers = torch.nn.ModuleList(Layer(of, generator, device, layout) for _ in range(layers))
        self.norm = torch.ones(of["hidden"], dtype=dtype, device=device)
        angles = torch.arange(CONTEXT + 64, device=device)[:, None] * torch.linspace(1, 0.001, self.dim, device=device)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.positions = torch.full((1,), CONTEXT, device=device)
        self.caches: dict[int, Tensor] = {}

    def cut(self, mesh: DeviceMesh) -> Stack:
        column, row = ColumnParallel(), RowParallel()
        plan = {"qkv": column, "o": row, "gate_up": column, "down": row}
        parallelize_module(self, mesh, {f"layers.*.{name}": style for name, style in plan.items()})
        self.caches = {}
        return self

    def _heads(self, layer: Any) -> tuple[int, int]:
        q, k, _ = layer.qkv.sizes
        return q // self.dim, k // self.dim

    def _cache(self, i: int, kv: int) -> Tensor:
        if i not in self.caches:
            shape = 2, 1, kv, CONTEXT + 64, self.dim
            self.caches[i] = torch.full(shape, 0.01, dtype=self.dtype, device=self.device)
        return self.caches[i]

    def _one(self, layer: Any, x: Tensor, i: int) -> Tensor:
        keys, values = self._cache(i, self._heads(layer)[1])
        return attend(
            layer.qkv(x), self.cos, self.sin, self.positions, keys, values, scale=self.dim**-0.5, settled=False
        )

    def _many(self, layer: Any, x: Tensor) -> Tensor:
        heads, kv = self._heads(layer)
        q, k, v = (part.reshape(1, len(x), -1, self.dim).transpose(1, 2) for part in layer.qkv.split(layer.qkv(x)))
        k, v = (part.repeat_interleave(heads // kv, 1) for part in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(len(x), -1)

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor | None = None
        for i, layer in enumerate(self.layers):
            own: Any = layer
            normed, residual = add_norm(x, residual, self.norm, EPS)
            mixed = self._one(own, normed, i) if len(x) == 1 else self._many(own, normed)
            normed, residual = add_norm(own.o(mixed), residual, self.norm, EPS)
            x = own.down(gated(normed, own.gate_up.packed, "silu"))
        return add_norm(x, residual, self.norm, EPS)[0]


def repeated(run: Callable[[], Any], device: Any, count: int, batches: int, inner: int = 1) -> float:
    """Seconds of one run: the median of batches of ``count`` replays, equally many on every rank."""
    if device.type != "cuda":
        run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
            torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(inner):
            run()
    found = []
    for _ in range(batches):
        dist.barrier()
        graph.replay()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e-3 * begin.elapsed_time(end) / count / inner)
    return statistics.median(found)


class Program:
    """What one rank does."""

    def __init__(self, given: argparse.Namespace, rank: int, size: int) -> None:
        self.given, self.rank, self.size = given, rank, size
        self.device = torch.device(given.device, rank) if given.device == "cuda" else torch.device("cpu")
        self.mesh = DeviceMesh(given.device, list(range(size)), mesh_dim_names=("ranks",))
        self.of = TINY if given.tiny else LLAMA_70B
        self.dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
        self.layout: Any = Fragments() if given.device == "cuda" else Rows()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def slowest(self, seconds: float) -> float:
        every = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        return float(every)

    def tokens(self, count: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(count)
        return torch.randn(count, self.of["hidden"], generator=generator, device=self.device).to(self.dtype)

    def timed(self, stack: Stack, x: Tensor) -> float:
        count, batches = (30, 7) if len(x) == 1 else (2, 5)
        with torch.no_grad():
            return self.slowest(repeated(lambda: stack(x), self.device, count, batches))

    def pieces(self, stack: Stack, name: str) -> None:
        """What each operation of a layer takes for one token, weights in rotation over the layers."""
        x, layers = self.tokens(1), list(stack.layers)
        first: Any = layers[0]
        heads = stack._heads(first)[0]
        mixed = torch.ones(1, heads * stack.dim, dtype=self.dtype, device=self.device)
        inner = torch.ones(1, first.gate_up.sizes[0], dtype=self.dtype, device=self.device)
        qkv = first.qkv(x)
        residual = x.clone()

        def attended(layer: Any, i: int) -> Any:
            keys, values = stack._cache(i, stack._heads(layer)[1])
            return attend(
                qkv, stack.cos, stack.sin, stack.positions, keys, values, scale=stack.dim**-0.5, settled=False
            )

        ways: dict[str, Callable[[Any, int], Any]] = {
            "norm": lambda layer, i: add_norm(x, residual, stack.norm, EPS),
            "qkv": lambda layer, i: layer.qkv(x),
            "attend": attended,
            "o": lambda layer, i: layer.o(mixed),
            "gate_up": lambda layer, i: gated(x, layer.gate_up.packed, "silu"),
            "down": lambda layer, i: layer.down(inner),
        }
        told = []
        for what, way in ways.items():

            def run(way: Any = way) -> None:
                for i, layer in enumerate(layers):
                    way(layer, i)

            with torch.no_grad():
                took = self.slowest(repeated(run, self.device, 10, 3, 5)) / len(layers)
            told.append(f"{what} {1e6 * took:.1f}")
        self.say(f"one token, {name}, us a layer: {', '.join(told)}")

    def run(self) -> None:
        started, layers = time.perf_counter(), self.given.layers
        whole = Stack(self.of, layers, self.device, self.dtype, self.layout)
        counts = [1, self.given.many]
        with torch.no_grad():
            wanted = {m: whole(self.tokens(m)).float() for m in counts}
        alone = {m: self.timed(whole, self.tokens(m)) for m in counts}
        self.say(f"{layers} layers of {self.of}, {self.size} ranks on {self.device.type}, {self.dtype}")
        for m in counts:
            self.say(
                f"M {m:5}: one {self.device.type} {1e6 * alone[m]:10.1f} us ({time.perf_counter() - started:.0f} s)"
            )
        self.pieces(whole, "whole")
        stack, ranks = whole.cut(self.mesh), Ranks.of(self.mesh)

        def measured(m: int, how: str) -> None:
            with torch.no_grad():
                y = stack(self.tokens(m)).float()
            off = float((y - wanted[m]).norm() / wanted[m].norm())
            digest = int.from_bytes(hashlib.sha256(y.cpu().numpy().tobytes()).digest()[:6])
            same = self.slowest(digest) == -self.slowest(-digest)
            split = self.timed(stack, self.tokens(m))
            self.say(
                f"M {m:5}: {self.size} ranks {1e6 * split:10.1f} us, {alone[m] / split:.2f}x of one; {how}; "
                f"off by {off:.1e}; same bits on all ranks: {same}"
            )

        self.pieces(stack, "a rank (with the sums of o and down)")
        made, many = ranks._made, self.given.many
        measured(1, "as it is")
        if made.get(Push) is not None:
            kept, made[Push] = made[Push], None
            measured(1, "NCCL alone")
            made[Push] = kept
        if self.device.type == "cuda":
            made[Copies] = None
            measured(many, "NCCL alone")
            del made[Copies]
        for rows in (512, 1024) if self.device.type == "cuda" else (1024,):
            split_layers.CHUNK = rows
            measured(many, f"{rows} rows sent at once")
        self.say(f"{ranks.how or 'all sums by gloo'}")
        self.exchanges()
        ranks.check()
        self.say(f"all took {time.perf_counter() - started:.0f} s")

    def exchanges(self) -> None:
        """What a sum over the ranks takes by itself."""
        ranks, group, hidden = Ranks.of(self.mesh), self.mesh.get_group(), self.of["hidden"]
        for m in (1, 16, self.given.many):
            for dtype in (torch.float32, torch.bfloat16):
                part = torch.zeros(m, hidden, dtype=dtype, device=self.device)
                ways: dict[str, Callable[[], Any]] = {"all_reduce": lambda p=part: dist.all_reduce(p, group=group)}
                if dtype == torch.float32:
                    ways["halfbyte"] = self.own(ranks, part)
                if self.device.type == "cuda":
                    ways |= self.symmetric(m, dtype)
                for name, run in ways.items():
                    try:
                        many = m > 16
                        took = repeated(run, self.device, 3 if many else 10, 5, 4 if many else 20)
                        text = f"{1e6 * self.slowest(took):9.1f} us"
                    except Exception as error:
                        text = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
                    self.say(f"sum of ({m}, {hidden}) {str(dtype)[6:]:9} {name:20} {text}")

    def own(self, ranks: Ranks, part: Tensor) -> Callable[[], Any]:
        """The library's sum, of many rows with nothing beside it."""
        copies = ranks.copies(len(part), part.shape[1], self.dtype)
        out = torch.empty_like(part, dtype=self.dtype)

        def run() -> None:
            if copies is not None:
                copies.send(part, 0)
                copies.finish([part], None, out)

        return run if copies is not None else lambda: ranks.sum(part, None, self.dtype)

    def symmetric(self, m: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
        """Torch's own sums over symmetric memory."""
        try:
            from torch.distributed import _symmetric_memory as memory

            buffer = memory.empty(m, self.of["hidden"], dtype=dtype, device=self.device)
            buffer.zero_()
            memory.rendezvous(buffer, dist.group.WORLD)
        except Exception as error:
            self.say(f"no symmetric memory: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
            return {}
        name, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
        if m <= 16:
            return {"one_shot_all_reduce": lambda: ops.one_shot_all_reduce(buffer, "sum", name)}
        return {"two_shot_all_reduce_": lambda: ops.two_shot_all_reduce_(buffer, "sum", name)}


def work(rank: int, given: argparse.Namespace, store: str) -> None:
    """One process."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.set_num_threads(1)
    backend = "nccl" if given.device == "cuda" else "gloo"
    more = {}
    if given.device == "cuda":
        torch.cuda.set_device(rank)
        more = {"device_id": torch.device("cuda", rank)}
    patience = timedelta(seconds=given.timeout)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=given.ranks, timeout=patience, **more
    )
    try:
        Program(given, rank, given.ranks).run()
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()[-1500:]}", flush=True)
        os._exit(1)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--many", type=int, default=4096)
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (given, str(Path(folder, "store"))), given.ranks)


if __name__ == "__main__":
    main()
