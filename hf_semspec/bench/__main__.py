"""Runs `python -m hf_semspec.bench`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
