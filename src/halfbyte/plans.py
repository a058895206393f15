"""Which kernel computes a call, and why, without running it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from math import log2, prod
from operator import index
from typing import Any, get_args

import numpy as np

from halfbyte.errors import NoKernelError, UsageError
from halfbyte.forms import ExpertsForm, Form
from halfbyte.fp8_ops import FEWEST, error_of, exact, kernel_for, slower
from halfbyte.int8_ops import twin_of
from halfbyte.kernels import (
    KERNELS,
    Call,
    Cost,
    DenseArgs,
    EmbeddingArgs,
    EmbeddingCall,
    ExpertsArgs,
    ExpertsCall,
    Fp8Call,
    Int8Args,
    Int8Call,
    Kernel,
    LinearArgs,
    W4a4Args,
    W4a4Call,
    forced,
    select,
    w4a4,
)
from halfbyte.kernels.base import Library, capability, library_of
from halfbyte.kernels.cuda import launch, scaled_mm
from halfbyte.kernels.cuda.ceilings import CEILINGS, Ceiling
from halfbyte.kernels.cuda.choices import Choice, choice, ends, entries, pick
from halfbyte.kernels.dense import DenseCall
from halfbyte.kernels.experts import PRECISIONS
from halfbyte.kernels.experts_torch import chosen
from halfbyte.kinds import Fp8Weight, Int8Weight
from halfbyte.layouts import Packed
from halfbyte.numerics import is_torch
from halfbyte.operands import as_packed, checked_dtype, precision_of, scale_of
from halfbyte.weight import Weight

_MOST_ROWS = 1 << 17
"""Ranges of rows are looked for up to here."""

_KINDS = ("cpu", "meta", "mps", "xpu", "hpu", "mtia", "xla", "vulkan")
"""Of devices other than CUDA's, as torch names them; for where torch is not installed."""

FP8_ACTIVATIONS = 0.0265
"""What activations lose by rounding to FP8, of their norm, where they are Gaussian; tests measure it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which kernel computes a call, and why; ``str(plan)`` is a small table.

    Args:
        call: what is computed.
        kernel: name of the kernel that runs.
        why: why it and no other.
        refusals: (kernel, reason) of each that declined.
        bytes: least bytes that the call moves.
        flops: floating-point operations.
        extra_bytes: bytes of the weight that are held a second time.
        notes: what else costs time or memory.
        configuration: how the kernel runs; empty where there is one way.
        ranges: on a GPU (first M, last M or None, kernel and configuration) of all M; within one a row's result does
            not depend on M, bit for bit, but with reference-torch, whose order of sums is torch's.
        time: on a GPU what the call takes at the least, and what is expected.
        scratch_bytes: of memory beside the arrays, shared by all kernels of a stream.
        least: seconds that ``time`` says at the least; None where it is not known.
        expected: seconds that ``time`` says are expected; None where that was not measured.
    """

    call: Call | Int8Call
    kernel: str
    why: str
    refusals: tuple[tuple[str, str], ...]
    bytes: int
    flops: int
    extra_bytes: int
    notes: tuple[str, ...]
    configuration: str = ""
    ranges: tuple[tuple[int, int | None, str], ...] = ()
    time: str = ""
    scratch_bytes: int = 0
    least: float | None = None
    expected: float | None = None

    def __str__(self) -> str:
        call = self.call
        *experts, n, k = call.shape
        shape = "".join(f"E={e} " for e in experts) + f"N={n} K={k} M={call.rows}"
        if isinstance(call, ExpertsCall):
            of = "" if len(call.mixture.local) == call.mixture.experts else f" of {call.mixture.experts}"
            shape = f"E={experts[0]}{of} H={k} I={call.inner} T={call.rows} top {call.top}"
        if isinstance(call, Int8Call):
            form, place = "INT8 rows", call.device
        else:
            twin = isinstance(call, Fp8Call) and call.resident
            form, place = "FP8 rows" if twin else f"layout {call.layout.key}", call.place
        lines = [
            ("op", f"{call.op} {shape}, {form}"),
            ("arrays", f"{call.library} on {place}, {call.dtype} to {call.out_dtype}"),
            ("kernel", f"{self.kernel} ({self.why})"),
            *([("how", self.configuration)] if self.configuration else ()),
            *((f"M {_span(first, last)}", kernel) for first, last, kernel in self.ranges),
            ("bytes", f"{self.bytes:,}"),
            ("flops", f"{self.flops:,}"),
            *([("time", self.time)] if self.time else ()),
            ("extra", f"{self.extra_bytes:,} bytes of the weight held twice"),
            *(
                [("scratch", f"{self.scratch_bytes:,} bytes, shared by a stream's kernels")]
                if self.scratch_bytes
                else ()
            ),
            *((f"not {name}", reason) for name, reason in self.refusals),
            *(("note", note) for note in self.notes),
        ]
        width = max(len(head) for head, _ in lines)
        return "\n".join(f"{head:<{width}}  {text}" for head, text in lines)


