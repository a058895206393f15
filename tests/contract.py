"""The contract that each layout is held to, over NumPy and over torch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.errors import LayoutError
from halfbyte.layouts import (
    LAYOUTS,
    Atoms128x4,
    Columns,
    Comfy,
    ExpertsOutPair,
    Fragments,
    GateUp,
    Gguf,
    Layout,
    Marlin,
    Packable,
    Packed,
    Rows,
    Tiles64,
    Trtllm,
    parse,
)
from halfbyte.numerics import is_torch
from halfbyte.weight import to_numpy
from helpers import assert_same_bytes, nibbles

GROUPS = {"nvfp4": 16, "mxfp4": 32}
BAD_SCALES = {
    "nvfp4": {0x7F: "NaN", 0xFF: "NaN", 0x80: "negative", 0x81: "negative", 0xFE: "negative"},
    "mxfp4": {0xFF: "NaN"},
}

VARIANTS: list[Layout] = [
    *LAYOUTS,
    Columns(align=32),
    Columns(align=7),
    Tiles64("linear"),
    Tiles64("marlin"),
    ExpertsOutPair("atom"),
    Marlin(pad_n=128, pad_k=64),
    Marlin(scale_format="s0e5m3"),
    Marlin(scale_format="s0e5m3", rule="min", pad_n=128),
    Marlin(scale_format="s0e5m3", dtype="float16"),
    Marlin(scale_format="s0e5m3", lossy=True),
    Trtllm(epilogue_tile=64),
    Fragments("float16"),
    GateUp("concatenated", Columns(align=16)),
    GateUp("interleaved", Gguf()),
    GateUp("up_first_interleaved", Trtllm()),
    GateUp("up_first_64", Atoms128x4()),
    GateUp("up_first", Marlin(scale_format="s0e5m3")),
    GateUp("interleaved", Comfy()),
    GateUp("up_first", ExpertsOutPair()),
    GateUp("up_first_64", Rows()),
    GateUp("up_first", Fragments()),
]
"""Every layout, and every value of its fields, for NVFP4."""

MX_VARIANTS: list[Layout] = [
    Rows(kind="mxfp4"),
    Columns(kind="mxfp4"),
    Columns(align=7, kind="mxfp4"),
    GateUp("up_first", Columns(align=16, kind="mxfp4")),
]
"""Those for MXFP4."""


def check_layout(layout: Layout, weight: Packable) -> None:
    """Whatever ``layout`` accepts comes back bit for bit, lies where ``offset`` says, and is padded with zeros."""
    check_key(layout)
    reason = layout.needs(weight.shape)
    if reason:
        check_shape_refused(layout, weight, reason)
        return
    weight = fitting(layout, weight)
    packed = layout.pack(weight)
    assert packed.layout == layout
    assert packed.shape == weight.shape
    assert packed.nbytes == sum(b.nbytes for b in packed.buffers().values())
    for back in (packed.unpack(), layout.unpack(packed)):
        assert type(back) is type(weight)
        assert back.same(weight)
        assert is_torch(back.codes) == is_torch(weight.codes)
    check_places(layout, weight, packed)
    check_buffers(packed, weight)
    check_refusals(layout, weight)


def check_shape_refused(layout: Layout, weight: Packable, reason: str) -> None:
    """The reason names an axis, its size and what it must be a multiple of; nothing is packed or taken as packed."""
    axis, _, size, *words, multiple = reason.split()
    assert weight.shape[{"N": -2, "K": -1}[axis]] == int(size)
    assert words == ["is", "not", "a", "multiple", "of"]
    assert int(size) % int(multiple)
    with pytest.raises(LayoutError) as caught:
        layout.pack(weight)
    assert str(caught.value) == f"layout {layout.name} cannot hold this weight: {reason}: got {weight.shape}"
    with pytest.raises(LayoutError, match=f"has no such shape: {reason}"):
        Packed(layout, weight.shape, dict.fromkeys(always(layout), weight.codes))


def always(layout: Layout) -> list[str]:
    """The buffers that every weight has in this layout."""
    return [*layout.buffers, *layout.extras, *(["scale2"] if layout.kind == "nvfp4" else [])]


def fitting(layout: Layout, weight: Packable) -> Packable:
    """A weight with values that the layout can hold, where it cannot hold all."""
    inner = layout.layout if isinstance(layout, GateUp) else layout
    scales = to_numpy(weight.scales)
    if isinstance(inner, Marlin) and inner.scale_format == "s0e5m3" and inner.dtype == "bfloat16":
        scales = np.where(scales < 8, 0, scales)  # no subnormals
    if isinstance(inner, ExpertsOutPair) and inner.scale_form == "atom":
        scales = scales[..., ::16, :].repeat(16, -2)
    changed = weight.numpy().replace(scales=scales.astype(np.uint8))
    if layout.zero_blocks == "canonical":
        changed = changed.replace(codes=changed.codes * (scales != 0).repeat(GROUPS[weight.kind] // 2, -1))
    return changed.torch() if is_torch(weight.codes) else changed


def stored_bytes(layout: Layout, scales: Any) -> Any:
    """What the bytes of the scales must be: themselves, or vLLM's arithmetic in words of its own."""
    inner = layout.layout if isinstance(layout, GateUp) else layout
    if not isinstance(inner, Fragments) and not (isinstance(inner, Marlin) and inner.scale_format == "s0e5m3"):
        return scales
    factor = inner.factor(scales) if isinstance(inner, Marlin) else 1
    half = (E4M3[scales] * np.float32(factor)).astype(np.float16) * np.float16(128)
    return ((half.view(np.uint16) << 1) >> 8).astype(np.uint8)


