"""Descriptors as C reads them, bundles that refuse what does not fit, exact attention, and the choice of a kernel."""

from __future__ import annotations

import ctypes
import re
from dataclasses import MISSING, FrozenInstanceError, fields, replace

import numpy as np
import pytest

from attention_cases import CASES, MAKERS, PAGE, by_loops, cumulative, llm, np_dtype, paged, v2_llm, vit, with_intervals
from halfbyte import jit
from halfbyte.errors import NoKernelError, UsageError
from halfbyte.kernels import (
    KERNELS,
    Call,
    FmhaV2Llm,
    FmhaV2Vit,
    LinearArgs,
    LlmFmha,
    LlmFmhaPaged,
    TensorDesc,
    VitFmha,
    preflight,
    select,
)
from halfbyte.kernels.descriptors import c_struct
from halfbyte.layouts import Columns, Rows
from halfbyte.mxfp4 import to_nvfp4
from halfbyte.ops import attention, linear, pack, plan
from halfbyte.weight import Mxfp4Weight, Weight

BUNDLES = (LinearArgs, LlmFmha, LlmFmhaPaged, VitFmha, FmhaV2Llm, FmhaV2Vit)


def said(message):
    """The whole message and no other."""
    return pytest.raises(UsageError, match=f"^{message}$")


class TestStruct:
    @pytest.mark.parametrize(
        ("rank", "size", "strides_at"), [(1, 16, None), (2, 24, 16), (3, 40, 24), (4, 48, 24), (5, 64, 32)]
    )
    def test_sizes_and_offsets(self, rank, size, strides_at):
        struct = c_struct(rank)
        assert ctypes.sizeof(struct) == size
        assert (struct.data.offset, struct.dynamic_shapes.offset) == (0, 8)
        assert (struct.dynamic_strides.offset if rank > 1 else None) == strides_at
        assert hasattr(struct, "dynamic_strides") == (rank > 1)

    def test_the_bytes(self):
        raw = bytes(TensorDesc.packed(0x1234, (2, 3, 5, 7)).struct())
        assert np.frombuffer(raw[:8], np.int64)[0] == 0x1234
        assert np.frombuffer(raw[8:24], np.int32).tolist() == [2, 3, 5, 7]
        assert np.frombuffer(raw[24:], np.int64).tolist() == [105, 35, 7]
        rank1 = bytes(TensorDesc.rank1(0x1234, 9).struct())
        assert np.frombuffer(rank1[8:12], np.int32).tolist() == [9]

    def test_c_code_reads_the_array_through_it(self):
        a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        struct = TensorDesc.of(a.swapaxes(0, 1)).struct()
        (s0, s1), memory = struct.dynamic_strides, ctypes.cast(struct.data, ctypes.POINTER(ctypes.c_float))
        assert [memory[2 * s0 + 1 * s1 + z] for z in range(4)] == a[1, 2].tolist()


