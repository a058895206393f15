"""Models with random NVFP4 weights, made from a config alone: as a checkpoint of ModelOpt's, and dense.

A tensor's values depend on its name, the seed and the device alone, so that both forms hold the same weights, and one
does not need the other. Codes are uniform, block scales lie from 0.5 to 1.875, and scale2 is a power of two that keeps
the size of activations: the dense values are exact in bfloat16.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

import halfbyte as hb
from halfbyte.numerics import BLOCK

SCALES: Final = (0x30, 0x40)
"""Bytes of block scales."""
RMS: Final = 3.4
"""Of codes times block scales, about."""
HEAD: Final = "lm_head"
SHARD_BYTES: Final = 1 << 29


def llama_3_8b(layers: int = 32) -> Any:
    """The config of Llama-3-8B's shape."""
    return llama(
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=8192,
    )


def llama(**fields: Any) -> Any:
    """A LlamaConfig in bfloat16 with an untied head, so that a greedy text has no end."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        **fields,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    config.dtype = torch.bfloat16
    return config


@dataclass(frozen=True)
class RandomModel:
    """A model of a config whose linear layers have NVFP4 weights.

    Args:
        config: of transformers, with dtype bfloat16.
        device: where weights are made.
        nvfp4_head: whether lm_head has an NVFP4 weight, too; ModelOpt leaves it as it is.
        seed: another one, other weights.
    """

    config: Any
    device: str = "cpu"
    nvfp4_head: bool = False
    seed: int = 0

    def weight(self, name: str, n: int, k: int) -> hb.Weight:
        """That of layer ``name``, (N, K), with torch tensors."""
        random = self._generator(name)
        words = torch.randint(-(2**63), 2**63 - 1, (n, k // BLOCK), device=self.device, generator=random)
        scales = torch.randint(*SCALES, (n, k // BLOCK), dtype=torch.uint8, device=self.device, generator=random)
        scale2 = torch.tensor(2.0 ** -round(math.log2(RMS * math.sqrt(k))), device=self.device)
        return hb.Weight(codes=words.view(torch.uint8), scales=scales, scale2=scale2)

    def dense(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter that is not quantized: near 1 where it is a vector, else of the size of the weights."""
        made = torch.randn(shape, device=self.device, dtype=torch.bfloat16, generator=self._generator(name))
        return 1 + made / 8 if len(shape) == 1 else made / math.sqrt(shape[-1])

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def quantized(self, meta: torch.nn.Module) -> dict[str, tuple[int, int]]:
        """The layers with NVFP4 weights and their N and K."""
        return {
            name: (module.out_features, module.in_features)
            for name, module in meta.named_modules()
            if isinstance(module, torch.nn.Linear) and (self.nvfp4_head or name != HEAD)
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the checkpoint, as ModelOpt names and stores them."""
        meta = self._meta()
        layers = self.quantized(meta)
        for name, parameter in meta.named_parameters():
            layer = name.removesuffix(".weight")
            if layer not in layers:
                yield name, self.dense(name, tuple(parameter.shape))
                continue
            weight = self.weight(layer, *layers[layer])
            yield name, weight.codes
            yield f"{layer}.weight_scale", weight.scales.view(torch.float8_e4m3fn)
            yield f"{layer}.weight_scale_2", weight.scale2

    def write(self, directory: Path) -> int:
        """A checkpoint of ModelOpt's in shards of about 0.5 GB; its tensors' bytes."""
        directory.mkdir(parents=True, exist_ok=True)
        places: dict[str, str] = {}
        shard: dict[str, Tensor] = {}
        total = size = count = 0

        def flush() -> None:
            file = f"model-{count:05}.safetensors"
            save_file(shard, directory / file, metadata={"format": "pt"})
            places.update(dict.fromkeys(shard, file))
            shard.clear()

        for name, tensor in self.tensors():
            shard[name] = tensor.cpu()
            size, total = size + tensor.nbytes, total + tensor.nbytes
            if size >= SHARD_BYTES:
                flush()
                size, count = 0, count + 1
        if shard:
            flush()
        index = {"metadata": {"total_size": total}, "weight_map": places}
        excluded = [*([] if self.nvfp4_head else [HEAD]), "model.embed_tokens"]
        config = self.config.to_dict() | {"quantization_config": quantization(excluded)}
        for file, content in (("model.safetensors.index.json", index), ("config.json", config)):
            (directory / file).write_text(json.dumps(content, indent=1, default=str) + "\n")
        return total

    def dense_model(self) -> Any:
        """The same with dense weights, in bfloat16."""
        from transformers import AutoModelForCausalLM

        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16).eval()
        layers = self.quantized(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                layer = name.removesuffix(".weight")
                if layer in layers:
                    parameter.copy_(self.weight(layer, *layers[layer]).dequantize("bfloat16"))
                else:
                    parameter.copy_(self.dense(name, tuple(parameter.shape)))
        return model.requires_grad_(False)

    def _meta(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config)


def quantization(excluded: list[str]) -> dict[str, Any]:
    """ModelOpt's entry of config.json for NVFP4 weights and activations as they are."""
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    return {
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": excluded,
        "quant_algo": "W4A16_NVFP4",
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quant_method": "modelopt",
    }
