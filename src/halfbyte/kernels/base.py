"""What a kernel is: one way to compute one op for one layout on one kind of device.

What decides which kernel runs is its op's call (``Call``; no arrays); what the kernel runs on is its op's bundle
(``LinearArgs``): one frozen class for each shape of kernel, so that no argument can be left at zero unused. A Kernel
states its bundle's class: type checkers refuse a launch on another, and ``Kernel.run`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar

from halfbyte.arrays import dtype_name, float_dtype
from halfbyte.errors import UnavailableError, UsageError
from halfbyte.layouts import Layout, Packed, Rows
from halfbyte.numerics import Array, is_torch

Library = Literal["numpy", "torch"]

ALIGNED: Final = 16
"""Bytes that a GPU loads at once: arrays of a kernel there begin at multiples of it."""

LARGEST_SCALE: Final = 0x7E
"""The byte of 448: above it are NaN and the negative ones."""


class AnyCall(Protocol):
    """What every op's call has."""

    @property
    def op(self) -> str:
        """The op, as in ``Bundle.op``."""

    def __str__(self) -> str: ...


class Bundle(Protocol):
    """What every op's bundle of arguments has."""

    op: ClassVar[str]

    def call(self) -> AnyCall:
        """What decides which kernel runs on these arguments."""


C = TypeVar("C", bound=AnyCall)
A = TypeVar("A", bound=Bundle)


@dataclass(frozen=True, kw_only=True)
class Call:
    """All that decides which kernel of an NVFP4 weight runs; no arrays.

    Args:
        op: "linear".
        layout: where the weight's bytes are.
        shape: (*E, N, K) of the weight, K without padding.
        per_row: scale2 differs by output feature.
        pre_scale: the activations are multiplied by a (K,) vector first.
        rows: M, the rows of activations.
        dtype: of the activations, "float32", "bfloat16" or "float16".
        out_dtype: of the result, one of the same.
        device: "cpu", "cuda", ...
        library: that of all arrays.
        bias: a bias is added.
        odd_scales: some block scale is negative or NaN; looked for on the CPU and in the layout rows only.
        capability: the compute capability of the GPU, 90 for sm_90; 0 on other devices, or where none is known.
        aligned: codes and scales begin at multiples of 16 bytes; looked for on a GPU only.
        whole: codes, scales and scale2 have no gaps; looked for on a GPU only.
        elsewhere: it is planned for another machine: what is installed here does not matter.

    Raises:
        UsageError: a layout of another kind of weight.
    """

    op: str = "linear"
    layout: Layout
    shape: tuple[int, ...]
    per_row: bool
    pre_scale: bool
    rows: int
    dtype: str
    out_dtype: str
    device: str
    library: Library
    bias: bool
    odd_scales: bool = False
    capability: int = 0
    aligned: bool = True
    whole: bool = True
    elsewhere: bool = False

    def __post_init__(self) -> None:
        check_kind(self.layout)

    @staticmethod
    def on(
        weight: Packed,
        *,
        rows: int,
        dtype: str,
        out_dtype: str,
        device: str,
        library: Library,
        bias: bool,
        capability: int = 0,
    ) -> Call:
        """The linear call on a weight; UsageError where it is not NVFP4."""
        check_kind(weight.layout)
        buffers = weight.buffers()
        return Call(
            layout=weight.layout,
            shape=weight.shape,
            per_row=buffers["scale2"].shape[-2] != 1,
            pre_scale="pre_scale" in buffers,
            rows=rows,
            dtype=dtype,
            out_dtype=out_dtype,
            device=device,
            library=library,
            bias=bias,
            odd_scales=device == "cpu" and isinstance(weight.layout, Rows) and odd_scales(weight),
            capability=capability,
            aligned=device != "cuda" or all(_is_aligned(buffers[name]) for name in weight.layout.buffers),
            whole=device != "cuda" or all(_is_whole(buffers[name]) for name in (*weight.layout.buffers, "scale2")),
        )

    def __str__(self) -> str:
        return (
            f"{self.op} with layout {self.layout.key}, shape {self.shape}, M={self.rows}, {self.dtype}, "
            f"{self.library} on {self.place}"
        )

    @property
    def place(self) -> str:
        """The device with its compute capability."""
        return f"{self.device} (sm_{self.capability})" if self.capability else self.device


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearArgs:
    """The arguments of a kernel for ``linear``: x @ dequantize(weight).T + bias goes to ``out``.

    Args:
        x: (M, K) float32, bfloat16 or float16, row-major.
        weight: (*E, N, K), in the library and on the device of x.
        bias: (N,) float32, bfloat16 or float16, or None.
        out: (M, N) float32, bfloat16 or float16; written.

    Raises:
        UsageError: a weight that is not NVFP4, or shapes that do not fit each other.
    """

    op: ClassVar[str] = "linear"
    x: Array
    weight: Packed
    bias: Array | None
    out: Array

    def __post_init__(self) -> None:
        check_kind(self.weight.layout)
        check_shapes(self.weight.shape, self.x, self.bias, self.out)

    def call(self) -> Call:
        """What decides which kernel runs on these arrays."""
        return Call.on(
            self.weight,
            rows=self.x.shape[0],
            dtype=dtype_name(self.x.dtype),
            out_dtype=dtype_name(self.out.dtype),
            device=device_of(self.x),
            library=library_of(self.x),
            bias=self.bias is not None,
            capability=capability_of(self.x),
        )


