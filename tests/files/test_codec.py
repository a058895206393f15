"""The compiled quantizer and decoder: byte for byte as NumPy's, for any input, and no byte beyond the arrays."""

import signal
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import environment
from halfbyte import decode, jit
from halfbyte.errors import QuantizeError
from halfbyte.recipes import LIKES, base, quantize
from halfbyte.recipes.rtn import Rtn
from helpers import INPUTS, assert_same_bytes, golden, modelopt, random_weight

needs_numba = pytest.mark.skipif(jit.missing() is not None, reason=f"nothing is compiled: {jit.missing()}")

BF16 = ml_dtypes.bfloat16
DTYPES = {"float32": np.float32, "bfloat16": BF16, "float16": np.float16}
CHUNK = 4096
WAYS = (lambda function: function(), jit.alone)
"""On all threads, and on one: two entries of the compiled code."""
dtypes = pytest.mark.parametrize("dtype", DTYPES)
likes = pytest.mark.parametrize("like", LIKES)


def by(size, function, *args, **options):
    """What a function gives where compiled code begins at that many values."""
    before = decode.SMALL, base.SMALL
    decode.SMALL = base.SMALL = size
    try:
        return function(*args, **options)
    finally:
        decode.SMALL, base.SMALL = before


def by_numpy(function, *args, **options):
    return by(1 << 62, function, *args, **options)


def compiled(function, *args, **options):
    """By compiled code alone: NumPy's may not run."""

    def refuse(*args):
        raise AssertionError("NumPy computes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "decode_e2m1", refuse)
        patch.setattr(Rtn, "encode", refuse)
        patch.setattr(base, "finite_amax_numpy", refuse)
        return by(1, function, *args, **options)


def check_decode(codes, scales, scale2, k=None, dtypes=DTYPES):
    for dtype in dtypes:
        arguments = codes, scales, scale2, codes.shape[-1] * 2 if k is None else k, dtype
        wanted = by_numpy(decode.dequantize, *arguments)
        for way in WAYS:
            values = way(lambda: compiled(decode.dequantize, *arguments))  # noqa: B023
            assert values.dtype == wanted.dtype
            assert_same_bytes(values, wanted)


def check_quantize(x, like="modelopt", **options):
    wanted = by_numpy(quantize, x, like=like, **options)
    for way in WAYS:
        w = way(lambda: compiled(quantize, x, like=like, **options))
        assert w.shape == wanted.shape
        for name in ("codes", "scales", "scale2"):
            assert_same_bytes(getattr(w, name), getattr(wanted, name))


def check_refused(x, like="modelopt", **options):
    """The same error, at the same index."""
    with pytest.raises(QuantizeError) as wanted:
        by_numpy(quantize, x, like=like, **options)
    for way in WAYS:
        with pytest.raises(QuantizeError) as caught:
            way(lambda: by(1, quantize, x, like=like, **options))
        assert caught.value.index == wanted.value.index
        assert str(caught.value) == str(wanted.value)
    return wanted.value.index


VIEWS = {
    "whole": lambda a: a,
    "rows backwards": lambda a: a[::-1],
    "columns backwards": lambda a: a[:, ::-1],
    "every other row": lambda a: np.repeat(a, 2, 0)[::2],
    "every other column": lambda a: np.repeat(a, 2, 1)[:, ::2],
    "part of wider rows": lambda a: np.pad(a, ((1, 1), (3, 5)))[1:-1, 3:-5],
    "Fortran order": np.asfortranarray,
    "one row again and again": lambda a: np.broadcast_to(a[:1], a.shape),
}
views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


# -- the decoder --


EVERY_CODE = np.arange(256, dtype=np.uint8).reshape(1, 32, 8).repeat(256, 0).reshape(256, 256)
EVERY_SCALE = np.arange(256, dtype=np.uint8)[:, None].repeat(32, 1)
"""Every byte of codes under every byte of scales: a row has one of scales, NaN and negative ones, too."""
SCALE2 = [1.0, 1e-4, 2.0**-149, 2.0**-126, 3e-39, 1e-30, 2.0**-14, 24.3, 3e36, 3.4e38, np.inf, 0.0, -0.75]


@needs_numba
@pytest.mark.parametrize("scale2", SCALE2)
def test_every_code_and_scale(scale2):
    check_decode(EVERY_CODE, EVERY_SCALE, np.float32([[scale2]]))


@needs_numba
def test_every_code_and_scale_by_rows():
    scale2 = np.resize(np.float32(SCALE2), (256, 1))
    for shift in range(len(SCALE2)):
        check_decode(EVERY_CODE, EVERY_SCALE, np.roll(scale2, shift, 0))


@needs_numba
def test_a_scale2_that_is_nan():
    """Its own bits come out, which only NumPy's order of operands says."""
    for bits in (0x7FC00000, 0xFFC00000, 0x7FC12345):
        scale2 = np.array([[bits]], np.uint32).view(np.float32)
        wanted = by_numpy(decode.dequantize, EVERY_CODE, EVERY_SCALE, scale2, 512, "float32")
        assert_same_bytes(by(1, decode.dequantize, EVERY_CODE, EVERY_SCALE, scale2, 512, "float32"), wanted)


@needs_numba
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_value_is_rounded_right(dtype):
    """Products on both sides of each tie, below and above the range, and NaN of both signs."""
    rng = np.random.default_rng(0)
    scales = rng.integers(0, 256, (64, 256), np.uint8)
    for exponent in range(-149, 128, 6):
        scale2 = np.float32([[2.0**exponent]]) * rng.uniform(1, 2, (64, 1)).astype(np.float32)
        check_decode(rng.integers(0, 256, (64, 2048), np.uint8), scales, scale2, dtypes=[dtype])


@needs_numba
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("experts", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, CHUNK - 16, CHUNK, CHUNK + 1, 2 * CHUNK + 40])
def test_shapes(k, experts, per_row):
    w = random_weight(np.random.default_rng(0), 5, k, experts, per_row=per_row)
    check_decode(w.codes, w.scales, w.scale2, k)


