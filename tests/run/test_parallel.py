"""Layers over 2 and 4 ranks, in processes over gloo, against whole ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rank_cases as cases
from halfbyte import nn
from halfbyte.errors import RankError, UsageError
from halfbyte.parallel import ColumnParallel, ExpertParallel, start
from halfbyte.parallel import ranks as ranks_module
from halfbyte.parallel.ranks import even_share, head_share, share
from helpers_run import assert_within_bound, random_weight
from ranks import Failed, Pool

BOTH = pytest.mark.parametrize("ranks", [2, 4])


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.close()


def answers(pool, case, ranks, *args):
    found = pool.run(case, ranks, *args)
    wrong = [one for one in found if isinstance(one, Failed)]
    assert not wrong, wrong[0]
    return found


def error_of(pool, case, ranks, *args):
    """The error that every rank raised."""
    found = pool.run(case, ranks, *args)
    assert all(isinstance(one, Failed) for one in found), found
    return found[0]


def close(got, wanted, terms):
    """Within the bound of float32 sums of so many terms of the size of ``wanted``'s largest."""
    return np.abs(got - wanted).max() <= 2 * terms * 2.0**-24 * np.abs(wanted).max() + 1e-6


@BOTH
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "dense"])
def test_columns_are_those_of_the_whole_layer_bit_for_bit(pool, ranks, kind):
    found = answers(pool, cases.column, ranks, kind, 64, 96, {})
    assert [own for _, _, own in found] == [64 // ranks] * ranks
    made = np.concatenate([y for _, y, _ in found], -1)
    if kind == "nvfp4":
        np.testing.assert_array_equal(made, found[0][0])
    else:  # torch adds in another order where N differs
        assert close(made, found[0][0], 96)


@BOTH
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "dense"])
@pytest.mark.parametrize("n", [97, 96])
def test_a_head_of_an_odd_vocabulary_is_gathered(pool, ranks, kind, n):
    found = answers(pool, cases.column, ranks, kind, n, 64, {"gather": True})
    for whole, made, _ in found:
        assert made.shape == (3, n)
        assert close(made, whole, 64)
        np.testing.assert_array_equal(made, found[0][1])
    assert sum(own for _, _, own in found) == n


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_over_rows_are_within_the_bound_and_equal_on_all_ranks(pool, ranks, dtype):
    for seed in (0, 1):  # seed 1 has a pre_scale
        found = answers(pool, cases.row, ranks, "nvfp4", 32, 192, dtype, seed)
        weight = random_weight(32, 192, seed=seed, per_row=True, pre_scale=seed == 1)
        layer = cases.layer("nvfp4", 32, 192, seed=seed)
        x = cases.inputs(3, 192).to(getattr(torch, dtype)).float().numpy()
        for _, made, own in found:
            assert own == 192 // ranks
            np.testing.assert_array_equal(made, found[0][1])
            assert_within_bound(made, x, weight, layer.bias.numpy(), dtype)


@BOTH
@pytest.mark.parametrize("kind", ["fp8", "dense"])
def test_other_layers_are_summed_too_and_their_bias_added_once(pool, ranks, kind):
    for whole, made, _ in answers(pool, cases.row, ranks, kind, 32, 192, "float32", 0):
        assert close(made, whole, 192)


@BOTH
def test_the_parts_of_a_group_are_cut_one_after_the_other(pool, ranks):
    found = answers(pool, cases.group, ranks, [64, 32, 32], 64, [True, False, True])
    assert found[0][2] == [64 // ranks, 32 // ranks, 32 // ranks]
    for i in range(3):
        made = np.concatenate([cut[i] for _, cut, _ in found], -1)
        np.testing.assert_array_equal(made, found[0][0][i])


def test_fewer_heads_than_ranks_are_copied(pool):
    found = answers(pool, cases.column, 4, "nvfp4", 32, 64, {"heads": 2})
    whole = found[0][0]
    for rank, (_, made, own) in enumerate(found):
        head = rank // 2
        assert own == 16
        np.testing.assert_array_equal(made, whole[:, 16 * head : 16 * head + 16])


@BOTH
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rows", "UsageError: N = 66 does not split over 4 ranks, expected ranks among 1, 2, 3, 6, 11, 22, 33, 66"),
        (
            "blocks",
            "UsageError: K = 48 does not split over {ranks} ranks in multiples of 16, expected ranks among 1, 3",
        ),
        ("heads", "UsageError: 3 heads do not split over {ranks} ranks, expected ranks among 1, 3, 6, 9"),
        ("norm", "UsageError: a module of this class is not column-parallel: got LayerNorm"),
        ("experts", "UsageError: these are no experts that can be split: got Linear, expected nn.Experts"),
        ("count", "UsageError: E = 6 does not split over 4 ranks, expected ranks among 1, 2, 3, 6"),
        ("saved", "UsageError: this layer is split over ranks, so it has no whole weight: got rank 0 of {ranks}"),
    ],
)
def test_what_does_not_split_is_refused_in_words(pool, ranks, what, message):
    if "over 4" in message and ranks == 2:
        answers(pool, cases.refused, ranks, what)
    else:
        assert error_of(pool, cases.refused, ranks, what).startswith(message.format(ranks=ranks))


MIXTURES = [
    {},
    {"gated": False, "activation": "relu2"},
    {"activation": "swigluoai", "limit": 7.0},
    {"padding": True},
]


