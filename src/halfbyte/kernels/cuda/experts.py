"""What the kernels of ``experts`` on Hopper share: what they decline, which of them runs, and a call's launches.

A call is lists, two products and a sum (``halfbyte.kernels.cuda.lists``), or with few slots two products alone. Each
launch waits for the one ahead of it before it reads what a kernel wrote, but the last product: the first one lets it
start only when all that is ahead of the first is over, so it may read lists, ids and weights at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from halfbyte.kernels.base import ALIGNED
from halfbyte.kernels.cuda.launch import why_not
from halfbyte.kernels.cuda.lists import WORD, Lists, Numbers, bind_combine, bind_lists
from halfbyte.kernels.cuda.shared import in_turn, workspace
from halfbyte.kernels.experts import ExpertsArgs, ExpertsCall, places
from halfbyte.layouts import Fragments
from halfbyte.layouts.fragments import STEPS
from halfbyte.numerics import BLOCK

FEW_SLOTS: Final = 5.0
"""Of an expert that has any, on average: up to so many the kernel that decodes in registers is the faster one."""


def slots_each(call: ExpertsCall) -> float:
    """Slots of an expert that has any, on average, where routing is even."""
    share = len(call.mixture.local) / max(1, call.mixture.experts)
    return max(1.0, call.rows * call.top * share / max(1.0, call.touched))


def refuse(call: ExpertsCall) -> tuple[str, ...]:
    """Why both decline a call."""
    return declined(call, least=90, most=90, gluon=True)


def declined(call: ExpertsCall, **gpu: Any) -> tuple[str, ...]:
    """Why all kernels on the layout ``fragments`` decline a call, on GPUs as ``why_not`` has them."""
    reasons = list(why_not(call, **gpu))
    needed = Fragments(call.dtype if call.dtype in STEPS else "bfloat16")
    reasons += [
        f"reads the layout {needed.key}, not {layout.key}"
        for layout in dict.fromkeys((call.layout, call.down_layout))
        if layout != needed
    ]
    if call.dtype not in STEPS:
        reasons.append(f"takes {' or '.join(STEPS)} activations, not {call.dtype}")
    for name, width in (("hidden", call.shape[-1]), ("intermediate", call.inner)):
        if width % BLOCK:
            reasons.append(f"takes {name} sizes that are multiples of {BLOCK}, not {width}")
    if call.pre_scale:
        reasons.append("multiplies activations as they come, without a pre_scale")
    if call.mixture.gated and call.mixture.gate_up_order == "interleaved":
        reasons.append("takes all rows of the gate before those of up, or behind them; permute_rows of the weight")
    return tuple(reasons)


def table_of(args: ExpertsArgs) -> Any:
    """Where each expert is, as kernels need it beside ``Numbers``; None where they do not."""
    return None if Numbers.of(args.mixture).first >= 0 else places(args)


class Layer:
    """A call's launches, in parts or one after the other.

    Args:
        args: of calls like these.
        size: slots of a block; 0 for none, where ``products`` needs no lists and writes the result.
        products: launches both: of hidden, indices, weights, out, the addresses of blocks, slots and count, and those
            of h and y.
        adds: whether ``products`` itself adds the slots of a token, and writes no y; by default where it has no lists.
        settled: makes what launches both where the routing is settled; None where that is ``products``.
        rows: of h; by default as many as there are slots.
        more: bytes of memory that lie ``behind`` y.
    """

    def __init__(
        self,
        args: ExpertsArgs,
        size: int,
        products: Callable[..., None],
        adds: bool | None = None,
        settled: Callable[[], Callable[..., None]] | None = None,
        rows: int | None = None,
        more: int = 0,
    ) -> None:
        adds = not size if adds is None else adds
        (tokens, width), top = args.hidden.shape, args.indices.shape[1]
        call, device, numbers = args.call(), args.hidden.device, Numbers.of(args.mixture)
        self._products, self._device = products, device
        self._settle, self._settled = settled, products
        self._table = table_of(args)
        self._lists: Any = None
        self._combine: Any = None
        self._words: tuple[int, ...] = ()
        lists = 0
        of = self._table, device, call.capability
        if size:
            made = Lists(tokens, top, size, numbers, call.indices)
            lists = _whole(made.nbytes)
            self._words = WORD * made.blocks, WORD * made.slots, WORD * made.count
            self._lists = bind_lists(made, *of)
        if not adds:
            dtypes = call.indices, call.weights, call.out_dtype
            self._combine = bind_combine(tokens, top, width, dtypes, numbers, *of)
        self._h = lists
        rows = tokens * top if rows is None else rows
        self._y = lists + _whole(rows * call.inner * args.hidden.element_size())
        self._nbytes = self._y + (0 if adds else tokens * top * width * 4)
        if more:
            self._nbytes = self._y + behind(tokens * top, width) + more
        self._held: Any = None

    def __call__(self, hidden: Any, indices: Any, weights: Any, out: Any) -> None:
        """All of them."""
        with in_turn:
            memory = workspace(self._device, self._nbytes)
            at = memory.data_ptr()
            if self._lists is not None:
                self._lists(indices, at)
            self._products(hidden, indices, weights, out, *self._places(at))
            if self._combine is not None:
                self._combine(at + self._y, indices, weights, out)

    def _places(self, at: int) -> tuple[tuple[int, ...], int, int]:
        return tuple([at + word for word in self._words]), at + self._h, at + self._y

    def lists(self, indices: Any) -> None:
        """The lists alone, kept for ``products``."""
        if self._lists is not None:
            self._lists(indices, self._memory())

    def products(self, hidden: Any, indices: Any, weights: Any, out: Any) -> None:
        """The products alone, after ``lists``, kept for ``combine``.

        The routing must be settled: lists and ids, and the stacks, were written before the kernel ahead began.
        """
        settle, self._settle = self._settle, None
        if settle is not None:
            self._settled = settle()
        self._settled(hidden, indices, weights, out, *self._places(self._memory()))

    def combine(self, weights: Any, indices: Any, out: Any) -> None:
        """The sum alone, after ``products``."""
        if self._combine is not None:
            self._combine(self._memory() + self._y, indices, weights, out)

    def _memory(self) -> int:
        import torch

        if self._held is None:
            self._held = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        return int(self._held.data_ptr())


def behind(slots: int, width: int) -> int:
    """Bytes from y on to what is behind it."""
    return _whole(slots * width * 4)


def _whole(nbytes: int) -> int:
    return -(-nbytes // (8 * ALIGNED)) * (8 * ALIGNED)
