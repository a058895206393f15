"""Kernels: the ways to compute. The table below is the whole set, fastest first; a new kernel adds one line."""

from __future__ import annotations

import os
from typing import Any

from halfbyte.errors import NoKernelError, UsageError
from halfbyte.kernels import (
    attention,
    dense,
    embedding,
    experts_torch,
    fp8,
    gated,
    grouped,
    int8,
    pick,
    reference,
    routing,
    step_torch,
    w4a4,
)
from halfbyte.kernels.attention_base import AttentionArgs, AttentionCall
from halfbyte.kernels.base import A, AnyCall, C, Call, Cost, Kernel, LinearArgs
from halfbyte.kernels.cpu import dense as cpu_dense
from halfbyte.kernels.cpu import exact, panels
from halfbyte.kernels.cpu import experts as cpu_experts
from halfbyte.kernels.cpu import int8 as cpu_int8
from halfbyte.kernels.cpu import step as cpu_step
from halfbyte.kernels.cuda import (
    attend_gluon,
    choices,
    columns,
    decode,
    decode_gluon,
    experts_decode,
    experts_fp8,
    experts_gemm,
    experts_triton,
    fp8_gluon,
    gemm,
    gemm_gluon,
    grouped_gluon,
    grouped_triton,
    scaled_mm,
)
from halfbyte.kernels.cuda import dense as cuda_dense
from halfbyte.kernels.cuda import embedding as cuda_embedding
from halfbyte.kernels.cuda import pick as cuda_pick
from halfbyte.kernels.cuda import routing as cuda_routing
from halfbyte.kernels.cuda import step as cuda_step
from halfbyte.kernels.cuda import w4a4 as cuda_w4a4
from halfbyte.kernels.dense import DenseArgs
from halfbyte.kernels.descriptors import TensorDesc
from halfbyte.kernels.embedding import EmbeddingArgs, EmbeddingCall
from halfbyte.kernels.experts import ExpertsArgs, ExpertsCall
from halfbyte.kernels.fmha_llm import FmhaV2Llm, LlmFmha, LlmFmhaPaged
from halfbyte.kernels.fmha_vit import FmhaV2Vit, VitFmha
from halfbyte.kernels.fp8 import Fp8Args, Fp8Call
from halfbyte.kernels.gated import GatedArgs
from halfbyte.kernels.grouped import GroupedArgs, GroupedCall
from halfbyte.kernels.in_order import InOrderArgs
from halfbyte.kernels.int8 import Int8Args, Int8Call
from halfbyte.kernels.pick import PickArgs
from halfbyte.kernels.routing import RouteArgs
from halfbyte.kernels.step import AddNormArgs, AttendArgs, GateArgs
from halfbyte.kernels.w4a4 import W4a4Args, W4a4Call

KERNELS: tuple[Kernel[Any, Any], ...] = (
    decode_gluon.GLUON,
    gemm_gluon.GLUON,
    decode.TRITON,
    gemm.TRITON,
    columns.TRITON,
    exact.BF16,
    panels.PANELS,
    exact.AVX512,
    exact.PORTABLE,
    reference.TORCH,
    reference.NUMPY,
    cuda_embedding.TRITON,
    embedding.TORCH,
    embedding.NUMPY,
    decode_gluon.GATED,
    decode_gluon.IN_ORDER,
    gated.COMPOSED,
    cpu_experts.EXPERTS,
    experts_decode.GLUON,
    experts_gemm.GLUON,
    experts_fp8.GLUON,
    experts_triton.TRITON,
    experts_torch.LOOP,
    grouped_gluon.GLUON,
    grouped_triton.TRITON,
    grouped.LOOP,
    cuda_step.ADD_NORM,
    attend_gluon.GLUON,
    cuda_step.ATTEND,
    cuda_step.GATE,
    cpu_dense.DENSE,
    cuda_dense.TRITON,
    dense.TORCH,
    cuda_pick.TRITON,
    pick.TORCH,
    cuda_routing.TRITON,
    routing.TORCH,
    cpu_step.ADD_NORM,
    cpu_step.ATTEND,
    cpu_step.GATE,
    step_torch.ADD_NORM,
    step_torch.ATTEND,
    step_torch.GATE,
    cpu_int8.VNNI,
    cpu_int8.PORTABLE,
    int8.NUMPY,
    fp8_gluon.GLUON,
    scaled_mm.TORCH,
    fp8.TORCH,
    fp8.NUMPY,
    cuda_w4a4.TORCH,
    w4a4.COMPOSED,
    attention.LLM_TORCH,
    attention.LLM_NUMPY,
    attention.LLM_PAGED_TORCH,
    attention.LLM_PAGED_NUMPY,
    attention.VIT_TORCH,
    attention.VIT_NUMPY,
    attention.V2_LLM_TORCH,
    attention.V2_LLM_NUMPY,
    attention.V2_VIT_TORCH,
    attention.V2_VIT_NUMPY,
)

