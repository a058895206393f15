"""Lists of a routing and the sum of its slots: what the device code makes of them, and what it compiles to."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gpu_lists
from cuda_code import ARCHITECTURES, Program
from gpu_codecs import needs_gpu, needs_triton
from halfbyte.kernels.cuda import lists
from halfbyte.kernels.cuda.lists import Lists, Numbers, most_blocks

PARTS = ("made", "combined", "refused", "sorted_already")


@pytest.mark.parametrize(
    ("slots", "local", "size", "most"),
    [(8, 128, 8, 8), (128, 128, 8, 128), (136, 128, 8, 129), (17, 1, 8, 3), (16, 2, 16, 2), (32768, 128, 128, 383)],
)
def test_most_blocks(slots, local, size, most):
    """Each expert but one has a slot more than fills its blocks."""
    assert most_blocks(slots, local, size) == most


@pytest.mark.parametrize(
    ("slots", "local", "launches", "chunk", "chunks"),
    [
        (2048, 64, 1, 32, 64), (2048, 128, 1, 64, 32), (2049, 128, 2, 64, 33), (16384, 128, 2, 64, 256),
        (32768, 128, 2, 128, 256), (65536, 128, 2, 256, 256), (65537, 128, 3, 64, 1025), (16384, 512, 2, 256, 64),
        (16385, 512, 3, 64, 257),
    ],
)  # fmt: skip
def test_launches(slots, local, launches, chunk, chunks):
    """In two each program looks at no more than 32768 counts, of 256 programs."""
    made = Lists(slots, 1, 8, Numbers(local, tuple(range(local))))
    assert (made.launches, made.chunk, made.chunks) == (launches, chunk, chunks)


def test_machine_code_is_that_of_other_numbers_of_tokens():
    """Where they are many, of all; a number of tokens that comes first compiles nothing."""
    numbers = Numbers(128, tuple(range(128)))

    def kinds(tokens):
        return {str(lists.lists_parts(Lists(t, 8, 8, numbers), 90)) for t in tokens}

    assert len(kinds(range(8193, 70_000, 511))) == 1
    assert len(kinds(range(257, 8193, 13))) == 5
    assert len(kinds(range(129, 257))) == 1


def test_experts_beyond_what_is_added_up_at_once():
    numbers = Numbers(40_000, tuple(range(40_000)))
    for tokens, launches in ((4, 1), (5, 2), (512, 3)):
        assert Lists(tokens, 1, 8, numbers).launches == launches
        lists.lists_parts(Lists(tokens, 1, 8, numbers), 90)


def test_programs_of_the_sum():
    """What is read once does not drive out what is still in the cache; few programs are small ones."""
    whole, part = Numbers(128, tuple(range(128))), Numbers(256, tuple(range(32)), remote=True)
    dtypes = "int64", "float32", "bfloat16"

    def made(tokens, numbers):
        _, constants, warps = lists.combine_parts(2048, 8, dtypes, numbers, 90, tokens)
        return constants["BLOCK"], constants["KEEP"], constants["SPARSE"], warps

    assert made(256, whole) == made(256, part) == (512, "", False, 4)
    assert made(257, whole) == (1024, "evict_first", False, 8)
    assert made(257, part) == (2048, "", True, 4)


def test_places():
    assert Numbers(8, (2, 3, 4)).first == 2
    assert Numbers(8, (2, 3, 4)).places("cpu") is None
    assert Numbers(5, (1, 3)).first == -1
    assert Numbers(5, (1, 3)).places("cpu").tolist() == [-1, 0, -1, 1, -1]


@needs_triton
def test_tokens_are_along_the_first_axis(monkeypatch):
    """No other takes more than 65535 programs."""
    grids = []

    def run(grid, args):
        grids.append(grid)

    run.plainly = "it is recorded"
    monkeypatch.setattr(lists, "_program", lambda *of: run)
    numbers = Numbers(8, tuple(range(8)))
    dtypes = "int64", "float32", "bfloat16"
    lists.bind_combine(70_000, 2, 1040, dtypes, numbers, None, "cpu", 90)(None, None, None, None)
    assert grids == [(70_000, 2, 1)]


@needs_triton
def test_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "gpu_lists", *PARTS],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "made 107\ncombined 60\nrefused 4\nsorted_already 36\n"), done.stderr[
        -3000:
    ]


def programs(capability):
    """One for each kind of launch."""
    from halfbyte.kernels.cuda import lists_code

    numbers = Numbers(512, tuple(range(512)), padding=True)
    few_held = Numbers(512, tuple(range(64)), remote=True)
    few, many, more = (Lists(tokens, 8, 8, numbers) for tokens in (16, 2048, 4096))
    assert (few.launches, many.launches, more.launches) == (1, 2, 3)
    most = Lists(8192, 8, 128, Numbers(128, tuple(range(128))))
    dtypes = "int64", "float32", "bfloat16"
    for kernel, (signature, constants, warps) in (
        (lists_code.lists, lists.lists_parts(few, capability)),
        (lists_code.lists, lists.lists_parts(many, capability)),
        (lists_code.lists, lists.lists_parts(more, capability)),
        (lists_code.lists, lists.lists_parts(replace(most, tokens=4096), capability)),
        (lists_code.lists, lists.lists_parts(most, capability)),
        (lists_code.counts, lists.counts_parts(many, capability)),
        (lists_code.counts, lists.counts_parts(more, capability)),
        (lists_code.sums, lists.sums_parts(more, capability)),
        (lists_code.runs, lists.runs_parts(many, capability)),
        (lists_code.combine, lists.combine_parts(2048, 8, dtypes, numbers, capability)),
        (lists_code.combine, lists.combine_parts(2048, 8, dtypes, numbers, capability, 4096)),
        (lists_code.combine, lists.combine_parts(2048, 8, dtypes, few_held, capability, 4096)),
    ):
        arguments = {name: of.removesuffix(":16") for name, of in signature.items()}
        yield Program(kernel, arguments, constants, {"num_warps": warps}, ("H",) if "H" in arguments else ())


@needs_triton
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_machine_code(capability):
    for program in programs(capability):
        code = program.compile(capability)
        assert (code.stack, code.spills, code.warnings) == (0, 0, [])
        assert not [opcode for opcode in code.opcodes if opcode.startswith(("RED.", "ATOMG"))]


@needs_triton
@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("part", PARTS)
def test_on_a_gpu(part):
    assert list(getattr(gpu_lists, part)("cuda"))
