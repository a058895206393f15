"""Small transformers models with random weights, of the kinds that differ in how their weights lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def llama(**changes: Any) -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES | {"num_key_value_heads": 2} | changes))


def qwen2(**changes: Any) -> Any:
    """With biases of q, k and v."""
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES | {"num_key_value_heads": 2} | changes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def qwen3_moe(**changes: Any) -> Any:
    """Its experts are two parameters for each layer; checkpoints have them one by one."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**SIZES | {"num_key_value_heads": 2} | moe | changes))


def mixtral(**changes: Any) -> Any:
    """The same, and checkpoints name the layers otherwise."""
    config = tf.MixtralConfig(**SIZES | {"num_key_value_heads": 2, "num_local_experts": 4} | changes)
    return tf.MixtralForCausalLM(config)


def bert(**changes: Any) -> Any:
    """An encoder."""
    return tf.BertModel(tf.BertConfig(**SIZES | changes))


def bert_mlm(**changes: Any) -> Any:
    """Its decoder is tied to the embedding and has a bias."""
    return tf.BertForMaskedLM(tf.BertConfig(**SIZES | changes))


def llava(**changes: Any) -> Any:
    """Two models in one, which checkpoints name otherwise."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = tf.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = tf.LlamaConfig(**SIZES, num_key_value_heads=2)
    config = tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=95, **changes)
    return tf.LlavaForConditionalGeneration(config)


MODELS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (llama, qwen2, qwen3_moe, mixtral, bert, bert_mlm, llava)
}


def build(name: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any) -> Any:
    """A model in eval mode, on the CPU; the same for the same seed."""
    torch.manual_seed(seed)
    model = MODELS[name](**changes).eval()
    for parameter in model.parameters():  # and no buffers: frequencies of rotary embeddings stay float32, as loaded
        parameter.data = parameter.data.to(dtype)
    return model


def output(model: Any, length: int = 7) -> torch.Tensor:
    """Logits or hidden states for some tokens."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(length)[None] % SIZES["vocab_size"])[0]
    return found
