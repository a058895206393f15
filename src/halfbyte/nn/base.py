"""What every module with a quantized weight has in common: its buffers, which casts leave alone, and its layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.kernels import EmbeddingArgs, EmbeddingCall, LinearArgs, select
from halfbyte.kernels.base import Call, capability
from halfbyte.layouts import Fragments, Layout, Packed, parse
from halfbyte.operands import as_packed
from halfbyte.weight import Fp8Weight, Weight, to_torch


class Quantized(torch.nn.Module):
    """A module with quantized weights. Each says its ``layout``, too."""

    def weights(self) -> Iterator[tuple[str, Weight | Fp8Weight]]:
        """What a checkpoint has of this module: (suffix, weight), where the suffix follows the module's name.

        Nothing where other modules give it.
        """
        return iter(())


class Holder(Quantized):
    """A module whose buffers are those of a Packed.

    ``.to(device)`` moves them; ``.to(dtype)``, ``.half()`` and the like leave them as they are: a weight has no other
    dtype. A state dict has them by their names, and the layout's key.

    Args:
        packed: NVFP4, in NumPy arrays or tensors; NumPy arrays become tensors.
    """

    layout: Layout
    shape: tuple[int, ...]

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.layout, self.shape, self._key = packed.layout, packed.shape, packed.key
        self._names = tuple(packed.buffers())
        for name, buffer in packed.buffers().items():
            self.register_buffer(name, to_torch(buffer).contiguous())
        self._packed: tuple[Packed, tuple[tuple[str, Tensor], ...]] | None = None

    @property
    def packed(self) -> Packed:
        """The weight as it is held; its buffers are the module's."""
        if self._packed is not None:
            made, of = self._packed
            own = self._buffers
            for name, buffer in of:
                if own[name] is not buffer:
                    break
            else:
                return made
        held = self.held()
        made = Packed(self.layout, self.shape, held)
        self._packed = made, tuple(held.items())
        return made

    def held(self) -> dict[str, Any]:
        """The buffers of ``packed`` by name."""
        return {name: self._buffers[name] for name in self._names}

    def weight(self) -> Weight:
        """The weight, unpacked. A method: models that cast to a weight's dtype see that it is no tensor."""
        unpacked: Any = self.packed.unpack()
        made: Weight = unpacked
        return made

    def weights(self) -> Iterator[tuple[str, Weight | Fp8Weight]]:
        """As of every Quantized: the weight itself."""
        yield "", self.weight()

    def get_extra_state(self) -> Tensor:
        """The layout's key as bytes: equally long buffers of another layout must not be read as this one's."""
        return torch.tensor(list(self._key.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """UsageError if a state dict's layout is not this module's."""
        key = bytes(state.tolist()).decode()
        if key != self._key:
            raise UsageError("the state dict holds another layout", got=key, expected=self._key)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """One scale2 may be loaded where this module has one for each row, and the reverse."""
        given, own = state_dict.get(f"{prefix}scale2"), self.held()["scale2"]
        *experts, n, _ = self.shape
        legal = (*experts, 1, 1), (*experts, n, 1)
        if given is not None and tuple(given.shape) in legal and given.shape != own.shape:
            self._buffers["scale2"] = own.new_empty(given.shape)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_packed": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        apply_to_all_but_weights(self, super()._apply, fn, recurse)
        return self


def apply_to_all_but_weights(
    module: torch.nn.Module, apply: Any, fn: Callable[[Tensor], Tensor], recurse: bool
) -> None:
    """``module._apply(fn)``, which moves the module's own buffers and does not cast them."""
    weights = {id(buffer) for buffer in module._buffers.values()}

    def move(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return moved if id(tensor) not in weights or moved.dtype == tensor.dtype else tensor.to(moved.device)

    apply(move, recurse)


def one_matrix(weight: Packed | Weight, what: str) -> Packed:
    """The weight as it is packed, a Weight as rows; UsageError where it has expert axes."""
    packed = as_packed(weight)
    if len(packed.shape) != 2:
        raise UsageError(f"{what} holds one matrix", got=packed.shape, expected="(N, K)")
    return packed


def without_data(
    layout: Layout | str,
    shape: tuple[int, ...],
    *,
    per_row: bool,
    input_scale: bool,
    pre_scale: bool,
    device: Any,
) -> Packed:
    """A Packed with unknown content.

    Raises:
        LayoutError: an unknown layout, or a shape that it cannot hold.
    """
    layout = parse(layout) if isinstance(layout, str) else layout
    *experts, n, k = shape
    sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        **{name: (torch.uint8, (*experts, size)) for name, size in layout.sizes(shape).items()},
        **dict.fromkeys(layout.extras, (torch.float32, ())),
        "scale2": (torch.float32, (*experts, n if per_row else 1, 1)),
        **({"input_scale": (torch.float32, tuple(experts))} if input_scale else {}),
        **({"pre_scale": (torch.float32, (k,))} if pre_scale else {}),
    }
    buffers = {name: torch.empty(extent, dtype=dtype, device=device) for name, (dtype, extent) in sizes.items()}
    return Packed(layout, shape, buffers)


def as_bias(bias: Any, shape: tuple[int, ...]) -> torch.nn.Parameter | None:
    """A bias as a parameter that is not trained; UsageError where it does not fit."""
    if bias is None:
        return None
    if tuple(bias.shape) != shape:
        raise UsageError("bias does not fit N", got=tuple(bias.shape), expected=shape)
    return bias if isinstance(bias, torch.nn.Parameter) else torch.nn.Parameter(to_torch(bias), requires_grad=False)


def as_dtype(dtype: Any, what: str) -> torch.dtype:
    """Torch's dtype of that name; UsageError where it is no float that kernels write."""
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise UsageError(f"{what} is unknown", got=str(dtype), expected="float32 or bfloat16 or float16")
    known: torch.dtype = found
    return known


def dtype_for(layout: Layout, device: torch.device) -> str:
    """The dtype of activations that a weight in a layout is most likely given."""
    return layout.dtype if isinstance(layout, Fragments) else "float32" if device.type == "cpu" else "bfloat16"


def kernel_for_one(packed: Packed, op: str = "linear", out_dtype: Any = None) -> str:
    """For ``repr``: which kernel computes one token, or why none does."""
    device: torch.device = packed.buffers()["scale2"].device
    if device.type == "meta":
        return "no kernel: no data yet"
    of: dict[str, Any] = {
        "rows": 1,
        "device": device.type,
        "library": "torch",
        "capability": capability(device.index) if device.type == "cuda" else 0,
    }
    dtype = dtype_for(packed.layout, device)
    to = dtype if out_dtype is None else str(out_dtype).removeprefix("torch.")
    try:
        if op == "embedding":
            return select(EmbeddingArgs, EmbeddingCall.of(packed, dtype="int64", out_dtype=to, **of)).name
        return select(LinearArgs, Call.on(packed, dtype=dtype, out_dtype=to, bias=False, **of)).name
    except HalfbyteError as error:
        nearest = str(error).rpartition("the nearest is ")[2].partition("; ")[0]
        return f"no kernel: {nearest}"


def weights_of(model: torch.nn.Module) -> Iterator[tuple[str, Weight | Fp8Weight]]:
    """The quantized weights of a model by the names of a checkpoint, one unpacked at a time.

    A Part gives its own rows, Experts the layers of each expert; what they are made of gives nothing more.
    """
    inside: str | None = None
    for name, module in model.named_modules():
        if not isinstance(module, Quantized) or (inside is not None and name.startswith(inside)):
            continue
        inside = f"{name}." if name else ""
        for suffix, weight in module.weights():
            yield ".".join(part for part in (name, suffix) if part), weight
