"""Models of transformers loaded over 2 and 4 ranks, each of which reads its part of the checkpoint alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

import halfbyte as hb
import halfbyte.hf
import hf_models
import rank_cases as cases
from halfbyte.errors import UsageError
from ranks import Failed, Pool

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]
NEW = 5
BOTH = pytest.mark.parametrize("ranks", [2, 4])


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def checkpoint(folder, name, tag="", **changes):
    """A checkpoint of a small model, and what one process makes of it: logits, and the greedy text."""
    path = folder / f"{name}{tag}"
    if not path.exists():
        model = hf_models.build(name, torch.float32, **changes)
        halfbyte.hf.quantize_model(model)
        model.save_pretrained(path)
    whole = halfbyte.hf.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = whole(torch.tensor(PROMPTS)).logits.numpy()
    return path, logits, hb.generate(whole, PROMPTS, max_new_tokens=NEW).tokens, whole


def answers(pool, ranks, path, **options):
    found = pool.run(cases.loaded, ranks, str(path), PROMPTS, NEW, {"dtype": torch.float32} | options)
    wrong = [one for one in found if isinstance(one, Failed)]
    assert not wrong, wrong[0]
    return found


def codes_of(model):
    """Bytes of codes and block scales of each module."""
    return {
        name: sum(module.held()[part].nbytes for part in ("codes", "scales"))
        for name, module in model.named_modules()
        if hasattr(module, "held")
    }


@BOTH
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_dense_model_gives_the_same_text_on_every_rank(pool, folder, ranks, name):
    path, logits, text, whole = checkpoint(
        folder, name, "-8", num_attention_heads=8, num_key_value_heads=4, head_dim=16
    )
    found = answers(pool, ranks, path)
    first = found[0]
    np.testing.assert_allclose(first[0], logits, rtol=0, atol=1e-5)
    for other in found:
        np.testing.assert_array_equal(other[0], first[0])
        assert other[1] == text
        assert other[2] == first[2]  # drawn with one seed
        assert "fused steps" in other[6]
    assert first[4]["model.layers.0.self_attn.o_proj"] == "RowLinear"
    assert first[4]["model.layers.0.mlp.down_proj"] == "RowLinear"
    assert first[4]["model.layers.0.self_attn.q_proj"] == "Part"
    assert first[4]["lm_head"] == "GatheredDense"
    held = sum(codes_of(whole).values())
    dense = whole.lm_head.weight.nbytes // ranks
    for other in found:
        small = 4 * 7 * 2 * 2 + (4 * (4 * 8 * 16 + 64) if name == "qwen2" else 0)  # scale2 and input scales, biases
        assert held // ranks + dense <= other[3] - other[7] <= held // ranks + dense + small


def test_heads_of_keys_are_copied_where_they_are_fewer_than_ranks(pool, folder):
    path, logits, text, _ = checkpoint(folder, "llama", head_dim=16)
    for other in answers(pool, 4, path):
        np.testing.assert_allclose(other[0], logits, rtol=0, atol=1e-5)
        assert other[1] == text


@BOTH
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dealt", [False, True], ids=["columns", "experts"])
def test_experts_are_dealt_whole_or_by_columns(pool, folder, ranks, name, dealt):
    path, logits, text, whole = checkpoint(
        folder,
        name,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        **({"moe_intermediate_size": 64} if name == "qwen3_moe" else {}),
    )
    found = answers(pool, ranks, path, expert_parallel=dealt)
    held = sum(codes_of(whole).values())
    dense = whole.lm_head.weight.nbytes // ranks
    for other in found:
        np.testing.assert_allclose(other[0], logits, rtol=0, atol=1e-5)
        assert other[1] == text
        assert other[4]["model.layers.0.mlp.experts"] == "RankExperts"
        assert held // ranks + dense <= other[3] - other[7] <= held // ranks + dense + 1200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
            "model.layers.0.self_attn.q_proj: the number of heads = 6 does not split over 4 ranks",
        ),
        (
            {"intermediate_size": 96},
            "mlp.down_proj: K = 96 does not split over 4 ranks in multiples of 16",
        ),
    ],
)
def test_what_does_not_split_is_refused_on_every_rank(pool, folder, changes, message):
    path, *_ = checkpoint(folder, "llama", f"-{len(message)}", **changes)
    found = pool.run(cases.loaded, 4, str(path), PROMPTS, NEW, {"dtype": torch.float32})
    assert all(isinstance(one, Failed) and message in one for one in found), found


def test_a_class_without_a_plan_is_refused(pool, folder):
    model = hf_models.build("bert", torch.float32)
    halfbyte.hf.quantize_model(model)
    model.save_pretrained(folder / "bert")
    found = pool.run(cases.loaded, 2, str(folder / "bert"), PROMPTS, NEW, {"dtype": torch.float32})
    assert all("transformers has no tensor-parallel plan for this class" in one for one in found), found


def test_a_class_whose_plan_leaves_all_whole_is_refused(pool, folder):
    model = Phi3ForCausalLM(Phi3Config(**hf_models.SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}))
    halfbyte.hf.quantize_model(model)
    model.save_pretrained(folder / "phi3")
    found = pool.run(cases.loaded, 2, str(folder / "phi3"), PROMPTS, NEW, {"dtype": torch.float32})
    text = "UsageError: transformers' tensor-parallel plan for this class leaves all layers whole: got Phi3ForCausalLM"
    assert all(one == text for one in found), found


def test_options_that_cannot_be_meant(folder):
    path, *_ = checkpoint(folder, "llama", head_dim=16)
    with pytest.raises(UsageError, match="experts are dealt to the ranks of a mesh"):
        halfbyte.hf.from_pretrained(path, expert_parallel=True)
    with pytest.raises(UsageError, match="a mesh tells the device of each rank"):
        halfbyte.hf.from_pretrained(path, mesh=object(), device_map="cpu")
    with pytest.raises(UsageError, match=r"this is no mesh: got int; pass what halfbyte\.parallel\.start gives"):
        halfbyte.hf.from_pretrained(path, mesh=2)


def test_experts_of_a_model_without_any_are_not_dealt(pool, folder):
    path, *_ = checkpoint(folder, "llama", head_dim=16)
    found = pool.run(cases.loaded, 2, str(path), PROMPTS, NEW, {"dtype": torch.float32, "expert_parallel": True})
    text = "UsageError: there are no NVFP4 experts to deal to the ranks; leave expert_parallel out"
    assert all(one == text for one in found), found


def test_a_split_model_is_neither_quantized_nor_saved(pool, folder):
    path, *_ = checkpoint(folder, "llama", head_dim=16)
    found = pool.run(cases.quantized, 2, str(path))
    assert all(one.startswith("UsageError: the model is split over ranks; quantize it whole") for one in found), found
    found = pool.run(cases.saved, 2, str(path), str(folder / "again"))
    assert all("this layer is split over ranks, so it has no whole weight" in one for one in found), found
    assert not (folder / "again").exists()


def test_ranks_that_are_asked_for_different_texts_are_told(pool, folder):
    path, *_ = checkpoint(folder, "llama", head_dim=16)
    found = pool.run(cases.other_texts, 2, str(path))
    assert all(one == "UsageError: what is to be generated of the ranks differ: got others on rank 1" for one in found)
