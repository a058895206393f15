"""A coverage-guided fuzz target for untrusted checkpoints; ``make fuzz`` runs it for a bounded time.

    python scripts/fuzz.py [-max_total_time=60] [libFuzzer options] [corpus directories]

Each input becomes a small directory: a safetensors file (with a header that is made consistent half of the time),
an index and the two configs. Opening, inspecting, verifying, converting and dequantizing it may succeed or raise
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
BITS = {"F4": 4, "F6_E2M3": 6, "F32": 32, "I32": 32, "F64": 64, "BF16": 16, "F16": 16}


def build(data: atheris.FuzzedDataProvider, folder: Path) -> None:
    """Write the files that an input describes."""
    header, offset = {}, 0
    for _ in range(data.ConsumeIntInRange(0, 6)):
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
        if data.ConsumeProbability() < 0.1:
            entry[data.PickValueInList(list(entry))] = data.PickValueInList([None, -1, 2**70, [], {}, "x", [2**62, 4]])
        header[f"{module}.{suffix}" if module else suffix] = entry
        offset += nbytes
    if data.ConsumeBool():
        header["__metadata__"] = {data.PickValueInList(["format", "halfbyte.scale2"]): data.ConsumeUnicode(20)}
    text = json.dumps(header).encode() if data.ConsumeProbability() < 0.9 else data.ConsumeBytes(64)
    length = len(text) if data.ConsumeProbability() < 0.9 else data.ConsumeInt(8) % 2**64
    body = bytes(data.ConsumeBytes(min(offset, 4096))).ljust(offset, b"\x38")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + body)
    for name in ("config.json", "hf_quant_config.json", "model.safetensors.index.json"):
        if data.ConsumeProbability() < 0.3:
            (folder / name).write_bytes(config(data, name))


def config(data: atheris.FuzzedDataProvider, name: str) -> bytes:
    """A config or index: of the right form, with odd values, or any bytes."""
    odd = data.PickValueInList(
        [None, 0, [], {}, "NVFP4", ["a"], {"a": {}}, "re:(", 1e300, {"weights": {"num_bits": 4}}]
    )
    if data.ConsumeProbability() < 0.2:
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
    return json.dumps({data.PickValueInList(["quantization_config", "quantization", "text_config"]): section}).encode()


def one(raw: bytes) -> None:
    """Run one input."""
    data = atheris.FuzzedDataProvider(raw)
    folder = Path(tempfile.mkdtemp(prefix="halfbyte-fuzz-"))
    try:
        (folder / "in").mkdir()
        build(data, folder / "in")
        for act in (
            lambda: halfbyte.inspect(folder / "in", stats=True),
            lambda: halfbyte.verify(folder / "in", workers=1),
            lambda: halfbyte.convert(folder / "in", folder / "ct", to="compressed-tensors", prove=True, workers=1),
            lambda: halfbyte.convert(folder / "in", folder / "mo", to="modelopt", prove=True, workers=1),
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
