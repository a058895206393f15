"""What Numba compiles for a decoder's steps, beside torch's operators."""

import pytest
import torch

from halfbyte.errors import UsageError
from halfbyte.kernels import AddNormArgs, AttendArgs, DenseArgs, GateArgs, select
from halfbyte.kernels import dense as reference_dense
from halfbyte.kernels import step_torch as reference
from halfbyte.kernels.cpu import dense, step
from halfbyte.kernels.dense import DenseCall
from halfbyte.kernels.step import ACTIVATIONS
from halfbyte.step_ops import dense as dense_op

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of numbers near 1: two roundings."""


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def both(kernels, make):
    """What two kernels write, each to arrays of its own."""
    results = []
    for kernel in kernels:
        args, written = make()
        kernel.run(args)
        results.append(written)
    for got, expected in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected, rtol=CLOSE[got.dtype], atol=CLOSE[got.dtype])
    return results[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [True, False])
def test_add_norm(residual, dtype):
    def make():
        x, weight = random(3, 577, dtype=dtype), random(577, dtype=dtype)
        normed = torch.full_like(x, torch.nan)
        total = torch.full_like(x, torch.nan) if residual else x
        added = random(3, 577, dtype=dtype, seed=1) if residual else None
        return AddNormArgs(x=x, residual=added, weight=weight, eps=1e-5, normed=normed, total=total), (normed, total)

    both((step.ADD_NORM, reference.ADD_NORM), make)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(activation, dtype):
    def make():
        given = 3 * random(2, 2 * 301, dtype=dtype)
        given[0, :4] = torch.tensor([90.0, -90.0, 0.0, -0.0])
        out = torch.full((2, 301), torch.nan, dtype=dtype)
        return GateArgs(gate_up=given, activation=activation, out=out), (out,)

    both((step.GATE, reference.GATE), make)


def attend(dtype, *, norms=False, window=None, dim=64, positions=(0, 17, 62)):
    def make():
        b, heads, kv, room = len(positions), 6, 2, 64
        angles = random(room, dim // 2, dtype=torch.float32).repeat(1, 2)
        keys, values = (random(b, kv, room, dim, dtype=dtype, seed=s) for s in (2, 3))
        out = torch.full((b, heads * dim), torch.nan, dtype=dtype)
        args = AttendArgs(
            qkv=random(b, (heads + 2 * kv) * dim, dtype=dtype),
            cos=angles.cos(),
            sin=angles.sin(),
            positions=torch.tensor(positions),
            keys=keys,
            values=values,
            q_norm=random(dim, dtype=dtype, seed=4) if norms else None,
            k_norm=random(dim, dtype=dtype, seed=5) if norms else None,
            eps=1e-6,
            scale=dim**-0.5,
            window=window,
            settled=False,
            out=out,
        )
        return args, (out, keys, values)

    return make


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_attend(window, norms, dtype):
    both((step.ATTEND, reference.ATTEND), attend(dtype, norms=norms, window=window))


def test_threads_do_not_change_what_attend_gives(monkeypatch):
    make = attend(torch.float32)
    alone = both((step.ATTEND, reference.ATTEND), make)
    monkeypatch.setattr(step, "_PARALLEL", 0)
    threads = both((step.ATTEND, reference.ATTEND), make)
    assert all(torch.equal(a, b) for a, b in zip(alone, threads, strict=True))


def test_positions_are_within_the_cache():
    args, _ = attend(torch.float32, positions=(0, 64, 1))()
    with pytest.raises(UsageError, match=r"positions are outside of the cache: got \[0, 64, 1\], expected 0..63"):
        step.ATTEND.run(args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1000, 577), (4, 65, 16), (2, 1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_dense(bias, m, n, k, dtype):
    def make():
        out = torch.full((m, n), torch.nan, dtype=dtype)
        weight = random(n, k, dtype=dtype) / k**0.5
        return DenseArgs(
            x=random(m, k, dtype=dtype), weight=weight, bias=random(n, dtype=dtype) if bias else None, out=out
        ), (out,)

    both((dense.DENSE, reference_dense.TORCH), make)


def test_few_tokens_on_a_cpu_are_compiled():
    def name(rows, **changes):
        made = {"dtype": "float32", "device": "cpu", "library": "torch", "shape": (8, 8), "bias": False}
        return select(DenseArgs, DenseCall(rows=rows, **made | changes)).name

    assert [name(rows) for rows in (1, 4, 5)] == ["dense-cpu", "dense-cpu", "dense-torch"]
    assert name(1, device="cuda", capability=90) == "dense-torch"
    assert dense.DENSE.refuse(
        DenseCall(rows=5, dtype="float32", device="cpu", library="torch", shape=(8, 8), bias=False)
    ) == ("takes up to 4 tokens, not 5",)


def test_dense_refuses_what_does_not_fit():
    x, weight = random(2, 8, dtype=torch.float32), random(3, 8, dtype=torch.float32)
    with pytest.raises(UsageError, match=r"weight does not fit dense: got \(3, 7\), expected \(3, 8\)"):
        dense_op(x, weight[:, :7].contiguous())
    with pytest.raises(UsageError, match="weight does not fit dense: got float16, expected float32"):
        dense_op(x, weight.half())
    assert torch.equal(dense_op(x[:0], weight), torch.empty(0, 3))
