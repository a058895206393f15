"""The program: ``python -m halfbyte`` and the command ``halfbyte``."""

from __future__ import annotations

import gc
import os
import signal
import sys


def main() -> None:
    """Import the command line and run it; Ctrl-C in the meantime is one line, too."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _stop)
    from halfbyte.cli import main as run

    try:
        run()
    finally:
        gc.freeze()  # or the collector looks through all that is loaded once more, which takes 0.04 s


def _stop(number: int, frame: object) -> None:
    sys.stderr.write("halfbyte: interrupted; nothing was written\n")
    sys.stderr.flush()
    os._exit(128 + number)  # an exception would come out of the import system as a traceback


if __name__ == "__main__":
    main()
