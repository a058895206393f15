"""Transformers models taken apart: the linear layers, norms and rotations that one step of decoding needs.

Taken apart are models of exactly these classes of transformers: LlamaForCausalLM, MistralForCausalLM,
MixtralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM and Qwen3MoeForCausalLM. Experts in NVFP4 run with ``route``, a
dense mixture of experts is called as it is. A model whose modules have hooks, or lie on several devices, is left to
run as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from halfbyte.errors import MissingExtraError, UsageError

try:
    import torch
    from torch import Tensor
    from torch.nn import Module
except ImportError:
    raise MissingExtraError("torch", "torch", "halfbyte.generate") from None

from halfbyte.decoder.product import Product, join, product, routed

FAMILIES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
WINDOWED: Final = ("MistralForCausalLM", "MixtralForCausalLM")
"""Those whose config alone says how many positions attention sees."""
ROTATIONS: Final = ("default", "linear", "llama3", "yarn")
"""Types of rope whose angles depend on the position alone."""
ACTIVATIONS: Final = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
"""Transformers' name of an activation -> that of ``gate``."""


@dataclass(frozen=True)
class Norm:
    """An RMS norm: weight (H,), and what is added to the mean square."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        before: the norm ahead of attention.
        qkv: (M, H) to (M, (Hq + 2 Hkv) D): q, k and v side by side.
        q_norm, k_norm: of each head, or None.
        window: how many of the last positions attention sees, or None for all.
        o: (M, Hq D) to (M, H).
        after: the norm ahead of the mlp.
        gate_up: (M, H) to (M, 2 I), gate first; None where ``down`` is the whole mlp.
        down: (M, I) to (M, H).
    """

    before: Norm
    qkv: Product
    q_norm: Norm | None
    k_norm: Norm | None
    window: int | None
    o: Product
    after: Norm
    gate_up: Product | None
    down: Product


