"""(docstring to come)"""

from __future__ import annotations

from typing import Final

from halfbyte.layouts.fragments import SCALE, STEPS, Step

NAME: Final = "gluon-fp8"


def shifted(to: str, word: str, step: Step) -> str:
    """Assembly: a word turned as far as its mask asks for, by the cheapest instruction that does it."""
    rotate, mask = step
    wrapped = mask & ((1 << rotate) - 1)
    if not rotate:
        return f"mov.b32 {to}, {word};"
    if not wrapped:
        return f"shl.b32 {to}, {word}, {rotate};"
    if wrapped == mask:
        return f"shr.u32 {to}, {word}, {32 - rotate};"
    return f"shf.l.wrap.b32 {to}, {word}, {word}, {rotate};"


def round_code(dtype: str, each: int = 4, pin: bool = False) -> str:
    """Assembly that rounds codes times a sixth of their scales to E4M3, from the layout's ``STEPS`` and ``SCALE``.

    $4 four scale bytes of two kt, $8 and $12 the words of those, $16 the number 2^16 -> $0 to $3, four bytes each, of
    (kt, rh); in a word (h, p) are in the order (0, 0), (1, 0), (0, 1), (1, 1).

    For bfloat16 a code times a scale's sixth, rounded to bfloat16, is 2^-7 of the value. Its halves become f32 in two
    ways, of which each costs one instruction and multiplies by 2^7: the low one by a turn and an addition to the
    exponent, the high one by a multiplication with (0, 2^7), which leaves nothing below it. float16 is rounded from as it is.
    """
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    wide = dtype == "bfloat16"
    shift, base = SCALE[dtype]
    lines = [".reg .b16 l, h;", ".reg .b32 sixth, up, none, s, s0, s1, o, t, p0, p1, p2, p3, q, u;", "mov.b32 none, 0;"]
    if wide:
        lines += ["mov.b32 sixth, 0x3E2B3E2B;", "mov.b32 up, 0x43000000;"]
    else:
        lines.append("mov.b32 sixth, 0x4D554D55;")
    for i, word in enumerate((f"${4 + each}", f"${4 + 2 * each}")):
        lines.append(f"prmt.b32 s, $4, 0, {0x4342 if i else 0x4140:#x};")
        lines.append(f"mad.lo.u32 s, s, {1 << shift}, {base * 0x10001:#x};")
        if wide:
            lines.append("mul.bf16x2 s, s, sixth;")
        lines += ["mov.b32 {l, h}, s;", "mov.b32 s0, {l, l};", "mov.b32 s1, {h, h};"]
        for output, steps in enumerate(STEPS[dtype]):
            for j, step in enumerate(steps):
                lines.append(shifted("t", word, step))
                lines.append(f"lop3.b32 o, t, {step[1]:#x}, o, 0xEA;" if j else f"and.b32 o, t, {step[1]:#x};")
            lines.append(f"mul.{kind} p{output}, o, s{output & 1};")
        for rh in (0, 1):
            if wide:
                lines += [f"mad.lo.u32 {r}, p{rh + 2 * h}, ${4 + 3 * each}, {7 << 23:#x};" for h, r in enumerate("qu")]
                lines.append("cvt.rn.satfinite.e4m3x2.f32 l, u, q;")
                lines += [f"fma.rn.bf16x2 {r}, p{rh + 2 * h}, up, none;" for h, r in enumerate("qu")]
                lines.append("cvt.rn.satfinite.e4m3x2.f32 h, u, q;")
                lines.append(f"mov.b32 ${2 * i + rh}, {{l, h}};")
            else:
                lines += [f"mul.f16x2 {r}, p{rh + 2 * h}, sixth;" for h, r in enumerate("qu")]
                lines += [f"cvt.rn.satfinite.e4m3x2.f16x2 {to}, {r};" for to, r in zip("lh", "qu", strict=True)]
                lines += ["mov.b32 t, {l, h};", f"prmt.b32 ${2 * i + rh}, t, 0, 0x3120;"]
    if pin:
        lines += [".reg .pred never;", f"setp.ne.u32 never, ${4 + 3 * each}, {1 << 16:#x};"]
        lines.append(f"@never st.volatile.shared.v4.b32 [${4 + 3 * each}], {{$0, $1, $2, $3}};")
    return "{ " + " ".join(lines) + " }"
