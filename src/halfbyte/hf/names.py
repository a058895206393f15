"""Where the tensors of a checkpoint go in a transformers model, by the library's own renamings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


@dataclass(frozen=True)
class Place:
    """Where one tensor on disk goes.

    Attributes:
        keys: of the model's state dict; () where it has no place for the tensor.
        converted: whether the library makes them of several tensors, or parts one in several.
    """

    keys: tuple[str, ...]
    converted: bool = False


class Names:
    """The names of a model whose layers are still those of its definition.

    Args:
        model: a PreTrainedModel.

    Attributes:
        tensors: its state dict.
        transforms: what transformers renames and converts, of which ``was_used`` says whether a name needed it.
    """

    def __init__(self, model: Any) -> None:
        self.transforms = transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._of_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._prefix = model.base_model_prefix
        self.tensors: dict[str, Any] = model.state_dict()

    def of(self, name: str) -> Place:
        """Where the tensor ``name`` goes, by the rules with which transformers loads it."""
        key, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.tensors)
        if key not in self.tensors and name in self.tensors:
            key, pattern = rename_source_key(name, [], [], self._prefix, self.tensors)
        if pattern is None:
            return Place((key,) if key in self.tensors else ())
        first, *others = self._of_pattern[pattern].target_patterns
        keys = (key, *(key.replace(first, other) for other in others))
        return Place(tuple(k for k in keys if k in self.tensors), converted=True)