@dataclass(frozen=True, eq=False)
class Decoder:
    """A model taken apart; ``Decoder.of`` makes it, ``generate`` uses it.

    Attributes:
        family: such as "LlamaForCausalLM".
        embed: (M,) numbers of tokens to (M, H).
        layers: in their order.
        norm: behind the last layer.
        head: (M, H) to (M, V).
        heads, kv_heads, dim: Hq, Hkv and D; of a model that is split over ranks this one's.
        scale: of the products of queries and keys.
        activation: of the mlp, by its name in ``gate``.
        longest: positions that the model's config allows.
        vocabulary: how many tokens there are.
        device, dtype: of the activations.
        read: bytes that a step reads.
        rotary: the module of the angles.
        seen: what tells that the model is still the one that was taken apart.
        runners: caches and graphs that ``generate`` keeps.
        ranks: over which the model is split, or None.
    """

    family: str
    embed: Callable[[Tensor], Tensor]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Product
    heads: int
    kv_heads: int
    dim: int
    scale: float
    activation: str
    longest: int
    vocabulary: int
    device: torch.device
    dtype: torch.dtype
    read: _Read
    rotary: Module
    seen: tuple[Any, ...]
    runners: dict[Any, Any]
    ranks: Any = None

    @staticmethod
    def of(model: Module, *, fuse_dense: bool = False) -> Decoder:
        """Take a model apart; what was made is kept with the model until its modules or tensors change.

        Args:
            model: of one of the families, its linear layers dense or NVFP4.
            fuse_dense: join the dense weights of q, k and v, and of gate and up, so that each is one product. Their
                parameters become views of the joint tensors; the memory in use stays the same.

        Raises:
            UsageError: a model that cannot be taken apart, and why.
        """
        reason = why_not(model)
        if reason:
            raise UsageError(f"this model cannot be taken apart: {reason}", got=type(model).__name__)
        if fuse_dense:
            for modules in _neighbours(model):
                join(modules)
        seen = _seen(model)
        known = _decoders.get(model)
        if known is None or known.seen != seen:
            known = _decoders[model] = _take_apart(model, seen)
        return known

    def bytes_per_step(self, batch: int, context: int) -> int:
        """What one step must read: weights, norms, the head, rows of the embedding, and keys and values.

        Of a mixture of experts, those that B tokens can choose at most.

        Args:
            batch: B.
            context: positions that attention reads for each of the B.
        """
        cached = 0
        for layer in self.layers:
            length = context if layer.window is None else min(context, layer.window)
            cached += 2 * batch * self.kv_heads * length * self.dim * self.dtype.itemsize
        return self.read.weights + self.read.experts(batch) + batch * self.read.row + cached

    def rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0..length-1: (length, D) float32, rounded as the model rounds them."""
        like = torch.empty(1, dtype=self.dtype, device=self.device)
        cos, sin = self.rotary(like, torch.arange(length, device=self.device)[None])
        return cos[0].float().contiguous(), sin[0].float().contiguous()


_decoders: Final[WeakKeyDictionary[Module, Decoder]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Read:
    """Bytes that a step reads.

    Attributes:
        weights: of every layer, the head and the norms.
        row: of the embedding.
        stacks: for each mixture of experts, bytes of all experts, how many there are, and how many a token chooses.
    """

    weights: int
    row: int
    stacks: tuple[tuple[int, int, int], ...]

    def experts(self, batch: int) -> int:
        return sum(size * min(count, batch * chosen) // count for size, count, chosen in self.stacks)


def ranks_of(model: Module) -> Any:
    """The ranks over which a model is split, as its layers know them; None for a whole one."""
    return next((module.ranks for module in model.modules() if hasattr(module, "ranks")), None)


def why_not(model: Module) -> str | None:
    """Why a model is not taken apart; None where it can be."""
    family = type(model).__name__
    if family not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return f"its class is none of {', '.join(FAMILIES)}"
    inner: Any = model.model
    config: Any = model.config
    devices = sorted({str(tensor.device) for tensor in _tensors(model)})
    if len(devices) != 1 or devices == ["meta"]:
        return f"its tensors lie on {' and '.join(devices)}"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            return f"its module {name or type(module).__name__} has hooks"
    rope = getattr(inner.rotary_emb, "rope_type", None)
    if rope not in ROTATIONS:
        return f"the angles of rope type {rope} depend on more than the position"
    if config.hidden_act not in ACTIVATIONS:
        return f"the activation {config.hidden_act} is none of {', '.join(ACTIVATIONS)}"
    if model.training and getattr(config, "attention_dropout", None):
        return "it is in training mode and has dropout; call model.eval()"
    attention: Any = inner.layers[0].self_attn
    turned = 2 * inner.rotary_emb.inv_freq.numel()
    if turned != attention.head_dim:
        return f"{turned} of {attention.head_dim} dimensions of a head are rotated"
    return None


def _take_apart(model: Module, seen: tuple[Any, ...]) -> Decoder:
    inner: Any = model.model
    config: Any = model.config
    attention = inner.layers[0].self_attn
    used = list(inner.layers[: config.num_hidden_layers])
    embedding = inner.embed_tokens
    head: Any = model.lm_head
    row = sum(tensor.nbytes for tensor in _tensors(embedding)) // config.vocab_size
    return Decoder(
        family=type(model).__name__,
        embed=_rows(embedding),
        layers=tuple(_layer(layer, type(model).__name__) for layer in used),
        norm=_norm(inner.norm),
        head=product([head]),
        heads=attention.q_proj.out_features // attention.head_dim,
        kv_heads=attention.k_proj.out_features // attention.head_dim,
        dim=attention.head_dim,
        scale=attention.scaling,
        activation=ACTIVATIONS[config.hidden_act],
        longest=config.max_position_embeddings,
        vocabulary=config.vocab_size,
        device=inner.norm.weight.device,
        dtype=inner.norm.weight.dtype,
        read=_read([*used, inner.norm, head], row),
        rotary=inner.rotary_emb,
        seen=seen,
        runners={},
        ranks=ranks_of(model),
    )


def _layer(layer: Any, family: str) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    window = attention.config.sliding_window if family in WINDOWED else None
    whole = not hasattr(mlp, "gate_proj")
    return Layer(
        before=_norm(layer.input_layernorm),
        qkv=product([attention.q_proj, attention.k_proj, attention.v_proj]),
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        window=getattr(attention, "sliding_window", window),
        o=product([attention.o_proj]),
        after=_norm(layer.post_attention_layernorm),
        gate_up=None if whole else product([mlp.gate_proj, mlp.up_proj]),
        down=(routed(mlp) or _whole(mlp)) if whole else product([mlp.down_proj]),
    )


def _rows(embedding: Any) -> Callable[[Tensor], Tensor]:
    """What looks rows up; of a dense table by indexing, for which torch has the quicker kernel on a GPU."""
    if type(embedding) is not torch.nn.Embedding or embedding.max_norm is not None:
        return cast("Callable[[Tensor], Tensor]", embedding.forward)
    table = embedding.weight.detach()
    return lambda ids: table[ids]


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


def _whole(mlp: Module) -> Product:
    def run(x: Tensor) -> Tensor:
        y: Tensor = mlp(x[:, None])
        return y[:, 0]

    return Product(run)


def _neighbours(model: Module) -> Iterator[list[Any]]:
    """The linear layers of a model that have the same input."""
    inner: Any = model.model
    for layer in inner.layers:
        yield [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
        if hasattr(layer.mlp, "gate_proj"):
            yield [layer.mlp.gate_proj, layer.mlp.up_proj]


def _tensors(module: Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _seen(model: Module) -> tuple[Any, ...]:
    """What tells that nothing in a model was replaced or moved since."""
    modules = tuple(id(module) for module in model.modules())
    return *modules, *((id(tensor), tensor.data_ptr()) for tensor in _tensors(model))


def _read(modules: Sequence[Module], row: int) -> _Read:
    """Bytes of what the modules hold, each tensor once; experts by themselves."""
    stacks: list[tuple[int, int, int]] = []
    weights: dict[int, int] = {}
    for top in modules:
        apart: set[int] = set()
        for module in top.modules():
            experts, gate = getattr(module, "experts", None), getattr(module, "gate", None)
            if isinstance(experts, Module) and isinstance(gate, Module):
                held = list(_tensors(experts))
                apart |= {id(tensor) for tensor in held}
                count, chosen = int(gate.num_experts), int(gate.top_k)  # type: ignore[arg-type]
                stacks.append((sum(tensor.nbytes for tensor in held), count, chosen))
        weights |= {id(tensor): tensor.nbytes for tensor in _tensors(top) if id(tensor) not in apart}
    return _Read(sum(weights.values()), row, tuple(stacks))
