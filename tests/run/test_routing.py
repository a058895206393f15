"""Which experts tokens go to: against float64, and against transformers' routers, whatever kernel chooses."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gpu_routing
import halfbyte as hb
from cuda_code import ARCHITECTURES, Program
from gpu_codecs import needs_gpu, needs_triton
from gpu_routing import CASES, DEEPSEEK, NEMOTRON, QWEN, case, check
from halfbyte import route_op
from halfbyte.errors import UsageError
from halfbyte.kernels import RouteArgs, select
from halfbyte.kernels.cuda import routing as cuda
from halfbyte.kernels.routing import RouteCall

PARTS = ("routed", "equal", "odd")


def options(rule):
    return {name: value for name, value in vars(rule).items() if name != "top"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("experts", "rule", "bias"), CASES, ids=str)
def test_against_float64(experts, rule, bias, dtype):
    logits, added = case(experts, bias, dtype, tokens=50)
    indices, weights = hb.route(logits, rule.top, bias=added, **options(rule))
    assert (indices.dtype, weights.dtype) == (torch.int64, torch.float32)
    check(logits, added, rule, indices, weights)


@pytest.mark.parametrize("part", PARTS[1:])
def test_equal_and_odd_values(part, monkeypatch):
    monkeypatch.setattr(
        gpu_routing, "run", lambda logits, bias, rule: hb.route(logits, rule.top, bias=bias, **options(rule))
    )
    assert list(getattr(gpu_routing, part)("cpu"))


def router(name, experts, **config):
    """One of transformers' whose logits are its input."""
    modeling = pytest.importorskip(f"transformers.models.{name[0]}.modeling_{name[0]}")
    configuration = pytest.importorskip(f"transformers.models.{name[0]}.configuration_{name[0]}")
    made = getattr(configuration, name[2])(hidden_size=experts, **config)
    found = getattr(modeling, name[1])(made)
    with torch.no_grad():
        found.weight.copy_(torch.eye(experts))
    return found


def compared(found, logits, rule, bias=None):
    """Logits of a token differ enough that rounding decides nothing."""
    if bias is not None:
        found.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        _, theirs, numbers = found(logits)
    indices, weights = hb.route(logits, rule.top, bias=bias, **options(rule))
    by_number = [a.sort(-1).indices for a in (indices, numbers)]
    assert torch.equal(indices.gather(1, by_number[0]), numbers.gather(1, by_number[1]))
    torch.testing.assert_close(weights.gather(1, by_number[0]), theirs.gather(1, by_number[1]), rtol=2e-6, atol=0)


def spread(experts, tokens=64):
    """Logits (T, E) of which no two of a token are alike."""
    rng = np.random.default_rng(experts)
    values = np.linspace(-4, 4, experts, dtype=np.float32)
    return torch.from_numpy(np.stack([rng.permutation(values) for _ in range(tokens)]))


@pytest.mark.parametrize("renormalize", [True, False])
def test_as_qwen3_moe(renormalize):
    name = "qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeConfig"
    found = router(name, 128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=renormalize)
    compared(found, spread(128), QWEN if renormalize else gpu_routing.Rule(top=8, renormalize=False))


def test_as_mixtral():
    name = "mixtral", "MixtralTopKRouter", "MixtralConfig"
    compared(router(name, 8, num_local_experts=8, num_experts_per_tok=2), spread(8), gpu_routing.MIXTRAL)


def test_as_deepseek_v3():
    name = "deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config"
    config = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    found = router(name, 256, n_routed_experts=256, num_experts_per_tok=8, **config)
    compared(found, spread(256), DEEPSEEK, torch.linspace(-0.05, 0.05, 256))


def test_as_nemotron_h():
    name = "nemotron_h", "NemotronHTopkRouter", "NemotronHConfig"
    config = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 5.0, "norm_topk_prob": True}
    found = router(name, 512, n_routed_experts=512, num_experts_per_tok=22, **config)
    compared(found, spread(512), NEMOTRON, torch.linspace(-0.05, 0.05, 512))


