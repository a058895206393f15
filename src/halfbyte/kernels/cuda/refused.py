"""Where kernels say which id they could not follow: a word of host memory that the GPU writes and nobody waits for.

The word is 0, or ``id << 32 | null << 31 | slot + 1`` of a token's slot ``t * k + s``: id as the nearest i32, and null
where the id names an expert that is held elsewhere. Of several any is kept.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from halfbyte.errors import UsageError, WeightError
from halfbyte.kernels.cuda.shared import capturing

_words: Final[dict[int, tuple[Any, Any]]] = {}


def word(device: Any) -> Any:
    """(1,) i64 of a device, in pinned memory: the same in each call, so that CUDA graphs may write there."""
    import torch

    found = _words.get(device.index)
    if found is None:
        made = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        found = _words.setdefault(device.index, (made, ctypes.c_int64.from_address(made.data_ptr())))
    return found[0]


def look(device: Any) -> None:
    """Raise what an earlier call on a device could not, once and in no capture; nothing is waited for.

    Raises:
        UsageError: an id named no expert.
        WeightError: an id named an expert that another rank holds.
    """
    found = _words.get(device.index)
    if found is not None and found[1].value and not capturing(device):
        value, found[1].value = found[1].value, 0
        _raise(value, str(device))


def _raise(value: int, device: str) -> None:
    slot, e = (value & 0x7FFFFFFF) - 1, value >> 32
    where = f"at slot {slot} of the indices in an earlier call on {device}: the results of its token are NaN"
    if value >> 31 & 1:
        raise WeightError(
            f"a token was routed to expert {e}, which is null, {where}", hint="route its tokens to the rank that has it"
        )
    raise UsageError(
        f"an id named no expert {where}", got=e, hint="pass padding=True where such slots are to be skipped"
    )
