"""``grouped``, each expert's product with its own tokens: what kernels are given, and the one that calls ``linear``.

::

    out[t] = round(x[t] @ weight[e].T + bias[e])      e: the expert whose run of tokens has t

The tokens of expert 0 come first, then those of expert 1. On a GPU the counts lie there, and nothing waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from halfbyte.arrays import dtype_name
from halfbyte.errors import NoKernelError, UsageError
from halfbyte.kernels.base import (
    Call,
    Cost,
    Kernel,
    LinearArgs,
    capability_of,
    check_kind,
    device_of,
    library_of,
    linear_cost,
    load_torch,
)
from halfbyte.layouts import Packed
from halfbyte.numerics import Array


@dataclass(frozen=True, kw_only=True)
class GroupedCall(Call):
    """As Call, of a weight (E, N, K); M are the tokens of all experts.

    Args:
        counts: the dtype of the counts, "int32" or "int64".
    """

    op: str = "grouped"
    counts: str

    def linear(self) -> Call:
        """The product of one expert with all tokens."""
        return Call(
            **{field.name: getattr(self, field.name) for field in fields(Call)}
            | {"op": "linear", "shape": self.shape[1:]}
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedArgs:
    """The arguments of a kernel for ``grouped``. What its ``bind`` gives takes x, counts and out.

    Args:
        x: (T, K) float32, bfloat16 or float16, row-major.
        counts: (E,) int32 or int64, of 0 or more, that add up to T; beside x.
        weight: (E, N, K).
        bias: (E, N) floats, or None.
        out: (T, N); written.
    """

    op: ClassVar[str] = "grouped"
    x: Array
    counts: Array
    weight: Packed
    bias: Array | None
    out: Array

    def __post_init__(self) -> None:
        check_kind(self.weight.layout)
        if len(self.weight.shape) != 3:
            raise UsageError("grouped products need one expert axis", got=self.weight.shape, expected="(E, N, K)")
        experts, n, k = self.weight.shape
        rows = self.x.shape[0]
        for name, shape in (("x", (rows, k)), ("counts", (experts,)), ("bias", (experts, n)), ("out", (rows, n))):
            array = getattr(self, name)
            if array is not None and tuple(array.shape) != shape:
                raise UsageError(f"{name} does not fit grouped products", got=tuple(array.shape), expected=shape)

    def arrays(self) -> tuple[Any, ...]:
        """What a bound kernel takes."""
        return self.x, self.counts, self.out

    def call(self) -> GroupedCall:
        """What decides which kernel runs on these arrays."""
        one = Call.on(
            self.weight,
            rows=self.x.shape[0],
            dtype=dtype_name(self.x.dtype),
            out_dtype=dtype_name(self.out.dtype),
            device=device_of(self.x),
            library=library_of(self.x),
            bias=self.bias is not None,
            capability=capability_of(self.x),
        )
        return GroupedCall(**vars(one) | {"op": GroupedCall.op, "counts": dtype_name(self.counts.dtype)})


def expert_of(stack: Packed, e: int) -> Packed:
    """One expert of a stack; what kernels keep of it is kept with the stack."""
    own = stack.expert(e)
    own.memo = stack.memo.setdefault("experts", {}).setdefault(e, {})
    return own


def grouped_cost(call: GroupedCall) -> Cost:
    """The least that a call costs: all experts once, or as many as there are tokens, and the tokens."""
    experts = min(call.shape[0], call.rows)
    one = linear_cost(call.linear())
    weight = sum(call.layout.sizes(call.shape).values())
    return Cost(bytes=one.bytes + (experts - 1) * weight if experts else 0, flops=one.flops)


def _launch(args: GroupedArgs) -> None:
    from halfbyte.kernels import select

    start = 0
    for e, count in enumerate(args.counts.tolist()):
        rows, bias = slice(start, start + count), None if args.bias is None else args.bias[e]
        start += count
        if count and not args.x.shape[1]:
            args.out[rows] = 0 if bias is None else bias
        elif count:
            own = LinearArgs(x=args.x[rows], weight=expert_of(args.weight, e), bias=bias, out=args.out[rows])
            select(LinearArgs, own.call()).run(own)


def _refuse(call: GroupedCall) -> tuple[str, ...]:
    from halfbyte.kernels import select

    try:
        select(LinearArgs, call.linear())
    except NoKernelError as error:
        return (f"there is no kernel for its products: {str(error).rpartition('the nearest is ')[2]}",)
    return ()


def _load(call: GroupedCall) -> None:
    if call.library == "torch":
        load_torch(call)


LOOP: Final = Kernel(
    name="grouped-loop",
    bundle=GroupedArgs,
    description="linear for each expert, one after the other; any layout and device, and a GPU's host waits for counts",
    refuse=_refuse,
    load=_load,
    launch=_launch,
    cost=grouped_cost,
)
