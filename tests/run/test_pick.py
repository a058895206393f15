"""The largest logit, and where it is written: whatever kernel finds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cuda_code import ARCHITECTURES, Program
from gpu_codecs import needs_gpu, needs_triton
from halfbyte.errors import UsageError
from halfbyte.kernels import PickArgs, select
from halfbyte.kernels.cuda import pick as cuda
from halfbyte.kernels.pick import TORCH, PickCall
from halfbyte.step_ops import pick

CASES = [(1, 5, "float32"), (3, 5000, "float16"), (4, 10240, "float32"), (2, 1, "float32")]


def case(b, v, dtype, device="cpu"):
    """Logits with equal ones, NaN, and only the smallest; tokens, counters and a log."""
    logits = torch.randn(b, v, generator=torch.Generator().manual_seed(v)).to(getattr(torch, dtype))
    logits[0, v // 2 :] = logits[0, v // 2]
    if b > 2:
        logits[1, v // 3] = torch.nan
        logits[2] = -torch.inf
    counters = torch.stack([torch.arange(b) + 10, torch.arange(b)])
    made = logits, torch.full((b,), -1), counters, torch.full((b + 1, b), -1)
    return [tensor.to(device) for tensor in made]


def expected(logits, tokens, counters, log):
    first = [row.isnan().nonzero()[0, 0] if row.isnan().any() else row.argmax() for row in logits]
    log = log.clone()
    for i, token in enumerate(first):
        log[counters[1, i], i] = token
    return torch.stack(first), counters + 1, log


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_the_first_of_the_largest_is_written(shape):
    logits, *written = case(*shape)
    want = expected(logits, *written)
    pick(logits, *written)
    assert all(torch.equal(a, b) for a, b in zip(written, want, strict=True))


INTERPRETED = """
import torch
from test_pick import CASES, case, cuda, expected, PickArgs
for shape in CASES:
    logits, *written = case(*shape)
    want = expected(logits, *written)
    args = PickArgs(**dict(zip(("logits", "tokens", "counters", "log"), (logits, *written), strict=True)))
    cuda.bind(args)(*args.arrays())
    assert all(torch.equal(a, b) for a, b in zip(written, want, strict=True)), shape
print("right")
"""


@needs_triton
def test_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[-3000:]


def call(**changes):
    made = {"rows": 1, "dtype": "bfloat16", "device": "cuda", "library": "torch", "capability": 90, "width": 128256}
    return PickCall(**made | changes)


@needs_triton
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_machine_code(capability):
    from halfbyte.kernels.cuda.pick_code import pick as kernel

    signature, constants = cuda.parts(call(capability=capability), capability)
    arguments = {name: of.removesuffix(":16") for name, of in signature.items()}
    code = Program(kernel, arguments, constants, {"num_warps": cuda.WARPS}, ("V",)).compile(capability)
    assert (code.stack, code.spills, code.warnings) == (0, 0, [])
    assert code.opcodes["LDG.E.128"] == 2  # 16 logits of 2 bytes for each thread
    assert code.registers <= 32


@needs_triton
def test_what_is_chosen():
    assert select(PickArgs, call()).name == "triton-pick"
    assert select(PickArgs, call(device="cpu", capability=0)).name == "pick-torch"
    assert cuda.TRITON.refuse(call(width=0)) == ("takes 1 to 2097152 logits, not 0",)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({1: torch.zeros(2, dtype=torch.int32)}, "tokens does not fit pick: got int32, expected int64"),
        ({2: torch.zeros(3, dtype=torch.int64)}, r"counters does not fit pick: got \(3,\), expected \(2, 2\)"),
        ({3: torch.zeros(4, 1, dtype=torch.int64)}, r"log does not fit pick: got \(4, 1\), expected \(4, 2\)"),
        ({0: torch.zeros(2, 9, dtype=torch.int64)}, "pick takes floats: got int64"),
    ],
)
def test_refused(changed, words):
    arrays = case(2, 9, "float32")
    for i, tensor in changed.items():
        arrays[i] = tensor
    with pytest.raises(UsageError, match=words):
        pick(*arrays)


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*CASES, (16, 128256, "bfloat16")], ids=str)
def test_on_a_gpu(shape):
    logits, *written = case(*shape, device="cuda")
    want = expected(logits, *written)
    pick(logits, *written)
    assert all(torch.equal(a, b) for a, b in zip(written, want, strict=True))
    pick(logits, *written)
    assert torch.equal(written[1], want[1] + 1)


def test_torch_is_the_reference():
    logits, *written = case(3, 7, "float32")
    args = PickArgs(logits=logits, tokens=written[0], counters=written[1], log=written[2])
    want = expected(logits, *written)
    TORCH.run(args)
    assert torch.equal(args.tokens, want[0])
