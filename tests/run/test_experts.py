"""Every kernel for ``experts`` is held to the same: values within the derived bound, and the rules of its slots."""

from __future__ import annotations

import re

import pytest
import torch

from expert_cases import KINDS, Case, Place, assert_meant, places, routing, tokens
from halfbyte.errors import UsageError, WeightError
from halfbyte.expert_ops import Stacks, compute
from halfbyte.kernels.experts_torch import LOOP
from halfbyte.ops import pack

PLACES = list(places())
everywhere = pytest.mark.parametrize("place", PLACES)
ROUNDED = [p for p in places("fp8") if p.values[0].kernel is not LOOP]


@pytest.fixture(autouse=True)
def forced(request, monkeypatch):
    """Only the kernel under test may run."""
    if "place" in request.fixturenames:
        monkeypatch.setenv("HALFBYTE_KERNEL", request.getfixturevalue("place").kernel.name)


@pytest.mark.parametrize("kernel", KINDS, ids=lambda kernel: kernel.name)
def test_every_kernel_runs_here(kernel):
    if any(p.values[0].kernel is kernel for p in (*PLACES, *ROUNDED)):
        return
    reasons = kernel.refuse(Case.random().call({"device": "cpu"}, "bfloat16", "fragments", 1, 2))
    lacking = (
        r"needs |numba |triton |NUMBA_|runs on NVIDIA GPUs|is for sm_|Gluon is tested|reads the layout|rounds |.*fp8"
    )
    assert any(re.match(lacking, reason) for reason in reasons), reasons
    pytest.skip(f"{kernel.name} {', '.join(reasons)}")


