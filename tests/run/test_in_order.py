"""Activations in the order in which the Gluon decode kernel's lanes need them."""

import re
from dataclasses import replace

import pytest
import torch

import halfbyte as hb
import halfbyte.kernels
from cuda_code import Program, count
from decoder_models import swap, tiny
from gluon_cases import DTYPES, arguments, on_gpu
from gpu_codecs import needs_triton
from halfbyte import step_ops
from halfbyte.decoder.families import Decoder
from halfbyte.decoder.loop import generate
from halfbyte.decoder.step import State, logits_of
from halfbyte.errors import UsageError
from halfbyte.kernels import AddNormArgs, AttendArgs, GatedArgs, InOrderArgs, Kernel, select, step_torch
from halfbyte.kernels.base import Call
from halfbyte.kernels.cuda import decode_gluon
from halfbyte.kernels.cuda.decode_gluon import Decode
from halfbyte.kernels.in_order import ROWS, InOrderCall, in_order_cost, in_rows, length, ordered
from halfbyte.layouts import Fragments
from helpers_run import call_like

MADE = (
    Decode(warps=4, tiles=2, ahead=2, registers=128),
    Decode(warps=8, ahead=5, registers=128),
    Decode(warps=4, ahead=8, registers=168),
    Decode(warps=2, tiles=2, ahead=3, registers=128),
)


def asked(**changes):
    of = {"device": "cuda", "capability": 90, "layout": Fragments(), "shape": (6144, 4096), "rows": 16}
    linear = call_like(**(of | changes))
    return InOrderCall(**{name: getattr(linear, name) for name in linear.__dataclass_fields__ if name != "op"})


@needs_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 8}, "takes 9 tokens or more in order, not 8"),
        ({"rows": 17}, "takes up to 16 tokens, not 17"),
        ({"capability": 80}, "is for sm_90, not sm_80"),
        ({"shape": (64, 72)}, "takes a K that is a multiple of 16, not 72"),
    ],
)
def test_refusals(changes, reason):
    assert decode_gluon.IN_ORDER.refuse(asked()) == ()
    assert decode_gluon.IN_ORDER.refuse(asked(**changes)).count(reason) == 1


@needs_triton
def test_another_kernel_that_is_asked_for(monkeypatch):
    assert select(InOrderArgs, asked()).name == "gluon-in-order"
    monkeypatch.setenv("HALFBYTE_KERNEL", "triton-decode")
    assert decode_gluon.IN_ORDER.refuse(asked()) == ("HALFBYTE_KERNEL asks for triton-decode",)


@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ((6144, 4096), Decode(warps=4, ahead=8, registers=168)),
        ((6352, 4096), Decode(warps=4, ahead=6, registers=128)),
        ((8192, 8192), Decode(warps=4, ahead=6, registers=128)),
        ((4096, 14336), Decode(warps=8, ahead=6, unroll=64, registers=128)),
    ],
)
def test_configurations(shape, made):
    assert decode_gluon.configure_in_order(asked(shape=shape)) == made


def test_cost():
    """As of rows: the weight, scale2, x and what is written."""
    call = asked(shape=(64, 32), rows=9)
    assert in_order_cost(call) == decode_gluon.GLUON.cost(call.linear())


def test_shapes_that_do_not_fit():
    _, args = arguments(48, 80, 9, "bfloat16", "bfloat16", None, "cpu")
    x = ordered(args.x)
    InOrderArgs(x=x, weight=args.weight, bias=None, out=args.out)
    for bad in ({"x": args.x}, {"out": args.out[:, :32]}, {"x": x[:-1]}):
        words = "x, weight and out do not fit each other"
        with pytest.raises(UsageError, match=re.escape(words)):
            InOrderArgs(**({"x": x, "weight": args.weight, "bias": None, "out": args.out} | bad))


