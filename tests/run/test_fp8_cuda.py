"""FP8 on a GPU: what quantizes activations, the twin through torch, and both as operators; without a GPU and on one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gpu_fp8
import halfbyte as hb
from cuda_code import compile_ahead
from gpu_codecs import needs_gpu, needs_triton
from halfbyte import fp8_ops
from halfbyte.errors import UsageError
from halfbyte.kernels import Fp8Args, fp8
from halfbyte.kernels.cuda import fp8_quantize, launch, scaled_mm
from halfbyte.kernels.fp8 import quantized
from halfbyte.kinds import Fp8Weight
from halfbyte.layouts import Fragments, Rows
from halfbyte.ops import linear, pack
from halfbyte.torch_ops import linear_fp8_op, traced_twin
from halfbyte.weight import to_numpy, to_torch
from helpers_run import HALF_ULP, fp8_call_like, random_floats, random_weight

DTYPES = ("float32", "bfloat16", "float16")


# What quantizes


@needs_triton
def test_the_bytes_in_the_interpreter():
    tests = Path(__file__).parent.parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "gpu_fp8"], capture_output=True, text=True, env=environment, cwd=tests, check=False
    )
    assert (done.returncode, done.stdout) == (0, "116\n"), done.stderr[-3000:]


def test_the_order_of_64():
    data = np.arange(100, dtype=np.uint8)[None]
    found = gpu_fp8.in_order(data)[0].tolist()
    assert found[:16] == [0, 8, 1, 9, 16, 24, 17, 25, 32, 40, 33, 41, 48, 56, 49, 57]
    assert found[16:32] == [2, 10, 3, 11, 18, 26, 19, 27, 34, 42, 35, 43, 50, 58, 51, 59]
    assert found[32] == 4
    assert sorted(found[:64]) == list(range(64))
    assert found[64:80] == [64, 72, 65, 73, 80, 88, 81, 89, 96, 0, 97, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("k", "block", "rounds", "warps"),
    [
        (1, 512, 1, 1),
        (512, 512, 1, 1),
        (513, 1024, 1, 1),
        (4096, 4096, 1, 4),
        (28672, 32768, 1, 32),
        (32768, 32768, 1, 32),
        (32784, 16384, 3, 16),
        (57344, 16384, 4, 16),
    ],
)
def test_rows_are_held_whole_up_to_a_size(k, block, rounds, warps):
    signature, constants, found = fp8_quantize.specified("bfloat16", k, capability=90, ordered=False)
    assert (constants["BLOCK"], constants["ROUNDS"], found) == (block, rounds, warps)
    assert signature["k"] == ("i32:16" if k % 16 == 0 else "i32")


def test_what_a_gpu_can_do():
    """The instruction from sm_90 on; before it the bytes are made of integers."""
    for capability, converts in ((0, False), (80, False), (89, False), (90, True), (120, True)):
        _, constants, _ = fp8_quantize.specified("float16", 64, capability=capability, ordered=True, early=True)
        assert (constants["CONVERT"], constants["EARLY"]) == (converts, converts)
    assert not fp8_quantize.specified("float16", 64, capability=90, ordered=True)[1]["EARLY"]


def test_where_data_and_scales_lie():
    assert [fp8_quantize.pitch(k) for k in (1, 16, 17, 4096)] == [16, 16, 32, 4096]
    assert fp8_quantize.scales_at(3, 17) == 96
    assert fp8_quantize.nbytes(3, 17) == 96 + 16
    assert fp8_quantize.nbytes(256, 4096) == 256 * 4096 + 1024


# The twin


def twin_call(**changes):
    return fp8_call_like(**({"layout": Rows(), "resident": True} | changes))


@needs_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu", "capability": 0}, "runs on NVIDIA GPUs, not on cpu"),
        ({"capability": 80}, "is for sm_89 or later, not sm_80"),
        ({"shape": (3, 32, 64)}, "takes one matrix (N, K), not expert axes (3,)"),
        ({"blocks": True}, "takes a scale of the weight or of each row, not of blocks"),
        (
            {"resident": False, "layout": Fragments()},
            "multiplies by an Fp8Weight, not by NVFP4; see halfbyte.to_fp8",
        ),
    ],
)
def test_refusals(changes, reason):
    assert scaled_mm.TORCH.refuse(twin_call(**changes)) == (reason,)


@needs_triton
def test_nothing_else_is_refused():
    for dtype in DTYPES:
        for out_dtype in DTYPES:
            for sm in (89, 90, 100, 120):
                call = twin_call(dtype=dtype, out_dtype=out_dtype, capability=sm, shape=(1, 3), rows=1, bias=True)
                assert scaled_mm.TORCH.refuse(call) == ()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (33, 64), (32, 63), (3, 5)])
def test_the_operand_is_padded_once(n, k, per_row):
    data = torch.arange(n * k, dtype=torch.int32).to(torch.uint8).view(n, k)
    scale = torch.rand(n, 1) if per_row else torch.tensor(0.5)
    twin = Fp8Weight(data=data, scale=scale)
    b, scales = scaled_mm.operand(twin)
    padded = -(-n // 16) * 16, -(-k // 16) * 16
    assert (b.shape, b.stride(), b.dtype) == (padded[::-1], (1, padded[1]), torch.float8_e4m3fn)
    assert (scales.shape, scales.is_contiguous()) == ((1, padded[0]), True)
    assert torch.equal(b.t()[:n, :k].view(torch.uint8), data)
    assert not b.t()[n:].view(torch.uint8).any()
    assert not b.t()[:, k:].view(torch.uint8).any()
    assert torch.equal(scales[0, :n], scale.expand(n, 1)[:, 0])
    assert not scales[0, n:].any()
    whole = (n, k) == padded
    assert (b.data_ptr() == data.data_ptr()) == whole
    assert scaled_mm.operand(twin)[0].data_ptr() == b.data_ptr()
    twin.data.zero_()
    twin.scale.mul_(2)
    again, doubled = scaled_mm.operand(twin)
    assert not again.view(torch.uint8).any()
    assert torch.equal(doubled, scales * 2)
    twin.data.data = torch.full_like(data, 3)  # which torch does not count
    assert (scaled_mm.operand(twin)[0].t()[:n, :k].view(torch.uint8) == 3).all()
    assert scaled_mm.padding(twin_call(shape=(n, k))) == 4 * padded[0] + (0 if whole else padded[0] * padded[1])


@pytest.fixture
def emulated(monkeypatch):
    """torch's product as float64, the quantizer as NumPy has it; what was asked of torch is kept."""
    asked = []

    def product(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, *, out=None):
        assert scale_result is None
        assert (a.dtype, b.dtype, scale_a.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32)
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
        assert bias is None or bias.dtype == out_dtype != torch.float32
        asked.append((out_dtype, out is not None))
        y = (a.double() @ b.double()).float() * scale_b * scale_a
        y = (y if bias is None else y + bias.float()).to(out_dtype)
        return y if out is None else out.copy_(y)

    def quantizer(device, dtype, k, *, ordered, pre_scale, early):
        assert (ordered, early) == (False, True)
        width = fp8_quantize.pitch(k)
        words, to = (ctypes.c_int32, torch.int32) if dtype == "float32" else (ctypes.c_int16, torch.int16)

        def run(rows, x, pre, data, scales):
            values = torch.tensor((words * (rows * k)).from_address(x), dtype=to).view(getattr(torch, dtype))
            given = torch.tensor((ctypes.c_float * k).from_address(pre)) if pre_scale else None
            q, scale = quantized(values.view(rows, k), given)
            full = torch.zeros(rows, width, dtype=torch.uint8)
            full[:, :k] = q
            ctypes.memmove(data, full.data_ptr(), full.numel())
            ctypes.memmove(scales, scale.contiguous().data_ptr(), 4 * rows)

        return run

    memory = torch.empty(1 << 16, dtype=torch.uint8)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(scaled_mm, "quantizer", quantizer)
    monkeypatch.setattr(scaled_mm, "workspace", lambda device, nbytes: memory[:nbytes] if nbytes < 9999 else None)
    return asked


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (33, 63)])
def test_the_result_is_rounded_once(emulated, dtype, out_dtype, bias_dtype, n, k):
    w = random_weight(n, k, per_row=n == 33, pre_scale=k == 63)
    twin = hb.to_fp8(w.torch())
    x = to_torch(random_floats((5, k), dtype))
    bias = None if bias_dtype is None else to_torch(random_floats((n,), bias_dtype))
    out = torch.empty(5, n, dtype=getattr(torch, out_dtype))
    args = Fp8Args(x=x, weight=twin, bias=bias, out=out)
    run = scaled_mm.bind(args)
    for _ in range(2):
        out.fill_(7)
        run(x, bias, out)
        assert torch.equal(out, linear(x, twin, bias, out_dtype=out_dtype))
    at_once = bias is None or bias_dtype == out_dtype != "float32"
    assert emulated[0] == (out.dtype if at_once else torch.float32, n == 32 and at_once)
    out.fill_(7)
    scaled_mm.TORCH.run(args)
    assert torch.equal(out, linear(x, twin, bias, out_dtype=out_dtype))


