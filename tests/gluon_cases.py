"""What tests of kernels in Gluon share: assembly evaluated, arguments, memory between guards, and launches in a row."""

import contextlib
import itertools
import re

import numpy as np
import pytest
import torch

import halfbyte as hb
from gpu_codecs import needs_triton
from halfbyte.kernels import LinearArgs
from halfbyte.kernels.cuda import launch
from halfbyte.kernels.cuda.launch import Tensor
from halfbyte.layouts import Fragments
from halfbyte.numerics import encode_e4m3
from halfbyte.weight import to_numpy
from helpers_run import random_floats, random_weight

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_gpu = [pytest.mark.gpu, needs_triton, pytest.mark.skipif(not hopper, reason="torch sees no Hopper GPU")]
DTYPES = ("bfloat16", "float16")
U32 = np.uint32
FMA = {"fma.rn.bf16x2": "bfloat16", "fma.rn.f16x2": "float16"}


def halves(words, dtype):
    """u32 -> (..., 2) f64, the low half first."""
    parts = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint16)
    return to_numpy(torch.from_numpy(parts.view(np.int16)).view(getattr(torch, dtype)).double())


def joined(parts):
    """(..., 2) of 16 bits -> u32."""
    return parts[..., 0].astype(U32) | parts[..., 1].astype(U32) << 16


def evaluate(code, **values):
    """The registers after a block of assembly: u32 arrays, and of products of two halves their (..., 2) f64."""
    held = {name: np.asarray(value, U32) for name, value in values.items()}

    def value(text):
        return U32(int(text, 0)) if text[0].isdigit() else held[text]

    for statement in filter(None, map(str.strip, code.strip("{} ").split(";"))):
        opcode, rest = statement.split(maxsplit=1)
        if opcode == ".reg":
            continue
        if opcode == "mov.b32" and rest.startswith("{"):
            low, high, of = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest).groups()
            held[low], held[high] = held[of] & 0xFFFF, held[of] >> 16
            continue
        if opcode == "mov.b32" and rest.endswith("}"):
            to, low, high = re.fullmatch(r"(\S+), \{(\w+), (\w+)\}", rest).groups()
            held[to] = held[low] | held[high] << 16
            continue
        to, *given = rest.split(", ")
        a, *more = map(value, given)
        if opcode in ("mov.b32", "cvt.u32.u16"):
            result = a
        elif opcode == "shl.b32":
            result = a << more[0]
        elif opcode == "shr.u32":
            result = a >> more[0]
        elif opcode == "shf.l.wrap.b32":
            assert (a == more[0]).all()
            result = a << more[1] | a >> 32 - more[1]
        elif opcode == "and.b32":
            result = a & more[0]
        elif opcode == "lop3.b32" and more[2] == 0xE4:
            result = a & more[1] | more[0] & ~more[1]
        elif opcode == "lop3.b32" and more[2] == 0xEA:
            result = a & more[0] | more[1]
        elif opcode == "lop3.b32":
            assert more[2] == 0xF8
            result = a | more[0] & more[1]
        elif opcode == "mad.lo.u32":
            result = a * more[0] + more[1]
        elif opcode in FMA:
            assert more[1] == 0x80008000
            held[to] = halves(a, FMA[opcode]) * halves(more[0], FMA[opcode])
            continue
        elif opcode == "prmt.b32":
            a, b, select = np.broadcast_arrays(a, *more)
            assert not (select & 0x8888).any()
            eight = np.stack([v >> 8 * i & 0xFF for v in (a, b) for i in range(4)])
            picked = [np.take_along_axis(eight, (select >> 4 * i & 7)[None].astype(np.int64), 0)[0] for i in range(4)]
            result = sum(byte << 8 * i for i, byte in enumerate(picked))
        elif opcode == "mul.f16x2":
            result = joined((halves(a, "float16") * halves(more[0], "float16")).astype(np.float16).view(np.uint16))
        else:
            assert opcode == "cvt.rn.satfinite.e4m3x2.f16x2", opcode
            low, high = np.moveaxis(encode_e4m3(halves(a, "float16").astype(np.float32)), -1, 0)
            result = low.astype(U32) | high.astype(U32) << 8
        held[to] = np.asarray(result, U32)
    return held


