"""What the ranks of ``ranks.Pool`` run: each case gives arrays that the tests compare."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import halfbyte as hb
from halfbyte import nn
from halfbyte.errors import RankError
from halfbyte.lossy import to_fp8
from halfbyte.parallel import (
    ColumnParallel,
    ExpertParallel,
    ExpertTensorParallel,
    Ranks,
    RowParallel,
    count_slots,
    load_balance,
)
from helpers_run import random_weight


class Reads:
    """Bytes that this process reads through halfbyte."""

    def __init__(self) -> None:
        self.count, self._own = 0, os.preadv

    def __enter__(self) -> Reads:
        def counted(fd: int, buffers: Any, offset: int) -> int:
            got = self._own(fd, buffers, offset)
            self.count += got
            return got

        os.preadv = counted  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        os.preadv = self._own


def layer(kind: str, n: int, k: int, *, bias: bool = True, seed: int = 0, per_row: bool = True) -> Any:
    """The same whole layer on every rank: of kind "nvfp4", "fp8", "fp8-row" or "dense"."""
    own = torch.randn(n, generator=torch.Generator().manual_seed(seed)) if bias else None
    if kind == "dense":
        made = torch.nn.Linear(k, n, bias=bias)
        made.weight.data = torch.randn(n, k, generator=torch.Generator().manual_seed(seed + 1))
        if own is not None:
            made.bias.data = own
        return made.requires_grad_(False)
    weight = random_weight(n, k, seed=seed, per_row=per_row, pre_scale=seed % 2 == 1).torch("cpu")
    if kind == "nvfp4":
        return nn.Linear(weight, own)
    return nn.Fp8Linear(to_fp8(weight), own)


def inputs(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(9))


def column(mesh: Any, kind: str, n: int, k: int, options: dict[str, Any]) -> Any:
    """The whole layer's result, that of this rank's rows, and N of the rank."""
    whole, cut = layer(kind, n, k), layer(kind, n, k)
    parallelize_module(cut, mesh, ColumnParallel(**options))
    x = inputs(3, k)
    return whole(x).numpy(), cut(x).numpy(), cut.out_features


def row(mesh: Any, kind: str, n: int, k: int, dtype: str, seed: int) -> Any:
    """The whole layer's result, that of the sum over ranks, and what magnitudes their bound scales with."""
    whole, cut = layer(kind, n, k, seed=seed), layer(kind, n, k, seed=seed)
    parallelize_module(cut, mesh, RowParallel())
    x = inputs(3, k).to(getattr(torch, dtype))
    ranks = Ranks.of(mesh)
    each = k // ranks.size
    own = x[:, ranks.rank * each : (ranks.rank + 1) * each]
    return whole(x).float().numpy(), cut(own).float().numpy(), cut.in_features


def group(mesh: Any, sizes: list[int], k: int, biases: list[bool]) -> Any:
    """The columns of each part of a whole group, and of one whose parts are cut one after the other, and theirs."""
    weights = [random_weight(n, k, seed=i).torch("cpu") for i, n in enumerate(sizes)]

    def made() -> Any:
        own = [torch.arange(n) + 0.5 if given else None for n, given in zip(sizes, biases, strict=True)]
        return nn.Group.of(weights, "rows", own if any(biases) else None).parts()

    whole, cut = made(), made()
    for part in cut:
        parallelize_module(part, mesh, ColumnParallel())
    x = inputs(2, k)
    return [part(x).numpy() for part in whole], [part(x).numpy() for part in cut], [p.out_features for p in cut]


def experts_of(count: int, hidden: int, inner: int, *, bias: bool, **options: Any) -> Any:
    def weight(n: int, k: int, seed: int) -> Any:
        return random_weight(n, k, seed=seed).torch("cpu")

    layers = [
        (weight(inner, hidden, 3 * e), weight(inner, hidden, 3 * e + 1), weight(hidden, inner, 3 * e + 2))
        for e in range(count)
    ]
    if options.get("gated") is False:
        layers = [own[1:] for own in layers]
    rows = (1 if options.get("gated") is False else 2) * inner
    given = torch.Generator().manual_seed(5)
    more: dict[str, Any] = {}
    if bias:
        more["gate_up_bias"] = torch.randn(count, rows, generator=given)
        more["down_bias"] = torch.randn(count, hidden, generator=given)
    return nn.Experts.of(layers, **options, **more)


