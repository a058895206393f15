"""Recipes: ways to choose scales and codes. The table below is the whole set; a new recipe adds one line."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from halfbyte import gpu
from halfbyte.errors import QuantizeError, UsageError
from halfbyte.numerics import BLOCK, Array, is_torch
from halfbyte.recipes import cuda
from halfbyte.recipes.base import (
    LIKES,
    Dense,
    Like,
    Recipe,
    TensorScale,
    chunks,
    contiguous,
    executor,
    finite_amax,
)
from halfbyte.recipes.rtn import Rtn
from halfbyte.weight import Weight, to_numpy

RECIPES: tuple[Recipe, ...] = (Rtn(),)

__all__ = [
    "LIKES",
    "RECIPES",
    "Like",
    "Recipe",
    "TensorScale",
    "finite_amax",
    "quantize",
    "quantize_array",
    "recipe_named",
]

_SOURCES = {np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)}


def recipe_named(name: str) -> Recipe:
    """The recipe of that name; another name raises UsageError."""
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    raise UsageError("unknown recipe", got=repr(name), expected=" or ".join(r.name for r in RECIPES))


def quantize(
    dense: Array, recipe: str = "rtn", like: Like = "modelopt", *, scale2: float | None = None, pad: bool = False
) -> Weight:
    """Quantize a dense matrix to NVFP4.

    Args:
        dense: (N, K) float32, bfloat16 or float16; a NumPy array, or a torch tensor on the CPU or, with Triton, CUDA.
        recipe: how scales and codes are chosen.
        like: whose order of operations, and so whose bytes: "modelopt" or "compressed-tensors".
        scale2: a second scale to use instead of the recipe's own, for example one that is shared.
        pad: accept a K that is not a multiple of 16: the last block is padded with zeros and the
            weight keeps the true K.

    Returns:
        The weight, in dense's library and on its device; the bytes do not depend on either.

    Raises:
        QuantizeError: NaN or Inf (with its position), a K that is not a multiple of 16, a dtype or
            rank that is not listed, or a block above 2688 x scale2.
        UsageError: an unknown recipe or peer.
    """
    if not hasattr(dense, "dtype"):
        raise QuantizeError("not an array", got=type(dense).__name__, expected="a NumPy array or a torch tensor")
    if is_torch(dense):
        if str(dense.dtype).removeprefix("torch.") not in {dtype.name for dtype in _SOURCES}:
            raise _not_dense(dense)
        if dense.device.type == "cpu":
            return quantize(to_numpy(dense), recipe, like, scale2=scale2, pad=pad).torch()
        reason = gpu.missing() if dense.device.type == "cuda" else None
        if reason or dense.device.type != "cuda":
            raise QuantizeError(
                "this quantizer runs on the CPU and, with Triton, on CUDA devices",
                got=str(dense.device),
                hint="pass dense.cpu()" + (f"; {reason}" if reason else ""),
            )
    chosen = recipe_named(recipe)
    if like not in LIKES:
        raise UsageError("unknown peer", got=repr(like), expected=" or ".join(LIKES))
    if dense.ndim != 2 or not (is_torch(dense) or dense.dtype in _SOURCES):
        raise _not_dense(dense)
    n, k = dense.shape
    if k % BLOCK and not pad:
        raise QuantizeError(
            f"K = {k} is not a multiple of {BLOCK}", got=(n, k), hint="pass pad=True, or leave this layer dense"
        )
    amax = _finite_amax_cuda(dense) if is_torch(dense) else finite_amax(dense)
    scale = chosen.tensor_scale(amax, like) if scale2 is None else _given(scale2)
    codes, scales = (_quantize_cuda if is_torch(dense) else quantize_array)(dense, chosen, scale, like)
    return Weight(codes=codes, scales=scales, scale2=scale.scale2, k=k)


def _finite_amax_cuda(dense: Any) -> np.float32:
    amax = cuda.amax(dense)
    return amax if np.isfinite(amax) else finite_amax(to_numpy(dense))  # NumPy names the first


def _quantize_cuda(dense: Any, recipe: Recipe, scale: TensorScale, like: Like) -> tuple[Any, Any]:
    return recipe.encode_cuda(dense, scale, like) or quantize_array(to_numpy(dense), recipe, scale, like)


def _not_dense(dense: Array) -> QuantizeError:
    return QuantizeError(
        "cannot quantize this array",
        got=f"{dense.dtype} {tuple(dense.shape)}",
        expected="(N, K) float32, bfloat16 or float16",
    )


def _given(scale2: float) -> TensorScale:
    with np.errstate(over="ignore", under="ignore"):
        number = np.float32(scale2)
    if not (np.isfinite(number) and number > 0):
        raise QuantizeError("scale2 must be positive and finite", got=scale2)
    return TensorScale(number, fixed=True)


def quantize_array(dense: Any, recipe: Recipe, scale: TensorScale, like: Like) -> tuple[Any, Any]:
    """Codes (N, ceil(K/16) * 8) and block scales (N, G) of a finite (N, K) array, in bounded scratch memory."""
    n, k = dense.shape
    blocks = -(-k // BLOCK)
    codes, scales = np.empty((n, blocks * BLOCK // 2), np.uint8), np.empty((n, blocks), np.uint8)
    if executor(dense.size) is None and all(
        recipe.encode_compiled(Dense.of(dense[rows]), scale, like, codes[rows], scales[rows])
        for rows in contiguous(dense)
    ):
        return codes, scales
    for rows in chunks(n, k):  # also where a block is refused: NumPy finds the first
        x = dense[rows].astype(np.float32, copy=False)
        if k % BLOCK:
            x = np.pad(x, ((0, 0), (0, blocks * BLOCK - k)))
        try:
            with np.errstate(over="ignore"):  # a scale that overflows is refused, or clipped
                codes[rows], scales[rows] = recipe.encode(x, dense.dtype, scale, like)
        except QuantizeError as error:
            if error.index is not None:
                error.index[0] += rows.start
            raise
    return codes, scales
