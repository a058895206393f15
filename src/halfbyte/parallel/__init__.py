"""Models split over ranks, on torch.distributed: tensor parallelism and expert parallelism.

``ColumnParallel``, ``RowParallel``, ``ExpertParallel`` and ``ExpertTensorParallel`` are styles that
``torch.distributed.tensor.parallel.parallelize_module`` takes. A checkpoint is loaded straight into ranks by
``halfbyte.hf.from_pretrained(..., mesh=...)``.
"""

from __future__ import annotations

from halfbyte.errors import MissingExtraError, UnavailableError

try:
    import torch
except ImportError:
    raise MissingExtraError("torch", "torch", "halfbyte.parallel") from None
if not torch.distributed.is_available():
    raise UnavailableError("this torch was built without torch.distributed", hint="install another build of torch")

from halfbyte.parallel.experts import LoadBalance, count_slots, load_balance
from halfbyte.parallel.ranks import Ranks, start
from halfbyte.parallel.styles import ColumnParallel, ExpertParallel, ExpertTensorParallel, RowParallel

__all__ = [
    "ColumnParallel",
    "ExpertParallel",
    "ExpertTensorParallel",
    "LoadBalance",
    "Ranks",
    "RowParallel",
    "count_slots",
    "load_balance",
    "start",
]
