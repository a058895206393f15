"""The canonical weight over torch tensors: what NumPy gives, bit for bit."""

import copy
import pickle
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte.errors import WeightError
from halfbyte.mxfp4 import to_nvfp4
from halfbyte.ops import linear
from halfbyte.weight import DenseWeight, Fp8Weight, LossyWarning, Mxfp4Weight, Weight, to_numpy, to_torch
from helpers import assert_same_bytes, exact, random_weight

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(params=[((), 7, 48), ((), 5, 20), ((2, 3), 4, 20), ((), 0, 32), ((), 4, 0)], ids=str)
def weight(request, rng):
    experts, n, k = request.param
    return random_weight(rng, n, k, experts, per_row=True, input_scale=True, pre_scale=True)


def fields(w):
    return [a for n in ("codes", "scales", "scale2", "input_scale", "pre_scale") if (a := getattr(w, n)) is not None]


def test_there_and_back(weight):
    w = weight.torch()
    assert all(isinstance(a, torch.Tensor) for a in fields(w))
    assert w.pre_scale.dtype == torch.bfloat16
    assert (w.shape, w.k, w.n, w.experts, w.per_row, w.nbytes) == (
        weight.shape,
        weight.k,
        weight.n,
        weight.experts,
        weight.per_row,
        weight.nbytes,
    )
    assert w.same(weight)
    assert weight.same(w)
    assert w.numpy().same(weight)
    assert w.torch().same(weight)
    assert repr(w).endswith("torch on cpu)")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(weight, dtype):
    values = weight.torch().dequantize(dtype)
    assert values.dtype == getattr(torch, dtype)
    assert_same_bytes(values, weight.dequantize(dtype))


def transposed(a):
    """The same numbers with the last two axes swapped in memory."""
    return a.mT.contiguous().mT


@pytest.mark.parametrize("view", [transposed, lambda a: a.flip(0), lambda a: a.repeat_interleave(2, 0)[::2]])
def test_dequantize_of_views(view, rng):
    w = random_weight(rng, 6, 48).torch()
    other = Weight(codes=view(w.codes), scales=view(w.scales), scale2=w.scale2)
    assert_same_bytes(other.dequantize(), exact(other).astype(np.float32))


@pytest.mark.parametrize("codes", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2], ids=str)
@pytest.mark.parametrize("scales", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scale2", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_views_of_bytes(codes, scales, scale2, rng):
    w = random_weight(rng, 4, 32).replace(scale2=0.5).torch()
    other = Weight(codes=w.codes.view(codes), scales=w.scales.view(scales), scale2=w.scale2.to(scale2))
    assert other.codes.dtype == other.scales.dtype == torch.uint8
    assert other.codes.data_ptr() == w.codes.data_ptr()
    assert other.same(w)


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5)])
@pytest.mark.parametrize("experts", [(), (3,)], ids=str)
def test_one_scale2(value, experts, rng):
    w = random_weight(rng, 4, 32, experts).torch().replace(scale2=value, input_scale=value)
    assert w.scale2.shape == (*experts, 1, 1)
    assert w.input_scale.shape == experts
    assert bool((w.scale2 == 0.5).all() and (w.input_scale == 0.5).all())


def test_scale2_shapes(rng):
    w = random_weight(rng, 4, 32, (3,)).torch()
    values = 1 + torch.arange(12.0)
    assert w.replace(scale2=values[:3]).scale2.shape == (3, 1, 1)
    assert w.replace(scale2=values.reshape(3, 4)).scale2.shape == (3, 4, 1)
    assert w.replace(scale2=values[:4]).scale2.shape == (3, 4, 1)
    with pytest.raises(WeightError, match="scale2 does not fit the codes"):
        w.replace(scale2=values[:2])


def test_refused_dtypes(rng):
    w = random_weight(rng, 4, 32).torch()
    with pytest.raises(WeightError) as caught:
        w.replace(codes=w.codes.float())
    assert str(caught.value) == "codes are of the wrong dtype: got float32, expected uint8 or float8_e4m3fn"
    with pytest.raises(WeightError) as caught:
        w.replace(scales=w.scales.view(torch.float8_e5m2))
    assert str(caught.value) == "scales are of the wrong dtype: got float8_e5m2, expected uint8 or float8_e4m3fn"
    with pytest.raises(WeightError, match="unknown dtype"):
        w.dequantize("float64")


@pytest.mark.parametrize("name", ["codes", "scales", "scale2", "input_scale", "pre_scale"])
@pytest.mark.parametrize("into", ["numpy", "torch"])
def test_libraries_are_not_mixed(name, into, rng):
    w = random_weight(rng, 4, 32, per_row=True, input_scale=True, pre_scale=True)
    host, other = (w, w.torch()) if into == "numpy" else (w.torch(), w)
    with pytest.raises(WeightError, match="librar"):
        host.replace(**{name: getattr(other, name)})


def test_joining_does_not_mix_libraries(rng):
    a, b = random_weight(rng, 4, 32), random_weight(rng, 4, 32).torch()
    for join in (Weight.concat, Weight.stack):
        for parts in ([a, b], [b, a]):
            with pytest.raises(WeightError):
                join(parts)


