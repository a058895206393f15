"""Triton, for whatever it compiles: whether it is there, and on which device it launches.

Only modules that are loaded to run import it, and those whose names end in ``_code`` or ``_kernel`` at their top.
"""

from __future__ import annotations

from typing import Any


def missing() -> str | None:
    """None where Triton is at hand, else what to do; this imports it."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", None) == "triton":
            return "triton is not installed; run: pip install 'halfbyte[cuda]'"
        return f"triton cannot be imported: {error}"
    return None


def device_of(tensor: Any) -> Any:
    """A context in which a tensor's device is the current one; a tensor on the CPU is for Triton's interpreter."""
    import torch

    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
