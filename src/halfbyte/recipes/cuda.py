"""``rtn`` for CUDA tensors, by Triton: the bytes of NumPy.

One kernel finds the largest magnitude, which the host reads to compute scale2 as for any array; another chooses scales
and codes. An array that is refused is moved to the host, where NumPy finds the first value at fault.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from halfbyte import gpu
from halfbyte.arrays import dtype_name
from halfbyte.numerics import BLOCK, E2M1_MAX, Array
from halfbyte.recipes.base import LARGEST_SCALE, Like, TensorScale

PEAK: Final = 1024, 8
"""Blocks and warps of a program that looks for the largest magnitude."""
ENCODE: Final = 128, 2
"""Those of one that encodes."""
ENCODE_ANY: Final = 128, 4
"""The same with a scale2 that is not moderate: its divisions take more registers."""

_compiled: Final[dict[Any, Any]] = {}
_KINDS: Final = {"float32": 0, "bfloat16": 1, "float16": 2}


class _Rows(NamedTuple):
    """Values as kernels are told of them; a matrix without gaps or padding is one row."""

    bits: Any
    kind: int
    rows: int
    stride: int
    k: int

    @classmethod
    def of(cls, dense: Array) -> _Rows:
        """(N, K) float32, bfloat16 or float16, copied where the values of a row are no neighbours."""
        import torch

        dense = dense.detach().resolve_neg()
        if dense.stride(1) != 1:
            dense = dense.contiguous()
        kind, (rows, k), stride = _KINDS[dtype_name(dense.dtype)], dense.shape, dense.stride(0)
        if dense.is_contiguous() and k % BLOCK == 0:
            rows, k = 1, rows * k
        return cls(dense.view(torch.int32 if dense.itemsize == 4 else torch.int16), kind, rows, stride, k)

    def launch(
        self,
        kernel: Any,
        size: tuple[int, int],
        *arrays: Array,
        numbers: tuple[float, ...] = (),
        constants: tuple[Any, ...] = (),
    ) -> None:
        """Run one of the two kernels with so many blocks and warps a program."""
        blocks, warps = size
        chunks = -(-self.k // (blocks * BLOCK))
        fixed = self.kind, self.k % BLOCK == 0, blocks, *constants
        args = self.bits, *arrays, self.stride, self.k, chunks, *numbers, *fixed
        aligned = self.bits.data_ptr() % gpu.ALIGNED == 0
        key = kernel, self.bits.device.index, aligned, self.stride, self.k, fixed, warps
        gpu.launch(_compiled, key, kernel, self.rows * chunks, args, num_warps=warps, enable_fp_fusion=True)


def amax(dense: Array) -> np.float32:
    """The largest magnitude of (N, K), or what is not finite; waits for the device."""
    import torch

    from halfbyte.recipes.cuda_code import peak

    top = torch.zeros(1, dtype=torch.int32, device=dense.device)
    if dense.numel():
        _Rows.of(dense).launch(peak, PEAK, top)
    return _float(top)


def encode(dense: Array, scale: TensorScale, like: Like) -> tuple[Array, Array] | None:
    """Codes (N, ceil(K/16) * 8) and scales (N, G) of finite (N, K); None where a fixed scale2 leaves no room."""
    import torch

    from halfbyte.recipes import cuda_code

    (n, k), device = dense.shape, dense.device
    blocks = -(-k // BLOCK)
    codes = torch.empty(n, blocks * BLOCK // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(n, blocks, dtype=torch.uint8, device=device)
    top = torch.zeros(1, dtype=torch.int32, device=device)
    if dense.numel():
        divisor = np.float32(1) if scale.divisor is None else scale.divisor
        with np.errstate(over="ignore"):
            full = np.float32(E2M1_MAX) * scale.scale2
        rule = 0 if like == "modelopt" else 1 if scale.divisor is None else 2
        moderate = bool(2.0**-80 <= scale.scale2 <= 2.0**10)
        _Rows.of(dense).launch(
            *(cuda_code.encode, ENCODE if moderate else ENCODE_ANY, codes.view(torch.int32), scales, top),
            numbers=(float(scale.scale2), float(full), float(divisor)),
            constants=(rule, scale.fixed, moderate, device.type == "cpu"),
        )
    return None if scale.fixed and _float(top) > LARGEST_SCALE else (codes, scales)


def _float(bits: Array) -> np.float32:
    number: np.float32 = np.int32(bits.item()).view(np.float32)
    return number
