"""The benchmark of whole models: what it makes, what it says, and that it says nothing of models that differ."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks import models
from benchmarks.random_models import HEAD, RandomModel

import halfbyte
from halfbyte.weight import to_torch

pytest.importorskip("transformers")


def test_a_random_checkpoint_and_its_dense_model_hold_the_same_weights(tmp_path):
    made = RandomModel(models.tiny(1), nvfp4_head=True)
    stored = made.write(tmp_path)
    dense = made.dense_model()
    found = dict(halfbyte.open(tmp_path).items())
    quantized = {name for name, value in found.items() if isinstance(value, halfbyte.Weight)}
    assert len(quantized) == 8
    assert HEAD in quantized
    size = 0
    for name, value in found.items():
        if name in quantized:
            expected = torch.from_numpy(value.dequantize("float32"))
            assert torch.equal(dense.get_submodule(name).weight.float(), expected)
            size += value.codes.nbytes + value.scales.nbytes + 4
        else:
            assert torch.equal(dense.get_parameter(name), to_torch(value.data))
            size += value.data.nbytes
    assert (
        stored
        == size
        == sum(2 * p.numel() for n, p in dense.named_parameters())
        - sum(2 * found[name].n * found[name].k - found[name].n * found[name].k * 9 // 16 - 4 for name in quantized)
    )
    assert dense(torch.arange(64)[None]).logits.float().std() == pytest.approx(1, rel=0.3)


def test_other_names_and_seeds_are_other_weights():
    config = models.tiny(1)
    weights = [
        RandomModel(config, seed=seed).weight(name, 16, 64).codes.flatten().tolist()
        for seed, name in ((0, "a"), (0, "b"), (1, "a"), (0, "a"))
    ]
    assert weights[0] == weights[3]
    assert len({tuple(weight) for weight in weights}) == 3


def test_the_bytes_that_a_step_reads():
    config = models.tiny(2)
    # embedding 512 x 128 of 2 bytes, of which 3 rows; 2 layers, keys and values, 2 heads of 32, 2 bytes
    assert models.read_bytes(config, 1_000_000, 3, 10.5) == 1_000_000 - 509 * 256 + 3 * 10.5 * 2 * 2 * 2 * 32 * 2


def test_the_run_says_all_rows_and_writes_them(tmp_path, capsys):
    out = tmp_path / "made-models.json"
    models.main(["--tiny", "--layers", "1", "--device", "cpu", "--batches", "1", "2", "--out", str(out)])
    document = json.loads(out.read_text())
    assert document["run"]["command"].startswith("python -m benchmarks.models --tiny --layers 1")
    assert [(row["what"], row["who"]) for row in document["rows"]] == [
        ("load", "nvfp4"),
        ("logits", "nvfp4"),
        ("decode batch 1", "nvfp4"),
        ("decode batch 1", "bfloat16"),
        ("decode batch 2", "nvfp4"),
        ("decode batch 2", "bfloat16"),
        ("first token of 300", "nvfp4"),
        ("first token of 300", "bfloat16"),
        ("first token of 300", "nvfp4 fp8"),
        ("logits", "nvfp4, head too"),
        ("decode batch 1", "nvfp4, head too"),
        ("decode batch 1", "bfloat16"),
    ]
    step = document["rows"][2]
    assert step["facts"]["bytes"] == pytest.approx(step["facts"]["own_bytes"], rel=0.02)
    assert len(step["facts"]["rounds"]) == 2
    assert document["end"]["verdict"] == ["0 of 0 bounds met"]
    assert "tokens/s" in capsys.readouterr().out


TINY = ["--tiny", "--layers", "1", "--device", "cpu", "--batches", "1"]


def test_nothing_is_said_of_another_model(monkeypatch, tmp_path):
    write = RandomModel.write
    monkeypatch.setattr(RandomModel, "write", lambda self, path: write(RandomModel(self.config, seed=1), path))
    with pytest.raises(SystemExit, match=r"^not measured: the logits of nvfp4 are off by 1\.\d+, more than 0\.05$"):
        models.main([*TINY, "--out", str(tmp_path / "no.json")])
    assert not list(tmp_path.iterdir())


def test_nothing_is_said_where_a_text_changes(monkeypatch):
    generate, calls = halfbyte.generate, []

    def other(model, prompts, **how):
        made = generate(model, prompts, **how)
        calls.append(how)
        if len(calls) == 3:
            made.tokens[0][5] += 1
        return made

    monkeypatch.setattr(halfbyte, "generate", other)
    with pytest.raises(SystemExit, match=r"^not measured: nvfp4 once more gives another text, from token 5 on$"):
        models.main(TINY)


def test_turns_begin_with_another_one_each_time():
    assert models.in_turns("abc", 2) == list("abcbca")


def test_texts_of_other_lengths_differ():
    with pytest.raises(models.DifferentError, match="from token 2 on"):
        models.same([[1, 2, 3]], [[1, 2]], "one")
    models.same([[1, 2, 3]], [[1, 2, 3]], "one")