class TestDescriptors:
    def test_packed(self):
        a = np.zeros((2, 3, 4), np.float16)
        desc = TensorDesc.packed(a, a.shape)
        assert (desc.data, desc.shape, desc.strides) == (a.ctypes.data, (2, 3, 4), (12, 4))
        assert desc.owner is a
        assert TensorDesc.packed(a, (6, 4)).strides == (4,)

    def test_strides_beyond_int32_are_exact(self):
        assert TensorDesc.packed(16, (4, 2**31 - 1, 2**20)).strides == ((2**31 - 1) * 2**20, 2**20)
        sizes = np.array([3, 2**30, 4], np.int32)
        assert TensorDesc.packed(16, sizes).strides == (2**32, 4)

    def test_strided(self):
        a = np.zeros((5, 8, 2, 4), np.float16)
        desc = TensorDesc.strided(a, (5, 2, 8, 4), (64, 4, 8))
        assert desc == TensorDesc.of(a.swapaxes(1, 2))
        assert desc.extent == a.size

    def test_of_takes_views_as_they_lie(self):
        a = np.zeros((6, 5), np.float64)
        view = a[1::2, :3]
        desc = TensorDesc.of(view)
        assert (desc.data, desc.shape, desc.strides) == (a.ctypes.data + 40, (3, 3), (10,))
        assert TensorDesc.of(a[:, :1]).strides == (5,)
        assert TensorDesc.of(np.zeros(3)).strides == ()

    def test_cu_seqlens(self):
        a = cumulative([3, 0, 4])
        assert TensorDesc.cu_seqlens(a, 3) == TensorDesc.rank1(a, 4)
        assert TensorDesc.cu_seqlens(a, 3).strides == ()

    def test_nothing_in_it(self):
        assert TensorDesc.packed(np.zeros((0, 3)), (0, 3)).extent == 0

    a = np.zeros((4, 6), np.float32)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda a: TensorDesc.packed(a, (24,)),
                r"a packed descriptor has at least two axes: got \(24,\); use rank1",
            ),
            (lambda a: TensorDesc.packed(a, ()), r"a packed descriptor has at least two axes: got \(\); use rank1"),
            (
                lambda a: TensorDesc.packed(a, (4, 5)),
                r"the array has another number of elements: got 24, expected \(4, 5\)",
            ),
            (
                lambda a: TensorDesc.packed(a.T, (6, 4)),
                r"the array is not row-major without gaps: got strides \(1, 6\); use TensorDesc.of",
            ),
            (lambda a: TensorDesc.packed(a, (4, 6.0)), r"sizes and strides are integers: got 6.0"),
            (
                lambda a: TensorDesc.packed(16, (2, 2**31)),
                r"axis 1 does not fit int32: got 2147483648, expected 0..2147483647",
            ),
            (lambda a: TensorDesc.packed(16, (-1, 2)), r"axis 0 does not fit int32: got -1, expected 0..2147483647"),
            (
                lambda a: TensorDesc.packed(16, (2, 2**31 - 1, 2**31 - 1, 4)),
                r"the stride of axis 0 does not fit int64: got 18446744056529682436, expected 0..2\^63 - 1",
            ),
            (lambda a: TensorDesc.packed(16, (8, 2**31 - 1, 2**30)), r"the last element lies beyond int64: got \d+"),
            (lambda a: TensorDesc.packed(-1, (2, 2)), r"not an address: got -1"),
            (lambda a: TensorDesc.rank1(0, 2), r"not an address: got 0"),
            (lambda a: TensorDesc.of([1]), r"not an array: got list, expected NumPy, torch or an address"),
            (
                lambda a: TensorDesc.strided(a, (4, 6), (6, 1)),
                r"a descriptor of rank 2 has 1 strides, that of the last axis is 1: got 2 strides",
            ),
            (
                lambda a: TensorDesc.strided(a, (4, 6), (7,)),
                r"the array ends before the descriptor: got 24, expected 27",
            ),
            (
                lambda a: TensorDesc.strided(a, (24,), ()),
                r"a strided descriptor has at least two axes: got \(24,\); use rank1",
            ),
            (
                lambda a: TensorDesc.strided(16, (2, 2), (2**63,)),
                r"the stride of axis 0 does not fit int64: got 9223372036854775808, expected 0..2\^63 - 1",
            ),
            (lambda a: TensorDesc.rank1(a, 24), r"not a vector of this length: got \(4, 6\), expected \(24,\)"),
            (lambda a: TensorDesc.rank1(a[0], 5), r"not a vector of this length: got \(6,\), expected \(5,\)"),
            (lambda a: TensorDesc.cu_seqlens(np.zeros(4, np.int64), 3), r"cumulative lengths are int32: got int64"),
            (lambda a: TensorDesc.of(a.T), r"the last axis is not contiguous: got stride 6, expected stride 1"),
            (
                lambda a: TensorDesc.of(a[::-1]),
                r"the stride of axis 0 does not fit int64: got -6, expected 0..2\^63 - 1",
            ),
            (lambda a: TensorDesc.of(a[0, 0, ...]), r"a descriptor needs at least one axis"),
        ],
    )
    def test_refusals(self, make, message):
        with said(message):
            make(self.a)


