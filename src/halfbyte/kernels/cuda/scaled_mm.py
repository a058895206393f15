"""``linear`` with an FP8 twin on an NVIDIA GPU: activations quantized for each token, then ``torch._scaled_mm``.

N and K are padded to 16 where they are no multiples of it, once, in a copy of the twin that is kept with it; the
result is then cut out of one that is wider. Where a bias is not of the result's dtype, or that is float32, torch adds
none: the product is made in float32, and rounded after the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from halfbyte.kernels.base import ALIGNED, Kernel, load_torch
from halfbyte.kernels.cuda.fp8_quantize import Quantizer, nbytes, pitch, quantizer, scales_at
from halfbyte.kernels.cuda.launch import why_not
from halfbyte.kernels.cuda.shared import capturing, in_turn, workspace
from halfbyte.kernels.fp8 import Fp8Args, Fp8Call, cost
from halfbyte.kernels.fp8 import refuse as refuse_any
from halfbyte.kinds import Fp8Weight
from halfbyte.numerics import Array

NAME: Final = "scaled-mm"
FAST: Final = True
"""Whether the matrix units' own sums are all there are; else they are added up in float32 now and then."""


def refuse(call: Fp8Call) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = (*why_not(call, least=89), *refuse_any(call))
    return reasons if call.resident else (*reasons, "multiplies by an Fp8Weight, not by NVFP4; see halfbyte.to_fp8")


def padding(call: Fp8Call) -> int:
    """Bytes that are kept with an accepted call's twin: its padded copy, if one is needed, and a scale for each row."""
    n, k = call.shape
    return (pitch(n) * pitch(k) if n % ALIGNED or k % ALIGNED else 0) + 4 * pitch(n)


def operand(weight: Fp8Weight) -> tuple[Any, Any]:
    """The twin as ``torch._scaled_mm`` takes it, (K, N) float8 by columns and (1, N) f32, with N and K padded."""
    import torch

    (n, k), data, scale = weight.shape, weight.data, weight.scale
    versions = [(a.data_ptr(), 0 if a.is_inference() else a._version) for a in (data, scale)]
    known = weight.memo.get(NAME)
    if known is None or known[0] != versions:
        padded = None
        if n % ALIGNED or k % ALIGNED or data.data_ptr() % ALIGNED:
            padded = torch.zeros(pitch(n), pitch(k), dtype=torch.uint8, device=data.device)
            padded[:n, :k] = data
        scales = torch.zeros(1, pitch(n), dtype=torch.float32, device=data.device)
        scales[0, :n] = scale[:, 0]
        known = versions, padded, scales, scale
        if not capturing(data.device):  # then they are made in the graph, not now
            weight.memo[NAME] = known
    _, padded, scales, _ = known  # the last so that its address stays its own
    return (data if padded is None else padded).view(torch.float8_e4m3fn).t(), scales


def _quantizer(device: Any, dtype: str, k: int, pre_scale: bool) -> Quantizer:
    return quantizer(device, dtype, k, ordered=False, pre_scale=pre_scale, early=True)


def bind(args: Fp8Args) -> Callable[[Array, Array | None, Array], None]:
    """What is left of a launch for calls like these, on the same twin."""
    import torch

    assert isinstance(args.weight, Fp8Weight)
    (n, k), m, device, dtype = args.weight.shape, args.x.shape[0], args.x.device, args.out.dtype
    b, scale = operand(args.weight)
    pre = None if args.weight.pre_scale is None else args.weight.pre_scale.float().contiguous()
    quantize = _quantizer(device, str(args.x.dtype).removeprefix("torch."), k, pre is not None)
    width, at, needed = pitch(k), scales_at(m, k), nbytes(m, k)
    whole = not n % ALIGNED
    at_once = args.bias is None or args.bias.dtype == dtype != torch.float32
    multiply, factor = torch._scaled_mm, None if pre is None else pre.data_ptr()
    held: tuple[Any, Any, Any] = None, None, None

    def run(x: Any, bias: Any, out: Any) -> None:
        with in_turn:
            queue(x, bias, out.view(m, n))

    def queue(x: Any, bias: Any, out: Any) -> None:
        nonlocal held
        memory = workspace(device, needed)
        known, data, scales = held
        if memory is not known:
            data = memory[: m * width].view(torch.float8_e4m3fn).view(m, width)
            scales = memory[at : at + 4 * m].view(torch.float32).view(m, 1)
            if not torch._C._cuda_isCurrentStreamCapturing():
                held = memory, data, scales
        start = memory.data_ptr()
        quantize(m, x.data_ptr(), factor, start, start + at)
        if whole and at_once:
            multiply(data, b, scales, scale, bias, None, dtype, FAST, out=out)
        elif at_once:
            added = None if bias is None else torch.nn.functional.pad(bias, (0, -n % ALIGNED))
            out.copy_(multiply(data, b, scales, scale, added, None, dtype, FAST)[:, :n])
        else:
            wide = multiply(data, b, scales, scale, None, None, torch.float32, FAST)
            torch.add(wide[:, :n], bias, out=out)

    return run


def load(call: Fp8Call) -> None:
    """Compile what quantizes."""
    load_torch(call)
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    _quantizer(device, call.dtype, call.shape[-1], call.pre_scale)


def scratch(call: Fp8Call) -> int:
    """Bytes of the quantized activations."""
    return nbytes(call.rows, call.shape[-1])


TORCH: Final = Kernel(
    name=NAME,
    bundle=Fp8Args,
    description="quantizes activations for each token, then torch._scaled_mm",
    refuse=refuse,
    load=load,
    cost=cost,
    bind=bind,
    scratch=scratch,
)