def arguments(n=40, k=80, rows=3, dtype="bfloat16", out_dtype="bfloat16", bias=None, device="cpu", **of_weight):
    weight = random_weight(n, k, **of_weight)
    packed = hb.pack(weight, Fragments(dtype)).to(device)
    x = torch.from_numpy(random_floats((rows, k), "float32")).to(device, getattr(torch, dtype))
    b = (
        None
        if bias is None
        else torch.from_numpy(random_floats((n,), "float32", seed=2)).to(device, getattr(torch, bias))
    )
    out = torch.full((rows, n), float("nan"), dtype=getattr(torch, out_dtype), device=device)
    return weight, LinearArgs(x=x, weight=packed, bias=b, out=out)


GUARD = 0xA5


def guarded(a, fill):
    """A copy with values before and behind it that no kernel may read to any effect, or write."""
    room = 4096 // a.element_size()
    whole = torch.full((a.numel() + 2 * room,), fill, dtype=a.dtype, device=a.device)
    whole[room : room + a.numel()] = a.reshape(-1)
    return whole, whole[room : room + a.numel()].view(a.shape)


def replace_buffers(packed):
    """The same weight between guards: codes that decode to 6, scales to the largest number."""
    fills = {"codes": GUARD, "scales": 0xF6, "scale2": float("nan"), "pre_scale": float("nan")}
    buffers = {name: guarded(b, fills[name])[1] for name, b in packed.buffers().items()}
    return type(packed).from_buffers(packed.layout, packed.shape, buffers)


def stand_in(state, kind):
    """A program that is compiled for nothing; ``state`` keeps its launches, their kind, and what it describes."""

    def run(grid, values):
        state.kinds.append(kind)
        state.values.append((grid, values))

    def tensor(place, address, shape, strides=None):
        state.described.append((place, address, shape))
        return Tensor(address, shape, strides)

    run.tensor = tensor
    return run


def without_a_driver(monkeypatch, module):
    """132 multiprocessors, and a kernel's memory beside its arguments: where partial results and counters begin."""
    memory = {"workspace": torch.empty(1 << 20, dtype=torch.uint8), "counters": torch.zeros(4096, dtype=torch.uint8)}
    for name, held in memory.items():
        monkeypatch.setattr(module, name, lambda device, nbytes, held=held: held[:nbytes])
    monkeypatch.setattr(module, "multiprocessors", lambda index, elsewhere=False: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return [a.data_ptr() for a in memory.values()]


def check_an_untested_triton(monkeypatch, refuse, call):
    """It is refused by name."""
    import triton

    launch.untested.cache_clear()
    monkeypatch.setattr(triton, "__version__", "3.9.1")
    try:
        assert refuse(call) == ("Gluon is tested with Triton 3.6 to 3.8, not 3.9.1",)
    finally:
        launch.untested.cache_clear()


def at_an_odd_address(k):
    """(1, K) bfloat16 that does not begin at a multiple of 16 bytes."""
    odd = torch.empty(k + 1, dtype=torch.bfloat16)[1:].reshape(1, k)
    assert odd.data_ptr() % 16
    return odd


def result_at(out, at):
    """Memory for a result like ``out`` that begins so many elements behind a multiple of 16 bytes."""
    memory = torch.empty(out.numel() + 8, dtype=torch.bfloat16)
    return memory[(-memory.data_ptr() // 2) % 8 + at :][: out.numel()].view(out.shape)


def check_chains(run, x):
    """Launches of which each reads what the one ahead of it wrote, alone and in a graph: the same bytes every time."""
    buffers = [torch.empty_like(x) for _ in range(9)]

    def chain():
        for a, b in itertools.pairwise(buffers):
            run(a, None, b)

    buffers[0].copy_(x)
    chain()
    torch.cuda.synchronize()
    first = [b.clone() for b in buffers]
    assert all(torch.isfinite(b).all() for b in first)

    def again(start):
        for _ in range(20):
            for b in buffers[1:]:
                b.fill_(float("nan"))
            start()
            assert all(map(torch.equal, buffers, first))

    again(chain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    again(graph.replay)


def still_being_written(args, result, times):
    """Weights whose buffers a GPU has yet to write when they come, and a copy of what each is to give."""
    written = args.weight.buffers()
    big = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for _ in range(times):
        written["codes"].random_(0, 256)
        expected = result(args).clone()
        fresh = {name: torch.empty_like(b) for name, b in written.items()}
        torch.cuda.synchronize()
        big.fill_(1)  # so that what follows is still to come when the launch is made
        for name, b in written.items():
            fresh[name].copy_(b)
        yield type(args.weight).from_buffers(args.weight.layout, args.weight.shape, fresh), expected
