"""Warnings that are said once a process."""

import logging
import threading
import warnings

_lock = threading.Lock()
_said: set[str] = set()


def warn_once(message: str, late: bool = False) -> None:
    """Warn with `message` (a `UserWarning`) unless this process has said it before.

    Args:
        late (`bool`): there is work that an error would lose: where a filter makes an error of the warning, it is
            logged instead.
    """
    with _lock:
        if message in _said:
            return
        _said.add(message)
    try:
        warnings.warn(message, UserWarning, stacklevel=3)
    except UserWarning:
        if not late:
            raise
        logging.getLogger("hf_semspec").warning(message)


def forget() -> None:
    """Let every message be said again."""
    with _lock:
        _said.clear()
