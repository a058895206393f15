"""What each kernel layout is documented to give: worked bytes, golden weights, and values that a form cannot hold."""

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.errors import LayoutError, WeightError
from halfbyte.layouts import (
    Atoms8x4,
    Atoms128x4,
    Columns,
    Comfy,
    ExpertsOutPair,
    GateUp,
    Gguf,
    Marlin,
    NPacked,
    Packed,
    Rows,
    Tiles64,
    Trtllm,
)
from halfbyte.weight import LossyWarning, Weight
from helpers import GOLDEN, assert_same_bytes, assert_within, exact, golden, modelopt, nibbles, random_weight


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def counting(n, k):
    """Codes 0..15, 0..15, ... in each row."""
    codes = np.tile(np.frombuffer(bytes.fromhex("1032547698BADCFE"), np.uint8), (n, k // 16))
    return Weight(codes=codes, scales=np.full((n, k // 16), 0x38, np.uint8), scale2=1.0)


def every_scale():
    """All 127 finite, non-negative scale bytes, and the second half again."""
    scales = golden("layouts2")["E.weight_scale"]
    assert np.unique(scales).size == 127
    return Weight(codes=np.full((64, 32), 0x22, np.uint8), scales=scales, scale2=1.0)


# -- transposed --


def test_the_two_transposed_forms_differ():
    weight = counting(2, 32)
    assert weight.codes[0, :8].tobytes().hex(" ") == "10 32 54 76 98 ba dc fe"
    assert Columns().pack(weight).buffers()["codes"][:6].tobytes().hex(" ") == "10 10 32 32 54 54"
    assert NPacked().pack(weight).buffers()["codes"][:4].tobytes().hex(" ") == "00 11 22 33"


def test_transposing_twice(rng):
    weight = random_weight(rng, 24, 80)
    codes = Columns().pack(weight).buffers()["codes"].reshape(40, 24)
    assert_same_bytes(codes, weight.codes.T)
    assert_same_bytes(codes.T, weight.codes)
    assert codes.reshape(-1)[7 * 24 + 5] == weight.codes.reshape(-1)[5 * 40 + 7]


def test_pitch_of_an_odd_vocabulary():
    shape, padded = (248077, 5120), Columns(align=128)
    assert Columns().sizes(shape) == {"codes": 2560 * 248077, "scales": 320 * 248077}
    assert padded.sizes(shape) == {"codes": 2560 * 248192, "scales": 320 * 248192}
    starts = [padded.offset(0, 2 * row, shape) // 2 for row in (0, 1, 2559)]
    assert starts == [0, 248192, 2559 * 248192]
    assert padded.offset(0, 16, shape, "scales") == 248192
    unpadded = [Columns().offset(0, 2 * row, shape) // 2 % 16 == 0 for row in range(64)]
    assert sum(unpadded) == 4  # 1 of 16 is aligned


def test_several_weights_in_one_twin(rng):
    parts = [random_weight(rng, n, 48).replace(scale2=0.5) for n in (5, 2, 9)]
    packed = hb.pack(Weight.concat(parts), Columns(align=16))
    start = 0
    for part in parts:
        own = Columns().pack(part).buffers()
        for name, rows in (("codes", 24), ("scales", 3)):
            window = packed.buffers()[name].reshape(rows, 16)[:, start : start + part.n]
            assert_same_bytes(window, own[name].reshape(rows, part.n))
        start += part.n
    assert packed.buffers()["scale2"].shape == (1, 1)
    assert [p.same(q) for p, q in zip(packed.unpack().split([5, 2, 9]), parts, strict=True)] == [True] * 3

    different = [parts[0], parts[1].replace(scale2=0.25)]
    assert (
        hb.pack(Weight.concat(different), "columns").buffers()["scale2"].reshape(-1).tolist() == [0.5] * 5 + [0.25] * 2
    )
    with pytest.raises(WeightError, match="different scale2"):
        Weight.concat(different, policy="equal")
    with pytest.raises(WeightError, match="another K"):
        Weight.concat([parts[0], random_weight(rng, 5, 64)])
    with pytest.raises(WeightError, match="at least one"):
        Weight.concat([])


def test_transposed_stacks_of_modelopt():
    """ModelOpt's 3-D export of experts is `columns` of each."""
    g = golden("layouts2")
    stack = Packed(
        Columns(),
        (2, 16, 64),
        {
            "codes": g["F.bmm.weight"].reshape(2, -1),
            "scales": g["F.bmm.weight_scale"].view(np.uint8).reshape(2, -1),
            "scale2": g["F.bmm.weight_scale_2"].reshape(2, 1, 1),
        },
    )
    weight = stack.unpack()
    assert_same_bytes(weight.codes, g["F.bmm.weight"].transpose(0, 2, 1))
    for name, b in Columns().pack(weight).buffers().items():
        assert_same_bytes(b, stack.buffers()[name])


# -- scales in tiles --


@pytest.mark.parametrize(
    ("m", "block", "byte"),
    [(0, 0, 0), (0, 3, 3), (1, 0, 16), (32, 0, 4), (33, 5, 533), (127, 7, 1023), (128, 0, 1024), (130, 6, 1570)],
)
def test_atom_offsets(m, block, byte):
    for layout in (Atoms128x4(), Tiles64("atom")):
        assert layout.offset(m, 16 * block, (256, 128), "scales") == byte


def test_atoms_of_experts_are_padded_one_by_one():
    assert Atoms128x4().sizes((3, 130, 272)) == {"codes": 130 * 136, "scales": 2 * 5 * 512}
    assert Atoms8x4().sizes((3, 9, 80)) == {"codes": 9 * 40, "scales": 2 * 2 * 32}


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
@pytest.mark.parametrize("layout", [Atoms128x4(), Comfy()], ids=lambda layout: layout.name)
def test_golden_swizzle(layout, name):
    packed = layout.pack(modelopt(name))
    assert_same_bytes(packed.buffers()["scales"], golden("layouts")[f"{name}.scale_swizzled_128x4"])


def test_swizzled_bytes():
    scales = Atoms128x4().pack(modelopt("B")).buffers()["scales"]
    assert [scales[at : at + 4].tobytes().hex(" ") for at in (0, 16, 32)] == [
        "7e 10 18 20",
        "10 18 20 28",
        "18 20 28 30",
    ]


# -- files of others --


def test_gguf_blocks():
    blocks = Gguf().pack(modelopt("B")).buffers()["blocks"]
    assert blocks[2 * 36 : 2 * 36 + 12].tobytes().hex(" ") == "18 20 28 30 40 40 51 62 62 62 73 04"
    for name in ("A", "B", "D"):
        packed = Gguf().pack(modelopt(name))
        assert_same_bytes(packed.buffers()["blocks"], golden("layouts")[f"{name}.gguf_nvfp4"].reshape(-1))
    file = (GOLDEN / "containers" / "d_nvfp4.gguf").read_bytes()
    assert Gguf().pack(modelopt("D")).buffers()["blocks"].tobytes() in file
    assert Gguf().sizes((5, 128)) == {"blocks": 5 * 2 * 36}


def test_gguf_of_another_k(rng):
    with pytest.raises(LayoutError) as caught:
        Gguf().pack(random_weight(rng, 24, 80))
    assert str(caught.value) == "layout gguf cannot hold this weight: K = 80 is not a multiple of 64: got (24, 80)"


def test_comfy_bytes():
    codes = Comfy().pack(modelopt("B")).buffers()["codes"].reshape(16, 32)
    assert codes[2, :8].tobytes().hex(" ") == "00 12 22 34 44 56 66 70"


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_weights_of_comfy(name):
    """Both nibble orders that comfy-kitchen wrote hold one weight; ours are its bytes, and the values are its own."""
    g = golden("comfy_kitchen_eager")
    shape = modelopt(name).shape
    high = {"codes": g[f"{name}.hi1.weight"], "scales": g[f"{name}.hi1.weight_scale"].view(np.uint8)}
    buffers = {key: a.reshape(-1) for key, a in high.items()} | {"scale2": g[f"{name}.weight_scale_2"].reshape(1, 1)}
    weight = Packed(Comfy(), shape, buffers).unpack()
    assert_same_bytes(weight.codes, g[f"{name}.hi0.weight"][: shape[0], : shape[1] // 2])
    for key, buffer in Comfy().pack(weight).buffers().items():
        assert_same_bytes(buffer, buffers[key])
    values = g[f"{name}.dequant_f32"][: shape[0], : shape[1]]
    assert_within(values, exact(weight), 3 * 2.0**-24 * np.abs(exact(weight)))


def test_a_file_of_comfy():
    """24x80 as 32 rows and 128x8 scales; what the file does not say is the true shape."""
    g = golden("containers/comfy_c")
    buffers = {
        "codes": g["blk.lin.weight"].reshape(-1),
        "scales": g["blk.lin.weight_scale"].view(np.uint8).reshape(-1),
        "scale2": g["blk.lin.weight_scale_2"].reshape(1, 1),
    }
    packed = Packed(Comfy(), (24, 80), buffers)
    weight = packed.unpack()
    assert weight.shape == (24, 80)
    for key, buffer in Comfy().pack(weight).buffers().items():
        assert_same_bytes(buffer, buffers[key])


def test_golden_trtllm():
    buffers, g = Trtllm().pack(modelopt("D")).buffers(), golden("layouts")
    assert_same_bytes(buffers["codes"].reshape(128, 128), g["D.trtllm_shuffled_weight_tile128"])
    assert_same_bytes(buffers["scales"], g["D.trtllm_shuffled_scale_128x4"].reshape(-1))


def test_row_map_of_small_tiles():
    places = [Trtllm(epilogue_tile=64).offset(n, 0, (16, 32)) // 32 for n in range(16)]
    assert places == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]


# -- marlin --


def test_golden_marlin():
    buffers, g = Marlin().pack(modelopt("D")).buffers(), golden("layouts")
    assert_same_bytes(buffers["codes"].view(np.int32).reshape(16, 256), g["D.marlin_qweight"])
    assert_same_bytes(buffers["scales"].reshape(16, 128), g["D.marlin_scale_order_raw_e4m3"])
    assert buffers["scales"][:4].tobytes().hex(" ") == "72 75 72 78"


def test_marlin_scale_columns():
    """Column m of each 64 is stored at 8 * (m % 8) + the number m // 8 with its low two bits exchanged."""
    at = [Marlin().offset(m, 0, (64, 16), "scales") for m in range(16)]
    assert at == [0, 8, 16, 24, 32, 40, 48, 56, 2, 10, 18, 26, 34, 42, 50, 58]


def test_marlin_padding():
    assert Marlin().sizes((2, 65, 48)) == {"codes": 128 * 24, "scales": 128 * 3}
    edge = Marlin(pad_n=128, pad_k=64)
    assert edge.sizes((1856, 80)) == {"codes": 1920 * 64, "scales": 1920 * 8}


def test_golden_s0e5m3():
    layout, g = Marlin(scale_format="s0e5m3"), golden("layouts")
    packed = layout.pack(modelopt("D"))
    buffers = packed.buffers()
    assert_same_bytes(buffers["scales"].reshape(16, 128), g["D.marlin_scale_s0e5m3_bf16"])
    assert buffers["scales"][:4].tobytes().hex(" ") == "ea ed ea f0"
    assert buffers["factor"] == g["D.marlin_scale_factor"] == 1
    assert layout.global_scale(packed, "bfloat16").tolist() == [[g["D.marlin_global_bf16"]]]
    assert layout.global_scale(packed, "float16").tolist() == [[g["D.marlin_global_fp16"]]]
    assert Marlin().global_scale(Marlin().pack(modelopt("D")), "bfloat16").tolist() == [[g["D.marlin_global_bf16"]]]


def test_s0e5m3_numbers():
    weight = every_scale().replace(scales=np.full((64, 4), 0x7E, np.uint8))
    scales = weight.scales.copy()
    scales[0, 0] = 0x38
    buffers = Marlin(scale_format="s0e5m3").pack(weight.replace(scales=scales)).buffers()
    assert (buffers["scales"][0], buffers["scales"][1]) == (0xB0, 0xF6)


@pytest.mark.parametrize(
    ("rule", "factor", "reason"),
    [
        ("max", 1, "S0E5M3 with factor 1 turns the block scale at [0, 1] from 0.00195312 (byte 01) into 0"),
        ("min", 8, "S0E5M3 with factor 8 turns the block scale at [26, 1] from 72 (byte 69) into 64"),
    ],
)
def test_what_s0e5m3_cannot_hold(rule, factor, reason):
    """Of all scales the rules lose 7 and 44; such a weight is refused, or warned of with the error that it gets."""
    weight, g = every_scale(), golden("layouts2")
    with pytest.raises(LayoutError) as caught:
        Marlin(scale_format="s0e5m3", rule=rule).pack(weight)
    hint = "use scale_format=e4m3 or lossy=True"
    assert str(caught.value) == f"layout marlin cannot hold this weight: {reason}; {hint}: got (64, 64)"

    with pytest.warns(LossyWarning) as warned:
        packed = Marlin(scale_format="s0e5m3", rule=rule, lossy=True).pack(weight)
    assert_same_bytes(packed.buffers()["scales"].reshape(4, 64), g[f"E.marlin_s0e5m3_{rule}rule_bf16"])
    assert packed.buffers()["factor"] == g[f"E.marlin_{rule}rule_factor"] == factor
    back = packed.unpack()
    assert np.count_nonzero(back.scales != weight.scales) == {"max": 7, "min": 44}[rule]
    error = np.linalg.norm(exact(back) - exact(weight)) / np.linalg.norm(exact(weight))
    (message,) = (str(w.message) for w in warned)
    assert message == f"S0E5M3 block scales with factor {factor} lost some: relative error {error:.3g}"


def test_s0e5m3_of_float16_holds_every_scale():
    weight = every_scale()
    packed = Marlin(scale_format="s0e5m3", dtype="float16").pack(weight)
    assert packed.buffers()["factor"] == 1
    assert packed.unpack().same(weight)


def test_one_factor_for_all_experts(rng):
    weight = random_weight(rng, 64, 32, (2,))
    scales = np.full((2, 64, 2), 0x38, np.uint8)
    scales[1] = 0x58  # 16
    packed = Marlin(scale_format="s0e5m3").pack(weight.replace(scales=scales))
    assert packed.buffers()["factor"] == 16  # 448 / 16 = 28
    scale = Marlin(scale_format="s0e5m3").global_scale(packed, "bfloat16")
    assert scale.tolist() == (weight.scale2 * np.float32(2.0**119) / 16).tolist()


def test_s0e5m3_bytes_that_are_no_scale():
    packed = Marlin(scale_format="s0e5m3").pack(modelopt("D"))
    buffers = packed.buffers() | {"scales": np.full(16 * 128, 0xFF, np.uint8)}
    with pytest.raises(LayoutError) as caught:
        Packed(packed.layout, packed.shape, buffers).unpack()
    assert str(caught.value) == (
        "the S0E5M3 block scale at [0, 0] is no E4M3 number with this factor (byte FF): got 1.0"
    )


@pytest.mark.parametrize("scale2", [4.7e-7, 600.0])
def test_global_scale_of_float16_has_a_range(scale2):
    """Below 2^-21 it is subnormal and rounds; 512 and more overflow."""
    packed = Marlin().pack(modelopt("D").replace(scale2=scale2))
    with pytest.raises(LayoutError, match="float16 rounds or cannot hold"):
        Marlin().global_scale(packed, "float16")
    for good in (4.8e-7, 511.0):
        packed = Marlin().pack(modelopt("D").replace(scale2=good))
        assert Marlin().global_scale(packed, "float16").item() == np.float32(good) * 128


def test_dtypes_of_global_scales():
    with pytest.raises(LayoutError, match="got 'float32', expected bfloat16 or float16"):
        Marlin().global_scale(Marlin().pack(modelopt("D")), "float32")


# -- experts, packed along the output --


def test_experts_out_pair_bytes():
    weight = counting(64, 32)
    codes = ExpertsOutPair().pack(weight).buffers()["codes"].reshape(32, 32)
    assert codes[:4, 0].tobytes().hex(" ") == "00 11 22 33"
    assert ExpertsOutPair().sizes((3, 128, 48)) == {"codes": 48 * 64, "scales": 3 * 128}
    assert ExpertsOutPair("atom").sizes((3, 128, 48)) == {"codes": 48 * 64, "scales": 2 * 512}


def test_atom_scales_of_experts():
    """One scale for each patch of 16 k and 16 n: row k and column n / 16 of the tiles."""
    weight = counting(128, 64)
    patches = np.arange(1, 33, dtype=np.uint8).reshape(8, 4)
    weight = weight.replace(scales=patches.repeat(16, 0))
    packed = ExpertsOutPair("atom").pack(weight)
    for n, k in ((0, 0), (17, 5), (127, 63), (64, 40)):
        byte = n // 64 * 512 + k % 32 * 16 + k // 32 * 4 + n // 16 % 4
        assert packed.layout.offset(n, k, weight.shape, "scales") == byte
        assert packed.buffers()["scales"][byte] == patches[n // 16, k // 16]
    assert packed.unpack().same(weight)


def test_what_atom_scales_cannot_hold(rng):
    weight = random_weight(rng, 64, 32, (2,))
    scales = np.full((2, 64, 2), 0x38, np.uint8)
    scales[1, 37, 1] = 0x39
    weight = weight.replace(scales=scales)
    with pytest.raises(LayoutError) as caught:
        ExpertsOutPair("atom").pack(weight)
    assert str(caught.value) == (
        "layout experts_out_pair cannot hold this weight: the block scale at [1, 37, 1] differs from that of row 32, "
        "and the form atom has one for rows 32..47; use scale_form=decode: got (2, 64, 32)"
    )
    assert ExpertsOutPair().pack(weight).unpack().same(weight)


def test_atom_scales_that_differ_within_a_block():
    packed = ExpertsOutPair("atom").pack(counting(64, 32))
    scales = packed.buffers()["scales"].copy()
    scales[packed.layout.offset(16, 18, packed.shape, "scales")] = 0x40
    with pytest.raises(LayoutError) as caught:
        Packed(packed.layout, packed.shape, packed.buffers() | {"scales": scales}).unpack()
    assert str(caught.value) == (
        "a block of 16 k has several scales in the form atom, which no weight has at [16, 18]: got 64, expected 56"
    )


@pytest.mark.parametrize(
    ("n", "k", "reason"), [(96, 32, "N = 96 is not a multiple of 64"), (64, 20, "K = 20 is not a multiple of 16")]
)
def test_experts_out_pair_of_other_shapes(rng, n, k, reason):
    with pytest.raises(LayoutError, match=reason):
        ExpertsOutPair().pack(random_weight(rng, n, k))


# -- gate and up --


@pytest.mark.parametrize(
    ("order", "first", "n"),
    [
        ("concatenated", [0, 1, 2, 3], 8),
        ("up_first", [4, 5, 6, 7, 0, 1, 2, 3], 8),
        ("interleaved", [0, 4, 1, 5, 2, 6, 3, 7], 8),
        ("up_first_interleaved", [4, 0, 5, 1, 6, 2, 7, 3], 8),
        ("up_first_64", [*range(128, 192), *range(64), *range(192, 256), *range(64, 128)], 256),
    ],
)
def test_orders_of_gate_and_up(rng, order, first, n):
    """The buffers are those of the inner layout for the rows in that order, a second scale for each row too."""
    weight = random_weight(rng, n, 64, (2,), per_row=True, input_scale=True, pre_scale=True)
    rows = first if len(first) == n else list(range(n))
    moved = weight.replace(codes=weight.codes[:, rows], scales=weight.scales[:, rows], scale2=weight.scale2[:, rows])
    for inner in (Rows(), Columns(align=32), Gguf(), Marlin(), Trtllm(), Comfy(), Atoms128x4()):
        packed = GateUp(order, inner).pack(weight)
        expected = inner.pack(moved).buffers()
        assert packed.buffers().keys() == expected.keys()
        for name, buffer in expected.items():
            assert_same_bytes(packed.buffers()[name], buffer)
        assert packed.unpack().same(weight)


@pytest.mark.parametrize(
    ("order", "n", "reason"),
    [
        ("interleaved", 5, "N = 5 is not a multiple of 2"),
        ("up_first", 7, "N = 7 is not a multiple of 2"),
        ("up_first_64", 192, "N = 192 is not a multiple of 128"),
    ],
)
def test_gate_and_up_are_of_one_size(rng, order, n, reason):
    with pytest.raises(LayoutError) as caught:
        GateUp(order, Rows()).pack(random_weight(rng, n, 32))
    assert str(caught.value) == f"layout gate_up cannot hold this weight: {reason}: got ({n}, 32)"


def test_what_the_inner_layout_refuses(rng):
    with pytest.raises(LayoutError, match="K = 32 is not a multiple of 64"):
        GateUp("up_first", Gguf()).pack(random_weight(rng, 4, 32))
    weight = counting(64, 32)
    scales = weight.scales.copy()
    scales[3, 1] = 1
    with pytest.raises(LayoutError) as caught:
        GateUp("up_first", Marlin(scale_format="s0e5m3", rule="min")).pack(
            weight.replace(scales=np.where(scales == 1, scales, 0x7E).astype(np.uint8))
        )
    assert "with its rows up_first, S0E5M3 with factor 8 turns the block scale at [0, 0] from 448" in str(caught.value)
    with pytest.raises(LayoutError, match="gate_up inside gate_up"):
        GateUp("up_first", GateUp("up_first", Rows()))


def test_nibbles_of_high_first():
    """What the statement's backwards digit means, in bytes."""
    weight = counting(16, 16)
    assert Comfy().pack(weight).buffers()["codes"][:8].tobytes().hex(" ") == "01 23 45 67 89 ab cd ef"
    assert nibbles(Comfy().pack(weight).buffers()["codes"])[Comfy().offset(0, 6, (16, 16))] == 6