class TestBundles:
    @pytest.mark.parametrize("bundle", BUNDLES)
    def test_no_field_has_a_default(self, bundle):
        assert all(f.default is MISSING and f.default_factory is MISSING and f.kw_only for f in fields(bundle))

    def test_they_are_frozen(self):
        with pytest.raises(FrozenInstanceError):
            llm().head_dim = 3

    def test_what_one_path_needs_the_other_has_not(self):
        names = {bundle: {f.name for f in fields(bundle)} for bundle in BUNDLES}
        having = {
            name: [bundle for bundle in BUNDLES if name in names[bundle]]
            for name in ("kv_cache_capacity", "tokens_per_page", "window_size_left", "skip_softmax_threshold_log2")
        }
        assert having == {
            "kv_cache_capacity": [LlmFmha],
            "tokens_per_page": [LlmFmhaPaged],
            "window_size_left": [LlmFmha, LlmFmhaPaged, FmhaV2Llm],
            "skip_softmax_threshold_log2": [LlmFmha, LlmFmhaPaged],
        }

    @pytest.mark.parametrize("op", MAKERS)
    def test_a_size_that_the_arrays_do_not_have(self, op):
        args = MAKERS[op]()
        sizes = [f.name for f in fields(args) if isinstance(getattr(args, f.name), int) and f.name != "causal"]
        assert len(sizes) >= 5
        for name in set(sizes) - {"max_seq_len"}:
            with pytest.raises(UsageError, match=r"does not fit the sizes|number of tokens"):
                replace(args, **{name: getattr(args, name) + 1})

    @pytest.mark.parametrize("op", MAKERS)
    def test_every_array_is_checked(self, op):
        args = MAKERS[op]()
        for field in fields(args):
            array = getattr(args, field.name)
            if isinstance(array, np.ndarray):
                with pytest.raises(UsageError, match=f"{field.name} does not fit the sizes|q does not fit"):
                    replace(args, **{field.name: array[:-1]})
                with pytest.raises(UsageError, match="is of the wrong dtype"):
                    replace(args, **{field.name: np.zeros(array.shape, np.int8)})
                if array.ndim > 1:
                    gaps = np.repeat(array, 2, axis=-1)[..., ::2]
                    with said(f"{field.name} is not row-major without gaps; copy it once"):
                        replace(args, **{field.name: gaps})

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: llm(hq=3, hkv=2),
                "the query heads are no multiple of the key heads: got 3 query heads, 2 key heads",
            ),
            (lambda: llm(hq=1, hkv=0), "there are no heads: got 1 query heads, 0 key heads, head_dim 8"),
            (lambda: llm(window_size_left=-1), "window_size_left is negative: got -1; None is no window"),
            (lambda: vit(q=[[[1.0]]]), "q is not an array: got list, expected NumPy or torch"),
            (lambda: vit(k=None), "k is not an array: got NoneType, expected NumPy or torch"),
            (lambda: llm((), batch_size=-1), r"a size of q is negative: got \(-1, 4, 4, 8\)"),
            (lambda: llm(attention_scale=0.0), "attention_scale is not a positive number: got 0.0"),
            (lambda: vit(v_scale=float("nan")), "v_scale is not a positive number: got nan"),
            (
                lambda: llm(skip_softmax_threshold_log2=1.0),
                "skip_softmax_threshold_log2 is not a number below 0, or 0 for off: got 1.0",
            ),
            (
                lambda: paged(skip_softmax_threshold_log2=-8.0, window_size_left=5),
                "a sliding window skips no softmax: got threshold -8.0, window 5",
            ),
            (lambda: paged(tokens_per_page=64), "pages have another number of tokens: got 64, expected 128"),
            (
                lambda: paged(bidirectional_begin=np.zeros((3, 4), np.int32)),
                "bidirectional_begin and bidirectional_end come together, expected both or neither",
            ),
            (
                lambda: replace(with_intervals(), causal=False, window_size_left=None),
                "a window or bidirectional intervals need causal attention: got causal=False",
            ),
            (
                lambda: paged(window_size_left=3, causal=False),
                "a window or bidirectional intervals need causal attention: got causal=False",
            ),
        ],
    )
    def test_numbers_that_cannot_be_meant(self, make, message):
        with said(message):
            make()

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (llm((5, 13), capacity=12), r"cu_kv_seqlens: sequence 1 has no such length: got 13, expected 0..12"),
            (
                llm(cu_kv_seqlens=np.array([0, 5, 3, 9], np.int32)),
                r"cu_kv_seqlens: sequence 1 has no such length: got -2, expected 0..12",
            ),
            (
                v2_llm(cu_kv_seqlens=np.array([1, 5, 5, 9], np.int32)),
                r"cu_kv_seqlens: cumulative lengths start at 0 at \[0\]: got 1",
            ),
            (paged(q_lengths=(3, 5, 2)), r"cu_q_seqlens: sequence 1 has no such length: got 5, expected 0..4"),
            (
                vit(cu_seqlens=np.array([0, 3, 3, 9, 9], np.int32)),
                r"cu_seqlens: cumulative lengths end at the total: got 9, expected 10",
            ),
            (vit(max_seq_len=5), r"cu_seqlens: sequence 2 has no such length: got 6, expected 0..5"),
        ],
    )
    def test_lengths_that_do_not_fit(self, args, message):
        with said(message):
            attention(args)

    def test_a_page_that_does_not_exist(self):
        args = paged()
        args.page_list[2, 1, 1] = args.num_pages
        with said(rf"page_list: no such page at \[2, 1, 1\]: got {args.num_pages}, expected 0..{args.num_pages - 1}"):
            attention(args)

    def test_scales_as_compiled_kernels_take_them(self):
        args = vit(attention_scale=0.5, q_scale=3.0, k_scale=2.0, v_scale=5.0, inv_o_scale=0.5)
        assert (args.score_scale, args.out_scale) == (3.0, 2.5)
        assert args.score_scale_log2 == pytest.approx(3 * 1.4426950408889634, rel=1e-15)


