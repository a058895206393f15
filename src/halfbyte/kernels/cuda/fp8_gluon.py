"""``linear`` in FP8 for many tokens on Hopper, layout ``fragments``: weights are rounded to E4M3 in registers.

::

    q, s = activations quantized for each token, as in halfbyte.kernels.fp8
    y = round(sum(q * e4m3(code * scale / 6)) * (6 * scale2) * s + bias)

The bytes of the weight are those of its twin, ``to_fp8``, but for the sign of zeros, made of the words that the exact
kernels read: there is no second copy. A lane has the words and the scales of two rows and 16 k: it makes a table of
eight bytes for each scale, and looks codes up by their bits. Tiles, items, parts and their order are those of
``gluon-gemm``. A kernel ahead of this one quantizes activations into ``scratch`` bytes that all kernels share, each 64
k in the order in which lanes hold the words.

Products are exact, and FP8 matrix units add them with fewer bits than float32: those of 32 k and the sum so far are cut
off 13 bits below the first one of the largest. So errors grow with the number of such steps, and with the size of sums
on the way, not of the result; of terms t of random sign 32 are off by about 2^-13 * 32^0.5 / 2 of the sum, and K
together by its norm times 2^-13 * K^0.5 / 2. So after 16384 k the sum goes to memory and comes back in float32. Against
the same quantized values in float64, and with the rounding to bfloat16, the relative Frobenius error is at most
``ERROR``, as measured.

What the words cost against a resident twin are instructions: as many as let the matrix units wait for an eighth of the
time. The twin's kernels also read activations once for several multiprocessors, which here each one does: where tiles
are few, as for 4096 x 4096 and up to 512 tokens, that makes a product take half as long again, and neither tiles of 64
or of twice the features, nor two parts that share their sums, change that.

The programs start before the quantizer has ended, and ask for codes and scales: that lets them start when all that was
ahead of it is over, so whatever wrote them is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from halfbyte.kernels.base import ALIGNED, Kernel
from halfbyte.kernels.cuda import choices, fragments
from halfbyte.kernels.cuda.fp8_quantize import nbytes, pitch, quantizer, scales_at
from halfbyte.kernels.cuda.fragments import TILE, TYPES, UNIT
from halfbyte.kernels.cuda.gemm_gluon import (
    BESIDE,
    MOST_FEATURES,
    MOST_TOKENS,
    SHARED,
    Gemm,
    Schedule,
    described,
    multiprocessors,
    schedule,
    scratch_of,
)
from halfbyte.kernels.cuda.launch import Program, boxes, program, why_not
from halfbyte.kernels.cuda.shared import counters, in_turn, workspace
from halfbyte.kernels.fp8 import Fp8Args, Fp8Call, cost
from halfbyte.kernels.fp8 import refuse as refuse_any
from halfbyte.layouts import Fragments, Packed
from halfbyte.layouts.fragments import PLACES, SCALE, STEPS, Step
from halfbyte.numerics import Array

NAME: Final = "gluon-fp8"
ERROR: Final = 5e-3
"""Of results, relative to their norm, beside that of rounding activations and weights."""
FACTOR: Final = 6.0
"""What sums lack beside scale2 and the tokens' scales."""
UNITS: Final = 2
"""Of 64 k, of a step."""
LONG: Final = 128
"""Steps, at most, whose sums the matrix units keep: errors grow with their root. Then they are added up in float32."""
STEP: Final = {256: 0.72, 128: 0.52}
"""us that a step takes on an H200, by the tokens of a tile."""
PUT: Final = 0.008
"""us for each token of a tile, at its end."""
PART: Final = (0.014, 0.006)
"""The same of a part, and more for each of its tile."""


@dataclass(frozen=True)
class Fp8:
    """How the kernel runs.

    Args:
        tokens: of a tile: 128 or 256.
        parts: of K, of the tiles of the last, partial wave.
        group: tiles along M that follow each other before N goes on.
    """

    tokens: int = 256
    parts: int = 1
    group: int = 8

    @property
    def form(self) -> Gemm:
        """The tiles and their order."""
        return Gemm(tokens=self.tokens, units=UNITS, parts=self.parts, group=self.group)

    def stages(self, size: int) -> int:
        """Of the ring: as many as fit beside results of so many bytes."""
        form = self.form
        room = SHARED - 1024 - BESIDE - form.features * form.height(size) * size
        return room // (UNITS * (form.consumers * form.tiles * 576 + self.tokens * 64))