@dataclass(frozen=True)
class Cost:
    """What a call must do at the least: bytes read and written once each, and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class Kernel(Generic[A, C]):
    """One way to compute an op.

    Args:
        name: unique; what HALFBYTE_KERNEL and ``plan`` call it.
        bundle: the class of its arguments, which also says its op.
        description: one line for ``plan``.
        refuse: all that keeps it from this call, each in words; () if it computes the call.
        cost: what an accepted call must move and compute.
        load: brings what an accepted call will need (libraries, tables, the device), or raises; None where that is
            ``compile`` of what ``configure`` says.
        launch: runs on the arguments of an accepted call and writes their ``out``, which is not empty; None where that
            is ``bind`` and a call of what it gives.
        bind: what is left of ``launch`` for calls like these, on other x, bias and out: a function of the three, and
            of all that ``arrays`` of the bundle gives where it has that; or None where nothing would be saved. On a GPU
            it may keep the addresses of the weight, but not the weight.
        configure: how ``launch`` and ``bind`` run an accepted call, as a frozen dataclass; None where there is one way.
        scratch: bytes of memory beside the arguments that an accepted call takes.
        configurations: those that can pay for an accepted call, for ``halfbyte tune``; each is a second argument that
            ``bind`` takes.
        compile: compiles an accepted call in one of them.

    Raises:
        UsageError: neither ``launch`` nor ``bind``, or neither ``load`` nor ``compile`` and ``configure``.
    """

    name: str
    bundle: type[A]
    description: str
    refuse: Callable[[C], tuple[str, ...]]
    cost: Callable[[C], Cost]
    load: Callable[[C], None] | None = None
    launch: Callable[[A], None] | None = None
    bind: Callable[..., Callable[..., None]] | None = None
    configure: Callable[[C], Any] | None = None
    scratch: Callable[[C], int] | None = None
    configurations: Callable[[C], Sequence[Any]] | None = None
    compile: Callable[[C, Any], None] | None = None

    def __post_init__(self) -> None:
        if self.launch is None and self.bind is None:
            raise UsageError(f"kernel {self.name} cannot run", expected="launch, or bind")
        if self.load is None and (self.compile is None or self.configure is None):
            raise UsageError(f"kernel {self.name} cannot be loaded", expected="load, or compile and configure")

    @property
    def op(self) -> str:
        """What it computes."""
        return self.bundle.op

    @property
    def module(self) -> str:
        """Where it is written."""
        return (self.launch or self.bind).__module__

    @property
    def on_gpu(self) -> bool:
        """Whether it is one for NVIDIA GPUs alone."""
        return self.module.startswith("halfbyte.kernels.cuda.")

    def prepare(self, call: C) -> None:
        """Bring what an accepted call will need, or raise."""
        if self.load is not None:
            self.load(call)
        elif self.compile is not None and self.configure is not None:
            self.compile(call, self.configure(call))

    def run(self, args: A) -> None:
        """Launch on arguments that were accepted; UsageError where they are another kernel's."""
        if type(args) is not self.bundle:
            raise UsageError(
                f"kernel {self.name} takes another bundle", got=type(args).__name__, expected=self.bundle.__name__
            )
        if self.launch is not None:
            self.launch(args)
        elif self.bind is not None:
            given: Any = args
            arrays = given.arrays() if hasattr(given, "arrays") else (given.x, given.bias, given.out)
            self.bind(args)(*arrays)


def check_kind(layout: Layout) -> None:
    """UsageError where a layout packs another kind of weight than NVFP4, which no kernel computes with."""
    if layout.kind != "nvfp4":
        raise UsageError(
            "kernels compute with NVFP4 weights",
            got=f"{layout.kind} in the layout {layout.key}",
            hint="cast it with halfbyte.mxfp4.to_nvfp4 and pack that",
        )


def check_shapes(weight: tuple[int, ...], x: Array, bias: Array | None, out: Array) -> None:
    """UsageError where x, bias or out do not fit a weight of a shape, or each other."""
    (n, k), rows = weight[-2:], x.shape[0]
    for name, array, shape in (("x", x, (rows, k)), ("bias", bias, (n,)), ("out", out, (rows, n))):
        if array is not None and tuple(array.shape) != shape:
            raise UsageError(f"{name} does not fit the weight and x", got=tuple(array.shape), expected=shape)