class TestBundleDescriptors:
    def shapes(self, args):
        return {name: (desc.shape, desc.strides) for name, desc in args.descriptors().items()}

    def test_llm(self):
        args = llm()
        assert self.shapes(args) == {
            "q": ((3, 4, 4, 8), (128, 32, 8)),
            "kv": ((3, 2, 2, 12, 8), (384, 192, 96, 8)),
            "out": ((3, 4, 4, 8), (128, 32, 8)),
            "cu_kv_seqlens": ((4,), ()),
        }
        assert args.descriptors()["kv"].data == args.kv.ctypes.data

    def test_the_pool_is_seen_head_by_head(self):
        args = paged()
        found = self.shapes(args)
        assert list(found) == ["q", "kv_pool", "page_list", "out", "cu_q_seqlens", "cu_kv_seqlens"]
        assert found["kv_pool"] == ((args.num_pages, 2, PAGE, 8), (PAGE * 16, 8, 16))
        assert args.descriptors()["kv_pool"] == TensorDesc.of(args.kv_pool.swapaxes(1, 2))
        assert list(with_intervals().descriptors())[6:] == ["bidirectional_begin", "bidirectional_end"]

    @pytest.mark.parametrize(
        ("args", "names"),
        [
            (vit(), ["q", "k", "v", "out", "cu_seqlens"]),
            (v2_llm(), ["q", "k", "v", "out", "cu_kv_seqlens"]),
            (MAKERS["fmha_v2_vit"](), ["q", "k", "v", "out", "cu_seqlens"]),
        ],
    )
    def test_arrays_of_their_own(self, args, names):
        found = args.descriptors()
        assert list(found) == names
        assert all(found[name] == TensorDesc.of(getattr(args, name)) for name in names)


