"""``chain``, all of a decoder layer between two attentions: what kernels are given, and the one that calls others.

::

    s1  = round(residual + o(attended))
    g   = gate(gate_up(add_norm(s1, norm1)))
    s2  = round(s1 + down(g))
    qkv = qkv_next(add_norm(s2, norm2))

Each product is rounded once to the dtype, with its bias, before anything is added: as ``linear``, ``add_norm`` and
``gated`` one after the other, which is how the kernel here computes it. Tensors are torch's; a row does not depend on
the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from halfbyte.arrays import float_dtype
from halfbyte.errors import UsageError
from halfbyte.kernels.base import Call, Cost, Kernel, LinearArgs, check_kind, linear_cost, load_torch, why_not_torch
from halfbyte.kernels.gated import GatedArgs
from halfbyte.kernels.step import ACTIVATIONS, AddNormArgs, StepCall, check, check_axes, place_of
from halfbyte.layouts import Packed
from halfbyte.numerics import Array

PARTS: Final = ("o", "gate_up", "down", "qkv")
"""The products, in order; the last may be absent."""


@dataclass(frozen=True, kw_only=True)
class ChainCall(StepCall):
    """As StepCall; with the linear call of each product, and what is done between.

    Args:
        activation: one of ``ACTIVATIONS``.
        products: of o, gate_up, down and, but behind the last layer, qkv.
    """

    op: str = "chain"
    activation: str
    products: tuple[Call, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainArgs:
    """The arguments of a kernel for ``chain``.

    Args:
        residual: (M, H) float32, bfloat16 or float16, as all arrays but biases.
        attended: (M, A).
        weights: o (H, A), gate_up (2 I, H) with the rows of the gate before those of up, down (H, I) and, where what
            comes behind is another layer, its qkv (N, H).
        biases: of each of the weights, (its N,) float32, bfloat16 or float16, or None.
        norms: (H,) of what comes ahead of gate_up, and of what comes ahead of qkv.
        eps: of each of the norms.
        activation: one of ``ACTIVATIONS``.
        total: (M, H), s2; written.
        qkv: (M, N); written. None without such a weight.
    """

    op: ClassVar[str] = "chain"
    residual: Array
    attended: Array
    weights: tuple[Packed, ...]
    biases: tuple[Array | None, ...]
    norms: tuple[Array, ...]
    eps: tuple[float, ...]
    activation: str
    total: Array
    qkv: Array | None

    def __post_init__(self) -> None:
        m, h = check_axes(self.residual, "residual", 2)
        count = 3 if self.qkv is None else 4
        lengths = len(self.weights), len(self.biases), len(self.norms), len(self.eps)
        if lengths != (count, count, count - 2, count - 2):
            raise UsageError(
                "weights, biases, norms and eps are of another number", got=lengths,
                expected=(count, count, count - 2, count - 2),
            )  # fmt: skip
        if self.activation not in ACTIVATIONS:
            raise UsageError("unknown activation", got=repr(self.activation), expected=" or ".join(ACTIVATIONS))
        for weight in self.weights:
            check_kind(weight.layout)
        k, inner = check_axes(self.attended, "attended", 2)[1], int(self.weights[2].shape[-1])
        shapes = [(h, k), (2 * inner, h), (h, inner), (self.weights[-1].shape[0], h)]
        for name, weight, bias, shape in zip(PARTS, self.weights, self.biases, shapes, strict=False):
            if tuple(weight.shape) != shape:
                raise UsageError(f"{name} does not fit chain", got=tuple(weight.shape), expected=shape)
            if bias is not None and tuple(bias.shape) != shape[:1]:
                raise UsageError(f"the bias of {name} does not fit it", got=tuple(bias.shape), expected=shape[:1])
        arrays = {"attended": (self.attended, (m, k)), "total": (self.total, (m, h))}
        if self.qkv is not None:
            arrays["qkv"] = self.qkv, (m, shapes[3][0])
        for name, (array, shape) in arrays.items():
            check(self.op, name, array, self.residual, shape)
        for i, norm in enumerate(self.norms):
            check(self.op, f"norm {i}", norm, self.residual, (h,))

    def call(self) -> ChainCall:
        """What decides which kernel runs on these arrays."""
        place = place_of(self.residual, self.residual.shape[0])
        of = {name: place[name] for name in ("rows", "dtype", "device", "library", "capability")}
        products = tuple(
            Call.on(weight, out_dtype=place["dtype"], bias=bias is not None, **of)
            for weight, bias in zip(self.weights, self.biases, strict=True)
        )
        return ChainCall(activation=self.activation, products=products, **place)


def chain_cost(call: ChainCall) -> Cost:
    """Weights, inputs and results once each; what is between stays in caches."""
    costs = [linear_cost(product) for product in call.products]
    size = float_dtype(call.dtype).itemsize
    between = sum(sum(product.shape) for product in call.products[1:]) - call.products[2].shape[0]
    return Cost(
        bytes=sum(cost.bytes for cost in costs) - call.rows * size * between,
        flops=sum(cost.flops for cost in costs),
    )


def _launch(args: ChainArgs) -> None:
    import torch

    total, x = args.residual, args.attended
    for i in range(len(args.norms) + 1):
        y = _linear(x, args.weights[2 * i], args.biases[2 * i])
        if i == len(args.norms):
            torch.add(total, y, out=args.total)
            return
        before, total = total, args.total if i else torch.empty_like(total)
        normed = torch.empty_like(total)
        norm = {"weight": args.norms[i], "eps": args.eps[i]}
        _run(AddNormArgs(x=y, residual=before, normed=normed, total=total, **norm))
        if i:
            _linear(normed, args.weights[3], args.biases[3], args.qkv)
            return
        x = x.new_empty((len(x), args.weights[1].shape[0] // 2))
        _product(GatedArgs, normed, args.weights[1], args.biases[1], x, activation=args.activation)


def _run(args: AddNormArgs) -> None:
    from halfbyte.kernels import select

    select(AddNormArgs, args.call()).run(args)


def _linear(x: Any, weight: Packed, bias: Any, out: Any = None) -> Any:
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    return _product(LinearArgs, x, weight, bias, out)


def _product(bundle: Any, x: Any, weight: Packed, bias: Any, out: Any, **more: Any) -> Any:
    """``linear`` or ``gated``; what it comes down to is kept with the weight while the buffers are the same."""
    from halfbyte.kernels import forced, select

    buffers = weight.buffers().values()
    state = tuple((b.data_ptr(), 0 if b.is_inference() else b._version) for b in buffers)
    how = None if bias is None else bias.dtype, *more.values(), forced(LinearArgs.op), forced(bundle.op)
    key = "chain", bundle.op, x.shape, x.dtype, x.device, *how
    known = weight.memo.get(key)
    if known is None or known[0] != state:
        args = bundle(x=x, weight=weight, bias=bias, out=out, **more)
        kernel: Any = select(bundle, args.call())
        if kernel.bind is None:
            kernel.run(args)
            return out
        known = weight.memo[key] = state, kernel.bind(args)
    known[1](x, bias, out)
    return out


TORCH: Final = Kernel(
    name="chain-composed",
    bundle=ChainArgs,
    description="linear, add_norm and gated one after the other",
    refuse=lambda call: why_not_torch(call.library),
    load=load_torch,
    launch=_launch,
    cost=chain_cost,
)
