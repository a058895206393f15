"""``quantize_model``: the layers of a model that is in memory become NVFP4, in place and one after the other."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from halfbyte import gpu
from halfbyte.errors import HalfbyteError, QuantizeError, UsageError
from halfbyte.hf.choosing import Chosen, Matrix, stacks_of
from halfbyte.hf.fusing import experts_of, packed_for, siblings
from halfbyte.hf.quantizer import mark
from halfbyte.hf.report import QuantizedLayer, QuantizeModelReport
from halfbyte.hf.saving import attach
from halfbyte.layouts import Layout, parse
from halfbyte.nn import Embedding, Group, Linear, TiedLinear
from halfbyte.numerics import BLOCK
from halfbyte.patterns import Patterns, fused_group, is_head
from halfbyte.recipes import finite_amax, quantize, recipe_named
from halfbyte.weight import Weight, to_numpy

_SECTION = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
_CHUNK = 4 << 20
"""Values that an error is measured of at once."""
_TRIM = 64 << 20
"""Bytes that are freed before the system gets them back."""


@torch.no_grad()
def quantize_model(
    model: Any,
    recipe: str = "rtn",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    share_scale2: bool = False,
    fuse: bool = True,
    layout: Layout | str | None = None,
) -> QuantizeModelReport:
    """Quantize the linear layers and experts of a model, in place, where they lie.

    The weights are those that ``halfbyte.quantize_checkpoint`` makes of the same model, byte for byte. Each dense
    weight is freed when its module is replaced. Whatever is refused is refused before the first is. Where memory ends
    in between, or the run is interrupted, each layer is dense or NVFP4, the model runs, and a second call goes on.

    Args:
        model: a torch.nn.Module with weights in float32, bfloat16 or float16; ``save_pretrained`` of a PreTrainedModel,
            or of one inside, then writes a ModelOpt checkpoint.
        recipe: as for ``halfbyte.quantize``.
        include: patterns of modules to quantize instead of the default: every linear layer with K % 16 == 0, but
            output heads and routers. Each expert's layers have names such as ``model.layers.0.mlp.experts.3.up_proj``.
        exclude: patterns of modules to leave as they are.
        share_scale2: one scale2 for the parts of a layer that engines fuse (q/k/v, gate/up).
        fuse: whether such parts run as one product.
        layout: for all of them; by default "fragments" of the weights' dtype on an NVIDIA GPU where Triton is at hand,
            else "rows".

    Returns:
        What became of each matrix.

    Raises:
        QuantizeError: a weight with NaN or Inf, or of another dtype; it names the weight and the first place.
        UsageError: nothing to quantize; a weight on the meta device or with hooks; a tied weight or an expert that is
            to be quantized without the others; an unknown recipe; a model that is split over ranks.
        LayoutError: a layout that cannot hold a weight.
    """
    begin = time.perf_counter()
    if any(hasattr(module, "ranks") for module in model.modules()):
        raise UsageError("the model is split over ranks", hint="quantize it whole, save it, and load that with a mesh")
    chosen = Chosen(model, Patterns(include), Patterns(exclude))
    run = _Run(model, chosen, recipe, share_scale2, parse(layout) if isinstance(layout, str) else layout)
    try:
        run.replace_all(fuse)
    finally:
        if run.layers:
            _mark(model)
    return QuantizeModelReport(
        layers=tuple(run.layers),
        skipped=tuple(chosen.skipped.items()),
        notes=(*chosen.idle(), *run.notes),
        error=run.error,
        seconds=time.perf_counter() - begin,
    )


class _Run:
    """Checks all weights, then replaces module after module.

    Attributes:
        layers: what was done.
        notes: of layouts.
    """

    def __init__(self, model: Any, chosen: Chosen, recipe: str, share: bool, layout: Layout | None) -> None:
        self._model, self._chosen, self._layout = model, chosen, layout
        self._recipe = recipe_named(recipe)
        self.layers: list[QuantizedLayer] = []
        self.notes: list[str] = []
        self._wrong = self._total = 0.0
        self._freed = 0
        peaks = {layer.name: self._peak(layer) for layer in chosen.layers}
        if share:
            groups: dict[str, list[str]] = defaultdict(list)
            for name in peaks:
                groups[group[0] if (group := fused_group(name)) else name].append(name)
            peaks = {name: max(peaks[n] for n in names) for names in groups.values() for name in names}
        self._scale2 = {n: float(self._recipe.tensor_scale(peak, "modelopt").scale2) for n, peak in peaks.items()}

    @property
    def error(self) -> float:
        """Of all layers together."""
        return (self._wrong / self._total) ** 0.5 if self._total else 0.0

    def _peak(self, layer: Matrix) -> np.float32:
        """The largest magnitude of a weight that can be quantized.

        Raises:
            HalfbyteError: it cannot, and why.
        """
        dense = layer.of(self._model)
        if dense.device.type == "meta":
            raise UsageError("the weight is on the meta device: it has no data", tensor=layer.name)
        if dense.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            known = "float32, bfloat16 or float16"
            raise QuantizeError("cannot quantize this weight", tensor=layer.name, got=str(dense.dtype), expected=known)
        if self._layout is not None and (reason := self._layout.needs(dense.shape)):
            raise UsageError(f"layout {self._layout.name} cannot hold the weight: {reason}", tensor=layer.name)
        low, high = torch.aminmax(dense) if dense.numel() else (dense.new_zeros(()), dense.new_zeros(()))
        peak = np.float32(max(-low.float().item(), high.float().item()))
        if not np.isfinite(peak):
            with _named(layer.name):
                finite_amax(to_numpy(dense))  # names the first
        return peak

    def replace_all(self, fuse: bool) -> None:
        """Replace the modules, those of one product together."""
        groups = {path: group for group in (siblings(self._fusable()) if fuse else ()) for path in group}
        freed = 0
        for name in self._chosen.paths:
            if self._freed - freed >= _TRIM:
                freed = self._freed
                _give_back()
            group = groups.get(name, (name,))
            if len(group) > 1:
                if group[0] == name:
                    self._replace_group(group)
            elif "weight" in self._model.get_submodule(name)._parameters:
                self._replace(name)
            else:
                self._replace_experts(name)
        _give_back()

    def _fusable(self) -> Iterator[str]:
        """Linear layers whose weight is their own."""
        for name, paths in self._chosen.paths.items():
            if len(paths) == 1 and type(self._model.get_submodule(name)) is torch.nn.Linear:
                yield name

    def _replace(self, name: str) -> None:
        old, (path, *others) = self._model.get_submodule(name), self._chosen.paths[name]
        weight = self._quantized(Matrix(name, name))
        packed, note = packed_for(weight, self._layout, old.weight.dtype)
        self._noted(name, note)
        new: Any
        if isinstance(old, torch.nn.Embedding):
            new = Embedding(packed, dtype=old.weight.dtype)
        else:
            new = Linear(packed, old.bias, out_dtype="float32" if is_head(name) else None)
        self._put(path, new)
        for other in others:
            same = self._model.get_submodule(other) is old
            self._put(other, new if same else TiedLinear(new, out_dtype="float32" if is_head(other) else None))

    def _replace_group(self, names: Sequence[str]) -> None:
        old = [self._model.get_submodule(name) for name in names]
        weights = [self._quantized(Matrix(name, name)) for name in names]
        packed, note = packed_for(Weight.concat(weights, policy="exact"), self._layout, old[0].weight.dtype)
        self._noted(names[0], note)
        group = Group(packed, [weight.n for weight in weights], [module.bias for module in old])
        for name, part in zip(names, group.parts(), strict=True):
            self._put(name, part)

    def _replace_experts(self, name: str) -> None:
        old = self._model.get_submodule(name)
        packed = []
        for parameter, parts in stacks_of(old).items():
            whole = getattr(old, parameter)
            layers = [
                Matrix(f"{name}.{e}.{part}", name, parameter, e, (i, len(parts)))
                for e in range(len(whole))
                for i, part in enumerate(parts)
            ]
            weight = self._stacked(f"{name}.{parameter}", whole, layers)
            made, note = packed_for(weight, self._layout, whole.dtype)
            packed.append(made)
            self._noted(f"{name}.{parameter}", note)
        self._put(name, experts_of(old, *packed))

    def _stacked(self, name: str, whole: Tensor, layers: Iterable[Matrix]) -> Weight:
        """The layers of all experts of a parameter (E, N, K) as one weight."""
        (e, n, k), device = whole.shape, whole.device
        codes = torch.empty(e, n, k // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(e, n, k // BLOCK, dtype=torch.uint8, device=device)
        scale2 = torch.empty(e, n, 1, dtype=torch.float32, device=device)
        wrong = total = 0.0
        for layer in layers:
            (i, of), at = layer.half, layer.expert
            rows = slice(i * n // of, (i + 1) * n // of)
            part, w, t = self._encoded(layer)
            codes[at, rows], scales[at, rows], scale2[at, rows] = part.codes, part.scales, part.scale2
            wrong, total = wrong + w, total + t
        if bool((scale2 == scale2[:, :1]).all()):
            scale2 = scale2[:, :1].contiguous()
        weight = Weight(codes=codes, scales=scales, scale2=scale2)
        self._done(name, whole, weight, wrong, total)
        return weight

    def _quantized(self, layer: Matrix) -> Weight:
        weight, wrong, total = self._encoded(layer)
        self._done(layer.name, layer.of(self._model), weight, wrong, total)
        return weight

    def _encoded(self, layer: Matrix) -> tuple[Weight, float, float]:
        """The weight, and the sums of squares of its error and of its values."""
        dense = layer.of(self._model).detach()
        on_cpu = dense.device.type != "cuda" or gpu.missing() is not None
        with _named(layer.name):
            made = quantize(dense.cpu() if on_cpu else dense, self._recipe.name, scale2=self._scale2[layer.name])
        weight = made.torch(dense.device)
        return weight, *_squares(dense, weight)

    def _done(self, name: str, dense: Tensor, weight: Weight, wrong: float, total: float) -> None:
        self._wrong, self._total = self._wrong + wrong, self._total + total
        error = (wrong / total) ** 0.5 if total else 0.0
        self._freed += dense.nbytes
        self.layers.append(QuantizedLayer(name, tuple(dense.shape), error, dense.nbytes, weight.nbytes))

    def _noted(self, name: str, note: str | None) -> None:
        if note is not None:
            self.notes.append(f"{name} is packed as {note}")

    def _put(self, path: str, new: torch.nn.Module) -> None:
        parent, _, child = path.rpartition(".")
        owner = self._model.get_submodule(parent)
        new.train(getattr(owner, child).training)
        setattr(owner, child, new)


def _mark(model: torch.nn.Module) -> None:
    """Let transformers know of the models that are not inside others; each of those inside can be saved, too."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not name.startswith(inside or ("\0",)):
            mark(module, _SECTION, "modelopt")
            inside = (*inside, f"{name}." if name else "")
    attach(model)


