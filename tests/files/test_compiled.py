"""The executor of layouts that Numba compiles: byte for byte as NumPy's, for any statement, and no byte beyond."""

import math
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import environment
from contract import MX_VARIANTS, VARIANTS, check_layout, fitting
from halfbyte import jit
from halfbyte.errors import LayoutError
from halfbyte.layouts import (
    LAYOUTS,
    Atoms128x4,
    Columns,
    Gguf,
    Marlin,
    NPacked,
    Order,
    Rows,
    compiled,
    executor,
    executors,
)
from halfbyte.layouts.executors import arrange, arrange_codes, restore, restore_codes
from helpers import assert_same_bytes, modelopt, nibbles, random_mxfp4, random_weight
from orders import PLANES, Plane, orders

needs_numba = pytest.mark.skipif(jit.missing() is not None, reason=f"the compiled executor cannot run: {jit.missing()}")
keyed = pytest.mark.parametrize("layout", VARIANTS, ids=lambda layout: layout.key)


@pytest.fixture
def forced(monkeypatch):
    """Compiled code moves every array, however small."""
    monkeypatch.setattr(executors, "SMALL", 0)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def by_numpy(function, *args):
    """What the function gives where NumPy moves everything."""
    small, executors.SMALL = executors.SMALL, 1 << 62
    try:
        return function(*args)
    finally:
        executors.SMALL = small


# -- equal to NumPy --


@needs_numba
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("shape", [((), 130, 272), ((2,), 256, 192), ((), 0, 32), ((0,), 4, 32)], ids=str)
@keyed
def test_contract(layout, shape, rng):
    experts, n, k = shape
    check_layout(layout, random_weight(rng, n, k, experts, per_row=True))


@needs_numba
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("shape", [((), 130, 288), ((2,), 256, 192), ((), 3, 40), ((), 0, 32)], ids=str)
@pytest.mark.parametrize("layout", MX_VARIANTS, ids=lambda layout: layout.key)
def test_contract_of_mxfp4(layout, shape, rng):
    experts, n, k = shape
    weight = random_mxfp4(rng, n, k, experts)
    check_layout(layout, weight)
    if not layout.needs(weight.shape):
        for name, buffer in by_numpy(layout.pack, weight).buffers().items():
            assert_same_bytes(layout.pack(weight).buffers()[name], buffer)


@needs_numba
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize(("n", "k"), [(256, 512), (200, 144)])
@keyed
def test_as_numpy(layout, n, k, rng):
    weight = random_weight(rng, n, k, (2,))
    if layout.needs(weight.shape):
        return
    weight = fitting(layout, weight)
    ours, theirs = layout.pack(weight), by_numpy(layout.pack, weight)
    for name, buffer in theirs.buffers().items():
        assert_same_bytes(ours.buffers()[name], buffer)
    assert ours.unpack().same(weight)
    assert by_numpy(ours.unpack).same(weight)


@needs_numba
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("plane", PLANES, ids=str)
def test_golden_bytes(plane: Plane):
    source, stored = plane.source(), plane.stored().reshape(-1)
    shape = (source.shape[0], source.shape[1] * (2 if plane.codes else 1))
    forwards, back = (arrange_codes, restore_codes) if plane.codes else (arrange, restore)
    assert (executor(plane.order, shape, codes=plane.codes).name == "numpy") == plane.order.moves_nothing(shape)
    assert_same_bytes(forwards(plane.order, source).reshape(-1), stored)
    assert_same_bytes(back(plane.order, stored, shape), source)


@needs_numba
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.key)
def test_golden_weights(layout):
    for name in "AD":
        weight = modelopt(name)
        if not layout.needs(weight.shape):
            weight = fitting(layout, weight)
            assert layout.pack(weight).unpack().same(weight)


@needs_numba
@given(orders(), st.tuples(st.integers(0, 9), st.integers(0, 9)), st.sampled_from([(), (2,)]))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_any_statement(order, shape, lead):
    a = np.random.default_rng(0).integers(1, 256, (*lead, *shape), np.uint8)
    if a.size:
        flat = executors.arrange_compiled(order, a, codes=False)
        assert_same_bytes(flat, executors.arrange_numpy(order, a))
        assert_same_bytes(executors.restore_compiled(order, flat, shape, codes=False), a)


