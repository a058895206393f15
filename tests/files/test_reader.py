"""Reading checkpoints: directories, shards, indexes, positions, provenance, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import halfbyte
from checkpoints import (
    BF16,
    CONFIG,
    DOWN,
    E4M3,
    GOLDEN,
    GOLDENS,
    HIDDEN,
    INDEX,
    INTER,
    LINEARS,
    Q,
    Raw,
    call,
    check_failure,
    codes,
    copy_golden,
    f4,
    fp8,
    make_dense,
    make_float,
    named,
    nvfp4,
    others,
    quantized,
    raw_safetensors,
    read_json,
    run_cli,
    save,
    save_sharded,
    tensors_of,
    write_json,
)
from halfbyte.checkpoint.reader import PROVENANCE, Checkpoint
from halfbyte.errors import FormatError, HalfbyteError, MissingExtraError, UnreadDialectError
from halfbyte.numerics import decode_e2m1, decode_e4m3
from halfbyte.weight import DenseWeight, Fp8Weight, Weight


def findings(path):
    return halfbyte.inspect(path).findings


# --- what a checkpoint gives


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("shards", [1, 4])
def test_weights(tmp_path, dialect, shards):
    path = make_dense(tmp_path / "x", dialect, shards=shards, input_scale=True)
    with halfbyte.open(path) as checkpoint:
        weights = dict(checkpoint.weights())
    assert set(weights) == set(LINEARS)
    for seed, (name, (n, k)) in enumerate(LINEARS.items()):
        roles, weight = nvfp4(n, k, seed), weights[name]
        assert isinstance(weight, Weight)
        assert weight.shape == (n, k)
        assert np.array_equal(weight.codes, roles["codes"])
        assert np.array_equal(weight.scales, roles["scales"].view(np.uint8))
        assert float(weight.scale2.reshape(())) == 2.0**-12
        assert float(weight.input_scale.reshape(())) == 2.0**-10
        assert weight.pre_scale is None
        value = decode_e2m1(roles["codes"]).reshape(n, -1, 16) * decode_e4m3(roles["scales"].view(np.uint8))[..., None]
        assert np.array_equal(weight.dequantize(), value.reshape(n, k) * np.float32(2.0**-12))


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name):
    """Every tensor of a real checkpoint comes back, once."""
    raw = tensors_of(GOLDENS[name])
    with halfbyte.open(GOLDENS[name]) as checkpoint:
        assert set(checkpoint.tensors) == set(raw)
        for tensor in checkpoint.tensors.values():
            assert checkpoint.read(tensor).tobytes() == raw[tensor.name].data
        assert sorted(t.name for m in checkpoint.modules for t in m.tensors) == sorted(raw)
        seen = dict(checkpoint.items())
    for name_, value in seen.items():
        assert isinstance(value, Weight | Fp8Weight | DenseWeight)
        if isinstance(value, DenseWeight):
            assert value.data.tobytes() == raw[name_].data
        else:
            assert f"{name_}.weight" in raw or f"{name_}.weight_packed" in raw


def test_a_single_file_takes_the_config_beside_it(tmp_path):
    path = make_dense(tmp_path / "x")
    with halfbyte.open(path / "model.safetensors") as checkpoint:
        assert checkpoint.config["quantization_config"]["quant_method"] == "modelopt"
        assert len(dict(checkpoint.weights())) == 7


def test_any_path_type(tmp_path):
    path = make_dense(tmp_path / "x")
    for form in (path, str(path), f"{path}/"):
        with halfbyte.open(form) as checkpoint:
            assert len(checkpoint.modules) > 7


def test_through_a_link(tmp_path):
    """The hub's cache is made of links."""
    path = make_dense(tmp_path / "x")
    (tmp_path / "blob").write_bytes((path / "model.safetensors").read_bytes())
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "link").symlink_to(path)
    assert halfbyte.verify(tmp_path / "link").ok


