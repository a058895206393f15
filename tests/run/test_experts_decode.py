"""The decode kernel for experts: what it declines, its launches and machine code, and, on a GPU, its configurations."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_code import Program, compile_all, count
from expert_cases import Case, assert_meant, routing, tokens
from gluon_cases import DTYPES, check_an_untested_triton, guarded, on_gpu, replace_buffers
from gpu_codecs import needs_triton
from halfbyte.kernels import ExpertsArgs, ExpertsCall
from halfbyte.kernels.cuda import experts as layers
from halfbyte.kernels.cuda import experts_decode, launch
from halfbyte.kernels.cuda.experts_decode import COLUMNS, GLUON, ExpertsDecode, Held, Product, depth, expected_blocks
from halfbyte.kernels.cuda.lists import most_blocks
from halfbyte.kernels.experts import Mixture
from halfbyte.layouts import Fragments, Rows
from halfbyte.nn.base import without_data
from halfbyte.ops import pack


def accepted(
    experts=128, hidden=2048, inner=768, rows=1, local=None, top=8, layout=None, per_row=False, changes=(), **how
):
    """A call on Hopper, with changes of the call, and otherwise of how experts compute."""
    of = {
        "activation": "silu", "limit": None, "gate_up_order": "concatenated", "experts": experts,
        "local": tuple(range(experts) if local is None else local), "padding": False,
    }  # fmt: skip
    mixture = Mixture(**of | how)
    made = {"per_row": per_row, "input_scale": False, "pre_scale": False, "device": "meta"}
    count_, layout = len(mixture.local), layout or Fragments()
    one = without_data(layout, (count_, mixture.parts * inner, hidden), **made)
    two = without_data(layout, (count_, hidden, inner), **made)
    on = {"rows": rows, "top": top, "dtype": "bfloat16", "device": "cuda", "capability": 90}
    return ExpertsCall.of(one, two, mixture, **on | dict(changes))


@needs_triton
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"changes": {"device": "cpu", "capability": 0}}, "runs on NVIDIA GPUs, not on cpu"),
        ({"changes": {"capability": 100}}, "is for sm_90, not sm_100"),
        ({"layout": Rows()}, "reads the layout fragments(dtype=bfloat16), not rows"),
        ({"changes": {"dtype": "float16"}}, "reads the layout fragments(dtype=float16), not fragments(dtype=bfloat16)"),
        ({"changes": {"dtype": "float32"}}, "takes bfloat16 or float16 activations, not float32"),
        ({"hidden": 40}, "takes hidden sizes that are multiples of 16, not 40"),
        ({"inner": 24}, "takes intermediate sizes that are multiples of 16, not 24"),
        ({"gate_up_order": "interleaved"}, "takes all rows of the gate before those of up, or behind them"),
        ({"changes": {"precision": "fp8"}}, "computes exactly, not in fp8"),
        ({"top": 33}, "takes up to 32 experts of a token, not 33"),
        ({"rows": 128}, "takes up to 5 slots an expert on average, not 8.0: others are faster there"),
    ],
)
def test_refusals(how, reason):
    assert GLUON.refuse(accepted()) == ()
    assert any(given.startswith(reason) for given in GLUON.refuse(accepted(**how)))


@needs_triton
def test_an_untested_triton_is_refused_by_name(monkeypatch):
    check_an_untested_triton(monkeypatch, GLUON.refuse, accepted())


def test_how_many_slots_an_expert_has():
    assert layers.slots_each(accepted(rows=1)) == 1
    assert layers.slots_each(accepted(rows=64)) == pytest.approx(512 / (128 * (1 - (15 / 16) ** 64)))
    of = {"experts": 256, "local": range(32), "null": "skip"}
    assert layers.slots_each(accepted(rows=256, **of)) == pytest.approx(8, rel=1e-3)


def test_loads_of_a_loop_have_no_mask_and_none_is_read_beyond_the_last_unit():
    for units, warps, ahead, tiles in itertools.product(range(1, 130), (1, 2, 4, 8, 16), (1, 2, 3, 8), (1, 2, 4)):
        made = Product(warps=warps, ahead=ahead, unroll=16)
        asked, loops = depth(64 * units, tiles, made)
        steps = -(-units // warps)
        assert 1 <= asked <= steps
        if loops:
            assert steps * tiles > made.unroll
            assert (loops + 1) * asked * warps <= units
        else:
            assert steps * tiles <= made.unroll or (2 * asked) * warps > units


def test_blocks_that_are_launched():
    """All of them where all experts are here; else what an even routing takes, and some."""
    for tokens_, (experts, local) in itertools.product((2, 16, 64), ((128, 128), (256, 32), (8, 8))):
        call = accepted(experts=experts, local=range(local), rows=tokens_, null="skip", hidden=64, inner=16)
        blocks, most = expected_blocks(call), most_blocks(8 * tokens_, local, COLUMNS)
        assert 1 <= blocks <= most
        assert blocks == most or (local < experts and blocks > 8 * tokens_ * local / experts / COLUMNS)
    assert expected_blocks(accepted()) == 8
    assert expected_blocks(accepted(experts=256, local=range(32), null="skip")) == 2
    assert expected_blocks(accepted(experts=256, local=range(32), null="refuse")) == 8


@pytest.mark.parametrize(
    ("how", "held"),
    [
        ({}, True),  # 3 times 36 KiB of gate and up and 54 KiB of down on a multiprocessor
        ({"inner": 784}, True),
        ({"inner": 800}, False),
        ({"top": 6}, False),
        ({"padding": True}, False),
        ({"local": range(64), "null": "skip"}, False),
        ({"rows": 2}, False),
        ({"hidden": 4096, "inner": 1536}, False),
    ],
    ids=str,
)
def test_weights_of_one_token_are_held_where_they_fit(how, held):
    made = experts_decode.configure(accepted(**how))
    assert isinstance(made.second, Held) is isinstance(made.settled, Held) is held
    assert isinstance(made.first, Product)


# Launches


@pytest.fixture
def launches(monkeypatch):
    """Grids and arguments of what a bound call launches, and the names of what makes lists and sums."""
    held = []

    def programs(call, made, device, biases, settled):
        def stand_in(kind):
            return lambda grid, values: held.append((kind, grid, values))

        of = "one " if experts_decode.listless(call) else ""
        return stand_in(f"{of}first"), stand_in(f"{of}second")

    memory = torch.empty(1 << 22, dtype=torch.uint8)
    monkeypatch.setattr(experts_decode, "programs", programs)
    monkeypatch.setattr(layers, "bind_lists", lambda *a: lambda *given: held.append(("lists", *given)))
    monkeypatch.setattr(layers, "bind_combine", lambda *a: lambda *given: held.append(("combine", *given)))
    monkeypatch.setattr(layers, "workspace", lambda device, nbytes: memory[:nbytes])
    monkeypatch.setattr(experts_decode.refused, "word", lambda device: memory)
    return held, memory.data_ptr()


def arguments(case, count=3, top=2, dtype="bfloat16", device="cpu"):
    one, two = (pack(w.torch(device), Fragments(dtype)) for w in (case.gate_up, case.down))
    indices, weights = routing(count, top, case.mixture.experts)
    hidden = tokens(count, case.down.shape[1], dtype=dtype).to(device, getattr(torch, dtype))
    biases = [None if b is None else b.to(device) for b in case.biases]
    return ExpertsArgs(
        hidden=hidden,
        indices=indices.to(device),
        weights=weights.to(device),
        gate_up=one,
        down=two,
        gate_up_bias=biases[0],
        down_bias=biases[1],
        mixture=case.mixture,
        out=torch.full_like(hidden, float("nan")),
    )


def addresses(stack):
    return tuple(stack.buffers()[name].data_ptr() for name in ("codes", "scales", "scale2"))


def test_launches_with_lists(launches):
    held, base = launches
    args = arguments(Case.random(bias=True))  # 6 experts, H 64, I 48, 6 slots
    experts_decode.bind(args, ExpertsDecode(Product(tiles=2), Product(tiles=8)))(*args.arrays())
    (lists, indices, at), first, second, (combine, y, *others) = held
    assert (lists, combine, at) == ("lists", "combine", base)
    assert indices is args.indices
    assert [id(a) for a in others] == [id(a) for a in (args.indices, args.weights, args.out)]
    words = first[2][6:9]
    h = first[2][5]
    biases = args.gate_up_bias.data_ptr(), args.down_bias.data_ptr()
    # 3 stripes of gates: 2 programs of a block of 2; 4 of results: 1
    assert first == (
        "first", (12, 1, 1), (*addresses(args.gate_up), args.hidden.data_ptr(), biases[0], h, *words)
    )  # fmt: skip
    assert second == ("second", (6, 1, 1), (*addresses(args.down), h, biases[1], y, *words))
    assert base == words[0] < words[1] < words[2] < h
    assert h + 6 * 48 * 2 <= y
    assert not any(at % 16 for at in (*words, h, y))


def test_launches_of_one_token(launches):
    held, base = launches
    case = Case.random()
    case = replace(case, mixture=replace(case.mixture, experts=7, local=(0, 1, 2, 4, 5, 6), null="skip"))
    args = arguments(case, 1)
    experts_decode.bind(args)(*args.arrays())
    first, second = held
    table = first[2][7]
    assert table.tolist() == [0, 1, 2, -1, 3, 4, 5]
    ids = args.indices.data_ptr()
    given_ = *addresses(args.gate_up), args.hidden.data_ptr(), None, base, ids, table
    assert first == ("one first", (6, 1, 1), given_)
    routed = ids, table, args.weights.data_ptr(), base
    given_ = *addresses(args.down), base, None, args.out.data_ptr(), *routed
    assert second == ("one second", (4, 1, 1), given_)


def test_launches_of_one_token_whose_weights_are_held(launches):
    """A program for each 16 results: of 4 slots 3 stripes of gates each, and 4 of results."""
    held, base = launches
    args = arguments(Case.random(), 1, 4)
    run = experts_decode.bind(args)
    run.products(*args.arrays())
    first, second = held
    routed = args.indices.data_ptr(), None, args.weights.data_ptr(), base
    assert first[:2] == ("one first", (12, 1, 1))
    assert second[:2] == ("one second", (4, 1, 1))
    assert second[2] == (*addresses(args.down), first[2][5], None, args.out.data_ptr(), *routed)
    part = Case.random(64).part((5, 7, 9, 60), "refuse")
    of = arguments(part, 1, 4)
    assert isinstance(experts_decode.configure(of.call()).settled, Held)
    experts_decode.bind(of).products(*of.arrays())
    assert held[2][:2] == first[:2]


def test_the_parts_of_a_call(launches):
    """What a benchmark times: lists, products and the sum apart, in memory of their own."""
    held, base = launches
    args = arguments(Case.random())
    run = experts_decode.bind(args)
    run.lists(args.indices)
    run.products(*args.arrays())
    run.combine(args.weights, args.indices, args.out)
    assert [kind for kind, *_ in held] == ["lists", "first", "second", "combine"]
    assert held[0][2] == held[1][2][6] != base
    assert held[2][2][5] == held[3][1]
    one = arguments(Case.random(), 1)
    run = experts_decode.bind(one)
    del held[:]
    run.lists(one.indices)
    run.products(*one.arrays())
    run.combine(one.weights, one.indices, one.out)
    assert [kind for kind, *_ in held] == ["one first", "one second"]


# Machine code


CODES = [
    ({"hidden": 4096, "inner": 1536}, (80, 184)),
    ({"rows": 16}, (128, 96)),
    ({"experts": 256, "hidden": 7168, "inner": 2048, "local": range(32), "null": "skip"}, (128, 104)),
    ({"experts": 256, "hidden": 7168, "inner": 2048, "local": range(32), "null": "skip", "rows": 64}, (128, 96)),
    ({"experts": 512, "hidden": 1024, "inner": 1856, "top": 22, "gated": False, "activation": "relu2"}, (64, 216)),
    ({"experts": 8, "hidden": 4096, "inner": 352, "top": 2, "rows": 3, "activation": "swigluoai", "limit": 7.0,
      "gate_up_order": "up_first", "per_row": True, "changes": {"bias": True, "down_bias": True}}, (104, 72)),
]  # fmt: skip


HELD = [
    ({}, (64, 64)),
    ({"changes": {"indices": "int32"}}, (64, 64)),
    ({"experts": 16, "hidden": 1040, "inner": 352, "top": 2, "gated": False, "activation": "relu2"}, (64, 64)),
    ({"hidden": 1040, "inner": 352, "top": 4, "activation": "swigluoai", "limit": 7.0, "gate_up_order": "up_first",
      "per_row": True, "changes": {"bias": True, "down_bias": True, "dtype": "float16"},
      "layout": Fragments("float16")}, (72, 64)),
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize(("how", "registers"), HELD, ids=str)
def test_machine_code_of_held_weights(how, registers):
    """All are asked for before the kernel ahead ends, and find room beside those of the other product."""
    call = accepted(**how)
    made = experts_decode.configure(call)
    with launch.recorded() as sources:
        experts_decode.programs(call, made, "cuda", settled=True)
    for source, most, rows in zip(sources, registers, (2 if call.mixture.gated else 1, 1), strict=True):
        types = {name: of.removesuffix(":16") for name, of in source.signature.items()}
        code = Program(source.kernel, types, source.constants, source.options).compile(90)
        print(source.kernel.__name__, code)
        assert (code.stack, code.spills, code.warnings) == (0, 0, [])
        assert code.registers <= most
        warps = source.options["num_warps"] // source.constants.get("TOP", 1)
        steps = -(-source.constants["K"] // 64 // warps)
        opcodes = [opcode for _, _, opcode, _ in code.instructions]
        (lets,) = (i for i, opcode in enumerate(opcodes) if opcode.startswith("PREEXIT"))
        (waits,) = (i for i, opcode in enumerate(opcodes) if opcode.startswith("ACQBULK"))
        copies = [i for i, opcode in enumerate(opcodes) if opcode.startswith("LDGSTS")]
        assert lets < copies[0]
        assert copies[-1] < waits
        assert len(copies) == steps * (rows + 1)
        assert count(code.opcodes, "HMMA.16816") == 4 * rows * steps
        assert 0 <= code.shared - steps * source.options["num_warps"] * rows * 576 < 4096


@needs_triton
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(("how", "registers"), CODES, ids=str)
def test_machine_code(how, registers, settled):
    call = accepted(**how)
    assert experts_decode.refuse(call) == ()
    made = experts_decode.configure(call)
    with launch.recorded() as sources:
        experts_decode.programs(call, made, "cuda", settled=settled)
    held = list(zip(sources, registers, (settled, True), strict=True))
    for source, most, early in held[:1] if settled else held:
        types = {name: of.removesuffix(":16") for name, of in source.signature.items()}
        code = Program(source.kernel, types, source.constants, source.options).compile(90)
        print(source.kernel.__name__, code)
        assert (code.stack, code.spills, code.warnings) == (0, 0, [])
        assert code.registers <= most
        opcodes = [opcode for _, _, opcode, _ in code.instructions]
        waits = [i for i, opcode in enumerate(opcodes) if opcode.startswith("ACQBULK")]
        (lets,) = (i for i, opcode in enumerate(opcodes) if opcode.startswith("PREEXIT"))
        weights = [i for i, opcode in enumerate(opcodes) if opcode.startswith("LDG.E.EF")]
        of = source.constants
        if early:
            assert lets < waits[0]
            assert sum(i < waits[0] for i in weights) == 2 * of["R"] * of["D"]
        else:  # what it lets start reads lists and ids at once
            assert waits[0] < lets < min(weights)
            assert not count(Counter(opcodes[:lets]), r"LDG")
        parts, loops = of.get("S", 1), of.get("L", 0)
        units, share = -(-of["K"] // 64), source.options["num_warps"] // parts
        steps = of.get("G", 1) // parts * -(-units // share)
        runs = steps - loops * of["D"] + (loops > 0) * of["D"]
        assert count(code.opcodes, "HMMA.16816") == 4 * of["R"] * runs
        assert len(weights) == 2 * of["R"] * runs


# On a GPU


OTHERS = [
    ExpertsDecode(Product(warps=1, ahead=2), Product(warps=1, ahead=8)),
    ExpertsDecode(Product(warps=8, tiles=2, ahead=1), Product(warps=8, tiles=4, ahead=2), together=2, parts=2),
    ExpertsDecode(Product(warps=2, ahead=2, unroll=1), Product(warps=2, ahead=1, unroll=1), together=1),
    ExpertsDecode(Product(warps=16, ahead=4), Product(warps=16, tiles=2, ahead=3), together=3, parts=4),
]
HOLDING = [
    ExpertsDecode(Held(), Held(warps=16, steps=2)),
    ExpertsDecode(Held(warps=8, steps=1), Held(warps=4, steps=3), Held(warps=2, steps=20)),
]
SHAPES = [(5, 1040, 352), (3, 304, 1856)]


def on_hopper():
    """The calls and configurations of what follows."""
    for (experts, hidden, inner), made, count_ in itertools.product(SHAPES, (None, *OTHERS), (1, 7)):
        of = {"per_row": True, "changes": {"bias": True, "down_bias": True}}
        call = accepted(experts, hidden, inner, count_, top=3, **of)
        yield call, made or experts_decode.configure(call)


KINDS_HELD: list[dict[str, Any]] = [
    {},
    {"gated": False, "activation": "relu2"},
    {"activation": "swigluoai", "limit": 1.0, "gate_up_order": "up_first"},
]


def held_call(top, **how):
    of = {"per_row": True, "changes": {"bias": True, "down_bias": True}}
    return accepted(5, 1040, 352, 1, top=top, **of, **how)


@pytest.fixture(scope="class")
def compiled():
    """All programs, compiled by all cores at once."""
    with launch.recorded() as sources:
        for call, made in on_hopper():
            experts_decode.programs(call, made, "cuda")
        for top, made, settled in itertools.product((1, 4), HOLDING, (False, True)):
            for how in KINDS_HELD:
                experts_decode.programs(held_call(top, **how), made, "cuda", settled=settled)
    jobs = [
        (s.kernel.fn.__module__, s.kernel.__name__, (dict(s.signature), dict(s.constants), dict(s.options)))
        for s in sources
    ]
    compile_all(jobs, 90)


@pytest.mark.usefixtures("compiled")
class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("count_", [1, 7])
    def test_every_configuration_is_right(self, shape, count_):
        case = Case.random(*shape, per_row=True, bias=True)
        args = arguments(case, count_, 3, device="cuda")
        args = replace(
            args,
            hidden=guarded(args.hidden, float("nan"))[1],
            gate_up=replace_buffers(args.gate_up),
            down=replace_buffers(args.down),
        )
        given = [a.cpu() for a in (args.hidden, args.indices, args.weights)]
        for made in (None, *OTHERS):
            poisoned, out = guarded(args.out, float("nan"))
            run = experts_decode.bind(args, made)
            run(*args.arrays()[:3], out)
            first = out.clone()
            run(*args.arrays()[:3], out)
            assert torch.equal(first, out), made
            assert_meant(out.cpu(), case, given[0].float(), *given[1:], "bfloat16")
            assert torch.isnan(poisoned).sum() == poisoned.numel() - out.numel()

    @pytest.mark.parametrize("top", [1, 4])
    @pytest.mark.parametrize("how", KINDS_HELD, ids=str)
    def test_held_weights(self, how, top):
        """Units beyond the last one, and K that ends within one; settled routing and what is not."""
        case = Case.random(5, 1040, 352, per_row=True, bias=True, **how)
        args = arguments(case, 1, top, device="cuda")
        hidden = guarded(args.hidden, float("nan"))[1]
        args = replace(args, hidden=hidden, gate_up=replace_buffers(args.gate_up), down=replace_buffers(args.down))
        given = [a.cpu() for a in (args.hidden, args.indices, args.weights)]
        for made in HOLDING:
            run = experts_decode.bind(args, made)
            for start in (run, run.products):
                poisoned, out = guarded(args.out, float("nan"))
                start(*args.arrays()[:3], out)
                first = out.clone()
                start(*args.arrays()[:3], out)
                assert torch.equal(first, out), made
                assert_meant(out.cpu(), case, given[0].float(), *given[1:], "bfloat16")
                assert torch.isnan(poisoned).sum() == poisoned.numel() - out.numel()

    def test_held_weights_of_few_of_the_experts(self):
        """All slots are multiplied, though few of as many were to be expected here."""
        case = Case.random(64, 1040, 352)
        held = case.part((3, 17, 40, 63), "refuse")
        args = arguments(held, 1, 4, device="cuda")
        indices = torch.tensor([[40, 3, 63, 17]])
        args = replace(args, indices=indices.cuda())
        given = args.hidden.cpu().float(), indices, args.weights.cpu()
        for made in (None, *HOLDING):
            run = experts_decode.bind(args, made)
            for start in (run, run.products):
                args.out.fill_(float("nan"))
                start(*args.arrays())
                assert_meant(args.out.cpu(), case, *given, "bfloat16")

    def test_more_blocks_than_are_launched(self):
        """On a rank that all tokens are routed to, where one in 16 was to be expected."""
        case = Case.random(64, 64, 48)
        held = case.part((60, 61, 62, 63), "skip")
        hidden, weights = tokens(40, dtype="bfloat16"), torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
        indices = torch.tensor([60, 63]).expand(40, 2).contiguous()
        args = replace(arguments(held, 40, device="cuda"), hidden=hidden.cuda().bfloat16(), indices=indices.cuda())
        args = replace(args, weights=weights.cuda())
        assert expected_blocks(args.call()) < 10
        experts_decode.bind(args)(*args.arrays())
        assert_meant(args.out.cpu(), case, hidden, indices, weights, "bfloat16")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_graph_of_layers_gives_the_same_bits(self, dtype):
        """Each reads what the one ahead of it wrote, and starts before that has ended."""
        case = Case.random(16, 256, 128)
        for count_, settled in ((1, False), (1, True), (5, False)):
            args = arguments(case, count_, 4, dtype, "cuda")
            run = experts_decode.bind(args)
            if settled:
                run = run.products
            steps = [args.hidden] + [torch.empty_like(args.hidden) for _ in range(6)]

            def chain(run=run, args=args, steps=steps):
                for a, b in itertools.pairwise(steps):
                    run(a, args.indices, args.weights, b)

            chain()
            torch.cuda.synchronize()
            first = [s.clone() for s in steps]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain()
            for start in (chain, graph.replay) * 10:
                for s in steps[1:]:
                    s.fill_(float("nan"))
                start()
                assert all(map(torch.equal, steps, first))
