"""``run`` and ``bench``: a checkpoint answers, and tells how fast; small models, on the CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfbyte
from checkpoints import GOLDENS, call, check_failure, command_line, copy_golden, environment, read_json, write_json
from halfbyte import model_bench, timing
from halfbyte.errors import FormatError, UnavailableError, UsageError
from halfbyte.session import Answer, Session, Words
from halfbyte.tools.plan import plan

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CHAT = "{% for one in messages %}{{ one['content'] }} {% endfor %}w9"
"""A template that says all, and w9."""


def add_tokenizer(path: Path, template: str | None = None) -> Path:
    """Token i is the word "wi"; 2 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", eos_token="w2", clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    made.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A Llama of one layer with a tokenizer and no chat template."""
    return add_tokenizer(copy_golden("modelopt_llama_w4a16", tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def dense(tiny, tmp_path_factory):
    """The same model with the values of its weights."""
    path = tmp_path_factory.mktemp("dense") / "model"
    halfbyte.dequantize_checkpoint(tiny, path, dtype="bfloat16")
    return path


@pytest.fixture(scope="module")
def session(tiny):
    return Session.load(tiny, device="cpu")


def said(stderr: bytes) -> bytes:
    """Without what is told where code is compiled for the first time on a machine."""
    lines = stderr.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"compiling for this processor"))


def bytes_of(ids):
    """Each token is a byte."""
    return bytes(ids).decode("utf-8", "replace")


