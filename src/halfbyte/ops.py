"""What can be computed with a weight, and how the way is chosen. The only caller of kernels.

``plan`` shows the choice without running it; ``linear`` makes the same choice and runs it.
``attention`` chooses among its own kernels.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.kernels import KERNELS, AttentionArgs, Call, Int8Args, Int8Call, LinearArgs, forced, select
from halfbyte.kernels.base import Library, check_kind, device_of, library_of, version_of
from halfbyte.kinds import Int8Weight
from halfbyte.layouts import Layout, Packable, Packed, parse
from halfbyte.lossy import to_int8
from halfbyte.numerics import Array, is_torch
from halfbyte.weight import Mxfp4Weight, Weight, dtype_name, float_dtype

__all__ = ["Plan", "attention", "grouped_linear", "linear", "pack", "plan", "unpack"]

DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("exact", "int8")

_FEW_ROWS = 64
"""Calls of more rows are not remembered: each number of rows would be, and they take long enough anyway."""
_FEW_CALLS = 256
"""What is remembered of a weight, at most."""


def pack(weight: Packable, layout: Layout | str = "rows") -> Packed:
    """The weight in a layout.

    Args:
        weight: NumPy arrays or torch tensors.
        layout: a Layout, or its key such as "rows"; for an Mxfp4Weight "columns(kind=mxfp4)" and the like.

    Raises:
        LayoutError: an unknown layout, or a kind, shape or value that it cannot hold.
        WeightError: a null weight.
    """
    if not isinstance(weight, Weight | Mxfp4Weight):
        raise UsageError("not a weight", got=type(weight).__name__, expected="a Weight; see halfbyte.quantize")
    return (parse(layout) if isinstance(layout, str) else layout).pack(weight)


def unpack(packed: Packed) -> Packable:
    """The weight again, bit for bit."""
    return packed.unpack()


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
    """

    call: Call | Int8Call
    kernel: str
    why: str
    refusals: tuple[tuple[str, str], ...]
    bytes: int
    flops: int
    extra_bytes: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        call = self.call
        *experts, n, k = call.shape
        shape = "".join(f"E={e} " for e in experts) + f"N={n} K={k} M={call.rows}"
        form = f"layout {call.layout.key}" if isinstance(call, Call) else "INT8 rows"
        lines = [
            ("op", f"{call.op} {shape}, {form}"),
            ("arrays", f"{call.library} on {call.device}, {call.dtype} to {call.out_dtype}"),
            ("kernel", f"{self.kernel} ({self.why})"),
            ("bytes", f"{self.bytes:,}"),
            ("flops", f"{self.flops:,}"),
            ("extra", f"{self.extra_bytes:,} bytes of the weight held twice"),
            *((f"not {name}", reason) for name, reason in self.refusals),
            *(("note", note) for note in self.notes),
        ]
        width = max(len(head) for head, _ in lines)
        return "\n".join(f"{head:<{width}}  {text}" for head, text in lines)


