"""How kernels are launched on a GPU, with a stand-in for the driver: Triton compiles, and its launcher is called."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch

from halfbyte.errors import UnavailableError, UsageError
from halfbyte.kernels import Call
from halfbyte.kernels.cuda import launch, shared
from halfbyte.kernels.cuda.launch import boxes, compile_for, program, unknown, untested, why_not
from halfbyte.kernels.cuda.shared import capturing, counters, keeping_nothing, workspace
from halfbyte.layouts import Packed
from halfbyte.lossy import to_fp8
from halfbyte.ops import pack
from helpers_run import call_like, random_weight

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
gluon = pytest.importorskip("triton.experimental.gluon")
gl = gluon.language
hopper = pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
mbarrier, tma = hopper.mbarrier, hopper.tma

SIGNATURE = {"x": "*bf16:16", "words": "*i32:16", "out": "*fp32", "m": "i32"}
CONSTANTS = {"BLOCK": 128, "TEXT": "add.f32 $0, $1, $1;"}
GRID = (3, 2, 1)
ARGS = (0x1000, 0x2000, 0x3004, 7)
FUNCTION = 0xF00D


def scale(x, words, out, m, BLOCK: tl.constexpr, TEXT: tl.constexpr):  # noqa: N803 - as kernels name constants
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < m, 0).to(tl.float32) + tl.load(words + at, at < m, 0)
    tl.store(out + at, tl.inline_asm_elementwise(TEXT, "=f,f", [value], tl.float32, True, 1), at < m)


@pytest.fixture
def kernel():
    """One that nothing was launched with."""
    return triton.jit(scale)


@pytest.fixture
def gpu(monkeypatch):
    """Two Hopper GPUs that do nothing but tell what they are asked for."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia

    state = SimpleNamespace(current=1, capturing=False, launched=[], entered=[], loads=0)

    @contextlib.contextmanager
    def device(index):
        index = torch.device("cuda", index).index if isinstance(index, int) else torch.device(index).index
        before, state.current = state.current, index
        state.entered.append(index)
        yield
        state.current = before

    def load_binary(name, kernel, shared, device):
        state.loads += 1
        return None, FUNCTION, 32, 0, 1024  # no module: Triton would unload it when its stand-in is gone

    def launched(*args):
        state.launched.append(args)

    def stream(index):
        return 0x51 + index

    utils = SimpleNamespace(
        launch=launched,
        load_binary=load_binary,
        get_device_properties=lambda index: {"max_shared_mem": 232448},
        build_signature_metadata=tuple,
    )
    state.driver = SimpleNamespace(
        utils=utils,
        launcher_cls=nvidia.CudaLauncher,
        get_current_device=lambda: state.current,
        get_current_stream=stream,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", state.driver)
    # What launchers are made of, as the tested versions of Triton do it.
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr(nvidia, "PyKernelArg", lambda nested_tuple, type: type, raising=False)  # noqa: A006
    monkeypatch.setattr(nvidia, "ARG_KERNEL", "argument", raising=False)
    monkeypatch.setattr(nvidia, "ARG_CONSTEXPR", "constant", raising=False)
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: utils, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.current, raising=False)
    monkeypatch.setattr(launch, "_programs", {})
    monkeypatch.setattr(shared, "_shared", {})
    monkeypatch.setattr(shared, "_captured", {})
    monkeypatch.setattr(shared, "capture_of", lambda stream: int(state.capturing))
    return state


def seen(call):
    """Of the arguments of Triton's C function: the grid, the stream, the function, two switches, and the kernel's own.

    Addresses of a launch by ``kernel[grid]`` are objects; here they are "@" and a number.
    """
    own = call[-1] if isinstance(call[-1], tuple) else call[13:] if len(call) > 13 else call
    values = [f"@{a.data_ptr():x}" if hasattr(a, "data_ptr") else a for a in own]
    return call[:7], tuple(values[: len(ARGS)])


