"""Where the commands print."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def console() -> Any:
    """A `rich` console on standard output.

    Raises:
        ImportError: rich is missing; the message names the command.
    """
    if find_spec("rich") is None:
        raise ImportError('The command line draws its tables with rich: pip install "hf-semspec[demo]"')
    from rich.console import Console

    return Console()
