"""The device code of sums over ranks: what adds, in the interpreter, and what it compiles to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_code import ARCHITECTURES, Program
from gpu_codecs import needs_triton


@needs_triton
def test_copies_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "gpu_copies", "sums"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "sums 24\n"), done.stderr[-3000:]


@needs_triton
@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("ranks", [2, 8])
def test_machine_code(capability, ranks):
    """Words that carry a value and a call's number are stored and loaded at once; nothing spills."""
    from halfbyte.parallel import push_code

    push = Program(
        push_code.push_sum,
        {
            "part": "*fp32", "bias": "*bf16", "out": "*bf16", "buffers": "*i64", "counters": "*i32", "failed": "*i32",
            "n": "i32", "width": "i32", "patience": "i64",
        },
        {"RANK": 1, "RANKS": ranks, "SLOTS": 4096, "BLOCK": 128, "BIAS": True, "EARLY": capability >= 90},
        {"num_warps": 4},
    ).compile(capability)  # fmt: skip
    assert push.ptx.count("st.relaxed.sys.global.b64") == push.ptx.count("ld.relaxed.sys.global.b64") == ranks - 1
    assert ("griddepcontrol.wait" in push.ptx) == (capability >= 90)
    assert push.spills == 0
    added = Program(
        push_code.add_parts,
        {
            "own": "*fp32", "others": "*fp32", "bias": "*bf16", "out": "*bf16", "sums": "*i64", "start": "i32",
            "n": "i32", "width": "i32",
        },
        {"RANK": 1, "RANKS": ranks, "BLOCK": 2048, "BIAS": True},
        {"num_warps": 4},
        ("n", "start"),
    ).compile(capability)  # fmt: skip
    assert "ld.global.v4.b32" in added.ptx
    assert "st.global.v4.b32" in added.ptx
    assert added.spills == 0
