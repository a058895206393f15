"""Models of transformers that run on NVFP4 weights.

Importing this registers the checkpoints of ModelOpt, and of packed buffers, with transformers: their
``AutoModelForCausalLM.from_pretrained(directory)`` works then. Other checkpoints load as before.
"""

from __future__ import annotations

from halfbyte.errors import MissingExtraError

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingExtraError(error.name or "transformers", "hf", "halfbyte.hf") from None

from halfbyte.hf.loading import from_pretrained
from halfbyte.hf.quantizer import HalfbyteConfig, HalfbyteQuantizer, register
from halfbyte.hf.quantizing import quantize_model
from halfbyte.hf.report import LoadReport, QuantizedLayer, QuantizeModelReport
from halfbyte.hf.saving import save_pretrained

__all__ = [
    "HalfbyteConfig",
    "HalfbyteQuantizer",
    "LoadReport",
    "QuantizeModelReport",
    "QuantizedLayer",
    "from_pretrained",
    "quantize_model",
    "save_pretrained",
]

register()
