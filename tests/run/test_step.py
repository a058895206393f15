"""What a decoder does between products, against float64: whatever kernel computes it."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gpu_step
from cuda_code import ARCHITECTURES, Program, compile_all
from gluon_cases import hopper
from gpu_codecs import needs_gpu, needs_triton
from halfbyte.errors import NoKernelError, UsageError
from halfbyte.kernels import KERNELS, AddNormArgs, AttendArgs, GateArgs, select
from halfbyte.kernels.base import capability
from halfbyte.kernels.cuda import attend_gluon, step
from halfbyte.kernels.cuda.step import Attend
from halfbyte.kernels.step import AddNormCall, AttendCall, GateCall
from halfbyte.step_ops import add_norm, attend, gate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative to a number, of its rounding."""


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def exact_norm(total, weight, eps):
    wide = total.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


# --- add_norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "h"), [(1, 16), (3, 576), (16, 4096), (2, 1)])
def test_add_norm(m, h, dtype):
    x, residual, weight = (random(*shape, dtype=dtype, seed=s) for s, shape in enumerate([(m, h), (m, h), (h,)]))
    normed, total = add_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    expected = exact_norm(total, weight, 1e-5)
    assert ((normed.double() - expected).abs() <= 2.02 * HALF_ULP[dtype] * expected.abs() + 3e-6).all()


def test_add_norm_rounds_twice():
    """As transformers: the quotient is rounded to the dtype before the weight multiplies it."""
    x, weight = random(4, 256, dtype=torch.bfloat16), random(256, dtype=torch.bfloat16)
    quotient = (x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16()
    normed, total = add_norm(x, None, weight, 1e-6)
    assert torch.equal(normed, quotient * weight)
    assert total is x


# --- gate


ACTIVATIONS = {
    "silu": lambda g: g / (1 + torch.exp(-g)),
    "gelu": lambda g: g * 0.5 * (1 + torch.erf(g / 2**0.5)),
    "gelu_tanh": lambda g: g * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))),
    "relu2": lambda g: g.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(activation, dtype):
    both = random(3, 2 * 200, dtype=dtype) * 3
    y = gate(both, activation)
    g, up = both.double().chunk(2, -1)
    expected = ACTIVATIONS[activation](g) * up
    assert ((y.double() - expected).abs() <= 1.01 * HALF_ULP[dtype] * expected.abs() + 1e-5).all()


# --- attend


def rotated(x, cos, sin):
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin


