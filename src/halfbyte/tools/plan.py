"""``plan``: what each layer of a checkpoint runs on, how long that takes, and the memory held; from headers alone."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any, Final

from halfbyte.checkpoint.reader import Checkpoint, open_checkpoint, without_collection
from halfbyte.errors import HalfbyteError, LayoutError, NoKernelError, UnavailableError, UsageError
from halfbyte.findings import Report
from halfbyte.forms import ExpertsForm, Form
from halfbyte.layouts import parse
from halfbyte.modules import refuse_broken
from halfbyte.plans import Plan, ceiling, dense_kernel, least
from halfbyte.plans import plan as plan_call
from halfbyte.products import (
    PARTS,
    Product,
    cache_bytes,
    is_summed,
    number,
    on_a_rank,
    products,
    taken_by_a_token,
    touched,
)

TOKENS: Final = (1, 16, 512)
PRECISIONS: Final = ("exact", "int8", "fp8", "w4a4")
DTYPES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Of activations, and bytes of a value."""
ACTIVATIONS: Final = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
"""A config's name of an activation -> that of ``halfbyte.nn.Experts``."""
DOWN: Final = ("down_proj", "w2")


@without_collection()
def plan(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    tokens: Sequence[int] = TOKENS,
    precision: str = "exact",
    dtype: str | None = None,
    layout: str | None = None,
    fuse: bool = True,
    ranks: int = 1,
    expert_parallel: bool = False,
) -> Report:
    """Tell, of a checkpoint that is loaded nowhere, which kernels would run it.

    Args:
        path: a directory, a file, or a hub name.
        device: as for ``halfbyte.plan``: "cpu", "cuda", or "cuda:sm_90" for a GPU that need not be here.
        tokens: numbers of tokens in a step.
        precision: "exact", "int8", "fp8" or "w4a4".
        dtype: of activations; by default the config's, or bfloat16.
        layout: of NVFP4 weights; by default "fragments" on a GPU and "rows" elsewhere.
        fuse: q, k and v run as one product, and gate and up.
        ranks: over which the model is split by tensor parallelism; products and memory are those of one of them.
        expert_parallel: experts are dealt to the ranks whole; else each rank has columns of all.

    Returns:
        A report; its facts are "path", "dialect", "device", "gpu", "read" (bytes a second that the GPU reads at most),
        "precision", "dtype", "fused", "ranks", "tokens", "layers" (each with "plans", one for each number of tokens),
        "steps" (one for each number of tokens), "memory" (bytes by what they are for) and "notes". Times are in
        seconds, and None where nothing is known.

    Raises:
        FormatError: a checkpoint whose headers cannot be read or are not sound.
        HalfbyteError: nothing in it is quantized.
        LayoutError: ``layout`` cannot hold one of the weights.
        UnavailableError: a GPU that is not here.
        UsageError: an option that is not known.
    """
    counts = _checked(tokens, precision, dtype, layout)
    if not 1 <= ranks <= 1024 or (expert_parallel and ranks == 1):
        raise UsageError("ranks are from 1 to 1024, and experts are dealt to 2 or more", got=ranks)
    with open_checkpoint(path) as checkpoint:
        checkpoint.require_readable()
        for module in checkpoint.modules:
            refuse_broken(module)
        listed = products(checkpoint.modules, fuse)
        if not any(one.kind in ("nvfp4", "fp8") for one in listed):
            raise HalfbyteError(
                "nothing here is quantized to NVFP4 or FP8, so there is nothing to plan",
                file=str(checkpoint.path),
                got=checkpoint.dialect_name,
                hint="halfbyte quantize makes an NVFP4 checkpoint of a dense one",
            )
        if expert_parallel and not any(one.role == "experts" for one in listed):
            raise UsageError("there are no experts to deal to the ranks", hint="leave expert_parallel out")
        if ranks > 1:
            listed = on_a_rank(listed, ranks, checkpoint.config, expert_parallel)
        planner = _Planner(checkpoint, listed, device, precision, dtype, layout)
        if ranks > 1:
            planner.split(ranks, expert_parallel)
        layers = [layer for layer in (planner.layer(*ones, counts=counts) for ones in planner.paired()) if layer]
        steps = [planner.step(layers, i, count) for i, count in enumerate(counts)]
        facts: dict[str, Any] = {
            "path": str(checkpoint.path),
            "dialect": checkpoint.dialect_name,
            "device": device,
            "gpu": planner.gpu,
            "read": planner.ceiling.read if planner.ceiling else None,
            "precision": precision,
            "dtype": planner.dtype,
            "fused": fuse,
            "ranks": ranks,
            "tokens": counts,
            "layers": layers,
            "steps": steps,
            "memory": planner.memory(layers),
            "notes": list(dict.fromkeys(planner.notes)),
        }
        return Report("plan", (), facts)


