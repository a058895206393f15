"""What quantizes, decodes and looks up CUDA tensors against NumPy; as a script, on the CPU, in Triton's interpreter.

TRITON_INTERPRET=1 python -m gpu_codecs quantize views dequantize every_code embedding blocks
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte import decode_cuda
from halfbyte.errors import QuantizeError
from halfbyte.kernels.cuda import embedding
from halfbyte.kernels.embedding import EmbeddingArgs
from halfbyte.layouts import Fragments, Rows, blocks
from halfbyte.numerics import E4M3_VALUES
from halfbyte.recipes import TensorScale, cuda, finite_amax, recipe_named
from halfbyte.recipes.base import LIKES, finite_amax_numpy
from halfbyte.weight import Weight, float_dtype, to_numpy, to_torch
from helpers import assert_same_bytes, random_weight

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")
DTYPES = ("float32", "bfloat16", "float16")
CUTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
"""Between two codes each: ties, that go to the even one."""


def ties(scale2: float, rng: np.random.Generator, rows: int = 64) -> np.ndarray:
    """(rows, 48) f32 of quotients at, and one or two roundings beside, the cuts between codes, of either sign.

    With this scale2 each block has a scale of its own, 2^-9 to 448, that its first value asks for.
    """
    scale = rng.choice(E4M3_VALUES[1:0x7F], (rows, 3, 1)).astype(np.float32)
    step = scale * np.float32(scale2)
    cut = rng.choice(CUTS, (rows, 3, 16))
    value = (cut.astype(np.float64) * step).astype(np.float32)
    value = (value.view(np.int32) + rng.integers(-2, 3, value.shape, np.int32)).view(np.float32)
    value[..., 0] = np.float32(6) * step[..., 0]
    value *= rng.choice(np.array([-1, 1], np.float32), value.shape)
    return value.reshape(rows, 48)


def sources(dtype: str) -> Iterator[tuple[str, np.ndarray, float | None]]:
    """Name, (N, K) in ``dtype``, and a scale2 to use or None."""
    rng = np.random.default_rng(0)
    to = float_dtype(dtype)
    top = float(ml_dtypes.finfo(to).max)

    def made(values: Any) -> Any:
        return np.clip(np.asarray(values, np.float32), -top, top).astype(to)

    normal = rng.standard_normal((40, 80), np.float32)
    yield "normal", made(normal * np.float32(0.02)), None
    yield "one row", made(normal[:1, :16]), None
    yield "K inside a block", made(normal[:9, :39]), None
    yield "large", made(normal * np.float32(1e30)), None
    yield "zeros", made(np.zeros((3, 32))), None
    signed = normal * (rng.random((40, 80)) < 0.1)
    signed[::2, :16] = -0.0
    yield "zeros of both signs", made(signed), None
    bits = rng.integers(0, 1 << (8 * to.itemsize), (64, 64), np.uint64).astype(f"u{to.itemsize}").view(to)
    wide = np.where(np.isfinite(bits.astype(np.float32)), bits, to.type(0))
    yield "any bits", wide, None
    yield "any bits but large ones", np.where(np.abs(wide.astype(np.float32)) < 1e3, wide, to.type(0)), None
    yield "any small bits", np.where(np.abs(wide.astype(np.float32)) < 1e-30, wide, to.type(0)), None
    tiny = rng.integers(-40, 41, (32, 64)) * float(ml_dtypes.finfo(to).smallest_subnormal)
    yield "subnormal", made(tiny), None
    beside = tiny.copy()
    beside[:, ::16] = rng.choice([1e6, 1e3, 3.0], (32, 4))
    yield "subnormal beside large", made(beside), None
    yield "the largest", made(np.where(rng.random((16, 32)) < 0.5, top, -top / 3)), None
    for scale2 in (2.0**-11, 0.003, 1.0, 2.0**-80, float(np.float32(2.0**-80) * np.float32(1.7)), 3e5, 2.0**-120):
        yield f"ties of {scale2:.3g}", made(ties(scale2, rng)), scale2 * 1.0001
        yield f"exact ties of {scale2:.3g}", made(ties(scale2, rng)), scale2


def check_quantize(device: str) -> int:
    """Amax, codes and scales of every source by every rule, byte for byte as NumPy; how many."""
    rtn, count = recipe_named("rtn"), 0
    for dtype in DTYPES:
        for name, dense, given in sources(dtype):
            x = to_torch(np.ascontiguousarray(dense), device)
            amax = finite_amax_numpy(dense)
            assert cuda.amax(x) == amax, (name, dtype)
            for like in LIKES:
                scale = rtn.tensor_scale(amax, like) if given is None else TensorScale(np.float32(given), fixed=True)
                check_encoded(x, dense, scale, like, (name, dtype, like))
                count += 1
    return count


def check_encoded(x: torch.Tensor, dense: np.ndarray, scale: TensorScale, like: Any, what: object) -> None:
    """Codes and scales of one array; None where NumPy refuses a block."""
    rtn = recipe_named("rtn")
    k = dense.shape[1]
    padded = np.pad(dense.astype(np.float32), ((0, 0), (0, -k % 16)))
    made = cuda.encode(x, scale, like)
    try:
        with np.errstate(over="ignore"):
            expected = rtn.encode(padded, dense.dtype, scale, like)
    except QuantizeError:
        assert made is None, what
        return
    assert made is not None, what
    for got, wanted in zip(made, expected, strict=True):
        try:
            assert_same_bytes(got, wanted)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None


def check_views(device: str) -> None:
    """Rows with gaps, columns with gaps, a transposed matrix, one that begins at an odd address, a negated view."""
    whole = np.random.default_rng(0).standard_normal((24, 97), np.float32)
    scale = TensorScale(np.float32(0.002))
    x = to_torch(whole, device)
    views = [(x[::2, :64], whole[::2, :64]), (x[:, 1:65], whole[:, 1:65]), (x[:, ::2], whole[:, ::2])]
    views += [(x.T, whole.T), (x.reshape(-1)[1:2049].reshape(32, 64), whole.reshape(-1)[1:2049].reshape(32, 64))]
    views += [(torch.complex(x, -x).conj().imag, whole)]
    for view, expected in views:
        assert cuda.amax(view) == finite_amax(expected)
        check_encoded(view, np.ascontiguousarray(expected), scale, "modelopt", view.shape)


def check_dequantize(device: str) -> int:
    """Rows and fragments as NumPy decodes them; how many."""
    count, rng = 0, np.random.default_rng(0)
    for (*experts, n, k), per_row in (((9, 88), False), ((18, 1040), True), ((2, 2, 3, 24), True), ((3, 5, 32), False)):
        weight = random_weight(rng, n, k, tuple(experts), per_row=per_row)
        for layout in (Rows(), Fragments("bfloat16"), Fragments("float16")):
            packed = layout.pack(weight)
            form = decode_cuda.ROWS if isinstance(layout, Rows) else layout.form
            buffers = packed.to(device).buffers() | as_matrix(weight, layout, device)
            for dtype in DTYPES if len(experts) == 2 else (DTYPES[count % 3],):
                got = decode_cuda.decode(form, buffers, packed.shape, dtype)
                assert_same_bytes(got, packed.unpack().dequantize(dtype))
                count += 1
    return count


def as_matrix(weight: Weight, layout: Any, device: str) -> dict[str, Any]:
    """Codes and scales of ``rows`` in the weight's own shape, as it decodes them; nothing for other layouts."""
    own = {"codes": weight.codes, "scales": weight.scales} if isinstance(layout, Rows) else {}
    return {name: to_torch(a, device) for name, a in own.items()}