def plan(
    op: str,
    weight: Packed | Weight | Int8Weight,
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
        op: "linear".
        weight: what is applied; a Weight is packed as rows. It need not be on ``device`` yet.
        rows: M, the rows of activations.
        dtype: of the activations: "float32", "bfloat16", "float16" or a torch dtype.
        device: such as "cpu" or "cuda:0".
        out_dtype: of the result; by default ``dtype``.
        library: "torch" or "numpy"; by default that of the weight's arrays.
        precision: as for ``linear``; "int8" makes the twin if there is none yet, to tell its error.

    Raises:
        UsageError: an argument that cannot be meant.
        NoKernelError: nothing accepts this call; the error lists each candidate and why it declined.
    """
    if rows < 0:
        raise UsageError("rows cannot be negative", got=rows)
    if op != LinearArgs.op:
        raise UsageError("unknown op", got=repr(op), expected=LinearArgs.op)
    if _rounds(weight, precision) or isinstance(weight, Int8Weight):
        return _plan_int8(weight, rows, dtype, device, out_dtype, library)
    packed = as_packed(weight)
    call = Call.on(
        packed,
        rows=rows,
        dtype=_checked_dtype(dtype, "dtype"),
        out_dtype=_checked_dtype(dtype if out_dtype is None else out_dtype, "out_dtype"),
        device=str(device).split(":")[0],
        library=library or library_of(packed.buffers()["scale2"]),
        bias=False,
    )
    kernel = select(LinearArgs, call)
    others = ((k.name, ", and ".join(k.refuse(call))) for k in KERNELS if k.op == op and k is not kernel)
    cost = kernel.cost(call)
    extra = 0 if isinstance(weight, Packed) else _unshared_bytes(packed, weight)
    notes = [f"activations that are not contiguous are copied once: {rows * packed.shape[-1]:,} values"]
    if isinstance(weight, Weight):
        notes.append("the weight is packed as rows in each call; pack it once")
    return Plan(
        call=call,
        kernel=kernel.name,
        why="forced by HALFBYTE_KERNEL" if forced(op) else "first in the table that accepts",
        refusals=tuple((name, reasons) for name, reasons in others if reasons),
        bytes=cost.bytes,
        flops=cost.flops,
        extra_bytes=extra,
        notes=tuple(notes),
    )


def linear(
    x: Array,
    w: Packed | Weight | Int8Weight,
    bias: Array | None = None,
    *,
    out_dtype: Any = None,
    precision: str | None = None,
) -> Array:
    """Apply an NVFP4 weight, or its INT8 twin, to activations: ``x @ dequantize(w).T + bias``.

    Args:
        x: (..., K) float32, bfloat16 or float16; leading axes may be empty or absent.
        w: (N, K) in a layout that some kernel accepts on x's device; a Weight is packed as rows first.
        bias: (N,) float32, bfloat16 or float16.
        out_dtype: of the result; by default x's.
        precision: "exact", the default for NVFP4, or "int8", the default for an Int8Weight and never chosen otherwise:
            activations are rounded to 8 bits for each token, the weight is its ``to_int8``, which is made once and
            kept with a Packed (N * K bytes). ``halfbyte.kernels.int8`` states the bound: about 1.2 % of the result's
            norm for Gaussian values. A token with Inf or NaN gives NaN.

    Returns:
        (..., N). If exact, products are summed in float32, scale2 multiplies the sum once, the bias is added in
        float32, and the result is rounded once. In torch it has no gradient: backward through it raises.

    Raises:
        UsageError: arrays that do not fit the weight or each other.
        WeightError: a null weight.
        LayoutError: a Weight that the layout rows cannot hold.
        NoKernelError: nothing accepts this call; the error lists each candidate and why it declined.
    """
    if (precision is not None or type(w) is Int8Weight) and (_rounds(w, precision) or isinstance(w, Int8Weight)):
        return _linear_int8(x, w, bias, out_dtype)
    w = cast("Packed | Weight", w)
    if is_torch(x) and sys.modules["torch"].compiler.is_compiling():
        from halfbyte.torch_ops import traced

        packed = as_packed(w)
        return traced(x, packed.key, packed.shape[0], packed.buffers(), bias, out_dtype)
    known = w.memo.get(_key(x, bias, out_dtype)) if type(w) is Packed else None
    if known is not None:
        return known(x, bias)
    packed = as_packed(w)
    _check_arrays(x, packed, bias)
    to = _dtype_name(x) if out_dtype is None else _checked_dtype(out_dtype, "out_dtype")
    if is_torch(x) and _wants_gradient(x, bias):
        return _without_gradient()(x, bias, lambda x: compute(x, packed, bias, to))
    if packed is w:
        _remember(x, packed, bias, out_dtype, to)
    return compute(x, packed, bias, to)


def grouped_linear(
    x: Array, w: Packed | Weight, counts: Sequence[int], bias: Array | None = None, *, out_dtype: Any = None
) -> Array:
    """Apply each expert's weight to its own tokens: ``y[e] = x[e] @ dequantize(w[e]).T + bias[e]``.

    Args:
        x: (T, K) float32, bfloat16 or float16; the tokens of expert 0 come first, then those of expert 1, and so on.
        w: (E, N, K).
        counts: for each of the E experts how many tokens are its own, 0 too; they add up to T.
        bias: (E, N) float32, bfloat16 or float16.
        out_dtype: of the result; by default x's.

    Returns:
        (T, N); each expert's rows are those of ``linear``, bit for bit.

    Raises:
        UsageError: counts, axes or arrays that do not fit each other.
        NoKernelError: as ``linear``.
    """
    packed = as_packed(w)
    if len(packed.shape) != 3:
        raise UsageError("grouped_linear needs one expert axis", got=packed.shape, expected="(E, N, K)")
    experts, n, _ = packed.shape
    sizes = [int(count) for count in counts]
    if len(x.shape) != 2 or len(sizes) != experts or min(sizes, default=0) < 0 or sum(sizes) != x.shape[0]:
        raise UsageError(
            "counts do not fit the experts and the tokens",
            got=f"{len(sizes)} counts that add up to {sum(sizes)}, x {tuple(x.shape)}",
            expected=f"{experts} counts, none negative, and as many rows of x (T, K)",
        )
    if bias is not None and tuple(bias.shape) != (experts, n):
        raise UsageError("bias does not fit the experts", got=tuple(bias.shape), expected=(experts, n))
    if "experts" not in packed.memo:
        packed.memo["experts"] = [packed.expert(e) for e in range(experts)]
    _check_float(x, "x")
    out = _empty((x.shape[0], n), _dtype_name(x) if out_dtype is None else _checked_dtype(out_dtype, "out_dtype"), x)
    start = 0
    for e, size in enumerate(sizes):
        if size:
            rows = slice(start, start + size)
            own = None if bias is None else bias[e]
            out[rows] = linear(x[rows], packed.memo["experts"][e], own, out_dtype=dtype_name(out.dtype))
            start += size
    return out


def compute(x: Array, packed: Packed, bias: Array | None, out_dtype: Any) -> Array:
    """``linear`` on arrays that fit each other."""
    lead = tuple(x.shape[:-1])
    n, k = packed.shape[-2:]
    rows = prod(lead)
    out = _empty((rows, n), dtype_name(out_dtype), x)
    args = LinearArgs(
        x=_contiguous(x.reshape(rows, k)), weight=packed, bias=None if bias is None else _contiguous(bias), out=out
    )
    kernel = select(LinearArgs, args.call())
    if not k:
        out[...] = 0 if bias is None else bias
    elif rows:
        kernel.run(args)
    return out.reshape(*lead, n)


def _key(x: Array, bias: Array | None, out_dtype: Any) -> Any:
    """All of a call on a weight that decides what is done, but for its gradient."""
    how = None if bias is None else (bias.shape, bias.dtype)
    return x.shape, x.dtype, getattr(x, "device", None), how, out_dtype, os.environ.get("HALFBYTE_KERNEL")


def _remember(x: Array, packed: Packed, bias: Array | None, out_dtype: Any, to: str) -> None:
    """Keep with the weight what a call like this one comes down to, if its kernel can say so."""
    n, k = packed.shape[-2:]
    shape, rows = (*x.shape[:-1], n), prod(x.shape[:-1])
    native = is_torch(x) or (x.dtype.isnative and (bias is None or bias.dtype.isnative))
    if not (0 < rows <= _FEW_ROWS and k and native):
        return
    args = LinearArgs(x=x.reshape(rows, k), weight=packed, bias=bias, out=_empty((rows, n), to, x))
    kernel = select(LinearArgs, args.call())
    if kernel.bind is None:
        return
    run = kernel.bind(args)
    if len(packed.memo) > _FEW_CALLS:
        packed.memo.clear()
    key = _key(x, bias, out_dtype)
    if not is_torch(x):
        dtype = args.out.dtype

        def call_numpy(x: Array, bias: Array | None) -> Array:
            out = np.empty(shape, dtype)
            run(np.ascontiguousarray(x), bias if bias is None else np.ascontiguousarray(bias), out)
            return out

        packed.memo[key] = call_numpy
        return
    import torch

    torch_dtype, written = args.out.dtype, version_of(packed)
    counted: list[Any] = [buffer for buffer in packed.buffers().values() if not buffer.is_inference()]

    def call_torch(x: Array, bias: Array | None) -> Array:
        gradient = x.requires_grad or (bias is not None and bias.requires_grad)
        if sum([b._version for b in counted]) != written or (gradient and torch.is_grad_enabled()):
            packed.memo.pop(key, None)
            return linear(x, packed, bias, out_dtype=out_dtype)
        out = torch.empty(shape, dtype=torch_dtype)
        run(_contiguous(x), bias if bias is None else _contiguous(bias), out)
        return out

    packed.memo[key] = call_torch


def attention(args: AttentionArgs) -> Array:
    """Run attention on one of the bundles of ``halfbyte.kernels``, such as LlmFmha.

    Args:
        args: the arrays and numbers; its ``out`` is written.

    Returns:
        ``args.out``.

    Raises:
        UsageError: lengths or pages that do not fit the arrays, or arrays that want a gradient: there is none.
        NoKernelError: nothing accepts these arguments; the error names the nearest kernel and what keeps it.
    """
    kernel = select(type(args), args.call())
    if is_torch(args.q):
        import torch

        if torch.is_grad_enabled() and any(getattr(a, "requires_grad", False) for a in vars(args).values()):
            raise UsageError("halfbyte.attention has no gradient", hint="run it under torch.no_grad()")
    if prod(args.out.shape):
        kernel.run(args)
    return args.out


def as_packed(weight: Packed | Weight) -> Packed:
    """What kernels take; a Weight is packed as rows.

    Raises:
        UsageError: another kind of weight than NVFP4.
    """
    if isinstance(weight, Packed):
        check_kind(weight.layout)
        return weight
    if isinstance(weight, Weight):
        return pack(weight)
    hint = "cast it with halfbyte.mxfp4.to_nvfp4" if isinstance(weight, Mxfp4Weight) else None
    raise UsageError("not a weight", got=type(weight).__name__, expected="a Packed or a Weight", hint=hint)


def _check_arrays(x: Array, packed: Packed | Int8Weight, bias: Array | None) -> None:
    """UsageError where x, weight and bias are not of one library, one device and fitting shapes."""
    n, k = packed.shape[-2:]
    _check_float(x, "x")
    if len(x.shape) < 1 or x.shape[-1] != k:
        raise UsageError("the last axis of x is not the weight's K", got=tuple(x.shape), expected=f"(..., {k})")
    _check_beside(_scale_of(packed), "the weight", x)
    if bias is not None:
        _check_float(bias, "bias")
        _check_beside(bias, "bias", x)
        if tuple(bias.shape) != (n,):
            raise UsageError("bias does not fit the weight's N", got=tuple(bias.shape), expected=(n,))


def _check_float(a: Array, what: str) -> None:
    if not (is_torch(a) or isinstance(a, np.ndarray)):
        raise UsageError(
            f"{what} is of the wrong type", got=type(a).__name__, expected="a NumPy array or a torch tensor"
        )
    name = _dtype_name(a)
    if name not in DTYPES:
        raise UsageError(f"{what} is of the wrong dtype", got=name, expected=", ".join(DTYPES), hint="cast it first")


def _check_beside(a: Array, what: str, x: Array) -> None:
    if is_torch(a) != is_torch(x):
        one, two = ("torch", "numpy") if is_torch(a) else ("numpy", "torch")
        raise UsageError(
            f"{what} and x are of two libraries",
            got=f"{what} in {one}, x in {two}",
            expected="one library",
            hint="move the weight once: packed.to(device), or weight.torch() and weight.numpy()",
        )
    if is_torch(a) and a.device != x.device:
        raise UsageError(
            f"{what} and x are on two devices",
            got=f"{what} on {a.device}, x on {x.device}",
            expected="one device",
            hint=f"move it once: .to({str(x.device)!r})",
        )


def _checked_dtype(dtype: Any, what: str) -> str:
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise UsageError(f"{what} is unknown", got=name, expected=" or ".join(DTYPES))
    return name


def _dtype_name(a: Array) -> str:
    return dtype_name(a.dtype)


def _contiguous(x: Array) -> Array:
    """Row-major, in this machine's order of bytes, and not a view that torch negates when it is read."""
    if is_torch(x):
        return x.resolve_neg().contiguous()
    return np.ascontiguousarray(x, x.dtype.newbyteorder("="))


def _empty(shape: tuple[int, int], dtype: str, like: Array) -> Array:
    if not is_torch(like):
        return np.empty(shape, float_dtype(dtype))
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


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


def _wants_gradient(x: Array, bias: Array | None) -> bool:
    import torch

    return torch.is_grad_enabled() and bool(x.requires_grad or (bias is not None and bias.requires_grad))


@functools.cache
def _without_gradient() -> Callable[[Array, Array | None, Callable[[Array], Array]], Array]:
    """A torch function that runs forward and raises in backward, instead of cutting the graph in silence."""
    import torch

    class WithoutGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Array, bias: Array | None, run: Callable[[Array], Array]) -> Array:
            return run(x)  # bias is an argument so that its wish for a gradient counts, too

        @staticmethod
        def backward(ctx: Any, *gradients: Array) -> Any:
            raise UsageError(
                "halfbyte.linear has no gradient", hint="run the model under torch.no_grad(), or detach its output"
            )

    apply: Callable[[Array, Array | None, Callable[[Array], Array]], Array] = WithoutGradient.apply
    return apply


