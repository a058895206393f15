"""``add_norm``, ``gate`` and ``attend`` on a CPU, compiled by Numba: one call each, where torch needs some twenty.

They round as ``halfbyte.kernels.step`` says. ``attend`` takes each key head of a sequence on one thread, and threads
only where there is enough to read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from halfbyte import jit
from halfbyte.errors import UsageError
from halfbyte.kernels.base import Kernel, why_not_torch
from halfbyte.kernels.step import (
    ACTIVATIONS,
    DTYPES,
    AddNormArgs,
    AttendArgs,
    GateArgs,
    StepCall,
    add_norm_cost,
    attend_cost,
    gate_cost,
)

_PARALLEL: Final = 1 << 19
"""Bytes of keys from which on threads pay."""


@functools.cache
def _code() -> Any:
    from halfbyte.kernels.cpu import step_code

    return step_code


@functools.cache
def _kind(dtype: Any) -> int:
    return DTYPES.index(str(dtype).removeprefix("torch."))


def _address(a: Any) -> int:
    return 0 if a is None else int(a.data_ptr())


def _add_norm(args: AddNormArgs) -> None:
    x = args.x
    m, h = x.shape
    total = 0 if args.residual is None else args.total.data_ptr()
    _code().add_norm(
        _kind(x.dtype), m, h, x.data_ptr(), _address(args.residual), args.weight.data_ptr(), args.eps,
        args.normed.data_ptr(), total,
    )  # fmt: skip


def _gate(args: GateArgs) -> None:
    m, width = args.out.shape
    activation = ACTIVATIONS.index(args.activation)
    _code().gate(_kind(args.out.dtype), m, width, activation, args.gate_up.data_ptr(), args.out.data_ptr())


def _attend(args: AttendArgs) -> None:
    keys = args.keys
    b, kv, room, dim = keys.shape
    places = args.positions.tolist()
    if not all(0 <= p < room for p in places):
        raise UsageError("positions are outside of the cache", got=places, expected=f"0..{room - 1}")
    given = (
        _kind(keys.dtype), b, (args.out.shape[1] // dim, kv, dim, room), args.qkv.data_ptr(), args.cos.data_ptr(),
        args.sin.data_ptr(), args.positions.data_ptr(), keys.data_ptr(), args.values.data_ptr(), _address(args.q_norm),
        _address(args.k_norm), _float(args.eps), _float(args.scale), args.window or 0, args.out.data_ptr(),
    )  # fmt: skip
    seen = sum(places) + b if args.window is None else sum(min(p + 1, args.window) for p in places)
    if b * kv > 1 and seen * kv * dim * keys.element_size() >= _PARALLEL:
        jit.run(_code().attend_parallel, *given)
    else:
        _code().attend(*given)


@functools.lru_cache(64)
def _float(number: float) -> Any:
    import numpy as np

    return np.float32(number)


def _refuse(call: StepCall) -> tuple[str, ...]:
    reasons = [*why_not_torch(call.library)]
    if call.device != "cpu":
        reasons.append(f"runs on the CPU, not on {call.device}")
    missing = jit.missing()
    if missing:
        reasons.append(missing)
    return tuple(reasons)


def _kernel(bundle: Any, launch: Callable[[Any], None], cost: Any) -> Kernel[Any, Any]:
    return Kernel(
        name=f"{bundle.op.replace('_', '-')}-cpu",
        bundle=bundle,
        description="compiled for this processor",
        refuse=_refuse,
        load=lambda call: _code(),
        launch=launch,
        cost=cost,
    )


ADD_NORM: Final = _kernel(AddNormArgs, _add_norm, add_norm_cost)
GATE: Final = _kernel(GateArgs, _gate, gate_cost)
ATTEND: Final = _kernel(AttendArgs, _attend, attend_cost)