class TestAttention:
    @pytest.mark.parametrize("case", CASES)
    def test_it_is_exact(self, case):
        args = CASES[case]()
        assert attention(args) is args.out
        assert np.array_equal(args.out, by_loops(args).out.astype(np.float32))

    @pytest.mark.parametrize("op", MAKERS)
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
    def test_it_is_rounded_once(self, op, dtype):
        args = MAKERS[op](dtype=dtype)
        attention(args)
        assert np.array_equal(args.out, by_loops(args).out.astype(args.out.dtype))
        wide = replace(args, out=np.empty(args.out.shape, np.float32))
        assert np.array_equal(attention(wide), by_loops(args).out.astype(np.float32))

    def test_by_hand(self):
        """Equal scores: the mean of the values that are seen."""
        args = llm((4,), s=2, hq=1, hkv=1, d=1, q=np.zeros((1, 2, 1, 1), np.float32))
        args.kv[0, 1, 0, :4, 0] = [1, 2, 3, 6]
        assert attention(args).ravel().tolist() == [2, 3]
        assert attention(replace(args, window_size_left=1)).ravel().tolist() == [2.5, 4.5]
        assert attention(replace(args, window_size_left=0)).ravel().tolist() == [3, 6]

    def test_a_query_without_keys_gives_zero(self):
        args = llm((2, 0), s=3)
        attention(args)
        assert not args.out[0, 0].any()
        assert args.out[0, 1].all()
        assert not args.out[1].any()

    def test_padding_rows_give_zero(self):
        args = paged()
        attention(args)
        assert args.out[0, :3].all()
        assert not args.out[0, 3].any()

    def test_nan_passes_through(self):
        args = llm()
        args.q[0, 1, 2, 3] = np.nan
        attention(args)
        assert np.isnan(args.out[0, 1, 2]).all()
        assert np.isfinite(args.out[0, 1, 3]).all()

    def test_the_order_of_pages_does_not_matter(self):
        one, two = paged(), paged()
        order = np.random.default_rng(0).permutation(two.num_pages)
        used = two.page_list != 99
        page_list = two.page_list.copy()
        page_list[used] = np.argsort(order)[page_list[used]]
        two = replace(two, kv_pool=two.kv_pool[order], page_list=page_list.astype(np.int32))
        assert np.array_equal(attention(one), attention(two))

    def test_the_four_bundles_agree(self):
        """The same sequence in a cache, in pages and in arrays of its own; and, seen whole, as an image's."""
        lengths = (130,)
        a = paged(lengths, (4,), hq=2, hkv=2)
        keys, values = (np.concatenate(a.kv_pool[a.page_list[0, part, :2]])[:130] for part in (0, 1))
        cache = np.stack([keys, values]).swapaxes(1, 2)[None].copy()
        dense = llm(lengths, hq=2, hkv=2, capacity=130, q=a.q, kv=cache)
        own = v2_llm(lengths, hq=2, hkv=2, longest=130, q=a.q, k=keys[None], v=values[None])
        assert np.array_equal(attention(a), attention(dense))
        assert np.array_equal(a.out, attention(own))
        q = np.concatenate([np.zeros((126, 2, 8), np.float32), a.q[0]])
        image = vit(lengths, h=2, q=q, k=keys, v=values)
        assert np.array_equal(attention(image)[126:], attention(replace(a, causal=False))[0])


