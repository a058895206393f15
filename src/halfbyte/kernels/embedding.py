"""Rows of a weight looked up by their numbers: what a kernel is given, and those in NumPy and in torch.

::

    out[i] = round(code * scale * scale2)         row ids[i], in float32 and rounded once

These are the bits of ``dequantize``. On a GPU no kernel can refuse a number that names no row without waiting for the
device: such a row is NaN, and nothing is read for it. On the CPU ``halfbyte.embedding`` refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from halfbyte.arrays import dtype_name, float_dtype
from halfbyte.errors import UsageError
from halfbyte.kernels.base import (
    Call,
    Cost,
    Kernel,
    Library,
    capability_of,
    check_kind,
    device_of,
    library_of,
    load_torch,
    nothing_to_load,
    why_not_numpy,
    why_not_torch,
)
from halfbyte.layouts import Packed, Rows
from halfbyte.numerics import BLOCK, Array
from halfbyte.weight import Weight

DTYPES = ("int32", "int64")


@dataclass(frozen=True, kw_only=True)
class EmbeddingCall(Call):
    """All that decides which kernel looks rows up: as for ``linear``, where ``dtype`` is that of the numbers.

    Args:
        op: "embedding".
        rows: M, how many numbers there are.
        dtype: "int32" or "int64".
        bias: there is none.
    """

    op: str = "embedding"
    bias: bool = False

    @staticmethod
    def of(
        weight: Packed, *, rows: int, dtype: str, out_dtype: str, device: str, library: Library, capability: int = 0
    ) -> EmbeddingCall:
        """The call on a weight; UsageError where it is not NVFP4."""
        buffers = weight.buffers()
        return EmbeddingCall(
            layout=weight.layout,
            shape=weight.shape,
            per_row=buffers["scale2"].shape[-2] != 1,
            pre_scale="pre_scale" in buffers,
            rows=rows,
            dtype=dtype,
            out_dtype=out_dtype,
            device=device,
            library=library,
            capability=capability,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingArgs:
    """The arguments of a kernel that looks rows up: row ``ids[i]`` of the weight goes to ``out[i]``.

    Args:
        ids: (M,) int32 or int64, contiguous.
        weight: (*E, N, K), in the library and on the device of ids.
        out: (M, K) float32, bfloat16 or float16, row-major; written.

    Raises:
        UsageError: a weight that is not NVFP4, or shapes that do not fit each other.
    """

    op: ClassVar[str] = "embedding"
    ids: Array
    weight: Packed
    out: Array

    def __post_init__(self) -> None:
        check_kind(self.weight.layout)
        needed = {"ids": (self.ids.shape[0],), "out": (self.ids.shape[0], self.weight.shape[-1])}
        for name, shape in needed.items():
            got = tuple(getattr(self, name).shape)
            if got != shape:
                raise UsageError(f"{name} does not fit the weight and ids", got=got, expected=shape)

    def call(self) -> EmbeddingCall:
        """What decides which kernel runs on these arrays."""
        return EmbeddingCall.of(
            self.weight,
            rows=self.ids.shape[0],
            dtype=dtype_name(self.ids.dtype),
            out_dtype=dtype_name(self.out.dtype),
            device=device_of(self.ids),
            library=library_of(self.ids),
            capability=capability_of(self.ids),
        )


def cost(call: EmbeddingCall) -> Cost:
    """The least that a call costs: the rows of the weight, their scale2, the numbers and the result, once each."""
    k = call.shape[-1]
    blocks = -(-k // BLOCK)
    row = blocks * (BLOCK // 2 + 1) + k * float_dtype(call.out_dtype).itemsize + (8 if call.dtype == "int64" else 4)
    return Cost(bytes=call.rows * (row + 4 * call.per_row) + 4 * (not call.per_row), flops=2 * call.rows * k)


def refuse(call: EmbeddingCall) -> tuple[str, ...]:
    """What keeps every kernel from a call."""
    reasons = []
    if len(call.shape) != 2:
        reasons.append(f"takes one matrix (N, K), not expert axes {call.shape[:-2]}")
    if call.pre_scale:
        reasons.append("takes no weight with a pre_scale, which is for activations")
    return tuple(reasons)


def _refuse_all_but_rows(call: EmbeddingCall) -> tuple[str, ...]:
    wrong = () if isinstance(call.layout, Rows) else (f"reads the layout rows, not {call.layout.key}",)
    return wrong + refuse(call)


def _refuse_numpy(call: EmbeddingCall) -> tuple[str, ...]:
    return why_not_numpy(call.library) + _refuse_all_but_rows(call)


def _refuse_torch(call: EmbeddingCall) -> tuple[str, ...]:
    return why_not_torch(call.library, call.elsewhere) + _refuse_all_but_rows(call)


def _launch_numpy(args: EmbeddingArgs) -> None:
    args.out[...] = _rows(args.weight, args.ids).dequantize(args.out.dtype)


def _launch_torch(args: EmbeddingArgs) -> None:
    n = args.weight.shape[0]
    valid = (args.ids >= 0) & (args.ids < n)
    if not n:
        args.out.fill_(float("nan"))
        return
    args.out.copy_(_rows(args.weight, args.ids.where(valid, 0)).dequantize(args.out.dtype))
    args.out.masked_fill_(~valid[:, None], float("nan"))


def _rows(weight: Packed, ids: Any) -> Weight:
    """The rows that ids name, as a weight of their own."""
    n, k = weight.shape
    buffers = weight.buffers()
    planes = {name: buffers[name].reshape(n, -1) for name in ("codes", "scales")}
    if buffers["scale2"].shape[-2] != 1:
        planes["scale2"] = buffers["scale2"]
    picked = {name: plane[ids] for name, plane in planes.items()}
    return Weight(**({"scale2": buffers["scale2"]} | picked), k=k)


TORCH = Kernel(
    name="embedding-torch",
    bundle=EmbeddingArgs,
    description="gathers codes and scales, then decodes them; any device",
    refuse=_refuse_torch,
    load=load_torch,
    launch=_launch_torch,
    cost=cost,
)
NUMPY = Kernel(
    name="embedding-numpy",
    bundle=EmbeddingArgs,
    description="gathers codes and scales, then decodes them",
    refuse=_refuse_numpy,
    load=nothing_to_load,
    launch=_launch_numpy,
    cost=cost,
)
