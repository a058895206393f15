"""Which kernels for ``linear`` run on this machine, what each of the others lacks, and what was tuned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from halfbyte.errors import HalfbyteError
from halfbyte.kernels import KERNELS, Call, Kernel, LinearArgs
from halfbyte.kernels.cuda import choices
from halfbyte.kernels.cuda.launch import GLUON, KNOWN
from halfbyte.layouts import LAYOUTS

TRITON: Final = f"Gluon tested with {' to '.join('.'.join(map(str, v)) for v in GLUON)}, short launches with " + (
    " and ".join(KNOWN)
)
"""With which versions of Triton kernels were tested."""

CPU: Final[list[dict[str, Any]]] = [{"device": "cpu", "library": library} for library in ("torch", "numpy")]


def tiers(capabilities: Sequence[int]) -> dict[str, dict[str, str]]:
    """For "cpu" and "gpu" each kernel in the table's order: "ready", or what keeps it from its nearest call.

    Args:
        capabilities: those of the GPUs that torch sees, 90 for sm_90.
    """
    gpus: list[dict[str, Any]] = [{"device": "cuda", "capability": of} for of in capabilities or (0,)]
    found: dict[str, dict[str, str]] = {"cpu": {}, "gpu": {}}
    for kernel in KERNELS:
        if kernel.bundle is LinearArgs:
            places = gpus if kernel.on_gpu else CPU
            found["gpu" if kernel.on_gpu else "cpu"][kernel.name] = _state(kernel, places)
    return found


def chosen() -> dict[str, str]:
    """For "shipped" and "user" what a file that ``halfbyte tune`` wrote holds, or what is wrong with it."""
    own = choices.user_file()
    return {
        "shipped": _held(choices.SHIPPED),
        "user": "not read: HALFBYTE_CHOICES=none" if own is None else f"{_held(own)} ({own})",
    }


def _held(path: Path) -> str:
    try:
        entries = choices.read(path)
    except OSError as error:
        return "none" if isinstance(error, FileNotFoundError | NotADirectoryError) else f"unreadable: {error.strerror}"
    except HalfbyteError as error:
        return str(error)
    counts = Counter(_measured(entry) for entry in entries)
    return "; ".join(f"{count} shapes on {where}" for where, count in counts.items()) or "no shape"


def _measured(entry: choices.Entry) -> str:
    """The newest measurement of an entry."""
    held = [one.choice.measurement for ranges in entry.kernels.values() for one in ranges]
    newest = max(held, key=lambda one: str(one["date"]), default={"gpu": "nothing", "date": "never"})
    return f"{newest['gpu']}, {newest['date']}"


def _state(kernel: Kernel[Any, Any], places: Sequence[dict[str, Any]]) -> str:
    refusals: list[tuple[str, ...]] = []
    for place in places:
        for layout in LAYOUTS:
            for rows in (512, 1):
                try:
                    refusals.append(kernel.refuse(_call(layout=layout, rows=rows, **place)))
                except Exception as error:  # of a package that is broken: a fact about the machine
                    return f"{type(error).__name__}: {error}"
    nearest = min(refusals, key=len)
    return ", and ".join(nearest) or "ready"


def _call(**changes: Any) -> Call:
    fields: dict[str, Any] = {
        "shape": (4096, 4096),
        "per_row": False,
        "pre_scale": False,
        "dtype": "bfloat16",
        "out_dtype": "bfloat16",
        "library": "torch",
        "bias": False,
    }
    return Call(**(fields | changes))
