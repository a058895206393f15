"""The command line: statuses, one-line errors, JSON documents, and how fast it starts."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest

import halfbyte
from checkpoints import (
    GOLDENS,
    Q,
    call,
    check_failure,
    command_line,
    environment,
    leftovers,
    make_dense,
    make_float,
    run_cli,
    save,
)
from halfbyte.cli import VERBS, main

CT = "compressed-tensors"
NVFP4 = GOLDENS["modelopt_llama_nvfp4"]
RUNNING = ("run", "bench", "tune")
"""Verbs that need torch, or a GPU."""


def outputs(tmp_path):
    """A working command for each verb but those of RUNNING."""
    dense = make_float(tmp_path / "dense")
    return {
        "inspect": ("inspect", NVFP4),
        "verify": ("verify", NVFP4),
        "diff": ("diff", NVFP4, NVFP4),
        "quantize": ("quantize", dense, tmp_path / "q"),
        "convert": ("convert", NVFP4, tmp_path / "c", "--to", CT),
        "shard": ("shard", NVFP4, tmp_path / "s", "--tp", 1),
        "dequantize": ("dequantize", NVFP4, tmp_path / "d"),
        "layouts": ("layouts",),
        "plan": ("plan", NVFP4, "--device", "cuda:sm_90"),
        "doctor": ("doctor",),
    }


# --- help and version


def test_version():
    ran = run_cli("--version")
    assert (ran.rc, ran.stdout, ran.stderr) == (0, f"halfbyte, version {halfbyte.__version__}\n", "")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(flag):
    ran = run_cli(flag)
    assert (ran.rc, ran.stderr) == (0, "")
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", ran.stdout, re.M)
    assert "Exit status: 0" in ran.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb(verb):
    ran = call(verb, "--help")
    assert (ran.rc, ran.stderr) == (0, "")
    assert f"Usage: halfbyte {verb}" in ran.stdout
    assert "--json" in ran.stdout


def test_without_a_verb_the_help_is_shown():
    """As text for people, not as one line of escapes."""
    ran = run_cli()
    assert ran.rc in (0, 2)
    assert "\\n" not in ran.stdout + ran.stderr
    assert "Usage: halfbyte" in ran.stdout + ran.stderr


HEAVY = ("numpy", "numba", "rich", "torch", "ml_dtypes", "safetensors", "transformers")


def loaded(*args):
    """The heavy modules that a command has imported, in a fresh process."""
    code = (
        "import sys\nfrom halfbyte.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print(*sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, env=environment(), check=True
    )
    return done.stderr.splitlines()[-1].split()


@pytest.mark.parametrize("args", [("--help",), ("--version",), *((verb, "--help") for verb in VERBS)], ids=" ".join)
def test_help_imports_nothing_heavy(args):
    assert loaded(*args) == []


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("doctor", *RUNNING)])
def test_no_verb_of_the_file_side_imports_torch(tmp_path, verb):
    found = loaded(*outputs(tmp_path)[verb])
    assert "numpy" in found
    assert not {"torch", "numba", "transformers", "safetensors"} & set(found)


def test_json_needs_no_rich():
    assert "rich" not in loaded("verify", NVFP4, "--json")


def test_help_takes_less_than_150_ms():
    """Of the processor, not by the clock: others may use the machine. The best of several: they slow it down, too."""
    assert min(seconds("--help") for _ in range(8)) < 0.15


def seconds(*args):
    """What a fresh process takes of the processor."""
    process = subprocess.Popen(command_line(*args), env=environment(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


# --- statuses and one-line errors

WRONG = {
    "unknown verb": (["frobnicate"], "frobnicate"),
    "unknown option": (["verify", "x", "--frob"], "--frob"),
    "unknown option of the program": (["--frob"], "--frob"),
    "missing argument": (["verify"], "PATH"),
    "missing target": (["convert", "x", "--to", CT], "DST"),
    "missing --to": (["convert", "x", "y"], "--to"),
    "too many arguments": (["verify", "x", "y"], "y"),
    "not a number": (["verify", "x", "--workers", "many"], "many"),
    "an option without its value": (["convert", "x", "y", "--to"], "--to"),
    "nothing there": (["verify", "./nothing"], "./nothing"),
    "a name of many lines": (["verify", "./a\nb\x1b[31m"], "a\\nb\\x1b[31m"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case):
    args, part = WRONG[case]
    ran = call(*args)
    assert (ran.rc, ran.stdout) == (2, ""), ran
    assert len(ran.lines) == 1
    assert ran.lines[0].startswith("halfbyte: ")
    assert part in ran.lines[0]
    assert "internal error" not in ran.lines[0]


@pytest.mark.parametrize("case", [case for case in WRONG if case != "an option without its value"])
def test_wrong_use_as_json(case):
    """One document on stdout and nothing on stderr, with the same keys for every failure."""
    args, _ = WRONG[case]
    ran = call(*args, "--json")
    assert (ran.rc, ran.stderr) == (2, "")
    document = ran.document
    assert {k: document[k] for k in ("schema", "tool", "ok", "findings")} == {
        "schema": 1,
        "tool": "halfbyte",
        "ok": False,
        "findings": [],
    }
    assert set(document["error"]) == {"error", "message", "file", "tensor", "index", "got", "expected", "hint"}
    assert document["error"]["message"]


def test_json_errors_say_which_command(tmp_path):
    assert call("verify", tmp_path, "--json").document["command"] == "verify"


def test_an_error_as_json_and_as_a_line(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\1")
    error = call("verify", path, "--json").document["error"]
    assert error["error"] == "FormatError"
    assert error["file"] == str(path)
    assert error["got"] == "1 bytes"
    check_failure(call("verify", path), 2, path, "1 bytes")


def test_errors_of_every_verb_are_one_line(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\xff" * 100)
    for args in (
        ("inspect", tmp_path / "broken"),
        ("verify", tmp_path / "broken"),
        ("quantize", tmp_path / "broken", tmp_path / "out"),
        ("convert", tmp_path / "broken", tmp_path / "out", "--to", CT),
        ("dequantize", tmp_path / "broken", tmp_path / "out"),
    ):
        check_failure(call(*args), 2, tmp_path / "broken" / "model.safetensors")
    assert leftovers(tmp_path) == ["broken"]


def test_a_bug_is_one_line_too(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr("halfbyte.tools.verify.header_findings", broken)
    ran = call("verify", NVFP4)
    assert (ran.rc, ran.stdout, len(ran.lines)) == (2, "", 1)
    assert "ZeroDivisionError" in ran.stderr
    assert "HALFBYTE_DEBUG=1" in ran.stderr
    monkeypatch.setenv("HALFBYTE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        call("verify", NVFP4)


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=repr)
def test_out_of_memory_and_ctrl_c(tmp_path, monkeypatch, error):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("halfbyte.tools.verify.header_findings", broken)
    ran = call("verify", NVFP4)
    assert ran.rc == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert len(ran.lines) == 1
    ran = call("verify", NVFP4, "--json")
    assert ran.stderr == ""
    assert not ran.document["ok"]


# --- documents

DOCUMENT = {"schema", "tool", "version", "command", "ok", "findings"}
FACTS = {
    "plan": {"path", "device", "gpu", "read", "tokens", "layers", "steps", "memory", "notes"},
    "inspect": {"path", "dialect", "evidence", "reading", "files", "config", "total", "kinds", "groups"},
    "verify": {"path", "dialect", "reading", "modules", "bytes", "share", "sample", "seconds"},
    "quantize": {
        "src",
        "dst",
        "dialect",
        "quantized",
        "skipped",
        "files",
        "bytes_in",
        "bytes_out",
        "peak_bytes",
        "seconds",
    },
    "diff": {
        "a",
        "b",
        "dialects",
        "reading",
        "same",
        "same_values",
        "different",
        "only_a",
        "only_b",
        "bytes",
        "seconds",
    },
    "convert": {"src", "dst", "from", "to", "reading", "tensors", "files", "bytes_out", "seconds"},
    "shard": {"src", "dst", "dialect", "mode", "degree", "ranks", "modules", "whole", "files", "bytes_out", "proven"},
    "layouts": {"layouts"},
    "dequantize": {"src", "dst", "dtype", "reading", "tensors", "files", "bytes_in", "bytes_out", "seconds"},
    "doctor": {
        *("python", "platform", "cores", "cpu", "packages", "extras", "layouts", "quantize", "dequantize", "gpus"),
        *("kernels", "triton", "choices"),
    },
}


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in RUNNING])
def test_one_document_on_stdout_and_nothing_on_stderr(tmp_path, verb):
    ran = run_cli(*outputs(tmp_path)[verb], "--json")
    assert (ran.rc, ran.stderr) == (0, "")
    assert ran.stdout.count("\n") == 1
    document = ran.document
    assert set(document) >= DOCUMENT | FACTS[verb]
    assert (document["schema"], document["tool"], document["version"]) == (1, "halfbyte", halfbyte.__version__)
    assert (document["command"], document["ok"]) == (verb, True)


@pytest.mark.parametrize("verb", ["quantize", "convert", "shard", "dequantize"])
def test_dry_run_writes_nothing(tmp_path, verb):
    args = outputs(tmp_path)[verb]
    before = leftovers(tmp_path)
    ran = call(*args, "--dry-run")
    assert (ran.rc, ran.stderr) == (0, "")
    assert "would write" in ran.stdout
    assert "wrote" not in ran.stdout
    assert call(*args, "--dry-run", "--json").document["dry_run"] is True
    assert leftovers(tmp_path) == before


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in ("doctor", *RUNNING)])
def test_quiet(tmp_path, verb):
    more = ("--share-scale2",) if verb == "quantize" else ()
    ran = call(*outputs(tmp_path)[verb], *more, "--quiet")
    assert (ran.rc, ran.stdout, ran.stderr) == (0, "", "")


def test_quiet_and_json_together(tmp_path):
    assert call("verify", NVFP4, "--quiet", "--json").document["ok"]


# --- terminals, pipes and colour


def on_a_terminal(*args, env=None):
    """Everything that a terminal of 100 columns would be sent."""
    leader, follower = pty.openpty()
    with subprocess.Popen(
        command_line(*args),
        stdout=follower,
        stderr=follower,
        stdin=subprocess.DEVNULL,
        env=environment(TERM="xterm-256color", COLUMNS="100", **(env or {})),
    ) as process:
        os.close(follower)
        data = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:
                break
            if not piece:
                break
            data += piece
        os.close(leader)
    return process.returncode, data.decode()


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
COLOURS = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|4[0-7]|38|48)(?:;\d+)*m")


def test_colour_on_a_terminal_unless_no_color(tmp_path):
    path = make_dense(tmp_path / "x", change={f"{Q}.weight_scale_2": None})
    rc, text = on_a_terminal("verify", path)
    assert rc == 1
    assert COLOURS.search(text)
    rc, text = on_a_terminal("verify", path, env={"NO_COLOR": "1"})
    assert rc == 1
    assert not COLOURS.search(text)
    assert "HB105 error" in COLOUR.sub("", text)


@pytest.mark.parametrize("verb", ["inspect", "verify", "diff", "quantize", "convert", "shard", "dequantize", "layouts"])
def test_every_verb_on_a_terminal(tmp_path, verb):
    rc, text = on_a_terminal(*outputs(tmp_path)[verb])
    assert rc == 0
    assert "Traceback" not in text


def test_no_escapes_in_a_pipe(tmp_path):
    path = make_dense(tmp_path / "x", change={f"{Q}.weight_scale_2": None})
    for args in (("verify", path), ("inspect", path)):
        ran = run_cli(*args)
        assert "\x1b" not in ran.stdout + ran.stderr


@pytest.mark.parametrize("args", [("inspect", NVFP4), ("inspect", NVFP4, "--json"), ("verify", NVFP4)], ids=str)
def test_a_reader_that_has_gone(args):
    """halfbyte inspect ... | head: no traceback, and not the status of a found error."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command_line(*args), stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), check=False
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_reader_that_has_gone_before_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = command_line("verify", "./nothing", "--json")
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), check=False)
    os.close(writer)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