def _rounds(w: Any, precision: str | None) -> bool:
    """Whether INT8 is asked for; UsageError where the precision is unknown or the weight cannot give it."""
    if precision not in (None, *PRECISIONS):
        raise UsageError("unknown precision", got=repr(precision), expected=" or ".join(map(repr, PRECISIONS)))
    if isinstance(w, Int8Weight) and precision == "exact":
        raise UsageError("an INT8 weight is rounded", got="precision 'exact'", expected="the NVFP4 weight, or 'int8'")
    return precision == "int8"


def _scale_of(w: Packed | Int8Weight) -> Array:
    return w.scale if isinstance(w, Int8Weight) else w.buffers()["scale2"]


def _twin_of(w: Packed | Int8Weight) -> Int8Weight:
    """The INT8 twin of a weight, kept with it until a buffer is written in place."""
    if isinstance(w, Int8Weight):
        return w
    buffers = w.buffers().values()
    versions = [b._version if is_torch(b) and not b.is_inference() else 0 for b in buffers]
    known = w.memo.get("int8")
    if known is None or known[0] != versions:
        weight: Any = w.unpack()  # NVFP4, as as_packed has seen to
        known = w.memo["int8"] = versions, to_int8(weight)
    twin: Int8Weight = known[1]
    return twin


