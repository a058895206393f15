"""Where each layout puts a code and a block scale, in closed form: the formulas that the formats' documents give."""

from __future__ import annotations

from collections.abc import Callable

from halfbyte.layouts import (
    Atoms8x4,
    Atoms128x4,
    Columns,
    Comfy,
    ExpertsOutPair,
    Fragments,
    GateUp,
    Gguf,
    Layout,
    Marlin,
    NPacked,
    Rows,
    Tiles64,
    Trtllm,
)

Code = Callable[[int, int, int, int], tuple[int, int]]
"""Code (n, k) of a weight (N, K): its byte, and 1 for the high nibble."""
Scale = Callable[[int, int, int, int], int]
"""Scale of block (n, b) of a weight (N, K): its byte."""


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def row_code(n, k, rows, columns):
    return n * columns // 2 + k // 2, k % 2


def row_scale(n, b, rows, columns):
    return n * columns // 16 + b


def atom(n, b, rows, columns):
    tiles = up(columns, 64) // 64
    return n // 128 * tiles * 512 + b // 4 * 512 + n % 32 * 16 + n % 128 // 32 * 4 + b % 4


def small_atom(n, b, rows, columns):
    return n // 8 * (up(columns, 64) // 64) * 32 + b // 4 * 32 + n % 8 * 4 + b % 4


def columns_code(align):
    return lambda n, k, rows, columns: (k // 2 * up(rows, align) + n, k % 2)


def columns_scale(align):
    return lambda n, b, rows, columns: b * up(rows, align) + n


def pair_code(n, k, rows, columns):
    return k * rows // 2 + n // 2, n % 2


def gguf_code(n, k, rows, columns):
    block = n * columns // 64 + k // 64
    return 36 * block + 4 + k % 64 // 16 * 8 + k % 8, k % 16 // 8


def gguf_scale(n, b, rows, columns):
    return 36 * (n * columns // 64 + b // 4) + b % 4


def comfy_code(n, k, rows, columns):
    return n * columns // 2 + k // 2, 1 - k % 2


def marlin_code(pad):
    def code(n, k, rows, columns):
        tile = k // 16 * (up(rows, pad) // 64) + n // 64
        word = 4 * (n % 8 * 4 + k % 8 // 2) + n % 64 // 16
        nibble = k % 2 * 4 + n % 16 // 8 * 2 + k % 16 // 8
        place = (tile * 128 + word) * 8 + nibble
        return place // 2, place % 2

    return code


def marlin_scale(pad):
    def scale(n, b, rows, columns):
        m = n % 64
        swapped = {0: 0, 1: 2, 2: 1, 3: 3}[m // 8 % 4] + m // 32 * 4
        return b * up(rows, pad) + n // 64 * 64 + 8 * (m % 8) + swapped

    return scale


def shuffled(n, size):
    """map32[i] = (i % 4) * 8 + i // 4, map16[i] = (i % 2) * 8 + i // 2."""
    i = n % size
    return n - i + i % (size // 8) * 8 + i // (size // 8)


def fragment_code(n, k, rows, columns):
    """Before the bits of each word are moved: nibble p, rh, h of word t, u, g, kt, c."""
    unit = n // 16 * (up(columns, 64) // 64) + k // 64
    word = 128 * unit + n % 8 * 16 + k % 64 // 16 * 4 + k % 8 // 2
    return 4 * word + 2 * (k % 2) + n % 16 // 8, k % 16 // 8


def fragment_scale(n, b, rows, columns):
    unit = n // 16 * (up(columns, 64) // 64) + b // 4
    return 64 * unit + n % 8 * 8 + b % 4 * 2 + n % 16 // 8


def moved(place, rows_to):
    return lambda n, x, rows, columns: place(rows_to(n, rows), x, rows, columns)


def up_first(n, rows):
    return (n + rows // 2) % rows


def interleaved(n, rows):
    return n % (rows // 2) * 2 + n // (rows // 2)


def up_first_64(n, rows):
    half, i = divmod(n, rows // 2)
    return i // 64 * 128 + (1 - half) * 64 + i % 64


def word_order(n, b, rows, columns):
    return n * columns // 16 + b // 4 * 4 + {0: 0, 1: 2, 2: 1, 3: 3}[b % 4]


PLACES: list[tuple[Layout, Code, Scale]] = [
    (Rows(), row_code, row_scale),
    (Columns(), columns_code(1), columns_scale(1)),
    (Columns(align=32), columns_code(32), columns_scale(32)),
    (NPacked(), pair_code, columns_scale(1)),
    (Atoms128x4(), row_code, atom),
    (Atoms8x4(), row_code, small_atom),
    (Tiles64(), row_code, atom),
    (Tiles64("linear"), row_code, row_scale),
    (Tiles64("marlin"), row_code, word_order),
    (ExpertsOutPair(), pair_code, columns_scale(1)),
    (Marlin(), marlin_code(64), marlin_scale(64)),
    (Marlin(pad_n=128), marlin_code(128), marlin_scale(128)),
    (Trtllm(), moved(row_code, lambda n, rows: shuffled(n, 32)), moved(atom, lambda n, rows: shuffled(n, 32))),
    (Trtllm(64), moved(row_code, lambda n, rows: shuffled(n, 16)), moved(atom, lambda n, rows: shuffled(n, 16))),
    (Comfy(), comfy_code, atom),
    (Gguf(), gguf_code, gguf_scale),
    (Fragments(), fragment_code, fragment_scale),
    (Fragments("float16"), fragment_code, fragment_scale),
    (GateUp("concatenated", Gguf()), gguf_code, gguf_scale),
    (GateUp("up_first", Rows()), moved(row_code, up_first), moved(row_scale, up_first)),
    (GateUp("interleaved", Marlin()), moved(marlin_code(64), interleaved), moved(marlin_scale(64), interleaved)),
    (GateUp("up_first_64", Atoms128x4()), moved(row_code, up_first_64), moved(atom, up_first_64)),
    (
        GateUp("up_first_interleaved", Comfy()),
        moved(comfy_code, lambda n, rows: interleaved(up_first(n, rows), rows)),
        moved(atom, lambda n, rows: interleaved(up_first(n, rows), rows)),
    ),
]
