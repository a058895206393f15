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

WARPS: Final = 4
PEAK_BLOCKS: Final = 256
"""Blocks of a program that looks for the largest magnitude."""
ENCODE_BLOCKS: Final = 128
"""Blocks of a program that encodes."""

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
        self, kernel: Any, blocks: int, *arrays: Array, numbers: tuple[float, ...] = (), **constants: Any
    ) -> None:
        """Run one of the two kernels, on so many blocks a program."""
        chunks = -(-self.k // (blocks * BLOCK))
        with gpu.device_of(self.bits):
            kernel[(self.rows * chunks,)](
                *(self.bits, *arrays, self.stride, self.k, chunks, *numbers),
                KIND=self.kind,
                WHOLE=self.k % BLOCK == 0,
                BLOCKS=blocks,
                **constants,
                num_warps=WARPS,
                enable_fp_fusion=True,
            )


def amax(dense: Array) -> np.float32:
    """The largest magnitude of (N, K), or what is not finite; waits for the device."""
    import torch

    from halfbyte.recipes.cuda_code import peak

    top = torch.zeros(1, dtype=torch.int32, device=dense.device)
    if dense.numel():
        _Rows.of(dense).launch(peak, PEAK_BLOCKS, top)
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
        _Rows.of(dense).launch(
            *(cuda_code.encode, ENCODE_BLOCKS, codes.view(torch.int32), scales, top),
            numbers=(float(scale.scale2), float(full), float(divisor)),
            RULE=0 if like == "modelopt" else 1 if scale.divisor is None else 2,
            FIXED=scale.fixed,
            MODERATE=bool(2.0**-80 <= scale.scale2 <= 2.0**10),
            INTERPRETED=device.type == "cpu",
        )
    return None if scale.fixed and _float(top) > LARGEST_SCALE else (codes, scales)


def _float(bits: Array) -> np.float32:
    number: np.float32 = np.int32(bits.item()).view(np.float32)
    return number
