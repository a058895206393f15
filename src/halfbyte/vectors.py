"""Vectors of 16 lanes in LLVM's language, for functions that Numba compiles; only such modules import this.

Everything here is arithmetic that any processor has, and each rounding is that of ``halfbyte.numerics``: no fast
math, no reciprocals, no conversions that flush subnormals.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FLOAT32: Final = 0
BFLOAT16: Final = 1
FLOAT16: Final = 2
KINDS: Final = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}
"""How compiled functions are told a dtype."""

LANES: Final = 16
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
LANES_I8, LANES_I32, LANES_F32 = (ir.VectorType(element, LANES) for element in (I8, I32, F32))


def emitted(emit: Callable[..., None]) -> Any:
    """A function of addresses and counts, all i64, whose code ``emit(vectors, *arguments)`` writes."""
    parameters = list(inspect.signature(emit).parameters.values())
    arity = len(parameters) - 1

    def typed(typing: Any, *arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit(Vectors(builder), *values)
            return context.get_dummy_value()

        return types.void(*[types.int64] * arity), codegen

    typed.__name__ = emit.__name__
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # Numba takes no *arguments here
    return intrinsic(typed)


def _copy(v: Vectors, target: Any, source: Any, count: Any) -> None:
    cgutils.raw_memcpy(v.builder, v.pointer(target, I8), v.pointer(source, I8), count, 1)


def _clear(v: Vectors, target: Any, count: Any) -> None:
    cgutils.memset(v.builder, v.pointer(target, I8), count, 0)


copy = emitted(_copy)
"""copy(target, source, bytes)"""
clear = emitted(_clear)
"""clear(target, bytes)"""


def bits_of(number: float) -> int:
    """The bits of a number as f32."""
    return int.from_bytes(struct.pack("<f", number), "little")


class Vectors:
    """Writes operations on vectors; integers are unsigned unless an operation says otherwise."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def ints(self, value: int, of: Any = LANES_I32) -> Any:
        """``value`` in every lane."""
        return ir.Constant(of, [of.element(value)] * of.count)

    def floats(self, value: float) -> Any:
        """``value`` in every lane."""
        return ir.Constant(LANES_F32, [F32(value)] * LANES)

    def pointer(self, address: Any, to: Any) -> Any:
        return self.builder.inttoptr(address, to.as_pointer())

    def load(self, address: Any, of: Any, offset: int = 0) -> Any:
        """A vector at an address and some bytes, which need not be aligned."""
        return self.builder.load(self.pointer(self.builder.add(address, I64(offset)), of), align=1)

    def store(self, value: Any, address: Any, offset: int = 0) -> None:
        at = self.pointer(self.builder.add(address, I64(offset)), value.type)
        self.builder.store(value, at, align=1)

    def shuffle(self, a: Any, b: Any, places: Sequence[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(places)), [*map(I32, places)]))

    def floated(self, bits: Any) -> Any:
        """The same bits as f32."""
        return self.builder.bitcast(bits, LANES_F32)

    def bits(self, floats: Any) -> Any:
        """The same bits as integers."""
        return self.builder.bitcast(floats, LANES_I32)

    def select(self, condition: Any, a: Any, b: Any) -> Any:
        return self.builder.select(condition, a, b)

    def shl(self, a: Any, count: int) -> Any:
        return self.builder.shl(a, self.ints(count, a.type))

    def shr(self, a: Any, count: int) -> Any:
        return self.builder.lshr(a, self.ints(count, a.type))

    def masked(self, a: Any, mask: int) -> Any:
        return self.builder.and_(a, self.ints(mask, a.type))

    def plus(self, a: Any, value: int) -> Any:
        return self.builder.add(a, self.ints(value, a.type))

    def above(self, a: Any, value: int) -> Any:
        """Whether a > value."""
        return self.builder.icmp_unsigned(">", a, self.ints(value, a.type))

    def max(self, a: Any, b: Any) -> Any:
        return self.select(self.builder.icmp_unsigned(">", a, b), a, b)

    def min(self, a: Any, b: Any) -> Any:
        return self.select(self.builder.icmp_unsigned("<", a, b), a, b)

    def half_to_float(self, half: Any) -> Any:
        """The f32 of finite float16 bits, 0..65535 in lanes of 32 bits."""
        magnitude = self.masked(half, 0x7FFF)
        normal = self.plus(self.shl(magnitude, 13), 112 << 23)
        tiny = self.builder.fsub(self.floated(self.plus(magnitude, bits_of(0.5))), self.floats(0.5))
        value = self.select(self.above(magnitude, 0x3FF), normal, self.bits(tiny))
        return self.floated(self.builder.or_(value, self.shl(self.masked(half, 0x8000), 16)))

    def float_to_half(self, a: Any) -> Any:
        """f32 rounded to float16, as bits in lanes of 32."""
        bits = self.bits(a)
        magnitude = self.masked(bits, 0x7FFFFFFF)
        even = self.masked(self.shr(magnitude, 13), 1)
        normal = self.shr(self.builder.add(self.plus(magnitude, 0xFFF - (112 << 23) & 0xFFFFFFFF), even), 13)
        sum_ = self.builder.fadd(self.floated(magnitude), self.floats(0.5))
        tiny = self.plus(self.bits(sum_), -bits_of(0.5) & 0xFFFFFFFF)
        value = self.select(self.above(magnitude, bits_of(2.0**-14) - 1), normal, tiny)
        value = self.select(self.above(magnitude, bits_of(65520.0) - 1), self.ints(0x7C00), value)
        value = self.select(self.above(magnitude, 0x7F800000), self.ints(0x7E00), value)
        return self.builder.or_(value, self.masked(self.shr(bits, 16), 0x8000))

    def rounded_bfloat(self, a: Any) -> Any:
        """f32 rounded to bfloat16: its bits in the upper half of lanes of 32; NaN must be quiet with no low bits."""
        bits = self.bits(a)
        return self.builder.add(self.plus(bits, 0x7FFF), self.masked(self.shr(bits, 16), 1))

    def even_and_odd(self, kind: int, address: Any) -> tuple[Any, Any]:
        """The f32 of 32 values at an address: those at even places, and those at odd ones."""
        if kind == FLOAT32:
            a, b = self.load(address, LANES_F32), self.load(address, LANES_F32, 64)
            return self.shuffle(a, b, range(0, 32, 2)), self.shuffle(a, b, range(1, 32, 2))
        pairs = self.load(address, LANES_I32)
        if kind == BFLOAT16:
            return self.floated(self.shl(pairs, 16)), self.floated(self.masked(pairs, 0xFFFF0000))
        return self.half_to_float(self.masked(pairs, 0xFFFF)), self.half_to_float(self.shr(pairs, 16))

    def store_even_and_odd(self, kind: int, even: Any, odd: Any, address: Any) -> None:
        """Round and store 32 values, as ``even_and_odd`` gives them."""
        if kind == FLOAT32:
            for half in (0, 1):
                places = [lane + 16 * side for lane in range(8 * half, 8 * half + 8) for side in (0, 1)]
                self.store(self.shuffle(even, odd, places), address, 64 * half)
            return
        if kind == BFLOAT16:
            low, high = self.shr(self.rounded_bfloat(even), 16), self.masked(self.rounded_bfloat(odd), 0xFFFF0000)
        else:
            low, high = self.float_to_half(even), self.shl(self.float_to_half(odd), 16)
        self.store(self.builder.or_(low, high), address)