def normal(w):
    """Block scales of 0.25 to 3.75, which powers of two leave exact."""
    return w.replace(scales=0x28 + w.scales % 32)


OPERATIONS = {
    "rows": lambda w: w.rows(1, 3),
    "columns": lambda w: w.columns(16, w.k),
    "numpy": lambda w: w.numpy().torch(),
    "split": lambda w: w.split([1, w.n - 1])[1],
    "concat": lambda w: Weight.concat([w, w.replace(scale2=0.25)]),
    "concat equal": lambda w: Weight.concat([w.replace(scale2=0.25)] * 2, "equal"),
    "stack": lambda w: Weight.stack([w, w.replace(scale2=0.25)]),
    "unstack": lambda w: Weight.stack([w, w.replace(scale2=0.25)]).unstack()[1],
    "permute rows": lambda w: w.permute_rows([4, 1, 0, 2, 3]),
    "permute rows back": lambda w: w.permute_rows([4, 1, 0, 2, 3], inverse=True),
    "slice experts": lambda w: Weight.stack([w, w, w.replace(scale2=0.25)]).slice_experts(1, 3),
    "permute experts": lambda w: Weight.stack([w, w, w.replace(scale2=0.25)]).permute_experts([2, 0, 1]),
    "shard rows": lambda w: w.shard_rows(3, 5),
    "shard columns": lambda w: w.columns(0, 32).shard_columns(1, 2),
    "shard experts": lambda w: Weight.stack([w, w.replace(scale2=0.25)]).shard_experts(1, 2)[1],
    "shift": lambda w: normal(w).shift_scale2(-1),
    "shift by row": lambda w: normal(w).shift_scale2(
        np.arange(np.prod(w.scale2.shape)).reshape(w.scale2.shape) % 5 - 2
    ),
    "concat shift": lambda w: Weight.concat([normal(w).replace(scale2=s) for s in (0.5, 1.0, 4.0)], "shift"),
    "replace": lambda w: w.replace(input_scale=0.75, pre_scale=None),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("experts", [(), (2,)], ids=str)
def test_operations(operation, per_row, experts, rng):
    w = random_weight(rng, 5, 40, experts, per_row=per_row, input_scale=True, pre_scale=True)
    done = operation(w.torch())
    assert all(isinstance(a, torch.Tensor) for a in fields(done))
    assert done.same(operation(w))
    assert_same_bytes(done.dequantize(), operation(w).dequantize())


def test_concat_common(rng):
    parts = [random_weight(rng, n, 48, per_row=n == 5) for n in (3, 5)]
    with pytest.warns(LossyWarning) as ours:
        w = Weight.concat(parts, "common")
    with pytest.warns(LossyWarning) as theirs:
        t = Weight.concat([p.torch() for p in parts], "common")
    assert isinstance(t.codes, torch.Tensor)
    assert t.same(w)
    assert str(theirs[0].message) == str(ours[0].message)


def test_concat_equal_refuses(rng):
    parts = [random_weight(rng, 2, 32).replace(scale2=s).torch() for s in (0.5, 0.25)]
    with pytest.raises(WeightError, match=r"different scale2: got \[0.5, 0.25\]"):
        Weight.concat(parts, "equal")


def test_permutations_as_tensors(rng):
    w, order = random_weight(rng, 5, 40, (3,), per_row=True), [4, 1, 0, 2, 3]
    for index in (order, tuple(order), np.array(order, np.int32), torch.tensor(order)):
        assert w.torch().permute_rows(index).same(w.permute_rows(order))
        assert w.permute_rows(index).same(w.permute_rows(order))
    with pytest.raises(WeightError, match="not a permutation of experts: got 0 more than once, 1 never"):
        w.torch().permute_experts(torch.tensor([0, 0, 2]))


def test_shift_refuses(rng):
    w = random_weight(rng, 3, 32).replace(scales=np.array([[56, 56], [56, 1], [1, 56]], np.uint8)).torch()
    with pytest.raises(WeightError, match=r"would round at \[1, 1\]: got the scale 0.00195312 \(byte 01\)") as caught:
        w.shift_scale2(1)
    assert caught.value.index == [1, 1]
    with pytest.raises(WeightError, match=r"part 1: 2\^10 cannot move"):
        Weight.concat([w.replace(scales=w.scales * 0 + 0x7E, scale2=2.0**10), w.replace(scale2=1.0)], "shift")


def test_shift_in_torch_integers(rng):
    w = normal(random_weight(rng, 5, 40, per_row=True)).torch()
    p = torch.arange(-2, 3)[:, None]
    assert w.shift_scale2(p).same(w.numpy().shift_scale2(p.numpy()))
    assert_same_bytes(w.shift_scale2(p).dequantize(), w.dequantize())


@pytest.mark.parametrize("policy", ["exact", "shift"])
def test_a_fused_product_is_the_separate_ones(policy, rng):
    """q, k, v with scale2 1 : 2 : 8, through torch's reference kernel; whole tiles, so that BLAS sums alike."""
    parts = [normal(random_weight(rng, n, 48)).replace(scale2=s) for n, s in ((64, 0.3), (64, 0.6), (128, 2.4))]
    x = torch.randint(-4, 5, (5, 48), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    fused = linear(x, Weight.concat([p.torch() for p in parts], policy))
    assert_same_bytes(fused, torch.cat([linear(x, p.torch()) for p in parts], -1))


def test_device():
    w = random_weight(np.random.default_rng(0), 4, 32).torch("meta")
    assert w.codes.device.type == w.scale2.device.type == "meta"
    assert repr(w) == "Weight(shape=(4, 32), per-tensor scale2, torch on meta)"


# -- MXFP4, FP8 and dense --


@pytest.mark.parametrize("view", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_mxfp4(view):
    codes = np.tile((np.arange(32) * 0x11 % 256).astype(np.uint8), (2, 127, 1))
    scales = (
        np.arange(2 * 127 * 2, dtype=np.uint8).reshape(2, 127, 2) % 18 + np.array([0, 120], np.uint8)[:, None, None]
    )
    scales[1] += 115  # 235 to 252: up to the largest without Inf
    numpy = Mxfp4Weight(codes=codes, scales=scales, k=40)
    w = Mxfp4Weight(codes=torch.from_numpy(codes), scales=torch.from_numpy(scales).view(view), k=40)
    assert w.shape == numpy.shape == (2, 127, 40)
    assert repr(w) == "Mxfp4Weight(shape=(2, 127, 40), torch on cpu)"
    for dtype in DTYPES:
        assert w.dequantize(dtype).dtype == getattr(torch, dtype)
        assert_same_bytes(w.dequantize(dtype), numpy.dequantize(dtype))
    assert w.numpy().same(numpy)
    assert isinstance(numpy.torch().codes, torch.Tensor)
    assert numpy.torch("cpu").same(w)
    with pytest.raises(WeightError, match="part 1 and part 0 are of two libraries"):
        Mxfp4Weight.concat([w, numpy])
    made = to_nvfp4(w)
    assert isinstance(made.codes, torch.Tensor)
    assert made.numpy().same(to_nvfp4(numpy))
    assert_same_bytes(made.dequantize(), numpy.dequantize())
    with pytest.raises(WeightError, match="codes and scales are of two libraries"):
        Mxfp4Weight(codes=codes, scales=torch.from_numpy(scales))


@pytest.mark.parametrize("block", [None, (4, 4), (128, 128)], ids=str)
@pytest.mark.parametrize("view", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_fp8(block, view):
    data = np.arange(252, dtype=np.uint8).reshape(18, 14) % 0x7F
    grid = (18, 1) if block is None else (-(-18 // block[0]), -(-14 // block[1]))
    scale = (1 + np.arange(np.prod(grid), dtype=np.float32).reshape(grid)) / 7
    numpy = Fp8Weight(data=data, scale=scale, block=block, input_scale=0.5)
    w = Fp8Weight(
        data=torch.from_numpy(data).view(view),
        scale=torch.from_numpy(scale),
        block=block,
        input_scale=torch.tensor([0.5]),
    )
    assert (w.shape, w.granularity) == (numpy.shape, numpy.granularity)
    assert_same_bytes(w.input_scale, numpy.input_scale)
    for dtype in DTYPES:
        assert w.dequantize(dtype).dtype == getattr(torch, dtype)
        assert_same_bytes(w.dequantize(dtype), numpy.dequantize(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dense(source, dtype):
    data = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(source)
    w = DenseWeight(data)
    assert w.shape == (3, 5)
    assert w.dequantize(dtype).dtype == getattr(torch, dtype)
    assert w.dequantize(dtype).equal(data.to(getattr(torch, dtype)))


# -- to_torch and to_numpy --


MOVED = (np.uint8, np.float32, np.float16, np.float64, np.int32, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", MOVED, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)], ids=str)
@pytest.mark.parametrize("view", [lambda a: a, lambda a: a.T], ids=["plain", "transposed"])
@pytest.mark.parametrize("writable", [True, False], ids=["writable", "read-only"])
def test_moving(dtype, shape, view, writable, rng):
    a = view(np.asarray(rng.standard_normal(shape) * 9).astype(dtype))
    a.setflags(write=writable)
    tensor = to_torch(a)
    assert tensor.shape == a.shape
    assert_same_bytes(to_numpy(tensor), a)
    assert to_numpy(tensor).dtype == a.dtype
    assert to_numpy(a) is a
    assert to_torch(tensor) is tensor


@pytest.mark.parametrize("writable", [True, False], ids=["writable", "read-only"])
def test_moving_what_torch_cannot_share(writable):
    """torch has no negative strides."""
    a = np.arange(6, dtype=np.uint8)[::-1]
    a.setflags(write=writable)
    assert to_torch(a).tolist() == [5, 4, 3, 2, 1, 0]


def test_a_writable_array_is_shared():
    a = np.zeros(4, np.float32)
    to_torch(a)[0] = 1
    assert a[0] == 1
    a.setflags(write=False)
    to_torch(a)[0] = 2
    assert a[0] == 1


def test_a_gradient_is_left_behind():
    x = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_numpy(x * 2).tolist() == [2, 2]