class TestWords:
    def test_no_character_is_cut(self):
        text = "h\xe9llo \u6f22\u5b57 \U0001f600\U0001f1e8\U0001f1ed!"
        words = Words(bytes_of)
        pieces = [words.add(byte) for byte in text.encode()]
        assert [piece for piece in pieces if piece] == list(text)
        assert words.rest() == ""

    def test_what_is_never_whole(self):
        words = Words(bytes_of)
        assert [words.add(byte) for byte in "\U0001f600".encode()[:3]] == ["", "", ""]
        assert words.rest() == "\ufffd"
        assert words.rest() == ""

    def test_rubbish_comes_with_what_follows(self):
        words = Words(bytes_of)
        assert [words.add(byte) for byte in (0x61, 0xFF, 0x62)] == ["a", "", "\ufffdb"]

    def test_a_token_is_written_otherwise_at_the_start(self):
        """As of tokenizers that take a leading space away."""
        words = Words(lambda ids: " ".join(f"w{i}" for i in ids))
        assert [words.add(token) for token in (1, 2, 3)] == ["w1", " w2", " w3"]

    def test_tokens_without_text(self):
        words = Words(lambda ids: "".join(chr(i) for i in ids if i))
        assert [words.add(token) for token in (0, 97, 0, 98)] == ["", "a", "", "b"]

    def test_all_together_are_the_text(self):
        """Whatever tokens come, also in the middle of a character."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            ids = torch.randint(0, 256, (40,), generator=generator).tolist()
            words = Words(bytes_of)
            assert "".join([*map(words.add, ids), words.rest()]).replace("\ufffd", "") == bytes_of(ids).replace(
                "\ufffd", ""
            )


class TestSession:
    def test_tokens(self, session):
        assert session.tokens("w3 w4") == [3, 4]
        assert session.tokens("w3 w4", chat=False) == [3, 4]
        assert session.stops == {2}

    def test_a_chat_template(self, tiny, tmp_path):
        path = add_tokenizer(shutil.copytree(tiny, tmp_path / "a"), CHAT)
        chatting = Session.load(path, device="cpu")
        assert chatting.tokens("w3 w4") == [3, 4, 9]
        assert chatting.tokens("w3", system="w5") == [5, 3, 9]
        assert chatting.tokens("w3 w4", chat=False) == [3, 4]
        with pytest.raises(UsageError, match="a system prompt needs a chat template: got --no-chat"):
            chatting.tokens("w3", system="w5", chat=False)
        chatting.tokenizer.chat_template = "{{ raise_exception('no such role') }}"
        with pytest.raises(UsageError, match="the chat template fails: got no such role; --no-chat does without"):
            chatting.tokens("w3")

    @pytest.mark.parametrize("prompt", ["", " \n", "w1 \udcff"])
    def test_prompts_that_are_none(self, session, prompt):
        with pytest.raises(UsageError, match=r"the prompt is (empty|not UTF-8)"):
            session.tokens(prompt)

    def test_a_system_prompt_without_a_template(self, session):
        with pytest.raises(UsageError, match="a system prompt needs a chat template: got none"):
            session.tokens("w1", system="w2")

    def test_an_answer(self, session):
        pieces = []
        answer = session.answer([3, 4], max_new_tokens=6, emit=pieces.append)
        expected = halfbyte.generate(session.model, [[3, 4]], max_new_tokens=6, stop=[2]).tokens[0]
        assert answer.generated.tokens == [expected]
        assert answer.text == "".join(pieces) == session.tokenizer.decode(expected, skip_special_tokens=True)
        assert len(pieces) == len([token for token in expected if token != 2])
        assert answer.prompt == 2

    def test_rates(self, session):
        answer = session.answer([3, 4], max_new_tokens=6, emit=lambda text: None)
        made = answer.generated
        assert answer.read_rate == made.bytes_per_step * made.steps / made.decode_seconds
        assert answer.share == answer.read_rate / answer.read
        assert (answer.read, answer.measured) == session.read
        assert session.read[1]

    def test_no_step_has_no_rate(self, session):
        answer = session.answer([3, 4], max_new_tokens=1, emit=lambda text: None)
        assert isinstance(answer, Answer)
        assert (answer.read_rate, answer.share) == (None, None)

    def test_a_gpu_that_is_known_is_not_measured(self, session, monkeypatch):
        from halfbyte import plans
        from halfbyte.kernels.cuda.ceilings import CEILINGS

        monkeypatch.setattr(plans, "ceiling", lambda device: ("NVIDIA H200", CEILINGS["NVIDIA H200"]))
        other = Session(model=session.model, tokenizer=None, path=session.path, quantized=True)
        assert other.read == (CEILINGS["NVIDIA H200"].read, False)

    def test_the_stop_ends_a_text(self, tiny, tmp_path):
        path = shutil.copytree(tiny, tmp_path / "a")
        plain = Session.load(path, device="cpu")
        first = plain.answer([3, 4], max_new_tokens=3, emit=lambda text: None).generated.tokens[0][0]
        write_json(path / "config.json", read_json(path / "config.json") | {"eos_token_id": [first, 60]})
        stopped = Session.load(path, device="cpu")
        assert stopped.stops == {first, 60, 2}
        assert stopped.answer([3, 4], max_new_tokens=3, emit=lambda text: None).generated.tokens == [[first]]

    def test_weights_are_counted_once(self, session):
        assert session.weight_bytes == sum(t.nbytes for t in (*session.model.parameters(), *session.model.buffers()))
        assert session.quantized

    def test_no_tokenizer_is_needed_to_measure(self, tmp_path):
        path = copy_golden("modelopt_llama_w4a16", tmp_path / "a")
        assert Session.load(path, device="cpu", tokenizer=False).tokenizer is None
        with pytest.raises(FormatError, match="no tokenizer can be loaded"):
            Session.load(path, device="cpu")


class TestRun:
    def test_text_and_figures(self, tiny, session):
        ran = call("run", tiny, "w3 w4", "-n", 5, "--device", "cpu")
        expected = session.answer([3, 4], max_new_tokens=5, emit=lambda text: None).text
        assert (ran.rc, ran.stdout) == (0, f"{expected}\n")
        heads = [line.split()[0] for line in ran.lines]
        assert heads == ["prompt", "decode", "reads", "memory", "how"]
        assert re.search(r"^prompt +2 tokens in \d+\.\d+ s, with what a first call loads and compiles", ran.stderr)
        assert "tokens/s" in ran.stderr
        assert "at best" in ran.stderr

    def test_quiet(self, tiny):
        ran = call("run", tiny, "w3 w4", "-n", 2, "--device", "cpu", "--quiet")
        assert (ran.rc, ran.stderr) == (0, "")
        assert ran.stdout.endswith("\n")

    def test_json(self, tiny, session):
        ran = call("run", tiny, "w3 w4", "-n", 5, "--device", "cpu", "--json")
        document = ran.document
        answer = session.answer([3, 4], max_new_tokens=5, emit=lambda text: None)
        assert (document["command"], document["ok"], document["text"]) == ("run", True, answer.text)
        assert document["tokens"] == answer.generated.tokens[0]
        assert (document["prompt_tokens"], document["device"], document["quantized"]) == (2, "cpu", True)
        assert document["bytes_per_step"] == answer.generated.bytes_per_step
        assert document["weight_bytes"] == session.weight_bytes
        assert ran.stderr == ""

    def test_drawn_text_has_a_seed(self, tiny):
        said = {
            seed: call("run", tiny, "w3", "-n", 20, "--temperature", 2, "--seed", seed, "--top-k", 30, "-q").stdout
            for seed in (1, 2)
        }
        assert said[1] != said[2]
        again = call("run", tiny, "w3", "-n", 20, "--temperature", 2, "--seed", 1, "--top-k", 30, "-q").stdout
        assert again == said[1]

    def test_dense_weights_are_told(self, dense):
        ran = call("run", dense, "w3 w4", "-n", 3, "--device", "cpu")
        assert ran.rc == 0
        assert ran.lines[-1].split(maxsplit=1)[1].strip() == (
            "no layer of this checkpoint is NVFP4 or FP8: torch ran dense weights"
        )

    def test_a_prompt_from_stdin(self, tiny, session):
        done = subprocess.run(
            command_line("run", tiny, "-", "-n", 3, "--device", "cpu", "-q"), input=b"w3 w4\n", capture_output=True,
            env=environment(), timeout=120, check=False,
        )  # fmt: skip
        expected = session.answer([3, 4], max_new_tokens=3, emit=lambda text: None).text
        assert (done.returncode, done.stdout, said(done.stderr)) == (0, f"{expected}\n".encode(), b"")

    def test_stdin_that_is_not_text(self, tiny):
        done = subprocess.run(
            command_line("run", tiny, "-"), input=b"w3 \xff", capture_output=True, env=environment(), timeout=120,
            check=False,
        )  # fmt: skip
        words = b"halfbyte: the prompt on stdin is not UTF-8 at [3]: got byte FF\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, b"", words)

    def test_a_reader_that_has_gone(self, tiny):
        text = " ".join(command_line("run", tiny, "w3", "-n", 40, "--device", "cpu"))
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"{text} | head -c 1"],
            capture_output=True,
            env=environment(),
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stdout, said(done.stderr)) == (0, b"w", b"")

    def test_stdout_that_is_closed(self, tiny):
        text = " ".join(command_line("run", tiny, "w3", "-n", 2, "--device", "cpu", "-q"))
        done = subprocess.run(
            ["bash", "-c", f"{text} >&-"], capture_output=True, env=environment(), timeout=120, check=False
        )
        assert (done.returncode, said(done.stderr)) == (0, b"")

    def test_interrupted(self, tiny, monkeypatch):
        written = []

        def interrupt(text):
            written.append(text)
            if len(written) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr("halfbyte.cli.run._write", interrupt)
        ran = call("run", tiny, "w3 w4", "-n", 20, "--device", "cpu")
        check_failure(ran, 130, "interrupted")
        assert written[-1] == "\n"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["-n", 0], ["--max-new-tokens is 1 or more", "got 0"]),
            (["--temperature", "-1"], ["temperature is a number from 0 on"]),
            (["--temperature", "nan"], ["temperature is a number from 0 on"]),
            (["--top-p", 2], ["top_p is above 0 and at most 1"]),
            (["--top-k", 0], ["top_k is a number from 1 on"]),
            (["--device", "gpu"], ["unknown device"]),
            (["--device", "meta"], ["unknown device"]),
            (["--dtype", "int8"], ["unknown dtype"]),
            (["--precision", "int4"], ["unknown precision"]),
            (["--layout", "nothing"], ["unknown layout"]),
            (["--system", "w1"], ["a system prompt needs a chat template"]),
            (["-n", 4096], ["more positions than the model has", "2048"]),
        ],
    )
    def test_what_cannot_be_meant(self, tiny, arguments, words):
        check_failure(call("run", tiny, "w3", *arguments), 2, *words)

    def test_prompts_that_are_none(self, tiny):
        check_failure(call("run", tiny, ""), 2, "the prompt is empty")
        check_failure(call("run", tiny, "w1 " * 3000, "--device", "cpu"), 2, "more positions than the model has")

    def test_no_such_gpu(self, tiny, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        check_failure(call("run", tiny, "w3", "--device", "cuda"), 3, "torch sees no such GPU here")

    def test_what_is_no_model(self, tiny, tmp_path):
        check_failure(call("run", tmp_path / "nothing", "w3"), 2, "no such file or directory")
        check_failure(call("run", tmp_path, "w3"), 2, "no safetensors files")
        check_failure(call("run", tiny / "model.safetensors", "w3"), 2, "a directory with a config.json")
        bare = copy_golden("modelopt_llama_w4a16", tmp_path / "bare")
        check_failure(call("run", bare, "w3"), 2, "no tokenizer can be loaded", "tokenizer.json")

    def test_a_model_without_a_head(self, tiny, tmp_path):
        path = shutil.copytree(tiny, tmp_path / "a")
        write_json(path / "config.json", read_json(path / "config.json") | {"architectures": ["LlamaModel"]})
        check_failure(call("run", path, "w3", "--device", "cpu"), 2, "does not generate text", "LlamaModel")

    def test_a_model_that_transformers_does_not_know(self, tiny, tmp_path):
        path = shutil.copytree(tiny, tmp_path / "a")
        config = read_json(path / "config.json") | {"model_type": "nothing", "architectures": ["NothingForCausalLM"]}
        write_json(path / "config.json", config)
        ran = call("run", path, "w3", "--device", "cpu")
        check_failure(ran, 2, "nothing")

    @pytest.mark.parametrize(
        ("verb", "missing"), [("run", "torch"), ("run", "transformers"), ("bench", "transformers")]
    )
    def test_what_is_not_installed(self, tiny, verb, missing):
        code = f"import sys\nsys.modules[{missing!r}] = None\nfrom halfbyte.cli import main\nmain(sys.argv[1:])"
        prompt = ["w3"] if verb == "run" else []
        done = subprocess.run(
            [sys.executable, "-c", code, verb, str(tiny), *prompt], capture_output=True, text=True, env=environment(),
            timeout=120, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (3, "")
        expected = (
            f"halfbyte {verb} needs the package {missing}, which is not installed; run: pip install 'halfbyte[hf]'"
        )
        assert done.stderr == f"halfbyte: {expected}\n"

    def test_control_characters_do_not_reach_a_terminal(self, monkeypatch, capsys):
        from halfbyte.cli import run

        monkeypatch.setattr(run, "is_terminal", lambda stream: True)
        run._write("a\x1b[31m\x07\n\tb\x9b\u200d")
        assert capsys.readouterr().out == "a\\x1b[31m\\x07\n\tb\\x9b\u200d"


class TestBench:
    def test_side_by_side(self, tiny, dense):
        ran = call(
            "bench", tiny, "--against", dense, "--prompt", "8,16", "--new", 4, "--batch", "1,2", "--rounds", 1,
            "--anyway", "--device", "cpu", "--json",
        )  # fmt: skip
        assert ran.rc == 0, ran.stderr
        document = ran.document
        rows = document["rows"]
        key = [(row["prompt"], row["batch"], row["model"]) for row in rows]
        assert key == [(p, b, m) for p in (8, 16) for b in (1, 2) for m in (str(tiny), str(dense))]
        for row in rows:
            assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["step_seconds"])
            assert row["prefill_tokens_per_second"] == pytest.approx(
                row["batch"] * row["prompt"] / row["prefill_seconds"]
            )
            assert row["read"] == pytest.approx(row["bytes_per_step"] / row["step_seconds"])
            assert row["share"] == pytest.approx(row["read"] / document["read"])
        own, other = rows[:2]
        assert own["first_is_faster"] == {"prefill": 1, "decode": 1}
        assert other["first_is_faster"]["decode"] == pytest.approx(other["step_seconds"] / own["step_seconds"])
        assert other["bytes_per_step"] > own["bytes_per_step"]
        assert document["weight_bytes"][str(dense)] > document["weight_bytes"][str(tiny)]

    def test_the_table(self, tiny):
        ran = call("bench", tiny, "--prompt", 8, "--new", 3, "--rounds", 1, "--anyway", "--device", "cpu")
        assert ran.rc == 0
        for text in ("prefill ms", "step ms", "share", "measured in this run", "1 rounds of 3 tokens"):
            assert text in ran.stdout

    def test_it_refuses_where_kernels_are_slowed_down(self, tiny, monkeypatch):
        monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
        ran = call("bench", tiny, "--device", "cpu")
        check_failure(ran, 3, "this would not measure the model", "CUDA_LAUNCH_BLOCKING is set", "--anyway")

    def test_it_refuses_on_a_busy_machine(self, monkeypatch):
        for name in model_bench._SLOW:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        monkeypatch.setattr(os, "getloadavg", lambda: (1.9, 0.0, 0.0))
        assert model_bench.settled("cpu") == []
        monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 0.0, 0.0))
        with pytest.raises(UnavailableError, match=r"other programs kept 2\.0 of 4 cores busy"):
            model_bench.settled("cpu")
        assert len(model_bench.settled("cpu", anyway=True)) == 1

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--new", 1], ["--new is from 2 on"]),
            (["--batch", 0], ["--batch is from 1 on", "got 0"]),
            (["--prompt", "1,0"], ["--prompt is from 1 on"]),
            (["--rounds", 0], ["--rounds is from 1 on"]),
            (["--prompt", "x"], ["--prompt are whole numbers"]),
            (["--prompt", 4096, "--anyway"], ["more positions than the model has"]),
            (["--device", "gpu"], ["unknown device"]),
            (["--against", "nowhere", "--anyway"], ["no such file or directory"]),
        ],
    )
    def test_what_cannot_be_meant(self, tiny, arguments, words):
        check_failure(call("bench", tiny, *arguments, "--quiet"), 2, *words)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")
def test_on_a_gpu(tiny):
    """The same text with and without a graph; plans name the layouts that were loaded."""
    said = {
        graph: call("run", tiny, "w3 w4", "-n", 20, "--device", "cuda", "--json", *([] if graph else ["--no-graph"]))
        for graph in (True, False)
    }
    assert said[True].document["tokens"] == said[False].document["tokens"]
    assert "CUDA graph" in said[True].document["how"]
    model = Session.load(tiny, device="cuda", tokenizer=False).model
    planned = {one["layout"] for one in plan(tiny, device="cuda").facts["layers"]} - {None}
    assert planned == {entry.layout for entry in model.halfbyte.entries} - {""}
    ran = call("bench", tiny, "--prompt", 8, "--new", 4, "--rounds", 1, "--device", "cuda", "--anyway", "--json")
    assert ran.document["gpu"] == torch.cuda.get_device_name()


def test_the_best_of_ten_reads(monkeypatch):
    monkeypatch.setattr(timing, "READ_BYTES", {"cpu": 4096})
    times = iter([9.0, 5.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0])
    monkeypatch.setattr(timing, "elapsed", lambda device, call, count: next(times))
    assert timing.read_rate("cpu") == 1024.0


def test_json_has_no_nan(tiny):
    json.loads(call("run", tiny, "w3", "-n", 1, "--json", "--device", "cpu").stdout, parse_constant=pytest.fail)


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("fuse", [True, False])
def test_plans_are_of_the_model_that_is_loaded(name, fuse):
    """The same products in the same layouts, and the same bytes."""
    from halfbyte import nn

    report = plan(GOLDENS[name], device="cpu", fuse=fuse)
    model = Session.load(GOLDENS[name], device="cpu", fuse=fuse, tokenizer=False).model
    held = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Group | nn.Fp8Linear | nn.Embedding)]
    loaded = [m.packed.shape if hasattr(m, "packed") else m.shape for m in held]
    for experts in (m for m in model.modules() if isinstance(m, nn.Experts)):
        loaded += [experts.gate_up.packed.shape, experts.down.packed.shape]
    planned = []
    for one in report.facts["layers"]:
        experts = [one["experts"]] if one["experts"] else []
        if len(one["shape"]) == 3:  # gate and up (N, H), and down (H, I), as one
            n, hidden, inner = one["shape"]
            planned += [(*experts, n, hidden), (*experts, hidden, inner)] * one["count"]
        elif one["kind"] != "dense":
            planned += [(*experts, *one["shape"])] * one["count"]
    assert sorted(map(tuple, loaded)) == sorted(planned)
    memory = report.facts["memory"]
    assert model.halfbyte.nbytes == pytest.approx(memory["weights"], rel=0.05)
