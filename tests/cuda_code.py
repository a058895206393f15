"""What a Triton or Gluon kernel compiles to for a GPU, on a machine without one.

Triton brings the assembler and the disassembler. Here the assembler's own report is kept, and the machine code is cut
into loops: a loop is the blocks that lead back to one that all ways to them pass, as compilers define it, so that what
waits out of line for a barrier counts with the loop that it serves.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

MATRIX = re.compile(r"(H|I|Q|B|D|O|HG|IG|QG|BG|UTCH|UTCI|UTCQ|UTCO)MMA")
MEMORY = re.compile(r"(LD|ST)(G|S|GSTS|SM|SM)?\b|UBLKCP|UTMA")
ALIGNED = 16
ARCHITECTURES = (80, 89, 90, 100, 120)


@dataclass(frozen=True, eq=False)
class Program:
    """What decides the code of a kernel.

    Args:
        kernel: a function of ``triton.jit`` or ``gluon.jit``.
        arguments: the types of its run-time arguments, "*u8", "i32", ...; in any order.
        constants: the values of its other arguments.
        options: num_warps, maxnreg, ...
        aligned: integers that are multiples of 16, as pointers all are.
    """

    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()

    def compile(self, capability: int) -> Code:
        """For compute capability 80, 89, 90, ...; what the compiler raises, an assembler's error too, is raised."""
        import triton
        from triton import knobs
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        names = self.kernel.arg_names
        assert set(names) == {*self.arguments, *self.constants}, set(names) ^ {*self.arguments, *self.constants}
        multiples = [
            i for i, name in enumerate(names) if self.arguments.get(name, "").startswith("*") or name in self.aligned
        ]
        source = (GluonASTSource if self.kernel.is_gluon() else ASTSource)(
            self.kernel,
            {name: self.arguments.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in self.constants.items()},
            attrs={(i,): [["tt.divisibility", ALIGNED]] for i in multiples},
        )
        said = io.StringIO()
        with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
            knobs.nvidia.dump_ptxas_log = True
            knobs.compilation.always_compile = True
            target = GPUTarget("cuda", capability, 32)
            compiled = triton.compile(source, target=target, options={"enable_fp_fusion": True, **self.options})
        return Code(
            log=said.getvalue(),
            sass=disassembled(compiled.asm["cubin"]),
            ptx=compiled.asm["ptx"],
            shared=compiled.metadata.shared,
            ttgir=compiled.asm["ttgir"],
        )


def compile_ahead(
    module: str, name: str, programs: Sequence[tuple[dict[str, str], dict[str, Any], dict[str, Any]]], capability: int
) -> None:
    """Compile a kernel so that ``program`` finds it on disk, in as many processes as there are cores.

    Args:
        module: where the kernel is.
        name: of the kernel.
        programs: the signature, the constants and the options of each.
        capability: 80, 89, 90, ...
    """
    compile_all([(module, name, program) for program in programs], capability)


def compile_all(
    jobs: Sequence[tuple[str, str, tuple[dict[str, str], dict[str, Any], dict[str, Any]]]], capability: int
) -> None:
    """As ``compile_ahead``, of several kernels: the module, the name and what decides the program.

    Where pytest's workers run side by side, each compiles what its tests need: nothing is done here.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    distinct = list({repr(job): job for job in jobs}.values())
    workers = min(len(distinct), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_one, [(*job, capability) for job in distinct]))


def _compile_one(job: tuple[str, str, tuple[dict[str, str], dict[str, Any], dict[str, Any]], int]) -> None:
    from halfbyte.kernels.cuda.launch import compile_for

    module, name, (signature, constants, options), capability = job
    compile_for(capability, getattr(importlib.import_module(module), name), signature, constants, options)


def disassembled(cubin: bytes) -> str:
    """The listing of a cubin, with labels."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Loop:
    """The opcodes of a loop, of those inside it too."""

    opcodes: Counter[str]

    @property
    def instructions(self) -> int:
        return self.opcodes.total()

    @property
    def matrix(self) -> int:
        return count(self.opcodes, MATRIX)

    @property
    def shuffles(self) -> int:
        return count(self.opcodes, r"SHFL\b")

    @property
    def per_matrix(self) -> float:
        """Instructions for each of those of the matrix units."""
        return self.instructions / self.matrix