@pytest.mark.parametrize("pdl", [False, True])
def test_a_launch_hands_over_the_grid_the_stream_and_the_arguments(gpu, kernel, pdl):
    made = program(kernel, SIGNATURE, CONSTANTS, device="cuda:1", warps=2, pdl=pdl)
    assert made.plainly is None
    made(GRID, ARGS)
    assert [seen(call) for call in gpu.launched] == [((*GRID, 0x52, FUNCTION, False, pdl), ARGS)]
    made._plain(GRID, ARGS)
    head, values = seen(gpu.launched[1])
    assert head == (*GRID, 0x52, FUNCTION, False, pdl)
    assert values == ("@1000", "@2000", "@3004", 7)
    if not isinstance(gpu.launched[0][-1], tuple):  # the launcher counts them
        assert len(gpu.launched[0]) == len(gpu.launched[1])
        assert gpu.launched[0][13 + len(ARGS) :] == (None,) * len(CONSTANTS)
    else:
        assert gpu.launched[0][13] == ["argument"] * len(ARGS)
        assert gpu.launched[0][14] == gpu.launched[1][14] == ("*bf16", "*i32", "*fp32", "i32")


def test_a_launch_from_another_device_goes_to_the_programs(gpu, kernel):
    made = program(kernel, SIGNATURE, CONSTANTS, device="cuda:1")
    gpu.current, gpu.entered = 0, []
    made(GRID, ARGS)
    assert seen(gpu.launched[0])[0][3] == 0x52
    assert (gpu.entered, gpu.current) == ([1], 0)


def test_a_tensor_may_stand_for_its_address(gpu, kernel):
    made = program(kernel, SIGNATURE, CONSTANTS, device="cuda:1")
    x = torch.empty(4, dtype=torch.uint8)
    made._plain(GRID, (x, x, 0x3004, 1))
    at = f"@{x.data_ptr():x}"
    assert seen(gpu.launched[0])[1] == (at, at, "@3004", 1)


def test_a_program_is_made_once(gpu, kernel):
    made = program(kernel, SIGNATURE, CONSTANTS, device="cuda:1")
    assert program(kernel, SIGNATURE, CONSTANTS, device="cuda") is made
    assert gpu.loads == 1
    others = [
        program(kernel, SIGNATURE, CONSTANTS, device="cuda:1", **changed)
        for changed in ({"pdl": True}, {"warps": 8}, {"stages": 1}, {"maxnreg": 64})
    ]
    others += [program(kernel, SIGNATURE, CONSTANTS | {"BLOCK": 64}, device="cuda:1")]
    others += [program(kernel, SIGNATURE | {"x": "*fp16:16"}, CONSTANTS, device="cuda:1")]
    others += [program(kernel, SIGNATURE, CONSTANTS, device="cuda:0")]
    assert len({made, *others}) == 8


def test_options_and_types_reach_the_compiler(gpu, kernel):
    made = program(kernel, SIGNATURE, CONSTANTS, device="cuda:1", warps=2, stages=1, maxnreg=64)
    metadata, ptx = made.compiled.metadata, made.compiled.asm["ptx"]
    assert (metadata.num_warps, metadata.num_stages, metadata.maxnreg) == (2, 1, 64)
    assert (metadata.target.arch, metadata.enable_fp_fusion) == (90, True)
    assert ".maxnreg 64" in ptx
    assert ".reqntid 64" in ptx
    alone = {name: of.removesuffix(":16") for name, of in SIGNATURE.items()}
    assert "add.f32" in ptx
    wide = program(kernel, SIGNATURE, CONSTANTS | {"BLOCK": 1024}, device="cuda:1").compiled.asm["ttgir"]
    narrow = program(kernel, alone, CONSTANTS | {"BLOCK": 1024}, device="cuda:1").compiled.asm["ttgir"]
    assert "tt.divisibility = 16" in wide
    assert "tt.divisibility = 16" not in narrow


# Tensors that the copy engine moves in boxes


@gluon.jit
def copy(x, out, m, BLOCK: gl.constexpr):  # noqa: N803 - as kernels name constants
    held = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, 64], x.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, BLOCK * 128)
    tma.async_copy_global_to_shared(x, [m, 0], bar, held)
    mbarrier.wait(bar, 0)
    tma.async_copy_shared_to_global(out, [m, 0], held)
    tma.store_wait(0)


BOXED = {"x": boxes("bf16", (32, 64), 128), "out": boxes("bf16", (32, 64), 128), "m": "i32"}


