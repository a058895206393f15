"""What can be computed with a weight. The only caller of kernels; ``halfbyte.plans`` shows their choice.

``linear`` chooses by the same rules as ``plan``, and runs. ``attention`` chooses among its own kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, cast

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.fp8_ops import linear_fp8
from halfbyte.int8_ops import linear_int8
from halfbyte.kernels import AttentionArgs, GroupedArgs, LinearArgs, select
from halfbyte.kinds import Fp8Weight, Int8Weight
from halfbyte.layouts import Layout, Packable, Packed, parse
from halfbyte.numerics import Array, is_torch
from halfbyte.operands import (
    as_packed,
    check_arrays,
    check_beside,
    check_float,
    checked_dtype,
    contiguous,
    empty,
    precision_of,
    scale_of,
    wants_gradient,
    without_gradient,
)
from halfbyte.plans import Plan, plan
from halfbyte.remembered import forced_name, keep, key_of, remember, watched_weakly
from halfbyte.w4a4_ops import linear_w4a4
from halfbyte.weight import Mxfp4Weight, Weight, dtype_name, to_torch

__all__ = ["Plan", "attention", "grouped_linear", "linear", "pack", "plan", "unpack"]


def pack(weight: Packable, layout: Layout | str = "rows") -> Packed:
    """The weight in a layout.

    Args:
        weight: NumPy arrays or torch tensors.
        layout: a Layout, or its key such as "rows"; for an Mxfp4Weight "columns(kind=mxfp4)" and the like.

    Raises:
        UsageError: not a weight, or not a layout.
        LayoutError: an unknown layout, or a kind, shape or value that it cannot hold.
        WeightError: a null weight.
    """
    if not isinstance(weight, Weight | Mxfp4Weight):
        raise UsageError("not a weight", got=type(weight).__name__, expected="a Weight; see halfbyte.quantize")
    if not isinstance(layout, Layout | str):
        raise UsageError("not a layout", got=type(layout).__name__, expected="a Layout or its key, such as 'rows'")
    return (parse(layout) if isinstance(layout, str) else layout).pack(weight)


def unpack(packed: Packed) -> Packable:
    """The weight again, bit for bit; codes of zero blocks are 0 where the layout's ``zero_blocks`` is "canonical".

    Raises:
        UsageError: not a Packed.
    """
    if not isinstance(packed, Packed):
        raise UsageError("not a packed weight", got=type(packed).__name__, expected="a Packed; see halfbyte.pack")
    return packed.unpack()


def linear(
    x: Array,
    w: Packed | Weight | Int8Weight | Fp8Weight,
    bias: Array | None = None,
    *,
    out_dtype: Any = None,
    precision: str | None = None,
) -> Array:
    """Apply an NVFP4 weight, or a rounded twin of it, to activations: ``x @ dequantize(w).T + bias``.

    Args:
        x: (..., K) float32, bfloat16 or float16; leading axes may be empty or absent.
        w: (N, K) in a layout that some kernel accepts on x's device; a Weight is packed as rows first.
        bias: (N,) float32, bfloat16 or float16.
        out_dtype: of the result; by default x's.
        precision: "exact", the default for NVFP4; the others are never chosen unasked, but by an Int8Weight or an
            Fp8Weight. In all, activations are rounded for each token, and one with Inf or NaN gives NaN.
            "int8": the weight is its ``to_int8``, which is made once and kept with a Packed (N * K bytes).
            ``halfbyte.kernels.int8`` states the bound: about 1.2 % of the result's norm for Gaussian values.
            "fp8": the weight is rounded as by ``to_fp8``, on its way into a kernel: nothing is kept. On a GPU that is
            from 256 tokens on, where a kernel does so and is faster; other calls are exact, and ``plan`` tells which.
            ``halfbyte.kernels.fp8`` states what is computed: about 3 % of the result's norm for Gaussian values.
            "w4a4": activations are rounded to NVFP4, by the weight's input scale where it has one, as engines for
            W4A4 checkpoints do; on any device, to measure what that costs. ``halfbyte.kernels.w4a4`` states what is
            computed: about 9.5 % of the result's norm for Gaussian values.

    Returns:
        (..., N). If exact, products are summed in float32, scale2 multiplies the sum once, the bias is added in
        float32, and the result is rounded once. In torch it has no gradient: backward through it raises.

    Raises:
        UsageError: arrays that do not fit the weight or each other.
        WeightError: a null weight.
        LayoutError: a Weight that the layout rows cannot hold.
        NoKernelError: nothing accepts this call; the error lists each candidate and why it declined.
    """
    tracing = is_torch(x) and sys.modules["torch"].compiler.is_compiling()
    if not tracing and (type(w) is Packed or type(w) is Fp8Weight):
        try:
            known = w.memo.get(key_of(x, bias, out_dtype, precision))
        except (AttributeError, TypeError):  # x or bias is no array, or what is no dtype: checked below
            known = None
        if known is not None:
            y: Array | None = known(x, bias)
            if y is not None:
                return y
    how = precision_of(w, precision)
    if tracing:
        from halfbyte.torch_ops import traced, traced_twin

        if isinstance(w, Fp8Weight):
            return traced_twin(x, w, bias, out_dtype)
        packed = as_packed(cast("Any", w))
        return traced(x, packed.key, packed.shape, packed.buffers(), bias, out_dtype, how)
    if how == "int8":
        return linear_int8(x, cast("Any", w), bias, out_dtype)
    if how == "fp8":
        rounded = linear_fp8(x, cast("Any", w), bias, out_dtype, precision)
        if rounded is not None:
            return rounded
    w = cast("Packed | Weight", w)
    if how == "w4a4":
        return linear_w4a4(x, w, bias, out_dtype)
    packed = as_packed(w)
    check_arrays(x, packed, bias)
    to = dtype_name(x.dtype) if out_dtype is None else checked_dtype(out_dtype, "out_dtype")
    if is_torch(x) and wants_gradient(x, bias):
        return without_gradient()(x, bias, lambda x: compute(x, packed, bias, to))
    if packed is w:
        remember(x, packed, bias, out_dtype, to, precision)
    return compute(x, packed, bias, to)


def grouped_linear(
    x: Array, w: Packed | Weight, counts: Sequence[int] | Array, bias: Array | None = None, *, out_dtype: Any = None
) -> Array:
    """Apply each expert's weight to its own tokens: ``y[e] = x[e] @ dequantize(w[e]).T + bias[e]``.

    Args:
        x: (T, K) float32, bfloat16 or float16; the tokens of expert 0 come first, then those of expert 1, and so on.
        w: (E, N, K).
        counts: for each of the E experts how many tokens are its own, 0 too; they add up to T. A tensor of int32 or
            int64 on the GPU of x is not looked at there: a CUDA graph may hold the call, and rows of the result
            beyond their sum are not written.
        bias: (E, N) float32, bfloat16 or float16.
        out_dtype: of the result; by default x's.

    Returns:
        (T, N); each expert's rows are those of ``linear``, bit for bit where the kernel ``grouped-loop`` runs.

    Raises:
        UsageError: counts, axes or arrays that do not fit each other.
        NoKernelError: as ``linear``.
    """
    packed = as_packed(w)
    if len(packed.shape) != 3:
        raise UsageError("grouped_linear needs one expert axis", got=packed.shape, expected="(E, N, K)")
    experts, n, _ = packed.shape
    check_float(x, "x")
    check_beside(scale_of(packed), "the weight", x)
    own = _counted(counts, packed, x)
    if bias is not None:
        check_float(bias, "bias")
        check_beside(bias, "bias", x)
        if tuple(bias.shape) != (experts, n):
            raise UsageError("bias does not fit the experts", got=tuple(bias.shape), expected=(experts, n))
    to = dtype_name(x.dtype) if out_dtype is None else checked_dtype(out_dtype, "out_dtype")

    def computed(x: Array) -> Array:
        x, out = contiguous(x), empty((x.shape[0], n), to, x)
        of_bias = None if bias is None else (id(bias), bias.dtype)
        key = "grouped", x.shape, x.dtype, own.dtype, of_bias, to, forced_name()
        known = packed.memo.get(key)
        if known is not None and known[0]():
            known[1](x, own, out)
            return out
        added = None if bias is None else contiguous(bias)
        args = GroupedArgs(x=x, counts=own, weight=packed, bias=added, out=out)
        kernel = select(GroupedArgs, args.call())
        if not (prod(out.shape) and experts):
            return out
        if kernel.bind is None:
            kernel.run(args)
            return out
        run = kernel.bind(args)
        run(*args.arrays())
        tensors = [*packed.buffers().values(), *([] if bias is None else [bias])]
        keep(packed.memo, key, (watched_weakly(tensors), run, added))  # which the kernel knows by its address
        return out

    if is_torch(x) and wants_gradient(x, bias):
        return without_gradient()(x, bias, computed)
    return computed(x)


def _counted(counts: Any, weight: Packed, x: Array) -> Array:
    """The counts of ``grouped_linear`` as kernels take them."""
    experts, _, k = weight.shape
    there = is_torch(counts) and counts.is_cuda
    sizes = list(counts.shape) if there else [int(count) for count in counts]
    fit = sizes == [experts] if there else len(sizes) == experts and min(sizes, default=0) >= 0
    if not fit or len(x.shape) != 2 or x.shape[1] != k or not (there or sum(sizes) == x.shape[0]):
        raise UsageError(
            "x and counts do not fit the experts",
            got=f"x {tuple(x.shape)}, counts {f'of shape {tuple(sizes)}' if there else sizes}",
            expected=f"(T, {k}) and {experts} counts that add up to T",
        )
    if not there:
        own = np.array(sizes, np.int64)
        return to_torch(own, x.device) if is_torch(x) else own
    check_beside(counts, "counts", x)
    if dtype_name(counts.dtype) not in ("int32", "int64"):
        raise UsageError("counts are no integers of 32 or 64 bits", got=dtype_name(counts.dtype))
    return contiguous(counts)


def compute(x: Array, packed: Packed, bias: Array | None, out_dtype: Any) -> Array:
    """``linear`` on arrays that fit each other."""
    lead = tuple(x.shape[:-1])
    n, k = packed.shape[-2:]
    rows = prod(lead)
    out = empty((rows, n), checked_dtype(out_dtype, "out_dtype"), x)
    args = LinearArgs(
        x=contiguous(x.reshape(rows, k)), weight=packed, bias=None if bias is None else contiguous(bias), out=out
    )
    kernel = select(LinearArgs, args.call())
    if not k:
        out[...] = 0 if bias is None else bias
    elif rows and n:
        kernel.run(args)
    return out.reshape(*lead, n)


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
