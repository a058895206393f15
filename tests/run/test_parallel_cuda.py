"""Ranks on two GPUs, through NCCL and through kernels that write to the other's memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rank_cases as cases
from halfbyte.parallel.push import MOST
from ranks import Failed, Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def pool():
    made = Pool(size=2, device="cuda")
    yield made
    made.close()


def answers(pool, case, *args):
    found = pool.run(case, 2, *args)
    wrong = [one for one in found if isinstance(one, Failed)]
    assert not wrong, wrong[0]
    return found


@pytest.mark.parametrize("n", [1, 127, 8192, MOST, MOST + 1, 1 << 20])
@pytest.mark.parametrize("bias", [False, True])
def test_sums_are_exact_and_equal(pool, n, bias):
    """Whole numbers, so that every order gives the same; small ones through the kernel, in a graph, many times."""
    first, second = answers(pool, cases.sums_on_gpus, n, bias)
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(first[0], second[0])
    assert first[2] == second[2]


@pytest.mark.parametrize("rows", [1, 16, 600, 4099])
def test_layers_on_two_gpus(pool, rows):
    first, second = answers(pool, cases.layers_on_gpus, rows)
    whole, made = first
    np.testing.assert_array_equal(made, second[1])
    assert np.linalg.norm(made - whole) <= 2.0**-8 * np.linalg.norm(whole)


def test_a_model_on_two_gpus_writes_the_text_of_one(pool, tmp_path):
    path = cases.write_model(tmp_path / "model")
    first, second = answers(pool, cases.text_on_gpus, str(path))
    assert first["split"] == second["split"]
    assert first["split"] == first["whole"]
    assert "in a CUDA graph" in first["how"]


def test_a_dead_rank_makes_the_other_fail_with_a_message():
    pool = Pool(size=2, device="cuda")
    try:
        (found,) = pool.run(cases.dying_on_gpus, 2, 1, alive=1)
        message, seconds = found
        assert "rank 0 got no answer in a sum over 2 ranks within 3 s" in message
        assert seconds < 10  # it is waited for once
    finally:
        pool.close()
