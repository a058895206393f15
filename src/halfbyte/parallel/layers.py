"""Layers of which each rank holds a part, made of whole ones in their place.

A column-parallel layer stays of its class, with fewer rows; a row-parallel one, and one whose columns are gathered,
become of a class here, which exchanges.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from halfbyte import nn
from halfbyte.errors import UsageError
from halfbyte.layouts import Packed
from halfbyte.numerics import BLOCK
from halfbyte.parallel.copies import VALUES, Copies
from halfbyte.parallel.ranks import CHUNK, Ranks, even_share
from halfbyte.weight import Fp8Weight, Weight

Rows = list[tuple[int, int]]
"""Ranges of rows or columns, which lie one after the other in a rank's part."""


class Exchanging(torch.nn.Module):
    """What every layer here has: the ranks, and their columns or bias."""

    ranks: Ranks

    def weights(self) -> Any:
        """Refused: this rank holds a part of the weight."""
        raise UsageError("this layer is split over ranks, so it has no whole weight", got=str(self.ranks))


class _Summed(Exchanging):
    """A row-parallel layer: it has some columns of K, and the ranks' products are added, then the bias."""

    summed_bias: Tensor | None
    summed_dtype: torch.dtype | None
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        """(..., K of this rank) to (..., N), equal on all ranks."""
        to = x.dtype if self.summed_dtype is None else self.summed_dtype
        rows = x.numel() // max(x.shape[-1], 1)
        copies = self.ranks.copies(rows, self.out_features, to) if x.is_cuda else None
        if copies is not None:
            return self._in_chunks(x.reshape(rows, -1), to, copies).reshape(*x.shape[:-1], -1)
        return self.ranks.sum(super().forward(x).float(), self.summed_bias, to)

    def _in_chunks(self, x: Tensor, to: torch.dtype, copies: Copies) -> Tensor:
        """The same: some rows are sent while the next are multiplied, and added when all have come."""
        ranks, bias, n = self.ranks, self.summed_bias, self.out_features
        out = torch.empty(len(x), n, dtype=to, device=x.device)
        main: Any = torch.cuda.current_stream(x.device)
        side = ranks.side_stream()
        whole, chunk = len(x) // ranks.size * ranks.size, CHUNK // ranks.size * ranks.size
        most = VALUES // n // chunk * chunk
        for first in range(0, whole, most):
            parts: list[Tensor] = []
            last = min(first + most, whole)
            for start in range(first, last, chunk):
                parts.append(super().forward(x[start : min(start + chunk, last)]).float())
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    copies.send(parts[-1], (start - first) * n)
            main.wait_stream(side)
            copies.finish(parts, bias, out[first:last])
        if whole < len(x):
            out[whole:] = ranks.sum(super().forward(x[whole:]).float(), bias, to)
        return out


class _Gathered(Exchanging):
    """A column-parallel layer: it has some rows of N, and the ranks' results lie side by side."""

    gathered: int

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N of all ranks), equal on all ranks."""
        return self.ranks.gather(super().forward(x), self.gathered)


class RowLinear(_Summed, nn.Linear):
    """A row-parallel ``nn.Linear``: sums stay float32 until all are added."""


class RowFp8Linear(_Summed, nn.Fp8Linear):
    """A row-parallel ``nn.Fp8Linear``; with ``precision="fp8"`` each rank rounds its part of a token by itself."""


class RowDense(_Summed, torch.nn.Linear):
    """A row-parallel dense layer: each rank's part is rounded to the layer's dtype before they are added."""


class GatheredLinear(_Gathered, nn.Linear):
    """A column-parallel ``nn.Linear`` with all columns as its result."""


class GatheredFp8Linear(_Gathered, nn.Fp8Linear):
    """A column-parallel ``nn.Fp8Linear`` with all columns as its result."""


class GatheredDense(_Gathered, torch.nn.Linear):
    """A column-parallel dense layer with all columns as its result."""


_ROWS: Final[dict[type, type]] = {nn.Linear: RowLinear, nn.Fp8Linear: RowFp8Linear, torch.nn.Linear: RowDense}
_COLUMNS: Final[dict[type, type]] = {
    nn.Linear: GatheredLinear,
    nn.Fp8Linear: GatheredFp8Linear,
    torch.nn.Linear: GatheredDense,
}
SINGLE: Final = tuple(_ROWS)
"""Classes of layers that can be split."""


def summed(module: Any, ranks: Ranks) -> None:
    """Make a layer that has its rank's columns already add its result to those of the other ranks."""
    bias = module._parameters.pop("bias", None)
    module.__class__ = _ROWS[type(module)]
    module.ranks = ranks
    module.register_parameter("bias", None)
    module.register_parameter("summed_bias", bias)
    module.summed_dtype = getattr(module, "out_dtype", None)
    if not isinstance(module, torch.nn.Linear):
        module.out_dtype = torch.float32


