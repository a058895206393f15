"""Activations as NVFP4, in the order that W4A4 kernels read: tiles of 64 with words of scales ready to use."""

from __future__ import annotations

from halfbyte.layouts import Tiles, Tiles64
from halfbyte.numerics import Array
from halfbyte.recipes import quantize


def quantize_activation(x: Array, global_scale: float) -> Tiles:
    """Quantize activations by a static global scale.

    A block with values above 2688 * global_scale is refused: a static scale must have room for what it meets.

    Args:
        x: (M, K) float32, bfloat16 or float16 with K a multiple of 64; a NumPy array or a torch tensor on the CPU.
        global_scale: positive; multiplies. The largest magnitude / 2688 uses the whole range.

    Returns:
        The tiles (m, K/64, 1): codes in rows, and for each tile one word of scales s0 s2 s1 s3, in the order of the
        tiles (``read_block_scale_word_linear``).

    Raises:
        QuantizeError: NaN or Inf, another dtype or rank, or a block that needs a larger global scale.
        LayoutError: a K that is not a multiple of 64.
    """
    packed = Tiles64("marlin").pack(quantize(x, scale2=global_scale, pad=True))
    m, k = packed.shape
    buffers = packed.buffers()
    return Tiles(
        codes=buffers["codes"],
        scales=buffers["scales"],
        grid=(m, k // 64, 1),
        m_axis=0,
        k_axis=1,
        scale_order="marlin",
        global_scale=buffers["scale2"].reshape(1),
    )
