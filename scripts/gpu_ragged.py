"""Small calls of ragged shapes, by every kernel for GPUs: what a memory checker runs.

Products are compared with float64; weights quantized, decoded and looked up with those of the CPU, to the bit.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 python scripts/gpu_ragged.py

Without torch's cache each array is an allocation of its own, so that a load or store beside one shows. The exit status
is 1 where a result is wrong, or nothing was computed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import Final

import torch

import halfbyte as hb
from halfbyte.kernels import KERNELS, LinearArgs
from halfbyte.layouts import parse

SHAPES: Final = ((17, 48), (129, 208), (263, 1040))
ROWS: Final = (1, 9, 17, 70)
LAYOUTS: Final = ("fragments(dtype={dtype})", "columns(align=1)", "columns(align=128)")
ERROR: Final = {"bfloat16": 4e-3, "float16": 5e-4}


def cases() -> Iterator[tuple[str, tuple[int, int], int, str, bool]]:
    """Layout, (N, K), M, dtype, and whether there is a bias and a scale2 for each row."""
    for dtype, layout, shape, rows in product(ERROR, LAYOUTS, SHAPES, ROWS):
        yield layout.format(dtype=dtype), shape, rows, dtype, (shape[0] + rows) % 2 == 0


def case(layout: str, shape: tuple[int, int], rows: int, dtype: str, beside: bool, device: str) -> Iterator[str]:
    """The kernels that computed it, and a line for each that was wrong."""
    n, k = shape
    random = torch.Generator(device).manual_seed(n * k + rows)
    codes, scales = (
        torch.randint(low, high, (n, k // size), dtype=torch.uint8, device=device, generator=random)
        for low, high, size in ((0, 256, 2), (0, 0x7F, 16))
    )
    scale2 = torch.full((n,) if beside else (), 2**-9, device=device)
    weight = hb.Weight(codes=codes, scales=scales, scale2=scale2)
    x = torch.randn(rows, k, device=device, generator=random).to(getattr(torch, dtype))
    bias = x.new_ones(n) if beside else None
    expected = x.double() @ weight.dequantize("float32").double().T + (1 if beside else 0)
    packed = hb.pack(weight, parse(layout))
    for kernel in KERNELS:
        out = torch.full((rows, n), float("nan"), dtype=x.dtype, device=device)
        args = LinearArgs(x=x, weight=packed, bias=bias, out=out)
        if kernel.bundle is not LinearArgs or kernel.refuse(args.call()):
            continue
        kernel.run(args)
        error = float((out.double() - expected).norm() / expected.norm())
        wrong = "" if error <= ERROR[dtype] else f": WRONG by {error:.2g}"
        yield f"{kernel.name} {layout} {n}x{k} M={rows}{wrong}"


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
    for layout, shape, rows, dtype, beside in cases():
        done += case(layout, shape, rows, dtype, beside, device)
    products = len(done)
    for shape, dtype in product(SHAPES, (*ERROR, "float32")):
        done += codecs(shape, dtype, device)
    wrong = [line for line in done if "WRONG" in line]
    by = sorted({line.split()[0] for line in done})
    print("\n".join([*wrong, f"{len(done)} calls, {len(wrong)} wrong, by {', '.join(by)}"]))
    return int(bool(wrong) or not products)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
