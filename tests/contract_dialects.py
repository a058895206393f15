"""What every dialect promises."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import halfbyte
from checkpoints import SUFFIXES, Tensors, by_library, named, nvfp4, others, save, tensors_of
from halfbyte.dialects import DIALECTS, Dialect
from halfbyte.modules import Headers
from halfbyte.stored import Stored
from halfbyte.weight import Weight

SHAPES = ((1, 16), (3, 32), (16, 48), (130, 80), (0, 16))
"""(N, K): one block, ragged rows, five blocks a row, more than a tile, no rows."""


def headers_of(path: Path) -> Headers:
    """A file as dialects see it, from its header as the safetensors library reads it."""
    metadata, tensors = by_library(path)
    return Headers({n: Stored(n, dtype, tuple(shape)) for n, (dtype, shape) in tensors.items()}, metadata)


def claimants(headers: Headers) -> list[str]:
    """The dialects that claim a checkpoint by its tensors."""
    return [d.name for d in DIALECTS if d.claims(headers)]


def weights(dialect: Dialect) -> dict[str, Tensors]:
    """Name -> roles of weights with everything that the dialect has a place for."""
    found = {}
    for i, (n, k) in enumerate(SHAPES):
        found[f"m.{i}.plain"] = nvfp4(n, k, i, scale2=0.001 * (i + 1))
        found[f"m.{i}.static"] = nvfp4(n, k, i + 50, scale2=0.003 * (i + 1), input_scale=0.7)
        if "pre_scale" in SUFFIXES[dialect.name]:
            pre = {"pre_scale": np.linspace(0.5, 2, k).astype(np.float16)}
            found[f"m.{i}.awq"] = nvfp4(n, k, i + 90, input_scale=0.3) | pre
    return found


def stored(dialect: Dialect, made: dict[str, Tensors]) -> Tensors:
    """The tensors of some weights, named without halfbyte."""
    return {name: value for module, roles in made.items() for name, value in named(dialect.name, module, roles).items()}


def meaning(dialect: Dialect, roles: Tensors) -> Weight:
    """The weight that the roles mean, once its scales have been stored in the dialect."""

    def kept(x: np.float32) -> np.float32:
        return np.float32(1) / (np.float32(1) / np.float32(x)) if dialect.divides else np.float32(x)

    scalars = {role: kept(roles[role]) for role in ("scale2", "input_scale") if role in roles}
    return Weight(codes=roles["codes"], scales=roles["scales"], pre_scale=roles.get("pre_scale"), **scalars)


def check_dialect(dialect: Dialect, tmp_path: Path) -> None:
    """Names and titles; and for a dialect that is read: write(w) is claimed by it alone, and read(write(w)) is w."""
    assert dialect.name == dialect.name.lower()
    assert dialect.title
    assert not dialect.claims(Headers({}))
    assert not dialect.claims(Headers({n: Stored(n, "BF16", t.shape) for n, t in others().items()}))
    if not dialect.readable:
        assert dialect.suffixes == {}
        return
    for table in dialect.suffixes.values():
        assert len(set(table.values())) == len(table), "two roles under one suffix"
    if not dialect.writable:
        return
    assert dialect.suffixes["nvfp4"].items() >= SUFFIXES[dialect.name].items()
    made = weights(dialect)
    source = tmp_path / "source"
    source.mkdir(parents=True)
    save(source / "model.safetensors", others() | stored(dialect, made))
    assert claimants(headers_of(source / "model.safetensors")) == [dialect.name]
    check_read(dialect, source, made)
    # What halfbyte writes, it reads back: the same weights from the same names, shapes and bytes.
    halfbyte.convert(source, tmp_path / "same", to=dialect.name, max_shard_size="10KB", prove=True)
    check_read(dialect, tmp_path / "same", made)
    assert tensors_of(tmp_path / "same") == tensors_of(source)
    for other in DIALECTS:
        # A weight without companions has a place in every dialect, and comes back as it was.
        if other.writable and other is not dialect:
            plain = {name: roles for name, roles in made.items() if "pre_scale" not in roles}
            alone = tmp_path / "alone"
            alone.mkdir()
            save(
                alone / "model.safetensors",
                {n: t for m, r in plain.items() for n, t in named(dialect.name, m, r).items()},
            )
            there, back = tmp_path / other.name, tmp_path / "back"
            halfbyte.convert(alone, there, to=other.name, prove=True)
            assert claimants(headers_of(there / "model.safetensors")) == [other.name]
            check_read(dialect, there, plain)
            halfbyte.convert(there, back, to=dialect.name, prove=True)
            assert tensors_of(back) == tensors_of(alone)


def check_read(dialect: Dialect, path: Path, made: dict[str, Tensors]) -> None:
    """Every weight of a checkpoint is, bit for bit, the one that was made in ``dialect``."""
    with halfbyte.open(path) as checkpoint:
        found = dict(checkpoint.weights())
    assert set(found) == set(made)
    for name, roles in made.items():
        assert found[name].same(meaning(dialect, roles)), name
