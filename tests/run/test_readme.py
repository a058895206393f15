"""The README's Python runs, and its claims about the command line hold."""

import re
from pathlib import Path

from halfbyte.cli import VERBS

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_python_blocks_run(capsys):
    blocks = re.findall(r"(<!-- not run:[^\n]*\n)?```python\n(.*?)```", README, re.DOTALL)
    run = [code for skipped, code in blocks if not skipped]
    assert run
    for code in run:
        exec(compile(code, "README.md", "exec"), {})
    assert "(first in the table that accepts)" in capsys.readouterr().out


def test_every_command_is_listed():
    table = README.split("| command |")[1].split("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)[ `]", table, re.MULTILINE)
    assert sorted(VERBS) == sorted(set(listed))


def test_the_file_tree_is_the_tree():
    source = Path(__file__).parents[2] / "src" / "halfbyte"
    named = set(re.findall(r"^  (\w+(?:\.py|/))", README, re.MULTILINE))
    there = {p.name + "/" * p.is_dir() for p in source.iterdir() if not p.name.startswith(("_", "."))} - {"py.typed"}
    assert named == there