@everywhere
class TestEveryKernel:
    @pytest.mark.parametrize("count", [1, 2, 5, 17, 64, 300])
    @pytest.mark.parametrize("per_row", [False, True])
    def test_values(self, place: Place, count, per_row):
        case = Case.random(per_row=per_row, seed=count)
        given = tokens(count, dtype=place.dtype), *routing(count, 2, 6)
        assert_meant(place.run(case, *given), case, *given, place.dtype)

    @pytest.mark.parametrize("shape", [(16, 16), (80, 112), (256, 48), (48, 352)])
    def test_shapes(self, place: Place, shape):
        hidden, inner = shape
        case = Case.random(3, hidden, inner)
        for count in (1, 9):
            given = tokens(count, hidden, dtype=place.dtype), *routing(count, 2, 3)
            assert_meant(place.run(case, *given), case, *given, place.dtype)

    @pytest.mark.parametrize("count", [1, 6])
    @pytest.mark.parametrize("experts_top", [(1, 1), (40, 7), (512, 22)])
    def test_many_experts(self, place: Place, count, experts_top):
        experts, top = experts_top
        case = Case.random(experts, 32, 16)
        given = tokens(count, 32, dtype=place.dtype), *routing(count, top, experts)
        assert_meant(place.run(case, *given), case, *given, place.dtype)

    @pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2", "swigluoai"])
    @pytest.mark.parametrize("limit", [None, 0.75])
    @pytest.mark.parametrize("order", ["concatenated", "up_first"])
    def test_activations(self, place: Place, name, limit, order):
        case = Case.random(activation=name, limit=limit, gate_up_order=order)
        for count in (1, 40):
            given = tokens(count, dtype=place.dtype), *routing(count, 3, 6)
            assert_meant(place.run(case, *given), case, *given, place.dtype)

    @pytest.mark.parametrize("name", ["silu", "relu2"])
    def test_without_a_gate(self, place: Place, name):
        case = Case.random(gated=False, activation=name)
        for count in (1, 40):
            given = tokens(count, dtype=place.dtype), *routing(count, 3, 6)
            assert_meant(place.run(case, *given), case, *given, place.dtype)

    @pytest.mark.parametrize("gated", [True, False])
    def test_biases(self, place: Place, gated):
        case = Case.random(bias=True, gated=gated)
        for count in (1, 40):
            given = tokens(count, dtype=place.dtype), *routing(count, 3, 6)
            assert_meant(place.run(case, *given), case, *given, place.dtype)

    def test_one_hot_expert_and_those_that_nobody_asks(self, place: Place):
        case = Case.random()
        indices = torch.full((70, 1), 4)
        given = tokens(70, dtype=place.dtype), indices, torch.ones(70, 1)
        assert_meant(place.run(case, *given), case, *given, place.dtype)

    def test_a_token_may_ask_an_expert_twice(self, place: Place):
        case = Case.random()
        indices = torch.tensor([[3, 3, 0]] * 5)
        given = tokens(5, dtype=place.dtype), indices, routing(5, 3, 6)[1]
        assert_meant(place.run(case, *given), case, *given, place.dtype)

    def test_no_tokens_and_no_slots(self, place: Place):
        case = Case.random()
        assert place.run(case, tokens(0), *routing(0, 2, 6)).shape == (0, 64)
        none = place.run(case, tokens(3), torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0))
        assert torch.equal(none, torch.zeros(3, 64, dtype=none.dtype))

    @pytest.mark.parametrize("count", [1, 20])
    def test_padding(self, place: Place, count):
        case = Case.random(padding=True)
        hidden, (indices, weights) = tokens(count, dtype=place.dtype), routing(count, 3, 6)
        indices[:, 1] = torch.tensor([-1, 6, 2**31 - 1, -(2**31)])[torch.arange(count) % 4]
        weights[:, 1] = float("nan")
        y = place.run(case, hidden, indices, weights)
        assert_meant(y, case, hidden, indices, weights.nan_to_num(0), place.dtype)
        y = place.run(case, hidden, torch.full_like(indices, -1), weights)
        assert torch.equal(y, torch.zeros_like(y))

    @pytest.mark.parametrize("count", [1, 20])
    def test_sums_over_ranks(self, place: Place, count):
        whole = Case.random()
        given = tokens(count, dtype=place.dtype), *routing(count, 3, 6)
        total = torch.zeros(count, 64)
        for local in ((0, 3), (1, 2, 4, 5)):
            total += place.run(whole.part(local, "skip"), *given, out_dtype=torch.float32)
        assert_meant(total, whole, *given, place.dtype, out_dtype=torch.float32)

    def test_no_expert_is_asked_here(self, place: Place):
        case = Case.random().part((1, 4), "skip")
        y = place.run(case, tokens(3), torch.tensor([[0, 2], [3, 5], [2, 0]]), torch.ones(3, 2))
        assert torch.equal(y, torch.zeros(3, 64, dtype=y.dtype))

    @pytest.mark.parametrize("count", [1, 20])
    def test_sums_in_the_order_of_the_slots(self, place: Place, count):
        """1 + 2^-24 + 2^-24 is 1 in float32, and 2^-24 + 2^-24 + 1 is not."""
        small = 2.0**-24
        case = Case.random(3, bias=True)
        bias = torch.tensor([1.0, small, small])[:, None].expand(3, 64)
        case = Case(case.gate_up, case.down, case.mixture, (torch.zeros_like(case.biases[0]), bias.contiguous()))
        indices = torch.tensor([[0, 1, 2], [1, 2, 0]])[torch.arange(count) % 2]
        y = place.run(case, torch.zeros(count, 64), indices, torch.ones(count, 3), out_dtype=torch.float32)
        expected = torch.tensor([1.0, 1 + 2 * small])[torch.arange(count) % 2]
        assert torch.equal(y, expected[:, None].expand(count, 64))

    @pytest.mark.parametrize("count", [4, 40])
    def test_a_token_does_not_depend_on_the_values_of_others(self, place: Place, count):
        case = Case.random()
        hidden, (indices, weights) = tokens(count, dtype=place.dtype), routing(count, 2, 6)
        whole = place.run(case, hidden, indices, weights)
        other = hidden.clone()
        other[1::2] = float("nan")
        y = place.run(case, other, indices, weights)
        assert torch.equal(y[::2], whole[::2])
        assert y[1::2].isnan().all()

    def test_dtypes_of_the_routing(self, place: Place):
        case = Case.random()
        hidden, (indices, weights) = tokens(6, dtype=place.dtype), routing(6, 2, 6)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            own = weights.to(dtype)
            y = place.run(case, hidden, indices.int(), own)
            assert_meant(y, case, hidden, indices, own.float(), place.dtype)

    def test_gaps(self, place: Place):
        case = Case.random()
        hidden, (indices, weights) = tokens(12, 128, dtype=place.dtype)[::2, :64], routing(6, 4, 6)
        given = hidden, indices[:, ::2], weights[:, ::2]
        assert_meant(place.run(case, *given), case, *given, place.dtype)

    @pytest.mark.parametrize("count", [1, 20])
    def test_what_is_refused(self, place: Place, count):
        """At once on the CPU; on a GPU the token is NaN, and the next call says why."""
        case = Case.random().part((0, 1, 2, 4, 5), "refuse")
        given = tokens(count, dtype=place.dtype), torch.zeros(count, 2, dtype=torch.int64), torch.ones(count, 2)
        expected = place.run(case, *given)
        for wrong, error, words in (
            (-1, UsageError, "no expert"),
            (6, UsageError, "no expert"),
            (3, WeightError, "expert 3, which is null"),
        ):
            bad = given[1].clone()
            bad[-1, 1] = wrong
            if place.device["device"] == "cpu" or place.kernel is LOOP:
                with pytest.raises(error, match=words):
                    place.run(case, given[0], bad, given[2])
                continue
            y = _once(place, case, given[0], bad, given[2])
            assert y[-1].isnan().all()
            assert torch.equal(y[:-1], expected[:-1])
            with pytest.raises(error, match=words):
                _once(place, case, *given)
            assert torch.equal(_once(place, case, *given), expected)