@pytest.fixture
def described(gpu):
    """What the driver is asked to describe; it answers with numbers."""
    asked = []

    def fill(*args):
        asked.append([list(a) if isinstance(a, tuple) else a for a in args])
        return f"map {len(asked)}"

    gpu.driver.utils.fill_tma_descriptor = gpu.driver.utils.fill_tma_descriptor_tiled = fill
    return asked


def test_boxes_are_described_once_and_handed_over_with_extents_and_strides(gpu, described):
    made = program(copy, BOXED, {"BLOCK": 32}, device="cuda:1")
    assert made.plainly is None
    x, out = made.tensor(0, 0x1000, (100, 64)), made.tensor(1, 0x2000, (90, 70), (80, 1))
    made((1, 1, 1), (x, out, 7))
    made((1, 1, 1), (x, out, 9))
    assert [a[:3] + a[4:] for a in described] == [
        [0x1000, 3, 2, [32, 64], [100, 64], [64, 1], 0],
        [0x2000, 3, 2, [32, 64], [90, 70], [80, 1], 0],
    ]
    expected = ("map 1", 100, 64, 64, 1, "map 2", 90, 70, 80, 1)
    own = [call[-1] if isinstance(call[-1], tuple) else call[13:-1] for call in gpu.launched]
    assert own == [(*expected, 7), (*expected, 9)]
    if isinstance(gpu.launched[0][-1], tuple):
        assert gpu.launched[0][13] == ["argument"] * 11
    else:
        assert gpu.launched[0][-1] is None


def test_boxes_by_kernel_grid(gpu, described):
    made = program(copy, BOXED, {"BLOCK": 32}, device="cuda:1")
    x = made.tensor(0, 0x1000, (100, 64))
    made((1, 1, 1), (x, x, 7))
    made._plain((1, 1, 1), (x, x, 7))
    owns = [[*call[-1]] if isinstance(call[-1], (tuple, list)) else [*call[13:]] for call in gpu.launched]
    short, plain = ([v for v in own if isinstance(v, int)][:9] for own in owns)
    assert described[1:] == [described[0]] * 2
    assert short == plain == [100, 64, 64, 1, 100, 64, 64, 1, 7]


# Launches through kernel[grid]


def is_plain(call):
    return seen(call)[1][0] == "@1000"


def test_a_profilers_hooks_are_called(gpu, kernel):
    from triton import knobs

    made = program(kernel, SIGNATURE, CONSTANTS, device="cuda:1")
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(print)
        try:
            made(GRID, ARGS)
        finally:
            chain.remove(print)
    made(GRID, ARGS)
    assert [is_plain(call) for call in gpu.launched] == [True, True, False]


def test_no_programs_are_none(gpu, kernel):
    program(kernel, SIGNATURE, CONSTANTS, device="cuda:1")._plain((3, 0, 1), ARGS)
    assert gpu.launched == []


def test_an_unknown_triton_is_said(gpu, kernel, monkeypatch):
    unknown.cache_clear()
    monkeypatch.setattr(triton, "__version__", "3.9.1")
    try:
        made = program(kernel, SIGNATURE, CONSTANTS, device="cuda:1")
    finally:
        unknown.cache_clear()
    assert made.plainly == (
        "the launcher of Triton 3.9.1 is not known (those of 3.6 and 3.8 are): "
        "each launch goes through kernel[grid], which costs the host more"
    )
    made(GRID, ARGS)
    assert is_plain(gpu.launched[0])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"global_scratch_size": 64}, "scale needs scratch memory of Triton's"),
        ({"profile_scratch_size": 64}, "scale needs scratch memory of Triton's"),
        ({"launch": None}, "Triton's launcher is not as expected ('Changed' object has no attribute 'launch')"),
    ],
)
def test_an_unexpected_launcher_is_said(gpu, kernel, changes, why):
    class Changed(gpu.driver.launcher_cls):
        def __init__(self, *args):
            super().__init__(*args)
            vars(self).update(changes)
            if self.launch is None:
                del self.launch

    gpu.driver.launcher_cls = Changed
    assert program(kernel, SIGNATURE, CONSTANTS, device="cuda:1").plainly == why


def test_the_interpreter_is_said(kernel, monkeypatch):
    monkeypatch.setattr(launch, "_programs", {})
    made = program(kernel, SIGNATURE, CONSTANTS, device="cpu")
    assert (made.plainly, made.compiled) == ("it runs in Triton's interpreter", None)