@pytest.mark.parametrize("packed", ["U8", "I8", "F4"])
def test_header_dtypes_of_codes(tmp_path, packed):
    roles = nvfp4(8, 32)
    value = {"U8": roles["codes"], "I8": roles["codes"].view(np.int8), "F4": f4(roles["codes"])}[packed]
    for dialect in ("modelopt", "compressed-tensors"):
        path = save(tmp_path / f"{dialect}.safetensors", named(dialect, "a", roles | {"codes": value}))
        with halfbyte.open(path) as checkpoint:
            (module,) = checkpoint.modules
            assert (module.kind, module.shape) == ("nvfp4", (8, 32))
            assert np.array_equal(dict(checkpoint.weights())["a"].codes, roles["codes"])
        assert halfbyte.verify(path).findings == ()


def test_block_scales_whose_header_says_u8(tmp_path):
    """Bytes of E4M3 under the name uint8, beside a second scale: NVFP4, not MXFP4."""
    roles = nvfp4(8, 32)
    roles["scales"] = roles["scales"].view(np.uint8)
    path = save(tmp_path / "x.safetensors", named("modelopt", "a", roles))
    with halfbyte.open(path) as checkpoint:
        assert [m.kind for m in checkpoint.modules] == ["nvfp4"]
        assert np.array_equal(dict(checkpoint.weights())["a"].scales, roles["scales"])
    assert halfbyte.verify(path).ok


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_shapes_of_scalars(tmp_path, dialect, shape):
    path = save(tmp_path / "x.safetensors", named(dialect, "a", nvfp4(4, 32, input_scale=0.5), shape))
    with halfbyte.open(path) as checkpoint:
        weight = dict(checkpoint.weights())["a"]
    assert (weight.scale2.shape, weight.input_scale.shape) == ((1, 1), ())
    assert halfbyte.verify(path).findings == ()


def test_kinds_are_told_by_the_tensors(tmp_path):
    """FP8 beside NVFP4 under the same key names; dtype and shape decide, whatever the config says."""
    tensors = named("modelopt", "nv", nvfp4(32, 64))
    for name, scale in {"t": 0.5, "one": [0.5], "row": [0.5] * 32, "col": [[0.5]] * 32}.items():
        tensors |= {f"fp8_{name}.{k}": v for k, v in fp8(32, 64, scale=scale).items()}
    tensors |= {"dense.weight": np.ones((32, 64), BF16), "norm.weight": np.ones(64, BF16)}
    save(tmp_path / "model.safetensors", tensors)
    write_json(tmp_path / "config.json", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}})
    with halfbyte.open(tmp_path) as checkpoint:
        kinds = {m.name: m.kind for m in checkpoint.modules}
        assert kinds == {"nv": "nvfp4", "dense": "dense", "norm": "dense"} | dict.fromkeys(
            ("fp8_t", "fp8_one", "fp8_row", "fp8_col"), "fp8"
        )
        for module in checkpoint.modules:
            if module.kind == "fp8":
                weight = checkpoint.load(module)
                assert weight.granularity == ("row" if module.name in ("fp8_row", "fp8_col") else "tensor")
                assert np.array_equal(
                    weight.dequantize(), tensors[f"{module.name}.weight"].astype(np.float32) * np.float32(0.5)
                )


def test_fp8_block_scales(tmp_path):
    tensors = {f"a.{k}": v for k, v in fp8(130, 256, scale=[[1.0, 2.0], [3.0, 4.0]]).items()}
    path = save(tmp_path / "x.safetensors", tensors)
    with halfbyte.open(path) as checkpoint:
        weight = checkpoint.load(checkpoint.modules[0])
    assert weight.granularity == "block"
    scale = np.repeat(np.repeat(np.float32([[1, 2], [3, 4]]), 128, 0), 128, 1)[:130]
    assert np.array_equal(weight.dequantize(), tensors["a.weight"].astype(np.float32) * scale)


def test_items_and_pre_scale(tmp_path):
    pre = np.linspace(0.5, 2, 32).astype(BF16)
    tensors = named("modelopt", "a", nvfp4(16, 32) | {"pre_scale": pre, "bias": np.ones(16, BF16)})
    path = save(tmp_path / "x.safetensors", tensors)
    with halfbyte.open(path) as checkpoint:
        found = dict(checkpoint.items())
    assert set(found) == {"a", "a.bias"}
    assert np.array_equal(found["a"].pre_scale, pre)


def test_no_such_tensor(tmp_path):
    with (
        halfbyte.open(make_dense(tmp_path / "x")) as checkpoint,
        pytest.raises(FormatError, match=r"nothing\.weight: no such tensor"),
    ):
        checkpoint.read("nothing.weight")


DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": BF16, "I64": np.int64, "U64": np.uint64,
    "I32": np.int32, "U32": np.uint32, "I16": np.int16, "U16": np.uint16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_, "C64": np.complex64, "F8_E4M3": E4M3, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip


def test_every_dtype_of_the_header(tmp_path):
    from halfbyte.stored import DTYPE_BITS

    header, data = {}, b""
    for dtype, bits in DTYPE_BITS.items():
        nbytes = 8 * 4 * bits // 8
        header[f"t.{dtype}"] = {"dtype": dtype, "shape": [4, 8], "data_offsets": [len(data), len(data) + nbytes]}
        data += bytes(nbytes)
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    with halfbyte.open(tmp_path / "x.safetensors") as checkpoint:
        for dtype in DTYPE_BITS:
            array = checkpoint.read(f"t.{dtype}")
            if dtype in DTYPES:
                assert (array.dtype, array.shape) == (np.dtype(DTYPES[dtype]), (4, 8))
            else:
                assert array.nbytes == 8 * 4 * DTYPE_BITS[dtype] // 8
    assert halfbyte.verify(tmp_path / "x.safetensors").ok


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [("U8", (), b"0"), ("I8", (), b"0"), ("U8", (16,), bytes(16)), ("F4", (32,), bytes(16)), ("U8", (0, 8), b"")],
    ids=str,
)
@pytest.mark.parametrize("scales", [False, True])
def test_odd_shapes_of_codes(tmp_path, dtype, shape, data, scales):
    """A weight of bytes that is no matrix: read, reported or refused, but told in words."""
    tensors = {"a.weight": Raw(dtype, shape, data), "b.weight": np.ones((2, 2), np.float32)}
    tensors |= {"a.weight_scale": np.ones((1, 1), E4M3), "a.weight_scale_2": np.float32(1)} if scales else {}
    save(tmp_path / "model.safetensors", tensors)
    for verb in ("inspect", "verify"):
        ran = call(verb, tmp_path)
        assert ran.rc in (0, 1, 2)
        assert "internal error" not in ran.stderr