@BOTH
@pytest.mark.parametrize("style", ["experts", "own", "columns"])
@pytest.mark.parametrize("options", MIXTURES, ids=["silu", "relu2", "swiglu", "padding"])
def test_experts_over_ranks_are_those_of_one(pool, ranks, style, options):
    for tokens in (0, 1, 7):
        found = answers(pool, cases.mixture, ranks, style, tokens, options)
        for whole, made, _, _ in found:
            assert made.shape == whole.shape
            assert close(made, whole, 64 + 64) if made.size else True
        if style != "own":
            assert all(np.array_equal(made, found[0][1]) for _, made, _, _ in found)


@BOTH
@pytest.mark.parametrize("style", ["experts", "own", "columns"])
def test_one_hot_expert_and_padding(pool, ranks, style):
    hot = [[5, -1, -1], [5, 8, -1], [5, 2, -1]]
    for whole, made, _, _ in answers(pool, cases.mixture, ranks, style, 3, {"padding": True}, hot):
        assert close(made, whole, 64 + 64)
    for whole, made, _, _ in answers(pool, cases.mixture, ranks, style, 3, {"padding": True}, [[-1, 8, 9]]):
        np.testing.assert_array_equal(made, np.zeros_like(whole))


@BOTH
@pytest.mark.parametrize("style", ["experts", "own", "columns"])
def test_an_id_that_names_no_expert_is_refused_on_every_rank(pool, ranks, style):
    assert "ids name no expert" in error_of(pool, cases.mixture, ranks, style, 1, {}, [[0, 1, 8]])


@BOTH
def test_load_balance(pool, ranks):
    ids = [[0, 1, 7]] * 4
    _, _, told, text = answers(pool, cases.mixture, ranks, "experts", 4, {}, ids, True)[0]
    if ranks == 2:
        assert told.slots == {"": [8, 4]}
        assert text == ": rank 0 8 (1.33), rank 1 4 (0.67) of 12 slots; expert 0 has the most, 4"
    else:
        assert told.slots == {"": [8, 0, 0, 4]}
    own = answers(pool, cases.mixture, ranks, "own", 4, {}, ids, True)
    for _, _, told, _ in own:  # of all ranks' tokens
        assert told.busiest == {"": (0, 4 * ranks)}
        assert sum(told.slots[""]) == 12 * ranks


def test_ranks_that_disagree_are_all_told(pool):
    assert (
        error_of(pool, cases.agreement, 4, True)
        == "UsageError: the answers of the ranks differ: got others on rank 2, 3"
    )
    assert answers(pool, cases.agreement, 4, False) == [100] * 4


def test_shares():
    assert [share(128257, r, 2) for r in range(2)] == [(0, 64144), (64144, 128257)]
    assert [share(97, r, 4) for r in range(4)] == [(0, 32), (32, 64), (64, 96), (96, 97)]
    assert [share(96, r, 4) for r in range(4)] == [(0, 24), (24, 48), (48, 72), (72, 96)]
    assert even_share(704, 1, 2, 16, "I") == (352, 704)
    assert head_share(8 * 128, 8, 3, 4) == (768, 1024)
    assert [head_share(2 * 64, 2, r, 8) for r in (0, 3, 4, 7)] == [(0, 64), (0, 64), (64, 128), (64, 128)]


def test_a_dead_rank_makes_the_others_fail_with_a_message():
    pool = Pool()
    try:
        found = pool.run(cases.dying, 4, 3, 5.0, alive=3)
        assert all(isinstance(one, Failed) and one.startswith("RankError: rank ") for one in found), found
        assert "got no answer in a sum over 4 ranks" in found[0]
        assert "look for the first error among all ranks" in found[0]
    finally:
        pool.close()


def test_a_rank_that_does_not_come_makes_the_others_fail_in_time(pool):
    found = pool.run(cases.late, 4, 2.0)
    assert all(isinstance(one, Failed) and one.startswith("RankError: rank ") for one in found), found
    assert answers(pool, cases.agreement, 4, False) == [100] * 4  # the other groups go on


class Event:
    def query(self) -> bool:
        return False


def test_a_gpu_that_waits_for_another_is_given_up():
    waiting = object.__new__(ranks_module.Ranks)
    waiting.rank, waiting.timeout = 1, 0.05
    with pytest.raises(RankError, match=r"another rank did not answer rank 1 in 0.05 s; look for the first error"):
        waiting.wait(Event())


def test_a_process_by_itself_is_no_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"run: torchrun --nproc-per-node N program.py"):
        start("cpu")
    with pytest.raises(UsageError, match="which tokens ranks have"):
        ExpertParallel(tokens="some")
    with pytest.raises(UsageError, match="pass gather or heads"):
        ColumnParallel(gather=True, heads=2)


def test_one_process_is_a_rank_that_has_all(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    mesh = start("cpu", timeout=5)
    try:
        for case in ("column", "row"):
            of = ("nvfp4", 32, 64, {"gather": True}) if case == "column" else ("nvfp4", 32, 64, "float32", 1)
            whole, made, _ = getattr(cases, case)(mesh, *of)
            np.testing.assert_array_equal(whole, made)
        assert mesh.size() == 1
        assert ranks_module.Ranks.of(mesh).timeout == 5
        assert isinstance(cases.layer("nvfp4", 16, 16), nn.Linear)
    finally:
        torch.distributed.destroy_process_group()
