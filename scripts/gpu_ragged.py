"""Small calls of ragged shapes, by every kernel for GPUs: what a memory checker runs.

Products are compared with float64, those in FP8 with that of the same quantized values; weights quantized, decoded and
looked up, and activations quantized, with those of the CPU, to the bit.

    export PYTHONPATH=src:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --error-exitcode 9 python scripts/gpu_ragged.py

Without torch's cache each array is an allocation of its own, so that a load or store beside one shows. The exit status
is 1 where a result is wrong, or nothing was computed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any, Final

import numpy as np
import torch

import halfbyte as hb
from halfbyte.kernels import KERNELS, Fp8Args, LinearArgs
from halfbyte.kernels.cuda import fp8_gluon, shared
from halfbyte.kernels.fp8 import quantized
from halfbyte.kinds import Fp8Weight
from halfbyte.layouts import Packed, parse

SHAPES: Final = ((17, 48), (129, 208), (144, 208), (263, 1040))
ROWS: Final = (1, 9, 17, 70)
LAYOUTS: Final = ("fragments(dtype={dtype})", "columns(align=1)", "columns(align=128)")
ERROR: Final = {"bfloat16": 4e-3, "float16": 5e-4}
TWIN: Final = "twin"
FP8_SHAPES: Final = ((17, 48), (136, 1109), (263, 1040))
FP8_ROWS: Final = (9, 257)
FP8_FORMS: Final = ("fragments(dtype=bfloat16)", "fragments(dtype=float16)", TWIN)
ACTIVATIONS: Final = ((3, 100), (257, 1109), (2, 40000))
"""(M, K) that are quantized alone; a row of the last is read twice."""


def cases() -> Iterator[tuple[Any, str, tuple[int, int], int, str]]:
    """The class of the arguments, layout or twin, (N, K), M, and dtype."""
    for dtype, layout, shape, rows in product(ERROR, LAYOUTS, SHAPES, ROWS):
        yield LinearArgs, layout.format(dtype=dtype), shape, rows, dtype
    for dtype, form, shape, rows in product(ERROR, FP8_FORMS, FP8_SHAPES, FP8_ROWS):
        yield Fp8Args, form, shape, rows, dtype


def case(bundle: Any, form: str, shape: tuple[int, int], rows: int, dtype: str, device: str) -> Iterator[str]:
    """The kernels that computed it, and a line for each that was wrong.

    In every other case there are a bias, a scale2 for each row and, in FP8, a pre_scale.
    """
    n, k = shape
    beside, fp8 = (n + rows) % 2 == 0, bundle is Fp8Args
    random = torch.Generator(device).manual_seed(n * k + rows)
    codes, scales = (
        torch.randint(0, high, (n, -(-k // 16) * each), dtype=torch.uint8, device=device, generator=random)
        for high, each in ((256, 8), (0x7F, 1))
    )
    scale2 = torch.full((n,) if beside else (), 2**-9, device=device)
    pre = torch.rand(k, device=device, generator=random) + 0.5 if beside and fp8 else None
    weight = hb.Weight(codes=codes, scales=scales, scale2=scale2, pre_scale=pre, k=k)
    x = torch.randn(rows, k, device=device, generator=random).to(getattr(torch, dtype))
    bias = x.new_ones(n) if beside else None
    expected = (in_fp8(x, weight) if fp8 else x.double() @ weight.dequantize("float32").double().T) + beside
    held = apart(hb.to_fp8(weight) if form == TWIN else hb.pack(weight, parse(form)))
    for kernel in KERNELS:
        out = torch.full((rows, n), float("nan"), dtype=x.dtype, device=device)
        args = bundle(x=x, weight=held, bias=bias, out=out)
        if kernel.bundle is not bundle or kernel.refuse(args.call()):
            continue
        shared.forget()
        kernel.run(args)
        error = float((out.double() - expected).norm() / expected.norm())
        wrong = "" if error <= (fp8_gluon.ERROR if fp8 else ERROR[dtype]) else f": WRONG by {error:.2g}"
        yield f"{kernel.name} {form} {n}x{k} M={rows}{wrong}"


def in_fp8(x: Any, weight: hb.Weight) -> Any:
    """(M, N) f64: the product of the values that quantized activations and the twin stand for."""
    twin = hb.to_fp8(weight)
    data, scale = quantized(x, twin.pre_scale)
    a, b = (held.view(torch.float8_e4m3fn).double() for held in (data, twin.data))
    return (a * scale.double()) @ (b * twin.scale.double()).T


def apart(held: Packed | Fp8Weight) -> Packed | Fp8Weight:
    """The same with arrays of their own."""
    if isinstance(held, Packed):
        buffers = {name: buffer.clone() for name, buffer in held.buffers().items()}
        return Packed.from_buffers(held.layout, held.shape, buffers)
    pre = None if held.pre_scale is None else held.pre_scale.clone()
    return Fp8Weight(data=held.data.clone(), scale=held.scale.clone(), pre_scale=pre)


def activations(shape: tuple[int, int], dtype: str, device: str) -> Iterator[str]:
    """Quantized activations, in both orders, with a pre_scale and without."""
    import gpu_fp8

    x = np.random.default_rng(0).standard_normal(shape, np.float32).astype(gpu_fp8.float_dtype(dtype))
    factors = np.random.default_rng(1).uniform(0.5, 2, shape[1]).astype(np.float32)
    for ordered, pre in product((False, True), (None, factors)):
        try:
            gpu_fp8.check_one(x, pre, ordered, device, shape, beside=0)
            wrong = ""
        except AssertionError:
            wrong = ": WRONG"
        yield f"quantizer {shape[0]}x{shape[1]} {dtype}{' ordered' if ordered else ''}{wrong}"


def codecs(shape: tuple[int, int], dtype: str, device: str) -> Iterator[str]:
    """What was quantized, decoded and looked up, and whether it is as on the CPU."""
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    there, here = hb.quantize(dense.to(device)), hb.quantize(dense)
    same = [torch.equal(getattr(there, name).cpu(), getattr(here, name)) for name in ("codes", "scales", "scale2")]
    yield f"quantize {shape[0]}x{shape[1]} {dtype}{'' if all(same) else ': WRONG'}"
    decoded, expected = there.dequantize(dtype).cpu(), here.dequantize(dtype)
    yield f"dequantize {shape[0]}x{shape[1]} {dtype}{'' if torch.equal(decoded, expected) else ': WRONG'}"
    ids = torch.tensor([[0, shape[0] - 1], [shape[0] // 2, 0]])
    on_gpus = f"fragments(dtype={'bfloat16' if dtype == 'float32' else dtype})"
    for layout in ("rows", *([on_gpus] if device == "cuda" else [])):
        found = hb.embedding(ids.to(device), hb.pack(there, layout), out_dtype=dtype).cpu()
        right = torch.equal(found, expected[ids])
        yield f"embedding {layout} {shape[0]}x{shape[1]} {dtype}{'' if right else ': WRONG'}"


def main(device: str = "cuda") -> int:
    """Run all; the exit status."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("not run: torch sees no CUDA GPU")
    done: list[str] = []
    for one in cases():
        done += case(*one, device)
    products = len(done)
    for shape, dtype in product(ACTIVATIONS, (*ERROR, "float32")):
        done += activations(shape, dtype, device)
    for shape, dtype in product(SHAPES, (*ERROR, "float32")):
        done += codecs(shape, dtype, device)
    wrong = [line for line in done if "WRONG" in line]
    by = sorted({line.split()[0] for line in done})
    print("\n".join([*wrong, f"{len(done)} calls, {len(wrong)} wrong, by {', '.join(by)}"]))
    return int(bool(wrong) or not products)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
