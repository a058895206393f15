"""Rows looked up by their numbers: the bits of dequantize, whatever looks them up, and numbers that name no row."""

import re
import sys

import numpy as np
import pytest
import torch

import gpu_codecs
import halfbyte as hb
from gpu_codecs import interpreted, needs_gpu, needs_triton
from halfbyte.embedding_op import dtype_of
from halfbyte.errors import NoKernelError, UsageError, WeightError
from halfbyte.kernels import KERNELS, EmbeddingArgs, EmbeddingCall, Int8Args, select
from halfbyte.kernels.cuda.embedding import TRITON
from halfbyte.layouts import Columns, Fragments, Rows
from halfbyte.remembered import lookups
from helpers import assert_same_bytes, random_weight

N, K = 37, 88
DTYPES = ("float32", "bfloat16", "float16")


def weight(**options):
    return random_weight(np.random.default_rng(0), N, K, **options)


def numbers(shape, dtype="int64"):
    return np.random.default_rng(1).integers(0, N, shape).astype(dtype)


@pytest.mark.parametrize("out_dtype", [*DTYPES, None])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_rows_are_those_of_dequantize(library, dtype, per_row, out_dtype):
    w, ids = weight(per_row=per_row), numbers((2, 5), dtype)
    expected = w.dequantize(out_dtype or "float32")[ids]
    packed = hb.pack(w) if library == "numpy" else hb.pack(w.torch())
    y = hb.embedding(ids if library == "numpy" else torch.from_numpy(ids), packed, out_dtype=out_dtype)
    assert isinstance(y, torch.Tensor) == (library == "torch")
    assert y.shape == (2, 5, K)
    assert_same_bytes(y, expected)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 1, 3)])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_shapes_of_ids(library, shape):
    w, ids = weight(per_row=True), numbers(shape)
    y = hb.embedding(ids, hb.pack(w)) if library == "numpy" else hb.embedding(torch.from_numpy(ids), w.torch())
    assert y.shape == (*shape, K)
    assert_same_bytes(y, w.dequantize()[ids])


def test_forms_of_ids():
    """Gaps, the other order of bytes, and K that ends inside a block."""
    w, ids = weight(), numbers((6, 4))
    assert_same_bytes(hb.embedding(ids[::2, 1::2], w), w.dequantize()[ids[::2, 1::2]])
    assert_same_bytes(hb.embedding(ids.astype(">i8"), w), w.dequantize()[ids])
    assert_same_bytes(hb.embedding(torch.from_numpy(ids).T, w.torch()), w.dequantize()[ids.T])
    w = random_weight(np.random.default_rng(0), 5, 39)
    assert_same_bytes(hb.embedding(np.arange(5), w), w.dequantize())


@pytest.mark.parametrize(("wrong", "index"), [([[0, 1], [-1, 2]], [1, 0]), ([[0, N], [99, 2]], [0, 1])])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_numbers_that_name_no_row_are_refused_on_the_cpu(library, wrong, index):
    ids = np.array(wrong)
    w = weight() if library == "numpy" else weight().torch()
    with pytest.raises(UsageError) as caught:
        hb.embedding(ids if library == "numpy" else torch.from_numpy(ids), w)
    assert str(caught.value) == f"ids name no row at {index}: got {ids[tuple(index)]}, expected 0..{N - 1}"


def test_no_rows():
    empty = weight().rows(0, 0)
    assert hb.embedding(np.zeros(0, np.int64), empty).shape == (0, K)
    with pytest.raises(UsageError, match=re.escape("expected 0..-1")):
        hb.embedding(np.zeros(1, np.int64), empty)