class Case:
    """One step of B sequences, at positions."""

    def __init__(self, heads, kv, dim, positions, room, dtype=torch.float32, norms=False, window=None, scale=None):
        b = len(positions)
        self.heads, self.kv, self.dim, self.window = heads, kv, dim, window
        self.qkv = random(b, (heads + 2 * kv) * dim, dtype=dtype)
        angles = random(room + 3, dim // 2, seed=1) * 3
        self.cos, self.sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        self.positions = torch.tensor(positions)
        self.keys, self.values = (random(b, kv, room, dim, dtype=dtype, seed=s) for s in (2, 3))
        self.q_norm, self.k_norm = (random(dim, dtype=dtype, seed=s) + 1 if norms else None for s in (4, 5))
        self.scale = dim**-0.5 if scale is None else scale

    def run(self):
        keys, values = self.keys.clone(), self.values.clone()
        y = attend(
            self.qkv, self.cos, self.sin, self.positions, keys, values, scale=self.scale, window=self.window,
            q_norm=self.q_norm, k_norm=self.k_norm, eps=1e-6,
        )  # fmt: skip
        return y, keys, values

    def check(self):
        """Against float64, from the k and v that were written."""
        y, keys, values = self.run()
        dtype = self.qkv.dtype
        half = HALF_ULP[dtype]
        heads = self.qkv.view(len(y), -1, self.dim)
        q, k, v = heads.split((self.heads, self.kv, self.kv), 1)
        for i, p in enumerate(self.positions.tolist()):
            turned = []
            for x, norm in ((q[i], self.q_norm), (k[i], self.k_norm)):
                x = x.double() if norm is None else exact_norm(x, norm, 1e-6)
                size = x.abs() + torch.cat(x.abs().chunk(2, -1)[::-1], -1)
                turned.append((rotated(x, self.cos[p].double(), self.sin[p].double()), size))
            (query, q_size), (key, k_size) = turned
            off = (1 + (0 if self.q_norm is None else 2)) * 1.05 * half
            assert ((keys[i, :, p].double() - key).abs() <= off * k_size + 1e-6).all()
            assert torch.equal(values[i, :, p], v[i])
            first = 0 if self.window is None else max(0, p - self.window + 1)
            seen, sums = (
                c[i, :, first : p + 1].double().repeat_interleave(self.heads // self.kv, 0) for c in (keys, values)
            )
            scores = torch.einsum("hd,hnd->hn", query, seen) * self.scale
            wrong = (torch.einsum("hd,hnd->hn", off * q_size, seen.abs()) * abs(self.scale)).amax(-1)
            weights = scores.softmax(-1)
            expected = torch.einsum("hn,hnd->hd", weights, sums)
            size = torch.einsum("hn,hnd->hd", weights, sums.abs())
            bound = (2.1 * wrong[:, None] + 3 * half) * size + half * expected.abs() + 3e-6
            assert ((y[i].view(self.heads, self.dim).double() - expected).abs() <= bound).all()
        untouched = torch.ones(keys.shape[:1] + keys.shape[2:3], dtype=torch.bool)
        untouched[torch.arange(len(y)), self.positions] = False
        for new, old in ((keys, self.keys), (values, self.values)):
            assert torch.equal(new.transpose(1, 2)[untouched], old.transpose(1, 2)[untouched])


SHAPES = [(4, 1, 64), (8, 8, 80), (9, 3, 96), (16, 1, 128), (4, 2, 256)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv", "dim"), SHAPES)
def test_attend(heads, kv, dim, dtype):
    Case(heads, kv, dim, [0, 17, 63], 64, dtype).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 20, 100])
def test_attend_with_norms_and_windows(dtype, window):
    Case(4, 2, 64, [50, 3], 64, dtype, norms=True, window=window, scale=0.2).check()


def test_an_entry_beyond_is_never_read():
    case = Case(4, 2, 64, [20, 3], 64)
    y, keys, values = case.run()
    for cache in (case.keys, case.values):
        cache[0, :, 20:] = torch.nan
        cache[1, :, 3:] = torch.nan
    again, keys, values = case.run()
    assert torch.equal(y, again)
    assert keys[0, :, :21].isfinite().all()
    assert values[1, :, :4].isfinite().all()


# --- refusals


def test_positions_outside_of_the_cache_are_refused_on_the_cpu():
    with pytest.raises(UsageError, match=re.escape("positions are outside of the cache: got [3, 64], expected 0..63")):
        Case(4, 2, 64, [3, 3], 64).__class__(4, 2, 64, [3, 64], 64).run()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gate(random(2, 7), "silu"), "gate_up has no two halves: got (2, 7)"),
        (lambda: gate(random(2, 8), "tanh"), "unknown activation: got 'tanh', expected silu or gelu"),
        (lambda: gate(random(2, 8).double(), "silu"), "gate takes floats: got float64"),
        (lambda: add_norm(random(2, 8), None, random(7), 0.0), "weight does not fit add_norm: got (7,), expected (8,)"),
        (
            lambda: add_norm(random(2, 8), random(2, 8).half(), random(8), 0.0),
            "residual does not fit add_norm: got float16, expected float32",
        ),
        (lambda: add_norm(random(8), None, random(8), 0.0), "x has other axes: got (8,), expected 2 of them"),
        (lambda: Case(4, 3, 64, [1], 8).run(), "the cache does not fit qkv"),
        (lambda: Case(4, 2, 64, [1], 8, window=0).run(), "a window has entries: got 0"),
    ],
    ids=range(8),
)
def test_refusals(call, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        call()


def test_the_kernel_is_chosen_anew_where_the_environment_changes(monkeypatch):
    both = random(2, 8)
    gate(both, "silu")
    monkeypatch.setenv("HALFBYTE_KERNEL", "gate-none")
    with pytest.raises(NoKernelError, match="names no kernel for gate"):
        gate(both, "silu")
    monkeypatch.setenv("HALFBYTE_KERNEL", "gate-torch")
    np.testing.assert_array_equal(gate(both, "relu2"), both[:, :4].clamp(min=0) ** 2 * both[:, 4:])


# --- on a GPU: what is chosen and launched


def call(kind, **changes):
    """A call on Hopper that Triton takes, with changes."""
    own = {
        AddNormCall: {"width": 4096, "residual": True},
        GateCall: {"width": 14336, "activation": "silu"},
        AttendCall: {
            "heads": 32, "kv_heads": 8, "dim": 128, "room": 1024, "q_norm": False, "k_norm": False, "window": None,
        },
    }[kind]  # fmt: skip
    place = {"rows": 1, "dtype": "bfloat16", "device": "cuda", "library": "torch", "capability": 90}
    return kind(**(own | place | changes))


BUNDLES = {AddNormCall: AddNormArgs, GateCall: GateArgs, AttendCall: AttendArgs}


@needs_triton
@pytest.mark.parametrize("kind", BUNDLES)
def test_triton_is_chosen_on_a_gpu_and_compiled_code_on_a_cpu(kind):
    name = BUNDLES[kind].op.replace("_", "-")
    assert select(BUNDLES[kind], call(kind)).name == ("gluon-attend" if kind is AttendCall else f"triton-{name}")
    assert select(BUNDLES[kind], call(kind, capability=80)).name == f"triton-{name}"
    assert select(BUNDLES[kind], call(kind, device="cpu", capability=0)).name == f"{name}-cpu"
    assert select(BUNDLES[kind], call(kind, capability=75)).name == f"{name}-torch"
    with pytest.raises(NoKernelError, match=f"no kernel computes {BUNDLES[kind].op} of 1 rows, bfloat16, numpy on cpu"):
        select(BUNDLES[kind], call(kind, library="numpy", device="cpu", capability=0))


@needs_triton
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (call(AddNormCall, width=16385), "takes rows of up to 16384 values, not 16385"),
        (call(AttendCall, dim=264), "takes heads of multiples of 8 up to 256 values, not 264"),
        (call(AttendCall, dim=84), "takes heads of multiples of 8 up to 256 values, not 84"),
        (call(GateCall, dtype="float64"), "takes float32 or bfloat16 or float16, not float64"),
    ],
    ids=range(4),
)
def test_what_triton_declines(changed, words):
    (kernel,) = (k for k in KERNELS if k.op == changed.op and k.name.startswith("triton-"))
    assert kernel.refuse(changed) == (words,)