def _linear_int8(x: Array, w: Packed | Weight | Int8Weight, bias: Array | None, out_dtype: Any) -> Array:
    held = w if isinstance(w, Int8Weight) else as_packed(w)
    n, k = held.shape[-2:]
    _check_arrays(x, held, bias)
    lead = tuple(x.shape[:-1])
    to = _dtype_name(x) if out_dtype is None else _checked_dtype(out_dtype, "out_dtype")
    call = Int8Call.on(
        held,
        rows=prod(lead),
        dtype=_dtype_name(x),
        out_dtype=to,
        device=device_of(x),
        library=library_of(x),
        bias=bias is not None,
    )
    kernel = select(Int8Args, call)

    def run(x: Array) -> Array:
        out = _empty((call.rows, n), to, x)
        if not k:
            out[...] = 0 if bias is None else bias
        elif call.rows and n:
            added = None if bias is None else _contiguous(bias)
            kernel.run(Int8Args(x=_contiguous(x.reshape(call.rows, k)), weight=_twin_of(held), bias=added, out=out))
        return out.reshape(*lead, n)

    if is_torch(x) and _wants_gradient(x, bias):
        return _without_gradient()(x, bias, run)
    return run(x)


def _plan_int8(
    weight: Packed | Weight | Int8Weight, rows: int, dtype: Any, device: Any, out_dtype: Any, library: Library | None
) -> Plan:
    held = weight if isinstance(weight, Int8Weight) else as_packed(weight)
    call = Int8Call.on(
        held,
        rows=rows,
        dtype=_checked_dtype(dtype, "dtype"),
        out_dtype=_checked_dtype(dtype if out_dtype is None else out_dtype, "out_dtype"),
        device=str(device).split(":")[0],
        library=library or library_of(_scale_of(held)),
        bias=False,
    )
    kernel = select(Int8Args, call)
    others = ((k.name, ", and ".join(k.refuse(call))) for k in KERNELS if k.op == call.op and k is not kernel)
    twin, cost = _twin_of(held), kernel.cost(call)
    error = "unknown: the twin does not state it" if twin.error is None else f"{twin.error:.4f} of its norm, measured"
    notes = [f"error of the weight by rounding to INT8: {error}", "activations are rounded to 8 bits for each token"]
    if isinstance(weight, Weight):
        notes.append("the weight is packed and its twin made in each call; pack it once, or call to_int8 once")
    return Plan(
        call=call,
        kernel=kernel.name,
        why="forced by HALFBYTE_KERNEL" if forced(call.op) else "first in the table that accepts",
        refusals=tuple((name, reasons) for name, reasons in others if reasons),
        bytes=cost.bytes,
        flops=cost.flops,
        extra_bytes=0 if twin is weight else prod(twin.shape) + 4 * twin.shape[-2],
        notes=tuple(notes),
    )
