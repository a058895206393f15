"""The Triton kernels for ``linear`` against float64; as a script, on the CPU, in Triton's interpreter.

TRITON_INTERPRET=1 python -m portable           # counts what it checked
TRITON_INTERPRET=1 python -m portable beyond    # reads beyond an argument, which ends the process
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import halfbyte as hb
from cuda_code import Program
from halfbyte.kernels import Call, LinearArgs
from halfbyte.kernels.cuda import choices, columns, decode, gemm
from halfbyte.kernels.cuda.fragments import TYPES
from halfbyte.kernels.cuda.launch import options_of
from halfbyte.layouts import Columns, Fragments, Layout, Packed
from halfbyte.weight import Weight, to_numpy
from helpers_run import HALF_ULP, call_like, exact_linear, random_floats, random_weight

DTYPES = ("bfloat16", "float16")
WORDS = {"*i64": torch.int64, "*i32": torch.int32, "*i16": torch.int16, "*u8": torch.uint8}

Layouts = Callable[[str], Layout]


def transposed(align: int) -> Layouts:
    return lambda dtype: Columns(align=align)


def every_product(blocks: int) -> Weight:
    """(127, 16 blocks): each code with each scale byte that is a number, in each block."""
    n, k = np.arange(127)[:, None], np.arange(16 * blocks)[None, :]
    codes = ((k + n + k // 16) % 16).astype(np.uint8)
    scales = ((n + 32 * np.arange(blocks)[None, :]) % 127).astype(np.uint8)
    return Weight(codes=codes[:, ::2] | codes[:, 1::2] << 4, scales=scales, scale2=np.float32(0.37))


def bound(x: np.ndarray, weight: Weight, bias: np.ndarray | None, out_dtype: str, more: int = 0) -> tuple[Any, Any]:
    """The results in f64 and how far off each may be; ``more``: roundings beside those of the sum."""
    expected, magnitude = exact_linear(x.astype(np.float64), weight, bias)
    sums = ((weight.k + 24 + more) * 2.0**-23 + 2.0**-24) * magnitude
    tiny = 2.0**-25 if out_dtype == "float16" else 0.0
    return expected, 1.01 * (sums + HALF_ULP[out_dtype] * np.abs(expected)) + tiny


def sources(kernel: Any, call: Call, bias: str | None, made: Any) -> list[tuple[Any, ...]]:
    """What ``compile_all`` takes of each program that a call with a bias of this dtype may run."""
    added = f"*{TYPES[bias or 'float32']}"
    if kernel is decode:
        programs = [("decode_code", "decode", decode.signature(call.dtype, call.out_dtype, added), made.warps)]
    elif kernel is gemm:
        whole = {False, call.shape[0] % 16 == 0}
        types = [gemm.signature(call.dtype, call.out_dtype, added, one) for one in sorted(whole)]
        programs = [("gemm_code", "gemm", one, made.warps) for one in types]
    else:
        name = "few" if isinstance(made, columns.Few) else "many"
        programs = [("columns_code", name, columns.signature(call, added, made), made.warps)]
    held = kernel.constants(call, made)
    return [
        (f"halfbyte.kernels.cuda.{module}", name, (types, held, options_of(warps=warps)))
        for module, name, types, warps in programs
    ]


def programs(kind: type) -> Callable[[int], dict[str, Program]]:
    """For a compute capability the programs of a class of configurations, as ``cuda_code`` takes them.

    All configurations where something was measured, and elsewhere those that are chosen without.
    """
    kernel = sys.modules[kind.__module__]
    layout = Columns(align=16) if kernel is columns else Fragments()

    def of(capability: int) -> dict[str, Program]:
        found = {}
        measured = any(entry.capability == capability for entry in choices.entries())
        many = (64,) if measured else (17, 64, 65)
        for rows in (8, 16) if kind in (decode.Decode, columns.Few) else many:
            call = call_like(layout=layout, shape=(14336, 4096), rows=rows, device="cuda", capability=capability)
            made_here = kernel.CONFIGURATIONS if measured else [kernel.configure(call)]
            for made in (made for made in made_here if isinstance(made, kind)):
                module, name, (types, held, options) = sources(kernel, call, None, made)[-1]
                found[f"{'-'.join(map(str, vars(made).values()))}-M{rows}"] = Program(
                    getattr(importlib.import_module(module), name),
                    {argument: of.removesuffix(":16") for argument, of in types.items()},
                    held,
                    options,
                    tuple(argument for argument, of in types.items() if of.endswith(":16")),
                )
        return found

    return of


def arguments(
    weight: Weight, layout: Layout, rows: int, dtype: str, out_dtype: str, bias: str | None = None, device: str = "cpu"
) -> LinearArgs:
    """Random activations for a weight, and a result of NaN."""
    n, k = weight.shape
    x = torch.from_numpy(random_floats((rows, k), "float32")).to(device, getattr(torch, dtype))
    b = torch.from_numpy(random_floats((n,), "float32", seed=2)).to(device, getattr(torch, bias)) if bias else None
    out = torch.full((rows, n), float("nan"), dtype=getattr(torch, out_dtype), device=device)
    return LinearArgs(x=x, weight=hb.pack(weight, layout).to(device), bias=b, out=out)


# The interpreter


def guarded(a: torch.Tensor) -> torch.Tensor:
    """A copy that ends where memory does: a read or write beyond it ends the process."""
    size = a.numel() * a.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert not protect(ctypes.c_void_p(whole.data_ptr() + pages), ctypes.c_size_t(mmap.PAGESIZE), 0)
    part = whole[pages - size : pages].view(a.dtype).view(a.shape)
    return part.copy_(a)


def guard(args: LinearArgs) -> LinearArgs:
    buffers = {name: guarded(b) for name, b in args.weight.buffers().items()}
    bias = None if args.bias is None else guarded(args.bias)
    weight = Packed.from_buffers(args.weight.layout, args.weight.shape, buffers)
    return replace(args, x=guarded(args.x), weight=weight, bias=bias, out=guarded(args.out))


@contextmanager
def interpreted(kernel: Any, args: LinearArgs) -> Iterator[dict[str, torch.Tensor]]:
    """Launches of a kernel's module go to the interpreter; yields the memory that they take beside the arguments."""
    found = [args.x, args.bias, args.out, *args.weight.buffers().values()]
    known = {a.data_ptr(): a for a in found if a is not None}
    taken: dict[str, torch.Tensor] = {}

    def take(name: str, value: float, dtype: torch.dtype) -> Callable[[Any, int], torch.Tensor]:
        def make(device: Any, nbytes: int) -> torch.Tensor:
            taken[name] = guarded(torch.full((nbytes // 4,), value, dtype=dtype))
            known[taken[name].data_ptr()] = taken[name]
            return taken[name]

        return make

    def program(code: Any, types: Any, constants: Any, **options: Any) -> Callable[[Any, Any], None]:
        assert list(code.arg_names) == [*types, *constants]

        def pointed(value: Any, of: str) -> Any:
            if not of.startswith("*") or value is None:
                return value
            return known[value].view(-1).view(WORDS.get(of.removesuffix(":16"), known[value].dtype))

        def run(grid: Any, values: Any) -> None:
            code[grid](*map(pointed, values, types.values()), **constants)

        return run

    changed = {"program": program, "workspace": take("sums", float("nan"), torch.float32)}
    changed |= {"counters": take("counts", 0, torch.int32)}
    kept = {name: getattr(kernel, name) for name in changed if hasattr(kernel, name)}
    for name in kept:
        setattr(kernel, name, changed[name])
    try:
        yield taken
    finally:
        for name, value in kept.items():
            setattr(kernel, name, value)


def interpret(kernel: Any, args: LinearArgs, made: Any) -> np.ndarray:
    """The result of one launch, whose every read and write is within its arguments."""
    args = guard(args)
    with interpreted(kernel, args) as taken:
        kernel.bind(args, made)(args.x, args.bias, args.out)
    if "counts" in taken:
        assert not taken["counts"].any()
    result: np.ndarray = to_numpy(args.out.clone()).astype(np.float64)
    return result


KERNELS: list[tuple[Any, Layouts, Any]] = [
    (decode, Fragments, decode.Decode(warps=2, stripes=2, ahead=1)),
    (decode, Fragments, decode.Decode(warps=1, stripes=1, ahead=4)),
    (gemm, Fragments, gemm.Gemm(stripes=4, tokens=16, units=2, group=2)),
    (gemm, Fragments, gemm.Gemm(stripes=2, tokens=16, units=1, parts=3, group=2)),
    (columns, transposed(16), columns.Few(warps=2, bytes=8, ahead=2)),
    (columns, transposed(4), columns.Few(warps=1, bytes=16, ahead=1)),
    (columns, transposed(1), columns.Few(warps=1, bytes=4, ahead=1)),
    (columns, transposed(16), columns.Many(tokens=16, features=32, depth=32, group=2)),
    (columns, transposed(1), columns.Many(tokens=32, features=16, depth=64, group=2)),
]
SHAPES = ((1, 16), (64, 256), (37, 208), (100, 336))


def most_rows(made: Any) -> int:
    return 16 if isinstance(made, decode.Decode | columns.Few) else 40


def check_results() -> int:
    """Ragged shapes, both dtypes, biases of each dtype, scale2 per tensor and per row."""
    count = 0
    for kernel, layout, made in KERNELS:
        for n, k in SHAPES:
            dtype, rows = DTYPES[count % 2], (1, 3, most_rows(made))[count % 3]
            weight = random_weight(n, k, per_row=bool(count // 2 % 2), scales=(40, 60))
            bias = (None, "float32", "bfloat16", "float16", None)[count % 5]
            args = arguments(weight, layout(dtype), rows, dtype, "float32", bias)
            got = interpret(kernel, args, made)
            added = None if args.bias is None else to_numpy(args.bias).astype(np.float64)
            expected, off = bound(to_numpy(args.x), weight, added, "float32", more=4)
            assert (np.abs(got - expected) <= off).all(), (kernel.NAME, made, n, k, rows, dtype)
            count += 1
    return count


def check_decoding() -> int:
    """Every code with every scale, bit for bit."""
    weight, count = every_product(1), 0
    for kernel, layout, made in KERNELS:
        for dtype in DTYPES:
            packed = hb.pack(weight, layout(dtype)).to("cpu")
            eye, out = torch.eye(16, dtype=getattr(torch, dtype)), torch.full((16, 127), float("nan"))
            found = interpret(kernel, LinearArgs(x=eye, weight=packed, bias=None, out=out), made)
            np.testing.assert_array_equal(found.T, weight.dequantize("float32"))
            count += 1
    return count


def read_beyond() -> None:
    """A launch that is told of more rows than the weight has."""
    args = guard(arguments(random_weight(16, 64), Fragments(), 1, "bfloat16", "float32"))
    with interpreted(decode, args):
        within = decode.program

        def program(*given: Any, **options: Any) -> Callable[[Any, Any], None]:
            run = within(*given, **options)
            return lambda grid, values: run((2, 1, 1), (*values[:-2], 32, values[-1]))

        decode.program = program  # type: ignore[assignment]
        decode.bind(args, decode.Decode())(args.x, None, args.out)


if __name__ == "__main__":
    if sys.argv[1:] == ["beyond"]:
        read_beyond()
    print(check_results(), check_decoding())