class TestChoice:
    @pytest.mark.parametrize("op", MAKERS)
    def test_the_bundle_decides(self, op):
        args = MAKERS[op]()
        kernel = select(type(args), args.call())
        assert (kernel.bundle, kernel.op, kernel.name) == (type(args), op, f"{op.replace('_', '-')}-numpy")
        assert preflight(type(args), args.call()) is kernel

    def test_preflight_loads_the_kernel_that_runs_and_no_other(self, monkeypatch):
        loaded = []
        spied = tuple(replace(kernel, load=lambda call, name=kernel.name: loaded.append(name)) for kernel in KERNELS)
        monkeypatch.setattr("halfbyte.kernels.KERNELS", spied)
        preflight(VitFmha, vit().call())
        assert loaded == ["vit-fmha-numpy"]
        monkeypatch.setenv("HALFBYTE_KERNEL", "reference-numpy")
        packed = pack(Weight(codes=np.zeros((4, 8), np.uint8), scales=np.zeros((4, 1), np.uint8), scale2=1.0))
        call = Call.on(packed, rows=1, dtype="float32", out_dtype="float32", device="cpu", library="numpy", bias=False)
        preflight(LinearArgs, call)
        assert loaded == ["vit-fmha-numpy", "reference-numpy"]

    def test_the_nearest_comes_first_with_all_that_differs(self):
        args = paged(skip_softmax_threshold_log2=-8.0)
        with pytest.raises(NoKernelError) as caught:
            attention(args)
        assert str(caught.value) == (
            "no kernel computes llm_fmha_paged with D=8, Hq=4, Hkv=2, float32 to float32, causal paged skip_softmax, "
            "numpy on cpu; the nearest is llm-fmha-paged-numpy: "
            "skips no softmax: skip_softmax_threshold_log2 must be 0; llm-fmha-paged-torch: takes torch tensors, "
            "not NumPy arrays, and skips no softmax: skip_softmax_threshold_log2 must be 0"
        )

    def test_the_nearest_for_linear(self, monkeypatch):
        monkeypatch.setattr(jit, "missing", lambda: "numba is not installed")
        weight = Weight(codes=np.zeros((2, 4, 8), np.uint8), scales=np.zeros((2, 4, 1), np.uint8), scale2=1.0)
        call = Call.on(
            pack(weight, "columns"),
            rows=1,
            dtype="float32",
            out_dtype="float32",
            device="cpu",
            library="numpy",
            bias=False,
        )
        with pytest.raises(
            NoKernelError, match=r"the nearest is reference-numpy: reads the layout rows, not columns\(align=1\), and"
        ):
            select(LinearArgs, call)

    def test_a_bundle_on_another_kernel(self):
        kernel = select(VitFmha, vit().call())
        with said("kernel vit-fmha-numpy takes another bundle: got LlmFmha, expected VitFmha"):
            kernel.run(llm())

    def test_what_a_kernel_need_not_say(self):
        """Without launch it is bound, and called; without load it is compiled as it is configured."""
        seen = []

        def bind(args):
            return lambda *given: seen.append((args, *given))

        packed = pack(Weight(codes=np.zeros((4, 8), np.uint8), scales=np.zeros((4, 1), np.uint8), scale2=1.0))
        x, out = np.ones((1, 16), np.float32), np.empty((1, 4), np.float32)
        args = LinearArgs(x=x, weight=packed, bias=None, out=out)
        whole = next(kernel for kernel in KERNELS if kernel.name == "reference-numpy")
        lazy = replace(whole, launch=None, bind=bind, load=None, configure=len, compile=lambda *of: seen.append(of))
        lazy.run(args)
        lazy.prepare("call")
        assert seen == [(args, x, None, out), ("call", 4)]
        assert (lazy.module, lazy.on_gpu) == (__name__, False)
        with said("kernel reference-numpy cannot run, expected launch, or bind"):
            replace(whole, launch=None)
        with said("kernel reference-numpy cannot be loaded, expected load, or compile and configure"):
            replace(lazy, configure=None)

    def test_a_call_of_another_op(self):
        with said("a call of another op than VitFmha's: got 'llm_fmha', expected vit_fmha"):
            select(VitFmha, llm().call())

    def test_a_forced_kernel_leaves_other_ops_alone(self, monkeypatch):
        monkeypatch.setenv("HALFBYTE_KERNEL", "reference-numpy")
        assert select(VitFmha, vit().call()).name == "vit-fmha-numpy"
        monkeypatch.setenv("HALFBYTE_KERNEL", "vit-fmha-torch")
        with pytest.raises(
            NoKernelError, match=r"\(forced by HALFBYTE_KERNEL\); the nearest is vit-fmha-torch: takes torch"
        ):
            select(VitFmha, vit().call())

    def test_what_the_call_says(self):
        call = with_intervals().call()
        assert (call.causal, call.window, call.paged, call.bidirectional, call.skip_softmax) == (True,) * 4 + (False,)
        assert (call.queries, call.keys, call.longest) == (12, 3 * 4 * PAGE, 4 * PAGE)
        assert vit().call().causal is False

    def test_the_cost(self):
        cost = select(LlmFmha, llm(dtype="float16").call()).cost(llm(dtype="float16").call())
        assert cost.bytes == 2 * (2 * 3 * 4 * 4 * 8 + 3 * 2 * 2 * 12 * 8)
        assert cost.flops == 4 * (3 * 4 * 4 * 8) * 12


