"""The benchmark of experts: its routings, its floor, that it says all rows, and nothing of a wrong result."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks import experts
from benchmarks.experts_subjects import DEEPSEEK, QWEN3, TINY, Routing, Stacks, routings

from halfbyte.trials import WrongResultError


def test_routings_of_one_token_share_no_expert():
    found = routings(QWEN3, 1, "cpu")
    assert len(found) == 16
    assert sorted(e for one in found for e in one.indices[0].tolist()) == list(range(128))
    assert all(one.touched(QWEN3) == one.rows(QWEN3) == 8 for one in found)
    assert all(one.weights.sum().item() == pytest.approx(1) for one in found)


def test_routings_have_an_expert_that_is_held():
    found = routings(DEEPSEEK, 1, "cpu")
    assert all(one.touched(DEEPSEEK) >= 1 for one in found)
    assert any((one.indices >= DEEPSEEK.held).any() for one in found)
    many = routings(DEEPSEEK, 256, "cpu")
    assert [one.touched(DEEPSEEK) for one in many] == [32] * 3
    assert all(len(set(row)) == 8 for one in many for row in one.indices.tolist())


def test_the_floor():
    one = [Routing(torch.arange(8)[None], torch.ones(1, 8))]
    # 8 experts of 3 * 2048 * 768 codes of half a byte and scales of a 16th, at 4.6 TB/s, and two launches
    assert experts.floor(QWEN3, one, "NVIDIA H200") == pytest.approx(8 * 3 * 2048 * 768 * 9 / 16 / 4.6e12 + 2.6e-6)
    many = [Routing(torch.arange(8).repeat(65536, 1), torch.ones(65536, 8))]
    assert experts.floor(QWEN3, many, "NVIDIA H200") == pytest.approx(6 * 65536 * 8 * 2048 * 768 / 783e12)
    assert experts.floor(QWEN3, one, "another GPU") is None


def test_the_run_says_all_rows_and_writes_them(tmp_path, capsys):
    out = tmp_path / "made-experts.json"
    experts.main(["--device", "cpu", "--models", "tiny", "--tokens", "1", "5", "--out", str(out)])
    document = json.loads(out.read_text())
    assert document["run"]["command"].startswith("python -m benchmarks.experts --device cpu")
    assert [(row["what"], row["facts"]["what"]) for row in document["rows"]] == [
        ("tiny, 1 tokens", "layer"),
        ("tiny, 5 tokens", "layer"),
    ]
    assert all(0 < row["facts"]["error"] < experts.MOST_ERROR for row in document["rows"])
    assert "*" in capsys.readouterr().out


def test_a_wrong_result_is_no_figure():
    torch.manual_seed(0)
    stacks, found = Stacks(TINY, "cpu"), routings(TINY, 3, "cpu")
    x = torch.randn(3, TINY.hidden).bfloat16()
    (layer,) = experts.ours(TINY, stacks, stacks.packed("rows"), x, found, every=False)
    check = layer.facts["check"]
    assert check(lambda: [layer.call(i) for i in range(len(found))]) < experts.MOST_ERROR
    with pytest.raises(WrongResultError, match="not all of the result is written"):
        check(lambda: layer.call(0))
    right = x.clone()

    def of_other_activations() -> None:
        x.neg_()
        for i in range(len(found)):
            layer.call(i)
        x.copy_(right)

    with pytest.raises(WrongResultError, match="off by"):
        check(of_other_activations)
