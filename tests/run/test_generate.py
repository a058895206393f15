"""Texts: those of transformers, token for token; stops, streams, sampling, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import halfbyte
from decoder_models import FAMILIES, VOCABULARY, ids, swap, theirs, tiny
from halfbyte.decoder import Decoder, generate
from halfbyte.decoder.sampling import Sampling
from halfbyte.errors import UsageError

NEW = 24


class TestGreedy:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_each_family_says_what_transformers_says(self, family):
        model, prompts = tiny(family), ids(2, 11).tolist()
        got = generate(model, prompts, max_new_tokens=NEW)
        assert got.tokens == [theirs(model, prompt, NEW) for prompt in prompts]
        assert len({*got.tokens[0]}) > 5
        assert "fused steps on the CPU" in got.how

    @pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "qwen3_moe"])
    def test_a_sliding_window(self, family):
        model = tiny(family, sliding_window=6, use_sliding_window=True, max_window_layers=1)
        prompts = [ids(11).tolist(), ids(3, seed=1).tolist()]
        got = generate(model, prompts, max_new_tokens=NEW)
        assert got.tokens == [theirs(model, prompt, NEW) for prompt in prompts]

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "factor": 4.0},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ],
        ids=lambda rope: rope["rope_type"],
    )
    def test_scaled_rotations(self, rope):
        model = tiny("llama", rope_parameters={"rope_theta": 1e4} | rope)
        prompt = ids(40).tolist()
        assert generate(model, [prompt], max_new_tokens=NEW).tokens == [theirs(model, prompt, NEW)]

    def test_prompts_of_several_lengths(self):
        model = tiny("llama")
        prompts = [ids(length, seed=length).tolist() for length in (7, 1, 30, 7, 12)]
        got = generate(model, prompts, max_new_tokens=NEW)
        assert got.tokens == [theirs(model, prompt, NEW) for prompt in prompts]

    def test_one_token_from_one_token(self):
        model = tiny("llama")
        got = generate(model, [[5]], max_new_tokens=1)
        assert got.tokens == [theirs(model, [5], 1)]
        assert (got.steps, got.tokens_per_second) == (0, 0.0)

    def test_all_positions_of_the_model(self):
        model = tiny("llama", max_position_embeddings=32)
        prompt = ids(20).tolist()
        assert generate(model, [prompt], max_new_tokens=13).tokens == [theirs(model, prompt, 13)]
        with pytest.raises(UsageError, match="more positions than the model has: got 33, expected at most 32"):
            generate(model, [prompt], max_new_tokens=14)

    @pytest.mark.parametrize("fuse", [False, True], ids=["apart", "fused"])
    def test_nvfp4(self, fuse):
        model, prompt = swap(tiny("llama"), fuse=fuse), ids(9).tolist()
        assert generate(model, [prompt], max_new_tokens=NEW).tokens == [theirs(model, prompt, NEW)]

    def test_it_is_a_public_name(self):
        assert halfbyte.generate is generate


class TestStop:
    def test_each_prompt_ends_with_its_stop(self):
        model, prompts = tiny("llama"), ids(3, 11).tolist()
        whole = generate(model, prompts, max_new_tokens=NEW).tokens
        stop = {whole[0][4], whole[1][9]}

        def cut(tokens):
            ends = [i for i, token in enumerate(tokens) if token in stop]
            return tokens[: ends[0] + 1] if ends else tokens

        got = generate(model, prompts, max_new_tokens=NEW, stop=stop)
        assert got.tokens == [cut(tokens) for tokens in whole]
        assert len(got.tokens[0]) <= 5

    def test_no_step_is_taken_when_all_have_stopped(self):
        model, prompts = tiny("llama"), ids(2, 11).tolist()
        first = {tokens[0] for tokens in generate(model, prompts, max_new_tokens=1).tokens}
        got = generate(model, prompts, max_new_tokens=NEW, stop=first)
        assert [len(tokens) for tokens in got.tokens] == [1, 1]
        assert got.steps == 0

    def test_tokens_are_streamed_as_they_come(self):
        model, seen = tiny("llama"), []
        got = generate(model, ids(2, 11), max_new_tokens=5, stream=lambda i, token: seen.append((i, token)))
        assert seen == [(i, got.tokens[i][at]) for at in range(5) for i in range(2)]


class TestSampling:
    def test_a_seed_gives_the_same_text(self):
        model, prompts = tiny("llama"), ids(2, 11)
        drawn = [generate(model, prompts, max_new_tokens=NEW, temperature=2.0, seed=seed).tokens for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        torch.manual_seed(5)
        first = generate(model, prompts, max_new_tokens=NEW, temperature=2.0).tokens
        assert generate(model, prompts, max_new_tokens=NEW, temperature=2.0).tokens != first
        torch.manual_seed(5)
        assert generate(model, prompts, max_new_tokens=NEW, temperature=2.0).tokens == first

    def test_the_best_of_one_is_greedy(self):
        model, prompts = tiny("llama"), ids(2, 11)
        greedy = generate(model, prompts, max_new_tokens=NEW).tokens
        assert generate(model, prompts, max_new_tokens=NEW, temperature=3.0, top_k=1).tokens == greedy
        assert generate(model, prompts, max_new_tokens=NEW, temperature=3.0, top_p=1e-9).tokens == greedy

    @pytest.mark.parametrize(
        ("sampling", "expected"),
        [
            (Sampling(1.0), [0.1, 0.4, 0.2, 0.3]),
            (Sampling(0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
            (Sampling(1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]),
            (Sampling(1.0, top_k=9), [0.1, 0.4, 0.2, 0.3]),
            (Sampling(1.0, top_p=0.65), [0, 4 / 7, 0, 3 / 7]),
            (Sampling(1.0, top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
            (Sampling(1.0, top_k=3, top_p=0.7), [0, 4 / 7, 0, 3 / 7]),
            (Sampling(1.0, top_p=1.0), [0.1, 0.4, 0.2, 0.3]),
        ],
        ids=str,
    )
    def test_tokens_come_as_often_as_they_are_probable(self, sampling, expected):
        draws = 20000
        logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(draws, 4)
        out = torch.empty(draws, dtype=torch.int64)
        sampling.choose(logits, torch.Generator().manual_seed(0), out)
        share = out.bincount(minlength=4) / draws
        assert (share - torch.tensor(expected)).abs().max() < 0.015  # four standard deviations
        assert all(got == 0 for got, chance in zip(share.tolist(), expected, strict=True) if chance == 0)

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ({"temperature": -1.0}, "temperature is a number from 0 on: got -1.0"),
            ({"temperature": float("nan")}, "temperature is a number from 0 on: got nan"),
            ({"top_k": 0}, "top_k is a number from 1 on: got 0"),
            ({"top_p": 0.0}, "top_p is above 0 and at most 1: got 0.0"),
            ({"top_p": 1.5}, "top_p is above 0 and at most 1: got 1.5"),
            ({"top_k": 2.5}, "top_k is not a number that it can be: got 2.5"),
            ({"temperature": "1"}, "temperature is not a number that it can be: got '1'"),
            ({"seed": 1.5}, "seed is not a whole number: got 1.5"),
            ({"stop": ["1"]}, "a token of stop is not a whole number: got '1'"),
            ({"stop": 1}, "stop is a sequence of tokens: got 1"),
            ({"max_new_tokens": 2.5}, "max_new_tokens is not a whole number: got 2.5"),
        ],
    )
    def test_refused(self, wrong, says):
        with pytest.raises(UsageError, match=says):
            generate(tiny("llama"), [[1]], **{"max_new_tokens": 2} | wrong)


class TestKept:
    def test_a_cache_serves_again_and_two_are_kept(self):
        model = tiny("llama")
        runners = Decoder.of(model).runners
        generate(model, ids(1, 11), max_new_tokens=NEW)
        (first,) = runners.values()
        generate(model, ids(1, 20), max_new_tokens=NEW)
        assert [*runners.values()] == [first]
        generate(model, ids(2, 11), max_new_tokens=NEW)
        assert generate(model, ids(1, 100), max_new_tokens=NEW).memory == 4 * (
            3 * 2 * 2 * 128 * 16 + 2 * 128 * 16
        ) + 8 * (128 + 1 + 2)
        assert len(runners) == 2
        assert first not in runners.values()

    def test_what_a_longer_text_left_is_not_seen(self):
        model, prompt = tiny("llama"), ids(3).tolist()
        generate(model, ids(1, 30), max_new_tokens=NEW)
        assert generate(model, [prompt], max_new_tokens=NEW).tokens == [theirs(model, prompt, NEW)]

    def test_a_call_from_within_another_changes_nothing(self):
        model, prompts = tiny("llama"), [ids(5, seed=seed).tolist() for seed in range(2)]
        wanted = [generate(model, [prompt], max_new_tokens=NEW).tokens for prompt in prompts]
        inner = []
        outer = generate(
            model,
            prompts[:1],
            max_new_tokens=NEW,
            stream=lambda row, token: inner.append(generate(model, prompts[1:], max_new_tokens=NEW).tokens),
        )
        assert outer.tokens == wanted[0]
        assert inner == [wanted[1]] * NEW

    def test_threads_do_not_share_a_cache(self):
        model, prompts = swap(tiny("llama"), fuse=True), [ids(5, seed=seed).tolist() for seed in range(4)]
        wanted = [generate(model, [prompt], max_new_tokens=NEW).tokens for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            got = pool.map(lambda prompt: generate(model, [prompt], max_new_tokens=NEW).tokens, prompts)
            assert [*got] == wanted
        assert len(Decoder.of(model).runners) <= 2

    def test_a_stream_that_raises_does_no_harm(self):
        def stream(row, token):
            raise RuntimeError("enough")

        model, prompt = tiny("llama"), ids(5).tolist()
        with pytest.raises(RuntimeError, match="enough"):
            generate(model, [prompt], max_new_tokens=NEW, stream=stream)
        assert generate(model, [prompt], max_new_tokens=NEW).tokens == [theirs(model, prompt, NEW)]

    def test_a_cache_made_in_inference_mode_serves_outside(self):
        model, prompt = tiny("llama"), ids(5).tolist()
        with torch.inference_mode():
            inside = generate(model, [prompt], max_new_tokens=NEW).tokens
        assert generate(model, [prompt], max_new_tokens=NEW).tokens == inside == [theirs(model, prompt, NEW)]


class TestWhole:
    """Models that are not taken apart."""

    @pytest.mark.parametrize(
        ("family", "fields", "why"),
        [
            ("gemma", {"head_dim": 16}, "its class is none of"),
            ("llama", {"hidden_act": "relu"}, "the activation relu"),
            (
                "llama",
                {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
                "rope type dynamic",
            ),
        ],
    )
    def test_the_same_text_and_the_reason(self, family, fields, why):
        model = tiny(family, **fields)
        prompts = [ids(length, seed=length).tolist() for length in (7, 12, 7)]
        got = generate(model, prompts, max_new_tokens=NEW)
        assert got.tokens == [theirs(model, prompt, NEW) for prompt in prompts]
        assert got.how.startswith(f"{type(model).__name__}: transformers' own forward with a static cache, because")
        assert why in got.how
        assert got.bytes_per_step is None
        assert got.steps == 2 * (NEW - 1)
        stopped = generate(model, prompts, max_new_tokens=NEW, stop={got.tokens[0][3]})
        assert len(stopped.tokens[0]) <= 4

    def test_no_graph(self):
        with pytest.raises(UsageError, match="no CUDA graph holds this model's step: got its class is none of"):
            generate(tiny("gemma", head_dim=16), [[1]], max_new_tokens=2, graph=True)


class TestRefused:
    @pytest.mark.parametrize(
        ("prompts", "new", "says"),
        [
            ([], 2, "at least one token"),
            ([[1], []], 2, "at least one token"),
            ([[1]], 0, "max_new_tokens is a number from 1 on: got 0"),
            ([[1, 2], [3, VOCABULARY]], 2, r"no token has this number at \[1, 1\]: got 97, expected 0..96"),
            ([[-1]], 2, r"no token has this number at \[0, 0\]: got -1"),
            (["12"], 2, "a prompt is a sequence of tokens: got '12'"),
            ("12", 2, "prompts are sequences of tokens, one for each text: got '12'"),
            ([1, 2], 2, "a prompt is a sequence of tokens: got 1"),
            ([[1.5]], 2, "a token of a prompt is not a whole number: got 1.5"),
            (torch.tensor([1, 2]), 2, "a prompt is a sequence of tokens: got 1"),
        ],
    )
    def test_prompts(self, prompts, new, says):
        with pytest.raises(UsageError, match=says):
            generate(tiny("llama"), prompts, max_new_tokens=new)

    def test_models_that_do_not_continue_texts(self):
        for model in (tiny("llama").model, torch.nn.Linear(2, 2)):
            with pytest.raises(UsageError, match=f"does not continue texts: got {type(model).__name__}"):
                generate(model, [[1]], max_new_tokens=2)

    @pytest.mark.parametrize("kind", [list, torch.tensor, np.array, set])
    def test_stop_tokens_of_each_kind_stop(self, kind):
        model, prompt = tiny("llama"), ids(5).tolist()
        text = generate(model, [prompt], max_new_tokens=NEW).tokens[0]
        assert generate(model, [prompt], max_new_tokens=NEW, stop=kind([text[2]])).tokens[0] == text[:3]

    def test_a_graph_on_a_cpu(self):
        with pytest.raises(UsageError, match="a CUDA graph needs a model on a GPU: got cpu"):
            generate(tiny("llama"), [[1]], max_new_tokens=2, graph=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
class TestGraph:
    def test_greedy(self, family):
        model = swap(tiny(family, dtype=torch.bfloat16), fuse=True).cuda()
        prompts = [ids(length, seed=length).tolist() for length in (7, 1, 30)]
        eager = generate(model, prompts, max_new_tokens=NEW, graph=False)
        held = generate(model, prompts, max_new_tokens=NEW, graph=True)
        assert held.tokens == eager.tokens == generate(model, prompts, max_new_tokens=NEW).tokens
        assert "in a CUDA graph" in held.how
        stopped = generate(model, prompts, max_new_tokens=NEW, stop={held.tokens[0][3]})
        assert len(stopped.tokens[0]) <= 4

    def test_sampled(self, family):
        model, prompts = tiny(family, dtype=torch.bfloat16).cuda(), ids(2, 11)
        drawn = [
            generate(
                model, prompts, max_new_tokens=NEW, temperature=2.0, top_k=9, top_p=0.9, seed=seed, graph=graph
            ).tokens
            for seed, graph in ((1, False), (1, True), (1, True), (2, True))
        ]
        assert drawn[0] == drawn[1] == drawn[2] != drawn[3]