CONFIGURATIONS: Final = tuple(Fp8(tokens, parts) for tokens in (256, 128) for parts in (1, 2, 3, 4))
"""Those that are tested."""


def signature(out_dtype: str, made: Fp8, bias: str, whole: bool) -> dict[str, str]:
    """The types of the device code's arguments; ``whole``: rows of out begin at multiples of 16 bytes."""
    form, out = made.form, TYPES[out_dtype]
    numbers = ("M", "N", "items", "whole", "share", "parts", "along_n", "along_m", "steps")
    return {
        "codes_map": boxes("i32", (form.tiles, 8 * UNITS, 16), 64),
        "scales_map": boxes("i32", (form.tiles, 16 * UNITS), 0),
        "x_map": boxes("fp8e4nv", (made.tokens, UNIT * UNITS), 128),
        "out": boxes(out, (form.height(_size(out_dtype)), TILE * form.tiles), 128) if whole else f"*{out}",
        "scale2": "*fp32",
        "xscale": "*fp32",
        "bias": bias,
        "sums": "*fp32:16",
        "counts": "*i32:16",
        **dict.fromkeys(numbers, "i32"),
    }


def constants(call: Fp8Call, made: Fp8, whole: bool, split: bool) -> dict[str, Any]:
    """The constants of the device code."""
    form, size, steps = made.form, _size(call.out_dtype), -(-call.shape[-1] // (UNIT * UNITS))
    assert isinstance(call.layout, Fragments)
    return {
        "C": form.consumers,
        "R": form.tiles,
        "U": UNITS,
        "NB": made.tokens,
        "STAGES": made.stages(size),
        "GROUP": made.group,
        "SPLIT": split,
        "HEIGHT": form.height(size if whole else 4),
        "REGISTERS": form.registers[1],
        "TMA": whole,
        "PER_ROW": call.per_row,
        "BIAS": call.bias,
        "TABLE": table_code(),
        "LOOK_UP": look_up_code(call.layout.dtype),
        "FACTOR": FACTOR,
        "LONG": LONG if steps > LONG else 0,
    }


def _size(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def table_code() -> str:
    """Assembly of the tables of two scales: $4 their bytes -> $0 and $1, $2 and $3, the E4M3 bytes of codes 0 to 7.

    A scale in float16, times what ``SCALE`` says, is multiplied by a sixth of each code. That product, rounded to
    float16, rounds to E4M3 as the exact one does: where that is a tie it is the same, and else near enough.
    """
    shift, _ = SCALE["float16"]
    lines = [".reg .b32 s, s0, s1, t, p;", ".reg .b16 l, h;", "cvt.u32.u16 s, $4;", "prmt.b32 s, s, 0, 0x4140;"]
    lines += [f"shl.b32 s, s, {shift};", "mov.b32 {l, h}, s;", "mov.b32 s0, {l, l};", "mov.b32 s1, {h, h};"]
    for i, codes in enumerate(((0, 0.5, 1, 1.5), (2, 3, 4, 6)) * 2):
        for to, pair in (("l", codes[:2]), ("h", codes[2:])):
            sixths = np.array(pair, np.float16) / np.float16(FACTOR * 2**shift)
            lines += [f"mov.b32 t, {int(sixths.view(np.uint32)[0]):#x};", f"mul.f16x2 p, s{i // 2}, t;"]
            lines.append(f"cvt.rn.satfinite.e4m3x2.f16x2 {to}, p;")
        lines.append(f"mov.b32 ${i}, {{l, h}};")
    return "{ " + " ".join(lines) + " }"


def look_up_code(dtype: str) -> str:
    """Assembly that looks codes up, from the layout's places of their bits.

    $4, $8 and $12, $16 the tables of rh 0 and 1, $20 and $24 words -> $0 to $3, four bytes each, of (word, rh); codes
    (h, p) of a word are in the order (0, 0), (1, 0), (0, 1), (1, 1).
    """
    lines = [".reg .b32 r, r1, x, y, " + ", ".join(f"t{i}" for i in range(32)) + ";"]
    for word in (0, 1):
        source = f"${20 + 4 * word}"
        turned: dict[int, str] = {0: source}

        def turn(rotate: int, mask: int) -> str:
            if rotate not in turned:  # noqa: B023
                turned[rotate] = f"t{rotate}"  # noqa: B023
                lines.append(shifted(f"t{rotate}", source, (rotate, mask)))  # noqa: B023
            return turned[rotate]  # noqa: B023

        for rh, to in enumerate("xy"):
            (first, mask), *others = _moves(dtype, rh, sign=False)
            held = turn(first, mask)
            for rotate, mask in others:
                lines.append(f"lop3.b32 {to}, {turn(rotate, mask)}, {held}, {mask:#x}, 0xE4;")
                held = to
            if rh == 0:
                low = held
        lines += [f"prmt.b32 r, {low}, {held}, 0x6420;", "and.b32 r, r, 0x77777777;", "shr.u32 r1, r, 16;"]
        lines += ["prmt.b32 x, $4, $8, r;", "prmt.b32 y, $12, $16, r1;"]
        for rh, held in enumerate("xy"):
            *others, last = _moves(dtype, rh, sign=True)
            for rotate, mask in others:
                lines.append(f"lop3.b32 {held}, {held}, {turn(rotate, mask)}, {mask:#x}, 0xF8;")
            lines.append(f"lop3.b32 ${2 * word + rh}, {held}, {turn(*last)}, {last[1]:#x}, 0xF8;")
    return "{ " + " ".join(lines) + " }"


def _moves(dtype: str, rh: int, *, sign: bool) -> list[Step]:
    """How bits of a word's codes of rh come to where they select, in the nibbles of bytes 0 and 2, or are signs."""
    found: dict[int, int] = {}
    for h in (0, 1):
        for rotate, mask in STEPS[dtype][2 * h + rh]:
            for p in (0, 1):
                for i, place in enumerate(PLACES[dtype]):
                    at = place + 16 * p
                    if mask >> at & 1 and sign == (i == 3):
                        to = 16 * p + 8 * h + 7 if sign else 16 * p + 4 * h + i
                        turn = (to - (at - rotate)) % 32
                        found[turn] = found.get(turn, 0) | 1 << to
    return sorted(found.items())


def shifted(to: str, word: str, step: Step) -> str:
    """Assembly: a word turned as far as its mask asks for, by the cheapest instruction that does it."""
    rotate, mask = step
    wrapped = mask & ((1 << rotate) - 1)
    if not wrapped:
        return f"shl.b32 {to}, {word}, {rotate};"
    if wrapped == mask:
        return f"shr.u32 {to}, {word}, {32 - rotate};"
    return f"shf.l.wrap.b32 {to}, {word}, {word}, {rotate};"


def configure(call: Fp8Call) -> Fp8:
    """The configuration for a call: for shapes not measured the fastest, by what is known of steps."""
    (n, k), rows = call.shape, choices.modelled_rows(call.rows)
    processors = multiprocessors(None, call.elsewhere)

    def time(made: Fp8) -> float:
        held = schedule(n, k, rows, made.form, processors)
        step, tokens = STEP[made.tokens], made.tokens
        tiles = -(-held.whole // processors) * (held.steps * step + PUT * tokens)
        part = held.share * step + (PART[0] + PART[1] * held.parts) * tokens
        return tiles + -(-held.split * held.parts // processors) * part

    return choices.configured(call, NAME, min(configurations(call), key=time), CONFIGURATIONS, model=True)


def configurations(call: Fp8Call) -> tuple[Fp8, ...]:
    """Those that can pay for a call: smaller tiles for few tokens, parts where the last wave of tiles is not full."""

    def pays(made: Fp8) -> bool:
        fits = call.rows > 128 if made.tokens == 256 else call.rows <= 512
        return fits and (made.parts == 1 or _schedule(call, made, None).split > 0)

    return tuple(made for made in CONFIGURATIONS if pays(made))


def _schedule(call: Fp8Call, made: Fp8, index: int | None) -> Schedule:
    n, k = call.shape
    return schedule(n, k, call.rows, made.form, multiprocessors(index, call.elsewhere))


def scratch(call: Fp8Call) -> int:
    """Bytes of device memory for the quantized activations and the sums of parts."""
    made = configure(call)
    held = _schedule(call, made, None)
    return nbytes(call.rows, call.shape[-1], ordered=True) + sum(_scratch_of(made, held))


def _scratch_of(made: Fp8, held: Schedule) -> tuple[int, int]:
    """Bytes of sums and of counters."""
    of_parts, of_counts = scratch_of(made.form, held)
    of_programs = held.grid * made.form.features * made.tokens * 4 if held.steps > LONG else 0
    return of_parts + of_programs, of_counts


def refuse(call: Fp8Call) -> tuple[str, ...]:
    """Why it declines a call."""
    reasons = [*why_not(call, least=90, most=90, gluon=True), *refuse_any(call)]
    if call.resident:
        reasons.append("multiplies by NVFP4, not by an Fp8Weight")
    elif not isinstance(call.layout, Fragments):
        reasons.append(f"reads the layout fragments, not {call.layout.key}")
    if call.shape[-2] > MOST_FEATURES:
        reasons.append(f"takes up to {MOST_FEATURES} features, not {call.shape[-2]}")
    if call.rows > MOST_TOKENS:
        reasons.append(f"takes up to {MOST_TOKENS} tokens, not {call.rows}")
    return tuple(reasons)


def bind(args: Fp8Args, made: Fp8 | None = None) -> Callable[[Array, Array | None, Array], None]:
    """What is left of a launch for calls like these; ``made`` instead of the configuration chosen."""
    assert isinstance(args.weight, Packed)
    call = args.call()
    made = configure(call) if made is None else made
    (n, k), rows, device = call.shape, call.rows, args.x.device
    held = _schedule(call, made, device.index)
    of_sums, of_counts = _scratch_of(made, held)
    of_x, scales_from = nbytes(rows, k, ordered=True), scales_at(rows, k, ordered=True)
    buffers = args.weight.buffers()
    scale2 = buffers["scale2"].data_ptr()
    pre = buffers.get("pre_scale")
    pre = None if pre is None else pre.float().contiguous()
    quantize = quantizer(device, call.dtype, k, ordered=True, pre_scale=pre is not None, early=True)
    units, width = -(-k // UNIT), pitch(k, ordered=True)
    bias_type = fragments.bias_type(args.bias)
    numbers = (rows, n, held.items, held.whole, held.share, held.parts, held.along_n, held.along_m, held.steps)
    grid = (held.grid, 1, 1)
    fits = n * args.out.element_size() % ALIGNED == 0
    first = _program(call, bias_type, made, device, fits, held.split > 0)
    programs = {fits: first}
    codes = first.tensor(0, buffers["codes"].data_ptr(), (-(-n // TILE), 8 * units, 16))
    scales = first.tensor(1, buffers["scales"].data_ptr(), (-(-n // TILE), 16 * units))
    tensor = described(first, rows)

    def run(x: Any, bias: Any, out: Any) -> None:
        with in_turn:
            queue(fragments.aligned(x), bias, out)

    def queue(x: Any, bias: Any, out: Any) -> None:
        to = out.data_ptr()
        whole = fits and not to % ALIGNED
        memory, counts = workspace(device, of_x + of_sums), counters(device, of_counts) if of_counts else None
        at = memory.data_ptr()  # held, as counts is, until the launch
        quantize(rows, x.data_ptr(), None if pre is None else pre.data_ptr(), at, at + scales_from)
        values = (
            codes,
            scales,
            tensor(2, at, width),
            tensor(3, to, n) if whole else to,
            scale2,
            at + scales_from,
            None if bias is None else bias.data_ptr(),
            at + of_x if of_sums else None,
            None if counts is None else counts.data_ptr(),
            *numbers,
        )
        if whole not in programs:
            programs[whole] = _program(call, bias_type, made, device, whole, held.split > 0)
        programs[whole](grid, values)

    return run


def _program(call: Fp8Call, bias: str, made: Fp8, device: Any, whole: bool, split: bool) -> Program:
    from halfbyte.kernels.cuda.fp8_gluon_code import fp8

    types = signature(call.out_dtype, made, bias, whole)
    return program(fp8, types, constants(call, made, whole, split), device=device, pdl=True)


def compile_as(call: Fp8Call, made: Fp8) -> None:
    """Compile it in a configuration, and what quantizes."""
    import torch

    device, k = torch.device(call.device), call.shape[-1]
    quantizer(device, call.dtype, k, ordered=True, pre_scale=call.pre_scale, early=True, capability=call.capability)
    whole = call.shape[0] * _size(call.out_dtype) % ALIGNED == 0
    _program(call, "*fp32", made, device, whole, _schedule(call, made, device.index).split > 0)


GLUON: Final = Kernel(
    name=NAME,
    bundle=Fp8Args,
    description="quantizes activations for each token, and weights in wgmma's registers; Hopper, many tokens",
    refuse=refuse,
    cost=cost,
    bind=bind,
    configure=configure,
    scratch=scratch,
    configurations=configurations,
    compile=compile_as,
)