def plan(
    op: str,
    weight: Packed | Weight | Int8Weight | Fp8Weight | Form | ExpertsForm,
    *,
    rows: int,
    dtype: Any = "bfloat16",
    device: Any = "cpu",
    out_dtype: Any = None,
    library: Library | None = None,
    precision: str | None = None,
) -> Plan:
    """Which kernel would compute a call, and why; runs nothing.

    Args:
        op: "linear", "embedding" or "experts".
        weight: what is applied; a Weight is packed as rows. It need not be on ``device`` yet, and a Form need not be
            anywhere. Of experts an ExpertsForm, such as ``halfbyte.nn.Experts.form`` gives.
        rows: M, the rows of activations, or how many rows are looked up.
        dtype: of the activations: "float32", "bfloat16", "float16" or a torch dtype; without ``out_dtype`` also of the
            result, which is all that it means for an embedding.
        device: such as "cpu" or "cuda:0"; "cuda:sm_90" is a GPU of that compute capability in another machine, where
            torch and Triton are at hand: neither needs to be here.
        out_dtype: of the result; by default ``dtype``.
        library: "torch" or "numpy"; by default that of the weight's arrays, and torch beside the CPU.
        precision: as for ``linear``; "int8" makes the twin if there is none yet, to tell its error, and "fp8" measures
            that of the weight's rounding once.

    Raises:
        UsageError: an argument that cannot be meant.
        NoKernelError: nothing accepts this call; the error lists each candidate and why it declined.
    """
    try:
        rows = index(rows)
    except TypeError:
        raise UsageError("rows are a whole number", got=repr(rows)) from None
    if rows < 0:
        raise UsageError("rows cannot be negative", got=rows)
    known = LinearArgs.op, EmbeddingArgs.op, ExpertsArgs.op
    if op not in known:
        raise UsageError("unknown op", got=repr(op), expected=" or ".join(known))
    if isinstance(weight, ExpertsForm) != (op == ExpertsArgs.op):
        raise UsageError(f"{op} is not of this", got=type(weight).__name__, hint="experts have an ExpertsForm")
    if library not in (None, *get_args(Library)):
        raise UsageError("unknown library", got=repr(library), expected=" or ".join(map(repr, get_args(Library))))
    kind, sm, gpu = _place(device)
    if kind != "cpu":
        library = library or "torch"
    if op == EmbeddingArgs.op:
        if isinstance(weight, Int8Weight | Fp8Weight) or precision is not None:
            raise UsageError("an embedding is exact", got="a twin or a precision", expected="an NVFP4 weight")
        held: Any = weight
        return _plan_embedding(held, rows, dtype if out_dtype is None else out_dtype, device, library)
    of: dict[str, Any] = {
        "rows": rows,
        "dtype": checked_dtype(dtype, "dtype"),
        "out_dtype": checked_dtype(dtype if out_dtype is None else out_dtype, "out_dtype"),
        "device": kind,
    }
    call: Any
    if isinstance(weight, ExpertsForm):
        if precision not in (None, *PRECISIONS):
            raise UsageError("unknown precision", got=repr(precision), expected=" or ".join(map(repr, PRECISIONS)))
        call = weight.call(precision or "exact", of | {"library": library or "torch"}, sm)
        return _plan_experts(replace(call, elsewhere=_elsewhere(device)), gpu)
    if isinstance(weight, Form):
        held = weight
        how = "fp8" if weight.kind == "fp8" else precision_of(weight, precision)
        call = weight.call(how, of | {"library": library or "torch"}, sm)
    else:
        how = precision_of(weight, precision)
        held = weight if isinstance(weight, Int8Weight | Fp8Weight) else as_packed(weight)
        of |= {"library": library or library_of(scale_of(held)), "bias": False}
        makes: dict[str, Callable[..., Any]] = {
            "int8": Int8Call.on, "fp8": Fp8Call.of, "w4a4": W4a4Call.of, "exact": Call.on,
        }  # fmt: skip
        call = makes[how](held, **of, **({} if how == "int8" else {"capability": sm}))
    if how == "int8":
        return _plan_int8(weight, held, call)
    call = replace(call, elsewhere=_elsewhere(device))
    if how == "w4a4":
        kernel = select(W4a4Args, call)
        return _planned(call, kernel, gpu, 0, (*w4a4.notes(call), *_copies(weight, call), *_launches(kernel)), None)
    return (_plan_fp8 if how == "fp8" else _plan_exact)(weight, held, call, gpu)


