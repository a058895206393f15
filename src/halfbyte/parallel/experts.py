"""Experts over ranks: each holds some of them, or some columns of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfbyte import nn
from halfbyte.errors import UsageError
from halfbyte.layouts import Packed
from halfbyte.numerics import BLOCK
from halfbyte.parallel.layers import Exchanging, Rows
from halfbyte.parallel.ranks import Ranks, even_share
from halfbyte.weight import Weight


class RankExperts(Exchanging, nn.Experts):
    """Experts of which this rank holds a part; the ranks' results are added in float32 and rounded once.

    All ranks are given the same tokens, and get the same results. A token's sum is that of the ranks' sums, so it may
    differ from a single rank's in its last bits.

    Attributes:
        counted: (experts,) int64, how many slots each expert was given, where that is counted; else None.
    """

    counted: Tensor | None
    summed_dtype: torch.dtype | None
    owners: Tensor

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """As of ``nn.Experts``; UsageError for ids that no rank's experts have."""
        _count(self.counted, indices)
        part: Tensor = super().forward(hidden, indices, weights)
        return self.ranks.sum(part, None, hidden.dtype if self.summed_dtype is None else self.summed_dtype)


class ExchangedExperts(Exchanging, nn.Experts):
    """Experts of which this rank holds some, for ranks that have different tokens.

    Tokens are sent to the ranks of their experts and the results sent back, in float32, where they are added in the
    order of the slots: as on a single rank, bit for bit where the same kernels run. Each call waits for the device, to
    learn how many tokens go where.

    Attributes:
        counted: as of RankExperts.
    """

    counted: Tensor | None
    summed_dtype: torch.dtype | None
    owners: Tensor

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """As of ``nn.Experts``, of this rank's own tokens; UsageError on every rank for an id that names no expert."""
        _count(self.counted, indices)
        (tokens, k), ranks = indices.shape, self.ranks
        ids = indices.reshape(-1).long()
        known = (ids >= 0) & (ids < self.mixture.experts)
        owner = self.owners[ids.where(known, 0)].where(known, ranks.size)
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=ranks.size + 1)
        table = ranks.table(counts)
        refused = [rank for rank, row in enumerate(table) if row[-1]]
        if refused and not self.mixture.padding:
            got = f"{table[refused[0]][-1]} slots of rank {refused[0]}"
            raise UsageError("ids name no expert", got=got, expected=f"0..{self.mixture.experts - 1}")
        send, take = table[ranks.rank][:-1], [row[ranks.rank] for row in table]
        slots = order[: sum(send)]
        there = ranks.exchange(hidden[slots // max(k, 1)], send, take)
        wanted = ranks.exchange(ids[slots], send, take)
        ones = torch.ones(len(there), 1, device=hidden.device)
        made = super().forward(there, wanted[:, None], ones)
        y = torch.zeros(tokens * k, hidden.shape[1], device=hidden.device)
        y[slots] = ranks.exchange(made, take, send)
        y = y.reshape(tokens, k, hidden.shape[1])
        out = torch.zeros(hidden.shape, device=hidden.device)
        for s in range(k):
            out += (y[:, s] * weights[:, s, None].float()).masked_fill(~known.reshape(tokens, k)[:, s, None], 0)
        return out.to(hidden.dtype if self.summed_dtype is None else self.summed_dtype)


def keep_experts(module: Any, ranks: Ranks, own_tokens: bool) -> None:
    """Leave a module its rank's experts, in place.

    Raises:
        UsageError: experts that do not split into equal parts.
    """
    a, b = even_share(len(module.mixture.local), ranks.rank, ranks.size, 1, "E")
    for stack in (module.gate_up, module.down):
        weight: Any = stack.packed.unpack()
        _hold(stack, stack.layout.pack(weight.slice_experts(a, b)))
        if stack.bias is not None:
            stack.bias = _cut(stack.bias, stack.bias[a:b])
    owners = torch.full((module.mixture.experts,), ranks.size, dtype=torch.int64)
    each = len(module.mixture.local) // ranks.size
    for place, e in enumerate(module.mixture.local):
        owners[e] = place // each
    _become(module, ExchangedExperts if own_tokens else RankExperts, ranks, owners)
    local = module.mixture.local[a:b]
    module.mixture = replace(module.mixture, local=local, null="refuse" if own_tokens else "skip")


def keep_columns(module: Any, ranks: Ranks) -> None:
    """Leave a module its rank's columns of every expert's inner width, in place.

    Raises:
        UsageError: a width that does not split into equal parts of whole blocks.
    """
    width, mixture, one, two = module.intermediate_size, module.mixture, module.gate_up, module.down
    a, b = even_share(width, ranks.rank, ranks.size, BLOCK, "the experts' inner width")
    rows = expert_rows(width, a, b, mixture.parts, mixture.gate_up_order)
    weight: Any = one.packed.unpack()
    _hold(one, one.layout.pack(Weight.concat([weight.rows(*part) for part in rows])))
    if one.bias is not None:
        one.bias = _cut(one.bias, torch.cat([one.bias[:, start:stop] for start, stop in rows], 1))
    weight = two.packed.unpack()
    _hold(two, two.layout.pack(weight.columns(a, b)))
    if two.bias is not None and ranks.rank:
        two.bias = None  # rank 0 adds it
    module.intermediate_size = b - a
    _become(module, RankExperts, ranks, torch.zeros(mixture.experts, dtype=torch.int64))


def join_experts(module: Any, ranks: Ranks, experts: int | None) -> None:
    """Make experts that have a rank's part already add their results to those of the other ranks.

    Args:
        module: ``nn.Experts``.
        ranks: who adds.
        experts: how many all ranks have, of which each has equally many; None where each has columns of all.
    """
    held = len(module.mixture.local)
    if experts is None:
        owners = torch.zeros(held, dtype=torch.int64)
    else:
        owners = torch.arange(experts) // held
        local = tuple(range(ranks.rank * held, (ranks.rank + 1) * held))
        module.mixture = replace(module.mixture, experts=experts, local=local, null="skip")
        module.num_experts = experts
    _become(module, RankExperts, ranks, owners)


def expert_rows(width: int, a: int, b: int, parts: int, order: str) -> Rows:
    """The rows of gate_up that columns a..b of the inner width are made of."""
    if parts == 1:
        return [(a, b)]
    return [(2 * a, 2 * b)] if order == "interleaved" else [(a, b), (width + a, width + b)]


def count_slots(model: torch.nn.Module) -> None:
    """Let the experts of a model that is split count from now on how many slots each is given."""
    for module in model.modules():
        if isinstance(module, RankExperts | ExchangedExperts):
            module.counted = torch.zeros(module.mixture.experts, dtype=torch.int64, device=_device(module))


@dataclass(frozen=True)
class LoadBalance:
    """How many slots each rank's experts were given.

    Attributes:
        slots: module -> slots of each rank.
        busiest: module -> the expert that was given most, and its slots.
    """

    slots: dict[str, list[int]]
    busiest: dict[str, tuple[int, int]]

    def __str__(self) -> str:
        lines = []
        for name, own in self.slots.items():
            even = sum(own) / len(own) or 1
            each = ", ".join(f"rank {rank} {slots} ({slots / even:.2f})" for rank, slots in enumerate(own))
            expert, most = self.busiest[name]
            lines.append(f"{name}: {each} of {sum(own)} slots; expert {expert} has the most, {most}")
        return "\n".join(lines)


def load_balance(model: torch.nn.Module) -> LoadBalance:
    """How evenly the experts of a model, that count, were asked; every rank calls it.

    In brackets it prints each rank's share of what all would have if they had equally much.

    Raises:
        UsageError: no experts that count.
    """
    slots, busiest = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, RankExperts | ExchangedExperts) and module.counted is not None:
            counted = module.counted.clone()
            if isinstance(module, ExchangedExperts):
                counted = module.ranks.sum(counted, None, torch.int64)
            each = torch.zeros(module.ranks.size + 1, dtype=torch.int64, device=counted.device)
            slots[name] = each.index_add_(0, module.owners, counted)[: module.ranks.size].tolist()
            most = int(counted.argmax())
            busiest[name] = most, int(counted[most])
    if not slots:
        raise UsageError("no experts count what they are given", hint="call halfbyte.parallel.count_slots(model) first")
    return LoadBalance(slots, busiest)


def _count(counted: Tensor | None, indices: Tensor) -> None:
    if counted is not None:
        ids = indices.reshape(-1).long()
        known = (ids >= 0) & (ids < len(counted))
        counted.index_add_(0, ids.where(known, 0), known.long())


def _become(module: Any, cls: type, ranks: Ranks, owners: Tensor) -> None:
    module.__class__ = cls
    module.ranks, module.counted = ranks, None
    module.register_buffer("owners", owners.to(_device(module)), persistent=False)
    module.summed_dtype, module.out_dtype = module.out_dtype, torch.float32


def _device(module: Any) -> torch.device:
    device: torch.device = module.gate_up.held()["scale2"].device
    return device


def _hold(stack: Any, packed: Packed) -> None:
    for name, buffer in packed.buffers().items():
        stack._buffers[name] = buffer.contiguous()
    stack.shape, stack._packed = packed.shape, None


def _cut(old: Any, new: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(new.detach().clone(), requires_grad=old.requires_grad)
