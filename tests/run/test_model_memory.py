"""Loading a model takes its checkpoint's memory and no more, of the host's and of the device's."""

from __future__ import annotations

import gc
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.random_models import RandomModel, llama

import halfbyte
from gpu_codecs import needs_gpu, needs_triton

pytest.importorskip("transformers")

FIELDS = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 8192, "vocab_size": 8192, "max_position_embeddings": 512,
}  # fmt: skip
MOST = 1.1
WAYS = {
    "halfbyte": "halfbyte.hf.from_pretrained(path)",
    "transformers": "transformers.AutoModelForCausalLM.from_pretrained(path)",
}
CHILD = """
import sys
import torch, transformers, halfbyte.hf
import transformers.models.llama.modeling_llama

path = sys.argv[1]
print("imported", flush=True)
sys.stdin.readline()
model = {load}
print("loaded", flush=True)
sys.stdin.readline()
with torch.inference_mode():
    logits = model(torch.tensor([[1, 2, 3]])).logits
assert logits.isfinite().all() and logits.std() > 0.1
print("works", flush=True)
"""


def anonymous(pid):
    """RssAnon of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with more than 1 GB of shards, the bytes of its tensors and those of the largest."""
    path = tmp_path_factory.mktemp("model")
    made = RandomModel(llama(num_hidden_layers=31, **FIELDS))
    stored = made.write(path)
    assert stored > 1e9
    yield path, stored, FIELDS["vocab_size"] * FIELDS["hidden_size"] * 2
    for file in path.iterdir():
        file.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("way", WAYS)
def test_loading_takes_the_checkpoints_memory(checkpoint, way):
    path, stored, largest = checkpoint
    environment = os.environ | {"PYTHONPATH": str(Path(halfbyte.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", CHILD.format(load=WAYS[way]), str(path)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        assert child.stdout.readline() == "imported\n"
        before = top = anonymous(child.pid)
        child.stdin.write("\n")
        while not select.select([child.stdout], [], [], 0.001)[0]:
            top = max(top, anonymous(child.pid))
        assert child.stdout.readline() == "loaded\n"
        after = anonymous(child.pid)
        child.stdin.write("\n")
        assert child.stdout.readline() == "works\n"
    assert top - before <= MOST * (stored + largest)
    assert after - before <= MOST * stored


@pytest.mark.gpu
@needs_triton
@needs_gpu
@pytest.mark.parametrize("way", WAYS)
def test_loading_takes_the_packed_bytes_of_the_device(tmp_path, way):
    transformers = pytest.importorskip("transformers")
    import halfbyte.hf

    stored = RandomModel(llama(num_hidden_layers=16, **FIELDS), "cuda").write(tmp_path)
    load = {
        "halfbyte": halfbyte.hf.from_pretrained,
        "transformers": transformers.AutoModelForCausalLM.from_pretrained,
    }[way]
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load(tmp_path, device_map="cuda")
    top = torch.cuda.max_memory_allocated() - before
    gc.collect()
    after = torch.cuda.memory_allocated() - before
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cuda"}
    assert 0.9 * stored <= after <= MOST * stored
    assert top <= MOST * stored
