"""LLVM vectors for kernels: a builder's loads, stores, shuffles, loops, and the few instructions that a CPU adds.

Everything is plain LLVM but for ``permute_f32`` (AVX-512), ``permute16`` (AVX-512 BW), ``dot_bf16`` (AVX-512 BF16)
and ``dot_u8`` (AVX-512 VNNI). Addresses are i64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """llvmlite has no name for it; values of it exist only as bit patterns of i16."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def vector(element: Any, lanes: int) -> Any:
    """The type of a vector."""
    return ir.VectorType(element, lanes)


class Emit:
    """What a kernel's code is written with; ``b`` is llvmlite's builder for all that is an instruction of LLVM."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def call(self, name: str, result: Any, args: Sequence[Any]) -> Any:
        """Call an intrinsic of LLVM."""
        module = self.b.module
        known = module.globals.get(name)
        function = known or ir.Function(module, ir.FunctionType(result, [a.type for a in args]), name)
        return self.b.call(function, args)

    def at(self, address: Any, offset: int) -> Any:
        """The address ``offset`` bytes further."""
        return self.b.add(address, I64(offset)) if offset else address

    def load(self, kind: Any, address: Any, align: int = 1) -> Any:
        """Read a value."""
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any, align: int = 1) -> None:
        """Write a value."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=align)

    def prefetch(self, address: Any) -> None:
        """Ask for a line into the second-level cache: in the first it would push out what is used again."""
        args = [self.b.inttoptr(address, I8.as_pointer()), I32(0), I32(2), I32(1)]
        self.call("llvm.prefetch.p0", ir.VoidType(), args)

    def constant(self, element: Any, values: Sequence[Any]) -> Any:
        """A constant vector."""
        return ir.Constant(vector(element, len(values)), [element(value) for value in values])

    def splat(self, element: Any, lanes: int, value: Any) -> Any:
        """The same constant in every lane."""
        return self.constant(element, [value] * lanes)

    def zero(self, kind: Any) -> Any:
        """All bits 0."""
        return ir.Constant(kind, None)

    def shuffle(self, a: Any, lanes: Sequence[int], b: Any = None) -> Any:
        """Lanes of a, then of b."""
        other = ir.Constant(a.type, ir.Undefined) if b is None else b
        return self.b.shuffle_vector(a, other, self.constant(I32, lanes))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])

    def permute16(self, table: Any, index: Any) -> Any:
        """32 entries of 16 bits by the low five bits of each index."""
        return self.call("llvm.x86.avx512.permvar.hi.512", table.type, [table, index])

    def permute_f32(self, table: Any, index: Any) -> Any:
        """16 entries of f32 by the low four bits of each index."""
        return self.call("llvm.x86.avx512.permvar.sf.512", table.type, [table, index])

    def dot_bf16(self, total: Any, a: Any, b: Any) -> Any:
        """Total (16 f32) plus the products of pairs of bf16, given as 32 words of 16 bits."""
        pairs = vector(_BFloat(), 32)
        args = [total, self.b.bitcast(a, pairs), self.b.bitcast(b, pairs)]
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", total.type, args)

    def dot_u8(self, total: Any, a: Any, b: Any) -> Any:
        """Total (16 i32) plus the products of fours of u8 (a) and i8 (b)."""
        return self.call("llvm.x86.avx512.vpdpbusd.512", total.type, [total, a, b])

    def loop(self, count: Any, first: Sequence[Any]) -> Loop:
        """Repeat what follows ``count`` times, until ``Loop.end``; ``Loop.values`` hold what each round starts with."""
        return Loop(self.b, count, first)

    def sums(self, vectors: Sequence[Any]) -> tuple[Any, list[int]]:
        """Add up the lanes of each of 1, 2, 4, 8 or 16 vectors of 16 f32: the sums, and the lane of each."""
        width, owners = 16, [[i] for i in range(len(vectors))]
        vectors = list(vectors)
        while len(vectors) > 1:
            half, joined = width // 2, []
            for a, b in zip(vectors[::2], vectors[1::2], strict=True):
                low = [lane for start in range(0, 32, width) for lane in range(start, start + half)]
                joined.append(self.b.fadd(self.shuffle(a, low, b), self.shuffle(a, [i + half for i in low], b)))
            owners = [a + b for a, b in zip(owners[::2], owners[1::2], strict=True)]
            vectors, width = joined, half
        total, size = vectors[0], width
        while size > 1:
            size //= 2
            total = self.b.fadd(total, self.shuffle(total, [lane ^ size for lane in range(16)]))
        place = {owner: width * i for i, owner in enumerate(owners[0])}
        return total, [place[i] for i in range(len(place))]


class Loop:
    """A loop whose rounds hand values on."""

    def __init__(self, builder: Any, count: Any, first: Sequence[Any]) -> None:
        b = self.b = builder
        self._count, self._first, self._before = count, first, b.block
        self._body, self._after = b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed(">", count, I64(0)), self._body, self._after)
        b.position_at_end(self._body)
        self._round = b.phi(I64)
        self._round.add_incoming(I64(0), self._before)
        self.values = []
        for value in first:
            self.values.append(b.phi(value.type))
            self.values[-1].add_incoming(value, self._before)

    def end(self, values: Sequence[Any]) -> list[Any]:
        """Close the loop; returns the values after the last round."""
        b = self.b
        block = b.block
        following = b.add(self._round, I64(1))
        self._round.add_incoming(following, block)
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, block)
        b.cbranch(b.icmp_signed("<", following, self._count), self._body, self._after)
        b.position_at_end(self._after)
        results = []
        for value, last in zip(self._first, values, strict=True):
            phi = b.phi(value.type)
            phi.add_incoming(value, self._before)
            phi.add_incoming(last, block)
            results.append(phi)
        return results