@pytest.mark.parametrize(
    ("ids", "w", "error", "words"),
    [
        ([1, 2], weight(), UsageError, "ids are no integers of 32 or 64 bits: got list"),
        (np.ones(2, np.int16), weight(), UsageError, "got int16, expected int32 or int64"),
        (np.ones(2, np.float32), weight(), UsageError, "got float32"),
        (np.ones(2, bool), weight(), UsageError, "got bool"),
        (
            torch.ones(2).long(),
            weight(),
            UsageError,
            "the weight and ids are of two libraries: got the weight in numpy",
        ),
        (np.ones(2, int), weight().dequantize(), UsageError, "not a weight: got ndarray"),
        (np.ones(2, int), hb.Weight.null((4, 16)), WeightError, "this weight is null"),
        (np.ones(2, int), weight(experts=(2,)), NoKernelError, "takes one matrix (N, K), not expert axes (2,)"),
        (np.ones(2, int), weight(pre_scale=True), NoKernelError, "takes no weight with a pre_scale"),
        (np.ones(2, int), hb.pack(weight(), "columns"), NoKernelError, "reads the layout rows, not columns(align=1)"),
    ],
    ids=lambda case: None,
)
def test_refusals(ids, w, error, words):
    with pytest.raises(error, match=re.escape(words)):
        hb.embedding(ids, w)


def test_an_unknown_dtype_of_the_result():
    with pytest.raises(UsageError, match="out_dtype is unknown: got int8"):
        hb.embedding(numbers(2), weight(), out_dtype="int8")


def test_fragments_say_the_dtype_of_the_result():
    for layout, dtype in ((Fragments("float16"), "float16"), (Fragments(), "bfloat16"), (Rows(), "float32")):
        assert dtype_of(layout.pack(weight())) == dtype
    with pytest.raises(NoKernelError, match="embedding-numpy: reads the layout rows, not fragments"):
        hb.embedding(numbers(2), Fragments().pack(weight()))


def call(**changes):
    fields = {"rows": 4, "dtype": "int64", "out_dtype": "bfloat16", "device": "cuda", "library": "torch"}
    packed = changes.pop("packed", hb.pack(weight()))
    return EmbeddingCall.of(packed, **(fields | {"capability": 90} | changes))


@needs_triton
@pytest.mark.parametrize("layout", [Rows(), Fragments(), Fragments("float16")], ids=lambda layout: layout.key)
def test_what_triton_takes(layout):
    packed = layout.pack(weight(per_row=True))
    assert TRITON.refuse(call(packed=packed)) == ()
    assert select(EmbeddingArgs, call(packed=packed)) is TRITON


@needs_triton
def test_what_triton_refuses(monkeypatch):
    assert TRITON.refuse(call(packed=Columns().pack(weight()))) == (
        "reads the layouts rows and fragments, not columns(align=1)",
    )
    assert TRITON.refuse(call(device="cpu", capability=0)) == ("runs on NVIDIA GPUs, not on cpu",)
    assert TRITON.refuse(call(capability=75)) == ("is for sm_80 or later, not sm_75",)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert TRITON.refuse(call()) == ("triton is not installed; run: pip install 'halfbyte[cuda]'",)
    assert select(EmbeddingArgs, call()).name == "embedding-torch"  # what there is without it


