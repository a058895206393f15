"""``triton-experts``: in the interpreter, what it compiles to, and when it is chosen. See also ``test_experts``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_code import ARCHITECTURES, Program
from expert_cases import Case
from gpu_codecs import needs_triton
from halfbyte.kernels import ExpertsArgs, ordered
from halfbyte.kernels.cuda import experts_triton
from halfbyte.kernels.cuda.experts_triton import CONFIGURATIONS, ONE, configure, listless


@needs_triton
def test_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "gpu_experts", "interpreted", "grouped"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "interpreted 23\ngrouped 15\n"), done.stderr[-3000:]


def call(rows, capability=90, layout="fragments", dtype="bfloat16", **changes):
    """Of 8 experts of which a token takes 2."""
    device = {"device": "cuda", "capability": capability}
    how = {name: changes.pop(name) for name in ("precision",) if name in changes}
    return Case.random(8, 256, 128, **changes).call(device, dtype, layout, rows, 2, **how)


@pytest.mark.parametrize(("rows", "size"), [(1, 8), (8, 8), (22, 8), (38, 16), (120, 32), (200, 64), (4096, 64)])
def test_blocks_hold_the_slots_of_most_experts(rows, size):
    assert configure(call(rows)).size == size


@needs_triton
@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("made", [ONE, *CONFIGURATIONS], ids=lambda made: f"{made.size} {made.warps}")
def test_machine_code(made, capability):
    from halfbyte.kernels.cuda import experts_triton_code as code

    kernel = code.few if made.size == experts_triton.FEW else code.many
    like = call(1 if made == ONE else 64, capability)
    for down in (False, True):
        signature, constants = experts_triton.parts(like, made, "float32", down=down)
        types = {name: of.removesuffix(":16") for name, of in signature.items()}
        found = Program(kernel, types, constants, {"num_warps": made.warps}, ("N", "K", "WIDTH")).compile(capability)
        assert (found.stack, found.spills, found.warnings) == (0, 0, [])
        assert found.matrix
        assert found.shared <= 99 * 1024  # what a program may have on all of them


def test_one_token_has_no_lists():
    assert listless(call(1), CONFIGURATIONS[0])
    assert not listless(call(1), CONFIGURATIONS[1])
    assert not listless(call(2), CONFIGURATIONS[0])


@needs_triton
def test_what_is_refused():
    refuse = experts_triton.refuse
    assert refuse(call(5, 80)) == ()
    assert refuse(call(5, 75)) == ("is for sm_80 or later, not sm_75",)
    assert refuse(call(5, layout="rows")) == ("reads the layout fragments(dtype=bfloat16), not rows",)
    assert refuse(call(5, dtype="float32")) == ("takes bfloat16 or float16 activations, not float32",)
    assert refuse(call(5, precision="fp8")) == ("computes exactly, not in fp8",)
    assert "permute_rows" in refuse(call(5, gate_up_order="interleaved"))[0]


@needs_triton
def test_it_comes_after_those_for_hopper():
    names = [kernel.name for kernel in ordered(ExpertsArgs, call(5))]
    assert names.index("gluon-experts-decode") < names.index("triton-experts") < names.index("experts-loop")
