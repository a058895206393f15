"""A product of a norm is add_norm and linear one after the other, whatever computes it."""

import re

import pytest
import torch

import halfbyte as hb
from cuda_code import Program, count
from gluon_cases import on_gpu
from gpu_codecs import needs_triton
from halfbyte.errors import NoKernelError, UsageError
from halfbyte.kernels import NormedArgs, select
from halfbyte.kernels.cuda import decode_gluon
from halfbyte.kernels.base import linear_cost
from halfbyte.kernels.normed import NormedCall, normed_cost
from halfbyte.layouts import Fragments, Rows
from halfbyte.step_ops import add_norm, normed
from helpers_run import call_like, random_floats, random_weight

EPS = 1e-5


def given(n, k, rows, dtype, device="cpu", bias=False):
    """x, the residual, the norm's weight, the product's in the layout of the device, and a bias."""
    w = random_weight(n, k, per_row=True).torch(device)
    x, residual = (torch.from_numpy(random_floats((rows, k), "float32", seed)) for seed in (0, 1))
    norm = 1 + torch.from_numpy(random_floats((k,), "float32", 2)) / 8
    added = torch.from_numpy(random_floats((n,), "float32", 7)).to(device) if bias else None
    x, residual, norm = (a.to(getattr(torch, dtype)).to(device) for a in (x, residual, norm))
    return x, residual, norm, hb.pack(w, Rows() if device == "cpu" else Fragments(dtype)), added


def apart(x, residual, norm, w, bias):
    between, total = add_norm(x, residual, norm, EPS)
    return hb.linear(between, w, bias), total


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_add_norm_and_the_product(dtype, bias):
    x, residual, norm, w, added = given(48, 32, 3, dtype, bias=bias)
    for times in (1, 2):
        got = normed(times * x, residual, norm, EPS, w, added)
        expected = apart(times * x, residual, norm, w, added)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_weight_that_changed():
    x, residual, norm, w, _ = given(48, 32, 3, "float32")
    normed(x, residual, norm, EPS, w)
    w.buffers()["codes"].zero_()
    out, total = normed(x, residual, norm, EPS, w)
    assert not out.any()
    assert torch.equal(total, x + residual)


def test_no_rows():
    x, residual, norm, w, _ = given(48, 32, 0, "float32")
    out, total = normed(x, residual, norm, EPS, w)
    assert (out.shape, total.shape) == ((0, 48), (0, 32))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": (3, 48)}, "x, weight and out do not fit each other: got (3, 48), (48, 32) and (3, 48)"),
        ({"residual": (2, 32)}, "residual does not fit normed: got (2, 32)"),
        ({"norm": (48,)}, "norm does not fit normed: got (48,)"),
    ],
)
def test_refusals(changes, words):
    shapes = {"x": (3, 32), "residual": (3, 32), "norm": (32,)}
    arrays = {name: torch.zeros(changes.get(name, shape)) for name, shape in shapes.items()}
    with pytest.raises(UsageError, match=re.escape(words)):
        normed(**arrays, eps=EPS, weight=hb.pack(random_weight(48, 32).torch()))


def asked(**changes):
    of = {"device": "cuda", "capability": 90, "layout": Fragments(), "shape": (6144, 4096), "rows": 1}
    linear = call_like(**(of | changes))
    return NormedCall(**{name: getattr(linear, name) for name in linear.__dataclass_fields__ if name != "op"})


@needs_triton
def test_what_is_chosen(monkeypatch):
    assert select(NormedArgs, asked()).name == "gluon-normed"
    assert select(NormedArgs, asked(shape=(40, 64))).name == "gluon-normed"
    assert decode_gluon.refuse_normed(asked(rows=2)) == ("normalizes 1 token, not 2",)
    assert decode_gluon.refuse_normed(asked(shape=(64, 8208))) == ("normalizes rows of up to 8192 values, not 8208",)
    assert select(NormedArgs, asked(rows=2)).name == "normed-composed"
    for name in ("triton-decode", "triton-add-norm"):
        monkeypatch.setenv("HALFBYTE_KERNEL", name)
        assert decode_gluon.refuse_normed(asked()) == (f"HALFBYTE_KERNEL asks for {name}",)
    monkeypatch.setenv("HALFBYTE_KERNEL", "gluon-normed")
    with pytest.raises(NoKernelError, match="normalizes 1 token, not 3"):
        select(NormedArgs, asked(rows=3))


def test_cost():
    """That of the product, and residual, sum and the norm's weight."""
    call = asked(shape=(64, 32), rows=3, layout=Rows())
    assert normed_cost(call).bytes == linear_cost(call.linear()).bytes + 2 * 3 * 32 * 2 + 32 * 2
    assert normed_cost(call).flops == linear_cost(call.linear()).flops + 5 * 3 * 32


@needs_triton
def test_machine_code():
    """Nothing is spilled, and a token's values are read once, as words of 16 bytes."""
    from halfbyte.kernels.cuda.decode_gluon_code import decode

    call = asked().linear()
    made = decode_gluon.configure(call)
    types, held = decode_gluon.parts(call, "float32", made, norm=True)
    arguments = {name: of.removesuffix(":16") for name, of in types.items()}
    options = {"num_warps": made.warps} | ({"maxnreg": made.registers} if made.registers else {})
    code = Program(decode, arguments, held, options).compile(90)
    assert (code.stack, code.spills, code.warnings) == (0, 0, [])
    assert count(code.opcodes, r"LDG\.E\.128") == 3 * 2 * -(-4096 // (64 * 8 * made.warps))
    assert count(code.opcodes, r"MUFU\.RSQ") == 1


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize(("n", "k"), [(32, 16), (100, 1088), (6144, 4096), (64, 5120), (64, 8192)])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_it_is_the_product_of_the_norm(self, dtype, n, k):
        """But for the order of the sum of squares: a value of the norm is one unit off now and then."""
        x, residual, norm, w, added = given(n, k, 1, dtype, "cuda", bias=True)
        out, total = normed(x, residual, norm, EPS, w, added)
        expected, sums = apart(x, residual, norm, w, added)
        assert torch.equal(total, sums)
        unit = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
        assert (out.double() - expected.double()).abs().max() <= 2 * unit * expected.double().abs().max()
        assert torch.equal(out, normed(x, residual, norm, EPS, w, added)[0])
