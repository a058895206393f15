"""Tiny models of transformers, with weights large enough that no two logits are near each other."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from halfbyte import nn, ops
from halfbyte.layouts import Layout
from halfbyte.recipes import quantize
from halfbyte.weight import Weight

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def tiny(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> Any:
    """A model of a family of transformers."""
    config = AutoConfig.for_model(family, **SIZES | FAMILIES.get(family, {}) | fields)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if name.endswith("norm.weight"):
            parameter.copy_(torch.rand(parameter.shape, generator=random) + 0.5)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=random) * (0.2 if parameter.ndim > 1 else 1))
    return model


def swap(model: Any, *, fuse: bool, layout: Layout | str = "rows") -> Any:
    """The model with NVFP4 weights in the linear layers of its layers, fused or not."""

    def weight(module: Any) -> Any:
        return quantize(module.weight.float())

    for layer in model.model.layers:
        together: list[tuple[Any, list[str]]] = [(layer.self_attn, ["q_proj", "k_proj", "v_proj"])]
        single = [(layer.self_attn, "o_proj")]
        if hasattr(layer.mlp, "gate_proj"):
            together.append((layer.mlp, ["gate_proj", "up_proj"]))
            single.append((layer.mlp, "down_proj"))
        for parent, names in together:
            modules = [getattr(parent, name) for name in names]
            if fuse:
                biases = [module.bias for module in modules]
                parts: list[Any] = nn.Group.of([weight(m) for m in modules], layout, biases).parts()
            else:
                parts = [nn.Linear(weight(m), m.bias) for m in modules]
            for name, part in zip(names, parts, strict=True):
                setattr(parent, name, part)
        for parent, name in single:
            old = getattr(parent, name)
            setattr(parent, name, nn.Linear(ops.pack(weight(old), layout), old.bias))
        if hasattr(layer.mlp, "experts"):
            own = layer.mlp.experts
            stacks = (
                Weight.stack([quantize(one.float()) for one in stack]) for stack in (own.gate_up_proj, own.down_proj)
            )
            layer.mlp.experts = nn.Experts(*(ops.pack(stack, layout) for stack in stacks))
    return model


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def theirs(model: Any, prompt: list[int], new: int) -> list[int]:
    """The greedy text of transformers' own generate."""
    config = model.generation_config
    config.output_attentions = config.output_hidden_states = config.return_dict_in_generate = None
    given = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(given)  # else a token that equals the padding would be taken for it
    out = model.generate(given, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