@dataclass(frozen=True, eq=False)
class Code:
    """A compiled kernel.

    Args:
        log: what the assembler reported.
        sass: the listing of the machine code.
        ptx: what was assembled.
        shared: bytes of shared memory.
        ttgir: Triton's own code, in which copies have shapes.
    """

    log: str
    sass: str
    ptx: str
    shared: int
    ttgir: str = ""

    @cached_property
    def registers(self) -> int:
        return max(int(n) for n in re.findall(r"Used (\d+) registers", self.log))

    @cached_property
    def stack(self) -> int:
        """Bytes of the frame in local memory, where what is spilled goes, too."""
        return max(int(n) for n in re.findall(r"(\d+) bytes stack frame", self.log))

    @cached_property
    def spills(self) -> int:
        """Loads and stores of local memory, and the bytes that the assembler says it spills."""
        said = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log)))
        return said + count(self.opcodes, r"(LDL|STL)\b")

    @cached_property
    def warnings(self) -> list[str]:
        """Of the assembler; C7510 and the like say that it serialised matrix instructions."""
        return [line for line in self.log.splitlines() if re.search(r"warning|\(C7\d+\)", line, re.IGNORECASE)]

    @cached_property
    def expected(self) -> list[tuple[int, int]]:
        """Bytes that a barrier is told to expect, and those of the boxes that are asked for until the next one is."""
        found: list[tuple[int, int]] = []
        for line in self.ttgir.splitlines():
            if told := EXPECTED.search(line):
                found.append((int(told[1]), 0))
            elif box := COPIED.search(line):
                expected, copied = found[-1]
                found[-1] = expected, copied + prod(map(int, box[1].split("x")[:-1])) * int(box[2]) // 8
        return found

    @cached_property
    def instructions(self) -> list[tuple[list[str], str, str, str]]:
        """(labels, predicate, opcode, operands) of each, without the padding after the last."""
        return list(_instructions(self.sass))

    @cached_property
    def opcodes(self) -> Counter[str]:
        return Counter(opcode for _, _, opcode, _ in self.instructions)

    @property
    def matrix(self) -> int:
        return count(self.opcodes, MATRIX)

    @cached_property
    def loops(self) -> list[Loop]:
        """The main ones: the innermost of those with matrix instructions, or, in code without them, with memory's."""
        kind = MATRIX if self.matrix else MEMORY
        found = []
        for instructions in _loops(self.instructions):
            opcodes = Counter(self.instructions[i][2] for i in instructions)
            if count(opcodes, kind):
                found.append((instructions, Loop(opcodes)))
        return [loop for own, loop in found if not any(other < own for other, _ in found)]

    @cached_property
    def main(self) -> list[Loop]:
        """The loops, or, where there is none, what lies between the first and the last matrix instruction."""
        places = [i for i, (_, _, opcode, _) in enumerate(self.instructions) if re.match(MATRIX, opcode)]
        if self.loops or not places:
            return self.loops
        return [Loop(Counter(opcode for _, _, opcode, _ in self.instructions[places[0] : places[-1] + 1]))]

    def __str__(self) -> str:
        parts = [f"{self.registers} registers", f"{self.shared} B shared", f"{self.opcodes.total()} instructions"]
        for loop in self.main:
            steps = f", {loop.per_matrix:.1f} for each of {loop.matrix} matrix" if loop.matrix else ""
            parts.append(f"{'loop' if self.loops else 'main part'} of {loop.instructions}{steps}, {loop.shuffles} SHFL")
        return "; ".join([*parts, *([f"spills {self.spills}"] if self.spills else []), *self.warnings])


def count(opcodes: Counter[str], pattern: str | re.Pattern[str]) -> int:
    """How many instructions have an opcode that begins so."""
    return sum(n for opcode, n in opcodes.items() if re.match(pattern, opcode))


LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*)")
EXPECTED = re.compile(r"barrier_expect %\w+, (\d+)")
COPIED = re.compile(r"async_tma_copy_global_to_local .*-> !ttg\.memdesc<((?:\d+x)+)[a-z]+(\d+)")
LABEL = re.compile(r"(\.L_\w+):")
TARGET = re.compile(r"\.L_\w+")


def _instructions(sass: str) -> Iterator[tuple[list[str], str, str, str]]:
    labels: list[str] = []
    for line in sass.splitlines():
        if found := LABEL.match(line):
            labels.append(found[1])
        elif (found := LINE.match(line)) and found[2] != "NOP":
            yield labels, found[1] or "", found[2], found[3]
            labels = []


def _successors(instructions: Sequence[tuple[list[str], str, str, str]]) -> list[list[int]]:
    """Where each instruction may lead; a call leads to the next, a convergence to where its barrier was set up for."""
    places = {label: i for i, (labels, *_) in enumerate(instructions) for label in labels}
    meets: dict[str, str] = {}
    ways = []
    for i, (_, predicate, opcode, operands) in enumerate(instructions):
        name = opcode.split(".")[0]
        targets = [t for t in TARGET.findall(operands) if t in places]
        goes_on = True
        if name == "BSSY":
            meets[operands.split(",")[0].strip()] = targets[0]
            targets = []
        elif name == "BSYNC":
            targets = [meets[re.split(r"[; ]", operands)[0]]]
            goes_on = bool(predicate)
        elif name == "BRA":
            goes_on = bool(predicate) or opcode != "BRA" or not operands.startswith("`(")
        elif name in ("BRX", "JMX", "BRXU", "EXIT", "RET"):
            goes_on = bool(predicate)
        else:
            targets = []
        following = [i + 1] if goes_on and i + 1 < len(instructions) else []
        ways.append(list(dict.fromkeys([*following, *(places[t] for t in targets)])))
    return ways


def _loops(instructions: Sequence[tuple[list[str], str, str, str]]) -> list[set[int]]:
    """The natural loops, by the numbers of their instructions."""
    ways = _successors(instructions)
    reached, order = {0}, [0]
    for i in order:
        for j in ways[i]:
            if j not in reached:
                reached.add(j)
                order.append(j)
    before: dict[int, list[int]] = {i: [] for i in order}
    for i in order:
        for j in ways[i]:
            before[j].append(i)
    everything = (1 << len(instructions)) - 1
    above = dict.fromkeys(order, everything) | {0: 1}  # bits of the instructions that all ways to this one pass
    changed = True
    while changed:
        changed = False
        for i in order[1:]:
            new = everything
            for j in before[i]:
                new &= above[j]
            new |= 1 << i
            changed |= new != above[i]
            above[i] = new
    found: dict[int, set[int]] = {}
    for tail in order:
        for head in ways[tail]:
            if above[tail] >> head & 1:
                body, left = found.setdefault(head, {head}), [tail]
                while left:
                    i = left.pop()
                    if i not in body:
                        body.add(i)
                        left.extend(before[i])
    return list(found.values())
