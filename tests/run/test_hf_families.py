"""Families of models, quantized as files and loaded packed: what fuses, whose experts are replaced, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

import halfbyte
from checkpoints import read_json, write_json
from halfbyte.errors import UsageError
from halfbyte.hf import from_pretrained, quantize_model
from halfbyte.hf.fusing import experts_of, experts_refusal, siblings
from halfbyte.nn import Experts, Part
from halfbyte.recipes import quantize
from halfbyte.weight import DenseWeight, to_torch

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
ROUTED: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
GROUPED: dict[str, Any] = ROUTED | {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

FAMILIES: dict[str, tuple[Any, dict[str, Any], set[tuple[str, ...]], int]] = {
    "llama": (tf.LlamaForCausalLM, {}, {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}, 0),
    "mistral": (tf.MistralForCausalLM, {}, {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}, 0),
    "qwen2": (tf.Qwen2ForCausalLM, {}, {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}, 0),
    "qwen3": (tf.Qwen3ForCausalLM, {"head_dim": 16}, {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}, 0),
    "gemma3": (tf.Gemma3ForCausalLM, {"head_dim": 16}, {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}, 0),
    "phi3": (tf.Phi3ForCausalLM, {}, set(), 0),
    "mixtral": (tf.MixtralForCausalLM, {"num_local_experts": 4}, {("q_proj", "k_proj", "v_proj")}, 2),
    "qwen2_moe": (
        tf.Qwen2MoeForCausalLM,
        ROUTED | {"num_experts": 4, "shared_expert_intermediate_size": 32},
        {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")},
        2,
    ),
    "qwen3_moe": (
        tf.Qwen3MoeForCausalLM,
        ROUTED | {"num_experts": 4, "head_dim": 16},
        {("q_proj", "k_proj", "v_proj")},
        2,
    ),
    "olmoe": (tf.OlmoeForCausalLM, {"num_experts": 4, "num_experts_per_tok": 2}, {("q_proj", "k_proj", "v_proj")}, 2),
    "deepseek_v3": (
        tf.DeepseekV3ForCausalLM,
        GROUPED | MLA,
        {("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")},
        1,
    ),
    "glm4_moe": (
        tf.Glm4MoeForCausalLM,
        GROUPED | {"head_dim": 16},
        {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")},
        1,
    ),
    "nemotron_h": (
        tf.NemotronHForCausalLM,
        {
            "layers_block_type": ["mamba", "moe", "attention", "moe"], "head_dim": 16, "moe_intermediate_size": 48,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_shared_expert_intermediate_size": 32, "n_group": 1,
            "topk_group": 1, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1,
            "chunk_size": 16,
        },
        {("q_proj", "k_proj", "v_proj")},
        2,
    ),
    "gpt_oss": (
        tf.GptOssForCausalLM,
        {"num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
        {("q_proj", "k_proj", "v_proj")},
        2,
    ),
    "bert": (tf.BertModel, {"max_position_embeddings": 32}, {("query", "key", "value")}, 0),
    "distilbert": (
        tf.DistilBertModel,
        {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
        {("q_lin", "k_lin", "v_lin")},
        0,
    ),
    "t5": (
        tf.T5EncoderModel,
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu"},
        {("q", "k", "v"), ("wi_0", "wi_1")},
        0,
    ),
    "bart": (
        tf.BartForConditionalGeneration,
        {
            "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "decoder_start_token_id": 1,
        },
        {("q_proj", "k_proj", "v_proj")},
        0,
    ),
}  # fmt: skip
"""Name -> class, its config, the groups that become one product, and how many modules hold experts."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(class, the groups, the number of experts' modules, the quantized directory) of each family."""
    cls, config, groups, experts = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    cls(cls.config_class(**SIZES | config)).eval().save_pretrained(folder / "dense")
    halfbyte.quantize_checkpoint(folder / "dense", folder / "quantized")
    return cls, groups, experts, folder / "quantized"


def output(model):
    with torch.no_grad():
        return model(torch.arange(1, 17)[None] * 5 % 96)[0].double()


def dequantized(cls, path, folder):
    """The dense model of the values of a checkpoint, float32."""
    values = {}
    with halfbyte.open(path) as checkpoint:
        for name, weight in checkpoint.items():
            key = name if isinstance(weight, DenseWeight) else f"{name}.weight"
            values[key] = to_torch(np.array(weight.dequantize()))
    config = read_json(path / "config.json")
    config.pop("quantization_config")
    if cls is tf.GptOssForCausalLM:
        values = restacked(values, config)
    folder.mkdir()
    write_json(folder / "config.json", config)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    return cls.from_pretrained(folder, dtype="float32")