@pytest.mark.parametrize("shape", [(2,), (4, 3), (4, 1), (4, 2), (0, 3), (2, 2, 1)])
def test_four_bit_tensors_of_any_shape(tmp_path, shape):
    """A last axis that is odd has no whole bytes; the tensor can still be held."""
    raw = Raw("F4", shape, bytes(-(-int(np.prod(shape, dtype=int)) // 2)))
    header = {"a.four": {"dtype": "F4", "shape": list(shape), "data_offsets": [0, len(raw.data)]}}
    raw_safetensors(tmp_path / "model.safetensors", header, raw.data)
    with halfbyte.open(tmp_path) as checkpoint:
        assert checkpoint.read("a.four").nbytes == len(raw.data)
        assert set(dict(checkpoint.items())) == {"a.four"}


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_weight_without_a_module_name(tmp_path, dialect):
    """One matrix saved by itself: weight, weight_scale, weight_scale_2."""
    roles = nvfp4(4, 32, input_scale=0.5)
    tensors = {n.removeprefix("."): v for n, v in named(dialect, "", roles).items()}
    src = tmp_path / "src"
    src.mkdir()
    save(src / "model.safetensors", tensors)
    with halfbyte.open(src) as checkpoint:
        ((name, weight),) = checkpoint.weights()
    assert name == ""
    other = "modelopt" if dialect == "compressed-tensors" else "compressed-tensors"
    halfbyte.convert(src, tmp_path / "there", to=other, prove=True)
    expected = {n.removeprefix(".") for n in named(other, "", roles)}
    assert set(tensors_of(tmp_path / "there")) == expected
    halfbyte.convert(tmp_path / "there", tmp_path / "back", to=dialect, prove=True)
    assert tensors_of(tmp_path / "back") == tensors_of(src)
    halfbyte.dequantize_checkpoint(src, tmp_path / "dense", dtype="float32")
    assert tensors_of(tmp_path / "dense")["weight"].data == weight.dequantize().tobytes()
    halfbyte.quantize_checkpoint(tmp_path / "dense", tmp_path / "again")
    assert set(tensors_of(tmp_path / "again")) == {"weight", "weight_scale", "weight_scale_2"}


# --- positions


def test_inspect_reads_no_tensor(tmp_path, monkeypatch):
    def refuse(self, *_):
        raise AssertionError("data was read")

    monkeypatch.setattr(Checkpoint, "read_into", refuse)
    monkeypatch.setattr(Checkpoint, "read", refuse)
    for path in GOLDENS.values():
        assert halfbyte.inspect(path).facts["tensors"] > 0


def test_reads_are_by_position_and_safe_for_threads(tmp_path):
    path = make_dense(tmp_path / "x", shards=3)
    raw = tensors_of(path)
    with halfbyte.open(path) as checkpoint:
        wrong = []

        def work():
            for tensor in checkpoint.tensors.values():
                for _ in range(5):
                    if checkpoint.read(tensor).tobytes() != raw[tensor.name].data:
                        wrong.append(tensor.name)

        threads = [threading.Thread(target=work) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert not wrong


def test_part_of_a_tensor(tmp_path):
    path = make_dense(tmp_path / "x")
    with halfbyte.open(path) as checkpoint:
        tensor = checkpoint.tensors[f"{DOWN}.weight"]
        out = np.empty(10, np.uint8)
        checkpoint.read_into(tensor, 7, out)
        assert np.array_equal(out, checkpoint.read(tensor).reshape(-1)[7:17])


def test_files_are_closed(tmp_path):
    path = make_dense(tmp_path / "x", shards=3)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with halfbyte.open(path) as checkpoint:
            dict(checkpoint.weights())
        halfbyte.verify(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_that_shrinks_under_the_reader(tmp_path):
    path = make_dense(tmp_path / "x")
    file = path / "model.safetensors"
    with halfbyte.open(path) as checkpoint:
        os.truncate(file, file.stat().st_size - 100)
        last = max(checkpoint.tensors.values(), key=lambda t: t.start)
        with pytest.raises(FormatError, match="became shorter") as caught:
            checkpoint.read(last)
    assert (caught.value.file, caught.value.tensor) == (str(file), last.name)


# --- shards and indexes


def test_the_index_and_its_shards(tmp_path):
    tensors = quantized()
    names = list(tensors)
    path = save_sharded(tmp_path / "x", [{n: tensors[n] for n in names[i::3]} for i in range(3)])
    with halfbyte.open(path) as checkpoint:
        assert len(checkpoint.shards) == 3
        assert checkpoint.findings == []
        assert set(checkpoint.tensors) == set(tensors)
        codes_, scales = checkpoint.tensors[f"{Q}.weight"], checkpoint.tensors[f"{Q}.weight_scale"]
        assert codes_.file != scales.file


def test_shards_without_an_index(tmp_path):
    tensors = quantized()
    names = list(tensors)
    path = save_sharded(tmp_path / "x", [{n: tensors[n] for n in names[i::2]} for i in range(2)])
    (path / INDEX).unlink()
    assert [(f.code, f.severity) for f in halfbyte.verify(path).findings] == [("HB135", "warning")]


def test_an_index_of_another_name(tmp_path):
    tensors = quantized()
    path = save_sharded(tmp_path / "x", [tensors, {"extra.weight": np.ones((4, 4), BF16)}])
    (path / INDEX).rename(path / "diffusion_pytorch_model.safetensors.index.json")
    with halfbyte.open(path) as checkpoint:
        assert len(checkpoint.shards) == 2
        assert str(checkpoint.index) == "diffusion_pytorch_model.safetensors.index.json"


def sharded(tmp_path):
    tensors = quantized()
    names = list(tensors)
    return save_sharded(tmp_path / "x", [{n: tensors[n] for n in names[i::2]} for i in range(2)])


def test_a_tensor_that_the_index_names_and_no_shard_holds(tmp_path):
    path = sharded(tmp_path)
    index = read_json(path / INDEX)
    index["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    write_json(path / INDEX, index)
    (finding,) = findings(path)
    assert (finding.code, finding.tensor, finding.index) == ("HB130", "ghost.weight", None)
    assert (finding.got, finding.expected) == ("in no shard", "model-00001-of-00002.safetensors")
    assert call("verify", path).rc == 1


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path):
    path = sharded(tmp_path)
    index = read_json(path / INDEX)
    here = index["weight_map"][f"{Q}.weight"]
    index["weight_map"][f"{Q}.weight"] = next(f for f in index["weight_map"].values() if f != here)
    write_json(path / INDEX, index)
    (finding,) = findings(path)
    assert (finding.code, finding.tensor, finding.got) == ("HB130", f"{Q}.weight", f"in {here}")


def test_a_tensor_that_the_index_does_not_name(tmp_path):
    path = sharded(tmp_path)
    index = read_json(path / INDEX)
    del index["weight_map"]["model.norm.weight"]
    write_json(path / INDEX, index)
    assert codes(findings(path)) == [("HB131", "model.norm.weight", None)]


def test_a_shard_that_the_index_does_not_name(tmp_path):
    path = sharded(tmp_path)
    save(path / "consolidated.safetensors", {"a.weight": np.ones((2, 2), BF16)})
    (finding,) = findings(path)
    assert (finding.code, finding.got) == ("HB132", "consolidated.safetensors")
    with halfbyte.open(path) as checkpoint:
        assert "a.weight" not in checkpoint.tensors


def test_a_total_size_that_is_not_the_sum(tmp_path):
    path = sharded(tmp_path)
    index = read_json(path / INDEX)
    actual = index["metadata"]["total_size"]
    index["metadata"]["total_size"] = 5
    write_json(path / INDEX, index)
    (finding,) = findings(path)
    assert (finding.code, finding.got, finding.expected) == ("HB133", 5, actual)
    del index["metadata"]
    write_json(path / INDEX, index)
    assert findings(path) == ()


HOSTILE_INDEX = {
    "parent": ({"weight_map": {"a": "../x.safetensors"}}, "outside the directory"),
    "absolute": ({"weight_map": {"a": "/etc/passwd"}}, "outside the directory"),
    "below": ({"weight_map": {"a": "b/c.safetensors"}}, "outside the directory"),
    "windows": ({"weight_map": {"a": "..\\x.safetensors"}}, "outside the directory"),
    "itself": ({"weight_map": {"a": "."}}, "outside the directory"),
    "empty name": ({"weight_map": {"a": ""}}, "outside the directory"),
    "zero byte": ({"weight_map": {"a": "x\0.safetensors"}}, "outside the directory"),
    "missing": ({"weight_map": {"a": "gone.safetensors"}}, "a shard that is not there"),
    "no map": ({"metadata": {}}, "no weight_map"),
    "a list": ({"weight_map": ["a"]}, "no weight_map"),
    "numbers": ({"weight_map": {"a": 1}}, "no weight_map"),
    "not an object": ([], "not a JSON object"),
}


@pytest.mark.parametrize("case", HOSTILE_INDEX)
def test_a_hostile_index(tmp_path, case):
    value, message = HOSTILE_INDEX[case]
    path = make_dense(tmp_path / "x")
    write_json(path / INDEX, value)
    check_failure(call("verify", path), 2, path / INDEX, message)


def test_an_index_of_no_tensors(tmp_path):
    path = make_dense(tmp_path / "x")
    write_json(path / INDEX, {"weight_map": {}})
    ran = call("verify", path)
    assert "internal error" not in ran.stderr
    assert ran.rc in (0, 2)


def test_a_tensor_in_two_shards(tmp_path):
    tensors = quantized()
    path = save_sharded(tmp_path / "x", [tensors, {f"{Q}.weight": tensors[f"{Q}.weight"]}])
    line = check_failure(call("verify", path), 2, "a tensor lies in two shards", f"{Q}.weight")
    assert "model-00001-of-00002" in line
    assert "model-00002-of-00002" in line


def test_a_truncated_shard(tmp_path):
    path = sharded(tmp_path)
    shard = path / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    check_failure(call("verify", path), 2, shard, "the file is truncated")


# --- configs


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"a":1,"a":2}', "[" * 100_000, "\0"])
def test_a_broken_config(tmp_path, name, text):
    path = make_dense(tmp_path / "x")
    (path / name).write_text(text)
    check_failure(call("verify", path), 2, path / name)


def test_a_config_with_infinity(tmp_path):
    """transformers writes Infinity where a model's config holds it: time_step_limit of Mamba2 and Nemotron-H."""
    path = make_dense(tmp_path / "x")
    config = read_json(path / "config.json") | {"time_step_limit": [0.0, float("inf")]}
    write_json(path / "config.json", config)
    assert "Infinity" in (path / "config.json").read_text()
    assert halfbyte.verify(path).findings == ()
    halfbyte.convert(path, tmp_path / "out", to="compressed-tensors")
    assert read_json(tmp_path / "out" / "config.json")["time_step_limit"] == [0.0, float("inf")]


def test_a_config_that_is_too_large(tmp_path):
    path = make_dense(tmp_path / "x")
    os.truncate(path / "config.json", 1 << 30)
    check_failure(call("verify", path), 2, path / "config.json", "too large")


def test_a_config_that_is_a_directory(tmp_path):
    path = make_dense(tmp_path / "x", config=None)
    (path / "config.json").mkdir()
    check_failure(call("verify", path), 2, path / "config.json")


# --- what is not a checkpoint


def test_nothing_there(tmp_path):
    check_failure(call("verify", tmp_path / "no"), 2, tmp_path / "no", "no such file or directory")
    check_failure(call("verify", tmp_path), 2, tmp_path, "no safetensors files")


def test_a_text_file(tmp_path):
    (tmp_path / "x.txt").write_text("hello, this is no checkpoint")
    check_failure(call("verify", tmp_path / "x.txt"), 2, "not a safetensors file")


def test_a_directory_named_like_a_shard(tmp_path):
    path = make_dense(tmp_path / "x")
    (path / "extra.safetensors").mkdir()
    check_failure(call("verify", path), 2, path / "extra.safetensors")


def test_a_fifo_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        check_failure(run_cli("verify", path, timeout=5), 2, "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickled_files_are_refused_with_the_command_that_converts_them(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    for path in (tmp_path, tmp_path / name):
        line = check_failure(call("verify", path), 2, tmp_path / name, "python -c", "weights_only=True", name)
        command = line[line.index("python -c") :]
        assert shlex.split(command)[:2] == ["python", "-c"]


def test_a_pickle_is_never_run(tmp_path):
    """The pickle would make a file."""
    payload = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(payload)
    (tmp_path / "other").write_bytes(payload)
    for name in ("pytorch_model.bin", "other"):
        for verb in ("inspect", "verify"):
            assert run_cli(verb, tmp_path / name).rc == 2
    assert not (tmp_path / "ran").exists()


def test_the_hint_cannot_be_made_to_run_something_else(tmp_path):
    name = "a'); print('taken') #.bin"
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    line = call("verify", tmp_path / name).lines[0]
    code = shlex.split(line[line.index("python -c") :])[2]
    done = subprocess.run(
        [sys.executable, "-c", "import sys, ast; ast.parse(sys.argv[1])", code], capture_output=True, check=False
    )
    assert done.returncode == 0
    assert "print('taken')" not in code.replace(repr(name), "")


def test_pickled_weights_beside_safetensors_do_not_matter(tmp_path):
    path = make_dense(tmp_path / "x")
    (path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    assert halfbyte.verify(path).findings == ()


UNREAD = {
    "gguf": (GOLDEN / "containers" / "d_nvfp4.gguf", "GGUF"),
    "comfyui": (GOLDEN / "containers" / "comfy_c.safetensors", "ComfyUI"),
    "mlx": (GOLDEN / "containers" / "mlx_d.safetensors", "MLX"),
}


def test_dialects_that_are_not_read_yet_are_named(tmp_path):
    packed = np.zeros((32, 32), np.uint8)
    made = {
        "torchao": ({"a.weight_qdata": packed, "a.weight_scale": np.ones((32, 4), E4M3)}, "torchao"),
        "fp-quant": ({"a.qweight": packed, "a.forward_hadamard_matrix": np.eye(16, dtype=np.float32)}, "FP-Quant"),
        "integers": (
            {"a.weight_packed": np.zeros((32, 8), np.int32), "a.weight_scale": np.ones((32, 2), BF16)},
            "compressed-tensors with integers",
        ),
    }
    cases = dict(UNREAD)
    for name, (tensors, title) in made.items():
        cases[name] = (save(tmp_path / f"{name}.safetensors", tensors), title)
    for path, title in cases.values():
        for args in (
            ("verify", path),
            ("convert", path, tmp_path / "out", "--to", "modelopt"),
            ("dequantize", path, tmp_path / "out"),
            ("quantize", path, tmp_path / "out"),
        ):
            check_failure(call(*args), 2, path, title, "recognised and not read yet")
        ran = call("inspect", path)
        assert ran.rc == 2
        assert title in ran.stdout + ran.stderr
        with pytest.raises(UnreadDialectError), halfbyte.open(path) as checkpoint:
            list(checkpoint.weights())
    assert not (tmp_path / "out").exists()


def test_a_name_that_may_be_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = call("verify", "nobody/nothing")
    assert ran.rc in (2, 3)
    assert len(ran.lines) == 1
    assert "nobody/nothing" in ran.lines[0]


def test_without_the_hub_client_status_3_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError):
        halfbyte.open("nobody/nothing")
    check_failure(call("verify", "nobody/nothing"), 3, "nobody/nothing", "pip install 'halfbyte[hf]'")


def test_the_hubs_cache_comes_first(tmp_path, monkeypatch):
    """A stand-in for the hub client: asked for its cache first, and for the network only if that has nothing."""
    made = make_dense(tmp_path / "snapshot")
    monkeypatch.chdir(tmp_path)
    asked = []

    def download(name, local_files_only, **_):
        asked.append((name, local_files_only))
        if local_files_only and name == "org/remote":
            raise FileNotFoundError("not in the cache")
        if name == "org/gone":
            raise OSError("404\nmore lines")
        return str(made)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))
    assert halfbyte.verify("org/cached").ok
    assert halfbyte.verify("org/remote").ok
    assert asked == [("org/cached", True), ("org/remote", True), ("org/remote", False)]
    check_failure(call("verify", "org/gone"), 2, "org/gone", "404")
    (tmp_path / "org").mkdir()
    check_failure(call("verify", "org/cached"), 2, "org/cached", "no such file or directory")


@pytest.mark.parametrize("path", ["./nobody/nothing", "/nobody/nothing", "a/b/c", "nothing", "../nothing"])
def test_names_that_are_not_of_the_hub(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    check_failure(call("verify", path), 2, path, "no such file or directory")


# --- provenance


def bits(value):
    return struct.pack(">f", value).hex()


def ct_with(tmp_path, table, stored=None):
    tensors = named("compressed-tensors", "a", nvfp4(4, 32, scale2=NOT_ITS_OWN))
    if stored is not None:
        tensors["a.weight_global_scale"] = stored
    return save(
        tmp_path / "x.safetensors", tensors, {PROVENANCE: table if isinstance(table, str) else json.dumps(table)}
    )


def not_its_own():
    """A number whose rounded reciprocal has another rounded reciprocal."""
    for x in np.linspace(0.0001, 0.0002, 1000).astype(np.float32):
        if np.float32(1) / (np.float32(1) / x) != x:
            return x
    raise AssertionError


NOT_ITS_OWN = not_its_own()


def test_provenance_gives_the_number_back(tmp_path):
    path = ct_with(tmp_path, {"a.weight_global_scale": bits(NOT_ITS_OWN)})
    with halfbyte.open(path) as checkpoint:
        assert checkpoint.findings == []
        assert dict(checkpoint.weights())["a"].scale2.reshape(()) == NOT_ITS_OWN
    assert halfbyte.verify(path).findings == ()


def test_without_provenance_the_reciprocal_counts(tmp_path):
    path = ct_with(tmp_path, {})
    with halfbyte.open(path) as checkpoint:
        scale2 = dict(checkpoint.weights())["a"].scale2.reshape(())
    assert scale2 != NOT_ITS_OWN
    assert scale2 == np.float32(1) / (np.float32(1) / NOT_ITS_OWN)


TAMPERED = {
    "another number": {"a.weight_global_scale": bits(1.0)},
    "its neighbour's neighbour": {"a.weight_global_scale": bits(NOT_ITS_OWN * np.float32(1.000001))},
    "NaN": {"a.weight_global_scale": "7fc00000"},
    "zero": {"a.weight_global_scale": "00000000"},
    "negative": {"a.weight_global_scale": bits(-NOT_ITS_OWN)},
    "not hex": {"a.weight_global_scale": "nothex!!"},
    "too short": {"a.weight_global_scale": "3f80"},
    "a number": {"a.weight_global_scale": 7},
    "null": {"a.weight_global_scale": None},
    "a list": {"a.weight_global_scale": []},
    "no such tensor": {"b.weight_global_scale": bits(1.0)},
    "a tensor that is no scalar": {"a.weight_packed": bits(1.0)},
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampered_provenance_is_ignored_with_a_finding(tmp_path, case):
    path = ct_with(tmp_path, TAMPERED[case])
    (tensor,) = TAMPERED[case]
    with halfbyte.open(path) as checkpoint:
        assert dict(checkpoint.weights())["a"].scale2.reshape(()) == np.float32(1) / (np.float32(1) / NOT_ITS_OWN)
    assert codes(halfbyte.verify(path).findings) == [("HB122", tensor, None)]


def test_provenance_of_four_bytes_that_are_no_number(tmp_path):
    """A tensor of four bytes is not always one float."""
    tensors = named("compressed-tensors", "a", nvfp4(4, 32))
    tensors |= {"b.bytes": np.zeros(4, np.uint8), "b.halves": np.ones(2, BF16), "b.int": np.ones(1, np.int32)}
    table = {name: bits(1.0) for name in tensors if name.startswith("b.")}
    path = save(tmp_path / "x.safetensors", tensors, {PROVENANCE: json.dumps(table)})
    found = [f for f in halfbyte.verify(path).findings if f.code == "HB122"]
    assert sorted(f.tensor for f in found) == sorted(table)


@pytest.mark.parametrize("text", ["{", "[]", "3", "", '{"a":1,"a":2}'])
def test_provenance_that_is_no_table_is_ignored_with_a_finding(tmp_path, text):
    path = ct_with(tmp_path, text)
    assert "HB122" in [f.code for f in halfbyte.verify(path).findings]
    with halfbyte.open(path) as checkpoint:
        assert len(dict(checkpoint.weights())) == 1


# --- completeness: a weight that lacks something is refused, not filled in


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("role", ["scales", "scale2"])
def test_a_weight_without_its_scales_is_refused(tmp_path, dialect, role):
    tensors = named(dialect, "a", nvfp4(4, 32))
    tensors.update(named(dialect, "b", {k: v for k, v in nvfp4(4, 32).items() if k != role}))
    path = save(tmp_path / "x.safetensors", tensors)
    with halfbyte.open(path) as checkpoint, pytest.raises(FormatError) as caught:
        dict(checkpoint.weights())
    assert caught.value.tensor.startswith("b.")
    assert caught.value.file == str(path)


@pytest.mark.parametrize("name", ["svdquant_lora_a", "svdquant_lora_b", "hadamard", "per_expert_scale"])
def test_companions_are_refused_by_name(tmp_path, name):
    tensors = named("modelopt", "a", nvfp4(4, 32)) | {f"a.{name}": np.ones((2, 4), BF16)}
    path = save(tmp_path / "x.safetensors", tensors)
    with halfbyte.open(path) as checkpoint, pytest.raises(FormatError, match=f"a.{name}"):
        dict(checkpoint.weights())


def test_fp8_of_three_axes_is_told_in_words(tmp_path):
    tensors = {"a.weight": np.ones((2, 4, 16), E4M3), "a.weight_scale": np.float32(1)}
    path = save(tmp_path / "x.safetensors", tensors)
    with halfbyte.open(path) as checkpoint, pytest.raises(HalfbyteError):
        checkpoint.load(checkpoint.modules[0])


@pytest.mark.parametrize("name", GOLDENS)
def test_other_files_are_listed(tmp_path, name):
    path = copy_golden(name, tmp_path / "x")
    (path / "tokenizer.json").write_text("{}")
    (path / "sub").mkdir()
    (path / "sub" / "code.py").write_text("")
    (path / ".gitattributes").write_text("")
    with halfbyte.open(path) as checkpoint:
        assert checkpoint.carried_files() == [Path(".gitattributes"), Path("tokenizer.json"), Path("sub/code.py")]


def test_a_dense_checkpoint(tmp_path):
    path = make_float(tmp_path / "x")
    with halfbyte.open(path) as checkpoint:
        assert list(checkpoint.weights()) == []
        assert set(dict(checkpoint.items())) == set(tensors_of(path))
    assert CONFIG["hidden_size"] == HIDDEN != INTER
    assert set(others()) < set(tensors_of(path))
