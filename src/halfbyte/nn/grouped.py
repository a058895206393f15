"""Group: several layers with the same input as one product; Part: one of them, in the place of its layer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import UsageError, WeightError
from halfbyte.layouts import Fragments, Layout, Packed, Rows
from halfbyte.nn.base import Quantized, kernel_for_one
from halfbyte.nn.linear import Linear
from halfbyte.ops import linear, pack
from halfbyte.weight import Fp8Weight, Weight, to_torch


class Group(Linear):
    """Layers with the same input, such as q, k and v or gate and up, as one product.

    Each output feature is the sum that its own layer would give; where the same kernel runs with the same split of K,
    bit for bit.

    Args:
        packed: (sum of sizes, K), the layers' rows one after the other.
        sizes: N of each layer.
        bias: of all rows as for Linear, or a list with that of each layer, None for one without.
        out_dtype: as for Linear.
        precision: as for Linear.
        input_scales: of each layer, where they differ: floats, None for a layer without. They are kept for
            ``weights``; a product that needs them (precision "w4a4") is refused.

    Raises:
        UsageError: sizes that do not add up, and as Linear.
    """

    input_scales: Tensor | None

    def __init__(
        self,
        packed: Packed | Weight,
        sizes: Sequence[int],
        bias: Any = None,
        *,
        out_dtype: Any = None,
        precision: str | None = None,
        input_scales: Sequence[Any] | None = None,
    ) -> None:
        own = tuple(int(size) for size in sizes)
        if sum(own) != packed.shape[-2] or min(own, default=-1) < 0:
            raise UsageError("the sizes do not add up to N", got=own, expected=packed.shape[-2])
        biases = bias if isinstance(bias, list | tuple) else [bias] * len(own)
        whole = _joined(own, biases) if isinstance(bias, list | tuple) else bias
        super().__init__(packed, whole, out_dtype=out_dtype, precision=precision)
        self.resize(own)
        self.biased = tuple(each is not None for each in biases)
        kept = None
        if input_scales is not None:
            if len(input_scales) != len(own):
                raise UsageError("the input scales do not fit the layers", got=len(input_scales), expected=len(own))
            numbers = [float("nan") if scale is None else float(scale) for scale in input_scales]
            kept = torch.tensor(numbers, dtype=torch.float32, device=self.held()["scale2"].device)
            if precision == "w4a4":
                raise UsageError(
                    "layers of different input scales are no one product in W4A4", got=numbers, hint="pass fuse=False"
                )
        self.register_buffer("input_scales", kept)

    def resize(self, sizes: Sequence[int]) -> None:
        """Say how many rows of each layer there are, where the weight was replaced."""
        self.sizes, self.starts = tuple(sizes), (0, *accumulate(sizes))[:-1]
        self._shared: tuple[Any, Any, dict[int, Tensor]] | None = None
        self._traced: tuple[Any, ...] | None = None

    @classmethod
    def of(
        cls,
        weights: Sequence[Weight],
        layout: Layout | str = "rows",
        biases: Sequence[Any] | None = None,
        **options: Any,
    ) -> Group:
        """The group of some weights, on their device: no bit of any changes, and different scale2 become per-row.

        Args:
            weights: of equal K.
            layout: a Layout or its key.
            biases: of each layer, None for one without; None if none has any.
            options: ``out_dtype`` and ``precision``.

        Raises:
            UsageError: biases that do not fit.
            WeightError: nothing to join, or parts of different K or pre_scale.
            LayoutError: a shape or value that the layout cannot hold.
        """
        if not weights:
            raise WeightError("a group needs at least one weight")
        inputs = [weight.input_scale for weight in weights]
        own = None
        if len({None if scale is None else float(scale) for scale in inputs}) > 1:
            own, weights = inputs, [weight.replace(input_scale=None) for weight in weights]
        packed = pack(Weight.concat(weights, policy="exact"), layout)
        bias = None if biases is None else list(biases)
        return cls(packed, [weight.n for weight in weights], bias, input_scales=own, **options)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The columns of each layer in a result of the group, as views."""
        return torch.split(y, list(self.sizes), -1)

    def parts(self) -> list[Part]:
        """A module for each layer."""
        return [Part(self, i) for i in range(len(self.sizes))]

    def weights(self) -> Iterator[tuple[str, Weight | Fp8Weight]]:
        """Nothing: the parts give theirs."""
        return iter(())

    def columns(self, x: Tensor, i: int) -> Tensor:
        """Layer i's columns of the product with x: of the one that another part has just made of the same x.

        The first part asked computes; each other takes its columns once, if x is still the same tensor and was not
        written to. Nothing is kept when the last took its own, or when x is gone.
        """
        state = id(x), x._version, x.requires_grad, torch.is_grad_enabled(), _stream(x)
        shared, kept = self._shared, self.__dict__  # torch's own __setattr__ takes long
        if shared is not None and shared[1] == state:
            own = shared[2].pop(i, None)
            if own is not None:
                if not shared[2]:
                    kept["_shared"] = None
                return own
        kept["_shared"] = None
        views = dict(enumerate(torch.split_with_sizes(self(x), self.sizes, -1)))  # three narrow() take thrice as long
        own = views.pop(i)
        if views:
            kept["_shared"] = weakref.ref(x, _forget(self)), state, views
        return own

    def columns_traced(self, x: Tensor, i: int) -> Tensor:
        """``columns`` while torch traces it: one product in the graph; that x was written to is an error there."""
        version, shared = x._version, self._traced
        if shared is not None and shared[0] is x and i in shared[3]:
            check: Any = torch._check
            check(shared[1] == version, lambda: "x was written to between two parts of a group")
            y, waiting = shared[2], shared[3] - {i}
        else:
            y, waiting = self(x), frozenset(range(len(self.sizes))) - {i}
        self.__dict__["_traced"] = (x, version, y, waiting) if waiting else None
        return self._own(y, i)

    def _own(self, y: Tensor, i: int) -> Tensor:
        return y.narrow(-1, self.starts[i], self.sizes[i])

    def extra_repr(self) -> str:
        """As of Linear, with the sizes."""
        return f"sizes={self.sizes}, {super().extra_repr()}"

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_shared": None, "_traced": None}


