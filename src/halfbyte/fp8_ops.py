"""``linear`` in FP8, where ``precision`` or an Fp8Weight asks for it: which kernel runs, and whether one does."""

from __future__ import annotations

from dataclasses import fields
from math import prod
from typing import Any, Final

from halfbyte.errors import NoKernelError
from halfbyte.kernels import Call, Fp8Args, Fp8Call, Kernel, LinearArgs, forced, fp8, ordered, select
from halfbyte.kernels.base import capability_of, device_of, library_of, version_of
from halfbyte.kernels.cuda import choices
from halfbyte.kernels.cuda.shared import capturing
from halfbyte.kinds import Fp8Weight
from halfbyte.layouts import Packed
from halfbyte.lossy import fp8_error
from halfbyte.numerics import Array
from halfbyte.operands import (
    as_packed,
    check_arrays,
    checked_dtype,
    on_rows,
    scale_of,
)
from halfbyte.remembered import keep, key_of, on_tensors
from halfbyte.weight import Weight, dtype_name

FEWEST: Final = 256
"""On a GPU, NVFP4 weights are multiplied in FP8 from so many tokens on; for fewer, exact kernels are as fast."""


def kernel_for(call: Fp8Call) -> Kernel[Fp8Args, Fp8Call] | None:
    """The kernel that multiplies in FP8; None where exact ones run, though FP8 is allowed.

    That is on a GPU, for an NVFP4 weight, where there are fewer than ``FEWEST`` tokens, no kernel but the reference
    takes the call, or an exact one was measured to be as fast, unless HALFBYTE_KERNEL names a kernel for FP8.

    Raises:
        NoKernelError: nothing accepts a call that no exact kernel could take.
    """
    if call.device != "cuda" or call.resident or forced(call.op):
        return select(Fp8Args, call)
    if call.rows < FEWEST:
        return None
    first = _fast(call)
    return None if first is None or _slower(first, call) else first


def slower(call: Fp8Call) -> str | None:
    """The kernel that would multiply in FP8, had it not been measured to take as long as the exact one."""
    first = _fast(call) if call.rows >= FEWEST else None
    return first.name if first is not None and _slower(first, call) else None


def _fast(call: Fp8Call) -> Kernel[Fp8Args, Fp8Call] | None:
    """The first kernel for FP8 that takes a call; None where that is the reference, or there is none."""
    first = next((kernel for kernel in ordered(Fp8Args, call) if not kernel.refuse(call)), None)
    return None if first is fp8.TORCH else first


def exact(call: Fp8Call) -> Call:
    """The call on the same NVFP4 weight without rounding."""
    return Call(**{one.name: getattr(call, one.name) for one in fields(Call) if one.name != "op"})


def _slower(kernel: Kernel[Fp8Args, Fp8Call], call: Fp8Call) -> bool:
    """Whether it was measured to take as long as the exact kernel for this call, at the same shape."""
    try:
        other = select(LinearArgs, exact(call))
    except NoKernelError:
        return False
    own, others = choices.measured(call, kernel.name), choices.measured(exact(call), other.name)
    return own is not None and others is not None and own[0] == others[0] and own[1] >= others[1]


def linear_fp8(
    x: Array, w: Packed | Weight | Fp8Weight, bias: Array | None, out_dtype: Any, precision: str | None
) -> Array | None:
    """``linear`` in FP8, which the weight remembers; None where exact kernels are to run."""
    held = w if isinstance(w, Fp8Weight) else as_packed(w)
    check_arrays(x, held, bias)
    to = dtype_name(x.dtype) if out_dtype is None else checked_dtype(out_dtype, "out_dtype")
    return compute(x, held, bias, to, key_of(x, bias, out_dtype, precision) if held is w else None)


def compute(x: Array, held: Packed | Fp8Weight, bias: Array | None, to: str, key: Any = None) -> Array | None:
    """``linear_fp8`` on arrays that fit each other; None where exact kernels are to run.

    Args:
        x: as of ``linear``.
        held: the weight.
        bias: as of ``linear``.
        to: the dtype of the result.
        key: under which the weight keeps what this call comes down to; None if it is not to.
    """
    lead = tuple(x.shape[:-1])
    call = Fp8Call.of(
        held,
        rows=prod(lead),
        dtype=dtype_name(x.dtype),
        out_dtype=to,
        device=device_of(x),
        library=library_of(x),
        bias=bias is not None,
        capability=capability_of(x),
    )
    kernel = kernel_for(call)
    if kernel is None:
        return None

    def run(x: Array, bias: Array | None, out: Array) -> None:
        if call.device == "meta":
            return
        args = Fp8Args(x=x, weight=held, bias=bias, out=out)
        if kernel.bind is None or key is None or (call.device == "cuda" and capturing(x.device)):
            kernel.run(args)  # in a capture what is bound may hold what the graph has yet to make
        else:
            bound = kernel.bind(args)
            keep(held.memo, key, on_tensors(bound, _buffers(held), (*lead, out.shape[1]), out))
            bound(x, bias, out)

    return on_rows(x, held.shape, bias, to, run)


def error_of(w: Packed | Fp8Weight) -> float | None:
    """What rounding to FP8 loses, kept with a packed weight; None on meta, or where a twin does not state it."""
    if isinstance(w, Fp8Weight):
        return w.error
    if getattr(scale_of(w), "is_meta", False):
        return None
    version = version_of(w)
    known = w.memo.get("fp8 error")
    if known is None or known[0] != version:
        weight: Any = w.unpack()  # NVFP4, as as_packed has seen to
        known = w.memo["fp8 error"] = version, fp8_error(weight)
    error: float = known[1]
    return error


def _buffers(w: Packed | Fp8Weight) -> list[Any]:
    if isinstance(w, Packed):
        return list(w.buffers().values())
    return [a for a in (w.data, w.scale, w.pre_scale) if a is not None]
