"""Mixtures of experts: exact values, the order of sums, what is refused, and no look at the routing in a graph."""

from __future__ import annotations

import copy
import ctypes
import pickle
import re
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import halfbyte as hb
from gpu_codecs import needs_gpu, needs_triton
from halfbyte import expert_ops, torch_experts
from halfbyte.errors import UsageError, WeightError
from halfbyte.expert_ops import Stacks, compute
from halfbyte.kernels import ExpertsArgs, base, experts_torch
from halfbyte.kernels.cuda import refused
from halfbyte.kernels.experts import places
from halfbyte.layouts import Packed
from halfbyte.nn import Experts, weights_of
from halfbyte.remembered import keep
from halfbyte.torch_experts import experts_op, traced
from halfbyte.weight import Weight

E, H, N, TOP = 5, 32, 16, 2


def whole(n: int, k: int, seed: int, scale2: float = 1.0) -> Weight:
    """Codes whose values are -1, 0 and 1 under block scales of 1 and 2: sums of small integers are exact."""
    rng = np.random.default_rng([seed, n, k])
    nibbles = np.array([0x0, 0x2, 0xA], np.uint8)[rng.integers(0, 3, (n, k))]
    return Weight(
        codes=nibbles[:, ::2] | nibbles[:, 1::2] << 4,
        scales=np.array([0x38, 0x40], np.uint8)[rng.integers(0, 2, (n, k // 16))],
        scale2=np.float32(scale2),
    )


def layers(experts: int = E) -> list[tuple[Weight, Weight, Weight]]:
    """gate, up and down of each, gate and up under different scale2."""
    return [(whole(N, H, 3 * e), whole(N, H, 3 * e + 1, 0.5), whole(H, N, 3 * e + 2, 0.25)) for e in range(experts)]


def routed(tokens: int, seed: int = 0, experts: int = E) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden of small integers, TOP different experts for each token, and weights that are powers of two."""
    rng = np.random.default_rng([seed, tokens])
    hidden = torch.from_numpy(rng.integers(-2, 3, (tokens, H)).astype(np.float32))
    indices = torch.from_numpy(np.argsort(rng.random((tokens, experts)), axis=1)[:, :TOP].copy())
    return hidden, indices, torch.from_numpy(2.0 ** rng.integers(-2, 1, (tokens, TOP))).float()


def activated(name: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if name == "relu2":
        return np.maximum(gate, 0) ** 2 * up
    if name == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if name == "swigluoai":
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    if name == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    erf = torch.erf(torch.from_numpy(gate / np.sqrt(2))).numpy()
    return 0.5 * gate * (1 + erf) * up


def meaning(given, weights, name="relu2", limit=None, biases=None) -> np.ndarray:
    """(T, H) in float64."""
    hidden, indices, routing = (np.asarray(a, dtype=np.float64 if i != 1 else np.int64) for i, a in enumerate(given))
    out = np.zeros(hidden.shape)
    for t, (ids, factors) in enumerate(zip(indices, routing, strict=True)):
        for e, factor in zip(ids, factors, strict=True):
            gate, up, down = (w.dequantize().astype(np.float64) for w in weights[e])
            g, u = gate @ hidden[t], up @ hidden[t]
            if biases is not None:
                g, u = g + biases[0][e][:N], u + biases[0][e][N:]
            if limit is not None:
                g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
            y = down @ activated(name, g, u)
            out[t] += factor * (y if biases is None else y + biases[1][e])
    return out


@pytest.fixture
def graph(monkeypatch):
    """As while a CUDA graph is captured; a look at a tensor's values is an error."""

    class NoLooks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name()
            assert not any(look in name for look in ("_local_scalar_dense", "nonzero", "bincount", "unique")), name
            return func(*args, **(kwargs or {}))

    inside = []

    def guarded(name):
        own = getattr(torch.Tensor, name)

        def look(self, *args):
            assert inside, "the host looked at a tensor"
            return own(self, *args)

        monkeypatch.setattr(torch.Tensor, name, look)

    def unguarded(module, name):
        """Kernels of the CPU look at scales, and ids are looked at there before a kernel runs."""
        own = getattr(module, name)

        def called(*args, **options):
            inside.append(name)
            with _disable_current_modes():
                y = own(*args, **options)
            inside.pop()
            return y

        monkeypatch.setattr(module, name, called)

    monkeypatch.setenv("HALFBYTE_KERNEL", "experts-loop")
    monkeypatch.setattr(experts_torch, "capturing", lambda device: True)
    monkeypatch.setattr(expert_ops, "check_ids", lambda indices, mixture: None)
    unguarded(experts_torch, "_product")
    unguarded(base, "odd_scales")
    for name in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        guarded(name)
    return NoLooks()


class TestValues:
    @pytest.mark.parametrize("tokens", [0, 1, 7])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_exact(self, tokens, dtype):
        experts, given = Experts.of(layers(), activation="relu2"), routed(tokens)
        expected = meaning(given, layers())
        hidden = given[0].to(getattr(torch, dtype))
        y = experts(hidden, *given[1:])
        assert y.dtype == hidden.dtype
        if dtype == "float32":
            assert np.array_equal(y.numpy(), expected.astype(np.float32))
        else:
            assert y.shape == (tokens, H)
            assert np.abs(y.float().numpy() - expected).max(initial=0) <= 2.0**-7 * np.abs(expected).max(initial=0)

    def test_int32_indices_and_routing_in_bfloat16(self):
        experts, (hidden, indices, routing) = Experts.of(layers(), activation="relu2"), routed(4)
        expected = experts(hidden, indices, routing)
        assert torch.equal(experts(hidden, indices.int(), routing.bfloat16()), expected)

    @pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2", "swigluoai"])
    @pytest.mark.parametrize("limit", [None, 7.0, 1.5])
    def test_activations(self, name, limit):
        experts, given = Experts.of(layers(), activation=name, limit=limit), routed(9)
        expected = meaning(given, layers(), name, limit)
        assert np.abs(experts(*given).numpy() - expected).max() <= 1e-6 * np.abs(expected).max()
        other = meaning(given, layers(), name, 0.5)
        assert np.abs(other - expected).max() > 1e-2 * np.abs(expected).max()

    @pytest.mark.parametrize("order", ["concatenated", "up_first", "interleaved"])
    def test_orders_of_gate_and_up(self, order):
        stacks = []
        for gate, up, _ in layers():
            rows = Weight.concat([up, gate] if order == "up_first" else [gate, up])
            if order == "interleaved":
                rows = rows.permute_rows(np.arange(2 * N).reshape(2, N).T.reshape(-1))
            stacks.append(rows)
        experts = Experts(
            Weight.stack(stacks),
            Weight.stack([down for *_, down in layers()]),
            activation="relu2",
            gate_up_order=order,
        )
        given = routed(6)
        assert np.array_equal(experts(*given).numpy(), meaning(given, layers()))
        found = dict(weights_of(experts))
        names = [f"{e}.{part}" for e in range(E) for part in ("gate_proj", "up_proj", "down_proj")]
        assert list(found) == names
        for name, w in zip(names, [w for three in layers() for w in three], strict=True):
            assert found[name].same(w.torch())

    def test_biases(self):
        rng = np.random.default_rng(3)
        biases = [rng.integers(-3, 4, shape).astype(np.float32) for shape in ((E, 2 * N), (E, H))]
        experts = Experts.of(layers(), activation="relu2", gate_up_bias=biases[0], down_bias=biases[1])
        given = routed(6)
        assert np.array_equal(experts(*given).numpy(), meaning(given, layers(), biases=biases))

    def test_sums_are_in_the_order_of_the_slots(self):
        bias = torch.tensor([1.0, 2.0**-24, 2.0**-24])[:, None].expand(3, H)
        experts = Experts.of(layers(3), activation="relu2", down_bias=bias.clone())
        indices = torch.tensor([[0, 1, 2], [1, 2, 0]])
        y = experts(torch.zeros(2, H), indices, torch.ones(2, 3))
        assert torch.equal(y, torch.tensor([[1.0], [1 + 2.0**-23]]).expand(2, H))

    @pytest.mark.parametrize("layout", ["rows", "columns"])
    def test_layouts_that_some_kernel_reads(self, layout):
        experts, given = Experts.of(layers(), layout, activation="relu2"), routed(3)
        if layout == "rows":
            assert np.array_equal(experts(*given).numpy(), meaning(given, layers()))
        else:
            with pytest.raises(hb.errors.NoKernelError, match="columns"):
                experts(*given)
            assert "no kernel: " in repr(experts)


class TestOptions:
    def test_without_a_gate(self):
        rows = [(up, down) for _, up, down in layers()]
        experts, (hidden, indices, routing) = Experts.of(rows, activation="relu2", gated=False), routed(6)
        expected = np.zeros((6, H))
        for t in range(6):
            for e, factor in zip(indices[t].tolist(), routing[t].tolist(), strict=True):
                up, down = (w.dequantize().astype(np.float64) for w in rows[e])
                expected[t] += factor * (down @ np.maximum(up @ hidden[t].numpy(), 0) ** 2)
        assert np.array_equal(experts(hidden, indices, routing).numpy(), expected.astype(np.float32))
        assert "activation=relu2, no gate, layout=rows" in repr(experts)
        assert [name for name, _ in weights_of(experts)][:3] == ["0.up_proj", "0.down_proj", "1.up_proj"]
        empty = Experts.empty("rows", E, H, N, activation="relu2", gated=False).to_empty(device="cpu")
        empty.load_state_dict(experts.state_dict())
        assert torch.equal(empty(hidden, indices, routing), experts(hidden, indices, routing))
        with pytest.raises(UsageError, match="expert 0 has other layers: got 3, expected 2 of them"):
            Experts.of(layers(), gated=False)
        for options in ({"limit": 1.0}, {"activation": "swigluoai"}, {"gate_up_order": "up_first"}):
            with pytest.raises(UsageError, match="experts without a gate have neither its limit nor an order"):
                Experts.of(rows, gated=False, **options)

    def test_null_experts_that_are_skipped(self):
        some = layers()
        some[1] = tuple(Weight.null(w.shape) for w in some[1])
        experts, (hidden, indices, routing) = Experts.of(some, activation="relu2", null="skip"), routed(6)
        kept = routing.masked_fill(indices == 1, 0)
        assert (indices == 1).any()
        assert np.array_equal(experts(hidden, indices, routing).numpy(), meaning((hidden, indices, kept), layers()))
        indices[0, 0] = E
        with pytest.raises(UsageError, match="ids name no expert"):
            experts(hidden, indices, routing)
        with pytest.raises(UsageError, match="unknown way with null experts: got 'drop', expected refuse or skip"):
            Experts.of(some, null="drop")

    def test_float32_sums_of_bfloat16(self):
        experts, given = Experts.of(layers(), activation="relu2", out_dtype="float32"), routed(3)
        y = experts(given[0].bfloat16(), *given[1:])
        assert y.dtype == torch.float32
        rounded = Experts.of(layers(), activation="relu2")(given[0].bfloat16(), *given[1:])
        assert torch.equal(y.bfloat16(), rounded)
        assert not torch.equal(y, rounded.float())

    def test_fp8_is_that_of_linear(self):
        experts, (hidden, indices, routing) = Experts.of(layers(), precision="fp8"), routed(4)
        expected = torch.zeros(4, H)
        for t in range(4):
            for e, factor in zip(indices[t].tolist(), routing[t].tolist(), strict=True):
                gate, up, down = (w.torch() for w in layers()[e])
                both = hb.linear(hidden[t], hb.pack(Weight.concat([gate, up])), precision="fp8")
                h = torch.nn.functional.silu(both[:N]) * both[N:]
                expected[t] += factor * hb.linear(h, hb.pack(down), precision="fp8")
        y = experts(hidden, indices, routing)
        assert torch.equal(y, expected)
        exact = Experts.of(layers())(hidden, indices, routing)
        assert 1e-3 < (y - exact).norm() / exact.norm() < 0.1
        assert "precision=fp8" in repr(experts)
        with pytest.raises(UsageError, match="unknown precision: got 'int4'"):
            Experts.of(layers(), precision="int4")

    @pytest.mark.parametrize("order", ["up_first", "interleaved"])
    def test_rows_are_put_in_order_once(self, order):
        """A Weight's, and of a packed one those of rows; other layouts keep theirs, and their state says so."""
        at = np.arange(2 * N)
        index = np.roll(at, N) if order == "up_first" else at.reshape(2, N).T.reshape(-1)
        both = Weight.stack([Weight.concat(three[:2]).permute_rows(index) for three in layers()])
        down = Weight.stack([three[2] for three in layers()])
        bias = np.arange(E * 2 * N, dtype=np.float32).reshape(E, 2 * N)
        plain = Experts.of(layers(), gate_up_bias=bias)
        for given in (both, hb.pack(both), hb.pack(both.torch())):
            made = Experts(given, down, gate_up_order=order, gate_up_bias=bias[:, index])
            assert made.mixture.gate_up_order == "concatenated"
            state = plain.state_dict()
            assert all(torch.equal(value, state[key]) for key, value in made.state_dict().items())
        kept = Experts(hb.pack(both.torch(), "fragments"), hb.pack(down.torch(), "fragments"), gate_up_order=order)
        assert kept.mixture.gate_up_order == order
        other = Experts.empty("fragments", E, H, N, per_row=True, device="cpu")
        with pytest.raises(UsageError, match=f"the state dict holds another layout: got .*, {order}, expected"):
            other.load_state_dict(kept.state_dict())
        same = Experts.empty("fragments", E, H, N, per_row=True, gate_up_order=order, device="cpu")
        same.load_state_dict(kept.state_dict())
        assert [name for name, _ in kept.biases()] == []
        assert torch.equal(dict(plain.biases())["1.up_proj"], torch.from_numpy(bias[1, N:]))

    def test_the_form_that_plan_takes(self):
        experts = Experts.of(layers(), gate_up_bias=np.zeros((E, 2 * N), np.float32))
        made = hb.plan("experts", experts.form(TOP), rows=3, dtype="float32")
        assert (made.call.shape, made.call.inner, made.call.top, made.call.rows) == ((E, 2 * N, H), N, TOP, 3)
        assert (made.call.per_row, made.call.bias, made.call.down_bias) == (True, True, False)
        assert made.kernel in repr(experts)
        assert experts.form(TOP).nbytes == experts.gate_up.packed.nbytes + experts.down.packed.nbytes
        with pytest.raises(UsageError, match="linear is not of this: got ExpertsForm"):
            hb.plan("linear", experts.form(TOP), rows=3)


def bound(args, out=7.0):
    """A kernel's ``bind``: what it gives writes a number."""
    calls.append(args)

    def run(hidden, indices, weights, given):
        given.fill_(out)

    return run


calls: list = []


class TestRemembered:
    @pytest.fixture
    def stub(self, monkeypatch):
        """A kernel that can be bound takes every call."""
        calls.clear()
        made = replace(experts_torch.LOOP, name="stub", refuse=lambda call: (), launch=None, bind=bound)
        monkeypatch.setattr(expert_ops, "chosen", lambda call: (made, call.precision))

    def test_the_second_call_is_bound_already(self, stub):
        experts, given = Experts.of(layers()), routed(3)
        for _ in range(3):
            assert torch.equal(experts(*given), torch.full((3, H), 7.0))
        assert len(calls) == 1
        experts(*routed(4))
        experts(given[0].bfloat16(), *given[1:])
        experts(given[0], given[1].int(), given[2])
        assert len(calls) == 4

    @pytest.mark.parametrize("changed", ["gate_up.codes", "down.scale2", "down.bias"])
    def test_not_after_a_weight_was_written_to_or_replaced(self, stub, changed):
        experts, given = Experts.of(layers(), down_bias=np.zeros((E, H), np.float32)), routed(3)
        experts(*given)
        name, _, part = changed.partition(".")
        holder = experts.get_submodule(name)
        with torch.no_grad():
            getattr(holder, part).copy_(getattr(holder, part).clone())
        experts(*given)
        assert len(calls) == 2
        setattr(holder, part, copy.deepcopy(getattr(holder, part)))
        experts(*given)
        assert len(calls) == 3

    def test_not_after_biases_were_cast(self):
        biases = np.ones((E, 2 * N), np.float32), np.ones((E, H), np.float32)
        experts, given = Experts.of(layers(), gate_up_bias=biases[0], down_bias=biases[1]), routed(3)
        before = experts(*given)
        assert torch.equal(experts.to(torch.bfloat16)(*given), before)
        experts.down.bias.data = torch.zeros(E, H)
        assert not torch.equal(experts(*given), before)

    def test_not_of_another_down_with_the_same_scale2(self):
        experts, (hidden, indices, routing) = Experts.of(layers(), activation="relu2"), routed(3)
        one, two = experts.gate_up.packed, experts.down.packed
        none = {"codes": torch.zeros_like(two.buffers()["codes"])}
        other = Packed(two.layout, two.shape, two.buffers() | none)
        for down, zero in ((two, False), (other, True), (two, False)):
            y = compute(hidden, indices, routing, Stacks(gate_up=one, down=down), experts.mixture)
            assert y.eq(0).all() == zero

    def test_not_of_other_experts_with_the_same_scale2_in_an_operator(self):
        given, mine = routed(3), [Experts.of(layers()), Experts.of(layers()[::-1])]
        expected = [experts(*given) for experts in mine]
        for name in ("gate_up", "down"):
            one, other = (experts.get_submodule(name) for experts in mine)
            assert torch.equal(one.scale2, other.scale2)
            other._buffers["scale2"] = one.scale2
        for experts, y in zip(mine, expected, strict=True):
            held = [(s._key, s.shape, s.held(), None) for s in (experts.gate_up, experts.down)]
            assert torch.equal(traced(*given, held, experts.mixture, "exact", None), y)

    def test_a_bias_that_was_copied_lives_as_long(self, stub):
        experts, (hidden, indices, routing) = Experts.of(layers()), routed(3)
        wide = torch.zeros(H, E).T
        stacks = Stacks(gate_up=experts.gate_up.packed, down=experts.down.packed, down_bias=wide)
        compute(hidden, indices, routing, stacks, experts.mixture)
        copied = weakref.ref(calls.pop().down_bias)
        assert copied() is not None
        assert copied().is_contiguous()

    def test_places_are_never_forgotten(self, stub):
        null = Weight.null((N, H)), Weight.null((N, H)), Weight.null((H, N))
        experts = Experts.of([own if e in (0, 2, 3, 5, 8) else null for e, own in enumerate(layers(9))])
        hidden, _, routing = routed(1)
        experts(hidden, torch.tensor([[0, 8]]), routing)
        found = places(calls[0])
        assert found.tolist() == [0, -1, 1, 2, -1, 3, -1, -1, 4]
        for i in range(300):
            keep(experts.gate_up.packed.memo, ("call", i), None)
        assert places(calls[0]) is found

    def test_ids_are_looked_at_in_each_call(self, stub):
        experts, (hidden, indices, routing) = Experts.of(layers()), routed(3)
        experts(hidden, indices, routing)
        indices[2, 1] = -1
        with pytest.raises(UsageError, match=re.escape("ids name no expert at [2, 1]: got -1, expected 0..4")):
            experts(hidden, indices, routing)

    def test_no_gradient(self, stub):
        experts, given = Experts.of(layers()), routed(3)
        experts(*given)
        with pytest.raises(UsageError, match="has no gradient"):
            experts(given[0].requires_grad_(), *given[1:]).sum().backward()
        assert len(calls) == 1


class TestWordOfTheGpu:
    """What a kernel could not follow, as the host reads it."""

    @pytest.mark.parametrize(
        ("e", "null", "slot", "error", "words"),
        [
            (-1, 0, 0, UsageError, "an id named no expert at slot 0 of the indices .* got -1"),
            (2**31 - 1, 0, 40, UsageError, "at slot 40 of the indices in an earlier call on cuda:3"),
            (17, 1, 5, WeightError, "a token was routed to expert 17, which is null, at slot 5"),
        ],
    )
    def test_is_raised_once(self, e, null, slot, error, words, monkeypatch):
        value = ctypes.c_int64(e << 32 | null << 31 | slot + 1)
        device = torch.device("cuda:3")
        monkeypatch.setitem(refused._words, 3, (None, value))
        monkeypatch.setattr(refused, "capturing", lambda device: True)
        refused.look(device)  # not in a capture
        monkeypatch.setattr(refused, "capturing", lambda device: False)
        with pytest.raises(error, match=words):
            refused.look(device)
        refused.look(device)


class TestRouting:
    def test_ids_that_name_no_expert(self):
        experts, (hidden, indices, routing) = Experts.of(layers()), routed(4)
        for wrong in (-1, E):
            indices[2, 1] = wrong
            message = f"ids name no expert: index [2, 1], got {wrong}, expected 0..{E - 1}"
            with pytest.raises(UsageError) as caught:
                experts(hidden, indices, routing)
            assert "ids name no expert" in str(caught.value)
            assert f"got {wrong}, expected 0..{E - 1}" in str(caught.value), message

    def test_padding_is_skipped(self):
        experts, (hidden, indices, routing) = Experts.of(layers(), activation="relu2", padding=True), routed(4)
        indices[2, 1], indices[3] = -1, torch.tensor([E, 2**40])
        routing[3] = float("nan")
        kept = routing.clone()
        kept[2, 1], kept[3] = 0, 0
        expected = meaning((hidden, indices.where((indices >= 0) & (indices < E), 0), kept), layers())
        assert np.array_equal(experts(hidden, indices, routing).numpy(), expected)

    def test_null_experts(self):
        some = layers()
        some[1] = (Weight.null((N, H)), Weight.null((N, H)), Weight.null((H, N)))
        experts, (hidden, indices, routing) = Experts.of(some, activation="relu2"), routed(6)
        assert experts.gate_up.shape == (E - 1, 2 * N, H)
        assert "experts=5, 4 held here" in repr(experts)
        there = indices.where(indices != 1, 4)
        assert np.array_equal(experts(hidden, there, routing).numpy(), meaning((hidden, there, routing), layers()))
        indices[5, 0] = 1
        with pytest.raises(WeightError, match=r"tokens are routed to expert 1, which is null: another rank holds it"):
            experts(hidden, indices, routing)
        assert {name.partition(".")[0] for name, _ in weights_of(experts)} == {"0", "2", "3", "4"}

    def test_the_ranks_add_up(self):
        """Expert parallelism: each rank skips nothing, and is given its own tokens alone."""
        hidden, indices, routing = routed(6)
        total = np.zeros((6, H))
        for local in ((0, 1), (2, 3, 4)):
            ranks = [
                three if e in local else tuple(Weight.null(w.shape) for w in three) for e, three in enumerate(layers())
            ]
            experts = Experts.of(ranks, activation="relu2", padding=True)
            own = (indices[..., None] == torch.tensor(local)).any(-1)
            total += experts(hidden, indices.where(own, -1), routing).numpy()
        assert np.array_equal(total, meaning((hidden, indices, routing), layers()))

    def test_errors(self):
        experts, (hidden, indices, routing) = Experts.of(layers()), routed(4)
        cases = [
            ((hidden[:, :16], indices, routing), f"hidden does not fit the experts: got (4, 16), expected (T, {H})"),
            ((hidden[None], indices, routing), "hidden does not fit the experts: got (1, 4, 32)"),
            ((hidden.double(), indices, routing), "hidden is of the wrong dtype: got float64"),
            ((hidden, indices.float(), routing), "indices are no integers of 32 or 64 bits: got torch.float32"),
            ((hidden, indices[:3], routing[:3]), "indices do not fit hidden: got (3, 2)"),
            ((hidden, indices, routing[:, :1]), "routing weights do not fit indices: got float32 (4, 1)"),
            ((hidden, indices, indices), "routing weights do not fit indices: got int64 (4, 2)"),
            ((hidden, indices.to("meta"), routing), "indices and hidden are on two devices"),
        ]
        for given, words in cases:
            with pytest.raises(UsageError, match=re.escape(words)):
                experts(*given)

    def test_errors_of_the_constructor(self):
        gate_up = hb.pack(Weight.stack([Weight.concat(three[:2]) for three in layers()]).torch())
        down = hb.pack(Weight.stack([three[2] for three in layers()]).torch())
        with pytest.raises(UsageError, match="unknown activation: got 'swish', expected silu or gelu or gelu_tanh or"):
            Experts(gate_up, down, activation="swish")
        with pytest.raises(UsageError, match="unknown order of gate and up: got 'mixed'"):
            Experts(gate_up, down, gate_up_order="mixed")
        with pytest.raises(UsageError, match="the limit of gate and up is positive: got 0"):
            Experts(gate_up, down, limit=0)
        with pytest.raises(UsageError, match=re.escape("gate_up does not fit down: got (5, 32, 16)")):
            Experts(down, down)
        with pytest.raises(UsageError, match="Experts hold two stacks"):
            Experts(gate_up.expert(0), down)
        with pytest.raises(UsageError, match="the numbers of the experts do not fit the stacks"):
            Experts(gate_up, down, local=(0, 1), experts=8)
        with pytest.raises(UsageError, match="the numbers of the experts do not ascend within"):
            Experts(gate_up, down, local=(0, 1, 2, 3, 3), experts=8)
        with pytest.raises(UsageError, match=re.escape("bias does not fit N: got (5, 16), expected (5, 32)")):
            Experts(gate_up, down, gate_up_bias=torch.zeros(E, N))
        with pytest.raises(WeightError, match="expert 0 is null in part"):
            Experts.of([(Weight.null((N, H)), *layers()[0][1:])])
        with pytest.raises(WeightError, match="all experts are null: got 1 experts"):
            Experts.of([(Weight.null((N, H)), Weight.null((N, H)), Weight.null((H, N)))])

    def test_no_gradient(self):
        experts, (hidden, indices, routing) = Experts.of(layers()), routed(4)
        for given in (
            (hidden.clone().requires_grad_(), indices, routing),
            (hidden, indices, routing.clone().requires_grad_()),
        ):
            with pytest.raises(UsageError, match="has no gradient"):
                experts(*given).sum().backward()


class TestInAGraph:
    """No synchronisation: the same values, and NaN where nothing can be raised."""

    @pytest.mark.parametrize("tokens", [1, 7], ids=["gathered", "all"])
    @pytest.mark.parametrize("first", [0, 2])
    def test_values(self, tokens, first, graph, monkeypatch):
        many = layers(3 * E + first)
        for e in range(first):
            many[e] = tuple(Weight.null(w.shape) for w in many[e])
        rng = np.random.default_rng(0)
        biases = [rng.integers(-3, 4, (3 * E, n)).astype(np.float32) for n in (2 * N, H)]
        given = routed(tokens, experts=3 * E)
        given = given[0], given[1] + first, given[2]
        gathered = []
        held = Experts.of(many, activation="relu2", gate_up_bias=biases[0], down_bias=biases[1])
        taken = experts_torch._taken
        monkeypatch.setattr(experts_torch, "_taken", lambda *a: gathered.append(1) or taken(*a))
        with graph:
            y = held(*given)
        monkeypatch.undo()
        offset = [np.concatenate([np.zeros((first, b.shape[1]), np.float32), b]) for b in biases]
        expected = meaning(given, layers(3 * E + first), biases=offset)
        assert np.array_equal(y.numpy(), expected)
        assert torch.equal(y, held(*given))
        assert len(gathered) == (2 * TOP if tokens == 1 else 0)

    @pytest.mark.parametrize("padding", [False, True])
    @pytest.mark.parametrize("count", [E, 3 * E], ids=["all", "gathered"])
    def test_what_is_refused_elsewhere_is_nan(self, padding, count, graph, monkeypatch):
        many = layers(count)
        many[0] = tuple(Weight.null(w.shape) for w in many[0])
        held = Experts.of(many, activation="relu2", padding=padding)
        hidden = torch.ones(2, H)
        indices = torch.tensor([[1, -1], [0, 2]])
        with graph:
            y = held(hidden, indices, torch.ones(2, TOP))
        monkeypatch.undo()
        assert y[1].isnan().all()
        assert bool(y[0].isnan().any()) != padding

    @pytest.mark.parametrize("tokens", [1, 7], ids=["gathered", "all"])
    def test_a_call_before_compiles_what_a_graph_needs(self, tokens, monkeypatch):
        """No kernel can be compiled while a graph is captured: those calls are made once, by the shapes of the call."""
        held = Experts.of(layers(3 * E), activation="relu2")
        hidden, indices, routing = routed(tokens, experts=3 * E)
        args = ExpertsArgs(
            hidden=hidden,
            indices=indices,
            weights=routing,
            gate_up=held.gate_up.packed,
            down=held.down.packed,
            gate_up_bias=None,
            down_bias=None,
            mixture=held.mixture,
            out=torch.empty_like(hidden),
        )
        seen = []
        own = experts_torch._product
        monkeypatch.setattr(experts_torch, "_product", lambda x, *a: seen.append(len(x)) or own(x, *a))
        for _ in range(2):
            experts_torch._ready(args)
        assert seen == [tokens] * 2  # of gate_up and of down
        seen.clear()
        experts_torch._in_graph(args)
        assert set(seen) == {tokens}
        seen.clear()
        experts_torch._ready(replace(args, hidden=hidden.bfloat16(), out=hidden.bfloat16()))
        assert seen == [tokens] * 2


class TestAsAModule:
    def test_state_dict_copies_and_meta(self):
        experts, given = Experts.of(layers(), activation="relu2"), routed(5)
        expected = experts(*given)
        for twin in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
            assert torch.equal(twin(*given), expected)
        empty = Experts.empty("rows", E, H, N, activation="relu2")
        assert all(buffer.is_meta for buffer in empty.buffers())
        assert "no kernel: no data yet" in repr(empty)
        assert empty.half().gate_up.scale2.dtype == torch.float32
        empty.to_empty(device="cpu").load_state_dict(experts.state_dict())
        assert empty.gate_up.scale2.shape == (E, 2 * N, 1)  # one for each row, though it was made without
        assert torch.equal(empty(*given), expected)

    def test_repr(self):
        text = repr(Experts.of(layers(), limit=7.0))
        assert (
            "experts=5, hidden=32, intermediate=16, activation=silu, limit=7.0, gate_up=concatenated, layout=rows"
            in text
        )
        assert "(down): Stack(E=5, N=32, K=16, layout=rows, bias=False)" in text

    def test_one_operator_in_a_full_graph(self):
        torch._dynamo.reset()
        experts, given = Experts.of(layers(), activation="relu2"), routed(5)
        run = torch.compile(lambda *a: experts(*a) * 2, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(run(*given), experts(*given) * 2)
            wrong = given[1].clone()
            wrong[0, 0] = E
            with pytest.raises(UsageError, match="ids name no expert"):
                run(given[0], wrong, given[2])

    def test_opcheck(self, monkeypatch):
        experts, given, seen = Experts.of(layers(), limit=7.0, padding=True), routed(3), []
        monkeypatch.setattr(torch_experts, "experts_op", lambda *a: seen.append(a))
        held = [(s._key, s.shape, s.held(), None) for s in (experts.gate_up, experts.down)]
        traced(*given, held, experts.mixture, "exact", None)
        torch.library.opcheck(experts_op, seen[0])


@pytest.mark.gpu
@needs_gpu
@needs_triton
class TestOnAGpu:
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")  # torch's own
    @pytest.mark.parametrize("tokens", [1, 9])
    def test_in_a_cuda_graph(self, tokens):
        rows = [[w.torch("cuda") for w in three] for three in layers(3 * E)]
        experts = Experts.of(rows, "fragments", activation="relu2")
        hidden, indices, routing = (a.cuda() for a in routed(tokens, experts=3 * E))
        hidden = hidden.bfloat16()
        with torch.no_grad():
            expected = experts(hidden, indices, routing)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = experts(hidden, indices, routing)
        graph.replay()
        assert torch.equal(y, expected)
        indices[0, 0] = -1
        graph.replay()
        assert y[0].isnan().all()
        assert not y[1:].isnan().any()
        with pytest.raises(UsageError, match="an id named no expert at slot 0 of the indices in an earlier call"):
            experts(hidden, indices, routing)
