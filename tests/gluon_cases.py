"""What tests of kernels in Gluon share: assembly evaluated, arguments, and memory between guards."""

import re

import numpy as np
import torch

import halfbyte as hb
from halfbyte.kernels import LinearArgs
from halfbyte.layouts import Fragments
from halfbyte.weight import to_numpy
from helpers_run import random_floats, random_weight


def halves(words, dtype):
    """u32 -> (..., 2) f64, the low half first."""
    parts = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint16)
    return to_numpy(torch.from_numpy(parts.view(np.int16)).view(getattr(torch, dtype)).double())


def evaluate(code, dtype, **values):
    """The registers after a block of assembly, as u64 arrays of 32-bit values."""
    code = code.strip("{} ")
    held = dict(values)

    def value(text):
        return np.uint64(int(text, 0)) if text[0].isdigit() else held[text]

    for statement in filter(None, map(str.strip, code.split(";"))):
        opcode, rest = statement.split(maxsplit=1)
        if opcode == ".reg":
            continue
        pair = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)|(\w+), \{(\w+), (\w+)\}", rest)
        if opcode == "mov.b32" and pair and pair[3]:
            held[pair[1]], held[pair[2]] = held[pair[3]] & 0xFFFF, held[pair[3]] >> 16
            continue
        if opcode == "mov.b32" and pair:
            held[pair[4]] = held[pair[5]] | held[pair[6]] << 16
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
        elif opcode == "lop3.b32":
            assert more[2] == 0xEA
            result = a & more[0] | more[1]
        elif opcode == "prmt.b32":
            assert more in ([0, 0x4140], [0, 0x4342])
            at = np.uint64(16 * (more[1] == 0x4342))
            result = a >> at & 0xFF | (a >> at + 8 & 0xFF) << 16
        elif opcode == "mad.lo.u32":
            result = a * more[0] + more[1]
        else:
            assert opcode == {"bfloat16": "fma.rn.bf16x2", "float16": "fma.rn.f16x2"}[dtype]
            assert more[1] == 0x80008000
            held[to] = halves(a, dtype) * halves(more[0], dtype)
            continue
        held[to] = result & np.uint64(0xFFFFFFFF)
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