def _plan_exact(weight: Any, packed: Packed | Form, call: Call, gpu: str | None) -> Plan:
    kernel = select(LinearArgs, call)
    extra = _unshared_bytes(packed, weight) if isinstance(weight, Weight) and isinstance(packed, Packed) else 0
    return _planned(call, kernel, gpu, extra, (*_copies(weight, call), *_launches(kernel)), _runs)


def _plan_experts(call: ExpertsCall, gpu: str | None) -> Plan:
    kernel, computed = chosen(call)
    notes = [f"routing is taken to be even: {call.touched:.1f} experts have tokens"]
    if computed == "w4a4":
        notes.append(f"activations are rounded to NVFP4: {w4a4.ERROR} of their norm if Gaussian, before each product")
    if call.precision != computed:
        notes.append("FP8 where a kernel takes the call and is faster; this one is exact")
    call = replace(call, precision=computed)
    return _planned(call, kernel, gpu, 0, (*notes, *_launches(kernel)), _runs_experts)


def _runs_experts(call: Call) -> str:
    """The kernel and configuration of a call of experts; empty where there is none."""
    assert isinstance(call, ExpertsCall)
    try:
        kernel, _ = chosen(call)
    except NoKernelError:
        return ""
    return f"{kernel.name} {_configuration(kernel, call)}".strip()


def _planned(
    call: Any,
    kernel: Kernel[Any, Any],
    gpu: str | None,
    extra: int,
    notes: tuple[str, ...],
    runs: Callable[[Any], str] | None,
) -> Plan:
    """The plan of a call on a CPU or GPU; ``runs`` names what computes calls like it, where ranges of rows are told."""
    cost = kernel.cost(call)
    time, least, expected = _time(call, kernel, gpu) if call.capability else ("", None, None)
    return Plan(
        call=call,
        kernel=kernel.name,
        why=_why(call, kernel),
        refusals=_refusals(kernel, call),
        bytes=cost.bytes,
        flops=cost.flops,
        extra_bytes=extra,
        notes=notes,
        configuration=_configuration(kernel, call),
        ranges=tuple(_ranges(call, runs)) if call.capability and runs else (),
        time=time,
        scratch_bytes=kernel.scratch(call) if kernel.scratch else 0,
        least=least,
        expected=expected,
    )


