"""The contract that each layout is held to, over NumPy and over torch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from halfbyte.errors import LayoutError
from halfbyte.layouts import Layout, Packed, parse
from halfbyte.numerics import is_torch
from halfbyte.weight import Weight, to_numpy
from helpers import assert_same_bytes, nibbles

BAD_SCALES = {0x7F: "NaN", 0xFF: "NaN", 0x80: "negative", 0x81: "negative", 0xFE: "negative"}


def check_layout(layout: Layout, weight: Weight) -> None:
    """Whatever ``layout`` accepts comes back bit for bit, lies where ``offset`` says, and is padded with zeros."""
    packed = layout.pack(weight)
    assert packed.layout == layout
    assert packed.shape == weight.shape
    assert packed.nbytes == sum(b.nbytes for b in packed.buffers().values())
    for back in (packed.unpack(), layout.unpack(packed)):
        assert back.same(weight)
        assert is_torch(back.codes) == is_torch(weight.codes)
    check_places(layout, weight, packed)
    check_buffers(packed, weight)
    check_key(layout)
    check_refusals(layout, weight)


def check_places(layout: Layout, weight: Weight, packed: Packed) -> None:
    """Every element sits at its offset, no two at one, and nothing but zeros elsewhere."""
    buffers, lead = packed.buffers(), weight.experts
    (n, blocks), rng = weight.scales.shape[-2:], np.random.default_rng(0)
    planes = {
        "codes": (layout.codes, nibbles(buffers["codes"]), nibbles(weight.codes), blocks * 16, 1),
        "scales": (layout.scales, to_numpy(buffers["scales"]), to_numpy(weight.scales), blocks, 16),
    }
    for plane, (order, flat, values, columns, step) in planes.items():
        first, second = order.offsets((n, columns))
        at = first[:, None] + second[None, :]
        assert_same_bytes(flat[..., at].reshape(*lead, n, columns), values)
        assert np.unique(at).size == at.size
        padding = np.delete(flat, at.reshape(-1), axis=-1)
        assert not padding.any()
        elements = [(r, c) for r in (0, n - 1) for c in (0, weight.k - 1)] if at.size else []
        elements += [(int(rng.integers(n)), int(rng.integers(weight.k))) for _ in range(16 if at.size else 0)]
        for r, c in elements:
            assert layout.offset(r, c, weight.shape, plane) == at[r, c // step]


def check_buffers(packed: Packed, weight: Weight) -> None:
    """The named buffers make the same again, and nothing else does."""
    layout, shape, buffers = packed.layout, packed.shape, packed.buffers()
    optional = {name for name in ("input_scale", "pre_scale") if getattr(weight, name) is not None}
    assert set(buffers) == {"codes", "scales", "scale2"} | optional
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
    good = packed.buffers()
    cases = {f"buffers without {name}": {k: b for k, b in good.items() if k != name} for name in ("codes", "scale2")}
    cases["buffers with another name"] = good | {"zeros": good["codes"]}
    for name in ("codes", "scales"):
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


def check_refusals(layout: Layout, weight: Weight) -> None:
    """NaN and negative block scales are refused, and the first such block is named."""
    scales = to_numpy(weight.scales)
    if not scales.size:
        return
    places = {(0,) * scales.ndim, tuple(size // 2 for size in scales.shape), tuple(size - 1 for size in scales.shape)}
    for place in places:
        for byte, what in BAD_SCALES.items():
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
