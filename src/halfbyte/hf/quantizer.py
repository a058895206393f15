"""The hook by which transformers loads such checkpoints: it reads what is dense, halfbyte the rest."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from halfbyte.checkpoint.reader import open_checkpoint
from halfbyte.errors import UsageError
from halfbyte.hf.filling import Filling, Options
from halfbyte.hf.pending import Pending
from halfbyte.operands import checked_dtype

METHOD: Final = "halfbyte"
"""``quant_method`` of packed checkpoints, and of those that ``halfbyte.hf.from_pretrained`` loads."""
METHODS: Final = ("modelopt", METHOD)


class HalfbyteConfig(QuantizationConfigMixin):
    """``quantization_config`` of a model whose quantized layers are halfbyte's.

    Args:
        section: as the checkpoint's config.json has it.
        method: what transformers chooses the quantizer by.
        options: how it is loaded; not part of ``to_dict``.
    """

    def __init__(
        self, section: Mapping[str, Any] | None = None, method: str = METHOD, options: Options | None = None
    ) -> None:
        self.section = dict(section or {})
        self.quant_method: Any = method
        self.options = options or Options()

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The config of a section of config.json."""
        made = cls(config_dict, config_dict.get("quant_method", METHOD))
        return (made, kwargs) if return_unused_kwargs else made

    def get(self, key: str, default: Any = None) -> Any:
        """An entry, as transformers asks a section of config.json for it."""
        return self.quant_method if key == "quant_method" else self.section.get(key, default)

    def to_dict(self) -> dict[str, Any]:
        """The section again."""
        return {"quant_method": self.quant_method} | copy.deepcopy(self.section)


class HalfbyteQuantizer(HfQuantizer):
    """Loads quantized layers packed.

    Before transformers loads, what the checkpoint holds is proven against the model, and placeholders without data
    stand for its quantized layers; after, the layers are made one by one where the placeholders lie.
    """

    requires_calibration = False

    def __init__(self, quantization_config: HalfbyteConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._filling: Filling | None = None

    def update_dtype(self, dtype: Any) -> Any:
        """The dtype itself; UsageError where no kernel takes activations of it."""
        checked_dtype(dtype, "the model's dtype")
        return dtype

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be loaded.

        Raises:
            UsageError: a dense model, or weights that are not to lie where they are computed with.
        """
        if not self.pre_quantized:
            raise UsageError("a dense model is not quantized by loading it", hint="use halfbyte.hf.quantize_model")
        device_map = kwargs.get("device_map")
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            hint = "name the GPUs in device_map or max_memory, or load all of it on the CPU"
            raise UsageError("NVFP4 layers are not offloaded", got=", ".join(sorted(places)), hint=hint)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        files = kwargs.get("checkpoint_files")
        if not files:
            raise UsageError("a quantized model is loaded from its files", expected="a directory or a hub name")
        if getattr(model.config, "distributed_config", None) is not None:
            raise UsageError("quantized layers are not split over ranks", hint="make shards with halfbyte shard --tp")
        folder = Path(files[0]).parent
        checkpoint = open_checkpoint(folder)
        shards = {Path(shard.file).name for shard in checkpoint.shards}
        if {Path(file).name for file in files} != shards:
            raise UsageError(
                "transformers chose other files than the directory's checkpoint",
                file=str(folder),
                got=sorted(Path(file).name for file in files)[:4],
                expected=sorted(shards)[:4],
            )
        config: Any = self.quantization_config
        self._filling = Filling(model, checkpoint, kwargs.get("dtype"), config.options)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.finish()
        return model

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Bytes of an element; that of a placeholder's is the whole layer."""
        path, _, name = param_name.rpartition(".")
        owner = model.get_submodule(path)
        if isinstance(owner, Pending) and name == "place":
            return owner.nbytes
        return float(param.element_size())

    def is_serializable(self) -> bool:
        """False: the model's own ``save_pretrained`` is halfbyte's, and transformers' cannot write these layers."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: NVFP4 weights have no gradient."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True."""
        return True


def register() -> None:
    """Tell transformers of the methods that are free; one that it has a loader for itself stays its own."""
    for method in METHODS:
        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING and method not in AUTO_QUANTIZER_MAPPING:
            register_quantization_config(method)(HalfbyteConfig)
            register_quantizer(method)(HalfbyteQuantizer)


def mark(model: Any, section: Mapping[str, Any], method: str = METHOD) -> None:
    """Make a model say of itself that its layers are quantized, as one that was loaded so does."""
    config = HalfbyteConfig(section, method)
    model.config.quantization_config = config
    model.hf_quantizer = HalfbyteQuantizer(config, pre_quantized=True)
    model.is_quantized = True
    model.quantization_method = method
    model.config._is_quantized = True
