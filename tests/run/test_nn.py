"""The Linear module, and swapping it into models: real ones and ones on the meta device, tied and untied."""

from __future__ import annotations

import copy
import io
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from halfbyte.errors import LayoutError, UsageError, WeightError
from halfbyte.layouts import Packed
from halfbyte.nn import Linear, SwapReport, swap_linears
from halfbyte.ops import linear, pack, plan
from halfbyte.weight import DenseWeight, Fp8Weight, Mxfp4Weight, Weight, to_numpy
from helpers_run import random_floats, random_weight

BFLOAT16 = ml_dtypes.bfloat16


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_buffers()) | dict(module.named_parameters())


class TestLinear:
    w = random_weight(48, 40, per_row=True, pre_scale=True)
    bias = random_floats((48,), "float32")
    x = torch.from_numpy(random_floats((2, 3, 40), "float32"))

    def test_forward_is_linear(self):
        layer = Linear(self.w, self.bias)
        expected = linear(self.x, self.w.torch(), torch.from_numpy(self.bias))
        assert torch.equal(layer(self.x), expected)
        assert torch.equal(Linear(pack(self.w), self.bias)(self.x), expected)
        assert torch.equal(Linear(self.w.torch(), torch.from_numpy(self.bias))(self.x), expected)
        assert Linear(self.w)(self.x.bfloat16()).dtype == torch.bfloat16

    def test_it_holds_the_buffers_of_the_packed_and_nothing_dense(self):
        layer = Linear(self.w)
        assert set(dict(layer.named_buffers())) == {"codes", "scales", "scale2", "pre_scale"}
        assert not list(layer.parameters())
        assert isinstance(layer.packed, Packed)
        assert layer.packed is layer.packed
        assert layer.packed.unpack().same(self.w.torch())

    def test_repr(self):
        kernel = plan("linear", pack(self.w).to("cpu"), rows=1, dtype="float32").kernel
        assert repr(Linear(self.w)) == f"Linear(N=48, K=40, layout=rows, bias=False, kernel={kernel})"
        assert "bias=True" in repr(Linear(self.w, self.bias))

    @pytest.mark.parametrize(
        "cast",
        [
            lambda m: m.half(),
            lambda m: m.bfloat16(),
            lambda m: m.double(),
            lambda m: m.to(torch.float16),
            lambda m: m.to("cpu", torch.bfloat16),
            lambda m: m.type(torch.float16),
            lambda m: torch.nn.Sequential(m).half()[0],
        ],
    )
    def test_a_cast_changes_the_bias_alone(self, cast):
        layer = Linear(self.w, self.bias)
        before = {name: tensor.clone() for name, tensor in layer.named_buffers()}
        cast(layer)
        assert layer.bias.dtype != torch.float32
        for name, tensor in layer.named_buffers():
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor, before[name])

    def test_moving_keeps_dtypes(self):
        layer = Linear(self.w, self.bias)
        dtypes = {name: tensor.dtype for name, tensor in tensors_of(layer).items()}
        layer.to("meta")
        assert all(tensor.is_meta for tensor in tensors_of(layer).values())
        assert {name: tensor.dtype for name, tensor in tensors_of(layer).items()} == dtypes
        assert layer.packed.buffers()["codes"].is_meta
        layer.to_empty(device="cpu")
        layer.load_state_dict(Linear(self.w, self.bias).state_dict())
        assert torch.equal(layer(self.x), Linear(self.w, self.bias)(self.x))

    @pytest.mark.parametrize("assign", [False, True])
    def test_the_state_dict_carries_it(self, assign):
        layer, other = (
            Linear(self.w, self.bias),
            Linear(random_weight(48, 40, seed=5, per_row=True, pre_scale=True), -self.bias),
        )
        other(self.x)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        assert torch.equal(other(self.x), layer(self.x))

    def test_a_state_dict_of_another_layout_is_refused(self):
        layer = Linear(self.w)
        state = layer.state_dict()
        state["_extra_state"] = torch.tensor(list(b"tiles"), dtype=torch.uint8)
        with pytest.raises(UsageError, match="another layout: got tiles, expected rows"):
            layer.load_state_dict(state)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_are_independent(self, duplicate):
        layer = Linear(self.w, self.bias)
        expected = layer(self.x)
        twin = duplicate(layer)
        layer.codes.zero_()
        assert torch.equal(twin(self.x), expected)
        assert twin.packed.buffers()["codes"] is twin.codes

    def test_a_weight_with_one_shared_scale2_can_be_loaded_in_place(self):
        w = random_weight(16, 16).torch()
        layer = Linear(w.replace(scale2=w.scale2.expand(16, 1)))
        layer.load_state_dict(layer.state_dict())

    def test_errors(self):
        with pytest.raises(UsageError, match=r"a Linear holds one matrix: got \(2, 16, 16\)"):
            Linear(Weight.stack([random_weight(16, 16)] * 2))
        with pytest.raises(UsageError, match=r"bias does not fit N: got \(47,\), expected \(48,\)"):
            Linear(self.w, self.bias[:47])
        with pytest.raises(WeightError, match="null"):
            Linear(Weight.null((16, 16)))
        mx = Mxfp4Weight(codes=np.zeros((4, 16), np.uint8), scales=np.zeros((4, 1), np.uint8))
        for other in (mx, pack(mx, "rows(kind=mxfp4)")):
            with pytest.raises(UsageError, match=r"cast it with halfbyte\.mxfp4\.to_nvfp4"):
                Linear(other)