@pytest.mark.parametrize(("n", "k"), [(32, 64), (33, 63)])
@pytest.mark.parametrize("bias_dtype", [None, "float32"])
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (1, 2, 3)])
def test_a_result_of_any_axes_is_written_as_it_is(emulated, lead, bias_dtype, n, k):
    twin = hb.to_fp8(random_weight(n, k).torch())
    rows = to_torch(random_floats((prod(lead), k), "bfloat16"))
    bias = None if bias_dtype is None else to_torch(random_floats((n,), bias_dtype))
    out = torch.empty(len(rows), n, dtype=torch.bfloat16)
    run = scaled_mm.bind(Fp8Args(x=rows, weight=twin, bias=bias, out=out))
    shaped = torch.empty(*lead, n, dtype=torch.bfloat16)  # as halfbyte.remembered calls it
    run(rows.view(*lead, k), bias, shaped)
    assert torch.equal(shaped, linear(rows, twin, bias).view(*lead, n))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_changes_nothing(default):
    twin = hb.to_fp8(random_weight(33, 63).torch())
    x = to_torch(random_floats((4, 63), "float32"))
    x[1] *= 2.0**-70
    q, scale = quantized(x, None)
    torch.set_default_dtype(default)
    try:
        assert scaled_mm.operand(twin)[1].dtype == torch.float32
        assert all(map(torch.equal, quantized(x, None), (q, scale)))
        assert quantized(x, None)[1].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_is_made_in_a_capture_is_not_kept(monkeypatch):
    """The graph makes it, so that it is not there before the graph runs."""
    twin = hb.to_fp8(random_weight(33, 63).torch())
    monkeypatch.setattr(scaled_mm, "capturing", lambda device: True)
    scaled_mm.operand(twin)
    assert scaled_mm.NAME not in twin.memo
    monkeypatch.setattr(scaled_mm, "capturing", lambda device: False)
    scaled_mm.operand(twin)
    assert scaled_mm.NAME in twin.memo


