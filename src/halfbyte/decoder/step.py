"""One token of each sequence through a model taken apart.

::

    tokens -> embed -> per layer [norm, qkv, attend, o, add and norm, gate_up, gate, down] -> norm -> head -> logits

On a GPU nothing here waits for the device, and all tensors that last are those of ``State``: a CUDA graph may hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.decoder.families import Decoder, Layer
from halfbyte.decoder.product import Product
from halfbyte.step_ops import InOrder, add_norm, attend, gate, gated


@dataclass(frozen=True, eq=False)
class State:
    """What the steps of a batch read and write, in tensors that stay where they are.

    Attributes:
        tokens: (B,) int64, the tokens that are computed next.
        counters: (2, B) int64: where their keys and values will be written, and how many rows of ``log`` are filled.
        log: (T, B) int64, the tokens that were chosen.
        keys, values: (layers, B, Hkv, T, D).
        cos, sin: (T, D) float32.
    """

    tokens: Tensor
    counters: Tensor
    log: Tensor
    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor

    @staticmethod
    def empty(decoder: Decoder, batch: int, length: int) -> State:
        """For B sequences of at most T tokens."""
        device = decoder.device
        shape = len(decoder.layers), batch, decoder.kv_heads, length, decoder.dim
        cos, sin = decoder.rotations(length)
        return State(
            tokens=torch.zeros(batch, dtype=torch.int64, device=device),
            counters=torch.zeros(2, batch, dtype=torch.int64, device=device),
            log=torch.zeros(length, batch, dtype=torch.int64, device=device),
            keys=torch.zeros(shape, dtype=decoder.dtype, device=device),
            values=torch.zeros(shape, dtype=decoder.dtype, device=device),
            cos=cos,
            sin=sin,
        )

    @property
    def positions(self) -> Tensor:
        """(B,), a view of the counters."""
        return self.counters[0]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(t.nbytes for t in (self.tokens, self.counters, self.log, self.keys, self.values, self.cos, self.sin))


def logits_of(decoder: Decoder, state: State) -> Tensor:
    """Compute ``state.tokens`` at ``state.positions``: their keys and values are cached, their logits (B, V) given."""
    x = decoder.embed(state.tokens)
    residual: Tensor | None = None
    for i, layer in enumerate(decoder.layers):
        norm = layer.before
        normed, residual = add_norm(x, residual, norm.weight, norm.eps, in_order=layer.qkv.takes_in_order(x))
        mixed = attend(
            layer.qkv(normed),
            state.cos,
            state.sin,
            state.positions,
            state.keys[i],
            state.values[i],
            scale=decoder.scale,
            q_norm=None if layer.q_norm is None else layer.q_norm.weight,
            k_norm=None if layer.k_norm is None else layer.k_norm.weight,
            eps=0.0 if layer.q_norm is None else layer.q_norm.eps,
            window=layer.window,
            settled=True,  # the choice of tokens, and embed, come behind what wrote them
            in_order=layer.o.takes_in_order(x),
        )
        norm, in_order = layer.after, _gated_in_order(layer, x, decoder.activation)
        normed, residual = add_norm(layer.o(mixed), residual, norm.weight, norm.eps, in_order=in_order)
        x = layer.down(_gated(layer.gate_up, normed, decoder.activation))
    normed, _ = add_norm(x, residual, decoder.norm.weight, decoder.norm.eps)
    return decoder.head(normed)


def _gated_in_order(layer: Layer, like: Tensor, activation: str) -> bool:
    """Whether both products of the mlp take activations in order: what the first one gives the second must take."""
    gate_up, down = layer.gate_up, layer.down
    return gate_up is not None and gate_up.takes_in_order(like, activation) and down.takes_in_order(like)


def _gated(gate_up: Product | None, x: Tensor | InOrder, activation: str) -> Tensor | InOrder:
    """The input of ``down``; x where that is the whole mlp."""
    if gate_up is None:
        return x
    if gate_up.packed is not None and (isinstance(x, InOrder) or x.is_cuda):
        return gated(x, gate_up.packed, activation, gate_up.bias)
    return gate(gate_up(x), activation)