class Part(Quantized):
    """One layer of a Group, in its place in a model.

    Called with an x, it gives its columns of one product for all parts: a view, no copy. The first part owns the group
    as its child, so a state dict, ``.to()`` and the like see the weight once; the others refer to it. A copy of a model
    that has all of them keeps that.

    Whether x was written to between two parts is known by torch's count. While torch traces, a write is an error; of
    tensors that ``torch.inference_mode`` makes torch counts nothing: there each part multiplies its own rows, where
    the layout gives them as a view, and else the whole group.

    Args:
        group: the layers.
        i: which of them this is.

    Raises:
        UsageError: the group has no such layer.
    """

    group: Group

    def __init__(self, group: Group, i: int) -> None:
        super().__init__()
        if not 0 <= i < len(group.sizes):
            raise UsageError("the group has no such part", got=i, expected=f"0..{len(group.sizes) - 1}")
        self.index = i
        if i == 0:
            self.group = group
        else:
            self.__dict__["group"] = group  # not registered as a child
        self.in_features = group.in_features
        self._own: tuple[Packed, Packed] | None = None

    @property
    def out_features(self) -> int:
        """N of this layer."""
        return self.group.sizes[self.index]

    @property
    def _cuts(self) -> dict[str, tuple[int, int]] | None:
        start = self.group.starts[self.index]
        return _cuts(self.group.layout, self.group.shape, start, start + self.out_features)

    @property
    def layout(self) -> Layout:
        """Of the group."""
        return self.group.layout

    @property
    def bias(self) -> Tensor | None:
        """This layer's part of the group's, as a view; None if the layer has none."""
        whole, start = self.group.bias, self.group.starts[self.index]
        if whole is None or not self.group.biased[self.index]:
            return None
        return whole[start : start + self.out_features]

    @property
    def is_view(self) -> bool:
        """Whether the rows of this layer lie together in the group's layout."""
        return self._cuts is not None

    @property
    def packed(self) -> Packed:
        """This layer's weight in the group's layout: views of the group's buffers if ``is_view``, else a copy."""
        whole = self.group.packed
        if self._own is None or self._own[0] is not whole:
            cuts = self._cuts
            if cuts is None:
                unpacked: Any = whole.unpack()
                start = self.group.starts[self.index]
                return whole.layout.pack(unpacked.rows(start, start + self.out_features))
            shape = self.out_features, self.in_features
            self._own = whole, Packed(whole.layout, shape, _cut(whole.buffers(), cuts))
        return self._own[1]

    def weight(self) -> Weight:
        """This layer's weight, unpacked, with the scale2 and input_scale that it had."""
        group = self.group
        whole: Any = group.packed.unpack()
        own: Weight = whole.split(group.sizes)[self.index]
        if group.input_scales is not None:
            scale = group.input_scales[self.index]
            own = own.replace(input_scale=None if bool(scale.isnan()) else scale)
        return own

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """As of every Quantized: this layer alone."""
        yield "", self.weight()

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N), a view of the group's result."""
        if torch.compiler.is_compiling():
            return self.group.columns_traced(x, self.index)
        if x.is_inference():
            return self._alone(x)
        group: Any = (self._modules or self.__dict__)["group"]  # as self.group, which torch looks for last
        own: Tensor = group.columns(x, self.index)
        return own

    def _alone(self, x: Tensor) -> Tensor:
        """The product with this layer's rows, which no other part shares."""
        group = self.group
        if self._own is None and self._cuts is None:
            return group._own(group(x), self.index)
        y: Tensor = linear(x, self.packed, self.bias, out_dtype=group.out_dtype, precision=group.precision)
        return y

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of the layer."""
        kernel = kernel_for_one(self.group.packed, out_dtype=self.group.out_dtype)
        return (
            f"N={self.out_features}, K={self.in_features}, part {self.index} of {len(self.group.sizes)}, "
            f"layout={self.layout.key}, bias={self.group.biased[self.index]}, kernel={kernel}"
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_own": None}


def _cuts(layout: Layout, shape: tuple[int, ...], a: int, b: int) -> dict[str, tuple[int, int]] | None:
    """Where rows a..b of a matrix (N, K) lie in its buffers, of scale2 if it is per row; None if not together."""
    n, k = shape
    tile = 16 if isinstance(layout, Fragments) else 1
    if not isinstance(layout, Fragments | Rows) or a % tile or (b % tile and b != n):
        return None
    sizes = layout.sizes((tile, k)).items()
    return {name: (a // tile * each, -(-b // tile) * each) for name, each in sizes} | {"scale2": (a, b)}


def _cut(buffers: dict[str, Any], cuts: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """The buffers of some rows, as views."""
    found = dict(buffers)
    for name, (a, b) in cuts.items():
        if name != "scale2" or buffers[name].shape[0] != 1:
            found[name] = buffers[name][a:b]
    return found


def _joined(sizes: Sequence[int], biases: Sequence[Any]) -> Tensor | None:
    """The biases one after the other; where a layer has none -0, which changes no sum, not even -0."""
    given = [None if bias is None else to_torch(bias).detach() for bias in biases]
    shapes = [None if bias is None else tuple(bias.shape) for bias in given]
    if len(shapes) != len(sizes) or any(s not in (None, (n,)) for s, n in zip(shapes, sizes, strict=True)):
        raise UsageError("the biases do not fit the layers", got=shapes, expected=[(size,) for size in sizes])
    first = next((bias for bias in given if bias is not None), None)
    if first is None:
        return None
    none = [torch.full((size,), -0.0, dtype=first.dtype, device=first.device) for size in sizes]
    return torch.cat([own if bias is None else bias for own, bias in zip(none, given, strict=True)])


def _stream(x: Tensor) -> int:
    """What x's device is being given work on."""
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0


def _forget(group: Group) -> Any:
    """A function that lets go of a result when its x is gone; it does not hold the group."""
    of = weakref.ref(group)

    def forget(dead: Any) -> None:
        held = of()
        if held is not None and held._shared is not None and held._shared[0] is dead:
            held.__dict__["_shared"] = None

    return forget