def _plan_fp8(weight: Any, held: Packed | Fp8Weight | Form, call: Fp8Call, gpu: str | None) -> Plan:
    kernel = kernel_for(call)
    lost = None if isinstance(held, Form) else error_of(held)
    reason = "the twin does not state it" if isinstance(held, Fp8Weight) else "there are no values yet"
    measured = f"unknown: {reason}" if lost is None else f"{lost:.4f} of its norm, measured"
    notes = [
        f"error of the weight by rounding to FP8: {measured}",
        f"error of the activations by rounding to FP8 for each token: {FP8_ACTIVATIONS} of their norm if Gaussian",
    ]
    if lost is not None:
        together = (lost**2 + FP8_ACTIVATIONS**2) ** 0.5
        notes.append(f"error of the result by both: about {together:.3f} of its norm")
    if call.device == "cuda" and not call.resident:
        notes.append(
            f"FP8 from {FEWEST} tokens on, where a kernel takes the layout and is faster; other calls are exact"
        )
    if kernel is None:
        made = _plan_exact(weight, held if isinstance(held, Form) else as_packed(weight), exact(call), gpu)
        other = slower(call)
        measured_slower = [(other, f"was measured to be no faster than {made.kernel} here")] if other else []
        return replace(
            made,
            notes=(*notes, *made.notes),
            refusals=(*made.refusals, *measured_slower, *_refusals(None, call)),
            ranges=tuple(_ranges(call, _runs_fp8)) if call.capability else (),
        )
    extra = 0
    if isinstance(held, Packed):
        extra = 0 if isinstance(weight, Packed) else _unshared_bytes(held, weight)
    elif call.resident and kernel is scaled_mm.TORCH:
        extra = scaled_mm.padding(call)
    return _planned(call, kernel, gpu, extra, (*notes, *_copies(weight, call), *_launches(kernel)), _runs_fp8)


def _copies(weight: Any, call: Call) -> Iterator[str]:
    """What is copied in each call."""
    unaligned = " or do not begin at a multiple of 16 bytes" if call.device == "cuda" else ""
    values = call.rows * call.shape[-1]
    yield f"activations that are not contiguous{unaligned} are copied once: {values:,} values"
    if isinstance(weight, Weight):
        yield "the weight is packed as rows in each call; pack it once"


def _plan_embedding(
    weight: Packed | Weight | Form, rows: int, dtype: Any, device: Any, library: Library | None
) -> Plan:
    kind, sm, gpu = _place(device)
    of: dict[str, Any] = {
        "rows": rows,
        "dtype": "int64",
        "out_dtype": checked_dtype(dtype, "out_dtype"),
        "device": kind,
        "capability": sm,
    }
    packs: list[str] = []
    extra = 0
    if isinstance(weight, Form):
        of |= {"shape": weight.shape, "per_row": weight.per_row, "pre_scale": weight.pre_scale}
        call = EmbeddingCall(layout=weight.placed, library=library or "torch", elsewhere=_elsewhere(device), **of)
    else:
        packed = as_packed(weight)
        call = EmbeddingCall.of(packed, library=library or library_of(packed.buffers()["scale2"]), **of)
        call = replace(call, elsewhere=_elsewhere(device))
        if isinstance(weight, Weight):
            packs.append("the weight is packed as rows in each call; pack it once")
            extra = _unshared_bytes(packed, weight)
    return _planned(call, select(EmbeddingArgs, call), gpu, extra, tuple(packs), None)


def _place(device: Any) -> tuple[str, int, str | None]:
    """Of a device: its kind, and for a GPU the compute capability and torch's name, as far as they are known."""
    kind, _, which = str(device).partition(":")
    if kind != "cuda":
        _check_device(str(device))
        return kind, 0, None
    if which.startswith("sm_") and which[3:].isdecimal():
        return kind, int(which[3:]), None
    if which and not which.isdecimal():
        raise _unknown(str(device))
    try:
        import torch
    except ImportError:
        return kind, 0, None
    if int(which or 0) >= torch.cuda.device_count():
        return kind, 0, None
    index = int(which) if which else torch.cuda.current_device()
    return kind, capability(index), torch.cuda.get_device_name(index)


def _elsewhere(device: Any) -> bool:
    """Whether a device is named by what it can do, not as one of this machine."""
    return str(device).startswith("cuda:sm_")


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    try:
        import torch
    except ImportError:
        if re.fullmatch(f"({'|'.join(_KINDS)})(:[0-9]+)?", device) is None:
            raise _unknown(device) from None
        return
    try:
        torch.device(device)
    except RuntimeError as error:
        raise _unknown(device) from error


