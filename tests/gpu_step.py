"""The small kernels of a step against torch's; as a script, on the CPU, in Triton's interpreter.

TRITON_INTERPRET=1 python -m gpu_step add_norms gates attends
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from halfbyte.kernels import in_order
from halfbyte.kernels import step_torch as reference
from halfbyte.kernels.cuda import attend_gluon, step
from halfbyte.kernels.cuda.attend_gluon import Attend as One
from halfbyte.kernels.cuda.launch import options_of
from halfbyte.kernels.cuda.step import Attend
from halfbyte.kernels.step import ACTIVATIONS, AddNormArgs, AttendArgs, GateArgs

DTYPES = ("float32", "bfloat16", "float16")
HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
FACTOR = 2 * (2.0**-22.9 + 9 * 2.0**-24)
"""By how much two factors of a norm in float32 may differ, relatively: rsqrt.approx is off by 2^-22.9, as PTX says;
the mean of at most 4096 squares, all positive, passes 18 roundings, 8 in a thread, and a root halves what they add."""


def random(*shape: int, dtype: str = "float32", seed: int = 0, device: str = "cpu") -> Any:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.to(getattr(torch, dtype)).to(device)


ROWS = ((1, 4096), (3, 576), (2, 1000))
WIDTHS = ((1, 14336), (3, 1000), (2, 7))


def add_norms(device: str, dtypes: tuple[str, ...] = DTYPES) -> Iterator[str]:
    for (m, h), dtype, residual in itertools.product(ROWS, dtypes, (True, False)):
        x, r = (random(m, h, dtype=dtype, seed=seed, device=device) for seed in (0, 1))
        weight = random(h, dtype=dtype, seed=2, device=device)
        results = []
        for launch in (reference.ADD_NORM.run, step.ADD_NORM.run):
            normed = torch.full_like(x, torch.nan)
            total = torch.full_like(x, torch.nan) if residual else x
            given = {"x": x, "residual": r if residual else None, "weight": weight, "eps": 1e-5}
            launch(AddNormArgs(**given, normed=normed, total=total))
            results.append((normed, total))
        (expected, expected_total), (got, total) = results
        name = f"add_norm {m}x{h} {dtype} {residual}"
        assert torch.equal(total, expected_total), name
        off = (got.double() - expected.double()).abs()
        assert (off <= (4.04 * HALF_ULP[dtype] + FACTOR) * expected.double().abs()).all(), name
        assert (off > 0).float().mean() <= (1.0 if dtype == "float32" else 0.01), name
        yield name


def orders(device: str, dtypes: tuple[str, ...] = DTYPES) -> Iterator[str]:
    """What a norm, and what adds up, write in order is what they write in rows."""
    for (m, h), dtype in itertools.product(ROWS, dtypes):
        x, weight = (random(*shape, dtype=dtype, device=device) for shape in ((m, h), (h,)))
        args = AddNormArgs(x=x, residual=None, weight=weight, eps=1e-5, normed=torch.empty_like(x), total=x)
        normed = x.new_full((in_order.length(h),), torch.nan)
        step.ADD_NORM.run(args)
        step.ADD_NORM.run(replace(args, normed=normed))
        assert torch.equal(in_order.in_rows(normed, m, h), args.normed), (m, h, dtype)
        assert normed.isnan().sum() == normed.numel() - m * h, (m, h, dtype)
        yield f"add_norm {m}x{h} {dtype}"
    for case, dtype in itertools.product(ATTENDED[:2], dtypes):
        args = attended(case, dtype, device)
        from halfbyte.kernels.cuda import step_code

        call, (shares, *_) = args.call(), (made.splits for made in case[7] if made.splits > 1)
        (b, width), found = args.out.shape, shares * args.out.shape[0] * call.heads
        sums, tops = random(found * call.dim, device=device), random(2 * found, device=device).abs() + 1
        results = [torch.full_like(args.out, torch.nan), args.out.new_full((in_order.length(width),), torch.nan)]
        for out in results:
            parts = step.add_up_parts(replace(args, out=out).call(), shares, call.capability)
            run = step.compiled(step_code.add_up, *parts, device=out.device, early=False)
            arrays = (sums, tops, out)
            run((b * call.heads, 1, 1), arrays if run.plainly else tuple(a.data_ptr() for a in arrays))
        assert torch.equal(in_order.in_rows(results[1], b, width), results[0]), case
        assert results[1].isnan().sum() == results[1].numel() - b * width, case
        yield f"add_up {case[:3]} {dtype}"


def gates(device: str, dtypes: tuple[str, ...] = DTYPES) -> Iterator[str]:
    for (m, width), dtype, activation in itertools.product(WIDTHS, dtypes, ACTIVATIONS):
        both = 3 * random(m, 2 * width, dtype=dtype, device=device)
        expected, got = (torch.full_like(both[:, :width].contiguous(), torch.nan) for _ in range(2))
        reference.GATE.run(GateArgs(gate_up=both, activation=activation, out=expected))
        step.GATE.run(GateArgs(gate_up=both, activation=activation, out=got))
        name = f"gate {m}x{width} {dtype} {activation}"
        off = (got.double() - expected.double()).abs()
        assert (off <= 2.02 * HALF_ULP[dtype] * expected.double().abs() + 1e-5).all(), (name, off.max())
        yield name


ATTENDED = [
    # Hq, Hkv, D, positions, T, window, norms, configurations
    (8, 2, 64, (0, 17, 63), 64, None, False, (Attend(1, 1), Attend(4), Attend(8, 2, 2))),
    (4, 1, 128, (99, 31), 100, None, True, (Attend(1), Attend(3, 2, 8))),
    (6, 2, 80, (40, 64), 70, 20, False, (Attend(2),)),
    (10, 1, 96, (33,), 48, 1, True, (Attend(2, 2), Attend(1))),
    (5, 5, 256, (50, 1), 64, 33, False, (Attend(4, 1), Attend(1))),
    (4, 2, 64, (-1, 64, 5), 64, None, False, (Attend(2), Attend(1))),
]


def attended(case: Any, dtype: str, device: str) -> AttendArgs:
    """The arguments of a case; without norms turns are of right angles, so exact."""
    heads, kv, dim, positions, room, window, norms, _ = case
    b, of = len(positions), {"dtype": dtype, "device": device}
    angles = 3 * random(room, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    if not norms:
        quarter = torch.arange(room * dim // 2).view(room, -1) % 4
        cos, sin = ((quarter + turn) % 2 * (1.0 - quarter // 2 * 2) for turn in (1, 0))
    norm = [random(dim, seed=s, **of) + 1 if norms else None for s in (4, 5)]
    return AttendArgs(
        qkv=random(b, (heads + 2 * kv) * dim, **of), cos=cos.repeat(1, 2).to(device), sin=sin.repeat(1, 2).to(device),
        positions=torch.tensor(positions, device=device), keys=random(b, kv, room, dim, seed=2, **of),
        values=random(b, kv, room, dim, seed=3, **of), q_norm=norm[0], k_norm=norm[1], eps=1e-6, scale=dim**-0.5,
        window=window, settled=False, out=random(b, heads * dim, **of),
    )  # fmt: skip


GLUON = [
    (8, 2, 64, (0, 17, 63), 64, None, False, (One(1), One(4, 1), One(2, 1))),
    (4, 1, 128, (299, 31), 300, None, True, (One(1, 2), One(3, 4), One(5, 1))),
    (6, 2, 64, (40, 264), 270, 20, False, (One(2), One(2, 1), One(1, 8))),
    (8, 1, 128, (33,), 48, 1, True, (One(2, 2), One(1))),
    (5, 5, 128, (50, 200), 256, 33, False, (One(4, 8), One(2, 1))),
    (4, 2, 128, (-1, 64, 5), 64, None, False, (One(2), One(1), One(3, 1))),
    (8, 2, 128, (1023, 1000, *range(14, 1024, 72)), 1024, None, False, (One(1, 8), One(8, 8), One(16), One(2))),
]


def gluon_attends(device: str, dtypes: tuple[str, ...] = attend_gluon.DTYPES) -> Iterator[str]:
    return attends(device, dtypes, GLUON, attend_gluon.bind)


def gluon_finds(device: str, dtypes: tuple[str, ...] = attend_gluon.DTYPES) -> Iterator[str]:
    return finds(device, dtypes, GLUON, attend_gluon.bind)


def unread(args: AttendArgs) -> None:
    """NaN where nothing may be read."""
    for i, p in enumerate(args.positions.tolist()):
        args.keys[i, :, max(0, p) :] = torch.nan
        args.values[i, :, max(0, p) :] = torch.nan


def attends(
    device: str, dtypes: tuple[str, ...] = DTYPES, cases: Any = ATTENDED, bind: Any = step.bind_attend
) -> Iterator[str]:
    """Results against float64, what is written and what is not."""
    for case, dtype in itertools.product(cases, dtypes):
        room, norms, configurations = case[4], case[6], case[7]
        args = attended(case, dtype, device)
        unread(args)
        at = args.positions
        valid = (at >= 0) & (at < room)
        name = f"attend {case[:7]} {dtype}"
        for made in configurations:
            got = fresh(args)
            bind(got, made)(*got.arrays())
            if device != "cpu":
                again = fresh(args)
                bind(again, made)(*again.arrays())
                assert torch.equal(_bits(got.out), _bits(again.out)), name
            if bind is attend_gluon.bind and len(at) <= in_order.ROWS:
                m, width = got.out.shape
                order = replace(fresh(args), out=got.out.new_empty(in_order.length(width)))
                bind(order, made)(*order.arrays())
                assert torch.equal(_bits(in_order.in_rows(order.out, m, width)), _bits(got.out)), name
            assert got.out[~valid].isnan().all(), name
            for i in torch.nonzero(valid).flatten().tolist():
                check(got, i, dtype, norms, bind is attend_gluon.bind, (name, made, i))
            kept = torch.ones(at.shape[0], room, dtype=torch.bool, device=device)
            kept[valid, at[valid]] = False
            for new, old in ((got.keys, args.keys), (got.values, args.values)):
                assert torch.equal(_bits(new).transpose(1, 2)[kept], _bits(old).transpose(1, 2)[kept]), name
        yield name


def check(got: AttendArgs, i: int, dtype: str, norms: bool, weights_rounded: bool, name: Any) -> None:
    """A sequence's results against float64 from the keys that were written; bounds are of rounding, added up."""
    p, half = int(got.positions[i]), HALF_ULP[dtype]
    kv, dim = got.keys.shape[1], got.keys.shape[3]
    heads = got.out.shape[1] // dim
    x = got.qkv[i].double().view(-1, dim)
    q, k, v = x.split((heads, kv, kv))
    off = (3 * half + 2.0**-20) * 1.01 if norms else 0.0
    turned = []
    for one, norm in ((q, got.q_norm), (k, got.k_norm)):
        if norm is not None:
            one = one * (one.square().mean(-1, keepdim=True) + got.eps).rsqrt() * norm.double()
        low, high = one.chunk(2, -1)
        rotated = one * got.cos[p].double() + torch.cat((-high, low), -1) * got.sin[p].double()
        turned.append((rotated, off * (one.abs() + one.roll(dim // 2, -1).abs())))
    (query, query_off), (key, key_off) = turned
    assert ((got.keys[i, :, p].double() - key).abs() <= key_off).all(), name
    assert torch.equal(got.values[i, :, p].double(), v), name
    first = 0 if got.window is None else max(0, p - got.window + 1)
    seen, found = (
        cache[i, :, first : p + 1].double().repeat_interleave(heads // kv, 0) for cache in (got.keys, got.values)
    )
    scores = torch.einsum("hd,hnd->hn", query, seen) * got.scale
    score_off = torch.einsum("hd,hnd->hn", query_off + dim * 2.0**-22 * query.abs(), seen.abs()).amax(-1) * got.scale
    weights = scores.softmax(-1)
    expected = torch.einsum("hn,hnd->hd", weights, found)
    size = torch.einsum("hn,hnd->hd", weights, found.abs())
    relative = torch.expm1(2 * score_off)[:, None] + (p + 128) * 2.0**-23 + half * weights_rounded
    bound = 1.01 * (relative * size + half * expected.abs())
    wrong = (got.out[i].double().view(heads, dim) - expected).abs()
    assert (wrong <= bound).all(), (name, (wrong / bound).max().item(), wrong.max().item())


def finds(
    device: str, dtypes: tuple[str, ...] = DTYPES, cases: Any = ATTENDED, bind: Any = step.bind_attend
) -> Iterator[str]:
    """Exact results: each entry counts once where all count alike, and where one counts alone it is what comes."""
    for case, dtype in itertools.product(cases, dtypes):
        heads, kv, dim, positions, room, window, norms, configurations = case
        args = attended(case, dtype, device)
        of = args.qkv.dtype
        b = len(positions)
        inside = [i for i, p in enumerate(positions) if 0 <= p < room]
        first = [0 if window is None else max(0, p - window + 1) for p in positions]
        x = args.qkv.view(b, -1, dim)
        e, h, d = (torch.arange(n, device=device) for n in (room, kv, dim))
        alike = ((e[:, None] + 3 * h[:, None, None]) % dim == d) * (1.0 + e[:, None] // dim)  # (Hkv, T, D)
        args.values.copy_(alike)
        args.keys.copy_(torch.where(args.keys > 0, 1.0, -1.0))
        args.cos.fill_(1.0)
        args.sin.fill_(0.0)
        x[:, :heads] = 0
        for i in inside:
            x[i, heads + kv :] = args.values[i, :, positions[i]]
            x[i, heads : heads + kv] = args.keys[i, :, positions[i]]
        name = f"finds {case[:7]} {dtype}"
        alone = replace(args, qkv=args.qkv.clone(), values=random(b, kv, room, dim, dtype=dtype, seed=6, device=device))
        y = alone.qkv.view(b, -1, dim)
        wanted = torch.zeros(b, heads, dim, dtype=of, device=device)
        for i in inside:
            span = positions[i] - first[i]
            y[i, heads + kv :] = alone.values[i, :, positions[i]]
            for one in range(heads):
                entry = positions[i] - span * one // max(1, heads - 1)
                y[i, one] = 128 * alone.keys[i, one * kv // heads, entry]
                wanted[i, one] = alone.values[i, one * kv // heads, entry]
        unread(args)
        unread(alone)
        for made in configurations:
            got = fresh(args)
            bind(got, made)(*got.arrays())
            for i in inside:
                seen = alike[:, first[i] : positions[i] + 1].double().mean(1).repeat_interleave(heads // kv, 0)
                off = (got.out[i].double().view(heads, dim) - seen).abs()
                assert (off <= (HALF_ULP[dtype] + 2.0**-22) * seen).all(), (name, made, i, off.max().item())
            if not norms:
                got = fresh(alone)
                bind(got, made)(*got.arrays())
                assert torch.equal(got.out.view(b, heads, dim)[inside], wanted[inside]), (name, made)
        yield name


def jobs(capability: int, dtypes: tuple[str, ...] = DTYPES) -> Iterator[tuple[str, str, tuple[Any, Any, Any]]]:
    """What all that compiles: the module, the name and what decides the program."""
    made = []
    for dtype in dtypes:
        made += [("add_norm", *step.add_norm_parts(dtype, h, r, capability)) for _, h in ROWS for r in (True, False)]
        made += [("gate", *step.gate_parts(dtype, i, a, capability)) for _, i in WIDTHS for a in ACTIVATIONS]
        for case in ATTENDED:
            call = attended(case, dtype, "cpu").call()
            made += [("attend", *step.attend_parts(call, one, capability)) for one in case[7]]
            made += [("add_up", *step.add_up_parts(call, one.splits, capability)) for one in case[7] if one.splits > 1]
    for name, signature, constants, warps in made:
        yield "halfbyte.kernels.cuda.step_code", name, (signature, constants, options_of(warps=warps))
    if capability != 90:
        return
    for case, dtype in itertools.product(GLUON, attend_gluon.DTYPES):
        call = attended(case, dtype, "cpu").call()
        for one in case[7]:
            signature, constants, warps = attend_gluon.parts(call, one, False)
            options = options_of(warps=warps, maxnreg=one.registers)
            yield "halfbyte.kernels.cuda.attend_gluon_code", "attend", (signature, constants, options)
            if one.splits > 1:
                signature, constants, warps = step.add_up_parts(call, one.splits, capability)
                yield "halfbyte.kernels.cuda.step_code", "add_up", (signature, constants, options_of(warps=warps))


def fresh(args: AttendArgs) -> AttendArgs:
    """With copies of what is written."""
    return replace(args, keys=args.keys.clone(), values=args.values.clone(), out=torch.full_like(args.out, 7.0))


def _bits(a: Any) -> Any:
    return a.view(torch.int32 if a.dtype == torch.float32 else torch.int16)


if __name__ == "__main__":
    print(*[len(list(globals()[check]("cpu"))) for check in sys.argv[1:]])