def _squares(dense: Tensor, weight: Weight) -> tuple[float, float]:
    """``sum((q - w)^2)`` and ``sum(w^2)``.

    On the CPU by NumPy: torch's threads and those that dequantize would wait for each other.
    """
    on_cpu, (n, k) = dense.device.type == "cpu", dense.shape
    rows: Any = to_numpy(dense) if on_cpu else dense
    of, sums = weight.numpy() if on_cpu else weight, [0.0, 0.0]
    step = max(1, _CHUNK // max(k, 1))
    for a in range(0, n, step):
        b = min(a + step, n)
        w = rows[a:b].astype(np.float32) if on_cpu else rows[a:b].to(torch.float32)
        q: Any = of.rows(a, b).dequantize("float32")
        q -= w
        for i, x in enumerate((q, w)):
            by_row = np.einsum("ij,ij->i", x, x) if on_cpu else (x * x).sum(1)
            sums[i] += float(by_row.sum(dtype=np.float64 if on_cpu else torch.float64))
    return sums[0], sums[1]


def _give_back() -> None:
    """Let the system have freed memory: glibc keeps blocks of up to 32 MB for what it is asked for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Give an error about a weight the weight's name."""
    try:
        yield
    except HalfbyteError as error:
        error.tensor = error.tensor or name
        raise