def _unknown(device: str) -> UsageError:
    return UsageError("unknown device", got=device, expected="such as cpu, cuda, cuda:0 or cuda:sm_90")


def _refusals(kernel: Kernel[Any, Any] | None, call: Any) -> tuple[tuple[str, str], ...]:
    others = ((k.name, ", and ".join(k.refuse(call))) for k in KERNELS if k.op == call.op and k is not kernel)
    return tuple((name, reasons) for name, reasons in others if reasons)


def _why(call: Call, kernel: Kernel[Any, Any]) -> str:
    if forced(call.op):
        return "forced by HALFBYTE_KERNEL"
    found = choice(call, kernel.name)
    if found is not None:
        first = pick(call)[0].kernel == kernel.name
        n, k = found.shape
        best = "best" if first else "best of those that accept"
        if call.dtype != found.dtype:
            best += f" with {found.dtype}"
        return f"{best} on {found.measurement['gpu']} at {n}x{k}, measured {found.measurement['date']}, {found.origin}"
    unknown = f"; nothing was measured for it on sm_{call.capability}" if call.capability else ""
    return f"first in the table that accepts{unknown}"


def _configuration(kernel: Kernel[Any, Any], call: Call) -> str:
    made = kernel.configure(call) if kernel.configure else None
    if not is_dataclass(made):
        return ""
    return " ".join(f"{one.name}={getattr(made, one.name)}" for one in fields(made))


def _launches(kernel: Kernel[Any, Any]) -> Iterator[str]:
    """What is to be said of how a kernel is launched."""
    if kernel.on_gpu:
        slowly = launch.unknown()
        if slowly:
            yield slowly


def _runs(call: Call) -> str:
    """The kernel and configuration of a call; empty where there is none."""
    try:
        kernel = select(LinearArgs, call)
    except NoKernelError:
        return ""
    return f"{kernel.name} {_configuration(kernel, call)}".strip()


def _runs_fp8(call: Call) -> str:
    """The same where FP8 is allowed."""
    assert isinstance(call, Fp8Call)
    try:
        kernel = kernel_for(call)
    except NoKernelError:
        return ""
    return _runs(exact(call)) if kernel is None else f"{kernel.name} {_configuration(kernel, call)}".strip()


def _ranges(call: Call, runs_of: Callable[[Call], str]) -> Iterator[tuple[int, int | None, str]]:
    """The ranges of M in which one kernel and configuration runs; a change and back between powers of two is missed."""
    points = {1 << i for i in range(_MOST_ROWS.bit_length())}
    points |= {end + step for end in ends(call) for step in (0, 1)}
    first, before, runs = 1, 1, runs_of(replace(call, rows=1))
    for point in sorted(points):
        while runs_of(replace(call, rows=point)) != runs:
            low, high = before, point
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if runs_of(replace(call, rows=middle)) == runs else (low, middle)
            if runs:
                yield first, low, runs
            first, before, runs = high, high, runs_of(replace(call, rows=high))
        before = point
    if runs:
        yield first, None, runs


def _span(first: int, last: int | None) -> str:
    if last is None:
        return f"{first}-"
    return str(first) if first == last else f"{first}-{last}"


def _time(call: Call, kernel: Kernel[Any, Any], gpu: str | None) -> tuple[str, float | None, float | None]:
    """What a call on a GPU takes at the least, and what is expected of the kernel: in words, and both in seconds."""
    found = choice(call, kernel.name)
    name = gpu or _measured_gpu(call.capability)
    ceiling = _ceiling(name, call)
    if ceiling is None:
        return f"unknown: no ceilings of {name or f'a GPU of sm_{call.capability}'} are known", None, None
    least = ceiling.seconds(kernel.cost(call))
    reached = _reached(call, kernel, found)
    text = f"at least {1e6 * least:.1f} us on {name} ({ceiling})"
    if not reached:
        return f"{text}; not measured", least, None
    return f"{text}; {1e6 * least / reached:.1f} us expected", least, least / reached


