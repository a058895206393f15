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
    why_in_rows,
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


def _bind_add_norm(args: AddNormArgs) -> Callable[..., None]:
    (m, h), kind, code = args.x.shape, _kind(args.x.dtype), _code().add_norm

    def run(x: Any, residual: Any, weight: Any, eps: float, normed: Any, total: Any) -> None:
        added, to = (0, 0) if residual is None else (residual.data_ptr(), total.data_ptr())
        code(kind, m, h, x.data_ptr(), added, weight.data_ptr(), eps, normed.data_ptr(), to)

    return run


def _bind_gate(args: GateArgs) -> Callable[..., None]:
    (m, width), kind, code = args.out.shape, _kind(args.out.dtype), _code().gate
    activation = ACTIVATIONS.index(args.activation)

    def run(gate_up: Any, out: Any) -> None:
        code(kind, m, width, activation, gate_up.data_ptr(), out.data_ptr())

    return run


def _bind_attend(args: AttendArgs) -> Callable[..., None]:
    b, kv, room, dim = args.keys.shape
    kind, sizes, window = _kind(args.keys.dtype), (args.out.shape[1] // dim, kv, dim, room), args.window or 0
    row, code = kv * dim * args.keys.element_size(), _code()

    def run(
        qkv: Any, cos: Any, sin: Any, positions: Any, keys: Any, values: Any, q_norm: Any, k_norm: Any, eps: float,
        scale: float, out: Any,
    ) -> None:  # fmt: skip
        places = positions.tolist()
        if not 0 <= min(places) <= max(places) < room:
            raise UsageError("positions are outside of the cache", got=places, expected=f"0..{room - 1}")
        given = (
            kind, b, sizes, qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), keys.data_ptr(),
            values.data_ptr(), _address(q_norm), _address(k_norm), _float(eps), _float(scale), window, out.data_ptr(),
        )  # fmt: skip
        seen = sum(min(p + 1, window) for p in places) if window else sum(places) + b
        if b * kv > 1 and seen * row >= _PARALLEL:
            jit.run(code.attend_parallel, *given)
        else:
            code.attend(*given)

    return run


@functools.lru_cache(64)
def _float(number: float) -> Any:
    import numpy as np

    return np.float32(number)


def _refuse(call: StepCall) -> tuple[str, ...]:
    reasons = [*why_not_torch(call.library), *why_in_rows(call)]
    if call.device != "cpu":
        reasons.append(f"runs on the CPU, not on {call.device}")
    missing = jit.missing()
    if missing:
        reasons.append(missing)
    return tuple(reasons)


def _kernel(bundle: Any, bind: Callable[[Any], Callable[..., None]], cost: Any) -> Kernel[Any, Any]:
    return Kernel(
        name=f"{bundle.op.replace('_', '-')}-cpu",
        bundle=bundle,
        description="compiled for this processor",
        refuse=_refuse,
        load=lambda call: _code(),
        bind=bind,
        cost=cost,
    )


ADD_NORM: Final = _kernel(AddNormArgs, _bind_add_norm, add_norm_cost)
GATE: Final = _kernel(GateArgs, _bind_gate, gate_cost)
ATTEND: Final = _kernel(AttendArgs, _bind_attend, attend_cost)