@needs_triton
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"capability": 100}, "is for sm_90, not sm_100"),
        ({"dtype": "float32"}, "takes bfloat16 or float16, not float32"),
        ({"dim": 80}, "takes heads of 64 or 128 values, not 80"),
        ({"heads": 72}, "takes up to 8 query heads for a key head, not 9"),
    ],
    ids=range(4),
)
def test_what_gluon_declines(changes, words):
    assert attend_gluon.refuse(call(AttendCall, **changes)) == (words,)
    assert select(AttendArgs, call(AttendCall, **changes)).name == "triton-attend"


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({}, 32),
        ({"rows": 16}, 4),
        ({"rows": 64}, 1),
        ({"room": 100}, 4),
        ({"room": 5}, 1),
        ({"rows": 16, "kv_heads": 2}, 4),
        ({"heads": 16, "kv_heads": 1, "dim": 256, "rows": 4}, 32),
    ],
)
def test_splits_fill_a_gpu_but_have_entries_and_are_soon_added_up(changes, splits):
    assert step.configure(call(AttendCall, **changes)).splits == splits


@pytest.mark.parametrize(
    ("changes", "splits", "warps"),
    [
        ({}, 8, 8),
        ({"rows": 2}, 4, 8),
        ({"rows": 4}, 2, 8),
        ({"rows": 5}, 3, 8),
        ({"rows": 8}, 2, 8),
        ({"rows": 16}, 1, 8),
        ({"rows": 17}, 1, 4),
        ({"rows": 64}, 1, 4),
        ({"room": 64}, 1, 8),
        ({"room": 300}, 3, 8),
        ({"room": 4096}, 8, 8),
        ({"room": 4097}, 33, 4),
        ({"room": 8192}, 32, 4),
        ({"rows": 2, "kv_heads": 2}, 8, 8),
    ],
)
def test_splits_of_gluon(changes, splits, warps):
    made = attend_gluon.configure(call(AttendCall, **changes))
    assert (made.splits, made.warps) == (splits, warps)
    assert made.registers == (168 if changes.get("rows", 1) in (5, 8, 16) else None)