def _once(place: Place, case: Case, hidden, indices, weights) -> torch.Tensor:
    """A call that may raise what an earlier one could not."""
    to = place.device["device"]
    one, two = (pack(w.torch(to), place.layout) for w in (case.gate_up, case.down))
    given = (a.to(to) for a in (hidden.to(getattr(torch, place.dtype)), indices, weights))
    y = compute(*given, Stacks(gate_up=one, down=two), case.mixture)
    if y.is_cuda:
        torch.cuda.synchronize()
    return y.cpu()


@pytest.mark.parametrize("place", ROUNDED)
@pytest.mark.parametrize("count", [64, 300])
def test_fp8_is_what_the_loop_computes(place: Place, count, monkeypatch):
    """Roundings of h may differ where it is near the middle of two E4M3 numbers.

    The matrix units keep 13 bits of a sum: of 256 products, 2^-13 * 256^0.5 / 2 of the norm is lost
    (``halfbyte.kernels.cuda.fp8_gluon``). Noise of that size in gate and up, in float64, rounds so many values of h the
    other way that the result moves by 9.7e-3 of its norm; down's own sums and the last rounding add 1.4e-3.
    """
    case = Case.random(hidden=256, inner=128)
    given = tokens(count, 256, dtype=place.dtype), *routing(count, 2, 6)
    y = place.run(case, *given, precision="fp8").double()
    monkeypatch.setenv("HALFBYTE_KERNEL", LOOP.name)
    expected = Place(LOOP, {"device": "cpu"}, place.dtype, "rows").run(case, *given, precision="fp8").double()
    assert (y - expected).norm() <= 1.5e-2 * expected.norm()
    exact = Place(LOOP, {"device": "cpu"}, place.dtype, "rows").run(case, *given).double()
    assert (y - exact).norm() >= 1e-2 * exact.norm()
