"""The executor of CUDA tensors: in Triton's interpreter, compiled without a GPU, and on one."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import moves
from contract import VARIANTS, fitting
from halfbyte.layouts import LAYOUTS, Columns, Gguf, Marlin, NPacked, Order, cuda
from halfbyte.layouts.base import arrange, arrange_codes, restore, restore_codes
from halfbyte.weight import to_torch
from helpers import assert_same_bytes, random_weight

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")


@needs_triton
def test_as_numpy_in_the_interpreter():
    tests = Path(moves.__file__).parent
    paths = [str(tests.parent / "src"), str(tests), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-m", "moves"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    moved, golden = map(int, done.stdout.split())
    assert moved > 100
    assert golden == len(moves.PLANES)


@pytest.mark.gpu
@needs_triton
@needs_gpu
def test_as_numpy_on_a_gpu():
    assert moves.check_all("cuda", random=100) > 150
    assert moves.check_golden("cuda") == len(moves.PLANES)


@pytest.mark.gpu
@needs_triton
@needs_gpu
@pytest.mark.parametrize("shape", [((), 130, 64), ((3,), 24, 80), ((2, 2), 256, 192)], ids=str)
@pytest.mark.parametrize("layout", VARIANTS, ids=lambda layout: layout.key)
def test_layouts_on_a_gpu(layout, shape):
    experts, n, k = shape
    if layout.needs((*experts, n, k)):
        return
    weight = fitting(layout, random_weight(np.random.default_rng(0), n, k, experts))
    expected = layout.pack(weight)
    packed = layout.pack(weight.torch("cuda"))
    for name, buffer in expected.buffers().items():
        assert packed.buffers()[name].is_cuda
        assert_same_bytes(packed.buffers()[name].cpu(), buffer)
    for back in (packed.unpack(), expected.to("cuda").unpack()):
        assert back.codes.is_cuda
        assert back.torch("cpu").numpy().same(weight)


@pytest.mark.gpu
@needs_triton
@needs_gpu
def test_views_and_streams_on_a_gpu():
    """A part of a tensor that begins at an odd address; another stream; a large matrix, again and again."""
    order = Marlin().codes
    whole = torch.randint(0, 256, (64 * 32 + 1,), dtype=torch.uint8)
    part = whole.cuda()[1:].reshape(64, 32)
    expected = arrange_codes(order, whole[1:].reshape(64, 32))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        moved = [arrange_codes(order, part) for _ in range(3)]
    stream.synchronize()
    for one in moved:
        assert torch.equal(one.cpu(), expected)
    large = torch.randint(0, 256, (4096, 4096), dtype=torch.uint8, device="cuda")
    for _ in range(2):
        assert torch.equal(restore_codes(order, arrange_codes(order, large), (4096, 8192)), large)
        scales = arrange(Columns().scales, large)
        assert torch.equal(scales.reshape(4096, 4096), large.T)
        assert torch.equal(restore(Columns().scales, scales, (4096, 4096)), large)