@st.composite
def binary_orders(draw):
    """A statement of digits that are powers of two, some backwards, some with bits; of whole and of ragged tiles."""
    axes = [[letter + str(i) for i in range(draw(st.integers(1, 4)))] for letter in "nk"]
    free = {axis[draw(st.integers(0, len(axis) - 1))] for axis in axes}
    memory = draw(st.permutations([*axes[0], *axes[1]]))
    backwards = draw(st.sets(st.sampled_from(memory)))
    sizes = {digit: draw(st.sampled_from([2, 4, 8])) for axis in axes for digit in axis if digit not in free}
    placed = " ".join(f"-{digit}" if digit in backwards else digit for digit in memory)
    bits = draw(st.sampled_from([(), draw(st.permutations(range(32)))])) if math.prod(sizes.values()) % 8 == 0 else ()
    order = Order(f"({' '.join(axes[0])}) ({' '.join(axes[1])}) -> {placed}", bits=bits, **sizes)
    n, k = (draw(st.sampled_from([16, 24, 33, 64])) for _ in "nk")
    return order, (n, k - k % 2)


@needs_numba
@given(binary_orders(), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=25)
def test_any_statement_of_powers_of_two(case, codes):
    order, shape = case
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, (shape[0], shape[1] // 2 if codes else shape[1]), np.uint8)
    flat = executors.arrange_compiled(order, a, codes)
    assert_same_bytes(flat, by_numpy(arrange_codes if codes else arrange, order, a))
    assert_same_bytes(executors.restore_compiled(order, flat, shape, codes), a)
    if codes and not order.bits:
        assert np.array_equal(nibbles(flat)[: order.count(shape)], arrange(order, nibbles(a)))


@needs_numba
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("a", [2, 3])
def test_bits_of_words_that_tiles_and_elements_move(a, rng):
    """Of two rows and four columns: the last row and the last columns are moved alone."""
    order = Order("(n b) (k a p) -> n k a b p", bits=rng.permutation(32).tolist(), b=2, a=a, p=4)
    shape = 5, 100
    codes = rng.integers(0, 256, (5, 50), np.uint8)
    flat = arrange_codes(order, codes)
    assert executors._move(order, shape, True, None, False).tiled == 4 * 96 / 500
    assert_same_bytes(flat, by_numpy(arrange_codes, order, codes))
    assert_same_bytes(restore_codes(order, flat, shape), codes)
    straight = np.unpackbits(arrange_codes(Order(order.pattern, b=2, a=a, p=4), codes), bitorder="little")
    moved = np.unpackbits(flat, bitorder="little").reshape(-1, 32)
    assert np.array_equal(moved[:, order.bits].reshape(-1), straight)


@needs_numba
@pytest.mark.usefixtures("forced")
def test_an_odd_count_of_codes():
    order, codes = Order("n (k p) -> n k p", p=17), np.arange(1, 9, dtype=np.uint8)[None]
    flat = arrange_codes(order, codes)
    assert_same_bytes(nibbles(flat)[:16], nibbles(codes)[0])
    assert flat.shape == (9,)
    assert not nibbles(flat)[16:].any()
    assert_same_bytes(restore_codes(order, flat, (1, 16)), codes)


@needs_numba
@pytest.mark.usefixtures("forced")
def test_views_and_arrays_that_are_read_only(rng):
    whole = rng.integers(0, 256, (128, 256), np.uint8)
    for view in (whole[::2, ::2], whole.T, whole[:, 1:129]):
        view = view[:64, :64]
        view.setflags(write=False)
        flat = arrange_codes(Marlin().codes, view)
        flat.setflags(write=False)
        assert_same_bytes(flat, by_numpy(arrange_codes, Marlin().codes, np.ascontiguousarray(view)))
        assert_same_bytes(restore_codes(Marlin().codes, flat, (64, 128)), view)


@needs_numba
@pytest.mark.usefixtures("forced")
def test_types_of_elements(rng):
    """One byte of any type is moved as it is; others are NumPy's."""
    order = Atoms128x4().scales
    for dtype in (np.int8, np.bool_, np.uint16, np.float32):
        a = rng.integers(0, 2, (130, 20)).astype(dtype)
        flat = arrange(order, a)
        assert flat.dtype == dtype
        assert_same_bytes(flat, executors.arrange_numpy(order, a))
        assert_same_bytes(restore(order, flat, a.shape), a)


# -- which one runs --


@needs_numba
def test_which_executor(monkeypatch):
    assert executor(Marlin().codes, (4096, 4096), codes=True) == ("tiles", "512 bytes each, 100.0% of the elements")
    assert executor(Marlin().codes, (2, 4096, 2880), codes=True).why == "256 bytes each, 100.0% of the elements"
    assert executor(Atoms128x4().scales, (4100, 256)) == ("tiles", "1024 bytes each, 99.9% of the elements")
    assert executor(Order("(n a) (k p) -> k n p a", a=3, p=3), (3000, 3000)) == (
        "elements", "the digits leave no tile",
    )  # fmt: skip
    assert executor(Atoms128x4().scales, (1023, 1024)) == ("numpy", "1047552 bytes are fewer than 1048576")
    assert executor(NPacked().codes, (1024, 2046), codes=True).name == "numpy"
    assert executor(NPacked().codes, (1024, 2048), codes=True).name == "tiles"
    assert executor(Rows().codes, (4096, 4096), codes=True) == ("numpy", "nothing moves")
    assert executor(NPacked().codes, (0, 4096), codes=True) == ("numpy", "nothing moves")
    assert {name: e.name for name, e in Gguf().executors((4096, 4096)).items()} == {"codes": "tiles", "scales": "tiles"}
    assert {name: e.name for name, e in Marlin().executors((1024, 4096)).items()} == {
        "codes": "tiles", "scales": "numpy",
    }  # fmt: skip
    monkeypatch.setattr(jit, "missing", lambda: "numba is not here")
    assert executor(Marlin().codes, (4096, 4096), codes=True) == ("numpy", "numba is not here")


@pytest.mark.parametrize(
    ("layout", "plane"),
    [(layout, plane) for layout in (*VARIANTS, *MX_VARIANTS) for plane in ("codes", "scales")],
    ids=lambda x: getattr(x, "key", x),
)
def test_every_layout_has_tiles(layout, plane):
    """For the shapes of real layers no layout is left to single elements."""
    order, codes = (layout.codes, True) if plane == "codes" else (layout.scales, False)
    for shape in ((14336, 4096), (4096, 14336), (2880, 2880)):
        grid = layout.grid(shape, plane)
        parts = next(parts for parts in layout.buffers.values() if plane in parts)
        for back in (False, True):
            move = executors._move(order, grid, codes, executors.record_of(parts, plane), back)
            assert move.tiles is not None
            assert move.tiled > 0.9


@needs_numba
@pytest.mark.parametrize("rows", [1023, 1024])
def test_the_executor_that_is_named_runs(monkeypatch, rows, rng):
    ran = []
    run = compiled.Move.run
    monkeypatch.setattr(compiled.Move, "run", lambda *args: (ran.append("compiled"), run(*args)))
    order, a = Atoms128x4().scales, rng.integers(0, 256, (rows, 1024), np.uint8)
    flat = arrange(order, a)
    assert (ran == ["compiled"]) == (executor(order, a.shape).name != "numpy") == (rows == 1024)
    assert_same_bytes(flat, executors.arrange_numpy(order, a))


def test_without_numba():
    """The result is the same, and the reason says what to install; nothing imports Numba before it is needed."""
    code = """
import sys
import numpy as np
from halfbyte.layouts import Marlin, executor
from halfbyte.layouts.executors import arrange, restore
order, a = Marlin().scales, np.arange(2048 * 1024).astype(np.uint8).reshape(2048, 1024)
small = a[:64, :64]
assert (restore(order, arrange(order, small), small.shape) == small).all()
assert "numba" not in sys.modules
sys.modules["numba"] = None
assert (restore(order, arrange(order, a), a.shape) == a).all()
print(*executor(order, a.shape))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=120, env=environment(), check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == "numpy numba is not installed; run: pip install 'halfbyte[cpu]'\n"


@needs_numba
def test_numba_that_may_not_compile(monkeypatch):
    import numba

    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    assert jit.missing() == "NUMBA_DISABLE_JIT is set"


def test_a_numba_that_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert jit.missing() == "numba is not installed; run: pip install 'halfbyte[cpu]'"

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "numba":
                raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.delitem(sys.modules, "numba")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert jit.missing() == "numba cannot be imported: Numba needs NumPy 2.3 or less"


# -- what is refused, and shared --


@pytest.mark.parametrize("codes", [False, True])
def test_lengths_are_checked(codes):
    order, back = (Marlin().codes, restore_codes) if codes else (Marlin().scales, restore)
    for size in (0, 2047, 2049, 4096):
        with pytest.raises(LayoutError, match=r"not the length of this order: got \(\d+,\), expected \(\*E, 2048\)"):
            back(order, np.zeros(size, np.uint8), (64, 64) if codes else (64, 32))


def test_arrays_that_do_not_fit():
    places = compiled.Places(np.arange(16) * 16, np.arange(16))
    other = compiled.Places(np.arange(16), np.arange(16) * 16)
    move = compiled.Move(8, places, other)
    good = np.zeros(256, np.uint8)
    for source, target in ((good[:255], good), (good, good[:255]), (good[::2], good), (good.view(np.int8), good)):
        with pytest.raises(LayoutError, match="does not fit"):
            move.run(source, target)
    fixed = good.copy()
    fixed.setflags(write=False)
    with pytest.raises(LayoutError, match="the target is read-only"):
        move.run(good, fixed)
    with pytest.raises(LayoutError, match="a place before the first"):
        compiled.Move(8, places, compiled.Places(-np.arange(16), np.arange(16)))


@needs_numba
def test_threads_share_what_is_compiled(monkeypatch, rng):
    monkeypatch.setattr(compiled, "_COMPILED", {})
    order, a = Columns().codes, rng.integers(0, 256, (256, 256), np.uint8)
    wanted = by_numpy(arrange_codes, order, a)
    found, together = [], threading.Barrier(4)

    def work():
        together.wait()
        found.append(executors.arrange_compiled(order, a, codes=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(compiled._COMPILED) == 1
    for one in found:
        assert_same_bytes(one, wanted)


# -- no byte beyond the arrays --


GUARDED = """
import ctypes, mmap, sys
import numpy as np
from halfbyte.layouts import Atoms128x4, Columns, Comfy, Fragments, Gguf, Marlin, NPacked, Trtllm, executors

libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
maps = []

def guarded(a, at_the_end):
    # A copy of a between two pages that nobody may touch, against the last or the first of them.
    inner = -(-a.nbytes // page) * page
    maps.append(mmap.mmap(-1, inner + 2 * page))
    whole = np.frombuffer(maps[-1], np.uint8)
    start = page + (inner - a.nbytes if at_the_end else 0)
    copy = whole[start : start + a.nbytes].reshape(a.shape)
    copy[...] = a
    for edge in (0, page + inner):
        assert libc.mprotect(whole.ctypes.data + edge, page, 0) == 0
    return copy

rng = np.random.default_rng(0)
beyond = sys.argv[1] == "beyond"
cases = [(layout, plane) for layout in (Atoms128x4(), Columns(), Columns(7), Comfy(), Gguf(), Marlin(), NPacked(),
         Trtllm(), Fragments()) for plane in ("codes", "scales")]
for layout, plane in cases:
    order, codes = (layout.codes, True) if plane == "codes" else (layout.scales, False)
    ((name, parts),) = ((n, p) for n, p in layout.buffers.items() if plane in p)
    for shape in ((130, 1088), (256, 2048)):
        n, k = layout.grid(shape, plane)
        a = rng.integers(0, 256, (n, k // 2 if codes else k), np.uint8)
        for at_the_end in (True, False):
            rows = guarded(a, at_the_end)
            memory = guarded(np.zeros(layout.sizes(shape)[name], np.uint8), at_the_end)
            back = guarded(np.zeros_like(a), at_the_end)
            if beyond:
                np.lib.stride_tricks.as_strided(rows, (rows.size + 1,), (1,))[-1].item()
            record = executors.record_of(parts, plane)
            executors.arrange_compiled(order, rows, codes, memory, record)
            executors.restore_compiled(order, memory, (n, k), codes, back, record)
            assert (back == a).all()
print("done")
"""


def guarded_run(argument):
    return subprocess.run(
        [sys.executable, "-c", GUARDED, argument],
        capture_output=True, text=True, timeout=300, env=environment(), check=False,
    )  # fmt: skip


@needs_numba
def test_nothing_beyond_the_arrays_is_touched():
    done = guarded_run("inside")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@needs_numba
def test_the_guard_would_catch_it():
    assert guarded_run("beyond").returncode == -signal.SIGSEGV