def check_every_code(device: str) -> None:
    """Every code with every block scale, NaN and negative ones too, and scale2 of all sizes."""
    codes = np.tile(np.frombuffer(bytes.fromhex("1032547698badcfe"), np.uint8), (16, 16))
    for scale2 in (1.0, -3e-3, 2.0**-149, 3e38, np.inf, np.nan):
        weight = Weight(codes=codes, scales=np.arange(256, dtype=np.uint8).reshape(16, 16), scale2=scale2)
        moved = weight.torch(device)
        buffers = {"codes": moved.codes, "scales": moved.scales, "scale2": moved.scale2}
        for dtype in DTYPES[:2] if scale2 == 3e38 else DTYPES[:1]:
            with np.errstate(all="ignore"):
                expected = weight.dequantize(dtype).astype(np.float32)
            got = to_numpy(decode_cuda.decode(decode_cuda.ROWS, buffers, weight.shape, dtype)).astype(np.float32)
            assert np.array_equal(np.isnan(got), np.isnan(expected))
            assert_same_bytes(np.nan_to_num(got, nan=0), np.nan_to_num(expected, nan=0))


def check_embedding(device: str) -> int:
    """Rows that are named, again and again, and NaN for numbers that name none; how many calls."""
    count, rng = 0, np.random.default_rng(0)
    for k, per_row in ((48, True), (2080, False)):
        weight = random_weight(rng, 37, k, per_row=per_row)
        for layout in (Rows(), Fragments("bfloat16"), Fragments("float16")):
            packed = layout.pack(weight)
            expected = packed.unpack().dequantize("bfloat16")
            moved = packed.to(device)
            for ids in (
                np.array([0, 36, 5, 5, 20, 12], np.int32),
                np.array([3, -1, 37, 2**40 + 3, -(2**40)], np.int64),
            ):
                out = torch.empty(len(ids), k, dtype=torch.bfloat16, device=device)
                embedding.launch(EmbeddingArgs(ids=to_torch(ids, device), weight=moved, out=out))
                there = (ids >= 0) & (ids < 37)
                assert_same_bytes(to_numpy(out)[there], expected[ids[there]])
                assert np.isnan(to_numpy(out)[~there].astype(np.float32)).all()
                count += 1
    return count