# Errors, and what is said


def test_names_that_do_not_fit(gpu, kernel):
    with pytest.raises(UsageError) as caught:
        program(kernel, {"x": "*bf16", "m": "i32"}, CONSTANTS, device="cuda:1")
    assert str(caught.value) == (
        "the arguments do not fit the kernel scale: got x, m, BLOCK, TEXT, expected x, words, out, m, BLOCK, TEXT"
    )


def test_nothing_is_compiled_during_a_capture(gpu, kernel):
    gpu.capturing = True
    with pytest.raises(UsageError) as caught:
        program(kernel, SIGNATURE, CONSTANTS, device="cuda:1")
    assert str(caught.value) == (
        "a kernel cannot be compiled while a CUDA graph is captured: got scale; "
        "make the same call once before the capture"
    )
    gpu.capturing = False
    made = program(kernel, SIGNATURE, CONSTANTS, device="cuda:1")
    gpu.capturing = True
    assert program(kernel, SIGNATURE, CONSTANTS, device="cuda:1") is made


def test_a_gpu_that_cannot_load_it(gpu, kernel):
    gpu.driver.utils.load_binary = lambda *_: (_ for _ in ()).throw(RuntimeError("no image\nfor it"))
    with pytest.raises(UnavailableError) as caught:
        program(kernel, SIGNATURE, CONSTANTS, device="cuda:1")
    assert str(caught.value) == "this GPU cannot load a kernel: got scale: no image"


def test_a_folder_that_cannot_be_written(kernel, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UnavailableError, match=r"machine code cannot be kept: got .*/file.*; set TRITON_CACHE_DIR to"):
        compile_for(90, kernel, SIGNATURE, CONSTANTS, {})


def test_the_first_compilation_is_announced(kernel, monkeypatch, tmp_path, caplog):
    folder = tmp_path / "kept"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    said = []
    for warps, forget in ((4, True), (8, False), (4, True)):
        if forget:
            launch._announce.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "halfbyte"):
            compile_for(80, kernel, SIGNATURE, CONSTANTS, {"num_warps": warps})
        said.append(caplog.messages)
    assert said == [[f"compiling for sm_80; the code is kept in {folder}"], [], []]  # the third comes from disk


# Memory beside the arguments


def test_memory_for_partial_results_is_a_streams(gpu, monkeypatch):
    device = torch.device("cpu", 0)
    first = workspace(device, 100)
    assert (first.shape, first.dtype) == ((100,), torch.uint8)
    assert workspace(device, 60) is first
    grown = workspace(device, 101)
    assert grown.numel() == 200
    assert workspace(device, 500).numel() == 500
    zeros = counters(device, 64)
    assert zeros is counters(device, 64)
    assert not zeros.any()
    assert zeros.data_ptr() != workspace(device, 64).data_ptr()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x99)
    assert workspace(device, 60).numel() == 60
    assert counters(device, 64) is not zeros
    shared.forget()
    assert workspace(device, 10).numel() == 10


def test_memory_of_a_capture_is_the_graphs_own(gpu):
    device = torch.device("cpu", 0)
    kept = workspace(device, 100)
    gpu.capturing = True
    assert workspace(device, 40).numel() == 40
    zeros = counters(device, 40)
    assert not zeros.any()
    assert counters(device, 30) is zeros
    gpu.capturing = 2
    assert counters(device, 40) is not zeros
    assert len(shared._captured) == 1
    gpu.capturing = False
    assert counters(device, 40) is not zeros
    assert workspace(device, 40) is kept