__all__ = [
    "KERNELS",
    "AddNormArgs",
    "AttendArgs",
    "AttentionArgs",
    "AttentionCall",
    "Call",
    "Cost",
    "DenseArgs",
    "EmbeddingArgs",
    "EmbeddingCall",
    "ExpertsArgs",
    "ExpertsCall",
    "FmhaV2Llm",
    "FmhaV2Vit",
    "Fp8Args",
    "Fp8Call",
    "GateArgs",
    "GatedArgs",
    "GroupedArgs",
    "GroupedCall",
    "InOrderArgs",
    "Int8Args",
    "Int8Call",
    "Kernel",
    "LinearArgs",
    "LlmFmha",
    "LlmFmhaPaged",
    "PickArgs",
    "RouteArgs",
    "TensorDesc",
    "VitFmha",
    "W4a4Args",
    "W4a4Call",
    "forced",
    "ordered",
    "preflight",
    "select",
]


def forced(op: str) -> str | None:
    """The kernel that HALFBYTE_KERNEL names, if it may rule ``op``; a kernel of another op leaves this one alone.

    Raises:
        NoKernelError: it names no kernel at all.
    """
    name = os.environ.get("HALFBYTE_KERNEL")
    if not name:
        return None
    known = [kernel.name for kernel in KERNELS if kernel.op == op]
    if name in known:
        return name
    if any(kernel.name == name for kernel in KERNELS):
        return None
    raise NoKernelError(f"HALFBYTE_KERNEL names no kernel for {op}", got=repr(name), expected=" or ".join(known))


def ordered(bundle: type[A], call: AnyCall) -> list[Kernel[A, Any]]:
    """The kernels of a bundle as ``select`` asks them: on a GPU the best measured first, then in the table's order."""
    found = [kernel for kernel in KERNELS if kernel.bundle is bundle]
    if isinstance(call, Call) and call.capability:
        best = [choice.kernel for choice in choices.pick(call)]
        found.sort(key=lambda kernel: best.index(kernel.name) if kernel.name in best else len(best))
    return found


def select(bundle: type[A], call: C) -> Kernel[A, C]:
    """The kernel that runs a call: the first of ``ordered`` that does not refuse, or the one HALFBYTE_KERNEL names.

    Args:
        bundle: the class of the arguments; the kernel's type follows from it.
        call: what decides.

    Raises:
        UsageError: a call of another op than the bundle's.
        NoKernelError: nothing accepts this call; the error names the nearest kernel and all that keeps it from the
            call, then each other.
    """
    if call.op != bundle.op:
        raise UsageError(f"a call of another op than {bundle.__name__}'s", got=repr(call.op), expected=bundle.op)
    name = forced(bundle.op)
    declined = []
    for kernel in ordered(bundle, call):
        if name in (None, kernel.name):
            reasons = kernel.refuse(call)
            if not reasons:
                return kernel
            declined.append((len(reasons), f"{kernel.name}: {', and '.join(reasons)}"))
    nearest_first = [words for _, words in sorted(declined, key=lambda pair: pair[0])]
    by_force = " (forced by HALFBYTE_KERNEL)" if name else ""
    raise NoKernelError(f"no kernel computes {call}{by_force}; the nearest is {'; '.join(nearest_first)}")


def preflight(bundle: type[A], call: C) -> Kernel[A, C]:
    """Load what the kernel needs that ``select`` picks for this call, and nothing of any other; it is returned.

    Raises:
        UsageError: as ``select``.
        NoKernelError: as ``select``.
        UnavailableError: a device that is not there.
    """
    kernel = select(bundle, call)
    kernel.prepare(call)
    return kernel
