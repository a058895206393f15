"""A product with its gate is linear and gate one after the other, whatever computes it."""

import re
from dataclasses import replace

import pytest
import torch

import halfbyte as hb
from cuda_code import Program, count
from gluon_cases import on_gpu
from gpu_codecs import needs_triton
from halfbyte.errors import NoKernelError, UsageError
from halfbyte.kernels import GatedArgs, select
from halfbyte.kernels.cuda import decode_gluon
from halfbyte.kernels.cuda.decode_gluon import Decode
from halfbyte.kernels.cuda.launch import options_of
from halfbyte.kernels.gated import GatedCall, gated_cost
from halfbyte.layouts import Fragments, Rows
from halfbyte.step_ops import gate, gated
from helpers_run import call_like, random_floats, random_weight

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
DTYPES = ("bfloat16", "float16", "float32")


def given(n, k, rows, dtype, device="cpu", bias=False, **of):
    """x, the weight in the layout of the device, and a bias."""
    w = random_weight(n, k, per_row=True, **of).torch(device)
    x = torch.from_numpy(random_floats((rows, k), "float32")).to(getattr(torch, dtype)).to(device)
    added = torch.from_numpy(random_floats((n,), "float32", 7)).to(device) if bias else None
    return x, hb.pack(w, Rows() if device == "cpu" else Fragments(dtype)), added


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_linear_and_gate(dtype, activation, bias):
    x, w, added = given(2 * 24, 32, 3, dtype, bias=bias)
    expected = gate(hb.linear(x, w, added), activation)
    assert torch.equal(gated(x, w, activation, added), expected)
    assert torch.equal(gated(2 * x, w, activation, added), gate(hb.linear(2 * x, w, added), activation))


def test_a_weight_that_changed():
    x, w, _ = given(2 * 24, 32, 3, "float32")
    gated(x, w, "silu")
    w.buffers()["codes"].zero_()
    assert not gated(x, w, "silu").any()


def test_no_rows():
    x, w, _ = given(2 * 24, 32, 0, "float32")
    assert gated(x, w, "silu").shape == (0, 24)


@pytest.mark.parametrize(
    ("n", "k", "activation", "words"),
    [
        (48, 32, "tanh", "unknown activation: got 'tanh'"),
        (47, 32, "silu", "x, weight and out do not fit each other"),
        (48, 48, "silu", "x, weight and out do not fit each other: got (3, 32), (48, 48) and (3, 24)"),
    ],
)
def test_refusals(n, k, activation, words):
    x = torch.zeros(3, 32)
    with pytest.raises(UsageError, match=re.escape(words)):
        gated(x, hb.pack(random_weight(n, k).torch()), activation)


def asked(**changes):
    of = {"device": "cuda", "capability": 90, "layout": Fragments(), "shape": (28672, 4096), "rows": 1}
    linear = call_like(**(of | changes))
    same = {name: getattr(linear, name) for name in linear.__dataclass_fields__ if name != "op"}
    return GatedCall(activation="silu", **same)


@needs_triton
def test_what_is_chosen(monkeypatch):
    assert select(GatedArgs, asked()).name == "gluon-gated"
    assert select(GatedArgs, asked(rows=17)).name == "gated-composed"
    assert select(GatedArgs, asked(shape=(2 * 24, 4096))).name == "gated-composed"
    reason = "takes gates that are a multiple of 16, not 24"
    assert decode_gluon.refuse_gated(asked(shape=(2 * 24, 4096))) == (reason,)
    monkeypatch.setenv("HALFBYTE_KERNEL", "triton-decode")
    assert select(GatedArgs, asked()).name == "gated-composed"
    assert decode_gluon.refuse_gated(asked()) == ("HALFBYTE_KERNEL asks for triton-decode",)
    monkeypatch.setenv("HALFBYTE_KERNEL", "gluon-gated")
    with pytest.raises(NoKernelError, match="takes up to 16 tokens, not 17"):
        select(GatedArgs, asked(rows=17))


def test_cost():
    """The weight, scale2, x and half of what linear would write."""
    call = asked(shape=(64, 32), rows=3, layout=Rows())
    assert gated_cost(call).bytes == 64 * 32 // 2 + 64 * 2 + 4 + 3 * 32 * 2 + 3 * 32 * 2
    assert gated_cost(call).flops == 2 * 3 * 64 * 32 + 4 * 3 * 32


@needs_triton
@pytest.mark.parametrize(("rows", "made"), [(8, decode_gluon.FEW_GATED), (16, decode_gluon.MANY_GATED)])
def test_machine_code(rows, made):
    """The gate adds nothing to what is done for each product, and nothing is spilled."""
    from halfbyte.kernels.cuda.decode_gluon_code import decode

    codes = []
    for activation in (None, "silu"):
        types, held = decode_gluon.parts(asked(rows=rows).linear(), "float32", made, activation)
        arguments = {name: of.removesuffix(":16") for name, of in types.items()}
        options = options_of(warps=made.warps, maxnreg=made.registers)
        codes.append(Program(decode, arguments, held, options).compile(90))
    alone, together = codes
    assert (together.stack, together.spills, together.warnings) == (0, 0, [])
    assert together.matrix == alone.matrix
    assert count(together.opcodes, r"LDG") == count(alone.opcodes, r"LDG")
    assert together.opcodes.total() - alone.opcodes.total() < 160


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize(("n", "k", "rows"), [(32, 16, 1), (2 * 48, 1088, 3), (28672, 4096, 16)])
    @pytest.mark.parametrize("dtype", DTYPES[:2])
    def test_it_is_the_gate_of_the_product_to_the_bit(self, dtype, n, k, rows, activation):
        x, w, added = given(n, k, rows, dtype, "cuda", bias=True)
        for made in (decode_gluon.FEW_GATED, decode_gluon.MANY_GATED, Decode(tiles=8, ahead=1, prefetch=20)):
            args = GatedArgs(x=x, weight=w, bias=added, activation=activation, out=x.new_empty(rows, n // 2))
            decode_gluon.bind_gated(args, made)(x, added, args.out)
            both = x.new_empty(rows, n)
            linear = decode_gluon.LinearArgs(x=x, weight=w, bias=added, out=both)
            decode_gluon.bind(linear, replace(made, tiles=1))(x, added, both)
            assert torch.equal(args.out, gate(both, activation))
        assert torch.equal(gated(x, w, activation, added), gated(x, w, activation, added))
