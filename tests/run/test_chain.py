"""A decoder layer between two attentions in one call: the composed kernel, and the one for Hopper."""

import random
import re
from dataclasses import replace

import pytest
import torch

import halfbyte as hb
from cuda_code import Program, count
from gpu_codecs import needs_gpu, needs_triton
from halfbyte.errors import NoKernelError, UsageError
from halfbyte.kernels import ChainArgs, select
from halfbyte.kernels import chain as composed
from halfbyte.kernels.base import Call
from halfbyte.kernels.chain import ChainCall
from halfbyte.kernels.cuda import chain_gluon
from halfbyte.kernels.cuda.chain_gluon import Chain
from halfbyte.kernels.cuda.shared import alone
from halfbyte.layouts import Fragments, Rows
from halfbyte.step_ops import add_norm, chain, gate
from halfbyte.weight import Weight

ACTIVATIONS = {"silu": torch.nn.functional.silu, "relu2": lambda g: g.clamp(min=0) ** 2}
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class Layer:
    """The arguments of a call: A, H, I and N values, M tokens."""

    def __init__(self, shape, m, dtype=torch.float32, layout=None, last=False, biases=False, per_row=True, seed=0):
        a, h, i, n = shape
        generator = torch.Generator().manual_seed(seed)
        device = "cuda" if isinstance(layout, Fragments) else "cpu"

        def values(*size):
            return torch.randn(*size, generator=generator).to(dtype).to(device)

        def weight(n, k):
            codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
            scales = torch.randint(40, 60, (n, k // 16), dtype=torch.uint8, generator=generator)
            scale2 = (torch.rand(n if per_row else 1, 1, generator=generator) + 0.5) / (k**0.5 * 4)
            return Weight(codes=codes.to(device), scales=scales.to(device), scale2=scale2.to(device), k=k)

        self.plain = [weight(*shape) for shape in [(h, a), (2 * i, h), (h, i), (n, h)][: 3 if last else 4]]
        self.weights = [hb.pack(w, layout or Rows()) for w in self.plain]
        self.biases = [values(w.shape[0]) if biases else None for w in self.plain]
        self.norms = [values(h) for _ in self.plain[2:]]
        self.residual, self.attended = values(m, h), values(m, a)

    def run(self, activation="silu", rows=slice(None)):
        o, gate_up, down, *qkv = self.weights
        names = ("o_bias", "gate_up_bias", "down_bias", "qkv_bias")
        biases = dict(zip(names, self.biases, strict=False))
        behind = {"norm2": self.norms[1], "qkv_next": qkv[0], "eps2": 1e-3} if qkv else {}
        given = self.residual[rows], self.attended[rows]
        return chain(
            *given, o, self.norms[0], 1e-5, gate_up, down, activation=activation, **behind, **biases
        )  # fmt: skip

    def exact(self, activation="silu"):
        """In float64, with no rounding but those that are stated."""
        dtype = self.residual.dtype

        def rounded(x):
            return x.to(dtype).double()

        def product(x, i):
            y = x @ self.plain[i].dequantize().double().T
            return rounded(y if self.biases[i] is None else y + self.biases[i].double())

        def norm(x, i):
            factor = (x.square().mean(-1, keepdim=True) + (1e-3 if i else 1e-5)).rsqrt()
            return rounded(rounded(x * factor) * self.norms[i].double())

        s1 = rounded(self.residual.double() + product(self.attended.double(), 0))
        g, up = product(norm(s1, 0), 1).chunk(2, -1)
        s2 = rounded(s1 + product(rounded(ACTIVATIONS[activation](g) * up), 2))
        return s2, product(norm(s2, 1), 3) if len(self.norms) > 1 else None

    def check(self, activation="silu"):
        got = self.run(activation)
        for y, expected in zip(got, self.exact(activation), strict=True):
            if expected is None:
                assert y is None
                continue
            off = (y.double() - expected).norm() / expected.norm()
            assert off <= ULP[self.residual.dtype], off
        return got


@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_composed(dtype, last):
    Layer((128, 64, 96, 80), 3, dtype, last=last, biases=True).check()
    Layer((128, 64, 96, 80), 1, dtype, last=last, per_row=False).check("relu2")


def test_it_is_the_ops_one_after_the_other():
    layer = Layer((128, 64, 96, 80), 2, torch.bfloat16)
    o, gate_up, down, qkv = layer.weights
    normed, s1 = add_norm(hb.linear(layer.attended, o), layer.residual, layer.norms[0], 1e-5)
    y = hb.linear(gate(hb.linear(normed, gate_up), "silu"), down)
    normed, s2 = add_norm(y, s1, layer.norms[1], 1e-3)
    for _ in range(2):
        total, behind = layer.run()
        assert torch.equal(total, s2)
        assert torch.equal(behind, hb.linear(normed, qkv))


def test_weights_that_changed_are_read_anew():
    layer, other = (Layer((128, 64, 96, 80), 1, torch.bfloat16, seed=seed) for seed in (0, 1))
    layer.run()
    for mine, theirs in zip(layer.weights, other.weights, strict=True):
        for name, buffer in mine.buffers().items():
            buffer.copy_(theirs.buffers()[name])
    layer.plain = other.plain
    layer.check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.weights.__setitem__(0, v.weights[3]), "o does not fit chain: got (80, 64), expected (64, 128)"),
        (lambda v: v.weights.__setitem__(1, v.weights[0]), "gate_up does not fit chain"),
        (lambda v: setattr(v, "attended", v.attended.half()), "attended does not fit chain: got float16"),
        (lambda v: v.norms.__setitem__(1, v.norms[1][1:]), "norm 1 does not fit chain: got (63,), expected (64,)"),
        (lambda v: v.biases.__setitem__(3, v.norms[0]), "the bias of qkv does not fit it: got (64,), expected (80,)"),
        (lambda v: setattr(v, "residual", v.residual[0]), "residual has other axes"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    layer = Layer((128, 64, 96, 80), 2)
    change(layer)
    with pytest.raises(UsageError, match=re.escape(words)):
        layer.run()


def test_norm_and_weight_of_the_next_layer_come_together():
    layer = Layer((128, 64, 96, 80), 2, last=True)
    with pytest.raises(UsageError, match="norm2 and qkv_next come together"):
        chain(
            layer.residual, layer.attended, layer.weights[0], layer.norms[0], 0.0, *layer.weights[1:], layer.norms[0],
            activation="silu",
        )  # fmt: skip
    with pytest.raises(UsageError, match="unknown activation: got 'tanh'"):
        layer.run("tanh")


def call(shape=(4096, 4096, 14336, 6144), m=1, dtype="bfloat16", last=False, **changes):
    """A call on Hopper."""
    a, h, i, n = shape
    place = {"rows": m, "dtype": dtype, "device": "cuda", "library": "torch", "capability": 90} | changes
    products = tuple(
        Call(layout=Fragments(dtype), shape=s, per_row=True, pre_scale=False, out_dtype=dtype, bias=False, **place)
        for s in [(h, a), (2 * i, h), (h, i), (n, h)][: 3 if last else 4]
    )
    return ChainCall(activation="silu", products=products, **place)


@needs_triton
def test_it_is_chosen_for_few_tokens_on_hopper():
    for m in range(1, 5):
        assert select(ChainArgs, call(m=m)).name == "gluon-chain"
    for other in (call(m=5), call(capability=100), call(capability=80), call(device="cpu", capability=0)):
        assert select(ChainArgs, other).name == "chain-composed"


@needs_triton
def test_what_it_declines(monkeypatch):
    odd = call(shape=(64, 64, 104, 80))
    assert "takes multiples of 16 features, not 104 of gate_up" in chain_gluon.refuse(odd)
    wide = call(shape=(4096, 4096, 28672, 6144), m=4)
    assert chain_gluon.refuse(wide) == ("has no room in shared memory for 4 rows of 28672 values",)
    scaled = call()
    scaled = replace(scaled, products=(replace(scaled.products[0], pre_scale=True), *scaled.products[1:]))
    assert chain_gluon.refuse(scaled) == ("multiplies activations as they come, without a pre_scale",)
    monkeypatch.setenv("HALFBYTE_KERNEL", "gluon-chain")
    with pytest.raises(NoKernelError, match="takes up to 4 tokens, not 5"):
        select(ChainArgs, call(m=5))


def code_of(asked, made):
    from halfbyte.kernels.cuda.chain_gluon_code import chain as kernel

    types = chain_gluon.signature(asked, ("*fp32",) * 4)
    arguments = {name: of.removesuffix(":16") for name, of in types.items()}
    options = {"num_warps": chain_gluon.WARPS} | ({} if made.start is None else {"maxnreg": made.start})
    return Program(kernel, arguments, chain_gluon.constants(asked, made), options).compile(90)


@needs_triton
@pytest.mark.parametrize("asked", [call(), call(m=2), call((128, 64, 96, 80), 3, "float16", last=True)], ids=str)
def test_machine_code(asked):
    """No value moves between lanes while weights are multiplied, and words come 16 bytes at a time."""
    code = code_of(asked, chain_gluon.configure(asked))
    print(code)
    assert code.warnings == []
    assert code.shared <= chain_gluon.SHARED
    assert code.spills == 0
    loops = [loop for loop in code.loops if loop.matrix]
    assert loops
    assert all(loop.shuffles == 0 for loop in loops)
    assert all(loop.per_matrix <= 25 for loop in loops)
    assert count(code.opcodes, r"LDS\.128") >= 4 * 4 * len(asked.products)
    assert count(code.opcodes, "UTMALDG") >= 2 * len(asked.products)
    assert count(code.opcodes, "ACQBULK") == 5  # consumers and finisher, but not who asks for weights


# --- the schedule: what the parts of a program do to each other's barriers


class Barrier:
    def __init__(self, count):
        self.count, self.left, self.phase = count, count, 0

    def arrive(self):
        assert self.left > 0
        self.left -= 1
        if not self.left:
            self.left, self.phase = self.count, self.phase + 1

    def passed(self, parity):
        return self.phase & 1 != parity


class Schedule:
    """Programs as generators that yield what they wait for; the device code's order, with shared memory as lists."""

    def __init__(self, stripes, steps, grid, stages, ahead, slots=2):
        self.ahead = ahead
        self.stripes, self.steps, self.grid, self.stages, self.slots = stripes, steps, grid, stages, slots
        self.counters = [0] * 4
        self.results = []

    def items(self, phase, program):
        pairs = self.stripes[phase] // (2 if phase == 1 else 1)
        for t in range(program, pairs, self.grid):
            yield from ((t, t + pairs) if phase == 1 else (t,))

    def parts(self, program):
        full, empty = ([Barrier(1) for _ in range(self.stages)] for _ in range(2))
        sums_full, sums_empty = [Barrier(4) for _ in range(self.slots)], [Barrier(1) for _ in range(self.slots)]
        go, brought = Barrier(1), Barrier(4)
        ring, sums = [None] * self.stages, [[None] * 4 for _ in range(self.slots)]
        phases = range(len(self.stripes))
        arriving = []

        def arrive():
            for _ in range(sum(self.steps[p] * len(list(self.items(p, program))) for p in phases)):
                yield lambda: bool(arriving)
                arriving.pop(0).arrive()

        def produce():
            done = 0
            for phase in phases:
                for stripe in self.items(phase, program):
                    for step in range(self.steps[phase]):
                        slot = done % self.stages
                        if self.ahead <= done and self.ahead < self.stages:
                            at = done - self.ahead
                            yield lambda at=at: full[at % self.stages].passed(at // self.stages & 1)
                        yield lambda slot=slot, done=done: empty[slot].passed(done // self.stages & 1 ^ 1)
                        assert ring[slot] is None
                        ring[slot] = phase, stripe, step
                        arriving.append(full[slot])
                        done += 1

        def consume(which):
            done = made = 0
            for phase in phases:
                if phase:
                    yield lambda phase=phase: go.passed(phase - 1 & 1)
                yield lambda: True
                brought.arrive()
                yield lambda phase=phase: brought.passed(phase & 1)
                for stripe in self.items(phase, program):
                    mine = which - done & 3
                    found = []
                    for step in range(mine, self.steps[phase], 4):
                        at = done + step
                        yield lambda at=at: full[at % self.stages].passed(at // self.stages & 1)
                        found.append(ring[at % self.stages])
                        ring[at % self.stages] = None
                        empty[at % self.stages].arrive()
                    done += self.steps[phase]
                    slot = made % self.slots
                    yield lambda slot=slot, made=made: sums_empty[slot].passed(made // self.slots & 1 ^ 1)
                    assert sums[slot][mine] is None
                    sums[slot][mine] = (phase, stripe, found)
                    sums_full[slot].arrive()
                    made += 1

        def finish():
            done = 0
            for phase in phases:
                for stripe in self.items(phase, program):
                    slot = done % self.slots
                    yield lambda slot=slot, done=done: sums_full[slot].passed(done // self.slots & 1)
                    expected = [
                        (phase, stripe, [(phase, stripe, s) for s in range(c, self.steps[phase], 4)]) for c in range(4)
                    ]
                    assert sums[slot] == expected
                    sums[slot] = [None] * 4
                    sums_empty[slot].arrive()
                    self.results.append((phase, stripe))
                    done += 1
                if phase < len(phases) - 1:
                    self.counters[phase] += 1
                    yield lambda phase=phase: self.counters[phase] >= self.grid
                    before = {(p, s) for p in range(phase + 1) for s in range(self.stripes[p])}
                    assert before <= set(self.results)
                    yield lambda phase=phase: brought.passed(phase & 1)
                    go.arrive()
            self.counters[3] += 1
            if self.counters[3] == self.grid:
                self.counters[:] = [0] * 4

        return [produce(), arrive(), *(consume(which) for which in range(4)), finish()]

    def run(self, seed):
        rng = random.Random(seed)
        waiting = [[part, lambda: True] for program in range(self.grid) for part in self.parts(program)]
        while waiting:
            ready = [one for one in waiting if one[1]()]
            assert ready, "all wait for each other"
            one = rng.choice(ready)
            try:
                one[1] = next(one[0])
            except StopIteration:
                waiting.remove(one)


@pytest.mark.parametrize(
    ("stripes", "steps", "grid", "stages", "ahead"),
    [
        ((8, 28, 8, 12), (4, 4, 14, 4), 3, 20, 6),
        ((4, 12, 4), (2, 1, 3), 5, 4, 4),
        ((3, 4, 3, 5), (1, 5, 2, 1), 2, 8, 3),
        ((1, 2, 1, 1), (6, 1, 1, 1), 4, 12, 1),
    ],
)
def test_no_part_of_a_program_overtakes_another(stripes, steps, grid, stages, ahead):
    for seed in range(6):
        schedule = Schedule(stripes, steps, grid, stages, ahead)
        schedule.run(seed)
        assert sorted(schedule.results) == [(phase, s) for phase, n in enumerate(stripes) for s in range(n)]
        assert schedule.counters == [0] * 4


# --- on a GPU

SHAPES = ((128, 64, 96, 80), (1024, 576, 1536, 960), (4096, 4096, 14336, 6144))


@needs_triton
@needs_gpu
@pytest.mark.gpu
class TestOnGpu:
    @pytest.fixture(autouse=True)
    def forced(self, monkeypatch):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("for Hopper")
        monkeypatch.setenv("HALFBYTE_KERNEL", "gluon-chain")

    @pytest.mark.parametrize("m", [1, 2, 3, 4])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_results(self, shape, m):
        for seed, (dtype, name) in enumerate([(torch.bfloat16, "bfloat16"), (torch.float16, "float16")]):
            layer = Layer(shape, m, dtype, Fragments(name), last=m == 4, biases=m < 4, per_row=m != 2, seed=seed)
            first = layer.check()
            for _ in range(3):
                assert all(a is None or torch.equal(a, b) for a, b in zip(first, layer.run(), strict=True))

    def test_activations(self):
        Layer(SHAPES[1], 3, torch.bfloat16, Fragments()).check("relu2")

    def test_a_row_does_not_depend_on_the_others(self):
        layer = Layer(SHAPES[1], 4, torch.bfloat16, Fragments())
        whole = layer.run()
        for rows in (slice(0, 2), slice(1, 4), slice(3, 4)):
            for a, b in zip(whole, layer.run(rows=rows), strict=True):
                assert torch.equal(a[rows], b)

    def test_the_same_bits_every_time_and_zero_counters(self):
        layers = [Layer(SHAPES[1], 1, torch.bfloat16, Fragments(), seed=seed) for seed in range(2)]
        first = [layer.run() for layer in layers]
        for _ in range(200):
            for layer, expected in zip(layers, first, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(layer.run(), expected, strict=True))
        counts = chain_gluon.counters(layers[0].residual.device, chain_gluon.COUNTERS)
        assert counts[: chain_gluon.COUNTERS].eq(0).all()

    def test_in_a_graph(self):
        layer = Layer(SHAPES[1], 4, torch.bfloat16, Fragments())
        for _ in range(3):
            expected = layer.run()
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = [layer.run() for _ in range(3)]
        for _ in range(3):
            for results in again:
                for result in results:
                    result.fill_(torch.nan)
            with alone(layer.residual.device):
                graph.replay()
            assert all(torch.equal(a, b) for results in again for a, b in zip(results, expected, strict=True))

    def test_launches_on_two_streams(self):
        layers = [Layer(SHAPES[1], 2, torch.bfloat16, Fragments(), seed=seed) for seed in range(2)]
        expected = [layer.run() for layer in layers]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in layers]
        found = []
        for _ in range(20):
            for layer, stream in zip(layers, streams, strict=True):
                with torch.cuda.stream(stream):
                    found.append(layer.run())
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for i, got in enumerate(found) for a, b in zip(got, expected[i % 2], strict=True))

    def test_it_agrees_with_the_composed_one(self):
        layer = Layer(SHAPES[0], 1, torch.bfloat16, Fragments())
        assert composed.TORCH.name == "chain-composed"
        layer.check()
        assert Chain() == chain_gluon.configure(call())
