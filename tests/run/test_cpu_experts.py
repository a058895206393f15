"""The compiled kernel for experts on the CPU: what the tests of every kernel do not say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from expert_cases import Case, assert_meant, routing, tokens
from halfbyte import jit
from halfbyte.kernels import ExpertsArgs
from halfbyte.kernels.cpu import experts
from halfbyte.layouts import Rows
from halfbyte.ops import pack
from halfbyte.weight import Weight, to_numpy

pytestmark = pytest.mark.skipif(bool(jit.missing()), reason=str(jit.missing()))
HAS_BF16 = not jit.missing() and jit.has("avx512bf16")
FORMS = [
    ("float32", "portable"),
    ("bfloat16", "portable"),
    ("float16", "portable"),
    *([("float32", "fma"), ("bfloat16", "fma")] if not jit.missing() and jit.has("avx512bw") else []),
    *([("bfloat16", "bf16"), ("float16", "halves")] if HAS_BF16 else []),
]
forms = pytest.mark.parametrize(("dtype", "form"), FORMS)


def args_of(case: Case, hidden, indices, weights, library: str = "torch", out_dtype=None) -> ExpertsArgs:
    one, two = (pack(w.torch() if library == "torch" else w, "rows") for w in (case.gate_up, case.down))
    out = torch.full(hidden.shape, torch.nan, dtype=out_dtype or hidden.dtype)
    arrays = [hidden, indices, weights, out, *case.biases]
    if library == "numpy":
        arrays = [None if a is None else to_numpy(a) for a in arrays]
    hidden, indices, weights, out, bias, down_bias = arrays
    return ExpertsArgs(
        hidden=hidden, indices=indices, weights=weights, gate_up=one, down=two, gate_up_bias=bias,
        down_bias=down_bias, mixture=case.mixture, out=out,
    )  # fmt: skip


def run(case: Case, *given, **how):
    args = args_of(case, *given, **how)
    assert experts.EXPERTS.refuse(args.call()) == ()
    experts.EXPERTS.run(args)
    return args.out


@pytest.fixture
def form(request, monkeypatch):
    chosen = request.param if hasattr(request, "param") else request.node.callspec.params["form"]
    monkeypatch.setattr(experts, "form_of", lambda dtype, pre_scale: chosen)
    return chosen


@pytest.mark.parametrize(("dtype", "form"), FORMS, indirect=["form"])
class TestForms:
    @pytest.mark.parametrize("order", ["concatenated", "up_first", "interleaved"])
    def test_values(self, dtype, form, order):
        case = Case.random(7, 288, 80, bias=True, per_row=True, gate_up_order=order, limit=1.5)
        for count in (1, 23):
            given = tokens(count, 288, dtype=dtype), *routing(count, 3, 7)
            y = run(case, given[0].to(getattr(torch, dtype)), *given[1:], out_dtype=torch.float32)
            assert_meant(y, case, *given, dtype, out_dtype=torch.float32)

    def test_a_token_is_the_same_bits_in_any_company(self, dtype, form):
        """One expert has 50 tokens, others 1 to 20."""
        case = Case.random(5, 272, 96)
        indices = torch.stack(
            [torch.zeros(50, dtype=torch.int64), 1 + torch.arange(50) % 3 % 2 + torch.arange(50) // 48], 1
        )
        hidden, weights = tokens(50, 272, dtype=dtype).to(getattr(torch, dtype)), routing(50, 2, 5)[1]
        whole = run(case, hidden, indices, weights, out_dtype=torch.float32)
        for rows in (slice(0, 1), slice(7, 9), slice(11, 14), slice(20, 25), slice(30, 39), slice(40, 50)):
            part = run(case, hidden[rows], indices[rows], weights[rows], out_dtype=torch.float32)
            assert torch.equal(part, whole[rows])

    def test_one_thread(self, dtype, form):
        case = Case.random(5, 272, 96)
        given = tokens(20, 272, dtype=dtype).to(getattr(torch, dtype)), *routing(20, 2, 5)
        assert torch.equal(jit.alone(lambda: run(case, *given)), run(case, *given))


def test_tokens_in_passes(monkeypatch):
    """Where the scratch would be too large, tokens are computed some at a time: to the same bits."""
    case = Case.random(padding=True)
    hidden, (indices, weights) = tokens(45), routing(45, 3, 6)
    indices[:, 2], indices[9:13] = -1, -1
    whole = run(case, hidden, indices, weights)
    steps = []
    code = jit.run
    monkeypatch.setattr(experts, "PASS", 30_000)
    monkeypatch.setattr(experts, "KEPT", 0)
    monkeypatch.setattr(jit, "run", lambda *a: steps.append(a[3]) or code(*a))
    assert torch.equal(run(case, hidden, indices, weights), whole)
    assert len(steps) > 2
    assert sum(steps) == 45


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numpy(dtype):
    case = Case.random(bias=True)
    given = tokens(9, dtype=dtype).to(getattr(torch, dtype)), *routing(9, 2, 6)
    assert np.array_equal(run(case, *given, library="numpy"), run(case, *given).numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pre_scale_of_both_stacks(dtype):
    """Powers of two, so that the product with them is exact, in the activations or in the weight."""
    case = Case.random(4, 64, 48)
    rng = np.random.default_rng(5)
    factors = [(2.0 ** rng.integers(-1, 2, k)).astype(np.float32) for k in (64, 48)]

    def scaled(w: Weight, factor: np.ndarray) -> Weight:
        return Weight(codes=w.codes, scales=w.scales, scale2=w.scale2, pre_scale=factor)

    whole = replace(case, gate_up=scaled(case.gate_up, factors[0]), down=scaled(case.down, factors[1]))
    given = tokens(6, dtype=dtype).to(getattr(torch, dtype)), *routing(6, 2, 4)
    from halfbyte.kernels.experts_torch import LOOP

    args = args_of(whole, *given, out_dtype=torch.float32)
    LOOP.run(args)
    y = run(whole, *given, out_dtype=torch.float32)
    assert (y - args.out).abs().max() <= 2.0**-8 * args.out.abs().max()
    plain = args_of(case, *given, out_dtype=torch.float32)
    LOOP.run(plain)
    assert (y - plain.out).abs().max() > 2.0**-3 * args.out.abs().max()


def test_what_it_declines():
    case = Case.random()
    call = args_of(case, tokens(2), *routing(2, 2, 6)).call()
    refuse = experts.EXPERTS.refuse
    assert refuse(call) == ()
    assert refuse(replace(call, device="cuda")) == ("runs on the CPU, not on cuda",)
    assert refuse(replace(call, down_layout=pack(case.down.torch(), "fragments").layout)) == (
        "reads the layout rows, not fragments(dtype=bfloat16)",
    )
    assert refuse(replace(call, odd_scales=True)) == ("takes positive, finite block scales (bytes 00 to 7E)",)
    assert refuse(replace(call, precision="fp8")) == ("computes exactly, not in fp8",)
    assert isinstance(call.layout, Rows)