FULL = [("inspect", NVFP4), ("inspect", NVFP4, "--json"), ("--help",), ("verify", NVFP4), ("doctor",)]


def test_a_full_disk_under_the_document_of_an_error():
    with open("/dev/full", "w") as full:
        command = command_line("verify", "./nothing", "--json")
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("args", FULL, ids=str)
def test_a_full_disk_under_stdout(args):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command_line(*args), stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False
        )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream(tmp_path, stream):
    """As from cron, or with >&-."""
    closed = {"stdout": ">&-", "stderr": "2>&-"}[stream]
    command = " ".join(map(repr, command_line("verify", NVFP4)))
    done = subprocess.run(
        ["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0
    assert "internal error" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_locale_without_unicode(tmp_path):
    save(tmp_path / "model.safetensors", {"schräg.weight": np.ones((2, 2), np.float32)})
    for args in (("inspect", tmp_path), ("verify", tmp_path), ("inspect", tmp_path / "größe")):
        ran = run_cli(*args, env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
        assert ran.rc in (0, 2)
        assert "internal error" not in ran.stderr
        assert "Traceback" not in ran.stderr


def test_in_any_directory(tmp_path):
    """Modules of the same names as those of the library beside it change nothing for the installed command."""
    for name in ("json", "numpy", "click", "rich"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('mine')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "halfbyte", "verify", str(NVFP4)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- main and doctor


def test_main_takes_arguments(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(NVFP4), "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_doctor():
    ran = run_cli("doctor", "--json")
    assert ran.rc == 0
    document = ran.document
    assert document["packages"]["numpy"] == np.__version__
    assert document["cores"] >= 1
    for extra, state in document["extras"].items():
        assert state == "ready" or state == f"run: pip install 'halfbyte[{extra}]'"
    assert run_cli("doctor").rc == 0


def test_doctor_without_any_extra(monkeypatch):
    from halfbyte.tools import doctor as module

    base = {"numpy", "ml_dtypes", "click", "rich"}
    monkeypatch.setattr(module, "_version", lambda name: "1" if name in base else None)
    facts = module.doctor().facts
    assert facts["gpus"] == []
    assert all(state.startswith("run: pip install") for state in facts["extras"].values())


def test_doctor_says_what_moves_layouts(monkeypatch):
    from halfbyte.tools import doctor as module

    monkeypatch.setattr(module.jit, "missing", lambda: None)
    assert {module.doctor().facts[what] for what in ("layouts", "quantize", "dequantize")} == {"compiled by Numba"}
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "numba", None)
    reason = "numba is not installed; run: pip install 'halfbyte[cpu]'"
    facts = module.doctor().facts
    assert facts["layouts"] == f"moved by NumPy: {reason}"
    assert facts["quantize"] == f"by NumPy: {reason}"
    assert facts["dequantize"] == f"by NumPy or torch: {reason}"


def a_kernel(name, refuse, module="halfbyte.kernels.cuda.some"):
    """One in the table for linear; those for GPUs are in the folder cuda."""
    from halfbyte.kernels import Kernel, LinearArgs
    from halfbyte.kernels.base import linear_cost, nothing_to_load

    def launch(args):
        raise AssertionError("doctor runs nothing")

    launch.__module__ = module
    return Kernel(
        name=name,
        bundle=LinearArgs,
        description="",
        refuse=refuse,
        load=nothing_to_load,
        launch=launch,
        cost=linear_cost,
    )


def test_doctor_says_which_kernels_run(monkeypatch):
    from halfbyte import tiers
    from halfbyte.kernels import int8
    from halfbyte.tools import doctor as module

    def hopper(call):
        few = () if call.rows <= 16 else ("takes up to 16 tokens",)
        reads = () if call.layout.key == "gguf" else ("reads the layout gguf",)
        return (() if call.capability == 90 else (f"is for sm_90, not sm_{call.capability}",)) + few + reads

    def broken(call):
        raise OSError("libcudart is damaged")

    kernels = (
        a_kernel("hopper", hopper),
        a_kernel("both", lambda call: ("needs one thing", "needs another")),
        a_kernel("broken", broken),
        a_kernel("arrays", lambda call: ("takes NumPy arrays",) * (call.library != "numpy"), "halfbyte.kernels.some"),
        int8.NUMPY,  # of another op
    )
    monkeypatch.setattr(tiers, "KERNELS", kernels)
    monkeypatch.setattr(module, "_version", lambda name: "1")
    same = {"both": "needs one thing, and needs another", "broken": "OSError: libcudart is damaged"}
    for capabilities, state in (
        ((), "is for sm_90, not sm_0"),
        (("8.0",), "is for sm_90, not sm_80"),
        (("8.0", "9.0"), "ready"),
    ):
        gpus = [{"name": "GPU", "bytes": 1 << 30, "capability": of} for of in capabilities]
        monkeypatch.setattr(module, "_gpus", lambda gpus=gpus: gpus)
        assert module.doctor().facts["kernels"] == {"cpu": {"arrays": "ready"}, "gpu": {"hopper": state, **same}}
    lines = [line.split(maxsplit=1) for line in call("doctor").stdout.splitlines()]
    assert ["hopper", "on the GPU: ready"] in [[head, *(text.strip() for text in rest)] for head, *rest in lines]
    assert call("doctor", "--json").document["kernels"]["cpu"] == {"arrays": "ready"}


def test_doctor_on_this_machine():
    """Each kernel of the table is there; the reference for NumPy needs nothing."""
    from halfbyte.kernels import KERNELS
    from halfbyte.tools.doctor import doctor

    facts = doctor().facts
    held = facts["kernels"]["cpu"] | facts["kernels"]["gpu"]
    assert sorted(held) == sorted(kernel.name for kernel in KERNELS if kernel.op == "linear")
    assert held["reference-numpy"] == "ready"
    assert facts["packages"]["torch"] or "torch, which is not installed" in held["reference-torch"]
    assert facts["packages"]["numba"] or held["cpu-portable"].startswith("numba is not installed; run: pip install")
    assert facts["triton"] == "Gluon tested with 3.6 to 3.8, short launches with 3.6 and 3.8"


def test_doctor_survives_a_broken_torch(monkeypatch):
    """Probes may fail without stopping: a torch that cannot be imported is a fact about the machine."""
    monkeypatch.setitem(sys.modules, "torch", None)
    from halfbyte.tools import doctor as module

    monkeypatch.setattr(module, "_version", lambda name: "1")
    ran = call("doctor")
    assert ran.rc == 0
    assert "internal error" not in ran.stderr
