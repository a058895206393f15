"""What is wrong with a weight whose dense twin is known: its error, and the reading of its bytes that explains it.

A reading is another meaning of the same bytes. Each is tried on a sample of rows and confirmed on the whole tensor;
one is named only where the error falls to what the format itself needs. The table READINGS is the whole set.

Bounds. Rounding to NVFP4 costs 0.095 of a Gaussian weight's norm (measured). It costs any block less than 0.2 of its
own: a block's largest magnitude is 6 steps, the 15 others err by at most 1 step where they are 5, and
15 / (36 + 15 * 25) is 0.19 squared. Only blocks with a subnormal scale can lose more, and those are below 1/28672 of
the tensor's largest value. E4M3 rounds a value by at most 1/16. The readings that are wrong cost much more: scales in
another order 0.3, nibbles exchanged or another tensor 1.4, on Gaussian weights.

MXFP4 has powers of two for scales: 0.112 to 0.119 of a Gaussian weight's norm, as the scale is rounded (measured). A
block loses at most a third of its own where the scale is rounded down, as the OCP rule does: its largest magnitude
is 4 steps or more, the 31 others lose a quarter of a step and no more, and 31 / 16 / (16 + 31 / 16) is 0.33 squared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Final, TypeAlias

import numpy as np

from halfbyte.errors import WeightError
from halfbyte.layouts.executors import arrange, restore
from halfbyte.modules import Reading
from halfbyte.numerics import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    FULL_SCALE,
    MX_BLOCK,
    Array,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    unpack_nibbles,
)
from halfbyte.reading import ATOMS
from halfbyte.weight import Fp8Weight, Mxfp4Weight, Weight

CALM: Final = {"nvfp4": 0.11, "fp8": 1 / 16, "mxfp4": 0.14}
"""Kind -> the relative error up to which nothing is looked at again."""
FAR: Final = 0.2
FAR_MX: Final = 1 / 3
"""Above what rounding to nearest costs any tensor: the values are others, or stand elsewhere."""
_SLACK = 1.5
"""A recipe that minds the outputs (GPTQ) may err more than rounding to nearest, by this factor before it is told;
and a reading must be better than the plain one by as much."""

_CHUNK = 1 << 18
"""Elements of one step: its f64 temporaries are 2 MB each."""
_TILE = 128
_QUERY = 2048
"""Rows that are looked for among all rows: enough for a share, and 2048 x N x 64 products are a second at most."""
_SKETCH = 64
"""Numbers that stand for a row: unlike rows then correlate by 1/8, like ones by 0.98 and more."""
_ALIKE = 0.9


@dataclass(frozen=True)
class Errors:
    """How far a weight is from its dense twin.

    Attributes:
        noise, signal: the sums of the squares of the differences, and of the twin.
        worst: (row, block) with the largest error relative to its own norm, or to the average of its row's
            blocks where that is larger.
        worst_relative: that error.
    """

    noise: float = 0.0
    signal: float = 0.0
    worst: tuple[int, int] = (0, 0)
    worst_relative: float = 0.0

    @property
    def relative(self) -> float:
        """Norm of the differences over norm of the twin; Inf where a value is not finite or the twin is zero."""
        if self.noise == 0:
            return 0.0
        if not math.isfinite(self.noise) or not 0 < self.signal < math.inf:
            return math.inf
        return math.sqrt(self.noise / self.signal)

    @property
    def sqnr(self) -> float:
        """Signal over quantization noise in decibels; Inf without noise."""
        relative = self.relative
        return -math.inf if relative == math.inf else -20 * math.log10(relative) if relative else math.inf


@dataclass(frozen=True)
class Entry:
    """One way to read the bytes of a weight.

    Attributes:
        name: what is wrong with the file if this reading is right.
        hint: what to do.
        read: gives the weight as it was meant.
        tile: N and K/16 must be multiples of it.
        kinds: of the weights that it is for.
        readings: with which a checkpoint of NVFP4 weights is read so, where its dialect multiplies by scale2 and where
            it divides; None where no reading does.
    """

    name: str
    hint: str
    read: Callable[[Any], Any]
    tile: tuple[int, int] = (1, 1)
    kinds: tuple[str, ...] = ("nvfp4",)
    readings: tuple[Reading | None, Reading | None] = (None, None)

    def fits(self, weight: Any) -> bool:
        """Whether the bytes of ``weight`` can be read so."""
        n, k = weight.shape
        return bool(weight.kind in self.kinds and n % self.tile[0] == 0 and -(-k // BLOCK) % self.tile[1] == 0)


@dataclass(frozen=True)
class Diagnosis:
    """What explains a weight.

    Attributes:
        name: what is wrong.
        relative: the relative error that is left.
        hint: what to do.
        readings: as of Entry.
    """

    name: str
    relative: float
    hint: str
    readings: tuple[Reading | None, Reading | None] = (None, None)


# --- the readings

_Any: TypeAlias = Weight | Fp8Weight | Mxfp4Weight


def swap_nibbles(weight: Any) -> Any:
    """The two codes of each byte exchanged."""
    return _with_codes(weight, (weight.codes << 4) | (weight.codes >> 4))


def join_halves(weight: Any) -> Any:
    """Byte j of a block holds codes j and j + 8 (j + 16 in MXFP4), as in GGUF."""
    codes = unpack_nibbles(weight.codes)
    blocks = codes.reshape(*weight.scales.shape, -1, 2)
    return _with_codes(weight, pack_nibbles(np.swapaxes(blocks, -1, -2).reshape(codes.shape)))


def _with_codes(weight: Any, codes: Any) -> Any:
    if isinstance(weight, Mxfp4Weight):
        return Mxfp4Weight(codes=codes, scales=weight.scales, k=weight.shape[-1])
    return weight.replace(codes=codes)


def unswizzle(weight: Weight, atom: str = "128x4") -> Weight:
    """The block scales lie in the order of an atom; N and K/16 are whole atoms."""
    scales = weight.scales
    return weight.replace(scales=restore(ATOMS[atom], scales.reshape(-1), scales.shape))


def swizzle(weight: Weight, atom: str = "128x4") -> Weight:
    """The block scales were taken out of the order of an atom that they never had."""
    scales = weight.scales
    return weight.replace(scales=arrange(ATOMS[atom], scales).reshape(scales.shape))


def _times(factor: float) -> Callable[[Weight], Weight]:
    def read(weight: Weight) -> Weight:
        with np.errstate(over="ignore"):
            return weight.replace(scale2=weight.scale2 * np.float32(factor))

    return read


def _invert(weight: Weight) -> Weight:
    with np.errstate(all="ignore"):
        return weight.replace(scale2=1 / weight.scale2)


def _drop(weight: Weight) -> Weight:
    return weight.replace(scale2=1.0)


def _invert_pre(weight: Weight) -> Weight:
    with np.errstate(all="ignore"):
        return weight.replace(pre_scale=None if weight.pre_scale is None else 1 / weight.pre_scale)


def _chain(*steps: Callable[[Weight], Weight]) -> Callable[[Weight], Weight]:
    return lambda weight: reduce(lambda w, step: step(w), steps, weight)


def _rescaled(read: Callable[[Any], Any]) -> Callable[[Fp8Weight], Fp8Weight]:
    def of(weight: Fp8Weight) -> Fp8Weight:
        with np.errstate(all="ignore"):
            return Fp8Weight(data=weight.data, scale=read(weight.scale), block=weight.block)

    return of


_HIGH = "it reads right with --nibble-order high, as ComfyUI and BFL store it"
_GGUF = "it is in GGUF's order: convert it from the GGUF file again"
_SCALE2 = "write it again as the multiplier amax / 2688 (weight_scale_2) or its reciprocal (weight_global_scale)"


def _always(reading: Reading) -> tuple[Reading, Reading]:
    return reading, reading


def _atom_entries() -> Iterator[Entry]:
    for atom, order in ATOMS.items():
        back, forth = partial(unswizzle, atom=atom), partial(swizzle, atom=atom)
        ways: list[tuple[str, str, list[Callable[[Weight], Weight]]]] = [
            ("swizzled", atom, [back]),
            ("unswizzled though they were linear", f"{atom}-undone", [forth]),
            ("swizzled twice", f"{atom}-twice", [back, back]),
        ]
        for name, layout, steps in ways:
            hint, one = f"it reads right with --scale-layout {layout}", _always(Reading(scale_layout=layout))
            yield Entry(f"block scales {name} ({atom})", hint, _chain(*steps), order.multiples, readings=one)
            both, two = f"nibbles swapped and block scales {name} ({atom})", _always(Reading("high", layout))
            hint = f"{_HIGH}; {hint}"
            yield Entry(both, hint, _chain(*steps, swap_nibbles), order.multiples, readings=two)


READINGS: Final[tuple[Entry, ...]] = (
    Entry("nibbles swapped", _HIGH, swap_nibbles, kinds=("nvfp4", "mxfp4"), readings=_always(Reading("high"))),
    Entry("nibbles in halves of a block", _GGUF, join_halves, kinds=("nvfp4", "mxfp4")),
    *_atom_entries(),
    Entry(
        "scale2 inverted",
        f"a divisor stands where a multiplier is meant, or the reverse: {_SCALE2}",
        _invert,
        readings=(Reading(scale2="divisor"), Reading(scale2="multiplier")),
    ),
    Entry("scale2 that belongs to nobody", "the block scales alone are right: write scale2 = 1", _drop),
    Entry("scale2 that is amax", _SCALE2, _times(1 / FULL_SCALE), readings=(Reading(scale2="amax"), None)),
    Entry(
        "scale2 that is 1 / amax",
        f"amax stands where a divisor is meant, or a divisor lacks the 2688: {_SCALE2}",
        _chain(_invert, _times(1 / FULL_SCALE)),
        readings=(None, Reading(scale2="amax")),
    ),
    Entry("scale2 divided by 2688 twice", _SCALE2, _times(FULL_SCALE)),
    Entry("scale2 that is amax / 448", f"it lacks the 6 of E2M1: {_SCALE2}", _times(1 / E2M1_MAX)),
    Entry("scale2 that is amax / 6", f"it lacks the 448 of E4M3: {_SCALE2}", _times(1 / E4M3_MAX)),
    Entry("scale2 divided by 6 once too often", _SCALE2, _times(E2M1_MAX)),
    Entry("scale2 divided by 448 once too often", _SCALE2, _times(E4M3_MAX)),
    Entry(
        "pre_scale that the dense twin does not have",
        "it was smoothed before: compare with the dense checkpoint before smoothing, or leave pre_quant_scale out",
        lambda w: w.replace(pre_scale=None),
    ),
    Entry("pre_scale inverted", "write pre_quant_scale as what activations are multiplied by", _invert_pre),
    Entry("FP8 scale inverted", "write the multiplier amax / 448", _rescaled(lambda s: 1 / s), kinds=("fp8",)),
    Entry("FP8 scale that is amax", "write it divided by 448", _rescaled(lambda s: s / E4M3_MAX), kinds=("fp8",)),
)
"""Every reading that is tried; a new one is one entry."""


# --- permutations of rows

HEADS: Final = (32, 64, 80, 96, 128, 256)
"""Sizes of attention heads whose halves rotary embeddings may interleave."""


def _interleave(n: int, group: int) -> Any:
    return np.arange(n).reshape(n // group, 2, group // 2).swapaxes(1, 2).reshape(n)


def _part(n: int, group: int) -> Any:
    return np.arange(n).reshape(n // group, group // 2, 2).swapaxes(1, 2).reshape(n)


def permutations(n: int) -> Iterator[tuple[str, str, Any]]:
    """(name, hint, (N,) the dense row that each row holds) of the usual orders of N rows."""
    if n % 2:
        return
    fused = "a fused gate_up_proj with up first: exchange its halves"
    yield "rows whose halves are exchanged", fused, np.roll(np.arange(n), n // 2)
    yield "rows whose halves are interleaved", "gate and up row by row: take them apart", _interleave(n, n)
    yield "rows taken apart that alternate in the dense twin", "interleave the halves again", _part(n, n)
    for head in HEADS:
        if n % head == 0 and head != n:
            hint = "the order of rotary embeddings differs: permute the rows of each head back"
            yield f"rows interleaved inside heads of {head}", hint, _interleave(n, head)
            yield f"rows taken apart inside heads of {head}", hint, _part(n, head)


class _Rows:
    """Some rows of a matrix, in some order, gathered when they are asked for."""

    def __init__(self, dense: Array, index: Any) -> None:
        self._dense, self._index, self.shape = dense, index, (len(index), dense.shape[1])

    def __getitem__(self, rows: slice) -> Any:
        return self._dense[self._index[rows]]


# --- errors


def error_of(weight: _Any, dense: Any) -> Errors:
    """Measure a weight against its dense twin, in chunks of rows and in f64.

    Args:
        weight: (N, K), NumPy. A pre_scale is multiplied into it, so that both compute the same function.
        dense: (N, K) float, or anything with its shape that gives rows a..b as ``dense[a:b]``.

    Raises:
        WeightError: shapes that differ.
    """
    n, k = weight.shape if len(weight.shape) == 2 else (-1, -1)
    if tuple(dense.shape) != (n, k):
        raise WeightError("the dense twin has another shape", got=weight.shape, expected=tuple(dense.shape))
    noise, signal, worst, top = 0.0, 0.0, (0, 0), 0.0
    step, block = max(1, _CHUNK // max(k, 1)), MX_BLOCK if weight.kind == "mxfp4" else BLOCK
    for a in range(0, n if k else 0, step):
        b = min(a + step, n)
        with np.errstate(all="ignore"):
            twin = np.asarray(dense[a:b]).astype(np.float64)
            wrong, level = _block_squares(_values(weight, a, b) - twin, block), _block_squares(twin, block)
            noise, signal = noise + float(wrong.sum()), signal + float(level.sum())
            score = wrong / np.maximum(level, level.mean(-1, keepdims=True))
            score[wrong == 0] = 0  # 0 / 0 in a row of zeros
            score[np.isnan(score)] = np.inf
        at = int(score.argmax())
        if score.flat[at] > top:
            top, (row, column) = float(score.flat[at]), divmod(at, score.shape[1])
            worst = (a + row, column)
    return Errors(noise, signal, worst, math.sqrt(top))


def _values(weight: _Any, a: int, b: int) -> Any:
    """Rows a..b as they count, f32."""
    if isinstance(weight, Weight):
        values = weight.rows(a, b).dequantize()
        return values if weight.pre_scale is None else values * weight.pre_scale.astype(np.float32)
    if isinstance(weight, Mxfp4Weight):
        return _mx(weight, slice(a, b)).dequantize()
    values, scale, block = decode_e4m3(weight.data[a:b]), weight.scale, weight.block
    if block is not None:
        scale = scale[np.arange(a, b) // block[0]].repeat(block[1], 1)[:, : values.shape[1]]
    return values * (scale if scale.shape[0] == 1 or block is not None else scale[a:b])


def _block_squares(x: Any, block: int) -> Any:
    """(rows, K) f64 to (rows, G): the sum of squares of each block."""
    ragged = -x.shape[1] % block
    x = np.pad(x, ((0, 0), (0, ragged))) if ragged else x
    blocks = x.reshape(x.shape[0], -1, block)
    return np.einsum("ngi,ngi->ng", blocks, blocks)


def needed(dense: Any, pre_scale: Array | None = None) -> float:
    """The relative error of a matrix (N, K) when it is rounded to NVFP4 by its largest magnitudes; 0 for zeros.

    With a pre_scale the matrix is divided by it before the rounding, and multiplied after.
    """
    with np.errstate(all="ignore"):
        x = np.asarray(dense).astype(np.float32)
        x = x if pre_scale is None else x / pre_scale.astype(np.float32)
        n, k = x.shape
        x = np.pad(x, ((0, 0), (0, -k % BLOCK))).reshape(n, -1, BLOCK)
        amax = np.abs(x).max(initial=0)
        if not 0 < amax < np.inf:
            return 0.0
        scale2 = np.maximum(amax / np.float32(FULL_SCALE), np.finfo(np.float32).tiny)
        scales = encode_e4m3(np.maximum(np.abs(x).max(-1) / (np.float32(E2M1_MAX) * scale2), np.float32(2.0**-9)))
        step = np.maximum(decode_e4m3(scales) * scale2, np.finfo(np.float32).smallest_subnormal)
        codes = pack_nibbles(encode_e2m1(x / step[..., None])).reshape(n, -1)
    return error_of(Weight(codes=codes, scales=scales, scale2=scale2, pre_scale=pre_scale, k=k), dense).relative


def needed_mx(dense: Any) -> float:
    """The relative error of a matrix (N, K) when it is rounded to MXFP4, by the rule that is worse for it: scales
    rounded down, so that the largest magnitudes are clipped, or up."""
    with np.errstate(all="ignore"):
        x = np.asarray(dense).astype(np.float32)
        n, k = x.shape
        x = np.pad(x, ((0, 0), (0, -k % MX_BLOCK))).reshape(n, -1, MX_BLOCK)
        amax = np.abs(x).max(-1)
        if not amax.max(initial=0) < np.inf:
            return 0.0
        worst = 0.0
        for exponent in (np.floor(np.log2(amax)) - 2, np.ceil(np.log2(amax / np.float32(E2M1_MAX)))):
            scales = np.clip(np.nan_to_num(exponent, neginf=-127) + 127, 0, 254).astype(np.uint8)
            codes = pack_nibbles(encode_e2m1(x / decode_e8m0(scales)[..., None])).reshape(n, -1)
            worst = max(worst, error_of(Mxfp4Weight(codes=codes, scales=scales, k=k), dense).relative)
    return worst


def bound_of(weight: _Any, dense: Array) -> float:
    """The relative error above which a weight is worse than its format needs; rounds a sample of ``dense``."""
    calm = CALM[weight.kind]
    if isinstance(weight, Fp8Weight):
        return calm
    if isinstance(weight, Mxfp4Weight):
        return max(calm, _SLACK * needed_mx(dense[_sample(*dense.shape)]))
    return max(calm, _SLACK * needed(dense[_sample(*dense.shape)], weight.pre_scale))


def far(bound: float, kind: str = "nvfp4") -> float:
    """The relative error above which a weight is not its dense twin's, for a bound of ``bound_of``."""
    return max(FAR_MX if kind == "mxfp4" else FAR, bound)