def test_a_number_that_names_no_row_is_nan_without_triton(monkeypatch):
    """The kernel in torch, as it runs on a GPU."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == "embedding-torch")
    w = weight()
    for held in (w, w.rows(0, 0)):
        ids = torch.tensor([3, -1, N, 2**40])
        out = torch.zeros(4, K)
        kernel.run(EmbeddingArgs(ids=ids, weight=hb.pack(held.torch()), out=out))
        assert_same_bytes(out[:1], w.dequantize()[3:4]) if held.n else None
        assert out[1 if held.n else 0 :].isnan().all()


def test_the_bundle():
    packed = hb.pack(weight())
    with pytest.raises(
        UsageError, match=re.escape("out does not fit the weight and ids: got (3, 88), expected (2, 88)")
    ):
        EmbeddingArgs(ids=numbers(2), weight=packed, out=np.zeros((3, K), np.float32))
    args = EmbeddingArgs(ids=numbers(2, "int32"), weight=packed, out=np.zeros((2, K), np.float16))
    assert args.call() == EmbeddingCall.of(
        packed, rows=2, dtype="int32", out_dtype="float16", device="cpu", library="numpy"
    )
    with pytest.raises(UsageError, match="a call of another op"):
        select(Int8Args, args.call())


def test_plan():
    packed = hb.pack(weight(per_row=True))
    made = hb.plan("embedding", packed, rows=7, out_dtype="float16")
    assert made.kernel == "embedding-numpy"
    assert made.bytes == 7 * (6 * 9 + 2 * K + 8 + 4)
    assert "embedding N=37 K=88 M=7, layout rows" in str(made)
    assert "int64 to float16" in str(made)
    assert dict(made.refusals)["embedding-torch"] == "takes torch tensors, not NumPy arrays"
    assert hb.plan("embedding", weight(), rows=1).notes == ("the weight is packed as rows in each call; pack it once",)
    for options in ({"precision": "int8"}, {"precision": "exact"}):
        with pytest.raises(UsageError, match="an embedding is exact"):
            hb.plan("embedding", packed, rows=1, **options)
    with pytest.raises(UsageError, match="an embedding is exact"):
        hb.plan("embedding", hb.to_int8(weight()), rows=1)
    with pytest.raises(UsageError, match="unknown op: got 'sum', expected linear or embedding"):
        hb.plan("sum", packed, rows=1)


@needs_triton
def test_plan_on_a_gpu_that_is_not_there():
    made = hb.plan("embedding", Fragments().pack(weight()), rows=7, device="cuda:sm_90")
    assert made.kernel == "triton-embedding"
    assert dict(made.refusals)["embedding-torch"] == "reads the layout rows, not fragments(dtype=bfloat16)"


def test_forced(monkeypatch):
    monkeypatch.setenv("HALFBYTE_KERNEL", "embedding-torch")
    with pytest.raises(NoKernelError, match="forced by HALFBYTE_KERNEL"):
        hb.embedding(numbers(2), weight())
    assert hb.embedding(torch.from_numpy(numbers(2)), weight().torch()).shape == (2, K)


class TestCompiled:
    def test_one_operator_in_a_full_graph(self):
        packed, ids = hb.pack(weight().torch()), torch.from_numpy(numbers((2, 3)))
        torch._dynamo.reset()
        run = torch.compile(
            lambda i: hb.embedding(i, packed, out_dtype="bfloat16") * 2, fullgraph=True, backend="eager"
        )
        expected = weight().dequantize("bfloat16")
        for given in (ids, ids[:1]):
            assert torch.equal(run(given), torch.from_numpy(expected[given].astype(np.float32)).bfloat16() * 2)
        with pytest.raises(UsageError, match="ids name no row"):
            run(ids + N)

    def test_opcheck(self):
        from halfbyte.torch_embedding import look_up

        packed = hb.pack(weight().torch())
        buffers = packed.buffers()
        for dtype in (torch.int32, torch.int64):
            args = (torch.tensor([[1, 2]], dtype=dtype), packed.key, N, K, ",".join(buffers), list(buffers.values()))
            torch.library.opcheck(look_up, (*args, torch.float16))


@needs_triton
def test_triton_in_the_interpreter():
    assert interpreted("embedding") == ["12"]


@needs_triton
@pytest.mark.parametrize("layout", [Rows(), Fragments("float16")], ids=lambda layout: layout.key)
def test_what_is_launched(monkeypatch, layout):
    """The first call and those that are bound: the same program, grid and addresses."""
    from halfbyte.kernels.cuda import embedding

    made, launched = [], []

    def program(kernel, signature, constants, **options):
        made.append((kernel.__name__, signature, constants, options))
        return lambda grid, args: launched.append((grid, [getattr(a, "data_ptr", lambda a=a: a)() for a in args]))

    monkeypatch.setattr(embedding, "program", program)
    packed = layout.pack(random_weight(np.random.default_rng(0), N, 2064, per_row=True).torch())
    ids, out = torch.from_numpy(numbers(5, "int32")), torch.empty(5, 2064, dtype=torch.float16)
    args = EmbeddingArgs(ids=ids, weight=packed, out=out)
    embedding.launch(args)
    embedding.bind(args)(ids, None, out)
    assert made[0] == made[1]
    name, signature, constants, options = made[0]
    assert name == "decode"
    assert signature["out"] == "*fp16:16"
    assert (signature["ids"], signature["k"]) == ("*i32", "i32:16")
    assert (constants["LOOKUP"], constants["PER_ROW"], constants["EACH"]) == (True, True, 1)
    assert options == {"device": torch.device("cpu"), "warps": 4}
    chunks = 3 if isinstance(layout, Rows) else 2
    planes = [packed.buffers()[name].data_ptr() for name in ("codes", "scales", "scale2")]
    assert launched == [((5 * chunks, 1, 1), [*planes, ids.data_ptr(), out.data_ptr(), 5, N, 2064])] * 2
    assert embedding.specified(layout, 40, False, "int64", "bfloat16")[0]["k"] == "i32"


def test_a_lookup_that_is_remembered():
    packed, seen = hb.pack(weight().torch()), []
    known = lookups(lambda ids, none, out: seen.append((ids, none, out)), packed, torch.bfloat16)
    ids = torch.from_numpy(numbers((4, 6)))
    for given in (ids, ids[::2].T):
        out = known(given)
        assert (out.shape, out.dtype) == ((*given.shape, K), torch.bfloat16)
        got, none, written = seen.pop()
        assert torch.equal(got, given)
        assert got.is_contiguous()
        assert (none, written) == (None, out)
    assert known(ids[:0]).shape == (0, 6, K)
    assert seen == []
    packed.buffers()["scale2"].add_(1)
    assert known(ids) is None


@pytest.mark.gpu
@needs_triton
@needs_gpu
class TestOnAGpu:
    def test_as_dequantized(self):
        assert gpu_codecs.check_embedding("cuda") == 12

    @pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
    @pytest.mark.parametrize("layout", [Rows(), Fragments(), Fragments("float16")], ids=lambda layout: layout.key)
    def test_public(self, layout):
        packed = layout.pack(weight().torch("cuda"))
        ids = torch.from_numpy(numbers((3, 4)))
        ids[1, 2], ids[2, 0] = N, -5
        y = hb.embedding(ids.cuda(), packed, out_dtype="float16").cpu()
        there = (ids >= 0) & (ids < N)
        assert_same_bytes(y[there], packed.unpack().dequantize("float16").cpu()[ids[there]])
        assert y[~there].isnan().all()
        for again in (ids, ids.T, ids[:2]):  # from now on remembered
            expected = y if again is ids else y.transpose(0, 1) if again.shape == ids.T.shape else y[:2]
            made = hb.embedding(again.cuda(), packed, out_dtype="float16").cpu()
            assert torch.equal(made.view(torch.int16), expected.contiguous().view(torch.int16))
        packed.buffers()["scales"].fill_(0x38)
        assert_same_bytes(
            hb.embedding(ids.cuda(), packed, out_dtype="float16").cpu()[there],
            packed.dequantize("float16").cpu()[ids[there]],
        )
        y = hb.embedding(ids.cuda(), packed, out_dtype="float16").cpu()
        assert hb.embedding(ids.cuda(), packed).dtype == getattr(torch, getattr(layout, "dtype", "float32"))
        backend = "inductor" if isinstance(layout, Rows) else "eager"  # which compiles for seconds
        compiled = torch.compile(
            lambda i: hb.embedding(i, packed, out_dtype="float16"), fullgraph=True, backend=backend
        )
        assert torch.equal(compiled(ids.cuda()).cpu().view(torch.int16), y.view(torch.int16))

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")  # torch's own
    def test_nothing_waits_for_the_device(self):
        packed, ids = hb.pack(weight().torch("cuda")), torch.tensor([1, N], device="cuda")
        hb.embedding(ids, packed)
        try:
            torch.cuda.set_sync_debug_mode("error")
            hb.embedding(ids, packed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