def test_a_call_in_a_capture_is_not_remembered(emulated, monkeypatch):
    monkeypatch.setattr("halfbyte.kernels.KERNELS", (scaled_mm.TORCH,))
    monkeypatch.setitem(scaled_mm.TORCH.__dict__, "refuse", lambda call: ())
    monkeypatch.setattr(fp8_ops, "device_of", lambda x: "cuda")
    twin = hb.to_fp8(random_weight(32, 64).torch())
    x = to_torch(random_floats((5, 64), "float32"))
    for captured in (True, False):
        monkeypatch.setattr(fp8_ops, "capturing", lambda device, captured=captured: captured)
        linear(x, twin)
        assert any(isinstance(known, tuple) for known in twin.memo) is not captured


def test_threads_that_share_a_stream_take_turns(emulated, monkeypatch):
    """Between a call's two launches nobody else writes to the memory that the second reads."""
    given = scaled_mm.quantizer
    others = []

    def quantizer(*args, **how):
        run = given(*args, **how)

        def late(*values):
            run(*values)
            if threading.current_thread() is threading.main_thread():
                others.append(threading.Thread(target=lambda: linear_of(1)))
                others[0].start()
                others[0].join(0.2)  # it waits for this call to end

        return late

    monkeypatch.setattr(scaled_mm, "quantizer", quantizer)
    twin = hb.to_fp8(random_weight(32, 64).torch())
    xs = [to_torch(random_floats((5, 64), "float32", seed)) for seed in (3, 4)]
    expected = [linear(x, twin) for x in xs]
    outs = [torch.zeros(5, 32) for _ in xs]

    def linear_of(i):
        scaled_mm.bind(Fp8Args(x=xs[i], weight=twin, bias=None, out=outs[i]))(xs[i], None, outs[i])

    linear_of(0)
    others[0].join()
    assert all(map(torch.equal, outs, expected))