@pytest.mark.parametrize(("m", "k"), [(16, 128), (9, 64), (12, 80)])
def test_a_lane_reads_its_rows_and_its_block(m, k):
    x = 1 + torch.arange(m * k, dtype=torch.float32).reshape(m, k)
    a = ordered(x)
    assert a.shape == (length(k),) == (16 * 64 * -(-k // 64),)
    for unit, half, piece, lane in ((0, 0, 0, 0), (0, 0, 1, 5), (0, 1, 0, 2), (k // 64 - 1, 0, 1, 31)):
        row, first = 8 * half + lane // 4, 64 * unit + 16 * (lane % 4) + 8 * piece
        at = 1024 * unit + 512 * half + 256 * piece + 8 * lane
        assert torch.equal(a[at : at + 8], x[row, first : first + 8])
    assert torch.equal(in_rows(a, m, k), x)
    assert (a != 0).sum() == m * k


def compiled(kernel, made, in_order):
    """For 16 tokens and a weight (4096, 4096)."""
    call = Call(
        layout=Fragments(), shape=(4096, 4096), per_row=True, pre_scale=False, rows=16, dtype="bfloat16",
        out_dtype="bfloat16", device="cuda", library="torch", bias=False, capability=90,
    )  # fmt: skip
    types, held = decode_gluon.parts(call, "float32", made, None, in_order)
    options = {"num_warps": made.warps, "maxnreg": made.registers}
    return Program(kernel, {name: of.removesuffix(":16") for name, of in types.items()}, held, options).compile(90)


@needs_triton
@pytest.mark.parametrize("made", MADE)
def test_machine_code(made):
    """x is loaded and multiplied, with nothing between, and nothing is spilled."""
    from halfbyte.kernels.cuda.decode_gluon_code import decode

    made = replace(made, unroll=64)
    rows, order = (compiled(decode, made, in_order) for in_order in (False, True))
    steps = 64 // made.warps
    assert (order.stack, order.spills, order.warnings) == (0, 0, [])
    assert order.matrix == rows.matrix == 8 * made.tiles * steps
    assert count(order.opcodes, r"LDG") == count(rows.opcodes, r"LDG")
    assert order.opcodes["LDG.E.128"] == 4 * steps
    assert count(rows.opcodes, r"SEL") >= 16 * steps
    assert count(order.opcodes, r"SEL") < steps


@needs_triton
@pytest.mark.parametrize("made", MADE[2:])
def test_units_stay_on_their_way(made):
    """The codes of a unit are asked for as many units before it is decoded, its x while that ahead is multiplied."""
    from halfbyte.kernels.cuda.decode_gluon_code import decode

    code = compiled(decode, replace(made, unroll=64), True)
    ops = [op for _, _, op, _ in code.instructions]
    products = [i for i, op in enumerate(ops) if op.startswith("HMMA")]

    def begun(load):
        return sum(at < load for at in products) // (8 * made.tiles)

    of_codes = [i for i, op in enumerate(ops) if op == "LDG.E.EF.128"]
    ahead = [i // made.tiles - begun(load) for i, load in enumerate(of_codes)]
    assert min(ahead[made.ahead * made.tiles :]) >= made.ahead
    of_x = [i for i, op in enumerate(ops) if op == "LDG.E.128"]
    assert min(i // 4 - begun(load) for i, load in enumerate(of_x[4:], 4)) >= 1


@pytest.fixture
def writes(monkeypatch):
    """Kernels for a CPU that take and give what lies in order, NaN where nothing may be used; the ops that ran."""
    ran = []

    def given(a, m):
        """An order without what may not be used."""
        a.copy_(torch.where(ordered(torch.ones_like(in_rows(a, m, a.numel() // ROWS))) == 0, torch.nan, a))

    def add_norm(args):
        rows = step_torch.ADD_NORM.bind(replace(args, normed=torch.empty_like(args.x)))

        def run(x, residual, weight, eps, normed, total):
            rows(x, residual, weight, eps, y := torch.empty_like(x), total)
            normed.copy_(ordered(y))
            given(normed, len(x))
            ran.append("add_norm")

        return run

    def attend(args):
        b, width = len(args.qkv), args.qkv.shape[1] - 2 * args.keys.shape[1] * args.keys.shape[3]
        rows = step_torch.ATTEND.bind(replace(args, out=args.qkv.new_empty(b, width)))

        def run(*arrays):
            rows(*arrays[:-1], y := args.qkv.new_empty(b, width))
            arrays[-1].copy_(ordered(y))
            given(arrays[-1], b)
            ran.append("attend")

        return run

    def product(args):
        def run(x, bias, out):
            ran.append(args.op)
            m, k = (len(out) if args.op == "linear_in_order" else args.rows), args.weight.shape[1]
            y = torch.nn.functional.linear(in_rows(x, m, k).float(), hb.unpack(args.weight).dequantize(), bias)
            if args.op == "gated":
                out.copy_(ordered(step_ops.gate(y.to(x.dtype), args.activation)))
                given(out, m)
            else:
                out.copy_(y)

        return run

    made = {AddNormArgs: add_norm, AttendArgs: attend, GatedArgs: product, InOrderArgs: product}
    kernels = [
        Kernel(
            name=f"in-order-{bundle.op}", bundle=bundle, description="", load=lambda call: None, bind=bind,
            refuse=lambda call: () if getattr(call, "in_order", True) else ("writes no rows",), cost=None,
        )
        for bundle, bind in made.items()
    ]  # fmt: skip
    monkeypatch.setattr(halfbyte.kernels, "KERNELS", (*kernels, *halfbyte.kernels.KERNELS))
    monkeypatch.setattr(step_ops, "_known", {})
    monkeypatch.setattr("halfbyte.decoder.product.takes_in_order", lambda weight, like, activation=None: len(like) >= 9)
    return ran


def stepped(model, batch, steps=3):
    """The logits of some steps."""
    decoder = Decoder.of(model)
    state = State.empty(decoder, batch, 8)
    found = []
    for i in range(steps):
        state.tokens.copy_(torch.arange(batch) * 7 % 13 + i)
        found.append(logits_of(decoder, state))
        state.counters[0] += 1
    return torch.stack(found).double()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_a_step_in_order_is_one_in_rows(family, writes, monkeypatch):
    model = swap(tiny(family), fuse=True)
    order, ran = stepped(model, 9), len(writes)
    assert ran == 3 * 3 * 7  # steps, layers; two norms, attention, and the products of qkv, o, gate and up, down
    monkeypatch.setattr("halfbyte.decoder.product.takes_in_order", lambda *args: False)
    rows = stepped(model, 9)
    assert len(writes) == ran
    assert (order - rows).norm() < 1e-5 * rows.norm()


@pytest.mark.parametrize("forced", ["add_norm", "attend"])
def test_what_writes_rows_leaves_them_in_rows(forced, writes, monkeypatch):
    """Products take either, so nothing is refused for its order; and what is known is not asked again."""
    model = swap(tiny("llama"), fuse=True)
    order = stepped(model, 9)
    writes.clear()
    monkeypatch.setenv("HALFBYTE_KERNEL", f"{forced.replace('_', '-')}-torch")
    asked = []
    real = step_ops.select
    monkeypatch.setattr(step_ops, "select", lambda bundle, call: asked.append(bundle.op) or real(bundle, call))
    rows = stepped(model, 9, steps=1)
    assert forced not in writes
    assert len(writes) == 3 * (2 if forced == "add_norm" else 5)
    assert (order[:1] - rows).norm() < 1e-5 * rows.norm()
    asked.clear()
    stepped(model, 9, steps=1)
    assert forced not in asked


def test_another_width_is_refused_also_by_a_weight_that_is_known(writes):
    x = step_ops.InOrder(ordered(torch.randn(9, 64)), 9, 64)
    weight = hb.pack(hb.quantize(torch.randn(32, 64)), "rows")
    for _ in range(2):
        step_ops.linear_in_order(x, weight)
        step_ops.gated(x, weight, "silu")
        for wrong in (replace(x, width=48), step_ops.InOrder(ordered(torch.randn(9, 128)), 9, 128)):
            words = f"x in order does not fit the weight's K: got {wrong.width}, expected 64"
            with pytest.raises(UsageError, match=re.escape(words)):
                step_ops.linear_in_order(wrong, weight)
            with pytest.raises(UsageError, match=re.escape(words)):
                step_ops.gated(wrong, weight, "silu")


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize(("n", "k"), [(48, 1088), (50, 208), (6144, 4096), (4096, 14336), (272, 28672)])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows", [9, 12, 16])
    def test_it_is_the_product_of_rows_to_the_bit(self, n, k, rows, dtype):
        _, args = arguments(n, k, rows, dtype, dtype, dtype, "cuda", scales=(40, 60), per_row=True)
        x = ordered(args.x).view(-1, 2, 2, 8, 4, 8)  # u rh i g q e
        for row in range(rows, 16):
            x[:, row // 8, :, row % 8] = torch.nan
        order = InOrderArgs(x=x.view(-1), weight=args.weight, bias=args.bias, out=torch.full_like(args.out, torch.nan))
        x.view(-1, 4, 8, 4, 8)[-1, :, :, (k - 1) % 64 // 16 + 1 :] = torch.nan  # what is beyond K
        for made in (*MADE, decode_gluon.configure_in_order(order.call())):
            decode_gluon.bind(args, made)(args.x, args.bias, args.out)
            order.out.fill_(torch.nan)
            decode_gluon.bind_in_order(order, made)(order.x, args.bias, order.out)
            assert torch.equal(order.out, args.out)

    @pytest.mark.parametrize(("n", "k"), [(96, 1088), (28672, 4096), (320, 5120)])
    @pytest.mark.parametrize("rows", [9, 16])
    def test_so_it_is_with_a_gate_whose_result_is_in_order(self, n, k, rows):
        _, linear = arguments(n, k, rows, "bfloat16", "bfloat16", None, "cuda", scales=(40, 60), per_row=True)
        out = linear.out.new_empty(rows, n // 2)
        args = GatedArgs(x=linear.x, weight=linear.weight, bias=None, activation="silu", out=out)
        order = replace(args, x=ordered(args.x), out=out.new_full((length(n // 2),), torch.nan), rows=rows)
        made = decode_gluon.configure_gated(order.call())
        decode_gluon.bind_gated(args, made)(args.x, None, out)
        decode_gluon.bind_gated(order)(order.x, None, order.out)
        assert torch.equal(in_rows(order.out, rows, n // 2), out)
        assert order.out.isnan().sum() == order.out.numel() - out.numel()

    @pytest.mark.parametrize(("family", "fields"), [("llama", {"head_dim": 64}), ("qwen3", {}), ("qwen2", {})])
    @pytest.mark.parametrize("batch", [9, 12, 16])
    def test_a_step(self, family, fields, batch, monkeypatch):
        """Heads of 64 leave attention in order; narrower ones do not."""
        sizes = {"hidden_size": 128, "intermediate_size": 208}
        model = swap(tiny(family, dtype=torch.bfloat16, **sizes, **fields), fuse=True, layout="fragments").cuda()
        calls = []
        real = step_ops.linear_in_order
        monkeypatch.setattr("halfbyte.decoder.product.linear_in_order", lambda *a: calls.append(0) or real(*a))
        order = stepped(model, batch)
        assert len(calls) == 3 * 3 * (3 if "head_dim" in fields else 2)
        monkeypatch.setattr("halfbyte.decoder.product.takes_in_order", lambda *args: False)
        rows = stepped(model, batch)
        assert len(calls) == 3 * 3 * (3 if "head_dim" in fields else 2)
        assert (order - rows).norm() < 2e-2 * rows.norm()
        prompts = [[1 + i, 2, 3] for i in range(batch)]
        monkeypatch.undo()
        eager, held = (generate(model, prompts, max_new_tokens=5, graph=graph) for graph in (False, True))
        assert eager.tokens == held.tokens