# --- diagnosis


def diagnose(weight: _Any, dense: Array, others: Mapping[str, Any] | None = None, name: str = "") -> Diagnosis | None:
    """The reading that explains why a weight is far from its dense twin.

    Args:
        weight: (N, K), NumPy.
        dense: (N, K) float, an array.
        others: name -> the dense twin of another module of this shape, likeliest first: arrays, or whatever
            gives rows as ``other[a:b]``.
        name: of the module, to say how it is related to another.

    Returns:
        The reading whose error is what the format needs, or None: the plain reading is right, or none explains it.
    """
    plain, bound = error_of(weight, dense).relative, bound_of(weight, dense)
    if plain <= bound:
        return None
    limit = min(far(bound, weight.kind), plain / _SLACK)
    n, k = weight.shape
    rows = _sample(n, k)
    few, twin = _take(weight, rows), dense[rows]
    if not np.any(twin):
        few, twin, rows = weight, dense, np.arange(n)

    tried = [(error_of(e.read(few), twin).relative, i) for i, e in enumerate(READINGS) if e.fits(weight)]
    for _, i in sorted(t for t in tried if t[0] <= limit):
        whole = error_of(READINGS[i].read(weight), dense).relative
        if whole <= limit:
            return Diagnosis(READINGS[i].name, whole, READINGS[i].hint, READINGS[i].readings)
    for title, hint, index in permutations(n):
        if error_of(few, dense[index[rows]]).relative <= limit:
            whole = error_of(weight, _Rows(dense, index)).relative
            if whole <= limit:
                return Diagnosis(title, whole, hint)
    return (
        _off_by_a_factor(weight, dense, limit)
        or _another(weight, others or {}, name, limit)
        or _permuted(weight, dense, limit)
    )


