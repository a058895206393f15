"""The exceptions of halfbyte. Each carries its facts as fields, and reads as one line.

::

    HalfbyteError              exit status 2
    ├── UsageError             an argument or option that cannot be meant
    ├── FormatError            a file is not what it must be
    │   └── UnreadDialectError a dialect that is recognised and not read yet
    ├── WeightError            arrays that do not form, join or split as a weight
    ├── LayoutError            a shape or value that a layout cannot hold
    ├── QuantizeError          a tensor that cannot be quantized
    ├── TargetError            an output that cannot be written
    ├── RankError              another rank failed, or did not answer in time
    └── UnavailableError       exit status 3
        ├── MissingExtraError  an optional dependency is not installed
        └── NoKernelError      no kernel accepts a call
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar


class HalfbyteError(Exception):
    """Base of all errors: a message and, where they are known, the facts behind it.

    Args:
        message: what is wrong, in a few words.
        file: path of the file concerned.
        tensor: full name of the tensor on disk.
        index: position inside the tensor.
        got: what came.
        expected: what is needed.
        hint: what to do.
    """

    exit_code: ClassVar[int] = 2

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        index: list[int] | None = None,
        got: Any = None,
        expected: Any = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.tensor = tensor
        self.index = index
        self.got = got
        self.expected = expected
        self.hint = hint

    def __str__(self) -> str:
        where = "".join(f"{printable(part)}: " for part in (self.file, self.tensor) if part)
        at = f" at {self.index}" if self.index is not None else ""
        got = f": got {self.got}" if self.got is not None else ""
        need = f", expected {self.expected}" if self.expected is not None else ""
        hint = f"; {self.hint}" if self.hint else ""
        return printable(f"{where}{self.message}{at}{got}{need}{hint}")

    def facts(self) -> dict[str, Any]:
        """The error as one JSON object."""
        return {
            "error": type(self).__name__,
            "message": self.message,
            "file": self.file,
            "tensor": self.tensor,
            "index": self.index,
            "got": None if self.got is None else str(self.got),
            "expected": None if self.expected is None else str(self.expected),
            "hint": self.hint,
        }


class UsageError(HalfbyteError):
    """An argument or option that cannot be meant."""


class FormatError(HalfbyteError):
    """A file is not what it must be."""


class UnreadDialectError(FormatError):
    """A dialect that is recognised and not read yet."""


class WeightError(HalfbyteError):
    """Arrays that do not form, join or split as a weight."""


class LayoutError(HalfbyteError):
    """A shape or a value that a layout cannot hold."""


class QuantizeError(HalfbyteError):
    """A tensor that cannot be quantized."""


class TargetError(HalfbyteError):
    """An output that cannot be written."""


class RankError(HalfbyteError):
    """Another rank of a model failed, or did not answer in time."""


class UnavailableError(HalfbyteError):
    """Something that this machine or installation does not have."""

    exit_code = 3


class MissingExtraError(UnavailableError):
    """An optional dependency is not installed.

    Args:
        module: the module that was looked for.
        extra: the extra of halfbyte that brings it.
        purpose: what needs it.
    """

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {module}, which is not installed",
            hint=f"run: pip install 'halfbyte[{extra}]'",
        )


class NoKernelError(UnavailableError):
    """No kernel accepts a call; the message lists each candidate and why it declined."""


def printable(text: str) -> str:
    """``text`` as one line that a terminal can show: control characters are escaped."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def few(names: Iterable[str]) -> str:
    """The first five names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