# As operators of torch's


def parts_of(held):
    """Layout, N, K, names and buffers, as the operator takes them."""
    if isinstance(held, Fp8Weight):
        buffers = {"data": held.data, "scale": held.scale} | (
            {} if held.pre_scale is None else {"pre_scale": held.pre_scale}
        )
        return "fp8", *held.shape, ",".join(buffers), list(buffers.values())
    return held.key, *held.shape, ",".join(held.buffers()), list(held.buffers().values())


def weights():
    w = random_weight(48, 64, per_row=True, pre_scale=True).torch()
    return {"packed": pack(w), "fragments": pack(w, Fragments()), "twin": hb.to_fp8(w)}


each_form = pytest.mark.parametrize("form", ["packed", "fragments", "twin"])


@each_form
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_operator_is_sound(form, dtype):
    held, x = weights()[form], to_torch(random_floats((2, 3, 64), dtype))
    bias = to_torch(random_floats((48,), "float32"))
    for added in (None, bias):
        args = x, *parts_of(held), added, torch.float32
        checked = torch.library.opcheck(linear_fp8_op, args)
        assert set(checked.values()) == {"SUCCESS"}
        expected = linear(x, held, added, out_dtype="float32", precision="fp8")
        for _ in range(2):
            assert torch.equal(linear_fp8_op(*args), expected)


@pytest.mark.parametrize("strict", [False, True])
@each_form
def test_exported(form, strict):
    held = weights()[form]

    class Layer(torch.nn.Module):
        def forward(self, x):
            return linear(x, held, precision="fp8") + 1

    x = to_torch(random_floats((5, 64), "float32"))
    exported = torch.export.export(
        Layer(), (x,), strict=strict, dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=600)},)
    )
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert targets[0] is torch.ops.halfbyte.linear_fp8.default
    for rows in (2, 300):
        x = to_torch(random_floats((rows, 64), "float32"))
        assert torch.equal(exported.module()(x), linear(x, held, precision="fp8") + 1)


def test_the_shape_of_a_fake_result():
    with FakeTensorMode():
        x = torch.empty(7, 64, dtype=torch.bfloat16, device="cuda")
        data, scale = torch.empty(48, 64, dtype=torch.uint8, device="cuda"), torch.empty(48, 1, device="cuda")
        y = linear_fp8_op(x, "fp8", 48, 64, "data,scale", [data, scale], None, torch.float16)
        assert (y.shape, y.dtype, y.device.type) == ((7, 48), torch.float16, "cuda")
        with pytest.raises(UsageError, match="the weight and x are on two devices"):
            linear_fp8_op(x.cpu(), "fp8", 48, 64, "data,scale", [data, scale], None, torch.float16)


def test_blocks_are_refused_while_torch_traces():
    twin = Fp8Weight(data=torch.zeros(4, 32, dtype=torch.uint8), scale=torch.ones(2, 2), block=(2, 16))
    with pytest.raises(UsageError, match="no kernel takes an FP8 weight with a scale for each block"):
        traced_twin(torch.ones(1, 32), twin, None, None)


