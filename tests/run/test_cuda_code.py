"""What GPU kernels compile to, looked at without a GPU: nothing spilled, nothing shuffled, few instructions a step.

``make test`` compiles the first configuration of each kernel for each of its targets, ``make compile-check``
(COMPILE_CHECK=all) every one. Each test prints its figures: ``pytest -rP tests/run/test_cuda_code.py -k NAME``.
"""

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

import portable
from cuda_code import ARCHITECTURES, Code, Loop, Program
from gpu_codecs import needs_triton
from halfbyte.kernels.cuda.columns import Few, Many
from halfbyte.kernels.cuda.decode import Decode
from halfbyte.kernels.cuda.gemm import Gemm
from halfbyte.layouts import Marlin, cuda


@dataclass(frozen=True)
class Limit:
    """The most registers of a thread, and the most instructions of the main part for each of the matrix units'."""

    registers: int
    per_matrix: float | None = None


@dataclass(frozen=True)
class Kernel:
    """What is looked at.

    Args:
        name: of the kernel.
        programs: for a compute capability its programs by configuration; the first is the one of ``make test``.
        limits: by compute capability, for every configuration.
        targets: the compute capabilities that it is for.
        matrix: whether it multiplies by matrix instructions.
    """

    name: str
    programs: Callable[[int], Mapping[str, Program]]
    limits: Mapping[int, Limit]
    targets: tuple[int, ...] = ARCHITECTURES
    matrix: bool = True


def moves(capability):
    """The move of Marlin's codes, both ways."""
    from halfbyte.layouts.cuda_kernel import move

    programs = {}
    for name, back in (("pack", False), ("unpack", True)):
        made = cuda.plan(Marlin().codes, (14336, 4096), 4, back)
        words = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}[made.word]
        arguments = {"source": words, "target": words}
        programs[name] = Program(move, arguments, made.constants, {"num_warps": cuda.WARPS})
    return programs


def blocks(capability):
    """Bytes by a table, and codes without those of zero blocks."""
    from halfbyte.layouts import blocks
    from halfbyte.layouts.blocks_kernel import peak, recode, without_zeros

    options = {"num_warps": blocks.WARPS}
    recoded = {"source": "*u8", "table": "*u8", "target": "*u8", "count": "i32"}
    words = {"codes": "*i64", "scales": "*u8", "target": "*i64", "count": "i32"}
    return {
        "peak": Program(peak, {"source": "*u8", "target": "*i32", "count": "i32"}, {"SIZE": blocks.PEAK}, options),
        "recode": Program(recode, recoded, {"SIZE": blocks.SIZE}, options),
        "without zeros": Program(without_zeros, words, {"BLOCKS": blocks.BLOCKS}, options),
    }


def encodes(capability):
    """The quantizer's two kernels; on aligned rows, those with scale2 in the usual range first."""
    from halfbyte.recipes import cuda, cuda_code

    numbers = {"stride": "i32", "k": "i32", "chunks": "i32"}
    arrays = {"codes": "*i32", "scales": "*u8", "top": "*i32", **numbers}
    arguments = {"x": "*i16", **arrays, **dict.fromkeys(("scale2", "full", "divisor"), "fp32")}
    programs = {}
    for kind, name in enumerate(("float32", "bfloat16", "float16")):
        own = {"x": "*i16" if kind else "*i32"}
        for whole, how in ((True, ""), (False, " with gaps")):
            aligned = ("stride", "k") if whole else ()
            fixed = {"KIND": kind, "WHOLE": whole}
            for rule in range(3):
                for moderate in (True, False):
                    constants = {"RULE": rule, "FIXED": True, "MODERATE": moderate, "INTERPRETED": False}
                    size, warps = cuda.ENCODE if moderate else cuda.ENCODE_ANY
                    constants |= {"BLOCKS": size, **fixed}
                    options = {"num_warps": warps}
                    code = Program(cuda_code.encode, arguments | own, constants, options, aligned)
                    programs[f"{name}{how} rule {rule}{'' if moderate else ' of any scale2'}"] = code
            top = {"x": own["x"], "top": "*i32", **numbers}
            constants = {"BLOCKS": cuda.PEAK[0], **fixed}
            options = {"num_warps": cuda.PEAK[1]}
            programs[f"{name}{how} peak"] = Program(cuda_code.peak, top, constants, options, aligned)
    return programs