def gathered(module: Any, ranks: Ranks, width: int) -> None:
    """Make a layer that has its rank's rows already gather the others' results."""
    module.__class__ = _COLUMNS[type(module)]
    module.ranks, module.gathered = ranks, width


def cut_rows(module: Any, rows: Rows) -> None:
    """Leave a layer some of its rows, in place."""
    if isinstance(module, torch.nn.Linear):
        _renew(module, torch.cat([module.weight[a:b] for a, b in rows]))
    elif isinstance(module, nn.Fp8Linear):
        _hold_fp8(module, fp8_rows(module.weight, rows))
    else:
        weight = module.weight()
        _hold(module, module.layout.pack(Weight.concat([weight.rows(a, b) for a, b in rows])))
        if isinstance(module, nn.Group):
            module.resize([b - a for a, b in rows])
    if module.bias is not None:
        module.bias = _parameter(torch.cat([module.bias[a:b] for a, b in rows]), module.bias)


def cut_part(part: nn.Part, rows: Rows) -> None:
    """Leave one layer of a group some of its rows, in place."""
    group, i = part.group, part.index
    whole: Any = group.packed.unpack()
    pieces = list(whole.split(group.sizes))
    own, start = pieces[i], group.starts[i]
    pieces[i] = Weight.concat([own.rows(a, b) for a, b in rows])
    _hold(group, group.layout.pack(Weight.concat(pieces)))
    if group.bias is not None:
        kept = [group.bias[:start], *(group.bias[start + a : start + b] for a, b in rows)]
        group.bias = _parameter(torch.cat([*kept, group.bias[start + own.n :]]), group.bias)
    group.resize([piece.n for piece in pieces])


def cut_columns(module: Any, ranks: Ranks) -> None:
    """Leave a layer its rank's columns, in place.

    Raises:
        UsageError: K does not split into equal parts of whole blocks.
    """
    k = module.in_features
    if isinstance(module, torch.nn.Linear):
        a, b = even_share(k, ranks.rank, ranks.size, 1, "K")
        _renew(module, module.weight[:, a:b])
    elif isinstance(module, nn.Fp8Linear):
        unit = module.block[1] if module.block else 1
        _hold_fp8(module, fp8_columns(module.weight, *even_share(k, ranks.rank, ranks.size, unit, "K")))
    else:
        a, b = even_share(k, ranks.rank, ranks.size, BLOCK, "K")
        _hold(module, module.layout.pack(module.weight().columns(a, b)))


def fp8_rows(weight: Fp8Weight, rows: Rows) -> Fp8Weight:
    """Some rows of an FP8 weight; UsageError where they cut a block of its scale."""
    scale, unit = weight.scale, weight.block[0] if weight.block else 1
    if any(a % unit or (b % unit and b != weight.shape[0]) for a, b in rows):
        raise UsageError(f"rows are cut at multiples of {unit}, where the scale's blocks end", got=rows)
    if scale.ndim == 2 and scale.shape[0] > 1:
        scale = torch.cat([scale[a // unit : -(-b // unit)] for a, b in rows])
    return _like(weight, torch.cat([weight.data[a:b] for a, b in rows]), scale, weight.pre_scale)


def fp8_columns(weight: Fp8Weight, a: int, b: int) -> Fp8Weight:
    """Columns a..b of an FP8 weight, with their part of its pre_scale."""
    scale, pre = weight.scale, weight.pre_scale
    if weight.block is not None:
        scale = scale[:, a // weight.block[1] : -(-b // weight.block[1])]
    return _like(weight, weight.data[:, a:b], scale, None if pre is None else pre[a:b])


def _like(weight: Fp8Weight, data: Any, scale: Any, pre_scale: Any) -> Fp8Weight:
    return Fp8Weight(data=data, scale=scale, block=weight.block, input_scale=weight.input_scale, pre_scale=pre_scale)


def _hold(module: Any, packed: Packed) -> None:
    """Give a module of ``halfbyte.nn`` another weight of its layout."""
    for name, buffer in packed.buffers().items():
        module._buffers[name] = buffer.contiguous()
    module.shape = packed.shape
    module.out_features, module.in_features = packed.shape
    module._packed = None


def _hold_fp8(module: Any, weight: Fp8Weight) -> None:
    for name in ("data", "scale", "input_scale", "pre_scale"):
        buffer = getattr(weight, name)
        module._buffers[name] = None if buffer is None else buffer.contiguous()
    module.out_features, module.in_features = module.shape = weight.shape


def _renew(module: torch.nn.Linear, weight: Tensor) -> None:
    module.weight = _parameter(weight, module.weight)
    module.out_features, module.in_features = weight.shape


def _parameter(tensor: Tensor, like: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().clone().contiguous(), requires_grad=like.requires_grad)
