"""Activations in the order in which the Gluon decode kernel's lanes need them."""

from dataclasses import replace

import pytest
import torch

from cuda_code import Program, count
from gluon_cases import DTYPES, arguments, on_gpu
from gpu_codecs import needs_triton
from halfbyte.kernels import GatedArgs
from halfbyte.kernels.base import Call
from halfbyte.kernels.cuda import decode_gluon
from halfbyte.kernels.cuda.decode_gluon import Decode
from halfbyte.kernels.cuda.ordered import in_rows, length, ordered
from halfbyte.layouts import Fragments

MADE = (Decode(warps=4, tiles=2, ahead=2, registers=128), Decode(warps=8, ahead=5, registers=128, fenced=True))


@pytest.mark.parametrize(("m", "k"), [(16, 128), (9, 64), (12, 80)])
def test_a_lane_reads_its_rows_and_its_block(m, k):
    x = 1 + torch.arange(m * k, dtype=torch.float32).reshape(m, k)
    a = ordered(x)
    assert a.shape == (length(k),) == (16 * 64 * -(-k // 64),)
    for unit, half, piece, lane in ((0, 0, 0, 0), (0, 0, 1, 5), (0, 1, 0, 2), (k // 64 - 1, 0, 1, 31)):
        row, first = 8 * half + lane // 4, 64 * unit + 16 * (lane % 4) + 8 * piece
        at = 1024 * unit + 512 * half + 256 * piece + 8 * lane
        assert torch.equal(a[at : at + 8], x[row, first : first + 8])
    assert torch.equal(in_rows(a, m, k), x)
    assert (a != 0).sum() == m * k


def compiled(kernel, made, order):
    """For 16 tokens and a weight (4096, 4096)."""
    call = Call(
        layout=Fragments(), shape=(4096, 4096), per_row=True, pre_scale=False, rows=16, dtype="bfloat16",
        out_dtype="bfloat16", device="cuda", library="torch", bias=False, capability=90,
    )  # fmt: skip
    types, held = decode_gluon.parts(call, "float32", made, None, order)
    options = {"num_warps": made.warps, "maxnreg": made.registers}
    return Program(kernel, {name: of.removesuffix(":16") for name, of in types.items()}, held, options).compile(90)


@needs_triton
@pytest.mark.parametrize("made", MADE)
def test_machine_code(made):
    """x is loaded and multiplied, with nothing between, and nothing is spilled."""
    from halfbyte.kernels.cuda.decode_gluon_code import decode

    rows, order = (compiled(decode, made, order) for order in (False, True))
    steps = 64 // made.warps
    assert (order.stack, order.spills, order.warnings) == (0, 0, [])
    assert order.matrix == rows.matrix == 8 * made.tiles * steps
    assert count(order.opcodes, r"LDG") == count(rows.opcodes, r"LDG")
    assert order.opcodes["LDG.E.128"] == 4 * steps
    assert count(rows.opcodes, r"SEL") >= 16 * steps
    assert count(order.opcodes, r"SEL") < steps
    assert order.registers <= rows.registers


@needs_triton
def test_a_fence_keeps_units_on_their_way():
    """The codes of a unit are asked for as many units before they are decoded, and nothing is spilled."""
    from halfbyte.kernels.cuda.decode_gluon_code import decode

    made = Decode(warps=4, tiles=2, ahead=3, registers=128)
    spans = []
    for fenced in (False, True):
        code = compiled(decode, replace(made, fenced=fenced), True)
        assert (code.stack, code.spills) == (0, 0)
        ops = [op for _, _, op, _ in code.instructions]
        loads = [i for i, op in enumerate(ops) if op == "LDG.E.EF.128"]
        products = [i for i, op in enumerate(ops) if op.startswith("HMMA")]
        begun = [sum(at < load for at in products) // (8 * made.tiles) for load in loads]
        spans.append([i // made.tiles - unit for i, unit in enumerate(begun)][made.ahead * made.tiles :])
    print(spans)
    assert min(spans[1]) >= made.ahead
    assert min(spans[0]) < made.ahead


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize(("n", "k"), [(48, 1088), (50, 208), (6144, 4096), (4096, 14336)])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows", [5, 8, 9, 12, 16])
    def test_it_is_the_product_of_rows_to_the_bit(self, n, k, rows, dtype):
        for made in MADE:
            _, args = arguments(n, k, rows, dtype, dtype, dtype, "cuda", scales=(40, 60), per_row=True)
            decode_gluon.bind(args, made)(args.x, args.bias, args.out)
            x = ordered(args.x).view(-1, 2, 2, 8, 4, 8)  # u rh i g q e
            for row in range(rows, 16):
                x[:, row // 8, :, row % 8] = torch.nan
            out = torch.full_like(args.out, torch.nan)
            decode_gluon.bind(args, made, ordered=True)(x, args.bias, out)
            assert torch.equal(out, args.out)

    @pytest.mark.parametrize(("n", "k"), [(96, 1088), (28672, 4096)])
    @pytest.mark.parametrize("rows", [8, 9, 16])
    def test_so_it_is_with_a_gate_whose_result_is_in_order(self, n, k, rows):
        _, linear = arguments(n, k, rows, "bfloat16", "bfloat16", None, "cuda", scales=(40, 60), per_row=True)
        out = linear.out.new_empty(rows, n // 2)
        args = GatedArgs(x=linear.x, weight=linear.weight, bias=None, activation="silu", out=out)
        decode_gluon.bind_gated(args)(args.x, None, out)
        order = out.new_full((length(n // 2),), torch.nan)
        decode_gluon.bind_gated(args, ordered=True, orders=True)(ordered(args.x), None, order)
        assert torch.equal(in_rows(order, rows, n // 2), out)
        assert order.isnan().sum() == order.numel() - out.numel()
