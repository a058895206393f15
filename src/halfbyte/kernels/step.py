"""What a decoder does to each token between its products: what kernels are given, and what decides.

::

    add_norm   sum = round(x + residual), normed = round(weight * round(sum / sqrt(mean(sum * sum) + eps)))
    attend     rotates q and k, writes k and v at positions[b], and attends to the entries that the query sees
    gate       round(activation(gate) * up)

They round as transformers does in ``add_norm``, and otherwise once: what is computed between is float32. Tensors are
torch's and have no gaps; a row does not depend on the others. A kernel's ``bind`` gives a function of ``arrays()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from halfbyte.arrays import dtype_name, float_dtype
from halfbyte.errors import UsageError
from halfbyte.kernels.base import Cost, Library, capability_of, device_of, library_of
from halfbyte.kernels.in_order import shape_of
from halfbyte.numerics import Array, is_torch

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "relu2")
DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """What decides which kernel runs, of all these ops.

    Args:
        op: "add_norm", "attend", "gate", "dense" or "pick".
        rows: M, or B.
        dtype: of the activations.
        device: "cpu", "cuda", ...
        library: that of all arrays.
        capability: the compute capability of the GPU, 90 for sm_90; 0 elsewhere.
        in_order: the result lies as ``halfbyte.kernels.in_order`` has it.
        elsewhere: it is planned for another machine: what is installed here does not matter.
    """

    op: str
    rows: int
    dtype: str
    device: str
    library: Library
    capability: int = 0
    in_order: bool = False
    elsewhere: bool = False
    aligned: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def __str__(self) -> str:
        place = f"{self.device} (sm_{self.capability})" if self.capability else self.device
        return f"{self.op} of {self.rows} rows, {self.dtype}, {self.library} on {place}"


@dataclass(frozen=True, kw_only=True)
class AddNormCall(StepCall):
    """As StepCall; width is H."""

    op: str = "add_norm"
    width: int
    residual: bool


@dataclass(frozen=True, kw_only=True)
class GateCall(StepCall):
    """As StepCall; width is I."""

    op: str = "gate"
    width: int
    activation: str


@dataclass(frozen=True, kw_only=True)
class AttendCall(StepCall):
    """As StepCall; of Hq query heads and Hkv key heads of D, and a cache with room for T entries."""

    op: str = "attend"
    heads: int
    kv_heads: int
    dim: int
    room: int
    q_norm: bool
    k_norm: bool
    window: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class AddNormArgs:
    """The arguments of a kernel for ``add_norm``.

    Args:
        x: (M, H) float32, bfloat16 or float16, as all but ``eps``.
        residual: (M, H), or None for zeros.
        weight: (H,).
        eps: added to the mean.
        normed: (M, H); or (``length(H)``,), to lie in order. Written.
        total: (M, H); written, but where ``residual`` is None: there the sum is x.
    """

    op: ClassVar[str] = "add_norm"
    x: Array
    residual: Array | None
    weight: Array
    eps: float
    normed: Array
    total: Array

    def __post_init__(self) -> None:
        shape = check_axes(self.x, "x", 2)
        residual = {} if self.residual is None else {"residual": shape}
        normed = shape_of(self.normed, *shape)
        _check(self, self.x, residual | {"x": shape, "weight": shape[1:], "normed": normed, "total": shape})

    def arrays(self) -> tuple[Any, ...]:
        """What a bound kernel takes."""
        return self.x, self.residual, self.weight, self.eps, self.normed, self.total

    def call(self) -> AddNormCall:
        """What decides which kernel runs on these arrays."""
        rows, width = self.x.shape
        return AddNormCall(
            width=width,
            residual=self.residual is not None,
            in_order=len(self.normed.shape) == 1,
            **place_of(self.x, rows),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class GateArgs:
    """The arguments of a kernel for ``gate``.

    Args:
        gate_up: (M, 2 I) float32, bfloat16 or float16; gate, then up.
        activation: one of ``ACTIVATIONS``.
        out: (M, I) of the same dtype; written.
    """

    op: ClassVar[str] = "gate"
    gate_up: Array
    activation: str
    out: Array

    def __post_init__(self) -> None:
        m, width = check_axes(self.gate_up, "gate_up", 2)
        if width % 2:
            raise UsageError("gate_up has no two halves", got=(m, width), expected="(M, 2 I)")
        if self.activation not in ACTIVATIONS:
            raise UsageError("unknown activation", got=repr(self.activation), expected=" or ".join(ACTIVATIONS))
        _check(self, self.gate_up, {"gate_up": (m, width), "out": (m, width // 2)})

    def arrays(self) -> tuple[Any, ...]:
        """What a bound kernel takes."""
        return self.gate_up, self.out

    def call(self) -> GateCall:
        """What decides which kernel runs on these arrays."""
        rows, width = self.gate_up.shape
        return GateCall(width=width // 2, activation=self.activation, **place_of(self.gate_up, rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class AttendArgs:
    """The arguments of a kernel for ``attend``: one new token of each of B sequences.

    ::

        q, k = rotated(norm(q)), rotated(norm(k))    rotated(x) = x * cos + (-x2, x1) * sin, of halves x1, x2
        out[b, h] = softmax(scale * q[b, h] @ K.T) @ V

    K and V are the entries 0 to p of the key head ``h // (Hq / Hkv)``, where p is ``positions[b]``, and of those the
    last ``window``; entry p is the new k and v. On a GPU a p that is not within 0..T-1 gives a row of NaN and writes
    nothing; on the CPU it is an error.

    Args:
        qkv: (B, (Hq + 2 Hkv) D) float32, bfloat16 or float16, as all but the next three: q, then k, then v.
        cos: (T or more, D) float32.
        sin: (T or more, D) float32.
        positions: (B,) int64.
        keys: (B, Hkv, T, D); entry positions[b] is written.
        values: the same.
        q_norm: (D,), the weight of a norm of each head of q before it is rotated, as in ``add_norm``; or None.
        k_norm: the same of k.
        eps: of both norms.
        scale: of the scores.
        window: entries that are seen at the most; None for all.
        settled: positions, cos, sin and the entries before the new ones were written by a kernel on whose end some
            kernel waited that was launched in the ordinary way and before the one ahead of this; where that may be
            false, a GPU must not read them before the kernel ahead has ended.
        out: (B, Hq D); or (``length(Hq D)``,), to lie in order. Written.
    """

    op: ClassVar[str] = "attend"
    qkv: Array
    cos: Array
    sin: Array
    positions: Array
    keys: Array
    values: Array
    q_norm: Array | None
    k_norm: Array | None
    eps: float
    scale: float
    window: int | None
    settled: bool
    out: Array

    def __post_init__(self) -> None:
        b, width = check_axes(self.qkv, "qkv", 2)
        cache = check_axes(self.keys, "keys", 4)
        kv, room, dim = cache[1:]
        heads = width // dim - 2 * kv if dim else 0
        if cache[0] != b or not dim or dim % 2 or width % dim or heads < 1 or not kv or heads % kv:
            raise UsageError(
                "the cache does not fit qkv", got=f"keys {cache} and qkv {(b, width)}",
                expected="(B, Hkv, T, D) and (B, (Hq + 2 Hkv) D), D even and Hq a multiple of Hkv",
            )  # fmt: skip
        needed = {"qkv": (b, width), "keys": cache, "values": cache, "out": shape_of(self.out, b, heads * dim)}
        norms = {name: (dim,) for name in ("q_norm", "k_norm") if getattr(self, name) is not None}
        _check(self, self.qkv, needed | norms)
        for name in ("cos", "sin"):
            _check(self, self.qkv, {name: (max(room, self.cos.shape[0]), dim)}, "float32")
        _check(self, self.qkv, {"positions": (b,)}, "int64")
        if self.window is not None and self.window < 1:
            raise UsageError("a window has entries", got=self.window, expected="1 or more, or None")

    def arrays(self) -> tuple[Any, ...]:
        """What a bound kernel takes."""
        return (
            self.qkv, self.cos, self.sin, self.positions, self.keys, self.values, self.q_norm, self.k_norm,
            self.eps, self.scale, self.out,
        )  # fmt: skip

    def call(self) -> AttendCall:
        """What decides which kernel runs on these arrays."""
        b, kv, room, dim = self.keys.shape
        return AttendCall(
            heads=self.qkv.shape[1] // dim - 2 * kv,
            kv_heads=kv,
            dim=dim,
            room=room,
            q_norm=self.q_norm is not None,
            k_norm=self.k_norm is not None,
            window=self.window,
            in_order=len(self.out.shape) == 1,
            **place_of(self.qkv, b),
        )


def why_in_rows(call: StepCall) -> tuple[str, ...]:
    """Why what writes rows declines a call."""
    return ("writes rows, and not in the order of gluon-decode's lanes",) if call.in_order else ()


def check_axes(a: Array, name: str, axes: int) -> tuple[int, ...]:
    """The shape; UsageError where there are other axes."""
    if len(a.shape) != axes:
        raise UsageError(f"{name} has other axes", got=tuple(a.shape), expected=f"{axes} of them")
    return tuple(a.shape)


def check(op: str, name: str, a: Array, like: Array, shape: tuple[int, ...], dtype: str | None = None) -> None:
    """UsageError where an array of an op is of another shape, of another dtype, or on another device than ``like``."""
    wanted = dtype_name(like.dtype) if dtype is None else dtype
    if dtype is None and wanted not in DTYPES:
        raise UsageError(f"{op} takes floats", got=wanted, expected=" or ".join(DTYPES))
    if tuple(a.shape) != shape:
        raise UsageError(f"{name} does not fit {op}", got=tuple(a.shape), expected=shape)
    if dtype_name(a.dtype) != wanted:
        raise UsageError(f"{name} does not fit {op}", got=dtype_name(a.dtype), expected=wanted)
    if getattr(a, "device", None) != getattr(like, "device", None):
        raise UsageError(f"{name} is on another device", got=str(a.device), expected=str(like.device))
    if is_torch(a) and not a.is_contiguous():
        raise UsageError(f"{name} has gaps", got=f"strides {a.stride()}", hint="make it contiguous")


def _check(args: Any, like: Array, shapes: dict[str, tuple[int, ...]], dtype: str | None = None) -> None:
    for name, shape in shapes.items():
        check(args.op, name, getattr(args, name), like, shape, dtype)


def place_of(a: Array, rows: int) -> dict[str, Any]:
    """What a StepCall has beside its op."""
    return {
        "rows": rows,
        "dtype": dtype_name(a.dtype),
        "device": device_of(a),
        "library": library_of(a),
        "capability": capability_of(a),
    }


def add_norm_cost(call: AddNormCall) -> Cost:
    """Rows read and written once, and the weight."""
    size = float_dtype(call.dtype).itemsize
    rows = (4 if call.residual else 2) * call.rows
    return Cost(bytes=(rows + 1) * call.width * size, flops=5 * call.rows * call.width)


def gate_cost(call: GateCall) -> Cost:
    """Rows read and written once."""
    return Cost(bytes=3 * call.rows * call.width * float_dtype(call.dtype).itemsize, flops=4 * call.rows * call.width)


def attend_cost(call: AttendCall) -> Cost:
    """Of full caches: positions are not known."""
    seen = call.room if call.window is None else min(call.room, call.window)
    size = float_dtype(call.dtype).itemsize
    heads = 2 * call.heads + 2 * call.kv_heads
    rows = 2 * seen * call.kv_heads + heads
    return Cost(
        bytes=call.rows * (rows * call.dim * size + 8 * call.dim + 8),
        flops=4 * call.rows * call.heads * call.dim * seen,
    )
