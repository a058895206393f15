"""``dense`` on a CPU for few tokens, compiled by Numba: a weight is read as it lies, by the threads of ``linear``.

Torch's own threads, which would otherwise wait for work beside those, stay asleep between two tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from halfbyte import jit
from halfbyte.kernels.base import Kernel, why_not_torch
from halfbyte.kernels.dense import DenseArgs, DenseCall, dense_cost
from halfbyte.kernels.step import DTYPES

MOST_ROWS: Final = 4


@functools.cache
def _code() -> Any:
    from halfbyte.kernels.cpu.dense_code import product

    return product


def _bind(args: DenseArgs) -> Callable[..., None]:
    call = args.call()
    kind, code = DTYPES.index(call.dtype), _code()
    sizes = call.rows, *call.shape

    def run(x: Any, weight: Any, bias: Any, out: Any) -> None:
        added = 0 if bias is None else bias.data_ptr()
        jit.run(code, kind, *sizes, x.data_ptr(), weight.data_ptr(), added, out.data_ptr())

    return run


def _refuse(call: DenseCall) -> tuple[str, ...]:
    if call.device != "cpu":
        return (f"runs on the CPU, not on {call.device}",)
    reasons = [*why_not_torch(call.library)]
    if call.rows > MOST_ROWS:
        reasons.append(f"takes up to {MOST_ROWS} tokens, not {call.rows}")
    missing = jit.missing()
    if missing:
        reasons.append(missing)
    return tuple(reasons)


DENSE: Final = Kernel(
    name="dense-cpu",
    bundle=DenseArgs,
    description="compiled for this processor, up to 4 tokens",
    refuse=_refuse,
    load=lambda call: _code(),
    bind=_bind,
    cost=dense_cost,
)