def restacked(values, config):
    """The experts of gpt-oss as transformers has them: (E, K, N), and gate and up in turns."""
    for layer in range(config["num_hidden_layers"]):
        parent = f"model.layers.{layer}.mlp.experts"
        for end, stored in (("", "weight"), ("_bias", "bias")):
            found = {
                part: torch.stack([values.pop(f"{parent}.{e}.{part}.{stored}") for e in range(4)])
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            both = torch.stack([found["gate_proj"], found["up_proj"]], 2).flatten(1, 2)
            for name, stack in (("gate_up_proj", both), ("down_proj", found["down_proj"])):
                values[f"{parent}.{name}{end}"] = stack if end else stack.mT.contiguous()
    return values


def test_computes_what_its_dense_values_do(family, tmp_path):
    """In float32, in which the values are exact, the order of sums differs. Some tens of them follow each other, of up
    to 96 products, each within 96 * 2^-24 of its magnitudes; errors of random sign stay below their sum."""
    cls, _, _, path = family
    model, dense = from_pretrained(path, dtype="float32"), output(dequantized(cls, path, tmp_path / "dense"))
    assert type(model) is cls
    difference = torch.linalg.norm(output(model) - dense) / torch.linalg.norm(dense)
    assert 0 < difference < 20 * 96 * 2.0**-24


def test_groups_and_experts(family):
    _, groups, experts, path = family
    model = from_pretrained(path)
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, Part) and module.index == 0:
            parent = model.get_submodule(name.rpartition(".")[0])
            parts = [n for n, m in parent.named_children() if isinstance(m, Part) and m.group is module.group]
            found.add(tuple(parts))
    assert {frozenset(group) for group in found} == {frozenset(group) for group in groups}
    assert sum(isinstance(module, Experts) for module in model.modules()) == experts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_of_it_has_the_dtype_that_was_asked_for(dtype, family):
    """Also what transformers renames; its own list of what stays float32 apart."""
    cls, _, _, path = family
    model = from_pretrained(path, dtype=dtype)
    kept = tuple(f"{name}." for name in model._get_dtype_plan(dtype))
    assert {p.dtype for n, p in model.named_parameters() if not any(k in f"{n}." for k in kept)} == {dtype}
    assert torch.isfinite(output(model)).all()
    assert type(model) is cls


def test_saved_again_it_is_the_same(family, tmp_path):
    _, _, _, path = family
    from_pretrained(path).save_pretrained(tmp_path / "again")
    assert halfbyte.diff(path, tmp_path / "again").ok


def test_layers_of_different_inputs_stay_apart():
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    attention = [f"decoder.layers.0.{name}" for name in names]
    cross = [name.replace("self_attn", "encoder_attn") for name in attention]
    assert list(siblings([*cross, *attention, "mlp.gate_proj", "x.up_proj"])) == [tuple(attention)]
    assert list(siblings(["up_proj", "gate_proj"])) == [("gate_proj", "up_proj")]


class Clamped:
    """A gate as that of DeepSeek-V4."""

    def _apply_gate(self, both):
        gate, up = both.chunk(2, -1)
        return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class Turned(Clamped):
    """As that of gpt-oss."""

    def _apply_gate(self, both):
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)


class Cubed(Clamped):
    def _apply_gate(self, both):
        gate, up = both.chunk(2, -1)
        return gate**3 * up


class Normed(Clamped):
    has_post_expert_norm = True


@pytest.mark.parametrize("limit", [7.0, 100.0])
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Clamped, {"activation": "silu", "limit": 7.0}),
        (Turned, {"activation": "swigluoai", "limit": 7.0}),
        (Cubed, "Cubed has a gate of its own that is not known"),
        (Normed, "Normed normalizes the results of its experts"),
    ],
)
def test_gates_are_known_by_what_they_do(kind, found, limit):
    old = kind()
    old.gate_up_proj, old.down_proj, old.num_experts, old.limit = (
        torch.empty(2, 64, 32),
        torch.empty(2, 32, 32),
        2,
        limit,
    )
    assert experts_refusal(old) == (found if isinstance(found, str) else None)
    if not isinstance(found, str):
        weights = [
            halfbyte.Weight.stack([quantize(one) for one in torch.randn(2, *size)]) for size in ((64, 32), (32, 32))
        ]
        made = experts_of(old, *(halfbyte.pack(weight) for weight in weights))
        assert (made.mixture.activation, made.mixture.limit) == (found["activation"], limit)


def test_dense_stacks_that_lie_otherwise_are_not_quantized_in_place():
    config = tf.GptOssConfig(**SIZES | {"num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2})
    model = tf.GptOssForCausalLM(config)
    report = quantize_model(model)
    assert dict(report.skipped)["model.layers.0.mlp.experts"] == "GptOssExperts has has_bias=True"


def test_an_embedding_with_a_forward_of_its_own_is_refused(tmp_path):
    config = tf.Gemma3TextConfig(**SIZES | {"head_dim": 16})
    tf.Gemma3ForCausalLM(config).save_pretrained(tmp_path / "dense")
    halfbyte.quantize_checkpoint(tmp_path / "dense", tmp_path / "a", targets=["*embed_tokens"])
    text = r"model\.embed_tokens\.weight: .*: got Gemma3TextScaledWordEmbedding"
    with pytest.raises(UsageError, match=text):
        from_pretrained(tmp_path / "a")


VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_blocks_that_initialize_their_layers_by_name(tmp_path):
    """transformers has them do so before the layers are there."""
    config = tf.SiglipVisionConfig(**VISION | {"image_size": 16, "patch_size": 8})
    tf.SiglipVisionModel(config).save_pretrained(tmp_path / "dense")
    halfbyte.quantize_checkpoint(tmp_path / "dense", tmp_path / "all")
    with pytest.raises(UsageError, match=r"head\.attention\.out_proj\.weight: .*: got NonDynamicallyQuantizableLinear"):
        from_pretrained(tmp_path / "all")
    halfbyte.quantize_checkpoint(tmp_path / "dense", tmp_path / "a", ignore=["*head.attention.out_proj"])
    from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "again")
    assert halfbyte.diff(tmp_path / "a", tmp_path / "again").ok
