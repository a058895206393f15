"""The products that a step of a model is made of, told from the headers of its checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from halfbyte.cuts import COLUMN, ROW
from halfbyte.errors import UsageError
from halfbyte.experts import GATE_UP, numbered, spelled
from halfbyte.modules import Module, fp8_granularity
from halfbyte.numerics import BLOCK
from halfbyte.patterns import FUSED, SIBLINGS, has_two_inputs, is_head, is_router, module_class
from halfbyte.stored import DTYPE_BITS

Role = Literal["linear", "experts", "router", "head", "embedding", "vision", "other"]

_NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")
_TOWERS: Final = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|\w*tower|multi_modal_projector)(\.|$)")
PARTS: Final = {part: group for group in SIBLINGS for part in group}
"""Each layer of ``SIBLINGS``, and its group."""
_GATE_UP: Final = FUSED["gate_up_proj"]


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix that a step multiplies by, and how many like it there are.

    Attributes:
        name: of its module; layers that are one product have their names joined by "+".
        role: what it does in the model; an embedding is looked up, and "other" is no matrix.
        kind: of the weight, as of ``Module``.
        dtype: as its header has it.
        shape: (N, K); of "other" the tensor's own.
        per_row: the second scale, or the scale of an FP8 weight, may differ by row.
        pre_scale: activations are multiplied first.
        input_scale: there is one, by which W4A4 products round activations.
        bias: one is added.
        blocks: an FP8 weight has a scale for each block.
        experts: how many there are, of which a token takes some; None where it takes the one there is.
        stored: bytes in the checkpoint, of all ``count`` times ``experts``.
        count: how many.
    """

    name: str
    role: Role
    kind: str
    dtype: str
    shape: tuple[int, ...]
    per_row: bool = False
    pre_scale: bool = False
    input_scale: bool = False
    bias: bool = False
    blocks: bool = False
    experts: int | None = None
    stored: int = 0
    count: int = 1

    @property
    def values(self) -> int:
        """Bytes of a value that is stored dense."""
        return DTYPE_BITS.get(self.dtype, 16) // 8


def products(modules: Iterable[Module], fuse: bool = True) -> list[Product]:
    """The products of a model, those of the same form in several layers as one entry, in the order of the modules.

    Args:
        modules: of a checkpoint.
        fuse: q, k and v are one product, and so are gate and up, where all are NVFP4 and of one input.
    """
    listed = [module for module in modules if module.main is not None]
    single = [module for module in listed if numbered(module.name) is None]
    found = list(_fused(single) if fuse else map(_product, single))
    found += _experts([module for module in listed if numbered(module.name) is not None])
    merged: dict[Product, list[Product]] = defaultdict(list)
    for one in found:
        merged[replace(one, name=_NUMBER.sub(".*", one.name), stored=0)].append(one)
    return [replace(form, count=len(ones), stored=sum(one.stored for one in ones)) for form, ones in merged.items()]


def _product(module: Module) -> Product:
    main, name = module.main, module.name
    assert main is not None
    stacked = module.stack is not None
    *experts, n, k = module.shape if len(module.shape) > 1 else (0, 0)
    role: Role = "linear"
    if _TOWERS.search(name):
        role = "vision"
    elif module.kind in ("none", "unread") or (len(module.shape) != 2 and not stacked):
        role = "other"
    elif stacked:
        role = "experts"
    elif is_head(name):
        role = "head"
    elif is_router(name):
        role = "router"
    elif module_class(name, 2) == "Embedding":
        role = "embedding"
    granularity = fp8_granularity(module) if module.kind == "fp8" and "scale" in module.roles and not stacked else None
    halves = stacked and name.rpartition(".")[2] in GATE_UP
    return Product(
        name=name,
        role=role,
        kind=module.kind,
        dtype=main.dtype,
        shape=module.shape if role == "other" else (n, k),
        per_row=granularity == "row" or (halves and module.kind == "nvfp4"),
        pre_scale="pre_scale" in module.roles,
        input_scale="input_scale" in module.roles,
        bias="bias" in module.roles,
        blocks=granularity == "block",
        experts=experts[0] if stacked and experts else None,
        stored=sum(tensor.nbytes for tensor in module.tensors),
    )


def _fused(modules: list[Module]) -> Iterator[Product]:
    """The products of modules that are no experts of their own, with the parts of one input joined."""
    groups: dict[tuple[str, tuple[str, ...]], dict[str, Product]] = defaultdict(dict)
    for module in modules:
        parent, _, last = module.name.rpartition(".")
        own = () if has_two_inputs(parent) else PARTS.get(last, ())
        groups[(parent, own) if own else (module.name, own)][last] = _product(module)
    for (_, group), parts in groups.items():
        yield from _joined(parts, group) if group else parts.values()


def _joined(parts: Mapping[str, Product], order: tuple[str, ...]) -> Iterator[Product]:
    """One product where all parts are there and fit, else each."""
    ones = list(parts.values())
    fit = len({(one.shape[1:], one.kind, one.experts, one.role) for one in ones}) == 1 and len(ones) == len(order)
    if not fit or ones[0].kind != "nvfp4" or any(one.pre_scale for one in ones):
        yield from ones
        return
    ones = [parts[name] for name in order]
    parent = ones[0].name.rpartition(".")[0]
    joined = "+".join(order)
    yield replace(
        ones[0],
        name=f"{parent}.{joined}" if parent else joined,
        shape=(sum(one.shape[0] for one in ones), ones[0].shape[1]),
        per_row=True,
        bias=any(one.bias for one in ones),
        stored=sum(one.stored for one in ones),
    )


