"""The FP8 kernel in Gluon: its assembly evaluated, its machine code, its launches, and, on a GPU, its results."""

import re

import ml_dtypes
import numpy as np
import pytest

from halfbyte.kernels.cuda.fp8_gluon import round_code
from halfbyte.layouts import Fragments
from halfbyte.lossy import to_fp8
from halfbyte.numerics import encode_e4m3
from halfbyte.weight import Weight

DTYPES = ("bfloat16", "float16")
U32 = np.uint32
ORDER = (0, 8, 1, 9)


def halves(words, dtype):
    """u32 -> (..., 2) f32, the low half first."""
    parts = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint16)
    return parts.view(getattr(ml_dtypes, dtype, np.float16)).astype(np.float32)


def word(values, dtype):
    """(..., 2) f32 -> u32 of two 16-bit floats, rounded to nearest even."""
    parts = values.astype(getattr(ml_dtypes, dtype, np.float16)).view(np.uint16).astype(U32)
    return parts[..., 0] | parts[..., 1] << 16


def e4m3(high, low):
    """Two f32 -> u16 of two bytes, to nearest even."""
    a, b = (encode_e4m3(np.asarray(v, np.float32)).astype(U32) for v in (high, low))
    return a << 8 | b


def evaluate(code, dtype, **values):
    """The registers after a block of assembly, as u32 arrays."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
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
        if opcode == "mov.b32":
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
            picks = [int(more[1]) >> 4 * i & 15 for i in range(4)]
            assert more[0] == 0
            assert max(picks) < 8
            result = sum((a >> 8 * pick & 0xFF) << 8 * i for i, pick in enumerate(picks) if pick < 4)
        elif opcode == "mad.lo.u32":
            result = a * more[0] + more[1]
        elif opcode == f"mul.{kind}":
            result = word(halves(a, dtype) * halves(more[0], dtype), dtype)
        elif opcode == f"fma.rn.{kind}":  # of zeros of both signs the sum is +0, as here
            result = word(halves(a, dtype) * halves(more[0], dtype) + halves(more[1], dtype), dtype)
        elif opcode == "cvt.rn.satfinite.e4m3x2.f32":
            result = e4m3(a.view(np.float32), more[0].view(np.float32))
        else:
            assert opcode == "cvt.rn.satfinite.e4m3x2.f16x2", opcode
            both = halves(a, "float16")
            result = e4m3(both[..., 1], both[..., 0])
        held[to] = np.asarray(result, U32)
    return held


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_assembly_rounds_every_code_with_every_scale_as_the_twin_does(dtype):
    rng = np.random.default_rng(5)
    scales = np.concatenate([rng.permutation(0x7F).astype(np.uint8) for _ in range(64)]).reshape(16, 508)
    codes = np.stack([rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (16 * 508, 1)), axis=1)]).reshape(16, -1)
    weight = Weight(codes=codes[:, ::2] | codes[:, 1::2] << 4, scales=scales, scale2=1.0)
    packed = Fragments(dtype).pack(weight).buffers()
    words = packed["codes"].view(U32).reshape(127, 8, 2, 2, 4)  # u g v e c
    four = packed["scales"].view(U32).reshape(127, 8, 2, 1)
    given = {"$4": np.broadcast_to(four, (127, 8, 2, 4)), "$8": words[..., 0, :], "$12": words[..., 1, :]}
    outputs = evaluate(round_code(dtype), dtype, **given, **{"$16": 65536})
    found = np.stack([outputs[f"${i}"] for i in range(4)], -1)[..., None].view(np.uint8)  # u g v c (e rh) j
    found = found.reshape(127, 8, 2, 4, 2, 2, 4).transpose(5, 1, 0, 2, 4, 3, 6).reshape(16, -1, 16)
    place = np.array([2 * c + k for c in range(4) for k in ORDER])
    twin = to_fp8(weight).data.reshape(16, -1, 16)[..., place]
    zeros = np.where(found & 0x7F == 0, 0, found) == np.where(twin & 0x7F == 0, 0, twin)
    assert zeros.all(), np.argwhere(~zeros)[:5]
