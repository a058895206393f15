"""A product with a weight that is not quantized, on a GPU: against float64, in Triton's interpreter and as code."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cuda_code import ARCHITECTURES, Program, count
from gpu_codecs import needs_gpu, needs_triton
from halfbyte.decoder import product
from halfbyte.kernels import DenseArgs, select
from halfbyte.kernels.cuda import dense as cuda
from halfbyte.kernels.cuda.dense import Few, Many
from halfbyte.kernels.dense import DenseCall
from halfbyte.step_ops import dense

HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
HALVES = ("bfloat16", "float16")
CASES = [
    # M, N, K, how, dtypes
    (1, 37, 96, Few(1, 2, 2), tuple(HALF_ULP)),
    (1, 16, 2048, Few(4, 4, 2), tuple(HALF_ULP)),
    (2, 5, 32, Few(2, 1, 1), HALVES),
    (3, 9, 1056, Few(2, 3, 2), HALVES),
    (4, 9, 672, Few(1, 2, 3), ("float32",)),
    (2, 33, 352, Many(1, 1, 2), HALVES),
    (8, 16, 768, Many(2, 1, 3), HALVES),
    (9, 41, 32, Many(1, 2, 1), HALVES),
    (16, 64, 416, Many(4, 2, 1), HALVES),
]


def given(m, n, k, dtype, bias, device="cpu", *, whole=False):
    """Arguments, of small whole numbers or of others."""
    made = []
    for seed, shape in enumerate(((m, k), (n, k), (n,))):
        a = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
        made.append((a.mul(2).round() if whole else a).to(getattr(torch, dtype)).to(device))
    out = torch.full((m, n), torch.nan, dtype=made[0].dtype, device=device)
    return DenseArgs(x=made[0], weight=made[1], bias=made[2] if bias else None, out=out)


def bound(args, made):
    """Of errors, by each rounding on the way, and what is right, in float64."""
    x, weight = args.x.double(), args.weight.double()
    expected, size = x @ weight.T, x.abs() @ weight.abs().T
    if args.bias is not None:
        expected, size = expected + args.bias.double(), size + args.bias.double().abs()
    k = x.shape[1]
    if isinstance(made, Few):
        width = cuda.STEP // args.x.element_size()
        relative = (-(-k // width) + (10 if args.x.is_cuda else 21)) * 2.0**-24  # NumPy adds in another order
    else:
        relative = (k + 25) * 2.0**-23
    half = HALF_ULP[str(args.x.dtype).removeprefix("torch.")]
    return 1.01 * (relative * size + half * expected.abs()) + 2.0**-25, expected


def check(device, case):
    m, n, k, made, dtypes = case
    for dtype in dtypes:
        for bias in (False, True):
            args = given(m, n, k, dtype, bias, device)
            cuda.bind(args, made)(*args.arrays())
            most, expected = bound(args, made)
            off = (args.out.double() - expected).abs()
            assert (off <= most).all(), (case, dtype, bias, (off / most).max().item())
            args = given(m, n, k, dtype, bias, device, whole=True)
            cuda.bind(args, made)(*args.arrays())
            assert torch.equal(args.out, bound(args, made)[1].to(args.out.dtype)), (case, dtype, bias)


INTERPRETED = """
from test_dense import CASES, check
for case in CASES:
    check("cpu", case)
