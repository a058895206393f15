"""``explain`` and ``verify --explain``: every code has its paragraph, in Python, on the command line, in the docs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import halfbyte
from checkpoints import call, check_failure
from halfbyte.errors import UsageError
from halfbyte.explanations import EXPLANATIONS
from halfbyte.findings import CODES

ROOT = Path(__file__).parents[2]


def test_every_code_is_explained_and_nothing_else():
    assert list(EXPLANATIONS) == list(CODES)


@pytest.mark.parametrize("code", EXPLANATIONS)
def test_paragraphs(code):
    """A few sentences on one line, of characters that any terminal has."""
    text = EXPLANATIONS[code]
    assert 2 <= len(re.findall(r"\.(?= |$)", text)) <= 6
    assert text.isascii()
    assert text == " ".join(text.split())
    assert text.endswith(".")
    assert set(re.findall(r"HB\d{3}", text)) <= set(CODES)
    assert halfbyte.explain(code) == halfbyte.explain(f" {code.lower()} ") == text


NEAR = {
    "HB199": ("HB201",),
    "hb10": ("HB101",),
    "103": ("HB103",),
    "NV103": ("HB103",),
    "HB1O3": ("HB103",),
    "nan": ("HB103", "HB118"),
    "frob": ("--explain all",),
    "": ("--explain all",),
    "HB" + "9" * 5000: ("--explain all",),
}


@pytest.mark.parametrize("code", NEAR, ids=lambda c: c[:9])
def test_an_unknown_code_names_near_ones(code):
    with pytest.raises(UsageError) as caught:
        halfbyte.explain(code)
    assert all(known in caught.value.hint for known in NEAR[code])
    line = check_failure(call("verify", "--explain", code), 2, *NEAR[code])
    assert len(line) < 6000
    error = call("verify", "--explain", code, "--json").document["error"]
    assert error["error"] == "UsageError"


@pytest.mark.parametrize("code", CODES)
def test_on_the_command_line(code):
    ran = call("verify", "--explain", code)
    assert (ran.rc, ran.stderr) == (0, "")
    head, empty, *body = ran.stdout.splitlines()
    assert head == f"{code} {CODES[code][0]}: {CODES[code][1]}"
    assert empty == ""
    assert " ".join(body) == EXPLANATIONS[code]  # not broken at hyphens
    assert max(map(len, body)) <= 100


def test_all_prints_the_table():
    ran = call("verify", "--explain", "all")
    assert (ran.rc, ran.stderr) == (0, "")
    assert [line.split(maxsplit=2) for line in ran.stdout.splitlines()] == [[c, *CODES[c]] for c in CODES]


@pytest.mark.parametrize("code", ["all", "HB103"])
def test_one_document(code):
    ran = call("verify", "--explain", code, "--json")
    assert (ran.rc, ran.stderr, ran.stdout.count("\n")) == (0, "", 1)
    document = ran.document
    assert (document["command"], document["ok"], document["findings"]) == ("verify", True, [])
    assert document["explanations"] == [
        {"code": c, "severity": CODES[c][0], "message": CODES[c][1], "explanation": EXPLANATIONS[c]}
        for c in (CODES if code == "all" else [code])
    ]


def test_a_path_beside_explain_is_refused():
    check_failure(call("verify", "model", "--explain", "HB103"), 2, "model")


def test_without_explain_a_path_is_needed():
    check_failure(call("verify", "--strict"), 2, "PATH")


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    assert spec
    assert spec.loader
    make_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_docs)
    assert make_docs.PAGE.read_text() == make_docs.page(), "run: python scripts/make_docs.py"