def _sample(n: int, k: int) -> Any:
    """Rows to try first: all of a small tensor, else the first and the middle tile of 128, or one if rows are long."""
    if n <= 2 * _TILE:
        return np.arange(n)
    starts = (0, n // _TILE // 2 * _TILE) if k <= 8192 else (n // _TILE // 2 * _TILE,)
    return np.concatenate([np.arange(start, start + _TILE) for start in starts])


def _take(weight: _Any, rows: Any) -> _Any:
    """Some rows of a weight."""
    if isinstance(weight, Weight):
        scale2 = weight.scale2[rows] if weight.per_row else weight.scale2
        return weight.replace(codes=weight.codes[rows], scales=weight.scales[rows], scale2=scale2)
    if isinstance(weight, Mxfp4Weight):
        return _mx(weight, rows)
    scale = weight.scale
    if weight.block is not None:
        scale = scale[rows // weight.block[0]]
        return Fp8Weight(data=weight.data[rows], scale=scale, block=(1, weight.block[1]))
    return Fp8Weight(data=weight.data[rows], scale=scale if scale.shape[0] == 1 else scale[rows])


def _mx(weight: Mxfp4Weight, rows: Any) -> Mxfp4Weight:
    return Mxfp4Weight(codes=weight.codes[rows], scales=weight.scales[rows], k=weight.shape[-1])


def _off_by_a_factor(weight: _Any, dense: Array, limit: float) -> Diagnosis | None:
    """A scale that no rule explains, such as one that was lost: the factor that fits best."""
    products = squares = 0.0
    for a in range(0, weight.shape[0], step := max(1, _CHUNK // max(weight.shape[1], 1))):
        with np.errstate(all="ignore"):
            values = _values(weight, a, min(a + step, weight.shape[0])).astype(np.float64)
            products += float((values * dense[a : a + step].astype(np.float64)).sum())
            squares += float((values * values).sum())
    factor = products / squares if squares else math.nan
    if not 0 < factor < math.inf:
        return None
    if isinstance(weight, Mxfp4Weight):
        return _other_exponent(weight, dense, factor, limit)
    read = _times(factor) if isinstance(weight, Weight) else _rescaled(lambda s: s * np.float32(factor))
    left = error_of(read(weight), dense).relative  # type: ignore[arg-type]
    if not left <= limit:
        return None
    scale = weight.scale2 if isinstance(weight, Weight) else weight.scale
    lost = bool((scale == 1).all())
    title = "scale2 dropped: the file holds 1" if lost else f"scale that is {1 / factor:.6g} times the right one"
    hint = f"about {float(scale.reshape(-1)[0]) * factor:.6g} fits; quantize the module again"
    return Diagnosis(title, left, hint)


def _other_exponent(weight: Mxfp4Weight, dense: Array, factor: float, limit: float) -> Diagnosis | None:
    """Exponents that are all off by the same number, such as those of another bias."""
    shift = round(math.log2(factor))
    scales = np.clip(weight.scales.astype(np.int16) + shift, 0, 254).astype(np.uint8)
    left = error_of(Mxfp4Weight(codes=weight.codes, scales=scales, k=weight.shape[-1]), dense).relative
    if not shift or not left <= limit:
        return None
    title = f"MXFP4 scales that are {2.0**-shift:g} times the right ones"
    return Diagnosis(title, left, f"add {shift} to each scale byte, or quantize the module again")


def _another(weight: _Any, others: Mapping[str, Any], name: str, limit: float) -> Diagnosis | None:
    """Whether the weight is that of another module: 16 rows are compared before the whole."""
    n, _ = weight.shape
    start = max(0, n // 2 - BLOCK // 2)
    probe = np.arange(start, min(n, start + BLOCK))
    few = _take(weight, probe)
    for other, twin in others.items():
        if tuple(twin.shape) == weight.shape and error_of(few, twin[start : start + len(probe)]).relative <= limit:
            whole = error_of(weight, twin).relative
            if whole <= limit:
                title = f"{kinship(name, other)}: it holds {other}"
                return Diagnosis(title, whole, "exchange them back, or quantize again")
    return None


def kinship(name: str, other: str) -> str:
    """How a module is related to the one whose weight it holds."""
    ours, theirs = name.split("."), other.split(".")
    apart = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if len(ours) != len(theirs) or len(apart) != 1:
        return "another module"
    pair = {ours[apart[0]], theirs[apart[0]]}
    if pair in ({"gate_proj", "up_proj"}, {"w1", "w3"}):
        return "gate and up exchanged"
    if all(part.isdecimal() for part in pair):
        return "experts permuted" if "expert" in ours[apart[0] - 1] else "wrong layer"
    return "another module"


def _permuted(weight: _Any, dense: Array, limit: float) -> Diagnosis | None:
    """Whether the rows are the dense twin's in no order that has a name: rows are matched by their sketches."""
    n, k = weight.shape
    asked = np.unique(np.linspace(0, n - 1, min(n, _QUERY)).astype(np.int64))
    rng = np.random.default_rng(0)
    columns = np.sort(rng.permutation(k)[:1024])
    signs = rng.choice(np.array([-1, 1], np.float32), (len(columns), _SKETCH))
    few = _take(weight, asked)
    ours = _sketch(lambda a, b: _values(few, a, b)[:, columns], len(asked), k, signs)
    theirs = _sketch(lambda a, b: dense[a:b][:, columns].astype(np.float32), n, k, signs)
    index, alike = np.zeros(len(asked), np.int64), np.zeros(len(asked), np.float32)
    for a in range(0, len(asked), 256):
        likeness = ours[a : a + 256] @ theirs.T
        rows = np.arange(len(likeness))
        likeness[rows, asked[a : a + 256]] += 1e-3  # where rows are the same, they have not moved
        index[a : a + 256] = likeness.argmax(1)
        alike[a : a + 256] = likeness[rows, index[a : a + 256]]
    found = alike > _ALIKE
    if found.mean() < 0.5 or not (index[found] != asked[found]).any():
        return None
    left = error_of(_take(few, np.flatnonzero(found)), _Rows(dense, index[found])).relative
    if not left <= limit:
        return None
    moved = int((index[found] != asked[found]).sum())
    title = f"rows permuted: {found.mean():.3g} of them are rows of the dense twin, {moved / len(asked):.3g} elsewhere"
    return Diagnosis(title, left, "no order that has a name: quantize the module again")


def _sketch(rows_of: Callable[[int, int], Any], n: int, k: int, signs: Any) -> Any:
    """(N, 64) f32 of norm 1: random sums of a row's columns."""
    out = np.zeros((n, signs.shape[1]), np.float32)
    for a in range(0, n, step := max(1, _CHUNK // max(k, 1))):
        b = min(a + step, n)
        with np.errstate(all="ignore"):
            rows = rows_of(a, b)
            rows = rows / np.maximum(np.abs(rows).max(-1, keepdims=True), np.finfo(np.float32).tiny)
            sums = rows @ signs
            out[a:b] = np.nan_to_num(sums / np.linalg.norm(sums, axis=1, keepdims=True), nan=0, posinf=0, neginf=0)
    return out


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """``names`` without ``name``, those that differ from it in the fewest parts first, neighbours before others."""
    ours = name.split(".")

    def distance(other: str) -> tuple[int, int]:
        theirs = other.split(".")
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
        steps = [abs(int(a) - int(b)) for a, b in pairs if a.isdecimal() and b.isdecimal()]
        return len(pairs) + abs(len(ours) - len(theirs)), sum(steps)

    return sorted((other for other in names if other != name), key=distance)