def _checked(tokens: Sequence[int], precision: str, dtype: str | None, layout: str | None) -> list[int]:
    counts = list(dict.fromkeys(tokens))
    wrong = next((count for count in counts if not 1 <= count <= 1 << 24), None)
    if not counts or wrong is not None:
        raise UsageError("tokens of a step are from 1 to 16777216", got=wrong)
    if precision not in PRECISIONS:
        raise UsageError("unknown precision", got=repr(precision), expected=" or ".join(PRECISIONS))
    if dtype is not None and dtype not in DTYPES:
        raise UsageError("unknown dtype", got=repr(dtype), expected=" or ".join(DTYPES))
    if layout is not None:
        parse(layout)
    return counts


class _Planner:
    """One checkpoint on one device."""

    def __init__(
        self, checkpoint: Checkpoint, listed: list[Product], device: str, precision: str, dtype: str | None,
        layout: str | None,
    ) -> None:  # fmt: skip
        self.config = checkpoint.config
        self.device, self.precision, self.asked = device, None if precision == "exact" else precision, layout
        self.kind = device.partition(":")[0]
        self.gpu, self.ceiling = ceiling(device)
        if self.kind == "cuda" and not device.startswith("cuda:sm_") and self.gpu is None:
            raise UnavailableError(
                "torch sees no such GPU here", got=device, hint="name one by what it can do: --device cuda:sm_90"
            )
        stated = self.config.get("dtype", self.config.get("torch_dtype"))
        self.dtype = dtype or (stated if stated in DTYPES else "bfloat16")
        self.listed = listed
        self.ranks, self.sums = 1, 0
        self.notes: list[str] = []
        self.library: Any = None if self.kind == "cuda" else _library(self.notes)
        self.taken = taken_by_a_token(self.config)
        self.hidden = number(self.config, "hidden_size") or 0
        self.run = self._run()
        self._say()

    def split(self, ranks: int, dealt: bool) -> None:
        """Say what is between the ranks, and count what a rank's experts are asked for."""
        self.ranks = ranks
        if dealt and self.taken is not None:
            self.taken = ceil(self.taken / ranks)
        self.sums = sum(one.count for one in self.run if is_summed(one))
        self.notes.append("products and memory are those of one rank; what the ranks exchange takes time of its own")
        if self.tied:
            self.notes.append("a head that is tied to the embedding is whole on every rank")

    def _run(self) -> list[Product]:
        """What a step of the language model computes; a head that is tied to the embedding is added."""
        found = [one for one in self.listed if one.role not in ("other", "vision")]
        embedding = next((one for one in found if one.role == "embedding"), None)
        self.tied = embedding is not None and not any(one.role == "head" for one in found)
        tied = self.tied and self.config.get("tie_word_embeddings", True)
        if tied and embedding is not None:
            head = Product(
                name="lm_head (the embedding)", role="head", kind=embedding.kind, dtype=embedding.dtype,
                shape=embedding.shape, per_row=embedding.per_row,
            )  # fmt: skip
            found.append(head)
        return [one for one in found if one.role != "embedding" or one.kind == "nvfp4"]

    def _say(self) -> None:
        dense = [one for one in self.run if one.kind == "dense"]
        for one in dense:
            self.notes.append(f"{one.name} is dense: the checkpoint holds it as {one.dtype}")
        for one in self.run:
            if one.kind not in ("dense", "nvfp4", "fp8"):
                self.notes.append(f"{one.name} is {one.kind}, which no kernel runs: halfbyte convert makes it NVFP4")
        for one in self.listed:
            if one.pre_scale and one.name.rpartition(".")[2] in PARTS:
                self.notes.append(f"{one.name} has a pre_scale: if those of its neighbours are the same it joins them")
            if self._decoded(one):
                how = "no kernel takes a scale for each block" if one.blocks else "--precision fp8 multiplies in FP8"
                self.notes.append(f"{one.name} is FP8, and decoded in each call: {how}")
            if one.kind == "unread":
                self.notes.append(f"{one.name} is of a format that is not read")
        if any(one.role == "vision" for one in self.listed):
            self.notes.append("what is not of the language model counts as memory, not as time")
        if any(one.role == "head" for one in self.run):
            self.notes.append("the head counts for every token of a step; a prefill computes it for the last one alone")
        if any(one.experts for one in self.run):
            if self.taken is None:
                self.notes.append("the config does not say how many experts a token takes: all are counted")
            else:
                self.notes.append(f"a token takes {self.taken} experts, each of them as likely as any other")
        if self.kind != "cuda":
            self.notes.append("how long products take is told for GPUs that were measured alone")

    def _form(self, one: Product) -> Form:
        if one.kind == "fp8":
            return Form(shape=one.shape, kind="fp8", per_row=one.per_row, pre_scale=one.pre_scale, bias=one.bias,
                        blocks=one.blocks)  # fmt: skip
        of: dict[str, Any] = {"per_row": one.per_row, "pre_scale": one.pre_scale, "bias": one.bias,
                              "input_scale": one.input_scale}  # fmt: skip
        layout = self.asked or ("rows" if self.kind != "cuda" or self.dtype == "float32" else "fragments")
        if layout == "fragments":
            layout = f"fragments(dtype={self.dtype})"
        try:
            return Form(shape=one.shape, layout=layout, **of)
        except LayoutError as error:
            error.tensor = one.name
            raise

    def paired(self) -> list[tuple[Product, ...]]:
        """What runs as one: each product, but of experts in NVFP4 both, where they fit each other."""
        stacks: dict[str, dict[bool, Product]] = defaultdict(dict)
        for one in self.run:
            if one.experts and one.kind == "nvfp4" and self.precision != "int8":
                parent, _, part = one.name.rpartition(".")
                stacks[parent][part in DOWN] = one
        pairs = [(own[False], own[True]) for own in stacks.values() if len(own) == 2 and _fit(own[False], own[True])]
        first = {id(both): (both, down) for both, down in pairs}
        rest = {id(down) for _, down in pairs}
        return [first.get(id(one), (one,)) for one in self.run if id(one) not in rest]

    def _mixture(self, both: Product, down: Product) -> ExpertsForm:
        gated = both.shape[0] == 2 * down.shape[1]
        named = next((self.config[key] for key in ("hidden_act", "mlp_hidden_act") if key in self.config), "silu")
        activation = "swigluoai" if self.config.get("model_type") == "gpt_oss" else ACTIVATIONS.get(named, "silu")
        experts, hidden = both.experts or 0, both.shape[1]
        of: dict[str, Any] = {"top": min(self.taken or experts, experts), "activation": activation, "gated": gated}
        one, two = (replace(form, shape=(experts, *form.shape)) for form in (self._form(both), self._form(down)))
        return replace(ExpertsForm.of(experts, hidden, down.shape[1], **of), gate_up=one, down=two)

    def _experts(self, both: Product, down: Product, counts: list[int]) -> dict[str, Any]:
        """One entry of "layers" for gate, up and down of all experts, which are one call."""
        form = self._mixture(both, down)
        experts, each = both.experts or 1, form.nbytes // (both.experts or 1)
        plans = []
        for count in counts:
            asked = both.count * touched(experts, form.top, count)
            found = self._call_experts(both, form, count)
            seconds = found["expected"] if found["expected"] is not None else found["least"]
            plans.append(
                {"tokens": count, "rows": count, "calls": both.count}
                | found
                | {
                    "seconds": None if seconds is None else both.count * seconds,
                    "weight_bytes": round(asked * each),
                }
            )
        return {
            "name": f"{both.name}+{down.name.rpartition('.')[2]}",
            "role": "experts",
            "kind": both.kind,
            "shape": [*both.shape, down.shape[1]],
            "count": both.count,
            "experts": experts,
            "layout": form.gate_up.placed.key,
            "bytes": each,
            "held": form.nbytes * both.count,
            "plans": plans,
        }

    def _call_experts(self, one: Product, form: ExpertsForm, count: int) -> dict[str, Any]:
        if self.library == "numpy":
            return _nothing("experts take torch tensors")
        how: dict[str, Any] = {"rows": count, "dtype": self.dtype, "device": self.device, "precision": self.precision}
        try:
            made = plan_call("experts", form, **how)
        except NoKernelError as error:
            self.notes.append(f"{one.name}: {error.message}")
            return _nothing(error.message)
        if made.kernel == "experts-loop" and self.kind == "cuda":
            graph = "every expert computes all tokens, or those asked are copied first"
            self.notes.append(f"experts-loop waits for the routing; in a CUDA graph it takes longer: {graph}")
        return _told(made)

    def layer(self, one: Product, down: Product | None = None, *, counts: list[int]) -> dict[str, Any] | None:
        """One entry of "layers"; None for what no kernel runs."""
        if one.kind not in ("dense", "nvfp4", "fp8"):
            return None
        if down is not None:
            return self._experts(one, down, counts)
        form = self._form(one) if one.kind != "dense" else None
        held = form.nbytes if form else one.values * one.shape[0] * one.shape[1]
        each = one.count * (one.experts or 1)
        return {
            "name": one.name,
            "role": one.role,
            "kind": one.kind,
            "shape": list(one.shape),
            "count": one.count,
            "experts": one.experts,
            "layout": form.placed.key if form and form.kind == "nvfp4" else None,
            "bytes": held,
            "held": 0 if one.name.startswith("lm_head (") else held * each,
            "plans": [self._planned(one, form, held, count) for count in counts],
        }

    def _planned(self, one: Product, form: Form | None, held: int, count: int) -> dict[str, Any]:
        rows, asked = count, 1.0
        if one.experts:
            taken = min(self.taken or one.experts, one.experts)
            asked = touched(one.experts, taken, count)
            rows = max(1, ceil(count * taken / asked - 1e-9))
        calls = one.count * asked
        found = self._dense(one, rows) if form is None or self._decoded(one) else self._call(one, form, rows)
        seconds = found["expected"] if found["expected"] is not None else found["least"]
        return (
            {"tokens": count, "rows": rows, "calls": round(calls, 2)}
            | found
            | {
                "seconds": None if seconds is None else calls * seconds,
                "weight_bytes": 0 if one.role == "embedding" else round(calls * held),
            }
        )

    def _call(self, one: Product, form: Form, rows: int) -> dict[str, Any]:
        op = "embedding" if one.role == "embedding" else "linear"
        precision = None if one.kind == "fp8" or op == "embedding" else self.precision
        out = "float32" if one.role == "head" else self.dtype
        how: dict[str, Any] = {"rows": rows, "device": self.device, "library": self.library, "precision": precision}
        try:
            made = plan_call(op, form, dtype=self.dtype, out_dtype=out, **how)
        except NoKernelError as error:
            self.notes.append(f"{one.name}: {error.message}")
            return _nothing(error.message)
        return _told(made)

    def _decoded(self, one: Product) -> bool:
        """Whether an FP8 weight is not multiplied in FP8."""
        return one.kind == "fp8" and (self.precision != "fp8" or one.blocks)

    def _dense(self, one: Product, rows: int) -> dict[str, Any]:
        """By a dense weight: it was not measured, so the least that the GPU takes is all that is known."""
        (n, k), size = one.shape, DTYPES[self.dtype]
        fp8 = one.kind == "fp8"  # whose values are written and read once in each call
        nbytes = (n * k * (1 + 2 * size) if fp8 else n * k * one.values) + size * rows * (n + k)
        why = "FP8, decoded in each call" if fp8 else f"stored as {one.dtype}"
        kernel = "torch"
        if not fp8 and one.experts is None and self.library != "numpy":
            try:
                kernel = dense_kernel((n, k), rows=rows, dtype=self.dtype, bias=one.bias, device=self.device)
            except NoKernelError as error:
                self.notes.append(f"{one.name}: {error.message}")
                return _nothing(error.message)
        return _nothing(why) | {
            "kernel": kernel,
            "bytes": nbytes,
            "least": least(self.device, nbytes, 2 * rows * n * k),
            "scratch_bytes": size * n * k if fp8 else 0,
        }

    def step(self, layers: list[dict[str, Any]], index: int, count: int) -> dict[str, Any]:
        """All products on so many tokens."""
        plans = [layer["plans"][index] for layer in layers]
        seconds = [one["seconds"] for one in plans]
        read = sum(one["weight_bytes"] for one in plans)
        bound = count / (read / self.ceiling.read) if self.ceiling and read else None
        whole = sum(s for s in seconds if s is not None) if self.ceiling else None
        return {
            "tokens": count,
            "weight_bytes": read,
            "sums": self.sums,
            "sum_bytes": 4 * count * self.hidden if self.sums else 0,
            "seconds": whole,
            "not_measured": [x["name"] for x, p in zip(layers, plans, strict=True) if p["expected"] is None],
            "bound_tokens_per_second": bound,
            "tokens_per_second": count / whole if whole else None,
        }

    def memory(self, layers: list[dict[str, Any]]) -> dict[str, Any]:
        """Bytes of all that is held."""
        kinds: dict[str, int] = {"nvfp4": 0, "fp8": 0, "dense": 0, "head": 0, "embedding": 0, "other": 0}
        for layer in layers:
            role, kind = layer["role"], layer["kind"]
            kinds[role if role in ("head", "embedding") else kind] += layer["held"]
        planned = {layer["name"] for layer in layers}
        planned |= {one.name for ones in self.paired() if len(ones) > 1 for one in ones}
        for one in self.listed:
            if one.name not in planned:
                kinds["embedding" if one.role == "embedding" else "other"] += one.stored
        second = sum(
            layer["count"] * (layer["experts"] or 1) * max(one["extra_bytes"] for one in layer["plans"])
            for layer in layers
        )
        return {
            **kinds,
            "held_twice": second,
            "weights": sum(kinds.values()) + second,
            "scratch": max((one["scratch_bytes"] for layer in layers for one in layer["plans"]), default=0),
            "cache_of_1000_tokens": cache_bytes(self.config, 1000, DTYPES[self.dtype], self.ranks),
        }


def _fit(both: Product, down: Product) -> bool:
    """Whether two products are those of the same experts."""
    (n, hidden), (out, inner) = both.shape, down.shape
    alike = both.experts == down.experts and both.count == down.count
    return alike and out == hidden and n in (inner, 2 * inner)


def _library(notes: list[str]) -> str:
    """Whose arrays are multiplied on a CPU."""
    try:
        import torch  # noqa: F401
    except ImportError:
        notes.append("torch is not installed here: planned for NumPy arrays")
        return "numpy"
    return "torch"


def _told(made: Plan) -> dict[str, Any]:
    return {
        "kernel": made.kernel,
        "why": made.why,
        "configuration": made.configuration,
        "bytes": made.bytes,
        "least": made.least,
        "expected": made.expected,
        "share": made.least / made.expected if made.least and made.expected else None,
        "extra_bytes": made.extra_bytes,
        "scratch_bytes": made.scratch_bytes,
    }


def _nothing(why: str) -> dict[str, Any]:
    return {
        "kernel": None, "why": why, "configuration": "", "bytes": 0, "least": None, "expected": None, "share": None,
        "extra_bytes": 0, "scratch_bytes": 0,
    }  # fmt: skip
