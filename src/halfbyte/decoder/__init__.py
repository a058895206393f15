"""Text from a transformers model, one token after the other, with little between the weights and the memory's speed.

``families`` takes a model apart, into ``product`` for layers that have the same input; ``step`` is one token's
computation, ``runner`` holds what steps share and the CUDA graph, ``loop`` is ``generate``; models that cannot be taken
apart run as ``whole``.
"""

from __future__ import annotations

from halfbyte.decoder.families import Decoder
from halfbyte.decoder.loop import Generated, generate

__all__ = ["Decoder", "Generated", "generate"]