@needs_triton
@pytest.mark.parametrize(
    ("ops", "counts"), [(("add_norms", "gates", "orders"), "18 36 15"), (("attends", "finds"), "18 18")]
)
def test_every_op_in_the_interpreter(ops, counts):
    tests = Path(__file__).parent.parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "gpu_step", *ops],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tests,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, counts), done.stderr[-3000:]


def code_of(name, made, capability):
    from halfbyte.kernels.cuda import attend_gluon_code, step_code

    signature, constants, warps = made
    arguments = {name: of.removesuffix(":16") for name, of in signature.items()}
    aligned = tuple(n for n, of in signature.items() if of.endswith(":16") and not of.startswith("*"))
    kernel = attend_gluon_code.attend if name == "gluon" else getattr(step_code, name)
    program = Program(kernel, arguments, constants, {"num_warps": warps}, aligned)
    code = program.compile(capability)
    print(name, capability, code)
    assert (code.stack, code.spills, code.warnings) == (0, 0, [])
    waits = [op for _, _, op, _ in code.instructions if op.startswith(("ACQBULK", "PREEXIT"))]
    assert sorted(waits) == (["ACQBULK", "PREEXIT"] if capability >= 90 else [])
    return code


@needs_triton
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_machine_code(capability):
    """Nothing is spilled, rows, keys and values are loaded 16 bytes at a time, and a program takes little room."""
    code = code_of("add_norm", step.add_norm_parts("bfloat16", 4096, True, capability), capability)
    assert code.opcodes["LDG.E.128"] == 3
    assert code.registers <= 48
    code = code_of("add_norm", step.add_norm_parts("bfloat16", 4096, True, capability, in_order=True), capability)
    assert code.opcodes["STG.E.128"] == 2
    code_of("add_norm", step.add_norm_parts("float32", 16384, True, capability), capability)
    code = code_of("gate", step.gate_parts("bfloat16", 14336, "silu", capability), capability)
    assert code.opcodes["LDG.E.128"] == 2
    assert code.registers <= 40
    odd = {"heads": 32, "kv_heads": 2, "dim": 80, "q_norm": True, "k_norm": True}
    for changes in ({"rows": 16}, odd) if capability in (80, 120) else (odd,):
        asked = call(AttendCall, **changes, capability=capability)
        made = step.configure(asked)
        code = code_of("attend", step.attend_parts(asked, made, capability), capability)
        assert code.registers <= 248
        assert code.opcodes["LDG.E.128"] >= 4 * made.entries
        assert code.shared <= 4096
        code_of("add_up", step.add_up_parts(asked, made.splits, capability), capability)


