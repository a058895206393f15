"""Humming's kernels (humming-kernels 0.1.20) beside ours: its layer, its choice of a kernel for each M, its launch.

It is compiled by nvcc, once for a shape and configuration, into HUMMING_CACHE_DIR. N must be a multiple of 64.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_subjects import Candidate, Result, Weights

MISSING = "not installed: python3 -m pip install --no-deps humming-kernels==0.1.20"
_SCHEMA = {"quant_method": "modelopt", "quant_algo": "nvfp4"}


def settle() -> None:
    """Where it keeps what it compiles, and with which compiler; it looks when it is imported."""
    folder = Path(tempfile.gettempdir()) / "halfbyte-humming"
    for name in ("CACHE", "TMP"):
        (folder / name.lower()).mkdir(parents=True, exist_ok=True)
        os.environ.setdefault(f"HUMMING_{name}_DIR", str(folder / name.lower()))
    os.environ.setdefault("HUMMING_COMPILER", "nvcc")


def missing() -> str | None:
    """Why it cannot be measured; None where it is there."""
    settle()
    try:
        import humming  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        return MISSING if error.name == "humming" else str(error)
    except Exception as error:  # it looks for compilers, and loads libraries
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _layer(n: int, k: int, codes: Any, scales: Any, scale2: Any) -> Any:
    """A layer that holds the weight as Humming's kernels read it."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    with torch.device("cuda"):
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=dict(_SCHEMA), torch_dtype=torch.bfloat16)
    layer.load_from_tensors(
        {"weight": codes, "weight_scale": scales.view(torch.float8_e4m3fn), "weight_scale_2": scale2.reshape(1)}
    )
    layer.transform()
    return layer


def compile_ahead(shapes: Iterable[tuple[int, int]], rows: Iterable[int]) -> None:
    """All that the shapes and numbers of rows will need, several at once."""
    from humming.kernel.humming import HummingKernel  # type: ignore[import-not-found]
    from humming.schema import BaseWeightSchema  # type: ignore[import-not-found]
    from humming.transform import prepare_layer_config  # type: ignore[import-not-found]
    from humming.tune import get_heuristics_config  # type: ignore[import-not-found]

    schema = BaseWeightSchema.from_config(dict(_SCHEMA)).to_humming_schema(torch.bfloat16)
    wanted = {}
    for n, k in shapes:
        config = prepare_layer_config(n, k, schema, torch_dtype=torch.bfloat16, device=0)
        for m in rows:
            tuning = get_heuristics_config(config, shape_m=m, device=0)
            kernel = {name: value for name, value in tuning.items() if name != "num_sms"}
            wanted[n, k, json.dumps(kernel)] = HummingKernel, json.loads(config.to_str()) | kernel
    HummingKernel.compile_many(wanted.values(), 0)
    zeros = torch.zeros(256, 256, dtype=torch.uint8, device="cuda")
    _layer(256, 512, zeros, zeros[:, :32], torch.ones(1, device="cuda"))  # what repacks is compiled once for all


def candidate(weights: Weights, x: Any, result: Result) -> Candidate:
    """Its product of bfloat16 activations."""
    from humming.kernel.humming import HummingKernel
    from humming.ops import launch_kernel  # type: ignore[import-not-found]
    from humming.tune import get_heuristics_config

    weight, names = weights.weight, ("weight", "weight_scale", "weight_scale_2")
    held = weights.copies(
        "humming",
        lambda: _Layer(_layer(weights.n, weights.k, weight.codes, weight.scales, weight.scale2), names),
        9 / 16 * weights.n * weights.k,
        _Layer.clone,
    )
    layer, out = held[0].layer, result.view(weights.n)
    tuning = get_heuristics_config(layer.humming_config, shape_m=x.shape[0], device=0)
    configs = HummingKernel.prepare_kernels(layer.humming_config.to_str(), None, tuning, 0)

    def call(i: int) -> None:
        launch_kernel(configs=configs, inputs=x, outputs=out, locks=layer.locks, **held[i].tensors)

    return Candidate("humming", "peer", call, len(held), out, weights, 8e-3, {"configuration": json.dumps(tuning)})


class _Layer:
    """A layer, and the tensors that a launch takes; copies share all but these."""

    def __init__(self, layer: Any, names: Iterable[str]) -> None:
        self.layer = layer
        self.tensors = {name: getattr(layer, name).data for name in names}

    def clone(self) -> _Layer:
        copy = _Layer(self.layer, ())
        copy.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return copy