def test_the_operator_takes_the_scale_it_is_given(emulated, monkeypatch):
    """Though the data are the same, whose memory is what the padded copy is kept with."""
    monkeypatch.setattr("halfbyte.kernels.KERNELS", (scaled_mm.TORCH,))
    monkeypatch.setitem(scaled_mm.TORCH.__dict__, "refuse", lambda call: ())
    w = hb.to_fp8(random_weight(33, 63).torch())
    x = to_torch(random_floats((5, 63), "float32"))
    y = [linear_fp8_op(x, "fp8", 33, 63, "data,scale", [w.data, w.scale * f], None, torch.float32) for f in (1, 2, 4)]
    assert torch.equal(y[1], 2 * y[0])
    assert torch.equal(y[2], 4 * y[0])


def test_the_operator_keeps_what_is_padded_and_no_weight(emulated, monkeypatch):
    """A twin that nothing else holds goes, with what is kept of it."""
    import gc
    import weakref

    from halfbyte import torch_ops

    monkeypatch.setattr("halfbyte.kernels.KERNELS", (scaled_mm.TORCH,))
    monkeypatch.setitem(scaled_mm.TORCH.__dict__, "refuse", lambda call: ())
    w = hb.to_fp8(random_weight(33, 63).torch())
    x = to_torch(random_floats((5, 63), "float32"))
    args = "fp8", 33, 63, "data,scale", [w.data, w.scale], None, torch.float32
    linear_fp8_op(x, *args)
    kept = torch_ops._memos[w.data][scaled_mm.NAME]
    linear_fp8_op(x, *args)
    assert torch_ops._memos[w.data][scaled_mm.NAME] is kept
    gone = weakref.ref(w.data)
    del w, args, kept
    gc.collect()
    assert gone() is None


# On a GPU

on_gpu = [pytest.mark.gpu, needs_triton, needs_gpu]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
with_fp8 = pytest.mark.skipif(not HOPPER, reason="torch multiplies FP8 from sm_89 on")
SUMS = 5e-3
"""What matrix units lose in their sums, of the norm of a result, at the most."""


TWINS = ((272, 1088, 300), (33, 63, 3), (1, 16, 1))
"""N, K and M."""


@pytest.fixture(scope="class")
def compiled():
    """What quantizes, compiled by all cores at once."""
    major, minor = torch.cuda.get_device_capability()
    made = gpu_fp8.programs(10 * major + minor)
    for _, k, _ in TWINS:
        for dtype in DTYPES:
            signature, constants, warps = fp8_quantize.specified(
                dtype, k, capability=10 * major + minor, ordered=False, pre_scale=k == 63, early=True
            )
            made.append((signature, constants, launch.options_of(warps=warps)))
    compile_ahead("halfbyte.kernels.cuda.fp8_quantize_code", "quantize", made, 10 * major + minor)


