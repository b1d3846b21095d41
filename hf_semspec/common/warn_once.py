"""Warnings that are said once a process."""

import threading
import warnings

_lock = threading.Lock()
_said: set[str] = set()


def warn_once(message: str) -> None:
    """Warn with `message` (a `UserWarning`) unless this process has said it before."""
    with _lock:
        if message in _said:
            return
        _said.add(message)
    warnings.warn(message, UserWarning, stacklevel=3)


def forget() -> None:
    """Let every message be said again."""
    with _lock:
        _said.clear()
