"""Weights to try kernels on, and whether what they compute is right: what ``halfbyte tune`` and benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.kernels import LinearArgs
from halfbyte.kernels.fp8 import quantized
from halfbyte.kinds import Fp8Weight
from halfbyte.layouts import Fragments, Packed, parse
from halfbyte.lossy import to_fp8
from halfbyte.numerics import BLOCK
from halfbyte.weight import Weight

STRIPES: Final = 160
STRIPE: Final = 8
"""Rows of the weight whose products are checked: so many runs of so many, the first and the last among them."""
GUARD: Final = 256
"""Elements before and after a result that no kernel may write."""
TILE: Final = 16
UNIT: Final = 64
"""n and k of a tile of the layout ``fragments``."""
E2M1: Final = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


class WrongResultError(HalfbyteError):
    """What a kernel wrote is no rounding of the product."""


class Weights:
    """Random codes and scales of a shape; what lies in several copies fills ``megabytes`` at least."""

    def __init__(self, n: int, k: int, megabytes: float, device: str, seed: int = 0) -> None:
        self.n, self.k, self.megabytes, self.device = n, k, megabytes, device
        random = torch.Generator(device).manual_seed(seed)

        def bytes_(low: int, high: int, *shape: int) -> Any:
            return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=random)

        scales, wide = bytes_(0x20, 0x58, n, k // 16), bytes_(0, 0x58, n, k // 16)
        scales = torch.where(bytes_(0, 50, n, k // 16) == 0, wide, scales)
        scale2 = torch.full((), 1.7e-3, device=device)
        self.weight = Weight(codes=bytes_(0, 256, n, k // 2), scales=scales, scale2=scale2)
        self.held: dict[str, list[Any]] = {}

    @cached_property
    def stripes(self) -> Any:
        """(rows,) i64: which rows are checked."""
        last = max(0, self.n - STRIPE)
        starts = {round(i * last / (STRIPES - 1)) for i in range(STRIPES)}
        rows = {start + j for start in starts for j in range(STRIPE) if start + j < self.n}
        return torch.tensor(sorted(rows), device=self.device)

    @cached_property
    def exact(self) -> Any:
        """(rows, K) f64: those rows, decoded without halfbyte."""
        codes, scales = self.weight.codes[self.stripes], self.weight.scales[self.stripes]
        values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=self.device)
        decoded = values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
        factors = scales.view(torch.float8_e4m3fn).double() * self.weight.scale2.double()
        return decoded * factors.repeat_interleave(16, dim=-1)

    def copies(self, name: str, make: Callable[[], Any], nbytes: float, clone: Callable[[Any], Any]) -> list[Any]:
        """What ``make`` gives, and clones, two at least."""
        if name not in self.held:
            first = make()
            count = max(2, -(-int(self.megabytes * 1e6) // int(nbytes)))
            self.held[name] = [first, *(clone(first) for _ in range(count - 1))]
        return self.held[name]

    @cached_property
    def exact_fp8(self) -> Any:
        """(rows, K) f64: those rows as FP8 kernels have them, e4m3(code * scale / 6) * 6 * scale2."""
        factor = 6 * self.weight.scale2.double()
        return (self.exact / factor).float().to(torch.float8_e4m3fn).double() * factor

    def product(self, x: Any, op: str = LinearArgs.op) -> Any:
        """(M, rows) f64: the product of x and those rows, as an op has both."""
        if op == LinearArgs.op:
            return x.double() @ self.exact.T
        data, scale = quantized(x)
        return (data.view(torch.float8_e4m3fn).double() * scale.double()) @ self.exact_fp8.T

    def packed(self, layout: str) -> list[Packed]:
        """Copies in a layout."""
        return self.copies(layout, lambda: packed(self.weight, layout), 9 / 16 * self.n * self.k, _clone)

    def fp8(self) -> list[Fp8Weight]:
        """Copies of the FP8 twin."""

        def clone(twin: Fp8Weight) -> Fp8Weight:
            return Fp8Weight(data=twin.data.clone(), scale=twin.scale)

        return self.copies("to_fp8", lambda: to_fp8(self.weight), self.n * self.k, clone)

    def dense(self, dtype: str) -> list[Any]:
        """Copies of the values."""
        return self.copies(dtype, lambda: self.weight.dequantize(dtype), 2 * self.n * self.k, lambda w: w.clone())


def packed(weight: Weight, layout: str) -> Packed:
    """A weight in a layout; whole tiles of ``fragments`` as if each were an expert, so that all shapes share a move."""
    how, (n, k) = parse(layout), weight.shape
    if not isinstance(how, Fragments) or k % UNIT or weight.per_row:
        return how.pack(weight)
    count = -(-n // TILE) * TILE

    def tiles(bytes_: Any, width: int) -> Any:
        whole = torch.nn.functional.pad(bytes_, (0, 0, 0, count - n))
        grid = whole.reshape(count // TILE, TILE, k // UNIT, width).transpose(1, 2)
        return grid.reshape(-1, TILE, width)

    codes, scales = tiles(weight.codes, UNIT // 2), tiles(weight.scales, UNIT // BLOCK)
    apart = how.pack(Weight(codes=codes, scales=scales, scale2=torch.ones(len(codes), device=codes.device))).buffers()
    return Packed(how, (n, k), {name: apart[name].reshape(-1) for name in how.buffers} | {"scale2": weight.scale2})


def _clone(packed: Packed) -> Packed:
    buffers = {name: buffer.clone() for name, buffer in packed.buffers().items()}
    return Packed.from_buffers(packed.layout, packed.shape, buffers)


class Result:
    """(M, N) to be written, between guards; all of it is NaN before."""

    def __init__(self, rows: int, n: int, dtype: str, device: str) -> None:
        self.memory = torch.empty(rows * n + 2 * GUARD, dtype=getattr(torch, dtype), device=device)
        self.rows, self.size = rows, 0
        self.view(n)

    def view(self, n: int) -> Any:
        """Its first elements as (M, N)."""
        self.size = self.rows * n
        return self.memory[GUARD : GUARD + self.size].view(self.rows, n)

    def poison(self) -> None:
        """Write NaN all over it."""
        self.memory.fill_(float("nan"))

    def whole(self) -> bool:
        """Whether nothing beside the view was written."""
        return bool(self.memory[:GUARD].isnan().all() and self.memory[GUARD + self.size :].isnan().all())

    def errors(self, rows: Any, expected: Any) -> tuple[float, float]:
        """The squares of the norms of the error of some columns of the view, and of what is expected there.

        Raises:
            WrongResultError: something of the view was not written, or something beside it was.
        """
        out = self.memory[GUARD : GUARD + self.size].view(self.rows, -1)
        if bool(out.isnan().any()):
            raise WrongResultError("wrong: some elements were not written, or are NaN")
        if not self.whole():
            raise WrongResultError("wrong: it wrote outside of its result")
        wrong = float((out[:, rows].double() - expected).square().sum())
        return wrong, float(expected.square().sum())