def in_steps(layout: Layout, name: str, buffers: dict[str, Any]) -> Any:
    """The bytes of a buffer with codes in 4-bit steps, where the layout moves the bits of each 4 bytes."""
    flat = to_numpy(buffers[name])
    if not layout.codes.bits or "codes" not in layout.buffers[name]:
        return flat
    bits = np.unpackbits(flat, axis=-1, bitorder="little")
    words = bits.reshape(*flat.shape[:-1], flat.shape[-1] // 4, 32)
    return np.packbits(words[..., layout.codes.bits].reshape(bits.shape), axis=-1, bitorder="little")


E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def check_places(layout: Layout, weight: Packable, packed: Packed) -> None:
    """Every element sits at its offset, no two at one, and nothing but zeros elsewhere."""
    buffers, rng = packed.buffers(), np.random.default_rng(0)
    group, true_k = GROUPS[weight.kind], weight.shape[-1]
    n, k = weight.shape[-2], weight.scales.shape[-1] * group
    left = {name: nibbles(in_steps(layout, name, buffers)) for name in layout.buffers}
    scales = np.repeat(stored_bytes(layout, to_numpy(weight.scales)), group, -1)
    for plane, values in (("codes", nibbles(weight.codes)), ("scales", scales)):
        (name,) = (name for name, parts in layout.buffers.items() if plane in parts)
        first, second = layout.offsets(weight.shape, plane)
        assert first.shape == (n,)
        assert second.shape == (k,)
        at = first[:, None] + second[None, :]
        flat = nibbles(in_steps(layout, name, buffers)) if plane == "codes" else to_numpy(buffers[name])
        assert_same_bytes(flat[..., at], values)
        places = np.unique(at)
        assert places.size == (at.size if plane == "codes" else at.size // group)
        for nibble in [places] if plane == "codes" else [2 * places, 2 * places + 1]:
            left[name][..., nibble] = 0
        if plane == "scales" and layout.buffers[name].keys() == {"codes", "scales"}:
            codes = np.add.outer(*layout.offsets(weight.shape, "codes"))
            assert not np.intersect1d(codes // 2, places).size
        elements = [(r, c) for r in (0, n - 1) for c in (0, true_k - 1)] if at.size else []
        elements += [(int(rng.integers(n)), int(rng.integers(true_k))) for _ in range(16 if at.size else 0)]
        for r, c in elements:
            assert layout.offset(r, c, weight.shape, plane) == at[r, c]
    for padding in left.values():
        assert not padding.any()
    for r, c in ((-1, 0), (0, -1), (n, 0), (0, k)):
        with pytest.raises(LayoutError, match="no such element"):
            layout.offset(r, c, weight.shape)


def check_buffers(packed: Packed, weight: Packable) -> None:
    """The named buffers make the same again, and nothing else does."""
    layout, shape, buffers = packed.layout, packed.shape, packed.buffers()
    optional = {name for name in ("input_scale", "pre_scale") if getattr(weight, name, None) is not None}
    assert set(buffers) == {*always(layout)} | optional
    for again in (
        Packed.from_buffers(layout, shape, buffers),
        copy.copy(packed),
        copy.deepcopy(packed),
        pickle.loads(pickle.dumps(packed)),
    ):
        assert (again.layout, again.shape, again.key) == (layout, shape, layout.key)
        assert again.unpack().same(weight)
    buffers.clear()
    assert packed.unpack().same(weight)

    for name, wrong in wrong_buffers(packed).items():
        with pytest.raises(LayoutError, match=name.partition(" ")[0]):
            Packed.from_buffers(layout, shape, wrong)


def wrong_buffers(packed: Packed) -> dict[str, dict[str, Any]]:
    """Sets of buffers that are not those of ``packed``'s layout and shape."""
    good, names = packed.buffers(), list(packed.layout.buffers)
    cases = {f"buffers without {name}": {k: b for k, b in good.items() if k != name} for name in always(packed.layout)}
    cases["buffers with another name"] = good | {"zeros": good[names[0]]}
    if packed.layout.kind == "mxfp4":
        cases["buffers with scale2"] = good | {"scale2": np.ones((*packed.shape[:-2], 1, 1), np.float32)}
    for name in names:
        cases[f"{name} that are too long"] = good | {name: _longer(good[name])}
    return cases


def _longer(buffer: Any) -> Any:
    if is_torch(buffer):
        import torch

        return torch.nn.functional.pad(buffer, (0, 1))
    return np.pad(buffer, [(0, 0)] * (buffer.ndim - 1) + [(0, 1)])


def check_key(layout: Layout) -> None:
    """A layout is a value, and its key is that value as text."""
    twin = copy.deepcopy(layout)
    assert twin == layout
    assert hash(twin) == hash(layout)
    assert parse(layout.key) == layout
    assert type(parse(layout.key)) is type(layout)
    assert layout.key.startswith(layout.name)
    assert layout.used_by
    with pytest.raises(AttributeError):
        layout.name_of_a_field = 1  # type: ignore[attr-defined]


def check_refusals(layout: Layout, weight: Packable) -> None:
    """NaN and negative block scales are refused, and the first such block is named."""
    scales = to_numpy(weight.scales)
    if not scales.size:
        return
    places = {(0,) * scales.ndim, tuple(size // 2 for size in scales.shape), tuple(size - 1 for size in scales.shape)}
    for place in places:
        for byte, what in BAD_SCALES[weight.kind].items():
            bad = scales.copy()
            bad[place] = byte
            bad[tuple(size - 1 for size in scales.shape)] = byte  # a second one, which is not the first
            wrong = weight.numpy().replace(scales=bad)
            if is_torch(weight.codes):
                wrong = wrong.torch()
            with pytest.raises(LayoutError) as caught:
                layout.pack(wrong)
            reason = f"the block scale at {list(place)} is {what} (byte {byte:02X})"
            assert layout.refuse(wrong) == reason
            assert str(caught.value) == (
                f"layout {layout.name} cannot hold this weight: {reason}: got {tuple(weight.shape)}"
            )
    assert layout.refuse(weight) is None
    assert layout.needs(weight.shape) is None
