"""The command line: [`main`] is what `hf-semspec` runs."""

from .command import main

__all__ = ["main"]