def decodes(capability):
    """The decoder of rows and fragments, whole and by numbers of rows."""
    from halfbyte import decode_cuda
    from halfbyte.decode_cuda_code import decode
    from halfbyte.layouts import Fragments

    programs = {}
    forms = {"rows": decode_cuda.ROWS, "bfloat16": Fragments().form, "float16": Fragments("float16").form}
    for name, form in forms.items():
        for lookup in (False, True):
            for out in ("bf16", "fp16", "fp32"):
                arguments = {"codes": "*i32", "scales": "*u8", "scale2": "*fp32", "ids": "*i64", "out": f"*{out}"}
                constants = decode_cuda.constants(form, 1 << 20, lookup=lookup, experts=not lookup, per_row=lookup)
                programs[f"{name}{' by number' if lookup else ''} to {out}"] = Program(
                    decode,
                    arguments | dict.fromkeys(("count", "n", "k"), "i32"),
                    constants,
                    {"num_warps": form.most // form.values},
                    ("k",),
                )
    return programs


def quantizes(capability):
    """Activations to FP8: rows that are held, in both orders, and one that is read twice."""
    from halfbyte.kernels.cuda.fp8_quantize import specified
    from halfbyte.kernels.cuda.fp8_quantize_code import quantize

    programs = {}
    for k in (4096, 32768, 57344, 100):
        for dtype in ("bfloat16", "float16", "float32"):
            for ordered in (True, False):
                types, constants, warps = specified(dtype, k, capability=capability, ordered=ordered, early=True)
                arguments = {name: kind.removesuffix(":16") for name, kind in types.items()}
                aligned = tuple(name for name in ("k", "pitch") if types[name].endswith(":16"))
                name = f"{dtype} {k}{' ordered' if ordered else ''}"
                programs[name] = Program(quantize, arguments, constants, {"num_warps": warps}, aligned)
    return programs


def decodes_and_multiplies(rows):
    """Of gluon-decode: what is chosen for so many rows, at the shape and with the dtypes that it is chosen for."""

    def programs(capability):
        from halfbyte.kernels.cuda import choices
        from halfbyte.kernels.cuda.decode_gluon import NAME, configure, parts
        from halfbyte.kernels.cuda.decode_gluon_code import decode
        from halfbyte.layouts import Fragments
        from helpers_run import call_like

        found = {}
        choices.entries.cache_clear()  # other tests have choices of their own
        choices._by_distance.cache_clear()
        for entry in choices.entries():
            for dtype in entry.dtypes:
                of = {"shape": entry.shape, "rows": rows, "dtype": dtype, "out_dtype": dtype, "capability": capability}
                call = call_like(device="cuda", layout=Fragments(dtype), per_row=True, **of)
                if entry.capability == capability and choices.choice(call, NAME):
                    made = configure(call)
                    types, constants = parts(call, "float32", made)
                    arguments = {name: kind.removesuffix(":16") for name, kind in types.items()}
                    options = {"num_warps": made.warps} | ({"maxnreg": made.registers} if made.registers else {})
                    found["{}x{} {}".format(*entry.shape, dtype)] = Program(decode, arguments, constants, options)
        return found

    return programs


KERNELS = (
    Kernel("move", moves, {80: Limit(48), 90: Limit(48)}, matrix=False),
    Kernel("blocks", blocks, {80: Limit(80), 90: Limit(80)}, matrix=False),
    Kernel("encode", encodes, {80: Limit(176), 90: Limit(176)}, matrix=False),
    Kernel("decode", decodes, {80: Limit(40), 90: Limit(40)}, matrix=False),
    Kernel("quantize", quantizes, {80: Limit(96), 90: Limit(96)}, matrix=False),
    Kernel("triton-decode", portable.programs(Decode), {80: Limit(80, 36), 90: Limit(80, 36)}),
    Kernel("triton-gemm", portable.programs(Gemm), {80: Limit(250, 12), 90: Limit(200, 46)}),
    Kernel("triton-columns-few", portable.programs(Few), {80: Limit(140, 48), 90: Limit(172, 48)}),
    Kernel("triton-columns-many", portable.programs(Many), {80: Limit(255, 16.5), 90: Limit(255, 96)}),
    Kernel("gluon-decode 8", decodes_and_multiplies(8), {90: Limit(96, 20)}, (90,)),
    Kernel("gluon-decode 16", decodes_and_multiplies(16), {90: Limit(160, 14.5)}, (90,)),
)


def cases():
    """(kernel, capability, configuration) of every test."""
    if importlib.util.find_spec("triton") is None:
        return []
    found = []
    for kernel in KERNELS:
        for capability in kernel.targets:
            names = list(kernel.programs(capability))
            found += [(kernel, capability, name) for name in names[: None if os.environ.get("COMPILE_CHECK") else 1]]
    return [pytest.param(*case, id=f"{case[0].name}-sm_{case[1]}-{case[2]}") for case in found]


@needs_triton
@pytest.mark.parametrize(("kernel", "capability", "name"), cases())
def test_code(kernel, capability, name):
    code = kernel.programs(capability)[name].compile(capability)
    print(code)
    assert code.warnings == []
    assert (code.stack, code.spills) == (0, 0), str(code)
    assert bool(code.matrix) == kernel.matrix, str(code)
    assert [loop.shuffles for loop in code.main] == [0] * len(code.main), str(code)
    limit = kernel.limits.get(capability)
    if limit:
        assert code.registers <= limit.registers, str(code)
    if limit and limit.per_matrix:
        assert code.main, "no matrix instruction"
        assert max(loop.per_matrix for loop in code.main) <= limit.per_matrix, str(code)


LISTING = """
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
.L_x_2:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   BSSY B0, `(.L_x_4) ;
        /*0040*/               @P1 BRA `(.L_x_4) ;
        /*0050*/                   SHFL.BFLY PT, R3, R3, 0x1, 0x1f ;
        /*0060*/                   BSYNC B0 ;
.L_x_4:
        /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR6], R1 ;
        /*0080*/              @!P2 BRA `(.L_x_7) ;
.L_x_5:
        /*0090*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*00a0*/               @P0 BRA `(.L_x_2) ;
        /*00b0*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*00c0*/               @P3 BRA `(.L_x_1) ;
.L_x_9:
        /*00d0*/                   STG.E desc[UR4][R2.64], R8 ;
        /*00e0*/                   EXIT ;
.L_x_7:
        /*00f0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR6], R1 ;
        /*0100*/              @!P2 BRA `(.L_x_7) ;
        /*0110*/                   BRA `(.L_x_5) ;
.L_x_8:
        /*0120*/                   BRA `(.L_x_8);
        /*0130*/                   NOP;
"""
LOG = """ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Function properties for kernel
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 78 registers, used 1 barriers
"""


def test_what_is_read_of_a_listing():
    """Two loops that share their first instruction are one; the wait that lies out of line belongs to it."""
    code = Code(LOG, LISTING, "", 0)
    (loop,) = code.loops
    assert loop.opcodes == Counter(
        {
            "LDG.E.128": 1,
            "BSSY": 1,
            "BRA": 6,
            "SHFL.BFLY": 1,
            "BSYNC": 1,
            "SYNCS.PHASECHK.TRANS64.TRYWAIT": 2,
            "HMMA.16816.F32.BF16": 2,
        }
    )
    assert (loop.instructions, loop.matrix, loop.per_matrix, loop.shuffles) == (14, 2, 7, 1)
    assert (code.registers, code.stack, code.spills, len(code.warnings)) == (78, 16, 12, 1)
    assert (code.matrix, code.opcodes.total()) == (2, 19)


def test_loops_inside_loops():
    """Of nested loops the inner one counts, and without matrix instructions that which reads memory."""
    outer = LISTING.replace(
        ".L_x_1:\n.L_x_2:", ".L_x_1:\n        /*0018*/                   IMAD R0, R0, R0, R0 ;\n.L_x_2:"
    )
    (loop,) = Code(LOG, outer, "", 0).loops
    assert (loop.instructions, loop.matrix) == (12, 1)
    straight = LISTING.replace("@P0 BRA", "@P0 IADD3").replace("@P3 BRA", "@P3 IADD3")
    (part,) = Code(LOG, straight, "", 0).main
    assert part == Loop(Counter({"HMMA.16816.F32.BF16": 2, "IADD3": 1}))
    (loop,) = Code(LOG, outer.replace("HMMA.16816.F32.BF16", "FADD"), "", 0).loops
    assert (loop.instructions, loop.matrix) == (12, 0)
    spilled = Code(LOG, LISTING.replace("STG.E desc", "STL.64 desc"), "", 0)
    assert spilled.spills == 13


@needs_triton
def test_spills_are_seen():
    program = moves(90)["pack"]
    tight = Program(program.kernel, program.arguments, program.constants, {**program.options, "maxnreg": 24})
    code = tight.compile(90)
    assert code.registers <= 24
    assert code.spills > 0
    assert code.stack > 0