def test_memory_that_is_not_to_be_kept(gpu):
    device = torch.device("cpu", 0)
    kept, zeros = workspace(device, 100), counters(device, 64)
    with keeping_nothing():
        with keeping_nothing():
            pass
        assert (workspace(device, 40).numel(), counters(device, 40).numel()) == (40, 40)
        assert counters(device, 40) is not zeros
        assert not counters(device, 40).any()
        gpu.capturing = True
        assert counters(device, 40) is not counters(device, 40)
        assert not shared._captured
        gpu.capturing = False
    assert workspace(device, 100) is kept
    assert counters(device, 64) is zeros


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("twin", [False, True])
def test_the_operators_keep_no_memory(gpu, twin, precision, monkeypatch):
    from halfbyte import fp8_ops, ops, torch_ops

    device, found = torch.device("cpu", 0), []
    weight = random_weight(32, 64).torch()
    held = to_fp8(weight) if twin else pack(weight, "fragments")

    def compute(x, held, bias, to):
        found.append(workspace(device, 64))
        return torch.zeros(3, 32)

    monkeypatch.setattr(fp8_ops, "compute", compute)
    monkeypatch.setattr(ops, "compute", compute)
    if twin:
        torch_ops.traced_twin(torch.ones(3, 64), held, None, None)
    else:
        torch_ops.traced(torch.ones(3, 64), held.key, held.shape, held.buffers(), None, None, precision)
    assert len(found) == 1
    assert shared._shared == {}


def test_capturing_asks_the_stream_of_the_device(gpu):
    assert not capturing(torch.device("cpu"))
    assert gpu.entered == []
    for gpu.capturing in (False, True):
        assert capturing(torch.device("cuda", 0)) is gpu.capturing
    assert (gpu.entered, gpu.current) == ([0, 0], 1)


# What keeps every kernel from a call


@pytest.mark.parametrize(
    ("changes", "needs", "reasons"),
    [
        ({}, {}, ()),
        ({"capability": 120}, {}, ()),
        ({"device": "cpu", "capability": 0}, {}, ("runs on NVIDIA GPUs, not on cpu",)),
        (
            {"device": "cpu", "capability": 0, "library": "numpy"},
            {},
            ("runs on NVIDIA GPUs, not on cpu", "takes torch tensors, not NumPy arrays"),
        ),
        ({"capability": 0}, {}, ("needs an NVIDIA GPU, and torch sees none",)),
        ({"capability": 75}, {}, ("is for sm_80 or later, not sm_75",)),
        ({"capability": 89}, {"least": 90}, ("is for sm_90 or later, not sm_89",)),
        ({"capability": 100}, {"least": 90, "most": 90}, ("is for sm_90, not sm_100",)),
        ({"capability": 100}, {"least": 80, "most": 90}, ("is for sm_80 to sm_90, not sm_100",)),
        ({"aligned": False}, {}, ("takes codes and scales that begin at multiples of 16 bytes; clone the buffers",)),
        ({"whole": False}, {}, ("takes codes, scales and scale2 without gaps; make the buffers contiguous",)),
    ],
)
def test_why_not(changes, needs, reasons, monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda: None)
    call = call_like(**({"device": "cuda", "capability": 90} | changes))
    assert why_not(call, **needs) == reasons


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("strided", [None, "codes", "scales", "scale2"])
def test_gaps_are_looked_for_in_all_that_kernels_read(strided):
    packed = pack(random_weight(32, 64, per_row=True).torch(), "fragments")
    buffers = {name: buffer.as_subclass(OnGpu) for name, buffer in packed.buffers().items()}
    if strided:
        buffers[strided] = torch.stack([buffers[strided]] * 2, -1)[..., 0].as_subclass(OnGpu)
    call = Call.on(
        Packed(packed.layout, packed.shape, buffers),
        rows=1,
        dtype="bfloat16",
        out_dtype="bfloat16",
        device="cuda",
        library="torch",
        bias=False,
    )
    assert (call.aligned, call.whole) == (True, strided is None)


def test_triton_is_missing(monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda: "triton is not installed")
    call = call_like(device="cuda", capability=75)
    assert why_not(call, gluon=True) == ("is for sm_80 or later, not sm_75", "triton is not installed")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.5.1", "Gluon is tested with Triton 3.6 to 3.8, not 3.5.1"),
        ("3.6.0", None),
        ("3.7.0+git12", None),
        ("3.8.2", None),
        ("3.10.0", "Gluon is tested with Triton 3.6 to 3.8, not 3.10.0"),
        ("4.0.0", "Gluon is tested with Triton 3.6 to 3.8, not 4.0.0"),
    ],
)
def test_versions_for_gluon(version, reason, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    untested.cache_clear()
    try:
        assert untested() == reason
        call = call_like(device="cuda", capability=90)
        assert why_not(call, gluon=True) == (() if reason is None else (reason,))
        assert why_not(call) == ()
    finally:
        untested.cache_clear()