def routed(tokens: int, k: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    given = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=given).argsort(1)[:, :k]
    return ids, torch.rand(tokens, k, generator=given)


def loaded(mesh: Any, path: str, tokens: list[list[int]], new: int, options: dict[str, Any]) -> Any:
    """A model loaded over the ranks: logits of the prompts, a greedy text, a drawn one, bytes read, what it is."""
    import halfbyte.hf

    with Reads() as headers:
        hb.open(path)
    with Reads() as reads:
        model = halfbyte.hf.from_pretrained(path, mesh=mesh, **options)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.float().numpy()
    greedy = hb.generate(model, tokens, max_new_tokens=new)
    drawn = hb.generate(model, tokens, max_new_tokens=new, temperature=0.7)
    held = {name: type(module).__name__ for name, module in model.named_modules()}
    sizes = {
        name: sum(t.nbytes for t in module.held().values())
        for name, module in model.named_modules()
        if hasattr(module, "held")
    }
    return logits, greedy.tokens, drawn.tokens, reads.count, held, sizes, greedy.how, 2 * headers.count


def quantized(mesh: Any, path: str) -> None:
    import halfbyte.hf

    model = halfbyte.hf.from_pretrained(path, mesh=mesh, dtype=torch.float32)
    halfbyte.hf.quantize_model(model, include=["lm_head"])


def saved(mesh: Any, path: str, target: str) -> None:
    import halfbyte.hf

    halfbyte.hf.from_pretrained(path, mesh=mesh, dtype=torch.float32).save_pretrained(target)


def other_texts(mesh: Any, path: str) -> None:
    import halfbyte.hf

    model = halfbyte.hf.from_pretrained(path, mesh=mesh, dtype=torch.float32)
    hb.generate(model, [[1, 2, 3 + mesh.get_local_rank()]], max_new_tokens=2)


def mixture(mesh: Any, style: str, tokens: int, options: dict[str, Any], ids: Any = None, balance: bool = False) -> Any:
    """The whole experts' result for tokens, that of the split ones, and how evenly those were asked."""
    whole = experts_of(8, 64, 64, bias=True, **options)
    cut = experts_of(8, 64, 64, bias=True, **options)
    ranks = Ranks.of(mesh)
    styles = {
        "experts": ExpertParallel(),
        "own": ExpertParallel(tokens="own"),
        "columns": ExpertTensorParallel(),
    }
    parallelize_module(cut, mesh, styles[style])
    if balance:
        count_slots(cut)
    seed = ranks.rank if style == "own" else 0
    own = tokens + 2 * ranks.rank if style == "own" and tokens else tokens
    indices, weights = routed(own, 3, 8, seed)
    if ids is not None:
        indices = torch.tensor(ids)
        weights = torch.ones(indices.shape)
    x = torch.randn(len(indices), 64, generator=torch.Generator().manual_seed(seed))
    made = cut(x, indices, weights).numpy()
    told = load_balance(cut) if balance else None
    return whole(x, indices, weights).numpy(), made, told, str(told)


def refused(mesh: Any, what: str) -> None:
    """Something that does not split over some number of ranks."""
    if what == "rows":
        parallelize_module(layer("nvfp4", 66, 64), mesh, ColumnParallel())
    elif what == "blocks":
        parallelize_module(layer("nvfp4", 32, 48), mesh, RowParallel())
    elif what == "heads":
        parallelize_module(layer("nvfp4", 48, 64), mesh, ColumnParallel(heads=3))
    elif what == "norm":
        parallelize_module(torch.nn.LayerNorm(8), mesh, ColumnParallel())
    elif what == "experts":
        parallelize_module(torch.nn.Linear(8, 8), mesh, ExpertParallel())
    elif what == "count":
        parallelize_module(experts_of(6, 64, 64, bias=False), mesh, ExpertParallel())
    elif what == "saved":
        model = torch.nn.Sequential(layer("nvfp4", 32, 128))
        parallelize_module(model, mesh, {"0": RowParallel()})
        list(nn.weights_of(model))