def check_row_major(twin: str, data: Array) -> None:
    """UsageError where the data of a twin, "FP8" or "INT8", are not row-major."""
    if not (data.is_contiguous() if is_torch(data) else data.flags.c_contiguous):
        raise UsageError(
            f"the data of the {twin} weight are not row-major",
            got=f"strides {tuple(data.stride() if is_torch(data) else data.strides)}",
            hint=f"make an {twin.capitalize()}Weight of a contiguous copy",
        )


def version_of(weight: Packed) -> int:
    """How often torch has written to the buffers of a weight, as far as it counts that."""
    return sum(int(b._version) for b in weight.buffers().values() if is_torch(b) and not b.is_inference())


def odd_scales(weight: Packed) -> bool:
    """Whether some block scale is negative or NaN; looked for once in a buffer, and after torch wrote to it."""
    scales = weight.buffers().get("scales")
    if scales is None or getattr(scales, "is_meta", False):
        return False
    version = version_of(weight)
    known = weight.memo.get("odd_scales")
    if known is None or known[0] != version:
        known = weight.memo["odd_scales"] = version, bool(prod(scales.shape)) and int(scales.max()) > LARGEST_SCALE
    return bool(known[1])


def device_of(a: Array) -> str:
    """The kind of device an array lies on: "cpu", "cuda", ..."""
    return str(a.device.type) if is_torch(a) else "cpu"


def capability_of(a: Array) -> int:
    """The compute capability of the GPU that an array lies on, 90 for sm_90; else 0."""
    return capability(a.device.index) if is_torch(a) and a.is_cuda else 0


@functools.cache
def capability(index: int) -> int:
    """Of a CUDA device of torch's; 0 where it is not NVIDIA's."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return 0 if torch.version.hip else 10 * major + minor


def _is_aligned(a: Array) -> bool:
    """Whether a tensor on a GPU begins at a multiple of 16 bytes; others will, once they are there."""
    return not (is_torch(a) and a.is_cuda and a.data_ptr() % ALIGNED)


def _is_whole(a: Array) -> bool:
    """Whether a tensor on a GPU has no gaps; others will have none, once they are there."""
    return not (is_torch(a) and a.is_cuda) or bool(a.is_contiguous())


def library_of(a: Array) -> Library:
    """Whose array it is."""
    return "torch" if is_torch(a) else "numpy"


def nothing_to_load(call: Any) -> None:
    """For kernels that need nothing but NumPy."""


def load_torch(call: Any) -> None:
    """Import torch and touch the call's device; UnavailableError where it is not there."""
    import torch

    try:
        torch.zeros(1, device=call.device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UnavailableError("torch cannot use this device", got=call.device, hint=reason) from None


def why_not_numpy(library: str) -> tuple[str, ...]:
    """Why a NumPy kernel declines arrays of ``library``."""
    return () if library == "numpy" else (f"takes NumPy arrays, not {library} tensors",)


def why_not_torch(library: str, elsewhere: bool = False) -> tuple[str, ...]:
    """Why a torch kernel declines arrays of ``library``; also where torch is missing, but not for another machine."""
    if library != "torch":
        return ("takes torch tensors, not NumPy arrays",)
    if elsewhere:
        return ()
    try:
        import torch  # noqa: F401
    except ImportError:
        return ("needs the package torch, which is not installed; run: pip install 'halfbyte[torch]'",)
    return ()


def why_not_float32(device: str) -> tuple[str, ...]:
    """Why a torch kernel cannot rely on float32 products on ``device``: () if they are exact to float32."""
    import torch

    backend = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    matmul: Any = getattr(backend, "matmul", None)
    precision = getattr(matmul, "fp32_precision", None)  # torch 2.9 and later
    precision = torch.get_float32_matmul_precision() if precision is None else str(precision)
    if precision in ("none", "ieee", "highest"):
        return ()
    return (
        f"torch may compute float32 products in {precision} here; "
        'call torch.set_float32_matmul_precision("highest") for exact ones',
    )


def linear_cost(call: Call) -> Cost:
    """The least that a linear call costs: the weight with its layout's padding, x, bias and result, once each."""
    return cost_of(call, sum(call.layout.sizes(call.shape).values()))


def cost_of(call: Any, weight: int) -> Cost:
    """The least that a call costs with a weight of so many bytes: that, its scales, x, bias and result, once each."""
    *_, n, k = call.shape
    vectors = 4 * ((n if call.per_row else 1) + call.pre_scale * k + call.bias * n)
    moved = call.rows * (k * float_dtype(call.dtype).itemsize + n * float_dtype(call.out_dtype).itemsize)
    return Cost(bytes=weight + vectors + moved, flops=2 * call.rows * n * k)
