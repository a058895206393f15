"""``doctor``: what this machine and installation can do."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from halfbyte import jit
from halfbyte.findings import Report
from halfbyte.tiers import TRITON, chosen, tiers

EXTRAS: Final[dict[str, tuple[str, ...]]] = {
    "cpu": ("numba",),
    "torch": ("torch",),
    "cuda": ("torch", "triton"),
    "hf": ("torch", "transformers", "huggingface_hub"),
    "gguf": ("gguf",),
}
"""Extra of halfbyte that something uses -> the packages that it brings."""

_BASE: Final = ("numpy", "ml_dtypes", "click", "rich")


def doctor() -> Report:
    """Look at Python, the packages, the processor and the GPUs.

    Returns:
        A report; its facts are "python", "platform", "cores", "cpu", "packages" (version or None),
        "extras" (for each: ready, or the command that installs it), "layouts", "quantize" and
        "dequantize" (compiled, or why not), "gpus", "kernels" (for "cpu" and "gpu" each one for linear: ready, or why
        not), "triton" (with which versions they were tested) and "choices" (for "shipped" and "user", what was tuned).
    """
    names = dict.fromkeys([*_BASE, *(p for packages in EXTRAS.values() for p in packages)])
    packages = {name: _version(name) for name in names}
    extras = {
        extra: "ready" if all(packages[p] for p in needed) else f"run: pip install 'halfbyte[{extra}]'"
        for extra, needed in EXTRAS.items()
    }
    reason = jit.missing()
    gpus = _gpus() if packages["torch"] else []
    affinity = getattr(os, "sched_getaffinity", None)
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "cpu": _cpu(),
        "copy_file_range": hasattr(os, "copy_file_range"),
        "packages": packages,
        "extras": extras,
        "layouts": f"moved by NumPy: {reason}" if reason else "compiled by Numba",
        "quantize": f"by NumPy: {reason}" if reason else "compiled by Numba",
        "dequantize": f"by NumPy or torch: {reason}" if reason else "compiled by Numba",
        "gpus": gpus,
        "kernels": tiers([int(gpu["capability"].replace(".", "")) for gpu in gpus]),
        "triton": TRITON,
        "choices": chosen(),
    }
    return Report("doctor", (), facts)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    """Model name, and those instruction sets that matter for kernels."""
    wanted = (
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512vbmi",
        "avx512_vnni",
        "avx512_bf16",
        "asimd",
        "asimddp",
        "i8mm",
    )
    found: dict[str, Any] = {"model": platform.processor() or platform.machine(), "features": []}
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    found["model"] = value.strip()
                elif key.strip() in ("flags", "Features"):
                    found["features"] = [name for name in wanted if name in value.split()]
                    break
    except OSError:
        pass
    return found


def _gpus() -> list[dict[str, Any]]:
    """Name, memory and compute capability of each CUDA device that torch sees."""
    try:
        import torch

        if not torch.cuda.is_available():
            return []
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # a torch that does not work is a fact about the machine
        return [{"name": f"torch fails: {type(error).__name__}: {error}", "bytes": 0, "capability": "0.0"}]
    return [{"name": d.name, "bytes": d.total_memory, "capability": f"{d.major}.{d.minor}"} for d in devices]
