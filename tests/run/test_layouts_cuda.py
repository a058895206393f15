"""The executor of CUDA tensors: in Triton's interpreter, compiled without a GPU, and on one."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gpu_codecs
import moves
from contract import MX_VARIANTS, VARIANTS, fitting
from cuda_code import ARCHITECTURES, Program
from gpu_codecs import needs_triton
from halfbyte import gpu
from halfbyte.errors import LayoutError
from halfbyte.layouts import LAYOUTS, Columns, Fragments, Marlin, NPacked, Order, Packed, Rows, cuda
from halfbyte.layouts.blocks import largest, present
from halfbyte.layouts.executors import arrange, arrange_codes, executor, restore, restore_codes
from helpers import assert_same_bytes, random_mxfp4, random_weight

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")


def test_every_word_is_written_once():
    """Tiles run in any order on a GPU, and in turn in the interpreter: there no second write shows."""
    count = 0
    for order, codes, shape in [*moves.statements(), *moves.any_statements(300)]:
        for back in (False, True):
            plan = cuda.plan(order, shape, 4 if codes else 8, back)
            if isinstance(plan, cuda.Plan):
                assert (moves.stores(plan) == 1).all(), (order, shape, back)
                count += 1
    assert count > 700


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
    assert golden == 17


@needs_triton
def test_blocks_as_numpy_in_the_interpreter():
    assert gpu_codecs.interpreted("blocks") == ["15"]


def test_what_is_compiled_is_kept_by_its_key():
    launched = []

    class Launched:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            def run(*args, **options):
                launched.append((self.name, grid, args, options))
                return Launched("compiled")

            return run

    known, tensor = {}, SimpleNamespace(is_cuda=True, device=-1)
    for key in (1, 1, 2):
        gpu.launch(known, key, Launched("kernel"), 3, (tensor, 7), num_warps=2)
    gpu.launch(known, 1, Launched("kernel"), 3, (SimpleNamespace(is_cuda=False),), num_warps=2)
    names = [(name, grid, options) for name, grid, _, options in launched]
    slow, fast = ("kernel", (3,), {"num_warps": 2}), ("compiled", (3, 1, 1), {})
    assert names == [slow, fast, slow, slow]
    assert all(args == (tensor, 7) for _, _, args, _ in launched[:3])
    assert list(known) == [1, 2]


def test_the_bytes_that_occur():
    scales = np.array([[7, 0], [126, 7]], np.uint8)
    for a in (scales, torch.from_numpy(scales)):
        assert present(a).tolist() == [0, 7, 126]
        assert largest(a) == 126
        assert largest(a[:0]) == 0
        assert present(a[:0]).tolist() == []


@pytest.mark.parametrize(
    ("order", "shape", "codes", "reason"),
    [
        (Columns(align=7).codes, (14, 32), True, "digit a has 7 values, which is no power of two"),
        (Order("n k -> n -k"), (4, 32), False, "digit k has no size and runs backwards"),
        (NPacked().codes, (3, 16), True, "pairs of codes are not whole bytes, by digits of n=3, k=16"),
        (NPacked().codes, (0, 16), True, "nothing moves"),
        (
            Order("(n a) (k b) -> n b k a", bits=moves.BITS, a=2, b=4),
            (2, 24),
            True,
            "words of 4 codes, where the bits of 8 move",
        ),
        (Rows().codes, (4, 16), True, "nothing moves"),
        (NPacked().codes, (2**20, 2**16, 2**10), True, "more tiles than a launch takes"),
    ],
    ids=str,
)
@needs_triton
def test_what_is_refused(order, shape, codes, reason):
    assert cuda.refuse(order, shape, codes=codes) == reason
    assert executor(order, shape, codes=codes, device="cuda") == ("torch", reason)


@needs_triton
def test_what_is_taken():
    order = Marlin().codes
    assert cuda.refuse(order, (2, 128, 256), codes=True) is None
    assert executor(order, (2, 128, 256), codes=True, device="cuda:1") == (
        "triton",
        "tiles of 8192 bytes, by words of 8",
    )
    assert executor(order, (2, 128, 256), codes=True, device="cpu") == ("torch", "the tensor is on cpu")
    with pytest.raises(LayoutError, match="not the size of this order"):
        cuda.run(order, torch.zeros(2, 100, dtype=torch.uint8), (128, 256), 4, back=True)


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = "triton is not installed; run: pip install 'halfbyte[cuda]'"
    assert cuda.refuse(Marlin().codes, (64, 64), codes=True) == reason


@pytest.mark.gpu
@needs_triton
@needs_gpu
@pytest.mark.parametrize("part", range(12))
def test_as_numpy_on_a_gpu(part):
    """In parts, since every statement compiles two kernels."""
    assert moves.check_all("cuda", random=100, part=slice(part, None, 12)) > 12


@pytest.mark.gpu
@needs_triton
@needs_gpu
def test_blocks_wide_offsets_and_golden_bytes_on_a_gpu():
    assert gpu_codecs.check_blocks("cuda") == 15
    moves.check_wide("cuda")
    assert moves.check_golden("cuda") == 17


@pytest.mark.gpu
@needs_triton
@needs_gpu
@pytest.mark.parametrize("shape", [((), 130, 64), ((3,), 24, 80), ((2, 2), 256, 192)], ids=str)
@pytest.mark.parametrize("layout", [*VARIANTS, *MX_VARIANTS], ids=lambda layout: layout.key)
def test_layouts_on_a_gpu(layout, shape):
    experts, n, k = shape
    if layout.needs((*experts, n, k)):
        return
    make = random_mxfp4 if layout.kind == "mxfp4" else random_weight
    weight = fitting(layout, make(np.random.default_rng(0), n, k, experts))
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
@pytest.mark.parametrize("layout", [Fragments(), Fragments("float16"), Marlin(scale_format="s0e5m3")], ids=str)
def test_refusals_on_a_gpu_are_those_of_the_cpu(layout):
    weight = random_weight(np.random.default_rng(0), 64, 256)
    packed = layout.pack(fitting(layout, weight))
    for byte in (0x7F, 0xFF, 0x80, 0xC1):
        scales, stored = weight.scales.copy(), packed.buffers()["scales"].copy()
        scales[9, 3] = scales[40, 0] = byte
        stored[77] = stored[200] = 0xFF
        said = []
        for device in ("cpu", "cuda"):
            with pytest.raises(LayoutError) as caught:
                layout.pack(weight.replace(scales=scales).torch(device))
            buffers = packed.to(device).buffers() | {"scales": torch.from_numpy(stored).to(device)}
            with pytest.raises(LayoutError) as back:
                layout.unpack(Packed(layout, packed.shape, buffers))
            said.append((str(caught.value), str(back.value)))
        assert said[0] == said[1]
        assert "[9, 3]" in said[0][0]


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


def program(order, codes, shape, back):
    """The kernel of a move."""
    from halfbyte.layouts.cuda_kernel import move

    made = cuda.plan(order, shape, 4 if codes else 8, back)
    words = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}[made.word]
    return Program(move, {"source": words, "target": words}, made.constants, {"num_warps": cuda.WARPS})


STATEMENTS = list(
    {
        (order, codes, layout.grid((14336, 4096), "codes" if codes else "scales")): None
        for layout in (*LAYOUTS, Fragments("float16"))
        for order, codes in ((layout.codes, True), (layout.scales, False))
    }
)
CASES = [(statement, back) for statement in STATEMENTS for back in (False, True)]
COMPILED = [(ARCHITECTURES[i % len(ARCHITECTURES)], *case) for i, case in enumerate(CASES)]
COMPILED += [(sm, case, back) for sm in ARCHITECTURES for case in STATEMENTS if case[0].bits for back in (False, True)]


@needs_triton
@pytest.mark.parametrize("start", range(4))
def test_compiles_without_a_gpu(start):
    """Every statement, both ways: vectors of 16 bytes at both ends, nothing spilled, little shared memory.

    Of fragments' codes, two vectors of 8 bytes lie in turn on one side.
    """
    for capability, statement, back in COMPILED[start::4]:
        code = program(*statement, back).compile(capability)
        case = (capability, statement, back)
        assert (code.stack, code.spills) == (0, 0), case
        assert code.registers <= 128, case
        assert code.shared <= 48 << 10, case
        accesses = re.findall(r"(?:ld|st)\.global\.\S+", code.ptx)
        wide = {"v2.b64", "v4.b32"} | ({"b64"} if statement[0].bits else set())
        assert {access.split(".", 2)[2] for access in accesses} <= wide, case
        assert len(accesses) >= 2
