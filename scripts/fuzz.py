"""A coverage-guided fuzz target for untrusted checkpoints; ``make fuzz`` runs it for a bounded time.

    python scripts/fuzz.py [-max_total_time=60] [libFuzzer options] [corpus directories]

Each input becomes a small directory: a safetensors file (with a header that is made consistent half of the time),
an index and the two configs; half of the time its tensors are those of layers or stacks of experts, some of them
changed. Opening, inspecting, verifying, comparing, converting, quantizing and dequantizing it may succeed or raise
HalfbyteError; anything else, a hang or a large allocation is a bug.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import tempfile
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["halfbyte"]):
    import halfbyte
    from halfbyte.errors import HalfbyteError
    from halfbyte.tools import convert, dequantize, inspect, verify  # noqa: F401 - instrumented

warnings.simplefilter("ignore")

SUFFIXES = ["weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "bias"]
DTYPES = ["U8", "I8", "F4", "F8_E4M3", "F8_E8M0", "F32", "BF16", "F16", "F64", "I32", "BOOL", "F6_E2M3"]
STEMS = ["gate_up_proj", "down_proj", "w13", "w2", "up_proj", "gate_proj", "q_proj"]
ORDERS = ["concatenated", "up_first", "interleaved"]
KINDS = ["nvfp4", "packed", "mxfp4", "gpt-oss", "fp8", "block", "dense"]
TYPES = ["qwen3_moe", "gpt_oss", "llama4", "mixtral", 7]
BITS = {"F4": 4, "F6_E2M3": 6, "F32": 32, "I32": 32, "F64": 64, "BF16": 16, "F16": 16}


def layer(data: atheris.FuzzedDataProvider) -> dict[str, tuple[str, list[int]]]:
    """Name -> (dtype, shape) of a layer, a stack of experts, or one expert of a layer."""
    kind, stem = data.PickValueInList(KINDS), data.PickValueInList(STEMS)
    n, k = data.PickValueInList([1, 2, 3, 16, 128, 130, 0]), data.PickValueInList([16, 32, 64, 160, 0])
    experts = data.PickValueInList([[], [], [1], [2], [3], [0]])
    columns, dotted = data.ConsumeBool(), data.ConsumeBool() and kind != "gpt-oss"
    parent = data.PickValueInList(["m.layers.0.mlp.experts", "m.layers.1.mlp.experts", "a.moe", ""])
    parent = f"{parent}." if parent else ""
    expert = "" if experts else data.PickValueInList(["", "0.", "1.", "01."])
    name = f"{parent}{expert}{stem}{'' if experts and not dotted else '.'}"
    end = "_" if experts and not dotted else ""
    main = end + "weight" if not end or data.ConsumeBool() else ""
    rows = lambda width: [*experts, width, n] if columns and experts else [*experts, n, width]  # noqa: E731
    number = data.PickValueInList([[], [1], experts, [*experts, 1], [*experts, 2]])
    float_ = data.PickValueInList(["F32", "BF16"])
    if kind == "nvfp4":
        found = {main: ("U8", rows(k // 2)), f"{end}weight_scale": ("F8_E4M3", rows(k // 16))}
        found |= {f"{end}weight_scale_2": (float_, number), f"{end}input_scale": (float_, number)}
    elif kind == "packed":
        found = {"weight_packed": ("U8", rows(k // 2)), "weight_scale": ("F8_E4M3", rows(k // 16))}
        found |= {"weight_global_scale": (float_, number), "input_global_scale": (float_, number)}
    elif kind == "mxfp4":
        codes = data.PickValueInList(["weight", "weight_packed"])
        found = {codes: ("U8", rows(k // 2)), "weight_scale": ("U8", rows(k // 32))}
    elif kind == "gpt-oss":
        found = {"_blocks": ("U8", [*experts, n, k // 32, 16]), "_scales": ("U8", [*experts, n, k // 32])}
    elif kind in ("fp8", "block"):
        scale = [-(-n // 128), -(-k // 128)] if kind == "block" else data.PickValueInList([number, [n], [n, 1]])
        found = {main: ("F8_E4M3", rows(k)), f"{end}weight_scale{'_inv' if kind == 'block' else ''}": (float_, scale)}
    else:
        found = {main: ("BF16", rows(k))}
    if data.ConsumeBool():
        found[f"{end}bias"] = (float_, [*experts, n])
    return {name + suffix: entry for suffix, entry in found.items()}


def build(data: atheris.FuzzedDataProvider, folder: Path) -> None:
    """Write the files that an input describes."""
    header, offset = {}, 0
    for _ in range(data.ConsumeIntInRange(1, 4) if data.ConsumeBool() else 0):
        for name, (dtype, shape) in layer(data).items():
            count = 1
            for size in shape:
                count *= size
            nbytes = count * BITS.get(dtype, 8) // 8
            if nbytes <= 1 << 16 and data.ConsumeProbability() < 0.97 and name not in header:
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
                offset += nbytes
    for _ in range(data.ConsumeIntInRange(0, 6) if not header or data.ConsumeProbability() > 0.7 else 0):
        module = data.PickValueInList(["a", "b.layers.0", "", "é", "x.y.q_proj"])
        suffix = data.PickValueInList(SUFFIXES) if data.ConsumeBool() else data.ConsumeUnicode(8)
        dtype = data.PickValueInList(DTYPES)
        shape = [
            data.ConsumeIntInRange(0, 20) * data.PickValueInList([1, 8, 16])
            for _ in range(data.ConsumeIntInRange(0, 3))
        ]
        count = 1
        for size in shape:
            count *= size
        nbytes = count * BITS.get(dtype, 8) // 8
        if nbytes > 1 << 16:
            continue
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        if data.ConsumeProbability() > 0.9:
            entry[data.PickValueInList(list(entry))] = data.PickValueInList([None, -1, 2**70, [], {}, "x", [2**62, 4]])
        header[f"{module}.{suffix}" if module else suffix] = entry
        offset += nbytes
    if data.ConsumeBool():
        key = data.PickValueInList(["format", "halfbyte.scale2", "halfbyte.experts"])
        stated = {"gate_up": data.PickValueInList([*ORDERS, 3]), "columns": data.PickValueInList([True, False, 3])}
        table = {name: stated if "experts" in key else ["3f800000"] for name in header}
        header["__metadata__"] = {key: data.ConsumeUnicode(20) if data.ConsumeBool() else json.dumps(table)}
    text = json.dumps(header).encode() if data.ConsumeProbability() < 0.9 else data.ConsumeBytes(64)
    length = len(text) if data.ConsumeProbability() < 0.9 else data.ConsumeInt(8) % 2**64
    for name, often in (("config.json", 0.7), ("hf_quant_config.json", 0.2), ("model.safetensors.index.json", 0.05)):
        if data.ConsumeProbability() > 1 - often:
            (folder / name).write_bytes(config(data, name))
    body = bytes(data.ConsumeBytes(min(offset, 4096))).ljust(offset, b"\x38")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + body)


def config(data: atheris.FuzzedDataProvider, name: str) -> bytes:
    """A config or index: of the right form, with odd values, or any bytes."""
    odd = data.PickValueInList(
        [None, 0, [], {}, "NVFP4", ["a"], {"a": {}}, "re:(", 1e300, {"weights": {"num_bits": 4}}]
    )
    if data.ConsumeProbability() > 0.9:
        return bytes(data.ConsumeBytes(48))
    if "index" in name:
        return json.dumps(
            {"weight_map": {"a.weight": data.PickValueInList(["model.safetensors", "../x", odd])}}
        ).encode()
    keys = [
        "quant_algo",
        "quant_method",
        "config_groups",
        "ignore",
        "quantized_layers",
        "kv_cache_scheme",
        "exclude_modules",
    ]
    section = {
        data.PickValueInList(keys): odd,
        "quant_method": data.PickValueInList(["modelopt", "compressed-tensors", odd]),
    }
    value = {data.PickValueInList(["quantization_config", "quantization", "text_config"]): section}
    if data.ConsumeBool():
        value |= {"model_type": data.PickValueInList(TYPES), "hidden_size": data.PickValueInList([16, 32, 128, "x"])}
    return json.dumps(value).encode()


def one(raw: bytes) -> None:
    """Run one input."""
    data = atheris.FuzzedDataProvider(raw)
    folder = Path(tempfile.mkdtemp(prefix="halfbyte-fuzz-"))
    try:
        (folder / "in").mkdir()
        form = data.PickValueInList(["split", "stacked", "stacked-rows", "stacked-columns"])
        options = {"experts": form, "mxfp4": data.PickValueInList([None, "keep", "nvfp4"]), "lossy": data.ConsumeBool()}
        options["reading"] = halfbyte.Reading(gate_up=data.PickValueInList([None, *ORDERS]))
        layout = data.PickValueInList(
            ["rows", "atoms128x4", "marlin", "marlin(scale_format=s0e5m3, lossy=True)", "gguf"]
        )
        build(data, folder / "in")
        for act in (
            lambda: halfbyte.inspect(folder / "in", stats=True),
            lambda: halfbyte.verify(folder / "in", workers=1),
            lambda: halfbyte.convert(folder / "in", folder / "ct", to="compressed-tensors", prove=True, workers=1),
            lambda: halfbyte.convert(folder / "in", folder / "mo", to="modelopt", prove=True, workers=1),
            lambda: halfbyte.convert(folder / "in", folder / "ex", to="modelopt", prove=True, workers=1, **options),
            lambda: halfbyte.convert(folder / "in", folder / "packed", layout=layout, prove=True, workers=1),
            lambda: halfbyte.convert(folder / "packed", folder / "back", to="modelopt", prove=True, workers=1),
            lambda: halfbyte.shard(folder / "in", folder / "tp", tp=2, vocab=True, row=["*b*"], workers=1),
            lambda: halfbyte.shard(folder / "in", folder / "ep", ep=2, workers=1),
            lambda: halfbyte.diff(folder / "in", folder / "in", workers=1),
            lambda: halfbyte.dequantize_checkpoint(folder / "in", folder / "dense", workers=1),
            lambda: halfbyte.quantize_checkpoint(folder / "in", folder / "q", workers=1),
        ):
            try:
                act()
            except HalfbyteError as error:
                str(error)
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert not left, f"left behind: {left}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