def ceiling(device: Any) -> tuple[str | None, Ceiling | None]:
    """Of a device as ``plan`` takes it: torch's name of the GPU, and what it reaches at best; None where unknown.

    A GPU that is known by its compute capability alone is taken to be the one that was measured.
    """
    _, sm, gpu = _place(device)
    name = gpu or _measured_gpu(sm)
    return name, CEILINGS.get(name or "")


def least(device: Any, nbytes: int, flops: int) -> float | None:
    """The least seconds of moving and computing so much on a device; None where its ceiling is not known."""
    _, known = ceiling(device)
    return known.seconds(Cost(nbytes, flops)) if known else None


def dense_kernel(shape: tuple[int, int], *, rows: int, dtype: str, bias: bool, device: str) -> str:
    """The name of the kernel that multiplies by a weight that is not quantized, in steps of ``generate``.

    Args:
        shape: (N, K).
        rows: M.
        dtype: of all arrays.
        bias: one is added.
        device: as for ``plan``.

    Raises:
        NoKernelError: torch is not installed, and the device is one of this machine; or HALFBYTE_KERNEL names a
            kernel that declines.
    """
    kind, sm, _ = _place(device)
    of: dict[str, Any] = {"capability": sm, "elsewhere": _elsewhere(device)}
    call = DenseCall(rows=rows, dtype=dtype, device=kind, library="torch", shape=shape, bias=bias, **of)
    return select(DenseArgs, call).name


def _measured_gpu(sm: int) -> str | None:
    """The GPU of a compute capability for which there are choices of kernels."""
    held = (one for entry in entries() if entry.capability == sm for one in entry.kernels.values())
    return next((ranges[0].choice.measurement["gpu"] for ranges in held), None)


def _ceiling(gpu: str | None, call: Call) -> Ceiling | None:
    """Of a GPU for a call; None where it is not known."""
    found = CEILINGS.get(gpu or "")
    fp8 = isinstance(call, Fp8Call) or (isinstance(call, ExpertsCall) and call.precision == "fp8")
    return found.fp8 if found and fp8 else found


def _reached(call: Call, kernel: Kernel[Any, Any], found: Choice | None) -> float | None:
    """The part of the ceiling that was reached where this kernel was measured nearest to a call."""
    ceiling = _ceiling(found.measurement["gpu"], call) if found else None
    if found is None or ceiling is None or not found.microseconds or call.dtype != found.dtype:
        return None
    rows = min(found.microseconds, key=lambda m: abs(log2(m / max(1, call.rows))))
    measured = replace(call, shape=found.shape, rows=rows)
    return ceiling.seconds(kernel.cost(measured)) / (1e-6 * found.microseconds[rows])


def _unshared_bytes(packed: Packed, weight: Weight) -> int:
    """Bytes of the packed codes and scales that are not the weight's own memory."""
    total = 0
    for name in ("codes", "scales"):
        buffer, own = packed.buffers()[name], getattr(weight, name)
        if is_torch(buffer):
            shared = buffer.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        else:
            shared = np.may_share_memory(buffer, own)
        total += 0 if shared else prod(buffer.shape)
    return total


def _plan_int8(weight: Any, held: Packed | Int8Weight | Form, call: Int8Call) -> Plan:
    kernel = select(Int8Args, call)
    twin, cost = None if isinstance(held, Form) else twin_of(held), kernel.cost(call)
    if twin is None:
        error = "unknown: there are no values yet"
    elif twin.error is None:
        error = "unknown: the twin does not state it"
    else:
        error = f"{twin.error:.4f} of its norm, measured"
    notes = [f"error of the weight by rounding to INT8: {error}", "activations are rounded to 8 bits for each token"]
    if isinstance(weight, Weight):
        notes.append("the weight is packed and its twin made in each call; pack it once, or call to_int8 once")
    return Plan(
        call=call,
        kernel=kernel.name,
        why="forced by HALFBYTE_KERNEL" if forced(call.op) else "first in the table that accepts",
        refusals=_refusals(kernel, call),
        bytes=cost.bytes,
        flops=cost.flops,
        extra_bytes=0 if isinstance(weight, Int8Weight) else prod(call.shape) + 4 * call.shape[-2],
        notes=tuple(notes),
    )
