"""Writes docs/findings.md from the tables of codes and of their explanations.

Usage: ``python scripts/make_docs.py``, and with ``--check`` it writes nothing and exits with 1 where the page is old.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from halfbyte.explanations import EXPLANATIONS
from halfbyte.findings import CODES

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "findings.md"

HEAD: Final = """\
<!-- written by scripts/make_docs.py; change src/halfbyte/findings.py and src/halfbyte/explanations.py instead -->
# Findings

`halfbyte verify --explain CODE` prints any of these. An error makes `verify` exit with 1, a warning does with
`--strict`.

"""


def page() -> str:
    """The page as it must be."""
    rows = [f"| [{code}](#{code.lower()}) | {severity} | {message} |" for code, (severity, message) in CODES.items()]
    table = "\n".join(["| code | severity | meaning |", "|---|---|---|", *rows])
    parts = [
        f"## {code}\n\n*{severity}: {message}*\n\n{EXPLANATIONS[code]}" for code, (severity, message) in CODES.items()
    ]
    return HEAD + "\n\n".join([table, *parts]) + "\n"


def main() -> int:
    """Write the page, or with ``--check`` compare it."""
    if "--check" in sys.argv[1:]:
        return int(not PAGE.is_file() or PAGE.read_text() != page())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