def llama_config(**changes) -> LlamaConfig:
    fields = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(fields | changes))


def build(config: LlamaConfig, *, meta: bool = False, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def checkpoint_of(
    model: torch.nn.Module, *, fp8: str = "", head: bool = False
) -> tuple[dict[str, object], torch.nn.Module]:
    """A fake checkpoint with a random Weight for each linear layer, and the dense model that it means."""
    meaning = copy.deepcopy(model)
    entries: dict[str, object] = {}
    for seed, (name, module) in enumerate(meaning.named_modules()):
        if not isinstance(module, torch.nn.Linear) or (name == "lm_head" and not head):
            continue
        n, k = module.weight.shape
        w = random_weight(n, k, seed=seed)
        entries[name] = w.replace(scale2=np.float32(1 / np.linalg.norm(w.dequantize(), 2) * w.scale2))
        if fp8 and fp8 in name:
            data = random_floats((n, k), "float32", seed).astype(ml_dtypes.float8_e4m3fn)
            entries[name] = Fp8Weight(data=data, scale=0.01)
        values = torch.from_numpy(np.array(entries[name].dequantize()))
        module.weight = torch.nn.Parameter(values.to(module.weight.dtype))
        if module.bias is not None:
            torch.nn.init.normal_(module.bias)
    quantized = {f"{name}.weight" for name in entries}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name, tensor in meaning.state_dict().items():
        if name not in quantized | tied:
            entries[name] = DenseWeight(to_numpy(tensor).astype(BFLOAT16) if tensor.ndim > 1 else to_numpy(tensor))
            tensor.copy_(torch.from_numpy(entries[name].data.astype(np.float32)))
    return entries, meaning


def swapped_names(entries: dict[str, object]) -> tuple[str, ...]:
    return tuple(name for name, value in entries.items() if isinstance(value, Weight))


TOKENS = torch.arange(24).view(2, 12) * 3 % 96


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def assert_same_logits(got: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Two float32 models that differ in the order of their sums only."""
    a, b = logits(got), logits(expected)
    assert torch.linalg.norm(a - b) <= 1e-5 * torch.linalg.norm(b)


both = pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])


class TestSwapLinears:
    @both
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    def test_the_model_computes_what_the_checkpoint_means(self, meta, tied, bias):
        config = llama_config(tie_word_embeddings=tied, attention_bias=bias)
        entries, meaning = checkpoint_of(build(config))
        model = build(config, meta=meta)
        report = swap_linears(model, entries)
        assert isinstance(report, SwapReport)
        assert report.swapped == swapped_names(entries)
        assert len(report.swapped) == 14
        assert set(report.loaded) == set(entries) - set(report.swapped)
        assert (report.dequantized, report.unused) == ((), ())
        assert_same_logits(model, meaning)
        assert all(isinstance(model.get_submodule(name), Linear) for name in report.swapped)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert not any(tensor.is_meta for tensor in tensors_of(model).values())

    @both
    def test_a_quantized_head_replaces_the_head_only(self, meta):
        config = llama_config(tie_word_embeddings=True)
        plain = build(config)
        entries, meaning = checkpoint_of(plain, head=True)
        model = build(config, meta=meta)
        report = swap_linears(model, entries)
        assert "lm_head" in report.swapped
        assert isinstance(model.model.embed_tokens, torch.nn.Embedding)
        assert not isinstance(model.lm_head, torch.nn.Linear)
        assert_same_logits(model, meaning)

    @both
    def test_fp8_weights_are_dequantized_into_the_models_dtype(self, meta):
        entries, meaning = checkpoint_of(build(llama_config()), fp8="self_attn")
        model = build(llama_config(), meta=meta)
        report = swap_linears(model, entries)
        assert len(report.dequantized) == 8
        assert all("self_attn" in name for name in report.dequantized)
        assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
        assert_same_logits(model, meaning)
        assert "8 FP8 weights dequantized: model.layers.0.self_attn.q_proj" in str(report)

    def test_generation_runs_and_agrees(self):
        entries, meaning = checkpoint_of(build(llama_config()))
        model = build(llama_config(), meta=True)
        swap_linears(model, entries)
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(TOKENS, **settings), meaning.generate(TOKENS, **settings))

    @both
    @pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
    def test_dtype_is_that_of_the_parameters(self, meta, dtype):
        entries, _ = checkpoint_of(build(llama_config(attention_bias=True)))
        model = build(llama_config(attention_bias=True), meta=meta)
        swap_linears(model, entries, dtype=dtype)
        expected = torch.bfloat16 if dtype == "bfloat16" else dtype
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert model.model.layers[0].mlp.up_proj.scale2.dtype == torch.float32
        assert logits(model).dtype == expected

    def test_without_dtype_parameters_keep_theirs(self):
        entries, _ = checkpoint_of(build(llama_config()))
        model = build(llama_config(), dtype=torch.bfloat16)
        embedding = model.model.embed_tokens.weight
        swap_linears(model, entries)
        assert model.model.embed_tokens.weight is embedding
        assert embedding.dtype == torch.bfloat16
        assert np.array_equal(to_numpy(embedding.detach()), entries["model.embed_tokens.weight"].data)

    def test_the_model_does_not_share_memory_with_the_checkpoint(self):
        entries, _ = checkpoint_of(build(llama_config()))
        model = build(llama_config(), meta=True)
        swap_linears(model, entries)
        before = logits(model)
        for value in entries.values():
            if isinstance(value, DenseWeight):
                value.data[...] = 0
        assert torch.equal(logits(model), before)

    def test_what_has_no_place_is_listed(self):
        entries, _ = checkpoint_of(build(llama_config()))
        scales = [f"model.layers.{i}.self_attn.{kv}_proj.{kv}_scale" for i in range(2) for kv in "kv"]
        for name in scales:
            entries[name] = DenseWeight(np.float32([0.5]))
        report = swap_linears(build(llama_config()), entries)
        assert report.unused == tuple(scales)
        assert str(report).splitlines() == [
            "14 linear layers hold NVFP4 weights now",
            "7 dense tensors loaded",
            f"4 tensors unused: {', '.join(scales)}",
        ]

    def test_a_swapped_model_survives_its_state_dict(self):
        entries, _ = checkpoint_of(build(llama_config()))
        model, other = build(llama_config()), build(llama_config())
        swap_linears(model, entries)
        swap_linears(other, entries)
        other.model.layers[1].mlp.up_proj.codes.zero_()
        other.load_state_dict(model.state_dict())
        assert torch.equal(logits(other), logits(model))

    def test_the_training_flag_is_kept(self):
        entries, _ = checkpoint_of(build(llama_config()))
        model = build(llama_config()).train()
        swap_linears(model, entries)
        assert all(module.training for module in model.modules())


class TestSwapErrors:
    """Every one names the tensor."""

    up = "model.layers.0.mlp.up_proj"

    def failure(self, change, *, meta: bool = False, config: LlamaConfig | None = None) -> str:
        entries, _ = checkpoint_of(build(llama_config()))
        change(entries)
        with pytest.raises(UsageError) as caught:
            swap_linears(build(config or llama_config(), meta=meta), entries)
        return str(caught.value)

    def test_no_such_module(self):
        assert self.failure(lambda e: e.update({"model.layers.9.mlp.up_proj": random_weight(112, 64)})) == (
            "model.layers.9.mlp.up_proj: the model has no module of this name; "
            "build the model from the checkpoint's own config"
        )

    def test_fused_experts(self):
        name = "model.layers.0.mlp.experts.0.up_proj"
        message = self.failure(lambda e: e.update({name: random_weight(112, 64)}))
        assert message.endswith("; experts that transformers fuses into one parameter cannot be swapped yet")

    @pytest.mark.parametrize("name", ["model.norm", "model.layers.0.mlp", "model.embed_tokens"])
    def test_not_a_linear_layer(self, name):
        message = self.failure(lambda e: e.update({name: random_weight(96, 64)}))
        assert message.startswith(f"{name}: a quantized weight needs a linear layer: got ")

    def test_another_shape(self):
        message = self.failure(lambda e: e.update({self.up: random_weight(96, 64)}))
        assert message == f"{self.up}: the weight does not fit the model: got (96, 64), expected (112, 64)"
        fp8 = Fp8Weight(data=np.zeros((96, 64), np.uint8), scale=1)
        message = self.failure(lambda e: e.update({self.up: fp8}))
        assert message == f"{self.up}: the weight does not fit the model: got (96, 64), expected (112, 64)"

    def test_a_dense_tensor_of_another_shape(self):
        message = self.failure(lambda e: e.update({"model.norm.weight": DenseWeight(np.ones(65, np.float32))}))
        assert message == "model.norm.weight: the tensor does not fit the model: got (65,), expected (64,)"

    def test_a_dense_tensor_of_a_dtype_that_torch_does_not_have(self):
        data = np.ones(64, ml_dtypes.float8_e4m3)
        message = self.failure(lambda e: e.update({"model.norm.weight": DenseWeight(data)}))
        assert message == "model.norm.weight: torch has no such dtype: got float8_e4m3"

    @both
    def test_parameters_without_data(self, meta):
        def change(entries):
            del entries["model.norm.weight"], entries[self.up]

        assert self.failure(change, meta=meta) == (
            "the checkpoint has no data for 2 tensors of the model: "
            f"got {self.up}.weight, model.norm.weight; build the model from the checkpoint's own config"
        )

    @both
    def test_a_missing_bias(self, meta):
        message = self.failure(lambda e: None, meta=meta, config=llama_config(attention_bias=True))
        assert "no data for 8 tensors of the model: got model.layers.0.self_attn.q_proj.bias, " in message
        assert " and 3 more; " in message

    @pytest.mark.parametrize("first", [False, True])
    def test_a_bias_that_the_model_does_not_have(self, first):
        name = "model.layers.0.self_attn.q_proj.bias"

        def change(entries):
            others = dict(entries)
            entries.clear()
            bias = {name: DenseWeight(np.ones(64, np.float32))}
            entries.update(bias | others if first else others | bias)

        assert self.failure(change) == f"{name}: the checkpoint has a bias and the model's layer none"

    def test_tied_tensors_that_differ(self):
        config = llama_config(tie_word_embeddings=True)
        head = DenseWeight(np.ones((96, 64), np.float32))
        message = self.failure(lambda e: e.update({"lm_head.weight": head}), config=config)
        assert message == (
            "lm_head.weight: the model ties this tensor to model.embed_tokens.weight, "
            "and the checkpoint holds other values for it"
        )

    def test_tied_tensors_that_agree_are_fine(self):
        config = llama_config(tie_word_embeddings=True)
        entries, meaning = checkpoint_of(build(config))
        entries["lm_head.weight"] = entries["model.embed_tokens.weight"]
        model = build(config, meta=True)
        swap_linears(model, entries)
        assert_same_logits(model, meaning)

    def test_a_weight_that_cannot_be_packed(self):
        entries, _ = checkpoint_of(build(llama_config()))
        scales = entries[self.up].scales.copy()
        scales[2, 3] = 0xFF
        entries[self.up] = entries[self.up].replace(scales=scales)
        with pytest.raises(LayoutError, match=rf"{self.up}: .*block scale at \[2, 3\] is NaN"):
            swap_linears(build(llama_config()), entries)

    def test_another_kind_of_weight(self):
        assert self.failure(lambda e: e.update({self.up: object()})) == (
            f"{self.up}: no model can be filled with this kind of weight: got object"
        )

    def test_dtype(self):
        with pytest.raises(UsageError, match="unknown dtype: got 'int8'"):
            swap_linears(build(llama_config()), {}, dtype="int8")


class WithBuffer(torch.nn.Module):
    """A layer and a buffer that no checkpoint holds and no config gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16, bias=False)
        self.other = torch.nn.Module()
        self.other.register_buffer("table", torch.arange(3), persistent=False)


def test_buffers_on_meta_that_cannot_be_computed_are_an_error():
    with torch.device("meta"):
        model = WithBuffer()
    with pytest.raises(
        UsageError,
        match=r"other: this module's buffers are on the meta device.*: got table; build the model on the CPU",
    ):
        swap_linears(model, {"layer": random_weight(16, 16)})
    model = WithBuffer()
    swap_linears(model, {"layer": random_weight(16, 16)})
    assert isinstance(model.layer, Linear)


def test_rotary_frequencies_are_those_of_a_real_model():
    config = llama_config(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    )
    entries, real = checkpoint_of(build(config))
    model = build(config, meta=True)
    swap_linears(model, entries)
    for name, buffer in real.model.rotary_emb.named_buffers():
        assert torch.equal(model.model.rotary_emb.get_buffer(name), buffer)
    assert model.model.rotary_emb.attention_scaling == real.model.rotary_emb.attention_scaling