print("right")
"""


@needs_triton
def test_in_the_interpreter():
    """Within the bound, and of whole numbers, whose sums are exact, rounded once."""
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
    made = {"rows": 1, "dtype": "bfloat16", "device": "cuda", "library": "torch", "capability": 90, "bias": False}
    return DenseCall(**made | {"shape": (128256, 4096)} | changes)


def code_of(asked, made=None):
    from halfbyte.kernels.cuda import dense_code

    made = cuda.configure(asked) if made is None else made
    name, signature, constants = cuda.parts(asked, made, asked.capability)
    arguments = {name: of.removesuffix(":16") for name, of in signature.items()}
    kernel = getattr(dense_code, name)
    code = Program(kernel, arguments, constants, {"num_warps": made.warps}, ("K",)).compile(asked.capability)
    print(asked.capability, made, code)
    return code, constants


@needs_triton
@pytest.mark.parametrize("changes", [{}, {"rows": 16}, {"rows": 4, "dtype": "float32", "bias": True}], ids=str)
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_machine_code(changes, capability):
    """Nothing is spilled; weights come 16 bytes at a time and, where it starts early, before it waits."""
    asked = call(capability=capability, **changes)
    code, held = code_of(asked)
    assert (code.stack, code.spills, code.warnings) == (0, 0, [])
    assert code.registers <= 184
    made = cuda.configure(asked)
    if isinstance(made, Few):
        each = made.rows
        (loop,) = code.loops
        assert not code.matrix
        assert not count(loop.opcodes, r"SHFL|STS|LDS|BAR")
        assert loop.opcodes["LDG.E.128"] == held["ROWS"] * held["D"]
    else:
        each = 4 * made.stripes
        (loop,) = code.loops
        assert loop.matrix == 4 * made.ahead * made.stripes * held["B"]
        assert not count(loop.opcodes, r"SHFL|STS|LDS|BAR|PRMT")
    ops = [op for _, _, op, _ in code.instructions]
    weights = [op for op in ops if op.startswith("LDG.E.EF")]
    assert set(weights) == {"LDG.E.EF.128"}
    assert len(weights) == 2 * held["D"] * each
    if capability >= 90:
        before = ops[: ops.index("ACQBULK")]
        assert [op for op in before if op.startswith("LDG")] == ["LDG.E.EF.128"] * held["D"] * each
    assert (capability >= 90) == ("PREEXIT" in ops)


@needs_triton
def test_what_is_chosen():
    def name(**changes):
        return select(DenseArgs, call(**changes)).name

    assert [name(rows=m) for m in (1, 16, 17)] == ["triton-dense", "triton-dense", "dense-torch"]
    assert [name(rows=m, dtype="float32") for m in (4, 5)] == ["triton-dense", "dense-torch"]
    assert cuda.TRITON.refuse(call(rows=17)) == ("takes up to 16 tokens of bfloat16, not 17",)
    assert cuda.TRITON.refuse(call(shape=(1023, 72))) == (
        "takes a K that is a multiple of 32, not 72",
        "is for weights of 1024 rows or more, not 1023",
    )
    assert cuda.TRITON.refuse(call(capability=75)) == ("is for sm_80 or later, not sm_75",)
    ways = [type(cuda.configure(call(rows=m))) for m in range(1, 17)]
    assert ways == [Few] * cuda.BY_FEW + [Many] * (16 - cuda.BY_FEW)
    assert cuda.configure(call(rows=4, dtype="float32")) == Few()


def test_what_is_remembered_of_a_weight():
    """Nothing of another tensor, of one that was written to or moved, nor of one that is gone."""
    weights = cuda._Weights("cuda")
    a, b = torch.zeros(4), torch.zeros(4)
    first = weights.written(a)
    assert weights.written(a) is first
    assert weights.written(b) is not first
    a.add_(1)
    second = weights.written(a)
    assert second is not first
    a.data = b.data
    assert weights.written(a) is not second
    with torch.inference_mode():
        assert weights.written(torch.zeros(4)) is None
    assert len(weights._known) == 2
    del a, b
    gc.collect()
    assert not weights._known


def test_a_decoder_takes_it_for_few_tokens(monkeypatch):
    monkeypatch.setattr(product, "dense", lambda x, weight, bias: "op")
    monkeypatch.setattr(product, "dense_linear", lambda x, weight, bias: "torch")
    head = product.product([torch.nn.Linear(8, 8, device="meta")])
    assert [head(torch.zeros(m, 8)) for m in (1, 16, 17)] == ["op", "op", "torch"]


# On a GPU


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case):
    check("cuda", case)


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize("dtype", HALVES)
def test_early_launches(rows, dtype):
    """They find what the kernel ahead wrote, also in a graph, and of a weight that is written anew nothing is stale."""
    args = given(rows, 4099, 1024, dtype, bias=True, device="cuda", whole=True)

    def right():
        return bound(args, Many())[1].to(args.out.dtype)

    def step():
        args.x.add_(1)
        return dense(args.x, args.weight, args.bias)

    for _ in range(5):
        y = step()
        assert torch.equal(y, right())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, right())
    for _ in range(3):
        args.weight.neg_()
        assert torch.equal(dense(args.x, args.weight, args.bias), right())
