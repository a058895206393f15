"""Activations in the order in which the Gluon decode kernel's lanes need them."""

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

MADE = (Decode(warps=4, tiles=2, ahead=2, registers=128), Decode(warps=8, ahead=5, registers=128))


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


@needs_triton
@pytest.mark.parametrize("made", MADE)
def test_machine_code(made):
    """x is loaded and multiplied, with nothing between, and nothing is spilled."""
    from halfbyte.kernels.cuda.decode_gluon_code import decode

    call = Call(
        layout=Fragments(), shape=(4096, 4096), per_row=True, pre_scale=False, rows=16, dtype="bfloat16",
        out_dtype="bfloat16", device="cuda", library="torch", bias=False, capability=90,
    )  # fmt: skip
    codes = []
    for order in (False, True):
        types, held = decode_gluon.parts(call, "float32", made, None, order)
        options = {"num_warps": made.warps, "maxnreg": made.registers}
        arguments = {name: of.removesuffix(":16") for name, of in types.items()}
        codes.append(Program(decode, arguments, held, options).compile(90))
    rows, order = codes
    steps = 64 // made.warps
    assert (order.stack, order.spills, order.warnings) == (0, 0, [])
    assert order.matrix == rows.matrix == 8 * made.tiles * steps
    assert count(order.opcodes, r"LDG") == count(rows.opcodes, r"LDG")
    assert order.opcodes["LDG.E.128"] == 4 * steps
    assert count(rows.opcodes, r"SEL") >= 16 * steps
    assert count(order.opcodes, r"SEL") < steps
    assert order.registers <= rows.registers


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize(("n", "k"), [(48, 1088), (50, 208), (6144, 4096), (4096, 14336)])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows", [9, 12, 16])
    def test_it_is_the_product_of_rows_to_the_bit(self, n, k, rows, dtype):
        for made in MADE:
            _, args = arguments(n, k, rows, dtype, dtype, dtype, "cuda", scales=(40, 60), per_row=True)
            decode_gluon.bind(args, made)(args.x, args.bias, args.out)
            x = ordered(args.x).view(-1, 2, 2, 8, 4, 8)
            if rows < 16:
                x[:, 1, :, rows - 8 :] = torch.nan  # rows that do not exist
            out = torch.full_like(args.out, torch.nan)
            decode_gluon.bind(args, made, ordered=True)(x, args.bias, out)
            assert torch.equal(out, args.out)

    @pytest.mark.parametrize(("n", "k"), [(96, 1088), (28672, 4096)])
    @pytest.mark.parametrize("rows", [9, 16])
    def test_so_it_is_with_a_gate_whose_result_is_in_order(self, n, k, rows):
        _, linear = arguments(n, k, rows, "bfloat16", "bfloat16", None, "cuda", scales=(40, 60), per_row=True)
        out = linear.out.new_empty(rows, n // 2)
        args = GatedArgs(x=linear.x, weight=linear.weight, bias=None, activation="silu", out=out)
        decode_gluon.bind_gated(args)(args.x, None, out)
        order = out.new_full((length(n // 2),), torch.nan)
        decode_gluon.bind_gated(args, ordered=True, orders=True)(ordered(args.x), None, order)
        assert torch.equal(in_rows(order, rows, n // 2), out)
        assert order.isnan().sum() == order.numel() - out.numel()
