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
from halfbyte import step_ops
from halfbyte.decoder import generate
from halfbyte.decoder.product import product
from halfbyte.kernels import DenseArgs, select
from halfbyte.kernels.cuda import dense as cuda
from halfbyte.kernels.dense import DenseCall
from halfbyte.step_ops import dense

HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
CASES = [(1, 37, 96), (2, 5, 32), (1, 4, 2048), (2, 9, 4096), (1, 3, 4192), (2, 6, 5120), (1, 5, 12320)]
"""(M, N, K): a step and less, whole rounds, rounds that end within a step, and programs with fewer rows than warps."""


def given(m, n, k, dtype, bias, device="cpu", *, whole=False):
    """Arguments, of small whole numbers or of others."""
    made = []
    for seed, shape in enumerate(((m, k), (n, k), (n,))):
        a = torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed + sum(shape)), device=device)
        made.append((a.mul(2).round() if whole else a).to(getattr(torch, dtype)))
    out = torch.full((m, n), torch.nan, dtype=made[0].dtype, device=device)
    return DenseArgs(x=made[0], weight=made[1], bias=made[2] if bias else None, out=out)


def bound(args):
    """Of errors, by each rounding on the way, and what is right, in float64."""
    x, weight = args.x.double(), args.weight.double()
    expected, size = x @ weight.T, x.abs() @ weight.abs().T
    if args.bias is not None:
        expected, size = expected + args.bias.double(), size + args.bias.double().abs()
    steps = -(-x.shape[1] * args.x.element_size() // cuda.STEP)
    relative = (steps + (10 if args.x.is_cuda else 21)) * 2.0**-24  # NumPy adds in another order
    half = HALF_ULP[str(args.x.dtype).removeprefix("torch.")]
    return 1.01 * (relative * size + half * expected.abs()) + 2.0**-25, expected


def check(device, case):
    for dtype in HALF_ULP:
        for bias in (False, True):
            args = given(*case, dtype, bias, device)
            cuda.bind(args)(*args.arrays())
            most, expected = bound(args)
            off = (args.out.double() - expected).abs()
            assert (off <= most).all(), (case, dtype, bias, (off / most).max().item())
            args = given(*case, dtype, bias, device, whole=True)
            cuda.bind(args)(*args.arrays())
            assert torch.equal(args.out, bound(args)[1].to(args.out.dtype)), (case, dtype, bias)


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


@needs_triton
@pytest.mark.parametrize(("dtype", "k"), [("float32", 4096), ("bfloat16", 2880), ("float16", 4096)])
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_machine_code(capability, dtype, k):
    """Nothing is spilled; weights come 16 bytes at a time and, where it starts early, before it waits."""
    from halfbyte.kernels.cuda import dense_code

    asked = call(rows=2, capability=capability, dtype=dtype, shape=(128256, k), bias=k == 2880)
    signature, held = cuda.parts(asked, capability)
    arguments = {name: of.removesuffix(":16") for name, of in signature.items()}
    code = Program(dense_code.dense, arguments, held, {"num_warps": cuda.WARPS}, ("K",)).compile(capability)
    assert (code.stack, code.spills, code.warnings, code.matrix) == (0, 0, [], 0)
    assert code.registers <= 255
    (loop,) = code.loops
    assert not count(loop.opcodes, r"SHFL|STS|LDS|BAR")
    assert loop.opcodes["LDG.E.128"] == 2 * held["D"]
    ops = [op for _, _, op, _ in code.instructions]
    assert [op for op in ops if op.startswith("LDG.E.EF")] == ["LDG.E.EF.128"] * 2 * held["D"]
    if capability >= 90:
        before = ops[: ops.index("ACQBULK")]
        assert [op for op in before if op.startswith("LDG")] == ["LDG.E.EF.128"] * held["D"]
    assert (capability >= 90) == ("PREEXIT" in ops)


@pytest.mark.parametrize(("dtype", "k", "ahead", "tail"), [
    ("bfloat16", 4096, 16, False), ("float32", 4096, 16, False), ("bfloat16", 1024, 4, False),
    ("float16", 2880, 12, True), ("bfloat16", 5120, 10, False), ("float32", 5120, 14, True), ("bfloat16", 32, 1, True),
])  # fmt: skip
def test_steps_ahead_follow_from_k(dtype, k, ahead, tail):
    _, held = cuda.parts(call(dtype=dtype, shape=(128256, k)), 90)
    assert (held["D"], held["TAIL"]) == (ahead, tail)


@needs_triton
def test_what_is_chosen():
    def name(**changes):
        return select(DenseArgs, call(**changes)).name

    for dtype in HALF_ULP:
        assert [name(rows=m, dtype=dtype) for m in (1, 2, 3, 16)] == ["triton-dense"] * 2 + ["dense-torch"] * 2
    for k, two in ((992, "dense-torch"), (1024, "triton-dense"), (8192, "triton-dense"), (8224, "dense-torch")):
        assert [name(rows=m, shape=(8, k)) for m in (1, 2)] == ["triton-dense", two]
    assert cuda.TRITON.refuse(call(rows=3)) == ("takes up to 2 tokens, not 3: cuBLAS is faster",)
    assert cuda.TRITON.refuse(call(shape=(128256, 4104))) == ("takes a K that is a multiple of 32, not 4104",)
    assert cuda.TRITON.refuse(call(rows=2, shape=(49152, 576))) == (
        "takes 2 tokens with a K from 1024 to 8192, not 576: cuBLAS is faster",
    )
    assert cuda.TRITON.refuse(call(capability=75)) == ("is for sm_80 or later, not sm_75",)


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


class Wrapper(torch.Tensor):
    """A weight as other libraries have them: it has no memory of its own."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        y = func(*(a.held if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        return cls(y) if func is torch.ops.aten.detach.default else y


def test_a_weight_of_another_library_multiplies_as_it_does(monkeypatch):
    module = torch.nn.Linear(64, 32)
    x, weight = torch.randn(1, 64), module.weight.detach()
    monkeypatch.setattr("halfbyte.decoder.product.dense", lambda x, weight, bias: weight.data_ptr())
    assert product([module])(x) == weight.data_ptr() != 0
    module.weight = torch.nn.Parameter(Wrapper(weight), requires_grad=False)
    torch.testing.assert_close(product([module])(x), x @ weight.T + module.bias)


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
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", list(HALF_ULP))
def test_early_launches(rows, dtype):
    """They find what the kernel ahead wrote, also in a graph, and of a weight that is written anew nothing is stale."""
    args = given(rows, 4099, 1024, dtype, bias=True, device="cuda", whole=True)
    assert select(DenseArgs, args.call()) is cuda.TRITON

    def right():
        return (args.x.float() @ args.weight.float().T + args.bias.float()).to(args.out.dtype)

    def step():
        args.x.add_(1)
        return dense(args.x, args.weight, args.bias)

    for _ in range(5):
        y = step()
        torch.cuda.synchronize()
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


@needs_triton
@needs_gpu
@pytest.mark.gpu
def test_a_head_in_generate(monkeypatch):
    """One sequence takes it, also in a graph, and 16 do not."""
    from decoder_models import tiny

    sizes = {"vocab_size": 2048, "hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8}
    model = tiny("llama", dtype=torch.bfloat16, **sizes).to("cuda")
    names = []

    def noted(bundle, asked):
        kernel = select(bundle, asked)
        if bundle is DenseArgs and asked.shape[0] == sizes["vocab_size"]:
            names.append(kernel.name)
        return kernel

    monkeypatch.setattr(step_ops, "select", noted)
    monkeypatch.setattr(step_ops, "_known", {})
    prompts = [[i, 7, 11] for i in range(16)]
    eager, held = (generate(model, prompts[:1], max_new_tokens=12, graph=graph) for graph in (False, True))
    assert (held.tokens, names) == (eager.tokens, ["triton-dense"])
    generate(model, prompts, max_new_tokens=3)
    assert names == ["triton-dense", "dense-torch"]
