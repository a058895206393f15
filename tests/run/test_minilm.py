"""A real encoder keeps its embeddings when it is quantized in place."""

from __future__ import annotations

import copy
import importlib.metadata

import pytest
import torch
from benchmarks import minilm, models_cpu


def missing():
    """What is not installed."""
    lacking = []
    for package in (minilm.PACKAGE, "transformers"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(package)
    return ", ".join(lacking)


def test_sentences_are_many_and_different():
    texts = minilm.sentences(200)
    assert len(set(texts)) == 200
    assert all(8 <= len(text.split()) <= 24 and text[-1] in ".!?" for text in texts)
    with pytest.raises(ValueError, match="fewer than 1000000"):
        minilm.sentences(1_000_000)


@pytest.mark.skipif(bool(missing()), reason=f"not installed: {missing()}; run: make test")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_embeddings_keep_their_direction():
    import halfbyte.hf

    model, tokenizer = minilm.load()
    dense, texts = copy.deepcopy(model), minilm.sentences(200)
    halfbyte.hf.quantize_model(model, "rtn")
    errors = dict(models_cpu.layer_errors(dense, model))
    assert len(errors) == 37
    assert all(0.08 < error < 0.11 for error in errors.values())
    cosine = (minilm.embed(dense, tokenizer, texts) * minilm.embed(model, tokenizer, texts)).sum(1)
    assert 0.97 <= cosine.mean() < 0.999
    assert cosine.min() > 0.93
    assert torch.equal(dense.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight)
