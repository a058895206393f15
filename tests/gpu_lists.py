"""The lists of a routing, and the sum of its slots, against NumPy; as a script, on the CPU, in Triton's interpreter.

TRITON_INTERPRET=1 python -m gpu_lists made combined
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.errors import UsageError, WeightError
from halfbyte.kernels.base import capability
from halfbyte.kernels.cuda import refused as told
from halfbyte.kernels.cuda.lists import Lists, Numbers, bind_combine, bind_lists, bind_runs

ALL = Numbers(8, tuple(range(8)))
NUMBERS = (
    ALL,
    Numbers(1, (0,)),
    Numbers(40, tuple(range(40)), padding=True),
    Numbers(64, tuple(range(16, 24)), padding=True, remote=True),
    Numbers(12, (0, 3, 4, 11), remote=True),
)
SIZES = (1, 8, 40)
TYPES = ("float32", "bfloat16", "float16")
SHAPES = ((1, 1), (1, 8), (5, 3), (33, 4), (300, 8), (1100, 8))
CASES = (
    *itertools.product(SHAPES[:-1], NUMBERS, SIZES, ("int64",)),
    *itertools.product(SHAPES[:-1], NUMBERS, (8,), ("int32",)),
    *itertools.product(SHAPES[-1:], (*NUMBERS, *(Numbers(n, tuple(range(n))) for n in (512, 1024))), (8,), ("int64",)),
)
"""The last ones take two launches, the very last one three."""


def routing(tokens: int, top: int, numbers: Numbers, seed: int = 0) -> Any:
    """(T, k): one expert has half of the slots; where they are skipped, some name no expert."""
    rng = np.random.default_rng(seed + tokens)
    ids = rng.integers(0, numbers.experts, (tokens, top))
    ids[rng.random(ids.shape) < 0.5] = numbers.local[-1]
    if numbers.padding:
        ids[rng.random(ids.shape) < 0.2] = -1
        ids[rng.random(ids.shape) < 0.1] = numbers.experts + 5
    return ids


def expected(ids: Any, numbers: Numbers, size: int) -> tuple[list[int], list[list[int]], list[int]]:
    """Blocks, the slots of each, and offsets."""
    blocks, slots, offsets = [], [], [0]
    for place, number in enumerate(numbers.local):
        own = np.flatnonzero(ids.reshape(-1) == number).tolist()
        offsets.append(offsets[-1] + len(own))
        for start in range(0, len(own), size):
            part = own[start : start + size]
            blocks.append(place)
            slots.append(part + [-1] * (size - len(part)))
    return blocks, slots, offsets


def made(device: str) -> Iterator[str]:
    assert {Lists(*shape, size, numbers).launches for shape, numbers, size, _ in CASES} == {1, 2, 3}
    at = torch.device(device, 0) if device == "cuda" else torch.device(device)
    sm = capability(0) if device == "cuda" else 0
    for shape, numbers, size, dtype in CASES:
        ids = routing(*shape, numbers)
        lists = Lists(*shape, size, numbers, dtype)
        memory = torch.full((lists.nbytes // 4,), -7, dtype=torch.int32, device=at)
        places = numbers.places(at)
        indices = torch.from_numpy(ids).to(getattr(torch, dtype)).to(at)
        word = torch.zeros(1, dtype=torch.int64) if device == "cpu" else told.word(at)
        bind_lists(lists, places, at, sm, word=word)(indices, memory if device == "cpu" else memory.data_ptr())
        words = memory.cpu().numpy()
        assert word == 0
        count = int(words[lists.count])
        blocks, slots, offsets = expected(ids, numbers, size)
        name = f"{shape} {numbers} {size} {dtype}"
        assert count == len(blocks) <= lists.most, name
        assert words[lists.blocks :][:count].tolist() == blocks, name
        assert words[lists.slots :][: count * size].reshape(count, size).tolist() == slots, name
        assert words[lists.offsets :][: len(offsets)].tolist() == offsets, name
        assert (words[count : lists.most] == -7).all(), name
        assert (words[lists.slots + count * size : lists.count] == -7).all(), name
        yield name


def combined(device: str) -> Iterator[str]:
    at = torch.device(device, 0) if device == "cuda" else torch.device(device)
    sm = capability(0) if device == "cuda" else 0
    outs = dict.fromkeys(TYPES, "float32") if device == "cpu" else {t: t for t in TYPES}
    for (tokens, top), numbers, (dtype, out) in itertools.product(SHAPES[:4], NUMBERS, outs.items()):
        h = 528
        ids = routing(tokens, top, numbers)
        weights = torch.rand(tokens, top, generator=torch.Generator().manual_seed(tokens)).to(getattr(torch, dtype))
        y = torch.randn(tokens * top, h, generator=torch.Generator().manual_seed(top))
        own = np.isin(ids, numbers.local)
        y[~torch.from_numpy(own.reshape(-1))] = torch.nan
        terms = y.double().view(tokens, top, h).nan_to_num() * weights.double()[..., None]
        got = torch.full((tokens, h), -7.0, dtype=getattr(torch, out), device=at)
        places = numbers.places(at)
        results = y.to(at)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("halfbyte.kernels.cuda.lists.MANY", 0 if tokens > 1 else 1024)
            run = bind_combine(tokens, top, h, ("int64", dtype, out), numbers, places, at, sm)
        run(results if device == "cpu" else results.data_ptr(), torch.from_numpy(ids).to(at), weights.to(at), got)
        name = f"{tokens} {top} {numbers} {dtype} {out}"
        half = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[out]
        limit = 2 * top * 2.0**-24 * terms.abs().sum(1) + 1.01 * half * terms.sum(1).abs()
        limit += 2.0**-25 * (out == "float16")  # half of what its subnormal numbers are apart
        assert ((got.cpu().double() - terms.sum(1)).abs() <= limit).all(), name
        yield name


def refused(device: str) -> Iterator[str]:
    """A token of an expert that is null or none is NaN, alone; the next call says why."""
    at = torch.device(device, 0) if device == "cuda" else torch.device(device)
    sm = capability(0) if device == "cuda" else 0
    for numbers, bad, error, words in (
        (ALL, 8, UsageError, "an id named no expert at slot 141 .*got 8;"),
        (ALL, -(2**40), UsageError, "an id named no expert at slot 141 .*got -2147483648;"),
        (Numbers(12, (0, 3, 4, 11)), 5, WeightError, "a token was routed to expert 5, which is null, at slot 141 "),
        (Numbers(12, (2, 3)), 5, WeightError, "a token was routed to expert 5, which is null, at slot 141 "),
    ):
        ids = torch.full((100, 2), numbers.local[1], device=at)
        ids[70, 1] = bad
        lists = Lists(100, 2, 8, numbers)
        memory = torch.zeros(lists.nbytes // 4, dtype=torch.int32, device=at)
        places = numbers.places(at)
        word = torch.zeros(1, dtype=torch.int64) if device == "cpu" else told.word(at)
        bind_lists(lists, places, at, sm, word=word)(ids, memory if device == "cpu" else memory.data_ptr())
        y = torch.ones(200, 16, device=at)
        out = torch.zeros(100, 16, device=at)
        run = bind_combine(100, 2, 16, ("int64", "float32", "float32"), numbers, places, at, sm)
        run(y if device == "cpu" else y.data_ptr(), ids, torch.ones(100, 2, device=at), out)
        assert memory[lists.offsets + len(numbers.local)] == 199
        assert out.isnan().all(1).nonzero().flatten().tolist() == [70]
        assert (out[:70] == 2).all()
        with pytest.raises(error, match=words):
            told._raise(int(word), "cuda") if device == "cpu" else told.look(at)
        if device != "cpu":
            told.look(at)
        yield words


def sorted_already(device: str) -> Iterator[str]:
    """The lists of (3, 0, 9, ...) slots in turn are those of the routing that has them in turn."""
    at = torch.device(device, 0) if device == "cuda" else torch.device(device)
    sm = capability(0) if device == "cuda" else 0
    for local, most, size, dtype in itertools.product((1, 40, 130), (1, 20), (1, 8, 40), ("int64", "int32")):
        rng = np.random.default_rng(local)
        sizes = rng.integers(0, most + 1, local) * (rng.random(local) < 0.7)
        sizes[0] += 1
        total = int(sizes.sum())
        numbers = Numbers(local, tuple(range(local)))
        for tokens in {total, total - 1, total + 5} - {0}:
            lists = Lists(tokens, 1, size, numbers, dtype)
            memory = torch.full((lists.nbytes // 4,), -7, dtype=torch.int32, device=at)
            given = torch.from_numpy(sizes).to(getattr(torch, dtype)).to(at)
            bind_runs(lists, at, sm)(given, memory if device == "cpu" else memory.data_ptr())
            words = memory.cpu().numpy()
            blocks, slots, offsets = expected(np.repeat(np.arange(local), sizes)[:tokens], numbers, size)
            name = f"{local} {most} {size} {dtype} {tokens}"
            assert int(words[lists.count]) == len(blocks) <= lists.most, name
            assert words[lists.blocks :][: len(blocks)].tolist() == blocks, name
            assert words[lists.slots :][: len(blocks) * size].reshape(-1, size).tolist() == slots, name
            assert words[lists.offsets :][: len(offsets)].tolist() == offsets, name
            assert (words[lists.slots + len(blocks) * size : lists.count] == -7).all(), name
        yield name


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(wanted, sum(1 for _ in globals()[wanted]("cpu")))