@needs_triton
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(32, 128), (64, 128), (24, 64)])
@pytest.mark.parametrize("dtype", attend_gluon.DTYPES)
@pytest.mark.parametrize("rows", [1, 64])
def test_machine_code_of_gluon(dtype, heads, dim, norms, rows):
    """Warps wait for each other once, after the loop; there are few instructions for each product, and room for all."""
    asked = call(AttendCall, heads=heads, dim=dim, dtype=dtype, q_norm=norms, k_norm=norms, rows=rows)
    made = attend_gluon.configure(asked)
    code = code_of("gluon", attend_gluon.parts(asked, made, True), 90)
    (loop,) = code.loops
    ops = [op for _, _, op, _ in code.instructions]
    places = {name: [i for i, op in enumerate(ops) if op.startswith(name)] for name in ("BAR", "HMMA", "STS", "LDS")}
    assert len(places["BAR"]) == 1
    assert places["HMMA"][-1] < places["STS"][0] < places["STS"][-1] < places["BAR"][0] < places["LDS"][0]
    assert code.shared <= made.warps * (8 * dim + 16) * 4 + 512
    held = 132 * (65536 // (32 * made.warps * -(-code.registers // 8) * 8))
    assert held >= {4: attend_gluon.AT_ONCE, 8: 2 * attend_gluon.FEW}[made.warps]
    assert loop.matrix == 3 * dim // 16
    assert loop.per_matrix <= (14 if dim == 128 else 18)
    before = ops[: ops.index("ACQBULK")]
    assert before.count("LDG.E.128") == dim // 4


@pytest.fixture(scope="module")
def compiled():
    """Every kernel of the tests below, compiled side by side."""
    sm = capability(torch.cuda.current_device())
    compile_all(list(gpu_step.jobs(sm)), sm)


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
class TestOnGpu:
    @pytest.mark.parametrize("dtype", gpu_step.DTYPES)
    @pytest.mark.parametrize(("name", "count"), [("add_norms", 6), ("gates", 12), ("attends", 6), ("finds", 6)])
    def test_results(self, name, count, dtype):
        assert len(list(getattr(gpu_step, name)("cuda", (dtype,)))) == count

    @pytest.mark.skipif(not hopper, reason="torch sees no Hopper GPU")
    @pytest.mark.parametrize("dtype", attend_gluon.DTYPES)
    def test_results_of_gluon(self, dtype):
        assert len(list(gpu_step.gluon_attends("cuda", (dtype,)))) == 7
        assert len(list(gpu_step.gluon_finds("cuda", (dtype,)))) == 7

    @pytest.mark.parametrize("bind", [step.bind_attend, attend_gluon.bind])
    def test_a_row_does_not_depend_on_the_others(self, bind):
        if bind is attend_gluon.bind and not hopper:
            pytest.skip("torch sees no Hopper GPU")
        args = gpu_step.attended((8, 2, 64, (0, 17, 63), 64, None, False, ()), "bfloat16", "cuda")
        made = Attend(4) if bind is step.bind_attend else attend_gluon.Attend(4, 1)
        whole = gpu_step.fresh(args)
        bind(whole, made)(*whole.arrays())
        for i in range(3):
            own = {n: getattr(args, n)[i : i + 1].clone() for n in ("qkv", "positions", "keys", "values", "out")}
            one = replace(args, **own)
            bind(one, made)(*one.arrays())
            assert torch.equal(one.out[0], whole.out[i])

    def test_steps_in_a_graph_are_those_outside_of_one(self):
        """Chains in which each launch starts before the one ahead of it has ended, at positions that grow."""
        heads, kv, dim, room = 8, 2, 64, 128
        width = heads * dim
        of = {"dtype": "bfloat16", "device": "cuda"}
        weight = gpu_step.random(width, **of)
        angles = gpu_step.random(room, dim // 2, device="cuda").repeat(1, 2)
        x = gpu_step.random(3, width, **of)
        mixed = torch.eye(width, dtype=torch.bfloat16, device="cuda").repeat(1, 2)[:, : width + 2 * kv * dim]

        def state():
            zeros = torch.zeros(3, kv, room, dim, dtype=torch.bfloat16, device="cuda")
            return x.clone(), torch.tensor([0, 5, 100], device="cuda"), zeros, zeros.clone()

        def run(x, positions, keys, values):
            stream = None
            for _ in range(4):
                normed, stream = add_norm(x, stream, weight, 1e-5)
                y = attend(normed @ mixed, angles.cos(), angles.sin(), positions, keys, values, scale=dim**-0.5)
                normed, stream = add_norm(y, stream, weight, 1e-5)
                x = gate(torch.cat((normed, y), 1), "silu")
                positions += 1
            return x

        eager = state()
        expected = [run(*eager).clone() for _ in range(2)]
        captured = state()
        with torch.no_grad():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(*captured)
            for a, b in zip(captured, state(), strict=True):
                a.copy_(b)
            for want in expected:
                graph.replay()
                assert torch.equal(out, want)
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))
