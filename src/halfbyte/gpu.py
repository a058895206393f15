"""Triton, for whatever it compiles: whether it is there, and on which device it launches.

Only modules that are loaded to run import it, and those whose names end in ``_code`` or ``_kernel`` at their top.
"""

from __future__ import annotations

from typing import Any, Final

ALIGNED: Final = 16
"""What addresses are multiples of: the compiler's condition for vector loads."""


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


def aligned(tensor: Any) -> Any:
    """The same without gaps, at a multiple of ``ALIGNED`` bytes; copied if need be."""
    whole = tensor.contiguous()
    return whole.clone() if whole.data_ptr() % ALIGNED else whole


def launch(known: dict[Any, Any], key: Any, kernel: Any, programs: int, args: tuple[Any, ...], **options: Any) -> None:
    """Run a kernel; after the first time without Triton's look-up by its constants, which outlasts a small one.

    Args:
        known: where what is compiled is kept.
        key: of all that decides what that is: the types, the constants, the device.
        kernel: of Triton.
        programs: how many.
        args: all that it takes, in order, constants too; tensors, of which the first tells the device, are aligned.
        options: num_warps and the like.
    """
    if not args[0].is_cuda:  # the interpreter
        kernel[(programs,)](*args, **options)
        return
    with device_of(args[0]):
        compiled = known.get(key)
        if compiled is None:
            known[key] = kernel[(programs,)](*args, **options)
        else:
            compiled[(programs, 1, 1)](*args)
