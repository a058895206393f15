"""How fast a GPU reads its memory, in Triton: the ceiling of a product whose weight no cache holds."""

from typing import Any

import torch
import triton
import triton.language as tl

PROGRAMS_OF_AN_SM = 8
BLOCK = 4096
"""Words that a program asks for at once: 8 loads of 16 bytes by each of its threads."""


@triton.jit
def _read(memory, out, size, block: tl.constexpr):
    """The exclusive or of all words that a program reads, each thread's by itself."""
    lanes = tl.arange(0, block)
    total = tl.zeros([block], tl.int32)
    for at in range(tl.program_id(0) * block, size, tl.num_programs(0) * block):
        total ^= tl.load(memory + at + lanes)
    tl.store(out + tl.program_id(0), tl.xor_sum(total, 0))


def read(memory: torch.Tensor) -> torch.Tensor:
    """The exclusive or of the words of ``memory``, i32, in parts; their number is a multiple of ``BLOCK``."""
    assert memory.numel() % BLOCK == 0
    assert memory.numel() < 2**31 - BLOCK * 8192
    programs = PROGRAMS_OF_AN_SM * torch.cuda.get_device_properties(memory.device).multi_processor_count
    out = torch.empty(programs, dtype=torch.int32, device=memory.device)
    kernel: Any = _read
    kernel[(programs,)](memory, out, memory.numel(), BLOCK, num_warps=4)
    return out