def check_blocks(device: str) -> int:
    """Bytes by a table, and codes without those of zero blocks, as NumPy; from odd addresses, too; how many."""
    count, rng = 0, np.random.default_rng(0)
    table = rng.permutation(256).astype(np.uint8)
    there = to_torch(table, device)
    for size in (1, blocks.SIZE - 1, blocks.SIZE, 3 * blocks.SIZE + 5, 2 * blocks.PEAK, blocks.PEAK + 1):
        whole = rng.integers(0, 256, size + 1, np.uint8)
        for first in (0, 1):
            moved = to_torch(whole, device)[first : first + size]
            assert_same_bytes(blocks.recode(there, moved), table[whole[first : first + size]])
            assert int(blocks.peak(moved)) == whole[first : first + size].max()
            count += 1
    for shape in ((1, 1), (7, 33), (2, 3, blocks.BLOCKS)):
        scales = rng.integers(0, 4, shape, np.uint8)
        codes = rng.integers(0, 256, (*shape[:-1], 8 * shape[-1]), np.uint8)
        made = blocks.copy_without_zeros(to_torch(codes, device), to_torch(scales, device))
        assert_same_bytes(made, blocks.without_zero_blocks(codes, scales))
        assert not to_numpy(made).reshape(*shape, 8)[scales == 0].any()
        count += 1
    return count


def interpreted(*checks: str) -> list[str]:
    """What a process prints that runs some of these checks in Triton's interpreter."""
    tests = Path(__file__).parent
    paths = [str(tests.parent / "src"), str(tests), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-m", "gpu_codecs", *checks],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


if __name__ == "__main__":
    for check in sys.argv[1:]:
        print(globals()[f"check_{check}"]("cpu"))
