"""Writes docs/findings.md from the tables of codes and of their explanations, and the drawings in layouts' docstrings.

Usage: ``python scripts/make_docs.py``, and with ``--check`` it writes nothing and exits with 1 where one is old.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from halfbyte.explanations import EXPLANATIONS
from halfbyte.findings import CODES
from halfbyte.layouts import LAYOUTS
from halfbyte.layouts.drawing import with_drawings

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


def sources() -> dict[Path, str]:
    """The modules of layouts as they must be."""
    files = {}
    for module in {type(layout).__module__ for layout in LAYOUTS}:
        docstring, file = sys.modules[module].__doc__ or "", Path(sys.modules[module].__file__ or "")
        own = [layout for layout in LAYOUTS if type(layout).__module__ == module]
        files[file] = file.read_text().replace(docstring, with_drawings(docstring, own), 1)
    return files


def main() -> int:
    """Write the page and the drawings, or with ``--check`` compare them."""
    files = {PAGE: page(), **sources()}
    if "--check" in sys.argv[1:]:
        return int(any(not file.is_file() or file.read_text() != text for file, text in files.items()))
    PAGE.parent.mkdir(exist_ok=True)
    for file, text in files.items():
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
