"""What stands for a quantized layer while transformers loads the rest of a model."""

from __future__ import annotations

from typing import Any

import torch


class Pending(torch.nn.Module):
    """A layer that has no data yet.

    Its one buffer is no part of a state dict, so no checkpoint is asked for it; transformers moves it where the layer
    belongs, and asks what an element of it takes: the layer's bytes.

    The parameters of the module whose place it takes are its attributes, on meta and told to be initialized: some
    models initialize the layers of a block by their names.

    Args:
        old: the module whose place it takes.
        nbytes: of the layer.
    """

    place: torch.Tensor

    def __init__(self, old: torch.nn.Module, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        for name, parameter in old.named_parameters(recurse=False):
            known: Any = parameter.detach().to("meta")
            known._is_hf_initialized = True
            setattr(self, name, known)
        self.register_buffer("place", torch.empty(1, dtype=torch.uint8, device="meta"), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """No layer yet."""
        raise RuntimeError("this layer has not been loaded")

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{self.nbytes} bytes"