def _experts(modules: list[Module]) -> Iterator[Product]:
    """The products of experts that are stored one by one; gate and up of each are joined, as stacks hold them."""
    layers: dict[str, dict[str, dict[Product, list[Product]]]] = defaultdict(lambda: defaultdict(dict))
    for module in modules:
        place = numbered(module.name)
        assert place is not None
        part = spelled(module.name).rpartition(".")[2]
        one = replace(_product(module), name=f"{place[0]}.*.{part}")
        form = replace(one, role="experts", stored=0, input_scale=False)  # some may lack one, and are the same product
        layers[place[0]][part].setdefault(form, []).append(one)
    for parts in layers.values():
        made: dict[str, list[Product]] = {
            part: [
                replace(form, experts=len(ones), stored=sum(one.stored for one in ones)) for form, ones in forms.items()
            ]
            for part, forms in parts.items()
        }
        gate, up = (made.get(part, []) for part in _GATE_UP)
        if len(gate) == len(up) == 1:
            yield from _joined({"gate_proj": gate[0], "up_proj": up[0]}, _GATE_UP)
            made = {part: ones for part, ones in made.items() if part not in _GATE_UP}
        for ones in made.values():
            yield from ones


def on_a_rank(ones: Iterable[Product], ranks: int, config: Mapping[str, Any], dealt: bool) -> list[Product]:
    """What is left of products for each rank of tensor parallelism; a head has the most that a rank has.

    Args:
        ones: of a whole model.
        ranks: how many there are.
        config: config.json, which tells the heads.
        dealt: whether experts are dealt to the ranks whole; else each rank has columns of all.

    Raises:
        UsageError: a product that does not split.
    """
    return [one if one.role in ("vision", "other") else _on_a_rank(one, ranks, config, dealt) for one in ones]


def _on_a_rank(one: Product, ranks: int, config: Mapping[str, Any], dealt: bool) -> Product:
    parts = one.name.rpartition(".")[2].split("+")
    if one.role == "head":
        n = min(-(-one.shape[0] // (ranks * BLOCK)) * BLOCK, one.shape[0])
        return replace(one, shape=(n, one.shape[1]), stored=one.stored * n // one.shape[0])
    if one.role == "experts" and dealt:
        count = one.experts or 0
        return replace(one, experts=_share(one, "the number of experts", count, ranks, 1), stored=one.stored // ranks)
    n, k = one.shape
    if set(parts) <= COLUMN | {"gate_up_proj"} and one.role in ("linear", "experts"):
        return replace(one, shape=(_rows(one, parts, ranks, config), k), stored=one.stored // ranks)
    if set(parts) <= ROW and one.role in ("linear", "experts"):
        return replace(one, shape=(n, _share(one, "K", k, ranks, BLOCK)), stored=one.stored // ranks)
    return one


def _rows(one: Product, parts: list[str], ranks: int, config: Mapping[str, Any]) -> int:
    """N of a rank's part of a column-parallel product; heads of keys and values that are fewer are copied."""
    heads, n = number(config, "num_attention_heads"), one.shape[0]
    keys = number(config, "num_key_value_heads") or heads
    of = {"q_proj": heads, "k_proj": keys, "v_proj": keys}
    if heads is None or keys is None or not set(parts) <= of.keys():
        return _share(one, "N", n, ranks, len(parts) if len(parts) > 1 else 1)
    counts = [of[part] or 1 for part in parts]
    dim = n // sum(counts)
    own = [1 if ranks % count == 0 else _share(one, "the number of heads", count, ranks, 1) for count in counts]
    if "q_proj" in parts:
        own[parts.index("q_proj")] = _share(one, "the number of heads", heads, ranks, 1)
    return dim * sum(own)


def _share(one: Product, what: str, size: int, ranks: int, unit: int) -> int:
    if size % (ranks * unit):
        each = f" in multiples of {unit}" if unit > 1 else ""
        raise UsageError(f"{one.name}: {what} = {size} does not split over {ranks} ranks{each}")
    return size // ranks


def is_summed(one: Product) -> bool:
    """Whether the ranks' results of a product are added."""
    return one.role in ("linear", "experts") and set(one.name.rpartition(".")[2].split("+")) <= ROW


def touched(experts: int, taken: int, tokens: int) -> float:
    """How many experts are expected to be asked by so many tokens that take ``taken`` each, all equally likely."""
    return experts * (1 - (1 - taken / experts) ** tokens) if experts else 0.0


def text_configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """config.json's parts that may describe the language model, the most special first."""
    inner = [
        config[key] for key in ("text_config", "llm_config", "language_config") if isinstance(config.get(key), dict)
    ]
    return [*inner, config]


def number(config: Mapping[str, Any], *names: str) -> int | None:
    """The first whole number above 0 that one of the names has."""
    held = (part.get(name) for part in text_configs(config) for name in names)
    return next((value for value in held if type(value) is int and value > 0), None)


def cache_bytes(config: Mapping[str, Any], tokens: int, size: int, ranks: int = 1) -> int | None:
    """Bytes of the keys and values of so many tokens, of ``size`` bytes each, on each of the ranks; None where the
    config does not tell."""
    layers, heads = number(config, "num_hidden_layers"), number(config, "num_attention_heads")
    hidden = number(config, "hidden_size")
    if layers is None or heads is None or number(config, "kv_lora_rank"):
        return None
    width = number(config, "head_dim") or (hidden // heads if hidden else None)
    kv = number(config, "num_key_value_heads") or heads
    return None if width is None else 2 * layers * max(kv // ranks, 1) * width * size * tokens


def taken_by_a_token(config: Mapping[str, Any]) -> int | None:
    """How many experts a token takes; None where the config does not tell."""
    return number(
        config, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k",
        "top_k_experts",
    )  # fmt: skip