@needs_numba
@views
@pytest.mark.parametrize("k", [16, 90, 160])
def test_views_of_codes_and_scales(view, k):
    w = random_weight(np.random.default_rng(0), 6, k, per_row=True)
    check_decode(view(w.codes), view(w.scales), w.scale2, k)
    check_decode(w.codes, view(w.scales), w.scale2, k)
    check_decode(view(w.codes), w.scales, np.repeat(w.scale2, 3, 0)[::-3], k)


@needs_numba
def test_experts_that_do_not_lie_side_by_side():
    w = random_weight(np.random.default_rng(0), 4, 96, (3, 2), per_row=True)
    codes, scales, scale2 = (a.transpose(1, 2, 0, 3) for a in (w.codes, w.scales, w.scale2))
    check_decode(codes, scales, scale2, 96)
    check_decode(w.codes[::-1], w.scales[::-1], w.scale2[::-1], 95)


@needs_numba
@dtypes
def test_golden_weights(dtype):
    for name in "AD":
        w = modelopt(name)
        assert_same_bytes(compiled(w.dequantize, dtype), by_numpy(w.dequantize, dtype))


# -- the quantizer --


def every_value(dtype):
    """All finite numbers of 16 bits, in an order that puts like beside like, and in one that mixes them."""
    values = np.arange(65536).astype(np.uint16).view(DTYPES[dtype])
    values = values[np.isfinite(values.astype(np.float32))]
    rng = np.random.default_rng(0)
    alike = values[np.argsort(np.abs(values.astype(np.float32)), kind="stable")]
    return [np.resize(a, (-(-len(a) // 1600), 1600)) for a in (alike, rng.permutation(values))]


@needs_numba
@likes
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_value_of_16_bits(dtype, like):
    for x in every_value(dtype):
        check_quantize(x, like)
        check_quantize(x.astype(np.float32), like)
        # By scales of their own, blocks use the whole of each range.
        for exponent in range(-140, 120, 20):
            top = np.float32(2.0**exponent)
            part = x[:, np.abs(x.astype(np.float32)).max(0) < top * 2688]
            part = part[:, : part.shape[1] // 16 * 16]
            if part.size:
                check_quantize(part, like, scale2=top)


@needs_numba
@likes
@dtypes
@pytest.mark.parametrize("scale", [1e-45, 1e-40, 2.0**-126, 1e-30, 1e-5, 0.02, 1.0, 1e3, 6e4, 1e30, 1e38])
def test_magnitudes(scale, dtype, like):
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        x = (rng.normal(0, scale, (40, 320)) * 2.0 ** rng.integers(-20, 1, (40, 20)).repeat(16, 1)).astype(
            DTYPES[dtype]
        )
    x[~np.isfinite(x.astype(np.float32))] = 1
    x[3], x[4, 16:48], x[5, :16] = 0, -0.0, -x[5, :16]
    check_quantize(x, like)


@needs_numba
@likes
@dtypes
def test_ties_and_their_neighbours(dtype, like):
    """What rounds to even, beside a block's top that makes the step a power of two."""
    ties = np.float32([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6])
    eps = np.float32({"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype])
    rows = [sign * ties * (1 + side * eps) for sign in (1, -1) for side in (-1, 0, 1)]
    x = np.array([[6, *row] for row in rows], np.float32)
    for scale2 in (2.0**-9, 1 / 448, 1.0, 2.0**-4, 0.3):
        check_quantize((x * np.float32(scale2 * 64)).astype(DTYPES[dtype]), like, scale2=scale2)
        check_quantize((x * np.float32(scale2)).astype(DTYPES[dtype]), like)


@needs_numba
@likes
def test_every_scale_and_what_lies_between(like):
    """Blocks whose wanted scales are each E4M3 number, each midpoint of two, and their neighbours in f32."""
    numbers = np.arange(0x7F).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    wanted = np.concatenate([numbers, middles])
    wanted = np.concatenate([np.nextafter(wanted, np.float32(0)), wanted, np.nextafter(wanted, np.float32(500))])
    wanted = wanted[wanted <= 448]
    x = np.linspace(-1, 1, 16, dtype=np.float32) * (wanted * 6)[:, None]
    for scale2 in (1.0, 0.5, 1 / 3, 1e-20):
        with np.errstate(under="ignore"):
            check_quantize(x * np.float32(scale2) * np.float32(1 - 2.0**-22), like, scale2=scale2)


@needs_numba
@likes
@pytest.mark.parametrize("scale2", [1e-45, 1e-38, 1e-3, 1e10, 1e38, 3.4e38])
def test_a_scale2_far_off(scale2, like):
    x = np.random.default_rng(0).normal(0, 1, (20, 64)).astype(np.float32)
    x *= np.float32(min(1.0, scale2 * 100))
    check_quantize(x, like, scale2=scale2)


@needs_numba
@likes
@dtypes
@pytest.mark.parametrize("k", [1, 15, 16, 17, 32, 40, 255, 256, 272, CHUNK - 1, CHUNK, CHUNK + 16, 2 * CHUNK + 72])
def test_widths(k, dtype, like):
    x = np.random.default_rng(0).normal(0, 0.02, (5, k)).astype(DTYPES[dtype])
    check_quantize(x, like, pad=True)


@needs_numba
@likes
@views
@pytest.mark.parametrize("k", [16, 90, 160])
def test_views_of_values(view, k, like):
    x = np.random.default_rng(0).normal(0, 0.02, (6, k)).astype(np.float32)
    for dtype in DTYPES.values():
        check_quantize(view(x.astype(dtype)), like, pad=True)


@needs_numba
def test_rows_that_are_copied_in_parts(monkeypatch):
    monkeypatch.setattr(base, "_CHUNK", 20)  # 320 values at once
    x = np.random.default_rng(0).normal(0, 0.02, (64, 96)).astype(np.float32)
    check_quantize(x.T, "modelopt")
    assert check_refused(np.where(np.arange(64)[:, None] == 50, np.nan, x).astype(np.float32).T) == [0, 50]


@needs_numba
def test_values_at_odd_addresses():
    x = np.random.default_rng(0).normal(0, 0.02, (6, 160)).astype(np.float32)
    for dtype in DTYPES.values():
        memory = np.zeros(x.astype(dtype).nbytes + 1, np.uint8)
        odd = memory[1:].view(dtype).reshape(x.shape)
        odd[...] = x
        check_quantize(odd)


@needs_numba
@likes
@dtypes
@pytest.mark.parametrize("name", INPUTS)
def test_golden_inputs(name, dtype, like):
    check_quantize(golden("inputs_f32")[name].astype(DTYPES[dtype]), like)


@needs_numba
@likes
@dtypes
def test_what_is_refused(dtype, like):
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        x = np.ones((300, 48), DTYPES[dtype])
        x[[7, 200, 200], [40, 3, 20]] = value
        assert check_refused(x, like) == [7, 40]
        x = x[:, :47]
        assert check_refused(x, like, pad=True) == [7, 40]
    x = np.ones((300, 48), DTYPES[dtype])
    x[[7, 200], [40, 3]] = [3000, 4000]
    assert check_refused(x, like, scale2=1.0) == [7, 2]
    check_quantize(x, like, scale2=2.0)


@needs_numba
@likes
def test_the_last_that_fits_under_a_fixed_scale2(like):
    top = np.float32(2688).view(np.int32)
    refused = 0
    for steps in range(-3, 12):
        x = np.zeros((2, 32), np.float32)
        x[1, 20] = (top + steps).astype(np.int32).view(np.float32)
        if x[1, 20] / 6 > base.LARGEST_SCALE:
            assert check_refused(x, like, scale2=1.0) == [1, 1]
            refused += 1
        else:
            check_quantize(x, like, scale2=1.0)
    assert refused == 8


@st.composite
def matrices(draw):
    """Values of any sort and size of step, in any view."""
    n, k = draw(st.integers(1, 6)), draw(st.one_of(st.integers(1, 200), st.integers(CHUNK - 40, CHUNK + 40)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    spread, centre = draw(st.integers(0, 60)), draw(st.integers(-150, 60))
    x = rng.choice([-1, 1], (n, k)) * rng.uniform(0.5, 2, (n, k)) * 2.0 ** (centre + rng.uniform(0, spread, (n, k)))
    if draw(st.booleans()):
        x = np.ldexp(np.round(np.ldexp(x, 2 - centre)), centre - 2)
    with np.errstate(over="ignore", under="ignore"):
        x = x.astype(dtype)
    x[~np.isfinite(x.astype(np.float32))] = 0
    x[rng.random((n, k)) < draw(st.sampled_from([0.0, 0.3, 0.99]))] = draw(st.sampled_from([0.0, -0.0]))
    if draw(st.integers(0, 9)) == 0:
        x[rng.integers(n), rng.integers(k)] = np.nan
    return VIEWS[draw(st.sampled_from(list(VIEWS)))](x)


@needs_numba
@given(matrices(), st.sampled_from(LIKES), st.one_of(st.none(), st.integers(-140, 60)))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_any_matrix(x, like, exponent):
    options = {"pad": True} if exponent is None else {"pad": True, "scale2": 2.0**exponent}
    try:
        by_numpy(quantize, x, like=like, **options)
    except QuantizeError:
        check_refused(x, like, **options)
    else:
        check_quantize(x, like, **options)


# -- which one runs --


@needs_numba
def test_small_ones_are_numpys(monkeypatch):
    assert decode.executor(1 << 18) is base.executor(1 << 18) is None
    for executor in (decode.executor, base.executor):
        assert executor((1 << 18) - 1) == "262143 values are fewer than 262144"
    ran = []
    monkeypatch.setattr(jit, "thread_count", lambda: ran.append("compiled") or 1)
    x = np.ones((512, 512), np.float32)
    w = quantize(x)
    assert ran == ["compiled"] * 2  # the largest magnitude, and the rest
    w.dequantize()
    assert ran == ["compiled"] * 3
    w.rows(0, 511).dequantize()
    quantize(x[1:])
    assert ran == ["compiled"] * 3
    monkeypatch.setattr(jit, "missing", lambda: "numba is not here")
    assert decode.executor(1 << 18) == base.executor(1 << 18) == "numba is not here"
    assert quantize(x).same(w)
    assert_same_bytes(w.dequantize(), x)
    assert ran == ["compiled"] * 3


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0)], ids=str)
def test_empty(shape):
    w = quantize(np.zeros(shape, np.float32))
    assert w.shape == w.dequantize().shape == shape


def test_without_numba():
    text = """
import sys
import numpy as np
import halfbyte
sys.modules["numba"] = None
x = np.ones((512, 512), np.float32)
print((halfbyte.quantize(x).dequantize() == x).all(), halfbyte.decode.executor(x.size))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        capture_output=True, text=True, timeout=120, env=environment(), check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == "True numba is not installed; run: pip install 'halfbyte[cpu]'\n"


DIGESTS = """
import hashlib, sys
import ml_dtypes
import numpy as np
import halfbyte
from halfbyte import decode
from halfbyte.recipes import base
decode.SMALL = base.SMALL = int(sys.argv[1])
found = hashlib.sha256()
rng = np.random.default_rng(0)
codes = np.arange(256, dtype=np.uint8).reshape(1, 32, 8).repeat(256, 0).reshape(256, 256)
scales = np.arange(256, dtype=np.uint8)[:, None].repeat(32, 1)
for scale2 in (1e-42, 1e-6, 0.3, 3e38):
    for dtype in ("float32", "bfloat16", "float16"):
        for k in (512, 500):
            found.update(decode.dequantize(codes, scales, np.float32([[scale2]]), k, dtype).tobytes())
for scale in (1e-42, 1e-5, 1, 1e4):
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        for like in ("modelopt", "compressed-tensors"):
            for k in (5000, 4992):
                w = halfbyte.quantize(rng.normal(0, scale, (7, k)).astype(dtype), like=like, pad=True)
                found.update(w.codes.tobytes() + w.scales.tobytes() + w.scale2.tobytes())
if sys.argv[1] == "1":
    from halfbyte import decode_code, jit
    assert decode_code._PERMUTES == jit.has("avx512f")
    assert sys.argv[2] != "portable" or not decode_code._PERMUTES
print(found.hexdigest())
"""


def digest(*args, **more):
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS, *args],
        capture_output=True, text=True, timeout=300, env=environment(**more), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_numba
def test_processors(tmp_path):
    """Instructions that only some have, those that LLVM chooses for this one, and what the oldest has."""
    wanted = digest(str(1 << 62), "numpy")
    assert digest("1", "native") == wanted
    assert digest("1", "portable", HALFBYTE_CPU="portable") == wanted
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "XDG_CACHE_HOME": str(tmp_path)}
    assert digest("1", "portable", **plain) == wanted


@needs_numba
def test_threads_of_python():
    x = np.random.default_rng(0).normal(0, 0.02, (512, 1024)).astype(np.float32)
    w = by_numpy(quantize, x)
    values = by_numpy(w.dequantize, "bfloat16")
    together, found = threading.Barrier(4), []

    def work():
        together.wait()
        for _ in range(5):
            found.append((quantize(x), w.dequantize("bfloat16")))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for ours, theirs in found:
        assert ours.same(w)
        assert_same_bytes(theirs, values)


# -- no byte beyond the arrays --


GUARDED = """
import ctypes, mmap, sys
import ml_dtypes
import numpy as np
from halfbyte import decode, jit
from halfbyte.recipes import base, recipe_named, quantize

libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
maps = []

def guarded(a, at_the_end):
    # A copy of a between two pages that nobody may touch, against the last or the first of them.
    inner = -(-a.nbytes // page) * page
    maps.append(mmap.mmap(-1, inner + 2 * page))
    whole = np.frombuffer(maps[-1], np.uint8)
    start = page + (inner - a.nbytes if at_the_end else 0)
    copy = whole[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
    copy[...] = a
    for edge in (0, page + inner):
        assert libc.mprotect(whole.ctypes.data + edge, page, 0) == 0
    return copy

rng = np.random.default_rng(0)
rtn, beyond = recipe_named("rtn"), sys.argv[1] == "beyond"
for name in ("float32", "bfloat16", "float16"):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    for n, k in ((1, 1), (3, 15), (1, 16), (2, 17), (5, 48), (3, 250), (2, 272), (3, 4095), (2, 4096), (2, 8200)):
        for at_the_end in (True, False):
            x = guarded(rng.normal(0, 0.02, (n, k)).astype(dtype), at_the_end)
            w = quantize(x, pad=True)
            codes, scales = guarded(np.zeros_like(w.codes), at_the_end), guarded(np.zeros_like(w.scales), at_the_end)
            scale2 = guarded(w.scale2.repeat(n, 0), at_the_end)
            out = guarded(np.zeros((n, k), dtype), at_the_end)
            for way in (lambda f: f(), jit.alone):
                codes[...], scales[...], out[...] = 0xAA, 0xAA, 1000
                if beyond:
                    np.lib.stride_tricks.as_strided(x, (x.size + 1,), (x.itemsize,))[-1].item()
                dense = base.Dense.of(x)
                assert dense.address == x.ctypes.data
                assert way(lambda: base._peak(dense)) == np.abs(x.astype(np.float32)).max()
                scale = rtn.tensor_scale(base.finite_amax_numpy(x), "modelopt")
                assert way(lambda: rtn.encode_compiled(dense, scale, "modelopt", codes, scales))
                assert (codes == w.codes).all() and (scales == w.scales).all()
                assert way(lambda: decode._compiled([codes, scales, scale2], k, name, out.ctypes.data))
                assert (out == w.dequantize(name)).all()
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
