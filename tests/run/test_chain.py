"""A decoder layer between two attentions in one call."""

import re

import pytest
import torch

import halfbyte as hb
from gpu_codecs import needs_gpu, needs_triton
from halfbyte.errors import UsageError
from halfbyte.layouts import Fragments, Rows
from halfbyte.step_ops import add_norm, chain, gate
from halfbyte.weight import Weight

ACTIVATIONS = {"silu": torch.nn.functional.silu, "relu2": lambda g: g.clamp(min=0) ** 2}
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class Layer:
    """The arguments of a call: A, H, I and N values, M tokens."""

    def __init__(self, shape, m, dtype=torch.float32, layout=None, last=False, biases=False, per_row=True, seed=0):
        a, h, i, n = shape
        generator = torch.Generator().manual_seed(seed)
        device = "cuda" if isinstance(layout, Fragments) else "cpu"

        def values(*size):
            return torch.randn(*size, generator=generator).to(dtype).to(device)

        def weight(n, k):
            codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
            scales = torch.randint(40, 60, (n, k // 16), dtype=torch.uint8, generator=generator)
            scale2 = (torch.rand(n if per_row else 1, 1, generator=generator) + 0.5) / (k**0.5 * 4)
            return Weight(codes=codes.to(device), scales=scales.to(device), scale2=scale2.to(device), k=k)

        self.plain = [weight(*shape) for shape in [(h, a), (2 * i, h), (h, i), (n, h)][: 3 if last else 4]]
        self.weights = [hb.pack(w, layout or Rows()) for w in self.plain]
        self.biases = [values(w.shape[0]) if biases else None for w in self.plain]
        self.norms = [values(h) for _ in self.plain[2:]]
        self.residual, self.attended = values(m, h), values(m, a)

    def run(self, activation="silu", rows=slice(None)):
        o, gate_up, down, *qkv = self.weights
        names = ("o_bias", "gate_up_bias", "down_bias", "qkv_bias")
        biases = dict(zip(names, self.biases, strict=False))
        behind = {"norm2": self.norms[1], "qkv_next": qkv[0], "eps2": 1e-3} if qkv else {}
        given = self.residual[rows], self.attended[rows]
        return chain(
            *given, o, self.norms[0], 1e-5, gate_up, down, activation=activation, **behind, **biases
        )  # fmt: skip

    def exact(self, activation="silu"):
        """In float64, with no rounding but those that are stated."""
        dtype = self.residual.dtype

        def rounded(x):
            return x.to(dtype).double()

        def product(x, i):
            y = x @ self.plain[i].dequantize().double().T
            return rounded(y if self.biases[i] is None else y + self.biases[i].double())

        def norm(x, i):
            factor = (x.square().mean(-1, keepdim=True) + (1e-3 if i else 1e-5)).rsqrt()
            return rounded(rounded(x * factor) * self.norms[i].double())

        s1 = rounded(self.residual.double() + product(self.attended.double(), 0))
        g, up = product(norm(s1, 0), 1).chunk(2, -1)
        s2 = rounded(s1 + product(rounded(ACTIVATIONS[activation](g) * up), 2))
        return s2, product(norm(s2, 1), 3) if len(self.norms) > 1 else None

    def check(self, activation="silu"):
        got = self.run(activation)
        for y, expected in zip(got, self.exact(activation), strict=True):
            if expected is None:
                assert y is None
                continue
            off = (y.double() - expected).norm() / expected.norm()
            assert off <= ULP[self.residual.dtype], off
        return got


@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_composed(dtype, last):
    Layer((128, 64, 96, 80), 3, dtype, last=last, biases=True).check()
    Layer((128, 64, 96, 80), 1, dtype, last=last, per_row=False).check("relu2")


def test_it_is_the_ops_one_after_the_other():
    layer = Layer((128, 64, 96, 80), 2, torch.bfloat16)
    o, gate_up, down, qkv = layer.weights
    normed, s1 = add_norm(hb.linear(layer.attended, o), layer.residual, layer.norms[0], 1e-5)
    y = hb.linear(gate(hb.linear(normed, gate_up), "silu"), down)
    normed, s2 = add_norm(y, s1, layer.norms[1], 1e-3)
    for _ in range(2):
        total, behind = layer.run()
        assert torch.equal(total, s2)
        assert torch.equal(behind, hb.linear(normed, qkv))


def test_weights_that_changed_are_read_anew():
    layer, other = (Layer((128, 64, 96, 80), 1, torch.bfloat16, seed=seed) for seed in (0, 1))
    layer.run()
    for mine, theirs in zip(layer.weights, other.weights, strict=True):
        for name, buffer in mine.buffers().items():
            buffer.copy_(theirs.buffers()[name])
    layer.plain = other.plain
    layer.check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.weights.__setitem__(0, v.weights[3]), "o does not fit chain: got (80, 64), expected (64, 128)"),
        (lambda v: v.weights.__setitem__(1, v.weights[0]), "gate_up does not fit chain"),
        (lambda v: setattr(v, "attended", v.attended.half()), "attended does not fit chain: got float16"),
        (lambda v: v.norms.__setitem__(1, v.norms[1][1:]), "norm 1 does not fit chain: got (63,), expected (64,)"),
        (lambda v: v.biases.__setitem__(3, v.norms[0]), "the bias of qkv does not fit it: got (64,), expected (80,)"),
        (lambda v: setattr(v, "residual", v.residual[0]), "residual has other axes"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    layer = Layer((128, 64, 96, 80), 2)
    change(layer)
    with pytest.raises(UsageError, match=re.escape(words)):
        layer.run()


def test_norm_and_weight_of_the_next_layer_come_together():
    layer = Layer((128, 64, 96, 80), 2, last=True)
    with pytest.raises(UsageError, match="norm2 and qkv_next come together"):
        chain(
            layer.residual, layer.attended, layer.weights[0], layer.norms[0], 0.0, *layer.weights[1:], layer.norms[0],
            activation="silu",
        )  # fmt: skip
    with pytest.raises(UsageError, match="unknown activation: got 'tanh'"):
        layer.run("tanh")


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16])
def test_on_a_gpu(m):
    for seed, (dtype, name) in enumerate([(torch.bfloat16, "bfloat16"), (torch.float16, "float16")]):
        layer = Layer((1024, 576, 1536, 960), m, dtype, Fragments(name), last=m == 16, biases=m == 8, seed=seed)
        layer.check()
