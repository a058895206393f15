"""Launches on torch: descriptors of tensors, attention against the float64 loops, and what type checkers refuse."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention_cases import CASES, MAKERS, by_loops, llm, paged, to_library, vit
from checkpoints import SOURCE
from halfbyte.arrays import to_numpy
from halfbyte.errors import NoKernelError, UnavailableError, UsageError
from halfbyte.kernels import LlmFmha, TensorDesc, VitFmha, preflight, select
from halfbyte.ops import attention

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-24}
everywhere = pytest.mark.parametrize("device", DEVICES)


def assert_within_bound(args, oracle):
    """The bound that kernels/attention.py derives."""
    got = to_numpy(args.out).astype(np.float64)
    u = 2.0**-24
    score = (args.head_dim + 8) * u * oracle.score
    halves = 2 * UNIT[args.call().dtype] + UNIT[args.call().out_dtype]
    assert got.shape == oracle.out.shape
    assert np.all(np.abs(got - oracle.out) <= (2 * score + (oracle.keys + 128) * u + halves) * oracle.magnitude)


class TestDescriptors:
    def test_of_a_tensor(self):
        a = torch.zeros(6, 5)
        view = a[1::2, :3]
        desc = TensorDesc.of(view)
        assert (desc.data, desc.shape, desc.strides) == (view.data_ptr(), (3, 3), (10,))
        assert desc.struct().data == a.data_ptr() + 20

    def test_packed(self):
        a = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
        assert TensorDesc.packed(a, (2, 3, 4)) == TensorDesc.of(a)
        with pytest.raises(UsageError, match=r"not row-major without gaps: got strides \(1, 3\)"):
            TensorDesc.packed(a[0].T.contiguous().T, (3, 4))

    def test_writing_through_the_struct_reaches_the_tensor(self):
        a = torch.zeros(2, 3, dtype=torch.int32)
        struct = TensorDesc.of(a).struct()
        ctypes.cast(struct.data, ctypes.POINTER(ctypes.c_int32))[1 * struct.dynamic_strides[0] + 2] = 7
        assert a[1, 2] == 7

    def test_memory_of_no_address(self):
        with pytest.raises(UsageError, match="not an address: got 0"):
            TensorDesc.of(torch.zeros(2, 3, device="meta"))

    @pytest.mark.parametrize("op", MAKERS)
    def test_those_of_a_bundle_are_the_same_in_both_libraries(self, op):
        one = MAKERS[op]()
        two = to_library(one, "torch").descriptors()
        assert {n: (d.shape, d.strides) for n, d in one.descriptors().items()} == {
            n: (d.shape, d.strides) for n, d in two.items()
        }


class TestAttention:
    @everywhere
    @pytest.mark.parametrize("case", CASES)
    def test_every_case(self, case, device):
        args = to_library(CASES[case](), "torch", device)
        assert attention(args) is args.out
        assert_within_bound(args, by_loops(args))

    @everywhere
    @pytest.mark.parametrize("op", MAKERS)
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
    @pytest.mark.parametrize("scale", [1.0, 0.37])
    def test_every_dtype(self, op, dtype, scale, device):
        args = to_library(MAKERS[op](d=64, dtype=dtype, attention_scale=0.125, v_scale=scale), "torch", device)
        attention(args)
        assert_within_bound(args, by_loops(args))

    @everywhere
    def test_longer_sequences(self, device):
        args = to_library(llm((300, 211), s=40, capacity=400, d=32, window_size_left=60), "torch", device)
        attention(args)
        assert_within_bound(args, by_loops(args))

    @everywhere
    def test_queries_without_keys_give_zero(self, device):
        args = to_library(llm((2, 0), s=3), "torch", device)
        attention(args)
        assert not args.out[0, 0].any()
        assert args.out[0, 1].all()
        assert not args.out[1].any()

    def test_no_gradient_is_lost(self):
        args = to_library(vit(), "torch")
        args.q.requires_grad_()
        with pytest.raises(UsageError, match=r"halfbyte.attention has no gradient; run it under torch.no_grad\(\)"):
            attention(args)
        with torch.no_grad():
            attention(args)
        assert_within_bound(args, by_loops(args))

    def test_two_libraries_in_one_bundle(self):
        args = vit()
        with pytest.raises(UsageError, match="k and q lie in two places: got k in torch on cpu, q in numpy on cpu"):
            replace(args, k=torch.from_numpy(args.k))


class TestChoice:
    @pytest.mark.parametrize("op", MAKERS)
    def test_torch_tensors_go_to_torch(self, op):
        args = to_library(MAKERS[op](), "torch")
        kernel = select(type(args), args.call())
        assert kernel.name == f"{op.replace('_', '-')}-torch"
        assert preflight(type(args), args.call()) is kernel

    def test_preflight_finds_that_the_device_is_missing(self):
        call = replace(to_library(vit(), "torch").call(), device="xpu")
        with pytest.raises(UnavailableError, match="torch cannot use this device: got xpu"):
            preflight(VitFmha, call)

    def test_the_nearest_comes_first(self):
        args = to_library(paged(skip_softmax_threshold_log2=-8.0), "torch")
        with pytest.raises(NoKernelError, match=r"the nearest is llm-fmha-paged-torch: skips no softmax"):
            attention(args)

    def test_reduced_float32_products_are_refused(self):
        args = to_library(llm(), "torch")
        half = to_library(llm(dtype="float16"), "torch")
        try:
            torch.set_float32_matmul_precision("medium")
            with pytest.raises(NoKernelError, match="llm-fmha-torch: torch may compute float32 products in"):
                select(LlmFmha, args.call())
            select(LlmFmha, half.call())
        finally:
            torch.set_float32_matmul_precision("highest")


PAIRINGS = """
from halfbyte.kernels import AttentionCall, Call, Kernel, LinearArgs, LlmFmha, VitFmha, select
from halfbyte.kernels.attention_base import attention_cost
from halfbyte.kernels.base import nothing_to_load

def refuse(call: AttentionCall) -> tuple[str, ...]: return ()
def launch(args: LlmFmha) -> None: ...
load, cost = nothing_to_load, attention_cost

def right(llm: LlmFmha, call: AttentionCall) -> None:
    kernel = select(LlmFmha, call)
    kernel.run(llm)
    Kernel(name="k", bundle=LlmFmha, description="", refuse=refuse, load=load, launch=launch, cost=cost)

def wrong(llm: LlmFmha, linear: LinearArgs, vit: VitFmha, call: AttentionCall, other: Call) -> None:
    kernel = select(LlmFmha, call)
    kernel.run(vit)  # wrong
    kernel.run(linear)  # wrong
    kernel.cost(other)  # wrong
    Kernel(name="k", bundle=VitFmha, description="", refuse=refuse, load=load, launch=launch, cost=cost)  # wrong
    LlmFmha(q=None)  # wrong
"""


def test_type_checkers_refuse_a_wrong_pairing(tmp_path):
    file = tmp_path / "pairings.py"
    file.write_text(PAIRINGS)
    config = tmp_path / "mypy.ini"  # without torch and NumPy, whose types would take longer than all the rest
    config.write_text(f"""
[mypy]
strict = True
mypy_path = {SOURCE.parent}
cache_dir = {tmp_path}
follow_imports = silent
[mypy-torch.*,numpy.*,ml_dtypes.*]
follow_imports = skip
follow_imports_for_stubs = True
""")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--config-file", str(config), str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    reported = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert reported == {i for i, line in enumerate(PAIRINGS.splitlines(), 1) if line.endswith("# wrong")}, done.stdout
