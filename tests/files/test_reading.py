"""Weights that do not lie as their dialect says, read as the caller knows that they lie."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    DOWN,
    GOLDEN,
    Q,
    expert_weights,
    f32,
    make_dense,
    named,
    nvfp4,
    save,
    stacked_experts,
    tensors_of,
)
from halfbyte.checkpoint.reader import open_checkpoint
from halfbyte.errors import FormatError, UsageError
from halfbyte.modules import Reading
from halfbyte.weight import Weight


def swizzled(scales: np.ndarray, rows: int) -> np.ndarray:
    """(N, G) block scales in the order of 128x4 or 8x4 atoms, padded with zeros, byte by byte."""
    n, g = scales.shape
    tiles, blocks = -(-n // rows), -(-g // 4)
    out = np.zeros(tiles * rows * blocks * 4, np.uint8)
    for i in range(n):
        for j in range(g):
            tile = (i // rows * blocks + j // 4) * rows * 4
            inner = (i % 32) * 16 + (i % rows) // 32 * 4 if rows == 128 else (i % 8) * 4
            out[tile + inner + j % 4] = scales[i, j]
    return out


def weights(path, **reading):
    with open_checkpoint(path, Reading(**reading)) as ck:
        return dict(ck.weights())


def altered(path, change, n=128, k=128, dialect="modelopt"):
    """A checkpoint with one weight whose roles have been changed, and the weight as it was."""
    roles = nvfp4(n, k, 7, scale2=2.0**-11, input_scale=0.5)
    good = Weight(**roles)
    path.mkdir(parents=True)
    save(path / "model.safetensors", named(dialect, "a", roles | change(dict(roles))))
    return path, good


def swap(codes):
    return ((codes & 15) << 4) | (codes >> 4)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_nibble_order(dialect, tmp_path):
    path, good = altered(tmp_path / "x", lambda r: {"codes": swap(r["codes"])}, dialect=dialect)
    assert weights(path, nibble_order="high")["a"].same(good)
    assert not weights(path, nibble_order="low")["a"].same(good)
    assert weights(path, nibble_order="low")["a"].same(weights(path)["a"])


@pytest.mark.parametrize("rows", [128, 8])
@pytest.mark.parametrize("shape", [(128, 64), (256, 192)])
def test_swizzled_scales(rows, shape, tmp_path):
    n, k = shape

    def change(roles):
        return {"scales": swizzled(roles["scales"].view(np.uint8), rows).reshape(n, k // 16)}

    path, good = altered(tmp_path / "x", change, n, k)
    assert weights(path, scale_layout=f"{rows}x4")["a"].same(good)
    both = altered(tmp_path / "y", lambda r: change(r) | {"codes": swap(r["codes"])}, n, k)[0]
    assert weights(both, scale_layout=f"{rows}x4", nibble_order="high")["a"].same(good)


@pytest.mark.parametrize("rows", [128, 8])
@pytest.mark.parametrize("shape", [(48, 80), (130, 16), (1, 16)])
def test_padded_scales(rows, shape, tmp_path):
    n, k = shape

    def change(roles):
        flat = swizzled(roles["scales"].view(np.uint8), rows)
        return {"scales": flat.reshape(-(-n // rows) * rows, -1)}

    path, good = altered(tmp_path / "x", change, n, k)
    assert weights(path, scale_layout=f"{rows}x4")["a"].same(good)


def test_scales_swizzled_twice_or_taken_out_of_an_order_that_they_never_had(tmp_path):
    def twice(roles):
        once = swizzled(roles["scales"].view(np.uint8), 128).reshape(roles["scales"].shape)
        return {"scales": swizzled(once, 128).reshape(once.shape)}

    path, good = altered(tmp_path / "x", twice, 128, 512)
    assert weights(path, scale_layout="128x4-twice")["a"].same(good)
    path, good = altered(tmp_path / "z", lambda r: undone(r["scales"].view(np.uint8)), 128, 64)
    assert weights(path, scale_layout="128x4-undone")["a"].same(good)


def undone(s):
    order = np.empty(s.size, np.int64)
    flat = {}
    for i in range(s.shape[0]):
        for j in range(s.shape[1]):
            flat[(i % 32) * 16 + i // 32 * 4 + j] = i * s.shape[1] + j
    order[:] = [flat[p] for p in range(s.size)]
    # Reading linear bytes as swizzled ones puts byte p where element order[p] belongs.
    out = np.empty(s.size, np.uint8)
    out[order] = s.reshape(-1)
    return {"scales": out.reshape(s.shape)}


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_scale2(dialect, tmp_path):
    scale2 = np.float32(2.0**-11)
    for stored, value in {"divisor": 1 / scale2, "amax": scale2 * 2688, "multiplier": scale2}.items():
        roles = nvfp4(32, 64, scale2=0)
        del roles["scale2"]
        name = "a.weight_scale_2" if dialect == "modelopt" else "a.weight_global_scale"
        tensors = named(dialect, "a", roles) | {name: np.full((), value, np.float32)}
        path = tmp_path / stored
        path.mkdir()
        save(path / "model.safetensors", tensors)
        assert weights(path, scale2=stored)["a"].scale2 == scale2


def test_stacks(tmp_path):
    made = expert_weights(2, 128, 64, ("up_proj", "down_proj"), scale2=lambda e, i: 2.0**-9)
    tensors = stacked_experts("m.experts", made)
    for name, array in tensors.items():
        if name.endswith("_weight_scale"):
            tensors[name] = np.stack(
                [swizzled(one.view(np.uint8), 128).reshape(-(-one.shape[0] // 128) * 128, -1) for one in array]
            )
        elif not name.endswith("scale_2"):
            tensors[name] = swap(array)
    path = tmp_path / "x"
    path.mkdir()
    save(path / "model.safetensors", tensors)
    with open_checkpoint(path, Reading(nibble_order="high", scale_layout="128x4")) as ck:
        assert {m.name: m.shape for m in ck.modules} == {
            "m.experts.up_proj": (2, 128, 64),
            "m.experts.down_proj": (2, 64, 128),
        }
        for e, part in made:
            assert ck[f"m.experts.{e}.{part}"].same(Weight(**made[e, part]))
        assert np.array_equal(ck["m.experts.down_proj"].codes[1], made[1, "down_proj"]["codes"])


def test_the_order_of_gate_and_up(tmp_path):
    made = expert_weights(2, 32, 32, scale2=lambda e, i: 2.0**-9)
    path = tmp_path / "x"
    path.mkdir()
    save(path / "model.safetensors", stacked_experts("m.experts", made, order="up_first"))
    with open_checkpoint(path, Reading(gate_up="up_first")) as ck:
        for e, part in made:
            assert ck[f"m.experts.{e}.{part}"].same(Weight(**made[e, part]))


def test_a_comfy_file_reads_right_when_its_order_is_told():
    """The golden file of comfy-kitchen: high nibble first, swizzled and padded scales."""
    path = GOLDEN / "containers" / "comfy_c.safetensors"
    dense = f32(tensors_of(GOLDEN / "inputs_f32.safetensors")["C"])
    errors = {}
    for nibbles in ("high", "low"):
        with open_checkpoint(path, Reading(nibble_order=nibbles, scale_layout="128x4")) as ck:
            assert ck.dialect_name == "modelopt"
            (module,) = (m for m in ck.modules if m.kind == "nvfp4")
            w = Weight(**{role: ck.read(module.roles[role]) for role in ("codes", "scales", "scale2")})
        errors[nibbles] = np.linalg.norm(w.dequantize()[: len(dense), : dense.shape[1]] - dense) / np.linalg.norm(dense)
    assert errors["high"] < 0.12
    assert errors["low"] > 1


def test_other_weights_stay(tmp_path):
    path = make_dense(tmp_path / "x")
    with open_checkpoint(path, Reading(nibble_order="high")) as ck, halfbyte.open(path) as plain:
        assert ck[Q].same(plain[Q].replace(codes=swap(plain[Q].codes)))
        assert np.array_equal(ck["lm_head.weight"].data, plain["lm_head.weight"].data)


def test_scales_that_cannot_lie_so(tmp_path):
    path = make_dense(tmp_path / "x")
    for layout in ("128x4", "8x4-twice", "128x4-undone"):
        with pytest.raises(FormatError, match="do not lie so") as caught:
            weights(path, scale_layout=layout)
        assert caught.value.tensor == f"{DOWN}.weight_scale"
        assert caught.value.got == [32, 3]


def test_unknown_readings(tmp_path):
    path = make_dense(tmp_path / "x")
    for reading in ({"nibble_order": "middle"}, {"scale_layout": "64x4"}, {"scale2": "half"}, {"gate_up": "both"}):
        with pytest.raises(UsageError, match="unknown"):
            open_checkpoint(path, Reading(**reading))


def test_options():
    assert Reading(nibble_order="high", scale2="divisor").options == ["--nibble-order high", "--scale2 divisor"]
    assert not Reading(gate_up="interleaved")
    assert not Reading()
