"""Who is told what runs now."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

MINUTE = 60.0
Progress = Callable[[str], None]


def silent(message: str) -> None:
    """Report nothing."""


class ProgressLine:
    """What runs now, on standard error: one line that is written over; in a log a line for every step of a sweep, and
    else one a minute."""

    def __init__(self) -> None:
        self.said = -MINUTE

    def __call__(self, message: str) -> None:
        """Show `message`; one that begins with a bracket is a step."""
        if sys.stderr.isatty() and not message.startswith("["):
            print(f"\r\x1b[2K{message}", end="", file=sys.stderr, flush=True)
        elif message.startswith("[") or time.monotonic() - self.said > MINUTE:
            print(("\r\x1b[2K" if sys.stderr.isatty() else "") + message, file=sys.stderr, flush=True)
            self.said = time.monotonic()