def test_compiled_as_one_operator():
    logits, bias = case(256, bias=True)
    run = torch.compile(
        lambda x: hb.route(x, 8, bias=bias, **options(DEEPSEEK))[1].sum(-1), fullgraph=True, backend="eager"
    )
    assert torch.equal(run(logits), hb.route(logits, 8, bias=bias, **options(DEEPSEEK))[1].sum(-1))
    torch.library.opcheck(
        torch.ops.halfbyte.route.default,
        (logits, bias, 8, "sigmoid", True, 8, 4, 2, 2.5, "int32"),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_no_tokens_and_odd_strides():
    indices, weights = hb.route(torch.empty(0, 8), 2, dtype=torch.int32)
    assert (indices.shape, indices.dtype, weights.shape) == ((0, 2), torch.int32, (0, 2))
    logits, _ = case(8, bias=False)
    for a, b in zip(hb.route(logits.T.contiguous().T, 2), hb.route(logits, 2), strict=True):
        assert torch.equal(a, b)


def test_kinds_of_calls_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(route_op, "_known", {})
    for tokens in range(300):
        hb.route(torch.zeros(tokens, 4), 1)
    assert 0 < len(route_op._known) <= 257


def test_no_gradient():
    logits = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(UsageError, match="has no gradient"):
        hb.route(logits, 2)[1].sum().backward()


@pytest.mark.parametrize(
    ("logits", "top", "changed", "words"),
    [
        (torch.zeros(2, 8), 2, {"scoring": "tanh"}, "unknown scoring: got 'tanh', expected softmax or sigmoid"),
        (torch.zeros(2, 8), 9, {}, "experts do not fit the routing: got 8 experts in 1 groups, top 9 of 1 groups"),
        (torch.zeros(2, 8), 2, {"groups": 3}, "experts do not fit the routing: got 8 experts in 3 groups"),
        (torch.zeros(2, 8), 5, {"groups": 2}, "experts do not fit the routing: got 8 experts in 2 groups, top 5"),
        (torch.zeros(2, 8), 2, {"groups": 2, "top_groups": 3}, "no numbers to choose experts by: got top 2, 3 of 2"),
        (torch.zeros(2, 8), 0, {}, "no numbers to choose experts by: got top 0"),
        (torch.zeros(8), 2, {}, r"logits have other axes: got \(8,\), expected \(T, E\)"),
        (torch.zeros(2, 8, dtype=torch.int64), 2, {}, "logits is of the wrong dtype: got int64"),
        (np.zeros((2, 8), np.float32), 2, {}, "route takes torch tensors: got ndarray"),
        (torch.zeros(2, 8), 2, {"dtype": "int8"}, "indices are no integers of 32 or 64 bits: got int8"),
        (torch.zeros(2, 8), 2, {"bias": torch.zeros(7)}, r"bias does not fit route: got \(7,\), expected \(8,\)"),
        (torch.zeros(2, 8), 2, {"bias": torch.zeros(8).half()}, "bias does not fit route: got float16"),
    ],
)
def test_refused(logits, top, changed, words):
    with pytest.raises(UsageError, match=words):
        hb.route(logits, top, **changed)


@needs_triton
def test_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "gpu_routing", *PARTS],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "routed 48\nequal 8\nodd 3\n"), done.stderr[-3000:]


def call(experts, rule, **changes):
    made = {"rows": 1, "dtype": "float32", "device": "cuda", "library": "torch", "capability": 90, "indices": "int64"}
    return RouteCall(width=experts, rule=rule, **made | {"bias": False} | changes)


@needs_triton
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_machine_code(capability):
    from halfbyte.kernels.cuda.routing_code import route as kernel

    for experts, rule, bias in ((128, QWEN, False), (256, DEEPSEEK, True), (512, NEMOTRON, True)):
        signature, constants = cuda.parts(call(experts, rule, bias=bias, capability=capability), capability)
        code = Program(kernel, signature, constants, {"num_warps": 1}, ("E",)).compile(capability)
        assert (code.stack, code.spills, code.warnings) == (0, 0, [])
        assert code.opcodes["BAR.SYNC.DEFER_BLOCKING"] == 0


@needs_triton
def test_what_is_chosen():
    assert select(RouteArgs, call(128, QWEN)).name == "triton-route"
    assert select(RouteArgs, call(128, QWEN, device="cpu", capability=0)).name == "route-torch"
    assert cuda.TRITON.refuse(call(4096, QWEN)) == (
        "takes up to 2048 experts, groups rounded up to powers of two, not 4096",
    )


@needs_triton
@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("part", PARTS)
def test_on_a_gpu(part):
    assert list(getattr(gpu_routing, part)("cuda"))