@pytest.mark.usefixtures("compiled")
class TestOnGpu:
    pytestmark = on_gpu

    def test_the_bytes(self):
        assert gpu_fp8.check("cuda") == 116

    def test_early(self):
        """Three in a row, each on what the last one was given; nothing is read before it is there."""
        x = torch.randn(4096, 4096, device="cuda").bfloat16()
        run, plain = (
            fp8_quantize.quantizer(x.device, "bfloat16", 4096, ordered=True, early=early) for early in (True, False)
        )
        found = []
        for one in (run, plain):
            data, scales = torch.empty(4096, 4096, dtype=torch.uint8, device="cuda"), torch.empty(4096, device="cuda")
            for factor in (1.0, 2.0, 4.0):
                y = x * factor
                one(4096, y.data_ptr(), None, data.data_ptr(), scales.data_ptr())
            found.append((data, scales))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])

    @with_fp8
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("out_dtype", DTYPES)
    @pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
    def test_a_twin(self, dtype, out_dtype, bias_dtype):
        for n, k, m in TWINS:
            twin = hb.to_fp8(random_weight(n, k, per_row=n == 33, pre_scale=k == 63).torch("cuda"))
            x = to_torch(random_floats((m, k), dtype), "cuda")
            bias = None if bias_dtype is None else to_torch(random_floats((n,), bias_dtype), "cuda")
            y = linear(x, twin, bias, out_dtype=out_dtype)
            out, sizes = torch.empty(m, n, device="cuda"), torch.empty(m, n, device="cuda")
            fp8.TORCH.launch(Fp8Args(x=x, weight=twin, bias=bias, out=out))
            sized = Fp8Weight(data=twin.data & 0x7F, scale=twin.scale, pre_scale=twin.pre_scale)
            fp8.TORCH.launch(Fp8Args(x=x.abs(), weight=sized, bias=None, out=sizes))
            assert y.dtype == getattr(torch, out_dtype)
            off, norm = torch.linalg.norm(y.float() - out), torch.linalg.norm(out)
            assert off <= 2.0**-11 * torch.linalg.norm(sizes) + HALF_ULP[out_dtype] * norm
            assert k < 1000 or off <= SUMS * norm
            for shaped in (x, x[None], x[None]):
                assert torch.equal(linear(shaped, twin, bias, out_dtype=out_dtype), y.view(*shaped.shape[:-1], n))

    @with_fp8
    def test_what_is_not_finite_stays_in_its_token(self):
        twin = hb.to_fp8(random_weight(272, 1088).torch("cuda"))
        x = to_torch(random_floats((9, 1088), "bfloat16"), "cuda")
        x[1, 5], x[3, 1087], x[6] = torch.nan, torch.inf, 0
        y = linear(x, twin)
        assert y[[1, 3]].isnan().all()
        assert not y[6].any()
        assert y[[0, 2, 4, 5, 7, 8]].isfinite().all()

    @with_fp8
    def test_captured(self):
        twin = hb.to_fp8(random_weight(272, 1088).torch("cuda"))
        x = to_torch(random_floats((300, 1088), "bfloat16"), "cuda")
        linear(x, twin)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(x, twin)
        for seed in range(3):
            x.copy_(to_torch(random_floats((300, 1088), "bfloat16", seed), "cuda"))
            graph.replay()
            assert torch.equal(y, linear(x, twin))

    @pytest.mark.parametrize("rows", [1, 255])
    def test_few_tokens_are_exact(self, rows):
        packed = pack(random_weight(272, 1088), Fragments()).to("cuda")
        x = to_torch(random_floats((rows, 1088), "bfloat16"), "cuda")
        for _ in range(2):
            assert torch.equal(linear(x, packed, precision="fp8"), linear(x, packed))

    def test_exact_calls_of_many_tokens_are_remembered(self):
        packed = pack(random_weight(272, 1088), Fragments()).to("cuda")
        for rows in (65, 300):
            x = to_torch(random_floats((rows, 1088), "bfloat16"), "cuda")
            first, count = linear(x, packed), len(packed.memo)
            assert torch.equal(linear(x, packed), first)
            assert len(packed.memo) == count > 0

    def test_many_tokens_are_as_plan_says(self):
        packed = pack(random_weight(272, 1088), Fragments()).to("cuda")
        x = to_torch(random_floats((300, 1088), "bfloat16"), "cuda")
        chosen = hb.plan("linear", packed, rows=300, device="cuda", precision="fp8")
        y, exact = linear(x, packed, precision="fp8"), linear(x, packed)
        off = float(torch.linalg.norm((y - exact).float()) / torch.linalg.norm(exact.float()))
        assert (off > 0.01) == (chosen.call.op == Fp8Args.op)
        assert off < 0.05
        assert torch.equal(linear(x, packed, precision="fp8"), y)

    @pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
    @pytest.mark.parametrize("form", ["packed", "twin"])
    def test_compiled(self, form):
        w = random_weight(272, 1088).torch("cuda")
        held = pack(w, Fragments()) if form == "packed" else hb.to_fp8(w)

        def around(x):
            return linear(2 * x, held, precision="fp8") + 1

        torch._dynamo.reset()
        compiled = torch.compile(around, fullgraph=True, dynamic=False)
        x = to_torch(random_floats((300, 1088), "bfloat16"), "cuda")
        assert torch.equal(compiled(x), around(x))
        assert np.isfinite(to_numpy(compiled(x)).astype(np.float32)).all()
