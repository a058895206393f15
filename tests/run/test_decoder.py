"""Models taken apart: what becomes of each family, what one step computes, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from decoder_models import FAMILIES, ids, swap, tiny
from halfbyte import nn
from halfbyte.decoder import Decoder, product
from halfbyte.decoder.step import State, logits_of
from halfbyte.errors import UsageError


def stepped(decoder, tokens, **options):
    """Logits (B, L, V) of tokens (B, L), step by step from an empty cache."""
    batch, length = tokens.shape
    state, found = State.empty(decoder, batch, 64, **options), []
    for i in range(length):
        state.tokens.copy_(tokens[:, i])
        state.positions.fill_(i)
        found.append(logits_of(decoder, state))
    return torch.stack(found, 1)


@pytest.mark.parametrize("family", FAMILIES)
class TestSteps:
    def test_logits_are_those_of_the_model(self, family):
        model, tokens = tiny(family), ids(2, 9)
        with torch.no_grad():
            expected = model(tokens).logits
            got = stepped(Decoder.of(model), tokens)
        assert expected.std() > 1
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("fuse", [False, True], ids=["apart", "fused"])
    def test_nvfp4_layers(self, family, fuse):
        model, tokens = swap(tiny(family), fuse=fuse), ids(2, 9)
        with torch.no_grad():
            expected = model(tokens).logits
            got = stepped(Decoder.of(model), tokens)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    def test_bfloat16(self, family):
        model, tokens = tiny(family, dtype=torch.bfloat16), ids(2, 9)
        with torch.no_grad():
            expected = model(tokens).logits.float()
            got = stepped(Decoder.of(model), tokens)
        assert got.dtype == torch.bfloat16
        close = (got.float() - expected).norm() / expected.norm()
        assert close < (0.3 if family in ("qwen3_moe", "mixtral") else 0.03)  # another expert may be chosen


def test_a_window_hides_what_is_before_it():
    model, tokens = tiny("mistral", sliding_window=4), ids(2, 9)
    with torch.no_grad():
        expected = model(tokens).logits
        torch.testing.assert_close(stepped(Decoder.of(model), tokens), expected, rtol=1e-4, atol=1e-4)
        wide = model(tokens[:, -4:]).logits
    assert not torch.allclose(wide[:, -1], expected[:, -1], rtol=1e-2, atol=1e-2)  # deeper layers see farther


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_run_with_route(family, monkeypatch):
    """The routers of transformers are not called; those of dense experts are."""
    model, tokens = tiny(family), ids(2, 5)
    router = type(model.model.layers[0].mlp.gate)
    calls, own = [], router.forward
    monkeypatch.setattr(router, "forward", lambda self, x: calls.append(1) or own(self, x))
    with torch.no_grad():
        stepped(Decoder.of(model), tokens)
        assert len(calls) == 3 * 5
        calls.clear()
        stepped(Decoder.of(swap(model, fuse=True)), tokens)
    assert not calls


def test_what_is_taken():
    decoder = Decoder.of(
        tiny("qwen3", num_hidden_layers=2, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    )
    assert (decoder.heads, decoder.kv_heads, decoder.dim, decoder.scale) == (4, 2, 32, 32**-0.5)
    assert [layer.window for layer in decoder.layers] == [None, 5]
    assert decoder.layers[0].q_norm is not None
    assert decoder.activation == "silu"
    assert decoder.longest == 256


class TestKept:
    def test_it_is_kept_with_the_model(self):
        model = tiny("llama")
        assert Decoder.of(model) is Decoder.of(model)
        assert Decoder.of(copy.deepcopy(model)) is not Decoder.of(model)

    def test_it_is_made_anew_when_a_module_was_replaced(self):
        model, tokens = tiny("llama"), ids(1, 5)
        before = Decoder.of(model)
        swap(model, fuse=True)
        assert Decoder.of(model) is not before
        with torch.no_grad():
            expected = model(tokens).logits
            torch.testing.assert_close(stepped(Decoder.of(model), tokens), expected, rtol=1e-4, atol=1e-4)

    def test_it_is_made_anew_when_tensors_moved(self):
        model = tiny("llama")
        before = Decoder.of(model)
        assert Decoder.of(model.bfloat16()).dtype == torch.bfloat16
        assert Decoder.of(model) is not before

    def test_it_does_not_hold_the_model(self):
        import gc
        import weakref

        model = tiny("llama")
        Decoder.of(model)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


class TestFuseDense:
    @pytest.mark.parametrize("family", ["llama", "qwen2"])
    def test_parameters_become_views_with_the_same_values(self, family):
        model, tokens = tiny(family), ids(2, 5)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        decoder = Decoder.of(model, fuse_dense=True)
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        for modules in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
            assert len({module.weight.untyped_storage().data_ptr() for module in modules}) == 1
        with torch.no_grad():
            torch.testing.assert_close(stepped(decoder, tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
        assert Decoder.of(model, fuse_dense=True) is decoder
        assert Decoder.of(model) is decoder

    def test_each_is_one_product(self, monkeypatch):

        rows = []

        def linear(x, weight, bias):
            rows.append(weight.shape[0])
            return torch.nn.functional.linear(x, weight, bias)

        monkeypatch.setattr(product, "dense", linear)
        model = tiny("llama", num_hidden_layers=1)
        with torch.no_grad():
            stepped(Decoder.of(model), ids(1, 1))
            assert rows == [64, 32, 32, 64, 96, 96, 64, 97]
            rows.clear()
            stepped(Decoder.of(model, fuse_dense=True), ids(1, 1))
        assert rows == [128, 64, 192, 64, 97]


class TestBytes:
    def test_dense(self):
        model = tiny("llama", num_hidden_layers=2)
        layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
        weights = 4 * (2 * layer + 64 + 97 * 64)
        cache = 2 * 2 * 2 * 16 * 4  # layers, keys and values, Hkv, D, float32
        assert Decoder.of(model).bytes_per_step(1, 10) == weights + 4 * 64 + 10 * cache
        assert Decoder.of(model).bytes_per_step(3, 10) == weights + 3 * (4 * 64 + 10 * cache)

    def test_tied_weights_count_as_head_and_as_rows(self):
        tied, apart = (Decoder.of(tiny("llama", tie_word_embeddings=tie)) for tie in (True, False))
        assert tied.bytes_per_step(1, 1) == apart.bytes_per_step(1, 1)

    @pytest.mark.parametrize("fuse", [False, True], ids=["apart", "fused"])
    def test_packed_weights_count_as_they_lie(self, fuse):
        model = tiny("llama", num_hidden_layers=1)
        dense = Decoder.of(model).bytes_per_step(1, 1)
        values = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
        got = Decoder.of(swap(model, fuse=fuse)).bytes_per_step(1, 1)
        scale2 = sum(
            b.nbytes for m in model.modules() if isinstance(m, nn.Linear) for n, b in m.named_buffers() if n == "scale2"
        )
        assert got == dense - 4 * values + values * 9 // 16 + scale2

    def test_a_window_ends_what_is_read_of_the_cache(self):
        decoder = Decoder.of(tiny("mistral", sliding_window=4))
        assert decoder.bytes_per_step(1, 4) == decoder.bytes_per_step(1, 100)

    def test_experts_that_can_be_chosen(self):
        decoder = Decoder.of(tiny("qwen3_moe", num_hidden_layers=1))
        expert = 4 * 3 * 64 * 32
        cache = 2 * 2 * 32 * 4 + 4 * 64  # and the embedding's row
        one, two, three = (decoder.bytes_per_step(batch, 1) - batch * cache for batch in (1, 2, 3))
        assert two - one == 2 * expert  # of 4, each token chooses 2
        assert three == two


class TestRefused:
    @pytest.mark.parametrize(
        ("model", "why"),
        [
            (lambda: tiny("gemma", head_dim=16), "its class is none of LlamaForCausalLM"),
            (lambda: Mine(tiny("llama").config), "its class is none of"),
            (
                lambda: tiny("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
                "rope type dynamic",
            ),
            (lambda: tiny("llama", hidden_act="relu"), "activation relu is none of silu"),
            (lambda: hooked(tiny("llama")), "model.layers.0.mlp has hooks"),
            (lambda: tiny("llama", attention_dropout=0.1).train(), "dropout; call model.eval()"),
            (lambda: tiny("llama").to("meta"), "tensors lie on meta"),
        ],
    )
    def test_with_the_reason(self, model, why):
        with pytest.raises(UsageError, match="cannot be taken apart") as caught:
            Decoder.of(model())
        assert why in str(caught.value)


class Mine(LlamaForCausalLM):
    """May compute anything."""


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    return model