class TestLinearArgs:
    weight = pack(Weight(codes=np.zeros((4, 8), np.uint8), scales=np.zeros((4, 1), np.uint8), scale2=1.0), Rows())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"x": np.zeros((2, 15))}, r"x does not fit the weight and x: got \(2, 15\), expected \(2, 16\)"),
            ({"out": np.zeros((3, 4))}, r"out does not fit the weight and x: got \(3, 4\), expected \(2, 4\)"),
            ({"bias": np.zeros(5)}, r"bias does not fit the weight and x: got \(5,\), expected \(4,\)"),
        ],
    )
    def test_shapes(self, changes, message):
        made = {"x": np.zeros((2, 16)), "weight": self.weight, "bias": None, "out": np.zeros((2, 4))}
        with said(message):
            LinearArgs(**(made | changes))

    @pytest.mark.parametrize("layout", [Rows("mxfp4"), Columns(kind="mxfp4")], ids=lambda layout: layout.key)
    def test_mxfp4_is_refused(self, layout):
        """Before any kernel is asked, whoever makes the call."""
        mx = Mxfp4Weight(codes=np.zeros((4, 16), np.uint8), scales=np.full((4, 1), 127, np.uint8))
        packed, x, out = layout.pack(mx), np.ones((2, 32), np.float32), np.zeros((2, 4), np.float32)
        about = {"rows": 2, "dtype": "float32", "out_dtype": "float32", "device": "cpu", "library": "numpy"}
        hint = "cast it with halfbyte.mxfp4.to_nvfp4"
        for made in (
            lambda: linear(x, packed),
            lambda: plan("linear", packed, rows=2),
            lambda: LinearArgs(x=x, weight=packed, bias=None, out=out),
            lambda: Call.on(packed, bias=False, **about),
            lambda: Call(layout=layout, shape=(4, 32), per_row=False, pre_scale=False, bias=False, **about),
        ):
            got = re.escape(f"mxfp4 in the layout {layout.key}")
            with said(f"kernels compute with NVFP4 weights: got {got}; {hint} and pack that"):
                made()
        for made in (lambda: linear(x, mx), lambda: plan("linear", mx, rows=2)):
            with said(f"not a weight: got Mxfp4Weight, expected a Packed or a Weight; {hint}"):
                made()
        assert linear(x, to_nvfp4(mx)).tolist() == [[0.0] * 4] * 2

    def test_its_call(self):
        args = LinearArgs(
            x=np.zeros((2, 16), np.float16), weight=self.weight, bias=None, out=np.zeros((2, 4), np_dtype("bfloat16"))
        )
        assert args.call() == Call(
            layout=Rows(),
            shape=(4, 16),
            per_row=False,
            pre_scale=False,
            rows=2,
            dtype="float16",
            out_dtype="bfloat16",
            device="cpu",
            library="numpy",
            bias=False,
        )
