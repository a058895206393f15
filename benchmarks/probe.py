"""How fast this machine reads memory: the ceiling of a product whose weight no cache holds.

Lines of 64 bytes in vector loads, with prefetches 4 KB ahead, on as many threads as the kernels have.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
from llvmlite import ir
from numba.extending import intrinsic

from halfbyte import jit

CHUNK = 1 << 18
AHEAD = 4096
LINES = 4  # 64 bytes each, in a turn of the loop


@intrinsic  # type: ignore[untyped-decorator]
def _read(typing: Any, address: Any, size: Any) -> Any:
    """The exclusive or of all words of 64 bits in ``size`` bytes from ``address``; size is a multiple of 256."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, size = arguments
        word, flag, byte = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        line = ir.VectorType(word, 8)
        prefetch = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]), "llvm.prefetch.p0"
        )
        before, loop, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(word)
        at.add_incoming(word(0), before)
        sums = [builder.phi(line) for _ in range(LINES)]
        new = []
        for i, total in enumerate(sums):
            total.add_incoming(ir.Constant(line, None), before)
            place = builder.add(address, builder.add(at, word(64 * i)))
            ahead = builder.inttoptr(builder.add(place, word(AHEAD)), byte)
            builder.call(prefetch, [ahead, flag(0), flag(3), flag(1)])
            new.append(builder.xor(total, builder.load(builder.inttoptr(place, line.as_pointer()), align=8)))
        following = builder.add(at, word(64 * LINES))
        at.add_incoming(following, loop)
        for total, sum_ in zip(sums, new, strict=True):
            total.add_incoming(sum_, loop)
        builder.cbranch(builder.icmp_signed("<", following, size), loop, done)
        builder.position_at_end(done)
        lines = functools.reduce(builder.xor, new)
        return functools.reduce(builder.xor, [builder.extract_element(lines, flag(i)) for i in range(8)])

    return numba.int64(numba.int64, numba.int64), generate


@jit.compiled(parallel=True)  # type: ignore[untyped-decorator]
def _read_chunks(address: Any, out: Any) -> None:
    for i in numba.prange(out.size):
        out[i] = _read(address + i * CHUNK, CHUNK)


def read(memory: Any, out: Any) -> None:
    """The exclusive or of the words of each chunk of ``memory``, u8, into ``out``, i64."""
    assert memory.nbytes >= out.size * CHUNK
    jit.run(_read_chunks, memory.ctypes.data, out)