def agreement(mesh: Any, differ: bool) -> int:
    """The first rank's number."""
    rank = Ranks.of(mesh).rank
    return Ranks.of(mesh).agreed("the answers", ("yes", rank // 2 if differ else 0), 100 + rank)


def impatient(patience: float) -> Ranks:
    """All ranks, in a group of its own that has met, and waits for so many seconds."""
    group = dist.new_group(timeout=timedelta(seconds=patience))
    ranks = Ranks.of(DeviceMesh.from_group(group, "cpu"))
    ranks.sum(torch.ones(4), None, torch.float32)
    return ranks


def dying(mesh: Any, victim: int, patience: float) -> Any:
    """A sum that one rank does not live to see."""
    ranks = impatient(patience)
    if ranks.rank == victim:
        os._exit(1)
    return ranks.sum(torch.ones(4), None, torch.float32)


def late(mesh: Any, patience: float) -> Any:
    """A sum to which the last rank comes when the others have given up."""
    ranks = impatient(patience)
    if ranks.rank == ranks.size - 1:
        time.sleep(2 * patience)
    return ranks.sum(torch.ones(4), None, torch.float32)


def sums_on_gpus(mesh: Any, n: int, biased: bool) -> Any:
    """A sum of whole numbers by calls, one after the other, and by a CUDA graph; what it should be; how it went."""
    ranks = Ranks.of(mesh)
    device = ranks.device
    width = n if n < 8192 else 8192 if n % 8192 == 0 else n
    parts = [torch.arange(n, device=device).reshape(-1, width) % 100 * (r + 1.0) for r in range(ranks.size)]
    bias = torch.arange(width, device=device).float() % 7 if biased else None
    wanted = sum(parts) if bias is None else sum(parts) + bias
    own = parts[ranks.rank]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made = [ranks.sum(own.clone(), bias, torch.float32) for _ in range(5)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        kept = [ranks.sum(own.clone(), bias, torch.float32) for _ in range(3)]
    for _ in range(20):
        graph.replay()
    made += kept
    torch.cuda.synchronize()
    ranks.check()
    for one in made[1:]:
        assert torch.equal(one, made[0])
    return made[0].cpu().numpy(), wanted.cpu().numpy(), ranks.how


def layers_on_gpus(mesh: Any, rows: int) -> Any:
    """Gate and up, then down: whole, and split over the ranks."""

    def made() -> Any:
        up, down = random_weight(1024, 512, seed=1), random_weight(1024, 1024, seed=2)
        layout = "fragments"
        return torch.nn.Sequential(
            nn.Linear(hb.pack(up.torch("cuda"), layout)), nn.Linear(hb.pack(down.torch("cuda"), layout))
        )

    whole, cut = made(), made()
    parallelize_module(cut, mesh, {"0": ColumnParallel(), "1": RowParallel()})
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(3)).bfloat16().cuda()
    with torch.no_grad():
        return whole(x).float().cpu().numpy(), cut(x).float().cpu().numpy()


def write_model(path: Any) -> Any:
    """A small Llama with NVFP4 weights."""
    import decoder_models
    import halfbyte.hf

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = decoder_models.tiny("llama", dtype=torch.bfloat16, head_dim=64, **sizes)
    halfbyte.hf.quantize_model(model)
    model.save_pretrained(path)
    return path


def text_on_gpus(mesh: Any, path: str) -> Any:
    """Greedy texts of a model on one GPU and over all, in CUDA graphs."""
    import halfbyte.hf

    prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    whole = halfbyte.hf.from_pretrained(path, device_map={"": torch.cuda.current_device()})
    split = halfbyte.hf.from_pretrained(path, mesh=mesh)
    one, two = (hb.generate(model, prompts, max_new_tokens=12, graph=True) for model in (whole, split))
    return {"whole": one.tokens, "split": two.tokens, "how": two.how}


def dying_on_gpus(mesh: Any, victim: int) -> Any:
    """A sum on GPUs that one rank does not live to see."""
    ranks = Ranks.of(mesh)
    ranks.timeout = 3.0
    ranks.sum(torch.ones(4, device=ranks.device), None, torch.float32)
    ranks.check()
    if ranks.rank == victim:
        os._exit(1)
    begin = time.monotonic()
    for _ in range(50):
        ranks.sum(torch.ones(4, device=ranks.device), None, torch.float32)
    try:
        ranks.check()
    except RankError as error:
        return str(error), time.monotonic() - begin
    return None
